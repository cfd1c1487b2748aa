"""The calls at which gates and benchmarks look at one kernel of the GPU, beside the samples of its row. Floor 4.

They stand in the file of the kernel's family, and its component carries them. Evidence binds each field to the gates that read it
(registry/digest.py), so a timed size moves perf alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alpha.ops.numerics import round_to
from alpha.ops.spec import Sample
from alpha.types import TensorType

Make = Callable[[np.random.Generator], Iterable[Sample]]

Drawn = tuple[list[tuple[np.ndarray, str]], dict[str, object]]
"""(operands with their types, attributes)."""


@dataclass(frozen=True)
class Call:
    """A call that is timed. `tensor_cores`: whether its FLOPs are theirs (else bytes alone are its ceiling). Integer operands lie in
    `least` .. `below` - 1."""

    name: str
    types: tuple[TensorType, ...]
    attrs: dict[str, Any]
    tensor_cores: bool = True
    below: int = 1
    least: int = 0


@dataclass(frozen=True)
class Large:
    """A case of parity that is too large for a sequential walk, or that the row's oracle refuses. `draw`: its operands. `error`:
    (generator, operands, attributes, outputs) -> (the worst error over its tolerance, elements looked at)."""

    draw: Callable[[np.random.Generator], Drawn]
    error: Callable[[np.random.Generator, Sequence[np.ndarray], dict[str, object], Sequence[np.ndarray]], tuple[float, int]]


def alike(want: np.ndarray, got: np.ndarray) -> tuple[float, int]:
    """(0, elements) where both are the same numbers, NaN among them; else infinity."""
    return 0.0 if np.array_equal(want, got, equal_nan=True) else float("inf"), got.size


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What one kernel is called on.

    further          samples that a back end of whole 16-byte rows and tiles needs: alignments, tile edges, a width for each compiled file
    exactly          further samples whose result is exact
    differentiated   of a backward kernel, further samples of the forward row: the gradient gate goes through that
    large            cases of parity at sizes of a model, by name
    repeated         the calls at a size of a model that determinism repeats, by name
    timed            the calls that perf times: sizes of GPT-2 124M and of a Llama of 1.1 billion parameters
    paths            calls on paths in the device code that the samples leave out, for tools that see each access; integers are 0
    compared         more shapes on which a benchmark holds the kernel against its peers
    """

    further: Make = lambda rng: ()
    exactly: Make = lambda rng: ()
    differentiated: Make = lambda rng: ()
    large: Mapping[str, Large] = field(default_factory=dict)
    repeated: Mapping[str, Callable[[np.random.Generator], Drawn]] = field(default_factory=dict)
    timed: tuple[Call, ...] = ()
    paths: tuple[Call, ...] = ()
    compared: tuple[Call, ...] = ()


def bf16(*shape: int) -> TensorType:
    """A bf16 tensor."""
    return TensorType(shape, "bf16")


def f32(*shape: int) -> TensorType:
    """An fp32 tensor."""
    return TensorType(shape, "f32")


def i32(*shape: int) -> TensorType:
    """An i32 tensor."""
    return TensorType(shape, "i32")


def plain(*types: TensorType, name: str = "model-0", below: int = 1, least: int = 0, **attrs: Any) -> Call:
    """A timed call bound by memory."""
    return Call(name, types, attrs, False, below, least)


def product(*types: TensorType, name: str = "model-0", below: int = 1, **attrs: Any) -> Call:
    """A timed call of tensor cores."""
    return Call(name, types, attrs, True, below)


def drawn(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, str]:
    """A bf16 operand of normal numbers."""
    return round_to(rng.standard_normal(shape), "bf16"), "bf16"
