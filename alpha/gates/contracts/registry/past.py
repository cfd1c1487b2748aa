"""What is read of version control: which commit a branch left, what a file was there, which lines a branch has changed and which ones ever
named a nonce. A stand-in for git answers the questions that it knows, word for word, and fails at all others. Floor 7."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import folder
from alpha.registry import history
from alpha.registry.history import History, hash_of, nonces_in

MAIN = ("origin/main", "main", "origin/master", "master")
PARENT = ("rev-parse", "--verify", "--quiet", "HEAD^1")
FOLDER = "baselines/evidence"


class _Git:
    """Answers to commands, by their words, for one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.answers: dict[tuple[str, ...], bytes] = {("rev-parse", "HEAD"): b"head\n"}
        self.fails: Exception | None = None
        self.begun = 0
        (root / ".git").mkdir(exist_ok=True)

    def run(self, words: Sequence[str], *, capture_output: bool, check: bool, timeout: float) -> SimpleNamespace:
        """As subprocess.run."""
        if self.fails is not None:
            raise self.fails
        known = self._known(words)
        good = capture_output and not check and timeout > 0 and known in self.answers
        return SimpleNamespace(returncode=0 if good else 128, stdout=self.answers[known] if good else b"what it says where it fails")

    def popen(self, words: Sequence[str], *, stdout: int, stderr: int) -> AbstractContextManager[SimpleNamespace]:
        """As subprocess.Popen with a pipe."""
        text = self.answers.get(self._known(words), b"") if (stdout, stderr) == (subprocess.PIPE, subprocess.DEVNULL) else b""

        @contextmanager
        def process() -> Iterator[SimpleNamespace]:
            self.begun += 1
            yield SimpleNamespace(stdout=text.splitlines(keepends=True))
            self.begun -= 1

        return process()

    def _known(self, words: Sequence[str]) -> tuple[str, ...]:
        return tuple(words[3:]) if list(words[:3]) == ["git", "-C", str(self.root)] else ()

    def lines(self, *words: str, text: bytes) -> None:
        """What a command prints that shows lines with what was added."""
        command, since, where = words
        self.answers[command, "-p", "-U0", "--no-color", "--no-ext-diff", since, "--", where] = text


@contextmanager
def _with(git: _Git) -> Iterator[None]:
    made = SimpleNamespace(run=git.run, Popen=git.popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL,
                           SubprocessError=subprocess.SubprocessError)
    with mock.patch.object(history, "subprocess", made):
        yield


def _verify(name: str) -> tuple[str, ...]:
    return "rev-parse", "--verify", "--quiet", name


def left_at(rng: np.random.Generator) -> Measured:
    """The commit that a branch left the main one at, for every set of main branches that there may be; what a file was there."""
    checks = Checks()
    for n in range(40):
        with folder() as root:
            git = _Git(root)
            there = [name for i, name in enumerate(MAIN) if n >> i & 1]
            merged = {name: ("head", f"base {name}", "")[int(rng.integers(3))] for name in there}
            for name in there:
                git.answers[_verify(name)] = b"some commit\n"
                git.answers["merge-base", "HEAD", name] = f" {merged[name]}\n".encode()
            parent = "parent" if rng.random() < 0.6 else ""
            if parent:
                git.answers[PARENT] = b"parent\n"
            git.answers["rev-parse", "HEAD^{tree}"] = b"tree\xff\n"
            wanted = parent if not there or merged[there[0]] == "head" else merged[there[0]]
            git.answers["show", f"{wanted}:baselines/asked.txt"] = b"a 1\nb 2\n\n"
            git.answers["show", ":baselines/asked.txt"] = b"of the index\n"
            with _with(git):
                past = History(root)
                checks.that((past.why_not, past.head, past.tree) == ("", "head", "tree\ufffd"), f"{past.why_not} {past.head} {past.tree}")
                checks.that(past.base == wanted, f"of {there}: {past.base!r}, not {wanted!r}")
                was = past.was(root / "baselines" / "asked.txt")
                checks.that(was == ("a 1\nb 2" if wanted else ""), f"at {wanted!r} it was {was!r}")
                checks.that(past.was(root / "baselines" / "other.txt") == "", "a file that was not there")
    checks.that(History().root == history.ROOT, "the repository of the running package")
    return checks.measured()


def lines(rng: np.random.Generator) -> Measured:
    """Lines that a branch added, those of files that are not committed, and the lines that ever named each nonce."""
    checks = Checks()
    for _ in range(10):
        with folder() as root:
            git = _Git(root)
            git.answers |= {_verify("main"): b"x\n", ("merge-base", "HEAD", "main"): b"base\n"}
            shown, added = _shown(rng)
            git.lines("diff", "base", FOLDER, text=shown)
            git.lines("diff", "head", FOLDER, text=b'+{"of":"another commit"}\n')
            others = [f"{FOLDER}/new {i}.jsonl" for i in range(int(rng.integers(3)))]
            new = set[bytes]()
            for name in others:
                (root / FOLDER).mkdir(parents=True, exist_ok=True)
                text = [_line(rng) for _ in range(int(rng.integers(1, 4)))]
                (root / name).write_bytes(b"\n".join(text))
                new |= {*text}
            git.answers["ls-files", "--others", "--exclude-standard", "--", FOLDER] = "".join(f"{name}\n" for name in others).encode()
            ever, named = _shown(rng)
            git.lines("log", "HEAD", FOLDER, text=ever)
            with _with(git):
                past = History(root)
                found = past.changed(root / FOLDER)
                checks.that(found == {_hash(line) for line in {*added} | new}, f"changed: {len(found)} of {len(added)} and {len(new)}")
                by_nonce = past.lines_by_nonce(root / FOLDER)
                wanted = dict[str, set[str]]()
                for line in named:
                    for part in line.split(b'"nonce":"')[1:]:
                        wanted.setdefault(part.partition(b'"')[0].decode("ascii", "replace"), set()).add(_hash(line))
                checks.that(by_nonce == wanted, f"by nonce: {by_nonce}")
                checks.that(git.begun == 0, "a process that was begun is not waited for")
    checks.that(nonces_in(b'{"nonce":"ab\xe9","record":{"nonce":"","other":"nonce"}}') == ["ab\ufffd", ""], "two nonces of a line")
    checks.that(hash_of(b"a line") == _hash(b"a line") != hash_of(b"a line\n"), "the hash of a line")
    return checks.measured()


def _line(rng: np.random.Generator) -> bytes:
    """A line of evidence, of catches with two nonces, or of neither; few nonces, so that some come again."""
    nonces = [f"{rng.integers(5):02x}" for _ in range(int(rng.integers(3)))]
    inner = "".join(f',"nonce":"{nonce}"' for nonce in nonces)
    return f'{{"a":{rng.integers(1 << 30)}{inner}}}'.encode()


def _shown(rng: np.random.Generator) -> tuple[bytes, list[bytes]]:
    """What git shows of changed files, and the lines that were added."""
    text, added = b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n", list[bytes]()
    for _ in range(int(rng.integers(9))):
        sign, line = (b"+", b"-", b" ", b"+#", b"")[int(rng.integers(5))], _line(rng)
        text += sign + line + b"\n"
        if sign == b"+":
            added.append(line)
    return text.removesuffix(b"\n"), added


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def nothing(rng: np.random.Generator) -> Measured:
    """No checkout, no commit, no git, one that does not answer: the reason is said, and nothing is known."""
    checks = Checks()
    broken: Sequence[tuple[str, Callable[[_Git], object]]] = (
        ("no folder of git", lambda g: (g.root / ".git").rmdir()), ("no commit", lambda g: g.answers.clear()),
        ("an empty answer", lambda g: g.answers.update({("rev-parse", "HEAD"): b"\n"})),
        ("no git", lambda g: setattr(g, "fails", FileNotFoundError(2, "git"))),
        ("no answer", lambda g: setattr(g, "fails", subprocess.TimeoutExpired("git", 300))),
    )
    for what, breaks in broken:
        with folder() as root:
            git = _Git(root)
            breaks(git)
            with _with(git):
                past = History(root)
                checks.that(past.why_not == f"{root.name} is no git checkout with a commit", f"{what}: {past.why_not!r}")
                if what not in ("no folder of git", "an empty answer"):
                    checks.that((past.head, past.tree, past.base, past.was(root / "a")) == ("", "", "", ""), f"{what}: something is known")
                    checks.that(past.changed(root / "a") == set() and past.lines_by_nonce(root / "a") == {}, f"{what}: lines are known")
    return checks.measured()
