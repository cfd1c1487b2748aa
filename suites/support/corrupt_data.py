"""Corruptions of prepared data, drawn: how many of each kind were struck, and which were not refused. The table of docs/data.md.

    python suites/support/corrupt_data.py [NUMBER] [SEED]
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from alpha.data import prepare, prepared
from alpha.data.sources import Rules
from alpha.gates.contracts.data import corruption
from alpha.gates.contracts.data.support import text_like, write_texts


def main(number: int = 10_000, seed: int = 1) -> int:
    """Strike, print the table, and end with 1 if anything was not refused."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_texts(root / "texts", {f"{i}.txt": b"T" + text_like(rng, 40_000) for i in range(8)})
        order = prepare.Order((str(root / "texts"),), Rules(part=4000), "bytes", unit=100_000)
        out = prepare.prepare(order, root / "out").folder
        struck, missed = corruption.campaign(out, lambda: prepared.open_prepared(out, verify=True), rng, number)
    kinds = [*corruption.WITHIN, *corruption.WHOLE]
    for region in sorted({what.partition(" ")[2] for what in struck}):
        print(f"{region:16} " + " ".join(f"{kind} {struck[f'{kind} {region}']:5}" for kind in kinds if struck[f"{kind} {region}"]))
    print(f"{sum(struck.values()):,} corruptions with seed {seed}, {len(missed)} not refused")
    for what, times in Counter(missed).most_common(20):
        print(f"  {times} x {what}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
