"""Options of the console scripts: what argparse does, without the errors that it drops. Floor 0."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import IO

from alpha.errors import exit_code

MOST_DIGITS = 18
"""Of a number in the text of an option: 64 bits hold it, and Python refuses to read thousands of digits."""


class Parser(argparse.ArgumentParser):
    """Help that cannot be written raises OSError; argparse itself would end with 0."""

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        """To `file`, else to standard output."""
        print(self.format_help(), end="", file=file or sys.stdout)


def ended(name: str, parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None,
          command: Callable[[argparse.Namespace], tuple[str, Callable[[], int]]]) -> int:
    """The exit code of the console script `name`. `command`: of its arguments the name that errors begin with, and what to run. SystemExit
    with 2 for arguments that are none."""
    given = list[argparse.Namespace]()

    def parse() -> int:
        given.append(parser().parse_args(argv))
        return 0

    code = exit_code(name, parse)
    if not given:
        return code  # --help or --version
    named, run = command(given[0])
    return exit_code(named, run, debug=given[0].debug)
