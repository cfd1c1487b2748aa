"""Hosts on one machine for gates and tests: a segment and a bridge each, and wires between them that can be spoiled. Floor 7."""

from __future__ import annotations

import os
import random
import selectors
import signal
import socket
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from alpha.comm.bridge import Host
from alpha.comm.handshake import Door
from alpha.comm.meet import Across, Met
from alpha.comm.process import Served
from alpha.comm.segment import Segment
from alpha.comm.watch import Deadlines
from alpha.train.launch import start_bridge

SECRET = b"of the gates' own jobs"
HANDSHAKE = 200
"""Bytes of a connection that are never spoiled by `flips`: what strangers say is tested apart."""


@dataclass(frozen=True)
class Wire:
    """How the connections between hosts misbehave. `cuts`: so many of them end after a random number of bytes; `flips`: in so many one bit
    is flipped; `silent`: bytes after which nothing passes any more, also through new connections, though all stay open: in direction
    `ways` (to, from, both), 0 never. `most`: the largest of those random numbers. `least`: the smallest place of a cut, in whichever
    direction gets there."""

    cuts: int = 0
    flips: int = 0
    silent: int = 0
    ways: str = "both"
    most: int = 60_000
    seed: int = 0
    least: int = 1


class Network:
    """Segments and bridges of `hosts` hosts with `size` ranks between them, the earlier hosts with one more where they do not divide."""

    def __init__(self, size: int, hosts: int, wire: Wire | None = None, **layout: Any) -> None:
        cuts = [size * i // hosts for i in range(hosts + 1)]
        doors = [Door(("127.0.0.1", 0), SECRET) for _ in range(hosts)]
        parts = [range(a, b) for a, b in pairwise(cuts)]
        self.segments, job = list[Segment](), None
        for part in parts:
            self.segments.append(Segment.create(size, here=part, job=job, **layout))
            job = self.segments[0].job
        self.pids, ports = list[int](), [door.port for door in doors]
        if wire is not None:
            ports = [self._proxy(port, wire) for port in ports]
        self.told = [Host("127.0.0.1", port, part) for port, part in zip(ports, parts)]
        self.bridges = list[int]()
        for i, (segment, door) in enumerate(zip(self.segments, doors)):
            met = Met(segment.job, 0, tuple(self.told), door, segment.streams)
            across = Across(i, hosts, "127.0.0.1", door.port, SECRET, segment.streams)
            self.bridges.append(start_bridge(met, across, segment, Deadlines(), doors[i + 1 :]))

    def segment(self, rank: int) -> Segment:
        """That of the rank's host."""
        return next(s for s in self.segments if rank in s.here)

    def _proxy(self, port: int, wire: Wire) -> int:
        listening = socket.create_server(("127.0.0.1", 0))
        pid = os.fork()
        if not pid:
            try:
                proxy(listening, port, wire)
            finally:
                os._exit(0)
        self.pids.append(pid)
        number = int(listening.getsockname()[1])
        listening.close()
        return number

    def close(self, limit_s: float = 10.0) -> list[str]:
        """What is wrong with how the bridges ended: by themselves, with nothing to say, within so many seconds served to them."""
        wrong = []
        for i, pid in enumerate(self.bridges):
            clock, ended, status = Served(pid), 0, 0
            while not ended and clock.look() < 1e9 * limit_s:
                ended, status = os.waitpid(pid, os.WNOHANG)
                time.sleep(0 if ended else 0.01)
            if not ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                wrong.append(f"the bridge of host {i} does not end")
            elif status not in (0, signal.SIGKILL):  # killed by the case itself
                wrong.append(f"the bridge of host {i} ended with {os.waitstatus_to_exitcode(status)}")
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for segment in self.segments:
            segment.close()
        return wrong


class _Way:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, to: socket.socket, flip: int, cut: int, room: list[int]) -> None:
        self.source, self.to, self.flip, self.cut, self.room, self.passed = source, to, flip, cut, room, 0

    def carry(self) -> bool:
        """Pass on what is there; False where this connection ends."""
        data = bytearray(self.source.recv(1 << 16))
        if not data:
            return False
        data = data[: self.room[0]]
        self.room[0] -= len(data)
        if self.passed <= self.flip < self.passed + len(data):
            data[self.flip - self.passed] ^= 1 << self.flip % 8
        end = self.cut and self.passed + len(data) >= self.cut
        if end:
            data = data[: self.cut - self.passed]
        self.to.sendall(data)
        self.passed += len(data)
        return not end


def proxy(listening: socket.socket, port: int, wire: Wire) -> None:
    """Between whoever connects and `port`, for ever."""
    rng, cuts, flips, selector = random.Random(wire.seed), wire.cuts, wire.flips, selectors.DefaultSelector()
    rooms = [[wire.silent if wire.silent and wire.ways in ("both", way) else 1 << 62] for way in ("to", "from")]
    selector.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listening:
                near, _ = listening.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", port))
                except OSError:
                    near.close()
                    continue
                spoiled, cut = rng.randrange(2), rng.randrange(wire.least, wire.most) if cuts > 0 else 0
                flip = rng.randrange(HANDSHAKE, wire.most) if flips > 0 else -1
                cuts, flips = cuts - 1, flips - 1
                for i, (source, to) in enumerate(((near, far), (far, near))):
                    way = _Way(source, to, flip if i == spoiled else -1, cut if i == spoiled or wire.least > 1 else 0, rooms[i])
                    selector.register(source, selectors.EVENT_READ, way)
                continue
            way = key.data
            try:
                alive = way.carry()
            except OSError:
                alive = False
            if not alive:
                for link in (way.source, way.to):
                    try:
                        selector.unregister(link)
                    except (KeyError, ValueError):
                        pass
                    link.close()
