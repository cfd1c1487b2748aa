"""Stand-ins in place of what a module calls, errors as a person reads them, and what else cases of wiring share. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from alpha.errors import AlphaError, shown

Named = list[tuple[str, bool]]
"""What is looked at, and whether it is so; all_hold of contracts/checks.py counts them."""


_NONE = object()


@contextmanager
def instead(module: Any, **values: Any) -> Iterator[None]:
    """Within it these names of a module, or attributes of an object, are others; a name may be a builtin's."""
    before = {name: getattr(module, name, _NONE) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _NONE:
                delattr(module, name)
            else:
                setattr(module, name, value)


def said(action: Callable[[], object]) -> str:
    """The kind of error that an action ends in, and all its words; what it gives where it ends in none."""
    try:
        return f"{action()}"
    except AlphaError as error:
        return f"{type(error).__name__}: {error}"


def error_text(kind: str, what: str, came: object, expected: object = None, do: str = "") -> str:
    """As `said` has it."""
    lines = [f"{kind}: {what}", f"  came:     {came}"]
    lines += [] if expected is None else [f"  expected: {expected}"]
    return shown("\n".join([*lines, *([f"  do:       {do}"] if do else [])]))


def same(checks: Named, name: str, got: object, expected: object) -> None:
    """A check that two things are equal, which shows both."""
    checks.append((f"{name}: {got!r} for {expected!r}"[:190] if got != expected else name, got == expected))
