"""Large shapes: results against PyTorch in float64, REPS bitwise repeats, times beside PyTorch (PEERS=eager,compile).

    PYTHONPATH=. python3 kernels/checks/bandwidth/bench.py [norms losses updates embeds ropes maps]

WIDE=1 searches configurations. Times are medians of CUDA graph replays over rotated buffers, ours and the peers' alike. The table goes to
$OUT/bandwidth.json where OUT is set. 1 if a result was wrong or a part could not run, else 0.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import shapes
import torch
import torch.nn.functional as F
from timing import (
    DEVICE,
    PEERS,
    RANDOM,
    STREAM,
    Calls,
    bf16,
    close,
    copy_rate,
    f32,
    fail,
    finish,
    gpu,
    normal,
    ours,
    peers,
    poison,
    repeat,
    report,
    sets,
    spilled,
    theirs,
    within,
)

from alpha.backends.cuda.kernels import elementwise as ew
from alpha.backends.cuda.kernels import embedding, loss, norm, rope, update
from alpha.backends.cuda.launches import Operation, Output
from alpha.cuda_runtime.memory import Span

SPILLED = 16
"""Bytes that a candidate may spill; a choice is timed whatever it does."""


def at(tensor: torch.Tensor) -> int:
    """The address of a tensor, which is to be kept while it is used."""
    return tensor.data_ptr()


def run_once(operation: Operation) -> None:
    """Run it and wait."""
    operation(STREAM)
    gpu.synchronize()


def search(
    candidates: Mapping[str, Any],
    make: Callable[[Any], list[Operation]],
    timer: Callable[[Sequence[Operation]], float] = ours,
) -> tuple[dict[str, float], list[Operation]]:
    """Name -> ms of the candidates that do not spill, and the operations of the one that is called "choice"."""
    times: dict[str, float] = {}
    chosen: list[Operation] = []
    for name, config in candidates.items():
        operations = make(config)
        bytes_spilled = spilled(operations[0])
        if name == "choice":
            chosen = operations
            if bytes_spilled:
                print(f"  the choice spills {bytes_spilled} bytes")
        elif bytes_spilled > SPILLED:
            continue
        times[name] = timer(operations)
    return times, chosen


def compiled(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """A peer's function as it is ("eager") or by torch.compile ("compile")."""
    return torch.compile(function) if kind == "compile" else function


def forget() -> None:
    """Give back what PyTorch holds of a shape whose tensors are gone."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()


# -- norms -----------------------------------------------------------------------------------------------------------------------------


def norm_plain(p: norm.NormProblem, gamma: torch.Tensor, beta: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """PyTorch's norm of the last dimension."""
    if p.kind == "rms":
        return lambda x: F.rms_norm(x, (p.width,), gamma, 1e-5)
    return lambda x: F.layer_norm(x, (p.width,), gamma, beta, 1e-5)


def norm_of(p: norm.NormProblem) -> None:
    """Forward and backward of a norm, with the addition before it where the problem has one."""
    rows, width, layer = p.rows, p.width, p.kind == "layer"
    title = f"{p.kind} {rows}x{width}{' add' if p.add else ''}"
    n = sets(rows * width * 4)
    gamma, beta = normal(width) * 0.2 + 1, normal(width)
    x = [normal(rows, width) for _ in range(n)]
    b = [normal(rows, width) for _ in range(n)] if p.add else x
    y = [poison(rows, width) for _ in range(n)]
    s = [poison(rows, width) for _ in range(n)] if p.add else y
    mean, rstd = poison(rows, dtype=f32), poison(rows, dtype=f32)

    def forward(config: norm.NormForward | None) -> list[Operation]:
        common: Any = dict(gamma=at(gamma), beta=at(beta), mean=at(mean), rstd=at(rstd), config=config)
        return [norm.forward(p, x=at(x[i]), b=at(b[i]), s=at(s[i]), y=at(y[i]), **common) for i in range(n)]

    times, chosen = search(shapes.forward_candidates(p), forward)
    repeat(chosen[0], [y[0], rstd] + ([s[0]] if p.add else []))
    plain = norm_plain(p, gamma, beta)

    def with_add(x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = x + b
        return t, plain(t)

    def forward_peers(kind: str) -> Calls:
        f = compiled(with_add if p.add else plain, kind)
        return [partial(f, x[i], b[i]) if p.add else partial(f, x[i]) for i in range(n)]

    head = x[0][:64]
    if p.add:
        head = (head.double() + b[0][:64].double()).to(bf16)
        if not torch.equal(s[0][:64], head):
            fail(f"{title}: sum")
    exact = norm_plain(p, gamma.double(), beta.double())(head.double())
    close(f"{title} forward", y[0][:64], exact)
    with torch.no_grad():
        found = peers(forward_peers)
    report(f"{title} fwd", chosen[0].nbytes, times["choice"], found, times)

    dy = [normal(rows, width) for _ in range(n)]
    dx = [poison(rows, width) for _ in range(n)]
    dgamma, dbeta = poison(width, dtype=f32), poison(width, dtype=f32)
    work = torch.empty(132 * 32 * width * 2 + 64, device=DEVICE)
    inputs = s if p.add else x

    def backward(config: norm.NormBackward) -> list[Operation]:
        common: Any = dict(gamma=at(gamma), mean=at(mean), rstd=at(rstd), dgamma=at(dgamma), dbeta=at(dbeta), partial=at(work))
        with shapes.backward_choice(config):
            return [norm.backward(p, dy=at(dy[i]), x=at(inputs[i]), residual=at(b[i]), dx=at(dx[i]), config=config, **common)
                    for i in range(n)]  # fmt: skip

    run_once(forward(None)[0])  # the statistics of set 0
    times, chosen = search(shapes.backward_candidates(p), backward)
    repeat(chosen[0], [dx[0], dgamma] + ([dbeta] if layer else []))
    leaf = inputs[0][:64].double().requires_grad_(True)
    (exact,) = torch.autograd.grad(norm_plain(p, gamma.double(), beta.double())(leaf), leaf, dy[0][:64].double())
    close(f"{title} dx", dx[0][:64], exact + (b[0][:64].double() if p.add else 0))
    want = torch.zeros(2, width, device=DEVICE, dtype=torch.float64)
    for q in range(0, rows, 8192):
        part, d = inputs[0][q : q + 8192].double(), dy[0][q : q + 8192].double()
        part = part - mean[q : q + 8192, None].double() if layer else part
        want[0] += (d * part * rstd[q : q + 8192, None].double()).sum(0)
        want[1] += d.sum(0)
    within(f"{title} dgamma", ((dgamma.double() - want[0]).abs().max() / want[0].abs().max()).item(), 1e-5)
    if layer:
        within(f"{title} dbeta", ((dbeta.double() - want[1]).abs().max() / want[1].abs().max()).item(), 1e-5)

    def backward_peers(kind: str) -> Calls:
        g, be = gamma.detach().requires_grad_(True), beta.detach().requires_grad_(True)
        leaves = [t.detach().requires_grad_(True) for t in inputs]
        inner = norm_plain(p, g, be)

        def with_residual(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return inner(t), t * 1

        f = compiled(with_residual if p.add else inner, kind)
        outs = [f(t) for t in leaves]
        parameters = (g, be) if layer else (g,)
        return [
            partial(torch.autograd.grad, o, (t, *parameters), (dy[i], b[i]) if p.add else dy[i], retain_graph=True)
            for i, (o, t) in enumerate(zip(outs, leaves))
        ]

    report(f"{title} bwd", chosen[0].nbytes, times["choice"], peers(backward_peers), times)


def norms() -> None:
    """Norms of shapes.NORMS."""
    for p in shapes.NORMS:
        norm_of(p)
        forget()


# -- cross entropy ---------------------------------------------------------------------------------------------------------------------


def loss_of(rows: int, vocabulary: int, stride: int) -> None:
    """The loss alone; with gradients it is part of the head's products (kernels/loss/head.cu)."""
    logits = normal(rows, stride, factor=2)
    targets = torch.randint(0, vocabulary, (rows,), device=DEVICE, dtype=torch.int32, generator=RANDOM)
    targets[::7] = -1
    p = loss.LossProblem(rows=rows, vocabulary=vocabulary, stride=stride, z_loss=1e-4)
    losses_, lse = poison(p.rows, dtype=f32), poison(p.rows, dtype=f32)

    def make(config: loss.LossConfig | None) -> list[Operation]:
        return [loss.cross_entropy(p, logits=at(logits), targets=at(targets), lse=at(lse), loss=at(losses_), config=config)] * 2

    times, (operation, _) = search(shapes.loss_candidates(p), make)
    run_once(operation)
    for row in range(64):
        x = logits[row, : p.vocabulary].double()
        log_sum, target = torch.logsumexp(x, 0), int(targets[row].item())
        want = 0.0 if target < 0 else (log_sum - x[target] + 1e-4 * log_sum * log_sum).item()
        within("lse", abs(lse[row].item() - log_sum.item()) / max(1, abs(log_sum.item())), 1e-5)
        within("loss", abs(losses_[row].item() - want) / max(1, abs(want)), 2e-5)
    repeat(operation, [losses_, lse], lambda: None)
    long, read = targets.long(), logits[:, :vocabulary]

    def plain(t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(t.float(), long, ignore_index=-1, reduction="sum")

    def call(kind: str) -> Calls:
        f = compiled(plain, kind)
        return [lambda: f(read)]

    report(f"cross entropy {rows}x{vocabulary}", operation.nbytes, times["choice"], peers(call), times)


def losses() -> None:
    """Cross entropy of shapes.LOSSES."""
    for rows, vocabulary, stride in shapes.LOSSES:
        loss_of(rows, vocabulary, stride)
        forget()


# -- the update ------------------------------------------------------------------------------------------------------------------------


def update_peers(p: torch.Tensor, g: torch.Tensor, segments: Sequence[tuple[int, int, float, float]], elements: int) -> None:
    """PyTorch's fused AdamW on the half of the elements, and its norm of the gradient."""
    parameter = p[:200_000_000].clone().requires_grad_(True)
    parameter.grad = g[:200_000_000].clone()
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True, capturable=True)
    report("  torch fused adamw (28 B)", 28 * 2e8, theirs(lambda: [lambda: optimizer.step()]))
    grads = [g[s[0] : s[0] + s[1]] for s in segments]
    report("  torch gradient norm", elements * 4, theirs(lambda: [lambda: torch.nn.utils.get_total_norm(grads)]))


def updates() -> None:
    """AdamW on 400 million elements, the norm of their gradient, the step's scalars."""
    n = 400_000_000
    segments = [(i * 8_000_000, 7_999_936, float(i % 2), 1.0) for i in range(50)]
    elements = sum(s[1] for s in segments)
    table, norm_table = update.adamw_table(segments), update.norm_table([s[:2] for s in segments])
    table_on, norm_on = (torch.from_numpy(t.view(np.uint8)).to(DEVICE) for t in (table, norm_table))
    p, g, m, v = (normal(n, dtype=f32) for _ in range(4))
    v.abs_()
    copy = poison(n)
    scalar = {k: torch.ones(1, device=DEVICE) for k in ("coefficient", "lr", "loss", "count", "norm", "mean_norm")}
    scalar["lr"].fill_(1e-3)
    count = {k: torch.ones(1, device=DEVICE, dtype=torch.int32) for k in ("step", "finite", "used")}
    words = {k: at(t) for k, t in (scalar | count).items()}
    for copied in (False, True):
        problem = update.AdamwProblem(
            chunks=len(table), elements=elements, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, copy=copied
        )
        common = {k: words[k] for k in ("coefficient", "lr", "step", "finite")}
        common |= dict(table=at(table_on), param=at(p), grad=at(g), m=at(m), v=at(v), copy=at(copy))
        op = update.adamw_step(problem, **common)
        if copied:
            kept = [t[:65536].clone().double() for t in (p, g, m, v)]
            run_once(op)
            wm, wv = 0.9 * kept[2] + 0.1 * kept[1], 0.95 * kept[3] + 0.05 * kept[1] ** 2
            ratio = (wm / (1 - 0.9**2)) / ((wv / (1 - 0.95**2)).sqrt() + 1e-8)
            want = kept[0] - 1e-3 * ratio
            within("adamw p", (p[:65536].double() - want).abs().max().item() / want.abs().max().item(), 1e-6)
            if not torch.equal(copy[:65536], p[:65536].to(bf16)):
                fail("adamw copy")
        report(f"adamw{' with copy' * copied}", op.nbytes, ours([op] * 2))
    if PEERS:
        update_peers(p, g, segments, elements)
    parts = torch.empty(len(norm_table) * 8, device=DEVICE)
    op = update.global_norm(len(norm_table), grads=at(g), table=at(norm_on), parts=at(parts))
    rates = torch.full((101,), 1e-3, device=DEVICE)
    scalars = {k: words[k] for k in ("loss", "count", "step", "norm", "mean_norm", "coefficient", "finite", "lr", "used")}
    end = update.step(len(norm_table), max_norm=1.0, rates=at(rates), entries=101, parts=at(parts), next=words["step"], **scalars)
    report("global norm", elements * 4, ours([op] * 2))
    report("step scalars", end.nbytes, ours([end] * 20))
    op(STREAM)
    run_once(end)
    total = sum((g[s[0] : s[0] + s[1]].double() ** 2).sum().item() for s in segments) ** 0.5
    within("norm", abs(scalar["norm"].item() / total - 1), 1e-6)
    repeat(op, [parts])


# -- embeddings ------------------------------------------------------------------------------------------------------------------------


def alone(operations: Sequence[Operation], which: slice) -> float:
    """us of these launches of the operations alone."""
    return 1e3 * ours([replace(operation, launches=operation.launches[which]) for operation in operations])


def embedding_of(n: int, vocabulary: int, width: int) -> None:
    """A look-up with and without positions, and its gradient, written and added."""
    weights = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    ids = torch.multinomial(weights.to(DEVICE), n, replacement=True, generator=RANDOM).to(torch.int32)
    ids = torch.randperm(vocabulary, device=DEVICE, generator=RANDOM).int()[ids.long()].contiguous()
    p = embedding.EmbeddingProblem(count=n, vocabulary=vocabulary, width=width)
    k = sets(n * width * 2)
    dy = [normal(n, width) for _ in range(k)]
    dtable = poison(vocabulary, width, dtype=f32)
    work = torch.full((p.workspace_bytes(),), 255, device=DEVICE, dtype=torch.uint8)
    table, position = normal(vocabulary, width), normal(1024, width)
    y = [poison(n, width) for _ in range(k)]
    places = torch.arange(n, device=DEVICE, dtype=torch.int32) % 1024
    add: Any = dict(positions=at(position), places=at(places), places_count=1024, sequence=1024)
    common: Any = dict(table=at(table), ids=at(ids))
    operations = [embedding.forward(p, y=at(t), **common, **add) for t in y]
    used = torch.unique(ids).numel()
    title = f"{n} of {vocabulary}x{width}"
    nbytes = n * (width * 2 + 4) + used * width * 2
    report(f"embedding {title}", nbytes, ours([embedding.forward(p, y=at(t), **common) for t in y]))
    report(f"embedding+positions {title}", nbytes + n * 4 + position.numel() * 2, ours(operations))
    run_once(operations[0])
    want = (table[ids.long()[:4096]].double() + position[torch.arange(4096, device=DEVICE) % 1024].double()).to(bf16)
    if not torch.equal(y[0][:4096], want):
        fail("embedding forward")

    def exact() -> torch.Tensor:
        return torch.zeros(vocabulary, width, device=DEVICE, dtype=torch.float64).index_add_(0, ids.long(), dy[0].double())

    def dense(t: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.embedding_dense_backward(t, ids.long(), vocabulary, -1, False)

    def call(kind: str) -> Calls | None:
        return [partial(dense, t) for t in dy] if kind == "eager" else None

    outs: tuple[Output, ...] = ("f32", "f32+=")
    for out in outs:
        span = Span(at(work), work.numel())
        operations = [embedding.backward(p, dy=at(t), ids=at(ids), dtable=at(dtable), workspace=span, out=out) for t in dy]
        if out == "f32":
            repeat(operations[0], [dtable])
            gradient = exact()
            within("embedding backward", ((dtable.double() - gradient).abs().max() / gradient.abs().max()).item(), 1e-5)
            del gradient
        nbytes = n * (width * 2 + 4) + (vocabulary if out == "f32" else 2 * used) * width * 4
        report(f"embedding bwd {out} {title}", nbytes, ours(operations), peers(call) if out == "f32" else {})
        print("    clear, place, order: " + ", ".join(f"{alone(operations, slice(0, end)):.1f}" for end in (1, 2, 3)) + " us, added up")
        operations[0](STREAM)  # what the index of these ids leaves
        report(f"embedding_sum {out} {title}", nbytes, alone(operations, slice(3, 4)) / 1e3)


def embeds() -> None:
    """Look-ups of shapes.EMBEDDINGS; ids by Zipf's law."""
    for count, vocabulary, width in shapes.EMBEDDINGS:
        embedding_of(count, vocabulary, width)
        torch.cuda.empty_cache()


# -- rotary embeddings -----------------------------------------------------------------------------------------------------------------


def rope_of(rows: int, heads: int, kv: int, width: int, positions: int) -> None:
    """Queries and keys of a packed row turned in place; the values stay."""
    stride, turned = (heads + 2 * kv) * width, heads + kv
    x = [normal(rows, stride) for _ in range(sets(rows * stride * 2))]
    position = (torch.arange(rows, device=DEVICE) % positions).int()
    turns = poison(positions, width, dtype=f32)
    torch.cuda.synchronize()
    run_once(rope.table(positions, width, base=5e5, out=at(turns)))
    p = rope.RopeProblem(rows=rows, heads=turned, head_dim=width, table_rows=positions, stride=stride)
    kept = x[0].clone()
    operations = [rope.rope(p, x=at(t), y=at(t), positions=at(position), turns=at(turns)) for t in x]
    torch.cuda.synchronize()
    run_once(operations[0])
    i = torch.arange(width // 2, device=DEVICE, dtype=torch.float64)
    angle = position[:256].double()[:, None, None] * 5e5 ** (-2 * i / width)
    q = kept[:256, : turned * width].double().view(256, turned, width)
    a, b = q[..., : width // 2], q[..., width // 2 :]
    want = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
    close("rope", x[0][:256, : turned * width].view(256, turned, width), want)
    if not torch.equal(x[0][:, turned * width :], kept[:, turned * width :]):
        fail("rope: v changed")
    half = turns.view(positions, width // 2, 2)
    cosine, sine = half[..., 0].contiguous(), half[..., 1].contiguous()

    def plain(t: torch.Tensor) -> torch.Tensor:
        q = t[:, : turned * width].view(rows // positions, positions, turned, width)
        a, b = q.chunk(2, -1)
        c, s = cosine[:, None], sine[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(t.dtype)

    def call(kind: str) -> Calls | None:
        if kind != "compile":
            return None
        f = compiled(plain, kind)
        return [partial(f, t) for t in x]

    report(f"rope {rows} {heads}+{kv} heads of {width}", operations[0].nbytes, ours(operations), peers(call))


def ropes() -> None:
    """Rotary embeddings of shapes.ROPES."""
    for rows, heads, kv, width, positions in shapes.ROPES:
        rope_of(rows, heads, kv, width, positions)
        torch._dynamo.reset()


# -- maps and sums of columns ----------------------------------------------------------------------------------------------------------


def activation_of(op: Any, rows: int, columns: int) -> None:
    """An activation on packed rows, whose halves are gate and value."""
    k = sets(rows * columns * 4)
    packed = [normal(rows, 2 * columns) for _ in range(k)]
    y = [poison(rows, 2 * columns) for _ in range(k)]
    dy = normal(rows, columns)
    strides = {f"{word}_stride": 2 * columns for word in ("a", "b", "y", "y2")}
    wide, backward = op.startswith("swiglu"), op.endswith("_bwd")

    def make(_: None) -> list[Operation]:
        common: Any = dict(dy=at(dy), **strides)
        return [
            ew.activation(op, rows, columns, a=at(a), b=at(a) + 2 * columns, y=at(q), y2=at(q) + 2 * columns, **common)
            for a, q in zip(packed, y)
        ]

    def plain(t: torch.Tensor) -> torch.Tensor:
        return F.silu(t[:, :columns]) * t[:, columns:] if wide else F.gelu(t[:, :columns], approximate="tanh")

    def call(kind: str) -> Calls:
        f = compiled(plain, kind)
        if not backward:
            return [partial(f, t) for t in packed]
        leaves = [t.detach().requires_grad_(True) for t in packed]
        outs = [f(t) for t in leaves]
        return [partial(torch.autograd.grad, o, t, dy, retain_graph=True) for o, t in zip(outs, leaves)]

    times, operations = search({"choice": None}, make)
    leaf = packed[0][:64].double().requires_grad_(True)
    exact = plain(leaf)
    if backward:
        (exact,) = torch.autograd.grad(exact, leaf, dy[:64].double())
        exact = exact if wide else exact[:, :columns]
    close(op, y[0][:64, : exact.shape[1]], exact)
    report(f"{op} {rows}x{columns}", operations[0].nbytes, times["choice"], peers(call), times)


def elementwise_of(n: int) -> None:
    """shapes.MAPS and dropout, of `n` elements."""
    buffers: dict[tuple[str, int], torch.Tensor] = {("bf16", i): normal(n) for i in range(2)}
    buffers |= {("f32", i): normal(n, dtype=f32) for i in range(2)}
    name: Any
    for name, y_dtype, a_dtype, b_dtype in shapes.MAPS:
        out, b = buffers[y_dtype, 0], buffers[b_dtype, 1]
        a = out if name == "add" and a_dtype == y_dtype else buffers[a_dtype, 1]
        types: Any = dict(y_dtype=y_dtype, a_dtype=a_dtype, b_dtype=b_dtype)
        operation = ew.elementwise(name, n, y=at(out), a=at(a), b=at(b), factor=0.5, **types)
        report(f"{name} {y_dtype} of {a_dtype}{', ' + b_dtype if name == 'add' else ''}", operation.nbytes, ours([operation] * 2))
    step, ids = torch.ones(1, device=DEVICE, dtype=torch.int32), torch.arange(64, device=DEVICE, dtype=torch.int32)
    x, y = buffers["bf16", 0], buffers["bf16", 1]
    operation = ew.dropout(64, n // 64, x=at(x), y=at(y), step=at(step), sample_ids=at(ids), rate=0.1, key=(1, 2))

    def call(kind: str) -> Calls | None:
        return [lambda: F.dropout(x, 0.1)] * 2 if kind == "eager" else None

    report("dropout bf16", operation.nbytes, ours([operation] * 2), peers(call))


def columns_of(rows: int, columns: int) -> None:
    """Sums of columns."""
    x = [normal(rows, columns) for _ in range(sets(rows * columns * 2))]
    y = poison(columns, dtype=f32)
    work = torch.empty(ew.column_bytes(rows, columns) // 4 + 8, device=DEVICE)
    operations = [ew.column_sums(rows, columns, x=at(t), y=at(y), partial=at(work)) for t in x]
    repeat(operations[0], [y])
    within("columns", (y.double() - x[0].double().sum(0)).abs().max().item(), 1e-2)
    found = peers(lambda kind: [partial(t.sum, 0) for t in x] if kind == "eager" else None)
    report(f"column sums {rows}x{columns}", operations[0].nbytes, ours(operations), found)


def maps() -> None:
    """Activations, elementwise operations and sums of columns."""
    for op, rows, columns in shapes.ACTIVATIONS:
        activation_of(op, rows, columns)
        forget()
    elementwise_of(1 << 28)
    for rows, columns in shapes.COLUMNS:
        columns_of(rows, columns)
    x, y = normal(64, 1024 * 768), poison(1024 * 768, dtype=f32)
    operation = ew.column_sums(64, 1024 * 768, x=at(x), y=at(y))
    report("position gradient 64x1024x768 (in L2)", operation.nbytes, ours([operation] * 3))


PARTS = (norms, losses, updates, embeds, ropes, maps)


def main(names: Sequence[str]) -> int:
    """Run the parts of these names, all where there are none. The exit code."""
    copy_rate()
    for part in PARTS:
        if not names or part.__name__ in names:
            try:
                part()
            except Exception:  # the other parts still run
                fail(f"{part.__name__}: {traceback.format_exc()[-1200:]}")
                torch.cuda.empty_cache()
    return finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
