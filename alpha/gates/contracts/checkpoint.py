"""Cases of `checkpoint.ranges`: bit-exact round trips, the same bytes twice, and every way a save or a file can go wrong. Floor 5.

Kills and power cuts are simulated by a Disk that counts operations: a kill raises something that no handler catches; a power cut also
takes back what was never forced to the medium (halves files, forgets folder entries, undoes renames).
"""

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
import xxhash

from alpha.checkpoint import folders, offline, ranges
from alpha.component import Measured
from alpha.errors import CorruptError, GraphError, InputError, MachineError
from alpha.gates.contracts import kept, of_settings, saves
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.corruptions import campaign
from alpha.gates.contracts.disks import Beside, Failing, Killed, Losing, ShortFile, full
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

DRAWN = 500
"""Corruptions that the faults gate draws; `python suites/support/corruptions.py` draws as many as it is told."""


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
        count.that(folders.steps(at) == [10] and len(list(at.iterdir())) == 3, "setting aside")
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


# -- faults --------------------------------------------------------------------------------------------------------------------


def damaged_files(rng: np.random.Generator) -> Measured:
    """Corruptions of every kind in every file, drawn: each is refused by the name of a file that was touched, and nothing looks loaded."""
    count, of = Checks(), layouts(rng, 3, 20)
    before = state(rng, of)
    with folder() as at:
        others = [saved_by(at / where, step, state(rng, of), 2, 4096, {"x": step}) for where, step in (("other", 5), ("other", 6))]
        path = saved_by(at, 5, before, 2, 4096, {"x": 1})

        def load(spoilt: Path) -> None:
            after = empty(of)
            try:
                folders.load(spoilt, after)
            except CorruptError:
                left = {flat.tobytes() for _, flat in after.values()}
                untouched = {flat.tobytes() for _, flat in empty(of).values()}
                count.that(left == untouched or not any(map(any, left)), "something was loaded")
                raise

        refused, undetected = campaign(path, others, load, DRAWN, rng)
        for what in undetected:
            count.that(False, what)
        count.that(sum(refused.values()) == DRAWN and len(refused) > 20, f"{sum(refused.values())} refused, of {len(refused)} kinds")
        text = (path / folders.MANIFEST).read_bytes()
        for at, more in ((0, b" "), (1, b"\t"), (len(text), b"\n"), (len(text), b"\r\n ")):  # type: ignore[assignment]
            (path / folders.MANIFEST).write_bytes(text[:at] + more + text[at:])  # type: ignore[index]
            count.refuses(CorruptError, lambda: load(path), f"{more!r} at byte {at} of a manifest")
        (path / folders.MANIFEST).write_bytes(text)
        load(path)
        moved = path.with_name("step-00000006")
        os.rename(path, moved)
        count.refuses(CorruptError, lambda: load(moved), "folder renamed to another step")
    return count.measured()


def edited_index(rng: np.random.Generator) -> Measured:
    """Each field of an index changed, with all hashes done again, is refused for what it now says."""
    count, of = Checks(), layouts(rng, 3)
    while -20 * of["param"].by_name["embedding.token.weight"].shape[0] % ranges.ALIGN < 20:  # no room for a row more
        of = layouts(rng, 3)
    with folder() as at:
        path = saved_by(at, 5, state(rng, of), 2, 256)
        file = path / "rank-00000-of-00002.json"
        manifest, original = (json.loads((path / name).read_bytes()) for name in (folders.MANIFEST, file.name))
        edits: dict[str, Callable[[dict], object]] = {
            "size": lambda c: c.update(size=c["size"] + 1), "no size": lambda c: c.pop("size"), "size a text": lambda c: c.update(size="9"),
            "block": lambda c: c.update(block=512), "no block": lambda c: c.update(block=0),
            "a huge block": lambda c: c.update(block=1 << 40),
            "a block between elements": lambda c: _cut_anew(c, file.with_suffix(ranges.STATE), ranges.ALIGN * 4 + 4),
            "a piece without elements": lambda c: c["held"].append(
                [*c["held"][-1][:2], [[lo, lo] for lo, _ in c["held"][-1][2]], c["size"]]),
            "a sum": lambda c: c["sums"].__setitem__(0, "0" * 32), "a sum gone": lambda c: c["sums"].pop(),
            "a piece gone": lambda c: c["held"].pop(), "a kind": lambda c: c["held"][0].__setitem__(0, "w"),
            "a name": lambda c: c["held"][0].__setitem__(1, "w"), "another box": lambda c: c["held"][-1].__setitem__(2, [[5, 3]] * 3),
            "outside the tensor": lambda c: c["held"][-1].__setitem__(2, [[lo, hi + 1000] for lo, hi in c["held"][-1][2]]),
            "outside the file": lambda c: c["held"][-1].__setitem__(3, 1 << 40), "before it": lambda c: c["held"][0].__setitem__(3, -64),
            "over another": lambda c: c["held"][1].__setitem__(3, 0), "between elements": lambda c: c["held"][0].__setitem__(3, 1),
            "a list": lambda c: c["held"].append([]), "nothing": lambda c: c.clear(),
        }  # fmt: skip
        for piece in (i for i, held in enumerate(original["held"]) if held[2]):  # of the embedding nothing else is wrong
            edits[f"piece {piece} before its tensor"] = lambda c, piece=piece: c["held"][piece][2][0].__setitem__(0, -1)  # type: ignore[misc]
        for piece, (kind, name, box, _) in enumerate(original["held"]):  # where a step of alignment leaves room
            held = (box[0][1] - box[0][0]) * ranges.dtype_of(of[kind]).itemsize if len(box) == 1 else 0
            if held % ranges.ALIGN and box[0][1] == of[kind].by_name[name].size:
                edits[f"piece {piece} past its tensor"] = lambda c, piece=piece: c["held"][piece][2][0].__setitem__(  # type: ignore[misc]
                    1, c["held"][piece][2][0][1] + 1)
        for what, edit in edits.items():
            content = json.loads(json.dumps(original))
            edit(content)
            file.write_bytes(ranges.canonical(content))
            reseal(path, {**manifest, "indexes": [ranges.digest_of(file), manifest["indexes"][1]]})
            count.refuses(CorruptError, lambda: folders.load(path, empty(of)), f"{what} of an index")
            count.refuses(CorruptError, lambda: folders.inspect(path), f"{what} of an index, verified")
    return count.measured()


def _cut_anew(content: dict, data: Path, block: int) -> None:
    """Blocks of another length, with the sums that those would have."""
    raw = data.read_bytes()
    content.update(block=block, sums=[xxhash.xxh3_128_hexdigest(raw[at : at + block]) for at in range(0, len(raw), block)])


def a_rank_that_did_not_write(rng: np.random.Generator) -> Measured:
    """What ranks did not write whole is not committed, and what was saved before stands."""
    count, of = Checks(), layouts(rng, 3)
    before = state(rng, of)
    with folder() as at:
        folders.save(at, 1, before, {})
        for rank, size, stated in ((0, 2, 2), (1, 2, 2), (0, 2, 1)):
            temporary = folders.begin(at, 2)
            folders.write(temporary, rank, size, *ranges.image(before, rank, size))
            count.refuses(MachineError, partial(folders.commit, temporary, 2, of, stated, {}), f"rank {rank} of {size} alone")
        temporary = folders.begin(at, 2)
        data, held = ranges.image({k: x for k, x in before.items() if k != "v"}, 0, 1)
        folders.write(temporary, 0, 1, data, held)
        count.refuses(GraphError, lambda: folders.commit(temporary, 2, of, 1, {}), "a kind that nobody wrote")
        count.that(folders.steps(at) == [1], "it was committed")
    return count.measured()


def empty_files(rng: np.random.Generator) -> Measured:
    """Of a rank that holds nothing the file is empty. Removed or grown it is refused all the same, though no tensor is in it."""
    count, of = Checks(), layouts(rng, 0)
    before = state(rng, of)
    with folder() as at:
        path = saved_by(at, 5, before, 2, 4096, {"x": 1})
        file = path / "rank-00001-of-00002.state"
        count.that(file.stat().st_size == 0 and _is(at, 5, before), "two ranks, of which one holds nothing")
        for said, strike in (("removed", file.unlink), ("grown", lambda: file.write_bytes(rng.bytes(3)))):
            strike()
            count.refuses(CorruptError, lambda: folders.load(path, empty(of)), said)
            file.write_bytes(b"")
        count.that(_is(at, 5, before), "as it was")
    return count.measured()


def edited_manifest(rng: np.random.Generator) -> Measured:
    """Each field changed by hand is CorruptError; changed with its hash redone, it is refused for what it now says."""
    count, of = Checks(), layouts(rng)
    with folder() as at:
        path = folders.save(at, 5, state(rng, of), {"x": 1})
        rows = of["m"].by_name["embedding.token.weight"].shape[0]
        original = json.loads((path / folders.MANIFEST).read_bytes())

        def attempt(edit: Callable[[dict], object], kind: type[Exception], what: str, *, rehash: bool) -> None:
            content = json.loads(json.dumps(original))
            edit(content)
            if rehash:
                content.pop("sha256")
                content["sha256"] = folders._digest(content)
            (path / folders.MANIFEST).write_bytes(ranges.canonical(content))
            after = empty(of)
            count.refuses(kind, lambda: folders.load(path, after), what)
            count.that(same(after, empty(of)), f"{what}: something was loaded")

        def first(c: dict) -> list:
            tensors: list = c["kinds"]["param"]["tensors"]
            return tensors[0]

        edits: list[tuple[str, Callable[[dict], object], type[Exception] | None]] = [
            ("step", lambda c: c.update(step=6), CorruptError),
            ("facts", lambda c: c["facts"].update(x=2), None),
            ("version", lambda c: c.update(version=4), InputError),
            ("an older version", lambda c: c.update(version=2), CorruptError),
            ("an older version with indexes", lambda c: c.update(version=2, kinds={}, indexes=[{}]), CorruptError),
            ("format", lambda c: c.update(format="other"), InputError),
            ("a kind gone", lambda c: c["kinds"].pop("m"), InputError),
            ("a kind more", lambda c: c["kinds"].update(w=c["kinds"]["m"]), InputError),
            ("a tensor gone", lambda c: c["kinds"]["param"]["tensors"].pop(), InputError),
            ("a shape", lambda c: first(c).__setitem__(1, [1, 1]), InputError),
            ("a shape transposed", lambda c: c["kinds"]["m"]["tensors"][-1][1].reverse(), InputError),
            ("a longer shape", lambda c: c["kinds"]["m"]["tensors"][-1].__setitem__(1, [rows + 1, 5]), InputError),
            ("a name", lambda c: first(c).__setitem__(0, "other"), InputError),
            ("a name twice", lambda c: c["kinds"]["m"]["tensors"].append(c["kinds"]["m"]["tensors"][0]), CorruptError),
            ("an index's hash", lambda c: c["indexes"].__setitem__(0, "0" * 64), CorruptError),
            ("a rank more", lambda c: c["indexes"].append("0" * 64), CorruptError),
            ("no rank", lambda c: c["indexes"].clear(), CorruptError),
            ("two kinds exchanged", lambda c: c["kinds"].update(m=c["kinds"]["counter"], counter=c["kinds"]["m"]), InputError),
        ]
        for what, edit, after_rehash in edits:
            attempt(edit, CorruptError, f"{what} edited", rehash=False)
            if after_rehash is not None:
                attempt(edit, after_rehash, f"{what} edited and hashed again", rehash=True)
        endless = json.dumps(original).replace('"step": 5', '"step": 1e999').encode()
        for raw in (b"", b"{}", b"[]", b"null", b"\xff\xfe", json.dumps(original).encode()[:-9], endless):
            (path / folders.MANIFEST).write_bytes(raw)
            count.refuses(CorruptError, lambda: folders.load(path, empty(of)), f"manifest {raw[:8]!r}")
    return count.measured()


def wrong_arrays(rng: np.random.Generator) -> Measured:
    """Arrays that are not of their layout are refused before anything is touched."""
    count, of = Checks(), layouts(rng)
    good = state(rng, of)
    with folder() as at:
        path = folders.save(at, 1, good, {})
        for what, bad in (("short", good["m"][1][:-1]), ("float64", np.zeros(of["m"].size)), ("2-d", good["m"][1].reshape(2, -1))):
            wrong = {**good, "m": (of["m"], bad)}
            count.refuses(GraphError, partial(folders.save, at, 2, wrong, {}), f"saving, {what}")
            count.refuses(GraphError, partial(folders.load, path, wrong), f"loading, {what}")
        fewer = {k: good[k] for k in ("param", "counter")}
        count.refuses(InputError, lambda: folders.load(path, fewer), "moments that nobody asked for")
        more = {**good, "w": good["m"]}
        count.refuses(InputError, lambda: folders.load(path, more, some=True), "a kind that it does not hold")
        count.that(folders.steps(at) == [1], "a refused save left a checkpoint")
    return count.measured()


def _interrupted(rng: np.random.Generator, disk_at: Callable[[int], Failing], count: Checks, *, again: bool, loses: bool = False) -> None:
    """Save step 2 (or again step 1) with a disk that fails at operation 1, 2, 3, ...: the old or the new is whole, never neither."""
    of = layouts(rng, 1)
    of = {k: of[k] for k in ("param", "counter")}
    old, new = state(rng, of), state(rng, of)
    target = 1 if again else 2
    at_operation = 0
    while True:
        at_operation += 1
        with folder() as at:
            folders.save(at, 1, old, {"which": "old"}, keep=1)
            disk = disk_at(at_operation)
            finished = False
            try:
                folders.save(at, target, new, {"which": "new"}, keep=1, disk=disk)
                finished = True
            except Killed:
                pass
            except MachineError as error:
                count.that("disk is full" in str(error), f"operation {at_operation}: {error.what}")
            if loses and isinstance(disk, Losing):
                disk.power_cut()
            where = f"operation {at_operation}{' again' if again else ''}"
            after = empty(of)
            folders.clean(at)
            try:
                saved = folders.load(folders.at(at), after)
                expected = {"old": old, "new": new}[saved.facts["which"]]
                count.that(same(after, expected), f"{where}: a mixture was loaded")
                count.that(not finished or saved.facts["which"] == "new", f"{where}: a finished save was lost")
            except (CorruptError, InputError) as error:
                count.that(False, f"{where}: {error.what}")
            folders.save(at, 3, old, {"which": "old"}, keep=1)
            count.that([p.name for p in at.iterdir()] == ["step-00000003"], f"{where}: leftovers {sorted(p.name for p in at.iterdir())}")
            if finished:
                count.that(disk.done < disk.at, f"{where}: a failure was swallowed")
                return


def disk_full(rng: np.random.Generator) -> Measured:
    """The disk fills up at every write position in turn: MachineError, and the checkpoint before it still loads."""
    count = Checks()
    for again in (False, True):
        _interrupted(rng, lambda k: Failing(k, full), count, again=again)
    return count.measured()


def killed(rng: np.random.Generator) -> Measured:
    """The process is killed between any two operations."""
    count = Checks()
    for again in (False, True):
        _interrupted(rng, lambda k: Failing(k, Killed), count, again=again)
    return count.measured()


def power_cut(rng: np.random.Generator) -> Measured:
    """As killed, and what was never forced to the medium is gone; also after a save that returned."""
    count = Checks()
    for journaled in (True, False):
        _interrupted(rng, partial(Losing, journaled=journaled), count, again=False, loses=True)
    return count.measured()


def a_rank_that_dies(rng: np.random.Generator) -> Measured:
    """A rank ends between any two operations of its part: what the others commit then is refused, or whole. The next save stands."""
    count, of = Checks(), layouts(rng, 11, 20)  # of fewer blocks the second rank may hold nothing
    old, new = state(rng, of), state(rng, of)
    for operation in range(1, 99):
        with folder() as at:
            folders.save(at, 1, old, {})
            temporary, disk = folders.begin(at, 2), Failing(operation, Killed)
            folders.write(temporary, 0, 2, *ranges.image(new, 0, 2))
            try:
                folders.write(temporary, 1, 2, *ranges.image(new, 1, 2), disk=disk)
                break
            except Killed:
                pass
            try:
                folders.commit(temporary, 2, of, 2, {})
            except (MachineError, CorruptError):  # its index is missing, or torn
                count.that(folders.steps(at) == [1], f"operation {operation}: refused, and {folders.steps(at)} stand")
            else:  # it ended behind its last byte
                count.that(_is(at, 2, new), f"operation {operation}: torn, and committed")
            count.that(_is(at, 1, old), f"operation {operation}: the checkpoint before it is damaged")
            folders.save(at, 3, new, {}, keep=1)
            count.that([p.name for p in at.iterdir()] == ["step-00000003"] and _is(at, 3, new), f"operation {operation}: the next save")
    return count.measured()


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


def _is(at: Path, step: int, expected: States) -> bool:
    """Whether the checkpoint of a step is whole and holds this state."""
    after = empty({kind: layout for kind, (layout, _) in expected.items()})
    try:
        folders.load(folders.at(at, step), after)
    except (CorruptError, InputError):
        return False
    return same(after, expected)


def two_writers(rng: np.random.Generator) -> Measured:
    """Another process saves into the same folder between any two operations of a save, the same step or the next: either save stands whole
    or says that it failed, and no checkpoint is a mixture."""
    count, of = Checks(), layouts(rng, 1)
    of = {k: of[k] for k in ("param", "counter")}
    mine, theirs = state(rng, of), state(rng, of)
    for step in (2, 3):
        for operation in range(1, 99):
            with folder() as at:
                folders.save(at, 1, mine, {})
                disk, refused = Beside(operation, partial(folders.save, at, step, theirs, {}, keep=9)), False
                try:
                    folders.save(at, 2, mine, {}, keep=9, disk=disk)
                except MachineError:
                    refused = True
                if disk.done < operation:
                    break
                where = f"step {step} beside operation {operation}"
                stand = folders.steps(at)
                count.that(stand == sorted({1, *([] if refused and step == 3 else [2]), step}), f"{where}: {stand} stand")
                count.that(step == 2 or _is(at, 3, theirs), f"{where}: the other's is damaged")
                count.that(_is(at, 1, mine), f"{where}: the one before is damaged")
                count.that(2 not in stand or any(_is(at, 2, x) for x in (mine, theirs)), f"{where}: a mixture")
    return count.measured()


def clocks(rng: np.random.Generator) -> Measured:
    """The clock goes back and forth between saves, and so do the files' times: the latest, and what is dropped, go by the steps."""
    count, of = Checks(), layouts(rng, 1)
    of = {k: of[k] for k in ("param", "counter")}
    with folder() as at:
        states = {step: state(rng, of) for step in range(1, 7)}
        for step, states_ in states.items():
            path = folders.save(at, step, states_, {}, keep=3)
            now = int(rng.integers(0, 1 << 32)) if step % 2 else (1 << 32) // step
            for file in (*path.iterdir(), path):
                os.utime(file, (now, now))
            expected = [s for s in states if s <= step][-3:]
            count.that(folders.steps(at) == expected, f"behind step {step}: {folders.steps(at)} instead of {expected}")
            count.that(folders.at(at) == path and _is(at, step, states_), f"the latest behind step {step} is {folders.at(at).name}")
        os.utime(folders.at(at, 6), (0, 0))
        os.utime(folders.at(at, 4), (1 << 33, 1 << 33))
        count.that(folders.at(at).name == "step-00000006", "the latest is the one with the latest time")
    return count.measured()


def synced(rng: np.random.Generator) -> Measured:
    """Every file is forced to the medium by the file system call itself, after its last byte."""
    count, of = Checks(), layouts(rng)
    seen: dict[int, int] = {}
    real = os.fsync

    def spy(fd: Any) -> None:
        info = os.fstat(fd)
        seen[info.st_ino] = info.st_size
        real(fd)

    with folder() as at:
        os.fsync = spy
        try:
            path = folders.save(at, 1, state(rng, of), {})
        finally:
            os.fsync = real
        for file in path.iterdir():
            info = file.stat()
            count.that(seen.get(info.st_ino) == info.st_size, f"{file.name} was not forced to the medium whole")
        for place in (path, at, at.parent):
            count.that(place.stat().st_ino in seen, f"the entries of {place.name} were not forced to the medium")
    return count.measured()


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
