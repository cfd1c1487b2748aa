"""The determinism gate of a kernel of the CPU: the same bits, run after run, whatever moves around the kernel. Floor 7.

As determinism.py, over the kernel in its own process (process.py). What varies between runs: the number of workers (1, 2 and one that is
drawn up to the most that a run is likely to have, the most itself with the first case), the addresses of every buffer (0 to 7 elements
past a drawn 256-byte boundary, or on one as in the arena of a run), the garbage in outputs and scratch, a neighbour thread, and the order
of the cases. One case is so large that the kernel shares it among workers, if it ever does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from alpha.component import Component
from alpha.gates.cpu import engine
from alpha.gates.cpu.process import Candidate
from alpha.gates.determinism import GARBAGE, SECONDS, difference, neighbour
from alpha.gates.determinism import chosen as small
from alpha.gates.subjects import (
    Bound,
    Case,
    accepts,
    bind,
    case_of,
    checksum,
    crash,
    generator,
    grow,
    make_record,
    pin_blas,
    same_bits,
    samples,
    spec_of,
)
from alpha.registry.cases import CaseRecord, Repeats
from alpha.registry.policy import required_runs
from alpha.registry.record import Record

MOST_RUNS = 76
"""Of a case: four have more than the 300 that find a flake of 1 % with 95 % probability."""
MOST_WORKERS = 16
"""The most workers of a run on one socket, about: bits do not depend on them."""

SHARED = {"elements": 1 << 20, "flops": 1 << 26, "most": 1 << 20}
"""How far the shared case grows, in and out together: a single pass is not shared up to 2^18 elements (backends/cpu/blocks.py), and a
kernel has up to four operands of that size."""

BESIDE = 3
"""Cases beside which a thread of the gate works: the first, which are the large ones."""

CYCLE = 16
"""Of so many runs the first few are on fresh buffers, one for each number of workers; the others reuse them."""

AGAIN = (0.4, 0.4, 0.2)
"""How often the buffers of each number of workers are used again: threads that wait for work take time too."""


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    return engine.measure(component, nonce, _measure)


def _measure(candidate: Candidate, nonce: str) -> Record:
    pin_blas()
    component, candidate.afresh = candidate.component, True
    todo = chosen(component, nonce)
    least = -(-required_runs(component, "determinism") // max(1, len(todo)))
    rng = generator(nonce, component.id, "determinism")
    found, drawn = [], int(rng.integers(3, MOST_WORKERS))
    for i, case in enumerate(todo):
        try:
            with neighbour(int(rng.integers(2**31))) if i < BESIDE else nullcontext():
                found.append(_repeat([candidate.stand_in(n) for n in (1, 2, drawn if i else MOST_WORKERS)], case, rng, least))
        except Exception as error:  # a kernel that raises has no bits to compare
            found.append(Repeats(name=case.name, runs=0, distinct=0, digest="", note=crash(error)))
    return make_record(component, "determinism", nonce, len(todo), found, workers=f"1,2,{drawn},{MOST_WORKERS}")


def chosen(component: Component, nonce: str) -> list[Case]:
    """The shared one, where a sample grows so far; those that the kernel names; up to four small ones."""
    spec, dtype = spec_of(component), component.envelope.dtypes[0]
    inside = [s for s in samples(component, nonce, "samples") if accepts(component, s, dtype)]
    grown = grow(component, inside, generator(nonce, component.id, "shared"), **SHARED)  # type: ignore[arg-type]
    large = [] if grown is None else [case_of(grown, dtype, spec=spec, name="shared")]
    if component.calls is not None:
        large += [case_of(s, dtype, spec=spec) for s in component.calls.repeated(generator(nonce, component.id, "repeated"))]
    return list({c.name: c for c in (*large, *small(component, nonce))}.values())


def _repeat(components: Sequence[Component], case: Case, rng: np.random.Generator, least: int) -> Repeats:
    contents = case.arrays()
    digests: dict[str, int] = {}
    reference: list[np.ndarray] = []
    note, runs, started = "", 0, time.perf_counter()
    bounds: list[Bound] = []
    while runs < least or (runs < MOST_RUNS and time.perf_counter() - started < SECONDS):
        fresh = runs % CYCLE
        if fresh < len(components):
            offset = int(rng.integers(8)) if rng.random() < 0.5 else 0
            bounds = [*bounds[-2:], bind(components[fresh], case, offset=offset)]
            bounds[-1].fill(contents)
        bound = bounds[-1] if fresh < len(components) else bounds[int(rng.choice(len(bounds), p=AGAIN))]
        bound.run(GARBAGE[int(rng.integers(len(GARBAGE)))])
        runs += 1
        if reference and same_bits(bound.outs, reference):
            digests[next(iter(digests))] += 1
            continue
        digest = checksum(bound.outs)[:16]
        digests[digest] = digests.get(digest, 0) + 1
        if not reference:
            reference = [x.copy() for x in bound.outs]
        elif not note:
            note = difference(spec_of(components[0]).outputs, reference, bound.outs)
    return Repeats(name=case.name, runs=runs, distinct=len(digests), digest=next(iter(digests)), note=note)


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    return [(Repeats, case.name) for case in chosen(component, nonce)]
