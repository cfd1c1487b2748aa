"""Spot checks: one launch of a Plan recomputed in float64 from the operands that it really had. Floor 4.

A `Spot` is made just before its launch runs, and asked just after. Products are looked at whole, by random projections (Freivalds 1977):
C r against A (B r), r of random signs, so one wrong element shows in every projection of its row. Of every other row of the op table
drawn parts are computed by the oracle (alpha.graph.cuts.py). Nothing here writes to what it reads.

**Tolerances** are derived as those of the parity gate (alpha/gates/tolerance.py). An element is allowed half an ulp and the row's bound.
Where it errs by more, it is allowed RATIO times what the oracle's text errs when it is walked in the launch's precision, the worst of the
part over FEW draws, and of MANY where those do not excuse it. A product's element c = sum of K terms is allowed (growth(K) + 2) u |a| |b|
by the norms of its row and column (Cauchy-Schwarz), half an ulp beside. Its projection adds n such errors with random signs, so six times
the root of their squares (Hoeffding 1963: exceeded once in 3e7 even if every error were the largest allowed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpha.graph.cuts import Part, drawn, parts, widened
from alpha.graph.plan import Launch, Ref
from alpha.ops.numerics import ACCUMULATE, UNIT_ROUNDOFF, growth, round_to, ulp, walk
from alpha.ops.spec import Arrays
from alpha.ops.table import row
from alpha.registry.judge import RATIO
from alpha.types import Attrs, TensorType

VECTORS = 4
"""Projections: two wrong elements of one row hide each other in all of them once in 16 times."""

FEW, MANY = 3, 48
"""Draws of the walk, as in the parity gate."""

BLOCK = 256
"""Rows that are widened to float64 at a time."""

LEAST = {"f32": 2.0**-149, "bf16": 2.0**-133, "f64": 2.0**-1074}
"""The smallest number of each type: what a term that underflows may lose."""

PRODUCTS = {"matmul": 0, "matmul_accumulate": 1, "linear_gelu": 0, "linear_swiglu": 0}
"""Rows whose first result is a product -> the operand that is its left factor. One before it is added, one after the right factor too."""

HEAD = "linear_cross_entropy_grad"

ROWS, WHOLE = 8, 1 << 34
"""Of a head with more products than WHOLE the gradients of so many rows are looked at."""

Read = Callable[[Ref], np.ndarray]
"""The tensor at a planned place, in the type in which the host holds it. It may be a view of the memory that launches write."""


@dataclass(frozen=True)
class Look:
    """What was looked at of one launch. `how`: product, rows, whole; `elements`: of results; `ratio`: worst error over its tolerance,
    infinite for what is not a number; `place`: of the worst where it is above 1: result, index, got, expected, tolerance."""

    how: str
    elements: int
    ratio: float
    place: str = ""


class Spot:
    """One launch, looked at. Made before it runs."""

    def __init__(self, launch: Launch, read: Read, rng: np.random.Generator) -> None:
        self._launch, self._asked = launch, list[Callable[[Read], Look]]()
        ins = [read(r) for r in launch.ins]
        with np.errstate(all="ignore"):
            if launch.op in PRODUCTS:
                self._asked.append(_Product(launch, ins, rng).look)
            if launch.op == HEAD:
                self._asked.append(_Head(launch, ins, rng).look)
            elif launch.op in ("matmul", "matmul_accumulate"):
                return
            else:
                types = [r.type for r in launch.ins], [r.type for r in launch.outs]
                for part in parts(launch.op, *types, launch.attrs, rng):
                    self._asked.append(_Drawn(launch, part, ins, rng).look)

    def looks(self, read: Read) -> Iterator[Look]:
        """After the launch: what each check found."""
        with np.errstate(all="ignore"):
            for look in self._asked:
                yield look(read)


def held(launch: Launch) -> int:
    """Bytes, about, that a spot check of this launch holds at its worst moment beside what it looks at."""
    types, out = [r.type for r in launch.ins], [r.type for r in launch.outs]
    rows = max((t.shape[-1] for t in (*types, *out) if t.shape), default=0) * BLOCK
    if launch.op == HEAD:
        return 8 * (6 * types[1].shape[0] * BLOCK + 5 * (types[0].size + types[1].size))
    product = sum(t.nbytes for t in types[: PRODUCTS[launch.op]]) + 24 * rows if launch.op in PRODUCTS else 0
    return product + (0 if launch.op in ("matmul", "matmul_accumulate") else 8 * 8 * widened(launch.op, types, out, launch.attrs))


# -- parts by the oracle -------------------------------------------------------------------------------------------------------


class _Drawn:
    """A part of a launch against the row's oracle."""

    def __init__(self, launch: Launch, part: Part, ins: Sequence[np.ndarray], rng: np.random.Generator) -> None:
        self._launch, self._part, self._rng, self._spec = launch, part, rng, row(part.op or launch.op)
        self._types, self._results = [launch.ins[i].type for i in part.operands()], [launch.outs[i] for i in part.results()]
        moved = launch.op == "embedding"  # rows of a table, which is not copied to move some of them
        self._ins = tuple(x if moved else _wide(take(x)) for take, x in zip(part.ins, [ins[i] for i in part.operands()], strict=True))
        if moved:
            self._ins = (ins[0], part.ins[1](ins[1]))
        self._want = [np.asarray(y) for y in self._spec.oracle(*self._ins, **part.attrs)]

    def look(self, read: Read) -> Look:
        launch, part = self._launch, self._part
        having = [i for i, take in enumerate(part.outs) if take is not None]
        refs = self._results
        got = {i: np.asarray(part.outs[i](read(refs[i]))) for i in having}  # type: ignore[misc]
        allowed = self._slack()
        worst = {i: _ratio(got[i], self._want[i], allowed[i], refs[i].type.dtype) for i in having}
        for draws in (FEW, MANY):
            if all(x.max(initial=0.0) <= 1 for x in worst.values()) or not any(r.type.is_float for r in launch.ins):
                break
            naive = self._naive(draws)
            allowed = [np.maximum(a, RATIO * n) for a, n in zip(allowed, naive)]
            worst = {i: _ratio(got[i], self._want[i], allowed[i], refs[i].type.dtype) for i in having}
        largest = max(having, key=lambda i: float(worst[i].max(initial=0.0)))
        ratio, place = float(worst[largest].max(initial=0.0)), ""
        if not ratio <= 1:
            at = int(np.argmax(worst[largest]))
            shape, take = refs[largest].type.shape, part.outs[largest]
            whole = take(np.arange(refs[largest].type.size).reshape(shape)).reshape(-1)[at]  # type: ignore[misc]
            place = _place(launch, part.results()[largest], np.unravel_index(int(whole), shape), got[largest].reshape(-1)[at],
                           self._want[largest].reshape(-1)[at], np.broadcast_to(allowed[largest], worst[largest].shape).reshape(-1)[at])
        return Look("rows" if part.rows else "whole", sum(x.size for x in got.values()), ratio, place)

    def _slack(self) -> list[np.ndarray]:
        """Half an ulp and the row's bound, of each result, and what the part leaves out of it."""
        spec, launch = self._spec, self._launch
        dtype = spec.compute_dtype([r.type for r in launch.ins]) or "f32"
        u = UNIT_ROUNDOFF[ACCUMULATE[dtype]]
        bounds = spec.bound(self._ins, self._part.attrs) if spec.bound else [0.0] * len(self._want)
        apart = self._part.apart or (0.0,) * len(self._want)
        return [0.5 * ulp(w, r.type.dtype) + (np.asarray(b) + a * np.abs(w)) * u if w.dtype.kind == "f" else np.zeros(w.shape)
                for w, b, a, r in zip(self._want, bounds, apart, self._results, strict=True)]

    def _naive(self, draws: int) -> list[float]:
        """The largest error of the walk over the part and over `draws` draws, of each result."""
        spec, launch = self._spec, self._launch
        dtype = spec.compute_dtype([r.type for r in launch.ins]) or "f32"
        errors = [0.0] * len(self._want)
        for draw in range(draws):
            ins = self._ins if draw == 0 else _nudged(self._ins, self._types, self._rng)
            exact = spec.oracle(*ins, **self._part.attrs)
            for precision in {ACCUMULATE[dtype] if r.type.dtype == ACCUMULATE[dtype] else dtype for r in self._results}:
                walked = walk(spec.oracle, precision, ins, self._part.attrs, mixed=dtype)
                for i, (w, e, r) in enumerate(zip(walked, exact, self._results, strict=True)):
                    if r.type.dtype == precision and np.asarray(e).dtype.kind == "f":
                        error = np.abs(round_to(w, precision) - e)
                        errors[i] = max(errors[i], float(np.max(error, initial=0.0, where=np.isfinite(error))))
        return errors


def _nudged(ins: Arrays, types: Sequence[TensorType], rng: np.random.Generator) -> Arrays:
    """Every float operand times a factor near 1, rounded again: the walk's roundings fall elsewhere."""
    factors = 1 + 2.0**-8 * rng.uniform(-1, 1, len(ins))
    return tuple(round_to(x * f, t.dtype) if t.is_float else x for x, f, t in zip(ins, factors, types, strict=True))


def _ratio(got: np.ndarray, want: np.ndarray, allowed: np.ndarray, dtype: str) -> np.ndarray:
    """Of each element the error over what is allowed; infinite where an integer or what is finite differs."""
    if want.dtype.kind != "f":
        return np.where(got == want, 0.0, np.inf)
    got = np.asarray(got, np.float64)
    rounded = round_to(want, dtype)
    same = (got == rounded) | (np.isnan(got) & np.isnan(want))
    ratio = np.abs(got - want) / allowed
    return np.where(same, 0.0, np.where(np.isfinite(ratio), ratio, np.inf))


def _place(launch: Launch, output: int, index: Sequence[Any], got: Any, want: Any, allowed: Any) -> str:
    name = row(launch.op).outputs[output]
    return f"{name}[{', '.join(str(int(i)) for i in index)}]: got {float(got):.9g}, expected {float(want):.9g} +- {float(allowed):.3g}"


def _wide(x: np.ndarray) -> np.ndarray:
    """A copy, floats as float64."""
    return np.array(x, np.float64 if x.dtype.kind == "f" else x.dtype)


# -- whole products ------------------------------------------------------------------------------------------------------------


class _Product:
    """The product of a launch, whole: every element of its first result is in VECTORS projections."""

    def __init__(self, launch: Launch, ins: Sequence[np.ndarray], rng: np.random.Generator) -> None:
        self._launch, attrs, first = launch, launch.attrs, PRODUCTS[launch.op]
        a, b = ins[first], ins[first + 1]
        ta, tb = bool(attrs.get("trans_a", False)), bool(attrs.get("trans_b", False))
        if b.ndim == 2 and not ta:
            a = a.reshape(-1, a.shape[-1])
        lead = a.shape[:-2]
        self._pairs = [(a[i], b[i] if b.ndim > 2 else b) for i in np.ndindex(*lead)]
        self._shape = (len(self._pairs), a.shape[-1 if ta else -2], b.shape[-2 if tb else -1])
        n = self._shape[2]
        k = a.shape[-2 if ta else -1]
        out, accumulate = launch.outs[0].type.dtype, ACCUMULATE[launch.ins[first].type.dtype]
        self._u, self._least = UNIT_ROUNDOFF[out], k * LEAST[accumulate] + LEAST[out]
        self._grown = (growth(k) + 2) * UNIT_ROUNDOFF[accumulate]
        self._signs = rng.integers(0, 2, (n, VECTORS)) * 2.0 - 1
        self._transposed = ta, tb
        self._beside = [np.array(x).reshape((1, 1, n) if x.ndim == 1 else self._shape) for x in (*ins[:first], *ins[first + 2 :])]
        want, self._scale, self._most = [], [], []
        for left, right in self._pairs:
            right_r, right_norms = _applied(right, tb, self._signs, columns=True)
            left_r, left_norms = _applied(left, ta, right_r)
            want.append(left_r)
            self._scale.append(left_norms)
            self._most.append(right_norms)
        self._want = np.stack(want) + sum(x @ self._signs for x in self._beside)

    def look(self, read: Read) -> Look:
        c = read(self._launch.outs[0]).reshape(self._shape)
        worst, where = 0.0, (0, 0)
        for i in range(len(c)):
            got, norms = _applied(c[i], False, self._signs)
            beside = sum(np.sqrt(np.square(x[min(i, len(x) - 1)]).sum(-1)) for x in self._beside)
            total = float(np.sqrt(np.square(self._most[i]).sum()))
            allowed = 6 * (self._u * (norms + beside) + self._grown * self._scale[i] * total + self._least * c.shape[2] ** 0.5)
            error = np.abs(got - self._want[i]).max(-1)
            same = (error <= allowed) | ~np.isfinite(self._want[i]).all(-1)
            overflow = ~np.isfinite(got).all(-1) & (self._scale[i] * total + beside > np.finfo(np.float32).max / 2)
            ratio = np.where(same | overflow, np.minimum(error / allowed, 1.0), np.where(np.isfinite(error), error / allowed, np.inf))
            ratio = np.where(np.isnan(ratio), 0.0, ratio)
            if not ratio.max(initial=0.0) <= worst:
                worst, where = float(ratio.max()), (i, int(ratio.argmax()))
        return Look("product", c.size, worst, "" if worst <= 1 else self._named(c, *where))

    def _named(self, c: np.ndarray, i: int, m: int) -> str:
        """The worst element of one row, which is computed whole for it."""
        (left, right), (ta, tb) = self._pairs[i], self._transposed
        a = _wide(left[:, m] if ta else left[m])
        want = _applied(right, not tb, a[:, None])[0][:, 0]
        want = want + sum(x[min(i, len(x) - 1), min(m, x.shape[1] - 1)] for x in self._beside)
        allowed = self._u * np.abs(want) + self._grown * self._scale[i][m] * self._most[i] + self._least
        got = np.asarray(c[i, m])
        ratio = np.abs(got - want) / allowed
        j = int(np.argmax(np.where(np.isnan(ratio), np.inf, ratio)))
        index = np.unravel_index((i * c.shape[1] + m) * c.shape[2] + j, self._launch.outs[0].type.shape)
        return _place(self._launch, 0, index, got[j], want[j], allowed[j])


def _applied(x: np.ndarray, transposed: bool, v: np.ndarray, columns: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(x v, or x^T v, in float64; norms of the rows of that matrix, or of its columns), some rows of x at a time."""
    if hasattr(x, "applied"):  # it lies on a device
        return x.applied(transposed, v, columns)  # type: ignore[no-any-return]
    inner, result = columns != transposed, []
    total, norms = np.zeros((x.shape[1], v.shape[1])), np.zeros(x.shape[1])
    own = []
    for start in range(0, x.shape[0], BLOCK):
        block = x[start : start + BLOCK].astype(np.float64)
        if transposed:
            total += block.T @ v[start : start + BLOCK]
        else:
            result.append(block @ v)
        if inner:
            norms += np.square(block).sum(0)
        else:
            own.append(np.square(block).sum(1))
    product = total if transposed else np.concatenate(result) if result else np.zeros((0, v.shape[1]))
    return product, np.sqrt(norms if inner else np.concatenate(own) if own else np.zeros(0))


# -- the head and its loss -----------------------------------------------------------------------------------------------------


class _Head:
    """The head with its loss and gradients, whole, some rows of logits at a time: every gradient needs the normaliser of its whole row.
    Above WHOLE it is the gradient of drawn rows alone: loss and the weight's gradient need all rows.

    A logit errs by e = (growth(C) + 2) u |x| |w|, and by half an ulp where operands are narrower than sums: the chunked head of a GPU keeps
    logits and their gradients as it keeps operands. So the log of a row's normaliser errs by that and growth(V), and a probability p by
    the share s = 2 e + (growth(V) + 2 largest distance from the normaliser + 2 |lse| + 20) u. Sums of products add growth(N) or growth(V).
    The other operand of the weight's gradient may have been multiplied by what belongs to its row, and rounded again.
    """

    def __init__(self, launch: Launch, ins: Sequence[np.ndarray], rng: np.random.Generator) -> None:
        self._launch, (n, c), v = launch, ins[0].shape, len(ins[1])
        self._rows = drawn(n, ROWS, rng) if n * c * v > WHOLE else None
        x, targets = (_wide(ins[0]), np.array(ins[2])) if self._rows is None else (_wide(ins[0][self._rows]), np.array(ins[2][self._rows]))
        weight, n = _wide(ins[1]), len(x)
        ignore, z = launch.attrs["ignore_index"], float(launch.attrs["z_loss"])  # type: ignore[arg-type]
        u, narrow = UNIT_ROUNDOFF[ACCUMULATE[launch.ins[0].type.dtype]], UNIT_ROUNDOFF[launch.ins[0].type.dtype]
        largest = float(np.sqrt(np.square(weight).sum(1)).max())
        loss, loss_off, dx, dx_off = 0.0, 0.0, np.zeros((n, c)), np.zeros((n, c))
        dw, dw_off = np.zeros((v, c)), np.zeros((v, c))
        attrs: Attrs = {"ignore_index": ignore, "z_loss": z}
        for start in range(0, n, BLOCK):
            at = slice(start, start + BLOCK)
            logits = x[at] @ weight.T
            losses, lse = row("cross_entropy").oracle(logits, targets[at], **attrs)
            (dl,) = row("cross_entropy_bwd").oracle(np.ones(len(losses)), logits, targets[at], lse, **attrs)
            e = (growth(c) + 2) * u * np.sqrt(np.square(x[at]).sum(1)) * largest + (narrow > u) * narrow * np.abs(logits).max(1)
            share = 2 * e + u * (growth(v) + 2 * np.abs(logits - lse[:, None]).max(1) + 2 * np.abs(lse) + 20)
            share = np.where(targets[at] == ignore, 0.0, share)
            p = np.exp(logits - lse[:, None]) * (1 + 2 * z * np.abs(lse))[:, None] * (1 + 2 * z)
            off = p * share[:, None] + np.abs(dl) * (3 * u + narrow)  # kept in the operands' type for the products
            loss += float(losses.sum())
            loss_off += float((share * (1 + 2 * z * np.abs(lse)) + growth(n) * u * np.abs(losses)).sum())
            dx[at], dx_off[at] = dl @ weight, (off + growth(v) * u * np.abs(dl)) @ np.abs(weight)
            if self._rows is None:
                dw += dl.T @ x[at]
                dw_off += (off + (growth(n) * u + (narrow > u) * narrow) * np.abs(dl)).T @ np.abs(x[at])
        self._want, self._off = (np.array(loss), dx, dw), (np.array(loss_off), dx_off, dw_off)

    def look(self, read: Read) -> Look:
        worst, place, elements = 0.0, "", 0
        for i, (ref, want, off) in enumerate(zip(self._launch.outs, self._want, self._off, strict=True)):
            if self._rows is not None and i != 1:
                continue
            got = np.asarray(read(ref) if self._rows is None else read(ref)[self._rows])
            allowed = 0.5 * ulp(want, ref.type.dtype) + off
            ratio = _ratio(got, want, allowed, ref.type.dtype)
            elements += got.size
            if not ratio.max() <= worst:
                worst, at = float(ratio.max()), np.unravel_index(int(ratio.argmax()), got.shape)
                named = at if self._rows is None else (int(self._rows[at[0]]), *at[1:])
                place = _place(self._launch, i, named, got[at], want[at], allowed[at]) if worst > 1 else ""
        return Look("whole" if self._rows is None else "rows", elements, worst, place)
