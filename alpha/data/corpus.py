"""A corpus: text files under one root, or parts of them, each known by its relative path and the SHA-256 of its bytes.

The demo corpus is the source of the Python standard library that this interpreter runs on, because every machine has it.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from alpha.data.files import read_file, sha256_hex
from alpha.data.walk import files_below, files_matching, path_and_pattern, unlisted
from alpha.errors import CorruptError, InputError

# The rule for the standard library: *.py files, none below a folder with one of these names. Tests are left out because they
# are as large as all the rest; packages because they are not the standard library.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
# Written while Python is built: names of the building machine's folders, not source text.
EXCLUDED_PREFIXES = ("_sysconfigdata",)

TEXT_SUFFIXES = frozenset(
    ".txt .text .md .markdown .rst .adoc .org .tex .bib .html .htm .xml .csv .tsv .json .yaml .yml .toml .ini .cfg .log .srt .po "
    ".py .pyi .ipynb .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .ptx .rs .go .java .kt .scala .swift .m .cs .js .jsx .ts .tsx .php .rb .pl .lua "
    ".r .jl .hs .ml .mli .ex .exs .erl .clj .lisp .el .f .f90 .sql .sh .bash .zsh .fish .ps1 .bat .cmake .mk .proto .css .scss".split())
"""What a folder's files must end in, in lower case, to be text. A file or a glob that is named is taken whatever it ends in."""


PACKED_SUFFIXES = frozenset({".parquet", ".gz", ".zst", ".zstd"})
"""What no file that is text ends in. `alpha data prepare` reads them."""


def path_bytes(relpath: str) -> bytes:
    """The bytes of a relative path that go into a hash (UTF-8; undecodable file names keep their bytes)."""
    return relpath.encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Document:
    """One text: relative path of its file with `/` between parts, SHA-256 of its bytes (hex), size in bytes (never 0).

    `part`: where it begins and ends in the file, in bytes; None is the whole file.
    """

    relpath: str
    sha256: str
    size: int
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Corpus:
    """Documents below `root`, in ascending order of their path bytes, no path twice. Empty files are not documents."""

    name: str
    root: Path
    documents: tuple[Document, ...]
    left_out: int = 0
    """Files of the folder that were not taken, for what they end in."""

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) over every (relative path, SHA-256, part) in order. Neither `root` nor `name` is of it."""
        digest = hashlib.sha256(b"alpha.corpus.v1\n")
        for document in self.documents:
            part = b"\0%d:%d" % document.part if document.part else b""
            digest.update(path_bytes(document.relpath) + b"\0" + document.sha256.encode() + part + b"\n")
        return digest.hexdigest()

    @property
    def size(self) -> int:
        """Sum of the sizes of the documents in bytes."""
        return sum(document.size for document in self.documents)

    def read(self, document: Document) -> bytes:
        """The bytes of `document`. CorruptError if the file is no longer the one that was hashed, InputError if it is gone."""
        data = read_file(self.root / document.relpath, "a file of the corpus")
        if document.part is not None:
            data = data[slice(*document.part)]
        if sha256_hex(data) != document.sha256:
            raise CorruptError(
                "a file of the corpus changed after the corpus was hashed",
                came=f"{self.root / document.relpath}: {len(data)} bytes, sha256 {sha256_hex(data)[:16]}",
                expected=f"{document.size} bytes, sha256 {document.sha256[:16]}",
                do="restore the file, or start again so that the corpus gets its new hash",
            )
        return data

    def texts(self) -> Iterator[bytes]:
        """The bytes of every document, in order, each verified."""
        return (self.read(document) for document in self.documents)

    def subset(self, name: str, documents: Iterable[Document]) -> Corpus:
        """A corpus of some of these documents, put in order. Its hash is that of its own documents."""
        return Corpus(name, self.root, tuple(sorted(documents, key=_order)))

    def sample(self, max_bytes: int) -> Corpus:
        """Documents in order of the hash of their path, for as long as they fit into `max_bytes`; all if all fit. Where not even the first
        one fits, its beginning: up to the last line end that does, else to the last character.

        Independent of the listing order, and a larger sample contains a smaller one. InputError if there is no room for a character.
        """
        taken, total = [], 0
        order = sorted(self.documents, key=lambda d: (sha256_hex(path_bytes(d.relpath)), d.relpath))
        for document in order:
            if total + document.size > max_bytes:
                break
            taken.append(document)
            total += document.size
        if not taken:
            text = self.read(order[0]) if order and max_bytes > 0 else b""
            at = text.rfind(b"\n", 0, max_bytes) + 1
            at = at or next((i for i in range(max_bytes, 0, -1) if text[i : i + 1] and text[i] & 0xC0 != 0x80), 0)
            if not at:
                raise InputError("a sample of the corpus would be empty", came=f"max_bytes={max_bytes}", expected="room for some text",
                                 do="raise data.sample")
            begin = (order[0].part or (0, 0))[0]
            taken = [Document(order[0].relpath, sha256_hex(text[:at]), at, (begin, begin + at))]
        return self.subset(f"{self.name}[sample {max_bytes}]", taken)


def _order(document: Document) -> tuple[bytes, tuple[int, int]]:
    return path_bytes(document.relpath), document.part or (0, 0)


def corpus_of_files(name: str, root: Path, relpaths: Iterable[str]) -> Corpus:
    """Hash the files `root/relpath`. InputError if one cannot be read or if no text is left; empty files are left out."""
    documents = []
    for relpath in set(relpaths):
        data = read_file(root / relpath, "a file of the corpus")
        if data:
            documents.append(Document(relpath, sha256_hex(data), len(data)))
    if not documents:
        raise InputError(
            "the corpus is empty", came=f"{root}: no file with text in it", expected="at least one file that is not empty",
            do="check the folder, or name a glob such as texts/**/*.md",
        )
    return Corpus(name, root, tuple(sorted(documents, key=_order)))


def stdlib_folder() -> Path:
    """Where this interpreter's standard library lies (also from inside a virtual environment)."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_corpus(root: Path | None = None) -> Corpus:
    """The source of the installed Python standard library, about 12 MB; the rule stands above, in EXCLUDED_*.

    `root`: another folder to apply the same rule to. InputError if there is no source text (a stripped Python installation), or a folder
    cannot be listed.
    """
    root = root if root is not None else stdlib_folder()
    if not root.is_dir():
        raise InputError("the standard library has no folder", came=root, expected="a folder with *.py files",
                         do="use a Python installation that ships its library as source, or name a folder of texts")

    def refuse(error: OSError) -> None:
        raise unlisted(error) from error

    relpaths = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        for name in files:
            if name.endswith(".py") and not name.startswith(EXCLUDED_PREFIXES):
                relpaths.append((Path(folder) / name).relative_to(root).as_posix())
    return corpus_of_files("stdlib", root, relpaths)


def folder_corpus(root: Path, pattern: str = "") -> Corpus:
    """The files below `root` that match the glob `pattern` (`**` crosses folders), or without one those that end as text does
    (TEXT_SUFFIXES) and lie in no hidden folder; a file as `root` makes one document.

    InputError if `root` does not exist, nothing with text in it matches, or a text cannot be reached.
    """
    if root.is_file():
        if root.suffix.lower() in PACKED_SUFFIXES:
            raise InputError("a corpus is no text", came=root, expected="text, or data that was prepared",
                             do=f"run `alpha data prepare {root} --out FOLDER`, and name the folder")
        return corpus_of_files(root.name, root.parent, [root.name])
    if not root.is_dir():
        raise InputError("the corpus has no such path", came=root, expected="a folder of text files, or one file",
                         do="check the path")
    if pattern:
        return corpus_of_files(f"{root.name}/{pattern}", root, _relative(files_matching(root, pattern), root))
    texts, others = files_below(root, lambda path: path.suffix.lower() in TEXT_SUFFIXES)
    return replace(corpus_of_files(root.name, root, _relative(texts, root)), left_out=others)


def _relative(paths: Iterable[Path], root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in paths]


def open_corpus(source: str) -> Corpus:
    """`stdlib`, a folder (its text files), one file, or a glob such as `texts/**/*.md`; a path that exists is no glob. InputError as the
    functions above."""
    if source == "stdlib":
        return stdlib_corpus()
    return folder_corpus(*path_and_pattern(source))
