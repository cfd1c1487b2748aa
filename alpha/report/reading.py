"""What one run reads: its sources, and how long its steps waited for batches. Floor 7."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from alpha.errors import CorruptError
from alpha.report.extra import pandas as pd
from alpha.report.facts import timing
from alpha.report.runs import Run
from alpha.report.series import POINTS, View, buckets, plain, view

COUNTED = ("weight", "sequences", "documents", "cut", "padding", "left_out")
"""Numbers of a source, as `sources` of run_metadata has them."""
OF_ATTENTION = ("attended", "heaviest")
"""Those that earlier releases did not tell: None there."""


def sources(run: Run) -> View:
    """`sources`: [{source, share, *COUNTED, *OF_ATTENTION, bits_per_byte}], share: of the samples; bits_per_byte: the latest, None where
    the run validates on all sources as one. `runs`: [{label, x, bits_per_byte}], one a source validated on by itself, over steps."""
    try:
        stated = json.loads(run.metadata.get("sources", "[]"))
        rows: list[View] = [{"source": str(s["source"]), **{k: float(s[k]) for k in COUNTED},
                             **{k: float(s[k]) if k in s else None for k in OF_ATTENTION}} for s in stated]  # fmt: skip
        whole = sum(r["weight"] for r in rows)
        shares = [r["weight"] / whole for r in rows]
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise CorruptError("the sources of a run are not as a run writes them", came=f"{run.path}: {error!r}",
                           expected=f"a list of objects with source, {', '.join(COUNTED)}", do="restore metrics.sqlite") from error
    found, lines = run.tables["source_evaluations"], []
    for row, share in zip(rows, shares):
        own = found[found.source == row["source"]] if len(found) else found
        row |= {"share": share, "bits_per_byte": float(own.bits_per_byte.iloc[-1]) if len(own) else None}
        if len(own):
            lines.append({"label": row["source"], "x": own.step.tolist(), "bits_per_byte": plain(own.bits_per_byte.to_numpy())})
    return view([run], None if rows else "the run does not say what it reads", sources=rows, runs=lines)


def waits(run: Run, points: int = POINTS) -> View:
    """`ranks`: [{rank, steps, batches, ready, waited, wait_ns, longest_ns, longest_step, made_ns, share}]: of `batches` microbatches
    `ready` were there when they were asked for; `waited` steps waited; wait_ns, made_ns: mean of a step; share: of the time of those
    steps. `wait`, `made`: bucketed ns of rank 0 over steps."""
    rows = run.tables["data_waits"]
    if not len(rows):
        return view([run], run.why_untimed or "no thread made batches ahead (data.prefetch = 0), or the release had no such table",
                    ranks=[], wait={}, made={})
    made, steps = [], timing(run)
    for rank, own in rows.groupby("rank", sort=True):
        beside = own.merge(steps[steps["rank"] == rank], on="step")
        lasted, worst = int(beside.wall_ns.sum()), own.loc[own.wait_ns.idxmax()]
        made.append({"rank": int(rank), "steps": len(own), "batches": int(own.batches.sum()), "ready": int(own.ready.sum()),
                     "waited": int((own.ready < own.batches).sum()), "wait_ns": float(own.wait_ns.mean()),
                     "longest_ns": int(worst.wait_ns), "longest_step": int(worst.step), "made_ns": float(own.made_ns.mean()),
                     "share": int(beside.wait_ns.sum()) / lasted if lasted else None})  # fmt: skip
    zero = rows[rows["rank"] == made[0]["rank"]]
    series = {k: buckets(zero.step.to_numpy(), zero[f"{k}_ns"].to_numpy(np.float64), points) for k in ("wait", "made")}
    return view([run], None, ranks=made, **series)


def waits_data(made: View) -> pd.DataFrame:
    """The bucketed series, for the CSV beside the plot."""
    parts: list[Any] = [pd.DataFrame({"series": k, "step": made[k]["x"], **{f"{m}_ns": made[k][m] for m in ("mean", "min", "max")}})
                        for k in ("wait", "made")]
    return pd.concat(parts, ignore_index=True)


def sources_data(made: View) -> pd.DataFrame:
    """A row a source and validation."""
    rows = [(r["label"], x, b) for r in made["runs"] for x, b in zip(r["x"], r["bits_per_byte"])]
    return pd.DataFrame(rows, columns=["source", "step", "bits_per_byte"])
