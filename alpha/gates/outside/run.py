"""All gates of an outside component: records, verdicts, and the reasons in words. Floor 7."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from alpha.errors import InputError, MachineError
from alpha.gates import run
from alpha.gates.outside import cuda
from alpha.gates.outside.explain import reasons, told
from alpha.gates.outside.folder import Outside
from alpha.gates.outside.process import started
from alpha.registry.evidence import save
from alpha.registry.gpu import why_not_here
from alpha.registry.judge import NOT_RUN, Judgement
from alpha.registry.record import Record

EVIDENCE = "evidence"
"""Folder of the component's own folder in which its records lie."""


@dataclass(frozen=True)
class Result:
    """One gate. `why`: the reasons where it is not satisfied, or why it could not run; then `record` and `judgement` are None."""

    gate: str
    verdict: str
    why: Sequence[str] = ()
    record: Record | None = None
    judgement: Judgement | None = None

    @property
    def satisfied(self) -> bool:
        return self.judgement is not None and self.judgement.satisfied


def gates(outside: Outside, only: str | None = None, *, python: str = sys.executable,
          on_result: Callable[[Result], None] | None = None) -> list[Result]:
    """Run the gates that the component owes, each with a fresh process of the candidate, and keep each record in the folder at once.

    NOT_RUN where this machine or `python` lacks what the candidate needs. InputError where the candidate cannot be loaded.
    """
    todo = [g for g in outside.gates() if only in (None, g)]
    if not todo:
        raise InputError("the component does not owe this gate", came=only, expected=", ".join(outside.gates()))
    found: list[Result] = []
    before = outside.digests()
    with outside.in_table():
        for gate in todo:
            found.append(_gate(outside, gate, python))
            if on_result is not None:
                on_result(found[-1])
    if outside.digests() != before:
        raise InputError("files of the component changed while its gates ran", came=str(outside.folder), do="run the gates again")
    return found


def _gate(outside: Outside, gate: str, python: str) -> Result:
    component = outside.component
    try:
        with _ready(outside, python) as by:
            record, judgement = run.measure(component, gate)
            if gate == "parity":
                record = told(component, record)
    except MachineError as error:
        return Result(gate, NOT_RUN, (f"{error.what}: {error.came}",))
    record = replace(record, environment={**record.environment, "candidate": by})
    save([record], Path(outside.folder) / EVIDENCE)
    return Result(gate, judgement.verdict, reasons(record, judgement), record, judgement)


@contextmanager
def _ready(outside: Outside, python: str) -> Iterator[str]:
    """Within it the candidate can be called; says what computes. MachineError where this machine lacks something."""
    component = outside.component
    if isinstance(component.implementation, cuda.Launcher):
        compiled = cuda.compiled(component.implementation)  # a candidate that does not compile is bad input, with or without a GPU
        if why := why_not_here(component):
            raise MachineError("it compiles, and cannot run here", came=why)
        yield f"cubin {compiled.binary_digest}"
        return
    if why := why_not_here(component):
        raise MachineError("it cannot run here", came=why)
    with started(component.id, outside.start(python)) as process:
        yield process.version
