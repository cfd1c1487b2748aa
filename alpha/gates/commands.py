"""The subcommands of `alpha gate` as functions: each prints and returns an exit code. Floor 7.

0 done, 1 a verdict said no, 2 bad input, 3 the machine lacks what was asked or nothing that was asked for could run here (2, and most of 3,
are raised and mapped by the command line).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.table import Table

from alpha import config
from alpha.errors import InputError, MachineError
from alpha.gates import audit, run
from alpha.gates.adversarial import catches, cuda_plant, mutants
from alpha.gates.processes import termination_raises
from alpha.gates.recompute import recompute
from alpha.gates.sanitize import command as sanitize_command
from alpha.gates.timing import operating, pin
from alpha.registry import check as registry_check
from alpha.registry import mutants as registry_mutants
from alpha.registry import policy
from alpha.registry.evidence import default_roots, local_root, shipped_root
from alpha.registry.faults import load_faults
from alpha.registry.gates import GATES
from alpha.registry.gpu import class_here
from alpha.registry.judge import NOT_RUN, PASS, Judgement
from alpha.registry.machine import machine_class
from alpha.registry.record import Record
from alpha.registry.status import Registry
from alpha.train.assemble import program_for
from alpha.train.catalogue import catalogue

HEADLINES = ("gpt2-124m", "llama-1b")
"""Run files whose speed README quotes."""

_COLOUR = {"PASS": "green", "BASELINE": "cyan", "AMBIGUOUS": "yellow", "FAIL": "bold red", "NOT_RUN": "dim"}


def _console(console: Console | None) -> Console:
    return console or Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 160)


def _said(verdict: str) -> str:
    return f"[{_COLOUR[verdict]}]{verdict}[/]"


def cmd_list(*, console: Console | None = None) -> int:
    """Every component with its kind, the gates that it owes and what is exempt."""
    out = _console(console)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("component", "kind", "backend", "owes"):
        table.add_column(column, no_wrap=True)
    for c in catalogue():
        exempt = policy.exempt(c)
        table.add_row(c.id, c.kind, c.backend, " ".join(policy.owed(c)) + (f"  [dim](exempt: {' '.join(exempt)})[/]" if exempt else ""))
    out.print(table)
    out.print(f"{len(catalogue())} components")
    return 0


def cmd_run(ids: Sequence[str] = (), *, gate: str | None = None, stale: bool = False, budget: float | None = None, ship: bool = False,
            console: Console | None = None) -> int:
    """Run the gates of some components (all of them when none is named; '*' in an id stands for anything).

    `stale`: only those without current, satisfying evidence; `budget`: seconds; `ship`: write to the evidence that belongs to the
    repository instead of the local one, which then counts for nothing. 1 if a gate is not satisfied or left over; 3 if nothing that is to
    run can run on this machine, or some of the components that were named cannot. Nothing to run is 0.
    """
    out = _console(console)
    if gate is not None and gate not in GATES:
        raise InputError("no such gate", came=gate, expected=", ".join(GATES))
    ids = _matching(ids)
    gates, roots = (gate,) if gate else (), [shipped_root()] if ship else None
    todo = run.tasks(catalogue(), ids, gates, stale=stale, roots=roots)
    absent = run.not_here(catalogue(), ids, gates, stale=stale, roots=roots)
    for why in sorted(set(absent.values())):
        named = [i for i, w in absent.items() if w == why]
        out.print(f"{_said(NOT_RUN)} {len(named)} component{'s' if len(named) != 1 else ''} ({', '.join(named[:4])}"
                  f"{' ...' if len(named) > 4 else ''}): {why}")
    lacking = 3 if absent and (ids or not todo) else 0
    if not todo:
        if not absent:
            out.print("nothing to run: every gate asked for has current, passing evidence" if stale else
                      "nothing to run: the gate is not owed")
        return lacking
    here = dict.fromkeys(c.describe() for t in todo if (c := class_here(t.component)) is not None)
    out.print(f"{len(todo)} gates on {'; '.join(here)}, about {sum(t.seconds for t in todo):.0f} s")

    def said(task: run.Task, record: Record, judgement: Judgement) -> None:
        out.print(f"{_said(judgement.verdict):24} {task.component.id:28} {task.gate:12} {len(record.cases):3} cases "
                  f"{record.environment.get('seconds', '?'):>6} s")
        for reason in judgement.reasons[:3]:
            out.print(f"    {reason}", style="red" if not judgement.satisfied else "yellow", markup=False)

    done = run.run(todo, budget=budget, root=shipped_root() if ship else None, said=said)
    failed = sum(not j.satisfied for j in done.judgements)
    out.print(f"{len(done.records)} run, {failed} not passed, {len(done.left)} left over")
    if done.left and not done.records:
        out.print(f"no gate fits into the budget: {done.left[0].component.id} {done.left[0].gate} takes about {done.left[0].seconds:.0f} s")
    elif done.left:
        out.print("the budget is used up; run the same command again to go on")
    if done.judgements and all(j.verdict == NOT_RUN for j in done.judgements):
        return 3
    return lacking if done.ok else 1


def _matching(ids: Sequence[str]) -> list[str]:
    """Ids with patterns replaced by what they match; InputError for a pattern that matches nothing."""
    found: dict[str, None] = {}
    for pattern in ids:
        names = [c.id for c in catalogue() if fnmatchcase(c.id, pattern)] if "*" in pattern else [pattern]
        if not names:
            raise InputError("no component matches", came=pattern, do="list them with `alpha gate list`")
        found.update(dict.fromkeys(names))
    return list(found)


def cmd_status(*, as_json: bool = False, console: Console | None = None) -> int:
    """Every component's gates on this machine class; 1 if any is not usable."""
    out = _console(console)
    registry = Registry(catalogue(), default_roots())
    statuses = [registry.status(c.id) for c in catalogue()]
    absent = run.not_here(catalogue())
    sanitized = sanitize_command.standings(registry, [s.component for s in statuses])
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
            cells.append("" if g is None else _said(g.verdict) if g.satisfied or g.verdict != PASS else "[yellow]stale[/]")
        cells.append("" if "perf" not in s.gates else "[green]yes[/]" if s.claimable else "[yellow]no[/]")
        cells.append(sanitize_command.cell(sanitized.get(s.component, {})))
        table.add_row(s.component, "[green]yes[/]" if s.usable else "[red]no[/]", *cells)
    out.print(f"on {registry.machine.describe()}")
    out.print(table)
    here = [s for s in statuses if s.component not in absent]
    usable = sum(s.usable for s in here)
    out.print(f"{usable} of {len(here)} components are usable")
    for why in sorted(set(absent.values())):
        out.print(f"{sum(w == why for w in absent.values())} more cannot run here ({why}); above stands what committed evidence says")
    if usable < len(here):
        out.print("`alpha gate run --stale` supplies what is missing; `alpha gate explain ID` says what that is")
    return 0 if usable == len(here) else 1


def cmd_explain(component_id: str, *, console: Console | None = None) -> int:
    """What is missing before a component is usable, and the command that supplies it."""
    out = _console(console)
    registry = Registry(catalogue(), default_roots())
    status = registry.status(component_id)
    out.print(f"{component_id}: {'usable' if status.usable else 'not usable'} on {registry.machine.describe()}")
    for g in status.gates.values():
        out.print(f"  {g.gate:12} {_said(g.verdict)}  {'' if g.satisfied else g.why}{f'  (evidence of {g.machine})' if g.machine else ''}")
    for gate, why in status.exempt.items():
        out.print(f"  {gate:12} exempt: {why}")
    if "perf" in status.gates:
        out.print(f"  {'claimable':12} {'yes' if status.claimable else f'no: {status.no_claim}'}", markup=False)
    for tool, (verdict, why) in sanitize_command.standings(registry, [component_id]).get(component_id, {}).items():
        out.print(f"  {tool:12} {_said(verdict)}", end="  ")
        out.print(why, markup=False)
    for line in registry.why_not(component_id):
        out.print(line, markup=False)
    return 0 if status.usable else 1


def cmd_check(*, root: Path | None = None, annotate: bool = False, reference: str | None = None, console: Console | None = None) -> int:
    """The merge gate over the committed evidence. `annotate`: as workflow commands, shown beside the lines of a pull request."""
    checked = registry_check.check(catalogue(), root or shipped_root(), recompute, faults=load_faults(catalogue=catalogue()),
                                   reference=reference, headlines=headlines())
    out = _console(console)
    if annotate and checked.findings:
        out.print(registry_check.github(checked), markup=False, highlight=False, soft_wrap=True)  # one command a line, whole
    out.print(registry_check.plain(checked), markup=False, highlight=False, soft_wrap=True)
    return 0 if checked.ok else 1


def headlines() -> set[str]:
    """Components that the speed figures of README rest on: what the runs behind them use."""
    found: set[str] = set()
    for name in HEADLINES:
        cfg = config.load(shipped_root().parents[1] / "configs" / f"{name}.toml")
        found |= set(program_for(cfg, cfg.data.vocab, catalogue(), 1).components())
    return {i for i in found if "perf" in policy.owed(catalogue()[i])}


def cmd_pin(ids: Sequence[str] = (), *, measurements: int | None = None, add: bool = False, console: Console | None = None) -> int:
    """Measure the shares that the perf gate judges by, each time in a fresh process, and write them to baselines/perf. `add`: to what is
    pinned already of the same code. 1 if a component could not be pinned."""
    out = _console(console)
    chosen = pin.timed(catalogue(), _matching(ids))
    made = pin.run(chosen, measurements=measurements, add=add, said=lambda text: out.print(text, markup=False), catalogue=catalogue())
    noisy = [(p.component, case, line) for p in made for case in p.shares if (line := p.line(case)) is not None and not line.judged]
    for component, case, line in noisy:
        out.print(f"{_said(NOT_RUN)} {component} {case}: too noisy to judge, spread {line.spread:.1%}")
    cases = sum(len(p.shares) for p in made)
    alarms, trials = pin.false_alarms(made)
    out.print(f"{len(made)} of {len(chosen)} components pinned; {cases - len(noisy)} of {cases} cases can be judged")
    if trials:
        out.print(f"each share held against the line of the others: {alarms} of {trials} below it")
    return 0 if len(made) == len(chosen) else 1


def cmd_catches(prefixes: Sequence[str] = (), *, stale: bool = True, seeded: int = mutants.NUMBER, seed: str | None = None,
                ship: bool = False, workers: int = 2, prepare: bool = False, console: Console | None = None) -> int:
    """Planted faults (those whose catch is stale, or all) and freshly seeded mutants: the score per gate, survivors by name.

    `prefixes`: only faults whose id or component begins so (none = all). 1 if a planted fault survives. A surviving mutant is named and
    lowers the score: with `ship` 1 where it is below the pinned one. The prefix `mutants`: these alone. 3 if nothing of what was asked for
    can run on this machine. `prepare`: only compile what those in device code load, which needs no GPU.
    """
    out = _console(console)
    every = load_faults(catalogue=catalogue())
    faults = [f for f in every if not prefixes or f.id.startswith(tuple(prefixes)) or
              f.component.startswith(tuple(prefixes))]
    if not faults and not any(p.startswith(("lint", "mutants")) for p in prefixes):
        raise InputError("no planted fault of that name", came=", ".join(prefixes), expected="a prefix of a fault's or a component's id",
                         do="faults stand in the *.faults.toml beside each component, those of the lint in gates/device_code/lint.toml")
    if prepare:
        out.print(f"{cuda_plant.prepare([f for f in faults if f.source], catalogue().__getitem__)} files compiled")
        return 0

    def planted(result: catches.Result) -> None:
        if not result.caught:
            out.print(f"[bold red]SURVIVED[/] {result.fault.id} ({result.fault.gate} of {result.fault.component}): {result.fault.why}")

    with termination_raises():
        results = catches.run(catalogue(), faults, stale=stale, root=shipped_root() if ship else None, workers=workers, said=planted,
                              keep=[f.id for f in every])
    table = Table(box=None, pad_edge=False, header_style="bold", title="planted faults", title_justify="left")
    for column in ("gate", "caught", "of", "95 % interval", "survivors"):
        table.add_column(column)
    for score in catches.scores(results):
        low, high = score.interval
        table.add_row(score.gate, str(score.caught), str(score.planted), f"{low:.0%} to {high:.0%}", " ".join(score.survivors))
    out.print(table)
    survivors = [r for r in results if not r.caught]
    out.print(f"{len(results) - len(survivors)} of {len(results)} planted faults caught, {sum(r.fresh for r in results)} of them run now")
    linted = _lint(out, prefixes)
    if not results and not linted.planted and not seeded:
        out.print(f"{_said(NOT_RUN)} none of these faults can run on this machine")
        return 3
    fell = False
    if seeded:
        seed = seed or mutants.seed_of(shipped_root() if ship else None)
        drawn = mutants.draw(catalogue(), seeded, seed)
        fates = mutants.run(drawn, workers=workers)
        table = Table(box=None, pad_edge=False, header_style="bold", title="seeded mutants", title_justify="left")
        for column in ("area", "caught", "of", "excused", "95 % interval"):
            table.add_column(column)
        for found in mutants.scores(fates):
            low, high = found.interval
            table.add_row(found.area, str(found.caught), str(found.counted), str(found.excused), f"{low:.0%} to {high:.0%}")
        out.print(table)
        for fate in fates:
            if not fate.caught_by and not fate.excuse:
                out.print(f"survived: {fate.mutant.name}", markup=False)
        out.print(f"drawn from seed {seed}")
        if ship:
            pinned, latest = registry_mutants.save(mutants.record(fates, seed, seeded), shipped_root())
            fell = not latest.share >= pinned.share
            out.print(f"[bold red]a fall[/]: {pinned.share:.0%} are pinned" if fell else f"kept; pinned: {pinned.share:.0%}")
    return 0 if not linted.survivors and not survivors and not fell else 1


def _lint(out: Console, prefixes: Sequence[str]) -> catches.Score:
    """Print how the lint does on faults that no run need show; a score of none where there is no compiler."""
    try:
        score = catches.lint(catalogue(), prefixes)
    except MachineError as error:
        out.print(f"{_said(NOT_RUN)} the lint of device code: {error.what}")
        return catches.Score("lint", 0, 0, ())
    if score.planted:
        low, high = score.interval
        out.print(f"apart from these: {score.caught} of {score.planted} faults that no run need show are seen by the lint "
                  f"({low:.0%} to {high:.0%})" + (f"; unseen: {' '.join(score.survivors)}" if score.survivors else ""))
    return score


def cmd_audit(n: int = 5, *, seed: int | None = None, console: Console | None = None) -> int:
    """Rerun a random sample of the shipped records of this machine class and compare; 1 if one does not repeat, 3 if there is none."""
    out = _console(console)
    results = audit.run(catalogue(), shipped_root(), n, seed)
    if not results:
        out.print(f"{_said(NOT_RUN)} no shipped evidence of {machine_class().key} to audit")
        return 3
    for r in results:
        out.print(f"{'[green]repeats[/]' if not r.problems else '[bold red]DIFFERS[/]'} {r.component} {r.gate}")
        for problem in r.problems[:5]:
            out.print(f"    {problem}", markup=False)
    return 1 if any(r.problems for r in results) else 0


def cmd_operating(component_id: str = "gelu.f32.cpu", *, case: str = "", seconds: float = 60.0, console: Console | None = None) -> int:
    """Measure and publish the perf gate's false-alarm rate and power."""
    out = _console(console)
    table = operating.characteristic(catalogue()[component_id], case_name=case, seconds=seconds)
    path = operating.publish(table)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("source", "slowdown", "planted", "trials", "FAIL", "AMBIGUOUS", "PASS", "95 % interval of the FAIL rate"):
        shown.add_column(column)
    for r in table["table"]:
        low, high = r["fail_interval"]
        shown.add_row(r["source"], f"{r['slowdown']:.0%}", f"{r['planted']:.1%}", str(r["trials"]), str(r["fail"]), str(r["ambiguous"]),
                      str(r["pass"]), f"{low:.1%} to {high:.1%}")
    out.print(shown)
    out.print(f"written to {path.name}; local evidence lies under {local_root().name}")
    return 0
