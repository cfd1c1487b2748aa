"""Saving beside training: a rank copies its cut of the state and trains on, while a thread writes the copy. One save at a time. Floor 6.

    start    the first rank makes the folder; each rank copies what it writes, and its thread begins
    poll     after each step: once all ranks have written, the first one's thread makes it a checkpoint; what the disk refused is raised
    finish   waits until it stands: before the next save, where a run ends, and where something has to stand at once

All ranks call these alike. Between ranks nothing is said in threads: the loop asks, so collectives keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import ranges, simple
from alpha.checkpoint.disk import Disk
from alpha.train.ranks import Ranks

Stands = tuple[int, Path]
"""Step and folder of a checkpoint."""


class Saver:
    """Saves into `folder`. `keep`, `every`: which checkpoints stay (simple.commit). It holds one copy of what this rank writes."""

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int = 2, every: int = 0, disk: Disk | None = None) -> None:
        self.folder, self.ranks, self.keep, self.every, self.disk = folder, ranks, keep, every, disk or Disk()
        self._pool = ThreadPoolExecutor(1, "save")
        self._copy: np.ndarray | None = None
        self._written: Future[None] | None = None
        self._commit: Callable[[], Stands] | None = None
        self._made: Future[Stands] | None = None

    @property
    def writing(self) -> bool:
        """Whether a save is under way that some rank may still be writing; the same on all ranks."""
        return self._written is not None

    def start(self, step: int, states: ranges.States, facts: Mapping[str, Any]) -> None:
        """Copy `states` (arrays whole, or this rank's cut), and write the copy beside what follows. The save before has been finished."""
        rank, size = self.ranks.rank, self.ranks.size
        with self.ranks.patient():
            temporary = Path(self.ranks.hear(str(simple.begin(self.folder, step, disk=self.disk)) if self.ranks.first else ""))
        copy, held = self.copy(states)
        layouts = {kind: layout for kind, (layout, _) in states.items()}

        def commit() -> Stands:
            return step, simple.commit(temporary, step, layouts, size, facts, keep=self.keep, every=self.every, disk=self.disk)

        self._commit = commit
        self._written = self._pool.submit(partial(simple.write, temporary, rank, size, copy, held, disk=self.disk))

    def copy(self, states: ranges.States) -> tuple[np.ndarray, tuple[ranges.Held, ...]]:
        """The copy of what this rank writes, u8[bytes of its file], in the memory of the one before, and what lies where in it."""
        self._copy, held = ranges.image(states, self.ranks.rank, self.ranks.size, self._copy)
        return self._copy, held

    def poll(self) -> Stands | None:
        """After a step: go on with the save under way. On the first rank what stands now, told once. What the disk refused is raised."""
        if self._written is not None:
            mine = self._written.done()
            if mine:
                self._wrote()
            if self.ranks.all(mine):
                self._all_wrote()
        return self._stands() if self._made is not None and self._made.done() else None

    def finish(self) -> Stands | None:
        """Wait on all ranks until the save under way stands; what `poll` returns, where it has not told it."""
        with self.ranks.patient():
            if self._written is not None:
                self._wrote()
                self.ranks.meet()
                self._all_wrote()
            made = self._stands() if self._made is not None else None
        self.ranks.meet()
        return made

    def rest(self) -> None:
        """Wait until this rank's thread does nothing, whatever became of the save: nobody writes into the run behind its end."""
        work: list[Future[Any]] = [future for future in (self._written, self._made) if future is not None]
        wait(work)
        self._written = self._made = None

    def _wrote(self) -> None:
        """Raise what writing raised."""
        assert self._written is not None
        self._written.result()

    def _all_wrote(self) -> None:
        self._written = None
        if self.ranks.first:
            assert self._commit is not None
            self._made = self._pool.submit(self._commit)

    def _stands(self) -> Stands:
        assert self._made is not None
        made, self._made = self._made, None
        return made.result()
