"""Real sessions on a Hopper GPU, through the command line's own path: stop and resume, phases, memory, text, a trace of one step."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from alpha import config
from alpha.backends.cuda.staging import staging_bytes
from alpha.config import Config
from alpha.cuda_runtime import manifest
from alpha.cuda_runtime.launch import LOADED
from alpha.cuda_runtime.memory import aligned
from alpha.errors import InputError
from alpha.graph.plan import Program
from alpha.profile.noise import WARM_UP
from alpha.profile.phases import PHASES
from alpha.profile.store import read
from alpha.train import forbidden, rundir
from alpha.train.assemble import program_for
from alpha.train.catalogue import catalogue
from alpha.train.console import Printer
from alpha.train.engine import open_executor
from alpha.train.rundir import UNGATED
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
    return Made(root, cfg, train(cfg, catalogue(), Printer(), admit=None))


def test_it_learns(made: Made) -> None:
    losses = [loss for _, loss in read(made.outcome.path / "metrics.sqlite", "step_metrics", "step, loss")]
    assert made.outcome.finished and len(losses) == 60
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0, "nats a token"


def test_stopped_and_resumed_ends_in_the_same_bits(made: Made) -> None:
    asked = iter([False] * 41 + [True])
    halted = train(made.cfg, catalogue(), Printer(), admit=None, stop=lambda: next(asked))
    assert (halted.step, halted.finished) == (42, False)
    resumed = train(made.cfg, catalogue(), Printer(), admit=None, resume=halted.path)
    assert bits(resumed.path, 60) and bits(resumed.path, 60) == bits(made.outcome.path, 60)
    assert resumed.validation == made.outcome.validation


def test_phases_add_up_and_little_is_unexplained(tmp_path: Path) -> None:
    """Twelve layers at 65,536 tokens: a step as long as those that the target, 1 %, is about."""
    cfg = short(tmp_path, "model.layers=12", "data.sequence=1024", "train.batch=64", "train.shards=1", "train.steps=20", "train.profile=1",
                "train.eval_every=0", "train.checkpoint_every=0", "optim.warmup=2")  # fmt: skip
    path = train(cfg, catalogue(), Printer(), admit=None).path
    columns = " + ".join(f"{p}_ns" for p in PHASES)
    rows = read(path / "metrics.sqlite", "step_timing", f"step, wall_ns, {columns}, unexplained_ns, profiled")
    plain = [(wall, unexplained) for _, wall, _, unexplained, profiled in rows[WARM_UP:-1] if not profiled]
    assert len(rows) == 20 and all(wall == known + unexplained for _, wall, known, unexplained, _ in rows)
    assert sum(u for _, u in plain) <= 0.01 * sum(w for w, _ in plain)


def test_memory_is_what_was_planned(made: Made) -> None:
    found = read(made.outcome.path / "metrics.sqlite", "memory", "step, arena, planned, actual")
    arenas = [(planned, actual) for _, _, planned, actual in found if planned is not None]
    assert arenas and all(actual == aligned(planned) for planned, actual in arenas)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_device_total_of_the_full_model(recompute: str) -> None:
    """What the device gave is what was planned within 2 %, once the context's overhead is taken off: loaded kernels and the driver's own
    memory, which a first executor leaves behind."""
    cfg = config.load(CONFIG, [f"train.recompute={recompute}"])
    program: Program = program_for(cfg, cfg.data.vocab, catalogue(), 2)
    planned = sum(aligned(n) for n in program.arenas().values()) + staging_bytes(program)
    for _ in range(2):
        with open_executor(program, catalogue()) as executor:
            for call in program.schedule:  # graphs are captured when they are first needed
                executor.run(call.plan, {k: np.zeros(r.type.shape, np.int32) for k, r in program.plans[call.plan].inputs.items()})
            found = executor.resident()
    assert {n: found[n] for n in program.arenas()} == {n: aligned(size) for n, size in program.arenas().items()}
    assert abs(found["device"] / planned - 1) <= 0.02


def test_a_live_process_holds_what_it_may(made: Made) -> None:
    """From outside: the libraries that a training process has mapped. From inside: the machine code that this one has loaded is what the
    evidence is about."""
    command = [sys.executable, "-m", "alpha.cli", "lab", str(made.outcome.path / "config.toml"), "--set", "run.name=live",
               "--set", "train.steps=100000", "--set", "train.eval_every=0", "--set", "train.checkpoint_every=0"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = made.root / "runs" / "live"
    try:
        deadline = time.monotonic() + 180
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if read(run / "metrics.sqlite", "step_metrics", "count(*)")[0][0] >= 2:
                    break
            except InputError:
                pass  # it is just beginning
            time.sleep(0.1)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, out
    assert "libcuda.so" in maps and forbidden.mapped(maps) == []
    assert LOADED and all(digest == manifest.binary_digest(source) for source, digest in LOADED.items())


def test_a_run_through_the_gate(tmp_path: Path) -> None:
    """`alpha train`, as a user types it: the registry admits each component, the manifest says what was mapped, all of allowed origin."""
    cfg = short(tmp_path, "run.name=gated", "train.steps=12", "train.eval_every=0", "train.checkpoint_every=6", "train.profile=1",
                "train.final_windows=4", "optim.warmup=2")  # fmt: skip
    (tmp_path / "run.toml").write_text(cfg.resolved())
    done = subprocess.run([sys.executable, "-m", "alpha.cli", "train", str(tmp_path / "run.toml")], capture_output=True, text=True,
                          timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "components usable" in done.stdout and UNGATED not in done.stdout
    path = tmp_path / "runs" / "gated"
    found = rundir.read_manifest(path)
    (session,) = found["sessions"]
    assert found["status"] == "GATED" and session["gated"] and session["not_looked_at"] == []
    assert all(found["components"].values()), "each with the evidence that admitted it"
    origins = {entry["origin"].partition(" ")[0] for entry in session["libraries"]}
    assert {"python", "numpy", "system", "driver", "pycuda", "cuda-bindings"} <= origins
    assert len(bits(path, 12)) > 0 and len(read(path / "metrics.sqlite", "step_metrics", "step")) == 12


def test_text_is_the_same_twice(made: Made) -> None:
    texts = []
    for _ in range(2):
        executor, tokenizer, step = open_run(made.outcome.path, catalogue())
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
