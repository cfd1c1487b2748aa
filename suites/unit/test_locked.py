"""Page-locked memory in bulk: zeros, page-locked for exactly as long as someone holds it, kept from children, refused by name."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from alpha.cuda_runtime import locked as module
from alpha.cuda_runtime.locked import locked
from alpha.errors import MachineError
from suites.support.emulated_gpu import EmulatedGpu, emulated_gpu


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as found:
        yield found


def flags_of(array: np.ndarray) -> set[str]:
    """What the kernel says of the mapping that holds an array (proc(5), VmFlags)."""
    here = False
    with open("/proc/self/smaps", encoding="ascii") as file:
        for line in file:
            first, _, rest = line.partition(" ")
            if "-" in first and not first.endswith(":"):
                start, stop = (int(x, 16) for x in first.split("-"))
                here = start <= array.ctypes.data < stop
            elif here and first == "VmFlags:":
                return set(rest.split())
    raise AssertionError("no mapping holds the array")


@pytest.mark.parametrize("nbytes", [1, 4097, module.STRETCH + 5, 3 * module.STRETCH])
def test_zeros_that_are_there_and_locked_while_anything_holds_them(nbytes: int, gpu: EmulatedGpu) -> None:
    room = locked(nbytes)
    assert room.shape == (nbytes,) and room.dtype == np.uint8 and gpu.is_pinned(room) and not room.any()
    part = room[nbytes // 2 :]
    del room
    gc.collect()
    assert gpu.is_pinned(part)
    part[...] = 7
    del part
    gc.collect()
    assert not gpu.places


def test_every_page_is_filled(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is not there yet would be filled by the driver, one after the other."""
    monkeypatch.setattr(module, "STRETCH", 8 * mmap.PAGESIZE)
    array = np.full(83 * mmap.PAGESIZE + 1, 7, np.uint8)
    module._fill(array)
    assert not array[:: mmap.PAGESIZE].any() and np.count_nonzero(array) == array.size - 84


def test_children_get_none_of_it(gpu: EmulatedGpu) -> None:
    """A child that shared the pages would make the next write here go to copies, and the device write to the old ones."""
    assert "dc" in flags_of(locked(1 << 22))


def test_huge_pages_are_asked_for_where_the_machine_has_them(gpu: EmulatedGpu) -> None:
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled"):
        pytest.skip("NOT_RUN: this machine's kernel has no transparent huge pages")
    assert "hg" in flags_of(locked(1 << 22))


def test_a_kernel_without_huge_pages_gives_small_ones(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    assert gpu.is_pinned(locked(1 << 20))


def test_memory_that_the_driver_or_the_host_refuses_is_named(gpu: EmulatedGpu) -> None:
    gpu.largest = 1 << 20
    for nbytes in ((1 << 20) + 1, 1 << 62):
        with pytest.raises(MachineError, match="page-locked memory cannot be had") as refused:
            locked(nbytes)
        assert f"{nbytes:,} bytes" in str(refused.value) and not gpu.places
