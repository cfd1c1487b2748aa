"""Corrupt a checkpoint again and again: every kind of damage in every file, none of which may be loaded.

    python suites/support/corruptions.py --count 20000 [--seed 1]

Prints how many of each (kind of damage, kind of file) were refused by the name of a file that was touched, and what was not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from alpha.checkpoint import folders
from alpha.gates.contracts.corruptions import SPOILS, campaign
from alpha.gates.contracts.made_state import empty, layouts, saved_by, state


def main() -> int:
    """Returns 1 where anything was not detected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    of = layouts(rng, 3, 20)
    with tempfile.TemporaryDirectory(prefix="alpha-corruptions-") as name:
        at = Path(name)
        others = [saved_by(at / where, step, state(rng, of), 2, 4096, {"x": step}) for where, step in (("other", 5), ("other", 6))]
        path = saved_by(at / "checkpoints", 5, state(rng, of), 2, 4096, {"x": 1})
        refused, undetected = campaign(path, others, lambda spoilt: folders.load(spoilt, empty(of)), args.count, rng)
    kinds = sorted({file for _, file in refused})
    print(f"| damage | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    for what in sorted(SPOILS):
        print(f"| {what} | {' | '.join(str(refused[what, file]) for file in kinds)} |")
    print(f"\n{sum(refused.values())} refused by name, {len(undetected)} not")
    for line in undetected:
        print(line)
    return int(bool(undetected))


if __name__ == "__main__":
    sys.exit(main())
