"""Cases of what a trace, a graph and a Program say of themselves: declarations that disagree, units in units, texts that tell apart all
that differs, updates that overlap. Each draws or lists what may differ, and asks a relation of all of it. Floor 7."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.errors import GraphError, ShapeError
from alpha.gates.contracts.reference import refuses, yes
from alpha.graph.cuts import CUTS, MANY, RUN, RUNS, drawn, parts, runs
from alpha.graph.differentiate import differentiate
from alpha.graph.ir import PHASES, Graph, prune
from alpha.graph.order import COMM
from alpha.graph.plan import Launch, Memory, Plan, Program, Ref, Role, Step
from alpha.graph.state import Init, StateLayout, TensorSpec
from alpha.graph.trace import Tracer
from alpha.graph.verify import verify
from alpha.ops.numerics import ACCUMULATE
from alpha.ops.spec import Sample
from alpha.ops.table import row, table
from alpha.types import TensorType


def redeclared(rng: np.random.Generator) -> Measured:
    """A parameter that is declared again differently, in any of its properties, is refused; declared alike it is the same value."""
    sound: dict[str, Any] = {"shape": (4, 3), "init": Init("normal", 0.5), "decay": True, "lr_scale": 2.0}
    others: dict[str, tuple[Any, ...]] = {"shape": ((3, 4), (4,)), "init": (Init("normal", 0.25), Init("zeros", 0.5)), "decay": (False,),
                                          "lr_scale": (1.0,)}
    wrong = [] if set(others) == {f.name for f in fields(TensorSpec)} - {"name", "unit"} else ["a property that is not tried"]
    t = Tracer("declared")
    first = t.param("w", **sound)
    wrong += [] if t.param("w", **sound) is first else ["the same"]
    for name, values in others.items():
        for value in values:
            if refuses(ShapeError, lambda name=name, value=value: t.param("w", **{**sound, name: value})).error:  # type: ignore[misc]
                wrong.append(f"{name} = {value}")
    return yes(not wrong, ", ".join(wrong), cases=1 + sum(map(len, others.values())))


def stacked_in_order(rng: np.random.Generator) -> Measured:
    """Parameters that are read as one are taken in the order in which they lie, in no other, and not with one between left out."""
    names = ("a", "b", "c", "d")
    layout = StateLayout([TensorSpec(f"u.{name}", (8, 16), "u") for name in names])
    wrong, cases = [], 0
    for chosen in (("a", "b"), ("b", "c", "d"), names, ("b", "a"), ("a", "c"), ("c", "b", "d"), tuple(rng.permutation(names).tolist())):
        lies = list(chosen) == sorted(chosen) and ord(chosen[-1]) - ord(chosen[0]) == len(chosen) - 1
        t = Tracer("stacked", layout)
        taken = False
        with t.unit("u"), suppress(GraphError):
            taken = t.stacked(chosen, (8, 16), Init("zeros")).state == ("param", layout.offsets[f"u.{chosen[0]}"])
            taken &= all(t.param(name, (8, 16), Init("zeros")).shape == (8, 16) for name in chosen)  # each is still itself
        cases += 1
        wrong += [] if taken == lies else ["".join(chosen)]
    return yes(not wrong, ", ".join(wrong), cases=cases)


def units_in_units(rng: np.random.Generator) -> Measured:
    """Behind a unit within a unit stands the outer one again, for parameters and for layers, also where the inner one ended in an error."""
    t = Tracer("units")
    x = t.input("x", (4,), "f32")

    def here() -> tuple[str, str]:
        t.param(f"w{len(t.tensors)}", (4,), Init("zeros"))
        t.scale(x, factor=1.0)
        return [*t.tensors.values()][-1].unit, t.graph.nodes[-1].layer

    seen = []
    with t.unit("outer"):
        with t.unit("inner"):
            seen.append(here())
        seen.append(here())
        with suppress(ZeroDivisionError), t.unit("failing"):
            raise ZeroDivisionError
        seen.append(here())
    seen.append(here())
    want = [("inner", "inner"), ("outer", "outer"), ("outer", "outer"), ("root", "")]
    return yes(seen == want, str(seen), cases=len(want))


def gradient_types(rng: np.random.Generator) -> Measured:
    """In bf16 the gradient of a parameter has the type in which it is summed, that of anything made on the way the type that it has: where
    gradients of both are asked for, and whichever comes first."""
    wrong = []
    for turn in (1, -1):
        t = Tracer("types")
        w, x = t.state("param16", 0, (8, 8), "bf16", "w"), t.input("x", (8, 8), "bf16")
        h = t.matmul(x, w)
        loss = t.cast(t.sum(t.gelu(t.matmul(h, w), approximate="tanh"), axis=(0, 1), keepdims=False), dtype="f32")
        wrt = [w, h][::turn]
        for v, g in zip(wrt, differentiate(t, loss, wrt), strict=True):
            want = TensorType(v.type.shape, v.type.dtype if v is h else ACCUMULATE[v.type.dtype])
            wrong += [] if g.type == want else [f"{v}: {g.type}"]
        verify(prune(t.graph, t.graph.nodes[-1].outputs), "gradient types")
    return yes(not wrong, "; ".join(wrong), cases=4)


def overlaps(rng: np.random.Generator) -> Measured:
    """Updates of boxes of drawn shapes and places are refused where two of one kind share an element, and only there."""
    wrong, counts, cases = [], [0, 0], 120
    for _ in range(cases):
        t, held, shared = Tracer("boxes"), np.zeros((2, 200), int), False
        for i in range(int(rng.integers(2, 5))):
            shape = tuple(int(n) for n in rng.integers(1, 6, int(rng.integers(0, 4))))
            kind, at = int(rng.integers(2)), int(rng.integers(0, 50))
            if (str(kind), at) in t.graph.updates:
                continue
            box = t.state(str(kind), at, shape, "f32")
            t.update(box, t.scale(t.input(f"x{i}", shape, "f32"), factor=2.0))
            held[kind, at : at + box.type.size] += 1
        shared = bool((held > 1).any())
        counts[shared] += 1
        refused = refuses(GraphError, lambda graph=t.graph: verify(graph, "boxes")).error == 0  # type: ignore[misc]
        wrong += [] if refused == shared else [str(sorted(t.graph.updates))]
    return yes(not wrong and min(counts) > 5, f"{counts} {wrong[:1]}", cases=cases)


def places(rng: np.random.Generator) -> Measured:
    """Every phase that reads what any phase made, in the same stage or microbatch, the one before, the one after, or none: refused where a
    stage would go the wrong way or a microbatch would read another's, and nowhere else."""
    wrong, cases = [], 0
    for made in PHASES:
        for reads in PHASES:
            for first, second in ((1, 1), (1, 2), (2, 1), (None, 1), (1, None)):
                for what in ("stage", "microbatch"):
                    t = Tracer("places")
                    t.phase = made
                    setattr(t, what, first)
                    x = t.scale(t.input("x", (4,), "f32"), factor=2.0)
                    t.phase = reads
                    setattr(t, what, second)
                    t.output("y", t.scale(x, factor=2.0))
                    apart = None not in (first, second) and first != second
                    if what == "stage":
                        back = {made, reads} <= {"backward", "wgrad"}
                        wanted = apart and "update" not in (made, reads) and (second > first) == back  # type: ignore[operator]
                    else:
                        wanted = apart and reads not in ("wgrad", "reduce", "update")
                    refused = refuses(GraphError, lambda graph=t.graph: verify(graph, "places")).error == 0  # type: ignore[misc]
                    cases += 1
                    wrong += [] if refused == wanted else [f"{what} {first} {made} to {second} {reads}"]
    return yes(not wrong, ", ".join(wrong[:4]), cases=cases)


# -- texts that tell apart --------------------------------------------------------------------------------------------------------


def _graph(**changed: Any) -> Graph:
    """A small graph with one thing changed; without any, the same one each time."""
    has: dict[str, Any] = {
        "kind": "param", "at": 64, "shape": (8, 8), "dtype": "f32", "factor": 2.0, "layer": "block.0", "phase": "forward", "stream": "",
        "stage": 0, "microbatch": 0, "sms": 1, "turned": False, "extent": "", "name": "y", "box": 192, "boxes": "grad0", "second": False,
        "op": "add", "line": "a.py:1"} | changed
    t = Tracer("told apart")
    t.source = has["line"]
    t.stream, t.stage, t.microbatch, t.sms = has["stream"], has["stage"], has["microbatch"], has["sms"]
    t.phase = has["phase"]
    shape, dtype = has["shape"], has["dtype"]
    with t.unit(has["layer"]):
        x, w = t.input("x", shape, dtype), t.state(has["kind"], has["at"], shape, dtype)
        if has["extent"]:
            rows = {name: t.input(name, (), "i32") for name in ("n", "m")}[has["extent"]]
            for v in (x, w):
                t.extent(v, rows)
        made = t.scale(x, factor=has["factor"])
        y = t(has["op"], *((w, made) if has["turned"] else (made, w)))
        t.output(has["name"], made if has["second"] else y)
    t.update(t.state(has["boxes"], has["box"], shape, dtype), t.scale(y, factor=1.0))
    return t.graph


def graph_texts(rng: np.random.Generator) -> Measured:
    """Two graphs that differ in one thing alone, whichever, have other hashes; in their lines or in nothing, the same."""
    changes: dict[str, tuple[Any, ...]] = {
        "kind": ("master",), "at": (0, 128), "shape": ((4, 16), (64,)), "dtype": ("bf16",), "factor": (2.0 + 2**-50, 3.0),
        "layer": ("block.1",), "phase": ("backward", "recompute"), "stream": (COMM,), "stage": (1, None),
        "microbatch": (1, None), "sms": (2, 0), "turned": (True,),
        "extent": ("n", "m"), "name": ("z",), "box": (256,), "boxes": ("grad1",), "second": (True,), "op": ("mul",)}
    hashes = {"as it is": _graph().hash(), **{f"{k} = {v}": _graph(**{k: v}).hash() for k, values in changes.items() for v in values}}
    same = _graph(line="b.py:2").hash() == _graph().hash()
    return _apart(hashes, "" if same else "a line or nothing")


def _apart(hashes: Mapping[str, str], wrong: str = "") -> Measured:
    """Whether all of these differ."""
    first: dict[str, str] = {}
    alike = [f"{what} and {first[h]}" for what, h in hashes.items() if first.setdefault(h, what) != what]
    return yes(not alike and not wrong, "; ".join([*alike[:4], wrong]), cases=len(hashes))


def _ref(offset: int, arena: str = "act", n: int = 64) -> Ref:
    return Ref(arena, offset, TensorType((n,), "f32"))


def _launches(*calls: tuple[tuple[Ref, ...], Ref], **changed: Any) -> tuple[Launch, ...]:
    made = tuple(Launch("scale", "scale.f32.cpu", ins, (out,), {"factor": 1.0}, None, "block.0", "forward", "a.py:1", 0, 0)
                 for ins, out in calls)
    return (replace(made[0], **changed), *made[1:]) if changed else made


def _of(launches: tuple[Launch, ...], **more: Any) -> Plan:
    has: dict[str, Any] = {"inputs": {"x": _ref(0, "io")}, "outputs": {"y": _ref(0, "out")}, "arenas": {"io": 256, "out": 256, "act": 4096}}
    return Plan("p", launches, **(has | more), memory=Memory(0, 0, 0))


def computations(rng: np.random.Generator) -> Measured:
    """What a plan computes: results of drawn sizes at drawn places overwrite one another, and of every operand it must be told which bytes
    of which results it is, as a map of who wrote each byte last says. Places alone change nothing."""
    wrong, cases = [], 0
    for _ in range(20):
        owner, calls, want = np.full((1024, 2), -1), [], []
        for number in range(int(rng.integers(3, 9))):
            at, n = int(rng.integers(0, 160)), int(rng.integers(1, 60))
            taken = _ref(4 * at, n=n)
            held = owner[at : at + n]
            want.append([tuple(word) for word in held.tolist() if word[0] >= 0])
            to, size = int(rng.integers(0, 160)), int(rng.integers(1, 60))
            calls.append(((taken,), _ref(4 * to, n=size)))
            owner[to : to + size, 0], owner[to : to + size, 1] = number, np.arange(size)
        lines = _of(_launches(*calls)).computation().splitlines()
        for line, words in zip((x for x in lines if x.startswith("scale")), want, strict=True):
            told: list[tuple[int, int]] = []
            operand = line.rpartition(" -> ")[0].rpartition(" ")[2].rpartition(":")[0]
            for part in filter(None, operand.split("+")):
                name, _, span = part.rstrip("]").partition("[")
                lo, hi = map(int, span.split(":"))
                told += [(int(name.split(".")[0]), word) for word in range(lo // 4, hi // 4)]
            cases += 1
            wrong += [] if told == words else [line]
    moved = [_of(_launches(((_ref(0, "io"),), _ref(at)), ((_ref(at),), _ref(0, "out")))).computation() for at in (0, 512)]
    return yes(not wrong and moved[0] == moved[1], wrong[0][-200:] if wrong else "", cases=cases + 1)


def _program(**changed: Any) -> Program:
    """A Program of two ranks with one thing changed."""
    calls = (((_ref(0, "io"),), _ref(0)), ((_ref(0),), _ref(0, "out")))
    has: dict[str, Any] = {
        "plans": {"p": _of(_launches(*calls)), "q": _of(_launches(*calls[1:]))}, "schedule": (Step("p", 0, 0), Step("q")),
        "facts": {"shards": 2, "threads": 1}, "others": (Role((Step("p", 1, 0), Step("q")), {"p": "p", "q": "q"}),),
        "groups": {"dp": ((0, 1),)}, "sharded": ("m",)} | changed
    return Program("program", has.pop("plans"), has.pop("schedule"), {}, **has)


def program_texts(rng: np.random.Generator) -> Measured:
    """Two Programs that differ in one thing alone have other hashes, whichever of what they compute, in which order, on which ranks, by
    which cuts and facts; not so in the number of workers, or in how much is handed over at once."""
    calls = (((_ref(0, "io"),), _ref(0)), ((_ref(0),), _ref(0, "out")))
    more = {"attrs": {"factor": 2.0}, "component": "scale.other", "layer": "block.1", "phase": "backward", "stream": COMM, "stage": 1,
            "microbatch": 1, "outs": (_ref(0, n=32),), "ins": (_ref(4, "io"),)}
    plans = {name: _of(_launches(*calls, **{name: value})) for name, value in more.items()}
    plans |= {"inputs": _of(_launches(*calls), inputs={"x": _ref(256, "io")}),
              "outputs": _of(_launches(*calls), outputs={"z": _ref(0, "out")}),
              "arenas": _of(_launches(*calls), arenas={"io": 256, "out": 512, "act": 4096})}
    base = _program()
    role = base.others[0]
    changed: dict[str, dict[str, Any]] = {name: {"plans": {**base.plans, "p": plan}} for name, plan in plans.items()}
    changed |= {
        "order": {"schedule": base.schedule[::-1]}, "shard": {"schedule": (Step("p", 1, 0), Step("q"))},
        "micro": {"schedule": (Step("p", 0, 1), Step("q"))}, "fact": {"facts": {"shards": 4, "threads": 1}},
        "fact more": {"facts": {"shards": 2, "threads": 1, "zero": 1}}, "no others": {"others": ()}, "two others": {"others": (role, role)},
        "other's order": {"others": (replace(role, schedule=role.schedule[::-1]),)},
        "other's shard": {"others": (replace(role, schedule=(Step("p", 0, 0), Step("q"))),)},
        "other's plan": {"others": (replace(role, plans={"p": "q", "q": "q"}),)}, "members": {"groups": {"dp": ((1, 0),)}},
        "group": {"groups": {"tp": ((0, 1),)}}, "alone": {"groups": {"dp": ((0,), (1,))}}, "cut": {"sharded": ("v",)},
        "cuts": {"sharded": ("m", "v")}, "no cut": {"sharded": ()}}
    hashes = {"as it is": base.hash(), **{what: _program(**how).hash() for what, how in changed.items()}}
    same = [_program(facts={"shards": 2, "threads": 7}), _program(replay=0), _program(made_by=("x",))]
    wrong = "" if {p.hash() for p in same} == {base.hash()} else "workers, replay or who made it"
    return _apart(hashes, wrong)


# -- parts of calls -----------------------------------------------------------------------------------------------------------------


_OWN = ("adamw", "sgd", "square_sums", "update_scalars", "attention_packed", "linear_gelu", "linear_swiglu", "matmul_gelu_bwd")
"""Rows whose parts are no cuts."""


def _in_either_order(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Each, and one of several tensors with the last told first, too."""
    for sample in samples:
        yield sample
        told = sample.attrs.get("segments", ())
        if isinstance(told, tuple) and len(told) > 1 and len(told[0]) == 4:  # of an update: the norm's are a tree, whose order is bits
            yield replace(sample, attrs={**sample.attrs, "segments": told[::-1]})


def parts_of_calls(rng: np.random.Generator) -> Measured:
    """What a run looks at of a launch: on the samples of every row, the oracle on the operands of each part gives that part of what it
    gives on all of them, in whatever order the tensors of an update are told. What is drawn of many holds both ends, and nothing beyond."""
    worst, cases, seen = 0.0, 0, set[str]()
    for name, spec in table().items():
        if spec.across is not None or spec.view:
            continue
        for sample in _in_either_order(spec.samples(rng)):
            ins = tuple(np.asarray(x) for x in sample.inputs)
            if sum(x.size for x in ins) > 6000:
                continue
            types = [TensorType(x.shape, "f32" if x.dtype.kind == "f" else "i32") for x in ins]
            if name == "adamw":
                types[8:] = [TensorType(x.shape, "bf16") for x in ins[8:]]
            with np.errstate(all="ignore"):
                whole = spec.oracle(*ins, **sample.attrs)
                for part in parts(name, types, spec.infer(types, sample.attrs), sample.attrs, rng):
                    took = [take(ins[i]) for take, i in zip(part.ins, part.operands(), strict=True)]
                    made = row(part.op or name).oracle(*took, **part.attrs)
                    for take, to, got in zip(part.outs, part.results(), made, strict=True):
                        if take is None:
                            continue
                        want = np.asarray(take(whole[to]), np.float64)
                        size = float(np.abs(want[np.isfinite(want)]).max(initial=1e-300))
                        alike = (got == want) | (np.isnan(got) & np.isnan(want))
                        same = np.where(np.isfinite(want), np.abs(got - want) / size, np.where(alike, 0.0, np.inf))
                        worst, cases = max(worst, float(np.nan_to_num(same, nan=np.inf).max(initial=0.0))), cases + 1
                    seen |= {name} if part.rows or name == "update_scalars" else set()
    missing = ", ".join(sorted({*CUTS, *_OWN} - seen))
    for n in (1, RUN, MANY, RUNS * RUN, *(int(x) for x in rng.integers(RUNS * RUN + 1, 1 << 20, 20))):
        at, few = runs(n, rng), drawn(n, MANY, rng)
        ends = {*range(min(n, RUN)), *range(max(0, n - RUN), n)} <= {*at.tolist()} and {0, n - 1} <= {*few.tolist()}
        sound = all(x[0] == 0 and x[-1] == n - 1 and (np.diff(x) > 0).all() for x in (at, few))
        worst += not (ends and sound and len(at) <= RUNS * RUN and len(few) <= MANY)
    return Measured(error=worst + bool(missing), bound=1e-9, cases=cases, note=f"relative; not cut: {missing or 'none'}")
