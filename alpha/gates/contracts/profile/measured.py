"""Made-up runs for comparisons, as rows: what steps took, ops of profiled ones, readings of the machine's clock. Floor 7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alpha.profile.compare import Measured as Left
from alpha.profile.phases import PHASES

USUAL = {"forward": 300_000, "backward": 600_000, "grad_norm": 40_000, "grad_clip": 9_000, "optimizer": 90_000, "data_load": 30_000,
         "comm": 60_000, "idle": 5_000}
"""Usual ns of a phase in a step."""

OPS = {("matmul", "f32[8,8]", "forward"): 200_000, ("matmul", "f32[8,8]", "backward"): 400_000, ("adamw", "f32[64]", "optimizer"): 90_000,
       ("gelu", "f32[8]", "forward"): 3_000}
MACHINE = {"program": "p1", "flops_version": "1", "machine": "m1", "hardware": "h", "status": "GATED"}

Row = dict[str, Any]


@dataclass
class Made:
    """A run. `timing`, `ops`, `peaks`: its rows, in any order."""

    name: str
    metadata: dict[str, str]
    timing: list[Row]
    ops: list[Row]
    peaks: list[Row] = field(default_factory=list)

    def left(self) -> Left:
        """What a comparison is given."""
        return Left(self.name, self.metadata, *({k: np.array([r[k] for r in rows]) for k in rows[0]} if rows else {}
                                                for rows in (self.timing, self.ops, self.peaks)))


def made(rng: np.random.Generator, name: str, *, ranks: int = 2, steps: int = 90, spread: float = 0.002, machine: float = 1.0,
         slow: Mapping[str, float] | None = None, few: Mapping[str, int] | None = None, profiled: int = 9, peaks: int = 0,
         clock: float = 1.0, rough: float = 0.002, without: tuple[str, ...] = ()) -> Made:
    """`machine`: everything takes so many times as long; `slow`: a phase, 'rank 1' or an op does. `few`: a phase that occurs in so many
    steps, and what it takes then. `profiled`: every so many-th step is. `peaks`: readings of a clock that is `clock` times as fast, each
    off by `rough`. `without`: phases that take no time, and ops that are not there."""
    slow, few = slow or {}, few or {}
    cut = int(rng.integers(steps // 3, steps // 2 + 1))  # the second session begins there
    timing, ops = list[Row](), list[Row]()
    wobble = np.exp(spread * rng.standard_normal(steps).cumsum() / 4)
    for step in range(steps):
        for rank in range(ranks):
            is_profiled = int(step % profiled == profiled - 1)
            row: Row = {"step": step, "rank": rank, "session": int(step >= cut), "profiled": is_profiled}
            by = machine * wobble[step] * (1.3 if is_profiled else 1.0)
            for phase in PHASES:
                usual = 0 if phase in without else USUAL.get(phase, 0)
                own = by * slow.get(phase, 1.0) * (slow.get(f"rank {rank}", 1.0) if phase != "comm" else 1.0)
                row[f"{phase}_ns"] = int(usual * own * np.exp(spread * rng.standard_normal()))
            for phase, times in few.items():
                hit = step % (steps // times) == 1
                row[f"{phase}_ns"] = int(70_000 * by * slow.get(phase, 1.0) * np.exp(spread * rng.standard_normal())) if hit else 0
            row["unexplained_ns"] = int(rng.integers(1, 4_000))
            row["step_ns"] = sum(row[f"{p}_ns"] for p in PHASES if p not in ("checkpoint", "eval")) + row["unexplained_ns"]
            timing.append(row)
            if is_profiled:
                ops += [{"step": step, "rank": rank, "plan": f"plan{i % 2}", "launch": 7 * i + j, "op": op, "shape": shape, "phase": phase,
                         "device_ns": int(ns / 2 * by * slow.get(op, 1.0) * np.exp(spread * rng.standard_normal()))}
                        for i, ((op, shape, phase), ns) in enumerate(OPS.items()) for j in range(2) if op not in without]
    rates = [{"flops": float(1e12 * clock * np.exp(rough * rng.standard_normal())),
              "bandwidth": float(1e11 * clock * np.exp(rough * rng.standard_normal()))} for _ in range(peaks)]
    for rows in (timing, ops):
        rng.shuffle(rows)  # type: ignore[arg-type]
    return Made(name, {**MACHINE, "name": name}, timing, ops, rates)
