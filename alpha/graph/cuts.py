"""Parts of a call that can be computed by themselves, so that a call of any size can be held against its oracle. Floor 2.

A *cut* says of each operand and each result what of it belongs to the part. The row's own oracle on the cut operands gives the cut results.
So a check costs by what it draws, not by the size of the call. Rows that are not in CUTS are computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from alpha.ops.global_norm import blocks
from alpha.ops.numerics import growth
from alpha.types import Attrs, TensorType

Take = Callable[[np.ndarray], np.ndarray]
"""The part of an array. It may be a view."""

MANY, RUNS, RUN, COLUMNS = 8, 16, 64, 8
"""How many rows are drawn; runs of neighbouring elements and their length; columns. The first and the last are always among them, where
sizes that nobody tried tend to go wrong."""

QUERIES, KEYS, SCORES = 4, 3, 1 << 18
"""Of attention with more scores than SCORES in what one key head sees, so many queries and keys are drawn: the walk that its tolerance is
made from takes all scores at once, minutes at a length of 4096."""

FEATURES = 64
"""Of a product with its activation so many features are drawn, for each of the drawn rows: its weight is too large to be walked whole."""

PIECE = 1 << 20
"""Elements that are squared at a time."""

CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gelu", "silu", "scale", "cast"), ("e>e",)),
    **dict.fromkeys(("add", "mul", "accumulate", "gelu_bwd", "silu_bwd", "swiglu"), ("ee>e",)),
    "swiglu_bwd": ("eee>ee",), "scale_by": ("ew>e",),
    "swiglu_packed": ("r>r",), "swiglu_packed_bwd": ("rr>r",),
    "layernorm": ("rww>rss",), "layernorm_bwd": ("rrwss>r..", "ccvff>.vv"),
    "layernorm_bwd_add": ("rrrwss>r..", "cccvff>.vv"), "add_layernorm": ("rrww>rrss",),
    "rmsnorm": ("rw>rs",), "rmsnorm_bwd": ("rrws>r.", "ccvf>.v"), "rmsnorm_bwd_add": ("rrrws>r.", "cccvf>.v"), "add_rmsnorm": ("rrw>rrs",),
    "cross_entropy": ("rs>ss",), "cross_entropy_bwd": ("srss>r",),
    "sum": ("c>v",), "sum_accumulate": ("vc>v",), "embedding_bwd": ("cf>c",), "embedding_bwd_accumulate": ("ccf>c",),
    "dropout": ("bwb>b",), "rope": ("bb>b",), "rope_packed": ("bb>b",), "attention": ("bbbbb>bb",), "attention_bwd": ("bbbbbbbb>bbb",),
    "embedding": ("ws>r",),
}  # fmt: skip
"""Row -> its cuts, a letter for each operand and result. w: whole; f: whole and flat; e: elements in runs; r: rows of the last axis; s: one
number a row; c: columns, the other axes as one; v: one number a column; b: one sample of the first axis; a dot: not in this part.
Operands that a call leaves out are the last ones, so their letters are left over."""


@dataclass(frozen=True)
class Part:
    """What of one call is computed by itself. `ins`: of each operand; `outs`: of each result, None for what is not in the part; `attrs`:
    those of the smaller call; `rows`: False where the part is the whole call. `op`: the row whose oracle gives it, '' for that of the call;
    then `of` says which operand of the call each of its own is taken from, and `to` which result each of its own is a part of. `apart`: of
    each result the relative error, in u, that the call may make and the smaller one has no room for; () for none."""

    ins: tuple[Take, ...]
    outs: tuple[Take | None, ...]
    attrs: Attrs
    rows: bool = True
    op: str = ""
    of: tuple[int, ...] = ()
    to: tuple[int, ...] = ()
    apart: tuple[float, ...] = ()

    def operands(self) -> tuple[int, ...]:
        """Of each operand of the part the call's."""
        return self.of or tuple(range(len(self.ins)))

    def results(self) -> tuple[int, ...]:
        """Of each result of the part the call's."""
        return self.to or tuple(range(len(self.outs)))


def parts(op: str, ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Attrs, rng: np.random.Generator) -> Iterator[Part]:
    """The parts of one call of row `op`, places drawn by `rng`; between them they look at every result."""
    if op in ("adamw", "sgd"):
        yield _of_update(ins, outs, attrs, rng)
    elif op == "square_sums":
        yield _of_leaves(outs, attrs, rng)
    elif op == "update_scalars":
        yield _of_norm(attrs)
    elif op in _FEATURES and not attrs.get("trans_a"):
        yield _of_features(op, ins, attrs, rng)
    elif op in _ATTENTION and scores_of(op, ins, attrs) > SCORES:
        yield from _of_long(op, ins, attrs, rng)
    elif op in ("attention_packed", "attention_packed_bwd"):
        yield _of_heads(op, ins, outs, attrs, rng)
    elif op in CUTS and _fits(op, ins, outs, attrs):
        for cut in CUTS[op]:
            yield _cut(op, cut, ins, outs, attrs, rng)
    else:
        yield Part((_whole,) * len(ins), (_whole,) * len(outs), attrs, rows=False)


def _fits(op: str, ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Attrs) -> bool:
    """Whether this call has the form that the cuts of its row stand for: no broadcasting, no transposed left operand, no odd axes."""
    letters = CUTS[op][0].replace(">", "")
    sizes = {t.size for t, letter in zip((*ins, *outs), letters) if letter == "e"}
    axes = tuple(range(len(ins[-1].shape) - 1)) if op in ("sum", "sum_accumulate") else None
    return len(sizes) < 2 and not attrs.get("trans_a") and (axes is None or (attrs["axis"] == axes and not attrs.get("keepdims")))


def _cut(op: str, cut: str, ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Attrs, rng: np.random.Generator) -> Part:
    letters, results = cut.split(">")
    of = {letter: t for letter, t in reversed(list(zip(letters, ins)))}
    takes: dict[str, Take | None] = {".": None, "w": _whole, "f": lambda x: x.reshape(-1)}
    if "e" in of:
        at = runs(of["e"].size, rng)
        takes["e"] = lambda x: x.reshape(-1)[at]
    if "r" in results or "s" in results:
        rows = drawn(of["s"].size if "s" in of else of["r"].size // of["r"].shape[-1], MANY, rng)
        takes["r"], takes["s"] = (lambda x: x.reshape(-1, x.shape[-1])[rows]), (lambda x: x.reshape(-1)[rows])
    if "c" in of:
        columns = drawn(of["c"].shape[-1], COLUMNS, rng)
        takes["c"], takes["v"] = (lambda x: x.reshape(-1, x.shape[-1])[:, columns]), (lambda x: x[columns])
        attrs = {**attrs, "axis": (0,)} if op in ("sum", "sum_accumulate") else attrs
    if "b" in of:
        sample = int(rng.integers(of["b"].shape[0]))
        takes["b"] = lambda x: x[sample : sample + 1]
    inputs = tuple(takes[letter] for letter, _ in zip(letters, ins))
    return Part(inputs, tuple(takes[letter] for letter in results), attrs)  # type: ignore[arg-type]


def _of_update(ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Attrs, rng: np.random.Generator) -> Part:
    """Elements of flat buffers, each a segment of its own."""
    n = ins[0].shape[0]
    at = runs(n, rng)
    segments: list[tuple[int, int, float, float]] = []
    ordered = sorted(attrs["segments"])  # type: ignore[call-overload]
    starts = np.array([s[0] for s in ordered], np.int64)
    for i, place in enumerate(at.tolist()):
        k = int(np.searchsorted(starts, place, side="right")) - 1
        if k >= 0 and place < ordered[k][0] + ordered[k][1]:
            segments.append((i, 1, *ordered[k][2:]))

    def take(x: np.ndarray) -> np.ndarray:
        return x if x.shape == () else x[at]

    return Part((take,) * len(ins), (take,) * len(outs), {**attrs, "segments": tuple(segments)})


def _of_leaves(outs: Sequence[TensorType], attrs: Attrs, rng: np.random.Generator) -> Part:
    """Some leaves of a flat buffer, their runs one after the other."""
    leaves: tuple[tuple[tuple[int, int], ...], ...] = attrs["leaves"]  # type: ignore[assignment]
    chosen = drawn(outs[0].shape[0], MANY, rng)
    moved, pieces, end = [], [np.empty(0, np.int64)], 0
    for i in chosen.tolist():
        own = []
        for start, length in leaves[i]:
            pieces.append(np.arange(start, start + length))
            own.append((end, length))
            end += length
        moved.append(tuple(own))
    at = np.concatenate(pieces)
    return Part((lambda x: x[at],), (lambda x: x[chosen],), {**attrs, "leaves": tuple(moved)})


_FEATURES = {"linear_gelu": "xwv>ff", "linear_swiglu": "xw>gf", "matmul_gelu_bwd": "xwf>f"}
"""Products with an activation. x: rows of the left factor; w: the drawn features of the right one; v: one number a feature; f: rows and
features; g: the same of gate and up side by side."""


def _sides(op: str, attrs: Attrs) -> tuple[int, int]:
    """The weight's axis of features, and how many lie side by side for each."""
    return 0 if attrs.get("trans_b") else 1, 1 + ("g" in _FEATURES[op])


def _of_features(op: str, ins: Sequence[TensorType], attrs: Attrs, rng: np.random.Generator) -> Part:
    """Some rows, of them some features: what a product's activation makes of it."""
    (letters, results), axis, sides = _FEATURES[op].split(">"), *_sides(op, attrs)
    many = ins[1].shape[axis] // sides
    rows, one = drawn(ins[0].size // ins[0].shape[-1], MANY, rng), drawn(many, FEATURES, rng)
    each = np.concatenate([one + i * many for i in range(sides)])
    takes: dict[str, Take] = {
        "x": lambda x: x.reshape(-1, x.shape[-1])[rows], "w": lambda x: x[each] if axis == 0 else x[:, each], "v": lambda x: x[one],
        "f": lambda x: x.reshape(-1, x.shape[-1])[rows][:, one], "g": lambda x: x.reshape(-1, x.shape[-1])[rows][:, each],
    }
    return Part(tuple(takes[letter] for letter, _ in zip(letters, ins)), tuple(takes[letter] for letter in results), attrs)


def _of_norm(attrs: Attrs) -> Part:
    """One element for each segment of the gradient, the root of what its squares sum to: their norm is that of the whole. So the gradient,
    as large as the model, is read once and not held in float64."""
    segments: tuple[tuple[int, int], ...] = attrs["segments"]  # type: ignore[assignment]
    cut = blocks(segments)
    within = growth(max((stop - start for start, stop in cut), default=0)) + len(cut).bit_length()  # the root halves it, as the row says
    smaller: Attrs = {**attrs, "segments": tuple((i, 1) for i in range(len(segments)))}
    return Part((lambda x: np.sqrt(squares(x, segments)), _whole, _whole, _whole), (_whole,) * 7, smaller, rows=False,
                apart=(within / 2,) * 3 + (0.0,) * 4)


def squares(x: np.ndarray, segments: Sequence[tuple[int, int]]) -> np.ndarray:
    """float64[segments]: the sum of squares of each (offset, length) of a flat array."""
    if hasattr(x, "squares"):  # it lies on a device
        return x.squares(segments)  # type: ignore[no-any-return]
    ends = [range(start, start + length, PIECE) for start, length in segments]
    return np.array([sum(float(np.square(x[at : min(at + PIECE, own.stop)], dtype=np.float64).sum()) for at in own) for own in ends])


def _of_heads(op: str, ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Attrs, rng: np.random.Generator) -> Part:
    """One sample, of it one key head with its query heads: columns of the packed operands."""
    heads, groups = int(attrs["heads"]), int(attrs["kv_heads"])  # type: ignore[call-overload]
    batch, _, width = ins[op == "attention_packed_bwd"].shape
    d, each = width // (heads + 2 * groups), heads // groups
    b, g = int(rng.integers(batch)), int(rng.integers(groups))
    first = np.array([*range(g * each, (g + 1) * each), heads + g, heads + groups + g])
    packed = (first[:, None] * d + np.arange(d)).reshape(-1)

    def columns(n: int) -> Take:
        return lambda x: x[b : b + 1][:, :, packed[:n]]

    def sample(x: np.ndarray) -> np.ndarray:
        return x[b : b + 1]

    def rows(lse: np.ndarray) -> np.ndarray:
        return lse[b : b + 1, g * each : (g + 1) * each]

    all_, queries = columns(packed.size), columns(each * d)
    forward = op == "attention_packed"
    takes = (all_, *(sample for _ in ins[1:])) if forward else (queries, all_, queries, rows, *(sample for _ in ins[4:]))
    return Part(takes, (queries, rows) if forward else (all_,), {**attrs, "heads": each, "kv_heads": 1})


_ATTENTION = ("attention", "attention_bwd", "attention_packed", "attention_packed_bwd")


def scores_of(op: str, ins: Sequence[TensorType], attrs: Attrs) -> int:
    """Scores of one sample and one key head's queries."""
    if op in ("attention_packed", "attention_packed_bwd"):
        return int(attrs["heads"]) // int(attrs["kv_heads"]) * ins[0].shape[1] ** 2  # type: ignore[call-overload]
    q, k = ins[op == "attention_bwd"], ins[1 + (op == "attention_bwd")]
    return q.shape[1] * k.shape[1] * q.shape[2] // k.shape[2]


def _of_long(op: str, ins: Sequence[TensorType], attrs: Attrs, rng: np.random.Generator) -> Iterator[Part]:
    """Of one sample and key head: single queries among the keys that they see, and, of the backward, single keys among the queries that see
    them. Given lse and o, neither asks for more. Causal and window are in what is taken, so the smaller calls have neither."""
    packed, back = "packed" in op, op.endswith("_bwd")
    if packed:
        heads, groups = int(attrs["heads"]), int(attrs["kv_heads"])  # type: ignore[call-overload]
        batch, t, width = ins[back].shape
        s, d = t, width // (heads + 2 * groups)
    else:
        (batch, t, heads, d), (_, s, groups, _) = ins[back].shape, ins[1 + back].shape
    each, b, g = heads // groups, int(rng.integers(batch)), int(rng.integers(groups))
    mine = slice(g * each, (g + 1) * each)
    causal, window = bool(attrs["causal"]), int(attrs["window"])  # type: ignore[call-overload]
    smaller: Attrs = {"causal": False, "window": 0, "scale": attrs["scale"]}

    def heads_of(first: int, many: int, at: slice) -> Take:
        """[B, n, heads, D] of some rows: columns of a packed operand, or heads of one of four axes."""
        def take(x: np.ndarray) -> np.ndarray:
            if x.ndim == 4:
                return x[b : b + 1, at, first : first + many]
            found = np.asarray(x[b : b + 1, at, first * d : (first + many) * d])
            return found.reshape(1, found.shape[1], many, d)
        return take

    def part(queries: slice, keys: slice, results: tuple[bool, ...]) -> Part:
        def lse(x: np.ndarray) -> np.ndarray:
            return x[b : b + 1, mine, queries]

        q = heads_of(g * each, each, queries)
        k, v = (heads_of(heads + g, 1, keys), heads_of(heads + groups + g, 1, keys)) if packed else (heads_of(g, 1, keys),) * 2
        documents = ((lambda x: x[b : b + 1, queries]), (lambda x: x[b : b + 1, keys]))
        of = ((0, 1, 1, 1, 2, 3) if back else (0, 0, 0)) if packed else tuple(range(6 if back else 3))
        more = documents if len(ins) > max(of) + 1 else ()
        of = (*of, *range(max(of) + 1, max(of) + 1 + len(more)))
        if not back:
            return Part((q, k, v, *more), (q, lse), smaller, op="attention", of=of, to=(0, 1))
        outs = tuple(take if asked else None for take, asked in zip((q, k, v), results))
        return Part((q, q, k, v, q, lse, *more), outs, smaller, op="attention_bwd", of=of, to=(0, 0, 0) if packed else (0, 1, 2))

    for i in drawn(t, QUERIES, rng).tolist():
        place = i + s - t
        first, stop = max(0, place - window + 1) if window else 0, min(s, place + 1) if causal else s
        if stop > first:
            yield part(slice(i, i + 1), slice(first, stop), (True, False, False))
    for j in drawn(s, KEYS, rng).tolist() if back else ():
        first, stop = max(0, j - (s - t)) if causal else 0, min(t, j - (s - t) + window) if window else t
        if stop > first:
            yield part(slice(first, stop), slice(j, j + 1), (False, True, True))


def widened(op: str, ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Attrs) -> int:
    """Elements of operands and results that the parts of a call hold at once beyond what is drawn: whole operands, scores of attention."""
    if op in ("adamw", "sgd", "square_sums", "update_scalars", "embedding"):
        return 0
    if op in _FEATURES and not attrs.get("trans_a"):
        axis, sides = _sides(op, attrs)
        return sides * min(FEATURES, ins[1].shape[axis] // sides) * ins[1].shape[1 - axis]
    if op in _ATTENTION and scores_of(op, ins, attrs) > SCORES:
        return 8 * max(t.shape[1] for t in ins if len(t.shape) > 2) * max(t.shape[-1] for t in ins)
    if op in ("attention_packed", "attention_packed_bwd"):
        length = ins[0].shape[1]
        return int(attrs["heads"]) // int(attrs["kv_heads"]) * length * length  # type: ignore[call-overload]
    if op not in CUTS or not _fits(op, ins, outs, attrs):
        return sum(t.size for t in (*ins, *outs))
    samples = {letter: t.size // t.shape[0] for letter, t in zip(CUTS[op][0], ins) if letter == "b"}
    if op in ("attention", "attention_bwd"):
        samples["scores"] = scores_of(op, ins, attrs) * ins[1 + (op == "attention_bwd")].shape[2]
    return sum(samples.values()) + sum(t.size for letter, t in zip(CUTS[op][0], ins) if letter in "wf")


def _whole(x: np.ndarray) -> np.ndarray:
    return x


def drawn(n: int, many: int, rng: np.random.Generator) -> np.ndarray:
    """`many` of n indices, the first and the last among them, rising; all of them where there are no more."""
    return np.arange(n) if n <= many else np.unique([0, n - 1, *rng.integers(0, n, many - 2)])


def runs(n: int, rng: np.random.Generator) -> np.ndarray:
    """Indices of RUNS runs of RUN neighbours among n, those at both ends among them, rising."""
    if n <= RUNS * RUN:
        return np.arange(n)
    starts = drawn(n - RUN + 1, RUNS, rng)
    return np.unique(starts[:, None] + np.arange(RUN))
