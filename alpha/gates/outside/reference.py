"""A plain reference function as a row of the op table: tolerance, exact samples and gradient derived from its text. Floor 7.

The function takes float64 arrays (integer operands as they are) and returns an array or a tuple of them. It is written as an oracle is
(ops/spec.py): with ufuncs, matmul, sum, max, mean, indexing and reshapes, so that its text can be walked in a lower precision.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alpha.errors import InputError
from alpha.gates.outside.signature import Signature
from alpha.ops.numerics import ACCUMULATE, LOWER, UNIT_ROUNDOFF, Walked, round_to, ulp, walk
from alpha.ops.spec import Arrays, Sample
from alpha.registry.judge import RATIO
from alpha.types import Attrs

LIBRARY = frozenset({np.exp, np.exp2, np.expm1, np.log, np.log2, np.log10, np.log1p, np.sin, np.cos, np.tan, np.arcsin, np.arccos,
                     np.arctan, np.arctan2, np.sinh, np.cosh, np.tanh, np.power, np.float_power, np.cbrt, np.hypot})
"""Functions that a library of mathematics does not round correctly."""

ULPS = 4
"""What a library may err there, in ulp: the most that the table of single-precision functions in the CUDA C++ Programming Guide gives for
the common ones, and what the rows of the op table grant (ops/softmax.py)."""

STEP = 2.0**-26
"""Relative error by which sensitivity is measured: first order, far above float64's own roundoff."""

TRIES = 4
"""Draws of its signs."""


def function_of(folder: Path, text: str) -> Callable[..., Any]:
    """The function that 'file.py:name' says, imported from the folder. InputError where there is none."""
    file, _, name = text.partition(":")
    path = folder / file
    if not path.is_file() or path.suffix != ".py" or not name.isidentifier():
        raise InputError("no such reference function", came=text, expected="file.py:function, the file in the component's folder")
    spec = importlib.util.spec_from_file_location(f"outside_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, name)  # type: ignore[no-any-return]
    except Exception as error:
        raise InputError("the reference cannot be loaded", came=f"{text}: {type(error).__name__}: {error}", do="mend the file") from error


@dataclass(frozen=True)
class Oracle:
    """The function as an oracle: always a tuple of arrays. It gets views that it cannot write: what is judged later is the same memory."""

    function: Callable[..., Any]

    def __call__(self, *operands: np.ndarray) -> Arrays:
        views = [rounding(np.asanyarray(x).view()) for x in operands]
        for x in views:
            x.flags.writeable = False
        found = self.function(*views)
        several = isinstance(found, tuple) or (isinstance(found, list) and any(isinstance(y, np.ndarray) for y in found))
        return tuple(np.asarray(y) for y in (found if several else (found,)))


INSTEAD = {"dot": "a @ b", "inner": "(a * b).sum(axis=-1)", "vdot": "(a * b).sum()", "tensordot": "a @ b, of reshaped operands",
           "einsum": "a @ b, or a product and .sum(axis=...)", "cumsum": "x @ a triangle of ones", "cumprod": "a loop over the axis",
           "nancumsum": "x @ a triangle of ones", "nancumprod": "a loop over the axis", "trace": "np.diagonal(x).sum()",
           "convolve": "a sum over shifted slices", "correlate": "a sum over shifted slices", "interp": "its formula",
           "add.accumulate": "x @ a triangle of ones", "multiply.reduce": "a loop over the axis: y = y * x[..., i]"}
"""What computes at once, so that a walk sees no single rounding of it -> what to write in its place."""

EXACT = ("maximum", "minimum", "fmax", "fmin", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor")
"""Ufuncs whose reductions and accumulations round nothing."""


def _cannot(name: str) -> InputError:
    do = INSTEAD.get(name, "ufuncs, a @ b, sum, mean, max and indexing")
    return InputError("the reference calls what the walk for the tolerance cannot follow", came=f"np.{name}",
                      expected="ufuncs, @, sum, mean, max, indexing and reshapes", do=f"write {do}")


class Followed(np.ndarray):
    """float64 on which a function that a walk cannot follow is an InputError: its result would count as one rounding."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **more: Any) -> Any:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        if method in ("reduce", "accumulate", "reduceat") and ufunc.__name__ not in EXACT and (method != "reduce" or ufunc is not np.add):
            raise _cannot(name)
        if method == "reduce" and ufunc is np.add and more.get("where", True) is not True:
            raise _cannot("add.reduce with where")
        plain = [np.asarray(x) if isinstance(x, Followed) else x for x in inputs]
        if ufunc is np.matmul and min(np.ndim(x) for x in plain) < 2:
            raise InputError("the walk for the tolerance multiplies matrices alone", came="@ of a vector", expected="two axes or more",
                             do="write (a * v).sum(axis=-1), or v[:, None]")
        result = getattr(ufunc, method)(*plain, **more)
        if out is not None:
            np.asarray(out[0])[...] = result
            return out[0]
        return followed(result)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        module = str(getattr(func, "__module__", ""))
        if func.__name__ in INSTEAD or module.startswith(("numpy.linalg", "numpy.fft")):
            raise _cannot(f"{module.removeprefix('numpy.')}.{func.__name__}" if module.startswith(("numpy.linalg", "numpy.fft"))
                          else func.__name__)
        return followed(super().__array_function__(func, types, args, kwargs))

    def dot(self, *args: Any, **more: Any) -> Any:
        raise _cannot("dot")

    def cumsum(self, *args: Any, **more: Any) -> Any:
        raise _cannot("cumsum")

    def cumprod(self, *args: Any, **more: Any) -> Any:
        raise _cannot("cumprod")

    def trace(self, *args: Any, **more: Any) -> Any:
        raise _cannot("trace")


def followed(x: Any) -> Any:
    """x as Followed where it is of floats."""
    if isinstance(x, (tuple, list)):
        return type(x)(followed(y) for y in x)
    return np.asarray(x).view(Followed) if np.asarray(x).dtype.kind == "f" else x


class Rounding(Walked):
    """A walk whose constants are rounded too: what a kernel multiplies by is 0.1 in its own type, not in float64."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **more: Any) -> Any:
        operands = [self._constant(x) for x in inputs]
        return rounding(super().__array_ufunc__(ufunc, method, *operands, out=out, **more))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return rounding(super().__array_function__(func, types, args, kwargs))

    def _constant(self, x: Any) -> Any:
        if isinstance(x, float):
            return float(round_to(np.asarray(x), self.sum_name))
        return round_to(x, self.sum_name) if type(x) is np.ndarray and x.dtype.kind == "f" else x


def rounding(x: Any) -> Any:
    """x as Rounding where it is walked."""
    if isinstance(x, (tuple, list)):
        return type(x)(rounding(y) for y in x)
    return x.view(Rounding) if isinstance(x, Walked) else x


class Counting(np.ndarray):
    """float64 that counts the elements which a walk of the same text computes one by one."""

    steps: list[int]

    def __array_finalize__(self, other: object) -> None:
        self.steps = getattr(other, "steps", [0])

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **more: Any) -> Any:
        like = next(x for x in (*inputs, *(out or ())) if isinstance(x, Counting))
        plain = [np.asarray(x) if isinstance(x, Counting) else x for x in inputs]
        result = getattr(ufunc, method)(*plain, **more)
        terms = np.shape(plain[0])[-1] if ufunc is np.matmul else 1
        like.steps[0] += max(np.size(plain[0]), terms * sum(np.size(y) for y in (result if isinstance(result, tuple) else (result,))))
        if out is not None:
            np.asarray(out[0])[...] = result
            return out[0]
        if isinstance(result, tuple) or np.asarray(result).dtype.kind != "f":
            return result
        counted = np.asarray(result).view(Counting)
        counted.steps = like.steps
        return counted


def steps(oracle: Callable[..., Any], inputs: Arrays, attrs: Attrs) -> int:
    """Elements that a walk of the oracle computes, about: of a product each of its terms."""
    count, operands = [0], list[np.ndarray]()
    for x in inputs:
        counted = np.asarray(x).view(Counting)
        counted.steps = count
        operands.append(counted if counted.dtype.kind == "f" else x)
    with np.errstate(all="ignore"):
        oracle(*operands, **attrs)
    return count[0]


class Erring(np.ndarray):
    """float64 whose functions of LIBRARY err by STEP, the sign of each element drawn."""

    rng: Any = None

    def __array_finalize__(self, other: object) -> None:
        self.rng = getattr(other, "rng", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **more: Any) -> Any:
        like = next(x for x in (*inputs, *(out or ())) if isinstance(x, Erring))
        result = getattr(ufunc, method)(*(np.asarray(x) if isinstance(x, Erring) else x for x in inputs), **more)
        if method == "__call__" and ufunc in LIBRARY:
            result = result * (1 + STEP * like.rng.choice((-1.0, 1.0), np.shape(result)))
        if out is not None:
            np.asarray(out[0])[...] = result
            return out[0]
        return erring(result, like.rng)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = super().__array_function__(func, types, args, kwargs)
        return result if isinstance(result, (tuple, list)) else erring(result, self.rng)


def erring(x: Any, rng: np.random.Generator) -> Any:
    """x as Erring where it is of floats."""
    if isinstance(x, tuple):
        return tuple(erring(y, rng) for y in x)
    x = np.asarray(x)
    if x.dtype.kind != "f":
        return x
    y = x.view(Erring)
    y.rng = rng
    return y


@dataclass(frozen=True)
class Bound:
    """OpSpec.bound: what an error of ULPS ulp in each function of LIBRARY comes to at the outputs, in units of u (an ulp is at most 2 u).

    Measured: the reference runs in float64 with those functions off by STEP, and the largest change of TRIES draws is scaled.
    """

    oracle: Oracle

    def __call__(self, inputs: Arrays, attrs: Attrs) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        with np.errstate(all="ignore"):
            right = [np.asarray(y, np.float64) for y in self.oracle(*inputs)]
            worst = [np.zeros(y.shape) for y in right]
            for _ in range(TRIES):
                off = self.oracle(*(erring(x, rng) if np.asarray(x).dtype.kind == "f" else x for x in inputs))
                for i, (y, z) in enumerate(zip(right, off)):
                    moved = np.abs(np.asarray(z, np.float64) - y)
                    worst[i] = np.maximum(worst[i], np.where(np.isfinite(moved), moved, 0.0))
        return [2 * ULPS * w / STEP for w in worst]


@dataclass(frozen=True)
class Drawn:
    """Drawn samples, but those on which one precision lower would pass, which say nothing. `oracle`: of float64 arrays and `attrs`;
    `bound`: as OpSpec.bound."""

    signature: Signature
    oracle: Callable[..., Any]
    dtype: str
    bound: Callable[[Arrays, Attrs], Any] | None
    attrs: dict[str, object] = field(default_factory=dict)

    def __call__(self, rng: np.random.Generator) -> Iterator[Sample]:
        return (s for s in self.signature.samples(rng, self.attrs) if self._tells(s))

    def _tells(self, sample: Sample) -> bool:
        inputs = tuple(round_to(x, self.dtype) if np.asarray(x).dtype.kind == "f" else x for x in sample.inputs)
        with np.errstate(all="ignore"):
            return self._power(inputs)

    def _power(self, inputs: Arrays) -> bool:
        want, below = self.oracle(*inputs, **self.attrs), LOWER[self.dtype]
        walked, lowered = (walk(self.oracle, d, inputs, self.attrs, mixed=m) for d, m in ((self.dtype, self.dtype), (below, "")))
        bounds = self.bound(inputs, self.attrs) if self.bound else [0.0] * len(want)
        u, found = UNIT_ROUNDOFF[ACCUMULATE[self.dtype]], []
        for w, y, low, bound in zip(want, walked, lowered, bounds):
            if w.dtype.kind == "f":
                off, plain, rounded = np.abs(low - w), np.abs(y - w), round_to(w, self.dtype)
                # this draw may be exact by chance; others err by half an ulp of the largest element at least
                largest = np.where(np.isfinite(w), np.abs(w), 0.0).max(initial=0.0)
                erred = np.maximum(np.where(np.isfinite(plain), plain, 0.0).max(initial=0.0), ulp(largest, self.dtype) / 2)
                slack = np.maximum(ulp(w, self.dtype) / 2 + bound * u, erred)
                exact = np.array_equal(round_to(rounded, below), rounded, equal_nan=True)
                found += [bool(np.any(off > MARGIN * RATIO * slack)), bool(exact)]
        return not found or any(found)


MARGIN = 8
"""By how much one precision lower must exceed the tolerance: draws of another nonce give another tolerance."""



@dataclass(frozen=True)
class Whole:
    """OpSpec.exact: samples of small integers on which the reference's walk gives the reference's own values, so that no order of
    additions rounds."""

    signature: Signature
    oracle: Oracle
    dtype: str

    def __call__(self, rng: np.random.Generator) -> Iterator[Sample]:
        for sample in self.signature.samples(rng, {}, whole=True):
            with np.errstate(all="ignore"):
                want = self.oracle(*sample.inputs)
            walked = walk(self.oracle, self.dtype, sample.inputs, {}, mixed=self.dtype)
            if all(np.array_equal(w, y) for w, y in zip(want, walked)):
                yield sample
