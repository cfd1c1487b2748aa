"""Components and catalogues as plain data. Floor 0.

A component is anything that a production run may use and that a gate must have passed first: a kernel, a graph pass, an optimizer,
a learning-rate schedule, a sampler, a tokenizer, an executor, a checkpoint format. The registry (floor 3) says whether it is usable.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alpha.errors import GraphError, InputError
from alpha.types import Attrs, TensorType

KINDS = ("kernel", "pass", "sampler", "tokenizer", "corpus", "split", "shards", "executor", "checkpoint", "model", "program",
         "optimizer", "schedule", "evidence", "flops", "baseline")
"""Closed list of kinds: what a component is. Which gates it owes says its profile."""

SHAPE = 1
"""Version of the fields of the data classes here, raised by hand: evidence binds to it in their place (alpha/registry/package.py)."""


@dataclass(frozen=True)
class Measured:
    """One measured case of a gate. It passes iff `error <= bound`, `cases > 0` and both numbers are finite (NaN fails).

    `error` and `bound` share one unit, named in `note` when it is not obvious; a yes/no check is 0.0 or 1.0 against bound 0.0.
    `digest` is the hex hash of the output where bits matter.
    """

    error: float
    bound: float
    cases: int = 1
    digest: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One side of an envelope: `holds(input types, attrs)` is true inside. `text` completes the sentence 'needs ...'."""

    text: str
    holds: Callable[[Sequence[TensorType], Attrs], bool]


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """The domain that a component's evidence covers. `dtypes`: allowed element types of float inputs."""

    dtypes: tuple[str, ...] = ("f32",)
    limits: tuple[Limit, ...] = ()

    def why_outside(self, types: Sequence[TensorType], attrs: Attrs) -> str | None:
        """None if the call is inside, else which limit it breaks."""
        for t in types:
            if t.is_float and t.dtype not in self.dtypes:
                return f"dtype {t.dtype} is not one of {', '.join(self.dtypes)}"
        for limit in self.limits:
            if not limit.holds(types, attrs):
                return f"needs {limit.text}; came {', '.join(map(str, types))} {dict(attrs)}"
        return None


@dataclass(frozen=True, kw_only=True)
class Component:
    """One gated thing.

    `id`: `<op or name>.<dtype or variant>.<backend>`, e.g. `matmul.f32.cpu`, `fuse.pass`, `tokenizer.bpe`.
    `implementation`: the callable or class whose syntax tree (with its callees in the package) is the digest.
    `profile`: whose gates it owes (alpha/registry/gates.py); a kernel's is `kernel`, every other component names its own.
    `op`: the op row that a kernel implements. `presupposes`: ids that must be usable before this one is.
    `requires`: what a machine must have to run it, such as `sm_90a`; elsewhere its gates are NOT_RUN, with the reason.
    `binaries`: name -> digest of every compiled file that it may load (kernels of the GPU); part of what evidence binds to.
    `launches`: of what runs whole Programs, the kernels among which they choose; evidence binds to those that they may launch.
    `inplace`: (output index, input index) pairs that may share memory when the planner proves that the input dies here.
    `scratch`: bytes of scratch the kernel needs, from (input types, attrs, threads); the planner reserves exactly that.
    `budgeted`: of a kernel, whether each of its launches keeps to an SM budget; where it is not, a node with a budget is refused.
    `calls`: of a kernel, what gates and benchmarks call it on beside its row's samples (calls.py of its back end).
    `contract`: dotted module whose `CASES[id][gate]` lists the cases of a component that has no op row:
    `CASES: dict[str, dict[str, list[tuple[str, Callable[[np.random.Generator], Measured]]]]]`.
    """

    id: str
    kind: str
    implementation: Callable
    backend: str = "host"
    profile: str = "kernel"
    op: str | None = None
    presupposes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    envelope: Envelope = field(default_factory=Envelope)
    inplace: tuple[tuple[int, int], ...] = ()
    scratch: Callable[[Sequence[TensorType], Attrs, int], int] | None = None
    contract: str = ""
    calls: Any = field(default=None, hash=False)
    binaries: Callable[[], Mapping[str, str]] | None = None
    launches: Callable[[], Iterable[Component]] | None = None
    budgeted: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GraphError("unknown component kind", came=self.kind, expected=", ".join(KINDS))
        if self.kind == "kernel" and self.op is None:
            raise GraphError("a kernel names its op row", came=self.id)
        if self.kind != "kernel" and not self.contract:
            raise GraphError("a component without an op row names its contract module", came=self.id)
        if (self.kind == "kernel") != (self.profile == "kernel"):
            raise GraphError("the profile of a component says which gates it owes", came=f"{self.id}: {self.profile}",
                             expected="`kernel` for a kernel, another one for everything else", do="name one of alpha/registry/gates.py")


class Catalogue:
    """The components of one backend or of the whole catalogue, by id; filled by the code that is handed it."""

    def __init__(self) -> None:
        self._by_id: dict[str, Component] = {}
        self.broken: dict[str, str] = {}
        """Modules that could not be loaded -> why. Whoever runs components refuses such a catalogue; who only tells about them goes on."""

    def load(self, module: str, change: Callable[[Component], Component] = lambda c: c) -> None:
        """Add every component of a module's `KERNELS`, each through `change`. A module that cannot be imported goes to `broken`."""
        try:
            found = getattr(importlib.import_module(module), "KERNELS", ())
        except Exception as error:  # a syntax error, a name that is gone: code that is being written
            self.broken[module] = f"{type(error).__name__}: {error}"
            return
        for c in found:
            self.add(change(c))

    def add(self, component: Component) -> None:
        """Add one; a second component of the same id is a GraphError."""
        if component.id in self._by_id:
            raise GraphError("two components share an id", came=component.id, do="rename one of them")
        self._by_id[component.id] = component

    def __getitem__(self, component_id: str) -> Component:
        if component_id not in self._by_id:
            raise InputError("no such component", came=component_id, do="list them with `alpha gate list`")
        return self._by_id[component_id]

    def __contains__(self, component_id: str) -> bool:
        return component_id in self._by_id

    def __iter__(self) -> Iterator[Component]:
        return iter(sorted(self._by_id.values(), key=lambda c: c.id))

    def __len__(self) -> int:
        return len(self._by_id)

    def for_op(self, op: str, backend: str) -> list[Component]:
        """Kernels of one backend for an op row, sorted by id."""
        return [c for c in self if c.op == op and c.backend == backend]
