"""The seal of a run: whether all that it computed went through gated components, as far as its own files show it. Floor 6.

The manifest holds a hash of its own content and the run's identity, drawn when the folder was made. Each checkpoint carries a Seal among
its facts, which the hash of its own manifest covers. A run is GATED where both are sound and agree; anything else is UNGATED, and stays so.

This finds what was lost, mixed up or edited by hand. Whoever edits a file and makes its hash anew is not found: a hash is no signature.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpha.checkpoint import folders
from alpha.data.files import sha256_hex
from alpha.errors import AlphaError
from alpha.train import rundir
from alpha.train.rundir import GATED, UNGATED


@dataclass(frozen=True)
class Seal:
    """What a checkpoint says about how it came to be. `run`: identity of the run; `evidence`: hash of what admitted its session."""

    run: str = ""
    status: str = UNGATED
    evidence: str = ""


def evidence_hash(evidence: Mapping[str, Mapping[str, str]]) -> str:
    """SHA-256 (hex) of component -> gate -> hash of the record that satisfies it."""
    return sha256_hex(json.dumps(evidence, sort_keys=True).encode())


def broken(manifest: Mapping[str, Any], saved: folders.Saved | None = None) -> str:
    """Why a run with this manifest, and state from this checkpoint, is not soundly GATED; '' if it is."""
    if not manifest:
        return "its manifest is missing"
    if not rundir.is_sound(manifest):
        return "its manifest was edited, or made before manifests carried a hash"
    sessions = manifest["sessions"]
    if manifest["status"] != GATED or not all(s["gated"] for s in sessions):
        return "an earlier session of it was UNGATED"
    if saved is None:
        return ""
    where, stated = f"checkpoint {saved.path.name}", saved.facts.get("seal")
    if not isinstance(stated, Mapping):
        return f"{where} carries no seal"
    if stated.get("status") != GATED:
        return f"{where} comes from an UNGATED session"
    if stated.get("run") != manifest["run"]:
        return f"{where} belongs to another run"
    made = (stated.get("evidence"), saved.facts.get("program"))
    if not any((s["evidence"], s["program"]) == made and s["from_step"] <= saved.step for s in sessions):
        return f"{where} was made with evidence or a Program that no session of the manifest had"
    return ""


def why_ungated(path: Path) -> str:
    """Why the run directory `path`, as it lies there, is not soundly GATED; '' if it is. Reads manifests, no state."""
    try:
        manifest = rundir.read_manifest(path)
        why = broken(manifest)
        for step in folders.steps(path / "checkpoints"):
            why = why or broken(manifest, folders.inspect(folders.at(path / "checkpoints", step), verify=False))
    except (AlphaError, OSError) as error:
        return f"it cannot be read: {error.what if isinstance(error, AlphaError) else error}"
    return why
