"""`alpha gate run --from FOLDER`: a kernel that lies in a user's own folder, gated; its evidence and its page stay there. Floor 9."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from alpha.cli.common import coloured, console_or, shown
from alpha.errors import InputError, MachineError
from alpha.gates.outside import folder
from alpha.gates.outside import run as outside_run
from alpha.gates.processes import termination_raises
from alpha.registry.gates import GATES
from alpha.registry.judge import NOT_RUN

PAGE = "report"
"""Folder of the component's own folder in which its page lies."""


def cmd_outside(args: argparse.Namespace, *, console: Console | None = None) -> int:
    """The gates of the component that --from names. 0: all satisfied; 1: one is not; 3: none could run here."""
    if args.ids or args.run_file or args.stale or args.ship or args.set or args.budget or args.nproc != 1:
        raise InputError("--from gates one folder and nothing beside it", came="other arguments",
                         expected="--gate, --python or --no-page")
    if args.gate is not None and args.gate not in GATES:
        raise InputError("no such gate", came=args.gate, expected=", ".join(GATES))
    out = console_or(console)
    outside = folder.load(folder.find(args.folder))
    out.print(f"{outside.component.id}: {outside.files[0]}, {outside.kept_apart}", markup=False)

    def show(result: outside_run.Result) -> None:
        seconds = result.record.environment.get("seconds", "?") if result.record is not None else "-"
        out.print(f"{coloured(result.verdict):24} {result.gate:12} {seconds:>6} s")
        for line in result.why[:4]:
            out.print(f"    {line}", style="red", markup=False)

    with termination_raises():  # its process and its operands are folders and memory that nobody else clears
        results = outside_run.gates(outside, args.gate, python=args.python or sys.executable, on_result=show)
    code = 3 if all(r.verdict == NOT_RUN for r in results) else 0 if all(r.satisfied for r in results) else 1
    if any(r.record is not None for r in results):
        out.print(f"evidence: {shown(Path(outside.folder) / outside_run.EVIDENCE)}", markup=False)
        if not args.no_page:
            try:
                out.print(f"page: {shown(write_page(outside, results))}", markup=False)
            except MachineError as error:
                if code != 1:
                    raise
                print(f"alpha gate: {error}", file=sys.stderr)  # what the gates said decides, with or without a page
    return code


def write_page(outside: folder.Outside, results: Sequence[outside_run.Result]) -> Path:
    """The page in the component's folder, by a process of its own: pandas may not be in one that runs gates. MachineError where the extra
    `report` is missing; the evidence then stands."""
    about = [f"{outside.language} candidate {', '.join(outside.files)}, {outside.kept_apart}",
             *(f"{name} sha256 {digest}" for name, digest in outside.digests().items())]
    said = {"name": outside.component.id, "about": about, "out": str(outside.folder / PAGE),
            "verdicts": [(r.gate, r.verdict, list(r.why)) for r in results],
            "records": [r.record.line() for r in results if r.record is not None]}
    command = [sys.executable, "-m", "alpha.report.outside"]
    done = subprocess.run(command, input=json.dumps(said), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MachineError("the page could not be written", came=done.stderr.strip().rsplit("\n", 1)[-1], do="see above, or give --no-page",
                           expected="the extra `report`, and a folder that can be written")
    return outside.folder / PAGE / "report.html"
