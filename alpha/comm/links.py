"""What each pair of ranks takes for a message, measured when a job starts. Floor 4."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from alpha.comm import collectives
from alpha.comm.group import Group
from alpha.comm.rule import Rule
from alpha.comm.world import WORLD, World

SMALL, LARGE = 1, 1 << 18
"""Elements (f32) of the two messages that are timed: one line, and four of the longest messages."""
ADDED = 1 << 21
"""Elements (f32) whose sum is timed: 8 MiB, of many messages."""
_TIMES = {SMALL: 20, LARGE: 4}


@dataclass(frozen=True)
class Links:
    """latency: f64[size, size], seconds of an empty message; inverse_bandwidth: f64[size, size], seconds per byte; zeros on the diagonal.
    addition: f64[size], seconds per byte that each rank adds, beyond those of a copy. message: bytes of the longest message. hosts: of each
    rank, the first rank of its host.

    All ranks hold the same numbers, those of the lower rank of each pair.
    """

    latency: np.ndarray
    inverse_bandwidth: np.ndarray
    addition: np.ndarray
    message: int
    hosts: tuple[int, ...]

    def rule(self) -> Rule:
        """By the slowest pair and the slowest rank: a collective is as slow as that. Of several hosts also by the slowest pair in one."""
        if len(self.latency) < 2:
            return Rule(message=self.message)
        found = Rule(float(self.latency.max()), float(self.inverse_bandwidth.max()), float(self.addition.max()), self.message)
        if len(set(self.hosts)) == 1:
            return found
        near = np.equal.outer(self.hosts, self.hosts)
        return replace(found, hosts=self.hosts, near_latency=float(self.latency[near].max()),
                       near_inverse_bandwidth=float(self.inverse_bandwidth[near].max()))


def measure(world: World) -> Links:
    """Time every pair, one after the other while the others wait, and give all ranks all results. Some milliseconds a pair.

    The median of round trips, halved: of one element for the latency, of LARGE for the bandwidth.
    """
    group, found = world.group(WORLD), np.zeros((2, world.size, world.size))
    message = group.transport.payload_bytes
    addition = _addition(message)
    for low in range(world.size):
        for high in range(low + 1, world.size):
            if group.index in (low, high):
                small, large = (_round_trip(group, low, high, n) for n in (SMALL, LARGE))
                found[:, low, high] = small, max(large - small, 1e-12) / (4 * LARGE)
            collectives.barrier(group)
    every, additions, hosts = np.empty((world.size, *found.shape)), np.empty(world.size), np.empty(world.size, np.int32)
    collectives.all_gather(group, found, every, algorithm="direct")
    collectives.all_gather(group, np.array([addition]), additions, algorithm="direct")
    collectives.all_gather(group, np.array([world.here.start], np.int32), hosts, algorithm="direct")
    for low in range(world.size):
        for high in range(low + 1, world.size):
            found[:, low, high] = found[:, high, low] = every[low, :, low, high]
    return Links(found[0], found[1], additions, message, tuple(hosts.tolist()))


def _addition(message: int) -> float:
    """The fastest sum of ADDED elements with messages less the fastest copy of those, which moving them costs anyway.

    A sum is what an algorithm makes it: operand, message and result are three arrays, operands and results are longer than a core's cache,
    and whatever is no number gets its one pattern.
    """
    x, out, fastest = np.ones(ADDED, np.float32), np.ones(ADDED, np.float32), [np.inf, np.inf]
    came = np.ones(message // x.itemsize, np.float32)

    def added(own: np.ndarray, result: np.ndarray) -> None:
        np.add(own, came[: own.size], out=result)
        collectives.canonical(result)

    def copied(own: np.ndarray, result: np.ndarray) -> None:
        result[...] = came[: own.size]

    for _ in range(_TIMES[LARGE]):
        for i, run in enumerate((added, copied)):
            start = time.perf_counter()
            for at in range(0, ADDED, came.size):
                run(x[at : at + came.size], out[at : at + came.size])
            fastest[i] = min(fastest[i], time.perf_counter() - start)
    return max(fastest[0] - fastest[1], 0.0) / x.nbytes


def _round_trip(group: Group, low: int, high: int, count: int) -> float:
    x, times = np.zeros(count, np.float32), []
    other = high if group.index == low else low
    for _ in range(_TIMES[count]):
        start = time.perf_counter()
        if group.index == low:
            collectives.send(group, x, to=other)
            collectives.receive(group, x, source=other)
        else:
            collectives.receive(group, x, source=other)
            collectives.send(group, x, to=other)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) / 2
