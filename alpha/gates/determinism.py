"""The determinism gate: the same bits, run after run, whatever moves around the kernel. Floor 7.

What varies between runs: the number of workers (1, 2, 3), the addresses of every buffer (fresh allocations, 0 to 7 elements past a
256-byte boundary), the garbage in outputs and scratch, a neighbour thread that works and sleeps at random, and the order of the cases.
What may not vary: any bit of any output. On a difference the first differing coordinate, byte and values stand in the case's note.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from alpha.component import Component
from alpha.gates.contracts import engine as contracts
from alpha.gates.subjects import (
    Bound,
    Case,
    bind,
    cases,
    checksum,
    crash,
    fresh_nonce,
    generator,
    make_record,
    pin_blas,
    same_bits,
    spec_of,
    subjects_of,
)
from alpha.registry.cases import CaseRecord, Repeats
from alpha.registry.policy import required_runs
from alpha.registry.record import Record

SECONDS = 0.15
"""Time after which a case stops repeating, once it has the runs it owes."""

MOST_RUNS = 200
WORKERS = (1, 2, 3)
GARBAGE = (0xFF, 0x00, 0x7B)


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    nonce = nonce or fresh_nonce()
    if component.kind != "kernel":
        return _contract(component, nonce)
    pin_blas()
    subjects_of(component).warm_up(*WORKERS)
    todo = chosen(component, nonce)
    least = -(-required_runs(component, "determinism") // max(1, len(todo)))
    rng = generator(nonce, component.id, "determinism")
    found = []
    with neighbour(int(rng.integers(2**31))):
        for case in todo:
            try:
                found.append(_repeat(component, case, rng, least))
            except Exception as error:  # a kernel that raises has no bits to compare
                found.append(Repeats(name=case.name, runs=0, distinct=0, digest="", note=crash(error)))
    return make_record(component, "determinism", nonce, len(todo), found, workers=",".join(map(str, WORKERS)))


def chosen(component: Component, nonce: str) -> list[Case]:
    """Up to four cases: the one that spans several blocks, the largest of the row's own, and two that the nonce chooses."""
    first = [c for c in cases(component, nonce) if c.dtype == component.envelope.dtypes[0]]
    if not first:
        return []
    order = sorted(first, key=lambda c: -sum(np.size(x) for x in c.inputs))
    picks = order[:2] + [first[i] for i in generator(nonce, component.id, "repeat").permutation(len(first))[:2]]
    return list({c.name: c for c in picks}.values())


def _repeat(component: Component, case: Case, rng: np.random.Generator, least: int) -> Repeats:
    contents = case.arrays()
    digests: dict[str, int] = {}
    reference: list[np.ndarray] = []
    note = ""
    started = time.perf_counter()
    runs = 0
    bounds: list[Bound] = []
    while runs < least or (runs < MOST_RUNS and time.perf_counter() - started < SECONDS):
        if runs % 8 < len(WORKERS):  # a fresh binding at fresh addresses for each number of workers, then five calls that reuse them
            bounds = [*bounds[-2:], bind(component, case, workers=WORKERS[runs % 8], offset=int(rng.integers(8)))]
            bounds[-1].fill(contents)
        bound = bounds[int(rng.integers(len(bounds)))] if runs % 8 >= len(WORKERS) else bounds[-1]
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
            note = difference(spec_of(component).outputs, reference, bound.outs)
    return Repeats(name=case.name, runs=runs, distinct=len(digests), digest=next(iter(digests)), note=note)


def difference(names: Sequence[str], a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> str:
    """The first differing output, coordinate, byte and the two values."""
    for name, x, y in zip(names, a, b):
        bx = np.frombuffer(x.tobytes(), np.uint8)
        by = np.frombuffer(y.tobytes(), np.uint8)
        where = np.flatnonzero(bx != by)
        if where.size:
            byte = int(where[0])
            at = np.unravel_index(byte // x.dtype.itemsize, x.shape) if x.ndim else ()
            where_text = ",".join(str(int(i)) for i in at)
            return f"{name}[{where_text}] byte {byte % x.dtype.itemsize}: {x[at]!r} then {y[at]!r}; {where.size} bytes differ"
    return "shapes or dtypes differ"


@contextmanager
def neighbour(seed: int) -> Iterator[None]:
    """A thread beside the kernel that computes and sleeps at random."""
    stop = threading.Event()

    def work() -> None:
        rng = np.random.default_rng(seed)
        block = rng.standard_normal((48, 48))
        while not stop.is_set():
            if rng.random() < 0.5:
                np.dot(block, block)
            time.sleep(float(rng.random()) * 4e-4)

    thread = threading.Thread(target=work, daemon=True, name="alpha-neighbour")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


_FRESH = """
import sys
from alpha.gates import determinism
from alpha.train import forbidden
from alpha.train.catalogue import catalogue
forbidden.watch()
print("\\n".join(determinism.digests_of(catalogue()[sys.argv[1]], sys.argv[2])))
forbidden.check("at the end of a fresh process")
"""


def digests_of(component: Component, nonce: str) -> list[str]:
    """One digest per contract case of the determinism gate."""
    found = []
    for name, case in contracts.contract_cases(component, "determinism"):
        m = contracts.run_case(component, "determinism", nonce, name, case)
        ok = m.error <= m.bound and m.cases > 0
        found.append(f"{m.digest or 'none'}" if ok else f"failed {m.error!r} > {m.bound!r} {m.note}".replace("\n", " "))
    return found


def _contract(component: Component, nonce: str) -> Record:
    """Three runs of each contract case from the same inputs: two here, one in a fresh process with another hash seed."""
    names = [name for name, _ in contracts.contract_cases(component, "determinism")]
    runs = [digests_of(component, nonce), digests_of(component, nonce)]
    note = ""
    if names:
        child = subprocess.run([sys.executable, "-c", _FRESH, component.id, nonce], capture_output=True, text=True, timeout=120,
                               env=contracts.child_environment(PYTHONHASHSEED="4242"), check=False)
        runs.append(child.stdout.split("\n")[: len(names)] if child.returncode == 0 else ["crashed"] * len(names))
        note = "" if child.returncode == 0 else child.stderr.strip().rsplit("\n", 1)[-1][:100]
    found = []
    for i, name in enumerate(names):
        seen = [r[i] for r in runs]
        bad = [s for s in seen if s.startswith("failed") or s == "crashed"]
        found.append(Repeats(name=name, runs=len(runs), distinct=len(set(seen)) + len(bad), digest=seen[0][:16],
                             note=(bad[0] if bad else note)[:120]))
    return make_record(component, "determinism", nonce, len(names), found)


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    return [(Repeats, case.name) for case in chosen(component, nonce)]
