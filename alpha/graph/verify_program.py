"""verify_program: that all ranks of a Program meet in their collectives, proved before anything runs. Floor 2.

All roles are run at once on paper. Every rank's launches that act on others are brought into the order in which it issues them. Then what
the members of a group issue is laid side by side, and every match becomes one event; the whole can end only if the events have an order.
A send counts as met when its receive runs, so a Program that needs a transport to hold messages back is refused too.

GraphError names rank, op and model line of what does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from alpha.errors import GraphError
from alpha.graph.effects import COUNT, Refusal, backward, cannot_cross, refused
from alpha.graph.ir import attrs_text
from alpha.graph.order import COMPUTE, Order
from alpha.graph.plan import Launch, Plan, Program, Ref
from alpha.graph.state import ShardedLayout, StateLayout
from alpha.ops.collectives import SUMS
from alpha.ops.table import row
from alpha.types import ITEMSIZE

PLACES = {"broadcast": "root", "reduce": "root", "send": "to", "receive": "source"}
"""Rows of one member that differs from the others -> the attribute that says which."""


@dataclass(eq=False)
class _Call:
    """One launch of one rank that acts on others. `earlier`: the calls of the same rank that have ended when it begins, the latest ones."""

    rank: int
    plan: str
    launch: Launch
    members: tuple[int, ...]
    earlier: list[_Call] = field(default_factory=list)
    event: int = -1

    def __str__(self) -> str:
        return _told(self.rank, self.plan, self.launch)


def verify_program(program: Program) -> Program:
    """The program unchanged, or a GraphError. A Program of one rank without collectives is sound if its plans are.

    Invariants: every group parts the ranks; each microbatch of each shard is run by one rank; of a kind of state that a step sums over a
    group every unit is summed once, and of one that it gathers every unit is gathered once; what a sum cuts, and what is gathered of a cut,
    is the rank's cut of the same unit, which nothing writes after it was gathered; launches of two streams that touch the same bytes, one
    of them writing, are ordered; the members of a group issue the same collectives in the same order, with one root, count and element
    type; every send meets a receive; the ranks never wait for one another in a circle; effects and extents are such as
    alpha/graph/effects.py allows, and members agree in them.
    """
    _groups_part_ranks(program)
    _effects_can_be(program)
    _text_is_dealt_once(program)
    _units_are_summed_once(program)
    _units_are_cut_and_gathered_once(program)
    orders = {key: _ordered(key, plan) for key, plan in program.plans.items()}
    calls = [_issued(program, rank, orders) for rank in range(program.ranks)]
    events: list[list[_Call]] = []
    for name, parts in sorted(program.groups.items()):
        for members in parts:
            own = [[c for c in calls[rank] if c.launch.attrs["group"] == name] for rank in members]
            events += _matched(name, own)
            events += _exchanged(members, own)
    _can_end(events)
    return program


def _groups_part_ranks(program: Program) -> None:
    for name, parts in program.groups.items():
        held = sorted(rank for members in parts for rank in members)
        if held != list(range(program.ranks)):
            raise GraphError(f"group {name!r} does not part the ranks", came=parts,
                             expected=f"each of ranks 0 to {program.ranks - 1} in exactly one tuple")


def _text_is_dealt_once(program: Program) -> None:
    found: dict[tuple[int, int], int] = {}
    for rank in range(program.ranks):
        for call in program.role(rank).schedule:
            if call.shard is None or call.micro is None:
                continue
            if (call.shard, call.micro) in found:
                raise GraphError("two calls of a step have the same text", came=f"shard {call.shard}, microbatch {call.micro}: rank "
                                 f"{found[call.shard, call.micro]} and rank {rank}", expected="every microbatch of a shard once")
            found[call.shard, call.micro] = rank
    shards, micros = ({key[i] for key in found} for i in (0, 1))
    for shard in range(max(shards, default=-1) + 1):
        for micro in range(max(micros, default=-1) + 1):
            if (shard, micro) not in found:
                raise GraphError("no rank runs some text of a step", came=f"shard {shard}, microbatch {micro}",
                                 expected="every microbatch of a shard once")


def _units_are_summed_once(program: Program) -> None:
    """Sums whose operands lie in a kind of state, of one group in one step, cover its units without a gap, and none of them twice."""
    for rank in range(program.ranks):
        role = program.role(rank)
        found: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
        for step in role.schedule:
            for x in program.plans[role.plans[step.plan]].launches:
                kind = x.ins[0].arena.removeprefix("state.") if x.ins else ""
                if x.op in SUMS and kind in program.states:
                    summed = found.setdefault((kind, str(x.attrs["group"])), [])
                    summed.append((x.ins[0].offset, x.ins[0].stop, _told(rank, step.plan, x)))
        for (kind, group), summed in found.items():
            _once(program.states[kind], summed, f"{kind} is summed over group {group!r}", "sums", rank)


def _once(layout: StateLayout | ShardedLayout, found: Iterable[tuple[int, int, str]], what: str, does: str, rank: int) -> None:
    """Ranges of bytes, each with who is told of it, cover the units of a layout, and none of them twice."""
    at, width = 0, ITEMSIZE[layout.dtype]
    end, did = layout.size * width, {"sums": "summed", "gathers": "gathered"}[does]
    for start, stop, told in (*sorted(found), (end, end, f"rank {rank}: the end of a step")):
        unit = next((u.name for u in layout.units if min(start, at) < u.stop * width), "none")
        if start > at:
            raise GraphError(f"{what}, but for a unit", came=f"{told}: nothing {does} {unit}", expected="every unit once")
        if start < at:
            raise GraphError(f"{what}, a unit twice", came=f"{told}: {unit} is {did} before", expected="every unit once")
        at = stop


def _units_are_cut_and_gathered_once(program: Program) -> None:
    """Sums into a kind that ranks share cover the rank's cut of it, and gathers into a kind of state all of it, in a step or in a plan
    outside of it: no unit is missing, none is there twice. Operand and result are of one unit."""
    for rank in range(program.ranks):
        role = program.role(rank)
        steps = [[step.plan for step in role.schedule], *([name] for name in role.plans if name not in {s.plan for s in role.schedule})]
        for names in steps:
            summed: dict[str, list[tuple[int, int, str]]] = {}
            gathered: dict[str, list[tuple[int, int, str]]] = {}
            for name in names:
                launches = program.plans[role.plans[name]].launches
                for i, x in enumerate(launches):
                    kind = x.outs[0].arena.removeprefix("state.") if x.outs else ""
                    if x.op not in ("reduce_scatter", "all_gather") or kind not in program.states:
                        continue
                    told, (y,) = _told(rank, name, x), x.outs
                    _of_one_unit(program, x, told)
                    if x.op == "all_gather" or kind in program.sharded:
                        (gathered if x.op == "all_gather" else summed).setdefault(kind, []).append((y.offset, y.stop, told))
                    later = next((z for z in launches[i + 1 :] for r in z.outs if x.op == "all_gather" and x.ins[0].arena == r.arena
                                  and r.offset < x.ins[0].stop and x.ins[0].offset < r.stop), None)
                    if later is not None and x.ins[0].arena.startswith("state."):
                        raise GraphError("a cut is written after it was gathered", came=f"{told}, and then {later.op} of {later.layer}",
                                         expected="the gather behind what writes the cut")
            for kind, found in summed.items():
                _once(program.states[kind].shard(program.ranks), found, f"the cut of {kind} is summed", "sums", rank)
            for kind, found in gathered.items():
                _once(program.states[kind], found, f"{kind} is gathered", "gathers", rank)


def _of_one_unit(program: Program, x: Launch, told: str) -> None:
    """A sum that is cut, or a gather of cuts: where operand and result lie in the state, they are one unit and its cut."""
    units = [_unit_of(program, r) for r in (*x.ins, *x.outs)]
    if None in units:
        raise GraphError("a collective of the state is not of a unit", came=f"{told}: {', '.join(map(str, (*x.ins, *x.outs)))}",
                         expected="a unit, or a rank's cut of it")
    if len({unit for unit in units if unit}) > 1:
        raise GraphError("a unit and the cut of another one", came=f"{told}: {' and '.join(map(str, units))}",
                         expected="the cut of the unit itself")


def _unit_of(program: Program, ref: Ref) -> str | None:
    """The unit that an operand in the state is, or is the cut of; '' for one that lies elsewhere, None for no unit."""
    kind = ref.arena.removeprefix("state.")
    if kind == ref.arena or kind not in program.states:
        return ""
    layout = program.states[kind]
    width = ITEMSIZE[layout.dtype]
    units = layout.shard(program.ranks).units if kind in program.sharded else layout.units
    return next((u.name for u in units if (u.start * width, u.stop * width) == (ref.offset, ref.stop)), None)


def _effects_can_be(program: Program) -> None:
    """Of every launch of every rank: its effects by themselves, its microbatch against the step's, and its extents."""
    seen: set[tuple[str, int | None]] = set()
    for rank in range(program.ranks):
        role = program.role(rank)
        runs = {(name, None) for name in role.plans} | {(step.plan, step.micro) for step in role.schedule}
        for name, micro in sorted(runs, key=str):
            key = role.plans[name]
            if (key, micro) in seen:
                continue
            seen.add((key, micro))
            for x in program.plans[key].launches:
                found = refused(x) or _other_microbatch(x, micro) or _no_extent(x, program.plans[key])
                if found is not None:
                    raise GraphError(found[0], came=f"{_told(rank, name, x)}: {found[1]}", expected=found[2])


def _other_microbatch(x: Launch, micro: int | None) -> Refusal | None:
    if micro is None or x.microbatch is None or x.microbatch == micro:
        return None
    return "a launch of another microbatch than its plan runs for", f"microbatch {x.microbatch}", f"microbatch {micro}"


def _no_extent(x: Launch, plan: Plan) -> Refusal | None:
    """Why the extents of a launch cannot be: each is an integer among the inputs or in the state, and the row goes by rows."""
    refs = (*x.ins, *x.outs)
    extents = {r.extent for r in refs if r.extent is not None}
    for n in extents:
        known = n in plan.inputs.values() or (n.arena.startswith("state.") and n.stop <= plan.arenas.get(n.arena, 0))
        if not known or n.type != COUNT or n.extent is not None:
            return "an extent that the plan does not know", n, f"an input of the plan or a state box, {COUNT}"
    if any(r.extent is not None and not r.type.shape for r in refs):
        return "an extent of a tensor without rows", ", ".join(map(str, refs)), "a tensor of one axis or more"
    return cannot_cross(x.op, x.phase, [(r.type, r.extent) for r in x.ins], [(r.type, r.extent) for r in x.outs])


def _told(rank: int, plan: str, x: Launch) -> str:
    types = ", ".join(str(r.type) for r in (x.ins or x.outs))
    return f"rank {rank}: {x.op}({types}) of {x.layer or 'no layer'}, plan {plan}, model line {x.source}"


def _ordered(key: str, plan: Plan) -> Order:
    """The order of a plan's launches. GraphError if two that may run at once touch the same bytes, unless both read them."""
    try:
        order = Order([x.stream for x in plan.launches], [x.after for x in plan.launches])
    except GraphError as error:
        raise GraphError(f"plan {key}: {error.what}", came=error.came, expected=error.expected, do=error.do) from None
    for i, x in enumerate(plan.launches):
        if x.stream == COMPUTE:
            continue
        first, last = order.window(i)
        for j in range(max(first, 0), min(last + 1, len(plan.launches))):
            other = plan.launches[j]
            if j != i and not order.before(i, j) and not order.before(j, i) and (shared := _shared(x, other)) is not None:
                raise GraphError(f"plan {key}: two launches that may run at once touch the same bytes",
                                 came=f"launch {i}, {x.op} of {x.layer}, line {x.source}, and launch {j}, {other.op} of {other.layer}, "
                                      f"line {other.source}: {shared}",
                                 expected="a wait between them", do="the memory pass, or who made these waits, is wrong")
    last_of: dict[object, int] = {}
    for i, x in enumerate(plan.launches):
        if row(x.op).across is None:
            continue
        group = x.attrs["group"]
        if group in last_of and not order.before(last_of[group], i):
            raise GraphError(f"plan {key}: nothing orders two collectives of group {group!r}",
                             came=f"{plan.launches[last_of[group]].op} and {x.op} of {x.layer}, line {x.source}",
                             expected="a wait between them")
        last_of[group] = i
    return order


def _shared(a: Launch, b: Launch) -> Ref | None:
    """What of `a` lies on bytes of `b`, one of them writing."""
    for x, x_writes in _touched(a):
        for y, y_writes in _touched(b):
            if (x_writes or y_writes) and x.arena == y.arena and x.offset < y.stop and y.offset < x.stop:
                return x
    return None


def _touched(x: Launch) -> Iterable[tuple[Ref, bool]]:
    yield from ((r, False) for r in x.ins)
    yield from ((r.extent, False) for r in (*x.ins, *x.outs) if r.extent is not None)
    yield from ((r, True) for r in x.outs)
    if x.scratch is not None:
        yield x.scratch, True


def _issued(program: Program, rank: int, orders: dict[str, Order]) -> list[_Call]:
    """What a rank issues in one step, in list order, each knowing what of it has ended before."""
    role = program.role(rank)
    found: list[_Call] = []
    before: list[_Call] = []
    for step in role.schedule:
        key = role.plans[step.plan]
        order, within = orders[key], [(i, x) for i, x in enumerate(program.plans[key].launches) if row(x.op).across is not None]
        made: dict[int, _Call] = {}
        for i, x in within:
            call = _Call(rank, step.plan, x, _members(program, rank, step.plan, x))
            latest: dict[str, int] = {}
            for j in made:
                if order.before(j, i):
                    latest[program.plans[key].launches[j].stream] = j
            call.earlier = [made[j] for j in latest.values()] or before
            made[i] = call
        found += made.values()
        before = list(made.values()) or before
    return found


def _members(program: Program, rank: int, plan: str, x: Launch) -> tuple[int, ...]:
    """The members of the caller's tuple. GraphError where group, size or place are not those of the Program."""
    where = f"rank {rank}: {x.op} of {x.layer or 'no layer'}, plan {plan}, model line {x.source}"
    name, size = x.attrs["group"], x.attrs["size"]
    if name not in program.groups:
        raise GraphError("a collective names a group that the program has not", came=f"{where}: {name!r}",
                         expected=", ".join(sorted(program.groups)) or "no groups")
    members = next(part for part in program.groups[str(name)] if rank in part)
    if size != len(members):
        raise GraphError("a collective counts other members than its group has", came=f"{where}: {size} members",
                         expected=f"{len(members)} of group {name!r}: {members}")
    place = x.attrs[PLACES[x.op]] if x.op in PLACES else 0
    if not isinstance(place, int) or not 0 <= place < len(members):
        raise GraphError(f"the {PLACES[x.op]} of a collective is no member", came=f"{where}: {place}", expected=f"0 to {len(members) - 1}")
    if x.op in ("send", "receive") and members[place] == rank:
        raise GraphError(f"a {x.op} names its own rank", came=where, expected="another member")
    return members


def _facts(call: _Call) -> dict[str, str]:
    """What must be equal on all members, by what an error calls it."""
    x, place = call.launch, PLACES.get(call.launch.op, "")
    rest = {k: v for k, v in x.attrs.items() if k != place}
    return {"op": x.op, "layer": x.layer, "element type": " ".join(r.type.dtype for r in (*x.ins, *x.outs)),
            "count": " ".join(str(list(r.type.shape)) for r in (*x.ins, *x.outs)), "root": str(x.attrs.get(place)),
            "extent": " ".join(str(r.extent) for r in (*x.ins, *x.outs)), "stage": str(x.stage), "microbatch": str(x.microbatch),
            "attributes": attrs_text(rest)}


def _matched(name: str, own: Sequence[Sequence[_Call]]) -> list[list[_Call]]:
    """The collectives of one tuple, each with the calls of all members."""
    sequences = [[c for c in calls if c.launch.op not in ("send", "receive")] for calls in own]
    events = []
    for k in range(max(map(len, sequences), default=0)):
        here = [calls[k] for calls in sequences if k < len(calls)]
        first = here[0]
        for other in here[1:]:
            mine, theirs = _facts(first), _facts(other)
            differing = [what for what in mine if mine[what] != theirs[what]]
            if differing:
                what = differing[0]
                raise GraphError(f"members of group {name!r} differ in the {what} of their collective number {k}",
                                 came=f"{other}: {theirs[what]}", expected=f"as {first}: {mine[what]}",
                                 do="every member issues the same collectives in the same order")
        if len(here) < len(sequences):
            absent = [rank for rank, calls in zip(first.members, sequences) if k >= len(calls)]
            raise GraphError(f"a member of group {name!r} never comes to a collective", came=f"rank {absent[0]} has no number {k}",
                             expected=f"as {first}", do="every member issues the same collectives in the same order")
        events.append(here)
    return events


def _exchanged(members: tuple[int, ...], own: Sequence[Sequence[_Call]]) -> list[list[_Call]]:
    """Sends with their receives, in order between each two members."""
    waiting: dict[tuple[int, int], tuple[list[_Call], list[_Call]]] = {}
    for rank, calls in zip(members, own):
        for c in calls:
            if c.launch.op == "send":
                waiting.setdefault((rank, members[c.launch.attrs["to"]]), ([], []))[0].append(c)  # type: ignore[call-overload]
            elif c.launch.op == "receive":
                waiting.setdefault((members[c.launch.attrs["source"]], rank), ([], []))[1].append(c)  # type: ignore[call-overload]
    events = []
    for (sender, receiver), (sends, receives) in sorted(waiting.items()):
        for k in range(max(len(sends), len(receives))):
            if k >= len(receives):
                raise GraphError("a send meets no receive", came=sends[k], expected=f"a receive on rank {receiver} from rank {sender}")
            if k >= len(sends):
                raise GraphError("a receive meets no send", came=receives[k], expected=f"a send on rank {sender} to rank {receiver}")
            given, taken = sends[k].launch.ins[0].type, receives[k].launch.outs[0].type
            if given != taken:
                raise GraphError("a send and its receive differ in count or element type", came=f"{receives[k]}: {taken}",
                                 expected=f"as {sends[k]}: {given}")
            _exchange_placed(sends[k], receives[k])
            events.append([sends[k], receives[k]])
    return events


def _exchange_placed(send: _Call, receive: _Call) -> None:
    """GraphError where an exchange joins two microbatches, or stages against the way of its phase, or where one end alone has an
    extent."""
    a, b = send.launch, receive.launch
    if a.microbatch != b.microbatch:
        raise GraphError("a send and its receive are of two microbatches", came=f"{receive}: microbatch {b.microbatch}",
                         expected=f"as {send}: microbatch {a.microbatch}")
    if (a.ins[0].extent is None) != (b.outs[0].extent is None):
        raise GraphError("of a send and its receive one alone has an extent", came=f"{receive}: {b.outs[0]}",
                         expected=f"as {send}: {a.ins[0]}")
    if a.stage is not None and b.stage is not None:
        back = backward(a.phase)
        if b.stage > a.stage if back else b.stage < a.stage:
            raise GraphError("a stage that goes backward", came=f"{receive}: stage {b.stage}, from {send}: stage {a.stage}",
                             expected="the same stage or an earlier one" if back else "the same stage or a later one")


def _can_end(events: Sequence[Sequence[_Call]]) -> None:
    """GraphError if the events cannot be put in an order: then ranks wait for one another in a circle."""
    for number, event in enumerate(events):
        for call in event:
            call.event = number
    needs = [{e.event for call in event for e in call.earlier} for event in events]
    followers: list[list[int]] = [[] for _ in events]
    for number, earlier in enumerate(needs):
        for e in earlier:
            followers[e].append(number)
    left = [len(earlier) for earlier in needs]
    ready = [number for number, n in enumerate(left) if n == 0]
    done = 0
    while ready:
        done += 1
        for follower in followers[ready.pop()]:
            left[follower] -= 1
            if left[follower] == 0:
                ready.append(follower)
    if done == len(events):
        return
    at = next(number for number, n in enumerate(left) if n)
    path: list[int] = []
    while at not in path:
        path.append(at)
        at = next(e for e in sorted(needs[at]) if left[e])
    circle = [*path[path.index(at) :], at]
    told = []
    for waits, blocks in pairwise(circle):
        call = next(c for c in events[waits] if any(e.event == blocks for e in c.earlier))
        told.append(f"{call}, behind {next(e for e in call.earlier if e.event == blocks).launch.op}")
    raise GraphError("ranks wait for one another in a circle", came="; ".join(told), expected="an order in which all collectives can run",
                     do="let all ranks issue the collectives of these groups in one order")
