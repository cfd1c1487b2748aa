"""What the cases of the registry share: made-up packages, components and records."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Catalogue, Component, Envelope, Limit, Measured
from alpha.registry import gpu, policy
from alpha.registry.digest import component_digests
from alpha.registry.gpu import AnyClass, GpuClass
from alpha.registry.machine import MachineClass
from alpha.registry.package import Package, symbol_digest
from alpha.registry.pins import FEWEST, Pin, code_of
from alpha.registry.record import Record, canonical

PROCESSOR = "Made-6-1"
"""Generation of the made-up processor."""

Case = tuple[str, Callable[[np.random.Generator], Measured]]

HERE = MachineClass(isa="x86_64-avx2", numpy="2.2", blas="openblas-Haswell", threads=1)
"""A made-up class on which the made-up evidence was measured."""

SAME_ISA = MachineClass(isa="x86_64-avx2", numpy="2.2", blas="openblas-Zen", threads=1)
OTHER = MachineClass(isa="arm64-neon", numpy="2.2", blas="openblas-neoversen1", threads=1)

BASE = Component(id="made.base", kind="flops", profile="count", implementation=canonical, contract="alpha.types")
TOP = Component(id="made.top", kind="tokenizer", profile="host", implementation=canonical, contract="alpha.types",
                presupposes=("made.base",))
KERNEL = Component(id="gelu.f32.made", kind="kernel", backend="cpu", op="gelu", implementation=canonical,
                   envelope=Envelope(limits=(Limit(text="at most 4 rows", holds=lambda t, a: t[0].shape[0] <= 4),)))

ONE = GpuClass(capability="sm90", model="H200")
TWO = replace(ONE, devices=2, link="nvlink")
SINGLE = replace(KERNEL, id="gelu.f32.single", backend="cuda", requires=("sm_90a",))
PAIR = replace(SINGLE, id="gelu.f32.pair", requires=("sm_90a", "gpus>=2"))


def catalogue(*components: Component) -> Catalogue:
    """A catalogue of these."""
    filled = Catalogue()
    for c in components:
        filled.add(c)
    return filled


def passing(components: Iterable[Component], package: Package, machine: AnyClass = HERE) -> list[Record]:
    """Current, passing records of every gate that these owe."""
    return [make(g, component=c.id, machine=machine, digests=component_digests(c, g, package=package))  # type: ignore[arg-type]
            for c in components for g in policy.owed(c)]



@contextmanager
def with_gpus(*models: str, joined: Sequence[tuple[int, int]] = ((1, 0),), why_unknown: str = "") -> Iterator[None]:
    """A machine with these GPUs, of which NVLink joins the pairs `joined`; without any, one that has no driver."""
    found = gpu.Seen(tuple(gpu.GpuClass(capability="sm90", model=m) for m in models), "" if models else "no nvidia-smi", "1.0",
                     frozenset(joined), why_unknown)
    with mock.patch.object(gpu, "asked", lambda: found):
        yield


@contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder."""
    with tempfile.TemporaryDirectory(prefix="alpha-registry-") as name:
        yield Path(name)


def write_package(root: Path, files: Mapping[str, str]) -> Path:
    """A package's folder from relative path -> text, with the __init__ files that are not given; returns the folder."""
    for relative, text in files.items():
        path = root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for parent in {root, *(p.parent for p in root.rglob("*.py"))}:
        if not (parent / "__init__.py").exists():
            (parent / "__init__.py").write_text("", encoding="utf-8")
    return root


def digest_of(files: Mapping[str, str], symbol: str = "mini.main:root") -> str:
    """Digest of a symbol of a made-up package."""
    with folder() as at:
        return symbol_digest(symbol, package=Package(write_package(at / "anything", files), "mini"))


def parity_case(name: str = "a", ratio: Any = 1.0, floor: Any = 40.0) -> dict[str, Any]:
    return {"name": name, "kind": "relative", "ratio": ratio, "floor": floor}


GOOD: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "parity": ({"name": "a", "kind": "relative", "ratio": 1.5, "floor": 40.0}, {"name": "e", "kind": "exact", "error": 0.0}),
    "gradient": ({"name": "a", "error": 1e-6, "bound": 1e-4, "directions": 8},),
    "determinism": ({"name": "a", "runs": 300, "distinct": 1, "digest": "ab12"},),
    "faults": ({"name": "a", "error": 0.0, "bound": 0.0},),
    "perf": ({"name": "a", "share": 0.6, "times_ns": [1000, 1010]},),
}
"""Raw numbers that pass, by gate."""


def make(gate: str, cases: Sequence[Mapping[str, Any]] | None = None, *, component: str = "made.up", machine: MachineClass = HERE,
         digests: Mapping[str, str] | None = None, declared: int | None = None, probes: Sequence[Sequence[Any]] = ()) -> Record:
    """A record with passing cases unless others are given."""
    cases = GOOD[gate] if cases is None else cases
    return Record(component=component, gate=gate, machine=machine.key, digests=digests or {"implementation": "00"}, nonce="00ff",
                  declared=len(cases) if declared is None else declared, cases=list(cases), probes=list(probes),
                  environment={"processor": PROCESSOR, "flops": "flops/made"} if gate == "perf" else {})


def pin_of(component: str = "made.up", share: float = 0.6, *, spread: float = 0.01, cases: Sequence[str] = ("a",), family: str = "cpu",
           digests: Mapping[str, str] | None = None) -> Pin:
    """A pin whose shares have about this middle and relative spread."""
    steps = [(k - (FEWEST - 1) / 2) * spread / 1.58 for k in range(FEWEST)]  # 1.58: standard deviation of -2, -1, 0, 1, 2
    return Pin(component, family, code_of(digests or {"implementation": "00"}), {c: tuple(share * (1 + x) for x in steps) for c in cases},
               tuple(f"2000-01-0{k + 1}T00:00:00Z" for k in range(FEWEST)), "flops/made")
