"""What an executor needs of the World that it is handed (alpha/comm/world.py, which no back end imports). Floor 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from alpha.errors import RankError


class World(Protocol):
    """One rank among the ranks of a job. `place.source`: the model's line that the calling thread runs, for errors and the flight recorder.

    `advance` tells the others that this rank gets on, and raises RankError if any rank has failed. Binders of collectives find it as
    `cpu.world`.
    """

    rank: int
    size: int
    place: Any

    def advance(self) -> None: ...


class DeviceWorld(World, Protocol):
    """What an executor of a device needs beyond that: `exchange` carries words to all ranks once, before they run; `until` looks after the
    others while a device waits for them; `fail` tells what only the device saw."""

    step: int

    def exchange(self, words: bytes) -> list[bytes]: ...
    def until(self, ready: Callable[[], bool], op: str, rest: Callable[[float], object]) -> None: ...
    def fail(self, error: RankError) -> RankError: ...
