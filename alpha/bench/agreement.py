"""Whether two computations of one call agree, before either is timed. Floor 8.

Compared is the relative difference in the Euclidean norm, output by output. Each side rounds at most ROUNDINGS values that follow from one
another between an operand and a result (unit roundoff u of the narrowest float type of the call) and adds up to n float32 products in an
order of its own, whose errors grow like sqrt(n) (Higham and Mary 2019, SIAM J. Sci. Comput. 41). Both sides err, so the bound is
2 ROUNDINGS (u + sqrt(n) u32). A wrong mask, scale, axis or statistic is off by orders of magnitude more. Integers must be equal.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

ROUNDINGS = 4
"""Attention backward has most: the scores' probabilities, dS, an output of the forward pass, the result."""

UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "bf16": 2.0**-8}

SAMPLE = 1 << 20
"""Elements of an output that are compared, at random places; all of a smaller one."""


def bound(dtypes: set[str], terms: float) -> float:
    """The largest relative difference of two right computations with these float types, summing at most `terms` terms."""
    u = max((UNIT[d] for d in dtypes if d in UNIT), default=0.0)
    return 2 * ROUNDINGS * (u + sqrt(max(1.0, terms)) * UNIT["f32"]) if u else 0.0


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """||ours - theirs|| / ||theirs|| over the finite elements; infinity where shapes, NaNs or infinities differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    if ours.dtype.kind != "f" or theirs.dtype.kind != "f":
        return 0.0 if np.array_equal(ours, theirs) else float("inf")
    finite = np.isfinite(ours)
    if not np.array_equal(np.where(finite, 0.0, ours), np.where(np.isfinite(theirs), 0.0, theirs), equal_nan=True):
        return float("inf")
    a, b = ours[finite].astype(np.float64), theirs[finite].astype(np.float64)
    distance, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    if size == 0:
        return 0.0 if distance == 0 else float("inf")
    return distance / size if np.isfinite(distance / size) else float("inf")
