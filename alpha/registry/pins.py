"""Pins: the shares of their ceilings that kernels have reached before, in several measurements; the perf gate judges by them. Floor 3.

`baselines/perf/<key>.json` holds raw shares of one kind of machine. The key is the machine class; for a CPU it names the generation of
processor too (`key_of`). No verdict and no line is stored: both follow from the shares whenever a record is judged (`line_of`). Beside it
`<key>.relative.jsonl` holds comparisons of today's code with the pinned code (A/B, gates/timing/against.py). A file that is torn, edited or
holds what cannot be a share is a CorruptError, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, stdev
from typing import Any

from alpha.errors import CorruptError
from alpha.registry.evidence import lines_of, shipped_root, write_atomic
from alpha.registry.gates import PINNED
from alpha.registry.gpu import family_of
from alpha.registry.record import Record, content_hash, parse

FORMAT = 2

FEWEST, MOST = 5, 24
"""Measurements of a pin. With fewer than 5 the spread says little; beyond 24 the oldest go."""

FLOOR: Mapping[str, float] = {"cpu": 0.10, "cuda": 0.05}
"""The least allowance, by family: machines of one kind differ by about this much where one machine repeats far better."""

WIDEST = 0.15
"""The largest allowance. A case whose spread asks for more is too noisy to judge."""

GROSS = 0.5
"""Below this part of the pinned share a slowdown is gross: red whatever the noise."""

CODE = ("implementation", "binaries")
"""The digests that say whether two measurements were of the same code: binder with callees, and compiled files."""

_T99 = (3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764, 2.718, 2.681, 2.650, 2.624, 2.602, 2.583, 2.567, 2.552, 2.539, 2.528, 2.518,
        2.508, 2.500)
"""Student's t, one-sided 99 %, for 4, 5, ... 23 degrees of freedom."""


@dataclass(frozen=True)
class Line:
    """Where the verdict falls for one case: `middle` and relative `spread` (standard deviation) of the pinned shares, the relative
    `allowance` that this spread asks for."""

    middle: float
    spread: float
    allowance: float

    @property
    def judged(self) -> bool:
        """Whether the shares repeat well enough for a line."""
        return self.allowance <= WIDEST

    @property
    def least(self) -> float:
        """The smallest share that passes. Too noisy: half of the middle, for gross slowdowns are red whatever the noise."""
        return self.middle * (1 - self.allowance if self.judged else GROSS)

    @property
    def most(self) -> float:
        """The largest share that the pinned ones explain: above it the pin is of slower code, or was lowered."""
        return self.middle * (1 + self.allowance if self.judged else 1 / GROSS)


def line_of(shares: tuple[float, ...], floor: float) -> Line:
    """The line of one case. allowance = max(floor, k spread), k = t(99 %, n - 1) sqrt(1 + pi / 2n): the one-sided prediction interval of
    one more measurement about the median of n (whose variance is pi / 2n of one's), so that unchanged code falls below it once in 100
    measurements at most. Whitmore 1986, The American Statistician 40."""
    n, middle = len(shares), median(shares)
    spread = stdev(shares) / middle
    return Line(middle, spread, max(floor, _T99[n - FEWEST] * math.sqrt(1 + math.pi / (2 * n)) * spread))


@dataclass(frozen=True)
class Pin:
    """One component. code: digests of what was measured (CODE); shares: case -> one share per measurement, oldest first; times: when each
    was taken, UTC; flops: version of the FLOPs model; environment: informative."""

    component: str
    family: str
    code: Mapping[str, str]
    shares: Mapping[str, tuple[float, ...]]
    times: tuple[str, ...]
    flops: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def line(self, case: str) -> Line | None:
        """The line of a case; None when it is not pinned."""
        return line_of(self.shares[case], FLOOR[self.family]) if case in self.shares else None

    def body(self) -> dict[str, Any]:
        """As it is stored, with its content hash."""
        plain = {"code": dict(self.code), "shares": {k: list(v) for k, v in self.shares.items()}, "times": list(self.times),
                 "flops": self.flops, "environment": dict(self.environment)}
        return {**plain, "content": content_hash({"component": self.component, **plain})}


def code_of(digests: Mapping[str, str]) -> dict[str, str]:
    """The part of a gate's digests that says which code was timed."""
    return {k: digests[k] for k in CODE if k in digests}


def key_of(machine: str, processor: str) -> str:
    """Which pins a machine class goes by: a GPU's class says all, a CPU's needs its generation of processor."""
    return machine if family_of(machine) == "cuda" else f"{machine}_{processor}"


def key_of_record(record: Record) -> str:
    """The key of the machine that a record was measured on."""
    return key_of(record.machine, record.environment.get("processor", "unknown"))


def folder_of(evidence_root: Path) -> Path:
    """The folder of pins that belongs to an evidence root."""
    return evidence_root.parent / "perf"


class Pins:
    """The pins of one folder; each file is read once, when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, dict[str, Pin]] = {}
        self._relative: dict[str, dict[str, Record]] = {}

    def path(self, key: str) -> Path:
        """The file of one kind of machine."""
        return self.folder / f"{key}.json"

    def keys(self) -> list[str]:
        """Kinds of machine that have a file here."""
        return sorted(p.stem for p in self.folder.glob("*.json") if p.name.startswith(("cpu_", "cuda_"))) if self.folder.is_dir() else []

    def load(self, key: str) -> dict[str, Pin]:
        """component -> pin; {} where nothing is pinned. CorruptError for a damaged file."""
        if key not in self._read:
            self._read[key] = _load(self.path(key), family_of(key))
        return self._read[key]

    def forget(self, key: str) -> None:
        """Take a damaged file for one that is not there, once its damage was told."""
        self._read[key], self._relative[key] = {}, {}

    def of(self, record: Record) -> Pin | None:
        """The pin that a record is judged by; None for gates that go by no pins, and where its kind of machine has none."""
        return self.load(key_of_record(record)).get(record.component) if record.gate in PINNED else None

    def save(self, key: str, pins: Mapping[str, Pin], *, keep: frozenset[str] | None = None) -> Path:
        """Merge pins into a file, replaced in one step. `keep`: components that still exist (None keeps all). A file that cannot be read
        is replaced."""
        try:
            old = self.load(key)
        except CorruptError:
            old = {}
        merged = {k: v for k, v in {**old, **pins}.items() if keep is None or k in keep}
        body = {"format": FORMAT, "components": {k: merged[k].body() for k in sorted(merged)}}
        write_atomic(self.path(key), json.dumps(body, indent=1, sort_keys=True) + "\n")
        self._read.pop(key, None)
        return self.path(key)

    def relative_path(self, key: str) -> Path:
        """The file of comparisons with the pinned code."""
        return self.folder / f"{key}.relative.jsonl"

    def relative(self, key: str) -> dict[str, Record]:
        """component -> its comparison with the pinned code; CorruptError for a damaged file."""
        if key not in self._relative:
            path = self.relative_path(key)
            found = [parse(line, f"{path.name}:{i}") for i, line in enumerate(lines_of(path), 1)] if path.is_file() else []
            if [r.component for r in found] != sorted({r.component for r in found}) or any(key_of_record(r) != key for r in found):
                raise _corrupt("comparisons are not one per component of this kind of machine, in sorted order", path.name, key)
            self._relative[key] = {r.component: r for r in found}
        return self._relative[key]

    def save_relative(self, record: Record) -> Path:
        """Keep one comparison, in place of the component's older one."""
        key = key_of_record(record)
        merged = {**self.relative(key), record.component: record}
        write_atomic(self.relative_path(key), "".join(merged[k].line() + "\n" for k in sorted(merged)))
        self._relative.pop(key, None)
        return self.relative_path(key)


def shipped_pins() -> Pins:
    """The pins that belong to the repository's evidence, read anew."""
    return Pins(folder_of(shipped_root()))


def binding(pinned: Mapping[str, str], today: Mapping[str, str]) -> dict[str, str]:
    """The digests of a comparison: the code of either side."""
    return {**code_of(today), **{f"pinned {k}": v for k, v in code_of(pinned).items()}}


def same_code(pin: Pin, digests: Mapping[str, str]) -> bool:
    """Whether the pinned code is today's."""
    return dict(pin.code) == code_of(digests)


def _load(path: Path, family: str) -> dict[str, Pin]:
    if not path.is_file():
        return {}
    try:
        body = json.loads(path.read_bytes().decode("ascii"), parse_constant=_no_number)
        if body["format"] != FORMAT:
            raise _corrupt("pinned shares of another format", f"{path.name}: format {body['format']!r}", f"format {FORMAT}")
        return {component: _pin(component, family, dict(one)) for component, one in body["components"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt("pinned shares cannot be read", f"{path.name}: {type(error).__name__} {str(error)[:120]}",
                       "what `alpha gate pin` wrote") from error


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no share")


def _pin(component: str, family: str, body: dict[str, Any]) -> Pin:
    claimed = body.pop("content")
    if claimed != content_hash({"component": component, **body}):
        raise _corrupt("a pin was edited by hand: its content hash does not match", component, str(claimed)[:64])
    shares = {str(case): tuple(_share(x) for x in found) for case, found in body["shares"].items()}
    times = tuple(str(t) for t in body["times"])
    if not shares or not FEWEST <= len(times) <= MOST or any(len(found) != len(times) for found in shares.values()):
        raise _corrupt("a pin does not hold one share per case and measurement", f"{component}: {len(times)} measurements",
                       f"{FEWEST} to {MOST} measurements, each of every case")
    return Pin(component, family, {str(k): str(v) for k, v in body["code"].items()}, shares, times, str(body["flops"]),
               {str(k): str(v) for k, v in body["environment"].items()})


def _share(x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 < x <= 1:
        raise ValueError(f"{x!r} is no share of a ceiling")
    return float(x)


def _corrupt(what: str, came: str, expected: str) -> CorruptError:
    return CorruptError(what, came=came, expected=expected, do="restore the file from version control, or pin again with `alpha gate pin`")
