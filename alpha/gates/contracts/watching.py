"""Cases of what an executor of the CPU tells of each launch, each hand-over and its memory, by a clock that counts its own readings: so
what was read just before, and just after, is known to the reading. Floor 7."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import combinations, count, pairwise
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from alpha.backends.cpu.catalogue import fill
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cpu.lib import Cpu
from alpha.backends.cpu.observe import PAGE, HandOver, ObservedWorkers, note, resident
from alpha.backends.cpu.stream import Stream
from alpha.backends.cpu.workers import Workers
from alpha.comm.group import Place
from alpha.component import Catalogue, Component, Measured
from alpha.errors import InputError
from alpha.gates.contracts.reference import filled, yes
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.plan import Launch, Plan, Program, Role, Step
from alpha.graph.trace import Tracer
from alpha.passes.build import lower
from alpha.types import Attrs


class _Told:
    """A recorder whose clock counts, and which keeps the calls it gets. It owes the executor no more than that."""

    def __init__(self, watching: bool, profiling: bool) -> None:
        self._readings, self.watching, self.profiling = count(1), watching, profiling
        self.ran_with, self.events, self.profiles = list[tuple[Any, ...]](), list[tuple[Any, ...]](), list[tuple[Any, ...]]()

    def clock(self) -> int:
        return next(self._readings)

    def span(self, phase: str) -> Any:
        return nullcontext()

    def ran(self, plan: Plan, marks: Sequence[int], waits: Sequence[tuple[int, int]] = (), checked: tuple[int, int] | None = None) -> None:
        self.ran_with.append((plan, list(marks), list(waits), checked))

    def event(self, *told: Any) -> None:
        self.events.append(told)

    def profiled(self, plan: Plan, index: int, **told: int) -> None:
        self.profiles.append((plan, index, told))


class _Looks:
    """An inspector that notes when it looked."""

    def __init__(self, told: _Told, looks: list[tuple[str, int, int]]) -> None:
        self._told, self._looks = told, looks

    def before(self, plan: Plan, index: int, view: object) -> None:
        self._looks.append(("before", index, self._told.clock()))

    def after(self, plan: Plan, index: int, view: object) -> None:
        self._looks.append(("after", index, self._told.clock()))


def launches(rng: np.random.Generator) -> Measured:
    """In every way to run a plan the readings of a launch are the last before it and the first after it, in the list's order; waits
    for collectives are as many as are waited for, and one for the end; checks have the whole time; unwatched nothing is told. A launch
    beside collectives, and a collective, finds its own line in what its thread runs."""
    wrong, cases = list[str](), 0
    for beside in (False, True):
        for watching, profiling, inspected in ((False, False, False), (True, False, False), (True, True, False), (True, False, True)):
            told, seen = _Told(watching, profiling), list[tuple[str, int, str]]()
            world: Any = SimpleNamespace(rank=0, size=2, advance=lambda: None, place=Place()) if beside else None

            def binder(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs, told: _Told = told,
                       world: Any = world, seen: list[tuple[str, int, str]] = seen) -> Callable[[], None]:
                name = f"{attrs.get('factor', 'sum')}"

                def run() -> None:
                    outs[0][...] = ins[0]
                    seen.append((name, told.clock(), world.place.source if world else ""))
                return run

            catalogue = Catalogue()
            for c in filled(fill):
                if c.op != "scale":
                    catalogue.add(c)
            for op in ("scale", "all_reduce"):
                catalogue.add(Component(id=f"{op}.told", kind="kernel", backend="cpu", op=op, implementation=binder))
            t = Tracer("told")
            x, sums = t.input("x", (8,), "f32"), []
            for i in range(int(rng.integers(2, 6))):
                t.source = f"model.py:{i}"
                x = t.scale(x, factor=float(i + 1))
                if beside and ((watching and i == 0) or rng.random() < 0.5):
                    t.stream = COMM
                    sums.append(t.all_reduce(x, group="dp", size=2, reduce="sum"))
                    t.stream = COMPUTE
            for i, total in enumerate(sums):
                t.output(f"sum{i}", t.scale(total, factor=float(10 + i)))
            t.output("y", x)
            role = Role((Step("told"),), {"told": "told"})
            plan = lower(t.graph, catalogue, "cpu", 1, {})
            p = Program("told", {"told": plan}, role.schedule, {}, {"threads": 1}, others=(role,) * beside,
                        groups={"dp": ((0, 1),)} if beside else {})
            looks = list[tuple[str, int, int]]()
            with CpuExecutor(p, catalogue, world) as executor:
                executor.recorder = told  # type: ignore[assignment]
                executor.inspector = _Looks(told, looks) if inspected else None  # type: ignore[assignment]
                executor.run("told", {"x": np.ones(8, np.float32)})
            cases, what = cases + 1, f"beside {beside}, watching {watching}, profiling {profiling}, inspected {inspected}"
            if sums:
                lines = sorted((name, line) for name, _, line in seen)
                own = [(f"{x.attrs.get('factor', 'sum')}", x.source) for x in plan.launches]
                wrong += [] if lines == sorted(own) else [f"{what}: lines {lines}"]
            if not watching:
                wrong += [f"{what}: told"] if told.ran_with or told.events or told.profiles else []
                continue
            by_name = {name: (at, source) for name, at, source in seen}
            sums_at = iter([at for name, at, _ in seen if name == "sum"])
            ((of, marks, waits, checked),) = told.ran_with
            wrong += [] if of is plan and len(marks) == 2 * len(plan.launches) else [f"{what}: {len(marks)} readings"]
            runs = [next(sums_at) if x.op == "all_reduce" else by_name[f"{x.attrs['factor']}"][0] for x in plan.launches]
            inside = [(marks[2 * i], at, marks[2 * i + 1]) for i, at in enumerate(runs)]
            wrong += [f"{what}: {a} {at} {b}" for a, at, b in inside if not a < at < b]
            alone = [k for k, x in zip(inside, plan.launches) if x.stream == COMPUTE]
            wrong += [f"{what}: out of order"] if any(x[2] > y[0] for x, y in pairwise(alone)) else []
            if not beside:
                wrong += [f"{what}: {k} readings are not those beside it" for k in inside if k[1] - k[0] != 1 or k[2] - k[1] != 1]
            asked = sum(len(x.after) for x in plan.launches if x.stream == COMPUTE) + 1
            wrong += [] if len(waits) == (asked if beside and not inspected and sums else 0) else [f"{what}: {len(waits)} waits of {asked}"]
            wrong += [f"{what}: a wait from {a} to {b}" for a, b in waits if not a < b]
            if inspected:
                order = [(f"{k}", i) for i in range(len(plan.launches)) for k in ("before", "after")]
                wrong += [] if [(k, i) for k, i, _ in looks] == order else [f"{what}: looks {looks}"]
                wrong += [f"{what}: {k} {i} at {at}" for k, i, at in looks if (at < marks[2 * i]) != (k == "before") or
                          (at > marks[2 * i + 1]) != (k == "after")]
                wrong += [] if checked and checked[0] < min(m for _, _, m in looks) and checked[1] > max(m for _, _, m in looks) else [
                    f"{what}: checked {checked}"]
            else:
                wrong += [] if checked is None else [f"{what}: checked"]
            indices = [(of is plan, index, told_["device"], told_["dispatches"]) for of, index, told_ in told.profiles]
            want = [(True, i, b - a, 0) for i, (a, _, b) in enumerate(inside)] if profiling else []
            wrong += [] if indices == want else [f"{what}: profiles {indices}, not {want}"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


def notes(rng: np.random.Generator) -> Measured:
    """Of drawn hand-overs: what was waited for tasks to be taken and to end, by the thread that called; who ran when; the rest of a launch
    is the device's. Each hand-over has a number of its own."""
    wrong, cases, flows = list[str](), 60, list[int]()
    plan: Any = object()
    for _ in range(cases):
        update = bool(rng.integers(2))
        launch = Launch("gelu", "gelu.cpu", (), (), {}, None, "", "update" if update else "forward", "", 0, 0,
                        COMM if rng.random() < 0.3 else COMPUTE)
        phase = "comm" if launch.stream == COMM else "optimizer" if update else "forward"
        told, start, at, seen = _Told(True, True), 100, 100, list[HandOver]()
        events, enqueue, wait = list[tuple[Any, ...]](), 0, 0
        for _ in range(int(rng.integers(4))):
            called = at + int(rng.integers(1, 9))
            tasks = []
            for _ in range(int(rng.integers(4))):
                begun = called + int(rng.integers(1, 50))
                tasks.append((int(rng.integers(3)), begun, begun + int(rng.integers(1, 30))))
            at = called + 100
            seen.append(HandOver(called, at, tasks))
            own = sorted(task[1:] for task in tasks if task[0] == 0)
            first, last = (own[0][0], max(b for _, b in own)) if own else (called, called)
            enqueue, wait = enqueue + first - called, wait + at - last
            events.append(("host enqueue", "gelu", phase, called, first))
            events += [(f"worker {worker}", "gelu", phase, a, b) for worker, a, b in tasks]
        stop = at + 7
        if not seen:
            events.append(("worker 0" if launch.stream == COMPUTE else COMM, "gelu", phase, start, stop))
        note(told, plan, 3, launch, start, stop, seen)  # type: ignore[arg-type]
        wrong += [] if [e[:5] for e in told.events] == events else [f"{told.events}, not {events}"]
        wrong += [] if told.profiles == [(plan, 3, {"enqueue": enqueue, "device": stop - start - enqueue, "wait": wait,
                                                    "dispatches": len(seen)})] else [f"{told.profiles}"]
        mine = [e[5] for e in told.events if len(e) > 5]
        sizes = [1 + len(over.tasks) for over in seen]
        wrong += [] if mine == [flow for flow, n in zip(dict.fromkeys(mine), sizes, strict=True) for _ in range(n)] else [f"flows {mine}"]
        flows += dict.fromkeys(mine)
    wrong += [] if len(flows) == len(set(flows)) else ["a number of a hand-over comes twice"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


def workers(rng: np.random.Generator) -> Measured:
    """An observed pool tells of each hand-over when it was called and when it came back, and of each task between who ran it and when: 0
    for the thread that calls, the same number for one helper always. Before and after it tells nothing; tasks run once in any case."""
    wrong, cases = list[str](), 12
    pool = ObservedWorkers(3)
    numbers = dict[int, set[int]]()
    for case in range(cases):
        readings, ran = count(1), list[tuple[int, int]]()

        def task(i: int, readings: Any = readings, ran: list[tuple[int, int]] = ran) -> Callable[[], None]:
            def run() -> None:
                ran.append((next(readings), threading.get_ident()))
                time.sleep(0.002)
            return run

        tasks = [task(i) for i in range(int(rng.integers(2, 4)))]
        if case % 3 == 0:
            pool.run(tasks)
            wrong += [] if len(ran) == len(tasks) else [f"unobserved {len(ran)} of {len(tasks)} run"]
            continue
        with pool.observed(lambda readings=readings: next(readings)) as seen:  # type: ignore[misc]
            pool.run(tasks)
            pool.run(tasks[:2])
        pool.run(tasks)
        wrong += [] if len(seen) == 2 and len(ran) == 2 * len(tasks) + 2 else [f"{len(seen)} hand-overs, {len(ran)} tasks"]
        for over, n in zip(seen, (len(tasks), 2)):
            wrong += [] if len(over.tasks) == n else [f"{len(over.tasks)} of {n} tasks are told"]
            for worker, begun, ended in over.tasks:
                wrong += [] if over.called < begun < ended < over.returned else [f"{over}"]
                by = [who for at, who in ran if begun < at < ended and not any(
                    b < at < e and (b, e) != (begun, ended) for o in seen for _, b, e in o.tasks)]
                for who in by:
                    numbers.setdefault(who, set()).add(worker)
                    wrong += [] if (worker == 0) == (who == threading.get_ident()) else [f"worker {worker} is another thread"]
        wrong += [] if len(seen) < 2 or seen[0].returned < seen[1].called else ["the second hand-over begins before the first is back"]
    pool.close()
    wrong += [f"a thread has the numbers {found}" for found in numbers.values() if len(found) != 1]
    wrong += ["two threads have one number"] if len({min(found) for found in numbers.values()}) != len(numbers) else []
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


def items(rng: np.random.Generator) -> Measured:
    """A call runs each of its items once, whatever the call before left: one whose items all failed leaves those that nobody took."""
    wrong, cases = list[str](), 24
    for turn in range(cases):
        pool, n = Workers(1 + turn % 3), int(rng.integers(2, 40))
        failing, ran = {*range(n)} if turn % 2 else {int(rng.integers(n))}, list[int]()

        def body(i: int, worker: int, failing: set[int] = failing, ran: list[int] = ran) -> None:
            ran.append(i)
            if i in failing:
                raise InputError(f"item {i}")

        call = Cpu(pool).items(n, body)
        with suppress(InputError):
            call()
            wrong.append(f"{n} items, {len(failing)} of them fail, and nobody is told")
        wrong += [] if len(ran) == len({*ran}) else [f"of {n} items some run twice before the error"]
        failing.clear()
        for _ in range(2):
            ran.clear()
            call()
            wrong += [] if sorted(ran) == [*range(n)] else [f"{n} items, after an error {len(ran)} run"]
        pool.close()
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


def panels(rng: np.random.Generator) -> Measured:
    """The scratch of each worker's panels overlaps no other worker's, and each panel finds there what it wrote."""
    wrong, cases = list[str](), 12
    for turn in range(cases):
        workers, sizes = 2 + turn % 3, [int(k) for k in rng.integers(1, 2000, 12)]
        pool, places, lost = Workers(workers), list[tuple[int, int]](), list[int]()

        def bind(cpu: Cpu, i: int, places: list[tuple[int, int]] = places, lost: list[int] = lost,
                 sizes: list[int] = sizes) -> list[Callable[[], None]]:
            kept = cpu.scratch((sizes[i],), np.int64)
            places.append((kept.ctypes.data, kept.ctypes.data + kept.nbytes))

            def read() -> None:
                if (kept != i).any():
                    lost.append(i)
            return [lambda: kept.fill(i), read]

        Cpu(pool, np.zeros(1 << 20, np.uint8)).panels(len(sizes), bind)()
        pool.close()
        each = [places[k : k + len(sizes)] for k in range(len(sizes), len(places), len(sizes))]  # the first round only counts
        extents = sorted((min(a for a, _ in own), max(b for _, b in own)) for own in each)
        apart = len(each) == workers and all(end <= start for (_, end), (start, _) in pairwise(extents))
        wrong += [] if apart and not lost else [f"{workers} workers: scratch of their own: {apart}, {len(lost)} panels lost theirs"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


MOMENT_S = 10.0


class _Bed(list[Any]):
    """In place of where a caller lies down: as soon as its lock is in, the others go on, until one of them has taken it out to wake it."""

    def __init__(self, go: threading.Event) -> None:
        self._go = go

    def append(self, lock: Any) -> None:
        """It lies down."""
        super().append(lock)
        self._go.set()
        end = time.monotonic() + MOMENT_S
        while self and time.monotonic() < end:
            time.sleep(0.0005)


class _Tired:
    """In place of a caller's wait awake, which is over at once: it goes to sleep. `go`: where it is to be woken just then."""

    go: threading.Event | None = None

    def until(self, found: Any) -> bool:
        """Whether `found`, of the hand-over, came meanwhile."""
        if self.go is not None:
            found.__self__.waiting = _Bed(self.go)
        return False


def late_ends(rng: np.random.Generator) -> Measured:
    """A helper ends the last task, and wakes the caller, just when that is about to sleep; then a task lasts longer than the caller's own.
    Neither hand-over comes back before its tasks are done, however often they take turns."""
    wrong, cases, pool, tired = list[str](), 2 * int(rng.integers(2, 5)), Workers(2), _Tired()
    pool._idle = tired  # type: ignore[assignment]
    for turn in range(cases):
        begun, go, back, done = threading.Event(), threading.Event(), threading.Event(), list[bool]()

        def own(begun: threading.Event = begun) -> None:  # so a helper has the other task
            begun.wait(MOMENT_S)

        def late(begun: threading.Event = begun, go: threading.Event = go, done: list[bool] = done) -> None:
            begun.set()
            done.append(go.wait(MOMENT_S))

        def long(begun: threading.Event = begun, back: threading.Event = back, done: list[bool] = done) -> None:
            begun.set()
            done.append(not back.wait(0.05))

        tired.go = None if turn % 2 else go
        pool.run([own, long if turn % 2 else late])
        found = list(done)
        back.set()
        if found != [True]:
            wrong.append(f"hand-over {turn} comes back before its tasks are done")
            break
    pool.close()
    return yes(not wrong, "; ".join(wrong), cases=cases)


MANY = 20_000
"""Calls that take longer to pass over than a thread that waits for them takes to wake."""


class _Held(SimpleQueue[Any]):
    """In place of a stream's calls: what takes them gets no more once it has so many, until `go`. `held`: it stands there."""

    def __init__(self) -> None:
        self.most, self.taken, self.held, self.go = 0, 0, threading.Event(), threading.Event()

    def get(self, *args: Any, **given: Any) -> Any:
        """The next one, in its time."""
        found = super().get(*args, **given)
        if self.taken == self.most:
            self.held.set()
            self.go.wait(MOMENT_S)
        self.taken += 1
        return found


def _waited(n: int, fails: int, held: int, number: int | None) -> list[str]:
    """What is wrong where of n calls one has failed, and whoever waits for call `number`, or for all, does so before the stream has come to
    call `held`, counted from 0: it goes on when that one sleeps, and not before."""
    with mock.patch(f"{Stream.__module__}.SimpleQueue", _Held):
        stream = Stream("held")
    calls, ran, told, wait = stream._calls, list[int](), list[str](), stream._changed.wait
    assert isinstance(calls, _Held)
    calls.most = held

    def call(i: int) -> None:
        if i == fails:
            raise InputError(f"call {i}")
        ran.append(i)

    def sleep(timeout: float | None = None) -> bool:
        calls.go.set()
        if not wait(MOMENT_S):
            raise TimeoutError
        return True

    for i in range(n):
        stream.give(partial(call, i))
    there = calls.held.wait(MOMENT_S)
    with mock.patch.object(stream._changed, "wait", sleep):
        try:
            stream.wait(number)
            told.append("no error")
        except InputError as error:
            told.append(error.what)
        except TimeoutError:
            told.append("nothing")
    ended = stream._ended
    calls.go.set()
    stream.close()
    good = there and told == [f"call {fails}"] and ran == [*range(fails)] and ended == n
    return [] if good else [f"call {fails} of {n} fails, {number or 'all'} waited for at call {held}: {told} at {ended}, {ran} have run"]


def errors(rng: np.random.Generator) -> Measured:
    """Of calls on a stream one fails: those before it have run, those behind it do not, and whoever waits for all or for one of them has
    the error once all are over, whether that is so already or not; then the stream goes on. None of many runs behind one that failed, nor
    of few, whichever of them is waited for and whichever the stream has come to."""
    wrong, cases = list[str](), 8
    for n in (2, 3, 4):
        for fails, held in combinations(range(n), 2):
            for number in (*range(1, n + 1), None):
                wrong, cases = wrong or _waited(n, fails, held, number), cases + 1
    if wrong:
        return yes(False, wrong[0][:200], cases=cases)
    for case in range(8):
        stream, ran, n, go = Stream(f"told {case}"), list[int](), int(rng.integers(2, 6)), threading.Event()
        named = [t.name for t in threading.enumerate()].count(f"told {case}")
        wrong += [] if named == 1 else [f"{named} threads bear the stream's name"]
        fails = int(rng.integers(n))

        def call(i: int, ran: list[int] = ran, fails: int = fails, go: threading.Event = go) -> Callable[[], None]:
            def run() -> None:
                go.wait()
                if i == fails:
                    raise InputError(f"call {i}")
                ran.append(i)
            return run

        for i in range(n):
            stream.give(call(i))
        told = list[str]()

        def wait(stream: Stream = stream, told: list[str] = told, n: int = n, case: int = case) -> None:
            try:
                stream.wait(n if case % 4 > 1 else None)
                told.append("no error")
            except InputError as error:
                told.append(error.what)

        if case % 2:
            go.set()
            while stream._ended < n:
                time.sleep(0.001)
        waits = threading.Thread(target=wait, daemon=True)
        waits.start()
        go.set()
        waits.join(10)
        wrong += [] if told == [f"call {fails}"] and ran == [*range(fails)] else [f"call {fails} of {n} fails: {told}, {ran} have run"]
        stream.give(lambda ran=ran: ran.append(-1))  # type: ignore[misc]
        stream.close()
        wrong += [] if ran[-1:] == [-1] else ["the stream does not go on"]
        if wrong:
            break
    stream, ran, go = Stream("many"), list[int](), threading.Event()

    def fail() -> None:
        go.wait()
        raise InputError("the first call")

    stream.give(fail)
    for i in range(MANY):
        stream.give(partial(ran.append, i))
    threading.Timer(0.01, go.set).start()
    with suppress(InputError):
        stream.wait()
        wrong.append("of many calls one fails, and nobody is told")
    stream.close()
    wrong += [f"{len(ran)} of {MANY} calls behind one that fails have run"] * bool(ran)
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


def pages(rng: np.random.Generator) -> Measured:
    """Of drawn memory those pages count that were touched, of the last as much as is asked about; of the process its resident set, as the
    kernel says it elsewhere."""
    wrong, cases = list[str](), 12
    for _ in range(cases):
        total = int(rng.integers(3, 40))
        with mmap.mmap(-1, total * PAGE) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            address = np.frombuffer(memory, np.uint8)
            at, first = address.ctypes.data, int(rng.integers(total))
            del address
            touched = sorted(set(rng.integers(0, total, int(rng.integers(total))).tolist()))
            for page in touched:
                memory[page * PAGE] = 1
            length = (total - first) * PAGE - int(rng.integers(PAGE))
            found = resident({"a": (at + first * PAGE, length), "b": (at, total * PAGE)})
            own = min(length, PAGE * sum(page >= first for page in touched))
            wrong += [] if (found["a"], found["b"]) == (own, PAGE * len(touched)) else [f"{found}, {touched} from {first} of {total}"]
            with open("/proc/self/status", encoding="ascii") as status:
                (kilobytes,) = [int(line.split()[1]) for line in status if line.startswith("VmRSS")]
            wrong += [] if 0.8 < found["process"] / (1024 * kilobytes) < 1.25 else [f"{found['process']} bytes, not {kilobytes} KiB"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=2 * cases)
