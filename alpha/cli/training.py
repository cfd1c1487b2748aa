"""`alpha train` and `alpha lab`: what is said before, between and after; admission is the registry's. Floor 9."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alpha.cli.common import load_source, shown, this_command
from alpha.errors import InputError, MachineError
from alpha.gates import run as gate_runs
from alpha.registry import admission
from alpha.registry.evidence import local_root
from alpha.registry.gpu import why_not_here
from alpha.registry.judge import Judgement
from alpha.registry.record import Record
from alpha.registry.status import Registry
from alpha.train import rundir
from alpha.train.catalogue import catalogue
from alpha.train.console import Talk, duration
from alpha.train.interrupt import EXIT, Interrupt
from alpha.train.session import Outcome, train


def cmd_train(args: argparse.Namespace) -> int:
    """Train, gated or (lab) ungated."""
    cfg = load_source(args.source, args.set)
    why = why_not_here(catalogue()[f"executor.{cfg.machine.backend}"])
    if why:
        raise MachineError("this run cannot run on this machine", came=f"backend {cfg.machine.backend} {why}",
                           expected="an H100 or H200 with its driver", do="take such a machine, or a run file for the CPU such as "
                           "configs/demo.toml; `alpha plan` works everywhere")  # fmt: skip
    resume = None
    if args.resume:
        resume = Path(args.source) if Path(args.source).is_dir() else rundir.find(cfg)
    elif Path(args.source).is_dir() or args.at is not None:
        raise InputError(
            "a run directory and --at are for resuming", came=args.source, expected="a run file, or --resume", do="add --resume"
        )
    talk = Talk()
    gated = args.command == "train"
    interrupt = Interrupt()
    outcome = train(
        cfg,
        catalogue(),
        talk,
        admit=(lambda ids, calls: admit(talk, shlex.join([args.source, *(f"--set={x}" for x in args.set)]), ids, calls))
        if gated
        else None,
        resume=resume,
        at=args.at,
        interrupt=interrupt,
    )
    _next(talk, outcome, args.command)
    return 0 if outcome.finished else EXIT + interrupt.number


def _next(talk: Talk, outcome: Outcome, command: str) -> None:
    me = this_command()
    if not outcome.finished:
        talk.say(f"stopped after step {outcome.step}, saved. Go on with:  {me} {command} {outcome.path} --resume", "bold")
        return
    talk.say(f"run directory {outcome.path}")
    talk.say(f"try next:     {me} sample {outcome.path} --prompt 'import '", "bold")


def admit(talk: Talk, source: str, ids: Sequence[str], calls: Sequence[tuple[str, Any, Any]]) -> Mapping[str, Any]:
    """Ask the registry whether exactly these components and calls may run here; UngatedError if not.

    On a machine class that no evidence ships for, gates that were never run here are run first and kept locally. A component whose
    evidence is stale or says no is never rerun silently: the error names the command.
    """
    registry = Registry(catalogue())
    wanted = admission.asked(ids, calls)
    first = admission.never_run(registry, wanted)
    todo = [t for t in gate_runs.tasks(registry.catalogue, dict(first)) if (t.component.id, t.gate) in first] if first else []
    if todo:
        talk.say(f"no evidence ships for this machine class: {registry.machine.describe()}", "yellow")
        talk.say(f"running {len(todo)} gates first, about {duration(sum(t.seconds for t in todo))}; kept in {shown(local_root())}")
        _run_gates(talk, todo)
        registry = Registry(catalogue())
    with talk.doing(f"asking the registry about {len(wanted)} components"):
        supplied = f"`{this_command()} gate run --for {source} --stale` supplies what is missing; `gate explain ID` tells more; "
        evidence = admission.require(registry, wanted, calls, supplied + "`lab` runs ungated, stamped")
    talk.say(f"gates     all {len(wanted)} components usable on {registry.machine.key}")
    return evidence


def _run_gates(talk: Talk, todo: Sequence[gate_runs.Task]) -> None:
    count = 0

    def said(task: gate_runs.Task, record: Record, judgement: Judgement) -> None:
        nonlocal count
        count += 1
        if not judgement.satisfied:
            talk.say(f"  {task.component.id} {task.gate}: {judgement.verdict} {'; '.join(judgement.reasons[:1])}", "red")
        elif count % max(1, len(todo) // 10) == 0:
            talk.say(f"  {count} of {len(todo)} gates")

    gate_runs.run(todo, said=said)
