"""Cases of what a run tells of its time, held against the same told nanosecond by nanosecond. Floor 7.

Times are small whole numbers of a clock that moves when it is told to. So whose each nanosecond is can be written into an array, and every
sum of a row is counted there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.profile.support import Case, Clock, elsewhere
from alpha.gates.contracts.reference import hash_of
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.plan import Launch, Memory, Plan
from alpha.profile.intervals import gaps_of, uncovered_ns, union_ns
from alpha.profile.kernels import Activity, Copy, Kernel, Stamps, Wait, slowdowns
from alpha.profile.partition import partition
from alpha.profile.phases import OVERLAPPING, PHASES
from alpha.profile.recorder import Recorder, sampled

Rows = list[tuple[str, dict[str, Any]]]
NAMES = list(PHASES)
NOBODY = -1
WHOLE = ("eval", "sample_gen", "checkpoint")
"""Phases inside which nothing is told apart."""

OPS = (("matmul", "forward", "forward"), ("gelu", "recompute", "backward"), ("matmul", "wgrad", "backward"), ("sum", "reduce", "backward"),
       ("square_sums", "update", "grad_norm"), ("norm_of_squares", "update", "grad_norm"), ("global_norm", "update", "grad_norm"),
       ("clip_coefficient", "update", "grad_clip"), ("adamw", "update", "optimizer"))
"""(op, phase of a launch, step phase that it counts in), by hand."""


class Kept:
    """As much of a store as a recorder uses: rows stay in a list, the last of each key."""

    rank, session = 3, 2

    def __init__(self) -> None:
        self.rows: Rows = []
        self.facts: list[dict[str, Any]] = []

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Keep what is said."""
        self.facts.append(dict(facts))

    def later(self, rows: Callable[[], Iterable[tuple[str, dict[str, Any]]]]) -> None:
        """Make the rows at once."""
        self.rows += list(rows())

    def of(self, table: str) -> list[dict[str, Any]]:
        """The rows of a table."""
        return [row for name, row in self.rows if name == table]


def plan_of(rng: np.random.Generator, launches: int, *, beside: bool = False) -> tuple[Plan, list[str]]:
    """A plan of drawn launches, and the step phase of each. `beside`: some are collectives on the stream beside compute."""
    made, phases = [], []
    for i in range(launches):
        op, phase, counts = OPS[int(rng.integers(len(OPS)))]
        comm = beside and bool(rng.random() < 0.4)
        made.append(Launch(op, f"{op}.f32.cpu", (), (), {}, None, f"block.{i}", phase, "", int(rng.integers(99)), int(rng.integers(99)),
                           COMM if comm else COMPUTE))
        phases.append("comm" if comm else counts)
    return Plan(f"plan{rng.integers(1 << 30)}", tuple(made), {}, {}, {}, Memory(0, 0, 0)), phases


def counted(owner: np.ndarray) -> dict[str, int]:
    """ns of each phase in an array that says whose each is."""
    return {name: int((owner == i).sum()) for i, name in enumerate(NAMES)}


def differs(row: Mapping[str, Any], owner: np.ndarray, beside: Mapping[str, int]) -> str:
    """What a row of step_timing says otherwise than the array of its interval; '' where nothing."""
    want = {f"{name}_ns": ns for name, ns in counted(owner).items()} | {f"{n}_overlapped_ns": beside.get(n, 0) for n in OVERLAPPING}
    want |= {"unexplained_ns": int((owner == NOBODY).sum()), "wall_ns": len(owner)}
    return ", ".join(f"{key} {row[key]} for {value}" for key, value in want.items() if row[key] != value)


# -- the recorder --------------------------------------------------------------------------------------------------------------


def spans(rng: np.random.Generator) -> Measured:
    """Steps of nested spans and launches on the host: each nanosecond counts once, in the innermost activity, or in none."""
    checks = []
    clock, store = Clock(int(rng.integers(1, 1 << 40))), Kept()
    recorder = Recorder(store, clock=clock)  # type: ignore[arg-type]
    owner: list[int] = []
    wanted = []

    def idle(ns: int, whose: int) -> None:
        clock.pass_(ns)
        owner.extend([whose] * ns)

    def inside(depth: int, whose: int, whole: bool) -> None:
        for _ in range(int(rng.integers(1, 4))):
            idle(int(rng.integers(0, 9)), whose)
            kind = int(rng.integers(4)) if depth < 3 else 3
            if kind < 2:
                phase = str(rng.choice([*OVERLAPPING, "eval", "sample_gen", "checks"]))
                with recorder.span(phase):
                    now = whose if whole else NAMES.index(phase)
                    inside(depth + 1, now, whole or (depth == 0 and phase in WHOLE))
            elif kind == 2 and not depth:
                plan, phases = plan_of(rng, int(rng.integers(1, 6)))
                marks: list[int] = []
                for i, phase in enumerate(phases):
                    if i:
                        idle(int(rng.integers(0, 4)), NAMES.index("idle"))
                    marks.append(clock.now)
                    idle(int(rng.integers(0, 7)), NAMES.index(phase))
                    marks.append(clock.now)
                checked = (marks[0], marks[-1]) if rng.random() < 0.3 else None
                if checked:  # what no launch took of it are checks
                    at = len(owner) - (checked[1] - checked[0])
                    owner[at:] = [NAMES.index("checks") if x == NAMES.index("idle") else x for x in owner[at:]]
                recorder.ran(plan, marks, checked=checked)

    for step in range(60):
        profiled = bool(rng.random() < 0.3)
        recorder.begin(step, profiled=profiled)
        owner = []
        inside(0, NOBODY, False)
        took, length = recorder.end_step(), len(owner)
        checks.append((f"step {step} took {took} for {length}", took == length))
        inside(0, NOBODY, False)  # between steps
        wanted.append((step, np.array(owner), length, profiled))
    recorder.finish()
    rows = store.of("step_timing")
    checks.append((f"{len(rows)} rows", [r["step"] for r in rows] == [step for step, *_ in wanted]))
    for row, (step, whose, length, profiled) in zip(rows, wanted):
        why = differs(row, whose, {})
        checks.append((f"step {step}: {why}", not why and row["step_ns"] == length and row["profiled"] == profiled))
        checks.append(("rank or session", (row["rank"], row["session"]) == (3, 2)))
    checks += [(f"step {a['step']} leaves a gap", a["began_ns"] + a["wall_ns"] == b["began_ns"]) for a, b in pairwise(rows)]
    return all_hold(checks)


def beside_compute(rng: np.random.Generator) -> Measured:
    """Launches on a stream beside compute: what compute waits for is comm, the rest of them is overlapped, and idle is what is left."""
    checks = []
    for _ in range(30):
        clock, store = Clock(1000), Kept()
        recorder = Recorder(store, clock=clock)  # type: ignore[arg-type]
        recorder.begin(0)
        began = clock.pass_(int(rng.integers(0, 5)))
        plan, phases = plan_of(rng, int(rng.integers(2, 9)), beside=True)
        marks, waits, at, free = list[int](), list[tuple[int, int]](), clock.now, clock.now
        whose: dict[int, int] = {}
        busy: list[tuple[int, int]] = []
        for phase in phases:
            length = int(rng.integers(1, 9))
            if phase == "comm":
                start = max(free, at + int(rng.integers(0, 3)))
                free = start + length
                busy.append((start, free))
                marks += [start, free]
                continue
            ready = max([stop for _, stop in busy], default=0) if rng.random() < 0.5 else 0
            if ready > at:
                waits.append((at, ready))
                whose.update(dict.fromkeys(range(at, ready), NAMES.index("comm")))
                at = ready
            at += int(rng.integers(0, 3))
            whose.update(dict.fromkeys(range(at, at + length), NAMES.index(phase)))
            marks += [at, at + length]
            at += length
        if free > at:  # a plan has run when all its streams have
            waits.append((at, free))
            whose.update(dict.fromkeys(range(at, free), NAMES.index("comm")))
        if not waits or not any(phase != "comm" for phase in phases):
            continue
        first, end = min(whose), max(whose) + 1
        clock.now = max(end, free) + int(rng.integers(0, 5))
        recorder.ran(plan, marks, waits)
        recorder.end_step()
        recorder.finish()
        owner = np.full(clock.now - began, NOBODY)
        for t in range(first, end):
            owner[t - began] = whose.get(t, NAMES.index("idle"))
        exposed = {t for a, b in waits for t in range(a, b)}
        over = sum(t not in exposed for a, b in busy for t in range(a, b))
        (row,) = store.of("step_timing")
        why = differs(row, owner, {"comm": over})
        checks.append((why, not why))
        checks.append(("launches", row["launches"] == len(plan.launches)))
    return all_hold(checks)


def drawn_pieces(rng: np.random.Generator, began: int, ended: int, phases: list[int], apart: bool) -> list[tuple[int, int, int]]:
    """(phase, start, stop) in order, some beyond the ends of the interval; `apart`: none overlaps the next."""
    at, found = began - int(rng.integers(0, 6)), []
    while at < ended + 4:
        at += int(rng.integers(0, 7))
        length = int(rng.integers(0, 9))
        found.append((phases[int(rng.integers(len(phases)))], at, at + length))
        at += length if apart else max(0, length - int(rng.integers(0, 3)))
    return found


def by_the_nanosecond(began: int, ended: int, host: list[tuple[int, int, int]], device: list[tuple[int, int, int]]) \
        -> tuple[list[int], list[int]]:
    """ns of each phase alone, and beside a device that is busy, in a step whose pieces are (phase, start, stop)."""
    idle, waiting = NAMES.index("idle"), NAMES.index("device_to_host")
    busy, by, at = dict[int, int](), dict[int, int](), began
    for phase, start, stop in device:
        for t in range(max(start, at), min(stop, ended)):
            busy[t] = phase
        at = max(at, min(stop, ended))
    for phase, start, stop in host:
        by.update(dict.fromkeys(range(max(start, began), min(stop, ended)), phase))
    exclusive, overlapped = [0] * len(NAMES), [0] * len(NAMES)
    for t in range(began, ended):
        if t in busy:
            exclusive[busy[t]] += 1
            if t in by:
                overlapped[by[t]] += 1
        elif busy and min(busy) < t < max(busy) and by.get(t, waiting) == waiting:
            exclusive[idle] += 1
        elif t in by:
            exclusive[by[t]] += 1
    return exclusive, overlapped


def shared_out(rng: np.random.Generator) -> Measured:
    """A step shared out between a device and its host (alpha/profile/partition.py), counted nanosecond by nanosecond."""
    checks = []
    idle, waiting = NAMES.index("idle"), NAMES.index("device_to_host")
    hosts = [NAMES.index(n) for n in ("data_load", "host_to_device", "device_to_host", "checkpoint")]
    kernels = [NAMES.index(n) for n in ("forward", "backward", "optimizer")]
    for trial in range(60):
        began = int(rng.integers(0, 50))
        ended = began + int(rng.integers(1, 120))
        host = drawn_pieces(rng, began, ended, hosts, True) if trial % 5 else []
        device = drawn_pieces(rng, began, ended, kernels, False) if trial % 7 else []
        if trial % 3 == 0:  # a device that begins late and ends early, as most do
            device = [d for d in device if began + 9 < d[1] < ended - 9]
        exclusive, overlapped = by_the_nanosecond(began, ended, host, device)
        got = partition(began, ended, host, device, len(NAMES), idle, waiting)
        checks.append((f"{got} for {(exclusive, overlapped)}", got == (exclusive, overlapped)))
    return all_hold(checks)


def ahead(rng: np.random.Generator) -> Measured:
    """Steps that are handed over ahead of a device: an interval ends with the device's last launch, what the host does for the next step
    counts there, and intervals leave nothing out."""
    checks = []
    clock, store = Clock(10_000), Kept()
    recorder = Recorder(store, clock=clock)  # type: ignore[arg-type]
    handed, enqueue = False, {step: 0 for step in range(9)}
    free = done = clock.now
    for step in range(8):
        recorder.begin(step, ahead=handed)
        for next_step in (step, step + 1):
            if next_step == step and handed:
                continue
            ns = int(rng.integers(1, 30))
            enqueue[next_step] += ns
            if next_step == step:
                recorder.enqueued(ns)
            else:
                with recorder.ahead():
                    recorder.enqueued(ns)
            clock.pass_(ns)
        start = max(free, clock.now - int(rng.integers(0, 20)) if not handed else free + 1)
        times = [(start, start + 40), (start + 42, start + int(rng.integers(60, 90)))]
        recorder.ran_on_device([("forward", 2), ("optimizer", 1)], times)
        free = times[-1][1]
        last = step == 7
        clock.now = max(clock.now, free + int(rng.integers(1, 9)))
        busy = recorder.on_device("forward"), recorder.on_device("forward", "optimizer")
        checks.append((f"on the device {busy}", busy == (40, 40 + times[1][1] - times[1][0])))
        took = recorder.end_step(ahead=not last)
        checks.append((f"step {step} took {took}", took == (clock.now if last else free) - done))
        done, handed = clock.now if last else free, not last
    recorder.finish()
    rows = store.of("step_timing")
    for a, b in pairwise(rows):
        checks.append((f"step {a['step']} and the next", a["began_ns"] + a["wall_ns"] == b["began_ns"]))
    for row in rows:
        checks.append((f"handing over step {row['step']}: {row['enqueue_ns']}", row["enqueue_ns"] == enqueue[row["step"]]))
        known = sum(row[f"{name}_ns"] for name in NAMES) + row["unexplained_ns"]
        checks.append((f"step {row['step']} adds up to {known}", known == row["wall_ns"] and row["launches"] == 3))
    return all_hold(checks)


def profiled_launches(rng: np.random.Generator) -> Measured:
    """Launches of a profiled step, told one by one: sums by launch, FLOPs and bytes by how often it ran; a refused step leaves nothing."""
    checks = []
    clock, store = Clock(500), Kept()
    recorder = Recorder(store, clock=clock)  # type: ignore[arg-type]
    plan, phases = plan_of(rng, 5)
    want: dict[int, list[int]] = {}
    recorder.begin(7, profiled=True)
    for _ in range(30):
        index, *ns = int(rng.integers(5)), *(int(x) for x in rng.integers(0, 99, 4))
        recorder.profiled(plan, index, enqueue=ns[0], device=ns[1], wait=ns[2], dispatches=ns[3])
        want[index] = [a + b for a, b in zip(want.get(index, [0] * 5), [*ns, 1])]
    recorder.event("comm", "sum", "comm", 501, 509)
    recorder.so_far()
    recorder.end_step()
    recorder.begin(8, profiled=True)
    recorder.profiled(plan, 0, enqueue=1, device=1, wait=1, dispatches=1)
    recorder.end_step()
    recorder.abandon()
    recorder.finish()
    rows = {(r["step"], r["launch"]): r for r in store.of("op_profile")}
    checks.append((f"rows {sorted(rows)}", sorted(rows) == [(7, i) for i in sorted(want)]))
    for (_, index), r in rows.items():
        launch, (enqueue, device, wait, dispatches, count) = plan.launches[index], want[index]
        got = [r[k] for k in ("enqueue_ns", "device_ns", "wait_ns", "dispatches", "count", "flops", "nbytes", "op", "layer", "phase")]
        checks.append((f"launch {index}: {got}", got == [enqueue, device, wait, dispatches, count, launch.flops * count,
                                                         launch.nbytes * count, launch.op, launch.layer, phases[index]]))
    checks.append(("enqueued", {r["enqueue_ns"] for r in store.of("step_timing")} == {sum(x[0] for x in want.values())}))
    checks.append((f"{len(store.of('gpu_timeline'))} events", len(store.of("gpu_timeline")) == 1))
    return all_hold(checks)


def kernel_times(rng: np.random.Generator) -> Measured:
    """Kernels, stamps, copies and waits of a step, held against one array each: busy, idle, gaps by cause, copies beside kernels."""
    checks = []
    for _ in range(40):
        began, ended = 100, 100 + int(rng.integers(60, 160))
        kernels, at = [], began + int(rng.integers(0, 9))
        for i in range(int(rng.integers(1, 9))):
            length = int(rng.integers(1, 14))
            if at + length > ended:
                break
            stamp = bool(i and rng.random() < 0.25)
            kernels.append(Kernel("p", NOBODY if stamp else i, 0, "op", "k", "forward", at, at + length, at - int(rng.integers(0, 12))))
            at += length - int(rng.integers(0, 3)) if rng.random() < 0.3 else length + int(rng.integers(0, 9))
        if len({k.start for k in kernels}) < len(kernels) or not kernels:
            continue
        copied_at = rng.integers(began - 5, ended, int(rng.integers(0, 4))).tolist()
        copies = [Copy("HtoD", 8, a, a + int(rng.integers(1, 20))) for a in copied_at]
        waits = [Wait("sync", a, a + int(rng.integers(1, 20))) for a in rng.integers(began, ended, int(rng.integers(0, 4))).tolist()]
        waits += [Wait("sync", a.stop - int(rng.integers(0, 5)), a.stop + int(rng.integers(0, b.start - a.stop + 2)))  # about a gap
                  for a, b in pairwise(kernels) if b.start > a.stop and rng.random() < 0.5]

        def marked(found: Iterable[Any]) -> np.ndarray:
            there = np.zeros(400, bool)
            for x in found:
                there[x.start : x.stop] = True
            return there

        own = [k for k in kernels if not k.is_stamp]
        ran, stamps, copied = marked(own), marked(k for k in kernels if k.is_stamp), marked(copies)
        inside = np.zeros(400, bool)
        inside[min(k.start for k in own) : max(k.stop for k in own)] = True
        gap = inside & ~ran & ~stamps
        edges = np.flatnonzero(np.diff(np.concatenate(([0], gap.astype(int), [0]))))
        gaps = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
        handed = {k.start: k.handed for k in kernels}
        synced = [(a, b) for a, b in gaps if any(w.start < a <= w.stop <= min(b, handed[b]) for w in waits)]
        step = np.zeros(400, bool)
        step[began:ended] = True
        want = {"kernels": len(own), "busy_ns": ran.sum(), "stamp_ns": (stamps & ~ran).sum(), "gap_ns": gap.sum(),
                "idle_ns": (step & ~ran & ~stamps & ~copied).sum(), "gap_copy_ns": (gap & copied).sum(), "copy_ns": copied.sum(),
                "gap_sync_ns": sum((~copied[a:b]).sum() for a, b in synced), "copy_overlapped_ns": (copied & ran).sum(),
                "longest_gap_ns": max((b - a for a, b in gaps), default=0), "copies": len(copies), "syncs": len(waits),
                "sync_ns": sum(w.stop - w.start for w in waits)}
        activity = Activity(kernels, copies, waits, Stamps.against([k.start for k in kernels], kernels), 17)
        row = activity.row(began, ended)
        checks.append((f"gaps {activity.gaps()} for {gaps}", activity.gaps() == gaps))
        checks += [(f"{key} {row[key]} for {value}", row[key] == value) for key, value in want.items()]
        off = [k.start - (k.start + k.stop) // 2 for k in kernels]
        checks.append(("stamps", row["stamp_offset_ns"] == int(np.median(off)) and row["switch_ns"] == 17
                       and row["stamp_spread_ns"] == max(abs(x - int(np.median(off))) for x in off)))
    return all_hold(checks)


def neighbours(rng: np.random.Generator) -> Measured:
    """How much slower a profiled step is: against the median of up to five steady steps on either side, of its own rank and session."""
    checks = []
    for _ in range(20):
        n = int(rng.integers(4, 60))
        step: np.ndarray = np.arange(n) // 2
        run: np.ndarray = np.arange(n) % 2
        ns, profiled = rng.integers(1, 1000, n), rng.random(n) < 0.3
        steady = ~profiled & (rng.random(n) < 0.8)
        order = rng.permutation(n)
        step, run = step[order], run[order]
        profiled, steady = profiled[order], steady[order]
        got = slowdowns(step, run, ns, steady, profiled)
        for i in range(n):
            mine = sorted((int(step[j]), int(ns[j])) for j in range(n) if steady[j] and run[j] == run[i])
            near = [x for x in mine if x[0] < step[i]][-5:] + [x for x in mine if x[0] > step[i]][:5]
            want = ns[i] / np.median([x for _, x in near]) - 1 if profiled[i] and len(near) >= 3 else np.nan
            checks.append((f"{got[i]} for {want}", bool(np.isclose(got[i], want, rtol=1e-12, atol=1e-12, equal_nan=True))))
        a, b = np.sort(rng.integers(0, 60, (2, 7)), axis=0)
        c, d = np.sort(rng.integers(0, 60, (2, 4)), axis=0)
        there, cover = ({t for s, e in zip(*x) for t in range(s, e)} for x in ((a, b), (c, d)))
        checks.append(("union", union_ns(a, b) == len(there) and union_ns(a[:0], b[:0]) == 0))
        checks.append(("uncovered", uncovered_ns(a, b, c, d) == len(there - cover)))
        free = [t for t in range(int(a.min()), int(b.max())) if t not in there]
        checks.append(("gaps", [t for s, e in gaps_of(a, b) for t in range(s, e)] == free and not gaps_of(a[:0], b[:0])))
    return all_hold(checks)


def which_are_profiled(rng: np.random.Generator) -> Measured:
    """As many steps of a run as were asked for, none of the first three, spread so that gaps between them differ by one at most."""
    checks = [(f"none of {steps}", not any(sampled(step, steps, wanted) for step in range(steps)))
              for steps, wanted in ((9, 0), (9, -1), (3, 9), (1, 1))]
    for trial in range(40):
        steps, wanted = (int(rng.integers(1, 400)), int(rng.integers(0, 30))) if trial else (4, 9)
        chosen = [step for step in range(steps) if sampled(step, steps, wanted)]
        least = max(0, min(wanted, steps - 3))
        apart = [b - a for a, b in pairwise(chosen)]
        checks.append((f"{len(chosen)} of {steps}, {wanted} wanted", len(chosen) == least and chosen[:1] == [3] * (least > 0)))
        checks.append((f"apart {apart}", not apart or max(apart) - min(apart) <= 1))
    return all_hold(checks)


def recorder_hash(seed: int) -> str:
    """Of the rows that a drawn step leaves."""
    rng, clock, store = np.random.default_rng(seed), Clock(5), Kept()
    recorder = Recorder(store, clock=clock)  # type: ignore[arg-type]
    for step in range(5):
        recorder.begin(step, profiled=True)
        with recorder.span("data_load"):
            clock.pass_(int(rng.integers(99)))
        plan, _ = plan_of(rng, 3)
        recorder.ran(plan, [clock.now + i for i in range(6)])
        clock.pass_(int(rng.integers(9, 99)))
        recorder.end_step()
    recorder.finish()
    return hash_of(np.frombuffer(json.dumps(store.rows).encode(), np.uint8))


def between_steps(rng: np.random.Generator) -> Measured:
    """What nobody asks for leaves no row: spans between intervals, a recorder without a store, a step that was refused; and an error inside
    of a span ends it."""
    checks = []
    clock, store = Clock(int(rng.integers(1, 999))), Kept()
    for recorder in (Recorder(store, clock=clock), Recorder(None, clock=clock)):  # type: ignore[arg-type]
        said = len(store.rows)
        with recorder.span("eval"):
            clock.pass_(9)
        recorder.finish()
        checks.append(("a row of no step", len(store.rows) == said))
        recorder.begin(0)
        try:
            with recorder.span("data_load"):
                clock.pass_(7)
                raise OSError("the batch could not be read")
        except OSError:
            pass
        clock.pass_(5)
        recorder.end_step()
        recorder.finish()
    rows = store.of("step_timing")
    checks.append((f"{rows}", len(rows) == 1 and rows[0]["data_load_ns"] == 7 and rows[0]["unexplained_ns"] == 5))
    return all_hold(checks)


PARITY: tuple[tuple[str, Case], ...] = (("spans", spans), ("beside compute", beside_compute), ("shared out", shared_out), ("ahead", ahead),
          ("launches", profiled_launches), ("kernels", kernel_times), ("neighbours", neighbours), ("profiled", which_are_profiled))

DETERMINISM: tuple[tuple[str, Case], ...] = (("elsewhere", elsewhere("recorder_hash", recorder_hash, __name__)),)
FAULTS: tuple[tuple[str, Case], ...] = (("between steps", between_steps),)
