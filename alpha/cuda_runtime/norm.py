"""RMSNorm and LayerNorm over the last axis, forward and backward (kernels/norm).

    problem = NormProblem(rows=16384, width=4096, kind="rms", dtype="bf16", add=True, eps=1e-5)
    forward(problem, x=a, b=b, s=s, y=y, gamma=gamma, rstd=rstd)(stream)            # s = a + b, y = rmsnorm(s)
    backward(problem, dy=dy, x=s, gamma=gamma, rstd=rstd, residual=ds, dx=dx, dgamma=dgamma, partial=partial)(stream)

Tensors [rows, width] without gaps, bf16 or fp32; gamma and beta in the same type; mean and rstd fp32 [rows]; `partial`:
`problem.partial_bytes()` of scratch. Envelope: width a multiple of 8, 8..8192; rows 1..2^30, rows * width < 2^40.
dgamma and dbeta leave as bf16, fp32, or fp32 added to what is there. dx may lie on dy or on residual.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

from alpha.cuda_runtime.bandwidth import (
    MULTIPROCESSORS,
    REGISTER_FILE,
    SIZE,
    Dtype,
    Operation,
    Output,
    addresses,
    ceil_div,
    kernel,
    launch,
    limit,
    per,
    require,
    structure,
)
from alpha.cuda_runtime.elementwise import finish_columns

RING = 224 * 1024  # most shared memory of the backward pass, in bytes; a multiprocessor has 227 KiB


@dataclass(frozen=True, kw_only=True)
class NormProblem:
    """What is computed. `add`: forward of a sum a + b that is written too; backward with a residual gradient added to dx."""

    rows: int
    width: int
    kind: Literal["rms", "layer"] = "rms"
    dtype: Dtype = "bf16"
    add: bool = False
    eps: float = 1e-5

    def check(self) -> None:
        """ShapeError naming the limit that this problem breaks."""
        require(
            f"the norm kernels: {self}",
            [
                (1 <= self.rows <= 2**30, f"{self.rows} rows", "1 to 2^30"),  # a row and a stride of the grid are added in 32 bits
                (8 <= self.width <= 8192 and self.width % 8 == 0, f"width {self.width}", "a multiple of 8, 8 to 8192"),
                (self.rows * self.width < 2**40, f"{self.rows} x {self.width}", "fewer than 2^40 elements"),
                (self.eps >= 0, f"eps {self.eps}", "at least 0"),
            ],
        )

    @property
    def vectors(self) -> int:
        """Vectors of 16 bytes of a row."""
        return self.width // per(self.dtype)

    @property
    def parts(self) -> int:
        """Sums of parameter gradients that are written apart and added by a second pass: fixed by the problem, since it decides bits."""
        config = choose_backward(self)
        return max(1, min(MULTIPROCESSORS * config.blocks, ceil_div(self.rows, 4 * config.teams)))

    def partial_bytes(self) -> int:
        """Scratch memory of the backward pass."""
        return (2 if self.kind == "layer" else 1) * self.parts * self.width * 4

    def defines(self) -> dict[str, object]:
        return {"NORM_LAYER": int(self.kind == "layer"), "NORM_F32": int(self.dtype == "f32"), "NORM_ADD": int(self.add)}


@dataclass(frozen=True, kw_only=True)
class NormForward:
    """How the forward pass is computed: threads that share a row, 16-byte vectors each, rows (teams) per CTA, whether the next
    row is loaded ahead (then `blocks` CTAs per multiprocessor walk over the rows), CTAs per multiprocessor (register cap)."""

    threads: int
    vectors: int
    teams: int
    ahead: bool = False
    blocks: int = 1


@dataclass(frozen=True, kw_only=True)
class NormBackward:
    """How the backward pass is computed: threads of a team, which share a row, 16-byte vectors each, teams per CTA (they decide bits of
    the parameter gradients), rows of a team on their way, CTAs per multiprocessor."""

    threads: int
    vectors: int
    teams: int
    depth: int
    blocks: int = 1


def choose_forward(problem: NormProblem) -> NormForward:
    """A warp per row up to 128 vectors, else a CTA per row; at most 4 vectors a thread."""
    wide = problem.kind == "layer" or problem.add
    if problem.vectors <= 128:
        vectors = ceil_div(problem.vectors, 32)
        return NormForward(threads=32, vectors=vectors, teams=8, blocks=(3 if vectors == 4 else 4) if wide else 5)
    threads = 32 * ceil_div(problem.vectors, 128)
    blocks = max(1, REGISTER_FILE // (threads * (80 if wide else 56)))
    return NormForward(threads=threads, vectors=ceil_div(problem.vectors, threads), teams=1, blocks=min(blocks, 24))


def choose_backward(problem: NormProblem) -> NormBackward:
    """Few vectors a thread (measured: 1 up to 256 vectors a row, 2 up to 1,024), about 512 threads a multiprocessor, in two CTAs where
    rows are short, and four to six rows of a team on their way as far as shared memory holds them."""
    vectors = 1 if problem.vectors <= 256 else 2 if problem.vectors <= 1024 else 4
    threads = 32 * ceil_div(problem.vectors, 32 * vectors)
    blocks, total, most = (2, 384, 6) if problem.vectors <= 128 else (1, 512, 4)
    teams = max(1, total // threads)
    row = 16 * threads * vectors * (3 if problem.add else 2)
    return NormBackward(
        threads=threads, vectors=vectors, teams=teams, depth=min(most, RING // blocks // (row * teams)), blocks=blocks
    )


_Forward = structure(
    "_Forward",
    "a b s y gamma beta mean rstd",
    ("rows", ctypes.c_int32),
    ("width", ctypes.c_int32),
    ("eps", ctypes.c_float),
    ("inverse_width", ctypes.c_float),
)
_Backward = structure(
    "_Backward",
    "dy x gamma mean rstd residual dx partial",
    *((name, ctypes.c_int32) for name in ("rows", "width", "parts")),
    ("inverse_width", ctypes.c_float),
)


def forward(
    problem: NormProblem,
    *,
    x: int,
    y: int,
    gamma: int,
    rstd: int,
    beta: int = 0,
    mean: int = 0,
    b: int = 0,
    s: int = 0,
    config: NormForward | None = None,
    blocks: int = 0,
) -> Operation:
    """y, rstd (and mean) of x; with `add`, of s = x + b, which is written too. `blocks`: most CTAs."""
    problem.check()
    c = config or choose_forward(problem)
    addresses("norm forward", x=x, y=y, gamma=gamma)
    addresses("norm forward", 4, rstd=rstd)
    if problem.kind == "layer":
        addresses("norm forward", beta=beta)
        addresses("norm forward", 4, mean=mean)
    if problem.add:
        addresses("norm forward", b=b, s=s)
    defines = problem.defines() | {"NORM_THREADS": c.threads, "NORM_VECTORS": c.vectors, "NORM_TEAMS": c.teams}
    defines |= {"NORM_AHEAD": int(c.ahead), "NORM_BLOCKS": c.blocks}
    grid = ceil_div(problem.rows, c.teams)
    grid = min(grid, MULTIPROCESSORS * c.blocks) if c.ahead else grid
    arguments = _Forward(x, b, s, y, gamma, beta, mean, rstd, problem.rows, problem.width, problem.eps, 1.0 / problem.width)
    run = launch(kernel("norm/forward.cu", "norm_forward", defines), limit(grid, blocks), c.threads * c.teams, arguments)
    layer = problem.kind == "layer"
    tensor, statistics = problem.rows * problem.width * SIZE[problem.dtype], 4 * problem.rows * (2 if layer else 1)
    return Operation(f"norm forward {problem}", (run,), tensor * (4 if problem.add else 2) + statistics)


def backward(
    problem: NormProblem,
    *,
    dy: int,
    x: int,
    gamma: int,
    rstd: int,
    dx: int,
    dgamma: int,
    partial: int,
    mean: int = 0,
    dbeta: int = 0,
    residual: int = 0,
    out: Output = "f32",
    config: NormBackward | None = None,
    blocks: int = 0,
) -> Operation:
    """dx (plus `residual` with `add`), dgamma and, for "layer", dbeta, in two launches. `blocks`: most CTAs of the first; it changes no
    bit, while a `config` with other teams than the chosen one does."""
    problem.check()
    c = config or choose_backward(problem)
    layer = problem.kind == "layer"
    addresses("norm backward", dy=dy, x=x, gamma=gamma, dx=dx, partial=partial)
    addresses("norm backward", 4, rstd=rstd, dgamma=dgamma)
    if layer:
        addresses("norm backward", 4, mean=mean, dbeta=dbeta)
    if problem.add:
        addresses("norm backward", residual=residual)
    defines = problem.defines() | {"NORM_THREADS": c.threads, "NORM_VECTORS": c.vectors, "NORM_TEAMS": c.teams}
    defines |= {"NORM_DEPTH": c.depth, "NORM_BLOCKS": c.blocks}
    parts = problem.parts
    arguments = _Backward(
        dy, x, gamma, mean, rstd, residual, dx, partial,
        problem.rows, problem.width, parts, 1.0 / problem.width,
    )  # fmt: skip
    ring = 16 * c.threads * c.teams * c.vectors * c.depth * (3 if problem.add else 2)
    of = kernel("norm/backward.cu", "norm_backward", defines, shared_bytes=ring)
    run = launch(of, limit(parts, blocks), c.threads * c.teams, arguments)
    finish = finish_columns(partial, parts, problem.width, (dgamma, dbeta) if layer else (dgamma,), out)
    tensor, statistics = problem.rows * problem.width * SIZE[problem.dtype], 4 * problem.rows * (2 if layer else 1)
    return Operation(f"norm backward {problem}", (run, finish), tensor * (4 if problem.add else 3) + statistics)
