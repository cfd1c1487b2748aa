"""Samples between which the choice of a compiled file moves, for kernels that choose it from a width, a number of heads or a vocabulary.
Floor 7.

A row's own samples are narrow: of a dozen compiled files of a normalisation they launch two. Here every file is launched;
suites/unit/test_cuda_faults.py counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from alpha.ops.spec import Sample
from alpha.ops.table import row

Make = Callable[[str, np.random.Generator], Iterable[Sample]]

NORMS = (256, 512, 768, 1016, 1280, 1536, 1792, 2048, 2304, 2816, 3072, 3328, 4096, 4352, 4864, 5120, 5376, 5888, 6144, 6656, 7168, 7680,
         8192)
"""Widths: a warp's 16-byte vectors one by one, then warp after warp of a team."""

HEADS = (2, 6, 10, 14, 18, 40)
TABLES = (264, 520, 776, 1032)
VOCABULARIES = (53, 1027, 3067, 3077, 5117, 5125, 7163, 7171, 9001, 10243, 14331, 14347, 18427, 18435, 22523, 22531, 25003, 28675, 36859,
                36867, 45051, 45061, 53243, 53251, 65531, 65541, 81917, 81923, 98299, 98309, 114683, 114691, 131067)
"""One for each form of cross entropy with gradients, near either end of the form's range in turn; off the multiples of 8, so that the last
vector of a row is partly padding."""


def _norm(op: str, rng: np.random.Generator) -> Iterable[Sample]:
    layer, add, back = "layer" in op, op.startswith("add_") or op.endswith("_add"), "_bwd" in op
    for width in NORMS:
        x, y = rng.standard_normal((2, 11, width))
        gamma, beta = 1 + 0.5 * rng.standard_normal((2, width))
        if back:
            base = "layernorm" if layer else "rmsnorm"
            kept = row(base).oracle(x, gamma, *([beta] if layer else []), eps=1e-5)[1:]
            residual = [rng.standard_normal(x.shape)] if add else []
            yield Sample(name=f"gpu-{width}", inputs=(*residual, y, x, gamma, *kept), attrs={})
        else:
            yield Sample(name=f"gpu-{width}", inputs=(x, *([y] if add else []), gamma, *([beta] if layer else [])), attrs={"eps": 1e-5})


def _rope(op: str, rng: np.random.Generator) -> Iterable[Sample]:
    for heads in HEADS:
        for layout in ("half", "interleaved"):
            for inverse in (False, True):
                attrs: dict[str, object] = {"heads": heads, "kv_heads": 1, "base": 1e4, "layout": layout, "inverse": inverse}
                places = np.asarray(rng.integers(0, 64, (1, 3)), np.int32)
                yield Sample(name=f"gpu-{heads}-{layout}{'-back' if inverse else ''}", attrs=attrs,
                             inputs=(rng.standard_normal((1, 3, (heads + 2) * 128)), places))


def _ids(rng: np.random.Generator, n: int, vocab: int) -> np.ndarray:
    """Ids of which 0 comes often enough to be cut into pieces, 1 into one."""
    ids = rng.integers(2, vocab, n).astype(np.int32)
    ids[rng.permutation(n)[: n // 2]] = 0
    ids[rng.permutation(n)[: n // 6]] = 1
    return ids


def _embedding(op: str, rng: np.random.Generator) -> Iterable[Sample]:
    for width in TABLES:
        n = 21 if width < TABLES[-1] else 70  # the widest has more elements than 16 bits count
        table, ids = rng.standard_normal((9, width)), rng.integers(0, 9, n).astype(np.int32)
        more = (rng.standard_normal((5, width)), rng.integers(0, 5, n).astype(np.int32)) if op == "embedding_add" else ()
        if op == "take_row":
            yield Sample(name=f"gpu-{width}", inputs=(table[None], ids[:1]), attrs={})
        elif "_bwd" not in op:
            yield Sample(name=f"gpu-{width}", inputs=(table, ids, *more), attrs={})
        else:
            n = 700 if width == TABLES[0] else 24
            into = (rng.standard_normal((11, width)),) if op.endswith("_accumulate") else ()
            yield Sample(name=f"gpu-{width}", inputs=(*into, rng.standard_normal((n, width)), _ids(rng, n, 11)), attrs={"vocab": 11})


def _loss(op: str, rng: np.random.Generator) -> Iterable[Sample]:
    for v in VOCABULARIES:
        targets = rng.integers(0, v, 5).astype(np.int32)
        targets[1] = -1
        yield Sample(name=f"gpu-{v}", attrs={"ignore_index": -1, "z_loss": 1e-3, "chunk": 2},
                     inputs=(rng.standard_normal((5, 8)), rng.standard_normal((v, 8)), targets))


def _dropout(op: str, rng: np.random.Generator) -> Iterable[Sample]:
    """Whole vectors, which the row's samples have none of."""
    for name, shape, first in (("whole", (3, 1032), 4), ("whole-narrow", (37, 8), 0)):
        ids = first + rng.permutation(3 * shape[0])[: shape[0]]
        yield Sample(name=f"gpu-{name}", inputs=(rng.standard_normal(shape), np.array(9, np.int32), ids.astype(np.int32)),
                     attrs={"rate": 0.2, "seed": 77, "purpose": 3})


SAMPLES: Mapping[str, Make] = {
    "layernorm": _norm,
    "rmsnorm": _norm,
    "add_layernorm": _norm,
    "add_rmsnorm": _norm,
    "layernorm_bwd": _norm,
    "rmsnorm_bwd": _norm,
    "layernorm_bwd_add": _norm,
    "rmsnorm_bwd_add": _norm,
    "embedding": _embedding,
    "embedding_add": _embedding,
    "take_row": _embedding,
    "embedding_bwd": _embedding,
    "embedding_bwd_accumulate": _embedding,
    "linear_cross_entropy": _loss,
    "linear_cross_entropy_grad": _loss,
    "rope_packed": _rope,
    "dropout": _dropout,
}
"""Row -> its samples, made from its name. Evidence binds to a component's own entry (registry/package.py, BY_OP)."""


def of(op: str, rng: np.random.Generator, which: str) -> list[Sample]:
    """Further samples of a row; none for the exact ones, and none for a row that is not listed."""
    make = SAMPLES.get(op)
    return list(make(op, rng)) if make is not None and which == "samples" else []
