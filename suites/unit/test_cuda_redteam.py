"""Cheats on the GPU, each a dishonest wrapper around an honest kernel, that must be rejected by the entry that it names. The numbers are
those of docs/gates.md; 19 to 22 are about records and stand in alpha/gates/adversarial/redteam.py.

On the emulated GPU always; marked h100 on a real one, with the real kernels. What is called is the same, so a cheat that only the time
that something takes would betray waits for itself here, and is found out all the same.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from emulated_gpu import Event, emulated, emulated_gpu

from alpha.backends.cuda.lib import Gpu, Operand, copy
from alpha.backends.cuda.values import device_bytes
from alpha.component import Component
from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime._bindings import CudaError
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.memory import Arena, Span, download, fill, upload
from alpha.cuda_runtime.nvml import Clocks, Reading
from alpha.gates import parity, subjects
from alpha.gates.cuda import determinism as cuda_determinism
from alpha.gates.cuda import parity as cuda_parity
from alpha.gates.cuda import perf as cuda_perf
from alpha.gates.cuda import subjects as cuda_subjects
from alpha.gates.cuda.calls import Call
from alpha.gates.cuda.subjects import REPLAYS
from alpha.registry.judge import FAIL, PASS, judge
from alpha.registry.record import Record
from alpha.train.catalogue import catalogue
from alpha.types import Attrs, TensorType

Kernels = Callable[[str], Component]
Run = Callable[[int], None]
Binder = Callable[[Gpu, Sequence[Operand], Sequence[Operand], Attrs], Run]
SAMPLES = "a sample"
LATE = "cheat"
HONEST = "5a" * 16
"""The nonce of the honest runs. With others a sample of one element now and then has no power by itself, which is no cheat."""


def kept(outs: Sequence[Operand]) -> list[tuple[Operand, Arena]]:
    """Memory of the cheat's own for each output."""
    return [(y, Arena(y.type.nbytes, name="remembered")) for y in outs]


def around(honest: Component, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None) -> Binder:
    """The honest call, and something before and behind it: called with the operands and the stream."""
    def binder(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
        call = honest.implementation(gpu, ins, outs, attrs)

        def run(stream: int) -> None:
            if before is not None:
                before(gpu, ins, outs, stream)
            call(stream)
            if after is not None:
                after(gpu, ins, outs, stream)

        return run

    return binder


def remembering(honest: Component, key: Callable[[Sequence[Operand]], object]) -> Binder:
    """Computes once per key and copies what it remembers afterwards."""
    memory: dict[object, list[tuple[Operand, Arena]]] = {}

    def binder(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
        call = honest.implementation(gpu, ins, outs, attrs)

        def run(stream: int) -> None:
            k = (key(ins), tuple(x.type for x in ins), tuple(sorted(attrs.items())))
            if k not in memory:
                call(stream)
                memory[k] = kept(outs)
                for y, mine in memory[k]:
                    copy(mine.address, y.address, y.type.nbytes, stream)
            else:
                for y, (was, mine) in zip(outs, memory[k]):
                    copy(y.address, mine.address, was.type.nbytes, stream)

        return run

    return binder


def never_written(honest: Component, kernels: Kernels) -> Binder:
    return lambda gpu, ins, outs, attrs: lambda stream: None


def zeroed_inputs(honest: Component, kernels: Kernels) -> Binder:
    return around(honest, after=lambda gpu, ins, outs, stream: fill(ins[0].span, 0, stream))


def another_stream(waits: bool) -> Callable[[Component, Kernels], Binder]:
    """`waits`: the outputs are there in time, as on a quick GPU they may be anyway."""
    def make(honest: Component, kernels: Kernels) -> Binder:
        own = Device.open().stream()

        def binder(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
            call = honest.implementation(gpu, ins, outs, attrs)

            def run(stream: int) -> None:
                with suppress(Exception):  # no stream that captures can be waited for
                    cuda_subjects.opened()[1].synchronize()
                call(int(own.handle))
                if waits:
                    own.synchronize()

            return run

        return binder

    return make


def later_thread(honest: Component, kernels: Kernels) -> Binder:
    device, _ = cuda_subjects.opened()

    def late(outs: Sequence[Operand]) -> None:
        time.sleep(0.03)
        device._context.push()
        with suppress(CudaError):  # by then the memory may have been given back
            fill(Span(outs[0].address, min(16, outs[0].type.nbytes)), 7)
        device._context.pop()

    return around(honest, after=lambda gpu, ins, outs, stream: threading.Thread(target=late, args=(outs,), name=LATE).start())


def by_address(honest: Component, kernels: Kernels) -> Binder:
    return remembering(honest, lambda ins: ins[0].address)


def by_prefix(honest: Component, kernels: Kernels) -> Binder:
    def key(ins: Sequence[Operand]) -> bytes:
        stream = cuda_subjects.opened()[1]
        if not int(_bindings.check("cuStreamIsCapturing", _bindings.driver().cuStreamIsCapturing(int(stream.handle)))):
            stream.synchronize()  # or what it reads is a matter of luck
        return download(Span(ins[0].address, 2), (1,), np.uint16).tobytes()

    return remembering(honest, key)


def by_content(honest: Component, kernels: Kernels) -> Binder:
    return remembering(honest, lambda ins: download(ins[0].span, *device_bytes(ins[0].type)).tobytes())


def by_order(honest: Component, kernels: Kernels) -> Binder:
    calls: list[list[tuple[Operand, Arena]]] = []
    count = [0]

    def binder(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
        call = honest.implementation(gpu, ins, outs, attrs)

        def run(stream: int) -> None:
            n, count[0] = count[0], count[0] + 1
            if n < 40 or calls[n % 40][0][0].type != outs[0].type:
                call(stream)
                calls.append(kept(outs))
                for y, mine in calls[-1]:
                    copy(mine.address, y.address, y.type.nbytes, stream)
            else:
                for y, (_, mine) in zip(outs, calls[n % 40]):
                    copy(y.address, mine.address, y.type.nbytes, stream)

        return run

    return binder


def first_calls(honest: Component, most: int) -> Binder:
    """Computes so many times on its operands, and then no more."""
    def binder(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
        call, left = honest.implementation(gpu, ins, outs, attrs), [most]

        def run(stream: int) -> None:
            left[0] -= 1
            if left[0] >= 0:
                call(stream)

        return run

    return binder


def once_and_skip(honest: Component, kernels: Kernels) -> Binder:
    """Works when it is called first, and a few times more, so that nothing but repeating shows it."""
    return first_calls(honest, 6)


def nan_only(honest: Component, kernels: Kernels) -> Binder:
    """Computes where the output is as poison leaves it, and keeps what is there else."""
    def binder(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
        call = honest.implementation(gpu, ins, outs, attrs)

        def run(stream: int) -> None:
            if (download(outs[0].span, *device_bytes(outs[0].type)).view(np.uint8) == 0xFF).all():
                call(stream)

        return run

    return binder


def finds_answer(honest: Component, kernels: Kernels) -> Binder:
    """Copies the first array in memory that could be the oracle's answer, and computes nothing. What is there before the gate begins is no
    answer of this nonce: it is frozen, so that not every object of a session is looked through at each call."""
    gc.freeze()

    def binder(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
        def run(stream: int) -> None:
            for held in gc.get_objects():
                for x in held if isinstance(held, list | tuple) else ():
                    if isinstance(x, np.ndarray) and x.dtype == np.float64 and x.shape == outs[0].type.shape:
                        wide = x.astype(np.float32).view(np.uint32)
                        upload(outs[0].span, ((wide + 0x8000) >> 16).astype(np.uint16))
                        return

        return run

    return binder


def warm_up_only(honest: Component, kernels: Kernels) -> Binder:
    """Takes the first calls on its operands for a warm-up."""
    return first_calls(honest, 3)


def known_seed(honest: Component, kernels: Kernels) -> Binder:
    """Knows the answers for one nonce."""
    answers = {}
    for case in subjects.cases(honest, "00" * 16):
        for scale in (1.0, 0.75):
            arrays = [x * x.dtype.type(scale) if x.dtype.kind == "f" else x for x in case.arrays()]
            bound = cuda_subjects.bind(honest, case.types, case.out_types(subjects.spec_of(honest)), case.attrs)
            bound.fill(arrays)
            content = download(bound._ins[0], *device_bytes(case.types[0])).tobytes()
            bound.again(0xFF)
            answers[content] = bound.bits()

    def binder(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
        def run(stream: int) -> None:
            for y, bits in zip(outs, answers.get(download(ins[0].span, *device_bytes(ins[0].type)).tobytes(), ())):
                upload(y.span, np.ascontiguousarray(bits))

        return run

    return binder


def drifting(honest: Component, kernels: Kernels) -> Binder:
    count = [0]

    def after(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], stream: int) -> None:
        count[0] += 1
        if count[0] > 60:
            fill(Span(outs[0].address + outs[0].type.nbytes - 2, 2), 0x3C, stream)

    return around(honest, after=after)


def set_aside(honest: Component, kernels: Kernels) -> Binder:
    driver = _bindings.driver()

    def binder(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
        _bindings.check("cuCtxSetLimit", driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 16 << 20))
        return honest.implementation(gpu, ins, outs, attrs)  # type: ignore[no-any-return]

    return binder


def constant(honest: Component, kernels: Kernels) -> Binder:
    return lambda gpu, ins, outs, attrs: lambda stream: [fill(y.span, 0x3E, stream) for y in outs] and None


def narrowed(honest: Component, kernels: Kernels) -> Binder:
    """Computes in bf16 what is asked for in f32: through two casts, on the stream."""
    down, up = kernels("cast.f32.sm90"), kernels("cast.f32.sm90")

    def binder(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
        t = ins[0].type
        mine = [Arena(2 * t.size, name="half"), Arena(4 * t.size, name="whole")]
        half, whole = Operand(mine[0].address, TensorType(t.shape, "bf16")), Operand(mine[1].address, t)
        steps = [down.implementation(gpu, [ins[0]], [half], {"dtype": "bf16"}), up.implementation(gpu, [half], [whole], {"dtype": "f32"}),
                 honest.implementation(gpu, [whole, *ins[1:]], outs, attrs)]
        return lambda stream, mine=mine: [step(stream) for step in steps] and None

    return binder


def library(honest: Component, kernels: Kernels) -> Binder:
    """A kernel of no file of the component: here another component's, which changes nothing."""
    other = kernels("scale.bf16.sm90")

    def binder(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
        steps = [honest.implementation(gpu, ins, outs, attrs), other.implementation(gpu, [outs[0]], [outs[0]], {"factor": 1.0})]
        return lambda stream: [step(stream) for step in steps] and None

    return binder


def dirty_scratch(honest: Component, kernels: Kernels) -> Binder:
    found = [0]

    def before(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], stream: int) -> None:
        region = gpu._region
        assert region is not None
        cuda_subjects.opened()[1].synchronize()
        found[0] = int(download(Span(region.address, 1), (1,), np.uint8)[0])

    def after(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], stream: int) -> None:
        if found[0] == 0:  # other garbage than usual
            fill(Span(outs[0].address, 2), 0x3C, stream)

    return around(honest, before, after)


def last_only(honest: Component, kernels: Kernels) -> Binder:
    return around(honest, after=lambda gpu, ins, outs, stream: [fill(y.span, 0, stream) for y in outs[:-1]])


@dataclass(frozen=True)
class Cheat:
    """`by`: entries of the record of which one must fail; SAMPLES: any that is about a sample."""

    number: int
    name: str
    component: str
    make: Callable[[Component, Kernels], Binder]
    by: tuple[str, ...]
    engine: Callable[[Component, str | None], Record] = cuda_parity.measure
    nonce: str | None = None


REPLAYED = (REPLAYS[0],)
CHEATS = (
    Cheat(1, "outputs never written", "scale.bf16.sm90", never_written, (SAMPLES,)),
    Cheat(2, "inputs zeroed", "scale.bf16.sm90", zeroed_inputs, ("inputs unchanged",)),
    Cheat(3, "work left on another stream", "scale.bf16.sm90", another_stream(False), REPLAYED),
    Cheat(3, "work on another stream that is there in time", "scale.bf16.sm90", another_stream(True), REPLAYED),
    Cheat(4, "a thread that writes later", "scale.bf16.sm90", later_thread, ("outputs final",)),
    Cheat(6, "a cache keyed by address", "scale.bf16.sm90", by_address, (SAMPLES, "content", "later calls")),
    Cheat(7, "a cache keyed by call order", "scale.bf16.sm90", by_order, (SAMPLES, *parity.BEHAVIOURS, *REPLAYS)),
    Cheat(8, "computed at first, skipped in the loop", "scale.bf16.sm90", once_and_skip, (SAMPLES,), cuda_perf.measure),
    Cheat(9, "a memory keyed by the first element", "scale.bf16.sm90", by_prefix, REPLAYED),
    Cheat(9, "a memory keyed by the whole content", "scale.bf16.sm90", by_content, REPLAYED),
    Cheat(10, "answers for a fixed seed", "scale.bf16.sm90", known_seed, (SAMPLES,)),
    Cheat(10, "answers for a fixed seed that is drawn", "scale.bf16.sm90", known_seed, REPLAYED, nonce="00" * 16),
    Cheat(11, "right for the first calls, drifting later", "scale.bf16.sm90", drifting, ("content", "later calls")),
    Cheat(12, "a part of L2 set aside", "scale.bf16.sm90", set_aside, (REPLAYS[2],)),
    Cheat(12, "a part of L2 set aside", "scale.bf16.sm90", set_aside, (SAMPLES,), cuda_perf.measure),
    Cheat(13, "a constant output", "scale.bf16.sm90", constant, (SAMPLES,)),
    Cheat(14, "computed in bf16", "accumulate.f32.sm90", narrowed, (SAMPLES,)),
    Cheat(15, "a kernel of no file of the component", "rmsnorm.bf16.sm90", library, (REPLAYS[1],)),
    Cheat(16, "uninitialised scratch read", "sum.bf16.sm90", dirty_scratch, (SAMPLES,), cuda_determinism.measure),
    Cheat(17, "only the last output computed", "layernorm.bf16.sm90", last_only, (SAMPLES,)),
    Cheat(23, "computes only where the output holds NaN", "scale.bf16.sm90", nan_only, (SAMPLES,), cuda_determinism.measure),
    Cheat(25, "looks for the expected answer in memory", "scale.bf16.sm90", finds_answer, (SAMPLES,)),
    Cheat(26, "the first calls on its operands taken for a warm-up", "scale.bf16.sm90", warm_up_only,
          (SAMPLES, *parity.BEHAVIOURS, *REPLAYS)),
    Cheat(3, "timed work on another stream", "scale.bf16.sm90", another_stream(True), (SAMPLES,), cuda_perf.measure),
    Cheat(6, "timed outputs remembered by address", "scale.bf16.sm90", by_address, (SAMPLES,), cuda_perf.measure),
    Cheat(7, "timed outputs remembered by order", "scale.bf16.sm90", by_order, (SAMPLES,), cuda_perf.measure),
    Cheat(9, "timed outputs remembered by the first element", "scale.bf16.sm90", by_prefix, (SAMPLES,), cuda_perf.measure),
)


class Still:
    """A clock at full speed."""

    def read(self) -> Reading:
        return Reading(1980.0, 0)


def join_late_threads() -> None:
    """Wait for what cheats have left behind."""
    for thread in threading.enumerate():
        if thread.name == LATE:
            thread.join()


@pytest.fixture(params=["emulated", pytest.param("device", marks=pytest.mark.h100)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Honest kernels by id."""
    monkeypatch.setattr(subjects, "component_digests", lambda *a, **k: {"implementation": "cheat"})
    monkeypatch.setattr(cuda_determinism, "RUNS", 60)
    alive: list[Arena] = []  # what a cheat writes late must not have become another's memory
    monkeypatch.setattr(cuda_subjects, "Arena", lambda *a, **k: alive.append(Arena(*a, **k)) or alive[-1])
    cuda_subjects.opened.cache_clear()
    if request.param == "device":
        yield lambda name: catalogue()[name]
        join_late_threads()
    else:
        plain = Event.record

        def record(self: Any, stream: Any) -> None:
            plain(self, stream)
            stream.push(lambda: setattr(self, "at", time.perf_counter()))

        monkeypatch.setattr(Event, "record", record)
        monkeypatch.setattr(Event, "time_since", lambda self, other: 1e3 * (self.at - other.at), raising=False)
        monkeypatch.setattr(cuda_perf, "probes", lambda: cuda_perf.Probes(Arena(1 << 16), {
            name: (1e9, lambda stream: stream.push(lambda: time.sleep(1e-6))) for name in ("copy", "fill", "product")}))
        monkeypatch.setattr(cuda_perf, "FLUSH_BYTES", 4096)
        monkeypatch.setattr(cuda_perf, "timed", lambda c: [Call("small", (TensorType((64, 72), "bf16"),), {"factor": 0.5}, False)])
        monkeypatch.setattr(Clocks, "open", staticmethod(lambda index=0: Still()))
        monkeypatch.setattr(cuda_determinism, "NOISE_BYTES", 1 << 20)
        with emulated_gpu():
            every = emulated(catalogue())
            yield lambda name: every[name]
            join_late_threads()
    cuda_subjects.opened.cache_clear()


def failing(record: Record) -> set[str]:
    """Which kinds of entries of a record the judge rejects."""
    names = [str(c["name"]) for c in record.cases
             if judge(replace(record, cases=[c], declared=1), runs=0).verdict == FAIL]
    return {n if n in (*parity.BEHAVIOURS, *REPLAYS) else SAMPLES for n in names}


@pytest.mark.parametrize("cheat", CHEATS, ids=[f"{c.number}-{c.name.replace(' ', '-')}" for c in CHEATS])
def test_rejected(cheat: Cheat, kernels: Kernels) -> None:
    honest = kernels(cheat.component)
    record = cheat.engine(replace(honest, implementation=cheat.make(honest, kernels)), cheat.nonce)
    assert judge(record, runs=0).verdict == FAIL and failing(record) & set(cheat.by), f"{cheat.number} ({cheat.name}): {record.cases}"
    assert cheat.engine is not cuda_perf.measure or "note" in record.cases[0], "rejected for its speed alone, which a cheat can choose"


@pytest.mark.parametrize(("component", "engine"), sorted({(c.component, c.engine.__module__) for c in CHEATS}))
def test_the_honest_are_not(component: str, engine: str, kernels: Kernels) -> None:
    measure = {c.engine.__module__: c.engine for c in CHEATS}[engine]
    record = measure(kernels(component), HONEST)
    judgement = judge(record, runs=0)
    assert judgement.verdict in (PASS, "BASELINE") and not any("note" in c for c in record.cases), judgement.reasons


def test_a_patched_clock_is_not_read(kernels: Kernels) -> None:
    """5: the times are those of the clock that was there before the kernel was bound."""
    honest, kind = kernels("scale.bf16.sm90"), type(cuda_subjects.opened()[0].event())
    real, asked = kind.time_since, []

    def patching(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Run:
        kind.time_since = lambda self, other: asked.append(1) or real(self, other) / 1000
        return honest.implementation(gpu, ins, outs, attrs)  # type: ignore[no-any-return]

    try:
        record = cuda_perf.measure(replace(honest, implementation=patching))
    finally:
        kind.time_since = real
    assert record.cases and not asked


@pytest.mark.h100
def test_what_is_faster_than_the_machine_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """18: a share of the ceiling above 1, here because the ceiling is measured on less work than it says."""
    real = cuda_perf.probes
    monkeypatch.setattr(cuda_perf, "probes", lambda: replace(p := real(), calls={n: (w / 8, f) for n, (w, f) in p.calls.items()}))
    judgement = judge(cuda_perf.measure(catalogue()["scale.bf16.sm90"]), runs=0)
    assert judgement.verdict == FAIL and "faster than the machine" in judgement.reasons[0]
