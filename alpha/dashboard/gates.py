"""Every component with its gates, as the page /gates shows it. Floor 8."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from alpha.component import Catalogue
from alpha.registry.evidence import default_roots
from alpha.registry.gates import GATES
from alpha.registry.status import Registry, Status

KEPT_S = 60.0
"""A snapshot of the registry costs seconds, so it is kept for this long unless a fresh one is asked for."""


class GateBoard:
    """The status of every component on this machine class. Safe to ask from several threads."""

    def __init__(self, catalogue: Callable[[], Catalogue]) -> None:
        self._catalogue, self._lock = catalogue, threading.Lock()
        self._made: dict[str, Any] | None = None
        self._at = 0.0

    def status(self, fresh: bool = False) -> dict[str, Any]:
        """{machine, asked_unix, gates, components: [...]}; verdict, whether satisfied, and whether evidence is current or stale."""
        with self._lock:
            if self._made is None or fresh or time.monotonic() - self._at > KEPT_S:
                catalogue = self._catalogue()
                registry = Registry(catalogue, default_roots())
                rows = [_row(catalogue, registry.status(c.id)) for c in catalogue]
                self._made = {"machine": registry.machine.key, "described": registry.machine.describe(), "asked_unix": time.time(),
                              "gates": list(GATES), "components": rows, "usable": sum(r["usable"] for r in rows)}
                self._at = time.monotonic()
            return self._made


def _row(catalogue: Catalogue, status: Status) -> dict[str, Any]:
    component = catalogue[status.component]
    return {
        "id": component.id, "kind": component.kind, "backend": component.backend, "usable": status.usable, "claimable": status.claimable,
        "presupposed": list(status.presupposed), "exempt": dict(status.exempt),
        "gates": {g.gate: {"verdict": g.verdict, "satisfied": g.satisfied, "why": g.why, "stale": list(g.stale), "machine": g.machine,
                           "evidence": "none" if not g.machine else "stale" if g.stale else "current"} for g in status.gates.values()},
    }  # fmt: skip
