"""Sizes of operands as tables of communication say them. Floor 8."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """`nbytes` in the largest of MiB, KiB and bytes that it reaches, the rest dropped: the sizes that are measured are powers of two."""
    return f"{nbytes >> 20} MiB" if nbytes >> 20 else f"{nbytes >> 10} KiB" if nbytes >> 10 else f"{nbytes} bytes"
