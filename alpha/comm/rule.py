"""Which algorithm a collective runs: a rule over what was measured, recorded as data, and the same on all ranks. Floor 4.

Costs are those of the latency-bandwidth-computation model: a message of n bytes takes a + b n seconds of a rank's time (Hockney, The
communication challenge for MPP, Parallel Computing 20(3), 1994), adding n bytes to others c n seconds more than copying them; counts as in
Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005. Where members add, each
message is answered by one before the next block, so every message of a long operand takes the latency; what is only moved streams. The
choice moves no bit of a result.

Over several hosts what goes between them has another price than what stays. An algorithm that adds, or gathers, inside each host first
sends between hosts what one member of each host owns: of m members on a host it moves 1/m of the bytes of `direct` there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from alpha.comm.segment import PAYLOAD_BYTES

COSTS: Mapping[str, Mapping[str, Callable[[int, int, Rule], float]]] = {
    "all_reduce": {
        "direct": lambda p, n, r: (p - 1) * (2 * r.latency * r.messages(n / p) + n / p * (2 * r.inverse_bandwidth + r.addition)),
        "whole": lambda p, n, r: (p - 1) * (r.latency * r.messages(n) + n * (r.inverse_bandwidth + r.addition)),
        "halving": lambda p, n, r: 2 * r.latency * _halved(p, n, r) + ((1 - 1 / p) + _odd(p)) * n * (2 * r.inverse_bandwidth + r.addition),
    },
    "reduce_scatter": {"direct": lambda p, n, r: (p - 1) * (r.latency + n / p * r.inverse_bandwidth)},
    "all_gather": {
        "direct": lambda p, n, r: (p - 1) * (r.latency + n * r.inverse_bandwidth),
        "ring": lambda p, n, r: (p - 1) * (r.latency + n * r.inverse_bandwidth),
    },
    "broadcast": {
        "direct": lambda p, n, r: (p - 1) * (r.latency + n * r.inverse_bandwidth),
        "halving": lambda p, n, r: (p - 1).bit_length() * (r.latency + n * r.inverse_bandwidth),
        "ring": lambda p, n, r: (p - 1) * r.latency + 2 * n * r.inverse_bandwidth,
    },
}
"""op -> algorithm -> seconds for p members and an operand of n bytes. A rank sends, receives and adds with one thread. Recursive halving of
a number of members that is no power of two moves the operand once more each way."""


FLAT = ("direct", "whole")
"""Algorithms in which each member deals with every other one."""


def _across(op: str, p: int, m: int, n: int, r: Rule) -> dict[str, float]:
    """algorithm -> seconds for p members, m on each host. A flat algorithm has m - 1 of p - 1 others near; a ring is as slow as its slowest
    way; recursive halving does the steps inside a host first. `hosts` of a sum is `direct` inside and recursive halving between; of a
    scatter it adds on the host what goes to each other one; of a gather it hands on inside what came from each."""
    costs, k = COSTS[op], p // m
    near = replace(r, latency=r.near_latency, inverse_bandwidth=r.near_inverse_bandwidth)
    found = {name: ((m - 1) * costs[name](p, n, near) + (p - m) * costs[name](p, n, r)) / (p - 1) for name in costs if name in FLAT}
    if "ring" in costs:
        slow = replace(r, latency=max(r.latency, near.latency), inverse_bandwidth=max(r.inverse_bandwidth, near.inverse_bandwidth))
        found["ring"] = costs["ring"](p, n, slow)
    if op == "all_reduce":
        between = costs["halving"](k, -(-n // m), r)
        return {**found, "hosts": costs["direct"](m, n, near) + between, "halving": costs["halving"](m, n, near) + between}
    if op == "broadcast":
        return {**found, "halving": costs["halving"](k, n, r) + costs["halving"](m, n, near)}
    inside, between = (k * costs["direct"](m, n // k, near), costs["direct"](k, n // m, r)) if op == "reduce_scatter" else \
        (k * costs["direct"](m, n, near), costs["direct"](k, n, r))
    return {**found, "hosts": inside + between}


def _halved(p: int, n: int, r: Rule) -> int:
    """Messages each way of recursive halving."""
    return sum(r.messages(n / 2 ** (k + 1)) for k in range(p.bit_length() - 1)) + _odd(p) * r.messages(n)


def _odd(p: int) -> bool:
    return p & (p - 1) > 0


@dataclass(frozen=True)
class Rule:
    """The slowest pair's `latency` (seconds per message) and `inverse_bandwidth` (seconds per byte), and the slowest rank's `addition`
    (seconds per byte that it adds, beyond those of a copy). `message`: bytes of the longest message. The defaults are a laptop's.

    `hosts`: the host of each rank, () where all are on one; `near_latency`, `near_inverse_bandwidth`: of the slowest pair on one host."""

    latency: float = 20e-6
    inverse_bandwidth: float = 3e-10
    addition: float = 4e-11
    message: int = PAYLOAD_BYTES
    hosts: tuple[int, ...] = ()
    near_latency: float = 0.0
    near_inverse_bandwidth: float = 0.0

    def choose(self, op: str, members: int, nbytes: int, together: int = 1) -> str:
        """The algorithm that is expected to be done first; of equal ones the first in COSTS. 'direct' where there is one only. `together`:
        members on each host."""
        if op not in COSTS or members == 1:
            return "direct"
        if 1 < together < members:
            costs = _across(op, members, together, nbytes, self)
        else:
            costs = {name: cost(members, nbytes, self) for name, cost in COSTS[op].items()}
        return min(costs, key=lambda name: costs[name])

    def together(self, members: Sequence[int]) -> int:
        """How many members (ranks) each host has, where their sums are subtrees of the tree of all: a power of two that is the same on all
        hosts, one after the other. Else 1: each is on its own. All of them where there is one host."""
        if not self.hosts:
            return len(members)
        runs = [(host, len(list(found))) for host, found in groupby(self.hosts[rank] for rank in members)]
        count = runs[0][1]
        alike = len(dict(runs)) == len(runs) and all(n == count for _, n in runs)
        return count if alike and (len(runs) == 1 or not _odd(count)) else 1

    def messages(self, nbytes: float) -> int:
        """In which so many bytes travel: one even for nothing."""
        return max(1, math.ceil(nbytes / self.message))

    def limits(self, op: str, members: int) -> list[tuple[int, str]]:
        """What is recorded: (fewest bytes, algorithm) at each power of two where the choice changes."""
        found: list[tuple[int, str]] = []
        for nbytes in (0, *(1 << k for k in range(31))):
            name = self.choose(op, members, nbytes, self.together(range(members)))
            if not found or found[-1][1] != name:
                found.append((nbytes, name))
        return found

    def text(self, members: int) -> str:
        """What was measured, and the rule that follows: '... ns a byte; all_reduce whole, from 4,096 bytes direct; ...'."""
        rules = [f"{op} " + ", ".join(f"from {n:,} bytes {name}" if n else name for n, name in self.limits(op, members)) for op in COSTS]
        near = f" ({1e6 * self.near_latency:.1f} us + {1e9 * self.near_inverse_bandwidth:.3f} ns inside a host)" if self.hosts else ""
        return f"{1e6 * self.latency:.1f} us + {1e9 * self.inverse_bandwidth:.3f} ns a byte{near}, " \
               f"{1e9 * self.addition:.3f} ns more where it is added; {'; '.join(rules)}"
