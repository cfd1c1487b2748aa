"""Forgeries of committed evidence, each with its content hash computed anew: what the merge gate must see through.

A forger holds the repository's text and no machine: old records, the code that writes them, the hash. `KINDS` are the ways; each draws its
place from a generator. They work on a small repository of sound evidence: real records of a few components, re-digested for today's code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Catalogue, Component
from alpha.gates import expected, merge, recompute
from alpha.registry import asked, catches, check, evidence, mutants, policy
from alpha.registry.catches import Catch, load_catches, save_catches
from alpha.registry.digest import component_digests
from alpha.registry.evidence import REFERENCE, load_file, path_of, reference_classes, save, shipped_root
from alpha.registry.faults import Fault, load_faults
from alpha.registry.history import hash_of, nonces_in
from alpha.registry.package import Package
from alpha.registry.pins import Pins, folder_of, key_of_record
from alpha.registry.record import Record
from alpha.train.catalogue import catalogue

KERNELS = {"cpu": ("gelu.f32.cpu", "rmsnorm.f32.cpu", "adamw.f32.cpu"), "cuda": ("gelu.bf16.sm90", "rmsnorm.bf16.sm90", "adamw.f32.sm90")}
OTHERS = ("sgd", "global_norm_clip", "registry.status", "tokenizer.bytes")

Key = tuple[str, str]
"""(component, gate)."""


@dataclass
class Evidence:
    """What a forger may write. records: by (component, gate); catches: by fault; code: digests of today's code; listed: the list of what is
    asked; policy: its digest; raw: what is written over the files at last."""

    records: dict[Key, Record]
    catches: dict[str, Catch]
    faults: dict[str, Fault]
    components: dict[str, Component]
    code: dict[Key, dict[str, str]]
    references: list[str]
    listed: dict[str, str] = field(default_factory=dict)
    policy: str = ""
    raw: Callable[[Path], None] | None = None

    def copy(self) -> Evidence:
        return replace(self, **{name: type(value)(value) for name, value in vars(self).items() if isinstance(value, (dict, list))})


class Forge:
    """A sound repository in a folder; `seen` says how the merge gate refuses what a forger made of it."""

    def __init__(self, folder: Path) -> None:
        self.root, package = folder / "baselines" / "evidence", Package()
        keys, everything = reference_classes(shipped_root()), {c.id: c for c in catalogue()}
        ids = [*KERNELS["cpu"], *KERNELS["cuda"], *(i for i in OTHERS if i in everything)]
        components = {i: everything[i] for i in ids}
        code = {(i, gate): component_digests(c, gate, package=package) for i, c in components.items() for gate in policy.owed(c)}
        records = {(i, gate): replace(r, digests=code[i, gate]) for i, c in components.items()
                   for gate, r in load_file(path_of(shipped_root(), keys["cuda" if c.backend == "cuda" else "cpu"], i)).items()
                   if (i, gate) in code and not expected.differences(c, r)}
        faults = {f.id: f for f in load_faults() if f.component in components}
        caught = {i: replace(c, digests={**code[faults[i].component, faults[i].gate], "fault": faults[i].digest})
                   for key in keys.values() for i, c in load_catches(shipped_root(), key).items()
                   if i in faults and (c.component, c.gate) == (faults[i].component, faults[i].gate)}
        faults = {i: f for i, f in faults.items() if i in caught}
        self.engines = mutants.measured_by(package)
        self._line, self._catch = cache(evidence._checked), cache(catches._parse)
        self.keys, self.missing = keys, [k for k in code if k not in records]
        for key in self.missing:  # its cases are newer than its committed record: it awaits renewal
            del code[key]
        self.sound = Evidence(records, caught, faults, components, code, list(keys.values()))
        shutil.copytree(shipped_root().parent / "perf", folder / "baselines" / "perf")
        for path in (folder / "baselines" / "perf").glob("c*_*.json"):
            body = json.loads(path.read_text())
            body["components"] = {i: pin for i, pin in body["components"].items() if i in components}
            path.write_text(json.dumps(body))
        for path in (folder / "baselines" / "perf").glob("*.relative.jsonl"):
            path.unlink()
        shutil.copy(mutants.path_of(shipped_root()), folder / "baselines")
        scores = mutants.load(shipped_root())
        assert scores is not None
        mutants.save(replace(scores[1], measure=self.engines), self.root)
        self._write(self.sound)
        self.sound.listed = self._today(self.sound)
        self.base = dict(self.sound.listed)
        self.past: dict[str, set[str]] = {}
        for path in self.root.rglob("*.jsonl"):
            for line in path.read_bytes().splitlines():
                for nonce in nonces_in(line):
                    self.past.setdefault(nonce, set()).add(hash_of(line))
        self._pins = {p: p.read_bytes() for p in (folder / "baselines" / "perf").iterdir()}
        self._scores = mutants.path_of(self.root).read_bytes()

    def pins(self, family: str) -> tuple[Pins, str]:
        """The pins of one family, and their key."""
        return Pins(folder_of(self.root)), next(key_of_record(r) for (_, gate), r in self.sound.records.items()
                                                if gate == "perf" and r.machine.startswith(family))

    def _today(self, e: Evidence) -> dict[str, str]:
        with self._patched(e):
            return asked.today(self._catalogue(e), self.root, e.faults.values())

    @staticmethod
    def _catalogue(e: Evidence) -> Catalogue:
        filled = Catalogue()
        for c in e.components.values():
            filled.add(c)
        return filled

    def _patched(self, e: Evidence) -> ExitStack:
        """The code as the forger left it."""
        stack = ExitStack()
        owed = {i: tuple(gate for j, gate in e.code if j == i) for i in e.components}
        for place, name, value in ((policy, "owed", lambda c: owed.get(c.id, ())), (policy, "AWAITING", {}),
                                   (check, "component_digests", lambda c, gate, package: e.code.get((c.id, gate), {})),
                                   (asked, "policy_digest", lambda sources: e.policy or "0" * 32), (asked, "texts", lambda: {}),
                                   (mutants, "measured_by", lambda package: self.engines),
                                   # most lines are read again and again
                                   (evidence, "_checked", self._line), (catches, "_parse", self._catch),
                                   (merge, "beside", lambda package: nullcontext(partial(map, self._recompute)))):
            stack.enter_context(mock.patch.object(place, name, value))
        return stack

    @staticmethod
    def _recompute(record: Record) -> list[str]:
        return list(_recomputed(record.line(), record.component))

    def _write(self, e: Evidence) -> None:
        for old in (*self.root.rglob("*.jsonl"), asked.path(self.root), asked.reasons_path(self.root)):
            old.unlink(missing_ok=True)
        save(e.records.values(), self.root)
        save_catches(e.catches.values(), self.root)
        (self.root / REFERENCE).write_text("".join(f"{key}\n" for key in e.references))
        if e.listed:
            asked.write(self.root, e.listed)

    def seen(self, e: Evidence) -> list[str]:
        """The errors of the merge gate; empty where the forgery passes."""
        for path, data in self._pins.items():
            path.write_bytes(data)
        mutants.path_of(self.root).write_bytes(self._scores)
        self._write(e)
        if e.raw is not None:
            e.raw(self.root)
        with self._patched(e):
            published = [i for i, gate in e.code if gate == "perf" and e.components[i].backend == "cuda"]
            checked = merge.judged(self._catalogue(e), self.root, list(e.faults.values()), self.past, self.base, published=published)
        return [f"{f.about}: {f.what}" for f in checked.findings if f.level == check.ERROR]


@cache
def _recomputed(line: str, component: str) -> tuple[str, ...]:
    """By line: most forgeries touch one record of many."""
    body = json.loads(line)
    body.pop("content")
    try:
        return tuple(recompute.recompute(Record(**body)))
    except Exception as error:  # a record so wrong that it cannot be recomputed is refused as well
        return (f"{type(error).__name__}: {error}",)


Forgery = Callable[[Evidence, np.random.Generator, Forge], object]
KINDS: dict[str, Forgery] = {}
PASSES: dict[str, str] = {}
"""Kinds that still get through -> why."""


def kind(name: str, why: str = "") -> Callable[[Forgery], Forgery]:
    """Enter a kind; `why` it still passes."""
    def enter(forge: Forgery) -> Forgery:
        KINDS[name] = forge
        if why:
            PASSES[name] = why
        return forge
    return enter


def _pick(rng: np.random.Generator, among: Any) -> Any:
    among = list(among)
    return among[int(rng.integers(len(among)))]


def _nonce(rng: np.random.Generator) -> str:
    return rng.bytes(16).hex()


def _of(e: Evidence, rng: np.random.Generator, gate: str = "", family: str = "", kernels: bool = False) -> Key:
    return _pick(rng, (k for k in e.records if gate in ("", k[1]) and (not family or e.records[k].machine.startswith(family))
                       and (not kernels or e.components[k[0]].kind == "kernel")))


def _cases(gate: str, change: Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any] | None], *, every: bool = False,
           fits: Callable[[Mapping[str, Any]], bool] = lambda c: True, fresh: bool = False) -> Forgery:
    """One case (or every one) of a kernel's record of this gate with other fields. `fresh`: under a nonce that was never seen."""
    def forge(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
        key = _of(e, rng, gate, kernels=True)
        record = e.records[key]
        places = [i for i, c in enumerate(record.cases) if fits(c)]
        if not places:
            raise LookupError
        chosen = places if every else [_pick(rng, places)]
        cases = [{**c, **(change(dict(c), rng) or {})} if i in chosen else c for i, c in enumerate(record.cases)]
        e.records[key] = replace(record, cases=cases, nonce=_nonce(rng) if fresh else record.nonce)
    return forge


BAD = (float("nan"), float("inf"), -1.0, "0", None, True)
for _gate, _field in (("parity", "ratio"), ("parity", "floor"), ("gradient", "error"), ("gradient", "bound"), ("gradient", "directions"),
                      ("determinism", "runs"), ("determinism", "distinct"), ("faults", "error"), ("faults", "bound"), ("perf", "share")):
    KINDS[f"{_gate}: {_field} is no number"] = _cases(
        _gate, lambda c, rng, name=_field: {name: _pick(rng, BAD if name != "floor" else BAD[:1] + BAD[2:4])},  # type: ignore[misc]
        fits=lambda c, name=_field: name in c)  # type: ignore[misc]
for _gate, _field, _values in (
        ("parity", "ratio", (2.1, 9.0)), ("parity", "floor", (0.0, 1.5)), ("parity", "error", (1e-9, 1.0)),
        ("gradient", "error", (0.06, 3.0)),
        ("gradient", "bound", (0.06, 1.0)), ("gradient", "directions", (0, -1)), ("determinism", "runs", (1, 7)),
        ("determinism", "distinct", (0, 2)), ("determinism", "digest", ("",)), ("faults", "error", (1.0,)), ("faults", "bound", (1.0,)),
        ("perf", "share", (1.01, 0.999, 0.2)), ("perf", "times_ns", ([], [0], [-5, 7])), ("perf", "ceiling_ns", (1, 10**9))):
    KINDS[f"{_gate}: {_field} out of range"] = _cases(
        _gate, lambda c, rng, name=_field, values=_values: {name: _pick(rng, values)},  # type: ignore[misc]
        fits=lambda c, name=_field: c.get(name) is not None and (name != "error" or "kind" not in c or c["kind"] == "exact"))  # type: ignore[misc]
KINDS["gradient: a bound wider than the engine writes"] = _cases(
    "gradient", lambda c, rng: {"error": 0.004, "bound": 0.005}, fits=lambda c: not c["name"].endswith(":native"), fresh=True)
for _gate, _change, _fits in (
        ("parity", lambda c, rng: {"ratio": round(float(rng.uniform(0, 1.9)), 3)}, lambda c: "ratio" in c),
        ("gradient", lambda c, rng: {"error": c["bound"] / 2}, lambda c: True),
        ("determinism", lambda c, rng: {"digest": rng.bytes(8).hex()}, lambda c: True)):
    KINDS[f"{_gate}: numbers changed, the nonce kept"] = _cases(_gate, _change, fits=_fits)  # type: ignore[arg-type]


def _listed(name: str, change: Callable[[list[Any], np.random.Generator], list[Any]]) -> None:
    """The list of cases of a record of any gate and component changed, under its nonce and under a new one."""
    for fresh in (False, True):
        def forge(e: Evidence, rng: np.random.Generator, f: Forge, fresh: bool = fresh) -> None:
            key = _of(e, rng)
            r = e.records[key]
            cases = change([dict(c) for c in r.cases], rng)
            e.records[key] = replace(r, cases=cases, declared=len(cases), nonce=_nonce(rng) if fresh else r.nonce)
        KINDS[f"cases: {name}{', under a new nonce' if fresh else ''}"] = forge


_listed("one left out", lambda cases, rng: cases[1:])
_listed("one renamed", lambda cases, rng: [{**cases[0], "name": "easy"}, *cases[1:]])
_listed("one put in", lambda cases, rng: [*cases, {**cases[0], "name": "easy"}])
_listed("one twice", lambda cases, rng: [*cases, cases[-1]])
_listed("one of another sort", lambda cases, rng: [{**cases[0], "kind": "vacuous"}, *cases[1:]])
_listed("one that stands for more", lambda cases, rng: [{**cases[0], "n": cases[0].get("n", 1) + 3}, *cases[1:]])
_listed("all replaced by one", lambda cases, rng: [{**cases[0], "name": "all"}])


@kind("parity: a relative case turned into a contract with a wide bound")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng, "parity", kernels=True)
    r = e.records[key]
    e.records[key] = replace(r, nonce=_nonce(rng), cases=[
        {"kind": "contract", "name": c["name"], "error": 0.0, "bound": 9.0, "cases": 1} if c["kind"] == "relative" else c for c in r.cases])


@kind("declared: fewer than ran")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng)
    e.records[key] = replace(e.records[key], declared=int(rng.integers(-1, len(e.records[key].cases))))


def _probes(name: str, change: Callable[[list[Any], np.random.Generator], list[Any]]) -> None:
    def forge(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
        key = _of(e, rng, "parity", kernels=True)
        r = e.records[key]
        e.records[key] = replace(r, probes=change([list(p) for p in r.probes], rng))
    KINDS[f"probes: {name}"] = forge


def _flip(bits: str) -> str:
    """A float whose exponent is another one."""
    return bits[:-2] + f"{int(bits[-2:], 16) ^ 0x01:02x}"


_probes("of a wrong kernel", lambda p, rng: [[*x[:3], _flip(x[3])] for x in p])
_probes("one of a wrong kernel", lambda p, rng: [[*x[:3], _flip(x[3])] if i == len(p) // 2 else x for i, x in enumerate(p)])
_probes("left out", lambda p, rng: [])
_probes("one left out", lambda p, rng: p[1:])
_probes("at easier places", lambda p, rng: [[x[0], x[1], 0, x[3]] for x in p])
_probes("no bits", lambda p, rng: [[*x[:3], "zz"] for x in p])


@kind("probes: of another nonce")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng, "parity", kernels=True)
    e.records[key] = replace(e.records[key], nonce=_nonce(rng))


@kind("code: changed, old records re-digested")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    """AdamW times 1.01: the numbers of before for the code of today, of every gate and of every catch."""
    component = _pick(rng, e.components)
    e.code = {k: {**d, "implementation": rng.bytes(32).hex()} if k[0] == component else d for k, d in e.code.items()}
    e.records = {k: replace(r, digests=e.code[k]) if k[0] == component else r for k, r in e.records.items()}


@kind("code: changed, records kept")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng)
    e.code[key] = {**e.code[key], _pick(rng, e.code[key]): rng.bytes(32).hex()}


@kind("code: a digest left out of a record")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng)
    gone = _pick(rng, e.code[key])
    e.records[key] = replace(e.records[key], digests={k: v for k, v in e.code[key].items() if k != gone})


@kind("nonce: chosen by hand")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng)
    e.records[key] = replace(e.records[key], nonce=_pick(rng, ("00", "", "forged", "A" * 32, _nonce(rng)[:-1])))


@kind("nonce: of another record")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    one, other = (list(e.records)[int(i)] for i in rng.choice(len(e.records), 2, replace=False))
    e.records[one] = replace(e.records[one], nonce=e.records[other].nonce)


@kind("copy: another component's record under this name")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng)
    other = _pick(rng, (k for k in e.records if k[1] == key[1] and k[0] != key[0]))
    e.records[key] = replace(e.records[other], component=key[0], machine=e.records[key].machine, digests=e.code[key])


@kind("copy: a line of another class")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng, family="cpu")
    other = e.records[key].machine.replace("Haswell", "Zen").replace("np2.2", "np2.4")
    e.records[key[0], f"{key[1]} there"] = replace(e.records[key], machine=other)


def _environment(name: str, family: str, gate: str, change: Mapping[str, str], why: str = "") -> None:
    @kind(f"environment: {name}", why)
    def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
        key = _of(e, rng, gate, family, kernels=True)
        r = e.records[key]
        env = {k: v for k, v in {**r.environment, **change}.items() if v}
        e.records[key] = replace(r, environment=env, nonce=_nonce(rng) if gate == "faults" else r.nonce)


_environment("another NumPy", "cpu", "faults", {"numpy": "2.4.1"})
_environment("another BLAS", "cpu", "faults", {"blas": "openblas-SkylakeX 0.3.29"})
_environment("no processor", "", "faults", {"processor": ""})
_environment("no time", "", "faults", {"seconds": ""})
_environment("no driver", "cuda", "faults", {"driver": ""})
_environment("a driver on a CPU", "cpu", "faults", {"driver": "580.1"})
_environment("no FLOPs model", "", "perf", {"flops": ""})
_environment("a processor without pins", "cpu", "perf", {"processor": "Made-6-1"})
_environment("another Python and CPU name", "", "faults", {"python": "3.12.1", "cpu": "another"},
             "what the environment says beyond the class is for the reader")


@kind("perf: faster, numbers that belong together")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng, "perf")
    r = e.records[key]
    cases = [{**c, "share": 0.99, "times_ns": [max(1, round(c["ceiling_ns"] / 0.99))] * len(c["times_ns"])} for c in r.cases]
    e.records[key] = replace(r, cases=cases, nonce=_nonce(rng))


@kind("perf: a slow kernel")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng, "perf")
    r = e.records[key]
    cases = [{**c, "share": float(f"{c['share'] / 4:.4g}"), "times_ns": [4 * t for t in c["times_ns"]]} for c in r.cases]
    e.records[key] = replace(r, cases=cases, nonce=_nonce(rng))


def _pinned(name: str, factor: float) -> None:
    @kind(f"pins: {name}")
    def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
        key = _of(e, rng, "perf")

        def write(root: Path) -> None:
            pins, at = f.pins("cuda" if e.components[key[0]].backend == "cuda" else "cpu")
            pin = pins.load(at)[key[0]]
            shares = {case: tuple(min(1.0, share * factor) for share in found) for case, found in pin.shares.items()}
            pins.save(at, {key[0]: replace(pin, shares=shares)})

        e.raw = write


_pinned("lowered", 0.4)
_pinned("raised", 2.5)


@kind("pins: gone")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    family = _pick(rng, ("cpu", "cuda"))
    e.raw = lambda root: f.pins(family)[0].path(f.pins(family)[1]).unlink()


@kind("gone: a record")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    del e.records[_of(e, rng)]


@kind("gone: the evidence of a class with its line in REFERENCE")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    family = _pick(rng, ("cpu", "cuda"))
    e.references = [key for key in e.references if not key.startswith(family)]
    e.records = {k: r for k, r in e.records.items() if not r.machine.startswith(family)}
    e.catches = {i: c for i, c in e.catches.items() if not c.machine.startswith(family)}


def _less(name: str, change: Callable[[Evidence, np.random.Generator], None]) -> None:
    """Less is asked, and the list left, written anew, or written anew with the reason of another item."""
    for how in ("", ", the list written anew", ", with a reason for something else"):
        def forge(e: Evidence, rng: np.random.Generator, f: Forge, how: str = how) -> None:
            change(e, rng)
            if not how:
                return

            def write(root: Path) -> None:
                asked.write(root, f._today(e))
                if "reason" in how:
                    asked.reasons_path(root).write_text('[[renewed]]\nwhy = "late"\nitems = ["fault other 0"]\n')
            e.raw = write
        KINDS[f"less: {name}{how}"] = forge


def _fewer_faults(e: Evidence, rng: np.random.Generator) -> None:
    gone = _pick(rng, e.faults)
    del e.faults[gone], e.catches[gone]


def _fewer_gates(e: Evidence, rng: np.random.Generator) -> None:
    key = _of(e, rng)
    del e.records[key], e.code[key]
    e.faults = {i: x for i, x in e.faults.items() if (x.component, x.gate) != key}
    e.catches = {i: c for i, c in e.catches.items() if i in e.faults}


def _fewer_components(e: Evidence, rng: np.random.Generator) -> None:
    gone = _pick(rng, e.components)
    e.components = {i: c for i, c in e.components.items() if i != gone}
    e.records = {k: r for k, r in e.records.items() if k[0] != gone}
    e.code = {k: d for k, d in e.code.items() if k[0] != gone}
    e.faults = {i: x for i, x in e.faults.items() if x.component != gone}
    e.catches = {i: c for i, c in e.catches.items() if i in e.faults}


def _other_policy(e: Evidence, rng: np.random.Generator) -> None:
    e.policy = rng.bytes(16).hex()


def _errors(e: Evidence, rng: np.random.Generator) -> None:
    e.catches = {i: replace(c, record=None, error="Timeout: the gate did not end within 20 s") for i, c in e.catches.items()}


def _one_error(e: Evidence, rng: np.random.Generator) -> None:
    one = _pick(rng, (i for i, c in e.catches.items() if c.record is not None))
    e.catches[one] = replace(e.catches[one], record=None, error="Timeout: the gate did not end within 20 s")


_less("a planted fault with its catch", _fewer_faults)
_less("a gate with its evidence", _fewer_gates)
_less("a component with its evidence", _fewer_components)
_less("another policy", _other_policy)
_less("all catches replaced by one error", _errors)
_less("one catch replaced by an error", _one_error)


@kind("list: gone")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    e.listed = {}


@kind("mutants: a lower score, pinned")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    def write(root: Path) -> None:
        found = mutants.load(root)
        assert found is not None
        caught, counted, excused = found[0].areas[mutants.ALL]
        mutants.path_of(root).unlink()
        mutants.save(replace(found[0], areas={**found[0].areas, mutants.ALL: (caught - 5, counted, excused)}), root)

    e.raw = write


@kind("mutants: fewer drawn")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    def write(root: Path) -> None:
        found = mutants.load(root)
        assert found is not None
        mutants.path_of(root).unlink()
        mutants.save(replace(found[0], areas={mutants.ALL: (2, 2, 0)}), root)

    e.raw = write


@kind("catches: one of a fault that changed, kept")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    one = _pick(rng, e.faults)
    e.faults[one] = replace(e.faults[one], replace="pass")


@kind("catches: of a fault that changed, re-digested")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    one = _pick(rng, (i for i, c in e.catches.items() if c.record is not None))
    e.faults[one] = replace(e.faults[one], replace="pass")
    e.catches[one] = replace(e.catches[one], digests={**e.catches[one].digests, "fault": e.faults[one].digest})


@kind("catches: another fault's record")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    one = _pick(rng, (i for i, c in e.catches.items() if c.record is not None))
    others = [c for i, c in e.catches.items() if c.record is not None and i != one and (c.component, c.gate)
              == (e.catches[one].component, e.catches[one].gate)]
    if not others:
        raise LookupError
    e.catches[one] = replace(e.catches[one], record=_pick(rng, others).record)


@kind("catches: a record that passes")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    one = _pick(rng, (i for i, c in e.catches.items() if c.record is not None and (c.component, c.gate) in e.records))
    c = e.catches[one]
    e.catches[one] = replace(c, record=replace(e.records[c.component, c.gate], nonce=_nonce(rng)))


def _text(name: str, change: Callable[[str], str]) -> None:
    @kind(f"text: {name}")
    def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
        key = _of(e, rng)

        def write(root: Path) -> None:
            path = path_of(root, e.records[key].machine, key[0])
            path.write_text(change(path.read_text()))

        e.raw = write


_text("a number edited by hand", lambda t: t.replace('"declared":', '"declared":1', 1))
_text("spaces", lambda t: t.replace(",", ", ", 1))
_text("torn", lambda t: t[:-9])
_text("a line twice", lambda t: t + t.splitlines()[-1] + "\n")


@kind("invented: a gate of a kernel that never ran", "cases come from the code, numbers from older records; only a "
      "machine that measures it again can tell")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng, _pick(rng, ("gradient", "faults")), kernels=True)
    r, nonce = e.records[key], _nonce(rng)
    skeleton = expected.expected(e.components[key[0]], key[1], nonce) or []
    made = [{**r.cases[i % len(r.cases)], "name": c.name} for i, c in enumerate(skeleton)]
    e.records[key] = replace(r, cases=made, declared=len(made), nonce=nonce)


@kind("invented: determinism of a kernel that never ran", "a digest of outputs that nobody computed looks like one that somebody did")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng, "determinism", kernels=True)
    r, nonce = e.records[key], _nonce(rng)
    names = [c.name for c in expected.expected(e.components[key[0]], key[1], nonce) or []]
    made = [{"name": n, "runs": 334, "distinct": 1, "digest": rng.bytes(8).hex()} for n in names]
    e.records[key] = replace(r, cases=made, declared=len(made), nonce=nonce)


@kind("invented: times beside the pinned shares", "times near the pin, a ceiling that fits: only another measurement tells")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _of(e, rng, "perf")
    e.records[key] = replace(e.records[key], nonce=_nonce(rng))


@kind("invented: a catch", "a failing record is as easily written as a passing one; the fault has to be planted again")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    one = _pick(rng, (i for i, c in e.catches.items() if c.record is not None))
    c = e.catches[one]
    assert c.record is not None
    e.catches[one] = replace(c, record=replace(c.record, nonce=_nonce(rng)))


@kind("invented: the record of a contract", "as with kernels; its numbers come from nowhere but the machine")
def _(e: Evidence, rng: np.random.Generator, f: Forge) -> None:
    key = _pick(rng, (k for k in e.records if e.components[k[0]].kind != "kernel"))
    e.records[key] = replace(e.records[key], nonce=_nonce(rng))
