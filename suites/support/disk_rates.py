"""How fast checkpoints are saved and loaded, beside `dd` on the same disk in the same run.

    python suites/support/disk_rates.py [--mb 500] [--rounds 9] [--folder FOLDER] [--record FILE]

Each round takes every turn once, one after the other, so all meet the same machine. Before what is read from a cold cache, the file's pages
are dropped (posix_fadvise). Prints how it was measured, and a table for docs/checkpoints.md: of each turn the median, least and most
seconds, and of dd's time over its time in the same round the median and both quartiles. `--record` appends that to a file as well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from alpha.checkpoint import folders, ranges
from alpha.graph.state import StateLayout, TensorSpec
from alpha.registry.machine import machine_class

LEAST = 0.8
"""Share of dd's rate that saving and loading owe."""


def states_of(mb: float) -> ranges.States:
    """Parameters and two moments of a model whose tensors are 8 MiB, about `mb` megabytes in all."""
    layout = StateLayout(TensorSpec(f"block.{i}.w", (2048, 1024), f"block.{i}") for i in range(max(1, round(mb * 1e6 / 3 / (1 << 23)))))
    rng = np.random.default_rng(1)
    return {kind: (layout, rng.standard_normal(layout.size, np.float32)) for kind in ("param", "m", "v")}


def drop(path: Path) -> None:
    """Take a file's pages out of the cache."""
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def table(took: Mapping[str, Sequence[float]], peers: Mapping[str, str], nbytes: int) -> list[str]:
    """Lines of Markdown. `took`: turn -> seconds, round after round; `peers`: turn -> the turn of dd that it stands beside."""
    lines = ["| what | s, median (least to most) | GB/s, median | of `dd` in the same round, median (quartiles) | at least 80 % |",
             "|---|---|---|---|---|"]
    for what, seconds in took.items():
        share, verdict = "", ""
        if what in peers:
            low, middle, high = np.quantile(np.divide(took[peers[what]], seconds), (0.25, 0.5, 0.75))
            share, verdict = f"{middle:.0%} ({low:.0%} to {high:.0%})", "yes" if middle >= LEAST else "no"
        typical = float(np.median(seconds))
        spread = f"{typical:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        lines.append(f"| {what} | {spread} | {nbytes / typical / 1e9:.2f} | {share} | {verdict} |")
    return lines


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="on the disk that is meant (default: where temporary files are)")
    parser.add_argument("--record", type=Path, help="a file that what is printed is appended to")
    args = parser.parse_args()
    loaded = os.getloadavg()[0]
    states = states_of(args.mb)
    with tempfile.TemporaryDirectory(prefix="alpha-rates-", dir=args.folder) as name:
        at = Path(name)
        kept = ranges.OfArrays()
        data, held = ranges.image(states, 0, 1, kept)
        copy = at / "dd"

        def dd(*options: str) -> None:
            subprocess.run(["dd", "bs=4M", "status=none", *options], check=True)

        def save() -> None:
            temporary = folders.begin(at, 1)
            folders.write(temporary, 0, 1, data, held)
            folders.commit(temporary, 1, {kind: layout for kind, (layout, _) in states.items()}, 1, {})

        def load() -> None:
            folders.load(folders.at(at), states)

        save()
        state = folders.at(at) / (ranges.stem(0, 1) + ranges.STATE)
        kept = at / "kept"
        shutil.copy(state, kept)
        turns: dict[str, tuple[Callable[[], None], Callable[[], None], str]] = {
            "`dd`, forced": (lambda: copy.unlink(missing_ok=True), lambda: dd(f"if={kept}", f"of={copy}", "conv=fsync"), ""),
            "write, force and rename": (lambda: shutil.rmtree(folders.at(at)), save, "`dd`, forced"),
            "copy": (lambda: None, lambda: ranges.image(states, 0, 1, kept) and None, ""),
            "`dd` from a cold cache": (lambda: drop(kept), lambda: dd(f"if={kept}", "of=/dev/null"), ""),
            "load, from a cold cache": (lambda: drop(state), load, "`dd` from a cold cache"),
            "load, from a warm one": (lambda: None, load, ""),
        }
        took: dict[str, list[float]] = {what: [] for what in turns}
        for _ in range(args.rounds):
            for what, (before, act, _) in turns.items():
                before()
                began = time.perf_counter()
                act()
                took[what].append(time.perf_counter() - began)
        said = [f"{datetime.now(timezone.utc):%Y-%m-%d}, {machine_class().key}, {os.cpu_count()} cores: {data.nbytes / 1e6:.0f} MB, "
                f"{args.rounds} rounds; load of the machine {loaded:.1f} before, {os.getloadavg()[0]:.1f} after", "",
                *table(took, {what: peer for what, (_, _, peer) in turns.items() if peer}, data.nbytes)]
        print("\n".join(said))
        if args.record:
            with open(args.record, "a", encoding="utf-8") as file:
                file.write("\n".join(said) + "\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
