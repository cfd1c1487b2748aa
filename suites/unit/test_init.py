"""Initial parameters: the bits of a serial draw, whatever the number of threads, their order, and the size of a piece."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import pytest

from alpha.errors import ConfigError
from alpha.graph.state import Init, StateLayout, TensorSpec
from alpha.optim import init
from alpha.train import memory_check

NORMAL = Init(kind="normal", std=0.02)
SIZES = {"one": 1, "odd": 21, "piece": init.PIECE, "ragged": 3 * init.PIECE + 5, "even": 2 * init.PIECE + 2}


def layout() -> StateLayout:
    normal = [TensorSpec(name, (n,), f"unit.{i % 3}", NORMAL) for i, (name, n) in enumerate(SIZES.items())]
    return StateLayout([*normal, TensorSpec("ones", (init.PIECE + 7,), "unit.1", Init(kind="ones")), TensorSpec("zeros", (513,), "unit.2")])


def at_once(spec: TensorSpec, seed: int) -> np.ndarray:
    """A tensor's normal numbers as one array, by the text that drew them before they were cut into pieces."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()[:16], "little")
    bits = np.random.Philox(key=key).random_raw(spec.size + spec.size % 2)
    u = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log1p(-u[0::2])), 2 * np.pi * u[1::2]
    z = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()[: spec.size]
    return (z * spec.init.std).astype(np.float32).reshape(spec.shape)


def whole(of: StateLayout, seed: int) -> np.ndarray:
    """The flat array of these numbers, tensor by tensor."""
    flat = np.zeros(of.size, np.float32)
    for spec in of.tensors:
        made = at_once(spec, seed) if spec.init.kind == "normal" else np.full(spec.size, float(spec.init.kind == "ones"))
        flat[of.offsets[spec.name] : of.offsets[spec.name] + spec.size] = made
    return flat


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Told by one value: where two long strings of bytes differ, pytest would compare them line by line, for hours."""
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 8])
def test_threads_change_no_bit(workers: int) -> None:
    of = layout()
    flat = np.full(of.size, np.nan, np.float32)
    init.fill_initial(flat, of, 7, workers)
    assert same_bits(flat, whole(of, 7))
    assert all(same_bits(init.draw(t, 7).ravel(), flat[of.offsets[t.name] : of.offsets[t.name] + t.size]) for t in of.tensors)


@pytest.mark.parametrize("piece", [4, 20, 1 << 12, 1 << 20])
def test_pieces_change_no_bit(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = StateLayout([TensorSpec("odd", (1021,), "", NORMAL), TensorSpec("even", (4096 + 2,), "", NORMAL)])
    monkeypatch.setattr(init, "PIECE", piece)
    flat = np.empty(of.size, np.float32)
    init.fill_initial(flat, of, 3, 2)
    assert same_bits(flat, whole(of, 3))


@pytest.mark.parametrize(("find", "change"), [("start // 4", "start // 8"), ("start // 4", "0"), ("u[1::2])", "u[0::2])")])
def test_the_comparison_sees_another_draw(find: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: pieces that begin elsewhere in the stream, or all at its start, and numbers of other pairs."""
    with open(init.__file__, encoding="utf-8") as file:
        text = file.read()
    made = {"__name__": init.__name__}
    assert text.count(find) >= 1
    exec(compile(text.replace(find, change), init.__file__, "exec"), made)
    monkeypatch.setattr(init, "_normal", made["_normal"])
    with pytest.raises(AssertionError):
        test_threads_change_no_bit(2)


def test_no_more_threads_than_were_asked_for_and_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread holds is a piece, as the check of memory counts it."""
    seen, sound = set(), init._normal

    def noted(*args: object) -> None:
        seen.add(threading.get_ident())
        sound(*args)  # type: ignore[arg-type]
    monkeypatch.setattr(init, "_normal", noted)
    before, of = set(threading.enumerate()), layout()
    init.fill_initial(np.empty(of.size, np.float32), of, 1, 3)
    assert 1 <= len(seen) <= 3 and threading.get_ident() not in seen and not set(threading.enumerate()) - before
    assert init.HELD == 48 * init.PIECE == memory_check.HELD


@pytest.mark.parametrize("workers", [1, 2])
def test_an_unknown_kind_is_refused(workers: int) -> None:
    of = StateLayout([TensorSpec("x", (4,), "", Init(kind="uniform")), TensorSpec("y", (4,), "", NORMAL)])
    with pytest.raises(ConfigError, match="unknown initialisation"):
        init.fill_initial(np.empty(of.size, np.float32), of, 1, workers)
