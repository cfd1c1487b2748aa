"""The gates' own parts: intervals and verdicts of the A/B procedure, shared entries, cases from nonces, mutants, broken copies."""

import ast
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from io import StringIO
from math import comb
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import alpha
from alpha.cli import gating
from alpha.component import Component
from alpha.errors import GraphError, ShapeError
from alpha.flops import v1 as flops
from alpha.gates import evaluate, gradient, limit, parity, perf, recompute, run, subjects, tolerance
from alpha.gates.adversarial import catches, mutants, plant
from alpha.gates.contracts.registry.common import pin_of
from alpha.gates.subjects import make_record
from alpha.gates.summarise import summarise
from alpha.gates.timing import ab
from alpha.ops.table import row
from alpha.profile.noise import Interval, interval, rank, wilson
from alpha.registry import machine, pins, policy, status
from alpha.registry.cases import Relative, Share
from alpha.registry.faults import load_faults
from alpha.registry.gates import cases_of
from alpha.registry.judge import AMBIGUOUS, BASELINE, FAIL, PASS, RATIO, judge
from alpha.registry.pins import line_of
from alpha.registry.record import Record
from alpha.train.catalogue import catalogue

NONCE = "5eed" * 8


@pytest.mark.parametrize("pairs", [3, 6, 20, 40, 160])
@pytest.mark.parametrize("alpha_", [0.05, 0.0166, 0.001])
def test_order_statistics_cover(pairs: int, alpha_: float) -> None:
    """P(k-th smallest <= median <= k-th largest) = 1 - 2 P(Binomial < k) is at least 1 - alpha, and would not be with k + 1."""
    def outside(k: int) -> float:
        return 2 * sum(comb(pairs, i) for i in range(k)) / 2.0**pairs

    k = rank(pairs, alpha_)
    assert outside(k) <= alpha_
    assert k == pairs // 2 or outside(k + 1) > alpha_


def _verdict(slowdown: float, noise: float, again: float) -> str:
    rng = np.random.default_rng(3)

    def reproduce() -> Interval:
        return interval((np.log1p(again) + noise * rng.standard_normal(160)).tolist(), 0.01)

    return ab.decide(lambda n: (np.log1p(slowdown) + noise * rng.standard_normal(n)).tolist(), reproduce).verdict


def test_verdicts() -> None:
    assert _verdict(0.0, 0.01, 0.0) == PASS
    assert _verdict(-0.3, 0.01, -0.3) == PASS
    assert _verdict(0.05, 0.01, 0.05) == FAIL
    assert _verdict(0.05, 0.01, 0.0) == AMBIGUOUS  # a fresh process does not see it
    assert _verdict(0.0, 0.5, 0.0) == AMBIGUOUS  # too noisy to say
    assert ab.decide(lambda n: [float("nan")] * n, lambda: Interval(1, 1, 1, 1)).verdict == AMBIGUOUS


@pytest.mark.parametrize(("shares", "verdict", "measured"), [
    ((0.9,), BASELINE, 1), ((1.02, 0.9), BASELINE, 2), ((1.02, 1.1, 0.9), BASELINE, 3), ((1.02, 1.1, 3.0, 0.9), FAIL, 3)])
def test_a_share_that_is_impossible_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, shares: tuple[float, ...], verdict: str, measured: int
) -> None:
    """Chance goes away, a kernel that skips work stays."""
    component, left, nonces = catalogue()["mul.f32.cpu"], list(shares), []

    def engine(component: Component, nonce: str | None) -> Record:
        nonces.append(nonce)
        return make_record(component, "perf", str(nonce), 1, [Share(name="memory", share=left.pop(0), times_ns=(1,))])

    monkeypatch.setattr(run, "engine_for", lambda gate, component: engine)
    monkeypatch.setattr(pins, "shipped_root", lambda: Path("/nothing/pinned"))
    monkeypatch.setattr(run, "PAUSE", 0.0)
    record, judgement = run.measure(component, "perf")
    assert judgement.verdict == verdict and judgement == run.judged(record, component)
    assert len(nonces) == measured and set(nonces) == {record.nonce}
    assert record.environment.get("tries", "1") == str(measured)


@pytest.mark.parametrize(("shares", "note", "verdict", "measured"), [
    ((0.60,), "", PASS, 1), ((0.50, 0.59), "", PASS, 2), ((0.50, 0.51, 0.49, 0.60), "", FAIL, 3), ((0.50, 0.60), "wrong", FAIL, 1)])
def test_a_share_below_its_line_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, shares: tuple[float, ...], note: str, verdict: str, measured: int
) -> None:
    """A neighbour goes away, a slower kernel stays; outputs that were wrong once are wrong."""
    component, left = catalogue()["mul.f32.cpu"], list(shares)
    pin = pins.Pin(component.id, "cpu", {}, {"memory": (0.60,) * 5}, ("",) * 5, "")

    def engine(component: Component, nonce: str | None) -> Record:
        case = Share(name="memory", share=left.pop(0), times_ns=(1,), note=note)
        return make_record(component, "perf", str(nonce), 1, [case], flops=flops.VERSION)

    monkeypatch.setattr(run, "engine_for", lambda gate, component: engine)
    monkeypatch.setattr(run, "PAUSE", 0.0)
    monkeypatch.setattr(pins.Pins, "of", lambda self, record: pin)
    record, judgement = run.measure(component, "perf")
    assert judgement.verdict == verdict and record.environment.get("tries", "1") == str(measured)


def test_wilson() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(10, 10)
    assert 0.7 < low < 0.73 and high == pytest.approx(1.0)


def test_entries_are_shared_by_order_and_keep_the_worst() -> None:
    entries = [Relative(name=f"c{i}", ratio=float(i == 77) * 5, floor=100.0 + i) for i in range(123)]
    shared = summarise(entries)
    assert len(shared) <= 41 and sum(e.n for e in shared) == 123
    assert [e.name for e in shared] == [e.name for e in summarise([replace(e, ratio=0.0) for e in entries])]
    found = [e for e in shared if isinstance(e, Relative)]
    assert max(e.ratio for e in found) == 5.0 and min(e.floor or 0.0 for e in found) == 100.0
    assert any(e.worst == "c77" for e in shared)
    worse = summarise([replace(e, ratio=float("nan") if i == 3 else 0.0) for i, e in enumerate(entries)])
    assert any(isinstance(e, Relative) and e.ratio != e.ratio for e in worse)


def test_cases_derive_from_the_nonce() -> None:
    kernel = catalogue()["gelu.f32.cpu"]
    first, same, other = (subjects.cases(kernel, n) for n in (NONCE, NONCE, "00"))
    assert [c.name for c in first] == [c.name for c in same]
    assert all(np.array_equal(a.inputs[0], b.inputs[0]) for a, b in zip(first, same))
    assert not any(np.array_equal(a.inputs[0], b.inputs[0]) for a, b in zip(first, other) if a.name.endswith("ragged"))


def test_kernels_have_a_case_of_several_blocks() -> None:
    """Grown or the row's own; only kernels of scalars have none, and what makes scalars of one number a block."""
    for c in catalogue():
        if c.kind == "kernel":
            spec = subjects.spec_of(c)
            cases = subjects.cases(c, NONCE)
            sizes = [subjects.size(x.types) + subjects.size(x.out_types(spec)) for x in cases]
            flops = [spec.flops(x.types, x.attrs) for x in cases]
            assert max(sizes) >= 16_384 or max(flops) >= 1_000_000 or max(sizes) < 16 or c.op == "scalars_of_squares", c.id


def test_places_in_a_buffer_grow_with_it() -> None:
    """A grown update covers as much of its buffers as the sample did, in segments that its row accepts."""
    for name in ("adamw.f32.cpu", "sgd.f32.cpu", "global_norm.f32.cpu"):
        component = catalogue()[name]
        for case in perf.representative(component, NONCE).values():
            covered = sum(length for _, length, *_ in case.attrs["segments"])  # type: ignore[attr-defined]
            assert covered >= 0.4 * case.types[0].size, (name, case.name)
            row(component.op).infer(case.types, case.attrs)


def test_cases_of_few_elements_borrow_power_but_do_not_make_it() -> None:
    def floors(**given: float | None) -> list[object]:
        found = parity._lend_power([Relative(name=n, ratio=0.5, floor=f) for n, f in given.items()], {"one", "two"})
        return [c.floor for c in found if isinstance(c, Relative)]

    assert floors(one=0.2, large=7.0, exact=None) == [7.0, 7.0, None]
    assert floors(one=0.2, large=0.3) == [0.3, 0.3]  # nothing has power: both cases fail
    assert floors(one=0.2, two=9.0) == [9.0, 9.0]
    assert floors(large=0.3, one=9.0) == [0.3, 9.0]  # a large case owes its own
    assert floors(one=None) == [None]


@pytest.mark.parametrize("name", ["dropout.f32.cpu", "dropout.bf16.sm90"])
def test_every_draw_of_dropout_tells_precisions_apart(name: str) -> None:
    """Also where a tenth is kept. With the 26 elements that the sample had once, some of these draws kept nothing or told nothing."""
    component, spec = catalogue()[name], subjects.spec_of(catalogue()[name])

    def powerless(drawn: int, less: bool) -> int:
        (case,) = (c for c in subjects.cases(component, f"{drawn:032x}") if c.name == "rare")
        if less:
            x, step, ids = case.inputs
            case = replace(case, inputs=(x[:, :13], step, ids), types=(replace(case.types[0], shape=(2, 13)), *case.types[1:]))
        dtypes, allowed = [t.dtype for t in case.out_types(spec)], tolerance.allowance(spec, case, f"{drawn:032x}")
        told = not tolerance.exact_below(allowed.want, dtypes)
        return not told or not allowed.ratio(tolerance.lower(spec, case), dtypes) > RATIO

    assert sum(powerless(i, less=False) for i in range(60)) == 0
    assert sum(powerless(i, less=True) for i in range(60)) > 0


def _perf_with(monkeypatch: pytest.MonkeyPatch, shares: list[float], pinned: float, note: str = "",
               tries: int | None = None) -> tuple[Share, int]:
    """The entry that measurements with these shares end in, and how many were taken."""
    taken: list[float] = []

    def case(component: object, name: str, case: object, nonce: str, checked: bool, rng: object) -> Share:
        assert checked == (tries is None)
        taken.append(shares[len(taken)])
        return Share(name=name, share=taken[-1], times_ns=(1,), note=note)

    monkeypatch.setattr(perf, "_case", case)
    monkeypatch.setattr(perf, "lines", lambda component: {"cache": line_of((pinned,) * 5, 0.1)} if pinned else {})
    monkeypatch.setattr(perf, "representative", lambda component, nonce: {"cache": None})
    record = perf.measure(catalogue()["silu.f32.cpu"], NONCE, tries=tries)
    assert record.environment["flops"] == flops.VERSION
    (entry,) = cases_of(record)
    assert isinstance(entry, Share)
    return entry, len(taken)


def test_a_case_under_the_line_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow each time is slow, disturbed once is not; wrong outputs end it at once; a pin takes the better of two."""
    pin = pin_of("silu.f32.cpu", 0.5, spread=0.0, cases=("cache",))
    entry, taken = _perf_with(monkeypatch, [0.4, 0.42, 0.41, 0.4], 0.5)
    assert taken == perf.TRIES == 4 and entry.share == 0.42 and entry.tries == 4
    assert judge(subjects.make_record(catalogue()["silu.f32.cpu"], "perf", NONCE, 1, [entry]), pin=pin).verdict == FAIL
    entry, taken = _perf_with(monkeypatch, [0.4, 0.46], 0.5)
    assert taken == 2 and entry.share == 0.46
    assert judge(subjects.make_record(catalogue()["silu.f32.cpu"], "perf", NONCE, 1, [entry]), pin=pin).verdict == PASS
    entry, taken = _perf_with(monkeypatch, [0.46], 0.5)
    assert taken == 1
    entry, taken = _perf_with(monkeypatch, [0.0], 0.5, note="timed calls gave wrong outputs")
    assert taken == 1 and entry.share == 0.0
    entry, taken = _perf_with(monkeypatch, [0.1], 0.0)
    assert taken == 1 and "baseline" not in entry.plain()
    entry, taken = _perf_with(monkeypatch, [0.5, 0.6, 0.7], 0.5, tries=perf.PINNED)
    assert taken == perf.PINNED == 2 < perf.TRIES and entry.share == 0.6


def test_pins_belong_to_a_generation_of_processor() -> None:
    zen5 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n"
    both = zen5 + "\nprocessor\t: 1\nvendor_id\t: Other\ncpu family\t: 1\nmodel\t\t: 1\n"
    assert machine.processor_of(zen5) == machine.processor_of(both) == "AuthenticAMD-26-2"
    assert machine.processor_of("processor : 0\nCPU implementer : 0x41\nCPU part\t: 0xd4f\n") == "0x41-0xd4f"
    assert machine.processor_of("") == machine.processor_of("vendor_id: X\n") == "unknown"
    key = machine.machine_class().key
    assert pins.key_of(key, "AuthenticAMD-26-2") != pins.key_of(key, "AuthenticAMD-25-1")
    assert pins.key_of("cuda_sm90_H200", "AuthenticAMD-26-2") == pins.key_of("cuda_sm90_H200", "AuthenticAMD-25-1")
    assert machine.environment()["processor"] == machine.processor()
    record = subjects.make_record(catalogue()["silu.f32.cpu"], "perf", NONCE, 0, [])
    assert record.environment["processor"] == machine.processor(), "what a record is judged by"


def test_probes_recompute_and_a_flipped_bit_shows() -> None:
    kernel = catalogue()["silu.f32.cpu"]
    record = parity.measure(kernel, NONCE)
    assert recompute.probes(kernel, record) == []
    i, output, at, bits = record.probes[0]
    flipped = f"{int(bits, 16) ^ 0x10000000:0{len(bits)}x}"
    assert recompute.probes(kernel, type(record)(**{**record.__dict__, "probes": [[i, output, at, flipped], *record.probes[1:]]}))
    assert recompute.probes(kernel, type(record)(**{**record.__dict__, "probes": record.probes[1:]}))


def test_every_backward_kernel_is_reached_through_a_forward_row() -> None:
    for c in catalogue():
        if c.kind == "kernel" and "gradient" in policy.owed(c):
            assert gradient.rows_for(c), c.id


def test_a_vjp_of_the_wrong_shape_is_refused() -> None:
    spec = row("gelu")
    x = np.zeros((3, 4))
    case = subjects.Case("x", "f64", False, (x,), (subjects.TensorType((3, 4), "f64"),), {"approximate": "tanh"})
    at = evaluate.node(spec, case.inputs, case.types, case.attrs)
    broken = replace(spec, vjp=lambda emit, node, dy: (emit("sum", dy[0], axis=0, keepdims=False),))
    with pytest.raises(GraphError, match="shape of its input"):
        evaluate.vjp(broken, at, [np.ones((3, 4))], evaluate.oracles)
    with pytest.raises(ShapeError):
        evaluate.Eager(evaluate.oracles)("add", at.inputs[0], evaluate.Value(subjects.TensorType((5,), "f64"), np.zeros(5)))


def test_mutants_differ_and_parse() -> None:
    drawn = mutants.draw(catalogue(), 40, "1234")
    assert len(drawn) == 40 and len({m.key for m in drawn}) == 40
    for m in drawn:
        assert m.was != m.now and m.attempts
        ast.parse(m.text)
    assert [m.key for m in mutants.draw(catalogue(), 40, "1234")] == [m.key for m in drawn]


def test_what_is_written_into_a_copy_of_the_package_stays_there(tmp_path: Path) -> None:
    """Of its files only compiled Python, which is never written into, may be the package's own."""
    plant.copy_package(tmp_path)
    package, copy = Path(alpha.__file__).parent, tmp_path / "alpha"
    copied = [path for path in copy.rglob("*") if path.is_file()]
    assert {p.relative_to(copy) for p in copied if p.suffix == ".py"} == {p.relative_to(package) for p in package.rglob("*.py")}
    for path in copied:
        own = package / path.relative_to(copy)
        assert path.suffix == ".pyc" or not path.samefile(own), own
        if path.suffix == ".py":
            assert path.stat().st_mtime_ns == own.stat().st_mtime_ns, "what was compiled of it is not taken"


def test_a_broken_copy_fails_and_an_unbroken_one_passes() -> None:
    """Faults, hangs and deaths are seen; the sound kernel passes on the copy; the package itself stays as it is."""
    file = "backends/cpu/kernels/gelu.py"
    path = Path(alpha.__file__).parent / file
    text = path.read_text(encoding="utf-8")
    head = "def gelu(cpu: Cpu"
    assert text.count(head) == 1

    def with_first_line(line: str) -> str:
        at = text.index(":\n", text.index(head)) + 2
        return text[:at] + f"    {line}\n" + text[at:]

    attempts = (("gelu.f32.cpu", "faults"),)
    jobs = [plant.Job("sound", attempts, file, text), plant.Job("raises", attempts, file, with_first_line("raise RuntimeError('x')")),
            plant.Job("hangs", attempts, file, with_first_line("while True: pass"), timeout=4.0),
            plant.Job("dies", attempts, file, with_first_line("import os; os._exit(9)")), plant.Job("sound again", attempts, file, text)]
    outcomes = plant.run_all(jobs, workers=1)
    assert [bool(o.caught_by) for o in outcomes] == [False, True, True, True, False]
    assert outcomes[0].records[0][1] == outcomes[4].records[0][1] == PASS
    assert "Timeout" in outcomes[2].error and "process ended" in outcomes[3].records[0][2][0]
    assert path.read_text(encoding="utf-8") == text


def test_what_ships_is_measured_whatever_lies_in_the_local_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, local = tmp_path / "shipped", tmp_path / "local"
    monkeypatch.setattr(gating, "shipped_root", lambda: shipped)
    monkeypatch.setattr(status, "default_roots", lambda: (shipped, local))
    monkeypatch.setattr(run, "local_root", lambda: local)
    split = {"ids": ["split.f32.cpu"], "gate": "faults", "stale": True, "console": Console(file=StringIO())}
    for ship, root, others in ((False, local, shipped), (True, shipped, local)):
        before = sorted(others.rglob("*.jsonl"))
        assert gating.cmd_run(**split, ship=ship) == 0
        found = next(root.rglob("split.f32.cpu.jsonl")).read_bytes()
        assert sorted(others.rglob("*.jsonl")) == before
        assert gating.cmd_run(**split, ship=ship) == 0
        assert next(root.rglob("split.f32.cpu.jsonl")).read_bytes() == found, "it was current there, and yet measured again"


def test_a_catch_elsewhere_does_not_count_where_it_is_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = next(f for f in load_faults(catalogue=catalogue()) if f.component == "split.f32.cpu")
    elsewhere, kept = tmp_path / "elsewhere", tmp_path / "kept"
    monkeypatch.setattr(catches, "default_roots", lambda: (elsewhere,))
    assert [r.fresh for r in catches.run(catalogue(), [fault], root=elsewhere)] == [True]
    assert [r.fresh for r in catches.run(catalogue(), [fault])] == [False]
    assert [r.fresh for r in catches.run(catalogue(), [fault], root=kept)] == [True]
    assert [r.fresh for r in catches.run(catalogue(), [fault], root=kept)] == [False]


def _endless(component: Component, nonce: str | None) -> Record:
    threading.Event().wait()
    raise AssertionError("woken")


def test_a_gate_that_hangs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    component = catalogue()["flops.v1"]
    monkeypatch.setattr(run, "engine_for", lambda gate, component: _endless)
    monkeypatch.setattr(limit, "LEAST", 0.2)
    monkeypatch.setattr(limit, "FACTOR", 0.0)
    own = signal.getsignal(signal.SIGALRM)
    record, judgement = run.measure(component, "parity")
    assert judgement.verdict == FAIL and "did not end within 0.2 s" in record.cases[0]["note"]
    assert signal.getsignal(signal.SIGALRM) is own and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_gate_in_a_call_that_never_returns_is_ended_with_its_stacks() -> None:
    program = """
import ctypes
from alpha.gates import limit
limit.GRACE = 0.3
lock, c = ctypes.create_string_buffer(64), ctypes.CDLL(None)
with limit.limited(0.2):
    c.pthread_mutex_lock(lock)
    c.pthread_mutex_lock(lock)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and "most recent call first" in ended.stderr, ended.stderr
