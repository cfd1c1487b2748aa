"""Real sessions on a Hopper GPU, through the command line's own path: stop and resume, phases, memory, text, a trace of one step."""

from __future__ import annotations

import sqlite3
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from alpha import config
from alpha.config import Config
from alpha.graph.plan import Program
from alpha.profile.phases import PHASES
from alpha.profile.store import read
from alpha.train.assemble import program_for
from alpha.train.console import Talk
from alpha.train.engine import open_executor
from alpha.train.house import house
from alpha.train.sample import generate, open_run
from alpha.train.session import Outcome, train

pytestmark = pytest.mark.h100

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gpt2-124m.toml"
SHORT = (
    "model.layers=2", "data.vocab=1024", "data.sample=300000", "data.sequence=256", "train.batch=16", "train.shards=2", "train.steps=60",
    "train.eval_every=25", "train.eval_windows=16", "train.final_windows=32", "train.checkpoint_every=30", "train.profile=3",
    "optim.warmup=10",
)  # fmt: skip


def short(root: Path, *more: str) -> Config:
    """GPT-2's run file made small, on the sources of one package of the standard library: 0.4 MB."""
    text = root / "text"
    for source in sorted((Path(sysconfig.get_paths()["stdlib"]) / "email").rglob("*.py")):
        text.mkdir(exist_ok=True)
        (text / f"{source.parent.name}-{source.stem}.txt").write_bytes(source.read_bytes())
    return config.load(CONFIG, [*SHORT, f"run.out={root}/runs", f"data.cache={root}/cache", f"data.corpus={text}", *more])


def bits(path: Path, step: int) -> dict[str, bytes]:
    folder = path / "checkpoints" / f"step-{step:08d}"
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix not in (".json", ".toml")}


@dataclass(frozen=True)
class Made:
    """A finished run and where everything of it lies."""

    root: Path
    cfg: Config
    outcome: Outcome


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("h100")
    cfg = short(root)
    return Made(root, cfg, train(cfg, house(), Talk(), admit=None))


def test_it_learns(made: Made) -> None:
    losses = [loss for _, loss in read(made.outcome.path / "metrics.sqlite", "step_metrics", "step, loss")]
    assert made.outcome.finished and len(losses) == 60
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0, "nats a token"


def test_stopped_and_resumed_ends_in_the_same_bits(made: Made) -> None:
    asked = iter([False] * 41 + [True])
    halted = train(made.cfg, house(), Talk(), admit=None, stop=lambda: next(asked))
    assert (halted.step, halted.finished) == (42, False)
    resumed = train(made.cfg, house(), Talk(), admit=None, resume=halted.path)
    assert bits(resumed.path, 60) and bits(resumed.path, 60) == bits(made.outcome.path, 60)
    assert resumed.validation == made.outcome.validation


def test_phases_add_up_and_little_is_unexplained(made: Made) -> None:
    columns = " + ".join(f"{p}_ns" for p in PHASES)
    rows = read(made.outcome.path / "metrics.sqlite", "step_timing", f"step, wall_ns, {columns}, unexplained_ns, profiled")
    plain = [(wall, unexplained) for _, wall, _, unexplained, profiled in rows[10:] if not profiled]
    assert all(wall == known + unexplained for _, wall, known, unexplained, _ in rows)
    assert sum(u for _, u in plain) < 0.02 * sum(w for w, _ in plain)


def test_memory_is_what_was_planned(made: Made) -> None:
    found = read(made.outcome.path / "metrics.sqlite", "memory", "step, arena, planned, actual")
    arenas = [(planned, actual) for _, _, planned, actual in found if planned is not None]
    assert arenas and all(0 <= actual - planned < 256 for planned, actual in arenas)


def test_the_device_total_of_the_full_model() -> None:
    """What the device gave is the planned arenas and at most 2 % and RESERVE beside them."""
    from alpha.backends.cuda.room import RESERVE

    cfg = config.load(CONFIG, [])
    program: Program = program_for(cfg, cfg.data.vocab, house(), 2)
    with open_executor(program, house()) as executor:
        taken = executor.resident()["device"]
    planned = sum(program.arenas().values())
    assert planned <= taken <= 1.02 * planned + RESERVE


def test_text_is_the_same_twice(made: Made) -> None:
    texts = []
    for _ in range(2):
        executor, tokenizer, step = open_run(made.outcome.path, house())
        with executor:
            assert step == 60
            texts.append(b"".join(generate(executor, tokenizer, b"def ", tokens=24)))
    assert texts[0] and texts[0] == texts[1]


def test_a_profiled_step_names_every_launch(made: Made) -> None:
    with sqlite3.connect(made.outcome.path / "metrics.sqlite") as db:
        per_step = db.execute("select step, sum(count), min(device_ns) from op_profile group by step").fetchall()
        launches = dict(db.execute("select step, launches from step_timing").fetchall())
    assert len(per_step) == 3
    assert all(count == launches[step] and least > 0 for step, count, least in per_step)
