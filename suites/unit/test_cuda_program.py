"""A training program on the GPU: captured and launch by launch, twice, and beside the same program in fp32 on the CPU."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from alpha.backends.cpu.executor import CpuExecutor
from alpha.gates.contracts.reference import SCHEDULE
from alpha.graph.plan import Program
from alpha.models import gpt, llama
from alpha.optim.update import adamw
from alpha.passes.build import Model, StepShape, build_program
from alpha.train.catalogue import catalogue

T, B, V, STEPS = 128, 2, 520, 3
GPT = gpt.GPTConfig(vocab=V, positions=T, layers=2, width=128, heads=2)
LLAMA = llama.LlamaConfig(vocab=V, positions=T, layers=2, width=128, heads=2, kv_heads=1, hidden=256)
MODELS = {
    "gpt": Model(name="gpt", loss=lambda t, train: gpt.loss(t, GPT, B, T, train), decode=lambda t: gpt.decode(t, GPT, 1, T)),
    "llama": Model(name="llama", loss=lambda t, train: llama.loss(t, LLAMA, B, T, train), decode=lambda t: llama.decode(t, LLAMA, 1, T)),
}


@cache
def program(name: str, backend: str) -> Program:
    """Two shards of two microbatches; bf16 on the GPU."""
    build = partial(build_program, name=name, model=MODELS[name], optimizer=adamw(SCHEDULE), catalogue=catalogue(), backend=backend,
                    shape=StepShape(micro_batch=B, seq=T, shards=2, micros=2))
    return build(precision="bf16") if backend == "cuda" else build(threads=2)


def inputs(p: Program, plan: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tokens and targets, positions in order."""
    found = {}
    for name, ref in sorted(p.plans[plan].inputs.items()):
        shape = ref.type.shape
        found[name] = (np.tile(np.arange(shape[-1], dtype=np.int32), (shape[0], 1)) if name == "positions"
                       else rng.integers(0, V if name in ("tokens", "targets") else 99, shape).astype(np.int32))
    return found


def steps(executor: Any, p: Program) -> tuple[list[dict[str, float]], dict[str, bytes]]:
    """A few training steps from one start: the numbers of each update, and the state in the end."""
    rng = np.random.default_rng(3)
    layout, param = p.states["param"], executor.state("param")
    param[...] = 0
    for s in layout.tensors:
        n = int(np.prod(s.shape))
        flat = len(s.shape) == 1 and "bias" not in s.name and "beta" not in s.name
        param[layout.offsets[s.name] : layout.offsets[s.name] + n] = 1.0 if flat else 0.05 * rng.standard_normal(n)
    if "narrow" in p.plans:
        executor.run("narrow")
    found = []
    for _ in range(STEPS):
        for call in p.schedule:
            out = executor.run(call.plan, inputs(p, call.plan, rng) if call.shard is not None and call.micro is not None else {})
        found.append({k: float(np.asarray(v)) for k, v in out.items()})
    return found, {k: executor.state(k).tobytes() for k in ("param", "m", "v", "counter")}


@pytest.mark.parametrize("name", MODELS)
def test_the_catalogue_covers_a_bf16_program(name: str) -> None:
    """Every launch of every Segment has a kernel whose envelope holds it; planning needs no GPU."""
    p = program(name, "cuda")
    assert all(c.endswith(".sm90") for c in p.components())
    assert len(p.components()) >= 20


@pytest.mark.h100
@pytest.mark.parametrize("name", MODELS)
def test_training_on_the_gpu(name: str) -> None:
    from alpha.backends.cuda.executor import CudaExecutor

    p, q = program(name, "cuda"), program(name, "cpu")
    with CudaExecutor(p, catalogue()) as executor:
        first, state = steps(executor, p)
    with CudaExecutor(p, catalogue()) as executor:
        assert steps(executor, p) == (first, state), "two runs differ"
    with CudaExecutor(p, catalogue(), captured=False) as executor:
        assert steps(executor, p) == (first, state), "captured and launched one by one differ"
    with CpuExecutor(q, catalogue()) as executor:
        want, _ = steps(executor, q)
    assert all(f["finite"] == 1.0 for f in first)
    assert first[0]["loss_sum"] == pytest.approx(want[0]["loss_sum"], rel=1e-4)
    assert first[0]["norm"] == pytest.approx(want[0]["norm"], rel=0.01)
    for got, wanted in zip(first, want):
        assert got["loss_sum"] == pytest.approx(wanted["loss_sum"], rel=0.01)
