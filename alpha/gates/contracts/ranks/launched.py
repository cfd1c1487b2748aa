"""Cases of how a job of ranks is started, ends, and is started again. Floor 7.

`launched` and what it calls run in one process that is no rank and starts its own.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import folders
from alpha.comm import collectives
from alpha.comm.watch import Deadlines
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.cuda_runtime._bindings import CudaError
from alpha.errors import InputError
from alpha.gates.contracts.ranks import places
from alpha.gates.contracts.ranks.calls import misbehave
from alpha.gates.contracts.ranks.collectives import BOUND_S
from alpha.gates.contracts.ranks.members import Ended, members
from alpha.gates.contracts.ranks.support import Case, hash_of, measured
from alpha.graph.state import StateLayout, TensorSpec
from alpha.train import launch, supervisor

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
        return measured(wrong, len(cases), hash_of(*said))
    return case


def _nothing_left(rng: np.random.Generator) -> Measured:
    """No process of a job outlives it, not even one that was stopped."""
    done = members().apart(_orphans, limit_s=BOUND_S)
    if done.result is None:
        return measured([f"the launcher failed: {done.error.strip().splitlines()[-1:]}"], 1)
    return measured([f"{n} processes stay" for n in [done.result] if n], 1)


def _orphans() -> int:
    """Children that are left after a job whose rank was stopped."""
    launch.launch(3, partial(_body, "stops", 1), deadlines=QUICK)
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def _supervised(endings: Sequence[launch.Ended], saves: Sequence[int | None], *, ranks: int, restarts: int, fewest: int,
                tells: Sequence[str] = (), resume: str = "", at: int | None = None, before: Sequence[int] = ()) \
        -> tuple[launch.Ended, list[tuple[int, int, Path | None, int | None]], list[float], list[str]]:
    """Starts that end so, each after the checkpoint of a step was saved; what was asked of each start, pauses, and what was said. `tells`:
    the run directory that each start tells, '' for none, "run" where not given; `resume`, `at`: what the first one goes on from, a run of
    which the checkpoints `before` are there."""
    starts: list[tuple[int, int, Path | None, int | None]] = []
    pauses: list[float] = []
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / resume if resume else None
        for step in before:
            folders.save(Path(folder) / resume / "checkpoints", step, _states(), {}, keep=9)

        def start(n: int, number: int, resume: Path | None, at: int | None) -> launch.Ended:
            starts.append((n, number, resume and resume.relative_to(folder), at))
            step, tell = saves[len(starts) - 1], tells[len(starts) - 1] if tells else "run"
            run = Path(folder) / tell if tell else resume
            if step is not None and run is not None:
                (run / "checkpoints").mkdir(parents=True, exist_ok=True)
                folders.save(run / "checkpoints", abs(step), _states(), {}, keep=9)
                if step < 0:
                    _tear(folders.at(run / "checkpoints", -step))
            return replace(endings[len(starts) - 1], told={"path": str(run)} if tell else {"pid": "7"})

        ended = supervisor.supervise(start, ranks, restarts=restarts, fewest=fewest, resume=first, at=at, report=said.append,
                                     sleep=pauses.append)
    return ended, starts, pauses, said


def _states() -> Any:
    layout = StateLayout([TensorSpec("block.0.w", (50, 100), "block.0")])
    return {"param": (layout, np.ones(layout.size, np.float32))}


def _tear(path: Path) -> None:
    """Cut the largest file of a checkpoint."""
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


LOST, GOOD, BAD = launch.Ended(1, "rank 1 died", True, "account"), launch.Ended(0), launch.Ended(2, "rank 0: no such file")


def _goes_on(rng: np.random.Generator) -> Measured:
    """From the last checkpoint, after pauses of 1, 2, 4 s, as often as was said; in the run that the ranks told last, or else in the one
    that the job was given: a start may lose a rank before it tells any."""
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
    hash_ = hash_of(*starts, *pauses)
    for given, at, tells, saves, want in (
            ("", None, ("run", "", "", ""), (10, None, 20, None), (("", None), ("run", 10), ("run", 10), ("run", 20))),
            ("run", 5, ("", "", "", ""), (10, None, 20, None), (("run", 5), ("run", 10), ("run", 10), ("run", 20))),
            ("run", None, ("", "other", "", ""), (10, 30, None, 40), (("run", None), ("run", 10), ("other", 30), ("other", 30))),
            ("", None, ("", "", "run", ""), (None, None, 10, None), (("", None), ("", None), ("", None), ("run", 10)))):
        _, starts, _, _ = _supervised([LOST] * 4, saves, ranks=2, restarts=3, fewest=2, tells=tells, resume=given, at=at)
        found = tuple((str(run or ""), step) for _, _, run, step in starts)
        wrong += [] if found == want else [f"given {given!r}, told {tells}: {found}"]
    for again in (None, 5):  # lost before it was taken back: not from 10
        _, starts, _, _ = _supervised([LOST] * 3, [again, None, None], ranks=2, restarts=2, fewest=2, tells=("",) * 3, resume="run", at=5,
                                      before=(5, 10))
        wrong += [] if [s[3] for s in starts] == [5] * 3 else [f"asked for step 5, from {[s[3] for s in starts]}"]
    return measured(wrong, 13, hash_)


def _fewer(rng: np.random.Generator) -> Measured:
    """Half as many where it gets no further, and not below the fewest."""
    _, starts, _, _ = _supervised([LOST] * 6, [10, 10, 10, 20, 20, 20], ranks=8, restarts=5, fewest=2)
    wrong = [] if [s[0] for s in starts] == [8, 8, 4, 2, 2, 2] else [f"ranks {[s[0] for s in starts]}"]
    _, starts, _, _ = _supervised([LOST] * 4, [10] * 4, ranks=8, restarts=3, fewest=8)
    wrong += [] if [s[0] for s in starts] == [8] * 4 else [f"ranks {[s[0] for s in starts]}"]
    return measured(wrong, 2)


def _torn(rng: np.random.Generator) -> Measured:
    """A checkpoint that is torn is passed over: the one before counts. Where none is whole the job ends: it does not begin anew there."""
    run = Path("run")
    _, starts, _, _ = _supervised([LOST, LOST, GOOD], [10, -20, 20], ranks=2, restarts=3, fewest=2)
    wrong = [] if starts[1:] == [(2, 1, run, 10), (2, 2, run, 10)] else [f"starts {starts}"]
    ended, starts, pauses, said = _supervised([LOST, LOST, GOOD], [-10, None, None], ranks=2, restarts=3, fewest=2)
    held = ended == replace(LOST, told=ended.told) and len(starts) == 1 and not pauses and len(said) == 1
    wrong += [] if held and "every checkpoint" in said[0] else [f"none is whole: {len(starts)} starts, said {said}"]
    return measured(wrong, 2)


def _not_again(rng: np.random.Generator) -> Measured:
    """Bad input, a job that ended well and one without restarts are started once."""
    wrong = []
    for name, ending, restarts in (("bad input", BAD, 3), ("a good end", GOOD, 3), ("no restarts", LOST, 0)):
        ended, starts, pauses, said = _supervised([ending], [None], ranks=2, restarts=restarts, fewest=2)
        wrong += [] if len(starts) == 1 and not pauses and not said and ended.code == ending.code else [f"{name}: {len(starts)} starts"]
    return measured(wrong, 3)


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "launch.ranks": {"parity": [("ended", _launched("none", "slow", "code")), ("left", _nothing_left), ("meetings", places.meetings)],
                     "determinism": [("ended", _launched("none", "refuses"))],
                     "faults": [*((what, _launched(what)) for what in OUTCOMES if what not in ("none", "slow", "code")),
                                ("unmet", places.unmet)]},
    "supervisor.restarts": {"parity": [("goes on", _goes_on), ("fewer", _fewer)], "determinism": [("goes on", _goes_on)],
                            "faults": [("torn", _torn), ("not again", _not_again)]},
}
