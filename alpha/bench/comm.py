"""`alpha bench comm`: collectives among processes of this machine, by op, algorithm and size, beside one core's memcpy. Floor 8.

Every call is timed on every rank, from a common barrier; a call takes what its slowest rank takes. The algorithms of an op take turns, call
by call, so that what else the machine does meets all of them. Figures are medians over calls. The fits
are t = a + b n by least squares of the relative error: a is the latency, b the inverse bandwidth. Shares of memcpy compare the fastest call
with the fastest copy, which is timed before each case: a busy machine slows down both, and not alike.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from statistics import median
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from alpha.comm import collectives
from alpha.comm.group import Group
from alpha.comm.links import measure
from alpha.comm.segment import Segment
from alpha.comm.watch import Deadlines
from alpha.comm.world import WORLD, World
from alpha.errors import InputError

SIZES = tuple(1 << k for k in range(10, 27, 2))
"""Bytes of an operand: 1 KiB to 64 MiB."""
COPIED = 64 << 20
_CALLS, _FEWEST, _BYTES = 200, 7, 256 << 20
"""Most and fewest calls of one case, and bytes after which it has had enough."""
_WARM_UP = 2

Body = Callable[[Group, np.ndarray, np.ndarray], None]


def _exchange(group: Group, x: np.ndarray, out: np.ndarray) -> None:
    if group.index == 0:
        collectives.send(group, x, to=1)
    elif group.index == 1:
        collectives.receive(group, x, source=0)


def _cases() -> dict[str, Body]:
    """Name -> the call. Operands have `size` bytes; a gather's piece and a scatter's result are a share of that."""
    def piece(group: Group, x: np.ndarray) -> np.ndarray:
        share = x.size // group.size
        return x[share * group.index : share * (group.index + 1)]

    def even(group: Group, x: np.ndarray) -> np.ndarray:
        return x[: x.size // group.size * group.size]

    def all_reduce(name: str) -> Body:
        return lambda g, x, out: collectives.all_reduce(g, x, out, algorithm=name)

    def gather(name: str) -> Body:
        return lambda g, x, out: collectives.all_gather(g, piece(g, x), even(g, out), algorithm=name)

    def broadcast(name: str) -> Body:
        return lambda g, x, out: collectives.broadcast(g, x, out, root=0, algorithm=name)

    return {
        "send": _exchange,
        **{f"all_reduce {name}": all_reduce(name) for name in ("direct", "whole", "halving")},
        "all_reduce unordered": lambda g, x, out: collectives.all_reduce(g, x, out, reduce="unordered"),
        "reduce_scatter direct": lambda g, x, out: collectives.reduce_scatter(g, even(g, x), piece(g, out)),
        **{f"all_gather {name}": gather(name) for name in ("direct", "ring")},
        **{f"broadcast {name}": broadcast(name) for name in ("direct", "halving", "ring")},
        "reduce direct": lambda g, x, out: collectives.reduce(g, x, out, root=0),
        "all_to_all direct": lambda g, x, out: collectives.all_to_all(g, even(g, x), even(g, out)),
    }


class Seconds(NamedTuple):
    """Of the calls of one case."""

    median: float
    fastest: float


@dataclass
class Row:
    """One case. `seconds`: size in bytes -> median of its calls; `fastest`: the same of its fastest call; `latency` (seconds),
    `inverse_bandwidth` (seconds per byte): the fit of the medians."""

    name: str
    seconds: dict[int, float] = field(default_factory=dict)
    fastest: dict[int, float] = field(default_factory=dict)
    latency: float = float("nan")
    inverse_bandwidth: float = float("nan")

    def fit(self) -> None:
        """Least squares of (a + b n) / t - 1, neither below zero."""
        n, t = np.array(list(self.seconds), float), np.array(list(self.seconds.values()))
        if len(n) < 2:
            return
        (a, b), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], 1), np.ones(len(n)), rcond=None)
        if a < 0:
            a, b = 0.0, (n / t).sum() / ((n / t) ** 2).sum()
        elif b < 0:  # longer operands took less: the best line is level
            a, b = (1 / t).sum() / ((1 / t) ** 2).sum(), 0.0
        self.latency, self.inverse_bandwidth = float(a), float(b)


@dataclass
class Result:
    """All cases among `ranks` processes. `memcpy`: of one core's copy of `copied` bytes; `barrier`: of one; `rule`: op -> (fewest
    bytes, algorithm) by the links that were measured at the start."""

    ranks: int
    memcpy: Seconds
    barrier: Seconds
    rows: list[Row]
    rule: dict[str, list[tuple[int, str]]]
    copied: int = COPIED

    def price(self, op: str) -> float:
        """The time of what the rule takes over that of the fastest algorithm, at the size where that is worst; nan where one was not
        timed. By the fastest calls: others pass on what a busy machine did."""
        rows = {r.name.removeprefix(f"{op} "): r.fastest for r in self.rows if r.name.startswith(f"{op} ") and "unordered" not in r.name}
        found = [math.nan]
        for size in next(iter(rows.values()), ()):
            operand = size // self.ranks if op == "all_gather" else size
            chosen = [name for fewest, name in self.rule[op] if fewest <= operand][-1]
            if {name for _, name in self.rule[op]} <= set(rows):
                found.append(rows[chosen][size] / min(r[size] for r in rows.values()))
        return max(found[1:], default=math.nan)


def bench(ranks: int, pattern: str = "*", sizes: Sequence[int] = SIZES, calls: int | None = None) -> Result:
    """Start the other ranks, measure, and end them. InputError for a number of ranks or a pattern that gives nothing."""
    if ranks < 2:
        raise InputError("collectives run among ranks", came=ranks, expected="2 or more")
    names = [name for name in _cases() if fnmatchcase(name, pattern)]
    if not names and pattern != "barrier":
        raise InputError("no such collective", came=pattern, expected=", ".join(_cases()))
    segment = Segment.create(ranks)
    given = [",".join(names), ",".join(map(str, sizes)), str(calls or 0)]
    text = "import sys; from alpha.bench.comm import member; member(*sys.argv[1:])"
    others = [subprocess.Popen([sys.executable, "-c", text, str(segment.fd), str(rank), *given], pass_fds=[segment.fd])
              for rank in range(1, ranks)]
    try:
        with World(segment, 0, deadlines=_DEADLINES) as world:
            found = _measure(world, names, sizes, calls)
    finally:
        for process in others:
            try:
                process.wait(_DEADLINES.abort)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        segment.close()
    return found


_DEADLINES = Deadlines(stall=30.0)
"""A machine that is busy elsewhere is no failure here."""


def member(fd: str, rank: str, names: str, sizes: str, calls: str) -> None:
    """What every rank but the first runs, in a process of its own."""
    with World(Segment(int(fd)), int(rank), deadlines=_DEADLINES) as world:
        _measure(world, [name for name in names.split(",") if name], [int(n) for n in sizes.split(",")], int(calls) or None)


def _measure(world: World, names: Sequence[str], sizes: Sequence[int], calls: int | None) -> Result:
    group, cases = world.group(WORLD), _cases()
    world.rule = measure(world).rule()
    rows, copies = [], _copies(group)
    for _, same_op in groupby(names, key=lambda name: name.split()[0]):
        of_op = [Row(name) for name in same_op]
        for nbytes in sizes:
            x, out = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
            found = _timed(group, [partial(cases[row.name], group, x, out) for row in of_op], calls or _calls(nbytes))
            for row, seconds in zip(of_op, found):
                row.seconds[nbytes], row.fastest[nbytes] = seconds
        for row in of_op:
            row.fit()
        rows += of_op
        copies += _copies(group)
    (barrier,) = _timed(group, [lambda: collectives.barrier(group)], calls or 1000)
    rule = {op: world.rule.limits(op, world.size) for op in ("all_reduce", "all_gather", "broadcast")}
    return Result(world.size, Seconds(median(copies), min(copies)), barrier, rows, rule)


def _calls(nbytes: int) -> int:
    return max(_FEWEST, min(_CALLS, _BYTES // nbytes))


def _timed(group: Group, turns: Sequence[Callable[[], None]], calls: int) -> list[Seconds]:
    """Of so many calls of each of some that take turns, on their slowest rank."""
    own = np.empty((calls, len(turns)))
    for i in range(-_WARM_UP, calls):
        for k, call in enumerate(turns):
            collectives.barrier(group)
            start = time.perf_counter()
            call()
            own[max(i, 0), k] = time.perf_counter() - start
    every = np.empty(own.size * group.size)
    collectives.all_gather(group, own.reshape(-1), every)
    slowest = every.reshape(group.size, calls, len(turns)).max(axis=0)
    return [Seconds(float(m), float(f)) for m, f in zip(np.median(slowest, axis=0), slowest.min(axis=0))]


def _copies(group: Group) -> list[float]:
    """Seconds in which one core copies COPIED bytes while the others wait, several times."""
    times = []
    if group.index == 0:
        x, out = np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8)
        for _ in range(_FEWEST):
            start = time.perf_counter()
            np.copyto(out, x)
            times.append(time.perf_counter() - start)
    collectives.barrier(group)
    return times or [0.0]


# -- showing -------------------------------------------------------------------------------------------------------------------

_BARS = " ▁▂▃▄▅▆▇█"


def show(result: Result, console: Console) -> None:
    """A table of times with the fits, bars of bandwidth against one core's memcpy, and the rule of algorithms."""
    sizes = list(result.rows[0].seconds) if result.rows else []
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("us a call")
    for name in (*(f"{n >> 20} MiB" if n >> 20 else f"{n >> 10} KiB" for n in sizes), "latency us", "GB/s", "of memcpy"):
        table.add_column(name, justify="right")
    copied = result.copied / result.memcpy.fastest
    for r in result.rows:
        shares = [n / t / copied for n, t in r.fastest.items()]
        bars = "".join(_BARS[min(8, round(8 * s))] for s in shares)
        fit = (f"{r.latency * 1e6:,.1f}", f"{1e-9 / r.inverse_bandwidth:.2f}" if r.inverse_bandwidth else "-") if math.isfinite(r.latency) \
            else ("-", "-")
        table.add_row(r.name, *(f"{t * 1e6:,.0f}" for t in r.seconds.values()), *fit, f"{bars} {shares[-1]:.2f}")
    console.print(table)
    for op, limits in result.rule.items():
        worst = result.price(op)
        said = f"; at worst {worst:.2f} of the fastest algorithm's time" if math.isfinite(worst) else ""
        console.print(f"{op}: " + ", ".join(f"{name} from {n:,} bytes" for n, name in limits) + said, style="dim")
    barrier = result.barrier
    console.print(f"barrier of {result.ranks} ranks: median {barrier.median * 1e6:.1f} us, fastest {barrier.fastest * 1e6:.1f}; "
                  f"memcpy by one core: median {1e-9 * result.copied / result.memcpy.median:.2f} GB/s, fastest {copied / 1e9:.2f}")
