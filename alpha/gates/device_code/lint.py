"""Faults of synchronisation that no run need show, and the lint that must: fewer waits, barriers or fences in the machine code. Floor 7.

They are scored apart from the faults that a gate rejects (`alpha gate catches`): what a count sees is that something is gone, not that
something is wrong. The same counts of the shipped kernels stand in baselines/kernels.json, where a lower one is a failure of
`alpha kernels check`. Needs the pinned compiler and its disassembler, no GPU; nothing is kept, it is compiled (or cached) and looked at
again each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alpha.component import Catalogue
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.opcodes import Opcodes, opcodes
from alpha.errors import InputError
from alpha.gates.adversarial import cuda_plant
from alpha.gates.device_code import audit as kernels_audit
from alpha.gates.device_code import build as kernels
from alpha.registry.faults import Fault
from alpha.tomlfile import read_toml

PATH = Path(__file__).with_name("lint.toml")
_KEYS = {"id", "mirrors", "source", "compiled", "why", "find", "replace"}


@dataclass(frozen=True)
class Unseen:
    """`compiled`: words of the text of the compiled file that is looked at, its path first."""

    fault: Fault
    compiled: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """One fault and what is fewer; nothing: the lint does not see it."""

    fault: Fault
    fewer: tuple[str, ...]


def load(path: Path = PATH) -> tuple[Unseen, ...]:
    """Every such fault, sorted by id. InputError naming one whose keys are not those expected; what does not match once is found when
    it is planted."""
    found: dict[str, Unseen] = {}
    for table in read_toml(path)["fault"]:
        if set(table) != _KEYS or table["id"] in found:
            raise InputError("a fault of the lint has other keys, or another's id", came=f"{table.get('id')}: {', '.join(sorted(table))}",
                             expected=", ".join(sorted(_KEYS)), do=f"mend {path.name}")
        rest = {k: v for k, v in table.items() if k != "compiled"}
        found[table["id"]] = Unseen(Fault(component="", gate="lint", file=path.name, **rest), tuple(table["compiled"]))
    return tuple(found[i] for i in sorted(found))


def source_of(catalogue: Catalogue, unseen: Unseen) -> Source:
    """The first compiled file of the catalogue whose text holds all the words."""
    for source in kernels.needed(catalogue):
        if set(unseen.compiled) <= set(str(source).split()):
            return source
    raise InputError("no compiled file is like this", came=" ".join(unseen.compiled), do=f"mend {unseen.fault.id} in {PATH.name}")


def fewer(now: Opcodes, sound: Opcodes) -> list[str]:
    """What of a file's waits, barriers and fences is fewer than in the sound one, by kernel."""
    found = []
    for kernel in sound:
        here, there = kernels_audit.counts(now, kernel), kernels_audit.counts(sound, kernel)
        found += [f"{kernel}: {here[name]} {name}, {n} in the sound one" for name, n in there.items()
                  if name in kernels_audit.SYNCHRONISATION and here[name] < n]
    return found


def run(catalogue: Catalogue, faults: Sequence[Unseen]) -> list[Seen]:
    """Compile each from its broken copy and compare. MachineError without the compiler or the disassembler; CompileError with the
    compiler's words for a fault that does not compile."""
    results = []
    for unseen in faults:
        source = source_of(catalogue, unseen)
        sound = opcodes(nvcc.compile_kernel(source))
        with cuda_plant.overlay(unseen.fault) as copy, nvcc.compiling(kernels=copy):
            broken = opcodes(nvcc.compile_kernel(source))
        results.append(Seen(unseen.fault, tuple(fewer(broken, sound))))
    return results
