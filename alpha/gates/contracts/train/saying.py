"""Cases of what is said while a run goes on: the console and a console that goes away, the log, long reads, signals, the start. Floor 7.

Clocks are stood in for: the lines are whole texts, and no case waits.
"""

# mypy: disable-error-code="arg-type,func-returns-value"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import signal
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

from alpha.component import Measured
from alpha.flops.v1 import ModelFlops
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.train import console, interrupt, log, startup, telling
from alpha.train.console import Board, Printer, Screen
from alpha.train.evaluate import Evaluation
from alpha.train.loop import StepResult
from alpha.train.peak import Peak


def _printer(terminal: bool = False, stamp: str = "") -> tuple[Printer, io.StringIO]:
    shown = io.StringIO()
    return Printer(Console(file=shown, highlight=False, soft_wrap=True, width=300, force_terminal=terminal, color_system=None,
                           _environ={"TERM": "xterm"}), stamp), shown  # whatever terminal the gate itself has


def board(rng: np.random.Generator) -> Measured:
    """Progress of drawn steps, at the times of a drawn clock: each line by hand. On a terminal the same figures stand in the bar, and
    nothing is printed. Speed leaves out the first three steps and those that are profiled, once there are others."""
    checks: Named = []
    for terminal, stamp in ((False, ""), (False, "UNGATED"), (True, ""), (True, "UNGATED")):
        printer, shown = _printer(terminal, stamp)
        first, steps, devices, now = int(rng.integers(3, 9)), int(rng.integers(60, 90)), int(rng.integers(2, 5)), [1000.0]
        flops = SimpleNamespace(per_token=float(rng.integers(3, 9)))
        peak, ahead = Peak(float(rng.integers(30, 40)), 1.0, "x"), f"{stamp} " if stamp else ""
        with instead(console, time=SimpleNamespace(perf_counter=lambda: now[0])):
            profiled = {first + 4, *rng.integers(first + 10, steps, 20).tolist()} - {steps - 1}
            made = Board(printer, first, steps, flops, peak, devices, profiled.__contains__)
            took, expected, figures = list[tuple[int, float]](), list[str](), ""
            same(checks, "no step", made.mean_ns, 0.0)
            for step in range(first, steps):
                tokens, seconds = int(rng.integers(50, 99)), 0.0 if step == first else float(rng.uniform(0.5, 6))
                now[0] += float(rng.uniform(1, 200))
                if step == first + 3:
                    took.clear()
                if step < first + 3 or step not in profiled:
                    took.append((tokens, seconds))
                made.step(StepResult(step, step + 0.12345, 1.0, 1.0, 1.0, tokens, seconds, True))
                some = took[-30:]
                spent = sum(s for _, s in some)
                speed = sum(n for n, _ in some) / spent if spent else 0.0
                share = speed * flops.per_token / (peak.flops * devices)
                done, left = step + 1, (now[0] - 1000.0) / (step + 1 - first) * (steps - step - 1)
                figures = (f"loss {step + 0.12345:.4f}  {speed:,.0f} tokens/s  MFU "
                           + (f"{100 * share:.1f}%" if share <= 1
                               else "? (busy machine: peak measured too low)") + f"  {_clock(left)} left")
                if done == first + 1 or done == steps or done % (steps // 20) == 0:
                    expected.append(f"{ahead}step {done}/{steps}  {figures}")
            checks.append(("mean", math.isclose(made.mean_ns, 1e9 * sum(s for _, s in took) / len(took))))
            all_tokens, spent = sum(n for n, _ in took), sum(s for _, s in took)
            share = all_tokens / spent * flops.per_token / (peak.flops * devices)
            same(checks, "summary", made.summary("mark"),
                 f"{ahead}{steps - first} steps in {_clock(now[0] - 1000)}: {all_tokens / spent:,.0f} "
                 f"tokens/s, MFU {f'{100 * share:.1f}%' if share <= 1 else '? (busy machine: peak measured too low)'}  [mark]")
        task = made.bar.tasks[0]
        same(checks, "bar", (task.completed, task.total, task.fields, made.bar.disable), (steps if terminal else first, steps, {
            "figures": figures if terminal else "", "stamp": ahead}, not terminal))
        same(checks, "lines", [x for x in shown.getvalue().splitlines() if not terminal], [] if terminal else expected)
        shown.seek(shown.truncate(0))
        made.evaluated(7, Evaluation(math.log(2) * 12, 4, 5, 6))
        made.sampled(8, "a [bold]text[/bold]")
        made.saved(9, Path("here"))
        same(checks, "told", shown.getvalue().splitlines(), [
            f"{ahead}step 7: validation 2.4000 bits per byte (6 windows)", f"{ahead}step 8: sample", "a [bold]text[/bold]",
            *["step 9: saved here"] * (not terminal)])
        shown.seek(shown.truncate(0))
        with printer.doing("reading [red]it"):
            printer.say("between", "bold")
        text = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]|\r", "", shown.getvalue())
        same(checks, "doing", ("reading" in text, [x for x in text.splitlines() if "between" in x], "..." in text),
             (True, ["between"], not terminal))
    for seconds, expected_text in ((0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (75, "1:15"), (3599, "59:59"), (3600, "1:00:00"),
                                   (36610, "10:10:10"), (-5, "0:00")):
        same(checks, "duration", console.duration(seconds), expected_text)
    with instead(console, time=SimpleNamespace(perf_counter=lambda: 5.0)):
        made = Board(_printer()[0], 0, 1, ModelFlops, Peak(1.0, 1.0, ""))
        same(checks, "one device", (made.devices, made.profiled(5)), (1, False))
        made = Board(_printer()[0], 0, 9, SimpleNamespace(per_token=6.0), Peak(1000.0, 1.0, ""), 1, lambda step: step > 2)
        for step in range(9):
            made.step(StepResult(step, 1.0, 1.0, 1.0, 1.0, 10, 1.0 + step % 2, True))
        same(checks, "none is steady", (made.summary("mark"), made.mean_ns), (
            "9 steps in 0:00: 7 tokens/s, MFU 4.2% (no steady step: of all)  [mark]", 13e9 / 9))
    return all_hold(checks)


def mfu_of_many(rng: np.random.Generator) -> Measured:
    """The share of a drawn speed in the peak of all devices, by hand. More than that is no figure."""
    checks: Named = []
    for devices in (1, *(int(n) for n in rng.integers(2, 9, 4))):
        per_token, peak, speed = float(rng.integers(6, 10)), float(rng.integers(3000, 4000)), float(rng.uniform(50, 90))
        made = Board(_printer()[0], 0, 9, SimpleNamespace(per_token=per_token), Peak(peak, 1.0, "x"), devices)
        limit = peak * devices / per_token
        same(checks, f"of {devices}", [made.mfu(s) for s in (speed, 0.999 * limit, 1.001 * limit)],
             [f"{100 * speed / limit:.1f}%", "99.9%", "? (busy machine: peak measured too low)"])
    return all_hold(checks)


def _clock(seconds: float) -> str:
    """As a stop watch shows it."""
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes}:{left:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{left:02d}"


class _Stream:
    """A text stream that refuses some calls, and has no file behind it."""

    name = "mine"

    def __init__(self, *errors: OSError | None) -> None:
        self.errors, self.did = list(errors), list[str]()

    def _do(self, what: str) -> None:
        self.did.append(what)
        if self.errors and (error := self.errors.pop(0)):
            raise error

    def write(self, text: str) -> int:
        """Write."""
        self._do(text)
        return len(text)

    def flush(self) -> None:
        """Pass on."""
        self._do("flush")

    def fileno(self) -> int:
        """There is none."""
        raise io.UnsupportedOperation("fileno")


def gone(rng: np.random.Generator) -> Measured:
    """A console that is full for a moment loses that text alone; one that goes away takes what is written from then on, and nothing else:
    what is left in its buffer goes nowhere."""
    checks: Named = []
    full, away = BlockingIOError(errno.EAGAIN, "full"), BrokenPipeError(errno.EPIPE, "gone")
    for errors, did, lost in (((full, None, full), ["a", "b", "flush", "c", "flush"], False), ((None, away), ["a", "b"], True),
                              ((None, None, away), ["a", "b", "flush"], True), ((), ["a", "b", "flush", "c", "flush"], False)):
        stream = _Stream(*errors)
        screen = Screen(stream)
        found = [screen.write("a"), screen.write("b"), screen.flush(), screen.write("c"), screen.flush()]
        same(checks, "stream", (stream.did, screen.lost, found, screen.name), (did, lost, [1, 1, None, 1, None], "mine"))
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        screen = Screen(pipe)
        os.close(read)
        screen.write("what nobody reads")
        screen.flush()
        same(checks, "a closed pipe", (screen.lost, os.readlink(f"/proc/self/fd/{pipe.fileno()}")), (True, os.devnull))
    with instead(console.sys, stdout=io.StringIO()):
        printer = Printer()
        printer.say("a " * 200 + "[b]1,234[/b]")
        same(checks, "one line, as it is", console.sys.stdout.getvalue(), "a " * 200 + "[b]1,234[/b]\n")  # type: ignore[union-attr]
        same(checks, "a screen", type(printer.console.file), Screen)
    return all_hold(checks)


def logged(rng: np.random.Generator) -> Measured:
    """Each line of a log is one write of one object: time, level, event, step and fields as JSON has them; what the disk cut short is
    closed by the next, and left out by who reads; warnings are logged and shown; what the disk refuses is an error with its words."""
    checks: Named = []
    with tempfile.TemporaryDirectory(prefix="alpha-log-") as root:
        folder, number = Path(root) / "a" / "logs", int(rng.integers(1, 9))
        with log.RankLog(folder, number) as own:
            own.say("start", 3, pid=7, path=Path("x"), bad=float("nan"), more=math.inf, half=0.5, none=None, yes=True, text="ü\ud800")
            own.say("end", level="error", reason="r")
            os.write(own._file, b'{"cut": ')
        file = folder / f"rank{number}.jsonl"
        shown, before = list[tuple[object, ...]](), warnings.showwarning
        with log.RankLog(folder, number) as own, instead(warnings, showwarning=lambda *given: shown.append(given)):
            with own.warnings(lambda: 42), warnings.catch_warnings():
                warnings.simplefilter("always")
                handler = warnings.showwarning
                handler("careful", UserWarning, "file.py", 12)
            own.close()
            own.close()
            checks.append(("warnings are shown as before", warnings.showwarning is not handler))
        checks.append(("the same again", warnings.showwarning is before))
        lines = file.read_text(encoding="utf-8").split("\n")
        same(checks, "lines", (len(lines), lines[2], lines[4]), (5, '{"cut": ', ""))
        found = log.read(file)
        same(checks, "read", [{k: v for k, v in x.items() if k != "time"} for x in found], [
            {"level": "info", "event": "start", "step": 3, "fields": {"pid": 7, "path": "x", "bad": None, "more": None, "half": 0.5,
                                                                      "none": None, "yes": True, "text": "ü?"}},
            {"level": "error", "event": "end", "step": None, "fields": {"reason": "r"}},
            {"level": "warning", "event": "warning", "step": 42, "fields": {"text": "careful", "category": "UserWarning",
                                                                            "place": "file.py:12"}}])
        checks.append(("times", all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", x["time"]) for x in found)))
        same(checks, "shown", shown, [("careful", UserWarning, "file.py", 12, None, None)])
        size = file.stat().st_size
        with log.RankLog(folder, number) as own:
            same(checks, "nothing is closed twice", file.stat().st_size, size)
            for refuses, why in ((lambda *x: len(x[1]) - 1, "only a part of the line was written"), (_refuses, "Input/output error")):
                with instead(log, os=SimpleNamespace(write=refuses)):
                    same(checks, why, said(lambda: own.say("end")), error_text(
                        "MachineError", "the disk is full" if "part" in why else "the file cannot be written", f"{file} ({why})",
                        "room and permission to write there", "free some space and run again; what was saved before is untouched"
                        if "part" in why else "check the folder"))
        (Path(root) / "file").write_text("")
        same(checks, "no folder", said(lambda: log.RankLog(Path(root) / "file")), error_text(
            "MachineError", "the file cannot be written", f"{root}/file/rank0.jsonl (File exists)", "room and permission to write there",
            "check the folder"))
        with suppress(AssertionError), log.RankLog(folder, 99) as own:
            own.say("unheard")
            checks.append(("an event that is none", False))
        checks.append(("as text", json.loads(lines[0])["fields"]["path"] == "x"))
    return all_hold(checks)


def _refuses(*given: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def signals(rng: np.random.Generator) -> Measured:
    """While a loop runs, the first of SIGINT and SIGTERM asks it to stop, the second acts as before; SIGHUP never does, an ignored one
    stays ignored; the first number is told; standard error is told unless another rank does, and where nobody reads it nothing comes of
    that."""
    checks: Named = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.getsignal(number) for number in numbers}
    came, wrote = list[int](), list[tuple[int, bytes]]()
    line = b"\nfinishing this step, then saving; once more to end at once\n"
    try:
        for first in numbers:
            for silent in (False, True):
                for number in numbers:
                    signal.signal(number, lambda number, frame: came.append(number))
                came.clear()
                wrote.clear()
                with instead(interrupt, os=SimpleNamespace(write=lambda fd, text: wrote.append((fd, text)))), \
                        interrupt.Interrupt(silent=silent) as asked:
                    same(checks, "none yet", asked(), 0)
                    signal.raise_signal(first)
                    same(checks, "first", (asked(), came), (first, []))
                    signal.raise_signal(first)
                    others = [n for n in numbers if n != first]
                    for number in others:
                        signal.raise_signal(number)
                    same(checks, "all", (asked(), came), (first, [first] * (first != signal.SIGHUP)))
                    same(checks, "said", wrote, [] if silent else [(2, line)] * (3 + (first == signal.SIGHUP)))
                for number in numbers:
                    signal.raise_signal(number)
                same(checks, "afterwards", came[-3:], list(numbers))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with instead(interrupt, os=SimpleNamespace(write=_refuses)), interrupt.Interrupt() as asked:
            same(checks, "ignored", signal.getsignal(signal.SIGHUP), signal.SIG_IGN)
            signal.raise_signal(signal.SIGTERM)
            same(checks, "nobody reads", asked(), signal.SIGTERM)
        same(checks, "ignored still", signal.getsignal(signal.SIGHUP), signal.SIG_IGN)
        same(checks, "exit codes", interrupt.EXIT, 128)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return all_hold(checks)


def long_reads(rng: np.random.Generator) -> Measured:
    """What lasts is told every so many seconds: bytes, time and rate, and how long nothing came where that is so long; a short one
    never."""
    checks: Named = []
    began, now, said_, waits = int(rng.integers(20, 40)) / 4, [0.0], list[str](), list[float]()
    now[0] = began
    script = [(3.0, None), (10.0, (2_500_000, 9_000_000)), (9.9, None), (10.1, None), (5.0, (9_000_000, 9_000_000))]

    class Over:
        """What a thread waits for."""

        def wait(self, every: float) -> bool:
            """The script's next moment."""
            waits.append(every)
            if not script:
                return True
            passed, progress = script.pop(0)
            now[0] += passed
            if progress:
                told(*progress)
            return False

        def set(self) -> None:
            """It is over."""

    class Thread:
        """One that does all of its work when it is waited for."""

        def __init__(self, target: Any, name: str, daemon: bool) -> None:
            self.join = target
            same(checks, "thread", (name, daemon), ("telling", True))

        def start(self) -> None:
            """Nothing yet."""

    stand_ins = SimpleNamespace(Event=Over, Thread=Thread)
    with instead(telling, threading=stand_ins), telling.telling("reading x", said_.append, every=10.0, clock=lambda: now[0]) as told:
        told(1_000_000, 9_000_000)
    silence = "; nothing came for {} s: the disk is slow, or does not answer"
    same(checks, "said", said_, [
        "reading x: 1.0 of 9.0 MB after 3 s, 0.3 MB/s", "reading x: 2.5 of 9.0 MB after 13 s, 0.2 MB/s",
        "reading x: 2.5 of 9.0 MB after 23 s, 0.1 MB/s", f"reading x: 2.5 of 9.0 MB after 33 s, 0.1 MB/s{silence.format(20)}",
        "reading x: 9.0 of 9.0 MB after 38 s, 0.2 MB/s"])
    same(checks, "waits", waits, [10.0] * 6)
    script, waits = [(0.0, None), (10.0, None)], []
    said_.clear()
    now[0] = began
    with instead(telling, threading=stand_ins), telling.telling("y", said_.append, clock=lambda: now[0]) as told:
        pass
    same(checks, "from nothing", (said_, waits), (["y: 0.0 of 0.0 MB after 0 s, 0.0 MB/s",
                                                   f"y: 0.0 of 0.0 MB after 10 s, 0.0 MB/s{silence.format(10)}"],
                                                  [10.0] * 3))
    return all_hold(checks)


def starts(rng: np.random.Generator) -> Measured:
    """The phases of a start: from the process's own beginning in its first session, each as long as it took, one that came twice summed."""
    checks: Named = []
    marks = np.cumsum(rng.integers(10**8, 10**10, 6)).tolist()
    for counted in (False, True):
        times = list(marks)
        with instead(startup.Startup, counted=counted), instead(startup, process_began_ns=lambda: marks[0] - 10**9,
                                                                time=SimpleNamespace(perf_counter_ns=lambda: times.pop(0))):
            first = times[0] if counted else marks[0] - 10**9
            began = startup.Startup()
            same(checks, "counted", startup.Startup.counted, True)
            if not counted:
                times.pop(0)
            for name in ("text", "Program", "text"):
                began.phase(name)
            open_ = began.seconds()
            began.end()
            ended = [began.seconds(), began.text()]
        m = [first, *marks[1:]]
        for found, last in ((open_, m[4]), (ended[0], m[5])):
            wanted = {"command": m[1] - m[0], "text": m[2] - m[1] + last - m[3], "Program": m[3] - m[2]}
            checks.append((f"{found} for {wanted}", list(found) == list(wanted) and all(
                math.isclose(found[k] * 1e9, wanted[k], rel_tol=1e-9) for k in wanted)))  # type: ignore[index]
        each = {"command": m[1] - m[0], "text": m[2] - m[1] + m[5] - m[3], "Program": m[3] - m[2]}
        same(checks, "text", ended[1], f"{sum(each.values()) / 1e9:.1f} s from the command: " + ", ".join(
            f"{name} {ns / 1e9:.1f}" for name, ns in each.items()))
    ticks, hertz, boot, now = int(rng.integers(1000, 2000)), 100, 30 * 10**9, 7 * 10**9
    fields = " ".join(["S", *(["0"] * 18), str(ticks), "0"])
    system = SimpleNamespace(perf_counter_ns=lambda: now, clock_gettime_ns=lambda clock: boot if clock == 3 else 0, CLOCK_BOOTTIME=3)
    for text, expected in ((f"1 (a) b) {fields}", now - (boot - ticks * 10**7)), (None, now),
                           (f"1 (x) {fields.replace(str(ticks), '9999')}", now)):
        file = SimpleNamespace(read_text=lambda text=text: text if text else _refuses())
        with instead(startup, time=system, Path=lambda path: file if path == "/proc/self/stat" else None,
                     os=SimpleNamespace(sysconf=lambda name: hertz if name == "SC_CLK_TCK" else 0)):
            same(checks, "began", startup.process_began_ns(), expected)
    return all_hold(checks)
