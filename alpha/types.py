"""Element types and tensor types. Floor 0.

Legend of dtype names used everywhere: f64 f32 bf16 (floats), i64 i32 (integers), bool. bf16 is held in NumPy as float32 values that
are exactly representable in bf16; every other dtype is the NumPy dtype of the same width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from alpha.errors import ShapeError

ITEMSIZE: Mapping[str, int] = {"f64": 8, "f32": 4, "bf16": 2, "i64": 8, "i32": 4, "bool": 1}
FLOATS = ("f64", "f32", "bf16")
NUMPY: Mapping[str, np.dtype] = {
    "f64": np.dtype(np.float64), "f32": np.dtype(np.float32), "bf16": np.dtype(np.float32),
    "i64": np.dtype(np.int64), "i32": np.dtype(np.int32), "bool": np.dtype(np.bool_),
}
"""NumPy dtype in which the CPU holds each element type."""

SHAPE = 1
"""Version of the fields of the data classes here, raised by hand: evidence binds to it in their place (alpha/registry/digest.py)."""

Attrs = Mapping[str, object]
"""Static attributes of a node: int, float, str, bool, None or (nested) tuples of them; nothing else, so that they hash."""


@dataclass(frozen=True)
class TensorType:
    """A static shape and an element type. `shape` is a bound where an extent applies."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ShapeError("unknown dtype", came=self.dtype, expected=", ".join(ITEMSIZE))
        if any(not isinstance(n, int) or n < 0 for n in self.shape):
            raise ShapeError("a shape needs non-negative integers", came=self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous tensor of this type."""
        return self.size * ITEMSIZE[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"
