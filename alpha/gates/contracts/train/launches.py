"""Cases of what is around the ranks of a job: how they are started and met, what their process does to its end, and what the parent does
meanwhile and says at the end. Floor 7.

No process is started: forks, descriptors and signals are stood in for, and calls are noted in their order. Whole jobs are held to the same
elsewhere (contracts/ranks/launched.py).
"""

# mypy: disable-error-code="arg-type,func-returns-value"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha.comm.control import ABSENT
from alpha.comm.flight import Record
from alpha.comm.meet import Across
from alpha.component import Measured
from alpha.errors import InputError, RankError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.train import launch
from alpha.train.launch import Deadlines, Ended, Seat, _Child

ACROSS = Across(1, 3, "far", 5, b"secret")
LIMITS = Deadlines(join=3.0, stall=2.0, abort=1.0)


class Left(BaseException):
    """A process that has left by os._exit, with its status."""


def _left(status: int) -> None:
    raise Left(status)


class _Notes(list[Any]):
    """Calls in their order."""

    def of(self, name: str, result: Any = None) -> Callable[..., Any]:
        """A function that is noted with what it is given."""
        def call(*given: Any, **more: Any) -> Any:
            self.append((name, *given, *([more] if more else [])))
            if isinstance(result, BaseException):
                raise result
            return result
        return call


class _Segment:
    """Memory of ranks 4 and 5 of six, noted."""

    def __init__(self, did: _Notes, size: int = 6, here: range = range(4, 6), failures: tuple[Any, ...] = (),
                 records: dict[int, list[Record]] | None = None,
                 steps: dict[int, int] | None = None, states: dict[int, int] | None = None) -> None:
        self.size, self.here, self.bridge, self.did = size, here, 0, did
        self.control = SimpleNamespace(failed=lambda: bool(failures), failures=lambda: list(failures), fail=did.of("fail"),
                                       step=lambda rank: (steps or {}).get(rank, -1),
                                       state=lambda rank: (states or {}).get(rank, ABSENT + 1))
        self.recorder = lambda rank: SimpleNamespace(records=lambda: (records or {}).get(rank, []))

    def close(self) -> None:
        """It is given back."""
        self.did.append(("close",))


def meetings(rng: np.random.Generator) -> Measured:
    """A rank of another launcher's job asks the first one of its host for the memory, which that one makes, or meets the other hosts for,
    and whose bridge it outlives; one that was given another size says so to all and ends."""
    checks: Named = []
    for local, across in ((1, None), (0, None), (0, ACROSS), (1, ACROSS)):
        for size in (6, 5):
            did = _Notes()
            segment, met = _Segment(did), SimpleNamespace(name="met")

            @contextmanager
            def world(*given: Any, **more: Any) -> Iterator[str]:
                did.append(("world", *given, more))
                yield "a world"
                did.append(("left",))

            seat, limits = Seat(4 + local, size, local, "a name", across), LIMITS if across else Deadlines()
            with instead(launch, ask=did.of("ask", segment), offer=did.of("offer"),
                         Segment=SimpleNamespace(create=did.of("create", segment)),
                         meet=did.of("meet", met), segment_of=did.of("segment", segment), start_bridge=did.of("bridge", 77), World=world,
                         secrets=SimpleNamespace(randbits=lambda bits: bits), _fail=did.of("told"),
                         os=SimpleNamespace(waitpid=did.of("waits"))):
                def inside() -> str:
                    with launch.join(seat, limits if across else None) as found:
                        did.append(("within", found))
                    return "over"
                found = said(inside)
            each = size // 3 if across else size
            start = [("ask", "a name", 4 + local, limits.join)] if local else [
                ("meet", across, each, 0, 64, 3.0), ("segment", met, across), ("bridge", met, across, segment, LIMITS),
                ("offer", segment, "a name", 3.0)] if across else [("create", size), ("offer", segment, "a name", limits.join)]
            wrong = error_text("InputError", "ranks of one job were given different sizes of it", f"WORLD_SIZE=5 for rank {4 + local}",
                               "6, as rank 4 has it",
                               "look at what the launcher sets")
            rest = [("world", segment, 4 + local, {"local_rank": local, "deadlines": limits}), ("within", "a world"), ("left",),
                    *[("waits", 77, 0)] * bool(across and not local)]
            same(checks, f"{local} {across} {size}", (found, list(did)), ("over", start + rest) if size == 6 else (
                wrong, [*start, ("told", segment, 4 + local, wrong.removeprefix("InputError: "))]))
    met = SimpleNamespace(size=6, epoch=9, job=7, streams=2, hosts=[SimpleNamespace(ranks=range(0, 2)), SimpleNamespace(ranks=range(2, 4))])
    did = _Notes()
    with instead(launch, Segment=SimpleNamespace(create=did.of("create", "made"))):
        same(checks, "memory of a host", (launch.segment_of(met, ACROSS), did),
             ("made", [("create", 6, {"epoch": 9, "here": range(2, 4), "job": 7, "streams": 2})]))
    for pid, fails in ((5, False), (0, False), (0, True)):
        did = _Notes()
        door = SimpleNamespace(close=did.of("door closed"))
        others = [SimpleNamespace(close=did.of("other closed"))]
        segment = _Segment(did)
        own = SimpleNamespace(hosts="hosts", door=door)
        bridge = SimpleNamespace(run=did.of("runs", OSError("lost") if fails else None))
        system = SimpleNamespace(getpid=lambda: 3, fork=lambda: pid, setpgid=did.of("group"), _exit=_left)
        with instead(launch, os=system, Bridge=did.of("bridge", bridge), _die_with=did.of("dies with"),
                     traceback=SimpleNamespace(print_exc=did.of("printed"))):
            try:
                result: object = launch.start_bridge(own, ACROSS, segment, LIMITS, others)
            except Left as left:
                result = left.args
        built = ("bridge", segment, "hosts", 1, door, b"secret", 1.0)
        same(checks, f"bridge {pid} {fails}", (result, list(did), segment.bridge), (5, [("door closed",)], 5) if pid else (
            (int(fails),), [("group", 0, 0), ("dies with", 3), ("other closed",), built, ("runs",), *[("printed",)] * fails], 0))
    return all_hold(checks)


def started(rng: np.random.Generator) -> Measured:
    """A job of other hosts meets them first and waits for its bridge at the end; ranks are started one by one and looked after; what
    cannot be started ends the others and the bridge, gives the memory back, and says how many there were."""
    checks: Named = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    for across in (None, ACROSS):
        for fails in (None, 1, "later"):
            did = _Notes()
            segment, met = _Segment(did), SimpleNamespace()

            def start(rank: int, *given: Any) -> str:
                if fails == 1 and rank == 5:
                    raise OSError(11, "Resource temporarily unavailable")
                did.append(("start", rank, given[0], given[1], given[2], given[3] == os.getpid(), given[4] == before, list(given[5])))
                return f"child {rank}"

            def look(children: list[Any], *given: Any) -> Ended:
                did.append(("looks", list(children), *given[:2], given[2] == before))
                masked.append(signal.pthread_sigmask(signal.SIG_BLOCK, set()) >= {*launch.FORWARDED})
                if fails == "later":
                    raise InputError("later")
                return Ended(3)

            masked = list[bool]()
            flushes = SimpleNamespace(stdout=SimpleNamespace(flush=did.of("out")), stderr=SimpleNamespace(flush=did.of("err")))
            system = SimpleNamespace(getpid=os.getpid, waitpid=did.of("waits"), kill=did.of("kills"))
            with instead(launch, meet=did.of("meet", met), segment_of=did.of("segment", segment),
                         Segment=SimpleNamespace(create=did.of("create", segment)),
                         start_bridge=did.of("bridge", 77), _start=start, _look_after=look,
                         _end=lambda children: did.append(("ends", list(children))),
                         secrets=SimpleNamespace(randbits=lambda bits: bits), os=system, sys=flushes):
                found = said(lambda: launch.launch(2, "body", epoch=8, deadlines=LIMITS if across else None, across=across))
            limits = LIMITS if across else Deadlines()
            one = ("start", 4, segment, "body", limits, True, True, [])  # type: ignore[var-annotated]
            both = [one, ("start", 5, segment, "body", limits, True, True, ["child 4"]), ("looks", ["child 4", "child 5"], segment, limits,
                                                                                          True)]
            expected = [*([("meet", across, 2, 8, 64, 3.0), ("segment", met, across)] if across else [("create", 2, {"epoch": 8})]),
                        ("out",), ("err",),
                        *[("bridge", met, across, segment, limits)] * bool(across)]
            end = [("ends", ["child 4", "child 5"])]
            killed = [("kills", 77, signal.SIGKILL), ("waits", 77, 0)] if across else []
            if fails == 1:
                expected += [one, ("ends", ["child 4"]), ("ends", ["child 4"]), *killed]
            else:
                expected += [*both, *[("waits", 77, 0)] * bool(across and not fails), *end, *(killed if fails else [])]
            same(checks, f"{across} {fails}", list(did), [*expected, ("close",)])
            same(checks, "it comes to", found, error_text("MachineError", "the ranks cannot be started",
                                                          "1 of 2: Resource temporarily unavailable",
                 do="start fewer ranks, or raise the limit on processes (ulimit -u)") if fails == 1 else "InputError: later" if fails
                 else f"{Ended(3)}")
            same(checks, "signals wait meanwhile", (masked, signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before),
                 ([True] * (fails != 1), True))
    for pid, refused in ((9, False), (9, True), (0, False)):
        did = _Notes()
        system = SimpleNamespace(pipe=lambda: (20, 21), fork=lambda: pid, close=did.of("close"), set_blocking=did.of("blocking"),
                                 pidfd_open=did.of("pidfd", OSError(24, "Too many") if refused else 22), kill=did.of("kills"),
                                 waitpid=did.of("waits"))
        others = [_Child(4, 8, 30, 31)]
        with instead(launch, os=system, _be=did.of("is", Left("a rank"))):
            try:
                result: object = launch._start(5, "segment", "body", LIMITS, 3, {1}, others)
            except (OSError, Left) as error:
                result = error.args[-1]
        parent = [("close", 21), ("blocking", 20, False), ("pidfd", 9)]
        same(checks, f"process {pid} {refused}", (result, list(did)), ("a rank", [("close", 20), ("close", 31), ("close", 30),
                                                                                  ("is", 5, "segment", "body", LIMITS, 3, {1}, 21)])
             if not pid else ("Too many", [*parent, ("close", 20), ("kills", 9, signal.SIGKILL), ("waits", 9, 0)]) if refused
             else (_Child(5, 9, 22, 20), parent))
    return all_hold(checks)


def lives(rng: np.random.Generator) -> Measured:
    """The life of a rank's process, to its end: whatever its body comes to is told once, as one line, and is its exit status; it dies with
    its parent, or at once where that is gone; nobody who reads no more stops it."""
    checks: Named = []

    class Odd(Exception):
        """What no code raises on purpose."""

    bad, lost = InputError("planted", came="this"), RankError("rank 1 died", rank=1)
    for outcome, status, told in (
            (0, 0, {"code": 0}), (4, 4, {"code": 4}), (bad, 2, {"error": str(bad), "error_code": 2, "blames": False, "device": ""}),
            (lost, 1, {"error": str(lost), "error_code": 1, "blames": True, "device": ""}), (KeyboardInterrupt(), 130, {"code": 130}),
            (Odd("odd"), 1, {"error": "Traceback", "error_code": 1, "blames": False, "device": ""})):
        did = _Notes()

        @contextmanager
        def world(*given: Any, **more: Any) -> Iterator[str]:
            did.append(("world", *given, more))
            yield "a world"

        def body(world: Any, tell: Any) -> int:
            tell(path="a run")
            if isinstance(outcome, BaseException):
                raise outcome
            return int(outcome)

        def refused() -> None:
            did.append(("flushed",))
            raise BrokenPipeError

        segment = _Segment(did)
        system = SimpleNamespace(write=did.of("write"), setpgid=did.of("group"), _exit=_left)
        stand_in = SimpleNamespace(pthread_sigmask=did.of("mask"), SIG_SETMASK=signal.SIG_SETMASK, SIGINT=signal.SIGINT)
        with instead(launch, os=system, World=world, _die_with=did.of("dies with"), signal=stand_in, context_lost=lambda error: "",
                     sys=SimpleNamespace(stdout=SimpleNamespace(flush=refused), stderr=SimpleNamespace(flush=did.of("flushed")))):
            try:
                launch._be(5, segment, body, LIMITS, 3, {7}, 21)
            except Left as left:
                same(checks, f"{outcome!r}: status", left.args, (status,))
        lines = [x[2] for x in did if x[0] == "write"]
        facts = [json.loads(x) for x in lines]
        if facts[-1].get("error", "").startswith("Traceback"):
            checks.append(("a traceback", "Odd: odd" in facts[-1]["error"]))
            facts[-1]["error"] = "Traceback"
        same(checks, f"{outcome!r}: told", (facts, all(x.endswith(b"\n") and x.count(b"\n") == 1 for x in lines)),
             ([{"path": "a run"}, told], True))
        same(checks, "its calls", [x for x in did if x[0] != "write"], [
            ("group", 0, 0), ("dies with", 3), ("mask", signal.SIG_SETMASK, {7}), ("world", segment, 5,
                {"local_rank": 1, "deadlines": LIMITS}), ("flushed",), ("flushed",)])
    for refuses, parent, expected in ((0, 3, "None"), (1, 3, error_text(
            "MachineError", "a rank cannot be tied to the process that started it", "prctl(PR_SET_PDEATHSIG) is refused", "Linux",
            "look at the seccomp rules of the container")), (0, 1, "left 1")):
        did = _Notes()
        with instead(launch, library=lambda name: SimpleNamespace(prctl=did.of("prctl", refuses)),
                     os=SimpleNamespace(getppid=lambda: parent, _exit=_left)):
            try:
                found = said(lambda: launch._die_with(3))
            except Left as left:
                found = f"left {left.args[0]}"
        same(checks, f"{refuses} {parent}", (found, list(did)), (expected, [("prctl", 1, 9, 0, 0, 0)]))
    return all_hold(checks)


def _child(rank: int, status: int | None = 0, killed: bool = False, **told: Any) -> _Child:
    made = _Child(rank, 100 + rank, 0, 0, told=told)
    made.status, made.killed = status, killed
    return made


def looked_after(rng: np.random.Generator) -> Measured:
    """While ranks run, signals are forwarded to all of them, but such as were ignored; who ended and told nobody is told of, unless all
    were asked to end; what has ended is sent nothing; at the end the handlers are as before."""
    checks: Named = []
    numbers = launch.FORWARDED
    old = {number: signal.getsignal(number) for number in numbers}
    try:
        for ignored in (None, signal.SIGHUP):
            for number in numbers:
                signal.signal(number, signal.SIG_IGN if number == ignored else signal.SIG_DFL)
            did, rounds = _Notes(), [0]
            children = [_child(4, None), _child(5, None)]

            def look(children: list[_Child], segment: object, interrupted: bool) -> None:
                did.append(("look", interrupted))
                rounds[0] += 1
                if rounds[0] == 1:
                    for number in (signal.SIGTERM, signal.SIGHUP):
                        signal.raise_signal(number)
                else:
                    children[rounds[0] - 2].status = 0

            segment = _Segment(did)
            segment.control.failed = lambda: "failed"
            with instead(launch, _look=look, _look_for_stopped=did.of("stopped"), _end_late=did.of("late"), _send=lambda child,
                         number: did.append(("send", child.rank, number)),
                         _verdict=lambda children, segment, signals: list(signals)):
                found = launch._look_after(children, segment, LIMITS, signal.pthread_sigmask(signal.SIG_BLOCK, set()))
            came = [15] if ignored else [15, 1]
            after = [("stopped", children, segment, 2.0), ("late", children, "failed", LIMITS)]
            same(checks, f"{ignored}", (found, list(did)), (came, [("look", False), *(("send", rank, n) for n in came for rank in (4, 5)),
                                                                   *after,
                                                                   ("look", True), *after, ("look", True), *after]))
            same(checks, "as before", [signal.getsignal(n) for n in numbers],
                 [signal.SIG_IGN if n == ignored else signal.SIG_DFL for n in numbers])
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    for error, code, status, interrupted, told in (("", 0, 0, False, None), ("", None, 256, False, "rank 5 died (exit code 1)"),
                                                   ("", None, 9, False, "rank 5 died (killed by SIGKILL)"),
                                                   ("", None, 256, True, None), ("bad", None, 256, True, "bad"),
                                                   ("bad", 1, 256, False, "bad")):
        did, child = _Notes(), _Child(5, 105, 22, 20, told={k: v for k, v in (("error", error), ("code", code)) if v not in ("", None)})
        poll = SimpleNamespace(register=did.of("register"), poll=lambda wait: did.append(("poll", wait)) or [(22, 1), (20, 1)])
        with instead(launch, select=SimpleNamespace(POLLIN=1, poll=lambda: poll), _hear=did.of("hear"), _fail=did.of("fail"),
                     os=SimpleNamespace(waitpid=did.of("waits", (105, status)), WNOHANG=os.WNOHANG,
                                        waitstatus_to_exitcode=os.waitstatus_to_exitcode, close=did.of("close"))):
            launch._look([_child(4, 0), child], "segment", interrupted)
        same(checks, f"{error} {code} {status}", (list(did), child.status), ([("register", 20, 1), ("register", 22, 1), ("poll", 50.0),
                                                                              ("waits", 105, os.WNOHANG), ("hear", child),
             ("close", 20), ("close", 22), *([("fail", "segment", 5, told)] if told else [])], os.waitstatus_to_exitcode(status)))
    sent = _Notes()
    for status, error in ((None, None), (0, None), (None, ProcessLookupError())):  # type: ignore[assignment]
        with instead(launch, signal=SimpleNamespace(pidfd_send_signal=sent.of("send", error))):
            launch._send(_Child(5, 105, 22, 20, status=status), 15)
    same(checks, "sent", list(sent), [("send", 22, 15)] * 2)
    did = _Notes()
    running = _Child(5, 105, 22, 20)
    with instead(launch, _send=did.of("send"), os=SimpleNamespace(waitpid=did.of("waits", (105, 9)),
                                                                  waitstatus_to_exitcode=os.waitstatus_to_exitcode, close=did.of("close"))):
        launch._end([_child(4, 0), running])
    same(checks, "ended", (list(did), running.status), ([("send", running, signal.SIGKILL), ("waits", 105, 0), ("close", 20),
                                                         ("close", 22)], -9))
    parts = [b'{"a": 1}\n{"b"', b': 2}\n', b"{"]
    hearing = _Child(5, 105, 22, 20)
    for end in (BlockingIOError(), b""):
        left = [*parts, end]

        def read(fd: int, most: int) -> bytes:
            got = left.pop(0)
            if isinstance(got, BaseException):
                raise got
            return got

        hearing.heard, hearing.told = b"", {}
        with instead(launch, os=SimpleNamespace(read=read)):
            launch._hear(hearing)
        same(checks, "heard", (hearing.told, hearing.heard), ({"a": 1, "b": 2}, b"{"))
    return all_hold(checks)


def verdicts(rng: np.random.Generator) -> Measured:
    """What a job came to: the largest code of its ranks, the signal that ended it, or what failed first, by who told it; and of each rank
    how it ended, in which step, and the last collective that it had done or waited in. Short stops of a rank do not add up."""
    checks: Named = []

    def failure(teller: int) -> Any:
        return SimpleNamespace(teller=teller, text="rank 9 stopped")

    ok, account = {"code": 0,
                   "path": "p"}, "rank 4 ended (exit code 0): in no collective yet\nrank 5 ended (exit code 0): in no collective yet"
    for told, failures, signals, expected in (
            ([ok, {"code": 3}], (), [], Ended(3, told=ok)), ([ok, {}], (), [], Ended(0, told=ok)),
            ([ok, {"code": 0}], (), [15], Ended(0, told=ok)),
            ([ok, {"code": 143}], (), [15, 2], Ended(143, told=ok)), ([ok, {}], (failure(5),), [2], Ended(130, "interrupted", told=ok)),
            ([ok, {"code": 1, "error": "e"}], (), [2], Ended(1, told=ok)),
            ([ok, {}], (failure(5),), [], Ended(1, "rank 9 stopped", True, account, ok)), ([ok, {}], (failure(1),), [],
                                                                                           Ended(1, "rank 9 stopped", True, account, ok)),
            ([ok, {"error": "e", "blames": False, "error_code": 2}], (failure(5), failure(4)), [],
                Ended(2, "rank 5: e", False, account, ok)),
            ([ok, {"error": "e", "blames": True, "error_code": 2}], (failure(5),), [], Ended(1, "rank 9 stopped", True, account, ok)),
            ([ok, {"error": "e", "blames": False, "error_code": 2, "device": "d"}], (failure(5),), [],
                Ended(1, "rank 5: its GPU is lost: d", True, account, ok))):
        children = [_child(4 + i, 0, **facts) for i, facts in enumerate(told)]
        same(checks, f"{told} {signals}", launch._verdict(children, _Segment(_Notes(), failures=failures), signals), expected)
    done = Record(31, 7, "all_reduce", "f32", 8, 3, 1, 2, 9, "m.py:4")
    waits = Record(16, 8, "broadcast", "f32", 8, -1, 1, 2, 0, "")
    for child, records, step, state, text in (
            (_child(4, 0), [], -1, ABSENT, "rank 4 ended (exit code 0): in no collective yet"), (_child(4, -9), [done], 5, ABSENT,
                "rank 4 ended (killed by SIGKILL) in step 5: in no collective yet"),
            (_child(5, 1), [waits, done], 0, 3,
                "rank 5 ended (exit code 1) in step 0: had done all_reduce number 7 of group 0x1f, step 3, m.py:4"),
            (_child(5, -9, True), [done, waits], 12, 3,
                "rank 5 ended (killed by SIGKILL, because it did not answer) in step 12: waited in broadcast number 8 of group 0x10")):
        segment = _Segment(_Notes(), records={child.rank: records}, steps={child.rank: step}, states={child.rank: state})
        same(checks, text, launch._account(child, segment), text)
    did = _Notes()
    with instead(launch, time=SimpleNamespace(monotonic_ns=lambda: 77)):
        launch._fail(_Segment(did, steps={5: 6}), 5, "text")
    (failed,) = (x[1] for x in did)
    same(checks, "told of a failure", (failed.rank, failed.teller, failed.op, failed.step, failed.text, 77 in vars(failed).values()),
         (5, 5, "", 6, "text", True))
    for stopped, state, looks, expected_fail in ((None, "running", 0, []), (None, "stopped", 10**9, []),  # type: ignore[assignment]
                                                 (None, "stopped", 3 * 10**9, [("fail", "rank 5 is stopped, for 2 s")])):
        did, child = _Notes(), _Child(5, 105, 22, 20, stopped=stopped)
        with instead(launch, process_state=lambda pid: state, Served=lambda pid: SimpleNamespace(look=lambda: looks), _fail=lambda segment,
                     rank, text: did.append(("fail", text))):
            launch._look_for_stopped([_child(4, 0), child], "segment", 2.0)
        same(checks, f"{state} {looks}", (list(did), child.stopped is not None), (expected_fail, state == "stopped"))
    clock, now, did, child = SimpleNamespace(s=0), ["stopped"], _Notes(), _Child(5, 105, 22, 20)

    def served(pid: int) -> Any:
        began = clock.s
        return SimpleNamespace(look=lambda: 10**9 * (clock.s - began))

    stops = int(rng.integers(2, 5))  # none lasts above the limit; all together do
    with instead(launch, process_state=lambda pid: now[0], Served=served, _fail=lambda segment, rank, text: did.append((clock.s, text))):
        for seen in (*("stopped", "stopped", "stopped", str(rng.choice(["running", "sleeping"]))) * stops, *("stopped",) * 4):
            now[0] = seen
            launch._look_for_stopped([child], "segment", 2.0)
            clock.s += 1
    same(checks, f"{stops} short stops and a long one", list(did), [(4 * stops + 3, "rank 5 is stopped, for 2 s")])
    for first, failed_, looks, killed in ((None, False, 10**12, False), (0, False, 3 * 10**9, True), (0, False, 3 * 10**9 - 1, False),
                                          (None, True, 10**9, True), (None, True, 10**9 - 1, False)):
        did, child = _Notes(), _Child(5, 105, 22, 20)
        with instead(launch, Served=lambda pid: SimpleNamespace(look=lambda: looks), _send=lambda child,
                     number: did.append((child.rank, number))):
            launch._end_late([_child(4, first), child], failed_, LIMITS)
        wanted = [(5, signal.SIGKILL)] if killed else []
        same(checks, f"late {first} {failed_} {looks}", ([x for x in did if x[0] == 5], child.killed), (wanted, killed))
    return all_hold(checks)
