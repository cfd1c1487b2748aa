"""What the merge gate asks of a current record: are its cases those of its nonce, do a kernel's bits agree with the oracle? Floor 7.

That a record agrees follows from its line, from the code that it is current with, and from what recomputes it. It is kept under a digest
of these on this machine (digest_cache.py), and asked again of one record in SAMPLED all the same.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import compress
from pathlib import Path

import numpy as np

from alpha.component import Component
from alpha.cores import cores
from alpha.errors import MachineError
from alpha.gates import expected, parity
from alpha.gates.subjects import Case, cases, pin_blas, spec_of
from alpha.gates.tolerance import ALL, FIRST, Allowance, allowance, slack_alone
from alpha.ops.numerics import round_to
from alpha.registry import digest_cache
from alpha.registry.digest import value_digest
from alpha.registry.judge import RATIO
from alpha.registry.package import Package
from alpha.registry.record import Record, sealed
from alpha.train.catalogue import catalogue
from alpha.types import NUMPY

FEW = 50
"""Records for which no processes are started: it would take longer."""


@contextmanager
def beside(package: Package) -> Iterator[Callable[[Sequence[Record]], Iterable[Sequence[str]]]]:
    """A function of current records. It begins with `recompute` of each that is not known to agree, on every processor, beside the caller,
    and gives what came, in order. MachineError where one of its processes is killed."""
    processors = cores()
    pools: list[ProcessPoolExecutor] = []
    means = value_digest(recompute, package)

    def begin(records: Sequence[Record]) -> Iterable[Sequence[str]]:
        keys = [digest_cache.question(Path(__file__), means, np.__version__, sealed(vars(record))[1]) for record in records]
        open_ = [not digest_cache.is_confirmed(key) for key in keys]
        unknown = list(compress(records, open_))
        if processors == 1 or (len(unknown) < FEW and not pools):
            return _all(keys, open_, map(recompute, unknown))
        if not pools:
            catalogue()  # loaded once, before the forks
            pools.append(ProcessPoolExecutor(processors, multiprocessing.get_context("fork"), pin_blas))
        return _all(keys, open_, pools[0].map(recompute, unknown))

    try:
        yield begin
    except BrokenProcessPool as error:
        raise MachineError("a process that computes records again died", came=str(error), expected="that it ends its records",
                           do="check again, with more memory to spare") from error
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _all(keys: Sequence[str], unknown: Sequence[bool], found: Iterable[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Of every record what came of it: `found` of those that are unknown, nothing of the others. Whose answer is nothing is known now."""
    come = iter(found)
    for key, asked in zip(keys, unknown, strict=True):
        wrong = next(come) if asked else []
        if not wrong:
            digest_cache.confirm(key)
        yield wrong


def recompute(record: Record) -> Sequence[str]:
    """What a record says otherwise than its nonce; a component that is gone is one such thing. Needs no back end."""
    if record.component not in catalogue():
        return [f"no component {record.component}"]
    component = catalogue()[record.component]
    wrong = expected.differences(component, record)
    return wrong + (probes(component, record) if record.gate == "parity" and component.kind == "kernel" else [])


def probes(component: Component, record: Record) -> list[str]:
    """What is wrong with a parity record's probes: values outside the tolerance, places other than those that the nonce chooses, missing
    ones. Inputs derive from the nonce, the tolerance from the row."""
    spec = spec_of(component)
    todo = cases(component, record.nonce)
    places = parity._places(component, todo, record.nonce)
    if [list(p[:3]) for p in record.probes] != places:
        return [f"the {len(record.probes)} probes are not at the {len(places)} places that the nonce chooses"]
    wrong = []
    allowances: dict[tuple[int, int], Allowance] = {}
    for i, output, at, bits in record.probes:
        case, t = todo[i], todo[i].out_types(spec)[output]
        value = np.frombuffer(bytes.fromhex(bits), dtype=NUMPY[t.dtype])[0]
        for least in (0, 1, FIRST, ALL):  # most lie within the slack, which asks for no walk, or within one; more contain the fewer
            if (i, least) not in allowances:
                allowances[i, least] = allowance(spec, case, record.nonce, least) if least else slack_alone(spec, case)
            a = allowances[i, least]
            good = _good(value, case, t.dtype, *(x[output].reshape(-1)[at] for x in (a.want, a.naive, a.slack)))
            if good:
                break
        else:
            wrong.append(f"probe {case.name}[{output}].{at}: recorded {value!r}, the oracle gives {a.want[output].reshape(-1)[at]!r}")
    return wrong


def _good(value: np.generic, case: Case, dtype: str, want: np.generic, naive: float, slack: float) -> bool:
    """Whether a recorded element lies within the tolerance of parity."""
    if want.dtype.kind != "f":
        return bool(value == want)
    tolerance = 0.0 if case.exact else max(RATIO * naive, slack)
    with np.errstate(all="ignore"):
        return bool(value == round_to(np.asarray(want), dtype) or (np.isnan(value) and np.isnan(want))  # type: ignore[call-overload]
                    or abs(float(value) - float(want)) <= tolerance)  # type: ignore[arg-type]
