"""Cases of what launchers and engines of clusters say in the environment, and which rank or host that makes of a process. Floor 7.

Jobs are drawn: so many hosts with so many processes each, spelled as Slurm, torchrun and Kubernetes spell them; who a process is follows
from the draw. What does not fit is refused by all its words.
"""

# mypy: disable-error-code="arg-type"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

import argparse
import socket
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha.comm.meet import Across
from alpha.comm.segment import MOST_STREAMS
from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.train import clusters, launch
from alpha.train.clusters import Place
from alpha.train.launch import Seat

SECRET = "0123456789abcdef"


class _Job:
    """A drawn job of Slurm, as one of its processes sees it."""

    def __init__(self, rng: np.random.Generator, hosts: int, each: int) -> None:
        self.hosts, self.each, self.rank = hosts, each, int(rng.integers(hosts * each))
        self.job, self.step = int(rng.integers(1, 99999)), int(rng.integers(9))
        self.host, self.local = divmod(self.rank, each)
        self.first, names = [("node1", "node1,node7"), ("gpu07", "gpu[07-12,20],login"), ("rack1n03-ib",
            "rack[1-2]n[03,07-12]-ib,x")][int(rng.integers(3))]
        self.environment = {
            "SLURM_JOB_ID": str(self.job), "SLURM_STEP_ID": str(self.step), "SLURM_STEP_NUM_TASKS": str(hosts * each),
            "SLURM_STEP_NUM_NODES": str(hosts),
            "SLURM_PROCID": str(self.rank), "SLURM_LOCALID": str(self.local), "SLURM_NODEID": str(self.host), "SLURM_STEP_NODELIST": names,
            "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{hosts})" if hosts > 1 else f"{each}", "ALPHA_SECRET": SECRET}
        self.port = 20000 + (7 * self.job + self.step) % 10000

    def refused(self, kind: str, what: str, came: str, expected: str, do: str, **wrong: str | None) -> tuple[str, str]:
        """What a changed environment ends in, and what it must."""
        own = {k: v for k, v in {**self.environment, **wrong}.items() if v is not None}
        return said(lambda: clusters.ranks(own)), error_text(kind, what, came, expected, do)


def slurm(rng: np.random.Generator) -> Measured:
    """A process of a step with several tasks on each host is a rank, one that is alone on its host is a host, and one outside of a step, or
    started by another launcher inside one, is what that says; where they meet is the first host and a port of the step's own."""
    checks: Named = []
    for hosts, each in ((1, 2), (1, 7), (3, 2), (2, 4), (2, 1), (5, 1)):
        j = _Job(rng, hosts, each)
        address = j.first if hosts > 1 else "localhost"
        for more, met in (({}, (address, j.port)), ({"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"}, ("10.0.0.9", 29500)),
                          ({"MASTER_ADDR": ""}, None)):
            environment = {**j.environment, **more}
            found = clusters.ranks(environment)
            if each == 1:
                address, port = met or (j.first, j.port)
                same(checks, "a host", (found is environment, clusters.place(environment)), (True,
                                                                                            Place(j.host, hosts, f"{address}:{port}")))
                continue
            if met is None:
                continue
            same(checks, "no host", clusters.place(environment), None)
            own = {"RANK": str(j.rank), "WORLD_SIZE": str(hosts * each), "LOCAL_RANK": str(j.local), "LOCAL_WORLD_SIZE": str(each),
                   "MASTER_ADDR": met[0], "MASTER_PORT": str(met[1]), "TORCHELASTIC_RUN_ID": f"slurm {j.job}.{j.step}"}
            same(checks, "a rank", found, {**environment, **own})
            with instead(launch, _require_here=lambda address: None):
                seat = launch.seat(found)
            name = f"{met[0]} {met[1]} slurm {j.job}.{j.step}"
            across = Across(j.host, hosts, met[0], met[1], SECRET.encode()) if hosts > 1 else None
            same(checks, "its seat", seat, Seat(j.rank, hosts * each, j.local, f"{name} {j.host}" if across else name, across))
            same(checks, "of its host", seat and seat.local_size, each)
        for without in ({"SLURM_STEP_ID": None}, {"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}, {"WORLD_SIZE": "2"}):
            environment = {k: v for k, v in {**j.environment, **without}.items() if v is not None}
            same(checks, f"{without}", (clusters.ranks(environment) is environment, clusters.place(environment)), (True, None))
    j = _Job(rng, 2, 4)
    alike, number = "the hosts of a job have the same number of ranks", "the engine of this cluster does not say which process this is"
    for tasks in ("5,3", "4(x3)", "4"):
        checks.append((tasks, *_equal(*j.refused("InputError", alike, f"SLURM_STEP_TASKS_PER_NODE={tasks}", "one number for 2 hosts",
                                                 "give srun --ntasks-per-node, and no --ntasks", SLURM_STEP_TASKS_PER_NODE=tasks))))
    for tasks in ("many", "", "4(x2", "4,,4"):
        checks.append((tasks, *_equal(*j.refused("InputError", "Slurm does not say how many tasks a host has",
                                                 f"SLURM_STEP_TASKS_PER_NODE={tasks}",
                                                 "numbers such as 2(x3),1", "start the job with srun",
                                                 SLURM_STEP_TASKS_PER_NODE=tasks or None))))
    for name in ("SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        for text in ("x", "-1", None):
            checks.append((name, *_equal(*j.refused("InputError", number, f"{name}={text}" if text else f"no {name}",
                                                    f"{name} as a whole number",
                                                    "unset the engine's variables and give --hosts, --host and --meet", **{name: text}))))
    for names in ("", ",a", "["):
        checks.append((names, *_equal(*j.refused("InputError", "Slurm names no host", f"SLURM_STEP_NODELIST={names}",
                                                 "names such as node[1-4]",
                                                 "set MASTER_ADDR to an address of the first host", SLURM_STEP_NODELIST=names or None))))
    for text, counts in (("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2(x2),10", [1, 2, 2, 10])):
        same(checks, text, clusters._tasks(text), counts)
    for names, first in (("node1", "node1"), ("node[007,9-12],login", "node007"), ("a,b", "a"), ("r[1-2]n[07-12]-ib,x", "r1n07-ib"),
                         ("n[3]", "n3")):
        same(checks, names, clusters.first_host(names), first)
    return all_hold(checks)


def _equal(got: str, expected: str) -> tuple[bool]:
    assert got == expected, f"{got} for {expected}"
    return (True,)


def hosts(rng: np.random.Generator) -> Measured:
    """The hosts of a job are those of the command line, and what that leaves out the engine's; what lacks then, or cannot be, is
    refused."""
    checks: Named = []
    j = _Job(rng, 3, 1)
    met = f"{j.first}:{j.port}"
    pod = {"JOB_COMPLETION_INDEX": "1", "ALPHA_SECRET": SECRET}
    alone = {"ALPHA_SECRET": SECRET, "ALPHA_STREAMS": "3"}
    for environment, given, found, streams in (
            (alone, {}, (1, 0, ""), 0), (alone, {"hosts": 2, "host": 1, "meet": "a:1"}, (2, 1, "a:1"), 3),
            (alone, {"hosts": 4, "meet": "::1:65535"}, (4, 0, "::1:65535"), 3),
            (pod, {"hosts": 2, "meet": "a:1"}, (2, 1, "a:1"), 1), (pod, {}, (1, 1, ""), 0), (pod, {"hosts": 2, "host": 0, "meet": "a:1"},
                                                                                             (2, 0, "a:1"), 1),
            (j.environment, {}, (3, j.host, met), 1), (j.environment, {"meet": "b:2"}, (3, j.host, "b:2"), 1),
            (j.environment, {"hosts": 1}, (1, 0, ""), 0),
            (j.environment, {"hosts": 3, "host": 2}, (3, 2, met), 1), (j.environment, {"hosts": 2, "host": 1, "meet": "c:3"}, (2, 1, "c:3"),
                                                                       1)):
        args = argparse.Namespace(**{"nproc": 1, "hosts": None, "host": None, "meet": "", **given})
        across = clusters.across(args, environment)
        address, _, port = found[2].rpartition(":")
        same(checks, f"{given}", ((args.hosts, args.host, args.meet), across), (found, Across(
            found[1], found[0], address, int(port), SECRET.encode(), streams) if streams else None))
    for given in ({"hosts": 2, "host": 2}, {"hosts": 2, "host": -1}, {"hosts": 2, "meet": ""}, {"hosts": 2, "meet": ":5"},
                  {"hosts": 2, "meet": "a:x"}, {"hosts": 2, "meet": "a:0"},
                  {"hosts": 2, "meet": "a:65536"}, {"hosts": 2, "nproc": 0}, {"hosts": 0}, {"hosts": 2, "meet": "a"}):
        own: dict[str, Any] = {"nproc": 1, "host": 0, "meet": "a:1", **given}
        same(checks, f"{given}", said(lambda: clusters.across(argparse.Namespace(**own), alone)), error_text(
            "InputError", "a job on several hosts says where they meet, and which one this is",
            f"--hosts {own['hosts']}, --host {own['host']}, --nproc {own['nproc']}, --meet {own['meet'] or 'nothing'}",
            f"--host from 0 to {own['hosts'] - 1}, --nproc of each, --meet ADDRESS:PORT of host 0",
            "give all hosts the same --hosts, --nproc and --meet, and each its own --host"))
    for lonely in ({"host": 5}, {"meet": "a:1"}, {"host": 1, "hosts": 1}):  # a worker whose --hosts was forgotten
        own = {"nproc": 1, "hosts": None, "host": None, "meet": "", **lonely}
        same(checks, f"{lonely}", said(lambda: clusters.across(argparse.Namespace(**own), alone)), error_text(
            "InputError", "a job on several hosts says how many they are", f"--host {own['host'] or 0}, --meet {own['meet'] or 'nothing'}",
            "--hosts N", "add --hosts, or leave out --host and --meet"))
    same(checks, "a pod", (clusters.place(pod), clusters.place({})), (Place(1), None))
    same(checks, "no pod", said(lambda: clusters.place({"JOB_COMPLETION_INDEX": "three"})), error_text(
        "InputError", "the engine of this cluster does not say which process this is", "JOB_COMPLETION_INDEX=three",
        "JOB_COMPLETION_INDEX as a whole number", "unset the engine's variables and give --hosts, --host and --meet"))
    return all_hold(checks)


def seats(rng: np.random.Generator) -> Measured:
    """The seat that torchrun's variables give, on one host and on several; none where none is given; a part of them, numbers that do not
    fit, an address of another host, a secret that can be guessed, and numbers of connections that cannot be are refused."""
    checks: Named = []
    same(checks, "none", launch.seat({"MASTER_PORT": "1"}), None)
    hosts, each, port = int(rng.integers(2, 5)), int(rng.integers(2, 5)), int(rng.integers(1, 60000))
    rank = int(rng.integers(hosts * each))
    host, local = divmod(rank, each)
    base = {"RANK": str(rank), "WORLD_SIZE": str(hosts * each), "MASTER_PORT": str(port)}
    many = {**base, "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(each), "MASTER_ADDR": "far", "TORCHELASTIC_RUN_ID": "id",
            "ALPHA_SECRET": SECRET}
    asked = list[str]()
    with instead(launch, _require_here=asked.append):
        same(checks, "one host", launch.seat(base), Seat(rank, hosts * each, rank, f"localhost {port} "))
        own = {**base, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": base["WORLD_SIZE"], "MASTER_ADDR": "near"}
        same(checks, "its own number", launch.seat(own), Seat(rank, hosts * each, 0, f"near {port} "))
        for streams in (None, "5"):
            found = launch.seat({**many, **({"ALPHA_STREAMS": streams} if streams else {})})
            same(checks, "several", found, Seat(rank, hosts * each, local, f"far {port} id {host}", Across(
                host, hosts, "far", port, SECRET.encode(), int(streams or 1))))
            same(checks, "of its host", found and found.local_size, each)
    same(checks, "asked of one host alone", asked, ["localhost", "near"])
    alike = "the hosts of a job have the same number of ranks, one after the other"
    none = "the environment gives a rank that its job has not"
    look = "look at what the launcher sets"
    for wrong, what in (
            ({"RANK": str(hosts * each)}, none), ({"LOCAL_RANK": str(hosts * each)}, none),
            ({"LOCAL_RANK": str(local + each)}, alike),
            ({"LOCAL_WORLD_SIZE": "0"}, alike), ({"LOCAL_WORLD_SIZE": str(hosts * each + 1)}, alike),
            ({"WORLD_SIZE": str(hosts * each + 1)}, alike)):
        e = {**many, **wrong}
        if what == none:
            text = error_text("InputError", what, f"RANK={e['RANK']}, LOCAL_RANK={e['LOCAL_RANK']}, WORLD_SIZE={e['WORLD_SIZE']}",
                              f"ranks from 0 to {hosts * each - 1}", look)
        else:
            text = error_text("InputError", what,
                f"RANK={rank}, LOCAL_RANK={e['LOCAL_RANK']}, LOCAL_WORLD_SIZE={e['LOCAL_WORLD_SIZE']}, WORLD_SIZE={e['WORLD_SIZE']}",
                              "RANK = host LOCAL_WORLD_SIZE + LOCAL_RANK", look)
        same(checks, f"{wrong}", said(lambda: launch.seat(e)), text)
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        for text in ("x", "", None):  # type: ignore[assignment]
            e = {k: v for k, v in {**many, name: text}.items() if v is not None}
            if text is not None or not name.startswith("LOCAL"):
                same(checks, f"{name}={text}", said(lambda: launch.seat(e)), error_text(
                    "InputError", "the environment is not that of a rank", f"{name}={text}" if text else f"no {name}",
                    "RANK, WORLD_SIZE and MASTER_PORT as whole numbers", "set all of them, or unset RANK and WORLD_SIZE and use --nproc"))
    for text, came in (("", "no ALPHA_SECRET"), ("a" * 15, "ALPHA_SECRET of 15 characters")):
        same(checks, came, said(lambda: launch.seat({**many, "ALPHA_SECRET": text})), error_text(
            "InputError", "hosts of a job know each other by a secret", came, "16 characters or more, the same on all hosts",
            "on one host `openssl rand -hex 16`; set it on all, by the launcher's own means"))
    for text in (0, MOST_STREAMS + 1):  # type: ignore[assignment]
        same(checks, f"{text} connections", said(lambda: launch.streams({"ALPHA_STREAMS": str(text)})), error_text(
            "InputError", "two ranks have another number of connections", f"ALPHA_STREAMS={text}", f"1 to {MOST_STREAMS}"))
    same(checks, "connections", [launch.streams({"ALPHA_STREAMS": str(n)}) for n in (1, MOST_STREAMS)], [1, MOST_STREAMS])
    bound = list[object]()

    def at(refused: bool) -> SimpleNamespace:
        class Probe:
            """A socket that is bound, or not."""

            def __init__(self, *kind: object) -> None:
                bound.append(kind)

            def bind(self, place: object) -> None:
                """Bind it."""
                bound.append(place)
                if refused:
                    raise OSError(99, "Cannot assign requested address")

            def __enter__(self) -> Probe:
                return self

            def __exit__(self, *error: object) -> None:
                bound.append("closed")

        return SimpleNamespace(SOCK_STREAM=socket.SOCK_STREAM, socket=Probe, getaddrinfo=lambda name, port,
                               type: [("family", "kind", 6, "", (name, port))])

    for refused in (False, True):
        bound.clear()
        with instead(launch, socket=at(refused)):
            same(checks, "here", said(lambda: launch._require_here("host")), error_text(
                "InputError", "the ranks of a job are on one host", "MASTER_ADDR=host (Cannot assign requested address)",
                "an address of this host, such as localhost", "start all ranks here") if refused else "None")
        same(checks, "probed", bound, [("family", "kind", 6), ("host", 0), "closed"])
    return all_hold(checks)
