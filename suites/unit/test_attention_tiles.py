"""The walk of the attention kernels over tiles, without a GPU: kernels/attention/spans.cuh and documents.cu compiled for the host, with the
loops of forward.cu, backward.cu and one_pass.cu around them, under launches that the real binders prepared.

What a thread multiplies, exponentiates and sums is not looked at; which (query, key) pairs it lets count is, each exactly once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated_gpu import emulated, emulated_gpu
from host_library import host_library, sources
from planted import planted

from alpha.backends.cuda.kernels import attention as binders
from alpha.backends.cuda.kernels import flash as wrapper
from alpha.backends.cuda.kernels.flash import DKV_STAGES, DQ_STAGES, FORWARD_STAGES, UNBOUNDED
from alpha.backends.cuda.lib import Gpu, Operand
from alpha.cuda_runtime.compile import KERNELS
from alpha.cuda_runtime.memory import Span
from alpha.errors import ShapeError
from alpha.gates import parity, run, subjects, tolerance
from alpha.gates.cuda import subjects as cuda_subjects
from alpha.ops.numerics import walk as naive_walk
from alpha.ops.table import row
from alpha.registry.faults import Fault
from alpha.train.catalogue import catalogue
from alpha.types import TensorType

PARTS = ("attention/spans.cuh", "attention/documents.cu")
HOST = """
#include <algorithm>
#include <cstring>
using std::min;
using std::max;
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(n)
struct Dim { unsigned x, y, z; };
static Dim blockIdx, threadIdx, blockDim;
static float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
struct Voted {};
static bool voting;
static int votes;
static int __syncthreads_or(int x) {
    if (!voting) return votes;
    votes |= x;
    throw Voted{};
}
template <class Body> static void launch(unsigned blocks, unsigned threads, Body body) {  // all threads up to the vote, then on
    blockDim = {threads, 1, 1};
    for (unsigned x = 0; x < blocks; ++x) {
        blockIdx = {x, 0, 0};
        votes = 0;
        for (int pass = 0; pass < 2; ++pass)
            for (unsigned t = 0; t < threads; ++t) {
                voting = pass == 0;
                threadIdx = {t, 0, 0};
                try { body(); } catch (Voted) {}
            }
    }
}
#include "spans.cuh"
#include "documents.cu"
extern "C" {
int params_bytes() { return sizeof(attn::Params); }
void documents(const int* of, const int* in, int* start, int* end, int n, int m, int blocks, int threads) {
    launch(blocks, threads, [=] { attn_documents(of, in, start, end, n, m); });
}
void refuse(const int* of, const int* in, float* lse, unsigned short* o, long batch, long position, long head, int n, int m, int heads,
            int width, int blocks, int threads) {
    launch(blocks, threads, [=] { attn_refuse(of, in, lse, o, batch, position, head, n, m, heads, width); });
}
static attn::Span span(const attn::Params* p, int keys, int b, int i) {
    return keys ? attn::keys_of(*p, b, i) : attn::queries_of(*p, b, i);
}
void spans(const attn::Params* p, int keys, int b, int rows, int* out) {
    for (int i = 0; i < rows; ++i) {
        const attn::Span s = span(p, keys, b, i);
        out[2 * i] = s.lo;
        out[2 * i + 1] = s.hi;
    }
}
void tile(const attn::Params* p, int keys, int b, int n, int r0, int r1, int* out) {
    const attn::Span first = span(p, keys, b, r0), last = span(p, keys, b, r1);
    const auto r = n == 64 ? attn::blocks<64>(first, last) : n == 96 ? attn::blocks<96>(first, last) : attn::blocks<128>(first, last);
    std::memcpy(out, &r, sizeof r);
}
void masked(int n, unsigned thread, int column, int lo0, int hi0, int lo1, int hi1, float* s) {
    threadIdx = {thread, 0, 0};
    const attn::Span a{lo0, hi0}, b{lo1, hi1};
    if (n == 64) attn::mask<64>(*(float (*)[32])s, column, a, b);
    if (n == 96) attn::mask<96>(*(float (*)[48])s, column, a, b);
    if (n == 128) attn::mask<128>(*(float (*)[64])s, column, a, b);
}
}
"""


def compiled(fault: Fault | None = None) -> ctypes.CDLL:
    """The library, from sources with a fault in them."""
    return host_library({"host.cpp": HOST, **{Path(part).name: text for part, text in sources(PARTS, fault).items()}})


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    return compiled()


# ---------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Layout:
    """One call. `ids`: of queries [B,T] and of keys [B,S], or none."""

    t: int
    s: int
    causal: bool = False
    window: int = 0
    ids: tuple[np.ndarray, np.ndarray] | None = None

    def seen(self) -> np.ndarray:
        """Bool [B,T,S], from the row's own words."""
        place, key = np.arange(self.t)[:, None] + self.s - self.t, np.arange(self.s)
        found = np.ones((1, self.t, self.s), bool)
        found = found & (key <= place) if self.causal else found
        found = found & (place - key < self.window) if self.window else found
        return found & (self.ids[0][:, :, None] == self.ids[1][:, None, :]) if self.ids else found

    def falls(self, b: int) -> bool:
        """Whether ids fall along row b of the batch."""
        return self.ids is not None and any(bool((np.diff(x[b]) < 0).any()) for x in self.ids)


def packed(*rows: Sequence[int]) -> np.ndarray:
    """[B,S] ids from lengths of documents."""
    return np.array([np.repeat(2 * np.arange(len(lengths)) - 3, lengths) for lengths in rows], np.int32)


def same(causal: bool, window: int, *rows: Sequence[int]) -> Layout:
    ids = packed(*rows)
    return Layout(ids.shape[1], ids.shape[1], causal, window, (ids, ids))


CHOSEN = (
    Layout(1, 1, True), Layout(65, 65, True), Layout(257, 257, True), Layout(129, 193), Layout(70, 201, True), Layout(201, 70, True),
    Layout(200, 200, True, 37), Layout(150, 66, True, 65), Layout(90, 90, False, 20), Layout(1, 130, True),
    same(True, 0, [64, 65, 64], [1, 1, 126, 1, 64]), same(True, 0, [64, 64, 128]), same(True, 0, [128, 128, 1]), same(True, 0, [1] * 130),
    same(True, 0, [29, 341, 30]), same(True, 0, [96, 96, 96]), same(True, 0, [63, 1, 64, 1]), same(False, 0, [70, 1, 59]),
    same(True, 20, [90, 15, 95]), same(False, 0, [193]), same(False, 40, [100, 101]), same(True, 0, [192, 192, 64]),
    same(True, 0, [500, 12, 588], [1, 1024, 75]),
    Layout(70, 90, False, 0, (packed([20, 30, 20]) + 2, packed([40, 20, 30]))),
    Layout(70, 201, True, 0, (packed([36, 34]), packed([167, 34]))),
    Layout(140, 70, True, 0, (packed([70, 60, 10]), packed([5, 55, 10]))), Layout(64, 64, False, 0, (packed([64]) + 100, packed([64]))),
    Layout(64, 64, False, 0, (packed([64]) - 100, packed([64]))),
)  # fmt: skip


def drawn(rng: np.random.Generator) -> Layout:
    """A layout at random: borders near multiples of the tiles are frequent; ids of queries and keys are the same, or two sorted draws."""
    t = int(rng.choice([rng.integers(1, 420), 64 * rng.integers(1, 7) + rng.integers(-1, 2)]))
    s = t if rng.random() < 0.6 else int(rng.integers(1, 420))
    causal, window = bool(rng.random() < 0.7), int(rng.choice([0, rng.integers(1, 200)]))

    def ids(n: int) -> np.ndarray:
        cuts = rng.integers(0, n, (2, rng.integers(1, 9)))
        cuts = np.where(rng.random(cuts.shape) < 0.4, cuts // 32 * 32, cuts)
        return (np.arange(n)[None, :, None] >= cuts[:, None, :]).sum(2).astype(np.int32)

    of_queries = ids(t)
    of_keys = of_queries if t == s and rng.random() < 0.7 else ids(s)
    return Layout(t, s, causal, window, (of_queries, of_keys))


def layouts(count: int) -> Iterator[Layout]:
    yield from CHOSEN
    rng = np.random.default_rng(7)
    for _ in range(count):
        yield drawn(rng)


# ---------------------------------------------------------------- the walk

MIRRORED = {
    "forward.cu": (
        ("const Blocks n = blocks<BN>(keys_of(p, b, m0), keys_of(p, b, m0 + 64 * W - 1));", 2),
        ("Blocks own = blocks<BN>(keys_of(p, b, m0 + 64 * w), keys_of(p, b, m0 + 64 * w + 63));", 1),
        ("if (m0 + 64 * w >= p.Sq) own.end = own.begin;", 1),
        ("if (n.end > n.begin) load_k(n.end - 1);", 1),
        ("for (int j = n.end - 1; j >= n.begin; --j) {", 1),
        ("pass(own.end > own.begin ? n.end - own.end : n.end - n.begin);", 1),
        ("if (own.end > own.begin) {", 1),
        ("int j = own.end - 1;", 1),
        ("for (--j; j >= own.begin; --j) {", 1),
        ("if (j >= own.clear_hi || j < own.clear_lo) mask<BN>(s, j * BN, span0, span1);", 1),
        ("const Span span0 = keys_of(p, b, row), span1 = keys_of(p, b, row + 8);", 1),
        ("pass(own.begin - n.begin);", 1),
    ),
    "backward.cu": (
        ("const Blocks n = blocks<BN>(keys_of(p, b, m0), keys_of(p, b, m0 + 64 * W - 1));", 2),
        ("for (int j = n.end - 1, first = 1; j >= n.begin || first; --j, first = 0) {", 1),
        ("Blocks own = blocks<BN>(keys_of(p, b, m0 + 64 * w), keys_of(p, b, m0 + 64 * w + 63));", 1),
        ("pass(own.end > own.begin ? n.end - own.end : n.end - n.begin);", 1),
        ("for (int j = own.end - 1; j >= own.begin; --j) {", 1),
        ("if (busy) pass(own.begin - n.begin);", 1),
        ("if (j >= own.clear_hi || j < own.clear_lo) mask<BN>(s, j * BN, span0, span1);", 1),
        ("const Blocks m = blocks<BQ>(queries_of(p, b, n0), queries_of(p, b, n0 + 64 * W - 1));", 2),
        ("Blocks own = blocks<BQ>(queries_of(p, b, n0 + 64 * w), queries_of(p, b, n0 + 64 * w + 63));", 1),
        ("if (n0 + 64 * w >= p.Sk) own.end = own.begin;", 1),
        ("for (int i = m.begin; i < m.end; ++i)", 2),
        ("if (i < own.begin || i >= own.end) {", 1),
        ("if (i >= own.clear_hi || i < own.clear_lo) mask<BQ>(s, i * BQ, span0, span1);", 1),
    ),
    "turns.cuh": (("it.m = blocks<BQ>(queries_of(p, it.b, it.n * KEYS), queries_of(p, it.b, it.n * KEYS + KEYS - 1));", 1),),
    "one_pass.cu": (
        ("for (int i = it.m.end - 1; i >= it.m.begin; --i)", 5),
        ("const Span none{1, 0};", 1),
        ("const Span span0 = row < p.Sk ? queries_of(p, it.b, row) : none;", 1),
        ("const Span span1 = row + 8 < p.Sk ? queries_of(p, it.b, row + 8) : none;", 1),
        ("Blocks own = blocks<BQ>(queries_of(p, it.b, n0), queries_of(p, it.b, n0 + 63));", 1),
        ("if (n0 >= p.Sk) own.end = own.begin;", 1),
        ("if (n0 + 63 >= p.Sk) own.clear_hi = 0;", 1),
        ("if (i < own.begin || i >= own.end) {", 1),
        ("if (i >= own.clear_hi || i < own.clear_lo) mask<BQ>(s, i * BQ, span0, span1);", 1),
    ),
}
"""The lines that `walk` repeats, and how often each stands in its file."""


@dataclass(frozen=True)
class Walked:
    """`counts` [rows, others]: how often each pair counted. `loaded`: blocks that a tile loads, as (first row, block)."""

    counts: np.ndarray
    loaded: list[tuple[int, int]]


def walk(lib: ctypes.CDLL, params: Any, *, keys: bool, b: int, warpgroups: int, width: int, down: bool) -> Walked:
    """The loops of one pass over one row of the batch. keys: rows are queries and blocks are keys (forward, dq), else the reverse (dkv).
    down: blocks are walked from the last to the first. AssertionError where producer and consumers would not count the same blocks, or
    where a block that needs no mask reaches past the end."""
    rows, others = (params.Sq, params.Sk) if keys else (params.Sk, params.Sq)
    found = np.empty((rows, 2), np.int32)
    lib.spans(ctypes.byref(params), keys, b, rows, found.ctypes.data_as(ctypes.c_void_p))
    counts, everything = np.zeros((rows, others + 2 * width), np.int64), []

    def tile(r0: int, r1: int) -> tuple[int, int, int, int]:
        out = (ctypes.c_int * 4)()
        lib.tile(ctypes.byref(params), keys, b, width, r0, r1, out)
        return out[0], out[1], out[2], out[3]

    for m0 in range(0, rows, 64 * warpgroups):
        begin, end, _, _ = tile(m0, m0 + 64 * warpgroups - 1)
        loaded = list(range(end - 1, begin - 1, -1) if down else range(begin, end))
        everything += [(m0, j) for j in loaded]
        for first in range(m0, m0 + 64 * warpgroups, 64):
            own_begin, own_end, clear_lo, clear_hi = tile(first, first + 63)
            own_end = own_begin if first >= rows else own_end
            mine = list(range(own_end - 1, own_begin - 1, -1) if down else range(own_begin, own_end))
            if mine:
                before = end - own_end if down else own_begin - begin
                assert before >= 0 and loaded[before : before + len(mine)] == mine, "a consumer works on blocks that its CTA does not load"
            r = np.arange(first, min(first + 64, rows))
            for j in mine:
                columns = np.arange(j * width, (j + 1) * width)
                if j >= clear_hi or j < clear_lo:
                    counts[r[:, None], columns] += (columns >= found[r, :1]) & (columns <= found[r, 1:])
                else:
                    counts[r[:, None], columns] += 1
    assert not counts[:, others:].any(), "columns past the end count"
    return Walked(counts[:, :others], everything)


class Recorder:
    """Stands for the driver: kernels of documents.cu run on the host, attention kernels leave their parameters."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        self.calls: list[tuple[str, Any]] = []

    def kernel(self, cubin: Any, name: str, *, shared_bytes: int = 0) -> Any:
        assert shared_bytes <= 232448

        def prepare(grid: tuple[int, int, int], block: tuple[int, int, int], arguments: Sequence[Any]) -> Callable[..., None]:
            plain = [ctypes.c_uint64(x.address) if isinstance(x, Span) else x for x in arguments]
            if name == "attn_documents":
                return lambda stream=None: self._run(name, self.lib.documents, [*plain, grid[0], block[0]])
            if name == "attn_refuse":
                return lambda stream=None: self._run(name, self.lib.refuse, [*plain, grid[0], block[0]])
            params = next(x for x in arguments if isinstance(x, wrapper._Params))
            return lambda stream=None: self.calls.append((name, None if "delta" in name else params))

        return SimpleNamespace(prepare=prepare)

    def _run(self, name: str, function: Any, arguments: list[Any]) -> None:
        function(*arguments)
        self.calls.append((name, None))


@pytest.fixture
def recorder(lib: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder(lib)
    monkeypatch.setattr(wrapper, "Kernel", made.kernel)
    monkeypatch.setattr(wrapper, "compile_kernel", lambda source: source)
    monkeypatch.setattr(wrapper, "TensorMap", lambda *a, **k: None)
    monkeypatch.setattr(binders, "fill", lambda span, byte, stream: ctypes.memset(span.address, byte, span.nbytes))
    return made


def bound(component_id: str, layout: Layout, d: int, heads: int = 2, groups: int = 1, *, poison: int = 0x7B) -> dict[str, np.ndarray]:
    """Binds a component to host memory and calls it once; the arrays by operand name, with 'scratch'. What it took of scratch must be
    what it declares."""
    component = catalogue()[component_id]
    b, t, s = 1 if layout.ids is None else layout.ids[0].shape[0], layout.t, layout.s
    types = {"q": (b, t, heads, d), "k": (b, s, groups, d), "v": (b, s, groups, d), "o": (b, t, heads, d), "do": (b, t, heads, d)}
    if "packed" in component_id:
        types = {"qkv": (b, t, (heads + 2 * groups) * d), "o": (b, t, heads * d), "do": (b, t, heads * d)}
    spec = row(component.op or "")
    names = [name.rstrip("?") for name in spec.inputs if layout.ids is not None or not name.endswith("?")]
    made = {}
    for name in names:
        dtype = "f32" if name == "lse" else "i32" if name.startswith("documents") else "bf16"
        shape = {"f32": (b, heads, t), "i32": (b, t if name[-1] == "q" else s)}.get(dtype) or types[name]
        made[name] = TensorType(shape, dtype)
    attrs: dict[str, object] = {"causal": layout.causal, "window": layout.window, "scale": 0.125}
    if "packed" in component_id:
        attrs |= {"heads": heads, "kv_heads": groups}
    ins = list(made.values())
    assert component.envelope.why_outside(ins, attrs) is None
    outs = spec.infer(ins, attrs)
    assert component.scratch is not None
    arrays = {f"{name}{'' if i < len(ins) else ' out'}": np.full(x.nbytes + 256, poison, np.uint8)
              for i, (name, x) in enumerate([*zip(names, ins), *zip(spec.outputs, outs)])}
    arrays["scratch"] = np.full(component.scratch(ins, attrs, 132) + 512, poison, np.uint8)

    def aligned(x: np.ndarray) -> int:
        return int(x.ctypes.data + -x.ctypes.data % 256)

    for name, ids in zip(("documents_q", "documents_k"), layout.ids or ()):
        ctypes.memmove(aligned(arrays[name]), np.ascontiguousarray(ids).ctypes.data, ids.nbytes)
    gpu = Gpu(None, Span(aligned(arrays["scratch"]), arrays["scratch"].size - 512), blocks=132)
    operands = [Operand(aligned(x), t) for x, t in zip(arrays.values(), [*ins, *outs])]
    component.implementation(gpu, operands[: len(ins)], operands[len(ins) :], attrs)(0)
    assert gpu.used == arrays["scratch"].size - 512, "the component declares other scratch than it takes"
    return {name: x[aligned(x) - x.ctypes.data :] for name, x in arrays.items()}


def passes(component_id: str, one: bool) -> list[str]:
    if "bwd" not in component_id:
        return ["attn_fwd"]
    return ["attn_bwd_delta", "attn_bwd_one"] if one else ["attn_bwd_dq", "attn_bwd_dkv"]


def check(recorder: Recorder, component_id: str, layout: Layout, d: int, *, may_be_one: bool = True) -> None:
    """What one component lets count for one layout is what its row sees."""
    recorder.calls.clear()
    arrays = bound(component_id, layout, d)
    wanted = passes(component_id, may_be_one and d == 64 and layout.ids is None and not layout.window)
    before = [] if layout.ids is None else ["attn_documents"] * len(wanted)
    after = ["attn_refuse"] if before and "bwd" not in component_id else []
    assert [name.split("_d" + str(d))[0] for name, _ in recorder.calls] == [*before, *wanted, *after]
    seen = layout.seen()
    for name, params in recorder.calls:
        if params is None:
            continue
        one = name == "attn_bwd_one_d64"
        warpgroups, width = (2, 64) if one else (int(x[1:]) for x in name.split("_")[-2:])
        dkv = one or "dkv" in name
        for b in range(seen.shape[0]):
            found = walk(recorder.lib, params, keys=not dkv, b=b, warpgroups=warpgroups, width=width, down=one or not dkv)
            if layout.falls(b):
                continue
            want = seen[b].T if dkv else seen[b]
            if not np.array_equal(found.counts, want):  # a layout's text takes longer than its walk
                np.testing.assert_array_equal(found.counts, want.astype(int), err_msg=f"{name} {layout}")
            if layout.t == layout.s and layout.causal and (layout.ids is None or layout.ids[0] is layout.ids[1]):
                for m0, j in found.loaded:  # nothing needless is loaded
                    assert want[m0 : m0 + 64 * warpgroups, j * width : (j + 1) * width].any(), f"{name} {layout}: {m0} {j}"
    if after and not any(layout.falls(b) for b in range(seen.shape[0])):
        assert (arrays["o out"] == 0x7B).all() and (arrays["lse out"] == 0x7B).all(), "the launch that refuses wrote what it must leave"


COMPONENTS = ("attention.bf16.sm90", "attention_bwd.bf16.sm90", "attention_packed.bf16.sm90", "attention_packed_bwd.bf16.sm90")


def test_the_walk_stands_in_the_kernels() -> None:
    for file, lines in MIRRORED.items():
        text = (KERNELS / "attention" / file).read_text(encoding="utf-8")
        for line, times in lines:
            assert text.count(line) == times, f"{file} no longer walks as this test does: {line}"
    assert wrapper.UNBOUNDED == 1 << 29 and "UNBOUNDED = 1 << 29" in (KERNELS / "attention/spans.cuh").read_text()


def test_parameters_have_the_layout_of_the_device(lib: ctypes.CDLL) -> None:
    assert lib.params_bytes() == ctypes.sizeof(wrapper._Params)


@pytest.mark.parametrize("component_id", COMPONENTS)
@pytest.mark.parametrize("d", [64, 96, 128])
def test_every_pair_that_is_seen_counts_once_and_no_other(recorder: Recorder, component_id: str, d: int) -> None:
    for layout in layouts(12):
        if "packed" not in component_id or layout.t == layout.s:
            check(recorder, component_id, layout, d)


def test_many_layouts(recorder: Recorder) -> None:
    for layout in layouts(80):
        check(recorder, "attention.bf16.sm90", layout, 64)
        check(recorder, "attention_bwd.bf16.sm90", layout, 128)


def test_every_tile_that_is_compiled_walks_right(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = wrapper.choose
    for d in (64, 96, 128):
        of = {name: [key[1:] for key in table if key[0] == d] for name, table in
              (("forward", FORWARD_STAGES), ("dq", DQ_STAGES), ("dkv", DKV_STAGES))}
        for name, tiles in of.items():
            for tile in tiles:
                monkeypatch.setattr(binders, "choose", lambda problem, name=name, tile=tile:
                                    replace(chosen(problem), **{name: tile, "one": False}))
                for layout in layouts(0):
                    check(recorder, "attention.bf16.sm90" if name == "forward" else "attention_bwd.bf16.sm90", layout, d, may_be_one=False)


@pytest.mark.parametrize("component_id", COMPONENTS)
def test_ids_that_fall_are_refused_and_never_hang(recorder: Recorder, component_id: str) -> None:
    rng = np.random.default_rng(3)
    for n in (2, 65, 130, 300):
        sound = np.sort(rng.integers(0, 9, (1, n)), axis=1)
        falls = sound[:, ::-1].copy()
        falls[0, 0] += 1
        ids = np.concatenate([sound, falls]).astype(np.int32)
        layout = Layout(n, n, True, 0, (ids, ids))
        check(recorder, component_id, layout, 64)
        if "bwd" in component_id:
            continue
        made = bound(component_id, layout, 64)
        o = made["o out"].view(np.uint16)[: 2 * n * 128].reshape(2, -1)
        lse = made["lse out"].view(np.float32)[: 2 * 2 * n].reshape(2, -1)
        assert (o[1] == 0x7FFF).all() and np.isnan(lse[1]).all() and (o[0] == 0x7B7B).all() and not np.isnan(lse[0]).any()
    one_side = Layout(80, 80, False, 0, (packed([40, 40]), packed([40, 40])[:, ::-1].copy()))
    if "bwd" not in component_id:
        assert np.isnan(bound(component_id, one_side, 64)["lse out"].view(np.float32)[:160]).all()


@pytest.mark.parametrize("width", [64, 96, 128])
def test_masks_leave_the_span_of_their_rows(lib: ctypes.CDLL, width: int) -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        column = int(rng.integers(0, 5)) * width
        lo, hi = np.sort(rng.integers(column - 20, column + width + 20, (2, 64)), axis=0).astype(int)
        hi[rng.random(64) < 0.1] = -1
        left = np.zeros((64, width), bool)
        for thread in range(128):
            s = np.zeros(width // 2, np.float32)
            r = 16 * (thread // 32) + thread % 32 // 4
            lib.masked(width, thread, column, *(int(x) for x in (lo[r], hi[r], lo[r + 8], hi[r + 8])), s.ctypes.data_as(ctypes.c_void_p))
            assert (np.isneginf(s) | (s == 0)).all()
            for j in range(width // 8):
                for e in range(2):
                    left[r, 8 * j + 2 * (thread % 4) + e] = s[4 * j + e] == 0
                    left[r + 8, 8 * j + 2 * (thread % 4) + e] = s[4 * j + 2 + e] == 0
        columns = column + np.arange(width)
        np.testing.assert_array_equal(left, (columns >= lo[:, None]) & (columns <= hi[:, None]))


def test_spans_of_falling_ids_would_hang(recorder: Recorder) -> None:
    """Why attn_documents looks: without, producer and consumers would count other blocks. No fault of the gate, whose cases never fall."""
    text = (KERNELS / "attention/documents.cu").read_text(encoding="utf-8")
    find = "const bool refused = __syncthreads_or("
    fault = Fault(id="x", component="", gate="parity", mirrors=0, why="", file="", source="attention/documents.cu", find=find,
                  replace="const bool refused = false && __syncthreads_or(")
    assert find in text
    recorder.lib = compiled(fault)
    rng = np.random.default_rng(1)
    with pytest.raises(AssertionError, match="does not load"):
        for _ in range(20):
            ids = rng.integers(0, 9, (1, 300)).astype(np.int32)
            check(recorder, "attention.bf16.sm90", Layout(300, 300, True, 0, (ids, ids)), 64)


FAULTS = [f for f in planted() if f.source in PARTS]


def test_documents_have_faults_of_their_own() -> None:
    assert len([f for f in FAULTS if f.mirrors == 18]) >= 4
    assert {f.component for f in FAULTS} >= {"attention.bf16.sm90", "attention_bwd.bf16.sm90", "attention_packed.bf16.sm90"}


@pytest.mark.parametrize("fault", FAULTS, ids=[f.id for f in FAULTS])
def test_planted_faults_are_caught(recorder: Recorder, fault: Fault) -> None:
    recorder.lib = compiled(fault)
    with pytest.raises(AssertionError):
        for layout in layouts(20):
            check(recorder, fault.component, layout, 64) if "packed" not in fault.component or layout.t == layout.s else None


def test_the_gate_has_no_case_whose_ids_fall() -> None:
    """A row whose ids fall is refused, so it is no case of parity; parity makes a case of its own by repeating its largest sample."""
    for component_id in COMPONENTS:
        with_ids = 0
        for nonce in ("a", "b", "c"):
            for case in subjects.cases(catalogue()[component_id], nonce):
                ids = [x for x, t in zip(case.inputs, case.types) if t.dtype == "i32"]
                with_ids += bool(ids)
                assert not any((np.diff(x) < 0).any() for x in ids), f"{component_id} {case.name}"
        assert with_ids > 15, component_id


def test_the_cases_of_parity_reject_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is right but for documents: it does not look at ids, or each document begins one place late."""
    wrong: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "sound": lambda ids: ids, "leaks": np.zeros_like, "starts late": lambda ids: np.concatenate([ids[:, :1], ids[:, :-1]], 1),
    }  # fmt: skip
    monkeypatch.setattr(binders, "HEADS", ())  # time: the cases without documents say nothing here
    walks: dict[str, Any] = {}

    def walk_once(oracle: Any, dtype: str, inputs: Sequence[np.ndarray], attrs: Any, **how: Any) -> Any:
        """What is right, and how far a naive kernel may be off, is the same whatever is judged: the nonce is."""
        key = f"{oracle} {dtype} {subjects.checksum([np.asarray(x) for x in inputs])} {attrs} {how}"
        if key not in walks:
            walks[key] = naive_walk(oracle, dtype, inputs, attrs, **how)
        return walks[key]

    monkeypatch.setattr(tolerance, "walk", walk_once)
    for name, change in wrong.items():
        with emulated_gpu():
            cuda_subjects.opened.cache_clear()
            component = emulated(catalogue())["attention.bf16.sm90"]
            oracle = row(component.op or "").oracle

            def compute(*inputs: np.ndarray, change: Any = change, oracle: Any = oracle, **attrs: Any) -> Any:
                return oracle(*(change(x) if x.dtype.kind == "i" else x for x in inputs), **attrs)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("emulated_gpu.row", lambda op, compute=compute: SimpleNamespace(oracle=compute))
                record = parity.measure(component, "documents")
        assert run.judged(record, component).verdict == ("PASS" if name == "sound" else "FAIL"), name
    cuda_subjects.opened.cache_clear()


def test_the_envelope_and_what_it_refuses() -> None:
    q, ids = TensorType((1, 64, 2, 256), "bf16"), TensorType((1, 64), "i32")
    attrs = {"causal": True, "window": 0, "scale": 0.0625}
    kernel = catalogue()["attention.bf16.sm90"]
    assert "head width 64, 96 or 128" in str(kernel.envelope.why_outside([q, q, q, ids, ids], attrs))
    with pytest.raises(ShapeError, match="256"):
        wrapper.AttentionProblem(batch=1, queries=8, keys=8, heads=2, kv_heads=1, head_dim=256)
    problem = wrapper.AttentionProblem(batch=1, queries=8, keys=8, heads=2, kv_heads=1, head_dim=64, packed=True)
    assert problem.window == (UNBOUNDED, UNBOUNDED)
    with pytest.raises(ShapeError, match="exactly for packed"):
        wrapper._bounds(problem, None)
    with pytest.raises(ShapeError, match="ids of keys"):
        wrapper.Documents(problem, Span(256, 32), Span(256, 28), Span(512, 4096))
    with pytest.raises(ShapeError, match="memory"):
        wrapper.Documents(problem, Span(256, 32), Span(256, 32), Span(512, 64))
