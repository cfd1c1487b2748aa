"""Which algorithm a collective runs: a rule over what was measured, recorded as data, and the same on all ranks. Floor 4.

Costs are those of the latency-bandwidth-computation model: a message of n bytes takes a + b n seconds of a rank's time (Hockney, The
communication challenge for MPP, Parallel Computing 20(3), 1994), adding n bytes to others c n seconds more than copying them; counts as in
Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005. The choice moves no bit of
a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

COSTS: Mapping[str, Mapping[str, Callable[[int, int, float, float, float], float]]] = {
    "all_reduce": {
        "direct": lambda p, n, a, b, c: (p - 1) * (2 * a + n / p * (2 * b + c)),
        "whole": lambda p, n, a, b, c: (p - 1) * (a + n * (b + c)),
        "halving": lambda p, n, a, b, c: 2 * _steps(p) * a + ((1 - 1 / p) + (p & (p - 1) > 0)) * n * (2 * b + c),
    },
    "reduce_scatter": {"direct": lambda p, n, a, b, c: (p - 1) * (a + n / p * b)},
    "all_gather": {"direct": lambda p, n, a, b, c: (p - 1) * (a + n * b), "ring": lambda p, n, a, b, c: (p - 1) * (a + n * b)},
    "broadcast": {
        "direct": lambda p, n, a, b, c: (p - 1) * (a + n * b),
        "halving": lambda p, n, a, b, c: _steps(p) * (a + n * b),
        "ring": lambda p, n, a, b, c: (p - 1) * a + 2 * n * b,
    },
}
"""op -> algorithm -> seconds for p members, an operand of n bytes, and a, b, c of the model. A rank sends, receives and adds with one
thread. Recursive halving of a number of members that is no power of two moves the operand once more each way."""


def _steps(p: int) -> int:
    return (p - 1).bit_length()


@dataclass(frozen=True)
class Rule:
    """The slowest pair's `latency` (seconds per message) and `inverse_bandwidth` (seconds per byte), and the slowest rank's `addition`
    (seconds per byte that it adds, beyond those of a copy). The defaults are a laptop's."""

    latency: float = 20e-6
    inverse_bandwidth: float = 3e-10
    addition: float = 2e-11

    def choose(self, op: str, members: int, nbytes: int) -> str:
        """The algorithm that is expected to be done first; of equal ones the first in COSTS. 'direct' where there is one only."""
        if op not in COSTS or members == 1:
            return "direct"
        a, b, c = self.latency, self.inverse_bandwidth, self.addition
        return min(COSTS[op], key=lambda name: COSTS[op][name](members, nbytes, a, b, c))

    def limits(self, op: str, members: int) -> list[tuple[int, str]]:
        """What is recorded: (fewest bytes, algorithm) at each power of two where the choice changes."""
        found: list[tuple[int, str]] = []
        for nbytes in (0, *(1 << k for k in range(31))):
            name = self.choose(op, members, nbytes)
            if not found or found[-1][1] != name:
                found.append((nbytes, name))
        return found

    def text(self, members: int) -> str:
        """What was measured, and the rule that follows: '... ns a byte; all_reduce whole, from 4,096 bytes direct; ...'."""
        rules = [f"{op} " + ", ".join(f"from {n:,} bytes {name}" if n else name for n, name in self.limits(op, members)) for op in COSTS]
        return f"{1e6 * self.latency:.1f} us + {1e9 * self.inverse_bandwidth:.3f} ns a byte, {1e9 * self.addition:.3f} ns more where it " \
               f"is added; {'; '.join(rules)}"
