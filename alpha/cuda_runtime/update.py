"""The optimizer's step over flat fp32 state (kernels/optimizer): global norm, the scalars of the step, AdamW.

    blocks = norm_table(segments); chunks = adamw_table(parameter_segments)      # NumPy arrays: upload them once
    global_norm(len(blocks), grads=grads, table=blocks_address, parts=parts)(stream)
    step(len(blocks), max_norm=1.0, rates=rates_address, entries=101, parts=parts, loss=..., ...)(stream)
    adamw(AdamwProblem(chunks=len(chunks), elements=n, ...), table=chunks_address, param=..., ...)(stream)

Segments are (offset, length[, decay, lr scale]) in elements, as in alpha/ops/{global_norm,adamw}.py; what lies between them is
never touched. Buffers 16-byte aligned; segments that start at multiples of 4 elements run vectorised. Everything that the host
would decide (finite or not, the clip coefficient, the rate, the step count) stays on the device.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from alpha.cuda_runtime.bandwidth import Operation, addresses, kernel, launch, limit, require, structure

BLOCK = 65536  # of the norm: as in alpha/ops/global_norm.py
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
    """What is computed. `elements`: in all chunks. `copy`: the bf16 copy of the parameters: none, rounded to nearest even, or
    stochastically by the Philox words of (`seed`, `purpose`) at (element // 4, step)."""

    chunks: int
    elements: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    copy: Literal["none", "nearest", "stochastic"] = "nearest"
    seed: int = 0
    purpose: int = 0


_Adamw = structure(
    "_Adamw",
    "param grad m v copy chunks coefficient lr step finite",
    ("log1", ctypes.c_double),
    ("log2", ctypes.c_double),
    *((name, ctypes.c_float) for name in ("keep1", "take1", "keep2", "take2", "eps", "weight_decay")),
    ("count", ctypes.c_int32),
    ("seed", ctypes.c_uint32),
    ("purpose", ctypes.c_uint32),
)


def adamw(
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
    copy: int = 0,
    blocks: int = 0,
) -> Operation:
    """Updates param, m, v (fp32) and the bf16 copy in place. coefficient, lr (fp32), step, finite (i32) lie on the device."""
    p = problem
    require(
        f"AdamW: {p}",
        [
            (1 <= p.chunks < 2**31 // CHUNK_PARTS, f"{p.chunks} chunks", "1 (a buffer without segments needs no launch) to 2^28 - 1"),
            (0 <= p.beta1 < 1 and 0 <= p.beta2 < 1, f"betas {p.beta1}, {p.beta2}", "in [0, 1)"),
            (0 <= p.seed < 2**32 and 0 <= p.purpose < 2**32, f"key {p.seed}, {p.purpose}", "two 32-bit numbers"),
        ],
    )
    addresses("AdamW", table=table, param=param, grad=grad, m=m, v=v)
    addresses("AdamW", 4, coefficient=coefficient, lr=lr, step=step, finite=finite)
    if p.copy != "none":
        addresses("AdamW", copy=copy)
    code = {"none": 0, "nearest": 1, "stochastic": 2}[p.copy]
    arguments = _Adamw(
        param, grad, m, v, copy, table, coefficient, lr, step, finite,
        *(math.log(b) if b else -math.inf for b in (p.beta1, p.beta2)),
        p.beta1, 1 - p.beta1, p.beta2, 1 - p.beta2, p.eps, p.weight_decay, p.chunks, p.seed, p.purpose,
    )  # fmt: skip
    grid = limit(CHUNK_PARTS * p.chunks, blocks)
    run = launch(kernel("optimizer/adamw.cu", "adamw", {"ADAMW_COPY": code}), grid, 256, arguments)
    return Operation(f"AdamW of {p.elements} elements", (run,), p.elements * (30 if code else 28))
