"""What the change of parameters is held to: AdamW's first steps of two computations that round differently, and of wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from alpha.bench import agreement

RATES = (3e-6, 6e-6, 9e-6)
"""The first ones of a warm-up, as in the run files."""

DECAY, TERMS = 0.1, 65536
SIZES = {"layers": 24, "width": 256, "heads": 2, "kv_heads": 2, "weight_decay": DECAY}
SHAPES = {"block.0.mlp.up.weight": (1024, 256), "block.0.mlp.down.weight": (256, 1024), "block.0.norm1.gain": (2048,),
          "block.0.mlp.up.bias": (1024,), "block.0.attention.qkv.bias": (768,)}
DECAYED = [name for name in SHAPES if "mlp" in name and name.endswith("weight")]


def before(rng: np.random.Generator, scale: float) -> dict[str, np.ndarray]:
    return {name: (np.ones(shape) if "gain" in name else np.zeros(shape) if "bias" in name else scale * rng.standard_normal(shape)
                   ).astype(np.float32) for name, shape in SHAPES.items()}


def adamw(start: np.ndarray, gradients: Sequence[np.ndarray], decay: float, rate: float = 1.0) -> np.ndarray:
    """The parameters after these steps, in float32 as masters are."""
    p, m, v = start.copy(), np.zeros(start.shape), np.zeros(start.shape)
    for i, (g, lr) in enumerate(zip(gradients, RATES), 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        ratio = (m / (1 - 0.9**i)) / (np.sqrt(v / (1 - 0.95**i)) + 1e-8)
        p = (p - rate * lr * (ratio + decay * p)).astype(np.float32)
    return p


class Steps:
    """Three steps of a model, once for ours and once with errors of gradients as two right computations have."""

    def __init__(self, seed: int, law: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray], scale: float = 0.2,
                 dtype: str = "bf16") -> None:
        rng, self.dtype = np.random.default_rng(seed), dtype
        self.rho = 2 * agreement.flips({dtype}, TERMS, SIZES["layers"])
        self.start = before(rng, scale)
        exact = {name: [1e-4 * law(rng, shape) for _ in RATES] for name, shape in SHAPES.items()}
        self.ours, self.theirs = (
            {name: [g + 1e-4 * self.rho / np.sqrt(2) * rng.standard_normal(g.shape) for g in found] for name, found in exact.items()}
            for _ in range(2))
        for of in (self.ours, self.theirs):  # softmax takes no notice of the keys' bias: its gradient is noise
            for g in of["block.0.attention.qkv.bias"]:
                g[256:512] = 1e-7 * rng.standard_normal(256)

    def after(self, gradients: dict[str, list[np.ndarray]], decayed: Sequence[str] = DECAYED, rate: float = 1.0) -> dict[str, np.ndarray]:
        return {name: adamw(self.start[name], g, DECAY * (name in decayed), rate) for name, g in gradients.items()}

    def expected(self) -> agreement.Expected:
        places = agreement.places(SHAPES, np.random.default_rng(0))
        taken = ({name: agreement.taken(x, places[name]) for name, x in of.items()} for of in (self.start, self.after(self.ours)))
        return agreement.Expected(places, *taken, {**SIZES, "decayed": DECAYED}, RATES, {self.dtype}, TERMS)

    def change(self, theirs: dict[str, np.ndarray]) -> agreement.Change:
        e = self.expected()
        return e.change({name: agreement.taken(x, e.places[name]) for name, x in theirs.items()})

    def why(self, theirs: dict[str, np.ndarray]) -> str:
        return self.change(theirs).why


LAWS = {"normal": lambda rng, shape: rng.standard_normal(shape), "Laplace": lambda rng, shape: rng.laplace(size=shape) / np.sqrt(2)}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_right_peer_passes(law: str, seed: int, dtype: str) -> None:
    """Its gradients have errors of the size that the derivation allows, and the keys' bias moves as it likes."""
    steps = Steps(seed, LAWS[law], dtype=dtype)
    assert steps.why(steps.after(steps.theirs)) == ""


@pytest.mark.parametrize(("what", "word"), [("none", "size"), ("half", "size"), ("double", "size"), ("other sign", "direction"),
                                            ("no decay", "decay of 2 tensors with decay"), ("decay of all", "decay of 3 tensors without"),
                                            ("one tensor left out", "size of block.0.norm1.gain"), ("a step left out", "size"),
                                            ("missing", "size of block.0.mlp.up.bias")])
def test_a_wrong_peer_is_refused(what: str, word: str) -> None:
    s = Steps(7, LAWS["normal"])
    right = s.after(s.theirs)
    theirs = {"none": lambda: s.start,
              "half": lambda: s.after(s.theirs, rate=0.5), "double": lambda: s.after(s.theirs, rate=2.0),
              "other sign": lambda: s.after({n: [-x for x in g] for n, g in s.theirs.items()}),
              "no decay": lambda: s.after(s.theirs, []), "decay of all": lambda: s.after(s.theirs, list(SHAPES)),
              "one tensor left out": lambda: {**right, "block.0.norm1.gain": s.start["block.0.norm1.gain"]},
              "a step left out": lambda: s.after({n: g[:2] for n, g in s.theirs.items()}),
              "missing": lambda: {n: x for n, x in right.items() if "up.bias" not in n}}[what]()
    assert s.why(right) == "" and word in s.why(theirs)


def test_what_cannot_be_told_is_not_refused_or_is_left_out() -> None:
    """A rate within the bound of signs passes. Decay that drowns in signs does too, and its bound says so. Few elements are left out."""
    s = Steps(3, LAWS["normal"])
    assert s.why(s.after(s.theirs, rate=0.95)) == ""
    small = Steps(3, LAWS["normal"], scale=0.002)
    found = small.change(small.after(small.theirs, []))
    assert found.decay is not None and found.decay.allowed > 1 and found.decay.right
    few = agreement.change({"w": np.ones(8)}, {"w": np.zeros(8)}, {"w": np.zeros(8)}, 0.0, set(), 0.0, 3)
    assert few.tensors == 0 and "no tensor is large enough" in few.why


def test_places_meet_all_columns_and_are_few() -> None:
    found = agreement.places({"w": (50304, 768), "b": (768,), "x": (128256, 4096)}, np.random.default_rng(0))
    assert found["b"] == (0, 1)
    for name, (rows, width) in {"w": (50304, 768), "x": (128256, 4096)}.items():
        first, stride = found[name]
        assert 0 <= first < stride and rows * width / stride <= agreement.TAKEN
        assert len(np.unique(np.arange(first, rows * width, stride) % width)) == width
    held = np.arange(12, dtype=np.float32)
    taken, whole = agreement.taken(held, (1, 5)), agreement.taken(held, (0, 1))
    held[:] = 0
    assert taken.tolist() == [1, 6, 11] and whole[11] == 11, "a copy: the parameters go on"
