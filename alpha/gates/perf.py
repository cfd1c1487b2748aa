"""The perf gate, absolute half: the share of the ceiling that a kernel reaches, both measured in the same run. Floor 7.

The ceiling of a call is the larger of two times: its executed FLOPs at the rate of a square single-precision product, and its fewest
bytes at the rate of a copy, a read or a fill (the fastest of the three) over half as many bytes, so that it lives in the same level of
cache or a nearer one. Blocks of kernel and probes alternate in random order (profile/noise.py), so drift of the clock hits both; each
counts with its fastest block, because what else a shared machine does only ever adds time, and adds it unevenly. For the same reason a
case counts with the best of several tries on fresh buffers: of PINNED when it is pinned (pin.py), of at most TRIES, the first over the
line ending them, when it is judged. One worker, BLAS on one thread: the share says what a core does.

Each case is a sample of the row, grown to a size that fits a core's cache and to one that does not. A block is a Plan of a drawn number
of launches, ordered and timed end to end from here, while the kernel runs in a process of its own (cpu/process.py): neither clock nor
probes are in its reach, and what ordering costs is measured and recorded (`messages`). Inputs are rewritten with fresh contents between
blocks and changed in one place before every call; outputs are full of NaN or of what looks like results; of each call one output element
is kept. After some blocks, chosen at random, and the last, the outputs, or what a drawn call left, are compared with those of an untimed
call on fresh buffers, so a kernel that remembers, or that skips work in a loop, is found out. The relative half is ab.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from alpha.backends.spot import Spot
from alpha.component import Component
from alpha.errors import GraphError
from alpha.flops.v1 import VERSION as FLOPS
from alpha.gates.cpu.process import ordinary
from alpha.gates.subjects import (
    Case,
    bind,
    case_of,
    crash,
    fresh_nonce,
    generator,
    grow,
    make_record,
    once,
    poison,
    same_bits,
    samples,
    short,
    spec_of,
    warm_up,
)
from alpha.gates.tolerance import allowance, weighed
from alpha.graph.plan import Launch, Ref
from alpha.profile.noise import CLOCK, orders, repeats_for
from alpha.registry.cases import CaseRecord, Share
from alpha.registry.gpu import class_here
from alpha.registry.judge import RATIO
from alpha.registry.machine import processor
from alpha.registry.pins import Line, key_of, shipped_pins
from alpha.registry.record import Record

SIZES = {"cache": (60_000, 8_000_000), "memory": (1_200_000, 150_000_000)}
"""Case name -> (elements in and out together, FLOPs): whichever is reached first."""

BLOCKS = 12
BLOCK_NS = 6_000_000
"""A block repeats the call until it lasts about this long: an order and its answer, some 10 us, are then about 0.2 %. Many short blocks:
what else the machine does misses one of them sooner."""

PROBE_NS = 300_000
"""The same for a probe of the ceiling, which no message starts."""

PROBE_BLOCKS = 2
"""Blocks of a probe for each of the kernel's."""

MOST_CALLS = 4000
"""Most calls of a block."""

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
    warm_up(component)
    line = lines(component)
    todo = representative(component, nonce)
    found, messages = [], list[float]()
    for name, case in todo.items():
        rng = generator(nonce, component.id, "perf", name)  # of all tries: no contents come twice
        try:
            found.append(best_of(line.get(name), tries, partial(_case, component, name, case, nonce, tries is None, rng, messages)))
        except Exception as error:  # a kernel that raises has no speed
            found.append(Share(name=name, share=0.0, times_ns=(), note=crash(error)))
    return make_record(component, "perf", nonce, len(todo), found, flops=FLOPS,
                       messages=f"{max(messages, default=0.0):.5f}")


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


def _case(component: Component, name: str, case: Case, nonce: str, checked: bool, rng: np.random.Generator,
          messages: list[float]) -> Share:
    bound = bind(component, case)
    contents = case.arrays()
    bound.fill(contents)
    bound.run()
    probes = ceilings(case, component)
    times: dict[str, list[int]] = {arm: [] for arm in ("kernel", *(p.name for p in probes))}
    note, empty, whole = "", list[int](), list[int]()
    with bound.candidate.on_one_core(rng):
        most = 1
        for _ in range(3):  # the first is what a message costs rather than a call
            once_ns = min(_Batch(bound, contents, most, rng).run() for _ in range(2)) / most
            most = max(1, min(MOST_CALLS, round(BLOCK_NS / once_ns)))
        arms = [(p.name, p.call, repeats_for(p.call, PROBE_NS)) for p in probes]
        for order in orders(1 + len(arms), BLOCKS, rng):
            for i in order:
                if i:
                    arm, call, repeats = arms[i - 1]
                    times[arm] += [_end_to_end(call, repeats) for _ in range(PROBE_BLOCKS)]
                    continue
                bound.candidate.batch([])  # after a probe all is cold, and the first message is not what the second costs
                empty.append(bound.candidate.batch([]))
                batch = _Batch(bound, contents, int(rng.integers(max(1, 4 * most // 5), most + 2)), rng)
                whole.append(batch.run())
                times["kernel"].append(max(1, whole[-1] // batch.calls))
                if checked and not note and rng.random() < 0.3:
                    note = batch.wrong(component, case)
    messages.append(min(empty) / min(whole))
    if time.perf_counter_ns is not CLOCK:
        return Share(name=name, share=0.0, times_ns=tuple(times["kernel"]), note="the clock was patched")
    whole_check = name == "cache"  # by the oracle, which takes long at a large size
    note = note or (batch.wrong(component, case, nonce if whole_check else "") if checked else "")
    if checked and (note := note or ("" if whole_check else _beyond(component, case, rng))):
        return Share(name=name, share=0.0, times_ns=tuple(times["kernel"]), note=note)
    spec = spec_of(component)
    rates = {p.name: p.work / min(times[p.name]) for p in probes}
    bytes_ns = spec.min_bytes(list(case.types), case.attrs) / max(rates["copy"], rates["read"], rates["fill"])
    flops_ns = spec.flops(list(case.types), case.attrs) / rates["product"]
    return Share(name=name, share=short(max(bytes_ns, flops_ns) / min(times["kernel"]), 4), times_ns=tuple(sorted(times["kernel"])),
                 ceiling_ns=round(max(bytes_ns, flops_ns)), limit="bytes" if bytes_ns >= flops_ns else "flops",
                 shape=" ".join(map(str, case.types))[:120])


def _end_to_end(call: Callable[[], object], repeats: int) -> int:
    """Nanoseconds per call of a block that is timed as the kernel's are: as a whole."""
    start = CLOCK()
    for _ in range(repeats):
        call()
    return max(1, (CLOCK() - start) // repeats)


class _Batch:
    """A block of the kernel: `calls` launches on one set of operands, and all that is needed to say afterwards what each had to give.

    Every float input was multiplied by a common factor near 1 and outputs were filled. Ahead of each launch one element of the largest
    float input changes, another one each time; behind it one element of an output, drawn, is kept. So no two launches see the same
    contents, and none can be left out unseen."""

    def __init__(self, bound: Any, contents: Sequence[np.ndarray], calls: int, rng: np.random.Generator) -> None:
        self.bound, self.calls, self._rng = bound, calls, rng
        factor = 1 + 0.01 * float(rng.random())
        self._start = [np.asarray(x * x.dtype.type(factor)) if x.dtype.kind == "f" else x for x in contents]
        floats = [i for i, x in enumerate(contents) if x.dtype.kind == "f" and x.size]
        self._changed = max(floats, key=lambda i: contents[i].size) if floats else None
        outs = [i for i, out in enumerate(bound.outs) if out.size]
        self._writes, self._keeps = list[tuple[int, Any]](), list[tuple[int, int]]()
        flat = self._start[self._changed].reshape(-1).copy() if self._changed is not None else np.zeros(0)
        one, more = flat.dtype.type(0.999), flat.dtype.type(0.0007)  # a product alone leaves zeros, of which exact samples are full
        for i in rng.integers(flat.size, size=calls).tolist() if flat.size else ():
            flat[i] = flat[i] * one + more
            self._writes.append((i, flat[i]))
        which = rng.integers(len(outs), size=calls).tolist() if outs else ()
        for o, where in zip(which, rng.random(calls).tolist()):
            self._keeps.append((outs[o], int(where * bound.outs[outs[o]].size)))

    def run(self) -> int:
        """Nanoseconds of all launches together."""
        self.bound.fill(self._start)
        for out in self.bound.outs:
            if self._rng.random() < 0.5:
                poison(out)
            else:
                ordinary(out)
        orders = [(self.bound.number, ((self._changed, i, float(value)),) if self._changed is not None else (),
                   self._keeps[k] if self._keeps else None)
                  for k, (i, value) in enumerate(self._writes or [(0, 0.0)] * self.calls)]
        return int(self.bound.candidate.batch(orders))

    def _contents(self, calls: int) -> list[np.ndarray]:
        """The inputs of the last of the first `calls` launches."""
        found = [np.array(x) for x in self._start]
        for i, value in self._writes[:calls]:
            found[self._changed or 0].reshape(-1)[i] = value
        return found

    def wrong(self, component: Component, case: Case, nonce: str = "") -> str:
        """What is wrong with what the launches left; '' when nothing is. Outputs and what a drawn launch left are what an untimed call
        gives on the same contents, and inputs are what they were made. With a nonce the oracle agrees too: a kernel may remember the same
        wrong outputs in both."""
        if not same_bits(self.bound.ins, self._contents(self.calls)):
            return "timed calls changed their inputs"
        left, seen = [x.copy() for x in self.bound.outs], self.bound.candidate.ask("seen")
        last = _with(case, self._contents(self.calls))
        if nonce and not weighed(allowance(spec_of(component), last, nonce), spec_of(component), last, nonce, left)[0] <= RATIO:
            return "timed calls gave wrong outputs"
        if not same_bits(once(component, last), left):
            return "timed calls gave wrong outputs"
        k = int(self._rng.integers(self.calls))
        if self._keeps and k < self.calls - 1:
            o, i = self._keeps[k]
            want = once(component, _with(case, self._contents(k + 1)))[o].reshape(-1)[i]
            if len(seen) != self.calls or not np.array_equal(np.array(seen[k], want.dtype), want, equal_nan=want.dtype.kind == "f"):
                return "timed calls gave wrong outputs"
        return ""


def _beyond(component: Component, case: Case, rng: np.random.Generator) -> str:
    """What spot checks say of a call, by what they draw and not by its size: a kernel may go wrong at large sizes alone."""
    inputs, outs = case.arrays(), once(component, case)
    n = len(inputs)
    refs = [Ref("act", i, t) for i, t in enumerate((*case.types, *case.out_types(spec_of(component))))]
    launch = Launch(str(component.op), component.id, tuple(refs[:n]), tuple(refs[n:]), case.attrs, None, "", "", "", 0, 0)
    spot = Spot(launch, lambda ref: inputs[ref.offset], rng)
    return "" if all(look.ratio <= 1 for look in spot.looks(lambda ref: outs[ref.offset - n])) else "a spot check of a call finds it wrong"


def _with(case: Case, contents: Sequence[np.ndarray]) -> Case:
    """The case with these contents."""
    return replace(case, inputs=tuple(np.asarray(x, np.float64) if x.dtype.kind == "f" else x.copy() for x in contents))


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    return [(Share, name) for name in representative(component, nonce)]
