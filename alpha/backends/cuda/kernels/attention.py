"""Attention on the GPU, forward and backward: kernels/attention by flash.py beside this file. bf16, head width 64, 96 or 128.

q, o, do, dq [B,T,H,D]; k, v, dk, dv [B,S,G,D], bf16; lse [B,H,T] fp32. The probabilities, and in the backward pass their gradients, are
rounded to bf16 before they enter the tensor cores; everything else is fp32 until it is stored. Ids of packed documents i32 [B,T], [B,S]
must not fall along a row, because a tile is bounded by its first and last row. Types cannot say that, so the device looks: where ids
fall, o and lse of that row of the batch are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Call, Calls, Drawn, Large, bf16, drawn, f32, product
from alpha.backends.cuda.kernels.flash import (
    BACKWARD,
    DOCUMENTS,
    FORWARD,
    ONE_PASS,
    QUEUE_BYTES,
    WIDTH_96,
    AttentionBackward,
    AttentionChoice,
    AttentionForward,
    AttentionProblem,
    Documents,
    Tensor4,
    choose,
)
from alpha.backends.cuda.lib import SM90A, Gpu, Operand
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.memory import Span, aligned, fill
from alpha.errors import ShapeError
from alpha.ops.large import attention_bwd_error, attention_error, draw_attention, draw_attention_bwd
from alpha.ops.spec import Sample
from alpha.ops.table import row
from alpha.types import Attrs, TensorType

Three = tuple[Tensor4, Tensor4, Tensor4]
"""Of queries, keys and values, or their gradients."""


def problem_of(q: TensorType, k: TensorType, attrs: Attrs, *, packed: bool = False) -> AttentionProblem:
    """The problem of a call, with ids of documents or without; ShapeError outside what the kernels cover."""
    (b, t, h, d), (s, g) = q.shape, k.shape[1:3]
    window = int(attrs["window"])  # type: ignore[call-overload]
    return AttentionProblem(batch=b, queries=t, keys=s, heads=h, kv_heads=g, head_dim=d, causal=bool(attrs["causal"]),
                            left=window - 1 if window else None, scale=float(attrs["scale"]), packed=packed)  # type: ignore[arg-type]


def _tensor(x: Operand) -> Tensor4:
    return Tensor4.contiguous(x.address, *x.type.shape[1:])


def _choice(gpu: Gpu, problem: AttentionProblem) -> AttentionChoice:
    return replace(choose(problem), blocks=gpu.blocks)


def _documents(gpu: Gpu, problem: AttentionProblem, ids: Sequence[Operand]) -> Documents | None:
    return Documents(problem, ids[0].span, ids[1].span, gpu.scratch(problem.documents_bytes())) if ids else None


def _in_order(queue: Span, launches: Sequence[Callable[[int], None]]) -> Callable[[int], None]:
    """The launches of one call, after its tile counter has been cleared: scratch holds garbage."""

    def call(stream: int) -> None:
        fill(queue, 0, stream)
        for launch in launches:
            launch(stream)

    return call


def _forward(gpu: Gpu, problem: AttentionProblem, heads: Three, o: Tensor4, lse: Span,
             ids: Sequence[Operand]) -> Callable[[int], None]:
    queue, docs = gpu.scratch(QUEUE_BYTES), _documents(gpu, problem, ids)
    run = AttentionForward(problem, *heads, o, lse, queue, docs=docs, choice=_choice(gpu, problem))
    return _in_order(queue, [docs.find_keys(), run, docs.refusal(o, lse)] if docs else [run])


def _backward(gpu: Gpu, problem: AttentionProblem, heads: Three, o: Tensor4, lse: Span, do: Tensor4, grads: Three,
              ids: Sequence[Operand]) -> Callable[[int], None]:
    choice = _choice(gpu, problem)
    queue, work = gpu.scratch(QUEUE_BYTES), gpu.scratch(choice.workspace_bytes(problem))
    docs = _documents(gpu, problem, ids)
    run = AttentionBackward(problem, *heads, o, lse, do, *grads, work, queue, docs=docs, choice=choice)
    return _in_order(queue, [docs.find_keys(), docs.find_queries(), run] if docs else [run])


def attention(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """o and lse from q, k, v."""
    q, k, v, *ids = ins
    problem = problem_of(q.type, k.type, attrs, packed=bool(ids))
    return _forward(gpu, problem, (_tensor(q), _tensor(k), _tensor(v)), _tensor(outs[0]), outs[1].span, ids)


def attention_bwd(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """dq, dk, dv from do and what the forward pass read and wrote; two launches, in one pass or two, with documents four."""
    do, q, k, v, o, lse, *ids = ins
    problem = problem_of(q.type, k.type, attrs, packed=bool(ids))
    dq, dk, dv = (_tensor(x) for x in outs)
    return _backward(gpu, problem, (_tensor(q), _tensor(k), _tensor(v)), _tensor(o), lse.span, _tensor(do), (dq, dk, dv), ids)


def _packed(x: Operand, attrs: Attrs, *, packed: bool = False) -> tuple[AttentionProblem, Three]:
    """The problem of packed heads, and query, key and value heads as they lie in a tensor [B,T,(H+2G)D]."""
    h, g = int(attrs["heads"]), int(attrs["kv_heads"])  # type: ignore[call-overload]
    b, t, width = x.type.shape
    d = width // (h + 2 * g)
    problem = problem_of(TensorType((b, t, h, d), "bf16"), TensorType((b, t, g, d), "bf16"), attrs, packed=packed)
    q, k, v = (Tensor4(x.address + 2 * d * first, t * width, width, d) for first in (0, h, h + g))
    return problem, (q, k, v)


def attention_packed(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """o and lse from packed heads."""
    qkv, *ids = ins
    problem, heads = _packed(qkv, attrs, packed=bool(ids))
    o = Tensor4.contiguous(outs[0].address, problem.queries, problem.heads, problem.head_dim)
    return _forward(gpu, problem, heads, o, outs[1].span, ids)


def attention_packed_bwd(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """The gradients of packed heads."""
    do, qkv, o, lse, *ids = ins
    problem, heads = _packed(qkv, attrs, packed=bool(ids))
    o4, do4 = (Tensor4.contiguous(x.address, problem.queries, problem.heads, problem.head_dim) for x in (o, do))
    return _backward(gpu, problem, heads, o4, lse.span, do4, _packed(outs[0], attrs)[1], ids)


def _covered_packed(at: int) -> Callable[[Sequence[TensorType], Attrs], bool]:
    """Whether the packed operand at place `at` is inside what AttentionProblem accepts."""

    def holds(types: Sequence[TensorType], attrs: Attrs) -> bool:
        try:
            _packed(Operand(0, types[at]), attrs)
        except ShapeError:
            return False
        return True

    return holds


def _covered(q: int) -> Callable[[Sequence[TensorType], Attrs], bool]:
    """Whether the operands q and k, at places q and q + 1, are inside what AttentionProblem accepts."""

    def holds(types: Sequence[TensorType], attrs: Attrs) -> bool:
        try:
            problem_of(types[q], types[q + 1], attrs)
        except ShapeError:
            return False
        return True

    return holds


def _bytes(problem: AttentionProblem, backward: bool) -> int:
    """The tile counter, the bounds of documents, and in the backward pass what the launches leave for each other."""
    return QUEUE_BYTES + aligned(problem.documents_bytes()) + (choose(problem).workspace_bytes(problem) if backward else 0)


def scratch(types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    """Bytes of scratch of `attention`."""
    return _bytes(problem_of(types[0], types[1], attrs, packed=len(types) > 3), False)


def scratch_bwd(types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    """Bytes of scratch of `attention_bwd`."""
    return _bytes(problem_of(types[1], types[2], attrs, packed=len(types) > 6), True)


def scratch_packed(types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    """Bytes of scratch of `attention_packed`."""
    return _bytes(_packed(Operand(0, types[0]), attrs, packed=len(types) > 1)[0], False)


def scratch_packed_bwd(types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    """Bytes of scratch of `attention_packed_bwd`."""
    return _bytes(_packed(Operand(0, types[1]), attrs, packed=len(types) > 4)[0], True)


def sources(path: str) -> Iterable[Source]:
    """Every compiled file that a launch may ask for: each holds all its tiles."""
    one = [Source.of(ONE_PASS)] if path == BACKWARD else []
    return [Source.of(path), Source.of(path, dict(WIDTH_96)), *one, Source.of(DOCUMENTS)]


# Calls ----------------------------------------------------------------------------------------------------------------------------------

HEADS = (  # name, B, T, S, H, G, D, causal, window
    ("one", 1, 1, 1, 1, 1, 64, True, 0),
    ("small-full", 1, 5, 11, 2, 1, 64, False, 0),
    ("small-causal", 1, 13, 13, 2, 2, 128, True, 0),
    ("tile-1", 1, 63, 63, 1, 1, 64, True, 0),
    ("tile+1", 1, 65, 65, 2, 1, 128, True, 0),
    ("tiles-full", 1, 129, 193, 2, 1, 64, False, 0),
    ("tiles-causal", 2, 193, 193, 2, 2, 64, True, 0),
    ("suffix", 1, 70, 201, 2, 1, 128, True, 0),
    ("more-queries-than-keys", 1, 140, 70, 2, 1, 64, True, 0),
    ("window", 1, 200, 200, 2, 1, 64, True, 37),
    ("window-suffix", 1, 66, 150, 1, 1, 128, True, 65),
    ("window-not-causal", 1, 90, 90, 2, 2, 64, False, 20),
    ("grouped", 1, 130, 130, 6, 2, 64, True, 0),
    ("tail", 1, 128, 128, 2, 1, 64, False, 0),
    ("width-96", 2, 130, 130, 4, 2, 96, True, 0),
    ("width-96-full", 1, 65, 129, 2, 1, 96, False, 0),
    ("width-96-suffix", 1, 70, 150, 2, 2, 96, True, 33),
)

PACKED_DOCUMENTS = (  # name, T, S, H, G, D, causal, window, per row of the batch the lengths of the documents of the S keys
    ("documents", 193, 193, 2, 1, 64, True, 0, ((64, 65, 64), (1, 1, 126, 1, 64))),
    ("documents-borders", 256, 256, 1, 1, 128, True, 0, ((64, 64, 128),)),
    ("documents-spanning", 300, 300, 1, 1, 64, True, 0, ((29, 241, 30),)),
    ("documents-of-one", 70, 70, 2, 2, 64, True, 0, ((1,) * 70,)),
    ("documents-one", 66, 66, 1, 1, 128, True, 0, ((66,),)),
    ("documents-window", 200, 200, 2, 1, 64, True, 20, ((90, 15, 95),)),
    ("documents-not-causal", 130, 130, 1, 1, 128, False, 0, ((70, 1, 59),)),
    ("documents-grouped-96", 131, 131, 6, 2, 96, True, 0, ((65, 66),)),
    ("documents-suffix", 70, 201, 2, 1, 64, True, 0, ((100, 65, 36),)),
    ("documents-more-queries", 140, 70, 2, 1, 64, True, 0, ((5, 64, 1),)),
)
"""Parity makes one larger case by repeating a sample: of these along B only, because along T ids would fall (a test holds that)."""


def _ids(lengths: Sequence[Sequence[int]]) -> np.ndarray:
    """[B, S] ids of documents of these lengths; some numbers are left out."""
    return np.array([np.repeat(3 * np.arange(len(found)) - 1, found) for found in lengths], np.int32)


def _pair_of_ids(t: int, s: int, lengths: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """ids of the T queries and of the S keys; a query beyond the keys belongs to the first document."""
    ids = _ids(lengths)
    return ids[:, np.maximum(np.arange(t) + s - t, 0)], ids


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, b, t, s, h, g, d, causal, window in HEADS:
        q, k, v = (rng.standard_normal(x) for x in ((b, t, h, d), (b, s, g, d), (b, s, g, d)))
        yield Sample(name=f"gpu-{name}", inputs=(q, k, v), attrs={"causal": causal, "window": window, "scale": d**-0.5})
    for name, t, s, h, g, d, causal, window, lengths in PACKED_DOCUMENTS:
        b = len(lengths)
        q, k, v = (rng.standard_normal(x) for x in ((b, t, h, d), (b, s, g, d), (b, s, g, d)))
        attrs: dict[str, object] = {"causal": causal, "window": window, "scale": d**-0.5}
        yield Sample(name=f"gpu-{name}", inputs=(q, k, v, *_pair_of_ids(t, s, lengths)), attrs=attrs)
    q, k, v = (rng.standard_normal(x) for x in ((1, 70, 2, 64), (1, 90, 1, 64), (1, 90, 1, 64)))
    ids_q, ids_k = np.repeat([0, 2, 9], (20, 30, 20)), np.repeat([1, 2, 3], (40, 20, 30))  # 0 and 9 have no key, 1 and 3 no query
    yield Sample(name="gpu-documents-unseen", inputs=(q, k, v, ids_q[None].astype(np.int32), ids_k[None].astype(np.int32)),
                 attrs={"causal": False, "window": 0, "scale": 0.125})
    q, k, v = (rng.standard_normal((1, 80, 2, 64)) for _ in range(3))
    yield Sample(name="gpu-steep", inputs=(q * 40.0, k, v), attrs={"causal": True, "window": 0, "scale": 0.125})
    yield Sample(name="gpu-far-below", inputs=(q + 10.0, k * 0.1 - 4.0, v), attrs={"causal": True, "window": 0, "scale": 0.125})


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for sample in _samples(rng):
        o, lse = row("attention").oracle(*sample.inputs, **sample.attrs)
        q, k, v, *ids = sample.inputs
        yield Sample(name=sample.name, inputs=(rng.standard_normal(q.shape), q, k, v, o, lse, *ids), attrs=sample.attrs)


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    """Every score is 0, and 1, 2, 4 ... keys are seen: o is a mean of small integers, exact in bf16. lse is the logarithm of a power of
    two: exact for one key alone, so those samples see one key a query."""
    for name, t, d in (("window-1", 193, 64), ("window-1-wide", 131, 128)):
        q, k = rng.integers(-3, 4, (2, t, 4, d)).astype(float), np.zeros((2, t, 2, d))
        v = rng.integers(-9, 10, (2, t, 2, d)).astype(float)
        yield Sample(name=f"gpu-{name}", inputs=(q, k, v), attrs={"causal": True, "window": 1, "scale": 0.125})
        ids = np.arange(t, dtype=np.int32)[None].repeat(2, 0)
        yield Sample(name=f"gpu-of-one-{d}", inputs=(q, k, v, ids, ids), attrs={"causal": False, "window": 0, "scale": 0.125})


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    """q and k are orthogonal, so every score is 0; lse is given as 0, so every p is 1: the rest is small integers."""

    def whole(*shape: int) -> np.ndarray:
        return rng.integers(-1, 2, shape).astype(float) * (rng.random(shape) < 0.1)

    for t, s, causal, window, d, lengths in ((66, 66, True, 0, 64, ()), (40, 70, False, 0, 64, ()), (130, 130, True, 3, 128, ()),
                                             (130, 130, True, 0, 64, (1, 63, 2, 64)), (70, 70, False, 0, 96, (64, 6))):
        q, k = whole(1, t, 4, d), whole(1, s, 2, d)
        q[..., d // 2 :], k[..., : d // 2] = 0.0, 0.0
        ids = _pair_of_ids(t, s, (lengths,)) if lengths else ()
        yield Sample(name=f"gpu-integers-{t}x{s}-{d}", attrs={"causal": causal, "window": window, "scale": 0.5},
                     inputs=(whole(1, t, 4, d), q, k, whole(1, s, 2, d), whole(1, t, 4, d), np.zeros((1, 4, t)), *ids))


def _samples_packed(rng: np.random.Generator) -> Iterable[Sample]:
    for name, b, t, s, h, g, d, causal, window in HEADS:
        if t == s:
            qkv = rng.standard_normal((b, t, (h + 2 * g) * d))
            attrs: dict[str, object] = {"heads": h, "kv_heads": g, "causal": causal, "window": window, "scale": d**-0.5}
            yield Sample(name=f"gpu-{name}", inputs=(qkv,), attrs=attrs)
    for name, t, s, h, g, d, causal, window, lengths in PACKED_DOCUMENTS:
        if t == s:
            qkv, ids = rng.standard_normal((len(lengths), t, (h + 2 * g) * d)), _ids(lengths)
            attrs = {"heads": h, "kv_heads": g, "causal": causal, "window": window, "scale": d**-0.5}
            yield Sample(name=f"gpu-{name}", inputs=(qkv, ids, ids), attrs=attrs)


def _samples_packed_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for sample in _samples_packed(rng):
        o, lse = row("attention_packed").oracle(*sample.inputs, **sample.attrs)
        qkv, *ids = sample.inputs
        yield Sample(name=sample.name, inputs=(rng.standard_normal(o.shape), qkv, o, lse, *ids), attrs=sample.attrs)


LARGE: Mapping[str, tuple[int, int, int, int, int, int, bool, int]] = {  # B, T, S, H, G, D, causal, window
    "causal-64": (1, 1600, 1600, 2, 1, 64, True, 0),
    "full-64": (1, 700, 1100, 2, 2, 64, False, 0),
    "causal-128": (1, 1100, 1100, 2, 1, 128, True, 0),
    "window-128": (2, 900, 900, 2, 2, 128, True, 300),
    "causal-96": (1, 1100, 1100, 2, 1, 96, True, 0),
    "documents-64": (1, 1600, 1600, 2, 1, 64, True, 0),
    "documents-128": (1, 1100, 1100, 2, 1, 128, True, 0),
}
LARGE_BWD: Mapping[str, tuple[int, int, int, int, int, int, bool, int]] = {
    **LARGE,
    "heads-64": (3, 390, 390, 22, 22, 64, True, 0),  # more heads than have a place in one pass
    "long-64": (1, 2176, 2176, 1, 1, 64, False, 0),  # two passes; blocks of 96 queries read past the last tile of 128
}
LARGE_DOCUMENTS: Mapping[str, tuple[int, ...]] = {"documents-64": (1, 127, 192, 1000, 280), "documents-128": (500, 12, 588)}
"""Lengths of the documents of each row of the batch."""

REPEATED = (2, 1100, 8, 2, 128)
"""B, T, H, G, D of what determinism repeats."""

REPEATED_BWD = (3, 1100, 24, 12, 64)
"""Likewise, backward: in one pass the order of the sums depends on more than each block alone."""


def _repeated(rng: np.random.Generator) -> Drawn:
    b, t, h, g, d = REPEATED
    inputs = [drawn(rng, b, t, h, d), drawn(rng, b, t, g, d), drawn(rng, b, t, g, d)]
    return inputs, {"causal": True, "window": 0, "scale": float(d**-0.5)}


def _repeated_bwd(rng: np.random.Generator) -> Drawn:
    b, t, h, g, d = REPEATED_BWD
    do, q, k, v, o = (drawn(rng, b, t, n, d) for n in (h, h, g, g, h))
    lse = np.log(np.arange(1.0, t + 1)) + 0.5
    seen = np.broadcast_to(lse.astype(np.float32), (b, h, t)).astype(float)
    return [do, q, k, v, o, (seen, "f32")], {"causal": True, "window": 0, "scale": float(d**-0.5)}


TIMED = (("gpt", 16, 1024, 12, 12, 64), ("llama", 2, 4096, 32, 8, 64), ("wide-heads", 2, 4096, 16, 16, 128))
"""Name, B, T, H, G, D; all but the last also packed."""

COMPARED = ((16, 12, 1024, 64), (8, 16, 2048, 64), (8, 16, 2048, 128), (4, 32, 4096, 128), (2, 32, 8192, 128), (1, 32, 16384, 128))
"""B, H, T, D, causal and full."""


def _call(back: bool, name: str, b: int, t: int, h: int, g: int, d: int, causal: bool = True) -> Call:
    q, k = bf16(b, t, h, d), bf16(b, t, g, d)
    types = (q, q, k, k, q, f32(b, h, t)) if back else (q, k, k)
    return product(*types, name=name, causal=causal, window=0, scale=float(d**-0.5))


def _packed_call(back: bool, name: str, b: int, t: int, h: int, g: int, d: int) -> Call:
    o, qkv = bf16(b, t, h * d), bf16(b, t, (h + 2 * g) * d)
    types = (o, qkv, o, f32(b, h, t)) if back else (qkv,)
    return product(*types, name=name, heads=h, kv_heads=g, causal=True, window=0, scale=0.125)


def _narrow(call: Call) -> Call:
    """The same call with a window of 64 keys: at 1536 queries of width 64 the two passes take blocks of 96 queries, at little cost."""
    return replace(call, name="window-1536", attrs={**call.attrs, "window": 64})


def _calls(back: bool) -> Calls:
    draw, error = (draw_attention_bwd, attention_bwd_error) if back else (draw_attention, attention_error)
    return Calls(
        further=_samples_bwd if back else _samples, differentiated=_samples, exactly=_exact_bwd if back else _exact,
        repeated={"large": _repeated_bwd if back else _repeated},
        large={name: Large(partial(draw, shape, LARGE_DOCUMENTS.get(name, ())), error)
               for name, shape in (LARGE_BWD if back else LARGE).items()},
        timed=tuple(_call(back, *shape) for shape in TIMED),
        paths=(_narrow(_call(back, "", 1, 1536, 2, 1, 64)),) if back else (),
        compared=tuple(_call(back, f"{name}-{b}x{h}x{t}x{d}", b, t, h, h, d, causal)
                       for b, h, t, d in COMPARED for name, causal in (("causal", True), ("full", False))),
    )


def _calls_packed(back: bool) -> Calls:
    return Calls(further=_samples_packed_bwd if back else _samples_packed, differentiated=_samples_packed,
                 timed=tuple(_packed_call(back, f"model-{i}", *shape) for i, (_, *shape) in enumerate(TIMED[:2])),
                 paths=(_narrow(_packed_call(back, "", 1, 1536, 2, 1, 64)),) if back else ())


# Components -----------------------------------------------------------------------------------------------------------------------------


LIMITS = "head width 64, 96 or 128, lengths up to 2^20, window 0 or more, scale above 0"

KERNELS = (
    Component(
        id="attention.bf16.sm90", kind="kernel", backend="cuda", op="attention", implementation=attention, requires=SM90A, scratch=scratch,
        binaries=Binaries(lambda: sources(FORWARD)), calls=_calls(False),
        envelope=Envelope(dtypes=("bf16",), limits=(
            Limit(text=LIMITS, holds=_covered(0)),
        )),
    ),
    Component(
        id="attention_bwd.bf16.sm90", kind="kernel", backend="cuda", op="attention_bwd", implementation=attention_bwd, requires=SM90A,
        scratch=scratch_bwd, binaries=Binaries(lambda: sources(BACKWARD)), calls=_calls(True),
        envelope=Envelope(dtypes=("bf16", "f32"), limits=(
            Limit(text="bf16 operands and fp32 lse", holds=lambda types, attrs: [t.dtype for t in types[:6]] == ["bf16"] * 5 + ["f32"]),
            Limit(text=LIMITS, holds=_covered(1)),
        )),
    ),
    Component(
        id="attention_packed.bf16.sm90", kind="kernel", backend="cuda", op="attention_packed", implementation=attention_packed,
        requires=SM90A, scratch=scratch_packed, binaries=Binaries(lambda: sources(FORWARD)), calls=_calls_packed(False),
        envelope=Envelope(dtypes=("bf16",), limits=(
            Limit(text=LIMITS, holds=_covered_packed(0)),
        )),
    ),
    Component(
        id="attention_packed_bwd.bf16.sm90", kind="kernel", backend="cuda", op="attention_packed_bwd", implementation=attention_packed_bwd,
        requires=SM90A, scratch=scratch_packed_bwd, binaries=Binaries(lambda: sources(BACKWARD)), calls=_calls_packed(True),
        envelope=Envelope(dtypes=("bf16", "f32"), limits=(
            Limit(text="bf16 operands and fp32 lse", holds=lambda types, attrs: [t.dtype for t in types[:4]] == ["bf16"] * 3 + ["f32"]),
            Limit(text=LIMITS, holds=_covered_packed(1)),
        )),
    ),
)
