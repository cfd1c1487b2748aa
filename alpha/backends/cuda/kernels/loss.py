"""The head and the loss on the GPU, a chunk of rows at a time: logits live in scratch alone (kernels/gemm, kernels/loss)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.cubins_of import Call, cubins_of
from alpha.backends.cuda.lib import SM90A, Gpu, Operand, Parts, copy, in_order
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.gemm import GemmConfig, GemmProblem, choose, compiled, prepare
from alpha.cuda_runtime.loss import LossProblem, cross_entropy, total
from alpha.cuda_runtime.memory import aligned
from alpha.types import Attrs, TensorType

LARGEST_VOCABULARY = 131_072


@dataclass(frozen=True)
class _Chunk:
    """One run of rows: its products (logits, and with gradients dx and dweight), the loss over it."""

    start: int
    rows: int
    gemms: tuple[GemmProblem, ...]
    loss: LossProblem


def chunks(x: TensorType, weight: TensorType, attrs: Attrs, gradients: bool) -> list[_Chunk]:
    """The chunks in order. Logits stand in rows of a multiple of 8 elements."""
    (n, c), v = x.shape, weight.shape[0]
    stride, step = -(-v // 8) * 8, int(attrs["chunk"])  # type: ignore[call-overload]
    found = []
    for start in range(0, n, step):
        rows = min(step, n - start)
        gemms = [GemmProblem(m=rows, n=v, k=c, ldc=stride)]
        if gradients:
            gemms.append(GemmProblem(m=rows, n=c, k=v, lda=stride, b_major="n"))
            gemms.append(GemmProblem(m=v, n=c, k=rows, a_major="m", b_major="n", lda=stride, out="f32+=" if start else "f32"))
        loss = LossProblem(rows=rows, vocabulary=v, stride=stride, ignore=int(attrs["ignore_index"]),  # type: ignore[call-overload]
                           z_loss=float(attrs["z_loss"]))  # type: ignore[arg-type]
        found.append(_Chunk(start, rows, tuple(gemms), loss))
    return found


def _scratch_parts(parts: Sequence[_Chunk]) -> list[int]:
    """Bytes: logits, losses, log-sum-exps, the two sums, workspace of the products."""
    first = parts[0]
    work = max(choose(g).workspace_bytes() for p in parts for g in p.gemms)
    return [2 * first.rows * first.loss.stride, 4 * first.rows, 4 * first.rows, 8, work]


def _config(gpu: Gpu, problem: GemmProblem) -> GemmConfig:
    return replace(choose(problem, multiprocessors=gpu.multiprocessors), blocks=gpu.blocks)


def _head(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs, gradients: bool) -> Callable[[int], None]:
    x, weight, targets = ins
    parts = chunks(x.type, weight.type, attrs, gradients)
    logits, loss, lse, sums, work = (gpu.scratch(n).address for n in _scratch_parts(parts))
    one = gpu.constant("one", lambda: np.ones(1, np.float32)).address
    width = 2 * x.type.shape[1]
    found: list[tuple[str | None, Callable[[int], None]]] = []
    for p in parts:
        rows, ids = x.address + p.start * width, targets.address + 4 * p.start

        def product(problem: GemmProblem, a: int, b: int, c: int) -> Callable[[int], None]:
            return prepare(problem, _config(gpu, problem), a=a, b=b, c=c, workspace=work)

        forward: list[Callable[[int], None]] = [
            product(p.gemms[0], rows, weight.address, logits),
            cross_entropy(p.loss, "fused" if gradients else "loss", logits=logits, targets=ids, loss=loss, lse=lse, dloss=one,
                          blocks=gpu.blocks),
            total(p.rows, loss=loss, targets=ids, out=sums, ignore=p.loss.ignore, add=p.start > 0)]
        if p is parts[-1]:
            forward.append(lambda stream: copy(outs[0].address, sums, 4, stream))
        found.append((None, in_order(forward)))
        if gradients:
            found.append(("backward", in_order([product(p.gemms[1], logits, weight.address, outs[1].address + p.start * width),
                                                product(p.gemms[2], logits, rows, outs[2].address)])))
    return Parts(*found)


def linear_cross_entropy(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """The sum of the losses of x W^T."""
    return _head(gpu, ins, outs, attrs, False)


def linear_cross_entropy_grad(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """The sum of the losses, dx, and dweight in fp32; chunks are added to dweight in order. The two products that make the gradients belong
    to the backward pass; the gradient of the logits is made by the kernel that makes the loss, and counts where that does."""
    return _head(gpu, ins, outs, attrs, True)


def count_valid(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """How many targets count."""
    targets, sums = ins[0], gpu.scratch(8).address
    ignore = int(attrs["ignore_index"])  # type: ignore[call-overload]
    run = total(targets.type.size, loss=targets.address, targets=targets.address, out=sums, ignore=ignore)

    def call(stream: int) -> None:
        run(stream)
        copy(outs[0].address, sums + 4, 4, stream)

    return call


def _scratch(gradients: bool, types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    return sum(aligned(n) for n in _scratch_parts(chunks(types[0], types[1], attrs, gradients)))


def _sources(gradients: bool) -> list[Source]:
    """The products in both forms of dweight, and cross entropy for every vocabulary."""
    found: dict[Source, None] = {}
    for rows in (1, 2):
        x, weight = TensorType((rows, 8), "bf16"), TensorType((8, 8), "bf16")
        for p in chunks(x, weight, {"chunk": 1, "ignore_index": -1, "z_loss": 0.0}, gradients):
            for problem in p.gemms:
                for config in compiled(problem):
                    found.update(dict.fromkeys(config.sources(problem)))
    found.update(dict.fromkeys(cubins_of("linear_cross_entropy", partial(_loss_only, gradients), _vocabularies)()))
    return list(found)


def _loss_only(gradients: bool, gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """What `_head` asks of the loss kernels for one vocabulary."""
    steps: list[Callable[[int], None]] = []
    x, weight, _ = ins
    for p in chunks(x.type, weight.type, attrs, False):
        at = ins[0].address
        steps.append(cross_entropy(p.loss, "fused" if gradients else "loss", logits=at, targets=at, loss=at, lse=at, dloss=at))
        steps.append(total(p.rows, loss=at, targets=at, out=at, add=p.start > 0))
    return steps[-1]


def _vocabularies() -> Iterable[Call]:
    for v in (64, *range(1024, LARGEST_VOCABULARY + 1, 1024)):  # the choice goes by 16-byte vectors over 128 threads or more
        types = [TensorType((2, 8), "bf16"), TensorType((v, 8), "bf16"), TensorType((2,), "i32")]
        yield types, {"chunk": 1, "ignore_index": -1, "z_loss": 0.0}


def _fits(types: Sequence[TensorType], attrs: Attrs) -> bool:
    x, weight, targets = types
    return (all(t.size for t in types) and len(x.shape) == 2 and x.shape[1] % 8 == 0 and weight.shape[0] <= LARGEST_VOCABULARY
            and targets.dtype == "i32" and int(attrs["chunk"]) >= 1)  # type: ignore[call-overload]


def _component(op: str, gradients: bool) -> Component:
    return Component(
        id=f"{op}.bf16.sm90", kind="kernel", backend="cuda", op=op, requires=SM90A, scratch=partial(_scratch, gradients),
        implementation=linear_cross_entropy_grad if gradients else linear_cross_entropy, binaries=Binaries(partial(_sources, gradients)),
        envelope=Envelope(dtypes=("bf16",), limits=(
            Limit(text="a width that is a multiple of 8 and a vocabulary of at most 131,072", holds=_fits),)))


KERNELS = (
    _component("linear_cross_entropy", False),
    _component("linear_cross_entropy_grad", True),
    Component(id="count_valid.i32.sm90", kind="kernel", backend="cuda", op="count_valid", implementation=count_valid, requires=SM90A,
              scratch=lambda types, attrs, threads: aligned(8),
              binaries=Binaries(cubins_of("count_valid", count_valid, lambda: [([TensorType((64,), "i32")], {"ignore_index": -1})])),
              envelope=Envelope(dtypes=("f32",), limits=(
                  Limit(text="i32 targets", holds=lambda types, attrs: types[0].dtype == "i32" and types[0].size > 0),))),
)
