"""Cases of steps and saves that go wrong: numbers that are not finite, state that changed, a full disk. Floor 7."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import folders
from alpha.checkpoint.disk import Disk
from alpha.component import Measured
from alpha.errors import MachineError, NonFiniteError, SpotCheckError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.made import bits_of, small_run
from alpha.profile.store import read
from alpha.train.loop import Loop, Watch


def full_disk(rng: np.random.Generator) -> Measured:
    """The disk fills up while a run saves: the error says so, and the run goes on from the checkpoint before."""
    checks = []
    with small_run(rng) as run:
        with run.loop("whole") as loop:
            loop.start()
            loop.run()
            expected = bits_of(loop)
        with run.loop("a") as loop:
            loop.start()
            loop.run(Watch(stop=lambda: loop.step == 3))
            real, message = Disk.write, ""
            Disk.write = _no_room  # type: ignore[method-assign, assignment]
            try:
                loop.run()
            except MachineError as error:
                message = error.what
            finally:
                Disk.write = real  # type: ignore[method-assign]
            checks.append((f"the message is {message!r}", "disk is full" in message))
            checks.append(("an earlier checkpoint is gone", folders.steps(loop.checkpoints) == [2, 3]))
        with run.loop("a") as loop:
            loop.resume()
            checks.append(("other bits afterwards", loop.step == 3 and loop.run() and bits_of(loop) == expected))
    return all_hold(checks)


def _no_room(disk: Disk, path: Path, chunks: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def changed_meanwhile(rng: np.random.Generator) -> Measured:
    """Weights and moments that change by themselves, between the last microbatch of the step behind a checked one and its update, end the
    run by name."""
    checks = []
    with small_run(rng) as run:
        for kind in ("param", "m", "v"):
            with run.loop(kind) as loop:
                loop.start()
                enqueue, layout = loop.executor.enqueue, loop.program.states[kind]
                tensor = layout.tensors[int(rng.integers(len(layout.tensors)))]
                place = layout.offsets[tensor.name] + int(rng.integers(tensor.size))

                flips: list[int] = []

                def flipped(plans: tuple[str, ...], inputs: Any = None, *, loop: Loop = loop, kind: str = kind, place: int = place,
                            enqueue: Any = enqueue, flips: list[int] = flips) -> None:
                    enqueue(plans, inputs)
                    if plans == tuple(call.plan for call in loop.replays[-2]) and loop.step == 1:
                        flips.append(place)
                        if len(flips) == 1:
                            loop.executor.state(kind).view(np.uint32)[place] ^= np.uint32(1 << 20)

                loop.executor.enqueue = flipped  # type: ignore[method-assign]
                loop.spots._each_ns = 0  # every piece is hashed, whatever it costs
                loop.advance()
                try:
                    loop.advance()
                    checks.append((f"{kind}: nothing was told", False))
                except SpotCheckError as error:
                    checks.append((f"{kind}: {error}"[:120], kind in error.what and tensor.name in str(error)))
    return all_hold(checks)


def bad_step(rng: np.random.Generator) -> Measured:
    """A step that is not finite is refused: named, state untouched and saved, the step not counted."""
    checks = []
    with small_run(rng) as run, run.loop("a", run.config(2, "train.verify=0")) as loop:  # which would see the change first
        loop.start()
        loop.advance()
        layout = loop.program.states["param"]
        place = layout.offsets[next(t.name for t in layout.tensors if t.name.endswith("mlp.up.weight"))]
        for value in (np.nan, np.inf):
            loop.executor.state("param")[place] = value
            before, message = bits_of(loop), ""
            try:
                loop.advance()
            except NonFiniteError as error:
                message = str(error)
            checks.append((f"{value}: not refused", bool(message)))
            checks.append((f"{value}: names no op ({message[:60]})", "block.0" in message and "model line" in message))
            checks.append((f"{value}: changed the state", bits_of(loop) == before))
            checks.append((f"{value}: counted", loop.step == 1 and run.rows("a")[-1][0] == 1 and run.rows("a")[-1][-1] == 0))
            checks.append((f"{value}: not saved", folders.steps(loop.checkpoints) == [1]))
        loop.executor.recorder.finish()
        loop.metrics.flush()
        timed = read(run.root / "a" / "m.sqlite", "step_timing", "step")
        checks.append((f"steps that are timed: {timed}, not the first alone", timed == [(0,)]))
    return all_hold(checks)
