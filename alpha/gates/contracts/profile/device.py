"""Cases of what a recorder is told of a device: pieces and collectives by the nanosecond, kernels one by one, texts. Floor 7."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold, differs
from alpha.gates.contracts.profile.recorder import NAMES, Kept, by_the_nanosecond
from alpha.gates.contracts.profile.support import Case, Clock
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.plan import Launch, Memory, Plan, Ref
from alpha.profile.kernels import Activity, Copy, Kernel, Stamps, Wait
from alpha.profile.phases import OVERLAPPING, phase_of
from alpha.profile.recorder import Recorder, dtype_text, shape_text
from alpha.types import TensorType

PIECES = ("forward", "backward", "comm", "optimizer")


def launch(ins: Sequence[tuple[tuple[int, ...], str]] = (), outs: Sequence[tuple[tuple[int, ...], str]] = (), *, op: str = "matmul",
           phase: str = "forward", stream: str = COMPUTE, flops: int = 0, nbytes: int = 0) -> Launch:
    """A launch of these types."""
    refs = [tuple(Ref("act", 0, TensorType(shape, dtype)) for shape, dtype in types) for types in (ins, outs)]
    return Launch(op, f"{op}.f32", refs[0], refs[1], {}, None, "block.0", phase, "", flops, nbytes, stream)


def recorder_of(clock: Clock) -> tuple[Recorder, Kept]:
    """A recorder that keeps its rows in a list."""
    store = Kept()
    return Recorder(store, clock=clock), store  # type: ignore[arg-type]


def inside(spans: Sequence[tuple[int, int]]) -> set[int]:
    """Every nanosecond that some span holds."""
    return {t for start, stop in spans for t in range(start, stop)}


def beside_device(rng: np.random.Generator) -> Measured:
    """Steps whose pieces a device tells, with collectives beside them: each nanosecond counts in one phase, what compute did not wait for
    was hidden. Pieces of a step that was forgotten do not count. When launches are timed, and what is said without a store."""
    checks = []
    clock = Clock(int(rng.integers(1000, 1 << 40)))
    recorder, store = recorder_of(clock)
    checks.append(("before a step", not recorder.watching and not recorder.waits_on_device() and not recorder.on_device(*NAMES)))
    wanted: list[dict[str, Any]] = []
    carried: list[tuple[int, int, int]] = []  # host pieces that reach into the next interval
    done = clock.now
    for step in range(30):
        ahead = step % 3 == 2  # this step was handed over before the last one was done
        began = done if ahead else clock.now
        recorder.begin(step, profiled=False, ahead=ahead)
        checks.append(("watching", recorder.watching))
        recorder.ran_on_device([("forward", 9)], [(began - 40, began - int(rng.integers(0, 9)))])  # of a step that was forgotten
        recorder.ran_on_device([], [])
        host = [p for p in carried if ahead and p[2] > began]
        for _ in range(int(rng.integers(1, 4))):
            phase = str(rng.choice(OVERLAPPING))
            clock.pass_(int(rng.integers(0, 9)))
            with recorder.span(phase):
                checks.append(("not watching", not recorder.watching))
                start = clock.pass_(int(rng.integers(0, 30)))
            host.append((NAMES.index(phase), start, clock.now))
        device: list[tuple[int, int, int]] = []
        launches, at = 0, began + int(rng.integers(0, 9))
        if step % 4 == 1:  # what began before this step, and goes on in it
            device = [(NAMES.index("backward"), began - 30, began - 20), (NAMES.index("forward"), began - 5, at + 1)]
            recorder.ran_on_device([("backward", 0), ("forward", 2)], [(a, b) for _, a, b in device])
            launches, at = 2, at + 1
        for _ in range(int(rng.integers(1, 3))):
            names = [str(x) for x in rng.choice(PIECES, int(rng.integers(1, 5)))]
            counts = rng.integers(0, 9, len(names)).tolist()
            times = []
            for name in names:
                stop = at + int(rng.integers(1, 12))
                times.append((at, stop))
                device.append((NAMES.index(name), at, stop))
                at = stop + int(rng.integers(0, 4))
            recorder.ran_on_device(list(zip(names, counts)), times)
            launches += sum(counts)
        waits = [(a, b) for phase, a, b in device if NAMES[phase] == "comm"]
        checks.append(differs("waits", recorder.waits_on_device(), waits))
        checks.append(differs("busy", recorder.on_device("comm", "forward"),
                              sum(b - a for phase, a, b in device if NAMES[phase] in ("comm", "forward"))))
        collectives, t = list[tuple[int, int]](), began
        for _ in range(int(rng.integers(0, 4))):
            t += int(rng.integers(0, 9))
            collectives.append((t, t := t + int(rng.integers(1, 15))))
        recorder.ran_beside([launch(op="all_reduce", stream=COMM)] * len(collectives), collectives)
        more = {str(x): int(rng.integers(1, 50)) for x in rng.choice(OVERLAPPING, 2)}
        for phase, ns in more.items():
            recorder.overlapped(phase, ns)
        clock.now = max(clock.now, at) + int(rng.integers(0, 9))
        read, late = int(rng.integers(0, 20)), Counter[str]()

        def reading(name: str, read: int = read, late: Counter[str] = late) -> None:
            late.update([f"{name}{len(late)}"])
            clock.pass_(read)

        for name in "ab":
            recorder.afterwards(partial(reading, name))
        next_ahead = step % 3 == 1
        done = device[-1][2] if next_ahead else clock.now
        checks.append(differs("took", recorder.end_step(ahead=next_ahead), done - began))
        checks.append(differs("read in order, once", late, Counter({"a0": 1, "b1": 1})))
        with recorder.span("checkpoint"):
            start = clock.pass_(int(rng.integers(0, 9)))
        host.append((NAMES.index("checkpoint"), start, clock.now))
        ended = done if next_ahead else clock.now
        exclusive, overlapped = by_the_nanosecond(began, ended, host, device)
        over = {name: overlapped[NAMES.index(name)] + more.get(name, 0) for name in OVERLAPPING}
        over["comm"] += sum(b - a for a, b in collectives) - len(inside(collectives) & inside(waits))
        wanted.append({"step": step, "began_ns": began, "wall_ns": ended - began, "step_ns": done - began, "launches": launches,
                       "unexplained_ns": ended - began - sum(exclusive), **{f"{n}_ns": x for n, x in zip(NAMES, exclusive)},
                       **{f"{n}_overlapped_ns": x for n, x in over.items()}})
        carried = host
    recorder.finish()
    rows = store.of("step_timing")
    checks.append(differs("rows", len(rows), len(wanted)))
    for row, want in zip(rows, wanted):
        wrong = {k: (row[k], v) for k, v in want.items() if row[k] != v}
        checks.append((f"step {want['step']}: {wrong}", not wrong))
    facts = {"a": int(rng.integers(99))}
    recorder.describe(facts)
    Recorder(None).describe({"b": 1})
    checks.append(differs("facts", store.facts, [facts]))
    return all_hold(checks)


def kernel_by_kernel(rng: np.random.Generator) -> Measured:
    """Each kernel of a profiled step: rows of kernels and launches are sums over them; gaps, copies, fills and waits are on the timeline; a
    step's rows as they stand are the same, and its timeline is told once."""
    checks = []
    for trial in range(12):
        clock = Clock(int(rng.integers(1000, 1 << 40)))
        recorder, store = recorder_of(clock)
        plans = {}
        for p in "pq":
            made = [launch([((i + 1, 4), "bf16")], [((4,), "f32")] * (i % 2), op=f"op{i}", phase=str(rng.choice(["forward", "recompute"])),
                           flops=int(rng.integers(99)), nbytes=int(rng.integers(99))) for i in range(3)]
            plans[p] = Plan(p, tuple(made), {}, {}, {}, Memory(0, 0, 0))
        recorder.begin(5, profiled=True)
        if trial % 2:
            recorder.profiled(plans["p"], 1, enqueue=3, device=0, wait=2, dispatches=0)
        recorder.ran_on_device([("forward", 4)], [(clock.now, clock.now + 5)])
        began, at, kernels = clock.now, clock.now + int(rng.integers(0, 9)), list[Kernel]()
        for _ in range(int(rng.integers(1, 12))):
            at += int(rng.integers(0, 9))
            index, place, stop = int(rng.integers(3)), int(rng.integers(2)), at + int(rng.integers(1, 12))
            stamp = bool(rng.random() < 0.2)
            kernels.append(Kernel(str(rng.choice(["p", "q"])), -1 if stamp else index, place, f"op{index}", f"k{index}{place}",
                                  str(rng.choice(["forward", "backward"])), at, stop, began))
            at = stop
        own = [k for k in kernels if k.launch >= 0]
        copies = [Copy(name, int(rng.integers(1, 1 << 20)), began + i, began + 9, fill) for i, (name, fill) in
                  enumerate([("HtoD", False), ("DtoH", False), ("memset", True)]) if rng.random() < 0.7]
        waits = [Wait(f"wait{i}", began + i, began + 7 * i + 1) for i in range(int(rng.integers(0, 3)))]
        activity = Activity(kernels, copies, waits, Stamps(3, 2, 1), int(rng.integers(99)))
        clock.now = at + int(rng.integers(1, 9))
        if trial % 3:
            recorder.afterwards(lambda: recorder.ran_kernels(plans, activity))  # noqa: B023
            took = recorder.end_step()
            row, ended = activity.row(began, began + took), clock.now
        else:
            recorder.ran_kernels(plans, activity)
            row, ended = activity.row(began, clock.now), clock.now
            recorder.end_step()
        clock.pass_(int(rng.integers(0, 9)))
        recorder.so_far()
        first = len(store.rows)
        recorder.finish()
        tables = [{t: [r for name, r in some if name == t] for t in ("kernel_times", "kernel_profile", "op_profile", "step_timing")}
                  for some in (store.rows[:first], store.rows[first:])]
        checks.append(("the same rows", tables[0] == tables[1]))
        key = {"step": 5, "rank": 3}
        checks.append(differs("kernel_times", tables[0]["kernel_times"], [{**key, **row}]))
        each = {(r["plan"], r["launch"], r["place"]): (r["count"], r["device_ns"], r["op"], r["kernel"], r["step"], r["rank"])
                for r in tables[0]["kernel_profile"]}
        same = {(k.plan, k.launch, k.place): [x for x in own if (x.plan, x.launch, x.place) == (k.plan, k.launch, k.place)] for k in own}
        checks.append(differs("kernel_profile", each, {place: (len(x), sum(k.stop - k.start for k in x), x[0].op, x[0].name, 5, 3)
                                                       for place, x in same.items()}))
        ops = {(r["plan"], r["launch"]): r for r in tables[0]["op_profile"]}
        told_ = [("p", 1)] if trial % 2 else []
        checks.append(differs("launches", set(ops), {(k.plan, k.launch) for k in own} | set(told_)))
        for (plan, index), r in ops.items():
            of, ran, more = plans[plan].launches[index], [k for k in own if (k.plan, k.launch) == (plan, index)], (plan, index) in told_
            count = sum(k.place == 0 for k in ran) + more
            want = {"device_ns": sum(k.stop - k.start for k in ran), "dispatches": len(ran), "count": count, "flops": of.flops * count,
                    "nbytes": of.nbytes * count, "enqueue_ns": 3 * more, "wait_ns": 2 * more, "phase": phase_of(of),
                    "shape": f"bf16[{index + 1},4] -> {'f32[4]' * (index % 2)}", "dtype": "f32" if index % 2 else "bf16"}
            checks.append(differs(f"launch {index}", {k: r[k] for k in want}, want))
        columns = ("track", "name", "category", "start_ns", "stop_ns", "flow")
        events = [tuple(r[c] for c in columns) for r in store.of("gpu_timeline")]
        want_events = [("gaps", "gap", "idle", a, b, None) for a, b in activity.gaps()]
        want_events += [("fills" if c.fill else "copies", f"{c.name} {c.nbytes:,} bytes",
                         "device_to_host" if c.name == "DtoH" else "host_to_device", c.start, c.stop, None) for c in copies]
        want_events += [("sync waits", w.name, "device_to_host", w.start, w.stop, None) for w in waits]
        checks.append(differs("timeline", events, want_events))
        pieces = sorted((k.start, k.stop, NAMES.index(k.phase)) for k in own)
        exclusive, _ = by_the_nanosecond(began, clock.now, [], [(p, a, b) for a, b, p in pieces])
        timing = tables[0]["step_timing"][0]
        checks.append(differs("phases", [timing[f"{n}_ns"] for n in NAMES], exclusive))
        checks.append(("its end", ended <= clock.now))
    return all_hold(checks)


def hardly_any_kernel(rng: np.random.Generator) -> Measured:
    """Stamps alone, nothing at all, a kernel of no length, stamps before the first kernel and behind the last: none of it is a gap."""
    checks = []
    at = [int(x) for x in np.cumsum(rng.integers(2, 30, 9))]

    def kernel(i: int, launch: int = 0) -> Kernel:
        return Kernel("p", launch, 0, "op", "k", "forward", at[i], at[i + 1], at[0])

    point = Kernel("p", 0, 0, "op", "k", "forward", at[3], at[3], at[0])
    between = [(at[4], at[5])]
    either_side = [kernel(0, -1), kernel(3), kernel(5), kernel(7, -1)]
    for name, kernels, gaps in (("nothing", [], []), ("stamps", [kernel(1, -1), kernel(3, -1)], []), ("a point", [point], []),
                                ("one", [kernel(3)], []), ("a stamp on either side", either_side, between),
                                ("any order", [kernel(5), kernel(3), kernel(7, -1)], between),
                                ("next to each other", [kernel(3), kernel(4)], [])):
        activity = Activity(kernels)
        row = activity.row(at[0], at[8])
        busy = inside([(k.start, k.stop) for k in kernels if k.launch >= 0])
        stamped = inside([(k.start, k.stop) for k in kernels if k.launch < 0])
        want = {"kernels": sum(k.launch >= 0 for k in kernels), "busy_ns": len(busy), "stamp_ns": len(stamped - busy),
                "idle_ns": at[8] - at[0] - len(busy | stamped), "gap_ns": sum(b - a for a, b in gaps),
                "longest_gap_ns": max([0, *(b - a for a, b in gaps)]), "gap_sync_ns": 0, "gap_copy_ns": 0, "copies": 0, "copy_ns": 0,
                "copy_overlapped_ns": 0, "syncs": 0, "sync_ns": 0, "stamps": 0, "stamp_offset_ns": 0, "stamp_spread_ns": 0, "switch_ns": 0}
        checks.append(differs(name, (activity.gaps(), row), (gaps, want)))
    off = [int(x) for x in rng.integers(-50, 50, 5)]
    kernels = [kernel(i, -1) for i in range(5)]
    got = Stamps.against([(k.start + k.stop) // 2 + x for k, x in zip(kernels, off)], kernels)
    middle = sorted(off)[2]
    checks.append(differs("stamps", got, Stamps(5, middle, max(abs(x - middle) for x in off))))
    checks.append(differs("no stamp", Stamps.against([], []), Stamps(0, 0, 0)))
    return all_hold(checks)


def launch_texts(rng: np.random.Generator) -> Measured:
    """What a launch is of, as its row says: operands, results, the element type of the first result or else operand; its step phase."""
    checks = []
    a, b = ((int(rng.integers(1, 9)), 128), "f32"), ((7,), "bf16")
    texts = [f"f32[{a[0][0]},128]", "bf16[7]"]
    for ins, outs, shape, dtype in (([a, b], [b], f"{texts[0]} {texts[1]} -> {texts[1]}", "bf16"),
                                    ([a, b], [], f"{texts[0]} {texts[1]} -> ", "f32"),
                                    ([], [b, a], f" -> {texts[1]} {texts[0]}", "bf16"), ([], [], " -> ", "")):
        of = launch(ins, outs)
        checks.append(differs("texts", (shape_text(of), dtype_text(of)), (shape, dtype)))
    for op, phase, want in (("matmul", "forward", "forward"), ("matmul", "backward", "backward"), ("gelu", "recompute", "backward"),
                            ("matmul", "wgrad", "backward"), ("sum", "reduce", "backward"),
                            ("global_norm", "update", "grad_norm"), ("square_sums", "update", "grad_norm"),
                            ("norm_of_squares", "update", "grad_norm"), ("clip_coefficient", "update", "grad_clip"),
                            ("scalars_of_squares", "update", "grad_clip"), ("finite_flag", "update", "grad_clip"),
                            ("adamw", "update", "optimizer"), ("sgd", "update", "optimizer"), ("lr", "update", "optimizer")):
        checks.append(differs(f"{op} {phase}", phase_of(launch(op=op, phase=phase)), want))
        checks.append(differs("a collective", phase_of(launch(op=op, phase=phase, stream=COMM)), "comm"))
    return all_hold(checks)


def quiet(rng: np.random.Generator) -> Measured:
    """Launches of no Segment change nothing; the second run of a Plan counts as the first; before any step, or without a store, nothing is
    told so far."""
    checks = []
    clock = Clock(int(rng.integers(1000)))
    recorder, store = recorder_of(clock)
    plan = Plan("p", (launch(phase="forward"), launch(phase="backward")), {}, {}, {}, Memory(0, 0, 0))
    recorder.so_far()
    none = Recorder(None, clock=clock)
    none.begin(0, profiled=True)
    none.event("t", "n", "p", 1, 2)
    none.so_far()
    checks.append(differs("nothing", store.rows, []))
    recorder.begin(1)
    want = [0, 0, 0]
    for _ in range(3):
        recorder.ran(plan, [])
        marks = [clock.now + int(x) for x in np.cumsum(rng.integers(0, 9, 4))]
        recorder.ran(plan, marks)
        want = [w + x for w, x in zip(want, (marks[1] - marks[0], marks[3] - marks[2], marks[2] - marks[1]))]
        clock.now = marks[3]
    recorder.end_step()
    read = list[int]()
    recorder.afterwards(lambda: read.append(1))
    recorder.finish()
    recorder.begin(2)
    recorder.afterwards(lambda: read.append(2))
    recorder.abandon()
    checks.append(differs("what was put off", read, [1, 2]))
    (row,) = store.of("step_timing")
    checks.append(differs("twice", [row["forward_ns"], row["backward_ns"], row["idle_ns"], row["launches"]], [*want, 6]))
    return all_hold(checks)


PARITY: Sequence[tuple[str, Case]] = (("beside a device", beside_device), ("kernel by kernel", kernel_by_kernel),
                                      ("hardly any kernel", hardly_any_kernel), ("texts of launches", launch_texts), ("quiet", quiet))
