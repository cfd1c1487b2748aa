"""`alpha gate list`, `run`, `status`, `explain` and `check`: what is printed, and exit codes. Floor 9.

0 done, 1 a verdict said no, 2 bad input, 3 the machine lacks what was asked or nothing that was asked for could run here (2, and most of 3,
are raised and mapped by the command line).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from alpha.cli.common import coloured, console_or, in_its_folder, load_source, require_even_ranks
from alpha.cli.outside import cmd_outside
from alpha.errors import InputError
from alpha.gates import merge, run
from alpha.gates.sanitize import command as sanitize_command
from alpha.registry import admission, policy
from alpha.registry import check as registry_check
from alpha.registry.evidence import default_roots, shipped_root
from alpha.registry.gates import GATES
from alpha.registry.gpu import class_here
from alpha.registry.judge import NOT_RUN, PASS, Judgement
from alpha.registry.record import Record
from alpha.registry.status import Registry
from alpha.train.assemble import components_of, open_data, program_for, threads_for, vocabulary
from alpha.train.catalogue import catalogue


def cmd_list(*, console: Console | None = None) -> int:
    """Every component with its kind, the gates that it owes and what is exempt."""
    out = console_or(console)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("component", "kind", "backend", "owes"):
        table.add_column(column, no_wrap=True)
    for c in catalogue():
        exempt = policy.exempt(c)
        table.add_row(c.id, c.kind, c.backend, " ".join(policy.owed(c)) + (f"  [dim](exempt: {' '.join(exempt)})[/]" if exempt else ""))
    out.print(table)
    out.print(f"{len(catalogue())} components")
    return 0


def cmd_gate_run(args: argparse.Namespace) -> int:
    """Run gates of the components named, of those that a run uses, of a folder of the user's own, or of all."""
    if args.folder is not None:
        return cmd_outside(args)
    if args.python is not None or args.no_page:
        raise InputError("--python and --no-page say how a folder is gated, and none is given", expected="--from FOLDER")
    ids = list(args.ids)
    if args.run_file is not None:
        cfg = load_source(args.run_file, args.set)
        if args.nproc != 1:
            require_even_ranks(cfg, args.nproc)
        with in_its_folder(args.run_file, cfg):
            vocab = vocabulary(cfg, open_data(cfg).tokenizer.vocab_size)
            program = program_for(cfg, vocab, catalogue(), threads_for(cfg, args.nproc), args.nproc)
            ids += admission.needed(catalogue(), components_of(cfg, program))
    elif args.set or args.nproc != 1:
        raise InputError("--set and --nproc are about a run file, and none is given", came=" ".join([*args.set, f"--nproc {args.nproc}"]),
                         expected="--for RUN.toml")
    return cmd_run(sorted(set(ids)), gate=args.gate, stale=args.stale, budget=args.budget, ship=args.ship)


def cmd_run(ids: Sequence[str] = (), *, gate: str | None = None, stale: bool = False, budget: float | None = None, ship: bool = False,
            console: Console | None = None) -> int:
    """Run the gates of some components (all of them when none is named; '*' in an id stands for anything).

    `stale`: only those without current, satisfying evidence; `budget`: seconds; `ship`: write to the evidence that belongs to the
    repository instead of the local one, which then counts for nothing. 1 if a gate is not satisfied or left over; 3 if nothing that is to
    run can run on this machine, or some of the components that were named cannot. Nothing to run is 0.
    """
    out = console_or(console)
    if gate is not None and gate not in GATES:
        raise InputError("no such gate", came=gate, expected=", ".join(GATES))
    ids = run.matching(catalogue(), ids)
    gates, roots = (gate,) if gate else (), [shipped_root()] if ship else None
    todo = run.tasks(catalogue(), ids, gates, stale=stale, roots=roots)
    absent = run.not_here(catalogue(), ids, gates, stale=stale, roots=roots)
    for why in sorted(set(absent.values())):
        named = [i for i, w in absent.items() if w == why]
        out.print(f"{coloured(NOT_RUN)} {len(named)} component{'s' if len(named) != 1 else ''} ({', '.join(named[:4])}"
                  f"{' ...' if len(named) > 4 else ''}): {escape(why)}")
    lacking = 3 if absent and (ids or not todo) else 0
    if not todo:
        if not absent:
            out.print("nothing to run: every gate asked for has current, passing evidence" if stale else
                      "nothing to run: the gate is not owed")
        return lacking
    here = dict.fromkeys(c.describe() for t in todo if (c := class_here(t.component)) is not None)
    out.print(f"{len(todo)} gates on {'; '.join(here)}, about {sum(t.seconds for t in todo):.0f} s")

    def show(task: run.Task, record: Record, judgement: Judgement) -> None:
        out.print(f"{coloured(judgement.verdict):24} {task.component.id:28} {task.gate:12} {len(record.cases):3} cases "
                  f"{record.environment.get('seconds', '?'):>6} s")
        for reason in judgement.reasons[:3]:
            out.print(f"    {reason}", style="red" if not judgement.satisfied else "yellow", markup=False)

    done = run.run(todo, budget=budget, root=shipped_root() if ship else None, on_result=show)
    failed = sum(not j.satisfied for j in done.judgements)
    out.print(f"{len(done.records)} run, {failed} not passed, {len(done.left)} left over")
    if done.left and not done.records:
        out.print(f"no gate fits into the budget: {done.left[0].component.id} {done.left[0].gate} takes about {done.left[0].seconds:.0f} s")
    elif done.left:
        out.print("the budget is used up; run the same command again to go on")
    if done.judgements and all(j.verdict == NOT_RUN for j in done.judgements):
        return 3
    return lacking if done.ok else 1


def cmd_status(*, as_json: bool = False, console: Console | None = None) -> int:
    """Every component's gates on this machine class; 1 if any is not usable."""
    out = console_or(console)
    registry = Registry(catalogue(), default_roots())
    statuses = [registry.status(c.id) for c in catalogue()]
    absent = run.not_here(catalogue())
    sanitized = sanitize_command.verdicts_of(registry, [s.component for s in statuses])
    if as_json:
        body = {"machine": registry.machine.key, "components": {
            s.component: {"usable": s.usable, "claimable": s.claimable, "no_claim": s.no_claim,
                          "presupposed": list(s.presupposed), "exempt": dict(s.exempt),
                          "gates": {g.gate: {"verdict": g.verdict, "satisfied": g.satisfied, "why": g.why, "machine": g.machine}
                                    for g in s.gates.values()},
                          "sanitizer": {tool: verdict for tool, (verdict, _) in sanitized.get(s.component, {}).items()}}
            for s in statuses}}
        out.print(json.dumps(body, indent=1, sort_keys=True), markup=False, highlight=False)
        return 0 if all(s.usable for s in statuses if s.component not in absent) else 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("component", "usable", *GATES, "claimable", "sanitizer"):
        table.add_column(column, no_wrap=True)
    for s in statuses:
        cells = []
        for name in GATES:
            g = s.gates.get(name)
            cells.append("" if g is None else coloured(g.verdict) if g.satisfied or g.verdict != PASS else "[yellow]stale[/]")
        cells.append("" if "perf" not in s.gates else "[green]yes[/]" if s.claimable else "[yellow]no[/]")
        cells.append(sanitize_command.cell(sanitized.get(s.component, {})))
        table.add_row(s.component, "[green]yes[/]" if s.usable else "[red]no[/]", *cells)
    out.print(f"on {registry.machine.describe()}")
    out.print(table)
    here = [s for s in statuses if s.component not in absent]
    usable = sum(s.usable for s in here)
    out.print(f"{usable} of {len(here)} components are usable")
    for why in sorted(set(absent.values())):
        out.print(f"{sum(w == why for w in absent.values())} more cannot run here ({why}); above stands what committed evidence says",
                  markup=False)
    if usable < len(here):
        out.print("`alpha gate run --stale` supplies what is missing; `alpha gate explain ID` says what that is")
    return 0 if usable == len(here) else 1


def cmd_explain(component_id: str, *, console: Console | None = None) -> int:
    """What is missing before a component is usable, and the command that supplies it."""
    out = console_or(console)
    registry = Registry(catalogue(), default_roots())
    status = registry.status(component_id)
    out.print(f"{component_id}: {'usable' if status.usable else 'not usable'} on {registry.machine.describe()}")
    for g in status.gates.values():
        where = f"  (evidence of {g.machine})" if g.machine else ""
        out.print(f"  {g.gate:12} {coloured(g.verdict)}  {'' if g.satisfied else escape(g.why)}{where}")
    for gate, why in status.exempt.items():
        out.print(f"  {gate:12} exempt: {why}", markup=False)
    if "perf" in status.gates:
        out.print(f"  {'claimable':12} {'yes' if status.claimable else f'no: {status.no_claim}'}", markup=False)
    for tool, (verdict, why) in sanitize_command.verdicts_of(registry, [component_id]).get(component_id, {}).items():
        out.print(f"  {tool:12} {coloured(verdict)}", end="  ")
        out.print(why, markup=False)
    for line in registry.why_not(component_id):
        out.print(line, markup=False)
    return 0 if status.usable else 1


def cmd_check(*, root: Path | None = None, annotate: bool = False, reference: str | None = None, console: Console | None = None) -> int:
    """The merge gate over the committed evidence. `annotate`: as workflow commands, shown beside the lines of a pull request."""
    checked = merge.check(catalogue(), root or shipped_root(), reference)
    out = console_or(console)
    if annotate and checked.findings:
        out.print(registry_check.github(checked), markup=False, highlight=False, soft_wrap=True)  # one command a line, whole
    out.print(registry_check.plain(checked), markup=False, highlight=False, soft_wrap=True)
    return 0 if checked.ok else 1
