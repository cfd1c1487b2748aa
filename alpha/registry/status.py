"""The registry: whether a component is usable on a machine class, and if not, which command supplies what is missing. Floor 3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alpha.component import Catalogue, Component
from alpha.errors import GraphError, InputError, UngatedError
from alpha.registry import policy
from alpha.registry.claims import why_no_claim
from alpha.registry.digest import calls_blas, component_digests
from alpha.registry.evidence import Evidence, Found, classes, current, default_roots, reference_classes, stale
from alpha.registry.gates import gate_of
from alpha.registry.gpu import AnyClass, class_of_key, devices_of, family, gpu_class, sort, sort_of, why_not_here
from alpha.registry.judge import NOT_RUN, judge
from alpha.registry.machine import MachineClass, machine_class
from alpha.registry.package import Package
from alpha.registry.pins import Pins, folder_of
from alpha.types import Attrs, TensorType

Call = tuple[str, Sequence[TensorType], Attrs]
"""(component id, input types, attributes): one launch of a Program."""


@dataclass(frozen=True)
class GateStatus:
    """One owed gate. `verdict` is what the best evidence says; `why` is empty iff the gate is satisfied.

    `stale`: names of the digests that changed since; `machine`: class of the evidence (another one when it was carried over);
    `no_claim`: perf only, why no speed figure may rest on it; empty when one may.
    """

    gate: str
    verdict: str
    why: str = ""
    stale: tuple[str, ...] = ()
    machine: str = ""
    root: Path | None = None
    no_claim: str = "not the perf gate"

    @property
    def satisfied(self) -> bool:
        return not self.why


@dataclass(frozen=True)
class Status:
    """`usable`: every owed gate satisfied here and everything presupposed usable. `claimable`: a speed figure may be quoted as ours."""

    component: str
    gates: Mapping[str, GateStatus]
    exempt: Mapping[str, str] = field(default_factory=dict)
    presupposed: tuple[str, ...] = ()
    """What it presupposes and is not usable itself."""

    @property
    def usable(self) -> bool:
        return not self.presupposed and bool(self.gates) and all(g.satisfied for g in self.gates.values())

    @property
    def claimable(self) -> bool:
        return self.usable and "perf" in self.gates and not self.gates["perf"].no_claim

    @property
    def no_claim(self) -> str:
        """Why no speed figure of it may be quoted; empty when it is claimable."""
        if "perf" not in self.gates:
            return "it owes no perf gate"
        return self.gates["perf"].no_claim or ("" if self.usable else "it is not usable")

    @property
    def missing(self) -> tuple[str, ...]:
        """Gates that must be run, in the order of the gate table."""
        return tuple(g.gate for g in self.gates.values() if not g.satisfied)


class Registry:
    """The status of every component of a catalogue on one machine class. A snapshot: make a new one after files changed.

    `machine`: the CPU's class, `gpu`: one of GPUs (default: this machine's). Where there are no such GPUs, what asks for them is judged by
    the evidence of the roots' reference class; `why_not_here` says that they cannot run. Pins lie beside the first root.
    """

    def __init__(self, catalogue: Catalogue, roots: Sequence[Path] | None = None, machine: MachineClass | None = None,
                 package: Package | None = None, gpu: AnyClass | None = None) -> None:
        self.catalogue = catalogue
        self.machine = machine or machine_class()
        self._gpus = {} if gpu is None else {sort_of(gpu.key): gpu}
        self.evidence = Evidence(default_roots() if roots is None else roots)
        self.pins = Pins(folder_of(self.evidence.roots[0]))
        self._package = package or Package()
        self._status: dict[str, Status] = {}
        self._gates: dict[tuple[str, str], GateStatus] = {}
        self._blas: dict[str, bool] = {}
        self._busy: list[str] = []

    def digests(self, component: Component, gate: str) -> dict[str, str]:
        """Today's digests."""
        return component_digests(component, gate, package=self._package)

    def machine_of(self, component: Component) -> AnyClass | None:
        """The class whose evidence says whether this component is usable; None when there are not as many GPUs as it asks for, and no
        reference class of so many."""
        if family(component) == "cpu":
            return self.machine
        wanted = sort(component)
        if wanted not in self._gpus:
            keys = [k for root in self.evidence.roots if (k := reference_classes(root).get(wanted))]
            found = gpu_class(devices_of(component)) or (class_of_key(keys[0]) if keys else None)
            if found is None:
                return None
            self._gpus[wanted] = found
        return self._gpus[wanted]

    def status(self, component_id: str) -> Status:
        """Every owed gate of a component; GraphError if components presuppose each other in a circle."""
        if component_id in self._status:
            return self._status[component_id]
        if component_id in self._busy:
            circle = [*self._busy[self._busy.index(component_id) :], component_id]
            raise GraphError("components presuppose each other in a circle", came=" -> ".join(circle), do="remove one `presupposes`")
        component = self.catalogue[component_id]
        self._busy.append(component_id)
        try:
            presupposed = tuple(p for p in component.presupposes if not self.status(p).usable)
        finally:
            self._busy.pop()
        gates = {gate: self.gate(component.id, gate) for gate in policy.owed(component)}
        self._status[component_id] = Status(component_id, gates, policy.exempt(component), presupposed)
        return self._status[component_id]

    def gate(self, component_id: str, gate: str) -> GateStatus:
        """One owed gate of a component, whatever the others and what it presupposes say."""
        key = component_id, gate
        if key not in self._gates:
            self._gates[key] = self._gate(self.catalogue[component_id], gate)
        return self._gates[key]

    def _gate(self, component: Component, gate: str) -> GateStatus:
        machine = self.machine_of(component)
        if machine is None:
            return GateStatus(gate, NOT_RUN, why_not_here(component) or f"no reference class of the sort {sort(component)}")
        try:
            digests = self.digests(component, gate)
        except InputError as error:  # code that is being written: a source that does not parse or compile has no digest
            return GateStatus(gate, NOT_RUN, f"{error.what}: {error.came}", machine=machine.key)
        found = self._best(component, gate, digests, machine)
        if found is None:
            return GateStatus(gate, NOT_RUN, f"no evidence on {machine.key}")
        pin = self.pins.of(found.record)
        judgement = judge(found.record, runs=policy.required_runs(component, gate), pin=pin)
        changed = tuple(stale(found.record, digests))
        if changed:
            why = f"evidence is older than the code: {', '.join(changed)} changed"
        elif not judgement.satisfied:
            why = "; ".join([judgement.verdict, *judgement.reasons[:3]])
        else:
            why = ""
        no_claim = why_no_claim(judgement, pin, digests, self.pins, found.record) if gate == "perf" else "not the perf gate"
        return GateStatus(gate, judgement.verdict, why, changed, found.record.machine, found.root, why or no_claim)

    def _best(self, component: Component, gate: str, digests: Mapping[str, str], machine: AnyClass) -> Found | None:
        """Evidence of this class; where that is missing or stale, current evidence that the policy lets carry over."""
        here = self.evidence.best(component.id, machine.key, gate, digests)
        if here is not None and current(here.record, digests):
            return here
        if gate_of(gate).carried:
            others = sorted({key for root in self.evidence.roots for key in classes(root)} - {machine.key})
            for key in (k for k in others if sort_of(k) == sort_of(machine.key)):
                if not policy.carries(component, gate, class_of_key(key), machine, blas=self._calls_blas(component)):
                    continue
                found = self.evidence.best(component.id, key, gate, digests)
                if found is not None and current(found.record, digests):
                    return found
        return here

    def _calls_blas(self, component: Component) -> bool:
        if component.id not in self._blas:
            self._blas[component.id] = calls_blas(component.implementation, self._package)
        return self._blas[component.id]

    def why_not(self, component_id: str) -> list[str]:
        """What is missing before a component is usable, each with the command that supplies it; empty when it is usable."""
        status = self.status(component_id)
        lines = [f"{component_id} {g.gate}: {g.why}; run `alpha gate run {component_id} --gate {g.gate}`"
                 for g in status.gates.values() if not g.satisfied]
        if not status.gates:
            lines.append(f"{component_id}: its profile owes no gate, so nothing can make it usable; mend it, or alpha/registry/gates.py")
        for p in status.presupposed:
            lines.append(f"{component_id} presupposes {p}, which is not usable")
            lines += [f"  {line}" for line in self.why_not(p)]
        return lines

    def require(self, ids: Iterable[str] = (), calls: Iterable[Call] = ()) -> None:
        """UngatedError unless every component is usable here and every call lies inside the envelope that its evidence covers."""
        calls = list(calls)
        wrong: dict[str, None] = {}
        for component_id in sorted({*ids, *(c[0] for c in calls)}):
            wrong.update(dict.fromkeys(self.why_not(component_id)))
        for component_id, types, attrs in calls:
            outside = self.catalogue[component_id].envelope.why_outside(types, attrs)
            if outside is not None:
                wrong[f"{component_id} is called outside its envelope: {outside}"] = None
        if wrong:
            raise UngatedError("a run needs components that are not usable on this machine class", came="\n    " + "\n    ".join(wrong),
                               expected=f"current, passing evidence on {self.machine.key} for every component and every call",
                               do="run the commands above, or `alpha gate run --for RUN.toml`; `alpha lab` runs ungated, stamped")
