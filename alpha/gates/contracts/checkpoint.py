"""Cases of `checkpoint.ranges`, by gate; here bit-exact round trips, the same bytes twice, and a slow disk. Floor 5."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import folders, offline, ranges
from alpha.component import Measured
from alpha.errors import CorruptError, InputError
from alpha.gates.contracts import kept, of_settings, saves
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.crash_consistency import (
    a_rank_that_dies,
    clocks,
    disk_full,
    killed,
    power_cut,
    synced,
    two_writers,
)
from alpha.gates.contracts.disks import ShortFile
from alpha.gates.contracts.integrity import (
    a_rank_that_did_not_write,
    damaged_files,
    edited_index,
    edited_manifest,
    empty_files,
    wrong_arrays,
)
from alpha.gates.contracts.made_state import (
    States,
    copied,
    cut_of,
    empty,
    folder,
    layouts,
    reseal,
    same,
    saved_before,
    saved_by,
    state,
    tensor,
)
from alpha.graph.state import StateLayout, TensorSpec
from alpha.types import NUMPY

# -- parity --------------------------------------------------------------------------------------------------------------------


def round_trip(rng: np.random.Generator) -> Measured:
    """What is loaded is what was saved, bit for bit; nothing is written outside the tensors but zeros."""
    count, of = Checks(), layouts(rng)
    before = state(rng, of)
    facts = {"program": "abc", "sampler": {"next_sample": 12345}, "text": "ü\n"}
    with folder() as at:
        source = copied(before)
        path = folders.save(at, 42, source, facts)
        count.that(
            all(np.array_equal(source[k][1].view(np.uint32), before[k][1].view(np.uint32)) for k in of), "saving wrote to the state"
        )
        after = empty(of)
        saved = folders.load(path, after)
        for kind in of:
            count.that(same({kind: before[kind]}, {kind: after[kind]}), f"{kind} differs")
            flat, layout = after[kind][1].copy(), of[kind]
            for start, size in layout.ranges():
                flat[start : start + size] = 0
            count.that(not flat.view(np.uint32).any(), f"padding of {kind} is not zero")
        count.that(saved.step == 42 and dict(saved.facts) == facts, "step or facts differ")
        raw = (path / "rank-00000-of-00001.state").read_bytes()
        for kind, name, box, start in json.loads((path / "rank-00000-of-00001.json").read_text())["held"]:
            expected = tensor(before, kind, name)
            count.that(raw[start : start + len(expected)] == expected, f"{kind} {name} lies elsewhere than its index says")
            count.that([n for _, n in box] == list(of[kind].by_name[name].shape), f"{kind} {name}: box {box}")
        count.that(folders.inspect(path).step == 42, "what was saved is not found whole")
    return count.measured()


def any_ranks(rng: np.random.Generator) -> Measured:
    """Saved by any number of ranks, from cuts or whole arrays, in blocks of any size, and read by any other number: the same bits."""
    count, of = Checks(), layouts(rng, 3, 20)
    before = state(rng, of)
    for ranks_, cut, block in ((1, False, 256), (2, True, 1 << 16), (3, True, 192), (4, False, 4096), (16, True, 1024)):
        with folder() as at:
            path = saved_by(at, 7, before, ranks_, block, cut=cut)
            files = sorted(p.name for p in path.iterdir())
            count.that(len(files) == 2 * ranks_ + 1, f"{len(files)} files of {ranks_} ranks")
            after = empty(of)
            folders.load(path, after)
            count.that(same(after, before), f"{ranks_} ranks, blocks of {block}: read whole, it differs")
            for size in (2, 5):
                for rank in range(size):
                    own = {k: (x, np.full(x.shard(size).size, 7, NUMPY[x.dtype])) for k, x in of.items()}
                    folders.load(path, own, cut=(rank, size))
                    held = {k: (x, cut_of(x, after[k][1], rank, size)) for k, x in of.items()}
                    count.that(all(own[k][1].tobytes() == held[k][1].tobytes() for k in of), f"{ranks_} to {size}: rank {rank} differs")
    return count.measured()


def relaid(rng: np.random.Generator) -> Measured:
    """Laid out anew for other numbers of ranks, a checkpoint has the bytes that those would have saved; a damaged one is refused."""
    count, of = Checks(), layouts(rng, 3, 20)
    before = state(rng, of)
    with folder() as at:
        made = {n: saved_by(at / f"by{n}", 7, before, n, 1024, facts={"x": 1}) for n in (1, 3, 4)}
        straight = {n: saved_by(at / f"straight{n}", 7, before, n, facts={"x": 1}) for n in (1, 2, 5)}
        for old, path in made.items():
            for new, expected in straight.items():
                found = offline.relay(path, at / f"from{old}to{new}", new)
                names = sorted(p.name for p in expected.iterdir())
                count.that(sorted(p.name for p in found.iterdir()) == names, f"{old} to {new}: other files")
                count.that(all((found / n).read_bytes() == (expected / n).read_bytes() for n in names), f"{old} to {new}: other bytes")
        older = saved_before(at / "older", 7, before, 2, {"x": 1})
        found = offline.relay(older, at / "from-older", 2)
        count.that(all((found / p.name).read_bytes() == p.read_bytes() for p in straight[2].iterdir()), "from version 2: other bytes")
        count.refuses(InputError, lambda: offline.relay(older, at / "from-older", 2), "a step that is there")
        count.refuses(InputError, lambda: offline.relay(older, at / "none", 0), "no rank")
        for step in (1, 2, 3):
            offline.relay(saved_by(at / "many", step, before, 3, 1024), at / "together", 2)
        count.that(folders.steps(at / "together") == [1, 2, 3], "of three in one folder some are gone")
        data = max(made[3].glob("rank-*.state"), key=lambda p: p.stat().st_size)  # small ranks may hold nothing
        raw = bytearray(data.read_bytes())
        raw[int(rng.integers(0, len(raw)))] ^= 16
        data.write_bytes(raw)
        count.refuses(CorruptError, lambda: offline.relay(made[3], at / "damaged", 2), "a flipped bit")
        count.that(folders.steps(at / "damaged") == [], "what was read from a damaged checkpoint stands")
    return count.measured()


def older_versions(rng: np.random.Generator) -> Measured:
    """Checkpoints of versions 1 and 2 load bit for bit, whole and in cuts; damaged, they are refused."""
    count, of = Checks(), layouts(rng)
    before = state(rng, of)
    for version in (1, 2):
        with folder() as at:
            path = saved_before(at, 3, before, version, {"x": 1})
            after = empty(of)
            count.that(folders.load(path, after).facts == {"x": 1} and same(after, before), f"version {version} differs")
            own = {k: (x, np.full(x.shard(4).size, 7, NUMPY[x.dtype])) for k, x in of.items()}
            folders.load(path, own, cut=(1, 4))
            count.that(own["m"][1].tobytes() == cut_of(of["m"], after["m"][1], 1, 4).tobytes(), f"version {version}: a cut differs")
            for name in ("m.npy", "param.npy"):
                raw = bytearray((path / name).read_bytes())
                for place in (*(int(x) for x in rng.integers(0, len(raw), 8)), len(raw) - 1):
                    raw[place] ^= 4
                    (path / name).write_bytes(raw)
                    count.refuses(CorruptError, partial(folders.load, path, empty(of)), f"version {version}: {name} flipped at {place}")
                    raw[place] ^= 4
                (path / name).write_bytes(raw)
            sound = json.loads((path / folders.MANIFEST).read_bytes())["kinds"]["m"]
            number = next(i for i, (_, shape, *_) in enumerate(sound["tensors"]) if prod(shape) > 1)
            size = prod(sound["tensors"][number][1])
            for offset in (sound["size"] - size + 1, sound["size"], sound["size"] + int(rng.integers(1, 1 << 40)), -1, -size):
                content = json.loads((path / folders.MANIFEST).read_bytes())
                content["kinds"]["m"]["tensors"][number][3] = offset
                reseal(path, content)
                count.refuses(CorruptError, partial(folders.load, path, empty(of)), f"version {version}: a tensor from {offset} on")
                content["kinds"]["m"] = sound
                reseal(path, content)
            head = (path / "param.npy").read_bytes().replace(b"'<f4'", b"',f4'", 1)  # NumPy has Python read such a list
            (path / "param.npy").write_bytes(head)
            content = json.loads((path / folders.MANIFEST).read_bytes())
            content["kinds"]["param"]["sha256"] = hashlib.sha256(head).hexdigest()
            reseal(path, content)
            count.refuses(CorruptError, partial(folders.load, path, empty(of)), f"version {version}: a type that is no Python")
            os.rename(path / "m.npy", path / "w.npy")
            count.refuses(CorruptError, partial(folders.inspect, path), f"version {version}: a file missing")
    return count.measured()


def some_kinds(rng: np.random.Generator) -> Measured:
    """The parameters alone are read where they alone are asked for: no other block is looked at."""
    count, of = Checks(), layouts(rng, 11, 20)  # of fewer blocks the second rank may hold nothing
    before = state(rng, of)
    with folder() as at:
        path = saved_by(at, 7, before, 2, 64)
        data = path / "rank-00001-of-00002.state"
        raw = bytearray(data.read_bytes())
        held = json.loads((path / "rank-00001-of-00002.json").read_text())["held"]
        raw[next(start for kind, _, _, start in held if kind == "m")] ^= 1
        data.write_bytes(raw)
        after = {"param": empty(of)["param"]}
        folders.load(path, after, some=True)
        count.that(same(after, {"param": before["param"]}), "parameters differ")
        count.refuses(InputError, lambda: folders.load(path, after), "fewer kinds, not asked for")
        (kind, (layout, _)), *_ = after.items()
        other = layout.kept_in("i32" if layout.dtype == "f32" else "f32")
        count.refuses(InputError, lambda: folders.load(path, {kind: (other, np.zeros(other.size, NUMPY[other.dtype]))}, some=True),
                      "numbers of another type")
        count.refuses(CorruptError, lambda: folders.load(path, empty(of)), "a moment flipped")
    return count.measured()


def other_layout(rng: np.random.Generator) -> Measured:
    """Units regrouped, order changed, a tensor renamed: the named tensors still arrive bit for bit."""
    count, of = Checks(), layouts(rng)
    before = state(rng, of)

    def moved(t: TensorSpec) -> TensorSpec:
        name = "embedding.wte" if t.name == "embedding.token.weight" else t.name
        return TensorSpec(name, t.shape, "a" if name.endswith(".b") else f"z{t.size % 3}")

    other = {k: StateLayout([moved(t) for t in x.tensors], x.dtype) if k != "counter" else x for k, x in of.items()}
    count.that(other["param"].offsets["block.0.w"] != of["param"].offsets["block.0.w"], "the layouts do not differ")
    with folder() as at:
        path = folders.save(at, 1, before, {})
        after = empty(other)
        folders.load(path, after, rename={"embedding.wte": "embedding.token.weight"})
        for kind, (layout, _) in before.items():
            for t in layout.tensors:
                name = moved(t).name if kind != "counter" else t.name
                count.that(tensor(before, kind, t.name) == tensor(after, kind, name), f"{kind} {t.name} differs")
    return count.measured()


def keeps(rng: np.random.Generator) -> Measured:
    """The latest is the highest step; exactly `keep` stay; a step can be saved again; later ones can be set aside."""
    count, of = Checks(), layouts(rng)
    states = {step: state(rng, of) for step in (9, 10, 100, 101)}
    with folder() as at:
        count.that(folders.steps(at) == [], "steps of no folder")
        at.mkdir(exist_ok=True)
        (at / "step-00000777").write_bytes(b"")
        count.that(folders.steps(at) == [], "a file is taken for a checkpoint")
        (at / "step-00000777").unlink()
        for name in ("step-7", "step-000000007", "step-7777777x", "step-"):
            (at / name).mkdir()
        count.that(folders.steps(at) == [], "a folder that no save named is taken for a checkpoint")
        count.refuses(InputError, lambda: folders.at(at), "no checkpoint")
        for step, x in states.items():
            folders.save(at, step, x, {}, keep=3)
        count.that(folders.steps(at) == [10, 100, 101], f"kept {folders.steps(at)}")
        after = empty(of)
        count.that(folders.load(folders.at(at), after).step == 101 and same(after, states[101]), "the latest is not the last saved")
        folders.load(folders.at(at, 10), after)
        count.that(same(after, states[10]), "an earlier checkpoint differs")
        count.refuses(InputError, lambda: folders.at(at, 11), "a step that was not saved")
        folders.save(at, 100, states[9], {}, keep=2)
        count.that(folders.steps(at) == [10, 100, 101], "saving again dropped a later checkpoint")
        folders.load(folders.at(at, 100), after)
        count.that(same(after, states[9]), "saving a step again kept the old one")
        folders.set_aside(at, 10)
        count.that(folders.steps(at) == [10] and len(list(at.iterdir())) == 7, "setting aside")
        folders.save(at, 100, states[100], {}, keep=1)
        count.that(folders.steps(at) == [100], "keep = 1")
    with folder() as at:
        for step in (0, 1):
            folders.save(at, step, states[9], {})
        count.that(folders.at(at, 0).name == "step-00000000", "step 0 by its number is another one")
    with folder() as at:
        for step in range(1, 8):
            folders.save(at, step, states[9], {}, keep=2, every=3)
        count.that(folders.steps(at) == [3, 6, 7], f"every third stays: {folders.steps(at)}")
    with folder() as at:
        for step in (1, 2, 3):
            path = folders.save(at, step, states[9], {})
        count.that(folders.steps(at) == [2, 3], "two stay where nobody says how many")
        count.that(folders.inspect(path).step == folders.inspect(path, verify=False).step == 3, "another step is told")
        (data,) = path.glob(f"*{ranges.STATE}")
        raw = bytearray(data.read_bytes())
        raw[int(rng.integers(len(raw)))] ^= 1
        data.write_bytes(raw)
        count.refuses(CorruptError, lambda: folders.inspect(path), "a damaged file is not looked at")
        count.that(folders.inspect(path, verify=False).step == 3, "a manifest alone needs no files")
    return count.measured()


# -- determinism ---------------------------------------------------------------------------------------------------------------


def same_bytes(rng: np.random.Generator) -> Measured:
    """Two saves of one state give the same files, whatever the padding held and whatever was saved before."""
    count, of = Checks(), layouts(rng)
    one = state(rng, of)
    two = {k: (x, np.zeros_like(flat)) for k, (x, flat) in one.items()}
    for kind, (layout, flat) in two.items():
        for start, size in layout.ranges():
            flat[start : start + size] = one[kind][1][start : start + size]
    with folder() as at:
        a = folders.save(at / "a", 3, one, {"x": 1, "y": 2})
        folders.save(at / "b", 2, state(rng, of), {})
        b = folders.save(at / "b", 3, two, {"y": 2, "x": 1})
        names = sorted(p.name for p in a.iterdir())
        count.that(names == sorted(p.name for p in b.iterdir()), "other files")
        for name in names:
            count.that((a / name).read_bytes() == (b / name).read_bytes(), f"{name} differs")
            count.add(name.encode() + (a / name).read_bytes())
    return count.measured()


# -- a slow disk ---------------------------------------------------------------------------------------------------------------


def slow_disk(rng: np.random.Generator) -> Measured:
    """A disk that delivers a kilobyte at a time: what is loaded is right, in the memory of a block or two, and after every block it is told
    how far the load has come."""
    count, of, block = Checks(), layouts(rng, 40, 60), 1 << 16
    states = state(rng, of)
    with folder() as at:
        made = saved_by(at, 1, states, 2, block=block)
        size = sum(f.stat().st_size for f in made.iterdir() if f.suffix == ranges.STATE)
        loaded, told, peak = _alone(lambda: _load_slowly(made, states))
    steps = [b - a for (a, _), (b, _) in pairwise(told)]
    count.that(loaded, "other state")
    count.that(told[0] == (0, size) and told[-1] == (size, size), f"told {told[:1]} to {told[-1:]} of {size} bytes")
    count.that(bool(steps) and all(0 < s <= block for s in steps), f"told in steps of {max(steps, default=0)} bytes")
    count.that(size > 8 * block and peak < 3 * block, f"{peak} bytes were taken for blocks of {block}")
    return count.measured()


def _load_slowly(made: Path, states: States) -> tuple[bool, list[tuple[int, int]], int]:
    """Load from a slow disk: whether the state is right, what was told, and the most bytes that were taken from the first word on."""
    after, told, opened = empty({kind: layout for kind, (layout, _) in states.items()}), list[tuple[int, int]](), ranges.open_regular

    def heard(done: int, total: int) -> None:
        if not told:  # what is wanted has been worked out, and no block is there yet
            tracemalloc.start()
        told.append((done, total))

    few = lambda path: io.BufferedReader(ShortFile(path, lambda at: 1000))  # noqa: E731
    ranges.open_regular = lambda path: few(path) if path.suffix == ranges.STATE else opened(path)  # type: ignore
    folders.load(made, after, told=heard)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return same(after, states), told, peak


def _alone(action: Callable[[], Any]) -> Any:
    """What `action` returns in a process that has this thread alone: tracemalloc counts what every thread of a process takes."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with os.fdopen(write, "wb") as pipe:
                pipe.write(pickle.dumps(action()))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        answer = said.read()
    os.waitpid(pid, 0)
    return pickle.loads(answer)


# -- by gate -------------------------------------------------------------------------------------------------------------------


CASES: dict[str, dict[str, list[tuple[str, Callable[[np.random.Generator], Measured]]]]] = {
    "checkpoint.ranges": {
        "parity": [("round trip", round_trip), ("other layout", other_layout), ("keeps", keeps), ("any ranks", any_ranks),
                   ("relaid", relaid), ("older versions", older_versions), ("some kinds", some_kinds),
                   ("named", kept.named), ("finished", kept.finished), ("without elements", saves.without_elements),
                   ("alone", saves.alone), ("room", saves.room)],
        "determinism": [("same bytes", same_bytes)],
        "faults": [
            ("damaged files", damaged_files),
            ("empty files", empty_files),
            ("edited manifest", edited_manifest), ("fields of a manifest", kept.typed),
            ("edited index", edited_index), ("blamed", of_settings.blamed),
            ("a rank that did not write", a_rank_that_did_not_write),
            ("wrong arrays", wrong_arrays),
            ("disk full", disk_full),
            ("killed", killed),
            ("power cut", power_cut),
            ("a rank that dies", a_rank_that_dies),
            ("two writers", two_writers),
            ("clocks", clocks),
            ("slow disk", slow_disk),
            ("synced", synced),
            ("refused twice", saves.refused_twice), ("other arrays", saves.other_arrays), ("cut while it is read", saves.cut_while_read),
            ("relaid on a bad disk", saves.relaid_on_a_bad_disk),
        ],
    }
}
