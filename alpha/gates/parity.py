"""The parity gate: a kernel against its row's float64 oracle. Floor 7.

Three layers (exact, relative, precision floor; tolerance.py) and the behaviours that a kernel could use to fool a comparison: it runs
before the oracle has been evaluated, on buffers that held garbage while it was bound and other contents at its previous call, in
shuffled order, with outputs and scratch poisoned; inputs must be unchanged; later calls must give the same bits; nothing may still be
running afterwards; and the samples themselves must reject a constant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpha.component import Component
from alpha.gates.contracts import engine as contracts
from alpha.gates.subjects import (
    Bound,
    Case,
    bind,
    cases,
    checksum,
    crash,
    fresh_nonce,
    generator,
    make_record,
    once,
    same_bits,
    short,
    spec_of,
    tasks,
    warm_up,
)
from alpha.gates.tolerance import Allowance, allowance, exact_below, exact_error, lower, weighed
from alpha.ops.spec import OpSpec
from alpha.registry.cases import CaseRecord, Exact, Relative
from alpha.registry.judge import RATIO
from alpha.registry.record import Record

PROBES = 64
LATER_CALLS = 24
"""Calls of the cheapest case between the first outputs and the last recheck."""

BEHAVIOURS = ("inputs unchanged", "outputs final", "later calls", "content", "in place", "spread")

FEW = 8
"""Float elements of all outputs below which a case has no power of its own to tell precisions apart."""

LONG = 16384
"""Longest axis of an operand above which the walk one precision lower is not run: a sum in e4m3 stands still long before, so it says
nothing, and takes seconds."""


@dataclass
class _Run:
    """What one case gave: a copy of its outputs, and the buffers themselves to look at again later."""

    case: Case
    got: list[np.ndarray]
    bound: Bound | None
    note: str = ""


def measure(component: Component, nonce: str | None = None,
            larger: Callable[[Component, str], list[CaseRecord]] | None = None) -> Record:
    """Run the gate; the verdict is the judge's. `larger`: makes further entries about sizes too large for a walk."""
    nonce = nonce or fresh_nonce()
    if component.kind != "kernel":
        return contracts.measure(component, "parity", nonce)
    warm_up(component)
    spec = spec_of(component)
    todo = cases(component, nonce)
    counts = dict.fromkeys(BEHAVIOURS, 0)
    order = {c.name: i for i, c in enumerate(todo)}
    runs = _candidate(component, todo, nonce, counts)
    runs.sort(key=lambda r: order[r.case.name])
    allowances = {r.case.name: allowance(spec, r.case, nonce) for r in runs if not r.case.exact}
    single = all(a.single for name, a in allowances.items()) and bool(allowances)
    long = {r.case.name for r in runs if any(n > LONG for t in r.case.types for n in t.shape)}
    found: list[CaseRecord] = []
    for r in runs:
        refused = any(isinstance(c, Relative) and c.ratio > RATIO for c in found)  # then nothing hangs on the others' last draws
        found.append(_judged(spec, r, allowances.get(r.case.name), single, r.case.name not in long, None if refused else nonce))
    found = _lend_power(found, long | {r.case.name for r in runs if sum(t.size for t in r.case.out_types(spec) if t.is_float) < FEW})
    if todo:
        counts["spread"] = unspread(spec, [r.case for r in runs], allowances)
        counts["spread"] += not single and bool(allowances) and all(c.floor is None for c in found if isinstance(c, Relative))
    found += [Exact(name=name, error=float(n)) for name, n in counts.items()]
    probes = _probes(component, runs, nonce)
    if larger is None:
        return make_record(component, "parity", nonce, len(todo) + len(BEHAVIOURS), found, probes)
    runs.clear()  # their buffers
    found += larger(component, nonce)
    return make_record(component, "parity", nonce, len(found), found, probes)


def _candidate(component: Component, todo: Sequence[Case], nonce: str, counts: dict[str, int]) -> list[_Run]:
    """The kernel's side, before any oracle: every case once, then everything again."""
    rng = generator(nonce, component.id, "order")
    threads = tasks()
    runs = []
    for i in rng.permutation(len(todo)):
        runs.append(_first(component, todo[i], counts, rng))
    live = [r for r in runs if r.bound is not None]
    cheapest = min(live, key=lambda r: sum(x.size for x in r.case.inputs), default=None)
    for _ in range(LATER_CALLS if cheapest else 0):
        once(component, cheapest.case)  # type: ignore[union-attr]
    for i in rng.permutation(len(live)):
        r = live[i]
        counts["later calls"] += not same_bits(once(component, r.case, offset=int(rng.integers(4)) * 16), r.got)
    if tasks() > threads:
        time.sleep(0.05)
    counts["outputs final"] += int(tasks() > threads)
    counts["outputs final"] += sum(not same_bits(r.bound.outs, r.got) for r in live if r.bound)
    for pair in component.inplace:
        for r in live:
            counts["in place"] += not _in_place(component, r, pair)
    return runs


def _first(component: Component, case: Case, counts: dict[str, int], rng: np.random.Generator) -> _Run:
    try:
        bound = bind(component, case)
        contents = case.arrays()
        other = [x * x.dtype.type(0.75) if x.dtype.kind == "f" else x for x in contents]
        bound.fill(other)
        bound.run()
        stale = [x.copy() for x in bound.outs]
        bound.fill(contents)
        before = checksum(bound.ins)
        bound.run()
        got = [x.copy() for x in bound.outs]
        counts["inputs unchanged"] += checksum(bound.ins) != before
        bound.fill(other)
        bound.run()
        counts["content"] += not same_bits(bound.outs, stale)
        bound.fill(contents)
        bound.run()
        return _Run(case, got, bound)
    except Exception as error:  # whatever a kernel raises inside its envelope is a failed case
        return _Run(case, [], None, crash(error))


def _in_place(component: Component, run: _Run, pair: tuple[int, int]) -> bool:
    """Whether sharing an output with an input keeps the bits; pairs whose types differ in this case do not apply."""
    out, source = pair
    types = run.case.out_types(spec_of(component))
    if source >= len(run.case.types) or types[out] != run.case.types[source]:
        return True
    shared = bind(component, run.case, share=pair)
    shared.fill(run.case.arrays())
    shared.run(keep=out)
    return same_bits(shared.outs, run.got)


def _judged(spec: OpSpec, run: _Run, allowed: Allowance | None, single: bool, own: bool, nonce: str | None) -> CaseRecord:
    """The raw numbers of one case; not `own`: its precision floor is 0 until it is lent one. `nonce` None: by the first draws alone."""
    case = run.case
    dtypes = [t.dtype for t in case.out_types(spec)]
    if allowed is None:
        error = exact_error(run.got, case.oracle(spec), dtypes) if run.bound else np.inf
        return Exact(name=case.name, error=short(error), note=run.note)
    if run.bound is None:
        ratio = np.inf
    elif single:
        ratio = 0.0 if exact_error(run.got, tuple(allowed.want), dtypes) == 0.0 else np.inf
    elif nonce is None:
        ratio = allowed.ratio(run.got, dtypes)
    else:
        ratio, allowed = weighed(allowed, spec, case, nonce, run.got)
    told = not single and not exact_below(allowed.want, dtypes)
    floor = short(allowed.ratio(lower(spec, case), dtypes) if own else 0.0, 3) if told else None
    return Relative(name=case.name, ratio=short(ratio, 3), floor=floor, note=run.note)


def _lend_power(found: Sequence[CaseRecord], few: set[str]) -> list[CaseRecord]:
    """Give cases of few elements, and long ones, the best precision floor of all: a single element comes out right one precision lower now
    and then (2 of 60 times for a bf16 product), which says nothing about the tolerance; that some case has power is still demanded."""
    best = max((c.floor for c in found if isinstance(c, Relative) and c.floor is not None), default=None)
    return [replace(c, floor=best) if isinstance(c, Relative) and c.name in few and c.floor is not None else c for c in found]


def unspread(spec: OpSpec, todo: Sequence[Case], allowances: dict[str, Allowance]) -> int:
    """Number of outputs for which no sample would reject a kernel that returns one constant (the mean of another sample)."""
    outputs = len(spec.outputs)
    rejected = [False] * outputs
    wants = [(c, allowances[c.name].want if c.name in allowances else list(c.oracle(spec))) for c in todo]
    for o in range(outputs):
        having = [(c, w[o]) for c, w in wants if len(w) > o and w[o].size]
        if not having:
            rejected[o] = True
            continue
        with np.errstate(all="ignore"):
            centre = np.mean(having[0][1]) if having[0][1].dtype.kind == "f" else having[0][1].reshape(-1)[0]
        for case, want in having:
            dtype = case.out_types(spec)[o].dtype
            constant = np.full(want.shape, centre)
            if case.name in allowances:
                a = allowances[case.name]
                one = replace(a, want=[want], slack=[a.slack[o]], naive=[a.naive[o]])
                rejected[o] |= one.ratio([constant], [dtype]) > 2
            else:
                rejected[o] |= exact_error([constant], (want,), [dtype]) > 0
    return rejected.count(False)


def _probes(component: Component, runs: Sequence[_Run], nonce: str) -> list[list[object]]:
    """Bits of up to 64 output elements at places that the nonce chooses: [index of the case, output, flat index, hex]."""
    return [[i, o, at, runs[i].got[o].reshape(-1)[at].tobytes().hex()]
            for i, o, at in _places(component, [r.case for r in runs], nonce) if runs[i].bound is not None]


def _places(component: Component, todo: Sequence[Case], nonce: str) -> list[list[int]]:
    """The places that a record of this nonce must probe."""
    spec = spec_of(component)
    sizes = [[t.size for t in c.out_types(spec)] for c in todo]
    having = [i for i, s in enumerate(sizes) if any(s)]
    rng = generator(nonce, component.id, "probes")
    places = set()
    for _ in range(PROBES if having else 0):
        i = having[int(rng.integers(len(having)))]
        o = int(rng.choice([k for k, n in enumerate(sizes[i]) if n]))
        places.add((i, o, int(rng.integers(sizes[i][o]))))
    return [list(p) for p in sorted(places)]


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    return [*((Exact if c.exact else Relative, c.name) for c in cases(component, nonce)), *((Exact, name) for name in BEHAVIOURS)]
