"""The command line: `alpha train`, `lab`, `data`, `gate`, `plan`, `kernels`, `bench`, `sample`, `trace`, `dashboard`, `doctor`. Floor 9.

Exit codes: 0 done; 1 a verdict said no; 2 bad input; 3 the machine lacks what was asked, or nothing that was asked for could run;
129, 130, 143 a training run that SIGHUP, SIGINT or SIGTERM ended, saved unless the signal came twice. An error is one message, no
traceback (`--debug` shows it).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from alpha import options, resources
from alpha.bench import command as bench
from alpha.cli.arguments import parser
from alpha.cli.common import enough_files
from alpha.train import forbidden


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. The console script begins in alpha/__main__.py, before this is imported."""
    return options.ended("alpha", parser, argv, lambda args: (f"alpha {args.command}", lambda: _run(args)))


def _run(args: argparse.Namespace) -> int:
    with enough_files():
        resources.checkout()
        return _watched(args) if _computes(args) else int(args.run(args))


WATCHED = ("train", "lab", "sample", "bench", "gate")
"""Commands that run our code for a result: what their process holds is looked at from its start to its end."""


READERS = ("list", "status", "explain", "check", "asked", "sign")
"""Actions of `alpha gate` that run none of it. Signatures are of a library that no training process may hold."""


def _computes(args: argparse.Namespace) -> bool:
    if args.command == "bench":
        return args.what not in bench.READERS
    if args.command == "gate":
        return args.action not in READERS
    return args.command in WATCHED


def _watched(args: argparse.Namespace) -> int:
    forbidden.watch()
    forbidden.check("at the start")
    code = int(args.run(args))
    forbidden.check("at the end")
    return code
