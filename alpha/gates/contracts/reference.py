"""The small reference models on which passes, executor and program are gated. Floor 7."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from alpha.backends.cpu.catalogue import fill
from alpha.backends.cpu.executor import CpuExecutor
from alpha.component import Catalogue, Measured
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import Graph, Value, prune
from alpha.graph.plan import Program, Step
from alpha.graph.state import StateLayout
from alpha.graph.trace import Tracer
from alpha.graph.verify import verify
from alpha.models import gpt, llama
from alpha.models.family import Family
from alpha.optim.init import fill_initial
from alpha.optim.schedules import ScheduleConfig
from alpha.optim.update import adamw, sgd
from alpha.passes.build import Model, StepShape, build_program, stats_layout, trace_training

VOCAB, SEQ, BATCH = 13, 9, 2
SCHEDULE = ScheduleConfig(kind="cosine", peak=3e-2, warmup=2, total=20)

Batches = dict[tuple[int, int], dict[str, np.ndarray]]
"""(shard, microbatch) -> its inputs."""


@dataclass(frozen=True)
class Reference:
    """One reference model: what the builder needs, what its inputs are called, and the size of a microbatch."""

    name: str
    model: Model
    inputs: tuple[str, ...]
    vocab: int
    seq: int
    rows: int


def pair(g: gpt.GPTConfig, m: llama.LlamaConfig, rows: int) -> dict[str, Reference]:
    """'gpt' and 'llama' of these sizes, `rows` sequences a microbatch."""
    return {"gpt": reference_of("gpt", gpt.FAMILY, g, rows), "llama": reference_of("llama", llama.FAMILY, m, rows)}


def reference_of(name: str, own: Family, sizes: Any, rows: int) -> Reference:
    """A model of a family, in its longest sequence; its inputs are those that its trace asks for."""
    def loss(t: Tracer, training: bool) -> tuple[Value, Value]:
        return own.loss(t, sizes, rows, sizes.positions, training)

    t = Tracer("inputs")
    loss(t, True)
    return Reference(name, Model(name=name, loss=loss, decode=lambda t: own.decode(t, sizes, 1, sizes.positions)), tuple(t.graph.inputs),
                     sizes.vocab, sizes.positions, rows)


@cache
def references() -> dict[str, Reference]:
    """'gpt': dropout, packed documents, tied head; 'llama': grouped heads, window, untied head, z-loss."""
    return pair(gpt.GPTConfig(vocab=VOCAB, positions=SEQ, layers=2, width=16, heads=4, dropout=0.2, documents=True, seed=5),
                llama.LlamaConfig(vocab=VOCAB, positions=SEQ, layers=2, width=16, heads=4, kv_heads=2, hidden=24, window=5, z_loss=1e-3),
                BATCH)


def filled(fill: Callable[[Catalogue], None]) -> Catalogue:
    """The kernels of one back end."""
    catalogue = Catalogue()
    fill(catalogue)
    return catalogue


@cache
def kernels() -> Catalogue:
    """The CPU kernels."""
    return filled(fill)


def batch(ref: Reference, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """One microbatch: random tokens, some ignored targets, two documents a row, random sample numbers."""
    tokens = rng.integers(0, ref.vocab, (ref.rows, ref.seq + 1)).astype(np.int32)
    targets = tokens[:, 1:].copy()
    targets[rng.random((ref.rows, ref.seq)) < 0.2] = -1
    cut = int(rng.integers(1, ref.seq))
    documents = np.tile((np.arange(ref.seq) >= cut).astype(np.int32), (ref.rows, 1))
    made = {"tokens": tokens[:, :-1].copy(), "targets": targets, "documents": documents,
            "positions": np.tile(np.arange(ref.seq, dtype=np.int32), (ref.rows, 1)),
            "sample_ids": rng.integers(0, 1 << 20, ref.rows).astype(np.int32)}
    return {k: made[k] for k in ref.inputs}


def batches_of(ref: Reference, rng: np.random.Generator, shards: int, micros: int) -> Batches:
    """The text of a step."""
    return {(s, m): batch(ref, rng) for s in range(shards) for m in range(micros)}


def text_of(batches: Batches, call: Step) -> dict[str, np.ndarray]:
    """The batch of a call's shard and microbatch; empty for calls without text (tree, update)."""
    return batches[call.shard, call.micro] if call.shard is not None and call.micro is not None else {}


def layout_of(ref: Reference) -> StateLayout:
    """The parameter layout."""
    return StateLayout(trace_training(ref.model, None, "shapes", None, False)[0].tensors.values())


def training_graph(ref: Reference, *, accumulate: bool = False) -> Graph:
    """Forward and backward into grad0, verified."""
    return verify(prune(trace_training(ref.model, layout_of(ref), "micro", 0, accumulate)[1]), "trace")


def wording(graph: Graph) -> str:
    """Canonical text of a graph but for float types and which copy of the parameters is read: equal where back ends are given the same
    nodes, attributes and order."""
    return re.sub(r"\b(bf16|f32)(?=\[)", "float", re.sub(r"\bparam16\b", "param", graph.text()))


def random_state(ref: Reference, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """float64 state: parameters three times as large as at initialisation (so that nothing is near linear), a step, old gradients."""
    layout = layout_of(ref)
    flat = np.zeros(layout.size, np.float32)
    fill_initial(flat, layout, int(rng.integers(1 << 30)))
    param = flat.astype(np.float64) * 3
    for offset, n in layout.ranges():
        param[offset : offset + n] += 0.05 * rng.standard_normal(n)
    return {"param": param, "counter": np.full(layout_counter(), int(rng.integers(100)), np.int32),
            "grad0": rng.standard_normal(stats_layout(layout).size)}


def layout_counter() -> int:
    """Elements of the counter array."""
    return 4096


@cache
def program(name: str, *, shards: int = 1, micros: int = 1, policy: str = "none", fused: bool = True, optimizer: str = "adamw",
            threads: int = 2) -> Program:
    """A reference Program, built once per process and kind."""
    made = adamw(SCHEDULE) if optimizer == "adamw" else sgd(SCHEDULE)
    return build_program(name=name, model=references()[name].model, optimizer=made, catalogue=kernels(), threads=threads,
                         shape=StepShape(micro_batch=BATCH, seq=SEQ, shards=shards, micros=micros), policy=(policy, ()), fused=fused)


def same_updates(a: Graph, b: Graph, inputs: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]) -> float:
    """Largest absolute difference between the updates and outputs of two graphs, both through the oracles in float64."""
    out_a, up_a = evaluate(a, inputs, state)
    out_b, up_b = evaluate(b, inputs, state)
    if set(up_a) != set(up_b) or set(out_a) != set(out_b):
        return float("inf")
    pairs = [(up_a[k], up_b[k]) for k in up_a] + [(out_a[k], out_b[k]) for k in out_a]
    return max((float(np.max(np.abs(x - y), initial=0.0)) for x, y in pairs), default=float("inf"))


def yes(holds: bool, note: str = "", cases: int = 1) -> Measured:
    """A check that either holds or does not."""
    return Measured(error=0.0 if holds else 1.0, bound=0.0, cases=cases, note=note)


def load_initial(executor: CpuExecutor, ref: Reference, seed: int) -> None:
    """The initial parameters of a seed, each moved a little, so that none is zero or one."""
    layout = layout_of(ref)
    fill_initial(executor.state("param"), layout, seed)
    for o, n in layout.ranges():
        executor.state("param")[o : o + n] += np.float32(0.02) * np.cos(np.arange(n, dtype=np.float32))


def run_step(executor: CpuExecutor, p: Program, batches: Batches) -> dict[str, np.ndarray]:
    """One step of the schedule, call by call; copies of what the last one gives out."""
    out: dict[str, np.ndarray] = {}
    for s in p.schedule:
        out = executor.run(s.plan, text_of(batches, s))
    return {k: v.copy() for k, v in out.items()}


def both(check: Callable[[Reference, np.random.Generator], Measured], prefix: str = "",
         among: Callable[[], Mapping[str, Reference]] = references) -> list[tuple[str, Callable[[np.random.Generator], Measured]]]:
    """The check on each reference model, as named cases."""
    def case(name: str) -> Callable[[np.random.Generator], Measured]:
        return lambda rng: check(among()[name], rng)
    return [(f"{prefix}{name}", case(name)) for name in among()]


def refuses(kind: type[Exception], action: Callable[[], object]) -> Measured:
    """Whether `action` raises exactly this kind of error."""
    try:
        action()
    except kind as error:
        return yes(True, type(error).__name__)
    except Exception as error:
        return yes(False, f"{type(error).__name__} instead of {kind.__name__}")
    return yes(False, f"no error; expected {kind.__name__}")


def hash_of(*arrays: np.ndarray) -> str:
    """sha256 over the bytes of arrays."""
    h = hashlib.sha256()
    for x in arrays:
        h.update(np.ascontiguousarray(x).tobytes())
    return h.hexdigest()


def in_new_process(expression: str, module: str) -> str:
    """`expression` (a string) evaluated with the names of `module` in a fresh process under another hash seed."""
    code = (f"from alpha.train import forbidden; forbidden.watch(); import {module} as m; print(eval({expression!r}, vars(m)), end=''); "
            "forbidden.check('at the end of a fresh process')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
                          env={"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": "/usr/bin:/bin"})
    return done.stdout if done.returncode == 0 else f"failed: {done.stderr[-300:]}"


def graph_hashes(name: str) -> str:
    """Hash of the training graph and of every plan of the reference program, joined."""
    p = program(name, shards=2, micros=2)
    return " ".join([training_graph(references()[name]).hash(), p.hash(), *(q.hash() for _, q in sorted(p.plans.items()))])


