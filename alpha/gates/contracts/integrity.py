"""Integrity of checkpoints: what was damaged or edited, or not written whole, is refused by name, and nothing is loaded. Floor 5."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from alpha.checkpoint import folders, ranges
from alpha.component import Measured
from alpha.errors import CorruptError, GraphError, InputError, MachineError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.corruptions import campaign
from alpha.gates.contracts.made_state import _is, empty, folder, layouts, reseal, same, saved_by, state

DRAWN = 500
"""Corruptions that the faults gate draws; `python suites/support/corruptions.py` draws as many as it is told."""


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
        short = 0
        for block in (256, 320, 448):
            cut = saved_by(path.parent / f"{block}", 5, before, 2, block)
            for file in sorted(cut.glob(f"*{ranges.STATE}")):
                raw = file.read_bytes()
                short += len(raw) > block and len(raw) % block != 0
                file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
                count.refuses(CorruptError, lambda cut=cut: folders.inspect(cut), f"the end of {file.name} in blocks of {block}")  # type: ignore[misc]
                file.write_bytes(raw)
        count.that(short > 0, "no file ends in a shorter block")
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
