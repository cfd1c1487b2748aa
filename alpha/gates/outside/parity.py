"""The parity gate of an outside candidate: parity.py over its process, and what it does when nobody seems to look. Floor 7.

Further entries: a number of calls that is drawn, with the outputs full of ordinary-looking numbers, must each give the first call's bits
(`many calls`); where one element is changed, outputs must change if the oracle's do (`one element`); outputs must stand as they are while
the process goes on by itself (`late writes`); no thread or process may be left behind (`left running`).
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from alpha.component import Component
from alpha.gates import parity
from alpha.gates.outside.process import SETTLE, ordinary, running
from alpha.gates.subjects import Case, bind, cases, checksum, crash, fresh_nonce, generator, spec_of
from alpha.registry.cases import CaseRecord, Exact
from alpha.registry.record import Record

CALLS = (40, 400)
"""The number of further calls is drawn between these."""

ELEMENTS = 8
"""Elements that are changed, one after the other."""

CHANGE, SMALL = 0.05, 1e-30
"""Change of an output by the oracle, as a part of its largest element, that no type rounds away where that is not below SMALL."""


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    nonce = nonce or fresh_nonce()
    return parity.measure(component, nonce, behaviours)


def behaviours(component: Component, nonce: str) -> list[CaseRecord]:
    """The further entries."""
    rng, process = generator(nonce, component.id, "behaviours"), running(component)
    counts, notes = dict.fromkeys(("many calls", "one element", "late writes", "left running"), 0.0), {"many calls": ""}
    todo = sorted(cases(component, nonce), key=lambda c: sum(np.size(x) for x in c.inputs))
    if not todo:
        return [Exact(name="cases", error=1.0, note="no sample lies within the declared sizes")]
    case = todo[len(todo) // 2]
    try:
        bound = bind(component, case)
        bound.fill(case.arrays())
        bound.run()
        first = checksum(bound.outs)
        for i in range(int(rng.integers(*CALLS))):
            for out in bound.outs:
                out[...] = ordinary(rng, out)
            bound.call()
            if checksum(bound.outs) != first and not notes["many calls"]:
                counts["many calls"], notes["many calls"] = 1.0, f"other outputs than the first call's at call {i + 2} of one input"
        for i in rng.integers(len(todo) // 2, len(todo), ELEMENTS):
            counts["one element"] += _deaf(component, todo[i], rng)
        before = checksum(bound.outs)
        time.sleep(SETTLE)
        bound.candidate.fetch([bound.number])
        counts["late writes"] = float(checksum(bound.outs) != before)
        counts["left running"] = float(max(0, process.tasks() - process.threads))
    except Exception as error:  # what fails here is the candidate's
        counts["many calls"], notes["many calls"] = 1.0, crash(error)
    return [Exact(name=name, error=n, note=notes.get(name, "")) for name, n in counts.items()]


def _deaf(component: Component, case: Case, rng: np.random.Generator) -> bool:
    """Whether outputs keep their bits though one element of an input changed and the oracle's outputs with it."""
    spec, bound, contents = spec_of(component), bind(component, case), case.arrays()
    bound.fill(contents)
    bound.run()
    before = checksum(bound.outs)
    x = contents[int(rng.choice([i for i, x in enumerate(contents) if x.dtype.kind == "f" and x.size]))]
    x.reshape(-1)[rng.integers(x.size)] += x.dtype.type(1)
    moved = replace(case, inputs=tuple(np.asarray(y, np.float64) if y.dtype.kind == "f" else y for y in contents))
    with np.errstate(all="ignore"):
        far = any(np.any(np.abs(v - w) > CHANGE * np.max(np.abs(w))) for v, w in zip(moved.oracle(spec), case.oracle(spec))
                  if w.dtype.kind == "f" and w.size and SMALL < np.max(np.abs(w)) < 1 / SMALL)
    bound.fill(contents)
    bound.run()
    return far and checksum(bound.outs) == before
