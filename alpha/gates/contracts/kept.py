"""Cases of folders of checkpoints: of drawn ones, with what else may lie there, which steps are seen, taken, set aside, finished and
dropped, held to a dull account of names. Nothing is read from within. Floor 7."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import folders
from alpha.component import Measured
from alpha.errors import InputError
from alpha.gates.contracts.reference import yes

OTHERS = ("step-", "step-x1", "step-1x", "12345678", "stop-00000003", "astep-00000004", "Step-00000005", "logs", "step_00000006")
"""Names of folders that are no checkpoint."""


def _name(step: int) -> str:
    return "step-" + str(step).rjust(8, "0")


def named(rng: np.random.Generator) -> Measured:
    """What a folder has is told by names alone, of folders alone; the latest is taken, or the one that is asked for; a step that is not
    there is refused by what there is."""
    wrong, cases = list[str](), 12
    for case in range(cases):
        with tempfile.TemporaryDirectory(prefix="alpha-kept-") as name:
            root = Path(name) / "checkpoints"
            wrong += [] if folders.steps(root) == [] else ["steps of no folder"]
            root.mkdir()
            mine = sorted({int(x) for x in rng.integers(0, (30, 200_000_000)[case % 2], int(rng.integers(6)))})
            there = {_name(s) for s in mine} | {x for x in OTHERS if rng.random() < 0.5}
            there |= {f"{kind}{_name(int(rng.integers(30)))}" for kind in (".tmp-", ".gone-", "aside-0-", "aside-1-") if rng.random() < 0.5}
            for x in there:
                (root / x).mkdir()
                (root / x / "of").write_text(x)
            for s in (31, 32):
                (root / _name(s)).write_text("a file") if _name(s) not in there else None
            wrong += [] if folders.steps(root) == mine else [f"{folders.steps(root)}, not {mine} of {sorted(there)}"]
            for step in (None, 29, *mine):
                try:
                    found = folders.at(root, step)
                    wrong += [] if mine and step in (None, *mine) and found == root / _name(mine[-1] if step is None else step) else [
                        f"step {step} of {mine}: {found.name}"]
                except InputError as error:
                    said = ("at least one", "start the run afresh")
                    said = (f"one of {', '.join(map(str, mine))}", "name one of these") if mine else said
                    told = f"step {step}" if mine else "none"
                    wrong += [] if step not in (None, *mine) or not mine else [f"step {step} of {mine} is refused"]
                    wrong += [f"{x!r} is not said: {error}" for x in (*said, f"{root}: {told}") if x not in str(error)]
            after = int(rng.integers(30))
            taken = {x: x for x in there}
            for s in mine:
                if s > after:
                    k = next(k for k in range(9) if f"aside-{k}-{_name(s)}" not in taken.values())
                    taken[_name(s)] = f"aside-{k}-{_name(s)}"
            moved = folders.set_aside(root, after)
            wrong += [] if moved == [root / taken[_name(s)] for s in mine if s > after] else [f"set aside behind {after}: {moved}"]
            now = {x.name: (x / "of").read_text() for x in root.iterdir() if x.is_dir()}
            wrong += [] if now == {new: old for old, new in taken.items()} else [f"set aside: {sorted(now)}"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


def finished(rng: np.random.Generator) -> Measured:
    """Behind a killed save torn folders go, one that was replaced comes back where nothing took its place, and all else stays. What is kept
    are the last ones up to a step, and each of a round number."""
    wrong, cases = list[str](), 12
    for _ in range(cases):
        with tempfile.TemporaryDirectory(prefix="alpha-kept-") as name:
            root, want = Path(name), dict[str, str]()
            mine = sorted({int(x) for x in rng.integers(0, 40, int(rng.integers(1, 9)))})
            old = sorted({int(x) for x in rng.integers(0, 40, int(rng.integers(4)))})
            beside = [f"{kind}{_name(3)}" for kind in (".tmp-", ".gone-", ".older-")]
            others = [f".older-{_name(3)}", ".old-photos", ".tmp-work", ".gone-fishing", f".tmp-{_name(3)}-mine", "aside-0-step-00000002"]
            for x in [*map(_name, mine), *(f".old-{_name(s)}" for s in old), *beside, *others[1:]]:
                (root / x).mkdir()
                (root / x / "of").write_text(x)
            want = {x: x for x in [*map(_name, mine), *others]}
            want |= {_name(s): f".old-{_name(s)}" for s in old if s not in mine}
            folders.clean(root)
            now = {x.name: (x / "of").read_text() for x in root.iterdir()}
            wrong += [] if now == want else [f"{sorted(now.items())}, not {sorted(want.items())}"]
            step, keep, every = int(rng.integers(40)), int(rng.integers(4)), (0, 2, 5)[int(rng.integers(3))]
            replaced = root / f".old-{_name(50)}"
            replaced.mkdir()
            there = sorted({*mine, *old})
            early = [s for s in there if s <= step]
            last = early[len(early) - max(1, keep) :] if len(early) > max(1, keep) else early
            kept = [s for s in there if s > step or s in last or (every and s % every == 0)]
            folders.prune(root, step, keep, every)
            wrong += [] if folders.steps(root) == kept else [f"of {there} up to {step}, {keep}, {every}: {folders.steps(root)}, not {kept}"]
            wrong += [] if not replaced.exists() and not [*root.glob(".gone-step-*")] else ["what was replaced is still there"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=2 * cases)


def typed(rng: np.random.Generator) -> Measured:
    """Every field of a manifest, of each version, alone with every other type than its own, below zero, or gone: it is not one that a save
    writes. As it was it is, and so with other values of the same type."""
    wrong, cases = list[str](), 0
    shapes = [[int(x) for x in rng.integers(0, 9, int(rng.integers(1, 4)))] for _ in range(2)]
    for version in (1, 2, 3):
        ranged = version == 3
        tensors = [[f"t.{i}", shape, "unit", *([] if ranged else [64 * i])] for i, shape in enumerate(shapes)]
        kinds = {kind: {"dtype": "<f4", "tensors": tensors}
                 | ({} if ranged else {"file": f"{kind}.npy", "size": 4096, "sha256": "00"}) for kind in ("param", "m")}
        content: dict[str, Any] = {"version": version, "step": int(rng.integers(99)), "facts": {"x": 1}, "kinds": kinds}
        content |= {"indexes": ["00", "11"]} if ranged else {}

        def places(at: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
            for key in at if isinstance(at, dict) else range(len(at)):
                if (*path, key) not in (("version",), ("facts", "x")):
                    yield (*path, key)
                    if isinstance(at[key], (dict, list)):
                        yield from places(at[key], (*path, key))

        sound = json.dumps(content)
        wrong += [f"version {version}: {why}"] if (why := folders._unlike_a_manifest(content)) else []
        for path in list(places(content, ())):
            for other in (None, True, 1.5, "no file", -1, 0, [], [3], {}, {"a": 1}, "gone"):
                made = json.loads(sound)
                holder = made
                for key in path[:-1]:
                    holder = holder[key]
                was = holder[path[-1]]
                if other == "gone" and not (isinstance(holder, dict) and path[0] == "kinds" and len(path) < 3):
                    del holder[path[-1]]
                    good = False
                    if isinstance(holder, list):  # a list that is shorter may be sound: of dimensions, of tensors, of indexes
                        good = path[-2] in ("tensors", "indexes") or len(path) == 6
                else:
                    holder[path[-1]] = other
                    good = type(other) is type(was) and other != -1
                    good &= path[-1] not in ("file", "dtype", "indexes") and (path[-1] != "tensors" or other == [])
                    good &= not (isinstance(other, dict) and path[0] == "kinds" and len(path) == 2)
                    good |= path == ("kinds",) and isinstance(other, dict) and other == {}
                    good &= not (path == ("kinds",) and other == {"a": 1})
                    good |= other == -1 and not ranged and len(path) == 5 and path[-1] == 3  # an offset is held against its file
                    good |= other == -1 and path[-1] == "size"
                    good &= not (len(path) == 4 and isinstance(other, list))  # a row of one tensor
                cases += 1
                found = folders._unlike_a_manifest(made)
                wrong += [] if (found == "") == good else [f"version {version}, {path} is {other!r} for {was!r}: {found or 'taken'}"]
    return yes(not wrong, "; ".join(wrong)[:300], cases=cases)
