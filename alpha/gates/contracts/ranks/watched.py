"""Cases of the watch over ranks: who is waited for, and who is named where one is lost. Floor 7.

Ranks are processes of a warm server (members.py). Functions named `at_*` run in each of them.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from alpha.comm import collectives
from alpha.comm.watch import Deadlines
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.gates.contracts.ranks import ends, joining, memory, told
from alpha.gates.contracts.ranks.calls import misbehave
from alpha.gates.contracts.ranks.collectives import BOUND_S, SHORT, seed_of, sound
from alpha.gates.contracts.ranks.members import members
from alpha.gates.contracts.ranks.support import Case, Found, hash_of, measured


def at_patience(world: World, seed: int, announced: bool, chain: bool) -> Found:
    """A rank takes far longer than the deadline: it said so, or it gets on. The others wait for it, in a `chain` one behind the other."""
    behind = (seed - world.rank) % world.size
    if behind == 0:
        if announced:
            with world.patient(20.0):
                time.sleep(1.2)
        else:
            for _ in range(12):
                time.sleep(0.1)
                world.advance()
    group, x = world.group(WORLD), np.zeros(3, np.float32)
    if not chain:
        collectives.barrier(group)
        return [], 1
    if behind:
        collectives.receive(group, x, source=(group.index + 1) % group.size)
    if behind + 1 < group.size:
        collectives.send(group, x + 1, to=(group.index - 1) % group.size)
    return [] if (x == behind).all() else [f"{x} came, expected {behind}"], 1


def _waited(rng: np.random.Generator) -> Measured:
    """Jobs of their own: after a long collective of a job, its next ones may take as long."""
    seed = seed_of(rng)
    short = replace(SHORT, stall=0.3)
    return sound([partial(members().run, at_patience, 3, seed, announced, chain, deadlines=short)
                  for announced in (True, False) for chain in (False, True)])


def at_loss(world: World, what: str, victim: int) -> None:
    """Reductions; at number four the victim does `what`. `circle`: each receives from the next. `chain`: but the victim sleeps. `patient`:
    it is stopped in long work that it announced."""
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
            with world.patient(60.0) if what == "patient" else nullcontext():
                misbehave(world, "stops" if what == "patient" else what)
        collectives.all_reduce(group, x, x, reduce="average")


SAYS = {"dies": "rank {} died", "exits": "rank {} died", "stops": "rank {} is stopped", "patient": "rank {} is stopped",
        "hangs": "rank {} is sleeping", "raises": "MemoryError: planted", "circle": "ranks wait for each other in",
        "chain": "rank {} is sleeping"}
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
        return measured(wrong, 2, hash_of(what))
    return case


def _absent(rng: np.random.Generator) -> Measured:
    """A rank that never comes is named after `join`."""
    ended = members().run(at_loss, 3, "none", 2, deadlines=replace(SHORT, join=0.5), absent=(2,), limit_s=BOUND_S)
    said = "2 never came"  # after another one, where that comes late too
    return measured([f"rank {r}: {e.error.splitlines()[:1]}" for r, e in enumerate(ended[:2]) if e.rank is None or said not in e.error], 2)


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
    return measured(wrong, 2)


def _named(rng: np.random.Generator) -> Measured:
    """Who dies is named, whoever it is and however often it is tried."""
    said = []
    for victim in range(3):
        ended = members().run(at_loss, 3, "dies", victim, deadlines=SHORT, limit_s=BOUND_S)
        said += [f"{r} names {e.rank} in {e.op}" for r, e in enumerate(ended) if r != victim]
    return measured([], 6, hash_of(*said))


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "watch.progress": {"parity": [("waited", _waited), ("patience", ends.patience), ("stops", ends.stops),
                                  ("announced", ends.announced), ("anew", ends.anew), ("turned", ends.turned), ("words", told.words),
                                  ("flights", told.flights), ("rests", told.rests), ("names", told.named), ("blocks", memory.blocks),
                                  ("overtaken", memory.overtaken), ("seats", joining.seats), ("heartbeats", joining.heartbeats),
                                  ("groups", joining.groups), ("devices", joining.devices), ("threads", joining.threads),
                                  ("served", joining.served)],
                       "determinism": [("named", _named)],
                       "faults": [*((what, _lost(what)) for what in SAYS), ("absent", _absent), ("left", _left),
                                  ("watched late", ends.watched_late), ("early", joining.absent), ("no bridge", joining.no_bridge),
                                  ("last words", joining.last_words)]},
}
