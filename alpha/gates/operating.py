"""The perf gate's operating characteristic, measured: how often it cries wolf, and what it can see. Floor 7.

Two sources. Resampled: one long series of real pairs of blocks (A against A) is recorded, and the procedure of ab.py is run on stretches
of it (contiguous ones, so that drift and neighbours stay in), with B's times multiplied by the injected slowdown; the fresh process is
another stretch. Live: the procedure as it runs, with a busy wait of that fraction inside B's blocks. Rates come with Wilson intervals. The
table is written to baselines/perf/operating.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alpha.component import Component
from alpha.gates import ab
from alpha.gates.subjects import fresh_nonce
from alpha.profile import noise
from alpha.profile.noise import AMBIGUOUS, FAIL, PASS
from alpha.registry.evidence import shipped_root, write_atomic
from alpha.registry.machine import environment, machine_class

SLOWDOWNS = (0.0, 0.01, 0.02, 0.05)
TRIALS = 400
"""Resampled trials per slowdown."""

SERIES = 3000
"""Pairs in the recorded series, fewer when the time runs out."""


def record_series(component: Component, case_name: str, seconds: float) -> list[float]:
    """Log ratios of A against itself."""
    nonce = fresh_nonce()
    rng = np.random.default_rng(int(nonce[:8], 16))
    first, second = ab.arms(component, component, case_name, nonce)
    logs: list[float] = []
    end = time.perf_counter() + seconds
    while len(logs) < SERIES and time.perf_counter() < end:
        logs += noise.pairs_of(first, second, 50, rng)
    return logs


def resampled(series: Sequence[float], slowdown: float, rng: np.random.Generator, trials: int = TRIALS) -> dict[str, int]:
    """How often each verdict falls."""
    values = np.asarray(series)
    most, level = ab.MOST, noise.share(noise.ALPHA, rounds=noise.ROUNDS)
    counts = {PASS: 0, AMBIGUOUS: 0, FAIL: 0}
    for _ in range(trials):
        start, again = rng.integers(0, len(values) - most, 2)
        sign = rng.choice((-1.0, 1.0), most)  # which arm came first is a coin toss, so A/A ratios are symmetric
        stretch = values[start : start + most] * sign + np.log1p(slowdown)
        taken = iter(stretch)
        fresh = values[again : again + most] * rng.choice((-1.0, 1.0), most) + np.log1p(slowdown)
        verdict = ab.decide(lambda n, t=taken: [float(next(t)) for _ in range(n)],  # type: ignore[misc]
                            lambda f=fresh: noise.interval([float(x) for x in f], level))  # type: ignore[misc]
        counts[verdict.verdict] += 1
    return counts


def live(component: Component, case_name: str, slowdown: float, trials: int, end: float) -> dict[str, int]:
    """The same with the procedure as it runs, until the trials or the time are used up; the second look binds fresh buffers."""
    counts = {PASS: 0, AMBIGUOUS: 0, FAIL: 0}
    for _ in range(trials):
        if time.perf_counter() > end:
            break
        nonce = fresh_nonce()
        rng = np.random.default_rng(int(nonce[:8], 16))
        first, second = ab.arms(component, component, case_name, nonce, slowdown)
        verdict = ab.decide(lambda n, f=first, s=second, r=rng: noise.pairs_of(f, s, n, r),  # type: ignore[misc]
                            lambda: ab.once_more(component, component, case_name, slowdown))
        counts[verdict.verdict] += 1
    return counts


def characteristic(component: Component, *, case_name: str = "cache", seconds: float = 60.0) -> dict[str, Any]:
    """Measure the table: about half the time for the series, half for live trials."""
    start = time.perf_counter()
    series = record_series(component, case_name, seconds / 2)
    rng = np.random.default_rng(int(fresh_nonce()[:8], 16))
    rows: list[dict[str, object]] = []
    for i, slowdown in enumerate(SLOWDOWNS):
        rows.append(_row("resampled", slowdown, resampled(series, slowdown, rng)))
        end = start + seconds / 2 + seconds / 2 * (i + 1) / len(SLOWDOWNS)
        rows.append(_row("live", slowdown, live(component, case_name, slowdown, 25, end)))
    spread = np.asarray(series)
    return {"machine": machine_class().key, "cpu": environment().get("cpu", ""), "component": component.id, "case": case_name,
            "pairs": len(series), "pair_spread": round(float(np.subtract(*np.percentile(spread, [75, 25])) / 1.349), 5),
            "block_ns": ab.BLOCK_NS, "rounds": noise.ROUNDS, "first_round_pairs": noise.PAIRS, "alpha": noise.ALPHA, "table": rows}


def _row(source: str, slowdown: float, counts: dict[str, int]) -> dict[str, object]:
    trials = sum(counts.values())
    low, high = noise.wilson(counts[FAIL], trials)
    return {"source": source, "slowdown": slowdown, "trials": trials, "fail": counts[FAIL], "ambiguous": counts[AMBIGUOUS],
            "pass": counts[PASS], "fail_rate": round(counts[FAIL] / trials, 4) if trials else None,
            "fail_interval": [round(low, 4), round(high, 4)]}


def path() -> Path:
    """Where the table is published."""
    return shipped_root().parent / "perf" / "operating.json"


def publish(table: dict[str, object]) -> Path:
    """Write the table of one component; others stay."""
    found: dict[str, object] = json.loads(path().read_text(encoding="utf-8")) if path().is_file() else {}
    found[f"{table['machine']} {table['component']} {table['case']}"] = table
    write_atomic(path(), json.dumps(found, indent=1, sort_keys=True) + "\n")
    return path()
