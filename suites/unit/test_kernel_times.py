"""Times of single kernels: what records say, by hand; planted gaps, waits and copies; an instrument on an emulated GPU, and none."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import emulated_gpu as emulated_gpu_module
import numpy as np
import pytest
from emulated_gpu import EmulatedCupti, Stream, emulated, emulated_gpu, run_with
from trace_format import breaches, load

from alpha.backends.cuda.cubins_of import ANYWHERE, NullGpu
from alpha.backends.cuda.executor import CudaExecutor
from alpha.backends.cuda.kernels.loss import linear_cross_entropy, linear_cross_entropy_grad
from alpha.backends.cuda.kernels.update import update_scalars
from alpha.backends.cuda.launches import recording
from alpha.backends.cuda.lib import Operand, Parts
from alpha.backends.cuda.observe import Work, pieces_of
from alpha.cuda_runtime import cupti, mark
from alpha.errors import MachineError
from alpha.gates.contracts import cuda_run, reference
from alpha.gates.contracts.engine import contract_cases
from alpha.gates.contracts.reference import batches_of, text_of
from alpha.ops.table import row
from alpha.profile import trace
from alpha.profile.figures import KERNELS
from alpha.profile.kernels import Activity, Copy, Kernel, Stamps, Wait, slowdowns
from alpha.profile.phases import phase_of
from alpha.profile.recorder import Recorder
from alpha.profile.store import Store
from alpha.train.catalogue import catalogue
from alpha.train.pace import PacedSpots
from alpha.types import Table, TensorType

US = 1000


def kernel(start: int, stop: int, *, phase: str = "forward", launch: int = 0) -> Kernel:
    return Kernel("p", launch, 0, "op", "k", phase, start * US, stop * US)


BACK_TO_BACK = [kernel(0, 100), kernel(100, 300), kernel(300, 400)]


# -- by hand -----------------------------------------------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    """Kernels 10-110 and 111-200 us, of which a stamp takes the microsecond between; a copy beside the first and one after the last."""
    found = Activity([kernel(10, 110), kernel(110, 111, launch=-1), kernel(111, 200), kernel(202, 203, launch=-1)],
                     [Copy("HtoD", 1 << 20, 50 * US, 90 * US), Copy("memset", 64, 205 * US, 210 * US, fill=True)],
                     [Wait("wait for an event", 5 * US, 215 * US)], Stamps(2, 7, 3), 11).row(0, 220 * US)
    assert found == {
        "kernels": 2, "busy_ns": 189 * US, "stamp_ns": 2 * US, "idle_ns": (220 - 189 - 2 - 5) * US, "gap_ns": 0, "gap_sync_ns": 0,
        "gap_copy_ns": 0, "longest_gap_ns": 0, "copies": 2, "copy_ns": 45 * US, "copy_overlapped_ns": 40 * US, "syncs": 1,
        "sync_ns": 210 * US, "stamps": 2, "stamp_offset_ns": 7, "stamp_spread_ns": 3, "switch_ns": 11,
    }  # fmt: skip


def test_nothing_ran() -> None:
    found = Activity([]).row(0, 10)
    assert found["kernels"] == found["busy_ns"] == found["gap_ns"] == 0 and found["idle_ns"] == 10


def moved(kernels: Sequence[Kernel], after: int, us: int) -> list[Kernel]:
    """The same with everything from number `after` on this much later."""
    return [replace(k, start=k.start + us * US, stop=k.stop + us * US) if i >= after else k for i, k in enumerate(kernels)]


def test_a_planted_gap_is_seen() -> None:
    sound, found = (Activity(k).row(0, 500 * US) for k in (BACK_TO_BACK, moved(BACK_TO_BACK, 1, 50)))
    assert (sound["gap_ns"], sound["longest_gap_ns"], sound["idle_ns"]) == (0, 0, 100 * US)
    assert (found["gap_ns"], found["longest_gap_ns"], found["idle_ns"]) == (50 * US, 50 * US, 100 * US)
    assert found["gap_sync_ns"] == found["gap_copy_ns"] == 0 and found["busy_ns"] == sound["busy_ns"]


def test_a_planted_sync_is_seen() -> None:
    """The host waits until the first kernel is over and hands over the rest then; the wait at the end of a step is none of these."""
    end = Wait("wait for an event", 0, 450 * US)
    sound = Activity(BACK_TO_BACK, waits=[end]).row(0, 500 * US)
    late = [replace(k, handed=(0 if i < 1 else 110) * US) for i, k in enumerate(moved(BACK_TO_BACK, 1, 30))]
    wait = Wait("wait for a stream", 20 * US, 104 * US)
    found = Activity(late, waits=[wait, end]).row(0, 500 * US)
    assert (sound["syncs"], sound["gap_sync_ns"]) == (1, 0)
    assert (found["syncs"], found["gap_sync_ns"], found["gap_ns"]) == (2, 30 * US, 30 * US)
    short = Wait("wait for an event", 101 * US, 102 * US)  # for what was long over: it is not why there is a gap
    assert Activity(late, waits=[short, end]).row(0, 500 * US)["gap_sync_ns"] == 0
    whole = [replace(k, handed=0) for k in late]  # all was handed over before the wait ended: it held nothing up
    assert Activity(whole, waits=[wait, end]).row(0, 500 * US)["gap_sync_ns"] == 0


def test_a_planted_serial_copy_is_seen() -> None:
    """A copy of 40 us beside a kernel, and the same one between two kernels."""
    sound = Activity(BACK_TO_BACK, [Copy("HtoD", 1, 120 * US, 160 * US)]).row(0, 500 * US)
    found = Activity(moved(BACK_TO_BACK, 2, 44), [Copy("HtoD", 1, 302 * US, 342 * US)]).row(0, 500 * US)
    assert (sound["copy_ns"], sound["copy_overlapped_ns"], sound["gap_copy_ns"]) == (40 * US, 40 * US, 0)
    assert (found["copy_ns"], found["copy_overlapped_ns"], found["gap_copy_ns"], found["gap_ns"]) == (40 * US, 0, 40 * US, 44 * US)


def test_stamps_are_held_against_the_instrument() -> None:
    taken = [kernel(0, 2, launch=-1), kernel(10, 12, launch=-1), kernel(20, 22, launch=-1)]
    assert Stamps.against([1 * US + 500, 11 * US + 500, 21 * US + 900], taken) == Stamps(3, 500, 400)
    assert Stamps.against([], []) == Stamps()


def test_slowdowns_by_hand() -> None:
    step = np.arange(12)
    ns, profiled = np.full(12, 100), np.zeros(12, bool)
    ns[[5, 11]], profiled[[5, 11]] = [103, 101], True
    ns[6] = 900  # a stall next to it: the median does not follow
    found = slowdowns(step, np.zeros(12, int), ns, ~profiled & (step >= 3), profiled)
    assert np.isnan(found[~profiled]).all() and found[profiled] == pytest.approx([0.03, 0.01])
    assert np.isnan(slowdowns(step, np.arange(12), ns, ~profiled, profiled)).all(), "no neighbours of its own session"


# -- phases ------------------------------------------------------------------------------------------------------------------------------


def bound(op: str, binder: Callable[..., Any], types: Sequence[TensorType], attrs: dict[str, Any]) -> Any:
    with recording():
        return binder(NullGpu(), [Operand(ANYWHERE, t) for t in types],
                      [Operand(ANYWHERE, t) for t in row(op).infer(list(types), attrs)], attrs)


def test_the_update_tells_its_phases_apart() -> None:
    flat, scalar, integer = TensorType((64,), "f32"), TensorType((), "f32"), TensorType((), "i32")
    attrs = {"segments": ((0, 64),), "max_norm": 1.0, "rates": Table.of([1.0])}
    found = bound("update_scalars", update_scalars, [flat, scalar, scalar, integer], attrs)
    assert isinstance(found, Parts) and [phase for phase, _ in found.parts] == ["grad_norm", "grad_clip"]


def test_the_head_makes_its_gradient_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks: logits and loss forward, the two products of the gradient backward, chunk after chunk; nothing backward without one."""
    enqueued: list[str] = []

    def stands_for(name: str) -> Callable[..., Any]:
        return lambda *_, **__: lambda stream: enqueued.append(name)

    monkeypatch.setattr("alpha.backends.cuda.kernels.gemm.prepare", stands_for("product"))
    monkeypatch.setattr("alpha.backends.cuda.kernels.loss.cross_entropy", stands_for("loss"))
    monkeypatch.setattr("alpha.backends.cuda.kernels.loss.head", lambda *_, **__: (stands_for("anchors")(), stands_for("finish")()))
    monkeypatch.setattr("alpha.backends.cuda.kernels.loss.total", stands_for("sum"))
    monkeypatch.setattr("alpha.backends.cuda.kernels.loss.copy", lambda *_: enqueued.append("copy"))
    types = [TensorType((24, 16), "bf16"), TensorType((64, 16), "bf16"), TensorType((24,), "i32")]
    attrs = {"chunk": 8, "ignore_index": -1, "z_loss": 0.0}
    found = bound("linear_cross_entropy_grad", linear_cross_entropy_grad, types, attrs)
    told = []
    for phase, run in found.parts:
        enqueued.clear()
        run(0)
        told.append((phase, *enqueued))
    forward, backward = (None, "anchors", "product", "finish", "sum"), ("backward", "product", "product")
    assert told == [forward, backward, forward, backward, (*forward, "copy"), backward]
    alone = bound("linear_cross_entropy", linear_cross_entropy, types, attrs)
    enqueued.clear()
    alone(0)
    assert [p for p, _ in alone.parts] == [None] * 3 and enqueued == ["product", "loss", "sum"] * 3 + ["copy"]


def test_launches_count_once_however_many_phases_they_have() -> None:
    works = [Work(0, "forward", print), Work(1, "forward", print), Work(1, "backward", print), Work(1, "forward", print),
             Work(2, "backward", print)]  # fmt: skip
    assert pieces_of(works) == [("forward", 2), ("backward", 0), ("forward", 0), ("backward", 1)]


def test_phases_of_the_cpu_are_those_of_its_launches() -> None:
    """There the head with its loss and gradients is one launch, which is forward; norm and clip are told from the optimizer."""
    plans = reference.program("gpt").plans
    head = [(x.op, phase_of(x)) for x in plans["micro_first@0"].launches if x.layer == "head"]
    assert ("linear_cross_entropy_grad", "forward") in head and not {op for op, _ in head} & {"matmul", "cross_entropy"}
    assert {phase for op, phase in head if op.endswith("_bwd")} == {"backward"}
    phases = {x.op: phase_of(x) for x in plans["update"].launches}
    assert phases | {"square_sums": "grad_norm", "norm_of_squares": "grad_norm", "clip_coefficient": "grad_clip"} == phases


# -- an instrument on an emulated GPU ----------------------------------------------------------------------------------------------------


class Ticks:
    """A clock that goes on by 1 us whenever it is read."""

    now = 10**9

    def perf_counter_ns(self) -> int:
        self.now += US
        return self.now


@contextmanager
def profiled(path: Path, *, instrument: bool = True, plant: Callable[[CudaExecutor, Ticks], None] = lambda executor, clock: None,
             between: Callable[[CudaExecutor], None] = lambda executor: None, verify: int = 0) -> Iterator[sqlite3.Connection]:
    """The metrics of a plain step and a profiled one of the small GPT: two replays, then the update. `plant`: changes the executor.
    `between`: what the host does between the replays of the profiled step. `verify`: spot checks as a run has them."""
    clock = Ticks()
    with pytest.MonkeyPatch.context() as patch, emulated_gpu(instrument=instrument):
        patch.setattr(emulated_gpu_module, "time", clock)
        patch.setattr(mark, "time", clock)
        kernels = emulated(cuda_run.kernels())
        run_with(patch, kernels)
        ref = cuda_run.references()["gpt"]
        program = replace(cuda_run.program("gpt", 1, 2), replay=1)
        rng = np.random.default_rng(0)
        batches = batches_of(ref, rng, 1, 2)
        with Store(path) as store, cuda_run.opened(program, cuda_run._drawn(ref, rng)["param"].astype(np.float32)) as executor:
            store.begin(0, clock.now, clock.now, 0)
            plant(executor, clock)
            executor.recorder = Recorder(store, clock=clock.perf_counter_ns)
            spots = PacedSpots(verify, 0, executor, 0, store)
            spots.restart(1)
            spots._first = False
            for step in range(2):
                executor.recorder.begin(step, profiled=step == 1)
                spots.begin(step + 1)
                for calls in program.replays():
                    if calls[0].plan == "update":
                        spots.read("before the update", now=False)
                    executor.enqueue(tuple(c.plan for c in calls), [text_of(batches, c) for c in calls])
                    if step == 1:
                        between(executor)
                spots.wrote(step + 1)
                executor.outputs("update")
                spots.end(step + 1)
                executor.recorder.end_step()
            executor.recorder.finish()
            store.mark(ended="finished")
        db = sqlite3.connect(path)
        db.row_factory = sqlite3.Row
        try:
            yield db
        finally:
            db.close()


def times(path: Path, **more: Any) -> dict[str, int]:
    with profiled(path, **more) as db:
        (row,) = db.execute("SELECT * FROM kernel_times").fetchall()
        return dict(row)


def test_a_run_that_hashes_its_state_beside_the_steps_is_timed_too(tmp_path: Path) -> None:
    found, without = times(tmp_path / "hashed.sqlite", verify=200), times(tmp_path / "without.sqlite")
    assert found["kernels"] == without["kernels"] and found["stamps"] == without["stamps"] + 2, "around the hashes before the update"


def before_launch(index: int, work: Callable[[], Any]) -> Callable[[CudaExecutor, Ticks], None]:
    """Something runs on the stream before launch `index` of the first microbatch."""

    def plant(executor: CudaExecutor, clock: Ticks) -> None:
        bound = executor._bound["micro_first@0"]
        launch, run = bound[index]
        assert not run.parts[0][0] and len(run.parts) == 1  # type: ignore[attr-defined]

        def call(handle: int) -> None:
            Stream.by_handle[handle].push(work)
            run(handle)

        bound[index] = launch, call

    return plant


def test_every_kernel_is_seen_and_told_by_its_launch_and_phase(tmp_path: Path) -> None:
    with profiled(tmp_path / "m.sqlite") as db:
        (found,) = db.execute("SELECT * FROM kernel_times").fetchall()
        plain, step = db.execute("SELECT * FROM step_timing ORDER BY step").fetchall()
        each = db.execute("SELECT * FROM kernel_profile").fetchall()
        launches = db.execute("SELECT plan, launch, op, count, dispatches, device_ns FROM op_profile").fetchall()
        meta = dict(db.execute("SELECT * FROM run_metadata").fetchall())
        tracks = dict(db.execute("SELECT track, count(*) FROM gpu_timeline GROUP BY track").fetchall())
    assert meta["kernel_times"] == "emulated"
    assert (plain["launches"], plain["profiled"], step["profiled"]) == (step["launches"], 0, 1)
    assert found["step"] == 1 and found["kernels"] == sum(r["count"] for r in each) == sum(r["dispatches"] for r in launches)
    assert found["kernels"] == step["launches"] + 3, "two heads and an update have a kernel more than launches"
    assert sum(r["count"] for r in launches) == step["launches"]
    by_phase = {p: sum(r["device_ns"] for r in each if r["phase"] == p) for p in KERNELS}
    assert all(ns > 0 for ns in by_phase.values()) and all(step[f"{p}_ns"] == ns for p, ns in by_phase.items())
    assert sum(by_phase.values()) == found["busy_ns"] == sum(r["device_ns"] for r in launches)
    head = [r for r in each if r["op"] == "linear_cross_entropy_grad"]
    assert {(r["place"], r["phase"]) for r in head} == {(0, "forward"), (1, "backward")}
    assert step["idle_ns"] >= found["gap_ns"] > 0
    assert tracks["stream 0"] == found["kernels"] + found["stamps"] and tracks["gaps"] > 0 and tracks["copies"] == found["copies"] > 0
    assert tracks["sync waits"] == found["syncs"] > 0 and found["gap_sync_ns"] == 0
    assert found["stamps"] > 0 and found["stamp_spread_ns"] <= 2 * US and found["switch_ns"] > 0


def test_the_trace_shows_kernels_gaps_copies_and_waits(tmp_path: Path) -> None:
    with profiled(tmp_path / "m.sqlite") as db:
        kernels = db.execute("SELECT sum(count) FROM kernel_profile").fetchone()[0]
        (found,) = db.execute("SELECT * FROM kernel_times").fetchall()
    written = trace.write(tmp_path / "m.sqlite", tmp_path / "t.json")
    document = load(tmp_path / "t.json")
    assert breaches(document) == []
    threads = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    shown: dict[str, list[str]] = {}
    for e in document["traceEvents"]:
        if e["ph"] == "X":
            shown.setdefault(threads[e["tid"]], []).append(e["name"])
    assert sum(": " in name for name in shown["stream 0"]) == kernels and "matmul: matmul.bf16.sm90" in shown["stream 0"]
    assert shown["stream 0"].count("time stamp") == found["stamps"] and set(shown["gaps"]) == {"gap"}
    assert len(shown["copies"]) == found["copies"] and any(name.startswith("DtoD ") for name in shown["copies"])
    assert len(shown["sync waits"]) == found["syncs"] and written.arrows == shown["host enqueue"].count("graph") == 3


def test_an_instrument_moves_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways of running the same steps, those of profiled steps with every kernel timed among them."""
    kernels = emulated(cuda_run.kernels())
    run_with(monkeypatch, kernels)
    with emulated_gpu(instrument=True) as gpu:
        found = dict(contract_cases(catalogue()["executor.cuda"], "determinism"))["ways-llama"](np.random.default_rng(3))
        assert found.error <= found.bound, found.note
        assert gpu.allocated == 0


def test_without_an_instrument_nothing_is_said_of_kernels(tmp_path: Path) -> None:
    with profiled(tmp_path / "m.sqlite", instrument=False) as db:
        assert db.execute("SELECT count(*) FROM kernel_times").fetchone()[0] == 0
        assert db.execute("SELECT count(*) FROM kernel_profile").fetchone()[0] == 0
        meta = dict(db.execute("SELECT * FROM run_metadata").fetchall())
        assert meta["kernel_times"].startswith("not measured: no CUPTI")
        kernels, ran = db.execute("SELECT sum(dispatches), sum(count) FROM op_profile").fetchone()
        _, step = db.execute("SELECT * FROM step_timing ORDER BY step").fetchall()
    assert kernels == ran + 3 and ran == step["launches"]
    assert min(step[f"{p}_ns"] for p in KERNELS) > 0


def test_planted_defects_of_a_step_are_seen(tmp_path: Path) -> None:
    sound = times(tmp_path / "sound.sqlite")
    clock_of: list[Ticks] = []

    def late(executor: CudaExecutor, clock: Ticks) -> None:
        clock_of.append(clock)
        before_launch(7, lambda: setattr(clock, "now", clock.now + 50 * US))(executor, clock)

    gap = times(tmp_path / "gap.sqlite", plant=late)
    assert sound["longest_gap_ns"] < 50 * US <= gap["longest_gap_ns"] <= 50 * US + sound["longest_gap_ns"]
    assert 50 * US <= gap["gap_ns"] - sound["gap_ns"] < 52 * US and gap["kernels"] == sound["kernels"]

    sync = times(tmp_path / "sync.sqlite", between=lambda executor: executor.stream.synchronize())
    assert sound["gap_sync_ns"] == 0 < sync["gap_sync_ns"] and sync["syncs"] == sound["syncs"] + 3

    def slow(executor: CudaExecutor, clock: Ticks) -> None:
        def copy() -> None:
            clock.now += 40 * US

        copy.copied = "HtoD", 4096  # type: ignore[attr-defined]
        before_launch(7, copy)(executor, clock)

    copy = times(tmp_path / "copy.sqlite", plant=slow)
    assert copy["copies"] == sound["copies"] + 1 and copy["copy_overlapped_ns"] == sound["copy_overlapped_ns"]
    assert 40 * US <= copy["gap_copy_ns"] - sound["gap_copy_ns"] < 43 * US


def test_kernels_that_were_not_seen_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instrument that loses a record: no times are made up, and the run says so."""
    whole = EmulatedCupti.stop
    monkeypatch.setattr(EmulatedCupti, "stop", lambda self: [r for i, r in enumerate(whole(self)) if i != 30])
    with profiled(tmp_path / "m.sqlite") as db:
        assert db.execute("SELECT count(*) FROM kernel_times").fetchone()[0] == 0
        output = dict(db.execute("SELECT * FROM run_metadata").fetchall())["kernel_times"]
    assert output.startswith("not measured in a step: ") and "were enqueued" in output


@pytest.mark.parametrize("call", ["start", "stop"])
def test_an_instrument_that_refuses_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(self: EmulatedCupti) -> None:
        raise MachineError("CUPTI refuses", came="activity_enable(10): another profiler")

    monkeypatch.setattr(EmulatedCupti, call, refuse)
    with profiled(tmp_path / "m.sqlite") as db:
        assert db.execute("SELECT count(*) FROM kernel_times").fetchone()[0] == 0
        assert db.execute("SELECT count(*) FROM step_timing").fetchone()[0] == 2
        assert dict(db.execute("SELECT * FROM run_metadata").fetchall())["kernel_times"] == (
            "not measured any more: CUPTI refuses: activity_enable(10): another profiler")


# -- CUPTI -------------------------------------------------------------------------------------------------------------------------------


class Library:
    """What stands for the module cupti.cupti: a clock that is 5 s behind the host's, and records that a flush hands over."""

    ActivityKind = SimpleNamespace(CONCURRENT_KERNEL=10, MEMCPY=1, MEMSET=2, SYNCHRONIZATION=38)

    def __init__(self, clock: Ticks) -> None:
        self.clock, self.on, self.calls, self.waiting = clock, set(), [], []

    def get_timestamp(self) -> int:
        return self.clock.now - 5 * 10**9

    def activity_register_callbacks(self, requested: Callable[[], tuple[int, int]], completed: Callable[[list[Any]], None]) -> None:
        self.completed = completed
        assert requested()[0] > 0

    def activity_enable(self, kind: int) -> None:
        self.on.add(kind)

    def activity_disable(self, kind: int) -> None:
        self.on.discard(kind)

    def activity_flush_all(self, flag: int) -> None:
        assert flag == 1
        self.completed(self.waiting)

    @staticmethod
    def ActivityMemcpyKind(n: int) -> Any:
        return SimpleNamespace(name={1: "HTOD", 8: "DTOD"}[n])

    @staticmethod
    def ActivitySynchronizationType(n: int) -> Any:
        return SimpleNamespace(name={1: "EVENT_SYNCHRONIZE", 2: "STREAM_WAIT_EVENT"}[n])


def test_records_of_cupti_are_times_of_the_host() -> None:
    clock = Ticks()
    clock.now = 10**10
    library = Library(clock)
    instrument = cupti.Cupti(library, clock.perf_counter_ns)
    instrument.start()
    assert library.on == {10, 1, 2, 38}
    at = library.get_timestamp()
    library.waiting = [
        SimpleNamespace(kind=10, name="gemm", start=at + 500, end=at + 900),
        SimpleNamespace(kind=1, copy_kind=8, bytes=64, start=at + 100, end=at + 200),
        SimpleNamespace(kind=1, copy_kind=1, bytes=64, start=at + 100, end=0),  # still running
        SimpleNamespace(kind=2, bytes=8, start=at + 300, end=at + 310),
        SimpleNamespace(kind=38, type=1, start=at + 400, end=at + 950),
        SimpleNamespace(kind=38, type=2, start=at + 400, end=at + 401),  # a stream waits for an event: not the host
        SimpleNamespace(kind=10, name="before", start=at - 10**7, end=at - 10**6),
        SimpleNamespace(kind=99),
    ]
    now = clock.now
    clock.now += 10**6
    found = instrument.stop()
    assert not library.on
    assert [(r.kind, r.name, r.nbytes) for r in found] == [
        ("copy", "DtoD", 64), ("fill", "memset", 8), ("wait", "wait for an event", 0), ("kernel", "gemm", 0)]
    assert all(abs(r.start - now - off) <= US for r, off in zip(found, (100, 300, 400, 500)))
    instrument.start()
    library.waiting = []
    assert instrument.stop() == []


def test_cupti_that_refuses_is_an_error_of_the_machine() -> None:
    clock = Ticks()
    instrument = cupti.Cupti(Library(clock), clock.perf_counter_ns)
    instrument._cupti.activity_enable = lambda kind: 1 // 0
    with pytest.raises(MachineError, match="CUPTI refuses"):
        instrument.start()


def test_why_there_is_no_cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(f"No module named {name!r}")))
    cupti.opened.cache_clear()
    try:
        assert "--editable '.[cupti]'" in str(cupti.opened())
    finally:
        cupti.opened.cache_clear()
