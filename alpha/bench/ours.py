"""Our side of a kernel's benchmark: its timed calls, bound once and called in blocks, and the ceilings beside them. Floor 8.

The calls are those that the perf gate times: grown samples on the CPU (gates/perf.py), on the GPU those that the kernel carries
(backends/cuda/calls.py), with more shapes to compare. There an output shares the memory of its input wherever the component may work in
place, as the planner has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from alpha.backends.cuda.lib import Gpu, Operand
from alpha.backends.cuda.values import device_bytes, from_device, to_device
from alpha.bench.peer_process import LEAD
from alpha.bench.peers_torch import EPS
from alpha.component import Catalogue, Component
from alpha.cuda_runtime.memory import Arena, Span, aligned, download, fill, upload
from alpha.cuda_runtime.nvml import Clocks, Reading
from alpha.errors import InputError
from alpha.gates import perf
from alpha.gates.cuda import calls as cuda_calls
from alpha.gates.cuda import perf as cuda_perf
from alpha.gates.cuda.subjects import opened
from alpha.gates.cuda.time import FLUSH_BYTES, LAUNCHES, contents, timed_block
from alpha.gates.subjects import Case, bind, generator, once, pin_blas, spec_of
from alpha.ops.numerics import round_to
from alpha.ops.table import row, table
from alpha.profile import noise
from alpha.types import Attrs, TensorType

BLOCK_NS = 1_200_000
"""How long a block on the CPU lasts, about."""

Block = Callable[[], tuple[float, "Reading | None"]]
"""Times one block: (nanoseconds a call, what the GPU said meanwhile)."""


@dataclass
class Timed:
    """One call ready to be timed. `operands`: device forms; `outputs`: of one call on them, host arrays. `work`: FLOPs by the row's count,
    `tensor_cores`: whether they run there (else bytes alone are the ceiling on a GPU). `ceilings`: name -> (work, block); `probe`: the
    ceiling whose time tells a throttled CPU; `read`: the GPU's clock."""

    name: str
    types: tuple[TensorType, ...]
    out_types: tuple[TensorType, ...]
    attrs: Attrs
    operands: list[np.ndarray]
    outputs: list[np.ndarray]
    block: Block
    ceilings: Mapping[str, tuple[float, Block]]
    bytes: int
    work: int
    tensor_cores: bool = True
    optional: int = 0
    probe: str = ""
    read: Callable[[], Reading] | None = field(default=None)

    @property
    def shape(self) -> str:
        """The operands' types."""
        return " ".join(map(str, self.types))

    @property
    def read_types(self) -> tuple[TensorType, ...]:
        """Operands that results follow from; a row's trailing optional ones (a narrow copy, document ids) do not make them less exact."""
        return self.types[: len(self.types) - self.optional]

    def ceiling_ns(self, fastest: Mapping[str, float]) -> tuple[float, str]:
        """(least time of the call, what limits it), from the fastest block of each ceiling."""
        rates = {name: work / fastest[name] for name, (work, _) in self.ceilings.items()}
        moved = self.bytes / max(rate for name, rate in rates.items() if name != "product")
        counted = self.work / rates["product"] if self.tensor_cores else 0.0
        return (moved, "bytes") if moved >= counted else (counted, "flops")


Forward = Callable[[str, Sequence[np.ndarray], Attrs], Sequence[np.ndarray]]
"""(row, operands, attributes) -> its outputs by our own kernel; host arrays, bf16 as float32."""


def follows(op: str, operands: int) -> bool:
    """Whether `fitted` may change an operand of such a call."""
    names = {n.rstrip("?") for n in row(op).inputs[:operands]}
    return bool(names & {"finite", "weight"}) or "_bwd" in op


def fitted(op: str, xs: Sequence[np.ndarray], attrs: Attrs, forward: Forward) -> list[np.ndarray]:
    """The operands of a call, those replaced that follow from others: the perf gate's numbers are enough to time a kernel, but a peer
    computes the backward from its own forward. What a forward pass leaves (o, lse, mean, rstd, y) is what the forward row makes of the
    operands beside it. An update is a step that is finite. Weights are scaled so that sums keep the size of their terms, as in a model.
    Host arrays; float32 and wider, bf16 as float32 to be rounded."""
    names = [n.rstrip("?").lstrip("*") for n in row(op).inputs]
    found = dict(zip(names, (np.asarray(x) for x in xs)))
    rest = [np.asarray(x) for x in xs[len(found) :]]

    def put(**values: object) -> None:
        for name in values.keys() & found.keys():
            old = found[name]
            found[name] = np.asarray(values[name], old.dtype).reshape(old.shape)

    if "finite" in found:
        put(finite=1, lr=1e-3, coefficient=1.0, step=9, **({"v": np.square(found["v"])} if "v" in found else {}))
    elif (forth := table().get(op.partition("_bwd")[0])) is not None and "_bwd" in op:
        left = [n for n in forth.outputs if n in found and n not in forth.inputs]
        given: list[np.ndarray] = []
        for name in forth.inputs if left else ():
            if name in found:
                given.append(found[name])
            elif not name.endswith("?"):  # what the backward is not given decides nothing that is left
                given.append(np.zeros_like(given[-1]) if given else found[left[0]])
            elif name[:-1] in found:
                given.append(found[name[:-1]])
        knows = {n: v for n, v in {"eps": EPS, **attrs}.items() if n in forth.known_attributes}
        put(**{n: y for n, y in zip(forth.outputs, forward(forth.name, given, knows)) if n in left} if left else {})
    elif "weight" in found:
        terms = found["weight"].shape[-1 if attrs.get("trans_b") or op.startswith("linear_cross") else -2]
        put(weight=found["weight"] * 2.0 ** -round(np.log2(terms) / 2))  # a power of two rounds nothing
    return [*found.values(), *rest]


@contextmanager
def timed_cases(component: Component, catalogue: Catalogue, nonce: str, pattern: str = "*") -> Iterator[Iterator[Timed]]:
    """The component's calls whose name matches, one after the other: each is bound when it is asked for. InputError for a component without
    an op row.

    `catalogue`: where the forward kernel of a backward row is found.
    """
    if component.kind != "kernel":
        raise InputError("only kernels are benchmarked by themselves", came=f"{component.id} ({component.kind})", expected="a kernel",
                         do="`alpha gate list` names them; `alpha bench step RUN.toml` times a whole step")
    if component.backend != "cuda":
        yield _on_cpu(component, catalogue, nonce, pattern)
        return
    clocks, ceiling = Clocks.open(), cuda_perf.probes()
    try:
        yield _on_gpu(component, catalogue, nonce, pattern, clocks, ceiling)
    finally:
        ceiling.arena.free()


def _forward(component: Component, catalogue: Catalogue, op: str) -> Component:
    """A kernel of the same back end for another row."""
    return catalogue.for_op(op, component.backend)[0]


def _optional(component: Component, types: Sequence[TensorType]) -> int:
    """How many of the operands are a row's optional ones, but a bias, which the result follows from."""
    names = spec_of(component).inputs[: len(types)]
    return sum(n.endswith("?") and n != "bias?" for n in names)


def _on_cpu(component: Component, catalogue: Catalogue, nonce: str, pattern: str) -> Iterator[Timed]:
    pin_blas()
    spec = spec_of(component)

    def block(call: Callable[[], object]) -> Block:
        repeats = noise.repeats_for(call, BLOCK_NS)
        return lambda: (float(noise.block(call, repeats)), None)

    for name, case in perf.representative(component, nonce).items():
        if not fnmatchcase(name, pattern):
            continue

        def forward(op: str, xs: Sequence[np.ndarray], attrs: Attrs, types: tuple[TensorType, ...] = case.types) -> Sequence[np.ndarray]:
            kinds = tuple(TensorType(x.shape, "i32" if x.dtype.kind == "i" else types[0].dtype) for x in xs)
            return once(_forward(component, catalogue, op), Case(op, types[0].dtype, False, tuple(xs), kinds, attrs))

        operands = fitted(component.op or "", case.arrays(), case.attrs, forward)
        bound = bind(component, case)
        bound.fill(operands)
        bound.run()
        outputs = [np.array(y) for y in bound.outs]
        ceilings = {c.name: (float(c.work), block(c.call)) for c in perf.ceilings(case, component)}
        yield Timed(name, case.types, case.out_types(spec), case.attrs, operands, outputs, block(bound.call), ceilings,
                    spec.min_bytes(list(case.types), case.attrs), spec.flops(list(case.types), case.attrs), probe="product",
                    optional=_optional(component, case.types))


class GpuCall:
    """A kernel bound to memory of its own, its operands in place. `enqueue(stream)`; `outputs()` waits."""

    def __init__(self, component: Component, types: Sequence[TensorType], outs: Sequence[TensorType], attrs: Attrs,
                 operands: Sequence[np.ndarray]) -> None:
        device, self.stream = opened()
        scratch = component.scratch(types, attrs, 1) if component.scratch is not None else 0
        shared = dict(component.inplace)
        own = [t for i, t in enumerate(outs) if i not in shared or shared[i] >= len(types)]
        self._arena = Arena(sum(aligned(t.nbytes) for t in (*types, *own)) + aligned(scratch), name="operands")
        ins = [Operand(self._arena.take(t.nbytes).address, t) for t in types]
        self._outs = [Operand(ins[shared[i]].address, t) if i in shared and shared[i] < len(ins)
                      else Operand(self._arena.take(t.nbytes).address, t) for i, t in enumerate(outs)]
        for operand, x in zip(ins, operands):
            if x.nbytes:
                upload(operand.span, np.ascontiguousarray(x))
        self._constants: dict[Any, Arena] = {}
        region = self._arena.take(scratch) if scratch else None
        self._call = component.implementation(Gpu(device, region, constants=self._constants), ins, self._outs, attrs)
        device.synchronize()

    def enqueue(self) -> None:
        """Once, on the benchmarks' stream."""
        self._call(int(self.stream.handle))

    def outputs(self) -> list[np.ndarray]:
        """What the outputs hold."""
        self.stream.synchronize()
        return [from_device(download(o.span, *device_bytes(o.type)), o.type) if o.type.size else np.empty(o.type.shape) for o in self._outs]

    def free(self) -> None:
        """Give the memory back."""
        self.stream.synchronize()
        for arena in (self._arena, *self._constants.values()):
            arena.free()


def _on_gpu(component: Component, catalogue: Catalogue, nonce: str, pattern: str, clocks: Clocks,
            ceiling: cuda_perf.Probes) -> Iterator[Timed]:
    spec = spec_of(component)
    _, stream = opened()
    flush = Span(ceiling.arena.address, FLUSH_BYTES)

    def block(enqueue: Callable[[], None], times: int) -> Block:
        def run() -> tuple[float, Reading]:
            for _ in range(LEAD):
                fill(flush, 0, stream)
            return timed_block(stream, [enqueue] * times, clocks, flush)
        return run

    def forward(op: str, xs: Sequence[np.ndarray], attrs: Attrs) -> Sequence[np.ndarray]:
        kernel = _forward(component, catalogue, op)
        types = tuple(TensorType(x.shape, "i32" if x.dtype.kind == "i" else "bf16") for x in xs)
        outs = spec_of(kernel).infer(types, attrs)
        call = GpuCall(kernel, types, outs, attrs, [to_device(x, t) for x, t in zip(xs, types)])
        call.enqueue()
        found = call.outputs()
        call.free()
        return found

    for timed in (c for c in (*cuda_calls.timed(component), *cuda_calls.compared(component)) if fnmatchcase(c.name, pattern)):
        rng = generator(nonce, component.id, "bench", timed.name)
        operands = [contents(t, rng, timed.least, timed.below) for t in timed.types]
        if follows(component.op or "", len(operands)):
            drawn = [from_device(x, t) for x, t in zip(operands, timed.types)]
            operands = [b if x is y else to_device(round_to(x, "bf16") if t.dtype == "bf16" else x, t)
                        for x, y, b, t in zip(fitted(component.op or "", drawn, timed.attrs, forward), drawn, operands, timed.types)]
            del drawn
        outs = spec.infer(timed.types, timed.attrs)
        call = GpuCall(component, timed.types, outs, timed.attrs, operands)
        call.enqueue()
        ceilings = {name: (work, block(lambda enqueue=enqueue: enqueue(stream), 1))  # type: ignore[misc]
                    for name, (work, enqueue) in ceiling.calls.items()}
        yield Timed(timed.name, timed.types, outs, timed.attrs, operands, call.outputs(), block(call.enqueue, LAUNCHES), ceilings,
                    spec.min_bytes(list(timed.types), timed.attrs), spec.flops(list(timed.types), timed.attrs), timed.tensor_cores,
                    _optional(component, timed.types), read=clocks.read)
        call.free()
