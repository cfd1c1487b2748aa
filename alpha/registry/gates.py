"""The gate table: everything that is said of a gate is said here, once. Floor 3; data.

A gate is one entry of TABLE and its engine's file, whose `measure(component, nonce)` gives a Record. Engines lie on a higher floor:
they are named, read as text for digests and looked up when they run, never imported from here. Components name their profile, which
says what they owe.

Nothing here is digested: what is asked of evidence makes none stale, and an engine is bound by its own text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alpha.component import Component
from alpha.errors import InputError
from alpha.registry.cases import CaseRecord, Contract, Exact, Refusal, Relative, Repeats, Share, Slope, Slowdown, read
from alpha.registry.record import Record


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One gate.

    engine    module:function that measures it; `engines`: in its place for kernels of these back ends, and for
              other components of these profiles
    calls     functions of SUBJECTS by which the engine calls a kernel, part of what evidence binds to
    cases     sorts of cases that it writes (cases.py); judge.py has a judge for each sort, and the first stands for an engine that failed
    owed_by   profiles of the components that owe it
    seconds   what it takes about, until a record says how long it took here; `slow`: the same for components that take far longer
    carried   whether evidence may come from another machine class (policy.carries says when); else it is always run on the class itself
    repeats   (profile, back end) -> fewest runs that a record must hold, all cases together; every other component's cases run twice
    pinned    whether a record is judged by pinned shares of ceilings (pins.py)
    """

    name: str
    engine: str
    engines: Mapping[str, str] = field(default_factory=dict)
    calls: tuple[str, ...] = ("warm_up", "samples", "bind")
    cases: tuple[type[CaseRecord], ...]
    owed_by: tuple[str, ...]
    seconds: float
    slow: Mapping[str, float] = field(default_factory=dict)
    carried: bool = False
    repeats: Mapping[tuple[str, str], int] = field(default_factory=dict)
    pinned: bool = False


_WHOLE_MODELS = {"executor.cuda": 40.0}
"""It holds whole models against the oracle and walks eight training runs."""

TABLE = (
    Gate(name="parity", engine="alpha.gates.parity:measure",
         engines={"cpu": "alpha.gates.cpu.parity:measure", "cuda": "alpha.gates.cuda.parity:measure",
                  "outside": "alpha.gates.outside.parity:measure"},
         cases=(Exact, Relative, Contract),
         owed_by=("kernel", "host", "program", "model", "count", "collective"), seconds=0.6, slow=_WHOLE_MODELS, carried=True),
    Gate(name="gradient", engine="alpha.gates.gradient:measure", engines={"cpu": "alpha.gates.cpu.gradient:measure"},
         cases=(Slope, Contract),
         owed_by=("kernel", "model", "collective"), seconds=0.2, carried=True),
    Gate(name="determinism", engine="alpha.gates.determinism:measure",
         engines={"cpu": "alpha.gates.cpu.determinism:measure", "cuda": "alpha.gates.cuda.determinism:measure"},
         cases=(Repeats,),
         owed_by=("kernel", "host", "program", "model", "collective"), seconds=0.5, slow=_WHOLE_MODELS,
         # 300 runs find a 1 % flake with 95 % probability, 100 a 3 % one
         repeats={("kernel", "cpu"): 100, ("kernel", "cuda"): 300, ("kernel", "outside"): 100}),
    Gate(name="faults", engine="alpha.gates.faults:measure", engines={"cpu": "alpha.gates.cpu.faults:measure"},
         cases=(Refusal, Contract),
         calls=("warm_up", "samples", "refused", "bind"),
         owed_by=("kernel", "host", "program", "model", "collective"), seconds=0.1, slow=_WHOLE_MODELS),
    Gate(name="perf", engine="alpha.gates.perf:measure",
         engines={"cuda": "alpha.gates.cuda.perf:measure", "outside": "alpha.gates.outside.perf:measure",
                  "collective": "alpha.gates.contracts.ranks.perf:measure",
                  "device_collective": "alpha.gates.contracts.device_perf:measure"},
         cases=(Share, Slowdown),
         calls=("warm_up", "bind"),  # its calls are not drawn from samples
         owed_by=("kernel", "collective"), seconds=0.6, pinned=True),
)
"""Every gate, in the order in which a component's are run."""

OWES_AS: Mapping[str, str] = {"device_collective": "collective"}
"""Profiles whose components owe what those of another one do. Collectives among GPUs have an engine of perf of their own."""

GATES = tuple(gate.name for gate in TABLE)
"""Their names."""

PINNED = tuple(gate.name for gate in TABLE if gate.pinned)
"""Those that are judged by pins."""

SUBJECTS: Mapping[str, str] = {"cpu": "alpha.gates.cpu.subjects", "cuda": "alpha.gates.cuda.subjects",
                               "outside": "alpha.gates.outside.subjects"}
"""How the engines call kernels of each back end: modules with `warm_up`, `samples`, `refused` and `bind`, found by name (subjects.py)."""

_BY_NAME = {gate.name: gate for gate in TABLE}


def gate_of(name: str) -> Gate:
    """The entry of a gate; InputError for an unknown one."""
    if name not in _BY_NAME:
        raise InputError("no such gate", came=name, expected=", ".join(GATES))
    return _BY_NAME[name]


def cases_of(record: Record) -> list[CaseRecord]:
    """The cases of a record, understood; InputError where it is of an unknown gate."""
    sorts = gate_of(record.gate).cases
    return [read(sorts, case) for case in record.cases]


def asked_of(profile: str) -> tuple[str, ...]:
    """Gates that a profile's components owe, in order, exemptions (policy.py) not taken off."""
    return tuple(gate.name for gate in TABLE if OWES_AS.get(profile, profile) in gate.owed_by)


def engine_of(name: str, component: Component) -> str:
    """module:function of the engine that measures a gate on this component; InputError for an unknown gate."""
    gate = gate_of(name)
    return gate.engines.get(component.backend if component.kind == "kernel" else component.profile, gate.engine)


def measured_by(name: str, component: Component) -> list[str]:
    """module:function of all that measures a gate on this component: the engine, and how it calls a kernel of this back end."""
    calls = gate_of(name).calls if component.kind == "kernel" else ()
    module = SUBJECTS.get(component.backend, SUBJECTS["cpu"])
    return [engine_of(name, component), *(f"{module}:{call}" for call in calls)]


def seconds_of(name: str, component: Component) -> float:
    """About how long a gate of this component takes."""
    gate = gate_of(name)
    return gate.slow.get(component.id, gate.seconds)
