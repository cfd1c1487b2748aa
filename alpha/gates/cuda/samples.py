"""Samples beyond the rows' own that lie inside the envelopes of kernels of the GPU: head widths, last axes of whole 16 bytes, tile sizes
plus and minus one, several tiles, one more step of K than a ring has places. Floor 7.

A row's own samples are small and odd; most of them are outside what the copy engine can address. The names of exact samples begin as
the rows' do; what is judged exactly is judged so in every output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from alpha.ops.spec import Sample
from alpha.ops.table import row

Make = Callable[[np.random.Generator], Iterable[Sample]]

GEMM = (  # name, leading axes, M, N, K, b batched
    ("one-row", (), 1, 8, 8, False),
    ("tile-1", (), 127, 120, 56, False),
    ("tile+1", (), 129, 136, 72, False),
    ("tiles", (), 136, 264, 64, False),
    ("ring+1", (), 72, 40, 456, False),
    ("deep", (), 24, 32, 1032, False),
    ("folded", (3, 5), 24, 16, 40, False),
    ("batched", (3,), 136, 40, 24, True),
)
"""M and N are multiples of 8 wherever a transposition makes them a last axis."""


def _gemm(rng: np.random.Generator, draw: Callable[..., np.ndarray], accumulate: bool) -> Iterable[Sample]:
    for name, lead, m, n, k, batched in GEMM:
        for ta in (False, True):
            for tb in (False, True):
                if (ta and (m % 8 or (lead and not batched))) or (accumulate and lead):
                    continue
                a = draw(*lead, *((k, m) if ta else (m, k)))
                b = draw(*(lead if batched else ()), *((n, k) if tb else (k, n)))
                attrs: dict[str, object] = {"trans_a": ta, "trans_b": tb, **({"wide": True} if accumulate else {})}
                inputs = (draw(m, n), a, b) if accumulate else (a, b, draw(n)) if ta == tb and not lead else (a, b)
                yield Sample(name=f"gpu-{name}-{'T' if ta else 'N'}{'T' if tb else 'N'}", inputs=inputs, attrs=attrs)


def _matmul(rng: np.random.Generator) -> Iterable[Sample]:
    yield from _gemm(rng, lambda *s: rng.standard_normal(s), False)
    yield Sample(name="gpu-equal", inputs=(np.full((136, 264), 0.7), np.full((264, 72), -1.3), np.full(72, 0.1)), attrs={})
    yield Sample(name="gpu-large", inputs=(1e15 * rng.standard_normal((40, 72)), 1e15 * rng.standard_normal((72, 24))), attrs={})


def _whole(rng: np.random.Generator) -> Callable[..., np.ndarray]:
    return lambda *s: rng.integers(-2, 3, s).astype(float)


def _matmul_exact(rng: np.random.Generator) -> Iterable[Sample]:
    """Integers whose sums stay below 256, so that the result is exact in bf16 as well: K of one-hot columns and small entries."""
    for sample in _gemm(rng, _whole(rng), False):
        a, b, *bias = sample.inputs
        axis = -2 if sample.attrs["trans_a"] else -1  # the reduction: at most 32 terms of at most 4 are not zero
        kept = np.zeros(a.shape[axis], bool)
        kept[rng.permutation(kept.size)[:32]] = True
        kept[-1] = True
        a = a * (kept[:, None] if axis == -2 else kept)
        yield Sample(name=sample.name, inputs=(a, b, *bias), attrs=sample.attrs)


def _accumulate(rng: np.random.Generator) -> Iterable[Sample]:
    yield from _gemm(rng, lambda *s: rng.standard_normal(s), True)


def _accumulate_exact(rng: np.random.Generator) -> Iterable[Sample]:
    yield from _gemm(rng, lambda *s: rng.integers(-8, 9, s).astype(float), True)


ATTENTION = (  # name, B, T, S, H, G, D, causal, window
    ("one", 1, 1, 1, 1, 1, 64, True, 0),
    ("small-full", 1, 5, 11, 2, 1, 64, False, 0),
    ("small-causal", 1, 13, 13, 2, 2, 128, True, 0),
    ("tile-1", 1, 63, 63, 1, 1, 64, True, 0),
    ("tile+1", 1, 65, 65, 2, 1, 128, True, 0),
    ("tiles-full", 1, 129, 193, 2, 1, 64, False, 0),
    ("tiles-causal", 2, 193, 193, 2, 2, 64, True, 0),
    ("suffix", 1, 70, 201, 2, 1, 128, True, 0),
    ("more-queries-than-keys", 1, 140, 70, 2, 1, 64, True, 0),
    ("window", 1, 200, 200, 2, 1, 64, True, 37),
    ("window-suffix", 1, 66, 150, 1, 1, 128, True, 65),
    ("window-not-causal", 1, 90, 90, 2, 2, 64, False, 20),
    ("grouped", 1, 130, 130, 6, 2, 64, True, 0),
    ("tail", 1, 128, 128, 2, 1, 64, False, 0),  # blocks of 96 queries read past the last tile of 128
    ("width-96", 2, 130, 130, 4, 2, 96, True, 0),
    ("width-96-full", 1, 65, 129, 2, 1, 96, False, 0),
    ("width-96-suffix", 1, 70, 150, 2, 2, 96, True, 33),
)

DOCUMENTS = (  # name, T, S, H, G, D, causal, window, per row of the batch the lengths of the documents of the S keys
    ("documents", 193, 193, 2, 1, 64, True, 0, ((64, 65, 64), (1, 1, 126, 1, 64))),
    ("documents-borders", 256, 256, 1, 1, 128, True, 0, ((64, 64, 128),)),
    ("documents-spanning", 300, 300, 1, 1, 64, True, 0, ((29, 241, 30),)),
    ("documents-of-one", 70, 70, 2, 2, 64, True, 0, ((1,) * 70,)),
    ("documents-one", 66, 66, 1, 1, 128, True, 0, ((66,),)),
    ("documents-window", 200, 200, 2, 1, 64, True, 20, ((90, 15, 95),)),
    ("documents-not-causal", 130, 130, 1, 1, 128, False, 0, ((70, 1, 59),)),
    ("documents-grouped-96", 131, 131, 6, 2, 96, True, 0, ((65, 66),)),
    ("documents-suffix", 70, 201, 2, 1, 64, True, 0, ((100, 65, 36),)),
    ("documents-more-queries", 140, 70, 2, 1, 64, True, 0, ((5, 64, 1),)),
)
"""Parity makes one larger case by repeating a sample: of these along B only, because along T ids would fall (a test holds that)."""


def _ids(lengths: Sequence[Sequence[int]]) -> np.ndarray:
    """[B, S] ids of documents of these lengths; some numbers are left out."""
    return np.array([np.repeat(3 * np.arange(len(found)) - 1, found) for found in lengths], np.int32)


def _documents(t: int, s: int, lengths: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """ids of the T queries and of the S keys; a query beyond the keys belongs to the first document."""
    ids = _ids(lengths)
    return ids[:, np.maximum(np.arange(t) + s - t, 0)], ids


def _attention(rng: np.random.Generator) -> Iterable[Sample]:
    for name, b, t, s, h, g, d, causal, window in ATTENTION:
        q, k, v = (rng.standard_normal(x) for x in ((b, t, h, d), (b, s, g, d), (b, s, g, d)))
        yield Sample(name=f"gpu-{name}", inputs=(q, k, v), attrs={"causal": causal, "window": window, "scale": d**-0.5})
    for name, t, s, h, g, d, causal, window, lengths in DOCUMENTS:
        b = len(lengths)
        q, k, v = (rng.standard_normal(x) for x in ((b, t, h, d), (b, s, g, d), (b, s, g, d)))
        attrs: dict[str, object] = {"causal": causal, "window": window, "scale": d**-0.5}
        yield Sample(name=f"gpu-{name}", inputs=(q, k, v, *_documents(t, s, lengths)), attrs=attrs)
    q, k, v = (rng.standard_normal(x) for x in ((1, 70, 2, 64), (1, 90, 1, 64), (1, 90, 1, 64)))
    ids_q, ids_k = np.repeat([0, 2, 9], (20, 30, 20)), np.repeat([1, 2, 3], (40, 20, 30))  # 0 and 9 have no key, 1 and 3 no query
    yield Sample(name="gpu-documents-unseen", inputs=(q, k, v, ids_q[None].astype(np.int32), ids_k[None].astype(np.int32)),
                 attrs={"causal": False, "window": 0, "scale": 0.125})
    q, k, v = (rng.standard_normal((1, 80, 2, 64)) for _ in range(3))
    yield Sample(name="gpu-steep", inputs=(q * 40.0, k, v), attrs={"causal": True, "window": 0, "scale": 0.125})
    yield Sample(name="gpu-far-below", inputs=(q + 10.0, k * 0.1 - 4.0, v), attrs={"causal": True, "window": 0, "scale": 0.125})


def _attention_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for sample in _attention(rng):
        o, lse = row("attention").oracle(*sample.inputs, **sample.attrs)
        q, k, v, *ids = sample.inputs
        yield Sample(name=sample.name, inputs=(rng.standard_normal(q.shape), q, k, v, o, lse, *ids), attrs=sample.attrs)


def _attention_exact(rng: np.random.Generator) -> Iterable[Sample]:
    """Every score is 0, and 1, 2, 4 ... keys are seen: o is a mean of small integers, exact in bf16. lse is the logarithm of a power of
    two: exact for one key alone, so those samples see one key a query."""
    for name, t, d in (("window-1", 193, 64), ("window-1-wide", 131, 128)):
        q, k = rng.integers(-3, 4, (2, t, 4, d)).astype(float), np.zeros((2, t, 2, d))
        v = rng.integers(-9, 10, (2, t, 2, d)).astype(float)
        yield Sample(name=f"gpu-{name}", inputs=(q, k, v), attrs={"causal": True, "window": 1, "scale": 0.125})
        ids = np.arange(t, dtype=np.int32)[None].repeat(2, 0)
        yield Sample(name=f"gpu-of-one-{d}", inputs=(q, k, v, ids, ids), attrs={"causal": False, "window": 0, "scale": 0.125})


def _attention_bwd_exact(rng: np.random.Generator) -> Iterable[Sample]:
    """q and k are orthogonal, so every score is 0; lse is given as 0, so every p is 1: the rest is small integers."""

    def whole(*shape: int) -> np.ndarray:
        return rng.integers(-1, 2, shape).astype(float) * (rng.random(shape) < 0.1)

    for t, s, causal, window, d, lengths in ((66, 66, True, 0, 64, ()), (40, 70, False, 0, 64, ()), (130, 130, True, 3, 128, ()),
                                             (130, 130, True, 0, 64, (1, 63, 2, 64)), (70, 70, False, 0, 96, (64, 6))):
        q, k = whole(1, t, 4, d), whole(1, s, 2, d)
        q[..., d // 2 :], k[..., : d // 2] = 0.0, 0.0
        ids = _documents(t, s, (lengths,)) if lengths else ()
        yield Sample(name=f"gpu-integers-{t}x{s}-{d}", attrs={"causal": causal, "window": window, "scale": 0.5},
                     inputs=(whole(1, t, 4, d), q, k, whole(1, s, 2, d), whole(1, t, 4, d), np.zeros((1, 4, t)), *ids))


def _take_row(rng: np.random.Generator) -> Iterable[Sample]:
    for t, width, at in ((1, 8, 0), (7, 16, 6), (9, 520, 3), (130, 64, 129)):
        yield Sample(name=f"gpu-{t}x{width}", inputs=(rng.standard_normal((1, t, width)), np.array([at], np.int32)), attrs={})


def _packed(rng: np.random.Generator) -> Iterable[Sample]:
    for name, b, t, s, h, g, d, causal, window in ATTENTION:
        if t == s:
            qkv = rng.standard_normal((b, t, (h + 2 * g) * d))
            attrs: dict[str, object] = {"heads": h, "kv_heads": g, "causal": causal, "window": window, "scale": d**-0.5}
            yield Sample(name=f"gpu-{name}", inputs=(qkv,), attrs=attrs)
    for name, t, s, h, g, d, causal, window, lengths in DOCUMENTS:
        if t == s:
            qkv, ids = rng.standard_normal((len(lengths), t, (h + 2 * g) * d)), _ids(lengths)
            attrs = {"heads": h, "kv_heads": g, "causal": causal, "window": window, "scale": d**-0.5}
            yield Sample(name=f"gpu-{name}", inputs=(qkv, ids, ids), attrs=attrs)


def _packed_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for sample in _packed(rng):
        o, lse = row("attention_packed").oracle(*sample.inputs, **sample.attrs)
        qkv, *ids = sample.inputs
        yield Sample(name=sample.name, inputs=(rng.standard_normal(o.shape), qkv, o, lse, *ids), attrs=sample.attrs)


def _rope(rng: np.random.Generator) -> Iterable[Sample]:
    for name, b, t, h, g, d, layout, inverse in (
        ("small", 2, 5, 2, 1, 16, "half", False), ("small-pairs", 1, 7, 3, 1, 32, "interleaved", True),
        ("heads", 1, 3, 5, 2, 64, "half", True), ("wide", 2, 9, 33, 8, 128, "half", False),
    ):
        places = np.asarray(rng.integers(0, 4096, (b, t)), np.int32)
        attrs: dict[str, object] = {"heads": h, "kv_heads": g, "base": 5e5, "layout": layout, "inverse": inverse}
        yield Sample(name=f"gpu-{name}", inputs=(rng.standard_normal((b, t, (h + 2 * g) * d)), places), attrs=attrs)


def _gelu(rng: np.random.Generator, back: bool, exact: bool) -> Iterable[Sample]:
    """Rows of whole vectors, which the row's own samples have none of."""
    tails = np.resize(np.r_[np.linspace(-12, 12, 97), 1e-30, -1e-30, 0.0, 40.0, -40.0], (4, 104))
    drawn = [("narrow", rng.standard_normal((37, 8))), ("wide", 3 * rng.standard_normal((3, 2056))), ("tails", tails)]
    drawn += [("blocks", 3 * rng.standard_normal((2, 5, 7, 1032)))]
    saturated = np.resize([64.0, 1024.0, -64.0, -1024.0], (3, 8))  # y is x or 0 and its slope 1 or 0, exactly
    for form in ("tanh", "none"):
        for name, x in [("saturated", saturated)] if exact else drawn:
            dy = rng.integers(-9, 9, x.shape).astype(float) if exact else rng.standard_normal(x.shape)
            yield Sample(name=f"gpu-{form}-{name}", inputs=(dy, x) if back else (x,), attrs={"approximate": form})


SAMPLES: Mapping[str, Make] = {
    "gelu": partial(_gelu, back=False, exact=False),
    "gelu_bwd": partial(_gelu, back=True, exact=False),
    "matmul": _matmul,
    "matmul_accumulate": _accumulate,
    "attention": _attention,
    "attention_bwd": _attention_bwd,
    "attention_packed": _packed,
    "attention_packed_bwd": _packed_bwd,
    "take_row": _take_row,
    "rope_packed": _rope,
}
"""Row -> its further samples. Evidence binds to a component's own entry (registry/package.py, BY_OP)."""

EXACT: Mapping[str, Make] = {
    "gelu": partial(_gelu, back=False, exact=True),
    "gelu_bwd": partial(_gelu, back=True, exact=True),
    "matmul": _matmul_exact,
    "matmul_accumulate": _accumulate_exact,
    "attention": _attention_exact,
    "attention_bwd": _attention_bwd_exact,
}
"""Row -> its further exact samples."""


def of(op: str, rng: np.random.Generator, which: str) -> list[Sample]:
    """The further 'samples' or 'exact' samples of a row; none for a row that is not listed."""
    make = (EXACT if which == "exact" else SAMPLES).get(op)
    return list(make(rng)) if make is not None else []
