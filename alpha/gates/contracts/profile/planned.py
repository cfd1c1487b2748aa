"""Cases of the planned memory timeline (alpha/profile/live.py): drawn Plans, their values' lives known byte by byte. Floor 7."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold, differs
from alpha.gates.contracts.profile.support import Case
from alpha.graph.order import COMPUTE
from alpha.graph.plan import Launch, Memory, Plan, Ref
from alpha.profile.live import live_bytes
from alpha.types import TensorType


def _ref(start: int, stop: int, arena: str = "act") -> Ref:
    return Ref(arena, start, TensorType(((stop - start) // 4,), "f32"))


def planned(rng: np.random.Generator) -> Measured:
    """Values are written, read whole or in part, left over, overwritten or given out; scratch is one launch's; other arenas do not."""
    checks = []
    for _ in range(30):
        n, room = int(rng.integers(1, 14)), 4 * int(rng.integers(20, 60))
        needed = np.zeros((n, room), bool)  # launch, byte
        ins, outs = [list[Ref]() for _ in range(n)], [list[Ref]() for _ in range(n)]
        scratch: list[Ref | None] = [None] * n
        ends: list[tuple[int, int, int]] = []  # last launch that needs it, start, stop
        given: dict[str, Ref] = {}
        for i in range(n):
            for _ in range(int(rng.integers(0, 3))):
                start = 4 * int(rng.integers(0, room // 4 - 1))
                stop = 4 * int(rng.integers(start // 4 + 1, min(room // 4, start // 4 + 12) + 1))
                if any(last >= i and start < b and a < stop for last, a, b in ends):
                    continue  # its place is taken
                last = int(rng.integers(i, n))
                outs[i].append(_ref(start, stop))
                for reader in {last, *(int(x) for x in rng.integers(i, last + 1, 2))} - {i}:
                    a = start + 4 * int(rng.integers(0, (stop - start) // 4))
                    b = a + 4 * int(rng.integers(1, (stop - a) // 4 + 1))
                    ins[reader].append(_ref(start, stop) if rng.random() < 0.5 else _ref(a, b))  # a view of it
                if rng.random() < 0.15:
                    given[f"out{len(given)}"], last = _ref(start, stop), n - 1
                ends.append((last, start, stop))
                needed[i : last + 1, start:stop] = True
        for i in range(n):
            if rng.random() < 0.5:
                start = 4 * int(rng.integers(0, room // 4 - 1))
                scratch[i] = _ref(start, start + 4, "act" if rng.random() < 0.7 else "other")
                needed[i, start : start + 4] |= scratch[i].arena == "act"  # type: ignore[union-attr]
            ins[i].append(_ref(0, 8, "params"))
            outs[i].append(_ref(0, room, "grads"))
        given["loss"] = _ref(0, 4, "io")
        launches = tuple(Launch("add", "add.f32.cpu", tuple(ins[i]), tuple(outs[i]), {}, scratch[i], "", "forward", "", 0, 0, COMPUTE)
                         for i in range(n))
        got = live_bytes(Plan("drawn", launches, {}, given, {}, Memory(0, 0, 0)))
        checks.append(differs(f"{n} launches", got, needed.sum(axis=1).tolist()))
    checks.append(differs("no launch", live_bytes(Plan("none", (), {}, {}, {}, Memory(0, 0, 0))), []))
    return all_hold(checks)


PARITY: Sequence[tuple[str, Case]] = (("planned bytes", planned),)
