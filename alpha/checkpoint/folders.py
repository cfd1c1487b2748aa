"""Checkpoints: one folder a step, with what every rank wrote of the state (alpha/checkpoint/ranges.py) and one manifest. Floor 5.

    checkpoints/step-00000200/rank-00000-of-00002.state .json  rank-00001-of-00002.state .json  manifest.json

Every rank writes its cut of every kind of state into `.tmp-*`; then one of them writes the manifest, forces files and folder to the
medium, renames and forces the parent. So a reader sees a whole checkpoint or none, after a kill or a power cut at any instant. Loading
moves *named tensors* by boxes: layouts whose units, order, padding or ranks changed still load, and a rank reads the blocks that it needs,
once. Nothing is used unchecked: the manifest's own hash covers the indexes', which hold the checksum of every block.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import npy, ranges
from alpha.checkpoint.disk import Disk, refused
from alpha.checkpoint.ranges import Range, States, canonical, corrupt, dtype_of
from alpha.errors import CorruptError, GraphError, InputError
from alpha.files import MOST_TEXT, json_of, read_regular
from alpha.graph.state import Copy, Layout, StateLayout, TensorSpec, reshard, whole
from alpha.types import NUMPY

FORMAT, VERSION, READABLE = "alpha.checkpoint", 3, (1, 2, 3)
"""Versions 1 and 2 held one whole array a kind (alpha/checkpoint/npy.py); what the caller of version 1 stored held no seal."""

MANIFEST = "manifest.json"

_STEP = re.compile("step-([0-9]{8}|[1-9][0-9]{8,})")
"""What `_name` gives. Of a folder with another number behind `step-` there is nothing where its step is looked for."""

_DTYPES = {d.newbyteorder("<").str: name for name, d in reversed(tuple(NUMPY.items()))}
"""Of the types that one of NumPy's holds the first."""

@dataclass(frozen=True)
class Saved:
    """A checkpoint's manifest. `facts`: what the caller stored. `kinds`: per kind its dtype and tensors, as [name, shape, unit]; of the
    versions before 3 also its file and hash. `indexes`: SHA-256 (hex) of every rank's index."""

    path: Path
    step: int
    facts: Mapping[str, Any]
    kinds: Mapping[str, Mapping[str, Any]]
    indexes: tuple[str, ...] = ()

    def layout(self, kind: str) -> StateLayout:
        """The tensors of a kind of state, in the layout that a run gives them today."""
        facts = self.kinds[kind]
        return StateLayout((TensorSpec(name, tuple(shape), unit) for name, shape, unit, *_ in facts["tensors"]), _DTYPES[facts["dtype"]])

    def files(self) -> list[Range]:
        """The files that hold its state, as their indexes tell; of the versions before 3 each was read and checked. CorruptError."""
        layouts = {kind: self.layout(kind) for kind in self.kinds}
        if not self.indexes:
            return [npy.read(self.path, kind, facts, layouts[kind]) for kind, facts in self.kinds.items()]
        return [ranges.read_index(self.path / (ranges.stem(rank, len(self.indexes)) + ranges.INDEX), digest, layouts)
                for rank, digest in enumerate(self.indexes)]


def save(folder: Path, step: int, states: States, facts: Mapping[str, Any], *, keep: int = 2, every: int = 0,
         disk: Disk | None = None) -> Path:  # fmt: skip
    """Save `states` as checkpoint `step` of `folder`, from one process; returns its folder.

    `facts`: plain JSON data to keep with it. `keep`, `every`: which checkpoints stay, as `commit`. MachineError if the disk refuses: what
    was saved before still stands. GraphError if an array is not of its layout.
    """
    data, held = ranges.image(states, 0, 1)
    temporary = begin(folder, step, disk=disk)
    write(temporary, 0, 1, data, held, disk=disk)
    return commit(temporary, step, {kind: layout for kind, (layout, _) in states.items()}, 1, facts, keep=keep, every=every, disk=disk)


def begin(folder: Path, step: int, *, disk: Disk | None = None) -> Path:
    """Make the folder that all ranks write a checkpoint of `step` into, and return it. One of them calls this. MachineError if the disk
    refuses."""
    disk = disk or Disk()
    temporary = folder / f".tmp-{_name(step)}"
    with refusing(temporary, disk):
        clean(folder, disk)
        if not folder.is_dir():
            disk.make(folder)
            disk.sync_folder(folder.parent)
        disk.make(temporary)
    return temporary


def write(temporary: Path, rank: int, ranks: int, data: np.ndarray, held: Iterable[ranges.Held], *, disk: Disk | None = None) -> None:
    """Write what `ranges.image` made of this rank's state. Every rank calls this once `begin` has returned. MachineError if the disk
    refuses."""
    with refusing(temporary, disk or Disk()):
        ranges.write(temporary, rank, ranks, ranges.cut(data), held, disk or Disk())


def commit(temporary: Path, step: int, layouts: Mapping[str, StateLayout], size: int, facts: Mapping[str, Any], *, keep: int = 2,
           every: int = 0, disk: Disk | None = None) -> Path:  # fmt: skip
    """Make what `size` ranks wrote the checkpoint of `step`; returns its folder. One of them calls this once all have written.

    Then all but the newest `keep` up to this step are dropped, of those that are no multiple of `every` (0: of all). MachineError if the
    disk refuses, GraphError unless the ranks wrote all of the state.
    """
    disk, folder = disk or Disk(), temporary.parent
    final = folder / _name(step)
    with refusing(temporary, disk):
        names = [temporary / (ranges.stem(rank, size) + ranges.INDEX) for rank in range(size)]
        indexes = [ranges.digest_of(name) for name in names]
        written = [ranges.read_index(name, digest, layouts) for name, digest in zip(names, indexes)]
        for kind, layout in layouts.items():
            reshard(ranges.by_block(written, kind, layout), _wanted(layout))
        kinds = {kind: {"dtype": dtype_of(layout).str, "tensors": [[t.name, list(t.shape), t.unit] for t in layout.tensors]}
                 for kind, layout in layouts.items()}  # fmt: skip
        content = {"format": FORMAT, "version": VERSION, "step": step, "facts": dict(facts), "kinds": kinds, "indexes": indexes}
        disk.write(temporary / MANIFEST, [canonical({**content, "sha256": _digest(content)})])
        disk.sync_folder(temporary)
        if final.exists():  # saved before, and the run was taken back to an earlier step
            disk.rename(final, folder / f".old-{final.name}")
        disk.rename(temporary, final)
        disk.sync_folder(folder)
        prune(folder, step, keep, every, disk)
    return final


@contextmanager
def refusing(temporary: Path, disk: Disk) -> Iterator[None]:
    """What the disk refuses of a save within is said as one MachineError, and leaves nothing of it."""
    try:
        yield
    except OSError as error:
        try:
            clean(temporary.parent, disk)
        except OSError:
            pass  # the disk refuses this too; what starts with a dot is never read and the next save cleans it
        raise refused(temporary.parent / temporary.name[len(".tmp-") :], error) from error


def load(path: Path, into: States, *, rename: Mapping[str, str] | None = None, cut: tuple[int, int] = (0, 1), some: bool = False,
         told: Callable[[int, int], None] = lambda done, total: None) -> Saved:  # fmt: skip
    """Fill the arrays of `into` from the checkpoint `path`, every tensor bit for bit; padding becomes zero. Returns its manifest.

    `rename`: today's tensor name -> its name in the checkpoint, for the tensors that were renamed since. `cut`: (rank, ranks); an array of
    the size of a cut over these ranks takes this rank's (StateLayout.shard). `some`: `into` may leave out kinds of state. Only the blocks
    that hold what is wanted are read, each once, checked, in the memory of one block. `told`: (bytes that are there, bytes of all), before
    the first block and with each.
    CorruptError: torn, edited, or a file missing; where a block of state is, all arrays are zero then. InputError: another version, or
    other kinds, names or shapes than `into` has; then nothing is written.
    """
    saved = inspect(path, verify=False)
    if not set(into) <= set(saved.kinds) or (not some and set(saved.kinds) != set(into)):
        raise InputError(
            f"checkpoint {path} holds other kinds of state than this run has",
            came=", ".join(sorted(saved.kinds)),
            expected=", ".join(sorted(into)),
            do="resume with the optimizer that it was saved with",
        )
    targets = {}
    for kind, (layout, flat) in into.items():
        stored = saved.kinds[kind]["dtype"]
        targets[kind] = Layout({t.name: t.shape for t in layout.tensors}, (ranges.in_array(kind, layout, flat, *cut)[1],))
        if stored != dtype_of(layout).str:
            raise InputError(f"checkpoint {path}: kind {kind} has another type", came=stored, expected=dtype_of(layout).str)
        _same_tensors(path, kind, saved.layout(kind), layout, rename or {})
    files = saved.files()
    wanted: dict[int, list[tuple[np.ndarray, Copy]]] = {}
    for kind, (_, flat) in into.items():
        source = _renamed(ranges.by_block(files, kind, saved.layout(kind)), rename or {})
        for copy in _copies(path, kind, source, targets[kind]):
            wanted.setdefault(copy.source, []).append((flat, copy))
    for _, flat in into.values():
        flat[...] = 0
    try:
        for block, data in _read(files, wanted, told):
            for flat, copy in wanted[block]:
                ranges.move(copy, ranges.elements(data, flat.dtype), flat)
    except CorruptError:
        for _, flat in into.values():
            flat[...] = 0
        raise
    return saved


def _read(files: Sequence[Range], wanted: Iterable[int], told: Callable[[int, int], None]) -> Iterator[tuple[int, np.ndarray]]:
    """(number among all blocks, bytes) of the wanted ones, file after file."""
    first, asked, sizes = 0, sorted(wanted), [min(of.block, of.size - n * of.block) for of, n in ranges.numbered(files)]
    done, total = 0, sum(sizes[n] for n in asked)
    told(done, total)
    for of in files:
        count = -(-of.size // of.block)
        mine = [n - first for n in asked if first <= n < first + count]
        for number, data in ranges.blocks(of, mine) if mine or not of.size else ():  # what holds nothing is looked at: nobody else would
            done += data.size
            told(done, total)
            yield first + number, data
        first += count


def read(path: Path, *kinds: str) -> dict[str, tuple[StateLayout, np.ndarray]]:
    """The state of a checkpoint, whole and in today's layout: these kinds of it, or all. Errors as `load`."""
    saved = inspect(path, verify=False)
    into = {}
    for kind in kinds or saved.kinds:
        layout = saved.layout(kind)
        into[kind] = layout, np.empty(layout.size, NUMPY[layout.dtype])
    load(path, into, some=True)
    return into


def inspect(path: Path, *, verify: bool = True) -> Saved:
    """Read a checkpoint's manifest and, with `verify`, hash every file. CorruptError or InputError as `load`."""
    try:
        raw = read_regular(path / MANIFEST, MOST_TEXT)
    except OSError as error:
        raise corrupt(path, "it has no readable manifest", f"{MANIFEST} ({error.strerror})", "a manifest.json") from error
    try:
        content = json_of(raw)
        stated = content.pop("sha256")
        form, version = content["format"], content["version"]
        digest = _digest(content)  # ValueError for a number beyond every float
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise corrupt(path, "its manifest is not complete", f"{len(raw)} bytes ({error})", "JSON with a content hash") from error
    if stated != digest:
        raise corrupt(path, "its manifest was edited or torn", f"sha256 {digest[:16]}", f"sha256 {str(stated)[:16]}")
    if raw != canonical({**content, "sha256": stated}):  # a blank more, which the hash of the content does not see
        raise corrupt(path, "its manifest is not the text that a save writes", f"{len(raw)} bytes", "the content without bytes between")
    if form != FORMAT or version not in READABLE:
        raise InputError(
            "the checkpoint has an unknown format",
            came=f"{path}: {form} version {version}",
            expected=f"{FORMAT} version {' or '.join(map(str, READABLE))}",
            do="load it with the release that wrote it",
        )
    problem = _unlike_a_manifest(content)
    if problem:
        raise corrupt(path, "its manifest is not one that a save writes", problem, "step, facts, and kinds with their files in the folder")
    saved = Saved(path, content["step"], content["facts"], content["kinds"], tuple(content.get("indexes", ())))
    if _name(saved.step) != path.name:
        raise corrupt(path, "its folder is not the step that it holds", path.name, _name(saved.step))
    if verify:
        _verify(saved)
    return saved


def _unlike_a_manifest(content: Mapping[str, Any]) -> str:
    """What of a manifest is not as a save writes it; '' when nothing."""
    step, facts, kinds = (content.get(name) for name in ("step", "facts", "kinds"))
    if type(step) is not int or step < 0 or not isinstance(facts, dict) or not isinstance(kinds, dict):
        return "step, facts or kinds of another type"
    ranged, indexes = content["version"] > 2, content.get("indexes", [])
    if not isinstance(indexes, list) or bool(indexes) != ranged or not all(isinstance(digest, str) for digest in indexes):
        return f"indexes {indexes!r}"
    for kind, of in kinds.items():
        if not isinstance(of, dict) or str(of.get("dtype")) not in _DTYPES or not isinstance(of.get("tensors"), list):
            return f"kind {kind!r} without dtype or tensors"
        if not ranged and not (isinstance(of.get("file"), str) and npy.FILE.fullmatch(of["file"]) and type(of.get("size")) is int
                               and isinstance(of.get("sha256"), str)):
            return f"kind {kind!r} in the file {of.get('file')!r}"
        for t in of["tensors"]:
            if not (isinstance(t, list) and len(t) == 4 - ranged and isinstance(t[0], str) and isinstance(t[1], list)
                    and isinstance(t[2], str) and all(type(n) is int and n >= 0 for n in t[1]) and (ranged or type(t[3]) is int)):
                return f"kind {kind!r} with tensor {t!r}"
        if len({t[0] for t in of["tensors"]}) != len(of["tensors"]):
            return f"kind {kind!r} with two tensors of a name"
    return ""


def _verify(saved: Saved) -> None:
    """Check every byte of a checkpoint's files, and that they hold all of every tensor."""
    files = saved.files()
    for kind in saved.kinds:
        layout = saved.layout(kind)
        _copies(saved.path, kind, ranges.by_block(files, kind, layout), _wanted(layout))
    for of in files:
        for _ in ranges.blocks(of, range(-(-of.size // of.block))):
            pass  # each is checked as it is read


def _wanted(layout: StateLayout) -> Layout:
    """Every tensor of a layout whole, those without elements left out."""
    return Layout({t.name: t.shape for t in layout.tensors}, (tuple(p for p in whole(layout).ranks[0] if layout.by_name[p.tensor].size),))


def _copies(path: Path, kind: str, source: Layout, target: Layout) -> tuple[Copy, ...]:
    try:
        return reshard(source, target)
    except GraphError as error:
        raise corrupt(path, f"its files do not hold all of state {kind}", error.came, "every element of every tensor") from error


def steps(folder: Path) -> list[int]:
    """Steps that have a complete checkpoint in `folder`, ascending. Folders that were never completed are not seen."""
    if not folder.is_dir():
        return []
    names = [p.name for p in folder.iterdir() if p.is_dir()]
    return sorted(int(name[5:]) for name in names if _STEP.fullmatch(name))


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
    for path in _left(folder, "old"):
        final = folder / path.name[len(".old-") :]
        if final.exists():
            disk.remove(path)
        else:
            disk.rename(path, final)
    for path in _left(folder, "tmp", "gone"):
        disk.remove(path)


def _left(folder: Path, *marks: str) -> list[Path]:
    """What a save that was killed left under these marks. Other names are other people's: a checkpoint may be written beside them."""
    ours = re.compile(rf"\.({'|'.join(marks)})-step-\d+(-\d+)?")
    return sorted(path for path in folder.glob(".*-step-*") if ours.fullmatch(path.name))


def prune(folder: Path, step: int, keep: int, every: int, disk: Disk | None = None) -> None:
    """Drop what was replaced, and the checkpoints up to `step` that `commit` says. A save killed before its last act left them."""
    disk = disk or Disk()
    for path in _left(folder, "old"):
        disk.remove(path)
    for old in [s for s in steps(folder) if s <= step][: -max(1, keep)]:
        if every and old % every == 0:
            continue
        gone = folder / f".gone-{_name(old)}"
        disk.rename(folder / _name(old), gone)
        disk.remove(gone)


# -- writing -------------------------------------------------------------------------------------------------------------------


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(content)).hexdigest()


# -- reading -------------------------------------------------------------------------------------------------------------------


def _renamed(source: Layout, rename: Mapping[str, str]) -> Layout:
    """The same places under today's names."""
    today = {old: new for new, old in rename.items()}
    if not today:
        return source
    return Layout({today.get(name, name): shape for name, shape in source.shapes.items()},
                  tuple(tuple(replace(p, tensor=today.get(p.tensor, p.tensor)) for p in pieces) for pieces in source.ranks))


def _same_tensors(path: Path, kind: str, stored: StateLayout, layout: StateLayout, rename: Mapping[str, str]) -> None:
    """InputError unless the stored tensors are those of `layout`, by name and shape."""
    names = {old: new for new, old in rename.items()}
    source = {names.get(t.name, t.name): t.shape for t in stored.tensors}
    today = {t.name: t.shape for t in layout.tensors}
    missing, extra = sorted(set(today) - set(source)), sorted(set(source) - set(today))
    if missing or extra:
        raise InputError(
            f"checkpoint {path}: state {kind} has other tensors than this model",
            came=f"{len(extra)} the model does not have ({', '.join(extra[:3])})" if extra else "too few",
            expected=f"also {', '.join(missing[:3])}" if missing else f"only the model's {len(today)}",
            do="resume with the model that it was saved with",
        )
    for name, shape in today.items():
        if source[name] != shape:
            raise InputError(
                f"checkpoint {path}: tensor {name} has another shape",
                came=source[name],
                expected=shape,
                do="resume with the model that it was saved with",
            )
