"""Cases of the memory that ranks share: what it may be, what it costs where there is none, and its words, records and rings at their ends.
Floor 7.

What a system refuses is planted in the calls that it would refuse: no machine of a gate lacks memory on purpose.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from alpha.comm import shm
from alpha.comm.control import Control, Failure, control_bytes
from alpha.comm.flight import RECORDS
from alpha.comm.message import About
from alpha.comm.segment import CHANNELS, MOST_RANKS, MOST_STREAMS, PAYLOAD_BYTES, Segment
from alpha.comm.shm import LENT_BYTES, SharedMemory
from alpha.comm.watch import Deadlines, Watch
from alpha.component import Measured
from alpha.errors import GraphError, InputError, MachineError, RankError
from alpha.gates.contracts.edges import Edge, told


def measured(wrong: list[str], cases: int) -> Measured:
    """Nothing may be wrong."""
    return Measured(error=float(len(wrong)), bound=0.0, cases=cases, note=wrong[0][:120] if wrong else "")


def descriptors() -> set[str]:
    """What this process has open."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@contextmanager
def refused(module: Any, name: str, number: int) -> Iterator[None]:
    """The system refuses one call."""
    with mock.patch.object(module, name, side_effect=OSError(number, os.strerror(number))):
        yield


@contextmanager
def _without(module: Any, name: str) -> Iterator[None]:
    """A system that has no such call."""
    kept = getattr(module, name)
    delattr(module, name)
    try:
        yield
    finally:
        setattr(module, name, kept)


def segments(rng: np.random.Generator) -> Measured:
    """Which jobs have memory: numbers of ranks, connections and slots at both ends of their ranges; of more than eight ranks messages are
    shorter; what is no segment is not opened."""
    def made(size: int = 2, **more: Any) -> Callable[[], None]:
        return lambda: Segment.create(size, **more).close()

    def opened(head: bytes) -> Callable[[], Segment]:
        def call() -> Segment:
            with os.fdopen(os.memfd_create("no segment"), "r+b") as file:
                file.write(head)
                file.flush()
                return Segment(os.dup(file.fileno()))
        return call

    good, before = Segment.create(2), descriptors()
    head = os.pread(good.fd, 64, 0)
    version = bytes([head[8] + 1])
    edges: list[Edge] = [
        ("one rank", made(1), None, ()), ("the most ranks", made(MOST_RANKS), None, ()),
        ("no rank", made(0), InputError, ("number of ranks", "came:     0", "1 to 64")),
        ("a rank too many", made(MOST_RANKS + 1), InputError, ("number of ranks", "came:     65", "1 to 64")),
        ("one connection", made(streams=1), None, ()), ("the most connections", made(streams=MOST_STREAMS), None, ()),
        ("no connection", made(streams=0), InputError, ("number of connections", "came:     0", "1 to 16")),
        ("a connection too many", made(streams=MOST_STREAMS + 1), InputError, ("number of connections", "came:     17", "1 to 16")),
        ("short messages", made(payload_bytes=64, slots=2), None, ()),
        ("part of a cache line", made(payload_bytes=4096 + 32), InputError, ("whole cache lines", "4128 bytes, 4 slots", "64 bytes")),
        ("one slot", made(slots=1), InputError, ("two or more", "262144 bytes, 1 slots", "2 slots or more")),
        ("nothing", opened(b""), InputError, ("no segment", "magic 0x0, version 0")),
        ("part of a header", opened(head[:20]), InputError, ("no segment", "magic 0x0, version 0")),
        ("another file", opened(rng.bytes(64)), InputError, ("no segment", "expected: magic 0x616c706861, version 3")),
        ("another version", opened(head[:8] + version + head[9:]), InputError, ("no segment", "0x616c706861, version 4", "version 3")),
    ]
    found, wrong = told(*edges), list[str]()
    for size, payload in ((8, PAYLOAD_BYTES), (9, PAYLOAD_BYTES // 8)):
        segment = Segment.create(size)
        wrong += [] if segment.payload_bytes == payload else [f"messages of {size} ranks have {segment.payload_bytes} bytes"]
        segment.close()
    del segment  # what is mapped holds a descriptor of its own
    wrong += [f"{descriptors() - before} stay open"] if descriptors() - before else []
    good.close()
    return Measured(found.error + len(wrong), 0.0, len(edges) + 3, note=found.note or "; ".join(wrong))


def no_memory(rng: np.random.Generator) -> Measured:
    """A system without such memory, and one that has no descriptor, file, memory or address for it: it is said, and nothing stays open."""
    before, wrong = descriptors(), list[str]()
    cases: tuple[tuple[str, Callable[[], Any], tuple[str, ...]], ...] = (
        ("no call", lambda: _without(os, "memfd_create"), ("without a name", "linux", "Linux 5.3 or newer")),
        ("no descriptor", lambda: refused(os, "memfd_create", errno.EMFILE), ("cannot share memory", "Too many open files", "ulimit -n")),
        ("no file", lambda: refused(os, "ftruncate", errno.EFBIG), ("cannot share memory", "bytes of addresses: File too large", "-f)")),
        ("no memory", lambda: refused(os, "posix_fallocate", errno.ENOSPC), ("no memory for the ranks", "No space left", "fewer ranks")),
        ("no address", lambda: refused(mmap, "mmap", errno.ENOMEM), ("no address space", "Cannot allocate memory", "ulimit -v")),
    )
    for name, lacking, said in cases:
        with lacking():
            result = told((name, lambda: Segment.create(int(rng.integers(1, 9))), MachineError, said))
        wrong += [result.note] if result.error else []
        wrong += [f"{name}: {descriptors() - before} stay open"] if descriptors() - before else []
    segment = Segment.create(2)
    with refused(os, "posix_fallocate", errno.ENOSPC):
        result = told(("a ring", lambda: segment.ring(1, 0, 1), MachineError, ("no memory for the ranks", f"{segment.ring_size:,} bytes")))
    wrong += [result.note] if result.error else []
    wrong += [] if segment.ring(1, 0, 1) == segment.ring_at(1, 0, 1) else ["a ring that has memory by now lies elsewhere"]
    segment.close()
    return measured(wrong, len(cases) + 2)


def blocks(rng: np.random.Generator) -> Measured:
    """A control block of which nobody says who is here is of ranks that all are. What another host says of a rank is kept whole or not at
    all: a flag that is none and a text of another length leave no trace."""
    wrong, size = list[str](), int(rng.integers(1, MOST_RANKS))
    alone = Control(mmap.mmap(-1, control_bytes(size)), 0, size)
    wrong += [] if alone.here == range(size) else [f"of {size} ranks {alone.here} are here"]
    one, other = (Segment.create(2) for _ in range(2))
    one.control.join(0, int(rng.integers(1, 1 << 20)))
    quiet, there = one.control.record(0), other.control.record(0)
    one.control.fail(Failure(0, 1, "barrier", 3, 7, "told"))
    loud = one.control.record(0)
    for name, record in (("a flag that is none", b"\2" + quiet[1:]), ("a flag of a text that is not there", b"\1" + loud[1:-1]),
                         ("a text without a flag", b"\0" + loud[1:]), ("a text that is longer", loud + b"x")):
        try:
            other.control.mirror(0, record, 0)
            wrong.append(f"{name} is taken")
        except ValueError:
            pass
        wrong += [] if other.control.record(0) == there and not other.control.failed() else [f"{name} leaves a trace"]
    other.control.mirror(0, loud, 0)
    wrong += [] if [f.text for f in other.control.failures()] == ["told"] else ["an error is not told"]
    one.close()
    other.close()
    return measured(wrong, 6)


def overtaken(rng: np.random.Generator) -> Measured:
    """Records whose writer goes round while they are read are left out: none is given in place of an older one."""
    wrong, calls = list[str](), RECORDS + int(rng.integers(1, 100))
    for late in (1, 2, 5):
        segment = Segment.create(1)
        recorder = segment.recorder(0)
        for i in range(calls):
            recorder.create(7, i, "barrier", "bool", 0, 0, "")
        read = recorder._written[0]
        for i in range(calls, calls + late):
            recorder.create(7, i, "barrier", "bool", 0, 0, "")
        recorder._written[0] = read  # as whoever reads saw it before
        found, wanted = [r.call for r in recorder.records()], list(range(calls - RECORDS + late, calls))
        wrong += [] if found == wanted else [f"{late} records late: calls {found[:2]} to {found[-1]}, not {wanted[0]} to {wanted[-1]}"]
        segment.close()
    return measured(wrong, 3)


class _Lock:
    """Stands for the lock of a fence: notes what both counters of a ring say while it is taken."""

    def __init__(self, look: Callable[[], tuple[int, int]]) -> None:
        self.look, self.seen, self.held = look, list[tuple[int, int]](), False

    def acquire(self) -> None:
        """Taken, once at a time."""
        assert not self.held
        self.held = True
        self.seen.append(self.look())

    def release(self) -> None:
        """Given back."""
        assert self.held
        self.held = False


def fences(rng: np.random.Generator) -> Measured:
    """On a machine of weak order a lock is taken and given back twice before a counter is stored, and after one is seen that lets a rank go
    on; on others it is not. Seen from inside the lock the counter has its old value."""
    wrong, about, payload = list[str](), About("send", "bool", 0, 1, 1), rng.integers(0, 256, 100).astype(np.uint8)
    for strong in (False, True):
        segment = Segment.create(2)
        for rank in range(2):
            segment.control.join(rank, os.getpid())
        near, far = (SharedMemory(segment, Watch(segment.control, r, Deadlines()), 0, (0, 1)) for r in range(2))
        ring = far._in[0]
        lock = _Lock(lambda ring=ring: (ring.sent[0], ring.released[0]))  # type: ignore[misc]
        with mock.patch.object(shm, "_STORES_IN_ORDER", strong), mock.patch.object(shm, "_FENCE", lock):
            near.send(1, about, 0, payload)
            came = far.receive(0, about, 0, payload.size)
            wrong += [] if came.tobytes() == payload.tobytes() else ["a message came otherwise"]
            far.release(0)
        # room to send, before it counts; it has come, before it is released
        wanted = [] if strong else [(0, 0)] * 4 + [(1, 0)] * 4
        wrong += [] if lock.seen == wanted else [f"in order {strong}: counters in the fence are {lock.seen}"]
        segment.close()
    return measured(wrong, 2)


class _Slot:
    """Stands for the payload of a slot: what is copied into it changes there."""

    def __init__(self, payload: np.ndarray, at: int) -> None:
        self.payload, self.at = payload, at

    def __setitem__(self, place: slice, value: np.ndarray) -> None:
        self.payload[place] = value
        self.payload[self.at] ^= 1

    def __getitem__(self, place: slice) -> np.ndarray:
        return self.payload[place]


def copies(rng: np.random.Generator) -> Measured:
    """A bit that changes while a payload is copied into its slot is seen by whoever receives it."""
    wrong, about, payload = list[str](), About("send", "bool", 0, 1, 1), rng.integers(0, 256, 100).astype(np.uint8)
    segment = Segment.create(2)
    for rank in range(2):
        segment.control.join(rank, os.getpid())
    near, far = (SharedMemory(segment, Watch(segment.control, r, Deadlines()), 0, (0, 1)) for r in range(2))
    ring, at = near._out[1], int(rng.integers(payload.size))
    ring.payloads = [_Slot(slot, at) for slot in ring.payloads]  # type: ignore[misc]
    near.send(1, about, 0, payload)
    result = told(("a bit that changed", lambda: far.receive(0, about, 0, payload.size), RankError,
                   ("damaged on its way", "another checksum")))
    wrong += [result.note] if result.error else []
    segment.close()
    return measured(wrong, 1)


def channels(rng: np.random.Generator) -> Measured:
    """A job has CHANNELS groups besides the world, each with rings of its own, and no more. Of what is expected only a payload that is long
    is asked of another host."""
    segment, wrong = Segment.create(2, here=range(1), payload_bytes=LENT_BYTES), list[str]()
    watch = Watch(segment.control, 0, Deadlines())
    far, asked = mock.Mock(), list[tuple[int, int]]()
    far.expect = lambda sequence, out: asked.append((sequence, len(out)))
    last = SharedMemory(segment, watch, CHANNELS, (0, 1), lambda channel, rank: far)
    result = told(("a group too many", lambda: SharedMemory(segment, watch, CHANNELS + 1, (0, 1)), GraphError,
                   ("too many groups", f"came:     {CHANNELS + 1}", f"at most {CHANNELS} besides the world")))
    wrong += [result.note] if result.error else []
    outs = [np.empty(n, np.uint8) for n in (LENT_BYTES, LENT_BYTES - 1, LENT_BYTES)]
    last.expect(1, [outs[0], None, outs[1], outs[2]])
    wrong += [] if asked == [(0, LENT_BYTES), (3, LENT_BYTES)] else [f"asked for {asked}"]
    segment.close()
    return measured(wrong, 2)
