"""Matrix products on the GPU: kernels/gemm by alpha/cuda_runtime/gemm.py. bf16 operands, fp32 accumulation, bf16 or fp32 result.

y = op(a) @ op(b) + bias, in every transposition; b may be batched like a; leading axes of a fold into its rows where b has two axes.
Every row of an operand or a result begins at a multiple of 16 bytes, which dense tensors do when their last axis is a multiple of 8
elements (4 in fp32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.lib import SM90A, Gpu, Operand, in_place
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.gemm import GemmProblem, Output, choose, compiled, prepare
from alpha.ops.table import row
from alpha.types import Attrs, TensorType


def problem_of(op: str, types: Sequence[TensorType], attrs: Attrs) -> GemmProblem:
    """The GEMM of a call of `matmul` (a, b, bias?) or of `matmul_accumulate` (into, a, b), whose result is added to its buffer."""
    (y,) = row(op).infer(types, attrs)
    adds = op == "matmul_accumulate"
    a, b, *bias = types[1:] if adds else types
    trans_a, trans_b = bool(attrs.get("trans_a", False)), bool(attrs.get("trans_b", False))
    lead, m, k = a.shape[:-2], a.shape[-1 if trans_a else -2], a.shape[-2 if trans_a else -1]
    batch = prod(lead)
    if len(b.shape) == 2 and not trans_a:
        batch, m = 1, batch * m
    out: Output = "f32+=" if adds else "bf16" if y.dtype == "bf16" else "f32"
    return GemmProblem(m=m, n=y.shape[-1], k=k, batch=batch, a_major="m" if trans_a else "k", b_major="k" if trans_b else "n", out=out,
                       bias=bool(bias) and not adds)


def _matmul(gpu: Gpu, op: str, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    problem = problem_of(op, [x.type for x in ins], attrs)
    config = replace(choose(problem, multiprocessors=gpu.multiprocessors), blocks=gpu.blocks)
    work = gpu.scratch(config.workspace_bytes()).address if config.split_units else 0
    a, b, *rest = ins[1:] if op == "matmul_accumulate" else ins
    return prepare(problem, config, a=a.address, b=b.address, c=outs[0].address, workspace=work, bias=rest[0].address if rest else 0)


def matmul(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = op(a) @ op(b) + bias."""
    return _matmul(gpu, "matmul", ins, outs, attrs)


def scratch(types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    """Bytes for the partial sums of tiles that are split along K."""
    return choose(problem_of("matmul", types, attrs)).workspace_bytes()


def matmul_accumulate(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = into + op(a) @ op(b), in fp32 where `into` lies."""
    return in_place([(outs[0], ins[0])], _matmul(gpu, "matmul_accumulate", ins, outs, attrs))


def scratch_accumulate(types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    """Bytes for the partial sums of tiles that are split along K."""
    return choose(problem_of("matmul_accumulate", types, attrs)).workspace_bytes()


def rows_fit(types: Sequence[TensorType], attrs: Attrs) -> bool:
    """Whether every row is a multiple of 16 bytes long."""
    (y,) = row("matmul").infer(types, attrs)
    return all(t.shape[-1] % (8 if t.dtype == "bf16" else 4) == 0 for t in (*types[:2], y))


def accumulates(types: Sequence[TensorType], attrs: Attrs) -> bool:
    """Whether a gradient product is one GEMM into fp32: whole rows of 16 bytes, no leading axes."""
    return types[0].dtype == "f32" and types[0].shape[-1] % 4 == 0 and all(
        t.dtype == "bf16" and len(t.shape) == 2 and t.shape[-1] % 8 == 0 for t in types[1:])


def sources(outs: Sequence[Output] = ("bf16", "f32"), biases: Sequence[bool] = (False, True)) -> Iterable[Source]:
    """Every compiled file that `choose` may ask for."""
    for a in ("k", "m"):
        for b in ("k", "n"):
            for out in outs:
                for bias in biases:
                    problem = GemmProblem(m=64, n=64, k=64, a_major=a, b_major=b, out=out, bias=bias)  # type: ignore[arg-type]
                    for config in compiled(problem):
                        yield from config.sources(problem)


KERNELS = (
    Component(
        id="matmul.bf16.sm90", kind="kernel", backend="cuda", op="matmul", implementation=matmul, requires=SM90A, scratch=scratch,
        binaries=Binaries(sources),
        envelope=Envelope(
            dtypes=("bf16",),
            limits=(
                Limit(text="no empty axis", holds=lambda types, attrs: all(t.size for t in types)),
                Limit(text="a last axis that is a multiple of 8 elements (4 in fp32) in a, b and y", holds=rows_fit),
                Limit(text="b batched like a, or no leading axes, where a is transposed",
                      holds=lambda types, attrs: not attrs.get("trans_a") or len(types[0].shape) == len(types[1].shape)),
            ),
        ),
    ),
    Component(
        id="matmul_accumulate.bf16.sm90", kind="kernel", backend="cuda", op="matmul_accumulate", implementation=matmul_accumulate,
        requires=SM90A, scratch=scratch_accumulate, binaries=Binaries(lambda: sources(("f32+=",), (False,))), inplace=((0, 0),),
        envelope=Envelope(
            dtypes=("bf16", "f32"),
            limits=(
                Limit(text="no empty axis", holds=lambda types, attrs: all(t.size for t in types)),
                Limit(text="bf16 matrices of whole 16-byte rows and an fp32 buffer", holds=accumulates),
            ),
        ),
    ),
)
