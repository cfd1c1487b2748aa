"""An outside candidate in CUDA C++: device code alone, which the engines of the GPU launch themselves. Floor 7.

There is no host code of the candidate, so nothing of it can reach clock, stream or judge: operands lie between guards, calls are captured
and replayed, launches are timed by events with L2 emptied (gates/cuda). The kernel is `extern "C"`. Its parameters are pointers to the
inputs, pointers to the outputs, then each size as `long long`, in the order of component.toml.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alpha.backends.cuda import launches
from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Call, Calls
from alpha.backends.cuda.lib import SM90A, Gpu, Operand
from alpha.component import Component, Envelope
from alpha.cuda_runtime.compile import Cubin, Source, compile_kernel
from alpha.errors import InputError
from alpha.gates.outside.signature import Dimension, Signature, evaluated
from alpha.ops.spec import Sample
from alpha.types import Attrs


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Component.implementation: launches `kernel` of `file`. grid, block: up to three expressions of the sizes; shared: bytes of dynamic
    shared memory."""

    file: Path
    kernel: str
    signature: Signature
    grid: tuple[Dimension, ...]
    block: tuple[Dimension, ...]
    shared: int = 0

    def __call__(self, gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
        found = self.signature.sizes_of([x.type for x in ins])
        sizes = {name: found[name] for name in self.signature.sizes}
        grid, block = ((*(evaluated(str(d), sizes) for d in dimensions), 1, 1)[:3] for dimensions in (self.grid, self.block))
        arguments = [*(ctypes.c_uint64(x.address) for x in (*ins, *outs)), *(ctypes.c_int64(n) for n in sizes.values())]
        of = launches.kernel(str(self.file), self.kernel, {}, shared_bytes=self.shared)
        return of.prepare((grid[0], grid[1], grid[2]), (block[0], block[1], block[2]), arguments)


class Compiled(Binaries):
    """The candidate's one compiled file, named without its folder; with it what else evidence binds to."""

    def __init__(self, file: Path, others: Callable[[], Mapping[str, str]]) -> None:
        super().__init__(lambda: [Source.of(str(file))])
        self._others = others

    def __call__(self) -> Mapping[str, str]:
        compiled = {f"cubin {Path(name.split()[0]).name}": digest for name, digest in super().__call__().items()}
        return {**self._others(), **compiled}


def component(component_id: str, op: str, launcher: Launcher, envelope: Envelope, attributes: dict[str, object],
              others: Callable[[], Mapping[str, str]], further: Callable[[np.random.Generator], Iterable[Sample]] | None) -> Component:
    """The component for the engines of the GPU. The timed call has the sizes that component.toml says, each at its most by default.
    `further`: samples beyond those of its row."""
    signature, dtype = launcher.signature, envelope.dtypes[0]
    sizes = signature.timed() or {name: s.near(s.most) for name, s in signature.sizes.items()}
    types = signature.types(sizes, dtype)
    ranges = [(o.least, evaluated(o.below, sizes)) for o in signature.inputs if o.dtype]
    call = Call("timed", types, attributes, least=max((least for least, _ in ranges), default=0),
                below=min((below for _, below in ranges), default=1))
    return Component(id=component_id, kind="kernel", backend="cuda", op=op, implementation=launcher, requires=SM90A, envelope=envelope,
                     binaries=Compiled(launcher.file, others), calls=Calls(further=further or (lambda rng: ()), timed=(call,)))


def compiled(launcher: Launcher) -> Cubin:
    """The candidate's machine code; needs no GPU. CompileError with the compiler's words, MachineError without the compiler."""
    found = compile_kernel(Source.of(str(launcher.file)))
    if launcher.kernel not in found.resources:
        raise InputError("the candidate has no kernel of this name", came=launcher.kernel, expected=", ".join(sorted(found.resources)),
                         do='declare it `extern "C" __global__`')
    return found

