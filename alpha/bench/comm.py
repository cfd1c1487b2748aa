"""`alpha bench comm`: collectives among processes of one machine or several, by op, algorithm and size, beside one core's memcpy. Floor 8.

Every call is timed on every rank, from a common barrier; a call takes what its slowest rank takes. The algorithms of an op take turns, call
by call, so that what else the machine does meets all of them. Figures are medians over calls. The fits
are t = a + b n by least squares of the relative error: a is the latency, b the inverse bandwidth. Shares of memcpy compare the fastest call
with the fastest copy, which is timed before each case: a busy machine slows down both, and not alike.
"""

from __future__ import annotations

import json
import math
import os
import secrets
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

from alpha.bench.sizes import size_text
from alpha.comm import collectives, topology
from alpha.comm.group import Group
from alpha.comm.links import Links, measure
from alpha.comm.meet import Across, meet
from alpha.comm.rule import COSTS
from alpha.comm.segment import Segment
from alpha.comm.topology import Way
from alpha.comm.watch import Deadlines
from alpha.comm.world import WORLD, World
from alpha.errors import InputError
from alpha.train import launch

SIZES = tuple(1 << k for k in range(10, 27, 2))
"""Bytes of an operand: 1 KiB to 64 MiB."""
COPIED = 64 << 20
_CALLS, _FEWEST, _BYTES = 200, 7, 256 << 20
"""Most and fewest calls of one case, and bytes after which it has had enough."""
_WARM_UP = 2
_TOLD = 1 << 14
"""Bytes in which a host tells what it is made of."""

Body = Callable[[Group, np.ndarray, np.ndarray], None]


def _exchange(group: Group, x: np.ndarray, out: np.ndarray) -> None:
    if group.index == 0:
        collectives.send(group, x, to=1)
    elif group.index == 1:
        collectives.receive(group, x, source=0)


BY_HOSTS = " hosts"
"""How cases end that add, or gather, inside each host first: of several hosts alone."""


def _cases() -> dict[str, Body]:
    """Name -> the call. Operands have `size` bytes; a gather's piece and a scatter's result are a share of that."""
    def piece(group: Group, x: np.ndarray) -> np.ndarray:
        share = x.size // group.size
        return x[share * group.index : share * (group.index + 1)]

    def even(group: Group, x: np.ndarray) -> np.ndarray:
        return x[: x.size // group.size * group.size]

    def all_reduce(name: str) -> Body:
        return lambda g, x, out: collectives.all_reduce(g, x, out, algorithm=name)

    def scatter(name: str) -> Body:
        return lambda g, x, out: collectives.reduce_scatter(g, even(g, x), piece(g, out), algorithm=name)

    def gather(name: str) -> Body:
        return lambda g, x, out: collectives.all_gather(g, piece(g, x), even(g, out), algorithm=name)

    def broadcast(name: str) -> Body:
        return lambda g, x, out: collectives.broadcast(g, x, out, root=0, algorithm=name)

    return {
        "send": _exchange,
        **{f"all_reduce {name}": all_reduce(name) for name in ("direct", "whole", "halving", "hosts")},
        "all_reduce unordered": lambda g, x, out: collectives.all_reduce(g, x, out, reduce="unordered"),
        **{f"reduce_scatter {name}": scatter(name) for name in ("direct", "hosts")},
        **{f"all_gather {name}": gather(name) for name in ("direct", "ring", "hosts")},
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


@dataclass(frozen=True)
class Map:
    """`hosts`: the host of each rank; `machines`: what each host is made of, in lines; `ways`: what a message takes in and between them;
    `apart`: ranks of a group -> seconds that a byte takes between its worst neighbours, where its ranks follow one another, and where they
    lie as far apart as they can; and whether the first is the place of what moves most (topology.place)."""

    hosts: list[int]
    machines: list[list[str]]
    ways: list[Way]
    apart: dict[int, tuple[float, float, bool]]


@dataclass
class Result:
    """All cases among `ranks` processes. `memcpy`: of one core's copy of `copied` bytes; `barrier`: of one; `rule`: op -> (fewest
    bytes, algorithm) by the links that were measured at the start; `map`: where they ran."""

    ranks: int
    memcpy: Seconds
    barrier: Seconds
    rows: list[Row]
    rule: dict[str, list[tuple[int, str]]]
    map: Map
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


def bench(ranks: int, pattern: str = "*", sizes: Sequence[int] = SIZES, calls: int | None = None,
          across: Across | None = None) -> Result:  # fmt: skip
    """Start the other ranks of this host, measure, and end them. `across`: there are other hosts, which are given the same, with as many
    ranks each. InputError for a number of ranks or a pattern that gives nothing."""
    if ranks < 1 or (ranks < 2 and across is None):
        raise InputError("collectives run among ranks", came=ranks, expected="2 or more")
    names = [name for name in _cases() if fnmatchcase(name, pattern) and (across or not name.endswith(BY_HOSTS))]
    if not names and pattern != "barrier":
        raise InputError("no such collective", came=pattern, expected=", ".join(_cases()))
    met = meet(across, ranks, 0, secrets.randbits(64), _DEADLINES.join) if across else None
    segment = launch.segment_of(met, across) if met and across else Segment.create(ranks)
    bridge = launch.start_bridge(met, across, segment, _DEADLINES) if met and across else 0
    given = [",".join(names), ",".join(map(str, sizes)), str(calls or 0)]
    text = "import sys; from alpha.bench.comm import member; member(*sys.argv[1:])"
    others = [subprocess.Popen([sys.executable, "-c", text, str(segment.fd), str(rank), *given], pass_fds=[segment.fd])
              for rank in segment.here[1:]]
    try:
        with World(segment, segment.here.start, deadlines=_DEADLINES) as world:
            found = _measure(world, segment.here.start, names, sizes, calls)
    finally:
        for process in others:
            try:
                process.wait(_DEADLINES.abort)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if bridge:
            os.waitpid(bridge, 0)
        segment.close()
    return found


_DEADLINES = Deadlines(stall=30.0)
"""A machine that is busy elsewhere is no failure here."""


def member(fd: str, rank: str, names: str, sizes: str, calls: str) -> None:
    """What every rank but the first runs, in a process of its own."""
    segment = Segment(int(fd))
    with World(segment, int(rank), deadlines=_DEADLINES) as world:
        chosen = [name for name in names.split(",") if name]
        _measure(world, segment.here.start, chosen, [int(n) for n in sizes.split(",")], int(calls) or None)


def _measure(world: World, first: int, names: Sequence[str], sizes: Sequence[int], calls: int | None) -> Result:
    group, cases = world.group(WORLD), _cases()
    links = measure(world)
    world.rule, where = links.rule(), _map(group, first, links)
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
    rule = {op: world.rule.limits(op, world.size) for op in COSTS}
    return Result(world.size, Seconds(median(copies), min(copies)), barrier, rows, rule, where)


def _map(group: Group, first: int, links: Links) -> Map:
    """`first`: the lowest rank of this one's host."""
    own, every = np.zeros(_TOLD, np.int32), np.empty(_TOLD * group.size, np.int32)
    said = json.dumps(topology.read().lines()[: _TOLD // 100]).encode()[:_TOLD] if first == group.index else b"[]"
    own[0] = first
    own[1 : 1 + len(said)] = np.frombuffer(said, np.uint8)
    collectives.all_gather(group, own, every)
    firsts, told = every.reshape(group.size, _TOLD)[:, 0].tolist(), every.reshape(group.size, _TOLD)[:, 1:]
    starts = sorted(set(firsts))
    machines = [json.loads(told[start].astype(np.uint8).tobytes().rstrip(b"\0")) for start in starts]
    hosts = [starts.index(f) for f in firsts]
    cost, apart = links.inverse_bandwidth, dict[int, tuple[float, float, bool]]()
    for size in (n for n in range(2, group.size) if group.size % n == 0):
        order = topology.place({"most": (size, 2.0), "least": (group.size // size, 1.0)}, cost)
        apart[size] = *topology.spread(size, cost), order[0] == "most"
    return Map(hosts, machines, topology.ways(hosts, links.latency, links.inverse_bandwidth), apart)


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


def _show_map(where: Map, console: Console) -> None:
    for host, lines in enumerate(where.machines):
        ranks = [r for r, h in enumerate(where.hosts) if h == host]
        console.print(f"host {host}: ranks {ranks[0]} to {ranks[-1]}; {lines[0]}")
        for line in lines[1:]:
            console.print(f"  {line}", style="dim")
    for way in where.ways:
        a, b = way.hosts
        console.print(f"{f'inside host {a}' if a == b else f'host {a} to host {b}'}: {1e6 * way.latency:,.1f} us a message, "
                      f"{1e9 * way.inverse_bandwidth:.3f} ns a byte")
    for size, (near, far, follow) in where.apart.items():
        console.print(f"groups of {size}: {1e9 * near:.3f} ns a byte where their ranks follow one another, {1e9 * far:.3f} where they lie "
                      f"{len(where.hosts) // size} apart: those that move most get the {'first' if follow else 'second'}", style="dim")


# -- showing -------------------------------------------------------------------------------------------------------------------

_BARS = " ▁▂▃▄▅▆▇█"


def show(result: Result, console: Console) -> None:
    """The map, a table of times with the fits, bars of bandwidth against one core's memcpy, and the rule of algorithms."""
    _show_map(result.map, console)
    sizes = list(result.rows[0].seconds) if result.rows else []
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("us a call")
    for name in (*map(size_text, sizes), "latency us", "GB/s", "of memcpy"):
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
