"""How a case counts what holds and what does not: comparisons, refusals by kind and by words. Every room of cases uses it. Floor 7."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from alpha.component import Measured
from alpha.errors import AlphaError


class Checks:
    """Counts comparisons and names those that failed. `measured()` passes where there were some and none failed."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.cases = 0
        self._digest: Any = None

    def that(self, holds: object, what: str = "") -> None:
        """One comparison; `what` names it where it fails."""
        self.cases += 1
        if not bool(holds):
            self.wrong.append(what)

    def refuses(self, kind: type[Exception], action: Callable[..., object], what: str, *args: Any, **kwargs: Any) -> None:
        """`action(*args, **kwargs)` raises exactly `kind`, no subclass."""
        self.says(kind, lambda: action(*args, **kwargs), what)

    def says(self, kind: type[Exception], action: Callable[[], object], what: str, *words: str) -> None:
        """`action()` raises exactly `kind`, and its text holds all of `words`."""
        try:
            action()
        except Exception as error:  # any other class is a wrong answer, counted here
            good = type(error) is kind and all(word in str(error) for word in words)
            self.that(good, f"{what}: {type(error).__name__} for {kind.__name__}: {error}")
        else:
            self.that(False, f"{what}: accepted instead of {kind.__name__}")

    def tells(self, kind: type[AlphaError], told: tuple[object, object, object, object], action: Callable[[], object]) -> None:
        """`action()` raises exactly `kind` and tells this and no more: what broke, what came, what was expected, what to do."""
        want = kind.__name__, *("" if x is None else str(x) for x in told)
        got = words(action)
        self.that(got == want, f"{told[0]}: {got or 'accepted'}")

    def raises(self, kind: type[AlphaError], what: str, action: Callable[[], object], *, naming: str = "") -> None:
        """`action()` raises `kind`, or one of its subclasses, whose text holds `naming`."""
        try:
            action()
        except AlphaError as error:
            self.that(isinstance(error, kind) and naming in str(error), f"{what}: {type(error).__name__} {error.what}")
        else:
            self.that(False, f"{what}: accepted")

    def add(self, data: bytes) -> None:
        """Make `data` part of the digest, which the determinism gate compares between processes."""
        self._digest = self._digest or hashlib.sha256()
        self._digest.update(len(data).to_bytes(8, "little") + data)

    def measured(self, digest: str = "") -> Measured:
        """How many failed, against 0. `digest`: in place of that of what was added."""
        digest = digest or (self._digest.hexdigest() if self._digest is not None else "")
        return Measured(float(len(self.wrong)), 0.0, self.cases, digest, "; ".join(self.wrong)[:200])


def all_hold(checks: Iterable[tuple[str, object]], data: bytes = b"") -> Measured:
    """How many of these do not hold, and which: (name, whether it holds). `data`: what the digest is of."""
    found = Checks()
    for name, holds in checks:
        found.that(holds, name)
    if data:
        found.add(data)
    return found.measured()


def differs(name: str, got: object, want: object) -> tuple[str, bool]:
    """For `all_hold`: both are equal."""
    return f"{name}: {got} for {want}", got == want


def words(action: Callable[[], object]) -> tuple[str, ...]:
    """(class, what, came, expected, do) of an error that this project raises, '' where it says nothing; () where none came. Any other
    error is the case's own failure."""
    try:
        action()
    except AlphaError as error:
        said = (error.what, error.came, error.expected, error.do)
        return type(error).__name__, *("" if x is None else str(x) for x in said)
    return ()
