"""The perf gate of collectives among GPUs: the share of the ceiling that a call of two reaches, both measured in one job. Floor 7.

The ceiling of a call is the larger of two times: that of a hop, in which a GPU writes a flag into another one's memory and that one sees
it (kernels/probe/hop.cu), of all pairs at a time; and that of the bytes that must leave the busiest member (`wire_bytes`), at the rate at
which copy engines move as many to the next one, all at a time where all send. The fastest block of a probe is its time, the median of a
call's blocks the call's.

Calls stand in a captured graph, twenty to a replay, on operands that are new in each block; blocks of calls and of probes alternate in
random order. A block lasts as long as its slower rank says, by events on its own device. Of several tries in fresh processes the best
counts, as in gates/perf.py. After some blocks, drawn, and after the last, results are held against the row's promise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from alpha.backends.cuda.lib import in_order
from alpha.comm.world import World
from alpha.component import Component
from alpha.cuda_runtime import Kernel, Source, Span, _bindings, capture, compile_kernel, download, upload
from alpha.cuda_runtime.device import stream_handle
from alpha.cuda_runtime.peers import Peers
from alpha.flops.v1 import VERSION as FLOPS
from alpha.gates import perf
from alpha.gates.contracts.device_ranks import Bench, bits_of, job, promised_to
from alpha.gates.subjects import fresh_nonce, generator, make_record, short
from alpha.ops.collectives import wire_bytes
from alpha.profile.noise import orders
from alpha.registry.cases import CaseRecord, Share
from alpha.registry.gpu import devices_of
from alpha.registry.record import Record
from alpha.types import TensorType

SIZES = {"short": 1 << 10, "long": 16 << 20}
"""Case name -> bytes of the longer of operand and result. A barrier has none."""
IN_GRAPH, REPLAYS = {"short": 20, "long": 10}, {"short": 10, "long": 4}
BLOCKS, HOPS, COPIES = 12, 400, 8
BOTH_WAYS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
"""Ops whose bytes cross in both directions at a time."""


def measure(component: Component, nonce: str | None = None, *, tries: int | None = None) -> Record:
    """Run the gate; the verdict is the judge's. `tries`: see `perf.best_of`; given, results are not held against the row."""
    nonce, op = nonce or fresh_nonce(), component.id.partition(".")[0]
    line, found = perf.lines(component), list[Share]()
    for name, nbytes in sizes(component).items():
        rng = generator(nonce, component.id, "perf", name)
        found.append(perf.best_of(line.get(name), tries, partial(_case, devices_of(component), op, name, nbytes, rng, tries is None)))
    return make_record(component, "perf", nonce, len(found), found, flops=FLOPS)


def sizes(component: Component) -> Mapping[str, int]:
    """Case name -> bytes."""
    return {"short": 0} if component.op == "barrier" else SIZES


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record holds (expected.py)."""
    return [(Share, name) for name in sizes(component)]


def _case(ranks: int, op: str, name: str, nbytes: int, rng: np.random.Generator, checked: bool) -> Share:
    ended = job(ranks, "alpha.gates.contracts.device_perf:at_speed", op, name, nbytes, int(rng.integers(1 << 30)), checked)
    for e in sorted(ended, key=lambda e: e.rank is not None):  # who ended because another one did says less
        if e.result is None or e.result[1]:
            why = e.result[1] if e.result else said(e.error) or f"a rank ended with status {e.status}"
            return Share(name=name, share=0.0, times_ns=(), note=str(why)[:120])
    times = {arm: [max(both) for both in zip(*(e.result[0][arm] for e in ended), strict=True)] for arm in ended[0].result[0]}
    taken = sorted(round(t) for t in times["calls"])
    hop, moved = min(times["hop"]), min(times.get("copy", [0.0]))
    share = max(hop, moved) / float(np.median(taken))
    return Share(name=name, share=short(share, 4), times_ns=tuple(taken), ceiling_ns=round(max(hop, moved)),
                 limit="bytes" if moved >= hop else "hops", shape=" ".join(map(str, _types(op, nbytes, ranks)))[:120])


def said(error: str) -> str:
    """What an error says and what came, of its text or of a traceback that ends with it: in its last lines stands what to do."""
    lines = error.strip().splitlines()
    start = next((i for i in reversed(range(len(lines))) if lines[i][:1].strip()), 0)
    found = " ".join(" ".join(lines[start:start + 2]).split())
    name, colon, words = found.partition(": ")
    return name.rpartition(".")[2] + colon + words if " " not in name else found  # a note is short: without the error's module


def _types(op: str, nbytes: int, size: int) -> tuple[TensorType, ...]:
    count = nbytes // 4 // (size if op == "all_gather" else 1)
    return () if op == "barrier" else (TensorType((count,), "f32"),)


class Hops:
    """The probe of a hop between two GPUs: of members 0 and 1, 2 and 3, at a time."""

    def __init__(self, bench: Bench, peers: Peers) -> None:
        self.arena, self.turn, self.me = peers.arena(256, name="hops"), 1, bench.channel.me
        self.words = bench.channel.everywhere(self.arena.address)[0]
        self.kernel = Kernel(compile_kernel(Source.of("probe/hop.cu")), "hop")

    def __call__(self, stream: Any) -> None:
        one = self.kernel.prepare((1, 1, 1), (1, 1, 1), (
            ctypes.c_uint64(self.words[self.me]), ctypes.c_uint64(self.words[self.me ^ 1]), np.uint32(self.me & 1), np.uint32(self.turn),
            np.uint32(HOPS), ctypes.c_uint64(5 * 10**9)))
        one(stream)
        self.turn += HOPS


def at_speed(peers: Peers, world: World, op: str, name: str, nbytes: int, seed: int, checked: bool) -> tuple[dict[str, list[float]], str]:
    """(arm -> ns of a call in each block, what was wrong with the results or '')."""
    moved = wire_bytes("send" if op == "receive" else op, _types(op, nbytes, peers.size), {"size": peers.size}, "ring") if nbytes else 0
    bench, rng = Bench(peers, room=max(nbytes, moved, 1 << 20)), np.random.default_rng(seed)
    n, me, stream = bench.channel.size, bench.channel.me, bench.stream
    count = nbytes // 4 // (n if op in ("all_gather", "reduce_scatter", "all_to_all") else 1)
    operand = nbytes // 4 // (n if op == "all_gather" else 1)
    result = count * n if op in ("all_gather", "all_to_all") else count
    x, y, root = bench.x.address, bench.y.address, 1 if op == "receive" else 0
    made = bench.made(op, x, y, count, "f32", None, "sum", root)
    graph = capture(in_order([made] * IN_GRAPH[name]), stream)
    hops = Hops(bench, peers)
    arms: dict[str, tuple[Callable[[Any], None], int]] = {
        "calls": (in_order([graph.launch] * REPLAYS[name]), IN_GRAPH[name] * REPLAYS[name]), "hop": (hops, HOPS)}
    if name == "long":
        there = bench.channel.everywhere(y)[0][(me + 1) % n]
        sends = op in BOTH_WAYS or me == root
        arms["copy"] = in_order([partial(_copy, there, x, moved)] * COPIES * sends), COPIES
    bases = [rng.standard_normal(operand).astype(np.float32) for _ in range(n)]
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    wrong = ""
    for order in orders(len(arms), BLOCKS + 1, rng):
        factor = np.float32(1 + 0.5 * rng.random())
        xs = [b * factor for b in bases]
        if operand:
            upload(Span(x, operand * 4), xs[me])
        for i in order:
            arm, (run, calls) = list(arms)[i], list(arms.values())[i]
            if arm == "calls" and nbytes:
                upload(Span(y, result * 4), np.full(result * 4, 0xFF, np.uint8))
            taken[arm].append(_block(bench, run) / calls)
            bench.channel.check()
            if arm == "calls" and nbytes and checked and (len(taken[arm]) > BLOCKS or rng.random() < 0.2):
                want = promised_to(op, xs, "f32", "sum", root, me)
                if want is not None and download(Span(y, result * 4), (result * 4,), np.uint8).tobytes() != bits_of(want, "f32").tobytes():
                    wrong = wrong or "timed calls gave wrong results"
    return {arm: blocks[1:] for arm, blocks in taken.items()}, wrong  # the first block warms up


def _block(bench: Bench, run: Callable[[Any], None]) -> float:
    """Nanoseconds of a block on this rank's device, from when both ranks have come."""
    start, end = bench.device.event(), bench.device.event()
    bench.channel.peers.exchange(b"block")
    bench.meet(bench.stream)
    start.record(bench.stream)
    run(bench.stream)
    end.record(bench.stream)
    end.synchronize()
    return 1e6 * float(end.time_since(start))


def _copy(target: int, source: int, nbytes: int, stream: Any) -> None:
    driver = _bindings.driver()
    _bindings.check("cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync(target, source, nbytes, stream_handle(stream)))
