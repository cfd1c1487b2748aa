"""The parity gate of a kernel of the CPU: parity.py over its process, and what it does in a long run. Floor 7.

One further entry: a Plan of a drawn number of launches on one input, hundreds, after each of which a drawn element of an output is kept.
All must be those of the first call (`many calls`).
"""

from __future__ import annotations

import numpy as np

from alpha.component import Component
from alpha.gates import parity
from alpha.gates.cpu.process import ordinary
from alpha.gates.subjects import bind, cases, crash, fresh_nonce, generator, same_bits, spec_of
from alpha.registry.cases import CaseRecord, Exact
from alpha.registry.record import Record

CALLS = (400, 1600)
"""The number of calls is drawn between these; of an input of many elements fewer (ELEMENTS)."""

ELEMENTS = 4_000_000
"""Most elements of all operands of these calls together, so that they take some ten milliseconds."""

MANY = "many calls"


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    nonce = nonce or fresh_nonce()
    return parity.measure(component, nonce, many)


def many(component: Component, nonce: str) -> list[CaseRecord]:
    """The further entry."""
    rng = generator(nonce, component.id, MANY)
    among = cases(component, nonce)
    sizes = {c.name: sum(t.size for t in c.out_types(spec_of(component))) for c in among}
    todo = sorted((c for c in among if sizes[c.name]), key=lambda c: sum(t.size for t in c.types) + sizes[c.name])
    if not todo:
        return [Exact(name=MANY, error=1.0, note="no sample has an output with an element")]
    case = todo[int(rng.integers(-(-len(todo) // 4)))]
    try:
        bound = bind(component, case)
        bound.fill(case.arrays())
        bound.run()
        first = [x.copy() for x in bound.outs]
        size = sum(x.size for x in (*bound.ins, *bound.outs))
        calls = max(1, min(int(rng.integers(*CALLS)), ELEMENTS // size))
        for out in bound.outs:
            ordinary(out)
        having = [i for i, x in enumerate(first) if x.size]
        keeps = [(o, int(rng.integers(first[o].size))) for o in rng.choice(having, calls).tolist()]
        bound.candidate.batch([(bound.number, (), keep) for keep in keeps])
        seen = bound.candidate.ask("seen")
        for k, ((o, i), value) in enumerate(zip(keeps, seen, strict=True)):
            want = first[o].reshape(-1)[i]
            if not np.array_equal(np.array(value, want.dtype), want, equal_nan=want.dtype.kind == "f"):
                return [Exact(name=MANY, error=1.0, note=f"call {k + 2} of one input left {value!r} where the first left {want!r}"[:120])]
        return [Exact(name=MANY, error=float(not same_bits(bound.outs, first)))]
    except Exception as error:  # what fails here is the kernel's
        return [Exact(name=MANY, error=1.0, note=crash(error))]


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    return [*parity.listed(component, nonce), (Exact, MANY)]
