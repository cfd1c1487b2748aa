"""The phases of a training step, defined once. Floor 3.

The *exclusive* time of all phases and `unexplained` add up to the wall time of a step interval: from the start of a step to the start of
the next one (or the end of the session), so evaluation and checkpoints between two steps belong to the step before them. Time in which
a transfer, a collective or a write runs beside the compute stream is not in that sum: it stands in the phase's *overlapped* column.
"""

from __future__ import annotations

from alpha.graph.order import COMM
from alpha.graph.plan import Launch

PHASES: dict[str, str] = {
    "forward": "launches of the forward graph, recomputed ones not counted; of the chunked head logits, loss and the logits' gradient "
               "(CPU: its products too, for it is one launch)",
    "backward": "launches of the backward graph: activation and weight gradients, recompute, sums over logical shards; of the chunked head "
                "the products that make its gradients (GPU)",
    "grad_norm": "the global norm of the gradient (GPU: its sums of squares)",
    "grad_clip": "clip coefficient and the finite flag (GPU: one kernel with the norm's root, learning rate and step counter)",
    "optimizer": "parameter and moment update (CPU: with learning rate and step counter)",
    "data_load": "making the next batch: sampling, reading tokens",
    "host_to_device": "copying a batch to where the kernels read it",
    "device_to_host": "reading loss, norm and flags back",
    "comm": "collectives and sends, the part that the compute stream waits for",
    "checkpoint": "writing the state, the part that the compute stream waits for",
    "eval": "validation between steps",
    "sample_gen": "text generated between or after steps",
    "checks": "spot checks: launches recomputed, memory hashed",
    "idle": "the compute stream has nothing to do: gaps between launches and calls (GPU: between runs of launches of one phase, or between "
            "kernels where each was timed)",
}
"""Name -> what it counts, in the order in which figures show them."""

OVERLAPPING = ("data_load", "host_to_device", "device_to_host", "comm", "checkpoint")
"""Phases that may also run beside the compute stream; each has a column `<phase>_overlapped_ns`."""

STEP_PHASES = tuple(name for name in PHASES if name not in ("checkpoint", "eval", "sample_gen"))
"""Phases that belong to the step itself; the others (checkpoint, eval, sample_gen) happen between steps."""

_BY_LAUNCH = {"forward": "forward", "backward": "backward", "recompute": "backward", "wgrad": "backward", "reduce": "backward"}

_UPDATE = {"global_norm": "grad_norm", "square_sums": "grad_norm", "norm_of_squares": "grad_norm", "clip_coefficient": "grad_clip",
           "scalars_of_squares": "grad_clip", "finite_flag": "grad_clip"}


def phase_of(launch: Launch) -> str:
    """The step phase that a launch counts in, as far as its kernels have no phases of their own."""
    if launch.stream == COMM:
        return "comm"
    if launch.phase == "update":
        return _UPDATE.get(launch.op, "optimizer")
    return _BY_LAUNCH[launch.phase]
