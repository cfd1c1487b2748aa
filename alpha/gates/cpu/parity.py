"""The parity gate of a kernel of the CPU: parity.py over the kernel in its own process, and what it does in a long run. Floor 7.

One further entry: a Plan of a drawn number of launches on one input, hundreds, after each of which a drawn element of an output is kept.
All must be those of the first call (`many calls`).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from alpha.component import Component
from alpha.gates import parity
from alpha.gates.cpu import engine
from alpha.gates.cpu.process import Candidate
from alpha.gates.subjects import accepts, bind, case_of, crash, generator, same_bits, samples, spec_of
from alpha.registry.cases import CaseRecord, Exact
from alpha.registry.record import Record

CALLS = (220, 440)
"""The number of calls is drawn between these; of an input of many elements fewer (ELEMENTS)."""

ELEMENTS = 8_000_000
"""Most elements of all operands of these calls together, so that they take some ten milliseconds."""

MANY = "many calls"


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    return engine.measure(component, nonce, _measure)


def _measure(candidate: Candidate, nonce: str) -> Record:
    return parity.measure(candidate.stand_in(), nonce, partial(_long_run, candidate))


def _long_run(candidate: Candidate, component: Component, nonce: str) -> list[CaseRecord]:
    """The further entry."""
    rng = generator(nonce, component.id, MANY)
    dtype, spec = component.envelope.dtypes[0], spec_of(component)
    among = [s for which in ("samples", "exact") for s in samples(component, nonce, which)]
    among = sorted(among, key=lambda s: sum(np.size(x) for x in s.inputs))
    drawn = [among[i] for i in rng.permutation(-(-len(among) // 4))]  # of the smallest quarter
    todo = (case_of(s, dtype, spec=spec) for s in drawn if accepts(component, s, dtype))
    case = next((c for c in todo if any(t.size for t in c.out_types(spec))), None)
    if case is None:
        return [Exact(name=MANY, error=1.0, note="no small sample has an output with an element")]
    try:
        bound, launched = bind(component, case), candidate.latest
        assert launched is not None
        bound.fill(case.arrays())
        bound.run()
        first = [x.copy() for x in bound.outs]
        outputs = [o for o, x in enumerate(first) if x.size]
        calls = max(1, min(int(rng.integers(*CALLS)), ELEMENTS // sum(x.size for x in (*bound.ins, *bound.outs))))
        keeps = [(o, int(rng.integers(first[o].size))) for o in rng.choice(outputs, calls).tolist()]
        for x in bound.outs:
            x[...] = np.ones((), x.dtype)  # in place of poison: what looks like results
        for k, ((o, at), value) in enumerate(zip(keeps, launched.many(keeps), strict=True)):
            want = first[o].reshape(-1)[at]
            if not np.array_equal(np.array(value, want.dtype), want, equal_nan=want.dtype.kind == "f"):
                return [Exact(name=MANY, error=1.0, note=f"call {k + 2} of one input left {value!r} where the first left {want!r}"[:120])]
        return [Exact(name=MANY, error=float(not same_bits(bound.outs, first)))]
    except Exception as error:  # what fails here is the kernel's
        return [Exact(name=MANY, error=1.0, note=crash(error))]


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    return [*parity.listed(component, nonce), (Exact, MANY)]
