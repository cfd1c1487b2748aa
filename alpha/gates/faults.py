"""The fault gate: misuse is refused before anything runs, non-finite values are not swallowed, inputs are never written. Floor 7.

Each check is one case with error 0 (held) or 1 (broken). For kernels:

misuse   an element type outside the envelope, mixed element types, and each operand with a longer last axis or one axis more: the
         envelope or the row's shape rule says no with a ShapeError that names what came; a shape that both accept must be computed
         right, so it is run and its outputs compared with the oracle's in shape
nan, inf one element of one operand becomes NaN, then infinite. Nothing is lost: an output that depends on that element by the oracle is
         non-finite where the oracle's is. Nothing leaks: an output that does not depend on it stays finite, unless it only met the
         element as 0 * NaN, in a product over masked elements (then no finite value of the element moves a bit of it)
inputs   buffers that held these contents are unchanged after the call
contents of kernels that look at them (ids, targets): what is out of range is an InputError, and no output was written by then
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from alpha.component import Component
from alpha.errors import InputError, ShapeError
from alpha.gates.contracts import engine as contracts
from alpha.gates.subjects import (
    Case,
    bind,
    case_of,
    cases,
    checksum,
    crash,
    fresh_nonce,
    generator,
    make_record,
    once,
    spec_of,
    subjects_of,
    warm_up,
)
from alpha.ops.numerics import round_to
from alpha.ops.spec import OpSpec, Sample
from alpha.registry.cases import CaseRecord, Refusal
from alpha.registry.record import Record
from alpha.types import ITEMSIZE, NUMPY, TensorType

CASES_PER_KERNEL = 6


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    nonce = nonce or fresh_nonce()
    if component.kind != "kernel":
        return contracts.measure(component, "faults", nonce)
    warm_up(component)
    todo = _chosen(component, nonce)
    found = []
    for name, problems in (("dtype refused", _dtypes(component, todo)), ("shape refused", _shapes(component, todo)),
                           *_non_finite(component, todo, nonce)):
        found.append(Refusal(name=name, error=float(bool(problems)), bound=0.0, note=problems[0][:120] if problems else ""))
    declared = 5
    if wrong := subjects_of(component).refused(component, generator(nonce, component.id, "contents")):
        problems = [why for sample in wrong if (why := _taken(component, sample))]
        found.append(Refusal(name="contents refused", error=float(bool(problems)), bound=0.0, note=problems[0][:120] if problems else ""))
        declared += 1
    return make_record(component, "faults", nonce, declared, found if todo else [])


def _chosen(component: Component, nonce: str) -> list[Case]:
    """Samples in the first dtype that the nonce chooses, each set of attributes once before any comes again (they decide which code runs);
    exact ones where the row has no others."""
    first = [c for c in cases(component, nonce) if c.dtype == component.envelope.dtypes[0] and not c.name.startswith("grown:")]
    first = [c for c in first if all(np.size(x) for x in c.inputs)]
    drawn = [first[i] for i in generator(nonce, component.id, "faults").permutation(len(first))]
    seen = [repr(sorted(c.attrs.items(), key=lambda item: item[0])) for c in drawn]
    again = sorted(range(len(drawn)), key=lambda i: seen[:i].count(seen[i]))
    return [drawn[i] for i in again[:CASES_PER_KERNEL]]


def _refusal(component: Component, spec: OpSpec, types: Sequence[TensorType], case: Case) -> str | None:
    """How a call is refused before it runs; None if it is accepted. Anything but a ShapeError propagates."""
    try:
        spec.infer(list(types), case.attrs)
    except ShapeError as error:
        return str(error)
    return component.envelope.why_outside(types, case.attrs)


def _dtypes(component: Component, todo: Sequence[Case]) -> list[str]:
    """Element types that should have been refused and were not, or with the wrong error."""
    problems = []
    spec = spec_of(component)
    outside = [d for d in ITEMSIZE if d not in component.envelope.dtypes]
    for case in todo:
        floats = [i for i, t in enumerate(case.types) if t.is_float]
        trials = [[TensorType(t.shape, d) if t.is_float else t for t in case.types] for d in outside if floats]
        trials += [[TensorType(t.shape, "f64" if t.dtype == "f32" else "f32") if i == k else t for i, t in enumerate(case.types)]
                   for k in floats if len(floats) > 1]
        trials += [[TensorType(t.shape, "f32") if i == k else t for i, t in enumerate(case.types)]
                   for k, x in enumerate(case.types) if not x.is_float]
        for types in trials:
            try:
                refused = _refusal(component, spec, types, case)
            except Exception as error:  # the wrong error: it names no operand
                problems.append(f"{case.name} {', '.join(map(str, types))}: {crash(error)}")
                continue
            if refused is None and (any(t.is_float for t in types) or not _moves(component, spec, case, types)):
                problems.append(f"{case.name}: {', '.join(map(str, types))} was accepted")
    return problems


def _taken(component: Component, sample: Sample) -> str:
    """Why contents out of range do not count as refused; '' when they do."""
    bound = bind(component, case_of(sample, component.envelope.dtypes[0], spec=spec_of(component)))
    bound.fill([np.asarray(x) for x in sample.inputs])
    try:
        bound.run(garbage=0xFF)
    except InputError:
        return "" if all(y.tobytes() == b"\xff" * y.nbytes for y in bound.outs) else f"{sample.name}: refused after an output was written"
    except Exception as error:  # the wrong error: it does not say what came
        return f"{sample.name}: {crash(error)}"
    return f"{sample.name} was accepted"


def _moves(component: Component, spec: OpSpec, case: Case, types: Sequence[TensorType]) -> bool:
    """Whether a kernel that accepts integers (it only moves elements) gives the oracle's integers."""
    inputs = tuple(np.arange(t.size).reshape(t.shape).astype(NUMPY[t.dtype]) for t in types)
    whole = replace(case, inputs=inputs, types=tuple(types))
    bound = bind(component, whole)
    bound.fill(whole.arrays())
    bound.run()
    return all(np.array_equal(w, y) and w.dtype == y.dtype for w, y in zip(whole.oracle(spec), bound.outs))


def _shapes(component: Component, todo: Sequence[Case]) -> list[str]:
    """Shapes that were refused with the wrong error, or accepted by the shape rule and then not computed."""
    problems = []
    spec = spec_of(component)
    for case in todo:
        for k, t in enumerate(case.types):
            for shape in ((*t.shape[:-1], t.shape[-1] + 1) if t.shape else (2,), (*t.shape, 2), t.shape[1:] if t.shape else (3, 3)):
                types = [TensorType(tuple(shape), x.dtype) if i == k else x for i, x in enumerate(case.types)]
                try:
                    if _refusal(component, spec, types, case) is None:
                        problems += _accepted(component, spec, case, k, tuple(shape))
                except Exception as error:  # neither refused with a ShapeError nor computed
                    problems.append(f"{case.name} {', '.join(map(str, types))}: {crash(error)}")
    return problems


def _accepted(component: Component, spec: OpSpec, case: Case, k: int, shape: tuple[int, ...]) -> list[str]:
    """Run a call that the rules accept: no element may stay unwritten where the oracle has a value."""
    inputs = list(case.inputs)
    inputs[k] = np.resize(inputs[k], shape)
    legal = replace(case, inputs=tuple(inputs), types=tuple(replace(t, shape=shape) if i == k else t for i, t in enumerate(case.types)))
    want = legal.oracle(spec)
    bound = bind(component, legal)
    bound.fill(legal.arrays())
    bound.run()
    for name, w, y in zip(spec.outputs, want, bound.outs):
        if w.shape != y.shape:
            return [f"{case.name}: {name} of shape {list(shape)} operand {k}: rule says {list(y.shape)}, oracle gives {list(w.shape)}"]
        if y.dtype.kind == "f" and not np.array_equal(np.isfinite(round_to(w, "f32")), np.isfinite(y)):
            return [f"{case.name}: {name} left unwritten for operand {k} of shape {list(shape)}"]
    return []


def _non_finite(component: Component, todo: Sequence[Case], nonce: str) -> list[tuple[str, list[str]]]:
    """Three checks: NaN, infinity, inputs."""
    spec = spec_of(component)
    rng = generator(nonce, component.id, "non-finite")
    problems: dict[str, list[str]] = {"nan propagates": [], "inf propagates": [], "inputs unchanged": []}
    for case in todo:
        for k, t in enumerate(case.types):
            if not t.is_float or not t.size:
                continue
            for name, bad in (("nan propagates", np.nan), ("inf propagates", np.inf)):
                at = int(rng.integers(t.size))
                struck = _strike(case, k, at, bad)
                try:
                    bound = bind(component, struck)
                    bound.fill(struck.arrays())
                    before = checksum(bound.ins)
                    bound.run()
                except Exception as error:  # non-finite data is data: nothing may raise
                    problems[name].append(f"{case.name}: {crash(error)}")
                    continue
                if checksum(bound.ins) != before:
                    problems["inputs unchanged"].append(f"{case.name}: operand {spec.inputs[min(k, len(spec.inputs) - 1)]}")
                problems[name] += _swallowed(component, spec, case, struck, k, at, bound.outs)
    return list(problems.items())


def _strike(case: Case, k: int, at: int, value: float) -> Case:
    inputs = list(case.inputs)
    inputs[k] = np.array(inputs[k], np.float64)
    inputs[k].reshape(-1)[at] = value
    return replace(case, inputs=tuple(inputs))


def _unmoved(component: Component, case: Case, k: int, at: int, old: float, output: int, where: np.ndarray) -> np.ndarray:
    """Which of some output elements keep their bits when the struck element becomes another finite number."""
    before = once(component, case)[output].reshape(-1)[where]
    after = once(component, _strike(case, k, at, old + 1.0))[output].reshape(-1)[where]
    return np.asarray(before == after)


def _swallowed(component: Component, spec: OpSpec, case: Case, struck: Case, k: int, at: int, outs: Sequence[np.ndarray]) -> list[str]:
    """Compare finiteness with the oracle's, at the outputs that depend on the struck element."""
    want = struck.oracle(spec)
    clean = case.oracle(spec)
    old = float(np.asarray(case.inputs[k]).reshape(-1)[at])
    moved = [_strike(case, k, at, value).oracle(spec) for value in (old + 1.0, 0.5 - old)]
    found = []
    for o, (name, w, y) in enumerate(zip(spec.outputs, want, outs)):
        if y.dtype.kind != "f":
            continue
        dtype = case.out_types(spec)[o].dtype
        depends = (moved[0][o] != clean[o]) | (moved[1][o] != clean[o])
        finite, got = np.isfinite(round_to(w, dtype)), np.isfinite(y)
        lost, leaked = np.flatnonzero(~finite & got & depends), np.flatnonzero(finite & ~got & ~depends)
        if leaked.size:
            leaked = leaked[[not same for same in _unmoved(component, case, k, at, old, o, leaked)]]
        if lost.size:
            found.append(f"{case.name}: {name} flat {int(lost[0])} is {y.reshape(-1)[lost[0]]!r}, the oracle {w.reshape(-1)[lost[0]]!r}")
        if leaked.size:
            found.append(f"{case.name}: {name} flat {int(leaked[0])} is not finite, the oracle is")
    return found


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    names = ["dtype refused", "shape refused", "nan propagates", "inf propagates", "inputs unchanged"]
    if subjects_of(component).refused(component, generator(nonce, component.id, "contents")):
        names.append("contents refused")
    return [(Refusal, name) for name in names]
