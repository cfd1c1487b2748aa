"""Cases of what all ranks of a job do as one: they begin alike, decide, and save. Floor 7.

Ranks are processes of a warm server (members.py). Functions named `at_*` run in each of them.
"""

from __future__ import annotations

import errno
import re
import tempfile
import time
from concurrent.futures import Future, wait
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha import config
from alpha.checkpoint import folders
from alpha.checkpoint.disk import Disk
from alpha.comm import collectives
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.errors import MachineError, RankError
from alpha.gates.contracts.made_state import cut_of, same
from alpha.gates.contracts.ranks import places, told
from alpha.gates.contracts.ranks.collectives import SOUND, seed_of, sound
from alpha.gates.contracts.ranks.members import members
from alpha.gates.contracts.ranks.support import Case, Found, hash_of, job, measured
from alpha.graph.state import StateLayout, TensorSpec
from alpha.train import handshake
from alpha.train.ranks import Ranks
from alpha.train.saving import Saver

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
        return measured(wrong, 3 * len(fields), hash_of(*said))
    return case


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
    return measured(wrong, 4 * len(DIFFERENCES))


def _decided(rng: np.random.Generator) -> Measured:
    seed = seed_of(rng)
    ended = members().run(at_words, 3, seed, deadlines=SOUND)
    found = sound([lambda: ended])
    return replace(found, digest=hash_of(*(e.result for e in ended)))


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "handshake.ranks": {"parity": [("alike", _agreed("nothing"))], "determinism": [("named", _agreed("lr", "Program"))],
                        "faults": [(field, _agreed(field)) for field in FIELDS]},
    "decisions.ranks": {"parity": [("words", job(at_words, 2, 3)), ("all", job(at_all, 2, 4)), ("turns", job(at_turns, 3)),
                                   ("facts", job(told.at_facts, 2, 3, 4)), ("exchanged", job(told.at_exchange, 2, 3)),
                                   ("clocks", places.clocks), ("together", places.together)],
                        "determinism": [("decided", _decided)], "faults": [("differing", _differing)]},
    "saver.ranks": {"parity": [("saves", job(at_saves, 2, 4))], "determinism": [("saves", job(at_saves, 3))],
                    "faults": [("refused", _refused_saves)]},
}
