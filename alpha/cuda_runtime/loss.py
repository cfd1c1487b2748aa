"""Softmax cross entropy over rows of logits, and the sum over rows (kernels/loss).

    problem = LossProblem(rows=16384, vocabulary=50257, stride=50304)
    cross_entropy(problem, "fused", logits=logits, targets=targets, loss=loss, lse=lse, dloss=scale)(stream)
    total(16384, loss=loss, targets=targets, out=sums, ignore=-1, add=False)(stream)

"fused" overwrites the logits with their gradients; "loss" only reads them; "gradient" overwrites them given lse. Envelope: any
vocabulary up to 131,072 (bf16) or 65,536 (fp32); stride (elements between rows) a multiple of 16 bytes, at least the vocabulary.
What lies between a row's end and its stride is neither read into a result nor written. dloss: one fp32, or one per row.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

from alpha.cuda_runtime.bandwidth import (
    MULTIPROCESSORS,
    SIZE,
    Dtype,
    Operation,
    addresses,
    ceil_div,
    kernel,
    launch,
    limit,
    per,
    require,
    structure,
)

Mode = Literal["loss", "fused", "gradient"]
_MODE = {"loss": 0, "fused": 1, "gradient": 2}
SHARED_LIMIT = 232_448
SHARED_OF_SM = 233_472
RESERVED = 1024  # shared memory that the system takes from each CTA


@dataclass(frozen=True, kw_only=True)
class LossProblem:
    """What is computed. `stride` 0: the vocabulary. `per_row`: dloss has one entry per row instead of one."""

    rows: int
    vocabulary: int
    stride: int = 0
    dtype: Dtype = "bf16"
    ignore: int = -1
    z_loss: float = 0.0
    per_row: bool = False

    def check(self) -> None:
        """ShapeError naming the limit that this problem breaks."""
        n, stride = per(self.dtype), self.stride or self.vocabulary
        most = 131_072 * 2 // SIZE[self.dtype]
        require(
            f"the cross entropy kernels: {self}",
            [
                (1 <= self.rows < 2**31, f"{self.rows} rows", "1 to 2^31 - 1"),
                (1 <= self.vocabulary <= most, f"vocabulary {self.vocabulary}", f"1 to {most} for {self.dtype}"),
                (stride >= self.vocabulary and stride % n == 0, f"stride {stride}", f"a multiple of {n}, at least the vocabulary"),
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
    vectors = ceil_div(problem.vocabulary, per(problem.dtype))
    lanes = 128 if vectors <= 1024 else 256 if vectors <= 3072 else 512 if vectors <= 512 * 13 else 1024
    if mode == "loss":
        threads = max(128, lanes // 4)
        return LossConfig(threads=threads, lanes=lanes, blocks=1280 // threads)
    if mode == "gradient":
        return LossConfig(threads=lanes, blocks=1024 // lanes)
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
    loss: int = 0,
    dloss: int = 0,
    config: LossConfig | None = None,
    blocks: int = 0,
) -> Operation:
    """See the module's text. `loss`, `lse`: fp32 [rows]; `targets`: i32 [rows]."""
    problem.check()
    c = config or choose(problem, mode)
    name = f"cross entropy {mode}"
    addresses(name, logits=logits)
    addresses(name, 4, targets=targets, lse=lse)
    if mode != "gradient":
        addresses(name, 4, loss=loss)
    if mode != "loss":
        addresses(name, 4, dloss=dloss)
    defines: dict[str, object] = {"LOSS_F32": int(problem.dtype == "f32"), "LOSS_MODE": _MODE[mode], "LOSS_THREADS": c.threads}
    defines["LOSS_LANES"] = c.lanes or c.threads
    defines |= {"LOSS_SHARED": c.shared, "LOSS_REGISTERS": c.registers, "LOSS_BLOCKS": c.blocks}
    stride = problem.stride or problem.vocabulary
    grid = limit(problem.rows if mode == "gradient" else min(problem.rows, MULTIPROCESSORS * c.blocks), blocks)
    arguments = _Loss(
        logits, targets, loss, lse, dloss, stride,
        problem.rows, problem.vocabulary, problem.ignore, int(problem.per_row), problem.z_loss,
    )  # fmt: skip
    of = kernel("loss/cross_entropy.cu", "cross_entropy", defines, shared_bytes=16 * c.threads * c.shared)
    logits_bytes = problem.rows * problem.vocabulary * SIZE[problem.dtype]
    run = launch(of, grid, c.threads, arguments)
    return Operation(f"{name} {problem}", (run,), logits_bytes * (1 if mode == "loss" else 2) + 12 * problem.rows)


def total(rows: int, *, loss: int, targets: int, out: int, ignore: int = -1, add: bool = False) -> Operation:
    """out[0] = sum of loss[rows], out[1] = number of targets other than `ignore`, both fp32; with `add`, added to what is there."""
    require("the sum of losses", [(1 <= rows < 2**31 - 1024, f"{rows} rows", "1 to 2^31 - 1025")])
    addresses("sum of losses", 4, loss=loss, targets=targets, out=out)
    of = kernel("loss/total.cu", "loss_total", {"TOTAL_ADD": int(add)})
    values = [ctypes.c_uint64(word) for word in (loss, targets, out)]
    run = launch(of, 1, 1024, *values, ctypes.c_int32(rows), ctypes.c_int32(ignore))
    return Operation(f"sum of {rows} losses", (run,), 8 * rows + 8)
