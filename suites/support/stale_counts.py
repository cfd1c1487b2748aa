"""Edits of a copy of the repository, and how many gate pairs and planted faults each makes stale.

    python suites/support/stale_counts.py [REPOSITORY]      the table of docs/log/gates.md, of this tree or another
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm
from copies import ROOT, share_digests

from alpha.gates.adversarial.plant import linked
from alpha.tomlfile import tomllib

Change = tuple[str, str, str]
"""(file relative to the repository, text that it holds once, what replaces it); an empty text: the other is written behind the file."""

Digests = dict[str, dict[str, str]]
"""'component gate' -> digests by name."""

COUNT = """
import json, sys
from alpha.registry import policy
from alpha.registry.digest import component_digests
from alpha.registry.package import Package
from alpha.train.catalogue import catalogue
package, asked = Package(), set(sys.argv[1:])
json.dump({f"{c.id} {g}": component_digests(c, g, package=package) for c in catalogue() for g in policy.owed(c)
           if not asked or f"{c.id} {g}" in asked}, sys.stdout)
"""


@dataclass(frozen=True)
class Edit:
    """`changes`: in this tree; `before`: in the tree of 88f8e40 where it was written otherwise. `stale`: pairs of which each must become
    stale; `current`: pairs that must not."""

    name: str
    changes: tuple[Change, ...]
    before: tuple[Change, ...] = ()
    stale: tuple[str, ...] = ()
    current: tuple[str, ...] = ()


def edits(kind: str) -> list[Edit]:
    """'harmless': nothing of it can change a result that was measured; 'real': it can. From stale_counts.toml."""
    def changes(table: Mapping[str, Any], key: str) -> tuple[Change, ...]:
        return tuple((c["file"], c["find"], c["replace"]) for c in table.get(key, ()))

    document = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Edit(e["name"], changes(e, "change"), changes(e, "before"), tuple(e.get("stale", ())), tuple(e.get("current", ())))
            for e in document[kind]]


@contextmanager
def copied(changes: Sequence[Change], root: Path = ROOT) -> Iterator[Path]:
    """A copy of a repository with these changes: the package, and links to what lies beside it. Only digests are taken of it, so files
    that do not change are links too."""
    with tempfile.TemporaryDirectory(prefix="alpha-stale-") as folder:
        at = Path(folder)
        shutil.copytree(root / "alpha", at / "alpha", copy_function=linked)
        for name in ("kernels", "baselines"):
            (at / name).symlink_to(root / name)
        share_digests(at, root)
        for file, find, put in changes:
            path = at / file
            text = path.read_text(encoding="utf-8")
            if text.count(find) != 1:
                raise ValueError(f"{file} holds {find!r} {text.count(find)} times, expected once")
            path.unlink()  # and not what it is a link to
            path.write_text(text.replace(find, put), encoding="utf-8")
        yield at


def digests_of(root: Path, pairs: Sequence[str] = ()) -> Digests:
    """Every digest of these gate pairs of a repository, or of all, in a process of its own. A pair that is not there is left out."""
    done = warm.run(["-c", COUNT, *pairs], cwd=root, root=root, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    found: Digests = json.loads(done.stdout)
    return found


def moved(was: Digests, now: Digests) -> dict[str, list[str]]:
    """Pair -> names of the digests that changed, of pairs that are in both."""
    return {pair: names for pair, old in was.items() if pair in now
            and (names := sorted(n for n in {*old, *now[pair]} if old.get(n) != now[pair].get(n)))}


def is_gpu(pair: str) -> bool:
    """Whether a pair's evidence is a GPU's."""
    return pair.split()[0].endswith(".sm90") or pair.startswith("executor.cuda ")


def counted(edits: Sequence[Edit], root: Path = ROOT) -> Mapping[str, tuple[int, int]]:
    """Edit -> stale pairs of the CPU, of the GPU."""
    with copied((), root) as at:
        was = digests_of(at)
    found = {}
    for edit in edits:
        try:
            with copied(edit.before if edit.before and root != ROOT else edit.changes, root) as at:
                stale = moved(was, digests_of(at))
        except ValueError:  # another tree may lack what is edited
            print(f"| {edit.name} | | |", flush=True)
            continue
        found[edit.name] = sum(not is_gpu(p) for p in stale), sum(map(is_gpu, stale))
        print(f"| {edit.name} | {found[edit.name][0]} | {found[edit.name][1]} |", flush=True)
    return found


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    print("| change | CPU | GPU |\n|---|---|---|")
    counted([*edits("harmless"), *edits("real")], where)
