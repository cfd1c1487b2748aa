"""How a rank waits: bounded, with an eye on the others, and with one who is at fault named at the end. Floor 4."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from alpha.comm.control import ABSENT, LEFT, Control, Failure
from alpha.comm.message import OPS
from alpha.comm.process import Served, process_state
from alpha.errors import MachineError, RankError

SPIN_NS = 100_000
"""How long a wait spins before it sleeps. A sleep costs about as much."""
SHORTEST_S, LONGEST_S = 50e-6, 1e-3
"""Sleeps of a wait, doubled from one to the next."""
LOOK_NS = 20_000_000
"""How often a wait looks whether the others live and get on."""
_BRIDGE = -1
"""In place of a rank: the bridge."""
_LANES = 512
"""Elements of a NumPy call that lets other threads of this process have the interpreter lock."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds. `join`: until all ranks are there. `stall`: that a rank may get on with nothing while another waits for it; longer where it
    asked for more, or where such a collective has taken more than a third of that before. `abort`: that ranks have to end after one has
    failed. Only time counts in which the machine served that rank (process.py); of `join` it is the rank that waits, for it knows no
    process of one that has not come."""

    join: float = 60.0
    stall: float = 5.0
    abort: float = 5.0


class _Clock(Protocol):
    """For how long a rank was served since somebody began to look."""

    def look(self) -> int:
        """Nanoseconds so far."""


class _Here:
    """How a rank of this host is seen: by its process."""

    def __init__(self, control: Control, rank: int) -> None:
        self._control, self._rank = control, rank

    def served(self) -> _Clock:
        """A clock that begins now."""
        return Served(self._control.pid(self._rank))

    def doing(self) -> str:
        """What its process does."""
        return process_state(self._control.pid(self._rank))

    def end(self) -> int | None:
        """A descriptor that can be read when it has ended (pidfd_open(2))."""
        return os.pidfd_open(self._control.pid(self._rank))


class _Elsewhere:
    """How a rank of another host is seen: by what its bridge tells. That one sees it end, too."""

    def __init__(self, control: Control, rank: int) -> None:
        self._control, self._rank, self._began = control, rank, control.served(rank)

    def served(self) -> _Clock:
        """A clock that begins now."""
        return _Elsewhere(self._control, self._rank)

    def look(self) -> int:
        """Nanoseconds since this was made."""
        return self._control.served(self._rank) - self._began

    def doing(self) -> str:
        """Whether its process is stopped."""
        return "stopped" if self._control.frozen(self._rank) else "on another host"

    def end(self) -> int | None:
        """None: nothing here shows that."""
        return None


class Watch:
    """The waits of one rank. `step`: the training step that its errors name."""

    def __init__(self, control: Control, rank: int, deadlines: Deadlines) -> None:
        self.control, self.rank, self.deadlines = control, rank, deadlines
        self.step = -1
        self._poll, self._watched = select.poll(), dict[int, int]()
        self._seen = [(_Here if r in control.here else _Elsewhere)(control, r) for r in range(control.size)]
        self._slowest: dict[str, float] = {}
        self._x = np.ones(_LANES)
        self.rest: Callable[[float], object] = time.sleep
        """How a wait spends so many seconds: a rank with others on other hosts looks after its connections."""

    def join(self) -> None:
        """Wait until all ranks are there, and watch their processes from then on. RankError naming those that never came."""
        own = Served(os.getpid())
        missing = [r for r in range(self.control.size) if r != self.rank]
        while missing:
            if self.control.failed():
                raise self._stopped("")
            for r in [r for r in missing if self.control.state(r) != ABSENT]:
                self._watch(r)
                missing.remove(r)
            if self._poll.poll(0):
                self._look_for_death("")
            if missing and own.look() > 1e9 * self.deadlines.join:
                raise self.fail(RankError(f"{_ranks(missing)} never came", rank=missing[0],
                                          came=f"{self.control.size - len(missing)} ranks within {self.deadlines.join:g} s",
                                          expected=f"{self.control.size} ranks",
                                          do="look at the log of that rank: did it start, on this host, in this job?"))
            time.sleep(LONGEST_S)

    def _watch(self, rank: int) -> None:
        try:
            fd = self._seen[rank].end()
        except ProcessLookupError:
            if self.control.state(rank) == LEFT:
                return
            if self.control.failed():  # it told why before it ended
                raise self._stopped("") from None
            raise self.fail(self._died(rank, "")) from None
        except OSError as error:
            raise MachineError("this system does not let ranks watch each other", came=f"pidfd_open: {error.strerror}",
                               expected="Linux 5.3 or newer") from error
        if fd is not None:
            self._poll.register(fd, select.POLLIN)
            self._watched[fd] = rank

    def watch_bridge(self, pid: int) -> None:
        """Watch the process that carries what goes to other hosts and comes from them, too."""
        try:
            fd = os.pidfd_open(pid)
        except OSError as error:
            raise self.fail(_bridge_died(self.rank, "")) from error
        self._poll.register(fd, select.POLLIN)
        self._watched[fd] = _BRIDGE

    def until(self, ready: Callable[[], bool], peer: int, op: str, rest: Callable[[float], object] | None = None) -> None:
        """Return as soon as `ready()`. `peer`: the rank whose doing that is; `op`: the collective; `rest`: waits so many seconds at most
        and comes back when something may have changed, where somebody wakes this process. RankError when any rank failed or died, or when
        the one that all wait for gets on with nothing."""
        if ready() or (self._spin(ready) if rest is None else self._rest(ready, rest)):
            return
        self.control.wait(self.rank, peer)
        try:
            self._sleep(ready, peer, op, rest)
        finally:
            self.control.wait(self.rank, None)

    def _spin(self, ready: Callable[[], bool]) -> bool:
        end = time.monotonic_ns() + SPIN_NS
        while time.monotonic_ns() < end:
            if ready():
                return True
            np.add(self._x, 1.0, out=self._x)
            if ready():
                return True
            os.sched_yield()  # spinning on is faster alone, and many times slower where others want this processor
        return False

    @staticmethod
    def _rest(ready: Callable[[], bool], rest: Callable[[float], object]) -> bool:
        """Whether it is ready before nothing came for so long: where parts of a message come, each ends a rest."""
        end = time.monotonic_ns() + int(1e9 * LONGEST_S)
        while not ready():
            if time.monotonic_ns() >= end:
                return False
            rest(LONGEST_S)
        return True

    def _sleep(self, ready: Callable[[], bool], peer: int, op: str, rest: Callable[[float], object] | None) -> None:
        pause, look = SHORTEST_S, 0
        limit = int(1e9 * max(self.deadlines.stall, 3 * self._slowest.get(op, 0.0)))
        seen: tuple[object, ...] = ()
        served = self._seen[peer].served()
        while not ready():
            if self.control.failed():
                raise self._stopped(op)
            now = time.monotonic_ns()
            if now >= look:
                look = now + LOOK_NS
                if self._poll.poll(0) and not ready():
                    self._look_for_death(op)
                if self.control.state(peer) == LEFT and not ready():
                    self.stopped(op)  # it told why before it left
                    raise self.fail(RankError(f"rank {peer} has left while rank {self.rank} waits for it in {op}", rank=peer, op=op,
                                              step=self.step, expected="that all ranks run the same collectives"))
                chain = self._chain(peer)
                patience = self.control.patience(chain[-1])
                state = (chain, self.control.progress(chain[-1]), patience > 0)  # who ends long work has its time anew
                if state != seen:
                    seen, served = state, self._seen[chain[-1]].served()
                elif served.look() > limit and (now > patience or self._frozen(chain[-1])):
                    raise self.fail(self._stalled(chain, op, served.look() / 1e9))
            if rest is not None:
                rest(LONGEST_S)
                continue
            self.rest(pause)
            pause = min(2 * pause, LONGEST_S)

    def _chain(self, peer: int) -> tuple[int, ...]:
        """Whom this rank waits for, whom that one waits for, and so on: to one that waits for nobody or is stopped, or around once."""
        chain = [peer]
        while not self._frozen(chain[-1]):
            following = self.control.waits_for(chain[-1])
            if following is None or following in (*chain, self.rank):
                break
            chain.append(following)
        return tuple(chain)

    def _frozen(self, rank: int) -> bool:
        return self._seen[rank].doing() == "stopped"

    def _look_for_death(self, op: str) -> None:
        for fd, _ in self._poll.poll(0):
            self._poll.unregister(fd)
            rank = self._watched.pop(fd)
            os.close(fd)
            if rank == _BRIDGE:
                self.stopped(op)
                raise self.fail(_bridge_died(self.rank, op))
            if self.control.state(rank) != LEFT:
                if self.control.failed():  # it told why before it ended
                    raise self._stopped(op)
                raise self.fail(self._died(rank, op))

    def _died(self, rank: int, op: str) -> RankError:
        return RankError(f"rank {rank} died", rank=rank, op=op, step=self.step, came=f"process {self.control.pid(rank)} has ended; it was "
                         f"last seen in {self._place(rank)}", expected="that it leaves the job after its last step",
                         do="look at its log, and for the kernel's out-of-memory killer")

    def _stalled(self, chain: Sequence[int], op: str, seconds: float) -> RankError:
        last = chain[-1]
        ring = self.control.waits_for(last) is not None and not self._frozen(last)
        waits = " waits for ".join(f"rank {r}" for r in (self.rank, *chain))
        if ring:
            waits += f" waits for rank {self.control.waits_for(last)}"
        what = f"ranks wait for each other in {op}" if ring else f"rank {last} gets on with nothing while {op} waits for it"
        beat = (time.monotonic_ns() - self.control.heartbeat(last)) / 1e9
        return RankError(what, rank=last, op=op, step=self.step, expected=f"progress within {seconds:.1f} s",
                         came=f"{waits}; rank {last} is {self._seen[last].doing()}, last heartbeat {beat:.1f} s ago, "
                         f"last seen in {self._place(last)}", do="look at its log; work that takes longer is announced with World.patient")

    def _place(self, rank: int) -> str:
        group, call, op, step = self.control.place(rank)
        now = self.control.step(rank)
        begun = f", and has begun step {now}" if now > step else ""
        if not call:
            return "no collective yet" + begun
        return f"{OPS[op]} number {call} of group {group:#x}" + (f", step {step}" if step >= 0 else "") + begun

    def fail(self, error: RankError) -> RankError:
        """Tell all ranks of an error, which is raised then."""
        self.control.fail(Failure(self.rank, error.rank, error.op, error.step, time.monotonic_ns(), str(error)))
        return error

    def took(self, op: str, seconds: float) -> None:
        """How long a collective took."""
        if seconds > self._slowest.get(op, 0.0):
            self._slowest[op] = seconds

    def stopped(self, op: str) -> None:
        """RankError with the job's first error if any rank has failed."""
        if self.control.failed():
            raise self._stopped(op)

    def _stopped(self, op: str) -> RankError:
        first = self.control.failures()[0]
        return RankError(f"rank {self.rank} stops: {first.text}", rank=first.rank, op=first.op or op, step=first.step)

    def close(self) -> None:
        """Give the descriptors back."""
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()


def _bridge_died(rank: int, op: str) -> RankError:
    return RankError("the bridge of this host died", rank=rank, op=op, expected="that it carries until all ranks have left",
                     do="look at the log of this host, and for the kernel's out-of-memory killer")


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
