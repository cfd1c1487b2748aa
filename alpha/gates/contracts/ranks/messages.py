"""Faults of messages between two ranks, planted in the memory between both ends of one link. Floor 7."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from alpha.comm.message import CHECKSUM, HEADER, SPACE, About
from alpha.comm.segment import Segment
from alpha.comm.shm import SharedMemory
from alpha.comm.watch import Deadlines, Watch
from alpha.errors import RankError

FAULTS = ("dropped", "truncated", "duplicated", "reordered", "flipped", "job", "epoch", "group", "call")
MESSAGES = 3


class Link:
    """Both ends of one link in this process, and the memory between them."""

    def __init__(self) -> None:
        self.segment = Segment.create(2, payload_bytes=4096, slots=4)
        self._at = self.segment.ring(0, 0, 1)
        self.stride = SPACE + 4096

    def fresh(self) -> None:
        """New ends over an empty ring, and no errors."""
        memory, control = self.segment.memory, self.segment.control
        memory[self._at : self._at + 128] = bytes(128)
        control._flags[:] = bytes(2)
        short = Deadlines(stall=0.001)
        self.sender, self.receiver = (SharedMemory(self.segment, Watch(control, r, short), 0, (0, 1)) for r in (0, 1))
        control.join(0, os.getpid())
        control.join(1, os.getpid())

    def slot(self, i: int) -> memoryview:
        start = self._at + 128 + i * self.stride
        return memoryview(self.segment.memory)[start : start + self.stride]

    def say(self, sent: int) -> None:
        self.segment.memory[self._at : self._at + 8] = sent.to_bytes(8, "little")


def plant(link: Link, fault: str, rng: np.random.Generator, sizes: list[int]) -> None:
    """One fault in a ring of MESSAGES messages."""
    i = int(rng.integers(MESSAGES))
    slot = link.slot(i)
    if fault == "dropped":
        for k in range(i, MESSAGES - 1):
            link.slot(k)[:] = bytes(link.slot(k + 1))
        link.say(MESSAGES - 1)
    elif fault == "truncated":
        keep = int(rng.integers(0, sizes[i]))
        before = bytes(slot[SPACE : SPACE + sizes[i]])
        slot[SPACE + keep : SPACE + sizes[i]] = bytes(sizes[i] - keep)
        if bytes(slot[SPACE : SPACE + sizes[i]]) == before:  # its end was zeros
            slot[SPACE + sizes[i] - 1] ^= 1
    elif fault == "duplicated":
        for k in reversed(range(i + 1, MESSAGES + 1)):
            link.slot(k)[:] = bytes(link.slot(k - 1))
        link.say(MESSAGES + 1)
    elif fault == "reordered":
        j = (i + int(rng.integers(1, MESSAGES))) % MESSAGES
        mine, other = bytes(slot), bytes(link.slot(j))
        slot[:], link.slot(j)[:] = other, mine
    elif fault == "flipped":
        places = [*range(HEADER.size + CHECKSUM.size), *range(SPACE, SPACE + sizes[i])]
        for place in rng.choice(places, size=int(rng.integers(1, 4)), replace=False):
            slot[int(place)] ^= 1 << int(rng.integers(8))


def faulty(link: Link, fault: str, rng: np.random.Generator) -> str:
    """Send, plant, receive: '' when the fault was seen and nothing wrong was delivered."""
    link.fresh()
    about = About("all_reduce", "f32", 7, 3, 1000, "direct", "sum")
    sizes = [int(rng.integers(1, 4097)) if rng.integers(4) else int(rng.integers(1, 9)) for _ in range(MESSAGES)]
    payloads = [rng.integers(0, 256, n).astype(np.uint8) for n in sizes]
    foreign = int(rng.integers(MESSAGES))
    for i, payload in enumerate(payloads):
        said = about
        if i == foreign and fault in ("job", "epoch"):
            setattr(link.sender, f"_{fault}", getattr(link.segment, fault) ^ 1 << int(rng.integers(32)))
        elif i == foreign and fault in ("group", "call"):
            said = replace(about, **{fault: getattr(about, fault) ^ 1 << int(rng.integers(32))})  # type: ignore[arg-type]
        link.sender.send(1, said, i, payload)
        link.sender._job, link.sender._epoch = link.segment.job, link.segment.epoch
    plant(link, fault, rng, sizes)
    try:
        for i, payload in enumerate(payloads):
            came = link.receiver.receive(0, about, i, payload.size)
            if came.tobytes() != payload.tobytes():
                return f"{fault}: message {i} was delivered wrong"
            link.receiver.release(0)
        if fault == "duplicated":  # one too many: the next collective's first message is not that
            link.receiver.receive(0, replace(about, call=4), 0, sizes[-1])
    except RankError as error:
        return "" if error.rank == 0 and error.op == "all_reduce" else f"{fault}: rank {error.rank} is named"
    return f"{fault}: nobody saw it"
