"""What a collective needs of the links between the members of one group. Floor 4.

A transport delivers whole messages between two members in the order in which they were sent, or says who failed. It never delivers a
message of another job, epoch, group or collective, nor one whose checksum is wrong. Shared memory is one (alpha/comm/shm.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from alpha.comm.message import About


class Transport(Protocol):
    """Links of one rank to the other members of one group; `to` and `source` are places among the members.

    Every wait is bounded, and ends with a RankError when a member dies, stops or disagrees, or when any rank has failed.
    """

    payload_bytes: int
    """Bytes of the longest message."""

    def send(self, to: int, about: About, chunk: int, payload: np.ndarray, *, kept: bool = False) -> None:
        """Hand over one message (u8[n], n <= payload_bytes); returns when `payload` may be written again. `kept`: it stays as it is until
        `done`, or until the member's answer to it has come."""

    def done(self, about: About) -> None:
        """The end of a collective: returns when all that was to be kept may be written again."""

    def withdraw(self) -> None:
        """The end of a collective that failed: from now on nothing is read or written where it was kept or expected."""

    def expect(self, source: int, outs: Sequence[np.ndarray | None]) -> None:
        """Where the next messages of a member belong (u8[n] each; None: wherever the transport holds it). They may be written from now
        on, in any order and more than once, until `receive` has given them; what it gives lies there or elsewhere."""

    def receive(self, source: int, about: About, chunk: int, nbytes: int) -> np.ndarray:
        """The next message of a member, checked: u8[nbytes] where the transport holds it, to read until `release`."""

    def release(self, source: int) -> None:
        """The message that `receive` gave has been read."""
