"""Which sides of branches were taken, counted across processes in one mapped file. Floor 7, and no import but the standard library's: it is
read in processes that may load nothing of ours.

A conditional jump must have jumped, and have gone on. Lines would not tell the two sides of `a if b else c`, so opcodes are traced
(sys.settrace, which every supported Python has). A mark is one byte of a file that all processes of a measurement map: a process that is
killed, or leaves by os._exit, has told all the same.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

WATCHED = "ALPHA_BRANCHES"
"""Environment variable that names the folder of a measurement."""
TAKEN, UNASKED = 1, 2
"""Marks of a side."""
ENOUGH = 50
"""After so many calls of a function a process asks whether any of its sides is still to be taken, and else follows it no more."""


@dataclass(frozen=True, order=True)
class Side:
    """One side of a branch, or a function that is never called (`side` ''). `text`: its line in the file."""

    file: str
    line: int
    function: str
    side: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.side or 'called'}: {self.text}"


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and all that lie in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes(const)


@cache
def jumps(code: CodeType) -> dict[int, tuple[int, int, int]]:
    """Offset of a conditional jump, or of the prefix of its argument -> (its own offset, that of what follows it, its line)."""
    found, prefix, before, line = {}, None, "", code.co_firstlineno
    lines = dict(dis.findlinestarts(code))
    instructions = list(dis.get_instructions(code))
    for at, after in pairwise(instructions):
        line = lines.get(at.offset) or line
        if at.opname == "EXTENDED_ARG":
            prefix = at.offset if prefix is None else prefix
            continue
        with_ended = "WITH_EXCEPT_START" in (before, at.opname)  # the interpreter's own question whether __exit__ took the exception
        if not with_ended and (at.opname == "FOR_ITER" or ("JUMP" in at.opname and "IF" in at.opname)):
            for offset in {at.offset, at.offset if prefix is None else prefix}:
                found[offset] = at.offset, after.offset, line
        before, prefix = at.opname if at.opname != "TO_BOOL" else before, None
    return found


def follow(frame: FrameType, take: Callable[[int, bool], object]) -> Callable[[FrameType, str, object], Any]:
    """The tracer of one frame: `take(offset of a jump, whether it jumped)` for each."""
    known, last = jumps(frame.f_code), None
    frame.f_trace_opcodes, frame.f_trace_lines = True, False

    def step(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal last
        if event == "opcode":
            if last is not None:
                take(last[0], frame.f_lasti != last[1])
            last = known.get(frame.f_lasti)
        else:  # an exception, or the end
            last = None
        return step

    return step


@cache
def sides(code: CodeType) -> dict[tuple[int, bool], tuple[int, int, str]]:
    """(offset of a jump, whether it jumped) -> (line, column, side). Side is what the text asked turned out to be: true, false, None, not
    None; of a loop, again or ends. A condition of `while` is compiled twice, at the loop's start and at its end: both are one here.
    Columns are 0 before Python 3.11, which has none."""
    named = {"FALSE": ("true", "false"), "TRUE": ("false", "true"), "NOT_NONE": ("None", "not None"), "NONE": ("not None", "None")}
    lines = {own: line for own, _, line in jumps(code).values()}
    found = {}
    for at in dis.get_instructions(code):
        if at.offset in lines:
            position = getattr(at, "positions", None)
            kind = next((k for k in ("NOT_NONE", "NONE", "FALSE", "TRUE") if at.opname.endswith(k) or f"_{k}_" in at.opname), "")
            for jumped, side in enumerate(named.get(kind, ("again", "ends") if at.opname == "FOR_ITER" else ("no", "yes"))):
                line, column = (position.lineno, position.col_offset) if position and position.lineno else (lines[at.offset], 0)
                found[at.offset, bool(jumped)] = line, column or 0, side
    return found


def functions(file: Path) -> list[tuple[str, CodeType]]:
    """Code that a file's functions hold, lambdas and comprehensions too, with dotted names; what runs at import is left out."""
    found = list[tuple[str, CodeType]]()

    def inside(code: CodeType, name: str, function: bool) -> None:
        for const in code.co_consts:
            if isinstance(const, CodeType):
                is_function = function or const.co_flags & 0x02 != 0 or const.co_name.startswith("<")  # CO_NEWLOCALS: no class body
                own = f"{name}.{const.co_name}" if name else const.co_name
                if is_function and _does(const):
                    found.append((own, const))
                inside(const, own, False)

    inside(compile(file.read_text(encoding="utf-8"), str(file), "exec", dont_inherit=True), "", False)
    return found


def _does(code: CodeType) -> bool:
    """Whether a function has a body: those of protocols and abstract classes hold a docstring or `...` alone."""
    body = [i for i in dis.get_instructions(code) if i.opname not in ("RESUME", "NOP", "COPY_FREE_VARS", "MAKE_CELL")]
    return [i.opname for i in body] not in (["LOAD_CONST", "RETURN_VALUE"], ["RETURN_CONST"]) or body[0].argval is not None


def key(code: CodeType) -> str:
    """What names a code object in every process of one interpreter."""
    return f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}:{hashlib.sha256(code.co_code).hexdigest()[:12]}"


def prepare(folder: Path, files: Sequence[Path], unasked: Callable[[Path, str, int, str], bool] = lambda *side: False) -> None:
    """Make the map of some files' functions, all untaken, and what starts the tracing in Python processes that have `folder` on their path
    (PYTHONPATH) and in WATCHED. `unasked(file, function, line, side)`: a side that nobody need take, so no function is traced for long for
    the sake of it; sides of an `assert` are none."""
    table, marks = dict[str, int](), bytearray(1)
    for file in files:
        whole = asserted(file)
        for name, code in functions(file):
            if key(code) not in table:
                table[key(code)] = len(marks)
                marks.append(0)
                for _, (line, _, side) in sorted(sides(code).items()):
                    marks.append(UNASKED if line in whole or unasked(file, name, line, side) else 0)
    (folder / "table.json").write_text(json.dumps(table), encoding="utf-8")
    (folder / "taken").write_bytes(bytes(marks))
    (folder / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('_alpha_branches', {str(Path(__file__))!r})\n"
        "module = sys.modules['_alpha_branches'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.watch()\n", encoding="utf-8")


def watch() -> None:
    """Trace this thread, those started after it and what they fork, if WATCHED is set."""
    if os.environ.get(WATCHED):
        tracer = _Shared(Path(os.environ[WATCHED]))
        threading.settrace(tracer)
        sys.settrace(tracer)


def read(folder: Path, files: Sequence[Path]) -> list[tuple[Path, str, int, str]]:
    """What no process of a measurement took: (file, function, line, side), side '' of a function that none called. Sides of an `assert` are
    left out: what it says is true; so is the interpreter's question behind an `except` whether it was another exception."""
    table: dict[str, int] = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    marks, left = (folder / "taken").read_bytes(), list[tuple[Path, str, int, str]]()
    for file in files:
        whole, text = asserted(file), file.read_text(encoding="utf-8").splitlines()
        for name, code in functions(file):
            called, taken = _marked(table, marks, code)
            if not called:
                left += [(file, name, code.co_firstlineno, "")] if code.co_firstlineno not in whole else []
                continue
            of = sides(code)
            some = {of[jump] for jump in taken}
            left += [(file, name, line, side) for line, _, side in sorted({*of.values()} - some)
                     if line not in whole and not (side == "false" and text[line - 1].lstrip().startswith("except "))]
    return left


def asserted(file: Path) -> set[int]:
    """Lines of a file that an `assert` stands on."""
    return {line for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Assert)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def count(files: Sequence[Path]) -> int:
    """How many sides of branches some files have, and functions."""
    return sum(1 + len({*sides(code).values()}) for file in files for _, code in functions(file))


def _marked(table: dict[str, int], marks: bytes, code: CodeType) -> tuple[bool, set[tuple[int, bool]]]:
    base = table[key(code)]
    return bool(marks[base]), {jump for i, jump in enumerate(sorted(sides(code)), base + 1) if marks[i] == TAKEN}


class _Shared:
    """Marks in the mapped file. A code object whose every side was taken is followed no more."""

    def __init__(self, folder: Path) -> None:
        self._table: dict[str, int] = json.loads((folder / "table.json").read_text())
        with (folder / "taken").open("r+b") as f:
            self._marks = mmap.mmap(f.fileno(), 0)
        self._files = {entry.partition(":")[0] for entry in self._table}
        self._takers = dict[CodeType, "Callable[[FrameType], Any] | None"]()

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        if code not in self._takers:
            self._takers[code] = self._taker(code)
        follows = self._takers[code]
        return None if follows is None else follows(frame)

    def _taker(self, code: CodeType) -> Callable[[FrameType], Any] | None:
        base = self._table.get(key(code))
        if base is None:
            return None
        marks, of = self._marks, sides(code)
        marks[base] = TAKEN
        at = {jump: base + 1 + i for i, jump in enumerate(sorted(of))}
        taken = {jump for jump, i in at.items() if marks[i] == TAKEN}
        calls = 0

        def left() -> set[tuple[int, int, str]]:
            """What is asked for and nobody took, anywhere."""
            return {of[jump] for jump, i in at.items() if not marks[i]} - {of[jump] for jump, i in at.items() if marks[i] == TAKEN}

        def follows(frame: FrameType) -> Any:
            nonlocal calls
            calls += 1
            if calls % ENOUGH == 0 and not left():
                self._takers[code] = None
            return follow(frame, take)

        def take(own: int, jumped: bool) -> None:
            if (own, jumped) not in taken:
                taken.add((own, jumped))
                marks[at[own, jumped]] = TAKEN

        return follows
