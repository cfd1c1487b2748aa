"""Each figure of a run that the docs quote has a run file in configs/, and a command that makes its text."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from alpha import config
from alpha.data.corpus import open_corpus
from alpha.train.catalogue import catalogue
from alpha.train.planned import plan_run

ROOT = Path(__file__).parents[2]
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
TEXTS = "examples/torch_sources.py"


def run_file(record: dict[str, Any]) -> str:
    """The run file of a record of a step, `step-NAME`, or of a whole run on a GPU, `run-NAME`."""
    kind, _, name = record["subject"].partition("-")
    return f"{name}.toml" if kind == "step" else f"{name}-whole.toml"


PATHS = sorted(path for kind in ("step", "run") for path in (ROOT / "baselines" / "bench").glob(f"cuda_*/{kind}-*.json"))
RECORDS = [json.loads(path.read_bytes()) for path in PATHS]


def test_there_are_records() -> None:
    assert len(RECORDS) >= 4 and {r["subject"].partition("-")[0] for r in RECORDS} == {"step", "run"}


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r["subject"])
def test_a_figure_has_its_run_file(record: dict[str, Any]) -> None:
    """It is named in the docs, plans to the FLOPs of the record, and takes as many steps as the run."""
    cfg = config.load(ROOT / "configs" / run_file(record))
    assert f"`configs/{run_file(record)}`" in BENCHMARKS
    assert float(f"{plan_run(cfg, catalogue(), cfg.data.vocab).flops.per_token:.6g}") == record["flops"]["per_token"]
    if record["subject"].startswith("run-"):
        assert (cfg.run.name, cfg.train.steps) == (record["run"], record["steps"])
        plain = config.load(ROOT / "configs" / f"{record['run']}.toml")
        assert (cfg.model, cfg.data.vocab, cfg.train.batch, cfg.data.sequence) == (
            plain.model, plain.data.vocab, plain.train.batch, plain.data.sequence)


@pytest.mark.parametrize("path", sorted(p for p in (ROOT / "reports").iterdir() if (p / "report.md").exists()), ids=lambda p: p.name)
def test_a_report_has_its_run_file(path: Path) -> None:
    """A pair of runs has one for both. The docs name it, and its last step lies in the last span of steps of the report's curve."""
    run_file = f"{path.name.removesuffix('-pair')}.toml"
    cfg = config.load(ROOT / "configs" / run_file)
    assert f"`configs/{run_file}`" in BENCHMARKS
    losses = [line.split(",") for line in (path / "csv" / "loss.csv").read_text().splitlines() if ",loss," in line]
    starts = sorted(int(step) for run, _, step, *_ in losses if run == cfg.run.name)
    span = max(b - a for a, b in pairwise(starts))
    assert starts[-1] < cfg.train.steps <= starts[-1] + span


def test_the_command_makes_the_text_of_the_run_files(tmp_path: Path) -> None:
    """Out of a made-up wheel: sources alone. The run files read what it makes, and it says that this is not what the runs read."""
    texts = {f"torch/{name}": f"def f{i}():\n    return {i}\n" * 40 for i, name in enumerate(("a.py", "_C/b.py", "nn/c.py"))}
    with zipfile.ZipFile(tmp_path / "torch.whl", "w") as wheel:
        for name, text in {**texts, "torch/lib/libtorch.so": "x", "torch/empty.py": "", "torchgen/d.py": "y = 1\n"}.items():
            wheel.writestr(name, text)
    done = subprocess.run([sys.executable, ROOT / TEXTS, "torch.whl"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "3 texts" in done.stdout and "another text" in done.stderr, done.stderr
    for record in RECORDS:
        cfg = config.load(ROOT / "configs" / run_file(record))
        if record["subject"].startswith("run-"):
            corpus = open_corpus(str(tmp_path / cfg.data.corpus))
            assert [d.relpath for d in corpus.documents] == ["_C/b.py", "a.py", "nn/c.py"] and corpus.hash in done.stdout
        else:
            assert cfg.data.corpus == "stdlib"
    assert f"python {TEXTS}" in BENCHMARKS and not list(tmp_path.rglob("*.so")) and not (tmp_path / "texts" / "torchgen").exists()


def test_the_text_that_is_made_is_that_of_the_pinned_bits() -> None:
    """The command's hash is the one that stands beside the hashes of the recorded runs, whose first loss is that of the report."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import torch_sources  # type: ignore[import-not-found, unused-ignore]
    finally:
        sys.path.pop(0)
    log = (ROOT / "docs" / "log" / "structure.md").read_text()
    assert f"hash\n{torch_sources.SHA256[:16]})" in log and "steps 1 and 2 of GPT-2 are 0x1.5f5a8cp+3" in log
    losses = (ROOT / "reports" / "gpt2-124m-whole" / "csv" / "loss.csv").read_text().splitlines()
    (first,) = (line.split(",")[3] for line in losses if line.startswith("gpt2-124m,loss,0,"))
    assert float(first) == float.fromhex("0x1.5f5a8cp+3")
