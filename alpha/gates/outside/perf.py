"""The perf gate of an outside candidate: batches of calls ordered and timed from here, beside ceilings and the reference. Floor 7.

A batch is a drawn number of calls, each over operands of its own: fresh contents, outputs full of ordinary-looking numbers, the order
drawn. So no call can lean on another, and none of the clocks or counters is in the candidate's reach. The process is stopped when its
answer comes; only then are outputs looked at. Those of a drawn call of each batch are held bit by bit against an untimed call on fresh
buffers, and against the oracle on the same operands: at the tolerance of parity where the walk is of at most STEPS elements, else, in one
drawn batch, at that of a smaller call, grown as errors of sums do (_scaled). Messages are part of the time: a batch lasts as long as
memory allows, and their share is recorded. The ceiling is that of one core (perf.ceilings); the candidate's processor time says whether
it took more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from alpha.component import Component
from alpha.flops.v1 import VERSION as FLOPS
from alpha.gates import perf
from alpha.gates.outside.process import OutsideBound, ordinary, running
from alpha.gates.outside.reference import steps
from alpha.gates.subjects import Case, bind, case_of, crash, fresh_nonce, generator, make_record, once, pin_blas, same_bits, short, spec_of
from alpha.gates.tolerance import ALL, Allowance, allowance, slack_alone, weighed
from alpha.ops.numerics import growth
from alpha.profile.noise import CLOCK, block, repeats_for
from alpha.registry.cases import Share
from alpha.registry.judge import RATIO
from alpha.registry.record import Record

BATCHES = 10
BATCH_NS = 20_000_000
"""A batch lasts about this long, a message some 30 us."""

BYTES = 96 << 20
"""Most bytes of all operands of a batch."""

MOST = 64
"""Most calls of a batch."""

STEPS = 1 << 24
"""Most elements that the walk of a timed call computes: a tenth of a second, about, and each batch takes three walks or more."""

SMALLER = (60_000, 8_000, 1_000, 1)
"""Elements of the smaller call from which the tolerance of a larger one is taken: the first of which the walk is of at most STEPS."""

FEW = 64
"""Elements of an output below which its largest says little of how large its terms are."""

CORES = 1.25
"""Processor time over time above which the candidate ran on more than the core that the ceiling is of."""


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    nonce = nonce or fresh_nonce()
    pin_blas()
    todo = timed(component, nonce)
    found: list[Share] = []
    more: dict[str, str] = {}
    for name, case in todo.items():
        try:
            share, beside = _case(component, case, nonce)
            more |= {f"{name}.{k}": v for k, v in beside.items()}
        except Exception as error:  # a candidate that raises has no speed
            share = Share(name=name, share=0.0, times_ns=(), note=crash(error))
        found.append(share)
    return make_record(component, "perf", nonce, len(todo), found, flops=FLOPS, candidate=running(component).version, **more)


def timed(component: Component, nonce: str) -> dict[str, Case]:
    """The calls that are timed: of the sizes that component.toml says, else of sizes grown as for a kernel of the CPU (perf.SIZES)."""
    spec, dtype, calls = spec_of(component), component.envelope.dtypes[0], component.calls
    signature = calls.signature

    def made(name: str, sizes: Mapping[str, int]) -> Case:
        sample = signature.sample(sizes, generator(nonce, component.id, "perf", name), calls.attributes)
        return case_of(sample, dtype, spec=spec, name=name)

    def enough(sizes: Mapping[str, int], elements: int, flops: int) -> bool:
        types = signature.types(sizes, dtype)
        moved = sum(t.size for t in (*types, *spec.infer(types, calls.attributes)))
        return moved >= elements or spec.flops(types, calls.attributes) >= flops

    said = signature.timed()
    return {"timed": made("timed", said)} if said is not None else {
        name: made(name, signature.grown(lambda sizes, most=most: enough(sizes, *most))) for name, most in perf.SIZES.items()}


def _elements(case: Case) -> int:
    return sum(t.size for t in case.types)


def _walked(component: Component, case: Case) -> bool:
    return steps(spec_of(component).oracle, case.inputs, case.attrs) <= STEPS


def _scaled(component: Component, case: Case, nonce: str) -> Allowance:
    """The allowance of a call that is too large to walk: what a smaller one's outputs err by as a part of their largest, times the growth
    of a sum's error from as many terms as that one has elements to as many as this one has. Parity judges the precision; this, the values.
    """
    spec, signature = spec_of(component), component.calls.signature
    for most in SMALLER:
        sizes = signature.grown(lambda at, most=most: sum(t.size for t in signature.types(at, case.dtype)) >= most)
        rng = generator(nonce, component.id, "perf", "smaller")
        small = case_of(signature.sample(sizes, rng, component.calls.attributes), case.dtype, spec=spec, name="smaller")
        if _walked(component, small):
            break
    of, large = allowance(spec, small, nonce, ALL), slack_alone(spec, case)
    terms = _elements(case) + 1, _elements(small) + 1
    more, naive = growth(terms[0]) / growth(terms[1]), []
    for error, less, want in zip(of.naive, of.want, large.want):
        scale = _largest(want)
        if want.size < FEW:  # a few sums may all be near zero, their errors not: sums of drawn terms grow as the root of their number
            scale = max(scale, _largest(less) * (terms[0] / terms[1]) ** 0.5)
        naive.append(np.full(want.shape, _largest(error) / (_largest(less) or 1.0) * more * scale))
    return replace(large, naive=naive)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x, where=np.isfinite(x), out=np.zeros(x.shape)).max(initial=0.0)) if x.dtype.kind == "f" else 0.0


def _case(component: Component, case: Case, nonce: str) -> tuple[Share, dict[str, str]]:
    rng, process, spec = generator(nonce, component.id, "perf", case.name), running(component), spec_of(component)
    contents = case.arrays()
    probe = bind(component, case)
    probe.fill(contents)
    once_ns = min(block(probe.call, 1) for _ in range(3))  # the first warms up
    size = sum(t.nbytes for t in (*case.types, *case.out_types(spec)))
    most = int(np.clip(min(BATCH_NS // once_ns, BYTES // max(1, size)), 2, MOST))
    sets = [bind(component, case) for _ in range(most)]
    for bound in sets:
        bound.fill(contents)
    probes = {c.name: (c, repeats_for(c.call, perf.BLOCK_NS // 2), list[int]()) for c in perf.ceilings(case, component)}
    times, messages, whole, spent, note = list[int](), list[int](), 0, 0.0, ""
    walked, drawn = _walked(component, case), int(rng.integers(BATCHES))
    for batch in range(BATCHES):
        chosen = [sets[i] for i in rng.permutation(most)[: int(rng.integers(-(-most // 2), most + 1))]]
        _renew(chosen, contents, rng)
        before = process.seconds()
        start = CLOCK()
        process.call([b.number for b in chosen])
        took = CLOCK() - start
        with process.frozen():
            spent += process.seconds() - before
            looked = chosen[int(rng.integers(len(chosen)))]
            left = [x.copy() for x in looked.outs]
        times.append(took // len(chosen))
        whole += took
        process.fetch([b.number for b in chosen])
        left = [x.copy() for x in looked.outs] if process.apart else left
        note = note or _wrong(component, case, looked, left, nonce if walked or batch == drawn else "", walked)
        start = CLOCK()
        process.call([])
        messages.append(CLOCK() - start)
        for c, repeats, taken in probes.values():
            taken.append(block(c.call, repeats))
    if not note and spent > CORES * whole / 1e9 + 0.05:  # ticks of 10 ms
        note = f"it ran on {spent / (whole / 1e9):.1f} cores, and the ceiling is one core's"
    rates = {name: c.work / min(taken) for name, (c, _, taken) in probes.items()}
    bytes_ns = spec.min_bytes(list(case.types), case.attrs) / max(rates["copy"], rates["read"], rates["fill"])
    flops_ns = spec.flops(list(case.types), case.attrs) / rates["product"]
    reached = 0.0 if note else short(max(bytes_ns, flops_ns) / min(times), 4)
    entry = Share(name=case.name, share=reached, times_ns=tuple(sorted(times)), note=note[:120], ceiling_ns=round(max(bytes_ns, flops_ns)),
                  limit="bytes" if bytes_ns >= flops_ns else "flops", shape=" ".join(map(str, case.types))[:120])
    return entry, {"reference_ns": str(_reference(component, case)), "messages": f"{min(messages) / (min(times) * most):.4f}"}


def _renew(chosen: list[OutsideBound], contents: list[np.ndarray], rng: np.random.Generator) -> None:
    """Other contents for each call: all of them moved, or a few elements changed in what was there before. Outputs look like results."""
    for bound in chosen:
        if rng.random() < 0.5:
            factor = 1 + 0.01 * float(rng.random())
            bound.fill(x * x.dtype.type(factor) if x.dtype.kind == "f" else x for x in contents)
        else:
            for x in bound.ins:
                if x.dtype.kind == "f" and x.size:
                    x.reshape(-1)[rng.integers(0, x.size, 8)] *= x.dtype.type(0.75)
        for out in bound.outs:
            out[...] = ordinary(rng, out)
    chosen[0].candidate.bring([b.number for b in chosen])


def _wrong(component: Component, case: Case, bound: OutsideBound, left: list[np.ndarray], nonce: str, walked: bool) -> str:
    """What is wrong with the outputs of a timed call; '' when nothing is. A nonce: the oracle is asked too."""
    spec = spec_of(component)
    inputs = tuple(np.asarray(x, np.float64) if x.dtype.kind == "f" else x.copy() for x in bound.ins)
    last = Case(case.name, case.dtype, case.exact, inputs, case.types, case.attrs)
    again = once(component, last)
    if not same_bits(again, left):
        for name, x, y in zip(spec.outputs, left, again):
            where = np.flatnonzero(~((x == y) | ((x != x) & (y != y))).reshape(-1))
            if where.size:
                i = int(where[0])
                return f"a timed call left {name} flat {i} = {x.reshape(-1)[i]!r}, an untimed one gives {y.reshape(-1)[i]!r}"
        return "a timed call left other bits than an untimed one"
    if not nonce:
        return ""
    if not walked:
        ratio = _scaled(component, last, nonce).ratio(left, [t.dtype for t in last.out_types(spec)])
        return "" if ratio <= RATIO else "timed calls gave outputs beyond the tolerance of a smaller call, grown with the size"
    if not weighed(allowance(spec, last, nonce), spec, last, nonce, left)[0] <= RATIO:
        return "timed calls gave outputs beyond the tolerance of parity"
    return ""


def _reference(component: Component, case: Case) -> int:
    """Nanoseconds of the reference on the same operands, in NumPy and the compute type."""
    spec = spec_of(component)
    operands = case.arrays()

    def call() -> object:
        with np.errstate(all="ignore"):
            return spec.oracle(*operands, **case.attrs)

    call()
    return min(block(call, 1) for _ in range(3))


