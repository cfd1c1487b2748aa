"""Phases as the page draws them: the report's colours, with hatches by plotly's names. Floor 8."""

from __future__ import annotations

from alpha.profile.phases import PHASES
from alpha.report.palette import OF_PHASE


def phases() -> list[dict[str, str]]:
    """Every phase in the order of figures: name, what it counts, colour, hatch ('' none)."""
    texts = {**PHASES, "unexplained": "wall time that no phase claims"}
    return [{"name": name, "text": texts[name], "colour": colour, "shape": hatch[:1]} for name, (colour, hatch) in OF_PHASE.items()]
