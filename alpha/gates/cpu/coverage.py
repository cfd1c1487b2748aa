"""Branch coverage of the CPU's binders by the samples of their own gates: a branch that no sample takes is a branch that no gate sees.
Floor 7.

Kernels are called on what their gates of parity, determinism and faults call them on: each case with one worker and with two, each refused
content once.
The workers take turns on the caller's thread, so what is covered does not hang on time. Meanwhile every opcode of the binders' files is
traced (sys.settrace, which every supported Python has; lines alone would not tell the two sides of `a if b else c`). A conditional jump
must have jumped, and have gone on. What a binder itself holds counts only while its own component is called; what binders share counts
for whoever calls it.

`untaken.toml` beside this file lists what no sample can take, each with the reason. An entry that is not needed is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np

from alpha.backends.cpu import blocks, lib
from alpha.backends.cpu.lib import Cpu
from alpha.backends.cpu.workers import Task, Workers
from alpha.component import Component
from alpha.errors import InputError
from alpha.gates.branches import Side, codes, follow, jumps
from alpha.gates.cpu.determinism import chosen
from alpha.gates.cpu.subjects import refused as samples_refused
from alpha.gates.subjects import Case, case_of, cases, generator, pin_blas, spec_of
from alpha.tomlfile import read_toml
from alpha.types import NUMPY

NONCE = "c0" * 16
EXEMPT = Path(__file__).with_name("untaken.toml")
SHARED: tuple[ModuleType, ...] = (blocks, lib)
"""What every binder may call. A kernel's own file is added to it."""


@dataclass(frozen=True, order=True)
class Branch(Side):
    """A side that no sample takes."""

    @property
    def place(self) -> tuple[str, str, str]:
        """What an exemption names: it outlives edits elsewhere in the file."""
        return self.function, self.side, self.text


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Functions and methods that a module's own text defines."""
    for holder in (module, *(x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__)):
        for x in vars(holder).values():
            x = getattr(x, "__func__", getattr(x, "fget", x))
            if isinstance(x, FunctionType) and x.__code__.co_filename == module.__file__:
                yield x


class Tracer:
    """Which sides of the jumps of some code objects were taken, by all threads started or traced since."""

    def __init__(self, codes: Sequence[CodeType]) -> None:
        self.taken: dict[CodeType, set[tuple[int, bool]]] = {code: set() for code in codes}
        self.called: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code not in self.taken:
            return None
        self.called.add(code)
        taken = self.taken[code]
        return follow(frame, lambda own, jumped: taken.add((own, jumped)))

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace this thread."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


class _InTurn:
    """Stands for a pool of `n` workers: tasks run one after the other on the caller."""

    def __init__(self, n: int) -> None:
        self.n = n

    def run(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            task()


def kernels(catalogue: Iterable[Component]) -> list[Component]:
    """The components whose binders are looked at."""
    return [c for c in catalogue if c.kind == "kernel" and c.backend == "cpu"]


def problems(left: Sequence[Branch], whole: bool = True) -> list[str]:
    """What of `left` is not exempt; and entries of `untaken.toml` that exempt none, where `left` is of the `whole` catalogue."""
    exempt = exemptions()
    needless = sorted(exempt.keys() - {branch.place for branch in left}) if whole else []
    return [*(f"no sample takes {branch}" for branch in left if branch.place not in exempt),
            *(f"{EXEMPT.name} exempts what is taken or not there: {', '.join(place)}" for place in needless)]


def exemptions() -> dict[tuple[str, str, str], str]:
    """(function, side, line) -> the reason why no sample takes it; InputError for an entry without one or with another key."""
    found = {}
    for entry in read_toml(EXEMPT)["branch"]:
        if sorted(entry) != ["function", "line", "side", "why"] or not entry["why"].strip():
            raise InputError("an exempted branch has a function, a side, its line and a reason", came=str(entry), do=f"mend {EXEMPT.name}")
        found[entry["function"], entry["side"], entry["line"]] = entry["why"]
    return found


def untaken(components: Sequence[Component], nonce: str = NONCE) -> list[Branch]:
    """Branches of the components' binders, and of what those share, that no call took; sorted. Exemptions are not taken off."""
    pin_blas()
    every = _every(components)
    own = {code: c.id for c in components for code in codes(c.implementation.__code__)}
    left: list[Branch] = []
    shared = Tracer([code for code in every if code not in own])
    for c in components:
        mine = Tracer([code for code, owner in own.items() if owner == c.id])
        mine.taken |= shared.taken
        with mine.tracing():
            _call(c, nonce)
        shared.called |= mine.called
        left += _left({code: taken for code, taken in mine.taken.items() if code not in shared.taken}, mine.called, every)
    return sorted([*left, *_left(shared.taken, shared.called, every)])


def sides(components: Sequence[Component]) -> int:
    """How many sides the branches of the components' binders, and of what those share, have."""
    return sum(2 * len(set(jumps(code).values())) for code in _every(components))


def _every(components: Sequence[Component]) -> dict[CodeType, FunctionType]:
    """Code objects of the components' files and of SHARED, with the function that each lies in."""
    modules = {*SHARED, *(sys.modules[c.implementation.__module__] for c in components)}
    return {code: f for m in sorted(modules, key=lambda m: m.__name__) for f in _functions(m) for code in codes(f.__code__)}


def _left(taken: dict[CodeType, set[tuple[int, bool]]], called: set[CodeType], every: dict[CodeType, FunctionType]) -> Iterator[Branch]:
    for code, sides in taken.items():
        function = every[code]
        file = Path(code.co_filename)
        text = file.read_text(encoding="utf-8").splitlines()
        where = "/".join(file.parts[file.parts.index("alpha") :]) if "alpha" in file.parts else file.name
        name = f"{function.__qualname__}.{code.co_name}" if code is not function.__code__ else function.__qualname__

        def branch(line: int, side: str, where: str = where, name: str = name, text: list[str] = text) -> Branch:
            return Branch(where, line, name, side, text[line - 1].strip())
        if code not in called:
            yield branch(code.co_firstlineno, "")
            continue
        for own, _, line in set(jumps(code).values()):
            for side, jumped in (("goes on", False), ("jumps", True)):
                if (own, jumped) not in sides:
                    yield branch(line, side)


def _call(component: Component, nonce: str) -> None:
    """Every case with one worker, with two and in place, each content that is refused once."""
    for case in {c.name: c for c in (*cases(component, nonce), *chosen(component, nonce))}.values():
        for n in (1, 2):
            _run(component, case, n)
        for pair in component.inplace:
            _run(component, case, 1, pair)
    for sample in samples_refused(component, generator(nonce, component.id, "contents")):
        with suppress(InputError):
            _run(component, case_of(sample, component.envelope.dtypes[0], spec=spec_of(component)), 1)


def _run(component: Component, case: Case, workers: int, share: tuple[int, int] | None = None) -> None:
    ins, types = case.arrays(), case.out_types(spec_of(component))
    if share is not None and (share[1] >= len(ins) or types[share[0]] != case.types[share[1]]):
        return
    outs = [ins[share[1]] if share is not None and i == share[0] else np.empty(t.shape, NUMPY[t.dtype]) for i, t in enumerate(types)]
    with np.errstate(all="ignore"):
        component.implementation(Cpu(cast(Workers, _InTurn(workers))), ins, outs, case.attrs)()
