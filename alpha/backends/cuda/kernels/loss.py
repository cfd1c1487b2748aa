"""The head and the loss on the GPU, a chunk of rows at a time: logits live in scratch alone (kernels/gemm, kernels/loss). bf16.

Softmax cross entropy over rows of logits: "fused" overwrites the logits with their gradients, "loss" only reads them. Any vocabulary up to
131,072; stride (elements between rows) a multiple of 16 bytes, at least the vocabulary. What lies between a row's end and its stride is
neither read into a result nor written. dloss: one fp32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Calls, Drawn, Large, alike, bf16, i32, plain, product
from alpha.backends.cuda.cubins_of import Signature, cubins_of
from alpha.backends.cuda.kernels import gemm
from alpha.backends.cuda.kernels.gemm import GemmProblem
from alpha.backends.cuda.launches import (
    MULTIPROCESSORS,
    PER_VECTOR,
    Operation,
    addresses,
    ceil_div,
    kernel,
    launch,
    limit,
    require,
    structure,
)
from alpha.backends.cuda.lib import SM90A, Gpu, Operand, Parts, copy, in_order
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.memory import aligned
from alpha.ops.spec import Sample
from alpha.types import Attrs, TensorType

LARGEST_VOCABULARY = 131_072

Mode = Literal["loss", "fused"]
SHARED_LIMIT = 232_448
SHARED_OF_SM = 233_472
RESERVED = 1024  # shared memory that the system takes from each CTA


@dataclass(frozen=True, kw_only=True)
class LossProblem:
    """What is computed. `stride`: elements from one row of logits to the next."""

    rows: int
    vocabulary: int
    stride: int
    ignore: int = -1
    z_loss: float = 0.0

    def check(self) -> None:
        """ShapeError naming the limit that this problem breaks."""
        n, most = PER_VECTOR, LARGEST_VOCABULARY
        require(
            f"the cross entropy kernels: {self}",
            [
                (1 <= self.rows < 2**31, f"{self.rows} rows", "1 to 2^31 - 1"),
                (1 <= self.vocabulary <= most, f"vocabulary {self.vocabulary}", f"1 to {most}"),
                (self.stride >= self.vocabulary and self.stride % n == 0, f"stride {self.stride}",
                 f"a multiple of {n}, at least the vocabulary"),
                (self.z_loss >= 0, f"z_loss {self.z_loss}", "at least 0"),
            ],
        )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How it is computed: lanes that a row is dealt to (they decide bits; 0: as many as threads), threads per row, 16-byte vectors that
    each keeps in shared memory and in registers, CTAs per multiprocessor."""

    threads: int
    lanes: int = 0
    shared: int = 0
    registers: int = 0
    blocks: int = 1


def choose(problem: LossProblem, mode: Mode) -> LossConfig:
    """Two or more rows per multiprocessor at a time where shared memory holds them; else 1024 threads on one row, what does not
    fit shared memory in registers. The lanes do not depend on the mode, so that all modes give the same bits of lse; the loss alone
    deals them to fewer threads, for ten rows per multiprocessor at a time."""
    vectors = ceil_div(problem.vocabulary, PER_VECTOR)
    lanes = 128 if vectors <= 1024 else 256 if vectors <= 3072 else 512 if vectors <= 512 * 13 else 1024
    if mode == "loss":
        threads = max(128, lanes // 4)
        return LossConfig(threads=threads, lanes=lanes, blocks=1280 // threads)
    most = (SHARED_LIMIT - 1024) // (16 * lanes)
    each = ceil_div(vectors, lanes)
    shared = min(each, most)
    blocks = max(1, min(1536 // lanes, SHARED_OF_SM // (16 * lanes * shared + 512 + RESERVED)))
    return LossConfig(threads=lanes, shared=shared, registers=each - shared, blocks=blocks)


_Loss = structure(
    "_Loss",
    "logits targets loss lse dloss",
    ("stride", ctypes.c_int64),
    *((name, ctypes.c_int32) for name in ("rows", "vocabulary", "ignore", "dloss_stride")),
    ("z", ctypes.c_float),
)


def cross_entropy(
    problem: LossProblem,
    mode: Mode,
    *,
    logits: int,
    targets: int,
    lse: int,
    loss: int,
    dloss: int = 0,
    config: LossConfig | None = None,
    blocks: int = 0,
) -> Operation:
    """See the file's text. `loss`, `lse`: fp32 [rows]; `targets`: i32 [rows]."""
    problem.check()
    c = config or choose(problem, mode)
    name = f"cross entropy {mode}"
    addresses(name, logits=logits)
    addresses(name, 4, targets=targets, lse=lse, loss=loss)
    if mode != "loss":
        addresses(name, 4, dloss=dloss)
    defines: dict[str, object] = {"LOSS_GRADIENT": int(mode == "fused"), "LOSS_THREADS": c.threads}
    defines["LOSS_LANES"] = c.lanes or c.threads
    defines |= {"LOSS_SHARED": c.shared, "LOSS_REGISTERS": c.registers, "LOSS_BLOCKS": c.blocks}
    grid = limit(min(problem.rows, MULTIPROCESSORS * c.blocks), blocks)
    arguments = _Loss(
        logits, targets, loss, lse, dloss, problem.stride,
        problem.rows, problem.vocabulary, problem.ignore, 0, problem.z_loss,
    )  # fmt: skip
    of = kernel("loss/cross_entropy.cu", "cross_entropy", defines, shared_bytes=16 * c.threads * c.shared)
    logits_bytes = 2 * problem.rows * problem.vocabulary
    run = launch(of, grid, c.threads, arguments)
    return Operation(f"{name} {problem}", (run,), logits_bytes * (1 if mode == "loss" else 2) + 12 * problem.rows)


def total(rows: int, *, loss: int, targets: int, out: int, ignore: int = -1, add: bool = False) -> Operation:
    """out[0] = sum of loss[rows], out[1] = number of targets other than `ignore`, both fp32; with `add`, added to what is there."""
    require("the sum of losses", [(1 <= rows < 2**31 - 1024, f"{rows} rows", "1 to 2^31 - 1025")])
    addresses("sum of losses", 4, loss=loss, targets=targets, out=out)
    of = kernel("loss/total.cu", "loss_total", {"TOTAL_ACCUMULATE": int(add)})
    values = [ctypes.c_uint64(word) for word in (loss, targets, out)]
    run = launch(of, 1, 1024, *values, ctypes.c_int32(rows), ctypes.c_int32(ignore))
    return Operation(f"sum of {rows} losses", (run,), 8 * rows + 8)


# Binders --------------------------------------------------------------------------------------------------------------------------------


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
    work = max(gemm.choose(g).workspace_bytes() for p in parts for g in p.gemms)
    return [2 * first.rows * first.loss.stride, 4 * first.rows, 4 * first.rows, 8, work]


def _head(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs, gradients: bool) -> Callable[[int], None]:
    x, weight, targets = ins
    parts = chunks(x.type, weight.type, attrs, gradients)
    logits, loss, lse, sums, work = (gpu.scratch(n).address for n in _scratch_parts(parts))
    one = gpu.constant("one", lambda: np.ones(1, np.float32)).address
    width = 2 * x.type.shape[1]
    found: list[tuple[str | None, Callable[[int], None]]] = []
    for p in parts:
        rows, ids = x.address + p.start * width, targets.address + 4 * p.start

        def multiply(problem: GemmProblem, a: int, b: int, c: int) -> Callable[[int], None]:
            config = gemm.choose(problem, gpu.blocks)
            counter = gpu.counters(config.counter_bytes()).address if config.ahead else 0
            return gemm.prepare(problem, config, a=a, b=b, c=c, workspace=work, counter=counter)

        forward: list[Callable[[int], None]] = [
            multiply(p.gemms[0], rows, weight.address, logits),
            cross_entropy(p.loss, "fused" if gradients else "loss", logits=logits, targets=ids, loss=loss, lse=lse, dloss=one,
                          blocks=gpu.blocks),
            total(p.rows, loss=loss, targets=ids, out=sums, ignore=p.loss.ignore, add=p.start > 0)]
        if p is parts[-1]:
            forward.append(lambda stream: copy(outs[0].address, sums, 4, stream))
        found.append((None, in_order(forward)))
        if gradients:
            found.append(("backward", in_order([multiply(p.gemms[1], logits, weight.address, outs[1].address + p.start * width),
                                                multiply(p.gemms[2], logits, rows, outs[2].address)])))
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


def _scratch(gradients: bool, types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    return sum(aligned(n) for n in _scratch_parts(chunks(types[0], types[1], attrs, gradients)))


def _sources(gradients: bool) -> list[Source]:
    """The products in both forms of dweight, and cross entropy for every vocabulary."""
    found: dict[Source, None] = {}
    for rows in (1, 2):
        x, weight = TensorType((rows, 8), "bf16"), TensorType((8, 8), "bf16")
        for p in chunks(x, weight, {"chunk": 1, "ignore_index": -1, "z_loss": 0.0}, gradients):
            for problem in p.gemms:
                for config in gemm.compiled(problem):
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


def _vocabularies() -> Iterable[Signature]:
    for v in (64, *range(1024, LARGEST_VOCABULARY + 1, 1024)):  # the choice goes by 16-byte vectors over 128 threads or more
        types = [TensorType((2, 8), "bf16"), TensorType((v, 8), "bf16"), TensorType((2,), "i32")]
        yield types, {"chunk": 1, "ignore_index": -1, "z_loss": 0.0}


def _fits(types: Sequence[TensorType], attrs: Attrs) -> bool:
    x, weight, targets = types
    return (all(t.size for t in types) and len(x.shape) == 2 and x.shape[1] % 8 == 0 and weight.shape[0] <= LARGEST_VOCABULARY
            and targets.dtype == "i32" and int(attrs["chunk"]) >= 1)  # type: ignore[call-overload]


# Calls ----------------------------------------------------------------------------------------------------------------------------------

VOCABULARIES = (53, 1027, 3067, 3077, 5117, 5125, 7163, 7171, 9001, 10243, 14331, 14347, 18427, 18435, 22523, 22531, 25003, 28675, 36859,
                36867, 45051, 45061, 53243, 53251, 65531, 65541, 81917, 81923, 98299, 98309, 114683, 114691, 131067)
"""One for each form of cross entropy with gradients, near either end of the form's range in turn; off the multiples of 8, so that the last
vector of a row is partly padding."""


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for v in VOCABULARIES:
        targets = rng.integers(0, v, 5).astype(np.int32)
        targets[1] = -1
        yield Sample(name=f"gpu-{v}", attrs={"ignore_index": -1, "z_loss": 1e-3, "chunk": 2},
                     inputs=(rng.standard_normal((5, 8)), rng.standard_normal((v, 8)), targets))


def _draw_astray(rng: np.random.Generator) -> Drawn:
    """Targets of which one is no column and is not ignored."""
    targets = rng.integers(0, 53, 5).astype(np.int32)
    targets[rng.integers(5)] = rng.choice((-2, 53, 2**31 - 1))
    attrs: dict[str, object] = {"ignore_index": -1, "z_loss": 1e-3, "chunk": 2}
    return [(rng.standard_normal((5, 8)).round(1), "bf16"), (rng.standard_normal((53, 8)).round(1), "bf16"), (targets, "i32")], attrs


def _draw_overflow(sign: float, rng: np.random.Generator) -> Drawn:
    """Logits of which one row is infinite: all of them above, or all below."""
    x = np.zeros((5, 8))
    x[rng.integers(5)] = sign * 2.0**100
    return [(x, "bf16"), (np.full((1027, 8), 2.0**100), "bf16"), (rng.integers(0, 1027, 5).astype(np.int32), "i32")], {
        "ignore_index": -1, "z_loss": 0.0, "chunk": 2}


def _not_finite(rng: np.random.Generator, inputs: Sequence[np.ndarray], attrs: Attrs, outs: Sequence[np.ndarray]) -> tuple[float, int]:
    """The sum of the losses is no number, so that the step is refused."""
    return alike(np.full(outs[0].shape, np.nan), outs[0])


LARGE = {"astray": Large(_draw_astray, _not_finite), "above": Large(partial(_draw_overflow, 1.0), _not_finite),
         "below": Large(partial(_draw_overflow, -1.0), _not_finite)}
CALLS = Calls(further=_samples, large=LARGE, timed=(
    product(bf16(8192, 768), bf16(50304, 768), i32(8192), below=50304, ignore_index=-1, z_loss=0.0, chunk=4096),))


# Components -----------------------------------------------------------------------------------------------------------------------------


def _component(op: str, gradients: bool) -> Component:
    return Component(
        id=f"{op}.bf16.sm90", kind="kernel", backend="cuda", op=op, requires=SM90A, scratch=partial(_scratch, gradients),
        implementation=linear_cross_entropy_grad if gradients else linear_cross_entropy, binaries=Binaries(partial(_sources, gradients)),
        calls=CALLS,
        envelope=Envelope(dtypes=("bf16",), limits=(
            Limit(text="a width that is a multiple of 8 and a vocabulary of at most 131,072", holds=_fits),)))


KERNELS = (
    _component("linear_cross_entropy", False),
    _component("linear_cross_entropy_grad", True),
    Component(id="count_valid.i32.sm90", kind="kernel", backend="cuda", op="count_valid", implementation=count_valid, requires=SM90A,
              scratch=lambda types, attrs, multiprocessors: aligned(8),
              calls=Calls(timed=(plain(i32(1 << 20), below=50304, ignore_index=-1),)),
              binaries=Binaries(cubins_of("count_valid", count_valid, lambda: [([TensorType((64,), "i32")], {"ignore_index": -1})])),
              envelope=Envelope(dtypes=("f32",), limits=(
                  Limit(text="i32 targets", holds=lambda types, attrs: types[0].dtype == "i32" and types[0].size > 0),))),
)
