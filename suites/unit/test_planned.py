"""`alpha plan`: the parts add up to the Program, and a plan needs no memory for what it plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import warm

from alpha import cli, config
from alpha.errors import ConfigError
from alpha.flops import executed as flops
from alpha.flops.parts import DIRECTIONS, PARTS
from alpha.graph.plan import Plan
from alpha.train.catalogue import catalogue
from alpha.train.planned import Planned, plan_run

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO, GPT2 = CONFIGS / "demo.toml", CONFIGS / "gpt2-124m.toml"


@pytest.fixture(scope="module")
def planned() -> Planned:
    return plan_run(config.load(DEMO, ["train.recompute='block'", "train.shards=2", "train.micro_batch=4"]), catalogue(), 1000)


def executed(plans: dict[str, Plan], p: Planned) -> int:
    return sum(plans[s.plan].flops() for s in p.program.schedule)


def test_parts_add_up_to_what_the_program_executes(planned: Planned) -> None:
    assert planned.executed == executed(planned.program.plans, planned)
    assert planned.model_flops_per_step == planned.flops.per_token * planned.tokens_per_step
    assert {part for part, _ in planned.parts} == set(PARTS) and {to for _, to in planned.parts} == set(DIRECTIONS)
    cfg, p = config.load(DEMO), planned.parts
    width, layers, tokens, seq = cfg.model.width, cfg.model.layers, planned.tokens_per_step, cfg.data.sequence
    # by hand: the products with the 4 d^2 weights of attention and the 8 d^2 of the feed-forward, once forward and twice back
    by_hand = {"attention projections": layers * 4 * width**2, "attention scores": layers * seq * width,
               "feed-forward": layers * 8 * width**2, "head": width * 1000}
    for part, forward in by_hand.items():
        assert p[part, "forward"][0] == 2 * tokens * forward and p[part, "backward"][0] == 4 * tokens * forward, part
        assert p[part, "forward"][1] == pytest.approx(2 * tokens * forward, rel=0.05), part
        assert p[part, "backward"][1] == pytest.approx((5 if part == "attention scores" else 4) * tokens * forward, rel=0.05), part
    for part in ("attention projections", "attention scores", "feed-forward"):  # a block is computed twice
        assert p[part, "recompute"][0] == 0 and 0.4 * p[part, "forward"][1] < p[part, "recompute"][1] <= p[part, "forward"][1]
    assert all(useful == 0 for (part, _), (useful, _) in p.items() if part in ("embedding", "norms and others", "optimizer"))


def test_a_part_that_goes_missing_is_seen(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: recompute is left out, the head's gradient counts as forward, one run of a Segment is forgotten."""
    monkeypatch.setitem(flops._DIRECTION, "recompute", "backward")
    assert not any(to == "recompute" for _, to in flops.executed(planned.program))
    monkeypatch.undo()
    fused = plan_run(config.load(GPT2), catalogue(), 50304)
    assert fused.parts["head", "backward"][1] == pytest.approx(2 * fused.parts["head", "forward"][1], rel=0.01)
    monkeypatch.setattr(flops, "_WITH_GRADIENT", {})
    assert ("head", "backward") not in {k for k, n in flops.executed(fused.program).items() if n > fused.parts["head", "forward"][1]}
    monkeypatch.undo()
    fewer = replace(planned.program, schedule=planned.program.schedule[1:])
    assert sum(flops.executed(fewer).values()) < planned.executed


def test_bytes_are_those_of_the_arenas(planned: Planned) -> None:
    arenas = planned.program.arenas()
    assert sum(planned.state_bytes.values()) == sum(n for k, n in arenas.items() if k.startswith("state."))
    assert planned.state_bytes["moments"] == 2 * planned.state_bytes["parameters"]
    assert planned.peak_bytes == sum(arenas.values()) and max(planned.activations.values()) == arenas["act"]
    assert planned.parameters == sum(t.size for t in planned.program.states["param"].tensors)


SEVENTY = """
[run]
name = "seventy"
[model]
family = "llama"
layers = 80
width = 8192
heads = 64
kv_heads = 8
hidden = 28672
tied = false
[data]
vocab = 32000
sequence = 4096
[train]
steps = 1000
batch = 1
recompute = "block"
[optim]
lr = 1e-4
"""

LIMITED = """
import resource, sys
from alpha import cli
code = cli.main(["plan", sys.argv[1]])
print("peak KiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


def test_seventy_billion_parameters_are_planned_without_their_memory(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SEVENTY)
    done = warm.run(["-c", LIMITED, tmp_path / "run.toml"], timeout=240)
    assert done.returncode == 0, done.stderr
    # Llama 2 70B: 80 (2 d^2 + 2 d 1024 + 3 d 28672 + 2 d) + 2 * 32000 d + d with d = 8192
    assert "parameters   68,976,648,192" in done.stdout
    assert int(done.stdout.rsplit("peak KiB", 1)[1]) < 4 << 20


def test_the_command_says_where_its_vocabulary_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(DEMO), "--table", "update"]) == 0
    assert "adamw.f32.cpu" in capsys.readouterr().out
    assert cli.main(["plan", str(DEMO)]) == 0
    out = capsys.readouterr().out
    assert "as configured" in out and "adamw.f32.cpu" in out and "on the one device" in out
    assert cli.main(["plan", str(DEMO), "--table", "nothing"]) == 2


@pytest.mark.parametrize(("sets", "came", "do"), [
    (["model.head_dim=80"], "model.head_dim = 80", "change model.head_dim"),
    (["model.heads=8"], "model.width 2048 / model.heads 8 = 256", "change model.head_dim"),
    (["model.family='gpt'", "model.kv_heads=0", "model.hidden=0", "model.heads=128"], "model.width 2048 / model.heads 128 = 16",
     "change model.heads or model.width"),
])
def test_a_width_of_heads_that_no_kernel_of_the_gpu_takes_is_named_by_its_key(sets: list[str], came: str, do: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_run(config.load(CONFIGS / "llama-1b.toml", sets), catalogue(), 512)
    assert error.value.came == came and error.value.expected == "64, 96, 128 channels a head" and do in str(error.value.do)


def test_widths_that_a_kernel_takes_are_planned() -> None:
    for width in (64, 96, 128):
        plan_run(config.load(CONFIGS / "llama-1b.toml", [f"model.head_dim={width}", "model.layers=1"]), catalogue(), 512)


def test_exchanges_of_many_ranks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(CONFIGS / "ranks.toml"), "--nproc", "4"]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("exchange")]
    text = [" ".join(words) for words in said]
    assert len(text) == 10 and all("group dp, stream comm" in line for line in text)
    assert sum("micro_last@1 (shard 1, microbatch 0)" in line for line in text) == 5 == sum("update (no text)" in line for line in text)
    assert cli.main(["plan", str(DEMO)]) == 0 and "exchange" not in capsys.readouterr().out


def test_ranks_on_gpus_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """No GPU is needed. Every unit is summed once over the ranks, in bytes all of the gradients."""
    asked = ["plan", str(GPT2), "--set", "train.shards=2", "--set", "train.micro_batch=16", "--set", "model.layers=2"]
    assert cli.main([*asked, "--nproc", "2"]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    sums = [(line[5].rstrip(","), int(line[1].replace(",", ""))) for line in said if line[0] == "exchange"]
    assert [unit for unit, _ in sums] == ["~stats", "head", "block.1", "block.0", "embedding"]
    assert [sum(n for _, n in sums)] == [int(line[1].replace(",", "")) for line in said if "state.grad0" in line]
    assert any("all_reduce.sm90" in line for line in said) and any(line[:1] == ["peak"] and line[-2:] == ["rank", "0"] for line in said)
    assert cli.main([*asked, "--set", "train.zero=1", "--nproc", "2"]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    ops = [(line[3], line[5].rstrip(",")) for line in said if line[0] == "exchange"]
    cut = {"head", "block.1", "block.0", "embedding"}
    assert {unit for op, unit in ops if op == "reduce_scatter"} == cut == {unit for op, unit in ops if op == "all_gather"}
    assert len(ops) == 10 and any("scalars_of_squares.f32.sm90" in line for line in said)


@pytest.mark.parametrize(("command", "ranks", "words"), [
    ("plan", "0", "0 ranks"), ("plan", "-2", "-2 ranks"), ("plan", "3", "--nproc out of 2"), ("gate", "0", "0 ranks")])  # fmt: skip
def test_ranks_that_training_refuses_are_refused_before(command: str, ranks: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(CONFIGS / "ranks.toml")
    asked = {"plan": ["plan", source], "gate": ["gate", "run", "--for", source]}[command]
    assert cli.main([*asked, "--nproc", ranks]) == 2 and words in capsys.readouterr().err
