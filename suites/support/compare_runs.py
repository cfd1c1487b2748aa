"""Made-up runs for the comparison: series with the noise that machines show, and the operating characteristic measured on them.

Every time is base x exp(machine + own) + spikes. machine, common to all rows of a run: an AR(1) process, a slow random walk and an offset
of the run. own, of each row: another AR(1), its own walk, and Student's t with 3 degrees of freedom. Spikes: now and then everything, or
one row, takes up to several times as long. Run as a program it writes baselines/perf/compare.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from alpha.profile import compare, noise
from alpha.profile.phases import PHASES

PUBLISHED = Path(__file__).parents[2] / "baselines" / "perf" / "compare.json"

NS = {"forward": 30e6, "backward": 58e6, "grad_norm": 1.2e6, "grad_clip": 20e3, "optimizer": 6e6, "data_load": 0.6e6,
      "host_to_device": 0.2e6, "device_to_host": 40e3, "comm": 2e6, "idle": 1.5e6, "unexplained": 0.2e6}
OPS = {f"op{i}": 60e6 / 2**i for i in range(6)} | {f"small{i}": 0.5e6 for i in range(8)}

NOISE = {"machine_ar": 0.010, "machine_rho": 0.9, "machine_walk": 0.010, "machine_offset": 0.010, "own_ar": 0.012, "own_rho": 0.8,
         "own_walk": 0.003, "own_t3": 0.015, "small_t3": 0.10, "spikes": 0.01, "spike_size": 1.0}
"""Standard deviations as fractions: walks over a whole run, small_t3 for rows under 2 % of the step; spikes: part of the steps."""


def ar(n: int, rho: float, sd: float, rng: np.random.Generator) -> np.ndarray:
    """AR(1) with the given stationary spread; rho per step."""
    e = rng.standard_normal(n) * sd * np.sqrt(1 - rho**2)
    x, last = np.empty(n), float(rng.standard_normal() * sd)
    for at in range(0, n, 500):  # x_t = rho^t (x_0 + sum of e_s / rho^s), in pieces that do not overflow
        part = e[at : at + 500]
        powers = rho ** np.arange(1, len(part) + 1)
        x[at : at + 500] = powers * (last + np.cumsum(part / powers))
        last = float(x[min(at + 500, n) - 1])
    return x


def walk(n: int, sd: float, rng: np.random.Generator) -> np.ndarray:
    """A random walk that has moved by `sd` after n steps."""
    return np.cumsum(rng.standard_normal(n)) * sd / np.sqrt(n)


def spikes(n: int, rng: np.random.Generator, part: float, size: float) -> np.ndarray:
    """Logarithm of a factor that is 1 on most steps."""
    return np.log1p((rng.random(n) < part) * rng.exponential(size, n))


def made(seed: int | np.random.Generator, *, steps: int = 500, ranks: int = 1, slow: Mapping[str, float] | None = None,
         every: float = 1.0, machine: Sequence[float] | None = None, peaks: int = 0, level: float = 1.0,
         meta: Mapping[str, str] | None = None) -> compare.Measured:
    """A run. slow: factor by phase, by op, or by 'rank 1' (its computing phases); every: factor on all times; peaks: readings of
    the machine's speed, which follow `every` as far as `machine` = (flops, bandwidth) factors say; level: scale of all noise."""
    rng = seed if isinstance(seed, np.random.Generator) else np.random.default_rng(seed)
    slow = slow or {}
    q = {k: v if k.endswith(("rho", "spikes", "size")) else v * level for k, v in NOISE.items()}
    common = ar(steps, q["machine_rho"], q["machine_ar"], rng) + walk(steps, q["machine_walk"], rng)
    common += q["machine_offset"] * rng.standard_normal()
    profiled = np.zeros(steps, np.int64)
    profiled[noise.WARM_UP + np.linspace(0, steps - noise.WARM_UP - 1, min(20, steps - noise.WARM_UP)).astype(int)] = 1
    total = sum(NS.values())

    def row(base: float) -> np.ndarray:
        own = ar(steps, q["own_rho"], q["own_ar"], rng) + walk(steps, q["own_walk"], rng)
        own += spikes(steps, rng, q["spikes"] / 2, q["spike_size"])
        own += rng.standard_t(3, steps) / np.sqrt(3) * (q["own_t3"] if base >= 0.02 * total else q["small_t3"])
        return np.minimum(base * every * np.exp(common + together + own), 1e15)  # Student's t has no bound, integers have one

    columns: dict[str, list[np.ndarray]] = {}
    for r in range(ranks):
        together = spikes(steps, rng, q["spikes"], q["spike_size"])
        sums = np.zeros(steps, np.int64)
        for p in (*PHASES, "unexplained"):
            x = np.zeros(steps)
            if p in NS and (p != "comm" or ranks > 1):
                x = row(NS[p]) * slow.get(p, 1.0) * (slow.get(f"rank {r}", 1.0) if p in compare.COMPUTING else 1.0)
            x[: noise.WARM_UP] *= 3
            whole = np.where(profiled == 1, x * 1.4, x).astype(np.int64)
            columns.setdefault(f"{p}_ns", []).append(whole)
            sums = sums + whole
        columns.setdefault("step_ns", []).append(sums)
        declared = {"step": np.arange(steps), "rank": np.full(steps, r), "session": np.zeros(steps, np.int64), "profiled": profiled}
        for name, value in declared.items():
            columns.setdefault(name, []).append(value)
    ops: dict[str, list[object]] = {k: [] for k in ("step", "rank", "plan", "launch", "op", "shape", "phase", "device_ns")}
    at = np.flatnonzero(profiled)
    for r in range(ranks):
        together = spikes(steps, rng, q["spikes"], q["spike_size"])
        for i, (name, base) in enumerate(OPS.items()):
            for step, ns in zip(at.tolist(), (row(base)[at] * slow.get(name, 1.0) * slow.get(f"rank {r}", 1.0)).astype(np.int64).tolist()):
                for key, value in zip(ops, (step, r, "micro", i, name, "f32[8]", "forward", ns)):
                    ops[key].append(value)
    f, w = machine or (every, every)
    jitter = np.exp(0.01 * rng.standard_normal((2, peaks)))
    found = {"flops": 1e11 / f * jitter[0], "bandwidth": 1e10 / w * jitter[1]}
    metadata = {"program": "p", "flops_version": "flops/v1", "machine": "m", "status": "GATED", **(meta or {})}
    return compare.Measured(f"run{rng.integers(1000)}", metadata, {k: np.concatenate(v) for k, v in columns.items()},
                            {k: np.array(v) for k, v in ops.items()}, found)


def tally(trials: int, seed: int, *, slow: Mapping[str, float] | None = None, kind: str = "phase", target: str = "",
          shared: float = 1.0, **how: object) -> dict[str, float]:
    """Of `trials` comparisons of fresh runs, how many: name a row of `kind` other than the target, SLOWER or FASTER (alarms) or FASTER only
    (opposite); call the target SLOWER (named); call every row SAME (all_same). undecided: rows, of `rows` in all; half_width: median of the
    intervals of rows that are not small."""
    rng = np.random.default_rng(seed)
    counts: dict[str, float] = dict.fromkeys(("trials", "alarms", "opposite", "named", "all_same", "undecided", "rows"), 0)
    halves: list[float] = []
    for _ in range(trials):
        c = compare.compare(made(rng, **how), made(rng, slow=slow, every=shared, **how))  # type: ignore[arg-type]
        rows = [r for r in c.rows if r.kind == kind or (kind == "phase" and r.kind == "step" and not slow and shared == 1)]
        others = [r.verdict for r in rows if r.name != target]
        counts["trials"] += 1
        counts["alarms"] += compare.SLOWER in others or compare.FASTER in others
        counts["opposite"] += compare.FASTER in others and compare.SLOWER not in others
        counts["named"] += any(r.verdict == compare.SLOWER for r in rows if r.name == target)
        counts["all_same"] += all(r.verdict == compare.SAME for r in rows)
        counts["undecided"] += sum(r.verdict == compare.UNDECIDED for r in rows)
        counts["rows"] += len(rows)
        halves += [(r.own.high - r.own.low) / 2 for r in rows if r.share >= compare.LEAST_SHARE and np.isfinite(r.own.high)]
    counts["half_width"] = float(np.median(halves))
    return counts


def _op(name: str) -> str:
    return f"{name} f32[8] forward"


NULL: dict[str, dict[str, object]] = {
    "phases": {"kind": "phase"},
    "phases, half the noise": {"kind": "phase", "level": 0.5},
    "phases, twice the noise": {"kind": "phase", "level": 2.0},
    "phases, 5,000 steps": {"kind": "phase", "steps": 5000},
    "phases, 100 steps": {"kind": "phase", "steps": 100},
    "phases, the machine 10 % slower": {"kind": "phase", "shared": 1.10},
    "phases, the machine 10 % slower, its clock read": {"kind": "phase", "shared": 1.10, "peaks": 8},
    "ops": {"kind": "op"},
    "step": {"kind": "step"},
    "ranks, 2": {"kind": "rank", "ranks": 2},
    "ranks, 4": {"kind": "rank", "ranks": 4},
}
"""Nothing stands out: every SLOWER and FASTER is a false alarm."""

SLOWED: dict[str, dict[str, object]] = {
    "forward 5 %": {"kind": "phase", "target": "forward", "slow": {"forward": 1.05}},
    "backward 5 %": {"kind": "phase", "target": "backward", "slow": {"backward": 1.05}},
    "optimizer 5 %": {"kind": "phase", "target": "optimizer", "slow": {"optimizer": 1.05}},
    "forward 2 %": {"kind": "phase", "target": "forward", "slow": {"forward": 1.02}},
    "forward 5 %, twice the noise": {"kind": "phase", "target": "forward", "slow": {"forward": 1.05}, "level": 2.0},
    "forward 2 %, twice the noise": {"kind": "phase", "target": "forward", "slow": {"forward": 1.02}, "level": 2.0},
    "forward 2 %, 5,000 steps": {"kind": "phase", "target": "forward", "slow": {"forward": 1.02}, "steps": 5000},
    "step 2 %": {"kind": "step", "target": "step", "shared": 1.02, "machine": (1.0, 1.0), "peaks": 8},
    "step 5 %": {"kind": "step", "target": "step", "shared": 1.05, "machine": (1.0, 1.0), "peaks": 8},
    "op of half the time 2 %": {"kind": "op", "target": _op("op0"), "slow": {"op0": 1.02}},
    "rank 1 of 2 2 %": {"kind": "rank", "target": "rank 1", "slow": {"rank 1": 1.02}, "ranks": 2},
    "rank 3 of 4 2 %": {"kind": "rank", "target": "rank 3", "slow": {"rank 3": 1.02}, "ranks": 4},
    "op of half the time 5 %": {"kind": "op", "target": _op("op0"), "slow": {"op0": 1.05}},
    "op of 3 % of the time 5 %": {"kind": "op", "target": _op("op4"), "slow": {"op4": 1.05}},
    "op of 3 % of the time 10 %": {"kind": "op", "target": _op("op4"), "slow": {"op4": 1.10}},
    "rank 1 of 2 5 %": {"kind": "rank", "target": "rank 1", "slow": {"rank 1": 1.05}, "ranks": 2},
    "rank 3 of 4 5 %": {"kind": "rank", "target": "rank 3", "slow": {"rank 3": 1.05}, "ranks": 4},
}
"""One row is slower by what the name says; 500 steps, 20 of them profiled, unless it says otherwise."""


def procedure() -> dict[str, object]:
    """What the published table holds for: it is stale when one of these changes."""
    return {**compare.procedure(), "noise": NOISE}


def _rates(name: str, trials: int, n: dict[str, float]) -> dict[str, object]:
    row: dict[str, object] = {**n, "half_width": round(n["half_width"], 5), "alarm_rate": round(n["alarms"] / trials, 4),
                              "alarm_interval": [round(x, 4) for x in noise.wilson(int(n["alarms"]), trials)]}  # fmt: skip
    if name in SLOWED:
        row |= {"power": round(n["named"] / trials, 4), "power_interval": [round(x, 4) for x in noise.wilson(int(n["named"]), trials)]}
    else:
        del row["named"]
    return row


def characteristic(trials: int, seed: int) -> dict[str, object]:
    """The table: rates with Wilson intervals."""
    table: dict[str, object] = {}
    with ProcessPoolExecutor() as pool:
        asked = {name: pool.submit(tally, trials, seed + i, **how)  # type: ignore[arg-type]
                 for i, (name, how) in enumerate({**NULL, **SLOWED}.items())}  # fmt: skip
        for name, job in asked.items():
            table[name] = _rates(name, trials, job.result())
            print(name, table[name], flush=True)
    return {"procedure": procedure(), "seed": seed, "source": "simulated", "null": {k: table[k] for k in NULL},
            "slowed": {k: table[k] for k in SLOWED}}


if __name__ == "__main__":
    result = characteristic(int(sys.argv[1]) if len(sys.argv) > 1 else 400, int.from_bytes(os.urandom(4), "big"))
    Path(sys.argv[2] if len(sys.argv) > 2 else PUBLISHED).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
