"""Special functions that NumPy lacks, vectorised and in place, for CPU kernels. Floor 4."""

from __future__ import annotations

from math import erf as _scalar_erf
from math import erfc as _scalar_erfc

import numpy as np

_erf64 = np.frompyfunc(_scalar_erf, 1, 1)

_REACH = 3.92
"""erfc(3.92) < 2^-24.8: beyond it erf is 1 in float32, and the argument of tanh below is large enough by itself."""

_COEFFICIENTS = (
    0.12837917801912724, 0.10277218054462958, -0.0002067404541872828, -0.0005951380765786547, 6.916790818478804e-05,
    1.3983894136348792e-06, -1.3074528413598904e-06, 1.5875279031066953e-07, -8.654042415318306e-09, 1.8394050456950824e-10,
)
"""P of erf(x) = tanh(x + x*P(x^2)), lowest power first, from `fit_erf`; the fit's relative error is 9.7e-9 (0.16 u of float32)."""


def fit_erf(degree: int = 9, points: int = 3000, rounds: int = 300) -> tuple[float, np.ndarray]:
    """(largest relative error, coefficients) of the minimax P with erf(x) = tanh(x + x*P(x^2)) on (0, 3.92].

    The quantity to fit is R(s) = atanh(erf(x))/x at s = x^2, smooth and slowly varying because tanh carries the saturation. An absolute
    error of R moves erf by x*(1 - erf^2) times as much, so that ratio to erf is the weight. Least squares in Chebyshev polynomials of s on
    Chebyshev points of x, reweighted by the error after each round (Lawson's iteration), tends to the minimax solution.
    """
    x = np.maximum((_REACH / 2 * (1 - np.cos(np.linspace(0, np.pi, points))))[1:], 1e-3)
    y = np.array([_scalar_erf(v) for v in x])
    # atanh(y) = log((1+y)/(1-y))/2, with 1-y taken from erfc where it would cancel
    r = np.array([0.5 * np.log((1 + _scalar_erf(v)) / _scalar_erfc(v)) if v > 0.1 else np.arctanh(_scalar_erf(v)) for v in x]) / x
    basis = np.polynomial.chebyshev.chebvander(2 * x * x / _REACH**2 - 1, degree)
    impact = (1 - y * y) * x / y
    weight = np.ones_like(x)
    best, c_best = np.inf, np.zeros(degree + 1)
    for _ in range(rounds):
        w = np.sqrt(weight) * impact
        c = np.linalg.lstsq(basis * w[:, None], r * w, rcond=None)[0]
        error = np.abs((basis @ c - r) * impact)
        if error.max() < best:
            best, c_best = error.max(), c
        weight = weight * (error / error.max() + 1e-3)
        weight = weight / weight.mean()
    series = np.polynomial.Chebyshev(c_best, domain=[0, _REACH**2]).convert(kind=np.polynomial.Polynomial).coef
    return float(best), series - np.eye(1, degree + 1)[0]


def erf_into(u: np.ndarray, scratch: np.ndarray) -> None:
    """u becomes erf(u), in place. `scratch`: two rows or more, each of u's size and type.

    float32: at most 2.4 ulp of the result with a tanh of 1.4 ulp (measured at two million points), odd, NaN stays NaN. float64: the C
    library's erf through Python, for the gates only.
    """
    if u.dtype == np.float64:
        u[...] = _erf64(u)
        return
    s, p = scratch[0], scratch[1]
    np.multiply(u, u, out=s)
    np.minimum(s, _REACH * _REACH, out=s)
    np.multiply(s, _COEFFICIENTS[-1], out=p)
    for c in _COEFFICIENTS[-2:0:-1]:
        np.add(p, c, out=p)
        np.multiply(p, s, out=p)
    np.add(p, _COEFFICIENTS[0], out=p)
    np.multiply(p, u, out=p)
    np.add(u, p, out=u)
    np.tanh(u, out=u)
