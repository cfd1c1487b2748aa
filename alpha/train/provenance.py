"""What a run was: the manifest, the metadata and the static tables of the metrics. Floor 6."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from alpha.config import Config
from alpha.data.files import sha256_hex
from alpha.flops.v1 import CONVENTION, VERSION, ModelFlops
from alpha.graph.plan import Program
from alpha.profile.live import live_bytes
from alpha.profile.store import Store
from alpha.registry.machine import environment, machine_class
from alpha.train import forbidden, rundir
from alpha.train.assemble import Dataset
from alpha.train.engine import Executor
from alpha.train.peak import Peak
from alpha.train.rundir import UNGATED, RunDir


def describe(
    held: RunDir, metrics: Store, cfg: Config, data: Dataset, program: Program, flops: ModelFlops, evidence: Mapping[str, Any],
    ungated: bool, began: datetime, step: int, threads: int, peak: Peak, executor: Executor,
) -> None:  # fmt: skip
    """Write the manifest and the metadata of the metrics. `evidence`: component -> gate -> hash of the record that satisfies it."""
    machine, here, source, hardware = machine_class(), environment(), rundir.source_state(), executor.hardware()
    sessions = rundir.read_manifest(held.path).get("sessions", [])
    session = {
        "started": began.isoformat(timespec="seconds"), "from_step": step, "threads": threads, "machine": machine.key,
        "environment": here, "source": source, "program": program.hash(), "gated": bool(evidence),
        "libraries": forbidden.libraries(), "not_looked_at": forbidden.blind(),
    }  # fmt: skip
    status = UNGATED if ungated else "GATED"
    components = {**{c: {} for c in program.components()}, **evidence}
    held.write_manifest(
        {
            "status": status, "config": cfg.identity(), "program": program.hash(), "components": components, "machine": hardware["machine"],
            "flops": {"version": VERSION, "convention": CONVENTION, "per_token": flops.per_token, "peak": peak.flops,
                      "peak_source": peak.source},
            "tokenizer": data.tokenizer.hash, "corpus": data.corpus.hash,
            "split": {"train": data.split.train.hash, "validation": data.split.validation.hash},
            "streams": {"train": data.train.hash, "validation": data.validation.hash},
            "sessions": [*sessions, session],
        }
    )  # fmt: skip
    executed = sum(program.plans[s.plan].flops() for s in program.schedule)
    metrics.describe(
        {
            "status": status, "name": held.path.name, "program": program.hash(), "machine": hardware["machine"],
            "hardware": hardware["hardware"], "devices": 1, "commit": source["commit"], "dirty": source["dirty"],
            "version": source["version"], "backend": cfg.machine.backend, "backend_version": hardware["version"],
            "binaries": sha256_hex(repr(sorted((k, sorted(v.items())) for k, v in components.items())).encode()),
            "tokenizer": data.tokenizer.hash, "corpus": data.corpus.hash, "train_stream": data.train.hash,
            "validation_stream": data.validation.hash, "flops_version": VERSION, "flops_convention": CONVENTION,
            "flops_per_token": flops.per_token, "executed_flops": executed, "peak_flops": peak.flops,
            "peak_bandwidth": peak.bandwidth, "peak_source": peak.source, "threads": threads, "shards": cfg.train.shards,
            "tokens_per_step": cfg.train.batch * cfg.data.sequence,
        }
    )  # fmt: skip
    if step == 0:
        metrics.describe({"started": began.isoformat(timespec="seconds")})


def note_libraries(held: RunDir) -> None:
    """Add to the manifest what this session has mapped since it began, if anything."""
    manifest, found = rundir.read_manifest(held.path), forbidden.libraries()
    session = manifest["sessions"][-1]
    if session["libraries"] != found:
        session["libraries"] = found
        held.write_manifest({k: v for k, v in manifest.items() if k != "format"})


def tell_plan(metrics: Store, program: Program) -> None:
    """The tables `schedule` and `memory_plan`: what a step runs, and how many activation bytes are live at each launch."""
    for name, count in Counter(s.plan for s in program.schedule).items():
        plan = program.plans[name]
        metrics.add("schedule", {"plan": name, "count": count, "launches": len(plan.launches), "flops": plan.flops(),
                                 "nbytes": sum(x.nbytes for x in plan.launches)})  # fmt: skip
        for i, (launch, live) in enumerate(zip(plan.launches, live_bytes(plan))):
            metrics.add("memory_plan", {"plan": name, "launch": i, "op": launch.op, "layer": launch.layer, "phase": launch.phase,
                                        "live": live})  # fmt: skip
