"""What the ranks of a run do together beside their Program: decide, compare, take turns. One rank waits for nobody. Floor 6."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import xxhash

from alpha.comm import collectives
from alpha.comm.agree import agree
from alpha.comm.group import Group
from alpha.comm.world import WORLD, World
from alpha.graph.plan import Program
from alpha.graph.state import StateLayout
from alpha.train.engine import Executor

PATIENCE_S = 600.0
"""Longest that the others wait for a rank that saves, samples, or looks at the run."""

STARTING_S = 3600.0
"""Longest that ranks wait for one that prepares data, runs gates or builds its Program."""


class Ranks:
    """This rank of a run among the others. `world` None: it is the only one. `first`: it admits, saves, samples and speaks."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world
        self.rank = world.rank if world else 0
        self.size: int = world.size if world else 1
        self.first = self.rank == 0
        self.here: range = world.here if world else range(1)
        """The ranks of this host."""
        self.ahead = False
        """Whether all ranks said in `decide` that they may hand over a step ahead: what one alone hands over waits for the others."""
        self._hashes: _Hashes | None = None

    @property
    def _group(self) -> Group:
        assert self.world is not None, "one rank has nobody to ask"
        return self.world.group(WORLD)

    # -- time ------------------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A step begins: errors and the flight recorder name it. RankError if any rank has failed."""
        if self.world:
            self.world.step = step
            self.world.advance()

    @contextmanager
    def patient(self, seconds: float = PATIENCE_S) -> Iterator[None]:
        """Within it the others wait for this rank for so long, whatever it does."""
        if self.world is None:
            yield
            return
        with self.world.patient(seconds):
            yield

    def meet(self) -> None:
        """Wait until all ranks have come here."""
        if self.world:
            collectives.barrier(self._group)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first rank runs the block alone, then all others do: they find what it left."""
        if not self.first:
            self.meet()
        with self.patient(STARTING_S):
            yield
        if self.first:
            self.meet()

    # -- words and numbers -----------------------------------------------------------------------------------------------------

    def hear(self, text: str) -> str:
        """What the first rank says, on all ranks: words, or a path, whatever bytes its names have."""
        if self.world is None:
            return text
        data = np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) if self.first else np.empty(0, np.uint8)
        words = np.array([len(data)], np.int64)
        collectives.broadcast(self._group, words, words, root=0)
        whole = np.zeros(-(-int(words[0]) // 8), np.int64)
        whole.view(np.uint8)[: len(data)] = data
        collectives.broadcast(self._group, whole, whole, root=0)
        return whole.tobytes()[: int(words[0])].decode("utf-8", "surrogateescape")

    def each(self, text: str) -> list[str]:
        """What every rank says, in order, on all ranks."""
        return [x.decode() for x in self.world.exchange(text.encode())] if self.world else [text]

    def share(self, rows: np.ndarray) -> np.ndarray:
        """f64[n, k] in which row i is that of rank i modulo the number of ranks, from arrays in which each rank filled its own rows."""
        if self.world is None:
            return rows
        every = np.empty((self.size, *rows.shape))
        collectives.all_gather(self._group, rows, every)
        at = np.arange(len(rows))
        return every[at % self.size, at]

    def all(self, holds: bool) -> bool:
        """Whether something holds on every rank."""
        if self.world is None:
            return holds
        every = np.empty(self.size, np.int64)
        collectives.all_gather(self._group, np.array([holds], np.int64), every)
        return bool(every.all())

    def hash(self, executor: Executor) -> None:
        """An update has just been handed over, and more will be before `decide`: hash what the update leaves, which is compared there. On a
        device this is enqueued, so what comes behind it changes nothing of it, and nobody waits for that."""
        if self.world is not None and executor.digests.late:
            executor.check(lambda: setattr(self, "_hashes", _Hashes(executor)))

    def decide(self, executor: Executor, numbers: Mapping[str, float], asked: int, ahead: bool = False) -> int:
        """After an update: one decision for all ranks, the largest of what each was asked (0: nothing). `ahead`: whether this rank may hand
        over a step ahead; `self.ahead` says whether all may.

        numbers: what the update gave out. RankError naming rank, tensor and step where these, or the parameters, are not the same
        everywhere.
        """
        if self.world is None:
            self.ahead = ahead
            return asked
        digest, kind, hashes = xxhash.xxh3_64(), held_by_all(executor.program), self._hashes
        self._hashes = None
        if executor.digests.late:
            for piece in (hashes or _Hashes(executor)).pieces():
                digest.update(piece)
        else:
            digest.update(executor.look(kind).data)
        for name in sorted(numbers):
            digest.update(np.float64(numbers[name]).tobytes())
        own = np.array([np.uint64(digest.intdigest()).view(np.int64), asked, ahead], np.int64)
        every = np.empty((self.size, 3), np.int64)
        with executor.recorder.span("comm"):
            collectives.all_gather(self._group, own, every)
        if (every[:, 0] != every[0, 0]).any():
            self._name_difference(executor.look(kind), executor.program.states[kind], numbers)
        self.ahead = bool(every[:, 2].all())
        return int(every[:, 1].max())

    def _name_difference(self, flat: np.ndarray, layout: StateLayout, numbers: Mapping[str, float]) -> None:
        facts = {f"parameter {t.name}": xxhash.xxh3_64_hexdigest(flat[layout.offsets[t.name] : layout.offsets[t.name] + t.size].tobytes())
                 for t in layout.tensors}
        facts |= {f"result {name}": repr(x) for name, x in numbers.items()}
        facts["what lies between tensors"] = xxhash.xxh3_64_hexdigest(flat.tobytes())
        assert self.world is not None
        agree(self._group, facts, f"rank {{rank}} has other bits than the others after step {self.world.step}",
              "start again from the last checkpoint; if it comes back, test the memory of this machine")


def held_by_all(program: Program) -> str:
    """The kind of state that all ranks have alike after a step: the parameters that the model reads."""
    return "param16" if "param" in program.sharded else "param"


class _Hashes:
    """What a device makes of what all ranks have alike: asked for when it is made, read later."""

    def __init__(self, executor: Executor) -> None:
        self._digests, kind = executor.digests, held_by_all(executor.program)
        self._made = [self._digests.of_state(kind, start) for start in range(0, self._digests.nbytes(kind), self._digests.piece)]
        self._wait = self._digests.behind()

    def pieces(self) -> Iterator[bytes]:
        """Their values; waits for them, and for nothing that was handed over since."""
        self._wait()
        yield from (self._digests.read(one) for one in self._made)
