"""Device code on a CPU: the CUDA C++ of kernels/, made into C++ for g++, its threads fibers (emulated_threads.h).

A compiled file becomes one text: what it includes from kernels/ stands in its place, each inline PTX is replaced by C++ that does the same
(INSTRUCTIONS), dynamic shared memory is a pointer, and every kernel gets an entry that takes its arguments as cuLaunchKernelEx does. The
wrappers of alpha/backends/cuda/kernels then launch it on addresses of host memory (`on_threads`). Tests hold the arithmetic of the
device code so, its indices and its barriers, without a GPU.

Limits. Kernels on tensor cores are not emulated: a thread that comes to PTX without an entry ends the process with a word to stderr. Blocks
run one after the other and a thread until it waits, in one of three orders; copies land at once. So what hangs on the time that
something takes does not show, nor an order of two stores. Approximate functions are exact ones, so bits are not those of a GPU.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_library import host_library

from alpha.backends.cuda import launches
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.launch import Dim3, _value

INSTRUCTIONS = {
    # vector.cuh: caches change no value, and an access of 16 or 8 bytes is one of as many bytes
    "load16": "memcpy(&r, p, 16);",
    "load8": "memcpy(&r, p, 8);",
    "store16": "memcpy(p, &r, 16);",
    "store8": "memcpy(p, &r, 8);",
    "store16_once": "memcpy(p, &r, 16);",
    "store8_once": "memcpy(p, &r, 8);",
    "unpack_anew": "",  # a word to the compiler of registers
    # copy.cuh: a copy has landed when it is asked for, the earliest that it may; groups have nothing to wait for
    "copy_async": "emu_copy(slot, from, bytes);",
    "copy_commit": "",
    "copy_wait": "",
    "read_slot": "memcpy(&r, emu_dynamic + slot, 16);",
    # bf16.cuh: two elements in a word
    "pack_bf16": "packed = emu_bf16(low) | (emu_bf16(high) << 16);",
    "max_bf16": "m = emu_max_bf16(a, b) | (emu_max_bf16(a >> 16, b >> 16) << 16);",
    # math.cuh: exact where the GPU approximates; subnormal results are zero there (.ftz)
    "exp2_approx": "y = exp2f(x); if (fabsf(y) < 1.17549435e-38f) y = 0;",
    "reciprocal_approx": "y = 1.0f / x;",
    # fence.cuh
    "named_barrier_sync": "emu_named_barrier(id, threads);",
    "grid_dependency_wait": "",  # grids follow one another
    "grid_dependency_launch": "",
}
"""Function of kernels/common that holds inline PTX -> the C++ that stands for it, in that function's own names."""

HEADERS = tuple(Path(__file__).with_name(name) for name in ("emulated_threads.h", "fibers.h"))
FLAGS = ("-g1", "-Wl,-Bsymbolic", "-ffp-contract=fast", "-mfma")
"""Besides those of host_library. The library's own fibers are to be called (fibers.h); products and sums are fused, as nvcc fuses them."""
ORDERS = (0, 1, 2)
"""Of a launch: threads and blocks forwards; blocks and warps backwards, one warp far ahead; blocks backwards alone."""
PLACE = re.compile(r"/\*(\S+):(\d+)\*/ ")
"""Begins a line of `placed` text: the file under kernels/ and the line there."""
ENTRY = "emu_"
"""Begins the name of a kernel's entry."""

_INCLUDE = re.compile(r'\s*#include "(.+)"')
_ELSEWHERE = ("#pragma once", "#include <cuda")
"""Lines without a use: every file is there once, and what CUDA's headers declare stands in emulated_threads.h."""
_FUNCTION = re.compile(r"__forceinline__ [\w:]+\*? (\w+)\(")
_PTX = re.compile(r'\basm( volatile)?\((?:[^()"]|"(?:\\.|[^"\\])*"|\((?:[^()]|\([^()]*\))*\))*\);', re.S)
_SHARED = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
_KERNEL = 'extern "C" __global__ void'
_BOUNDS = re.compile(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)")


@dataclass(frozen=True)
class Host:
    """How sources become a library of the host.

    `instructions`: what stands for PTX, beside INSTRUCTIONS. `prelude`: C++ before the sources. `rewritten`: the last word on the text of a
    source, before its PTX is replaced. `placed`: whether each line begins with its PLACE. `build`: files (host.cpp includes the others) and
    flags of g++ -> a loaded library.
    """

    instructions: Mapping[str, str] = field(default_factory=dict)
    prelude: str = ""
    rewritten: Callable[[str], str] = str
    placed: bool = False
    build: Callable[..., ctypes.CDLL] = host_library

    def library(self, source: Source) -> ctypes.CDLL:
        """What g++ makes of a source in the folder that nvcc compiles from (`compiling`)."""
        text = translated(self.rewritten(inlined(nvcc.KERNELS / source.path, placed=self.placed)), {**INSTRUCTIONS, **self.instructions})
        whole = "\n".join([f'#include "{HEADERS[0].name}"', self.prelude, text, *entries(text)])
        files = {header.name: header.read_text(encoding="utf-8") for header in HEADERS}
        return self.build({**files, "host.cpp": whole}, *FLAGS, *(f"-D{name}={value}" for name, value in source.defines))


def inlined(path: Path, *, placed: bool = False) -> str:
    """A file under kernels/ with what it includes from there in place of each first #include."""
    seen: set[Path] = set()

    def lines(of: Path) -> Iterator[str]:
        if of in seen:
            return
        seen.add(of)
        for number, line in enumerate(of.read_text(encoding="utf-8").splitlines(), 1):
            if include := _INCLUDE.match(line):
                yield from lines((of.parent / include[1]).resolve())
            elif not any(word in line for word in _ELSEWHERE):
                yield f"/*{of.relative_to(nvcc.KERNELS)}:{number}*/ {line}" if placed else line

    return "\n".join(lines(path.resolve()))


def translated(text: str, instructions: Mapping[str, str] = INSTRUCTIONS) -> str:
    """`text` without PTX: what stands for it is that of the function in which it is. Without an entry it ends the process when it is
    reached, not before: a file may hold functions that no emulated kernel calls. ValueError for PTX in a shape that is not known."""

    def standing(found: re.Match[str]) -> str:
        function = _FUNCTION.findall(text, 0, found.start())[-1:]
        if not function:
            return found[0]
        unknown = f'emu_refuse("PTX of {function[0]}, for which nothing stands", "give it an entry in INSTRUCTIONS of emulated_threads.py")'
        return instructions.get(function[0], unknown) + ";"

    made = _PTX.sub(standing, text)
    if left := re.search(r".*\basm\b.*", made):
        raise ValueError(f"inline PTX that is not one statement `asm(...);` in a __forceinline__ function: {left[0].strip()}")
    return _SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(emu_dynamic);", made)


def entries(text: str) -> list[str]:
    """For each kernel the C function that launches it: addresses of its arguments, grid, threads, bytes of shared memory, order."""
    found = []
    for begin in (kernel.end() for kernel in re.finditer(re.escape(_KERNEL), text)):
        head = _BOUNDS.sub("", PLACE.sub("", text[begin : text.index("{", begin)])).strip()
        name, parameters = head.rstrip(")").split("(", 1)
        types = (re.sub(r"\s*\b\w+$", "", p.strip().removeprefix("const __grid_constant__ ")) for p in parameters.split(","))
        arguments = ", ".join(f"*({of}*)a[{place}]" for place, of in enumerate(types))
        found.append(f'extern "C" void {ENTRY}{name}(void** arguments, unsigned x, unsigned y, unsigned z, unsigned threads, '
                     f"size_t shared, int order) {{\n"
                     f"    emu_launch([](void* given) {{ void** a = (void**)given; {name}({arguments}); }}, arguments, x, y, z, threads, "
                     f"shared, order);\n}}")  # fmt: skip
    return found


class Launch:
    """A kernel with grid, block and arguments, on addresses of the host."""

    def __init__(self, entry: Any, name: str, grid: Dim3, threads: int, arguments: Sequence[Any], shared_bytes: int) -> None:
        self.name, self._entry, self._values = name, entry, [_value(a, name, place) for place, a in enumerate(arguments)]
        self._pointers = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))
        self._shape = (*map(ctypes.c_uint, (*grid, threads)), ctypes.c_size_t(shared_bytes))

    def run(self, order: int = 0) -> None:
        """Run it to its end, its threads in one of ORDERS."""
        self._entry(self._pointers, *self._shape, ctypes.c_int(order))


def _at_once(launch: Launch, stream: Any) -> None:
    launch.run()


@contextmanager
def on_threads(*, host: Host | None = None, call: Callable[[Launch, Any], None] = _at_once) -> Iterator[None]:
    """Within it the wrappers of bandwidth-bound kernels (alpha/backends/cuda/kernels) make launches for the host, and need no GPU.

    `call(launch, stream)`: what it is to call one. Sources are those of the folder that nvcc compiles from; each is compiled once.
    """
    made: dict[Source, ctypes.CDLL] = {}
    making = host or Host()

    class Prepared(Launch):
        def __call__(self, stream: Any = None) -> None:
            call(self, stream)

    class Kernel:
        def __init__(self, source: Source, name: str, *, shared_bytes: int = 0) -> None:
            if source not in made:
                made[source] = making.library(source)
            self.name, self.shared_bytes, self._entry = name, shared_bytes, made[source][ENTRY + name]

        def prepare(self, grid: Dim3, block: Dim3, arguments: Sequence[Any], *, overlap_previous: bool = False) -> Prepared:
            assert block[1:] == (1, 1), f"{self.name}: emulated blocks are one-dimensional, came {block}"
            return Prepared(self._entry, self.name, grid, block[0], arguments, self.shared_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "compile_kernel", lambda source: source)  # what a Kernel here is made of
        patch.setattr(launches, "Kernel", Kernel)
        yield


def aligned(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array at a multiple of 256 bytes, as cuMemAlloc gives it; every byte is 0xFF, which is NaN in both types of floats."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * kind.itemsize
    raw = np.full(nbytes + 256, 0xFF, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes].view(kind).reshape(shape)


def placed(x: np.ndarray) -> np.ndarray:
    """A copy of an array at an address that kernels take."""
    kept = aligned(x.shape, x.dtype)
    kept[...] = x
    return kept


def at(x: np.ndarray) -> int:
    """The address of an array, which is to be kept while it is used."""
    return int(x.ctypes.data)
