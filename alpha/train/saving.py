"""Saving beside training: a rank copies its cut of the state and trains on, while a thread writes the copy. One save at a time. Floor 6.

    begin    each rank copies what it writes
    open     the first rank makes the folder; the thread of each begins once the copy is there
    start    both
    poll     after each step: once all ranks have written, the first one's thread makes it a checkpoint; what the disk refused is raised
    finish   waits until it stands: before the next save, where a run ends, and where something has to stand at once

A copy of arrays is there when `begin` returns. One that comes from a device is there when the next step is over, for that step's update
waits for it; so `poll` finds it done, and the thread has no business with the device. `open` is what the host has to do for a save: where a
device computes beside it, it is called when there is much to compute.

All ranks call these alike. Between ranks nothing is said in threads: the loop asks, so collectives keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import folders, ranges
from alpha.checkpoint.disk import Disk
from alpha.errors import GraphError
from alpha.graph.state import StateLayout
from alpha.train.ranks import Ranks

Stands = tuple[int, Path]
"""Step and folder of a checkpoint."""


class Saver:
    """Saves into `folder`. `keep`, `every`: which checkpoints stay (folders.commit). `late`: how the state comes from a device; None: it
    lies in arrays. `ready`: called with the step before anything of a save is in the folder, raises where it may not be. There is one copy
    of what this rank writes, in memory of `copies`."""

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int = 2, every: int = 0, disk: Disk | None = None,
                 late: ranges.Copies | None = None) -> None:  # fmt: skip
        self.folder, self.ranks, self.keep, self.every, self.disk = folder, ranks, keep, every, disk or Disk()
        self.late, self.copies = late is not None, late or ranges.OfArrays()
        self.ready: Callable[[int], None] = lambda step: None
        self._pool = ThreadPoolExecutor(1, "save")
        self._begun: Callable[[], None] | None = None
        self._copying: Callable[[], None] | None = None
        self._written: Future[None] | None = None
        self._commit: Callable[[], Stands] | None = None
        self._made: Future[Stands] | None = None

    @property
    def writing(self) -> bool:
        """Whether a save is under way that some rank may still be writing; the same on all ranks."""
        return self.begun or self._copying is not None or self._written is not None

    @property
    def begun(self) -> bool:
        """Whether the state is being copied for a save that has not been opened."""
        return self._begun is not None

    def start(self, step: int, states: Mapping[str, tuple[StateLayout, ranges.Flat]], facts: Mapping[str, Any]) -> None:
        """Begin a save and open it."""
        self.begin(step, states, facts)
        self.open()

    def begin(self, step: int, states: Mapping[str, tuple[StateLayout, ranges.Flat]], facts: Mapping[str, Any]) -> None:
        """Copy `states` (arrays whole, or this rank's cut, or what stands for them) as they are now. GraphError unless the save before has
        been finished: its copy is still being written."""
        if self.writing or self._made is not None:
            raise GraphError("a save began before the last one was finished", came=f"step {step}", expected="one save at a time",
                             do="call finish first")
        copy, held = self.copy(states)
        self._begun = partial(self._open, step, states, facts, copy, held)

    def open(self) -> None:
        """Let the save that has begun be written beside what follows; nothing where none has."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()

    def _open(self, step: int, states: Mapping[str, tuple[StateLayout, ranges.Flat]], facts: Mapping[str, Any], copy: np.ndarray,
              held: tuple[ranges.Held, ...]) -> None:  # fmt: skip
        rank, size = self.ranks.rank, self.ranks.size
        self.ready(step)
        with self.ranks.patient():
            temporary = Path(self.ranks.hear(str(folders.begin(self.folder, step, disk=self.disk)) if self.ranks.first else ""))
        layouts = {kind: layout for kind, (layout, _) in states.items()}

        def commit() -> Stands:
            return step, folders.commit(temporary, step, layouts, size, facts, keep=self.keep, every=self.every, disk=self.disk)

        def write() -> None:
            self.copies.wait()
            self._copying = None
            self._written = self._pool.submit(partial(folders.write, temporary, rank, size, copy, held, disk=self.disk))

        self._commit, self._copying = commit, write
        if not self.late:
            write()

    def copy(self, states: Mapping[str, tuple[StateLayout, ranges.Flat]]) -> tuple[np.ndarray, tuple[ranges.Held, ...]]:
        """The copy of what this rank writes, u8[bytes of its file], in the memory of the one before, and what lies where in it. It is there
        once `copies` has been waited for."""
        return ranges.image(states, self.ranks.rank, self.ranks.size, self.copies)

    def poll(self) -> Stands | None:
        """After a step: go on with the save under way. On the first rank what stands now, told once. What the disk refused is raised."""
        if self._copying is not None:
            self._copying()
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
            self.open()
            if self._copying is not None:
                self._copying()
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
        self._begun = self._copying = self._written = self._made = None

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
