"""Cheats: kernels and records that try to fool the gates. Each is a permanent test that must be rejected. Floor 7.

Numbers are those of the list of cheats in docs/gates.md. 3 (work left on another stream), 12 (persisting L2) and 15 (falling back to a
library) need a GPU; the CPU's counterpart of 15 is the check of loaded libraries in a training process.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.errors import CorruptError
from alpha.gates import expected, perf, recompute, subjects
from alpha.gates.cpu import determinism, parity
from alpha.gates.parity import unspread
from alpha.gates.tolerance import allowance
from alpha.ops.spec import Sample
from alpha.ops.table import row
from alpha.profile import noise
from alpha.registry import evidence
from alpha.registry import judge as judges
from alpha.registry.cases import CaseRecord, Refusal, Relative, Share
from alpha.registry.catches import Catch
from alpha.registry.gates import cases_of
from alpha.registry.judge import FAIL, NOT_RUN, judge
from alpha.registry.pins import Line, shipped_pins
from alpha.registry.record import Record, parse
from alpha.registry.status import Registry
from alpha.train.catalogue import catalogue
from alpha.types import Attrs

Kernel = Callable[[Cpu, Sequence[np.ndarray], Sequence[np.ndarray], Attrs], Callable[[], None]]


@dataclass(frozen=True)
class Cheat:
    """`attempt` runs it against the gate and says how it was rejected; '' when it got through."""

    number: int
    name: str
    attempt: Callable[[], str]


def _honest() -> Component:
    return catalogue()["gelu.f32.cpu"]


def _kernel(implementation: Callable[..., Callable[[], None]], like: Component | None = None) -> Component:
    """A cheating kernel in the clothes of an honest one. Digests are the honest one's: what is tested is the measurement."""
    return replace(like or _honest(), implementation=implementation, envelope=Envelope(dtypes=("f32",)))


def _measured(engine: Callable[[Component, str | None], Record], cheat: Component, nonce: str | None = None) -> Record:
    with mock.patch.object(subjects, "component_digests", lambda *a, **k: {"implementation": "cheat"}):
        return engine(cheat, nonce)


def _verdict(engine: Callable[[Component, str | None], Record], cheat: Component) -> str:
    """The reasons of a FAIL, '' for anything else."""
    judgement = judge(_measured(engine, cheat), runs=100)
    return "; ".join(judgement.reasons[:2]) or FAIL if judgement.verdict == FAIL else ""


def _call(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    return _honest().implementation(cpu, ins, outs, attrs)  # type: ignore[no-any-return]


def _stale_memory() -> str:
    return _verdict(parity.measure, _kernel(lambda cpu, ins, outs, attrs: lambda: None))


def _zeroed_inputs() -> str:
    def zeroing(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        honest = _call(cpu, ins, outs, attrs)

        def run() -> None:
            honest()
            ins[0][...] = 0

        return run

    return _verdict(parity.measure, _kernel(zeroing))


def _late_thread(correct_first: bool) -> str:
    def late(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        honest = _call(cpu, ins, outs, attrs)

        def after() -> None:
            time.sleep(0.03)
            if correct_first:
                outs[0].reshape(-1)[:1] = 7.0
            else:
                with np.errstate(all="ignore"):  # by then the memory may hold anything
                    honest()

        def run() -> None:
            if correct_first:
                honest()
            threading.Thread(target=after, daemon=True).start()

        return run

    return _verdict(parity.measure, _kernel(late))


def _cached(key: Callable[[Sequence[np.ndarray]], object]) -> Kernel:
    """A kernel that computes once per key and gives the remembered outputs afterwards."""
    memory: dict[object, list[np.ndarray]] = {}

    def caching(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        honest = _call(cpu, ins, outs, attrs)

        def run() -> None:
            k = (key(ins), attrs["approximate"], ins[0].shape)
            if k not in memory:
                honest()
                memory[k] = [x.copy() for x in outs]
            for x, y in zip(outs, memory[k]):
                x[...] = y

        return run

    return caching


def _by_address() -> str:
    return _verdict(parity.measure, _kernel(_cached(lambda ins: ins[0].ctypes.data)))


def _by_order() -> str:
    calls: list[list[np.ndarray]] = []
    count = [0]

    def replaying(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        honest = _call(cpu, ins, outs, attrs)

        def run() -> None:
            n = count[0]
            count[0] += 1
            if n < 60 or calls[n % 60][0].shape != outs[0].shape:
                honest()
                calls.append([x.copy() for x in outs])
            else:
                outs[0][...] = calls[n % 60][0]

        return run

    return _verdict(parity.measure, _kernel(replaying))


def _batch_and_skip() -> str:
    def skipping(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        honest = _call(cpu, ins, outs, attrs)
        done: list[bool] = []

        def run() -> None:
            if not done:
                honest()
                done.append(True)

        return run

    return _verdict(parity.measure, _kernel(skipping)) and _verdict(perf.measure, _kernel(skipping))


def _memoised_prefix() -> str:
    return _verdict(perf.measure, _kernel(_cached(lambda ins: ins[0].reshape(-1)[:4].tobytes())))


def _memoised_content() -> str:
    """A memory of whole inputs is right, so it may pass. It gains nothing: no timed call, of any try, sees contents that came before."""
    seen: set[tuple[tuple[int, ...], bytes]] = set()
    known: list[bool] = []
    timed: list[bool] = []

    def remembering(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        honest = _call(cpu, ins, outs, attrs)

        def run() -> None:
            content = (ins[0].shape, hashlib.sha1(ins[0].tobytes()).digest())
            known.append(content in seen)
            seen.add(content)
            honest()

        return run

    def block(call: Callable[[], object], repeats: int, before: Callable[[], object] | None = None) -> int:
        start = len(known)
        took = noise.block(call, repeats, before)
        timed.extend(known[start:])
        return took

    every_try = {case: Line(middle=1e9, spread=0.0, allowance=0.0) for case in perf.SIZES}
    with mock.patch.object(perf, "block", block), mock.patch.object(perf, "lines", lambda component: every_try):
        taken = [c.tries for c in cases_of(_measured(perf.measure, _kernel(remembering))) if isinstance(c, Share)]
    all_tried = taken == [perf.TRIES] * len(perf.SIZES)
    return f"none of {len(timed)} timed calls found what it remembered" if all_tried and timed and not any(timed) else ""


def _fixed_seed() -> str:
    """Knows every answer for one nonce, computes nothing else."""
    honest = _honest()
    answers = {}
    for case in subjects.cases(_kernel(_call), "00" * 16):
        for scale in (1.0, 0.75):
            arrays = [x * x.dtype.type(scale) for x in case.arrays()]
            known = replace(case, inputs=tuple(x.astype(np.float64) for x in arrays))
            answers[arrays[0].tobytes(), case.attrs["approximate"]] = subjects.once(honest, known)[0]

    def knowing(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        def run() -> None:
            outs[0][...] = answers.get((ins[0].tobytes(), attrs["approximate"]), np.zeros(()))

        return run

    if subjects.fresh_nonce() == subjects.fresh_nonce():
        return ""
    replayed = judge(_measured(parity.measure, _kernel(knowing), "00" * 16)).verdict
    rejected = _verdict(parity.measure, _kernel(knowing))
    return f"{replayed} on the known nonce, but: {rejected}" if rejected else ""


def _drift() -> str:
    count = [0]

    def drifting(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        honest = _call(cpu, ins, outs, attrs)

        def run() -> None:
            honest()
            count[0] += 1
            if count[0] > 60:
                outs[0].reshape(-1)[-1:] += np.float32(1e-3)

        return run

    return _verdict(parity.measure, _kernel(drifting))


def _constant() -> str:
    def constant(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        def run() -> None:
            outs[0][...] = 0.28

        return run

    return _verdict(parity.measure, _kernel(constant))


def _constant_samples() -> str:
    """A row whose samples all have the same constant answer, so that a constant would pass: the samples are refused."""
    spec = row("gelu")
    case = subjects.case_of(Sample(name="zeros", inputs=(np.zeros((5, 7)),), attrs={"approximate": "tanh"}), "f32")
    count = unspread(spec, [case], {case.name: allowance(spec, case, "00")})
    return f"{count} output without a sample that tells a constant" if count else ""


def _half_precision() -> str:
    def half(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        rounded = np.empty_like(ins[0])
        honest = _call(cpu, [rounded], outs, attrs)

        def run() -> None:
            rounded[...] = (ins[0].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            honest()

        return run

    return _verdict(parity.measure, _kernel(half))


def _uninitialised_scratch() -> str:
    def reading(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        dirty = cpu.scratch((16,), np.uint8)
        honest = _call(cpu, ins, outs, attrs)

        def run() -> None:
            extra = np.float32(dirty[0] == 0)  # 0 for the usual garbage, 1 where the memory happens to be zero
            honest()
            outs[0].reshape(-1)[:1] += extra

        return run

    return _verdict(determinism.measure, _kernel(reading))


def _last_output_only() -> str:
    split = catalogue()["split.f32.cpu"]

    def lazy(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        honest = split.implementation(cpu, ins, outs, attrs)

        def run() -> None:
            honest()
            for x in outs[:-1]:
                x[...] = 0

        return run

    return _verdict(parity.measure, _kernel(lazy, split))


def _patched_clock() -> str:
    real = time.perf_counter_ns

    def patching(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        honest = _call(cpu, ins, outs, attrs)

        def run() -> None:
            honest()
            time.perf_counter_ns = lambda: real() // 1000

        return run

    try:
        return _verdict(perf.measure, _kernel(patching))
    finally:
        time.perf_counter_ns = real


def honest_passes() -> str:
    """What an honest kernel in the same clothes is found to be, by each engine that the cheats go through; '' when nothing."""
    return "; ".join(filter(None, (_verdict(engine, _kernel(_call)) for engine in (parity.measure, determinism.measure, perf.measure))))


HANDLED = Refusal(name="x", error=0.0, bound=0.0)


def _record(gate: str, case: dict[str, object], **more: object) -> Record:
    values: dict[str, object] = {"component": "gelu.f32.cpu", "gate": gate, "machine": "cpu_x_np2.2_y_t1", "nonce": "00", "declared": 1,
                                 "digests": {"implementation": "00"}, "cases": [case], **more}
    return Record(**values)  # type: ignore[arg-type]


def _impossible_speed() -> str:
    judgement = judge(_record("perf", Share(name="cache", share=1.31, times_ns=(10, 11, 12)).plain()))
    return judgement.reasons[0] if judgement.verdict == FAIL else ""


def _edited_metric() -> str:
    line = _record("parity", Relative(name="x", ratio=7.5, floor=900.0).plain()).line()
    try:
        parse(line.replace('"ratio":7.5', '"ratio":0.5'), "evidence")
    except CorruptError as error:
        return error.what
    return ""


def _forged_probe() -> str:
    """A wrong kernel's record, its numbers made good and its content hash made to fit: the oracle disagrees with its bits."""
    component = replace(_honest(), envelope=Envelope(dtypes=("f32",)))
    wrong = _kernel(lambda cpu, ins, outs, attrs: lambda: np.multiply(ins[0], np.float32(0.5), out=outs[0]))
    record = _measured(parity.measure, wrong)
    clean = [{**c, **({"ratio": 0.5} if "ratio" in c else {"error": 0.0})} for c in record.cases]
    forged = parse(replace(record, cases=clean).line(), "evidence")
    problems = recompute.probes(component, forged) if judge(forged).verdict != FAIL else []
    return problems[0] if problems else ""


def _other_binary() -> str:
    component = _honest()
    record = subjects.make_record(component, "faults", "00", 1, [HANDLED])
    other = replace(record, digests={**record.digests, "implementation": "0" * 64})
    with tempfile.TemporaryDirectory() as folder:
        evidence.save([other], Path(folder))
        status = Registry(catalogue(), [Path(folder)]).status(component.id).gates["faults"]
    return status.why if not status.satisfied else ""


def _other_machine() -> str:
    component = _honest()
    record = subjects.make_record(component, "faults", "00", 1, [HANDLED])
    with tempfile.TemporaryDirectory() as folder:
        path = evidence.path_of(Path(folder), record.machine, component.id)
        evidence.write_atomic(path, replace(record, machine="cpu_z80-none_np2.2_openblas-generic_t1").line() + "\n")
        try:
            evidence.load_file(path)
        except CorruptError as error:
            return error.what
    return ""


def _loosened_tolerance() -> str:
    """The catch of a kernel with a wrong constant is on record. Once the tolerance is loosened that record passes: the merge gate sees it.
    (Loosened further it would still fail: one precision lower must exceed the tolerance too.)"""
    def scaled(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        honest = _call(cpu, ins, outs, attrs)

        def run() -> None:
            honest()
            np.multiply(outs[0], np.float32(1 + 1e-5), out=outs[0])

        return run

    record = _measured(parity.measure, _kernel(scaled))
    def telling(c: CaseRecord) -> bool:
        return isinstance(c, Relative) and c.floor is not None and 2 < c.ratio < 1000 < c.floor

    relative = [raw for raw, c in zip(record.cases, cases_of(record)) if telling(c)][:2]
    catch = Catch(fault="x", component="gelu.f32.cpu", gate="parity", machine=record.machine, digests={},
                  record=replace(record, cases=relative, declared=len(relative), probes=[]))
    with mock.patch.object(judges, "RATIO", 1000.0):
        loosened = catch.rejected(shipped_pins())
    return "the recorded fault would pass now" if catch.rejected(shipped_pins()) and not loosened else ""


def _skipped_test() -> str:
    case = HANDLED.plain()
    skipped = judge(_record("faults", case, declared=3))
    empty = judge(_record("faults", case, declared=0, cases=[]))
    return skipped.reasons[0] if skipped.verdict == empty.verdict == NOT_RUN else ""


def _renamed_test() -> str:
    case = HANDLED.plain()
    twice = judge(_record("faults", case, declared=2, cases=[case, case]))
    component = replace(_honest(), envelope=Envelope(dtypes=("f32",)))
    record = _measured(parity.measure, component)
    renamed = replace(record, cases=[{**c, "name": f"easy-{i}"} for i, c in enumerate(record.cases)])
    problems = expected.differences(component, renamed)
    return f"{twice.reasons[0]}; {problems[0]}" if twice.verdict == NOT_RUN and problems else ""


def _not_a_number() -> str:
    """NaN where an error should be, as text and as a float: neither passes a comparison."""
    for value in (float("nan"), "nan", None, True):
        for gate, key in (("parity", "ratio"), ("gradient", "error"), ("faults", "error")):
            kind = {"kind": "relative", "floor": 9.0} if gate == "parity" else {}
            case = {"name": "x", **kind, "bound": 0.0 if gate == "faults" else 1e-6, "directions": 3, key: value}
            if judge(_record(gate, case)).verdict != FAIL:
                return ""
    return "no comparison lets NaN pass"


CHEATS: tuple[Cheat, ...] = (
    Cheat(1, "outputs never written, in the hope of stale memory", _stale_memory),
    Cheat(2, "inputs zeroed behind the reference's back", _zeroed_inputs),
    Cheat(4, "a background thread that finishes later", lambda: _late_thread(False)),
    Cheat(4, "a background thread that changes outputs later", lambda: _late_thread(True)),
    Cheat(5, "a patched clock", _patched_clock),
    Cheat(6, "a cache keyed by address", _by_address),
    Cheat(7, "a cache keyed by call order", _by_order),
    Cheat(8, "computed once, skipped in the loop", _batch_and_skip),
    Cheat(9, "a memory keyed by the first elements", _memoised_prefix),
    Cheat(9, "a memory keyed by the whole content", _memoised_content),
    Cheat(10, "answers for a fixed seed", _fixed_seed),
    Cheat(11, "right for the first calls, drifting later", _drift),
    Cheat(13, "a constant output", _constant),
    Cheat(13, "samples that a constant would pass", _constant_samples),
    Cheat(14, "inputs cut to sixteen bits", _half_precision),
    Cheat(16, "uninitialised scratch read", _uninitialised_scratch),
    Cheat(17, "only the last output computed", _last_output_only),
    Cheat(18, "impossible speed", _impossible_speed),
    Cheat(19, "an edited metric", _edited_metric),
    Cheat(19, "edited metrics with a fitting hash", _forged_probe),
    Cheat(20, "evidence of another binary", _other_binary),
    Cheat(20, "evidence of another machine", _other_machine),
    Cheat(21, "a loosened tolerance", _loosened_tolerance),
    Cheat(22, "a skipped test", _skipped_test),
    Cheat(22, "a renamed test", _renamed_test),
    Cheat(19, "NaN as a metric", _not_a_number),
)
