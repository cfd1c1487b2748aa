"""What a bad network does to a run on two hosts: `python suites/support/apart_faults.py [NAME...]` makes the fault table.

Hosts are namespaces (apart.py), packets go over a wire of ours. Each run must end with the bits of one process. Where a host, a rank or
the way between hosts is lost, all others must say so within REPORT_S, and train again within AGAIN_S. The engine of a host that is killed
starts it again after ENGINE_S.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from apart import BOTH, Hosts, Wire, why_not
from apart_runs import PORT, Started, alone, corpus, differs, run_file, start

from alpha.comm.process import Served
from alpha.profile.store import read

STEPS = ["--set", "train.steps=40", "--set", "train.eval_every=20", "--set", "train.checkpoint_every=5", "--set", "train.keep=99"]
STRIKE = 12
"""Steps before the fault comes."""
REPORT_S, AGAIN_S, ENGINE_S = 5.0, 20.0, 1.0
PATIENCE_S = 90.0
"""What a busy machine may take for what takes no time."""
LOST = ("out of reach", "died", "is stopped", "gets on with nothing")
"""Words of a report."""
Both = tuple[float | None, float | None]

WIRES = {
    "clean": Wire(),
    "1 % of packets lost": Wire(loss=0.01),
    "10 ms of delay": Wire(delay_s=0.01),
    "5 ms of delay and up to 10 ms more, which reorders": Wire(delay_s=0.005, jitter_s=0.01),
    "1 % lost, 1 % doubled, 2 ms and up to 3 ms more": Wire(loss=0.01, double=0.01, delay_s=0.002, jitter_s=0.003),
}


class Job:
    """A run on two hosts with a rank each. `began`: when the fault came (CLOCK_MONOTONIC, seconds). `lost`: seconds since then in which its
    processes waited for processors, all together: a machine that is busy elsewhere is no fault of the job."""

    def __init__(self, folder: Path, hosts: Hosts, name: str) -> None:
        self.folder, self.hosts, self.name, self.began = folder, hosts, name, 0.0
        self.path, self._clocks = run_file(folder, name, 1), dict[int, Served]()
        self.ends = [self.start(i) for i in range(2)]

    def start(self, host: int, *more: str) -> Started:
        return start(self.hosts, host, 2, [self.path, "--nproc", "1", "--restarts", "3", *STEPS, *more])

    def reach(self, step: int = STRIKE) -> None:
        """Wait until so many steps are done."""
        until = time.monotonic() + PATIENCE_S
        while not any(end.when(f"step {step}/40") for end in self.ends[:1]):
            if time.monotonic() > until or self.ends[0].process.poll() is not None:
                raise AssertionError(f"{self.name} never came to step {step}: {self.ends[0].text[-400:]}")
            time.sleep(0.01)
        self.began = time.monotonic()

    def _look(self) -> None:
        pending = [end.process.pid for end in self.ends]
        while pending:
            pid = pending.pop()
            with suppress(OSError):
                pending += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                self._clocks.setdefault(pid, Served(pid)).look()

    @property
    def lost(self) -> float:
        return sum(clock.lost for clock in self._clocks.values()) / 1e9

    def reported(self, *hosts: int) -> float | None:
        """Seconds from the fault until the last of these hosts said what it lost; None where one never did."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            moments = [min((m for m in (self.ends[h].when(words, self.began) for words in LOST) if m), default=None) for h in hosts]
            if None not in moments:
                return max(m for m in moments if m) - self.began
            self._look()
            time.sleep(0.02)
        return None

    def again(self) -> float | None:
        """Seconds from the fault to the first step of the next session."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            loops = read(self.folder / "runs" / self.name / "metrics.sqlite", "sessions", "session, loop_ns")
            found = [ns for session, ns in loops if session > 0 and ns and ns / 1e9 > self.began]
            if found:
                return float(min(found)) / 1e9 - self.began
            self._look()
            time.sleep(0.1)
        return None

    def restart(self, host: int) -> None:
        """What the engine of a host does some time after it was lost."""
        time.sleep(ENGINE_S)
        self.ends[host] = self.start(host, "--resume")


# -- faults: what each does; (seconds to the report, to the next session's first step), None where none is to come -----------------


def undisturbed(job: Job) -> Both:
    return None, None


def outage(seconds: float) -> Callable[[Job], Both]:
    """Nothing passes for so long."""
    def strike(job: Job) -> Both:
        job.reach()
        job.hosts.change(Wire(cut=BOTH))
        time.sleep(seconds)
        job.hosts.change(Wire())
        return None, None
    return strike


def partition(*cut: tuple[int, int]) -> Callable[[Job], Both]:
    """Nothing passes these ways until both hosts have said so."""
    def strike(job: Job) -> Both:
        job.reach()
        job.hosts.change(Wire(cut=cut))
        report = job.reported(0, 1)
        job.hosts.change(Wire())
        return report, job.again()
    return strike


def slow(job: Job) -> Both:
    """A host has a quarter of the time, for ten seconds."""
    job.reach(4)
    job.hosts.slow(1, 0.25, 10.0)
    return None, None


def killed(host: int) -> Callable[[Job], Both]:
    """All processes of a host, at once."""
    def strike(job: Job) -> Both:
        job.reach()
        job.hosts.kill(host)
        report = job.reported(1 - host)
        job.restart(host)
        return report, job.again()
    return strike


def half_open(job: Job) -> Both:
    """A host dies while nothing passes: its connections stay open at the other end. Then packets pass again, and its kernel knows none
    of them."""
    job.reach()
    job.hosts.change(Wire(cut=BOTH))
    job.hosts.kill(1)
    time.sleep(0.5)
    job.hosts.change(Wire())
    report = job.reported(0)
    job.restart(1)
    return report, job.again()


def vanished(job: Job) -> Both:
    """The same, and packets pass again only after the report: a host without power."""
    job.reach()
    job.hosts.change(Wire(cut=BOTH))
    job.hosts.kill(1)
    report = job.reported(0)
    job.hosts.change(Wire())
    job.restart(1)
    return report, job.again()


def rank(job: Job) -> Both:
    """One rank of another host."""
    job.reach()
    ranks = read(job.folder / "runs" / job.name / "metrics.sqlite", "sessions", "rank, pid")
    os.kill(int(dict(ranks)[1]), signal.SIGKILL)
    return job.reported(0, 1), job.again()


def flooded(job: Job) -> Both:
    """A third host sends garbage, opens connections and says nothing, and knocks at the port, until the run ends."""
    job.reach(2)
    flood = job.hosts.start(2, [sys.executable, "-c", FLOOD, job.hosts.address(0), str(PORT)], stdout=subprocess.PIPE)
    job.ends[0].wait()
    flood.kill()
    assert flood.stdout is not None
    sent = flood.stdout.read().count(".")
    if sent < 100:
        raise AssertionError(f"{sent} strangers came")
    return None, None


FLOOD = """
import os, socket, sys
kept = []
while True:
    try:
        link = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)
        link.send(os.urandom(200) if len(kept) % 3 else b"")
        kept.append(link)
        print(".", end="", flush=True)
    except OSError:
        pass
    if len(kept) > 80:
        kept.pop(0).close()
"""


def second(job: Job) -> Both:
    """Another job starts at the same address and port: its first host is refused, its second one does not get into the first job."""
    job.reach(2)
    other = run_file(job.folder, f"{job.name}-other", 1)
    first = start(job.hosts, 0, 2, [other, "--nproc", "1", *STEPS])
    late = start(job.hosts, 1, 2, [other, "--nproc", "1", *STEPS], ALPHA_SECRET="another secret of hosts")
    code = first.wait()
    if code == 0 or "this host cannot listen there" not in first.text:
        raise AssertionError(f"the second job's first host ended with {code}: {first.text[-300:]}")
    job.ends[0].wait()
    if late.process.poll() == 0:
        raise AssertionError("the second job's other host found a job")
    late.process.kill()
    late.wait()
    return None, None


STRUCK: dict[str, tuple[Callable[[Job], Both], bool]] = {
    "nothing passes for 1 s": (outage(1.0), False),
    "nothing passes for 3 s": (outage(3.0), False),
    "a host has a quarter of the time": (slow, False),
    "garbage and a flood of a third host": (flooded, False),
    "a second job on the same port": (second, False),
    "partition, to host 1": (partition((0, 1)), True),
    "partition, to host 0": (partition((1, 0)), True),
    "partition, both ways": (partition(*BOTH), True),
    "host 1 is killed": (killed(1), True),
    "host 0 is killed": (killed(0), True),
    "host 1 dies, its connections half open": (half_open, True),
    "host 1 loses its power": (vanished, True),
    "a rank of host 1 is killed": (rank, True),
}
"""Name: what happens, and whether the run is lost and goes on."""


def sample(folder: Path, name: str, one: dict[str, Any], wire: Wire, strike: Callable[[Job], Both], lost: bool) -> tuple[str, str]:
    """One line of the table, and what is wrong."""
    with Hosts(3, wire) as hosts:
        job, began = Job(folder, hosts, name), time.monotonic()
        try:
            report, again = strike(job)
        except AssertionError as error:
            return "", str(error)
        for end in job.ends:
            end.wait()
        wrong = differs(folder, name, one, job.ends)
        said = [line for end in job.ends for _, line in end.said if any(words in line for words in LOST)]
        if lost and (report is None or report - job.lost > REPORT_S or again is None or again - job.lost > AGAIN_S):
            wrong += f" report after {report}, training after {again}, {job.lost:.1f} s of waits for processors"
        if not lost and said:
            wrong += f" a false alarm: {said[0]}"
        figures = f"{report:.1f} s | {again:.1f} s" if report is not None and again is not None else "none | "
        return f"{figures} | {'same bits' if not wrong else wrong} | {time.monotonic() - began:.0f} s", wrong


# -- starts that cannot be ---------------------------------------------------------------------------------------------------------


def port_taken(folder: Path, hosts: Hosts) -> str:
    """A listener of somebody else at the port: the first host says so at once."""
    taker = hosts.start(0, [sys.executable, "-c", "import socket, time; s = socket.create_server(('', 29500)); print('here', flush=True); "
                                                  "time.sleep(60)"], stdout=subprocess.PIPE)
    assert taker.stdout is not None
    taker.stdout.readline()
    first = start(hosts, 0, 2, [run_file(folder, "taken"), "--nproc", "1"])
    code = first.wait()
    taker.kill()
    taker.wait()
    return "" if code and "this host cannot listen there" in first.text else f"exit code {code}: {first.text[-300:]}"


def wrong_secret(folder: Path, hosts: Hosts) -> str:
    """Host 1 has another secret: both say after the deadline who never came."""
    ends = [start(hosts, i, 2, [run_file(folder, "secret"), "--nproc", "1"], ALPHA_SECRET=f"secret number {i} of hosts") for i in range(2)]
    codes = [end.wait() for end in ends]
    right = all(codes) and "hosts never came: 1" in ends[0].text and "host 0 was never met" in ends[1].text
    return "" if right else f"exit codes {codes}: {[e.text[-200:] for e in ends]}"


REFUSED: dict[str, Callable[[Path, Hosts], str]] = {"a port that is taken": port_taken, "another secret": wrong_secret}


def main(*names: str) -> int:
    why, wrong = why_not(tun=True), 0
    if why:
        print(f"NOT_RUN: {why}")
        return 3
    samples = {name: (wire, undisturbed, False) for name, wire in WIRES.items()}
    samples |= {name: (Wire(), strike, lost) for name, (strike, lost) in STRUCK.items()}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        corpus(folder)
        one = alone(folder, "alone", STEPS)
        for number, (name, (wire, strike, lost)) in enumerate(samples.items()):
            if names and name not in names:
                continue
            line, said = sample(folder, f"f{number}", one, wire, strike, lost)
            wrong += bool(said)
            print(f"| {name} | {line or said} |", flush=True)
        for name, refused in REFUSED.items():
            if names and name not in names:
                continue
            began = time.monotonic()
            with Hosts(2) as hosts:
                said = refused(folder, hosts)
            wrong += bool(said)
            print(f"| {name} | {said or f'refused after {time.monotonic() - began:.1f} s'} |", flush=True)
    print(f"{wrong} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
