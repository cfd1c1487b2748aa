"""What a run would be, before anything of it exists: parameters, FLOPs by part, exact bytes, components. Allocates none of it. Floor 6."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alpha.component import Catalogue
from alpha.config import Config
from alpha.errors import MachineError
from alpha.flops.executed import by_part
from alpha.flops.v1 import ModelFlops
from alpha.graph.plan import Launch, Program
from alpha.train.assemble import flops_for, known_tokenizer, program_for, threads_for
from alpha.train.assemble import vocabulary as ids_of_model


@dataclass(frozen=True)
class Planned:
    """One planned run. `parts`: (part, direction) -> FLOPs of one step, by the FLOPS model and executed; bytes are exact, padding and
    alignment included.

    `state_bytes`: 'parameters', 'gradients', 'moments', 'other' -> bytes; `activations`: Segment -> bytes; `arenas` as allocated.
    """

    program: Program
    vocabulary: int
    vocabulary_source: str
    parameters: int
    tokens_per_step: int
    steps: int
    flops: ModelFlops
    parts: dict[tuple[str, str], tuple[int, int]]
    state_bytes: dict[str, int]
    activations: dict[str, int]
    arenas: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """All arenas of one device together."""
        return sum(self.arenas.values())

    @property
    def model_flops_per_step(self) -> int:
        """Useful FLOPs (flops/v1) of one step."""
        return sum(model for model, _ in self.parts.values())

    @property
    def executed(self) -> int:
        """FLOPs that one step executes, recompute and optimizer included."""
        return sum(done for _, done in self.parts.values())


@dataclass(frozen=True)
class Exchange:
    """A collective of a step of rank 0: which Plan launches it, and with whose text (None: it reads none)."""

    plan: str
    shard: int | None
    micro: int | None
    launch: Launch

    @property
    def nbytes(self) -> int:
        """Of the larger side: what a reduce_scatter takes, and an all_gather gives."""
        return max((sum(r.type.nbytes for r in refs) for refs in (self.launch.ins, self.launch.outs)), default=0)


def exchanges(program: Program) -> list[Exchange]:
    """All collectives of one step of rank 0, in the order in which it issues them."""
    plans = program.plans_of(0)
    return [Exchange(call.plan, call.shard, call.micro, x) for call in program.schedule for x in plans[call.plan].launches
            if "group" in x.attrs]


def plan_run(cfg: Config, catalogue: Catalogue, vocabulary: int | None = None, ranks: int = 1) -> Planned:
    """Plan `cfg`, of so many ranks.

    `vocabulary`: ids of the run's tokenizer where it exists; else the configured number is taken, and said so.
    Raises MachineError where a kernel asks for scratch that this machine cannot give: planning counts scratch by taking it.
    """
    known = known_tokenizer(cfg)
    vocabulary = vocabulary or (known.vocab_size if known else None)
    vocab = ids_of_model(cfg, vocabulary or (257 if cfg.data.tokenizer == "bytes" else cfg.data.vocab))
    source = "of the run's tokenizer" if vocabulary else "as configured; a small corpus may give fewer"
    try:
        program = program_for(cfg, vocab, catalogue, threads_for(cfg, ranks), ranks)
    except MemoryError as error:
        raise MachineError("this process gets no memory to plan in", came=str(error) or None, expected="scratch of each kernel, once",
                           do='make the model or the microbatch smaller, or plan it for machine.backend = "cuda"') from error
    flops, tokens, arenas = flops_for(cfg, vocab), cfg.train.batch * cfg.data.sequence, program.arenas()
    return Planned(
        program=program, vocabulary=vocab, vocabulary_source=source,
        parameters=sum(t.size for t in program.states["param"].tensors),
        tokens_per_step=tokens, steps=cfg.train.steps, flops=flops, parts=by_part(flops, program, tokens),
        state_bytes=_state_bytes(arenas), activations={name: plan.memory.peak for name, plan in program.plans.items() if plan.launches},
        arenas=arenas)  # fmt: skip


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
