"""What all views share: their frame, series cut to what a plot can show, floats that JSON can hold. Floor 7."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from alpha.report.runs import Run

View = dict[str, Any]

POINTS = 250
"""Buckets of a series, unless a caller says another number."""


def view(of: Sequence[Run], why: str | None, **data: Any) -> View:
    """A view of these runs: their provenance, their notes, why there is nothing to show, and the data."""
    return {"provenance": [r.provenance() for r in of], "why": why, "notes": [f"{r.shown}: {n}" for r in of for n in r.notes], **data}


def all_why(made: Sequence[Mapping[str, Any]]) -> str | None:
    """A reason for the whole view when no run has anything to show."""
    whys = [m["why"] for m in made]
    return "; ".join(dict.fromkeys(whys)) if whys and all(whys) else None


def buckets(x: np.ndarray, values: np.ndarray, points: int = POINTS) -> dict[str, list[float | None]]:
    """A series in at most `points` buckets: x (first of each), mean, min, max. NaN entries are left out; an empty bucket is None."""
    if not len(x):
        return {"x": [], "mean": [], "min": [], "max": []}
    edges = np.unique(np.linspace(0, len(x), min(points, len(x)) + 1).astype(np.int64))[:-1]
    real = np.asarray(values, np.float64)
    known = ~np.isnan(real)
    count = np.add.reduceat(known, edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, real, 0.0), edges) / count
    low = np.minimum.reduceat(np.where(known, real, np.inf), edges)
    high = np.maximum.reduceat(np.where(known, real, -np.inf), edges)
    return {"x": np.asarray(x)[edges].tolist(), "mean": plain(mean), "min": plain(low), "max": plain(high)}


def plain(values: np.ndarray) -> list[float | None]:
    """Floats as JSON holds them: None where not finite."""
    return [v if math.isfinite(v) else None for v in np.asarray(values, np.float64).tolist()]
