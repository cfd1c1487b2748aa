"""What a collective needs of the links between the members of one group. Floor 4.

A transport delivers whole messages between two members in the order in which they were sent, or says who failed. It never delivers a
message of another job, epoch, group or collective, nor one whose checksum is wrong. Shared memory is one (alpha/comm/shm.py).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from alpha.comm.message import About


class Transport(Protocol):
    """Links of one rank to the other members of one group; `to` and `source` are places among the members.

    Every wait is bounded, and ends with a RankError when a member dies, stops or disagrees, or when any rank has failed.
    """

    payload_bytes: int
    """Bytes of the longest message."""

    def send(self, to: int, about: About, chunk: int, payload: np.ndarray) -> None:
        """Hand over one message (u8[n], n <= payload_bytes); returns when `payload` may be written again."""

    def receive(self, source: int, about: About, chunk: int, nbytes: int) -> np.ndarray:
        """The next message of a member, checked: u8[nbytes] where the transport holds it, to read until `release`."""

    def release(self, source: int) -> None:
        """The message that `receive` gave has been read."""
