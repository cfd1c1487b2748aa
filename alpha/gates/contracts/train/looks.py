"""Cases of spot checks: what is hashed and when it is read again, how a difference is told, what of the state comes when between checked
steps, and when a device is looked at. Floor 7.

A small run's Program is walked through launch by launch. Hashes are numbers of versions: what changes by itself gets another one.
"""

# mypy: disable-error-code="arg-type,assignment"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha import config
from alpha.component import Measured
from alpha.errors import SpotCheckError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.gates.contracts.train.made import RUN, _program, _without_paths
from alpha.graph.plan import Plan, Program, Ref
from alpha.train import spots
from alpha.train.pace import PacedSpots
from alpha.train.spots import Spots, Tally

AGAIN = ("resume from the latest checkpoint with --resume. If the same place fails again, a kernel is wrong there: `alpha gate run` it. "
         "If not, suspect this machine's memory or processor")
PIECE = 4096


def _small() -> Program:
    return _program(_without_paths(config.parse(RUN.format(root="/x", threads=2),
                                                ["train.steps=4", "train.micro_batch=6", "model.dropout=0"])), 257)


class _Device:
    """An executor whose contents are versions of places. `cut`: this rank holds half of the state."""

    def __init__(self, late: bool, cut: bool = False, piece: int = PIECE) -> None:
        self.program, self.late, self.cut, self.piece = _small(), late, cut, piece
        self.digests, self.inspector, self.runs_ahead = self, None, True
        self.recorder = SimpleNamespace(profiling=False)
        self.versions: dict[Any, int] = {}
        self.found, self.waited = np.array([0]), 0

    def nbytes(self, kind: str) -> int:
        """Of a kind of state."""
        layout = self.program.states[kind]
        return layout.size * 4 // (2 if self.cut else 1)

    def of(self, ref: Ref) -> Any:
        """A place as it is."""
        return ref, self.versions.get(ref, 0)

    def of_state(self, kind: str, start: int) -> Any:
        """A piece as it is."""
        return (kind, start), self.versions.get((kind, start), 0)

    def read(self, one: Any) -> bytes:
        """A version."""
        return bytes([5, one[1], 5])

    def words(self, nbytes: int, at: int) -> np.ndarray:
        """What is found of a piece, of whose bytes the second differs."""
        assert at == 1 and nbytes <= self.piece
        return self.found

    def wait(self) -> None:
        """Until all has been made."""
        self.waited += 1

    def check(self, hashes: Any) -> None:
        """Hash now."""
        hashes()


class _Store:
    """Metrics that keep rows."""

    def __init__(self) -> None:
        self.rows, self.again = list[Any](), list[Any]()

    def add(self, table: str, row: Any) -> None:
        """A row."""
        self.rows.append((table, row))

    def checked_again(self, *given: int) -> None:
        """Named of later steps are forgotten."""
        self.again.append(given)


def _walk(own: Spots, device: _Device, step: int, changes: dict[tuple[int, int, str], Any]) -> None:
    """A checked step, with changes at (call, launch, before or after it)."""
    own.begin(step)
    for n, call in enumerate(device.program.schedule):
        plan = device.program.plans[call.plan]
        for i in range(len(plan.launches)):
            for when, act in (("before", own.before), ("after", own.after)):
                if (n, i, when) in changes:
                    place = changes[n, i, when]
                    device.versions[place] = device.versions.get(place, 0) + 1
                act(plan, i, lambda ref: np.zeros(1))
    own.wrote(step)
    own.end(step)


@contextmanager
def _looking(looks: list[Any], seen: list[Any]) -> Iterator[None]:
    """Spot checks that find what is given, of every launch that is drawn."""
    def spot(launch: Any, read: Any, rng: Any) -> SimpleNamespace:
        seen.append(launch)
        return SimpleNamespace(looks=lambda read: list(looks))
    with instead(spots, Spot=spot):
        yield


def _meet(a: Ref, b: Ref) -> bool:
    return a.arena == b.arena and max(a.offset, b.offset) < min(a.stop, b.stop)


def _where(step: int, n: int, plan: Plan, i: int, program: Program) -> str:
    x, call = plan.launches[i], program.schedule[n]
    micro = "" if call.shard is None else f", shard {call.shard}, microbatch {call.micro}"
    return (f"a spot check failed: rank 0, step {step}, {x.op} ({x.component}) of {x.layer or 'no layer'}, {x.phase}, model line "
            f"{x.source}; "
            f"launch {i} of plan {plan.name}{micro}")


def changed(rng: np.random.Generator) -> Measured:
    """An operand that changes between its writer, or the plan's beginning, and its reader, a result that changes before its plan ends, and
    a piece of the state: each is told by launch, writer and place, on a device when its plan ends; without a change nothing is."""
    checks: Named = []
    for late in (False, True):
        device = _Device(late)
        program, store = device.program, _Store()
        with _looking([], []):
            own = Spots(5, 3, device, 0, store)
            _walk(own, device, 7, {})
            same(checks, "nothing", (own.tally.steps, store.rows[-1][1]["how"], device.inspector), (1, "hash", None))
            for trial in range(14):
                n = int(rng.integers(len(program.schedule)))
                plan = program.plans[program.schedule[n].plan]
                left = [(i, ref) for i, x in enumerate(plan.launches) for ref in x.outs if ref.arena.startswith("state.") and not any(
                    _meet(ref, out) for y in plan.launches[i + 1 :] for out in y.outs)]
                own = Spots(5, trial, device, 0, store)
                own._first = True
                if trial % 7 == 6 and left:
                    i, place = left[int(rng.integers(len(left)))]
                    writer, at, what, when = i, len(plan.launches) - 1, "result", "after"
                    if any(place in y.ins for y in plan.launches[at:]):
                        continue
                else:
                    at = i = int(rng.integers(len(plan.launches)))
                    place = plan.launches[i].ins[int(rng.integers(len(plan.launches[i].ins)))] if plan.launches[i].ins else None
                    if place is None:
                        continue
                    writer = next((j for j in range(i - 1, -1, -1) if any(_meet(place, out) for out in plan.launches[j].outs)), -1)
                    what, when = "operand", "before"
                if i == 0 and what == "operand":
                    continue  # it is hashed right behind the change
                by = plan.launches[writer] if writer >= 0 else None
                since = f"{by.op} of {by.layer or 'no layer'} wrote it" if by else "this plan began"
                same(checks, f"{late} {what}", said(lambda: _walk(own, device, 3, {(n, at, when): place})), error_text(
                    "SpotCheckError", _where(3, n, plan, i, program), f"{what} {place} changed since {since}", "the bits that were there",
                    AGAIN))
            for n, call in enumerate(program.schedule):
                for kind, wrote in (("param", "the last update wrote it, or it was loaded or drawn"),
                                    ("grad0", "it was written by an earlier plan of this step")):
                    earlier = any(ref.arena == "state.grad0" for c in program.schedule[:n] for x in program.plans[c.plan].launches
                                  for ref in x.outs)
                    own = Spots(5, n, device, 0, store)
                    own.restart(3)
                    device.found = np.array([0])
                    found = said(lambda: _walk(own, device, 3, {(n, 0, "before"): (kind, 0)}))
                    same(checks, f"{late} {kind} before {call.plan}", found.split("  came:")[0] +
                         found.split("words 0 + 1 n up to 0: in ")[-1].partition("\n")[2],
                         "None" + "" if kind == "grad0" and not earlier
                         else f"SpotCheckError: memory changed by itself: rank 0, step 3, {kind}, seen before plan "
                         f"{call.plan}\n  expected: what was there when {wrote}\n  do:       {AGAIN}")
    for _ in range(40):
        a, b = (SimpleNamespace(arena=str(rng.choice(["x", "y"])), offset=int(low), stop=int(low + rng.integers(1, 6)))
                for low in rng.integers(0, 9, 2))
        same(checks, f"{a} {b}", spots._meet(a, b), a.arena == b.arena and bool({*range(a.offset, a.stop)} & {*range(b.offset, b.stop)}))
    return all_hold(checks)


def pieces(rng: np.random.Generator) -> Measured:
    """A piece of the state that changes between its write and the next read is told by the words that differ and the tensors that have one
    of them, however many, or none; of a cut state by its elements. What is hashed between checked steps goes round in turn, as many pieces
    as the step's time pays for; nothing is where nothing is asked for."""
    checks: Named = []
    wrote = "what was there when the last update wrote it, or it was loaded or drawn"
    for late, cut in ((False, False), (True, False), (True, True)):
        device = _Device(late, cut)
        layout, whole = device.program.states["m"], device.nbytes("m")
        size = device.piece = next(n for n in range(PIECE * (1 if cut or not late else 8), 0, -8) if whole % n >= 64)  # the last is a part
        pieces_ = -(-device.nbytes("m") // size)
        for trial in range(6):
            own = Spots(5, 1, device, 0, _Store())
            own.restart(4)
            piece = int(rng.integers(pieces_)) if 0 < trial < 5 else trial and pieces_ - 1
            most = min(size, device.nbytes("m") - piece * size) // 8
            device.found = np.arange(most) if trial < 2 else np.sort(rng.choice(most, 1 if trial == 2 else 3, replace=False))
            if trial == 3 and not cut:  # the first word of a tensor alone, which is its last one, too, where it has one element
                first = layout.offsets[layout.tensors[int(rng.integers(len(layout.tensors)))].name]
                piece, device.found = first * 4 // size, np.array([first * 4 % size // 8])
            if len(device.found) == 3:
                device.found[1] = (device.found[0] + device.found[2]) // 2
            device.versions["m", piece * size] = trial + 1
            words = [int(w) for w in device.found]
            step = words[1] - words[0] if len(words) > 1 else 1
            elements = {piece * size // 4 + 2 * w + k for w in words for k in (0, 1)}
            names = [t.name for t in layout.tensors if elements & set(range(layout.offsets[t.name], layout.offsets[t.name] + t.size))]
            said_of = f"64-bit words {words[0]} + {step} n up to {words[-1]}: in "
            said_of += (f"this rank's cut, elements {piece * size // 4 + 2 * words[0]} + {2 * step} n" if cut else "padding" if not names
                        else
                        ", ".join(names[:8]) + (f" or {len(names) - 8} more" if len(names) > 8 else ""))
            same(checks, f"{late} {cut} {trial}", said(lambda: own.read("before a checkpoint")), error_text(
                "SpotCheckError", "memory changed by itself: rank 0, step 4, m, seen before a checkpoint", f"piece {piece}, {said_of}",
                wrote, AGAIN))
        own = Spots(5, 1, device, 0, _Store())
        own.restart(4)
        device.versions["v", 0] = device.versions.get(("v", 0), 0) + 1
        found = said(lambda: own.read("before the update", now=False))
        same(checks, "a device's at the end", (found == "None", said(lambda: own.end(6)).startswith("SpotCheckError")), (late, late))
    for late in (False, True):
        device = _Device(late)
        clock = [0]

        def now() -> int:
            clock[0] += 1000
            return clock[0]

        own = Spots(4, 1, device, 0, store := _Store())
        keys = [(kind, i) for kind in device.program.states if not kind.startswith("grad") for i in range(-(-device.nbytes(kind) // PIECE))]
        sizes = {(kind, i): min(PIECE, device.nbytes(kind) - i * PIECE) for kind, i in keys}
        with instead(spots, perf_counter_ns=now):
            own.restart(4)
            same(checks, "forgotten", store.again, [(4, 1)])
            turn, each, hashed = 0, 2000.0 / len(keys), sum(sizes.values())
            same(checks, "all at first", list(own._hashes), keys)
            own._first = False
            for step in range(4, 14):
                own._step_ns = step_ns = int(rng.integers(1, 6)) * 60_000
                waited = device.waited
                own.wrote(step)
                due = (step + 1) % 4 == 0
                many = len(keys) if due else min(len(keys), max(1, int(0.002 * step_ns / each)))
                same(checks, f"{late} {step}", list(own._hashes), [keys[(turn + i) % len(keys)] for i in range(many)])
                turn = (turn + many) % len(keys)
                hashed += sum(sizes[key] for key in own._hashes)
                same(checks, "counted and waited for", (own.tally.hashed, device.waited - waited), (hashed, 2 if due or not late else 0))
                each = 2000.0 / many if due or not late else each
        off = Spots(0, 1, device, 0, store := _Store())
        off.restart(0)
        off.wrote(0)
        off.begin(0)
        same(checks, "off", (off._hashes, off.due(0), off.status, store.again, own.status), ({}, False, "off (train.verify = 0)", [],
                                                                                             "first step and every 4"))
    return all_hold(checks)


def tallied(rng: np.random.Generator) -> Measured:
    """What is found of launches is noted with its row, the worst is kept; beyond its tolerance it ends the run on the CPU, and on a device
    where it is judged, else it is told; each component is looked at in a first step, and eight later."""
    checks: Named = []
    for late, judged, ratio in ((False, False, 0.5), (False, False, 1.0), (False, False, 1.5), (True, False, 1.5), (True, True, 1.5),
                                (True, True, 0.9),
                                (False, False, float("nan"))):
        device, store, seen = _Device(late), _Store(), list[Any]()
        looks = [SimpleNamespace(how="rows", elements=100, ratio=0.25, place="p"), SimpleNamespace(how="product", elements=7000,
                                                                                                   ratio=ratio, place="at [3]")]
        own = Spots(5, 3, device, 0, store)
        own.judged = judged
        with _looking(looks, seen):
            found = said(lambda: _walk(own, device, 7, {}))
        fails = not ratio <= 1 and (judged or not late)
        by = {x.component for call in device.program.schedule for x in device.program.plans[call.plan].launches}
        if fails:
            n, plan, i = next((n, device.program.plans[call.plan], i) for n, call in enumerate(device.program.schedule) for i,
                              x in enumerate(device.program.plans[call.plan].launches) if x is seen[0] and (n, i) in own._drawn)
            same(checks, f"{late} {judged} {ratio}", found, error_text("SpotCheckError", _where(7, n, plan, i, device.program), "at [3]",
                 f"{ratio:.3g} times the tolerance at most 1 (product of 7,000)", AGAIN))
            continue
        same(checks, "each component once", sorted(x.component for x in seen), sorted(by))
        t, count = own.tally, len(by)
        worst = max(0.25, ratio)
        first = seen[0].op
        same(checks, f"{late} {judged} {ratio}", (found, t.steps, t.launches, t.elements, t.worst, t.op, t.beyond), (
            "None", 1, 2 * count, 7100 * count, worst, first, count if ratio > 1 else 0))
        rows = [row for table, row in store.rows if table == "spot_checks"]
        same(checks, "rows", [(r["step"], r["rank"], r["how"], r["elements"], r["ratio"]) for r in rows[:-1]], [
            (7, 0, how, elements, x) for _ in seen for how, elements, x in (("rows", 100, 0.25), ("product", 7000, ratio))])
        same(checks, "places", sorted((r["call"], r["launch"]) for r in rows[:-1:2]), sorted(own._drawn))
        same(checks, "the state's row", {k: rows[-1][k] for k in ("step", "plan", "launch", "op", "how", "elements", "ratio")}, {
            "step": 7, "plan": "", "launch": -1, "op": "state", "how": "hash", "elements": t.hashed, "ratio": 0.0})
        text = (f"{t.launches} launches of 1 steps recomputed, {t.elements:,} elements, largest error {worst:.2f} of its tolerance "
                f"({first}); "
                f"{t.hashed / 1e6:,.0f} MB of state hashed" + (f"; {count} launches beyond, told and not judged" if ratio > 1 else ""))
        same(checks, "for people", t.text(), text)
        seen.clear()
        with _looking([], seen):
            _walk(own, device, 10, {})
            same(checks, "later eight", (len(seen), len({x.component for x in seen}), own.tally.steps), (8, 8, 2))
            own.begin(11)
            same(checks, "not in between", (device.inspector, own.due(11)), (None, False))
            own.end(11)
    same(checks, "none", (Tally().text(), Tally(steps=2, hashed=3_000_000).text()),
         ("none", "0 launches of 2 steps recomputed, 0 elements, largest error 0.00 of "
          "its tolerance (none); 3 MB of state hashed"))
    same(checks, "errors", issubclass(SpotCheckError, Exception), True)
    return all_hold(checks)


def drawn(rng: np.random.Generator) -> Measured:
    """The first step looks at a launch of each component. Others draw DRAWN of them, and a launch of each: none is left out for good, and
    ranks draw apart."""
    checks, device, seed = list[tuple[str, bool]](), _Device(False), int(rng.integers(1 << 30))
    by: dict[str, set[tuple[int, int]]] = {}
    for n, call in enumerate(device.program.schedule):
        for i, launch in enumerate(device.program.plans[call.plan].launches):
            by.setdefault(launch.component, set()).add((n, i))
    component = {place: name for name, places in by.items() for place in places}
    every = list[list[frozenset[tuple[int, int]]]]()
    for rank in (0, 1):
        own = Spots(1, seed, device, 0, _Store())
        own.rank = rank  # of the same Program
        own.begin(0)
        checks.append(("the first step", sorted(component[x] for x in own._drawn) == sorted(by)))
        own._first = False
        every.append([])
        for step in range(1, 2500):
            own.begin(step)
            every[-1].append(frozenset(own._drawn))
        names = [[component[x] for x in found] for found in every[-1]]
        checks.append(("one launch of each", all(len(found) == len(set(found)) == spots.DRAWN for found in names)))
        checks.append(("none is left out", set[tuple[int, int]]().union(*every[-1]) == set(component)))
    alike = float(np.mean([a == b for a, b in zip(*every)]))
    checks.append((f"ranks draw apart, {alike:.1%} alike", alike < 0.01))
    return all_hold(checks)


def paced(rng: np.random.Generator) -> Measured:
    """When a device is looked at: not behind a profiled step, nor, where no step may be handed over ahead, behind every second one, so
    that its clock can be set; before a profiled step what runs is waited for; the first checked step's cost counts once a step's time is
    known."""
    checks: Named = []
    for late in (False, True):
        for on in (False, True):
            did, model, unhashed = list[Any](), list[Any](), False
            device = SimpleNamespace(late=late, wait=lambda: did.append("waits"))
            executor = SimpleNamespace(digests=device, runs_ahead=True, recorder=SimpleNamespace(profiling=False))
            own = object.__new__(PacedSpots)
            own.every, own._executor, own._hashes = int(on), executor, {("m", 0): None}  # type: ignore[dict-item]
            with instead(Spots, begin=lambda self, step: did.append(("begin", step)), wrote=lambda self, step: did.append(("wrote", step))):
                for step in range(40):
                    executor.runs_ahead, executor.recorder.profiling = bool(rng.integers(2)), bool(rng.integers(2))
                    own.begin(step)
                    own._hashes[("m", step)] = None  # type: ignore[assignment]
                    own.wrote(step)
                    profiled = late and executor.recorder.profiling
                    model += [*["waits"] * (on and profiled), ("begin", step)]
                    unhashed = late and not executor.runs_ahead and not unhashed
                    quiet = on and (profiled or unhashed)
                    model += [] if quiet else [("wrote", step)]
                    checks.append((f"hashes behind {step}", bool(own._hashes) != quiet))
            same(checks, f"{late} {on}", did, model)
    took, spaced = list[int](), list[tuple[int, int]]()
    own = object.__new__(PacedSpots)
    own._step_ns, own._ns, own._looked = 0, 0, 0

    def base(self: Any, ns: int) -> None:
        took.append(ns)
        if not self._looked:
            self._step_ns = ns - self._ns

    with instead(Spots, took=base, _space=lambda self: spaced.append((self._ns, self._looked))):
        for ns, spent, looked in ((900, 300, 12), (800, 200, 8), (50, 5, 0), (60, 6, 0), (900, 100, 8)):
            own._ns, own._looked = spent, looked
            own.took(ns)
    same(checks, "told", (took, spaced, own._step_ns), ([900, 800, 50, 60, 900], [(200, 8)], 54))
    return all_hold(checks)


def spaced(rng: np.random.Generator) -> Measured:
    """Checked steps of a device stand at the first multiple of what was asked for at which what one looks at costs SHARE at most, where
    they are that far apart at all; of a step that looked at more than DRAWN components only that part counts. Else they stay."""
    checks: Named = []
    device = _Device(False)
    own = Spots(5, 3, device, 0, _Store())
    for trial in range(240):
        late, every, looked = bool(trial % 6), int(rng.choice([10, 49, 50, 77, 400])), int(rng.choice([1, 7, 8, 9, 16, 40]))
        whole, cost = int(rng.integers(1, 5000)) * 1000, int(rng.integers(1, 800_000)) * 5 + 1  # no tie
        device.late, own.every, own.apart, own._first = late, every, every, True
        own._step_ns, own._looked, own._ns = 0, looked, cost
        own.took(whole + cost)
        same(checks, "no step's time yet", own.apart, every)
        own._looked = 0
        own._ns = aside = int(rng.integers(1000))
        own.took(whole + aside)
        own._looked, own._ns = looked, cost
        own.took(whole + cost)
        share = Fraction(cost) * min(looked, 8) / looked
        wanted = next(n for n in count(every, every) if 200 * share <= n * whole) if late and every >= 50 else every
        same(checks, f"{late} {every} {whole} {cost} {looked}", own.apart, wanted)
        own._first = False
        same(checks, "due", [step for step in range(3 * wanted + 1) if own.due(step)], [0, wanted, 2 * wanted, 3 * wanted])
    return all_hold(checks)
