"""The host side of the GPU back end on an emulated GPU: the executor's contract, its planted faults, and late streams."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_gpu import EmulatedGpu, emulated, emulated_gpu

import alpha
from alpha.backends.cuda import executor, observe, room, staging
from alpha.gates.cases import cuda_run
from alpha.gates.contracts import contract_cases
from alpha.gates.subjects import generator
from alpha.registry.faults import Fault, broken, load_faults
from alpha.train.house import house

COMPONENT = "executor.cuda"
FAULTS = {f.id: f for f in load_faults() if f.component == COMPONENT}
NOT_HERE = "recompute-"
"""Cases that need kernels: an oracle of a fused row rounds once where a kernel rounds what it stores between."""

GATES = ("parity", "determinism", "faults")
CASES = [(gate, name) for gate in GATES for name, _ in contract_cases(house()[COMPONENT], gate) if not name.startswith(NOT_HERE)]

LATE = {
    "delivered before it was sent": ("staging", "        stream.wait_for_event(slot.sent)\n", ""),
    "slot overwritten while it is copied": ("staging", "        slot.sent.synchronize()\n", ""),
    "slot sent before it was taken": ("staging", "        self._copies.wait_for_event(slot.taken)\n", ""),
    "outputs read too early": ("executor", "        self.stream.synchronize()\n        if results is None:", "        if results is None:"),
}  # fmt: skip
"""Waits that are left out: a GPU may be quick enough to hide it, a late stream is not."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    kernels = emulated(cuda_run.kernels())
    monkeypatch.setattr(cuda_run, "kernels", lambda: kernels)
    with emulated_gpu() as found:
        yield found


def failing(gate: str) -> list[str]:
    """Cases of a gate that are not held, up to the first; of the two models the smaller one."""
    for name, case in contract_cases(house()[COMPONENT], gate):
        if name.startswith(NOT_HERE) or name.endswith("gpt"):
            continue
        try:
            found = case(generator("host", COMPONENT, gate, name))
        except Exception as error:
            return [f"{name}: {type(error).__name__}: {error}"]
        if not found.error <= found.bound:
            return [f"{name}: {found.error} > {found.bound} {found.note}"]
    return []


@pytest.mark.parametrize(("gate", "name"), CASES)
def test_the_contract_is_kept(gpu: EmulatedGpu, gate: str, name: str) -> None:
    case = dict(contract_cases(house()[COMPONENT], gate))[name]
    found = case(generator("host", COMPONENT, gate, name))
    assert found.error <= found.bound, found.note
    assert gpu.allocated == 0, "an executor that was closed keeps device memory"


def plant(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType, text: str) -> None:
    """The module's names, defined by another text, wherever the executor uses them."""
    made = types.ModuleType(module.__name__)
    made.__file__ = module.__file__
    exec(compile(text, str(module.__file__), "exec"), vars(made))
    for user in (executor, cuda_run, module):
        for name, value in vars(made).items():
            if isinstance(value, type | types.FunctionType) and value.__module__ == module.__name__ and hasattr(user, name):
                monkeypatch.setattr(user, name, value)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_caught(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    module = {m.__name__: m for m in (executor, observe, room, staging)}["alpha." + fault.file.removesuffix(".py").replace("/", ".")]
    plant(monkeypatch, module, broken(fault, (Path(alpha.__file__).parent / fault.file).read_text(encoding="utf-8")))
    assert failing(fault.gate), f"{fault.gate} accepts: {fault.why}"


@pytest.mark.parametrize("name", LATE)
def test_every_wait_is_needed(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, find, change = LATE[name]
    found = {"staging": staging, "executor": executor}[module]
    text = Path(str(found.__file__)).read_text(encoding="utf-8")
    assert text.count(find) == 1
    plant(monkeypatch, found, text.replace(find, change))
    assert failing("parity")
