"""Freshly seeded operator mutants: a score that nobody tuned to. Floor 7.

A mutant changes one operator, constant, bound, axis, operand order or statement in one function: of a kernel, of a row's vjp, or of the
code behind another component. It runs on a broken copy (plant.py) and is caught when any gate that the component owes says FAIL. Mutants
that compute the same thing by construction are not proposed; one that survives counts as a survivor unless it stands, with the reason
why it changes nothing, in equivalents.toml beside this file. Agreement on samples is no such reason.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

import alpha
from alpha.comm import collectives
from alpha.component import Catalogue, Component
from alpha.gates.adversarial import plant
from alpha.gates.subjects import fresh_nonce
from alpha.ops.table import row
from alpha.profile.noise import wilson
from alpha.registry import mutants as kept
from alpha.registry import policy
from alpha.registry.faults import load_faults
from alpha.registry.gates import PINNED
from alpha.registry.package import Package
from alpha.tomlfile import read_toml

NUMBER = 36
"""Mutants of a full run: half of kernels, a sixth of vjps, a third of everything else."""

RANKS = "ranks>="
"""What components of ranks require."""

_BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
_COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_UFUNC = {"add": "subtract", "subtract": "add", "multiply": "add", "divide": "multiply", "maximum": "minimum", "minimum": "maximum",
          "exp": "expm1", "log": "log1p", "sqrt": "square", "sum": "max", "max": "sum", "tanh": "sin"}
_ORDERED = {"subtract", "divide", "matmul", "true_divide", "less", "greater", "less_equal", "greater_equal", "power", "copyto"}


@dataclass(frozen=True)
class Mutant:
    """One change. `was`, `now`: the statement before and after; `area`: what the score groups by."""

    area: str
    file: str
    function: str
    attempts: tuple[tuple[str, str], ...]
    was: str
    now: str
    text: str

    @property
    def name(self) -> str:
        """Where and what, in one line."""
        return f"{self.file}:{self.function}: {self.was} -> {self.now}"

    @property
    def key(self) -> tuple[str, str, str]:
        """What equivalents.toml names it by."""
        return self.file, self.was, self.now


@dataclass(frozen=True)
class Target:
    """A function that may be mutated, and the (component, gate) of which one must notice."""

    area: str
    file: str
    function: str
    attempts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Fate:
    """What became of a mutant: the gate that caught it ('' for none), how, and the reason that excuses a survivor."""

    mutant: Mutant
    caught_by: str
    why: str
    excuse: str = ""


def targets(catalogue: Catalogue) -> list[Target]:
    """Every function that the score covers, with at most four components that reach it: what it breaks may show in one of them only. Those
    come last that reject most of what is planted in its file, also where they reach it another way."""
    found: dict[tuple[str, str], tuple[str, list[tuple[str, str]]]] = {}

    def add(area: str, places: Sequence[tuple[str, str]], component: Component, gates: Sequence[str]) -> None:
        for file, name in places:
            if file:  # a function that kernels of two areas share counts in the first, and the gates of both may reject what breaks it
                found.setdefault((file, name), (area, []))[1].extend((component.id, g) for g in gates)

    for c in catalogue:
        owed = tuple(g for g in policy.owed(c) if g not in PINNED)
        if c.kind == "kernel":
            backward = row(c.op or "").vjp is None
            order = tuple(sorted(owed, key=lambda g: (g != "gradient") if backward else (g != "parity")))
            add("backward kernels" if backward else "forward kernels", _own(c), c, order)
            vjp = row(c.op or "").vjp
            if vjp is not None and "gradient" in owed and hasattr(vjp, "__code__") and "<" not in vjp.__qualname__:
                add("vjps", [(_file(vjp.__code__.co_filename), vjp.__qualname__)], c, ("gradient",))
        elif hasattr(c.implementation, "__qualname__"):
            of_ranks = any(need.startswith(RANKS) for need in c.requires) or c.id.startswith("data_parallel")
            add("ranks" if of_ranks else c.kind, _own(c), c, owed)
            if c.op is not None:  # a collective's binder calls the function of its name
                add("ranks", _reached(sys.modules[collectives.__name__], c.op), c, owed)
    planted = _planted(catalogue)
    return [Target(area, *place, tuple(dict.fromkeys((*_few(attempts), *planted.get(place[0], ())))))
            for place, (area, attempts) in found.items()]


def _planted(catalogue: Catalogue, most: int = 3) -> dict[str, list[tuple[str, str]]]:
    """Of each source file of Python the components that need no GPU and reject most faults planted in it, each with the gate that does."""
    found: dict[str, Counter[tuple[str, str]]] = {}
    for fault in load_faults(catalogue=catalogue):
        if not fault.source and fault.gate not in PINNED and catalogue[fault.component].backend != "cuda":
            found.setdefault(fault.file, Counter())[fault.component, fault.gate] += 1
    firsts: dict[str, dict[str, tuple[str, str]]] = {}
    for file, counted in found.items():
        for pair, _ in counted.most_common():
            firsts.setdefault(file, {}).setdefault(pair[0], pair)
    return {file: list(own.values())[:most] for file, own in firsts.items()}


def _few(attempts: Sequence[tuple[str, str]], most: int = 4) -> tuple[tuple[str, str], ...]:
    """Attempts of the first few components, each component's first gate before anybody's second."""
    ids = list(dict.fromkeys(c for c, _ in attempts))[:most]
    ranked = [(sum(c == d for d, _ in attempts[:i]), i) for i, (c, _) in enumerate(attempts) if c in ids]
    return tuple(dict.fromkeys(attempts[i] for _, i in sorted(ranked)))


def _file(path: str) -> str:
    base = Path(alpha.__file__).parent
    return Path(path).relative_to(base).as_posix() if Path(path).is_relative_to(base) else ""


def _own(c: Component) -> list[tuple[str, str]]:
    """(file, function) of the implementation and of the functions of its module that it calls."""
    return _reached(sys.modules[c.implementation.__module__], getattr(c.implementation, "__qualname__", "").split(".")[0])


def _reached(module: ModuleType, start: str) -> list[tuple[str, str]]:
    """(file, function) of a module's function or class and of those of the module that it calls."""
    file = _file(module.__file__ or "")
    if not file:
        return []
    tree = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))
    top = {n.name: n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    reached, queue = [], [start] if start in top else []
    while queue:
        name = queue.pop()
        if name in reached:
            continue
        reached.append(name)
        queue += [x.id for x in ast.walk(top[name]) if isinstance(x, ast.Name) and x.id in top]
    return [(file, name) for name in reached]


def mutate(target: Target, rng: np.random.Generator) -> Mutant | None:
    """One random change in the target's function; None if it has no place for one."""
    path = Path(alpha.__file__).parent / target.file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = next((n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == target.function), None)
    if body is None:
        return None
    places = [(statement, change) for statement in _statements(body) for change in _changes(statement)]
    if not places:
        return None
    statement, change = places[int(rng.integers(len(places)))]
    was = _line(statement)
    change()
    ast.fix_missing_locations(tree)
    now = _line(statement)
    if was == now:
        return None
    return Mutant(target.area, target.file, target.function, target.attempts, was, now, ast.unparse(tree))


def _line(statement: ast.stmt) -> str:
    """A statement in one line; of a compound one its head, and a placeholder where it was dropped."""
    if getattr(statement, "dropped", False):
        return "(dropped)"
    shallow = copy.copy(statement)
    if hasattr(shallow, "body"):
        shallow.body = [ast.Pass()]
        if hasattr(shallow, "orelse"):
            shallow.orelse = []
    return " ".join(ast.unparse(ast.fix_missing_locations(shallow)).split())[:110]


def _statements(body: ast.AST) -> Iterator[ast.stmt]:
    """Statements that compute: not docstrings, not error paths, not asserts, not definitions or imports."""
    for child in ast.iter_child_nodes(body):
        if isinstance(child, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.Pass)):
            continue
        if isinstance(child, ast.Expr) and (isinstance(child.value, ast.Constant) or _is_expect(child.value)):
            continue
        if isinstance(child, ast.stmt) and not isinstance(child, (ast.FunctionDef, ast.ClassDef, ast.Try, ast.With)):
            if not (isinstance(child, ast.If) and any(isinstance(x, ast.Raise) for x in child.body)):
                yield child
        if not isinstance(child, ast.expr):
            yield from _statements(child)


def _is_expect(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("expect", "print")


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Expressions of the statement itself, not of the statements inside it, nor annotations or text."""
    stack: list[ast.AST] = [c for name, c in _fields(statement) if name not in ("body", "orelse", "annotation", "handlers", "returns")]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.JoinedStr, ast.stmt)):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "reshape":
            for x in ast.walk(node):  # reshape takes any negative number for -1
                if isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.USub) and isinstance(x.operand, ast.Constant):
                    x.operand.fixed = True  # type: ignore[attr-defined]
        if isinstance(node, ast.expr):
            yield node
        stack += list(ast.iter_child_nodes(node))


def _fields(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield name, item


def _changes(statement: ast.stmt) -> Iterator[Callable[[], None]]:
    """Every change that the operators know for one statement."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield lambda: _drop(statement)
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _BINARY:
        yield lambda: setattr(statement, "op", _BINARY[type(statement.op)]())
    if isinstance(statement, (ast.If, ast.While)) and not _is_type_check(statement.test):
        yield lambda: setattr(statement, "test", ast.UnaryOp(ast.Not(), statement.test))
    for e in _expressions(statement):
        yield from _of(e)


def _is_type_check(test: ast.expr) -> bool:
    return any(isinstance(x, ast.Name) and x.id == "TYPE_CHECKING" for x in ast.walk(test))


def _of(e: ast.expr) -> Iterator[Callable[[], None]]:
    if isinstance(e, ast.BinOp) and type(e.op) in _BINARY and not _texts(e):
        yield lambda: setattr(e, "op", _BINARY[type(e.op)]())
        if isinstance(e.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.MatMult)):
            yield lambda: _swap(e)
    if isinstance(e, ast.Compare) and len(e.ops) == 1 and type(e.ops[0]) in _COMPARE:
        yield lambda: setattr(e, "ops", [_COMPARE[type(e.ops[0])]()])
    if isinstance(e, ast.Constant) and isinstance(e.value, (int, float)) and type(e.value) is not bool and not getattr(e, "fixed", False):
        value: int | float = e.value
        yield lambda: setattr(e, "value", value + 1)
        yield lambda: setattr(e, "value", value * 2 if value else 1)
        if value != 0:  # an index 0 that becomes -1 is the same element of a sequence of one
            yield lambda: setattr(e, "value", value - 1)
    if isinstance(e, ast.Slice):
        upper, lower = e.upper, e.lower
        if upper is not None:
            yield lambda: setattr(e, "upper", ast.BinOp(upper, ast.Sub(), ast.Constant(1)))
        if lower is not None:
            yield lambda: setattr(e, "lower", ast.BinOp(lower, ast.Add(), ast.Constant(1)))
    if isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) and isinstance(e.func.value, ast.Name) and e.func.value.id == "np":
        func = e.func
        if func.attr in _UFUNC:
            yield lambda: setattr(func, "attr", _UFUNC[func.attr])
        if func.attr in _ORDERED and len(e.args) >= 2:
            yield lambda: setattr(e, "args", [e.args[1], e.args[0], *e.args[2:]])
    if isinstance(e, ast.Call):
        for k in e.keywords:
            if k.arg == "axis" and isinstance(k.value, (ast.Constant, ast.UnaryOp)):
                yield lambda k=k: setattr(k, "value", ast.Constant(0 if ast.unparse(k.value) != "0" else -1))  # type: ignore[misc]
    if isinstance(e, ast.IfExp):
        yield lambda: _flip(e)
    if isinstance(e, ast.BoolOp):
        yield lambda: setattr(e, "op", ast.And() if isinstance(e.op, ast.Or) else ast.Or())


def _texts(e: ast.BinOp) -> bool:
    def text(x: ast.expr) -> bool:
        return isinstance(x, ast.JoinedStr) or (isinstance(x, ast.Constant) and isinstance(x.value, (str, bytes)))

    return text(e.left) or text(e.right)


def _drop(statement: ast.Expr) -> None:
    statement.value = ast.Constant(None)
    statement.dropped = True  # type: ignore[attr-defined]


def _swap(e: ast.BinOp) -> None:
    e.left, e.right = e.right, e.left


def _flip(e: ast.IfExp) -> None:
    e.body, e.orelse = e.orelse, e.body


def draw(catalogue: Catalogue, number: int = NUMBER, seed: str | None = None) -> list[Mutant]:
    """Fresh mutants, no two the same; areas weighted as NUMBER says, functions and changes uniform within them."""
    rng = np.random.default_rng(int(seed or fresh_nonce(), 16))
    by_area: dict[str, list[Target]] = {}
    for t in targets(catalogue):
        by_area.setdefault(t.area, []).append(t)
    kernels = [a for a in ("forward kernels", "backward kernels") if a in by_area]
    others = sorted(a for a in by_area if a not in (*kernels, "vjps"))
    found: dict[tuple[str, str, str], Mutant] = {}
    for _ in range(20 * number):
        if len(found) >= number:
            break
        roll = len(found) % 6
        area: str
        if roll < 3:
            area = kernels[roll % len(kernels)]
        else:
            area = "vjps" if roll == 3 else others[int(rng.integers(len(others)))]
        among = by_area[area]
        mutant = mutate(among[int(rng.integers(len(among)))], rng)
        if mutant is not None:
            found.setdefault(mutant.key, mutant)
    return list(found.values())


def excuses() -> dict[tuple[str, str, str], str]:
    """(file, was, now) -> why it changes nothing that a gate promises; '*' stands for any statement."""
    path = Path(__file__).with_name("equivalents.toml")
    document = read_toml(path) if path.is_file() else {}
    return {(e["file"], e["was"], e["now"]): e["why"] for e in document.get("equivalent", ())}


def run(mutants: Sequence[Mutant], *, workers: int = 2, timeout: float = 12.0,
        on_result: Callable[[Fate], None] | None = None) -> list[Fate]:
    """The fate of each mutant."""
    known = excuses()

    def excuse(m: Mutant) -> str:
        return known.get(m.key) or known.get((m.file, m.was, "*")) or known.get((m.file, "*", m.now)) or ""

    def fate(outcome: plant.Outcome, mutant: Mutant) -> Fate:
        by = outcome.caught_by
        why = outcome.error or "; ".join(reason for _, verdict, reasons in outcome.records if verdict == "FAIL" for reason in reasons)
        return Fate(mutant, by, why, excuse(mutant) if not by else "")

    jobs = [plant.Job(str(i), m.attempts, m.file, m.text, plant.TIMEOUT if m.area == "ranks" else timeout) for i, m in enumerate(mutants)]
    outcomes = plant.run_all(jobs, workers=workers,
                             on_result=None if on_result is None else lambda o: on_result(fate(o, mutants[int(o.job.name)])))
    return [fate(o, m) for o, m in zip(outcomes, mutants)]


@dataclass(frozen=True)
class Score:
    """Mutants of one area: how many were caught of those that are not excused."""

    area: str
    caught: int
    counted: int
    survivors: tuple[str, ...]
    excused: int

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.caught, self.counted)


def scores(fates: Sequence[Fate]) -> list[Score]:
    """One score per area and one for all together."""
    found = []
    for area in [*sorted({f.mutant.area for f in fates}), "all"]:
        mine = [f for f in fates if area in (f.mutant.area, "all")]
        counted = [f for f in mine if not f.excuse]
        found.append(Score(area, sum(bool(f.caught_by) for f in counted), len(counted),
                           tuple(f.mutant.name for f in counted if not f.caught_by), len(mine) - len(counted)))
    return found


def seed_of(root: Path | None) -> str:
    """The seed of the scores that are pinned in an evidence root, a fresh one where there are none or no root is given."""
    found = kept.load(root) if root is not None else None
    return found[0].seed if found is not None else fresh_nonce()


def record(fates: Sequence[Fate], seed: str, number: int) -> kept.Scores:
    """The scores of a run as they are committed."""
    found = scores(fates)
    areas = {s.area: (s.caught, s.counted, s.excused) for s in found}
    return kept.Scores(seed=seed, number=number, areas=areas, survivors=found[-1].survivors, measure=kept.measured_by(Package()))
