"""Special functions that NumPy lacks, in float64, for oracles. Floor 1."""

from __future__ import annotations

from math import erf as _scalar_erf

import numpy as np

_erf = np.frompyfunc(_scalar_erf, 1, 1)


def erf(x: np.ndarray) -> np.ndarray:
    """Error function, elementwise, correctly rounded to within 1 ulp of float64 (the C library's erf); shape of x."""
    y = np.asarray(_erf(np.asarray(x, dtype=np.float64)), dtype=np.float64)
    return x * 0 + y if isinstance(x, np.ndarray) and type(x) is not np.ndarray else y
