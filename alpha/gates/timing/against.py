"""The relative half between states of the code: is today's kernel slower than the same kernel of a pinned state? Floor 7.

The pinned best of a kernel is a state of the whole source tree, because wrapper, tiles and device code make its speed together: a folder
that holds one, or a git revision, which is unpacked. Each side runs in a process of its own that imports its own tree, binds the same timed
call with the same contents and answers blocks (against_server.py); blocks alternate in pairs of random order. Decision and line are those
of ab.py; the second look is two fresh processes. A tree whose gates lack what the server calls cannot be compared, and the error says so.

A comparison may be kept (`record`): it then binds the pinned code to today's, and today's stays claimable (registry/claims.py).

On the GPU the SM clock is read beside each block; a pair goes when either block was throttled, and where too many go the comparison is an
error, not a verdict. On the CPU both sides take turns on one core, so what slows one pair slows both of its blocks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from alpha.component import Component
from alpha.errors import InputError, MachineError
from alpha.flops.v1 import VERSION as FLOPS
from alpha.gates.subjects import fresh_nonce, make_record
from alpha.gates.timing import ab
from alpha.profile import noise
from alpha.profile.noise import ALPHA, ROUNDS, Interval, Verdict
from alpha.profile.served import Served
from alpha.registry.pins import Pins, binding, shipped_pins
from alpha.registry.record import Record

ROOT = Path(__file__).resolve().parents[3]
TREES = ROOT / ".alpha" / "trees"
SERVER = Path(__file__).with_name("against_server.py")


def tree_of(text: str) -> Path:
    """A folder that holds a source tree, or the unpacked tree of a git revision of this repository. InputError for neither."""
    folder = Path(text)
    if (folder / "alpha" / "__init__.py").is_file():
        return folder.resolve()
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise InputError("no such state of the code", came=text, expected="a folder with alpha/ in it, or a revision of this repository",
                         do="where there is no git, unpack the revision elsewhere and name the folder")
    target = TREES / found.stdout.strip()[:16]
    if not target.is_dir():
        TREES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=TREES) as part:
            whole = Path(part) / "tree"
            whole.mkdir()
            packed = subprocess.run([*git, "archive", found.stdout.strip()], capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", str(whole)], input=packed.stdout, check=True)
            (whole / ".alpha").mkdir(exist_ok=True)
            (whole / ".alpha" / "cubins").symlink_to(ROOT / ".alpha" / "cubins")  # named by digests of all that decides them
            os.replace(whole, target)
    return target


def outside() -> str:
    """PYTHONPATH without trees of Alpha, for processes that each import their own."""
    return os.pathsep.join(p for p in sys.path if p and not (Path(p) / "alpha" / "__init__.py").is_file())


@contextmanager
def _sides(tree: Path) -> Iterator[tuple[Served, Served]]:
    """(the pinned state, today's)."""
    environment = {**os.environ, "PYTHONPATH": outside()}
    with Served(str(tree), [sys.executable, str(SERVER), str(tree)], environment) as a, \
            Served("this tree", [sys.executable, str(SERVER), str(ROOT)], environment) as b:
        yield a, b


class Side(Protocol):
    """What answers for one side: a process (profile/served.py), or this one (operating.py)."""

    def ask(self, do: str, **more: Any) -> Any: ...


class Pairs:
    """Pairs of blocks of one call. `discarded`: those in which a side was throttled."""

    def __init__(self, sides: tuple[Side, Side] | tuple[Served, Served], component: str, case: str, nonce: str) -> None:
        """Bind the call on both sides. InputError where their calls differ."""
        self.sides, self.discarded, self._rng = sides, 0, np.random.default_rng(int(nonce[:8], 16))
        types = [side.ask("bind", component=component, case=case, nonce=nonce) for side in sides]
        if types[0] != types[1]:
            raise InputError("the two trees time other calls under one name", came=f"{case}: {types[0]}", expected=types[1],
                             do="compare with a state whose timed calls are today's")
        self._repeats = sides[0].ask("repeats", ns=ab.BLOCK_NS)

    def draw(self, n: int) -> list[float]:
        """Log ratios of today's time to the pinned state's, of the pairs that count among n. MachineError when too many were throttled."""
        readings: list[list[tuple[float | None, int]]] = [[], []]

        def arm(i: int) -> int:
            ns, mhz, reasons = self.sides[i].ask("block", repeats=self._repeats)
            readings[i].append((mhz, reasons))
            return round(ns)

        logs = np.array(noise.pairs_of(lambda: arm(0), lambda: arm(1), n, self._rng))
        if any(mhz is None for mhz, _ in readings[0]):
            return [float(x) for x in logs]
        bad = [noise.throttled_gpu([mhz if mhz is not None else float("nan") for mhz, _ in found], [r for _, r in found])
               for found in readings]
        kept = noise.keep(bad[0] | bad[1])
        self.discarded += kept.discarded
        if not kept.believed:
            raise MachineError("the GPU was throttled, so nothing can be said", came=f"{kept.discarded} of {n} pairs discarded",
                               expected="most pairs at full clock", do="let it cool, or find who else uses it")
        return [float(x) for x in logs[kept.mask]]


def compare(component: str, tree: Path) -> Iterator[tuple[str, Verdict, int]]:
    """(case, verdict, discarded pairs) of every call that both trees time. InputError if there is none, ServedError where a side fails."""
    nonce = fresh_nonce()
    with _sides(tree) as sides:
        both = [side.ask("cases", component=component, nonce=nonce) for side in sides]
        cases = [name for name in both[1] if name in both[0]]
        if not cases:
            raise InputError("the two trees have no timed call in common", came=f"{component}: {both[0]}", expected=f"of {both[1]}")
        for case in cases:
            pairs = Pairs(sides, component, case, nonce)
            verdict = ab.decide(pairs.draw, lambda case=case: _again(component, tree, case), family=len(cases))  # type: ignore[misc]
            yield case, verdict, pairs.discarded


def record(component: Component, tree: Path, found: Sequence[tuple[str, Verdict]], pins: Pins | None = None) -> Record:
    """Keep a comparison beside the pins: from then on it binds the pinned code to today's. InputError where the tree is not what is
    pinned, or nothing is."""
    pins = pins or shipped_pins()
    with _sides(tree) as sides:
        code = sides[0].ask("code", component=component.id)
    made = make_record(component, "perf", fresh_nonce(), len(found), [ab.case_of(verdict, case) for case, verdict in found], flops=FLOPS)
    pin = pins.of(made)
    if pin is None or dict(pin.code) != dict(code):
        raise InputError("the tree is not the pinned code", came=f"{component.id} of {tree.name}",
                         expected="the tree that was there when the kernel was pinned" if pin is not None else "a pinned kernel",
                         do=f"name that tree, or pin today's code: `alpha gate pin {component.id}`")
    made = replace(made, digests=binding(pin.code, made.digests))
    pins.save_relative(made)
    return made


def _again(component: str, tree: Path, case: str) -> Interval:
    """One interval from as many pairs as three rounds have, in fresh processes on fresh contents."""
    with _sides(tree) as sides:
        return noise.interval(Pairs(sides, component, case, fresh_nonce()).draw(ab.MOST), noise.share(ALPHA, rounds=ROUNDS))
