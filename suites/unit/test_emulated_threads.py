"""What stands for CUDA on a CPU: the text that is made of device code, what a thread finds that nothing stands for, and a compiler that
refuses or is not there."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import host_library as host_library_module
import numpy as np
import pytest
from emulated_threads import HEADERS, INSTRUCTIONS, ORDERS, PLACE, Host, Launch, aligned, at, entries, inlined, placed, translated
from host_library import host_library

from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.compile import Source

DEVICE = """\
#pragma once
__device__ __forceinline__ int known(int x) {
    int y;
    asm volatile("add.s32 %0, %1, 1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ int unknown(int x) { asm("trap;"); return x; }
"""
KERNEL = """\
#include "part.cuh"
#include "part.cuh"
extern "C" __global__ void __launch_bounds__(64, (1 + 1)) made(const int* from, int* to, int strange) {
    extern __shared__ int shared[];
    shared[threadIdx.x] = from[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    const int other = shared[blockDim.x - 1 - threadIdx.x];
    to[blockIdx.x * blockDim.x + threadIdx.x] = strange ? unknown(other) : known(__shfl_xor_sync(0xffffffffu, other, 1)) * SCALE;
}
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    (tmp_path / "part.cuh").write_text(DEVICE)
    (tmp_path / "made.cu").write_text(KERNEL)
    return tmp_path


def launched(kernels: Path, x: np.ndarray, *, strange: bool = False, order: int = 0) -> np.ndarray:
    """What the kernel makes of blocks of 64, int32."""
    to = aligned(x.shape, np.int32)
    with nvcc.compiling(kernels=kernels):
        library = Host(instructions={"known": "y = x + 1;"}).library(Source.of("made.cu", {"SCALE": 3}))
    arguments = [ctypes.c_uint64(at(x)), ctypes.c_uint64(at(to)), np.int32(strange)]
    Launch(library["emu_made"], "made", (len(x) // 64, 1, 1), 64, arguments, 256).run(order)
    return to


@pytest.mark.parametrize("order", ORDERS)
def test_a_kernel_runs_in_every_order(kernels: Path, order: int) -> None:
    x = placed(np.random.default_rng(1).integers(-99, 99, 256).astype(np.int32))
    want = (x.reshape(4, 64)[:, ::-1][:, np.arange(64) ^ 1].reshape(-1) + 1) * 3
    assert (launched(kernels, x, order=order) == want).all()


def test_ptx_that_nothing_stands_for_ends_the_process_with_its_name(kernels: Path) -> None:
    """Not before it is reached: the others of these tests run with it in the same file."""
    code = ("import sys; from pathlib import Path; import numpy as np; from emulated_threads import placed; "
            "from test_emulated_threads import launched; launched(Path(sys.argv[1]), placed(np.zeros(64, np.int32)), strange=True)")
    support, unit = HEADERS[0].parent, Path(__file__).parent
    paths = os.pathsep.join(map(str, (nvcc.REPOSITORY, support, unit)))
    launched(kernels, placed(np.zeros(64, np.int32)))  # compiled here, where a test without a compiler is skipped
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code, str(kernels)], env=environment, capture_output=True, text=True)
    assert done.returncode == -6 and "PTX of unknown, for which nothing stands. do: give it an entry" in done.stderr, done.stderr


def test_every_entry_is_of_a_function_of_the_device_code() -> None:
    text = "".join(path.read_text() for path in (nvcc.KERNELS / "common").glob("*.cuh"))
    assert all(f" {name}(" in text for name in INSTRUCTIONS)


def test_ptx_of_another_shape_is_refused() -> None:
    for text in ('__forceinline__ int f() { asm goto("x;"); }', 'asm("x;");', '__forceinline__ int f() { asm("x;") ; }'):
        with pytest.raises(ValueError, match="inline PTX that is not one statement"):
            translated(text)


def test_lines_say_where_they_stand_and_entries_leave_that_out(kernels: Path) -> None:
    with nvcc.compiling(kernels=kernels):
        text = inlined(kernels / "made.cu", placed=True)
    places = [PLACE.match(line) for line in text.splitlines()]
    assert [(found[1], int(found[2])) for found in places if found] == [
        *(("part.cuh", n) for n in range(2, 8)), *(("made.cu", n) for n in range(3, 10))]
    (entry,) = entries(translated(text))
    assert "made(*(const int**)a[0], *(int**)a[1], *(int*)a[2])" in entry


def test_a_compiler_that_refuses_is_no_verdict(kernels: Path) -> None:
    """Gates take an exception for a kernel's fault: this is none of Exception's."""
    (kernels / "part.cuh").write_text(DEVICE.replace("int y;", "int y"))
    with pytest.raises(pytest.fail.Exception, match=r"g\+\+ does not compile .*-DSCALE=3(.*\n)*.*error") as refused:
        launched(kernels, placed(np.zeros(64, np.int32)))
    assert not isinstance(refused.value, Exception)


def test_without_a_compiler_nothing_was_run(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(kernels))
    with pytest.raises(pytest.skip.Exception, match=r"NOT_RUN: no g\+\+"):
        launched(kernels, placed(np.zeros(64, np.int32)))


def test_what_is_kept_goes_by_text_flags_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library_module, "KEPT", tmp_path)
    made: list[Mapping[str, str]] = []
    compiled = host_library_module.compiled

    def counted(folder: Path, files: Mapping[str, str], *flags: str) -> Path:
        made.append(files)
        return compiled(folder, files, *flags)

    monkeypatch.setattr(host_library_module, "compiled", counted)

    def built(text: str, *flags: str) -> int:
        host_library({"host.cpp": text}, *flags)
        return len(made)

    one, two = 'extern "C" int f() { return 1; }', 'extern "C" int f() { return 2; }'
    assert [built(one), built(one), built(two), built(one, "-g1"), built(two)] == [1, 1, 2, 3, 3]
    monkeypatch.setattr(host_library_module, "_version", lambda compiler: "another")
    assert built(one) == 4
    assert len(list(tmp_path.iterdir())) == 4 and all(path.suffix == ".so" for path in tmp_path.iterdir()), "nothing half written stays"
