"""The ranks of one run beside each other: what each spent computing and in collectives, and which one holds up the others. Floor 7."""

from __future__ import annotations

import math

import numpy as np

from alpha.profile import noise
from alpha.profile.slow_rank import FASTER, OWN, SLOWER, Standing, standings
from alpha.report.facts import timing
from alpha.report.runs import Run
from alpha.report.series import View, view


def ranks(run: Run) -> View:
    """`rows`, one a rank, over steady steps that all ranks have: {rank, step_ns, own_ns, apart, low, high, verdict, reason, exposed_ns,
    overlapped_ns}. own_ns: typical time of a step without waiting for others; apart, low, high: by what share that is longer than the
    others', with its interval; exposed and overlapped: mean communication a step. `sentence`: who is slow, in words."""
    if run.why_untimed:
        return view([run], run.why_untimed, rows=[], sentence="")
    rows = timing(run)
    numbers = sorted(int(r) for r in rows["rank"].unique())
    steady = rows[rows.steady]
    steady = steady[steady.groupby("step")["rank"].transform("nunique") == len(numbers)].sort_values(["rank", "step"])
    why = "one rank has nobody beside it" if len(numbers) < 2 else None if len(steady) else "no steady step yet"
    if why:
        return view([run], why, rows=[], sentence="")
    own = np.sum([steady[f"{p}_ns"].to_numpy(np.float64) for p in OWN], axis=0).reshape(len(numbers), -1)
    mean = steady.groupby("rank")[["step_ns", "comm_ns", "comm_overlapped_ns"]].mean()
    found = standings(numbers, own)
    made = [{"rank": s.rank, "step_ns": float(mean.step_ns[s.rank]), "own_ns": s.own_ns, **_apart(s), "verdict": s.verdict,
             "reason": s.reason, "exposed_ns": float(mean.comm_ns[s.rank]),
             "overlapped_ns": float(mean.comm_overlapped_ns[s.rank])} for s in found]  # fmt: skip
    return view([run], None if made else "the own time of a rank is not positive", rows=made, steps=own.shape[1], sentence=_sentence(found))


def _apart(s: Standing) -> dict[str, float | None]:
    named = {"apart": s.apart.estimate, "low": s.apart.low, "high": s.apart.high}
    return {k: v if math.isfinite(v) else None for k, v in named.items()}


def _sentence(found: list[Standing]) -> str:
    named = [s for s in found if s.verdict == SLOWER]
    if named:
        return " ".join(f"rank {s.rank} is slower than the others by {s.apart.estimate:+.1%} ({s.apart.low:+.1%} to {s.apart.high:+.1%}); "
                        "they wait for it." for s in named)
    fast = [s for s in found if s.verdict == FASTER]
    told = "No rank is slower than the others" if not any(s.reason for s in found) else f"No rank is judged: {found[0].reason}"
    rest = f"; rank {', '.join(str(s.rank) for s in fast)} is faster" if fast else ""
    return f"{told}{rest}. A rank that is like the others is called slow in at most {noise.ALPHA:.0%} of all runs."
