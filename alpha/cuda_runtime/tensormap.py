"""Tensor maps: what the bulk tensor copy engine needs to know about a tensor in device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from alpha.cuda_runtime import _bindings
from alpha.errors import ShapeError

ELEMENT_BYTES = {"bf16": 2, "f32": 4}
_TYPE = {"bf16": "BFLOAT16", "f32": "FLOAT32"}
SWIZZLE = 128
"""Bytes of a row of a box whose 16-byte parts are permuted in shared memory."""


class TensorMap:
    """A 128-byte descriptor of a tensor of 1 to 5 dimensions, innermost first.

    `address`: first element, 16-byte aligned. `shape`: elements per dimension; outside it loads give zero and stores do
    nothing. `strides`: bytes between neighbours in dimensions 1.. (the innermost is contiguous), multiples of 16. `box`:
    elements per copy, at most 256 each; its innermost extent in bytes is a multiple of 16 and at most SWIZZLE. ShapeError
    names the rule that is broken.
    """

    def __init__(
        self,
        dtype: str,
        address: int,
        shape: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
    ) -> None:
        rank = len(shape)
        rules = [
            (dtype in ELEMENT_BYTES, f"dtype {dtype}", f"one of {sorted(ELEMENT_BYTES)}"),
            (
                1 <= rank <= 5 and len(strides) == rank - 1 and len(box) == rank,
                f"rank {rank}",
                "1..5, rank-1 strides, rank box sizes",
            ),
            (address > 0 and address % 16 == 0, f"address {address:#x}", "a multiple of 16"),
            (all(0 < n <= 2**32 for n in shape), f"shape {tuple(shape)}", "1..2^32 elements a dimension"),
            (
                all(s % 16 == 0 and 0 < s < 2**40 for s in strides),
                f"strides {tuple(strides)} bytes",
                "multiples of 16, below 2^40",
            ),
            (all(0 < b <= 256 for b in box), f"box {tuple(box)}", "1..256 elements a dimension"),
        ]
        if dtype in ELEMENT_BYTES and box:
            inner = box[0] * ELEMENT_BYTES[dtype]
            fits = inner % 16 == 0 and inner <= SWIZZLE
            rules.append((fits, f"box row of {inner} bytes", "a multiple of 16, at most the swizzle"))
        for good, came, expected in rules:
            if not good:
                raise ShapeError("not a tensor the copy engine can address", came=came, expected=expected)
        driver = _bindings.driver()
        encoded = _bindings.check(
            "cuTensorMapEncodeTiled",
            driver.cuTensorMapEncodeTiled(
                getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPE[dtype]}"),
                rank,
                address,
                [driver.cuuint64_t(n) for n in shape],
                [driver.cuuint64_t(n) for n in strides],
                [driver.cuuint32_t(n) for n in box],
                [driver.cuuint32_t(1)] * rank,
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{SWIZZLE}B"),
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ),
        )
        self._storage = (ctypes.c_ubyte * 192)()
        start = -ctypes.addressof(self._storage) % 64
        ctypes.memmove(ctypes.addressof(self._storage) + start, int(encoded.getPtr()), 128)
        self.buffer = (ctypes.c_ubyte * 128).from_buffer(self._storage, start)
