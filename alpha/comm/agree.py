"""Whether all members hold the same: versions, configurations, hashes of parameters. Floor 4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import xxhash

from alpha.comm import collectives
from alpha.comm.group import Group
from alpha.errors import RankError

_SHOWN = 200
"""Bytes of a value that an error shows."""


def agree(group: Group, facts: Mapping[str, str], what: str, do: str) -> None:
    """Return when all members give the same facts, by name, in one order. RankError on every member where one differs: it names the first
    such fact, the members that are in the minority (or, of two equal parts, not with the first member), and both values.

    what: what differs then, such as 'rank {rank} was started otherwise'; do: what helps.
    """
    names = sorted(facts)
    own = np.array([xxhash.xxh3_64_intdigest(_bytes(f"{name}={facts[name]}")) for name in names], np.uint64).view(np.int64)
    every = np.empty((group.size, len(names)), np.int64)
    collectives.all_gather(group, own, every)
    differing = [i for i in range(len(names)) if (every[:, i] != every[0, i]).any()]
    if not differing:
        return
    name, column = names[differing[0]], [int(h) for h in every[:, differing[0]]]
    usual = max(Counter(column).items(), key=lambda found: (found[1], found[0] == column[0]))[0]
    others = [i for i, h in enumerate(column) if h != usual]
    texts = _texts(group, facts[name])
    rank = group.members[others[0]]
    raise RankError(what.format(rank=rank), rank=rank, came="; ".join(f"{name} of rank {group.members[i]}: {texts[i]}" for i in others),
                    expected=f"{name} of rank {group.members[column.index(usual)]}: {texts[column.index(usual)]}", do=do)


def _bytes(text: str) -> bytes:
    """Of a fact: a path in it may hold a name that is no UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _texts(group: Group, text: str) -> list[str]:
    """The beginning of every member's text."""
    own, every = np.zeros(_SHOWN // 8, np.int64), np.empty((group.size, _SHOWN // 8), np.int64)
    told = _bytes(text)[:_SHOWN]
    own.view(np.uint8)[: len(told)] = np.frombuffer(told, np.uint8)
    collectives.all_gather(group, own, every)
    return [row.tobytes().rstrip(b"\0").decode("utf-8", "replace") for row in every]
