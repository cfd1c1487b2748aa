"""Linear layers with what follows them in the same kernel: GELU, SwiGLU, and the gradient through a GELU (kernels/gemm). bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Call, Calls, bf16, product
from alpha.backends.cuda.kernels.gemm import GemmProblem, choose, compiled, prepare
from alpha.backends.cuda.lib import SM90A, Gpu, Kernel, Operand
from alpha.component import Component, Envelope, Limit
from alpha.cuda_runtime.compile import Source
from alpha.types import Attrs, TensorType

GELU = GemmProblem(m=1, n=8, k=8, bias=True, activation="gelu", save_pre=True)
SWIGLU = GemmProblem(m=1, n=8, k=8, activation="swiglu", save_pre=True)
GELU_GRADIENT = GemmProblem(m=1, n=8, k=8, b_major="n", aux_input="gelu_gradient")


def _run(gpu: Gpu, problem: GemmProblem, **addresses: int) -> Callable[[int], None]:
    config = choose(problem, gpu.blocks)
    return prepare(problem, config, counter=gpu.counters(config.counter_bytes()).address if config.ahead else 0, **addresses)


def _rows(t: TensorType) -> int:
    return prod(t.shape[:-1])


def linear_gelu(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """h = x W^T + bias and y = gelu(h); x [..,K], W [N,K]."""
    x, weight, bias = ins
    h, y = outs
    problem = replace(GELU, m=_rows(x.type), n=weight.type.shape[0], k=weight.type.shape[1])
    return _run(gpu, problem, a=x.address, b=weight.address, bias=bias.address, c=y.address, aux=h.address)


def linear_swiglu(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """pre = x W^T, gate then up, and y = silu(gate) up; W [2F,K]."""
    x, weight = ins
    pre, y = outs
    problem = replace(SWIGLU, m=_rows(x.type), n=weight.type.shape[0] // 2, k=weight.type.shape[1])
    return _run(gpu, problem, a=x.address, b=weight.address, c=y.address, aux=pre.address)


def matmul_gelu_bwd(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    """dh = gelu'(h) (dy W); dy [..,K], W [K,N]."""
    dy, weight, h = ins
    problem = replace(GELU_GRADIENT, m=_rows(dy.type), n=weight.type.shape[1], k=weight.type.shape[0])
    return _run(gpu, problem, a=dy.address, b=weight.address, c=outs[0].address, aux=h.address)


def _sources(problem: GemmProblem) -> Callable[[], Iterable[Source]]:
    return lambda: [s for config in compiled(problem) for s in config.sources(problem)]


def _component(op: str, implementation: Kernel, problem: GemmProblem, text: str,
               holds: Callable[[Sequence[TensorType], Attrs], bool], timed: Call) -> Component:
    return Component(
        id=f"{op}.bf16.sm90", kind="kernel", backend="cuda", op=op, implementation=implementation, requires=SM90A,
        binaries=Binaries(_sources(problem)), calls=Calls(timed=(timed,)),
        envelope=Envelope(dtypes=("bf16",), limits=(
            Limit(text="no empty axis", holds=lambda types, attrs: all(t.size for t in types)),
            Limit(text="last axes that are multiples of 8", holds=lambda types, attrs: all(t.shape[-1] % 8 == 0 for t in types)),
            Limit(text=text, holds=holds),
        )),
    )


KERNELS = (
    _component("linear_gelu", linear_gelu, GELU, "a transposed weight of a multiple of 8 rows and the tanh form",
               lambda types, attrs: attrs["trans_b"] is True and not attrs.get("trans_a") and attrs["approximate"] == "tanh"
               and types[1].shape[0] % 8 == 0,
               product(bf16(16384, 768), bf16(3072, 768), bf16(3072), trans_b=True, approximate="tanh")),
    _component("linear_swiglu", linear_swiglu, SWIGLU, "a transposed weight of a multiple of 16 rows",
               lambda types, attrs: attrs["trans_b"] is True and not attrs.get("trans_a") and types[1].shape[0] % 16 == 0,
               product(bf16(8192, 2048), bf16(16384, 2048), trans_b=True)),
    _component("matmul_gelu_bwd", matmul_gelu_bwd, GELU_GRADIENT, "no transposition and the tanh form",
               lambda types, attrs: not attrs.get("trans_a") and not attrs.get("trans_b") and attrs["approximate"] == "tanh",
               product(bf16(16384, 768), bf16(768, 3072), bf16(16384, 3072), approximate="tanh")),
)
