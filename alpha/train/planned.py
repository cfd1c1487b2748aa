"""What a run would be, before anything of it exists: parameters, FLOPs by part, exact bytes, components. Allocates none of it. Floor 6."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from alpha.component import Catalogue
from alpha.config import Config
from alpha.flops.v1 import ModelFlops
from alpha.graph.plan import Launch, Program
from alpha.graph.state import StateLayout
from alpha.train.assemble import flops_for, program_for, threads_for
from alpha.types import ITEMSIZE

Places = Mapping[tuple[str, int], str]

PARTS = ("attention projections", "attention scores", "feed-forward", "head", "embedding", "norms and others", "recompute", "optimizer")
"""What executed FLOPs are told apart by. Recompute is everything that is computed a second time, whatever it belongs to."""


@dataclass(frozen=True)
class Planned:
    """One planned run. `executed`: part -> FLOPs of one step; bytes are exact, padding and alignment included.

    `state_bytes`: 'parameters', 'gradients', 'moments', 'other' -> bytes; `activations`: Segment -> bytes; `arenas` as allocated.
    """

    program: Program
    vocabulary: int
    vocabulary_source: str
    parameters: int
    tokens_per_step: int
    steps: int
    flops: ModelFlops
    executed: dict[str, int]
    state_bytes: dict[str, int]
    activations: dict[str, int]
    arenas: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """All arenas of one device together."""
        return sum(self.arenas.values())

    @property
    def model_flops_per_step(self) -> float:
        """Useful FLOPs (flops/v1) of one step."""
        return self.flops.per_token * self.tokens_per_step


def plan_run(cfg: Config, catalogue: Catalogue, vocabulary: int | None = None) -> Planned:
    """Plan `cfg`. `vocabulary`: ids of the run's tokenizer where it exists; else the configured number is taken, and said so."""
    vocab = vocabulary or (257 if cfg.data.tokenizer == "bytes" else cfg.data.vocab)
    source = "of the run's tokenizer" if vocabulary else "as configured; a small corpus may give fewer"
    program = program_for(cfg, vocab, catalogue, threads_for(cfg))
    executed, places = Counter(dict.fromkeys(PARTS, 0)), tensors_by_place(program.states)
    for name, times in Counter(call.plan for call in program.schedule).items():
        for launch in program.plans[name].launches:
            executed[part_of(launch, places)] += times * launch.flops
    arenas = program.arenas()
    return Planned(
        program=program, vocabulary=vocab, vocabulary_source=source,
        parameters=sum(t.size for t in program.states["param"].tensors),
        tokens_per_step=cfg.train.batch * cfg.data.sequence, steps=cfg.train.steps, flops=flops_for(cfg, vocab), executed=dict(executed),
        state_bytes=_state_bytes(arenas), activations={name: plan.memory.peak for name, plan in program.plans.items() if plan.launches},
        arenas=arenas)  # fmt: skip


def part_of(launch: Launch, places: Places) -> str:
    """Which of PARTS a launch belongs to. A product is told by the tensor that it reads, or whose gradient it writes."""
    if launch.phase == "recompute":
        return "recompute"
    if launch.phase in ("update", "reduce"):
        return "optimizer"
    if launch.layer in ("head", "embedding"):
        return launch.layer
    if launch.op.startswith("attention"):
        return "attention scores"
    for ref in (*launch.ins, *launch.outs):
        if len(ref.type.shape) > 1 and (name := places.get((ref.arena, ref.offset))):
            return "attention projections" if ".attention." in name else "feed-forward"
    return "norms and others"


def tensors_by_place(states: Mapping[str, StateLayout]) -> Places:
    """(arena, byte offset) -> name of the tensor that begins there."""
    return {(f"state.{kind}", layout.offsets[t.name] * ITEMSIZE[layout.dtype]): t.name for kind, layout in states.items()
            for t in layout.tensors}


def _state_bytes(arenas: Mapping[str, int]) -> dict[str, int]:
    found = {"parameters": 0, "gradients": 0, "moments": 0, "other": 0}
    for name, n in arenas.items():
        kind = name.removeprefix("state.")
        if kind == name:
            continue
        if kind.startswith("param"):
            found["parameters"] += n
        elif kind.startswith("grad"):
            found["gradients"] += n
        elif kind in ("m", "v", "velocity"):
            found["moments"] += n
        else:
            found["other"] += n
    return found
