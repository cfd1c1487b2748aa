"""How fast a run's batches are made: `alpha bench data`. Floor 8.

One thread makes the batches of the run's steps, as the loop asks for them. Warm: a first pass has read the same steps. Cold: the shards are
dropped from the page cache first, and what came from the disk is counted, so that a cache that did not let go is seen.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from alpha.config import Config
from alpha.data.mixture import Streams
from alpha.data.shards import Shard
from alpha.train.assemble import Dataset, open_data, sampler_for

STEPS = 200


@dataclass(frozen=True)
class Rate:
    """Tokens a second of `steps` steps: `wall` by the clock, `core` by this thread's processor time. `disk`: bytes that came from the
    disk, None where the system does not tell."""

    cache: str
    steps: int
    tokens: int
    wall: float
    core: float
    disk: int | None


def bench(cfg: Config, steps: int = STEPS) -> list[Rate]:
    """Warm and cold."""
    data = open_data(cfg)
    sampler, shards = sampler_for(cfg, data), _shards(data)

    def take(cache: str) -> Rate:
        before, wall, core = _from_disk(), time.perf_counter(), time.thread_time()
        for step in range(steps):
            for part in range(cfg.train.shards * cfg.micros):
                sampler.batch(step, part, cfg.train.shards * cfg.micros, documents=cfg.data.documents)
        wall, core, after = time.perf_counter() - wall, time.thread_time() - core, _from_disk()
        tokens = steps * cfg.train.batch * cfg.data.sequence
        return Rate(cache, steps, tokens, tokens / wall, tokens / core, None if before is None or after is None else after - before)

    take("first")
    warm = take("warm")
    for shard in shards:
        shard.forget()
    return [warm, take("cold")]


def _shards(data: Dataset) -> list[Shard]:
    streams = [stream for _, stream in data.train.parts] if isinstance(data.train, Streams) else [data.train]
    return [shard for stream in streams for shard in stream.shards]


def _from_disk() -> int | None:
    """Bytes that this process has had read from a disk."""
    try:
        found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) if found else None
