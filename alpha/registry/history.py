"""What version control remembers of committed evidence: every line that ever was, and what a branch changed. Floor 3."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from alpha.resources import ROOT

MAIN = ("origin/main", "main", "origin/master", "master")
"""Branches that others are merged into, the first that exists."""

_NONCE = re.compile(rb'"nonce":"([^"]*)"')


def nonces_in(line: bytes) -> list[str]:
    """The nonces that a line of evidence or of catches names."""
    return [found.decode("ascii", "replace") for found in _NONCE.findall(line)]


def hash_of(line: bytes) -> str:
    """By which lines are compared."""
    return hashlib.sha256(line).hexdigest()


class History:
    """One repository. `why_not`: why it says nothing (no checkout, no git, no commit); '' where it does."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        there = (root / ".git").exists() and self._git("rev-parse", "HEAD")
        self.why_not = "" if there else f"{root.name} is no git checkout with a commit"

    def _git(self, *words: str) -> str:
        """What git prints; '' where it fails."""
        try:
            done = subprocess.run(["git", "-C", str(self.root), *words], capture_output=True, check=False, timeout=300)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""

    @cached_property
    def head(self) -> str:
        """The commit that is checked out."""
        return self._git("rev-parse", "HEAD")

    @cached_property
    def tree(self) -> str:
        """The hash of all files of that commit, whatever its message and parents."""
        return self._git("rev-parse", "HEAD^{tree}")

    @cached_property
    def base(self) -> str:
        """The commit that a branch left the main one at; on the main branch the first parent. '' where the clone is too shallow to say."""
        for name in MAIN:
            if self._git("rev-parse", "--verify", "--quiet", name):
                found = self._git("merge-base", "HEAD", name)
                if found != self.head:
                    return found
                break
        return self._git("rev-parse", "--verify", "--quiet", "HEAD^1")

    def was(self, path: Path) -> str:
        """The text of a file at the base; '' where there was none."""
        return self._git("show", f"{self.base}:{path.relative_to(self.root).as_posix()}") if self.base else ""

    def changed(self, folder: Path) -> set[str]:
        """Hashes of the lines of evidence below a folder that the base does not have, in files that are not committed yet too."""
        where = folder.relative_to(self.root).as_posix()
        found = {hash_of(line) for line in self._added("diff", self.base, where)}
        for name in self._git("ls-files", "--others", "--exclude-standard", "--", where).splitlines():
            found |= {hash_of(line) for line in (self.root / name).read_bytes().split(b"\n") if line}
        return found

    def lines_by_nonce(self, folder: Path) -> dict[str, set[str]]:
        """nonce -> hashes of all lines below a folder that ever named it, as far back as the clone goes."""
        found: dict[str, set[str]] = {}
        for line in self._added("log", "HEAD", folder.relative_to(self.root).as_posix()):
            for nonce in nonces_in(line):
                found.setdefault(nonce, set()).add(hash_of(line))
        return found

    def _added(self, command: str, since: str, where: str) -> Iterator[bytes]:
        words = ["git", "-C", str(self.root), command, "-p", "-U0", "--no-color", "--no-ext-diff", since, "--", where]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as lines:
            assert lines.stdout is not None
            for line in lines.stdout:
                if line.startswith(b"+{"):
                    yield line[1:].rstrip(b"\n")
