"""Cases of sources that need a package: zstd and Parquet, by stand-ins of the two packages, so that no gate loads them.

A stand-in has what alpha/data/sources.py asks of the package and no more: frames that end anywhere, row groups, an error of its own. The
packages themselves are held to the same documents by suites/unit/test_prepare.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.data import sources
from alpha.errors import InputError, MachineError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data.support import folder, text_like


class _ZstdError(Exception):
    """What the stand-in for zstandard raises."""


class _Frame:
    """A frame: `F`, its length in 2 bytes, then each byte with its bits turned."""

    def __init__(self) -> None:
        self.eof, self.unused_data = False, b""
        self._head, self._left = b"", -1

    def decompress(self, data: bytes) -> bytes:
        """What of the frame is there."""
        need = 3 - len(self._head)
        self._head, data = self._head + data[:need], data[need:]
        if not b"F".startswith(self._head[:1]):
            raise _ZstdError("no frame begins here")
        if len(self._head) < 3:
            return b""
        if self._left < 0:
            self._left = int.from_bytes(self._head[1:], "little")
        own, rest = data[: self._left], data[self._left :]
        self._left -= len(own)
        self.eof = self._left == 0
        self.unused_data = rest if self.eof else b""
        return bytes(byte ^ 0xFF for byte in own)


def _framed(data: bytes) -> bytes:
    return b"F" + len(data).to_bytes(2, "little") + bytes(byte ^ 0xFF for byte in data)


class _ArrowException(Exception):
    """What the stand-in for pyarrow raises."""


def _values(values: list[Any]) -> list[Any]:
    """As the package, which raises where Python has no such date; "9999+" stands for one."""
    if any("9999+" in (value.values() if isinstance(value, dict) else [value]) for value in values):
        raise OverflowError("date value out of range")
    return values


class _ParquetFile:
    """A file of JSON: its columns' names, and row groups of rows."""

    def __init__(self, path: Path, **how: object) -> None:
        try:
            content = json.loads(Path(path).read_bytes())
        except ValueError as error:
            raise _ArrowException(f"no Parquet: {error}") from error
        self._groups: list[list[dict[str, Any]]] = content["groups"]
        self.schema_arrow = SimpleNamespace(names=content["names"])
        self.metadata = SimpleNamespace(num_row_groups=len(self._groups), row_group=self._group)
        self._torn: int = content.get("torn", 1 << 30)

    def _group(self, i: int) -> SimpleNamespace:
        size = -1 if not self._groups[i] else len(json.dumps(self._groups[i]))  # a file may lie about its sizes
        return SimpleNamespace(num_rows=len(self._groups[i]), total_byte_size=size)

    def iter_batches(self, most: int, groups: range, columns_asked: list[str]) -> Iterator[SimpleNamespace]:
        """Rows of some groups, at most so many at once."""
        for i in groups:
            for at in range(0, len(self._groups[i]), most):
                if i >= self._torn:
                    raise _ArrowException("a page is torn")
                rows = [{k: row.get(k) for k in columns_asked} for row in self._groups[i][at : at + most]]
                columns = {k: SimpleNamespace(to_pylist=partial(_values, [row[k] for row in rows])) for k in columns_asked}
                yield SimpleNamespace(to_pylist=partial(_values, rows), column=columns.__getitem__)


@contextmanager
def _packages() -> Iterator[None]:
    """Both stand-ins in place of the packages."""
    zstandard, pyarrow, parquet = ModuleType("zstandard"), ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    zstandard.ZstdDecompressor = lambda: SimpleNamespace(decompressobj=_Frame)  # type: ignore[attr-defined]
    zstandard.ZstdError = _ZstdError  # type: ignore[attr-defined]
    parquet.ParquetFile = _ParquetFile  # type: ignore[attr-defined]
    pyarrow.parquet, pyarrow.ArrowException = parquet, _ArrowException  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"zstandard": zstandard, "pyarrow": pyarrow, "pyarrow.parquet": parquet}):
        yield


def _read(path: Path, rules: sources.Rules, piece: int = sources.PIECE) -> tuple[list[bytes], sources.Tally]:
    tally = sources.Tally()
    return [text for one in sources.pieces_of(path, piece) for text in sources.documents(one, rules, tally)], tally


def _said(path: Path, rules: sources.Rules) -> tuple[str, str]:
    """The kind of error that reading ends in, and its text."""
    try:
        _read(path, rules)
    except (InputError, MachineError) as error:
        return type(error).__name__, str(error)
    return "", ""


def in_frames(rng: np.random.Generator) -> Measured:
    """JSON lines in frames of zstd, cut anywhere, hold the documents of the plain file; a file that ends within a frame, is no frame, or
    needs what is not installed is refused by name. A file of no byte has no piece, and what is packed without lines is no source."""
    count, rules = Checks(), sources.Rules(labels=("n",))
    texts = [text_like(rng, int(rng.integers(0, 900))).decode("utf-8", "replace") for _ in range(60)]
    lines = "".join(json.dumps({"text": text, "n": i % 3}) + "\n" for i, text in enumerate(texts)).encode()
    cuts = sorted({0, len(lines), *(int(x) for x in rng.integers(0, len(lines), 6))})
    frames = b"".join(_framed(lines[a:b]) for a, b in pairwise(cuts))
    with folder() as root, _packages():
        plain, packed = root / "a.jsonl", root / "a.jsonl.zst"
        plain.write_bytes(lines)
        packed.write_bytes(frames)
        want, told = _read(plain, rules)
        got, tally = _read(packed, rules)
        count.that(want == [text.encode() for text in texts if text] == got, "other documents")
        count.that(tally == told and sum(tally.labels["n"].values()) == len(want), f"{tally}")
        for name, raw, said in (("torn", frames[: -int(rng.integers(1, 5))], "it ends within a frame"),
                                ("other", frames + b"X", "no frame begins here")):
            (root / f"{name}.jsonl.zst").write_bytes(raw)
            kind, text = _said(root / f"{name}.jsonl.zst", rules)
            count.that(kind == "InputError" and said in text and f"{name}.jsonl.zst" in text, f"{name}: {kind}: {text}")
        (root / "none.jsonl.zst").write_bytes(b"")
        count.that(sources.pieces_of(root / "none.jsonl.zst") == [], "a file of no byte has pieces")
        (root / "x.parquet.gz").write_bytes(b"x")
        (root / "y.parquet").write_text(json.dumps({"names": ["text"], "groups": [[{"text": "a"}]]}))
        found = [path.name for path in sources.files_of(str(root))]
        count.that(found == ["a.jsonl", "a.jsonl.zst", "none.jsonl.zst", "other.jsonl.zst", "torn.jsonl.zst", "y.parquet"], f"{found}")
        for missing, path in (("zstandard", packed), ("pyarrow", root / "y.parquet")):
            gone = {name: None for name in sys.modules if name.partition(".")[0] == missing}
            with mock.patch.dict(sys.modules, gone):
                kind, text = _said(path, rules)
            count.that(kind == "MachineError" and f"needs the package {missing}" in text, f"without {missing}: {kind}: {text}")
    return count.measured()


def in_rows(rng: np.random.Generator) -> Measured:
    """Rows of Parquet are documents group by group, with their labels; columns that are not there, rows that are no text, and files that
    are none are refused by name, or counted where they may be left out."""
    count = Checks()
    texts = [text_like(rng, int(rng.integers(0, 90))).decode("utf-8", "replace") for _ in range(50)]
    rows = [{"n": i % 4, "body": text} for i, text in enumerate(texts)]
    cuts = [0, 0, *sorted(int(x) for x in rng.integers(1, len(rows), 4)), len(rows)]
    groups = [rows[a:b] for a, b in pairwise(cuts)]

    def made(path: Path, groups: list[list[dict[str, Any]]], **more: object) -> Path:
        path.write_text(json.dumps({"names": ["n", "body"], "groups": groups, **more}))
        return path

    rules = sources.Rules("body", ("n",))
    with folder() as root, _packages():
        path = made(root / "a.parquet", groups)
        pieces = sources.pieces_of(path)
        sizes = [len(json.dumps(group)) if group else 0 for group in groups]
        count.that([(p.kind, p.begin, p.end, p.size) for p in pieces] == [("parquet", i, i + 1, n) for i, n in enumerate(sizes)], "pieces")
        with mock.patch.object(sources, "_ROWS_BYTES", 400):  # few rows at once
            got, tally = _read(path, rules)
        count.that(got == [text.encode() for text in texts if text], "other documents")
        count.that((tally.bad, tally.empty, sum(tally.labels["n"].values())) == (0, texts.count(""), len(got)), f"{tally}")
        for field, labels, lacking in (("text", (), "'text'"), ("body", ("n", "lang"), "'lang'")):
            kind, text = _said(path, sources.Rules(field, labels))
            count.that(kind == "InputError" and f"no {lacking}" in text and "one of n, body" in text, f"{lacking}: {kind}: {text}")
        anywhere = int(rng.integers(len(rows)))
        behind = int(rng.integers(cuts[-2], len(rows)))  # in the last group
        for bad, value, why in ((anywhere, 3, "no string but int"), (behind, "e" * 999, "longer than 500 bytes"),
                                (behind, None, "no string but NoneType")):
            spoilt = [dict(row) for row in rows]
            spoilt[bad]["body"] = value  # type: ignore[assignment]
            path = made(root / "bad.parquet", [spoilt[a:b] for a, b in pairwise(cuts)])
            kind, text = _said(path, sources.Rules("body", longest=500))
            count.that(kind == "InputError" and f"row {bad + 1}: " in text and why in text, f"{value!r:.9}: {kind}: {text}")
            got, tally = _read(path, sources.Rules("body", longest=500, skip_bad=True))
            left = [text.encode() for i, text in enumerate(texts) if text and i != bad]
            count.that(got == left and tally.bad == 1, f"{value!r:.9}: {tally.bad} left out")
        late = [dict(row) for row in rows]
        late[anywhere]["n"] = "9999+"  # type: ignore[assignment]
        kind, text = _said(made(root / "late.parquet", [late]), sources.Rules("body", ("n", "n"), skip_bad=True))
        count.that(kind == "InputError" and "late.parquet, 'n': date value out of range" in text, f"late: {kind}: {text}")
        kind, text = _said(made(root / "torn.parquet", groups, torn=len(groups) - 1), rules)
        count.that(kind == "InputError" and "a page is torn" in text, f"torn: {kind}: {text}")
        (root / "none.parquet").write_bytes(b"PAR1")
        kind, text = _said(root / "none.parquet", rules)
        count.that(kind == "InputError" and "no Parquet" in text and "none.parquet" in text, f"none: {kind}: {text}")
    return count.measured()
