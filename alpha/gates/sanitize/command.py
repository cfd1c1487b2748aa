"""`alpha gate sanitize`: arguments, and what is printed. Floor 7.

0 no tool reported anything of sound code, and at least one showed that it looks; 1 a tool reported sound code; 2 bad input; 3 nothing
could be looked at: no GPU, no compute-sanitizer, or no tool that saw what was planted.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from rich.console import Console

from alpha.component import Component
from alpha.errors import InputError
from alpha.gates.processes import termination_raises
from alpha.gates.sanitize import engine as cuda_sanitize
from alpha.gates.sanitize import tool as sanitize_tool
from alpha.registry.gpu import gpu_class, why_not_here
from alpha.registry.judge import FAIL, NOT_RUN, PASS
from alpha.registry.package import Package
from alpha.registry.status import Registry
from alpha.train.catalogue import catalogue

_COLOUR = {PASS: "green", FAIL: "bold red", NOT_RUN: "dim"}


def arguments(p: argparse.ArgumentParser) -> None:
    """Arguments of the action."""
    p.set_defaults(run=lambda a: cmd_sanitize(a.ids, tools=a.tool, prepare=a.prepare, stale=a.stale, workers=a.workers, ship=a.ship))
    p.add_argument("ids", nargs="*", metavar="ID", help="components, '*' stands for anything; none = every kernel of the GPU")
    p.add_argument("--tool", action="append", choices=sanitize_tool.TOOLS, help="only this tool; may be repeated")
    p.add_argument("--prepare", action="store_true", help="only compile what the run loads, sound and broken; needs no GPU")
    p.add_argument("--stale", action="store_true", help="only what has no finding about the code as it is; so a run that was cut goes on")
    p.add_argument("--workers", type=int, default=8, help="processes at a time (default %(default)s)")
    p.add_argument("--ship", action="store_true", help="write into the repository's findings instead of the local ones")


def cmd_sanitize(ids: Sequence[str] = (), *, tools: Sequence[str] | None = None, prepare: bool = False, stale: bool = False,
                 workers: int = 8, ship: bool = False, console: Console | None = None) -> int:
    """See the head of this file."""
    out = console or Console(soft_wrap=True, highlight=False, emoji=False)
    every = [c for c in catalogue() if c.kind == "kernel" and c.backend == "cuda"]
    named = [c for c in every if not ids or any(fnmatchcase(c.id, i) for i in ids)]
    if not named:
        raise InputError("no kernel of the GPU matches", came=" ".join(ids), do="list them with `alpha gate list`")
    if workers < 1:
        raise InputError("too few processes", came=workers, expected="1 or more")
    tools = tools or sanitize_tool.TOOLS
    if not prepare and (why := why_not(named[0])):
        out.print(f"[dim]NOT_RUN[/] {len(named)} components: {why}")
        return 3
    machine = found.key if (found := gpu_class()) is not None else ""
    wanted = {c: cuda_sanitize.missing(c, machine, tools) if stale and machine else list(tools) for c in named}
    todo = cuda_sanitize.jobs({c: t for c, t in wanted.items() if t}, report=lambda text: out.print(text, markup=False))
    if not todo:
        out.print("nothing to run: every tool has a finding about the code as it is; `alpha gate status` shows the verdicts")
        return 0  # done before: nothing is left to do
    planted = sum(len(j.plants) for j in todo)
    out.print(f"{len(todo)} pairs of component and tool, {planted} planted errors, compiled")
    sanitizer = sanitize_tool.find()
    if prepare or sanitizer is None:
        return 0
    counts = dict.fromkeys(_COLOUR, 0)

    def show(found: cuda_sanitize.Finding) -> None:
        what, why = cuda_sanitize.verdict(found)
        counts[what] += 1
        out.print(f"[{_COLOUR[what]}]{what:8}[/] {found.tool:10} {found.component:34} {found.calls} calls", end=" ")
        out.print(why, markup=False)

    with termination_raises():
        cuda_sanitize.measure(sanitizer, todo, machine, workers=workers, root=cuda_sanitize.shipped_root() if ship else None,
                              on_result=show)
    out.print(", ".join(f"{n} {what}" for what, n in counts.items()) + f"; compute-sanitizer {sanitize_tool.version(sanitizer)}")
    return 1 if counts[FAIL] else 0 if counts[PASS] else 3


def verdicts_of(registry: Registry, ids: Sequence[str]) -> dict[str, dict[str, tuple[str, str]]]:
    """component -> tool -> (verdict, why) on the class whose evidence counts, of the kernels of the GPU among `ids`."""
    package, found = Package(), {}
    for component in (registry.catalogue[i] for i in ids):
        if component.kind == "kernel" and component.backend == "cuda":
            machine = registry.machine_of(component)
            found[component.id] = ({tool: (NOT_RUN, why_not_here(component)) for tool in sanitize_tool.TOOLS} if machine is None else
                                   cuda_sanitize.recorded_verdicts(component, machine.key, package=package))
    return found


def cell(verdicts: Mapping[str, tuple[str, str]]) -> str:
    """One cell of the table of all components, such as `3 PASS, 1 NOT_RUN`."""
    counts = Counter(verdict for verdict, _ in verdicts.values())
    return ", ".join(f"{n} [{_COLOUR[v]}]{v}[/]" for v, n in sorted(counts.items()))


def why_not(component: Component) -> str:
    """Why nothing can be looked at here; '' when it can."""
    if why := why_not_here(component):
        return why
    tool = sanitize_tool.find()
    if tool is None:
        return "needs compute-sanitizer, which is neither on PATH nor in /usr/local/cuda/bin; it comes with the CUDA toolkit"
    return "" if sanitize_tool.version(tool) else f"{tool.name} does not start"
