"""RMSNorm and LayerNorm over the last axis on the GPU, forward and backward, with the residual stream's addition (kernels/norm).

Tensors [rows, width] without gaps, bf16; gamma and beta too; mean and rstd fp32 [rows]; gradients of parameters fp32. dx may lie on dy or
on residual. Envelope: width a multiple of 8, 8 to 8192; rows 1 to 2^30, rows * width < 2^40.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import numpy as np

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Call, Calls, bf16, f32, plain
from alpha.backends.cuda.cubins_of import Signature, cubins_of
from alpha.backends.cuda.kernels.elementwise import finish_columns
from alpha.backends.cuda.launches import (
    MULTIPROCESSORS,
    PER_VECTOR,
    REGISTER_FILE,
    Operation,
    addresses,
    ceil_div,
    kernel,
    launch,
    limit,
    require,
    structure,
)
from alpha.backends.cuda.lib import SM90A, Gpu, Operand
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.memory import aligned
from alpha.ops.spec import Sample
from alpha.ops.table import row
from alpha.types import Attrs, TensorType

WIDEST = 8192
RING = 224 * 1024  # most shared memory of the backward pass, in bytes; a multiprocessor has 227 KiB


@dataclass(frozen=True, kw_only=True)
class NormProblem:
    """What is computed. `add`: forward of a sum a + b that is written too; backward with a residual gradient added to dx."""

    rows: int
    width: int
    kind: Literal["rms", "layer"] = "rms"
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
        return self.width // PER_VECTOR

    @property
    def parts(self) -> int:
        """Sums of parameter gradients that are written apart and added by a second pass: fixed by the problem, since it decides bits."""
        config = choose_backward(self)
        return max(1, min(MULTIPROCESSORS * config.blocks, ceil_div(self.rows, 4 * config.teams)))

    def partial_bytes(self) -> int:
        """Scratch memory of the backward pass."""
        return (2 if self.kind == "layer" else 1) * self.parts * self.width * 4

    def defines(self) -> dict[str, object]:
        return {"NORM_LAYER": int(self.kind == "layer"), "NORM_ADD": int(self.add)}


@dataclass(frozen=True, kw_only=True)
class NormForward:
    """How the forward pass is computed: threads that share a row, 16-byte vectors each, rows (teams) per CTA, CTAs per multiprocessor
    (register cap)."""

    threads: int
    vectors: int
    teams: int
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
    defines = problem.defines() | {"NORM_THREADS": c.threads, "NORM_VECTORS": c.vectors, "NORM_TEAMS": c.teams, "NORM_BLOCKS": c.blocks}
    grid = ceil_div(problem.rows, c.teams)
    arguments = _Forward(x, b, s, y, gamma, beta, mean, rstd, problem.rows, problem.width, problem.eps, 1.0 / problem.width)
    run = launch(kernel("norm/forward.cu", "norm_forward", defines), limit(grid, blocks), c.threads * c.teams, arguments)
    layer = problem.kind == "layer"
    tensor, statistics = problem.rows * problem.width * 2, 4 * problem.rows * (2 if layer else 1)
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
    finish = finish_columns(partial, parts, problem.width, (dgamma, dbeta) if layer else (dgamma,), "f32")
    tensor, statistics = problem.rows * problem.width * 2, 4 * problem.rows * (2 if layer else 1)
    return Operation(f"norm backward {problem}", (run, finish), tensor * (4 if problem.add else 3) + statistics)


# Binders --------------------------------------------------------------------------------------------------------------------------------


def problem_of(kind: str, add: bool, x: TensorType, eps: float = 0.0) -> NormProblem:
    """Rows of the last axis."""
    return NormProblem(rows=prod(x.shape[:-1]), width=x.shape[-1], kind=kind, add=add, eps=eps)  # type: ignore[arg-type]


def _forward(kind: str, add: bool, gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """(a, b,) gamma (, beta) -> (s,) y (, mean), rstd; `b` and `s` with `add`, `beta` and `mean` of LayerNorm."""
    x, *rest = [o.address for o in ins]
    b = rest.pop(0) if add else 0
    made = [o.address for o in outs]
    s = made.pop(0) if add else 0
    beta, mean = (rest[1], made[1]) if kind == "layer" else (0, 0)
    problem = problem_of(kind, add, ins[0].type, float(attrs["eps"]))  # type: ignore[arg-type]
    return forward(problem, x=x, b=b, s=s, y=made[0], gamma=rest[0], beta=beta, mean=mean, rstd=made[-1], blocks=gpu.blocks)


def _backward(kind: str, add: bool, gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """(residual,) dy, x, gamma (, mean), rstd -> dx, dgamma (, dbeta)."""
    given = [o.address for o in ins]
    residual = given.pop(0) if add else 0
    problem = problem_of(kind, add, ins[-3].type if kind == "rms" else ins[-4].type)
    work = gpu.scratch(problem.partial_bytes())
    dx, dgamma, *dbeta = [o.address for o in outs]
    return backward(problem, dy=given[0], x=given[1], gamma=given[2], mean=given[3] if kind == "layer" else 0, rstd=given[-1],
                    residual=residual, dx=dx, dgamma=dgamma, dbeta=dbeta[0] if dbeta else 0, partial=work.address, blocks=gpu.blocks)


def _scratch(kind: str, add: bool, types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    return aligned(problem_of(kind, add, types[0]).partial_bytes())


def _fits(types: Sequence[TensorType], attrs: Attrs) -> bool:
    return bool(types[0].size) and types[0].shape[-1] % 8 == 0 and 8 <= types[0].shape[-1] <= WIDEST


def _compiled(op: str) -> Iterable[Signature]:
    """Widths between which the choice moves: it goes by 16-byte vectors over 32 lanes."""
    layer, add, back = op.startswith(("layer", "add_layer")), "add" in op, "_bwd" in op
    for width in (8, *range(128, WIDEST + 1, 128)):
        x, vector, stat = TensorType((600, width), "bf16"), TensorType((width,), "bf16"), TensorType((600,), "f32")
        if back:
            yield [*([x] if add else []), x, x, vector, *([stat] if layer else []), stat], {}
        else:
            yield [*([x] if add else []), x, vector, *([vector] if layer else [])], {"eps": 1e-5}


# Calls ----------------------------------------------------------------------------------------------------------------------------------

WIDTHS = (256, 512, 768, 1016, 1280, 1536, 1792, 2048, 2304, 2816, 3072, 3328, 4096, 4352, 4864, 5120, 5376, 5888, 6144, 6656, 7168, 7680,
          8192)
"""A width for each compiled file: a warp's 16-byte vectors one by one, then warp after warp of a team."""

COMPARED = ((65536, 768), (16384, 4096))
"""Rows and width: a narrow and a wide row."""


def _samples(kind: str, add: bool, back: bool, rng: np.random.Generator) -> Iterable[Sample]:
    layer = kind == "layer"
    for width in WIDTHS:
        x, y = rng.standard_normal((2, 11, width))
        gamma, beta = 1 + 0.5 * rng.standard_normal((2, width))
        if back:
            kept = row("layernorm" if layer else "rmsnorm").oracle(x, gamma, *([beta] if layer else []), eps=1e-5)[1:]
            residual = [rng.standard_normal(x.shape)] if add else []
            yield Sample(name=f"gpu-{width}", inputs=(*residual, y, x, gamma, *kept), attrs={})
        else:
            yield Sample(name=f"gpu-{width}", inputs=(x, *([y] if add else []), gamma, *([beta] if layer else [])), attrs={"eps": 1e-5})


def _call(kind: str, add: bool, back: bool, name: str, rows: int, width: int) -> Call:
    """A timed call of a norm over [rows, width]."""
    x, gamma, statistic, layer = bf16(rows, width), bf16(width), f32(rows), kind == "layer"
    more = [x] if add else []
    if back:
        return plain(*more, x, x, gamma, *([statistic] if layer else []), statistic, name=name)
    return plain(x, *more, gamma, *([gamma] if layer else []), name=name, eps=1e-5)


PATHS = ((37, 256), (24, 264), (37, 264), (37, 1032))
"""Rows and width. Forward: warps that share a row from width 1032 on. Backward: a warp a row; teams of two warps, with equal and with
unequal numbers of rows; teams of five warps."""


def _calls(kind: str, add: bool, back: bool) -> Calls:
    compared = () if add else COMPARED
    return Calls(further=partial(_samples, kind, add, back), differentiated=partial(_samples, kind, add, False),
                 timed=(_call(kind, add, back, "model-0", 32768, 1024),),
                 paths=tuple(_call(kind, add, back, f"rows-{rows}x{width}", rows, width) for rows, width in PATHS),
                 compared=tuple(_call(kind, add, back, f"{rows}x{width}", rows, width) for rows, width in compared))


# Components -----------------------------------------------------------------------------------------------------------------------------


def _component(op: str, kind: str, add: bool) -> Component:
    back = "_bwd" in op
    binder = partial(_backward if back else _forward, kind, add)
    return Component(
        id=f"{op}.bf16.sm90", kind="kernel", backend="cuda", op=op, implementation=binder, requires=SM90A,
        scratch=partial(_scratch, kind, add) if back else None, binaries=Binaries(cubins_of(op, binder, partial(_compiled, op))),
        inplace=((0, 0),) if back and add else (), calls=_calls(kind, add, back), budgeted=not back,
        envelope=Envelope(dtypes=("bf16", "f32") if back else ("bf16",), limits=(
            Limit(text="bf16 as compute type", holds=lambda types, attrs: row(op).compute_dtype(types) == "bf16"),
            Limit(text="a last axis that is a multiple of 8, up to 8192", holds=_fits),
            *([Limit(text="a residual of the shape of what it is added to", holds=lambda types, attrs: types[0].shape == types[1].shape)]
              if add else []),
        )),
    )


KERNELS = (
    _component("layernorm", "layer", False), _component("rmsnorm", "rms", False),
    _component("add_layernorm", "layer", True), _component("add_rmsnorm", "rms", True),
    _component("layernorm_bwd", "layer", False), _component("rmsnorm_bwd", "rms", False),
    _component("layernorm_bwd_add", "layer", True), _component("rmsnorm_bwd_add", "rms", True),
)
