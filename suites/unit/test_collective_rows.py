"""The rows of collectives: what all members get, in float64 and in the promised bits, their derivatives and their costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from alpha.errors import ShapeError
from alpha.gates.evaluate import Value
from alpha.graph.trace import Tracer
from alpha.ops.collectives import ALGORITHMS, SUMS, drawn, promised, tree_sum, wire_bytes
from alpha.ops.numerics import round_to
from alpha.ops.spec import OpSpec
from alpha.ops.table import row, table
from alpha.types import TensorType

COLLECTIVES = tuple(name for name, spec in table().items() if spec.across is not None)
WHOLE = tuple(name for name in COLLECTIVES if name not in ("send", "receive"))
SIZES = (1, 2, 3, 4, 5, 7, 8)


def across(name: str, members: Sequence[tuple[np.ndarray, ...]], **attrs: Any) -> list[tuple[np.ndarray, ...]]:
    spec = row(name)
    assert spec.across is not None
    return [tuple(ys) for ys in spec.across(members, **attrs)]


def of(name: str, size: int, **attrs: Any) -> dict[str, Any]:
    return {"group": "dp", "size": size, **attrs}


def test_every_collective_has_its_row() -> None:
    assert set(COLLECTIVES) == {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "send", "receive",
                                "barrier"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WHOLE)
def test_members_draw_alike_and_get_what_the_row_infers(name: str, size: int) -> None:
    """Samples of all members agree but for contents; results have the inferred shapes; a sum is NumPy's but for roundings."""
    spec = row(name)
    for exact in (False, True):
        for case in zip(*(drawn(name, np.random.default_rng(k), size=size, exact=exact) for k in range(size)), strict=True):
            assert len({(s.name, repr(s.attrs), *(x.shape for x in s.inputs)) for s in case}) == 1
            types = [TensorType(x.shape, {"f": "f64", "i": f"i{8 * x.itemsize}"}[x.dtype.kind]) for x in case[0].inputs]
            members = [s.inputs for s in case]
            found = across(name, members, **case[0].attrs)
            assert [[y.shape for y in ys] for ys in found] == [[t.shape for t in spec.infer(types, case[0].attrs)]] * size
            if name in SUMS:
                plain = sum(x for x, in members) / (size if case[0].attrs.get("reduce") == "average" else 1)
                got = np.concatenate([y for y, in found]) if name == "reduce_scatter" else found[case[0].attrs.get("root", 0)][0]
                np.testing.assert_allclose(got, plain, rtol=1e-12, atol=1e-12 * np.abs(plain).max(initial=0.0))


def test_moved_pieces_go_where_they_belong() -> None:
    xs = [(np.arange(6.0) + 10 * k,) for k in range(3)]
    for y, in across("all_gather", xs, **of("all_gather", 3)):
        assert y.tolist() == [*range(6), *range(10, 16), *range(20, 26)]
    assert [y.tolist() for y, in across("all_to_all", xs, **of("all_to_all", 3))] == [
        [0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23], [4, 5, 14, 15, 24, 25]]
    assert [y.tolist() for y, in across("broadcast", xs, **of("broadcast", 3, root=1))] == [xs[1][0].tolist()] * 3
    assert [y.tolist() for y, in across("reduce", xs, **of("reduce", 3, root=2))] == [[0.0] * 6] * 2 + [[30 + 3 * i for i in range(6)]]
    assert [y.tolist() for y, in across("reduce_scatter", xs, **of("x", 3, reduce="sum"))] == [[30, 33], [36, 39], [42, 45]]
    for name in ("send", "receive"):
        attrs = {"to": 1} if name == "send" else {"source": 0, "shape": (6,), "dtype": "f32"}
        sent, got = across(name, [xs[0], ()], **of(name, 3, **attrs))
        assert sent == () and got[0].tolist() == xs[0][0].tolist()


@pytest.mark.parametrize("size", range(1, 18))
def test_the_tree(size: int) -> None:
    """The left half of n is the largest power of two below n, shown by the bracketing itself."""
    class Term(str):
        def __add__(self, other: str) -> Term:
            return Term(f"({self}{other})")

    def bracketed(lo: int, hi: int) -> str:
        n = hi - lo
        if n == 1:
            return chr(97 + lo)
        half = max(2**k for k in range(6) if 2**k < n)
        return f"({bracketed(lo, lo + half)}{bracketed(lo + half, hi)})"

    assert tree_sum([Term(chr(97 + k)) for k in range(size)]) == bracketed(0, size)  # type: ignore[comparison-overlap, misc]


def test_subtrees_of_shards_give_the_bits_of_all() -> None:
    """1, 2, 4 and 8 ranks that each add a subtree of 8 shards first: one result."""
    rng = np.random.default_rng(1)
    shards = [(rng.standard_normal(1001) * 10.0 ** rng.integers(-6, 6, 1001)).astype(np.float32) for _ in range(8)]
    found = set()
    for ranks in (1, 2, 4, 8):
        local = [tree_sum(shards[r * 8 // ranks : (r + 1) * 8 // ranks]) for r in range(ranks)]
        t = TensorType((1001,), "f32")
        found |= {ys[0].tobytes() for ys in promised(row("all_reduce"), [(x,) for x in local], [t], of("", ranks, reduce="sum"))}
    assert len(found) == 1
    assert tree_sum(shards).tobytes() in found != {sum(shards[1:], shards[0]).tobytes()}  # the order shows on these numbers


def test_promised_bits_of_bf16_are_rounded_once() -> None:
    """256 + 1 + 1: two roundings to bf16 would lose both ones."""
    xs = [(np.full(3, v, np.float32),) for v in (256.0, 1.0, 1.0)]
    t = [TensorType((3,), "bf16")]
    for ys in promised(row("all_reduce"), xs, t, of("", 3, reduce="sum")):
        assert ys[0].dtype == np.float32 and ys[0].tolist() == [258.0] * 3
    average = promised(row("all_reduce"), xs, t, of("", 3, reduce="average"))[0][0]
    assert average.tolist() == round_to(np.full(3, np.float32(258.0) / np.float32(3)), "bf16").tolist()


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_that_is_no_number_is_canonical(name: str) -> None:
    odd = np.array([0xFFC12345, 0x7FC00001], np.uint32).view(np.float32)
    attrs = of(name, 2, **({"root": 0} if name == "reduce" else {"reduce": "sum"}))
    for members in ([(odd,), (np.ones(2, np.float32),)], [(np.full(2, np.inf, np.float32),), (np.full(2, -np.inf, np.float32),)]):
        found = promised(row(name), members, [TensorType((2,), "f32")], attrs)
        assert set(found[0][0].view(np.uint32).tolist()) == {0x7FC00000}
    moved = promised(row("all_gather"), [(odd,), (odd,)], [TensorType((2,), "f32")], of("", 2))
    assert moved[1][0].view(np.uint32).tolist() == [0xFFC12345, 0x7FC00001] * 2


def test_integers_wrap_and_have_no_average() -> None:
    x = np.array([2**31 - 1], np.int32)
    t = [TensorType((1,), "i32")]
    assert promised(row("all_reduce"), [(x,), (x,)], t, of("", 2, reduce="sum"))[0][0].tolist() == [-2]
    with pytest.raises(ShapeError, match="average is taken of floats"):
        row("all_reduce").infer(t, of("", 2, reduce="average"))
    with pytest.raises(ShapeError, match="are numbers"):
        row("all_reduce").infer([TensorType((1,), "bool")], of("", 2, reduce="sum"))


@pytest.mark.parametrize("name", WHOLE)
def test_the_oracle_of_one_row_is_a_group_of_one(name: str) -> None:
    spec = row(name)
    for s in drawn(name, np.random.default_rng(3)):
        for y, x in zip(spec.oracle(*s.inputs, **s.attrs), s.inputs, strict=True):
            assert np.array_equal(y, x)
        with pytest.raises(ShapeError, match="every member"):
            spec.oracle(*s.inputs, **{**s.attrs, "size": 2})


def test_a_send_or_receive_alone_has_no_result() -> None:
    for name in ("send", "receive"):
        for s in drawn(name, np.random.default_rng(3), size=2):
            with pytest.raises(ShapeError, match="1 of 2 members"):
                row(name).oracle(*s.inputs, **s.attrs)


WRONG = (
    ("all_reduce", (4,), {"group": ""}), ("all_reduce", (4,), {"size": 0}), ("all_reduce", (4,), {"size": True}),
    ("all_reduce", (4,), {"reduce": "mean"}), ("reduce_scatter", (5,), {}), ("reduce_scatter", (), {}), ("all_to_all", (5,), {}),
    ("all_gather", (), {}), ("broadcast", (4,), {"root": 2}), ("broadcast", (4,), {"root": -1}), ("reduce", (4,), {"root": 2}),
    ("send", (4,), {"to": 2}), ("receive", None, {"source": 2}),
)


@pytest.mark.parametrize(("name", "shape", "wrong"), WRONG, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WRONG)])
def test_what_no_group_can_run_is_refused(name: str, shape: Any, wrong: dict[str, Any]) -> None:
    good = next(iter(drawn(name, np.random.default_rng(0), size=2))).attrs
    types = [] if shape is None else [TensorType(shape, "f32")]
    with pytest.raises(ShapeError, match=name):
        row(name).infer(types, {**good, **wrong})


class _World:
    """Emit of every member at once, in float64: values are lists over members."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, op: str, *inputs: Any, **attrs: Any) -> Any:
        spec = row(op)
        if spec.across is None:
            arrays = [spec.oracle(*(x.array for x in xs), **attrs)[0] for xs in zip(*(x.all for x in inputs), strict=True)]
        else:
            arrays = [ys[0] for ys in spec.across([tuple(x.array for x in xs) for xs in zip(*(x.all for x in inputs))], **attrs)]
        return _All([Value(TensorType(y.shape, "f64"), y) for y in arrays])


class _All:
    def __init__(self, each: list[Value]) -> None:
        self.all, self.type = each, each[0].type


@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize("name", [n for n in WHOLE if n != "barrier"])
def test_vjps_are_the_transposes(name: str, size: int) -> None:
    """<c, A x> = <A^T c, x> over all members together, for every sample: collectives are linear."""
    spec: OpSpec = row(name)
    rng = np.random.default_rng(size)
    for case in zip(*(drawn(name, np.random.default_rng(k), size=size) for k in range(size)), strict=True):
        if case[0].name in ("large", "tiny") or case[0].inputs[0].size > 10_000:
            continue
        xs, attrs = [s.inputs[0] for s in case], case[0].attrs
        ys = [y for y, in across(name, [(x,) for x in xs], **attrs)]
        cs = [rng.standard_normal(y.shape) for y in ys]
        node = type("Node", (), {"op": name, "attrs": attrs, "inputs": [_All([Value(TensorType(x.shape, "f64"), x) for x in xs])]})()
        assert spec.vjp is not None
        (back,) = spec.vjp(_World(size), node, [_All([Value(TensorType(c.shape, "f64"), c) for c in cs])])
        forth = sum(float(np.sum(c * y)) for c, y in zip(cs, ys))
        assert forth == pytest.approx(sum(float(np.sum(g.array * x)) for g, x in zip(back.all, xs)), rel=1e-9, abs=1e-9)


def test_send_and_receive_are_each_others_vjp() -> None:
    seen: list[str] = []

    def emit(op: str, *inputs: Any, **attrs: Any) -> Any:
        seen.append(op)
        return tuple(Value(t, np.zeros(t.shape)) for t in row(op).infer([v.type for v in inputs], attrs))

    x = Value(TensorType((3,), "f32"), np.zeros(3))
    node = type("Node", (), {"op": "send", "attrs": of("", 4, to=2), "inputs": [x]})()
    node.attrs["group"] = "pp"
    send, receive = row("send"), row("receive")
    assert send.vjp is not None and receive.vjp is not None
    ((dx,),) = send.vjp(emit, node, [])  # type: ignore[misc]
    assert isinstance(dx, Value) and dx.type == x.type
    node = type("Node", (), {"op": "receive", "attrs": of("", 4, source=1, shape=(3,), dtype="f32") | {"group": "pp"}, "inputs": []})()
    assert tuple(receive.vjp(emit, node, [x])) == () and seen == ["receive", "send"]


def test_costs() -> None:
    t = [TensorType((1000,), "f32")]
    attrs = of("", 4, reduce="sum")
    assert row("all_reduce").flops(t, attrs) == 750 and row("all_reduce").flops(t, {**attrs, "reduce": "average"}) == 1000
    assert row("all_gather").flops(t, of("", 4)) == 0
    assert row("all_reduce").min_bytes(t, attrs) == 8000 and row("all_gather").min_bytes(t, of("", 4)) == 20000
    assert wire_bytes("all_reduce", t, attrs, "direct") == 6000 == 2 * wire_bytes("reduce_scatter", t, attrs, "halving")
    assert wire_bytes("all_gather", t, of("", 4), "ring") == 12000 and wire_bytes("barrier", [], of("", 4), "direct") == 0
    assert [wire_bytes("broadcast", t, of("", 5, root=0), a) for a in ALGORITHMS] == [16000, 12000, 4000]
    narrow = [TensorType((1000,), "bf16")]
    assert wire_bytes("reduce_scatter", narrow, attrs, "halving") == 2 * wire_bytes("reduce_scatter", narrow, attrs, "direct") == 3000
    with pytest.raises(ShapeError, match="unknown algorithm"):
        wire_bytes("all_reduce", t, attrs, "gossip")


def test_a_tracer_writes_them() -> None:
    t = Tracer("x")
    x = t.input("x", (8,), "f32")
    y = t.all_gather(t.reduce_scatter(x, group="dp", size=4, reduce="sum"), group="dp", size=4)
    assert t.send(y, group="pp", size=2, to=1) == () and t.barrier(group="dp", size=4) == ()
    z = t.receive(group="pp", size=2, source=0, shape=(3, 5), dtype="bf16")
    assert (y.type, str(z.type)) == (x.type, "bf16[3,5]")
