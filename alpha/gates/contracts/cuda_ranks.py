"""Cases of a rank's executor on a GPU: collectives beside compute, to the bit, however they are run; ranks that are lost. Floor 7.

Functions named `at_*` run in every rank, a process with a GPU of its own, and return (what was wrong, how many things were held). The plans
are made by hand, launch by launch, so that each wait is needed by some number.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from alpha.backends.cuda.executor import CudaExecutor
from alpha.backends.cuda.memory_check import RESERVE, channel_bytes, check_memory, needed
from alpha.backends.cuda.ranks import CudaRank
from alpha.backends.cuda.sum_stages import require_stages, stages_of
from alpha.comm.watch import Deadlines
from alpha.comm.world import World
from alpha.component import Catalogue, Measured
from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.graph import capture
from alpha.cuda_runtime.memory import Arena
from alpha.cuda_runtime.peers import Peers
from alpha.errors import MachineError, RankError
from alpha.gates.contracts import cuda_run
from alpha.gates.contracts.device_priority import Rivals, judged
from alpha.gates.contracts.device_ranks import Case, Found, job, seed_of, sound
from alpha.gates.contracts.reference import batches_of, hash_of, text_of
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.plan import Launch, Memory, Plan, Program, Ref, Role, Step
from alpha.graph.state import StateLayout, TensorSpec
from alpha.graph.verify_program import verify_program
from alpha.ops.collectives import promised
from alpha.ops.table import row
from alpha.parallel.data import DataParallel
from alpha.passes.build import StepShape, build_program
from alpha.profile.recorder import Recorder
from alpha.train.engine import VISIBLE, require_devices, take_device, visible_devices
from alpha.train.ranks import STARTING_S, Ranks
from alpha.types import TensorType

COUNT = 4096
"""Elements of each operand."""
STEPS = 3
GROUP = "dp"
SOUND_S = 30.0
"""Patience of waits that nobody is to try."""

LONG_S = 120.0
"""Patience of a device that nobody is to wait for: a case has a limit before it."""

WAYS = ("", "uncaptured", "watched", "profiled", "bare", "inspected", "budget", "moved", "staged", "again")
"""Ways to run the same steps: plain; each launch by itself; with time stamps; with every kernel timed, by an instrument, or without one;
under an inspector; with an SM budget on what computes; at other addresses; with inputs that were sent before; and once more."""

TYPE = TensorType((COUNT,), "f32")
_NBYTES = TYPE.nbytes


def kernels() -> Catalogue:
    """The kernels of the GPU."""
    return cuda_run.kernels()


def _launch(op: str, ins: Sequence[Ref], out: Ref, after: Sequence[int] = (), *, stream: str = COMPUTE, ranks: int = 0) -> Launch:
    attrs = {"group": GROUP, "size": ranks, "reduce": "sum"} if ranks else {}
    component = "all_reduce.sm90" if ranks else "accumulate.f32.sm90"
    return Launch(op, component, tuple(ins), (out,), attrs, None, "block.0", "backward", f"cuda_ranks.py:{len(ins)}", COUNT,
                  _NBYTES, stream, tuple(after))


def _refs(arena: str, n: int) -> list[Ref]:
    return [Ref(arena, i * _NBYTES, TYPE) for i in range(n)]


LATE = 32
"""Launches before the one that the next plan's first sum reads: a sum that does not wait for it reads what was there before."""


def program(ranks: int = 2, together: int = 0) -> Program:
    """Two plans, of groups of `together` ranks (0: all). `beside`: sums in place and to another place, beside compute that they wait
    for, that waits for them, and that does neither; the last sum is one that only the end of the plan waits for. `take` reads
    what `beside` left, and sums on the stream of compute. The second step overwrites what sums of the first have read.
    """
    grad, act, io = _refs("state.grad0", 3), _refs("act", 4), _refs("io", 6)

    def add(a: Ref, b: Ref, y: Ref, *after: int) -> Launch:
        return _launch("accumulate", (a, b), y, after)

    def total(x: Ref, y: Ref, *after: int, stream: str = COMM) -> Launch:
        return _launch("all_reduce", (x,), y, after, stream=stream, ranks=together or ranks)

    beside = (
        add(io[0], io[1], grad[0]),             # 0
        total(grad[0], grad[0], 0),             # 1: in place
        add(io[1], io[1], act[0]),              # 2
        add(act[0], io[0], grad[1]),            # 3
        total(grad[1], act[1], 3),              # 4: to another place
        add(act[0], io[0], act[2]),             # 5
        add(act[2], grad[0], io[2], 1),         # 6: waits for the first sum
        total(act[2], grad[2], 5),              # 7: nobody waits but the plan's end
        *[add(act[0], io[0], act[3])] * LATE,   # what makes the last one late, and nobody reads
        add(io[2], act[1], io[3], 4),           # waits for the second
    )
    take = (
        total(io[3], act[0]),                   # 0: of what compute left behind the last sum: only the fork says when
        add(grad[2], grad[0], act[3]),          # 1
        total(act[3], io[4], 0, stream=COMPUTE),  # 2: on the stream of compute
        add(io[4], act[0], io[5]),              # 3
    )
    arenas = {"state.grad0": 3 * _NBYTES, "act": 4 * _NBYTES, "io": 6 * _NBYTES}
    plans = {
        "beside": Plan("beside", beside, {"a": io[0], "b": io[1]}, {"first": io[2], "second": io[3]}, arenas, Memory(0, 0, 0)),
        "take": Plan("take", take, {}, {"third": io[5]}, arenas, Memory(0, 0, 0)),
    }
    schedule = (Step("beside", 0, 0), Step("take"))
    layout = StateLayout([TensorSpec(f"w{i}", (COUNT,), f"unit{i}") for i in range(3)])
    assert layout.size == 3 * COUNT
    return Program("ranks by hand", plans, schedule, {"grad0": layout}, {"backend": "cuda", "ranks": ranks},
                   others=tuple(Role(schedule, {"beside": "beside", "take": "take"}) for _ in range(ranks - 1)),
                   groups={GROUP: tuple(tuple(range(i, i + (together or ranks))) for i in range(0, ranks, together or ranks))})


def given(seed: int, step: int, rank: int) -> dict[str, np.ndarray]:
    """The inputs of a rank."""
    rng = np.random.default_rng((seed, step, rank))
    return {name: rng.standard_normal(COUNT).astype(np.float32) for name in ("a", "b")}


def wanted(seed: int, step: int, members: range, rank: int) -> dict[str, np.ndarray]:
    """What a rank's outputs are, by the rows of the op table: sums rounded to f32 once a term, in the tree of the members. `sum`: of the
    first collective."""
    def total(xs: Sequence[np.ndarray]) -> np.ndarray:
        attrs: dict[str, Any] = {"group": GROUP, "size": len(xs), "reduce": "sum"}
        return promised(row("all_reduce"), [(x,) for x in xs], [TYPE], attrs)[0][0]

    ranks, me = len(members), members.index(rank)
    each = [given(seed, step, r) for r in members]
    act0 = [x["b"] + x["b"] for x in each]
    act2 = [a + x["a"] for a, x in zip(act0, each)]
    grad0, act1, grad2 = total([x["a"] + x["b"] for x in each]), total(act2), total(act2)
    firsts = [x + grad0 for x in act2]
    seconds = [x + act1 for x in firsts]
    return {"first": firsts[me], "second": seconds[me], "third": total([grad2 + grad0] * ranks) + total(seconds), "sum": grad0}


class _Looker:
    """An inspector that reads what each launch made. `found`: (plan, launch) -> result."""

    def __init__(self, executor: CudaRank) -> None:
        self.executor, self.found = executor, dict[tuple[str, int], np.ndarray]()

    def before(self, plan: Plan, launch: int, read: Any) -> None:
        """Nothing."""

    def after(self, plan: Plan, launch: int, read: Any) -> None:
        """The result is there when the launch has run."""
        self.found[plan.name, launch] = self.executor.read(plan.launches[launch].outs[0])


def at_steps(peers: Peers, world: World, ways: Sequence[str], seed: int) -> Found:
    """The same steps in every way: the promised bits."""
    wrong, held = list[str](), 0
    for way in ways:
        for name, got, want in _steps(world, seed, way):
            held += 1
            if got.tobytes() != want.tobytes():
                wrong.append(f"{way or 'plain'}, {name}: {int((got.view(np.uint32) != want.view(np.uint32)).sum())} numbers differ")
    return wrong, held


def at_pairs(peers: Peers, world: World, seed: int) -> Found:
    """The same among four ranks of which two sum together."""
    found = _steps(world, seed, "", together=2)
    return [f"pairs, {name}: other bits" for name, got, want in found if got.tobytes() != want.tobytes()], len(found)


def _steps(world: World, seed: int, way: str, together: int = 0) -> list[tuple[str, Any, Any]]:
    """(what, as it is, as it is promised)."""
    p, found, keep = program(world.size, together), list[tuple[str, Any, Any]](), list[Arena]()
    if way == "budget":
        plan = p.plans["beside"]
        p = replace(p, plans={**p.plans, "beside": replace(plan, launches=tuple(
            replace(x, sms=100) if x.stream == COMPUTE else x for x in plan.launches))})
    with CudaRank(p, kernels(), world, captured=way != "uncaptured", patience_s=SOUND_S) as executor:
        if way == "moved":
            keep.append(Arena(12345 * (world.rank + 1), name="in the way"))
        executor.recorder = Recorder()
        if way == "inspected":
            executor.inspector = looker = _Looker(executor)
        names = tuple(s.plan for s in p.schedule)
        for step in range(STEPS):
            if way in ("watched", "profiled", "bare"):
                executor.recorder.begin(step, profiled=way != "watched" and step > 0)
                if way == "bare" and step > 0:
                    executor.watch.instrument = None
            inputs = [given(seed, step, world.rank), {}]
            if way == "staged":
                executor.stage(names, inputs)
                executor.enqueue(names)
            else:
                executor.enqueue(names, inputs)
            got = {name: x for plan in names for name, x in executor.outputs(plan).items()}
            if way in ("watched", "profiled", "bare"):
                executor.recorder.end_step()
            members = next(t for t in p.groups[GROUP] if world.rank in t)
            want = wanted(seed, step, range(members[0], members[-1] + 1), world.rank)
            if way == "inspected":
                got["sum"] = looker.found["beside", 1]
            found += [(f"step {step}, {name}", got[name], want[name]) for name in got]
        executor.recorder.finish()
        if way == "":  # each stream's sums are turns of its own channel
            for (_, stream), channel in executor.channels.items():
                turns = STEPS * sum(x.stream == stream and "group" in x.attrs for plan in p.plans.values() for x in plan.launches)
                found.append(("bytes of a channel", np.int64(channel.arena.nbytes), np.int64(channel_bytes(channel.size))))
                found.append((f"turns of the stream {stream or 'of compute'}", channel.flags(0, 1 - channel.me).max(), np.uint32(turns)))
    for arena in keep:
        arena.free()
    return found


# -- whole models ------------------------------------------------------------------------------------------------------------------

SHARDS, MICROS, MODEL_STEPS = 2, 2, 2


def of_model(name: str, ranks: int = 1, zero: int = 0) -> Program:
    """A bf16 model over so many ranks, or of one process."""
    over = DataParallel(ranks, zero, MICROS, precision="bf16", one_row=True) if ranks > 1 else None
    return build_program(name=name, model=cuda_run.references()[name].model, optimizer=cuda_run.UPDATES["short"], catalogue=kernels(),
                         backend="cuda", precision="bf16", over=over,
                         shape=StepShape(micro_batch=cuda_run.BATCH, seq=cuda_run.SEQ, shards=SHARDS, micros=MICROS, replay=0))


def at_model(peers: Peers, world: World, name: str, zero: int, seed: int) -> Found:
    """A bf16 model, data parallel, its state cut or not: parameters, their copy in bf16, moments and results of each step are to the bit
    those of one process with as many shards."""
    ref, wrong = cuda_run.references()[name], list[str]()
    many = verify_program(of_model(name, world.size, zero))
    rng = np.random.default_rng(seed)
    text = [batches_of(ref, rng, SHARDS, MICROS) for _ in range(MODEL_STEPS)]
    param = rng.standard_normal(many.states["param"].size).astype(np.float32) / 50

    def stepped(executor: CudaExecutor, rank: int) -> list[str]:
        p, found = executor.program, list[str]()
        layout = p.states["param"]

        def own(kind: str, whole: np.ndarray) -> np.ndarray:
            """What of a kind of state this rank holds."""
            cuts = layout.shard(p.ranks).cuts(rank) if kind in p.sharded else ()
            return np.concatenate([whole[lo:hi] for _, lo, hi in cuts]) if kind in p.sharded else whole

        executor.state("param")[...] = own("param", param)
        executor.run("narrow")
        for batches in text:
            for calls in executor.program.replays(rank):
                executor.enqueue(tuple(c.plan for c in calls), [text_of(batches, c) for c in calls])
            out = executor.outputs("update")
            if p.ranks == 1:
                alone.append({k: executor.look(k) for k in (*cuda_run.KEPT, "param16")})
            same = {k: executor.look(k).tobytes() == own(k, x).tobytes() for k, x in alone[len(found)].items()}
            wrong.extend(f"step {len(found)} of {name}: {k} has other bits than one process" for k, good in same.items() if not good)
            found.append(hash_of(*(out[k] for k in sorted(out))))
        return found

    alone: list[dict[str, np.ndarray]] = []

    with CudaExecutor(of_model(name), kernels()) as executor:
        want = stepped(executor, 0)
    with CudaRank(many, kernels(), world, patience_s=LONG_S) as executor:
        got = stepped(executor, world.rank)
    wrong += [f"step {i} of {name} has other results than one process" for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
    return wrong, MODEL_STEPS


def at_decided(peers: Peers, world: World, seed: int) -> Found:
    """After a step all ranks compare their parameters by hashes that devices make: equal ones pass, and one bit that flips in the last
    piece of a rank's is named with rank, tensor and step."""
    wrong, away, ranks = list[str](), world.size - 1, Ranks(world)
    rng = np.random.default_rng(seed)
    layout = StateLayout([TensorSpec(f"w{i}", (LONG_STATE // 8,), f"unit{i}") for i in range(2)])
    act = _refs("act", 2)
    plan = Plan("beside", (_launch("accumulate", (act[0], act[0]), act[1]),) * LATER, {}, {},
                {"state.param": 4 * layout.size, "act": 2 * _NBYTES}, Memory(0, 0, 0))
    role = Role((Step("beside"),), {"beside": "beside"})
    p = Program("state by hand", {"beside": plan}, role.schedule, {"param": layout}, {"backend": "cuda"}, others=(role,) * (world.size - 1),
                groups={GROUP: (tuple(range(world.size)),)})
    with CudaRank(p, kernels(), world, patience_s=SOUND_S) as executor:
        executor.state("param")[...] = rng.standard_normal(layout.size).astype(np.float32)
        executor.run("beside")
        world.step = 7
        if ranks.decide(executor, {"loss": 1.5}, world.rank) != away:
            wrong.append("equal parameters: another decision")
        for willing, together in ((True, True), (world.rank != away, False)):
            ranks.decide(executor, {"loss": 1.5}, 0, willing)
            if ranks.ahead != together:
                wrong.append(f"{'all' if together else 'all but one'} may run ahead, and the answer is {ranks.ahead}")
        last = layout.offsets["w1"] + LONG_STATE // 8 - 1
        world.step = 8
        ranks.hash(executor)
        if world.rank == away:  # what comes behind the hashes is not what they are of; the next ones see it
            executor.state("param")[last] += np.float32(1e-3)
            executor.run("beside")
        ranks.decide(executor, {"loss": 1.5}, 0)
        world.step = 9
        executor.enqueue(("beside",))  # what makes the hashes late
        try:
            ranks.decide(executor, {"loss": 1.5}, 0)
            return [*wrong, "a parameter that differs is not seen"], 5
        except RankError as error:
            if not ("parameter w1" in str(error) and "step 9" in str(error)):
                wrong.append(f"a parameter that differs: {error}")
    return wrong, 5


LATER = 1024
"""Launches before hashes: a host that does not wait for these reads what was there before."""

LONG_STATE = 40 << 20
"""Bytes of a state that is hashed in more than one piece."""


# -- ranks that are lost -----------------------------------------------------------------------------------------------------------

LIMITS = Deadlines(stall=1.0, abort=1.0)
"""Of jobs in which a rank is lost."""
AWAY_S = 20.0
"""How long a rank hangs, or is absent, where nobody ends it."""
BOUND_S = 30.0
"""Seconds, beside a deadline, until the rank that is left has its error: far more than it takes, for a busy machine."""


def at_lost(peers: Peers, world: World, what: str, patience_s: float, seed: int) -> Found:
    """The last rank dies, is stopped, hangs on its host, or raises an error, when it has one step behind it: the others are told whom they
    wait for, in which step, and end in time. `absent`: its host gets on, its device does not come; then the device's patience ends."""
    away, wrong = world.size - 1, list[str]()
    names = ("beside", "take")
    started, handed_over = 0.0, False
    try:
        with ExitStack() as opened:
            with world.patient(STARTING_S):  # one may take longer than another to load its kernels
                executor = opened.enter_context(CudaRank(program(world.size), kernels(), world, patience_s=patience_s))
            for step in range(2):
                world.step = step
                if step and world.rank == away:
                    _be_lost(world, what)
                started, handed_over = time.monotonic(), False
                executor.enqueue(names, [given(seed, step, world.rank), {}])
                handed_over = True
                for plan in names:
                    executor.outputs(plan)
        wrong.append(f"{what}: the step came to its end")
    except RankError as error:
        seconds = time.monotonic() - started
        seen_in = ("all_reduce",) if handed_over else ("", "all_reduce")  # who learns it before a launch is in no collective
        if error.rank != away or error.step != 1 or error.op not in seen_in:
            wrong.append(f"{what}: rank {error.rank}, {error.op}, step {error.step} are named: {error}")
        if seconds > (patience_s if what == "absent" else LIMITS.stall) + BOUND_S:
            wrong.append(f"{what}: told after {seconds:.1f} s")
    return wrong, 1


class Planned(Exception):
    """What a rank raises that is to fail."""


def _be_lost(world: World, what: str) -> None:
    if what in ("killed", "stopped"):
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[what])
    if what == "raises":
        raise Planned("as it was told to")
    end = time.monotonic() + AWAY_S
    while time.monotonic() < end:  # the others end first, and with them this process
        if what == "absent":
            world.until(lambda: True, "all_reduce", time.sleep)
        time.sleep(0.05)


def at_waiting(peers: Peers, world: World, seed: int) -> Found:
    """All ranks wait for their devices for longer than a rank may get on with nothing: no rank is to blame."""
    end = time.monotonic() + 3 * LIMITS.stall
    try:
        world.until(lambda: time.monotonic() > end, "all_reduce", lambda seconds: time.sleep(min(seconds, 0.02)))
    except RankError as error:
        return [f"who waits for a device is blamed: {error}"], 1
    world.exchange(b"none leaves before")
    return [], 1


class _Telling(Recorder):
    """A recorder that keeps what it is told of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Launch, int, int]] = []
        self.hidden: list[int] = []

    def ran_beside(self, launches: Sequence[Launch], times: Sequence[tuple[int, int]]) -> None:
        """As of every recorder."""
        self.told += [(x, start, stop) for x, (start, stop) in zip(launches, times, strict=True)]
        before = self._at.overlapped["comm"]
        super().ran_beside(launches, times)
        self.hidden.append(self._at.overlapped["comm"] - before)


def at_told(peers: Peers, world: World, seed: int) -> Found:
    """A watched step tells of each collective beside compute when it ran, by the clock of compute: after the step began, before it ended,
    one after the other; what was hidden is a part of it."""
    p, wrong, names = program(world.size), list[str](), ("beside", "take")
    beside = [x for plan in names for x in p.plans[plan].launches if x.stream == COMM]
    with CudaRank(p, kernels(), world, patience_s=SOUND_S) as executor:
        executor.recorder = recorder = _Telling()
        for step in range(STEPS):
            recorder.told, recorder.hidden, began = [], [], time.perf_counter_ns()
            recorder.begin(step)
            executor.enqueue(names, [given(seed, step, world.rank), {}])
            if step == STEPS - 1:  # as if the clock had been found to be late
                marks = executor.watch.marks
                host, device, wide = marks._pair
                marks._pair = host + LATE_NS, device, wide
                began += LATE_NS
            for plan in names:
                executor.outputs(plan)
            recorder.end_step()
            ended = time.perf_counter_ns() + LATE_NS * (step == STEPS - 1)
            times = [t for _, start, stop in recorder.told for t in (start, stop)]
            if [x for x, _, _ in recorder.told] != beside:
                wrong.append(f"step {step}: {len(recorder.told)} collectives of {len(beside)} are told of, or others")
            elif not all(a <= b for a, b in zip([began - SURE_NS, *times], [*times, ended + SURE_NS])):
                wrong.append(f"step {step}: collectives ran at {[t - began for t in times]} ns of {ended - began}")
            total = sum(stop - start for _, start, stop in recorder.told)
            if not 0 <= sum(recorder.hidden) <= total:
                wrong.append(f"step {step}: {sum(recorder.hidden)} ns of {total} were hidden")
        recorder.finish()
    return wrong, STEPS


LATE_NS = 10_000_000_000
"""By how much a clock is set forward: more than a step takes on any machine."""

SURE_NS = 200_000
"""How well a device's clock is known."""


def at_first(peers: Peers, world: World, seed: int) -> Found:
    """Collectives have a stream that comes before all others, also in a graph that the executor captured and replays, and the facts say
    what the driver says."""
    wrong, driver = list[str](), _bindings.driver()
    least, greatest = map(int, _bindings.check("cuCtxGetStreamPriorityRange", driver.cuCtxGetStreamPriorityRange()))
    with CudaRank(program(world.size), kernels(), world, patience_s=SOUND_S) as executor:
        own = int(_bindings.check("cuStreamGetPriority", driver.cuStreamGetPriority(executor.beside.handle)))
        others = int(_bindings.check("cuStreamGetPriority", driver.cuStreamGetPriority(int(executor.stream.handle))))
        if not own == greatest < others:
            wrong.append(f"collectives have priority {own}, compute {others}, the highest is {greatest}")
        rivals = Rivals(executor.device, executor.stream, executor.beside)
        executor._bound["take"] = [(executor.plans["take"].launches[0], lambda stream: rivals.enqueue())]
        asked = rivals.median(lambda: executor.enqueue(("take",), [{}]))  # as every step: captured once, and replayed
        plain = capture(lambda stream: rivals.enqueue(), executor.stream)
        said = judged(asked, rivals.median(lambda: plain.launch(executor.stream)))
        wrong += [said] if said else []
        if len(executor._graphs) != 1:
            wrong.append(f"{len(executor._graphs)} graphs where one was to be measured")
        plain.destroy()
        rivals.free()
        if executor.priority != f"{greatest} of {least} to {greatest}":
            wrong.append(f"the facts say {executor.priority}")
    return wrong, 3


# -- jobs --------------------------------------------------------------------------------------------------------------------------

HERE = __name__
RANKS = 2
"""As many GPUs as the executor requires."""


def _case(name: str, *arguments: Any) -> Case:
    return lambda rng: sound([lambda: job(RANKS, f"{HERE}:{name}", *arguments, seed_of(rng))])


def _lost(what: str) -> Case:
    """The rank that is left names the one at fault; then two new ranks have the promised bits on the same devices."""
    def case(rng: np.random.Generator) -> Measured:
        patient = what == "absent"
        ended = job(RANKS, f"{HERE}:at_lost", what, 2.0 if patient else LONG_S, seed_of(rng), limit_s=60.0,
                    deadlines=Deadlines(stall=30.0) if patient else LIMITS)
        found = sound([lambda: ended[:-1]])
        again = sound([lambda: job(RANKS, f"{HERE}:at_steps", ("",), seed_of(rng))])
        wrong = found.note or again.note
        return Measured(error=float(bool(wrong)), bound=0.0, cases=2, note=wrong[:120])
    return case


def _ways(rng: np.random.Generator) -> Measured:
    """One set of bits in every way to run: those that are promised."""
    seed = seed_of(rng)
    found = sound([lambda: job(RANKS, f"{HERE}:at_steps", WAYS, seed)])
    return replace(found, digest="as promised" if not found.error else "other bits")


def _waiting(rng: np.random.Generator) -> Measured:
    return sound([lambda: job(RANKS, f"{HERE}:at_waiting", seed_of(rng), deadlines=LIMITS)])


def _devices(rng: np.random.Generator) -> Measured:
    """Each rank's process sees its own GPU first and the others behind it, of those that it may use; more ranks than GPUs are refused."""
    names, wrong = ["4", "GPU-5d", "6"], list[str]()
    for rank, name in enumerate(names):
        environment = {VISIBLE: ", ".join(names)}
        take_device(cast(World, SimpleNamespace(here=range(len(names)), local_rank=rank)), environment)
        seen = visible_devices(environment)
        wrong += [] if seen[0] == name and sorted(seen) == sorted(names) else [f"rank {rank} sees {seen}"]
    try:
        require_devices(len(names) + 1, {VISIBLE: ",".join(names)})
        wrong.append("more ranks than GPUs")
    except MachineError:
        pass
    return Measured(error=float(len(wrong)), bound=0.0, cases=len(names) + 1, note="; ".join(wrong)[:120])


def _memory(rng: np.random.Generator) -> Measured:
    """What a rank takes: its arenas, of which a cut state has its share, and a channel for each stream on which its group has collectives.
    A run that fits but for these is refused before anything of it is allocated, and the words say what they take."""
    wrong, cases = list[str](), 0
    alone, whole = needed(of_model("gpt")), needed(of_model("gpt", 2))
    for zero in (0, 1):
        p = of_model("gpt", 2, zero)
        n, streams = needed(p, 1), {x.stream for plan in p.plans_of(1).values() for x in plan.launches if "group" in x.attrs}
        arenas = sum(-(-max(size, 1) // 256) * 256 for size in p.arenas(1).values())
        wrong += [] if n.channels == len(streams) * CHANNEL == n.total - n.state - n.rest else [f"zero {zero}: {n.channels} of channels"]
        wrong += [] if arenas <= n.state + n.rest < arenas + (1 << 20) else [f"zero {zero}: arenas of {arenas}, planned {n}"]
        wrong += [] if (n.state < whole.state) == bool(zero) else [f"zero {zero}: {n.state} of state, {whole.state} where it is whole"]
        check_memory(p, n.total + RESERVE, 1)
        for free in (n.total + RESERVE - 1, n.state + n.rest + RESERVE):
            try:
                check_memory(p, free, 1)
                wrong.append(f"zero {zero}: {free} bytes are enough for {n}")
            except MachineError as error:
                wrong += [] if "for channels between ranks" in str(error) else [str(error)]
        cases += 5
    wrong += [] if alone.channels == 0 and needed(program()).channels == 2 * CHANNEL else ["channels of other Programs"]
    wrong += _stages()
    return Measured(error=float(len(wrong)), bound=0.0, cases=cases + 4, note="; ".join(wrong)[:120])


def _stages() -> list[str]:
    """Of the sums of a channel that copy engines move the largest one's stage is counted, on each stream, and a run without room for it is
    refused. Short sums take none."""
    def total(elements: int, stream: str) -> Launch:
        x = Ref("io", 0, TensorType((elements,), "f32"))
        return _launch("all_reduce", (x,), x, (), stream=stream, ranks=RANKS)

    sums = (total(40 << 20, COMM), total(90 << 20, COMM), total(50 << 20, COMM), total(64 << 20, COMPUTE))
    small = program(RANKS)
    plans = {name: replace(plan, launches=sums) for name, plan in small.plans.items()}
    large = replace(small, plans=plans)
    wanted, wrong = {(GROUP, COMM): 180 << 20, (GROUP, COMPUTE): 128 << 20}, list[str]()
    wrong += [] if stages_of(large, 1) == wanted else [f"stages of {stages_of(large, 1)} bytes"]
    wrong += [] if not any(stages_of(small).values()) else ["stages of short sums"]
    said, least = list[str](), needed(large, 1).total + RESERVE + sum(wanted.values())
    for free in (least, least - 1):
        try:
            require_stages(large, free, 1)
            said.append("")
        except MachineError as error:
            said.append(str(error))
    return wrong + ([] if not said[0] and "for stages of sums between ranks" in said[1] else [f"a run with its stages' room: {said}"])


CHANNEL = 10 << 20
"""Bytes of a channel between two ranks, as docs/collectives.md has them."""

LOST = ("killed", "stopped", "hangs", "raises", "absent")

CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "executor.cuda_ranks": {
        "parity": [("steps", _case("at_steps", ("", "uncaptured"))), ("told", _case("at_told")),
                   *((f"model-{name}{'-cut' * zero}", _case("at_model", name, zero)) for name in ("gpt", "llama") for zero in (0, 1))],
        "determinism": [("ways", _ways)],
        "faults": [*((what, _lost(what)) for what in LOST), ("waiting", _waiting), ("decided", _case("at_decided")),
                   ("devices", _devices), ("memory", _memory), ("first", _case("at_first"))],
    },
}
