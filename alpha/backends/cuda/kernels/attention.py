"""Attention on the GPU, forward and backward: kernels/attention by alpha/cudart/attention.py. bf16, head width 64 or 128.

q, o, do, dq [B,T,H,D]; k, v, dk, dv [B,S,G,D], bf16; lse [B,H,T] fp32. The probabilities, and in the backward pass their gradients, are
rounded to bf16 before they enter the tensor cores; everything else is fp32 until it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.lib import SM90A, Gpu, Operand
from alpha.component import Component, Envelope, Limit
from alpha.cudart.attention import (
    BACKWARD,
    FORWARD,
    QUEUE_BYTES,
    AttentionBackward,
    AttentionChoice,
    AttentionForward,
    AttentionProblem,
    Tensor4,
    choose,
)
from alpha.cudart.compile import Source
from alpha.cudart.memory import aligned, fill
from alpha.errors import ShapeError
from alpha.types import Attrs, TensorType


def problem_of(q: TensorType, k: TensorType, attrs: Attrs) -> AttentionProblem:
    """The problem of a call; ShapeError outside what the kernels cover."""
    (b, t, h, d), (s, g) = q.shape, k.shape[1:3]
    window = int(attrs["window"])  # type: ignore[call-overload]
    return AttentionProblem(batch=b, queries=t, keys=s, heads=h, kv_heads=g, head_dim=d, causal=bool(attrs["causal"]),
                            left=window - 1 if window else None, scale=float(attrs["scale"]))  # type: ignore[arg-type]


def _tensor(x: Operand) -> Tensor4:
    return Tensor4.contiguous(x.address, *x.type.shape[1:])


def _choice(gpu: Gpu, problem: AttentionProblem) -> AttentionChoice:
    return replace(choose(problem), blocks=gpu.blocks)


def attention(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """o and lse from q, k, v. The tile counter is cleared ahead of the launch: scratch holds rubbish."""
    q, k, v = ins
    problem = problem_of(q.type, k.type, attrs)
    queue = gpu.scratch(QUEUE_BYTES)
    run = AttentionForward(problem, _tensor(q), _tensor(k), _tensor(v), _tensor(outs[0]), outs[1].span, queue, choice=_choice(gpu, problem))

    def call(stream: int) -> None:
        fill(queue, 0, stream)
        run(stream)

    return call


def attention_bwd(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """dq, dk, dv from do and what the forward pass read and wrote; two launches."""
    do, q, k, v, o, lse = ins
    problem = problem_of(q.type, k.type, attrs)
    queue, work = gpu.scratch(QUEUE_BYTES), gpu.scratch(problem.workspace_bytes())
    dq, dk, dv = outs
    run = AttentionBackward(problem, _tensor(q), _tensor(k), _tensor(v), _tensor(o), lse.span, _tensor(do), _tensor(dq), _tensor(dk),
                            _tensor(dv), work, queue, choice=_choice(gpu, problem))

    def call(stream: int) -> None:
        fill(queue, 0, stream)
        run(stream)

    return call


def _packed(x: Operand, attrs: Attrs) -> tuple[AttentionProblem, list[Tensor4]]:
    """The problem of packed heads, and query, key and value heads as they lie in a tensor [B,T,(H+2G)D]."""
    h, g = int(attrs["heads"]), int(attrs["kv_heads"])  # type: ignore[call-overload]
    b, t, width = x.type.shape
    d = width // (h + 2 * g)
    problem = problem_of(TensorType((b, t, h, d), "bf16"), TensorType((b, t, g, d), "bf16"), attrs)
    return problem, [Tensor4(x.address + 2 * d * first, t * width, width, d) for first in (0, h, h + g)]


def attention_packed(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """o and lse from packed heads."""
    problem, (q, k, v) = _packed(ins[0], attrs)
    o = Tensor4.contiguous(outs[0].address, problem.queries, problem.heads, problem.head_dim)
    queue = gpu.scratch(QUEUE_BYTES)
    run = AttentionForward(problem, q, k, v, o, outs[1].span, queue, choice=_choice(gpu, problem))

    def call(stream: int) -> None:
        fill(queue, 0, stream)
        run(stream)

    return call


def attention_packed_bwd(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """The gradients of packed heads."""
    do, qkv, o, lse = ins
    problem, (q, k, v) = _packed(qkv, attrs)
    dq, dk, dv = _packed(outs[0], attrs)[1]
    queue, work = gpu.scratch(QUEUE_BYTES), gpu.scratch(problem.workspace_bytes())
    o4, do4 = (Tensor4.contiguous(x.address, problem.queries, problem.heads, problem.head_dim) for x in (o, do))
    run = AttentionBackward(problem, q, k, v, o4, lse.span, do4, dq, dk, dv, work, queue, choice=_choice(gpu, problem))

    def call(stream: int) -> None:
        fill(queue, 0, stream)
        run(stream)

    return call


def _covered_packed(at: int) -> Callable[[Sequence[TensorType], Attrs], bool]:
    """Whether the packed operand at place `at` is inside what AttentionProblem accepts."""

    def holds(types: Sequence[TensorType], attrs: Attrs) -> bool:
        try:
            _packed(Operand(0, types[at]), attrs)
        except ShapeError:
            return False
        return True

    return holds


def scratch_packed_bwd(types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    """As scratch_bwd."""
    return QUEUE_BYTES + aligned(_packed(Operand(0, types[1]), attrs)[0].workspace_bytes())


def _covered(q: int) -> Callable[[Sequence[TensorType], Attrs], bool]:
    """Whether the operands q and k, at places q and q + 1, are inside what AttentionProblem accepts."""

    def holds(types: Sequence[TensorType], attrs: Attrs) -> bool:
        try:
            problem_of(types[q], types[q + 1], attrs)
        except ShapeError:
            return False
        return True

    return holds


def scratch(types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    """Bytes of the tile counter."""
    return QUEUE_BYTES


def scratch_bwd(types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    """Bytes of the tile counter and of what the first launch leaves for the second."""
    return QUEUE_BYTES + aligned(problem_of(types[1], types[2], attrs).workspace_bytes())


LIMITS = "head width 64 or 128, lengths up to 2^20, window 0 or more, scale above 0"

KERNELS = (
    Component(
        id="attention.bf16.sm90", kind="kernel", backend="cuda", op="attention", implementation=attention, requires=SM90A, scratch=scratch,
        binaries=Binaries(lambda: sources(FORWARD)),
        envelope=Envelope(dtypes=("bf16",), limits=(
            Limit(text="no documents", holds=lambda types, attrs: len(types) == 3),
            Limit(text=LIMITS, holds=_covered(0)),
        )),
    ),
    Component(
        id="attention_bwd.bf16.sm90", kind="kernel", backend="cuda", op="attention_bwd", implementation=attention_bwd, requires=SM90A,
        scratch=scratch_bwd, binaries=Binaries(lambda: sources(BACKWARD)),
        envelope=Envelope(dtypes=("bf16", "f32"), limits=(
            Limit(text="no documents", holds=lambda types, attrs: len(types) == 6),
            Limit(text="bf16 operands and fp32 lse", holds=lambda types, attrs: [t.dtype for t in types] == ["bf16"] * 5 + ["f32"]),
            Limit(text=LIMITS, holds=_covered(1)),
        )),
    ),
    Component(
        id="attention_packed.bf16.sm90", kind="kernel", backend="cuda", op="attention_packed", implementation=attention_packed,
        requires=SM90A, scratch=scratch, binaries=Binaries(lambda: sources(FORWARD)),
        envelope=Envelope(dtypes=("bf16",), limits=(
            Limit(text="no documents", holds=lambda types, attrs: len(types) == 1),
            Limit(text=LIMITS, holds=_covered_packed(0)),
        )),
    ),
    Component(
        id="attention_packed_bwd.bf16.sm90", kind="kernel", backend="cuda", op="attention_packed_bwd", implementation=attention_packed_bwd,
        requires=SM90A, scratch=scratch_packed_bwd, binaries=Binaries(lambda: sources(BACKWARD)),
        envelope=Envelope(dtypes=("bf16", "f32"), limits=(
            Limit(text="no documents", holds=lambda types, attrs: len(types) == 4),
            Limit(text="bf16 operands and fp32 lse", holds=lambda types, attrs: [t.dtype for t in types] == ["bf16"] * 3 + ["f32"]),
            Limit(text=LIMITS, holds=_covered_packed(1)),
        )),
    ),
)


def sources(path: str) -> Iterable[Source]:
    """Every compiled file that a launch may ask for: each .cu file holds all its tiles."""
    return [Source.of(path, {})]
