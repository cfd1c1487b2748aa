"""The round trips of docs/hugging-face.md: models of each layout in and out again, and out and in again, with the errors of their logits.

    ALPHA_HF_PYTHON=PATH python suites/support/hf_round_trips.py

PATH is a Python that has torch and transformers. In: transformers makes and saves a model; `alpha checkpoint import` and `export` take it
in and out. Out: a model of the same sizes with other parameters is exported; transformers saves what it loaded. An error is the largest
difference of our logits and theirs, over their largest; both in float32, at every position of one sequence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alpha.checkpoint import folders, hf, safetensors
from alpha.config import Config
from alpha.data.tokenizer import ByteTokenizer
from alpha.gates.contracts import hf as contract
from alpha.graph.state import StateLayout
from alpha.train import hf_tokenizer, hub, rundir
from alpha.train.assemble import program_for, threads_for, vocabulary
from alpha.train.catalogue import catalogue
from alpha.train.engine import open_executor, refresh

SCRIPT = Path(__file__).with_name("hf_fixtures.py")
FILE_BYTES = 100_000
"""Most bytes of a file of what is written in several, each way."""


@dataclass(frozen=True)
class Trip:
    """One model both ways. `tensors`: how many it has there; `files`: in how many transformers saved it; `same_in`, `same_out`: tensors
    that came back with their bits; `error_in`, `error_out`: of the logits; `again`: whether transformers computes the same bits from what
    went in and out as from its own."""

    model: str
    tensors: int
    files: int
    error_in: float
    same_in: int
    error_out: float
    same_out: int
    again: bool

    @property
    def row(self) -> str:
        return (f"| {self.model} | {self.files} | {self.error_in:.1e} | {self.same_in} of {self.tensors} | {self.error_out:.1e} | "
                f"{self.same_out} of {self.tensors} |")


HEAD = """| model | files | error, theirs read here | same bits, in and out | error, ours read there | same bits, out and in |
|---|---|---|---|---|---|"""


def theirs(python: str, *args: str) -> str:
    """Standard output of their Python. AssertionError with what it said where it failed."""
    done = subprocess.run([python, *args], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def logits_of(cfg: Config, sizes: hf.Sizes, layout: StateLayout, flat: np.ndarray, tokens: list[int]) -> np.ndarray:
    """float32 [tokens, vocabulary], by the kernels of the CPU."""
    program = program_for(cfg, sizes["vocab_size"], catalogue(), threads_for(cfg))
    with open_executor(program, catalogue()) as executor:
        executor.state("param")[...] = flat
        refresh(executor)
        made = {"tokens": np.array([tokens], np.int32), "positions": np.arange(len(tokens), dtype=np.int32)[None]}
        wanted = program.plans["decode"].inputs
        found = []
        for i in range(len(tokens)):
            given = {**made, "index": np.array([i], np.int32)}
            found.append(executor.run("decode", {k: given[k] for k in wanted})["logits"][0].copy())
    return np.array(found)


def drawn(layout: StateLayout) -> np.ndarray:
    """float32 parameters, so that a product is as large as what goes in: with larger ones float32 itself errs more than the bound."""
    flat = np.zeros(layout.size, np.float32)
    for t in layout.tensors:
        at = layout.offsets[t.name]
        flat[at : at + t.size] = np.random.default_rng(at).standard_normal(t.size) * (t.shape[-1] ** -0.5 if len(t.shape) > 1 else 0.3)
    return flat


def trips(python: str, at: Path) -> list[Trip]:
    """Every model of `ROUND_TRIPS` in hf_fixtures.py, its folders made in the empty folder `at`."""
    names: dict[str, str] = json.loads(theirs(python, str(SCRIPT), "round-trips", str(at / "in")))
    tokens, _ = contract.expected(contract.fixtures()[0])
    ours: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    saved: list[str] = []
    for key in names:
        source = at / "in" / key
        (source / hf_tokenizer.NAME).write_bytes(hf_tokenizer.files(ByteTokenizer())[0][hf_tokenizer.NAME])
        most = FILE_BYTES if (source / safetensors.INDEX).exists() else safetensors.MOST_SHARD
        run = hub.import_model(f"hf:{source}", at / "runs" / key, catalogue())
        hub.export_run(run, None, at / "in-out" / key, most)
        sizes = hub.sizes_of(imported := rundir.read_config(run), vocabulary(imported, ByteTokenizer().vocab_size))
        cfg = hub.run_file(sizes, "x", at, len(tokens), {})
        layout = program_for(cfg, sizes["vocab_size"], catalogue(), threads_for(cfg)).states["param"]
        flat = np.zeros(layout.size, np.float32)
        folders.load(folders.at(run / "checkpoints"), {"param": (layout, flat)}, some=True)
        other = drawn(layout)
        hf.export(at / "out" / key, sizes, other, layout, eod=0, files={}, most=most)
        ours[key] = logits_of(cfg, sizes, layout, flat, tokens), logits_of(cfg, sizes, layout, other, tokens)
        saved += [str(at / "out" / key), str(at / "out-in" / key), str(most)]
    theirs(python, str(SCRIPT), "save", *saved)
    found = json.loads(theirs(python, str(SCRIPT), "logits", *(str(at / way / key) for way in ("in", "in-out", "out") for key in names)))
    ways = [dict(zip(names, found[i * len(names) :])) for i in range(3)]
    return [
        Trip(name, len(safetensors.folder(at / "in" / key)), len(list((at / "in" / key).glob("*.safetensors"))),
             error(ours[key][0], ways[0][key]), same(at / "in" / key, at / "in-out" / key),
             error(ours[key][1], ways[2][key]), same(at / "out" / key, at / "out-in" / key), ways[0][key] == ways[1][key])
        for key, name in names.items()
    ]


def error(ours: np.ndarray, found: list[list[float]]) -> float:
    """Of logits [tokens, vocabulary]; infinite for those of another shape."""
    want = np.array(found, np.float32)
    return float(np.abs(ours - want).max() / np.abs(want).max()) if ours.shape == want.shape else float("inf")


def same(one: Path, other: Path) -> int:
    """How many tensors of the folder `one` the other one has by that name, with that shape and, in float32, those bits; -1 where the other
    one has tensors of its own."""
    before, after = safetensors.folder(one), safetensors.folder(other)
    if after.keys() - before.keys():
        return -1
    pairs = [(safetensors.read(before[name]), safetensors.read(after[name])) for name in before.keys() & after.keys()]
    return sum(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def main() -> int:
    python = os.environ.get("ALPHA_HF_PYTHON")
    if python is None:
        print("NOT_RUN: ALPHA_HF_PYTHON names no Python with transformers and torch", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="alpha-trips-") as folder:
        found = trips(python, Path(folder))
    print(HEAD, *(trip.row for trip in found), sep="\n")
    return int(any(t.error_in > contract.BOUND or t.error_out > contract.BOUND or not t.again or {t.same_in, t.same_out} != {t.tensors}
                   for t in found))


if __name__ == "__main__":
    sys.exit(main())
