"""Checkpoints of versions 1 and 2: one `.npy` file a kind of state, whole, with one SHA-256. They are read, not written. Floor 5."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from alpha.checkpoint.ranges import ALIGN, BLOCK, Held, Range, corrupt, dtype_of
from alpha.files import open_regular
from alpha.graph.state import StateLayout

FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.npy")
"""A kind's file lies in the folder itself."""


def read(path: Path, kind: str, facts: Mapping[str, Any], layout: StateLayout) -> Range:
    """The file of a kind of state, its whole content checked. CorruptError unless it is what the manifest's `facts` say."""
    name, digest = facts["file"], hashlib.sha256()
    try:
        with open_regular(path / name) as file:
            while block := file.read(BLOCK):
                digest.update(block)
            size = file.tell()
            if digest.hexdigest() != facts["sha256"]:
                raise corrupt(path, f"{name} is not what its hash says", f"sha256 {digest.hexdigest()[:16]}",
                              f"sha256 {facts['sha256'][:16]}")
            file.seek(0)
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            start = file.tell()
    except OSError as error:
        raise corrupt(path, "a file cannot be read", f"{name} ({error.strerror})", "every file of the manifest") from error
    except (ValueError, SyntaxError, TokenError, UserWarning) as error:  # the last where warnings are errors
        raise corrupt(path, f"{name} is no array", error, "an .npy file") from error
    item = dtype_of(layout).itemsize
    if shape != (facts["size"],) or dtype != dtype_of(layout) or size != start + facts["size"] * item or start % ALIGN:
        raise corrupt(path, f"{name} has another size", f"{dtype}{list(shape)}", f"{facts['dtype']}[{facts['size']}]")
    held = []
    for tensor, dims, _unit, offset in facts["tensors"]:
        if not 0 <= offset <= facts["size"] - prod(dims):
            raise corrupt(path, f"tensor {tensor} of {kind} lies outside its file", f"offset {offset}, shape {dims}", facts["size"])
        if prod(dims):
            held.append(Held(kind, tensor, tuple((0, n) for n in dims), start + offset * item, item))
    return Range(path / name, size, BLOCK, (), tuple(held))
