"""What digests of held values promise: plain data by content, by a dull account of its text; all else by what it is made of, each value
told from each other; of a component what its gates bind to, and no more. Floor 7."""

from __future__ import annotations

import fractions
import functools
import hashlib
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Component, Measured
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import folder, write_package
from alpha.ops.table import row, table
from alpha.registry import judge, record
from alpha.registry.digest import calls_blas, component_digests, contract_targets, value_digest
from alpha.registry.package import Package, Target
from alpha.registry.record import canonical


def _text(value: Any) -> str:
    """How plain data is written."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_text(k)}:{_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(_text(v) for v in value)) + "}"
    return "[" + ",".join(_text(v) for v in value) + "]" if isinstance(value, (tuple, list)) else repr(value)


def _plain(rng: np.random.Generator, depth: int) -> Any:
    """Drawn plain data."""
    leaves: Sequence[Any] = (None, True, int(rng.integers(9)), float(rng.integers(9)) / 4, complex(0, int(rng.integers(3))), "a name",
                             "name", bytes(rng.bytes(2)), frozenset(rng.integers(9, size=3).tolist()), {"b", "a", "c"})
    kind = int(rng.integers(5)) if depth else 4
    inner = [_plain(rng, depth - 1) for _ in range(int(rng.integers(4)))] if depth else []
    made: Sequence[Callable[[], Any]] = (lambda: inner, lambda: tuple(inner), lambda: dict(enumerate(inner)),
                                         lambda: OrderedDict((f"k{i}", x) for i, x in enumerate(inner)),
                                         lambda: leaves[int(rng.integers(len(leaves)))])
    return made[kind]()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Counter:
    """Of the package, and no data class."""

    def __init__(self, n: object) -> None:
        self.n = n

    def count(self) -> object:
        """How many."""
        return self.n

    def more(self) -> object:
        """One more."""
        return self.count()


class _Other(_Counter):
    """Another class of the same methods."""


@dataclass
class _Settings:
    """Fields by name; one whose default is made anew for each."""

    first: int = 1
    listed: list[int] = field(default_factory=lambda: [1])
    needed: Any = None


def _first_of(settings: Any) -> object:
    return settings.first, settings.listed, _Settings


def _recursive() -> Callable[[int], int]:
    def down(n: int) -> int:
        return n and down(n - 1)
    return down


def _unbound() -> Callable[[], int]:
    def early() -> int:
        return late()
    if len("") == 1:
        def late() -> int:
            return 1
    return early


@functools.lru_cache
def _cached() -> int:
    return 1


@functools.lru_cache
def _cached_too() -> int:
    return 2


def values(rng: np.random.Generator) -> Measured:
    """Plain data, whole; what lies in itself; functions, methods, classes, modules and objects of the package and of others."""
    checks, package = Checks(), Package()

    def of(value: object) -> str:
        return value_digest(value, package)

    for _ in range(60):
        value = _plain(rng, 3)
        checks.that(of(value) == _digest(_text(value)), f"{value} is not written as {_text(value)}")
    round_about: list[Any] = [1, [2]]
    round_about[1].append(round_about)
    round_about.append(round_about[1])
    checks.that(of(round_about) == _digest("[1,[2,again 0],[2,again 0]]"), "what lies in itself")
    for value, text in ((math, "module math"), (fractions.Fraction(1, 2), "object fractions.Fraction "),
                        (operator.itemgetter, "symbol operator.itemgetter"), (operator.itemgetter(1), "object operator.itemgetter "),
                        (len, "symbol builtins.len"), ([].append, "symbol None.list.append")):
        checks.that(of(value) == _digest(text), f"{value} is not written as {text}")
    n = int(rng.integers(1, 99))
    known: list[tuple[str, Any]] = [
        ("a class", _Counter), ("another class", _Other), ("a foreign class", fractions.Fraction), ("an object", _Counter(n)),
        ("of a class in a function", _local(n)), ("of it, another", _local(n + 1)),
        ("another object", _Counter(n + 1)), ("of another class", _Other(n)),
        ("a method", _Counter(n).count), ("another method", _Counter(n).more),
        ("a method of another object", _Counter(n + 1).count), ("of a class that inherits it", _Other(n).count), ("a module", record),
        ("another module", judge), ("a foreign module", math), ("a cached function", _cached), ("another cached function", _cached_too),
        ("one that calls itself", _recursive()), ("one that is not bound", _unbound()), ("a ufunc", np.add), ("another ufunc", np.multiply),
        ("a partial", functools.partial(_first_of, n)), ("a keyword", functools.partial(_first_of, settings=n)), ("a set", {n, "a"}),
        ("another set", {n, "b"}), ("a list of the set", [{n, "a"}]),
    ]
    digests = {what: of(value) for what, value in known}
    alike = [what for what, digest in digests.items() if [*digests.values()].count(digest) > 1]
    checks.that(not alike, f"one digest: {alike}")
    checks.that(of(_Counter(n)) == digests["an object"] and of(_Counter(n).count) == digests["a method"], "equal objects differ")
    checks.that(len({of({*x}) for x in ((3, 1, 2), (1, 2, 3), (2, 3, 1))}) == 1, "the order of a set counts")
    made = [_Settings(first=1), _Settings(listed=[1]), _Settings(listed=[2]), _Settings(first=2), _Settings(first=True),
            _Settings(needed=n)]
    held = [of([_first_of, settings]) for settings in made]
    checks.that(held[0] == held[1] and len({*held}) == 5, f"fields that are not at their default: {len({*held})}")
    settings: tuple[Target, ...] = (("def", __name__, "_Settings"),)
    text = f"instance {package.hash(settings, package.closure(settings)[1])} {{}}"
    checks.that(of(_Settings()) == _digest(text), "an object whose fields are all at their default")
    blas = {"a partial": functools.partial(_product, 1), "a method": _Multiplier().times, "an object": _Multiplier()}
    for what, value in blas.items():
        checks.that(calls_blas(value, package), f"{what}: a product is not seen")
    for plain in (functools.partial(_first_of, 1), _Counter(n).count):
        checks.that(not calls_blas(plain, package), f"a product is seen in {plain}")
    return checks.measured()


def _product(a: object, b: np.ndarray) -> np.ndarray:
    return np.dot(b, b)


def _local(n: int) -> object:
    class Inside(_Counter):
        """Of a function."""

    return Inside(n)


class _Multiplier:
    """Calls a BLAS."""

    def times(self, a: np.ndarray) -> np.ndarray:
        """A product."""
        return a @ a


def _runs() -> None:
    """Stands for what runs whole Programs: it names two rows, of which a fused one is made."""
    row("matmul"), row("linear"), row("gelu")


def bound(rng: np.random.Generator) -> Measured:
    """Compiled files, kernels of the rows that a program names, contracts by table and by module, and what speaks of rows and runs none."""
    checks, package = Checks(), Package()
    kernel = Component(id="gelu.f32.made-up", kind="kernel", op="gelu", implementation=canonical)
    listed = [("b.cu", f"{rng.integers(99)}"), ("a.cu", f"{rng.integers(99)}")]
    asked = list[int]()
    compiled = replace(kernel, binaries=lambda: asked.append(1) or dict(listed))  # type: ignore[func-returns-value]
    found = [component_digests(compiled, gate, package=package) for gate in ("parity", "faults")]
    checks.that([d["binaries"] for d in found] == [_digest(repr(_digest(repr(sorted(listed)))))] * 2, f"binaries: {found[0]['binaries']}")
    checks.that(len(asked) == 1 and "binaries" not in component_digests(kernel, "parity", package=package), f"looked {len(asked)} times")
    other = replace(kernel, id="silu.f32.made-up", op="silu")
    whole = Component(id="made.program", kind="program", profile="program", implementation=_runs,
                      contract="alpha.gates.contracts.registry.common", launches=lambda: [kernel, other])

    def kernels(*launched: Component) -> Any:
        return component_digests(replace(whole, launches=lambda: list(launched)), "parity", package=package).get("kernels")

    digests = component_digests(whole, "parity", package=package)
    checks.that(digests["kernels"] == kernels(kernel) == kernels(other, kernel) != kernels(kernel, kernel), "kernels of other rows count")
    checks.that(kernels(other) is None is kernels() and "kernels" not in component_digests(replace(whole, launches=None), "parity",
                                                                                           package=package), "kernels of no row")
    gone = component_digests(replace(whole, kind="evidence"), "parity", package=package)
    checks.that(set(digests) - set(gone) == {"rows", "kernels"} and {k: digests[k] for k in ("implementation",)} ==
                {"implementation": gone["implementation"]}, f"what runs no row binds to {sorted(gone)}")
    fused = [name for name, r in table().items() if hasattr(r, "parts") and {p.op for p in r.parts} <= {"matmul", "linear", "gelu"}]
    checks.that("linear_gelu" in fused, f"fused rows of the two: {fused}")
    with folder() as at:
        files = {"table.py": "CASES = {'made.up': {'parity': [1]}}\n", "late.py": "CASES = {}\nCASES['made.up'] = {'parity': [1]}\n"}
        mini = Package(write_package(at / "p", files), "mini")
        for contract, gate, targets in (("mini.table", "parity", (("entry", "mini.table", "CASES", "made.up", "parity"),)),
                                        ("mini.table", "perf", (("entry", "mini.table", "CASES", "made.up", "perf"),)),
                                        ("mini.late", "parity", (("all", "mini.late"),)), ("mini.none", "parity", (("all", "mini.none"),))):
            came = contract_targets(replace(whole, id="made.up", contract=contract), gate, mini)
            checks.that(came == targets, f"cases of {contract}: {came}")
        checks.that(contract_targets(replace(whole, contract="mini.table"), "parity", mini) == (("all", "mini.table"),), "of no entry")
    return checks.measured()


MADE = ("class C:\n    def said(self):\n        return self.other()\n    def other(self):\n        return 1\n"
        "    def silent(self):\n        return 2\n")


def made(rng: np.random.Generator) -> Measured:
    """Of an object the methods count that are said; of a class that is held all of them, and so of the object of a bound method."""
    checks, n = Checks(), int(rng.integers(3, 99))

    def of(text: str) -> list[str]:
        with folder() as at:
            package = Package(write_package(at / "p", {"m.py": text}), "mini")
            names: dict[str, Any] = {"__name__": "mini.m"}
            exec(text, names)
            c = names["C"]
            return [value_digest(value, package) for value in (c, c(), c().said, functools.partial(c().said, 1), [c(), "silent"])]

    was = of(MADE)
    for old, new, differ in (("return 1", f"return {n}", (True, False, True, True, False)),
                             ("return 2", f"return {n}", (True, False, True, True, True)),
                             ("self.other()", "self.silent()", (True, False, True, True, False)),
                             ("class C:", f"class C:\n    'Doc {n}.'", (False,) * 5)):
        assert MADE.count(old) == 1, old
        found = tuple(a != b for a, b in zip(was, of(MADE.replace(old, new))))
        checks.that(found == differ, f"{new!r} for {old!r}: {found}")
    return checks.measured()


def rows(rng: np.random.Generator) -> Measured:
    """A field of a row counts for the gates that it says something to: FLOPs and bytes for perf alone, its vjp for the gradient alone."""
    checks = Checks()
    kernel = Component(id="gelu.f32.made-up", kind="kernel", op="gelu", implementation=canonical)
    gates = ("parity", "gradient", "determinism", "faults", "perf")

    def of(**changed: Any) -> list[dict[str, str]]:
        with mock.patch.dict(table(), gelu=replace(row("gelu"), **changed)):
            package = Package()
            return [component_digests(kernel, gate, package=package) for gate in gates]

    was = of()
    for name, told in (("oracle", gates), ("flops", ("perf",)), ("nbytes", ("perf",)), ("vjp", ("gradient",))):
        found = tuple(gate for gate, a, b in zip(gates, was, of(**{name: _given})) if a != b)
        checks.that(found == told, f"another {name} counts for {found}")
    return checks.measured()


def _given(*arguments: Any) -> Any:
    return arguments
