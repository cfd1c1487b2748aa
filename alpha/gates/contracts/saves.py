"""Cases of checkpoints where they end: tensors without elements, disks that refuse twice or say no word, files that are cut while they are
read, arrays of older versions that are not what the manifest says. Floor 7."""

from __future__ import annotations

import errno
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import numpy as np

from alpha.checkpoint import folders, hf, offline, ranges, safetensors
from alpha.checkpoint.disk import Disk, refused
from alpha.component import Measured
from alpha.errors import AlphaError, CorruptError, InputError, MachineError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.disks import Failing, Killed, ShortFile, full
from alpha.gates.contracts.edges import told
from alpha.gates.contracts.made_state import States, empty, folder, layouts, reseal, same, saved_before, saved_by, state
from alpha.graph.state import StateLayout, TensorSpec


def without_elements(rng: np.random.Generator) -> Measured:
    """Tensors without elements are part of a checkpoint, saved by any ranks or by an older version, and take no byte of it."""
    count = Checks()
    tensors = [TensorSpec("a", (int(rng.integers(1, 9)), 3), "u"), TensorSpec("none", (0, 4), "u"), TensorSpec("b", (5,), "v"),
               TensorSpec("nil", (2, 0, 3), "v")]
    of = {"param": StateLayout(tensors), "m": StateLayout(tensors)}
    before = state(rng, of)
    with folder() as at:
        paths = [saved_by(at / f"by{n}", 3, before, n) for n in (1, 2, 3)]
        paths += [saved_before(at / "older", 3, before, 2, {}), offline.relay(paths[1], at / "relaid", 2)]
        for path in paths:
            after = empty(of)
            saved = folders.load(path, after)
            count.that(same(after, before), f"{path.parent.name}: other bits")
            count.that(folders.inspect(path) == saved, f"{path.parent.name}: not found whole")
            held = [h.tensor for file in saved.files() for h in file.held]
            count.that({*held} == {"a", "b"}, f"{path.parent.name}: {held} are held")
    return count.measured()


def alone(rng: np.random.Generator) -> Measured:
    """A kind that is asked for by name is read, and no other is looked at. A step that was set aside before is set aside beside it, by the
    disk that is handed in."""
    count, of = Checks(), layouts(rng, 11, 20)  # of fewer blocks the second rank may hold nothing
    before = state(rng, of)
    with folder() as at:
        path = saved_by(at, 7, before, 2, 256)
        for kind in ("param", "counter"):
            found = folders.read(path, kind)
            count.that(same(found, {kind: before[kind]}), f"{kind} alone: other bits")
        count.that(same(folders.read(path), before), "all of it: other bits")
        held = json.loads((path / "rank-00001-of-00002.json").read_text())["held"]
        data = path / "rank-00001-of-00002.state"
        raw = bytearray(data.read_bytes())
        raw[max(start for kind, _, _, start in held if kind == "v")] ^= 1  # far from the other kinds' blocks
        data.write_bytes(raw)
        count.that(same(folders.read(path, "param", "counter"), {k: before[k] for k in ("param", "counter")}), "beside damage")
        count.refuses(CorruptError, lambda: folders.read(path, "v"), "a damaged kind")
        count.refuses(CorruptError, lambda: folders.read(path), "all kinds, one of them damaged")
        for times in range(3):
            folders.save(at, 9, before, {"times": times})
            disk = Failing(0, full)
            moved = folders.set_aside(at, 7, disk)
            count.that([p.name for p in moved] == [f"aside-{times}-step-00000009"] and disk.done == 2, f"{moved}, {disk.done} operations")
            content = json.loads((moved[0] / folders.MANIFEST).read_bytes())
            count.that(content["facts"] == {"times": times}, "another one was set aside")
    return count.measured()


def room(rng: np.random.Generator) -> Measured:
    """Copies of arrays go to the memory of the copy before where it has their size, else to new memory, zero."""
    count, way = Checks(), ranges.OfArrays()
    before = way.room(64)
    for nbytes in (64, 64, 128, 128, int(rng.integers(1, 60)), 64):
        found = way.room(nbytes)
        count.that((found is before) == (nbytes == before.nbytes), f"{nbytes} bytes behind {before.nbytes}")
        count.that(found.nbytes == nbytes and found.dtype == np.uint8, f"{nbytes} bytes: {found.dtype}[{found.size}]")
        count.that(found is before or not found.any(), f"{nbytes} bytes are not zero")
        found[...] = 7
        before = found
    of = layouts(rng, 1)
    one, two = state(rng, of), state(rng, of)
    first, held = ranges.image(one, 0, 1, way)
    want = first.copy()
    second, again = ranges.image(two, 0, 1, way)
    count.that(second is first and held == again, "two copies of one state are in two places")
    count.that(np.array_equal(ranges.image(one, 0, 1)[0], want) and np.array_equal(ranges.image(two, 0, 1)[0], second), "other bytes")
    return count.measured()


class _Refusing(Disk):
    """Refuses to write and to remove, each with an error of its own, from when it is `on`."""

    def __init__(self, error: OSError) -> None:
        self.error, self.on, self.asked = error, False, list[str]()

    def write(self, path: Path, chunks: Any) -> None:
        self.asked.append("write")
        if self.on:
            raise self.error
        super().write(path, chunks)

    def remove(self, folder: Path) -> None:
        self.asked.append("remove")
        if self.on:
            raise OSError(errno.EIO, "Input/output error")
        super().remove(folder)


def refused_twice(rng: np.random.Generator) -> Measured:
    """A disk that refuses a save, and then refuses to clear it away: the error is of what it refused first, by its own words or its text.
    The checkpoint before it is read, and the next save stands alone."""
    count, of = Checks(), layouts(rng, 1)
    old, new = state(rng, of), state(rng, of)
    errors: list[tuple[OSError, tuple[str, ...]]] = [
        (OSError(errno.ENOSPC, "No space left on device"), ("the disk is full", "(No space left on device)", "free some space")),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), ("the disk is full", "(Disk quota exceeded)", "free some space")),
        (OSError(errno.EACCES, "Permission denied"), ("cannot be written", "(Permission denied)", "check the folder")),
        (OSError("it went away"), ("cannot be written", "(it went away)", "check the folder")),
    ]
    edges = []
    for error, words in errors:
        with folder() as at:
            folders.save(at, 1, old, {})
            disk = _Refusing(error)
            disk.on = True
            edges.append(told((words[1], lambda at=at, disk=disk: folders.save(at, 2, new, {}, disk=disk), MachineError,  # type: ignore[misc]
                               (words[0], f"{at / 'step-00000002'} {words[1]}", words[2]))))
            count.that(disk.asked == ["write", "remove"], f"{words[1]}: {disk.asked}")
            count.that(folders.steps(at) == [1] and same(folders.read(folders.at(at)), old), f"{words[1]}: the one before")
            folders.save(at, 2, new, {}, keep=1)
            left = sorted(p.name for p in at.iterdir())
            count.that(left == ["step-00000002"] and same(folders.read(folders.at(at)), new), f"{words[1]}: the next leaves {left}")
            edges.append(told((words[1], lambda error=error: _raise(refused(Path("x"), error)), MachineError, words)))  # type: ignore[misc]
    found = count.measured()
    wrong = [edge.note for edge in edges if edge.error]
    return Measured(found.error + len(wrong), 0.0, found.cases + len(edges), found.digest, "; ".join([found.note, *wrong])[:200])


def _raise(error: Exception) -> None:
    raise error


def _older(at: Path, states: States, change: Callable[[dict[str, Any], bytes], bytes]) -> Path:
    """A checkpoint of version 2 whose array `m` became another one; hash and manifest say that it is so."""
    path = saved_before(at, 3, states, 2, {})
    content = json.loads((path / folders.MANIFEST).read_bytes())
    kind = content["kinds"]["m"]
    raw = change(kind, (path / "m.npy").read_bytes())
    (path / "m.npy").write_bytes(raw)
    kind["sha256"] = hashlib.sha256(raw).hexdigest()
    reseal(path, content)
    return path


def other_arrays(rng: np.random.Generator) -> Measured:
    """The array of an older checkpoint is that of its layout: of its type and length, at a multiple of ALIGN, with nothing behind it. A
    model that lacks a tensor is told how many it has."""
    count, of = Checks(), layouts(rng)
    states = state(rng, of)

    def typed(kind: dict[str, Any], raw: bytes) -> bytes:
        return raw.replace(b"'<f4'", b"'<i4'", 1)

    def longer(kind: dict[str, Any], raw: bytes) -> bytes:
        kind["size"] += 1
        return raw

    def shaped(kind: dict[str, Any], raw: bytes) -> bytes:
        was = f"({kind['size']},), }}".encode()
        return raw.replace(was, f"({kind['size']},1)}}".encode().ljust(len(was)), 1)

    def behind(kind: dict[str, Any], raw: bytes) -> bytes:
        return raw + bytes(int(rng.integers(1, 9)))

    def moved(kind: dict[str, Any], raw: bytes) -> bytes:
        length = int.from_bytes(raw[8:10], "little")
        return raw[:8] + (length + 16).to_bytes(2, "little") + raw[10 : 10 + length - 1] + b" " * 16 + raw[10 + length - 1 :]

    for change in (typed, longer, shaped, behind, moved):
        with folder() as at:
            path = _older(at, states, change)
            after = empty(of)
            result = told((change.__name__, lambda path=path, after=after: folders.load(path, after), CorruptError,  # type: ignore[misc]
                           ("m.npy has another size", "<f4[")))
            count.that(not result.error, result.note)
            count.that(same(after, empty(of)), f"{change.__name__}: something was loaded")
    with folder() as at:
        path = _older(at, states, lambda kind, raw: raw)
        count.that(same(folders.read(path), states), "as it was")
        fewer = {k: StateLayout(x.tensors[:-1], x.dtype) if k == "m" else x for k, x in of.items()}
        last = of["m"].tensors[-1].name
        result = told(("a tensor more", lambda: folders.load(path, empty(fewer)), InputError,
                       ("state m", f"1 the model does not have ({last})", f"only the model's {len(fewer['m'].tensors)}")))
        count.that(not result.error, result.note)
    return count.measured()


def _ending(path: Path | str, end: int) -> io.BufferedReader:
    """A file that was cut after it was opened: it ends at byte `end`, and its size was told before."""
    return io.BufferedReader(ShortFile(Path(path), lambda at: max(0, end - at)))


def cut_while_read(rng: np.random.Generator) -> Measured:
    """A file that is cut between the look at its size and the read of a block, of any version, is damaged by name, with the tensors that
    lie there; so is a block that holds none."""
    count, of = Checks(), layouts(rng, 3)
    states = state(rng, of)
    with folder() as at:
        newer, older = saved_by(at / "3", 3, states, 1), saved_before(at / "2", 3, states, 2, {})
        for path, name, expected in ((newer, "rank-00000-of-00001.state", "XXH3-128"), (older, "m.npy", "of the whole file")):
            end, opened = int(rng.integers(1, (path / name).stat().st_size)), ranges.open_regular

            def cut(file: Path | str, name: str = name, end: int = end, opened: Callable[[Path | str], BinaryIO] = opened) -> BinaryIO:
                return _ending(file, end) if Path(file).name == name else opened(file)  # type: ignore[return-value]

            after = empty(of)
            with mock.patch.object(ranges, "open_regular", side_effect=cut):
                result = told((name, lambda path=path, after=after: folders.load(path, after), CorruptError,  # type: ignore[misc]
                               (f"{name}, bytes 0 to", ", in ", expected)))
            count.that(not result.error, result.note)
            count.that(not any(flat.any() for _, flat in after.values()), f"{name}: something was loaded")
        data = rng.integers(0, 256, 4 * ranges.ALIGN, np.uint8)
        held = ranges.Held("param", "t", ((0, 4),), 3 * ranges.ALIGN, 4)
        ranges.write(at, 0, 1, ranges.cut(data, ranges.ALIGN), [held], Disk(), ranges.ALIGN)
        of_file = ranges.read_index(at / f"{ranges.stem(0, 1)}{ranges.INDEX}", ranges.digest_of(at / f"{ranges.stem(0, 1)}{ranges.INDEX}"),
                                    {"param": StateLayout([TensorSpec("t", (4,), "u")])})
        for block, said in ((1, ", in no tensor"), (3, ", in param t")):
            raw = bytearray(data.tobytes())
            raw[block * ranges.ALIGN + int(rng.integers(ranges.ALIGN))] ^= 1
            of_file.path.write_bytes(raw)
            result = told((said, lambda block=block: list(ranges.blocks(of_file, [block])), CorruptError,  # type: ignore[misc]
                           (f"bytes {block * ranges.ALIGN} to {(block + 1) * ranges.ALIGN}", said)))
            count.that(not result.error, result.note)
    return count.measured()


class _Listed(Disk):
    """Notes the names of the files that it writes."""

    def __init__(self) -> None:
        self.written = list[str]()

    def write(self, path: Path, chunks: Any) -> None:
        self.written.append(path.name)
        super().write(path, chunks)


def relaid_on_a_bad_disk(rng: np.random.Generator) -> Measured:
    """Whatever the disk refuses while a checkpoint is laid out anew: an error that says so, none there or a whole one, and the old one as
    it was."""
    count, of = Checks(), layouts(rng, 2)
    states = state(rng, of)
    for failure in (full, Killed):
        for operation in range(1, 99):
            with folder() as at:
                path, disk = saved_by(at / "old", 7, states, 2), Failing(operation, failure)
                finished = False
                try:
                    offline.relay(path, at / "new", 3, disk=disk)
                    finished = True
                except (MachineError, Killed) as error:
                    count.that(failure is Killed or "disk is full" in str(error), f"operation {operation}: {error}")
                stand = folders.steps(at / "new")
                count.that(stand in ([], [7]) and (not finished or stand == [7]), f"operation {operation}: {stand} stand")
                count.that(not stand or same(folders.read(folders.at(at / "new")), states), f"operation {operation}: torn")
                count.that(same(folders.read(path), states), f"operation {operation}: the old one is damaged")
                if disk.done < operation:
                    count.that(finished, f"operation {operation} was swallowed")
                    break
    with folder() as at:
        listed = _Listed()
        made = offline.relay(saved_by(at / "old", 7, states, 2), at / "new", 3, disk=listed)
        files = sorted(p.name for p in made.iterdir())
        count.that(sorted(listed.written) == files and len(files) == 7, f"{sorted(listed.written)} for {files}")
    return count.measured()


# -- models of the hub ----------------------------------------------------------------------------------------------------------------


def tensors_of_files(rng: np.random.Generator) -> Measured:
    """Files of tensors without a model: written to one and to several as they are handed over, read by name to the same bits. What is no
    float is not read as one, and a header that is cut while it is read is torn."""
    count = Checks()
    shapes = [tuple(int(x) for x in rng.integers(1, 6, int(rng.integers(0, 3)))) for _ in range(5)]
    made = {f"t{i}": rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}

    def given() -> list[safetensors.Given]:
        return [(name, x.shape, lambda x=x: x) for name, x in made.items()]  # type: ignore[misc]

    with folder() as at:
        for most in (1, 40, 1 << 30):
            path = at / f"{most}"
            path.mkdir(parents=True)
            safetensors.write_folder(path, given(), most)
            found = safetensors.folder(path)
            count.that(list(found) == sorted(made) and all(safetensors.read(found[k]).tobytes() == x.tobytes() for k, x in made.items()),
                        f"at most {most}: {sorted(p.name for p in path.iterdir())}")
            held = sum(x.nbytes for x in made.values())
            count.that((path / safetensors.INDEX).exists() == (held > most), f"{held} bytes in files of at most {most}: an index")
        one = at / "one.safetensors"
        table = {"a": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}
        raw = json.dumps(table).encode()
        one.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
        result = told(("integers", lambda: safetensors.read(safetensors.header(one)["a"]), InputError,
                       (f"tensor a of {one}", "without rounding", "I32", "F32, F16, BF16")))
        count.that(not result.error, result.note)
        end = 8 + int(rng.integers(1, len(raw)))
        with mock.patch.object(safetensors, "open_regular", side_effect=lambda file: _ending(file, end)):
            result = told(("cut", lambda: safetensors.header(one), CorruptError, ("its header is torn", f"{end - 8} bytes", f"{len(raw)}")))
        count.that(not result.error, result.note)
    return count.measured()


def exported_to_a_bad_disk(rng: np.random.Generator, sizes: hf.Sizes, layout: StateLayout, flat: np.ndarray) -> Measured:
    """A disk that refuses an export without a word of its own is told by the error's text; nothing is left."""
    count = Checks()
    for error, said in ((OSError(errno.EIO, "Input/output error"), "(Input/output error)"), (OSError("it went away"), "(it went away)")):
        with folder() as at:
            at.mkdir()
            disk = Failing(int(rng.integers(1, 9)), lambda error=error: error)  # type: ignore[misc]
            try:
                hf.export(at / "m", sizes, flat, layout, eod=0, files={}, disk=disk)
                count.that(False, f"{said}: swallowed")
            except AlphaError as found:
                good = type(found) is MachineError and str(found.came) == f"{at / 'm'} {said}"
                count.that(good and not [*at.iterdir()], f"{said}: {found}")
    return count.measured()
