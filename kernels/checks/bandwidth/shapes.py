"""The shapes that bench.py times and the configurations that it compares on them.

    PYTHONPATH=. python3 kernels/checks/bandwidth/shapes.py

builds every operation of bench.py as far as that goes without GPU and compiler: whether the wrappers take the shapes and candidates.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alpha.backends.cuda import launches
from alpha.backends.cuda.kernels import elementwise, embedding, loss, norm, rope, update

WIDE = bool(os.environ.get("WIDE"))
"""All candidates of a search, not the chosen ones alone."""

NORMS = [
    norm.NormProblem(rows=65536, width=768, kind="rms"),
    norm.NormProblem(rows=16384, width=4096, kind="rms"),
    norm.NormProblem(rows=32768, width=2048, kind="rms", add=True),
    norm.NormProblem(rows=16384, width=4096, kind="rms", add=True),
    norm.NormProblem(rows=8192, width=8192, kind="rms"),
    norm.NormProblem(rows=65536, width=768, kind="layer"),
    norm.NormProblem(rows=65536, width=768, kind="layer", add=True),
    norm.NormProblem(rows=16384, width=4096, kind="layer"),
]
LOSSES = [(16384, 50257, 50304), (16384, 32768, 32768), (8192, 128256, 128256)]
EMBEDDINGS = [(65536, 50304, 768), (32768, 32768, 2048), (16384, 128256, 4096)]
ROPES = [(32768, 32, 8, 128, 4096), (65536, 12, 12, 64, 1024)]
ACTIVATIONS = [
    ("gelu", 65536, 3072),
    ("gelu_bwd", 65536, 3072),
    ("swiglu", 32768, 8192),
    ("swiglu_bwd", 32768, 8192),
    ("swiglu", 16384, 14336),
]
COLUMNS = [(65536, 768), (65536, 3072), (16384, 4096)]
MAPS = [
    ("add", "bf16", "bf16", "bf16"),
    ("add", "f32", "f32", "bf16"),
    ("add", "f32", "f32", "f32"),
    ("cast", "bf16", "f32", "bf16"),
    ("cast", "f32", "bf16", "bf16"),
    ("scale", "bf16", "bf16", "bf16"),
]
"""Operation and types of y, a and b."""


def _blocks(threads: int, registers: int) -> int:
    """CTAs that a multiprocessor holds at a time: 2048 threads and 65536 registers, which a thread gets in eights."""
    return max(1, min(32, 2048 // threads, 65536 // (threads * (-(-registers // 8) * 8))))


def forward_candidates(p: norm.NormProblem) -> dict[str, norm.NormForward]:
    """By name; "choice" is the wrapper's."""
    found = {"choice": norm.choose_forward(p)}
    if not WIDE:
        return found
    for vectors in (1, 2, 3, 4, 6, 8):
        threads = 32 * -(-p.vectors // (32 * vectors))
        if threads > 512 or threads * vectors * 4 > p.vectors * 5 or (p.vectors > 128 and vectors > 4):
            continue
        for teams in (4, 8) if threads == 32 else (1,):
            row = 4 * vectors * (2 if p.add else 1)
            for spare in (28, 38):
                blocks = _blocks(threads * teams, row + spare + (4 if p.kind == "layer" else 0))
                c = norm.NormForward(threads=threads, vectors=vectors, teams=teams, blocks=blocks)
                found.setdefault(f"t{threads}v{vectors}x{teams}b{blocks}", c)
    return found


def backward_candidates(p: norm.NormProblem) -> dict[str, norm.NormBackward]:
    """By name; "choice" is the wrapper's."""
    found = {"choice": norm.choose_backward(p)}
    if not WIDE:
        return found
    for vectors in (1, 2, 3, 4):
        warps = -(-p.vectors // (32 * vectors))
        if warps > 16 or warps * vectors * 32 > p.vectors * 5 / 4:
            continue
        for total, blocks in ((8, 1), (8, 2), (12, 1), (16, 1), (20, 1), (24, 1), (10, 2), (12, 2)):
            teams = total // warps
            if teams < 1 or (warps > 1 and teams > 15) or teams * warps != total:
                continue
            row = 16 * 32 * warps * vectors * (3 if p.add else 2)
            depth = min(6, norm.RING // blocks // (row * teams + (512 if blocks > 1 else 0)))
            registers = 36 + 4 * vectors + 8 * vectors * (2 if p.kind == "layer" else 1)
            if depth < 2 or registers * total * blocks * 32 > 65536:
                continue
            for deep in {depth, max(2, depth - 2)} if blocks == 1 and total == 16 else {depth}:
                c = norm.NormBackward(threads=32 * warps, vectors=vectors, teams=teams, depth=deep, blocks=blocks)
                found.setdefault(f"t{32 * warps}v{vectors}x{teams}d{deep}b{blocks}", c)
    return found


def loss_candidates(p: loss.LossProblem) -> dict[str, loss.LossConfig]:
    """By name; "choice" is the wrapper's. The others deal its lanes to other numbers of threads."""
    choice = loss.choose(p)
    found = {"choice": choice}
    for share in (1, 2, 4) if WIDE else ():
        threads = choice.lanes // share
        if threads >= 128:
            found.setdefault(f"t{threads}", loss.LossConfig(threads=threads, lanes=choice.lanes, blocks=1280 // threads))
    return found


@contextmanager
def backward_choice(config: norm.NormBackward) -> Iterator[None]:
    """norm's choice is `config` meanwhile: it decides the parts too."""
    kept = norm.choose_backward
    norm.choose_backward = lambda problem: config
    try:
        yield
    finally:
        norm.choose_backward = kept


def build_all() -> None:
    """Every operation of bench.py, on one address."""
    a = 256
    for p in NORMS:
        for forward in forward_candidates(p).values():
            norm.forward(p, x=a, b=a, s=a, y=a, gamma=a, beta=a, mean=a, rstd=a, config=forward)
        for backward in backward_candidates(p).values():
            with backward_choice(backward):
                norm.backward(p, dy=a, x=a, gamma=a, mean=a, rstd=a, residual=a, dx=a, dgamma=a, dbeta=a, partial=a)
    for rows, vocabulary, stride in LOSSES:
        entropy = loss.LossProblem(rows=rows, vocabulary=vocabulary, stride=stride, z_loss=1e-4)
        for config in loss_candidates(entropy).values():
            loss.cross_entropy(entropy, logits=a, targets=a, lse=a, loss=a, config=config)
    for copy in (False, True):
        adamw = update.AdamwProblem(chunks=9, elements=9, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, copy=copy)
        update.adamw_step(adamw, table=a, param=a, grad=a, m=a, v=a, coefficient=a, lr=a, step=a, finite=a, copy=a)
    update.global_norm(9, grads=a, table=a, parts=a)
    scalars: Any = dict.fromkeys("rates parts loss count step norm mean_norm coefficient finite lr used next".split(), a)
    update.step(9, max_norm=1.0, entries=101, **scalars)
    for count, vocabulary, width in EMBEDDINGS:
        e = embedding.EmbeddingProblem(count=count, vocabulary=vocabulary, width=width)
        embedding.forward(e, table=a, ids=a, y=a)
        embedding.forward(e, table=a, ids=a, y=a, positions=a, places=a, places_count=9, sequence=9)
        outs: tuple[launches.Output, ...] = ("f32", "f32+=")
        for out in outs:
            embedding.backward(e, dy=a, ids=a, dtable=a, workspace=embedding.Span(a, e.workspace_bytes()), out=out)
    rope.table(9, 64, base=1e4, out=a)
    rope.rope(rope.RopeProblem(rows=9, heads=1, head_dim=64, table_rows=9, stride=64), x=a, y=a, positions=a, turns=a)
    op: Any
    for op, _, _ in ACTIVATIONS:
        elementwise.activation(op, 8, 8, a=a, b=a, dy=a, y=a, y2=a)
    for op, y, x, b in MAPS:
        types: Any = dict(y_dtype=y, a_dtype=x, b_dtype=b)
        elementwise.elementwise(op, 9, y=a, a=a, b=a, **types)
    elementwise.dropout(1, 8, x=a, y=a, step=a, sample_ids=a, rate=0.1, key=(1, 2))
    for rows, width in [*COLUMNS, (64, 1024 * 768)]:
        elementwise.column_sums(rows, width, x=a, y=a, partial=a)


if __name__ == "__main__":
    with launches.recording() as compiled:
        build_all()
    print(f"{len(set(compiled))} compiled files are asked for")
