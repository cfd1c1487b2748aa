"""What the file of a kernel of the CPU declares, asked of a fork that has loaded it (served.py). Floor 7.

A file of kernels is code that somebody hands in: declarations are statements too. So the process that judges has names and sizes, and
asks for the rest: whether a limit of the envelope holds, and which further samples there are.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from alpha.backends.cpu.calls import Calls
from alpha.component import Component, Envelope, Limit
from alpha.gates.cpu.process import Fork, in_its_process
from alpha.graph.ir import attrs_text
from alpha.ops.spec import Sample
from alpha.types import Attrs, TensorType


class Declarations:
    """Components of which the files are loaded elsewhere. A kernel may break the process that is asked: the next one has another."""

    def __init__(self) -> None:
        self._fork: Fork | None = None
        self._known: dict[str, Component] = {}
        self._held: dict[object, bool] = {}

    def of(self, component_id: str) -> Component:
        """The component of this id. InputError where there is none, CorruptError where a file of kernels cannot be loaded."""
        if component_id not in self._known:
            told = self._ask("declared", component=component_id)
            limits = tuple(Limit(text=str(text), holds=partial(self._holds, component_id, i)) for i, text in enumerate(told["limits"]))
            names = ("further", "refused", "repeated") if told["calls"] else ()
            calls = {name: partial(self._samples, component_id, name) for name in names}
            self._known[component_id] = Component(
                id=component_id, kind="kernel", backend="cpu", op=str(told["op"]), implementation=in_its_process,
                requires=tuple(map(str, told["requires"])), envelope=Envelope(dtypes=tuple(map(str, told["dtypes"])), limits=limits),
                inplace=tuple((int(o), int(i)) for o, i in told["inplace"]), calls=Calls(**calls) if calls else None)
        return self._known[component_id]

    def close(self) -> None:
        """End the process that is asked."""
        if self._fork is not None:
            self._fork.close()

    def _ask(self, do: str, **arguments: Any) -> Any:
        if self._fork is None or self._fork.ended:
            self._fork = Fork()
        return self._fork.ask(do, **arguments)

    def _holds(self, component_id: str, limit: int, types: Sequence[TensorType], attrs: Attrs) -> bool:
        key = component_id, limit, tuple(types), attrs_text(attrs)
        if key not in self._held:
            told = [(t.shape, t.dtype) for t in types]
            self._held[key] = bool(self._ask("holds", component=component_id, limit=limit, types=told, attrs=dict(attrs)))
        return self._held[key]

    def _samples(self, component_id: str, which: str, rng: np.random.Generator) -> list[Sample]:
        return [Sample(name=str(s["name"]), inputs=tuple(map(_array, s["inputs"])), attrs=_made(s["attrs"]),
                       wrt=None if s["wrt"] is None else tuple(map(int, s["wrt"])))
                for s in self._ask("samples", component=component_id, which=which, rng=rng)]


def _array(told: Mapping[str, Any]) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(told["bytes"]), np.dtype(str(told["dtype"])))
    return flat.reshape(tuple(map(int, told["shape"]))).copy()


def _made(told: Any) -> Any:
    """Attributes as served.py has written them: a list stands for a tuple."""
    if isinstance(told, list):
        return tuple(map(_made, told))
    return {k: _made(v) for k, v in told.items()} if isinstance(told, dict) else told
