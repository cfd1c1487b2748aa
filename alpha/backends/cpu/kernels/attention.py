"""Attention and its backward on the CPU: scores of a block of queries, keys first, several heads side by side.

A block of at most QUERIES consecutive queries against the keys that it can see gives scores [keys, heads x queries] in one buffer that
stays in the L2 cache; key ranges that causal order or the window hide from the whole block are never computed. Keys come first so that the
maximum, the subtraction and the sum over keys run along long contiguous rows. The heads and batches that share a buffer are chosen so
that each NumPy call is long enough to hide its fixed price. All matrix products are BLAS calls on strided views of [B,T,H,D].

The maximum of a row is taken off before exp only where it matters: while no score of the buffer exceeds SAFE and every row's sum stays
above LEAST, exp of the bare scores neither overflows nor loses a term that counts. Otherwise the buffer is computed again, shifted.

The left factor of the scores is k as it lies, the right one a transposed copy of the queries that carries the scale: BLAS is half as fast
again on small products whose operands need no turning.

Backward recomputes p = exp(scale q.k - lse). Its scores come from the product that forward took, so they have forward's bits, and lse is
taken off afterwards. As one more term of the product it would change their rounding: where the scores of a row share a large offset, p
would no longer add up to 1, and dq would err by that times the offset of k. In ds = p (scale do.v - scale delta) the subtraction does ride
along in the product, as one more column of the left factor and row of the right one: (v | 1) and (scale do | -scale delta).

Legend: B batch, T queries, S keys, G key heads, R query heads per key head, D head width; an item holds b batches and g key heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from alpha.backends.cpu.calls import Calls
from alpha.backends.cpu.lib import Cpu
from alpha.component import Component, Envelope, Limit
from alpha.ops.spec import Sample
from alpha.types import Attrs

QUERIES = 64
SCORES = 65536
"""Elements of one score buffer, about: 256 KB in f32."""

SAFE = 16.0
LEAST = 2.0**-24
"""A row whose sum is at least LEAST lost only terms below exp(-87) of 1, which is less than 2^-100 of its sum."""

LONGEST = 32768
"""Queries, and keys, of a call: the masks of all blocks are made in one pass over queries times keys, when a plan is bound."""

_ENVELOPE = Envelope(dtypes=("f32", "f64"), limits=(
    Limit(text=f"sequences of at most {LONGEST} tokens", holds=lambda types, attrs: all(t.shape[1] <= LONGEST for t in types)),))


@dataclass(frozen=True)
class _Block:
    """Queries [start, stop) and the keys [low, high) that any of them sees; `hidden` [n, queries]: which keys from `masked` on are not."""

    start: int
    stop: int
    low: int
    high: int
    masked: int
    hidden: np.ndarray | None


def _blocks(t: int, s: int, attrs: Attrs) -> list[_Block]:
    """Cut the queries; depends on shapes and attributes only."""
    causal, window = bool(attrs["causal"]), int(attrs["window"])  # type: ignore[call-overload]
    step = max(16, min(QUERIES, SCORES // s))
    known: dict[tuple[int, bytes], np.ndarray] = {}
    found = []
    for start in range(0, t, step):
        stop = min(start + step, t)
        first, last = start + s - t, stop - 1 + s - t
        low = max(0, first - window + 1) if window else 0
        high = max(0, min(s, last + 1)) if causal else s
        low = min(low, high)
        place, key = np.arange(first, last + 1)[None, :], np.arange(low, high)[:, None]
        hidden = np.zeros((high - low, stop - start), bool)
        if causal:
            hidden |= key > place
        if window:
            hidden |= place - key >= window
        rows = np.flatnonzero(hidden.any(1))
        if not rows.size:
            found.append(_Block(start, stop, low, high, low, None))
            continue
        part = hidden[rows[0] : rows[-1] + 1]
        part = known.setdefault((part.shape[1], part.tobytes()), part)
        found.append(_Block(start, stop, low, high, low + int(rows[0]), part))
    return found


def _grouped(x: np.ndarray, g: int) -> np.ndarray:
    """[B,T,H,D] -> view [B,G,R,T,D]."""
    b, t, h, d = x.shape
    return x.reshape(b, t, g, h // g, d).transpose(0, 2, 3, 1, 4)


def _share(b: int, g: int, each: int) -> tuple[int, int]:
    """How many batches and key heads of `each` scores share a buffer."""
    many = max(1, SCORES // max(1, each))
    return (min(b, max(1, many // g)), g) if many >= g else (1, many)


def _side_by_side(blocks: Sequence[_Block], heads: Callable[[_Block], int]) -> list[np.ndarray | None]:
    """`hidden` of each block, repeated for as many heads as share its buffer; equal ones are kept once."""
    known: dict[tuple[int, int], np.ndarray] = {}
    found: list[np.ndarray | None] = []
    for x in blocks:
        if x.hidden is None:
            found.append(None)
            continue
        key = id(x.hidden), heads(x)
        if key not in known:
            known[key] = np.tile(x.hidden, (1, key[1]))
        found.append(known[key])
    return found


def _caps(hidden: Sequence[np.ndarray | None], dtype: np.dtype) -> list[np.ndarray | None]:
    """For each mask the largest value that its scores may keep: -inf where hidden, else inf. Equal masks share one array."""
    made = {id(x): np.where(x, -np.inf, np.inf).astype(dtype) for x in hidden if x is not None}
    return [None if x is None else made[id(x)] for x in hidden]


def _mask(scores: np.ndarray, hides: np.ndarray, cap: np.ndarray) -> None:
    """-inf where hidden. A minimum takes a quarter of the time of a masked copy, but lets NaN through: then it is done over."""
    np.minimum(scores, cap, out=scores)
    if np.isnan(np.maximum.reduce(scores, axis=None)):
        np.copyto(scores, -np.inf, where=hides)


def _turned(x_BGRTD: np.ndarray, scale: float, into: np.ndarray, more: int = 0) -> np.ndarray:
    """scale * x as [b,g,D,R,n], in `into`, followed by `more` rows along D that are not set."""
    b, g, r, n, d = x_BGRTD.shape
    copy = into[: b * g * r * n * (d + more)].reshape(b, g, d + more, r, n)
    np.multiply(x_BGRTD.transpose(0, 1, 4, 2, 3), scale, out=copy[:, :, :d])
    return copy


def _columns(x_BGRTD: np.ndarray, into: np.ndarray) -> np.ndarray:
    """[b,g,R,n,D] as [b,g,R*n,D]: the view itself where a key head has one query head, else a copy in `into`."""
    b, g, r, n, d = x_BGRTD.shape
    if r == 1:
        return x_BGRTD[:, :, 0]
    copy = into[: b * g * r * n * d].reshape(b, g, r, n, d)
    np.copyto(copy, x_BGRTD)
    return copy.reshape(b, g, r * n, d)


def _hide(scores: np.ndarray, documents: Sequence[np.ndarray], other: np.ndarray) -> None:
    """-inf where the documents differ. scores [keys,b,g,R,queries]; documents of the item's keys [b,keys] and queries [b,queries]."""
    keys, queries = documents
    for i in range(len(keys)):
        np.not_equal(keys[i][:, None], queries[i][None, :], out=other)
        np.copyto(scores[:, i], -np.inf, where=other[:, None, None, :])


def attention(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """o = softmax(scale q k^T + mask) v and lse, the log of the sum of the exponentials; a row without keys gives 0 and -inf."""
    q, k, v, *documents = ins
    (b, t, h, d), (s, g) = q.shape, k.shape[1:3]
    r, dtype, scale = h // g, q.dtype, float(attrs["scale"])  # type: ignore[arg-type]
    q_BGRTD, o_BGRTD = _grouped(q, g), _grouped(outs[0], g)
    k_BGSD, v_BGSD = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    lse_BGRT = outs[1].reshape(b, g, r, t)
    lowest, least = np.finfo(dtype).min, np.finfo(dtype).tiny
    ones = np.ones(s, dtype)
    blocks = _blocks(t, s, attrs)

    def share(block: _Block) -> tuple[int, int]:
        return _share(b, g, r * (block.stop - block.start) * (block.high - block.low))

    hidden = _side_by_side(blocks, lambda block: r * prod(share(block)))
    items, widest, columns = [], 0, 0
    for block, hides, cap in zip(blocks, hidden, _caps(hidden, dtype)):
        n, keys = block.stop - block.start, block.high - block.low
        nb, ng = share(block)
        items += [(block, hides, cap, slice(x, min(x + nb, b)), slice(y, min(y + ng, g)))
                  for x in range(0, b, nb) for y in range(0, g, ng)]
        widest, columns = max(widest, nb * ng * r * n * keys), max(columns, nb * ng * r * n)
    buffer = cpu.scratch((cpu.threads, widest), dtype)
    queries = cpu.scratch((cpu.threads, columns * d), dtype)
    rows = cpu.scratch((cpu.threads, 3, columns), dtype)
    double = cpu.scratch((cpu.threads, columns), np.float64)
    differs = cpu.scratch((cpu.threads, s * QUERIES if documents else 0), np.bool_)

    def body(i: int, worker: int) -> None:
        block, hides, cap, at_b, at_g = items[i]
        n, keys = block.stop - block.start, block.high - block.low
        nb, ng = at_b.stop - at_b.start, at_g.stop - at_g.start
        o, lse = o_BGRTD[at_b, at_g, :, block.start : block.stop], lse_BGRT[at_b, at_g, :, block.start : block.stop]
        if not keys:
            o[...] = 0
            lse[...] = -np.inf
            return
        m = nb * ng * r * n
        q_turned = _turned(q_BGRTD[at_b, at_g, :, block.start : block.stop], scale, queries[worker]).reshape(nb, ng, d, r * n)
        flat = buffer[worker, : keys * m].reshape(keys, m)
        k_, v_ = k_BGSD[at_b, at_g, block.low : block.high], v_BGSD[at_b, at_g, block.low : block.high]
        by_key = flat.reshape(keys, nb, ng, r * n)

        def score() -> None:
            np.matmul(k_, q_turned, out=by_key.transpose(1, 2, 0, 3))
            if hides is not None and cap is not None:
                _mask(flat[block.masked - block.low :][: len(hides)], hides[:, :m], cap[:, :m])
            if documents:
                pair = documents[1][at_b, block.low : block.high], documents[0][at_b, block.start : block.stop]
                _hide(flat.reshape(keys, nb, ng, r, n), pair, differs[worker, : keys * n].reshape(keys, n))

        top, total, inverse = rows[worker, 0, :m], rows[worker, 1, :m], rows[worker, 2, :m]
        score()
        shifts = not np.maximum.reduce(flat.reshape(-1)) <= SAFE
        while True:
            if shifts:
                np.maximum.reduce(flat, axis=0, out=top)
                np.maximum(top, lowest, out=top)  # -inf - -inf would be NaN
                np.subtract(flat, top, out=flat)
            np.exp(flat, out=flat)
            np.matmul(ones[:keys], flat, out=total)
            if shifts or np.minimum.reduce(total) >= LEAST:
                break
            shifts = True
            score()
        at_least = np.maximum(total, least, out=inverse)
        log_total = np.log(at_least, out=double[worker, :m], dtype=np.float64)
        if shifts:
            np.add(log_total, top, out=log_total)
        lse[...] = log_total.reshape(lse.shape)
        np.copyto(lse, -np.inf, where=(total == 0).reshape(lse.shape))
        np.divide(1, at_least, out=inverse)
        np.multiply(flat, inverse, out=flat)
        np.matmul(flat.reshape(keys, nb, ng, r, n).transpose(1, 2, 3, 4, 0), v_[:, :, None], out=o)

    return cpu.items(len(items), body)


def attention_bwd(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
    """dq, dk, dv from do, the operands, o and lse. Blocks of queries are taken last to first; dk and dv grow in that order."""
    do, q, k, v, o, lse, *documents = ins
    (b, t, h, d), (s, g) = q.shape, k.shape[1:3]
    r, dtype, scale = h // g, q.dtype, float(attrs["scale"])  # type: ignore[arg-type]
    do_BGRTD, q_BGRTD, dq_BGRTD = (_grouped(x, g) for x in (do, q, outs[0]))
    k_BGSD, v_BGSD, dk_BGSD, dv_BGSD = (x.transpose(0, 2, 1, 3) for x in (k, v, outs[1], outs[2]))
    lse_BGRT = lse.reshape(b, g, r, t)
    blocks = _blocks(t, s, attrs)[::-1]
    tall = max(x.high - x.low for x in blocks)
    n_most = max(x.stop - x.start for x in blocks)
    nb_most, ng_most = _share(b, g, r * n_most * tall)
    items = [(slice(x, min(x + nb_most, b)), slice(y, min(y + ng_most, g))) for x in range(0, b, nb_most) for y in range(0, g, ng_most)]
    pairs = nb_most * ng_most
    hidden = _side_by_side(blocks, lambda block: r * pairs)
    caps = _caps(hidden, dtype)
    columns = pairs * r * n_most
    p_buffer = cpu.scratch((cpu.threads, columns * tall), dtype)
    ds_buffer = cpu.scratch((cpu.threads, columns * tall), dtype)
    queries = cpu.scratch((cpu.threads, 2, columns * d if r > 1 else 0), dtype)
    turned = cpu.scratch((cpu.threads, 2, columns * (d + 1)), dtype)
    by_place = cpu.scratch((cpu.threads, columns), dtype)
    shifts = cpu.scratch((cpu.threads, columns), dtype)
    values = cpu.scratch((cpu.threads, pairs * s * (d + 1)), dtype)
    grown_buffer = cpu.scratch((cpu.threads, pairs * tall * d if len(blocks) > 1 else 0), dtype)
    differs = cpu.scratch((cpu.threads, s * QUERIES if documents else 0), np.bool_)
    ones = np.ones(d, dtype)

    def body(i: int, worker: int) -> None:
        at_b, at_g = items[i]
        nb, ng = at_b.stop - at_b.start, at_g.stop - at_g.start
        k_, v_ = k_BGSD[at_b, at_g], v_BGSD[at_b, at_g]
        v_1 = values[worker, : nb * ng * s * (d + 1)].reshape(nb, ng, s, d + 1)
        v_1[..., :d], v_1[..., d] = v_, 1
        dk, dv = dk_BGSD[at_b, at_g], dv_BGSD[at_b, at_g]
        low, high = blocks[0].low, blocks[0].high
        dk[:, :, high:], dv[:, :, high:] = 0, 0
        for first, block in enumerate(blocks):
            n, keys = block.stop - block.start, block.high - block.low
            at = (at_b, at_g, slice(None), slice(block.start, block.stop))
            if not keys:
                dq_BGRTD[at] = 0
                continue
            m = nb * ng * r * n
            place = (at_b, slice(block.start, block.stop), slice(at_g.start * r, at_g.stop * r))
            do_o, delta = turned[worker, 0, : m * d].reshape(nb, n, ng * r, d), by_place[worker, :m]
            np.multiply(do[place], o[place], out=do_o)
            np.matmul(do_o.reshape(m, d), ones, out=delta)
            q_turned = _turned(q_BGRTD[at], scale, turned[worker, 0]).reshape(nb, ng, d, r * n)
            do_1 = _turned(do_BGRTD[at], scale, turned[worker, 1], 1)
            shift = shifts[worker, :m]
            np.copyto(shift.reshape(nb, ng, r, n), lse_BGRT[at])
            np.copyto(shift, np.inf, where=shift == -np.inf)  # a row that saw no key: every p is exp(-inf)
            np.multiply(delta.reshape(nb, n, ng, r).transpose(0, 2, 3, 1), -scale, out=do_1[:, :, d])
            q_, do_ = _columns(q_BGRTD[at], queries[worker, 0]), _columns(do_BGRTD[at], queries[worker, 1])
            p, ds = (x[worker, : keys * m].reshape(keys, m) for x in (p_buffer, ds_buffer))
            p_BGSM, ds_BGSM = (x.reshape(keys, nb, ng, r * n).transpose(1, 2, 0, 3) for x in (p, ds))
            np.matmul(k_[:, :, block.low : block.high], q_turned, out=p_BGSM)
            hides, cap = hidden[first], caps[first]
            if hides is not None and cap is not None:
                _mask(p[block.masked - block.low :][: len(hides)], hides[:, :m], cap[:, :m])
            if documents:
                pair = documents[1][at_b, block.low : block.high], documents[0][at_b, block.start : block.stop]
                _hide(p.reshape(keys, nb, ng, r, n), pair, differs[worker, : keys * n].reshape(keys, n))
            np.subtract(p, shift, out=p)
            np.exp(p, out=p)
            np.matmul(v_1[:, :, block.low : block.high], do_1.reshape(nb, ng, d + 1, r * n), out=ds_BGSM)
            np.multiply(ds, p, out=ds)
            np.matmul(ds.reshape(keys, nb, ng, r, n).transpose(1, 2, 3, 4, 0), k_[:, :, None, block.low : block.high], out=dq_BGRTD[at])
            for total, left, right in ((dv, p_BGSM, do_), (dk, ds_BGSM, q_)):
                if not first:
                    np.matmul(left, right, out=total[:, :, block.low : block.high])
                    continue
                part = grown_buffer[worker, : nb * ng * keys * d].reshape(nb, ng, keys, d)
                np.matmul(left, right, out=part)
                fresh = max(0, min(low, block.high) - block.low)
                total[:, :, block.low : block.low + fresh] = part[:, :, :fresh]
                old = total[:, :, block.low + fresh : block.high]
                np.add(old, part[:, :, fresh:], out=old)
            low = min(low, block.low)
        dk[:, :, :low], dv[:, :, :low] = 0, 0

    return cpu.items(len(items), body)


def _drawn(rng: np.random.Generator, name: str, t: int, s: int, heads: int, key_heads: int, window: int = 0) -> Sample:
    q, k, v = (rng.standard_normal((1, n, h, 4)) for n, h in ((t, heads), (s, key_heads), (s, key_heads)))
    return Sample(name=name, inputs=(q, k, v), attrs={"causal": True, "window": window, "scale": 0.5}, wrt=())


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    """As forward's, with the lse of scores that are all 0: p need not add up to 1 here."""
    for sample in (_drawn(rng, "block-without-keys", 80, 5, 2, 1), _drawn(rng, "heads-apart", 256, 256, 8, 2)):
        q, k, v = sample.inputs
        t, s = q.shape[1], k.shape[1]
        seen = np.maximum(0, np.arange(t) + 1 + s - t)
        with np.errstate(divide="ignore"):
            lse = np.broadcast_to(np.log(seen), (1, q.shape[2], t))
        do, o = rng.standard_normal((2, *q.shape))
        yield Sample(name=sample.name, inputs=(do, q, k, v, o, lse), attrs=sample.attrs, wrt=())


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    """A key that is NaN reaches the query that sees it and no other of its block. Scores that share an offset: q and k share a feature."""
    q, k, v = rng.standard_normal((3, 1, 9, 2, 8))
    k[0, -1] = np.nan
    yield Sample(name="nan-key-behind-the-mask", inputs=(q, k, v), attrs={"causal": True, "window": 0, "scale": 8**-0.5}, wrt=())
    yield _drawn(rng, "block-without-keys", 80, 5, 2, 1)  # a whole block of queries, all of it before the first key
    yield _drawn(rng, "heads-apart", 256, 256, 8, 2)  # scores of one key head alone are longer than half a buffer
    yield _drawn(rng, "window-of-fewer-keys", 160, 90, 2, 1, window=7)  # the last query sees the last key, whatever their numbers
    for name, offset, window in (("above", 1e3, 0), ("below", -1e3, 5), ("near-safe", SAFE, 0)):
        q, k, v = rng.standard_normal((3, 1, 21, 2, 8))
        q[..., 0], k[..., 0] = abs(offset) ** 0.5, offset / abs(offset) ** 0.5
        yield Sample(name=f"offset-{name}", inputs=(q, k, v), attrs={"causal": True, "window": window, "scale": 1.0}, wrt=())
    q, k, v = rng.standard_normal((3, 1, 21, 2, 8))
    k[..., 0], q[..., 0] = 10, 0
    q[0, 5::7, :, 0] = -10  # the scores of three queries lie 100 below those of all others, none of which is large
    yield Sample(name="far-below-among-near", inputs=(q, k, v), attrs={"causal": True, "window": 0, "scale": 1.0}, wrt=())


KERNELS = (
    Component(id="attention.f32.cpu", kind="kernel", backend="cpu", op="attention", implementation=attention, envelope=_ENVELOPE,
              calls=Calls(further=_samples)),
    Component(id="attention_bwd.f32.cpu", kind="kernel", backend="cpu", op="attention_bwd", implementation=attention_bwd,
              envelope=_ENVELOPE, calls=Calls(further=_samples_bwd)),
)
