"""Element types and tensor types. Floor 0.

Legend of dtype names used everywhere: f64 f32 bf16 (floats), i64 i32 (integers), bool. bf16 is held in NumPy as float32 values that
are exactly representable in bf16; every other dtype is the NumPy dtype of the same width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
"""Version of the fields of the data classes here, raised by hand: evidence binds to it in their place (alpha/registry/package.py)."""

Attrs = Mapping[str, object]
"""Static attributes of a node: int, float, str, bool, None, Table or (nested) tuples of them; nothing else, so that they hash."""


@dataclass(frozen=True)
class Table:
    """Numbers that are known when a Program is built: float32, 4 bytes each, as one attribute. Two tables are equal if their bytes are.

    Its text (`str`, `repr`) is its length and the sha256 of its bytes, so that plans and hashes stay short however long it is.
    """

    data: bytes = field(repr=False)

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Table:
        """Each number rounded once to float32. ShapeError for an empty table or for a number that float32 does not hold."""
        wide = np.fromiter(numbers, np.float64)
        with np.errstate(over="ignore"):
            narrow = wide.astype("<f4")
        if not wide.size or not np.isfinite(narrow).all():
            raise ShapeError("a table holds finite numbers, at least one", came=f"{wide.size}, finite: {int(np.isfinite(narrow).sum())}")
        return cls(narrow.tobytes())

    def __len__(self) -> int:
        return len(self.data) // 4

    def array(self) -> np.ndarray:
        """f32[n], read-only."""
        return np.frombuffer(self.data, "<f4")

    def __repr__(self) -> str:
        return f"f32[{len(self)}] {hashlib.sha256(self.data).hexdigest()}"


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
