"""What the cases share: inputs made from a generator, and the same computation in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

import alpha
from alpha.component import Measured
from alpha.data import corpus
from alpha.data.tokenizer import FIRST_MERGE, BPETokenizer
from alpha.gates.contracts.checks import Checks

Case = tuple[str, Callable[[np.random.Generator], Measured]]
Cases = dict[str, list[Case]]

_WORDS = (
    *b'def return self for in value None import x _ name 12 3456789 == ( ) : ... """ \xc3\xa9t\xc3\xa9 \xff\xfe \0'.split(b" "),
    *(b" ", b" ", b" ", b"  ", b"\t", b"\n", b"\n    ", b"\r\n", b"\n\n        "),
)



def text_like(rng: np.random.Generator, size: int) -> bytes:
    """About `size` bytes that look like source text, with invalid UTF-8 and odd blanks in it."""
    return b"".join(_WORDS[i] for i in rng.integers(0, len(_WORDS), size // 3 + 1))


def any_bytes(rng: np.random.Generator, size: int) -> bytes:
    """`size` uniform bytes."""
    return rng.bytes(size)


def stdlib_texts(rng: np.random.Generator, count: int, limit: int) -> list[bytes]:
    """The first `limit` bytes of `count` files of the standard library, chosen by the generator."""
    root = corpus.stdlib_folder()
    paths = sorted(path for path in root.glob("*.py") if path.stat().st_size > 500)
    return [paths[i].read_bytes()[:limit] for i in rng.choice(len(paths), count, replace=False)]


def wide_bpe(vocab_size: int) -> BPETokenizer:
    """A tokenizer whose merges are pairs of bytes in order: up to 65,793 ids, more than 16 bits hold."""
    pairs = [(left, right) for left in range(256) for right in range(256)]
    return BPETokenizer(pairs[: vocab_size - FIRST_MERGE])


@contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder."""
    with tempfile.TemporaryDirectory(prefix="alpha-data-") as name:
        yield Path(name)


def write_texts(root: Path, texts: dict[str, bytes]) -> None:
    """Write `root/relpath` for each item."""
    for relpath, data in texts.items():
        path = root / relpath
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def in_fresh_process(function: Callable[[bytes], str], data: bytes, hash_seed: int) -> str:
    """`function(data)` in a new interpreter with that PYTHONHASHSEED. `function`: a module-level one of this package."""
    module, name = function.__module__, function.__name__
    root = str(Path(alpha.__file__).parents[1])  # first on the path: this package, wherever the process starts
    code = f"import sys; sys.path.insert(0, {root!r}); from {module} import {name} as f; print(f(sys.stdin.buffer.read()))"
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=data, env=environment, capture_output=True, timeout=120, check=False)
    if done.returncode:
        return f"exit {done.returncode}: {done.stderr.decode(errors='replace')[-300:]}"
    return done.stdout.decode().strip()


def same_everywhere(function: Callable[[bytes], str], data: bytes, rng: np.random.Generator) -> Measured:
    """`function(data)` three times here and once in a fresh process with another hash seed: all equal."""
    count = Checks()
    expected = function(data)
    count.add(expected.encode())
    for _ in range(2):
        count.that(function(data) == expected, "differs when repeated")
    came = in_fresh_process(function, data, int(rng.integers(1, 1 << 31)))
    count.that(came == expected, f"differs in a fresh process: {came}")
    return count.measured()


def flipped(rng: np.random.Generator, data: bytes) -> bytes:
    """`data` with one to eight bits of one byte flipped."""
    place = int(rng.integers(len(data)))
    return data[:place] + bytes([data[place] ^ int(rng.integers(1, 256))]) + data[place + 1 :]


def parts_of(data: bytes, part: int) -> list[bytes]:
    """A text in parts as the handbook says: one begins at the first line that begins at or behind each multiple of `part`, else at the
    first character."""
    cuts = {0, len(data)}
    for at in range(part, len(data), part):
        behind = [i for i in range(at, min(at + part, len(data)) + 1) if data[i - 1 : i] == b"\n"]
        starts = [i for i in range(at, at + 4) if i >= len(data) or data[i] & 0xC0 != 0x80]
        cuts.add(behind[0] if behind else starts[0] if starts else at)
    bounds = sorted(cuts)
    return [data[a:b] for a, b in pairwise(bounds) if b > a]
