"""What cases of checkpoints share: made-up state, checkpoints of it by any number of ranks and of older versions. Floor 5."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import folders, ranges
from alpha.checkpoint.disk import Disk
from alpha.errors import CorruptError, InputError
from alpha.graph.state import StateLayout, TensorSpec
from alpha.types import NUMPY

States = dict[str, tuple[StateLayout, np.ndarray]]



def layouts(rng: np.random.Generator, blocks: int = 11, wide: int = 1) -> dict[str, StateLayout]:
    """A small model with odd shapes, scalars and more than ten blocks (natural order matters). `wide`: about 20 spread units over ranks."""
    tensors = [TensorSpec("embedding.token.weight", (int(rng.integers(6, 70)), 5 * wide), "embedding")]
    for i in range(blocks):
        tensors += [TensorSpec(f"block.{i}.w", (int(rng.integers(2, 9)), 7 * wide, 3), f"block.{i}"),
                    TensorSpec(f"block.{i}.b", (), f"block.{i}")]  # fmt: skip
    params = StateLayout(tensors)
    return {"param": params, "m": params, "v": params, "counter": StateLayout([TensorSpec("step", (), "counter")], "i32")}


def state(rng: np.random.Generator, of: dict[str, StateLayout]) -> States:
    """Random bits, NaN payloads, infinities and denormals included; padding is dirty on purpose."""
    return {k: (x, rng.integers(0, 1 << 32, x.size, np.uint32).view(NUMPY[x.dtype])) for k, x in of.items()}


def empty(of: dict[str, StateLayout]) -> States:
    """Arrays full of a sentinel."""
    return {k: (x, np.full(x.size, 7, NUMPY[x.dtype])) for k, x in of.items()}


def tensor(states: States, kind: str, name: str) -> bytes:
    layout, flat = states[kind]
    at = layout.offsets[name]
    return flat[at : at + layout.by_name[name].size].tobytes()


def same(a: States, b: States) -> bool:
    """Every tensor of every kind bit for bit; padding does not count."""
    return set(a) == set(b) and all(tensor(a, k, t.name) == tensor(b, k, t.name) for k, (x, _) in a.items() for t in x.tensors)


def _is(at: Path, step: int, expected: States) -> bool:
    """Whether the checkpoint of a step is whole and holds this state."""
    after = empty({kind: layout for kind, (layout, _) in expected.items()})
    try:
        folders.load(folders.at(at, step), after)
    except (CorruptError, InputError):
        return False
    return same(after, expected)


def copied(states: States) -> States:
    return {k: (x, flat.copy()) for k, (x, flat) in states.items()}


def saved_by(at: Path, step: int, states: States, ranks: int, block: int = ranges.BLOCK, facts: dict[str, Any] | None = None,
             disk: Disk | None = None, cut: bool = False) -> Path:  # fmt: skip
    """Saved by so many ranks, one after another. `cut`: each has its cut alone of every kind that is as long as a unit."""
    temporary = folders.begin(at, step, disk=disk)
    for rank in range(ranks):
        mine = {kind: (layout, cut_of(layout, flat, rank, ranks) if cut else flat) for kind, (layout, flat) in states.items()}
        data, held = ranges.image(mine, rank, ranks)
        ranges.write(temporary, rank, ranks, ranges.cut(data, block), held, disk or Disk(), block)
    return folders.commit(temporary, step, {kind: layout for kind, (layout, _) in states.items()}, ranks, facts or {}, disk=disk)


def cut_of(layout: StateLayout, flat: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """A rank's cut of a whole flat array, by the arithmetic of cuts alone."""
    out = np.zeros(layout.shard(ranks).size, flat.dtype)
    for local, lo, hi in layout.shard(ranks).cuts(rank):
        if lo < hi:
            out[local : local + hi - lo] = flat[lo:hi]
    return out


def saved_before(at: Path, step: int, states: States, version: int, facts: dict[str, Any]) -> Path:
    """A checkpoint of version 1 or 2, as it was written: a whole array a kind."""
    path = at / f"step-{step:08d}"
    path.mkdir(parents=True)
    kinds = {}
    for kind, (layout, flat) in states.items():
        clean = np.zeros_like(flat)
        for start, size in layout.ranges():
            clean[start : start + size] = flat[start : start + size]
        np.save(path / f"{kind}.npy", clean)
        kinds[kind] = {"file": f"{kind}.npy", "dtype": flat.dtype.str, "size": layout.size,
                       "sha256": hashlib.sha256((path / f"{kind}.npy").read_bytes()).hexdigest(),
                       "tensors": [[t.name, list(t.shape), t.unit, layout.offsets[t.name]] for t in layout.tensors]}  # fmt: skip
    reseal(path, {"format": folders.FORMAT, "version": version, "step": step, "facts": facts, "kinds": kinds})
    return path


def reseal(path: Path, content: dict[str, Any]) -> None:
    """Write a manifest with the hash that it then has."""
    content.pop("sha256", None)
    (path / folders.MANIFEST).write_bytes(ranges.canonical({**content, "sha256": folders._digest(content)}))


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="alpha-checkpoint-") as name:
        yield Path(name) / "checkpoints"
