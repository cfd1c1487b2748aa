"""Softmax cross entropy, its backward, and the count of valid targets on the CPU: blocks of rows, all passes in cache.

What is one number per row (logarithm, loss) is computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.errors import InputError
from alpha.types import Attrs

_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def _counts(targets: np.ndarray, vocab: int, ignore_index: int) -> np.ndarray:
    """Which targets are not ignored; InputError if one of those is no column."""
    counts = targets != ignore_index
    wrong = counts & ((targets < 0) | (targets >= vocab))
    if wrong.any():
        raise InputError("cross_entropy: every target is a column or ignored", came=int(targets[wrong][0]),
                         expected=f"0..{vocab - 1} or {ignore_index}",
                         do="check that the token files were made with the tokenizer of this model")
    return counts


def cross_entropy(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """loss = lse - logits[target] + z_loss lse^2, 0 where ignored; lse of every row."""
    (x, targets), (loss, lse) = ins, outs
    n, v = x.shape
    z, ignore = float(attrs["z_loss"]), int(attrs["ignore_index"])  # type: ignore[arg-type, call-overload]
    block = cpu.block_rows(n, x.itemsize * v)
    t = cpu.scratch((cpu.threads, block, v), x.dtype)
    r = cpu.scratch((cpu.threads, 2, block), x.dtype)
    ones, every = np.ones(v, x.dtype), np.arange(block)

    def body(start: int, stop: int, worker: int) -> None:
        rows = stop - start
        xb, u, top, total = x[start:stop], t[worker, :rows], r[worker, 0, :rows], r[worker, 1, :rows]
        counts = _counts(targets[start:stop], v, ignore)
        np.maximum.reduce(xb, axis=1, out=top)
        np.subtract(xb, top[:, None], out=u)
        np.exp(u, out=u)
        np.matmul(u, ones, out=total)
        log_total = np.log(total, dtype=np.float64)
        picked = xb[every[:rows], np.where(counts, targets[start:stop], 0)]
        full = log_total + top
        nll = log_total + np.subtract(top, picked, dtype=np.float64)
        loss[start:stop] = nll + z * full * full if z else nll
        np.copyto(loss[start:stop], 0, where=~counts)
        lse[start:stop] = full

    return cpu.rows(n, x.itemsize * v, body)


def cross_entropy_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dlogits = dloss (p (1 + 2 z_loss lse) - onehot(target)), 0 where ignored; may write over the logits."""
    (dloss, x, targets, lse), dx = ins, outs[0]
    n, v = x.shape
    z, ignore = float(attrs["z_loss"]), int(attrs["ignore_index"])  # type: ignore[arg-type, call-overload]
    every = np.arange(cpu.block_rows(n, x.itemsize * v))

    def body(start: int, stop: int, worker: int) -> None:
        dxb = dx[start:stop]
        counts = _counts(targets[start:stop], v, ignore)
        scale = np.where(counts, dloss[start:stop], 0)
        np.subtract(x[start:stop], lse[start:stop, None], out=dxb)
        np.exp(dxb, out=dxb)
        weight = scale * (1 + 2 * z * lse[start:stop]) if z else scale
        np.multiply(dxb, weight[:, None], out=dxb)
        dxb[every[: stop - start], np.where(counts, targets[start:stop], 0)] -= scale

    return cpu.rows(n, x.itemsize * v, body)


def count_valid(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """Number of targets that are not ignored."""
    targets, count, ignore = ins[0], outs[0], attrs["ignore_index"]

    def run() -> None:
        count[...] = np.count_nonzero(targets != ignore)

    return run


KERNELS = (
    Component(id="cross_entropy.f32.cpu", kind="kernel", backend="cpu", op="cross_entropy", implementation=cross_entropy,
              envelope=_ENVELOPE),
    Component(id="cross_entropy_bwd.f32.cpu", kind="kernel", backend="cpu", op="cross_entropy_bwd", implementation=cross_entropy_bwd,
              envelope=_ENVELOPE, inplace=((0, 1),)),
    Component(id="count_valid.f32.cpu", kind="kernel", backend="cpu", op="count_valid", implementation=count_valid, envelope=_ENVELOPE),
)
