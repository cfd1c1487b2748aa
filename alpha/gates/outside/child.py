"""The process of an outside candidate: maps the memory that the judge owns, imports the candidate, calls it. Run as a file; imports NumPy
and, for a candidate that needs it, torch or triton, and nothing of Alpha.

One JSON object a line each way: {"do": name, ...}, answered by {"ok": result} or {"error": text}.

    load    file, function, language -> [version of what computes, whether its operands lie apart from the judge's memory]
    bind    number, file, operands [[offset, shape, NumPy dtype, name of the element type] ...], inputs (how many), attributes
    bring   numbers: all operands, from the judge's memory to where they lie apart
    call    numbers: the calls, in this order
    fetch   numbers: the outputs, back
    drop    numbers
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import mmap
import os
import sys
from typing import Any

import numpy as np


class Arrays:
    """A NumPy candidate: operands are views of the judge's memory."""

    version = f"numpy {np.__version__}"

    apart = False

    def operands(self, arrays: list[Any], kinds: list[str]) -> list[Any]:
        return arrays

    def wait(self) -> None:
        """Until all that was enqueued is done."""


class Tensors(Arrays):
    """A torch or Triton candidate: tensors of its own beside the judge's memory, on the GPU where there is one (Triton: always)."""

    apart = True

    def __init__(self, language: str) -> None:
        import torch

        if language == "triton":
            import triton

            if not torch.cuda.is_available():
                raise ImportError("triton needs a GPU that torch sees")
        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self.synchronize = torch.cuda.synchronize if self.device == "cuda" else None  # as it is before the candidate is imported
        self.version = f"torch {torch.__version__} on {self.device}" + (f", triton {triton.__version__}" if language == "triton" else "")

    def operands(self, arrays: list[Any], kinds: list[str]) -> list[Any]:
        return [self.torch.empty(x.shape, dtype=getattr(self.torch, kind), device=self.device) for x, kind in zip(arrays, kinds)]

    def copy(self, arrays: list[Any], held: list[Any]) -> None:
        for tensor, x in zip(held, arrays):
            tensor.copy_(self.torch.from_numpy(x))

    def copy_back(self, held: list[Any], arrays: list[Any]) -> None:
        for tensor, x in zip(held, arrays):
            self.torch.from_numpy(x).copy_(tensor)

    def wait(self) -> None:
        if self.synchronize is not None:
            self.synchronize()


class Side:
    """The handlers."""

    def __init__(self) -> None:
        self.bound: dict[int, Any] = {}

    def load(self, file: str, function: str, language: str) -> list[Any]:
        self.kind: Any = Arrays() if language == "numpy" else Tensors(language)
        folder, name = os.path.split(file)
        sys.path.insert(0, folder)
        self.function = getattr(_module(file, name.removesuffix(".py")), function)
        return [self.kind.version, self.kind.apart]

    def bind(self, number: int, file: str, operands: list[Any], inputs: int, attributes: dict[str, Any]) -> None:
        with open(file, "r+b") as shared:
            memory = mmap.mmap(shared.fileno(), 0)
        arrays: list[np.ndarray] = [np.ndarray(shape, dtype, memory, offset) for offset, shape, dtype, _ in operands]
        held = self.kind.operands(arrays, [kind for *_, kind in operands])
        self.bound[number] = held, arrays, inputs, attributes

    def bring(self, numbers: list[int]) -> None:
        for n in numbers:
            held, arrays, _, _ = self.bound[n]
            self.kind.copy(arrays, held)
        self.kind.wait()

    def call(self, numbers: list[int]) -> None:
        for n in numbers:
            held, _, _, attributes = self.bound[n]
            if self.function(*held, **attributes) is not None:
                raise TypeError("the candidate returned something: it writes its outputs in place and returns None")
        self.kind.wait()

    def fetch(self, numbers: list[int]) -> None:
        for n in numbers:
            held, arrays, inputs, _ = self.bound[n]
            self.kind.copy_back(held[inputs:], arrays[inputs:])

    def drop(self, numbers: list[int]) -> None:
        for n in numbers:
            self.bound.pop(n, None)


def _module(file: str, name: str) -> Any:
    """The module of this file, though one of the standard library has its name: `types.py`, `operator.py`."""
    spec = importlib.util.spec_from_loader(name, importlib.machinery.SourceFileLoader(name, file))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Answer until the judge closes. What the candidate prints goes to the error stream."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    np.seterr(all="ignore")
    side = Side()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(side, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
