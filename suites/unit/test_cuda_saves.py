"""Saves of a run on an emulated GPU: what stands is the state as it was, copied beside the next step; what they add is told."""

from __future__ import annotations

import ctypes
import gc
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import flips
import numpy as np
import pytest
from emulated_gpu import EmulatedGpu, emulated, emulated_gpu, run_with
from wrong_wiring import Wiring, planted

from alpha.backends.cuda.downloads import Downloads
from alpha.backends.cuda.observe import Watch
from alpha.checkpoint import folders
from alpha.checkpoint.disk import Disk
from alpha.component import Catalogue
from alpha.errors import AlphaError, GraphError, MachineError, SpotCheckError
from alpha.gates.contracts import cuda_run
from alpha.graph.state import StateLayout
from alpha.profile.store import read
from alpha.tomlfile import tomllib
from alpha.train import memory_check
from alpha.train.catalogue import catalogue
from alpha.train.loop import Loop
from alpha.train.loop import Watch as Looks
from alpha.train.stalls import Stalls

STEPS, EVERY = 9, 2
Bits = dict[str, bytes]


class Slow(Disk):
    """Writes block after block, slowly."""

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        def late() -> Iterator[bytes | memoryview]:
            for chunk in chunks:
                time.sleep(0.02)
                yield bytes(chunk)
                time.sleep(0.02)

        super().write(path, late())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    monkeypatch.setattr(Watch, "due", False)  # clocks are set now and then, which takes an idle stream: on a slow machine at any step
    with emulated_gpu() as found:
        yield found


@pytest.fixture(scope="module")
def kernels() -> Catalogue:
    return emulated(catalogue())


def bits(states: Iterable[tuple[str, tuple[StateLayout, np.ndarray]]]) -> Bits:
    """Of every tensor of every kind, padding left out."""
    return {f"{kind} {t.name}": flat[layout.offsets[t.name] : layout.offsets[t.name] + t.size].tobytes()
            for kind, (layout, flat) in states for t in layout.tensors}


@pytest.fixture(scope="module")
def undisturbed(kernels: Catalogue, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Bits]:
    """The state behind each step of a run that never saves, read while nothing runs; of sound code, whatever a test plants."""
    with pytest.MonkeyPatch.context() as patch, emulated_gpu():
        patch.setattr(Watch, "due", False)
        with flips.on_device(tmp_path_factory.mktemp("saves") / "none", kernels, verify=0, profile=0, steps=STEPS) as loop:
            found = {}
            while loop.step < STEPS:
                loop.advance()
                found[loop.step] = bits(loop.snapshot().items())
            return found


@dataclass(frozen=True)
class Asked:
    """`what`: 'begin' or 'open' of a save; `step`: the one that runs; `micros`, `update`: kernels of its microbatches and its update that
    the device has yet to run; `looked`: plans of it that were looked at launch by launch."""

    what: str
    step: int
    micros: int
    update: int
    looked: int


def asked_of(loop: Loop) -> list[Asked]:
    """What the device has yet to do whenever a save is begun or opened; it goes on as the loop does."""
    found = list[Asked]()
    update = {launch.component for launch in loop.plans["update"].launches}
    micros = {launch.component for name, plan in loop.plans.items() if name.startswith("micro") for launch in plan.launches} - update

    def watched(what: str) -> None:
        own = getattr(loop.saver, what)

        def noted(*given: object) -> None:
            if what == "open" and not loop.saver.begun:
                return own(*given)
            waiting = [getattr(work, "kernel", "") for work in loop.executor.stream.queue]  # type: ignore[attr-defined]
            left = sum(x in micros for x in waiting), sum(x in update for x in waiting)
            found.append(Asked(what, loop.step, *left, loop.spots._call + 1))
            own(*given)

        setattr(loop.saver, what, noted)

    watched("begin")
    watched("open")
    return found


PAUSES: dict[str, dict[str, int]] = {"none": {}, "validation": {"eval_every": EVERY, "eval_windows": 2}, "text": {"sample_every": EVERY},
                                     "profiled": {"profile": STEPS}, "clocks": {}, "checks": {"verify": EVERY}}
"""What stands between a step and a save, or looks at the step behind it."""


@pytest.mark.parametrize("pause", PAUSES)
def test_a_save_begins_behind_microbatches_wherever_it_falls(pause: str, undisturbed: dict[int, Bits], gpu: EmulatedGpu,
                                                             kernels: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that neither its copy nor what the host does for it is waited for. A checked step waits for each plan: the copy is begun before
    it, and the host does its part in the next step that does not."""
    monkeypatch.setattr(Watch, "due", pause == "clocks")
    sets: dict[str, object] = {"verify": 0, "profile": 0, "steps": STEPS, "checkpoint_every": EVERY, "keep": 99, **PAUSES[pause]}
    with flips.on_device(tmp_path / "saved", kernels, **sets) as loop:
        loop.sample_tokens = 2
        loop.foretell_saves()
        asked = asked_of(loop)
        loop.run()
        assert bits(loop.snapshot().items()) == undisturbed[STEPS]
    assert folders.steps(loop.checkpoints) == [2, 4, 6, 8, 9]
    for step in folders.steps(loop.checkpoints):
        assert bits(folders.read(folders.at(loop.checkpoints, step)).items()) == undisturbed[step], f"step {step} is torn"
    begun, opened = ([x for x in asked if x.what == what and x.step < STEPS] for what in ("begin", "open"))
    assert [x.step for x in begun] == [2, 4, 6, 8]
    if pause == "checks":
        assert not any(x.looked for x in begun), begun
        assert [x.step for x in opened if x.micros and x.update] == [x.step for x in opened] == [3, 5, 7], opened
    else:
        assert all(x.micros and not x.update for x in begun), begun
        assert [x.step for x in opened if x.micros and x.update] == [2, 4, 6, 8], opened


def test_what_stands_is_the_state_as_it_was(undisturbed: dict[int, Bits], gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path) -> None:
    """Also where the disk is slower than the steps, in one piece of page-locked memory, beside the next step's microbatches."""
    with flips.on_device(tmp_path / "saved", kernels, verify=0, profile=0, steps=STEPS, checkpoint_every=EVERY, keep=99) as loop:
        loop.saver.disk = Slow()
        loop.foretell_saves()
        asked = asked_of(loop)
        loop.run()
        assert bits(loop.snapshot().items()) == undisturbed[STEPS]
        size = loop.stalls.nbytes
    assert folders.steps(loop.checkpoints) == [2, 4, 6, 8, 9]
    assert [x.micros > 0 for x in asked if x.what == "begin"] == [True] * 4 + [False]
    for step in folders.steps(loop.checkpoints):
        folders.inspect(folders.at(loop.checkpoints, step))
        assert bits(folders.read(folders.at(loop.checkpoints, step)).items()) == undisturbed[step], f"step {step} is torn"
    assert gpu.registered == [size] and gpu.allocated == 0


def test_a_closed_executor_goes_at_once(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when Python next looks for cycles: its page-locked memory would then be freed inside a capture, which ends the capture."""
    def left() -> object:
        with cuda_run.opened(cuda_run.program("llama", 1, 1), np.zeros(1, np.float32)) as executor:
            return weakref.ref(executor)

    run_with(monkeypatch, kernels)
    gc.collect()
    gc.disable()
    try:
        assert left()() is None
        monkeypatch.setattr(Downloads, "free", lambda self: self._copies.synchronize())
        assert left()() is not None, "a cycle would not be seen"
    finally:
        gc.enable()


def test_the_files_are_those_of_arrays(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path) -> None:
    """Byte for byte, what lies between tensors included."""
    with flips.on_device(tmp_path / "run", kernels, verify=0, steps=STEPS) as loop:
        loop.advance()
        made = loop.save()
        plain = folders.save(tmp_path / "plain", loop.step, loop.snapshot(), loop.facts())
        name = "rank-00000-of-00001.state"
        assert (made / name).read_bytes() == (plain / name).read_bytes()


def test_a_run_goes_on_from_what_was_copied_beside_a_step(undisturbed: dict[int, Bits], gpu: EmulatedGpu, kernels: Catalogue,
                                                          tmp_path: Path) -> None:
    """From each checkpoint to the bits of a run that was never disturbed; one was stopped while the next step was handed over."""
    with flips.on_device(tmp_path / "run", kernels, verify=0, profile=0, steps=STEPS, checkpoint_every=EVERY, keep=99) as loop:
        assert not loop.run(Looks(stop=lambda: int(loop.step == 7)))
    assert folders.steps(loop.checkpoints) == [2, 4, 6, 7]
    for step in (7, 4):
        with flips.on_device(tmp_path / "run", kernels, verify=0, profile=0, steps=STEPS, checkpoint_every=EVERY, keep=99) as loop:
            loop.resume(step)
            assert loop.run() and bits(loop.snapshot().items()) == undisturbed[STEPS]


def test_one_save_at_a_time(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path) -> None:
    with flips.on_device(tmp_path / "run", kernels, verify=0, steps=STEPS) as loop:
        loop.advance()
        loop.saver.start(1, loop.lent(), loop.facts())
        assert loop.saver.writing
        with pytest.raises(GraphError, match="a save began before the last one was finished"):
            loop.saver.start(2, loop.lent(), loop.facts())
        with pytest.raises(GraphError, match="before the last one was waited for"):
            loop.saver.copy(loop.lent())
        assert loop.saver.finish() == (1, folders.at(loop.checkpoints, 1)) and not loop.saver.writing


def test_what_the_host_writes_to_the_state_waits_for_the_copy(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path) -> None:
    with flips.on_device(tmp_path / "run", kernels, verify=0, steps=STEPS) as loop:
        loop.advance()
        want = bits(loop.snapshot().items())
        loop.saver.start(1, loop.lent(), loop.facts())
        loop.executor.state("param")[...] = 7
        loop.executor.run("narrow")
        loop.saver.finish()
        assert bits(folders.read(folders.at(loop.checkpoints, 1)).items()) == want
        assert (loop.executor.look("param") == 7).all()
        loop.executor.state("param")[...] = 8  # handed out and not yet given back
        loop.saver.start(2, loop.lent(), loop.facts())
        loop.saver.finish()
        layout, flat = folders.read(folders.at(loop.checkpoints, 2))["param"]
        assert all((flat[layout.offsets[t.name] : layout.offsets[t.name] + t.size] == 8).all() for t in layout.tensors)


def test_memory_that_flips_ends_the_run_before_it_is_a_checkpoint(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alpha.train.spots.BUDGET", 1e6)
    with flips.on_device(tmp_path / "run", kernels, verify=100, profile=0, steps=STEPS, checkpoint_every=EVERY, keep=99) as loop:
        arena, begin = loop.executor.arenas["state.param"], loop.saver.begin  # type: ignore[attr-defined]

        def flipped(step: int, *given: Any) -> None:
            if step == 4:
                loop.executor.stream.synchronize()  # type: ignore[attr-defined]
                np.frombuffer((ctypes.c_uint8 * 8192).from_address(arena.address), np.uint8)[4096] ^= 4
            begin(step, *given)

        loop.saver.begin = flipped  # type: ignore[method-assign]
        with pytest.raises(SpotCheckError, match="memory changed by itself"):
            loop.run()
        assert folders.steps(loop.checkpoints) == [2]


def test_no_page_locked_memory_is_said_before_the_first_step(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    with flips.on_device(tmp_path / "run", kernels, verify=0, steps=STEPS, checkpoint_every=EVERY) as loop:
        gpu.largest = 1 << 20
        with pytest.raises(MachineError, match="page-locked memory cannot be had"):
            loop.foretell_saves()
        left = memory_check.saves(loop.program) + memory_check.REST
        for spare in (0, -1):
            monkeypatch.setattr(memory_check, "limits", lambda spare=spare: [memory_check.Limit("a box", left + spare)])
            if not spare:
                memory_check.require_room_for_saves(loop.program)
                continue
            with pytest.raises(MachineError, match="the host has no room for what a save is copied to"):
                memory_check.require_room_for_saves(loop.program)


MS = 1_000_000


def test_what_is_foretold_beside_steps_and_what_is_measured() -> None:
    now = [0]

    def took(ms: int) -> int:
        now[0] += ms * MS
        return 9_000_000

    made = Stalls(lambda: now[0], beside=True)
    made.rehearse(lambda: took(3) and None, lambda: took(1), lambda: took(30) and None)
    made.rehearse(lambda: took(2) and None, lambda: took(1), lambda: took(29) and None)

    def stepped(*each: int, ahead: bool = True, saving: bool = False, usual: bool = True) -> None:
        for ms in each:
            made.stepped(ms * MS, (ms - 1) * MS if ahead else (ms - 4) * MS, ahead=ahead, saving=saving, usual=usual)

    assert (made.host_ns, made.begin_ns, made.copy_ns, made.foretold_ns, made.measured_ns) == (2 * MS, MS, 30 * MS, None, [])
    assert made.before() == ("9.0 MB copied at each to page-locked memory, in 30.0 ms beside the next step's microbatches, 3.0 ms of the "
                             "host's beside all that the device was handed; it waits for what lasts longer")
    stepped(900, 800, 700)  # the first ones of a session
    assert made.foretold_ns is None
    stepped(25, 26, 24)
    stepped(500, usual=False)  # a profiled one
    assert made.foretold_ns == 6 * MS and made.at_first() == ""
    made.save()
    assert made.at_first() == "6.0 ms foretold beside microbatches of 24.0 ms"
    stepped(32, saving=True)
    stepped(25)
    made.save()
    with made.adding():
        took(2)  # not hidden behind microbatches
    stepped(31, 26, saving=True)
    assert made.measured_ns == [7 * MS, 2 * MS + 6 * MS + MS] and made.at_first() == ""
    spread = 2 * sqrt((1.0 + 1.0) / 2 + 1.5**2 * (1 + 1 + 0 + 0) / 3 / 4) * MS  # two saves, 1.5 steps beside one, four usual steps
    assert made.spread_ns == pytest.approx(spread) and made.spread_ns > 2 * MS
    assert made.facts() == {"save_foretold_ns": 6 * MS, "save_copy_ns": 30 * MS, "save_measured_ns": 8 * MS,
                            "save_spread_ns": round(spread)}
    assert made.after(100 * MS) == ("2 with steps behind: 6.0 ms foretold, 8.0 ms measured (mean, give or take 2.3 ms), 6.0% and 8.0% of a "
                                    "mean step; 6.0% above the line of 2%")
    made.save()
    stepped(34, ahead=False, saving=True)  # behind a validation
    stepped(26, saving=True)
    assert len(made.measured_ns) == 2  # no usual step like it has been seen
    stepped(28, 28, ahead=False)
    assert made.measured_ns[2:] == [6 * MS + MS] and made.foretold_ns == 6 * MS
    stepped(*[25] * 95, 345)  # one of 100 usual steps is slow: the mean 28.2, the median 25
    made.save()
    stepped(*[28] * 20, 32, saving=True)
    added = (20 * 28 + 32 - 21 * 28.2) * MS
    assert made.measured_ns[-1] == pytest.approx(added, abs=1), "skewed steps are held against their median"
    assert made.foretold_ns == 6 * MS
    made.microbatches = [40 * MS]
    assert made.foretold_ns == 0  # all of it fits
    made.host_ns = 70 * MS
    assert made.foretold_ns == 70 * MS + MS - 25 * MS - 40 * MS  # the host's part is longer than a step and the microbatches ahead


def test_a_run_says_what_its_saves_add(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path) -> None:
    with flips.on_device(tmp_path / "run", kernels, verify=0, profile=0, steps=STEPS, checkpoint_every=4, keep=99) as loop:
        loop.foretell_saves()
        seen = list[tuple[int, bool, bool]]()
        stepped = loop.stalls.stepped

        def told(ns: int, micro_ns: int, *, ahead: bool, saving: bool, usual: bool) -> None:
            seen.append((loop.step, ahead, saving and usual))
            assert 0 < micro_ns < ns
            stepped(ns, micro_ns, ahead=ahead, saving=saving, usual=usual)

        loop.stalls.stepped = told  # type: ignore[method-assign]
        loop.run()
        assert [step for step, _, of_save in seen if of_save][:1] == [4] and len(seen) == STEPS and len(loop.stalls.measured_ns) == 2
        assert [step for step, ahead, _ in seen if not ahead] == [0], "a save kept a step from being handed over ahead"
        assert "2 with steps behind" in loop.stalls.after(1e6)
    found = dict(read(tmp_path / "run" / "metrics.sqlite", "run_metadata"))
    assert int(found["save_bytes"]) == memory_check.saves(loop.program)
    assert int(found["save_copy_ns"]) > 0 and {"save_foretold_ns", "save_measured_ns"} <= set(found)


FAULTS = tomllib.loads((Path(flips.__file__).parent / "device_saves.toml").read_text(encoding="utf-8"))["fault"]


@pytest.mark.parametrize("fault", FAULTS, ids=[f["id"] for f in FAULTS])
def test_a_planted_fault_is_seen(fault: dict[str, str], undisturbed: dict[int, Bits], request: pytest.FixtureRequest) -> None:
    """The test that the fault names fails where the fault is planted, and passes without it (it runs above)."""
    test: Callable[..., None] = globals()[fault["seen"]]
    given = {name: fault.get(name) or request.getfixturevalue(name) for name in inspect.signature(test).parameters}
    wiring = Wiring(fault["id"], fault["file"], fault["find"], fault["replace"], fault["why"])
    with planted(wiring.file, wiring.text), pytest.raises((AssertionError, AlphaError)):
        test(**given)
