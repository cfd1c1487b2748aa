"""Components without an op row: their contract module's CASES, run and recorded. Floor 7."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import numpy as np

from alpha.component import Component, Measured
from alpha.errors import GraphError
from alpha.gates.subjects import crash, generator, make_record, pin_blas, short
from alpha.registry.cases import Contract
from alpha.registry.record import Record

ContractCase = tuple[str, Callable[[np.random.Generator], Measured]]


def contract_cases(component: Component, gate: str) -> list[ContractCase]:
    """The cases that the contract module declares for one gate; a GraphError if it does not know the component."""
    declared = importlib.import_module(component.contract).CASES
    if component.id not in declared:
        raise GraphError("a contract module does not know its component", came=component.id,
                         expected=f"an entry in {component.contract}.CASES")
    return list(declared[component.id].get(gate, ()))


def run_case(component: Component, gate: str, nonce: str, name: str, case: Callable[[np.random.Generator], Measured]) -> Measured:
    """One case, BLAS on one thread: products of small models are over before other threads wake. An exception is a measured failure that
    names itself."""
    pin_blas()
    try:
        return case(generator(nonce, component.id, gate, name))
    except Exception as error:  # a contract that cannot be evaluated has not been kept
        return Measured(error=float("inf"), bound=0.0, cases=1, note=crash(error))


def measure(component: Component, gate: str, nonce: str) -> Record:
    """Parity, gradient and faults of a component without an op row: error beside bound, per case."""
    todo = contract_cases(component, gate)
    found = []
    for name, case in todo:
        m = run_case(component, gate, nonce, name, case)
        found.append(Contract(name=name, error=short(float(m.error)), bound=short(float(m.bound)), cases=int(m.cases), note=m.note[:120]))
    return make_record(component, gate, nonce, len(todo), found)


def child_environment(**more: str) -> dict[str, str]:
    """Environment of a fresh Python process that imports the same package as this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **more}
