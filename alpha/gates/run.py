"""Run gates: what is due, cheapest first, within a budget. Each record is kept at once, so that an interrupted run resumes. Floor 7."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from alpha.component import Catalogue, Component
from alpha.errors import InputError
from alpha.gates import cpu
from alpha.gates.cpu import judge_process
from alpha.gates.cpu.process import is_declared
from alpha.gates.limit import limited, patience
from alpha.gates.subjects import crash, fresh_nonce, make_record
from alpha.registry import policy
from alpha.registry.cases import failed
from alpha.registry.evidence import local_root, save
from alpha.registry.gates import engine_of, gate_of, seconds_of
from alpha.registry.gpu import class_here, why_not_here
from alpha.registry.judge import FAIL, Judgement, judge
from alpha.registry.pins import shipped_pins
from alpha.registry.record import Record
from alpha.registry.status import Registry
from alpha.train import forbidden
from alpha.train.catalogue import loadable_catalogue

PERF_TRIES, PAUSE = 3, 2.0
"""Measurements of a share above 1 or below its line, before it is believed that work was skipped or became slower; seconds between two."""


@dataclass(frozen=True)
class Task:
    """One gate of one component that is to run."""

    component: Component
    gate: str
    seconds: float


@dataclass
class Done:
    """What a run did. `left`: tasks that the budget did not reach."""

    records: list[Record] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    left: list[Task] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every gate that ran is satisfied and nothing was left over."""
        return not self.left and all(j.satisfied for j in self.judgements)


def engine_for(gate: str, component: Component) -> Callable[[Component, str | None], Record]:
    """The function that measures a gate on this component, from the gate table; InputError for an unknown gate."""
    module, _, name = engine_of(gate, component).partition(":")
    found: Callable[[Component, str | None], Record] = getattr(importlib.import_module(module), name)
    return found


def measure(component: Component, gate: str, nonce: str | None = None) -> tuple[Record, Judgement]:
    """One gate: the record, with the seconds that it took in its environment, and the verdict on it. An engine that ends in an error is a
    failed case, not the end of the run. So is one that does not end (limit.py).

    A share that no machine can reach says that the ceiling was measured while something else ran, one below its line that the kernel was:
    perf is then measured again, at most PERF_TRIES times, and the last counts, so that a kernel that skips work or became slower is still
    found out. So is a collective whose cores stand elsewhere, for they move. What gave wrong outputs is not. `tries` of the environment
    says how often.
    """
    engine = engine_for(gate, component)
    forbidden.watch()
    if _sits_apart(component, engine):
        found: tuple[Record, Judgement] = judge_process.measure(component, gate, nonce)
        forbidden.check(f"after {gate} of {component.id}")
        return found
    start = time.perf_counter()
    nonce, tries = nonce or fresh_nonce(), 1
    try:
        with limited(patience(seconds_of(gate, component))):
            record = engine(component, nonce)
            while _below(judgement := judged(record, component)) and tries < PERF_TRIES and _may_be_chance(record):
                time.sleep(PAUSE)
                record, tries = engine(component, nonce), tries + 1
    except Exception as error:
        record = make_record(component, gate, nonce, 1, [failed(gate_of(gate).cases[0], "measure", crash(error))])
        judgement = judged(record, component)
    forbidden.check(f"after {gate} of {component.id}")
    again = {"tries": str(tries)} if tries > 1 else {}
    seconds = f"{time.perf_counter() - start:.2f}"
    return replace(record, environment={**record.environment, **again, "seconds": seconds}), judgement


def _sits_apart(component: Component, engine: Callable[..., Record]) -> bool:
    """Whether a process that never loads this kernel's file measures and judges it: of the catalogue's own, by the engines for that."""
    if not engine.__module__.startswith(f"{cpu.__name__}.") or is_declared(component):
        return False
    known = loadable_catalogue()
    return component.id in known and known[component.id] is component


def _below(judgement: Judgement) -> bool:
    """Whether a record fails, or would where its cores stand."""
    return judgement.verdict == FAIL or judgement.elsewhere


def _may_be_chance(record: Record) -> bool:
    """Whether what else the machine did may be why a record fails: one of times, whose outputs were right."""
    return gate_of(record.gate).pinned and not any("note" in case for case in record.cases)


def _keep(record: Record, root: Path) -> None:
    """Keep a record: by the process that made it where that is another one, for a file of kernels may have patched this one."""
    if not judge_process.keep(record, root):
        save([record], root)


def judged(record: Record, component: Component) -> Judgement:
    """The judge with what the component's profile asks for."""
    return judge(record, runs=policy.required_runs(component, record.gate), pin=shipped_pins().of(record))


def tasks(catalogue: Catalogue, ids: Iterable[str] = (), gates: Sequence[str] = (), *, stale: bool = True,
          roots: Sequence[Path] | None = None) -> list[Task]:
    """Gates to run, cheapest first: those without current, satisfying evidence (`stale`), or every one that is owed. Components that
    cannot run on this machine are left out: `not_here` names them."""
    registry = Registry(catalogue, roots)
    found = [Task(component, gate, _seconds(registry, component, gate))
             for component, due in _due(registry, ids, gates, stale) if not why_not_here(component) for gate in due]
    return sorted(found, key=lambda t: (t.seconds, t.component.id, t.gate))


def _due(registry: Registry, ids: Iterable[str], gates: Sequence[str], stale: bool) -> Iterator[tuple[Component, list[str]]]:
    """(component, gates that are to run) of those that have any, whether they can run here or not."""
    for component in [registry.catalogue[i] for i in dict.fromkeys(ids)] or list(registry.catalogue):
        due = registry.status(component.id).missing if stale else policy.owed(component)
        if asked := [g for g in due if not gates or g in gates]:
            yield component, asked


def matching(catalogue: Catalogue, ids: Sequence[str]) -> list[str]:
    """Ids with patterns ('*' stands for anything) replaced by what they match; InputError for a pattern that matches nothing."""
    found: dict[str, None] = {}
    for pattern in ids:
        names = [c.id for c in catalogue if fnmatchcase(c.id, pattern)] if "*" in pattern else [pattern]
        if not names:
            raise InputError("no component matches", came=pattern, do="list them with `alpha gate list`")
        found.update(dict.fromkeys(names))
    return list(found)


def not_here(catalogue: Catalogue, ids: Iterable[str] = (), gates: Sequence[str] = (), *, stale: bool = False,
             roots: Sequence[Path] | None = None) -> dict[str, str]:
    """Components (of those named, or all) with gates to run that cannot run on this machine, with the reason: these gates are NOT_RUN."""
    return {c.id: why for c, _ in _due(Registry(catalogue, roots), ids, gates, stale) if (why := why_not_here(c))}


def _seconds(registry: Registry, component: Component, gate: str) -> float:
    guess = seconds_of(gate, component)
    try:
        here = class_here(component) or registry.machine
        having = registry.evidence.load(component.id, here.key).get(gate, [])
        return float(having[0].record.environment.get("seconds", guess)) if having else guess
    except (ValueError, InputError):
        return guess  # unreadable evidence is about to be replaced


def run(todo: Sequence[Task], *, budget: float | None = None, root: Path | None = None,
        on_result: Callable[[Task, Record, Judgement], None] | None = None) -> Done:
    """Run tasks in order and keep each record under `root` (default: the local one). `budget`: seconds after which none is started."""
    done = Done()
    end = None if budget is None else time.perf_counter() + budget
    for i, task in enumerate(todo):
        if end is not None and time.perf_counter() + task.seconds > end:
            done.left = list(todo[i:])
            break
        record, judgement = measure(task.component, task.gate)
        _keep(record, root or local_root())
        done.records.append(record)
        done.judgements.append(judgement)
        if on_result is not None:
            on_result(task, record, judgement)
    return done
