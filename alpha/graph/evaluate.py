"""Evaluate a graph with the rows' oracles in float64: the reference that passes, plans and whole models are compared with. Floor 2."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from alpha.errors import NonFiniteError
from alpha.graph.ir import Graph, Value
from alpha.ops.numerics import keeping, round_to
from alpha.ops.table import row


def evaluate(graph: Graph, inputs: Mapping[str, np.ndarray], states: Mapping[str, np.ndarray],
             *, stop_at_nonfinite: bool = False, precision: Mapping[str, str] | None = None,
             ) -> tuple[dict[str, np.ndarray], dict[tuple[str, int], np.ndarray]]:
    """Run every node through its oracle.

    `inputs`: by name; floats are taken as float64. `states`: flat arrays by kind. Returns (outputs by name, updates by box); states
    are not written. What has an extent is its rows. `precision`: element type -> the type that values of it are rounded to after each
    node, for instance
    {"bf16": "bf16", "f32": "f32"} for what a machine of these types computes (each row exactly, but for what its oracle has `stored`,
    then one rounding); None: no rounding.
    With `stop_at_nonfinite`, NonFiniteError names the first node, op and model line that made a NaN or infinity.
    """
    env: dict[Value, np.ndarray] = {}
    rounds = precision or {}

    def held(x: np.ndarray, v: Value) -> np.ndarray:
        return round_to(x, rounds[v.type.dtype]) if x.dtype.kind == "f" and v.type.dtype in rounds else x

    for name, v in graph.inputs.items():
        env[v] = held(_cast(np.asarray(inputs[name]).reshape(v.type.shape)), v)
    for (kind, offset, shape), v in graph.states.items():
        env[v] = held(_cast(np.asarray(states[kind])[offset : offset + v.type.size].reshape(shape)), v)
    for v in (*graph.inputs.values(), *graph.states.values()):
        if v.extent is not None:
            env[v] = env[v][: int(env[v.extent])]
    for node in graph.nodes:
        spec = row(node.op)
        with keeping(rounds.get(str(spec.compute_dtype([v.type for v in node.inputs])), "f64")):
            results = spec.oracle(*(env[v] for v in node.inputs), **node.attrs)
        for v, x in zip(node.outputs, results, strict=True):
            x = np.asarray(x)
            env[v] = held(x.reshape(v.type.shape if v.extent is None else (int(env[v.extent]), *v.type.shape[1:])), v)
            if stop_at_nonfinite and x.dtype.kind == "f" and not np.isfinite(x).all():
                raise NonFiniteError(f"{node.op} made a non-finite value in {node.layer or 'no layer'} at {node.source}", came=repr(node))
    return {k: env[v] for k, v in graph.outputs.items()}, {k: env[v] for k, v in graph.updates.items()}


def _cast(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if x.dtype.kind == "f" else x
