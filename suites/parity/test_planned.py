"""`alpha plan`: the parts add up to the Program, and a plan needs no memory for what it plans."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from alpha import cli, config
from alpha.graph.plan import Plan
from alpha.train.house import house
from alpha.train.planned import PARTS, Planned, plan_run

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


@pytest.fixture(scope="module")
def planned() -> Planned:
    return plan_run(config.load(DEMO, ["train.recompute='block'", "train.shards=2", "train.micro_batch=4"]), house(), 1000)


def executed(plans: dict[str, Plan], p: Planned) -> int:
    return sum(plans[s.plan].flops() for s in p.program.schedule)


def test_parts_add_up_to_what_the_program_executes(planned: Planned) -> None:
    assert tuple(planned.executed) == PARTS and sum(planned.executed.values()) == executed(planned.program.plans, planned)
    assert all(n > 0 for n in planned.executed.values())
    m, cfg = planned.executed, config.load(DEMO)
    width, layers, tokens = cfg.model.width, cfg.model.layers, planned.tokens_per_step
    # by hand: forward and both gradients of the products with the 4 d^2 weights of attention and the 8 d^2 of the feed-forward
    assert m["attention projections"] == pytest.approx(3 * 2 * tokens * layers * 4 * width**2, rel=0.01)
    assert m["feed-forward"] == pytest.approx(3 * 2 * tokens * layers * 8 * width**2, rel=0.05)
    assert m["head"] == pytest.approx(3 * 2 * tokens * width * 1000, rel=0.05)


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
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path / "run.toml")], capture_output=True, text=True, timeout=240)
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
