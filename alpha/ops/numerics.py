"""Rounding, ulps and the sequential walk from which every row's `naive` is derived. Floor 1.

`walk(oracle, dtype, inputs, attrs)` runs an oracle's own text on arrays that round to `dtype` after every operation and add one term
at a time. So the error of the plainest possible implementation in that precision is measured, not guessed, and the parity tolerance
(2 x that error) needs no hand-set constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from alpha.errors import InputError

UNIT_ROUNDOFF = {"f64": 2.0**-53, "f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
"""u: half the distance from 1 to the next number; IEEE 754, and bf16 with 8 significand bits."""

LOWER = {"f64": "f32", "f32": "bf16", "bf16": "e4m3"}
"""One precision lower: what the parity gate's floor must reject."""

ACCUMULATE = {"f64": "f64", "f32": "f32", "bf16": "f32"}
"""The type in which sums run, and in which row statistics (mean, rstd, lse, loss) are kept."""

_MACHINE = {"f64": np.float64, "f32": np.float32}
"""The machine's own types among them."""

BLOCK = 1 << 20
"""Elements of which a product's walk makes terms at once."""

_SIGNIFICAND = {"f64": 53, "f32": 24, "bf16": 8, "f16": 11, "e4m3": 4}
_MIN_EXPONENT = {"f64": -1022, "f32": -126, "bf16": -126, "f16": -14, "e4m3": -6}


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """float64 array rounded to nearest even in `dtype`, returned as float64; overflow becomes infinity (e4m3: saturates at 448).

    bf16 by way of f32, in which kernels hold what they round.
    """
    x = np.asarray(x, dtype=np.float64)
    if dtype == "f64":
        return x
    if dtype == "f32":
        with np.errstate(over="ignore"):
            return x.astype(np.float32).astype(np.float64)
    if dtype == "bf16":
        with np.errstate(over="ignore", invalid="ignore"):
            bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
            rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        return np.where(np.isfinite(x), rounded, x).astype(np.float64)
    if dtype in _SIGNIFICAND:
        step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, _MIN_EXPONENT[dtype]) - (_SIGNIFICAND[dtype] - 1))
        y = np.rint(x / step) * step
        return np.minimum(np.maximum(y, -448.0), 448.0) if dtype == "e4m3" else y
    raise InputError("unknown dtype to round to", came=dtype, expected=", ".join(_SIGNIFICAND))


def growth(n: int) -> float:
    """Factor c in |error of a sum of n terms| <= c*u*sum|terms|, whatever the order of the additions.

    n - 1 always holds; 6*sqrt(n) holds except with probability about 2*exp(-18) per sum when rounding errors are independent (Higham and
    Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4 with lambda = 6).
    """
    return float(min(max(n - 1, 0), 6 * n**0.5))


def depth(n: int) -> int:
    """Factor c in |error of a sum of n terms| <= c*u*sum|terms| to first order when they are added in a balanced tree: each term passes
    through ceil(log2 n) additions (Higham, The accuracy of floating point summation, SIAM J. Sci. Comput. 14(4), 1993, section 3).

    Tighter than `growth`, for rows whose long sums must still tell one precision from the next: a kernel that adds in another order
    is held to the sequential walk's error instead.
    """
    return max(0, n - 1).bit_length()


def ulp(x: np.ndarray, dtype: str) -> np.ndarray:
    """Distance between neighbours of `dtype` at |x| (float64 array)."""
    magnitude = np.where(np.isfinite(x), np.abs(np.asarray(x, dtype=np.float64)), 0.0)
    exponent = np.maximum(np.frexp(np.where(magnitude == 0, np.exp2(_MIN_EXPONENT[dtype]), magnitude))[1] - 1, _MIN_EXPONENT[dtype])
    return np.exp2(exponent - (_SIGNIFICAND[dtype] - 1.0))


class Walked(np.ndarray):
    """float64 storage whose every ufunc rounds to `dtype`, and whose sums and products add one term at a time in index order."""

    dtype_name: str = "f32"
    sum_name: str = "f32"
    kept_name: str = "f32"

    def __array_finalize__(self, other: object) -> None:
        self.dtype_name = getattr(other, "dtype_name", "f32")
        self.sum_name = getattr(other, "sum_name", self.dtype_name)
        self.kept_name = getattr(other, "kept_name", self.dtype_name)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        like = next(x for x in (*inputs, *(out or ())) if isinstance(x, Walked))
        total = like.sum_name
        plain = [np.asarray(x) if isinstance(x, Walked) else x for x in inputs]
        if method == "at":  # np.add.at: already one term at a time, but must round after each
            target, where = plain[0], plain[1]
            for flat, position in enumerate(np.asarray(where).ravel()):
                values = np.asarray(plain[2]).reshape(np.asarray(where).size, -1)[flat].reshape(target.shape[1:])
                target[position] = round_to(ufunc(target[position], values), total)
            return None
        if ufunc is np.matmul and method == "__call__":
            result = _matmul_walk(plain[0], plain[1], total)
        elif method == "reduce" and ufunc is np.add:
            result = _sum_walk(plain[0], total, kwargs.get("axis", 0), kwargs.get("keepdims", False))
        else:
            result = getattr(ufunc, method)(*plain, **kwargs)
        result = _wrap(result, like)
        if out is not None:
            np.asarray(out[0])[...] = np.asarray(result)
            return out[0]
        return result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = super().__array_function__(func, types, args, kwargs)
        if isinstance(result, (tuple, list)):
            return result
        moved = func in _MOVES and self.sum_name != self.dtype_name  # a statistic in a wider type keeps its value
        return _like(result, self) if moved and np.asarray(result).dtype.kind == "f" else _wrap(result, self)


_MOVES = (np.where, np.take, np.concatenate, np.transpose, np.reshape)


def _wrap(x: Any, like: Walked) -> Any:
    if isinstance(x, tuple):
        return tuple(_wrap(y, like) for y in x)
    x = np.asarray(x)
    if x.dtype.kind != "f":
        return x
    return _like(round_to(x, like.dtype_name), like)


def _like(x: Any, like: Walked) -> Walked:
    y: Walked = np.asarray(x, dtype=np.float64).view(Walked)
    y.__array_finalize__(like)
    return y


_kept: ContextVar[str] = ContextVar("kept", default="f64")


@contextmanager
def keeping(dtype: str) -> Iterator[None]:
    """Within it, what an oracle on plain arrays has `stored` is rounded to `dtype`: each row exactly, but for what no implementation can
    hold in more."""
    before = _kept.set(dtype)
    try:
        yield
    finally:
        _kept.reset(before)


def stored(x: np.ndarray) -> np.ndarray:
    """An intermediate that every implementation keeps in memory in the compute type. In an oracle: x itself, unless `keeping` says a type;
    in a walk: rounded to the compute type, also where the walk itself runs in a wider type."""
    return _like(round_to(np.asarray(x), x.kept_name), x) if isinstance(x, Walked) else round_to(x, _kept.get())


def _sum_walk(x: np.ndarray, name: str, axis: Any, keepdims: bool) -> np.ndarray:
    if x.dtype.kind != "f":
        return np.add.reduce(x, axis=axis, keepdims=keepdims)
    axes = tuple(range(x.ndim)) if axis is None else tuple(a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,)))
    kept = [n for i, n in enumerate(x.shape) if i not in axes]
    total = np.zeros(kept)
    if _long(x.size // max(1, total.size), total, name):
        total = _added(total, np.moveaxis(x, axes, range(-len(axes), 0)).reshape([*kept, -1]), name)
    else:
        for term in np.moveaxis(x, axes, range(len(axes))).reshape([-1, *kept]):
            total = round_to(total + term, name)
    return total.reshape([1 if i in axes else n for i, n in enumerate(x.shape)]) if keepdims else total


def _matmul_walk(a: np.ndarray, b: np.ndarray, name: str) -> np.ndarray:
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
    if not _long(a.shape[-1], total, name):
        for k in range(a.shape[-1]):
            total = round_to(total + round_to(a[..., :, k, None] * b[..., None, k, :], name), name)
        return total
    left, right = a[..., :, None, :], np.swapaxes(b, -1, -2)[..., None, :, :]  # [..., M, 1, K], [..., 1, N, K]
    step = BLOCK // total.size + 1
    for k in range(0, a.shape[-1], step):
        total = _added(total, left[..., k : k + step] * right[..., k : k + step], name)
    return total


def _long(terms: int, total: np.ndarray, name: str) -> bool:
    """Whether it takes fewer steps to let the machine add the terms of each sum than to add each term to all sums."""
    return name in _MACHINE and terms > total.size


def _added(total: np.ndarray, terms: np.ndarray, name: str) -> np.ndarray:
    """`total` plus the terms along their last axis, one after the other: each term and each sum rounded to `name` by the machine.

    Of two f32, the sum in f64 rounded to f32 is the machine's sum in f32: 53 > 2 * 24 + 1 (Figueroa, When is double rounding innocuous?,
    SIGNUM Newsletter 30(3), 1995).
    """
    own = np.concatenate([total[..., None], terms], axis=-1).astype(_MACHINE[name])
    return np.add.accumulate(own, axis=-1)[..., -1].astype(np.float64)


def walk(oracle: Callable[..., tuple[np.ndarray, ...]], dtype: str, inputs: tuple[np.ndarray, ...], attrs: Any, *,
         mixed: str = "") -> tuple[np.ndarray, ...]:
    """The oracle's text in precision `dtype`: inputs and every intermediate rounded, sums sequential. Returns float64 arrays.

    `mixed`: a compute type; the walk is then as a kernel of that type is built. Operands keep the values they have (some are in a wider
    type), the running sums of products and reductions are kept in ACCUMULATE[dtype] and each finished sum is rounded to `dtype` again;
    what is `stored` is rounded to the compute type.
    """
    like = np.zeros(()).view(Walked)
    like.dtype_name, like.sum_name, like.kept_name = dtype, ACCUMULATE[dtype] if mixed else dtype, mixed or dtype

    def start(x: np.ndarray) -> Any:
        return _like(x, like) if mixed else _wrap(np.asarray(x, dtype=np.float64), like)

    walked = tuple(start(x) if np.asarray(x).dtype.kind == "f" else x for x in inputs)
    with np.errstate(all="ignore"):
        return tuple(np.asarray(y) for y in oracle(*walked, **attrs))
