"""Sessions of small runs, with a console that keeps its lines, a registry that notes what it is asked, and a machine that is measured at
once. Floor 7."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from alpha.backends.spot import Look
from alpha.checkpoint import folders
from alpha.config import Config
from alpha.gates.contracts.train.apart import instead
from alpha.gates.contracts.train.made import SmallRun, _program, _without_paths, small_run
from alpha.profile.store import read
from alpha.train import log as logs
from alpha.train import peak, sample, session, spots
from alpha.train.assemble import flops_for
from alpha.train.catalogue import catalogue
from alpha.train.console import Printer
from alpha.train.session import Outcome, Prepared
from alpha.train.startup import Startup

EVIDENCE = {"kernel.one": {"parity": "12", "faults": "34"}}
"""What the registry of these sessions answers."""

HASH = hashlib.sha256(json.dumps(EVIDENCE, sort_keys=True).encode()).hexdigest()


class Admits:
    """A registry that admits everything and notes what it was asked."""

    def __init__(self) -> None:
        self.asked = list[tuple[Sequence[str], Sequence[Any]]]()

    def __call__(self, ids: Sequence[str], calls: Sequence[tuple[str, Any, Any]]) -> Mapping[str, Any]:
        self.asked.append((list(ids), list(calls)))
        return EVIDENCE


class Sessions:
    """Sessions of runs in one folder, over one text."""

    def __init__(self, small: SmallRun) -> None:
        self.small, self.root = small, small.root
        self.cfg = small.config(2, f"run.out='{(small.root / 'runs').as_posix()}'", "data.prefetch=0", "train.steps=4",
                                "train.micro_batch=6", "train.eval_every=3",
                                "train.checkpoint_every=2", "train.profile=0", "train.verify=2", "train.sample_every=3", "model.dropout=0")
        self.made: list[Path] = []

    def prepared(self, cfg: Config) -> Prepared:
        """What a process that forks ranks hands over: built once."""
        program = _program(_without_paths(replace(self.cfg, train=replace(self.cfg.train, steps=cfg.train.steps))),
                           self.small.data.tokenizer.vocab_size)
        return Prepared(self.small.data, 2, program, flops_for(cfg, self.small.data.tokenizer.vocab_size), datetime(2024, 5, 6, 7, 8, 9, 99,
                        timezone.utc), 77, Startup())

    def train(self, cfg: Config | None = None, stamp: str = "", anew: bool = False, **given: Any) -> tuple[Outcome, list[str]]:
        """A session, and the lines that it printed."""
        cfg, shown = cfg or self.cfg, io.StringIO()
        given = {"admit": Admits(), "prepared": None if anew or "prepared" in given else self.prepared(cfg), "made": self.made.append,
                 **given}
        printer = Printer(Console(file=shown, highlight=False, soft_wrap=True, width=400), stamp)
        try:
            return session.train(cfg, catalogue(), printer, **given), lines_of(shown)
        finally:
            self.printed = lines_of(shown)

    def bits(self, run: Path, step: int | None = None) -> str:
        """A hash of a checkpoint's tensors."""
        checkpoint = folders.at(run / "checkpoints", step)
        digest = hashlib.sha256()
        for kind in ("param", "m", "v", "counter"):
            layout, flat = folders.read(checkpoint, kind)[kind]
            for offset, n in layout.ranges():
                digest.update(flat[offset : offset + n].tobytes())
        return digest.hexdigest()


def lines_of(shown: io.StringIO) -> list[str]:
    """What was printed, with what the clock decides left out."""
    text = shown.getvalue()
    for pattern, mask in ((r"[\d,]+ tokens/s", "N tokens/s"), (r"MFU [\d.]+%|MFU \? \(busy machine: peak measured too low\)", "MFU N"),
                          (r"\d+:\d\d(?= left|: N)", "T"), (r"^saves     .*$", "saves     ..."), (r"^((?:UNGATED )?saves: ).*$", r"\1..."),
                          (r"^start     [\d.]+ s from the command: .*$", "start     ..."),
                          (r"largest error [\d.]+ of", "largest error N of"),
                          (r"its tolerance \(\w+\)", "its tolerance (OP)")):
        text = re.sub(pattern, mask, text, flags=re.MULTILINE)
    return text.splitlines()


class _Spot:
    """A spot check that finds what it should, of every launch."""

    def __init__(self, launch: object, read: object, rng: object) -> None:
        self.launch = launch

    def looks(self, read: object) -> list[Look]:
        """What it found."""
        return [Look("rows", 10, 0.5)]


@contextmanager
def sessions(rng: np.random.Generator) -> Iterator[Sessions]:
    """A folder of runs, on a machine of which it takes no time to measure the speed."""
    with ExitStack() as stack:
        small = stack.enter_context(small_run(rng))
        stack.enter_context(instead(sample, TOKENS=9))
        stack.enter_context(instead(spots, Spot=_Spot))
        stack.enter_context(instead(peak, SIZE=4, REPEATS=1, COPY_BYTES=64, COPIES=1))
        yield Sessions(small)


def table(run: Path, name: str, columns: str = "*") -> list[tuple[Any, ...]]:
    """Rows of a table of a run's metrics."""
    return [tuple(row) for row in read(run / "metrics.sqlite", name, columns)]


def events(run: Path, rank: int = 0) -> list[tuple[str, str, int | None, dict[str, Any]]]:
    """(event, level, step, fields) of a rank's log."""
    return [(x["event"], x["level"], x["step"], x["fields"]) for x in logs.read(run / "logs" / f"rank{rank}.jsonl")]


def stops(after: int, said: int) -> Callable[[], int]:
    """What is asked after each step: says `said` after step `after`."""
    asked = [0]

    def stop() -> int:
        asked[0] += 1
        return said if asked[0] == after else 0
    return stop
