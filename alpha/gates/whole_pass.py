"""A whole pass: baselines/tests.json says on which tree the whole suite passed, and there a session draws a tenth of it. Floor 7.

The tree is told by one digest of all its files, with or without git: what .gitignore names is none of them, nor is the file itself.
Beside it stand the class of the CPU, Python's and NumPy's versions, and what came of that session. Where one of them differs, or the file
is damaged, everything runs and the session says why. A command that chooses (paths, `-k`, `-m`, `--all`) gets what it chose.

Tests of gates are not drawn here: evidence decides about them. Tests that did not run in the whole pass, and those marked h100, always
run. `pytest suites --stamp` draws no test and writes the file. It is no seal: whoever writes it by hand skips nine tests in ten. Each
commit draws another tenth, and `make test-all` asks no file.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import stat
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from alpha.errors import AlphaError
from alpha.files import json_of, read_regular
from alpha.registry.evidence import reference_class, write_atomic
from alpha.registry.machine import machine_class
from alpha.resources import ROOT

NAME = "baselines/tests.json"
TENTH = 10
HIDDEN = (".ci", ".github", ".gitignore", ".pytest.ini", ".pytest.toml")
"""At the top of a checkout the tree is what is not hidden, and these: other hidden files there are those of tools and of their users."""

MOST_BYTES = 1 << 20
MOST = 10**9
"""No count and no time of a session is larger."""
_TEXTS = {"tree": "[0-9a-f]{64}", "machine": "[A-Za-z0-9_.-]{1,200}", "python": "[0-9]{1,3}[.][0-9]{1,3}", "numpy": "[A-Za-z0-9.+-]{1,40}"}
_CHOOSING = {"keyword": "-k", "markexpr": "-m", "deselect": "--deselect", "ignore": "--ignore", "ignore_glob": "--ignore-glob",
             "lf": "--lf", "stepwise": "--stepwise", "stepwise_skip": "--stepwise-skip", "collectonly": "--collect-only"}
"""Options of pytest by which a command chooses tests, by the name under which pytest keeps them."""


# -- the tree ------------------------------------------------------------------------------------------------------------------


def files(root: Path) -> Iterator[str]:
    """The files of a checkout, relative and sorted: all but what its .gitignore names, what is hidden at its top (see HIDDEN), and NAME."""
    rules = _rules(root)
    folders = [""]
    found = []
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                path, is_folder = f"{folder}{entry.name}", entry.is_dir(follow_symlinks=False)
                other = not folder and path.startswith(".") and path not in HIDDEN
                if other or path == NAME or _ignored(path, is_folder, rules):
                    continue
                if is_folder:
                    folders.append(f"{path}/")
                else:
                    found.append(path)
    yield from sorted(found)


def _rules(root: Path) -> list[tuple[list[str], bool, bool]]:
    """(parts of the pattern, whether it is ignored or kept after all, whether it speaks of folders only), as .gitignore has them. A pattern
    of one part without a slash before it holds at any depth: its first part is then ''."""
    try:
        text = read_regular(root / ".gitignore", MOST_BYTES).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pattern = line.strip().removeprefix("!")
        bare = pattern.rstrip("/")
        parts = bare.lstrip("/").split("/") if "/" in bare else ["", bare]
        found.append((parts, not line.startswith("!"), pattern.endswith("/")))
    return found


def _ignored(path: str, is_folder: bool, rules: Sequence[tuple[list[str], bool, bool]]) -> bool:
    """By the last rule that fits, as git has it. What lies in an ignored folder is never looked at."""
    names = path.split("/")
    for parts, ignored, folders_only in reversed(rules):
        here = ["", names[-1]] if parts[0] == "" else names
        fits = len(here) == len(parts) and all(fnmatchcase(name, part) for name, part in zip(here, parts))
        if fits and (is_folder or not folders_only):
            return ignored
    return False


def digest(root: Path) -> str:
    """SHA-256 over name, executable bit and bytes of every file; of a link, where it leads. OSError for what cannot be read."""
    whole = hashlib.sha256()
    for name in files(root):
        path = root / name
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            kind, data = "link", os.fsencode(os.readlink(path))
        else:
            kind, data = "program" if mode & stat.S_IXUSR else "file", read_regular(path, None)
        whole.update(os.fsencode(name) + f"\0{kind}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return whole.hexdigest()


# -- the file ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WholePass:
    """What baselines/tests.json says. `machine`: key of the CPU's class; `tests`: how many of those that ran were of no gate;
    `not_run_tests`: which of them did not run and are not marked h100."""

    tree: str
    machine: str
    python: str
    numpy: str
    passed: int
    not_run: int
    tests: int
    seconds: float
    workers: int
    not_run_tests: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The bytes of the file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def read(root: Path) -> WholePass:
    """The file of a checkout. OSError where it cannot be read, ValueError where it does not say what it should."""
    value = json_of(read_regular(root / NAME, MOST_BYTES))
    names = {f.name for f in fields(WholePass)}
    if not isinstance(value, dict) or set(value) != names:
        raise ValueError(f"it is no table of {', '.join(sorted(names))}")
    lists = value["not_run_tests"]
    right = {
        **{name: isinstance(value[name], str) and bool(re.fullmatch(pattern, value[name])) for name, pattern in _TEXTS.items()},
        **{name: type(value[name]) is int and 0 <= value[name] <= MOST for name in ("passed", "not_run", "tests", "workers")},
        "seconds": type(value["seconds"]) in (int, float) and 0 <= value["seconds"] <= MOST,
        "not_run_tests": isinstance(lists, list) and all(isinstance(test, str) for test in lists),
    }
    wrong = sorted(name for name, holds in right.items() if not holds)
    if wrong:
        raise ValueError(f"wrong values of {', '.join(wrong)}")
    return WholePass(**value)


def here() -> dict[str, str]:
    """What of this process a whole pass is bound to, beside the tree."""
    return {"machine": machine_class().key, "python": f"{sys.version_info[0]}.{sys.version_info[1]}", "numpy": np.__version__}


def standing(root: Path) -> tuple[WholePass | None, str]:
    """The whole pass of this very tree, class, Python and NumPy, and ''; or None and what differs."""
    try:
        found = read(root)
    except FileNotFoundError:
        return None, f"there is no {NAME}"
    except (OSError, ValueError) as error:
        return None, f"{NAME} cannot be read: {getattr(error, 'strerror', None) or error}"
    words = {"machine": "class", "python": "Python", "numpy": "NumPy"}
    wrong = [f"{words[name]} {value}, not the {getattr(found, name)} of {NAME}" for name, value in here().items()
             if getattr(found, name) != value]
    try:
        if digest(root) != found.tree:
            wrong.append(f"files differ from those of {NAME}")
    except OSError as error:
        wrong.append(f"the tree cannot be read: {error.filename}: {error.strerror}")
    return (None, "; ".join(wrong)) if wrong else (found, "")


# -- a session -----------------------------------------------------------------------------------------------------------------


def chosen(config: Any, root: Path) -> str:
    """By what the command chose among the tests; '' where it asks for the whole suite."""
    wanted = [(config.invocation_params.dir / str(arg)).resolve() for arg in config.args]
    if wanted != [(root / "suites").resolve()]:
        return "paths"
    return next((option for name, option in _CHOOSING.items() if config.getoption(name, None)), "")


def is_drawn(test: str, seed: int) -> bool:
    """Whether a seed draws a test: by the two alone, so that all workers agree."""
    return random.Random(f"{seed} {test}").randrange(TENTH) == 0


class Suite:
    """What one session makes of the whole suite. `passed`: the whole pass by which it draws; `why`: why it does not, '' where the command
    chose what runs. Workers are told by the session that started them."""

    def __init__(self, passed: WholePass | None = None, why: str = "") -> None:
        self.passed, self.why = passed, why

    @classmethod
    def of(cls, config: Any, everything: bool, root: Path | None = None) -> Suite:
        """Of a session that starts no other's work. `everything`: it was asked for."""
        root = root or ROOT
        return cls() if everything or chosen(config, root) else cls(*standing(root))

    def plain(self) -> dict[str, Any] | None:
        """As a worker is told."""
        return asdict(self.passed) if self.passed is not None else None

    @classmethod
    def told(cls, plain: dict[str, Any] | None) -> Suite:
        """Of a worker."""
        return cls(WholePass(**plain) if plain is not None else None)

    def draws(self, tests: int) -> bool:
        """Whether a tenth is drawn of so many tests: of as many as the whole pass had."""
        return self.passed is not None and tests == self.passed.tests

    def left_out(self, tests: Collection[str], always: Collection[str], seed: int) -> set[str]:
        """Which tests, of no gate, do not run in this session; those of `always` do."""
        if self.passed is None or not self.draws(len(tests)):
            return set()
        return {test for test in tests if not is_drawn(test, seed)} - set(always) - set(self.passed.not_run_tests)

    def lines(self, tests: int, left_out: int, seed: int) -> list[str]:
        """For the session's end: what was drawn, or why everything ran; nothing where the command chose."""
        done = self.passed
        if done is None or not self.draws(tests):
            why = self.why if done is None else f"{tests} tests were found here, not the {done.tests} of {NAME}"
            return [f"all tests were asked for: {why}"] if why and tests else []
        return [f"the whole suite passed on this very tree ({NAME}): {done.passed} passed, {done.not_run} NOT_RUN, on {done.machine}, "
                f"Python {done.python}, NumPy {done.numpy}",
                f"so {tests - left_out} of {tests} tests of no gate were drawn, seed {seed}; the others did not run. "
                "`make test-all` runs all"]


class Stamp:
    """A session that was asked to write the file. ValueError at once where it could not in any case."""

    def __init__(self, config: Any, root: Path | None = None) -> None:
        self.root = root or ROOT
        self.began = time.monotonic()
        option = chosen(config, self.root)
        if option:
            raise ValueError(f"--stamp needs the whole suite, and {option} chose among it")
        self.here = here()
        try:
            reference = reference_class(self.root / "baselines" / "evidence")
            self.tree = digest(self.root)
        except AlphaError as error:
            raise ValueError(f"--stamp: {error}") from None
        except OSError as error:
            raise ValueError(f"--stamp: the tree cannot be read: {error.filename}: {error.strerror}") from None
        if self.here["machine"] != reference:
            raise ValueError(f"--stamp needs the reference class, {reference}; here is {self.here['machine']}")

    def write(self, *, exitstatus: int, selected: set[str], ran: set[str], h100: set[str], tests: int, workers: int) -> str:
        """Write the file, whole or not at all; '' where that was done, else why it was not."""
        if exitstatus != 0:
            return f"the session ended with {exitstatus}"
        if not ran or not tests:
            return "nothing ran"
        not_run = selected - ran
        done = WholePass(tree=self.tree, **self.here, passed=len(ran & selected), not_run=len(not_run), tests=tests, workers=workers,
                         seconds=round(time.monotonic() - self.began, 1), not_run_tests=sorted(not_run - h100))
        try:
            if digest(self.root) != self.tree:
                return "files changed while the tests ran"
            write_atomic(self.root / NAME, done.text())
        except OSError as error:
            return f"the tree cannot be read: {error.filename}: {error.strerror}"
        except AlphaError as error:
            return str(error)
        return ""
