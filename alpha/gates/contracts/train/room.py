"""Cases of what a machine has room for and what it can do: memory that a run needs and memory that there is, what is planned before
anything exists, executors and GPUs of ranks, the look of the doctor. Floor 7.
"""

# mypy: disable-error-code="arg-type,func-returns-value"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha import config
from alpha import cores as counted
from alpha.component import Catalogue, Component, Measured
from alpha.errors import InputError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.gates.contracts.train.made import RUN
from alpha.train import assemble, doctor, engine, memory_check, planned
from alpha.train.catalogue import catalogue
from alpha.train.memory_check import Limit, Need

MIB = 1 << 20


def _gib(n: int) -> str:
    return f"{n / 2**30:,.2f} GiB"


class _Program:
    """A Program of two ranks: their arenas, what their launches hold while they are looked at, and collectives in two groups."""

    def __init__(self, rng: np.random.Generator, threads: int, backend: str = "cpu", held: int = 0) -> None:
        self.ranks, self.threads, self.held = 2, threads, held
        self.facts = {"backend": backend, "threads": str(threads)}
        self.sizes = [{name: int(rng.integers(1, 64)) * MIB for name in ("state.param", "state.m", "step", "work")} for _ in range(2)]
        self.groups = {"dp": ((0, 1),), "each": ((0,), (1,)), "many": ((1,), (0, *range(5, 8)))}
        self.states = {"param": "p", "m": "m", "grad0": "g"}
        self.saved = [int(rng.integers(1, 99)) * MIB for _ in range(2)]
        sizes = rng.integers(1, 50, 8) * MIB
        self.collectives = [("dp", int(sizes[0] + sizes[1])), ("many", int(sizes[2])), ("each", int(sizes[3]))]
        spans = [(int(a), int(a + n)) for a, n in zip(rng.integers(0, 9, 4) * MIB, (sizes[0], sizes[1], sizes[2], sizes[3]))]
        refs = [SimpleNamespace(offset=low, stop=high) for low, high in spans]
        self.launches = [SimpleNamespace(ins=refs[:1], outs=refs[1:2], attrs={"group": "dp"}, held=held // 3),
                         SimpleNamespace(ins=[], outs=refs[2:3], attrs={"group": "many"}, held=held),
                         SimpleNamespace(ins=refs[3:], outs=[], attrs={"group": "each"}, held=0),
                         SimpleNamespace(ins=refs, outs=refs, attrs={}, held=1)]
        self.plans = {"snapshot": SimpleNamespace(outputs=("param", "m"))}

    def arenas(self, rank: int = 0) -> dict[str, int]:
        """Bytes by name."""
        return self.sizes[rank]

    def plans_of(self, rank: int) -> dict[str, Any]:
        """The second rank's plan has no launches."""
        return {"step": SimpleNamespace(launches=self.launches if rank == 0 else [])}

    def role(self, rank: int) -> SimpleNamespace:
        """Its schedule."""
        return SimpleNamespace(schedule=[SimpleNamespace(plan="step")])

    def need(self, rank: int, checked: bool) -> Need:
        """By hand."""
        state = self.sizes[rank]["state.param"] + self.sizes[rank]["state.m"]
        spots = (max(self.held, 1) if rank == 0 else 0) + state // 64
        partials = (2 + 0 + (4 if rank == 0 else 0)) * 256 * 1024  # of two 1 level, of one none, of four 2 levels
        members = {"dp": 2, "each": 1, "many": 4 if rank == 0 else 1}
        again = max((n * (1 + members[group]) for group, n in self.collectives), default=0) if checked and rank == 0 else 0
        beside = max(memory_check.HELD * self.threads, 384 * MIB, 64 * MIB * self.threads, spots) + 40 * MIB * self.threads + 64 * MIB
        return Need(state, self.sizes[rank]["step"] + self.sizes[rank]["work"], beside + self.saved[rank] + partials + again,
                    144 * MIB * (self.threads + 1))

    def place(self, states: Any, rank: int, ranks: int) -> tuple[None, int]:
        """What a save of a rank is."""
        return None, self.saved[rank] if (states, ranks) == ({"param": "p", "m": "m"}, 2) else 0


def needs(rng: np.random.Generator) -> Measured:
    """What ranks need is added up by hand and held against every limit: side by side where it is touched, the largest alone where it is
    mapped. What fits to the byte is taken, one more is refused with all figures; of a GPU the room for saves alone is looked at."""
    checks: Named = []
    for threads, held in ((1, 0), (2, 0), (9, 0), (1, 900 * MIB), (600, 0)):
        for checked in (False, True):
            program = _Program(rng, threads, held=held)
            gpu = _Program(rng, threads, "cuda")
            with instead(memory_check, held=lambda x: x.held, ranges=SimpleNamespace(place=program.place)):
                each = [program.need(rank, checked) for rank in (0, 1)]
                found = [memory_check.need(program, rank, checked=checked) for rank in (0, 1)]
                same(checks, f"need of {threads}, {checked}", found, each)
                same(checks, "sums", [(n.touched, n.mapped) for n in found], [
                    (n.state + n.activations + n.beside, n.state + n.activations + n.beside + n.reserved) for n in each])
                for ranks in ((0,), (0, 1)):
                    mine = [each[r] for r in ranks]
                    touched, most = sum(n.touched for n in mine), max(mine, key=lambda n: n.mapped)
                    together = Need(*(sum(getattr(n, k) for n in mine) for k in ("state", "activations", "beside", "reserved")))
                    for bytes_, addresses, of in ((touched, False, together), (most.mapped, True, most)):
                        for short in (0, 1):
                            limits = [Limit("a wide one", 1 << 60, not addresses), Limit("a limit", bytes_ - short, addresses)]
                            with instead(memory_check, limits=lambda: limits):
                                got = said(lambda: memory_check.require(program, ranks, checked=checked))
                            same(checks, f"{ranks} {addresses} {short}", got, error_text(
                                "MachineError", "this run does not fit in memory",
                                f"{_gib(bytes_)}: state {_gib(of.state)}, activations {_gib(of.activations)}, beside them "
                                f"{_gib(bytes_ - of.state - of.activations)}", f"at most {_gib(bytes_ - 1)}, which is what a limit leaves",
                                'lower train.micro_batch or set train.recompute = "block" (activations), make the model smaller (state), '
                                "lower machine.threads or --nproc, or raise the limit; `alpha plan` tells the bytes apart") if short
                                 else "None")
                with instead(memory_check, limits=lambda: [Limit("all", 0), Limit("all", 0, True)]):
                    same(checks, "a GPU's own business", said(lambda: memory_check.require(gpu)), "None")
                    same(checks, "counted already", said(lambda: memory_check.require_room_for_saves(program)), "None")
            with instead(memory_check, ranges=SimpleNamespace(place=gpu.place)):
                bytes_ = sum(gpu.saved) + 64 * MIB
                for short in (0, 1):
                    with instead(memory_check, limits=lambda: [Limit("addresses", 0, True), Limit("a limit", bytes_ - short)]):
                        got = said(lambda: memory_check.require_room_for_saves(gpu, (0, 1)))
                    same(checks, f"room for saves {short}", got, error_text(
                        "MachineError", "the host has no room for what a save is copied to", f"{_gib(bytes_)}, page-locked",
                        f"at most {_gib(bytes_ - 1)}, which is what a limit leaves",
                        "raise the limit, free host memory, or train a smaller model: 12 bytes a parameter with AdamW") if short
                         else "None")
    return all_hold(checks)


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def limits(rng: np.random.Generator) -> Measured:
    """Every limit of a made-up system, the tightest first: free memory, control groups of both versions and those around them less what is
    in use but for file pages, limits on addresses and data; nothing where nothing is told, and what is none is none."""
    checks: Named = []
    n = [int(x) for x in rng.integers(1, 1 << 20, 20)]
    used, data = 7 * 1024, 9 * 1024
    for kind in ("unified", "hybrid", "first"):
        with tempfile.TemporaryDirectory(prefix="alpha-limits-") as name:
            proc, groups = Path(name) / "proc", Path(name) / "cgroup"
            line = {"unified": "0::/a/b\n", "hybrid": "4:cpu:/other\n0::/a/b\nbroken\n",
                    "first": "3:cpu,memory:/a/b\n1:memorylike:/c\n"}[kind]
            folder = {"unified": "", "hybrid": "unified/", "first": "memory/"}[kind]
            most, uses, stats = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_") if kind == "first" else ("memory.max",
                                                                                                                      "memory.current", "")
            _write(proc, {"self/cgroup": line, "meminfo": f"MemTotal: 99 kB\nMemAvailable:   {n[0]} kB\nHugePages: 3\n",
                          "self/status": "VmSize:\t 7 kB\nVmData: 9 kB\nName: x\n"})
            high = 1 << 30
            _write(groups / folder, {f"a/b/{most}": f"{high + n[1]}\n", f"a/b/{uses}": f"{n[2]}\n",
                                     "a/b/memory.stat": f"{stats}active_file {n[3]}\n{stats}inactive_file {n[4]}\nanon {n[5]}\nodd\n",
                                     f"a/{most}": f"{high + n[6]}", f"a/{uses}": str(n[7]), most: "max", uses: "5"})
            soft = {resource.RLIMIT_AS: -1, resource.RLIMIT_DATA: -1}
            own = SimpleNamespace(RLIMIT_AS=resource.RLIMIT_AS, RLIMIT_DATA=resource.RLIMIT_DATA, RLIM_INFINITY=-1,
                                  getrlimit=lambda what: (soft[what], -1))
            with instead(memory_check, resource=own):
                same(checks, f"{kind} without limits", memory_check.limits(proc, groups), sorted([
                    Limit("the machine's free memory (MemAvailable)", n[0] * 1024),
                    Limit("the control group /a/b", high + n[1] - n[2] + n[3] + n[4]),
                    Limit("the control group /a", high + n[6] - n[7])], key=lambda x: x.left))
                _write(groups / folder, {f"a/b/{most}": str(1 << 60), f"a/{uses}": "unknown"})
                soft.update({resource.RLIMIT_AS: used + n[8], resource.RLIMIT_DATA: data + n[9]})
                same(checks, f"{kind} with limits", memory_check.limits(proc, groups), sorted([
                    Limit("the machine's free memory (MemAvailable)", n[0] * 1024), Limit("the limit on addresses (ulimit -v)", n[8], True),
                    Limit("the limit on data (ulimit -d)", n[9], True)], key=lambda x: x.left))
                same(checks, "without /proc", memory_check.limits(Path(name) / "none", groups), [])
                _write(proc, {"meminfo": "MemTotal: 5 kB\n", "self/status": "VmSize: 7 kB\n", "self/cgroup": ""})
                same(checks, "what is not told", memory_check.limits(proc, groups),
                     [Limit("the limit on addresses (ulimit -v)", n[8], True)])
    return all_hold(checks)


def plans(rng: np.random.Generator) -> Measured:
    """A planned run says what building it says: parameters, tokens, FLOPs by part, bytes by kind of state and by plan, and where its ids
    come from; the collectives of a step in their order, with the bytes of their larger side."""
    checks: Named = []
    cfg = config.parse(RUN.format(root="/nowhere", threads=1), ["data.tokenizer='bpe'", "data.vocab=300", "model.dropout=0"])
    asked = list[Any]()
    arenas = {"state.param": 1, "state.param16": 20, "state.grad0": 300, "state.grad1": 4000, "state.m": 50_000, "state.v": 600_000,
              "state.velocity": 7_000_000, "state.counter": 80_000_000, "work": 900_000_000}
    program = SimpleNamespace(states={"param": SimpleNamespace(tensors=[SimpleNamespace(size=7), SimpleNamespace(size=30)])},
                              arenas=lambda: arenas,
                              plans={"a": SimpleNamespace(launches=[1], memory=SimpleNamespace(peak=11)),
                                     "b": SimpleNamespace(launches=[])})
    parts = {("x", "forward"): (5, 70), ("y", "backward"): (11, 13)}
    for given, known, tokenizer, vocab, source in (
            (None, None, "bpe", 300, "as configured; a small corpus may give fewer"), (None, None, "bytes", 257,
                                                                                       "as configured; a small corpus may give fewer"),
            (290, 280, "bpe", 290, "of the run's tokenizer"), (None, 280, "bpe", 280, "of the run's tokenizer")):
        own = config.parse(cfg.resolved(), [f"data.tokenizer='{tokenizer}'"])
        asked.clear()
        with instead(planned, known_tokenizer=lambda cfg: known and SimpleNamespace(vocab_size=known), ids_of_model=lambda cfg, ids: ids,
                     threads_for=lambda cfg, ranks: 10 + ranks, program_for=lambda *given: asked.append(given) or program,
                     flops_for=lambda cfg, vocab: ("flops", vocab), by_part=lambda flops, p, tokens: asked.append((flops, p, tokens))
                     or parts):
            made = planned.plan_run(own, "catalogue", given, 4)
        same(checks, f"{given} {known}", (made.vocabulary, made.vocabulary_source, made.parameters, made.tokens_per_step, made.steps,
                                          made.activations),
             (vocab, source, 37, 96, 5, {"a": 11}))
        same(checks, "asked", asked, [(own, vocab, "catalogue", 14, 4), (("flops", vocab), program, 96)])
        same(checks, "bytes", (made.state_bytes, made.peak_bytes, made.arenas), (
            {"parameters": 21, "gradients": 4300, "moments": 7_650_000, "other": 80_000_000}, sum(arenas.values()), arenas))
        same(checks, "FLOPs", (made.model_flops_per_step, made.executed, made.parts, made.flops), (16, 83, parts, ("flops", vocab)))
    with instead(planned, known_tokenizer=lambda cfg: None, program_for=lambda *given: asked.append(given[4]) or program,
                 by_part=lambda *x: parts):
        planned.plan_run(cfg, catalogue())
    same(checks, "one rank", asked[-1], 1)
    for zero, ops in ((0, {"all_reduce"}), (1, {"reduce_scatter", "all_gather"})):
        two = assemble.program_for(config.parse(cfg.resolved(), [f"train.zero={zero}"]), 300, catalogue(), 1, 2)
        found = planned.exchanges(two)
        expected = [(call.plan, call.shard, call.micro, launch) for call in two.schedule for launch in two.plans_of(0)[call.plan].launches
                    if launch.op
                    in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")]
        same(checks, "collectives", [(x.plan, x.shard, x.micro, x.launch) for x in found], expected)
        same(checks, "their bytes", [x.nbytes for x in found], [max(sum(int(np.prod(r.type.shape)) * 4 for r in side) for side in (
            x[3].ins, x[3].outs)) for x in expected])
        checks.append((f"there are some of {ops}", ops <= {x.launch.op for x in found}))
    return all_hold(checks)


class _Executor:
    """What an executor is opened with."""

    def __init__(self, *given: Any) -> None:
        self.given, self.priority = given, "high"


class _Ranked(_Executor):
    """One of ranks on GPUs."""


def executors(rng: np.random.Generator) -> Measured:
    """Which executor a Program is opened with, alone and among ranks, once its memory is known to be there; which GPU is whose, and how
    many ranks there may be."""
    checks: Named = []
    class _Other(_Executor):
        """A GPU alone."""

    asked = list[Any]()
    with instead(engine, memory_check=SimpleNamespace(require=lambda program, ranks: asked.append(ranks)), CpuExecutor=_Executor,
                 CudaRank=_Ranked,
                 _EXECUTORS={"cpu": _Executor, "cuda": _Other}):
        for backend, here, size, kind in (("cpu", 0, 0, _Executor), ("cuda", 0, 0, _Other), ("cpu", 2, 4, _Executor),
                                          ("cuda", 4, 4, _Ranked)):
            program, world = SimpleNamespace(facts={"backend": backend}), SimpleNamespace(rank=3, size=size,
                                                                                          here=range(here)) if size else None
            found = engine.open_executor(program, "catalogue", world)
            same(checks, f"{backend} {size}", (type(found), found.given, asked[-1]), (  # type: ignore[attr-defined]
                kind, (program, "catalogue", *([world] if world else [])), [3 if world else 0]))
            same(checks, "facts", engine.facts_of(found), {"comm_priority": "high"} if kind is _Ranked else {})
        apart = SimpleNamespace(rank=3, size=4, here=range(2))
        same(checks, "GPUs of two hosts", said(lambda: engine.open_executor(SimpleNamespace(facts={"backend": "cuda"}), "c", apart)),
             error_text(
            "MachineError", "collectives among GPUs reach those of one host", "4 ranks, 2 of this host", "all ranks on one host",
            "run as many ranks as this host has GPUs"))
        same(checks, "no such back end", said(lambda: engine.open_executor(SimpleNamespace(facts={"backend": "tpu"}), "c")), error_text(
            "InputError", "no such back end", "tpu", "cpu, cuda"))
    with instead(engine, asked=lambda: SimpleNamespace(gpus=["a", "b", "c"])):
        for named, devices in ((None, ["0", "1", "2"]), (" 5, x7 ,,", ["5", "x7"]), ("", [])):
            environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
            same(checks, f"{named}", engine.visible_devices(environment), devices)
            for ranks in (1, 2, 3, 4):
                there = len(devices)
                same(checks, f"{ranks} ranks", said(lambda: engine.require_devices(ranks, environment)), error_text(
                    "MachineError", "each rank computes on a GPU of its own", f"{ranks} ranks, {there} GPU{'' if there == 1 else 's'}",
                    f"at most {there} ranks", f"take --nproc {there}" if there > 1 else "leave out --nproc") if ranks > there else "None")
        for rank, first in enumerate(("0,1,2", "1,2,0", "2,0,1")):
            own: dict[str, str] = {}
            engine.take_device(SimpleNamespace(here=range(3), local_rank=rank), own)
            same(checks, f"rank {rank}", own, {"CUDA_VISIBLE_DEVICES": first})
        own = {"CUDA_VISIBLE_DEVICES": "8"}
        same(checks, "too few", (said(lambda: engine.take_device(SimpleNamespace(here=range(2), local_rank=1), own))[:52], own), (
            "MachineError: each rank computes on a GPU of its own", {"CUDA_VISIBLE_DEVICES": "8"}))
    ran = list[str]()
    for plans_ in (("narrow", "x"), ("shard", "narrow"), ()):
        ran.clear()
        engine.refresh(SimpleNamespace(program=SimpleNamespace(plans=plans_), run=ran.append))
        same(checks, "copies", ran, [x for x in ("narrow", "shard") if x in plans_])
    return all_hold(checks)


def _components(n: int) -> Catalogue:
    made = Catalogue()
    for i in range(n):
        made.add(Component(id=f"c{i}", kind="pass", profile="host", implementation=_components, contract="x"))
    return made


def examined(rng: np.random.Generator) -> Measured:
    """What the doctor finds on machines that have everything and nothing: each line by its words, and whether a run can train there."""
    checks: Named = []
    ran = list[Any]()
    corpus = SimpleNamespace(documents=[1] * 12, size=3_210_000, hash="ab" * 32)
    here = {"numpy": "2.1", "blas": "b 3", "cpu": "A CPU", "system": "Linux x"}

    def tool(answers: dict[str, tuple[int, str] | Exception]) -> Any:
        def run(command: Sequence[str], **how: Any) -> SimpleNamespace:
            ran.append((list(command), how))
            answer = answers[os.path.basename(command[0])]
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(returncode=answer[0], stdout=answer[1])
        return SimpleNamespace(run=run, SubprocessError=subprocess.SubprocessError)

    for full in (True, False):
        def no_corpus() -> Any:
            raise InputError("no standard library", do="install it")

        made, usable = _components(3 if full else 5), {"c0", "c1", "c2"} if full else {"c1", "c4"}  # c3 and c4 run elsewhere
        if not full:
            made.broken["mod"] = "why"
        having = SimpleNamespace(**({"sched_getaffinity": lambda pid: range(5)} if full else {"cpu_count": lambda: 1}))
        system = SimpleNamespace(sysconf=lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}[name] if full else int("x"))
        classes = ("sm90-H100", "sm90-H200") if full else ()
        answers: dict[str, tuple[int, str] | Exception] = {"smi": (0, "H100\nH200\n"), "nvcc": (0, "a\n release 13.0 \n")}
        machine = SimpleNamespace(key="k", describe=lambda: "a machine")
        with instead(counted, os=having), instead(
                doctor, environment=lambda: here, os=system, sys=SimpleNamespace(version_info=(3, 10) if full else (3, 9)),
                     platform=SimpleNamespace(python_version=lambda: "3.x", python_implementation=lambda: "Py"),
                     topology=SimpleNamespace(read=lambda: SimpleNamespace(lines=lambda: ["t1", "t2"])),
                     shutil=SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=200 * MIB + full if path == "." else 0),
                                            which=lambda name: f"/x/{name.removeprefix('nvidia-')}" if full else None),
                     stdlib_corpus=(lambda: corpus) if full else no_corpus, machine_class=lambda: machine,
                     classes=lambda root: ["k"] if full else [],
                     shipped_root=lambda: "root",
                     Registry=lambda catalogue: SimpleNamespace(status=lambda i: SimpleNamespace(usable=i in usable)),
                     why_not_here=lambda c: "a GPU" if c.id > "c2" else "",
                     gpu_classes=lambda: [SimpleNamespace(key=x) for x in classes], subprocess=tool(answers),
                     importlib=SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: full or None)),
                     metadata=SimpleNamespace(version=lambda name: "1.2"),
                     forbidden=SimpleNamespace(findings=lambda: [] if full else ["x", "y"], blind=lambda: [] if full else ["maps"])):
            found = [(f.state, f.topic, f.found, f.do) for f in doctor.examine(made)]
            same(checks, "can train", doctor.can_train(doctor.examine(made)), full)
        both = [("ok", "numpy", "2.1, BLAS b 3", ""), ("ok", "processor",
                                                       f"A CPU, {'5 cores' if full else '1 core'} for this process, Linux x", ""),
                ("ok", "topology", "t1", ""), ("ok", "topology", "t2", "")]
        same(checks, f"full {full}", found, [
            ("ok", "python", "3.x (Py)", ""), *both, ("ok", "memory", "4.0 GiB", ""), ("ok", "disk", "0.2 GiB free here", ""),
            ("ok", "corpus", "standard library, 12 files, 3.2 MB, abababababab", ""), ("ok", "machine class", "a machine  (k)", ""),
            ("ok", "evidence", "ships with this checkout for this machine class", ""),
            ("ok", "components", "3 of 3 that can run here are usable", ""),
            ("ok", "GPU", "H100; H200", ""), ("ok", "GPU class", "sm90-H100, sm90-H200", ""), ("ok", "nvcc", "release 13.0 (/x/nvcc)", ""),
            ("ok", "pycuda", "1.2", ""), ("ok", "clean process", "everything mapped is of an allowed origin", "")] if full else [
            ("missing", "python", "3.x (Py)", "install Python 3.10 or newer"), *both, ("missing", "disk", "0.2 GiB free here",
                                                                                       "free some space"),
            ("missing", "corpus", "no standard library", "install it"),
            ("missing", "kernel files", "mod cannot be loaded: why", "mend the file; until then nothing runs"),
            ("ok", "machine class", "a machine  (k)", ""), ("note", "evidence", "none ships for this machine class",
             "`alpha train` runs the missing gates first and keeps them here"), 
            ("note", "components", "1 of 3 that can run here are usable; 2 need another machine", "`alpha gate run --stale`"),
            ("missing", "GPU", "no nvidia-smi: no NVIDIA driver here", "a Hopper GPU (H100, H200) is needed for the GPU suites only"),
            ("missing", "nvcc", "not on PATH", "kernels for Hopper are compiled with the CUDA toolkit's nvcc"),
            ("missing", "pycuda", "not installed", "in the checkout: python3 -m pip install --editable '.[gpu]'"),
            ("missing", "clean process", "x, y", "nothing that trains may load these"), ("note", "not looked at", "maps", "")])
    same(checks, "asked", ran[0], (["/x/smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"], {
        "capture_output": True, "text": True, "timeout": 20, "check": False}))

    def damaged(catalogue: object) -> Any:
        raise InputError("evidence is damaged", came="a\tfile", do="mend it")

    def no_more() -> Any:
        raise InputError("no library")

    with instead(doctor, stdlib_corpus=no_more, environment=lambda: here):
        same(checks, "nothing to do", [(f.state, f.do) for f in doctor._host() if f.topic == "corpus"], [("missing", "")])

    def cut(catalogue: object) -> Any:
        raise InputError("evidence is cut short", came=7)

    with instead(doctor, Registry=cut, machine_class=lambda: SimpleNamespace(key="k", describe=lambda: "m"), classes=lambda root: []):
        same(checks, "evidence cut short", [(f.found, f.do) for f in doctor._evidence(Catalogue())][1:], [("evidence is cut short: 7", "")])
    with instead(doctor, Registry=damaged, machine_class=lambda: SimpleNamespace(key="k", describe=lambda: "m"), classes=lambda root: []):
        same(checks, "damaged evidence", [(f.state, f.found, f.do) for f in doctor._evidence(Catalogue())], [
            ("ok", "m  (k)", ""), ("missing", "evidence is damaged: a\tfile", "mend it")])
    with instead(doctor, shutil=SimpleNamespace(which=lambda name: f"/x/{name.removeprefix('nvidia-')}"), gpu_classes=lambda: []):
        for answer in ((1, "H100"), (0, ""), OSError(), subprocess.TimeoutExpired("x", 1)):
            with instead(doctor, subprocess=tool({"smi": answer, "nvcc": answer})):
                same(checks, f"{answer}", [(f.state, f.found, f.do) for f in doctor._gpu()][:2], [
                    ("missing", "nvidia-smi finds none", "check the driver"), ("ok", "found (/x/nvcc)", "")])
    needed = ("python", "numpy", "corpus", "disk", "clean process", "kernel files", "evidence")
    for topic in (*needed, "GPU", "nvcc"):
        for state in ("ok", "missing", "note"):
            same(checks, f"{state} {topic}", doctor.can_train([doctor.Finding(state, topic, "")]),
                 not (topic in needed and state == "missing"))
    with instead(counted, os=SimpleNamespace(cpu_count=lambda: None)), \
            instead(doctor, os=SimpleNamespace(sysconf=lambda name: 1), environment=lambda: here):
        checks.append(("cores that nobody counts", any("1 core for" in f.found for f in doctor._host())))
    return all_hold(checks)
