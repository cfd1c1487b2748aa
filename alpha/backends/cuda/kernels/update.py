"""The optimizer's step on the GPU: norm, clip, learning rate and step counter in one row, AdamW in another (kernels/optimizer)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Calls, bf16, f32, i32, plain
from alpha.backends.cuda.cubins_of import cubins_of
from alpha.backends.cuda.lib import SM90A, Gpu, Operand, Parts, in_place
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.memory import aligned
from alpha.cuda_runtime.update import MOST_BLOCKS, PARTS, AdamwProblem, adamw_table, global_norm, norm_table, step
from alpha.cuda_runtime.update import adamw as adamw_step
from alpha.types import Attrs, Table, TensorType


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
    chunks = adamw_table(segments)
    if not len(chunks):
        return in_place(pairs, lambda stream: None)
    table = gpu.constant(("adamw table", segments), lambda: chunks).address
    problem = AdamwProblem(chunks=len(chunks), elements=sum(s[1] for s in segments), beta1=float(attrs["beta1"]),  # type: ignore[arg-type]
                           beta2=float(attrs["beta2"]), eps=float(attrs["eps"]),  # type: ignore[arg-type]
                           weight_decay=float(attrs["weight_decay"]), copy="nearest" if narrow else "none")  # type: ignore[arg-type]
    return in_place(pairs, adamw_step(
        problem, table=table, param=outs[0].address, grad=grad.address, m=outs[1].address, v=outs[2].address, step=count.address,
        coefficient=coefficient.address, lr=lr.address, finite=finite.address, copy=outs[3].address if narrow else 0, blocks=gpu.blocks))


def scratch(types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    """Bytes of the sums of squares."""
    return aligned(4 * PARTS * max(1, _blocks(attrs)))


_FLAT, _SCALAR, _INTEGER = TensorType((64,), "f32"), TensorType((), "f32"), TensorType((), "i32")
_RULE = {"segments": ((0, 64),), "max_norm": 1.0, "rates": Table.of([1.0, 0.5])}
_ADAMW = {"segments": ((0, 64, 1.0, 1.0),), "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_LONG = 1 << 27
_TIMED_SCALARS = plain(f32(_LONG), f32(), f32(), i32(), below=9, max_norm=1.0, rates=Table.of([1e-3] * 101), segments=((0, _LONG),))
_TIMED_ADAMW = plain(*[f32(_LONG)] * 4, f32(), f32(), i32(), i32(), bf16(_LONG), below=2, least=1,  # a step that is not finite does nothing
                     **{**_ADAMW, "segments": ((0, _LONG, 1.0, 1.0),)})

KERNELS = (
    Component(
        id="update_scalars.f32.sm90", kind="kernel", backend="cuda", op="update_scalars", implementation=update_scalars, requires=SM90A,
        scratch=scratch, inplace=((6, 3),), calls=Calls(timed=(_TIMED_SCALARS,)),
        binaries=Binaries(cubins_of("update_scalars", update_scalars, lambda: [([_FLAT, _SCALAR, _SCALAR, _INTEGER], _RULE)])),
        envelope=Envelope(limits=(
            Limit(text="at most 3.8 billion elements", holds=lambda types, attrs: _blocks(attrs) <= MOST_BLOCKS),)),
    ),
    Component(
        id="adamw.f32.sm90", kind="kernel", backend="cuda", op="adamw", implementation=adamw, requires=SM90A,
        inplace=((0, 0), (1, 2), (2, 3), (3, 8)), calls=Calls(timed=(_TIMED_ADAMW,)),
        binaries=Binaries(cubins_of("adamw", adamw, lambda: [
            ([_FLAT] * 4 + [_SCALAR] * 2 + [_INTEGER] * 2 + more, _ADAMW) for more in ([], [TensorType((64,), "bf16")])])),
        envelope=Envelope(dtypes=("f32", "bf16"), limits=(
            Limit(text="fp32 state", holds=lambda types, attrs: all(t.dtype == "f32" for t in types[:6])),
            Limit(text="elements", holds=lambda types, attrs: types[0].size > 0),)),
    ),
)
