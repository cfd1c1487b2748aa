"""Catches: the raw record by which a gate rejected a planted fault. Evidence too: `<root>/<machine class>/_catches.jsonl`. Floor 3.

The merge gate judges these records again: a recorded fault that would now pass shows that a judge or a tolerance was loosened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from alpha.component import Component
from alpha.errors import CorruptError
from alpha.files import json_of, read_regular
from alpha.registry.digest import component_digests
from alpha.registry.evidence import locked, write_atomic
from alpha.registry.faults import Fault
from alpha.registry.gpu import class_of_key
from alpha.registry.judge import FAIL, judge
from alpha.registry.package import Package
from alpha.registry.pins import Pins
from alpha.registry.record import FORMAT, Record, canonical, content_hash, sealed, shaped

LATE = "Timeout"
"""How the error of a gate begins that did not end in time."""

NAME = "_catches.jsonl"
MAX_BYTES = 12288
"""A record of at most 8 KB with its quoting, and the rest."""


@dataclass(frozen=True, kw_only=True)
class Catch:
    """What happened when a gate met a fault. `record` None: the gate ended in an error, whose text `error` is (rejected as well, but for
    one that was late and names no case that hangs: it may have been slow).

    `digests`: those of the sound component for this gate, and of the fault; the catch is rerun when they change.
    """

    fault: str
    component: str
    gate: str
    machine: str
    digests: Mapping[str, str]
    record: Record | None
    error: str = ""

    def line(self) -> str:
        """Canonical JSON with its content hash, without newline."""
        body = self.body()
        return canonical({**body, "content": content_hash(body)})

    def body(self) -> dict[str, Any]:
        """What its line says, but the content hash."""
        return {**vars(self), "record": None if self.record is None else vars(self.record), "format": FORMAT}

    def rejected(self, pins: Pins) -> bool:
        """Whether the judges of today say FAIL to the recorded run: one that did not run has caught nothing, and one that repeated
        too little to pass would be rejected for that alone, so the number of repeats is not asked for. `pins`: what perf is held to."""
        if self.record is None:
            return bool(self.error) and (not self.error.startswith(LATE) or late_case(self.error) != "")
        return judge(self.record, runs=0, pin=pins.of(self.record)).verdict == FAIL


def late(case: str, seconds: float) -> str:
    """The error of a gate that did not end in time, in that contract case ('': it is not known in which)."""
    return f"{LATE}: {f'case {case}' if case else 'the gate'} did not end within {seconds:g} s"


def late_case(error: str) -> str:
    """The case that `late` named; '' where there is none."""
    found = _LATE_CASE.fullmatch(error)
    return found[1] if found else ""


_LATE_CASE = re.compile(rf"{LATE}: case (.+) did not end within [0-9.e+-]+ s", re.DOTALL)


def catch_digests(fault: Fault, component: Component, package: Package | None = None) -> dict[str, str]:
    """What a catch binds to."""
    return {**component_digests(component, fault.gate, package=package), "fault": fault.digest}


def path_of(root: Path, machine: str) -> Path:
    """The file of one machine class."""
    return root / class_of_key(machine).key / NAME


def load_catches(root: Path, machine: str) -> dict[str, Catch]:
    """fault id -> catch; CorruptError if a line is torn, edited, over-long, of another class or not in order."""
    path = path_of(root, machine)
    if not path.is_file():
        return {}
    try:
        text = read_regular(path).decode("ascii")
    except (OSError, ValueError) as error:
        raise _corrupt("the file of catches cannot be read", f"{machine}/{NAME}: {error}") from error
    if text and not text.endswith("\n"):
        raise _corrupt("the file of catches is torn: its last line has no end", path.name)
    return {c.fault: c for c in _catches_in(text, machine)}


@lru_cache(maxsize=8)
def _catches_in(text: str, machine: str) -> tuple[Catch, ...]:
    """Those of a file's text; the merge gate reads each file several times."""
    catches = tuple(_parse(line, f"{machine}/{NAME}:{i}", machine) for i, line in enumerate(text.split("\n")[:-1], 1))
    ids = [c.fault for c in catches]
    if ids != sorted(set(ids)):
        raise _corrupt("catches are not one per fault in sorted order", f"{machine}/{NAME}")
    return catches


def _parse(line: str, where: str, machine: str) -> Catch:
    if not len(line) <= MAX_BYTES:
        raise _corrupt("a line of catches is too long", f"{where}: {len(line)} bytes, at most {MAX_BYTES}")
    try:
        body = json_of(line)
        del body["content"], body["format"]
        record = None if body["record"] is None else Record(**body.pop("record"))
        catch = Catch(**{**body, "record": record})
        if record is not None:
            shaped(record)
        texts = (catch.fault, catch.component, catch.gate, catch.machine, catch.error, *catch.digests.values())
        if not all(isinstance(x, str) for x in texts):
            raise ValueError("a text is none")
        sound = sealed(catch.body())[1]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt("a line of catches cannot be read", f"{where}: {error}") from error
    if sound != line:
        raise _corrupt("a catch was edited by hand or is of another format", where)
    if catch.machine != machine or (record is not None and record.machine != machine):
        raise _corrupt("a catch of another machine class", where)
    if record is not None and (record.component, record.gate) != (catch.component, catch.gate):
        raise _corrupt("a catch whose record is about another component or gate", where)
    return catch


def save_catches(catches: Iterable[Catch], root: Path, *, keep: Iterable[str] | None = None) -> list[Path]:
    """Merge catches into a root, one file per machine class, replaced in one step. `keep`: ids of the faults that still exist; the
    catches of others are dropped (None keeps all). An old file that cannot be read is replaced."""
    kept = None if keep is None else set(keep)
    by_machine: dict[str, list[Catch]] = {}
    for c in catches:
        by_machine.setdefault(c.machine, []).append(c)
    with locked(root):
        for machine, newer in by_machine.items():
            merged = {**_existing(root, machine), **{c.fault: c for c in newer}}
            lines = [merged[i].line() + "\n" for i in sorted(merged) if kept is None or i in kept]
            write_atomic(path_of(root, machine), "".join(lines))
    return [path_of(root, m) for m in by_machine]


def _existing(root: Path, machine: str) -> dict[str, Catch]:
    try:
        return load_catches(root, machine)
    except CorruptError:
        return {}  # every fault is then run again


def _corrupt(what: str, came: str) -> CorruptError:
    return CorruptError(what, came=came, expected="what `alpha gate catches` wrote",
                        do="restore the file from version control, or delete it and run `alpha gate catches`")
