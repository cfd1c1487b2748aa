"""Spot checks of a run on an emulated GPU: no bit moves, nothing sound is refused, flipped bits and wrong kernels end it by name."""

from __future__ import annotations

import ctypes
import inspect
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import device_flips
import flips
import numpy as np
import pytest
from emulated_gpu import EmulatedGpu, emulated, emulated_gpu, on
from wrong_wiring import Wiring, planted

from alpha.backends.cuda import observe, spot
from alpha.backends.cuda.executor import CudaExecutor
from alpha.backends.cuda.lib import Gpu, Operand
from alpha.backends.cuda.spot import DeviceMemory, OnDevice
from alpha.component import Catalogue, Component
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.memory import Arena, Span, upload
from alpha.errors import AlphaError, GraphError, SpotCheckError
from alpha.graph import cuts
from alpha.graph.plan import Plan, Ref
from alpha.profile.store import read
from alpha.tomlfile import tomllib
from alpha.train import spots
from alpha.train.catalogue import catalogue
from alpha.train.loop import Loop
from alpha.types import Attrs, TensorType

STEPS = 5
WORD = TensorType((), "i32")
FAULTS = tomllib.loads((Path(flips.__file__).parent / "device_eyes.toml").read_text(encoding="utf-8"))["fault"]


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as found:
        yield found


@pytest.fixture(scope="module")
def kernels() -> Catalogue:
    return emulated(catalogue())


def flip(executor: CudaExecutor, arena: str, byte: int) -> None:
    """One bit, behind what is enqueued."""
    at = (ctypes.c_uint8).from_address(executor.arenas[arena].address + byte)

    def strike() -> None:
        at.value ^= 4
    on(int(executor.stream.handle), strike)


def trained(folder: Path, kernels: Catalogue, every: int) -> bytes:
    with flips.on_device(folder, kernels, verify=every, profile=2, steps=STEPS + 3) as loop:
        while loop.step < STEPS:
            loop.advance(ahead=loop.unbroken())
        loop.metrics.flush()
        return b"".join(flat.tobytes() for _, flat in loop.snapshot().values())


def test_no_bit_hangs_on_them_and_nothing_sound_is_refused(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path) -> None:
    off, some, often = (trained(tmp_path / str(every), kernels, every) for every in (0, 4, 1))
    assert off == some == often and gpu.allocated == 0
    rows = read(tmp_path / "1" / "metrics.sqlite", "spot_checks", "step, how, elements, ratio")
    assert {step for step, *_ in rows} == set(range(STEPS)) and all(ratio <= 1 for *_, ratio in rows)
    assert {how for _, how, *_ in rows} >= {"product", "rows", "hash"}
    assert {step for step, in read(tmp_path / "4" / "metrics.sqlite", "spot_checks", "step")} == {0, 4}
    spent = dict(read(tmp_path / "4" / "metrics.sqlite", "step_timing", "step, checks_ns"))
    assert spent[0] > spent[1] > 0 and all(not ns for _, ns in read(tmp_path / "0" / "metrics.sqlite", "step_timing", "step, checks_ns"))


@pytest.mark.parametrize("rows", [1 << 18, 3])
def test_squares_on_the_device_are_those_of_the_host(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path, rows: int,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Of segments that begin and end anywhere, whole rows of them by the device, some rows at a launch."""
    monkeypatch.setattr(spot, "ROWS", rows)
    with flips.on_device(tmp_path / "run", kernels, verify=1) as loop:
        loop.start()
        loop.executor.state("param")[...] = np.random.default_rng(0).standard_normal(loop.program.states["param"].size)
        held = loop.executor.look("param")
        place = Ref("state.param", 0, TensorType(held.shape, "f32"))
        segments = [(0, 1), (5, 1019), (1024, 1024), (2048, 0), (2049, 5000), (8191, 2 * spot.ROW + 2), (len(held) - 7, 7), (0, len(held))]
        seen = loop.executor.digests.at(place).squares(segments)  # type: ignore[attr-defined]
        np.testing.assert_allclose(seen, cuts.squares(held, segments), rtol=1e-12)
        assert (seen > 0).tolist() == [True] * 3 + [False] + [True] * 4


@pytest.mark.parametrize(("kind", "step"), [("state.param", 4), ("state.m", 4), ("state.param16", 4), ("state.param", 5)])
def test_a_flip_of_the_state_is_seen(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
                                     step: int) -> None:
    """In a checked step, and in one with time to hash all of it. On a busy machine the device's clock would be due, and a step be left
    without hashes for it (alpha/train/pace.py)."""
    monkeypatch.setattr(spots, "BUDGET", 1e6)
    monkeypatch.setattr(observe.Watch, "due", False)
    with flips.on_device(tmp_path / "run", kernels, verify=4) as loop:
        while loop.step < step:
            loop.advance(ahead=loop.unbroken())
        flip(loop.executor, kind, 4096)  # type: ignore[arg-type]
        where = "before plan" if step == 4 else "before the update"
        with pytest.raises(SpotCheckError, match=rf"memory changed by itself: rank 0, step {step}, {kind[6:]}, seen {where}"):
            loop.advance()


class Between:
    """Flips a bit of what a launch wrote, before what comes after it."""

    def __init__(self, loop: Loop, launch: int) -> None:
        self.own, self.executor, self.launch, self.struck = loop.spots, loop.executor, launch, ""

    def before(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        self.own.before(plan, index, read)

    def after(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
        self.own.after(plan, index, read)
        if index == self.launch and not self.struck:
            ref = plan.launches[index].outs[0]
            flip(self.executor, ref.arena, ref.offset + 6)  # type: ignore[arg-type]
            self.struck = plan.launches[index].op


def test_a_flip_of_an_activation_is_seen_in_a_checked_step(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path) -> None:
    with flips.on_device(tmp_path / "run", kernels, verify=1) as loop:
        loop.advance()
        between = Between(loop, 3)
        loop.spots.begin(1)
        loop.executor.inspector = between
        calls = loop.replays[0]
        with pytest.raises(SpotCheckError, match="a spot check failed: rank 0, step 1, ") as caught:
            loop.enqueue(calls, 1)
        assert between.struck and f"changed since {between.struck} of " in str(caught.value)


def wrong(c: Component) -> Component:
    """A product with one wrong element from its fortieth call on."""
    if c.op != "matmul":
        return c
    calls: list[int] = []

    def binder(gpu: Gpu, ins: list[Operand], outs: list[Operand], attrs: Attrs) -> Callable[[int], None]:
        run = c.implementation(gpu, ins, outs, attrs)
        first = np.frombuffer((ctypes.c_uint8 * outs[0].type.nbytes).from_address(outs[0].address), np.uint8)

        def spoil() -> None:
            calls.append(1)
            if len(calls) >= 40:
                first[1] = 0x43  # bf16: 128 and more

        def call(handle: int) -> None:
            run(handle)
            on(handle, spoil)
        return call
    return replace(c, implementation=binder)


def test_a_wrong_kernel_ends_the_run_by_name(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path) -> None:
    made = Catalogue()
    for c in kernels:
        made.add(wrong(c))
    with flips.on_device(tmp_path / "run", made, verify=1) as loop:
        loop.advance()
        assert loop.spots.tally.beyond and "told and not judged" in loop.spots.tally.text()
        loop.spots.judged = True
        with pytest.raises(SpotCheckError) as caught:
            for _ in range(20):
                loop.advance()
    for part in ("a spot check failed: rank 0, step ", "matmul (matmul.bf16.sm90) of block.", "y[", "got ", "expected ", "+-"):
        assert part in str(caught.value), part


def test_a_tensor_on_the_device_is_read_like_an_array(gpu: EmulatedGpu) -> None:
    rng, device = np.random.default_rng(3), Device.open()
    memory, some = DeviceMemory({}, {}, device.stream()), np.array([0, 4, 13])
    for dtype in ("f32", "bf16", "i32"):
        t = TensorType((3, 5, 70), dtype)
        x = rng.integers(-100, 100, t.shape).astype(np.int32 if dtype == "i32" else np.float32)
        arena = Arena(t.nbytes)
        upload(Span(arena.address, t.nbytes), (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else x)
        there = OnDevice(memory, arena.address, t)
        assert there.dtype == x.dtype and len(there) == 3 and np.array_equal(np.array(there), x)
        for take in (lambda a: a.reshape(-1)[some], lambda a: a.reshape(-1, 70)[some], lambda a: a.reshape(-1, a.shape[-1])[:, some],
                     lambda a: a[1:2], lambda a: a[1:2][:, :, some], lambda a: a[2, 1:4], lambda a: a[1, 2], lambda a: a[1, 2, 3],
                     lambda a: a[-1:, ::2, 69:3:-7], lambda a: a[1, -2, [-1, 0, 69]], lambda a: a[2, :, -70], lambda a: a[1:1],
                     lambda a: a[2][:, 5], lambda a: a.reshape((15, 70))[4], lambda a: a[1:2, 2:4]):
            assert np.array_equal(np.asarray(take(there)), take(x))
        if dtype != "i32":
            v = rng.standard_normal((70, 6))
            for transposed, columns, of in ((False, False, x[1]), (True, False, x[1].T), (False, True, x[1]), (True, True, x[1].T)):
                w = v if not transposed else v[:5]
                made, norms = there[1].applied(transposed, w, columns)
                assert np.allclose(made, of.astype(float) @ w) and np.allclose(norms, np.linalg.norm(of, axis=0 if columns else 1))
        arena.free()
    memory.free()


def test_an_index_costs_by_what_it_asks_for() -> None:
    """Of 3 billion elements some; one beyond them is refused, and so is a mask, which would be as long as they."""
    n = 3 << 30
    tracemalloc.start()
    for key, want in ((slice(n - 3, None), [n - 3, n - 2, n - 1]), (np.array([0, -1, n - 1]), [0, n - 1, n - 1]), (-n, 0)):
        assert spot._places(n, key).tolist() == want
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    for wrong in (n, -n - 1, np.array([0, n]), np.array([True, False]), 1.0):
        with pytest.raises(IndexError):
            spot._places(n, wrong)


def test_a_hash_of_the_device_sees_every_bit_and_swaps(gpu: EmulatedGpu) -> None:
    rng, device = np.random.default_rng(4), Device.open()
    nbytes = 40_006
    arena = Arena(nbytes)
    memory = DeviceMemory({"state.x": arena, "act": arena}, {"state.x": nbytes}, device.stream())
    x = rng.integers(0, 256, nbytes, np.uint8)

    def hashed() -> tuple[bytes, bytes]:
        upload(Span(arena.address, nbytes), x)
        both = memory.of_state("x", 0), memory.of(Ref("act", 0, TensorType((nbytes // 2,), "bf16")))
        memory.wait()
        return memory.read(both[0]), memory.read(both[1])
    sound = hashed()
    for at in (0, nbytes - 1, *rng.integers(0, nbytes, 40)):
        x[at] ^= 1 << rng.integers(8)
        now = hashed()
        assert all(a != b for a, b in zip(sound, now))
        sound = now
    for _ in range(40):
        first, second = rng.choice(nbytes // 8, 2, replace=False)
        x[[8 * first + 7, 8 * second + 7]] ^= 128
        now = hashed()
        assert all(a != b for a, b in zip(sound, now))
        sound = now
    memory.free()
    arena.free()


def test_a_ring_that_goes_round_hashes_alike(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal contents have equal hashes wherever in the ring they lie; a bit moves the hash of its piece alone, whose words are named."""
    monkeypatch.setattr(spot, "SLOTS", 11)
    rng, device, nbytes = np.random.default_rng(5), Device.open(), 3 * spot.RUN + 4102
    arena = Arena(nbytes)
    memory = DeviceMemory({"state.x": arena}, {"state.x": nbytes}, device.stream())
    memory.piece = 2 * spot.RUN  # type: ignore[misc]
    x = rng.integers(0, 256, nbytes, np.uint8)

    def hashed() -> list[bytes]:
        upload(Span(arena.address, nbytes), x)
        made = [memory.of_state("x", start) for start in range(0, nbytes, memory.piece)]
        memory.wait()
        return [memory.read(one) for one in made]
    sound = hashed()
    assert [len(h) for h in sound] == [16, 16] and all(hashed() == sound for _ in range(9))
    for at in (0, spot.RUN, memory.piece - 1, memory.piece, nbytes - 1):
        x[at] ^= 4
        now, k = hashed(), at // memory.piece
        assert [a != b for a, b in zip(sound, now)] == [k == 0, k == 1]
        first = next(i for i, (a, b) in enumerate(zip(sound[k], now[k])) if a != b)
        assert (at - k * memory.piece) // 8 in memory.words(min(memory.piece, nbytes - k * memory.piece) + 7, first)
        sound = now
    with pytest.raises(GraphError, match="more hashes wait"):
        for _ in range(6):
            memory.of_state("x", 0)
    memory.free()
    arena.free()


def test_room_grows_with_what_is_asked(gpu: EmulatedGpu) -> None:
    memory = DeviceMemory({}, {}, Device.open().stream())
    for sizes in ((100, 300), (1 << 20, 1 << 20, 5), (7, 9)):
        found = memory._room(*sizes)
        assert [x.nbytes for x in found] == list(sizes)
        assert all(a.address + a.nbytes <= b.address for a, b in pairwise(found))
    memory.free()


def test_launches_that_are_looked_at(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is enqueued once, whole, between its two looks, and counts once."""
    told: list[tuple[str, str, int]] = []
    sound = observe.works_of

    def works_of(bound: observe.Bound) -> list[observe.Work]:
        return [replace(w, run=lambda stream, w=w: (told.append(("run", w.phase, w.launch)), w.run(stream))) for w in sound(bound)]  # type: ignore[misc]

    class Told:
        def before(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
            told.append(("before", plan.name, index))

        def after(self, plan: Plan, index: int, read: Callable[[Ref], np.ndarray]) -> None:
            told.append(("after", plan.name, index))

    monkeypatch.setattr(observe, "works_of", works_of)
    with flips.on_device(tmp_path / "run", kernels, verify=0, profile=0) as loop:
        monkeypatch.setattr(loop.spots, "begin", lambda step: setattr(loop.executor, "inspector", Told()))
        for _ in range(3):
            loop.advance()
        loop.executor.inspector = None
        loop.recorder.finish()
        loop.metrics.flush()
        launches = [len(loop.plans[call.plan].launches) for call in loop.role.schedule]
        works = [len(sound(loop.executor._bound[call.plan])) for call in loop.role.schedule]  # type: ignore[attr-defined]
    at = 0
    for _ in range(3):
        for call, n, many in zip(loop.role.schedule, launches, works, strict=True):
            own, at = told[at : at + 2 * n + many], at + 2 * n + many
            for i in range(n):
                parts = [k for k, (what, _, index) in enumerate(own) if what == "run" and index == i]
                assert parts and own[parts[0] - 1] == ("before", call.plan, i) and own[parts[-1] + 1] == ("after", call.plan, i)
                assert parts == list(range(parts[0], parts[-1] + 1))
    assert at == len(told)
    counted = read(tmp_path / "run" / "metrics.sqlite", "step_timing", "step, launches")
    assert [n for _, n in counted] == [sum(launches)] * 3


def test_the_campaign_strikes_and_counts(gpu: EmulatedGpu, kernels: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial strikes once; in a checked step all that moves a bit is seen there. Undisturbed steps are not accused."""
    monkeypatch.setattr(flips, "SIZES", {"64 bytes": 64})
    monkeypatch.setattr(device_flips, "ENOUGH", 3)
    quiet = device_flips.undisturbed(tmp_path, 60, kernels)
    assert quiet["steps"] == 3 and quiet["beyond"] == 0 and 0 < max(quiet["worst_ratio_by_op"].values()) <= 1
    rows = device_flips.campaign(tmp_path, 60, kernels, most=2)
    assert [(row["flipped_in"], row["step"], row["trials"]) for row in rows] == [
        (kind, step, 2) for kind in ("weights", "moments", "gradients", "activations") for step in ("checked", "between")]
    for row in rows[::2]:
        assert row["seen_of_those"] == row["moved_a_bit"] and set(row["latency_steps"]) <= {0}
    assert rows[0]["moved_a_bit"] == rows[2]["moved_a_bit"] == 2


@pytest.mark.parametrize("fault", FAULTS, ids=[f["id"] for f in FAULTS])
def test_a_planted_fault_is_seen(fault: dict[str, str], request: pytest.FixtureRequest, gpu: EmulatedGpu) -> None:
    """The test that the fault names fails where the fault is planted, and passes without it (it runs above)."""
    test = globals()[fault["seen"]]
    given = {name: request.getfixturevalue(name) for name in inspect.signature(test).parameters}
    wiring = Wiring(fault["id"], fault["file"], fault["find"], fault["replace"], fault["why"])
    with planted(wiring.file, wiring.text), pytest.raises((AssertionError, AlphaError, ValueError, IndexError, RuntimeWarning)):
        test(**given)
