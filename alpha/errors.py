"""The exception tree. Floor 0: imports nothing from the package.

Every error says which invariant broke (`what`), what came, what would be right (`expected`) and what to do next (`do`).
The exit code of the command line is a property of the error's class, so that no caller has to map it:
0 done; 1 a verdict said no; 2 bad input; 3 the machine lacks what was asked, or nothing that was asked for could run; 4 a spot check of
a run failed.
"""

from __future__ import annotations

import os
import sys
import traceback
import unicodedata
from collections.abc import Callable

MOST_SHOWN = 400
"""Characters of a line of an error that are shown; of a longer one the beginning and the end."""


class AlphaError(Exception):
    """Base of everything raised on purpose.

    `what`: the invariant that broke, one line. `came`: the offending value. `expected`: what would be right. `do`: next step.
    """

    exit_code = 1

    def __init__(self, what: str, *, came: object = None, expected: object = None, do: str | None = None) -> None:
        self.what, self.came, self.expected, self.do = what, came, expected, do
        lines = [what]
        if came is not None:
            lines.append(f"  came:     {came}")
        if expected is not None:
            lines.append(f"  expected: {expected}")
        if do is not None:
            lines.append(f"  do:       {do}")
        super().__init__(shown("\n".join(lines)))


def shown(text: str) -> str:
    """Text that is fit for a terminal, whatever came: long lines shortened, control characters and lone surrogates as escapes."""
    return "\n".join(_shortened(line) for line in text.split("\n"))


def _shortened(line: str) -> str:
    if len(line) > MOST_SHOWN:
        line = f"{line[: MOST_SHOWN - 100]} ... ({len(line):,} characters) ... {line[-60:]}"
    return visible(line)


def visible(text: str) -> str:
    """`text` with control characters, marks that turn the direction of writing and lone surrogates as escapes; line ends and tabs stay."""
    if text.isprintable():
        return text
    kept = {c: c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" for c in set(text)}
    return "".join(c if kept[c] else c.encode("unicode_escape").decode() for c in text)


class VerdictError(AlphaError):
    """A gate, a policy or a check said no (exit code 1)."""

    exit_code = 1


class UngatedError(VerdictError):
    """A component that a run needs is not usable on this machine class."""


class NonFiniteError(VerdictError):
    """A value became NaN or infinite; `what` names node, op and the model's source line."""


class SpotCheckError(VerdictError):
    """What a run computed is not what its operands give, or memory changed by itself (exit code 4). `what` names op, rank, step and the
    model's source line, `came` the place."""

    exit_code = 4


class GraphError(VerdictError):
    """A graph, plan or program breaks one of its invariants (a defect of a pass, never of the user's input)."""


class RankError(VerdictError):
    """Another rank died, stopped, never came, or does something else than this one. `rank`: the one at fault, -1 where none is alone;
    `op`: the collective in which that was seen, '' outside of any; `step`: the training step, -1 before the first."""

    def __init__(self, what: str, *, rank: int = -1, op: str = "", step: int = -1, came: object = None, expected: object = None,
                 do: str | None = None) -> None:
        self.rank, self.op, self.step = rank, op, step
        super().__init__(what, came=came, expected=expected, do=do)


class InputError(AlphaError):
    """Bad input from the user (exit code 2)."""

    exit_code = 2


class ConfigError(InputError):
    """A run file with an unknown key, a wrong type or an impossible value."""


class ShapeError(InputError):
    """Shapes or dtypes that an op does not accept."""


class CorruptError(InputError):
    """A file that is torn, edited or not what its hash says: checkpoint, evidence, tokenizer, run directory."""


class BusyError(InputError):
    """Something else holds the directory or file (two runs in one directory)."""


class MachineError(AlphaError):
    """This machine lacks what was asked: a GPU, a compiler, a package, disk space (exit code 3)."""

    exit_code = 3


def exit_code(name: str, command: Callable[[], int], *, debug: bool = False) -> int:
    """What the console script `name` ends with: the command's own code, or that of its error, told on standard error (130 when
    interrupted). debug: with the traceback."""
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")
    try:
        return _ended(command)
    except BrokenPipeError:
        _drop_output()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (AlphaError, OSError, MemoryError) as error:
        told = _told(error)
        if debug:
            traceback.print_exc()
        if not debug or told is not error:
            print(f"{name}: {told}", file=sys.stderr)
        if isinstance(error, OSError) and error.filename is None:
            _drop_output()
        return told.exit_code


def _ended(command: Callable[[], int]) -> int:
    """A command's code, once its output is written. argparse ends by itself: with 0 after --help, else it told what is wrong."""
    try:
        code = command()
    except SystemExit as ended:
        if ended.code:
            raise
        code = 0
    sys.stdout.flush()
    return code


def _told(error: AlphaError | OSError | MemoryError) -> AlphaError:
    """What is said of an error; of one that nobody foresaw, such as a folder that may not be searched or a full disk, the machine's."""
    if isinstance(error, AlphaError):
        return error
    if isinstance(error, MemoryError):
        return MachineError("memory ran out", came=str(error) or None, do="take smaller sizes; `alpha plan` says what a run needs")
    where = error.filename if error.filename is not None else "standard output, or a file without a name"
    return MachineError("a file or folder cannot be used", came=f"{shown(str(where))} ({error.strerror or error})",
                        expected="permission and room there", do="check it; --debug shows what was done")


def _drop_output() -> None:
    """What standard output still holds goes nowhere: else the interpreter complains of it once more as it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
