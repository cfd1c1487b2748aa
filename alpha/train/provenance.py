"""What a run was: the manifest, the metadata and the static tables of the metrics. Floor 6."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from alpha.component import Catalogue
from alpha.config import Config
from alpha.data.bucketed import attention
from alpha.data.files import sha256_hex
from alpha.data.mixture import MixedSampler, sources_of
from alpha.data.packing import waste
from alpha.data.sampler import PermutedSampler, Sampler
from alpha.errors import CorruptError, visible
from alpha.flops.executed import by_part
from alpha.flops.v1 import CONVENTION, VERSION, ModelFlops
from alpha.graph.plan import Program
from alpha.profile.live import live_bytes
from alpha.profile.store import Store, read
from alpha.registry.machine import environment, machine_class
from alpha.train import forbidden, rundir
from alpha.train.assemble import Dataset
from alpha.train.engine import Executor
from alpha.train.peak import Peak
from alpha.train.rundir import RunDir
from alpha.train.seal import Seal


def describe(
    held: RunDir, metrics: Store, cfg: Config, data: Dataset, program: Program, flops: ModelFlops, evidence: Mapping[str, Any],
    seal: Seal, admitted: bool, began: datetime, step: int, threads: int, peak: Peak, executor: Executor, catalogue: Catalogue,
    devices: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write the manifest and the metadata of the metrics. `evidence`: component -> gate -> hash of the record that satisfies it;
    `admitted`: whether the registry let this session in; `devices`: of each rank, where ranks have GPUs of their own."""
    machine, here, source, hardware = machine_class(), environment(), rundir.source_state(), executor.hardware()
    before = rundir.read_manifest(held.path)
    session = {
        "started": began.isoformat(timespec="seconds"), "from_step": step, "threads": threads, "machine": machine.key,
        "hardware": hardware["hardware"], "environment": here, "source": source, "program": program.hash(), "gated": admitted,
        "evidence": seal.evidence, "libraries": forbidden.libraries(), "not_looked_at": forbidden.blind(),
    }  # fmt: skip
    if devices:
        session["devices"] = list(devices)
    components = {**{c: {} for c in program.kernels()}, **evidence}
    held.write_manifest(
        {
            "run": seal.run, "status": seal.status, "folder": os.getcwd(), "config": cfg.identity(), "program": program.hash(),
            "components": components, "machine": hardware["machine"],
            "flops": {"version": VERSION, "convention": CONVENTION, "per_token": flops.per_token, "peak": peak.flops,
                      "peak_source": peak.source},
            "tokenizer": data.tokenizer.hash, "corpus": data.corpus.hash,
            "split": {"train": data.split.train.hash, "validation": data.split.validation.hash},
            "streams": {"train": data.train.hash, "validation": data.validation.hash},
            "sessions": [*(before["sessions"] if rundir.is_sound(before) else []), session],
        }
    )  # fmt: skip
    executed = sum(program.plans_of(rank)[s.plan].flops() for rank in range(program.ranks) for s in program.role(rank).schedule)
    metrics.describe(
        {
            "status": seal.status, "name": visible(held.path.name), "program": program.hash(), "machine": hardware["machine"],
            "hardware": hardware["hardware"], "devices": program.ranks, "commit": source["commit"], "dirty": source["dirty"],
            "version": source["version"], "backend": cfg.machine.backend, "backend_version": hardware["version"],
            "binaries": sha256_hex(repr(sorted((k, sorted(v.items())) for k, v in components.items())).encode()),
            "kernels": json.dumps(kernel_hashes(program, catalogue)), "driver": driver_of(executor),
            "tokenizer": data.tokenizer.hash, "corpus": data.corpus.hash, "train_stream": data.train.hash,
            "validation_stream": data.validation.hash, "flops_version": VERSION, "flops_convention": CONVENTION,
            "flops_per_token": flops.per_token, "executed_flops": executed, "peak_flops": peak.flops,
            "peak_bandwidth": peak.bandwidth, "peak_source": peak.source, "threads": threads, "shards": cfg.train.shards,
            "tokens_per_step": cfg.train.batch * cfg.data.sequence,
        }
    )  # fmt: skip
    if step == 0:
        metrics.describe({"started": began.isoformat(timespec="seconds")})


def tell_sources(metrics: Store, cfg: Config, sampler: Sampler) -> None:
    """What the run reads, by source: the key `sources` of run_metadata."""
    named = sources_of(cfg.data.mixture) if cfg.data.mixture else [(cfg.data.corpus, 1)]
    each = sampler.samplers if isinstance(sampler, MixedSampler) else (sampler,)
    metrics.describe({"sources": json.dumps([
        {"source": name, "weight": weight, **waste(own), **attention(own, cfg.model.window, cfg.data.documents)}
        for (name, weight), own in zip(named, each) if isinstance(own, PermutedSampler)])})  # fmt: skip


def note_libraries(held: RunDir) -> None:
    """Add to the manifest what this session has mapped since it began, if anything. CorruptError where it no longer names this session."""
    manifest, found = rundir.read_manifest(held.path), forbidden.libraries()
    if not manifest.get("sessions"):
        raise CorruptError("the manifest of a run is gone while it goes on", came=held.path / "manifest.json",
                           expected="the sessions that were written there", do="restore it, or go on with --resume as it is: that "
                           "writes another one, and the run is UNGATED then")  # fmt: skip
    session = manifest["sessions"][-1]
    if session["libraries"] != found:
        session["libraries"] = found
        held.write_manifest({k: v for k, v in manifest.items() if k not in ("format", "sha256")})


def moved(metrics: Store, executor: Executor, threads: int) -> str:
    """What a session must say that goes on where the run's peak was not taken; '' where it was. Ask before `describe`."""
    metrics.flush()
    before = dict(read(metrics.path, "run_metadata"))
    stated = [f"{before.get('hardware')} with {before.get('threads')} threads", f"{executor.hardware()['hardware']} with {threads} threads"]
    return "" if "hardware" not in before or stated[0] == stated[1] else (
        f"this session runs on {stated[1]}; MFU stands against the run's one peak, which was taken on {stated[0]}")  # fmt: skip


def kernel_hashes(program: Program, catalogue: Catalogue) -> dict[str, str]:
    """Component -> sha256 of the file that holds its binder and, on a GPU, of the digests of all compiled files that it may load."""
    found = {}
    for name in program.kernels():
        component = catalogue[name]
        binder = component.implementation
        while isinstance(binder, partial):
            binder = binder.func
        source = Path(inspect.getfile(binder)).read_bytes()
        compiled = sorted(component.binaries().items()) if component.binaries is not None else []
        found[name] = sha256_hex(source + repr(compiled).encode())
    return found


RELEASE = Path("/proc/driver/nvidia/version")


def driver_of(executor: Executor, release: Path = RELEASE) -> str:
    """The NVIDIA driver's release, such as 580.95.05, where the system tells it; else the version of its API; 'none' on a CPU."""
    if executor.program.facts["backend"] != "cuda":
        return "none"
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", release.read_text())
    except OSError:
        found = None
    return found.group() if found else executor.hardware()["version"]


def tell_plan(metrics: Store, program: Program, flops: ModelFlops, tokens: int) -> None:
    """The tables `flops_parts`, `schedule` and `memory_plan`: FLOPs of a step of `tokens` tokens by part, what it runs, and how many
    activation bytes are live at each launch."""
    for (part, direction), (useful, done) in by_part(flops, program, tokens).items():
        metrics.add("flops_parts", {"part": part, "direction": direction, "model": useful, "executed": done})
    for name, count in Counter(s.plan for s in program.schedule).items():
        plan = program.plans[name]
        metrics.add("schedule", {"plan": name, "count": count, "launches": len(plan.launches), "flops": plan.flops(),
                                 "nbytes": sum(x.nbytes for x in plan.launches)})  # fmt: skip
        for i, (launch, live) in enumerate(zip(plan.launches, live_bytes(plan))):
            metrics.add("memory_plan", {"plan": name, "launch": i, "op": launch.op, "layer": launch.layer, "phase": launch.phase,
                                        "live": live})  # fmt: skip
