"""Whether a run fits in memory: every limit is read, what is said to fit does, and what does not is refused before anything is made."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import warm

from alpha import cli
from alpha.checkpoint.ranges import place
from alpha.comm.segment import PAYLOAD_BYTES, Segment, ring_bytes
from alpha.config import load
from alpha.errors import MachineError
from alpha.graph.plan import Program
from alpha.train import assemble, memory_check
from alpha.train.catalogue import catalogue

SETTINGS = {
    "model.layers": 2, "model.width": 256, "model.heads": 4, "data.sequence": 64, "train.steps": 4, "train.batch": 8, "train.eval_every": 2,
    "train.checkpoint_every": 2, "train.final_windows": 2, "optim.lr": 1e-3, "machine.threads": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, small_run: Callable[..., Path]) -> Path:
    return small_run(tmp_path_factory.mktemp("memory"), SETTINGS).parent


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """/proc and /sys/fs/cgroup of a made-up machine with 8 GiB free."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n")
    write(proc / "self" / "status", "Name:\tpython\nVmSize:\t  1048576 kB\nVmData:\t  524288 kB\n")
    write(proc / "self" / "cgroup", "0::/\n")
    groups.mkdir()
    return proc, groups


GIB = 1 << 30


def test_free_memory_is_the_limit_where_there_is_no_other(machine: tuple[Path, Path]) -> None:
    assert [(limit.left, limit.addresses) for limit in memory_check.limits(*machine)] == [(8 * GIB, False)]
    assert memory_check.limits(machine[0] / "nothing", machine[1]) == []


def test_version_2_groups_and_those_around_them(machine: tuple[Path, Path]) -> None:
    proc, groups = machine
    write(proc / "self" / "cgroup", "0::/box/job\n")
    for name, most, used in (("box", str(3 * GIB), 2 * GIB), ("box/job", "max", GIB)):
        write(groups / name / "memory.max", f"{most}\n")
        write(groups / name / "memory.current", f"{used}\n")
    write(groups / "box" / "memory.stat", f"anon 5\nactive_file {GIB // 4}\ninactive_file {GIB // 4}\nfile {GIB}\n")
    tightest = memory_check.limits(*machine)[0]
    assert tightest.left == GIB + GIB // 2 and "/box" in tightest.name and not tightest.addresses
    write(groups / "box" / "job" / "memory.max", f"{GIB + 4096}\n")
    assert memory_check.limits(*machine)[0].left == 4096 and "/box/job" in memory_check.limits(*machine)[0].name


def test_version_1_groups_where_the_path_is_that_of_the_host(machine: tuple[Path, Path]) -> None:
    """In a container the path says where the group lies on the host; what is mounted is the group itself."""
    proc, groups = machine
    write(proc / "self" / "cgroup", "9:name=systemd:/\n4:memory,hugetlb:/docker/abc\n0::/\n")
    write(groups / "memory" / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(groups / "memory" / "memory.usage_in_bytes", f"{GIB}\n")
    write(groups / "memory" / "memory.stat", f"total_inactive_file {GIB // 2}\ntotal_active_file 0\ninactive_file 7\n")
    assert memory_check.limits(*machine)[0].left == GIB + GIB // 2
    write(groups / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")  # as without a limit
    assert memory_check.limits(*machine)[0].left == 8 * GIB


def test_a_run_that_does_not_fit_is_refused_with_what_helps(
    root: Path, machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proc, groups = machine
    write(proc / "meminfo", "MemAvailable:    262144 kB\n")
    found = memory_check.limits(proc, groups)
    with monkeypatch.context() as patched:
        patched.setattr(memory_check, "limits", lambda: found)
        assert cli.main(["lab", str(root / "run.toml"), "--set", "run.name=refused"]) == 3
    err = capsys.readouterr().err
    for output in ("does not fit in memory", "0.25 GiB", "MemAvailable", "micro_batch", "recompute", "state", "activations"):
        assert output in err, output
    assert not (root / "runs" / "refused").exists(), "something was made"


def test_a_model_larger_than_any_machine_is_refused_at_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """52 billion parameters; in one layer, for planning 64 of them takes seconds."""
    more = [x for key in ("width=65536", "layers=1", "heads=64") for x in ("--set", f"model.{key}")]
    assert cli.main(["lab", str(root / "run.toml"), *more, "--set", "run.name=huge"]) == 3
    assert "does not fit in memory" in capsys.readouterr().err and not (root / "runs" / "huge").exists()


def test_what_a_plan_needs_grows_with_what_it_is_made_of(root: Path) -> None:
    def need(*more: str) -> memory_check.Need:
        cfg = load(root / "run.toml", list(more))
        return memory_check.need(assemble.program_for(cfg, 257, catalogue(), assemble.threads_for(cfg)))

    base, wide, many = need(), need("model.width=512"), need("machine.threads=4")
    assert wide.state > 3 * base.state and wide.activations > base.activations
    assert many.beside > base.beside and many.reserved > base.reserved and many.state == base.state
    program = assemble.program_for(load(root / "run.toml"), 257, catalogue(), 2)
    assert base.state + base.activations == sum(program.arenas().values())


def test_collectives_of_ranks_take_memory_too(root: Path) -> None:
    """Two partial sums for each level of the tree; where collectives are checked, operands and results of all ranks. A rank's copy of
    what it saves is its share."""
    def beside(ranks: int, checked: bool = False) -> int:
        cfg = load(root / "run.toml", ["train.shards=4"])
        program = assemble.program_for(cfg, 257, catalogue(), 1, ranks)
        launches = [x for plan in program.plans_of(0).values() for x in plan.launches if "group" in x.attrs]
        largest[ranks] = max(r.stop - r.offset for x in launches for r in x.ins)
        return memory_check.need(program, checked=checked).beside - copied(program)

    def copied(program: Program) -> int:
        return place({kind: program.states[kind] for kind in program.plans["snapshot"].outputs}, 0, program.ranks)[1]

    largest: dict[int, int] = {}
    alone = assemble.program_for(load(root / "run.toml", ["train.shards=4"]), 257, catalogue(), 1)
    one = memory_check.need(alone).beside - copied(alone)
    assert [beside(n) - one for n in (2, 4)] == [2 * PAYLOAD_BYTES, 4 * PAYLOAD_BYTES]
    assert [beside(n, True) - beside(n) for n in (2, 4)] == [2 * (1 + n) * largest[n] for n in (2, 4)]


def test_rings_have_their_memory_before_a_run_asks() -> None:
    """A job's memory is reserved when a group is made, so it is missing from what is left when the rest is asked for."""
    segment = Segment.create(2)
    before = os.fstat(segment.fd).st_blocks * 512
    for a, b in ((0, 1), (1, 0)):
        segment.ring(1, a, b)
    assert os.fstat(segment.fd).st_blocks * 512 - before >= 2 * ring_bytes(segment.slots, segment.payload_bytes)
    segment.close()


LIMITED = """
import resource, sys
from pathlib import Path
from alpha import cli
from alpha.train import memory_check
what, used, less = getattr(resource, sys.argv[1]), sys.argv[2], int(sys.argv[3])
real, limits = memory_check.require, memory_check.limits
def used_now():
    return memory_check._fields(Path("/proc/self/status"))[used]
def limited(program, ranks, **words):
    if not resource.getrlimit(what)[0] == resource.RLIM_INFINITY:
        return  # asked again where the executor is opened, with part of it taken
    need = memory_check.need(program)
    def at_once():
        while True:  # what is used when the limit is set is what is used when it is read
            before = used_now()
            resource.setrlimit(what, (before + (need.state if {planted} else need.mapped - less), resource.RLIM_INFINITY))
            found = limits()
            if used_now() == before:
                return found
    if {planted}:
        at_once()
        return
    memory_check.limits = at_once
    try:
        real(program, ranks)
    finally:
        memory_check.limits = limits
memory_check.require = limited
sys.exit(cli.main(sys.argv[4:]))
"""


@pytest.mark.parametrize(("what", "used"), [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
@pytest.mark.parametrize("less", [0, 64 << 20], ids=["fits", "64 MiB less"])
def test_what_is_said_to_fit_does(root: Path, tmp_path: Path, what: str, used: str, less: int) -> None:
    """A real limit, set at exactly what the plan is said to need when it is asked: the run goes to its end. With less it is refused."""
    done = warm.run(["-c", LIMITED.replace("{planted}", "False"), what, used, less, "lab", root / "run.toml", "--set",
                     f"run.out={tmp_path}"], timeout=200)
    if less:
        assert done.returncode == 3 and "does not fit in memory" in done.stderr and "ulimit" in done.stderr, done.stderr
        assert not (tmp_path / "r").exists()
    else:
        assert done.returncode == 0, done.stderr
        assert "order-2 model" in done.stdout


def test_and_without_the_question_it_ends_badly(root: Path, tmp_path: Path) -> None:
    """Planted: nobody asks, and the limit holds little more than the state. The run neither finishes nor says what would help."""
    try:
        done = warm.run(["-c", LIMITED.replace("{planted}", "True"), "RLIMIT_AS", "VmSize", 0, "lab", root / "run.toml", "--set",
                         f"run.out={tmp_path}"], timeout=30)
    except subprocess.TimeoutExpired:
        return  # left spinning
    assert done.returncode != 0 and "does not fit in memory" not in done.stderr


def test_limits_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(memory_check.resource, "getrlimit", lambda what: (1 << 40, 1 << 40) if what == resource.RLIMIT_DATA else real(what))
    data = [limit for limit in memory_check.limits() if "ulimit -d" in limit.name]
    assert len(data) == 1 and data[0].addresses and 0 < data[0].left < 1 << 40


def test_a_program_for_a_gpu_is_its_executors_business(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = assemble.program_for(load(root / "run.toml"), 257, catalogue(), 2)
    monkeypatch.setattr(memory_check, "limits", lambda: [memory_check.Limit("none at all", 0)])
    with pytest.raises(MachineError, match="does not fit"):
        memory_check.require(program)
    monkeypatch.setitem(program.facts, "backend", "cuda")
    memory_check.require(program)
