"""What is asked of a run before it begins: which components, which gates are run first, what satisfies them, and on one screen why it is
refused; all of evidence whose fate is drawn. What the registry says by itself. Floor 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Component, Measured
from alpha.errors import UngatedError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import (
    BASE,
    HERE,
    KERNEL,
    ONE,
    OTHER,
    SAME_ISA,
    SINGLE,
    TOP,
    catalogue,
    folder,
    make,
    passing,
    with_gpus,
)
from alpha.registry import admission
from alpha.registry.digest import component_digests
from alpha.registry.evidence import default_roots, save
from alpha.registry.judge import NOT_RUN
from alpha.registry.machine import machine_class
from alpha.registry.package import Package
from alpha.registry.pins import folder_of
from alpha.registry.record import Record, content_hash
from alpha.registry.status import Call, Registry
from alpha.types import TensorType

FATES = ("passes", "older", "fails", "none")
WHY = {"older": "evidence is older than the code: implementation changed", "fails": "FAIL; a: it fails",
       "none": f"no evidence on {HERE.key}"}
BAD: Mapping[str, Mapping[str, Any]] = {"parity": {"kind": "exact", "error": 9.0}, "determinism": {"distinct": 2}, "faults": {"error": 1.0}}
"""What of a case makes its gate say no, and in which words."""
FAILS = {"parity": "error 9, 0 needed (the result is exact)", "determinism": "2 distinct outputs in 300 runs",
         "faults": "the fault was not handled"}


def walked(rng: np.random.Generator) -> Measured:
    """What some components presuppose, in order; what a run is asked about."""
    checks = Checks()
    for _ in range(20):
        names = [f"made.{i}" for i in range(int(rng.integers(1, 9)))]
        below = {name: tuple(rng.permutation(names[:i])[: int(rng.integers(3))].tolist()) for i, name in enumerate(names)}
        known = catalogue(*(replace(BASE, id=name, presupposes=below[name]) for name in names))
        ids = rng.choice(names, int(rng.integers(1, 5))).tolist()
        wanted, waiting = list[str](), [*ids]
        while waiting:
            first = waiting.pop(0)
            if first not in wanted:
                wanted.append(first)
                waiting += below[first]
        checks.that(admission.needed(known, ids) == wanted, f"{ids} of {below}: {admission.needed(known, ids)}, not {wanted}")
        calls: list[Call] = [(name, [TensorType((1,), "f32")], {}) for name in rng.choice(names, 2).tolist()]
        found = admission.asked(ids, calls)
        checks.that(found == sorted({*ids, *(name for name, *_ in calls)}), f"asked about: {found}")
    checks.that(admission.needed(catalogue(), []) == [] == admission.asked([], []), "nothing")
    return checks.measured()


def _fated(component: Component, rng: np.random.Generator, package: Package, given: str = "") -> tuple[list[Record], dict[str, str]]:
    """Records of a component's gates, each with a drawn fate; and the fates. `given`: one for all of its gates."""
    found, fates = list[Record](), dict[str, str]()
    for record in passing((component,), package):
        fates[record.gate] = fate = given or str(rng.choice(FATES, p=(0.6, 0.1, 0.1, 0.2)))
        if fate == "fails":
            record = replace(record, cases=[{**record.cases[0], **BAD[record.gate]}], declared=1)
        if fate == "older":
            record = replace(record, digests={**record.digests, "implementation": "older"})
        if fate != "none":
            found.append(record)
    return found, fates


def fated(rng: np.random.Generator) -> Measured:
    """Runs of components whose evidence passes, is old, fails or is not there: what is run first, the manifest's hashes, the refusal."""
    checks, package = Checks(), Package()
    rows: tuple[int, ...]
    for n, given, rows in ((2, "passes", (4,)), (2, "passes", (9, 8, 9)), (3, "", (1, 4)), (4, "", (9,)), (10, "older", (1,)),
                           (14, ("none", "older", "fails")[int(rng.integers(3))], (9, 8, 9))):
        over = [i % 2 and (n == 3 or rng.random() < 0.5) for i in range(n)]
        parts = [replace((BASE, TOP)[i % 2], id=f"made.{i:02d}", presupposes=(f"made.{i - 1:02d}",) if over[i] else ()) for i in range(n)]
        known, ids = catalogue(*parts, KERNEL), [c.id for c in parts]
        with folder() as at:
            fates, records = dict[str, dict[str, str]](), dict[tuple[str, str], Record]()
            for c in parts:
                over_nothing = "passes" if c is not parts[0] else "none"
                of, fates[c.id] = _fated(c, rng, package, over_nothing if n == 3 else given)
                records |= {(r.component, r.gate): r for r in of}
            records |= {(r.component, r.gate): r for r in passing((KERNEL,), package)}
            save(records.values(), at / "evidence")
            registry = Registry(known, (at / "evidence",), HERE, package)
            _first(checks, registry, at, fates, ids)
            calls: list[Call] = [(KERNEL.id, [TensorType((r, 2), "f32")], {}) for r in rows]
            ids = admission.asked(ids, calls)
            lines = [line for c in parts if (line := _line(c, fates))]
            unusable = len(lines) + (max(rows) > 4)
            lines += [f"{KERNEL.id} is called outside its envelope: needs at most 4 rows; came f32[{r},2] {{}}"
                      for r in dict.fromkeys(rows) if r > 4]
            hashed = {i: {g: content_hash(asdict(records[i, g]))[:16] for (c, g) in records if c == i} for i in ids}
            if not lines:
                found = admission.require(registry, ids, calls, "do it")
                checks.that(found == hashed and [*found] == ids, f"admitted: {found}")
                continue
            shown = lines[:10] + ([f"... and {len(lines) - 10} more"] if len(lines) > 10 else [])
            told = (f"{unusable} of {n + 1} components of this run are not usable on this machine class",
                    "\n    " + "\n    ".join(shown),
                    f"current, passing evidence on {HERE.key} for every component and every call", "do it")
            checks.tells(UngatedError, told, partial(admission.require, registry, ids, calls, "do it"))
    return checks.measured()


def _line(component: Component, fates: Mapping[str, Mapping[str, str]]) -> str:
    """What a refusal says of a component; '' where it is usable. What it presupposes presupposes nothing."""
    missing = {gate: fate for gate, fate in fates[component.id].items() if fate != "passes"}
    absent = [p for p in component.presupposes if any(fate != "passes" for fate in fates[p].values())]
    if not missing and not absent:
        return ""
    why = f"presupposes {', '.join(absent)}"
    if missing:
        gate, fate = next((g, missing[g]) for g in ("parity", "determinism", "faults") if g in missing)
        why = WHY[fate].replace("it fails", FAILS[gate])
    return f"{component.id} ({', '.join(g for g in ('parity', 'determinism', 'faults') if g in missing)}): {why}"


def _first(checks: Checks, registry: Registry, at: Path, fates: Mapping[str, Mapping[str, str]], ids: Sequence[str]) -> None:
    wanted = [(i, g) for i in ids for g in ("parity", "determinism", "faults") if fates.get(i, {}).get(g) == "none"]
    wanted = [(i, g) for i in admission.needed(registry.catalogue, ids) for c, g in wanted if c == i]
    for shipped, first in (((), wanted), ((OTHER,), wanted), ((OTHER, HERE), [])):
        with mock.patch.object(admission, "shipped_root", lambda shipped=shipped: at / f"shipped {len(shipped)}"):
            save([make("parity", machine=machine) for machine in shipped], at / f"shipped {len(shipped)}")
            found = admission.never_run(registry, ids)
            checks.that(found == first, f"run first beside {shipped}: {found}, not {first}")


def alone(rng: np.random.Generator) -> Measured:
    """A registry that is given nothing, or a class of GPUs; gates that cannot be run, and evidence that is not there, each in its words."""
    checks, package = Checks(), Package()
    plain = Registry(catalogue(BASE))
    checks.that(plain.machine == machine_class() and plain.evidence.roots == default_roots(), f"{plain.machine} {plain.evidence.roots}")
    checks.that(plain.pins.folder == folder_of(default_roots()[0]), f"pins of {plain.pins.folder}")
    checks.that(plain.digests(BASE, "parity") == component_digests(BASE, "parity", package=package), "other digests")
    bare = replace(SINGLE, requires=())
    no_source = replace(BASE, id="made.unread", implementation=eval("lambda: 1", {"__name__": "made"}))
    with folder() as root, with_gpus():
        r = Registry(catalogue(SINGLE, bare := replace(bare, id="gelu.f32.bare"), BASE, no_source), (root,), HERE, package)
        for component, why in ((SINGLE, "needs sm_90a: no nvidia-smi"), (bare, "no reference class of the sort cuda"),
                               (BASE, f"no evidence on {HERE.key}"),
                               (no_source, "no source file for a digest: made:<lambda>")):
            status = r.gate(component.id, "parity")
            checks.that((status.verdict, status.why) == (NOT_RUN, why), f"{component.id}: {status}")
            checks.that(r.gate(component.id, "parity") is status and r.status(component.id).gates["parity"] is status, "asked twice")
        given = Registry(catalogue(SINGLE), (root,), HERE, package, ONE)
        checks.that(given.machine_of(SINGLE) == ONE and given.gate(SINGLE.id, "parity").why == f"no evidence on {ONE.key}", "a class given")
        mine = passing((BASE,), package, SAME_ISA)
        save(passing((TOP,), package, OTHER), root)
        save(passing((TOP,), package, SAME_ISA), root)
        checks.that(Registry(catalogue(BASE), (root,), HERE, package).gate(BASE.id, "parity").why == f"no evidence on {HERE.key}",
                    "evidence of others is taken")
        wrong = [{"name": x, "kind": "exact", "error": 9.0} for x in "abcd"]
        save([replace(passing((BASE,), package)[0], cases=wrong, declared=4)], root)
        why = Registry(catalogue(BASE), (root,), HERE, package).gate(BASE.id, "parity").why
        checks.that(why == "FAIL; " + "; ".join(f"{x}: {FAILS['parity']}" for x in "abc"), f"of four reasons: {why}")
        (root / HERE.key / f"{BASE.id}.jsonl").unlink()
        save(mine, root)
        carried = Registry(catalogue(BASE), (root,), HERE, package).gate(BASE.id, "parity")
        checks.that(carried.satisfied and carried.machine == SAME_ISA.key and carried.root == root, f"carried over: {carried}")
    return checks.measured()
