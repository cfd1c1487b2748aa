"""Ranks as processes: started here, or by another launcher that says so in the environment. Floor 6.

`launch` forks one process for each rank, so that what is imported is imported once, and stays behind to look after them. It forwards
signals, ends what does not answer, and comes back when no process is left. Ranks die with the process that started them. The segment
(alpha/comm/segment.py) is inherited as a descriptor without a name, so nothing of a job stays on the machine.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from alpha.comm.bridge import Bridge
from alpha.comm.control import ABSENT, Failure
from alpha.comm.handshake import Door
from alpha.comm.meet import Across, Met, meet
from alpha.comm.process import Served, process_state
from alpha.comm.rendezvous import ask, offer
from alpha.comm.segment import MOST_STREAMS, Segment
from alpha.comm.watch import Deadlines
from alpha.comm.world import World
from alpha.cuda_runtime._bindings import library
from alpha.cuda_runtime.lost import context_lost
from alpha.errors import AlphaError, InputError, MachineError, RankError
from alpha.train.interrupt import EXIT

PR_SET_PDEATHSIG = 1
"""<sys/prctl.h>. What counts is the end of the thread that forked: the parent's only one."""

MOST_DIGITS = 18
"""Of a number in the environment."""

SECRET = 16
"""Fewest characters of a job's secret."""

LOOK_S = 0.05
"""How often the parent looks whether a rank has told a failure."""

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Tell = Callable[..., None]
"""Called by a rank with what the parent should know, by name: plain JSON data."""

Body = Callable[[World, Tell], int]
"""What a rank runs; returns its exit code."""


# -- started by another launcher -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seat:
    """A place in a job of another launcher. `name`: what that launcher gave to all ranks of this job on this host, and to no other job.
    `across`: the job has other hosts, with as many ranks each."""

    rank: int
    size: int
    local_rank: int
    name: str
    across: Across | None = None

    @property
    def local_size(self) -> int:
        """Ranks of this host."""
        return self.size // (self.across.hosts if self.across else 1)


def seat(environment: Mapping[str, str]) -> Seat | None:
    """The place that RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT give; None where they give none.

    The ranks of a host follow one another, and all hosts have as many, as torchrun starts them. InputError for a part of them, and for
    numbers that do not fit.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    numbers = {name: _number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    local_rank = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
    if not rank < size or local_rank >= size:
        raise InputError("the environment gives a rank that its job has not",
                         came=f"RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={size}",
                         expected=f"ranks from 0 to {size - 1}", do="look at what the launcher sets")
    address = environment.get("MASTER_ADDR", "localhost")
    name = f"{address} {numbers['MASTER_PORT']} {environment.get('TORCHELASTIC_RUN_ID', '')}"
    local_size = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else size
    if local_size == size:
        _require_here(address)
        return Seat(rank, size, local_rank, name)
    if not local_size or size % local_size or rank % local_size != local_rank:
        raise InputError("the hosts of a job have the same number of ranks, one after the other", came=f"RANK={rank}, "
                         f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}, WORLD_SIZE={size}",
                         expected="RANK = host LOCAL_WORLD_SIZE + LOCAL_RANK", do="look at what the launcher sets")
    if not 0 < numbers["MASTER_PORT"] < 1 << 16:
        raise InputError("the hosts of a job meet at a port", came=f"MASTER_PORT={numbers['MASTER_PORT']}", expected="1 to 65535",
                         do="look at what the launcher sets")
    host = rank // local_size
    across = Across(host, size // local_size, address, numbers["MASTER_PORT"], secret(environment),
                    streams(environment))
    return Seat(rank, size, local_rank, f"{name} {host}", across)


def secret(environment: Mapping[str, str]) -> bytes:
    """ALPHA_SECRET, which hosts of one job prove to each other. InputError where there is none, or one that can be guessed."""
    text = environment.get("ALPHA_SECRET", "")
    if len(text) < SECRET:
        raise InputError("hosts of a job know each other by a secret", came=f"ALPHA_SECRET of {len(text)} characters" if text else
                         "no ALPHA_SECRET", expected=f"{SECRET} characters or more, the same on all hosts",
                         do='on one host `openssl rand -hex 16`; set it on all, by the launcher\'s own means')
    return os.fsencode(text)


def streams(environment: Mapping[str, str]) -> int:
    """ALPHA_STREAMS: connections between two ranks of different hosts; 1 where nothing is said. InputError for a number that cannot be."""
    count = _number(environment, "ALPHA_STREAMS") if "ALPHA_STREAMS" in environment else 1
    if not 1 <= count <= MOST_STREAMS:
        raise InputError("two ranks have another number of connections", came=f"ALPHA_STREAMS={count}", expected=f"1 to {MOST_STREAMS}")
    return count


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise InputError("the environment is not that of a rank", came=f"{name}={text}" if text else f"no {name}",
                         expected="RANK, WORLD_SIZE and MASTER_PORT as whole numbers",
                         do="set all of them, or unset RANK and WORLD_SIZE and use --nproc")
    return int(text)


def _require_here(address: str) -> None:
    """InputError for an address that is not this host's: nothing can be bound to it."""
    try:
        family, kind, number, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.bind(place)
    except (OSError, UnicodeError) as error:  # Python raises the latter for what can be no name, such as a..b
        raise InputError("the ranks of a job are on one host", came=f"MASTER_ADDR={address} ({getattr(error, 'strerror', None) or error})",
                         expected="an address of this host, such as localhost", do="start all ranks here") from error


@contextmanager
def join(place: Seat, deadlines: Deadlines | None = None) -> Iterator[World]:
    """Meet the other ranks of the job, and leave it at the end. The first rank of a host meets the other hosts, and keeps their bridge.

    RankError naming those that never come, BusyError for a second job with the same port.
    """
    limits, bridge = deadlines or Deadlines(), 0
    if place.local_rank:
        segment = ask(place.name, place.rank, limits.join)
    elif place.across:
        met = meet(place.across, place.local_size, 0, secrets.randbits(64), limits.join)
        segment = segment_of(met, place.across)
        bridge = start_bridge(met, place.across, segment, limits)
        offer(segment, place.name, limits.join)
    else:
        segment = Segment.create(place.size)
        offer(segment, place.name, limits.join)
    if segment.size != place.size:
        error = InputError("ranks of one job were given different sizes of it", came=f"WORLD_SIZE={place.size} for rank {place.rank}",
                           expected=f"{segment.size}, as rank {segment.here.start} has it", do="look at what the launcher sets")
        _fail(segment, place.rank, str(error))
        raise error
    try:
        with World(segment, place.rank, local_rank=place.local_rank, deadlines=limits) as world:
            yield world
    finally:
        if bridge:  # it ends after the last rank here, and with this process
            os.waitpid(bridge, 0)


# -- several hosts -------------------------------------------------------------------------------------------------------------


def segment_of(met: Met, across: Across) -> Segment:
    """The memory that this host's ranks share with each other and with its bridge."""
    return Segment.create(met.size, epoch=met.epoch, here=met.hosts[across.host].ranks, job=met.job, streams=met.streams)


def start_bridge(met: Met, across: Across, segment: Segment, limits: Deadlines, others: Sequence[Door] = ()) -> int:
    """Fork the process that connects this host's ranks to those elsewhere, before any rank is there. Its number; it ends after them.
    `others`: doors of this process that are not the bridge's."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        met.door.close()
        segment.bridge = pid
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        _die_with(parent)
        for door in others:
            door.close()
        Bridge(segment, met.hosts, across.host, met.door, across.secret, limits.abort).run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


# -- started here --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a job ended. `code`: what the command exits with. `error`: what failed first, '' where nothing did; `lost`: it was a rank that
    died, stopped, hung, differed or lost its GPU, so that the job may be started again. `account`: what each rank did then;
    `told`: what ranks told."""

    code: int
    error: str = ""
    lost: bool = False
    account: str = ""
    told: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Child:
    """One rank's process. `heard`: bytes of a line that is not whole yet; `told`: all that it told; `status`: exit code, negative for a
    signal, None while it runs; `stopped`: for how long its process is seen to be; `ending`: for how long it could have ended since the
    first rank did; `failing`: since the job failed; `killed`: it did not."""

    rank: int
    pid: int
    pidfd: int
    pipe: int
    heard: bytes = b""
    told: dict[str, Any] = field(default_factory=dict)
    status: int | None = None
    stopped: Served | None = None
    ending: Served | None = None
    failing: Served | None = None
    killed: bool = False

    @property
    def code(self) -> int | None:
        """What its body returned; None where it did not come to that."""
        return self.told.get("code")

    @property
    def error(self) -> str:
        """Its error, '' for none: its own, or of another rank (`blames`)."""
        return str(self.told.get("error", ""))


def launch(size: int, body: Body, *, epoch: int = 0, deadlines: Deadlines | None = None, across: Across | None = None) -> Ended:
    """Run `body` in `size` new processes to their end. `epoch`: how often the job was started before. `across`: the job has other hosts,
    which are met first; `size` ranks are here.

    Call it while this process has one thread of its own. MachineError where the machine has no memory to share, or no more processes;
    RankError naming hosts that never come.
    """
    limits = deadlines or Deadlines()
    met = meet(across, size, epoch, secrets.randbits(64), limits.join) if across else None
    segment = segment_of(met, across) if met and across else Segment.create(size, epoch=epoch)
    parent, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    children: list[_Child] = []
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        bridge = start_bridge(met, across, segment, limits) if met and across else 0
        try:
            for rank in segment.here:
                children.append(_start(rank, segment, body, limits, parent, before, children))
        except OSError as error:
            _end(children)
            raise MachineError("the ranks cannot be started", came=f"{len(children)} of {size}: {error.strerror}",
                               do="start fewer ranks, or raise the limit on processes (ulimit -u)") from error
        ended = _look_after(children, segment, limits, before)
        if bridge:
            os.waitpid(bridge, 0)
            bridge = 0
        return ended
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _end(children)
        if bridge:
            os.kill(bridge, signal.SIGKILL)
            os.waitpid(bridge, 0)
        segment.close()


def _start(rank: int, segment: Segment, body: Body, limits: Deadlines, parent: int, mask: set[Any], others: list[_Child]) -> _Child:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        for fd in (read, *(fd for child in others for fd in (child.pipe, child.pidfd))):
            os.close(fd)
        _be(rank, segment, body, limits, parent, mask, write)
    os.close(write)
    os.set_blocking(read, False)
    try:
        return _Child(rank, pid, os.pidfd_open(pid), read)
    except OSError:  # nobody would look after it
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _be(rank: int, segment: Segment, body: Body, limits: Deadlines, parent: int, mask: set[Any], pipe: int) -> NoReturn:
    """The life of a rank's process. It leaves by os._exit: nothing of the parent's is finished in it."""
    status = 1

    def tell(**facts: Any) -> None:
        os.write(pipe, json.dumps(facts).encode() + b"\n")

    try:
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent alone, which forwards it once
        _die_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with World(segment, rank, local_rank=rank - segment.here.start, deadlines=limits) as world:
            status = body(world, tell)
        tell(code=status)
    except AlphaError as error:
        status = error.exit_code
        tell(error=str(error), error_code=status, blames=isinstance(error, RankError), device=context_lost(error))
    except KeyboardInterrupt:
        status = EXIT + signal.SIGINT
        tell(code=status)
    except BaseException as error:
        tell(error=traceback.format_exc(), error_code=1, blames=False, device=context_lost(error))
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                pass  # nobody is left to read it
        os._exit(status)


def _die_with(parent: int) -> None:
    """Have Linux kill this process when `parent` ends, however that ends. A watch of its own would end nothing while it is stopped."""
    if library(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise MachineError("a rank cannot be tied to the process that started it", came="prctl(PR_SET_PDEATHSIG) is refused",
                           expected="Linux", do="look at the seccomp rules of the container")
    if os.getppid() != parent:  # it has ended in between
        os._exit(1)


def _look_after(children: list[_Child], segment: Segment, limits: Deadlines, mask: set[Any]) -> Ended:
    """Wait until all ranks have ended; end those that do not answer a failure in time."""
    signals: list[int] = []
    handlers = {}

    def forward(number: int, frame: object) -> None:
        signals.append(number)
        for child in children:
            _send(child, number)

    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            handlers[number] = signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        while any(child.status is None for child in children):
            _look(children, segment, bool(signals))
            _look_for_stopped(children, segment, limits.stall)
            _end_late(children, segment.control.failed(), limits)
        return _verdict(children, segment, signals)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _look(children: list[_Child], segment: Segment, interrupted: bool) -> None:
    """Hear what ranks tell, and take leave of those that ended. Of one that failed and told nobody, the others learn it here."""
    running = {fd: child for child in children if child.status is None for fd in (child.pipe, child.pidfd)}
    poll = select.poll()
    for fd in running:
        poll.register(fd, select.POLLIN)
    for child in {id(running[fd]): running[fd] for fd, _ in poll.poll(1000 * LOOK_S)}.values():
        ended, status = os.waitpid(child.pid, os.WNOHANG)
        _hear(child)
        if ended:
            _leave(child, os.waitstatus_to_exitcode(status))
            if child.error or (child.code is None and not interrupted):
                _fail(segment, child.rank, child.error or f"rank {child.rank} died ({_how(child)})")


def _look_for_stopped(children: list[_Child], segment: Segment, limit: float) -> None:
    """Tell of ranks whose processes have been stopped for `limit` seconds. Where nobody waits for such a rank, only the parent sees it."""
    for child in children:
        if child.status is not None or process_state(child.pid) != "stopped":
            child.stopped = None
            continue
        child.stopped = child.stopped or Served(child.pid)
        if child.stopped.look() > 1e9 * limit:
            _fail(segment, child.rank, f"rank {child.rank} is stopped, for {limit:g} s")


def _end_late(children: list[_Child], failed: bool, limits: Deadlines) -> None:
    """Kill ranks that still run `abort` seconds after the job failed, or `join` seconds after the first rank ended well: seconds in which
    the machine served them."""
    for child in children:
        if child.status is not None:
            continue
        late = False
        if failed:
            child.failing = child.failing or Served(child.pid)
            late = child.failing.look() >= 1e9 * limits.abort
        elif children[0].status is not None:
            child.ending = child.ending or Served(child.pid)
            late = child.ending.look() >= 1e9 * limits.join
        if late:
            child.killed = True
            _send(child, signal.SIGKILL)


def _hear(child: _Child) -> None:
    """Read what it has told so far; the last part of a line waits for its rest."""
    try:
        while more := os.read(child.pipe, 1 << 16):
            child.heard += more
    except BlockingIOError:
        pass  # no more for now
    *lines, child.heard = child.heard.split(b"\n")
    for line in lines:
        child.told.update(json.loads(line))


def _send(child: _Child, number: int) -> None:
    """A signal to a rank that still runs."""
    if child.status is None:
        try:
            signal.pidfd_send_signal(child.pidfd, number)
        except ProcessLookupError:
            pass  # it has just ended, which is noted next


def _leave(child: _Child, status: int) -> None:
    child.status = status
    os.close(child.pipe)
    os.close(child.pidfd)


def _how(child: _Child) -> str:
    """How it ended, for people."""
    assert child.status is not None
    how = f"killed by {signal.Signals(-child.status).name}" if child.status < 0 else f"exit code {child.status}"
    return how + (", because it did not answer" if child.killed else "")


def _fail(segment: Segment, rank: int, text: str) -> None:
    """Tell a failure in the name of a rank that cannot."""
    segment.control.fail(Failure(rank, rank, "", segment.control.step(rank), time.monotonic_ns(), text))


def _end(children: list[_Child]) -> None:
    """Kill what still runs: this process gives up."""
    for child in children:
        if child.status is None:
            _send(child, signal.SIGKILL)
            _leave(child, os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))


def _verdict(children: list[_Child], segment: Segment, signals: list[int]) -> Ended:
    """What the whole job came to."""
    told, here = children[0].told, {child.rank: child for child in children}
    failures = segment.control.failures()
    if signals and any(child.code != 0 and not child.error for child in children):
        return Ended(EXIT + signals[0], "" if not failures else "interrupted", told=told)
    if not failures:
        return Ended(max(child.code or 0 for child in children), told=told)
    first = failures[0]
    teller = here.get(first.teller)
    account = "\n".join(_account(child, segment) for child in children)
    if teller and teller.told.get("device"):
        return Ended(1, f"rank {teller.rank}: its GPU is lost: {teller.told['device']}", True, account, told)
    if teller and teller.error and not teller.told["blames"]:
        return Ended(int(teller.told["error_code"]), f"rank {teller.rank}: {teller.error}", False, account, told)
    return Ended(1, first.text, True, account, told)


def _account(child: _Child, segment: Segment) -> str:
    """One line: how a rank ended, in which step, and the last collective that it ran or waited in, which may be of the step before."""
    joined, step = segment.control.state(child.rank) != ABSENT, segment.control.step(child.rank)
    line = f"rank {child.rank} ended ({_how(child)})" + (f" in step {step}" if step >= 0 else "")
    records = segment.recorder(child.rank).records() if joined else []
    if not records:
        return f"{line}: in no collective yet"
    last = records[-1]
    place = f"{last.op} number {last.call} of group {last.group:#x}" + (f", step {last.step}" if last.step >= 0 else "")
    where = f", {last.source}" if last.source else ""
    return f"{line}: {'had done' if last.finished else 'waited in'} {place}{where}"
