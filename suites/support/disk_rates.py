"""How fast checkpoints are saved and loaded, beside `dd` on the same disk in the same run.

    python suites/support/disk_rates.py [--mb 500] [--rounds 9] [--folder FOLDER]

Each round takes every turn once, one after the other, so all meet the same machine. Before what is read from a cold cache, the file's pages
are dropped (posix_fadvise). Prints the shortest time of each, and the median over the rounds of dd's time over its time in the same round.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from alpha.checkpoint import ranges, simple
from alpha.graph.state import StateLayout, TensorSpec


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


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="on the disk that is meant (default: where temporary files are)")
    args = parser.parse_args()
    states = states_of(args.mb)
    with tempfile.TemporaryDirectory(prefix="alpha-rates-", dir=args.folder) as name:
        at = Path(name)
        data, held = ranges.image(states, 0, 1)
        copy = at / "dd"

        def dd(*options: str) -> None:
            subprocess.run(["dd", "bs=4M", "status=none", *options], check=True)

        def save() -> None:
            temporary = simple.begin(at, 1)
            simple.write(temporary, 0, 1, data, held)
            simple.commit(temporary, 1, {kind: layout for kind, (layout, _) in states.items()}, 1, {})

        def load() -> None:
            simple.load(simple.at(at), states)

        save()
        state = simple.at(at) / (ranges.stem(0, 1) + ranges.STATE)
        kept = at / "kept"
        shutil.copy(state, kept)
        turns: dict[str, tuple[Callable[[], None], Callable[[], None], str]] = {
            "`dd`, forced": (lambda: copy.unlink(missing_ok=True), lambda: dd(f"if={kept}", f"of={copy}", "conv=fsync"), ""),
            "write, force and rename": (lambda: shutil.rmtree(simple.at(at)), save, "`dd`, forced"),
            "copy": (lambda: None, lambda: ranges.image(states, 0, 1, data) and None, ""),
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
        print(f"{data.nbytes / 1e6:.0f} MB, {args.rounds} rounds; load of the machine {os.getloadavg()[0]:.0f}\n")
        print("| what | s, the least | GB/s | of `dd`, the median |\n|---|---|---|---|")
        for what, (_, _, peer) in turns.items():
            share = f"{np.median(np.divide(took[peer], took[what])):.0%}" if peer else ""
            print(f"| {what} | {min(took[what]):.2f} | {data.nbytes / min(took[what]) / 1e9:.2f} | {share} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
