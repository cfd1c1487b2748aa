"""How the hosts of a job find each other: all come to the first one, which tells each where the others are. Floor 4.

    host i -> host 0    number, ranks, where its bridge will listen, how often it was started
    host 0 -> host i    job, epoch, ranks in all, streams, where every host's bridge listens

Both are one line of JSON, at most MOST bytes, on a connection that has been proved (handshake.py).
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alpha.comm.bridge import Host
from alpha.comm.handshake import Door, Peer, knock
from alpha.comm.segment import MOST_RANKS
from alpha.errors import InputError, RankError

MOST = 1 << 16
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Across:
    """A job's hosts, as one of them is told when it starts. `host`: its number; `hosts`: how many; `address`, `port`: where the first one
    is met; `secret`: what all know and nobody else; `streams`: connections between two ranks, of which those of the first host count."""

    host: int
    hosts: int
    address: str
    port: int
    secret: bytes
    streams: int = 1


@dataclass(frozen=True)
class Met:
    """What all hosts know after they have met. `door`: where this one's bridge listens."""

    job: int
    epoch: int
    hosts: tuple[Host, ...]
    door: Door
    streams: int

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.hosts[-1].ranks.stop


def meet(across: Across, ranks: int, epoch: int, job: int, deadline: float) -> Met:
    """Come together within `deadline` seconds. `ranks`: of this host; `epoch`: how often it was started before; `job`: 64 random bits, of
    which those of the first host count. RankError naming the hosts that never came; InputError where two hosts were told different things.
    """
    until = time.monotonic() + deadline
    if across.host == 0:
        return _gather(across, ranks, epoch, job, until, deadline)
    return _come(across, ranks, epoch, until, deadline)


def _gather(across: Across, ranks: int, epoch: int, job: int, until: float, deadline: float) -> Met:
    door = Door((_bound(across.address), across.port), across.secret)
    came: dict[int, tuple[Peer, Mapping[str, Any]]] = {}
    talking: list[tuple[Peer, bytearray]] = []
    try:
        while len(came) < across.hosts - 1:
            if time.monotonic() > until:
                missing = [h for h in range(1, across.hosts) if h not in came]
                raise RankError(f"hosts never came: {', '.join(map(str, missing))}", rank=-1, came=f"{len(came) + 1} of {across.hosts}, "
                                f"{door.refused} strangers sent away", expected=f"all within {deadline:g} s",
                                do="look at the logs of those hosts: did they start, with this address, port and ALPHA_SECRET?")
            select.select([*door.descriptors(), *(p.link.fileno() for p, _ in talking)], [], [], _PAUSE_S)
            talking += [(peer, bytearray()) for peer in door.look()]
            for entry in list(talking):
                told = _heard(*entry)
                if told is None:
                    continue
                talking.remove(entry)
                if told and _fits(told, across, came, entry[0]):
                    came[int(told["host"])] = entry[0], told
                else:
                    entry[0].link.close()
        counts = [ranks, *(int(came[h][1]["ranks"]) for h in range(1, across.hosts))]
        places = [[across.address, door.port]]
        places += [[came[h][0].link.getpeername()[0], int(came[h][1]["port"])] for h in range(1, across.hosts)]
        epoch = max(epoch, *(int(told["epoch"]) for _, told in came.values()))
        if sum(counts) > MOST_RANKS:
            error = InputError("a job has another number of ranks", came=f"{sum(counts)} on {across.hosts} hosts",
                               expected=f"1 to {MOST_RANKS}")
            for peer, _ in came.values():
                _say(peer, {"error": str(error)})
            raise error
        for peer, _ in came.values():
            _say(peer, {"job": job, "epoch": epoch, "ranks": counts, "places": places, "streams": across.streams})
        return Met(job, epoch, _hosts(counts, places), door, across.streams)
    except BaseException:
        door.close()
        raise
    finally:
        for peer, _ in [*came.values(), *talking]:
            peer.link.close()


def _fits(told: Mapping[str, Any], across: Across, came: Mapping[int, object], peer: Peer) -> bool:
    """Whether a host can be the one that it says; it is told why not."""
    wrong = ""
    numbers = [told.get(k) for k in ("host", "hosts", "ranks", "port", "epoch")]
    if not all(isinstance(n, int) and 0 <= n < 1 << 32 for n in numbers):
        wrong = "it does not say who it is"
    elif told["hosts"] != across.hosts:
        wrong = f"host {told['host']} was told of {told['hosts']} hosts, host 0 of {across.hosts}"
    elif not 1 <= told["host"] < across.hosts or told["host"] in came:
        wrong = f"there is no place for a host {told['host']}, or somebody has it"
    elif not told["ranks"]:
        wrong = f"host {told['host']} has no ranks"
    if wrong:
        _say(peer, {"error": wrong})
    return not wrong


def _come(across: Across, ranks: int, epoch: int, until: float, deadline: float) -> Met:
    while (met := _visit(across, _first(across, until, deadline), ranks, epoch, until, deadline)) is None:
        time.sleep(_PAUSE_S)  # the bridge of a start that is not over yet: it takes no guests, and this host comes again
        if time.monotonic() > until:
            raise RankError("host 0 never took this host in", rank=0, came="it closed every connection",
                            expected=f"that it begins this start within {deadline:g} s",
                            do="look at its log: does it still run what this host was in before?")
    return met


def _first(across: Across, until: float, deadline: float) -> Peer:
    """A connection to host 0."""
    why = "nobody listened there"
    while True:
        try:
            return knock((across.address, across.port), across.secret)
        except OSError as error:
            why = str(error)
        except UnicodeError as error:
            raise _no_name(across.address, error) from error
        if time.monotonic() > until:
            raise RankError("host 0 was never met", rank=0, came=f"{across.address}:{across.port}: {why}",
                            expected=f"that it answers within {deadline:g} s",
                            do="look at its log; look at address, port, firewall and ALPHA_SECRET on both")
        time.sleep(_PAUSE_S)


def _visit(across: Across, peer: Peer, ranks: int, epoch: int, until: float, deadline: float) -> Met | None:
    """Say who this is and hear who all are; None where that end closed without a word."""
    with peer.link:
        door = Door((peer.link.getsockname()[0], 0), across.secret)
        try:
            _say(peer, {"host": across.host, "hosts": across.hosts, "ranks": ranks, "port": door.port, "epoch": epoch})
            said = bytearray()
            while (told := _heard(peer, said)) is None:
                if time.monotonic() > until:
                    raise RankError("not all hosts came", rank=0, came="no answer of host 0", expected=f"within {deadline:g} s",
                                    do="look at its log, which names the hosts that are missing")
                select.select([peer.link], [], [], _PAUSE_S)
            if not told:
                door.close()
                return None
            if "places" not in told:
                raise InputError("host 0 has no place for this host", came=str(told.get("error", "it said something else")),
                                 expected="one number for each host, and the same number of hosts for all",
                                 do="look at what each host was started with; host 0's log may say more")
            return Met(int(told["job"]), int(told["epoch"]), _hosts(told["ranks"], told["places"]), door,
                       int(told["streams"]))
        except BaseException:
            door.close()
            raise


def _hosts(counts: list[int], places: list[list[Any]]) -> tuple[Host, ...]:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(Host(str(address), int(port), range(start, start + count))
                 for start, count, (address, port) in zip(starts, counts, places))


def _bound(address: str) -> str:
    """This host's own address of that name. InputError for another host's."""
    try:
        found = str(socket.getaddrinfo(address, 0, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        with socket.socket() as probe:
            probe.bind((found, 0))
        return found
    except OSError as error:
        raise InputError("host 0 is met at an address of its own", came=f"{address} ({error.strerror})", expected="an address of this host",
                         do="start host 0 there, or name its address") from error
    except UnicodeError as error:
        raise _no_name(address, error) from error


def _no_name(address: str, error: UnicodeError) -> InputError:
    """Python's word for what can be no name, such as a..b: nobody will ever answer there."""
    return InputError("host 0 has no such address", came=f"{address} ({error})", expected="a name or a number",
                      do="look at what this host was started with")


def _say(peer: Peer, what: Mapping[str, Any]) -> None:
    """One line. Nobody may be there to hear it."""
    try:
        peer.link.settimeout(1.0)
        peer.link.sendall(json.dumps(what).encode() + b"\n")
        peer.link.setblocking(False)
    except OSError:
        pass


def _heard(peer: Peer, said: bytearray) -> Mapping[str, Any] | None:
    """The line that came; None while it has not, {} where none will come."""
    try:
        more = peer.link.recv(MOST)
    except BlockingIOError:
        return None
    except OSError:
        return {}
    said += more
    if b"\n" not in said and more and len(said) <= MOST:
        return None
    try:
        told = json.loads(bytes(said).partition(b"\n")[0])
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


