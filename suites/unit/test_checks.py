"""What every case counts by: a comparison that fails is counted and named, and a refusal of another kind, or with other words, is none."""

from __future__ import annotations

import pytest

from alpha.errors import AlphaError, CorruptError, InputError
from alpha.gates.contracts.checks import Checks, all_hold, differs, words


class Narrower(InputError):
    """A kind of its own."""


def _raise(error: Exception) -> None:
    raise error


ERROR = InputError("a thing broke", came="this", expected="that", do="the other")
GOOD = {
    "that": lambda c: c.that(True, "x"),
    "refuses": lambda c: c.refuses(InputError, _raise, "x", ERROR),
    "says": lambda c: c.says(InputError, lambda: _raise(ERROR), "x", "this", "that"),
    "tells": lambda c: c.tells(InputError, ("a thing broke", "this", "that", "the other"), lambda: _raise(ERROR)),
    "raises": lambda c: c.raises(AlphaError, "x", lambda: _raise(ERROR), naming="broke"),
}
BAD = {
    "not so": lambda c: c.that(0, "x"),
    "accepted": lambda c: c.refuses(InputError, lambda: None, "x"),
    "a subclass": lambda c: c.refuses(InputError, _raise, "x", Narrower("a thing broke")),
    "another kind": lambda c: c.says(CorruptError, lambda: _raise(ERROR), "x"),
    "no error of ours": lambda c: c.refuses(InputError, _raise, "x", ValueError("x")),
    "a word is missing": lambda c: c.says(InputError, lambda: _raise(ERROR), "x", "this", "those"),
    "another advice": lambda c: c.tells(InputError, ("a thing broke", "this", "that", "nothing"), lambda: _raise(ERROR)),
    "told to nobody": lambda c: c.tells(InputError, ("a thing broke", "this", "that", "the other"), lambda: None),
    "raised by nobody": lambda c: c.raises(AlphaError, "x", lambda: None),
    "another name": lambda c: c.raises(AlphaError, "x", lambda: _raise(ERROR), naming="bent"),
    "not its kind": lambda c: c.raises(CorruptError, "x", lambda: _raise(ERROR)),
}


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_each_is_counted(name: str) -> None:
    checks = Checks()
    {**GOOD, **BAD}[name](checks)
    found = checks.measured()
    assert (found.error, found.bound, found.cases) == (float(name in BAD), 0.0, 1) and bool(found.note) == (name in BAD)


def test_another_error_than_ours_is_the_cases_own_failure() -> None:
    for act in (lambda: words(lambda: _raise(ValueError("x"))), lambda: Checks().raises(AlphaError, "x", lambda: _raise(ValueError("x")))):
        with pytest.raises(ValueError):
            act()


def test_lists_of_what_holds() -> None:
    found = all_hold([differs("a", 1, 1), differs("b", 1, 2), ("c", False)], b"data")
    assert (found.error, found.cases, found.note) == (2.0, 3, "b: 1 for 2; c")
    assert found.digest != all_hold([], b"atad").digest and all_hold([]).cases == 0 == len(all_hold([]).digest)
    apart, together = Checks(), Checks()
    apart.add(b"a")
    apart.add(b"b")
    together.add(b"ab")
    assert apart.measured().digest != together.measured().digest
