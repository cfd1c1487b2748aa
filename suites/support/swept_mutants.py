"""Mutants by operators, swept over host code class by class: `python suites/support/swept_mutants.py SEED HOW_MANY [CLASS ...]`.

A file's mutants are all that the operators of `changes` make of it: comparisons, signs, constants, connectives, dropped statements and
keywords, returned values, arguments of one kind, defaults, bounds of slices, smallest and largest, break and continue, order. SEED draws
HOW_MANY of each class, each operator that has a place there as likely as any other. A mutant changes one place of the text, so that lines
and comments stay.

Which gates run a line is counted first, anew where code or cases have changed. A mutant is asked of the gates that drawn_mutants.py asks,
but of those that run its line, where any does: those that reject faults planted in the file before the others, cheap ones first. Several
mutants run on one copy in turn. Sound code passes first, under the same gates. What came is kept in .alpha/swept, so a run that ended
goes on.
"""

from __future__ import annotations

import ast
import hashlib
import json
import mmap
import resource
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from drawn_mutants import attempts
from planted import asked_of

import alpha
from alpha.gates.adversarial import plant
from alpha.gates.adversarial.catches import PATIENCE, SURE
from alpha.gates.contracts.engine import contract_cases, run_case
from alpha.gates.subjects import fresh_nonce
from alpha.profile.noise import wilson
from alpha.registry.catches import LATE, late_case
from alpha.registry.digest import component_digests
from alpha.tomlfile import read_toml
from alpha.train.catalogue import catalogue

ROOT = Path(alpha.__file__).parent
KEPT = ROOT.parent / ".alpha" / "swept"
CLASSES = {
    "graph": "graph/cuts graph/differentiate graph/effects graph/evaluate graph/ir graph/order graph/plan graph/state graph/trace "
             "graph/verify graph/verify_program",
    "passes": "passes/build passes/components passes/expand passes/fuse passes/memory passes/recompute passes/schedule passes/select",
    "data parallel": "parallel/data",
    "executor": "backends/cpu/executor backends/cpu/stream backends/cpu/observe",
    "loop": "train/loop train/saving train/evaluate train/seal",
    "comm": "comm/checked comm/words comm/watch comm/flight comm/agree",
    "checkpoints": "checkpoint/folders checkpoint/ranges checkpoint/safetensors checkpoint/hf",
    "evidence": "registry/judge registry/evidence registry/record registry/consistency registry/catches registry/status registry/check",
    "data": "data/bucketed data/corpus data/hashed data/mixture data/packing data/permutation data/prefetch data/prepared data/sampler "
            "data/shards data/split data/tokenizer",
    "connections": "comm/bridge comm/control comm/group comm/handshake comm/line comm/meet comm/message comm/rule comm/segment comm/shm "
                   "comm/streams comm/topology comm/world",
}
"""Class -> its files."""

MEMORY = 6 << 30
"""Addresses of a process over a mutant, in bytes: one that makes endless lists ends."""

SECONDS = plant.TIMEOUT
"""Of one case that is asked of a mutant."""

BESIDE = 30.0
"""Seconds, as they were when lines were counted, of all gates of one mutant that reject no fault planted in its file."""

FIRST = 4.0
"""Seconds of the cases that are asked first."""

_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,)}
_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
_OTHER = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


@dataclass(frozen=True)
class Mutant:
    """One change: `now` in place of `was`, which begins at character `at` of the file. `lines`: the statement's; `line`: the text of the
    line that it begins in. `function`: in which."""

    file: str
    kind: str
    function: str
    lines: tuple[int, int]
    at: int
    was: str
    now: str
    line: str

    @property
    def key(self) -> str:
        """Its name in the results; a file that changes makes other ones."""
        return f"{self.file}:{self.lines[0]}:{self.kind}:{self.at}:{self.now}"

    def of(self, text: str) -> str:
        """The file with the change in it."""
        assert text[self.at : self.at + len(self.was)] == self.was
        return text[: self.at] + self.now + text[self.at + len(self.was) :]


def changes(file: str) -> list[Mutant]:
    """All mutants of a file below alpha/. What the compiler refuses may be among them."""
    text = (ROOT / file).read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = list[Mutant]()

    def place(line: int, column: int) -> int:
        raw = text[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(raw.encode()[:column].decode())

    for function, statement, kind, node, now in _all(ast.parse(text)):
        at, stop = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        last = statement.body[0].lineno if getattr(statement, "body", None) else statement.end_lineno
        line = text[starts[node.lineno - 1] : starts[node.lineno]].strip()
        found.append(Mutant(file, kind, function, (statement.lineno, last), at, text[at:stop], now, line))
    return [m for m in dict.fromkeys(found) if m.was != m.now]


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _all(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, str, Any, str]]:
    """(function, statement, kind of change, node, text in its place) of every function."""
    for top in tree.body:
        for node in ast.walk(top):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = node.name if node is top or not isinstance(top, ast.ClassDef) else f"{top.name}.{node.name}"
                defaults = [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]
                said = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)  # a docstring runs nowhere
                first = node.body[1] if said and len(node.body) > 1 else node.body[0]
                for default in defaults:
                    for kind, _, now in _constant(default):
                        yield name, first, f"default {kind}", default, now
                for statement in _statements(node.body):
                    for kind, changed, now in _of(statement):
                        yield name, statement, kind, changed, now


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _of(statement: ast.stmt) -> Iterator[tuple[str, Any, str]]:
    """Changes of a statement itself, not of those inside it. What an error says is left as it is."""
    if isinstance(statement, (ast.Assert, ast.Import, ast.ImportFrom, ast.Pass, ast.Global, ast.Nonlocal)):
        return
    if isinstance(statement, ast.Raise):
        yield "dropped raise", statement, "pass"
        return
    if isinstance(statement, ast.Expr):
        if isinstance(statement.value, ast.Constant):
            return
        if isinstance(statement.value, ast.Call):
            yield "dropped call", statement, "pass"
    if isinstance(statement, ast.AugAssign):
        yield "dropped sum", statement, "pass"
        if (other := _BINARY.get(type(statement.op))) is not None:
            yield "sign", statement, ast.unparse(ast.AugAssign(statement.target, other(), statement.value))
    if isinstance(statement, ast.Break):
        yield "break", statement, "continue"
    if isinstance(statement, ast.Continue):
        yield "break", statement, "break"
    if isinstance(statement, ast.Return) and statement.value is not None:
        if not (isinstance(statement.value, ast.Constant) and statement.value.value in (None, True, False)):
            yield "returned", statement, "return None"
        if isinstance(statement.value, ast.BinOp):
            yield "returned", statement, f"return {ast.unparse(statement.value.left)}"
    for e in _expressions(statement):
        yield from _inside(e)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    stack: list[Any] = [v for k, value in ast.iter_fields(statement) if k not in ("body", "orelse", "finalbody", "handlers", "annotation",
                        "targets", "target") for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST)]
    while stack:
        node = stack.pop(0)
        if isinstance(node, (ast.JoinedStr, ast.stmt)):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and (node.func.id.endswith("Error") or node.func.id == "expect"):
            continue
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in ("list", "dict", "set", "tuple",
                                                                                                     "Counter", "defaultdict"):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":  # a guard, as an assert is
            continue
        if isinstance(node, ast.expr):
            yield node
        stack += list(ast.iter_child_nodes(node))


def _constant(e: ast.expr) -> Iterator[tuple[str, Any, str]]:
    if isinstance(e, ast.Constant) and type(e.value) is bool:
        yield "truth", e, str(not e.value)
    elif isinstance(e, ast.Constant) and type(e.value) is int:
        yield "constant", e, str(e.value + 1)
        yield "constant", e, f"({e.value - 1})" if e.value < 1 else str(e.value - 1)


def _inside(e: ast.expr) -> Iterator[tuple[str, Any, str]]:
    yield from _constant(e)
    if isinstance(e, ast.Compare):
        for i, op in enumerate(e.ops):
            for j, other in enumerate(_COMPARE.get(type(op), ())):
                ops = [*e.ops[:i], other(), *e.ops[i + 1 :]]
                kind = "negated" if j or len(_COMPARE[type(op)]) == 1 else "bound"
                yield kind, e, f"({ast.unparse(ast.Compare(e.left, ops, e.comparators))})"
    if isinstance(e, ast.BinOp) and type(e.op) in _BINARY and not _is_text(e.left) and not _is_text(e.right):
        yield "sign", e, f"({ast.unparse(ast.BinOp(e.left, _BINARY[type(e.op)](), e.right))})"
    if isinstance(e, ast.BoolOp):
        yield "connective", e, f"({ast.unparse(ast.BoolOp(ast.And() if isinstance(e.op, ast.Or) else ast.Or(), e.values))})"
        for i in range(len(e.values)):
            rest = [*e.values[:i], *e.values[i + 1 :]]
            yield "operand", e, f"({ast.unparse(rest[0] if len(rest) == 1 else ast.BoolOp(e.op, rest))})"
    if isinstance(e, ast.IfExp):
        yield "choice", e, f"({ast.unparse(ast.IfExp(e.test, e.orelse, e.body))})"
    if isinstance(e, ast.Slice):
        for bound, more in ((e.lower, "+"), (e.upper, "-"), (e.upper, "+")):
            if bound is not None:
                yield "slice", bound, f"{ast.unparse(bound)} {more} 1"
    if isinstance(e, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        for generator in e.generators:
            for condition in generator.ifs:
                yield "filter", condition, "True"
    if isinstance(e, ast.Call):
        if isinstance(e.func, ast.Name) and e.func.id in _OTHER and not (e.func.id == "sorted" and e.keywords):
            yield ("order" if e.func.id == "sorted" else "extreme"), e.func, _OTHER[e.func.id]
        for a, b in zip(e.args, e.args[1:]):
            if type(a) is type(b) and isinstance(a, (ast.Name, ast.Attribute, ast.Subscript)) and len(e.args) > 1:
                swapped = [b if x is a else a if x is b else x for x in e.args]
                yield "swapped", e, ast.unparse(ast.Call(e.func, swapped, e.keywords))
        for k in e.keywords:
            if k.arg not in (None, "strict"):
                yield "keyword", e, ast.unparse(ast.Call(e.func, e.args, [x for x in e.keywords if x is not k]))


def _is_text(e: ast.expr) -> bool:
    return isinstance(e, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)) or (isinstance(e, ast.Constant) and isinstance(e.value, str))


def drawn(kind: str, number: int, seed: int) -> list[Mutant]:
    """`number` of a class, or all that there are: operators by turns in a drawn order, places of one uniform."""
    rng = np.random.default_rng([seed, int(hashlib.sha256(kind.encode()).hexdigest()[:8], 16)])
    known = excuses()
    by_kind = defaultdict(list[Mutant])
    for name in CLASSES[kind].split():
        for mutant in changes(f"{name}.py"):
            if (mutant.file, mutant.line, mutant.was, mutant.now) not in known:
                by_kind[mutant.kind].append(mutant)
    found = list[Mutant]()
    while len(found) < number and any(by_kind.values()):
        for operator in rng.permutation(sorted(k for k, left in by_kind.items() if left)):
            mutant = by_kind[operator].pop(int(rng.integers(len(by_kind[operator]))))
            if len(found) < number and _compiles(mutant.of((ROOT / mutant.file).read_text(encoding="utf-8"))):
                found.append(mutant)
    return found


def excuses() -> dict[tuple[str, str, str, str], str]:
    """(file, line, was, now) -> why it changes nothing that anybody is promised, from swept_mutants.toml."""
    found = read_toml(Path(__file__).with_suffix(".toml"))["equivalent"]
    return {(e["file"], e["line"], e["was"], e["now"]): e["why"] for e in found}


Pair = tuple[str, str]


class Lines:
    """Which lines of watched files ran, in this process and what it forks, in all threads."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._at, size = dict[str, int](), 1
        for file in files:
            self._at[str(file)] = size
            size += len(file.read_text(encoding="utf-8").splitlines()) + 2
        self._marks = mmap.mmap(-1, size)

    def watch(self) -> None:
        """From now on."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def clear(self) -> None:
        """Forget what ran."""
        self._marks[:] = bytes(len(self._marks))

    def ran(self) -> dict[str, list[int]]:
        """File below alpha/ -> its lines that ran."""
        marks = bytes(self._marks)
        ends = [*list(self._at.values())[1:], len(marks)]
        found = {Path(file).relative_to(ROOT).as_posix(): [i for i, mark in enumerate(marks[at:end]) if mark]
                 for (file, at), end in zip(self._at.items(), ends)}
        return {file: lines for file, lines in found.items() if lines}

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        at = self._at.get(frame.f_code.co_filename)
        if at is None:
            return None
        marks = self._marks

        def line(frame: FrameType, event: str, arg: object) -> Any:
            marks[at + frame.f_lineno] = 1
            return line

        return line(frame, event, arg)


def asked(file: str) -> tuple[Pair, ...]:
    """The (component, gate) pairs of a file, but of those that need a GPU."""
    return tuple(pair for pair in attempts(ROOT / file, file.partition("/")[0]) if catalogue()[pair[0]].backend != "cuda")


def rests_on(pair: Sequence[str], files: Iterable[str]) -> str:
    """SHA-256 (hex) of a gate's digests and of the text of `files`, below alpha/, whose lines it ran."""
    component, gate = pair
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in sorted(files) if (ROOT / file).is_file()}
    return hashlib.sha256(json.dumps([component_digests(catalogue()[component], gate), texts], sort_keys=True).encode()).hexdigest()


def count_lines(files: Sequence[str], kept: dict[str, Any]) -> None:
    """Fill kept["lines"], (component gate) -> [seconds, file -> lines, by case, what it rests on], for all pairs of these files.
    What was kept of other code or cases is counted anew."""
    lines = Lines([ROOT / file for file in files])
    pairs = dict.fromkeys(p for file in files for p in asked(file))
    current = {name for name, found in kept["lines"].items() if found[3:] == [rests_on(name.split(), found[1])]}
    todo = [pair for pair in pairs if " ".join(pair) not in current]
    lines.watch()
    for component, gate in todo:
        if not catalogue()[component].contract:
            continue
        cases = dict[str, tuple[float, dict[str, list[int]]]]()
        for name, case in contract_cases(catalogue()[component], gate):
            lines.clear()
            began = time.perf_counter()
            run_case(catalogue()[component], gate, fresh_nonce(), name, case)
            cases[name] = time.perf_counter() - began, lines.ran()
        whole = {f: sorted({i for _, ran in cases.values() for i in ran.get(f, ())}) for f in {f for _, ran in cases.values() for f in ran}}
        kept["lines"][f"{component} {gate}"] = [sum(seconds for seconds, _ in cases.values()), whole, cases,
                                                rests_on((component, gate), whole)]
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]


def of_line(mutant: Mutant, kept: dict[str, Any]) -> tuple[Pair, ...]:
    """Whom a mutant is asked of: of `asked` those that run its line, or all where none is known to."""
    pairs = asked(mutant.file)
    own = {*asked_of(ROOT / mutant.file)}

    def runs(pair: Pair) -> bool:
        ran = kept["lines"].get(" ".join(pair), [0, {}])[1]
        if mutant.file not in ran:  # what processes of its own run is not counted: ranks of a job
            return pair in own or not ran
        return any(line in ran[mutant.file] for line in range(mutant.lines[0], mutant.lines[1] + 1))

    def cost(pair: Pair) -> tuple[bool, float]:
        return pair not in own, kept["lines"].get(" ".join(pair), [30.0])[0]

    found, seconds = list[Pair](), 0.0
    for pair in sorted(filter(runs, pairs), key=cost) or pairs:
        seconds += 0.0 if pair in own else cost(pair)[1]
        if pair in own or seconds <= BESIDE:
            found.append(pair)
    return tuple(found)


def first(mutant: Mutant, pairs: Sequence[Pair], kept: dict[str, Any]) -> tuple[str, ...]:
    """Cases of the first gate that run its line, cheap ones, which are asked before the rest of it."""
    cases = (*kept["lines"].get(" ".join(pairs[0]), []), {}, {}, {})[2]
    found, seconds = list[str](), 0.0
    for name, (cost, ran) in sorted(cases.items(), key=lambda case: case[1][0]):
        if any(mutant.lines[0] <= line <= mutant.lines[1] for line in ran.get(mutant.file, ())):
            seconds += cost
            found += [name] if seconds <= FIRST or not found else []
    return tuple(found)


def run(todo: Sequence[Mutant], kept: dict[str, Any], save: Callable[[], None], workers: int) -> None:
    """Ask of each, and keep what came under its key."""
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {m.file for m in todo}}
    known = {m.key: m for m in todo}

    def told(outcome: plant.Outcome) -> None:
        mutant, late = known[outcome.job.name], outcome.error.startswith(LATE)
        reasons: tuple[str, ...] = ()
        by = outcome.error[:80]
        if outcome.records:
            record, verdict, reasons = outcome.records[-1]
            by = f"{record.component} {record.gate}" if verdict == "FAIL" else ""
        fate = "LATE" if late and not hangs(outcome, kept) else "caught" if by else "SURVIVED"
        kept["fates"][mutant.key] = {**asdict(mutant), "fate": fate, "by": by, "why": " ".join(reasons)[:160],
                                     "asked": [" ".join(p) for p in outcome.job.attempts], "seconds": round(outcome.seconds, 1)}
        print(f"{fate:8} {outcome.seconds:5.1f} s {mutant.file}:{mutant.lines[0]} {mutant.kind}: {_line(mutant.was)} -> {_line(mutant.now)}"
              f"   [{by}]", flush=True)
        save()

    jobs = [plant.Job(m.key, pairs := of_line(m, kept), m.file, m.of(texts[m.file]), SECONDS, first=first(m, pairs, kept)) for m in todo]
    plant.run_all(jobs, workers=workers, on_result=told)


def hangs(outcome: plant.Outcome, kept: dict[str, Any]) -> bool:
    """Whether the case that came too late is quick on sound code, as it was when lines were counted: then it hangs, and is not slow."""
    case = late_case(outcome.error)
    costs = [kept["lines"].get(" ".join(pair), ({}, {}, {}))[2].get(case) for pair in outcome.job.attempts]
    return any(cost is not None and SURE * cost[0] <= outcome.job.timeout for cost in costs)


def _line(text: str) -> str:
    return " ".join(text.split())[:90]


def sound(files: Sequence[str], workers: int) -> None:
    """SystemExit where unchanged code fails under what its mutants are asked of."""
    text = (ROOT / files[0]).read_text(encoding="utf-8")
    pairs = dict.fromkeys(pair for file in files for pair in asked(file))
    jobs = [plant.Job(" ".join(pair), (pair,), files[0], text, PATIENCE * SECONDS) for pair in pairs]
    for outcome in plant.run_all(jobs, workers=workers):
        if outcome.caught_by:
            raise SystemExit(f"sound code of {outcome.job.name} is refused: {outcome.error or outcome.records[-1]}")


def main(seed: int, number: int, kinds: Sequence[str], workers: int = 2) -> None:
    """Draw, run what has no fate yet, print the scores."""
    KEPT.mkdir(parents=True, exist_ok=True)
    path, lines = KEPT / f"{seed}.json", KEPT / "lines.json"
    kept: dict[str, Any] = {"fates": {}, **(json.loads(path.read_text()) if path.is_file() else {})}
    kept["lines"] = json.loads(lines.read_text()) if lines.is_file() else {}
    mutants = {kind: drawn(kind, number, seed) for kind in kinds or CLASSES}
    files = [f"{name}.py" for kind in mutants for name in CLASSES[kind].split()]

    def save() -> None:
        path.write_text(json.dumps({"fates": kept["fates"]}, indent=1))

    count_lines([f"{name}.py" for names in CLASSES.values() for name in names.split()], kept)
    lines.write_text(json.dumps(kept["lines"]))
    todo = [m for among in mutants.values() for m in among if m.key not in kept["fates"]]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
    if todo and not kept["fates"]:
        sound(files, workers)
    run(todo, kept, save, workers)
    for kind, among in mutants.items():
        fates = Counter(kept["fates"][m.key]["fate"] for m in among)
        low, high = wilson(fates["caught"], len(among))
        print(f"{kind:14} {fates['caught']:3} of {len(among):3}  {low:4.0%} to {high:4.0%}  late {fates['LATE']}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
