"""Running a gate on a broken copy of the package, in a process of its own. Floor 7.

A worker process imports NumPy once, and nothing of the package. It owns a temporary copy of the package. For each job it writes the changed
file into the copy and forks; the child imports the package from the copy, runs one gate of one component and sends back the record, or
the error that ended it; then the file is restored. A fork costs a few milliseconds where a fresh interpreter costs half a second.
No bytecode of a changed file is written, and what was cached of it is removed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import alpha
from alpha.errors import MachineError
from alpha.gates import cpu
from alpha.registry.catches import late
from alpha.registry.gates import engine_of
from alpha.registry.record import Record
from alpha.train.catalogue import loadable_catalogue

TIMEOUT = 60.0
"""Seconds after which a gate on a broken component is ended: a hang is found out too, and named so. Contract cases have as long each. A
sound gate takes 3 on an idle core; on cores that others kept busy one took 18, and a limit of 20 was passed."""

MOST = 5.0
"""Times that long for all cases together."""

COMPILED = ".alpha/cubins"
"""The cache of compiled kernels, which a broken copy in Python loads as the sound package does."""

_WORKER = r"""
import gc, json, os, select, signal, sys, time
gc.set_threshold(20_000)  # of what a fork imports nearly all stays: to look for cycles after each 700 objects takes a seventh of its time
FEWER = ("parity", "gradient", "faults")  # gates that measure each contract case once, and by itself
import numpy, threadpoolctl, rich.console, rich.table, unittest.mock, ctypes, subprocess, tempfile, json.decoder
sys.dont_write_bytecode = True
root = sys.argv[1]
package = os.path.join(root, "alpha")
os.chdir(root)
os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
sys.path.insert(0, root)

class Enough(BaseException):  # a case has failed: the others need not be measured
    pass

def one_by_one(cases, job, out, stops):  # those of job["first"] first, each told before it runs; stops: none runs behind one that failed
    failed = []
    def told(name, case):
        def run(rng):
            if failed and stops:
                raise Enough(failed[0])
            os.write(out, (json.dumps({"case": name}) + "\n").encode())
            try:
                measured = case(rng)
            except Exception:  # noted and raised again: the gate records it as a case that failed
                failed.append(name)
                raise
            if not measured.error <= measured.bound:
                failed.append(name)
            return measured
        return run
    chosen = [(name, told(name, case)) for name, case in cases if not job["only"] or name in job["only"]]
    return sorted(chosen, key=lambda case: case[0] not in job["first"])

def child(job, out):
    sys.stdout = sys.stderr = open(os.devnull, "w")
    try:  # a fault may take all memory there is: it is ended then, and nobody else
        open("/proc/self/oom_score_adj", "w").write("1000")
    except OSError:
        pass
    import threadpoolctl
    threadpoolctl.threadpool_limits(limits=1, user_api="blas")
    from dataclasses import asdict
    try:
        if job["apart"]:  # no file of kernels is loaded here before perf is
            import alpha.train.session
            from alpha.ops.table import table
            table()
            from alpha.backends.cpu.served import waiting
            talk, _ = waiting(out)
            from alpha.gates.cpu import process
            from alpha.gates.cpu.declared import Declarations
            process.use(talk)
            declarations = Declarations()
        from alpha.gates import run, subjects
        from alpha.train.catalogue import catalogue
        from alpha.registry.record import canonical
        subjects.component_digests = lambda *a, **k: {"implementation": "planted"}  # a catch has digests of its own: the sound ones
        from alpha.gates.contracts import engine
        whole = engine.contract_cases
        results = []
        for component_id, gate in job["attempts"]:
            component = declarations.of(component_id) if [component_id, gate] in job["apart"] else catalogue()[component_id]
            try:
                engine.contract_cases = lambda *of: one_by_one(whole(*of), job, out, gate in FEWER)
                record, judgement = run.measure(component, gate, job.get("nonce"))
            except Enough as enough:
                engine.contract_cases = lambda *of: [case for case in one_by_one(whole(*of), job, out, False) if case[0] == enough.args[0]]
                record, judgement = run.measure(component, gate, job.get("nonce"))
                if judgement.verdict != "FAIL":  # what failed among others does not alone
                    engine.contract_cases = lambda *of: one_by_one(whole(*of), job, out, False)
                    record, judgement = run.measure(component, gate, job.get("nonce"))
            engine.contract_cases = whole
            results.append({"record": asdict(record), "verdict": judgement.verdict, "reasons": list(judgement.reasons)[:3]})
            if judgement.verdict == "FAIL":
                break
        answer = canonical({"results": results})
    except BaseException as error:
        answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:400]})
    with os.fdopen(out, "w") as f:
        f.write(answer)

for line in sys.stdin:
    job = json.loads(line)
    path = os.path.join(package, job["file"])
    kept = open(path, "rb").read()
    stat = os.stat(path)
    cache = os.path.join(os.path.dirname(path), "__pycache__")
    stem = os.path.basename(path)[:-3] + "."
    for name in os.listdir(cache) if os.path.isdir(cache) else ():
        if name.startswith(stem):
            os.unlink(os.path.join(cache, name))
    with open(path, "w", encoding="utf-8") as f:
        f.write(job["text"])
    back, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(back)
        try:
            child(job, out)
        finally:
            os._exit(0)
    os.close(out)
    began = since = time.monotonic()
    told, ended, seconds, under_way = b"", False, {}, None  # a cheat looks for "case" in frames, and this one is on every stack
    while True:
        left = min(since + job["timeout"], began + job["most"]) - time.monotonic()
        ready, _, _ = select.select([back, 0], [], [], max(0.0, left))
        if 0 in ready and back not in ready:  # no job comes before this one is answered: who asks has ended, and so does all of it
            os.killpg(pid, signal.SIGKILL)
            os._exit(1)
        if not ready:
            break
        chunk = os.read(back, 1 << 16)
        if not chunk:
            ended = True
            break
        *lines, told = (told + chunk).split(b"\n")
        for line in lines:
            now = time.monotonic()
            if under_way is not None:
                seconds[under_way] = now - since
            under_way, since = json.loads(line)["case"], now
    if ended and under_way is not None:
        seconds[under_way] = time.monotonic() - since
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(pid, 0)
    os.close(back)
    with open(path, "wb") as f:
        f.write(kept)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    text = told.decode("utf-8", "replace")
    answer = {}
    if not ended:
        answer["late"] = under_way if under_way is not None and time.monotonic() < began + job["most"] else ""
    elif not text:
        answer["error"] = "Crash: the process died without a word"
    else:
        try:
            answer = json.loads(text)
        except ValueError:
            answer["error"] = "Crash: the process died in the middle of its answer"
    print(json.dumps({**answer, "seconds": seconds}), flush=True)
"""


@dataclass(frozen=True)
class Job:
    """(component, gate) to try in order, with one file of the package replaced; the first FAIL ends it. Contract cases are measured one
    by one, those of `first` before the others, up to the first that fails. `only`: no other cases than these."""

    name: str
    attempts: tuple[tuple[str, str], ...]
    file: str
    text: str
    timeout: float = TIMEOUT
    nonce: str | None = None
    first: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a job: the records in order with their verdicts, or the error that ended the process; and the seconds that it took.
    `cases`: those of each contract case that ended."""

    job: Job
    records: tuple[tuple[Record, str, tuple[str, ...]], ...] = ()
    error: str = ""
    seconds: float = 0.0
    cases: Mapping[str, float] = field(default_factory=dict)

    @property
    def caught_by(self) -> str:
        """The gate that said FAIL; the first gate where the process ended in an error; '' when the fault survived."""
        if self.error:
            return self.job.attempts[0][1]
        return next((r.gate for r, verdict, _ in self.records if verdict == "FAIL"), "")


def copy_package(to: Path) -> None:
    """A copy of the package's folder; the folders that belong to it beside it are linked."""
    source = Path(alpha.__file__).parent
    shutil.copytree(source, to / "alpha", symlinks=True, copy_function=put)
    for beside in ("kernels", "baselines", "configs", "suites", "docs", COMPILED):
        if (source.parent / beside).is_dir():
            (to / beside).parent.mkdir(exist_ok=True)
            os.symlink(source.parent / beside, to / beside)


def put(source: str, target: str) -> str:
    """Copies a file for `shutil.copytree`, its times with it. Compiled Python, half of a package's files, is linked: nobody writes into it,
    for the interpreter puts a new file in its place."""
    return linked(source, target) if source.endswith(".pyc") else str(shutil.copy2(source, target))


def linked(source: str, target: str) -> str:
    """In place of a copy, for `shutil.copytree`: a second name of the same file. Whoever changes it takes that name away first. A copy
    where the two places lie on two file systems, or on one without links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _sits_apart(component_id: str, gate: str) -> bool:
    """Whether a kernel's file is loaded where it is called alone (alpha/gates/cpu/judge_process.py)."""
    known = loadable_catalogue()
    return component_id in known and engine_of(gate, known[component_id]).startswith(f"{cpu.__name__}.")


class Worker:
    """One worker process with its own copy of the package."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="alpha-plant-")
        copy_package(Path(self._folder.name))
        here = Path(alpha.__file__).parent.parent.resolve()
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != here]  # not the sound package
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environment["OPENBLAS_NUM_THREADS"] = "1"  # a fork must not inherit BLAS threads
        self._process = subprocess.Popen([sys.executable, "-c", _WORKER, self._folder.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True, env=environment)

    def run(self, job: Job) -> Outcome:
        """Do one job; MachineError if the worker itself died."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        message = {"attempts": job.attempts, "file": job.file, "text": job.text, "timeout": job.timeout, "nonce": job.nonce,
                   "first": job.first, "only": job.only, "most": MOST * job.timeout,
                   "apart": [a for a in job.attempts if _sits_apart(*a)]}
        began = time.monotonic()
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise MachineError("a worker that runs gates on broken copies died", came=f"exit code {process.poll()}", do="run it again")
        answer: dict[str, Any] = json.loads(line)
        seconds = time.monotonic() - began
        if "late" in answer:
            error = late(answer["late"], job.timeout if answer["late"] else round(seconds))
            return Outcome(job, error=error, seconds=seconds, cases=answer["seconds"])
        if "error" in answer:
            return Outcome(job, error=str(answer["error"]), seconds=seconds, cases=answer["seconds"])
        records = tuple((Record(**r["record"]), r["verdict"], tuple(r["reasons"])) for r in answer["results"])
        return Outcome(job, records, seconds=seconds, cases=answer["seconds"])

    def end(self) -> None:
        """No more jobs: the process ends, and at once what it may be doing."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def close(self) -> None:
        """End the process and remove the copy."""
        self.end()
        self._process.wait(timeout=60)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()


def run_all(jobs: Sequence[Job], *, workers: int = 2, on_result: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """Do all jobs on a few workers; outcomes in the order of the jobs."""
    outcomes: dict[int, Outcome] = {}
    queue = list(enumerate(jobs))
    lock = threading.Lock()
    failures: list[BaseException] = []
    started: list[Worker] = []

    def drain() -> None:
        try:
            worker = Worker()
            started.append(worker)
            try:
                while not failures:
                    with lock:
                        if not queue:
                            break
                        i, job = queue.pop(0)
                    outcome = worker.run(job)
                    with lock:
                        outcomes[i] = outcome
                        if on_result is not None:
                            on_result(outcome)
            finally:
                worker.close()
        except BaseException as error:  # handed to the caller
            failures.append(error)

    threads = [threading.Thread(target=drain) for _ in range(min(workers, len(jobs)))]
    for t in threads:
        t.start()
    try:
        for t in threads:
            t.join()
    except BaseException as error:  # this process is to end
        failures.append(error)
        for worker in started:
            worker.end()
        raise
    if failures:
        raise failures[0]
    return [outcomes[i] for i in range(len(jobs))]
