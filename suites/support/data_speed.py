"""Tokens delivered against tokens consumed: how fast batches are made, cold and warm, and how long a loop waits for them.

    python suites/support/data_speed.py [--shards 32] [--steps 200] [--folder DIR] [--write docs/data.md]

Made-up shards of 16.8 million uint16 tokens, batches of 64 sequences of 1024. Cold: the page cache was dropped and no block was checked
yet, as at the start of a run. Warm: the same steps again. In turn with each, a plain loop reads the same shards from the start in parts of
64 KiB and copies them. Stall: a loop that takes CONSUMED tokens a second from a `Prefetcher` with two batches ahead, and sleeps for the
rest; a step's wait is what it waited for its batch. `--write` puts the table between the two marks of a Markdown file.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from alpha.bench.data import _from_disk
from alpha.data import shards
from alpha.data.packing import PackedSampler
from alpha.data.prefetch import Prefetcher, Waited
from alpha.data.sampler import PermutedSampler
from alpha.registry.machine import machine_class

SEQUENCE, BATCH = 1024, 64
CONSUMED = 6e6
"""Tokens a second: 20 times what Llama 1.1B consumes on 4 GPUs."""
MARKS = "<!-- data_speed.py -->", "<!-- /data_speed.py -->"


def made(folder: Path, number: int) -> list[Path]:
    """`number` shards of documents of some 600 tokens, on the disk."""
    rng, size, paths = np.random.default_rng(19), shards.SHARD_TOKENS, [folder / f"{i:05d}.tokens" for i in range(number)]
    for path in paths:
        if not path.exists():
            starts = np.unique([0, size, *rng.integers(1, size, size // 600)])
            facts = {"tokenizer": "t" * 64, "vocab_size": 50_257, "text_bytes": 4 * size, "corpus": "c" * 64}
            shards.write_shard(path, rng.integers(0, 50_257, size, dtype=np.uint16), starts, facts)
    return paths


def fresh(kind: type[PermutedSampler], paths: list[Path]) -> PermutedSampler:
    """A sampler of a stream none of whose tokens was checked, its files out of the page cache."""
    stream = shards.TokenStream([shards.open_shard(path, verify=False) for path in paths])
    sampler = kind(stream, sequence=SEQUENCE, global_batch=BATCH, seed=1)
    for shard in stream.shards:
        shard.forget()
    return sampler


def timed(work: Callable[[], int]) -> tuple[float, float, float]:
    """(tokens a second by the clock, by this thread's processor time, bytes from the disk) of `work`, which returns its tokens."""
    disk, wall, core = _from_disk(), time.perf_counter(), time.thread_time()
    tokens = work()
    wall, core, after = time.perf_counter() - wall, time.thread_time() - core, _from_disk()
    return tokens / wall, tokens / core, float("nan") if disk is None or after is None else after - disk


def plain(paths: list[Path], tokens: int) -> int:
    """Read the first `tokens` tokens of the shards and copy them."""
    left, target = 2 * tokens, bytearray(1 << 16)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while left > 0 and (part := file.read(1 << 16)):
                target[: len(part)] = part
                left -= len(part)
    return tokens - max(left, 0) // 2


def delivered(sampler: PermutedSampler, steps: int) -> int:
    """Make the batches of `steps` steps."""
    for step in range(steps):
        sampler.batch(step)
    return steps * BATCH * SEQUENCE


def stall(sampler: PermutedSampler, steps: int) -> tuple[float, float]:
    """(mean, greatest) wait of a step in ms, of a loop that consumes CONSUMED tokens a second. The first step, which nobody could make
    ahead, is left out."""
    waits: list[Waited] = []
    with Prefetcher(sampler, [(0, 1, 0, 1, False)], depth=2, steps=steps, told=waits.append) as ahead:
        for step in range(steps):
            ahead.batch(step)
            time.sleep(BATCH * SEQUENCE / CONSUMED)
    ms = np.array([waited.wait_ns for waited in waits[1:]]) / 1e6
    return float(ms.mean()), float(ms.max())


def table(paths: list[Path], steps: int) -> str:
    """The measurements, as Markdown."""
    lines = ["| batches | page cache | M tokens/s, clock | M tokens/s, processor time | MB from the disk | plain read, M tokens/s, clock "
             "| wait of a step at 6 M tokens/s, mean, most |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, kind in (("windows", PermutedSampler), ("packed documents", PackedSampler)):
        sampler = fresh(kind, paths)
        for cache in ("cold", "warm"):
            clock, core, disk = timed(lambda sampler=sampler: delivered(sampler, steps))
            if cache == "cold":
                fresh(PermutedSampler, paths)  # for the plain read
            else:
                plain(paths, steps * BATCH * SEQUENCE)
            read, _, _ = timed(lambda: plain(paths, steps * BATCH * SEQUENCE))
            mean, most = stall(fresh(kind, paths) if cache == "cold" else sampler, steps)
            lines.append(f"| {name} | {cache} | {clock / 1e6:.1f} | {core / 1e6:.1f} | {disk / 1e6:,.0f} | {read / 1e6:.1f} "
                         f"| {mean:.2f} ms, {most:.1f} ms |")  # fmt: skip
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where the shards lie or are made; default: a temporary one")
    parser.add_argument("--write", type=Path, help="a Markdown file with the two marks")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="alpha-speed-") as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        paths = made(folder, asked.shards)
        size = sum(path.stat().st_size for path in paths) / 1e6
        text = (f"{asked.shards} made-up shards, {size:,.0f} MB, {asked.steps} steps of {BATCH} x {SEQUENCE} tokens, one thread, on "
                f"`{machine_class().key}`:\n\n{table(paths, asked.steps)}")  # fmt: skip
    print(text)
    return put(asked.write, MARKS, text) if asked.write else 0


def put(page: Path, marks: tuple[str, str], text: str) -> int:
    """Put `text` between the two marks of a Markdown file: 0, or 2 where they do not stand there once each."""
    whole, (begin, end) = page.read_text(encoding="utf-8"), marks
    if whole.count(begin) != 1 or whole.count(end) != 1:
        print(f"{page}: expected {begin} and {end} once each", file=sys.stderr)
        return 2
    page.write_text(re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", whole, flags=re.S), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
