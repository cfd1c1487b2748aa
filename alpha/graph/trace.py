"""Trace: run a plain model function once and keep what it called. Floor 2.

A model is a function of a Tracer: `def gpt(t, config) -> dict of outputs`. It calls op rows by name (`t.matmul(x, w, trans_b=True)`),
declares parameters (`t.param(...)`) inside units (`with t.unit("block.0"):`), and reads inputs (`t.input("tokens", (B, T), "i32")`).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alpha.errors import GraphError, InputError, ShapeError
from alpha.graph.effects import extent_of, no_extent
from alpha.graph.ir import Graph, Node, Value
from alpha.graph.order import COMPUTE
from alpha.graph.state import Init, StateLayout, TensorSpec
from alpha.ops.spec import OpSpec
from alpha.ops.table import row
from alpha.types import TensorType

PRECISIONS = ("f32", "bf16")
"""Compute types of a run. bf16: parameters are read from their bf16 copy, state kind `param16` (docs/numerics.md)."""

_HERE = str(Path(__file__).parent)
_OPS = str(Path(__file__).parent.parent / "ops")


class Tracer:
    """Builds one Graph. It is an `Emit`: `t("matmul", a, b, trans_b=True)` and `t.matmul(a, b, trans_b=True)` are the same.

    `precision`: compute type of the model, one of PRECISIONS. `leaves`: the parameter boxes that the graph reads, by name.
    """

    def __init__(self, name: str, layout: StateLayout | None = None, graph: Graph | None = None, precision: str = "f32") -> None:
        if precision not in PRECISIONS:
            raise InputError("unknown precision", came=precision, expected=", ".join(PRECISIONS))
        self.graph = graph or Graph(name)
        self.precision = precision
        self.tensors: dict[str, TensorSpec] = {}
        self.leaves: dict[str, Value] = {}
        self._layout = layout
        self._unit = ""
        self.layer, self.phase, self.source, self.stream = "", "forward", "", COMPUTE
        self.stage: int | None = None
        self.microbatch: int | None = None
        self.sms = 0

    # -- nodes -----------------------------------------------------------------------------------------------------------------

    def __call__(self, op: str, *inputs: Any, **attrs: Any) -> Any:
        """Append one node; returns its output, or the tuple of outputs if there are several. ShapeError from the row's shape rule, and
        for an attribute that the row does not know: nothing would read it."""
        spec = row(op)
        where = self.source or _model_line()
        for v in inputs:
            if not isinstance(v, Value):
                raise ShapeError(f"{op} at {where}: operands are values of this trace", came=repr(v)[:80],
                                 expected="a value that the tracer returned", do="pass numbers as attributes")
        unknown = sorted(set(attrs) - set(spec.known_attributes))
        if unknown:
            close = difflib.get_close_matches(unknown[0], spec.known_attributes, n=1)
            raise ShapeError(f"{op} at {where}: unknown attribute", came=", ".join(f"{k}={attrs[k]!r}" for k in unknown),
                             expected=", ".join(spec.known_attributes) or f"no attributes: {op} has none",
                             do=f"did you mean `{close[0]}`?" if close else f"leave out {unknown[0]}, or add it to the row of {op}")
        types = self._types(spec, inputs, attrs, where)
        node = Node(op, inputs, attrs, layer=self.layer, phase=self.phase, source=where, stream=self.stream, stage=self.stage,
                    microbatch=self.microbatch, sms=self.sms)
        count = len(self.graph.nodes)
        node.outputs = tuple(Value(t, f"{op}.{count}" + (f".{i}" if len(types) > 1 else ""), "node", None, node, i,
                                   extent_of(op, inputs))
                             for i, t in enumerate(types))
        self.graph.nodes.append(node)
        return node.outputs if len(node.outputs) != 1 or op == "split" else node.outputs[0]

    def _types(self, spec: OpSpec, inputs: tuple[Value, ...], attrs: dict[str, Any], where: str) -> tuple[TensorType, ...]:
        """What the row's shape rule says. ShapeError where it refuses, or was given what it cannot read: too few or too many operands, a
        missing attribute, one of another kind."""
        op, starred = spec.name, any(name[0] == "*" for name in spec.inputs)
        least = sum(name[0] != "*" and name[-1] != "?" for name in spec.inputs)
        if len(inputs) < least or (len(inputs) > len(spec.inputs) and not starred):
            optional = "; a ? marks what may be left out" if least < len(spec.inputs) else ""
            raise ShapeError(f"{op} at {where}: the operands are not those of its row", came=f"{len(inputs)}",
                             expected=", ".join(spec.inputs) or "none", do=f"call t.{op}({', '.join(spec.inputs)}){optional}")
        try:
            return spec.infer([v.type for v in inputs], attrs)
        except ShapeError as error:
            raise ShapeError(f"{error.what} (at {where}, layer {self.layer or 'none'})", came=error.came, expected=error.expected,
                             do=error.do) from None
        except (KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, KeyError) and error.args[0] in spec.known_attributes:
                raise ShapeError(f"{op} at {where}: a required attribute is missing", came=sorted(attrs), expected=str(error)) from None
            came = [*(str(v.type) for v in inputs), *(f"{k}={x!r}" for k, x in sorted(attrs.items()))]
            raise ShapeError(f"{op} at {where}: operands or attributes are of a kind that its row does not take",
                             came=", ".join(came)[:200],
                             expected=f"{', '.join((*spec.inputs, *spec.known_attributes))}, as the row of {op} says") from error

    def __getattr__(self, op: str) -> Any:
        if op.startswith("_"):
            raise AttributeError(op)
        row(op)
        return lambda *inputs, **attrs: self(op, *inputs, **attrs)

    @contextmanager
    def unit(self, name: str) -> Iterator[None]:
        """Everything inside belongs to this unit of state and to the layer of this name."""
        before = self._unit, self.layer
        self._unit = self.layer = name
        try:
            yield
        finally:
            self._unit, self.layer = before

    # -- leaves ----------------------------------------------------------------------------------------------------------------

    def input(self, name: str, shape: tuple[int, ...], dtype: str) -> Value:
        """A tensor that the host hands in on each call."""
        if name in self.graph.inputs:
            raise GraphError("two inputs share a name", came=name)
        value = self.graph.inputs[name] = Value(TensorType(tuple(shape), dtype), name, "input")
        return value

    def param(self, name: str, shape: tuple[int, ...], init: Init, *, decay: bool = False, lr_scale: float = 1.0) -> Value:
        """A parameter `<unit>.<name>` in the trace's precision. The same name again (a tied weight) returns the same value; shapes must
        agree."""
        return self._leaf((self._declare(name, shape, init, decay, lr_scale),))

    def stacked(self, names: tuple[str, ...], shape: tuple[int, ...], init: Init, *, decay: bool = False, lr_scale: float = 1.0) -> Value:
        """Parameters of one shape, tensors of their own in the state, read as one of `len(names)` times as many rows.

        They must lie side by side, in this order: neighbours in canonical order, and as long as a multiple of the alignment. GraphError
        otherwise.
        """
        specs = tuple(self._declare(name, shape, init, decay, lr_scale) for name in names)
        if self._layout:
            at = [self._layout.offsets[s.name] for s in specs]
            if at != [at[0] + i * specs[0].size for i in range(len(at))]:
                raise GraphError("parameters that are read as one do not lie side by side", came=f"{names} of shape {shape} at {at}",
                                 expected=f"each {specs[0].size} elements after the one before",
                                 do="choose sizes whose product is a multiple of 64")
        return self._leaf(specs)

    def _declare(self, name: str, shape: tuple[int, ...], init: Init, decay: bool, lr_scale: float) -> TensorSpec:
        full = f"{self._unit}.{name}" if self._unit else name
        spec = TensorSpec(full, tuple(shape), self._unit or "root", init, decay, lr_scale)
        known = self.tensors.setdefault(full, spec)
        if known != spec:
            raise ShapeError("a parameter is declared twice, differently", came=spec, expected=known)
        return spec

    def _leaf(self, specs: tuple[TensorSpec, ...]) -> Value:
        name, shape = "+".join(s.name for s in specs), (len(specs) * specs[0].shape[0], *specs[0].shape[1:]) if specs[0].shape else ()
        if name not in self.leaves:
            kind = "param16" if self.precision == "bf16" else "param"
            at = (kind, self._layout.offsets[specs[0].name]) if self._layout else ("param:" + name, 0)
            self.leaves[name] = self.state(*at, shape, self.precision, name)
        return self.leaves[name]

    def state(self, kind: str, offset: int, shape: tuple[int, ...], dtype: str, name: str = "") -> Value:
        """A box of the flat state array `kind`, starting at element `offset`; the same box again returns the same value."""
        key = (kind, offset, tuple(shape))
        if key not in self.graph.states:
            self.graph.states[key] = Value(TensorType(tuple(shape), dtype), name or f"{kind}+{offset}", "state", (kind, offset))
        return self.graph.states[key]

    def extent(self, value: Value, rows: Value) -> Value:
        """Let the integer `rows`, an input or a state i32[], say how many rows of `value` there are. Returns `value`: an input, a state box
        or what is received. GraphError for another one, which has the extent of what it is made of."""
        if value.producer is not None and value.producer.op != "receive":
            raise GraphError("the extent of a value is that of its operands", came=value, expected="an input, a state box or a receipt")
        value.extent = rows
        found = no_extent(value)
        if found is not None:
            value.extent = None
            raise GraphError(found[0], came=found[1], expected=found[2])
        return value

    # -- results ---------------------------------------------------------------------------------------------------------------

    def output(self, name: str, value: Value) -> None:
        """Name a result that the host may read."""
        self.graph.outputs[name] = value

    def update(self, target: Value, value: Value) -> None:
        """Let the state box `target` take `value` when the graph has run; types must agree; once per box."""
        if target.state is None or target.type != value.type:
            raise GraphError("an update needs a state box of the value's type", came=f"{target} <- {value}")
        if target.state in self.graph.updates:
            raise GraphError("a state box is updated twice", came=target)
        self.graph.updates[target.state] = value


def _model_line() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_HERE, _OPS)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "?"
