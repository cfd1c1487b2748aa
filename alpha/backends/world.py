"""What an executor needs of the World that it is handed (alpha/comm/world.py, which no back end imports). Floor 4."""

from __future__ import annotations

from typing import Any, Protocol


class World(Protocol):
    """One rank among the ranks of a job. `place.source`: the model's line that the calling thread runs, for errors and the flight recorder.

    `advance` tells the others that this rank gets on, and raises RankError if any rank has failed. Binders of collectives find it as
    `cpu.world`.
    """

    rank: int
    size: int
    place: Any

    def advance(self) -> None: ...
