"""What a person sees while a run goes on: a progress bar on a terminal, a line now and then elsewhere. Floor 6.

A console that goes away (`alpha train ... | head`, a closed terminal, a log on a full disk) takes nothing with it: the run goes on.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from alpha.flops.v1 import ModelFlops, mfu
from alpha.profile.noise import WARM_UP
from alpha.train.evaluate import Evaluation
from alpha.train.loop import StepResult
from alpha.train.peak import Peak

RECENT = 30
"""Steps over which speed is averaged."""

LINES = 20
"""Lines of progress of a whole run where there is no terminal."""


def duration(seconds: float) -> str:
    """75 -> 1:15; 3700 -> 1:01:40."""
    whole = max(0, round(seconds))
    hours, minutes, left = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


class Screen:
    """A text stream that may go away: from its first error on, what is written is dropped. All else is the stream's own."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self.lost = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write or drop `text`."""
        if not self.lost:
            try:
                self._stream.write(text)
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Pass on or drop what was written."""
        if not self.lost:
            try:
                self._stream.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        if isinstance(error, BlockingIOError):
            return  # full for the moment: this text alone is dropped
        self.lost = True
        try:  # what is left in the stream's buffer goes nowhere when the interpreter ends
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        except OSError:
            pass  # no file is behind it


class Printer:
    """Prints. `stamp` stands before every figure of an ungated run."""

    def __init__(self, console: Console | None = None, stamp: str = "") -> None:
        self.console = console or Console(file=cast(IO[str], Screen(sys.stdout)), highlight=False, soft_wrap=True)
        self.stamp = stamp

    def say(self, text: str, style: str = "") -> None:
        """One line, as it is: no markup in it is interpreted."""
        self.console.print(Text(text, style=style))

    def doing(self, text: str) -> AbstractContextManager[object]:
        """A spinner while something takes a moment; one line where there is no terminal."""
        if self.console.is_terminal:
            return self.console.status(text)
        self.say(f"{text} ...")
        return nullcontext()


class Board:
    """Progress of one run; give its methods to loop.Watch. Use as a context manager.

    Speed is that of steady steps, as in a report: not the first of the session, and not profiled. Before there is one it is that of all."""

    def __init__(self, printer: Printer, first: int, steps: int, flops: ModelFlops, peak: Peak, devices: int = 1,
                 profiled: Callable[[int], bool] = lambda step: False) -> None:  # fmt: skip
        """`first`: steps already done; `peak`: the run's one peak, of one of `devices`; MFU stands against that of all. `profiled`: whether
        a step is."""
        self.printer, self.first, self.steps, self.flops, self.peak = printer, first, steps, flops, peak
        self.devices, self.profiled = devices, profiled
        self.recent: deque[StepResult] = deque(maxlen=RECENT)
        self.began = time.perf_counter()
        self.tokens, self.seconds, self.counted, self.steady = 0, 0.0, 0, False
        self.bar = Progress(
            TextColumn("{task.fields[stamp]}step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[figures]}"),
            console=printer.console,
            transient=True,
            disable=not printer.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps, completed=first, figures="", stamp=f"{printer.stamp} " if printer.stamp else "")

    def __enter__(self) -> Board:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def tokens_per_second(self) -> float:
        """Over the recent steps, validation and saving not counted."""
        seconds = sum(r.seconds for r in self.recent)
        return sum(r.tokens for r in self.recent) / seconds if seconds else 0.0

    def mfu(self, speed: float) -> str:
        """Model FLOPs utilisation; a figure above 1 is no figure but a peak that was measured while the machine was busy."""
        share = mfu(speed, self.flops, self.devices * self.peak.flops)
        return f"{share:.1%}" if share <= 1.0 else "? (busy machine: peak measured too low)"

    def left(self, done: int) -> float:
        """Seconds left at the pace of the whole run so far, validation and saving counted."""
        return (time.perf_counter() - self.began) / max(1, done - self.first) * (self.steps - done)

    def step(self, result: StepResult) -> None:
        """A step is done."""
        steady = result.step >= self.first + WARM_UP and not self.profiled(result.step)
        if steady and not self.steady:
            self.recent.clear()
            self.tokens, self.seconds, self.counted, self.steady = 0, 0.0, 0, True
        if steady or not self.steady:
            self.recent.append(result)
            self.tokens += result.tokens
            self.seconds += result.seconds
            self.counted += 1
        done, speed = result.step + 1, self.tokens_per_second()
        figures = f"loss {result.loss:.4f}  {speed:,.0f} tokens/s  MFU {self.mfu(speed)}  {duration(self.left(done))} left"
        if self.printer.console.is_terminal:
            self.bar.update(self.task, completed=done, figures=figures)
        elif done in (self.first + 1, self.steps) or done % max(1, self.steps // LINES) == 0:
            self.printer.say(f"{self.printer.stamp + ' ' if self.printer.stamp else ''}step {done}/{self.steps}  {figures}")

    @property
    def mean_ns(self) -> float:
        """Of the steps that speed is of; 0 before the first."""
        return self.seconds * 1e9 / max(1, self.counted)

    def summary(self, mark: str) -> str:
        """This session in one line. `mark`: the stamp of its MFU."""
        speed, took = self.tokens / max(self.seconds, 1e-9), duration(time.perf_counter() - self.began)
        stamp = f"{self.printer.stamp} " if self.printer.stamp else ""
        none = "" if self.steady else " (no steady step: of all)"
        return f"{stamp}{self.steps - self.first} steps in {took}: {speed:,.0f} tokens/s, MFU {self.mfu(speed)}{none}  [{mark}]"

    def evaluated(self, step: int, found: Evaluation) -> None:
        """A validation is done."""
        stamp = f"{self.printer.stamp} " if self.printer.stamp else ""
        self.printer.say(f"{stamp}step {step}: validation {found.bits_per_byte:.4f} bits per byte ({found.windows} windows)")

    def sampled(self, step: int, text: str) -> None:
        """Text was sampled."""
        stamp = f"{self.printer.stamp} " if self.printer.stamp else ""
        self.printer.say(f"{stamp}step {step}: sample", "bold")
        self.printer.say(text, "dim")

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint stands."""
        if not self.printer.console.is_terminal:
            self.printer.say(f"step {step}: saved {path}")
