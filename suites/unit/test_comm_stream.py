"""The stream beside compute, and CPU executors of several ranks over a made-up World: the bits of one process, overlap, errors carried."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alpha.backends.cpu.catalogue import fill
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cpu.stream import Stream
from alpha.component import Catalogue, Component
from alpha.errors import InputError
from alpha.gates.contracts.reference import BATCH, SCHEDULE, SEQ, Batches, batches_of, references
from alpha.graph.order import COMM, COMPUTE, Order
from alpha.graph.plan import Launch, Memory, Plan, Program, Ref, Role, Step
from alpha.graph.trace import Tracer
from alpha.graph.verify_program import verify_program
from alpha.ops.table import row
from alpha.optim.init import fill_initial
from alpha.optim.update import adamw
from alpha.parallel.data import DataParallel
from alpha.passes.build import StepShape, build_program, lower
from alpha.profile.recorder import Recorder
from alpha.profile.store import Store
from alpha.types import TensorType

SHARDS = 4


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream("test")
    yield made
    made.close()


def test_calls_run_in_order_beside_the_giver(stream: Stream) -> None:
    seen: list[int] = []
    gate = threading.Event()
    stream.give(gate.wait)  # type: ignore[arg-type]
    numbers = [stream.give(lambda i=i: seen.append(i)) for i in range(20)]  # type: ignore[misc]
    assert seen == [] and numbers == list(range(2, 22))
    gate.set()
    stream.wait(numbers[9])
    assert seen[:9] == list(range(9))
    stream.wait()
    assert seen == list(range(20))


def test_the_first_error_is_raised_once_and_nothing_runs_after_it(stream: Stream) -> None:
    seen: list[int] = []

    def fail(what: str) -> Callable[[], None]:
        def call() -> None:
            raise InputError(what)
        return call

    stream.give(lambda: seen.append(1))
    stream.give(fail("one"))
    last = stream.give(lambda: seen.append(2))
    with pytest.raises(InputError, match="one"):
        stream.wait(last)
    assert seen == [1]
    stream.wait()
    stream.give(lambda: seen.append(3))
    stream.wait()
    assert seen == [1, 3]


def test_nothing_runs_behind_an_error_though_its_own_number_is_waited_for(stream: Stream) -> None:
    """Who waits for the call that fails is told once the many behind it are over: they would run if the error were taken before."""
    seen: list[int] = []
    go = threading.Event()

    def fail() -> None:
        go.wait()
        raise InputError("one")

    number = stream.give(fail)
    for i in range(20_000):
        stream.give(lambda i=i: seen.append(i))  # type: ignore[misc]
    threading.Timer(0.05, go.set).start()
    with pytest.raises(InputError, match="one"):
        stream.wait(number)
    stream.wait()
    assert seen == []


def test_what_is_dropped_does_not_begin(stream: Stream) -> None:
    seen: list[int] = []

    def until_dropped() -> None:
        while not stream.stopped:
            time.sleep(0.001)

    stream.give(until_dropped)
    stream.give(lambda: seen.append(1))
    stream.drop()
    assert not stream.stopped
    assert seen == []
    stream.give(lambda: seen.append(2))
    stream.wait()
    assert seen == [2]


def test_a_call_beside_compute_is_over_when_compute_has_waited_for_it() -> None:
    """What it held is free for the very call that waits; not where another stream runs beside them, which may know of that call alone."""
    after = [(), (0,), (), (1,), ()]
    order = Order([COMPUTE, COMM, COMPUTE, COMPUTE, COMPUTE], after)
    assert [order.window(i) for i in range(5)] == [(0, 0), (1, 2), (2, 2), (3, 3), (4, 4)]
    several = Order([COMPUTE, COMM, COMPUTE, COMPUTE, "other"], after)
    assert several.window(1) == (1, 3) and several.window(4) == (0, 5)


class Meeting:
    """Where ranks that are threads meet: the last to come computes for all, as the row says."""

    def __init__(self, size: int, delay: float = 0.0) -> None:
        self.barrier, self.delay = threading.Barrier(size, timeout=60), delay
        self.came: list[Any] = [None] * size
        self.results: list[Any] = [None] * size

    def across(self, rank: int, op: str, ins: tuple[np.ndarray, ...], attrs: dict[str, Any]) -> tuple[np.ndarray, ...]:
        self.came[rank] = (op, tuple(np.array(x) for x in ins), attrs)
        if self.barrier.wait() == 0:
            time.sleep(self.delay)
            assert len({(c[0], str(sorted(c[2].items()))) for c in self.came}) == 1, self.came
            with np.errstate(all="ignore"):
                self.results[:] = row(op).across([c[1] for c in self.came], **attrs)  # type: ignore[misc]
        self.barrier.wait()
        found = self.results[rank]
        self.barrier.wait()
        return found


class ThreadWorld:
    """A rank that is a thread."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, size
        self.place, self.advanced = SimpleNamespace(source=""), 0
        self.sources: list[str] = []

    def advance(self) -> None:
        self.advanced += 1


def binder(op: str) -> Callable[..., Callable[[], None]]:
    def bind(cpu: Any, ins: Any, outs: Any, attrs: Any) -> Callable[[], None]:
        def run() -> None:
            cpu.world.sources.append(cpu.world.place.source)
            for y, x in zip(outs, cpu.world.meeting.across(cpu.world.rank, op, tuple(ins), dict(attrs)), strict=True):
                y[...] = x
        return run
    return bind


@cache
def kernels() -> Catalogue:
    found = Catalogue()
    fill(found)
    for op, inplace in (("all_reduce", ((0, 0),)), ("reduce_scatter", ()), ("all_gather", ())):
        found.add(Component(id=f"{op}.threads", kind="kernel", backend="cpu", op=op, implementation=binder(op), inplace=inplace))
    return found


@cache
def program(ranks: int, zero: int) -> Program:
    return verify_program(build_program(
        name="gpt", model=references()["gpt"].model, optimizer=adamw(SCHEDULE, max_norm=0.2), catalogue=kernels(), threads=1,
        shape=StepShape(micro_batch=BATCH, seq=SEQ, shards=SHARDS, micros=2), over=DataParallel(ranks, zero, 2) if ranks > 1 else None))


def train(executor: CpuExecutor, rank: int, texts: list[Batches]) -> tuple[list[dict[str, bytes]], bytes]:
    p = executor.program
    fill_initial(executor.state("param"), p.states["param"], 3)
    if "shard" in p.plans:
        executor.run("shard")
    numbers = []
    for text in texts:
        for call in p.role(rank).schedule:
            given = text[call.shard, call.micro] if call.shard is not None and call.micro is not None else {}
            out = executor.run(call.plan, given)
        numbers.append({k: v.tobytes() for k, v in out.items()})
    return numbers, executor.state("param").tobytes()


def texts(seed: int) -> list[Batches]:
    rng = np.random.default_rng(seed)
    return [batches_of(references()["gpt"], rng, SHARDS, 2) for _ in range(3)]


def on_threads(ranks: int, body: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def caught(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=caught, args=(rank,)) for rank in range(ranks)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(("ranks", "zero"), [(2, 0), (2, 1), (4, 0), (4, 1)])
def test_ranks_have_the_bits_of_one_process(ranks: int, zero: int) -> None:
    text = texts(ranks + zero)
    with CpuExecutor(program(1, 0), kernels()) as alone:
        want = train(alone, 0, text)
    meeting = Meeting(ranks, delay=0.001)
    worlds = [ThreadWorld(meeting, rank, ranks) for rank in range(ranks)]
    found: list[Any] = [None] * ranks

    def body(rank: int) -> None:
        with CpuExecutor(program(ranks, zero), kernels(), worlds[rank]) as executor:
            found[rank] = train(executor, rank, text)

    on_threads(ranks, body)
    assert all(one == want for one in found)
    assert all(w.advanced > 0 for w in worlds)
    assert all(source.startswith(("gpt.py:", "parts.py:", "adamw")) for w in worlds for source in w.sources), worlds[0].sources


def test_what_compute_waits_for_is_not_beside_it(tmp_path: Path) -> None:
    """Two collectives: [5, 30] while compute runs until 20 and then waits until 30, [30, 44] while it waits until 40 and runs on."""
    def launch(stream: str) -> Launch:
        x = Ref("act", 0, TensorType((4,), "f32"))
        op, phase = ("all_reduce", "reduce") if stream else ("add", "forward")
        return Launch(op, "made", (x,), (x,), {}, None, "", phase, "", 0, 0, stream)

    plan = Plan("made", tuple(map(launch, ("", COMM, "", COMM, ""))), {}, {}, {}, Memory(0, 0, 0))
    with Store(tmp_path / "made.sqlite") as store:
        now = iter((0, 60))
        recorder = Recorder(store, clock=lambda: next(now))
        recorder.begin(0)
        recorder.ran(plan, [0, 10, 5, 30, 12, 20, 30, 44, 40, 50], [(20, 30), (30, 40)])
        recorder.finish()
        store.flush()
    (timing,) = rows(tmp_path / "made.sqlite", "step_timing")
    want = {"forward": 28, "comm": 20, "comm_overlapped": 19, "idle": 2, "unexplained": 10, "wall": 60}
    assert {k: timing[f"{k}_ns"] for k in want} == want


def rows(path: Path, table: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as db:
        db.row_factory = sqlite3.Row
        return [dict(x) for x in db.execute(f"SELECT * FROM {table}")]


def test_a_profiled_step_tells_the_collectives(tmp_path: Path) -> None:
    """Each is told with its phase, and the phases still add up to the step's time."""
    meeting = Meeting(2, delay=0.005)
    text = texts(7)
    tables: list[Any] = [None, None]

    def body(rank: int) -> None:
        with CpuExecutor(program(2, 0), kernels(), ThreadWorld(meeting, rank, 2)) as executor, Store(tmp_path / f"{rank}.sqlite") as store:
            executor.recorder = Recorder(store)
            executor.recorder.begin(0, profiled=True)
            train(executor, rank, text[:1])
            executor.recorder.end_step()
            executor.recorder.finish()
            store.flush()
        tables[rank] = {name: rows(tmp_path / f"{rank}.sqlite", name) for name in ("step_timing", "op_profile")}

    on_threads(2, body)
    for table in tables:
        (timing,) = table["step_timing"]
        assert timing["comm_ns"] > 0 and timing["comm_overlapped_ns"] >= 0, timing
        spent = sum(v for k, v in timing.items() if k.endswith("_ns") and "overlapped" not in k and k not in
                    ("began_ns", "wall_ns", "step_ns", "enqueue_ns"))
        assert spent == timing["wall_ns"]
        assert {r["op"] for r in table["op_profile"] if r["phase"] == "comm"} == {"all_reduce"}


def test_an_error_of_a_collective_ends_the_run() -> None:
    class Broken(Meeting):
        def across(self, *args: Any) -> Any:
            raise InputError("a rank is gone")

    def body(rank: int) -> None:
        with CpuExecutor(program(2, 0), kernels(), ThreadWorld(Broken(2), rank, 2)) as executor:
            train(executor, rank, texts(1)[:1])

    with pytest.raises(InputError, match="a rank is gone"):
        on_threads(2, body)


def test_compute_does_not_run_on_what_a_collective_that_failed_did_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed before compute came to what needs it: that does not begin, and what is behind it does not."""
    with CpuExecutor(program(2, 1), kernels(), ThreadWorld(Meeting(2), 0, 2)) as executor:
        stream, ran = executor._comm, list[int]()
        assert stream is not None
        bound = executor._bound["update"]

        def fails() -> None:
            raise InputError("a rank is gone")

        def give(call: Callable[[], None]) -> int:
            number = Stream.give(stream, call)
            while not stream.stopped:
                time.sleep(0.001)
            return number

        monkeypatch.setattr(stream, "give", give)
        bound[:] = [(x, fails if x.stream == COMM else partial(ran.append, i)) for i, (x, _) in enumerate(bound)]
        waits = next(i for i, (x, _) in enumerate(bound) if x.after and x.stream == COMPUTE)
        with pytest.raises(InputError, match="a rank is gone"):
            executor.run("update")
        assert ran == [i for i, (x, _) in enumerate(bound[:waits]) if x.stream == COMPUTE]


def test_what_gives_nothing_runs_beside_compute_too() -> None:
    """A send alone has nobody here who waits for it: compute goes on until the plan ends."""
    t = Tracer("sends")
    x = t.input("x", (4,), "f32")
    t.stream = COMM
    t.send(x, group="dp", size=2, to=1)
    t.stream = COMPUTE
    t.output("y", t.scale(x, factor=2.0))
    threads: list[str] = []

    def sends(cpu: Any, ins: Any, outs: Any, attrs: Any) -> Callable[[], None]:
        return lambda: threads.append(threading.current_thread().name)

    found = Catalogue()
    fill(found)
    found.add(Component(id="send.threads", kind="kernel", backend="cpu", op="send", implementation=sends))
    plan = lower(t.graph, found, "cpu", 1, {})
    alone = Program("sends", {"sends": plan}, (Step("sends"),), {}, {"threads": 1}, others=(Role((Step("sends"),), {"sends": "sends"}),),
                    groups={"dp": ((0, 1),)})
    with CpuExecutor(alone, found, ThreadWorld(Meeting(2), 0, 2)) as executor:
        assert executor.run("sends", {"x": np.ones(4, np.float32)})["y"].tolist() == [2.0] * 4
    assert threads == ["alpha-comm"]


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match="another number of ranks"):
        CpuExecutor(program(2, 0), kernels())
    with pytest.raises(InputError, match="another number of ranks"):
        CpuExecutor(program(2, 0), kernels(), ThreadWorld(Meeting(4), 0, 4))
