"""The safetensors format of Hugging Face (github.com/huggingface/safetensors, "Format"), read and written tensor by tensor. Floor 5.

    8 bytes    length N of the header, unsigned, little-endian
    N bytes    JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__": text -> text
    the rest   the tensors, little-endian, row-major; together they fill it without a hole or an overlap

A reader of our own, because the NumPy side of the `safetensors` package knows no bfloat16, in which most models are published, and because
a process that trains maps no library that is not on the allow list. Nothing of a tensor is read before every range of its file is checked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from alpha.checkpoint.disk import Disk
from alpha.errors import CorruptError, InputError
from alpha.files import MOST_TEXT, json_of, open_regular, read_regular

MOST_HEADER = 100_000_000
"""Bytes of a header: the format's own limit."""

MOST_AXES = 16

SIZES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}
"""Element type -> its bytes."""

WIDENED = ("F32", "F16", "BF16")
"""Element types that `read` gives as float32 without rounding."""

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""A model in one file, and the index of one in several."""

MOST_SHARD = 5_000_000_000
"""Bytes of tensors in one file of a model that is written, as transformers long had it."""

_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors")


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies. `start`: its first byte in the file; `size`: its bytes."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, by name, every range checked. CorruptError for a file that is torn or was put together wrongly, InputError
    for one that cannot be read or has an element type that the format does not."""
    try:
        with open_regular(path) as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or length > min(total - 8, MOST_HEADER):
                raise _damaged(path, "its header does not fit", f"{length:,} bytes of header in a file of {total:,}",
                               f"at most {max(0, min(total - 8, MOST_HEADER)):,}")
            raw = file.read(length)
    except OSError as error:
        raise InputError("a file of tensors cannot be read", came=f"{path} ({error.strerror})", expected="a safetensors file") from error
    if len(raw) != length:
        raise _damaged(path, "its header is torn", f"{len(raw):,} bytes", f"{length:,}")
    found = {}
    for name, entry in _table(path, raw).items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(x, str) for x in entry.values()):
                raise _damaged(path, "its metadata is not text", repr(entry), "names and text")
        else:
            found[name] = _stored(path, name, entry, 8 + length)
    _tiled(path, found.values(), 8 + length, total)
    return found


def _table(path: Path, raw: bytes) -> dict[str, Any]:
    """The JSON object of a header. A name that stands twice is an error; JSON readers would keep one of the two in silence."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name stands twice")
        return made

    try:
        if raw[:1] != b"{":
            raise ValueError("it does not begin with {")
        json_of(raw)  # refuses NaN and what would exhaust the stack
        table = json.loads(raw, object_pairs_hook=unique)
    except ValueError as error:
        raise _damaged(path, "its header is no JSON object", str(error), 'name -> {"dtype", "shape", "data_offsets"}') from error
    assert isinstance(table, dict)
    return table


def _stored(path: Path, name: str, entry: Any, origin: int) -> Stored:
    """One entry of a header, its types, shape and size checked."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, range_ = (fields.get(x) for x in ("dtype", "shape", "data_offsets"))
    if len(fields) != 3 or not isinstance(dtype, str) or not _counts(shape) or not _counts(range_) or len(range_) != 2:
        raise _damaged(path, f"tensor {name} is not described", repr(entry), "dtype, shape and data_offsets [begin, end]")
    if dtype not in SIZES:
        raise InputError(f"a tensor has an unknown element type: {name} of {path}", came=dtype, expected=", ".join(SIZES),
                         do="save the model again in BF16, F16 or F32")
    if len(shape) > MOST_AXES:
        raise _damaged(path, f"tensor {name} has too many axes", len(shape), f"at most {MOST_AXES}")
    begin, end = range_
    if end - begin != prod(shape) * SIZES[dtype]:
        raise _damaged(path, f"the range of tensor {name} is not its size", f"[{begin}, {end}] for {dtype}{shape}",
                       f"{prod(shape) * SIZES[dtype]} bytes")
    return Stored(path, name, dtype, tuple(shape), origin + begin, end - begin)


def _counts(x: Any) -> TypeGuard[list[int]]:
    return isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)


def _tiled(path: Path, tensors: Iterable[Stored], origin: int, total: int) -> None:
    """CorruptError unless the ranges fill the file from `origin` to `total`."""
    ordered = sorted(tensors, key=lambda t: (t.start, t.size))
    for before, t in pairwise([Stored(path, "the header", "U8", (), 0, origin), *ordered]):
        if t.start != before.start + before.size:
            what = "overlap" if t.start < before.start + before.size else "leave a hole"
            raise _damaged(path, f"tensors {what}: {before.name} and {t.name}", f"{t.name} begins at byte {t.start}",
                           f"byte {before.start + before.size}, where the one before it ends")
    end = ordered[-1].start + ordered[-1].size if ordered else origin
    if end != total:
        raise _damaged(path, "its size is not what its header says", f"{total:,} bytes", f"{end:,}")


def read(stored: Stored) -> np.ndarray:
    """float32 of the tensor's shape, without rounding. InputError for an element type that is not in WIDENED, CorruptError if the file
    became shorter since its header was read."""
    if stored.dtype not in WIDENED:
        raise InputError(f"tensor {stored.name} of {stored.file} is not read as float32 without rounding", came=stored.dtype,
                         expected=", ".join(WIDENED), do="save the model again in one of these")
    with open_regular(stored.file) as file:
        file.seek(stored.start)
        raw = file.read(stored.size)
    if len(raw) != stored.size:
        raise _damaged(stored.file, f"tensor {stored.name} is torn", f"{len(raw)} bytes", f"{stored.size}")
    if stored.dtype == "BF16":  # the upper half of a float32
        flat = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        flat = np.frombuffer(raw, "<f4" if stored.dtype == "F32" else "<f2").astype(np.float32)
    return flat.reshape(stored.shape)


def folder(path: Path) -> dict[str, Stored]:
    """The tensors of a model's folder by name: of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    InputError where neither is there; CorruptError where index and files disagree, or a file is damaged.
    """
    if (path / ONE).exists() or not (path / INDEX).exists():
        if not (path / ONE).exists():
            others = sorted(p.name for p in path.glob("*.bin")) if path.is_dir() else []
            raise InputError("this folder has no model in safetensors", came=f"{path}{f', with {others[0]}' if others else ''}",
                             expected=f"{ONE}, or {INDEX} and the files that it names",
                             do="save it with transformers: save_pretrained(folder, safe_serialization=True)")
        return header(path / ONE)
    index = path / INDEX
    try:
        content = json_of(read_regular(index, MOST_TEXT))
    except (OSError, ValueError) as error:
        raise _damaged(index, "it is no JSON", str(error), "an index") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(f, str) and _SHARD.fullmatch(f) for f in files.values()):
        raise _damaged(index, "its weight_map does not map tensors to files beside it", repr(files), "name -> file.safetensors")
    found: dict[str, Stored] = {}
    for file in sorted(set(files.values())):
        own, said = header(path / file), {name for name, of in files.items() if of == file}
        if set(own) != said:
            odd = sorted(set(own) ^ said)
            raise _damaged(index, f"it and {file} name other tensors", ", ".join(odd[:3]), "the same in both")
        found.update(own)
    return found


Given = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]
"""A tensor to be written: name, shape, and the function that gives it."""


def write_folder(path: Path, tensors: Iterable[Given], most: int = MOST_SHARD, disk: Disk | None = None) -> None:
    """Write float32 tensors into the folder `path` as `folder` reads them, in this order: one file, or several of at most `most` bytes of
    tensors and their index. A tensor that is larger has a file of its own. OSError if the disk refuses."""
    shards: list[list[Given]] = [[]]
    room, total = most, 0
    for tensor in tensors:
        size = 4 * prod(tensor[1])
        if size > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(tensor)
        room, total = room - size, total + size
    if len(shards) == 1:
        return write(path / ONE, shards[0], disk)
    named = {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}
    for name, shard in named.items():
        write(path / name, shard, disk)
    content = {"metadata": {"total_size": total}, "weight_map": {tensor[0]: name for name, shard in named.items() for tensor in shard}}
    (disk or Disk()).write(path / INDEX, [json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"])


def write(path: Path, tensors: Iterable[Given], disk: Disk | None = None) -> None:
    """Write float32 tensors into one file in this order, one in memory at a time. OSError if the disk refuses.

    The metadata says `format: pt`, which transformers asks for.
    """
    todo, table, at = list(tensors), {}, 0
    for name, shape, _ in todo:
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + 4 * prod(shape)]}
        at += 4 * prod(shape)
    raw = json.dumps({"__metadata__": {"format": "pt"}, **table}, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # tensors begin at a multiple of 8

    def chunks() -> Iterable[bytes | memoryview]:
        yield len(raw).to_bytes(8, "little") + raw
        for name, shape, give in todo:
            made = np.asarray(give(), "<f4", order="C")  # np.ascontiguousarray would give a scalar an axis
            assert made.shape == shape, (name, made.shape, shape)
            yield made.reshape(-1).view(np.uint8).data

    (disk or Disk()).write(path, chunks())


def _damaged(path: Path, why: str, came: object, expected: object) -> CorruptError:
    return CorruptError(f"{path} is damaged: {why}", came=came, expected=expected, do="fetch or save it again")
