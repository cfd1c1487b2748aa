"""Cases of records: what engines write is what the judge reads, and every committed line is of the sorts that the gate table names."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from alpha.registry import cases
from alpha.registry.cases import CaseRecord, Unknown, failed, read
from alpha.registry.catches import load_catches
from alpha.registry.evidence import classes, load_file, shipped_root
from alpha.registry.gates import TABLE, cases_of
from alpha.registry.judge import FAIL, judge
from alpha.registry.record import MAX_BYTES, Record, parse

SORTS = [s for s in vars(cases).values() if isinstance(s, type) and issubclass(s, CaseRecord) and s not in (CaseRecord, Unknown)]


def test_each_sort_belongs_to_a_gate_and_kinds_are_told_apart() -> None:
    assert set(SORTS) == {s for gate in TABLE for s in gate.cases}
    for gate in TABLE:
        assert len({s.kind for s in gate.cases}) == len(gate.cases), gate.name


@pytest.mark.parametrize("sort", SORTS, ids=lambda s: s.__name__)
def test_written_and_read(sort: type[CaseRecord]) -> None:
    values = {"float": 2.5, "float | None": 3.5, "str": "a text", "str | None": "another", "bool": True, "tuple[float, ...]": (1.0, 2.0)}
    made = sort(**{f.name: values[str(f.type)] for f in fields(sort)})
    assert read([sort], made.plain()) == made
    assert read([sort], {}) is not None  # nothing is there: numbers are NaN, which no judge passes


def test_committed_lines_are_of_these_sorts_and_would_be_written_alike() -> None:
    """Numbers that are infinite are read as NaN (a floor's as itself): they are written as texts."""
    looked = 0
    for machine in classes(shipped_root()):
        folder = shipped_root() / machine
        records = [r for path in sorted(folder.glob("[!_]*.jsonl")) for r in load_file(path).values()]
        for record in records:
            for raw, case in zip(record.cases, cases_of(record), strict=True):
                assert not isinstance(case, Unknown), (record.component, raw)
                assert case.plain() == {k: math.inf if v == "inf" else v for k, v in raw.items()}
                looked += 1
        caught = [c.record for c in load_catches(shipped_root(), machine).values() if c.record is not None]
        assert all(c.name for r in caught for c in cases_of(r))
    assert looked > 4000


@pytest.mark.parametrize("gate", TABLE, ids=lambda g: g.name)
def test_an_engine_that_failed_passes_no_judge(gate: object) -> None:
    case = failed(gate.cases[0], "measure", "Boom: it broke").plain()  # type: ignore[attr-defined]
    record = Record(component="made.up", gate=gate.name, machine="cpu_x86_64-avx2_np2.2_openblas-x_t1",  # type: ignore[attr-defined]
                    digests={}, nonce="00", declared=1, cases=[case])
    for r in (record, parse(record.line(), "made up")):
        found = judge(r, runs=0)
        assert found.verdict == FAIL and "Boom" in found.reasons[0] and len(r.line()) < MAX_BYTES
