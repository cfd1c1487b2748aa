"""`alpha bench` of kernels: peers that are right, wrong, missing, failing or dying; operands that fit; what PyTorch computes; states of
the code; the command."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import warm
from emulated_gpu import Stream, emulated
from made_bench import MADE, SMALL, MadeClocks, MadeTime, calm, gpu_of_small_calls, pytorch

from alpha.bench import agreement, command, kernel, ours, peers_torch
from alpha.bench.peer import ROOT, Peer
from alpha.bench.team import Team
from alpha.cli import main
from alpha.cuda_runtime import nvml
from alpha.cuda_runtime.memory import Span, download
from alpha.cuda_runtime.nvml import Reading
from alpha.errors import InputError, MachineError
from alpha.gates import perf
from alpha.gates.contracts.registry.common import pin_of
from alpha.gates.cuda import calls as cuda_calls
from alpha.gates.cuda import perf as cuda_perf
from alpha.gates.cuda import subjects as cuda_subjects
from alpha.gates.cuda import time as cuda_time
from alpha.gates.cuda.subjects import CudaBound
from alpha.gates.subjects import make_record
from alpha.gates.timing import ab, against, operating
from alpha.ops.table import row
from alpha.profile import noise
from alpha.profile.served import Served, ServedError
from alpha.registry.cases import Share
from alpha.registry.claims import why_no_claim
from alpha.registry.digest import component_digests
from alpha.registry.judge import judge
from alpha.registry.machine import machine_class, processor
from alpha.registry.pins import Pins, code_of, key_of, line_of
from alpha.train.catalogue import catalogue
from alpha.types import TensorType

pytestmark = pytest.mark.usefixtures("warm_peers")

# -- the other process ---------------------------------------------------------------------------------------------------------


def test_a_peer_that_is_silent_dies_or_does_not_exist_is_an_error_with_its_words(tmp_path: Path) -> None:
    with Served("made", MADE) as served:
        assert served.ask("repeats", way="right", ns=1) == 3  # after a print of its library
        polls: list[int] = []
        served.ask("sleep", seconds=0.1, meanwhile=lambda: polls.append(1))
        assert len(polls) > 5
        with pytest.raises(ServedError, match="no answer to 'sleep'"):
            served.ask("sleep", seconds=30, patience=0.2)
        with pytest.raises(ServedError, match="ended at"):
            served.ask("repeats", way="right", ns=1)
    broken = tmp_path / "broken.py"
    broken.write_text("raise ImportError('its own words')")
    with Served("broken", [sys.executable, str(broken)]) as served, pytest.raises(ServedError, match="its own words"):
        served.ask("open")
    with pytest.raises(ServedError, match="cannot be started"):
        Served("none", ["/no/such/program"])


def test_a_missing_library_is_said(tmp_path: Path) -> None:
    assert Peer("/no/such/python", "cpu", 1).why.startswith("torch in /no/such/python cannot be started")
    stub = tmp_path / "alpha"
    stub.write_text(f"#!/bin/sh\nexec {sys.executable} -S -c \"raise ModuleNotFoundError(\\\"No module named 'torch'\\\")\"\n")
    stub.chmod(0o755)
    assert Peer(str(stub), "cpu", 1).why == f"not installed in {stub}"


def test_a_variant_is_not_given_what_was_compiled_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's process has torch.compile's cache of forward and backward turned off, whatever ours has."""
    monkeypatch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\necho \"cache is $TORCHINDUCTOR_AUTOGRAD_CACHE\" >&2\nexit 1\n")
    stub.chmod(0o755)
    assert "cache is 0" in Peer(str(stub), "cpu", 1).why


# -- agreement -----------------------------------------------------------------------------------------------------------------


def test_agreement_tells_right_from_wrong() -> None:
    rng = np.random.default_rng(0)
    y = rng.standard_normal(4096)
    for dtype, u in (("bf16", 2.0**-8), ("f32", 2.0**-24)):
        allowed = agreement.bound({dtype}, 100)
        rounded = y * (1 + u * rng.uniform(-1, 1, y.size))
        assert agreement.difference(rounded, y) <= allowed < 0.05
        assert agreement.difference(y * (1 + 16 * u), y) > agreement.bound({dtype}, 1)
    assert agreement.bound({"i32"}, 5) == 0 and agreement.difference(np.arange(3), np.array([0, 1, 3])) == math.inf
    for bad in (np.where(y > 3, np.nan, y), np.where(y > 3, np.inf, y), y[:-1]):
        assert agreement.difference(bad, y) == agreement.difference(y, bad) == math.inf
    empty = np.array([-np.inf, 1.0])
    assert agreement.difference(empty, empty.copy()) == 0 and agreement.difference(empty, -empty) == math.inf
    assert agreement.difference(np.zeros(3), np.zeros(3)) == 0 and agreement.difference(np.ones(3), np.zeros(3)) == math.inf


@pytest.mark.parametrize("op", ["attention_bwd", "attention_packed_bwd", "layernorm_bwd", "rmsnorm_bwd_add", "softmax_bwd",
                                "cross_entropy_bwd"])
def test_operands_of_a_backward_row_are_made_to_fit(op: str) -> None:
    """Statistics that are garbage become those that the row's own samples hold (they follow from the operands beside them)."""
    sample = next(s for s in row(op).samples(np.random.default_rng(3)) if s.name not in ("one", "zero-row", "all-equal"))  # type: ignore[operator]
    names = [n.rstrip("?") for n in row(op).inputs][: len(sample.inputs)]
    kept = [names.index(n) for n in ("o", "lse", "mean", "rstd", "y") if n in names]
    garbage = [np.full_like(x, 7.0) if i in kept and op != "softmax_bwd" else np.array(x) for i, x in enumerate(sample.inputs)]
    if op == "softmax_bwd":
        garbage[1] = np.log(sample.inputs[1]) + 3.0

    def forward(name: str, xs: object, attrs: object) -> object:
        return row(name).oracle(*xs, **attrs)  # type: ignore[misc]

    attrs = {k: v for k, v in sample.attrs.items()}
    found = ours.fitted(op, garbage, attrs, forward)  # type: ignore[arg-type]
    assert kept and ours.follows(op, len(garbage))
    for i in kept:
        assert np.allclose(found[i], sample.inputs[i], rtol=2e-2, atol=1e-5), names[i]


def test_shapes_lie_inside_the_envelopes() -> None:
    products = [*cuda_calls.timed(matmul := catalogue()["matmul.bf16.sm90"]), *cuda_calls.compared(matmul)]
    assert len(products) == 3 + 4 * 14 and len({c.name for c in products}) == len(products)
    for c in catalogue():
        if c.kind == "kernel" and c.backend == "cuda":
            carried = cuda_calls.calls_of(c)
            assert [*cuda_calls.timed(c), *cuda_calls.compared(c)] == [*carried.timed, *carried.compared], c.id
            for call in (*carried.timed, *carried.compared, *carried.paths):
                row(c.op or "").infer(call.types, call.attrs)
                assert c.envelope.why_outside(call.types, call.attrs) is None
    assert len(cuda_calls.compared(catalogue()["attention_bwd.bf16.sm90"])) == 2 * 6


# -- kernels -------------------------------------------------------------------------------------------------------------------


def _check(rows: dict[str, kernel.Row]) -> None:
    right = rows["right"]
    assert right.ns == 5e5 and right.difference <= right.allowed and not right.why
    low, middle, high = right.ratio
    assert low <= middle <= high and middle == pytest.approx(5e5 / rows["ours"].ns, rel=0.5)
    for name, word in (("wrong", "not ours"), ("nan", "not ours"), ("failing", "this way fails"), ("missing", "not made")):
        assert word in rows[name].why and math.isnan(rows[name].ns) and math.isnan(rows[name].ratio[1]), name
    assert "exit code 7" in rows["dying"].why and rows["dying"].failed and math.isnan(rows["dying"].ns)


def test_right_peers_are_timed_and_others_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    calm(monkeypatch)
    dying: list[str] = []
    with Peer("made", "cpu", 1, command=MADE) as peer:
        first = peer.served
        results = kernel.bench(catalogue()["gelu.f32.cpu"], catalogue(), peer, rounds=9, on_result=lambda r: dying.append(r.case))
        assert peer.served is not None and peer.served is not first  # one died, so the next case has a fresh one
    assert dying == [r.case for r in results] == ["cache", "memory"]
    for r in results:
        rows = {x.name: x for x in r.rows}
        assert "exit code 7" in rows["dying"].why and "exit code 7" in rows["right"].why  # one process served both
        assert rows["wrong"].why and rows["failing"].why and rows["missing"].why
        assert rows["ours"].share == pytest.approx(rows["ceiling"].ns / rows["ours"].ns) and 0 < rows["ours"].share < 1
        assert r.limit in ("bytes", "flops") and r.rounds == 9 and not r.why


def test_a_peer_that_lives_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    calm(monkeypatch)
    original = kernel._admitted

    def without_dying(*args: object) -> object:
        rows, blocks = original(*args)  # type: ignore[arg-type]
        del blocks["dying"]
        return [kernel.Row("dying", why="exit code 7", failed=True) if r.name == "dying" else r for r in rows], blocks

    monkeypatch.setattr(kernel, "_admitted", without_dying)
    with Peer("made", "cpu", 1, command=MADE) as peer:
        (result,) = kernel.bench(catalogue()["gelu.f32.cpu"], catalogue(), peer, rounds=25, pattern="cache")
    _check({r.name: r for r in result.rows})


def test_throttled_rounds_are_discarded_or_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for slow, believed in ((0.2, True), (0.7, False)):
        monkeypatch.setattr(noise, "throttled_cpu", lambda probes, slow=slow: np.arange(len(probes)) < slow * len(probes))
        (result,) = kernel.bench(catalogue()["gelu.f32.cpu"], catalogue(), None, rounds=10, pattern="cache")
        assert result.discarded == 10 * slow and bool(result.why) != believed and bool(result.rows) == believed


# -- the GPU, emulated ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def gpu() -> Iterator[pytest.MonkeyPatch]:
    with gpu_of_small_calls() as patch:
        yield patch


class MadeNvml:
    """What stands for pynvml; `lost`: readings fail from then on."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *, driver: bool = True) -> None:
        self.lost, self.driver = False, driver

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> str:
        if address != b"0000:1B:00.0":
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return {("handle", 1): 1755}[handle, kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x24

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        return 690_500

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return {0: 61}[kind]


def test_clocks_are_read_by_the_address_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["0000:1B:00.0", "0000:99:00.0"]
    begun: list[bool] = []

    def device(i: int) -> SimpleNamespace:
        assert begun, "the driver refuses whoever asks before it was initialised"
        return SimpleNamespace(pci_bus_id=lambda: addresses[i])

    devices = SimpleNamespace(init=lambda: begun.append(True), Device=device)
    monkeypatch.setattr(nvml._bindings, "pycuda_driver", lambda: devices)
    library = MadeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    nvml._library.cache_clear()
    clocks = nvml.Clocks.open()
    first = clocks.read()
    assert (first.sm_mhz, first.reasons) == (1755.0, 0x24) and math.isnan(first.watts)
    sensed = clocks.sense(Reading(1755.0, 0x24))
    assert sensed == Reading(1755.0, 0x24, 690.5, 61.0)
    library.lost = True  # a reading that fails proves nothing: it counts as throttled
    failed = clocks.read()
    assert math.isnan(failed.sm_mhz) and noise.throttled_gpu([1755.0, 1755.0, failed.sm_mhz], [0, 0, failed.reasons]).tolist()[2]
    with pytest.raises(MachineError, match="NVML does not know this GPU"):
        nvml.Clocks.open(1)
    for broken in (None, MadeNvml(driver=False)):  # not installed, or without a driver
        monkeypatch.setitem(sys.modules, "pynvml", broken)
        nvml._library.cache_clear()
        with pytest.raises(MachineError, match="clock cannot be read"):
            nvml.Clocks.open()
    nvml._library.cache_clear()


@pytest.mark.parametrize("part, believed", [(0.0, True), (0.25, True), (0.8, False)])
def test_the_perf_gate_discards_throttled_blocks_and_counts_them(gpu: pytest.MonkeyPatch, part: float, believed: bool) -> None:
    rng = np.random.default_rng(1)
    clocks = MadeClocks(lambda i: rng.random() < part)
    gpu.setattr(cuda_perf.Clocks, "open", staticmethod(lambda index=0: clocks))
    component = emulated(catalogue())["rmsnorm.bf16.sm90"]
    record = cuda_perf.measure(component)
    judged = cuda_perf_judge(record)
    assert clocks.taken == 4 * (cuda_perf.BLOCKS + 1)
    if believed:
        (case,) = record.cases
        assert len(case["times_ns"]) + case["throttled"] >= cuda_perf.BLOCKS and (case["throttled"] > 0) == (part > 0)
        assert "not_measured" not in record.environment and "note" not in case and judged.verdict != "NOT_RUN"
    else:
        assert record.cases == [] and record.declared == 1 and judged.verdict == "NOT_RUN"
        assert "ran throttled" in record.environment["not_measured"]


@pytest.mark.parametrize("shares, tries, taken", [([0.5, 0.6, 0.4, 0.3], None, 4), ([0.5, 0.95], None, 2), ([0.5, 0.6], 2, 2)])
def test_a_call_on_the_gpu_under_its_line_is_timed_again(gpu: pytest.MonkeyPatch, shares: list[float], tries: int | None,
                                                         taken: int) -> None:
    """Bound once, timed again; a pin takes the better of two."""
    left = list(shares)
    gpu.setattr(cuda_perf.Clocks, "open", staticmethod(lambda index=0: MadeClocks(lambda i: False)))
    gpu.setattr(cuda_perf, "_timed", lambda *args: Share(name=SMALL[0].name, share=left.pop(0), times_ns=(1,)))
    gpu.setattr(perf, "lines", lambda component: {SMALL[0].name: line_of((0.9,) * 5, 0.05)})
    record = cuda_perf.measure(emulated(catalogue())["rmsnorm.bf16.sm90"], tries=tries)
    (case,) = record.cases
    assert case["share"] == max(shares) and case["tries"] == taken and not left and "note" not in case
    assert record.environment["flops"] == perf.FLOPS


def test_blocks_on_the_device_are_the_contents_that_the_host_would_make(gpu: pytest.MonkeyPatch) -> None:
    types = (TensorType((3, 1 << 19), "bf16"), TensorType((5,), "f32"), TensorType((7, 3), "i32"))
    gpu.setattr(cuda_time, "BLOCK", 1 << 10)
    component = replace(emulated(catalogue())["rmsnorm.bf16.sm90"], implementation=lambda *args: lambda stream: None, scratch=None)
    bound = cuda_subjects.CudaBound(component, types, (TensorType((2,), "bf16"),), {})
    made = [np.random.default_rng(3), np.random.default_rng(3)]
    bound.fill_blocks(cuda_time.block_of(t, made[0], 2, 9) for t in types)
    bound.stream.synchronize()
    for t, span in zip(types, bound._ins):
        wanted = cuda_time.contents(t, made[1], 2, 9)
        assert (download(span, t.shape, wanted.dtype) == wanted).all()


def test_the_operating_characteristic_on_the_gpu() -> None:
    """A planted slowdown is measured before it is called one, and a large one is seen; without one nothing is. Time is made: a neighbour of
    this machine is no slowdown."""
    made = MadeTime()
    with gpu_of_small_calls(lambda: made.now) as gpu:
        enqueue, memset = CudaBound.enqueue, operating.fill

        def launch(bound: CudaBound) -> None:
            enqueue(bound)
            bound.stream.push(made.launched)

        def fill(span: Span, byte: int, stream: Stream) -> None:
            memset(span, byte, stream)
            stream.push(partial(made.filled, span.nbytes))

        gpu.setattr(CudaBound, "enqueue", launch)
        gpu.setattr(operating, "fill", fill)
        gpu.setattr(operating, "timed", lambda c: SMALL)
        gpu.setattr(operating.Clocks, "open", staticmethod(lambda index=0: MadeClocks(lambda i: False)))
        gpu.setattr(operating, "FLUSH_BYTES", 1 << 22)
        gpu.setattr(operating, "SLOWDOWNS", (0.0, 0.5))
        gpu.setattr(operating, "SERIES", 200)
        gpu.setattr(operating, "LIVE", 2)
        kernel = emulated(catalogue())["rmsnorm.bf16.sm90"]
        table = operating.characteristic(kernel, seconds=40.0)
        rows = {(r["source"], r["slowdown"]): r for r in table["table"]}
        assert table["pairs"] >= 200 and rows["resampled", 0.0]["trials"] == operating.TRIALS
        assert rows["live", 0.0]["trials"] == rows["live", 0.0]["pass"] == 2
        assert abs(rows["live", 0.5]["planted"] - 0.5) < 0.05 and rows["live", 0.5]["trials"] == rows["live", 0.5]["fail"] == 2
        with pytest.raises(InputError, match="no such timed call"):
            operating.OnGpu(kernel, "nothing")
    with pytest.raises(InputError, match="too few pairs"):
        operating.resampled([0.0] * 10, 0.0, np.random.default_rng(1))


def cuda_perf_judge(record: object) -> object:
    from alpha.registry.judge import judge

    return judge(record)  # type: ignore[arg-type]


def test_a_clock_that_drops_without_a_reason_is_seen_per_arm() -> None:
    steady = [Reading(1980.0, 0)] * 9
    hot = [Reading(1500.0, 0x04)] * 9  # a product under the power cap runs slower than a copy, always: not throttled
    masks, lost = cuda_perf.unthrottled({"copy": steady, "kernel": hot})
    assert lost == 0 and all(m.all() for m in masks.values())
    masks, lost = cuda_perf.unthrottled({"copy": steady, "kernel": [*hot[:-2], Reading(1300.0, 0x04), Reading(math.nan, 0)]})
    assert lost == 2 and masks["kernel"].tolist() == [True] * 7 + [False] * 2
    with pytest.raises(cuda_perf.Throttled, match="9 of 9 blocks of kernel"):
        cuda_perf.unthrottled({"copy": steady, "kernel": [Reading(1500.0, 0x08)] * 9})


def test_a_kernel_of_the_gpu_is_benchmarked(gpu: pytest.MonkeyPatch) -> None:
    """gelu has no kernel of its own there, so rmsnorm beside a peer that computes something else: refused, and ours has its figures."""
    clocks = MadeClocks(lambda i: i % 10 == 0)
    gpu.setattr(ours.Clocks, "open", staticmethod(lambda index=0: clocks))
    kernels = emulated(catalogue())
    with Peer("made", "cuda", 1, command=MADE) as peer:
        (result,) = kernel.bench(kernels["rmsnorm.bf16.sm90"], kernels, None, rounds=9)
        assert peer.served is not None
    assert [r.name for r in result.rows] == ["ours", "ceiling"] and result.limit == "bytes" and not result.why
    oracle = row("rmsnorm").oracle
    with ours.timed_cases(kernels["rmsnorm.bf16.sm90"], kernels, "00" * 16) as cases:
        timed = next(cases)
        x, gamma = ((b.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(float) for b in timed.operands)
        assert agreement.difference(timed.outputs[0].astype(float), oracle(x, gamma, **timed.attrs)[0]) < agreement.bound({"bf16"}, 1)
        assert timed.read_types == timed.types


def test_outputs_share_the_memory_that_the_planner_would_share(gpu: pytest.MonkeyPatch) -> None:
    kernels = emulated(catalogue())
    t = TensorType((64,), "f32")
    call = ours.GpuCall(kernels["accumulate.f32.sm90"], (t, t), (t,), {}, [np.full(64, 2, np.float32), np.full(64, 3, np.float32)])
    for expected in (5.0, 8.0):  # in place: the second call finds what the first left
        call.enqueue()
        assert (call.outputs()[0] == expected).all()
    call.free()


# -- PyTorch itself ------------------------------------------------------------------------------------------------------------

DEGENERATE = {"one", "all-equal", "equal", "zero-row", "large", "tiny", "far-below", "far-above", "minus-infinity"}
"""Samples whose result is nothing but the rounding of one side, or hangs on an eps that a backward row does not take; and rows of minus
infinity, of which PyTorch's softmax makes NaN and ours 0."""


@pytest.fixture(scope="module")
def torch() -> Iterator[Peer]:
    with pytorch() as peer:
        yield peer


@pytest.mark.parametrize("op", sorted(peers_torch.PEERS))
def test_what_pytorch_computes_is_the_row(torch: Peer, op: str, tmp_path: Path) -> None:
    assert torch.served is not None
    spec, agreed = row(op), 0
    for s in spec.samples(np.random.default_rng(1)):  # type: ignore[operator]
        if s.name in DEGENERATE:
            continue
        files, inputs = [], []
        for i, x in enumerate(np.asarray(x) for x in s.inputs):
            is_float = x.dtype.kind == "f"
            inputs.append(x.astype(np.float32).astype(float) if is_float else x)
            files.append((str(tmp_path / f"in{i}.npy"), "f32" if is_float else "i32"))
            np.save(files[-1][0], inputs[-1].astype(np.float32) if is_float else x)
        expected = spec.oracle(*inputs, **s.attrs)
        for name, why in torch.served.ask("make", op=op, attrs=dict(s.attrs), operands=files).items():
            if why or name == peers_torch.COMPILED:
                assert not why or why.startswith("no peer: ")
                continue
            try:
                paths = torch.served.ask("outputs", way=name, places=[""] * len(expected), folder=str(tmp_path))
            except ServedError as error:
                assert str(error.came).startswith(kernel.UNSUPPORTED), error
                continue
            assert any(paths)
            for y, path in zip(expected, paths):
                if path:
                    off = agreement.difference(np.asarray(y).reshape(-1), np.load(path))
                    assert off <= agreement.bound({"f32"}, sum(np.size(x) for x in inputs)), (s.name, name)
                    agreed += 1
    assert agreed


# -- states of the code --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code in which one kernel does most of its work five times: seen on a machine that is not quiet, too."""
    tree = tmp_path_factory.mktemp("slowed")
    shutil.copytree(ROOT / "alpha", tree / "alpha", ignore=shutil.ignore_patterns("__pycache__"))
    path = tree / "alpha" / "backends" / "cpu" / "kernels" / "gelu.py"
    text = path.read_text()
    assert text.count("            np.tanh(u, out=u)\n") == 1
    line = "            np.tanh(u, out=u)\n"
    path.write_text(text.replace(line, 4 * line.replace("out=u", "out=yb") + line))
    return tree


def test_a_kernel_that_became_slower_fails_against_its_older_state(slowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = {case: v for case, v, _ in against.compare("gelu.f32.cpu", slowed)}
    assert set(verdicts) == {"cache", "memory"} and all(v.verdict != noise.FAIL for v in verdicts.values())
    assert verdicts["cache"].verdict == noise.PASS and verdicts["cache"].interval.high < 0
    pinned = against.ROOT
    monkeypatch.setattr(against, "ROOT", slowed)
    monkeypatch.setattr(against, "SERVER", pinned / "alpha" / "gates" / "timing" / "against_server.py")
    case, verdict, discarded = next(iter(against.compare("gelu.f32.cpu", pinned)))
    assert verdict.verdict == noise.FAIL and verdict.reproduced and discarded == 0
    assert ab.case_of(verdict, case).estimate > 0.1


def test_a_comparison_with_the_pinned_tree_is_kept_and_makes_claimable(slowed: Path, tmp_path: Path) -> None:
    """Only of the tree that is pinned: its own registry says which code it holds."""
    component, pins = catalogue()["gelu.f32.cpu"], Pins(tmp_path)
    today = component_digests(component, "perf")
    verdict = noise.Verdict(noise.PASS, noise.Interval(-0.01, 0.0, 0.01, 40), 1, False)
    found = [("cache", verdict), ("memory", verdict)]
    with pytest.raises(InputError, match="a pinned kernel"):
        against.record(component, slowed, found, pins)
    made = pin_of(component.id, 0.5, cases=("cache", "memory"), digests=today)
    pins.save(key_of(machine_class().key, processor()), {component.id: made})
    with pytest.raises(InputError, match="not the pinned code"):
        against.record(component, slowed, found, pins)
    with against._sides(slowed) as sides:
        code = sides[0].ask("code", component=component.id)
        assert sides[1].ask("code", component=component.id) == code_of(today) != code
    pinned = replace(made, code=code)
    pins.save(key_of(machine_class().key, processor()), {component.id: pinned})
    entries = [Share(name=name, share=0.5, times_ns=(1,)) for name in pinned.shares]
    record = make_record(component, "perf", "00", 2, entries)
    judgement = judge(record, pin=pinned)
    assert "no comparison" in why_no_claim(judgement, pinned, today, pins, record)
    against.record(component, slowed, found, pins)
    assert why_no_claim(judgement, pinned, today, pins, record) == ""
    against.record(component, slowed, found[:1], pins)
    assert "lacks memory" in why_no_claim(judgement, pinned, today, pins, record)
    slow = noise.Verdict(noise.FAIL, noise.Interval(0.03, 0.04, 0.05, 40), 1, True)
    against.record(component, slowed, [found[0], ("memory", slow)], pins)
    assert "against the pinned code: FAIL" in why_no_claim(judgement, pinned, today, pins, record)


def test_trees_that_cannot_be_compared(slowed: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such state of the code"):
        against.tree_of(str(tmp_path))
    assert against.tree_of(str(slowed)) == slowed
    sizes = slowed / "alpha" / "gates" / "perf.py"
    text = sizes.read_text()
    sizes.write_text(text.replace('"cache": (60_000,', '"cache": (30_000,'))
    try:
        with pytest.raises(InputError, match="other calls under one name"):
            list(against.compare("gelu.f32.cpu", slowed))
    finally:
        sizes.write_text(text)
    with pytest.raises(ServedError, match="no such component"):
        list(against.compare("nothing.f32.cpu", slowed))


def test_throttled_pairs_go_and_too_many_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Side:
        def __init__(self, slow: float) -> None:
            self.slow, self.rng = slow, np.random.default_rng(2)

        def ask(self, do: str, **more: object) -> object:
            if do == "block":
                return [100.0, 1980.0, 0x40 if self.rng.random() < self.slow else 0]
            return "types" if do == "bind" else 6

    pairs = against.Pairs((Side(0.1), Side(0.1)), "x", "y", "00" * 16)  # type: ignore[arg-type]
    logs = pairs.draw(80)
    assert 4 <= pairs.discarded <= 30 and len(logs) == 80 - pairs.discarded
    with pytest.raises(Exception, match="throttled"):
        against.Pairs((Side(0.7), Side(0.0)), "x", "y", "00" * 16).draw(40)  # type: ignore[arg-type]


# -- the command ---------------------------------------------------------------------------------------------------------------


def test_what_starts_a_peer_may_print(tmp_path: Path) -> None:
    """A script in the place of a Python says something of its own first: the peer is not there, and that is a line."""
    stub = tmp_path / "python"
    stub.write_text(f"#!/bin/sh\necho activated\nexec {sys.executable} \"$@\"\n")
    stub.chmod(0o755)
    with Peer(str(stub), "cpu", 1) as peer:
        assert peer.served is None and "gave no answer to 'open': something else on its output" in peer.why
    with Team("PyTorch", [[str(stub), "-c", "input()"]] * 2, [dict(os.environ)] * 2, foreign=True) as team:
        with pytest.raises(ServedError, match="something else on its output"):
            team.ask("memory")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calm(monkeypatch)
    out = tmp_path / "b.json"
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    stub.chmod(0o755)
    assert main(["bench", "silu.f32.cpu", "--peers", "--peer-python", str(stub), "--rounds", "5", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "not installed in" in shown and "of the ceiling" in shown
    body = json.loads(out.read_text())
    assert {k["case"] for k in body["kernels"]} == {"cache", "memory"} and "not installed" in body["peer"]
    (peer,) = [r for r in body["kernels"][0]["rows"] if r["name"] == "torch"]
    assert peer["ns"] is None and "not installed" in peer["why"]
    for arguments, code, word in (
        (["bench", "nothing"], 2, "no such kernel"),
        (["bench", "step"], 2, "run file"),
        (["bench", "silu.f32.cpu", "run.toml"], 2, "for `alpha bench step`"),
        (["bench", "silu.f32.cpu", "--rounds", "0"], 2, "too small"),
        (["bench", "silu.f32.cpu", "--case", "no*"], 2, "no call of that name"),
        (["bench", "fuse.pass"], 2, "only kernels"),
        (["bench", "silu.f32.cpu", "--against", str(tmp_path)], 2, "no such state"),
        (["bench", "silu.f32.cpu", "--json", str(tmp_path / "no" / "b.json")], 2, "no folder"),
        (["bench", "silu.f32.cpu", "--json", str(tmp_path)], 2, "is a folder"),
        (["bench", "step", str(tmp_path / "none.toml")], 2, "none.toml"),
    ):
        assert main(arguments) == code and word in capsys.readouterr().err, arguments


def test_a_machine_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "why_not_here", lambda c: "needs sm_90a: none here" if c.backend == "cuda" else "")
    for arguments in (["bench", "rmsnorm*.sm90"], ["bench", "step", str(ROOT / "configs" / "gpt2-124m.toml")]):
        assert main(arguments) == 3
        assert "NOT_RUN" in capsys.readouterr().err


def test_no_library_of_a_peer_is_loaded_here() -> None:
    code = ("import sys; from alpha.cli import main; main(['bench', 'silu.f32.cpu', '--peers', '--rounds', '1', '--case', 'cache']); "
            "from alpha.train import forbidden; forbidden.check('at the end'); sys.exit(9)")
    assert warm.run(["-c", code], cwd=ROOT).returncode == 9


@pytest.mark.h100
def test_bench_on_the_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ours, ceiling and peers on one GPU: a norm, a product and attention; a peer that is not installed is said."""
    for what, case in (("rmsnorm.bf16.sm90", "model-0"), ("matmul.bf16.sm90", "forward-gpt"), ("attention.bf16.sm90", "gpt")):
        out = tmp_path / f"{what}.json"
        assert main(["bench", what, "--peers", "--rounds", "9", "--case", case, "--json", str(out)]) == 0
        for k in json.loads(out.read_text())["kernels"]:
            rows = {r["name"]: r for r in k["rows"]}
            assert 0 < rows["ours"]["share"] <= 1
            assert all(r["why"] or r["ratio"][1] > 0 for r in rows.values())
