"""The perf gate, absolute half: the share of the ceiling that a kernel reaches, both measured in the same run. Floor 7.

The ceiling of a call is the larger of two times: its executed FLOPs at the rate of a square single-precision product, and its fewest
bytes at the rate of a copy, a read or a fill (the fastest of the three) over half as many bytes, so that it lives in the same level of
cache or a nearer one. Blocks of kernel and probes alternate in random order (profile/noise.py), so drift of the clock hits both; each
counts with its fastest block, because what else a shared machine does only ever adds time, and adds it unevenly. For the same reason a
case counts with the best of several tries on fresh buffers: of PINNED when it is pinned (pin.py), of at most TRIES, the first over the
line ending them, when it is judged. One worker, BLAS on one thread: the share says what a core does.

Each case is a sample of the row, grown to a size that fits a core's cache and to one that does not. Inputs are rewritten with fresh
contents between blocks and changed in one place before every call, outputs are poisoned, and after some blocks, chosen at random, and
the last, the outputs are compared with those of an untimed call on fresh buffers, so a kernel that remembers, or that skips work in a
loop, is found out. The relative half is ab.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from alpha.component import Component
from alpha.errors import GraphError
from alpha.flops.v1 import VERSION as FLOPS
from alpha.gates.subjects import (
    Bound,
    Case,
    bind,
    case_of,
    crash,
    fresh_nonce,
    generator,
    grow,
    make_record,
    once,
    pin_blas,
    poison,
    same_bits,
    samples,
    short,
    spec_of,
)
from alpha.gates.tolerance import allowance, weighed
from alpha.profile.noise import CLOCK, block, orders, repeats_for
from alpha.registry.cases import CaseRecord, Share
from alpha.registry.gpu import class_here
from alpha.registry.judge import RATIO
from alpha.registry.machine import processor
from alpha.registry.pins import Line, key_of, shipped_pins
from alpha.registry.record import Record

SIZES = {"cache": (60_000, 8_000_000), "memory": (1_200_000, 150_000_000)}
"""Case name -> (elements in and out together, FLOPs): whichever is reached first."""

BLOCKS = 22
BLOCK_NS = 600_000
"""A block repeats the call until it lasts about this long: the clock's resolution and a call's overhead are then under 1 %. Many short
blocks: what else the machine does misses one of them sooner."""

TRIES = 4
"""Tries of a case that stays under the line, before it is believed."""

PINNED = 2
"""Tries of a case that is pinned, the best of which counts. Fewer than TRIES: unchanged code is then over the line more often, never less,
than the pinned shares say."""

PRODUCT = 448
"""Side of the square product whose rate is the arithmetic ceiling."""


@dataclass(frozen=True)
class Ceiling:
    """One way to move bytes or do arithmetic as fast as this machine can: `call` does `work` bytes or FLOPs."""

    name: str
    work: int
    call: Callable[[], object]


def lines(component: Component) -> dict[str, Line]:
    """case -> the line by which it is judged on this machine; {} where nothing is pinned."""
    here = class_here(component)
    pin = shipped_pins().load(key_of(here.key, processor())).get(component.id) if here is not None else None
    return {case: line for case in pin.shares if (line := pin.line(case)) is not None} if pin is not None else {}


def best_of(line: Line | None, tries: int | None, once: Callable[[], Share]) -> Share:
    """The best of several tries of a case. `tries`: so many (what a pin holds); None: at most TRIES, the first that is over the line, or
    wrong, ends it, and one where there is no line."""
    taken: list[Share] = []
    while len(taken) < (tries or TRIES):
        taken.append(once())
        if taken[-1].note or (tries is None and (line is None or taken[-1].share >= line.least)):
            break
    best = taken[-1] if taken[-1].note else max(taken, key=lambda c: c.share)
    return replace(best, tries=len(taken))


def measure(component: Component, nonce: str | None = None, *, tries: int | None = None) -> Record:
    """Run the absolute half; the verdict is the judge's. `tries`: see `best_of`; given, outputs are not held against other calls."""
    nonce = nonce or fresh_nonce()
    if component.kind != "kernel":
        raise GraphError("only kernels have a ceiling to be measured against", came=component.id,
                         do="give it a profile that does not owe perf (alpha/registry/gates.py)")
    pin_blas()
    line = lines(component)
    todo = representative(component, nonce)
    found = []
    for name, case in todo.items():
        rng = generator(nonce, component.id, "perf", name)  # of all tries: no contents come twice
        try:
            found.append(best_of(line.get(name), tries, partial(_case, component, name, case, nonce, tries is None, rng)))
        except Exception as error:  # a kernel that raises has no speed
            found.append(Share(name=name, share=0.0, times_ns=(), note=crash(error)))
    return make_record(component, "perf", nonce, len(todo), found, flops=FLOPS)


def representative(component: Component, nonce: str) -> dict[str, Case]:
    """Case name -> a sample grown to that size; the largest sample itself where none grows."""
    dtype, spec = component.envelope.dtypes[0], spec_of(component)
    among = [s for which in ("samples", "exact") for s in samples(component, nonce, which)]
    among = [s for s in among if component.envelope.why_outside(case_of(s, dtype, spec=spec).types, s.attrs) is None]
    found = {}
    for name, (elements, flops) in SIZES.items():
        rng = generator(nonce, component.id, "perf", name, "grow")
        grown = grow(component, among, rng, elements=elements, flops=flops, ragged=False, most=1 << 20)
        if grown is not None:
            found[name] = case_of(grown, dtype, spec=spec, name=name)
    if not found and among:
        largest = max(among, key=lambda s: sum(np.size(x) for x in s.inputs))
        found["cache"] = case_of(largest, dtype, spec=spec, name="cache")
    return found


def ceilings(case: Case, component: Component) -> list[Ceiling]:
    """Probes over half as many bytes as the call must move, and a square product."""
    spec = spec_of(component)
    n = max(64, spec.min_bytes(list(case.types), case.attrs) // 8)
    a, b = np.ones(n, np.float32), np.ones(n // 2, np.float32)
    c = np.ones(n // 2, np.float32)
    x, y, z = (np.ones((PRODUCT, PRODUCT), np.float32) for _ in range(3))
    return [Ceiling("copy", 8 * (n // 2), lambda: np.copyto(b, c)), Ceiling("read", 4 * n, lambda: np.dot(a, a)),
            Ceiling("fill", 4 * n, lambda: a.fill(1.0)), Ceiling("product", 2 * PRODUCT**3, lambda: np.matmul(x, y, out=z))]


def _case(component: Component, name: str, case: Case, nonce: str, checked: bool, rng: np.random.Generator) -> Share:
    bound = bind(component, case)
    contents = case.arrays()
    bound.fill(contents)
    bound.run()
    arms: list[tuple[str, int, Callable[[], object]]] = [("kernel", repeats_for(bound.call, BLOCK_NS), bound.call)]
    probes = ceilings(case, component)
    arms += [(p.name, repeats_for(p.call, BLOCK_NS // 2), p.call) for p in probes]
    right = True
    times: dict[str, list[int]] = {arm: [] for arm, _, _ in arms}
    for order in orders(len(arms), BLOCKS, rng):
        for i in order:
            arm, repeats, call = arms[i]
            if arm == "kernel":
                _renew(bound, contents, rng)
            times[arm].append(block(call, repeats, _touch(bound, rng) if arm == "kernel" else None))
            right = right and (arm != "kernel" or not checked or rng.random() > 0.3 or _still_right(component, case, bound))
    if time.perf_counter_ns is not CLOCK:
        return Share(name=name, share=0.0, times_ns=tuple(times["kernel"]), note="the clock was patched")
    if checked and not (right and _still_right(component, case, bound, nonce if name == "cache" else "")):
        return Share(name=name, share=0.0, times_ns=tuple(times["kernel"]), note="timed calls gave wrong outputs")
    spec = spec_of(component)
    rates = {p.name: p.work / min(times[p.name]) for p in probes}
    bytes_ns = spec.min_bytes(list(case.types), case.attrs) / max(rates["copy"], rates["read"], rates["fill"])
    flops_ns = spec.flops(list(case.types), case.attrs) / rates["product"]
    return Share(name=name, share=short(max(bytes_ns, flops_ns) / min(times["kernel"]), 4), times_ns=tuple(sorted(times["kernel"])),
                 ceiling_ns=round(max(bytes_ns, flops_ns)), limit="bytes" if bytes_ns >= flops_ns else "flops",
                 shape=" ".join(map(str, case.types))[:120])


def _renew(bound: Bound, contents: list[np.ndarray], rng: np.random.Generator) -> None:
    """Fresh contents, outside the timed block: every float input is multiplied by a common factor near 1, and outputs are poisoned."""
    factor = 1 + 0.01 * float(rng.random())
    bound.fill(x * x.dtype.type(factor) if x.dtype.kind == "f" else x for x in contents)
    for out in bound.outs:
        poison(out)


def _touch(bound: Bound, rng: np.random.Generator) -> Callable[[], None]:
    """Change one element of one float input, another one at each call: no two timed calls see the same contents."""
    floats = [x.reshape(-1) for x in bound.ins if x.dtype.kind == "f" and x.size]
    if not floats:
        return lambda: None
    flat = max(floats, key=lambda x: x.size)
    places = iter(rng.integers(0, flat.size, 4096).tolist())
    factor, more = flat.dtype.type(0.999), flat.dtype.type(0.0007)  # of a product alone a zero, of which exact samples are full, stays

    def touch() -> None:
        i = next(places, 0)
        flat[i] = flat[i] * factor + more

    return touch


def _still_right(component: Component, case: Case, bound: Bound, nonce: str = "") -> bool:
    """Whether what the last timed call left behind is what an untimed call gives on the same contents; with a nonce, whether the
    oracle agrees too (a kernel may remember the same wrong outputs in both)."""
    last = Case(case.name, case.dtype, case.exact, tuple(np.asarray(x, np.float64) if x.dtype.kind == "f" else x.copy() for x in bound.ins),
                case.types, case.attrs)
    if nonce:
        spec = spec_of(component)
        if not weighed(allowance(spec, last, nonce), spec, last, nonce, bound.outs)[0] <= RATIO:
            return False
    return same_bits(once(component, last), bound.outs)


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    return [(Share, name) for name in representative(component, nonce)]
