"""Connections whose two ends prove to each other that they know the job's secret, before anything else is read. Floor 4.

Challenge and answer, both ways (HMAC-SHA256, RFC 2104): each end draws 32 bytes, and answers the other's with a MAC over both draws and
its own role, so no answer serves twice or the other way round. All parts have fixed lengths. It keeps strangers and other jobs out. What
follows is neither encrypted nor signed: whoever can write into a connection between hosts can write into a job.

    door -> guest   MAGIC, 32 random bytes
    guest -> door   MAGIC, 32 random bytes, MAC("guest")
    door -> guest   MAC("door")
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
from dataclasses import dataclass, field

from alpha.errors import BusyError, RankError

MAGIC = b"alpha\0\0\1"
"""Name and version of the protocol."""
_DRAWN = 32
_OFFERED = len(MAGIC) + _DRAWN
_ANSWERED = _OFFERED + _DRAWN

PATIENCE_S = 2.0
"""How long a stranger may take to prove what it knows."""
STRANGERS = 64
"""How many may be about to. Another one sends the one away that has been there longest."""


@dataclass(frozen=True)
class Peer:
    """A connection that is proved. `seed`: 64 bits of both draws and the secret, other ones for every connection."""

    link: socket.socket
    seed: int


def _mac(secret: bytes, role: bytes, door: bytes, guest: bytes) -> bytes:
    return hmac.new(secret, role + door + guest, hashlib.sha256).digest()


def _seed(secret: bytes, door: bytes, guest: bytes) -> int:
    return int.from_bytes(_mac(secret, b"seed", door, guest)[:8], "little")


@dataclass
class _Stranger:
    link: socket.socket
    drawn: bytes
    until: float
    said: bytearray = field(default_factory=bytearray)


class Door:
    """A listening socket, and the strangers at it. Nothing here waits: `look` does what can be done at once.

    `where`: (address, port); port 0 for any. BusyError where another process listens there.
    """

    def __init__(self, where: tuple[str, int], secret: bytes) -> None:
        self._secret, self._strangers = secret, dict[int, _Stranger]()
        self.refused = 0
        """Strangers that were sent away."""
        try:
            self.listening = socket.create_server(where, family=socket.AF_INET, backlog=STRANGERS)
        except OSError as error:
            raise BusyError("this host cannot listen there", came=f"{where[0]}:{where[1]} ({error.strerror})",
                            do="give each job a port of its own, and an address of this host") from error
        self.listening.setblocking(False)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.listening.getsockname()[1])

    def descriptors(self) -> list[int]:
        """What to poll for reading."""
        return [self.listening.fileno(), *self._strangers]

    def look(self) -> list[Peer]:
        """Those that have proved themselves since."""
        self._let_in()
        found, now = [], time.monotonic()
        for fd, stranger in list(self._strangers.items()):
            try:
                more = stranger.link.recv(_ANSWERED - len(stranger.said))
            except BlockingIOError:
                if now > stranger.until:
                    self._send_away(fd)
                continue
            except OSError:
                more = b""
            stranger.said += more
            if not more or stranger.said[: len(MAGIC)] != MAGIC[: len(stranger.said)]:
                self._send_away(fd)
            elif len(stranger.said) == _ANSWERED:
                peer = self._judge(stranger)
                if peer is None:
                    self._send_away(fd)
                else:
                    del self._strangers[fd]
                    found.append(peer)
        return found

    def _let_in(self) -> None:
        for _ in range(STRANGERS):
            try:
                link, _ = self.listening.accept()
            except OSError:  # nobody more, or one that has gone again
                return
            link.setblocking(False)
            drawn = os.urandom(_DRAWN)
            try:
                link.send(MAGIC + drawn)  # 40 bytes fit an empty buffer
            except OSError:
                link.close()
                continue
            if len(self._strangers) >= STRANGERS:
                self._send_away(next(iter(self._strangers)))
            self._strangers[link.fileno()] = _Stranger(link, drawn, time.monotonic() + PATIENCE_S)

    def _judge(self, stranger: _Stranger) -> Peer | None:
        guest, proof = bytes(stranger.said[len(MAGIC) : _OFFERED]), bytes(stranger.said[_OFFERED:])
        if not hmac.compare_digest(proof, _mac(self._secret, b"guest", stranger.drawn, guest)):
            return None
        try:
            stranger.link.send(_mac(self._secret, b"door", stranger.drawn, guest))
        except OSError:
            return None
        _quick(stranger.link)
        return Peer(stranger.link, _seed(self._secret, stranger.drawn, guest))

    def _send_away(self, fd: int) -> None:
        self._strangers.pop(fd).link.close()
        self.refused += 1

    def close(self) -> None:
        """Nobody more."""
        for fd in list(self._strangers):
            self._strangers.pop(fd).link.close()
        self.listening.close()


def knock(where: tuple[str, int], secret: bytes, seconds: float = PATIENCE_S) -> Peer:
    """Connect to a door, prove this end and have the other proved. OSError where nobody answers in time; RankError where somebody else
    does."""
    link = socket.create_connection(where, timeout=seconds)
    try:
        offered = _exactly(link, _OFFERED)
        if offered[: len(MAGIC)] != MAGIC:
            raise RankError("whoever listens there is no host of this job, or one with another version of Alpha", came=repr(offered[:8]),
                            expected=repr(MAGIC), do=f"look at what listens at {where[0]}:{where[1]}")
        drawn = os.urandom(_DRAWN)
        link.sendall(MAGIC + drawn + _mac(secret, b"guest", offered[len(MAGIC) :], drawn))
        if not hmac.compare_digest(_exactly(link, _DRAWN), _mac(secret, b"door", offered[len(MAGIC) :], drawn)):
            raise RankError("whoever listens there does not know this job's secret", came=f"{where[0]}:{where[1]}",
                            do="look whether another job listens there; give each its own port and ALPHA_SECRET")
        link.setblocking(False)
        _quick(link)
        return Peer(link, _seed(secret, offered[len(MAGIC) :], drawn))
    except BaseException:
        link.close()
        raise


def _exactly(link: socket.socket, count: int) -> bytes:
    """So many bytes. ConnectionError where the other end goes away before, as a door does with whom it does not know."""
    said = b""
    while len(said) < count:
        more = link.recv(count - len(said))
        if not more:
            raise ConnectionError("the other end closed the connection: it is about to end, or knows another secret")
        said += more
    return said


def _quick(link: socket.socket) -> None:
    """Small messages go out at once."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
