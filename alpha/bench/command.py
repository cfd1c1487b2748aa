"""`alpha bench`: the table on the screen and, for programs, as JSON. Floor 8.

Exit codes: 0 done; 1 nothing could be measured (throttled) or `--against` says slower; 2 bad input; 3 the machine lacks what was asked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from alpha import config
from alpha.bench import data, docs, floor, kernel, record, simulated, step, step_against, step_ranks
from alpha.bench.peer import Peer
from alpha.component import Component
from alpha.cuda_runtime.launch import LOADED
from alpha.errors import InputError, MachineError
from alpha.files import path_argument
from alpha.flops.v1 import CONVENTION, VERSION
from alpha.gates.timing import ab, against
from alpha.profile import noise
from alpha.registry.gpu import asked, class_here, gpu_class, gpu_environment, why_not_here
from alpha.registry.judge import SLOWDOWN
from alpha.registry.machine import environment
from alpha.train.catalogue import catalogue
from alpha.train.console import Printer
from alpha.train.engine import require_devices

READERS = ("run", "docs")
"""What only reads what was measured, with libraries for tables."""


def arguments(p: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    p.add_argument("what", metavar="ID | products | attention | bandwidth | step | floor | simulate | comm | data | run | docs",
                   help="a kernel of `alpha gate list`, wildcards allowed; a group of them; `step`: a whole training step; `floor`: "
                        "where a step's time and joules go, and the least that ceilings allow; `simulate`: how long a step on many GPUs "
                        "would take, from records, without a GPU; `comm`: collectives among ranks of this machine; "
                        "`data`: how fast a run's batches are made; "
                        "`run`: the figures of a run; `docs`: fill README and docs from the "
                        "records")
    p.add_argument("source", nargs="?", type=path_argument, metavar="RUN",
                   help="with `step`, `floor`, `simulate` and `data`: the run file; with `run`: the run directory")
    p.add_argument("--peers", action="store_true", help="PyTorch beside it, in a process of its own; one that is missing or fails says why")
    p.add_argument("--peer-python", metavar="PYTHON", default=sys.executable, help="the Python that has PyTorch (default: this one)")
    p.add_argument("--variant", default="*", metavar="PATTERN", help="with `step`: only PyTorch's variants of this name (default: all)")
    p.add_argument("--rounds", type=int, metavar="N", help=f"rounds of blocks (default: {kernel.ROUNDS}; step: {step.ROUNDS})")
    p.add_argument("--budget", type=float, metavar="SECONDS", help="begin nothing more after this time, and list what was not measured")
    p.add_argument("--case", default="*", metavar="PATTERN", help="only calls of this name, such as 'fwd-*' (default: all)")
    p.add_argument("--steps", type=int, metavar="N", help=f"with `step`: steps of a block (default: those of {step.SECONDS} s); "
                   f"with `data`: steps (default: {data.STEPS})")
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                   help="with `step`, `floor`, `simulate` and `data`: override one key; may be repeated")
    p.add_argument("--nproc", type=int, metavar="N", help="with `step`: GPUs of the step beside those of one (default: 1); with "
                   "`simulate`: GPUs (default: 2); with `comm`: processes, on each host (default: 2)")
    p.add_argument("--machine", default="", metavar="CLASS", help="with `simulate`: whose records it rests on, such as cuda_sm90_H200 "
                   "(default: of the GPU here, else of the model's floor record)")
    p.add_argument("--device", action="store_true", help="with `comm`: each rank has a GPU; --peers: beside NCCL")
    p.add_argument("--hosts", type=int, metavar="N",
                   help="with `comm`: hosts, each of which runs this command (default: 1); "
                        "2 and no --meet: messages between two hosts on this machine, beside plain sockets")
    p.add_argument("--host", type=int, metavar="I", help="with `comm`: which of them this is, from 0; the first one prints")
    p.add_argument("--meet", default="", metavar="ADDRESS:PORT", help="with `comm`: where host 0 is met; all know the secret ALPHA_SECRET")
    p.add_argument("--against", type=path_argument, metavar="TREE", help="today's kernel, or with `step` today's step, against that of "
                   "another source tree or git revision: a verdict")
    p.add_argument("--json", type=path_argument, metavar="FILE", help="write the figures as JSON too")
    p.add_argument("--record", action="store_true", help="keep the figures under baselines/bench, from a clean commit, for docs to quote; "
                   "with --against the pinned tree: keep the verdict, so that today's code may be claimed")
    p.add_argument("--check", action="store_true", help="with `docs`: change nothing, exit 1 where a page differs from the records")


def run(args: argparse.Namespace) -> int:
    """The command."""
    for name in ("rounds", "steps", "budget", "nproc"):
        if getattr(args, name) is not None and not getattr(args, name) >= 1:
            raise InputError(f"--{name} is too small", came=getattr(args, name), expected="1 or more")
    if args.json and not Path(args.json).resolve().parent.is_dir():
        raise InputError("there is no folder for the JSON file", came=args.json, expected="a path in a folder that exists")
    if args.json and Path(args.json).is_dir():
        raise InputError("the JSON file is a folder", came=args.json, expected="a file, which is written or replaced")
    console = Console(highlight=False, soft_wrap=True, emoji=False, width=None if sys.stdout.isatty() else 160)
    if args.check and args.what != "docs":
        raise InputError("--check is for `alpha bench docs`", came=args.what, expected="docs")
    if args.record and args.what in ("docs", "simulate"):
        raise InputError("nothing of this can be recorded", came=args.what, expected="a measurement", do="leave out --record")
    if args.machine and args.what != "simulate":
        raise InputError("--machine is for `alpha bench simulate`", came=args.what, expected="simulate", do="leave out --machine")
    if args.what == "docs":
        return _docs(args, console)
    if args.what == "run":
        return _run(args, console)
    if args.what == "step":
        return _step(args, console)
    if args.what == "floor":
        return _floor(args, console)
    if args.what == "simulate":
        return _simulate(args, console)
    if args.what == "comm":
        return _comm(args, console)
    if args.what == "data":
        return _data(args, console)
    if args.source is not None:
        raise InputError("a run file is for `alpha bench step`", came=f"{args.what} {args.source}", expected="a component id alone")
    chosen = components(args.what)
    return _against(args, chosen, console) if args.against else _kernels(args, chosen, console)


GROUPS = {"products": ("matmul.bf16.sm90",), "attention": ("attention*.bf16.sm90",),
          "bandwidth": ("*norm*.bf16.sm90", "embedding*.sm90", "adamw.*.sm90", "rope*.sm90", "swiglu*.sm90", "gelu*.sm90", "sum*.sm90",
                        "cast.*.sm90", "add.*.sm90", "dropout.*.sm90", "scale.*.sm90", "accumulate.*.sm90")}
"""Kernels that one record holds."""


def components(pattern: str) -> list[Component]:
    """Kernels whose id is, or matches, `pattern`, or that of a group. InputError if there are none, MachineError if none runs here."""
    wanted = GROUPS.get(pattern, (pattern,))
    found = [c for c in catalogue() if any(fnmatchcase(c.id, w) and (c.kind == "kernel" or c.id == w) for w in wanted)]
    if not found:
        raise InputError("no such kernel", came=pattern, expected="an id of `alpha gate list`, wildcards allowed, a group, or `step`")
    why = {c.id: why_not_here(c) for c in found}
    if all(why.values()):
        raise MachineError("NOT_RUN: this cannot be measured on this machine", came=next(f"{i} {w}" for i, w in why.items()),
                           expected="a machine that the kernel runs on", do="take an H100 or H200, or a kernel of the CPU")
    return [c for c in found if not why[c.id]]


def _kernels(args: argparse.Namespace, chosen: Sequence[Component], console: Console) -> int:
    commit = _recorded(args)
    if args.record and args.what not in GROUPS:
        raise InputError("a record is of a group of kernels", came=args.what, expected=", ".join(GROUPS))
    deadline = time.monotonic() + args.budget if args.budget is not None else math.inf
    results: list[kernel.Result] = []
    device = "cuda" if chosen[0].backend == "cuda" else "cpu"
    for c in chosen:
        if (c.backend == "cuda") != (device == "cuda"):
            raise InputError("kernels of one back end are benchmarked at a time", came=f"{chosen[0].id} and {c.id}",
                             do="narrow the pattern, such as '*.sm90' or '*.cpu'")

    def all_with(peer: Peer | None) -> None:
        for c in chosen:
            results.extend(kernel.bench(c, catalogue(), peer, rounds=args.rounds or kernel.ROUNDS, pattern=args.case,
                                        deadline=deadline, on_result=lambda r: show(r, console)))

    here = class_here(chosen[0])
    facts = {"machine": here.describe() if here is not None else "", "flops": VERSION}
    console.print(facts["machine"])
    if args.peers:
        with Peer(args.peer_python, device, 1) as peer:
            facts["peer"] = f"PyTorch {peer.version} on {peer.on}" if not peer.why else f"no PyTorch: {peer.why}"
            console.print(facts["peer"], markup=False)
            all_with(peer)
    else:
        all_with(None)
    if not results:
        raise InputError("no call of that name", came=args.case, expected=f"a name of a timed call of {args.what}")
    with _json(args.json, {**facts, "kernels": results}):
        if args.record:
            assert here is not None
            _keep(here.key, args.what, console, commit, {"peer": facts.get("peer", ""), "kernels": _plain(results),
                                                         "flops": {"version": VERSION, "convention": CONVENTION}})
    return 1 if any(r.why for r in results) else 0


def _step(args: argparse.Namespace, console: Console) -> int:
    if args.source is None:
        raise InputError("`alpha bench step` times a run file", came="none", expected="alpha bench step RUN.toml")
    if args.against and (args.peers or args.record or args.budget):
        raise InputError("--against compares two states of our own code", came="--peers, --record or --budget", expected="none of them",
                         do="leave them out")
    commit = _recorded(args)
    cfg = config.load(Path(args.source), args.set)
    _runs_here(cfg)
    if args.against:
        return _step_against(args, cfg, console)
    if (args.nproc or 1) > 1:
        return _step_ranks(args, cfg, console, commit)
    with Printer().doing("building, checking and timing"):
        result = step.bench(cfg, catalogue(), args.peer_python if args.peers else None, rounds=args.rounds or step.ROUNDS, steps=args.steps,
                            budget=args.budget, chosen=lambda name: fnmatchcase(name, args.variant), report=_telling())
    show_step(result, console)
    with _json(args.json, {"flops": VERSION, "step": result}):
        if args.record and not result.why:
            _keep(result.machine, f"step-{result.run}", console, commit, {
                "hardware": result.hardware, "config": cfg.resolved().splitlines(),
                "flops": {"version": VERSION, "convention": CONVENTION, **result.flops}, "step": _plain(result)})
    return 1 if result.why else 0


def _step_against(args: argparse.Namespace, cfg: config.Config, console: Console) -> int:
    tree = against.tree_of(args.against)
    with Printer().doing("building, checking and timing"):
        found = step_against.compare(cfg, args.nproc or 1, tree, args.against, rounds=args.rounds or step.ROUNDS, steps=args.steps,
                                     report=_telling())
    step_against.show(found, console)
    if args.json:
        _write(args.json, {"flops": VERSION, "against": {**_plain(found), "verdict": found.verdict}})
    return 1 if found.why or found.verdict == "slower" else 0


def _floor(args: argparse.Namespace, console: Console) -> int:
    if args.source is None or args.against:
        raise InputError("`alpha bench floor` takes a run file, --set, --peers, --json and --record", came=args.source or "no run file",
                         expected="alpha bench floor RUN.toml")
    commit = _recorded(args)
    cfg = config.load(Path(args.source), args.set)
    if cfg.machine.backend != "cuda":
        raise InputError("a floor is of a GPU, which counts its joules", came=f'machine.backend = "{cfg.machine.backend}"', expected="cuda",
                         do="take `alpha bench step` on a CPU")
    _runs_here(cfg)
    with Printer().doing("building and measuring"):
        result = floor.bench(cfg, catalogue(), args.peer_python if args.peers else None, report=_telling())
    floor.show(result, console)
    with _json(args.json, {"flops": VERSION, "floor": result}):
        if not floor.measured(result):
            console.print("NOT MEASURED: NVML's counter of joules was not seen to move twice while something was timed, "
                          "so there is no floor")
            return 1
        if args.record:
            _keep(result.machine, f"floor-{result.run}", console, commit, {
                "hardware": result.hardware, "config": cfg.resolved().splitlines(), "flops": {"version": VERSION, "convention": CONVENTION},
                "floor": _plain(result)})
    return 0


def _simulate(args: argparse.Namespace, console: Console) -> int:
    if args.source is None or args.against or args.peers:
        raise InputError("`alpha bench simulate` takes a run file, --nproc, --machine, --set and --json", came=args.source or "no run file",
                         expected="alpha bench simulate RUN.toml --nproc N")
    result = simulated.predict(config.load(Path(args.source), args.set), args.nproc or 2, record.records(), args.machine)
    simulated.show(result, console)
    if args.json:
        _write(args.json, {"flops": VERSION, "simulated": result.plain()})
    return 0


def _recorded(args: argparse.Namespace) -> str:
    """The commit of what is to be recorded, '' where nothing is."""
    commit = record.clean_commit() if args.record else ""
    if args.record and args.set:
        raise InputError("a run file is recorded as it is", came=f"--set {args.set[0]}", expected="no --set", do="record without it")
    _require_whole(args)
    return commit


def _require_whole(args: argparse.Namespace) -> None:
    """InputError where a part is to be recorded: a table says of a record's variants that they were all there were, and of its blocks that
    they were as long and as many as elsewhere."""
    named = {"--variant": args.variant != "*", "--case": args.case != "*", "--rounds": args.rounds is not None,
             "--steps": args.steps is not None}
    if args.record and any(named.values()):
        raise InputError("what is recorded is measured whole", came=", ".join(name for name, there in named.items() if there),
                         expected="none of --variant, --case, --rounds, --steps",
                         do="record without them; --budget may leave variants out, and the record names those")


def _runs_here(cfg: config.Config) -> None:
    """MachineError where this machine has not what the run computes on."""
    why = why_not_here(catalogue()[f"executor.{cfg.machine.backend}"])
    if why:
        raise MachineError("NOT_RUN: this run cannot run on this machine", came=f"backend {cfg.machine.backend} {why}",
                           expected="an H100 or H200 with its driver", do="take such a machine, or a run file for the CPU")


def _step_ranks(args: argparse.Namespace, cfg: config.Config, console: Console, commit: str) -> int:
    here, on_gpu = gpu_class(args.nproc), cfg.machine.backend == "cuda"
    if on_gpu and here is None:
        raise MachineError("NOT_RUN: a step on many GPUs needs one for each rank", came=asked().why or f"{len(asked().gpus)} here",
                           expected=f"{args.nproc} of one model, with links that nvidia-smi tells of", do="take such a machine")
    if on_gpu:
        require_devices(args.nproc)  # CUDA_VISIBLE_DEVICES may leave fewer
    if args.record and not on_gpu:
        raise InputError("a record of many GPUs is of GPUs", came='machine.backend = "cpu"', expected="cuda", do="leave out --record")
    with Printer().doing("building, checking and timing"):
        result = step_ranks.bench(
            cfg, args.nproc, catalogue(), args.peer_python if args.peers else None, rounds=args.rounds or step.ROUNDS, steps=args.steps,
            budget=args.budget, chosen=lambda name: fnmatchcase(name, args.variant), report=_telling())
    show_ranks(result, console)
    with _json(args.json, {"flops": VERSION, "ranks": result}):
        if args.record and not result.why:
            assert here is not None
            _keep(here.key, f"ranks-{result.run}", console, commit, {
                "hardware": here.describe(), "config": cfg.resolved().splitlines(),
                "flops": {"version": VERSION, "convention": CONVENTION, **result.flops},
                "ranks": _plain(replace(result, loaded={}))}, result.loaded)
    return 1 if result.why else 0


def _telling() -> Callable[[str], None]:
    """What goes on, on the error stream: a benchmark of minutes says where it is."""
    began = time.monotonic()
    return lambda text: print(f"alpha bench: {time.monotonic() - began:.0f} s: {text}", file=sys.stderr, flush=True)


def _comm(args: argparse.Namespace, console: Console) -> int:
    args.nproc = args.nproc or 2
    if args.device:
        return _comm_device(args, console)
    if args.source is not None or args.against or args.record or args.peers:
        raise InputError("`alpha bench comm` takes --nproc, --hosts, --host, --meet, --case, --rounds and --json", came="another argument",
                         do="leave out the others")
    from alpha.bench import comm  # a process without ranks maps no library for them
    from alpha.train import clusters

    if (args.hosts or 1) != 1 and args.host is None and not args.meet and clusters.place(os.environ) is None:
        return _hosts(args, console)
    across = clusters.across(args, os.environ)
    result = comm.bench(args.nproc, args.case, calls=args.rounds, across=across)
    if across and across.host:
        return 0
    console.print(environment()["cpu"])
    comm.show(result, console)
    if args.json:
        _write(args.json, {"comm": result})
    return 0


def _comm_device(args: argparse.Namespace, console: Console) -> int:
    if args.source is not None or args.against or args.hosts or args.meet:
        raise InputError("`alpha bench comm --device` takes --nproc, --case, --rounds, --budget, --peers, --json and --record",
                         came="another argument", do="leave out the others")
    from alpha.bench import comm_device

    commit = _recorded(args)
    here = gpu_class(args.nproc)
    if here is None:
        raise MachineError("NOT_RUN: collectives among GPUs need one for each rank", came=asked().why or f"{len(asked().gpus)} here",
                           expected=f"{args.nproc} of one model, with links that nvidia-smi tells of", do="take such a machine")
    require_devices(args.nproc)
    result = comm_device.bench(
        args.nproc, args.case, blocks=args.rounds or comm_device.BLOCKS, budget=args.budget,
        python=args.peer_python if args.peers else None, done=lambda case: comm_device.show(case, args.nproc, console))
    if result.left:
        console.print(f"NOT MEASURED: {', '.join(result.left)}")
    with _json(args.json, {"comm": result}):
        if args.record and result.cases:
            _keep(here.key, "comm-device", console, commit, {"hardware": here.describe(), "peer": result.peer, "comm": result.body()},
                  result.loaded)
    return 1 if result.left else 0


def _hosts(args: argparse.Namespace, console: Console) -> int:
    from alpha.bench import hosts

    rows = hosts.bench(args.hosts, calls=args.rounds)
    console.print(environment()["cpu"])
    hosts.show(rows, console)
    if args.json:
        _write(args.json, {"hosts": rows})
    return 0


def _data(args: argparse.Namespace, console: Console) -> int:
    if args.source is None or args.against or args.record or args.peers:
        raise InputError("`alpha bench data` takes a run file, --set, --steps and --json", came=args.source or "no run file",
                         expected="alpha bench data RUN.toml")
    cfg = config.load(Path(args.source), args.set)
    found = data.bench(cfg, args.steps or data.STEPS)
    console.print(environment()["cpu"])
    for r in found:
        disk = "not told" if r.disk is None else f"{r.disk / 1e6:,.1f} MB"
        console.print(f"{r.cache} page cache: {r.wall:,.0f} tokens/s, {r.core:,.0f} a core; {r.steps} steps, {r.tokens:,} tokens, "
                      f"{disk} from the disk")
    if args.json:
        _write(args.json, {"data": found})
    return 0


def _keep(machine: str, subject: str, console: Console, commit: str, body: Mapping[str, Any],
          loaded: Mapping[str, str] | None = None) -> None:
    """A record, with what every one holds. `loaded`: compiled files that other processes loaded, by their text."""
    hashes = {str(source): digest for source, digest in LOADED.items()} | dict(loaded or {})
    path = record.write(machine, subject, {
        "commit": commit, "taken": datetime.now(timezone.utc).date().isoformat(), "environment": {**environment(), **gpu_environment()},
        "kernel_hashes": {text: digest[:16] for text, digest in sorted(hashes.items())}, **body})
    console.print(f"recorded: {path}; `alpha bench docs` fills the pages from it")


def _run(args: argparse.Namespace, console: Console) -> int:
    from alpha.bench import whole  # it needs pandas

    if args.source is None:
        raise InputError("`alpha bench run` reads a run", came="none", expected="alpha bench run RUN")
    found = whole.figures(Path(args.source))
    for f in found.figures:
        console.print(f"{f.title}: {f.text}")
    console.print(f"{found.name}, {found.status}, {found.steps} steps, commit {found.commit[:12] or 'unknown'}; {found.flops['version']}",
                  style="dim")
    if args.record:
        path = record.write(found.machine, f"run-{found.name}", found.body())
        console.print(f"recorded: {path}; `alpha bench docs` fills the pages from it")
    return 0


def _docs(args: argparse.Namespace, console: Console) -> int:
    if not args.check:
        for place in docs.fill(record.records(), write=True):
            console.print(f"filled {place}")
    found = docs.problems()
    for line in found:
        console.print(line)
    return 1 if found or _unknown_commits(console) else 0


def _unknown_commits(console: Console) -> bool:
    found = docs.unknown_commits()
    for line in found:
        console.print(line)
    return bool(found)


def _against(args: argparse.Namespace, chosen: Sequence[Component], console: Console) -> int:
    if others := [c.id for c in chosen if c.kind != "kernel"]:
        raise InputError("--against compares kernels", came=others[0], expected="the id of a kernel",
                         do="pin what else owes the perf gate anew when its code changes: `alpha gate pin`")
    tree, found = against.tree_of(args.against), []
    for c in chosen:
        verdicts: list[tuple[str, noise.Verdict]] = []
        for case, verdict, discarded in against.compare(c.id, tree):
            i = verdict.interval
            console.print(f"{c.id} {case}: {verdict.verdict}, slower by {i.estimate:+.2%} [{i.low:+.2%}, {i.high:+.2%}] than "
                          f"{args.against}; {i.n} pairs, {discarded} discarded; the line is {SLOWDOWN:.0%}")
            found.append({"component": c.id, "against": args.against, "discarded": discarded, **ab.case_of(verdict, case).plain(),
                          "verdict": verdict.verdict})
            verdicts.append((case, verdict))
        if args.record:
            against.record(c, tree, verdicts)
            console.print(f"{c.id}: kept beside the pins")
    if args.json:
        _write(args.json, {"flops": VERSION, "against": found})
    return int(any(x["verdict"] == noise.FAIL for x in found))


# -- showing -------------------------------------------------------------------------------------------------------------------


def _number(x: float, text: Callable[[float], str]) -> str:
    return text(x) if math.isfinite(x) else "-"


def _ratio(ratio: Sequence[float]) -> str:
    low, middle, high = ratio
    if not math.isfinite(middle):
        return "-"
    return f"{middle:.3f}" + (f" [{low:.3f}, {high:.3f}]" if math.isfinite(low) and math.isfinite(high) and low != high else "")


def _why(row: kernel.Row | step.Row | step_ranks.Row) -> str:
    """Fit for a table, whose markup the words of another process are not."""
    off = f"differs by {row.difference:.1e}, at most {row.allowed:.1e}" if math.isfinite(row.allowed) else ""
    return escape("; ".join(x for x in (" ".join(row.why.split()), off) if x))


def show(result: kernel.Result, console: Console) -> None:
    """One call."""
    console.print(f"\n[bold]{result.component} {result.case}[/]  {result.shape}", markup=True)
    if result.why:
        console.print(f"NOT MEASURED: {result.why}", markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "us", "of the ceiling", "its time over ours", ""):
        table.add_column(name, justify="left" if not name else "right")
    for r in result.rows:
        table.add_row(r.name, _number(r.ns, lambda x: f"{x / 1e3:,.1f}"), _number(r.share, lambda x: f"{x:.3f}"), _ratio(r.ratio), _why(r))
    console.print(table)
    console.print(f"ceiling: {result.limit} ({result.flops}); {result.rounds} rounds, {result.discarded} throttled and discarded",
                  style="dim")


def show_step(result: step.Result, console: Console) -> None:
    """A run file."""
    console.print(f"[bold]{result.run}[/]  {result.shape}; {result.hardware}{'; ' if result.peer else ''}{result.peer}")
    console.print(f"MFU {result.mark}", style="dim")
    if result.why:
        console.print(f"NOT MEASURED: {result.why}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "ms a step", "tokens/s", "MFU", "memory GiB", "MHz, W, C", "blocks", "its time over ours", ""):
        table.add_column(name, justify="left" if not name else "right")
    for r in result.rows:
        table.add_row(r.name, _number(r.ns, lambda x: f"{x / 1e6:,.2f}"), _number(r.tokens_per_second, lambda x: f"{x:,.0f}"),
                      _number(r.mfu, lambda x: f"{x:.3f}"), f"{r.memory / 2**30:.2f}" if r.memory else "-", _state(r.blocks),
                      f"{len(r.blocks) - r.discarded} of {len(r.blocks)}", _ratio(r.ratio) + ("" if r.together else ", in turn"), _why(r))
    console.print(table)
    console.print(f"quoted: {result.quoted or 'no peer'}; fresh random tokens; {result.seconds:.0f} s", style="dim")


def show_ranks(result: step_ranks.Result, console: Console) -> None:
    """A run file on many GPUs."""
    console.print(f"[bold]{result.run}[/]  {result.shape}; {result.gpus} x {result.hardware}{'; ' if result.peer else ''}{result.peer}")
    console.print(f"MFU {result.mark}", style="dim")
    if result.why:
        console.print(f"NOT MEASURED: {result.why}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "GPUs", "ms a step", "tokens/s", "MFU", "efficiency", "exposed", "all communication", "memory GiB", "MHz, W, C",
                 "blocks", "its time over ours", ""):
        table.add_column(name, justify="left" if not name else "right")
    for r in result.rows:
        gpus = (len(r.blocks[0]) - 1) // 3 if r.blocks else 0
        state = "; ".join(_state(r.blocks, 1 + 3 * i) for i in range(gpus))
        table.add_row(r.name, str(r.gpus), _number(r.ns, lambda x: f"{x / 1e6:,.2f}"), _number(r.tokens_per_second, lambda x: f"{x:,.0f}"),
                      _number(r.mfu, lambda x: f"{x:.3f}"), _ratio(r.efficiency),
                      f"{r.exposed:.2%} ({r.least:.2%})" if math.isfinite(r.exposed) else "-",
                      _number(r.phase, lambda x: f"{x:.2%}"), f"{r.memory / 2**30:.2f}" if r.memory else "-", state or "-",
                      f"{len(r.blocks) - r.discarded} of {len(r.blocks)}", _ratio(r.ratio) + ("" if r.together else ", in turn"),
                      "; ".join(x for x in (_why(r), escape(r.unknown)) if x))
    console.print(table)
    console.print(f"quoted: {result.quoted or 'no peer'}; fresh random tokens; efficiency: tokens/s over GPUs times those of one; exposed: "
                  f"of a step, waits for collectives by the device's stamps (of the rank that waits least, so for nobody slower); "
                  f"{result.seconds:.0f} s", style="dim")


def _state(blocks: Sequence[Sequence[float]], at: int = 1) -> str:
    """Middle clock, middle power and highest temperature, which begin at a place of each block."""
    if not blocks or len(blocks[0]) < at + 3:
        return "-"
    mhz, watts, celsius = zip(*(b[at : at + 3] for b in blocks))
    return f"{median(mhz):.0f}, {median(watts):.0f}, {max(celsius):.0f}"


@contextmanager
def _json(path: str | None, body: object) -> Iterator[None]:
    """The figures as JSON, where they are asked for: behind the record that the block keeps, and though it cannot be kept."""
    try:
        yield
    finally:
        if path:
            _write(path, body)


def _write(path: str, body: object) -> None:
    Path(path).write_text(json.dumps(_plain(body), indent=1) + "\n", encoding="utf-8")


def _plain(x: Any) -> Any:
    """Plain data; figures that are not there are null."""
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(y) for y in x]
    return {k: _plain(v) for k, v in vars(x).items()} if is_dataclass(x) else x
