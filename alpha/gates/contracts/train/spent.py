"""Cases of what is measured of a step: collectives of one rank of many, what saves add, the machine's peak, and hashes that a device makes
beside what follows. Floor 7.

Times are whole numbers below some hundred, so that an interval can be counted as the set of its moments.
"""

# mypy: disable-error-code="arg-type"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.comm.flight import Record
from alpha.comm.world import World
from alpha.component import Measured
from alpha.errors import RankError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.ranks.members import in_threads
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.state import Init, StateLayout, TensorSpec
from alpha.train import communication, peak
from alpha.train.communication import RankRecorder, Spent
from alpha.train.peak import Peak, Speedometer
from alpha.train.ranks import Ranks
from alpha.train.stalls import Stalls

Spans = list[tuple[int, int]]


def _record(created: int, finished: int, call: int = 1, op: str = "all_reduce", nbytes: int = 8, source: str = "m.py:1") -> Record:
    return Record(5, call, op, "f32", nbytes, 3, created, created + 1, finished, source)


def _spans(rng: np.random.Generator, n: int) -> Spans:
    ends = sorted(int(x) for x in rng.choice(np.arange(5, 400), 2 * n, replace=False))
    return list(zip(ends[::2], ends[1::2]))


def collectives(rng: np.random.Generator) -> Measured:
    """Of drawn collectives beside drawn intervals: what of each was waited for and what was hidden, counted moment by moment; those of no
    step left out; rows are their sums by op and stream, and each one where that is asked for."""
    checks: Named = []
    for _ in range(6):
        beside, waits, alone, busy = _spans(rng, 5), _spans(rng, 6), _spans(rng, 4), _spans(rng, 7)
        early = [(busy[i - 1][0] if i % 2 else a, b) for i, (a, b) in enumerate(busy)]  # some begin before the last has ended
        records = [_record(int(low), int(low + rng.integers(1, 40)), i, str(rng.choice(["all_reduce", "broadcast"])), int(rng.integers(99)))
                   for i, low in enumerate(rng.integers(0, 400, 12))]
        for low, high in (*beside, *alone):
            records += [_record(low, high), _record(low + 1, high), _record(low, high + 1), _record(low - 1, high), _record(low, 0)]
        waited, expected = {t for a, b in waits for t in range(a, b)}, list[Spent]()
        working = {t for a, b in early for t in range(a, b)}
        for r in records:
            within = [any(a <= r.created and 0 < r.finished <= b for a, b in spans) for spans in (beside, alone)]
            own = set(range(r.created, r.finished))
            if within[0]:
                expected.append(Spent(r, "comm", len(own & waited), len(own - waited)))
            elif within[1]:
                expected.append(Spent(r, "compute", len(own - working), len(own & working)))
        found = communication.spent(records, beside, waits, alone, early)
        same(checks, "spent", found, expected)
        sums: dict[tuple[str, str], dict[str, Any]] = {}
        for x in expected:
            row = sums.setdefault((x.record.op, x.stream), dict.fromkeys(("calls", "nbytes", "total_ns", "exposed_ns", "overlapped_ns"), 0))
            row["calls"] += 1
            row["nbytes"] += x.record.nbytes
            row["total_ns"] += x.record.finished - x.record.created
            row["exposed_ns"] += x.exposed
            row["overlapped_ns"] += x.overlapped
        every = [("communication", {"step": 7, "rank": 2, "op": op, "stream": stream, **row}) for (op, stream), row in sums.items()]
        ones = [("collectives", {"step": 7, "rank": 2, "grp": 5, "call": x.record.call, "op": x.record.op, "stream": x.stream,
                                 "dtype": "f32",
                                 "nbytes": x.record.nbytes, "asked_ns": x.record.created, "ended_ns": x.record.finished,
                                 "source": "m.py:1"})
                for x in expected]
        same(checks, "rows", list(communication.rows(found, 7, 2, False)), every)
        same(checks, "rows of each", list(communication.rows(found, 7, 2, True)), [*ones, *every])
    same(checks, "nothing", communication.spent([], [(1, 2)], [], []), [])
    schedule = [SimpleNamespace(plan=f"p{i}", shard=i, micro=None) for i in range(3)]
    calls = [(f"p{i}", 10 * i, 10 * i + 5) for i in range(3)]
    same(checks, "calls", communication.called(schedule, calls, 9, 4), [
        {"step": 9, "rank": 4, "call": i, "plan": f"p{i}", "shard": i, "micro": None, "began_ns": 10 * i, "ended_ns": 10 * i + 5}
        for i in range(3)])
    for wrong, came, expected_plan in (([calls[1]], "call 0 of step 9: p1", "p0"),
                                       ([*calls, calls[0]], "call 3 of step 9: p0", "nothing more")):
        same(checks, came, said(lambda: communication.called(schedule, wrong, 9, 4)), error_text(
            "GraphError", "a step ran another Plan than its schedule has", came, expected_plan))
    return all_hold(checks)


class _Store:
    """Metrics of rank 2 that keep what they are told."""

    rank, session = 2, 0

    def __init__(self) -> None:
        self.told, self.added = list[Any](), list[Any]()

    def later(self, rows: Any) -> None:
        """Rows that another thread makes, at once."""
        found = rows()
        self.told += list(found)

    def add(self, table: str, row: Any) -> None:
        """A row."""
        self.added.append((table, row))


def recorded(rng: np.random.Generator) -> Measured:
    """A rank's recorder tells of each interval the collectives since its beginning, laid on when its streams ran and waited, in a profiled
    one or where it is asked for which call of the schedule ran when; it is logged once, when the interval closes; more than the ring keeps
    is an error."""
    checks: Named = []
    launch = [SimpleNamespace(op=op, stream=stream, phase="forward", layer="", source=f"m.py:{i}", ins=(), outs=())
              for i, (op, stream) in enumerate((("add", COMPUTE), ("all_reduce", COMM), ("add", COMPUTE), ("all_gather", COMM)))]
    refs = [SimpleNamespace(type=SimpleNamespace(dtype="bf16", nbytes=n)) for n in (6, 10)]
    beside, alone = SimpleNamespace(name="p0", launches=launch), SimpleNamespace(name="p1", launches=launch[:2])
    schedule = [SimpleNamespace(plan=name, shard=None, micro=None) for name in ("p0", "p1")]
    for each, profiled, logs, step in ((False, False, True, 0), (True, False, False, 7), (False, True, True, 9)):
        ring, store, log, now = [_record(1, 2)] * 3, _Store(), list[Any](), [100]
        flights = SimpleNamespace(written=3, records=lambda first: ring[first:])
        given = list[Any]()

        def note(records: Any, *spans: Any) -> list[Any]:
            given.append((list(records), *(list(s) for s in spans)))
            return []

        own = RankRecorder(store, SimpleNamespace(flights=flights), schedule)
        own.clock, own.each, own.log = lambda: now[0], each, (lambda step, **fields: log.append((step, fields))) if logs else None
        with instead(communication, spent=note), instead(communication.Recorder, so_far=lambda own: None):
            own.begin(step, profiled=profiled)
            first, second = _record(110, 120, 1), _record(130, 140, 2, nbytes=99)
            ring += [first, second]
            flights.written = 5
            own.ran(beside, [101, 105, 106, 116, 107, 109, 117, 121], [(109, 116), (118, 121)])
            own.ran(alone, [122, 125, 126, 129])
            with own.span("data_load"):
                now[0] = 150
            with own.span("comm"):
                now[0] = 160
            own.so_far()
            same(checks, "not logged yet", log, [])
            own.ran(SimpleNamespace(name="p2", launches=[]), [])
            own._schedule = [*schedule, SimpleNamespace(plan="p2", shard=1, micro=2)]  # type: ignore[list-item]
            own._at.device.append((list(communication.PHASES).index("comm"), 170, 175))
            with instead(communication.Recorder, ran_beside=lambda own, launches, times: None):
                for side in ("ins", "outs"):
                    x = SimpleNamespace(op="all_reduce", source="m.py:9", **{"ins": (), "outs": (), side: refs})
                    own.ran_beside([x], [(171, 180)])  # type: ignore[list-item]
            own._at.device.clear()
            own._at.device.append((list(communication.PHASES).index("comm"), 170, 175))
            third, fourth = _record(176, 179, 3), _record(177, 178, 4)
            ring += [third, fourth]
            flights.written = 7
            own._done = 177
            with own.span("comm"):
                now[0] = 181
            own.begin(step + 1, ahead=True)
            own.finish()
        spans = ([(106, 116), (117, 121)], [(109, 116), (118, 121)], [(126, 129), (150, 160)])
        on_device = [Record(0, i, "all_reduce", "bf16", 16, step, 171, 171, 180, "m.py:9") for i in (1, 2)]
        same(checks, "first told", given[0], ([first, second], *spans, []))
        same(checks, "told at the end", given[1], ([first, second, third, *on_device], [*spans[0], (171, 180), (171, 180)],
                                                   [*spans[1], (170, 175)], [*spans[2], (160, 177)], [(170, 175)]))
        same(checks, "begun behind the step's end", given[2], ([fourth], [], [], [(160, 181)], []))
        same(checks, "logged", log,
             [(at, {"op": "all_reduce", "group": r.group, "call": r.call, "dtype": r.dtype, "nbytes": r.nbytes, "us": us,
                      "source": r.source})
              for at, r, us in ((step, first, 0.01), (step, second, 0.01), (step, third, 0.003), *((step, r, 0.009) for r in on_device),
                                (step + 1, fourth, 0.001))] if logs else [])
        times = [("p0", 101, 121), ("p1", 122, 129), ("p2", 160, 160)]
        calls = [("calls", {"step": step, "rank": 2, "call": i, "plan": name, "shard": 1 if i == 2 else None,
                            "micro": 2 if i == 2 else None,
                            "began_ns": a, "ended_ns": b}) for i, (name, a, b) in enumerate(times)]
        same(checks, "calls", [x for x in store.added if x[0] == "calls"], [*calls[:2], *calls] if each or profiled else [])
        own.begin(8)
        flights.records = lambda first: ring[first:][1:]
        flights.written = 10
        ring += [first] * 3
        same(checks, "more than is kept", said(own.so_far), error_text(
            "GraphError", "a step has more collectives than the flight recorder keeps", 3, "at most 2",
            "raise RECORDS in alpha/comm/flight.py"))
    quiet = RankRecorder(None, SimpleNamespace(flights=SimpleNamespace(written=0)), [])
    quiet.begin(3)
    same(checks, "nobody asks", said(quiet.so_far), "None")
    return all_hold(checks)


def saves(rng: np.random.Generator) -> Measured:
    """What is said of saves: before the first step, at the first one, and at the end, as shares of a mean step, with what is above the
    line; nothing where nothing was rehearsed or made."""
    checks: Named = []
    ms = 10**6
    plain, late = Stalls(lambda: 0), Stalls(lambda: 0, beside=True)
    for own in (plain, late):
        same(checks, "nothing yet", (own.before(), own.at_first(), own.after(1e9), own.facts(), own.foretold_ns), ("", "", "", {}, None))
        for name in ("host_ns", "begin_ns", "copy_ns"):
            own.host_ns = own.begin_ns = own.copy_ns = 3
            setattr(own, name, None)
            same(checks, f"no {name}", (own.before(), own.foretold_ns, own.facts()),
                 ("", None, {"save_copy_ns": 3} if own is late and name != "copy_ns" else {}))
        own.host_ns, own.begin_ns, own.copy_ns, own.nbytes = 20 * ms, 3 * ms, 40 * ms, 1_234_500_000
    same(checks, "before", (plain.before(), late.before()), (
        "1,234.5 MB copied at each, 23.0 ms foretold", "1,234.5 MB copied at each to page-locked memory, in 40.0 ms beside the next step's "
        "microbatches, 23.0 ms of the host's beside all that the device was handed; it waits for what lasts longer"))
    same(checks, "rehearsed alone", plain.after(1e9), "")
    same(checks, "no step yet", (late.foretold_ns, late.at_first(), late.after(1e9)), (None, "", ""))
    late.quiet[False], late.microbatches = [12 * ms, 14 * ms], [10 * ms, 11 * ms, 30 * ms]
    late.save()
    late.waits_ns[0] = 2 * ms
    late.under_way[0] = [(False, 15 * ms)]
    same(checks, "at the first", (late.foretold_ns, late.at_first(), plain.at_first()), (
        29 * ms, "29.0 ms foretold beside microbatches of 11.0 ms", ""))
    same(checks, "one", late.after(200.0 * ms),
         "1 with steps behind: 29.0 ms foretold, 4.0 ms measured (one), 14.5% and 2.0% of a mean step")
    same(checks, "facts of one", late.facts(), {"save_foretold_ns": 29 * ms, "save_copy_ns": 40 * ms, "save_measured_ns": 4 * ms})
    late.save()
    same(checks, "behind the first", late.at_first(), "")
    plain.waits_ns = [10 * ms, 14 * ms]
    same(checks, "two", plain.after(100.0 * ms), "2 with steps behind: 23.0 ms foretold, 12.0 ms measured (mean, give or take 4.0 ms), "
         "23.0% and 12.0% of a mean step; 10.0% above the line of 2%")
    same(checks, "no step", [plain.after(x) for x in (0.0, float("nan"))], ["", ""])
    late.quiet = {True: [50 * ms], False: []}
    same(checks, "ahead", late.foretold_ns, 29 * ms)
    late.host_ns = 200 * ms
    same(checks, "the host lasts longer", late.foretold_ns, (203 - 61) * ms)
    late.host_ns, late.copy_ns = 0, 5 * ms
    same(checks, "neither", late.foretold_ns, 0)
    late.steps, late.under_way = 99, []
    for saving, quiet in ((True, 1), (False, 2)):
        late.stepped(7, 3, ahead=True, saving=saving, usual=True)
        same(checks, f"before any save, {saving}", (len(late.quiet[True]), late.under_way), (quiet, []))
    return all_hold(checks)


def peaks(rng: np.random.Generator) -> Measured:
    """A GPU's peak is its data sheet's; a CPU's the best rates over readings until two agree, at most eight; a run keeps its first one,
    also one that an earlier version stated, and refuses two. A reading is products and copies of all workers over the shortest time."""
    checks: Named = []
    for name, flops, bandwidth in (("NVIDIA H200", 989.4e12, 4.8e12), ("NVIDIA H100 80GB HBM3", 989.4e12, 3.35e12),
                                   ("H100 PCIe", 756e12, 2e12),
                                   ("NVIDIA H100 SXM5 x", 989.4e12, 3.35e12)):
        sheet = next(x for x in ("H200", "H100 80GB HBM3", "H100 SXM", "H100 PCIe") if x in name)
        gpu = SimpleNamespace(hardware=lambda: {"hardware": name})
        same(checks, name, peak.peak_of(gpu), Peak(flops, bandwidth, f"NVIDIA's data sheet of the {sheet}: dense bf16 and memory"))
        same(checks, "no readings", peak.readings(gpu, None)(), None)
    for other in ("RTX 9", "NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA H100 NVL"):  # none of them has the peaks of one that is known
        same(checks, "another GPU", said(lambda: peak.sheet(other)), error_text(
            "MachineError", "no data sheet of this GPU is known", other, "H200, H100 80GB HBM3, H100 SXM, H100 PCIe",
            "add its peaks to SHEETS in alpha/train/peak.py"))
    for workers, rounds, taken in ((1, [(5, 9), (6, 8), (5, 9), (6, 8.9)], 4), (3, [(1, 1), (2, 2), (3, 3), (4, 4), (4, 5), (4, 4.95)], 6),
                                   (2, [(2.0**i, 1) for i in range(8)], 8), (1, [(100, 100), (98, 98), (1, 1), (1, 1)], 4),
                                   (1, [(100, 100), (97.9, 98), (1, 1), (1, 1), (98, 1)], 5)):
        left = list(rounds) + [(0, 0)] * 3
        with instead(peak, Speedometer=lambda own: SimpleNamespace(read=lambda: left.pop(0))):
            found = peak.measured(SimpleNamespace(n=workers))
        same(checks, f"{rounds}", (found, len(rounds) + 3 - len(left)), (Peak(
            max(x for x, _ in rounds), max(x for _, x in rounds),
            "measured once, when the run began: float32 512^3 products and 32 MiB copies on "
            f"{workers} worker{'s' * (workers > 1)}"), taken))
    ran, times = list[Any](), [float(x) for x in np.cumsum(rng.integers(1, 9, 40))]
    clock = list(times)

    def run(tasks: Any) -> None:
        for task in tasks:
            task()
        ran.append(len(tasks))

    workers = SimpleNamespace(n=3, run=run)  # type: ignore[assignment]
    with instead(peak, SIZE=2, REPEATS=4, COPY_BYTES=64, COPIES=3, time=SimpleNamespace(perf_counter=lambda: clock.pop(0),
                                                                                        perf_counter_ns=lambda: 77)):
        speed = Speedometer(workers)
        found = speed.read()  # type: ignore[assignment]
        took = np.diff(times)[::2]
        same(checks, "reading", (found, ran), ((2.0 * 8 * 3 / min(took[:4]), 2.0 * 64 * 3 / min(took[4:7])), [3] * 7))
        same(checks, "products", [x.tolist() for x in speed._out], [[[0.5, 0.5], [0.5, 0.5]]] * 3)
    cpu, store = object.__new__(CpuExecutor), _Store()
    cpu.workers = workers  # type: ignore[assignment]
    with instead(peak, Speedometer=lambda own: SimpleNamespace(read=lambda: (3.0, 4.0)), time=SimpleNamespace(perf_counter_ns=lambda: 77)):
        peak.readings(cpu, store)()
    same(checks, "noted", store.added, [("peaks", {"clock_ns": 77, "rank": 2, "flops": 3.0, "bandwidth": 4.0})])
    stated = {"peak_flops": "7.5", "peak_bandwidth": "2.5", "peak_source": "x"}
    for kept, facts, expected in (
            ([(0, 1.0, 2.0, "s")], stated, Peak(1.0, 2.0, "s")), ([], stated, Peak(7.5, 2.5, "x")), ([], {}, Peak(9.0, 9.0, "own")),
            ([], {**stated, "peak_flops": "none"}, Peak(9.0, 9.0, "own"))):
        own = _Store()
        own.path, own.flush = "here", lambda: None  # type: ignore[attr-defined]
        with instead(peak, read=lambda path, name, columns="": kept if name == "run_peak" else list(facts.items()),
                     peak_of=lambda executor: Peak(9.0, 9.0, "own")):
            same(checks, f"{kept} {facts}", peak.peak_of_run("executor", own), expected)
        same(checks, "kept", own.added, [] if kept else [("run_peak", {"session": 0, "flops": expected.flops,
                                                                       "bandwidth": expected.bandwidth, "source": expected.source})])
    with instead(peak, read=lambda path, name, columns="": [(0,), (1,)]):
        same(checks, "two", said(lambda: peak.peak_of_run("executor", own)), error_text(
            "CorruptError", "the run holds more than one peak", "here: 2 rows in run_peak", "one", "restore metrics.sqlite from a copy"))
    return all_hold(checks)


class _Digests:
    """A device's hashes of pieces of 16 bytes, which are made when they are asked for and read when they were waited for."""

    late, piece = True, 16

    def __init__(self, executor: _Device) -> None:
        self.executor, self.waited = executor, 0

    def nbytes(self, kind: str) -> int:
        """Of a kind of state."""
        return self.executor.states[kind].nbytes

    def of_state(self, kind: str, start: int) -> bytes:
        """The piece that begins there."""
        return self.executor.states[kind].tobytes()[start : start + 16]

    def behind(self) -> Any:
        """Waits for what has been asked for."""
        def wait() -> None:
            self.waited += 1
        return wait

    def read(self, made: bytes) -> bytes:
        """Its value."""
        assert self.waited, "it was not waited for"
        return made


class _Device:
    """A device with two kinds of parameters, of which all ranks hold one alike."""

    def __init__(self, cut: bool) -> None:
        self.states = {"param": np.arange(10, dtype=np.float32), "param16": np.arange(10, 20, dtype=np.float32)}
        layout = StateLayout([TensorSpec("one", (4,), "u", Init("ones")), TensorSpec("two", (3,), "u", Init("ones"))])
        self.program = SimpleNamespace(sharded=("param",) if cut else (), states=dict.fromkeys(self.states, layout))
        self.digests, self.recorder, self.checked = _Digests(self), SimpleNamespace(span=self.span), 0

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Of time."""
        yield

    def check(self, hashes: Any) -> None:
        """Hash what is there."""
        self.checked += 1
        hashes()

    def look(self, kind: str) -> np.ndarray:
        """What lies there."""
        return np.concatenate([self.states[kind], np.zeros(4096, np.float32)])


def _decided(world: World, cut: bool, hashed: bool, changes: tuple[str, int, bool] | None) -> Any:
    device, ranks = _Device(cut), Ranks(world)
    ranks.begin(4)
    if changes and changes[2] and world.rank == 1:
        device.states[changes[0]][changes[1]] += 1
    if hashed:
        ranks.hash(device)
    if changes and not changes[2] and world.rank == 1:
        device.states[changes[0]][changes[1]] += 1
    try:
        found = ranks.decide(device, {"loss": 2.0}, world.rank * 3, ahead=world.rank == 0)
        return found, ranks.ahead, device.checked, device.digests.waited, ranks._hashes
    except RankError as error:
        return str(error)


def hashes(rng: np.random.Generator) -> Measured:
    """On devices ranks compare what an update left, hashed right behind it: what comes later changes nothing of it. What all hold alike
    counts, every piece of it, and a difference is told by rank, tensor and step."""
    checks: Named = []
    place = int(rng.integers(4))
    for cut in (False, True):
        alike, other = ("param16", "param") if cut else ("param", "param16")
        for hashed in (False, True):
            sound = (3, False, int(hashed), 1, None)
            for changes, differs in ((None, False), ((alike, place, True), True), ((alike, 4 + place % 3, True), True),
                                     ((other, place, True), False), ((alike, place, False), not hashed)):
                found = in_threads(2, lambda world: _decided(world, cut, hashed, changes))
                if differs:
                    name = "parameter one" if changes and changes[1] < 4 else "what lies between tensors"
                    checks += [(f"{found}"[:150], isinstance(x, str) and "rank 1 has other bits than the others after step 4" in x and
                                f"came:     {name} of rank 1" in x) for x in found]
                else:
                    same(checks, f"{cut} {hashed} {changes}", found, [sound] * 2)
    alone, device = Ranks(), _Device(False)
    alone.hash(device)
    same(checks, "alone", (alone.decide(device, {}, 5, ahead=True), alone.ahead, device.checked), (5, True, 0))
    early = _Device(False)
    early.digests.late = False
    found = in_threads(1, lambda world: Ranks(world).hash(early))
    same(checks, "where nothing is late", (found, early.checked), ([None], 0))
    same(checks, "patience alone", list(_patient(alone)), [1])
    same(checks, "kinds", replace(_record(1, 2), op="x").op, "x")
    return all_hold(checks)


def _patient(ranks: Ranks) -> Iterator[int]:
    with ranks.patient(), nullcontext():
        yield 1
