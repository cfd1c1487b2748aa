"""Compiling every GPU kernel, and holding the results against what is committed. Floor 7; needs the pinned compiler, no GPU.

A check compiles sources (all, or a sample with at least one of each file), and compares: warnings are errors; the cubin against
baselines/cubins.json, and so against what evidence is bound to; registers, spills, shared memory and tensor-core instructions against
baselines/kernels.json; opcodes against the rules of kernels_audit.py.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alpha.backends.cuda.binaries import Binaries, sources_of
from alpha.component import Catalogue, Component
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime import manifest
from alpha.cuda_runtime.compile import CompileError, Cubin, Source
from alpha.cuda_runtime.opcodes import Opcodes, opcodes
from alpha.cuda_runtime.toolchain import INSTALL, find_nvcc
from alpha.errors import AlphaError, InputError, MachineError
from alpha.gates.device_code import audit as kernels_audit
from alpha.gates.device_code import baseline as kernels_baseline

OWN = (Source.of("probe/peak.cu"),)
"""What is compiled for no component: the ceiling of the perf gate."""


def needed(catalogue: Catalogue, ids: Sequence[str] = ()) -> list[Source]:
    """The sources of the named components; of all and OWN when none is named. InputError for one that has no compiled files."""
    for name in ids:
        if not isinstance(catalogue[name].binaries, Binaries):
            raise InputError("this component has no compiled files", came=name, expected="a component of the CUDA back end",
                             do="alpha gate list names them")
    chosen = [catalogue[name] for name in ids] if ids else list(catalogue)
    return sorted({*sources_of(chosen), *(() if ids else OWN)}, key=str)


def users(catalogue: Iterable[Component], sources: Iterable[Source]) -> list[str]:
    """Ids of the components that may load one of `sources`."""
    wanted = set(sources)
    return sorted(c.id for c in catalogue if isinstance(c.binaries, Binaries) and wanted & set(c.binaries.sources()))


def sample(sources: Sequence[Source], n: int, seed: int | str) -> list[Source]:
    """What the manifest does not know, one source of every file, and others up to `n` in all; in the order of `sources`."""
    known = manifest.load()
    rng = random.Random(seed)
    taken = {s for s in sources if manifest.key_of(s) not in known}
    for path in sorted({s.path for s in sources} - {s.path for s in taken}):
        taken.add(rng.choice([s for s in sources if s.path == path]))
    rest = [s for s in sources if s not in taken]
    taken |= set(rng.sample(rest, min(len(rest), max(0, n - len(taken)))))
    return [s for s in sources if s in taken]


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Within it nothing that was compiled before is taken."""
    with tempfile.TemporaryDirectory(prefix="alpha-cubins-") as folder, nvcc.compiling(cache=Path(folder)):
        yield


Done = Callable[[Source, AlphaError | None], None]
"""Called after each source, in the order in which they end."""


@dataclass
class Compiled:
    """What a round of compilations gave. `opcodes` only where they were asked for."""

    cubins: dict[Source, Cubin] = field(default_factory=dict)
    opcodes: dict[Source, Opcodes] = field(default_factory=dict)
    errors: dict[Source, AlphaError] = field(default_factory=dict)


def compile_sources(sources: Sequence[Source], *, jobs: int | None = None, look: bool = False, done: Done | None = None) -> Compiled:
    """Compile, `jobs` at a time (default one per CPU), from the cache where it can; `look`: read the opcodes back too.

    Sources that do not compile are in `errors`; MachineError where the tools are missing.
    """
    find_nvcc()
    result = Compiled()

    def one(source: Source) -> tuple[Cubin, Opcodes | None]:
        cubin = nvcc.compile_kernel(source)
        return cubin, opcodes(cubin) if look else None

    with ThreadPoolExecutor(max_workers=jobs or os.cpu_count() or 1) as pool:
        futures = {pool.submit(one, source): source for source in sources}
        try:
            for future in as_completed(futures):
                source, error = futures[future], None
                try:
                    cubin, ops = future.result()
                    result.cubins[source] = cubin
                    if ops is not None:
                        result.opcodes[source] = ops
                except MachineError:
                    raise
                except AlphaError as came:
                    result.errors[source] = error = came
                if done is not None:
                    done(source, error)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return result


@dataclass
class Checked:
    """`failures` by the source that they are about (None: about all); `better`: below the baseline; `compiled`, `audited`: how many."""

    failures: list[tuple[Source | None, str]] = field(default_factory=list)
    better: list[str] = field(default_factory=list)
    compiled: int = 0
    audited: int = 0


def check(all_sources: Sequence[Source], chosen: Sequence[Source], *, look: bool, jobs: int | None = None, done: Done | None = None,
          manifest_path: Path = manifest.PATH, baseline_path: Path = kernels_baseline.PATH) -> Checked:
    """Compile `chosen` and hold it, and what is committed about the rest of `all_sources`, against the baselines.

    MachineError unless the compiler is exactly the pinned one.
    """
    exact_compiler()
    made = compile_sources(chosen, jobs=jobs, look=look, done=done)
    known = manifest.load(manifest_path)
    result = Checked(compiled=len(made.cubins), audited=len(made.opcodes))
    result.failures += [(s, str(error)) for s, error in made.errors.items()]
    for source, cubin in made.cubins.items():
        why = manifest.difference(source, cubin, known)
        result.failures += [(source, f"kernels/{source}: {why}")] if why else []
        result.failures += [(source, str(f)) for f in kernels_audit.audit(cubin, made.opcodes.get(source, {}))] if look else []
    whole = len(made.cubins) == len(all_sources)
    if whole:
        extra = known.keys() - {manifest.key_of(s) for s in all_sources}
        result.failures += [(None, f"kernels/{known[key]['source']}: in the manifest, but nothing asks for it") for key in sorted(extra)]
        if look:
            result.failures += [(None, text) for text in kernels_audit.idle((made.cubins[s], ops) for s, ops in made.opcodes.items())]
    if not made.errors:  # else what did not compile would be missed by name once more
        worse, better = kernels_baseline.compare(usage(all_sources, made, known), kernels_baseline.load(baseline_path))
        result.failures += [(None, text) for text in worse]
        result.better = better if whole else []
    return result


def exact_compiler() -> None:
    """MachineError unless the compiler is the very version that the manifest was written with."""
    if find_nvcc()[1] != manifest.COMPILER:
        raise MachineError("another compiler makes other machine code", came=find_nvcc()[1], expected=manifest.COMPILER, do=INSTALL)


def usage(sources: Sequence[Source], made: Compiled, known: Mapping[str, Mapping[str, Any]]) -> kernels_baseline.Limits:
    """What the kernels use: of what was compiled now, and for the rest as the manifest has it."""
    resources = []
    for source in sources:
        if source in made.cubins:
            resources.append((source, {name: vars(r) for name, r in made.cubins[source].resources.items()}))
        elif (entry := known.get(manifest.key_of(source))) is not None:
            resources.append((source, entry["resources"]))
    fewest = {(s, kernel): kernels_audit.counts(ops, kernel) for s, ops in made.opcodes.items() for kernel in made.cubins[s].resources}
    return kernels_baseline.used(resources, fewest)


def pin(sources: Sequence[Source], made: Compiled) -> list[str]:
    """Write both baselines from all of `sources`, compiled with their opcodes; returns what changed in the manifest.

    CompileError if one did not compile: a baseline of less than everything would hide the rest.
    """
    if made.errors:
        raise CompileError("not pinned: not everything compiles", came=", ".join(f"kernels/{s}" for s in made.errors))
    exact_compiler()
    kernels_baseline.save(usage(sources, made, {}))
    return manifest.build(sources)
