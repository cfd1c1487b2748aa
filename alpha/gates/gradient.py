"""The gradient gate: vjps and backward kernels against central differences of the float64 oracle. Floor 7.

The scalar L(x) = sum_o <c_o, y_o(x)> with random cotangents c is differentiated along a direction v by

    D(h) = (L(x + h s v) - L(x - h s v)) / 2h,    s_i = max(|x_i|, median |x|, tiny)

and compared with <g, s v>, where g is the vjp. D(h) = dL + h^2 T / 6 + O(h^4), plus roundoff of about eps A / h with A = sum |c||y|; the
step that balances both is h = eps^(1/3), about 6e-6 of the scale. The tolerance is not set by hand but measured with a second step:
|D(2h) - D(h)| / 3 is the leading truncation term of D(h) (doubled for safety), and eps (64 A + B) / h covers the roundoff of the oracle's
own arithmetic. B = sum |c| b, with the row's bound b: an output that cancels, as GELU's near -3, is rounded where its terms were.

Error and tolerance are both divided by the size of the derivative along all directions of the case. A tolerance above 1e-4 of that size (a
kink, a cancelled sum) would prove nothing, so it counts as 1e-4.

Directions: the full Jacobian (every output, every input) where both sides are tiny, else 8 random ones over all inputs together, and single
coordinates at the edges: first, last, the last row's first, and either side of 64 and 128. Backward kernels are reached through the
forward rows whose vjps emit them: every node of the component's own op is run by its kernel, in f64 (against the differences) and in
the first dtype of its envelope (against the same vjp in oracles, within twice what the row's sequential walk errs there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpha.component import Component
from alpha.gates import evaluate
from alpha.gates.contracts import engine as contracts
from alpha.gates.subjects import (
    Case,
    case_of,
    crash,
    fresh_nonce,
    generator,
    is_gpu,
    make_record,
    once,
    short,
    size,
    spec_of,
    subjects_of,
    warm_up,
)
from alpha.ops.numerics import ACCUMULATE, UNIT_ROUNDOFF, round_to, ulp, walk
from alpha.ops.spec import OpSpec, Sample
from alpha.ops.table import row
from alpha.registry.cases import CaseRecord, Slope
from alpha.registry.judge import GRADIENT_BOUND
from alpha.registry.record import Record
from alpha.types import FLOATS, Attrs, TensorType

EPS = 2.0**-52
STEP = EPS ** (1 / 3)
DIRECTIONS = 8
JACOBIAN = 400
"""Largest (inputs x outputs) for which the whole Jacobian is compared."""

LARGEST_OWN = 40_000
"""The same for samples made for another back end, whose tiles are larger."""

LARGEST = 6000
"""Elements in and out together above which a sample is left to the parity gate."""

CASES_PER_ROW = 10
BOUND_CAP = 1e-4
TELLING = {"f64": 0.01, "f32": 0.01, "bf16": 0.04}
"""Largest tolerance, as a part of the gradient's size, at which a sample still tells a wrong gradient from a rounded one: in bf16 ten
roundings."""

DRAWS = 4
"""Cotangents per sample in the native comparison."""


@dataclass(frozen=True)
class _Worst:
    """The direction with the largest error over bound."""

    error: float = 0.0
    bound: float = BOUND_CAP
    directions: int = 0

    def add(self, error: float, bound: float) -> _Worst:
        bound = min(bound, BOUND_CAP)
        worse = not (error * self.bound <= self.error * bound)
        return _Worst(error if worse else self.error, bound if worse else self.bound, self.directions + 1)


def rows_for(component: Component) -> list[OpSpec]:
    """Forward rows through which a kernel's op is differentiated: its own if it has a vjp, else those whose vjps emit it."""
    own = spec_of(component)
    if own.vjp is not None:
        return [own]
    return [row(name) for name, ops in sorted(evaluate.emitted().items()) if own.name in ops]


def differentiable(spec: OpSpec, sample: Sample) -> tuple[int, ...]:
    """Indices of the operands that the gate perturbs."""
    names = [n.strip("?*") for n in spec.inputs]
    if sample.wrt is not None:
        return tuple(sample.wrt)
    return tuple(i for i, x in enumerate(sample.inputs) if np.asarray(x).dtype.kind == "f" and np.size(x)
                 and names[min(i, len(names) - 1)] not in spec.undifferentiable)


def chosen(spec: OpSpec, nonce: str, component: Component | None = None) -> list[Sample]:
    """The samples of a forward row that are differentiated: the small ones, at most ten, spread over the row's own order. For a kernel
    of another back end: those made for it, where there are any."""
    def fits(s: Sample) -> bool:
        types = case_of(s, "f64").types
        return bool(differentiable(spec, s)) and size(types) + size(spec.infer(types, s.attrs)) <= (LARGEST if not own else LARGEST_OWN)

    own = []
    if component is not None and is_gpu(component):
        own = subjects_of(component).differentiated(component, spec.name, generator(nonce, spec.name, "gradient", component.backend))
    found = [s for s in own or spec.samples(generator(nonce, spec.name, "gradient")) if fits(s)]
    if len(found) > CASES_PER_ROW:
        keep = generator(nonce, spec.name, "chosen").permutation(len(found))[:CASES_PER_ROW]
        found = [found[i] for i in sorted(keep)]
    return found


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    nonce = nonce or fresh_nonce()
    if component.kind != "kernel":
        return contracts.measure(component, "gradient", nonce)
    warm_up(component)
    found: list[Slope] = []
    declared = 0
    kinds = ["oracle"] + (["kernel"] if "f64" in component.envelope.dtypes else [])
    for spec in rows_for(component):
        todo = chosen(spec, nonce, component)
        for sample in todo:
            declared += len(kinds)
            try:
                found += _case(component, spec, sample, nonce, kinds)
            except Exception as error:  # a vjp or kernel that raises has no gradient to offer
                found += [Slope(name=f"{spec.name}/{sample.name}:{k}", error=float("inf"), bound=BOUND_CAP, directions=0,
                                note=crash(error)) for k in kinds]
        if todo:
            declared += 1
            found.append(_native(component, spec, todo, nonce))
    return make_record(component, "gradient", nonce, declared, found)


def _case(component: Component, spec: OpSpec, sample: Sample, nonce: str, kinds: Sequence[str]) -> list[Slope]:
    rng = generator(nonce, spec.name, sample.name, "directions")
    case = case_of(sample, "f64")
    wrt = differentiable(spec, sample)
    at = evaluate.node(spec, case.inputs, case.types, case.attrs)
    floats = [spec.takes_cotangent(i, o.type) for i, o in enumerate(at.outputs)]
    n_in, n_out = sum(np.size(case.inputs[i]) for i in wrt), sum(o.type.size for o, f in zip(at.outputs, floats) if f)
    tiny = n_in * n_out <= JACOBIAN
    cotangents = _units(at, floats) if tiny else [[rng.standard_normal(o.type.shape) for o in at.outputs] for _ in range(2)]
    vjps = {"oracle": [evaluate.vjp(spec, at, c, evaluate.oracles) for c in cotangents]}
    if "kernel" in kinds:
        vjps["kernel"] = [evaluate.vjp(spec, at, c, _with_kernel(component, "f64")) for c in cotangents]
    directions = _coordinates(case, wrt) if tiny else _directions(case, wrt, rng)
    worst = {k: _Worst() for k in vjps}
    table: dict[str, list[tuple[float, float, float]]] = {k: [] for k in vjps}
    scales = {i: _scale(case.inputs[i]) for i in wrt}
    bounds = spec.bound(case.inputs, case.attrs) if spec.bound else [0.0] * len(at.outputs)
    for v in directions:
        coarse, fine = (_difference(spec, case, wrt, scales, v, at, h) for h in (2 * STEP, STEP))
        for j, c in enumerate(cotangents):
            d2, d1 = (sum(float(np.sum(cj * dy)) for cj, dy, f in zip(c, d, floats) if f) for d in (coarse, fine))
            size_y = sum(float(np.sum(np.abs(cj) * np.abs(o.array))) for cj, o, f in zip(c, at.outputs, floats) if f)
            size_b = sum(float(np.sum(np.abs(cj) * b, where=cj != 0)) for cj, b, f in zip(c, bounds, floats) if f)
            tolerance = 2 * abs(d2 - d1) / 3 + EPS * (64 * size_y + size_b) / STEP
            # x + h s v is itself rounded: by at most eps |x| on either side
            moved = sum(float(np.sum(np.abs(g * np.nan_to_num(case.inputs[i])) * (v[i] != 0))) for i in wrt
                        if (g := vjps["oracle"][j][i]) is not None)
            for k, gs in vjps.items():
                along = sum(float(np.sum(np.nan_to_num(scales[i] * v[i]) * g)) for i in wrt if (g := gs[j][i]) is not None)
                table[k].append((along, d1, tolerance + EPS / STEP * moved))
    found = []
    for k, entries in table.items():
        # the derivative's own scale, per case: its root mean square along all directions
        scale = float(np.sqrt(np.mean([d * d for _, d, _ in entries]))) or 1.0
        for along, d, tolerance in entries:
            worst[k] = worst[k].add(abs(along - d) / scale, tolerance / scale)
        found.append(_entry(f"{spec.name}/{sample.name}:{k}", worst[k]))
    return found


def _entry(name: str, worst: _Worst) -> Slope:
    return Slope(name=name, error=short(worst.error, 3), bound=short(worst.bound, 3), directions=worst.directions)


def _native(component: Component, spec: OpSpec, todo: Sequence[Sample], nonce: str) -> Slope:
    """The vjp with the component's kernel in its first dtype, against the same vjp in oracles on the same rounded inputs: one entry per
    row, the sample with the largest error over tolerance. Samples on which the sequential walk itself errs by more than 1 % of the
    gradient's size are left out (they show nothing); at least one must remain.
    """
    name = f"{spec.name}:native"
    worst, told = _Worst(0.0, GRADIENT_BOUND, 0), 0
    for sample in todo:
        ran: list[str] = []
        try:
            error, bound = _native_sample(component, spec, sample, nonce, ran)
        except Exception as problem:  # a kernel that raises has no gradient to offer
            return Slope(name=name, error=float("inf"), bound=BOUND_CAP, directions=1, note=f"{sample.name}: {crash(problem)}")
        emits = component.op in evaluate.emitted()[spec.name]
        if bound <= TELLING[component.envelope.dtypes[0]] and (ran or not emits or not is_gpu(component)):
            # outside the envelope the oracle stood in for the kernel
            told += 1
            worse = not (error * worst.bound <= worst.error * bound)
            worst = _Worst(error if worse else worst.error, bound if worse else worst.bound, worst.directions + DRAWS)
    return _entry(name, worst) if told else Slope(name=name, error=float("inf"), bound=BOUND_CAP, directions=1,
                                             note="no sample tells a wrong gradient from a rounded one")


def _native_sample(component: Component, spec: OpSpec, sample: Sample, nonce: str, ran: list[str]) -> tuple[float, float]:
    """(error, tolerance) of one sample, both over the gradient's largest element; `ran` receives the op at each call of the kernel.

    Tolerance: twice the largest error, over the same draws of the cotangents, of the vjp whose own nodes are walked sequentially in
    that dtype, plus the row's own bound and one rounding of the result.
    """
    dtype = component.envelope.dtypes[0]
    case = case_of(sample, dtype, spec=spec)
    rng = generator(nonce, spec.name, sample.name, "native")
    at = evaluate.node(spec, case.inputs, case.types, case.attrs)
    errors, naive, scales = [], [], []
    u = UNIT_ROUNDOFF[ACCUMULATE[dtype]]
    for _ in range(DRAWS):
        c = [round_to(rng.standard_normal(o.type.shape), dtype) for o in at.outputs]
        slack: list[float] = []
        want = evaluate.vjp(spec, at, c, evaluate.oracles)
        got = evaluate.vjp(spec, at, c, _with_kernel(component, dtype, ran))
        walked = evaluate.vjp(spec, at, c, _walking(component, dtype, slack))
        for w, g, n in zip(want, got, walked):
            if w is None or g is None or n is None:
                continue
            size_w = float(np.max(np.abs(w), initial=0.0))
            scales.append(size_w)
            with np.errstate(all="ignore"):
                errors.append(float(np.max(np.where(g == w, 0.0, np.abs(g - w)), initial=0.0)))
                walked_error = float(np.max(np.where(n == w, 0.0, np.abs(n - w)), initial=0.0))
            naive.append(walked_error + 0.5 * float(ulp(np.asarray(size_w), dtype)) + u * sum(slack))
    scale = max(scales, default=0.0) or 1.0
    finite = all(np.isfinite(e) for e in errors)
    return (max(errors, default=0.0) / scale if finite else float("inf")), 2 * max(naive, default=0.0) / scale


def _with_kernel(component: Component, dtype: str, ran: list[str] | None = None) -> evaluate.Runner:
    """Runner: nodes of the component's op by its kernel in `dtype` (oracle where a call lies outside the envelope), others by oracles."""

    def run(op: str, inputs: Sequence[evaluate.Value], attrs: Attrs, types: Sequence[TensorType]) -> Sequence[np.ndarray]:
        if op != component.op:
            return evaluate.oracles(op, inputs, attrs, types)
        spec = row(op)
        held = tuple(TensorType(x.type.shape, spec.operand_dtype(i, dtype) if x.type.is_float else x.type.dtype)
                     for i, x in enumerate(inputs))
        if component.envelope.why_outside(held, attrs) is not None:
            return evaluate.oracles(op, inputs, attrs, types)
        arrays = tuple(round_to(x.array, t.dtype) if t.dtype in FLOATS else x.array for x, t in zip(inputs, held))
        if ran is not None:
            ran.append(op)
        outs = once(component, Case("vjp", dtype, False, arrays, held, attrs))
        return [np.asarray(y, np.float64) if y.dtype.kind == "f" else y for y in outs]

    return run


def _walking(component: Component, dtype: str, slack: list[float]) -> evaluate.Runner:
    """Runner: nodes of the component's op by the row's sequential walk in `dtype`; their bounds are added to `slack`."""

    def run(op: str, inputs: Sequence[evaluate.Value], attrs: Attrs, types: Sequence[TensorType]) -> Sequence[np.ndarray]:
        if op != component.op:
            return evaluate.oracles(op, inputs, attrs, types)
        spec = row(op)
        arrays = tuple(round_to(x.array, x.type.dtype) if x.type.is_float else x.array for x in inputs)
        if spec.bound is not None:
            slack.extend(float(np.max(np.abs(b), initial=0.0)) for b in spec.bound(arrays, attrs))
        return walk(spec.oracle, dtype, arrays, attrs, mixed=dtype)

    return run


def _scale(x: np.ndarray) -> np.ndarray:
    finite = np.where(np.isfinite(x), np.abs(x), 0.0)
    middle = float(np.median(finite)) if finite.size else 0.0
    return np.maximum(finite, middle or float(finite.max(initial=0.0)) or 1.0)


def _difference(spec: OpSpec, case: Case, wrt: Sequence[int], scales: dict[int, np.ndarray], v: dict[int, np.ndarray], at: evaluate.Node,
                h: float) -> list[np.ndarray]:
    """Central difference of every float output along v with step h."""
    def shifted(sign: float) -> list[np.ndarray]:
        inputs = list(case.inputs)
        for i in wrt:
            inputs[i] = inputs[i] + sign * h * scales[i] * v[i]
        with np.errstate(all="ignore"):
            return [np.asarray(y) for y in spec.oracle(*inputs, **case.attrs)]

    with np.errstate(all="ignore"):
        return [(p - m) / (2 * h) if p.dtype.kind == "f" else np.zeros(o.type.shape)
                for p, m, o in zip(shifted(1.0), shifted(-1.0), at.outputs)]


def _units(at: evaluate.Node, floats: Sequence[bool]) -> list[list[np.ndarray]]:
    """One cotangent per output element."""
    found = []
    for o, (value, is_float) in enumerate(zip(at.outputs, floats)):
        for j in range(value.type.size if is_float else 0):
            c = [np.zeros(x.type.shape) for x in at.outputs]
            c[o].reshape(-1)[j] = 1.0
            found.append(c)
    return found


def _coordinate(case: Case, wrt: Sequence[int], which: int, flat: int) -> dict[int, np.ndarray]:
    v = {i: np.zeros(np.shape(case.inputs[i])) for i in wrt}
    v[which].reshape(-1)[flat] = 1.0
    return v


def _coordinates(case: Case, wrt: Sequence[int]) -> list[dict[int, np.ndarray]]:
    """Every input element on its own."""
    return [_coordinate(case, wrt, i, j) for i in wrt for j in range(np.size(case.inputs[i])) if np.isfinite(case.inputs[i].flat[j])]


def _directions(case: Case, wrt: Sequence[int], rng: np.random.Generator) -> list[dict[int, np.ndarray]]:
    """Random directions over all operands, one per operand alone, and the edges."""
    def dense(only: Sequence[int]) -> dict[int, np.ndarray]:
        return {i: np.where(np.isfinite(case.inputs[i]), rng.standard_normal(np.shape(case.inputs[i])), 0.0) * (i in only) for i in wrt}

    found = [dense(wrt) for _ in range(DIRECTIONS)]
    for i in wrt:
        if len(wrt) > 1:
            found.append(dense([i]))
        n, last = np.size(case.inputs[i]), np.shape(case.inputs[i])[-1] if np.ndim(case.inputs[i]) else 1
        for flat in sorted({0, n - 1, n - last} | {e for e in (63, 64, 127, 128) if e < n}):
            if np.isfinite(case.inputs[i].flat[flat]):
                found.append(_coordinate(case, wrt, i, flat))
    return found


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    kinds = ["oracle"] + (["kernel"] if "f64" in component.envelope.dtypes else [])
    names: list[str] = []
    for spec in rows_for(component):
        todo = chosen(spec, nonce, component)
        names += [f"{spec.name}/{sample.name}:{kind}" for sample in todo for kind in kinds] + [f"{spec.name}:native"] * bool(todo)
    return [(Slope, name) for name in names]
