"""What a committed record must agree with beside its judge: its class, its own numbers, all other nonces, and its past. Floor 3.

A forger who computes the content hash anew still has to invent numbers that belong together. Nothing here runs a component.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from alpha.component import Catalogue
from alpha.errors import AlphaError
from alpha.registry import catches
from alpha.registry.cases import Share
from alpha.registry.evidence import classes, load_file
from alpha.registry.gates import GATES, cases_of
from alpha.registry.gpu import GpuClass, class_of_key, family_of, sort, sort_of
from alpha.registry.history import hash_of
from alpha.registry.record import Record, sealed

NONCE = re.compile(r"[0-9a-f]{32}")
"""128 bits from the operating system, in hex."""

ROUNDED = 5e-4
"""A share keeps four digits."""

ALWAYS = ("blas", "cpu", "numpy", "processor", "python", "seconds")
"""What the environment of every record says."""


@dataclass(frozen=True)
class Line:
    """One committed record with its place. about: component and gate, or the planted fault; text: the whole line."""

    path: Path
    number: int
    about: str
    record: Record
    text: str


def lines(root: Path) -> Iterator[Line]:
    """Every record under a root, those of catches included; files that cannot be read are left to the merge gate, which names them."""
    for machine in classes(root):
        for path in sorted((root / machine).glob("*.jsonl")):
            try:
                found = _lines_of(root, machine, path)
            except AlphaError:
                continue
            yield from found


def _lines_of(root: Path, machine: str, path: Path) -> list[Line]:
    if path.name == catches.NAME:
        return [Line(path, i, fault, c.record, sealed(c.body())[1])
                for i, (fault, c) in enumerate(catches.load_catches(root, machine).items(), 1) if c.record is not None]
    return [Line(path, i, f"{r.component} {r.gate}", r, sealed(vars(r))[1]) for i, r in enumerate(load_file(path).values(), 1)]


def wrong_in(record: Record, catalogue: Catalogue) -> list[str]:
    """Where a record contradicts itself or its class; empty when nowhere."""
    wrong = [] if NONCE.fullmatch(record.nonce) else [f"its nonce {record.nonce[:40]!r} is none that the gates draw"]
    return wrong + _environment(record, catalogue) + (_shares(record) if record.gate in GATES else [])


def _environment(record: Record, catalogue: Catalogue) -> list[str]:
    """What an engine always writes is there, and is of the class in whose folder it lies."""
    env, machine = record.environment, class_of_key(record.machine)
    component = catalogue[record.component] if record.component in catalogue else None
    asked = list(ALWAYS)
    if record.gate == "perf":
        asked.append("flops")
    on_gpu = component is not None and component.kind == "kernel" and component.backend == "cuda"
    if on_gpu:
        asked.append("driver")
    wrong = [f"its environment does not say {name}" for name in asked if not env.get(name)]
    try:
        timed = float(env.get("seconds", "nan")) >= 0
    except ValueError:
        timed = False
    if not timed:
        wrong.append(f"it took {env.get('seconds')!r} seconds")
    if component is not None and sort_of(record.machine) != sort(component):
        wrong.append(f"it was measured on a class of the sort {sort_of(record.machine)}, and its component asks for {sort(component)}")
    if isinstance(machine, GpuClass):
        return wrong
    if ".".join(env.get("numpy", "").split(".")[:2]) != machine.numpy:
        wrong.append(f"NumPy {env.get('numpy')} in a class of NumPy {machine.numpy}")
    if env.get("blas", "").split(" ")[0] != machine.blas:
        wrong.append(f"BLAS {env.get('blas')} in a class of {machine.blas}")
    if "driver" in env:
        wrong.append("a driver of GPUs in a class of CPUs")
    return wrong


def _shares(record: Record) -> list[str]:
    """A share is the ceiling's time over the kernel's: its least on a CPU, its median on a GPU. Both times are kept as whole nanoseconds,
    the share with four digits."""
    wrong = []
    for case in cases_of(record):
        if not isinstance(case, Share) or case.note or not case.times_ns:
            continue
        if case.ceiling_ns is None:
            wrong.append(f"{case.name}: no time of the ceiling")
            continue
        time = median(case.times_ns) if family_of(record.machine) == "cuda" else min(case.times_ns)
        room = 0.5 * (1 + case.share) + ROUNDED * case.ceiling_ns
        if not abs(case.share * time - case.ceiling_ns) <= room:
            wrong.append(f"{case.name}: a share of {case.share:g}, but {case.ceiling_ns:g} ns over {time:g} ns")
    return wrong


def problems(root: Path, catalogue: Catalogue, past: Mapping[str, set[str]]) -> list[tuple[Line, str]]:
    """(line, what is wrong) of every record under a root. past: nonce -> hashes of the lines that ever named it (history.py)."""
    found: list[tuple[Line, str]] = []
    seen: dict[str, Line] = {}
    for line in lines(root):
        found += [(line, why) for why in wrong_in(line.record, catalogue)]
        other = seen.setdefault(line.record.nonce, line)
        if other is not line:
            found.append((line, f"its nonce is that of {other.about}, on {other.record.machine}: each measurement draws its own"))
        elif past.get(line.record.nonce, set()) - {hash_of(line.text.encode())}:
            found.append((line, "its nonce was committed before with other digests or numbers: a new measurement draws a new one"))
    return found
