"""The head and the loss on the GPU, a chunk of rows at a time: logits live in scratch alone (kernels/gemm, kernels/loss). bf16.

Without gradients logits are made, and softmax cross entropy reads them. With gradients powers of e are made in their place, which nothing
reads but the two products of the gradient (kernels/loss/head.cu). Any vocabulary up to 131,072; stride (elements between rows) a multiple
of 16 bytes, at least the vocabulary. What lies between a row's end and its stride is neither read into a result nor written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Calls, Drawn, Large, alike, bf16, i32, plain, product
from alpha.backends.cuda.cubins_of import Signature, cubins_of
from alpha.backends.cuda.kernels import embedding, gemm
from alpha.backends.cuda.kernels.embedding import EmbeddingProblem
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
from alpha.cuda_runtime.memory import Span, aligned
from alpha.ops.numerics import UNIT_ROUNDOFF, growth, round_to
from alpha.ops.spec import Sample
from alpha.types import Attrs, TensorType

LARGEST_VOCABULARY = 131_072


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
    """How it is computed: threads per row, lanes that it is dealt to (they decide bits; 0: as many as threads), CTAs per multiprocessor."""

    threads: int
    lanes: int = 0
    blocks: int = 1


def choose(problem: LossProblem) -> LossConfig:
    """Lanes by the vocabulary, dealt to a quarter as many threads, for ten rows per multiprocessor at a time."""
    vectors = ceil_div(problem.vocabulary, PER_VECTOR)
    lanes = 128 if vectors <= 1024 else 256 if vectors <= 3072 else 512 if vectors <= 512 * 13 else 1024
    threads = max(128, lanes // 4)
    return LossConfig(threads=threads, lanes=lanes, blocks=1280 // threads)


_Loss = structure(
    "_Loss",
    "logits targets loss lse",
    ("stride", ctypes.c_int64),
    *((name, ctypes.c_int32) for name in ("rows", "vocabulary", "ignore")),
    ("z", ctypes.c_float),
)


def cross_entropy(
    problem: LossProblem,
    *,
    logits: int,
    targets: int,
    lse: int,
    loss: int,
    config: LossConfig | None = None,
    blocks: int = 0,
) -> Operation:
    """See the file's text. `loss`, `lse`: fp32 [rows]; `targets`: i32 [rows]."""
    problem.check()
    c = config or choose(problem)
    addresses("cross entropy", logits=logits)
    addresses("cross entropy", 4, targets=targets, lse=lse, loss=loss)
    defines: dict[str, object] = {"LOSS_THREADS": c.threads, "LOSS_LANES": c.lanes or c.threads, "LOSS_BLOCKS": c.blocks}
    arguments = _Loss(logits, targets, loss, lse, problem.stride, problem.rows, problem.vocabulary, problem.ignore, problem.z_loss)
    run = launch(kernel("loss/cross_entropy.cu", "cross_entropy", defines), limit(min(problem.rows, MULTIPROCESSORS * c.blocks), blocks),
                 c.threads, arguments)
    return Operation(f"cross entropy {problem}", (run,), 2 * problem.rows * problem.vocabulary + 12 * problem.rows)


_Head = structure(
    "_Head",
    "x weight targets anchors powers sums scale factors scaled loss",
    ("stride", ctypes.c_int64),
    *((name, ctypes.c_int32) for name in ("rows", "vocabulary", "width", "tiles", "ignore")),
    ("z", ctypes.c_float),
)


def head(
    problem: LossProblem,
    width: int,
    *,
    x: int,
    weight: int,
    targets: int,
    anchors: int,
    powers: int,
    sums: int,
    scale: int,
    factors: int,
    scaled: int,
    loss: int,
    blocks: int = 0,
) -> tuple[Operation, Operation]:
    """What goes before the product of the logits and what follows it: anchors, and the end of the loss (kernels/loss/head.cu). `x` bf16
    [rows, width], `weight` bf16 [vocabulary, width], `targets` i32 [rows], `powers` bf16 [rows, stride], `sums` fp32 [tiles, rows];
    `anchors`, `scale`, `factors`, `loss` fp32 [rows]; `scaled` bf16 [rows, width]."""
    problem.check()
    p = problem
    addresses("head", x=x, weight=weight, powers=powers, scaled=scaled)
    addresses("head", 4, targets=targets, anchors=anchors, sums=sums, scale=scale, factors=factors, loss=loss)
    tiles = ceil_div(p.vocabulary, gemm.DEFERRED.bn)
    arguments = _Head(x, weight, targets, anchors, powers, sums, scale, factors, scaled, loss, p.stride,
                      p.rows, p.vocabulary, width, tiles, p.ignore, p.z_loss)
    most = 8 * MULTIPROCESSORS
    before = launch(kernel("loss/head.cu", "head_anchor", {}), limit(min(ceil_div(p.rows, 8), most), blocks), 256, arguments)
    behind = launch(kernel("loss/head.cu", "head_finish", {}), limit(min(ceil_div(p.rows, 32), most), blocks), 256, arguments)
    return (Operation(f"anchors {problem}", (before,), 4 * p.rows * width + 8 * p.rows),
            Operation(f"end of the loss {problem}", (behind,), 4 * p.rows * (width + tiles) + 24 * p.rows))


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
        gemms = [GemmProblem(m=rows, n=v, k=c, ldc=stride, rows="powers" if gradients else "none")]
        if gradients:
            gemms.append(GemmProblem(m=rows, n=c, k=v, lda=stride, b_major="n", rows="blend"))
            gemms.append(GemmProblem(m=v, n=c, k=rows, a_major="m", b_major="n", lda=stride, out="f32+=" if start else "f32"))
        loss = LossProblem(rows=rows, vocabulary=v, stride=stride, ignore=int(attrs["ignore_index"]),  # type: ignore[call-overload]
                           z_loss=float(attrs["z_loss"]))  # type: ignore[arg-type]
        found.append(_Chunk(start, rows, tuple(gemms), loss))
    return found


def _of_targets(x: TensorType, weight: TensorType) -> EmbeddingProblem:
    """What targets add to the weight's gradient."""
    return EmbeddingProblem(count=x.shape[0], vocabulary=weight.shape[0], width=x.shape[1])


def _scratch_parts(x: TensorType, weight: TensorType, parts: Sequence[_Chunk]) -> list[int]:
    """Bytes: logits, losses, log-sum-exps or anchors, the two sums, workspace of the products. With gradients also the sums of powers, what
    rows are multiplied by, x times that, how often each row of x counts at its target; the workspace of those lies where logits were."""
    first = parts[0]
    work = max(gemm.choose(g).workspace_bytes() for p in parts for g in p.gemms)
    found = [2 * first.rows * first.loss.stride, 4 * first.rows, 4 * first.rows, 8, work]
    logits, *rest = first.gemms
    if not rest:
        return found
    found[0] = max(found[0], _of_targets(x, weight).workspace_bytes())
    return [*found, gemm.choose(logits).sums_bytes(logits), 4 * first.rows, 2 * first.rows * logits.k, 4 * x.shape[0]]


def _head(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs, gradients: bool) -> Callable[[int], None]:
    x, weight, targets = ins
    parts = chunks(x.type, weight.type, attrs, gradients)
    spans = [gpu.scratch(n) for n in _scratch_parts(x.type, weight.type, parts)]
    logits, loss, lse, sums, work, *more = (span.address for span in spans)
    width = 2 * x.type.shape[1]
    found: list[tuple[str | None, Callable[[int], None]]] = []
    for p in parts:
        rows, ids = x.address + p.start * width, targets.address + 4 * p.start

        def multiply(problem: GemmProblem, a: int, b: int, c: int, **of_rows: int) -> Callable[[int], None]:
            config = gemm.choose(problem, gpu.blocks)
            counter = gpu.counters(config.counter_bytes()).address if config.ahead else 0
            return gemm.prepare(problem, config, a=a, b=b, c=c, workspace=work, counter=counter, **of_rows)

        forward: list[Callable[[int], None]]
        backward: list[Callable[[int], None]] = []
        if gradients:
            powers, scale, scaled, factors = more
            factor = factors + 4 * p.start
            before, behind = head(p.loss, x.type.shape[1], x=rows, weight=weight.address, targets=ids, anchors=lse, powers=logits,
                                  sums=powers, scale=scale, factors=factor, scaled=scaled, loss=loss, blocks=gpu.blocks)
            forward = [before, multiply(p.gemms[0], rows, weight.address, logits, rows=lse, sums=powers), behind]
            backward = [multiply(p.gemms[1], logits, weight.address, outs[1].address + p.start * width, rows=scale, factors=factor,
                                 picks=ids, table=weight.address),
                        multiply(p.gemms[2], logits, scaled, outs[2].address)]
            if p is parts[-1]:
                backward.append(embedding.backward(_of_targets(x.type, weight.type), dy=x.address, ids=targets.address,
                                                   dtable=outs[2].address, workspace=spans[0], out="f32+=", factors=factors,
                                                   blocks=gpu.blocks))
        else:
            forward = [multiply(p.gemms[0], rows, weight.address, logits),
                       cross_entropy(p.loss, logits=logits, targets=ids, loss=loss, lse=lse, blocks=gpu.blocks)]
        forward.append(total(p.rows, loss=loss, targets=ids, out=sums, ignore=p.loss.ignore, add=p.start > 0))
        if p is parts[-1]:
            forward.append(lambda stream: copy(outs[0].address, sums, 4, stream))
        found.append((None, in_order(forward)))
        if gradients:
            found.append(("backward", in_order(backward)))
    return Parts(*found)


def linear_cross_entropy(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """The sum of the losses of x W^T."""
    return _head(gpu, ins, outs, attrs, False)


def linear_cross_entropy_grad(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """The sum of the losses, dx, and dweight in fp32; chunks are added to dweight in order. The two products that make the gradients belong
    to the backward pass."""
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
    return sum(aligned(n) for n in _scratch_parts(types[0], types[1], chunks(types[0], types[1], attrs, gradients)))


def _sources(gradients: bool) -> list[Source]:
    """The products in both forms of dweight, and the loss for every vocabulary."""
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
        if gradients:
            steps += head(p.loss, x.type.shape[1], x=at, weight=at, targets=at, anchors=at, powers=at, sums=at, scale=at, factors=at,
                          scaled=at, loss=at)
        else:
            steps.append(cross_entropy(p.loss, logits=at, targets=at, loss=at, lse=at))
        steps.append(total(p.rows, loss=at, targets=at, out=at, add=p.start > 0))
    if gradients:
        of = _of_targets(x.type, weight.type)
        steps.append(embedding.backward(of, dy=at, ids=at, dtable=at, workspace=Span(at, of.workspace_bytes()), out="f32+=", factors=at))
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
"""Near either end of the ranges of the loss's forms, and between; off the multiples of 8, so that the last vector of a row is partly
padding, and the last tile of powers ragged."""

SIZES = ((300, 24, 600, 280), (300, 776, 520, 300))
"""(N, C, V, chunk): tiles of powers that leave under fewer steps than they take, and that leave under the next tile."""


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for n, c, v, chunk in SIZES:
        targets = rng.integers(0, v, n).astype(np.int32)
        targets[rng.random(n) < 0.1] = -1
        yield Sample(name=f"gpu-{n}x{c}x{v}", attrs={"ignore_index": -1, "z_loss": 1e-3, "chunk": chunk},
                     inputs=(rng.standard_normal((n, c)), rng.standard_normal((v, c)) / c**0.5, targets))
    n, v = 70, 1027  # losses of 10 to 400: above 55 a row is made anew
    targets = rng.integers(0, v, n).astype(np.int32)
    targets[::9] = 3
    yield Sample(name="gpu-anew", attrs={"ignore_index": 3, "z_loss": 1e-3, "chunk": 48},
                 inputs=(rng.standard_normal((n, 8)) * np.geomspace(1, 40, n)[:, None], rng.standard_normal((v, 8)), targets))
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


def _draw_parts(rng: np.random.Generator) -> Drawn:
    """dx by owners that add parts of tiles of 128x256, and a second chunk."""
    n, c, v = 1500, 264, 4041
    targets = rng.integers(0, v, n).astype(np.int32)
    targets[rng.random(n) < 0.1] = -1
    attrs: dict[str, object] = {"ignore_index": -1, "z_loss": 1e-3, "chunk": 1281}
    x, weight = (round_to(a, "bf16") for a in (rng.standard_normal((n, c)), rng.standard_normal((v, c)) / c**0.5))
    return [(x, "bf16"), (weight, "bf16"), (targets, "i32")], attrs


def _error(rng: np.random.Generator, inputs: Sequence[np.ndarray], attrs: dict[str, object],
           outs: Sequence[np.ndarray]) -> tuple[float, int]:
    """All elements, by float64. A power errs by the shares of its logit, which fp32 sums, and of its exponent, which fp16 keeps; in
    products also by its own in bf16, and by that of x times s. Without gradients bf16 keeps logits. What fp32 sums errs by growth."""
    x, weight, targets = (np.asarray(a, np.int64 if a.dtype.kind in "iu" else np.float64) for a in inputs)
    ignore, z = int(attrs["ignore_index"]), float(attrs["z_loss"])  # type: ignore[call-overload, arg-type]
    counts, at = targets != ignore, (np.arange(len(targets)), np.where(targets == ignore, 0, targets))
    logits = x @ weight.T
    top = logits.max(1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(1, keepdims=True))
    p = np.exp(logits - lse) * counts[:, None] * (1 + 2 * z * lse)
    u, narrow, half = UNIT_ROUNDOFF["f32"], UNIT_ROUNDOFF["bf16"], UNIT_ROUNDOFF["f16"]
    least = np.sqrt(np.square(x).sum(1, keepdims=True)) * np.sqrt(np.square(weight).sum(1))
    e = 2 * growth(x.shape[1]) * u * least
    kept = narrow * np.abs(logits) if len(outs) == 1 else half * np.abs(logits - logits[at][:, None])
    off = np.abs(p) * (e + kept + 20 * u)
    losses = counts * ((lse - logits[at][:, None]) + z * lse**2)[:, 0]
    off_losses = (off.sum(1) + counts * (e + kept * (len(outs) == 1))[at]) * (1 + 2 * z * np.abs(lse[:, 0]))
    want = [np.array(losses.sum())]
    allowed = [np.array(off_losses.sum() + (growth(len(x)) + 20) * u * np.abs(losses).sum())]
    if len(outs) > 1:
        g = p.copy()
        g[at] -= counts
        off += 2 * narrow * np.abs(p)
        off[at] += counts * 20 * u
        want += [g @ weight, g.T @ x]
        allowed += [(off + growth(len(weight)) * u * np.abs(g)) @ np.abs(weight), (off + growth(len(x)) * u * np.abs(g)).T @ np.abs(x)]
        allowed[1] = allowed[1] + narrow * np.abs(want[1])
    with np.errstate(divide="ignore", invalid="ignore"):  # rows that do not count have 0, and nothing is allowed them
        worst = [np.where(got == y, 0.0, np.abs(got - y) / a).max() for got, y, a in zip(outs, want, allowed, strict=True)]
    return float(np.max(worst)), sum(y.size for y in want)


LARGE = {"parts": Large(_draw_parts, _error), "astray": Large(_draw_astray, _not_finite),
         "above": Large(partial(_draw_overflow, 1.0), _not_finite),
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
