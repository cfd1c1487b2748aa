"""What Slurm and Kubernetes say in the environment, and what is made of it: ranks, hosts, where they meet; and what cannot be."""

from __future__ import annotations

import argparse

import pytest

from alpha.comm.meet import Across
from alpha.errors import InputError
from alpha.train import clusters
from alpha.train.clusters import Place, first_host
from alpha.train.launch import seat

SECRET = "0123456789abcdef"
STEP = {"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "ALPHA_SECRET": SECRET}  # fmt: skip
"""What srun sets for the sixth of eight tasks on two nodes."""
PORT = clusters.PORTS[7 * 1234 % len(clusters.PORTS)]


def test_a_task_of_slurm_is_a_rank() -> None:
    found = seat(clusters.ranks(STEP))
    assert found is not None and found.across is not None and clusters.place(STEP) is None
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 8, 1, 4)
    assert (found.across.host, found.across.hosts, found.across.address, found.across.port) == (1, 2, "gpu07", PORT)
    one = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "0",
           "SLURM_STEP_NODELIST": "gpu07", "SLURM_STEP_TASKS_PER_NODE": "2"}
    found = seat(clusters.ranks(one))
    assert found is not None and (found.rank, found.size, found.across) == (1, 2, None) and "localhost" in found.name
    other = seat(clusters.ranks({**one, "SLURM_STEP_ID": "1"}))
    assert other is not None and other.name != found.name  # two steps of a job do not mix


def test_one_task_of_slurm_on_each_node_is_a_host() -> None:
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert seat(clusters.ranks(step)) is None
    assert clusters.place(step) == Place(1, 2, f"gpu07:{PORT}")
    assert clusters.place({**step, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}) == Place(1, 2, "10.0.0.1:29500")


@pytest.mark.parametrize("without", [
    {"SLURM_STEP_ID": None},  # a batch script, or a shell of salloc
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"},  # one task
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"},  # torchrun inside a step
])  # fmt: skip
def test_what_is_no_task_among_others(without: dict[str, str | None]) -> None:
    said = {k: v for k, v in {**STEP, **without}.items() if v is not None}
    assert clusters.ranks(said) == said and clusters.place(said) is None


def test_a_pod_of_an_indexed_job_is_a_host() -> None:
    assert clusters.place({"JOB_COMPLETION_INDEX": "3"}) == Place(3) and clusters.place({}) is None
    with pytest.raises(InputError, match="JOB_COMPLETION_INDEX=three"):
        clusters.place({"JOB_COMPLETION_INDEX": "three"})


@pytest.mark.parametrize(("names", "first"), [
    ("node1", "node1"), ("node[1-4]", "node1"), ("node[007,9-12],login", "node007"), ("rack[1-2]n[07-12]-ib,x", "rack1n07-ib"),
    ("a,b", "a"),
])  # fmt: skip
def test_the_first_host_of_a_list(names: str, first: str) -> None:
    assert first_host(names) == first


@pytest.mark.parametrize(("wrong", "words"), [
    ({"SLURM_STEP_TASKS_PER_NODE": "5,3"}, "SLURM_STEP_TASKS_PER_NODE=5,3"), ({"SLURM_STEP_TASKS_PER_NODE": "4(x3)"}, "4(x3)"),
    ({"SLURM_STEP_TASKS_PER_NODE": "many"}, "many"), ({"SLURM_STEP_TASKS_PER_NODE": "2(x9999999)"}, "x9999999"),
    ({"SLURM_STEP_NODELIST": ""}, "Slurm names no host"),
    ({"SLURM_PROCID": ""}, "no SLURM_PROCID"), ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID=x"), ({"SLURM_LOCALID": "2"}, "LOCAL_RANK=2"),
    ({"SLURM_PROCID": "8"}, "RANK=8"), ({"ALPHA_SECRET": ""}, "no ALPHA_SECRET"), ({"SLURM_NODEID": "9" * 5000}, "SLURM_NODEID=999"),
])  # fmt: skip
def test_what_slurm_may_not_say(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(InputError) as caught:
        seat(clusters.ranks({**STEP, **wrong}))
    assert words in str(caught.value)


@pytest.mark.parametrize(("said", "given", "found"), [
    ({}, {}, (1, 0, "")),
    ({}, {"hosts": 2, "host": 1, "meet": "a:1"}, (2, 1, "a:1")),
    ({"JOB_COMPLETION_INDEX": "1"}, {"hosts": 2, "meet": "a:1"}, (2, 1, "a:1")),
    ({"JOB_COMPLETION_INDEX": "3"}, {}, (1, 3, "")),  # pods that each are a job of their own
    ({"JOB_COMPLETION_INDEX": "1"}, {"hosts": 2, "host": 0, "meet": "a:1"}, (2, 0, "a:1")),
    ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, {}, (2, 1, f"gpu07:{PORT}")),
    ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, {"meet": "b:2"}, (2, 1, "b:2")),
    ({**STEP, "SLURM_STEP_NUM_TASKS": "2"}, {"hosts": 1}, (1, 0, "")),  # the command line counts
])  # fmt: skip
def test_what_the_command_line_leaves_out(said: dict[str, str], given: dict[str, object], found: tuple[int, int, str]) -> None:
    args = argparse.Namespace(**{"nproc": 1, "hosts": None, "host": None, "meet": "", **given})
    across = clusters.across(args, {"ALPHA_SECRET": SECRET, **said})
    assert (args.hosts, args.host, args.meet) == found
    address, _, port = found[2].partition(":")
    assert across == (None if found[0] == 1 else Across(found[1], found[0], address, int(port), SECRET.encode()))
