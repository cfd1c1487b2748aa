"""The merge gate: decides from the committed evidence alone, on any machine, without a GPU. Floor 3.

Every component must have current, passing evidence for every gate that it owes on the reference class of its family (kernels of the
GPU on a GPU's, everything else on the CPU's; no GPU kernel is owed before a GPU class is named). On every committed class each
line must be whole, judged again, about a component that exists, and its parity probes must agree with the oracle; every planted fault
must have a current catch that today's judges still reject. Nothing that was skipped counts as passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alpha.component import Catalogue, Component
from alpha.errors import AlphaError
from alpha.registry import catches, mutants, policy, signatures
from alpha.registry.claims import why_no_claim
from alpha.registry.digest import component_digests
from alpha.registry.evidence import REFERENCE, classes, load_file, path_of, reference_classes, stale
from alpha.registry.faults import Fault
from alpha.registry.gates import PINNED
from alpha.registry.gpu import sort, sort_of
from alpha.registry.judge import Judgement, judge
from alpha.registry.package import Package
from alpha.registry.pins import Pins, folder_of, key_of_record
from alpha.registry.record import Record

ERROR, WARNING = "error", "warning"

Recompute = Callable[[Sequence[Record]], Iterable[Sequence[str]]]
"""What each of these current records says otherwise than its nonce and the oracle; empty when all agrees. It may begin at once and give
its results when they are asked for. Lives with the gate engines, above this floor."""


@dataclass(frozen=True)
class Finding:
    """One thing that the check has to say. `path`: relative to the evidence root's repository; `line`: 0 when it concerns no line."""

    level: str
    path: str
    line: int
    about: str
    what: str
    do: str = ""


@dataclass(frozen=True)
class Checked:
    """The result. `records`, `probes`, `catches`: how much was looked at; nothing looked at is not a pass. `unrenewed`: class of
    GPUs -> gates and planted faults that are NOT_RUN on today's code there and await renewal (policy.AWAITING)."""

    findings: tuple[Finding, ...]
    records: int
    probes: int
    catches: int
    unrenewed: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.records > 0 and not any(f.level == ERROR for f in self.findings)


class _Check:
    def __init__(self, catalogue: Catalogue, root: Path, recompute: Recompute, faults: Sequence[Fault], package: Package) -> None:
        self.catalogue, self.root, self.recompute, self.package = catalogue, root, recompute, package
        self.pins = Pins(folder_of(root))
        self.published: frozenset[str] = frozenset()
        self.damaged: set[str] = set()
        self.faults = {f.id: f for f in faults}
        self.findings: list[Finding] = []
        self.records = self.probes = self.catches = 0
        self.unrenewed: dict[str, list[str]] = {}
        self._digests: dict[tuple[str, str], dict[str, str]] = {}
        self._current: list[tuple[Path, int, str, Record]] = []
        self._begun: list[tuple[list[tuple[Path, int, str, Record]], Iterable[Sequence[str]]]] = []

    def say(self, level: str, path: Path, line: int, about: str, what: str, do: str = "") -> None:
        self.findings.append(Finding(level, path.relative_to(self.root.parent.parent).as_posix(), line, about, what, do))

    def refused(self, path: Path, about: str, error: AlphaError) -> None:
        """A file, or all of the evidence, that cannot be read."""
        self.say(ERROR, path, 0, about, f"{error.what}; came {error.came}", error.do or "")

    def not_current(self, machine: str, path: Path, line: int, about: str, what: str, do: str, *, reference: bool) -> None:
        """What is missing, or older than the code: an error on a reference class, NOT_RUN where its renewal is awaited."""
        awaiting = policy.awaiting(machine, about) if reference else ""
        if awaiting:
            self.unrenewed.setdefault(machine, []).append(about)
            what = f"NOT_RUN on today's code ({what}): {awaiting}"
        self.say(ERROR if reference and not awaiting else WARNING, path, line, about, what, do)

    def digests(self, component: Component, gate: str) -> dict[str, str]:
        key = (component.id, gate)
        if key not in self._digests:
            self._digests[key] = component_digests(component, gate, package=self.package)
        return self._digests[key]

    def signed(self) -> None:
        """Every line of a class that asks for signatures is signed by one of its signers."""
        try:
            unsigned = signatures.problems(self.root)
        except AlphaError as error:
            self.refused(signatures.signers_path(self.root), "signatures", error)
            return
        for path, number, why in unsigned:
            self.say(ERROR, path, number, "signatures", why, "sign where it was measured: `alpha gate sign --key FILE --signer NAME`")

    def files(self, machine: str, *, reference: bool) -> None:
        """Every evidence file of one class: known component, whole lines, verdicts, digests, probes."""
        known = {path_of(self.root, machine, c.id): c for c in self.catalogue if sort(c) == sort_of(machine)}
        for path in sorted((self.root / machine).iterdir()):
            if path.name in (catches.NAME, signatures.NAME):
                continue
            if path not in known:
                self.say(ERROR, path, 0, path.stem, "evidence of a component that does not exist",
                         "remove the file, or restore the component")
        for path, component in known.items():
            try:
                records = load_file(path)
            except AlphaError as error:
                self.refused(path, component.id, error)
                continue
            for number, record in enumerate(records.values(), 1):
                self.record(path, number, component, record, reference=reference)
            if reference:
                if not policy.owed(component):
                    self.say(ERROR, path, 0, component.id, f"it owes no gate: no gate names its profile {component.profile!r}",
                             "name a profile of alpha/registry/gates.py")
                for gate in policy.owed(component):
                    if gate not in records:
                        self.not_current(machine, path, 0, f"{component.id} {gate}", "no evidence on the reference class",
                                         _rerun(component.id, gate), reference=True)
        self._begun.append((self._current, self.recompute([record for *_, record in self._current])))
        self._current = []

    def record(self, path: Path, number: int, component: Component, record: Record, *, reference: bool) -> None:
        self.records += 1
        about = f"{component.id} {record.gate}"
        if record.gate not in policy.owed(component):
            self.say(ERROR, path, number, about, "evidence of a gate that the component does not owe", "remove the line")
            return
        judgement = judge(record, runs=policy.required_runs(component, record.gate), pin=self.pins.of(record))
        if not judgement.satisfied:
            self.say(ERROR, path, number, about, f"{judgement.verdict}: {'; '.join(judgement.reasons[:5])}",
                     _rerun(component.id, record.gate))
        changed = stale(record, self.digests(component, record.gate))
        if record.gate in PINNED and reference and judgement.satisfied and not (changed and policy.awaiting(record.machine, about)):
            self.speed(path, number, component, record, judgement)
        if changed:
            self.not_current(record.machine, path, number, about, f"stale: {', '.join(changed)} changed since",
                             _rerun(component.id, record.gate), reference=reference)
            return
        if record.gate == "parity" and component.kind == "kernel":
            self.probes += len(record.probes)
            if not record.probes:
                self.say(ERROR, path, number, about, "parity evidence without probes cannot be checked",
                         _rerun(component.id, record.gate))
        self._current.append((path, number, about, record))

    def recomputed(self) -> None:
        """What was begun for the current records of all classes."""
        for records, found in self._begun:
            for (path, number, about, _), mismatches in zip(records, found, strict=True):
                for mismatch in mismatches:
                    self.say(ERROR, path, number, about, f"computed again, the record disagrees: {mismatch}",
                             "the line was forged, or the oracle is not portable")

    def speed(self, path: Path, number: int, component: Component, record: Record, judgement: Judgement) -> None:
        """A satisfied record of the perf gate on a reference class: a pin is owed, it must explain the shares, and what published figures
        rest on must be claimable."""
        about, key = f"{component.id} perf", key_of_record(record)
        if key in self.damaged:
            return  # said once, of the file
        if judgement.unpinned:
            self.say(ERROR, path, number, about, f"no pinned share of {', '.join(judgement.unpinned)} on {key}", _pin(component.id))
        for what in judgement.above_pin:
            self.say(ERROR, path, number, about, f"faster than its pin explains, so a slowdown would pass: {what}", _pin(component.id))
        if not record.environment.get("flops"):
            self.say(ERROR, path, number, about, "the record does not say by which FLOPs model it counts", _rerun(component.id, "perf"))
        digests = self.digests(component, "perf")
        no_claim = why_no_claim(judgement, self.pins.of(record), digests, self.pins, record)
        if no_claim and not judgement.unpinned and not judgement.above_pin:
            published = component.id in self.published
            self.say(ERROR if published else WARNING, path, number, about,
                     f"not claimable{', and published figures rest on it' if published else ''}: {no_claim}",
                     f"run `alpha bench {component.id} --against TREE --record` with the pinned tree, or {_pin(component.id)}")

    def pinned(self) -> None:
        """Every file of pins: whole, and about components that exist."""
        for key in self.pins.keys():
            path = self.pins.path(key)
            try:
                self.pins.relative(key)
                for component in sorted(self.pins.load(key).keys() - {c.id for c in self.catalogue}):
                    self.say(ERROR, path, 0, component, "a pin of a component that does not exist",
                             "run `alpha gate pin` on such a machine")
            except AlphaError as error:
                self.refused(path, "pins", error)
                self.damaged.add(key)
                self.pins.forget(key)

    def catches_of(self, machine: str, *, reference: bool) -> None:
        """Recorded catches of one class; on the reference class every fault needs a current one."""
        path = catches.path_of(self.root, machine)
        try:
            recorded = catches.load_catches(self.root, machine)
        except AlphaError as error:
            self.refused(path, "catches", error)
            return
        for number, (fault_id, catch) in enumerate(recorded.items(), 1):
            self.catches += 1
            fault = self.faults.get(fault_id)
            if fault is None or catch.component not in self.catalogue:
                self.say(ERROR, path, number, fault_id, "catch of a fault that does not exist", "remove the line, or restore the fault")
                continue
            component = self.catalogue[catch.component]
            if not catch.rejected(self.pins):
                self.say(ERROR, path, number, fault_id,
                         f"the {catch.gate} gate would now pass this fault: a judge or a tolerance was loosened", "restore the judge")
            if (fault.component, fault.gate) != (catch.component, catch.gate):
                self.say(ERROR, path, number, fault_id, "the catch is by another gate or component than the fault names", _catch(fault_id))
                continue
            changed = stale_names(catch, self.digests(component, fault.gate), fault)
            if changed:
                self.not_current(machine, path, number, fault_id, f"stale catch: {', '.join(changed)} changed since", _catch(fault_id),
                                 reference=reference)
        if reference:
            for fault_id in sorted(self.faults.keys() - recorded.keys()):
                if not self._owed_by(fault_id, machine):
                    continue
                self.not_current(machine, path, 0, fault_id, "no gate is recorded to have rejected this planted fault", _catch(fault_id),
                                 reference=True)

    def awaited(self, machine: str) -> None:
        """What is excused on a reference class is missing or older than the code there."""
        for about in policy.awaited(machine).keys() - set(self.unrenewed.get(machine, ())):
            self.say(ERROR, self.root / machine, 0, about, "its evidence is current, so nothing excuses it",
                     "take it off AWAITING in alpha/registry/policy.py")

    def mutants(self) -> None:
        """The committed scores of seeded mutants: there, whole, current, no lower than the pinned one."""
        path = mutants.path_of(self.root)
        try:
            found = mutants.problems(self.root, self.package)
        except AlphaError as error:
            found = [f"{error.what}; came {error.came}"]
        for problem in found:
            self.say(ERROR, path, 0, "seeded mutants", problem,
                     "run `alpha gate catches mutants --ship`; kill each survivor or explain it in gates/adversarial/equivalents.toml")

    def _owed_by(self, fault_id: str, machine: str) -> bool:
        """Whether a class must have a catch of this fault: its component's gates are owed on classes of that sort."""
        component_id = self.faults[fault_id].component
        return sort_of(machine) == (sort(self.catalogue[component_id]) if component_id in self.catalogue else "cpu")


def stale_names(catch: catches.Catch, digests: dict[str, str], fault: Fault) -> list[str]:
    """Names of what changed since a catch was made."""
    today = {**digests, "fault": fault.digest}
    return sorted(n for n in {*catch.digests, *today} if catch.digests.get(n) != today.get(n))


def _rerun(component: str, gate: str) -> str:
    return f"run `alpha gate run {component} --gate {gate}` and commit the line"


def _pin(component: str) -> str:
    return f"run `alpha gate pin {component}` and commit the file"


def _catch(fault: str) -> str:
    return f"run `alpha gate catches` and commit the line of {fault}"


def check(catalogue: Catalogue, root: Path, recompute: Recompute, *, package: Package, faults: Sequence[Fault] = (),
          reference: str | None = None, published: Iterable[str] = ()) -> Checked:
    """Look at all committed evidence under `root`.

    `package`: the code that evidence is held against; `reference`: class on which everything must be current (default: the key in the
    root's REFERENCE file); `recompute`: see above; `published`: components that published speed figures rest on, which must be claimable.
    """
    work = _Check(catalogue, root, recompute, faults, package)
    work.published = frozenset(published)
    try:
        references = reference_classes(root)
        owing = {**references, "cpu": reference or references.get("cpu")}
        found = classes(root)
    except AlphaError as error:
        work.refused(root, "evidence", error)
        return Checked(tuple(work.findings), 0, 0, 0)
    for key in owing.values():
        if key is None or key not in found:
            work.say(ERROR, root / REFERENCE, 0, "evidence", f"no evidence of the reference class ({key or 'none is named'})",
                     "run `alpha gate run` on a machine of that class and commit what it writes")
    for problem in policy.problems():
        work.say(ERROR, root, 0, "policy", problem, "mend EXEMPT in alpha/registry/policy.py")
    work.pinned()
    work.mutants()
    work.signed()
    for machine in found:
        work.files(machine, reference=machine in owing.values())
        work.catches_of(machine, reference=machine in owing.values())
        if machine in owing.values():
            work.awaited(machine)
    work.recomputed()
    return Checked(tuple(work.findings), work.records, work.probes, work.catches, {m: len(found) for m, found in work.unrenewed.items()})


WARNINGS = 5
"""Warnings of one folder that are printed one by one."""


def plain(checked: Checked) -> str:
    """The result as text for a terminal or a log: every error; of each folder's warnings the first WARNINGS, and how many more."""
    lines, left = [], Counter[str]()
    for f in _ordered(checked.findings):
        folder = f.path.rpartition("/")[0]
        left[folder] += f.level != ERROR
        if f.level == ERROR or left[folder] <= WARNINGS:
            lines.append(f"{f.level.upper():7} {f.path}{f':{f.line}' if f.line else ''}  {f.about}\n        {f.what}"
                         + (f"\n        do: {f.do}" if f.do else ""))
    do = "run `alpha gate run --stale --ship` and `alpha gate catches --ship` on such a machine"
    lines += [f"WARNING {folder}: {n - WARNINGS} more warnings\n        do: {do}" for folder, n in sorted(left.items()) if n > WARNINGS]
    errors = sum(f.level == ERROR for f in checked.findings)
    counts = f"{checked.records} records, {checked.probes} probes and {checked.catches} catches looked at"
    lines += [f"NOT_RUN {machine}: {n} gates and planted faults await renewal: see above\n"
              "        do: run `alpha gate run --stale --ship` and `alpha gate catches --ship` on such a machine"
              for machine, n in sorted(checked.unrenewed.items())]
    lines.append(f"{'PASS' if checked.ok else 'FAIL'}: {errors} error{'s' if errors != 1 else ''}, "
                 f"{len(checked.findings) - errors} warnings; {counts}" + ("" if checked.records else ": nothing was there to check"))
    return "\n".join(lines)


def github(checked: Checked) -> str:
    """The result as GitHub workflow commands, which show beside the lines of a pull request."""
    return "\n".join(f"::{f.level} file={_escaped(f.path, True)},line={max(1, f.line)},title={_escaped(f.about, True)}::"
                     f"{_escaped(f.what + (' - ' + f.do if f.do else ''))}" for f in _ordered(checked.findings))


def _escaped(text: str, inside: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if inside else text


def _ordered(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda f: (f.level != ERROR, f.path, f.line, f.about))
