"""The lint of synchronisation in device code: what is gone is seen, and what is there is not called gone. `--all`: every planted fault."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from rich.console import Console

from alpha.cli import auditing
from alpha.cuda_runtime import toolchain
from alpha.errors import InputError, MachineError
from alpha.gates.adversarial import catches, cuda_plant
from alpha.gates.device_code import audit as kernels_audit
from alpha.gates.device_code import baseline as kernels_baseline
from alpha.gates.device_code import lint as kernels_lint
from alpha.registry.faults import Fault
from alpha.train.catalogue import catalogue

SOUND = {"k": {"SYNCS.PHASECHK.TRANS64.TRYWAIT": 4, "SYNCS.ARRIVE.TRANS64.A1T0": 2, "BAR.SYNC.DEFER_BLOCKING": 2, "BAR.ARV": 1,
               "UCGABAR_WAIT": 1, "FENCE.VIEW.ASYNC.S": 1, "MEMBAR.SC.GPU": 1, "UTMACMDFLUSH": 1, "DEPBAR.LE": 3, "ACQBULK": 1,
               "HGMMA.64x128x16.F32.BF16": 8, "LDG.E": 9}}


@pytest.mark.parametrize("opcode", SOUND["k"])
def test_one_instruction_less_is_seen_where_it_synchronises(opcode: str) -> None:
    now = {"k": SOUND["k"] | {opcode: SOUND["k"][opcode] - 1}}
    assert bool(kernels_lint.fewer(now, SOUND)) == (opcode not in ("LDG.E", "HGMMA.64x128x16.F32.BF16"))
    assert kernels_lint.fewer(SOUND, SOUND) == [] == kernels_lint.fewer(SOUND, now), "more is not fewer"
    counted = kernels_audit.counts(SOUND, "k")
    line = {"registers": 1, "shared": 0, "stack": 0, "spills": 0, "spilling": 0}
    worse, _ = kernels_baseline.compare({"k": line | kernels_audit.counts(now, "k")}, {"k": line | counted})
    assert bool(worse) == (opcode != "LDG.E")
    assert kernels_baseline.compare({"k": line | counted}, {"k": line | {"products": 8}})[0], "a count without a baseline passes"


def test_a_kernel_that_is_gone_holds_nothing() -> None:
    assert len(kernels_lint.fewer({}, SOUND)) == len(kernels_audit.SYNCHRONISATION)


def test_a_damaged_list_says_so(tmp_path: Path) -> None:
    good = '[[fault]]\nid = "x"\nmirrors = 39\nsource = "a.cu"\ncompiled = ["a.cu"]\nwhy = "y"\nfind = "a"\nreplace = "b"\n'
    for text in (good.replace('why = "y"\n', ""), good + 'gate = "parity"\n', good + good):
        (tmp_path / "list.toml").write_text(text)
        with pytest.raises(InputError, match="lint"):
            kernels_lint.load(tmp_path / "list.toml")
    (tmp_path / "list.toml").write_text(good)
    with pytest.raises(InputError, match="compiled file"):
        kernels_lint.run(catalogue(), kernels_lint.load(tmp_path / "list.toml"))


def test_faults_that_no_run_need_show_are_seen(pytestconfig: pytest.Config, seed: int) -> None:
    try:
        toolchain.find_nvcc(), toolchain.find_nvdisasm()
    except MachineError as error:
        pytest.skip(f"NOT_RUN: {error}")
    every = kernels_lint.load()
    assert len(every) >= 12 and 39 in {u.fault.mirrors for u in every}
    todo = every if pytestconfig.getoption("--all") else random.Random(f"{seed} lint").sample(every, 2)
    assert [r.fault.id for r in kernels_lint.run(catalogue(), todo) if not r.fewer] == []


def test_the_score_stands_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two, *_) = kernels_lint.load()
    monkeypatch.setattr(kernels_lint, "run", lambda catalogue, todo: [kernels_lint.Seen(u.fault, ("less",) * (u is one)) for u in todo])
    monkeypatch.setattr(kernels_lint, "load", lambda: (one, two))
    assert catches.lint(catalogue()) == catches.Score("lint", 1, 2, (two.fault.id,))
    output = io.StringIO()
    assert auditing.cmd_catches(["lint."], seeded=0, console=Console(file=output, width=200)) == 1
    assert f"1 of 2 faults that no run need show are seen by the lint (9% to 91%); unseen: {two.fault.id}" in output.getvalue()


def test_a_copy_with_a_fault_of_concurrency_gives_up_waiting() -> None:
    def text(mirrors: int, gate: str, planted: bool) -> tuple[str, str]:
        fault = Fault(id="x", component="matmul.bf16.sm90", gate=gate, mirrors=mirrors, why="y", file="matmul.py", source=cuda_plant.WAIT,
                      find="parity ^= 1;", replace="parity ^= 0;")
        with cuda_plant.overlay(fault, planted=planted) as copy:
            found = (copy / cuda_plant.WAIT).read_text()
        return ("late" if "| late) & ~15u" in found else ""), ("broken" if fault.replace in found else "")

    assert text(37, "parity", True) == ("late", "broken") and text(37, "parity", False) == ("late", "")
    assert text(21, "parity", True) == ("", "broken"), "kernels of other faults are what is shipped but for the fault"
    assert text(39, "lint", True) == ("", "broken"), "the lint compares with the sound kernel"
