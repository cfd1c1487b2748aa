"""Runs on hosts of their own (apart.py), as their users start them: `python suites/support/apart_runs.py bits` makes the bit table.

Layouts of four ranks, with and without ZeRO-1, must leave the losses, norms, validations, samples and checkpoints of one process. `map`
prints what `alpha bench comm` says of two hosts with two ranks each.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ranked_runs
import warm
from apart import Hosts, why_not

from alpha.bench.comm import SIZES

ALPHA = ["-m", "alpha", "lab"]
"""Of an interpreter."""
SAME = ("steps", "evaluations", "samples", "checkpoints")
WORDS = "def return self value None import for in if else while class".split()
SECRET = "a secret of these hosts"
PORT = 29500
LAYOUTS = ((1, 4), (2, 2), (4, 1))
"""Hosts, and ranks of each."""
LIMIT_S = 240.0
"""Within which a run of this model ends, whatever the machine is busy with."""


@dataclass
class Started:
    """One host's command. `said`: its lines, each with the moment (CLOCK_MONOTONIC, seconds) when it was read."""

    process: warm.Process
    said: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append((time.monotonic(), line.decode(errors="replace").rstrip("\n")))

    def when(self, words: str, since: float = 0.0) -> float | None:
        """The moment of the first line with these words, after `since`."""
        return next((moment for moment, line in list(self.said) if words in line and moment >= since), None)

    def wait(self, seconds: float = LIMIT_S) -> int:
        """Its exit code; it is killed after so many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reader.join(5)

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in list(self.said))


def corpus(folder: Path) -> None:
    """A small one, `text`, of words of Python."""
    rng = random.Random(1)
    (folder / "text").mkdir()
    for i in range(12):
        (folder / "text" / f"{i}.txt").write_text("\n".join(" ".join(rng.choices(WORDS, k=8)) for _ in range(60)))


def run_file(folder: Path, name: str, zero: int = 0) -> Path:
    """Its path."""
    path = folder / f"{name}.toml"
    path.write_text(ranked_runs.RUN.format(folder=folder.as_posix(), name=name, zero=zero))
    return path


def environment(**others: str) -> dict[str, str | None]:
    """What a host's command finds otherwise than this process: the job's secret, and nothing that another launcher set."""
    theirs = ("SLURM_", "MASTER_", "JOB_COMPLETION_INDEX", "RANK", "WORLD_SIZE")
    gone = dict.fromkeys(k for k in os.environ if k.startswith(theirs))
    return {**gone, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(__file__).parents[2]), "ALPHA_SECRET": SECRET, **others}


def start(hosts: Hosts, host: int, count: int, words: Sequence[str | Path], *, port: int = PORT, **env: str) -> Started:
    """Host number `host` of `count`; `words`: run file and options."""
    meet = ["--hosts", str(count), "--host", str(host), "--meet", f"{hosts.address(0)}:{port}"] if count > 1 else []
    return Started(hosts.begin(host, [*ALPHA, *words, *meet], environment(**env)))


def alone(folder: Path, name: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """What one process leaves."""
    done = warm.run([*ALPHA, run_file(folder, name), *options], environment=environment(), timeout=LIMIT_S)
    assert not done.returncode, done.stderr
    return ranked_runs.left(folder / "runs" / name)


def together(hosts: Hosts, folder: Path, name: str, count: int, ranks: int, zero: int, options: Sequence[str] = ()) -> list[Started]:
    """A run on the first `count` hosts, to its end."""
    path = run_file(folder, name, zero)
    started = [start(hosts, i, count, [path, "--nproc", str(ranks), *options]) for i in range(count)]
    for one in started:
        one.wait()
    return started


def differs(folder: Path, name: str, one: Mapping[str, Any], started: Sequence[Started]) -> str:
    """'' where a run has the bits of one process; else what is wrong with it."""
    codes = [s.process.returncode for s in started]
    if any(codes):
        return f"exit codes {codes}: " + "; ".join(s.text[-600:] for s in started)
    found = ranked_runs.left(folder / "runs" / name)
    return ", ".join(f"other {what}" for what in SAME if found[what] != one[what])


def main(what: str = "bits") -> int:
    why = why_not()
    if why:
        print(f"NOT_RUN: {why}")
        return 3
    return {"bits": bits, "map": two_hosts}[what]()


def two_hosts(sizes: Sequence[int] = SIZES) -> int:
    """The map, and one collective of operands of these sizes, bytes."""
    code = (f"from alpha.__main__ import main; from alpha.bench.comm import bench; bench.__defaults__ = '*', {tuple(sizes)}, None, None; "
            "raise SystemExit(main())")
    words = ["-c", code, "bench", "comm", "--nproc", "2", "--hosts", "2", "--case", "all_reduce whole", "--rounds", "7"]
    with Hosts(2) as hosts:
        ends = [Started(hosts.begin(i, [*words, "--host", i, "--meet", f"{hosts.address(0)}:{PORT}"], environment()))
                for i in range(2)]
        codes = [end.wait() for end in ends]
    print(ends[0].text, ends[1].text, sep="")
    return max(codes)


def bits() -> int:
    """Every layout, and one that is another run."""
    wrong = 0
    with tempfile.TemporaryDirectory() as made, Hosts(4) as hosts:
        folder = Path(made)
        corpus(folder)
        one = alone(folder, "alone")
        for count, ranks in LAYOUTS:
            for zero in (0, 1):
                name, began = f"h{count}n{ranks}z{zero}", time.monotonic()
                said = differs(folder, name, one, together(hosts, folder, name, count, ranks, zero))
                wrong += bool(said)
                print(f"{count} x {ranks}, train.zero = {zero}: {said or 'same bits'} ({time.monotonic() - began:.1f} s)", flush=True)
        said = differs(folder, "h2n1z1", one, together(hosts, folder, "h2n1z1", 2, 1, 1, ["--set", "train.shards=4"]))
        print(f"planted, another number of shards: {said or 'same bits'}")
        wrong += "other steps" not in said
    print(f"{wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
