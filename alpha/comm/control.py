"""The block in which all ranks of a job see each other: states, progress, who waits for whom, errors. Floor 4.

A word is 8 bytes, aligned, and has one writer; x86-64 and Arm store and load such a word whole. Errors are told by text first, flag last.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

ABSENT, JOINED, LEFT = 0, 1, 2
"""States of a rank."""

_WORDS = 24
_TEXT = 1024
_MOST = 2**64 - 1
RANK_BYTES = 8 * _WORDS + _TEXT

(_STATE, _PID, _HEARTBEAT, _PROGRESS, _WAITS_FOR, _GROUP, _CALL, _OP, _STEP, _PATIENCE, _ERROR, _CULPRIT, _LENGTH, _NOW, _FAILED, _SERVED,
 _FROZEN) = range(17)
_TIMES = (_HEARTBEAT, _PATIENCE, _ERROR)


@dataclass(frozen=True)
class Failure:
    """The first error of a job, or the error of one rank. `teller`: the rank that told it; `rank`: the one at fault, -1 where none is;
    `when`: nanoseconds of CLOCK_MONOTONIC, which all ranks of a host share."""

    teller: int
    rank: int
    op: str
    step: int
    when: int
    text: str


class Control:
    """The control block over `memory` at `start`: one record of RANK_BYTES for each of `size` ranks, and before them a flag for each.

    Each rank writes its own record and flag alone; those of ranks on other hosts this host's bridge writes, from what it is told there.
    `here`: the ranks of this host.
    """

    def __init__(self, memory: mmap.mmap, start: int, size: int, here: range | None = None) -> None:
        self.size, self.here = size, range(size) if here is None else here
        self._flags = memoryview(memory)[start : start + size]
        self._clear = bytes(size)
        at = start + flags_bytes(size)
        self._words = [memoryview(memory)[at + r * RANK_BYTES : at + r * RANK_BYTES + 8 * _WORDS].cast("Q") for r in range(size)]
        self._texts = [memoryview(memory)[at + r * RANK_BYTES + 8 * _WORDS : at + (r + 1) * RANK_BYTES] for r in range(size)]

    def join(self, rank: int, pid: int) -> None:
        """This rank is there."""
        words = self._words[rank]
        words[_PID], words[_HEARTBEAT] = pid, time.monotonic_ns()
        words[_STATE] = JOINED

    def leave(self, rank: int) -> None:
        """This rank has nothing more to do with the others."""
        self._words[rank][_STATE] = LEFT

    def state(self, rank: int) -> int:
        """ABSENT, JOINED or LEFT."""
        return self._words[rank][_STATE]

    def pid(self, rank: int) -> int:
        """The process of a rank that has joined."""
        return self._words[rank][_PID]

    def beat(self, rank: int) -> None:
        """This rank's process runs."""
        self._words[rank][_HEARTBEAT] = time.monotonic_ns()

    def heartbeat(self, rank: int) -> int:
        """When it last did, nanoseconds of CLOCK_MONOTONIC."""
        return self._words[rank][_HEARTBEAT]

    def advance(self, rank: int) -> None:
        """This rank has got on: a message sent or taken, a launch run."""
        words = self._words[rank]
        words[_PROGRESS] = words[_PROGRESS] + 1

    def progress(self, rank: int) -> int:
        """How often it has."""
        return self._words[rank][_PROGRESS]

    def at(self, rank: int, group: int, call: int, op: int, step: int) -> None:
        """The collective that this rank is in."""
        words = self._words[rank]
        words[_GROUP], words[_CALL], words[_OP], words[_STEP] = group, call, op, step + 1  # words have no sign

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """(group, call, op, step) of the collective that a rank is in or was in last; step -1 before the first."""
        words = self._words[rank]
        return words[_GROUP], words[_CALL], words[_OP], words[_STEP] - 1

    def begin(self, rank: int, step: int) -> None:
        """This rank begins a training step."""
        self._words[rank][_NOW] = step + 1

    def step(self, rank: int) -> int:
        """The step that a rank is in, whether or not it ran a collective there yet; -1 before the first."""
        return self._words[rank][_NOW] - 1

    def wait(self, rank: int, other: int | None) -> None:
        """This rank waits for another one, or for none."""
        self._words[rank][_WAITS_FOR] = 0 if other is None else other + 1

    def waits_for(self, rank: int) -> int | None:
        """Whom a rank waits for."""
        other = self._words[rank][_WAITS_FOR]
        return other - 1 if other else None

    def be_patient(self, rank: int, until: int) -> None:
        """This rank asks the others to wait until a time (nanoseconds of CLOCK_MONOTONIC): it saves or compiles. 0: no longer."""
        self._words[rank][_PATIENCE] = until

    def patience(self, rank: int) -> int:
        """The time that a rank asked for, 0 for none."""
        return self._words[rank][_PATIENCE]

    def serve(self, rank: int, ns: int, frozen: bool) -> None:
        """For how long the machine served a rank, and whether its process is stopped: what only its own host sees."""
        words = self._words[rank]
        words[_SERVED], words[_FROZEN] = ns, frozen

    def served(self, rank: int) -> int:
        """Of a rank on another host: nanoseconds in which that machine served it, since it joined."""
        return self._words[rank][_SERVED]

    def frozen(self, rank: int) -> bool:
        """Of a rank on another host: its process is stopped."""
        return self._words[rank][_FROZEN] != 0

    def record(self, rank: int) -> bytes:
        """All words of a rank, and the text of its error if it told one: what another host is told."""
        words = self._words[rank]
        flag = self._flags[rank]
        return bytes([flag]) + bytes(words) + (bytes(self._texts[rank][: words[_LENGTH]]) if flag else b"")

    def mirror(self, rank: int, record: bytes, ahead: int) -> None:
        """Keep what another host said of a rank of its own. `ahead`: nanoseconds that its clock is ahead of this one's. ValueError for what
        is no record."""
        text = record[1 + 8 * _WORDS :]
        if len(record) < 1 + 8 * _WORDS or len(text) > _TEXT:
            raise ValueError(f"a record of {len(record)} bytes")
        told = struct.unpack_from(f"<{_WORDS}Q", record, 1)
        if len(text) != record[0] * told[_LENGTH] or record[0] > 1:
            raise ValueError(f"a record whose text has {len(text)} bytes, and says {told[_LENGTH]}")
        words = self._words[rank]
        for i, word in enumerate(told):
            words[i] = max(1, word - ahead) & _MOST if word and i in _TIMES else word
        if record[0] and not self._flags[rank]:
            self._texts[rank][: len(text)] = text
            self._flags[rank] = 1

    def fail(self, failure: Failure) -> None:
        """Tell the error of rank `failure.teller`, once; what it tells later is not heard."""
        rank = failure.teller
        if self._flags[rank]:
            return
        op, text = failure.op.encode()[:64], failure.text.encode()
        told = bytes([len(op)]) + op + text[: _TEXT - 1 - len(op)]
        self._texts[rank][: len(told)] = told
        words = self._words[rank]
        words[_LENGTH], words[_CULPRIT], words[_FAILED] = len(told), failure.rank + 1, failure.step + 1
        words[_ERROR] = failure.when
        self._flags[rank] = 1

    def failed(self) -> bool:
        """Whether any rank has told an error: one comparison, for every turn of every wait."""
        return self._flags != self._clear

    def failures(self) -> list[Failure]:
        """The errors of all ranks, the earliest first."""
        found = []
        for rank in range(self.size):
            if self._flags[rank]:
                words = self._words[rank]
                told = bytes(self._texts[rank][: words[_LENGTH]])
                op, text = told[1 : 1 + told[0]], told[1 + told[0] :]
                found.append(Failure(rank, words[_CULPRIT] - 1, op.decode("utf-8", "replace"), words[_FAILED] - 1, words[_ERROR],
                                     text.decode("utf-8", "replace")))
        return sorted(found, key=lambda f: f.when)


def flags_bytes(size: int) -> int:
    """Bytes of the flags, up to the next cache line."""
    return -(-size // 64) * 64


def control_bytes(size: int) -> int:
    """Bytes of the whole block."""
    return flags_bytes(size) + size * RANK_BYTES
