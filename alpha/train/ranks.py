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
        """What the first rank says, on all ranks."""
        if self.world is None:
            return text
        data = np.frombuffer(text.encode(), np.uint8) if self.first else np.empty(0, np.uint8)
        words = np.array([len(data)], np.int64)
        collectives.broadcast(self._group, words, words, root=0)
        whole = np.zeros(-(-int(words[0]) // 8), np.int64)
        whole.view(np.uint8)[: len(data)] = data
        collectives.broadcast(self._group, whole, whole, root=0)
        return whole.tobytes()[: int(words[0])].decode()

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

    def decide(self, executor: Executor, numbers: Mapping[str, float], asked: int) -> int:
        """After an update: one decision for all ranks, the largest of what each was asked (0: nothing).

        numbers: what the update gave out. RankError naming rank, tensor and step where these, or the parameters, are not the same
        everywhere.
        """
        if self.world is None:
            return asked
        digest, kind = xxhash.xxh3_64(), held_by_all(executor.program)
        for piece in _pieces(executor, kind):
            digest.update(piece)
        for name in sorted(numbers):
            digest.update(np.float64(numbers[name]).tobytes())
        own = np.array([np.uint64(digest.intdigest()).view(np.int64), asked], np.int64)
        every = np.empty((self.size, 2), np.int64)
        with executor.recorder.span("comm"):
            collectives.all_gather(self._group, own, every)
        if (every[:, 0] != every[0, 0]).any():
            self._name_difference(executor.look(kind), executor.program.states[kind], numbers)
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


def _pieces(executor: Executor, kind: str) -> Iterator[memoryview | bytes]:
    """What a hash of a kind of state takes in: the host's memory itself, or the hashes that a device makes of its own."""
    digests = executor.digests
    if not digests.late:
        flat = executor.look(kind)
        yield flat.data
        return
    made = [digests.of_state(kind, start) for start in range(0, digests.nbytes(kind), digests.piece)]
    digests.wait()
    yield from (digests.read(one) for one in made)
