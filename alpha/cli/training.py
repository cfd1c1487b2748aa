"""`alpha train` and `alpha lab`: what is said before, between and after; admission is the registry's. Floor 9."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from alpha.cli.common import enough_files, load_source, require_ranks, shown, this_command
from alpha.comm.meet import Across
from alpha.comm.world import World
from alpha.config import Config, Log
from alpha.errors import InputError, MachineError
from alpha.gates import run as gate_runs
from alpha.registry import admission
from alpha.registry.evidence import local_root
from alpha.registry.gpu import why_not_here
from alpha.registry.judge import Judgement
from alpha.registry.record import Record
from alpha.registry.status import Registry
from alpha.trackers.start import Made, trackers
from alpha.train import clusters, launch, rundir
from alpha.train.catalogue import catalogue
from alpha.train.console import Printer, duration
from alpha.train.engine import require_devices
from alpha.train.home import at_home
from alpha.train.interrupt import EXIT, Interrupt
from alpha.train.ranks import Ranks
from alpha.train.session import Outcome, Prepared, prepare, same_run, train
from alpha.train.supervisor import supervise


def cmd_train(args: argparse.Namespace) -> int:
    """Train, gated or (lab) ungated."""
    if args.init is not None:
        if not args.init:
            raise InputError("no model to begin from", came="--init ''", expected="RUN[@STEP] or hf:FOLDER", do="leave out --init")
        if args.resume:
            raise InputError("a run that goes on has its parameters", came="--init with --resume", expected="one of them",
                             do="leave out --init")
        args.set = [*args.set, f"train.start_from={args.init}"]
    if args.resume and args.go_on:
        raise InputError("--resume needs a run, --continue does without", came="both", expected="one of them")
    cfg = load_source(args.source, args.set)
    why = why_not_here(catalogue()[f"executor.{cfg.machine.backend}"])
    if why:
        raise MachineError("this run cannot run on this machine", came=f"backend {cfg.machine.backend} {why}",
                           expected="an H100 or H200 with its driver", do="take such a machine, or a run file for the CPU such as "
                           "configs/demo.toml; `alpha plan` works everywhere")  # fmt: skip
    resume = None
    if args.resume:
        resume = Path(args.source) if Path(args.source).is_dir() else rundir.find(cfg)
    elif args.go_on:
        resume = _newest(args, cfg)
    elif Path(args.source).is_dir() or args.at is not None:
        raise InputError(
            "a run directory and --at are for resuming", came=args.source, expected="a run file, or --resume", do="add --resume"
        )
    here = Path.cwd()
    with nullcontext() if resume is None else at_home(cfg, resume) as run:
        if Path.cwd() != here:
            _report(args.command, f"relative paths are those of {Path.cwd()}, where the run's last session ran")
        return _start(args, cfg, run)


def _newest(args: argparse.Namespace, cfg: Config) -> Path | None:
    """The run that `--continue` goes on with; None where it begins one."""
    if args.init is not None or args.at is not None or Path(args.source).is_dir():
        raise InputError("--continue goes on with the newest run of a run file, or begins it", came=f"{args.source}, --at or --init",
                         expected="a run file alone", do="use --resume with a run directory or --at; set train.start_from for --init")
    try:
        return rundir.find(cfg)
    except InputError as error:
        if type(error) is not InputError or error.__cause__ is not None:  # the newest run cannot be read: a second one would hide it
            raise
        return None  # begun by no start so far


def _start(args: argparse.Namespace, cfg: Config, resume: Path | None) -> int:
    """One process, the ranks that the command asks for, or one rank of another launcher's job."""
    place = launch.seat(clusters.ranks(os.environ))
    if place is not None:
        return _as_rank(args, cfg, resume, place)
    with trackers(cfg.log, partial(_report, args.command)) as made:
        across = clusters.across(args, os.environ)
        if args.nproc != 1 or across:
            return _with_ranks(args, cfg, resume, made, across)
        if args.restarts or args.fewest is not None:
            raise InputError("one process is not started again", came=f"--restarts {args.restarts}, --fewest {args.fewest}",
                             expected="--nproc 2 or more, or several hosts", do="leave out --restarts and --fewest")
        return _session(args, cfg, resume, args.at, made=made)


def _session(args: argparse.Namespace, cfg: Config, resume: Path | None, at: int | None, world: World | None = None,
             made: Callable[[Path], None] = lambda path: None, prepared: Prepared | None = None) -> int:  # fmt: skip
    """One rank's session, or the only one's; returns its exit code. The first rank speaks."""
    first = world is None or world.rank == 0
    printer = Printer() if first else Printer(Console(quiet=True))
    source = shlex.join([args.source, *(f"--set={x}" for x in args.set), *([f"--nproc={world.size}"] if world else [])])
    admitted = (lambda ids, calls: admit(printer, source, ids, calls)) if args.command == "train" else None
    outcome = train(cfg, catalogue(), printer, admit=admitted, resume=resume, at=at,
                    interrupt=Interrupt(silent=not first), world=world, made=made, prepared=prepared)  # fmt: skip
    if first:
        _next(printer, outcome, args.command)
    return 0 if outcome.finished else EXIT + outcome.ended_by


def _as_rank(args: argparse.Namespace, cfg: Config, resume: Path | None, place: launch.Seat) -> int:
    """One rank of a job that another launcher started."""
    if args.nproc not in (1, place.size) or args.restarts or args.hosts not in (None, 1):
        raise InputError("another launcher starts the ranks of this job, and starts them again",
                         came=f"WORLD_SIZE={place.size}, --nproc {args.nproc}, --restarts {args.restarts}, --hosts {args.hosts}",
                         expected="none of --nproc, --restarts and --hosts", do="leave them out, or unset RANK and WORLD_SIZE")
    if place.across is None and place.local_rank != place.rank:  # whose LOCAL_RANK is 0 would wait for ranks that never come
        raise InputError("all ranks of this job are on one host, so each has its own number there",
                         came=f"RANK={place.rank}, LOCAL_RANK={place.local_rank}, WORLD_SIZE={place.size}",
                         expected=f"LOCAL_RANK={place.rank}",
                         do="look at what the launcher sets; for several hosts it sets LOCAL_WORLD_SIZE too")
    if place.size == 1:
        with trackers(cfg.log, partial(_report, args.command)) as made:
            return _session(args, cfg, resume, args.at, made=made)
    _require(cfg, place.size, place.local_size)
    with trackers(cfg.log if place.rank == 0 else Log(), partial(_report, args.command)) as made, launch.join(place) as world:
        return _session(args, cfg, resume, args.at, world, made)


def _require(cfg: Config, ranks: int, here: int) -> None:
    """Whether so many ranks, `here` of them on this host, can run: ConfigError or MachineError."""
    require_ranks(cfg, ranks)
    if cfg.machine.backend == "cuda":
        require_devices(here)


def _with_ranks(args: argparse.Namespace, cfg: Config, resume: Path | None, made: Made, across: Across | None) -> int:
    """Start the ranks here, and again where some are lost."""
    _require(cfg, args.nproc * args.hosts, args.nproc)
    fewest = args.nproc if args.fewest is None else args.fewest
    if args.restarts < 0 or not (1 if across else 2) <= fewest <= args.nproc or (across and fewest != args.nproc):
        raise InputError("a job is started again a number of times, with ranks that there are",
                         came=f"--restarts {args.restarts}, --fewest {fewest}", expected=f"0 or more, and 2 to {args.nproc}")

    def start(ranks: int, number: int, path: Path | None, at: int | None) -> launch.Ended:
        own = same_run(cfg, path) if path is not None else cfg
        prepared = prepare(own, catalogue(), Printer(), Ranks(), ranks * args.hosts)
        rundir.source_state()  # asked once, here

        def body(world: World, tell: launch.Tell) -> int:
            if world.size != ranks * args.hosts:
                raise InputError("the hosts of a job have the same number of ranks",
                                 came=f"{world.size} on {args.hosts} hosts, {ranks} here",
                                 expected=f"{ranks} on each", do="give all hosts the same --nproc")

            def told(run: Path) -> None:
                tell(path=str(run))
                if world.rank == 0:
                    made(run)

            with enough_files():  # what a rank did not foresee is told as a traceback
                return _session(args, own, path, at, world, told, prepared)

        return launch.launch(ranks, body, epoch=number, across=across)

    report = partial(_report, args.command)
    ended = supervise(start, args.nproc, restarts=args.restarts, fewest=fewest, resume=resume, at=args.at, report=report)
    if ended.error:
        report(f"{ended.error}\n{ended.account}" if ended.lost else ended.error)
    return ended.code


def _report(command: str, text: str) -> None:
    print(f"alpha {command}: {text}", file=sys.stderr, flush=True)


def _next(printer: Printer, outcome: Outcome, command: str) -> None:
    me, path = this_command(), shlex.quote(str(outcome.path))
    if not outcome.finished:
        printer.say(f"stopped after step {outcome.step}, saved. Go on with:  {me} {command} {path} --resume", "bold")
        return
    printer.say(f"run directory {outcome.path}")
    printer.say(f"try next:     {me} sample {path} --prompt 'import '", "bold")


def admit(printer: Printer, source: str, ids: Sequence[str], calls: Sequence[tuple[str, Any, Any]]) -> Mapping[str, Any]:
    """Ask the registry whether exactly these components and calls may run here; UngatedError if not.

    On a machine class that no evidence ships for, gates that were never run here are run first and kept locally. A component whose
    evidence is stale or says no is never rerun silently: the error names the command.
    """
    registry = Registry(catalogue())
    wanted = admission.asked(ids, calls)
    first = admission.never_run(registry, wanted)
    todo = [t for t in gate_runs.tasks(registry.catalogue, dict(first)) if (t.component.id, t.gate) in first] if first else []
    if todo:
        printer.say(f"no evidence ships for this machine class: {registry.machine.describe()}", "yellow")
        printer.say(f"running {len(todo)} gates first, about {duration(sum(t.seconds for t in todo))}; kept in {shown(local_root())}")
        _run_gates(printer, todo)
        registry = Registry(catalogue())
    with printer.doing(f"asking the registry about {len(wanted)} components"):
        supplied = f"`{this_command()} gate run --for {source} --stale` supplies what is missing; `gate explain ID` tells more; "
        evidence = admission.require(registry, wanted, calls, supplied + "`lab` runs ungated, stamped")
    printer.say(f"gates     all {len(wanted)} components usable on {registry.machine.key}")
    return evidence


def _run_gates(printer: Printer, todo: Sequence[gate_runs.Task]) -> None:
    count = 0

    def report(task: gate_runs.Task, record: Record, judgement: Judgement) -> None:
        nonlocal count
        count += 1
        if not judgement.satisfied:
            printer.say(f"  {task.component.id} {task.gate}: {judgement.verdict} {'; '.join(judgement.reasons[:1])}", "red")
        elif count % max(1, len(todo) // 10) == 0:
            printer.say(f"  {count} of {len(todo)} gates")

    gate_runs.run(todo, on_result=report)
