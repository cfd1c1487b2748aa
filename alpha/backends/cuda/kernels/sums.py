"""The two launches of update_scalars as rows of their own, for ranks of which each holds some blocks of the norm. Floor 4.

    square_sums          the sum of squares of each block: optimizer/global_norm.cu, whose eight parts of a block are then added (fold)
    scalars_of_squares   all scalars of the update from such sums: unfold, then optimizer/step.cu

So the additions are those of update_scalars, one by one, and the norm has its bits, whoever sums which block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Calls, f32, i32, plain
from alpha.backends.cuda.cubins_of import cubins_of
from alpha.backends.cuda.kernels.update import BLOCK, MOST_BLOCKS, NORM_ENTRY, PARTS, global_norm, step
from alpha.backends.cuda.launches import Operation, addresses, ceil_div, kernel, launch, require
from alpha.backends.cuda.lib import SM90A, Gpu, Operand, Parts
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.memory import aligned
from alpha.ops.spec import Sample
from alpha.types import Attrs, Table, TensorType

THREADS = 256

Leaves = Sequence[Sequence[tuple[int, int]]]


def _leaves(attrs: Attrs) -> Leaves:
    return attrs["leaves"]  # type: ignore[return-value]


def block_table(leaves: Leaves) -> np.ndarray:
    """A block for each leaf; of an empty one nothing is read, and its sum is 0."""
    return np.array([(*leaf[0], 0) if leaf else (0, 0, 0) for leaf in leaves], NORM_ENTRY)


def _between(name: str, blocks: int, source: int, target: int) -> Operation:
    """fold: parts[blocks][8] to sums[blocks], or unfold, the other way."""
    require(name, [(1 <= blocks <= MOST_BLOCKS, f"{blocks} blocks", f"1 to {MOST_BLOCKS}")])
    addresses(name, source=source, target=target)
    run = launch(kernel("optimizer/sums.cu", name, {}), ceil_div(blocks, THREADS), THREADS, ctypes.c_uint64(source),
                 ctypes.c_uint64(target), ctypes.c_int32(blocks))
    return Operation(f"{name} {blocks} blocks", (run,), 4 * (PARTS + 1) * blocks)


def square_sums(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """f32[leaves]: the sum of squares of each block."""
    (x,), (sums,), leaves = ins, outs, _leaves(attrs)
    parts = gpu.scratch(4 * PARTS * len(leaves)).address
    table = gpu.constant(("block table", attrs["leaves"]), lambda: block_table(leaves)).address
    return Parts(("grad_norm", global_norm(len(leaves), grads=x.address, table=table, parts=parts)),
                 ("grad_norm", _between("fold", len(leaves), parts, sums.address)))


def scalars_of_squares(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """norm, mean norm, clip coefficient, finite flag, learning rate, the step that was and the next."""
    sums, count, loss, old = (o.address for o in ins)
    norm, mean_norm, coefficient, finite, lr, used, following = (o.address for o in outs)
    blocks, rates = ins[0].type.size, attrs["rates"]
    assert isinstance(rates, Table)
    parts = gpu.scratch(4 * PARTS * blocks).address
    uploaded = gpu.constant(("learning rates", rates), rates.array).address
    scalars = step(blocks, max_norm=float(attrs["max_norm"]), rates=uploaded, entries=len(rates), parts=parts,  # type: ignore[arg-type]
                   loss=loss, count=count, step=old, norm=norm, mean_norm=mean_norm, coefficient=coefficient, finite=finite, lr=lr,
                   used=used, next=following)
    return Parts(("grad_clip", _between("unfold", blocks, sums, parts)), ("grad_clip", scalars))


def _scratch_of_leaves(types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    return aligned(4 * PARTS * len(_leaves(attrs)))


def _scratch_of_sums(types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    return aligned(4 * PARTS * types[0].size)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    """Blocks of one run and of several, whole and cut short, on 16-byte boundaries and off them, and of other ranks."""
    for name, n, leaves in (("whole", 3 * BLOCK, (((0, BLOCK),), ((2 * BLOCK, BLOCK),))),
                            ("short", 20_000, (((64, 8192),), ((9000, 10_007),))),
                            ("off", 70_000, (((1, 8192),), ((8197, 9000),), ((30_001, 3),))),
                            ("others", 300, ((), ((0, 70),), (), ((100, 200),)))):
        yield Sample(name=f"gpu-{name}", inputs=(rng.standard_normal(n),), attrs={"leaves": leaves})


def _exactly(rng: np.random.Generator) -> Iterable[Sample]:
    """Sums of integers, with blocks of other ranks between them."""
    yield Sample(name="gpu-integers", inputs=(rng.integers(-9, 10, 9000).astype(float),),
                 attrs={"leaves": ((), ((0, 8500),), (), ((8512, 100),), ())})


def _scalars_samples(rng: np.random.Generator) -> Iterable[Sample]:
    """No token that counts."""
    yield Sample(name="gpu-no-tokens", attrs={"max_norm": 1.0, "rates": Table.of(10.0 ** rng.uniform(-6, -2, 7))},
                 inputs=(rng.random(300), np.array(0.0), np.array(7.25), np.array(3, np.int32)))


def _scalars_exactly(rng: np.random.Generator) -> Iterable[Sample]:
    """A norm that is not finite, beside a loss that is."""
    yield Sample(name="gpu-norm-not-finite", attrs={"max_norm": 0.0, "rates": Table.of(rng.random(24))},
                 inputs=(np.array([9.0, np.inf, 16.0]), np.array(4.0), np.array(2.0), np.array(3, np.int32)))


_LEAVES = {"leaves": (((0, 64),),)}
_RULE = {"max_norm": 1.0, "rates": Table.of([1.0, 0.5])}
_LONG = 1 << 27
_BLOCKS = _LONG // BLOCK

KERNELS = (
    Component(
        id="square_sums.f32.sm90", kind="kernel", backend="cuda", op="square_sums", implementation=square_sums, requires=SM90A,
        scratch=_scratch_of_leaves,
        calls=Calls(further=_samples, exactly=_exactly,
                    timed=(plain(f32(_LONG), leaves=tuple(((i * BLOCK, BLOCK),) for i in range(_BLOCKS))),)),
        binaries=Binaries(cubins_of("square_sums", square_sums, lambda: [([TensorType((64,), "f32")], _LEAVES)])),
        envelope=Envelope(limits=(
            Limit(text="at most 3.8 billion elements", holds=lambda types, attrs: 1 <= len(_leaves(attrs)) <= MOST_BLOCKS),
            Limit(text="leaves of one run of at most 65,536 elements",
                  holds=lambda types, attrs: all(len(leaf) < 2 and all(n <= BLOCK for _, n in leaf) for leaf in _leaves(attrs))),)),
    ),
    Component(
        id="scalars_of_squares.f32.sm90", kind="kernel", backend="cuda", op="scalars_of_squares", implementation=scalars_of_squares,
        requires=SM90A, scratch=_scratch_of_sums, inplace=((6, 3),),
        calls=Calls(further=_scalars_samples, exactly=_scalars_exactly,
                    timed=(plain(f32(_BLOCKS), f32(), f32(), i32(), below=9, max_norm=1.0, rates=Table.of([1e-3] * 101)),)),
        binaries=Binaries(cubins_of("scalars_of_squares", scalars_of_squares, lambda: [
            ([TensorType((64,), "f32"), TensorType((), "f32"), TensorType((), "f32"), TensorType((), "i32")], _RULE)])),
        envelope=Envelope(limits=(
            Limit(text="at most 3.8 billion elements", holds=lambda types, attrs: 1 <= types[0].size <= MOST_BLOCKS),)),
    ),
)
