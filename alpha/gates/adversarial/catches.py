"""Planted faults: each must be rejected by the gate that it names. Floor 7.

A catch is evidence: the raw record by which the gate said FAIL is kept (only its failing entries, so that the file stays readable),
bound to the digests of the sound component and of the fault, and run again when either changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import alpha
from alpha.component import Catalogue, Component
from alpha.errors import AlphaError, GraphError, InputError
from alpha.gates.adversarial import cuda_plant, plant
from alpha.gates.contracts.engine import contract_cases
from alpha.gates.device_code import lint as kernels_lint
from alpha.profile.noise import wilson
from alpha.registry.catches import LATE, Catch, catch_digests, late_case, load_catches, save_catches
from alpha.registry.evidence import classes, default_roots, local_root
from alpha.registry.faults import Fault, broken
from alpha.registry.gates import PINNED
from alpha.registry.gpu import class_here, why_not_here
from alpha.registry.judge import FAIL, judge
from alpha.registry.machine import machine_class, processor
from alpha.registry.package import Package
from alpha.registry.pins import key_of, shipped_pins
from alpha.registry.record import FORMAT, Record

KEPT = 3
"""Failing entries of a record that a catch keeps."""


WHOLE = 500.0
"""Seconds that a gate over whole models on the GPU may take on a broken copy, beside others: three times what the longest takes alone."""

TIMED = 180.0
"""Seconds that a gate judged by pins may take on a broken copy: what is slow is measured up to twelve times before it is believed."""

LEAST, SURE = 10.0, 3.0
"""A case that hung on a broken copy counts where it had SURE times what it takes on the sound one: whatever keeps the machine busy slows
both. Where it hung before it has no longer than that, and at least LEAST seconds."""

SAVED, EVERY_S = 24, 20.0
"""Faults in device code after which, and seconds of others after which, what was caught is saved: a GPU's time may end."""


@dataclass(frozen=True)
class Score:
    """How many of `planted` faults of one gate were caught, with the 95 % Wilson interval of the rate."""

    gate: str
    caught: int
    planted: int
    survivors: tuple[str, ...]

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.caught, self.planted)


@dataclass(frozen=True)
class Result:
    """One fault: its catch, why it was or was not rejected, and whether it was run now or taken from evidence."""

    fault: Fault
    catch: Catch
    caught: bool
    why: str
    fresh: bool


def known(roots: Sequence[Path] | None = None, machine: str | None = None) -> dict[str, Catch]:
    """Recorded catches of a machine class (this CPU's), the local root stronger; unreadable files count as nothing."""
    found: dict[str, Catch] = {}
    for root in default_roots() if roots is None else roots:
        try:
            found.update(load_catches(root, machine or machine_class().key))
        except AlphaError:
            continue  # every fault of that file is then run again
    return found


def run(catalogue: Catalogue, faults: Sequence[Fault], *, stale: bool = True, root: Path | None = None, workers: int = 2,
        on_result: Callable[[Result], None] | None = None, keep: Sequence[str] | None = None) -> list[Result]:
    """Run the faults whose catch is missing or stale (or all), keep the catches, and give one result per fault.

    `root`: where catches are looked up and kept (default: looked up everywhere, kept in the local root). `keep`: ids of all faults that
    exist; saved catches of others are dropped (None drops nothing). Faults that no gate could reject on this machine are left out.
    """
    package, pins = Package(), shipped_pins()
    faults = [f for f in faults if not why_not(f, catalogue[f.component])]
    roots = None if root is None else [root]
    here = {machine.key for f in faults if (machine := class_here(catalogue[f.component])) is not None} if stale else ()
    old = {fault: catch for key in sorted(here) for fault, catch in known(roots, key).items()}
    elsewhere = _on_any_class(roots)
    results: dict[str, Result] = {}
    jobs: list[plant.Job] = []
    device: list[Fault] = []
    by_name = {f.id: f for f in faults}
    today = {f.id: catch_digests(f, catalogue[f.component], package) for f in faults}
    for fault in faults:
        catch = old.get(fault.id)
        if catch is not None and dict(catch.digests) == today[fault.id] and catch.rejected(pins):
            results[fault.id] = Result(fault, catch, True, "", False)
        elif fault.source:
            device.append(fault)
        else:
            jobs.append(replace(job_of(fault, catalogue[fault.component]), first=_failed(catch or elsewhere.get(fault.id))))

    saved = time.monotonic()

    def finished(outcome: plant.Outcome, doubt: str = "") -> None:
        nonlocal saved
        fault = by_name[outcome.job.name]
        catch = catch_of(fault, outcome, today[fault.id], catalogue[fault.component])
        result = Result(fault, catch, catch.rejected(pins) and not doubt, doubt or _why(outcome), True)
        results[fault.id] = result
        if time.monotonic() > saved + EVERY_S:  # who is killed keeps most of what was caught
            saved = time.monotonic()
            save()
        if on_result is not None:
            on_result(result)

    def save() -> None:  # a record of a survivor is no catch: it is not kept, so the merge gate names the fault
        save_catches([r.catch for r in results.values() if r.fresh and r.caught], root or local_root(), keep=keep)

    hung = {f: late_case(catch.error) for f, catch in known(roots).items() if f in today and catch.error.startswith(LATE)}
    try:
        _run_beside_controls(jobs, controls([by_name[j.name] for j in jobs], catalogue), hung, catalogue, workers, finished)
    finally:  # who ends the run keeps what was caught
        save()
    if device:
        cuda_plant.prepare(device, catalogue.__getitem__)  # a gate that compiled would run out of its time, and that would pass for a catch
        sound = cuda_plant.controls(device)
        done = cuda_plant.run_all(sound, [cuda_plant.job_of(f.component, f.gate, f"sound {f.id}") for f in sound], workers=workers,
                                  planted=False)
        _sound(done)
        took = {o.job.attempts: o.seconds for o in sorted(done, key=lambda o: o.seconds)}  # of several controls the slowest
        for at in range(0, len(device), SAVED):
            few = device[at : at + SAVED]
            cuda_plant.run_all(few, [cuda_plant.job_of(f.component, f.gate, f.id) for f in few], workers=workers,
                               on_result=lambda o: finished(o, _doubt(o, took[o.job.attempts]) if o.error.startswith(LATE) else ""))
            save()
    return [results[f.id] for f in faults]


def why_not(fault: Fault, component: Component) -> str:
    """Why no gate can reject a fault on this machine: its component cannot run here, or is judged by pins that are not there; else ''."""
    if why := why_not_here(component):
        return why
    here = class_here(component)
    pinned = fault.gate not in PINNED or here is None or component.id in shipped_pins().load(key_of(here.key, processor()))
    return "" if pinned else f"no pinned share of {component.id} on this kind of machine"


def _on_any_class(roots: Sequence[Path] | None) -> dict[str, Catch]:
    """Catches of all machine classes: which case fails first is much the same on each."""
    found: dict[str, Catch] = {}
    for root in default_roots() if roots is None else roots:
        for key in classes(root):
            found |= known([root], key)
    return found


Seconds = dict[tuple[tuple[tuple[str, str], ...], str], float]
"""What contract cases on the unbroken copy took, by a job's `attempts` and the name."""

PATIENCE = 10
"""How many times as long as a broken copy the unbroken one may take."""

SOUND = "sound "
"""Before the name of a job on the unbroken copy."""


def controls(among: Sequence[Fault], catalogue: Catalogue, most: int = 6) -> list[plant.Job]:
    """A few of the same gates on the unbroken copy, which must pass, or a catch would mean nothing."""
    different = list({(f.component, f.gate): f for f in among}.values())
    step = max(1, -(-len(different) // most))
    return [_unbroken(job_of(f, catalogue[f.component])) for f in different[::step]]


def _run_beside_controls(jobs: Sequence[plant.Job], sound: Sequence[plant.Job], hung: Mapping[str, str], catalogue: Catalogue,
                         workers: int, finished: Callable[[plant.Outcome, str], None]) -> None:
    """All of them. `sound` run beside the others; outcomes are told to `finished` once all of `sound` have passed: GraphError naming the
    gate that does not. `hung`: job -> the case in which it hung before. What came too late is told with a doubt, or with '' where the
    same case on the sound copy shows that it hangs."""
    passed, late = 0, list[plant.Outcome]()
    held: list[plant.Outcome] = []

    def arrived(outcome: plant.Outcome) -> None:
        nonlocal passed
        if outcome.job.name.startswith(SOUND):
            _sound([outcome])
            passed += 1
        elif outcome.error.startswith(LATE):
            late.append(outcome)
        else:
            held.append(outcome)
        while held and passed == len(sound):
            finished(held.pop(0), "")

    alone = [j for j in sound if _alone(j, catalogue)]
    if alone:
        _run_all(alone, catalogue, workers, arrived)
    again = [(j, case) for j in jobs if j.timeout == plant.TIMEOUT and (case := hung.get(j.name, "")) and case in _cases(j, catalogue)]
    took = _sound_cases(again, catalogue, workers)
    limits = {j.name: replace(j, first=(case,), timeout=_limit(took[j.attempts, case])) for j, case in again}
    _run_all([*(j for j in sound if j not in alone), *(limits.get(j.name, j) for j in jobs)], catalogue, workers, arrived)
    named = [(o.job, case) for o in late if (case := late_case(o.error))]
    took |= _sound_cases([x for x in named if (x[0].attempts, x[1]) not in took], catalogue, workers)
    for outcome in late:
        finished(outcome, _doubt(outcome, took.get((outcome.job.attempts, late_case(outcome.error)), 0.0)))


def _cases(job: plant.Job, catalogue: Catalogue) -> set[str]:
    """Names of the contract cases that a job measures."""
    component, gate = job.attempts[0]
    return {name for name, _ in contract_cases(catalogue[component], gate)} if catalogue[component].contract else set()


def _sound_cases(pairs: Sequence[tuple[plant.Job, str]], catalogue: Catalogue, workers: int) -> Seconds:
    """What each of these cases of a job's gate takes on the unbroken copy; GraphError where one fails there."""
    different = {(j.attempts, case): _unbroken(replace(j, only=(case,))) for j, case in pairs}
    outcomes = _run_all(list(different.values()), catalogue, workers) if different else []
    _sound(outcomes)
    return {(o.job.attempts, o.job.only[0]): o.cases[o.job.only[0]] for o in outcomes}


def _limit(seconds: float) -> float:
    """How long a case may take that hung before and takes `seconds` on the unbroken copy."""
    return float(min(plant.TIMEOUT, max(LEAST, math.ceil(SURE * seconds))))


def _doubt(outcome: plant.Outcome, seconds: float) -> str:
    """Why what came too late is no catch; '' where it is one. `seconds`: what had that time takes on sound code."""
    if not late_case(outcome.error):
        return f"{outcome.error}, and no case is known to hang: it may be slow. do: run it again beside less"
    slow = SURE * seconds > outcome.job.timeout
    return f"{outcome.error}, but takes {seconds:.0f} s on sound code now: it may be slow. do: run it again beside less" if slow else ""


def _unbroken(job: plant.Job) -> plant.Job:
    """The same gate on the sound text. Nobody expects it to hang, and a busy machine is no defect: it has PATIENCE times as long."""
    return replace(job, name=f"{SOUND}{job.name}", timeout=PATIENCE * job.timeout, first=(),
                   text=(Path(alpha.__file__).parent / job.file).read_text(encoding="utf-8"))


def _alone(job: plant.Job, catalogue: Catalogue) -> bool:
    """Whether nothing may run beside it: on the GPU some, elsewhere what is timed."""
    component, gate = job.attempts[0]
    return cuda_plant.alone(job) if catalogue[component].backend == "cuda" else gate in PINNED


def _run_all(jobs: Sequence[plant.Job], catalogue: Catalogue, workers: int,
             on_result: Callable[[plant.Outcome], None] | None = None) -> list[plant.Outcome]:
    """All of them; those that must be alone one at a time, behind the others."""
    alone = [j for j in jobs if _alone(j, catalogue)]
    return [*plant.run_all([j for j in jobs if j not in alone], workers=workers, on_result=on_result),
            *plant.run_all(alone, workers=1, on_result=on_result)]


def _sound(outcomes: Sequence[plant.Outcome]) -> None:
    for outcome in outcomes:
        if outcome.caught_by or not outcome.records:
            component, gate = outcome.job.attempts[0]
            raise GraphError("a gate rejects the unbroken component on a copy of the package, so its catches mean nothing", expected="PASS",
                             came=f"{gate} of {component}: {_why(outcome)}", do=f"run `alpha gate run {component} --gate {gate}`")


def job_of(fault: Fault, component: Component) -> plant.Job:
    """The fault applied to its file's text. `component`: the one that must be rejected."""
    source = Path(alpha.__file__).parent / fault.file
    limit = WHOLE if component.backend == "cuda" else TIMED if fault.gate in PINNED else plant.TIMEOUT
    return plant.Job(fault.id, ((fault.component, fault.gate),), fault.file, broken(fault, source.read_text(encoding="utf-8")), limit)


def _failed(catch: Catch | None) -> tuple[str, ...]:
    """Names of the cases that were seen to fail, the worst of each entry; they most likely will again."""
    record = None if catch is None else catch.record
    return () if record is None else tuple(str(case.get("worst") or case["name"]) for case in record.cases)


def catch_of(fault: Fault, outcome: plant.Outcome, digests: dict[str, str], component: Component) -> Catch:
    """The evidence of one outcome. What a record says of itself is set right: a fault in the code that writes records may have bent it."""
    machine = (class_here(component) or machine_class()).key
    record = None
    if outcome.records:
        record = replace(trimmed(outcome.records[0][0]), component=fault.component, gate=fault.gate, machine=machine, format=FORMAT)
    return Catch(fault=fault.id, component=fault.component, gate=fault.gate, machine=machine, digests=digests, record=record,
                 error=outcome.error)


def trimmed(record: Record) -> Record:
    """The record with its first failing entries only: a judge that is not looser than today's says FAIL to it as well."""
    pin = shipped_pins().of(record)
    failing = [c for c in record.cases if judge(replace(record, cases=[c], declared=1), runs=0, pin=pin).verdict == FAIL][:KEPT]
    return replace(record, probes=[], cases=failing, declared=len(failing)) if failing else replace(record, probes=[])


def _why(outcome: plant.Outcome) -> str:
    if outcome.error:
        return outcome.error
    _, verdict, reasons = outcome.records[0]
    return f"{verdict}: {'; '.join(reasons)}" if reasons else verdict


def matching(faults: Sequence[Fault], prefixes: Sequence[str]) -> list[Fault]:
    """Faults whose id or component begins with one of the prefixes; all without any. InputError where none does, unless the lint or the
    mutants are meant, which have no planted faults here."""
    found = [f for f in faults if not prefixes or f.id.startswith(tuple(prefixes)) or f.component.startswith(tuple(prefixes))]
    if not found and not any(p.startswith(("lint", "mutants")) for p in prefixes):
        raise InputError("no planted fault of that name", came=", ".join(prefixes), expected="a prefix of a fault's or a component's id",
                         do="faults stand in the *.faults.toml beside each component, those of the lint in gates/device_code/lint.toml")
    return found


def lint(catalogue: Catalogue, prefixes: Sequence[str] = ()) -> Score:
    """Faults of synchronisation that no run need show: a score of their own. MachineError without the pinned compiler."""
    seen = kernels_lint.run(catalogue, [u for u in kernels_lint.load() if not prefixes or u.fault.id.startswith(tuple(prefixes))])
    return Score("lint", sum(bool(s.fewer) for s in seen), len(seen), tuple(s.fault.id for s in seen if not s.fewer))


def scores(results: Sequence[Result]) -> list[Score]:
    """One score per gate that has faults."""
    found = []
    for gate in sorted({r.fault.gate for r in results}):
        mine = [r for r in results if r.fault.gate == gate]
        found.append(Score(gate, sum(r.caught for r in mine), len(mine), tuple(r.fault.id for r in mine if not r.caught)))
    return found
