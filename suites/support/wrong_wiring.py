"""Wrong wirings, planted one at a time into this process, each with a run that the dull trainer has to tell from a sound one.

`python suites/support/wrong_wiring.py [PART OF A NAME]` plants all of wrong_wiring.toml and prints the score. A row there is a place, a
text that stands there once, and what it becomes. The code of every function that the change touches is swapped, and swapped back.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isclass
from pathlib import Path
from typing import Any

from compare_trainers import problems
from drawn_runs import draw
from dull_trainer import tomllib
from watched_run import watched

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
TRIES = 12
"""Draws in which a wrong wiring is looked for at most: more than every family, optimizer and schedule needs."""


@dataclass(frozen=True)
class Wiring:
    """One wrong wiring: in `file` the text `find`, which stands there once, becomes `replace`. `draw`: the first draw that shows it; `why`:
    what is wrong."""

    id: str
    file: str
    find: str
    replace: str
    why: str
    draw: int = 0

    @property
    def text(self) -> str:
        """The broken file. ValueError where what is to be found does not stand there once."""
        sound = (ROOT / self.file).read_text(encoding="utf-8")
        if sound.count(self.find) != 1:
            raise ValueError(f"{self.id}: its text stands {sound.count(self.find)} times in {self.file}")
        return sound.replace(self.find, self.replace)


def wirings() -> list[Wiring]:
    """Those of wrong_wiring.toml."""
    return [Wiring(**row) for row in tomllib.loads(HERE.with_suffix(".toml").read_text(encoding="utf-8"))["wiring"]]


@contextmanager
def planted(file: str, text: str) -> Iterator[None]:
    """Have the functions of `file` the code of `text` while the context lasts. ValueError where no function changes."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    broken = types.ModuleType(module.__name__)
    broken.__file__ = module.__file__
    before = sys.modules[module.__name__]
    sys.modules[module.__name__] = broken  # dataclasses look their module up
    try:
        exec(compile(text, str(module.__file__), "exec"), vars(broken))
    finally:
        sys.modules[module.__name__] = before
    sound, wrong = dict(_functions(module)), dict(_functions(broken))
    changed = [(f, wrong[name].__code__, f.__code__) for name, f in sound.items() if name in wrong and _differs(f, wrong[name])]
    if not changed:
        raise ValueError(f"no function of {file} changes")
    for function, code, _ in changed:
        function.__code__ = code
    try:
        yield
    finally:
        for function, _, code in changed:
            function.__code__ = code


def _functions(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    """Functions and methods that a module defines, by name."""
    for name, thing in vars(module).items():
        members: dict[str, Any] = dict(vars(thing)) if isclass(thing) and thing.__module__ == module.__name__ else {"": thing}
        for own, member in members.items():
            function = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", None) or member
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, types.FunctionType) and function.__code__.co_filename == module.__file__:
                yield f"{name}.{own}", function


def _differs(a: types.FunctionType, b: types.FunctionType) -> bool:
    """Code objects are equal where bytecode, names, constants and lines are; here an edit never moves a line by itself."""
    return a.__code__ != b.__code__ and a.__code__.co_freevars == b.__code__.co_freevars


def seen(file: str, text: str, first: int, tries: int = TRIES) -> tuple[int, str]:
    """(the draw, what was seen of it) of the first draw from `first` on that shows it; (-1, "") where none does."""
    for seed in [first, *(s for s in range(tries) if s != first)][:tries]:
        with tempfile.TemporaryDirectory() as folder:
            run_file = draw(seed, Path(folder))
            try:
                with planted(file, text):
                    run = watched(run_file, Path(folder) / "runs" / "drawn")
            except Exception as error:  # a run that ends with an error has shown it, too
                return seed, f"the run ends: {str(error).splitlines()[-1][-150:]}"
            for problem in problems(run_file, run):
                return seed, problem
    return -1, ""


def main(part: str = "") -> int:
    """Plant all whose name has `part`; how many survived."""
    rows = [w for w in wirings() if part in w.id]
    survivors = []
    for wiring in rows:
        seed, what = seen(wiring.file, wiring.text, wiring.draw)
        survivors += [] if what else [wiring.id]
        print(f"{wiring.id:45} {f'draw {seed}: {what}' if what else 'SURVIVES'}", flush=True)
    print(f"{len(rows) - len(survivors)} of {len(rows)} wrong wirings were seen", *survivors, sep="\n    ")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
