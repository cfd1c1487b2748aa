"""What a message says about itself: job, epoch, collective, place in the order, and a checksum over all of it. Floor 4.

A receiver knows each word that must come, so it compares whole headers. The checksum is XXH3 (64 bits) of the payload, seeded with XXH3 of
the header: it is against mix-ups and flipped bits, not against forgers. Collet, https://github.com/Cyan4973/xxHash, version 0.8.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from alpha.types import ITEMSIZE

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "send", "barrier")
"""Collectives as messages count them; a receive takes the messages of a send."""
DTYPES = tuple(ITEMSIZE)
ALGORITHMS = ("direct", "whole", "halving", "ring", "hosts")
"""direct: an owner loads its piece from all members. whole: each member loads everything from all members. halving: recursive halving and
doubling, nearest neighbour first. ring: each member hands on what its neighbour gave. hosts: direct in a host, halving between hosts."""
REDUCTIONS = ("", "sum", "average", "unordered")
"""What becomes of the operands. unordered: a sum whose order depends on the owner of the piece."""

MAGIC = 0x414C5048
HEADER = struct.Struct("<IBBBBIIQQQQIIiI")
CHECKSUM = struct.Struct("<Q")
_NBYTES, _NBYTES_AT = struct.Struct("<I"), 52
SPACE = 128
"""Bytes before a payload: header, checksum, and what makes the payload begin on a cache line of its own."""

_FIELDS = ("magic", "op", "dtype", "algorithm", "reduce", "epoch", "group", "job", "sequence", "call", "count", "chunk", "bytes", "place",
           "sender")
_NAMES = {"op": OPS, "dtype": DTYPES, "algorithm": ALGORITHMS, "reduce": REDUCTIONS}


@dataclass(frozen=True)
class About:
    """The collective that a message belongs to: all members say the same.

    `group`: 32 bits of the hash of name and members. `call`: number of the collective in its group, of a send between its two members.
    `count`: elements of the whole operand. `place`: the member that is root, -1 where there is none.
    """

    op: str
    dtype: str
    group: int
    call: int
    count: int
    algorithm: str = "direct"
    reduce: str = ""
    place: int = -1


def header(about: About, *, job: int, epoch: int, sender: int, sequence: int, chunk: int, nbytes: int) -> bytes:
    """The header of one message. `sequence`: its number on the link; `chunk`: its number within the collective on that link."""
    return HEADER.pack(MAGIC, OPS.index(about.op), DTYPES.index(about.dtype), ALGORITHMS.index(about.algorithm),
                       REDUCTIONS.index(about.reduce), epoch, about.group, job, sequence, about.call, about.count, chunk, nbytes,
                       about.place, sender)


def nbytes_of(memory: memoryview, at: int) -> int:
    """Bytes of the payload behind the header at `at`."""
    return int(_NBYTES.unpack_from(memory, at + _NBYTES_AT)[0])


def checksum(head: bytes, payload: np.ndarray) -> int:
    """64 bits of header and payload (u8[n])."""
    return xxhash.xxh3_64_intdigest(payload.data, xxhash.xxh3_64_intdigest(head))


def differences(came: bytes, expected: bytes) -> list[tuple[str, str, str]]:
    """(field, what came, what was expected) where two headers differ; names in place of codes."""
    found = []
    for name, x, y in zip(_FIELDS, HEADER.unpack(came), HEADER.unpack(expected)):
        if x != y:
            found.append((name, _said(name, x), _said(name, y)))
    return found


def _said(name: str, code: int) -> str:
    known = _NAMES.get(name, ())
    if name in ("magic", "job", "group"):
        return f"{code:#x}"
    return repr(known[code]) if 0 <= code < len(known) else str(code)
