"""Exit code 3: the machine lacks what was asked, and nothing that was asked for could run. A session that says 0 has run something."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from rich.console import Console

from alpha import cli, errors
from alpha.backends.cuda.catalogue import fill
from alpha.cli import auditing, gating
from alpha.cli.arguments import parser
from alpha.component import Catalogue
from alpha.gates import audit, run
from alpha.gates.adversarial import catches
from alpha.gates.run import Done, Task
from alpha.registry.judge import FAIL, NOT_RUN, Judgement
from alpha.registry.status import GateStatus, Registry, Status
from alpha.train.catalogue import catalogue

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

@pytest.mark.h100
def test_on_a_gpu():
    pass

@pytest.mark.h100
@pytest.mark.parametrize("n", [1, 2])
def test_more(n):
    pass

def test_anywhere():
    pass

def test_skipped():
    pytest.skip("NOT RUN: no browser")

@pytest.mark.xfail(strict=True)
def test_known_to_fail():
    assert False

def test_broken():
    assert False
"""
GATE = """
@pytest.mark.gate("parity")
def test_parity(measured):
    pass
"""


def session(folder: Path, *arguments: str, gpu: bool = False, gate: bool = False) -> tuple[int, str]:
    """(exit code, output) of pytest under the gates' plugin, on a machine without a GPU or one made up. `gate`: among tests of a gate, for
    which the session takes the digests of all components."""
    (folder / "test_made.py").write_text(TESTS + GATE * gate)
    here = "plugin.hopper, plugin.compiled = (lambda: ''), (lambda: None)" if gpu else "plugin.hopper = lambda: 'no Hopper GPU'"
    (folder / "conftest.py").write_text(f"from alpha.gates import plugin\n{here}\n")
    plugins = [word for name in ("no:cacheprovider", "no:hypothesispytest", "no:anyio", "alpha.gates.plugin") for word in ("-p", name)]
    done = warm.run(["-m", "pytest", "-q", *plugins, "--evidence", "none", "-c", ROOT / "pyproject.toml", "--rootdir", folder,
                     folder / "test_made.py", *arguments], cwd=folder, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_why_a_gate_failed_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks like markup in the words of an error ends no command and hides nothing."""
    why, (out, text) = "OSError: [/usr/lib/x.so] is no library [of ours]", _out()
    gates = {"parity": GateStatus("parity", FAIL, why)}
    monkeypatch.setattr(Registry, "status", lambda self, component: Status(component, gates))
    assert gating.cmd_explain("gelu.f32.cpu", console=out) == 1 and why in text.getvalue()


def test_the_h100_suite_without_a_gpu_is_3(tmp_path: Path) -> None:
    code, stated = session(tmp_path, "-m", "h100", gate=True)
    assert code == 3 and "h100: 0 executed of 3 selected" in stated and "none of the 3 tests asked for could run" in stated, stated
    assert "declared" not in stated, "no gate was asked for"


def test_the_h100_suite_counts_what_ran(tmp_path: Path) -> None:
    code, stated = session(tmp_path, "-m", "h100", gpu=True)
    assert code == 0 and "h100: 3 executed of 3 selected" in stated and "NOT_RUN" not in stated, stated


@pytest.mark.parametrize(("arguments", "code"), [
    (["-k", "anywhere or gpu"], 0),  # one of two ran
    (["-k", "skipped"], 3),
    (["-k", "known_to_fail"], 0),
    (["-k", "broken or gpu"], 1),  # a failure comes first
    (["-k", "skipped", "--collect-only"], 0),
    (["-k", "parity", "--stale"], None),  # decided by what is stale; see below
])  # fmt: skip
def test_sessions(tmp_path: Path, arguments: list[str], code: int | None) -> None:
    found, stated = session(tmp_path, *arguments, gate=code is None)
    if code is None:  # a test that asks for the gate and measures nothing is red; where nothing is stale there is nothing to do
        registry = Registry(catalogue())
        stale = any("parity" in registry.status(c.id).missing for c in catalogue() if c.backend != "cuda")
        code = 1 if stale else 0
    assert found == code, stated


def _out() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200), text


@pytest.fixture
def gpu_alone(monkeypatch: pytest.MonkeyPatch) -> Catalogue:
    """A catalogue of nothing but kernels of the GPU, on a machine without one."""
    catalogue = Catalogue()
    fill(catalogue)
    monkeypatch.setattr(gating, "catalogue", lambda: catalogue)
    monkeypatch.setattr(run, "why_not_here", lambda c: "needs sm_90a: none here")
    return catalogue


def test_a_gate_run_of_nothing_that_can_run_here(gpu_alone: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    out, text = _out()
    assert gating.cmd_run(console=out) == 3 and f"NOT_RUN {len(gpu_alone)} components" in text.getvalue()
    monkeypatch.setattr(run, "_due", lambda registry, ids, gates, stale: ((c, ["parity"]) for c in list(gpu_alone)[:2]))
    out, text = _out()
    assert gating.cmd_run(stale=True, console=out) == 3 and "NOT_RUN 2 components" in text.getvalue()
    monkeypatch.setattr(run, "_due", lambda registry, ids, gates, stale: iter(()))
    out, text = _out()
    assert gating.cmd_run(stale=True, console=out) == 0 and "nothing to run" in text.getvalue()
    assert gating.cmd_run([next(iter(gpu_alone)).id], stale=True, console=out) == 0, "named, but nothing of it is stale"


def test_a_gate_run_whose_verdicts_are_all_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [Judgement(NOT_RUN, ("no clock",))]
    monkeypatch.setattr(run, "tasks", lambda *a, **k: [Task(catalogue()["gelu.f32.cpu"], "perf", 1.0)])
    monkeypatch.setattr(run, "run", lambda *a, **k: Done(records=[object()], judgements=verdicts))  # type: ignore[list-item]
    assert gating.cmd_run(["gelu.f32.cpu"], console=_out()[0]) == 3
    verdicts.append(Judgement("FAIL", ("wrong",)))
    assert gating.cmd_run(["gelu.f32.cpu"], console=_out()[0]) == 1


def test_catches_and_audits_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catches, "run", lambda *a, **k: [])
    out, text = _out()
    assert auditing.cmd_catches(["cuda."], seeded=0, console=out) == 3 and "none of these faults can run" in text.getvalue()
    monkeypatch.setattr(audit, "run", lambda *a, **k: [])
    out, text = _out()
    assert auditing.cmd_audit(console=out) == 3 and "NOT_RUN" in text.getvalue()


def test_what_nobody_foresaw_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that may not be searched raises from wherever it is looked into: the machine's error, and it names the file."""
    def denied() -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/x/\x1brun")

    assert errors.exit_code("alpha train", denied) == 3
    said = capsys.readouterr().err
    assert said.startswith("alpha train: a file or folder cannot be used") and "run (Permission denied)" in said and "\x1b" not in said


REPORT = "import sys; from alpha.__main__ import report; sys.exit(report())"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="NOT RUN: no /dev/full")
@pytest.mark.parametrize("words", ["-m alpha plan configs/tiny.toml", "-m alpha gate list", "-m alpha --version", "-u -m alpha --version",
                                   "-m alpha --help", "-m alpha train --help", REPORT])
def test_output_that_cannot_be_written_is_no_success(words: str) -> None:
    given = ["-c", words, "--help"] if words == REPORT else words.split()
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, *given], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 3 and "Traceback" not in done.stderr and "No space left" in done.stderr, done.stderr
    assert sum(line.startswith("alpha") for line in done.stderr.splitlines()) == 1 and "Exception ignored" not in done.stderr


def test_a_traceback_is_shown_once_and_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    for error, told in ((errors.InputError("no such thing"), False), (PermissionError(13, "no", "/x"), True), (MemoryError("8 GB"), True)):
        def fails(error: Exception = error) -> int:
            raise error

        for debug in (False, True):
            code, said = errors.exit_code("alpha x", fails, debug=debug), capsys.readouterr().err
            assert code == getattr(error, "exit_code", 3) and said.count("Traceback") == debug
            assert ("alpha x: " in said) == (told or not debug), said


def test_a_closed_output_stops_nothing() -> None:
    done = subprocess.run(f"{sys.executable} -m alpha gate list >&-", shell=True, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 0 and not done.stderr


def test_what_reads_evidence_may_hold_the_library_of_signatures() -> None:
    """`gate sign` and `gate check` load cryptography, which no process that computes may hold."""
    for words, computes in ((["gate", "sign", "--key", "k", "--signer", "s"], False), (["gate", "check"], False), (["gate", "list"], False),
                            (["gate", "run"], True), (["gate", "audit"], True), (["train", "x.toml"], True), (["bench", "docs"], False),
                            (["bench", "gelu.f32.cpu"], True), (["plan", "x.toml"], False)):
        assert cli._computes(parser().parse_args(words)) is computes, words


@pytest.mark.parametrize("words", [
    "gate audit -n 0", "gate run --budget nan", "gate operating --seconds -1", "gate operating gelu.f32.cpu --case nosuch",
    "train configs/tiny.toml --host 5", "train configs/tiny.toml --restarts 3", "train configs/tiny.toml --fewest 7",
    "checkpoint reshard x --ranks 100000000 --out y", "checkpoint export x --out .", f"checkpoint verify x@{'9' * 5000}",
])
def test_an_option_that_would_do_nothing_is_refused(words: str) -> None:
    try:
        code = cli.main(words.split())
    except SystemExit as error:  # by argparse
        code = error.code  # type: ignore[assignment]
    assert code == 2


def test_a_model_without_a_name_is_none() -> None:
    assert cli.main(["train", str(ROOT / "configs" / "tiny.toml"), "--init", ""]) == 2


def test_gitlab_runs_what_every_ci_runs() -> None:
    """The kernels are compiled there too: the job is .ci/run, and that compiles them."""
    job, steps = (ROOT / ".ci" / "gitlab.yml").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "- .ci/run\n" in job and "g++" in job and "make kernels" in steps and "make test" in steps
    assert "make kernels" in "".join(p.read_text() for p in (ROOT / ".github" / "workflows").glob("*.yml"))
