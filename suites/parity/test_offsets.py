"""Softmax-like rows where all scores share a large offset: forward and then backward of the CPU's kernels, on their own statistics.

The parity gate gives a backward kernel the oracle's lse, and draws its tolerance with lse and scores scaled apart, which moves them by more
than the errors looked for here. So here a pair of kernels is held to twice what the walk of the same two rows errs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from alpha.backends.cpu.kernels import attention
from alpha.component import Component
from alpha.gates.subjects import bind, case_of, spec_of
from alpha.ops.numerics import UNIT_ROUNDOFF, round_to, walk
from alpha.ops.spec import Arrays, Sample
from alpha.registry.judge import RATIO
from alpha.train.catalogue import catalogue
from alpha.types import Attrs

DRAWS = 24
Draw = Callable[[np.random.Generator, float], tuple[list[np.ndarray], dict[str, object]]]


def _attention(heads: int, d: int) -> Draw:
    def draw(rng: np.random.Generator, offset: float) -> tuple[list[np.ndarray], dict[str, object]]:
        """q and k share a direction, and differ across it alone: every scaled score lies near `offset`, none stands out."""
        along = rng.standard_normal(d)
        along /= np.linalg.norm(along)
        q, k, v = rng.standard_normal((1, 40, heads, d)), rng.standard_normal((1, 40, 1, d)), rng.standard_normal((1, 40, 1, d))
        far = (abs(offset) * d**0.5) ** 0.5
        q, k = (x - (x @ along)[..., None] * along + y * along for x, y in ((q, far), (k, np.sign(offset) * far)))
        return [q, k, v], {"causal": True, "window": 0, "scale": d**-0.5}
    return draw


def _packed(heads: int, d: int) -> Draw:
    def draw(rng: np.random.Generator, offset: float) -> tuple[list[np.ndarray], dict[str, object]]:
        operands, attrs = _attention(heads, d)(rng, offset)
        return [np.concatenate(operands, 2).reshape(1, 40, -1)], {**attrs, "heads": heads, "kv_heads": 1}
    return draw


def _logits(rng: np.random.Generator, offset: float) -> tuple[list[np.ndarray], dict[str, object]]:
    targets = rng.integers(0, 300, 20).astype(np.int32)
    return [2 * rng.standard_normal((20, 300)) + offset, targets], {"ignore_index": -1, "z_loss": 0.0}


def _scores(rng: np.random.Generator, offset: float) -> tuple[list[np.ndarray], dict[str, object]]:
    return [2 * rng.standard_normal((20, 300)) + offset], {"axis": -1}


def _head(rng: np.random.Generator, offset: float) -> tuple[list[np.ndarray], dict[str, object]]:
    x, weight = rng.standard_normal((40, 17)), 0.3 * rng.standard_normal((60, 17))
    x[:, 0], weight[:, 0] = abs(offset) ** 0.5, np.sign(offset) * abs(offset) ** 0.5
    return [x, weight, rng.integers(0, 60, 40).astype(np.int32)], {"ignore_index": -1, "z_loss": 0.0, "chunk": 16}


def _fed(op: str, cotangents: list[np.ndarray], operands: Sequence[np.ndarray], results: Arrays) -> list[np.ndarray]:
    """Operands of the backward row."""
    if op == "softmax":
        return [*cotangents[:1], results[0]]
    if op == "cross_entropy":
        return [cotangents[0], *operands, results[1]]
    return [cotangents[0], *operands, *results]


PAIRS = {"attention-8": ("attention", _attention(2, 8)), "attention-64": ("attention", _attention(1, 64)),
         "attention-packed": ("attention_packed", _packed(3, 16)), "cross-entropy": ("cross_entropy", _logits),
         "softmax": ("softmax", _scores), "head": ("linear_cross_entropy_grad", _head)}


def kernel(op: str) -> Component:
    return catalogue()[f"{op}.f32.cpu"]


def _called(component: Component, *operands: np.ndarray, **attrs: object) -> Arrays:
    case = case_of(Sample(name="offset", inputs=operands, attrs=attrs), "f32", spec=spec_of(component))
    bound = bind(component, case)
    bound.fill(case.arrays())
    bound.run()
    return tuple(np.asarray(y, np.float64) for y in bound.outs)


def _walked(oracle: Callable[..., Arrays], *operands: np.ndarray, **attrs: object) -> Arrays:
    return tuple(walk(oracle, "f32", operands, attrs))


def _both(op: str, calls: Sequence[Callable[..., Arrays]], operands: Sequence[np.ndarray], cotangents: list[np.ndarray],
          attrs: Attrs) -> Arrays:
    """Results of the forward and, on its results, of the backward where there is one."""
    results = calls[0](*operands, **attrs)
    return (*results, *(y for call in calls[1:] for y in call(*_fed(op, cotangents, operands, results), **attrs)))


def errors(pair: str, offset: float, backward: Component | None = None) -> tuple[list[float], list[float]]:
    """Largest errors of each result over DRAWS draws: (of the kernels, of the walk), over the largest element of the oracle's."""
    op, draw = PAIRS[pair]
    parts = [op] if op.startswith("linear") else [op, f"{op}_bwd"]
    oracles = [spec_of(kernel(part)).oracle for part in parts]
    kernels = [backward if backward and i else kernel(part) for i, part in enumerate(parts)]
    rng = np.random.default_rng(7)
    worst: list[list[list[float]]] = [[], []]
    for _ in range(DRAWS):
        made, attrs = draw(rng, offset)
        operands = [round_to(x, "f32") if x.dtype.kind == "f" else x for x in made]
        cotangents = [round_to(rng.standard_normal(y.shape), "f32") for y in oracles[0](*operands, **attrs)]
        want = _both(op, oracles, operands, cotangents, attrs)
        got = _both(op, [partial(_called, component) for component in kernels], operands, cotangents, attrs)
        naive = _both(op, [partial(_walked, oracle) for oracle in oracles], operands, cotangents, attrs)
        for found, results in zip(worst, (got, naive)):
            found.append([float(np.abs(y - w).max() / np.abs(w).max()) for y, w in zip(results, want)])
    return np.max(worst[0], axis=0).tolist(), np.max(worst[1], axis=0).tolist()


def agree(found: tuple[list[float], list[float]]) -> bool:
    """Whether each error is at most RATIO times the walk's, or one rounding."""
    return all(got <= max(RATIO * naive, UNIT_ROUNDOFF["f32"]) for got, naive in zip(*found))


@pytest.mark.parametrize("offset", [-90.0, 1e3, -1e4])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_large_common_offset_costs_what_it_costs_the_walk(pair: str, offset: float) -> None:
    found = errors(pair, offset)
    assert agree(found), f"{pair} at {offset:g}: errors {found[0]}, of the walk {found[1]}"


@pytest.mark.parametrize("pair", ["attention-8", "attention-64"])
def test_lse_as_the_first_term_of_the_product_is_seen(pair: str) -> None:
    """Planted: the scores of the backward are rounded otherwise than those of the forward, whose sums lse holds."""
    text = inspect.getsource(attention)
    for find, put in (("np.matmul(k_[:, :, block.low : block.high], q_turned, out=p_BGSM)",
                       "np.matmul(np.concatenate([np.ones((nb, ng, keys, 1), dtype), k_[:, :, block.low : block.high]], 3), "
                       "np.concatenate([-shift.reshape(nb, ng, 1, r * n), q_turned], 2), out=p_BGSM)"),
                      ("np.subtract(p, shift, out=p)", "pass")):
        assert text.count(find) == 1
        text = text.replace(find, put)
    names: dict[str, Any] = {"__name__": attention.__name__}
    exec(compile(text, attention.__file__, "exec"), names)
    found = errors(pair, -1e4, replace(kernel("attention_bwd"), implementation=names["attention_bwd"]))
    assert not agree(found), f"errors {found[0]}, of the walk {found[1]}"
