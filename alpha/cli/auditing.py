"""`alpha gate catches`, `pin`, `audit`, `coverage`, `asked`, `sign` and `operating`, which put the gates themselves to the test: what is
printed. Floor 9.

Exit codes are those of gating.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from alpha.cli.common import coloured, console_or
from alpha.errors import InputError, MachineError
from alpha.gates import audit, branches, run
from alpha.gates.adversarial import catches, cuda_plant, mutants
from alpha.gates.contracts import coverage as host_coverage
from alpha.gates.cpu import coverage
from alpha.gates.processes import termination_raises
from alpha.gates.timing import operating, pin
from alpha.registry import asked, signatures
from alpha.registry import mutants as registry_mutants
from alpha.registry.evidence import local_root, shipped_root
from alpha.registry.faults import load_faults
from alpha.registry.gpu import class_of_key
from alpha.registry.history import History
from alpha.registry.judge import NOT_RUN
from alpha.registry.machine import machine_class
from alpha.train.catalogue import catalogue


def cmd_gate_catches(args: argparse.Namespace) -> int:
    """Planted faults and mutants."""
    default = 0 if args.prefixes and "mutants" not in args.prefixes else mutants.NUMBER
    return cmd_catches(args.prefixes, stale=not args.all, seeded=default if args.seeded is None else args.seeded, seed=args.seed,
                       ship=args.ship, workers=args.workers, prepare=args.prepare)


def cmd_catches(prefixes: Sequence[str] = (), *, stale: bool = True, seeded: int = mutants.NUMBER, seed: str | None = None,
                ship: bool = False, workers: int = 2, prepare: bool = False, console: Console | None = None) -> int:
    """Planted faults (those whose catch is stale, or all) and freshly seeded mutants: the score per gate, survivors by name.

    `prefixes`: only faults whose id or component begins so (none = all). 1 if a planted fault survives. A surviving mutant is named and
    lowers the score: with `ship` 1 where it is below the pinned one. The prefix `mutants`: these alone. 3 if nothing of what was asked for
    can run on this machine. `prepare`: only compile what those in device code load, which needs no GPU.
    """
    out = console_or(console)
    every = load_faults(catalogue=catalogue())
    faults = catches.matching(every, prefixes)
    if prepare:
        out.print(f"{cuda_plant.prepare([f for f in faults if f.source], catalogue().__getitem__)} files compiled")
        return 0

    def planted(result: catches.Result) -> None:
        if not result.caught:
            out.print(f"[bold red]SURVIVED[/] {result.fault.id} ({result.fault.gate} of {result.fault.component}): "
                      + escape(result.fault.why))
            out.print(f"    the gate: {escape(result.why)}")

    with termination_raises():
        results = catches.run(catalogue(), faults, stale=stale, root=shipped_root() if ship else None, workers=workers, on_result=planted,
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
        out.print(f"{coloured(NOT_RUN)} none of these faults can run on this machine")
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
        out.print(f"{coloured(NOT_RUN)} the lint of device code: {escape(error.what)}")
        return catches.Score("lint", 0, 0, ())
    if score.planted:
        low, high = score.interval
        out.print(f"apart from these: {score.caught} of {score.planted} faults that no run need show are seen by the lint "
                  f"({low:.0%} to {high:.0%})" + (f"; unseen: {' '.join(score.survivors)}" if score.survivors else ""))
    return score


def cmd_pin(ids: Sequence[str] = (), *, measurements: int | None = None, add: bool = False, console: Console | None = None) -> int:
    """Measure the shares that the perf gate judges by, each time in a fresh process, and write them to baselines/perf. `add`: to what is
    pinned already of the same code. 1 if a component could not be pinned."""
    out = console_or(console)
    chosen = pin.timed(catalogue(), run.matching(catalogue(), ids))
    made = pin.run(chosen, measurements=measurements, add=add, report=lambda text: out.print(text, markup=False), catalogue=catalogue())
    noisy = [(p.component, case, line) for p in made for case in p.shares if (line := p.line(case)) is not None and not line.judged]
    for component, case, line in noisy:
        out.print(f"{coloured(NOT_RUN)} {component} {case}: too noisy to judge, spread {line.spread:.1%}")
    cases = sum(len(p.shares) for p in made)
    out.print(f"{len(made)} of {len(chosen)} components pinned; {cases - len(noisy)} of {cases} cases can be judged")
    for tries in (1, run.PERF_TRIES):
        alarms, trials = pin.false_alarms(made, tries)
        if trials:
            out.print(f"{tries} in a row held against the line of the others: {alarms} of {trials} below it")
    return 0 if len(made) == len(chosen) else 1


def audited(*, changed: bool, everything: bool, n: int | None, seed: int | None) -> int:
    """`alpha gate audit`: a sample, or what changed. InputError for options of the one beside the other, which would say nothing."""
    if changed and (n is not None or seed is not None):
        raise InputError("-n and --seed draw a sample, and --changed takes none", came="both", expected="--changed, with or without --all")
    if everything and not changed:
        raise InputError("--all says how much of what changed is measured again", came="--all alone", expected="--changed --all")
    return cmd_audit_changed(everything=everything) if changed else cmd_audit(5 if n is None else n, seed=seed)


def cmd_audit(n: int = 5, *, seed: int | None = None, console: Console | None = None) -> int:
    """Rerun a random sample of the shipped records of this machine class and compare; 1 if one does not repeat, 3 if there is none."""
    out = console_or(console)
    results = audit.run(catalogue(), shipped_root(), n, seed)
    if not results:
        out.print(f"{coloured(NOT_RUN)} no shipped evidence of {machine_class().key} to audit")
        return 3
    _show_audited(results, out)
    return _code(results)


def cmd_audit_changed(*, everything: bool = False, console: Console | None = None) -> int:
    """Measure again the lines of evidence that differ from the commit that this branch left, on the main branch from its first parent: for
    90 s, drawn by the commit's hash, or all of them. 1 if one does not repeat; 3 if none that changed can run here, or no history is."""
    out, history = console_or(console), History()
    if history.why_not or not history.base:
        out.print(f"{coloured(NOT_RUN)} what changed cannot be told: {escape(history.why_not or 'the clone is too shallow')}")
        return 3
    what = audit.changed(catalogue(), shipped_root(), history, load_faults(catalogue=catalogue()), quiet=everything)
    for machine, n in sorted(what.elsewhere.items()):
        out.print(f"{coloured(NOT_RUN)} {n} changed lines of {machine}: run `alpha gate audit --changed --all` on such a machine")
    if not what.here and not what.faults:
        out.print(f"no line of this machine's classes differs from {history.base[:12]}")
        return 3 if what.elsewhere else 0
    with termination_raises():
        results, left = audit.run_changed(catalogue(), what, history.head, None if everything else audit.SECONDS)
    _show_audited(results, out)
    out.print(f"{len(results)} lines that differ from {history.base[:12]} measured again, {left} not drawn")
    return _code(results)


def _code(results: Sequence[audit.Audited]) -> int:
    """1 where one does not repeat, 3 where nothing could be said of any."""
    return 1 if any(r.problems for r in results) else 3 if all(r.not_run for r in results) else 0


def _show_audited(results: Sequence[audit.Audited], out: Console) -> None:
    for r in results:
        how = coloured(NOT_RUN) if r.not_run else "[bold red]DIFFERS[/]" if r.problems else "[green]repeats[/]"
        out.print(f"{how} {r.component} {r.gate}")
        for problem in (r.not_run,) if r.not_run else r.problems[:5]:
            out.print(f"    {problem}", markup=False)


def cmd_coverage(*, hosts: bool = False, console: Console | None = None) -> int:
    """Call the CPU's kernels on the samples of their gates, or run the cases of host components (`hosts`, minutes); 1 where a branch is not
    taken, or an exemption is not needed."""
    if hosts:
        looked = host_coverage.hosts(catalogue())
        found = host_coverage.problems(host_coverage.untaken(looked, host_coverage.files()))
        sides, exempt = branches.count(host_coverage.files()), len(host_coverage.exemptions())
        what = f"{len(looked)} components, {', '.join(host_coverage.PACKAGES)}"
    else:
        kernels = coverage.kernels(catalogue())
        found = coverage.problems(coverage.untaken(kernels))
        sides, exempt, what = coverage.sides(kernels), len(coverage.exemptions()), f"{len(kernels)} kernels"
    out = console_or(console)
    for problem in found:
        out.print(problem, markup=False, soft_wrap=True)
    out.print(f"{what}: {sides} sides of branches, {exempt} exempt, {len(found)} problems")
    return int(bool(found))


def cmd_asked(*, why: str = "", console: Console | None = None) -> int:
    """Write the list of what is asked of evidence anew; 1 and nothing written where it would ask for less and no reason is given."""
    out, root = console_or(console), shipped_root()
    now = asked.today(catalogue(), root, load_faults(catalogue=catalogue()))
    fell = asked.renew(root, now, why)
    for item in fell:
        out.print(f"    {item}", markup=False)
    if fell and not why.strip():
        out.print(f"{len(fell)} items fall or change, and no reason is given: nothing is written\ndo: --why TEXT")
        return 1
    out.print(f"{len(now)} items kept" + (f"; {len(fell)} fell, with the reason in {asked.reasons_path(root).name}" if fell else ""))
    return 0


def cmd_sign(*, key: Path, signer: str, machine: str = "", everything: bool = False, console: Console | None = None) -> int:
    """Sign the shipped evidence of one class: what differs from where this branch began, or with `everything` all of it."""
    out, root, history = console_or(console), shipped_root(), History()
    if history.why_not and not everything:
        raise MachineError("nobody can tell which lines were measured here", came=history.why_not, expected="a git checkout with a commit",
                           do="sign all lines: --all")
    signed, line = signatures.sign(root, class_of_key(machine or machine_class().key).key, key, signer,
                                   None if everything else history.changed(root))
    out.print(f"{signed} lines are signed by {signer}")
    if signer not in signatures.signers(root).get(line.split(" ")[0], {}):
        out.print(f"do: name the signer, else nobody looks at the signatures. Add this line to {signatures.signers_path(root).name}:")
        out.print(line, markup=False, soft_wrap=True)
    return 0 if signed else 3


def cmd_operating(component_id: str = "gelu.f32.cpu", *, case: str = "", seconds: float = 60.0, console: Console | None = None) -> int:
    """Measure and publish the perf gate's false-alarm rate and power."""
    out = console_or(console)
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
