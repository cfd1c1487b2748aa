"""What members do: one collective, held against what its row promises, and every way to fail the others. Floor 7."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

import numpy as np

from alpha.comm import collectives
from alpha.comm.group import Group
from alpha.comm.message import About
from alpha.comm.shm import SharedMemory
from alpha.comm.world import WORLD, World
from alpha.ops.collectives import ROWS, promised
from alpha.ops.numerics import round_to
from alpha.types import FLOATS, NUMPY, Attrs, TensorType

BY_NAME = {row.name: row for row in ROWS}
COUNTS = (0, 1, 31, 601, 1024, 5003)
"""Nothing, one, primes, exactly one message of 4-byte elements, several messages with a rest."""
DTYPES = ("f64", "f32", "bf16", "i64", "i32", "bool")
ALGORITHMS = {"all_reduce": ("direct", "whole", "halving", "hosts"), "reduce_scatter": ("direct", "hosts"),
              "all_gather": ("direct", "ring", "hosts"), "broadcast": ("direct", "halving", "ring")}
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")


def drawn(rng: np.random.Generator, dtype: str, count: int, index: int) -> np.ndarray:
    """Operands in the host's type: floats of many magnitudes, so that another order of additions shows; integers that wrap around."""
    if dtype in FLOATS:
        x = rng.standard_normal(count) * 10.0 ** rng.integers(-4, 5, count)
        special = count > 100 and index % 2
        if special:
            x[rng.permutation(count)[:5]] = np.nan, -np.nan, np.inf, -np.inf, -0.0  # one alone in its message, too
        return round_to(x, dtype).astype(NUMPY[dtype])
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    return rng.integers(-(1 << 31), 1 << 31, count).astype(NUMPY[dtype])


def one(group: Group, op: str, dtype: str, count: int, *, algorithm: str = "", reduce: str = "sum", in_place: bool = False,
        seed: int = 0, bound: Callable[[np.ndarray, np.ndarray, Attrs], None] | None = None) -> str:
    """One call against the row's promise: '' or what was wrong. `bound`: makes the call in place of the function of that name."""
    n, me = group.size, group.index
    spec, attrs = BY_NAME[op], dict[str, object](group=group.name, size=n)
    operand = count * n if op in ("reduce_scatter", "all_to_all") else count
    xs = [drawn(np.random.default_rng((seed, count, i)), dtype, operand, i) for i in range(n)]
    if op in ("all_reduce", "reduce_scatter"):
        attrs["reduce"] = reduce
    if op in ("broadcast", "reduce"):
        attrs["root"] = (seed + count) % n
    expected = promised(spec, [(x,) for x in xs], [TensorType((operand,), dtype)], attrs)[me][0]
    x = xs[me].copy()
    out = np.full(expected.shape, 77, expected.dtype)
    if in_place and op == "reduce_scatter":
        out = x[count * me : count * (me + 1)]
    elif in_place and op == "all_gather":
        out[count * me : count * (me + 1)] = x
        x = out[count * me : count * (me + 1)]
    elif in_place:
        out = x
    call: Callable[..., None] = getattr(collectives, op)
    given = {k: v for k, v in attrs.items() if k in ("reduce", "root")} | ({"algorithm": algorithm} if algorithm else {})
    if bound is None:
        call(group, x, out, dtype=dtype, **given)
    else:
        bound(x, out, attrs)
    if out.tobytes() != expected.tobytes():
        wrong = int((out.view(np.uint8) != expected.view(np.uint8)).sum())
        return f"{op} {dtype} {count} {algorithm} {reduce} in_place={in_place} among {n}: {wrong} bytes differ"
    if not in_place and x.tobytes() != xs[me].tobytes():
        return f"{op} {dtype} {count} {algorithm}: the operand was written"
    return ""


def summed(op: str, dtype: str, reduce: str) -> bool:
    return op not in ("all_reduce", "reduce_scatter", "reduce") or (dtype != "bool" and (reduce == "sum" or dtype in FLOATS))


def misbehave(world: World, what: str) -> None:
    group, x = world.group(WORLD), np.ones(5000, np.float32)
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "hangs":
        time.sleep(3)
    elif what == "raises":
        raise MemoryError("planted")
    elif what == "exits":
        os._exit(0)
    elif what == "skips":
        group.transport = Mute(_memory(group))
    elif what == "barrier":
        collectives.barrier(group)
    elif what == "count":
        collectives.all_reduce(group, x[:-1], x[:-1], reduce="average")
    elif what == "dtype":
        collectives.all_reduce(group, x.view(np.int32), x.view(np.int32))
    elif what == "sum":
        collectives.all_reduce(group, x, x)
    elif what == "root":
        collectives.broadcast(group, x, x, root=world.rank)
    elif what == "flips":
        group.transport = Flipped(_memory(group))
    else:
        raise AssertionError(what)


def _memory(group: Group) -> SharedMemory:
    assert isinstance(group.transport, SharedMemory)
    return group.transport


class Mute:
    """A transport that hands nothing over any more."""

    def __init__(self, transport: SharedMemory) -> None:
        self._transport, self.payload_bytes = transport, transport.payload_bytes

    def send(self, to: int, about: About, chunk: int, payload: np.ndarray, *, kept: bool = False) -> None:
        pass

    def done(self, about: About) -> None:
        self._transport.done(about)

    def withdraw(self) -> None:
        self._transport.withdraw()

    def expect(self, source: int, outs: Sequence[np.ndarray | None]) -> None:
        self._transport.expect(source, outs)

    def receive(self, source: int, about: About, chunk: int, nbytes: int) -> np.ndarray:
        return self._transport.receive(source, about, chunk, nbytes)

    def release(self, source: int) -> None:
        self._transport.release(source)


class Flipped(Mute):
    """A transport whose slots change after they were filled: one bit of each payload."""

    def send(self, to: int, about: About, chunk: int, payload: np.ndarray, *, kept: bool = False) -> None:
        ring = self._transport._out[to]
        sent = ring.sent
        ring.sent = bytearray(8)  # type: ignore[assignment]  # the receiver must not see it before the bit has turned
        self._transport.send(to, about, chunk, payload)
        ring.payloads[(ring.count - 1) % ring.slots][0] ^= 1
        ring.sent = sent
        sent[0] = ring.count
