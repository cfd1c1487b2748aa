"""The cases that a record must hold: computed again from the component, the gate and the nonce, without running anything. Floor 7.

Sort, name and number of each entry follow from them, so that a case that was left out, renamed or put in is seen on any machine. Of a
kernel, and where it times calls, the engine lists them (`listed`), of every other component its contract module.
"""

from __future__ import annotations

import importlib

from alpha.component import Component
from alpha.gates.contracts import engine as contracts
from alpha.gates.gradient import BOUND_CAP
from alpha.gates.summarise import summarise
from alpha.registry.cases import CaseRecord, Contract, Repeats, Slope, failed
from alpha.registry.gates import cases_of, engine_of, gate_of
from alpha.registry.record import Record


def expected(component: Component, gate: str, nonce: str) -> list[CaseRecord] | None:
    """The entries, their numbers left open; None where the engine of the gate does not list its cases."""
    if component.kind == "kernel" or gate_of(gate).pinned:
        engine = importlib.import_module(engine_of(gate, component).partition(":")[0])
        if not hasattr(engine, "listed"):
            return None
        listed = engine.listed(component, nonce)
    else:
        sort = Repeats if gate == "determinism" else Contract
        listed = [(sort, name) for name, _ in contracts.contract_cases(component, gate)]
    return summarise([failed(sort, name, "") for sort, name in listed])


def differences(component: Component, record: Record) -> list[str]:
    """Where a record's entries are other ones than its nonce gives; empty when they are these."""
    skeleton = expected(component, record.gate, record.nonce)
    if skeleton is None:
        return [f"the engine of {record.gate} does not list its cases (`listed`), so they cannot be checked"]
    want, came = [_entry(case) for case in skeleton], [_entry(case) for case in cases_of(record)]
    if came == want:
        return _capped(record)
    more, gone = [x for x in came if x not in want], [x for x in want if x not in came]
    shown = [f"{word} {few[0]}" for word, few in (("came", more), ("expected", gone)) if few]
    return [f"the record's cases are not those that its nonce gives: {'; '.join(shown) or 'another order'}"]


def _capped(record: Record) -> list[str]:
    """Bounds of differences above what the engine itself lets through; those in a kernel's own type are larger."""
    return [f"{c.name}: the bound {c.bound:g} is above {BOUND_CAP:g}, which the engine never writes" for c in cases_of(record)
            if isinstance(c, Slope) and not c.name.endswith(":native") and not c.bound <= BOUND_CAP]


def _entry(case: CaseRecord) -> str:
    return f"{type(case).__name__} {case.name} of {case.n:g}"
