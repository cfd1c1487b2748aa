"""Cases of edges: what graphs, layouts, Programs and models just take, and what they refuse one step beyond, by the words that a
person reads; what they say of themselves; parts of calls that are too long to be looked at whole. Floor 7.

A refusal is held to its kind of error, to what came and to what was expected: a swapped field or another bound shows in the words. Beside
each stands the nearest input that must be taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from fractions import Fraction
from math import frexp, ldexp
from unittest import mock

import numpy as np

from alpha import config
from alpha.component import Measured
from alpha.errors import AlphaError, ConfigError, GraphError, InputError, NonFiniteError, ShapeError
from alpha.gates.contracts.reference import BATCH, SCHEDULE, SEQ, kernels, program, references, yes
from alpha.graph.cuts import CUTS, FEATURES, SCORES, parts, scores_of, widened
from alpha.graph.differentiate import differentiate
from alpha.graph.effects import no_extent
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import Graph, Value, attrs_text, prune
from alpha.graph.order import COMM, COMPUTE, Order
from alpha.graph.plan import Memory, Plan, Program, Role, Step, describe
from alpha.graph.state import Init, ShardedLayout, StateLayout, TensorSpec, flat_boxes, flat_shards, tensor_shards, whole
from alpha.graph.trace import Tracer
from alpha.graph.verify import verify
from alpha.models import gpt, llama
from alpha.models.family import family
from alpha.ops.collectives import tree_sum
from alpha.ops.numerics import round_to
from alpha.ops.spec import sole_cotangent
from alpha.ops.table import row, table
from alpha.optim import init as drawn
from alpha.optim.init import draw, fill_initial
from alpha.optim.update import sgd
from alpha.parallel.data import DataParallel
from alpha.passes.build import StepShape, build_program
from alpha.passes.recompute import recompute
from alpha.types import TensorType

Case = Callable[[np.random.Generator], Measured]
Edge = tuple[str, Callable[[], object], type[AlphaError] | None, tuple[str, ...]]
"""Name; what is done; the error that it must end in, None where it must not; what that error must say, in this order."""


def told(*edges: Edge) -> Measured:
    """Whether each ends as it says."""
    wrong = []
    for name, action, kind, said in edges:
        try:
            action()
        except AlphaError as error:
            text, at = str(error), 0
            if kind is None or type(error) is not kind:
                wrong.append(f"{name}: {type(error).__name__}: {text}")
                continue
            for word in said:
                found = text.find(word, at)
                if found < 0:
                    wrong.append(f"{name}: {word!r} is not said there: {text}")
                    break
                at = found + len(word)
        else:
            wrong += [] if kind is None else [f"{name}: taken"]
    return yes(not wrong, "; ".join(wrong).replace("\n", " ")[:200], cases=len(edges))


# -- graphs --------------------------------------------------------------------------------------------------------------------------


def traces(rng: np.random.Generator) -> Measured:
    """What no trace takes: values of nobody, attributes that a row has not or lacks, names given twice, updates of another type."""
    t = Tracer("edges")
    t.layer = "block.3"
    t.source = "model.py:7"
    x, gain = t.input("x", (4, 8), "f32"), t.input("gain", (8,), "f32")
    box, other = t.state("param", 0, (4, 8), "f32"), t.state("param", 64, (8, 4), "f32")
    y = t.scale(x, factor=2.0)
    scalar, whole, square = t.sum(x, axis=(0, 1), keepdims=False), t.input("i", (), "i32"), t.param("w", (), Init("ones"))
    turned = t.transpose(x, perm=(1, 0))
    t.update(other, turned)

    def gradient(loss: Value) -> Callable[[], object]:
        return lambda: differentiate(t, loss, [x])

    found = told(
        ("a number as operand", lambda: t.add(x, 3.0), ShapeError, ("add at model.py:7", "3.0", "a value that the tracer returned")),
        ("a misspelt attribute", lambda: t.scale(x, facter=2.0), ShapeError,
         ("scale at model.py:7", "facter=2.0", "factor", "did you mean `factor`")),
        ("an attribute of no row", lambda: t.scale(x, factor=1.0, zzz=1), ShapeError,
         ("unknown attribute", "zzz=1", "factor", "leave out zzz", "scale")),
        ("an attribute of a row without any", lambda: t.add(x, x, axis=0), ShapeError, ("axis=0", "add has none")),
        ("a missing attribute", lambda: t.rmsnorm(x, gain), ShapeError, ("rmsnorm at model.py:7", "missing", "eps")),
        ("no operand", lambda: t.mean(axis=0, keepdims=True), ShapeError,
         ("mean at model.py:7", "the operands are not those of its row", "0", "expected: x", "call t.mean(x)")),
        ("an operand too few", lambda: t.add(x), ShapeError,
         ("add at model.py:7", "the operands are not", "1", "a, b", "call t.add(a, b)")),
        ("an operand too many", lambda: t.add(x, x, x), ShapeError, ("the operands are not", "3", "a, b")),
        ("less than must be given", lambda: t.matmul(x, trans_a=False, trans_b=False), ShapeError,
         ("the operands are not", "1", "a, b, bias?", "call t.matmul(a, b, bias?); a ? marks what may be left out")),
        ("more than may be given", lambda: t.matmul(x, x, gain, gain, trans_a=False, trans_b=True), ShapeError,
         ("the operands are not", "4", "a, b, bias?")),
        ("what may be left out", lambda: t.matmul(x, x, trans_a=False, trans_b=True), None, ()),
        ("all that may be given", lambda: t.matmul(x, turned, t.input("bias", (4,), "f32"), trans_a=False, trans_b=False), None, ()),
        ("any number", lambda: t.concat(x, x, x, x, axis=0), None, ()),
        ("none of any number", lambda: t.concat(axis=0), ShapeError, ("concat: there is something to join",)),
        ("an attribute of another kind", lambda: t.reshape(x, shape=None), ShapeError,
         ("reshape at model.py:7", "of a kind that its row does not take", "f32[4,8], shape=None", "x, shape, as the row of reshape says")),
        ("axes that are no numbers", lambda: t.transpose(x, perm=("0", 1)), ShapeError,
         ("transpose at model.py:7", "of a kind", "perm=('0', 1)")),
        ("integers for floats", lambda: t.rmsnorm_bwd(x, x, gain, whole), ShapeError, ("rmsnorm_bwd", "rstd")),
        ("shapes", lambda: t.matmul(x, x), ShapeError, ("(at model.py:7, layer block.3)", "expected")),
        ("an input's name twice", lambda: t.input("x", (4, 8), "f32"), GraphError, ("share a name", "x")),
        ("an update of no state", lambda: t.update(x, y), GraphError, ("a state box", "x: f32[4,8] <- scale.0")),
        ("an update of another type", lambda: t.update(box, turned), GraphError, ("a state box",)),
        ("an update", lambda: t.update(box, y), None, ()),
        ("an update twice", lambda: t.update(box, y), GraphError, ("updated twice", "param+0")),
        ("an unknown row", lambda: t.nothing_like_it(x), InputError, ("no such op", "nothing_like_it")),
        ("a precision", lambda: Tracer("p", precision="f16"), InputError, ("unknown precision", "f16", "f32", "bf16")),
        ("a loss of one number", gradient(scalar), None, ()),
        ("a loss of many", gradient(y), GraphError, ("float scalar", "f32[4,8]", "f32[]")),
        ("a loss that is no float", gradient(whole), GraphError, ("float scalar", "i32[]", "f32[]")),
        ("a private name", lambda: hasattr(t, "_row") and t._row(), None, ()),
        ("a policy", lambda: recompute(t.graph, "all"), InputError, ("unknown recompute policy", "all", "none", "block", "ops")),
        ("no op", lambda: recompute(t.graph, "ops"), InputError, ("has not", "no name", "scale")),
        ("an op that is not there", lambda: recompute(t.graph, "ops", ("scale", "gelu")), InputError, ("has not", "gelu", "scale")),
    )
    split = t.split(x, sizes=(4,), axis=0)
    shared = Graph("given")
    kept = Tracer("kept", graph=shared)
    kept.input("a", (1,), "f32")
    good = square.type == TensorType((), "f32") and isinstance(split, tuple) and len(split) == 1 and not hasattr(t, "_row")
    return replace(found, error=found.error + (not good), note=found.note or ("" if good else "a scalar parameter, a split into one"))


def rows(rng: np.random.Generator) -> Measured:
    """Attributes that rows take and, one step beyond, refuse: the words of a key of random numbers; segments of an update, which lie inside
    and apart, in any order; axes of a sum, each once, from either end; cotangents of outputs that have no gradient."""
    def update(op: str, *segments: tuple[int, int]) -> Callable[[], object]:
        scalars = [TensorType((), dtype) for dtype in ("f32", "f32", "i32", "i32")[: 4 if op == "adamw" else 3]]
        buffers = [TensorType((9,), "f32")] * (4 if op == "adamw" else 3)
        attrs = {"segments": tuple((*at, 1.0, 1.0) for at in segments), "beta1": 0.5, "beta2": 0.5, "momentum": 0.5}
        return lambda: row(op).infer([*buffers, *scalars], attrs)

    def key(seed: int, purpose: int | str) -> Callable[[], object]:
        types = [TensorType((2, 3), "f32"), TensorType((), "i32"), TensorType((2,), "i32")]
        return lambda: row("dropout").infer(types, {"rate": 0.5, "seed": seed, "purpose": purpose})

    def mean(axes: tuple[int, ...]) -> Callable[[], object]:
        return lambda: row("mean").infer([TensorType((3, 4), "f32")], {"axis": axes, "keepdims": False})

    def cotangent(i: int, n: int) -> Callable[[], object]:
        return lambda: sole_cotangent("layernorm", [True if j == i else None for j in range(n)])

    most = 2**32 - 1
    return told(
        *((f"{op}, {name}", update(op, *segments), kind, (op, "segments lie inside the buffer and apart") if kind else ())
          for op in ("adamw", "sgd") for name, kind, segments in (
              ("none", None, ()), ("side by side", None, ((0, 4), (4, 5))), ("in any order", None, ((6, 3), (0, 0), (0, 5))),
              ("within another", ShapeError, ((0, 4), (2, 1))), ("over the end of another", ShapeError, ((3, 4), (0, 4))),
              ("the same", ShapeError, ((0, 4), (0, 4))), ("behind the buffer", ShapeError, ((0, 4), (4, 6))),
              ("before it", ShapeError, ((-1, 4),)), ("of less than nothing", ShapeError, ((4, -1),)))),
        ("the largest key", key(most, most), None, ()), ("the smallest key", key(0, 0), None, ()),
        ("a named one", key(most, "mlp"), None, ()),
        *((f"{name} {value}", key(*((value, 0) if name == "seed" else (0, value))), InputError, (name, f"{value}", "0 to 4294967295"))
          for name in ("seed", "purpose") for value in (most + 1, -1)),
        *((f"axes {axes}", mean(axes), None, ()) for axes in ((0, 1), (-1, 0), (-2,))),
        *((f"axes {axes}", mean(axes), ShapeError, ("mean", f"{axes}")) for axes in ((0, 0), (1, -1), (-2, 0), (2,), (-3,))),
        *((f"a cotangent of output {i} of {n}", cotangent(i, n), ShapeError if i else None,
           ("layernorm", f"a cotangent for output {i}") if i else ()) for n in range(1, 5) for i in range(n)))


def of_rows(rng: np.random.Generator) -> Measured:
    """What rows promise beyond what one kernel computes: the tree of a sum among any number of members, from neighbours pair by pair; the
    gradient of a split of which a part is not used, in the type of what was split; a trace stands where it stood before gradients; and what
    rounds to a type, which oracles and judges are built on, takes the nearest number of it, of two equally near the even one."""
    wrong, cases = list[str](), 0
    for n in range(1, 18):
        parts = [(10.0 ** rng.uniform(-3, 3) * rng.standard_normal(64)).astype(np.float32) for _ in range(n)]
        held, apart = list(parts), 1
        while apart < n:
            for i in range(0, n - apart, 2 * apart):
                held[i] = held[i] + held[i + apart]
            apart *= 2
        cases, wrong = cases + 1, wrong + [f"the tree of {n}"] * (tree_sum(parts).tobytes() != held[0].tobytes())
    for dtype in ("f32", "f64"):
        for used in range(3):
            t = Tracer("parts")
            x = t.input("x", (4, 6), dtype)
            t.stage, t.microbatch, t.sms = 1, 2, 3
            part = t.split(x, sizes=(1, 2, 3), axis=1)[used]
            t.stage, t.microbatch, t.sms = stands = (0, 4, 0) if used else (5, 6, 7)
            loss = t.sum(part, axis=(0, 1), keepdims=False)
            (found,) = differentiate(t, loss, [x])
            cases += 2
            wrong += [f"part {used} of {dtype}: {found.type}"] * (found.type != x.type)
            wrong += [f"stands at {t.stage}, {t.microbatch}, {t.sms} for {stands}"] * ((t.stage, t.microbatch, t.sms) != stands)
    for dtype, bits in (("f32", 24), ("f16", 11), ("bf16", 8), ("e4m3", 4)):
        ulps = rng.integers(1 << (bits - 1), 1 << bits, 40) + rng.choice([0.0, 0.25, 0.5, 0.5, 0.75], 40)
        given = ulps * rng.choice([-1.0, 1.0], 40) * 2.0 ** rng.integers(-4 - bits, 8 - bits, 40)
        cases += 1
        wrong += [f"{dtype}: rounded otherwise"] * (round_to(given, dtype).tolist() != [_nearest(float(x), bits) for x in given])
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


def _nearest(x: float, bits: int) -> float:
    """The nearest number of so many significant bits, in whole numbers; of two the even one."""
    mantissa, exponent = frexp(x)
    whole, rest = divmod(Fraction(mantissa) * 2**bits, 1)
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    return ldexp(int(whole) + up, exponent - bits)


def extents(rng: np.random.Generator) -> Measured:
    """Counts of rows that no graph takes: made ones, those of another graph, counted ones; and what it takes beside."""
    def graph(rows_of: Callable[[Tracer, Value], Value], *, received: bool = False) -> Callable[[], object]:
        def make() -> object:
            t = Tracer("extents")
            n = rows_of(t, t.input("n", (), "i32"))
            x = t.receive(shape=(4, 4), dtype="f32", group="pp", size=2, source=0) if received else t.input("x", (4, 4), "f32")
            x.extent = n
            t.output("y", t.scale(x, factor=2.0))
            return verify(t.graph, "trace")
        return make

    def counted(t: Tracer, n: Value) -> Value:
        n.extent = t.input("m", (), "i32")
        return n

    def beside(shape: tuple[int, ...]) -> Callable[[], object]:
        def make() -> object:
            t = Tracer("beside")
            x = t.extent(t.input("x", (4, 4), "f32"), t.input("n", (), "i32"))
            t.output("y", t.add(x, t.input("b", shape, "f32")))
            return verify(t.graph, "trace")
        return make

    def boxed() -> object:
        t = Tracer("boxed")
        n = t.input("n", (), "i32")
        x, box = t.extent(t.input("x", (4,), "f32"), n), t.extent(t.state("param", 0, (4,), "f32"), n)
        t.update(box, t.scale(x, factor=2.0))
        return verify(t.graph, "trace")

    def foreign(t: Tracer, n: Value) -> Value:
        return Value(n.type, "elsewhere", "input")

    def twice() -> object:
        t = Tracer("twice")
        x = t.input("x", (4, 4), "f32")
        x.extent = counted(t, t.input("n", (), "i32"))
        refused = no_extent(x)
        raise GraphError(*refused[:1], came=refused[1]) if refused else InputError("taken")

    def unread() -> object:
        t = Tracer("unread")
        box = t.state("rows", 0, (), "i32")
        t.extent(t.input("x", (4,), "f32"), box)
        t.output("y", t.scale(t.input("z", (4,), "f32"), factor=2.0))
        pruned = prune(t.graph)
        if [*pruned.states.values()] != [box] or "rows" not in pruned.text():
            raise GraphError("how many rows an input has is not known", came=pruned.text())
        return verify(pruned, "prune")

    return told(
        ("the rows of what nobody reads", unread, None, ()),
        ("a counted one, by itself", twice, GraphError, ("no integer of the device", "x: f32[4,4] with rows n")),
        ("an input", graph(lambda t, n: n), None, ()), ("an input, received", graph(lambda t, n: n, received=True), None, ()),
        ("a made one", graph(lambda t, n: t.next_step(n, n)), GraphError, ("no integer of the device",)),
        ("a counted one", graph(counted), GraphError, ("an extent",)),
        ("another graph's, received", graph(foreign, received=True), GraphError, ("does not know", "rows elsewhere", "inputs or states")),
        ("one row for all", beside((1, 4)), None, ()), ("fewer axes", beside((4,)), None, ()),
        ("all rows beside", beside((4, 4)), GraphError, ("all rows beside",)),
        ("a box of as many rows", boxed, None, ()))


def texts(rng: np.random.Generator) -> Measured:
    """Attributes that hash, and those that do not; calls before and behind a view; a schedule of an update alone."""
    plain = {"a": None, "b": True, "c": 3, "d": 0.1, "e": "x", "f": (1, [2.0, None])}
    order = Order([COMPUTE, COMM, None, COMPUTE], [(), (), (1,), ()])
    good = json.loads(attrs_text(plain)) == {**plain, "d": (0.1).hex(), "f": [1, [(2.0).hex(), None]]}
    good &= [order.before(i, j) for i, j in ((0, 2), (2, 3), (1, 2), (2, 0), (2, 1), (0, 1))] == [True, True, True, False, False, False]
    plan, update = Plan("p", (), {}, {}, {}, Memory(0, 0, 0)), Step("update")
    alone = Program("alone", {"p": plan, "update": plan}, (update,), {}, {})
    good &= alone.replays() == ((update,),)
    three = (Step("p", 0, 0), Step("p", 0, 1), Step("p", 0, 2), update)
    for replay, want in ((0, ((*three[:3],), (update,))), (1, (three[:1], three[1:2], three[2:3], (update,))),
                         (2, (three[:2], three[2:3], (update,)))):
        good &= replace(alone, schedule=three, replay=replay).replays() == want
    found = told(("an object", lambda: attrs_text({"a": object()}), GraphError, ("not a plain value", "object", "None")),
                 ("a set", lambda: attrs_text({"a": (1, {2})}), GraphError, ("not a plain value", "{2}")))
    return replace(found, error=found.error + (not good), note=found.note or ("" if good else "texts, order or replays"))


def lines(rng: np.random.Generator) -> Measured:
    """A row that is called without a line stands at that of who called the tracer, or a row's own helper."""
    t = Tracer("lines")
    x = t.input("x", (4, 8), "f32")
    t.scale(x, factor=2.0)
    at = _traced_here(t, x)
    places = [n.source for n in t.graph.nodes]
    good = [p.partition(":")[0] for p in places] == ["edges.py"] * 2 and int(places[1].partition(":")[2]) == at
    return yes(good, f"{places}, expected line {at}")


def _traced_here(t: Tracer, x: Value) -> int:
    t.scale(x, factor=3.0)
    return _traced_here.__code__.co_firstlineno + 1


def first_not_finite(rng: np.random.Generator) -> Measured:
    """Of what is not finite the first is named that a node makes: not an input that is, not an integer, not what comes later."""
    t = Tracer("finite")
    t.source, t.layer = "model.py:3", "block.1"
    x = t.input("x", (4,), "f32")
    y = t.cast(t.scale(x, factor=2.0), dtype="f32")
    t.source, t.layer = "model.py:4", ""
    t.output("z", t.mul(t.input("i", (4,), "f32"), y))
    one, bad, huge = np.ones(4), np.array([1, np.inf, 1, 1]), np.full(4, 1e30)
    with np.errstate(all="ignore"):
        return _told_of_finite(t, one, bad, huge)


def _told_of_finite(t: Tracer, one: np.ndarray, bad: np.ndarray, huge: np.ndarray) -> Measured:
    return told(
        ("finite", lambda: evaluate(t.graph, {"x": one, "i": one}, {}, stop_at_nonfinite=True), None, ()),
        ("not asked", lambda: evaluate(t.graph, {"x": bad, "i": one}, {}), None, ()),
        ("at once", lambda: evaluate(t.graph, {"x": bad, "i": one}, {}, stop_at_nonfinite=True), NonFiniteError,
         ("scale made a non-finite value in block.1 at model.py:3", "scale(x)")),
        ("later", lambda: evaluate(t.graph, {"x": huge, "i": 1e270 * huge}, {}, stop_at_nonfinite=True), NonFiniteError,
         ("mul made a non-finite value in no layer at model.py:4",)))


def _long(op: str, rng: np.random.Generator) -> Iterator[tuple[list[np.ndarray], dict[str, object]]]:
    """Calls of a row of attention with just more scores than are looked at whole."""
    for causal, window, documents, keys in ((True, (0, 17)[int(rng.integers(2))], False, 370), (False, 0, True, 520), (True, 0, True, 521),
                                            (True, 0, False, 300), (True, 9, False, 900), (True, 5, True, 20)):
        batch, length, heads, groups, d = (1 + (not causal), keys, 2, 2, 2) if documents else (2, 370 if keys < 900 else 200, 2, 1, 2)
        if keys == 300:
            length = 500  # the first queries see nothing; of 900 keys the first are seen by none
        attrs: dict[str, object] = {"causal": causal, "window": window, "scale": 0.5}
        who = [np.sort(rng.integers(0, 5, (batch, length)), 1).astype(np.int32)] * 2 if documents else []  # others in each sample
        if op.startswith("attention_packed"):
            if keys in (300, 900):
                continue
            attrs |= {"heads": heads, "kv_heads": groups}
            ins = [rng.standard_normal((batch, length, (heads + 2 * groups) * d))]
            forward = "attention_packed"
        else:
            ins = [rng.standard_normal((batch, n, h, d)) for n, h in ((length, heads), (keys, groups), (keys, groups))]
            forward = "attention"
        if op.endswith("_bwd"):
            o, lse = row(forward).oracle(*ins, *who, **attrs)
            ins = [rng.standard_normal(o.shape), *ins, o, lse]
        yield [*ins, *who], attrs


def keys_of(ins: list[np.ndarray]) -> int:
    """Longest of the second axes."""
    return max(x.shape[1] for x in ins)


def long_calls(rng: np.random.Generator) -> Measured:
    """Attention over more keys than are looked at whole: single queries and keys, with the keys and queries that see one another, give that
    part of what the whole call gives; first and last are among them; every operand and result is looked at."""
    worst, cases, wrong = 0.0, 0, list[str]()
    for op in ("attention", "attention_bwd", "attention_packed", "attention_packed_bwd"):
        for ins, attrs in _long(op, rng):
            types = [TensorType(x.shape, "f32" if x.dtype.kind == "f" else "i32") for x in ins]
            outs, gives, looked = row(op).infer(types, attrs), row(op).oracle(*ins, **attrs), set[int]()
            wrong += [] if (scores_of(op, types, attrs) > SCORES) == (keys_of(ins) > 20) else ["another call is looked at whole"]
            for part in (part for _ in range(4 if ins[-1].dtype.kind == "i" else 1) for part in parts(op, types, outs, attrs, rng)):
                took = [take(ins[i]) for take, i in zip(part.ins, part.operands(), strict=True)]
                made = row(part.op or op).oracle(*took, **part.attrs)
                most = widened(op, types, outs, attrs) * len(took)
                wrong += [] if sum(x.size for x in took) <= most or keys_of(ins) <= 20 else [f"{op} takes more"]
                for take, to, got in zip(part.outs, part.results(), made, strict=True):
                    if take is not None:
                        want = np.asarray(take(gives[to]))
                        worst = max(worst, float(np.abs(got - want).max() / max(1e-30, np.abs(gives[to]).max())))
                        looked.add(to)
                        cases += 1
            wrong += [] if looked == set(range(len(outs))) else [f"{op}: results {looked} alone"]
    return Measured(error=float(len(wrong)) if wrong else worst, bound=0.0 if wrong else 1e-12, cases=cases, note=wrong[0] if wrong else "")


def held_at_once(rng: np.random.Generator) -> Measured:
    """What the parts of a call are said to hold beyond what is drawn, counted again from what they take, on the samples of every row: of
    what is looked at whole all; else operands that are taken whole, but tables that are read in place; of attention every score too."""
    wrong, cases = list[str](), 0
    for name, spec in table().items():
        if spec.across is not None or spec.view:
            continue
        for sample in spec.samples(rng):
            ins = tuple(np.asarray(x) for x in sample.inputs)
            types = [TensorType(x.shape, "f32" if x.dtype.kind == "f" else "i32") for x in ins]
            if name == "adamw":
                types[8:] = [TensorType(x.shape, "bf16") for x in ins[8:]]
            outs = spec.infer(types, sample.attrs)
            said, cases = widened(name, types, outs, sample.attrs), cases + 1
            if name in ("adamw", "sgd", "square_sums", "update_scalars", "embedding"):
                least = most = 0
            elif name in ("linear_gelu", "linear_swiglu", "matmul_gelu_bwd"):  # the weight of some features, gate and up of each
                many, inner = ins[1].shape if sample.attrs.get("trans_b") else ins[1].shape[::-1]
                least = most = min(many, FEATURES * (1 + (name == "linear_swiglu"))) * inner
            elif not all(part.rows for part in parts(name, types, outs, sample.attrs, rng)):
                least = most = sum(t.size for t in (*types, *outs))
            elif name in ("attention", "attention_bwd"):  # each query of a sample by each of its keys, and one sample of an operand
                q, k = ins[name == "attention_bwd"], ins[1 + (name == "attention_bwd")]
                least = q.shape[1] * q.shape[2] * k.shape[1]
                most = least + max(x.size // x.shape[0] for x in ins)
            elif name in ("attention_packed", "attention_packed_bwd"):
                least = most = ins[0].shape[1] ** 2 * int(str(sample.attrs["heads"])) // int(str(sample.attrs["kv_heads"]))
            else:
                first = CUTS[name][0].partition(">")[0]
                least = sum(x.size for x, letter in zip(ins, first) if letter in "wf") if "b" not in first else 1
                most = least if "b" not in first else sum(x.size for x in ins)
            wrong += [] if least <= said <= most else [f"{name}: {said} are said, {least} are held"]
    return yes(not wrong, "; ".join(wrong[:3]), cases=cases)


# -- state, plans and Programs ---------------------------------------------------------------------------------------------------------


def layouts(rng: np.random.Generator) -> Measured:
    """Names given twice, cuts over no rank, ranks beyond the last, tensors that no cut divides; a layout and a box of nothing."""
    def spec(name: str, shape: tuple[int, ...] = (6, 4), unit: str = "u") -> TensorSpec:
        return TensorSpec(name, shape, unit, init=Init("zeros"))

    layout = StateLayout([spec("a"), spec("b", (3,))])
    cut = layout.shard(2)
    good = StateLayout([]).size == 0 and [*flat_boxes((), 1, 1)] == [] and [*flat_boxes((), 0, 1)] == [((), 0)]
    good &= [*flat_boxes((4, 3), 5, 5)] == [] and len([*cut.cuts(1)]) == 1
    one, all_ = flat_shards(layout, 1).ranks[0], whole(layout).ranks[0]  # a cut over one rank is the whole, where that has it
    good &= layout.shard(1).size == layout.size and [(p.tensor, p.box, p.offset) for p in one] == [
        (p.tensor, p.box, p.offset) for p in all_]
    found = told(
        ("names", lambda: StateLayout([spec("b"), spec("a"), spec("b", (2,), "v"), spec("c")]), ShapeError, ("share a name", "['b']")),
        ("one name a unit", lambda: StateLayout([spec("a"), spec("b")]), None, ()),
        ("no rank", lambda: ShardedLayout(layout, 0), ShapeError, ("over one rank or more", "0", "1, 2, 3")),
        ("one rank", lambda: ShardedLayout(layout, 1), None, ()),
        ("the last rank", lambda: [*cut.cuts(1)], None, ()),
        ("beyond the last", lambda: [*cut.cuts(2)], ShapeError, ("no such rank", "2", "0 to 1")),
        ("before the first", lambda: [*cut.cuts(-1)], ShapeError, ("no such rank", "-1", "0 to 1")),
        ("an even cut", lambda: tensor_shards(layout, {"a": 0}, 3), None, ()),
        ("an uneven cut", lambda: tensor_shards(layout, {"a": 1}, 3), ShapeError, ("evenly", "a (6, 4) axis 1 over 3")))
    return replace(found, error=found.error + (not good), note=found.note or ("" if good else "a layout of nothing"))


def programs(rng: np.random.Generator) -> Measured:
    """Sizes of a step and ranks of a Program, at their bounds and beyond."""
    def shape(**changed: int) -> Callable[[], object]:
        return lambda: StepShape(**({"micro_batch": 1, "seq": 1, "shards": 1, "micros": 1, "replay": 0} | changed))

    p = Program("edges", {"p": Plan("p", (), {}, {}, {}, Memory(0, 0, 0))}, (Step("p"),), {}, {}, others=(Role((Step("p"),), {"p": "p"}),))
    return told(
        ("the smallest", shape(), None, ()),
        *((f"{name} {n}", shape(**{name: n}), ShapeError, (said, f"{n}")) for name, n, said in (
            ("micro_batch", 0, "positive"), ("seq", 0, "positive"), ("micros", 0, "positive"), ("replay", -1, "positive"),
            ("shards", 0, "power of two"), ("shards", 6, "power of two"), ("shards", -1, "power of two"))),
        ("rank 0", lambda: p.role(0), None, ()), ("rank 1", lambda: p.role(1), None, ()),
        ("rank 2", lambda: p.role(2), InputError, ("program edges has no such rank", "2", "0 to 1")),
        ("rank -1", lambda: p.role(-1), InputError, ("no such rank", "-1", "0 to 1")),
        ("a stage of ZeRO", lambda: DataParallel(2, -1), ShapeError, ("ZeRO", "-1", "0 or 1")))


def told_for_people(rng: np.random.Generator) -> Measured:
    """A Program's text for a person: each plan with its hash, its operations and a line for each launch, as many as asked for, and its
    memory. The components that it rests on are those that its plans launch, and those that made it."""
    p = replace(program("gpt"), made_by=("schedule.pass", "executor.cpu"))
    wrong = list[str]()
    for plan in p.plans.values():
        n = len(plan.launches)
        for limit in (None, 0, 1, max(0, n - 1), n, n + 1):
            head, *launches, last = plan.table(limit).splitlines()
            shown = n if limit is None else min(n, limit)
            more = [launches.pop()] if shown < n else []
            wrong += [] if [x.strip() for x in more] == ([f"... {n - shown} more"] if shown < n else []) else [f"{more} of {n}, {limit}"]
            wrong += [] if len(launches) == shown else [f"{len(launches)} lines of {shown}"]
            wrong += [] if f"plan {plan.name} " in head and f"{n} launches" in head and plan.hash()[:12] in head else [head]
            wrong += [] if f"{sum(x.flops for x in plan.launches) / 1e9:.3f} GFLOP" in head else [head]
            m = plan.memory
            wrong += [] if [f"{x:,} B" in last for x in (m.peak, m.lower, m.total)] == [True] * 3 else [last]
            for i, (line, x) in enumerate(zip(launches, plan.launches)):
                parts_ = (f"{i} ", x.phase, x.layer, x.component, *(f"{r.arena}+{r.offset}:{r.type}" for r in x.ins), "->",
                          *map(str, x.outs), x.source)
                at = 0
                for word in parts_:
                    at = line.find(word, at) + len(word) if line.find(word, at) >= 0 else len(line) + 1
                wrong += [] if at <= len(line) else [line]
        wrong += [] if plan.components() == tuple(sorted({x.component for x in plan.launches})) else ["components of a plan"]
    said = build_program(name="gpt", model=references()["gpt"].model, optimizer=sgd(SCHEDULE), catalogue=kernels(), threads=2,
                         shape=StepShape(micro_batch=BATCH, seq=SEQ), facts={"tokenizer": "abc", "seq": SEQ + 1})
    known = {"tokenizer": "abc", "seq": SEQ + 1, "micro_batch": BATCH, "optimizer": "sgd", "backend": "cpu", "threads": 2}
    wrong += [f"{k}: {said.facts.get(k)}" for k, v in known.items() if said.facts.get(k) != v]  # what is said outside counts
    wrong += [] if said.hash() != replace(said, facts={**said.facts, "tokenizer": "abd"}).hash() else ["facts are not hashed"]
    launched = {x.component for plan in p.plans.values() for x in plan.launches}
    wrong += [] if p.kernels() == tuple(sorted(launched)) else ["kernels of a Program"]
    wrong += [] if p.components() == tuple(sorted(launched | {*p.made_by})) else ["components of a Program"]
    wrong += [] if describe(p.plans.values()) == "\n\n".join(plan.table() for plan in p.plans.values()) else ["all plans"]
    return yes(not wrong, "; ".join(wrong[:2])[:200], cases=len(p.plans))


# -- models, schedules, initial values ---------------------------------------------------------------------------------------------------


def models(rng: np.random.Generator) -> Measured:
    """Heads that do not divide the width, sequences longer than the positions, families that nobody knows; and what a model reads of a run
    file, each from its own key."""
    def of(make: Callable[..., object], **changed: int) -> Callable[[], object]:
        return lambda: make(**({"vocab": 16, "positions": 8, "layers": 1, "width": 16, "heads": 2} | changed))

    def traced(module: object, sizes: Callable[..., object], seq: int) -> Callable[[], object]:
        return lambda: module.loss(Tracer("m"), sizes(**_SIZES[module.__name__]), 2, seq, False)  # type: ignore[attr-defined]

    found = told(
        ("heads", of(gpt.GPTConfig, heads=3), ConfigError, ("heads do not divide the width", "width 16, heads 3")),
        ("as many heads as columns", of(gpt.GPTConfig, heads=16), None, ()),
        ("gpt at its positions", traced(gpt, gpt.GPTConfig, 8), None, ()),
        ("gpt beyond", traced(gpt, gpt.GPTConfig, 9), ConfigError, ("longer than the model's positions", "9", "at most 8")),
        ("llama at its positions", traced(llama, llama.LlamaConfig, 8), None, ()),
        ("llama beyond", traced(llama, llama.LlamaConfig, 9), ConfigError, ("longer than the model's positions", "9", "at most 8")),
        ("a family", lambda: family("gpt"), None, ()),
        ("no family", lambda: family("gpt3"), InputError, ("no such family", "gpt3", "gpt", "llama")))
    heads, seed, positions = int(rng.integers(2, 9)), int(rng.integers(1, 1 << 30)), int(rng.integers(9, 99))
    given = {"layers": int(rng.integers(1, 9)), "width": heads * int(rng.integers(1, 9)), "heads": heads, "positions": positions,
             "norm_eps": 0.25, "dropout": 0.125, "z_loss": 0.5, "window": int(rng.integers(1, 9)), "tied": False}
    keys = "\n".join(f"{key} = {str(value).lower()}" for key, value in given.items())
    cfg = config.parse(f'[run]\nname = "a"\nseed = {seed}\n[model]\nfamily = "gpt"\n{keys}\n[data]\nsequence = 8\ndocuments = true\n'
                       "[train]\nsteps = 9\nbatch = 2\n[optim]\nlr = 0.1\n")
    made, want = asdict(family("gpt").sizes(cfg, 77)), {**given, "vocab": 77, "seed": seed, "documents": True}
    wrong = [f"{key} {made[key]} for {want[key]}" for key in made if made[key] != want.get(key)]
    return replace(found, error=found.error + len(wrong), note=found.note or ", ".join(wrong))


_SIZES = {gpt.__name__: {"vocab": 16, "positions": 8, "layers": 1, "width": 16, "heads": 2},
          llama.__name__: {"vocab": 16, "positions": 8, "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "hidden": 32}}


def initial(rng: np.random.Generator) -> Measured:
    """One tensor drawn alone has the values that it has among all; an initialisation that nobody knows is refused. An error of any piece
    reaches who asked, whoever draws it."""
    specs = [TensorSpec("a", (5, 7), "u", init=Init("normal", 0.5)), TensorSpec("b", (9,), "u", init=Init("ones")),
             TensorSpec("c", (3,), "v", init=Init("zeros"))]
    layout, seed = StateLayout(specs), int(rng.integers(1 << 40))
    flat, wrong = np.full(layout.size, np.nan, np.float32), list[str]()
    for workers in (1, 2):
        flat.fill(np.nan)
        fill_initial(flat, layout, seed, workers)
        for spec in specs:
            at = layout.offsets[spec.name]
            wrong += [] if draw(spec, seed).tobytes() == flat[at : at + spec.size].tobytes() else [f"{spec.name} by {workers}"]
        with mock.patch.object(drawn, "_normal", side_effect=MemoryError), suppress(MemoryError):
            fill_initial(flat, layout, seed, workers)
            wrong.append(f"no memory for {workers}, and nobody is told")
    found = told(("unknown", lambda: draw(replace(specs[0], init=Init("uniform")), 1), ConfigError,
                  ("unknown initialisation", "uniform", "normal, zeros or ones")))
    return replace(found, error=found.error + len(wrong), note=found.note or ", ".join(wrong))
