"""Colours that stay apart with the common colour-vision deficiencies (Okabe and Ito 2008; Tol 2021). Floor 7."""

from __future__ import annotations

from alpha.profile.phases import PHASES

SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#6E5BB8", "#44AA99", "#999933")
"""Of runs, in order; from the eleventh on they begin again with other dashes."""
DASHES = ("-", "--", ":", "-.")

OF_PHASE: dict[str, tuple[str, str]] = {
    "forward": ("#0072B2", ""), "backward": ("#D55E00", ""), "grad_norm": ("#CC79A7", ""), "grad_clip": ("#882255", ""),
    "optimizer": ("#009E73", ""), "data_load": ("#E69F00", ""), "host_to_device": ("#E69F00", "//"), "device_to_host": ("#E69F00", "\\\\"),
    "comm": ("#56B4E9", ""), "checkpoint": ("#6E5BB8", ""), "eval": ("#6E5BB8", "//"), "sample_gen": ("#6E5BB8", "\\\\"),
    "checks": ("#CC79A7", "//"), "idle": ("#9AA3A7", ""), "unexplained": ("#9AA3A7", "xx"),
}  # fmt: skip
"""Phase -> colour and hatch; phases whose colours are alike differ in hatch."""
assert list(OF_PHASE) == [*PHASES, "unexplained"]

_LAUNCHES = ("forward", "recompute", "backward", "wgrad", "gradient", "reduce", "update", "grad_norm", "grad_clip", "optimizer")
_COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#882255", "#CC79A7", "#009E73", "#CC79A7", "#882255", "#009E73")
OF_LAUNCH = dict(zip(_LAUNCHES, _COLOURS))
"""Phase of a launch (alpha.graph.plan) -> colour."""


def series(i: int) -> tuple[str, str]:
    """Colour and dashes of the i-th run."""
    return SERIES[i % len(SERIES)], DASHES[(i // len(SERIES)) % len(DASHES)]
