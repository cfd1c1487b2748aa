"""`alpha bench step RUN.toml --against TREE [--nproc N]`: a step of today's tree and of another state of the code, in one run. Floor 8.

Each side is a team of processes that import their own tree (team.py, step_member.py), on one GPU or on N. Both train from the same weights
on the same tokens. Their first CHECKED steps say whether they compute the same: to the bit, or within agreement.bound, or no time is given.
Then blocks of both alternate in random order, so that temperature and power are alike; rounds in which a GPU was throttled do not count.
The ratio has an interval of the rounds, and the verdict is that interval's: it lies above 1, below 1, or holds it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from alpha.bench import agreement, clocks
from alpha.bench.step import CHECKED, REFERENCE, ROUNDS, SECONDS, ids_of, probe
from alpha.bench.step_ranks import EACH_TREE, START_S, environments, of_gpus
from alpha.bench.team import Team
from alpha.config import Config
from alpha.cuda_runtime.nvml import Clocks, Reading
from alpha.errors import InputError
from alpha.gates.timing.against import outside
from alpha.profile.served import ServedError
from alpha.resources import ROOT

TODAY = "this tree"


@dataclass(frozen=True)
class Compared:
    """`tree`: the other one, as it was named. ns: a step of today's and of the other, medians of the rounds that count; ratio: (low,
    middle, high) of today's time over the other's. difference: the largest relative one of loss and norm in the first steps, `allowed`
    the most; 0 where all are the same to the bit. blocks: of each side ns a step, in the order of the rounds; `counts`: which of them do.
    why: why there is no ratio."""

    run: str
    gpus: int
    tree: str
    hardware: str = ""
    ns: tuple[float, float] = (float("nan"), float("nan"))
    ratio: tuple[float, float, float] = (float("nan"), float("nan"), float("nan"))
    difference: float = float("nan")
    allowed: float = float("nan")
    blocks: dict[str, list[float]] = field(default_factory=dict)
    counts: list[bool] = field(default_factory=list)
    seconds: float = 0.0
    why: str = ""

    @property
    def verdict(self) -> str:
        """What the interval says of today's tree."""
        low, _, high = self.ratio
        if self.why or not 0 < low <= high < np.inf:
            return "not compared" if self.why else "too few rounds to say"
        return "slower" if low > 1 else "faster" if high < 1 else "no difference seen"


def compare(cfg: Config, gpus: int, tree: Path, named: str = "", *, rounds: int = ROUNDS, steps: int | None = None,
            member: Callable[[Path], Sequence[str]] | None = None, report: Callable[[str], None] = lambda text: None) -> Compared:
    """A step of `cfg` by this tree and by `tree`, on as many GPUs (ranks of the CPU, where the run file computes there). `steps`: of a
    block; None: those of SECONDS. `member`: what is started for a rank of a tree. InputError where `tree` cannot be asked."""
    if not (tree / "alpha" / "bench" / "step_member.py").is_file():
        raise InputError("that state of the code has no ranks to benchmark", came=named or str(tree),
                         expected="alpha/bench/step_member.py in it", do="compare with a later state")
    if rounds < 2:
        raise InputError("one round has no interval", came=rounds, expected="--rounds 2 or more", do="leave it out")
    began, named = time.monotonic(), named or str(tree)
    member = member or (lambda root: [sys.executable, "-c", EACH_TREE, str(root)])
    many, vocab, teams = of_gpus(cfg, gpus), ids_of(cfg), dict[str, Team]()
    found = Compared(cfg.run.name, gpus, named)
    try:
        told: dict[str, list[dict[str, float]]] = {}
        for name, root in ((TODAY, ROOT), (named, tree)):
            report(f"{name}: building")
            places = [{**x, "PYTHONPATH": outside()} for x in environments(gpus)]
            teams[name] = Team(name, [member(root)] * gpus, places, foreign=False)
            facts = teams[name].ask("open", patience=START_S, text=many.resolved(), vocab=vocab)[0]
            told[name] = teams[name].ask("take", steps=CHECKED)[0]
        today, other = told.values()
        pairs = [(a[k], b[k]) for a, b in zip(today, other, strict=True) for k in ("loss", "norm")]
        difference = float(np.max([0.0 if a == b else abs(a - b) / max(abs(a), abs(b)) for a, b in pairs]))
        allowed = agreement.bound({cfg.train.precision}, gpus * cfg.train.batch * cfg.data.sequence)
        found = replace(found, hardware=facts["hardware"], difference=difference, allowed=allowed)
        if not difference <= allowed:
            why = f"the two trees compute otherwise: loss or norm of the first {CHECKED} steps differs by {difference:.2g}"
            return replace(found, why=why, seconds=time.monotonic() - began)
        report("timing")
        found = replace(found, **_timed(teams, cfg.machine.backend == "cuda", gpus, rounds, steps))
        return replace(found, seconds=time.monotonic() - began)
    except ServedError as error:
        return replace(found, why=f"{error.what}: {error.came}", seconds=time.monotonic() - began)
    finally:
        for team in teams.values():
            team.close()


def _timed(teams: dict[str, Team], on_gpu: bool, gpus: int, rounds: int, steps: int | None) -> dict[str, Any]:
    """Blocks of all teams in turn: what they took, which count, and the ratio."""
    gpu = [Clocks.open(i) for i in range(gpus)] if on_gpu else []

    def block(team: Team, count: int) -> tuple[float, Reading | None]:
        heard: list[Reading] = []
        told = team.ask("block", steps=count, meanwhile=(lambda: heard.extend(g.read() for g in gpu)) if gpu else None)
        return max(float(x["ns"]) for x in told), clocks.merged(heard or [g.read() for g in gpu])

    def lost(name: str, error: ServedError) -> None:
        raise error

    count = steps or max(3, round(SECONDS * 1e9 / max(block(team, 3)[0] for team in teams.values())))
    arms = {name: partial(block, team, count) for name, team in teams.items()}
    taken = clocks.alternate({**arms, **({} if gpu else {REFERENCE: probe()})}, rounds, np.random.default_rng(), lost)
    probes = None if gpu else [ns for ns, _ in taken.pop(REFERENCE)]
    kept = clocks.kept(taken, probes)
    counts = np.logical_and.reduce([kept[name].mask for name in taken])
    today, other = (np.array([ns for ns, _ in taken[name]]) for name in teams)
    if counts.sum() < max(2, rounds // 2):
        return {"why": f"only {counts.sum()} of {rounds} rounds count: the machine was throttled, or others use it"}
    today, other = today[counts], other[counts]
    return {"ns": (float(np.median(today)), float(np.median(other))), "ratio": clocks.ratio(today, other, 1),
            "blocks": {name: [ns for ns, _ in blocks] for name, blocks in taken.items()}, "counts": [bool(x) for x in counts]}


def show(c: Compared, console: Console) -> None:
    """Three lines."""
    console.print(f"{c.run} on {c.gpus} x {c.hardware or 'nothing that answered'}: {TODAY} and {c.tree}", markup=False)
    if c.why:
        console.print(c.why, markup=False)
        return
    same = "the same bits" if c.difference == 0 else f"they differ by {c.difference:.1e}, at most {c.allowed:.1e}"
    console.print(f"first {CHECKED} steps: {same}", markup=False)
    low, middle, high = c.ratio
    console.print(f"{c.ns[0] / 1e6:.2f} and {c.ns[1] / 1e6:.2f} ms a step; time of {TODAY} {middle:.4f} [{low:.4f}, {high:.4f}] of the "
                  f"other's, {sum(c.counts)} of {len(c.counts)} rounds: {c.verdict}", markup=False)
