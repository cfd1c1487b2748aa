"""Attention on the GPU, forward and backward: kernels/attention by alpha/cuda_runtime/attention.py. bf16, head width 64, 96 or 128.

q, o, do, dq [B,T,H,D]; k, v, dk, dv [B,S,G,D], bf16; lse [B,H,T] fp32. The probabilities, and in the backward pass their gradients, are
rounded to bf16 before they enter the tensor cores; everything else is fp32 until it is stored. Ids of packed documents i32 [B,T], [B,S]
must not fall along a row, because a tile is bounded by its first and last row. Types cannot say that, so the device looks: where ids
fall, o and lse of that row of the batch are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.lib import SM90A, Gpu, Operand
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.attention import (
    BACKWARD,
    DOCUMENTS,
    FORWARD,
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
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.memory import Span, aligned, fill
from alpha.errors import ShapeError
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
    """The launches of one call, after its tile counter has been cleared: scratch holds rubbish."""

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
    queue, work = gpu.scratch(QUEUE_BYTES), gpu.scratch(problem.workspace_bytes())
    docs = _documents(gpu, problem, ids)
    run = AttentionBackward(problem, *heads, o, lse, do, *grads, work, queue, docs=docs, choice=_choice(gpu, problem))
    return _in_order(queue, [docs.find_keys(), docs.find_queries(), run] if docs else [run])


def attention(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """o and lse from q, k, v."""
    q, k, v, *ids = ins
    problem = problem_of(q.type, k.type, attrs, packed=bool(ids))
    return _forward(gpu, problem, (_tensor(q), _tensor(k), _tensor(v)), _tensor(outs[0]), outs[1].span, ids)


def attention_bwd(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """dq, dk, dv from do and what the forward pass read and wrote; two launches, with documents four."""
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
    """The tile counter, the bounds of documents, and in the backward pass what the first launch leaves for the second."""
    return QUEUE_BYTES + aligned(problem.documents_bytes()) + (aligned(problem.workspace_bytes()) if backward else 0)


def scratch(types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    """Bytes of scratch of `attention`."""
    return _bytes(problem_of(types[0], types[1], attrs, packed=len(types) > 3), False)


def scratch_bwd(types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    """Bytes of scratch of `attention_bwd`."""
    return _bytes(problem_of(types[1], types[2], attrs, packed=len(types) > 6), True)


def scratch_packed(types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    """Bytes of scratch of `attention_packed`."""
    return _bytes(_packed(Operand(0, types[0]), attrs, packed=len(types) > 1)[0], False)


def scratch_packed_bwd(types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    """Bytes of scratch of `attention_packed_bwd`."""
    return _bytes(_packed(Operand(0, types[1]), attrs, packed=len(types) > 4)[0], True)


LIMITS = "head width 64, 96 or 128, lengths up to 2^20, window 0 or more, scale above 0"

KERNELS = (
    Component(
        id="attention.bf16.sm90", kind="kernel", backend="cuda", op="attention", implementation=attention, requires=SM90A, scratch=scratch,
        binaries=Binaries(lambda: sources(FORWARD)),
        envelope=Envelope(dtypes=("bf16",), limits=(
            Limit(text=LIMITS, holds=_covered(0)),
        )),
    ),
    Component(
        id="attention_bwd.bf16.sm90", kind="kernel", backend="cuda", op="attention_bwd", implementation=attention_bwd, requires=SM90A,
        scratch=scratch_bwd, binaries=Binaries(lambda: sources(BACKWARD)),
        envelope=Envelope(dtypes=("bf16", "f32"), limits=(
            Limit(text="bf16 operands and fp32 lse", holds=lambda types, attrs: [t.dtype for t in types[:6]] == ["bf16"] * 5 + ["f32"]),
            Limit(text=LIMITS, holds=_covered(1)),
        )),
    ),
    Component(
        id="attention_packed.bf16.sm90", kind="kernel", backend="cuda", op="attention_packed", implementation=attention_packed,
        requires=SM90A, scratch=scratch_packed, binaries=Binaries(lambda: sources(FORWARD)),
        envelope=Envelope(dtypes=("bf16",), limits=(
            Limit(text=LIMITS, holds=_covered_packed(0)),
        )),
    ),
    Component(
        id="attention_packed_bwd.bf16.sm90", kind="kernel", backend="cuda", op="attention_packed_bwd", implementation=attention_packed_bwd,
        requires=SM90A, scratch=scratch_packed_bwd, binaries=Binaries(lambda: sources(BACKWARD)),
        envelope=Envelope(dtypes=("bf16", "f32"), limits=(
            Limit(text="bf16 operands and fp32 lse", holds=lambda types, attrs: [t.dtype for t in types[:4]] == ["bf16"] * 3 + ["f32"]),
            Limit(text=LIMITS, holds=_covered_packed(1)),
        )),
    ),
)


def sources(path: str) -> Iterable[Source]:
    """Every compiled file that a launch may ask for: each holds all its tiles."""
    return [Source.of(path), Source.of(path, dict(WIDTH_96)), Source.of(DOCUMENTS)]
