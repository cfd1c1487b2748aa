"""The head and its loss on the CPU: logits, loss and gradient of a panel of rows by one worker, while the panel is in cache.

The logits of a panel become exp(logits) in place, and for the gradient that becomes dlogits, from which the panel's dx is made at once.
dweight is one product over the rows of a chunk, so only this chunk's dlogits are kept. exp is taken of the bare logits where that neither
overflows nor loses a term that counts, as in cross_entropy.py; otherwise the panel's logits are made again and the rows' maxima taken off.
What is one number per row is computed in float64, and so is the sum of the losses.

Legend: N rows, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.kernels.cross_entropy import LEAST, SAFE, counted
from alpha.backends.cpu.kernels.fused import matmul_accumulate
from alpha.backends.cpu.kernels.matmul import matmul
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.ops.spec import Sample
from alpha.types import Attrs

_PANEL_BYTES = 1 << 20
"""Logits of a panel, about."""

_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def _panels(start: int, stop: int, row_bytes: int) -> list[slice]:
    """Rows [start, stop) in panels of 16 or a multiple of it; two at least where there are 32 rows, so that two workers share them."""
    n = stop - start
    most = max(16, _PANEL_BYTES // max(1, row_bytes) // 16 * 16)
    step = min(most, max(16, -(-n // 2 // 16) * 16)) if n >= 32 else n
    return [slice(i, min(i + step, stop)) for i in range(start, stop, step)]


def _bound(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """Closure of the loss alone (one output), or with dx and dweight (three)."""
    (x, weight, targets), (total, *grads) = ins, outs
    n, v = x.shape[0], weight.shape[0]
    z, ignore, chunk = float(attrs["z_loss"]), int(attrs["ignore_index"]), int(attrs["chunk"])  # type: ignore[arg-type, call-overload]
    chunks = [(start, min(start + chunk, n)) for start in range(0, n, chunk)]
    panels = [_panels(start, stop, v * x.itemsize) for start, stop in chunks]
    tallest = max(at.stop - at.start for parts in panels for at in parts)
    held = cpu.scratch((min(chunk, n) if grads else cpu.threads * tallest, v), x.dtype)
    tops = cpu.scratch((cpu.threads, 2, tallest), x.dtype)
    losses = cpu.scratch((n,), np.float64)
    ones, every = np.ones(v, x.dtype), np.arange(tallest)

    def panel(at: slice, logits: np.ndarray, worker: int) -> None:
        top, sums = tops[worker, 0, : len(logits)], tops[worker, 1, : len(logits)]
        counts = targets[at] != ignore
        place = every[: len(logits)], np.where(counts, targets[at], 0)
        np.matmul(x[at], weight.T, out=logits)
        shifts = not np.maximum.reduce(logits.reshape(-1)) <= SAFE
        picked = logits[place]
        while True:
            top[...] = 0
            if shifts:
                np.maximum.reduce(logits, axis=1, out=top)
                np.subtract(logits, top[:, None], out=logits)
            np.exp(logits, out=logits)
            np.matmul(logits, ones, out=sums)
            if shifts or np.minimum.reduce(sums) >= LEAST:
                break
            shifts = True
            np.matmul(x[at], weight.T, out=logits)
        log_sum = np.log(sums, dtype=np.float64)
        lse = log_sum + top
        nll = log_sum + np.subtract(top, picked, dtype=np.float64)
        losses[at] = np.where(counts, nll + z * lse * lse if z else nll, 0)
        if grads:
            factor = np.where(counts, (1 + 2 * z * lse if z else 1) / sums, 0)
            np.multiply(logits, factor.astype(x.dtype)[:, None], out=logits)
            logits[place] -= counts
            np.matmul(logits, weight, out=grads[0][at])

    def sweep(start: int, parts: list[slice]) -> Callable[[], None]:
        def body(i: int, worker: int) -> None:
            at = parts[i]
            first = at.start - start if grads else worker * tallest
            panel(at, held[first : first + at.stop - at.start], worker)
        return cpu.items(len(parts), body)

    calls = []
    for (start, stop), parts in zip(chunks, panels):
        calls.append(sweep(start, parts))
        if grads:
            dlogits, rows, dweight = held[: stop - start], x[start:stop], grads[1]
            calls.append(matmul_accumulate(cpu, [dweight, dlogits, rows], [dweight], {"trans_a": True}) if start
                         else matmul(cpu, [dlogits, rows], [dweight], {"trans_a": True}))

    def run() -> None:
        counted(targets, v, ignore)  # refuses a target that is no column before anything is written
        for call in calls:
            call()
        total[...] = np.add.reduce(losses)

    return run


def linear_cross_entropy(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """Sum of the cross entropies of x W^T."""
    return _bound(cpu, ins, outs, attrs)


def linear_cross_entropy_grad(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """The same with its gradients dx and dweight, dweight summed chunk by chunk."""
    return _bound(cpu, ins, outs, attrs)


def _refused(rng: np.random.Generator) -> Iterable[Sample]:
    """One target that is no column, past either end, in a later chunk: an index from the end would be taken for a column."""
    for name, wrong in (("past-the-last", 24), ("negative", -2)):
        targets = rng.integers(0, 24, 37).astype(np.int32)
        targets[30] = wrong
        yield Sample(name=name, inputs=(rng.standard_normal((37, 16)), rng.standard_normal((24, 16)), targets),
                     attrs={"ignore_index": -1, "z_loss": 0.0, "chunk": 16})


def _offsets(rng: np.random.Generator) -> Iterable[Sample]:
    """Logits that share an offset, of all rows or of one among others: x and weight share one feature."""
    for name, offset, rows in (("above", 1e3, slice(37)), ("below", -1e3, slice(37)), ("near-safe", SAFE, slice(37)),
                               ("one-below", -1e3, slice(20, 21)), ("one-above", 1e3, slice(36, 37))):
        x, weight = rng.standard_normal((37, 16)), 0.5 * rng.standard_normal((24, 16))
        x[:, 0], weight[:, 0] = 0, offset / abs(offset) ** 0.5
        x[rows, 0] = abs(offset) ** 0.5
        yield Sample(name=f"offset-{name}", inputs=(x, weight, rng.integers(0, 24, 37).astype(np.int32)),
                     attrs={"ignore_index": -1, "z_loss": 1e-4, "chunk": 16}, wrt=())


def _busy(rng: np.random.Generator) -> Iterable[Sample]:
    """A chunk of more than one panel."""
    x, weight, targets = rng.standard_normal((128, 16)), rng.standard_normal((512, 16)), rng.integers(0, 512, 128).astype(np.int32)
    yield Sample(name="panels", inputs=(x, weight, targets), attrs={"ignore_index": -1, "z_loss": 1e-4, "chunk": 128}, wrt=())


_CALLS = Calls(further=_offsets, refused=_refused, repeated=_busy)

KERNELS = (
    Component(id="linear_cross_entropy.f32.cpu", kind="kernel", backend="cpu", op="linear_cross_entropy",
              implementation=linear_cross_entropy, envelope=_ENVELOPE, calls=_CALLS),
    Component(id="linear_cross_entropy_grad.f32.cpu", kind="kernel", backend="cpu", op="linear_cross_entropy_grad",
              implementation=linear_cross_entropy_grad, envelope=_ENVELOPE, calls=_CALLS),
)
