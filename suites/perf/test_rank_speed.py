"""The perf gate of collectives: what it measures, what it refuses, and ways in which a collective could fool it."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drawn_faults
import numpy as np
import pytest
from rich.console import Console

from alpha.bench import command
from alpha.comm import catalogue as binders
from alpha.comm import collectives
from alpha.comm.world import World
from alpha.errors import InputError
from alpha.gates import expected, run
from alpha.gates.adversarial import catches
from alpha.gates.contracts.ranks import perf
from alpha.gates.contracts.ranks.members import in_threads
from alpha.gates.timing import pin
from alpha.registry import distance, policy
from alpha.registry.cases import Share
from alpha.registry.consistency import wrong_in
from alpha.registry.faults import load_faults
from alpha.registry.gates import cases_of, engine_of
from alpha.registry.judge import BASELINE, FAIL, NOT_RUN, PASS, judge
from alpha.registry.pins import Pin, Pins
from alpha.train.catalogue import catalogue

OF_RANKS = sorted(c.id for c in catalogue() if c.profile == "collective")
NONCE = "0123456789abcdef" * 2
two_cores = pytest.mark.skipif(len(perf.cores()) < perf.RANKS, reason="NOT_RUN: two ranks need a core each")


@two_cores
@pytest.mark.parametrize("name", ["all_gather.cpu", "barrier.cpu"])
def test_a_record_holds_the_cases_that_its_nonce_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf, "at_speed", left_alone)
    component = catalogue()[name]
    record = perf.measure(component, NONCE)
    found = [c for c in cases_of(record) if isinstance(c, Share)]
    assert all(0 < c.share <= 1 and min(c.times_ns) > 0 and not c.note for c in found), found
    assert expected.differences(component, record) == []
    timed = replace(record, environment={**record.environment, "seconds": "1.0"})
    assert wrong_in(timed, catalogue()) == []
    assert judge(record).verdict == BASELINE, "nothing that a record says of itself is a pin"
    assert pin.one(component).keys() == {c.name for c in found}
    left_out = replace(record, cases=record.cases[:-1], declared=len(record.cases) - 1)
    assert expected.differences(component, left_out), "a case that is left out is not seen"


def test_all_five_gates_are_owed() -> None:
    assert len(OF_RANKS) == 9
    for name in OF_RANKS:
        component = catalogue()[name]
        assert "perf" in policy.owed(component) and len(policy.owed(component)) == 5 - (component.op == "barrier")
        assert engine_of("perf", component) == "alpha.gates.contracts.ranks.perf:measure"


def test_without_a_core_for_each_rank_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    record = perf.measure(catalogue()["send.cpu"], NONCE)
    judgement = judge(record)
    assert judgement.verdict == NOT_RUN and not judgement.satisfied
    assert record.declared == 2 and "may use 1" in record.environment["not_measured"]


@two_cores
def test_a_case_of_which_no_block_was_left_alone_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is, and the record says what is missing and why: NOT_RUN, never FAIL."""
    monkeypatch.setattr(perf, "JOBS", 2)
    monkeypatch.setattr(perf, "at_speed", loses_its_core)
    record = perf.measure(catalogue()["send.cpu"], NONCE)
    judgement = judge(record)
    assert judgement.verdict == NOT_RUN and not judgement.satisfied
    assert [c["name"] for c in record.cases] == ["short"] and record.declared == 2
    assert record.environment["not_measured"]== "long: other work took a core in all but 4 of 80 blocks"


def test_blocks_in_which_a_rank_lost_its_core_do_not_count() -> None:
    """The others last from the first start to the last end, whichever rank that is."""
    one = [perf.Block(0, 40, 4, 0), perf.Block(0, 8, 4, 1), perf.Block(3, 20, 2, 0)]
    other = [perf.Block(2, 44, 4, 0), perf.Block(0, 8, 4, 0), perf.Block(1, 19, 2, 0)]
    assert list(perf._undisturbed([one, other])) == [44 / 4, 19 / 2]


# -- how far apart the cores stand ---------------------------------------------------------------------------------------------------


def _standing(*hops: float, share: float = 0.5) -> Any:
    """`at_speed` of cores that stand so far apart in turns, of calls that reach about this share, without running any."""
    def found(world: World, op: str, name: str, *arguments: Any) -> Any:
        hop = [perf.Block(0, round(400 * h), 400, lost) for h in hops for lost in (0, 0, 0, 1)] + [perf.Block(0, 4, 400, 1)]
        copy = {"copy": [perf.Block(0, 8000, 8, 0)] * 9} if name == "long" else {}
        ceiling = 2000 if copy else min(hops)  # 1 MiB crosses, the probe copies half of that
        return {"blocks": {"calls": [perf.Block(0, round(2 * ceiling / share), 2, 0)] * 9, "hop": hop, **copy}, "wrong": ""}

    return found


def _measured(monkeypatch: pytest.MonkeyPatch, at_speed: Any, *, tries: int | None = None) -> Any:
    """A record of made blocks; both ranks saw the same."""
    ran = SimpleNamespace(run=lambda function, size, *asked: [
        SimpleNamespace(rank=None, error="", result=at_speed(None, *asked), status=0) for _ in range(size)])
    monkeypatch.setattr(perf, "members", lambda: ran)
    monkeypatch.setattr(perf, "cores", lambda: [0, 1])
    return perf.measure(catalogue()["send.cpu"], NONCE, tries=tries)


def test_a_record_holds_the_fastest_undisturbed_hop_of_all_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every job of every case; of blocks in which a rank lost its core none counts."""
    record = _measured(monkeypatch, _standing(300, 131, 310))
    assert record.environment[distance.HOP] == "131" and len(record.cases) == 2
    near, far = _standing(130), _standing(300)
    for case in ("short", "long", ""):
        record = _measured(monkeypatch, lambda world, op, name, *more, case=case: (near if name == case else far)(world, op, name, *more))
        assert record.environment[distance.HOP] == ("130" if case else "300")
    lost = {arm: [b._replace(lost=1) for b in blocks] for arm, blocks in near(None, "send", "short")["blocks"].items()}
    record = _measured(monkeypatch, lambda *asked: {"blocks": lost, "wrong": ""})
    assert distance.HOP not in record.environment and record.environment["not_measured"]


@pytest.mark.parametrize(("hop", "pinned", "share", "verdict"), [
    (300, "130 131 129 130 138", 0.17, NOT_RUN), (130, "300 310 290 300 305", 0.17, NOT_RUN), (300, "130 131 129 130 138", 0.5, PASS),
    (130, "130 131 129 130 138", 0.17, FAIL), (300, "300 310 290 300 305", 0.17, FAIL), (300, "130 131 129 130 138", 0.1, FAIL),
    (300, "", 0.17, FAIL), (300, "130 131", 0.17, FAIL), (300, "130 131 300 300 131", 0.17, FAIL),
])
def test_slowness_counts_where_the_cores_stand_as_they_were_pinned(hop: float, pinned: str, share: float, verdict: str,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """From blocks to the verdict. Elsewhere it is measured again, for the cores may come back, and satisfies nobody."""
    said = {distance.HOPS: pinned} if pinned else {}
    made = Pin("send.cpu", "cpu", {}, {name: (0.5,) * 5 for name in perf.SIZES}, ("",) * 5, "", said)
    monkeypatch.setattr(run, "shipped_pins", lambda: SimpleNamespace(of=lambda record: made))
    monkeypatch.setattr(run, "PAUSE", 0.0)
    asked: list[Any] = []
    monkeypatch.setattr(run, "engine_for", lambda gate, component: lambda *given: (
        asked.append(given), _measured(monkeypatch, _standing(hop, share=share)))[1])
    record, judgement = run.measure(catalogue()["send.cpu"], "perf")
    assert judgement.verdict == verdict and judgement.satisfied == (verdict == PASS), judgement
    assert len(asked) == (1 if verdict == PASS else run.PERF_TRIES) and record.environment[distance.HOP] == str(hop)
    assert judgement.elsewhere == (verdict == NOT_RUN) == any(distance.ELSEWHERE in why for why in judgement.reasons)


def test_cores_that_come_back_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Pin("send.cpu", "cpu", {}, {name: (0.5,) * 5 for name in perf.SIZES}, ("",) * 5, "", {distance.HOPS: "130 131 129 130 138"})
    monkeypatch.setattr(run, "shipped_pins", lambda: SimpleNamespace(of=lambda record: made))
    monkeypatch.setattr(run, "PAUSE", 0.0)
    for then, verdict in ((0.5, PASS), (0.2, FAIL)):
        left = [_standing(300, share=0.2), *[_standing(130, share=then)] * 2]
        monkeypatch.setattr(run, "engine_for", lambda *of, left=left: lambda *given: _measured(monkeypatch, left.pop(0)))
        assert run.measure(catalogue()["send.cpu"], "perf")[1].verdict == verdict


def test_a_pin_takes_the_hop_as_the_record_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    record = _measured(monkeypatch, _standing(300), tries=2)
    monkeypatch.setattr(pin, "engine_for", lambda gate, component: lambda *given, **more: record)
    found = pin.one(catalogue()["send.cpu"])
    assert found.keys() == perf.SIZES.keys() and found.hop_ns == "300"


def test_a_hop_calls_nothing_of_a_collective() -> None:
    """What is under test cannot move it: between two ranks that both come, each runs the probe's own lines alone, and `World.advance`,
    which sees that the other one failed."""
    def member(world: World) -> set[tuple[str, str]]:
        counters, called = perf.Counters(world), set[tuple[str, str]]()

        def seen(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                called.add((Path(frame.f_code.co_filename).name, frame.f_code.co_name))

        counters._world = SimpleNamespace(rank=world.rank, advance=lambda: None)  # type: ignore[assignment]
        sys.setprofile(seen)
        counters.hop(perf.HOPS)
        sys.setprofile(None)
        return called

    for called in in_threads(perf.RANKS, member):
        assert isinstance(called, set), called
        assert {file for file, _ in called} <= {"perf.py", Path(__file__).name} and ("perf.py", "hop") in called, called


def test_what_other_distances_hide_is_told_and_nothing_else(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted faults that this machine cannot judge now are NOT_RUN; one case that was judged, or not measured, makes a survivor."""
    fault = next(f for f in load_faults(catalogue=catalogue()) if f.gate == "perf" and f.component == "send.cpu")
    away = f"long: {distance.ELSEWHERE} (a hop takes 300 ns, pinned at 130 ns): 0.07 of the ceiling, pinned 0.21"
    noisy = "short: too noisy to judge: pinned shares spread by 8.3%, which asks for a line 27% below"
    gone = "pinned, but not measured: short"
    sort = drawn_faults.Sort("made", timed=True, drawn=1)
    monkeypatch.setattr(drawn_faults.Sort, "faults", lambda self: [fault])
    pin = SimpleNamespace(environment={distance.HOPS: "125 130"}, times=["", ""])
    monkeypatch.setattr(drawn_faults, "shipped_pins", lambda: SimpleNamespace(of=lambda record: pin))
    for why, hop, told in ((f"NOT_RUN: {away}", 0, True), (f"NOT_RUN: {noisy}; {away}", 0, True), (f"NOT_RUN: {away}; {gone}", 0, False),
                           (f"FAIL: {away}", 0, False), ("PASS", 0, False), (f"BASELINE: {away}", 0, False),
                           ("PASS", 300, True), ("PASS", 140, False), (f"NOT_RUN: {away}; {gone}", 300, False), ("BASELINE", 300, False)):
        catch = SimpleNamespace(record=SimpleNamespace(environment={distance.HOP: str(hop)}) if hop else None)
        monkeypatch.setattr(catches, "run", lambda *a, why=why, catch=catch, **k: [
            catches.Result(fault, catch, False, why, True)])  # type: ignore[arg-type]
        if told:
            drawn_faults.reject(sort, 1)
            assert f"NOT_RUN: ['{fault.id}']" in capsys.readouterr().out
        else:
            with pytest.raises(AssertionError, match="survived"):
                drawn_faults.reject(sort, 1)


def test_threads_of_one_core_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: "0-1" if self.parts[-3] in ("cpu0", "cpu1") else "2-3")
    assert perf.cores() == [0, 2, 1, 3]


# -- what is held against the row ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [2, 3, 5])
@pytest.mark.parametrize("name", OF_RANKS)
def test_results_of_timed_calls_are_those_of_the_row(name: str, times: int) -> None:
    """On every member, whoever was root or sender last. One flipped bit, and a result that was kept, are wrong."""
    op = name.removesuffix(".cpu")

    def member(world: World) -> list[str]:
        rng = np.random.default_rng(times)
        calls = perf.Calls(world, op, 0 if op == "barrier" else 4096, perf.Counters(world), rng)
        found = []
        for _ in range(2):
            calls.renew(rng)
            calls(times)
            found.append(calls.wrong(times))
        if op != "barrier":
            calls._out.view(np.uint8)[-1] ^= 1
            found.append(calls.wrong(times))
            kept = calls._out.copy()
            calls.renew(rng)
            calls._out[...] = kept
            found.append(calls.wrong(times))
        return found

    for found in in_threads(perf.RANKS, member):
        assert isinstance(found, list), found
        assert found[:2] == ["", ""] and all(found[2:]), f"{op} after {times} calls: {found}"
        assert len(found) == (2 if op == "barrier" else 4)


def test_roots_and_senders_take_turns() -> None:
    """Else calls would overlap, and a call's share would be of less than a call."""
    assert [perf.attributes("broadcast", turn, 0)["root"] for turn in range(3)] == [0, 1, 0]
    for turn in range(3):
        sides = [set(perf.attributes("send", turn, me)) & {"to", "source"} for me in range(2)]
        assert sorted(map(sorted, sides)) == [["source"], ["to"]]


def serves_a_result_twice(world: World, *arguments: Any) -> Any:
    sound, kept = collectives.all_reduce, list[np.ndarray]()

    def cheat(group: Any, x: np.ndarray, out: np.ndarray, **given: Any) -> None:
        if not kept:
            sound(group, x, out, **given)
            kept.append(out.copy())
        out[...] = kept[0]

    collectives.all_reduce = cheat
    return AT_SPEED(world, *arguments)


def never_meets(world: World, *arguments: Any) -> Any:
    collectives.barrier = lambda group: None
    return AT_SPEED(world, *arguments)


def patches_the_clock(world: World, *arguments: Any) -> Any:
    time.perf_counter_ns = lambda: 0
    return AT_SPEED(world, *arguments)


def loses_its_core(world: World, *arguments: Any) -> Any:
    """In all blocks of long calls but the first two of each job, and in no other."""
    found = left_alone(world, *arguments)
    if arguments[1] == "long":
        found["blocks"]["calls"] = [b._replace(lost=int(i >= 2)) for i, b in enumerate(found["blocks"]["calls"])]
    return found


def left_alone(world: World, *arguments: Any) -> Any:
    """Every block counts, however busy the machine is."""
    found = AT_SPEED(world, *arguments)
    return {**found, "blocks": {arm: [b._replace(lost=0) for b in blocks] for arm, blocks in found["blocks"].items()}}


def dies(world: World, *arguments: Any) -> Any:
    raise MemoryError("planted")


AT_SPEED = perf.at_speed


@two_cores
@pytest.mark.parametrize(("cheat", "op", "said"), [
    (serves_a_result_twice, "all_reduce", "wrong results"), (never_meets, "barrier", "barriers before the other one came"),
    (patches_the_clock, "barrier", "the clock was patched"), (dies, "barrier", "MemoryError: planted"),
])
def test_cheats_fail(cheat: Any, op: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    component = catalogue()[f"{op}.cpu"]
    monkeypatch.setattr(perf, "SIZES", {"short": 1 << 10})
    monkeypatch.setattr(perf, "at_speed", cheat)
    record = perf.measure(component, NONCE)
    judgement = judge(record)
    assert judgement.verdict == FAIL and said in judgement.reasons[0], judgement
    assert not run._may_be_chance(record), "what gave wrong outputs is not measured again"


# -- around it -----------------------------------------------------------------------------------------------------------------------


def test_faults_of_speed_are_left_to_machines_with_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a slow collective is BASELINE, and a fault that nothing could reject would pass for one that survived."""
    faults = [f for f in load_faults(catalogue=catalogue()) if f.gate == "perf" and f.component in OF_RANKS]
    assert {f.component for f in faults} == set(OF_RANKS)
    shipped = Pins(tmp_path)
    monkeypatch.setattr(catches, "shipped_pins", lambda: shipped)
    assert all("no pinned share" in catches.why_not(f, catalogue()[f.component]) for f in faults)
    assert catches.run(catalogue(), faults, stale=False, root=tmp_path) == []
    monkeypatch.setattr(shipped, "load", lambda key: dict.fromkeys(OF_RANKS))
    assert not any(catches.why_not(f, catalogue()[f.component]) for f in faults)


def test_trees_are_compared_by_kernels_alone() -> None:
    given = SimpleNamespace(against="HEAD", record=False, json=None)
    with pytest.raises(InputError, match="compares kernels"):
        command._against(given, [catalogue()["send.cpu"]], Console())  # type: ignore[arg-type]


def test_a_binder_is_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The component, not the function that it calls."""
    asked: list[str] = []
    monkeypatch.setattr(binders, "reduce", lambda cpu, ins, outs, attrs: asked.append(str(attrs["root"])))
    perf.Calls(SimpleNamespace(rank=0), "reduce", 4096, None, np.random.default_rng(0))  # type: ignore[arg-type]
    assert asked == ["0", "1"]
