"""Whole runs that are killed by SIGKILL at drawn moments of starts, steps and saves: `python suites/support/soak_saves.py --kills 600`.

Each start of a run has 1, 2 or 4 ranks, drawn anew, and is struck once: one rank dies, or all processes of the job at once. Nobody looks
after it; the next start goes on in the run's folder with what it finds there. A place is drawn first, then a moment of it: of the processor
time of a rank, or before, in and behind each file operation of a save, those within a write and a removal among them.

What must hold behind each kill: every checkpoint under its own name is whole and has the bits of an undisturbed run of one process, and the
latest is none that is older. Of a run: losses, validations, samples and checkpoints have those bits, and nothing unfinished or alive stays.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import ranked_runs
import xxhash
from rich.console import Console

from alpha import config
from alpha.checkpoint import folders
from alpha.checkpoint.disk import Disk
from alpha.comm.world import World
from alpha.config import Config
from alpha.errors import CorruptError, InputError
from alpha.train import launch, peak, rundir, session
from alpha.train.catalogue import catalogue
from alpha.train.console import Printer
from alpha.train.interrupt import Interrupt
from alpha.train.loop import Loop
from alpha.train.saving import Saver

WORDS = "def return self value None import for in if else while class".split()
SAME = ("steps", "evaluations", "samples")
RANKS = (1, 2, 4)
STEPS = 24
GONE_S = 30.0
"""Seconds after which no process of a job may be left."""

LIMITS = {"join": 60.0, "stall": 1.0, "abort": 1.0}
"""Seconds after which a rank is given up here, and then killed; 5 s each by default."""

TIMED = "starting, or in a step"
FIRST = ("the folder is made", "the manifest is written", "the checkpoint is renamed", "an older one is removed")
ANY = ("the state is copied", "the state is written", "the index is written", "the folder is forced")
PLACES = (TIMED, *ANY, *FIRST)
"""Where a kill is drawn; FIRST: of what the first rank alone does."""

MOMENTS = {TIMED: 0, "the state is written": 12, "the index is written": 8, "the manifest is written": 6, "the folder is forced": 6}
"""Of a place, how many moments a kill is drawn from; 4 for others. What one save has fewer of, those of the next one are."""

STEP = 4
"""How many kills in starts and steps come on one of each other place."""

Checkpoints = dict[int, dict[str, str]]


@dataclass
class Found:
    """`kills`: (where, ranks) -> kills; `how`: one rank or all; `wrong`: what should not be; `runs`: ended; `other`: starts that went on
    with another number of ranks than what they found was saved by."""

    kills: Counter[tuple[str, int]] = field(default_factory=Counter)
    how: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    runs: int = 0
    other: int = 0

    def table(self) -> str:
        """A row for each place."""
        lines = [f"| killed while | {' | '.join(f'{n} ranks' if n > 1 else '1 rank' for n in RANKS)} |", f"|---|{'---|' * len(RANKS)}"]
        for where in sorted({where for where, _ in self.kills}):
            lines.append(f"| {where} | {' | '.join(str(self.kills[where, n]) for n in RANKS)} |")
        return "\n".join([*lines, f"| all | {' | '.join(str(sum(c for (_, n), c in self.kills.items() if n == of)) for of in RANKS)} |"])


# -- in a rank -----------------------------------------------------------------------------------------------------------------


class Killer:
    """Strikes this process, or all of its job, at moment number `moment` of `place`; it notes where that was in `note` just before."""

    def __init__(self, place: str, moment: float, everyone: bool, note: Path) -> None:
        self.place, self.left, self.everyone, self.note = place, moment, everyone, note
        self.now = "a run starts"
        self.saver: Saver | None = None
        self._lock, self._inside = threading.Lock(), threading.local()

    def plant(self) -> None:
        """Have this process struck."""
        advance, start, copy, write = Loop.advance, Saver.start, Saver.copy, Disk.write

        def step(loop: Loop, **more: Any) -> Any:
            self.now, self.saver = "a step runs", loop.saver
            return advance(loop, **more)

        def begin(saver: Saver, *given: Any) -> None:
            self.saver = saver
            start(saver, *given)

        Loop.advance, Saver.start = step, begin  # type: ignore[method-assign]
        if self.place == TIMED:
            threading.Thread(target=self._once_used, daemon=True).start()
            return
        Saver.copy = self._around(copy, lambda *_: "the state is copied")  # type: ignore[method-assign]
        inside = self._around(write, lambda path, *_: f"the {_file(path)} is written")
        Disk.write = lambda disk, path, chunks: inside(disk, path, self._halved(chunks))  # type: ignore[method-assign]
        for name, where in (("make", FIRST[0]), ("sync_folder", ANY[3]), ("rename", FIRST[2]), ("remove", FIRST[3])):
            setattr(Disk, name, self._around(getattr(Disk, name), lambda *_, where=where: where))
        for name in ("fsync", "unlink", "rmdir"):  # a write's last operation, and those of a removal
            setattr(os, name, self._beside(getattr(os, name)))

    def _around(self, operation: Callable[..., Any], where: Callable[..., str]) -> Callable[..., Any]:
        def operate(own: Any, *given: Any) -> Any:
            self._inside.where = where(*given)
            self._moment()
            try:
                return operation(own, *given)
            finally:
                self._moment()
                self._inside.where = ""

        return operate

    def _beside(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def operate(*given: Any, **more: Any) -> Any:
            self._moment()
            done = operation(*given, **more)
            self._moment()
            return done

        return operate

    def _halved(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            yield chunk[: len(chunk) // 2]
            self._moment()
            yield chunk[len(chunk) // 2 :]

    def _moment(self) -> None:
        if getattr(self._inside, "where", "") != self.place:
            return
        with self._lock:
            self.left -= 1
            if self.left < 0:
                self._strike(self.place)

    def _once_used(self) -> None:
        """Strike when this process has used so much processor time, whatever it does then."""
        until = time.process_time() + self.left
        while time.process_time() < until:
            time.sleep(0.001)
        saving = self.saver is not None and (self.saver.writing or self.saver._made is not None)
        self._strike(f"{self.now}{', beside a save' if saving else ''}")

    def _strike(self, where: str) -> None:
        parent = os.getppid()
        self.note.write_text(where)
        if self.everyone:
            job = [parent, *map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())]
            for pid in (pid for pid in job if pid != os.getpid()):
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _file(path: Path) -> str:
    return {".state": "state", ".json": "index"}[path.suffix] if path.name != folders.MANIFEST else "manifest"


# -- starts --------------------------------------------------------------------------------------------------------------------


def started(cfg: Config, ranks: int, killer: Killer | None, victim: int, error: Path) -> int:
    """One start of a run in a process of its own, which goes on in the run's folder if there is one, until it and its ranks have ended: its
    exit code, -N for signal N. What it says is in the file `error`."""
    error.unlink(missing_ok=True)
    ready = ranked_runs.prepared(cfg, ranks)
    try:
        resume: Path | None = rundir.find(cfg)
    except InputError:
        resume = None

    def one(world: World, tell: launch.Tell) -> int:
        if killer is not None and world.rank == victim:
            killer.plant()
        found = session.train(cfg, catalogue(), Printer(Console(quiet=True)), admit=None, resume=resume,
                              world=world if ranks > 1 else None, interrupt=Interrupt(silent=True), prepared=ready)
        return 0 if found.finished else 128 + found.ended_by

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            ended = launch.launch(ranks, one, deadlines=replaced(ranked_runs.SHORT, **LIMITS))
            code = ended.code
            error.write_text(ended.error)
        finally:
            os._exit(code)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGKILL)  # its ranks end with it
        raise
    until = time.monotonic() + GONE_S
    while _alive(pid):  # of a killed job; who holds the run holds it until then
        if time.monotonic() > until:
            error.write_text(f"processes are left {GONE_S:g} s after the first one has ended")
            return 1
        time.sleep(0.005)
    return code


def _alive(session: int) -> list[int]:
    """Processes of a session of which a thread has not ended: one that forces a file to the medium outlives the first thread of a process
    that is killed, and holds what the process holds."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if int(_stat(path)[3]) == session and any(_stat(thread)[0] not in "ZX" for thread in path.glob("task/*")):
                found.append(int(path.name))
    return found


def _stat(path: Path) -> list[str]:
    """State, parent, group, session and more of a process or thread."""
    return (path / "stat").read_text().rpartition(")")[2].split()


def standing(folder: Path) -> Checkpoints:
    """Every checkpoint under its own name, read and checked. CorruptError."""
    return {step: {kind: xxhash.xxh3_128_hexdigest(x.data) for kind, (_, x) in folders.read(folders.at(folder, step)).items()}
            for step in folders.steps(folder)}  # fmt: skip


def killed(cfg: Config, alone: dict[str, Any], rng: random.Random, whole: float, found: Found, kills: int, note: Path) -> None:
    """One run from its beginning to its end, every start struck until `kills` have been in all. What is found is added to `found`."""
    latest, saved_by = -1, 0
    while True:
        ranks, more = rng.choice(RANKS), found.kills.total() < kills
        victim = rng.randrange(ranks)
        places = [p for p in PLACES if (p not in FIRST or not victim) and (p != FIRST[3] or cfg.train.keep == 2)]
        place = min([TIMED, *rng.sample(places, 2)], key=lambda p: _so_far(found, p, ranks) / (STEP if p == TIMED else 1))
        moment = rng.uniform(0, whole) if place == TIMED else rng.randrange(MOMENTS.get(place, 4))
        everyone = rng.random() < 0.5
        killer = Killer(place, moment, everyone, note) if more else None
        what = f"{ranks} ranks, rank {victim}{' and all others' if everyone else ''}, {place}, moment {moment:.3g}"
        found.other += saved_by not in (0, ranks)
        code = started(cfg, ranks, killer, victim, error := note.with_name("error"))
        struck = note.read_text() if note.exists() else ""
        note.unlink(missing_ok=True)
        if (code and not struck) or (error.exists() and "are left" in error.read_text()):
            found.wrong.append(f"exit code {code}, struck: {struck or 'nobody'}: {what}: {error.read_text()}")
            return
        if struck:
            found.kills[struck, ranks] += 1
            found.how["all processes" if everyone else "one rank"] += 1
        if not (path := _folder(cfg)):
            continue
        try:
            held = standing(path / "checkpoints")
        except CorruptError as error:
            found.wrong.append(f"what stands is not whole ({error}): {what}")
            return
        if any(alone["checkpoints"].get(step) != bits for step, bits in held.items()):
            found.wrong.append(f"a checkpoint of {sorted(held)} has other bits: {what}")
            return
        newest = max(held, default=-1)
        if newest < latest:
            found.wrong.append(f"the latest was {latest} and is {newest}: {what}")
            return
        latest, saved_by = newest, ranks if newest > latest else saved_by
        if code == 0:
            break
    left = ranked_runs.left(path)
    found.runs += 1
    steps = sorted(alone["checkpoints"])[-cfg.train.keep :]
    differ = [what for what in SAME if left[what] != alone[what]]
    differ += [f"checkpoints {sorted(left['checkpoints'])}"] * (left["checkpoints"] != {s: alone["checkpoints"][s] for s in steps})
    if differ:
        found.wrong.append(f"another end than that of one process: {', '.join(differ)}: "
                           f"zero {cfg.train.zero}, keep {cfg.train.keep}, {what}")
    if [name for name in left["held"] if name.startswith(".")]:
        found.wrong.append(f"something unfinished is left: {left['held']}")


def _folder(cfg: Config) -> Path | None:
    try:
        return rundir.find(cfg)
    except InputError:
        return None


def _so_far(found: Found, place: str, ranks: int) -> int:
    return sum(n for (where, of), n in found.kills.items() if of == ranks and (where == place or (place == TIMED and where not in PLACES)))


def soak(folder: Path, seed: int, kills: int, found: Found) -> None:
    """`kills` kills in runs of the empty folder `folder`, each to its end, added to `found`."""
    peak.REPEATS, peak.COPIES, peak.COPY_BYTES = 2, 1, 1 << 20
    rng, began = random.Random(seed), time.monotonic()
    (folder / "text").mkdir()
    for i in range(12):
        (folder / "text" / f"{i}.txt").write_text("\n".join(" ".join(rng.choices(WORDS, k=8)) for _ in range(60)))
    settings = [f"train.steps={STEPS}", "train.eval_every=6"]
    alone = ranked_runs.ran(folder, {"name": "alone", "ranks": 1, "set": [*settings, "train.keep=99"]})
    whole = 0.0
    while found.kills.total() < kills:
        zero, keep = rng.randrange(2), rng.choice((2, 99))
        cfg = config.parse(ranked_runs.RUN.format(folder=folder.as_posix(), name="soak", zero=zero), [*settings, f"train.keep={keep}"])
        for ranks in RANKS:
            ranked_runs.prepared(cfg, ranks)
        whole = whole or _processor_time(cfg)
        killed(cfg, alone, rng, whole, found, kills, folder / "note")
        shutil.rmtree(folder / "runs" / "soak", ignore_errors=True)
        seconds = time.monotonic() - began
        print(f"{seconds:.0f} s: {found.kills.total()} kills, {found.runs} runs, {len(found.wrong)} wrong {found.wrong[-1:]}", flush=True)


def _processor_time(cfg: Config) -> float:
    """Of a rank of two, from its start to the end of an undisturbed run, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started(cfg, 2, None, 0, Path(cfg.run.out) / "error")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(str(_folder(cfg)))
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    found, code = Found(), 0
    try:
        with tempfile.TemporaryDirectory(prefix="alpha-kills-", ignore_cleanup_errors=True) as made:
            soak(Path(made), given.seed, given.kills, found)
    except KeyboardInterrupt:
        code = 130
    print(found.table(), *found.wrong, sep="\n")
    print(f"seed {given.seed}: {found.kills.total()} kills ({dict(found.how)}), {found.runs} runs, {found.other} starts with another "
          f"number of ranks than what they found was saved by; {len(found.wrong)} wrong")
    return code or int(bool(found.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
