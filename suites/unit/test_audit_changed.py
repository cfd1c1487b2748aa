"""`alpha gate audit --changed`: lines that a branch changed are measured again; what was made up does not repeat, and is named."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from planted import planted
from rich.console import Console

from alpha.cli import auditing
from alpha.gates import audit, run
from alpha.gates.contracts.registry.common import OTHER
from alpha.registry import history as histories
from alpha.registry.catches import Catch, save_catches
from alpha.registry.evidence import save
from alpha.registry.history import History
from alpha.registry.judge import NOT_RUN, Judgement
from alpha.registry.record import Record
from alpha.train.catalogue import catalogue

KERNEL = "gelu.f32.cpu"


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *words], check=True,
                   capture_output=True)


@pytest.fixture(scope="module")
def sound() -> dict[str, Record]:
    """Records of this machine, whatever its class."""
    return {gate: run.measure(catalogue()[KERNEL], gate)[0] for gate in ("parity", "faults", "determinism")}


@pytest.fixture
def root(tmp_path: Path, sound: dict[str, Record]) -> Path:
    """A repository whose main branch holds a sound record of the fault gate."""
    git(tmp_path, "init", "-q", "-b", "main")
    evidence = tmp_path / "baselines" / "evidence"
    save([sound["faults"]], evidence)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    git(tmp_path, "checkout", "-qb", "work")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "two")
    return evidence


def changed(root: Path, **more: bool) -> audit.Changed:
    return audit.changed(catalogue(), root, History(root.parents[1]), planted()[:40], **more)


def test_only_lines_that_differ_from_the_base(root: Path, sound: dict[str, Record]) -> None:
    assert changed(root) == audit.Changed()
    save([sound["parity"]], root)
    git(root.parents[1], "commit", "-qam", "three")
    save([replace(sound["parity"], machine=OTHER.key)], root)  # a file that nobody committed yet
    stale = replace(sound["determinism"], digests={"implementation": "older"})
    save([stale, replace(sound["faults"], gate="perf")], root)
    found = changed(root)
    assert [r.gate for _, r in found.here] == ["parity"] and found.elsewhere == {OTHER.key: 1} and not found.faults
    git(root.parents[1], "checkout", "-q", "main", "-f")
    assert History(root.parents[1]).base == "", "the first commit has no parent"
    git(root.parents[1], "merge", "-q", "--no-ff", "-m", "merge", "work")
    assert [r.gate for _, r in changed(root).here] == ["parity"], "on the main branch: from the first parent"


FORGED = {
    "ratio": ("parity", lambda r: replace(r, cases=[{**c, "ratio": 0.5} if c.get("kind") == "relative" else c for c in r.cases])),
    "probes": ("parity", lambda r: replace(r, probes=[[*p[:3], p[3][:-1] + "7"] for p in r.probes])),
    "digest": ("determinism", lambda r: replace(r, cases=[{**c, "digest": "0" * 16} for c in r.cases])),
    "nonce": ("determinism", lambda r: replace(r, nonce="5eed" * 8)),
}


@pytest.mark.parametrize("what", ["", *FORGED])
def test_what_was_made_up_does_not_repeat(root: Path, sound: dict[str, Record], what: str) -> None:
    gate, forge = FORGED.get(what, ("parity", lambda r: r))
    save([forge(sound[gate])], root)
    results, left = audit.run_changed(catalogue(), changed(root), "5eed")
    assert left == 0 and [(r.component, r.gate, bool(r.problems)) for r in results] == [(KERNEL, gate, bool(what))]


def test_a_planted_fault_that_passes_now_is_named(root: Path, sound: dict[str, Record], monkeypatch: pytest.MonkeyPatch) -> None:
    fault = next(f for f in planted()[:40] if f.component.endswith(".cpu"))
    machine = sound["parity"].machine
    save_catches([Catch(fault=fault.id, component=fault.component, gate=fault.gate, machine=machine, digests={}, record=None,
                        error="made up")], root)
    found = changed(root)
    assert found.faults == [fault]
    monkeypatch.setattr(audit.planted, "run", lambda *a, **k: [SimpleNamespace(fault=fault, caught=False)])
    ((one,), left) = audit.run_changed(catalogue(), found, "5eed")
    assert left == 0 and fault.id in one.problems[0]


def test_the_commit_draws_within_the_budget(monkeypatch: pytest.MonkeyPatch, sound: dict[str, Record]) -> None:
    monkeypatch.setattr(audit, "again", lambda component, record: audit.Audited(component.id, record.gate, ()))
    records = [replace(sound["faults"], gate=f"{i}", environment={"seconds": "9"}) for i in range(30)]
    many = audit.Changed(here=[(catalogue()[KERNEL], record) for record in records])

    def drawn(seed: str, budget: float | None) -> list[str]:
        results, left = audit.run_changed(catalogue(), many, seed, budget)
        assert len(results) + left == 30
        return [r.gate for r in results]

    assert len(drawn("5eed", 0.0)) == 1 and len(drawn("5eed", None)) == 30
    assert drawn("5eed", None) == drawn("5eed", None) != drawn("5eee", None)


@pytest.mark.parametrize("away", [True, False])
def test_cores_that_stand_elsewhere_say_nothing(root: Path, sound: dict[str, Record], monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    """Neither that a record repeats nor that it does not: 3 where nothing else was measured."""
    moved = Judgement(NOT_RUN, ("the cores stand at another distance",), elsewhere=away)
    slower = replace(sound["parity"], cases=[{**c, "ratio": 0.5} if c.get("kind") == "relative" else c for c in sound["parity"].cases])
    monkeypatch.setattr(audit.runner, "measure", lambda *a, **k: (slower, moved))
    one = audit.again(catalogue()[KERNEL], sound["parity"])
    assert bool(one.problems) != away and ("another distance" in one.not_run) == away
    text = StringIO()
    auditing._show_audited([one], Console(file=text, width=200))
    assert text.getvalue().startswith("NOT_RUN" if away else "DIFFERS") and "another distance" in text.getvalue()
    other = audit.Audited(KERNEL, "faults", ())
    assert (auditing._code([one]), auditing._code([one, other])) == ((3, 0) if away else (1, 1))


def test_exit_codes(root: Path, sound: dict[str, Record], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def said(where: Path) -> tuple[int, str]:
        monkeypatch.setattr(auditing, "History", lambda: histories.History(where))
        monkeypatch.setattr(auditing, "shipped_root", lambda: root)
        text = StringIO()
        return auditing.cmd_audit_changed(console=Console(file=text, width=200)), text.getvalue()

    code, text = said(tmp_path / "baselines")
    assert code == 3 and "no git checkout" in text
    assert said(root.parents[1])[0] == 0
    save([replace(sound["parity"], machine=OTHER.key)], root)
    code, text = said(root.parents[1])
    assert code == 3 and "audit --changed --all" in text and OTHER.key in text
    save([sound["parity"]], root)
    code, text = said(root.parents[1])
    assert code == 0 and "repeats" in text and "audit --changed --all" in text
    save([FORGED["ratio"][1](sound["parity"])], root)
    code, text = said(root.parents[1])
    assert code == 1 and "DIFFERS" in text
