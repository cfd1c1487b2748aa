"""The bit table of ranks on GPUs: S logical shards on one GPU against as many GPUs, to the last bit, and across resumes.

    python suites/support/device_rank_bits.py OUT.json [--ranks 2] [--steps 300] [--batch 64] [--zero 0,1] [--dry]

Trains GPT-2 124M (configs/gpt2-124m.toml) on text with `train.shards` = ranks: on one GPU, on all with each `train.zero`; then each run
goes on from its checkpoint at five sixths of its steps with the other number of ranks. Losses, norms, learning rates of all steps, the
last validation and a hash of each kind of state must be those of one GPU. A `train.zero` that ranks on GPUs refuse is told as refused.
`--dry`: a small model on emulated GPUs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import warm
import xxhash

from alpha.checkpoint import folders
from alpha.gates.contracts.engine import child_environment
from alpha.profile.store import read
from alpha.registry.gpu import asked, gpu_class
from alpha.resources import ROOT

HERE = Path(__file__).parent
SMALL = ("model.layers=1", "model.width=128", "model.heads=2", "model.vocab_size=0", "data.vocab=264", "data.sequence=32",
         "data.sample=20000", "data.validation=0.3")
"""In place of GPT-2's, for emulated GPUs."""

REFUSED = "the optimizer's state is cut over ranks in f32 on the CPU alone"


class Table:
    """Runs in a folder, and what each left."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.late = args.steps * 5 // 6
        text = folder / "text"
        if args.dry:
            text.mkdir()
            for i in range(12):
                (text / f"{i}.txt").write_text(" ".join(f"def word{j * i % 37} return" for j in range(300)))
        self.set = ["data.vocab=1024", "data.sample=200000", "model.vocab_size=50304", "data.baseline=false", f"train.shards={args.ranks}",
                    f"train.batch={args.batch}", f"train.steps={args.steps}", f"train.checkpoint_every={self.late}", "train.keep=9",
                    "train.eval_every=0", "train.final_windows=16", "train.profile=0", "optim.warmup=2", f"run.out={folder}/runs",
                    f"data.cache={folder}/cache", *((*SMALL, f"data.corpus={text}") if args.dry else ())]  # fmt: skip

    def run(self, name: str, ranks: int, zero: int = 0, at: int | None = None) -> dict[str, Any]:
        """`alpha lab` on so many ranks; `at`: the run goes on from that checkpoint."""
        began, path = time.monotonic(), self.folder / "runs" / name
        words = ["lab", str(path), "--resume", "--at", str(at)] if at is not None else [
            "lab", str(ROOT / "configs" / "gpt2-124m.toml"), *(f"--set={x}" for x in (*self.set, f"run.name={name}", f"train.zero={zero}"))]
        words += ["--nproc", str(ranks)] if ranks > 1 else []
        if self.args.dry:
            emulated = [HERE / "emulated_launch.py", self.folder, json.dumps({"gpus": self.args.ranks}), "--"]
            done = warm.run([*emulated, *words], cwd=ROOT, timeout=500)
        else:
            done = subprocess.run([sys.executable, "-m", "alpha", *words], cwd=ROOT, capture_output=True, text=True, timeout=500,
                                  check=False, env=child_environment())
        found = {"ranks": ranks, "zero": zero, "from": at, "code": done.returncode, "seconds": time.monotonic() - began}
        if done.returncode:
            return {**found, "text": (done.stderr + done.stdout).strip()[-800:]}
        return {**found, **left(path)}


def left(path: Path) -> dict[str, Any]:
    """Numbers of every step, the validations, and a hash of each kind of state in every checkpoint."""
    database, checkpoints = path / "metrics.sqlite", path / "checkpoints"
    return {"steps": [list(x) for x in sorted(read(database, "step_metrics", "step, loss, norm, lr"))],
            "validation": [list(x) for x in sorted(read(database, "evaluations", "step, bits_per_byte"))],
            "state": {str(s): {kind: xxhash.xxh3_128_hexdigest(x.data) for kind, (_, x) in folders.read(folders.at(checkpoints, s)).items()}
                      for s in folders.steps(checkpoints)}}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not the same, the first place of each; [] for the same bits. Nothing that is missing is the same."""
    if one.get("code") or other.get("code"):
        return [f"exit code {one.get('code')} and {other.get('code')}: {other.get('text') or one.get('text')}"]
    if not one["steps"] or not one["state"] or not other["state"]:
        return ["there is nothing to compare"]
    last = max(one["state"], key=int)
    said = [f"step {a[0]}: {a[1:]} and {b[1:]}" for a, b in zip(one["steps"], other["steps"]) if a != b][:1]
    said += [] if len(one["steps"]) == len(other["steps"]) else [f"{len(one['steps'])} and {len(other['steps'])} steps"]
    said += [] if one["validation"] == other["validation"] else ["another validation"]
    if last not in other["state"]:
        return [*said, f"no checkpoint of step {last}"]
    for step in sorted(one["state"].keys() & other["state"].keys(), key=int):
        said += [f"state {kind} of step {step}" for kind, digest in one["state"][step].items() if other["state"][step].get(kind) != digest]
    return said


def table(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    t, rows, began = Table(args, folder), [], time.monotonic()
    alone = t.run("alone", 1)
    if alone["code"]:
        raise SystemExit(alone["text"])
    for zero in args.zero:
        name = f"ranks-zero{zero}"
        many = t.run(name, args.ranks, zero)
        refused = zero > 0 and many["code"] == 2 and REFUSED in many["text"]
        differs = [] if refused else differences(alone, many)
        rows.append({"what": f"{args.ranks} GPUs, zero = {zero}", "refused": refused, "differs": differs, "seconds": many["seconds"],
                     "text": many.get("text", "")})
        if many["code"] == 0:
            again = t.run(name, 1, zero, t.late)
            rows.append({"what": f"{args.ranks} GPUs, zero = {zero}, from step {t.late} on one", "refused": False,
                         "differs": differences(alone, again), "seconds": again["seconds"], "text": again.get("text", "")})
    again = t.run("alone", args.ranks, 0, t.late)
    rows.append({"what": f"one GPU, from step {t.late} on {args.ranks}", "refused": False, "differs": differences(alone, again),
                 "seconds": again["seconds"], "text": again.get("text", "")})
    here = gpu_class(args.ranks)
    return {"hardware": "emulated" if args.dry or here is None else here.key, "driver": asked().driver, "ranks": args.ranks,
            "shards": args.ranks, "steps": args.steps, "batch": args.batch, "seconds": time.monotonic() - began,
            "first_and_last_loss": [alone["steps"][0][1], alone["steps"][-1][1]], "state": alone["state"], "rows": rows}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="default: 300, or 6 of a dry run")
    parser.add_argument("--batch", type=int, default=0, help="default: 64, or 4 of a dry run")
    parser.add_argument("--zero", type=lambda text: [int(x) for x in text.split(",")], default=[0, 1])
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(words)
    args.steps, args.batch = args.steps or (6 if args.dry else 300), args.batch or (4 if args.dry else 64)
    if not args.dry and len(asked().gpus) < args.ranks:
        print(f"NOT_RUN: {args.ranks} ranks want a GPU each: {asked().why or f'{len(asked().gpus)} here'}", file=sys.stderr)
        return 3
    folder = Path(tempfile.mkdtemp(prefix="alpha-bits-"))
    try:
        found = table(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"| run | against one GPU with {args.ranks} shards, {args.steps} steps | s |\n|---|---|---|")
    for row in found["rows"]:
        print(f"| {row['what']} | {'refused' if row['refused'] else '; '.join(row['differs']) or 'same bits'} | {row['seconds']:.0f} |")
    return int(any(row["differs"] for row in found["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
