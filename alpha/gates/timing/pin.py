"""Pinning: what the perf gate judges by on this kind of machine, measured several times, each time in a fresh process. Floor 7.

One measurement times every case of the components asked for, in random order, with the gate's own engine (best of perf.PINNED tries).
The next begins when it is done, so that two of one case lie as far apart as the time allows. Those of another day may be added, for the
same code. Shares that no machine can reach are not pinned. Of collectives a pin says how far apart the cores stood, and keeps measurements
at one distance alone (registry/distance.py).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from alpha.component import Catalogue, Component
from alpha.errors import InputError, MachineError
from alpha.gates import perf
from alpha.gates.run import engine_for
from alpha.registry import distance, policy
from alpha.registry.cases import Share
from alpha.registry.digest import component_digests
from alpha.registry.gates import cases_of
from alpha.registry.gpu import class_here, family, gpu_environment, why_not_here
from alpha.registry.judge import judge
from alpha.registry.machine import environment, processor
from alpha.registry.package import Package
from alpha.registry.pins import FEWEST, FLOOR, MOST, Pin, Pins, code_of, key_of, line_of, shipped_pins
from alpha.registry.record import Record

MEASUREMENTS = {"cpu": 8, "cuda": 8}
"""Of one call, by family: what fits into four minutes on a CPU's core and into two and a half on a GPU."""

_CHILD = """
import sys
from alpha.gates.timing import pin
pin.child(sys.argv[1:])
"""


def timed(catalogue: Catalogue, ids: Iterable[str] = ()) -> list[Component]:
    """Components that owe the perf gate and run here, all or those named; InputError when none does."""
    chosen = [catalogue[i] for i in dict.fromkeys(ids)] or list(catalogue)
    found = [c for c in chosen if "perf" in policy.owed(c) and not why_not_here(c)]
    if not found:
        raise InputError("nothing to pin", came=", ".join(c.id for c in chosen[:4]), expected="what owes the perf gate and runs here",
                         do="list them with `alpha gate list`")
    return found


class Shares(dict[str, float]):
    """case -> share, of one measurement. hop_ns: of the ranks of a collective, as its record says it; else ''."""

    hop_ns: str = ""


def one(component: Component) -> Shares:
    """A component measured once; MachineError where a case was not measured, or was measured wrongly."""
    engine: Callable[..., Record] = engine_for("perf", component)
    for _ in range(3):
        record = engine(component, tries=perf.PINNED)
        judgement = judge(record)
        if judgement.satisfied:
            shares = Shares({c.name: c.share for c in cases_of(record) if isinstance(c, Share)})
            shares.hop_ns = record.environment.get(distance.HOP, "")
            return shares
    raise MachineError("a component cannot be pinned", came=f"{component.id}: {judgement.verdict}: {'; '.join(judgement.reasons[:2])}"
                       f"{record.environment.get('not_measured', '')}", expected="every case measured, no share above 1",
                       do=f"`alpha gate run {component.id} --gate perf` says more")


def child(ids: Sequence[str]) -> None:
    """One measurement of every component named: a JSON line each on standard output."""
    from alpha.train.catalogue import catalogue

    order = list(ids)
    random.SystemRandom().shuffle(order)
    for i in order:
        start = time.perf_counter()
        try:
            shares = one(catalogue()[i])
            found: dict[str, Any] = {"component": i, "shares": shares, distance.HOP: shares.hop_ns}
        except MachineError as error:
            found = {"component": i, "why": f"{error.what}: {error.came}"}
        print(json.dumps({**found, "seconds": round(time.perf_counter() - start, 2)}), flush=True)


def _fresh(ids: Sequence[str], report: Callable[[str], None]) -> dict[str, Shares]:
    """One measurement in a fresh process: component -> case -> share."""
    from alpha.gates.contracts.engine import child_environment

    done = subprocess.run([sys.executable, "-c", _CHILD, *ids], capture_output=True, text=True, env=child_environment(), check=False)
    if done.returncode != 0:
        raise MachineError("a measurement ended in an error", came=done.stderr.strip().rsplit("\n", 1)[-1] or f"exit {done.returncode}",
                           do="run `alpha gate run --gate perf` to see it")
    found = dict[str, Shares]()
    for line in map(json.loads, done.stdout.splitlines()):
        if "why" in line:
            report(f"not pinned: {line['why']}")
        else:
            found[line["component"]] = shares = Shares(line["shares"])
            shares.hop_ns = line[distance.HOP]
    return found


def run(components: Sequence[Component], *, measurements: int | None = None, add: bool = False, root: Pins | None = None,
        report: Callable[[str], None] = lambda text: None, catalogue: Catalogue | None = None,
        fresh: Callable[[Sequence[str], Callable[[str], None]], Mapping[str, Mapping[str, float]]] = _fresh) -> list[Pin]:
    """Measure and pin; the pins as they are now. `add`: to the present measurements of the same code, which are replaced otherwise;
    `root`: the folder of pins (default: the repository's); `catalogue`: pins of components that are not in it are dropped."""
    pins = root or shipped_pins()
    if measurements is not None and not (1 if add else FEWEST) <= measurements <= MOST:
        raise InputError("not a number of measurements", came=measurements, expected=f"{1 if add else FEWEST} to {MOST}")
    made: list[Pin] = []
    package, start = Package(), time.perf_counter()
    for key in sorted({_key(c) for c in components}):
        mine = {c.id: c for c in components if _key(c) == key}
        taken: dict[str, list[tuple[str, Mapping[str, float]]]] = {i: [] for i in mine}
        wanted = measurements or MEASUREMENTS[family(next(iter(mine.values())))]
        for k in range(wanted):
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            for i, shares in fresh(list(mine), report).items():
                taken[i].append((at, shares))
            report(f"measurement {k + 1} of {wanted}, {time.perf_counter() - start:.0f} s")
        found = {i: merged(c, taken[i], pins.load(key).get(i) if add else None, package) for i, c in mine.items()}
        for i in (i for i, pin in found.items() if pin is None):
            report(f"not pinned: {i} has fewer than {FEWEST} whole measurements" + _distances(taken[i]))
        made += (whole := [pin for pin in found.values() if pin is not None])
        pins.save(key, {p.component: p for p in whole}, keep=None if catalogue is None else frozenset(c.id for c in catalogue))
    return made


def _key(component: Component) -> str:
    here = class_here(component)
    assert here is not None, "only what runs here is pinned"
    return key_of(here.key, processor())


def merged(component: Component, taken: Sequence[tuple[str, Mapping[str, float]]], old: Pin | None, package: Package) -> Pin | None:
    """The pin of a component with these measurements, added to those of `old` if that is of the same code and cases; None while too few.
    Of ranks only those are kept whose cores stood equally far apart; where one does not say what a hop took, the pin says it of none."""
    code = code_of(component_digests(component, "perf", package=package))
    times, rows, hops = [t for t, _ in taken], [dict(s) for _, s in taken], [s.hop_ns if isinstance(s, Shares) else "" for _, s in taken]
    if old is not None and dict(old.code) == code and (not rows or set(old.shares) == set(rows[0])) and old.flops == perf.FLOPS:
        times = [*old.times, *times]
        rows = [*({case: old.shares[case][k] for case in old.shares} for k in range(len(old.times))), *rows]
        hops = [*([f"{hop:.0f}" for hop in distance.hops_of(old)] or [""] * len(old.times)), *hops]
    kept = (distance.together([float(hop) for hop in hops]) if all(hops) else list(range(len(rows))))[-MOST:]
    rows, times, hops = [rows[k] for k in kept], [times[k] for k in kept], [hops[k] for k in kept]
    if len(rows) < FEWEST or any(set(r) != set(rows[0]) for r in rows):
        return None
    here = {k: v for k, v in environment().items() if k in ("numpy", "blas", "cpu", "processor")}
    here |= gpu_environment() if family(component) == "cuda" else {}
    here |= {distance.HOPS: " ".join(hops)} if all(hops) else {}
    return Pin(component.id, family(component), code, {case: tuple(r[case] for r in rows) for case in rows[0]}, tuple(times),
               perf.FLOPS, here)


def _distances(taken: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """What is said of ranks whose measurements may have been too few at one distance."""
    hops = [s.hop_ns for _, s in taken if isinstance(s, Shares) and s.hop_ns]
    return f" at one distance of the cores (a hop took {', '.join(hops)} ns): measure more" if hops else ""


def false_alarms(pins: Iterable[Pin], tries: int = 1) -> tuple[int, int]:
    """(alarms, trials), cross-validated: so many measurements in a row are held against the line that the others draw, and an alarm is
    where none of them reaches it, as the gate measures again before it believes a slowdown. Cases that the others let be judged only."""
    alarms = trials = 0
    for pin in pins:
        for shares in pin.shares.values():
            for k in range(len(shares) - tries + 1 if len(shares) - tries >= FEWEST else 0):
                line = line_of((*shares[:k], *shares[k + tries :]), FLOOR[pin.family])
                if line.judged:
                    trials, alarms = trials + 1, alarms + (not max(shares[k : k + tries]) >= line.least)
    return alarms, trials
