"""Times of single kernels on a Hopper GPU: CUPTI's records against our stamps, and a gap, a wait and a copy that were planted."""

from __future__ import annotations

import ctypes
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alpha.backends.cuda.executor import CudaExecutor
from alpha.cuda_runtime import _bindings, cupti
from alpha.cuda_runtime.memory import Arena, pinned
from alpha.gates.contracts import cuda_run
from alpha.gates.contracts.reference import batches_of, text_of
from alpha.profile.recorder import Recorder
from alpha.profile.store import Store

pytestmark = pytest.mark.h100

US = 1000
STEPS = 6
COPIED = 8 << 20
"""Bytes of the planted copy: some 150 us over PCIe."""

Plant = Callable[[CudaExecutor], None]


@pytest.fixture(scope="module", autouse=True)
def instrument() -> None:
    found = cupti.opened()
    if isinstance(found, str):
        pytest.skip(f"the optional instrument is not here: {found}")


def measured(path: Path, *, plant: Plant = lambda executor: None, between: Plant = lambda executor: None) -> list[dict[str, Any]]:
    """The rows of kernel_times of STEPS profiled steps of the small GPT, two replays and an update each, less the first."""
    ref, program = cuda_run.references()["gpt"], cuda_run.program("gpt", 1, 2)
    rng = np.random.default_rng(0)
    batches = batches_of(ref, rng, 1, 2)
    with Store(path) as store, cuda_run.opened(program, cuda_run._drawn(ref, rng)["param"].astype(np.float32)) as executor:
        store.begin(0, 0, 0, 0)
        plant(executor)
        executor.recorder = Recorder(store)
        for step in range(STEPS):
            executor.recorder.begin(step, profiled=step > 0)
            for calls in program.replays():
                executor.enqueue(tuple(c.plan for c in calls), [text_of(batches, c) for c in calls])
                between(executor)
            executor.outputs("update")
            executor.recorder.end_step()
        executor.recorder.finish()
    with sqlite3.connect(path) as db:
        db.row_factory = sqlite3.Row
        output = dict(db.execute("SELECT * FROM run_metadata").fetchall())["kernel_times"]
        assert output.startswith("CUPTI"), output
        rows = [dict(r) for r in db.execute("SELECT * FROM kernel_times WHERE step > 1 ORDER BY step")]
        wrong = db.execute("SELECT count(*) FROM op_profile WHERE device_ns <= 0 OR dispatches < count").fetchone()[0]
    assert len(rows) == STEPS - 2 and not wrong
    return rows


def median(rows: list[dict[str, Any]], column: str) -> float:
    return float(np.median([r[column] for r in rows]))


def before_launch(index: int, work: Callable[[int], Any]) -> Plant:
    """Something is enqueued, and captured, before launch `index` of the first microbatch."""

    def plant(executor: CudaExecutor) -> None:
        bound = executor._bound["micro_first@0"]
        launch, run = bound[index]

        def call(stream: int) -> None:
            work(stream)
            run(stream)

        bound[index] = launch, call

    return plant


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return measured(tmp_path_factory.mktemp("sound") / "m.sqlite")


def test_every_stamp_lies_where_the_instrument_has_it(sound: list[dict[str, Any]]) -> None:
    """Two clocks and two ways: a stamp is off its kernel's middle by as much as the clocks are, always the same within 2 us."""
    for row in sound:
        assert row["stamps"] > 10 and abs(row["stamp_offset_ns"]) < 20 * US and row["stamp_spread_ns"] < 2 * US, row
        assert row["kernels"] > 120 and row["busy_ns"] > 0, row


def test_a_planted_gap_is_seen(tmp_path: Path, sound: list[dict[str, Any]]) -> None:
    """The device waits for a function of the host that sleeps 50 us."""
    enqueue, sleep = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc, ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)

    def late(stream: int) -> None:  # cuda-bindings frees what it wraps a function in after one call, and a graph calls it again
        assert enqueue(ctypes.c_void_p(stream), sleep, ctypes.c_void_p(50)) == 0

    found = measured(tmp_path / "m.sqlite", plant=before_launch(7, late))
    assert all(r["longest_gap_ns"] >= 50 * US for r in found)
    assert median(found, "gap_ns") - median(sound, "gap_ns") >= 50 * US
    assert median(found, "kernels") == median(sound, "kernels")


def test_a_planted_sync_is_seen(tmp_path: Path, sound: list[dict[str, Any]]) -> None:
    found = measured(tmp_path / "m.sqlite", between=lambda executor: executor.stream.synchronize())
    assert median(sound, "gap_sync_ns") == 0 and all(r["gap_sync_ns"] > 10 * US for r in found)
    assert median(found, "syncs") >= median(sound, "syncs") + 2


def test_a_planted_serial_copy_is_seen(tmp_path: Path, sound: list[dict[str, Any]]) -> None:
    """The same copy on the computing stream, and on one of its own beside the kernels."""
    driver = _bindings.driver()
    host, there = pinned((COPIED,), np.uint8), Arena(COPIED, name="planted")

    def copy(stream: int) -> None:
        _bindings.check("cuMemcpyHtoDAsync", driver.cuMemcpyHtoDAsync(there.address, host.ctypes.data, COPIED, stream))

    def beside(executor: CudaExecutor) -> None:
        executor.aside = executor.aside if hasattr(executor, "aside") else executor.device.stream()
        copy(int(executor.aside.handle))

    serial = measured(tmp_path / "serial.sqlite", plant=before_launch(7, copy))
    overlapped = measured(tmp_path / "overlapped.sqlite", between=beside)
    there.free()
    took = median(serial, "gap_copy_ns") - median(sound, "gap_copy_ns")
    assert took > 50 * US and median(serial, "copies") == median(sound, "copies") + 1
    assert median(overlapped, "copy_overlapped_ns") > 50 * US > median(serial, "copy_overlapped_ns")
