"""Cases of the collectives among real ranks, processes of a warm server: bits, adjoints, repetition under jitter, faults. Floor 7.

A collective is a component with an op row whose gates are contracts: a case is a whole job, not a call on buffers of this process.
Functions named `at_*` run in every member and return (what was wrong, how many calls were held to it).
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from functools import reduce as fold
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha.comm import catalogue, collectives
from alpha.comm.checked import CHECKED
from alpha.comm.message import About
from alpha.comm.rule import COSTS, Rule
from alpha.comm.shm import LENT_BYTES, SharedMemory
from alpha.comm.watch import Deadlines
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.errors import GraphError, ShapeError
from alpha.gates.contracts.ranks.calls import ALGORITHMS, BY_NAME, COUNTS, DTYPES, OPS, Mute, drawn, misbehave, one, summed
from alpha.gates.contracts.ranks.ends import at_checked
from alpha.gates.contracts.ranks.members import Ended, members
from alpha.gates.contracts.ranks.places import rules
from alpha.ops import collectives as rows
from alpha.ops import scale
from alpha.ops.numerics import UNIT_ROUNDOFF, round_to
from alpha.types import FLOATS, NUMPY, TensorType

Case = Callable[[np.random.Generator], Measured]
Found = tuple[list[str], int]

SMALL: dict[str, Any] = {"payload_bytes": 4096, "slots": 2}
"""Short messages, so that operands of a few thousand elements travel in several, and rings go round."""
SOUND = Deadlines()
"""Where nothing is to fail."""
SHORT = Deadlines(join=10.0, stall=0.5)
"""Where something does."""
BOUND_S = 60.0
"""Of a whole job that fails, without what its members wait for processors; it takes a second."""


# -- what came of a job ------------------------------------------------------------------------------------------------------------


def sound(jobs: list[Callable[[], list[Ended]]]) -> Measured:
    """All members of all jobs ended well and found nothing wrong. Jobs after one that failed are not run."""
    wrong: list[str] = []
    calls = 0
    for job in jobs:
        for e in job():
            found, n = e.result if e.result is not None else ([e.error.strip().splitlines()[-1] if e.error else f"status {e.status}"], 1)
            wrong += found
            calls += n
        if wrong:
            break
    return Measured(error=float(len(wrong)), bound=0.0, cases=calls, note=wrong[0][:120] if wrong else "")


US, MS, KIB, MIB = 1e-6, 1e-3, 1 << 10, 1 << 20
ACROSS = Rule(50 * US, 1e-9, 4e-11, 256 * KIB, (0, 0, 2, 2), 5 * US, 1e-10)
"""Two hosts of two ranks, as a network of 8 Gbit/s would make it."""


def seed_of(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 30))


# -- parity ------------------------------------------------------------------------------------------------------------------------


def bound_by(world: World, op: str) -> Callable[[np.ndarray, np.ndarray, Any], None]:
    """The component itself: what its binder makes of operand, result and attributes."""
    binder = getattr(catalogue, op)
    return lambda x, out, attrs: binder(SimpleNamespace(world=world), [x], [out], attrs)()


def at_bits(world: World, op: str, seed: int) -> Found:
    """Every type, algorithm and reduction has the bits of the tree; in place or not, by the draw. So are some of the counts."""
    group, wrong, calls = world.group(WORLD), [], 0
    rng, bound = np.random.default_rng(seed), bound_by(world, op)
    counts = (*rng.permutation(COUNTS[:-1])[: 3 if group.size <= 4 else 1].tolist(), COUNTS[-1])
    for dtype in DTYPES:
        for reduce in ("sum", "average") if op in ("all_reduce", "reduce_scatter") else ("sum",):
            for count in counts if summed(op, dtype, reduce) else ():
                for algorithm in ("", *ALGORITHMS.get(op, ())):
                    own = bound if not algorithm and dtype != "bf16" else None  # arrays of the host do not say that they hold bf16
                    in_place = bool(rng.integers(2))
                    wrong.append(one(group, op, dtype, count, algorithm=algorithm, reduce=reduce, in_place=in_place, bound=own,
                                     seed=seed + calls))  # other operands each time: what is served again shows
                    calls += 1
    return [w for w in wrong if w], calls


LAYOUTS = {4: ((0, 0, 2, 2), (0, 0, 0, 3)), 6: ((0, 0, 2, 2, 4, 4), (0, 0, 0, 3, 3, 3)),
           8: ((0, 0, 0, 0, 4, 4, 4, 4), (0, 0, 2, 2, 4, 4, 6, 6), (0, 0, 2, 2, 2, 5, 5, 7))}
"""Number of members -> the host of each: some add on each host first, some cannot."""


@dataclass(frozen=True)
class Asked(Rule):
    """A rule that keeps what it is asked, and its answers."""

    asked: list[tuple[str, int, int, int]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def choose(self, op: str, members: int, nbytes: int, together: int = 1) -> str:
        """As the rule does."""
        self.asked.append((op, members, nbytes, together))
        self.answers.append(super().choose(op, members, nbytes, together))
        return self.answers[-1]


def at_apart(world: World, op: str, seed: int) -> Found:
    """The same over hosts, as a rule says that they lie: every algorithm and the one that is chosen, one draw of count and type each. The
    rule is asked once, about a member's operand and who is together; what runs is what was named, or what the rule has answered."""
    group, wrong, calls, rng, n = world.group(WORLD), [], 0, np.random.default_rng(seed), world.size
    assert isinstance(group.transport, SharedMemory)
    group.transport = seen = Keeping(group.transport)
    for hosts in LAYOUTS[n]:
        for algorithm in ("", *ALGORITHMS.get(op, ())):
            world.rule = rule = Asked(**vars(replace(ACROSS, hosts=hosts, latency=float(rng.choice([ACROSS.latency, 0.0])))))
            for dtype in rng.permutation([d for d in DTYPES if summed(op, d, "sum")])[:3].tolist():
                for kept in (seen.ran, rule.asked, rule.answers):
                    kept.clear()
                count = int(rng.integers(1, 6000))
                wrong.append(one(group, op, dtype, count, algorithm=algorithm, in_place=bool(rng.integers(2)),
                                 reduce="average" if summed(op, dtype, "average") and rng.integers(2) else "sum", seed=seed + calls))
                nbytes = count * NUMPY[dtype].itemsize * (n if op == "reduce_scatter" else 1)
                asked = [(op, n, nbytes, rule.together(range(n)))] * (op in ALGORITHMS and not algorithm)
                good = rule.asked == asked and seen.ran == ([algorithm] if algorithm else rule.answers or ["direct"])
                wrong.append("" if good else f"{op} over {hosts} asks {rule.asked}, not {asked}; runs {seen.ran}, not {rule.answers}")
                calls += 1
    return [w for w in wrong if w], calls


def at_unordered(world: World, op: str, seed: int) -> Found:
    """The sums around a ring: of each piece the member behind its owner begins, and each one adds its own to what came, the owner last."""
    group, wrong, calls, n = world.group(WORLD), [], 0, world.size
    for dtype in DTYPES[:-1]:
        for count in COUNTS:
            operand = count * n if op == "reduce_scatter" else count
            xs = [drawn(np.random.default_rng((seed, count, i)), dtype, operand, i) for i in range(n)]
            want = np.empty(operand, xs[0].dtype)
            for owner in range(n):
                piece = slice(operand * owner // n, operand * (owner + 1) // n)
                with np.errstate(all="ignore"):
                    want[piece] = fold(np.add, [xs[(owner + k) % n][piece] for k in range(1, n + 1)])
            if dtype in FLOATS:
                want = np.where(np.isnan(want), np.nan, round_to(want, dtype)).astype(want.dtype)
            x = xs[group.index].copy()
            out = np.empty(count, x.dtype)
            getattr(collectives, op)(group, x, out, reduce="unordered", dtype=dtype)
            mine = want if op == "all_reduce" else want[count * group.index : count * (group.index + 1)]
            if out.tobytes() != mine.tobytes() or x.tobytes() != xs[group.index].tobytes():
                wrong.append(f"unordered {op} {dtype} {count} among {n}: not the sums around the ring")
            calls += 1
    return wrong, calls


class Keeping(Mute):
    """A transport that looks at what was to be kept, when its collective ends: `broken` counts messages that were written meanwhile.
    `ran`: the algorithm of each collective that ended."""

    def __init__(self, transport: SharedMemory) -> None:
        super().__init__(transport)
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []
        self.broken, self.ran = 0, list[str]()

    def send(self, to: int, about: About, chunk: int, payload: np.ndarray, *, kept: bool = False) -> None:
        """Sent, and remembered where it is to be kept."""
        if kept:
            self._kept.append((payload, payload.copy()))
        self._transport.send(to, about, chunk, payload, kept=kept)

    def done(self, about: About) -> None:
        """Until here."""
        self.broken += sum(not np.array_equal(now, then) for now, then in self._kept)
        self._kept.clear()
        self.ran.append(about.algorithm)
        super().done(about)


def at_random(world: World, op: str, seed: int) -> Found:
    """Back to back among other collectives, without a barrier; now and then a member is late. What is to be kept, is."""
    group, wrong = world.group(WORLD), []
    assert isinstance(group.transport, SharedMemory)
    group.transport = keeping = Keeping(group.transport)
    rng, own = np.random.default_rng(seed), np.random.default_rng((seed, world.rank))
    for i in range(60):
        name = op if rng.integers(2) else OPS[rng.integers(len(OPS))]
        dtype, algorithms = DTYPES[rng.integers(len(DTYPES))], ALGORITHMS.get(name, ("",))
        algorithm, in_place, count = algorithms[rng.integers(len(algorithms))], bool(rng.integers(2)), int(rng.integers(0, 3000))
        if rng.random() < 0.2:  # of a length around the one from which memory is lent
            count = LENT_BYTES // NUMPY[dtype].itemsize + int(rng.integers(-1, 2))
        if own.random() < 0.1:
            time.sleep(own.random() * 2e-3)
        if summed(name, dtype, "sum"):
            wrong.append(one(group, name, dtype, count, algorithm=algorithm, in_place=in_place, seed=seed + i))
    wrong.append(f"{keeping.broken} messages were written that were to be kept" if keeping.broken else "")
    return [w for w in wrong if w], 61


def at_groups(world: World, op: str, seed: int) -> Found:
    """Tuples of ranks in another order than the ranks', beside the world and each other."""
    world.add_groups({"rows": [(0, 1, 2), (3, 4, 5)], "columns": [(0, 3), (4, 1), (2, 5)], "odd": [(5, 0, 3, 1), (2,), (4,)]})
    wrong = [one(world.group(name), op, "f32", 601, seed=seed + i, in_place=bool(i % 2), bound=bound_by(world, op))
             for i in range(6) for name in ("rows", "columns", WORLD, "odd")]
    return [w for w in wrong if w], len(wrong)


def at_oracle(world: World, op: str, seed: int) -> Found:
    """Against the row's float64 oracle over all members' operands: equal where sums are exact; elsewhere within d u sum|x| of it, where d
    counts roundings: the depth of the tree, and the division (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 4.2)."""
    group, wrong, calls, spec = world.group(WORLD), [], 0, BY_NAME[op]
    for exact in (True, False):
        draws = [list(rows.drawn(op, np.random.default_rng((seed, i)), size=group.size, exact=exact)) for i in range(group.size)]
        for samples in zip(*draws):
            attrs: dict[str, Any] = {**samples[0].attrs, "group": WORLD}
            x = samples[group.index].inputs[0]
            held = [np.asarray(s.inputs[0]) if x.dtype.kind != "f" else np.asarray(s.inputs[0]).astype(np.float32) for s in samples]
            exactly: list[Any] = [(h.astype(np.float64) if h.dtype.kind == "f" else h,) for h in held]
            want = rows_of(spec, exactly, attrs)[group.index][0]
            operand, out = held[group.index].copy(), np.full(want.shape, 77, held[0].dtype)
            bound_by(world, op)(operand, out, attrs)
            divided = attrs.get("reduce") == "average" and group.size & (group.size - 1) > 0
            if op not in rows.SUMS or (exact and not divided):
                good = np.array_equal(out.astype(want.dtype), want)
            else:
                roundings = (group.size - 1).bit_length() + divided
                size = rows_of(spec, [(np.abs(x),) for x, in exactly], attrs)[group.index][0]
                smallest = float(np.finfo(np.float32).smallest_subnormal)
                good = bool((np.abs(out - want) <= roundings * (UNIT_ROUNDOFF["f32"] * 1.001 * size + smallest)).all())
            if not good:
                wrong.append(f"{op} {samples[0].name} among {group.size}: not the oracle's")
            calls += 1
    return wrong, calls


def rows_of(spec: Any, operands: Any, attrs: dict[str, Any]) -> Any:
    """What the row says that all members get."""
    with np.errstate(all="ignore"):
        return spec.across(operands, **attrs)


def at_exchanges(world: World, op: str, seed: int) -> Found:
    """Every pair sends both ways, beside collectives of the whole group, which count their calls apart."""
    group, wrong, calls = world.group(WORLD), [], 0
    cpu = SimpleNamespace(world=world)
    for dtype in DTYPES:
        for count in COUNTS:
            for low in range(group.size):
                for high in range(low + 1, group.size):
                    if group.index not in (low, high):
                        continue
                    sent = {i: drawn(np.random.default_rng((seed, count, i)), dtype, count, i) for i in (low, high)}
                    other, out = low + high - group.index, np.full(count, 77, NUMPY[dtype])
                    attrs = {"group": WORLD, "size": group.size}
                    for place in (low, high):
                        x = sent[place].copy()
                        if group.index == place:
                            catalogue.send(cpu, [x], [], {**attrs, "to": other})()
                            x[...] = 0  # what is handed over may be written again
                        else:
                            catalogue.receive(cpu, [], [out], {**attrs, "source": place})()
                    calls += 1
                    if out.tobytes() != sent[other].tobytes():
                        wrong.append(f"{other} to {group.index}: {dtype} {count}")
            wrong.append(one(group, "all_reduce", "f32", count, seed=seed))
    return [w for w in wrong if w], calls


def at_barriers(world: World, op: str, seed: int) -> Found:
    """In turns each member comes late; nobody leaves a barrier before it has come."""
    group, wrong = world.group(WORLD), []
    run = catalogue.barrier(SimpleNamespace(world=world), [], [], {"group": WORLD, "size": group.size})
    for late in range(2 * group.size):
        if late % group.size == group.index:
            time.sleep(0.01)
        own, every = np.array([time.monotonic(), 0.0]), np.empty((group.size, 2))
        run()
        own[1] = time.monotonic()
        collectives.all_gather(group, own, every)
        if every[:, 0].max() > every[:, 1].min():
            wrong.append(f"round {late}: one left {every[:, 0].max() - every[:, 1].min():.3f} s before the last one came")
    return wrong, 2 * group.size


def at_nothing(world: World, op: str, seed: int) -> Found:
    """Over no elements at all members meet as over many: in turns each comes late, and nobody leaves before it has come."""
    group, wrong = world.group(WORLD), list[str]()
    none = np.empty(0, np.float32)
    for late in range(2 * group.size):
        if late % group.size == group.index:
            time.sleep(0.01)
        own, every = np.array([time.monotonic(), 0.0]), np.empty((group.size, 2))
        getattr(collectives, op)(group, none, none.copy())
        own[1] = time.monotonic()
        collectives.all_gather(group, own, every)
        if every[:, 0].max() > every[:, 1].min():
            wrong.append(f"{op} over nothing, round {late}: one left before the last one came")
    return wrong, 2 * group.size


def at_once(world: World, op: str, seed: int) -> Found:
    """A run is one collective of its op, at four sizes, by the algorithm that the rule takes there: made twice, or with members that meet
    beside it, it would have the bits that it owes, and take their time. The flight recorder counts what is asked for."""
    wrong, calls, n, me = list[str](), 0, world.size, world.rank
    for count in (0, 1, 601, 20011):
        pieces = op in ("reduce_scatter", "all_to_all")
        x = np.ones(count * n if pieces else count, np.float32)
        out = np.empty(count * n if op in ("all_gather", "all_to_all") else count, np.float32)
        for turn in range(n):
            side = ("send" if turn % 2 == me else "receive") if op in ("send", "receive") else op
            attrs: dict[str, Any] = {"group": WORLD, "size": n, "root": turn, "reduce": "sum", "to": 1 - me, "source": 1 - me}
            run = getattr(catalogue, side)(SimpleNamespace(world=world), [x], [out], attrs)
            before = world.flights.written
            run()
            asked = [r.op for r in world.flights.records(before)]
            good = asked == ["send" if side == "receive" else side]
            wrong += [] if good else [f"{op} of {count} among {n}: a run asks for {' and '.join(asked) or 'nothing'}"]
            calls += 1
    return wrong, calls


def at_unlooked(world: World, op: str, seed: int) -> Found:
    """A message that is there is taken, and one for which there is room is handed over, without a look at the process of the other end:
    nothing is opened meanwhile (audit events, PEP 578)."""
    opened, looking, rng = list[str](), list[bool](), np.random.default_rng(seed)
    sys.addaudithook(lambda event, what: opened.append(str(what[0])) if event == "open" and looking else None)
    meet = partial(collectives.barrier, world.add_group("apart", [range(2)]))  # with rings of its own
    wrong, turns, other = list[str](), 12, 1 - world.rank
    for turn in range(turns):
        x = np.ones(int(rng.integers(1, SMALL["payload_bytes"] // 4)), np.float32)
        attrs = {"group": WORLD, "size": 2, "to": other, "source": other}
        sends = turn % 2 == world.rank
        run = getattr(catalogue, "send" if sends else "receive")(SimpleNamespace(world=world), [x], [x], attrs)
        meet()
        for first in (True, False):  # the sender, and behind it who receives
            if first == sends:
                looking.append(True)
                run()
                looking.clear()
            meet()
        wrong += [f"{'send' if sends else 'receive'} opens {name}" for name in opened]
        opened.clear()
    return wrong, turns


def _jobs(function: Callable[..., Found], op: str, sizes: tuple[int, ...], one_of: tuple[int, ...] = ()) -> Case:
    """`function` among so many members, one number after another, and among one number of `one_of`, drawn."""
    def case(rng: np.random.Generator) -> Measured:
        seed, drawn_ = seed_of(rng), rng.permutation(one_of)[:1].tolist()
        return sound([partial(members().run, function, size, op, seed, deadlines=SOUND, **SMALL) for size in (*sizes, *map(int, drawn_))])
    return case


# -- gradient ----------------------------------------------------------------------------------------------------------------------


def at_vjp(world: World, op: str, seed: int) -> Found:
    """The row's vjp, run by the collectives in f64, against central differences of its oracle over all members' operands.

    Rows are linear: a difference with step 1 is the derivative up to the roundoff of float64, 64 u of the sum of products.
    """
    group, wrong, calls, spec = world.group(WORLD), [], 0, BY_NAME[op]
    n = group.size
    for reduce in ("sum", "average") if op in ("all_reduce", "reduce_scatter") else ("",):
        attrs: dict[str, Any] = {"group": WORLD, "size": n} | ({"reduce": reduce} if reduce else {})
        attrs |= {"root": n - 1} if op in ("broadcast", "reduce") else {}
        draws = [np.random.default_rng((seed, i)) for i in range(n)]
        exchange = op in ("send", "receive")
        xs: list[Any] = [(r.standard_normal(2 * n),) for r in draws]
        if exchange:
            xs[1] = ()  # the receiver's
            attrs |= {"to": 1} if op == "send" else {"source": 0, "shape": (2 * n,), "dtype": "f64"}
        ys = rows_of(spec, xs, attrs)
        cs = [tuple(r.standard_normal(y.shape) for y in y_) for r, y_ in zip(draws, ys)]
        got = _vjp(world, op, attrs, xs, cs)
        if got is None:  # a receiver has no operand
            calls += 1
            continue
        me = 0 if exchange else group.index
        for at in range(got.size):
            sides = []
            for step in (1.0, -1.0):
                moved = [tuple(x.copy() for x in x_) for x_ in xs]
                moved[me][0][at] += step
                sides.append(sum(float((c * y).sum()) for c_, y_ in zip(cs, rows_of(spec, moved, attrs)) for c, y in zip(c_, y_)))
            scale_ = sum(float(np.abs(c * y).sum()) for c_, y_ in zip(cs, ys) for c, y in zip(c_, y_)) + 1
            if not abs((sides[0] - sides[1]) / 2 - got[at]) <= 64 * UNIT_ROUNDOFF["f64"] * scale_:
                wrong.append(f"{op} {reduce} among {n}: d/dx[{at}] is {got[at]:.6g}, differences give {(sides[0] - sides[1]) / 2:.6g}")
            calls += 1
    return wrong, calls


def _vjp(world: World, op: str, attrs: dict[str, Any], xs: list[Any], cs: list[Any]) -> np.ndarray | None:
    """This member's cotangent, by the vjp of its own side of the op; None for a receiver, who sends it away."""
    me, cpu = world.group(WORLD).index, SimpleNamespace(world=world)
    side = ("send", "receive")[me] if op in ("send", "receive") else op
    given = dict(attrs)
    if side in ("send", "receive"):
        given = {"group": WORLD, "size": 2} | ({"to": 1} if side == "send" else {"source": 0, "shape": xs[0][0].shape, "dtype": "f64"})

    def emit(name: str, *values: Any, **with_: Any) -> Any:
        if name == "scale":
            return next(r for r in scale.ROWS if r.name == "scale").oracle(*values, **with_)[0]
        types = [TensorType(v.shape, "f64") for v in values]
        outs = [np.full(t.shape, np.nan) for t in BY_NAME[name].infer(types, with_)]
        getattr(catalogue, name)(cpu, [np.ascontiguousarray(v) for v in values], outs, with_)()
        return outs[0] if outs else None

    node = SimpleNamespace(attrs=given, inputs=[SimpleNamespace(type=TensorType(x.shape, "f64")) for x in xs[me]])
    vjp = BY_NAME[side].vjp
    assert vjp is not None
    found = vjp(emit, node, list(cs[me]) or [None])  # type: ignore[arg-type]
    return np.asarray(found[0]) if found else None


# -- determinism -------------------------------------------------------------------------------------------------------------------


class Late:
    """A transport whose messages go out and are taken late now and then."""

    def __init__(self, transport: Any, rng: np.random.Generator) -> None:
        self._transport, self._rng, self.payload_bytes = transport, rng, transport.payload_bytes

    def _rest(self) -> None:
        if self._rng.random() < 0.3:
            time.sleep(float(self._rng.random()) * 1e-3)

    def send(self, to: int, about: About, chunk: int, payload: np.ndarray, *, kept: bool = False) -> None:
        self._rest()
        self._transport.send(to, about, chunk, payload, kept=kept)

    def done(self, about: About) -> None:
        self._transport.done(about)

    def withdraw(self) -> None:
        self._transport.withdraw()

    def expect(self, source: int, outs: Sequence[np.ndarray | None]) -> None:
        self._rest()
        self._transport.expect(source, outs)

    def receive(self, source: int, about: About, chunk: int, nbytes: int) -> np.ndarray:
        self._rest()
        found: np.ndarray = self._transport.receive(source, about, chunk, nbytes)
        return found

    def release(self, source: int) -> None:
        self._transport.release(source)


def at_jitter(world: World, op: str, seed: int) -> tuple[list[str], int, str]:
    """Ten rounds under jitter, by every algorithm, at other addresses: one hash. What all members get is one hash among them too."""
    group, n = world.group(WORLD), world.size
    group.transport = Late(group.transport, np.random.default_rng())
    hashes: dict[str, None] = {}
    operand = 4096 * n + (op in ("all_reduce", "reduce", "broadcast", "all_gather"))
    x = drawn(np.random.default_rng((seed, group.index)), "f32", operand, 0)
    given: dict[str, Any] = {"root": seed % n} if op in ("broadcast", "reduce") else {}
    calls = 0
    for turn in range(10):
        for algorithm in ALGORITHMS.get(op, ("",)):
            room = np.full(operand * n + 8, np.nan, np.float32)[turn % 8 :]
            size = {"reduce_scatter": operand // n, "all_gather": operand * n}.get(op, operand)
            out = room[:size]
            getattr(collectives, op)(group, x, out, **given, **({"algorithm": algorithm} if algorithm else {}))
            hashes[hashlib.sha256(out.tobytes()).hexdigest()] = None
            calls += 1
    wrong = [] if len(hashes) == 1 else [f"{op} among {n}: {len(hashes)} results of one operand"]
    return wrong, calls, next(iter(hashes))


def at_jitter_of_pairs(world: World, op: str, seed: int) -> tuple[list[str], int, str]:
    """The same of messages around a ring, and of barriers between them."""
    group, n, digest = world.group(WORLD), world.size, hashlib.sha256()
    group.transport = Late(group.transport, np.random.default_rng())
    wrong = []
    for turn in range(10):
        x = drawn(np.random.default_rng((seed, group.index, turn)), "f32", 5003, 0)
        want = drawn(np.random.default_rng((seed, (group.index - 1) % n, turn)), "f32", 5003, 0)
        out = np.empty_like(x)
        collectives.send(group, x, to=(group.index + 1) % n)
        collectives.receive(group, out, source=(group.index - 1) % n)
        collectives.barrier(group)
        wrong += [] if out.tobytes() == want.tobytes() else [f"round {turn}: not what member {(group.index - 1) % n} sent"]
        digest.update(out.tobytes())
    return wrong, 10, digest.hexdigest()


def _repeated(op: str, size: int) -> Case:
    function = at_jitter if op in OPS else at_jitter_of_pairs

    def case(rng: np.random.Generator) -> Measured:
        ended = members().run(function, size, op, seed_of(rng), deadlines=SOUND, payload_bytes=16384, slots=4)
        found = sound([lambda: [Ended(e.status, e.result[:2] if e.result else None, e.error) for e in ended]])
        hashes = [e.result[2] for e in ended if e.result]
        apart = op in ("all_reduce", "all_gather", "broadcast") and len(set(hashes)) > 1
        return Measured(error=found.error + apart, bound=0.0, cases=found.cases, digest="".join(h[:16] for h in hashes),
                        note=found.note or ("members hold different bits" if apart else ""))
    return case


# -- faults ------------------------------------------------------------------------------------------------------------------------


def at_fault(world: World, op: str, what: str, victim: int, at: int) -> None:
    """Eight calls; before number `at` the victim does `what`. At the barriers that follow everyone needs it."""
    group, n = world.group(WORLD), world.size
    for i in range(8):
        world.step, x = i, np.ones(1200 * (1 if op in ("send", "receive") else n), np.float32)  # all may send before they receive
        if world.rank == victim and i == at:
            if what == "other":
                x = np.ones(x.size // 2, np.float32)
                if op == "barrier":
                    collectives.all_reduce(group, x, x)
            else:
                misbehave(world, what)
        if op in ("send", "receive"):
            collectives.send(group, x, to=(group.index + 1) % n)
            collectives.receive(group, x, source=(group.index - 1) % n)
        elif op == "barrier":
            collectives.barrier(group)
        else:
            size = {"reduce_scatter": x.size // n, "all_gather": x.size * n}.get(op, x.size)
            given: dict[str, Any] = {"root": i % n} if op in ("broadcast", "reduce") else {}
            getattr(collectives, op)(group, x, np.empty(size, np.float32), **given)
    for _ in range(4):
        collectives.barrier(group)


NAMES = {"dies": "died", "exits": "died", "stops": "is stopped", "raises": "MemoryError: planted", "skips": "", "flips": "was damaged",
         "other": "runs another collective"}
"""Fault of a member -> what one of the others says."""


def _disturbed(op: str, what: str) -> Case:
    """Every other member ends by itself, soon, with an error that names the one at fault; of two that contradict each other, either."""
    def case(rng: np.random.Generator) -> Measured:
        size, victim = 3, int(rng.integers(3))
        ended = members().run(at_fault, size, op, what, victim, int(rng.integers(1, 5)), deadlines=SHORT, limit_s=BOUND_S, **SMALL)
        wrong = []
        either = what in ("skips", "other")
        for rank, e in enumerate(ended):
            if rank == victim:
                continue
            if e.hung or e.rank is None or e.served > BOUND_S:
                wrong.append(f"rank {rank} {'hangs' if e.hung else 'ended otherwise'}: {e.error.strip().splitlines()[-1:] or e.result}")
            elif e.rank != victim and not either:
                wrong.append(f"rank {rank} names rank {e.rank}, at fault was {victim}")
        if not any(NAMES[what] in e.error for e in ended):
            wrong.append(f"nobody says {NAMES[what]!r}: {ended[(victim + 1) % size].error.splitlines()[:1]}")
        return Measured(error=float(len(wrong)), bound=0.0, cases=size - 1, note=wrong[0][:120] if wrong else "")
    return case


def at_refusal(world: World, op: str, seed: int) -> Found:
    """Operands that do not fit are refused before a message goes out: the next call is right."""
    group, cpu = world.group(WORLD), SimpleNamespace(world=world)
    n, f4 = group.size, np.float32
    x, y = np.zeros(8 * n, f4), np.zeros(8, f4)
    attempts: dict[str, list[Callable[[], object]]] = {
        "all_reduce": [lambda: collectives.all_reduce(group, x, x[:-1]), lambda: collectives.all_reduce(group, x, x.astype(np.float64)),
                       lambda: collectives.all_reduce(group, np.zeros(4, bool), np.zeros(4, bool)),
                       lambda: collectives.all_reduce(group, np.zeros(4, np.int32), np.zeros(4, np.int32), reduce="average"),
                       lambda: collectives.all_reduce(group, x[::2], x[::2]),
                       lambda: collectives.all_reduce(group, x, x, algorithm="star"),
                       lambda: collectives.all_reduce(group, x.astype(np.complex64), x.astype(np.complex64))],
        "reduce_scatter": [lambda: collectives.reduce_scatter(group, x, y, algorithm="whole"),
                           lambda: collectives.reduce_scatter(group, x, x), lambda: collectives.reduce_scatter(group, x, y[:-1])],
        "all_gather": [lambda: collectives.all_gather(group, y, x, algorithm="halving"),
                       lambda: collectives.all_gather(group, y, y), lambda: collectives.all_gather(group, y, x[:-1])],
        "broadcast": [lambda: collectives.broadcast(group, x, x, root=0, algorithm="whole"),
                      lambda: collectives.broadcast(group, x, x, root=n), lambda: collectives.broadcast(group, x, y, root=0),
                      lambda: collectives.broadcast(group, x, x, root=-1)],
        "reduce": [lambda: collectives.reduce(group, x, x, root=n), lambda: collectives.reduce(group, x, y, root=0)],
        "all_to_all": [lambda: collectives.all_to_all(group, x[:-1], x[:-1]), lambda: collectives.all_to_all(group, x, y)],
        "send": [lambda: collectives.send(group, x, to=group.index), lambda: collectives.send(group, x, to=n)],
        "receive": [lambda: collectives.receive(group, x, source=group.index), lambda: collectives.receive(group, x, source=-1)],
        "barrier": [],
    }
    extra = {"root": 0, "to": 0, "source": 0, "reduce": "sum"}
    binder, operand, result = getattr(catalogue, op), y if op == "all_gather" else x, y if op == "reduce_scatter" else x
    attempts[op] += [binder(cpu_, [operand], [result], {"group": group_, "size": size, **extra}) for cpu_, group_, size in (
        (cpu, WORLD, n + 1), (cpu, "none", n), (SimpleNamespace(world=None), WORLD, n))]
    wrong = []
    for i, attempt in enumerate(attempts[op]):
        try:
            attempt()
            wrong.append(f"attempt {i} of {op} went through")
        except (ShapeError, GraphError):
            pass
    wrong.append(one(group, "all_reduce", "f32", 31, seed=seed))
    return [w for w in wrong if w], len(attempts[op]) + 1


CHOICES: tuple[tuple[Rule, str, int, dict[int, str]], ...] = (
    # two ranks of a laptop: what fits in one message is added whole; beyond it both take as many messages, and half the additions
    (Rule(20 * US, 3e-10, 4e-11, 256 * KIB), "all_reduce", 2,
     {0: "whole", KIB: "whole", 64 * KIB: "whole", 256 * KIB: "whole", 512 * KIB: "direct", MIB: "direct", 64 * MIB: "direct"}),
    # the same with messages as long as any operand: additions alone weigh against one latency
    (Rule(20 * US, 3e-10, 4e-11, 64 * MIB), "all_reduce", 2, {512 * KIB: "whole", MIB: "direct", 64 * MIB: "direct"}),
    # a slow adder, and one that adds for nothing
    (Rule(US, 1e-9, 1e-10, 256 * KIB), "all_reduce", 2, {16 * KIB: "whole", 32 * KIB: "direct"}),
    (Rule(US, 1e-9, 0.0, 256 * KIB), "all_reduce", 2, {256 * KIB: "whole", 64 * MIB: "direct"}),
    # many ranks: fewer messages, then fewer bytes
    (Rule(20 * US, 3e-10, 4e-11, 256 * KIB), "all_reduce", 4, {KIB: "whole", 64 * KIB: "halving", 512 * KIB: "halving"}),
    (Rule(MS, 1e-12, 0.0, 256 * KIB), "all_reduce", 8, {64 * KIB: "halving"}),
    # two hosts of two ranks: from a few KiB on sums are added inside first; not where ranks of one host do not follow one another
    (ACROSS, "all_reduce", 4,
     {KIB: "whole", 4 * KIB: "hosts", 16 * KIB: "hosts", 64 * KIB: "hosts", 64 * MIB: "hosts"}),
    # two hosts of four: three near messages of a quarter each are paid for only where they are short beside the way between hosts
    (replace(ACROSS, hosts=(0, 0, 0, 0, 4, 4, 4, 4)), "all_reduce", 8,
     {KIB: "halving", 256 * KIB: "halving", 4 * MIB: "hosts", 64 * MIB: "hosts"}),
    (replace(ACROSS, hosts=(0, 1, 0, 1)), "all_reduce", 4, {KIB: "whole", 64 * MIB: "direct"}),
    # scatters and gathers of two hosts save a far message and pay a near one more; not where each rank is on its own
    (ACROSS, "reduce_scatter", 4, {KIB: "hosts", 64 * MIB: "hosts"}),
    (ACROSS, "all_gather", 4, {KIB: "hosts", 64 * MIB: "hosts"}),
    (replace(ACROSS, near_latency=20 * US), "all_gather", 4, {KIB: "hosts", 64 * MIB: "hosts"}),
    (replace(ACROSS, near_latency=60 * US), "all_gather", 4, {KIB: "direct", 64 * MIB: "hosts"}),
    (replace(ACROSS, near_latency=60 * US), "reduce_scatter", 4, {KIB: "direct", 64 * MIB: "hosts"}),
    (replace(ACROSS, hosts=(0, 0, 0, 3)), "all_gather", 4, {KIB: "direct", 64 * MIB: "direct"}),
    # a tree sends once to each host; past two hosts a chain hands on while it receives
    (ACROSS, "broadcast", 4, {KIB: "halving", 64 * MIB: "halving"}),
    (replace(ACROSS, hosts=(0, 0, 0, 0, 4, 4, 4, 4)), "broadcast", 8, {KIB: "halving", 64 * MIB: "halving"}),
    (replace(ACROSS, hosts=(0, 0, 2, 2, 4, 4, 6, 6)), "broadcast", 8, {KIB: "halving", 64 * MIB: "ring"}),
    # where the way inside a host is the slow one, by messages or by bytes, rings are as slow as it
    (replace(ACROSS, hosts=(0, 0, 2, 2, 4, 4, 6, 6), near_latency=500 * US), "broadcast", 8, {KIB: "halving", 64 * MIB: "ring"}),
    (replace(ACROSS, hosts=(0, 0, 2, 2, 4, 4, 6, 6), near_inverse_bandwidth=1e-8), "broadcast", 8, {KIB: "halving", 64 * MIB: "halving"}),
    (replace(ACROSS, hosts=(0, 0, 0, 0, 4, 4, 4, 4), near_latency=500 * US), "all_gather", 8, {KIB: "direct"}),
    (replace(ACROSS, hosts=(0, 0, 0, 0, 4, 4, 4, 4), near_inverse_bandwidth=1e-8), "all_gather", 8, {64 * MIB: "direct"}),
    (Rule(20 * US, 3e-10, 4e-11, 256 * KIB), "broadcast", 8, {KIB: "halving", 64 * MIB: "ring"}),
    (Rule(20 * US, 3e-10, 4e-11, 256 * KIB), "broadcast", 2, {KIB: "direct", 64 * MIB: "direct"}),
    (Rule(20 * US, 3e-10, 4e-11, 256 * KIB), "all_gather", 4, {KIB: "direct", 64 * MIB: "direct"}),
)
"""Made-up measurements, op and members -> bytes of the operand -> the algorithm that must be chosen."""


def _chosen(op: str) -> Case:
    def case(rng: np.random.Generator) -> Measured:
        asked = [(rule, n, nbytes, want) for rule, name, n, sizes in CHOICES if name == op for nbytes, want in sizes.items()]
        wrong = [f"{nbytes:,} bytes of {n} ranks by {rule}: {came}" for rule, n, nbytes, want in asked
                 if (came := rule.choose(op, n, nbytes, rule.together(range(n)))) != want]
        return Measured(error=float(len(wrong)), bound=0.0, cases=len(asked), note=wrong[0][:120] if wrong else "")
    return case


def _cases(op: str) -> dict[str, list[tuple[str, Case]]]:
    bits: list[tuple[str, Case]]
    if op == "barrier":
        bits = [("held", _jobs(at_barriers, op, (2, 3, 5, 8)))]
    elif op in ("send", "receive"):
        bits = [("pairs", _jobs(at_exchanges, op, (2, 3, 5))), ("unlooked", _jobs(at_unlooked, op, (2,)))]
    else:
        bits = [("few", _jobs(at_bits, op, (2, 3, 4))), ("many", _jobs(at_bits, op, (8,), (5, 6, 7))),
                ("random", _jobs(at_random, op, (2, 4))), ("groups", _jobs(at_groups, op, (6,))),
                ("oracle", _jobs(at_oracle, op, (2, 3, 5)))]
        bits += [("unordered", _jobs(at_unordered, op, (2, 3), (5, 8)))] if op in ("all_reduce", "reduce_scatter") else []
    bits += [("once", _jobs(at_once, op, (2,) if op in ("send", "receive") else (2, 3)))]
    bits += [("apart", _jobs(at_apart, op, (4,), (6, 8)))] if op in (*ALGORITHMS, "reduce") else []
    bits += [("chosen", _chosen(op)), ("recorded", rules)] if op in COSTS else []
    bits += [("nothing", _jobs(at_nothing, op, (2, 3)))] if op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") else []
    kinds = [what for what in NAMES if not (op == "barrier" and what == "flips")]  # a message of a barrier has no payload
    found = {"parity": bits, "determinism": [(f"jitter-{n}", _repeated(op, n)) for n in (3, 4)],
             "faults": [("refused", _jobs(at_refusal, op, (2,))), *((what, _disturbed(op, what)) for what in kinds)]}
    found["faults"] += [("checked", _jobs(at_checked, op, (3,)))] if op in CHECKED else []
    if op != "barrier":
        found["gradient"] = [("adjoint", _jobs(at_vjp, op, (2,) if op in ("send", "receive") else (2, 3)))]
    return found


CASES = {f"{op}.cpu": _cases(op) for op in (*OPS, "send", "receive", "barrier")}
