"""What the engine of a cluster says in the environment of the processes that it starts: Slurm and Kubernetes. Floor 6.

Slurm's `srun` starts a process for each rank, or one on each host that starts the ranks itself. Only what it says of the step counts: a
batch script, or a shell of `salloc`, has variables of the whole job and is one process. An indexed Job of Kubernetes numbers its pods.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass

from alpha.comm.meet import Across
from alpha.errors import InputError
from alpha.train.launch import MOST_DIGITS, secret, streams

PORTS = range(20000, 30000)
"""Jobs of Slurm meet at these ports, each at one of its own: MASTER_PORT names another one. They lie below those that Linux gives away."""
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")


@dataclass(frozen=True)
class Place:
    """Which host of a job this is, as far as an engine says it. `hosts`: how many, 0 where that is not said; `meet`: ADDRESS:PORT of host
    0, '' where that is not said."""

    host: int
    hosts: int = 0
    meet: str = ""


def ranks(environment: Mapping[str, str]) -> Mapping[str, str]:
    """`environment`, with RANK and what belongs to it where Slurm started several processes on each host: each is a rank.

    InputError for a step whose hosts have different numbers of tasks, and for one that does not say who it is.
    """
    step = _step(environment)
    if step is None or step["SLURM_STEP_NUM_TASKS"] == step["SLURM_STEP_NUM_NODES"]:
        return environment
    counts = _tasks(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(set(counts)) != 1 or len(counts) != step["SLURM_STEP_NUM_NODES"]:
        raise InputError("the hosts of a job have the same number of ranks",
                         came=f"SLURM_STEP_TASKS_PER_NODE={environment.get('SLURM_STEP_TASKS_PER_NODE', '')}",
                         expected=f"one number for {step['SLURM_STEP_NUM_NODES']} hosts", do="give srun --ntasks-per-node, and no --ntasks")
    one = step["SLURM_STEP_NUM_NODES"] == 1
    address, port = _meet(environment, step).rsplit(":", 1)
    return {
        **environment,
        "RANK": str(step["SLURM_PROCID"]), "WORLD_SIZE": str(step["SLURM_STEP_NUM_TASKS"]),
        "LOCAL_RANK": str(step["SLURM_LOCALID"]), "LOCAL_WORLD_SIZE": str(counts[0]),
        "MASTER_ADDR": environment.get("MASTER_ADDR", "localhost") if one else address, "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": f"slurm {step['SLURM_JOB_ID']}.{step['SLURM_STEP_ID']}",
    }  # fmt: skip


def place(environment: Mapping[str, str]) -> Place | None:
    """Which host this is, where an engine started one process on each; None where none says so.

    InputError for variables that are no numbers, or for a part of them.
    """
    step = _step(environment)
    if step is not None and step["SLURM_STEP_NUM_TASKS"] == step["SLURM_STEP_NUM_NODES"]:
        return Place(step["SLURM_NODEID"], step["SLURM_STEP_NUM_NODES"], _meet(environment, step))
    if "JOB_COMPLETION_INDEX" in environment:
        return Place(_number(environment, "JOB_COMPLETION_INDEX"))
    return None


def across(args: argparse.Namespace, environment: Mapping[str, str]) -> Across | None:
    """The job's hosts, as --hosts, --host and --meet name them and an engine says where the command line leaves them out; None for this one
    alone. `args` holds the first two of them then. InputError for what does not fit."""
    told, here = place(environment), args.host or (args.meet and args.hosts is None)
    if told is not None and args.hosts in (None, told.hosts or args.hosts):
        args.hosts = args.hosts or told.hosts or None
        args.host = told.host if args.host is None else args.host
        args.meet = args.meet or told.meet
    args.hosts, args.host = 1 if args.hosts is None else args.hosts, args.host or 0
    if args.hosts == 1:
        if here:
            raise InputError("a job on several hosts says how many they are", came=f"--host {args.host}, --meet {args.meet or 'nothing'}",
                             expected="--hosts N", do="add --hosts, or leave out --host and --meet")
        return None
    address, _, port = args.meet.rpartition(":")
    if not 0 <= args.host < args.hosts or args.nproc < 1 or not address or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError("a job on several hosts says where they meet, and which one this is",
                         came=f"--hosts {args.hosts}, --host {args.host}, --nproc {args.nproc}, --meet {args.meet or 'nothing'}",
                         expected=f"--host from 0 to {args.hosts - 1}, --nproc of each, --meet ADDRESS:PORT of host 0",
                         do="give all hosts the same --hosts, --nproc and --meet, and each its own --host")
    return Across(args.host, args.hosts, address, int(port), secret(environment), streams(environment))


def _step(environment: Mapping[str, str]) -> Mapping[str, int] | None:
    """The numbers of a step of Slurm with several tasks; None outside one, and where another launcher started this process inside one."""
    if "SLURM_STEP_ID" not in environment or "RANK" in environment or "WORLD_SIZE" in environment:
        return None
    if environment.get("SLURM_STEP_NUM_TASKS") == "1":
        return None
    return {name: _number(environment, name) for name in _STEP}


def _meet(environment: Mapping[str, str], step: Mapping[str, int]) -> str:
    """Where the first host of a step is met: its name, and a port of the job's own."""
    names = environment.get("SLURM_STEP_NODELIST", "")
    address = environment.get("MASTER_ADDR") or first_host(names)
    port = PORTS[(7 * step["SLURM_JOB_ID"] + step["SLURM_STEP_ID"]) % len(PORTS)]
    return f"{address}:{environment.get('MASTER_PORT') or port}"


def first_host(names: str) -> str:
    """The first one of Slurm's list of hosts: 'rack[1-2]n[07-12,20],login' begins with rack1n07. InputError where there is none."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", names)
    if not first:
        raise InputError("Slurm names no host", came=f"SLURM_STEP_NODELIST={names}", expected="names such as node[1-4]",
                         do="set MASTER_ADDR to an address of the first host")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _tasks(text: str) -> list[int]:
    """Tasks of each host: '2(x3),1' is 2, 2, 2, 1. InputError for other text."""
    found = list[int]()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if not match:
            raise InputError("Slurm does not say how many tasks a host has", came=f"SLURM_STEP_TASKS_PER_NODE={text}",
                             expected="numbers such as 2(x3),1", do="start the job with srun")
        found += int(match[2] or 1) * [int(match[1])]
    return found


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise InputError("the engine of this cluster does not say which process this is", came=f"{name}={text}" if text else f"no {name}",
                         expected=f"{name} as a whole number", do="unset the engine's variables and give --hosts, --host and --meet")
    return int(text)
