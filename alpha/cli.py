"""The command line: `alpha train`, `lab`, `gate`, `plan`, `kernels`, `bench`, `sample`, `trace`, `dashboard`, `doctor`. Floor 9.

Exit codes: 0 done; 1 a verdict said no; 2 bad input; 3 the machine lacks what was asked, or nothing that was asked for could run;
129, 130, 143 a training run that SIGHUP, SIGINT or SIGTERM ended, saved. An error is one message, no traceback (`--debug` shows it).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alpha import __version__, config, resources
from alpha.bench import command as bench
from alpha.component import Catalogue
from alpha.config import Config
from alpha.cuda_runtime import manifest
from alpha.dashboard import command as dashboard
from alpha.errors import InputError, MachineError, exit_code
from alpha.files import path_argument
from alpha.flops.v1 import CONVENTION, VERSION
from alpha.gates import commands
from alpha.gates import run as gate_runs
from alpha.gates.adversarial import mutants
from alpha.gates.device_code import command as kernels_command
from alpha.gates.sanitize import command as sanitize_command
from alpha.gates.timing import pin
from alpha.profile import trace
from alpha.registry import admission
from alpha.registry.evidence import local_root
from alpha.registry.gpu import why_not_here
from alpha.registry.judge import Judgement
from alpha.registry.record import Record
from alpha.registry.status import Registry
from alpha.train import doctor, forbidden, rundir
from alpha.train.assemble import components_of, open_data, program_for, threads_for
from alpha.train.catalogue import catalogue, what_loads
from alpha.train.console import Talk, duration
from alpha.train.interrupt import EXIT, Interrupt
from alpha.train.planned import Planned, plan_run
from alpha.train.sample import generate, open_run, printable
from alpha.train.seal import standing
from alpha.train.session import Outcome, train


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. The console script begins in alpha/__main__.py, before this is imported."""
    args = parser().parse_args(argv)
    return exit_code(f"alpha {args.command}", lambda: _run(args), debug=args.debug)


def _run(args: argparse.Namespace) -> int:
    resources.checkout()
    return _watched(args) if _computes(args) else int(args.run(args))


WATCHED = ("train", "lab", "sample", "bench", "gate")
"""Commands that run our code for a result: what their process holds is looked at from its start to its end."""


def _computes(args: argparse.Namespace) -> bool:
    return args.command in WATCHED and not (args.command == "bench" and args.what in bench.READERS)


def _watched(args: argparse.Namespace) -> int:
    forbidden.watch()
    forbidden.check("at the start")
    code = int(args.run(args))
    forbidden.check("at the end")
    return code


class _Version(argparse.Action):
    """`alpha 0.1.0 (commit 1234567890ab, with changes)`; the version alone where no commit is known."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> NoReturn:
        source = rundir.source_state()
        changed = ", with changes" if source["dirty"] else ""
        print(f"alpha {__version__}" + (f" (commit {source['commit'][:12]}{changed})" if source["commit"] != "unknown" else ""))
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Every command and option."""
    top = argparse.ArgumentParser(prog="alpha", description="Gated training and validation of language models.")
    top.add_argument("--version", action=_Version, nargs=0, help="show the version, with the commit in a checkout, and exit")
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        p = subparsers.add_parser(name, help=text, description=text)
        p.set_defaults(run=run)
        return p

    for name, text in (
        ("train", "train through gated components only"),
        ("lab", "the same, ungated components allowed; stamped UNGATED everywhere"),
    ):
        p = command(name, cmd_train, text)
        p.add_argument("source", type=path_argument, metavar="RUN.toml", help="a run file, or with --resume a run directory")
        _settings(p)
        p.add_argument("--resume", action="store_true", help="go on with the newest run of this name, or with the directory given")
        p.add_argument("--at", type=int, metavar="STEP", help="resume from this checkpoint instead of the latest")

    p = command("plan", cmd_plan, "parameters, FLOPs, memory and components of a run, without running it")
    p.add_argument("source", type=path_argument, metavar="RUN.toml", help="a run file or a run directory")
    _settings(p)
    p.add_argument("--table", metavar="SEGMENT", help="print one Segment launch by launch, e.g. update or micro_first@0")

    p = command("sample", cmd_sample, "text from a trained model")
    p.add_argument("source", type=path_argument, metavar="RUN", help="a run directory")
    p.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    p.add_argument("--tokens", type=int, default=200, help="most tokens to add (default %(default)s)")
    p.add_argument("--temperature", type=float, default=0.8, help="0 = always the most likely token (default %(default)s)")
    p.add_argument("--top-k", type=int, default=50, help="choose among this many; 0 = all (default %(default)s)")
    p.add_argument("--seed", type=int, default=1, help="the same seed gives the same text (default %(default)s)")
    p.add_argument("--at", type=int, metavar="STEP", help="from this checkpoint instead of the latest")

    p = command("trace", cmd_trace, "the profiled steps of a run as a trace, for ui.perfetto.dev or chrome://tracing")
    p.add_argument("source", type=path_argument, metavar="RUN", help="a run directory")
    p.add_argument("--out", type=path_argument, metavar="FILE", help="default: traces/profiled.json.gz in the run directory")
    p.add_argument("--step", type=int, action="append", metavar="STEP", help="only this profiled step; may be repeated")
    p.add_argument("--rank", type=int, action="append", metavar="RANK", help="only this rank; may be repeated")

    bench.arguments(command("bench", bench.run, "a kernel, its ceiling and its peers from one run; or a whole training step"))
    dashboard.arguments(command("dashboard", dashboard.run, "where the time goes, live, in a browser"))

    _gate_parsers(subparsers.add_parser("gate", help="gates, evidence and status of every component"))
    kernels_command.arguments(subparsers.add_parser(
        "kernels", help="compile the GPU kernels, and hold them against what is committed; needs no GPU"))  # fmt: skip
    p = command("doctor", cmd_doctor, "what this machine can do, and what is missing")
    p.add_argument("--json", action="store_true", help="for programs")
    return top


def _gate_parsers(gate: argparse.ArgumentParser) -> None:
    actions = gate.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        p = actions.add_parser(name, help=text, description=text)
        p.set_defaults(run=run)
        return p

    action("list", lambda a: commands.cmd_list(), "every component, its kind and the gates that it owes")
    p = action("run", cmd_gate_run, "run gates and keep the evidence; resumable")
    p.add_argument("ids", nargs="*", metavar="ID", help="components; none = all")
    p.add_argument("--for", dest="run_file", type=path_argument, metavar="RUN.toml", help="the components that this run uses")
    _settings(p)
    p.add_argument("--gate", metavar="GATE", help="only this gate")
    p.add_argument("--stale", action="store_true", help="only what lacks current, passing evidence")
    p.add_argument("--budget", type=float, metavar="SECONDS", help="start nothing after this time; run again to go on")
    p.add_argument("--ship", action="store_true", help="write into the repository's evidence instead of the local one")
    p = action("status", lambda a: commands.cmd_status(as_json=a.json), "what is usable on this machine class")
    p.add_argument("--json", action="store_true", help="for programs")
    p = action("explain", lambda a: commands.cmd_explain(a.id), "what is missing before a component is usable")
    p.add_argument("id", metavar="ID")
    p = action("check", cmd_gate_check, "the merge gate: judge the committed evidence again; needs no GPU")
    p.add_argument("--annotate", action="store_true", help="as workflow commands, shown beside the lines of a pull request")
    p.add_argument("--reference", metavar="CLASS", help="machine class on which every component must have current evidence")
    p = action("catches", cmd_gate_catches, "planted faults and seeded mutants: is each rejected by the gate that should?")
    p.add_argument("prefixes", nargs="*", metavar="PREFIX", help="only faults whose id or component begins so; without mutants")
    p.add_argument("--all", action="store_true", help="also faults whose catch is current")
    p.add_argument("--seeded", type=int, metavar="N", help="fresh mutants; 0 = none")
    p.add_argument("--prepare", action="store_true", help="only compile what the faults in device code load; needs no GPU")
    p.add_argument("--seed", metavar="TEXT", help="draw the mutants from this seed")
    p.add_argument("--ship", action="store_true", help="write into the repository's evidence instead of the local one")
    p.add_argument("--workers", type=int, default=2, help="processes (default %(default)s)")
    sanitize_command.arguments(action("sanitize", lambda a: 0, "kernels of the GPU under compute-sanitizer, sound and with planted errors"))
    p = action("audit", lambda a: commands.cmd_audit(a.n, seed=a.seed), "rerun a random sample of the shipped evidence and compare")
    p.add_argument("-n", type=int, default=5, help="records (default %(default)s)")
    p.add_argument("--seed", type=int, help="draw this sample")
    p = action("pin", lambda a: commands.cmd_pin(a.ids, measurements=a.measurements, add=a.add),
               "measure the shares that the perf gate judges by on this kind of machine")
    p.add_argument("ids", nargs="*", metavar="ID", help="components, wildcards allowed, such as '*.sm90'; none = all that run here")
    p.add_argument("--measurements", type=int, metavar="N",
                   help=f"of each case, in fresh processes (default: CPU {pin.MEASUREMENTS['cpu']}, GPU {pin.MEASUREMENTS['cuda']})")
    p.add_argument("--add", action="store_true", help="to what is pinned already of the same code, from this or another day")
    p = action("operating", lambda a: commands.cmd_operating(a.id, case=a.case, seconds=a.seconds),
               "false-alarm rate and power of the perf gate")
    p.add_argument("id", nargs="?", default="gelu.f32.cpu", metavar="ID")
    p.add_argument("--case", default="", metavar="NAME", help="which of its timed calls (default: the first)")
    p.add_argument("--seconds", type=float, default=60.0, help="time to spend (default %(default)s)")


def _settings(p: argparse.ArgumentParser) -> None:
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated")


def load_source(source: str, overrides: Sequence[str]) -> Config:
    """The Config of a run file or of a run directory, with overrides."""
    path = Path(source)
    if path.is_dir():
        if not rundir.is_run(path):
            rundir.read_config(path)  # raises
        return config.load(path / "config.toml", overrides)
    return config.load(path, overrides)


def this_command() -> str:
    """How the user calls this program: `alpha` if that is what the shell would run, else the path it was called by."""
    called = Path(sys.argv[0])
    found = shutil.which("alpha")
    if called.name in ("cli.py", "__main__.py") or not called.exists():
        return "python -m alpha"
    if found is not None and os.path.samefile(found, called):
        return "alpha"
    relative = os.path.relpath(called)
    return relative if not relative.startswith("..") else str(called)


# -- train, lab ----------------------------------------------------------------------------------------------------------------


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
        talk.say(f"running {len(todo)} gates first, about {duration(sum(t.seconds for t in todo))}; kept in {_shown(local_root())}")
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


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)


# -- gate ----------------------------------------------------------------------------------------------------------------------


def cmd_gate_run(args: argparse.Namespace) -> int:
    """Run gates of the components named, of those that a run uses, or of all."""
    ids = list(args.ids)
    if args.run_file is not None:
        cfg = load_source(args.run_file, args.set)
        program = program_for(cfg, open_data(cfg).tokenizer.vocab_size, catalogue(), threads_for(cfg))
        ids += admission.needed(catalogue(), components_of(cfg, program))
    elif args.set:
        raise InputError("--set changes a run file, and none is given", came=" ".join(args.set), expected="--for RUN.toml")
    return commands.cmd_run(sorted(set(ids)), gate=args.gate, stale=args.stale, budget=args.budget, ship=args.ship)


def cmd_gate_check(args: argparse.Namespace) -> int:
    """The merge gate."""
    return commands.cmd_check(annotate=args.annotate, reference=args.reference)


def cmd_gate_catches(args: argparse.Namespace) -> int:
    """Planted faults and mutants."""
    default = 0 if args.prefixes and "mutants" not in args.prefixes else mutants.NUMBER
    return commands.cmd_catches(args.prefixes, stale=not args.all, seeded=default if args.seeded is None else args.seeded, seed=args.seed,
                                ship=args.ship, workers=args.workers, prepare=args.prepare)


# -- plan, sample, doctor ------------------------------------------------------------------------------------------------------


def cmd_plan(args: argparse.Namespace) -> int:
    """What a run would be. Nothing of it is allocated and no text is read, so a plan of 70 billion parameters takes seconds."""
    cfg, path = load_source(args.source, args.set), Path(args.source)
    talk = Talk()
    with talk.doing("building the program"):
        catalogue = what_loads()
        plan = _planned(cfg, catalogue, rundir.read_tokenizer(path).vocab_size if path.is_dir() else None)
    program, flops = plan.program, plan.flops
    if args.table is not None:
        if args.table not in program.plans:
            raise InputError("no such Segment", came=args.table, expected=", ".join(sorted(program.plans)), do="name one of these")
        talk.say(program.plans[args.table].table())
        return 0
    talk.say(f"program      {program.name}  {program.hash()[:16]}; vocabulary {plan.vocabulary:,} ({plan.vocabulary_source})")
    talk.say(f"parameters   {plan.parameters:,}")
    talk.say(f"tokens       {plan.tokens_per_step:,} a step, {plan.tokens_per_step * plan.steps:,} in all")
    talk.say(f"model FLOPs  {flops.per_token / 1e6:,.3f} MFLOP a token, {plan.model_flops_per_step / 1e12:,.4f} TFLOP a step by {VERSION} "
             f"({CONVENTION})")  # fmt: skip
    talk.say(
        f"             {flops.per_token_full_attention / 1e6:,.3f} a token with full attention, {flops.per_token_6n / 1e6:,.3f} by 6N, "
        f"{plan.executed / plan.tokens_per_step / 1e6:,.3f} executed"
    )
    talk.say(f"FLOPs        {'MFLOP a token by the model':>26} {'executed':>14} {'share':>7}  part, direction")
    for (part, direction), (useful, done) in plan.parts.items():
        each = [n / plan.tokens_per_step / 1e6 for n in (useful, done)]
        talk.say(f"             {each[0]:26,.3f} {each[1]:14,.3f} {done / plan.executed:7.2%}  {part}, {direction}")
    each = [n / plan.tokens_per_step / 1e6 for n in (plan.model_flops_per_step, plan.executed)]
    talk.say(f"             {each[0]:26,.3f} {each[1]:14,.3f} {1:7.2%}  together")
    for kind, n in plan.state_bytes.items():
        talk.say(f"state        {n:20,} bytes {n / 2**30:10.3f} GiB  {kind}")
    for name, n in plan.activations.items():
        memory = program.plans[name].memory
        talk.say(f"activations  {n:20,} bytes {n / 2**30:10.3f} GiB  {name} ({len(program.plans[name].launches)} launches; "
                 f"lower bound {memory.lower:,}, unshared {memory.total:,})")  # fmt: skip
    for arena, n in plan.arenas.items():
        talk.say(f"arena        {n:20,} bytes {n / 2**30:10.3f} GiB  {arena}")
    talk.say(f"peak         {plan.peak_bytes:20,} bytes {plan.peak_bytes / 2**30:10.3f} GiB  on the one device")
    registry = Registry(catalogue)
    wanted = components_of(cfg, program)
    with manifest.only_looking():
        missing = [i for i in wanted if not registry.status(i).usable]
    talk.say(f"components   {len(wanted)}, of which {len(wanted) - len(missing)} usable on {registry.machine.key}")
    for i in wanted:
        status = registry.status(i)
        talk.say(f"             {'usable    ' if status.usable else 'NOT USABLE'} {i}" + ("" if status.usable else
                 f" ({', '.join(status.missing) or 'presupposes what is not'})"))  # fmt: skip
    for module, why in catalogue.broken.items():
        talk.say(f"broken       {module}: {why}; nothing runs before it is mended", "red")
    return 0


def _planned(cfg: Config, catalogue: Catalogue, vocabulary: int | None) -> Planned:
    """The plan from the kernels that load; where one is missing whose file does not, the error says so."""
    try:
        return plan_run(cfg, catalogue, vocabulary)
    except InputError as error:
        if not catalogue.broken:
            raise
        broken = "; ".join(f"{m}: {why}" for m, why in catalogue.broken.items())
        raise type(error)(error.what, came=error.came, expected=error.expected, do=f"mend what cannot be loaded: {broken}") from error


def cmd_sample(args: argparse.Namespace) -> int:
    """Write a sample to standard output as it is made."""
    executor, tokenizer, step = open_run(Path(args.source), catalogue(), args.at)
    with executor:
        why = standing(Path(args.source))
        if why:
            print(f"{rundir.UNGATED}: sampled from a development run ({why})", file=sys.stderr)
        print(f"step {step}, temperature {args.temperature}, top-k {args.top_k}, seed {args.seed}", file=sys.stderr)
        prompt = os.fsencode(args.prompt)
        parts = generate(executor, tokenizer, prompt, tokens=args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed)
        print(printable(prompt + b"".join(parts)), flush=True)
    return 0


def cmd_trace(args: argparse.Namespace) -> int:
    """Write the trace of a run."""
    path = Path(args.source)
    rundir.read_config(path)
    out = Path(args.out) if args.out else path / "traces" / "profiled.json.gz"
    if not args.out:
        try:
            out.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise MachineError("the trace cannot be written into the run directory", came=f"{out.parent} ({error.strerror})",
                               expected="permission to write there", do="name another file: --out FILE") from error
    found = trace.write(path / "metrics.sqlite", out, args.step, args.rank, ungated=bool(standing(path)))
    steps = f"{len(found.steps)} steps ({found.steps[0]} to {found.steps[-1]})"
    print(f"{out}: {found.events:,} events of {steps}, {found.arrows:,} arrows")
    print("open it at https://ui.perfetto.dev (the file stays on this machine) or in chrome://tracing")
    return 0


def cmd_doctor(args: argparse.Namespace) -> int:
    """Look at the machine; exit code 3 if nothing can be trained here."""
    with manifest.only_looking():
        findings = doctor.examine(what_loads())
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        table = Table(box=None, show_header=False, padding=(0, 1))
        style = {doctor.OK: "green", doctor.MISSING: "red", doctor.NOTE: "yellow"}
        for f in findings:
            table.add_row(Text(f.state, style[f.state]), f.topic, Text(f.found + (f"\n  -> {f.do}" if f.do else "")))
        Console(highlight=False).print(table)
        if doctor.can_train(findings):
            print(f"this machine can train on its CPU:  {this_command()} train configs/demo.toml")
        else:
            print("this machine cannot train: see the lines marked missing")
    return 0 if doctor.can_train(findings) else 3


if __name__ == "__main__":
    sys.exit(main())
