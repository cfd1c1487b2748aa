"""What the tests of `alpha bench` stand on: a peer that is made up, a small run, an emulated GPU with small calls, PyTorch where it is."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_gpu import Event, Stream, emulated_gpu

from alpha import config
from alpha.bench import ours, step
from alpha.bench.peer import ROOT, Peer
from alpha.cuda_runtime.nvml import Reading
from alpha.gates.cuda import calls as cuda_calls
from alpha.gates.cuda import perf as cuda_perf
from alpha.gates.cuda import subjects as cuda_subjects
from alpha.gates.cuda.calls import Call
from alpha.profile import noise
from alpha.train.assemble import program_for
from alpha.train.catalogue import catalogue
from alpha.types import TensorType

PYTHONS = (sys.executable, shutil.which("python3") or "")
"""Where PyTorch is looked for."""

MADE = [sys.executable, str(ROOT / "suites" / "support" / "made_peer.py"), str(ROOT)]


def made(**steps: object) -> list[str]:
    """The command of the made peer."""
    return [*MADE, json.dumps(steps)] if steps else MADE


def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that others use as well is no reason to discard here."""
    monkeypatch.setattr(noise, "PROBE_RISE", 1e9)


SMALL = [Call("one", (TensorType((64, 128), "bf16"), TensorType((128,), "bf16")), {"eps": 1e-5}, tensor_cores=False)]


class MadeClocks:
    """Clocks of a made GPU: `slow` says of reading i whether it is throttled. `seconds`: the time of its counter of joules, which a look
    moves, so that no figure hangs on when this machine comes to look."""

    def __init__(self, slow: object = lambda i: False) -> None:
        self.slow, self.taken, self.seconds = slow, 0, 0.0

    def sense(self, reading: Reading) -> Reading:
        return replace(reading, watts=690.0, celsius=60.0)

    def joules(self) -> float:
        self.seconds += 1e-3
        return 690.0 * self.seconds

    def read(self) -> Reading:
        self.taken += 1
        return Reading(1980.0, 0x40 if self.slow(self.taken) else 0x04)  # type: ignore[operator]


class MadeTime:
    """The time of a made GPU: launches and fills take what is said here, whatever else this machine does meanwhile."""

    LAUNCH, FILL, SPREAD = 10e-6, 3e-12, 0.01
    """Seconds of a launch, seconds of a byte that is filled, and the standard deviation of a launch's logarithm."""

    def __init__(self) -> None:
        self.now, self._rng = 0.0, np.random.default_rng(7)

    def launched(self) -> None:
        self.now += self.LAUNCH * float(np.exp(self.SPREAD * self._rng.standard_normal()))

    def filled(self, nbytes: int) -> None:
        self.now += self.FILL * nbytes


@contextmanager
def gpu_of_small_calls(clock: Callable[[], float] = time.perf_counter) -> Iterator[pytest.MonkeyPatch]:
    """An emulated GPU with events that know the time by `clock`, small calls, and probes that need no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        def record(self: Event, stream: Stream) -> None:
            plain(self, stream)
            stream.push(lambda: setattr(self, "at", clock()))

        plain = Event.record
        patch.setattr(Event, "record", record)
        patch.setattr(Event, "time_since", lambda self, other: 1e3 * (self.at - other.at), raising=False)
        patch.setattr(cuda_perf, "timed", lambda c: SMALL)
        patch.setattr(cuda_calls, "timed", lambda c: SMALL)
        patch.setattr(cuda_calls, "compared", lambda c: [])
        patch.setattr(ours, "FLUSH_BYTES", 4096)
        patch.setattr(cuda_perf, "FLUSH_BYTES", 4096)
        patch.setattr(cuda_perf, "PROBE_BYTES", 1 << 16)
        cuda_subjects.opened.cache_clear()

        class Peak:
            def __init__(self, *args: object, **more: object) -> None:
                pass

            def prepare(self, *args: object) -> object:
                return lambda stream: stream.push(lambda: time.sleep(1e-6))

        patch.setattr(cuda_perf, "Kernel", Peak)
        patch.setattr(cuda_perf, "compile_kernel", lambda source: None)
        with emulated_gpu():
            yield patch
        cuda_subjects.opened.cache_clear()


TINY = """
[run]
name = "t"
[model]
family = "{family}"
layers = 1
width = 128
heads = 2
{more}
[data]
tokenizer = "bpe"
vocab = 264
sequence = 32
[train]
steps = 6
batch = 4
shards = 2
precision = "{precision}"
[optim]
lr = 1e-3
[machine]
backend = "{backend}"
threads = 1
"""


def tiny(tmp_path: Path, backend: str = "cpu", family: str = "gpt", more: str = "") -> config.Config:
    path = tmp_path / f"{family}.toml"
    path.write_text(TINY.format(family=family, backend=backend, precision={"cpu": "f32", "cuda": "bf16"}[backend], more=more))
    return config.load(path)


def first_steps(cfg: config.Config, folder: Path) -> dict[str, Any]:
    """Loss, norm and learning rate of the steps that are compared, and the file of the parameters after them."""
    endless = replace(cfg, train=replace(cfg.train, profile=0, steps=step.ENDLESS))
    program = program_for(cfg, 264, catalogue(), 1)  # as `bench` builds it: with the run's own learning rates
    with step.Ours(endless, program, catalogue(), step.RandomTokens(endless, 264), None) as mine:
        taken = mine.take(step.CHECKED)
        np.savez(folder / "after.npz", **mine.parameters())  # type: ignore[arg-type]
    return {"loss": [r.loss for r in taken], "norm": [r.norm for r in taken], "rates": [r.lr for r in taken],
            "after": str(folder / "after.npz")}


@contextmanager
def pytorch() -> Iterator[Peer]:
    """A process that has PyTorch; where no Python here has it, the test is NOT_RUN."""
    for python in dict.fromkeys(p for p in PYTHONS if p):
        peer = Peer(python, "cpu", 1)
        if not peer.why:
            with peer:
                yield peer
            return
    pytest.skip("NOT_RUN: no Python here has PyTorch")
