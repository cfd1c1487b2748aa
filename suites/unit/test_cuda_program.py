"""A training program on the GPU: captured and launch by launch, twice, and beside the same program in fp32 on the CPU."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.reference.executor import ReferenceExecutor
from alpha.gates.contracts.reference import SCHEDULE, batches_of, layout_of, pair
from alpha.graph.order import COMM
from alpha.graph.plan import Program
from alpha.graph.verify_program import verify_program
from alpha.models import gpt, llama
from alpha.optim.update import adamw
from alpha.parallel.data import DataParallel
from alpha.passes.build import Model, StepShape, build_program
from alpha.train.catalogue import SEVERAL, catalogue

T, B, V, STEPS = 128, 2, 520, 3
GPT = gpt.GPTConfig(vocab=V, positions=T, layers=2, width=128, heads=2)
LLAMA = llama.LlamaConfig(vocab=V, positions=T, layers=2, width=128, heads=2, kv_heads=1, hidden=256)
MODELS = {
    "gpt": Model(name="gpt", loss=lambda t, train: gpt.loss(t, GPT, B, T, train), decode=lambda t: gpt.decode(t, GPT, 1, T)),
    "llama": Model(name="llama", loss=lambda t, train: llama.loss(t, LLAMA, B, T, train), decode=lambda t: llama.decode(t, LLAMA, 1, T)),
}


@cache
def program(name: str, backend: str, ranks: int = 1, shards: int = 2, threads: int = 2) -> Program:
    """Shards of two microbatches; bf16 on the GPU."""
    build = partial(build_program, name=name, model=MODELS[name], optimizer=adamw(SCHEDULE), catalogue=catalogue(), backend=backend,
                    shape=StepShape(micro_batch=B, seq=T, shards=shards, micros=2), threads=threads)
    over = DataParallel(ranks, micros=2, precision="bf16", one_row=True) if ranks > 1 else None
    return build(precision="bf16", over=over) if backend == "cuda" else build()


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


@pytest.mark.parametrize("name", MODELS)
def test_many_ranks_run_what_one_process_does_and_sum(name: str) -> None:
    """The kernels of one process and all_reduce, whatever the ranks; nothing of the host is in the hash."""
    alone = program(name, "cuda", shards=4)
    for ranks in (2, 4):
        p = verify_program(program(name, "cuda", ranks, 4))
        own = {2: "all_reduce.sm90", 4: "all_reduce.x4.sm90"}[ranks]
        assert set(p.kernels()) - set(alone.kernels()) == {own} and set(alone.kernels()) <= set(p.kernels())
        assert len(p.others) == ranks - 1 and not any("~" in key for key in p.plans)
        assert p.hash() == program(name, "cuda", ranks, 4, threads=7).hash() != alone.hash()
        units, last = p.states["grad0"].units, p.plans[f"micro_last@{(4 // ranks).bit_length() - 1}"]
        assert sorted(x.layer for x in last.launches if x.stream == COMM) == sorted(u.name for u in units)


SMALL = pair(gpt.GPTConfig(vocab=24, positions=16, layers=1, width=64, heads=1),
             llama.LlamaConfig(vocab=24, positions=16, layers=1, width=128, heads=2, kv_heads=1, hidden=64), B)


@pytest.mark.parametrize("name", SMALL)
def test_many_ranks_have_the_bits_of_one_process(name: str) -> None:
    """Plans of the kernels that a GPU has, run by the rows' oracles, two steps: parameters, moments and numbers of every rank."""
    ref, rng = SMALL[name], np.random.default_rng(7)
    texts, found = [batches_of(ref, rng, 4, 2) for _ in range(2)], []
    start = rng.standard_normal(layout_of(ref).size) / 8
    for ranks in (1, 2, 4):
        over = DataParallel(ranks, micros=2, precision="bf16", one_row=True) if ranks > 1 else None
        p = build_program(name=name, model=ref.model, optimizer=adamw(SCHEDULE, max_norm=0.1), catalogue=catalogue(), backend="cuda",
                          precision="bf16", shape=StepShape(micro_batch=B, seq=ref.seq, shards=4, micros=2), over=over)
        executor = ReferenceExecutor(p)
        for rank in range(ranks):
            for offset, n in p.states["param"].ranges():
                executor.state(rank, "param")[offset : offset + n] = start[offset : offset + n]
        executor.run([[("narrow", {})]] * ranks)
        told = [executor.step(lambda s, m, text=text: text[s, m]) for text in texts]  # type: ignore[misc]
        assert all(np.isfinite(float(v)) for out in told for v in out[0].values())
        found += [[{k: v.tobytes() for k, v in out[rank].items()} for out in told]
                  + [executor.state(rank, kind).tobytes() for kind in ("param", "param16", "m", "v", "counter")] for rank in range(ranks)]
    assert len(found) == 7 and all(other == found[0] for other in found)


def test_what_runs_on_one_gpu_launches_no_kernel_of_several() -> None:
    """So no evidence of one GPU binds to collectives, though their rows are known to whatever builds Programs."""
    several = {c.id for c in catalogue() if SEVERAL in c.requires and c.op is not None}
    assert "all_reduce.sm90" in several
    for c in catalogue():
        if c.launches is not None and SEVERAL not in c.requires:
            assert not several & {k.id for k in c.launches()}, c.id


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
