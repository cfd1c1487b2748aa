"""How values of each element type lie in device memory, and the NumPy arrays that stand for them on the host. Floor 4.

bf16 is float32 on the host (every value representable in bf16) and two bytes on the device; everything else has one form.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alpha.errors import InputError
from alpha.types import NUMPY, TensorType


def device_bytes(t: TensorType) -> tuple[tuple[int, ...], Any]:
    """(shape, NumPy dtype) of a tensor's device form: bf16 as the upper halves of float32 bits."""
    return t.shape, np.uint16 if t.dtype == "bf16" else NUMPY[t.dtype]


def to_device(x: np.ndarray, t: TensorType) -> np.ndarray:
    """Host array (float64 accepted for floats) to its contiguous device form; InputError for a bf16 value that would have to be rounded."""
    if t.dtype != "bf16":
        return np.ascontiguousarray(x, NUMPY[t.dtype])
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    if np.any((bits & np.uint32(0xFFFF)) != 0):
        nan = np.isnan(np.asarray(x))
        if np.any(((bits & np.uint32(0xFFFF)) != 0) & ~nan):
            raise InputError("a bf16 operand holds a value that bf16 has not", came=str(t), expected="values rounded to bf16")
        upper = np.where(nan, np.uint16(0x7FFF), upper)
    return upper.reshape(t.shape)


def from_device(x: np.ndarray, t: TensorType) -> np.ndarray:
    """Device form to the host array."""
    if t.dtype != "bf16":
        return x
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(t.shape)
