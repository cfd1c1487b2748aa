"""What gates write of each case: a frozen data class for each sort, written by the engines, read by the judge. Floor 3.

A record holds its cases as plain tables, one JSON object each: `plain` makes one, `read` understands one. Reading never fails: what
should be a number and is none (text, nothing, a boolean, an infinity) is NaN, so that every comparison of a judge refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class CaseRecord:
    """One case. note: what went wrong, or a unit; n: how many cases share this entry, of which `worst` is the one with these numbers."""

    kind: ClassVar[str] = ""
    """As it is written; a gate may have one sort of cases that writes none."""

    decides: ClassVar[str] = ""
    """The field by which one of several cases is the worst; empty where they cannot share an entry."""

    name: str
    note: str = ""
    n: float = 1
    worst: str = ""

    def plain(self) -> dict[str, object]:
        """As it is written: fields at their default are left out."""
        found: dict[str, object] = {"kind": self.kind} if self.kind else {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.default is MISSING or value != f.default:
                found[f.name] = list(value) if isinstance(value, tuple) else value
        return found


@dataclass(frozen=True, kw_only=True)
class Contract(CaseRecord):
    """A case of a contract module, or of a size too large for a walk. cases: how many observations it holds."""

    kind: ClassVar[str] = "contract"
    decides: ClassVar[str] = "error"
    error: float
    bound: float
    cases: float


@dataclass(frozen=True, kw_only=True)
class Exact(CaseRecord):
    """Parity where the result has no rounding, or of a behaviour that is counted. error: 0 if every bit is right."""

    kind: ClassVar[str] = "exact"
    decides: ClassVar[str] = "error"
    error: float


@dataclass(frozen=True, kw_only=True)
class Relative(CaseRecord):
    """Parity by the plainest implementation. ratio: the largest error over the plain one's, of elements with more than half an ulp and
    the row's bound; floor: the same of a computation one precision lower, None where a single rounding leaves none to tell."""

    kind: ClassVar[str] = "relative"
    decides: ClassVar[str] = "ratio"
    ratio: float
    floor: float | None


@dataclass(frozen=True, kw_only=True)
class Slope(CaseRecord):
    """A gradient. error: worst difference, over the derivative's own scale; bound: derived; directions: how many were tried."""

    decides: ClassVar[str] = "error"
    error: float
    bound: float
    directions: float


@dataclass(frozen=True, kw_only=True)
class Repeats(CaseRecord):
    """Repeated calls. distinct: number of distinct output hashes; digest: the first."""

    runs: float
    distinct: float
    digest: str


@dataclass(frozen=True, kw_only=True)
class Refusal(CaseRecord):
    """Misuse, or contents that are no numbers. error: 0 handled, 1 not; bound: 0."""

    decides: ClassVar[str] = "error"
    error: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class Share(CaseRecord):
    """A timed call. share: of the ceiling measured in the same run; times_ns: medians of blocks; limit: 'bytes' or 'flops'; copy, product:
    rates of the probes in their own units per ns; throttled: blocks left out; tries: measurements of which this is the best."""

    share: float
    times_ns: tuple[float, ...]
    ceiling_ns: float | None = None
    limit: str = ""
    shape: str | None = None
    copy: float | None = None
    product: float | None = None
    throttled: float | None = None
    tries: float | None = None


@dataclass(frozen=True, kw_only=True)
class Slowdown(CaseRecord):
    """Today's code against the pinned code: the slowdown with its confidence interval; reproduced: in a fresh process."""

    kind: ClassVar[str] = "relative"
    low: float
    estimate: float
    high: float
    reproduced: bool
    pairs: float | None = None
    rounds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Unknown(CaseRecord):
    """A case of a sort that its gate does not write. came: the kind that it claims."""

    came: str


def number(value: Any) -> float:
    """A finite number as float; NaN for everything else (text, None, booleans, infinities), so that comparisons fail."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond every float
        return math.nan


def _floor(value: Any) -> float | None:
    """None and an endless floor are meant as they stand: lower precision gives no number at all."""
    return None if value is None else math.inf if value in ("inf", math.inf) else number(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _numbers(value: Any) -> tuple[float, ...]:
    return tuple(number(x) for x in value) if isinstance(value, (list, tuple)) else ()


_READ: Mapping[str, Callable[[Any], Any]] = {
    "float": number, "str": _text, "tuple[float, ...]": _numbers, "bool": lambda value: value is True, "float | None": _floor,
    "str | None": lambda value: value if isinstance(value, str) else None,
}
"""Annotation -> what reads such a field."""


def read(sorts: Sequence[type[CaseRecord]], body: Mapping[str, Any]) -> CaseRecord:
    """The case that a table holds, by its kind; Unknown where none of these sorts writes such a kind. A number that is missing is NaN."""
    kind = body.get("kind", "")
    sort = next((s for s in sorts if s.kind == kind), None)
    if sort is None:
        return Unknown(name=_text(body.get("name")), note=_text(body.get("note")), came=repr(kind)[:40])
    optional = {f.name for f in fields(sort) if f.default is not MISSING}
    return sort(**{f.name: _READ[str(f.type)](body.get(f.name, math.nan)) for f in fields(sort)
                   if f.name in body or f.name not in optional})


def failed(sort: type[CaseRecord], name: str, note: str) -> CaseRecord:
    """A case of this sort that no judge passes, for an engine that ended in an error."""
    worst: Mapping[str, object] = {"float": math.inf if sort.decides else 0.0, "float | None": 0.0, "str": "", "tuple[float, ...]": ()}
    needed = {f.name: worst[str(f.type)] for f in fields(sort) if f.default is MISSING and f.name != "name"}
    return sort(name=name, note=note, **needed)  # type: ignore[arg-type]
