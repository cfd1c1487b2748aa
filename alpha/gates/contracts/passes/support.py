"""What cases of several passes share: names, drawn graphs, and the plan of another process. Floor 7."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.reference import (
    Reference,
    both,
    graph_hashes,
    hash_of,
    in_new_process,
)
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.trace import Tracer

Case = Callable[[np.random.Generator], Measured]
Cases = dict[str, dict[str, list[tuple[str, Case]]]]
GPT, LLAMA = "gpt", "llama"


def _plan_hash_elsewhere(ref: Reference, rng: np.random.Generator) -> Measured:
    here = graph_hashes(ref.name)
    there = in_new_process(f"graph_hashes({ref.name!r})", "alpha.gates.contracts.reference")
    digest = hash_of(np.frombuffer(here.encode(), np.uint8))
    return Measured(error=float(here != there), bound=0.0, digest=digest, note="graph and plan hashes")


def exchanges(count: int, ready: tuple[int, ...] = (), phase: str = "reduce", groups: int = 1,
              gathers: int = 0) -> Tracer:
    """A chain of matrix products, and `count` sums over a group of two ranks of some of them, on the stream beside compute, in `phase`.
    Outputs: the last product, and the mean of each sum. `ready`: after which product each can begin (default: one after the other);
    `groups`: how many take turns; `gathers`: if it is k, every k-th gathers, and makes more than is handed in."""
    t = Tracer("exchanges")
    x, values = t.input("x", (8, 8), "f32"), []
    for _ in range(count + 2):
        x = t.matmul(x, x)
        values.append(x)
    t.output("y", x)
    for i, at in enumerate(ready or range(count)):
        with t.unit(f"unit.{i}"):
            t.phase = phase
            taken = t.reshape(values[at], shape=(64,))
            t.stream = COMM
            group = ("dp", "tp")[i % groups]
            gathered = gathers and i % gathers == 0
            total = t.all_gather(taken, group=group, size=2) if gathered else t.all_reduce(taken, group=group, size=2, reduce="sum")
            t.phase, t.stream = "forward", COMPUTE
            t.output(f"mean.{i}", t.mean(total, axis=(0,), keepdims=False))
    return t


def drawn_streams(rng: np.random.Generator) -> Tracer:
    """A drawn graph: each row on a drawn stream, over any value made before; rows of two results, rows that work in place, views and sums
    over ranks of drawn groups. Some results nobody reads."""
    t = Tracer("drawn streams")
    values = [t.input("x", (8, 64), "f32")]
    gain, back = t.input("gain", (64,), "f32"), int(rng.integers(2, 20))
    for _ in range(int(rng.integers(4, 20))):
        t.stream = (COMPUTE, COMM)[int(rng.random() < 0.5)]
        a, b = (values[int(i)] for i in rng.integers(max(0, len(values) - back), len(values), 2))
        kind = int(rng.integers(7))
        if kind == 0:
            values.append(t.add(a, b))
        elif kind == 1:
            values.append(t.gelu(a, approximate="tanh"))
        elif kind == 2:
            values.append(t.rmsnorm(a, gain, eps=1e-5)[0])
        elif kind == 3:
            values.append(t.reshape(t.reshape(a, shape=(512,)), shape=(8, 64)))
        else:
            total = t.all_reduce(t.reshape(a, shape=(512,)), group=("dp", "tp")[int(rng.integers(2))], size=2, reduce="sum")
            values.append(t.reshape(total, shape=(8, 64)))
    t.stream = COMPUTE
    t.output("y", t.add(values[-1], values[int(rng.integers(len(values)))]))
    return t


HASHES = both(_plan_hash_elsewhere)[:1]
HASHES_LLAMA = both(_plan_hash_elsewhere)[1:]
