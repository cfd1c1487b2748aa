"""Policy: which gates a component owes, what is exempt and why, which code measures, what carries over. Floor 3; data and pure functions.

Nothing here is digested: a change of policy makes no evidence stale, it changes what is asked of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from alpha.component import GATES, Component
from alpha.errors import InputError
from alpha.ops.spec import OpSpec
from alpha.ops.table import row, table
from alpha.registry.gpu import AnyClass, GpuClass

OWED: Mapping[str, tuple[str, ...]] = {
    "kernel": ("parity", "gradient", "determinism", "faults", "perf"),
    "pass": ("parity", "determinism", "faults"),
    "schedule": ("parity", "determinism", "faults"),
    "sampler": ("parity", "determinism", "faults"),
    "tokenizer": ("parity", "determinism", "faults"),
    "corpus": ("parity", "determinism", "faults"),
    "split": ("parity", "determinism", "faults"),
    "shards": ("parity", "determinism", "faults"),
    "executor": ("parity", "determinism", "faults"),
    "checkpoint": ("parity", "determinism", "faults"),
    "model": ("parity", "gradient", "determinism", "faults"),
    "program": ("parity", "determinism", "faults"),
    "optimizer": ("parity", "determinism", "faults"),
    "evidence": ("parity", "determinism", "faults"),
    "flops": ("parity",),
    "yardstick": ("parity", "determinism", "faults"),
}
"""Gates owed by kind, in the order in which they are run."""

_NO_GRADIENT = (
    ("the update of weights, which no gradient crosses", ("adamw", "sgd", "global_norm", "clip_coefficient", "finite_flag",
                                                             "update_scalars")),
    ("integers or flags come out", ("count_valid", "next_step")),
    ("the learning rate is a function of an integer", ("learning_rate",)),
    ("has no operands", ("fill",)),
    ("made by fusion after differentiation; parity compares it with the composed oracles of its parts, whose gradients are gated",
     ("linear_gelu", "linear_swiglu", "matmul_gelu_bwd", "matmul_accumulate", "add_layernorm", "add_rmsnorm", "layernorm_bwd_add",
      "rmsnorm_bwd_add", "embedding_add", "embedding_bwd_accumulate", "sum_accumulate")),
    ("evaluation's loss; linear_cross_entropy_grad is the row that gives gradients", ("linear_cross_entropy",)),
)

EXEMPT: Mapping[tuple[str, str], str] = {(op, "gradient"): reason for reason, ops in _NO_GRADIENT for op in ops}
"""(op row, gate) -> reason. Closed: a row without a vjp that is no backward row owes the gradient gate until it stands here."""

MEASURE: Mapping[str, str] = {
    "parity": "alpha.gates.parity:measure",
    "gradient": "alpha.gates.gradient:measure",
    "determinism": "alpha.gates.determinism:measure",
    "faults": "alpha.gates.faults:measure",
    "perf": "alpha.gates.perf:measure",
}
"""The engine of each gate by dotted name: read as text for its digest, never imported from here."""

MEASURE_CUDA: Mapping[str, str] = {
    "parity": "alpha.gates.cuda.parity:measure",
    "gradient": "alpha.gates.cuda.gradient:measure",
    "determinism": "alpha.gates.cuda.determinism:measure",
    "faults": "alpha.gates.cuda.faults:measure",
    "perf": "alpha.gates.cuda.perf:measure",
}
"""The engines of kernels that run on the GPU."""

SUBJECTS: Mapping[str, str] = {"cpu": "alpha.gates.cpu.subjects", "cuda": "alpha.gates.cuda.subjects"}
"""How the engines call kernels of each back end: modules with `warm_up`, `samples` and `bind`, which subjects.py finds by name."""

RUNS: Mapping[tuple[str, str], int] = {("kernel", "cpu"): 100, ("kernel", "cuda"): 300}
"""Fewest runs in total that the determinism gate of (kind, backend) needs: 300 find a 1 % flake with 95 % probability, 100 a 3 % one.
Every case of every other component runs at least twice."""

HOST_KINDS = ("pass", "schedule", "sampler", "tokenizer", "corpus", "split", "shards", "checkpoint", "evidence", "flops", "yardstick")
"""Kinds whose results do not come out of vector units: integers, bytes, and float64 scalars of the C library."""

CARRIED = ("parity", "gradient")
"""Gates whose evidence may come from another machine class; the others are always run on the class itself."""


_RENEW = "the executor's code moved (kernel times, phases); its catch on the GPU awaits the next renewal"

UNRENEWED: Mapping[str, str] = {f"executor.cuda.{name}": _RENEW for name in (
    "arena-not-whole", "first-inputs-again", "graph-of-another-plan", "inputs-not-delivered", "inputs-stale", "launch-dropped",
    "outputs-not-fetched", "profiled-launch-twice", "replay-cut-short", "results-not-waited-for", "results-of-what-is-behind",
    "staged-batch-kept", "state-forgotten", "state-not-returned", "state-returned-again", "watched-launch-dropped")}
"""Planted faults whose catch on the GPU is older than the code, with the reason: NOT_RUN there, told as such by the merge gate. Closed, and
only for faults in the host code of the GPU's back end: suites/unit/test_cuda_host.py rejects each on an emulated GPU in every run of the
tests. An entry whose catch is current again is an error, so the list empties with the next renewal."""


def is_backward(spec: OpSpec) -> bool:
    """Whether a row is the backward of another row: it is named after that row, with `_bwd` behind."""
    base, found, more = spec.name.partition("_bwd")
    return bool(found) and not more and base in table()


def owed(component: Component) -> tuple[str, ...]:
    """Gates that this component owes, exemptions taken off."""
    return tuple(g for g in OWED[component.kind] if exemption(component, g) is None)


def exemption(component: Component, gate: str) -> str | None:
    """Why a gate that the kind owes is not owed by this component; None when it is owed."""
    return EXEMPT.get((component.op, gate)) if component.op is not None else None


def required_runs(component: Component) -> int:
    """Fewest determinism runs, all cases together."""
    return RUNS.get((component.kind, component.backend), 2)


def carries(component: Component, gate: str, source: AnyClass, here: AnyClass, *, blas: bool) -> bool:
    """Whether evidence made on class `source` counts on class `here`. `blas`: the implementation calls a BLAS.

    Same class: always. Else parity and gradient only: of host kinds under the same NumPy; of numeric kinds under the same
    instruction set, NumPy and thread count, when no BLAS is called (its kernel is then all that differs). Between GPU models: parity
    and gradient within one compute capability, whose machine code they run.
    """
    if source == here:
        return True
    if isinstance(source, GpuClass) or isinstance(here, GpuClass):
        return gate in CARRIED and isinstance(source, GpuClass) and isinstance(here, GpuClass) and source.capability == here.capability
    if gate not in CARRIED or source.numpy != here.numpy:
        return False
    if component.kind in HOST_KINDS:
        return True
    return not blas and source.isa == here.isa and source.threads == here.threads


def problems() -> list[str]:
    """Exemptions that should not stand: no such op, no such gate, no reason, or not needed. Empty when the list is sound."""
    found = []
    for (op, gate), reason in EXEMPT.items():
        if op not in table():
            found.append(f"exemption ({op}, {gate}): no such op row")
        elif gate not in OWED["kernel"]:
            found.append(f"exemption ({op}, {gate}): kernels owe no such gate")
        elif not reason.strip():
            found.append(f"exemption ({op}, {gate}): no reason is given")
        elif gate == "gradient" and (row(op).vjp is not None or is_backward(row(op))):
            found.append(f"exemption ({op}, {gate}): the row has a gradient, so it owes the gate")
    return found


def measure_symbol(gate: str, component: Component) -> str:
    """Dotted name of the engine that measures `gate` on this component; InputError for an unknown gate."""
    if gate not in MEASURE:
        raise InputError("no such gate", came=gate, expected=", ".join(GATES))
    return MEASURE_CUDA[gate] if component.backend == "cuda" and component.kind == "kernel" else MEASURE[gate]


def measure_symbols(gate: str, component: Component) -> list[str]:
    """Dotted names of all that measures `gate` on this component: the engine, and how it calls a kernel of this back end."""
    module = SUBJECTS.get(component.backend, SUBJECTS["cpu"])
    called = ("warm_up", "bind") if gate == "perf" else ("warm_up", "samples", "bind")  # perf's calls are not drawn from samples
    return [measure_symbol(gate, component), *(f"{module}:{name}" for name in called if component.kind == "kernel")]
