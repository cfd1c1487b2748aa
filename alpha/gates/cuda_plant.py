"""Planted faults in device code: a gate of one component over kernels compiled from a broken copy of kernels/. Floor 7.

`prepare` makes a copy of kernels/ per fault and compiles what the component may load from it, so that a GPU machine only runs it: the
compiled files lie in the cache that every machine with this checkout reads. `run_all` then measures the gate in a process of its own per
fault, a few at a time; one that hangs or takes its context down harms no other, and counts as caught, with the error that ended it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import alpha
from alpha.backends.cuda.binaries import sources_of
from alpha.component import Component
from alpha.cudart import compile as nvcc
from alpha.gates import plant
from alpha.registry.faults import Fault, broken, text_of
from alpha.registry.record import Record, canonical

TIMEOUT = 90.0
"""Seconds: start of the process, driver and gate together."""

PACKAGE = Path(alpha.__file__).parent


@contextmanager
def overlay(fault: Fault | None) -> Iterator[Path]:
    """A temporary copy of kernels/ with the fault in it (None: sound)."""
    with tempfile.TemporaryDirectory(prefix="alpha-kernels-") as folder:
        copy = Path(folder) / "kernels"
        shutil.copytree(PACKAGE.parent / "kernels", copy, ignore=shutil.ignore_patterns("checks"))
        if fault is not None:
            (copy / fault.source).write_text(broken(fault, text_of(fault, PACKAGE)), encoding="utf-8")
        yield copy.resolve()


@contextmanager
def compiled_from(kernels: Path) -> Iterator[None]:
    """Within it this process compiles from another folder than kernels/. The cache goes by content, so nothing is mixed up."""
    sound = nvcc.KERNELS
    nvcc.KERNELS = kernels
    try:
        yield
    finally:
        nvcc.KERNELS = sound


def prepare(faults: Sequence[Fault], component: Callable[[str], Component]) -> int:
    """Compile what each fault's component may load from its broken copy; returns how many files. A fault that does not compile raises."""
    count = 0
    for fault in faults:
        with overlay(fault) as kernels, compiled_from(kernels):
            count += len(nvcc.compile_all(sources_of([component(fault.component)])))
    return count


def child(component_id: str, gate: str, kernels: str, answer: str) -> None:
    """What the process of one fault does: measure, judge, write the answer as JSON."""
    from alpha.gates import run, subjects
    from alpha.train.house import house

    def planted(*args: object, **more: object) -> dict[str, str]:
        return {"implementation": "planted"}  # a catch has digests of its own: the sound ones

    subjects.component_digests = planted
    with compiled_from(Path(kernels)):
        component = house()[component_id]
        record = run.measure(component, gate)
        judgement = run.judged(record, component)
    body = {"record": asdict(record), "verdict": judgement.verdict, "reasons": list(judgement.reasons)[:3]}
    Path(answer).write_text(canonical(body), encoding="utf-8")
    os._exit(0)  # a broken context may not come down in order


def run_one(job: plant.Job, fault: Fault | None) -> plant.Outcome:
    """One fault (None: a control on sound code) in a process of its own."""
    component_id, gate = job.attempts[0]
    with overlay(fault) as kernels, tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-c", "import sys; from alpha.gates.cuda_plant import child; child(*sys.argv[1:])", component_id, gate,
                   str(kernels), str(answer)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (str(PACKAGE.parent), *sys.path) if p)}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=job.timeout, env=environment, check=False)
        except subprocess.TimeoutExpired:
            return plant.Outcome(job, error=f"Timeout: the gate did not end within {job.timeout:g} s")
        if not answer.is_file():
            words = (done.stderr.strip().splitlines() or ["no words"])[-1]
            return plant.Outcome(job, error=f"Crash: exit code {done.returncode}: {words}"[:300])
        body = json.loads(answer.read_text(encoding="utf-8"))
    return plant.Outcome(job, ((Record(**body["record"]), body["verdict"], tuple(body["reasons"])),))


def job_of(component: str, gate: str, name: str) -> plant.Job:
    """The job of one gate on one component."""
    return plant.Job(name, ((component, gate),), "", "", timeout=TIMEOUT)


def run_all(faults: Sequence[Fault | None], jobs: Sequence[plant.Job], *, workers: int = 6,
            said: Callable[[plant.Outcome], None] | None = None) -> list[plant.Outcome]:
    """Outcomes in the order of the jobs."""
    def one(pair: tuple[plant.Job, Fault | None]) -> plant.Outcome:
        outcome = run_one(*pair)
        if said is not None:
            said(outcome)
        return outcome

    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(one, zip(jobs, faults)))
