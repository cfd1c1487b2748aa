"""Softmax cross entropy, its backward, and the count of valid targets on the CPU: blocks of rows, all passes in cache.

exp is taken of the bare logits while none of a block exceeds SAFE and every row's sum stays above LEAST: then nothing overflows and no term
that counts is lost. Otherwise the rows' maxima are taken off first. What is one number per row (logarithm, loss) is computed in
float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope
from alpha.errors import InputError
from alpha.ops.spec import Sample
from alpha.types import Attrs

SAFE = 60.0
LEAST = 2.0**-80
_ENVELOPE = Envelope(dtypes=("f32", "f64"))


def counted(targets: np.ndarray, vocab: int, ignore_index: int) -> np.ndarray:
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
    t = cpu.scratch((cpu.threads, cpu.block_rows(n, x.itemsize * v), v), x.dtype)
    top, total = cpu.scratch((2, n), x.dtype)
    ones, every = np.ones(v, x.dtype), np.arange(n)

    def body(start: int, stop: int, worker: int) -> None:
        xb, u, sums = x[start:stop], t[worker, : stop - start], total[start:stop]
        if np.maximum.reduce(xb.reshape(-1)) <= SAFE:
            np.exp(xb, out=u)
            np.matmul(u, ones, out=sums)
            if np.minimum.reduce(sums) >= LEAST:
                top[start:stop] = 0
                return
        np.maximum.reduce(xb, axis=1, out=top[start:stop])
        np.subtract(xb, top[start:stop, None], out=u)
        np.exp(u, out=u)
        np.matmul(u, ones, out=sums)

    blocks = cpu.rows(n, x.itemsize * v, body)

    def run() -> None:
        counts = counted(targets, v, ignore)
        blocks()
        log_total = np.log(total, dtype=np.float64)
        picked = x[every, np.where(counts, targets, 0)]
        full = log_total + top
        nll = log_total + np.subtract(top, picked, dtype=np.float64)
        loss[...] = nll + z * full * full if z else nll
        np.copyto(loss, 0, where=~counts)
        lse[...] = full

    return run


def cross_entropy_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dlogits = dloss (p (1 + 2 z_loss lse) - onehot(target)), 0 where ignored; may write over the logits."""
    (dloss, x, targets, lse), dx = ins, outs[0]
    n, v = x.shape
    z, ignore = float(attrs["z_loss"]), int(attrs["ignore_index"])  # type: ignore[arg-type, call-overload]
    every = np.arange(n)
    weight, scale = cpu.scratch((2, n), x.dtype)

    def body(start: int, stop: int, worker: int) -> None:
        dxb, wb = dx[start:stop], weight[start:stop]
        if np.maximum.reduce(x[start:stop].reshape(-1)) <= SAFE and np.minimum.reduce(lse[start:stop]) >= -SAFE:
            np.exp(x[start:stop], out=dxb)
            np.multiply(wb, np.exp(-lse[start:stop]), out=wb)
        else:
            np.subtract(x[start:stop], lse[start:stop, None], out=dxb)
            np.exp(dxb, out=dxb)
        np.multiply(dxb, wb[:, None], out=dxb)

    blocks = cpu.rows(n, x.itemsize * v, body)

    def run() -> None:
        counts = counted(targets, v, ignore)
        scale[...] = np.where(counts, dloss, 0)
        np.multiply(scale, 1 + 2 * z * lse if z else 1, out=weight)
        blocks()
        dx[every, np.where(counts, targets, 0)] -= scale

    return run


def count_valid(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """Number of targets that are not ignored."""
    targets, count, ignore = ins[0], outs[0], attrs["ignore_index"]

    def run() -> None:
        count[...] = np.count_nonzero(targets != ignore)

    return run


def _offsets(rng: np.random.Generator) -> Iterable[Sample]:
    """Logits that share an offset, far beyond what exp can take and on either side of SAFE. At 86 each exp is finite, their sum is not."""
    for name, offset, spread in (("above", 1e4, 2.0), ("below", -1e4, 2.0), ("near-safe", SAFE, 2.0), ("near-minus-safe", -SAFE, 2.0),
                                 ("sum-above", 86.0, 0.2), ("sum-below", -105.0, 0.2)):
        x, targets = spread * rng.standard_normal((9, 33)) + offset, rng.integers(0, 33, 9).astype(np.int32)
        yield Sample(name=f"offset-{name}", inputs=(x, targets), attrs={"ignore_index": -1, "z_loss": 1e-4}, wrt=())


def _offsets_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    """Those offsets at which gradients keep digits."""
    for sample in _offsets(rng):
        x, targets = sample.inputs
        if np.abs(x).max() > 200:
            continue
        top = x.max(-1)
        yield replace(sample, inputs=(rng.standard_normal(len(x)), x, targets, top + np.log(np.exp(x - top[:, None]).sum(-1))))


def _refused(rng: np.random.Generator) -> Iterable[Sample]:
    """One target that is no column, past either end."""
    for name, wrong in (("past-the-last", 9), ("negative", -2)):
        yield Sample(name=name, inputs=(rng.standard_normal((3, 9)), np.array([0, wrong, 8], np.int32)),
                     attrs={"ignore_index": -1, "z_loss": 0.0})
    yield Sample(name="another-is-ignored", inputs=(rng.standard_normal((3, 9)), np.array([0, -1, -100], np.int32)),
                 attrs={"ignore_index": -100, "z_loss": 0.0})


def _refused_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for sample in _refused(rng):
        yield replace(sample, inputs=(np.ones(3), *sample.inputs, np.zeros(3)))


def _further(rng: np.random.Generator) -> Iterable[Sample]:
    yield from _offsets(rng)
    x = rng.standard_normal((5, 9))
    x[2, 4] = np.nan
    yield Sample(name="ignored-nan", inputs=(x, np.array([0, 3, -1, -1, 8], np.int32)), attrs={"ignore_index": -1, "z_loss": 0.0},
                 wrt=())


KERNELS = (
    Component(id="cross_entropy.f32.cpu", kind="kernel", backend="cpu", op="cross_entropy", implementation=cross_entropy,
              envelope=_ENVELOPE, calls=Calls(further=_further, refused=_refused)),
    Component(id="cross_entropy_bwd.f32.cpu", kind="kernel", backend="cpu", op="cross_entropy_bwd", implementation=cross_entropy_bwd,
              envelope=_ENVELOPE, inplace=((0, 1),), calls=Calls(further=_offsets_bwd, refused=_refused_bwd)),
    Component(id="count_valid.f32.cpu", kind="kernel", backend="cpu", op="count_valid", implementation=count_valid, envelope=_ENVELOPE),
)
