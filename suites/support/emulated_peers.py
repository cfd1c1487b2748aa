"""Several emulated GPUs: collectives of kernels/collectives among processes, each of which runs the device code on its CPU.

The memory of all GPUs is one mapping, and IPC handles are places in it. The host side (the binders and
alpha/cuda_runtime/peers.py) is the real one. What emulated_threads.py and peers.h make of the device code is described there. Blocks run
one after the other, on every member in the same order. What hangs on two blocks of one GPU at a time does not show; no collective here has
that.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

PEERS = Path(__file__).with_name("peers.h")
AMONG_PEERS = {
    "load_acquire": "value=__atomic_load_n(flag,__ATOMIC_ACQUIRE); emu_look();",
    "store_release": "emu_flush(); __atomic_store_n(flag,value,__ATOMIC_RELEASE);",
    "load_relaxed": "value=__atomic_load_n(word,__ATOMIC_RELAXED); emu_look();",
    "store_relaxed": "__atomic_store_n(word,value,__ATOMIC_RELAXED);",
    "load_packet": "low=__atomic_load_n((const uint64_t*)p,__ATOMIC_RELAXED); if(emu_random()%4==0) emu_look(); "
                   "high=__atomic_load_n((const uint64_t*)p+1,__ATOMIC_RELAXED); emu_look();",
    "store_packet": "{unsigned first=emu_random()%2; __atomic_store_n((uint64_t*)p+first,first?high:low,__ATOMIC_RELAXED); emu_look(); "
                    "__atomic_store_n((uint64_t*)p+!first,first?low:high,__ATOMIC_RELAXED);}",
    "read16": "emu_read(&r,p,16);",
    "write16": "emu_write(p,&r,16);",
    "read2": "emu_read(&r,p,2);",
    "write2": "{uint16_t emu_half=value; emu_write(p,&emu_half,2);}",
    "global_timer": "{timespec t; clock_gettime(CLOCK_MONOTONIC,&t); now=1000000000ull*t.tv_sec+t.tv_nsec;}",
}
"""What stands for the instructions of kernels/common/peer.cuh and timer.cuh."""


GRANTED = 4096
"""Most allocations of a GPU."""

EACH = 512 << 20
"""Bytes of a GPU that runs a whole session of a small model."""


def shared_file(folder: Path, ranks: int, each: int = EACH) -> Path:
    """A file for the memory of GPUs whose ranks are no forks of one process."""
    path = folder / f"gpus-{ranks}"
    with open(path, "wb") as file:
        file.truncate(ranks * each)
    return path


class Memory:
    """The memory of all GPUs: one mapping in equal parts. Made before the ranks fork; or in each rank, of a `shared_file`."""

    def __init__(self, ranks: int, each: int, path: Path | None = None) -> None:
        if path is None:
            self.raw = mmap.mmap(-1, ranks * each, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        else:
            with open(path, "r+b") as file:
                self.raw = mmap.mmap(file.fileno(), ranks * each)
        self.start, self.each = ctypes.addressof(ctypes.c_char.from_buffer(self.raw)), each
        self.granted = np.frombuffer(self.raw, np.uint64).reshape(ranks, -1)[:, : 2 * GRANTED].reshape(ranks, GRANTED, 2)
        """[rank, allocation, (begin, end)]: at the begin of each GPU's memory."""

    def allocator(self, rank: int) -> Callable[[int], Any]:
        """What stands for cuMemAlloc on the GPU of a rank: memory full of NaN."""
        own, made = self.granted[rank], count()
        used = [self.start + rank * self.each + own.nbytes]
        own[:] = 0

        def allocate(nbytes: int) -> Any:
            at = -(-used[0] // 256) * 256
            used[0] = at + nbytes
            if used[0] > self.start + (rank + 1) * self.each:
                raise MemoryError
            ctypes.memset(at, 0xFF, nbytes)
            own[next(made)] = at, used[0]
            return _Allocation(at)

        return allocate

    def holds(self, at: int, nbytes: int) -> bool:
        """Whether these bytes lie in one allocation of a GPU."""
        begin, end = self.granted[(at - self.start) // self.each].T
        return bool(np.any((begin <= at) & (at + nbytes <= end)))


class _Allocation(int):
    def free(self) -> None:
        """Nothing: the mapping ends with the process."""


@contextmanager
def emulated_peers(memory: Memory, rank: int, kernels: Path) -> Iterator[Any]:
    """Within it this process has GPU `rank` of those that share `memory`, and launches what g++ made of the sources in this folder."""
    from emulated_gpu import emulated_gpu
    from emulated_kernels import emulated_kernels
    from emulated_threads import Host
    from host_library import KEPT, host_library

    from alpha.backends.cuda import launches
    from alpha.cuda_runtime import _bindings
    from alpha.train import forbidden

    def build(files: Mapping[str, str], *flags: str) -> ctypes.CDLL:
        """All ranks ask for the same files at a time: the first compiles. g++ stands for nvcc, which a session may start."""
        KEPT.mkdir(parents=True, exist_ok=True)
        with open(KEPT / ".lock", "w") as lock, pytest.MonkeyPatch.context() as outside:
            fcntl.flock(lock, fcntl.LOCK_EX)
            outside.setattr(forbidden._WATCH, "sessions", 0)
            return host_library(files, *flags)

    host = Host(instructions=AMONG_PEERS, prelude=PEERS.read_text(encoding="utf-8"), rewritten=_hasty, build=build)
    with emulated_gpu() as gpu, emulated_kernels(kernels, host) as chosen, pytest.MonkeyPatch.context() as patch:
        orders, operate = random.Random(7), launches.Operation.__call__

        def ordered(operation: Any, stream: Any = None) -> None:
            """All members call the same operations, but not all launch as many kernels in one."""
            chosen.append(orders.randrange(2))
            operate(operation, stream)
            chosen.pop()

        patch.setattr(launches.Operation, "__call__", ordered)
        pycuda, driver = gpu.pycuda(), gpu.driver()
        pycuda.mem_alloc = memory.allocator(rank)
        driver.cuCtxSynchronize = lambda: (pycuda.Context.synchronize(), (0,))[1]
        driver.cuMemGetAddressRange = lambda at: (0, at, 0)
        driver.cuIpcGetMemHandle = lambda at: (0, SimpleNamespace(reserved=(at - memory.start).to_bytes(64, "little")))
        driver.CUipcMemHandle = SimpleNamespace
        driver.CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=SimpleNamespace(value=1))
        driver.cuIpcOpenMemHandle = lambda handle, flags: (0, memory.start + int.from_bytes(handle.reserved, "little"))
        driver.cuIpcCloseMemHandle = lambda at: (0,)
        driver.cuMemsetD32Async = _filled
        plainly = driver.cuMemcpyDtoDAsync

        def copied(to: int, source: int, nbytes: int, stream: int) -> tuple[int]:
            """A driver refuses what does not lie in one allocation."""
            return plainly(to, source, nbytes, stream) if memory.holds(to, nbytes) and memory.holds(source, nbytes) else (1,)

        driver.cuMemcpyDtoDAsync = copied
        driver.cuGetErrorName = lambda status: (0, b"CUDA_ERROR_INVALID_VALUE")
        driver.cuGetErrorString = lambda status: (0, b"invalid argument")
        patch.setattr(_bindings, "pycuda_driver", lambda: pycuda)
        patch.setattr(_bindings, "driver", lambda: driver)
        yield gpu


def _hasty(text: str) -> str:
    """With few looks before a wait asks whether it should end: a look of 512 fibers takes its time."""
    assert text.count(SPINS) <= 1
    return text.replace(SPINS, "constexpr int SPINS = 2;")


SPINS = "constexpr int SPINS = 64;"


def _filled(at: int, word: int, n: int, stream: int) -> tuple[int]:
    np.frombuffer((ctypes.c_uint32 * n).from_address(at), np.uint32).fill(word)
    return (0,)


def among(ranks: int, function: Callable[..., Any], *arguments: Any, kernels: Path, each: int = 128 << 20,
          deadlines: Any = None, lost: bool = False, memory: Memory | None = None) -> list[Any]:
    """`function(peers, world, *arguments)` in a process for each rank; what each returned. AssertionError with the words of who fails.
    `lost`: the last rank is not to return; it is killed when the others have ended, and left out. `memory`: of a job before, in place of
    `each` bytes of a GPU: its pages are there already, and whoever allocates fills them with NaN anew."""
    from host_library import host_compiler

    from alpha.comm.segment import Segment
    from alpha.comm.words import exchanged
    from alpha.comm.world import WORLD, World
    from alpha.cuda_runtime.peers import Peers

    host_compiler()
    memory, segment = memory or Memory(ranks, each), Segment.create(ranks)
    children = []
    for rank in range(ranks):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.close(read)
                with os.fdopen(write, "wb") as pipe:
                    try:
                        with World(segment, rank, deadlines=deadlines) as world, emulated_peers(memory, rank, kernels):
                            peers = Peers(rank, ranks, partial(exchanged, world.group(WORLD)))
                            found = ("ended", function(peers, world, *arguments))
                    except BaseException:
                        found = ("failed", traceback.format_exc())
                    pickle.dump(found, pipe)
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(write)
        children.append((pid, read))
    results = []
    for pid, read in children:
        if lost and pid == children[-1][0]:
            os.kill(pid, signal.SIGKILL)
        with os.fdopen(read, "rb") as pipe:
            body = pipe.read()
        os.waitpid(pid, 0)
        results.append(pickle.loads(body) if body else ("failed", "the process ended without a word"))
    segment.close()
    results = results[:-1] if lost else results
    wrong = [text for word, text in results if word == "failed"]
    assert not wrong, "\n".join(wrong)
    return [found for _, found in results]
