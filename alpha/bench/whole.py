"""`alpha bench run RUN`: the figures of a run directory, steady state beside the whole workflow, to be recorded. Floor 8."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpha.errors import InputError
from alpha.profile.figures import Figure, judge
from alpha.report.facts import facts
from alpha.report.runs import load

SHOWN = ("tokens_per_second", "workflow_tokens_per_second", "goodput", "mfu", "hfu", "kernel_active", "bubble", "unexplained")


@dataclass(frozen=True)
class Whole:
    """A run. `commit`: '' where its sessions ran on changed or unknown code."""

    name: str
    status: str
    machine: str
    hardware: str
    steps: int
    commit: str
    flops: Mapping[str, Any]
    environment: Mapping[str, str]
    kernel_hashes: Mapping[str, str]
    program: str
    config: Any
    taken: str
    figures: Sequence[Figure]

    def body(self) -> dict[str, Any]:
        """What is recorded. InputError where the code that ran is no commit, or the run was ungated."""
        if not self.commit:
            raise InputError("only a run of a clean commit is recorded", came=f"{self.name}: changed or unknown code, or several commits",
                             expected="one commit, without changes", do="train it again from a clean checkout")
        if self.status != "GATED":
            raise InputError("only a gated run is recorded", came=f"{self.name}: {self.status}", expected="GATED", do="use `alpha train`")
        return {"commit": self.commit, "taken": self.taken, "environment": dict(self.environment), "hardware": self.hardware,
                "kernel_hashes": dict(self.kernel_hashes),
                "run": self.name, "steps": self.steps, "program": self.program, "config": self.config, "flops": dict(self.flops),
                "figures": {f.key: f.value for f in self.figures}}


def commit_of(sessions: Sequence[Mapping[str, Any]]) -> str:
    """The one clean commit that all sessions ran; '' where there is none."""
    sources = {(s["source"]["commit"], s["source"]["dirty"]) for s in sessions}
    commit, dirty = next(iter(sources)) if len(sources) == 1 else ("unknown", "")
    return commit if commit != "unknown" and not dirty else ""


def figures(path: Path) -> Whole:
    """Read a run directory."""
    run = load(path, thorough=True)
    manifest, metadata = run.manifest, run.metadata
    sessions = manifest["sessions"]
    by_key = {f.key: f for f in judge(facts(run))}
    return Whole(
        name=run.name, status=str(run.provenance()["status"]), machine=str(metadata["machine"]), hardware=str(metadata["hardware"]),
        steps=int(run.step_timing.step.nunique()), commit=commit_of(sessions), flops=manifest["flops"],
        environment={**sessions[-1].get("environment", {}), "backend": metadata["backend_version"], "driver": metadata.get("driver", "")},
        kernel_hashes={k: v[:16] for k, v in json.loads(metadata.get("kernels", "{}")).items()}, program=str(manifest["program"]),
        config=manifest.get("config"), taken=str(sessions[-1]["started"])[:10], figures=[by_key[k] for k in SHOWN if k in by_key])
