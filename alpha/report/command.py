"""`alpha-report`: one HTML page, one Markdown page and CSV files on any number of runs. Floor 7.

Exit codes: 0 done; 2 bad input; 3 the machine lacks what was asked (pandas, matplotlib, disk space).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from alpha import options
from alpha.errors import InputError, visible
from alpha.files import path_argument


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; returns its exit code."""
    return options.ended("alpha-report", parser, argv, lambda args: ("alpha-report", lambda: run(args)))


def parser() -> argparse.ArgumentParser:
    """Every option."""
    p = options.Parser(prog="alpha-report", description="Where each millisecond and byte of a run's steps went.")
    p.add_argument("runs", nargs="*", type=path_argument, metavar="RUN", help="run directories (default: the newest under runs/)")
    p.add_argument("--out", type=path_argument, metavar="FOLDER", help="where to write (default: reports/ and the name of the run)")
    p.add_argument("--compare", action="store_true", help="is the second of two runs slower or faster than the first, and where")
    p.add_argument("--anyway", action="store_true", help="compare runs of different programs or machines; the report says how they differ")
    p.add_argument("--mixed-flops", action="store_true", help="put runs of different FLOPS models on one axis; the report says so")
    p.add_argument("--target", action="append", default=[], metavar="FIGURE=VALUE", help="judge a figure by this, such as mfu=0.4")
    p.add_argument("--top", type=int, default=15, metavar="N", help="slowest ops to show (default %(default)s)")
    p.add_argument("--points", type=int, default=250, metavar="N", help="most points of a line (default %(default)s)")
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return p


def run(args: argparse.Namespace) -> int:
    """Make the report and say where it is."""
    targets = dict(_target(text) for text in args.target)
    for name, least in (("top", 1), ("points", 2)):
        if getattr(args, name) < least:
            raise InputError(f"--{name} is too small", came=getattr(args, name), expected=f"{least} or more")
    from alpha.registry.status import Registry
    from alpha.report import runs as reading
    from alpha.report.extra import matplotlib  # noqa: F401, asked for first, so that a missing one is one clear error
    from alpha.report.build import build  # isort: skip
    from alpha.report.write import MARKDOWN, write
    from alpha.train.catalogue import catalogue

    paths = [Path(p) for p in args.runs] or [reading.newest()]
    if args.compare and len(paths) != 2:
        raise InputError("a comparison is of two runs", came=f"{len(paths)} runs", expected="alpha-report A B --compare", do="name two")
    found = [reading.load(p, thorough=True) for p in paths]
    reading.distinct(found)
    document = build(found, registry=Registry(catalogue()), compare=args.compare, anyway=args.anyway, mixed=args.mixed_flops,
                     targets=targets, top=args.top, points=args.points)  # fmt: skip
    page = write(document, Path(args.out) if args.out else Path("reports") / default_name([visible(r.name) for r in found]))
    print(visible(f"{page}\n{page.with_name(MARKDOWN)}"))
    return 0


def default_name(names: Sequence[str]) -> str:
    """Folder of the report: the run's name, 'a-and-b', or 'a-and-9-more'."""
    if len(names) < 3:
        return "-and-".join(names)
    return f"{names[0]}-and-{len(names) - 1}-more"


def _target(text: str) -> tuple[str, float]:
    name, sign, value = text.partition("=")
    try:
        return name.strip(), float(value) if sign else float("nan")
    except ValueError:
        raise InputError("a target is a figure and a number", came=text, expected="such as mfu=0.4") from None


if __name__ == "__main__":
    sys.exit(main())
