"""Matrix products on the GPU: kernels/gemm by gemm.py beside this file. bf16 operands, fp32 accumulation, bf16 or fp32 result.

y = op(a) @ op(b) + bias, in every transposition; b may be batched like a; leading axes of a fold into its rows where b has two axes.
Every row of an operand or a result begins at a multiple of 16 bytes, which dense tensors do when their last axis is a multiple of 8
elements (4 in fp32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod

import numpy as np

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Call, Calls, Drawn, Large, bf16, f32, product
from alpha.backends.cuda.kernels.gemm import GemmProblem, Output, choose, compiled, prepare
from alpha.backends.cuda.lib import SM90A, Gpu, Operand, in_place
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.compile import Source
from alpha.ops.large import draw_product, product_error
from alpha.ops.spec import Sample
from alpha.ops.table import row
from alpha.types import Attrs, TensorType


def problem_of(op: str, types: Sequence[TensorType], attrs: Attrs) -> GemmProblem:
    """The GEMM of a call of `matmul` (a, b, bias?) or of `matmul_accumulate` (into, a, b), whose result is added to its buffer."""
    (y,) = row(op).infer(types, attrs)
    adds = op == "matmul_accumulate"
    a, b, *bias = types[1:] if adds else types
    trans_a, trans_b = bool(attrs.get("trans_a", False)), bool(attrs.get("trans_b", False))
    lead, m, k = a.shape[:-2], a.shape[-1 if trans_a else -2], a.shape[-2 if trans_a else -1]
    batch = prod(lead)
    if len(b.shape) == 2 and not trans_a:
        batch, m = 1, batch * m
    out: Output = "f32+=" if adds else "bf16" if y.dtype == "bf16" else "f32"
    return GemmProblem(m=m, n=y.shape[-1], k=k, batch=batch, a_major="m" if trans_a else "k", b_major="k" if trans_b else "n", out=out,
                       bias=bool(bias) and not adds)


def _matmul(gpu: Gpu, op: str, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    problem = problem_of(op, [x.type for x in ins], attrs)
    config = choose(problem, gpu.blocks)
    work = gpu.scratch(config.workspace_bytes()).address if config.split_units else 0
    a, b, *rest = ins[1:] if op == "matmul_accumulate" else ins
    counter = gpu.counters(config.counter_bytes()).address if config.ahead else 0
    return prepare(problem, config, a=a.address, b=b.address, c=outs[0].address, workspace=work, counter=counter,
                   bias=rest[0].address if rest else 0)


def matmul(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = op(a) @ op(b) + bias."""
    return _matmul(gpu, "matmul", ins, outs, attrs)


def scratch(types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    """Bytes for the partial sums of tiles that are split along K."""
    return choose(problem_of("matmul", types, attrs)).workspace_bytes()


def matmul_accumulate(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """y = into + op(a) @ op(b), in fp32 where `into` lies."""
    return in_place([(outs[0], ins[0])], _matmul(gpu, "matmul_accumulate", ins, outs, attrs))


def scratch_accumulate(types: Sequence[TensorType], attrs: Attrs, multiprocessors: int) -> int:
    """Bytes for the partial sums of tiles that are split along K."""
    return choose(problem_of("matmul_accumulate", types, attrs)).workspace_bytes()


def rows_fit(types: Sequence[TensorType], attrs: Attrs) -> bool:
    """Whether every row is a multiple of 16 bytes long."""
    (y,) = row("matmul").infer(types, attrs)
    return all(t.shape[-1] % (8 if t.dtype == "bf16" else 4) == 0 for t in (*types[:2], y))


def accumulates(types: Sequence[TensorType], attrs: Attrs) -> bool:
    """Whether a gradient product is one GEMM into fp32: whole rows of 16 bytes, no leading axes."""
    return types[0].dtype == "f32" and types[0].shape[-1] % 4 == 0 and all(
        t.dtype == "bf16" and len(t.shape) == 2 and t.shape[-1] % 8 == 0 for t in types[1:])


def sources(outs: Sequence[Output] = ("bf16", "f32"), biases: Sequence[bool] = (False, True)) -> Iterable[Source]:
    """Every compiled file that `choose` may ask for."""
    for a in ("k", "m"):
        for b in ("k", "n"):
            for out in outs:
                for bias in biases:
                    problem = GemmProblem(m=64, n=64, k=64, a_major=a, b_major=b, out=out, bias=bias)  # type: ignore[arg-type]
                    for config in compiled(problem):
                        yield from config.sources(problem)


# Calls ----------------------------------------------------------------------------------------------------------------------------------

SHAPES = (  # name, leading axes, M, N, K, b batched
    ("one-row", (), 1, 8, 8, False),
    ("tile-1", (), 127, 120, 56, False),
    ("tile+1", (), 129, 136, 72, False),
    ("tiles", (), 136, 264, 64, False),
    ("ring+1", (), 72, 40, 456, False),
    ("deep", (), 24, 32, 1032, False),
    ("folded", (3, 5), 24, 16, 40, False),
    ("batched", (3,), 136, 40, 24, True),
)
"""M and N are multiples of 8 wherever a transposition makes them a last axis."""


def _products(draw: Callable[..., np.ndarray], accumulate: bool) -> Iterable[Sample]:
    for name, lead, m, n, k, batched in SHAPES:
        for ta in (False, True):
            for tb in (False, True):
                if (ta and (m % 8 or (lead and not batched))) or (accumulate and lead):
                    continue
                a = draw(*lead, *((k, m) if ta else (m, k)))
                b = draw(*(lead if batched else ()), *((n, k) if tb else (k, n)))
                attrs: dict[str, object] = {"trans_a": ta, "trans_b": tb, **({"wide": True} if accumulate else {})}
                inputs = (draw(m, n), a, b) if accumulate else (a, b, draw(n)) if ta == tb and not lead else (a, b)
                yield Sample(name=f"gpu-{name}-{'T' if ta else 'N'}{'T' if tb else 'N'}", inputs=inputs, attrs=attrs)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    yield from _products(lambda *s: rng.standard_normal(s), False)
    yield Sample(name="gpu-equal", inputs=(np.full((136, 264), 0.7), np.full((264, 72), -1.3), np.full(72, 0.1)), attrs={})
    yield Sample(name="gpu-large", inputs=(1e15 * rng.standard_normal((40, 72)), 1e15 * rng.standard_normal((72, 24))), attrs={})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    """Integers whose sums stay below 256, so that the result is exact in bf16 as well: K of one-hot columns and small entries."""
    for sample in _products(lambda *s: rng.integers(-2, 3, s).astype(float), False):
        a, b, *bias = sample.inputs
        axis = -2 if sample.attrs["trans_a"] else -1  # the reduction: at most 32 terms of at most 4 are not zero
        kept = np.zeros(a.shape[axis], bool)
        kept[rng.permutation(kept.size)[:32]] = True
        kept[-1] = True
        a = a * (kept[:, None] if axis == -2 else kept)
        yield Sample(name=sample.name, inputs=(a, b, *bias), attrs=sample.attrs)


def _accumulated(rng: np.random.Generator) -> Iterable[Sample]:
    yield from _products(lambda *s: rng.standard_normal(s), True)


def _accumulated_exact(rng: np.random.Generator) -> Iterable[Sample]:
    yield from _products(lambda *s: rng.integers(-8, 9, s).astype(float), True)


BROAD = (2056, 5128, 520)  # several tiles a block, written under each other's products, with sides and K that end inside a tile

SPLIT = (("split-few", 264, 200, 4136), ("split", 1032, 1096, 4104),  # parts that an owner adds, of both tile shapes
         ("split-few-many", 136, 328, 6408), ("split-many", 3064, 200, 4104))  # so many of a tile that another kernel does
"""M, N, K of which all tiles are cut along K, some runs over two of them."""

LARGE: Mapping[str, tuple[int, int, int, bool, bool, bool]] = {  # M, N, K, a transposed, b transposed, fp32 result
    f"{kind}-{'T' if ta else 'N'}{'T' if tb else 'N'}{'-wide' if wide else ''}": (m, n, k, ta, tb, wide)
    for kind, m, n, k, outputs in (*((*split, (False, True)) for split in SPLIT), ("broad", *BROAD, (False,)),
                                   ("long", 2040, 2048, 6152, (True,)))
    for ta in (False, True) for tb in (False, True) for wide in outputs
} | {
    "forward": (8192, 3072, 768, False, True, False),
    "input-gradient": (16384, 768, 768, False, False, False),
    "weight-gradient": (768, 2304, 16384, True, False, True),
    "input-gradient-wide": (16384, 768, 768, False, False, True),
}
"""Between these, those with a bias and the samples every compiled file is launched."""


def _draw_biased(ta: bool, tb: bool, rng: np.random.Generator) -> Drawn:
    """A product of BROAD and its bias."""
    m, n, k = BROAD
    ((a, _), (b, _)), attrs = draw_product(m, n, k + 1, ta, tb, False, rng)
    operands = (a[:k] if ta else a[:, :k], b[:, :k] if tb else b[:k], b[:, k] if tb else b[k])
    return [(np.ascontiguousarray(x), "bf16") for x in operands], attrs


def _biased_error(rng: np.random.Generator, inputs: Sequence[np.ndarray], attrs: dict[str, object],
                  outs: Sequence[np.ndarray]) -> tuple[float, int]:
    """As `product_error`: a bias is one more step of K, from a column of ones."""
    a, b, bias = inputs
    ones = np.ones((1, a.shape[1]) if attrs["trans_a"] else (a.shape[0], 1), a.dtype)
    left = np.concatenate([a, ones], 0 if attrs["trans_a"] else 1)
    right = np.concatenate([b, bias[:, None] if attrs["trans_b"] else bias[None]], 1 if attrs["trans_b"] else 0)
    return product_error(rng, [left, right], attrs, outs)


def _draw_accumulated(m: int, n: int, k: int, ta: bool, tb: bool, rng: np.random.Generator) -> Drawn:
    """A buffer and the operands of a product that is added to it."""
    operands, attrs = draw_product(m, n, k, ta, tb, True, rng)
    return [(rng.uniform(-1, 1, (m, n)).astype(np.float32), "f32"), *operands], attrs


def _accumulated_error(rng: np.random.Generator, inputs: Sequence[np.ndarray], attrs: dict[str, object],
                       outs: Sequence[np.ndarray]) -> tuple[float, int]:
    """As `product_error`, of what was added. The buffer is at most 1, so its share of the last rounding is below one of the K terms'."""
    into, a, b = inputs
    return product_error(rng, [a, b], attrs, [outs[0] - into.astype(np.float64)])


REPEATED = {"split": (1032, 1096, 4104, False), "split-many": (3064, 200, 4104, False), "drawn": (2056, 2568, 264, False),
            "drawn-wide": (2056, 3080, 520, False), "drawn-f32": (2568, 2568, 6152, True)}
"""M, N, K, fp32 result: products whose tiles are cut along K, added by owners and by another kernel; and one of each form that draws its
tiles while it runs, of which there are more than clusters to draw them."""


COMPARED = ((16384, 768, 768), (16384, 3072, 768), (16384, 768, 3072), (16384, 2304, 768), (16384, 50304, 768), (16384, 2048, 2048),
            (16384, 6144, 2048), (16384, 8192, 2048), (16384, 2048, 8192), (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336),
            (8192, 128256, 4096), (8192, 8192, 8192))
"""M, N, K of x[M,K] weight[N,K]^T: the layers of GPT-2, of Llamas of 1 and 8 billion parameters, and a square one."""


def _compared(m: int, n: int, k: int) -> Iterable[Call]:
    """Forward, both gradients, and the weight gradient into float32."""
    shape = f"{m}x{n}x{k}"
    yield product(bf16(m, k), bf16(n, k), name=f"fwd-{shape}", trans_b=True)
    yield product(bf16(m, n), bf16(n, k), name=f"dgrad-{shape}")
    yield product(bf16(m, n), bf16(m, k), name=f"wgrad-{shape}", trans_a=True)
    yield product(bf16(m, n), bf16(m, k), name=f"wgrad-f32-{shape}", trans_a=True, wide=True)


CALLS = Calls(
    further=_samples, exactly=_exact,
    repeated={name: partial(draw_product, m, n, k, False, True, wide) for name, (m, n, k, wide) in REPEATED.items()},
    large={name: Large(partial(draw_product, *shape), product_error) for name, shape in LARGE.items()} | {
        f"biased-{'T' if ta else 'N'}{'T' if tb else 'N'}": Large(partial(_draw_biased, ta, tb), _biased_error)
        for ta in (False, True) for tb in (False, True)
    },
    timed=(
        product(bf16(16384, 768), bf16(3072, 768), name="forward-gpt", trans_b=True),
        product(bf16(8192, 8192), bf16(8192, 2048), name="input-gradient-llama"),
        product(bf16(16384, 3072), bf16(16384, 768), name="weight-gradient-gpt", trans_a=True, wide=True),
    ),
    compared=tuple(call for shape in COMPARED for call in _compared(*shape)),
)
CALLS_ACCUMULATE = Calls(
    further=_accumulated, exactly=_accumulated_exact,
    repeated={"split": partial(_draw_accumulated, 1032, 1096, 4104, True, False)},
    large={f"{kind}-{'T' if ta else 'N'}{'T' if tb else 'N'}": Large(partial(_draw_accumulated, m, n, k, ta, tb), _accumulated_error)
           for kind, m, n, k in SPLIT for ta in (False, True) for tb in (False, True)},
    timed=(product(f32(3072, 768), bf16(16384, 3072), bf16(16384, 768), trans_a=True, wide=True),))


# Components -----------------------------------------------------------------------------------------------------------------------------

KERNELS = (
    Component(
        id="matmul.bf16.sm90", kind="kernel", backend="cuda", op="matmul", implementation=matmul, requires=SM90A, scratch=scratch,
        binaries=Binaries(sources), calls=CALLS,
        envelope=Envelope(
            dtypes=("bf16",),
            limits=(
                Limit(text="no empty axis", holds=lambda types, attrs: all(t.size for t in types)),
                Limit(text="a last axis that is a multiple of 8 elements (4 in fp32) in a, b and y", holds=rows_fit),
                Limit(text="b batched like a, or no leading axes, where a is transposed",
                      holds=lambda types, attrs: not attrs.get("trans_a") or len(types[0].shape) == len(types[1].shape)),
            ),
        ),
    ),
    Component(
        id="matmul_accumulate.bf16.sm90", kind="kernel", backend="cuda", op="matmul_accumulate", implementation=matmul_accumulate,
        requires=SM90A, scratch=scratch_accumulate, binaries=Binaries(lambda: sources(("f32+=",), (False,))), inplace=((0, 0),),
        calls=CALLS_ACCUMULATE,
        envelope=Envelope(
            dtypes=("bf16", "f32"),
            limits=(
                Limit(text="no empty axis", holds=lambda types, attrs: all(t.size for t in types)),
                Limit(text="bf16 matrices of whole 16-byte rows and an fp32 buffer", holds=accumulates),
            ),
        ),
    ),
)
