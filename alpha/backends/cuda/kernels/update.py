"""The optimizer's step on the GPU over flat fp32 state: norm, clip, learning rate and step counter in one row, AdamW in another
(kernels/optimizer).

Segments are (offset, length[, decay, lr scale]) in elements, as in alpha/ops/{global_norm,adamw}.py; what lies between them is
never touched. Buffers 16-byte aligned; segments that start at multiples of 4 elements run vectorised. Everything that the host
would decide (finite or not, the clip coefficient, the rate, the step count) stays on the device.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Calls, bf16, f32, i32, plain
from alpha.backends.cuda.cubins_of import cubins_of
from alpha.backends.cuda.launches import Operation, addresses, kernel, launch, limit, require, structure
from alpha.backends.cuda.lib import SM90A, Gpu, Operand, Parts, in_place
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.memory import aligned
from alpha.ops.spec import Sample
from alpha.types import Attrs, Table, TensorType

BLOCK = 65536  # of the norm: as in alpha/ops/global_norm.py
CORRECTIONS_BYTES = 8  # of the biases of both moments
PARTS = 8  # runs of a block that are summed apart (kernels/optimizer/global_norm.cu)
CHUNK = 8192  # most elements of an AdamW chunk; elements are independent, so it decides no bits
CHUNK_PARTS = 8  # CTAs for one (kernels/optimizer/adamw.cu)
MOST_BLOCKS = 232_448 // 4 - 64

NORM_ENTRY = np.dtype([("start", "<i8"), ("length", "<i4"), ("padding", "<i4")])
ADAMW_ENTRY = np.dtype([("start", "<i8"), ("length", "<i4"), ("decay", "<f4"), ("lr_scale", "<f4"), ("padding", "<i4")])


def _cut(offset: int, length: int, most: int) -> Iterable[tuple[int, int]]:
    return ((at, min(most, offset + length - at)) for at in range(offset, offset + length, most))


def norm_table(segments: Iterable[tuple[int, int]]) -> np.ndarray:
    """The blocks of the norm, in order: each segment cut from its own start into runs of 65,536."""
    return np.array([(s, n, 0) for offset, length in segments for s, n in _cut(offset, length, BLOCK)], NORM_ENTRY)


def adamw_table(segments: Iterable[tuple[int, int, float, float]]) -> np.ndarray:
    """The chunks of AdamW from (offset, length, decay, lr scale)."""
    entries = [(s, n, d, r, 0) for offset, length, d, r in segments for s, n in _cut(offset, length, CHUNK)]
    return np.array(entries, ADAMW_ENTRY)


def global_norm(blocks: int, *, grads: int, table: int, parts: int) -> Operation:
    """Sums of squares: parts[blocks][8] fp32. `table`: norm_table(...) on the device. `step` adds them and takes the root."""
    require("the global norm", [(1 <= blocks <= MOST_BLOCKS, f"{blocks} blocks", f"1 to {MOST_BLOCKS} (3.8 billion elements)")])
    addresses("global norm", grads=grads, table=table, parts=parts)
    of = kernel("optimizer/global_norm.cu", "global_norm", {})
    run = launch(of, blocks * PARTS, 256, *(ctypes.c_uint64(word) for word in (grads, table, parts)))
    return Operation(f"global norm of {blocks} blocks", (run,), blocks * BLOCK * 4)


_Step = structure(
    "_Step",
    "parts loss count step rates norm mean_norm coefficient finite lr used next",
    ("blocks", ctypes.c_int32),
    ("last", ctypes.c_int32),
    ("max_norm", ctypes.c_float),
    ("padding", ctypes.c_int32),
)


def step(
    blocks: int,
    *,
    max_norm: float,
    rates: int,
    entries: int,
    parts: int,
    loss: int,
    count: int,
    step: int,
    norm: int,
    mean_norm: int,
    coefficient: int,
    finite: int,
    lr: int,
    used: int,
    next: int,
) -> Operation:
    """All scalars of an update in one launch. Reads parts, loss and count (fp32), step (i32), one entry of `rates` (fp32, `entries` of
    them: the last one for every step past it). Writes norm, mean_norm, coefficient, lr (fp32), finite (i32), `used` = step (what AdamW
    takes) and `next` = step + finite; `next` may be `step` itself. `max_norm`: of the clip, 0 for none."""
    require(
        f"the scalars of a step: max_norm {max_norm}, {entries} rates",
        [
            (0 <= blocks <= MOST_BLOCKS, f"{blocks} blocks", f"0 to {MOST_BLOCKS}"),
            (max_norm >= 0, f"max_norm {max_norm}", "at least 0"),
            (1 <= entries < 2**31, f"{entries} rates", "1 to 2^31 - 1"),
        ],
    )
    addresses("step", parts=parts)
    words = [loss, count, step, rates, norm, mean_norm, coefficient, finite, lr, used, next]
    addresses("step", 4, **{f"scalar{i}": word for i, word in enumerate(words)})
    arguments = _Step(parts, *words, blocks, entries - 1, max_norm, 0)
    of = kernel("optimizer/step.cu", "step", {}, shared_bytes=4 * max(1, blocks))
    return Operation(f"step scalars of {blocks} blocks", (launch(of, 1, 1024, arguments),), 32 * blocks + 44)


@dataclass(frozen=True, kw_only=True)
class AdamwProblem:
    """What is computed. `elements`: in all chunks. `copy`: whether there is a bf16 copy of the parameters, rounded to nearest even."""

    chunks: int
    elements: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    copy: bool = True


_Adamw = structure(
    "_Adamw",
    "param grad m v copy chunks coefficient lr corrections finite",
    *((name, ctypes.c_float) for name in ("keep1", "take1", "keep2", "take2", "eps", "weight_decay")),
    ("count", ctypes.c_int32),
)


def adamw_step(
    problem: AdamwProblem,
    *,
    table: int,
    param: int,
    grad: int,
    m: int,
    v: int,
    coefficient: int,
    lr: int,
    step: int,
    finite: int,
    corrections: int,
    copy: int = 0,
    blocks: int = 0,
) -> Operation:
    """Updates param, m, v (fp32) and the bf16 copy in place. coefficient, lr (fp32), step, finite (i32) lie on the device. `corrections`:
    8 bytes for those of the biases."""
    p = problem
    require(
        f"AdamW: {p}",
        [
            (1 <= p.chunks < 2**31 // CHUNK_PARTS, f"{p.chunks} chunks", "1 (a buffer without segments needs no launch) to 2^28 - 1"),
            (0 <= p.beta1 < 1 and 0 <= p.beta2 < 1, f"betas {p.beta1}, {p.beta2}", "in [0, 1)"),
        ],
    )
    addresses("AdamW", table=table, param=param, grad=grad, m=m, v=v)
    addresses("AdamW", 4, coefficient=coefficient, lr=lr, step=step, finite=finite, corrections=corrections)
    if p.copy:
        addresses("AdamW", copy=copy)
    arguments = _Adamw(
        param, grad, m, v, copy, table, coefficient, lr, corrections, finite,
        p.beta1, 1 - p.beta1, p.beta2, 1 - p.beta2, p.eps, p.weight_decay, p.chunks,
    )  # fmt: skip
    grid = limit(CHUNK_PARTS * p.chunks, blocks)
    defines = {"ADAMW_COPY": int(p.copy)}
    logs = (ctypes.c_double(math.log(b) if b else -math.inf) for b in (p.beta1, p.beta2))
    first = launch(kernel("optimizer/adamw.cu", "adamw_corrections", defines), 1, 1, ctypes.c_uint64(step), *logs,
                   ctypes.c_uint64(corrections))
    run = launch(kernel("optimizer/adamw.cu", "adamw", defines), grid, 256, arguments)
    return Operation(f"AdamW of {p.elements} elements", (first, run), p.elements * (30 if p.copy else 28))


def _rates(attrs: Attrs) -> Table:
    table = attrs["rates"]
    assert isinstance(table, Table)
    return table


def _blocks(attrs: Attrs) -> int:
    return len(norm_table(attrs["segments"]))  # type: ignore[arg-type]


def update_scalars(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """norm, mean norm, clip coefficient, finite flag, learning rate, the step that was and the next: two launches."""
    grad, count, loss, old = (o.address for o in ins)
    norm, mean_norm, coefficient, finite, lr, used, following = (o.address for o in outs)
    blocks = _blocks(attrs)
    parts = gpu.scratch(4 * PARTS * max(1, blocks)).address
    rates = _rates(attrs)
    uploaded = gpu.constant(("learning rates", rates), rates.array).address
    scalars = step(blocks, max_norm=float(attrs["max_norm"]), rates=uploaded, entries=len(rates), parts=parts,  # type: ignore[arg-type]
                   loss=loss, count=count, step=old, norm=norm, mean_norm=mean_norm, coefficient=coefficient, finite=finite, lr=lr,
                   used=used, next=following)
    if not blocks:
        return Parts(("grad_clip", scalars))
    table = gpu.constant(("norm table", attrs["segments"]), lambda: norm_table(attrs["segments"])).address  # type: ignore[arg-type]
    return Parts(("grad_norm", global_norm(blocks, grads=grad, table=table, parts=parts)), ("grad_clip", scalars))


def adamw(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """param, m, v and the bf16 copy, in place."""
    param, grad, m, v, coefficient, lr, count, finite, *narrow = ins
    segments = tuple(s for s in attrs["segments"] if s[1])  # type: ignore[union-attr, attr-defined]
    pairs = list(zip(outs, (param, m, v, *narrow)))
    corrections = gpu.scratch(CORRECTIONS_BYTES).address  # also of a rank whose cut has no element: its plan has them
    chunks = adamw_table(segments)
    if not len(chunks):
        return in_place(pairs, lambda stream: None)
    table = gpu.constant(("adamw table", segments), lambda: chunks).address
    problem = AdamwProblem(chunks=len(chunks), elements=sum(s[1] for s in segments), beta1=float(attrs["beta1"]),  # type: ignore[arg-type]
                           beta2=float(attrs["beta2"]), eps=float(attrs["eps"]),  # type: ignore[arg-type]
                           weight_decay=float(attrs["weight_decay"]), copy=bool(narrow))  # type: ignore[arg-type]
    return in_place(pairs, adamw_step(
        problem, table=table, param=outs[0].address, grad=grad.address, m=outs[1].address, v=outs[2].address, step=count.address,
        coefficient=coefficient.address, lr=lr.address, finite=finite.address, copy=outs[3].address if narrow else 0, blocks=gpu.blocks,
        corrections=corrections))


def scratch(types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    """Bytes of the sums of squares."""
    return aligned(4 * PARTS * max(1, _blocks(attrs)))


def _scalars_samples(rng: np.random.Generator) -> Iterable[Sample]:
    """No segments, no token that counts, and blocks that begin off a 16-byte boundary."""
    rates = Table.of(10.0 ** rng.uniform(-6, -2, 7))
    apart = ((2, 8192), (8197, 70_000))
    for name, n, segments, count, size in (("no-blocks", 16, (), 2048.0, 1.0), ("no-tokens", 80, ((0, 80),), 0.0, 1.0),
                                           ("apart", 78_200, apart, 300.0, 0.1)):
        yield Sample(name=f"gpu-{name}", attrs={"segments": segments, "max_norm": 1.0, "rates": rates},
                     inputs=(rng.standard_normal(n) * size, np.array(count), np.array(7.25), np.array(3, np.int32)))


def _scalars_exactly(rng: np.random.Generator) -> Iterable[Sample]:
    """A norm that is not finite, beside a loss that is."""
    yield Sample(name="gpu-norm-not-finite", attrs={"segments": ((0, 1), (2, 2)), "max_norm": 0.0, "rates": Table.of(rng.random(24))},
                 inputs=(np.array([3.0, 0.0, np.inf, 1.0]), np.array(4.0), np.array(2.0), np.array(3, np.int32)))


def _adamw_samples(rng: np.random.Generator) -> Iterable[Sample]:
    """Segments that begin off a 16-byte boundary."""
    n, segments = 9000, ((1, 70, 1.0, 1.0), (75, 8, 0.0, 0.5), (90, 8900, 1.0, 1.0))
    for name, more in (("apart", ()), ("apart-copy", (rng.standard_normal(n),))):
        yield Sample(name=f"gpu-{name}", attrs={"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "segments": segments},
                     inputs=(rng.standard_normal(n), rng.standard_normal(n), rng.standard_normal(n) * 0.3, rng.random(n) * 0.5,
                             np.array(0.5), np.array(1e-2), np.array(4, np.int32), np.array(1, np.int32), *more))


_FLAT, _SCALAR, _INTEGER = TensorType((64,), "f32"), TensorType((), "f32"), TensorType((), "i32")
_RULE = {"segments": ((0, 64),), "max_norm": 1.0, "rates": Table.of([1.0, 0.5])}
_ADAMW: dict[str, Any] = {"segments": ((0, 64, 1.0, 1.0),), "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_LONG = 1 << 27
_TIMED_SCALARS = plain(f32(_LONG), f32(), f32(), i32(), below=9, max_norm=1.0, rates=Table.of([1e-3] * 101), segments=((0, _LONG),))
_TIMED_ADAMW = plain(*[f32(_LONG)] * 4, f32(), f32(), i32(), i32(), bf16(_LONG), below=2, least=1,  # a step that is not finite does nothing
                     **{**_ADAMW, "segments": ((0, _LONG, 1.0, 1.0),)})

KERNELS = (
    Component(
        id="update_scalars.f32.sm90", kind="kernel", backend="cuda", op="update_scalars", implementation=update_scalars, requires=SM90A,
        scratch=scratch, inplace=((6, 3),), calls=Calls(further=_scalars_samples, exactly=_scalars_exactly, timed=(_TIMED_SCALARS,)),
        binaries=Binaries(cubins_of("update_scalars", update_scalars, lambda: [([_FLAT, _SCALAR, _SCALAR, _INTEGER], _RULE)])),
        envelope=Envelope(limits=(
            Limit(text="at most 3.8 billion elements", holds=lambda types, attrs: _blocks(attrs) <= MOST_BLOCKS),)),
    ),
    Component(
        id="adamw.f32.sm90", kind="kernel", backend="cuda", op="adamw", implementation=adamw, requires=SM90A,
        scratch=lambda types, attrs, multiprocessors: aligned(CORRECTIONS_BYTES),
        inplace=((0, 0), (1, 2), (2, 3), (3, 8)), calls=Calls(further=_adamw_samples, timed=(_TIMED_ADAMW,)), budgeted=True,
        binaries=Binaries(cubins_of("adamw", adamw, lambda: [
            ([_FLAT] * 4 + [_SCALAR] * 2 + [_INTEGER] * 2 + more, _ADAMW) for more in ([], [TensorType((64,), "bf16")])])),
        envelope=Envelope(dtypes=("f32", "bf16"), limits=(
            Limit(text="fp32 state", holds=lambda types, attrs: all(t.dtype == "f32" for t in types[:6])),
            Limit(text="elements", holds=lambda types, attrs: types[0].size > 0),)),
    ),
)
