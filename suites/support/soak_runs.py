"""Whole runs whose ranks are killed and stopped at random moments: `python suites/support/soak_runs.py --each 200`.

A disturbed run is supervised and suffers one fault in each of its starts, FAULTS at most: a sample is one start that was struck. The
supervisor goes on from the last good checkpoint, with 1, 2 or 4 ranks, or fewer where a start got no further. Saves run beside the
steps. Half of the moments are drawn from the processor time of a rank, the others from the file operations of a save.

What must hold of a sample: the job ended because of the rank that was struck, and nobody else; it is told how. Of a run: the bits of one
process, checkpoints too; no process is left, nothing in a /dev/shm of its own, no folder of an unfinished save. Undisturbed runs have no
error. With `--hosts 2` all runs are undisturbed ones of two hosts: whoever is accused there, is so falsely.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import ranked_runs
from shm import apart, nothing_left

from alpha.train import peak

WORDS = "def return self value None import for in if else while class".split()
SAME = ("steps", "evaluations", "samples")
KILL, STOP = "kill-after", "stop-after"
HOW = {KILL: "killed by SIGKILL)", STOP: "because it did not answer)"}
FAULTS = 8
"""Of one disturbed run, at most."""
LIMITS = {"join": 60.0, "stall": 1.0, "abort": 1.0}
"""Seconds after which a rank is given up here, and then killed; 5 s each by default."""
POINTS = {True: 24, False: 6}
"""Moments of a save: of the first rank, which also makes the folder and the checkpoint, and of another one."""
LONG, SHORT = ["train.steps=24", "train.eval_every=6"], ["train.steps=6"]
"""Settings of disturbed runs, and of others."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--each", type=int, default=20, help="undisturbed runs, ranks that are killed, and ranks that are stopped")
    parser.add_argument("--hosts", type=int, default=1, choices=(1, 2, 4), help="2 or 4: undisturbed runs on so many hosts, and no others")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, began = random.Random(given.seed), time.monotonic()
    peak.REPEATS, peak.COPIES, peak.COPY_BYTES = 2, 1, 1 << 20
    found, wrong, report = Counter[str](), 0, time.monotonic()
    seconds: dict[str, list[float]] = defaultdict(list)
    print("/dev/shm is", "this soak's own" if apart() else "everybody's: a file that others leave there is taken for the soak's")
    with tempfile.TemporaryDirectory() as made, nothing_left():
        folder = Path(made)
        (folder / "text").mkdir()
        for i in range(12):
            (folder / "text" / f"{i}.txt").write_text("\n".join(" ".join(rng.choices(WORDS, k=8)) for _ in range(60)))
        alone = {length: ranked_runs.ran(folder, {"name": f"alone{length}", "ranks": 1, "set": [*steps, "train.keep=99"]})
                 for length, steps in enumerate((SHORT, LONG))}
        whole = _processor_time(folder)
        while any(found[fault] < given.each for fault in (("none", KILL, STOP) if given.hosts == 1 else ("none",))):
            disturbed = given.hosts == 1 and found["none"] >= min(given.each, found[KILL], found[STOP])
            job = drawn(rng, whole, found) if disturbed else {
                "name": "soak", "hosts": given.hosts, "ranks": rng.choice((2, 4)) if given.hosts < 4 else 4, "zero": rng.randrange(2),
                "set": SHORT, "deadlines": LIMITS}
            r = ranked_runs.ran(folder, job)
            struck = [line.split() for line in _lines(folder / "runs" / "soak.struck")]
            problem = judged(r, alone[disturbed], struck, job)
            for fault in job.get("faults", [])[: len(struck)]:
                found[fault["plant"]] += 1
                found[f"{fault['plant']} in a save of {job['ranks']}"] += "save" in fault
            found["runs that were disturbed" if disturbed else "none"] += 1
            for (_, moment), ended in zip(struck, r["ended"]):
                seconds[job["faults"][0]["plant"]].append(ended - float(moment))
            if problem:
                wrong += 1
                print(f"{problem}: {job}: {r['code']}, {r['error']}, struck {struck}, checkpoints {list(r.get('checkpoints', ()))}, "
                      f"said {r['said']}", flush=True)
            shutil.rmtree(folder / "runs" / "soak", ignore_errors=True)
            (folder / "runs" / "soak.struck").unlink(missing_ok=True)
            if time.monotonic() - report > 60:
                report = time.monotonic()
                print(f"{report - began:.0f} s: {dict(found)}, {wrong} wrong", flush=True)
    for fault, times in seconds.items():
        print(f"{fault}: from the fault to the end of the job {np.median(times):.1f} s in the middle, {max(times):.1f} s at most")
    print(f"seed {given.seed}: {dict(found)}; {time.monotonic() - began:.0f} s; {wrong} wrong")
    return int(bool(wrong))


def drawn(rng: random.Random, whole: float, found: Counter[str]) -> dict[str, Any]:
    """A disturbed run. Its faults are of one kind, of which there are fewer so far."""
    plant, ranks = min((KILL, STOP), key=lambda name: found[name]), rng.choice((1, 2, 4))
    faults = []
    for _ in range(FAULTS):
        fault: dict[str, Any] = {"plant": plant, "victim": rng.randrange(ranks)}
        if rng.random() < 0.5:
            fault |= {"save": rng.randint(1, 2), "point": rng.randrange(POINTS[not fault["victim"]])}
        else:
            fault |= {"after": rng.uniform(0, whole)}
        faults.append(fault)
    return {"name": "soak", "ranks": ranks, "zero": rng.randrange(2), "restarts": FAULTS + 1, "fewest": min(2, ranks), "deadlines": LIMITS,
            "faults": faults, "set": [*LONG, f"train.keep={rng.choice((2, 99))}"]}


def judged(r: dict[str, Any], alone: dict[str, Any], struck: list[list[str]], job: dict[str, Any]) -> str:
    """'' when a run ended as it should."""
    if r["code"] or any(r.get(what) != alone[what] for what in SAME):
        return "another end than that of one process"
    steps = [s for s in alone["checkpoints"] if not job["set"][-1].endswith("keep=2") or s in sorted(alone["checkpoints"])[-2:]]
    if r["checkpoints"] != {s: alone["checkpoints"][s] for s in steps}:
        return "other checkpoints than those of one process"
    if [name for name in r["held"] if name.startswith(".")] or _lines(Path("/proc/thread-self/children")):
        return "something is left behind"
    if len(r["said"]) != len(struck):
        return f"{len(struck)} ranks were struck, {len(r['said'])} were lost"
    for (rank, _), said, fault in zip(struck, r["said"], job.get("faults", ())):
        lines = said.splitlines()
        account = [line for line in lines if line.startswith(f"rank {rank} ended (")]
        if f"rank {rank} " not in lines[0] or len(account) != 1 or HOW[fault["plant"]] not in account[0]:
            return f"rank {rank} was struck"
    return ""


def _processor_time(folder: Path) -> float:
    """Of a rank, from its start to the end of a short run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ranked_runs.ran(folder, {"name": "whole", "ranks": 4, "set": SHORT})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 4


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    raise SystemExit(main())
