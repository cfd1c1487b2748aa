"""Documents out of a user's files: text, JSON lines (plain, gzip, zstd) and Parquet, in pieces that can be read apart and in little memory.

A text file is one document; a longer one than PART is several, cut at line ends. Its bytes are taken as they are, valid UTF-8 or not. A
line of JSON is a document, the string in its field; so is a row of Parquet. A byte-order mark of UTF-8 is left out; so are empty documents,
which are counted. What is no document (a line that is no JSON, too long, or lacks the field) is an error, or counted where `skip_bad`.

A piece is a range of one file: bytes of text and of plain JSON lines, row groups of Parquet, all of a compressed file. Which document
belongs to which piece follows from the file alone, so the pieces' documents in order are those of the file.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from alpha.data.corpus import TEXT_SUFFIXES
from alpha.data.walk import files_below, files_matching, is_prepared, path_and_pattern
from alpha.errors import InputError, MachineError
from alpha.files import json_of, open_regular

PART = 1 << 20
"""Bytes of text from which on a file is several documents."""
MOST_LINE = 1 << 26
"""Bytes of the longest line of JSON, or of the longest text of a row, 64 MiB: what one document may take of a worker's memory."""
MOST_VALUES = 1 << 12
"""Values of a label that are counted apart, those that come first."""
OTHER_VALUES = "(other values)"
PIECE = 1 << 25
"""Bytes of a file that are one piece, 32 MiB."""
_ROWS, _ROWS_BYTES = 64, 1 << 24
"""Rows of Parquet that are in memory at once, at most, and what they should take together, by the mean of their row group."""
_MARK = b"\xef\xbb\xbf"
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_PACKINGS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
_DO = "mend it, or leave out what is no document with --skip-bad"


@dataclass(frozen=True)
class Rules:
    """What decides which documents a file holds. `field`: of the text in JSON and Parquet; `labels`: fields whose values are counted;
    `part`, `longest`: bytes of a part of a text, and of a line of JSON or a row's text, at most."""

    field: str = "text"
    labels: tuple[str, ...] = ()
    part: int = PART
    longest: int = MOST_LINE
    skip_bad: bool = False


class Piece(NamedTuple):
    """A range of a file. `kind`: text, jsonl or parquet. `packing`: of the file, '' for none. `begin`, `end`: bytes, or row groups of
    Parquet; `size`: bytes of the file that it stands for."""

    path: str
    kind: str
    packing: str
    begin: int
    end: int
    size: int


@dataclass
class Tally:
    """What a reader left out and saw: documents that were `bad`, `empty`; field -> value -> documents of each label."""

    bad: int = 0
    empty: int = 0
    labels: dict[str, Counter[str]] = field(default_factory=dict)


def files_of(source: str, apart: Path | None = None) -> list[Path]:
    """The files that a source names, in order of their paths: one file; a folder's text, JSON lines and Parquet; a glob's files. Prepared
    data within it and the folder `apart` are passed over.

    InputError if there are none, or a text cannot be reached.
    """
    path, pattern = path_and_pattern(source)
    if pattern:
        found = files_matching(path, pattern, apart)
    elif path.is_file():
        return [path]
    elif is_prepared(path):
        raise InputError("a source is prepared data", came=source, expected="texts",
                         do="train on it as data.corpus, or name the sources that it was made of")
    elif path.is_dir():
        found, _ = files_below(path, _is_data, apart)
    else:
        raise InputError("a source does not exist", came=source, expected="a file, a folder or a glob such as texts/**/*.jsonl",
                         do="check the path")
    if not found:
        raise InputError("a source holds no files", came=source, expected="text, .jsonl (.gz, .zst) or .parquet",
                         do="check the path or glob")
    return sorted(found, key=lambda p: p.as_posix().encode("utf-8", "surrogateescape"))


def _is_data(path: Path) -> bool:
    kind, packing = kind_of(path)
    return path.suffix.lower() in TEXT_SUFFIXES if kind == "text" else not (kind == "parquet" and packing)


def kind_of(path: Path) -> tuple[str, str]:
    """(kind, packing) of a file, by what its name ends in."""
    packing = _PACKINGS.get(path.suffix.lower(), "")
    inner = Path(path.stem) if packing else path
    return _KINDS.get(inner.suffix.lower(), "text"), packing


def pieces_of(path: Path, piece: int = PIECE) -> list[Piece]:
    """The pieces of one file, in order; none of an empty one. InputError if it cannot be read."""
    kind, packing = kind_of(path)
    if packing and kind != "jsonl":
        raise InputError("a compressed file is no JSON lines", came=path, expected=".jsonl.gz or .jsonl.zst", do="decompress it first")
    try:
        with open_regular(path) as file:
            size = file.seek(0, io.SEEK_END)
    except OSError as error:
        raise _unreadable(path, error) from error
    if kind == "parquet":
        groups = _parquet(path).metadata
        sizes = [max(groups.row_group(i).total_byte_size, 0) for i in range(groups.num_row_groups)]  # the file says them, and may lie
        return [Piece(str(path), kind, "", i, i + 1, n) for i, n in enumerate(sizes)]
    if packing:
        return [Piece(str(path), kind, packing, 0, size, size)] if size else []
    return [Piece(str(path), kind, "", at, min(at + piece, size), min(piece, size - at)) for at in range(0, size, piece)]


def documents(piece: Piece, rules: Rules, tally: Tally) -> Iterator[bytes]:
    """The documents of a piece, in order, none of them empty. InputError names file and line; what was left out is added to `tally`."""
    read = {"text": _text, "jsonl": _json_lines, "parquet": _rows}[piece.kind]
    for text in read(piece, rules, tally):
        if text:
            yield text
        else:
            tally.empty += 1


# -- text ----------------------------------------------------------------------------------------------------------------------


def _text(piece: Piece, rules: Rules, tally: Tally) -> Iterator[bytes]:
    """The parts of the file that begin in the piece; a file of at most `part` bytes is one."""
    try:
        with open_regular(piece.path) as file:
            size = file.seek(0, io.SEEK_END)
            first = -(-piece.begin // rules.part)
            at = _cut(file, first, rules.part, size)
            for number in range(first, -(-piece.end // rules.part)):
                end = _cut(file, number + 1, rules.part, size)
                if end > at:  # else one line was longer than a part
                    file.seek(at)
                    text = file.read(end - at)
                    yield _unmarked(text, piece.path) if number == 0 else text
                at = end
    except OSError as error:
        raise _unreadable(piece.path, error) from error


def _cut(file: BinaryIO, number: int, part: int, size: int) -> int:
    """Where part `number` of a text begins: at the first line that begins within the part; without one where a UTF-8 character does."""
    at = number * part
    if not 0 < at < size:
        return min(at, size)
    file.seek(at - 1)
    text = file.read(max(part, 4) + 1)
    line = text.find(b"\n", 0, part + 1) + 1
    if line:
        return at - 1 + line
    behind = next((i for i in range(1, 5) if i >= len(text) or text[i] & 0xC0 != 0x80), 1)  # the last character ends with the file
    return at - 1 + behind


def _unmarked(text: bytes, path: str) -> bytes:
    if text.startswith(_WIDE_MARKS):
        raise InputError("a text is in UTF-16", came=f"{path}: byte-order mark {text[:2].hex()}", expected="UTF-8",
                         do="convert it: iconv -f utf-16 -t utf-8")
    return text.removeprefix(_MARK)


# -- JSON lines ----------------------------------------------------------------------------------------------------------------


def _json_lines(piece: Piece, rules: Rules, tally: Tally) -> Iterator[bytes]:
    """The text of each line that begins in the piece; blank lines are none."""
    number, at = 0, piece.begin  # lines of this piece, and where the next begins
    try:
        with open_regular(piece.path) as raw, _unpacked(raw, piece.packing) as file:
            if piece.begin:
                file.seek(piece.begin - 1)
                at += _skip_line(file, piece.end - piece.begin + 1) - 1  # no further: a line over many pieces is read once
            while piece.packing or at < piece.end:
                begins, line = at, file.readline(rules.longest + 1)
                if not line:
                    return
                at, number, why = at + len(line), number + 1, ""
                if begins == 0:
                    line = _unmarked(line, piece.path)
                if len(line) > rules.longest:
                    at += 0 if line.endswith(b"\n") else _skip_line(file)
                    why = f"it is longer than {rules.longest} bytes"
                elif not line.strip():
                    continue
                else:
                    try:
                        text = _field_of(line, rules, tally)
                    except ValueError as error:
                        why = str(error)
                if not why:
                    yield text
                elif rules.skip_bad:
                    tally.bad += 1
                else:
                    before = 0 if piece.packing else _lines_before(piece)
                    raise InputError("a line is no document", came=f"{piece.path}, line {before + number}: {why}",
                                     expected=f'a JSON object with a string "{rules.field}"', do=_DO)
    except (OSError, EOFError, zlib.error) as error:  # a gzip file that is torn is any of them
        raise _unreadable(piece.path, error) from error


def _field_of(line: bytes, rules: Rules, tally: Tally) -> bytes:
    """The text of a line, its labels counted. ValueError says why there is none, and names no line: the caller counts those of the file."""
    try:
        content = json_of(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8: {error.reason} at byte {error.start}") from None
    except JSONDecodeError as error:
        where = f"character {error.pos + 1}" if error.pos < len(error.doc.rstrip()) else "its end"
        raise ValueError(f"it is no JSON: {error.msg.removesuffix(' at')} at {where}") from None
    if not isinstance(content, dict):
        raise ValueError(f"it is no object but {type(content).__name__}")
    return _taken(content, rules, tally)


def _taken(content: dict[str, Any], rules: Rules, tally: Tally) -> bytes:
    """The bytes of the text field of an object or row; counts its labels, each once, where there is text. ValueError where it has none."""
    if rules.field not in content:
        raise ValueError(f'it has no "{rules.field}", but {", ".join(map(repr, list(content)[:8])) or "nothing"}')
    text = content[rules.field]
    if isinstance(text, str):
        try:
            text = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f'its "{rules.field}" holds half a surrogate pair at character {error.start}') from None
    if not isinstance(text, bytes):
        raise ValueError(f'its "{rules.field}" is no string but {type(text).__name__}')
    if len(text) > rules.longest:
        raise ValueError(f'its "{rules.field}" is longer than {rules.longest} bytes')
    for label in dict.fromkeys(rules.labels) if text else ():  # an empty document is left out behind this
        count_value(tally.labels.setdefault(label, Counter()), str(content.get(label))[:80])
    return text


def count_value(counts: Counter[str], value: str, times: int = 1) -> None:
    """Count a label's value, or OTHER_VALUES where MOST_VALUES others came before it: a field that differs in each line takes no memory."""
    apart = value in counts or len(counts) - (OTHER_VALUES in counts) < MOST_VALUES
    counts[value if apart else OTHER_VALUES] += times


def _skip_line(file: BinaryIO, most: int = sys.maxsize) -> int:
    """Read on behind the next line end, at most `most` bytes; the bytes read."""
    skipped = 0
    while chunk := file.readline(min(1 << 20, most - skipped)):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


def _lines_before(piece: Piece) -> int:
    """Lines of the file that begin before the piece."""
    lines, left = 0, piece.begin
    with open_regular(piece.path) as file:
        while left and (chunk := file.read(min(left, 1 << 20))):
            lines, left = lines + chunk.count(b"\n"), left - len(chunk)
            last = chunk[-1:]
    return lines + (1 if piece.begin and last != b"\n" else 0)


def _unpacked(raw: BinaryIO, packing: str) -> BinaryIO:
    if packing == "gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    return io.BufferedReader(_Zstd(raw), 1 << 17) if packing else raw


class _Zstd(io.RawIOBase):
    """A zstd file, frame after frame. The library's own reader takes a file that ends within a frame for whole; this one does not."""

    def __init__(self, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise _needs("zstandard", ".zst") from error
        self._raw, self._new, self._error = raw, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame: Any = None
        self._data, self._packed = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._data:
            packed = self._packed or self._raw.read(1 << 10)  # a block of 128 KiB takes 4 bytes or more: at most 32 MiB at once
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._data = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise OSError(0, str(error)) from error
            self._packed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        n = min(len(buffer), len(self._data))
        buffer[:n], self._data = self._data[:n], self._data[n:]
        return n


# -- Parquet -------------------------------------------------------------------------------------------------------------------


def _rows(piece: Piece, rules: Rules, tally: Tally) -> Iterator[bytes]:
    """The text of each row of the piece's row groups."""
    import pyarrow

    file = _parquet(Path(piece.path))
    names = file.schema_arrow.names
    lacking = [name for name in (rules.field, *rules.labels) if name not in names]
    if lacking:
        raise InputError("a Parquet file lacks a column", came=f"{piece.path}: no {lacking[0]!r}", expected=f"one of {', '.join(names)}",
                         do="name the column of the text with --field")
    number = sum(file.metadata.row_group(i).num_rows for i in range(piece.begin))
    columns = list(dict.fromkeys((rules.field, *rules.labels)))
    try:
        for batch in file.iter_batches(_rows_at_once(file, piece), range(piece.begin, piece.end), columns):
            for row in _in_python(batch, columns, piece):
                number += 1
                try:
                    text = _taken(row, rules, tally)
                except ValueError as error:
                    if not rules.skip_bad:
                        raise InputError("a row is no document", came=f"{piece.path}, row {number}: {error}",
                                         expected=f'a string in column "{rules.field}"', do=_DO) from error
                    tally.bad += 1
                else:
                    yield text
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise _unreadable(piece.path, error) from error


def _in_python(batch: Any, columns: Sequence[str], piece: Piece) -> list[dict[str, Any]]:
    """The rows of a batch. InputError names the column of a value that Python has none for: a date behind the year 9999, nanoseconds."""
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        raise
    except (OverflowError, ValueError) as error:
        name = next((name for name in columns if not _has_values(batch.column(name))), columns[0])
        raise InputError("a column of a Parquet file holds a value that Python has none for", came=f"{piece.path}, {name!r}: {error}",
                         expected="dates of the years 1 to 9999, in microseconds at the finest",
                         do="write the column as text, or leave its --label out") from error


def _has_values(column: Any) -> bool:
    try:
        column.to_pylist()
    except (OverflowError, ValueError):
        return False
    return True


def _rows_at_once(file: Any, piece: Piece) -> int:
    rows = sum(file.metadata.row_group(i).num_rows for i in range(piece.begin, piece.end))
    return min(_ROWS, max(1, _ROWS_BYTES * rows // max(1, piece.size)))


def _parquet(path: Path) -> Any:
    """The file, of which a part of a row group is read at a time."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise _needs("pyarrow", ".parquet") from error
    try:
        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
        file.schema_arrow.names  # noqa: B018  # read here, where a name that is no UTF-8 is an error of the file
        return file
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path | str, error: Exception) -> InputError:
    return InputError("a source cannot be read", came=f"{path} ({getattr(error, 'strerror', None) or error})",
                      expected="a whole, readable file of the kind that its name says", do="check the file")


def _needs(package: str, suffix: str) -> MachineError:
    return MachineError(f"reading {suffix} needs the package {package}", came="it is not installed", expected=f"{package}",
                        do="pip install -e '.[data]'")


def pieces_in_units(files: Sequence[Path], unit: int = PIECE) -> list[tuple[Piece, ...]]:
    """The pieces of files in order, neighbours together up to `unit` bytes: what one worker reads at a time. Depends on the files alone."""
    units: list[list[Piece]] = []
    filled = 0
    for path in files:
        for piece in pieces_of(path, unit):
            if not units or filled + piece.size > unit:
                units.append([])
                filled = 0
            units[-1].append(piece)
            filled += piece.size
    return [tuple(one) for one in units]
