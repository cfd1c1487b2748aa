"""Records of benchmarks and the pages that are filled from them: what is committed agrees, and every way to lie is refused."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_runs
import numpy as np
import pytest
import warm
from made_bench import MADE, calm, first_steps, made, tiny

from alpha.bench import clocks, command, docs, kernel, record, step, whole
from alpha.bench.peer import ROOT, Peer
from alpha.cli import main
from alpha.errors import CorruptError, InputError, MachineError
from alpha.flops.v1 import VERSION
from alpha.registry.evidence import reference_classes, shipped_root
from alpha.train.catalogue import catalogue

pytestmark = pytest.mark.usefixtures("warm_peers")

WRITE = record.write
NAMES = ("ours", "torch.compile, bf16 weights, cuDNN", "torch eager, autocast", "torch.compile, autocast, cuDNN")


def blocks(ns: float, seed: int, n: int = 7) -> list[list[float]]:
    """Raw blocks around a time."""
    return [[ns * x, 1420.0, 690.0, 61.0] for x in np.random.default_rng(seed).normal(1, 1e-3, n)]


def body(commit: str, ns: float = 1e8) -> dict[str, Any]:
    """What a recorded step holds: ours at 1e8 ns, a peer 10 % slower, one that was not measured."""
    ours, theirs, tokens, per_token, peak = blocks(ns, 0), blocks(1.1 * ns, 1), 65536, 8e8, 989.4e12

    def row(name: str, own: list[list[float]]) -> step.Row:
        middle = float(np.median([b[0] for b in own]))
        rate = tokens / middle * 1e9
        ratio = clocks.ratio(*(np.array([b[0] for b in x]) for x in (own, ours)), 1) if own is not ours else (1.0, 1.0, 1.0)
        return step.Row(name, middle, rate, rate * per_token / peak, 2**34, ratio, ours=float(np.median([b[0] for b in ours])), blocks=own,
                        beside=ours)

    flops = {"per_token": per_token, "peak": peak, "peak_source": "a data sheet"}
    rows = [row(NAMES[0], ours), row(NAMES[1], theirs), row(NAMES[3], blocks(1.2 * ns, 2)),
            step.Row(NAMES[2], why="not measured: the budget was spent")]
    result = step.Result("gpt2-124m", "64 x 1024 tokens", "", flops, "NVIDIA H200", "cuda_sm90_H200", "nvcc", tokens, "PyTorch 2",
                         NAMES[1], 9.0, rows)
    return {"commit": commit, "taken": "2026-11-23", "environment": {"driver": "580"}, "hardware": "NVIDIA H200", "kernel_hashes": {},
            "flops": {"version": VERSION, "convention": "c", **flops}, "step": command._plain(result)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A repository with pages, one record and its regions filled."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# It\n\n<!-- bench:training -->\n<!-- /bench -->\n\nMore.\n")
    (tmp_path / "docs" / "log.md").write_text("Then: 5 ms.\n\n<!-- bench:steps -->\n<!-- /bench -->\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    record.write("cuda_sm90_H200", "step-gpt2-124m", body(git(tmp_path, "rev-parse", "HEAD")), tmp_path / "baselines" / "bench")
    assert docs.fill(record.records(tmp_path / "baselines" / "bench"), tmp_path, write=True) == ["README.md: training", "log.md: steps"]
    commit(tmp_path)
    assert docs.problems(tmp_path) == docs.unknown_commits(tmp_path) == []
    return tmp_path


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e", *words], check=True, capture_output=True,
                          text=True).stdout.strip()


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "state")


def of(place: Path) -> Path:
    return place / "baselines" / "bench" / "cuda_sm90_H200" / "step-gpt2-124m.json"


def test_pages_are_what_the_committed_records_say() -> None:
    assert docs.problems() == [], "run `alpha bench docs` and look at what it changed"


def test_commits_of_the_committed_records_are_known() -> None:
    try:
        assert docs.unknown_commits() == []
    except MachineError as error:
        pytest.skip(f"NOT_RUN: {error.what}")


def test_the_log_says_that_its_figures_are_history() -> None:
    """Today's figures stand in the handbook, in regions; the log holds no region."""
    assert "Every figure of the log is history" in (ROOT / "docs" / "log" / "performance.md").read_text()
    handbook = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    places = {name: path for path in docs.pages() for name in re.findall(r"^<!-- bench:(\S+) -->", path.read_text(), re.M)}
    assert set(places) == set(docs.REGIONS) and set(places.values()) <= set(handbook)


def test_regions_show_the_record(place: Path) -> None:
    readme, log = (place / "README.md").read_text(), (place / "docs" / "log.md").read_text()
    taken = record.load(of(place))
    ours, ratio = taken["step"]["rows"][0], taken["step"]["rows"][1]["ratio"]
    beside = f"{ratio[1]:.3f} [{ratio[0]:.3f}, {ratio[2]:.3f}]"
    for text in (f"{ours['tokens_per_second']:,.0f}", f"{100 * ours['mfu']:.1f} %", beside, NAMES[1], VERSION):
        assert text in readme, text
    for text in (*NAMES, "1420, 690, 61", "7 of 7", "budget was spent", taken["commit"][:12], "driver 580", VERSION):
        assert text in log, text
    assert readme.startswith("# It\n") and readme.endswith("More.\n") and "Not recorded" in readme  # the whole run is not


def test_words_of_a_peer_end_no_row_of_a_table() -> None:
    held = committed("cuda_sm90_H200/step-gpt2-124m")
    held["step"]["rows"].append({**held["step"]["rows"][-1], "name": "x", "ns": None, "why": "RuntimeError: an illegal | access\nmore"})
    assert docs.steps([held]).splitlines()[-1] == "| x |" + 7 * " - |" + " RuntimeError: an illegal \\| access more |"


def test_the_headline_is_of_a_class_whose_evidence_ships() -> None:
    """A step recorded on another GPU stands in the tables alone, however fast."""
    one = {"subject": "step-gpt2-124m", "machine": reference_classes(shipped_root())["cuda"], **body("0" * 40)}
    other = {**one, **body("0" * 40, ns=1e7), "machine": "cuda_sm90_A-faster-one", "hardware": "NVIDIA A"}
    assert docs.headline([other, one]) == docs.headline([one]) and "on one NVIDIA H200" in docs.headline([one])
    assert "Not recorded" in docs.headline([{**one, "machine": "cuda_sm90_none"}])
    assert "Not recorded" in docs.headline([other]) and "NVIDIA A" in docs.training([other])


def test_many_gpus_stand_beside_one_and_the_peer() -> None:
    rows = [{"name": "ours, 2 GPUs", "library": "ours", "gpus": 2, "ns": 1e8, "tokens_per_second": 1234567.0,
             "efficiency": [None, 0.987, None], "exposed": 0.0123, "ratio": [1, 1, 1]},
            {"name": "DDP", "library": "torch", "gpus": 2, "ns": 1e8, "efficiency": [None, 0.9, None], "ratio": [None, 1.25, None],
             "together": True, "discarded": 0, "blocks": [[1e8]] * 5}]
    ranks: dict[str, Any] = {"run": "x", "gpus": 2, "quoted": "DDP", "rows": rows}
    one = {"subject": "ranks-x", "machine": "m", "hardware": "2 GPUs H100, and more", "ranks": ranks}
    assert docs.many([one]).splitlines()[2] == "| x | 2 GPUs H100 | 1,234,567 | 0.987 | - | 1.23 % | 1.25 (DDP) | 0.900 |"
    each = {"name": "ours, 1 GPU on each", "library": "ours", "gpus": 2, "ns": 1e8, "efficiency": [None, 0.99, None]}
    bound = {**one, "ranks": {**ranks, "rows": [*rows, each]}}
    assert "| 0.987 | 0.990 |" in docs.many([bound])
    assert "Not recorded" in docs.many([{**one, "ranks": {**ranks, "rows": [{**rows[0], "ns": None}, each]}}]), "it is no step on many"
    turns = {**one, "ranks": {**ranks, "rows": [rows[0], {**rows[1], "together": False, "blocks": [[1e8]]}]}}
    assert "| 1.25 (DDP; in turn, 1 block each) |" in docs.many([turns])
    alone = {**one, "ranks": {**ranks, "quoted": ""}}
    assert "no peer was measured" in docs.many([alone]) and "Not recorded" in docs.many([])


def faster(b: dict[str, Any], tokens: int = 70000) -> None:
    """More tokens in a step, and all that follows."""
    b["step"]["tokens"] = tokens
    for row in (r for r in b["step"]["rows"] if r["ns"]):
        row["tokens_per_second"] = tokens / row["ns"] * 1e9
        row["mfu"] = row["tokens_per_second"] * b["flops"]["per_token"] / b["flops"]["peak"]


def lower_peak(b: dict[str, Any], peak: float = 9e14) -> None:
    """Another peak, and the MFU that follows."""
    b["flops"]["peak"] = b["step"]["flops"]["peak"] = peak
    faster(b, b["step"]["tokens"])


def cut(b: dict[str, Any]) -> None:
    """A peer's blocks go, with its figures left."""
    b["step"]["rows"][1].update(blocks=[], beside=[])


def chosen(b: dict[str, Any]) -> None:
    """Rounds that count are chosen, and the count of discarded ones left."""
    b["step"]["rows"][1]["kept"] = [True] * 6 + [False]


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "ns": lambda b: b["step"]["rows"][0].update(ns=9e7),
    "tokens_per_second": lambda b: b["step"]["rows"][0].update(tokens_per_second=7e5),
    "mfu": lambda b: b["step"]["rows"][0].update(mfu=0.6),
    "ratio": lambda b: b["step"]["rows"][1].update(ratio=[1.1, 1.2, 1.3]),
    "ratio's lower bound": lambda b: b["step"]["rows"][1]["ratio"].__setitem__(0, 1.099),
    "ratio's upper bound": lambda b: b["step"]["rows"][1]["ratio"].__setitem__(2, 1.2),
    "ratio without bounds": lambda b: b["step"]["rows"][1]["ratio"].__setitem__(0, None),
    "ratio of ours": lambda b: b["step"]["rows"][0].update(ratio=[0.9, 1.0, 1.1]),
    "discarded": lambda b: b["step"]["rows"][1].update(ratio=[1.1, 1.2, 1.3], discarded=1),
    "discarded alone": lambda b: b["step"]["rows"][1].update(discarded=1),
    "kept": chosen,
    "kept none": lambda b: b["step"]["rows"][1].update(kept=[False] * 7, discarded=7),
    "quoted": lambda b: b["step"].update(quoted=NAMES[3]),
    "quoted none": lambda b: b["step"].update(quoted=""),
    "blocks of ours": lambda b: b["step"]["rows"][0]["blocks"].reverse(),
    "blocks": cut,
    "tokens": lambda b: b["step"].update(tokens=70000),
    "tokens and what follows": faster,
    "config": lambda b: b.update(config=["batch = 63", "sequence = 1024"]),
    "peak": lambda b: b["flops"].update(peak=9e14),
    "peak and what follows": lower_peak,
    "hardware": lambda b: b.update(hardware="NVIDIA H100 PCIe"),
    "memory of none": lambda b: b["step"]["rows"][0].update(memory=0),
    "memory below none": lambda b: b["step"]["rows"][1].update(memory=-1),
    "memory beyond the device": lambda b: b["step"]["rows"][1].update(memory=200 << 30),
    "ratio that is none": lambda b: b["step"]["rows"][1]["ratio"].__setitem__(1, None),
    "difference": lambda b: b["step"]["rows"][1].update(difference=0.2, allowed=0.1),
    "change": lambda b: b["step"]["rows"][1].update(change={"tensors": 2, "size": {"difference": 0.5, "allowed": 0.1, "where": "w"}}),
    "change that is none": lambda b: b["step"]["rows"][1].update(change={"size": {"difference": None, "allowed": 0.1, "where": "w"}}),
    "ours beside": lambda b: b["step"]["rows"][1].update(ours=1.2e8),
    "no blocks": lambda b: b["step"]["rows"][0].update(blocks=[]),
    "no time": lambda b: b["step"]["rows"][1].update(ns=None),
    "time that is a word": lambda b: b["step"]["rows"][1].update(ns="fast"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_edited_record_is_refused(place: Path, lie: str) -> None:
    """With its hash as it was, and with the hash made anew: then the raw blocks contradict it."""
    edited = record.load(of(place))
    LIES[lie](edited)
    of(place).write_text(json.dumps(edited))
    with pytest.raises(CorruptError, match="not what was recorded"):
        docs.problems(place)
    edited["hash"] = record.hash_of(edited)
    of(place).write_text(json.dumps(edited))
    with pytest.raises(CorruptError, match="not what its raw blocks give"):
        docs.problems(place)


def committed(subject: str) -> dict[str, Any]:
    """A record that is kept, by its place."""
    return record.load(record.FOLDER / f"{subject}.json")


def call(b: dict[str, Any], which: Callable[[dict[str, Any]], object] = lambda k: True) -> dict[str, Any]:
    """The first such call that has a peer with figures."""
    return next(k for k in b["kernels"] if len(k["rows"]) > 2 and k["rows"][2]["ns"] and which(k))


def faster_ceiling(b: dict[str, Any]) -> None:
    """A ceiling beyond the data sheet, and the shares that follow."""
    rows = call(b)["rows"]
    rows[1].update(ns=rows[1]["ns"] / 2, ratio=[x / 2 for x in rows[1]["ratio"]])
    for row in (rows[0], *rows[2:]):
        row["share"] /= 2


H100, H200 = "cuda_sm90_H100-80GB-HBM3", "cuda_sm90_H200"
OTHER_LIES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a peer's blocks": (f"{H100}/products", lambda b: call(b)["rows"][2].update(blocks=[])),
    "a bound of a kernel": (f"{H100}/products", lambda b: call(b)["rows"][2]["ratio"].__setitem__(2, 1.5)),
    "a bound where rounds went": (f"{H100}/products", lambda b: call(b, lambda k: k["discarded"])["rows"][2]["ratio"].__setitem__(0, 0.9)),
    "a middle where rounds went": (f"{H100}/products", lambda b: call(b, lambda k: k["discarded"])["rows"][0].update(
        ns=max(x[0] for x in call(b, lambda k: k["discarded"])["rows"][0]["blocks"]))),
    "a share": (f"{H100}/products", lambda b: call(b)["rows"][0].update(share=0.99)),
    "a ceiling": (f"{H100}/bandwidth", faster_ceiling),
    "a ceiling's ratio": (f"{H100}/bandwidth", lambda b: call(b)["rows"][1].update(ratio=[0.9, 0.9, 0.9])),
    "rounds": (f"{H100}/attention", lambda b: call(b).update(rounds=50)),
    "a limit": (f"{H100}/attention", lambda b: call(b).update(limit="none")),
    "a bound of a collective": (f"{H100}x2-nvlink/comm-device", lambda b: b["comm"]["cases"][0]["rows"][1]["ratio"].__setitem__(2, 9.0)),
    "quoted of many": (f"{H200}x2-nvlink/ranks-gpt2-124m-zero1", lambda b: b["ranks"].update(quoted=b["ranks"]["rows"][-1]["name"])),
    "tokens of many": (f"{H200}x2-nvlink/ranks-gpt2-124m-zero1", lambda b: b["ranks"].update(shape="65 x 1024 tokens, vocabulary 50304")),
    "bounds of many": (f"{H200}x2-nvlink/ranks-gpt2-124m-zero1", lambda b: b["ranks"]["rows"][-1]["ratio"].__setitem__(0, 1.4)),
    "efficiency's bounds": (f"{H200}x2-nvlink/ranks-gpt2-124m-zero1", lambda b: b["ranks"]["rows"][1]["efficiency"].__setitem__(2, 0.99)),
    "memory of many": (f"{H200}x2-nvlink/ranks-gpt2-124m-zero1", lambda b: b["ranks"]["rows"][0].update(memory=0)),
    "no efficiency": (f"{H200}x2-nvlink/ranks-gpt2-124m-zero1", lambda b: b["ranks"]["rows"][1].update(efficiency=[None] * 3)),
    "no exposed": (f"{H200}x2-nvlink/ranks-gpt2-124m-zero1", lambda b: b["ranks"]["rows"][1].update(exposed=None)),
    "GPUs of many": (f"{H200}x4-nvlink/ranks-llama-1b-zero1", lambda b: b["ranks"].update(gpus=8)),
    "bytes of a collective": (f"{H100}x2-nvlink/comm-device", lambda b: b["comm"]["cases"][0].update(nbytes=1 << 20)),
    "bytes of a kernel": (f"{H100}/products", lambda b: call(b).update(bytes=None)),
    "a run without MFU": (f"{H200}/run-gpt2-124m", lambda b: b["figures"].update(mfu=None)),
    "a run's rate": (f"{H200}/run-gpt2-124m", lambda b: b["figures"].update(tokens_per_second=7e5)),
    "a run's MFU": (f"{H200}/run-gpt2-124m", lambda b: b["figures"].update(mfu=0.6)),
    "a run's peak": (f"{H200}/run-gpt2-124m", lambda b: (b["flops"].update(peak=b["flops"]["peak"] / 2),
                                                         b["figures"].update(mfu=2 * b["figures"]["mfu"]))),
    "a run's workflow": (f"{H200}/run-gpt2-124m", lambda b: b["figures"].update(workflow_tokens_per_second=6.1e5, goodput=1.0)),
    "a run's goodput": (f"{H200}/run-gpt2-124m", lambda b: b["figures"].update(goodput=1.2)),
    "a run's goodput beside its rates": (f"{H200}/run-gpt2-124m", lambda b: b["figures"].update(goodput=0.5)),
    "a run's HFU": (f"{H200}/run-gpt2-124m", lambda b: b["figures"].update(hfu=-0.1)),
    "a run's kernels": (f"{H100}/run-gpt2-124m", lambda b: b["figures"].update(kernel_active=0.99)),
}


@pytest.mark.parametrize("lie", OTHER_LIES)
def test_an_edit_of_a_committed_record_is_refused(lie: str) -> None:
    subject, change = OTHER_LIES[lie]
    edited = committed(subject)
    change(edited)
    with pytest.raises(CorruptError, match="not what its raw blocks give"):
        record.verify(edited, subject)


@pytest.mark.parametrize("change", [
    lambda b: b.pop("flops"), lambda b: b["step"]["rows"][0].pop("memory"), lambda b: b["step"].update(shape="many tokens"),
    lambda b: b["step"].update(rows=None), lambda b: b["step"]["rows"][0].update(tokens_per_second=[])])
def test_a_malformed_record_names_itself(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edited = record.load(of(place))
    change(edited)
    with pytest.raises(CorruptError, match="the record"):
        record.verify(edited, "the record")


def test_rounds_that_count_stand_in_new_records(place: Path) -> None:
    """A round that went for another reason than its clock: the mask says which, and all figures follow from it."""
    held = record.load(of(place))
    mask = np.array([False, True, True, True, True, True, True])
    for row in (r for r in held["step"]["rows"] if r["ns"]):
        own, ours = (np.array([b[0] for b in row[key]])[mask] for key in ("blocks", "beside"))
        row |= {"kept": mask.tolist(), "discarded": 1, "ns": float(np.median(own)), "ours": float(np.median(ours))}
        if row["name"] != "ours":
            row["ratio"] = list(clocks.ratio(own, ours, 1))
    faster(held, 65536)
    held = record.rounded(held)
    record.verify(held, "it")
    del held["step"]["rows"][1]["kept"]  # its clock says nothing
    with pytest.raises(CorruptError, match="discarded = 1"):
        record.verify(held, "it")


def test_a_record_in_another_place_or_torn_is_refused(place: Path) -> None:
    path = of(place)
    moved = path.with_name("step-llama-1b.json")
    moved.write_bytes(path.read_bytes())
    with pytest.raises(CorruptError, match="not what was recorded"):
        docs.problems(place)
    moved.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CorruptError, match="cannot be read"):
        docs.problems(place)


def test_a_figure_edited_by_hand_or_out_of_date_is_seen(place: Path) -> None:
    readme = place / "README.md"
    sound = readme.read_text()
    rate = f"{record.load(of(place))['step']['rows'][0]['tokens_per_second']:,.0f}"
    readme.write_text(sound.replace(rate, "999,999"))
    assert docs.problems(place) == ["README.md: training is not what the records say"]
    readme.write_text(sound)
    record.write("cuda_sm90_H200", "step-gpt2-124m", body(git(place, "rev-parse", "HEAD"), 0.99e8), place / "baselines" / "bench")
    assert {p.split(" is not")[0] for p in docs.problems(place)} == {"README.md: training", "log.md: steps"}


@pytest.mark.parametrize("claim", ["GPT-2 124M 598k tokens/s", "it is 1.13 times the speed of PyTorch", "MFU 48.3 %", "at 720 TFLOP/s",
                                   "moves 4.1 TB/s", "takes 107 ms", "2 times faster", "in 35 us", "12 % faster",
                                   "600,739 tokens per second", "600,739 tokens a second", "48.5 % MFU", "48.5% of MFU", "1.17x as fast",
                                   "1.17x the speed of PyTorch", "17 percent faster", "17 per cent slower", "a step takes 0.109 s",
                                   "a step of GPT-2 is 0.109 seconds", "737 TFLOPS", "0.7 PFLOP/s", "it needs 109 milliseconds"])
def test_a_speed_outside_a_region_is_seen(place: Path, claim: str) -> None:
    readme = place / "README.md"
    readme.write_text(readme.read_text() + f"\nSo: {claim}.\n")
    assert docs.problems(place) == [f"README.md claims a speed outside a filled region: So: {claim}."]


def test_words_that_claim_no_speed_pass() -> None:
    assert docs.claims("memory, MFU; 42 components, a minute, 1.1 billion parameters, Python 3.10, 124M; arXiv:2109.08668\n"
                       "within 0.01 of it, a mask of 64 x 1024 tokens, the step after 20 seconds, 1.2 x 3, steps 5 to 9\n") == []


def test_a_commit_that_is_none_is_seen(place: Path) -> None:
    record.write("cuda_sm90_H200", "step-gpt2-124m", body("0" * 40), place / "baselines" / "bench")
    docs.fill(record.records(place / "baselines" / "bench"), place, write=True)
    assert docs.unknown_commits(place) == ["cuda_sm90_H200/step-gpt2-124m: commit 000000000000 is not in the history"]
    subprocess.run(["rm", "-rf", str(place / ".git")], check=True)
    with pytest.raises(MachineError, match="the history is not here"):
        docs.unknown_commits(place)


def test_regions_must_be_known_and_closed(place: Path) -> None:
    for text, words in (("<!-- bench:speed -->\n<!-- /bench -->\n", "no such region"), ("<!-- bench:steps -->\n", "no end")):
        (place / "docs" / "log.md").write_text(text)
        with pytest.raises(InputError, match=words):
            docs.problems(place)


# -- recording -----------------------------------------------------------------------------------------------------------------


def test_only_a_clean_commit_is_recorded(place: Path) -> None:
    assert record.clean_commit(place) == git(place, "rev-parse", "HEAD")
    record.write("cuda_sm90_H200", "step-other", body("0" * 40), place / "baselines" / "bench")
    assert record.clean_commit(place)  # the next record is of the same commit
    (place / "new.py").write_text("")  # code is found by looking, so a file that git does not know counts
    with pytest.raises(InputError, match="only a clean commit"):
        record.clean_commit(place)
    (place / "new.py").unlink()
    (place / "README.md").write_text("changed")
    with pytest.raises(InputError, match="only a clean commit"):
        record.clean_commit(place)
    with pytest.raises(InputError, match="has none"):
        record.clean_commit(place / "docs")


def test_a_dirty_tree_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    def dirty() -> str:
        raise InputError("only a clean commit is recorded")

    tiny(tmp_path)
    monkeypatch.setattr(command.record, "clean_commit", dirty)
    monkeypatch.setattr(step, "bench", lambda *a, **k: pytest.fail("measured"))
    monkeypatch.setattr(kernel, "bench", lambda *a, **k: pytest.fail("measured"))
    monkeypatch.setattr(command, "why_not_here", lambda c: "")
    for words in (["step", str(tmp_path / "gpt.toml")], ["products"]):
        assert main(["bench", *words, "--record"]) == 2 and "only a clean commit" in capsys.readouterr().err


def test_what_cannot_be_recorded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path)
    monkeypatch.setattr(command.record, "clean_commit", lambda: "0" * 40)
    for arguments, word in ((["step", str(tmp_path / "gpt.toml"), "--set", "train.batch=8", "--record"], "as it is"),
                            (["silu.f32.cpu", "--record"], "a group of kernels"), (["docs", "--record"], "nothing of this"),
                            (["silu.f32.cpu", "--check"], "for `alpha bench docs`"),
                            (["run", "--record"], "reads a run")):
        assert main(["bench", *arguments]) == 2 and word in capsys.readouterr().err, arguments


def test_a_step_is_recorded(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calm(monkeypatch)
    cfg = tiny(place)
    measured, known = step.bench, first_steps(cfg, place)
    head = git(place, "rev-parse", "HEAD")
    monkeypatch.setattr(command.record, "clean_commit", lambda: head)
    monkeypatch.setattr(command.record, "write", lambda *a: WRITE(*a, place / "baselines" / "bench"))
    monkeypatch.setattr(step, "bench", lambda cfg, catalogue, python, **more: measured(
        cfg, catalogue, python, **{**more, "rounds": 3, "steps": 1, "command": made(**known)}))
    assert main(["bench", "step", str(place / "gpt.toml"), "--peers", "--record"]) == 0 and "recorded:" in capsys.readouterr().out
    (path,) = (place / "baselines" / "bench").glob("*/step-t.json")
    found = record.load(path)
    assert found["commit"] == head and found["flops"]["version"] == VERSION and found["environment"]["cpu"]
    assert 'family = "gpt"' in found["config"] and found["step"]["quoted"].startswith("torch")
    for row in found["step"]["rows"]:
        assert len(row["blocks"]) == len(row["beside"]) == 3
        assert row["name"] == "ours" or (row["change"]["tensors"] >= 12 and row["change"]["size"]["difference"] < 1e-6)
    assert path.read_text().count("\n") < 150  # numbers of a line stand on one
    docs.fill(record.records(place / "baselines" / "bench"), place, write=True)
    assert "t, 4 x 32 tokens" in (place / "docs" / "log.md").read_text()


def test_a_record_and_json_do_not_cost_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After minutes of measurement: a full disk behind --json, or figures that are refused."""
    tiny(tmp_path)
    kept, out = list[str](), tmp_path / "out.json"
    monkeypatch.setattr(command.record, "clean_commit", lambda: "0" * 40)
    monkeypatch.setattr(step, "bench", lambda *a, **k: step.Result("t", "s", "m", {}, "h", "machine", "v", 1))
    monkeypatch.setattr(command, "_keep", lambda machine, *more: kept.append(machine))
    words = ["bench", "step", str(tmp_path / "gpt.toml"), "--record", "--json"]

    def refused(*arguments: object) -> None:
        raise CorruptError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(command, "_write", refused)
        assert main([*words, str(out)]) == 2 and kept == ["machine"]
    monkeypatch.setattr(command, "_keep", refused)
    assert main([*words, str(out)]) == 2 and json.loads(out.read_text())["step"]["run"] == "t"


def test_kernels_are_recorded_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm(monkeypatch)
    with Peer("made", "cpu", 1, command=MADE) as peer:
        results = kernel.bench(catalogue()["gelu.f32.cpu"], catalogue(), peer, rounds=3, pattern="cache")
        results += kernel.bench(catalogue()["gelu.f32.cpu"], catalogue(), None, rounds=3, deadline=0.0)
    assert [r.case for r in results] == ["cache", "the rest"] and results[1].why == "the budget was spent"
    assert results[0].flops == VERSION and results[0].work > 0 and results[0].bytes > 0
    taken = {"commit": "0" * 40, "environment": {}, "flops": {"version": VERSION}, "kernels": command._plain(results)}
    path = record.write("cuda_sm90_H200", "bandwidth", taken, tmp_path)
    text = docs.bandwidth(record.records(tmp_path))
    ours = record.load(path)["kernels"][0]["rows"][0]
    assert f"| gelu.f32.cpu | cache | {ours['ns'] / 1e3:.1f} |" in text and "the budget was spent" in text and VERSION in text
    edited = json.loads(path.read_text())
    edited["kernels"][0]["rows"][0]["ns"] *= 0.9
    with pytest.raises(CorruptError, match="raw blocks"):
        record.verify(edited, "edited")
    found = json.loads(path.read_text())
    assert all(len(c["blocks"]) == len(c["kept"]) == 3 for c in found["kernels"][0]["ceilings"]) and found["kernels"][0]["ceilings"]
    rows = found["kernels"][0]["rows"]
    rows[1].update(ns=2 * rows[1]["ns"], ratio=[2 * x for x in rows[1]["ratio"]])
    for row in (r for r in rows if r["ns"] and r is not rows[1]):
        row["share"] *= 2
    with pytest.raises(CorruptError, match="ceiling: ns"):
        record.verify(found, "edited")


def test_products_and_attention_are_shown_by_shape() -> None:
    def call(component: str, case: str, ns: float, peer: float) -> dict[str, Any]:
        return {"component": component, "case": case, "why": "", "rows": [
            {"name": "ours", "ns": ns, "ratio": [1, 1, 1]}, {"name": "ceiling", "ratio": [0.5, 0.5, 0.5]},
            {"name": "a", "ratio": [None, peer, None]}, {"name": "b", "ratio": [None, None, None]}]}

    held = {"machine": "cuda_sm90_H200", "commit": "0" * 40, "environment": {}, "flops": {"version": VERSION}}
    text = docs.products([{**held, "subject": "products", "kernels": [
        call("matmul.bf16.sm90", "dgrad-8192x8192x8192", 2 * 8192**3 / 700e3, 0.97)]}])
    assert "| 8192 x 8192 x 8192 | - | 700 (0.97) | - | - |" in text
    text = docs.attention([{**held, "subject": "attention", "kernels": [
        call("attention_bwd.bf16.sm90", "causal-1x32x16384x128", 4 * 32 * 16384**2 * 128 * 2.5 * 0.5 / 500e3, 1.1)]}])
    assert "| 1 x 32 x 16384 x 128 | - | - | 500 (1.10) | - |" in text


def test_reports_come_from_clean_commits() -> None:
    dirty = {p.parent.name for p in (ROOT / "reports").glob("*/report.md") if "+changes" in p.read_text()}
    assert not dirty, f"made from changed code: {sorted(dirty)}"


# -- whole runs ----------------------------------------------------------------------------------------------------------------


def test_a_whole_run_is_recorded(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_runs.make(tmp_path / "it", steps=300)
    found = whole.figures(run)
    figures = {f.key: f.value and float(f"{f.value:.{record.DIGITS}g}") for f in found.figures}  # as a record keeps them
    assert figures["workflow_tokens_per_second"] < figures["tokens_per_second"] and 0 < figures["goodput"] < 1  # type: ignore[operator]
    assert found.steps == 300 and found.status == "GATED"
    monkeypatch.setattr(command.record, "write", lambda *a: WRITE(*a, place / "baselines" / "bench"))
    assert main(["bench", "run", str(run), "--record"]) == 0
    shown = capsys.readouterr().out
    assert "Throughput, whole workflow" in shown and "Goodput" in shown and VERSION in shown
    docs.fill(record.records(place / "baselines" / "bench"), place, write=True)
    readme = (place / "README.md").read_text()
    for text in (f"{figures['workflow_tokens_per_second']:,.0f}", f"{100 * figures['goodput']:.1f} %", "| it |"):  # type: ignore[operator]
        assert text in readme, text


def test_a_run_is_read_with_libraries_that_a_measuring_process_may_not_hold(tmp_path: Path) -> None:
    done = warm.run(["-m", "alpha.cli", "bench", "run", made_runs.make(tmp_path / "it", steps=100)], cwd=ROOT)
    assert done.returncode == 0 and "Goodput" in done.stdout, done.stderr


@pytest.mark.parametrize("change, word", [(("dirty", "ab"), "clean commit"), (("commit", "unknown"), "clean commit"),
                                          (("status", "UNGATED"), "gated run")])
def test_a_run_of_changed_code_is_not_recorded(tmp_path: Path, change: tuple[str, str], word: str) -> None:
    found = whole.figures(made_runs.make(tmp_path / "it", steps=100))
    if change[0] == "status":
        found = whole.Whole(**{**vars(found), "status": change[1]})
    else:
        found = whole.Whole(**{**vars(found), "commit": whole.commit_of([{"source": {"commit": "c", "dirty": "", change[0]: change[1]}}])})
    with pytest.raises(InputError, match=word):
        found.body()
