"""`alpha bench floor`: what a step's classes and ceilings imply, on figures that are made up and on an emulated GPU."""

from __future__ import annotations

import io
import math
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emulated_gpu import emulated
from made_bench import MadeClocks, gpu_of_small_calls, made, tiny
from rich.console import Console

from alpha import config
from alpha.bench import command, docs, floor, record
from alpha.bench.floor import ATTENTION, MEMORY, PRODUCT, Hot, Meter, Result, Row
from alpha.cli import main
from alpha.errors import CorruptError
from alpha.resources import ROOT
from alpha.train.assemble import program_for, threads_for
from alpha.train.catalogue import catalogue

pytestmark = pytest.mark.usefixtures("warm_peers")


def patient(clocks: MadeClocks) -> type[Meter]:
    """Meters of a made counter, by its own time. A block ends once it was seen to move twice: those of tests are so short that the thread
    which looks may not have begun."""

    class Patient(Meter):
        def __init__(self, joules: Callable[[], float]) -> None:
            super().__init__(joules, lambda: clocks.seconds)

        def __exit__(self, *error: Any) -> None:
            seen(lambda: len(self.moves) >= 2)
            super().__exit__(*error)

    return Patient


def seen(holds: Callable[[], bool]) -> None:
    """Waits until another thread sees to it that something holds; AssertionError after a minute."""
    late = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < late, "nobody looked at the counter for a minute"
        time.sleep(1e-4)


@pytest.fixture
def gpu() -> Iterator[pytest.MonkeyPatch]:
    with gpu_of_small_calls() as patch:
        clocks = MadeClocks()
        patch.setattr(floor, "Meter", patient(clocks))
        patch.setattr(floor.Clocks, "open", staticmethod(lambda index=0: clocks))
        for name, value in (("SECONDS", 0.02), ("WARM", 0.002), ("BLOCK_SECONDS", 0.02), ("WARM_SECONDS", 0.1), ("BLOCKS", 2)):
            patch.setattr(floor, name, value)
        yield patch


def result(**more: Any) -> Result:
    """A step of 10 ms at 700 W: a product, attention and a norm of two calls each, and what is too small."""
    rows = [Row("matmul", "a", PRODUCT, 2, 4 * 10**12, 10**9, 6e6, Hot(3e6, 700.0, 1400.0, 9),
                {"quick": Hot(2.5e6, 600.0, 1400.0, 9), "frugal": Hot(2.8e6, 500.0, 1200.0, 9)}),
            Row("attention", "b", ATTENTION, 2, 10**12, 10**8, 3e6, Hot(1e6, 600.0, 1600.0, 9)),
            Row("rmsnorm", "c", MEMORY, 2, 10**6, 10**9, 8e5, Hot(4e5, 500.0, 1980.0, 9)),
            Row("scale", "d", MEMORY, 1, 10, 10, 1e5)]
    made_up = Result("t", "4 x 32 tokens", "NVIDIA made", "cuda_sm90_made", "PyTorch made",
                     [[1.1e7, 650.0, 1400.0, 60.0], [1e7, 700.0, 1410.0, 60.0], [9e6, 750.0, 1420.0, 61.0]], rows,
                     Hot(1e-6, 700.0, 1300.0, 9), Hot(3e-4, 600.0, 1900.0, 9))
    return floor.figures(replace(made_up, **more))


def test_floors_are_sums_of_the_best() -> None:
    """By hand: times of the fastest and joules of the most frugal, which need not be the same kernel."""
    found = result()
    assert (found.step_ns, found.watts) == (1e7, 700.0)
    assert found.known is not None and found.bare is not None
    assert found.known.ns == pytest.approx(2 * 2.5e6 + 2e6 + 3e5 + 1e5)  # the peer's product, our attention, a copy, as it is
    assert found.known.joules == pytest.approx(2 * 2.8e-3 * 500 + 2e-3 * 600 + 3e-4 * 600 + 1e-4 * 700)
    assert found.bare.ns == pytest.approx(4e6 + 1e6 + 3e5 + 1e5)
    assert found.bare.joules == pytest.approx(5e-3 * 700 + 3e-4 * 600 + 1e-4 * 700)
    assert found.known.least_ns == pytest.approx(found.known.joules / 700 * 1e9) and found.known.least_ns < found.known.ns
    frugal = result(product=Hot(1e-6, 900.0, 1300.0, 9))
    assert frugal.bare is not None and frugal.bare.least_ns == frugal.bare.ns < frugal.bare.joules / 700 * 1e9


def test_what_was_not_counted_has_no_floor() -> None:
    """Watts that nobody saw move are no zero: the floor is unknown too."""
    found = result(rows=[replace(result().rows[0], ours=Hot(3e6, math.nan, 1400.0, 9))])
    assert found.known is not None and math.isnan(found.known.joules) and math.isnan(found.known.least_ns)
    assert not floor.measured(found) and floor.measured(result())


def test_losses_come_in_the_order_of_their_joules() -> None:
    found = floor.losses(result())
    assert [row.op for row, _, _ in found] == ["matmul", "rmsnorm", "attention"]
    assert [ns for _, ns, _ in found] == pytest.approx([1e6, 5e5, 0.0]) and found[0][2] == pytest.approx(4.2 - 2.8)


@pytest.mark.parametrize("every", (1, 7))
def test_the_meter_is_the_slope_between_moves(every: int) -> None:
    """Of a counter that moves at times of its own, at each `every`-th look: what lies before the first and behind the last move does not
    count."""
    looks = 0

    def joules() -> float:
        nonlocal looks
        looks += 1
        return 0.5 * (looks // every * every)

    with Meter(joules, lambda: 1e-3 * looks) as meter:
        seen(lambda: looks >= 5 * every + 2)
    assert len(meter.moves) >= 4 and meter.watts == pytest.approx(500, rel=1e-9)
    start = time.perf_counter()
    with Meter(joules) as timed:
        seen(lambda: len(timed.moves) >= 3)
    times = [start, *(at for at, _ in timed.moves), time.perf_counter()]
    assert times == sorted(times) and timed.watts > 0
    with Meter(lambda: 1.0) as still:
        time.sleep(0.01)
    assert math.isnan(still.watts)


@pytest.mark.parametrize("still", range(floor.TRIES + 1))
def test_a_block_is_run_again_until_the_counter_was_seen_to_move_twice(still: int) -> None:
    """The counter stands still in so many blocks. Where it does in all, the watts are unknown, and no number stands for them."""
    looks = blocks = 0

    def joules() -> float:
        nonlocal looks
        looks += 1
        return float(looks) if blocks > still else 0.0

    def block() -> int:
        nonlocal blocks
        blocks += 1
        until = looks + 6
        seen(lambda: looks >= until)
        return blocks

    found, watts = floor.metered(block, joules)
    assert found == blocks == min(still + 1, floor.TRIES)
    assert math.isnan(watts) if still == floor.TRIES else watts > 0


def test_a_call_is_timed_over_all_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a made time, and again where the counter of joules was hardly seen to move: twice then."""
    now, clocks, asked = 0.0, MadeClocks(), list[int]()
    few = iter((0, 1))

    class Seldom(patient(clocks)):  # type: ignore[misc]
        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            self.moves = self.moves[: next(few, None)]

    monkeypatch.setattr(floor, "SECONDS", 0.05)
    monkeypatch.setattr(floor, "Meter", Seldom)
    monkeypatch.setattr(floor, "time", types.SimpleNamespace(perf_counter=lambda: now))

    def run(n: int) -> None:
        nonlocal now
        asked.append(n)
        now += 1e-3 * n

    found = floor.hot(run, clocks)  # type: ignore[arg-type]
    assert asked == [2, 3, 600, 50, 50, 50] and found.calls == 50 and found.mhz == 1980
    assert found.ns == pytest.approx(1e6) and found.watts == pytest.approx(690)
    assert found.joules == pytest.approx(found.ns * 1e-9 * found.watts)


@pytest.mark.parametrize("name", ("gpt2-124m", "llama-8b-shapes"))
def test_counterparts_do_the_same_work(name: str) -> None:
    """The products that a peer is asked for have the FLOPs of the launch, and nothing that computes much counts as a copy."""
    cfg = config.load(ROOT / "configs" / f"{name}.toml")
    program = program_for(cfg, cfg.data.vocab, catalogue(), threads_for(cfg))
    seen = set[str]()
    for plan in program.plans.values():
        for launch in plan.launches:
            kind, calls = floor.kind_of(launch.op), floor.counterparts(launch)
            seen.add(kind)
            if kind == MEMORY:
                assert not calls and launch.flops < 16 * launch.nbytes, launch.op
            elif kind == PRODUCT:
                assert sum(map(_flops, calls)) == pytest.approx(launch.flops, rel=0.02), launch.text()
            else:
                assert [op for op, _, _ in calls] == [launch.op]
    assert seen == {PRODUCT, ATTENTION, MEMORY}


def _flops(call: floor.Call) -> float:
    op, attrs, ((a, _), (b, _)) = call
    rows, inner = math.prod(a[:-1]), a[-1]
    if attrs.get("trans_a"):
        rows, inner = inner, rows
    n, k = b if attrs.get("trans_b") else b[::-1]
    assert op == "matmul" and k == inner
    return 2.0 * rows * n * k


def test_a_step_on_an_emulated_gpu(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    told = list[str]()
    cfg, cat = tiny(tmp_path, "cuda", more="kv_heads = 1", family="llama"), emulated(catalogue())
    gpu.setattr(floor, "LEAST_SHARE", 0.02)
    found = floor.bench(cfg, cat, "made", command=made(refused="attention_packed_bwd"), report=told.append)
    program = program_for(cfg, 264, cat, 1)
    launches = [launch for call in program.schedule for launch in program.plans[call.plan].launches]
    assert sum(row.calls for row in found.rows) == len(launches) and sum(row.flops for row in found.rows) == sum(x.flops for x in launches)
    assert sum(row.nbytes for row in found.rows) == sum(x.nbytes for x in launches)
    total = sum(row.ns for row in found.rows)
    for row in found.rows:
        assert (row.ours is not None) == (row.ns >= 0.02 * total), row
        assert row.ours is None or (row.ours.ns > 0 and row.ours.watts == pytest.approx(690) and row.ours.calls >= 3)
        asked = row.ours is not None and row.kind != MEMORY and row.op != "attention_packed_bwd"
        assert bool(row.peers) == asked and bool(row.why) == (row.op == "attention_packed_bwd" and row.ours is not None), row
    assert any(row.peers for row in found.rows) and len(found.blocks) == 2 and found.known is not None and found.bare is not None
    assert 0 < found.known.least_ns <= found.known.ns and found.product.ns > 0 and found.copy.ns > 0
    head = next(row for row in found.rows if row.op == "linear_cross_entropy_grad")
    assert head.ours is None or head.peers["the best of each product"].ns == pytest.approx(3e4, rel=0.5)
    assert told[:3] == ["ours: opening", "ours: whole steps", "ours: launch by launch"] and any("PyTorch: matmul" in x for x in told)
    shown = io.StringIO()
    floor.show(found, Console(file=shown, width=200))
    assert "floor of best known kernels" in shown.getvalue() and "floor of bare hardware" in shown.getvalue()
    dying = floor.bench(cfg, cat, "made", command=made(dying=True))
    assert all(row.why and not row.peers for row in dying.rows if row.ours is not None and row.kind != MEMORY)


def test_a_record_holds_what_its_blocks_give(tmp_path: Path) -> None:
    body = {"commit": "0" * 40, "taken": "2026-11-28", "environment": {}, "hardware": "NVIDIA made", "kernel_hashes": {},
            "flops": {"version": "v1", "convention": "c"}, "floor": command._plain(result())}
    path = record.write("cuda_sm90_made", "floor-t", body, tmp_path)
    held = record.load(path)
    for edit in (lambda x: x.update(step_ns=9.9e6), lambda x: x["known"].update(least_ns=8e6), lambda x: x["bare"].update(joules=3.0),
                 lambda x: x["rows"][1].update(calls=1), lambda x: x["rows"][0].update(peers={})):
        other = record.load(path)
        edit(other["floor"])
        with pytest.raises(CorruptError, match="not what its raw blocks give"):
            record.verify(other, "edited")
    step = {"machine": "cuda_sm90_made", "subject": "step-t", "step": {"run": "t", "quoted": "theirs", "rows": [
        {"name": "theirs", "ns": 1.2e7, "ratio": [None, 1.2, None]}]}}
    text = docs.floors([held, step])
    assert held["floor"]["known"] is not None and "| t |" in text
    assert f"{1.2e7 / held['floor']['known']['least_ns']:.3f}" in text and f"{1.2e7 / held['floor']['bare']['least_ns']:.3f}" in text
    step["step"]["rows"][0]["ns"] = 2.4e7  # another run, at another clock: its ratio is what counts
    assert docs.floors([held, step]) == text
    assert "Not recorded" in docs.floors([step]) and "-" in docs.floors([held])


def test_a_cpu_counts_no_joules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path)
    assert main(["bench", "floor", str(tmp_path / "gpt.toml")]) == 2 and "joules" in capsys.readouterr().err
    assert main(["bench", "floor"]) == 2


def test_a_floor_that_is_unknown_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """Joules that nobody counted: the table says so, the exit code too, and no record is written."""
    tiny(tmp_path, "cuda")
    kept = list[str]()
    monkeypatch.setattr(command, "_runs_here", lambda cfg: None)
    monkeypatch.setattr(command, "_recorded", lambda args: "0" * 40)
    monkeypatch.setattr(command, "_keep", lambda machine, subject, *more: kept.append(subject))
    for watts, code, records in ((math.nan, 1, []), (700.0, 0, ["floor-t"])):
        found = result(rows=[replace(result().rows[0], ours=Hot(3e6, watts, 1400.0, 9))])
        monkeypatch.setattr(floor, "bench", lambda *args, found=found, **more: found)
        assert main(["bench", "floor", str(tmp_path / "gpt.toml"), "--record"]) == code and kept == records
        assert ("NOT MEASURED" in capsys.readouterr().out) == bool(code)
