"""`alpha bench step --nproc N`: figures of many GPUs, from made ranks of ours and of a peer, and from PyTorch's ranks."""

from __future__ import annotations

import json
import math
import sys
import time
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_peers import shared_file
from made_bench import MadeClocks, calm, pytorch, tiny

from alpha import cli
from alpha.bench import command, docs, record, step, step_ranks
from alpha.bench.peer import ROOT
from alpha.bench.step_ranks import Result, Row, Session
from alpha.bench.team import Team
from alpha.bench.variants import AUTOCAST, DDP, FSDP2, MASTER, Ranked, Variant, ranked
from alpha.errors import AlphaError, CorruptError
from alpha.profile.served import PATIENCE, ServedError
from alpha.train.catalogue import catalogue

pytestmark = pytest.mark.usefixtures("warm_peers")

OURS_1, OURS_2, EACH = "ours, 1 GPU", "ours, 2 GPUs", "ours, 1 GPU on each"
NAMES = [w.name for w in ranked(False, "f32")]
NS = {"1": 100e6, "N": 102e6, "": 110e6, DDP: 120e6}


def commands(defect: str = "", who: str = "ours", **more: Any) -> dict[str, list[str]]:
    """What is started for ranks, of which `who` has a defect."""
    def of(name: str) -> list[str]:
        told = {"batch": 4, "sequence": 32, "ns": NS, **more, **({"defect": defect} if name == who else {})}
        return [sys.executable, str(ROOT / "suites" / "support" / "made_ranks.py"), str(ROOT), name, json.dumps(told)]
    return {"members": of("ours"), "command": of("theirs")}


def measured(tmp_path: Path, patch: pytest.MonkeyPatch, defect: str = "", who: str = "ours", *, rounds: int = 3,
             budget: float | None = None, python: str | None = "made", **more: Any) -> Result:
    calm(patch)
    return step_ranks.bench(tiny(tmp_path), 2, catalogue(), python, rounds=rounds, steps=4, budget=budget, **commands(defect, who, **more))


def by_name(result: Result) -> dict[str, Row]:
    return {r.name: r for r in result.rows}


def test_figures_of_two_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(tmp_path, monkeypatch)
    rows = by_name(result)
    assert [r.name for r in result.rows] == [OURS_1, OURS_2, EACH, NAMES[1], NAMES[0]] and not result.why and result.quoted == NAMES[1]
    assert result.tokens == 4 * 32 and [r.tokens for r in result.rows] == [128, 256, 256, 256, 128]
    assert result.loaded == {"a source": "abc"}
    each = rows[EACH]
    assert each.efficiency[1] == pytest.approx(1) and each.against == OURS_1 and each.ratio[1] == pytest.approx(100 / 102)
    assert each.tokens_per_second == pytest.approx(2 * 128 / 0.1) and math.isnan(each.exposed) and not each.unknown
    one, two = rows[OURS_1], rows[OURS_2]
    assert one.tokens_per_second == pytest.approx(128 / 0.1) and two.tokens_per_second == pytest.approx(256 / 0.102)
    assert two.efficiency[1] == pytest.approx(100 / 102) and two.against == OURS_1 and math.isnan(one.efficiency[1])
    assert two.mfu == pytest.approx(one.mfu * 100 / 102) and two.memory == 1 << 30
    assert two.exposed == pytest.approx(0.02, rel=1e-3) and two.phase == pytest.approx(0.05) and len(two.exposures) == 3
    assert two.least == pytest.approx(0.01, rel=1e-3) and len(two.leasts) == 3
    ddp = rows[NAMES[1]]
    assert ddp.efficiency[1] == pytest.approx(110 / 120) and ddp.against == NAMES[0] and ddp.ratio[1] == pytest.approx(120 / 102)
    assert ddp.difference == 0 and math.isnan(ddp.exposed) and rows[NAMES[0]].ratio[1] == pytest.approx(1.1)


def test_the_slowest_rank_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = by_name(measured(tmp_path, monkeypatch, "slow rank", python=None))
    assert rows[OURS_2].ns == 1.25 * NS["N"]


@pytest.mark.parametrize(("who", "defect", "name", "word"), [
    ("ours", "tokens of one", OURS_2, "counted 128 tokens, and the batch has 256"),
    ("theirs", "tokens of nobody", NAMES[1], "counted 128 tokens"),
    ("theirs", "counts late", NAMES[1], "counted 128 tokens"),
    ("theirs", "gradients of one", NAMES[1], "not ours"),
    ("theirs", "ddp never updates", NAMES[1], "parameters change otherwise than ours: size of embedding.token.weight off by 1,"),
    ("theirs", "no library", NAMES[1], "No module named 'torch'"),
])
def test_a_wrong_figure_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, defect: str, name: str, word: str) -> None:
    result = measured(tmp_path, monkeypatch, defect, who, rounds=1)
    row = by_name(result)[name]
    assert word in row.why and math.isnan(row.tokens_per_second) and math.isnan(row.efficiency[1])
    assert bool(result.why) == (who == "ours") and result.quoted != name


@pytest.mark.parametrize("defect", ["no stamps", "a stamp short"])
def test_exposure_is_of_stamps_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    two = by_name(measured(tmp_path, monkeypatch, defect, python=None, rounds=1))[OURS_2]
    assert math.isnan(two.exposed) and "of 5 collectives of a step" in two.unknown and two.ns > 0


def test_a_rank_that_dies_or_hangs_is_named_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    result = measured(tmp_path, monkeypatch, "dies", rounds=1, python=None)
    assert "rank 1 of ours on 2 ended" in result.why and time.monotonic() - began < 30
    monkeypatch.setattr(step_ranks, "START_S", 3.0)
    result = measured(tmp_path, monkeypatch, "ddp hangs", "theirs", rounds=1)
    row = by_name(result)[NAMES[1]]
    assert "rank 1 of PyTorch gave no answer to 'make_ranked' and was ended: silence for 3 s" in row.why
    assert by_name(result)[OURS_2].ns > 0 and result.quoted == ""


def test_what_does_not_fit_takes_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(tmp_path, monkeypatch, flag=str(tmp_path / "flag"))
    assert not result.why and [r.together for r in result.rows] == [False] * 5
    two = by_name(result)[OURS_2]
    assert two.efficiency[1] == pytest.approx(100 / 102) and math.isnan(two.efficiency[0]) and len(two.blocks) == step.APART
    none = by_name(measured(tmp_path, monkeypatch, "no room for ", "theirs"))
    assert none[NAMES[0]].why == "does not fit, even alone: MemoryError: torch.OutOfMemoryError: made up"
    assert not none[NAMES[1]].together and none[NAMES[1]].ns == NS[DDP] and none[OURS_2].ns > 0
    full = by_name(measured(tmp_path, monkeypatch, "no room for ddp", "theirs", rounds=1))
    assert "no room beside ours on as many" in full[NAMES[1]].why and full[OURS_2].ns > 0


def test_teams_in_turn_are_built_once_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours on one and a run on each GPU are one team. One that was there when another found no room serves the first turn."""
    built = list[str]()

    class Counted(Team):
        def __init__(self, name: str, *arguments: Any, **more: Any) -> None:
            built.append(name)
            super().__init__(name, *arguments, **more)

    monkeypatch.setattr(step_ranks, "Team", Counted)
    result = measured(tmp_path, monkeypatch, flag=str(tmp_path / "flag"))
    assert not result.why and [r.together for r in result.rows] == [False] * 5
    assert built[:2] == ["ours on 1", "ours on 2"], "the second found no room beside the first"
    assert Counter(built) == {"ours on 1": step.APART, "ours on 2": 1 + step.APART, "PyTorch": step.APART}


def test_a_peer_without_room_is_timed_without_ours_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(tmp_path, monkeypatch, "no room for ddp beside", "theirs", theirs_flag=str(tmp_path / "flag"))
    rows = by_name(result)
    ddp, two = rows[NAMES[1]], rows[OURS_2]
    assert not result.why and not ddp.why and ddp.together and ddp.alone == [] and len(ddp.blocks) == len(ddp.beside) == 3
    assert ddp.ratio[1] == pytest.approx(NS[DDP] / NS["N"]) and ddp.efficiency[1] == pytest.approx(NS[""] / NS[DDP])
    assert two.efficiency[1] == pytest.approx(100 / 102) and len(two.alone) == 3 and rows[OURS_1].ns == NS["1"]
    assert rows[NAMES[0]].ns == NS[""], "what has room is timed beside all of ours"


def test_a_budget_leaves_out_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(tmp_path, monkeypatch, budget=1e-9, rounds=1)
    assert {r.why for r in result.rows if r.library != "ours"} == {"not measured: the budget was spent"}
    assert by_name(result)[OURS_2].ns > 0


def test_a_budget_does_not_cut_short_how_ours_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model takes longer than an answer is waited for behind the budget, and without ours nothing has a figure."""
    ask, waited = Team.ask, dict[str, float]()

    def noted(self: Team, do: str, **arguments: Any) -> list[Any]:
        waited[do] = min(waited.get(do, math.inf), arguments.get("patience", PATIENCE))
        return ask(self, do, **arguments)

    monkeypatch.setattr(Team, "ask", noted)
    assert not measured(tmp_path, monkeypatch, budget=1e-9, rounds=1).why
    assert (waited["open"], waited["take"], waited["taken"]) == (step_ranks.START_S, PATIENCE, PATIENCE)


@pytest.mark.parametrize("left,before", [(5.0, ""), (0.0, "not measured: the budget was spent; ")])
def test_silence_behind_the_budget_is_no_fault_of_the_peer(tmp_path: Path, left: float, before: str) -> None:
    """For an answer is waited for 30 s there, and to build a large model takes longer."""
    session = Session(tiny(tmp_path), 2, catalogue(), None, 1, 4, None, lambda name: True, None, None, lambda text: None, tmp_path)
    session.left = lambda: left  # type: ignore[method-assign]
    assert session._told(ServedError("rank 1 of PyTorch", came="silence")) == f"{before}rank 1 of PyTorch: silence"


def recorded(tmp_path: Path, patch: pytest.MonkeyPatch) -> Path:
    clocks = MadeClocks()
    patch.setattr(step_ranks.Clocks, "open", staticmethod(lambda index=0: clocks))
    cfg = tiny(tmp_path, "cuda")
    result = step_ranks.bench(cfg, 2, catalogue(), None, rounds=3, steps=4, **commands())
    assert all(len(b) == 7 for r in result.rows for b in r.blocks), "of each GPU its clock, power and temperature"
    body = {"commit": "a" * 40, "taken": "2026-11-25", "environment": {"driver": "580"}, "kernel_hashes": {}, "hardware": "2 GPUs H100",
            "flops": {"version": "flops/v1", "convention": "c", **result.flops}, "ranks": command._plain(replace(result, loaded={}))}
    return record.write("cuda_sm90_H100x2-nvlink", "ranks-t", body, tmp_path)


def test_a_record_holds_what_its_blocks_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path, monkeypatch)
    record.load(path)
    shown = docs.ranks(record.records(tmp_path))
    assert "| ours, 2 GPUs | 2 | 102.00 ms |" in shown and "| 2.00 % (least 1.00 %) |" in shown and "0.980" in shown
    assert "| ours, 1 GPU on each | 2 | 100.00 ms |" in shown
    assert docs.ranks([]).startswith("Not recorded. `alpha bench step configs/gpt2-124m.toml --nproc 2")
    kept = path.read_text()

    def lie(change: Any, row: int = 1) -> None:
        body = json.loads(kept)
        change(body["ranks"]["rows"][row])
        body["hash"] = record.hash_of(body)
        path.write_text(json.dumps(body))
        with pytest.raises(CorruptError, match="not what its raw blocks give"):
            record.load(path)

    def of_one(row: dict[str, Any]) -> None:  # every figure follows from the tokens of one GPU
        row.update(tokens=row["tokens"] // 2, tokens_per_second=row["tokens_per_second"] / 2, mfu=row["mfu"] / 2)

    lie(of_one)
    lie(lambda row: row.update(mfu=2 * row["mfu"]))
    lie(lambda row: row.update(efficiency=[None, 0.999, None]))
    lie(lambda row: row.update(efficiency=[None, 0.97, None]), 2)
    lie(lambda row: row.update(exposed=0.001))
    lie(lambda row: row.update(exposures=[]))
    lie(lambda row: row.update(exposures=[-0.01, 0.02, 0.02]))
    lie(lambda row: row.update(least=0.001))
    lie(lambda row: row.update(leasts=[]))
    lie(lambda row: row.update(leasts=[0.01, 0.01, 0.03]))


FAULTS = {
    "tokens-of-one": ("Row(name, OURS, n, n * self.tokens, memory", "Row(name, OURS, n, self.tokens, memory"),
    "one-for-each": ("\"block\", most=gpus)", "\"block\", most=1)"),
    "each-for-all": ("_counted(told, row.library == OURS and row.name != EACH)", "_counted(told, row.library == OURS)"),
    "efficiency-upside-down": ("efficiency=_ratio(alone, mine, row.together)", "efficiency=_ratio(mine, alone, row.together)"),
    "peak-of-one": ('facts["peak"] * row.gpus', 'facts["peak"]'),
    "exposure-from-nowhere": ('set(x["exchanges"]) != {wanted}', "False"),
    "exposure-of-the-best-rank": ("shares.append(max(each))", "shares.append(min(each))"),
    "least-exposure-of-the-worst": ("leasts.append(min(each))", "leasts.append(max(each))"),
    "fastest-rank": ('ns, each = max(float(x["ns"])', 'ns, each = min(float(x["ns"])'),
    "peer-not-checked": ("if not difference <= row.allowed:", "if False:"),
    "change-not-checked": ("if row.change is not None and row.change.why:", "if False:"),
    "peer-tokens-not-counted": ("return sum(found) if not of_all", "return 2 * found[0] if not of_all"),
    "batch-of-one": ("batch=cfg.train.batch * gpus, shards", "batch=cfg.train.batch, shards"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_defects_turn_figures_red(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the tests above that it breaks would say so; the first of them that does is enough."""
    path, (find, replaced), made = Path(step_ranks.__file__), FAULTS[name], dict[str, Any](__name__="planted")
    text = path.read_text(encoding="utf-8")
    assert text.count(find) == 1, find
    monkeypatch.setitem(sys.modules, "planted", types.ModuleType("planted"))  # dataclasses look for their module
    exec(compile(text.replace(find, replaced), str(path), "exec"), made)
    for own in ("bench", "Session", "of_gpus", "_counted"):
        monkeypatch.setattr(step_ranks, own, made[own])
    held = [lambda p: test_figures_of_two_beside_one(tmp_path, p), lambda p: test_the_slowest_rank_counts(tmp_path, p),
            lambda p: test_exposure_is_of_stamps_alone(tmp_path, p, "a stamp short"),
            lambda p: test_a_wrong_figure_is_none(tmp_path, p, "theirs", "gradients of one", NAMES[1], "not ours"),
            lambda p: test_a_wrong_figure_is_none(tmp_path, p, "theirs", "ddp never updates", NAMES[1], "change otherwise than ours"),
            lambda p: test_a_wrong_figure_is_none(tmp_path, p, "theirs", "counts late", NAMES[1], "counted 128 tokens"),
            lambda p: test_many_take_a_batch_of_many(tmp_path)]
    for one in held:
        with pytest.MonkeyPatch.context() as patch:
            try:
                one(patch)
            except (AssertionError, KeyError, AlphaError):
                return
    pytest.fail(f"{name} is not seen")


def test_many_take_a_batch_of_many(tmp_path: Path) -> None:
    cfg = tiny(tmp_path)
    many = step_ranks.of_gpus(cfg, 4)
    assert (many.train.batch, many.train.shards, many.micro_batch) == (16, 8, cfg.micro_batch) and many.micros == cfg.micros


def test_what_makes_no_sense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path, "cuda")
    assert cli.main(["bench", "step", str(tmp_path / "gpt.toml"), "--nproc", "2"]) == 3
    tiny(tmp_path)
    assert cli.main(["bench", "step", str(tmp_path / "gpt.toml"), "--nproc", "0"]) == 2
    assert "--nproc is too small" in capsys.readouterr().err
    assert cli.main(["bench", "step", str(tmp_path / "gpt.toml"), "--nproc", "3"]) == 2
    told = capsys.readouterr().err
    assert "--nproc 3" in told and "take --nproc 2" in told and "building" not in told, "of no key of the run file, and at once"


@pytest.mark.parametrize("zero", [0, 1])
def test_emulated_gpus_stamp_their_collectives(zero: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours as it runs on GPUs, one and two: steps that ranks compare, tokens that devices count, exposure by the devices' stamps. What is
    taken of the parameters is of all of them, though a rank holds its cut alone, and moves as far as those of one GPU."""
    clocks = MadeClocks()
    monkeypatch.setattr(step_ranks.Clocks, "open", staticmethod(lambda index=0: clocks))
    members = [sys.executable, str(ROOT / "suites" / "support" / "emulated_member.py"), str(shared_file(tmp_path, 2))]
    cfg = tiny(tmp_path, "cuda")
    cfg = replace(cfg, train=replace(cfg.train, verify=2, zero=zero))  # whose launches run in line, without stamps of their own
    read, taken = step_ranks._read, list[dict[str, Any]]()
    monkeypatch.setattr(step_ranks, "_read", lambda *paths: taken.append(read(*paths)) or taken[-1])
    result = step_ranks.bench(cfg, 2, catalogue(), "made", rounds=1, steps=5, members=members, command=commands()["command"])
    rows = by_name(result)
    one, two = taken[:2]  # of ours on one and on two, after the same number of steps from the same weights
    assert set(one) == set(two) and all(one[name].shape == two[name].shape and one[name].size for name in one)
    assert any((one[name] != two[name]).any() for name in one), "other tokens move them otherwise"
    assert all(np.isfinite(x).all() and np.abs(x - two[name]).max() < 1e-2 for name, x in one.items()), "three steps from the same weights"
    assert not result.why and rows[OURS_1].ns > 0 and rows[OURS_2].tokens == 256, result
    assert 0 <= rows[OURS_2].exposed < 1 and not rows[OURS_2].unknown and rows[OURS_2].phase > 0
    assert rows[OURS_2].efficiency[1] > 0 and "data sheet" in result.mark


def test_pytorch_ranks_train_the_same_model(tmp_path: Path) -> None:
    """DDP and FSDP2 among two processes: losses and norms of three steps, in one microbatch and in two. A rank that keeps its gradients to
    itself, and weights that do not decay, are seen."""
    with pytorch() as peer:
        python = peer.python
    for more in ("", "micro_batch = 2"):
        cfg = tiny(tmp_path)
        cfg = replace(cfg, train=replace(cfg.train, shards=1, micro_batch=2 if more else 0))
        s = Session(cfg, 2, catalogue(), python, 1, 3, None, lambda name: True, None, None, print, tmp_path)
        try:
            s.ours(1), s.ours(2)
            for way in (Ranked(Variant("", ""), DDP), Ranked(Variant("", ""))):
                row, arm = s._admitted(way)
                assert arm is not None and row.difference <= row.allowed, (way.name, row)
                assert all(x["ns"] > 0 for x in arm.team.ask(arm.do, count=2, **arm.arguments) if x)
            for way in (Ranked(Variant("", AUTOCAST), FSDP2), Ranked(Variant("", MASTER), DDP), Ranked(Variant("", AUTOCAST), DDP)):
                row, _ = s._admitted(way)
                assert row.allowed < row.difference < 8e-3, (way.name, row)  # bf16 beside float32
            s.sizes = {**s.sizes, "weight_decay": 50.0}
            assert s._admitted(Ranked(Variant("", ""), DDP))[1] is None
        finally:
            s.close()
    with pytest.raises(ServedError, match="was ended"):
        s_closed = Session(cfg, 2, catalogue(), python, 1, 3, None, lambda name: True, None, None, print, tmp_path)
        s_closed.theirs().close()
        s_closed.teams[0].ask("memory")
