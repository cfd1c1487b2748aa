"""Whether two computations of one call agree, before either is timed. Floor 8.

Compared is the relative difference in the Euclidean norm, output by output. Each side rounds at most ROUNDINGS values that follow from one
another between an operand and a result (unit roundoff u of the narrowest float type of the call) and adds up to n float32 products in an
order of its own, whose errors grow like sqrt(n) (Higham and Mary 2019, SIAM J. Sci. Comput. 41). Both sides err, so the bound is
2 ROUNDINGS (u + sqrt(n) u32). A wrong mask, scale, axis or statistic is off by orders of magnitude more. Integers must be equal.

Of training steps the change of the parameters is compared too, tensor by tensor: D = after - before on float32 masters, on both sides from
the same weights. AdamW's first steps hardly know how large a gradient is: each element moves by lr r, |r| <= 1.001, and r is the sign of
the gradient at the first step and a quotient of weighted means of gradients after it.
- A gradient follows from at most 4 ROUNDINGS roundings a layer (attention and MLP, forward and backward), which are independent, so their
  errors grow like sqrt: rho = 2 (u + sqrt(n) u32) sqrt(4 ROUNDINGS layers), relative to the gradient's own scale.
- An element changes its sign where an error exceeds it. With errors e and gradients of density p near 0 that is p E|e|: rho / pi for normal
  gradients, 0.56 rho for Laplace's. Taken is f = rho / 2; u is the largest rounding and twice the usual one. Among n elements f n has a
  standard deviation of sqrt(f n), and a few elements have no statistics: f_n = f + (6 sqrt(f n) + 3) / n.
- In CHECKED = 3 steps at most 3 f_n of the elements have had another sign. They are as large as others, so their squares are 3 f_n |D|^2:
  the norms |D| differ by a share of 1 - sqrt(1 - 3 f_n) < 2 f_n. An element may turn around, so |D' - D|^2 <= 4 * 3 f_n |D|^2, and
  1 - cosine = |D' - D|^2 / (2 |D|^2) <= 6 f_n.
- Each step rounds each parameter to float32 on both sides: 6 u32 |before| / |D| more of both.
- Decay moves all decayed elements along `before`, by lr wd before. Its coefficient is <D' - D, before> / (lr wd |before|^2), summed over
  all decayed tensors; 0 where both sides decay alike, 1 where the other side does not. What signs differ is independent of `before`:
  the coefficient's standard error s follows from D' - D itself. Allowed is max(1/2, 6 s). The same of tensors without decay, whose
  coefficient is -1 where the other side decays them.
So no update, a rate times 1/2 or 2, another sign, and a tensor left out are told wherever 2 f_n < 1/2, as in every run file: rates between
1 - 2 f_n and 1 + 2 f_n are not. Decay is told where 6 s < 1, not where wd |before| drowns in changed signs; the record keeps s. Not told:
AdamW's eps and moments, which change D by less than signs do. Not compared: tensors of so few elements that 2 f_n >= 1/2, and the bias of
keys, whose gradient is 0 but for rounding, as softmax takes no notice of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

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


# -- the change of parameters --------------------------------------------------------------------------------------------------

TAKEN = 1 << 17
"""Elements of a tensor whose change is compared, every so manieth one; all of a smaller one."""

SIGMAS = 6.0
"""A run compares hundreds of tensors with each variant; a right peer is not to be refused by chance."""

TOLD = 0.5
"""A share of the change that must be told: half the rate. A tensor with a larger bound is not compared."""


def places(shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, tuple[int, int]]:
    """(first, stride) of what is taken of each flat tensor. A stride is a multiple of no row's length, so it meets all columns."""
    found = {}
    for name, shape in shapes.items():
        size, row = int(np.prod(shape)), shape[-1] if shape else 1
        stride = max(1, -(-size // TAKEN))
        while stride > 1 and np.gcd(stride, row) > 1:
            stride += 1
        found[name] = int(rng.integers(stride)), stride
    return found


def taken(x: np.ndarray, place: tuple[int, int]) -> np.ndarray:
    """A copy of those elements, float32: what they are of goes on."""
    return np.array(x.reshape(-1)[place[0] :: place[1]], np.float32)


@dataclass(frozen=True)
class Held:
    """One figure. `difference` from ours, what is `allowed`, and of what: the tensor that is worst by its own bound."""

    difference: float
    allowed: float
    where: str

    @property
    def right(self) -> bool:
        """Whether it is within its bound."""
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Change:
    """What the change of the parameters was held to. `tensors`, `elements` that were compared; `size`: of the norms, `direction`: 1 -
    cosine; `decay`, `undecayed`: coefficients of tensors with and without decay, None where the run has none of them or no decay."""

    tensors: int
    elements: int
    size: Held
    direction: Held
    decay: Held | None = None
    undecayed: Held | None = None

    @property
    def why(self) -> str:
        """What is not ours; '' when all is."""
        for what, held in (("size", self.size), ("direction", self.direction), ("decay", self.decay), ("decay", self.undecayed)):
            if held is not None and not held.right:
                return f"its parameters change otherwise than ours: {what} of {held.where} off by {held.difference:.2g}, " \
                       f"at most {held.allowed:.2g}, so no time of it is given"
        return "" if self.tensors else "no tensor is large enough to compare its change, so no time of it is given"


def flips(dtypes: set[str], terms: float, layers: int) -> float:
    """f: the share of elements whose gradient may have another sign, of two right computations of these types and sizes."""
    u = max(UNIT[d] for d in dtypes)
    return (u + sqrt(max(1.0, terms)) * UNIT["f32"]) * sqrt(4 * ROUNDINGS * layers)


def change(before: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], flipped: float,
           decayed: set[str], decay: float, steps: int) -> Change:
    """Hold the parameters after `steps` steps to ours, all from the same ones. `flipped`: f; `decay`: the sum of lr wd over the steps."""
    nothing = Held(0.0, 0.0, "")
    size, direction, tensors, elements = nothing, nothing, 0, 0
    parts: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for name, start in before.items():
        if name not in theirs or not start.shape == ours[name].shape == theirs[name].shape:
            return Change(tensors, elements, *2 * (Held(float("inf"), 0.0, name),))
        p = start.astype(np.float64)
        a, b = ours[name] - p, theirs[name] - p
        norm, other = float(np.linalg.norm(a)), float(np.linalg.norm(b))
        few = flipped + (SIGMAS * sqrt(flipped * p.size) + steps) / max(1, p.size)
        rounded = 2 * steps * UNIT["f32"] * float(np.linalg.norm(p)) / norm if norm else 0.0
        if 2 * few + rounded >= TOLD:
            continue
        tensors, elements = tensors + 1, elements + p.size
        cosine = float(a @ b) / (norm * other) if norm and other else 1.0
        size = _worse(size, Held(abs(other - norm) / norm if norm else (0.0 if other == 0 else float("inf")), 2 * few + rounded, name))
        direction = _worse(direction, Held(max(0.0, 1 - cosine) if isfinite(cosine) else float("inf"), 2 * steps * few + rounded, name))
        parts[name in decayed].append(np.stack([a - b, p]))
    return Change(tensors, elements, size, direction, *(_coefficient(parts[yes], decay, yes) for yes in (True, False)))


@dataclass(frozen=True)
class Expected:
    """What a right peer changes. `places`, `before`, `ours`: what is taken of each tensor, and its elements before and after the checked
    steps; `sizes`: of the model, as PeerModel is made from; `rates`: lr of each step; `dtypes`, `terms`: as in `bound`."""

    places: Mapping[str, tuple[int, int]]
    before: Mapping[str, np.ndarray]
    ours: Mapping[str, np.ndarray]
    sizes: Mapping[str, Any]
    rates: Sequence[float]
    dtypes: set[str]
    terms: float

    def change(self, theirs: Mapping[str, np.ndarray]) -> Change:
        """Of what is taken of a peer's parameters after the same steps."""
        s = self.sizes
        before, ours, theirs = ({name: self._without_keys(name, x) for name, x in of.items()} for of in (self.before, self.ours, theirs))
        return change(before, ours, theirs, flips(self.dtypes, self.terms, s["layers"]), set(s["decayed"]),
                      s["weight_decay"] * sum(self.rates), len(self.rates))

    def _without_keys(self, name: str, x: np.ndarray) -> np.ndarray:
        """Without the bias of keys, in the rows after the queries'."""
        if not name.endswith("attention.qkv.bias"):
            return x
        s, (first, stride) = self.sizes, self.places[name]
        head = s["width"] // s["heads"]
        at = first + stride * np.arange(x.size)
        return x[(at < s["heads"] * head) | (at >= (s["heads"] + s["kv_heads"]) * head)]


def _worse(one: Held, other: Held) -> Held:
    """The one that is farther beyond its bound, or nearer to it."""
    if not one.where or not isfinite(other.difference):
        return other
    return other if isfinite(one.difference) and other.difference * one.allowed > one.difference * other.allowed else one


def _coefficient(parts: list[np.ndarray], decay: float, decayed: bool) -> Held | None:
    """How much less the other side decays, as a share of the decay; None where nothing is to be seen."""
    scale = decay * sum(float(p @ p) for _, p in parts)
    if not scale:
        return None
    found = sum(float(d @ p) for d, p in parts) / scale
    error = sqrt(sum(float(np.square(d * p).sum()) for d, p in parts)) / abs(scale)
    where = f"{len(parts)} tensors {'with' if decayed else 'without'} decay"
    return Held(abs(found), max(TOLD, SIGMAS * error), where)
