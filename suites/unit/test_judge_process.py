"""The process that judges kernels of the CPU: it has what their files declare, and never loads one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alpha.backends.cpu.served import waiting
from alpha.component import Component
from alpha.errors import InputError, MachineError
from alpha.gates import run
from alpha.gates.adversarial import apart, plant
from alpha.gates.cpu import judge_process, process
from alpha.gates.cpu.declared import Declarations
from alpha.gates.subjects import cases, fresh_nonce, samples, subjects_of
from alpha.ops.spec import Sample
from alpha.registry import evidence
from alpha.train.catalogue import catalogue
from alpha.types import TensorType

KERNELS = [c for c in catalogue() if c.kind == "kernel" and c.backend == "cpu"]

_LOOK = """
import sys, socket
from alpha.backends.cpu.served import waiting
kernels, _ = waiting()
from alpha.gates.cpu import judge_process
from alpha.gates import subjects
def measure(component, gate, nonce):
    if gate == "loads":
        import alpha.backends.cpu.kernels.add
    return subjects.component_digests(component, gate), [m for m in sys.modules if m.startswith("alpha.backends.cpu.kernels.")]
judge_process.answer(socket.socket(fileno=int(sys.argv[1])), kernels, measure)
"""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Declarations]:
    """Of a fork of this process: it has loaded every kernel as well."""
    talk, pid = waiting()
    monkeypatch.setattr(process, "_FORKED", [])
    process.use(talk)
    found = Declarations()
    yield found
    found.close()
    talk.close()
    os.waitpid(pid, 0)


def same(a: list[Sample], b: list[Sample]) -> bool:
    return [(s.name, s.attrs, s.wrt, [np.asarray(x).dtype for x in s.inputs], [np.asarray(x).shape for x in s.inputs]) for s in a] == [
        (s.name, s.attrs, s.wrt, [np.asarray(x).dtype for x in s.inputs], [np.asarray(x).shape for x in s.inputs]) for s in b] and all(
            np.asarray(x).tobytes() == np.asarray(y).tobytes() for s, t in zip(a, b) for x, y in zip(s.inputs, t.inputs))


def test_what_is_declared_is_what_the_file_says(told: Declarations) -> None:
    nonce = fresh_nonce()
    for own in KERNELS:
        other = told.of(own.id)
        for name in ("id", "kind", "backend", "op", "requires", "inplace", "profile"):
            assert getattr(other, name) == getattr(own, name), f"{own.id}: {name}"
        assert other.envelope.dtypes == own.envelope.dtypes and process.is_declared(other)
        assert [x.text for x in other.envelope.limits] == [x.text for x in own.envelope.limits]
        assert same(samples(other, nonce, "samples"), samples(own, nonce, "samples")), own.id
        rng = np.random.default_rng(5), np.random.default_rng(5)
        assert same(subjects_of(other).refused(other, rng[0]), subjects_of(own).refused(own, rng[1])), own.id
        for case in cases(own, nonce) if own.envelope.limits else ():
            for types in (case.types, [TensorType((*t.shape[:-1], 3), t.dtype) for t in case.types]):
                assert outside(other, types, case.attrs) == outside(own, types, case.attrs), own.id
    with pytest.raises(InputError, match="no such component"):
        told.of("nothing.f32.cpu")


def outside(component: Component, types: list[TensorType] | tuple[TensorType, ...], attrs: dict) -> str:
    try:
        return str(component.envelope.why_outside(types, attrs))
    except Exception as error:
        return type(error).__name__


def test_no_file_of_kernels_is_loaded_where_they_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_process, "_JUDGE", _LOOK)
    asked = judge_process.JudgeProcess()
    try:
        digests, loaded = asked.ask("add.f32.cpu", "parity", None, {"implementation": "of the asking one"})
        assert digests == {"implementation": "of the asking one"} and loaded == []
        with pytest.raises(Exception, match=r"has loaded a kernel's file(.|\n)*kernels\.add"):
            asked.ask("add.f32.cpu", "loads", None, {})
    finally:
        asked.close()


def test_a_process_that_ended_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_process, "_JUDGE", "import os\nos._exit(3)\n")
    asked = judge_process.JudgeProcess()
    with pytest.raises(MachineError, match="the process that judges ended"):
        asked.ask("add.f32.cpu", "parity", None, {})
    asked.close()


def test_the_record_is_the_catalogues_and_so_is_its_nonce() -> None:
    component = catalogue()["add.f32.cpu"]
    record, judgement = run.measure(component, "faults", "ab" * 16)
    assert judgement.verdict == "PASS" and record.nonce == "ab" * 16
    assert record.digests == run.make_record(component, "faults", "ab" * 16, 0, []).digests


def test_a_file_that_patches_the_judge_when_it_is_loaded_changes_no_verdict(tmp_path: Path) -> None:
    """By the command, which loads all files of kernels itself."""
    plant.copy_package(tmp_path)
    cheat = next(c for c in apart.CHEATS if c.loaded)
    file = tmp_path / "alpha/backends/cpu/kernels" / f"{apart.HOST}.py"
    honest = file.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "alpha", "gate", "run", f"{apart.HOST}.f32.cpu", "--gate", "parity"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    def code(text: str) -> int:
        file.write_text(text, encoding="utf-8")
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert ("FAIL" if done.returncode else "PASS") in done.stdout, done.stdout + done.stderr
        return done.returncode

    assert code(honest) == 0
    assert code(cheat.text(honest)) == 1


_FORGES = '''
import alpha.gates.run
_save = alpha.gates.run.save
alpha.gates.run.save = lambda records, root: _save(
    [replace(r, cases=[{k: 0.0 if k in ("error", "ratio") else v for k, v in c.items()} for c in r.cases]) for r in records], root)
'''


def test_a_file_that_patches_what_keeps_records_keeps_none(tmp_path: Path) -> None:
    """By the command: what stands in the evidence is what the judging process made, and no pass."""
    plant.copy_package(tmp_path)
    file = tmp_path / "alpha/backends/cpu/kernels" / f"{apart.HOST}.py"
    file.write_text(apart.Cheat(0, "wrong", "wrong()", loaded=_FORGES).text(file.read_text(encoding="utf-8")), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "alpha", "gate", "run", f"{apart.HOST}.f32.cpu", "--gate", "parity"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "FAIL" in done.stdout, done.stdout + done.stderr
    (kept,) = [found["parity"] for path in tmp_path.rglob(f"{apart.HOST}.f32.cpu.jsonl") if "baselines" not in path.parts
               for found in [evidence.load_file(path)]]
    assert run.judged(kept, catalogue()[kept.component]).verdict == "FAIL"


def test_what_was_measured_elsewhere_is_kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judging process keeps the last record that it made, once it is asked for that very one, and says what its disk refuses."""
    record, _ = run.measure(catalogue()["add.f32.cpu"], "faults")
    assert not judge_process.keep(replace(record, nonce="ab" * 16), tmp_path) and not list(tmp_path.iterdir())
    assert judge_process.keep(record, tmp_path)
    assert evidence.load_file(evidence.path_of(tmp_path, record.machine, record.component))["faults"] == record
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError):
        judge_process.keep(record, tmp_path / "file")
