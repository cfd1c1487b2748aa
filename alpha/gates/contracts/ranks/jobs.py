"""Cases of what a job of ranks rests on beside its collectives: transport, watch, launch, handshake, decisions, saves, supervisor.
Floor 7.

Ranks are processes of a warm server (members.py). Functions named `at_*` run in each of them; `launched` and what it calls run in one
process that is no rank and starts its own.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial, reduce
from operator import and_, or_
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha import config
from alpha.checkpoint import folders
from alpha.checkpoint.disk import Disk
from alpha.comm import collectives
from alpha.comm.message import About
from alpha.comm.segment import Segment
from alpha.comm.watch import Deadlines
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.cuda_runtime._bindings import CudaError
from alpha.errors import InputError, MachineError, RankError
from alpha.gates.contracts.made_state import cut_of, same
from alpha.gates.contracts.ranks import ends, joining, memory, places, told
from alpha.gates.contracts.ranks.calls import misbehave
from alpha.gates.contracts.ranks.collectives import BOUND_S, SHORT, SOUND, seed_of, sound
from alpha.gates.contracts.ranks.members import Ended, members
from alpha.gates.contracts.ranks.messages import FAULTS, Link, faulty
from alpha.graph.state import StateLayout, TensorSpec
from alpha.train import handshake, launch, supervisor
from alpha.train.ranks import Ranks
from alpha.train.saving import Saver

Case = Callable[[np.random.Generator], Measured]
Found = tuple[list[str], int]


def _measured(wrong: Sequence[str], cases: int, digest: str = "") -> Measured:
    return Measured(error=float(len(wrong)), bound=0.0, cases=cases, digest=digest, note=wrong[0][:120] if wrong else "")


def _hash(*texts: object) -> str:
    return hashlib.sha256("\0".join(map(str, texts)).encode()).hexdigest()


def _job(function: Callable[..., Found], *sizes: int) -> Case:
    """`function(world, seed)` among so many ranks, one number after another."""
    def case(rng: np.random.Generator) -> Measured:
        seed = seed_of(rng)
        return sound([partial(members().run, function, size, seed, deadlines=SOUND) for size in sizes])
    return case


# -- transport ---------------------------------------------------------------------------------------------------------------------


def _both_ways(rng: np.random.Generator) -> Measured:
    """Messages of every length from 0 to the longest, both ways, more than a ring holds: each is delivered once, in order, whole."""
    link, about, wrong, digest = Link(), About("all_reduce", "f32", 7, 3, 1000, "direct", "sum"), list[str](), hashlib.sha256()
    link.fresh()
    ends = link.sender, link.receiver
    sizes = [0, 1, 63, 64, 65, 4095, 4096, *map(int, rng.integers(0, 4097, 33))]
    for i, n in enumerate(sizes):
        for one, other in ((0, 1), (1, 0)):
            payload = rng.integers(0, 256, n).astype(np.uint8)
            given, progress = payload.copy(), [link.segment.control.progress(rank) for rank in (0, 1)]
            ends[one].send(other, about, i, given)
            said = [link.segment.control.progress(rank) - before for rank, before in enumerate(progress)]
            wrong += [] if said[one] > 0 == said[other] else [f"who sends gets on, and nobody else: {said}"]
            given[...] = 0  # what was handed over may be written again
            came = ends[other].receive(one, about, i, n)
            wrong += [] if came.tobytes() == payload.tobytes() else [f"message {i} of {n} bytes from {one}"]
            digest.update(came.tobytes())
            progress = [link.segment.control.progress(rank) for rank in (0, 1)]
            ends[other].release(one)
            said = [link.segment.control.progress(rank) - before for rank, before in enumerate(progress)]
            wrong += [] if said[other] > 0 == said[one] else [f"who releases gets on, and nobody else: {said}"]
    link.segment.close()
    return _measured(wrong, 2 * len(sizes), digest.hexdigest())


def _full(rng: np.random.Generator) -> Measured:
    """A ring whose slots are all taken takes no more, and goes on once one is released; nothing that was taken is overwritten."""
    link, about, wrong = Link(), About("send", "f32", 7, 3, 1000), list[str]()
    link.fresh()
    payloads = [rng.integers(0, 256, 4096).astype(np.uint8) for _ in range(5)]
    for i in range(4):
        link.sender.send(1, about, i, payloads[i])
    held = link.receiver.receive(0, about, 0, 4096)
    try:
        link.sender.send(1, about, 4, payloads[4])
        wrong.append("a fifth message went into four slots")
    except RankError:
        pass
    wrong += [] if held.tobytes() == payloads[0].tobytes() else ["what was being read was overwritten"]
    link.segment.close()
    return _measured(wrong, 2)


def _planted(fault: str) -> Case:
    """Faults in the memory between both ends: each is seen, its sender named, and nothing wrong delivered."""
    def case(rng: np.random.Generator) -> Measured:
        link, number = Link(), 20 if fault == "dropped" else 60  # of those that are dropped a third is waited for
        wrong = [w for w in (faulty(link, fault, rng) for _ in range(number)) if w]
        link.segment.close()
        return _measured(wrong, number)
    return case


def _honest(rng: np.random.Generator) -> Measured:
    """The same harness without a fault sees none."""
    link = Link()
    found = {faulty(link, "none", rng) for _ in range(20)}
    link.segment.close()
    return _measured(sorted(found - {"none: nobody saw it"}), 20)


def _numbers(rng: np.random.Generator) -> Measured:
    """Groups are told apart by all 32 bits of their number: among many names each bit is both 0 and 1, and no two numbers are equal."""
    found = list[int]()
    for _ in range(16):
        with World(Segment.create(1), 0) as world:
            found += [world.add_group(f"group {int(rng.integers(1 << 60))}", [(0,)]).number for _ in range(3)]
    every, some = reduce(and_, found), reduce(or_, found)
    wrong = [] if (every, some) == (0, 0xFFFFFFFF) else [f"bits {every | ~some & 0xFFFFFFFF:#x} of {len(found)} numbers never differ"]
    wrong += [] if len(set(found)) == len(found) else ["two groups have one number"]
    return _measured(wrong, len(found))


def at_channels(world: World, seed: int) -> Found:
    """Groups of the same ranks have rings of their own: what one holds back, another passes."""
    first, second = world.group(WORLD), world.add_group("again", [range(world.size)])
    other, mine = (world.rank + 1) % 2, np.full(100, world.rank, np.float32)
    theirs, later = np.empty(100, np.float32), np.empty(100, np.float32)
    collectives.send(first, mine, to=other)
    collectives.send(second, mine + 10, to=other)
    collectives.receive(second, later, source=other)
    collectives.receive(first, theirs, source=other)
    wrong = [] if (theirs == other).all() and (later == other + 10).all() else ["a message went to another group"]
    return wrong, 2


# -- watch -------------------------------------------------------------------------------------------------------------------------


def at_patience(world: World, seed: int, announced: bool) -> Found:
    """A rank takes far longer than the deadline: it said so, or it gets on. The others wait."""
    if world.rank == seed % world.size:
        if announced:
            with world.patient(20.0):
                time.sleep(1.2)
        else:
            for _ in range(12):
                time.sleep(0.1)
                world.advance()
    collectives.barrier(world.group(WORLD))
    return [], 1


def _waited(rng: np.random.Generator) -> Measured:
    """Two jobs: after a long collective of a job, its next ones may take as long."""
    seed = seed_of(rng)
    short = replace(SHORT, stall=0.3)
    return sound([partial(members().run, at_patience, 3, seed, announced, deadlines=short) for announced in (True, False)])


def at_loss(world: World, what: str, victim: int) -> None:
    """Reductions; at number four the victim does `what`. `circle`: each receives from the next. `chain`: but the victim sleeps."""
    group, x = world.group(WORLD), np.ones(500, np.float32)
    if what == "circle":
        collectives.receive(group, x, source=(group.index + 1) % group.size)
    if what == "chain":
        if world.rank == victim:
            time.sleep(3)
        if (world.rank + 1) % 3 == victim:  # who waits behind it is the first to give up
            world._watch.deadlines = Deadlines(stall=10.0)
        collectives.receive(group, x, source=(group.index + 1) % 3)
    for step in range(8):
        if step == 4 and world.rank == victim:
            misbehave(world, what)
        collectives.all_reduce(group, x, x, reduce="average")


SAYS = {"dies": "rank {} died", "exits": "rank {} died", "stops": "rank {} is stopped", "hangs": "rank {} is sleeping",
        "raises": "MemoryError: planted", "circle": "ranks wait for each other in", "chain": "rank {} is sleeping"}
"""What happens to a rank -> what the others say of it."""


def _lost(what: str) -> Case:
    def case(rng: np.random.Generator) -> Measured:
        victim, wrong = int(rng.integers(3)), list[str]()
        ended = members().run(at_loss, 3, what, victim, deadlines=SHORT, limit_s=BOUND_S)
        for rank, e in enumerate(ended):
            if rank == victim and what != "circle":
                continue
            if e.hung or e.rank is None or e.served > BOUND_S:
                wrong.append(f"rank {rank} {'hangs' if e.hung else 'ended otherwise'}: {e.error.splitlines()[-1:]}")
            elif what != "circle" and e.rank != victim:
                wrong.append(f"rank {rank} names rank {e.rank}, at fault was {victim}")
        if not any(SAYS[what].format(victim) in e.error for e in ended):
            wrong.append(f"nobody says {SAYS[what].format(victim)!r}")
        return _measured(wrong, 2, _hash(what))
    return case


def _absent(rng: np.random.Generator) -> Measured:
    """A rank that never comes is named after `join`."""
    ended = members().run(at_loss, 3, "none", 2, deadlines=replace(SHORT, join=0.5), absent=(2,), limit_s=BOUND_S)
    said = "2 never came"  # after another one, where that comes late too
    return _measured([f"rank {r}: {e.error.splitlines()[:1]}" for r, e in enumerate(ended[:2]) if e.rank is None or said not in e.error], 2)


def at_leaving(world: World, victim: int) -> None:
    """One leaves in good order while the others still need it."""
    if world.rank != victim:
        collectives.barrier(world.group(WORLD))


def _left(rng: np.random.Generator) -> Measured:
    victim = int(rng.integers(3))
    ended = members().run(at_leaving, 3, victim, deadlines=SHORT, limit_s=BOUND_S)
    others = [e for r, e in enumerate(ended) if r != victim]
    wrong = [e.error.splitlines()[0] if e.error else "went on" for e in others if e.rank != victim or e.served > BOUND_S]
    wrong += [] if any(f"rank {victim} has left" in e.error for e in others) else [f"nobody says that rank {victim} has left"]
    return _measured(wrong, 2)


def _named(rng: np.random.Generator) -> Measured:
    """Who dies is named, whoever it is and however often it is tried."""
    said = []
    for victim in range(3):
        ended = members().run(at_loss, 3, "dies", victim, deadlines=SHORT, limit_s=BOUND_S)
        said += [f"{r} names {e.rank} in {e.op}" for r, e in enumerate(ended) if r != victim]
    return _measured([], 6, _hash(*said))


# -- launch ------------------------------------------------------------------------------------------------------------------------

QUICK = Deadlines(join=30.0, stall=0.5, abort=0.5)
STAYING = Deadlines(join=5.0, stall=0.5, abort=0.5)
STEPS, AT = 12, 5


def _body(case: str, victim: int, world: World, tell: launch.Tell) -> int:
    """Twelve sums; at number five the victim has its fault."""
    if world.rank == 0:
        tell(path="a run")
    x = np.ones(300, np.float32)
    for step in range(STEPS):
        world.step = step
        if step == AT and world.rank == victim:
            if case == "refuses":
                raise InputError("planted", came="this", expected="that", do="nothing")
            if case in ("lost-gpu", "hidden-gpu"):
                _lose_gpu(hidden=case == "hidden-gpu")
            if case == "full-gpu":
                raise CudaError("the driver call cuMemAlloc failed", came="CUDA_ERROR_OUT_OF_MEMORY (2): out of memory")
            if case == "deaf":  # it neither dies nor listens
                time.sleep(30)
            if case not in ("none", "late", "code", "slow", "stays"):
                misbehave(world, case)
        collectives.all_reduce(world.group(WORLD), x, x, reduce="average")
    if case == "late" and world.rank == victim:  # nobody waits any more
        os.kill(os.getpid(), signal.SIGSTOP)
    if case in ("slow", "stays") and world.rank == victim:  # behind the others' end, for less than it may and for more
        time.sleep(1.5 if case == "slow" else 30.0)
    return 4 if case == "code" and world.rank == victim else 0


def _lose_gpu(hidden: bool) -> None:
    """Raise what a driver says whose context is lost. `hidden`: behind an error of who cleans up after it."""
    try:
        raise CudaError("the driver call cuEventSynchronize failed", came="CUDA_ERROR_ILLEGAL_ADDRESS (700): planted")
    except CudaError:
        if not hidden:
            raise
        raise ValueError("a clean-up that fails, too")  # noqa: B904  what came before it is what is looked for


def launched(case: str, victim: int) -> tuple[launch.Ended, float]:
    """A job of three ranks, and what it took."""
    began = time.monotonic()
    ended = launch.launch(3, partial(_body, case, victim), deadlines=STAYING if case == "stays" else QUICK)
    return ended, time.monotonic() - began


OUTCOMES: dict[str, tuple[int, bool, str]] = {
    "none": (0, False, ""), "slow": (0, False, ""), "code": (4, False, ""), "stays": (1, True, "rank {} died (killed by SIGKILL, because"),
    "dies": (1, True, "rank {} died"), "stops": (1, True, "rank {}"),
    "exits": (1, True, "rank {}"), "deaf": (1, True, "rank {}"), "late": (1, True, "rank {} is stopped"),
    "raises": (1, False, "rank {}: "), "refuses": (2, False, "rank {}: planted"), "full-gpu": (1, False, "rank {}: "),
    "lost-gpu": (1, True, "rank {}: its GPU is lost: "), "hidden-gpu": (1, True, "rank {}: its GPU is lost: the driver call cuEvent")}
"""What one rank does -> exit code of the job, whether a rank was lost, what the error begins with."""


def _launched(*cases: str) -> Case:
    def case(rng: np.random.Generator) -> Measured:
        wrong, said = list[str](), list[str]()
        for name in cases:
            victim = int(rng.integers(1, 3))
            done: Ended = members().apart(launched, name, victim, limit_s=BOUND_S)
            if done.result is None:
                wrong.append(f"{name}: the launcher {'hangs' if done.hung else 'failed'}: {done.error.strip().splitlines()[-1:]}")
                break
            ended, seconds = done.result
            code, lost, words = OUTCOMES[name]
            said_so = ended.error.startswith(words.format(victim)) and bool(ended.error) == bool(words)
            if (ended.code, ended.lost) != (code, lost) or not said_so:
                wrong.append(f"{name}: code {ended.code}, lost {ended.lost}, {ended.error[:60]!r}")
            if ended.told.get("path") != "a run":
                wrong.append(f"{name}: what rank 0 told is not there")
            lines = ended.account.splitlines()
            if words and (len(lines) != 3 or not all(line.startswith(f"rank {r} ended (") for r, line in enumerate(lines))):
                wrong.append(f"{name}: the account has {len(lines)} lines of 3")
            elif words and f" in step {STEPS - 1 if name in ('late', 'stays') else AT}: had done" not in lines[victim]:
                wrong.append(f"{name}: the account says {lines[victim]!r}")
            if seconds > BOUND_S:
                wrong.append(f"{name}: it took {seconds:.1f} s")
            said.append(f"{name} {ended.code} {ended.lost} {victim}")
        return _measured(wrong, len(cases), _hash(*said))
    return case


def _nothing_left(rng: np.random.Generator) -> Measured:
    """No process of a job outlives it, not even one that was stopped."""
    done = members().apart(_orphans, limit_s=BOUND_S)
    if done.result is None:
        return _measured([f"the launcher failed: {done.error.strip().splitlines()[-1:]}"], 1)
    return _measured([f"{n} processes stay" for n in [done.result] if n], 1)


def _orphans() -> int:
    """Children that are left after a job whose rank was stopped."""
    launch.launch(3, partial(_body, "stops", 1), deadlines=QUICK)
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


# -- handshake and agreement -------------------------------------------------------------------------------------------------------


RUN = """
[run]
name = "alike"
[model]
family = "gpt"
layers = 1
width = 64
heads = 2
[data]
corpus = "stdlib"
[train]
steps = 2
batch = 4
[optim]
lr = 1e-3
"""


def at_start(world: World, seed: int, field: str) -> str:
    """What this rank says where rank 1 differs in one thing; '' where all agree."""
    cfg, resume, odd = config.parse(RUN), "a new run", world.rank == 1
    if field == "lr" and odd:
        cfg = replace(cfg, optim=replace(cfg.optim, lr=cfg.optim.lr * 2))
    if field == "layers" and odd:
        cfg = replace(cfg, model=replace(cfg.model, layers=cfg.model.layers + 1))
    if field == "resume" and odd:
        resume = "runs/other"
    names = ("tokenizer", "training text", "validation text", "Program")
    hashes = {name: f"{seed}" + ("!" if odd and name == field else "") for name in names}
    data: Any = SimpleNamespace(tokenizer=SimpleNamespace(hash=hashes["tokenizer"]), train=SimpleNamespace(hash=hashes["training text"]),
                                validation=SimpleNamespace(hash=hashes["validation text"]))
    program: Any = SimpleNamespace(hash=lambda: hashes["Program"])
    try:
        handshake.require_same_start(world, cfg, resume)
        handshake.require_same_program(world, program, data)
    except RankError as error:
        return f"{error.rank} {error}"
    return ""


FIELDS = {"lr": "config optim.lr", "layers": "config model.layers", "resume": "resume", "tokenizer": "tokenizer",
          "training text": "training text", "validation text": "validation text", "Program": "Program"}
"""What rank 1 has otherwise -> the name by which the error calls it."""


def _agreed(*fields: str) -> Case:
    """All ranks say the same of the one that differs: its number, the field, both values."""
    def case(rng: np.random.Generator) -> Measured:
        wrong, said, seed = list[str](), list[str](), seed_of(rng)
        for field in fields:
            ended = members().run(at_start, 3, seed, field, deadlines=SOUND)
            for rank, e in enumerate(ended):
                text = e.result if e.result is not None else f"failed: {e.error.strip().splitlines()[-1:]}"
                name = FIELDS.get(field)
                good = text == "" if name is None else text.startswith("1 rank 1 ") and f"{name} of rank 1: " in text \
                    and f"{name} of rank 0: " in text
                wrong += [] if good else [f"{field} on rank {rank}: {text.splitlines()[:1]}"]
                said.append(re.sub(r"\s+", " ", text))
        return _measured(wrong, 3 * len(fields), _hash(*said))
    return case


# -- decisions of all ranks --------------------------------------------------------------------------------------------------------


def _layout() -> StateLayout:
    return StateLayout([TensorSpec(f"{name}.{w}", shape, name) for name in ("embedding", "block.0", "head")
                        for w, shape in (("w", (50, 100)), ("b", (100,)))])


def at_words(world: World, seed: int) -> Found:
    """What the first says, all hear; rows that each filled come together; the largest of what was asked is decided; steps are told. One
    that is alone is the first of one."""
    ranks, wrong, rng = Ranks(world), list[str](), np.random.default_rng(seed)
    alone = Ranks()
    own = alone.rank, alone.size, alone.first, alone.hear("x"), alone.each("x")
    wrong += [] if own == (0, 1, True, "x", ["x"]) else [f"alone: {own}"]
    for text in ("", "a run", "runs/\u00e9t\u00e9/" + "x" * 1001):
        wrong += [] if ranks.hear(text if ranks.first else "rubbish") == text else [f"hear {text[:10]!r}"]
    every = [f"rank {rank}" * rank for rank in range(world.size)]
    wrong += [] if ranks.each(every[world.rank]) == every else ["what each says is not heard"]
    for n in (1, world.size, 3 * world.size + 1):
        whole, mine = rng.standard_normal((n, 3)), np.full((n, 3), np.nan)
        mine[world.rank :: world.size] = whole[world.rank :: world.size]
        wrong += [] if ranks.share(mine).tobytes() == whole.tobytes() else [f"share of {n} rows"]
    executor: Any = _executor(_layout(), seed)
    for asked in ((0,) * world.size, (0,) * (world.size - 1) + (2,), (15,) + (0,) * (world.size - 1)):
        got = ranks.decide(executor, {"loss": 1.5, "norm": 0.25}, asked[world.rank])
        wrong += [] if got == max(asked) else [f"decided {got} of {asked}"]
    ranks.begin(7)
    wrong += [] if world.step == 7 else [f"step {world.step}"]
    return wrong, 12


def _executor(layout: StateLayout, seed: int) -> Any:
    flat = np.random.default_rng(seed).standard_normal(layout.size).astype(np.float32)
    return SimpleNamespace(look=lambda kind: flat, digests=SimpleNamespace(late=False),
                           program=SimpleNamespace(states={"param": layout}, sharded=()),
                           recorder=SimpleNamespace(span=lambda phase: nullcontext()))


def at_all(world: World, seed: int) -> Found:
    """What every rank says holds; one that does not say it is enough."""
    ranks, wrong = Ranks(world), list[str]()
    for without in (None, 0, world.size - 1):
        got = ranks.all(world.rank != without)
        wrong += [] if got == (without is None) else [f"without rank {without}: {got}"]
    return wrong, 3


def at_saves(world: World, seed: int) -> Found:
    """What ranks save beside what they do next is the state as it was, each its part of it; it stands once the last one has written."""
    ranks, layout, wrong = Ranks(world), _layout(), list[str]()
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="alpha-saves-")) if ranks.first else ""
        folder = Path(ranks.hear(name)) / "checkpoints"
        saver = Saver(folder, ranks, keep=1)
        for step, polls in ((1, 0), (2, 4)):
            states = _drawn(seed + step)
            mine = {"param": states["param"], "m": (layout, cut_of(layout, states["m"][1], world.rank, world.size))}
            begun = Event()
            if world.rank == world.size - 1:
                saver._pool.submit(begun.wait)  # its disk is slow
            saver.start(step, mine, {"step": step})
            for _, flat in mine.values():
                flat[...] = np.nan  # the next step
            if world.rank < world.size - 1 and saver._written is not None:
                wait([saver._written])  # the others' disks are fast
            wrong += [f"step {step} stands before all have written"] * sum(saver.poll() is not None for _ in range(polls))
            Timer(0.05, begun.set).start()
            made = saver.finish()
            if made is not None or ranks.first:
                wrong += [] if made == (step, folders.at(folder, step)) else [f"step {step}: {made} was told"]
            found, expected = folders.read(folders.at(folder, step)), _drawn(seed + step)
            for kind in expected:
                wrong += [] if same({kind: found[kind]}, {kind: expected[kind]}) else [f"step {step}: {kind} differs"]
            files = sorted(p.name for p in folders.at(folder, step).iterdir())
            wrong += [] if len(files) == 2 * world.size + 1 else [f"step {step}: {files}"]
            wrong += [] if folders.steps(folder) == [step] else [f"step {step}: {folders.steps(folder)} stand"]
            ranks.meet()
    return wrong, 12


def _drawn(seed: int) -> dict[str, tuple[StateLayout, np.ndarray]]:
    layout, rng = _layout(), np.random.default_rng(seed)
    return {kind: (layout, rng.standard_normal(layout.size).astype(np.float32)) for kind in ("param", "m")}


def _refused_saves(rng: np.random.Generator) -> Measured:
    """What the disk refuses while a save is written, or made a checkpoint, is raised by the next poll or wait; the save after it stands."""
    wrong, cases = list[str](), 0
    for what in ("write", "rename"):
        for ask in (Saver.poll, Saver.finish):
            with tempfile.TemporaryDirectory(prefix="alpha-saves-") as name:
                saver, cases = Saver(Path(name) / "checkpoints", Ranks(), disk=_Full(what)), cases + 1
                saver.start(1, _drawn(0), {})
                try:
                    for _ in range(2):
                        work: list[Future[Any]] = [x for x in (saver._written, saver._made) if x is not None]
                        wait(work)
                        ask(saver)
                    wrong.append(f"{what} was refused, and {ask.__name__} says nothing")
                except MachineError as error:
                    wrong += [] if "disk is full" in error.what else [error.what]
                saver.rest()
                saver.start(2, _drawn(1), {})
                saver.finish()
                wrong += [] if folders.steps(saver.folder) == [2] else [f"{folders.steps(saver.folder)} stand"]
                wrong += [] if same(folders.read(folders.at(saver.folder)), _drawn(1)) else ["the save after it differs"]
                saver.start(3, _drawn(2), {})
                begun = Event()
                saver._pool.submit(begun.wait)
                Timer(0.05, begun.set).start()
                saver._made = saver._pool.submit(lambda: (3, Path()))
                saver.rest()
                wrong += [] if begun.is_set() else ["it rests while its thread works"]
    return Measured(float(len(wrong)), 0.0, cases, "", "; ".join(wrong)[:200])


class _Full(Disk):
    """Refuses one operation, once."""

    def __init__(self, what: str) -> None:
        self.what = what

    def _ask(self, what: str) -> None:
        if what == self.what:
            self.what = ""
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, path: Path, chunks: Any) -> None:
        self._ask("write")
        super().write(path, chunks)

    def rename(self, source: Path, target: Path) -> None:
        self._ask("rename")
        super().rename(source, target)


def at_turns(world: World, seed: int) -> Found:
    """The first rank is alone until it is done; nobody passes a meeting before all have come."""
    ranks = Ranks(world)
    with ranks.first_alone():
        if ranks.first:
            time.sleep(0.05)
        began = time.monotonic()
    own, every = np.array([began, time.monotonic()]), np.empty((world.size, 2))
    collectives.all_gather(world.group(WORLD), own, every)
    wrong = [] if every[1:, 0].min() >= every[0, 0] else ["another rank began before the first was done"]
    if world.rank == 1:
        time.sleep(0.05)
    own[0] = time.monotonic()
    ranks.meet()
    own[1] = time.monotonic()
    collectives.all_gather(world.group(WORLD), own, every)
    wrong += [] if every[:, 1].min() >= every[:, 0].max() else ["one passed before the last had come"]
    return wrong, 2


def at_difference(world: World, seed: int, what: str) -> str:
    """Rank 2 holds one element, or one number, otherwise."""
    layout, odd = _layout(), world.rank == 2
    executor, ranks = _executor(layout, seed), Ranks(world)
    ranks.begin(5)
    if odd and what == "parameter":
        executor.look("param")[layout.offsets["block.0.b"] + 3] += np.float32(1e-3)
    if odd and what == "sign of zero":
        executor.look("param")[layout.offsets["head.w"]] = -0.0
    elif what == "sign of zero":
        executor.look("param")[layout.offsets["head.w"]] = 0.0
    try:
        ranks.decide(executor, {"loss": 1.5, "norm": 0.25 + (odd and what == "number")}, 0)
    except RankError as error:
        return f"{error.rank} {error}"
    return ""


DIFFERENCES = {"parameter": "parameter block.0.b", "sign of zero": "parameter head.w", "number": "result norm"}


def _differing(rng: np.random.Generator) -> Measured:
    """All ranks name the rank, the tensor and the step."""
    wrong, seed = list[str](), seed_of(rng)
    for what, name in DIFFERENCES.items():
        for rank, e in enumerate(members().run(at_difference, 4, seed, what, deadlines=SOUND)):
            text = e.result or f"nothing: {e.error.strip().splitlines()[-1:]}"
            good = text.startswith("2 rank 2 ") and f"{name} of rank 2" in text and "step 5" in text
            wrong += [] if good else [f"{what} on rank {rank}: {text.splitlines()[:2]}"]
    return _measured(wrong, 4 * len(DIFFERENCES))


def _decided(rng: np.random.Generator) -> Measured:
    seed = seed_of(rng)
    ended = members().run(at_words, 3, seed, deadlines=SOUND)
    found = sound([lambda: ended])
    return replace(found, digest=_hash(*(e.result for e in ended)))


# -- supervisor --------------------------------------------------------------------------------------------------------------------


def _supervised(endings: Sequence[launch.Ended], saves: Sequence[int | None], *, ranks: int, restarts: int, fewest: int) \
        -> tuple[launch.Ended, list[tuple[int, int, Path | None, int | None]], list[float], list[str]]:
    """Starts that end so, each after the checkpoint of a step was saved; what was asked of each start, pauses, and what was said."""
    starts: list[tuple[int, int, Path | None, int | None]] = []
    pauses: list[float] = []
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"

        def start(n: int, number: int, resume: Path | None, at: int | None) -> launch.Ended:
            starts.append((n, number, resume and resume.relative_to(folder), at))
            step = saves[len(starts) - 1]
            if step is not None:
                (run / "checkpoints").mkdir(parents=True, exist_ok=True)
                folders.save(run / "checkpoints", abs(step), _states(), {}, keep=9)
                if step < 0:
                    _tear(folders.at(run / "checkpoints", -step))
            return replace(endings[len(starts) - 1], told={"path": str(run)})

        ended = supervisor.supervise(start, ranks, restarts=restarts, fewest=fewest, resume=None, at=None, report=said.append,
                                     sleep=pauses.append)
    return ended, starts, pauses, said


def _states() -> Any:
    layout = _layout()
    return {"param": (layout, np.ones(layout.size, np.float32))}


def _tear(path: Path) -> None:
    """Cut the largest file of a checkpoint."""
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


LOST, GOOD, BAD = launch.Ended(1, "rank 1 died", True, "account"), launch.Ended(0), launch.Ended(2, "rank 0: no such file")


def _goes_on(rng: np.random.Generator) -> Measured:
    """From the last checkpoint, after pauses of 1, 2, 4 s, as often as was said; in the run that the ranks made."""
    run, wrong = Path("run"), list[str]()
    ended, starts, pauses, said = _supervised([LOST, LOST, GOOD], [None, 10, 20], ranks=4, restarts=5, fewest=4)
    wrong += [] if ended.code == 0 else [f"code {ended.code}"]
    wrong += [] if starts == [(4, 0, None, None), (4, 1, run, None), (4, 2, run, 10)] else [f"starts {starts}"]
    wrong += [] if pauses == [1.0, 2.0] and len(said) == 2 else [f"pauses {pauses}, said {len(said)}"]
    wrong += [] if "rank 1 died" in said[0] and "account" in said[0] and "step 10" in said[1] else [f"said {said}"]
    ended, starts, pauses, _ = _supervised([LOST] * 9, [10 * i for i in range(1, 10)], ranks=4, restarts=8, fewest=4)
    wrong += [] if [s[3] for s in starts] == [None, *range(10, 90, 10)] else [f"from steps {[s[3] for s in starts]}"]
    wrong += [] if ended.lost and len(starts) == 9 and {s[0] for s in starts} == {4} else [f"{len(starts)} starts, ranks {starts[-1][0]}"]
    wrong += [] if pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] else [f"pauses {pauses}"]
    return _measured(wrong, 7, _hash(*starts, *pauses))


def _fewer(rng: np.random.Generator) -> Measured:
    """Half as many where it gets no further, and not below the fewest."""
    _, starts, _, _ = _supervised([LOST] * 6, [10, 10, 10, 20, 20, 20], ranks=8, restarts=5, fewest=2)
    wrong = [] if [s[0] for s in starts] == [8, 8, 4, 2, 2, 2] else [f"ranks {[s[0] for s in starts]}"]
    _, starts, _, _ = _supervised([LOST] * 4, [10] * 4, ranks=8, restarts=3, fewest=8)
    wrong += [] if [s[0] for s in starts] == [8] * 4 else [f"ranks {[s[0] for s in starts]}"]
    return _measured(wrong, 2)


def _torn(rng: np.random.Generator) -> Measured:
    """A checkpoint that is torn is passed over: the one before counts."""
    run = Path("run")
    _, starts, _, _ = _supervised([LOST, LOST, GOOD], [10, -20, 20], ranks=2, restarts=3, fewest=2)
    wrong = [] if starts[1:] == [(2, 1, run, 10), (2, 2, run, 10)] else [f"starts {starts}"]
    return _measured(wrong, 1)


def _not_again(rng: np.random.Generator) -> Measured:
    """Bad input, a job that ended well and one without restarts are started once."""
    wrong = []
    for name, ending, restarts in (("bad input", BAD, 3), ("a good end", GOOD, 3), ("no restarts", LOST, 0)):
        ended, starts, pauses, said = _supervised([ending], [None], ranks=2, restarts=restarts, fewest=2)
        wrong += [] if len(starts) == 1 and not pauses and not said and ended.code == ending.code else [f"{name}: {len(starts)} starts"]
    return _measured(wrong, 3)


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "transport.shm": {"parity": [("both-ways", _both_ways), ("full", _full), ("channels", _job(at_channels, 2)), ("honest", _honest),
                                 ("numbers", _numbers), ("segments", memory.segments), ("fences", memory.fences),
                                 ("groups", memory.channels)],
                      "determinism": [("both-ways", _both_ways)],
                      "faults": [*((fault, _planted(fault)) for fault in FAULTS), ("no memory", memory.no_memory)]},
    "watch.progress": {"parity": [("waited", _waited), ("patience", ends.patience), ("stops", ends.stops),
                                  ("announced", ends.announced), ("anew", ends.anew), ("words", told.words), ("flights", told.flights),
                                  ("rests", told.rests), ("names", told.named),
                                  ("blocks", memory.blocks), ("overtaken", memory.overtaken), ("seats", joining.seats),
                                  ("groups", joining.groups), ("devices", joining.devices), ("threads", joining.threads)],
                       "determinism": [("named", _named)],
                       "faults": [*((what, _lost(what)) for what in SAYS), ("absent", _absent), ("left", _left),
                                  ("watched late", ends.watched_late), ("early", joining.absent), ("no bridge", joining.no_bridge),
                                  ("last words", joining.last_words)]},
    "launch.ranks": {"parity": [("ended", _launched("none", "slow", "code")), ("left", _nothing_left), ("meetings", places.meetings)],
                     "determinism": [("ended", _launched("none", "refuses"))],
                     "faults": [*((what, _launched(what)) for what in OUTCOMES if what not in ("none", "slow", "code")),
                                ("unmet", places.unmet)]},
    "handshake.ranks": {"parity": [("alike", _agreed("nothing"))], "determinism": [("named", _agreed("lr", "Program"))],
                        "faults": [(field, _agreed(field)) for field in FIELDS]},
    "decisions.ranks": {"parity": [("words", _job(at_words, 2, 3)), ("all", _job(at_all, 2, 4)), ("turns", _job(at_turns, 3)),
                                   ("facts", _job(told.at_facts, 2, 3, 4)), ("exchanged", _job(told.at_exchange, 2, 3)),
                                   ("clocks", places.clocks), ("together", places.together)],
                        "determinism": [("decided", _decided)], "faults": [("differing", _differing)]},
    "saver.ranks": {"parity": [("saves", _job(at_saves, 2, 4))], "determinism": [("saves", _job(at_saves, 3))],
                    "faults": [("refused", _refused_saves)]},
    "supervisor.restarts": {"parity": [("goes on", _goes_on), ("fewer", _fewer)], "determinism": [("goes on", _goes_on)],
                            "faults": [("torn", _torn), ("not again", _not_again)]},
}
