"""The perf gate on the GPU, absolute half: the share of the ceiling that a kernel reaches, both measured in the same run. Floor 7.

The ceiling of a call is the larger of two times: its executed FLOPs at the rate of kernels/probe/peak.cu (tensor cores fed from shared
memory), and its fewest bytes at the faster of a copy and a fill of device memory. Both rates are taken from the fastest block of their
probe, the kernel's time from the median of its blocks; blocks alternate in random order. A block is some launches between two events,
each after a fill that pushes everything out of L2, whose own time is measured beside and taken off. Two sets of operands take turns,
their contents drawn afresh from the nonce, and what the last timed launch left is compared with an untimed call, bit by bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpha.component import Component
from alpha.cudart import _bindings
from alpha.cudart.compile import Source, compile_kernel
from alpha.cudart.launch import Kernel
from alpha.cudart.memory import Arena, Span, fill
from alpha.gates import cuda_subjects, perf
from alpha.gates.cuda_sizes import Call, timed_calls
from alpha.gates.cuda_subjects import CudaBound, opened
from alpha.gates.subjects import crash, fresh_nonce, generator, make_record, settle, short, spec_of
from alpha.registry.gpu import class_here
from alpha.registry.record import Record
from alpha.types import NUMPY, TensorType

BLOCKS = 9
LAUNCHES = 6
FLUSH_BYTES = 256 << 20
PROBE_BYTES = 1 << 30
PEAK_ROUNDS = 4096

SUBJECTS = cuda_subjects.bind, cuda_subjects.samples


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


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the absolute half; the verdict is the judge's."""
    nonce = nonce or fresh_nonce()
    settle(component)
    here = class_here(component)
    before = perf.baselines(here.key).get(component.id, {}) if here is not None else {}
    todo = timed_calls(component)
    ceiling = probes()
    found: list[dict[str, object]] = []
    for call in todo:
        try:
            found.append(_case(component, call, ceiling, before.get(call.name), generator(nonce, component.id, "perf", call.name)))
        except Exception as error:  # a kernel that raises has no speed
            found.append({"name": call.name, "share": 0.0, "baseline": before.get(call.name), "times_ns": [], "note": crash(error)})
    ceiling.arena.free()
    return make_record(component, "perf", nonce, len(todo), found)


def _contents(t: TensorType, rng: np.random.Generator, below: int) -> np.ndarray:
    """A tensor's device form: a block of a million normal numbers, again and again (zeros would draw less power and run faster), or
    integers under `below`."""
    if not t.is_float:
        return rng.integers(0, below, t.shape).astype(NUMPY[t.dtype])
    block = rng.standard_normal(1 << 20, np.float32)
    bits = (block.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if t.dtype == "bf16" else block
    return np.resize(bits, t.shape)


def _elapsed(stream: Any, work: Callable[[], None]) -> float:
    """Nanoseconds between two events around what `work` enqueues."""
    device, _ = opened()
    begin, end = device.event(), device.event()
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return float(end.time_since(begin)) * 1e6


def _case(component: Component, call: Call, ceiling: Probes, baseline: float | None, rng: np.random.Generator) -> dict[str, object]:
    spec = spec_of(component)
    outs = spec.infer(call.types, call.attrs)
    sets = []
    for _ in range(2):
        bound = CudaBound(component, call.types, outs, call.attrs)
        contents = [_contents(t, rng, call.below) for t in call.types]
        bound.fill_bits(contents)
        bound.again(0xFF)
        sets.append((bound, bound.bits()))
    stream = sets[0][0].stream
    flush = Span(ceiling.arena.address, FLUSH_BYTES)

    def kernel() -> float:
        """Mean time of a launch with a cold cache: launches with a flush before each, less the flushes."""
        def timed(i: int) -> float:
            fill(flush, i, stream)
            return _elapsed(stream, lambda: sets[i % 2][0].enqueue(stream))
        return float(np.median([timed(i) for i in range(LAUNCHES)]))

    arms: dict[str, Callable[[], float]] = {"kernel": kernel}
    for name, (_, enqueue) in ceiling.calls.items():
        arms[name] = lambda enqueue=enqueue: _elapsed(stream, lambda: enqueue(stream))  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(BLOCKS + 1):
        for i in rng.permutation(len(arms)):
            name = list(arms)[i]
            taken = arms[name]()
            if block:  # the first block warms up
                times[name].append(taken)
    ns = [round(t) for t in sorted(times["kernel"])]
    entry: dict[str, object] = {"name": call.name, "share": 0.0, "baseline": baseline, "times_ns": ns}
    for bound, untimed in sets:
        if any(x.tobytes() != y.tobytes() for x, y in zip(bound.bits(), untimed)):
            return {**entry, "note": "timed calls gave other outputs"}
    rates = {name: work / min(times[name]) for name, (work, _) in ceiling.calls.items()}
    bytes_ns = spec.min_bytes(list(call.types), call.attrs) / max(rates["copy"], rates["fill"])
    flops_ns = spec.flops(list(call.types), call.attrs) / rates["product"] if call.tensor_cores else 0.0
    share = max(bytes_ns, flops_ns) / float(np.median(times["kernel"]))
    limit = "bytes" if bytes_ns >= flops_ns else "flops"
    return {**entry, "share": short(share, 4), "ceiling_ns": round(max(bytes_ns, flops_ns)), "limit": limit,
            "shape": " ".join(map(str, call.types))[:120], "copy": short(rates["copy"], 4), "product": short(rates["product"], 4)}
