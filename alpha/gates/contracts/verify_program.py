"""Cases of `verify_program.pass`: sound Programs of many ranks are accepted, and every broken one is refused by name, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.errors import GraphError
from alpha.gates.contracts import edges
from alpha.gates.contracts.passes import traced
from alpha.gates.contracts.reference import hash_of, yes
from alpha.graph.order import COMM, COMPUTE
from alpha.graph.plan import Launch, Memory, Plan, Program, Ref, Role, Step
from alpha.graph.state import StateLayout, TensorSpec
from alpha.graph.verify_program import verify_program
from alpha.types import TensorType

Case = Callable[[np.random.Generator], Measured]

N = Ref("state.counter", 0, TensorType((), "i32"))
"""Where an extent lies."""

PAIRS = {"near": ((0, 1), (2, 3)), "far": ((0, 2), (1, 3))}


def call(op: str, n: int = 64, *, at: int = 0, dtype: str = "f32", stream: str = COMM, after: tuple[int, ...] = (), layer: str = "block.0",
         **attrs: Any) -> Launch:
    """A launch on `n` elements at byte `at` of the state arena `grad`, in place."""
    x = Ref("state.grad", at, TensorType((n,), dtype))
    ins = () if op in ("receive", "barrier") else (x,)
    outs = () if op in ("send", "barrier") else (x,)
    attrs = {"shape": (n,), "dtype": dtype, **attrs} if op == "receive" else attrs
    return Launch(op, f"{op}.planned", ins, outs, attrs, None, layer, "reduce", f"model.py:{len(layer)}", 0, 0, stream, after)


def reduced(layer: str = "block.0", n: int = 64, *, group: str = "dp", size: int = 4, **more: Any) -> Launch:
    """A sum over a group, at a place of its own for each layer."""
    return call("all_reduce", n, at=4096 * int(layer.split(".")[1]), layer=layer, group=group, size=size, reduce="sum", **more)


def reads() -> Launch:
    """A launch of the compute stream that reads what `call` reads, and writes elsewhere."""
    x = call("scale", stream=COMPUTE)
    return replace(x, outs=(replace(x.outs[0], offset=8192),))


def counted(op: str = "all_reduce", *, at: int = 0, rows: Ref | None = N, n: int = 64, other: Ref | None = N, **attrs: Any) -> Launch:
    """A launch whose operand has the extent `rows`, and whose result `other`."""
    x = call(op, n, at=at, **attrs)
    return replace(x, ins=tuple(replace(r, extent=rows) for r in x.ins), outs=tuple(replace(r, extent=other) for r in x.outs))


def job(*ranks: Sequence[Launch], groups: Any = None, text: Sequence[tuple[int, int]] | None = None) -> Program:
    """A Program whose ranks run one plan each, with these launches, for one microbatch: by default a shard of its own, in one group."""
    plans, roles = {}, []
    shards = text or [(r, 0) for r in range(len(ranks))]
    for r, launches in enumerate(ranks):
        key = "micro_last" if r == 0 else f"micro_last~{r}"
        plans[key] = Plan("micro_last", tuple(launches), {}, {}, {"state.grad": 1 << 20, "state.counter": 64}, Memory(0, 0, 0))
        roles.append(Role((Step("micro_last", *shards[r]),), {"micro_last": key}))
    return Program("job", plans, roles[0].schedule, {}, others=tuple(roles[1:]),
                   groups={"dp": (tuple(range(len(ranks))),)} if groups is None else groups)


def job_of_plans(*ranks: Sequence[Sequence[Launch]]) -> Program:
    """A Program of two ranks or more, each of which runs plan after plan; the first is for a microbatch, a shard of its own."""
    plans: dict[str, Plan] = {}
    roles = []
    for r, parts in enumerate(ranks):
        names = [f"part.{i}" for i in range(len(parts))]
        keys = {name: name if r == 0 else f"{name}~{r}" for name in names}
        plans |= {keys[name]: Plan(name, tuple(launches), {}, {}, {"state.grad": 1 << 20}, Memory(0, 0, 0))
                  for name, launches in zip(names, parts)}
        roles.append(Role((Step(names[0], r, 0), *map(Step, names[1:])), keys))
    return Program("job", plans, roles[0].schedule, {}, others=tuple(roles[1:]), groups={"dp": (tuple(range(len(ranks))),)})


def to(other: int, stage: int, op: str = "send", at: int = 4096) -> Launch:
    """One end of an exchange of two ranks, of microbatch 0, forward."""
    place: dict[str, Any] = {"to": other} if op == "send" else {"source": other}
    return replace(call(op, at=at, group="dp", size=2, **place), stage=stage, microbatch=0, phase="forward")


def back(other: int, stage: int, op: str = "receive") -> Launch:
    """The same of the backward, elsewhere in memory."""
    return replace(to(other, stage, op, 8192), phase="backward")


def give(other: int) -> Launch:
    """A send in a group of two."""
    return call("send", group="dp", size=2, to=other)


def take(other: int) -> Launch:
    """A receipt in a group of two, elsewhere in memory."""
    return call("receive", at=4096, group="dp", size=2, source=other)


def unit(i: int, *, n: int = 4096, at: int = 0, op: str = "all_reduce") -> Launch:
    """A sum over two ranks of a unit of `units`: of `n` elements from its element `at` on."""
    return call(op, n, at=4 * (4096 * i + at), layer=f"block.{i}", group="dp", size=2, reduce="sum")


def units(*launches: Launch) -> Program:
    """A Program of two ranks, whose state `grad` is of two units of 4096 elements."""
    layout = StateLayout([TensorSpec(f"block.{i}.w", (64,), f"block.{i}") for i in range(2)])
    return replace(job(launches, launches), states={"grad": layout})


def cut(i: int, *, at: int = -1) -> Launch:
    """The sum over two ranks of a unit of `units`, of which each gets its cut; `at`: of which unit, by default the same."""
    x = unit(i, op="reduce_scatter")
    return replace(x, outs=(Ref("state.sums", 8192 * (i if at < 0 else at), TensorType((2048,), "f32")),))


def gathered(i: int, *, of: int = -1, n: int = 2048) -> Launch:
    """What gathers a unit of `copies` from the ranks' cuts of it, or of another one; `n`: elements of a cut."""
    x, at = unit(i, op="all_gather"), 8192 * (i if of < 0 else of)
    return replace(x, ins=(Ref("state.own", at, TensorType((n,), "f32")),), outs=(Ref("state.copies", x.ins[0].offset, x.ins[0].type),),
                   attrs={k: v for k, v in x.attrs.items() if k != "reduce"})


def cuts(*launches: Launch) -> Program:
    """The same with `sums` and `own`, of which each rank holds its cut, and `copies` of all."""
    p = units(*launches)
    return replace(p, states={kind: p.states["grad"] for kind in ("grad", "sums", "own", "copies")}, sharded=("own", "sums"))


ELSEWHERE = Ref("act", 0, TensorType((2048,), "f32"))
"""What a rank made last, outside of the state."""


def writes(ref: Ref) -> Launch:
    """What writes there, and reads nothing."""
    return replace(call("scale", 2048, stream=COMPUTE, layer="block.1"), ins=(), outs=(ref,))


def sound() -> dict[str, Program]:
    """Programs that fit."""
    both = (reduced(), reduced("block.1", 128))
    ring = [(call("send", group="dp", size=4, to=(r + 1) % 4), call("receive", at=4096, group="dp", size=4, source=(r - 1) % 4))
            for r in range(4)]
    root = call("broadcast", group="dp", size=4, root=2)
    crossed = [(reduced(group="near", size=2), reduced("block.1", group="far", size=2)) for _ in range(4)]
    use = call("scale", stream=COMPUTE)
    near, far = reduced(group="near", size=2, stream=COMPUTE), reduced("block.1", group="far", size=2)
    waits = (call("accumulate", stream=COMPUTE), reduced(after=(0,)), call("scale", at=4096, stream=COMPUTE),
             call("scale", stream=COMPUTE, after=(1,)))
    return {"sums": job(both, both, both, both), "ring": job(ring[0], ring[1][::-1], ring[2], ring[3][::-1]),
            "root": job(*[(root, call("barrier", group="dp", size=4))] * 4), "pairs": job(*crossed, groups=PAIRS),
            "waits": job(waits, waits, waits, waits), "one": job((), groups={}),
            "two-streams": job((near, far), (far, near), (far, near), (near, far), groups=PAIRS),
            "placed": job(*[(replace(reduced(), stage=1, microbatch=0, sms=132), replace(reduced("block.1"), sms=r)) for r in range(4)]),
            "pipeline": job((to(1, 0), back(1, 0)), (to(0, 1, "receive"), back(0, 1, "send"))),
            "extents": job(*[(counted(group="dp", size=2, reduce="sum"),)] * 2),
            "extent-sent": job((counted("send", group="dp", size=2, to=1),), (counted("receive", group="dp", size=2, source=0),)),
            "plan-after-plan": job_of_plans(((give(1),), (use,), (take(1),)), ((take(0),), (use,), (give(0),))),
            "units": units(unit(1), unit(0)), "units-cut": units(unit(0, op="reduce_scatter"), unit(1)),
            "cuts": cuts(cut(1), gathered(0), cut(0), gathered(1)),
            "cut-made-behind-another": cuts(gathered(0), writes(*gathered(1).ins), replace(gathered(1), after=(1,))),
            "cut-made-before-another": cuts(gathered(1), writes(*gathered(0).ins), replace(gathered(0), after=(1,))),
            "gathered-from-no-kind": cuts(replace(gathered(0), ins=(replace(ELSEWHERE, arena="state.scratch"),)), gathered(1)),
            "gathered-from-elsewhere": cuts(replace(gathered(0), ins=(ELSEWHERE,)), replace(writes(ELSEWHERE), after=(0,)), gathered(1)),
            "units-in-pieces": units(unit(0, n=64), unit(1), unit(0, n=4032, at=64)),
            "both-read": job((call("send", group="dp", size=2, to=1), reads()), (call("receive", group="dp", size=2, source=0),))}


def _with_shared(p: Program) -> Program:
    """The same, whose second rank runs the first plan of the first one in place of its own."""
    role = p.others[0]
    plans = {key: plan for key, plan in p.plans.items() if key != role.plans["part.0"]}
    return replace(p, plans=plans, others=(replace(role, plans={**role.plans, "part.0": p.role(0).plans["part.0"]}),))


def broken() -> dict[str, tuple[Program, str]]:
    """Programs that do not fit, each with a text that its refusal must say."""
    one, two = reduced(), reduced("block.1")
    send, receive = call("send", group="dp", size=4, to=1), call("receive", group="dp", size=4, source=0)
    alone: list[tuple[Launch, ...]] = [(), ()]
    a, b = reduced(group="near", size=2), reduced("block.1", group="far", size=2)
    single = reduced(size=1)
    use, late = call("scale", stream=COMPUTE), call("scale", stream=COMPUTE, after=(0,))
    ring = [(call("send", group="dp", size=4, to=(r + 1) % 4), call("receive", at=4096, group="dp", size=4, source=(r - 1) % 4))
            for r in range(4)]

    def odd(x: Launch) -> Program:
        """Three ranks sum, the last one does something else."""
        return job((one,), (one,), (one,), (x,))

    def one_rank(x: Launch) -> Program:
        """A rank by itself; what is no collective runs beside."""
        return job((replace(x, attrs={"group": "dp", "size": 1, "reduce": "sum"}),))

    def rooted(x: Launch) -> Program:
        root = call("broadcast", group="dp", size=4, root=0)
        return job((root,), (root,), (root,), (x,))

    return {
        "unmatched-send": (job((send,), (), *alone), "rank 0: send"),
        "unmatched-receive": (job((), (receive,), *alone), "rank 1: receive"),
        "send-count": (job((send,), (call("receive", 32, group="dp", size=4, source=0),), *alone), "rank 1: receive(f32[32])"),
        "send-dtype": (job((send,), (call("receive", dtype="bf16", group="dp", size=4, source=0),), *alone), "bf16"),
        "swapped-order": (job((one, two), (one, two), (two, one), (one, two)), "rank 2: all_reduce(f32[64]) of block.1"),
        "missing-member": (job((one, two), (one, two), (one,), (one, two)), "rank 2 has no number 1"),
        "cyclic-wait": (job((a, b), (b, a), (b, a), (a, b), groups=PAIRS), "circle"),
        "ring-of-sends": (job(*ring), "circle"),
        "circle-over-plans": (job_of_plans(((give(1),), (use,), (take(1),)), ((give(0),), (use,), (take(0),))), "circle"),
        "circle-over-idle-plans": (job_of_plans(((give(1),), (), (use,), (take(1),)), ((use,), (give(0), take(0)), (), ())), "circle"),
        "wrong-root": (rooted(call("broadcast", group="dp", size=4, root=1)), "rank 3: broadcast"),
        "no-such-root": (job(*[(call("broadcast", group="dp", size=4, root=4),)] * 4), "no member"),
        "to-itself": (job((call("send", group="dp", size=4, to=0),), (), *alone), "own rank"),
        "count": (odd(reduced(n=65)), "rank 3: all_reduce(f32[65])"),
        "dtype": (odd(reduced(dtype="bf16")), "element type"),
        "op": (odd(call("broadcast", group="dp", size=4, root=0)), "in the op"),
        "reduce": (odd(replace(one, attrs={**one.attrs, "reduce": "average"})), "attributes"),
        "wrong-group": (odd(reduced(group="tp")), "'tp'"),
        "wrong-size": (odd(reduced(size=2)), "2 members"),
        "parts": (job((one,), (one,), (one,), (one,), groups={"dp": ((0, 1, 2),)}), "does not part"),
        "doubled-rank": (job((one,), (one,), (one,), (one,), groups={"dp": ((0, 1, 2, 3), (3,))}), "does not part"),
        "read-too-early": (job((one, use)), "same bytes"),
        "written-meanwhile": (job((use, one)), "same bytes"),
        "waits-for-another": (job((two, one, late)), "same bytes"),
        "overwritten": (job((use, call("send", group="dp", size=4, to=1, after=(0,)), call("gelu", stream=COMPUTE))), "same bytes"),
        "read-meanwhile": (job((call("receive", group="dp", size=4, source=1), reads())), "same bytes"),
        "overlap-before": (job((call("all_reduce", at=128, group="dp", size=1, reduce="sum"), use)), "same bytes"),
        "scratch": (job((single, replace(call("gelu", at=4096, stream=COMPUTE), scratch=single.outs[0])),), "same bytes"),
        "waits-ahead": (job((replace(one, after=(1,)), use)), "does not come before"),
        "unordered": (job((one, replace(two, stream=COMPUTE))), "nothing orders"),
        "sms": (odd(replace(one, sms=133)), "rank 3: all_reduce(f32[64]) of block.0, plan micro_last, model line model.py:7: 133"),
        "sms-below": (odd(replace(one, sms=-1)), "SM budget"), "stage-below": (odd(replace(one, stage=-1)), "rank 3: all_reduce"),
        "other-stage": (odd(replace(one, stage=1)), "in the stage"),
        "other-microbatch": (odd(replace(one, microbatch=0)), "in the microbatch"),
        "step-microbatch": (odd(replace(use, microbatch=1)), "rank 3: scale(f32[64]) of block.0, plan micro_last, model line model.py:7: "
                                                             "microbatch 1"),
        "exchange-stage": (job((to(1, 1),), (to(0, 0, "receive"),)), "stage 0, from rank 0: send"),
        "exchange-back": (job((back(1, 1),), (back(0, 0, "send"),)), "stage 1, from rank 1: send"),
        "exchange-microbatch": (job((to(1, 0),), (replace(to(0, 1, "receive"), microbatch=None),)), "two microbatches"),
        "extent-elsewhere": (one_rank(counted(rows=replace(N, arena="act"), other=None)), "rank 0: all_reduce(f32[64]) of block.0"),
        "extent-behind": (one_rank(counted(rows=replace(N, offset=64), other=None)), "does not know"),
        "extent-type": (one_rank(counted(rows=replace(N, type=TensorType((1,), "i32")), other=None)), "does not know"),
        "extent-row": (one_rank(counted("gelu")), "behind an extent"), "extent-lost": (one_rank(counted(other=None)), "without its"),
        "extent-two": (one_rank(counted(other=replace(N, offset=4))), "several extents"),
        "extent-of-one": (odd(counted(group="dp", size=4, reduce="sum")), "in the extent"),
        "extent-exchange": (job((counted("send", group="dp", size=2, to=1),), (call("receive", group="dp", size=2, source=0),)),
                            "one alone has an extent"),
        "extent-overwritten": (job((counted(group="dp", size=1, reduce="sum"), replace(use, outs=(replace(N, extent=None),), ins=()))),
                               "same bytes"),
        "unit-missing": (units(unit(0)), "nothing sums block.1"), "unit-first-missing": (units(unit(1)), "nothing sums block.0"),
        "unit-in-part": (units(unit(0, n=4032), unit(1)), "nothing sums block.0"),
        "unit-twice": (units(unit(0), unit(1), unit(1)), "block.1 is summed before"),
        "unit-cut-twice": (units(unit(0), unit(1), unit(1, op="reduce_scatter")), "block.1 is summed before"),
        "unit-of-another": (units(unit(0, n=4160), unit(1)), "block.1 is summed before"),
        "cut-of-another": (cuts(cut(0, at=1), cut(1, at=0)), "block.0 and block.1"),
        "cut-twice": (cuts(cut(0), cut(1), replace(cut(1), ins=(Ref("act", 0, TensorType((4096,), "f32")),))), "block.1 is summed before"),
        "cut-missing": (cuts(cut(0), unit(1)), "nothing sums block.1"),
        "cut-apart": (cuts(cut(0), replace(cut(1), outs=(Ref("state.sums", 8448, TensorType((1984,), "f32")),))), "is not of a unit"),
        "gather-of-another": (cuts(cut(0), cut(1), gathered(0, of=1), gathered(1, of=0)), "block.1 and block.0"),
        "gather-twice": (cuts(gathered(0), gathered(1), gathered(1)), "block.1 is gathered before"),
        "gather-missing": (cuts(gathered(0)), "nothing gathers block.1"),
        "gather-of-a-part": (cuts(gathered(0), gathered(1, n=1984)), "is not of a unit"),
        "gather-too-early": (cuts(gathered(0), gathered(1), replace(writes(*gathered(1).ins), after=(1,))),
                             "and then scale of block.1"),
        "gather-outside": (replace(cuts(), plans={**cuts().plans, "narrow": Plan("narrow", (gathered(0),), {}, {}, {}, Memory(0, 0, 0))},
                                   others=tuple(replace(role, plans={**role.plans, "narrow": "narrow"}) for role in cuts().others)),
                           "nothing gathers block.1"),
        "behind-a-shared-plan": (_with_shared(job_of_plans([(use,), (use,)], [(use,), (replace(one, sms=133),)])),
                                 "rank 1: all_reduce(f32[64]) of block.0, plan part.1"),
        "text-twice": (job((one,), (one,), (one,), (one,), text=[(0, 0), (1, 0), (1, 0), (3, 0)]), "rank 1 and rank 2"),
        "text-missing": (job((one,), (one,), (one,), (one,), text=[(0, 0), (1, 0), (2, 0), (4, 0)]), "shard 3"),
    }


def _accepts(name: str) -> Case:
    def case(rng: np.random.Generator) -> Measured:
        program = sound()[name]
        return yes(verify_program(program) is program)
    return case


def _refuses(name: str) -> Case:
    def case(rng: np.random.Generator) -> Measured:
        program, said = broken()[name]
        try:
            verify_program(program)
        except GraphError as error:
            return yes(said in str(error), str(error).replace("\n", " ")[:200])
        return yes(False, "accepted")
    return case


def _says_the_same(rng: np.random.Generator) -> Measured:
    """The refusals of all broken programs, word for word."""
    said = []
    for program, _ in broken().values():
        try:
            verify_program(program)
        except GraphError as error:
            said.append(str(error))
    return Measured(error=float(len(said) != len(broken())), bound=0.0, cases=len(said),
                    digest=hash_of(np.frombuffer("\n".join(said).encode(), np.uint8)))


def _edges(rng: np.random.Generator) -> Measured:
    """What refusals say where something is left out: no group at all, no layer, a root that is no number, extents of extents, operands
    without rows; a circle behind what all have done; and what is taken beside: an exchange one end of which has no stage."""
    barrier = call("barrier", group="all", size=4)
    near, far = reduced(group="near", size=2), reduced("block.1", group="far", size=2)
    ring = job((barrier, near, far), (barrier, far, near), (barrier, far, near), (barrier, near, far),
               groups={**PAIRS, "all": (tuple(range(4)),)})
    scalar = replace(counted(group="dp", size=1, reduce="sum"), ins=(Ref("state.grad", 0, TensorType((), "f32"), N),))
    nowhere = replace(counted(rows=replace(N, arena="state.nothing"), group="dp", size=1, reduce="sum"), layer="")
    step = Step("micro_last", 0, None)
    unnamed = job((reduced(size=1),))
    found = edges.told(
        ("no groups", lambda: verify_program(job((reduced(size=1),), groups={})), GraphError, ("names a group", "'dp'", "no groups")),
        ("a root in words", lambda: verify_program(job((call("broadcast", group="dp", size=1, root="0"),))), GraphError,
         ("root of a collective is no member", "0 to 0")),
        ("no layer", lambda: verify_program(job((nowhere,))), GraphError, ("rank 0: all_reduce(f32[64]) of no layer", "model line")),
        ("an extent of an extent", lambda: verify_program(job((counted(rows=replace(N, extent=N), group="dp", size=1, reduce="sum"),))),
         GraphError, ("rank 0: all_reduce(f32[64]) of block.0",)),
        ("an operand without rows", lambda: verify_program(job((scalar,))), GraphError, ("all_reduce(f32[])",)),
        ("a circle behind a barrier", lambda: verify_program(ring), GraphError, ("in a circle", "behind all_reduce", "behind all_reduce")),
        ("a step without a microbatch", lambda: verify_program(replace(unnamed, schedule=(step,))), None, ()),
        ("one end without a stage", lambda: verify_program(job((replace(to(1, 0), stage=None),), (to(0, 1, "receive"),))), None, ()),
        ("the other end", lambda: verify_program(job((to(1, 1),), (replace(to(0, 0, "receive"), stage=None),))), None, ()))
    return found


def _dealt(rng: np.random.Generator) -> Measured:
    """Of drawn numbers of shards and microbatches, dealt to ranks in any order, each has to be run by one rank: with any of them left out
    or run twice it is refused by name, but for the last ones, without which there are fewer."""
    wrong, cases = list[str](), 0
    for shards, micros in ((1, 3), (2, 2), (3, 2), (2, 3)):
        whole = [(shard, micro) for shard in range(shards) for micro in range(micros)]
        for out in (None, *whole):
            text = [whole[i] for i in rng.permutation(len(whole)) if whole[i] != out]
            left = {*text}
            said = ""
            for shard in range(max(shard for shard, _ in text) + 1):
                for micro in range(max(micro for _, micro in text) + 1):
                    said = said or ("" if (shard, micro) in left else f"shard {shard}, microbatch {micro}")
            again = text[int(rng.integers(len(text)))]
            for dealt, words in ((text, said), ([*text, again], f"shard {again[0]}, microbatch {again[1]}")):
                cases += 1
                try:
                    verify_program(job(*([] for _ in dealt), text=dealt))
                    wrong += [f"{dealt} is taken"] if words else []
                except GraphError as error:
                    wrong += [] if words and words in str(error) else [f"{dealt}: {error}"]
    return yes(not wrong, "; ".join(wrong)[:200], cases=cases)


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "verify_program.pass": {"parity": [*((name, _accepts(name)) for name in sound()), ("texts", traced.program_texts)],
                            "determinism": [("refusals", _says_the_same)],
                            "faults": [*((name, _refuses(name)) for name in broken()), ("edges", _edges), ("dealt", _dealt)]},
}
