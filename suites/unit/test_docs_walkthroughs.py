"""Each page that says how to add something, pasted into a copy of the repository and done to the end: surfaces, gates, training.

`made` and `edited` are the places that an addition touches. They are counted here, so a page that grows is seen.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import walkthrough

from alpha.cuda_runtime import toolchain
from alpha.errors import MachineError
from alpha.registry.evidence import classes, shipped_root
from alpha.registry.machine import machine_class
from alpha.registry.status import Registry
from alpha.tomlfile import read_toml
from alpha.train.catalogue import catalogue


def rates(place: Path, run: str = "tiny") -> list[float]:
    """The learning rate of each step of a run."""
    with closing(sqlite3.connect(place / "runs" / run / "metrics.sqlite")) as db:
        return [lr for (lr,) in db.execute("SELECT lr FROM step_metrics ORDER BY step")]


def test_a_schedule(tmp_path: Path) -> None:
    place = walkthrough.copy(tmp_path)
    done = walkthrough.follow("docs/add-a-schedule.md", place)
    assert done.made == []
    assert done.edited == ["alpha/optim/schedules.py", "alpha/config.py", "docs/config.md", "alpha/optim/schedules.faults.toml"]
    seen = rates(place)
    steps = [b - a for a, b in pairwise(seen[2:])]  # behind the warm-up of two steps
    assert len(seen) == 20 and max(steps) < 0 and max(steps) - min(steps) < 1e-3 * abs(steps[0])  # a line down


EVERY_COMMAND = ("alpha ", "pytest ", "python ")


def test_a_model(tmp_path: Path) -> None:
    """With the operation of README, which it uses. Where no evidence ships for this machine, the gated way would measure everything first:
    there the run is ungated."""
    place = walkthrough.copy(tmp_path)
    walkthrough.follow("README.md", place, only="An operation in six steps", skip=EVERY_COMMAND)
    gated = machine_class().key in classes(shipped_root())
    done = walkthrough.follow("docs/add-a-model.md", place, skip=() if gated else ("alpha gate run --for", "alpha train"))
    assert done.made == ["alpha/models/primer.py", "alpha/models/primer.faults.toml", "configs/primer.toml"]
    assert sorted(set(done.edited)) == ["alpha/config.py", "alpha/gates/contracts/families.py", "docs/config.md"]
    assert "FAIL" not in dict(done.ran)["alpha gate run model.primer"]
    for run in ("primer", "primer-gated")[: 1 + gated]:
        seen = rates(place, run)
        assert len(seen) == 20 and (place / "runs" / run / "checkpoints").is_dir()


def test_own_data(tmp_path: Path) -> None:
    """Own JSON lines to a trained model. Where a component has no current evidence for this machine class, the run is ungated."""
    place = walkthrough.copy(tmp_path)
    registry = Registry(catalogue(), [shipped_root()])  # what this checkout measured itself does not go along
    current = all(registry.status(c.id).usable for c in registry.catalogue if c.backend != "cuda")
    done = walkthrough.follow("docs/data.md", place, skip=() if current else ("alpha train",))
    assert done.made == ["examples/own_lines.py", "configs/own.toml"] and done.edited == []
    if not current:
        walkthrough.run("alpha lab configs/own.toml", place, ["validation"], 300)
    assert len(rates(place, "own")) == 30


def test_a_kernel_of_the_gpu(tmp_path: Path) -> None:
    """Over emulated device code; compiled where the compiler is. What needs a GPU is prose on the page, not a command of this test."""
    place = walkthrough.copy(tmp_path)
    walkthrough.follow("README.md", place, only="An operation in six steps", skip=EVERY_COMMAND)  # its row
    try:
        toolchain.find_nvcc()
        lacking: tuple[str, ...] = ()
    except MachineError:
        lacking = ("alpha kernels ",)
    done = walkthrough.follow("docs/add-a-kernel.md", place, skip=lacking)
    family = "alpha/backends/cuda/kernels/relu2"
    assert done.made == ["kernels/elementwise/relu2.cu", f"{family}.py", f"{family}.faults.toml"] and done.edited == []
    for fault in read_toml(place / f"{family}.faults.toml")["fault"]:
        source = place / "kernels" / fault["source"]
        sound = source.read_text(encoding="utf-8")
        assert sound.count(fault["find"]) == 1, fault["id"]
        source.write_text(sound.replace(fault["find"], fault["replace"]), encoding="utf-8")
        command = f"python suites/support/emulated_kernels.py {fault['component']} {fault['gate']} kernels"
        walkthrough.run(command, place, ['"verdict": "FAIL"'], 300)
        source.write_text(sound, encoding="utf-8")


def test_a_kernel_of_the_user(tmp_path: Path) -> None:
    """In a folder of its own: no file of the repository is touched."""
    place = walkthrough.copy(tmp_path)
    done = walkthrough.follow("docs/your-own-kernel.md", place)
    assert done.made == ["mine/reference.py", "mine/candidate.py", "mine/component.toml"] and done.edited == []


def test_a_gate(tmp_path: Path) -> None:
    """Every kernel that a run uses passes the new gate, and its planted fault does not."""
    place = walkthrough.copy(tmp_path)
    done = walkthrough.follow("docs/add-a-gate.md", place)
    assert done.made == ["alpha/gates/zeros.py"]
    assert done.edited == ["alpha/registry/gates.py", "alpha/gates/contracts/registry/common.py", "baselines/surfaces.txt",
                           "alpha/backends/cpu/kernels/rmsnorm.faults.toml"]
    output = dict(done.ran)
    assert "FAIL" not in output["alpha gate run --for configs/tiny.toml --gate zeros"]
    assert "FAIL" not in output["alpha gate run registry.judge"]
