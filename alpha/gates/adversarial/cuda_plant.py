"""Planted faults in device code: a gate of one component over kernels compiled from a broken copy of kernels/. Floor 7.

`prepare` makes a copy of kernels/ per fault and compiles what the component may load from it, so that a GPU machine only runs it: the
compiled files lie in the cache that every machine with this checkout reads. `run_all` then measures the gate in a process of its own per
fault, a few at a time; one that hangs or takes its context down harms no other, and counts as caught, with the error that ended it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import alpha
from alpha.backends.cuda.binaries import sources_of
from alpha.component import Component
from alpha.cuda_runtime import compile as nvcc
from alpha.errors import InputError
from alpha.gates.adversarial import plant
from alpha.gates.processes import finish, threads
from alpha.registry.catches import late
from alpha.registry.faults import Fault, broken, text_of
from alpha.registry.gates import GATES
from alpha.registry.record import Record, canonical

TIMEOUT = 90.0
"""Seconds: start of the process, driver and gate together."""

CASE = "case"
"""The file, beside the answer, that names the contract case under way."""

WAITING = range(36, 44)
"""Numbers of the faults of concurrency (docs/gates.md): they may leave a kernel waiting for an arrival that never comes."""

WAIT = "common/mbarrier.cuh"
ENDLESS = "    while (!mbarrier_try_wait(barrier, parity)) {\n    }\n"
BOUNDED = """    for (const uint32_t began = clock(); !mbarrier_try_wait(barrier, parity);) {
        const int32_t late = int32_t(uint32_t(clock()) - began) >> 31;
        const uint32_t address = (smem_address(barrier) | late) & ~15u;
        asm volatile("{\\n .reg .b32 nothing;\\n ld.volatile.shared.b32 nothing, [%0];\\n}" ::"r"(address) : "memory");
    }
"""
"""In a copy with a fault of concurrency a wait of 2^31 cycles, some 1 s, ends the kernel in an error, where it would otherwise hold the
device until TIMEOUT: until then the barrier is read once more, from then on the address -16, outside of shared memory. A trap would do
that too, but is a way out of the function, and ptxas then serialises the WGMMA around it (C7512). No launch of a gate takes so long, and
kernels of other faults are what is shipped but for the fault."""

PACKAGE = Path(alpha.__file__).parent


@contextmanager
def overlay(fault: Fault | None, *, planted: bool = True) -> Iterator[Path]:
    """A temporary copy of kernels/ with the fault in it. None, or not `planted`: the sound text, its waits bounded as they are for the
    fault."""
    with tempfile.TemporaryDirectory(prefix="alpha-kernels-") as folder:
        copy = Path(folder) / "kernels"
        shutil.copytree(PACKAGE.parent / "kernels", copy, ignore=shutil.ignore_patterns("checks"))
        if fault is not None and planted:
            (copy / fault.source).write_text(broken(fault, text_of(fault, PACKAGE)), encoding="utf-8")
        if bounded(fault):
            _bound(copy / WAIT)
        yield copy.resolve()


def bounded(fault: Fault | None) -> bool:
    """Whether the copy for a fault gives up waits that do not end."""
    return fault is not None and fault.mirrors in WAITING and fault.gate in GATES


def _bound(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if text.count(ENDLESS) != 1:
        raise InputError("the wait that copies with a fault of concurrency bound is written in another way", expected="1 match",
                         came=f"{text.count(ENDLESS)} matches in {WAIT}", do="mend ENDLESS in alpha/gates/adversarial/cuda_plant.py")
    path.write_text(text.replace(ENDLESS, BOUNDED), encoding="utf-8")


def prepare(faults: Sequence[Fault], component: Callable[[str], Component]) -> int:
    """Compile what each fault's component may load from its broken copy, and from the sound one that is its control; returns how many
    files. A fault that does not compile raises."""
    count = 0
    for fault, planted in [*((f, True) for f in faults), *((f, False) for f in controls(faults))]:
        with overlay(fault, planted=planted) as folder, nvcc.compiling(kernels=folder):
            count += len(nvcc.compile_all(sources_of([component(fault.component)])))
    return count


def child(component_id: str, gate: str, kernels: str, answer: str) -> None:
    """What the process of one fault does: measure, judge, write the answer as JSON; before it, which contract case is under way."""
    from alpha.gates import run, subjects
    from alpha.gates.contracts import engine
    from alpha.train.catalogue import catalogue

    def planted(*args: object, **more: object) -> dict[str, str]:
        return {"implementation": "planted"}  # a catch has digests of its own: the sound ones

    def told(component: Component, gate: str) -> list[engine.ContractCase]:
        return [(name, partial(_told, Path(answer).with_name(CASE), name, case)) for name, case in cases(component, gate)]

    cases = engine.contract_cases
    subjects.component_digests, engine.contract_cases = planted, told
    with nvcc.compiling(kernels=Path(kernels)):
        component = catalogue()[component_id]
        record, judgement = run.measure(component, gate)
    body = {"record": asdict(record), "verdict": judgement.verdict, "reasons": list(judgement.reasons)[:3]}
    Path(answer).write_text(canonical(body), encoding="utf-8")
    os._exit(0)  # a broken context may not come down in order


def _told(path: Path, name: str, case: Callable[..., Any], *given: object) -> Any:
    path.write_text(name, encoding="utf-8")
    return case(*given)


def run_one(job: plant.Job, fault: Fault, *, planted: bool = True) -> plant.Outcome:
    """One fault (not `planted`: its control, on sound code) in a process of its own."""
    component_id, gate = job.attempts[0]
    with overlay(fault, planted=planted) as kernels, tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        text = "import sys; from alpha.gates.adversarial.cuda_plant import child; child(*sys.argv[1:])"
        command = [sys.executable, "-c", text, component_id, gate, str(kernels), str(answer)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (str(PACKAGE.parent), *sys.path) if p)}
        began = time.monotonic()
        code, printed = finish(command, timeout=job.timeout, environment=environment)
        seconds = time.monotonic() - began
        if code is None:
            case = answer.with_name(CASE)
            return plant.Outcome(job, error=late(case.read_text(encoding="utf-8") if case.is_file() else "", job.timeout), seconds=seconds)
        if not answer.is_file():
            words = (printed.strip().splitlines() or ["no words"])[-1]
            return plant.Outcome(job, error=f"Crash: exit code {code}: {words}"[:300], seconds=seconds)
        body = json.loads(answer.read_text(encoding="utf-8"))
    return plant.Outcome(job, ((Record(**body["record"]), body["verdict"], tuple(body["reasons"])),), seconds=seconds)


def job_of(component: str, gate: str, name: str) -> plant.Job:
    """The job of one gate on one component."""
    return plant.Job(name, ((component, gate),), "", "", timeout=TIMEOUT)


def controls(faults: Sequence[Fault]) -> list[Fault]:
    """One fault for each gate and way of waiting among them, whose copy unplanted must pass."""
    return list({(f.component, f.gate, bounded(f)): f for f in faults}.values())


def alone(job: plant.Job) -> bool:
    """Whether a job looks at the memory of the whole device, as the executor's gate of faults does: no other may use it meanwhile."""
    return any(gate == "faults" for _, gate in job.attempts)


def run_all(faults: Sequence[Fault], jobs: Sequence[plant.Job], *, workers: int = 6, planted: bool = True,
            on_result: Callable[[plant.Outcome], None] | None = None) -> list[plant.Outcome]:
    """Outcomes in the order of the jobs; those that must be alone run when the others have ended."""
    def one(pair: tuple[plant.Job, Fault]) -> plant.Outcome:
        outcome = run_one(*pair, planted=planted)
        if on_result is not None:
            on_result(outcome)
        return outcome

    pairs = list(zip(jobs, faults))
    together = [p for p in pairs if not alone(p[0])]
    with threads(workers) as pool:
        done = {job.name: outcome for (job, _), outcome in zip(together, pool.map(one, together))}
    done |= {job.name: one((job, fault)) for job, fault in pairs if alone(job)}
    return [done[job.name] for job in jobs]
