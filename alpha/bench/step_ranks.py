"""`alpha bench step RUN.toml --nproc N`: a step on N GPUs beside the same on one, ours and PyTorch's DDP and FSDP2, in one run. Floor 8.

Data parallel, with as many sequences on each GPU as the run file has on one: N GPUs take a batch and logical shards N times as many. Each
arm is a team of processes (team.py), and blocks of all arms alternate as in step.py. Scaling efficiency is tokens/s of N GPUs over N times
those of one: of ours from the same rounds, of PyTorch beside the fastest of its variants on one GPU. What a step counts comes from who ran
it: the device's own count of tokens, and of each rank of PyTorch what it took. Exposed communication is that of the stamps which the device
sets at the start and end of each collective; where one has none, there is no figure. A team without room beside the others takes turns with
them as whole processes, without intervals.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alpha.bench import agreement, clocks
from alpha.bench.peer import SETTINGS
from alpha.bench.step import (
    APART,
    CHECKED,
    NAN,
    OURS,
    REFERENCE,
    ROUNDS,
    SECONDS,
    STILL,
    TRIAL_SECONDS,
    WARM_BLOCK,
    WARM_SECONDS,
    DoesNotFit,
    RandomTokens,
    ids_of,
    probe,
    sizes_of,
    unsupported,
)
from alpha.bench.team import Team
from alpha.bench.variants import Ranked, ranked
from alpha.component import Catalogue
from alpha.config import Config
from alpha.cuda_runtime.nvml import Clocks, Reading
from alpha.errors import InputError
from alpha.flops.v1 import mfu, stamp
from alpha.profile import noise
from alpha.profile.served import PATIENCE, ServedError
from alpha.resources import ROOT
from alpha.train.assemble import flops_for, program_for, threads_for
from alpha.train.engine import VISIBLE

START_S = 240.0
"""How long a team may take to start, build and check."""

NO_ROOM = ("OutOfMemory", "out of memory", "does not fit into the GPU's memory", "not enough device memory")
"""Words of who has no room."""

EACH = f"{OURS}, 1 GPU on each"
"""A run on each GPU at once, which no collective binds: what they lose to each other without one, such as clocks."""

_FROM = "import sys; sys.path.insert(0, sys.argv[1]); from alpha.bench.{} import main; main()"

EACH_TREE = _FROM.format("step_member")
"""What a rank of ours runs, of the tree that is its argument."""

Figures = tuple[float, float, float]
_NONE: Figures = (NAN, NAN, NAN)


@dataclass(frozen=True)
class Row:
    """One arm. `gpus`: how many; `tokens`: of a step of all of them; `ns`, `tokens_per_second`, `mfu` (of the peak of all its GPUs),
    `memory` (bytes, of the fullest), `difference`, `allowed`, `change`, `why`, `together`, `discarded` as in step.py. ratio: its time over
    that of ours on as many GPUs. efficiency: tokens/s over `gpus` times those of the arm `against`. exposed: share of a step in which it
    only waits for collectives, the worst rank's, the median of `exposures`, one a block; `unknown`: why there is none. least: the same of
    the rank that waits least, of `leasts`; beyond it a rank waits for a slower one, as where clocks of GPUs differ. phase: as exposed, of
    all communication, what the host exchanges included. `blocks`: [ns a step, then SM MHz, watts, degrees Celsius of each GPU]; `beside`:
    of ours on as many in the same rounds; `alone`: of ours on one. `kept`: which rounds count."""

    name: str
    library: str
    gpus: int
    tokens: int = 0
    ns: float = NAN
    tokens_per_second: float = NAN
    mfu: float = NAN
    memory: int = 0
    ratio: Figures = _NONE
    efficiency: Figures = _NONE
    against: str = ""
    exposed: float = NAN
    least: float = NAN
    phase: float = NAN
    unknown: str = ""
    difference: float = NAN
    allowed: float = NAN
    change: agreement.Change | None = None
    why: str = ""
    together: bool = True
    discarded: int = 0
    exposures: list[float] = field(default_factory=list)
    leasts: list[float] = field(default_factory=list)
    blocks: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)
    alone: list[list[float]] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """One run file on `gpus`. `tokens`: of a step of one GPU; the rest as in step.py. `loaded`: text of a compiled file -> its digest."""

    run: str
    shape: str
    mark: str
    flops: Mapping[str, Any]
    hardware: str
    machine: str
    backend: str
    gpus: int
    tokens: int
    peer: str = ""
    quoted: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    why: str = ""
    loaded: dict[str, str] = field(default_factory=dict)


@dataclass
class Taken:
    """What an arm left: of each block its time and what its GPUs said together, what each GPU of the job said, and what ranks told."""

    blocks: list[tuple[float, Reading | None]] = field(default_factory=list)
    each: list[list[Reading]] = field(default_factory=list)
    told: list[list[dict[str, Any]]] = field(default_factory=list)

    def keep(self, last: int) -> None:
        """So many of the last blocks alone."""
        first = len(self.blocks) - last
        self.blocks, self.each, self.told = self.blocks[first:], self.each[first:], self.told[first:]

    def plain(self) -> list[list[float]]:
        """As rows keep it."""
        return [[ns, *(x for r in each for x in (r.sm_mhz, r.watts, r.celsius))]
                for (ns, _), each in zip(self.blocks, self.each, strict=True)]


@dataclass(frozen=True)
class Arm:
    """What is timed: a team, or the first `most` of it, that answers `do` with these arguments, and how many tokens a step of it has."""

    name: str
    gpus: int
    tokens: int
    team: Team
    do: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    count: str = "steps"
    most: int | None = None


def of_gpus(cfg: Config, gpus: int) -> Config:
    """The run on so many GPUs: on each as many sequences, microbatches and logical shards as the run file has. InputError for a number that
    does not keep the shards of all a power of two."""
    if gpus & (gpus - 1):
        raise InputError("so many GPUs have no step with the run's logical shards on each", came=f"--nproc {gpus}",
                         expected="a power of two, as logical shards are one", do=f"take --nproc {1 << (gpus.bit_length() - 1)}")
    return replace(cfg, train=replace(cfg.train, batch=cfg.train.batch * gpus, shards=cfg.train.shards * gpus))


def bench(cfg: Config, gpus: int, catalogue: Catalogue, python: str | None, *, rounds: int = ROUNDS, steps: int | None = None,
          budget: float | None = None, chosen: Callable[[str], bool] = lambda name: True, members: Sequence[str] | None = None,
          command: Sequence[str] | None = None, report: Callable[[str], None] = lambda text: None) -> Result:
    """Measure a step of `cfg` on one and on `gpus` GPUs (ranks of the CPU, where the run file computes there). `python`: has PyTorch, the
    peer; None: ours alone. `members`, `command`: what is started for a rank of ours, and of the peer. The rest as in step.py."""
    with tempfile.TemporaryDirectory(prefix="alpha-bench-") as folder:
        s = Session(cfg, gpus, catalogue, python, rounds, steps, budget, chosen, members, command, report, Path(folder))
        try:
            return s.run()
        finally:
            s.close()


class Session:
    """Opens teams, takes blocks, makes rows. `teams`: ours by number of GPUs, and the peer's as 0."""

    def __init__(self, cfg: Config, gpus: int, catalogue: Catalogue, python: str | None, rounds: int, steps: int | None,
                 budget: float | None, chosen: Callable[[str], bool], members: Sequence[str] | None, command: Sequence[str] | None,
                 report: Callable[[str], None], folder: Path) -> None:
        self.cfg, self.gpus, self.catalogue, self.python = cfg, gpus, catalogue, python
        self.rounds, self.steps, self.report, self.folder = rounds, steps, report, folder
        of_gpus(cfg, gpus)  # refused before anything is built
        self.began = time.monotonic()
        self.deadline = None if budget is None else self.began + budget
        self.vocab = ids_of(cfg)
        self.on_gpu = cfg.machine.backend == "cuda"
        self.tokens = cfg.train.batch * cfg.data.sequence
        self.members = members or [sys.executable, "-c", EACH_TREE, str(ROOT)]
        self.command = command or [python or "", "-c", _FROM.format("peer_ranks"), str(ROOT)]
        self.own = {_ours(1): (1, 1), _ours(gpus): (gpus, gpus), EACH: (1, gpus)}
        """Arm of ours -> its team, and how many GPUs of it."""
        self.teams: dict[int, Team] = {}
        self.facts: dict[int, dict[str, Any]] = {}
        self.first: dict[int, list[dict[str, float]]] = {}
        self.loaded: dict[str, str] = {}
        self.sizes: dict[str, Any] = {}
        self.parameters: dict[str, str] = {}
        self.places: dict[str, tuple[int, int]] = {}
        self.before: dict[str, np.ndarray] = {}
        self.after: dict[int, dict[str, np.ndarray]] = {}
        self.gpu: list[Clocks] = []
        self.peer, self.best = "", float("inf")
        every = ranked(self.on_gpu, cfg.train.precision) if python is not None else []
        self.wanted = [w for w in every if chosen(w.name)]
        self.rows: list[Row] = []
        if self.wanted and (why := unsupported(cfg)):
            self.rows, self.wanted = [Row("torch", "torch", gpus, why=f"no peer: the model in PyTorch does not do {why}")], []

    # -- teams -----------------------------------------------------------------------------------------------------------------------

    def ours(self, gpus: int) -> Team:
        """Ours on so many GPUs, opened where it is not there. Of one there is a run on each GPU, and none knows of another. No budget cuts
        this short, for without ours nothing has a figure."""
        if gpus not in self.teams:
            self.report(f"ours on {gpus}: building")
            places = environments(gpus) if gpus > 1 else _apart(self.gpus, self.on_gpu)
            team = self.teams[gpus] = Team(f"ours on {gpus}", [self.members] * len(places), places, foreign=False)
            cfg = of_gpus(self.cfg, gpus)
            found = self._fitting(team, "open", START_S, text=cfg.resolved(), vocab=self.vocab)
            self.facts[gpus] = found[0]
            if not self.parameters:
                self.parameters = team.ask("parameters", folder=str(self.folder), most=gpus)[0]
                for name, path in self.parameters.items() if self.wanted else ():
                    x = np.load(path, mmap_mode="r")
                    self.places |= agreement.places({name: x.shape}, np.random.default_rng())
                    self.before[name] = agreement.taken(x, self.places[name])
            if gpus not in self.first:
                self.first[gpus] = team.ask("take", steps=CHECKED)[0]
                if self.wanted:
                    self.after[gpus] = _read(*team.ask("taken", places=self.places, folder=str(self.folder), most=gpus))
                sampler = RandomTokens(cfg, self.vocab)
                for i in range(CHECKED):
                    np.save(self._file(gpus, i), sampler.rows(i))
            else:
                team.ask("take", steps=CHECKED)
            self.facts[gpus]["memory"] = max(team.ask("memory"))
        return self.teams[gpus]

    def theirs(self) -> Team:
        """The peer's ranks, without a model."""
        if 0 not in self.teams:
            self.report("PyTorch: starting")
            team = self.teams[0] = Team("PyTorch", [self.command] * self.gpus, environments(self.gpus, SETTINGS), foreign=True)
            found = team.ask("join", device=self.cfg.machine.backend, threads=threads_for(self.cfg, self.gpus),
                             limit=PATIENCE, patience=self.patience())[0]
            self.peer = f"PyTorch {found['version']} on {found['on']}, {found['how']}"
        return self.teams[0]

    def leave(self, key: int) -> None:
        """Give the devices back that a team has."""
        team = self.teams.pop(key, None)
        if team is None:
            return
        if key and team.ranks:
            with suppress(ServedError):
                for found in team.ask("loaded", patience=30.0):
                    self.loaded.update(found)
                team.ask("close", patience=30.0)
        team.close()

    def close(self) -> None:
        """Give all back."""
        for key in list(self.teams):
            self.leave(key)

    def _file(self, gpus: int, step: int) -> str:
        return str(self.folder / f"tokens-{gpus}-{step}.npy")

    def _fitting(self, team: Team, do: str, patience: float | None = None, **arguments: Any) -> list[Any]:
        """An answer; DoesNotFit for one that says that there is no room."""
        try:
            return team.ask(do, patience=patience or self.patience(START_S), **arguments)
        except ServedError as error:
            if any(word in str(error.came) for word in NO_ROOM):
                raise DoesNotFit(str(error.came)) from error
            raise

    def left(self) -> float:
        """Seconds of the budget."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def patience(self, most: float = PATIENCE) -> float:
        """How long an answer may take."""
        return min(most, max(30.0, self.left()))

    # -- all of it -------------------------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """The table."""
        why = ""
        try:
            try:
                self._beside()
            except DoesNotFit as error:
                self.report(f"not all fit together, whole processes take turns: {error}")
                for key in [key for key in self.teams if "memory" not in self.facts.get(key, {})]:
                    self.leave(key)  # the peer's, and one of ours that found no room; the others need not be built again
                self._in_turn()
        except DoesNotFit as error:
            why = f"does not fit, even alone: {error}"
        except ServedError as error:
            why = f"{error.what}: {error.came}"
        if not self.facts:
            return Result(self.cfg.run.name, "", "", {}, "", "", "", self.gpus, self.tokens, rows=self.rows,
                          why=why or "nothing was measured")
        facts, flops = next(iter(self.facts.values())), flops_for(self.cfg, self.vocab)
        peak = {"per_token": flops.per_token, "peak": facts["peak"], "peak_source": facts["peak_source"]}
        shards = f"{self.cfg.train.shards} logical shard{'s' * (self.cfg.train.shards > 1)}"
        shape = f"{self.cfg.train.batch} x {self.cfg.data.sequence} tokens and {shards} a GPU, vocabulary {self.vocab}"
        self.close()  # it tells what it had loaded
        measured = [r for r in self.rows if r.ns == r.ns]
        quoted = min((r for r in measured if r.library != OURS and r.gpus == self.gpus), key=lambda r: r.ratio[1], default=None)
        if not any(r.name == _ours(self.gpus) for r in measured):
            why = why or next((r.why for r in self.rows if r.library == OURS), "") or "ours was not measured"
        return Result(self.cfg.run.name, shape, stamp(facts["peak"], facts["peak_source"]), peak, facts["hardware"], facts["machine"],
                      facts["version"], self.gpus, self.tokens, self.peer, quoted.name if quoted else "", time.monotonic() - self.began,
                      self._efficient(self.rows), why, self.loaded)

    def _clocks(self) -> None:
        if self.on_gpu and not self.gpu:
            self.gpu = [Clocks.open(i) for i in range(self.gpus)]

    def _arms(self) -> dict[str, Arm]:
        """Ours on one and on all GPUs, and a run on each of them at once."""
        return {name: self._arm(name) for name in self.own}

    def _arm(self, name: str) -> Arm:
        """An arm of ours."""
        team, gpus = self.own[name]
        return Arm(name, gpus, gpus * self.tokens, self.ours(team), "block", most=gpus)

    def _beside(self) -> None:
        """All teams have the devices at once. A peer of many GPUs that finds no room beside all of ours is timed last, and ours on one goes
        first."""
        self._clocks()
        arms, later = self._arms(), list[Ranked]()
        for i, way in enumerate(self.wanted):
            try:
                self._timed(way, arms, len(self.wanted) - i)
            except DoesNotFit as error:
                if not any(r.library != OURS and r.ns == r.ns for r in self.rows):
                    raise  # nor will the others
                self.leave(0)  # that process may have lost its device
                if way.over:
                    later.append(way)
                else:
                    self._add(way, why=f"no room beside the others: {_brief(error)}")
        if not any(r.library == OURS for r in self.rows):
            self._warm(arms[_ours(self.gpus)])
            taken, kept = self._measure(arms, self.left())
            self._note_ours(taken, kept)
        for i, way in enumerate(later):
            self.leave(1)
            arms = {name: arm for name, arm in arms.items() if self.own[name][0] != 1}
            try:
                self._timed(way, arms, len(later) - i)
            except DoesNotFit as error:
                self.leave(0)
                self._add(way, why=f"no room beside ours on as many: {_brief(error)}")

    def _timed(self, way: Ranked, arms: Mapping[str, Arm], coming: int) -> None:
        """Measure a variant of the peer beside these arms of ours, one of `coming`, and note its line. DoesNotFit where it has no room."""
        if self.left() <= 0:
            self._add(way, why="not measured: the budget was spent")
            return
        try:
            row, arm = self._admitted(way)
        except ServedError as error:
            self.leave(0)
            self._add(way, why=self._told(error))
            return
        if arm is None:
            self.rows.append(row)
            return
        self.report(f"{way.name}: timing")
        self._warm(arms[_ours(self.gpus)])
        taken, kept = self._measure({**arms, arm.name: arm}, self.left() / coming)
        self._note(row, arm, taken, kept)

    def _in_turn(self) -> None:
        """Whole teams, one after the other, APART times or as often as the budget lets."""
        self.rows = [r for r in self.rows if r.why and r.ns != r.ns and r.name == "torch"]
        self._clocks()
        taken: dict[str, Taken] = {}
        admitted: dict[str, tuple[Row, Arm]] = {}
        refused: dict[str, Row] = {}
        seconds, took = SECONDS * self.rounds / APART, 0.0
        for turn in range(APART):
            if turn and self.left() < took:
                break
            began = time.monotonic()
            for n in (1, self.gpus):
                for arm in (self._arm(name) for name, (team, _) in self.own.items() if team == n):
                    self._warm(arm)
                    self._take(arm, self._count(arm, seconds), taken.setdefault(arm.name, Taken()))
                self.leave(n)
            for way in self.wanted:
                if way.name in refused:
                    continue
                if self.left() <= 0:
                    refused.setdefault(way.name, Row(way.name, "torch", self._gpus(way), why="not measured: the budget was spent"))
                    continue
                try:
                    row, found = self._admitted(way)
                    if found is None:
                        refused[way.name] = row
                        continue
                    admitted[way.name] = row, found
                    self._warm(found)  # as ours was: the devices cooled while this was built
                    self._take(found, self._count(found, seconds), taken.setdefault(way.name, Taken()))
                except (DoesNotFit, ServedError) as error:
                    self.leave(0)
                    text = f"does not fit, even alone: {_brief(error)}" if isinstance(error, DoesNotFit) else self._told(error)
                    refused[way.name] = Row(way.name, "torch", self._gpus(way), why=text)
            self.leave(0)
            took = time.monotonic() - began
        self._note_ours(taken, self._kept(taken), together=False)
        for name, (row, arm) in admitted.items():
            if name not in refused or refused[name].why.startswith("not measured"):
                refused.pop(name, None)
                self._note(replace(row, together=False), arm, taken, self._kept(taken))
        self.rows += refused.values()

    def _told(self, error: ServedError) -> str:
        """Why a variant has no time. Behind the budget an answer is waited for less long, so silence is no fault of the peer's."""
        return f"not measured: the budget was spent; {error.what}: {error.came}" if self.left() <= 0 else f"{error.what}: {error.came}"

    def _gpus(self, way: Ranked) -> int:
        return self.gpus if way.over else 1

    def _add(self, way: Ranked, why: str) -> None:
        self.rows.append(Row(way.name, "torch", self._gpus(way), why=why))

    def _admitted(self, way: Ranked) -> tuple[Row, Arm | None]:
        """A variant of the peer, where its first steps agree with ours of as many GPUs."""
        team, gpus = self.theirs(), self._gpus(way)
        if not self.sizes:
            self.sizes = sizes_of(self.cfg, program_for(self.cfg, self.vocab, self.catalogue, 1))
        self.report(f"{way.name}: building and checking")
        self._fitting(team, "make_ranked", sizes=self.sizes, parameters=self.parameters, variant=asdict(way.variant), over=way.over)
        first, differences, counted = self.first[gpus], [], 0
        for i, mine in enumerate(first):
            found = [x for x in self._fitting(team, "ranked_step", tokens=self._file(gpus, i), lr=mine["lr"]) if x]
            counted = sum(int(x["tokens"]) for x in found)
            differences += [abs(x[name] - mine[name]) / abs(mine[name]) for x in found for name in ("loss", "norm")]
        difference, tokens = float(np.max(differences or [NAN])), gpus * self.tokens
        row = Row(way.name, "torch", gpus, tokens, difference=difference,
                  allowed=agreement.bound({self.cfg.train.precision}, gpus * self.tokens))
        if not difference <= row.allowed:
            return replace(row, why="its loss or gradient norm is not ours, so no time of it is given"), None
        files = self._fitting(team, "ranked_taken", places=self.places, folder=str(self.folder))
        row = replace(row, change=agreement.Expected(
            self.places, self.before, self.after[gpus], self.sizes, [x["lr"] for x in first], {self.cfg.train.precision},
            gpus * self.tokens).change(_read(files[0])))
        if row.change is not None and row.change.why:
            return replace(row, why=row.change.why), None
        if counted != tokens:
            return replace(row, why=_miscounted(counted, tokens)), None
        return row, Arm(way.name, gpus, tokens, team, "ranked_steps", {
            "rows": self.cfg.train.batch, "tokens": self.cfg.data.sequence, "vocab": self.sizes["vocab"], "lr": first[-1]["lr"]}, "count")

    # -- blocks ----------------------------------------------------------------------------------------------------------------------

    def _take(self, arm: Arm, count: int, into: Taken | None = None) -> tuple[float, Reading | None]:
        """A block of an arm: its slowest rank's time."""
        heard: list[list[Reading]] = [[] for _ in self.gpu]

        def look() -> None:
            for each, gpu in zip(heard, self.gpu):
                each.append(gpu.read())

        told = [x for x in arm.team.ask(arm.do, patience=self.patience(), meanwhile=look if self.gpu else None, most=arm.most,
                                        **{arm.count: count}, **arm.arguments) if x]
        ns, each = max(float(x["ns"]) for x in told), []
        for gpu, readings in zip(self.gpu, heard):
            if (found := clocks.merged(readings or [gpu.read()])) is not None:
                each.append(gpu.sense(found))
        reading = _worst(each[: arm.gpus]) if each else None
        if into is not None:
            into.blocks.append((ns, reading))
            into.each.append(each)
            into.told.append(told)
        return ns, reading

    def _count(self, arm: Arm, seconds: float) -> int:
        """Steps of a block; finding out warms up."""
        return self.steps or max(3, round(seconds * 1e9 / self._take(arm, 3)[0]))

    def _warm(self, arm: Arm) -> None:
        """Run until the temperature of the hottest GPU stands still."""
        if not self.gpu or self.steps is not None:
            return
        last, end, count = -float("inf"), time.monotonic() + min(WARM_SECONDS, self.left() / 4), self._count(arm, WARM_BLOCK)
        while time.monotonic() < end:
            _, reading = self._take(arm, count)
            if reading is None or not reading.celsius > last + STILL:
                return
            last = reading.celsius

    def _measure(self, arms: Mapping[str, Arm], share: float) -> tuple[dict[str, Taken], dict[str, noise.Kept]]:
        """Blocks of all arms in random order, and which count. An arm that fails has none; ours must not."""
        seconds = min(SECONDS, max(TRIAL_SECONDS, share / (len(arms) * (self.rounds + 2))))
        taken, every = {name: Taken() for name in arms}, {}

        def lost(name: str, error: ServedError) -> None:
            if name in self.own:
                raise error
            self.leave(0)
            failed[name] = f"{error.what}: {error.came}"

        failed: dict[str, str] = {}
        for name, arm in arms.items():
            try:
                every[name] = partial(self._take, arm, self._count(arm, seconds), taken[name])
            except ServedError as error:
                lost(name, error)
        found = clocks.alternate({**every, **({} if self.gpu else {REFERENCE: probe()})}, self.rounds, np.random.default_rng(), lost)
        probes = None if self.gpu else [ns for ns, _ in found.pop(REFERENCE)]
        for name in taken:
            taken[name].keep(len(found.get(name, ())))  # the first round warms up, and who failed has none
        self.failed = failed
        return taken, clocks.kept({name: t.blocks for name, t in taken.items() if t.blocks}, probes)

    failed: Mapping[str, str] = {}
    """Name of an arm that was lost while it was timed -> why."""

    def _kept(self, taken: Mapping[str, Taken]) -> dict[str, noise.Kept]:
        blocks = {name: t.blocks for name, t in taken.items()}
        return clocks.kept(blocks, None) if self.gpu else {name: noise.keep(np.zeros(len(b), bool)) for name, b in blocks.items()}

    # -- figures ---------------------------------------------------------------------------------------------------------------------

    def _note(self, row: Row, arm: Arm, taken: Mapping[str, Taken], kept: Mapping[str, noise.Kept]) -> None:
        """The line of a peer, and those of ours beside it where it is the fastest so far."""
        row = self._figures(row, taken, kept)
        with suppress(ServedError):
            if arm.team.ranks:
                row = replace(row, memory=max(arm.team.ask("memory")))
        self.rows.append(row)
        faster = row.gpus == self.gpus and row.ratio[1] < self.best and _ours(1) in taken
        if faster:
            self.best = row.ratio[1]
        if row.together and (faster or not any(r.library == OURS for r in self.rows)):
            self._note_ours(taken, kept)

    def _note_ours(self, taken: Mapping[str, Taken], kept: Mapping[str, noise.Kept], together: bool = True) -> None:
        """The lines of ours, in place of those before."""
        own = [self._figures(Row(name, OURS, n, n * self.tokens, memory=self.facts[team]["memory"], together=together), taken, kept)
               for name, (team, n) in self.own.items()]
        self.rows = [*own, *(r for r in self.rows if r.library != OURS)]

    def _figures(self, row: Row, taken: Mapping[str, Taken], kept: Mapping[str, noise.Kept]) -> Row:
        """A line from the blocks that count."""
        if row.name not in taken or not taken[row.name].blocks:
            return replace(row, why=self.failed.get(row.name, "it failed while it was timed"))
        own, ours, one = taken[row.name], taken[_ours(row.gpus)], taken.get(_ours(1))
        counts = {_counted(told, row.library == OURS and row.name != EACH) for told in own.told}
        if counts != {row.tokens}:
            return replace(row, why=_miscounted(next(iter(counts - {row.tokens})), row.tokens))
        there = {row.name: own, _ours(row.gpus): ours} | ({_ours(1): one} if one is not None else {})
        n = min(len(t.blocks) for t in there.values())
        both = noise.keep(~np.all([kept[name].mask[:n] for name in there], axis=0))
        row = replace(row, discarded=both.discarded, blocks=own.plain()[:n], beside=ours.plain()[:n],
                      alone=one.plain()[:n] if one is not None else [], kept=both.mask.tolist())
        if not both.believed:
            return replace(row, why=f"throttled: {both.discarded} of {both.mask.size} rounds discarded")
        mine, beside = (np.array([ns for ns, _ in t.blocks[:n]])[both.mask] for t in (own, ours))
        facts, flops, ns = next(iter(self.facts.values())), flops_for(self.cfg, self.vocab), float(np.median(mine))
        rate = row.tokens / ns * 1e9
        row = replace(row, ns=ns, tokens_per_second=rate, mfu=mfu(rate, flops, facts["peak"] * row.gpus),
                      ratio=(1.0, 1.0, 1.0) if own is ours else _ratio(mine, beside, row.together))
        if row.library != OURS or row.gpus == 1:
            return row
        assert one is not None, "ours has its figures beside ours on one"
        alone = np.array([ns for ns, _ in one.blocks[:n]])[both.mask]
        row = replace(row, efficiency=_ratio(alone, mine, row.together), against=_ours(1))
        return self._exposed(row, own.told[:n], both.mask) if row.name != EACH else row

    def _exposed(self, row: Row, told: Sequence[Sequence[Mapping[str, Any]]], mask: np.ndarray) -> Row:
        """With the share of a step that waits for collectives, where every one of them was stamped."""
        wanted, shares, leasts, phases = self.facts[row.gpus]["exchanges"], list[float](), list[float](), list[float]()
        for block in told:
            for rank, x in enumerate(block):
                if not x["wall"] or not sum(x["total"]) > 0 or set(x["exchanges"]) != {wanted}:
                    stamped = sorted(set(x["exchanges"]))
                    return replace(row, unknown=f"rank {rank} stamped {stamped or 'none'} of {wanted} collectives of a step")
            each = [sum(x["exposed"]) / sum(x["wall"]) for x in block]
            shares.append(max(each))
            leasts.append(min(each))
            phases.append(max(sum(x["phase"]) / sum(x["wall"]) for x in block))
        exposed, least, phase = (float(np.median(np.array(of)[mask])) for of in (shares, leasts, phases))
        return replace(row, exposures=shares, exposed=exposed, leasts=leasts, least=least, phase=phase)

    def _efficient(self, rows: Sequence[Row]) -> list[Row]:
        """With the peer's efficiency, beside the fastest of its variants on one GPU; ours first, then the fastest."""
        ones = (r for r in rows if r.library != OURS and r.gpus == 1 and r.ns == r.ns)
        alone = max(ones, key=lambda r: r.tokens_per_second, default=None)
        found = [replace(r, efficiency=(NAN, r.tokens_per_second / (r.gpus * alone.tokens_per_second), NAN), against=alone.name)
                 if alone is not None and r.library != OURS and r.gpus > 1 and r.ns == r.ns else r for r in rows]
        return sorted(found, key=lambda r: (r.library != OURS, r.ns != r.ns, r.name == EACH, -r.gpus if r.library != OURS else r.gpus,
                                            -r.tokens_per_second if r.ns == r.ns else 0.0))


def _ours(gpus: int) -> str:
    return f"{OURS}, {gpus} GPU{'s' * (gpus > 1)}"


def _read(*paths: str) -> dict[str, np.ndarray]:
    """What ranks took of their parameters: where one has NaN, another holds the element."""
    found: dict[str, np.ndarray] = {}
    for path in paths:
        with np.load(path) as file:
            found |= {name: np.where(np.isnan(before), file[name], before) if (before := found.get(name)) is not None else file[name]
                      for name in file}
    return found


def _brief(error: Exception) -> str:
    """The first sentence: an allocator says much more."""
    return str(error).partition(". ")[0]


def _counted(told: Sequence[Mapping[str, Any]], of_all: bool) -> int:
    """Tokens of a step, as those say who ran it. `of_all`: each counts those of all, as our ranks do; else each its own."""
    found = [int(x["tokens"]) for x in told]
    return sum(found) if not of_all else found[0] if len(set(found)) == 1 else -1


def _miscounted(came: int, wanted: int) -> str:
    return f"its step counted {came:,} tokens, and the batch has {wanted:,}: no figure of it is given"


def _ratio(theirs: np.ndarray, ours: np.ndarray, paired: bool) -> Figures:
    """Of times, with an interval where rounds are paired."""
    return clocks.ratio(theirs, ours, 1) if paired else (NAN, float(np.median(theirs / ours)), NAN)


def _worst(readings: Sequence[Reading]) -> Reading:
    """Of several GPUs: the slowest clock, all reasons, all watts, the hottest."""
    reasons = 0
    for r in readings:
        reasons |= r.reasons
    return Reading(float(np.min([r.sm_mhz for r in readings])), reasons, float(np.sum([r.watts for r in readings])),
                   float(np.max([r.celsius for r in readings])))


def environments(ranks: int, more: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Of each rank of a new job; a process that is alone has none of it."""
    own = {k: v for k, v in os.environ.items()
           if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")}
    own |= more or {}
    if ranks == 1:
        return [own]
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port()),
           "TORCHELASTIC_RUN_ID": f"alpha bench {secrets.token_hex(8)}"}
    return [{**own, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _apart(many: int, on_gpu: bool) -> list[dict[str, str]]:
    """Of so many processes that know nothing of each other, each with a GPU of its own."""
    own, = environments(1)
    names = [x.strip() for x in own.get(VISIBLE, "").split(",") if x.strip()] or [str(i) for i in range(many)]
    return [{**own, VISIBLE: names[i]} if on_gpu else own for i in range(many)]


def _port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
