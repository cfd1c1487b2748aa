"""Scores of seeded mutants, committed: `baselines/mutants.json`, the pinned score and the latest one. Floor 3.

A score that is lower than the pinned one is a fall: the gates see less than they did. A survivor is then killed by a better case or
explained in alpha/gates/adversarial/equivalents.toml; the pin rises by itself and is never lowered by a tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from alpha.errors import CorruptError
from alpha.registry.evidence import write_atomic
from alpha.registry.gates import TABLE
from alpha.registry.package import Package
from alpha.registry.record import FORMAT, canonical, content_hash

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One run. `seed`: hex, from which `number` mutants were drawn; `areas`: area -> (caught, counted, excused), ALL among them;
    `survivors`: by name; `measure`: digest of the engines that judged them."""

    seed: str
    number: int
    areas: Mapping[str, Sequence[int]]
    survivors: Sequence[str]
    measure: str

    @property
    def share(self) -> float:
        """Caught of those counted; NaN where nothing was counted, which is less than nothing."""
        caught, counted, *_ = self.areas.get(ALL, (0, 0))
        return caught / counted if counted > 0 else float("nan")


def path_of(root: Path) -> Path:
    """The file that belongs to an evidence root: beside its folder."""
    return root.parent / "mutants.json"


def measured_by(package: Package) -> str:
    """Digest of the engines of the CPU's gates, which judge mutants."""
    return package.hash([t for symbol in sorted({gate.engine for gate in TABLE}) for t in package.roots(symbol)])


def load(root: Path) -> tuple[Scores, Scores] | None:
    """(pinned, latest), None where there is no file; CorruptError if it was edited or cannot be read."""
    path = path_of(root)
    if not path.is_file():
        return None
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        claimed = body.pop("content")
        found = Scores(**body["pinned"]), Scores(**body["latest"])
        good = claimed == content_hash(body) and body["format"] == FORMAT and all(
            0 <= caught <= counted for s in found for caught, counted, _ in s.areas.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(f"{path.name}: {error}") from error
    if not good:
        raise _corrupt(path.name)
    return found


def save(latest: Scores, root: Path) -> tuple[Scores, Scores]:
    """Write the latest score; it becomes the pinned one where it is not lower, or there was none. Returns what now stands."""
    before = load(root)
    pinned = before[0] if before is not None and not latest.share >= before[0].share else latest
    body = {"format": FORMAT, "pinned": asdict(pinned), "latest": asdict(latest)}
    write_atomic(path_of(root), canonical({**body, "content": content_hash(body)}) + "\n")
    return pinned, latest


def problems(root: Path, package: Package) -> list[str]:
    """What the merge gate has against the committed scores; empty when nothing."""
    found = load(root)
    if found is None:
        return ["no score of seeded mutants is committed"]
    pinned, latest = found
    wrong = []
    if not latest.share >= pinned.share:
        wrong.append(f"the score of seeded mutants fell from {pinned.share:.0%} to {latest.share:.0%}; survivors: "
                     + "; ".join(latest.survivors))
    if latest.measure != measured_by(package):
        wrong.append("stale: the engines that judged the seeded mutants changed since")
    return wrong


def _corrupt(came: str) -> CorruptError:
    return CorruptError("the scores of seeded mutants were edited by hand or cannot be read", came=came,
                        expected="what `alpha gate catches --ship` wrote", do="restore the file from version control")
