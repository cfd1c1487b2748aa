"""LayerNorm and RMSNorm on the GPU, forward and backward, with the residual stream's addition (kernels/norm). bf16; statistics and
gradients of parameters fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.cubins_of import Call, cubins_of
from alpha.backends.cuda.lib import SM90A, Gpu, Operand
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.memory import aligned
from alpha.cuda_runtime.norm import NormProblem, backward, forward
from alpha.ops.table import row
from alpha.types import Attrs, TensorType

WIDEST = 8192


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


def _scratch(kind: str, add: bool, types: Sequence[TensorType], attrs: Attrs, threads: int) -> int:
    return aligned(problem_of(kind, add, types[0]).partial_bytes())


def _fits(types: Sequence[TensorType], attrs: Attrs) -> bool:
    return bool(types[0].size) and types[0].shape[-1] % 8 == 0 and 8 <= types[0].shape[-1] <= WIDEST


def _calls(op: str) -> Iterable[Call]:
    """Widths between which the choice moves: it goes by 16-byte vectors over 32 lanes."""
    layer, add, back = op.startswith(("layer", "add_layer")), "add" in op, "_bwd" in op
    for width in (8, *range(128, WIDEST + 1, 128)):
        x, vector, stat = TensorType((600, width), "bf16"), TensorType((width,), "bf16"), TensorType((600,), "f32")
        if back:
            yield [*([x] if add else []), x, x, vector, *([stat] if layer else []), stat], {}
        else:
            yield [*([x] if add else []), x, vector, *([vector] if layer else [])], {"eps": 1e-5}


def _component(op: str, kind: str, add: bool) -> Component:
    back = "_bwd" in op
    binder = partial(_backward if back else _forward, kind, add)
    return Component(
        id=f"{op}.bf16.sm90", kind="kernel", backend="cuda", op=op, implementation=binder, requires=SM90A,
        scratch=partial(_scratch, kind, add) if back else None, binaries=Binaries(cubins_of(op, binder, partial(_calls, op))),
        inplace=((0, 0),) if back and add else (),
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
