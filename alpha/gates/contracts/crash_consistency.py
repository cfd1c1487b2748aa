"""Crash consistency of checkpoints: a save that a full disk, a kill, a power cut, a dying rank or another writer cuts into leaves the old
one or the new one whole. Floor 5.

Kills and power cuts are simulated by a Disk that counts operations: a kill raises something that no handler catches; a power cut also
takes back what was never forced to the medium (halves files, forgets folder entries, undoes renames).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from alpha.checkpoint import folders, ranges
from alpha.component import Measured
from alpha.errors import CorruptError, InputError, MachineError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.disks import Beside, Failing, Killed, Losing, full
from alpha.gates.contracts.made_state import _is, empty, folder, layouts, same, state


def _interrupted(rng: np.random.Generator, disk_at: Callable[[int], Failing], count: Checks, *, again: bool, loses: bool = False) -> None:
    """Save step 2 (or again step 1) with a disk that fails at operation 1, 2, 3, ...: the old or the new is whole, never neither."""
    of = layouts(rng, 1)
    of = {k: of[k] for k in ("param", "counter")}
    old, new = state(rng, of), state(rng, of)
    target = 1 if again else 2
    at_operation = 0
    while True:
        at_operation += 1
        with folder() as at:
            folders.save(at, 1, old, {"which": "old"}, keep=1)
            disk = disk_at(at_operation)
            finished = False
            try:
                folders.save(at, target, new, {"which": "new"}, keep=1, disk=disk)
                finished = True
            except Killed:
                pass
            except MachineError as error:
                count.that("disk is full" in str(error), f"operation {at_operation}: {error.what}")
            if loses and isinstance(disk, Losing):
                disk.power_cut()
            where = f"operation {at_operation}{' again' if again else ''}"
            after = empty(of)
            folders.clean(at)
            try:
                saved = folders.load(folders.at(at), after)
                expected = {"old": old, "new": new}[saved.facts["which"]]
                count.that(same(after, expected), f"{where}: a mixture was loaded")
                count.that(not finished or saved.facts["which"] == "new", f"{where}: a finished save was lost")
            except (CorruptError, InputError) as error:
                count.that(False, f"{where}: {error.what}")
            folders.save(at, 3, old, {"which": "old"}, keep=1)
            count.that([p.name for p in at.iterdir()] == ["step-00000003"], f"{where}: leftovers {sorted(p.name for p in at.iterdir())}")
            if finished:
                count.that(disk.done < disk.at, f"{where}: a failure was swallowed")
                return


def disk_full(rng: np.random.Generator) -> Measured:
    """The disk fills up at every write position in turn: MachineError, and the checkpoint before it still loads."""
    count = Checks()
    for again in (False, True):
        _interrupted(rng, lambda k: Failing(k, full), count, again=again)
    return count.measured()


def killed(rng: np.random.Generator) -> Measured:
    """The process is killed between any two operations."""
    count = Checks()
    for again in (False, True):
        _interrupted(rng, lambda k: Failing(k, Killed), count, again=again)
    return count.measured()


def power_cut(rng: np.random.Generator) -> Measured:
    """As killed, and what was never forced to the medium is gone; also after a save that returned."""
    count = Checks()
    for journaled in (True, False):
        _interrupted(rng, partial(Losing, journaled=journaled), count, again=False, loses=True)
    return count.measured()


def a_rank_that_dies(rng: np.random.Generator) -> Measured:
    """A rank ends between any two operations of its part: what the others commit then is refused, or whole. The next save stands."""
    count, of = Checks(), layouts(rng, 11, 20)  # of fewer blocks the second rank may hold nothing
    old, new = state(rng, of), state(rng, of)
    for operation in range(1, 99):
        with folder() as at:
            folders.save(at, 1, old, {})
            temporary, disk = folders.begin(at, 2), Failing(operation, Killed)
            folders.write(temporary, 0, 2, *ranges.image(new, 0, 2))
            try:
                folders.write(temporary, 1, 2, *ranges.image(new, 1, 2), disk=disk)
                break
            except Killed:
                pass
            try:
                folders.commit(temporary, 2, of, 2, {})
            except (MachineError, CorruptError):  # its index is missing, or torn
                count.that(folders.steps(at) == [1], f"operation {operation}: refused, and {folders.steps(at)} stand")
            else:  # it ended behind its last byte
                count.that(_is(at, 2, new), f"operation {operation}: torn, and committed")
            count.that(_is(at, 1, old), f"operation {operation}: the checkpoint before it is damaged")
            folders.save(at, 3, new, {}, keep=1)
            count.that([p.name for p in at.iterdir()] == ["step-00000003"] and _is(at, 3, new), f"operation {operation}: the next save")
    return count.measured()


def two_writers(rng: np.random.Generator) -> Measured:
    """Another process saves into the same folder between any two operations of a save, the same step or the next: either save stands whole
    or says that it failed, and no checkpoint is a mixture."""
    count, of = Checks(), layouts(rng, 1)
    of = {k: of[k] for k in ("param", "counter")}
    mine, theirs = state(rng, of), state(rng, of)
    for step in (2, 3):
        for operation in range(1, 99):
            with folder() as at:
                folders.save(at, 1, mine, {})
                disk, refused = Beside(operation, partial(folders.save, at, step, theirs, {}, keep=9)), False
                try:
                    folders.save(at, 2, mine, {}, keep=9, disk=disk)
                except MachineError:
                    refused = True
                if disk.done < operation:
                    break
                where = f"step {step} beside operation {operation}"
                stand = folders.steps(at)
                count.that(stand == sorted({1, *([] if refused and step == 3 else [2]), step}), f"{where}: {stand} stand")
                count.that(step == 2 or _is(at, 3, theirs), f"{where}: the other's is damaged")
                count.that(_is(at, 1, mine), f"{where}: the one before is damaged")
                count.that(2 not in stand or any(_is(at, 2, x) for x in (mine, theirs)), f"{where}: a mixture")
    return count.measured()


def clocks(rng: np.random.Generator) -> Measured:
    """The clock goes back and forth between saves, and so do the files' times: the latest, and what is dropped, go by the steps."""
    count, of = Checks(), layouts(rng, 1)
    of = {k: of[k] for k in ("param", "counter")}
    with folder() as at:
        states = {step: state(rng, of) for step in range(1, 7)}
        for step, states_ in states.items():
            path = folders.save(at, step, states_, {}, keep=3)
            now = int(rng.integers(0, 1 << 32)) if step % 2 else (1 << 32) // step
            for file in (*path.iterdir(), path):
                os.utime(file, (now, now))
            expected = [s for s in states if s <= step][-3:]
            count.that(folders.steps(at) == expected, f"behind step {step}: {folders.steps(at)} instead of {expected}")
            count.that(folders.at(at) == path and _is(at, step, states_), f"the latest behind step {step} is {folders.at(at).name}")
        os.utime(folders.at(at, 6), (0, 0))
        os.utime(folders.at(at, 4), (1 << 33, 1 << 33))
        count.that(folders.at(at).name == "step-00000006", "the latest is the one with the latest time")
    return count.measured()


def synced(rng: np.random.Generator) -> Measured:
    """Every file is forced to the medium by the file system call itself, after its last byte."""
    count, of = Checks(), layouts(rng)
    seen: dict[int, int] = {}
    real = os.fsync

    def spy(fd: Any) -> None:
        info = os.fstat(fd)
        seen[info.st_ino] = info.st_size
        real(fd)

    with folder() as at:
        os.fsync = spy
        try:
            path = folders.save(at, 1, state(rng, of), {})
        finally:
            os.fsync = real
        for file in path.iterdir():
            info = file.stat()
            count.that(seen.get(info.st_ino) == info.st_size, f"{file.name} was not forced to the medium whole")
        for place in (path, at, at.parent):
            count.that(place.stat().st_ino in seen, f"the entries of {place.name} were not forced to the medium")
    return count.measured()
