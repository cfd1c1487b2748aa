"""Edits of copies of the repository: what cannot change a result makes no evidence stale, what can does (stale_counts.toml)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import pytest
from copies import ROOT
from stale_counts import Digests, Edit, copied, digests_of, edits, moved

from alpha import component, types
from alpha.ops import spec
from alpha.ops import table as op_table
from alpha.ops.table import row, table
from alpha.registry import digest
from alpha.registry.package import SHAPES as SHAPES_OF
from alpha.registry.package import Package
from alpha.train.catalogue import catalogue


@pytest.fixture(scope="module")
def was() -> Digests:
    """Today's digests."""
    with copied(()) as root:
        return digests_of(root)


def test_an_edit_of_a_copy_leaves_the_tree_as_it_is() -> None:
    """Its other files are those of the tree."""
    edit = next(e for e in edits("real") if e.changes[0][0].endswith(".py"))
    file, find, put = edit.changes[0]
    before = (ROOT / file).read_bytes()
    with copied(edit.changes) as root:
        assert (root / file).read_bytes() == before.replace(find.encode(), put.encode()) != before
    assert (ROOT / file).read_bytes() == before


def test_what_changes_no_result_makes_nothing_stale(was: Digests) -> None:
    """All harmless edits at once, since a pair that one of them moves is named."""
    with copied([c for e in edits("harmless") for c in e.changes]) as root:
        now = digests_of(root)
    assert len(was) > 500 and was.keys() <= now.keys()
    assert moved(was, now) == {}


def test_what_can_change_a_result_makes_its_evidence_stale(was: Digests, pytestconfig: pytest.Config, seed: int) -> None:
    """Four edits that the seed draws, since each asks for digests anew; `--all`: every one. Of an edit the pairs that it names count."""
    todo: list[Edit] = edits("real")
    assert {p for e in todo for p in (*e.stale, *e.current)} <= was.keys()
    for edit in todo if pytestconfig.getoption("--all") else random.Random(f"{seed} stale").sample(todo, 4):
        with copied(edit.changes) as root:
            stale = moved(was, digests_of(root, (*edit.stale, *edit.current)))
        assert not [p for p in edit.stale if p not in stale], edit.name
        assert not {p: stale[p] for p in edit.current if p in stale}, edit.name


def test_another_cubin_makes_its_kernels_and_their_programs_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    package, rope, norm, whole = Package(), *(catalogue()[i] for i in ("rope_packed.bf16.sm90", "rmsnorm.bf16.sm90", "executor.cuda"))
    before = [digest.component_digests(c, "parity", package=package) for c in (rope, norm, whole)]
    after, real = Package(), digest._binaries
    monkeypatch.setattr(digest, "_binaries", lambda c, p: "another" if c.id == rope.id else real(c, p))
    now = [digest.component_digests(c, "parity", package=after) for c in (rope, norm, whole)]
    assert [sorted(n for n in a if a[n] != b[n]) for a, b in zip(before, now, strict=True)] == [["binaries"], [], ["kernels"]]


SHAPES: dict[str, dict[str, Any]] = {
    "Component": {"backend": "host", "op": None, "presupposes": (), "requires": (), "inplace": (), "scratch": None, "contract": "",
                  "binaries": None, "launches": None, "budgeted": False},
    "Envelope": {"dtypes": ("f32",), "limits": ()},
    "Limit": {},
    "Measured": {"cases": 1, "digest": "", "note": ""},
    "TensorType": {},
    "OpSpec": {"why_no_vjp": "", "nbytes": None, "bound": None, "undifferentiable": (), "view": False, "stretch": None},
    "Sample": {"wrt": None},
}
"""SHAPE 1 of alpha.component, alpha.types and alpha.ops.spec: the defaults that evidence was made with. One may be added; one that is
changed or taken away, or that means something else, raises SHAPE there, and then this."""


def test_shapes_stand_for_the_defaults_that_they_stood_for() -> None:
    modules = {"component": component, "types": types, "ops.spec": spec}
    assert {m: x.SHAPE for m, x in modules.items()} == dict.fromkeys(SHAPES_OF, 1)
    assert sorted(SHAPES) == sorted(n for names in SHAPES_OF.values() for n in names)
    for module, names in SHAPES_OF.items():
        for name in names:
            held = {f.name: f.default for f in fields(getattr(modules[module], name)) if f.default is not MISSING}
            assert {n: held.get(n, "gone") for n in SHAPES[name]} == SHAPES[name]


class _Looked(dict[str, Any]):
    """The op table, which notes what is looked up in it."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.seen: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A row, noted."""
        self.seen.add(name)
        return super().get(name, default)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Looked]:
    found = _Looked(table())
    monkeypatch.setattr(op_table, "table", lambda: found)
    yield found


def test_rows_that_are_called_are_bound(looked: _Looked) -> None:
    """Every row that shape rule, oracle and bound of a row look up over its samples is among those that its digest binds."""
    package, most = Package(), 2
    for name, spec_ in sorted(table().items()):
        bound = set(digest._all_called([name], digest._EXECUTED, package))
        named = digest._named(*digest._mentioned([spec_.samples, spec_.exact], package), package)
        rng = np.random.default_rng(7)
        looked.seen.clear()
        samples = [*spec_.samples(rng), *([] if isinstance(spec_.exact, str) else spec_.exact(rng))]
        assert looked.seen <= set(digest._all_called([name, *named], digest._EXECUTED, package)), f"samples of {name}"
        looked.seen.clear()
        seen: set[str] = set()
        for sample in sorted(samples, key=lambda s: sum(np.size(x) for x in s.inputs))[:most] + _by_text(samples):
            if (key := repr(sorted(sample.attrs.items()))) in seen or (spec_.across is not None and sample.attrs["size"] != 1):
                continue  # seen, or of two members: one alone has no result
            seen.add(key)
            with np.errstate(all="ignore"):
                spec_.oracle(*sample.inputs, **sample.attrs)
                if spec_.bound is not None:
                    spec_.bound(sample.inputs, sample.attrs)
        assert looked.seen <= bound, name
    assert "learning_rate" in set(digest._all_called(["update_scalars"], digest._EXECUTED, package)) and row("gelu")


def _by_text(samples: list[Any]) -> list[Any]:
    """One small sample for each set of texts among the attributes."""
    found = {repr(sorted((k, v) for k, v in s.attrs.items() if isinstance(v, str))): s
             for s in sorted(samples, key=lambda s: -sum(np.size(x) for x in s.inputs))}
    return list(found.values())


def test_kernels_that_reference_programs_launch_are_bound() -> None:
    """Each kernel of the reference Programs is among those that evidence of the executors binds, each row among the models'."""
    from alpha.gates.contracts import cuda_run, reference

    package = Package()
    for name, programs in (("executor.cpu", reference), ("executor.cuda", cuda_run)):
        c = catalogue()[name]
        bound = digest._program(c, digest.contract_targets(c, "parity", package), package)
        rows = {held.key[1] for held in bound["rows"]}
        for family in ("gpt", "llama"):
            p = programs.program(family)
            assert {x.op for plan in p.plans.values() for x in plan.launches} <= rows
        assert len(bound["kernels"]) <= len(list(c.launches() if c.launches else ()))
