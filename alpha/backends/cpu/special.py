"""Special functions that NumPy lacks, vectorised, for CPU kernels. Floor 4."""

from __future__ import annotations

from math import erf as _scalar_erf

import numpy as np

_P = 0.3275911
_A = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
