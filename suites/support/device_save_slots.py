"""What a save adds to the steps of a GPU: inside one run, slots of steps with a save and slots without take turns.

    python suites/support/device_save_slots.py [--saves 20] [--every 40]

GPT-2 124M at 64 x 1024 tokens, as in configs/gpt2-124m.toml; its ids are those of a small tokenizer. A slot is half of the steps between
two saves, and begins two steps before the save, so that the host's part falls into it. Both slots are equally warm, and alike in length.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from alpha.backends.cuda.executor import CudaExecutor
from alpha.config import from_tables
from alpha.profile.store import Store
from alpha.train import assemble
from alpha.train.catalogue import catalogue
from alpha.train.loop import Loop

BEFORE = 2
"""Steps before a save at which its slot begins."""


def run(folder: Path, every: int, saves: int, batch: int) -> tuple[Loop, dict[int, int], dict[int, float]]:
    """The loop when it has ended, when each step began (ns), and what each took (ms)."""
    cfg = from_tables({
        "run": {"name": "slots", "out": str(folder)}, "model": {"family": "gpt", "layers": 12, "width": 768, "heads": 12},
        "data": {"corpus": "stdlib", "tokenizer": "bpe", "vocab": 1024, "sample": 200_000, "sequence": 1024,
                 "cache": str(folder / "cache")},
        "train": {"steps": every * (saves + 1), "batch": batch, "precision": "bf16", "eval_every": 0, "checkpoint_every": every, "keep": 1,
                  "profile": 0, "verify": 0},
        "optim": {"lr": 6e-4, "warmup": 20}, "machine": {"backend": "cuda"}})  # fmt: skip
    data, kernels = assemble.open_data(cfg), catalogue()
    program = assemble.program_for(cfg, 50304, kernels, 1)
    began, took = dict[int, int](), dict[int, float]()
    with CudaExecutor(program, kernels) as executor, Store(folder / "metrics.sqlite") as metrics:
        loop = Loop(cfg, executor, assemble.sampler_for(cfg, data), data.validation, data.tokenizer, folder / "checkpoints", metrics)
        loop.start()
        loop.foretell_saves()
        advance = loop.advance

        def timed(**given: Any) -> Any:
            began[loop.step] = time.perf_counter_ns()
            made = advance(**given)
            took[made.step] = made.seconds * 1e3
            return made

        loop.advance = timed  # type: ignore[method-assign]
        loop.run()
    return loop, began, took


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("every", 40), ("saves", 20), ("batch", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loop, began, took = run(Path(folder), args.every, args.saves, args.batch)
    stalls, half = loop.stalls, args.every // 2
    starts = [args.every * k - BEFORE for k in range(1, args.saves)]
    slots = [((began[s + half] - began[s]) / 1e6, (began[s + args.every] - began[s + half]) / 1e6) for s in starts]
    step = fmean(without for _, without in slots) / half
    added = [saving - without for saving, without in slots]
    spread = 2 * stdev(added) / sqrt(len(added))
    print(f"{stalls.nbytes / 1e6:,.0f} MB a save, mean step {step:.2f} ms, microbatches {median(stalls.microbatches) / 1e6:.1f} ms")
    print("| save | slot with it, ms | slot without, ms | added, ms |\n|---|---|---|---|")
    for start, (saving, without) in zip(starts, slots):
        print(f"| {start + BEFORE} | {saving:.2f} | {without:.2f} | {saving - without:+.2f} |")
    print(f"a save adds {fmean(added):+.2f} ms, give or take {spread:.2f} (twice the standard error): "
          f"{fmean(added) / step:+.2%}, give or take {spread / step:.2%} of a mean step")
    print(f"the run itself: {stalls.after(step * 1e6)}")
    slowest = sorted(((ms - step, s) for s, ms in took.items() if s >= 10), reverse=True)[:5]
    print("most over the mean, ms at step: " + ", ".join(f"{over:.1f} at {s}" for over, s in slowest))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
