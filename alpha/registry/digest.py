"""Digests of what one gate's evidence of one component binds to: all that can change the result, and nothing else. Floor 3.

Symbols are digested by package.py. Here: values that are held and not named (functions of an op row, limits of an envelope), and which
symbols and values count for a gate. What no edge of the code leads to is bound by name: the op rows whose names the code says, and for a
whole program the kernels of these rows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from alpha.component import Component
from alpha.ops.compose import FusedSpec
from alpha.ops.spec import OpSpec
from alpha.ops.table import row, table
from alpha.registry.gates import measured_by
from alpha.registry.package import NAME, Package, Target, Words, is_mentioned

_BLAS_CALLS = frozenset({"@", "matmul", "dot", "vdot", "inner", "einsum", "tensordot", "linalg"})


def calls_blas(value: Any, package: Package) -> bool:
    """Whether a matrix product or another BLAS call can be reached from a function or class: decides what evidence carries over.

    Names are all that is looked at, so a function of ours called `dot` counts too, which only asks for more evidence.
    """
    targets, words = package.closure(_targets(value, package))
    return any(f".{name}" in words for name in _BLAS_CALLS) or any(
        t[0] == "text" and t[1].split(".")[-1] in _BLAS_CALLS for t in targets)


# Values that are held, not named: functions of an op row, limits of an envelope ----------------------------------------------------


def value_digest(value: Any, package: Package) -> str:
    """Digest of a value: functions and classes by their source, with what closures and defaults hold; plain data by content.

    An object of a class outside the package counts as its class's name and nothing more.
    """
    targets, words = _mentioned(value, package)
    return _digest(value, package, package.closure(targets, words)[1])


@dataclass(frozen=True, eq=False)
class Held:
    """A value that many digests hold: it is looked through once for a package. `key`: its name there."""

    key: tuple[Any, ...]
    value: Any
    of: Any = None
    """What the key's id belongs to: it lives as long as the key is known."""


def _digest(value: Any, package: Package, words: Words) -> str:
    return hashlib.sha256(_Description(package, words).of(value).encode()).hexdigest()


def _mentioned(value: Any, package: Package) -> tuple[frozenset[Target], Words]:
    """What a value's functions and classes are, and the texts that it holds."""
    description = _Description(package, None)
    description.of(value)
    return frozenset(description.targets), frozenset(description.texts)


def _targets(value: Any, package: Package) -> tuple[Target, ...]:
    if isinstance(value, functools.partial):
        return _targets(value.func, package)
    if isinstance(value, MethodType):
        value = value.__func__
    if not hasattr(value, "__qualname__"):
        value = type(value)
    module, qualname = package.module_of(value), value.__qualname__
    if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
        return (("lambda", module, str(value.__code__.co_firstlineno)),)
    return package.roots(f"{module}:{qualname.split('.<locals>')[0]}")


class _Description:
    """Writes a value down where these words are mentioned; None: only notes `targets` and `texts`."""

    def __init__(self, package: Package, words: Words | None) -> None:
        self.package, self.words = package, words
        self.targets: dict[Target, None] = {}
        self.texts: set[str] = set()

    def _held(self, value: Held) -> str:
        package = self.package
        place = "held", *value.key
        if place not in package.known:
            inside = _Description(package, None)
            inside.of(value.value)
            package.known[place] = value, inside, package.members(inside.targets)
        _, inside, slots = package.known[place]
        if self.words is None:
            self.targets.update(inside.targets)
            self.texts |= inside.texts
            return ""
        key = "text", *value.key, self.words & slots
        if key not in package.known:
            package.known[key] = _digest(value.value, package, self.words)
        return str(package.known[key])

    def _symbol(self, targets: tuple[Target, ...]) -> str:
        self.targets.update(dict.fromkeys(targets))
        return "" if self.words is None else self.package.hash(targets, self.words)

    def of(self, value: Any, held: tuple[int, ...] = ()) -> str:
        """The text of a value. `held`: what it lies in."""
        if isinstance(value, str) and NAME.fullmatch(value):
            self.texts.add(f"'{value}")
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return repr(value)
        if id(value) in held:
            return f"again {held.index(id(value))}"
        if isinstance(value, Held):
            return self._held(value)
        held = (*held, id(value))
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{self.of(k, held)}:{self.of(v, held)}" for k, v in value.items()) + "}"
        if isinstance(value, (tuple, list)):
            return "[" + ",".join(self.of(v, held) for v in value) + "]"
        if isinstance(value, (set, frozenset)):
            return "{" + ",".join(sorted(self.of(v, held) for v in value)) + "}"
        if isinstance(value, np.ndarray):
            return f"array {value.dtype.str} {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
        if isinstance(value, functools.partial):
            return "partial " + self.of([value.func, value.args, value.keywords], held)
        if isinstance(value, MethodType):
            return "method " + self.of([value.__func__.__name__, type(value.__self__), value.__self__], held)
        if isinstance(value, ModuleType):
            inside = value.__name__.split(".")[0] == self.package.name
            return self._symbol((("all", value.__name__),)) if inside else f"module {value.__name__}"
        if isinstance(value, FunctionType):
            cells = {n: c.cell_contents for n, c in zip(value.__code__.co_freevars, value.__closure__ or ()) if _filled(c)}
            inner = value.__name__ == "<lambda>" or "<locals>" in value.__qualname__
            bound = [cells, value.__defaults__, value.__kwdefaults__] if inner else [cells]
            own = "" if value.__name__ == "<lambda>" else value.__qualname__.rpartition("<locals>.")[2]
            return f"function {own} {self._symbol(_targets(value, self.package))} {self.of(bound, held)}"
        if hasattr(value, "__qualname__"):  # classes, cached functions, builtins, ufuncs of newer NumPy
            inside = (getattr(value, "__module__", "") or "").split(".")[0] == self.package.name
            return f"symbol {self._symbol(_targets(value, self.package)) if inside else _foreign(value)}"
        cls = type(value)
        if cls.__module__.split(".")[0] != self.package.name:
            return f"object {_foreign(cls)} {getattr(value, '__name__', '')}"
        state = _state(value) if is_dataclass(value) else dict(vars(value))
        return f"instance {self._symbol(_sliced(_targets(cls, self.package)))} {self.of(state, held)}"


def _sliced(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    return tuple(("def", *t[1:]) if t[0] == "whole" else t for t in targets)


def _state(value: Any) -> dict[str, Any]:
    """Fields of a data class's object that are not at their default."""
    found = {}
    for f in fields(value):
        held = getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if default is MISSING or not (held is default or (type(held) is type(default) and repr(held) == repr(default))):
            found[f.name] = held
    return found


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises when a recursive function is not bound yet)
    except ValueError:
        return False
    return True


def _foreign(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}"


# What one gate's evidence of one component binds to ---------------------------------------------------------------------------------

_NOT_ROW = {"samples", "exact", "why_no_vjp", "vjp", "flops", "nbytes"}
"""Fields of a row that are cases or prose, or that count for some gates alone."""


def component_digests(component: Component, gate: str, *, package: Package | None = None,
                      extra: Mapping[str, Callable[[], str]] | None = None) -> dict[str, str]:
    """name -> hex of everything that evidence of `gate` on `component` binds to.

    implementation  the callable with its callees, and the declared envelope, in-place pairs and scratch (wider promises need new evidence)
    row             kernels: what the row and the rows that it calls by name (the parts of a composition) say, but their cases. FLOPs and
                    bytes: for perf alone. vjps: for gradient alone, with the rows that they emit; of a row without a vjp: those of the
                    forward rows that emit it
    rows, kernels   whole programs: every row that they name, and what their Programs may launch of these
    cases           kernels: samples and exact samples, of kernels of the GPU their own further ones; others: their entry of CASES
    measure         the gate's engine, and how it calls a kernel of this back end
    binaries        kernels of the GPU: digests of the compiled files (pinned compiler, no line information)
    `extra`         further names, such as the plan hashes of reference configs for a pass
    """
    package = package or Package()
    held: dict[str, Any] = {"implementation": _promised(component)}
    roots: dict[str, tuple[Target, ...]] = {
        "measure": tuple(t for symbol in measured_by(gate, component) for t in package.roots(symbol))}
    if component.op is not None:
        held["cases"] = [row(component.op).samples, row(component.op).exact, *_calls(component, package.closure(roots["measure"])[1])]
        held["row"] = _rows_of_kernel(row(component.op), gate, held["cases"], package)
    if component.contract:
        roots["cases"] = contract_targets(component, gate, package)
        held |= _program(component, roots["cases"], package)
    if component.binaries is not None:
        held["binaries"] = _binaries(component, package)
    words = _words(component, gate, held, roots, package)
    digests = {name: _digest(value, package, words) for name, value in held.items()}
    for name, targets in roots.items():
        digests[name] = hashlib.sha256(f"{digests.get(name, '')}{package.hash(targets, words)}".encode()).hexdigest()
    for name, digest in (extra or {}).items():
        digests[name] = digest()
    return digests


def _words(component: Component, gate: str, held: Mapping[str, Any], roots: Mapping[str, tuple[Target, ...]], package: Package) -> Words:
    """Every word that is mentioned by what the evidence binds to, all of it together."""
    targets = {t for found in roots.values() for t in found}
    words = {f"'{w}" for w in (component.op or "", component.kind, component.backend, gate)}
    for value in held.values():
        more, texts = _mentioned(value, package)
        targets |= more
        words |= texts
    return package.closure(frozenset(targets), frozenset(words), frozenset(roots["measure"]))[1]


def _promised(component: Component) -> Held:
    limits = [x.holds for x in component.envelope.limits]
    promises = [component.envelope.dtypes, limits, component.inplace, component.scratch]
    return Held(("component", id(component)), [component.implementation, promises], component)


def _binaries(component: Component, package: Package) -> str:
    """Digest of the compiled files that a component may load."""
    key = "binaries", id(component)
    if key not in package.known:
        listed = sorted(component.binaries().items()) if component.binaries is not None else []
        package.known[key] = component, hashlib.sha256(repr(listed).encode()).hexdigest()  # held, so that its id stays its own
    return str(package.known[key][1])


def contract_targets(component: Component, gate: str, package: Package) -> tuple[Target, ...]:
    """The component's entry of CASES where it is written as a table, else the whole contract module."""
    source = package.source(component.contract)
    if source is not None and source.entry("CASES", component.id, gate) is not None:
        return (("entry", component.contract, "CASES", component.id, gate),)
    return (("all", component.contract),)


def _calls(component: Component, measured: Words) -> list[Held]:
    """Of what a kernel is called on, the fields that its measuring code reads."""
    if component.calls is None:
        return []
    return [Held(("calls", id(component), f.name), getattr(component.calls, f.name), component)
            for f in fields(component.calls) if f".{f.name}" in measured]


# Rows that are called by name --------------------------------------------------------------------------------------------------------


def _fields_of(spec: OpSpec, more: frozenset[str]) -> Held:
    return Held(("row", spec.name, more), {n: v for n, v in _state(spec).items() if n not in _NOT_ROW - more})


_EXECUTED = frozenset[str]()
_GRADIENT, _COUNTED = frozenset({"vjp"}), frozenset({"flops", "nbytes"})


def _named(targets: frozenset[Target], words: Words, package: Package) -> set[str]:
    """Rows whose names the code in reach says as texts."""
    spoken = package.closure(targets, words)[1]
    return {name for name in table() if f"'{name}" in spoken}


def _called(spec: OpSpec, more: frozenset[str], package: Package) -> frozenset[str]:
    """Rows that these fields of a row call by name."""
    key = "called", spec.name, more
    if key not in package.known:
        functions = [v for n, v in _state(spec).items() if callable(v) and n not in _NOT_ROW - more]
        package.known[key] = frozenset(_named(*_mentioned(functions, package), package))
    found: frozenset[str] = package.known[key]
    return found


def _all_called(names: Iterable[str], more: frozenset[str], package: Package) -> list[str]:
    """Rows of these names and all that these fields of them call, sorted."""
    found = set(names)
    queue = list(found)
    for name in queue:  # grows while it is walked
        new = _called(row(name), more, package) - found
        found |= new
        queue += new
    return sorted(found)


def _rows_of_kernel(spec: OpSpec, gate: str, cases: list[Any], package: Package) -> list[Any]:
    """The row of a kernel first, then what it calls, what its cases call, and for the gradient what the vjps in question emit."""
    targets, words = _mentioned(cases, package)
    names = {spec.name, *_named(targets, words, package)}
    differentiated: list[OpSpec] = []
    if gate == "gradient":
        differentiated = [spec] if spec.vjp is not None else _emitting(spec, package)
        names |= {name for r in differentiated for name in (r.name, *_called(r, _GRADIENT, package))}
    more = _COUNTED if gate == "perf" else _EXECUTED
    others = [_fields_of(row(name), _EXECUTED) for name in _all_called(names, _EXECUTED, package) if name != spec.name]
    return [_fields_of(spec, more), others, [r.vjp for r in differentiated]]


def _emitting(spec: OpSpec, package: Package) -> list[OpSpec]:
    """Rows whose vjp may emit this one: its name is a text constant in reach of the vjp. The gradient gate goes through them."""
    return [r for _, r in sorted(table().items()) if r.vjp is not None and spec.name in _called(r, _GRADIENT, package)]


def _program(component: Component, cases: tuple[Target, ...], package: Package) -> dict[str, Any]:
    """Rows and kernels of a component that runs whole graphs or Programs: every row whose name its code says, those that these rows call
    or emit, fused rows made of them, and of its kernels those of these rows."""
    if component.kind == "evidence":  # it speaks of rows and runs none
        return {}
    targets, words = _mentioned(component.implementation, package)
    reached, spoken = package.closure(targets | set(cases), words)
    if not any(("def", f"{package.name}.ops.table", name) in reached for name in ("row", "table")):
        return {}
    more = _GRADIENT | _COUNTED
    names = set(_all_called((n for n in table() if is_mentioned(n, spoken)), more, package))  # a tracer's rows are attributes
    names |= {n for n, r in table().items() if isinstance(r, FusedSpec) and all(p.op in names for p in r.parts)}
    rows = _all_called(names, more, package)
    found: dict[str, Any] = {"rows": [_fields_of(row(name), more) for name in rows]}
    launched = [c for c in (component.launches() if component.launches is not None else ()) if c.op in rows]
    if launched:
        found["kernels"] = [[_promised(c), _binaries(c, package)] for c in launched]
    return found
