"""Series cut to what a plot can show, and floats that JSON can hold. Floor 7."""

from __future__ import annotations

import math

import numpy as np

POINTS = 500
"""Buckets of a series, unless a caller says another number."""


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
