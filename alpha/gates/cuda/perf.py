"""The perf gate on the GPU, absolute half: the share of the ceiling that a kernel reaches, both measured in the same run. Floor 7.

The ceiling of a call is the larger of two times: its executed FLOPs at the rate of kernels/probe/peak.cu (tensor cores fed from shared
memory), and its fewest bytes at the faster of a copy and a fill of device memory. Both rates are taken from the fastest block of their
probe, the kernel's time from the median of its blocks; blocks alternate in random order. A block is some launches, each between two
events, after a fill that pushes everything out of L2 and is not timed. Two sets of operands take turns, their contents drawn afresh from
the nonce; before a block outputs are poisoned and some of the contents moved, and what the last timed launches left is compared, bit by
bit, with a call on fresh buffers, as a replay of the call is (replay.py).

While a block runs, the SM clock and the throttle reasons are read (cuda_runtime/nvml.py); throttled blocks are discarded by the rule of
profile/noise.py, which never looks at a time, and counted (`throttled`). A case of which too many blocks go was not measured: it is
declared and leaves no entry, so the judge says NOT_RUN, and the record's environment says why (`not_measured`). A case under its line is
timed again, as on the CPU (perf.best_of).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alpha.component import Component
from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.compile import Source, compile_kernel
from alpha.cuda_runtime.launch import Kernel
from alpha.cuda_runtime.memory import Arena, Span, fill
from alpha.cuda_runtime.nvml import Clocks, Reading
from alpha.gates import perf
from alpha.gates.cuda import replay as cuda_replay
from alpha.gates.cuda.calls import Call, timed
from alpha.gates.cuda.subjects import CudaBound, opened
from alpha.gates.cuda.time import FLUSH_BYTES, LAUNCHES, Since, block_of, kept, own_clock, timed_block
from alpha.gates.subjects import crash, fresh_nonce, generator, make_record, short, spec_of, warm_up
from alpha.profile import noise
from alpha.registry.cases import CaseRecord, Share
from alpha.registry.record import Record

BLOCKS = 9
PROBE_BYTES = 1 << 30
PEAK_ROUNDS = 4096


@dataclass
class Probes:
    """The ceilings: name -> (work in bytes or FLOPs, what enqueues it). `arena` is what they move."""

    arena: Arena
    calls: dict[str, tuple[float, Callable[[Any], None]]]


def probes() -> Probes:
    """Copy and fill of 1 GiB, and the tensor cores' own rate."""
    device, _ = opened()
    arena = Arena(2 * PROBE_BYTES + 256 * 1024, name="probes")
    driver = _bindings.driver()
    source, target = Span(arena.address, PROBE_BYTES), Span(arena.address + PROBE_BYTES, PROBE_BYTES)
    kernel = Kernel(compile_kernel(Source.of("probe/peak.cu", {})), "peak", shared_bytes=1024 + 2 * 8192 + 32768)
    sms = device.properties.multiprocessors
    peak = kernel.prepare((sms, 1, 1), (256, 1, 1), [ctypes.c_uint64(arena.address + 2 * PROBE_BYTES), ctypes.c_int32(PEAK_ROUNDS)])
    flops = 2.0 * 64 * 256 * 64 * 2 * sms * PEAK_ROUNDS

    def copy(stream: Any) -> None:
        _bindings.check("cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync(target.address, source.address, PROBE_BYTES, int(stream.handle)))

    return Probes(arena, {"copy": (2.0 * PROBE_BYTES, copy), "fill": (1.0 * PROBE_BYTES, lambda stream: fill(target, 0x3C, stream)),
                          "product": (flops, peak)})


def measure(component: Component, nonce: str | None = None, *, tries: int | None = None) -> Record:
    """Run the absolute half; the verdict is the judge's. `tries`: see `perf.best_of`; given, outputs are not held against other calls."""
    nonce = nonce or fresh_nonce()
    warm_up(component)
    line = perf.lines(component)
    todo = timed(component)
    since, clocks, ceiling = own_clock(), Clocks.open(), probes()
    found: list[Share] = []
    refused: list[str] = []
    for call in todo:
        try:
            rng = generator(nonce, component.id, "perf", call.name)
            found.append(_case(component, call, ceiling, clocks, since, rng, lambda once, name=call.name:  # type: ignore[misc]
                               perf.best_of(line.get(name), tries, once), tries is None))
        except Throttled as error:
            refused.append(f"{call.name}: {error}")
        except Exception as error:  # a kernel that raises has no speed
            found.append(Share(name=call.name, share=0.0, times_ns=(), note=crash(error)))
    ceiling.arena.free()
    more = {"not_measured": "; ".join(refused)} if refused else {}
    return make_record(component, "perf", nonce, len(todo), found, flops=perf.FLOPS, **more)


class Throttled(Exception):
    """Too few blocks of a case ran at full clock for what is left to be believed."""


def unthrottled(readings: Mapping[str, Sequence[Reading]]) -> tuple[dict[str, np.ndarray], int]:
    """(which blocks of each arm count, bool; how many of all were discarded). Throttled when too many blocks of one arm go."""
    found = kept(readings)
    for name, k in found.items():
        if not k.believed:
            raise Throttled(f"{k.discarded} of {k.mask.size} blocks of {name} ran throttled")
    return {name: k.mask for name, k in found.items()}, sum(k.discarded for k in found.values())


def _case(component: Component, call: Call, ceiling: Probes, clocks: Clocks, since: Since, rng: np.random.Generator,
          best: Callable[[Callable[[], Share]], Share], checked: bool) -> Share:
    """One call, bound once, timed as often as `best` asks, then (`checked`) held against calls on fresh buffers."""
    spec = spec_of(component)
    outs = spec.infer(call.types, call.attrs)
    sets = []
    for _ in range(2):
        bound = CudaBound(component, call.types, outs, call.attrs)
        bound.fill_blocks(block_of(t, rng, call.least, call.below) for t in call.types)
        bound.again(0xFF)
        sets.append(bound)
    entry = best(lambda: _timed(component, call, sets, ceiling, clocks, since, rng))
    for bound in sets if checked else ():
        if why := cuda_replay.why_not(component, bound, rng):
            return replace(entry, share=0.0, note=why)
    return entry


def _timed(component: Component, call: Call, sets: Sequence[CudaBound], ceiling: Probes, clocks: Clocks, since: Since,
           rng: np.random.Generator) -> Share:
    """Blocks of a bound call and of the probes."""
    spec, stream = spec_of(component), sets[0].stream
    flush = Span(ceiling.arena.address, FLUSH_BYTES)
    launches = [lambda bound=bound: bound.enqueue(stream) for bound in sets] * (LAUNCHES // 2)
    arms: dict[str, Callable[[], tuple[float, Reading]]] = {"kernel": lambda: timed_block(stream, launches, clocks, flush, since)}
    for name, (_, enqueue) in ceiling.calls.items():
        arms[name] = lambda enqueue=enqueue: timed_block(stream, [lambda: enqueue(stream)], clocks, None, since)  # type: ignore[misc]
    taken: dict[str, list[tuple[float, Reading]]] = {name: [] for name in arms}
    for block, order in enumerate(noise.orders(len(arms), BLOCKS + 1, rng)):
        for i in order:
            name = list(arms)[i]
            for bound in sets if name == "kernel" else ():  # what was there before is neither input nor output of this block
                bound.nudge(rng)
                bound.poison(0xFF)
            one = arms[name]()
            if block:  # the first block warms up
                taken[name].append(one)
    masks, lost = unthrottled({name: [r for _, r in found] for name, found in taken.items()})
    times = {name: [t for (t, _), ok in zip(found, masks[name]) if ok] for name, found in taken.items()}
    rates = {name: work / min(times[name]) for name, (work, _) in ceiling.calls.items()}
    bytes_ns = spec.min_bytes(list(call.types), call.attrs) / max(rates["copy"], rates["fill"])
    flops_ns = spec.flops(list(call.types), call.attrs) / rates["product"] if call.tensor_cores else 0.0
    share = max(bytes_ns, flops_ns) / float(np.median(times["kernel"]))
    limit = "bytes" if bytes_ns >= flops_ns else "flops"
    return Share(name=call.name, share=short(share, 4), times_ns=tuple(round(t) for t in sorted(times["kernel"])), throttled=lost,
                 ceiling_ns=round(max(bytes_ns, flops_ns)), limit=limit, shape=" ".join(map(str, call.types))[:120],
                 copy=short(rates["copy"], 4), product=short(rates["product"], 4))


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    return [(Share, call.name) for call in timed(component)]
