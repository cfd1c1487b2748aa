"""How ranks that some other launcher started come to one segment: over a socket in the abstract namespace of this host. Floor 4.

The first rank of a host makes the segment and hands its descriptor to every rank there that asks (SCM_RIGHTS of unix(7)). The socket has
no file, and is gone with its process. Only processes of the same user are answered; the name is drawn from what the launcher gives to the
ranks of this job on this host alone.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time

from alpha.comm.segment import Segment
from alpha.errors import BusyError, InputError, RankError

_CREDENTIALS = struct.Struct("iII")
_ASKED, _TAKEN = struct.Struct("<I"), struct.Struct("<i")
_OK, _NO_SUCH_RANK, _TAKEN_RANK = 0, 1, 2


def _name(secret: str) -> bytes:
    """The socket's name in the abstract namespace; it gives nothing of the secret away."""
    return b"\0alpha-" + hashlib.sha256(secret.encode()).hexdigest()[:32].encode()


def offer(segment: Segment, secret: str, deadline: float) -> None:
    """The first rank of a host: hand the segment to the other ranks here, each once. `deadline`: seconds.

    BusyError where another job has this secret; RankError naming the ranks that never asked.
    """
    until, missing = time.monotonic() + deadline, set(segment.here[1:])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            server.bind(_name(secret))
        except OSError as error:
            raise BusyError("another job on this host meets under this name", came=error.strerror,
                            do="give each job a port of its own (MASTER_PORT)") from error
        server.listen(segment.size)
        while missing:
            server.settimeout(max(0.001, until - time.monotonic()))
            try:
                link, _ = server.accept()
            except TimeoutError:
                ranks = ", ".join(map(str, sorted(missing)))
                raise RankError(f"ranks never came: {ranks}", rank=min(missing), expected=f"all {len(segment.here)} within {deadline:g} s",
                                do="look at the logs of those ranks: did they start, on this host, in this job?") from None
            with link:
                link.settimeout(1.0)
                _answer(link, segment, missing)


def _answer(link: socket.socket, segment: Segment, missing: set[int]) -> None:
    """One rank that asks. Whoever is another user's, says nothing or asks for what is not there gets no segment."""
    _, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        return
    try:
        asked = link.recv(_ASKED.size + 1)
        if len(asked) != _ASKED.size:
            return
        (rank,) = _ASKED.unpack(asked)
        if rank in missing:
            socket.send_fds(link, [_TAKEN.pack(_OK)], [segment.fd])
            missing.discard(rank)
        else:
            link.send(_TAKEN.pack(_TAKEN_RANK if rank in segment.here else _NO_SUCH_RANK))
    except OSError:
        return  # it went away meanwhile; if it was one of ours, it is still missing


def ask(secret: str, rank: int, deadline: float) -> Segment:
    """Another rank: the segment of the job. RankError where the first rank does not answer; InputError where it has no place for this
    one."""
    until = time.monotonic() + deadline
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
            try:
                link.settimeout(max(0.001, until - time.monotonic()))
                link.connect(_name(secret))
                link.send(_ASKED.pack(rank))
                said, fds, _, _ = socket.recv_fds(link, _TAKEN.size, 1)
            except OSError:  # nobody listens yet, or no longer
                said, fds = b"", []
        if fds:
            return Segment(fds[0])
        if said:
            raise InputError("rank 0 has no place for this rank", came=f"rank {rank}", expected="a rank of the job that nobody else is",
                             do="look at RANK and WORLD_SIZE in the environment of all ranks")
        if time.monotonic() > until:
            raise RankError("rank 0 never came", rank=0, expected=f"that it answers within {deadline:g} s",
                            do="look at its log: did it start, on this host, in this job?")
        time.sleep(0.01)
