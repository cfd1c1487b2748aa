"""Pins of the perf gate: how they are measured and kept, what they are worth, and what the repository has pinned."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from alpha import config
from alpha.cli import auditing
from alpha.component import Component
from alpha.errors import AlphaError, CorruptError, InputError
from alpha.gates import merge, perf, run
from alpha.gates.timing import pin
from alpha.profile import noise
from alpha.registry import distance
from alpha.registry import pins as pinned
from alpha.registry.cases import Share
from alpha.registry.digest import component_digests
from alpha.registry.evidence import load_file, reference_classes, shipped_root
from alpha.registry.gates import engine_of
from alpha.registry.gpu import family
from alpha.registry.machine import machine_class, processor
from alpha.registry.package import Package
from alpha.registry.pins import FEWEST, FLOOR, MOST, WIDEST, Pins, code_of, folder_of, key_of, line_of
from alpha.registry.policy import owed
from alpha.train.assemble import program_for
from alpha.train.catalogue import catalogue

ROOT = Path(__file__).parents[2]
SHIPPED = Pins(folder_of(shipped_root()))
KERNEL = "silu.f32.cpu"


def test_the_quantiles_are_students() -> None:
    assert len(pinned._T99) == MOST - FEWEST + 1
    for df, t in enumerate(pinned._T99, FEWEST - 1):
        assert abs(noise.quantile(0.99, df) - t) < 6e-4, df


@pytest.mark.parametrize("n", [FEWEST, 8, 16])
@pytest.mark.parametrize("draw", ["process", "tries", "disturbed"])
def test_unchanged_code_is_rarely_below_its_line(n: int, draw: str) -> None:
    """The procedure on made-up shares: pinned is the best of two tries, judged that of at most four. What all tries of a process share
    gives one alarm in a hundred, by construction; what differs from try to try, with disturbances or without, one in a thousand at most."""
    rng = np.random.default_rng(5)
    alarms = judged = 0
    for _ in range(6000):
        tries = np.ones((n + 1, perf.TRIES))
        if draw == "process":
            tries += 0.02 * rng.standard_normal((n + 1, 1))
        else:
            tries += 0.02 * rng.standard_normal(tries.shape)
        if draw == "disturbed":
            tries -= 0.08 * rng.exponential(size=tries.shape) * (rng.random(tries.shape) < 0.1)
        line = line_of(tuple(0.6 * tries[:n, : perf.PINNED].max(1)), 0.0)
        if line.judged:
            judged, alarms = judged + 1, alarms + (not 0.6 * tries[n].max() >= line.least)
    low, _ = noise.wilson(alarms, judged)
    assert judged > 4000 and low < (0.01 if draw == "process" else 0.001), f"{alarms} of {judged}"


Fresh = Callable[[Sequence[str], Callable[[str], None]], dict[str, dict[str, float]]]


def _made(*shares: float, case: str = "cache") -> Fresh:
    left = list(shares)
    return lambda ids, report: {i: {case: left.pop(0)} for i in ids}


def _pinned(tmp_path: Path, fresh: Fresh, **more: int | bool) -> tuple[pinned.Pin | None, list[str]]:
    lines: list[str] = []
    made = pin.run([catalogue()[KERNEL]], root=Pins(tmp_path), fresh=fresh, report=lines.append, catalogue=catalogue(), **more)  # type: ignore[arg-type]
    found = Pins(tmp_path).load(key_of(machine_class().key, processor())).get(KERNEL)
    assert [p.shares for p in made] == ([found.shares] if found is not None else [])
    return found, lines


def test_measurements_replace_those_that_are_pinned_unless_they_are_added(tmp_path: Path) -> None:
    found, _ = _pinned(tmp_path, _made(0.5, 0.51, 0.49, 0.5, 0.52), measurements=5)
    assert found is not None and found.shares == {"cache": (0.5, 0.51, 0.49, 0.5, 0.52)} and len(found.times) == 5
    assert found.flops == perf.FLOPS and dict(found.code) == code_of(component_digests(catalogue()[KERNEL], "perf"))
    found, _ = _pinned(tmp_path, _made(0.6, 0.7), measurements=2, add=True)
    assert found is not None and found.shares["cache"][-3:] == (0.52, 0.6, 0.7) and len(found.times) == 7
    found, _ = _pinned(tmp_path, _made(*[0.3] * MOST), measurements=MOST, add=True)
    assert found is not None and found.shares["cache"] == (0.3,) * MOST, "the oldest go"
    found, _ = _pinned(tmp_path, _made(*[0.4] * 5), measurements=5)
    assert found is not None and found.shares["cache"] == (0.4,) * 5
    with pytest.raises(InputError, match="not a number of measurements"):
        _pinned(tmp_path, _made(), measurements=FEWEST - 1)


def test_measurements_of_other_code_or_cases_are_not_mixed(tmp_path: Path) -> None:
    found, _ = _pinned(tmp_path, _made(*[0.5] * 5), measurements=5)
    package = Package()
    assert found is not None
    taken = [("2000-01-01T00:00:00Z", {"cache": 0.4})] * 5
    same = pin.merged(catalogue()[KERNEL], taken, found, package)
    assert same is not None and len(same.times) == 10
    other = pinned.Pin(found.component, found.family, {"implementation": "other"}, found.shares, found.times, found.flops)
    older = pinned.Pin(found.component, found.family, found.code, found.shares, found.times, "flops/v0")
    renamed = [(t, {"memory": 0.4}) for t, _ in taken]
    for old, rows in ((other, taken), (older, taken), (found, renamed)):
        alone = pin.merged(catalogue()[KERNEL], rows, old, package)
        assert alone is not None and set(alone.shares.values()) == {(0.4,) * 5}
    assert pin.merged(catalogue()[KERNEL], taken[:2], other, package) is None


def _at(*hops: str) -> list[tuple[str, pin.Shares]]:
    """Measurements of ranks whose hops took so long (ns); '' where one does not say."""
    found = [(f"at {k}", pin.Shares(cache=0.4)) for k in range(len(hops))]
    for (_, shares), hop in zip(found, hops):
        shares.hop_ns = hop
    return found


def test_a_pin_keeps_the_hop_of_each_measurement() -> None:
    """Of all or of none: what it does not say at which distance is judged as if there were no distances."""
    component, package, near = catalogue()[KERNEL], Package(), ["130", "131", "129", "128", "133"]
    found = pin.merged(component, _at(*near), None, package)
    assert found is not None and found.environment[distance.HOPS].split() == near and distance.hops_of(found) == [130, 131, 129, 128, 133]
    more = pin.merged(component, _at("127"), found, package)
    assert more is not None and distance.hops_of(more) == [130, 131, 129, 128, 133, 127] and len(more.times) == 6
    full = pin.merged(component, _at(*["140"] * (MOST - 1)), found, package)
    assert full is not None and distance.hops_of(full) == [133] + [140] * (MOST - 1), "hops go with the oldest measurements"
    silent = pinned.Pin(found.component, found.family, found.code, found.shares, found.times, found.flops)
    for taken, old in ((_at("127"), silent), (_at(*near[1:], ""), None), (_at(""), found), (_at(*[""] * 5), None)):
        mixed = pin.merged(component, taken, old, package)
        assert mixed is not None and distance.HOPS not in mixed.environment and distance.hops_of(mixed) == []
    plain = pin.merged(component, [(t, dict(shares)) for t, shares in _at(*near)], None, package)
    assert plain is not None and distance.HOPS not in plain.environment, "kernels have no hops"


def test_a_pin_keeps_measurements_at_one_distance() -> None:
    component, package = catalogue()[KERNEL], Package()
    for hops, kept in ((["300", "130", "131", "290", "129", "130", "128"], [1, 2, 4, 5, 6]),
                       (["130", "300", "131", "290", "310", "129", "300", "301"], [1, 3, 4, 6, 7]),  # three near are too few
                       (["300"] * 4 + ["130", "310"] * 5, [4, 6, 8, 10, 12])):  # the nearer, not the most
        taken = _at(*hops)
        for k, (_, shares) in enumerate(taken):
            shares["cache"] = 0.1 + 0.01 * k
        found = pin.merged(component, taken, None, package)
        assert found is not None and distance.hops_of(found) == [float(hops[k]) for k in kept]
        assert found.times == tuple(f"at {k}" for k in kept) and found.shares["cache"] == tuple(0.1 + 0.01 * k for k in kept)
        more = pin.merged(component, _at("129"), found, package)
        assert more is not None and len(more.times) == 5 + (found.environment[distance.HOPS].startswith("13"))
    assert pin.merged(component, _at("300", "130", "131", "290", "129", "130"), None, package) is None, "four are too few"


def test_too_few_measurements_at_one_distance_are_said(tmp_path: Path) -> None:
    left = iter(_at("130", "300", "131", "129", "130"))
    found, lines = _pinned(tmp_path, lambda ids, report: {i: next(left)[1] for i in ids}, measurements=5)
    assert found is None
    said = "fewer than 5 whole measurements at one distance of the cores (a hop took 130, 300, 131, 129, 130 ns)"
    assert any(said in line for line in lines), lines


def test_a_fresh_process_tells_what_a_hop_took(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ((_, shares),) = _at("130")
    monkeypatch.setattr(pin, "one", lambda component: shares)
    pin.child([KERNEL])
    said = capsys.readouterr().out
    monkeypatch.setattr(pin.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=0, stdout=said))
    found = pin._fresh([KERNEL], print)
    assert found == {KERNEL: {"cache": 0.4}} and found[KERNEL].hop_ns == "130"


def test_what_fails_once_is_not_pinned_from_too_few(tmp_path: Path) -> None:
    rounds = iter(range(5))

    def fresh(ids: Sequence[str], report: Callable[[str], None]) -> dict[str, dict[str, float]]:
        return {} if next(rounds) == 2 else {i: {"cache": 0.5} for i in ids}

    found, lines = _pinned(tmp_path, fresh, measurements=5)
    assert found is None and any("fewer than 5" in line for line in lines)


def test_pinning_measures_in_fresh_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, over one small kernel, as it runs; the record that follows is judged by what it wrote."""
    monkeypatch.setattr(pin, "shipped_pins", lambda: Pins(tmp_path / "perf"))
    out = Console(file=StringIO(), width=160)
    assert auditing.cmd_pin(["relu.f32.cpu"] if "relu.f32.cpu" in catalogue() else [KERNEL], measurements=5, console=out) == 0
    key = key_of(machine_class().key, processor())
    (found,) = Pins(tmp_path / "perf").load(key).values()
    assert set(found.shares) == {"cache", "memory"} and all(0 < x <= 1 for s in found.shares.values() for x in s)
    assert len(found.times) == 5 and list(found.times) == sorted(found.times)  # to the second: some share one
    assert all(len(x) == 5 for x in found.shares.values()) and len({*found.shares["cache"], *found.shares["memory"]}) > 2
    assert "1 of 1 components pinned" in out.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("chosen", ["add.bf16.sm90", "all_reduce.sm90", "all_reduce.cpu", KERNEL])
def test_what_is_pinned_is_measured_by_the_gate_s_own_engine(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin of another engine, even of the same op, is of other code and other ceilings."""
    module, _, name = engine_of("perf", catalogue()[chosen]).partition(":")
    told: list[str] = []

    def engine(component: Component, nonce: str | None = None, *, tries: int | None = None) -> object:
        told.append(component.id)
        return perf.make_record(component, "perf", "00", 1, [Share(name="long", share=0.5, times_ns=(1,), ceiling_ns=1)])

    monkeypatch.setattr(importlib.import_module(module), name, engine)
    monkeypatch.setattr(pin, "judge", lambda record: SimpleNamespace(satisfied=True))
    assert pin.one(catalogue()[chosen]) == {"long": 0.5} and told == [chosen]


def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(component: Component, nonce: str | None = None, *, tries: int | None = None) -> object:
        return perf.make_record(component, "perf", "00", 1, [Share(name="cache", share=1.2, times_ns=(1,))])

    monkeypatch.setattr(pin.perf, "measure", broken)
    with pytest.raises(AlphaError, match="cannot be pinned"):
        pin.one(catalogue()[KERNEL])
    with pytest.raises(InputError, match="nothing to pin"):
        pin.timed(catalogue(), ["tokenizer.bpe"] if "tokenizer.bpe" in catalogue() else ["registry.judge"])


# -- what is pinned ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", SHIPPED.keys())
def test_pins_of_the_repository_are_whole(key: str) -> None:
    """Of kernels every one. Of collectives every one or none: a kind of machine that was not measured since they owe the gate has none,
    and says BASELINE of them. A class of GPUs that is no longer the reference lacks what came since; it was whole when it was."""
    found = SHIPPED.load(key)
    owing = {c.id for c in catalogue() if c.kind == "kernel" and family(c) == ("cuda" if key.startswith("cuda") else "cpu")}
    of_ranks = {c.id for c in catalogue() if c.profile == "collective" and key.startswith("cpu")}
    if key.startswith("cuda") and key not in reference_classes(shipped_root()).values():
        assert found and found.keys() <= owing, "pins of what does not exist"
    else:
        assert found.keys() in (owing, owing | of_ranks), "do: alpha gate pin"
    SHIPPED.relative(key)


def test_collectives_are_pinned_on_some_kind_of_machine() -> None:
    asked = {c.id for c in catalogue() if c.profile == "collective"}
    assert asked and any(asked <= SHIPPED.load(key).keys() for key in SHIPPED.keys()), "do: alpha gate pin"


def test_every_reference_record_has_its_pin() -> None:
    """Without it the merge gate is red; here the kinds of machine are named."""
    missing = set()
    for key in reference_classes(shipped_root()).values():
        for path in (shipped_root() / key).glob("*.jsonl"):
            record = None if path.name.startswith("_") else load_file(path).get("perf")
            if record is not None and SHIPPED.of(record) is None:
                missing.add(pinned.key_of_record(record))
    assert not missing, f"no pins of {', '.join(sorted(missing))}; do: alpha gate pin on such a machine"


def test_cross_validated_false_alarms_of_the_pins() -> None:
    """Pinned shares against the line that the others draw, as many in a row as the gate measures before it says FAIL."""
    for key in SHIPPED.keys():
        alarms, trials = pin.false_alarms(SHIPPED.load(key).values(), run.PERF_TRIES)
        low, _ = noise.wilson(alarms, trials)
        assert low <= 0.02, f"{key}: {alarms} of {trials}"


def test_a_lonely_outlier_is_an_alarm() -> None:
    made = pinned.Pin("x", "cuda", {}, {"a": (0.5, 0.5, 0.5, 0.5, 0.5, 0.4)}, ("t",) * 6, "flops/v1")
    assert pin.false_alarms([made])[0] == 1


def test_an_alarm_is_where_no_measurement_of_a_run_reaches_the_line() -> None:
    once = pinned.Pin("x", "cuda", {}, {"a": (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.5)}, ("t",) * 8, "flops/v1")
    slower = replace(once, shares={"a": (0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.4, 0.4)})
    assert pin.false_alarms([once], 3) == (0, 2), "where the slow one is among the others, they are too noisy to judge"
    assert pin.false_alarms([slower], 3) == (1, 1)


def test_published_runs_are_those_whose_speed_the_pages_quote() -> None:
    """Every run file of the GPU is one, or trains with nothing that those do not: what README and docs say of speed is recorded from these.
    Two layers have the components of all."""
    on_gpu = {p.stem for p in (ROOT / "configs").glob("*.toml") if config.load(p).machine.backend == "cuda"}
    asked = merge.published(catalogue())
    assert set(merge.PUBLISHED_RUNS) <= on_gpu
    for name in sorted(on_gpu - set(merge.PUBLISHED_RUNS)):
        cfg = config.load(ROOT / "configs" / f"{name}.toml", ["model.layers=2"])
        used = set(program_for(cfg, cfg.data.vocab, catalogue(), 1).components())
        assert {i for i in used if "perf" in owed(catalogue()[i])} <= asked, name
    assert {"matmul.bf16.sm90", "adamw.f32.sm90", "linear_cross_entropy_grad.bf16.sm90"} <= asked
    assert all(catalogue()[i].backend == "cuda" for i in asked)


@pytest.mark.parametrize("spoil", [
    lambda b: {**b, "components": []}, lambda b: {**b, "format": None}, lambda b: [], lambda b: {"format": 2},
    lambda b: {**b, "components": {"silu.f32.cpu": 3}}, lambda b: {**b, "components": {"silu.f32.cpu": {"content": "00"}}},
])
def test_damaged_pins_are_an_error(tmp_path: Path, spoil: Callable[[Mapping[str, object]], object]) -> None:
    _pinned(tmp_path, _made(*[0.5] * 5), measurements=5)
    (path,) = tmp_path.glob("*.json")
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    with pytest.raises(CorruptError, match="restore the file"):
        Pins(tmp_path).load(path.stem)


def test_a_flipped_byte_is_an_error(tmp_path: Path, seed: int) -> None:
    _pinned(tmp_path, _made(*[0.5] * 5), measurements=5)
    (path,) = tmp_path.glob("*.json")
    whole = path.read_bytes()
    before = Pins(tmp_path).load(path.stem)
    rng = np.random.default_rng(seed)
    for at in rng.integers(0, len(whole), 300):
        spoilt = bytearray(whole)
        spoilt[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(spoilt))
        try:
            found = Pins(tmp_path).load(path.stem)
        except CorruptError:
            continue
        assert found == before or found.keys() != before.keys(), f"byte {at} changed a pin unseen"


def test_allowances() -> None:
    assert all(0 < floor <= WIDEST for floor in FLOOR.values()) and FLOOR["cuda"] == 0.05 and WIDEST == 0.15


def test_docs_show_the_operating_characteristic_and_the_limits() -> None:
    text = (ROOT / "docs" / "gates.md").read_text()
    tables = json.loads((ROOT / "baselines" / "perf" / "operating.json").read_text())
    assert {t["machine"].split("_")[0] for t in tables.values()} == {"cpu", "cuda"}
    for _, t in sorted(tables.items()):
        fails = [r for r in t["table"] if r["source"] == "resampled"]
        cells = " | ".join(f"{r['fail']} of {r['trials']}" for r in fails)
        assert [r["slowdown"] for r in fails] == [0.0, 0.01, 0.02, 0.05]
        line = f"| {t['component']} {t['case']} | {100 * t['pair_spread']:.1f} % | {cells} |"
        assert line in text, f"docs/gates.md lacks: {line}"
        assert fails[0]["fail_interval"][1] <= 0.05 and fails[3]["fail_interval"][0] >= 0.95, line
    plain = re.sub(r"\s+", " ", text)
    assert f"{WIDEST:.0%}".replace("%", " %") + " at most" in plain and "alpha gate pin" in plain
    assert "10 % on a CPU and 5 % on a GPU" in plain and FLOOR == {"cpu": 0.10, "cuda": 0.05}
