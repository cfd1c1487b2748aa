"""Cases of what plans and Programs say of themselves: whole texts and lists of drawn ones, held to a dull account of the same. Floor 7.

Plans are drawn as data: launches anywhere, which nobody could run. The account knows no intervals: it holds each byte of the activations by
who wrote it. Texts are written here a second time, as the page of hashes has them, and compared whole, so that no field of them is only
looked at for change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from alpha.component import Measured
from alpha.errors import InputError
from alpha.gates.contracts.reference import yes
from alpha.graph.ir import Graph, Node, Value
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.plan import Launch, Memory, Plan, Program, Ref, Role, Step, describe
from alpha.graph.state import StateLayout, TensorSpec
from alpha.types import TensorType

SPACE = 160
"""Bytes of drawn activations: few, so that results fall on parts of others."""

T = TypeVar("T")


def _maybe(rng: np.random.Generator, value: T, other: Any) -> Any:
    return value if rng.random() < 0.5 else other


def _shuffled(rng: np.random.Generator, found: Mapping[str, T]) -> dict[str, T]:
    keys = list(found)
    return {keys[int(i)]: found[keys[int(i)]] for i in rng.permutation(len(keys))}


def _ref(rng: np.random.Generator, written: Sequence[bool]) -> Ref:
    """Anywhere in some arena; of activations only where something was written."""
    count = Ref("io", 8 * int(rng.integers(4)), TensorType((), "i32"))
    for _ in range(40):
        size, start = int(rng.integers(1, 9)), 4 * int(rng.integers(SPACE // 4 - 9))
        if all(written[start : start + 4 * size]):
            return Ref("act", start, TensorType((size,), _maybe(rng, "f32", "i32")), _maybe(rng, None, count))
    return Ref(("state.param", "io")[int(rng.integers(2))], 4 * int(rng.integers(20)), TensorType((2, 3), "f32"), _maybe(rng, None, count))


def _plan(rng: np.random.Generator, name: str) -> Plan:
    """Launches with each field away from its default in half of them."""
    launches, written = list[Launch](), [False] * SPACE
    for number in range(int(rng.integers(3, 9))):
        ins = tuple(_ref(rng, written) for _ in range(int(rng.integers(3))))
        outs = list[Ref]()
        for _ in range(int(rng.integers(1, 3))):
            size, start = int(rng.integers(1, 12)), 4 * int(rng.integers(SPACE // 4 - 12))
            outs.append(Ref("act", start, TensorType((size,), "f32")) if rng.random() < 0.8 else _ref(rng, [False] * SPACE))
            if outs[-1].arena == "act":
                written[start : start + 4 * size] = [True] * (4 * size)
        attrs = _shuffled(rng, {"b": 0.5, "a": int(rng.integers(9)), "c": ("x", True, None)})
        launches.append(Launch(f"op{number}", f"op{int(rng.integers(4))}.cpu", ins, tuple(outs), attrs,
                               _maybe(rng, None, Ref("act", 512, TensorType((9,), "bool"))), f"layer.{number % 2}",
                               ("forward", "backward")[number % 2], f"model.py:{number}", int(rng.integers(1, 1 << 31)), 7,
                               _maybe(rng, COMM, COMPUTE), tuple(sorted(set(rng.integers(0, number + 1, 2).tolist()))) if number else (),
                               _maybe(rng, None, int(rng.integers(3))), _maybe(rng, None, int(rng.integers(3))),
                               _maybe(rng, 0, int(rng.integers(1, 9)))))
    end = _ref(rng, written)
    arenas = {"act": SPACE + 600, "io": int(rng.integers(99)), "out": int(rng.integers(99)), "state.param": int(rng.integers(99))}
    return Plan(name, tuple(launches), _shuffled(rng, {k: _ref(rng, [False] * SPACE) for k in ("tokens", "index", "targets")}),
                _shuffled(rng, {"loss": end, "count": _ref(rng, [False] * SPACE), "again": _ref(rng, written)}), _shuffled(rng, arenas),
                Memory(1234567 + int(rng.integers(99)), 2345678, 345678))


def _said(ref: Ref | None) -> str:
    if ref is None:
        return "None"
    shape = ",".join(map(str, ref.type.shape))
    return f"{ref.arena}+{ref.offset}:{ref.type.dtype}[{shape}]" + ("" if ref.extent is None else f" rows {_said(ref.extent)}")


def _attrs(attrs: Mapping[str, object]) -> str:
    plain = {k: [*v] if isinstance(v, tuple) else v.hex() if isinstance(v, float) else v for k, v in attrs.items()}
    return json.dumps(plain, sort_keys=True)


def _effects(x: Launch | Node, sms: int) -> str:
    return ((f" stage {x.stage}" if x.stage is not None else "") + (f" microbatch {x.microbatch}" if x.microbatch is not None else "")
            + (f" sms {sms}" if sms else ""))


def _call(x: Launch, ins: str, outs: str, scratch: str, sms: int) -> str:
    return (f"{x.component} {ins} -> {outs} {_attrs(x.attrs)} {scratch} {x.layer} {x.phase}" + (" on comm" if x.stream == COMM else "")
            + (f" after {' '.join(map(str, x.after))}" if x.after else "") + _effects(x, sms))


def _text(p: Plan) -> list[str]:
    lines = [f"in {k} {_said(p.inputs[k])}" for k in ("index", "targets", "tokens")]
    lines += [_call(x, " ".join(map(_said, x.ins)), " ".join(map(_said, x.outs)), _said(x.scratch), x.sms) for x in p.launches]
    lines += [f"out {k} {_said(p.outputs[k])}" for k in ("again", "count", "loss")]
    return lines + [f"arena {k} {p.arenas[k]}" for k in ("act", "io", "out", "state.param")]


def _computation(p: Plan) -> list[str]:
    """By a table of bytes: who wrote each, as which of its own."""
    held = dict[int, tuple[str, int]]()

    def read(ref: Ref) -> str:
        if ref.arena != "act":
            return _said(ref)
        pieces = list[list[Any]]()
        for at in range(ref.offset, ref.offset + 4 * int(np.prod(ref.type.shape))):
            name, k = held[at]
            if pieces and pieces[-1][0] == name and pieces[-1][2] == k:
                pieces[-1][2] = k + 1
            else:
                pieces.append([name, k, k + 1])
        return "+".join(f"{name}[{lo}:{hi}]" for name, lo, hi in pieces) + ":" + _said(ref).partition(":")[2]

    lines = [f"in {k} {read(p.inputs[k])}" for k in ("index", "targets", "tokens")]
    for number, x in enumerate(p.launches):
        ins, outs = " ".join(map(read, x.ins)), []
        for i, ref in enumerate(x.outs):
            outs.append(_said(ref) if ref.arena != "act" else f"{number}.{i}:{_said(ref).partition(':')[2]}")
            held.update({ref.offset + k: (f"{number}.{i}", k) for k in range(4 * ref.type.shape[0])} if ref.arena == "act" else {})
        lines.append(_call(x, "", "", "None", 0) + f" {ins} -> {' '.join(outs)}")
    lines += [f"out {k} {read(p.outputs[k])}" for k in ("again", "count", "loss")]
    return lines + [f"arena {k} {p.arenas[k]}" for k in ("io", "out", "state.param")]


def _sha(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def plans(rng: np.random.Generator) -> Measured:
    """Text, hash, computation, components, work and table of drawn plans are what the dull account says, line by line."""
    wrong, cases = list[str](), 40
    for _ in range(cases):
        p = _plan(rng, "drawn")
        table = [f"plan drawn  {len(p.launches)} launches  {sum(x.flops for x in p.launches) / 1e9:.3f} GFLOP  hash {_sha(_text(p))[:12]}"]
        for i, x in enumerate(p.launches):
            ins = " ".join(_said(replace(r, extent=None)) for r in x.ins)
            table.append(f"{i:4d} {x.phase:9s} {x.layer:12s} {x.component:28s} {ins} -> {' '.join(map(_said, x.outs))}  {x.source}")
        last = f"activations: peak {p.memory.peak:,} B, lower bound 345,678 B, without sharing 2,345,678 B"
        n = len(p.launches)
        found: tuple[tuple[str, Any, Any], ...] = (("text", p.text().split("\n"), _text(p)), ("hash", p.hash(), _sha(_text(p))),
                 ("computation", p.computation().split("\n"), _computation(p)),
                 ("components", p.components(), tuple(sorted({x.component for x in p.launches}))),
                 ("flops", p.flops(), sum(x.flops for x in p.launches)),
                 ("table", p.table().split("\n"), [*table, last]),
                 ("a table cut", p.table(2).split("\n"), [*table[:3], f"     ... {n - 2} more", last]),
                 ("a table just cut", p.table(n).split("\n"), [*table, last]),
                 ("both", describe([p, p]), f"{p.table()}\n\n{p.table()}"))
        wrong += [f"{what}: {next((a for a, b in zip(got, want) if a != b), got) if isinstance(got, list) else got}"
                  for what, got, want in found if got != want]
    return yes(not wrong, "; ".join(wrong)[:200], cases=9 * cases)


def programs(rng: np.random.Generator) -> Measured:
    """Hash, kernels, roles, arenas and pieces of drawn Programs, of one rank and of many; a rank that is not there is refused."""
    wrong, cases = list[str](), 24
    for case in range(cases):
        ranks = case % 4 + 1
        own = [f"update~{r}" if r and rng.random() < 0.6 else "update" for r in range(ranks)]
        names = ["eval", "micro@0", "tree@0>1"]
        held = {name: _plan(rng, name.partition("~")[0]) for name in dict.fromkeys([*names, *own, "update"])}

        def schedule() -> tuple[Step, ...]:
            calls = list[Step]()
            for number in range(int(rng.integers(1, 8))):
                calls.append(Step("micro@0", number, int(rng.integers(3))))
                calls += [Step("tree@0>1")] * int(rng.integers(3))
            return (*calls, Step("update"))

        layout = StateLayout([TensorSpec("w", (3,), "u")])
        others = tuple(Role(schedule(), _shuffled(rng, {**{n: n for n in names}, "update": own[r]})) for r in range(1, ranks))
        groups = _shuffled(rng, {"dp": (tuple(range(ranks)),), "alone": tuple((r,) for r in range(ranks))}) if ranks > 1 else {}
        p = Program("drawn", _shuffled(rng, held), schedule(), {"param": layout, "m": layout}, _shuffled(rng, {"shards": 4, "threads": 2,
                    "zz": 0.5}), int(rng.integers(5)), ("z.pass", "a.pass"), others, groups, _maybe(rng, ("v", "m"), ()))
        lines = [f"{k} {_sha(_computation(held[k]))}" for k in sorted(held)] + [f"{s.plan} {s.shard} {s.micro}" for s in p.schedule]
        lines.append(_attrs({"shards": 4, "zz": 0.5}))
        for role in others:
            lines += [f"{s.plan} {s.shard} {s.micro}" for s in role.schedule] + [f"{k} is {role.plans[k]}" for k in sorted(role.plans)]
        lines += [f"group {k} {groups[k]}" for k in sorted(groups)] + [f"sharded {k}" for k in sorted(p.sharded)]
        kernels = tuple(sorted({x.component for plan in held.values() for x in plan.launches}))
        found = [("hash", p.hash(), _sha(lines)), ("kernels", p.kernels(), kernels), ("ranks", p.ranks, ranks),
                 ("components", p.components(), tuple(sorted({*kernels, "z.pass", "a.pass"})))]
        for rank in range(ranks):
            mine = {name: held[name] for name in names} | {"update": held[own[rank]]}
            arenas = {k: max(plan.arenas[k] for plan in mine.values()) for k in ("act", "io", "out", "state.param")}
            found += [("plans", p.plans_of(rank), mine), ("arenas", [*p.arenas(rank).items()], [*arenas.items()])]
            calls = others[rank - 1].schedule if rank else p.schedule
            pieces, count = [list[Step]()], 0
            for call in calls[:-1]:
                if call.shard is not None:
                    if p.replay and count and count % p.replay == 0:
                        pieces.append([])
                    count += 1
                pieces[-1].append(call)
            found.append(("pieces", p.replays(rank), (*map(tuple, pieces), calls[-1:])))
        found += [("pieces", p.replays(), p.replays(0)), ("arenas", p.arenas(), p.arenas(0))]
        for outside in (-1, ranks):
            try:
                p.role(outside)
                wrong.append(f"rank {outside} of {ranks}")
            except InputError as error:
                wrong += [] if f"0 to {ranks - 1}" in str(error) and str(outside) in str(error) else [f"{error}"]
        wrong += [f"{what}: {got} {want}" for what, got, want in found if got != want]
    return yes(not wrong, "; ".join(wrong)[:200], cases=10 * cases)


def graphs(rng: np.random.Generator) -> Measured:
    """The text of drawn graphs, whole: numbers of values, extents, attributes and effects; the order of dicts is no part of it."""
    wrong, cases = list[str](), 30
    for _ in range(cases):
        n = Value(TensorType((), "i32"), "n", "input")
        inputs = {"n": n, "x": Value(TensorType((4, 2), "f32"), "x", "input", extent=_maybe(rng, None, n)),
                  "a": Value(TensorType((4, 2), "f32"), "a", "input")}
        box = Value(TensorType((4, 2), "f32"), "box", "state", ("m", 64), extent=_maybe(rng, None, n))
        plain = Value(TensorType((3,), "f32"), "plain", "state", ("m", 0))
        name = {inputs[k]: f"in:{k}" for k in inputs} | {box: "state:m+64:f32[4,2]", plain: "state:m+0:f32[3]"}

        def rows(v: Value) -> str:
            return " rows in:n" if v.extent is not None else ""

        lines = [f"in:{k} {inputs[k].type}{rows(inputs[k])}" for k in ("a", "n", "x")]
        lines += ["state:m+64:f32[4,2] rows in:n"] if box.extent is not None else []
        nodes, values = list[Node](), [*inputs.values(), box, plain]
        for i in range(int(rng.integers(1, 6))):
            ins = tuple(values[int(k)] for k in rng.integers(0, len(values), int(rng.integers(3))))
            node = Node("scale", ins, _shuffled(rng, {"factor": 0.5, "b": i, "a": (1, 2)}), (), f"layer.{i}", ("forward", "wgrad")[i % 2],
                        f"model.py:{i}", _maybe(rng, COMM, COMPUTE), _maybe(rng, None, i), _maybe(rng, None, i), int(rng.integers(2)))
            node.outputs = tuple(Value(TensorType((4, i + 1), "f32"), "v", "node", None, node, k, _maybe(rng, None, n))
                                 for k in range(int(rng.integers(1, 3))))
            name |= {v: f"%{len(values) - 5 + k}" for k, v in enumerate(node.outputs)}
            values += node.outputs
            nodes.append(node)
            lines.append(" ".join(f"{name[v]}:{v.type}{rows(v)}" for v in node.outputs) + f" = scale {' '.join(name[v] for v in ins)} "
                         + f"{_attrs(node.attrs)} {node.layer} {node.phase}" + (" on comm" if node.stream == COMM else "")
                         + _effects(node, node.sms))
        outputs = _shuffled(rng, {"y": values[-1], "b": values[int(rng.integers(len(values)))]})
        boxes = [("m", 0), ("m", 64), ("a", 128)]
        updates = {boxes[int(k)]: values[int(rng.integers(len(values)))] for k in rng.permutation(3)}
        lines += [f"out:{k} = {name[outputs[k]]}" for k in ("b", "y")]
        lines += [f"update:{k}+{at} = {name[updates[k, at]]}" for k, at in (("a", 128), ("m", 0), ("m", 64))]
        g = Graph("drawn", _shuffled(rng, inputs), {("m", 64, (4, 2)): box, ("m", 0, (3,)): plain}, nodes, outputs, updates)
        readers: dict[Value, list[int]] = {v: [i for i, x in enumerate(nodes) for o in x.inputs if o is v] for v in values}
        for what, got, want in (("text", g.text().split("\n"), lines), ("hash", g.hash(), _sha(lines)),
                                ("roots", [*g.roots()], [*outputs.values(), *updates.values()]),
                                ("readers", {v: [nodes.index(x) for x in found] for v, found in g.readers().items()},
                                 {v: found for v, found in readers.items() if found}),
                                ("effects", {x.effects() for x in nodes}, {(x.stream, x.stage, x.microbatch, x.sms) for x in nodes})):
            wrong += [] if got == want else [f"{what}: {got} {want}"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=5 * cases)
