"""Corruptions of a folder of files: what disks, copies and hands do to data. Each has to be seen when the folder is opened and read.

Every kind strikes every file, and in shards every region: prefix, header, table, tokens, index.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from alpha.data import shards
from alpha.errors import InputError

Files = dict[str, bytes]
"""Path below the folder -> bytes."""


def regions(name: str, data: bytes) -> dict[str, tuple[int, int]]:
    """Name -> (begin, end) of the parts of a file that mean different things."""
    if not name.endswith(".tokens"):
        return {name.rpartition("/")[2]: (0, len(data))}
    _, length, _ = struct.unpack("<8sQ32s", data[:48])
    shard = shards.json_of(data[48 : 48 + length])
    table = -(-(48 + length) // 64) * 64
    tokens = np.dtype(shard["dtype"]).itemsize * shard["tokens"]
    payload = -(-tokens // 8) * 8 + 8 * (shard["documents"] + 1)
    begin = len(data) - payload
    return {"prefix": (0, 48), "header": (48, table), "table": (table, begin), "tokens": (begin, begin + tokens),
            "index": (begin + tokens, len(data))}


def _flipped(rng: np.random.Generator, data: bytes, begin: int, end: int) -> bytes:
    at = int(rng.integers(begin, end))
    return data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]


def _zeroed(rng: np.random.Generator, data: bytes, begin: int, end: int) -> bytes:
    a = int(rng.integers(begin, end))
    b = min(end, a + int(rng.integers(1, 4097)))
    return data[:a] + bytes(b - a) + data[b:]


def _swapped(rng: np.random.Generator, data: bytes, begin: int, end: int) -> bytes:
    n = int(rng.integers(1, max(2, (end - begin) // 2)))
    a = int(rng.integers(begin, max(begin + 1, end - 2 * n)))
    b = int(rng.integers(a + n, max(a + n + 1, end - n)))
    return data[:a] + data[b : b + n] + data[a + n : b] + data[a : a + n] + data[b + n :]


def _truncated(rng: np.random.Generator, data: bytes, begin: int, end: int) -> bytes:
    return data[: int(rng.integers(begin, end))]


def _lost(rng: np.random.Generator, data: bytes, begin: int, end: int) -> bytes:
    a = int(rng.integers(begin, end))
    return data[:a] + data[a + int(rng.integers(1, 65)) :]


def _grown(rng: np.random.Generator, data: bytes, begin: int, end: int) -> bytes:
    a = int(rng.integers(begin, end + 1))
    return data[:a] + rng.bytes(int(rng.integers(1, 65))) + data[a:]


WITHIN: dict[str, Callable[[np.random.Generator, bytes, int, int], bytes]] = {
    "flipped": _flipped, "zeroed": _zeroed, "swapped": _swapped, "truncated": _truncated, "lost": _lost, "grown": _grown}
WHOLE = ("removed", "renamed", "exchanged", "replaced")


def draw(rng: np.random.Generator, whole: Files) -> tuple[str, Files]:
    """A corruption that changes something: (kind and region, the files after it)."""
    while True:
        name = sorted(whole)[int(rng.integers(len(whole)))]
        kind = [*WITHIN, *WHOLE][int(rng.integers(len(WITHIN) + len(WHOLE)))]
        files = dict(whole)
        if kind in WITHIN:
            found = regions(name, whole[name])
            region = sorted(found)[int(rng.integers(len(found)))]
            files[name] = WITHIN[kind](rng, whole[name], *found[region])
        else:
            region = "shard" if name.endswith(".tokens") else name.rpartition("/")[2]
            data = files.pop(name)
            other = sorted(files)[int(rng.integers(len(files)))]
            if kind == "renamed":
                files[f"{name}.bak" if rng.integers(2) else "train/00.tokens"] = data
            elif kind == "exchanged":
                files[name], files[other] = files[other], data
            elif kind == "replaced":
                files[name] = files[other]
        if files != whole:
            return f"{kind} {region}", files


def campaign(folder: Path, read: Callable[[], object], rng: np.random.Generator, number: int) -> tuple[Counter[str], list[str]]:
    """Strike a folder `number` times: how often each kind struck which region, and what was not refused with an InputError (CorruptError is
    one). The folder is whole again afterwards."""
    whole = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    struck: Counter[str] = Counter()
    missed: list[str] = []
    for _ in range(number):
        what, files = draw(rng, whole)
        _write(folder, whole, files)
        struck[what] += 1
        try:
            read()
        except InputError:
            pass
        except Exception as error:  # refused by accident: the message does not help
            missed.append(f"{what}: {type(error).__name__}: {error}")
        else:
            missed.append(what)
        _write(folder, files, whole)
    read()
    return struck, missed


def _write(folder: Path, now: Files, then: Files) -> None:
    for name in {*now, *then}:
        if name not in then:
            (folder / name).unlink()
        elif now.get(name) != then[name]:
            path = folder / name
            path.unlink(missing_ok=True)  # a new file: what is mapped stays as it was
            path.write_bytes(then[name])
