"""Mutants that were drawn by hand and written down before they ran: `python suites/support/drawn_mutants.py DRAW [PREFIX ...]`.

DRAW is 7 to 19. Each mutant of drawn_mutants_DRAW.toml runs alone on a copy of the package. It is asked of the gates that reject faults
planted in its file, the most frequent first, then of ELSEWHERE by folder. Printed are who caught it, and scores by class with their 95 %
intervals. A gate that does not end in time caught nothing that one can be sure of: it is shown apart.
One in a row of an op that they all pass is asked of the merge gate's list of what rows say.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from planted import asked_of

import alpha
from alpha.gates.adversarial import plant
from alpha.profile.noise import wilson
from alpha.registry.catches import LATE
from alpha.registry.gpu import why_not_here
from alpha.tomlfile import read_toml
from alpha.train.catalogue import catalogue

OWED = ("parity", "faults", "determinism")
ELSEWHERE = {
    "train": ("train.loop", "saver.ranks", "registry.status"),
    "comm": ("all_reduce.cpu", "reduce_scatter.cpu", "all_to_all.cpu", "broadcast.cpu", "transport.shm", "transport.tcp", "watch.progress"),
    "checkpoint": ("checkpoint.ranges", "saver.ranks", "checkpoint.hf", "train.loop"),
    "passes": ("schedule.pass", "recompute.pass", "fuse.pass", "select.pass", "memory.pass", "program.step", "data_parallel.pass",
               "executor.cpu"),
    "data": ("sampler.permuted", "sampler.mixed", "sampler.packed", "sampler.bucketed", "sampler.prefetched", "split.by_file", "shards.v2",
             "corpus.prepared", "train.loop"),
    "optim": ("optimizer.adamw", "optimizer.sgd", "schedule.cosine", "schedule.wsd", "program.step", "model.gpt", "data_parallel.pass"),
    "parallel": ("data_parallel.pass", "verify_program.pass", "program.step"),
    "backends": ("executor.cpu", "sum.f32.cpu", "max.f32.cpu", "mean.f32.cpu", "train.loop"),
    "graph": ("verify.pass", "memory.pass", "program.step", "layout.pass", "differentiate.pass", "executor.cpu", "data_parallel.pass",
              "verify_program.pass", "train.loop"),
    "registry": ("registry.judge", "registry.check", "registry.status", "registry.evidence"),
    "models": ("model.gpt", "model.llama", "checkpoint.hf", "train.loop"),
    "flops": ("flops.v1", "train.loop"),
    "ops": ("adamw.f32.cpu", "attention.f32.cpu", "attention_packed.f32.cpu", "dropout.f32.cpu", "model.gpt", "model.llama",
            "optimizer.adamw", "verify.pass", "recompute.pass", "data_parallel.pass", "flops.v1", "train.loop"),
    "report": ("report.figures", "profile.trace", "train.loop"),
    "bench": (),
    "gates": (),  # engines of gates, which no gate is asked about: tests are
    "": ("train.loop", "registry.status"),  # files of the package's first floor, such as config.py
    "profile": ("profile.store", "profile.recorder", "profile.trace", "report.figures", "train.loop"),
}
"""Components whose gates may see what breaks in a folder, beside those that faults of the file are planted for."""

SECONDS = plant.TIMEOUT
"""Of one case that is asked of a mutant."""


def attempts(file: Path, folder: str) -> tuple[tuple[str, str], ...]:
    """The (component, gate) pairs that are asked, in order. A component that cannot run on this machine is left out: it fails on sound code
    too."""
    pairs = dict.fromkeys([*asked_of(file), *((c, gate) for gate in OWED for c in ELSEWHERE[folder])])
    return tuple((c, gate) for c, gate in pairs if not why_not_here(catalogue()[c]))


def job(entry: dict[str, str]) -> plant.Job:
    """The broken file and whom to ask. ValueError unless `find` stands there once."""
    path = Path(alpha.__file__).parent / entry["file"]
    text = path.read_text(encoding="utf-8")
    if text.count(entry["find"]) != 1:
        raise ValueError(f"{entry['id']}: {entry['file']} holds {entry['find']!r} {text.count(entry['find'])} times, expected once")
    folder = entry["file"].rpartition("/")[0].partition("/")[0]
    return plant.Job(entry["id"], attempts(path, folder), entry["file"], text.replace(entry["find"], entry["replace"]), timeout=SECONDS)


def stated(job: plant.Job) -> list[str]:
    """The first items of the merge gate's list that a row of an op no longer agrees with."""
    ask = ("from alpha.registry import asked, statements\nfrom alpha.registry.evidence import shipped_root\n"
           "rows = {k: v for k, v in asked.committed(shipped_root()).items() if k.startswith(asked.ROW)}\n"
           "print(*asked.fallen(rows, {asked.ROW + k: v for k, v in statements.digests().items()})[:2], sep=', ')")
    with tempfile.TemporaryDirectory() as folder:
        plant.copy_package(Path(folder))
        (Path(folder) / "alpha" / job.file).unlink()
        (Path(folder) / "alpha" / job.file).write_text(job.text, encoding="utf-8")
        ended = subprocess.run([sys.executable, "-c", ask], cwd=folder, env={**os.environ, "PYTHONPATH": folder}, text=True,
                               capture_output=True, timeout=SECONDS, check=False)
    return [ended.stdout.strip()] if ended.stdout.strip() else ended.stderr.strip().splitlines()[-1:]


def main(draw: str, prefixes: list[str]) -> None:
    """Run those of a draw whose id begins with one of the prefixes, all by default."""
    drawn = read_toml(Path(__file__).with_name(f"drawn_mutants_{draw}.toml"))["mutant"]
    jobs = [job(entry) for entry in drawn if not prefixes or entry["id"].startswith(tuple(prefixes))]
    caught, of = Counter[str](), Counter[str]()

    def told(outcome: plant.Outcome) -> None:
        late = outcome.error.startswith(LATE)
        component, reasons = "", list[str]()
        if outcome.records:
            record, _, told_by = outcome.records[-1]
            reasons = [*told_by]
            component = f"{record.component} {record.gate}"
        by = outcome.caught_by
        if not by and outcome.job.file.startswith("ops/"):
            reasons = stated(outcome.job)
            by = component = "the merge gate" if reasons else ""
        of[outcome.job.name.partition(".")[0]] += 1
        caught[outcome.job.name.partition(".")[0]] += bool(by and not late)
        fate = "LATE" if late else f"caught by {component or by}" if by else "SURVIVED"
        print(f"{outcome.job.name:38} {outcome.seconds:6.1f} s  {fate}: {outcome.error or ' '.join(reasons)}"[:240], flush=True)

    plant.run_all(jobs, on_result=told)
    for name, n in of.items():
        low, high = wilson(caught[name], n)
        print(f"{name:12} {caught[name]:3} of {n:3}  {low:4.0%} to {high:4.0%}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
