"""Branch coverage of host components by the cases of their own gates: a branch that no case takes is a branch that no gate sees. Floor 7.

The contract cases of all components without an op row run in processes of their own, and so do the ranks and runs that they start;
all of them mark what they take in one mapped file (alpha/gates/branches.py). Nothing is judged here. `PACKAGES` are held to it: a side that
no case takes is an error with its line, unless `untaken.toml` beside this file lists it with the reason. An entry that is not needed is
an error, too.

    python -m alpha.gates.contracts.coverage PART OF ID ...     runs every OF-th of these components' cases, beginning with PART
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import alpha
from alpha.component import Component
from alpha.errors import InputError, MachineError
from alpha.gates import branches
from alpha.gates.contracts.engine import child_environment, contract_cases, run_case
from alpha.tomlfile import read_toml
from alpha.train.catalogue import catalogue

NONCE = "c0" * 16
EXEMPT = Path(__file__).with_name("untaken.toml")
ROOT = Path(alpha.__file__).parent
PACKAGES = ("checkpoint", "comm", "data", "flops", "graph", "models", "optim", "parallel", "passes", "profile", "registry", "train")
"""Held to it, whole."""
GATES = ("parity", "gradient", "determinism", "faults")
KINDS = ("pass", "model", "flops", "executor", "optimizer", "schedule", "checkpoint", "corpus", "sampler", "shards", "split", "tokenizer",
         "baseline", "evidence", "program")
"""Kinds of components whose cases reach PACKAGES, with what ranks rest on."""
RANKS = "alpha.gates.contracts.ranks."
"""Where the contracts are of what ranks rest on."""


@dataclass(frozen=True, order=True)
class Untaken(branches.Side):
    """A side that no case takes."""

    @property
    def place(self) -> tuple[str, str, str, str]:
        """What an exemption names: it outlives edits elsewhere in the file."""
        return self.file, self.function, self.side, self.text


def hosts(components: Iterable[Component]) -> list[Component]:
    """The components whose cases are run."""
    return [c for c in components if c.contract and c.backend != "cuda" and
            (c.kind in KINDS or c.contract.startswith(RANKS))]


def files(packages: Sequence[str] = PACKAGES) -> list[Path]:
    """The source files that are looked at."""
    return [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]


def untaken(components: Sequence[Component], watched: Sequence[Path], workers: int = 2) -> list[Untaken]:
    """Sides of the files' branches that no case of the components took, sorted. MachineError where a process that ran cases died."""
    with tempfile.TemporaryDirectory(prefix="alpha-branches-") as name:
        folder = Path(name)
        known = {place for place in exemptions()}
        branches.prepare(folder, watched, lambda *side: _named(*side).place in known)
        environment = child_environment(**{branches.WATCHED: name})
        environment["PYTHONPATH"] = os.pathsep.join((name, environment["PYTHONPATH"]))
        running = [subprocess.Popen([sys.executable, "-m", __spec__.name, str(part), str(workers), *(c.id for c in components)],
                                    env=environment, stdout=subprocess.DEVNULL) for part in range(workers)]
        ended = [process.wait() for process in running]
        if any(ended):
            raise MachineError("a process that ran cases died", came=f"exit codes {ended}", do="run it again; what it said stands above")
        return sorted(_named(*entry) for entry in branches.read(folder, watched))


def _named(file: Path, function: str, line: int, side: str) -> Untaken:
    text = file.read_text(encoding="utf-8").splitlines()[line - 1].strip()
    where = file.relative_to(ROOT.parent).as_posix() if file.is_relative_to(ROOT) else file.name
    return Untaken(where, line, function, side, text)


def exemptions() -> dict[tuple[str, str, str, str], str]:
    """(file, function, side, line) -> the reason why no case takes it; InputError for an entry without one or with another key."""
    found = {}
    for entry in read_toml(EXEMPT)["branch"]:
        if sorted(entry) != ["file", "function", "line", "side", "why"] or not entry["why"].strip():
            raise InputError("an exempted branch has a file, a function, a side, its line and a reason", came=str(entry),
                             do=f"mend {EXEMPT.name}")
        found[entry["file"], entry["function"], entry["side"], entry["line"]] = entry["why"]
    return found


def problems(left: Sequence[Untaken], whole: bool = True) -> list[str]:
    """What of `left` is not exempt; and exemptions that are not needed, where `left` is of the `whole` catalogue."""
    exempt = exemptions()
    needless = sorted(exempt.keys() - {branch.place for branch in left}) if whole else []
    return [*(f"no case takes {branch}" for branch in left if branch.place not in exempt),
            *(f"{EXEMPT.name} exempts what is taken or not there: {', '.join(place)}" for place in needless)]


def _run(part: int, of: int, ids: Sequence[str]) -> None:
    for component in [catalogue()[i] for i in ids][part::of]:
        for gate in GATES:
            for name, case in contract_cases(component, gate):
                run_case(component, gate, NONCE, name, case)


if __name__ == "__main__":
    _run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
