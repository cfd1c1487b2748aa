"""What a gate needs to know of a component: its cases, and how to call it. Floor 7.

Every input derives from (nonce, component, purpose) through a Philox generator keyed by a hash, so a record can be recomputed from its
nonce alone, on a machine that has no back end for the component.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import prod
from typing import Any, Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from alpha.component import Component
from alpha.errors import AlphaError, GraphError, ShapeError
from alpha.gates.summarise import summarise
from alpha.ops.numerics import round_to
from alpha.ops.spec import Arrays, OpSpec, Sample
from alpha.ops.table import row
from alpha.registry.cases import CaseRecord
from alpha.registry.digest import component_digests
from alpha.registry.gpu import class_here, gpu_environment
from alpha.registry.machine import environment, machine_class
from alpha.registry.package import Package
from alpha.registry.record import MAX_BYTES, Record, canonical
from alpha.types import NUMPY, Attrs, TensorType

MULTIBLOCK_ELEMENTS = 80_000
"""A grown case has at least this many elements in and out together, so that kernels cut it into several ragged blocks."""

GROWN_FLOPS = 8_000_000
"""...or this much arithmetic: the oracle's sequential walk over it must stay in the tens of milliseconds."""


RESERVED = 200
"""Bytes of an evidence line kept for its content hash and the seconds that it took."""


def fresh_nonce() -> str:
    """128 bits from the operating system's entropy, in hex."""
    return secrets.token_hex(16)


def generator(nonce: str, *purpose: str) -> np.random.Generator:
    """The generator of one purpose: Philox keyed by sha256 of the nonce and the names."""
    digest = hashlib.sha256("\0".join((nonce, *purpose)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], np.uint64)))


@cache
def pin_blas() -> None:
    """BLAS on one thread for the rest of this process: the workers of the CPU back end are what makes kernels parallel."""
    threadpool_limits(limits=1, user_api="blas")


@dataclass(frozen=True)
class Case:
    """One kernel case. `dtype`: the compute type. `inputs`: float64 arrays already rounded to their `types`, integers as the sample
    gives them."""

    name: str
    dtype: str
    exact: bool
    inputs: Arrays
    types: tuple[TensorType, ...]
    attrs: Attrs
    wrt: tuple[int, ...] | None = None

    def arrays(self) -> list[np.ndarray]:
        """Fresh contiguous arrays in the NumPy dtypes that a CPU kernel is given."""
        return [np.array(x, dtype=NUMPY[t.dtype], order="C") for x, t in zip(self.inputs, self.types)]

    def out_types(self, spec: OpSpec) -> tuple[TensorType, ...]:
        return spec.infer(self.types, self.attrs)

    def oracle(self, spec: OpSpec) -> Arrays:
        """The oracle's float64 outputs."""
        with np.errstate(all="ignore"):
            return tuple(np.asarray(y) for y in spec.oracle(*self.inputs, **self.attrs))


def case_of(sample: Sample, dtype: str, *, spec: OpSpec | None = None, exact: bool = False, name: str | None = None) -> Case:
    """A sample as a case whose compute type is `dtype`: float operands are rounded first, to it or, where the row `spec` keeps an
    operand in another type (statistics, gradient buffers), to that."""
    inputs, types = [], []
    for i, x in enumerate(sample.inputs):
        x = np.asarray(x)
        if x.dtype.kind == "f":
            own = spec.operand_dtype(i, dtype) if spec else dtype
            inputs.append(round_to(x, own))
            types.append(TensorType(x.shape, own))
        else:
            inputs.append(x)
            types.append(TensorType(x.shape, {"i4": "i32", "i8": "i64", "b1": "bool"}[x.dtype.str[1:]]))
    return Case(name or sample.name, dtype, exact, tuple(inputs), tuple(types), sample.attrs, sample.wrt)


def warm_up(component: Component) -> None:
    """Start what a component needs once per process (BLAS pinned, worker threads, the GPU's driver), so that nothing starts later."""
    pin_blas()
    subjects_of(component).warm_up()


def is_gpu(component: Component) -> bool:
    """Whether a component's kernels run on another back end than the CPU's."""
    return component.backend not in ("cpu", "host")


def subjects_of(component: Component) -> Any:
    """The module alpha.gates.<backend>.subjects: `warm_up`, `samples`, `refused`, `bind`.

    Found by name, so that evidence of one back end's kernels does not bind to another's; registry.gates.SUBJECTS names it for digests.
    """
    return importlib.import_module(f"alpha.gates.{component.backend if is_gpu(component) else 'cpu'}.subjects")


def spec_of(component: Component) -> OpSpec:
    return row(component.op or "")


def samples(component: Component, nonce: str, which: str) -> list[Sample]:
    """The row's samples ('samples' or 'exact') for this nonce; two of one name are a GraphError."""
    make = getattr(spec_of(component), which)
    found = [] if isinstance(make, str) else list(make(generator(nonce, component.id, which)))
    found += subjects_of(component).samples(component, generator(nonce, component.id, which, component.backend), which)
    if len({s.name for s in found}) != len(found):
        raise GraphError("two samples of a row share a name", came=sorted(s.name for s in found), do=f"rename one in row {component.op}")
    return found


def cases(component: Component, nonce: str) -> list[Case]:
    """Every parity case: samples and exact samples in the first dtype of the envelope, one grown sample that spans several blocks,
    and at most six of them again in f64 where the envelope has it."""
    first, *others = component.envelope.dtypes
    spec = spec_of(component)
    inside = [s for s in samples(component, nonce, "samples") if accepts(component, s, first)]
    found = [case_of(s, first, spec=spec) for s in inside]
    grown = grow(component, inside, generator(nonce, component.id, "grow"), elements=MULTIBLOCK_ELEMENTS, flops=GROWN_FLOPS)
    if grown is not None:
        found.append(case_of(grown, first, spec=spec))
    found += [case_of(s, first, spec=spec, exact=True, name=f"exact:{s.name}") for s in samples(component, nonce, "exact")
              if accepts(component, s, first)]
    if "f64" in others:
        again = generator(nonce, component.id, "f64").permutation(len(inside))[:6]
        found += [case_of(inside[i], "f64", spec=spec, name=f"{inside[i].name}.f64") for i in sorted(again)]
    return found


def accepts(component: Component, sample: Sample, dtype: str) -> bool:
    """Whether the sample lies inside the component's envelope in this dtype."""
    return component.envelope.why_outside(case_of(sample, dtype, spec=spec_of(component)).types, sample.attrs) is None


def grow(component: Component, among: Sequence[Sample], rng: np.random.Generator, *, elements: int, flops: int, ragged: bool = True,
         most: int = 4096) -> Sample | None:
    """A larger sample made from one of the row's own: its dimension sizes are multiplied, one distinct size after another, as long as
    the row's shape rule and the envelope accept it, until `elements` or `flops` is reached. Contents repeat with 5 % noise; integer
    operands repeat; attributes that name places in the first operand are stretched with it. None if no sample grows.
    """
    spec, dtype = spec_of(component), component.envelope.dtypes[0]
    for sample in sorted(among, key=lambda s: -sum(np.size(x) for x in s.inputs)):
        shapes = [np.shape(x) for x in sample.inputs]
        grew = False
        for _ in range(24):
            sizes = list(dict.fromkeys(n for shape in shapes for n in shape))
            stepped = False
            for n in sizes:
                if _work(spec, component, sample, shapes, dtype, elements, flops):
                    break
                for bigger in ((2 * n + 1, 2 * n) if ragged else (2 * n,)):
                    trial = [tuple(bigger if m == n else m for m in shape) for shape in shapes]
                    if bigger <= most and _legal(component, spec, sample, trial, dtype):
                        shapes, grew, stepped = trial, True, True
                        break
            if not stepped:
                break
        if grew and _work(spec, component, sample, shapes, dtype, elements // 4, flops // 4):
            inputs = tuple(_content(np.asarray(x), shape, rng) for x, shape in zip(sample.inputs, shapes))
            attrs = sample.attrs if spec.stretch is None else spec.stretch(sample.attrs, shapes[0][0] // np.shape(sample.inputs[0])[0])
            return replace(sample, name=f"grown:{sample.name}", inputs=inputs, attrs=dict(attrs), wrt=sample.wrt)
    return None


def _types(spec: OpSpec, sample: Sample, shapes: Sequence[tuple[int, ...]], dtype: str) -> tuple[TensorType, ...]:
    return tuple(TensorType(tuple(shape), t.dtype) for shape, t in zip(shapes, case_of(sample, dtype, spec=spec).types))


def _legal(component: Component, spec: OpSpec, sample: Sample, shapes: Sequence[tuple[int, ...]], dtype: str) -> bool:
    types = _types(spec, sample, shapes, dtype)
    try:
        spec.infer(types, sample.attrs)
    except ShapeError:
        return False
    return component.envelope.why_outside(types, sample.attrs) is None


def _work(spec: OpSpec, component: Component, sample: Sample, shapes: Sequence[tuple[int, ...]], dtype: str, elements: int,
          flops: int) -> bool:
    types = _types(spec, sample, shapes, dtype)
    total = sum(t.size for t in types) + sum(t.size for t in spec.infer(types, sample.attrs))
    return total >= elements or spec.flops(types, sample.attrs) >= flops


def _content(x: np.ndarray, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    repeats = [-(-n // max(1, m)) for n, m in zip(shape, x.shape)]
    y = np.tile(x, repeats)[tuple(slice(n) for n in shape)] if x.ndim else x
    return y * (1 + 0.05 * rng.standard_normal(y.shape)) if y.dtype.kind == "f" else y.copy()


class Bound(Protocol):
    """A kernel bound to buffers of its own, ready to be called again and again with other contents."""

    @property
    def ins(self) -> list[np.ndarray]: ...
    @property
    def outs(self) -> list[np.ndarray]: ...
    def fill(self, contents: Iterable[np.ndarray]) -> None:
        """Write contents into the input buffers."""
    def run(self, garbage: int = 0xFF, *, keep: int | None = None) -> None:
        """Poison outputs (but number `keep`) and scratch (0xFF: NaN in every float type), then call once."""
    def call(self) -> None:
        """Call once."""


def poison(x: np.ndarray, garbage: int = 0xFF) -> None:
    """Fill an array's bytes."""
    np.ndarray((x.nbytes,), np.uint8, x.data)[...] = garbage if x.dtype != np.bool_ else 1


def bind(component: Component, case: Case, *, workers: int = 1, offset: int = 0,
         share: tuple[int, int] | None = None) -> Any:
    """Bind a kernel to fresh buffers that hold NaN (integers: zero) while it binds: a binder that reads data reads garbage. A `Bound`.

    `offset`: elements (GPU: 16 bytes) past a 256-byte boundary of every buffer. `share`: (output, input) that get the same memory.
    `workers`: of the CPU.
    """
    more = {"workers": workers} if not is_gpu(component) else {}
    outs = case.out_types(spec_of(component))
    return subjects_of(component).bind(component, case.types, outs, case.attrs, offset=offset, share=share, **more)


def once(component: Component, case: Case, *, workers: int = 1, offset: int = 0, garbage: int = 0xFF) -> list[np.ndarray]:
    """One call on fresh buffers; the outputs."""
    bound = bind(component, case, workers=workers, offset=offset)
    bound.fill(case.arrays())
    bound.run(garbage)
    return bound.outs


def same_bits(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    """Whether two tuples of arrays agree in every bit."""
    return len(a) == len(b) and all(x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b))


def checksum(arrays: Sequence[np.ndarray]) -> str:
    """sha256 over shapes, dtypes and bytes."""
    h = hashlib.sha256()
    for x in arrays:
        h.update(f"{x.dtype}{x.shape}".encode())
        h.update(np.ascontiguousarray(x).tobytes())
    return h.hexdigest()


def tasks() -> int:
    """Number of threads of this process as the operating system counts them (Python's count where it does not say)."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


def short(x: float, digits: int = 5) -> float:
    """A float with few digits, so that evidence lines stay short; non-finite values pass through."""
    return float(f"{x:.{digits}g}")


def crash(error: BaseException) -> str:
    """One line that names an exception, for a case's note."""
    text = error.what if isinstance(error, AlphaError) else str(error)
    return f"{type(error).__name__}: {text}".replace("\n", " ")[:120]


@cache
def _package() -> Package:
    """The source files as they were when this process first looked: it runs what it then imported."""
    return Package()


def make_record(component: Component, gate: str, nonce: str, declared: int, found: Sequence[CaseRecord],
                probes: Sequence[Sequence[object]] = (), **more: str) -> Record:
    """The record of one measure, with today's digests and this machine's class. Many cases share entries (summarise.py)."""
    if len(found) == declared:
        found = summarise(found)
        declared = len(found)
    digests = component_digests(component, gate, package=_package())
    here = {k: v for k, v in environment().items() if k in ("python", "numpy", "blas", "cpu", "processor")}
    here |= gpu_environment() if component.backend == "cuda" and component.kind == "kernel" else {}
    machine = class_here(component) or machine_class()
    record = Record(component=component.id, gate=gate, machine=machine.key, digests=digests, nonce=nonce, declared=declared,
                    cases=[c.plain() for c in found], probes=[list(p) for p in probes], environment={**here, **more})
    if len(canonical(asdict(record))) <= MAX_BYTES - RESERVED:
        return record
    # only the notes of failures are this long
    brief = [{k: v[:40] if k in ("note", "shape") else v for k, v in c.items()} for c in record.cases]
    return replace(record, cases=brief)


def size(types: Sequence[TensorType]) -> int:
    """Elements of all tensors together."""
    return sum(prod(t.shape) for t in types)
