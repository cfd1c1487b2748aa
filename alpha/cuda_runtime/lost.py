"""Whether an error of a driver says that the context is lost: nothing of that process can use its GPU again. Floor 3.

The driver repeats such an error at every call. A process of its own starts with a sound context, so a job that lost one may start again.
"""

from __future__ import annotations

import re

LOSING = {"ILLEGAL_ADDRESS": 700, "LAUNCH_TIMEOUT": 702, "ASSERT": 710, "HARDWARE_STACK_ERROR": 714, "ILLEGAL_INSTRUCTION": 715,
          "MISALIGNED_ADDRESS": 716, "INVALID_ADDRESS_SPACE": 717, "INVALID_PC": 718, "LAUNCH_FAILED": 719, "ECC_UNCORRECTABLE": 214,
          "NVLINK_UNCORRECTABLE": 220, "CONTAINED": 721}
"""Names of errors (cuda.h: CUDA_ERROR_*) behind which a context is of no use."""

_WORDS = ("illegal memory access", "illegal instruction", "misaligned address", "unspecified launch failure", "uncorrectable",
          "device-side assert", "hardware stack error", "launch timed out", "address space", "invalid program counter")
"""What cuGetErrorString says of the same, in pycuda's errors."""


def context_lost(error: BaseException | None) -> str:
    """The line that says so, of this error or of one that it came from; '' where none does."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    for one in reversed(seen):  # the first of them
        text = " ".join(str(one).split())
        driver = type(one).__name__ == "CudaError" or type(one).__module__.partition(".")[0] == "pycuda"
        named = re.search(rf"CUDA_ERROR_({'|'.join(LOSING)})\b", text)
        if driver and (named or any(word in text for word in _WORDS)):
            return text[:300]
    return ""
