"""One proved connection, in frames: what goes out and comes in, whole, in order and checked. Floor 4.

A frame says its kind, channel, ranks, number and length. It is checked over that and its body, of a message over the message's header, with
a seed of the connection. What fails the check ends the connection, not the job. The payload of a message has the checksum of the message,
which the receiving rank checks (J. H. Saltzer, D. P. Reed and D. D. Clark, End-to-end arguments in system design, ACM TOCS 2(4), 1984).
Messages go out from where they lie and come in where they belong; only their first bytes, which travel with the frame's head, are copied.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from alpha.comm.handshake import Peer
from alpha.comm.message import SPACE

FRAME = struct.Struct("<IBBHHHQQI")
"""Magic, version, kind, channel, source, receiver, sequence, released, bytes that follow the digest."""
DIGEST_BYTES = 16
HEAD_BYTES = FRAME.size + DIGEST_BYTES
MAGIC, VERSION = 0x65676472, 2
DATA, CREDIT, RECORD, ALIVE, RESUME, HELLO, BYE, WANT = range(1, 9)
MOST = 1 << 20
"""Bytes of the longest frame that is not a message."""
_AHEAD = 4096
"""Bytes that are read beyond a head: a short message comes whole in one call."""
_PARTS = 64
"""Pieces of memory that one system call sends."""


class Broken(Exception):
    """This connection is of no more use."""


class Frame(NamedTuple):
    """What a frame says of itself. `source`, `to`: ranks. `released`: messages of the ring the other way that were."""

    kind: int
    channel: int
    source: int
    to: int
    sequence: int
    released: int
    length: int


class Line:
    """One connection. `place`: where header (u8[SPACE]) and payload of a message belong; it raises Broken for what must not come now."""

    def __init__(self, peer: Peer, place: Callable[[Frame], tuple[memoryview, memoryview]]) -> None:
        self.socket, self.seed, self._place = peer.link, peer.seed, place
        self.out: deque[memoryview] = deque()
        self.full = False
        """Whether somebody waits for room to send."""
        self._ahead, self._staged = memoryview(bytearray(_AHEAD)), 0
        self._frame: Frame | None = None
        self._head = b""
        self._body, self._rest, self._got = memoryview(b""), memoryview(b""), 0

    @property
    def between(self) -> bool:
        """Whether no frame is on its way in."""
        return self._frame is None and not self._staged

    def put(self, kind: int, channel: int = 0, source: int = 0, to: int = 0, sequence: int = 0, released: int = 0,
            body: bytes = b"") -> None:
        """A frame goes in line."""
        self.out.append(memoryview(frame(self.seed, kind, channel, source, to, sequence, released, body)))

    def put_message(self, channel: int, source: int, to: int, sequence: int, released: int, header: memoryview,
                    payload: memoryview) -> None:
        """A message goes in line: header (u8[SPACE]) and payload, which stays where it is, unchanged, until it has gone out."""
        head = FRAME.pack(MAGIC, VERSION, DATA, channel, source, to, sequence, released, SPACE + len(payload))
        self.out.append(memoryview(b"".join((head, _digest(self.seed, head, header), header))))
        if payload:
            self.out.append(payload)

    def holds(self, memory: memoryview) -> bool:
        """Whether a frame that is on its way in belongs there, or one in line lies there."""
        coming = self._frame is not None and self._rest.obj is memory.obj
        return coming or any(part.obj is memory.obj for part in self.out)

    def flush(self) -> bool:
        """Send what is in line, as far as it goes at once; whether all went."""
        out = self.out
        while out:
            parts = list(out) if len(out) <= _PARTS else [out[i] for i in range(_PARTS)]
            try:
                count = self.socket.sendmsg(parts)
            except BlockingIOError:
                return False
            for part in parts:
                if len(part) > count:
                    out[0] = part[count:]
                    break
                out.popleft()
                count -= len(part)
        return True

    def read(self, take: Callable[[Frame, memoryview], None]) -> bool:
        """Take what has come, whole frame by whole frame, up to the first long one; whether any did. So whoever checks that one finds it
        in the core's cache. Broken for what no sound peer sends, and where it closed."""
        took = False
        while True:
            missing, room = 0, self._ahead[self._staged :]
            try:
                if self._frame is None:
                    count = self.socket.recv_into(room)
                else:  # and in the same call what comes next, up to where the next payload may begin
                    missing, room = len(self._body) + len(self._rest) - self._got, room[: HEAD_BYTES + SPACE]
                    count = self.socket.recvmsg_into([*self._missing(), room])[0]
            except BlockingIOError:
                return took
            if not count:
                raise Broken("it closed the connection")
            if count < missing:  # that was all
                self._got += count
                return took
            if missing:
                self._finish(take)
            self._staged += count - missing
            took |= self._unpack(take) or bool(missing)
            if missing > _AHEAD or (self._frame is None and count - missing < len(room)):
                return took

    def _missing(self) -> list[memoryview]:
        """Where the rest of the frame that is on its way in belongs."""
        behind = self._got - len(self._body)
        if behind >= 0:
            return [self._rest[behind:]]
        return [self._body[self._got :], self._rest] if self._rest else [self._body[self._got :]]

    def _unpack(self, take: Callable[[Frame, memoryview], None]) -> bool:
        """Frames out of what was read ahead; the rest of one that is longer is read straight to where it belongs."""
        at, end, took, ahead = 0, self._staged, False, self._ahead
        while end - at >= HEAD_BYTES:
            self._begin(ahead[at : at + HEAD_BYTES])
            at, self._got = at + HEAD_BYTES, 0
            for room in (self._body, self._rest):
                got = len(room)
                if at + got > end:
                    got = end - at
                    room = room[:got]
                if got:
                    room[:] = ahead[at : at + got]
                    at += got
                    self._got += got
            if self._got < len(self._body) + len(self._rest):
                self._staged = 0
                return took
            self._finish(take)
            took = True
        if at < end:
            ahead[: end - at] = ahead[at:end]
        self._staged = end - at
        return took

    def _begin(self, head: memoryview) -> None:
        said = FRAME.unpack_from(head)
        frame = Frame._make(said[2:])
        if said[0] != MAGIC or said[1] != VERSION or not DATA <= frame.kind <= WANT:
            raise Broken("it sent something that is no frame")
        if frame.kind != DATA:
            if frame.length > MOST:
                raise Broken("it sent a frame without bounds")
            body, rest = memoryview(bytearray(frame.length)), memoryview(b"")
        else:
            body, rest = self._place(frame)
        self._frame, self._head, self._body, self._rest = frame, bytes(head), body, rest

    def _finish(self, take: Callable[[Frame, memoryview], None]) -> None:
        frame, body = self._frame, self._body
        assert frame is not None
        if self._head[FRAME.size :] != _digest(self.seed, self._head[: FRAME.size], body):
            raise Broken("it sent a frame with another checksum")
        self._frame, self._rest = None, memoryview(b"")
        take(frame, body)


def frame(seed: int, kind: int, channel: int = 0, source: int = 0, to: int = 0, sequence: int = 0, released: int = 0,
          body: bytes = b"") -> bytes:
    """A whole frame. `seed`: of the connection."""
    head = FRAME.pack(MAGIC, VERSION, kind, channel, source, to, sequence, released, len(body))
    return head + _digest(seed, head, body[:SPACE] if kind == DATA else body) + body


def unpacked(seed: int, said: bytes) -> tuple[Frame, bytes] | None:
    """The frame that `said` is, whole; None for anything else."""
    head, digest, body = said[: FRAME.size], said[FRAME.size : HEAD_BYTES], said[HEAD_BYTES:]
    magic, version, *rest = FRAME.unpack(head)
    found = Frame(*rest)
    if (magic, version, found.length) != (MAGIC, VERSION, len(body)) or digest != _digest(seed, head, body):
        return None
    return found, body


def _digest(seed: int, head: bytes, body: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(body, xxhash.xxh3_64_intdigest(head, seed))
