"""`alpha kernels build` and `alpha kernels check`: arguments, progress, what is printed. Floor 7.

0 done, 1 the check said no, 2 a kernel does not compile or bad input, 3 no compiler or no disassembler.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.toolchain import find_nvcc, find_nvdisasm
from alpha.errors import AlphaError, InputError, MachineError
from alpha.gates.device_code import baseline as kernels_baseline
from alpha.gates.device_code import build as kernels
from alpha.train.catalogue import catalogue

PIN = "alpha kernels build --pin"
MOST_SHOWN = 20


def arguments(parser: argparse.ArgumentParser) -> None:
    """The two actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "compile what GPU components load; cached, so only what changed is compiled"
    p = actions.add_parser("build", help=text, description=text)
    p.set_defaults(run=lambda a: cmd_build(a.ids, jobs=a.jobs, pin=a.pin))
    p.add_argument("ids", nargs="*", metavar="COMPONENT", help="none = all, and what the profiler and the perf gate need")
    p.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: one per CPU)")
    p.add_argument("--pin", action="store_true", help="make the result the committed baselines: baselines/cubins.json and kernels.json")
    text = "compile again and compare with the committed baselines; audit the machine code; needs no GPU"
    p = actions.add_parser("check", help=text, description=text)
    p.set_defaults(run=lambda a: cmd_check(jobs=a.jobs, sample=a.sample, seed=a.seed, fresh=a.fresh, audit=not a.no_audit))
    p.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: one per CPU)")
    p.add_argument("--sample", type=int, metavar="N", help="what the manifest does not know, one of every file, and others up to N in all")
    p.add_argument("--seed", metavar="TEXT", help="draw this sample")
    p.add_argument("--fresh", action="store_true", help="take nothing from the cache")
    p.add_argument("--no-audit", action="store_true", help="leave the opcodes alone: no disassembler is needed")


def cmd_build(ids: Sequence[str] = (), *, jobs: int | None = None, pin: bool = False, console: Console | None = None) -> int:
    """Compile; with `pin` write the baselines. Every kernel that fails is printed with the compiler's words; 2 if there is one."""
    out, began = _console(console), time.monotonic()
    if pin and ids:
        raise InputError("--pin writes the baselines of everything", came=" ".join(ids), expected="no component", do=PIN)
    _jobs(jobs)
    sources = kernels.needed(catalogue(), ids)
    if pin:
        kernels.exact_compiler()
        find_nvdisasm()
    with _progress(out, sources) as done:
        made = kernels.compile_sources(sources, jobs=jobs, look=pin, done=done)
    for error in made.errors.values():
        out.print(str(error), markup=False, style="red")
    out.print(f"{len(made.cubins)} of {len(sources)} files compiled by nvcc {find_nvcc()[1]} in {time.monotonic() - began:.1f} s"
              + (f"; [bold red]{len(made.errors)} failed[/]" if made.errors else ""))
    if made.errors:
        return 2
    if pin:
        before = kernels_baseline.load()
        changed = kernels.pin(sources, made)
        worse, better = kernels_baseline.compare(kernels_baseline.load(), before)
        _list(out, changed, "manifest")
        _list(out, [*worse, *better], "resources")
        out.print("pinned: baselines/cubins.json, baselines/kernels.json" + ("" if changed or worse or better else " (nothing changed)"))
    return 0


def cmd_check(*, jobs: int | None = None, sample: int | None = None, seed: str | None = None, fresh: bool = False, audit: bool = True,
              console: Console | None = None) -> int:
    """Compile and compare; 1 if anything differs from the baselines or breaks a rule, 3 if the opcodes could not be looked at."""
    out, began = _console(console), time.monotonic()
    _jobs(jobs)
    if sample is not None and sample < 0:
        raise InputError("--sample counts files", came=sample, expected="0 or more")
    unlooked = ""
    if audit:
        try:
            find_nvdisasm()
        except MachineError as error:
            unlooked = str(error)
    everything = kernels.needed(catalogue())
    chosen = everything
    if sample is not None:
        seed = seed or secrets.token_hex(4)
        chosen = kernels.sample(everything, sample, seed)
        out.print(f"{len(chosen)} of {len(everything)} files; the same again: --sample {sample} --seed {seed}")
    with kernels.fresh_cache() if fresh else nullcontext(), _progress(out, chosen) as done:
        result = kernels.check(everything, chosen, look=audit and not unlooked, jobs=jobs, done=done)
    for _, text in result.failures[:MOST_SHOWN]:
        out.print(text, markup=False, style="red")
    if len(result.failures) > MOST_SHOWN:
        out.print(f"... and {len(result.failures) - MOST_SHOWN} more", style="red")
    _list(out, result.better, "better than the baseline; keep it with --pin")
    out.print(f"{result.compiled} files compiled by nvcc {find_nvcc()[1]}, {result.audited} audited, {len(result.failures)} failures, "
              f"{time.monotonic() - began:.1f} s")
    if result.failures:
        stale = kernels.users(catalogue(), [source for source, _ in result.failures if source is not None])
        out.print(f"do: mend the kernel; where the change is meant: {PIN}, read the difference, commit both files", markup=False)
        if stale:
            out.print(f"    and renew the evidence on a GPU machine: alpha gate run --stale --ship {' '.join(stale)}", markup=False)
        return 1
    if unlooked:
        out.print(f"NOT_RUN audit of the opcodes: {unlooked}", markup=False, style="yellow")
        return 3
    return 0


def _console(console: Console | None) -> Console:
    return console or Console(soft_wrap=True, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 160)


def _jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise InputError("--jobs counts compilers", came=jobs, expected="1 or more")


def _list(out: Console, lines: Sequence[str], title: str) -> None:
    for line in lines[:MOST_SHOWN]:
        out.print(f"{title}: {line}", markup=False)
    if len(lines) > MOST_SHOWN:
        out.print(f"{title}: ... and {len(lines) - MOST_SHOWN} more")


@contextmanager
def _progress(out: Console, sources: Sequence[Source]) -> Iterator[kernels.Done | None]:
    """What to call after each source: a bar on a terminal, elsewhere one line before the first."""
    if not out.is_terminal:
        out.print(f"compiling {len(sources)} files")
        yield None
        return
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=out, transient=True) as progress:
        task = progress.add_task("", total=len(sources))

        def done(source: Source, error: AlphaError | None) -> None:
            progress.update(task, advance=1, description=f"{'failed ' if error else ''}{source.path}")

        yield done
