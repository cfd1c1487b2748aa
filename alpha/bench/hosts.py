"""`alpha bench comm --hosts 2`: messages between two hosts beside plain sockets that move the same bytes. Floor 8.

Both hosts are on this machine, with one rank each, on a core of its own where there are two. Their connections go over the loopback device.
A call sends n bytes there and 4 back. It is made in turns: by plain sockets, by the transport's messages, and by the collectives send and
receive. Plain sockets are as many connections of the same two processes; pieces of a message's length go through them in turn, and nothing
is checked.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from alpha.bench.sizes import size_text
from alpha.comm import collectives
from alpha.comm.group import move
from alpha.comm.message import About
from alpha.comm.watch import Deadlines
from alpha.comm.world import WORLD, World
from alpha.errors import InputError, RankError
from alpha.gates.contracts.ranks.members import members

SIZES = (4, *(1 << k for k in range(10, 27, 2)))
"""Bytes there: a word, and 1 KiB to 64 MiB."""
STREAMS = (1, 4)
ARMS = ("sockets", "messages", "send")
"""Plain sockets; messages of the transport; the collectives send and receive."""
CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_MOST, _FEWEST, _BYTES = 1000, 16, 512 << 20
"""Most and fewest calls of one size, and bytes after which it has had enough."""
_WARM_UP = 3
_BACK = 4

Call = Callable[[np.ndarray], None]


@dataclass(frozen=True)
class Row:
    """Of one number of streams and one size (bytes there). By arm, seconds of a call: median and fastest."""

    streams: int
    nbytes: int
    median: dict[str, float]
    fastest: dict[str, float]

    def share(self, arm: str) -> float:
        """Plain sockets' time over an arm's, both at their fastest."""
        return self.fastest["sockets"] / self.fastest[arm]


def bench(hosts: int, sizes: Sequence[int] = SIZES, streams: Sequence[int] = STREAMS, calls: int | None = None) -> list[Row]:
    """Start both hosts for each number of streams, and measure. InputError for another number of hosts."""
    if hosts != 2:
        raise InputError("messages go between two hosts", came=f"--hosts {hosts}", expected="--hosts 2")
    rows = []
    for count in streams:
        ended = members().run(at_both, 2, tuple(sizes), count, calls, hosts=2, streams=count, deadlines=Deadlines(stall=30.0))
        if ended[0].result is None:
            raise RankError("a host of the measurement failed", rank=0, came=ended[0].error)
        rows += [Row(count, nbytes, *found) for nbytes, found in zip(sizes, ended[0].result)]
    return rows


def at_both(world: World, sizes: Sequence[int], streams: int, calls: int | None) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Of each size: by arm the median and the fastest call, on rank 0."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    found, links = [], _sockets(world, streams)
    try:
        for nbytes in sizes:
            arms = dict(zip(ARMS, (_plain(world, links), _messages(world), _send(world))))
            x, times = np.ones(nbytes, np.uint8), {arm: list[float]() for arm in ARMS}
            for i in range(-_WARM_UP, calls or max(_FEWEST, min(_MOST, _BYTES // nbytes))):
                for arm, call in arms.items():
                    start = time.perf_counter()
                    call(x)
                    if i >= 0:
                        times[arm].append(time.perf_counter() - start)
            found.append(({a: median(t) for a, t in times.items()}, {a: min(t) for a, t in times.items()}))
    finally:
        for link in links:
            link.close()
    return found


def _sockets(world: World, streams: int) -> list[socket.socket]:
    """Connections between both ranks, without a secret: of this measurement alone."""
    group, port, links = world.group(WORLD), np.zeros(1, np.int32), []
    if world.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port[0] = server.getsockname()[1]
            collectives.send(group, port, to=1)
            links = [server.accept()[0] for _ in range(streams)]
    else:
        collectives.receive(group, port, source=0)
        links = [socket.create_connection(("127.0.0.1", int(port[0]))) for _ in range(streams)]
    for link in links:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return links


def _plain(world: World, links: Sequence[socket.socket]) -> Call:
    most, back = world.group(WORLD).transport.payload_bytes, memoryview(bytearray(_BACK))

    def send(x: memoryview) -> None:
        for i, at in enumerate(range(0, len(x), most)):
            links[i % len(links)].sendall(x[at : at + most])

    def receive(x: memoryview) -> None:
        for i, at in enumerate(range(0, len(x), most)):
            piece, got = x[at : at + most], 0
            while got < len(piece):
                got += links[i % len(links)].recv_into(piece[got:])

    first, second = (send, receive) if world.rank == 0 else (receive, send)

    def call(x: np.ndarray) -> None:
        first(x.data)
        second(back)
    return call


def _messages(world: World) -> Call:
    transport, about, other = world.group(WORLD).transport, About("send", "bool", 0, 0, 0), 1 - world.rank
    most, back = transport.payload_bytes, np.zeros(_BACK, np.uint8)

    def send(x: np.ndarray) -> None:
        for i, at in enumerate(range(0, x.size, most)):
            transport.send(other, about, i, x[at : at + most], kept=True)
        transport.done(about)

    def receive(x: np.ndarray) -> None:
        pieces = [x[at : at + most] for at in range(0, x.size, most)]
        transport.expect(other, pieces)
        for i, piece in enumerate(pieces):
            move(transport.receive(other, about, i, piece.size), piece)
            transport.release(other)

    first, second = (send, receive) if world.rank == 0 else (receive, send)

    def call(x: np.ndarray) -> None:
        first(x)
        second(back)
    return call


def _send(world: World) -> Call:
    group, other, back = world.group(WORLD), 1 - world.rank, np.zeros(_BACK // 4, np.int32)

    def call(x: np.ndarray) -> None:
        if world.rank == 0:
            collectives.send(group, x.view(np.int32), to=other)
            collectives.receive(group, back, source=other)
        else:
            collectives.receive(group, x.view(np.int32), source=other)
            collectives.send(group, back, to=other)
    return call


def show(rows: Sequence[Row], console: Console) -> None:
    """A table of the fastest calls, with the share of plain sockets' speed."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("us a call, fastest (median)")
    for name in ("streams", *ARMS, "messages / sockets", "send / sockets"):
        table.add_column(name, justify="right")
    for r in rows:
        times = [f"{1e6 * r.fastest[arm]:,.1f} ({1e6 * r.median[arm]:,.1f})" for arm in ARMS]
        table.add_row(size_text(r.nbytes), str(r.streams), *times, f"{r.share('messages'):.2f}", f"{r.share('send'):.2f}")
    console.print(table)
    console.print(f"congestion control of all connections: {CONTROL.read_text().strip()}", style="dim")
