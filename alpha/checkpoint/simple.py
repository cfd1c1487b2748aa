"""The simple checkpoint: one folder a step, one `.npy` file a kind of state, one manifest; complete or absent. Floor 5.

    checkpoints/step-00000200/param.npy m.npy v.npy counter.npy manifest.json

Saving writes everything into `.tmp-*`, forces files and folder to the medium, renames, forces the parent; a reader therefore sees a
whole checkpoint or none, after a kill or a power cut at any instant. Loading verifies the manifest's own hash, every file's hash and
the shape of every tensor before it writes one element, and then moves *named tensors* by boxes, so a layout whose units, order or
padding changed still loads. Padding is written as zeros whatever memory holds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from alpha.checkpoint.disk import Disk, refused
from alpha.errors import CorruptError, GraphError, InputError
from alpha.files import MOST_TEXT, json_of, open_regular, read_regular
from alpha.graph.state import Copy, Layout, Piece, StateLayout, reshard, row_major, whole
from alpha.types import NUMPY

FORMAT, VERSION, READABLE = "alpha.checkpoint", 2, (1, 2)
"""Version 1 was the same, but what its caller stored held no seal."""

MANIFEST = "manifest.json"

_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.npy")
_DTYPES = tuple(d.newbyteorder("<").str for d in NUMPY.values())

States = Mapping[str, tuple[StateLayout, np.ndarray]]
"""Kind of state -> its layout and its flat array [layout.size]."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint's manifest. `facts`: what the caller stored. `kinds`: per kind its file, dtype, hash, tensors."""

    path: Path
    step: int
    facts: Mapping[str, Any]
    kinds: Mapping[str, Mapping[str, Any]]


def save(folder: Path, step: int, states: States, facts: Mapping[str, Any], *, keep: int = 2, disk: Disk | None = None) -> Path:
    """Save `states` as checkpoint `step` of `folder`; then drop all but the newest `keep` up to this step. Returns its folder.

    `facts`: plain JSON data to keep with it. MachineError if the disk refuses: what was saved before still stands.
    GraphError if an array is not of its layout.
    """
    disk = disk or Disk()
    final = folder / _name(step)
    temporary = folder / f".tmp-{_name(step)}-{os.getpid()}"
    try:
        clean(folder, disk)
        if not folder.is_dir():
            disk.make(folder)
            disk.sync_folder(folder.parent)
        disk.make(temporary)
        kinds = {}
        for kind, (layout, flat) in sorted(states.items()):
            digest = hashlib.sha256()
            disk.write(temporary / f"{kind}.npy", _hashed(_npy(kind, layout, flat), digest))
            kinds[kind] = {
                "file": f"{kind}.npy",
                "dtype": _dtype(layout).str,
                "size": layout.size,
                "sha256": digest.hexdigest(),
                "tensors": [[t.name, list(t.shape), t.unit, layout.offsets[t.name]] for t in layout.tensors],
            }
        content = {"format": FORMAT, "version": VERSION, "step": step, "facts": dict(facts), "kinds": kinds}
        disk.write(temporary / MANIFEST, [_canonical({**content, "sha256": _digest(content)})])
        disk.sync_folder(temporary)
        if final.exists():  # saved before, and the run was taken back to an earlier step
            disk.rename(final, folder / f".old-{final.name}")
        disk.rename(temporary, final)
        disk.sync_folder(folder)
        _prune(folder, step, keep, disk)
    except OSError as error:
        try:
            clean(folder, disk)
        except OSError:
            pass  # the disk refuses this too; what starts with a dot is never read and the next save cleans it
        raise refused(final, error) from error
    return final


def load(path: Path, into: States, *, rename: Mapping[str, str] | None = None) -> Saved:
    """Fill the arrays of `into` from the checkpoint `path`, every tensor bit for bit; padding becomes zero. Returns its manifest.

    `rename`: today's tensor name -> its name in the checkpoint, for the tensors that were renamed since.
    CorruptError: torn, edited, or a file missing. InputError: another version, or other kinds, names or shapes than `into` has.
    Nothing is written to `into` unless everything fits.
    """
    saved = inspect(path)
    if set(saved.kinds) != set(into):
        raise InputError(
            f"checkpoint {path} holds other kinds of state than this run has",
            came=", ".join(sorted(saved.kinds)),
            expected=", ".join(sorted(into)),
            do="resume with the optimizer that it was saved with",
        )
    moves = []
    for kind, (layout, flat) in into.items():
        facts = saved.kinds[kind]
        _check_array(kind, layout, flat)
        if np.dtype(facts["dtype"]) != _dtype(layout):
            raise InputError(f"checkpoint {path}: kind {kind} has another type", came=facts["dtype"], expected=_dtype(layout).str)
        source = _source(path, kind, facts, rename or {})
        _same_tensors(path, kind, source, layout)
        moves.append((flat, _open(path, facts), reshard(source, whole(layout))))
    for flat, stored, copies in moves:
        flat[...] = 0
        for copy in copies:
            _move(copy, stored, flat)
    return saved


def inspect(path: Path, *, verify: bool = True) -> Saved:
    """Read a checkpoint's manifest and, with `verify`, hash every file. CorruptError or InputError as `load`."""
    try:
        raw = read_regular(path / MANIFEST, MOST_TEXT)
    except OSError as error:
        raise _corrupt(path, "it has no readable manifest", f"{MANIFEST} ({error.strerror})", "a manifest.json") from error
    try:
        content = json_of(raw)
        stated = content.pop("sha256")
        form, version = content["format"], content["version"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _corrupt(path, "its manifest is not complete", f"{len(raw)} bytes ({error})", "JSON with a content hash") from error
    if stated != _digest(content):
        raise _corrupt(path, "its manifest was edited or torn", f"sha256 {_digest(content)[:16]}", f"sha256 {str(stated)[:16]}")
    if form != FORMAT or version not in READABLE:
        raise InputError(
            "the checkpoint has an unknown format",
            came=f"{path}: {form} version {version}",
            expected=f"{FORMAT} version {' or '.join(map(str, READABLE))}",
            do="load it with the release that wrote it",
        )
    problem = _unlike_a_manifest(content)
    if problem:
        raise _corrupt(path, "its manifest is not one that a save writes", problem, "step, facts, and kinds with their files in the folder")
    saved = Saved(path, content["step"], content["facts"], content["kinds"])
    if _name(saved.step) != path.name:
        raise _corrupt(path, "its folder is not the step that it holds", path.name, _name(saved.step))
    if verify:
        for facts in saved.kinds.values():
            _verify(path, facts)
    return saved


def _unlike_a_manifest(content: Mapping[str, Any]) -> str:
    """What of a manifest is not as a save writes it; '' when nothing. A kind's file lies in the folder itself."""
    step, facts, kinds = (content.get(name) for name in ("step", "facts", "kinds"))
    if type(step) is not int or step < 0 or not isinstance(facts, dict) or not isinstance(kinds, dict):
        return "step, facts or kinds of another type"
    for kind, of in kinds.items():
        file = of.get("file") if isinstance(of, dict) else None
        if not isinstance(of, dict) or not isinstance(file, str) or not _FILE.fullmatch(file):
            return f"kind {kind!r} in the file {file!r}"
        if of.get("dtype") not in _DTYPES or type(of.get("size")) is not int or not isinstance(of.get("sha256"), str):
            return f"kind {kind!r} without dtype, size or hash"
        for t in of["tensors"] if isinstance(of.get("tensors"), list) else [None]:
            if not (isinstance(t, list) and len(t) == 4 and isinstance(t[0], str) and isinstance(t[1], list)
                    and all(type(n) is int and n >= 0 for n in t[1]) and type(t[3]) is int):
                return f"kind {kind!r} with tensor {t!r}"
    return ""


def steps(folder: Path) -> list[int]:
    """Steps that have a complete checkpoint in `folder`, ascending. Folders that were never completed are not seen."""
    if not folder.is_dir():
        return []
    names = [p.name for p in folder.iterdir() if p.is_dir()]
    return sorted(int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal())


def at(folder: Path, step: int | None = None) -> Path:
    """The checkpoint of `step`, by default the latest. InputError if there is none."""
    found = steps(folder)
    if not found or step not in (None, *found):
        raise InputError(
            "there is no such checkpoint",
            came=f"{folder}: {'none' if not found else f'step {step}'}",
            expected=f"one of {', '.join(map(str, found))}" if found else "at least one checkpoint",
            do="start the run afresh" if not found else "name one of these steps",
        )
    return folder / _name(found[-1] if step is None else step)


def set_aside(folder: Path, after: int, disk: Disk | None = None) -> list[Path]:
    """Rename the checkpoints behind step `after` to `aside-*`, so that a run taken back to `after` is the latest again."""
    disk = disk or Disk()
    moved = []
    for step in steps(folder):
        if step > after:
            target = next(p for i in range(1 << 30) if not (p := folder / f"aside-{i}-{_name(step)}").exists())
            disk.rename(folder / _name(step), target)
            moved.append(target)
    return moved


def clean(folder: Path, disk: Disk | None = None) -> None:
    """Finish or undo what a killed save left: torn folders go, a checkpoint that was being replaced comes back."""
    disk = disk or Disk()
    for path in sorted(folder.glob(".old-*")):
        final = folder / path.name[len(".old-") :]
        if final.exists():
            disk.remove(path)
        else:
            disk.rename(path, final)
    for path in sorted([*folder.glob(".tmp-*"), *folder.glob(".gone-*")]):
        disk.remove(path)


# -- writing -------------------------------------------------------------------------------------------------------------------


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _dtype(layout: StateLayout) -> np.dtype:
    return NUMPY[layout.dtype].newbyteorder("<")


def _check_array(kind: str, layout: StateLayout, flat: np.ndarray) -> None:
    if flat.shape != (layout.size,) or flat.dtype != NUMPY[layout.dtype]:
        raise GraphError(
            f"the array of state {kind} is not that of its layout",
            came=f"{flat.dtype}{list(flat.shape)}",
            expected=f"{NUMPY[layout.dtype]}[{layout.size}]",
        )


def _npy(kind: str, layout: StateLayout, flat: np.ndarray) -> Iterator[bytes | memoryview]:
    """The `.npy` file (NumPy's format 1.0) of a flat state array, padding as zeros."""
    _check_array(kind, layout, flat)
    dtype = _dtype(layout)
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": dtype.str, "fortran_order": False, "shape": flat.shape})
    yield head.getvalue()
    written = 0
    for t in layout.tensors:
        start = layout.offsets[t.name]
        yield bytes((start - written) * dtype.itemsize)
        yield np.ascontiguousarray(flat[start : start + t.size].astype(dtype, copy=False)).data.cast("B")
        written = start + t.size
    yield bytes((layout.size - written) * dtype.itemsize)


def _hashed(chunks: Iterator[bytes | memoryview], digest: Any) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _prune(folder: Path, step: int, keep: int, disk: Disk) -> None:
    """Drop what was replaced and all but the newest `keep` checkpoints up to `step`."""
    for path in folder.glob(".old-*"):
        disk.remove(path)
    for old in [s for s in steps(folder) if s <= step][: -max(1, keep)]:
        gone = folder / f".gone-{_name(old)}"
        disk.rename(folder / _name(old), gone)
        disk.remove(gone)


# -- reading -------------------------------------------------------------------------------------------------------------------


def _corrupt(path: Path, why: str, came: object, expected: object) -> CorruptError:
    return CorruptError(
        f"checkpoint {path} is damaged: {why}",
        came=came,
        expected=expected,
        do="resume from an earlier one with --at STEP, or restore the folder from a copy",
    )


def _verify(path: Path, facts: Mapping[str, Any]) -> None:
    """Hash one file of a checkpoint."""
    digest = hashlib.sha256()
    try:
        with open_regular(path / facts["file"]) as file:
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise _corrupt(path, "a file cannot be read", f"{facts['file']} ({error.strerror})", "every file of the manifest") from error
    if digest.hexdigest() != facts["sha256"]:
        came, expected = (f"sha256 {x[:16]}" for x in (digest.hexdigest(), facts["sha256"]))
        raise _corrupt(path, f"{facts['file']} is not what its hash says", came, expected)


def _open(path: Path, facts: Mapping[str, Any]) -> np.ndarray:
    """The flat array of one verified file, memory-mapped."""
    try:
        flat: np.ndarray = np.load(path / facts["file"], mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise _corrupt(path, f"{facts['file']} is no array", error, "an .npy file") from error
    if flat.shape != (facts["size"],) or flat.dtype != np.dtype(facts["dtype"]):
        raise _corrupt(path, f"{facts['file']} has another size", f"{flat.dtype}{list(flat.shape)}", f"{facts['dtype']}[{facts['size']}]")
    return flat


def _source(path: Path, kind: str, facts: Mapping[str, Any], rename: Mapping[str, str]) -> Layout:
    """Where the stored tensors lie in their file, under today's names."""
    today = {old: new for new, old in rename.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    pieces = []
    for name, dims, _unit, offset in facts["tensors"]:
        name, shape = today.get(name, name), tuple(dims)
        if not 0 <= offset <= facts["size"] - prod(shape):
            raise _corrupt(path, f"tensor {name} of {kind} lies outside its file", f"offset {offset}, shape {shape}", facts["size"])
        shapes[name] = shape
        pieces.append(Piece(name, tuple((0, n) for n in shape), offset, row_major(shape)))
    return Layout(shapes, (tuple(pieces),))


def _same_tensors(path: Path, kind: str, source: Layout, layout: StateLayout) -> None:
    """InputError unless the stored tensors are those of `layout`, by name and shape."""
    today = {t.name: t.shape for t in layout.tensors}
    missing, extra = sorted(set(today) - set(source.shapes)), sorted(set(source.shapes) - set(today))
    if missing or extra:
        raise InputError(
            f"checkpoint {path}: state {kind} has other tensors than this model",
            came=f"{len(extra)} the model does not have ({', '.join(extra[:3])})" if extra else "too few",
            expected=f"also {', '.join(missing[:3])}" if missing else f"only the model's {len(today)}",
            do="resume with the model that it was saved with",
        )
    for name, shape in today.items():
        if source.shapes[name] != shape:
            raise InputError(
                f"checkpoint {path}: tensor {name} has another shape",
                came=source.shapes[name],
                expected=shape,
                do="resume with the model that it was saved with",
            )


def _move(copy: Copy, source: np.ndarray, target: np.ndarray) -> None:
    """Do one Copy between flat arrays."""
    shape = tuple(hi - lo for lo, hi in copy.box)
    if prod(shape) == 0:
        return

    def view(flat: np.ndarray, offset: int, strides: tuple[int, ...], writeable: bool) -> np.ndarray:
        return as_strided(flat[offset:], shape, tuple(s * flat.itemsize for s in strides), writeable=writeable)

    view(target, copy.target_offset, copy.target_strides, True)[...] = view(source, copy.source_offset, copy.source_strides, False)
