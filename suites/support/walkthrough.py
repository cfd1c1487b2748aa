"""A page's walkthrough, done as it says: its fenced blocks are files, edits and commands, in order.

    ```python / toml / cuda / cpp     first line `# PATH` or `// PATH`: a new file of that text
    ```diff                           first line `--- PATH`: lines with ' ' and '-' stand there exactly once; '-' goes, '+' comes
    ```console                        `$ COMMAND`, then words that its output holds; the exit code is 0
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import warm
from copies import ROOT, share_digests

from alpha.gates.adversarial.plant import put

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
PARTS = ("alpha", "baselines", "kernels", "configs", "examples", "suites", "docs", "README.md", "pyproject.toml", "LICENSE")


def copy(to: Path) -> Path:
    """A copy of the repository. Compiled Python goes along: the sources keep their times, so it stays valid."""
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, to / part, ignore=shutil.ignore_patterns("*.png"), copy_function=put)
        else:
            shutil.copy(ROOT / part, to / part)
    share_digests(to)
    return to


@dataclass
class Done:
    """What following a page touched. `made`, `edited`: files; `ran`: commands with their output."""

    made: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)
    ran: list[tuple[str, str]] = field(default_factory=list)


def follow(page: str, place: Path, *, only: str | None = None, skip: Sequence[str] = (), timeout: float = 300) -> Done:
    """Do in `place`, a copy, what `page` of the repository says; `only`: the section of this heading. Commands that begin with one of
    `skip` are left out. AssertionError where an edit does not fit, a command fails or does not say what the page says."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if only is not None:
        text = section(text, only)
    done = Done()
    for kind, body in BLOCK.findall(text):
        if kind == "console":
            for command, expected in commands(body):
                if not command.startswith(tuple(skip)):
                    done.ran.append((command, run(command, place, expected, timeout)))
        elif kind == "diff":
            done.edited.append(edit(body, place))
        else:
            named = re.match(r"(?:#|//) (\S+/\S+)\n", body)
            assert named, f"{page}: a block without a file name: {body[:60]!r}"
            path = place / named[1]
            assert not path.exists(), f"{page}: {named[1]} is there already"
            assert path.parent.is_dir(), f"{page}: {named[1]} has no folder"
            path.write_text(body, encoding="utf-8")
            done.made.append(named[1])
    return done


def section(text: str, title: str) -> str:
    """What stands below this heading, up to the next of its level or above. Headings within code blocks are none."""
    kept: list[str] = []
    level, fenced = 0, False
    for line in text.splitlines(keepends=True):
        fenced ^= line.startswith("```")
        heading = None if fenced else re.match(r"(#+) (.*)", line)
        if heading and level and len(heading[1]) <= level:
            break
        if level:
            kept.append(line)
        if heading and heading[2] == title:
            level = len(heading[1])
    assert level, f"no heading {title!r}"
    return "".join(kept)


def edit(body: str, place: Path) -> str:
    """Apply one diff block; returns the file's name."""
    head, *lines = body.splitlines()
    name = head.removeprefix("--- ")
    assert head.startswith("--- ") and all(line[:1] in " -+" and line for line in lines), body
    path = place / name
    text = path.read_text(encoding="utf-8")
    old = "".join(line[1:] + "\n" for line in lines if line[0] in " -")
    new = "".join(line[1:] + "\n" for line in lines if line[0] in " +")
    assert ("\n" + text).count("\n" + old) == 1, f"{name}: not there exactly once:\n{old}"
    at = ("\n" + text).index("\n" + old)
    path.write_text(text[:at] + new + text[at + len(old):], encoding="utf-8")
    return name


def commands(body: str) -> list[tuple[str, list[str]]]:
    """(command, words of its output) in order."""
    found: list[tuple[str, list[str]]] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def run(command: str, place: Path, expected: Sequence[str], timeout: float) -> str:
    """Run one command of a page in `place`; its output. AssertionError unless it ends with 0 and says what is expected."""
    word, *rest = shlex.split(command)
    programs = {"alpha": ["-m", "alpha"], "pytest": ["-m", "pytest", "-p", "no:cacheprovider"], "python": []}
    assert word in programs, f"the test knows no program {word}"
    done = warm.run([*programs[word], *rest], cwd=place, root=place, environment={"COLUMNS": "200"}, timeout=timeout)
    stated = done.stdout + done.stderr
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{stated[-3000:]}"
    for words in expected:
        assert words in stated, f"{command}: the page says {words!r}, which did not come:\n{stated[-3000:]}"
    return stated
