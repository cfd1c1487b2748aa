"""What comes late: a count of an older frame, which another connection overtook, and ranks that end behind others."""

from __future__ import annotations

import pytest

from alpha.comm.line import CREDIT, Frame
from alpha.comm.watch import Deadlines
from alpha.gates.contracts.ranks.connections import ready, slow
from alpha.train import launch


@pytest.mark.parametrize("later", [1, 2, 3])
def test_an_overtaken_count_takes_nothing_back(later: int) -> None:
    """Room that was given once is not taken back: where nothing more comes that way, the sender would wait for it until the deadline."""
    with slow(streams=2) as ends:
        near, far = ends.lanes
        for sequence in range(3):
            ready(ends, sequence, b"x")
        for released in (later, later - 1):  # the second one was sent first, along the other connection
            frame = Frame(kind=CREDIT, channel=0, source=far.pair.peer ^ 1, to=near.pair.peer ^ 1, sequence=0, released=released, length=0)
            ends.streams[0]._take(near.pair.streams[released % 2], frame, memoryview(b""))
            assert near.out.released[0] == later


class Long:
    """A process that the machine served for an hour."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def look(self) -> float:
        return 3600e9


@pytest.mark.parametrize("ended,late", [({1, 2}, set()), ({0}, {1, 2}), ({0, 2}, {1}), (set(), set())])
def test_who_ends_behind_the_first_rank_is_late_and_the_first_rank_is_not(ended: set[int], late: set[int],
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone has work behind the last step: the last validation, samples, what it writes."""
    killed = []
    monkeypatch.setattr(launch, "Served", Long)
    monkeypatch.setattr(launch, "_send", lambda child, number: killed.append(child.rank))
    children = [launch._Child(rank, 0, 0, 0, status=0 if rank in ended else None) for rank in range(3)]
    launch._end_late(children, False, Deadlines())
    assert set(killed) == late and all(child.killed == (child.rank in late) for child in children)
