"""Corruptions of a checkpoint, drawn: every kind of damage in every file. Each must be refused, by the name of the file. Floor 5."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from alpha.checkpoint import folders
from alpha.errors import CorruptError

Spoil = Callable[[Path, Path, np.random.Generator], None]
"""(file to spoil, file of the same name of another checkpoint, generator): may leave it as it was, which the caller sees."""


def _data(file: Path) -> bytearray:
    return bytearray(file.read_bytes())


def _span(data: bytearray, rng: np.random.Generator, longest: int = 600) -> slice:
    start = int(rng.integers(0, len(data)))
    return slice(start, min(len(data), start + int(rng.integers(1, longest))))


def flipped(file: Path, other: Path, rng: np.random.Generator) -> None:
    """One bit, or some of them."""
    data = _data(file)
    for place in rng.integers(0, len(data), int(rng.choice([1, 2, 9]))):
        data[place] ^= 1 << int(rng.integers(0, 8))
    file.write_bytes(data)


def truncated(file: Path, other: Path, rng: np.random.Generator) -> None:
    """Cut off anywhere."""
    data = _data(file)
    file.write_bytes(data[: int(rng.integers(0, len(data)))])


def longer(file: Path, other: Path, rng: np.random.Generator) -> None:
    """More bytes behind it, or in it."""
    data = _data(file)
    place = int(rng.choice([len(data), int(rng.integers(0, len(data) + 1))]))
    file.write_bytes(data[:place] + rng.bytes(int(rng.integers(1, 70))) + data[place:])


def zeroed(file: Path, other: Path, rng: np.random.Generator) -> None:
    """A stretch of zeros, as a page that never reached the medium."""
    data = _data(file)
    span = _span(data, rng)
    data[span] = bytes(span.stop - span.start)
    file.write_bytes(data)


def exchanged(file: Path, other: Path, rng: np.random.Generator) -> None:
    """Two stretches in each other's place."""
    data = _data(file)
    length = int(rng.integers(1, len(data) // 2))
    a = int(rng.integers(0, len(data) - 2 * length + 1))
    b = int(rng.integers(a + length, len(data) - length + 1))
    data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]
    file.write_bytes(data)


def shifted(file: Path, other: Path, rng: np.random.Generator) -> None:
    """Some bytes left out, and as many behind: the size is right."""
    data = _data(file)
    span = _span(data, rng, 9)
    file.write_bytes(data[: span.start] + data[span.stop :] + bytes(span.stop - span.start))


def missing(file: Path, other: Path, rng: np.random.Generator) -> None:
    """Deleted."""
    file.unlink()


def renamed(file: Path, other: Path, rng: np.random.Generator) -> None:
    """Two files of the checkpoint under each other's name."""
    second = file.parent / str(rng.choice(sorted(p.name for p in file.parent.iterdir() if p != file)))
    between = file.with_name("between")
    os.rename(file, between)
    os.rename(second, file)
    os.rename(between, second)


def foreign(file: Path, other: Path, rng: np.random.Generator) -> None:
    """Taken from another step or run."""
    shutil.copy(other, file)


def mixed(file: Path, other: Path, rng: np.random.Generator) -> None:
    """A stretch taken from another step or run."""
    data, theirs = _data(file), _data(other)
    span = _span(data, rng)
    data[span] = theirs[span][: span.stop - span.start]
    file.write_bytes(data)


def grown(file: Path, other: Path, rng: np.random.Generator) -> None:
    """A stretch with other random bytes."""
    data = _data(file)
    span = _span(data, rng, 60)
    data[span] = rng.bytes(span.stop - span.start)
    file.write_bytes(data)


SPOILS: dict[str, Spoil] = {"bits flipped": flipped, "cut off": truncated, "bytes added": longer, "a stretch zeroed": zeroed,
                            "two stretches exchanged": exchanged, "shifted": shifted, "missing": missing, "two files exchanged": renamed,
                            "taken from another checkpoint": foreign, "a stretch of another checkpoint": mixed, "a stretch random": grown}


def campaign(path: Path, others: list[Path], load: Callable[[Path], object], count: int,
             rng: np.random.Generator) -> tuple[Counter[tuple[str, str]], list[str]]:  # fmt: skip
    """Spoil the checkpoint `path` in a copy, `count` times, and load it.

    `others`: checkpoints of other steps and runs with files of the same names. Returns how many of each (kind of damage, kind of file) were
    refused as damaged by the name of a file that was touched, and what was not.
    """
    names = sorted(p.name for p in path.iterdir())
    good = {name: (path / name).read_bytes() for name in names}
    work = path.parent / "spoilt" / path.name
    shutil.copytree(path, work)
    refused: Counter[tuple[str, str]] = Counter()
    undetected = []
    done = 0
    while done < count:
        name = str(rng.choice(names))
        what = str(rng.choice(sorted(SPOILS) if len(good[name]) > 3 else ["bytes added", "missing"]))  # a rank may hold nothing
        SPOILS[what](work / name, others[int(rng.integers(0, len(others)))] / name, rng)
        touched = [n for n in names if not (work / n).exists() or (work / n).read_bytes() != good[n]]
        if touched:  # else nothing was changed: zeros over zeros
            done += 1
            try:
                load(work)
                undetected.append(f"{what}, {name}: loaded")
            except CorruptError as error:
                said = str(error)
                if any(n in said or (n == folders.MANIFEST and ("manifest" in said or "its folder" in said)) for n in touched):
                    refused[what, "manifest" if name == folders.MANIFEST else Path(name).suffix[1:]] += 1
                else:
                    undetected.append(f"{what}, {name}: not named in {said[:120]!r}")
            except Exception as error:  # any other class is a wrong answer
                undetected.append(f"{what}, {name}: {type(error).__name__}: {str(error)[:80]}")
        for n in touched:
            (work / n).write_bytes(good[n])
    shutil.rmtree(work.parent)
    return refused, undetected
