"""Collectives: rows that all members of a group run together, each on operands of its own. Floor 1.

Words. A *group* is a name; it parts the ranks into tuples, and the *members* are those of the caller's tuple, `size` of them, in order.
`root`, `to` and `source` are places in that tuple. Pieces are equal runs along the first axis, one for each member.

Bits. Sums are added in the tree of the members: the left half of n is the largest power of two below n. 16-bit operands are widened, every
partial sum is float32, also when it is sent, and the end is rounded once. An average is the tree's sum and one division. A sum that is no
number is the canonical quiet NaN. So every member gets the same bits, whatever the algorithm. What is only moved keeps its bits.

A row's `across` says what all members get, from all their operands. It is written once: on float64 arrays it is the oracle, on the host's
own arrays it has the promised bits (`promised`). A send and its receive are one exchange of two members, the sender first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from alpha.errors import ShapeError
from alpha.ops.numerics import round_to
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect
from alpha.types import FLOATS, ITEMSIZE, NUMPY, Attrs, TensorType

REDUCTIONS = ("sum", "average")
SUMS = ("all_reduce", "reduce_scatter", "reduce")
ALGORITHMS = ("direct", "halving", "ring")
"""direct: an owner loads what all members have of its piece. halving: recursive halving and doubling, nearest neighbour first. ring: each
member hands on what its neighbour gave; for what is only moved, because its sums would depend on the owner."""

Members = Sequence[Arrays]
"""Operands, or results, of every member, in the group's order."""


# -- what all members get --------------------------------------------------------------------------------------------------------


def tree_sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of one array or more in the tree of n: left half the largest power of two below n. Partials have the arrays' own type."""
    n = len(parts)
    if n == 1:
        return parts[0]
    half = 1 << ((n - 1).bit_length() - 1)
    return tree_sum(parts[:half]) + tree_sum(parts[half:])


def _reduced(parts: Sequence[np.ndarray], reduce: str) -> np.ndarray:
    """Sum or average, canonical where it is no number."""
    total = tree_sum(parts)
    if total.dtype.kind != "f":
        return total
    y = total / len(parts) if reduce == "average" else total
    return np.where(np.isnan(y), np.nan, y)


def _pieces(x: np.ndarray, size: int) -> list[np.ndarray]:
    n = x.shape[0] // size
    return [x[i * n : (i + 1) * n] for i in range(size)]


def _whole(members: Members, size: int) -> None:
    if len(members) != size:
        raise ShapeError("a collective takes the operands of every member", came=f"{len(members)} of {size} members", expected=size,
                         do="ask `across` with all members; the oracle of one row stands for a group of one")


def _across_all_reduce(members: Members, *, group: str, size: int, reduce: str) -> Members:
    _whole(members, size)
    y = _reduced([x for x, in members], reduce)
    return [(y,)] * size


def _across_reduce_scatter(members: Members, *, group: str, size: int, reduce: str) -> Members:
    _whole(members, size)
    return [(y,) for y in _pieces(_reduced([x for x, in members], reduce), size)]


def _across_all_gather(members: Members, *, group: str, size: int) -> Members:
    _whole(members, size)
    y = np.concatenate([x for x, in members])
    return [(y,)] * size


def _across_broadcast(members: Members, *, group: str, size: int, root: int) -> Members:
    _whole(members, size)
    return [members[root]] * size


def _across_reduce(members: Members, *, group: str, size: int, root: int) -> Members:
    _whole(members, size)
    y = _reduced([x for x, in members], "sum")
    return [(y if i == root else np.zeros_like(y),) for i in range(size)]


def _across_all_to_all(members: Members, *, group: str, size: int) -> Members:
    _whole(members, size)
    cut = [_pieces(x, size) for x, in members]
    return [(np.concatenate([pieces[i] for pieces in cut]),) for i in range(size)]


def _across_barrier(members: Members, *, group: str, size: int) -> Members:
    _whole(members, size)
    return [()] * size


def _across_send(members: Members, *, group: str, size: int, to: int) -> Members:
    return _exchanged(members)


def _across_receive(members: Members, *, group: str, size: int, source: int, shape: tuple[int, ...], dtype: str) -> Members:
    return _exchanged(members)


def _exchanged(members: Members) -> Members:
    """Of the sender and the receiver: the sender has no result."""
    _whole(members, 2)
    return [(), members[0]]


def promised(spec: OpSpec, members: Members, types: Sequence[TensorType], attrs: Attrs) -> list[Arrays]:
    """The bits that every member owes: new arrays.

    `members`: the operands of all, in the host's types (bf16: float32 that bf16 holds); `types`: of one member's operands. Partial sums
    have the host's type, which for 16 bits is float32.
    """
    assert spec.across is not None
    with np.errstate(all="ignore"):
        results = spec.across(members, **attrs)
    rounded = spec.name in SUMS and types[0].dtype == "bf16"
    return [tuple(round_to(y, "bf16").astype(np.float32) if rounded else np.array(y) for y in ys) for ys in results]


# -- one member alone ------------------------------------------------------------------------------------------------------------


def _oracle_all_reduce(x: np.ndarray, *, group: str, size: int, reduce: str) -> Arrays:
    return _across_all_reduce([(x,)], group=group, size=size, reduce=reduce)[0]


def _oracle_reduce_scatter(x: np.ndarray, *, group: str, size: int, reduce: str) -> Arrays:
    return _across_reduce_scatter([(x,)], group=group, size=size, reduce=reduce)[0]


def _oracle_all_gather(x: np.ndarray, *, group: str, size: int) -> Arrays:
    return _across_all_gather([(x,)], group=group, size=size)[0]


def _oracle_broadcast(x: np.ndarray, *, group: str, size: int, root: int) -> Arrays:
    return _across_broadcast([(x,)], group=group, size=size, root=root)[0]


def _oracle_reduce(x: np.ndarray, *, group: str, size: int, root: int) -> Arrays:
    return _across_reduce([(x,)], group=group, size=size, root=root)[0]


def _oracle_all_to_all(x: np.ndarray, *, group: str, size: int) -> Arrays:
    return _across_all_to_all([(x,)], group=group, size=size)[0]


def _oracle_barrier(*, group: str, size: int) -> Arrays:
    return _across_barrier([()], group=group, size=size)[0]


def _oracle_send(x: np.ndarray, *, group: str, size: int, to: int) -> Arrays:
    return _across_send([(x,)], group=group, size=size, to=to)[0]


def _oracle_receive(*, group: str, size: int, source: int, shape: tuple[int, ...], dtype: str) -> Arrays:
    return _across_receive([()], group=group, size=size, source=source, shape=shape, dtype=dtype)[1]


# -- shapes, derivatives, costs --------------------------------------------------------------------------------------------------


def _common(op: str, attrs: Attrs, place: str = "") -> int:
    """The number of members, when group, size and the place named `place` are sound."""
    group, size = attrs["group"], attrs["size"]
    expect(isinstance(group, str) and group != "", op, "group is a name", repr(group), "a name such as 'dp'")
    expect(type(size) is int and size >= 1, op, "size counts the members of the caller's tuple", repr(size), "an integer from 1")
    if place:
        at = attrs[place]
        expect(type(at) is int and 0 <= at < size, op, f"{place} is the place of a member", repr(at),  # type: ignore[operator]
               f"an integer from 0 to {size - 1}")  # type: ignore[operator]
    return size  # type: ignore[return-value]


def _summed(op: str, x: TensorType, reduce: object) -> None:
    expect(reduce in REDUCTIONS, op, "reduce says what becomes of the operands", repr(reduce), " or ".join(REDUCTIONS))
    expect(x.dtype != "bool", op, "what is summed are numbers", x, "floats or integers")
    expect(x.is_float or reduce == "sum", op, "an average is taken of floats", x, "a float type, or reduce = 'sum'")


def _cut(op: str, x: TensorType, size: int) -> int:
    expect(len(x.shape) >= 1 and x.shape[0] % size == 0, op, "the first axis is cut in equal pieces, one for each member", x,
           f"a first axis that {size} divides")
    return x.shape[0] // size


def _infer_all_reduce(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _common("all_reduce", attrs)
    _summed("all_reduce", types[0], attrs["reduce"])
    return (types[0],)


def _infer_reduce_scatter(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    (x,), size = types, _common("reduce_scatter", attrs)
    _summed("reduce_scatter", x, attrs["reduce"])
    return (TensorType((_cut("reduce_scatter", x, size), *x.shape[1:]), x.dtype),)


def _infer_all_gather(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    (x,), size = types, _common("all_gather", attrs)
    expect(len(x.shape) >= 1, "all_gather", "there is an axis to join along", x, "a tensor of one axis or more")
    return (TensorType((x.shape[0] * size, *x.shape[1:]), x.dtype),)


def _infer_broadcast(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _common("broadcast", attrs, "root")
    return (types[0],)


def _infer_reduce(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _common("reduce", attrs, "root")
    _summed("reduce", types[0], "sum")
    return (types[0],)


def _infer_all_to_all(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _cut("all_to_all", types[0], _common("all_to_all", attrs))
    return (types[0],)


def _infer_barrier(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _common("barrier", attrs)
    return ()


def _infer_send(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _common("send", attrs, "to")
    return ()


def _infer_receive(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    _common("receive", attrs, "source")
    return (TensorType(tuple(attrs["shape"]), str(attrs["dtype"])),)  # type: ignore[arg-type]


def _of(node: NodeLike) -> dict[str, object]:
    return {"group": node.attrs["group"], "size": node.attrs["size"]}


def _vjp_all_reduce(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("all_reduce", dy[0], **_of(node), reduce=node.attrs["reduce"]),)  # type: ignore[arg-type]


def _vjp_reduce_scatter(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    dx = emit("all_gather", dy[0], **_of(node))  # type: ignore[arg-type]
    if node.attrs["reduce"] == "average":
        dx = emit("scale", dx, factor=1 / node.attrs["size"])  # type: ignore[arg-type, operator]
    return (dx,)


def _vjp_all_gather(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("reduce_scatter", dy[0], **_of(node), reduce="sum"),)  # type: ignore[arg-type]


def _vjp_broadcast(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("reduce", dy[0], **_of(node), root=node.attrs["root"]),)  # type: ignore[arg-type]


def _vjp_reduce(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("broadcast", dy[0], **_of(node), root=node.attrs["root"]),)  # type: ignore[arg-type]


def _vjp_all_to_all(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("all_to_all", dy[0], **_of(node)),)  # type: ignore[arg-type]


def _vjp_send(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    x = node.inputs[0].type
    return (emit("receive", **_of(node), source=node.attrs["to"], shape=x.shape, dtype=x.dtype),)


def _vjp_receive(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    emit("send", dy[0], **_of(node), to=node.attrs["source"])  # type: ignore[arg-type]
    return ()


def _additions(types: Sequence[TensorType], attrs: Attrs) -> int:
    """One member's even share of the tree's additions, and of an average's divisions."""
    size: int = attrs["size"]  # type: ignore[assignment]
    each = size - 1 + (attrs.get("reduce", "sum") == "average")
    return -(-types[0].size * each // size)


def _none(types: Sequence[TensorType], attrs: Attrs) -> int:
    return 0


def wire_bytes(op: str, types: Sequence[TensorType], attrs: Attrs, algorithm: str) -> int:
    """Bytes that the busiest member sends in one call, headers apart. `types`: of its operands. ShapeError for an unknown algorithm.

    With n bytes of operand and p members: a reduce-scatter sends (p - 1)/p n, an all-gather (p - 1) n, an all-reduce one after the other
    (Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, IJHPCA 19(1), 2005, section 4).
    Recursive halving sends partial sums, which are float32 where the operand has 16 bits. A broadcast's root sends p - 1 times directly,
    log2 p times by doubling, and once around a ring.
    """
    if algorithm not in ALGORITHMS:
        raise ShapeError("unknown algorithm of a collective", came=algorithm, expected=", ".join(ALGORITHMS))
    size: int = attrs["size"]  # type: ignore[assignment]
    n = types[0].nbytes if types else 0
    partial_sums = n * ITEMSIZE["f32"] // ITEMSIZE["bf16"] if types and types[0].dtype == "bf16" and algorithm == "halving" else n
    others = size - 1
    scatter, gather = -(-partial_sums * others // size), -(-n * others // size)
    doublings = others.bit_length()
    return {
        "all_reduce": scatter + gather, "reduce_scatter": scatter, "all_gather": n * others, "all_to_all": gather,
        "broadcast": n * {"direct": others, "halving": doublings, "ring": min(others, 1)}[algorithm],
        "reduce": partial_sums * min(others, 1), "send": n, "receive": 0, "barrier": 0,
    }[op]


# -- samples ---------------------------------------------------------------------------------------------------------------------

_COUNTS = (("one", 1), ("prime", 31), ("ragged", 601), ("block-1", 8191), ("block+1", 8193), ("blocks", 43777))
"""Elements of a piece: one, primes, either side of a block."""

_BY_PIECE = ("reduce_scatter", "all_to_all")


def drawn(op: str, rng: np.random.Generator, *, size: int = 1, exact: bool = False) -> Iterator[Sample]:
    """One member's samples of a collective among `size` members: names, shapes and attributes hang on `op`, `size` and `exact` alone, so
    members draw theirs each from a generator of its own. Exact: integers, whose sums f32 holds, and integers of machine types."""
    if op == "barrier":
        yield Sample(name="all", inputs=(), attrs=_attributes(op, size, 0, ()))
        return
    for i, (name, n) in enumerate((("empty", 0), *_COUNTS)):
        count = n * size if op in _BY_PIECE else n
        attrs = _attributes(op, size, i, (count,))
        x = rng.integers(-99, 100, count).astype(float) if exact else rng.standard_normal(count)
        yield Sample(name=name, inputs=_operands(op, x), attrs=attrs)
    if exact:
        whole = rng.integers(-(1 << 30), 1 << 30, (size * 7, 3))
        for dtype in ("i32", "i64"):
            x = (whole // size).astype(NUMPY[dtype])
            yield Sample(name=dtype, inputs=_operands(op, x), attrs=_attributes(op, size, 0, x.shape, dtype))
        return
    for i, (name, x) in enumerate((("equal", np.full(33 * size, 0.1)), ("large", 1e37 / size * rng.standard_normal(7 * size)),
                                   ("tiny", 1e-40 * rng.standard_normal(7 * size)), ("rows", rng.standard_normal((5 * size, 13))))):
        yield Sample(name=name, inputs=_operands(op, x), attrs=_attributes(op, size, i, x.shape))


def _operands(op: str, x: np.ndarray) -> Arrays:
    return () if op == "receive" else (x,)


def _attributes(op: str, size: int, i: int, shape: tuple[int, ...], dtype: str = "f32") -> dict[str, object]:
    """Attributes of sample number `i`: places and reductions take turns; integers are summed."""
    attrs: dict[str, object] = {"group": "dp", "size": size}
    if op in ("all_reduce", "reduce_scatter"):
        attrs["reduce"] = REDUCTIONS[i % 2] if dtype in FLOATS else "sum"
    elif op in ("broadcast", "reduce"):
        attrs["root"] = (size - 1, 0, size // 2)[i % 3]
    elif op == "send":
        attrs["to"] = size - 1
    elif op == "receive":
        attrs |= {"source": 0, "shape": shape, "dtype": dtype}
    return attrs


def _row(op: str, infer: Callable[..., tuple[TensorType, ...]], oracle: Callable[..., Arrays], across: Callable[..., Members],
         vjp: Callable[[Emit, NodeLike, Sequence[object]], Sequence[object]] | None, *, why_no_vjp: str = "",
         inputs: tuple[str, ...] = ("x",), outputs: tuple[str, ...] = ("y",), size: int = 1) -> OpSpec:
    return OpSpec(name=op, inputs=inputs, outputs=outputs, infer=infer, oracle=oracle, across=across, vjp=vjp, why_no_vjp=why_no_vjp,
                  flops=_additions if op in SUMS else _none, samples=partial(drawn, op, size=size),
                  exact=partial(drawn, op, size=size, exact=True))


ROWS = (
    _row("all_reduce", _infer_all_reduce, _oracle_all_reduce, _across_all_reduce, _vjp_all_reduce),
    _row("reduce_scatter", _infer_reduce_scatter, _oracle_reduce_scatter, _across_reduce_scatter, _vjp_reduce_scatter),
    _row("all_gather", _infer_all_gather, _oracle_all_gather, _across_all_gather, _vjp_all_gather),
    _row("broadcast", _infer_broadcast, _oracle_broadcast, _across_broadcast, _vjp_broadcast),
    _row("reduce", _infer_reduce, _oracle_reduce, _across_reduce, _vjp_reduce),
    _row("all_to_all", _infer_all_to_all, _oracle_all_to_all, _across_all_to_all, _vjp_all_to_all),
    _row("barrier", _infer_barrier, _oracle_barrier, _across_barrier, None, why_no_vjp="has no operands", inputs=(), outputs=()),
    _row("send", _infer_send, _oracle_send, _across_send, _vjp_send, outputs=(), size=2),
    _row("receive", _infer_receive, _oracle_receive, _across_receive, _vjp_receive, inputs=(), size=2),
)
