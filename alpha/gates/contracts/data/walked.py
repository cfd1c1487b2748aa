"""Cases of what a folder or a glob holds, by each of its readers: no text is left out without a word, and prepared data is none."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.data import corpus, prepare, prepared, sources, walk
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data.support import folder, text_like, write_texts

READERS: tuple[Callable[[str], object], ...] = (corpus.open_corpus, sources.files_of)


def closed(path: Path) -> AbstractContextManager[object]:
    """Nobody may list this folder meanwhile, the superuser neither."""
    real = os.scandir

    def scandir(at: Any = ".") -> Iterator[Any]:
        if Path(at) == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(at))
        return real(at)

    return mock.patch.object(os, "scandir", scandir)


def _names(reads: Callable[[str], object], source: Path, root: Path) -> list[str]:
    """What a reader finds, as paths below `root`."""
    found = reads(str(source))
    if isinstance(found, corpus.Corpus):
        return [(found.root / d.relpath).relative_to(root).as_posix() for d in found.documents]
    return [path.relative_to(root).as_posix() for path in found]  # type: ignore[attr-defined]


def unreached(rng: np.random.Generator) -> Measured:
    """A folder that cannot be listed, a link to a folder and a text's link that leads nowhere are named. Links to texts are read; what is
    hidden stands in no folder's way, and what is no text stands in none."""
    count = Checks()
    with folder() as root:
        top, deep = root / "t", root / "t" / f"b{rng.integers(9)}"
        write_texts(root, {"t/a.txt": b"1", f"t/{deep.name}/c.txt": b"2", "t/.h/d.txt": b"3", "far/e.txt": b"4"})
        (top / "f.txt").symlink_to(root / "far" / "e.txt")
        (top / "photo.bin").symlink_to(root / "none")
        (top / ".l").symlink_to(root / "far")
        (top / ".h" / "x.txt").symlink_to(root / "none")
        texts = ["t/a.txt", f"t/{deep.name}/c.txt", "t/f.txt"]
        for reads in READERS:
            with closed(top / ".h"):
                count.that(_names(reads, top, root) == texts, f"{_names(reads, top, root)}")
        (top / ".h" / "x.txt").unlink()
        for reads in READERS:
            for source in (top, top / "**" / "*.txt", root / "*" / "*" / "*.txt", root / "t" / "b*" / "*.txt"):

                def read(reads: Callable[[str], object] = reads, source: Path = source) -> object:
                    return reads(str(source))

                with closed(deep):
                    count.says(InputError, read, f"{source}: closed", "cannot be listed", f"{deep} (Permission denied)", "expected", "do:")
                (deep / "l.txt").symlink_to(root / "none")
                count.says(InputError, read, f"{source}: nowhere", "cannot be reached", f"{deep / 'l.txt'} (a link that leads nowhere)")
                (deep / "l.txt").unlink()
                (deep / "l").symlink_to(root / "far")
                if source in (top, top / "**" / "*.txt"):  # the others do not go below it
                    count.says(InputError, read, f"{source}: a link", "a link to a folder", f"{deep / 'l'} -> {root / 'far'}", "of its own")
                else:
                    count.that(f"t/{deep.name}/c.txt" in _names(reads, source, root), f"{source}: a link that nobody follows")
                (deep / "l").unlink()
            with closed(top):
                count.says(InputError, lambda reads=reads: reads(str(top)), "closed itself", f"{top} (Permission denied)")  # type: ignore[misc]
        for reads in READERS:
            count.says(InputError, lambda reads=reads: reads(str(top / "***")), "no pattern", "impossible pattern", "***")  # type: ignore[misc]
    return count.measured()


def as_named(rng: np.random.Generator) -> Measured:
    """A path that exists is that path, whatever marks are in its name; else the marks are a pattern's."""
    count = Checks()
    with folder() as root:
        n = int(rng.integers(10))
        write_texts(root, {f"x[{n}]/a.txt": b"1", f"x{n}/b.txt": b"2", "c?.txt": b"3", "cc.txt": b"4"})
        for reads in READERS:
            for source, due in ((f"x[{n}]", [f"x[{n}]/a.txt"]), (f"x[{n}]/*.txt", [f"x[{n}]/a.txt"]), ("c?.txt", ["c?.txt"]),
                                ("c[c].txt", ["cc.txt"]), ("x?/*.txt", [f"x{n}/b.txt"])):
                found = _names(reads, root / source, root)
                count.that(found == due, f"{source}: {found}")
        count.that(walk.path_and_pattern(f"x[{n}]/*", root) == (Path(f"x[{n}]"), "*"), "seen from another folder")
    return count.measured()


def prepared_within(rng: np.random.Generator) -> Measured:
    """Prepared data within a source, done or begun, and the folder that is being made, are none of its texts."""
    count = Checks()
    with folder() as root:
        top = root / "t"
        write_texts(top, {f"{i}.txt": b"T" + text_like(rng, 90) for i in range(9)} | {"begun/x.txt": b"x", "begun/preparing.json": b"{}"})
        texts = [f"t/{i}.txt" for i in range(9)]
        (root / "far").mkdir()
        (top / "linked").symlink_to(root / "far")
        order = prepare.Order((str(top), str(top / "**" / "*.txt"), str(top / "**" / "*")), tokenizer="bytes")
        plans = []
        for out in (top / "linked", top / "own", top / "own", root / "other"):
            plans.append(prepare.prepare(order, out).facts["plan"])
        count.that(all(plan == plans[0] for plan in plans), "what was made is read")
        for out in (top / "own", top / "begun"):
            count.says(InputError, lambda out=out: sources.files_of(str(out)), "a source that is prepared", "prepared data", str(out))  # type: ignore[misc]
        (top / "own" / prepared.MANIFEST).rename(top / "own" / "manifest")
        (top / "own" / prepared.UNFINISHED).write_bytes(b"{}")
        for reads in READERS:
            for source in (top, top / "**" / "*.txt", top / "**" / "*"):
                found = _names(reads, source, root)
                count.that(found == texts, f"{source}: {found}")
        count.that(corpus.open_corpus(str(top)).left_out == 0, "what was made is told as left out")
    return count.measured()
