"""Processes that are asked together, each a rank of one job: ours or a peer's. Floor 8.

Every rank answers by itself (alpha/profile/served.py), so that one that dies, fails or falls silent is known by its number. Ranks wait for
each other: where one is lost, the others are ended at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from alpha.bench.peer import Listed
from alpha.profile.served import PATIENCE, Served, ServedError
from alpha.train import forbidden

LOOK_S = 1e-3
"""How often `meanwhile` is called."""


class Team:
    """One process for each rank. Use as a context manager: all end with the block.

    `commands`, `environments`: of each rank. `foreign`: the processes hold a peer's library. ServedError where one does not start.
    """

    def __init__(self, name: str, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], *, foreign: bool) -> None:
        self.name, self.ranks = name, list[Served]()
        self._asking = ThreadPoolExecutor(len(commands), thread_name_prefix="alpha-team")
        try:
            for rank, (command, environment) in enumerate(zip(commands, environments, strict=True)):
                if foreign:
                    forbidden.starts_peer()
                self.ranks.append(Listed(f"rank {rank} of {name}", command, environment))
                if foreign:
                    forbidden.starts_peer(self.ranks[-1].pid)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    def ask(self, do: str, *, patience: float = PATIENCE, meanwhile: Callable[[], object] | None = None, most: int | None = None,
            **arguments: Any) -> list[Any]:
        """What every rank answers to one request, in order; `most`: the first so many alone. `meanwhile`: called again and again until all
        have.

        ServedError with the words of the first rank that failed, died or gave no answer for `patience` seconds; then no rank is left.
        """
        if not self.ranks:
            raise ServedError(f"{self.name} was ended", came="an earlier failure of a rank")
        asked: list[Future[Any]] = [self._asking.submit(r.ask, do, patience=patience, **arguments) for r in self.ranks[:most]]
        left = set(asked)
        while left:
            done, left = wait(left, LOOK_S if meanwhile is not None else None, FIRST_EXCEPTION)
            failed = [f for f in asked if f in done and f.exception() is not None]
            if failed:
                self._end()
                wait(asked)
                self.close()
                raise _worst([f.exception() for f in failed])
            if meanwhile is not None:
                meanwhile()
        return [f.result() for f in asked]

    def _end(self) -> None:
        """Kill what still runs; who waits for an answer then sees its end."""
        for r in self.ranks:
            r._process.kill()

    def close(self) -> None:
        """End all ranks."""
        self._end()
        self._asking.shutdown()
        for r in self.ranks:
            r.__exit__(None, None, None)
        self.ranks = []

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _worst(errors: Sequence[BaseException | None]) -> BaseException:
    """The one that says most: an error in words comes before a process that is gone, which may have ended because of the other."""
    found = [e for e in errors if e is not None]
    return next((e for e in found if isinstance(e, ServedError) and "failed at" in e.what), found[0])
