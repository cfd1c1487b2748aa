"""The command line on small runs: exit codes and messages, stamps, sampling, stopping, and what a live training process holds."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alpha import cli
from alpha.checkpoint import folders
from alpha.cli import training
from alpha.errors import InputError, NonFiniteError, UngatedError
from alpha.profile.store import Store, connect, read
from alpha.registry.gpu import gpu_class
from alpha.registry.machine import machine_class
from alpha.train import forbidden, rundir, session
from alpha.train.console import duration
from alpha.train.sample import pick, printable, uniform

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, small_run: Callable[..., Path]) -> Path:
    """A folder with a small corpus and a run file."""
    settings = {"data.tokenizer": "bpe", "data.vocab": 270, "train.steps": 6, "train.eval_every": 3}
    return small_run(tmp_path_factory.mktemp("run"), settings).parent


@pytest.fixture
def alpha(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command in this process: (exit code, standard output, standard error)."""

    def run(*args: object) -> tuple[int, str, str]:
        code = cli.main([str(a) for a in args])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def trained(root: Path) -> Path:
    """A finished ungated run."""
    assert cli.main(["lab", str(root / "run.toml")]) == 0
    return root / "runs" / "r"


def test_a_lab_run_is_stamped_everywhere(root: Path, alpha: Run) -> None:
    code, out, _ = alpha("lab", root / "run.toml", "--set", "run.name=stamped")
    assert code == 0
    for line in out.splitlines():
        if "tokens/s" in line or ("bits per byte" in line and "order-2" not in line):
            assert line.startswith("UNGATED"), line
    path = root / "runs" / "stamped"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["status"] == "UNGATED" and manifest["sessions"][0]["gated"] is False
    assert dict(read(path / "metrics.sqlite", "run_metadata"))["status"] == "UNGATED"
    assert "UNGATED" in alpha("sample", path, "--prompt", "def", "--tokens", 2)[2]
    assert {"config", "program", "components", "flops", "tokenizer", "corpus", "machine", "split", "streams"} <= set(manifest)
    assert manifest["flops"]["version"] == "flops/v1" and manifest["sessions"][0]["source"]["commit"]


def test_one_text_file_is_trained_on_and_the_yardstick_can_be_left_out(root: Path, alpha: Run) -> None:
    text = root / "one.txt"
    text.write_bytes(b"".join(p.read_bytes() for p in sorted((root / "text").rglob("*")) if p.is_file()))
    code, out, _ = alpha("lab", root / "run.toml", "--set", "run.name=one", "--set", f"data.corpus={text}", "--set", "data.baseline=false",
                         "--set", "train.steps=2")
    assert code == 0 and "(1 documents)" in out and "order-2" not in out and "bits per byte" in out


def test_the_report_at_the_end(root: Path, alpha: Run) -> None:
    _, out, _ = alpha("lab", root / "run.toml", "--set", "run.name=report")
    for expected in ("MFU", "peak", "tokens/s", "validation", "order-2 model", "sample", "run directory", "try next:"):
        assert expected in out, expected


def test_a_gated_run_is_refused_before_it_begins(root: Path, alpha: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(printer: object, source: str, ids: list[str], calls: list[Any]) -> None:
        assert "train.loop" not in ids or calls
        assert {"checkpoint.ranges", "tokenizer.bpe", "executor.cpu", "model.gpt", "optimizer.adamw"} <= set(ids)
        assert not {"tokenizer.bytes", "model.llama", "optimizer.sgd", "recompute.pass"} & set(ids)
        assert {c[0] for c in calls} >= {"adamw.f32.cpu", "attention_packed.f32.cpu", "linear_cross_entropy_grad.f32.cpu"}
        raise UngatedError("a run needs components that are not usable", came="x")

    monkeypatch.setattr(training, "admit", refuse)
    code, _, err = alpha("train", root / "run.toml", "--set", "run.name=refused")
    assert code == 1 and "not usable" in err and "Traceback" not in err
    assert not (root / "runs" / "refused").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "stated"),
    [
        (["lab", "{root}/none.toml"], 2, "cannot be read"),
        (["lab", "{root}/run.toml", "--set", "train.step=1"], 2, "did you mean `steps`?"),
        (["lab", "{root}/run.toml", "--set", "data.corpus={root}/nothing"], 2, "the corpus has no such path"),
        (["lab", "{root}/run.toml", "--set", "data.corpus={root}/empty"], 2, "the corpus is empty"),
        (["lab", "{root}/run.toml", "--set", "data.sequence=100000"], 2, "shorter than one sequence"),
        (["lab", "{root}/run.toml", "--set", "data.vocab=60000"], 2, "too small for this vocabulary"),
        (["lab", "{root}/run.toml", "--set", "train.recompute=ops:layer_norm"], 2, "did you mean `layernorm`?"),
        (["lab", "{root}/run.toml", "--set", "machine.threads=200"], 3, "machine.threads"),
        (["lab", "{root}/run.toml", "--set", "run.name=never", "--resume"], 2, "there is no run to resume"),
        (["lab", "{root}/run.toml", "--at", "3"], 2, "are for resuming"),
        (["lab", "{root}/text", "--resume"], 2, "not a run directory"),
        (["sample", "{root}/text", "--prompt", "x"], 2, "not a run directory"),
        (["plan", "{root}/run.toml", "--table", "none"], 2, "no such Segment"),
    ],
)
def test_bad_input(root: Path, alpha: Run, arguments: list[str], code: int, stated: str) -> None:
    (root / "empty").mkdir(exist_ok=True)
    found, _, err = alpha(*(a.format(root=root) for a in arguments))
    assert (found, stated in err) == (code, True), err
    assert "Traceback" not in err and err.count("came:") == 1 and "do:" in err


def test_debug_shows_the_traceback(root: Path, alpha: Run) -> None:
    code, _, err = alpha("--debug", "lab", root / "none.toml")
    assert code == 2 and "Traceback" in err


def test_resume_of_a_finished_run_and_with_another_configuration(root: Path, trained: Path, alpha: Run) -> None:
    before = read(trained / "metrics.sqlite", "step_metrics", "step, loss")
    code, out, _ = alpha("lab", trained, "--resume")
    assert code == 0 and "order-2 model" in out and read(trained / "metrics.sqlite", "step_metrics", "step, loss") == before
    code, _, err = alpha("lab", trained, "--resume", "--set", "optim.lr=0.5")
    assert code == 2 and "lr = 0.5" in err and "lr = 0.01" in err
    code, _, err = alpha("lab", trained, "--resume", "--at", 5)
    assert code == 2 and "expected: one of 6" in err


def test_a_run_lasts_longer_than_it_was_meant_to(root: Path, alpha: Run) -> None:
    """Its schedule allows it, and it is resumed so from then on."""
    assert alpha("lab", root / "run.toml", "--set", "run.name=longer", "--set", "optim.schedule=wsd", "--set", "optim.decay=2")[0] == 0
    path = root / "runs" / "longer"
    code, _, err = alpha("lab", path, "--resume", "--set", "train.steps=8")
    assert code == 2 and "does not allow a run of 6 steps to last 8" in err and "one of step 5 or before" in err
    assert alpha("lab", root / "run.toml", "--set", "run.name=longest", "--set", "optim.schedule=wsd")[0] == 0
    path = root / "runs" / "longest"
    assert alpha("lab", path, "--resume", "--set", "train.steps=8")[0] == 0
    assert folders.steps(path / "checkpoints")[-1] == 8 and "steps = 8" in (path / "config.toml").read_text()
    assert alpha("lab", path, "--resume")[0] == 0 and len(read(path / "metrics.sqlite", "step_metrics", "step")) == 8


def test_a_tokenizer_that_was_lost_is_there_again_behind_the_next_session(root: Path, alpha: Run) -> None:
    """Who samples and who exports read it in the run, and it advises to sample."""
    assert alpha("lab", root / "run.toml", "--set", "run.name=mute")[0] == 0
    path = root / "runs" / "mute"
    before = (path / "tokenizer.json").read_bytes()
    (path / "tokenizer.json").unlink()
    assert alpha("lab", path, "--resume")[0] == 0 and (path / "tokenizer.json").read_bytes() == before
    assert alpha("sample", path, "--prompt", "def", "--tokens", 2)[0] == 0


def test_damaged_files_of_a_run(root: Path, alpha: Run) -> None:
    assert alpha("lab", root / "run.toml", "--set", "run.name=hurt")[0] == 0
    path = root / "runs" / "hurt"
    weights = path / "checkpoints" / "step-00000006" / "rank-00000-of-00001.state"
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-1])
    code, _, err = alpha("sample", path, "--prompt", "x")
    assert code == 2 and "rank-00000-of-00001.state has another size" in err
    weights.write_bytes(raw)
    tokenizer = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(tokenizer.replace("code-v1", "code-v2", 1))
    code, _, err = alpha("sample", path, "--prompt", "x")
    assert code == 2 and "tokenizer file is damaged" in err
    (path / "tokenizer.json").write_text(tokenizer)
    (path / "manifest.json").write_text("{")
    code, _, err = alpha("lab", path, "--resume")
    assert code == 2 and "manifest of a run is damaged" in err
    (path / "manifest.json").unlink()
    (path / "metrics.sqlite").write_bytes(b"no database at all" * 100)
    code, _, err = alpha("lab", path, "--resume")
    assert code == 2 and "metrics are damaged" in err


def test_a_manifest_that_is_lost_while_the_run_goes_on_is_named(root: Path, alpha: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody removed it between two checkpoints: what was saved stands, and the run goes on from there, ungated."""
    note = session.note_libraries

    def lost(held: rundir.RunDir) -> None:
        (held.path / "manifest.json").unlink(missing_ok=True)
        note(held)

    monkeypatch.setattr(session, "note_libraries", lost)
    asked = ("lab", root / "run.toml", "--set", "run.name=unnamed", "--set", "train.checkpoint_every=2")
    code, _, err = alpha(*asked)
    path = root / "runs" / "unnamed"
    assert code == 2 and "the manifest of a run is gone" in err and str(path / "manifest.json") in err and "--resume" in err, err
    assert folders.steps(path / "checkpoints") == [2]
    monkeypatch.undo()
    assert alpha("lab", path, "--resume")[0] == 0 and rundir.is_sound(rundir.read_manifest(path))


def test_samples_are_deterministic(trained: Path, alpha: Run) -> None:
    first = alpha("sample", trained, "--prompt", "def f", "--tokens", 40, "--seed", 7)
    assert first[0] == 0 and first[1].startswith("def f") and "seed 7" in first[2]
    assert alpha("sample", trained, "--prompt", "def f", "--tokens", 40, "--seed", 7) == first
    assert alpha("sample", trained, "--prompt", "def f", "--tokens", 40, "--seed", 8)[1] != first[1]
    greedy = [alpha("sample", trained, "--prompt", "def", "--tokens", 20, "--temperature", 0, "--seed", s)[1] for s in (1, 2)]
    assert greedy[0] == greedy[1]
    assert alpha("sample", trained, "--prompt", "x", "--temperature", -1)[0] == 2


def test_pick_against_exact_probabilities() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.4, 0.1]))
    assert [pick(logits, 1.0, 0, u) for u in (0.0, 0.39, 0.41, 0.79, 0.81, 0.89, 0.91, 0.999999)] == [1, 1, 2, 2, 0, 0, 3, 3]
    assert [pick(logits, 1.0, 2, u) for u in (0.0, 0.49, 0.51, 0.999999)] == [1, 1, 2, 2]
    assert pick(logits, 0.0, 0, 0.9) == 1 and pick(logits, 1.0, 1, 0.99) == 1
    half = pick(np.log(np.array([0.2, 0.8])), 0.5, 0, 0.95)  # temperature 1/2 squares the odds: 1 to 16
    assert half == 0 and pick(np.log(np.array([0.2, 0.8])), 0.5, 0, 0.94) == 1
    with pytest.raises(NonFiniteError):
        pick(np.array([0.0, np.nan]), 1.0, 0, 0.5)


def test_uniform_is_fixed_and_spread() -> None:
    values = np.array([uniform(seed, p) for seed in range(4) for p in range(500)])
    assert len(set(values.tolist())) == 2000 and 0 <= values.min() and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.03 and uniform(1, 2) == uniform(1, 2)
    assert printable(b"a\x1b[31m\xff\n\t") == "a·[31m�\n\t"
    assert [duration(s) for s in (0, 75, 3700)] == ["0:00", "1:15", "1:01:40"]


def test_the_plan_is_printed(root: Path, alpha: Run) -> None:
    code, out, _ = alpha("plan", root / "run.toml")
    assert code == 0
    for expected in ("parameters", "model FLOPs", "6N", "executed", "state", "activations", "peak", "components"):
        assert expected in out
    code, out, _ = alpha("plan", root / "run.toml", "--table", "update")
    assert code == 0 and "adamw.f32.cpu" in out


def test_the_doctor_says_what_there_is(alpha: Run) -> None:
    code, out, _ = alpha("doctor", "--json")
    topics = {f["topic"]: f for f in json.loads(out)}
    assert code == 0 and {"python", "numpy", "corpus", "machine class", "components", "GPU", "nvcc", "pycuda"} <= set(topics)
    assert all(f["do"] for f in topics.values() if f["state"] == "missing")


# -- a live process ------------------------------------------------------------------------------------------------------------


def steps_of(metrics: Path) -> int:
    """Steps in the metrics of a run that may just be beginning."""
    try:
        return int(read(metrics, "step_metrics", "count(*)")[0][0])
    except InputError:
        return 0


def test_a_live_training_process_holds_no_forbidden_library_and_stops_when_asked(root: Path, trained: Path) -> None:
    """Its mapped files are read from outside; then SIGINT ends it after a step, saved."""
    command = [sys.executable, "-m", "alpha.cli", "lab", str(root / "run.toml"), "--set", "run.name=live", "--set", "train.steps=100000",
               "--set", "train.eval_every=0"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = root / "runs" / "live" / "metrics.sqlite"
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if steps_of(metrics) >= 2:
                break
            time.sleep(0.05)
        maps = Path(f"/proc/{process.pid}/maps")
        if maps.exists():
            text = maps.read_text()
            assert "numpy" in text and forbidden.mapped(text) == []
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, out
    assert "stopped after step" in out and "--resume" in out
    assert rundir.is_run(root / "runs" / "live") and list((root / "runs" / "live" / "checkpoints").iterdir())


def test_metrics_of_another_schema_are_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "m.sqlite") as m:
        m.add("step_metrics", {"step": 0, "loss": None, "norm": 1.0, "lr": 0.1, "coefficient": 1.0, "tokens": 1, "seconds": 0.1,
                               "finite": 0})  # fmt: skip
    db = sqlite3.connect(tmp_path / "m.sqlite")
    db.execute("PRAGMA user_version=99")
    db.close()
    for use in (Store, connect):
        with pytest.raises(InputError, match="newer schema"):
            use(tmp_path / "m.sqlite")


def test_a_refusal_fits_on_a_screen(root: Path, alpha: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Evidence of no component: with evidence shipped for this class the registry says no, on one screen, with one command."""
    machine = machine_class().key
    (tmp_path / machine).mkdir()
    for module in ("alpha.registry.status.default_roots", "alpha.registry.admission.shipped_root"):
        monkeypatch.setattr(module, (lambda: (tmp_path,)) if "roots" in module else (lambda: tmp_path))
    code, _, err = alpha("train", root / "run.toml", "--set", "run.name=refused")
    assert code == 1 and len(err.splitlines()) < 20 and "... and " in err
    assert f"gate run --for {root / 'run.toml'} --set=run.name=refused --stale" in err and machine in err
    assert not (root / "runs" / "refused").exists()


def test_a_run_for_a_gpu_says_so_where_there_is_none(alpha: Run) -> None:
    if gpu_class() is not None:
        pytest.skip("NOT_RUN: this machine has a GPU")
    code, _, err = alpha("lab", Path(__file__).parents[2] / "configs" / "gpt2-124m.toml")
    assert code == 3 and "cannot run on this machine" in err and "needs sm_90a" in err and "configs/demo.toml" in err


COMMANDS = {"train", "lab", "gate", "plan", "sample", "doctor", "trace", "dashboard", "kernels", "bench", "data",
            "checkpoint"}
GATE_ACTIONS = {"list", "run", "status", "explain", "check", "catches", "audit", "asked", "coverage", "sign", "pin", "operating",
                "sanitize"}


def test_the_commands_are_a_public_surface() -> None:
    def names(parser: Any) -> set[str]:
        return {name for action in parser._actions if hasattr(action, "choices") and action.choices for name in action.choices}

    top = cli.parser()
    assert names(top) == COMMANDS
    gate = next(a for a in top._actions if getattr(a, "choices", None)).choices["gate"]  # type: ignore[index,union-attr,call-overload]
    assert names(gate) == GATE_ACTIONS
