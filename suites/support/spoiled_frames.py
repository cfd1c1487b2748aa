"""Frames between bridges, spoiled: `spoiled_frames.py COUNT [SEED]` says how many delivered something else, and at what peak memory."""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from alpha.gates.contracts.ranks.frames import mutated


def main(count: int, seed: int) -> int:
    began, wrong = time.process_time(), mutated(count, np.random.default_rng(seed))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took = time.process_time() - began
    print(f"{count:,} frames, {len(wrong)} wrong, {took:.0f} s of processor time, {peak:.0f} MiB at most; seed {seed}")
    print("\n".join(wrong[:20]), end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1].replace(",", "")), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
