"""The roles of attention's one-pass backward (kernels/attention/one_pass.cu) as coroutines over emulated barriers, and what they stand on:
items, places and turns of kernels/attention/turns.cuh compiled for the host, and launches that the real wrapper prepared.

`judge` looks at: arrivals beyond a barrier's count; memory that is written while a copy, a product or a store may still read it, or read
before it was written; additions out of order, or two at a time; waits in a circle; dQ, dK, dV. Tiles have few columns; lanes are not looked
at.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_library import host_library, sources

from alpha.backends.cuda.kernels import flash as wrapper
from alpha.backends.cuda.kernels.flash import AttentionBackward, AttentionProblem, Tensor4, choose, places
from alpha.cuda_runtime.compile import KERNELS
from alpha.cuda_runtime.memory import Span
from alpha.registry.faults import Fault

PARTS = ("attention/spans.cuh", "attention/turns.cuh")
HOST = """
#include <algorithm>
#include <cstring>
using std::min;
using std::max;
#define __device__
#define __forceinline__ inline
struct Dim { unsigned x, y, z; };
static thread_local Dim threadIdx;
static float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
#include "turns.cuh"
using namespace attn;
using namespace attn::one_pass;
extern "C" {
int sums_bytes() { return sizeof(Sums); }
void item(const Params* p, const Sums* u, int t, int nblocks, int nheads, int* out) {
    const Item it = item_at(*p, *u, t, nblocks, nheads);
    const int x[7] = {it.n, it.b, it.hk, it.place, it.generation, it.m.begin, it.m.end};
    std::memcpy(out, x, sizeof x);
}
void own(const Params* p, int b, int key, int* out) {
    const Blocks own = blocks<BQ>(queries_of(*p, b, key), queries_of(*p, b, key + 63));
    out[0] = own.begin;
    out[1] = key < p->Sk ? own.end : own.begin;
}
void seen(const Params* p, int b, int key, int* out) {
    const Span s = queries_of(*p, b, key);
    out[0] = s.lo;
    out[1] = s.hi;
}
void order(const Params* p, int b, int i, int* out) {
    const Order o = order_of(*p, b, i);
    out[0] = o.first;
    out[1] = o.last;
}
int turn(const Params* p, const Sums* u, int t, int nblocks, int nheads, int i) {
    const Item it = item_at(*p, *u, t, nblocks, nheads);
    return turn_of(it, order_of(*p, it.b, i));
}
int sum(const Params* p, const Sums* u, int t, int nblocks, int nheads, int g, int i) {
    return sum_at(*u, item_at(*p, *u, t, nblocks, nheads), p->H / p->Hkv, g, i);
}
}
"""
DELTA = """
#include <cstdint>
#include <cmath>
#include <pthread.h>
#include <thread>
#include <vector>
struct uint4 { uint32_t x, y, z, w; };
static float __uint_as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
static Dim blockIdx, gridDim;
static pthread_barrier_t together;
static float lanes[32];
static float __shfl_xor_sync(unsigned, float x, int other) {
    lanes[threadIdx.x % 32] = x;
    pthread_barrier_wait(&together);
    const float y = lanes[(threadIdx.x % 32) ^ other];
    pthread_barrier_wait(&together);
    return y;
}
#include "bf16.cuh"
#include "math.cuh"
namespace attn {
using namespace ptx;
STRIDES
DOT
namespace one_pass {
constexpr int D = 64;
BODY
}
}
extern "C" void delta_rows(const uint16_t* o, const long* so, const uint16_t* g, const long* sg, uint16_t* dq, const long* sdq,
                           const Params* p, const Sums* u, int ctas) {
    pthread_barrier_init(&together, nullptr, 32);
    gridDim = {unsigned(ctas), 1, 1};
    for (unsigned block = 0; block < unsigned(ctas); ++block)
        for (unsigned warp = 0; warp < THREADS / 32; ++warp) {
            std::vector<std::thread> all;
            blockIdx = {block, 0, 0};
            for (unsigned lane = 0; lane < 32; ++lane)
                all.emplace_back([=] {
                    threadIdx = {32 * warp + lane, 0, 0};
                    delta(o, Strides{so[0], so[1], so[2]}, g, Strides{sg[0], sg[1], sg[2]}, dq, Strides{sdq[0], sdq[1], sdq[2]}, *p, *u);
                });
            for (auto& x : all) x.join();
        }
}
"""
STAGES, DS, TURNS, DONE, W, BQ, KEYS, D = 4, 4, 4, 4, 2, 64, 128, 4

MIRRORED = (
    "constexpr int D = 64, W = 2, STAGES = 4, DS = 4, TURNS = 4, DONE = 4, TILE = 64 * 64 * 2;",
    "mbarrier_init(&sh.kv_full[s], 1);", "mbarrier_init(&sh.kv_empty[s], W + 4);", "mbarrier_init(&sh.q_full[s], 1);",
    "mbarrier_init(&sh.g_full[s], 1);", "mbarrier_init(&sh.empty[s], 128 * W);", "mbarrier_init(&sh.ds_full[s], 4 * W);",
    "mbarrier_init(&sh.ds_empty[s], 4);", "mbarrier_init(&sh.turn_full[s], 1);", "mbarrier_init(&sh.turn_empty[s], 4);",
    "mbarrier_init(&sh.done_full[s], 4);", "mbarrier_init(&sh.done_empty[s], 1);", "sh.queue.init(4 * W + 4 + 2);",
    "item = atomicAdd(p.queue, 1);", "t = atomicAdd(p.queue, 1);", "u.turn[i] = 0;",
    "while (load_acquire(u.turn + sum_at(u, it, group, g, i)) < before) {", "const int before = turn_of(it, o);",
    "add_release(u.turn + sum_at(u, it, group, g, i), 1);",
)  # fmt: skip
"""Lines that the roles below repeat; each stands once in the kernel."""

Role = Generator[Callable[[], bool] | None, None, Any]
"""Yields what it waits for; None: a step that takes its time."""


def between(text: str, first: str, last: str) -> str:
    """From the one place of `first` to the next `last`, both included."""
    assert text.count(first) == 1, first
    start = text.index(first)
    return text[start : text.index(last, start) + len(last)]


def compiled(fault: Fault | None = None) -> ctypes.CDLL:
    """The library, from sources with a fault in them."""
    texts = sources((*PARTS, "attention/one_pass.cu"), fault)
    kernel = texts.pop("attention/one_pass.cu")
    parts = (KERNELS / "attention/parts.cuh").read_text(encoding="utf-8")
    texts |= sources(("common/bf16.cuh", "common/math.cuh"))
    delta = DELTA
    for mark, text, first, last in (("STRIDES", parts, "struct Strides {", "};"), ("BODY", kernel, "constexpr int ROWS", "\n}\n"),
                                    ("DOT", parts, "__device__ __forceinline__ float dot8", "\n}\n")):
        delta = delta.replace(mark, between(text, first, last))
    return host_library({"host.cpp": HOST + delta, **{Path(name).name: text for name, text in texts.items()}}, "-pthread")


# ---------------------------------------------------------------- what the wrapper prepares


@dataclass(frozen=True)
class Prepared:
    """The arguments of the second launch."""

    problem: AttentionProblem
    params: Any
    sums: Any
    grid: int
    names: tuple[str, ...]


def prepare(problem: AttentionProblem, *, section: int = 0, blocks: int = 0) -> Prepared:
    """By AttentionBackward, on made addresses."""
    made: list[tuple[str, int, list[Any]]] = []

    def kernel(cubin: Any, name: str, *, shared_bytes: int = 0) -> Any:
        assert shared_bytes <= 232448
        return SimpleNamespace(prepare=lambda grid, block, arguments: made.append((name, grid[0], arguments)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapper, "Kernel", kernel)
        patch.setattr(wrapper, "compile_kernel", lambda source: source)
        patch.setattr(wrapper, "TensorMap", lambda *a, **k: None)
        choice = replace(choose(problem), one=True, section=section, blocks=blocks or 132)
        tensor = Tensor4.contiguous(1 << 20, problem.queries, problem.heads, 64)
        workspace = Span(1 << 30, choice.workspace_bytes(problem))
        rows = Span(1 << 25, 4 * problem.batch * problem.heads * problem.queries)
        AttentionBackward(problem, *[tensor] * 4, rows, *[tensor] * 4, workspace, Span(256, 256), choice=choice)
    (_, _, first), (_, grid, second) = made
    assert bytes(first[-1]) == bytes(second[-1]) and bytes(first[-2]) == bytes(second[-2])
    params, sums, place = second[-2], second[-1], places(problem, choice)
    assert sums.partial == workspace.address + 2 * problem.statistics_bytes == params.lse2 + 2 * problem.statistics_bytes
    assert sums.turn + 4 * place.sums <= workspace.address + workspace.nbytes and sums.partial + 16384 * place.sums <= sums.turn
    assert place.sums == sums.ring * problem.heads // problem.kv_heads * sums.mblocks
    return Prepared(problem, params, sums, grid, tuple(name for name, _, _ in made))


class Shape:
    """A prepared launch as its roles see it, and operands of small whole numbers."""

    def __init__(self, lib: ctypes.CDLL, made: Prepared, seed: int) -> None:
        self.lib, self.p, self.u, self.problem, self.grid = lib, made.params, made.sums, made.problem, made.grid
        p = self.problem
        self.group, self.nheads = p.heads // p.kv_heads, p.batch * p.kv_heads
        self.nblocks, self.mblocks = -(-p.keys // KEYS), made.sums.mblocks
        self.tiles = self.nblocks * self.nheads
        rng = np.random.default_rng(seed)
        self.q, self.g = (rng.integers(-2, 3, (p.batch, p.heads, self.mblocks * BQ, D)).astype(float) for _ in range(2))
        self.k, self.v = (rng.integers(-2, 3, (p.batch, p.kv_heads, self.nblocks * KEYS, D)).astype(float) for _ in range(2))
        self.q[:, :, p.queries :] = self.g[:, :, p.queries :] = self.k[:, :, p.keys :] = self.v[:, :, p.keys :] = 0

    def _ints(self, count: int, function: Any, *arguments: Any) -> tuple[int, ...]:
        out = (ctypes.c_int * count)()
        function(ctypes.byref(self.p), *arguments, out)
        return tuple(out)

    def item(self, t: int) -> tuple[int, ...]:
        """n, b, hk, place, generation, first and past the last block of queries."""
        return self._ints(7, self.lib.item, ctypes.byref(self.u), t, self.nblocks, self.nheads)

    def own(self, b: int, key: int) -> tuple[int, ...]:
        return self._ints(2, self.lib.own, b, key)

    def order(self, b: int, i: int) -> tuple[int, ...]:
        return self._ints(2, self.lib.order, b, i)

    def turn(self, t: int, i: int) -> int:
        return int(self.lib.turn(ctypes.byref(self.p), ctypes.byref(self.u), t, self.nblocks, self.nheads, i))

    def sum(self, t: int, g: int, i: int) -> int:
        return int(self.lib.sum(ctypes.byref(self.p), ctypes.byref(self.u), t, self.nblocks, self.nheads, g, i))

    def seen(self, b: int, keys: range, queries: range) -> np.ndarray:
        """[key, query]: what the masks of the kernel leave."""
        out = np.zeros((len(keys), len(queries)))
        for a, key in enumerate(keys):
            lo, hi = self._ints(2, self.lib.seen, b, key) if key < self.problem.keys else (1, 0)
            out[a] = [lo <= i <= hi for i in queries]
        return out


# ---------------------------------------------------------------- the machine


class Barrier:
    """An mbarrier: `count` arrivals and all announced copies end a phase."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count, self.pending, self.copies, self.phase = name, count, count, 0, 0

    def _turn(self) -> None:
        if self.pending == 0 and self.copies == 0:
            self.phase, self.pending = self.phase ^ 1, self.count

    def arrive(self, n: int = 1) -> None:
        assert self.pending >= n, f"{self.name}: {n} arrivals where {self.pending} are left"
        self.pending -= n
        self._turn()

    def expect(self, copies: int) -> None:
        self.copies += copies
        self.arrive()

    def landed(self) -> None:
        self.copies -= 1
        self._turn()


class Ring:
    """Place and parity, as RingState."""

    def __init__(self, stages: int, parity: int) -> None:
        self.stages, self.slot, self.parity = stages, 0, parity

    def advance(self) -> None:
        self.slot += 1
        if self.slot == self.stages:
            self.slot, self.parity = 0, self.parity ^ 1

    def passed(self, barriers: list[Barrier]) -> Callable[[], bool]:
        """A wait for this phase."""
        return lambda barrier=barriers[self.slot], parity=self.parity: barrier.phase != parity  # type: ignore[misc]


class Buffer:
    """A piece of shared memory, and who may still read or write it."""

    def __init__(self, name: str) -> None:
        self.name, self.value, self.readers, self.writers = name, None, 0, 0

    def begin_write(self) -> None:
        assert self.readers == 0 and self.writers == 0, f"{self.name} written under {self.readers} readers, {self.writers} writers"
        self.writers += 1

    def end_write(self, value: Any) -> None:
        self.writers -= 1
        self.value = value

    def write(self, value: Any) -> None:
        self.begin_write()
        self.end_write(value)

    def begin_read(self) -> Any:
        assert self.writers == 0 and self.value is not None, f"{self.name} read while it is written, or before"
        self.readers += 1
        return self.value

    def end_read(self) -> None:
        self.readers -= 1


@dataclass
class Device:
    """What CTAs share."""

    shape: Shape
    wrong: str
    turn: list[int] = field(default_factory=list)
    draws: int = 0
    flights: list[Role] = field(default_factory=list)

    def launch(self) -> None:
        """What the first of the two launches leaves."""
        s, p = self.shape, self.shape.problem
        n = s.u.ring * s.group * s.mblocks
        if self.wrong != "turns of the launch before" or not self.turn:
            self.turn = [0] * n
        self.partial: list[Any] = [None] * n
        self.using = [False] * n
        self.added: dict[tuple[int, int, int], list[int]] = {}
        self.draws = 0
        self.dq = np.full((p.batch, p.heads, s.mblocks * BQ, D), np.nan)
        self.dk, self.dv = (np.full((p.batch, p.kv_heads, s.nblocks * KEYS, D), np.nan) for _ in range(2))


class Cta:
    """One CTA: its shared memory and its roles. `wrong`: what one of them does wrong."""

    def __init__(self, shape: Shape, dev: Device, index: int) -> None:
        self.s, self.dev, self.index, self.wrong = shape, dev, index, dev.wrong

        def buffers(name: str, *sizes: int) -> Any:
            return [buffers(f"{name}[{i}]", *sizes[1:]) for i in range(sizes[0])] if sizes else Buffer(name)

        def barriers(name: str, n: int, count: int) -> list[Barrier]:
            return [Barrier(f"{name}[{i}] of CTA {index}", count) for i in range(n)]

        self.k, self.v, self.q, self.g = buffers("k", 2, W), buffers("v", 2, W), buffers("q", STAGES), buffers("g", STAGES)
        self.ds, self.dk, self.out, self.item = buffers("ds", DS, W), buffers("dk", W), buffers("dq"), buffers("item", 2)
        self.kv_full = barriers("kv_full", 2, 1)
        self.kv_empty = barriers("kv_empty", 2, W if self.wrong == "K not kept for dQ" else W + 4)
        self.q_full, self.g_full = barriers("q_full", STAGES, 1), barriers("g_full", STAGES, 1)
        self.empty = barriers("empty", STAGES, 128 * W)
        self.ds_full, self.ds_empty = barriers("ds_full", DS, 4 * W), barriers("ds_empty", DS, 4)
        self.turn_full, self.turn_empty = barriers("turn_full", TURNS, 1), barriers("turn_empty", TURNS, 4)
        self.done_full, self.done_empty = barriers("done_full", DONE, 4), barriers("done_empty", DONE, 1)
        self.item_full, self.item_empty = barriers("item_full", 2, 1), barriers("item_empty", 2, 4 * W + 4 + 2)

    def roles(self) -> list[tuple[str, Role]]:
        named = [("copies", self.copies()), ("waiter", self.wait_for_turns()), ("giver", self.give_turns()), ("dq", self.dq_role()),
                 *((f"consumer {w}", self.consumer(w)) for w in range(W))]
        return [(f"CTA {self.index} {name}", role) for name, role in named]

    def load(self, buffer: Buffer, value: np.ndarray, barrier: Barrier) -> None:
        """A copy that lands later."""
        buffer.begin_write()

        def flight() -> Role:
            yield None
            buffer.end_write(value)
            barrier.landed()

        self.dev.flights.append(flight())

    def store(self, buffer: Buffer, target: np.ndarray) -> list[bool]:
        """A bulk store that reads later; [True] once it has."""
        value, done = buffer.begin_read(), [False]

        def flight() -> Role:
            yield None
            target[:] = value
            buffer.end_read()
            done[0] = True

        self.dev.flights.append(flight())
        return done

    def draw(self) -> int:
        self.dev.draws += 1
        return self.dev.draws - 1

    def take(self, at: Ring, arrivals: int) -> Role:
        yield at.passed(self.item_full)
        t = self.item[at.slot].value
        self.item_empty[at.slot].arrive(arrivals)
        at.advance()
        return t

    def walk(self, t: int) -> list[tuple[int, int]]:
        """(block of queries, head of the group) in the order in which every role sees them."""
        *_, begin, end = self.s.item(t)
        return [(i, g) for i in range(end - 1, begin - 1, -1) for g in range(self.s.group)]

    def copies(self) -> Role:
        s = self.s
        qs, kv, slot = Ring(STAGES, 1), Ring(2, 1), Ring(2, 1)
        t = self.index if self.wrong == "first item by index" else self.draw()
        while True:
            yield slot.passed(self.item_empty)
            self.item[slot.slot].write(t)
            self.item_full[slot.slot].arrive()
            slot.advance()
            if t >= s.tiles:
                return
            n, b, hk, *_ = s.item(t)
            yield kv.passed(self.kv_empty)
            self.kv_full[kv.slot].expect(2 * W)
            for w in range(W):
                rows = slice(n * KEYS + 64 * w, n * KEYS + 64 * w + 64)
                self.load(self.k[kv.slot][w], s.k[b, hk, rows], self.kv_full[kv.slot])
                self.load(self.v[kv.slot][w], s.v[b, hk, rows], self.kv_full[kv.slot])
            kv.advance()
            for i, g in self.walk(t):
                h, rows = hk * s.group + g, slice(i * BQ, i * BQ + BQ)
                yield qs.passed(self.empty)
                self.q_full[qs.slot].expect(1)
                self.load(self.q[qs.slot], s.q[b, h, rows], self.q_full[qs.slot])
                self.g_full[qs.slot].expect(1)
                self.load(self.g[qs.slot], s.g[b, h, rows], self.g_full[qs.slot])
                qs.advance()
            t = self.draw() + (s.grid if self.wrong == "first item by index" else 0)

    def wait_for_turns(self) -> Role:
        s, slot, ts = self.s, Ring(2, 0), Ring(TURNS, 1)
        while True:
            t = yield from self.take(slot, 1)
            if t >= s.tiles:
                return
            n, b, *_ = s.item(t)
            for i, g in self.walk(t):
                first, last = s.order(b, i)
                assert first <= n <= last, "an item comes to a block that does not count it"
                if first == last:
                    continue
                yield ts.passed(self.turn_empty)
                at, before = s.sum(t, g, i), s.turn(t, i)
                if self.wrong != "turns not awaited":
                    yield lambda at=at, before=before: self.dev.turn[at] >= before  # type: ignore[misc]
                self.turn_full[ts.slot].arrive()
                ts.advance()

    def give_turns(self) -> Role:
        s, slot, done = self.s, Ring(2, 0), Ring(DONE, 0)
        while True:
            t = yield from self.take(slot, 1)
            if t >= s.tiles:
                return
            n, b, *_ = s.item(t)
            for i, g in self.walk(t):
                first, last = s.order(b, i)
                if first == last:
                    continue
                early = self.wrong == "turns given before the sum"
                if early:
                    self.dev.turn[s.sum(t, g, i)] += 1
                yield done.passed(self.done_full)
                yield None
                if not early and not (self.wrong == "the last gives no turn" and n == last):
                    self.dev.turn[s.sum(t, g, i)] += 1
                self.done_empty[done.slot].arrive()
                done.advance()

    def dq_role(self) -> Role:
        s, dev = self.s, self.dev
        slot, kv, done, ds, ts = Ring(2, 0), Ring(2, 0), Ring(DONE, 1), Ring(DS, 0), Ring(TURNS, 0)
        stored = [True]

        def alone(at: int) -> None:
            assert not dev.using[at], "two CTAs at one sum"
            dev.using[at] = True

        while True:
            t = yield from self.take(slot, 4)
            if t >= s.tiles:
                break
            n, b, hk, *_ = s.item(t)
            yield kv.passed(self.kv_full)
            for i, g in self.walk(t):
                first, last = s.order(b, i)
                at, h = s.sum(t, g, i), hk * s.group + g
                onto = n == last and first != last
                before = np.zeros((BQ, D))
                if onto:
                    yield ts.passed(self.turn_full)
                    alone(at)
                    assert dev.partial[at] is not None, "a sum that nobody began"
                    before = dev.partial[at]
                yield ds.passed(self.ds_full)
                tiles = [x.begin_read() for x in self.ds[ds.slot]], [x.begin_read() for x in self.k[kv.slot]]
                yield None  # the product
                for x in (*self.ds[ds.slot], *self.k[kv.slot]):
                    x.end_read()
                product = before + np.concatenate(tiles[0]).T @ np.concatenate(tiles[1])
                self.ds_empty[ds.slot].arrive(4)
                ds.advance()
                if n == last:
                    dev.added.setdefault((b, h, i), []).append(n)
                    yield lambda stored=stored: stored[0]  # type: ignore[misc]
                    self.out.write(product)
                    stored = self.store(self.out, dev.dq[b, h, i * BQ : i * BQ + BQ])
                else:
                    yield ts.passed(self.turn_full)
                    alone(at)
                    dev.added.setdefault((b, h, i), []).append(n)
                    yield None
                    assert (dev.partial[at] is None) == (n == first), "a sum begun twice, or not at all"
                    dev.partial[at] = product if n == first else dev.partial[at] + product
                if first != last:
                    yield done.passed(self.done_empty)
                    if onto:
                        dev.partial[at] = None
                    dev.using[at] = False
                    self.turn_empty[ts.slot].arrive(4)
                    self.done_full[done.slot].arrive(4)
                    ts.advance()
                    done.advance()
            if self.wrong != "K not kept for dQ":
                self.kv_empty[kv.slot].arrive(4)
            kv.advance()
        yield lambda: stored[0]

    def consumer(self, w: int) -> Role:
        s, dev = self.s, self.dev
        qs, kv, slot, dss = Ring(STAGES, 0), Ring(2, 0), Ring(2, 0), Ring(DS, 1)
        stored: list[list[bool]] = []
        while True:
            t = yield from self.take(slot, 4)
            if t >= s.tiles:
                break
            n, b, hk, *_ = s.item(t)
            n0 = n * KEYS + 64 * w
            begin, end = s.own(b, n0)
            k, v = self.k[kv.slot][w], self.v[kv.slot][w]
            dk, dv = np.zeros((64, D)), np.zeros((64, D))
            held, busy, reading = 0, False, []
            yield kv.passed(self.kv_full)
            if stored:
                yield lambda stored=stored: all(x[0] for x in stored)  # type: ignore[misc]
                self.kv_empty[kv.slot ^ 1].arrive()
            for i, _ in self.walk(t):
                if not begin <= i < end:
                    if busy:
                        yield None
                        for x in reading:
                            x.end_read()
                        self.empty[held].arrive(128)
                        busy, reading = False, []
                    yield qs.passed(self.q_full)
                    yield qs.passed(self.g_full)
                    self.empty[qs.slot].arrive(128)
                    qs.advance()
                    yield dss.passed(self.ds_empty)
                    if self.wrong != "skipped dS not zero" or self.ds[dss.slot][w].value is None:
                        self.ds[dss.slot][w].write(np.zeros((64, BQ)))
                    self.ds_full[dss.slot].arrive(4)
                    dss.advance()
                    continue
                yield qs.passed(self.q_full)
                scores = k.begin_read() @ self.q[qs.slot].begin_read().T
                yield None
                for x in reading:  # dV and dK of the block before have retired
                    x.end_read()
                if busy:
                    self.empty[held].arrive(128)
                yield qs.passed(self.g_full)
                dp = v.value @ self.g[qs.slot].begin_read().T  # V lies in registers
                if self.wrong != "dS written under dQ":
                    yield dss.passed(self.ds_empty)
                yield None
                k.end_read()
                scores = scores * s.seen(b, range(n0, n0 + 64), range(i * BQ, i * BQ + BQ))
                dv = dv + scores @ self.g[qs.slot].value
                yield None
                dscores = scores * dp
                dk = dk + dscores @ self.q[qs.slot].value
                reading = [self.q[qs.slot], self.g[qs.slot]]
                yield None
                self.ds[dss.slot][w].write(dscores)
                self.ds_full[dss.slot].arrive(4)
                dss.advance()
                held, busy = qs.slot, True
                qs.advance()
            yield None
            for x in reading:
                x.end_read()
            if busy:
                self.empty[held].arrive(128)
            rows = slice(n0, n0 + 64)
            v.write(dv)
            self.dk[w].write(dk)
            stored = [self.store(v, dev.dv[b, hk, rows]), self.store(self.dk[w], dev.dk[b, hk, rows])]
            kv.advance()
        yield lambda: all(x[0] for x in stored)


def run(shape: Shape, dev: Device, rng: random.Random, resident: int) -> None:
    """One launch. `resident`: CTAs that have room at once; the others start, in any order, when one has ended."""
    waiting_ctas = list(range(shape.grid))
    rng.shuffle(waiting_ctas)
    live: dict[int, int] = {}
    roles: list[tuple[int, str, Role, Callable[[], bool] | None]] = []
    slow = rng.choice((0.0, 0.5, 0.9))

    def land() -> bool:
        flight = rng.choice(dev.flights)
        if next(flight, "ended") == "ended":
            dev.flights.remove(flight)
        return True

    while roles or waiting_ctas or dev.flights:
        while waiting_ctas and len(live) < resident:
            index = waiting_ctas.pop()
            made = Cta(shape, dev, index).roles()
            live[index] = len(made)
            roles += [(index, name, role, None) for name, role in made]
        moved = False
        for at in rng.sample(range(len(roles)), len(roles)):
            index, name, role, condition = roles[at]
            if condition is not None and not condition():
                continue
            moved = True
            if rng.random() < slow:
                continue
            try:
                roles[at] = (index, name, role, next(role))
            except StopIteration:
                roles[at] = (-1, name, role, None)
                live[index] -= 1
                if not live[index]:
                    del live[index]
            if dev.flights and rng.random() < 0.3:
                land()
        roles = [x for x in roles if x[0] >= 0]
        if not moved and dev.flights:
            moved = land()
        assert moved or not roles, f"nothing can move: {[name for _, name, _, _ in roles]}"


def judge(shape: Shape, dev: Device) -> None:
    """Results and order of one launch."""
    p = shape.problem
    for (b, _, i), sequence in dev.added.items():
        first, last = shape.order(b, i)
        assert sequence == list(range(first, last + 1)) or first == last, f"dQ of block {i} adds {sequence}"
    at = np.arange(shape.mblocks * BQ)[:, None] + p.keys - p.queries
    key = np.arange(shape.nblocks * KEYS)[None]
    left, right = p.window
    mask = (key >= at - left) & (key <= at + right) & (key < p.keys) & (np.arange(shape.mblocks * BQ)[:, None] < p.queries)
    for b in range(p.batch):
        for hk in range(p.kv_heads):
            heads = range(hk * shape.group, (hk + 1) * shape.group)
            scores = {h: shape.q[b, h] @ shape.k[b, hk].T * mask for h in heads}
            ds = {h: scores[h] * (shape.g[b, h] @ shape.v[b, hk].T) for h in heads}
            assert np.array_equal(dev.dv[b, hk], sum(scores[h].T @ shape.g[b, h] for h in heads)), "dV"
            assert np.array_equal(dev.dk[b, hk], sum(ds[h].T @ shape.q[b, h] for h in heads)), "dK"
            for h in heads:
                for i in range(shape.mblocks):
                    got, rows = dev.dq[b, h, i * BQ : i * BQ + BQ], slice(i * BQ, i * BQ + BQ)
                    if mask[rows].any():
                        assert np.array_equal(got, ds[h][rows] @ shape.k[b, hk]), f"dQ of block {i}"
                    else:
                        assert np.isnan(got).all(), "a block that sees no key is the first launch's"
