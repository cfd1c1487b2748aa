"""What pins promise: what was saved comes back, the newest by component, of those that are kept; what cannot be a pin is refused in its
words; when a speed figure may be quoted, and at which distance measurements stood together. Floor 7."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, stdev
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.errors import CorruptError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import HERE, PROCESSOR, SAME_ISA, folder, make, pin_of
from alpha.registry.claims import why_no_claim
from alpha.registry.distance import HOPS, WITHIN, elsewhere, hops_of, same, together
from alpha.registry.evidence import shipped_root
from alpha.registry.judge import AMBIGUOUS, FAIL, judge
from alpha.registry.pins import FEWEST, FLOOR, MOST, Pin, Pins, binding, code_of, folder_of, key_of_record, line_of, same_code, shipped_pins
from alpha.registry.record import content_hash

KEY = f"{HERE.key}_{PROCESSOR}"
MEND = "restore the file from version control, or pin again with `alpha gate pin`"


def _below(t: float, freedom: int) -> tuple[float, float]:
    """Student's distribution and density at t: Simpson's rule over the density from 0."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    density = scale * (1 + np.linspace(0.0, t, 401) ** 2 / freedom) ** (-(freedom + 1) / 2)
    weights = np.array([1, *[4, 2] * 199, 4, 1])
    return 0.5 + float(density @ weights) * t / 1200, float(density[-1])


def _drawn(rng: np.random.Generator, component: str, family: str) -> Pin:
    n = int(rng.integers(FEWEST, MOST + 1))
    return Pin(component, family, {"implementation": f"{rng.integers(99)}"},
               {name: tuple((0.1 + 0.8 * rng.random(n)).tolist()) for name in "ab"[: int(rng.integers(1, 3))]},
               tuple(f"2000-01-{i:02d}" for i in range(n)), f"flops/v{rng.integers(9)}",
               {"processor": PROCESSOR} if rng.random() < 0.5 else {})


def kept(rng: np.random.Generator) -> Measured:
    """Files of pins and of comparisons: what was saved comes back, of both families; others stay, or go with their component."""
    checks = Checks()
    with folder() as at:
        pins = Pins(at / "perf")
        checks.that((pins.keys(), pins.load(KEY), pins.relative(KEY)) == ([], {}, {}), "pins of nothing")
        gpu = "cuda_sm90_H200"
        for key, family in ((KEY, "cpu"), (gpu, "cuda")):
            first = {name: _drawn(rng, name, family) for name in ("made.a", "made.b", "made.c")}
            pins.save(key, first)
            newer = {"made.b": _drawn(rng, "made.b", family), "made.d": _drawn(rng, "made.d", family)}
            checks.that(pins.save(key, newer) == at / "perf" / f"{key}.json", "the file lies elsewhere")
            checks.that(pins.load(key) == {**first, **newer} == Pins(at / "perf").load(key), f"{key}: a pin changed on its way")
            keep = {"made.a", "made.d", "made.gone"}
            pins.save(key, {"made.e": _drawn(rng, "made.e", family)}, keep=frozenset(keep))
            checks.that(pins.load(key) == {"made.a": first["made.a"], "made.d": newer["made.d"]}, f"{key}: {[*pins.load(key)]} are kept")
            text = json.loads(pins.path(key).read_text())
            checks.that(text["components"]["made.a"] == first["made.a"].body() and text["format"] == 2, "the file of pins")
            line = first["made.a"].line("a")
            checks.that(line == line_of(first["made.a"].shares["a"], FLOOR[family]) and first["made.a"].line("z") is None, "the line")
            pins.path(key).write_text("torn")
            Pins(at / "perf").save(key, newer)
            checks.that(Pins(at / "perf").load(key) == newer, f"{key}: a file that cannot be read is not replaced")
        for name in ("other.json", "cpu_x.txt"):
            (at / "perf" / name).write_text("{}")
        checks.that(pins.keys() == sorted([gpu, KEY]), f"keys: {pins.keys()}")
        one, two = make("perf", component="made.b"), make("perf", component="made.a")
        checks.that(key_of_record(one) == KEY and pins.save_relative(one) == at / "perf" / f"{KEY}.relative.jsonl", "another file")
        pins.save_relative(two)
        newest = replace(one, nonce="11")
        pins.save_relative(newest)
        checks.that([*pins.relative(KEY).items()] == [("made.a", two), ("made.b", newest)], f"comparisons: {pins.relative(KEY)}")
        checks.that(pins.relative_path(KEY).read_text() == f"{two.line()}\n{newest.line()}\n", "the file of comparisons")
        pins.save(KEY, {"made.up": (pin := pin_of())})
        judged = [pins.of(r) for r in (make("perf"), make("parity"), make("perf", component="made.z"), make("perf", machine=SAME_ISA))]
        checks.that(judged == [pin, None, None, None], f"judged by: {judged}")
        pins.forget(KEY)
        checks.that((pins.load(KEY), pins.relative(KEY)) == ({}, {}), "a damaged file is not forgotten")
    for n in range(FEWEST, MOST + 1):
        shares = tuple((0.4 + 0.01 * rng.standard_normal(n)).tolist())
        line, spread = line_of(shares, 0.0), stdev(shares) / median(shares)
        t = line.allowance / (math.sqrt(1 + math.pi / (2 * n)) * spread)
        below, density = _below(t, n - 1)
        checks.that(abs(below - 0.99) < 0.0006 * density, f"{n} measurements: {below:.5f} lie below the line")  # t has three digits
        checks.that((line.middle, line.spread) == (median(shares), spread) and line_of(shares, 1.0).allowance == 1.0, f"{n}: {line}")
    told = shipped_pins()
    checks.that(told.folder == folder_of(shipped_root()) == shipped_root().parent / "perf" and shipped_pins() is not told, "shipped pins")
    return checks.measured()


def damaged(rng: np.random.Generator) -> Measured:
    """Files of pins and of comparisons that nothing has written so: refused, with what is wrong of them."""
    checks = Checks()
    body = pin_of().body()
    unread = "pinned shares cannot be read"

    def one(**changed: Any) -> dict[str, Any]:
        plain = {k: v for k, v in {**body, **changed}.items() if k != "content"}
        return {"format": 2, "components": {"made.up": {**plain, "content": content_hash({"component": "made.up", **plain})}}}

    def shares(value: Any) -> dict[str, Any]:
        return one(shares={"a": [*body["shares"]["a"][1:], value]})

    few = {"shares": {"a": body["shares"]["a"][1:]}, "times": body["times"][1:]}
    many = {"shares": {"a": [0.5] * (MOST + 1)}, "times": ["now"] * (MOST + 1)}
    hashed = one()["components"]["made.up"]["content"]
    table: Sequence[tuple[Any, str, str, str]] = (
        *((shares(x), unread, f"{KEY}.json: ValueError {x!r} is no share of a ceiling", "what `alpha gate pin` wrote")
          for x in (True, "0.5", 0, -0.5, 1.5, None)),
        ("{'a'", unread, f"{KEY}.json: JSONDecodeError Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
         "what `alpha gate pin` wrote"),
        (json.dumps(one()).replace("0.6", "NaN", 1), unread, f"{KEY}.json: ValueError NaN is no share", "what `alpha gate pin` wrote"),
        ({**one(), "format": 1}, "pinned shares of another format", f"{KEY}.json: format 1", "format 2"),
        ({"format": 2}, unread, f"{KEY}.json: KeyError 'components'", "what `alpha gate pin` wrote"),
        ({"format": 2, "components": {"made.two": one()["components"]["made.up"]}},
         "a pin was edited by hand: its content hash does not match", "made.two", hashed),
        *((one(**x), "a pin does not hold one share per case and measurement", f"made.up: {n} measurements",
           f"{FEWEST} to {MOST} measurements, each of every case")
          for x, n in ((few, FEWEST - 1), (many, MOST + 1), ({"shares": {}}, FEWEST), ({"times": [*body["times"], "now"]}, FEWEST + 1))),
    )
    with folder() as at:
        path = at / f"{KEY}.json"
        for value, what, came, expected in table:
            path.write_text(value if isinstance(value, str) else json.dumps(value))
            checks.tells(CorruptError, (what, came, expected, MEND), lambda: Pins(at).load(KEY))
        path.write_text(json.dumps(shares(1)))
        checks.that(Pins(at).load(KEY)["made.up"].shares["a"][-1] == 1.0, "the whole ceiling")
        first, second = make("perf", component="made.a"), make("perf", component="made.b")
        other = make("perf", component="made.c", machine=SAME_ISA)
        for records in ((second, first), (first, first), (first, other)):
            (at / f"{KEY}.relative.jsonl").write_text("".join(r.line() + "\n" for r in records))
            what = "comparisons are not one per component of this kind of machine, in sorted order"
            checks.tells(CorruptError, (what, f"{KEY}.relative.jsonl", KEY, MEND), lambda: Pins(at).relative(KEY))
    return checks.measured()


def claimed(rng: np.random.Generator) -> Measured:
    """Why no figure may be quoted, in the words of each reason, and the one way in which it may."""
    checks = Checks()
    today, older = {"implementation": f"{rng.integers(99)}", "cases": "c"}, {"implementation": "older"}
    record = make("perf", digests=today)
    good = {"name": "a", "kind": "relative", "low": -0.01, "estimate": 0.0, "high": 0.01}
    slow = {**good, "low": 0.03, "estimate": 0.04, "high": 0.05, "reproduced": True}
    wide = {**good, "high": 0.03}
    kind = " on this kind of machine"
    never = "the code is not the pinned one, and no comparison of the two is recorded"
    table: Sequence[tuple[str, Pin | None, Mapping[str, Any], Mapping[str, Any] | None, str]] = (
        ("nothing pinned, nothing measured", None, good, None, f"no pinned share of any case{kind}"),
        ("nothing pinned", None, {}, None, f"no pinned share of a{kind}"),
        ("other cases pinned", pin_of(cases=("z",), digests=today), {}, None, f"no pinned share of a{kind}"),
        ("slower", pin_of(share=0.9, digests=today), {}, None,
         f"{FAIL}; a: 0.6 of the ceiling, pinned 0.9 and at least {0.9 * 0.9:.3g} needed"),
        ("faster", pin_of(share=0.5, digests=today), {}, None, "faster than its pin explains: a: 0.6 of the ceiling, pinned 0.5"),
        ("the pinned code", pin_of(digests={**today, "cases": "others"}), {}, None, ""),
        ("other code", pin_of(digests=older), {}, None, never),
        ("compared with other code", pin_of(digests={"implementation": "another"}), {}, good, never),
        ("one case lacks", pin_of(digests=older), {}, {**good, "name": "b"}, "the comparison with the pinned code lacks a"),
        ("slower than it", pin_of(digests=older), {}, slow,
         f"against the pinned code: {FAIL}: the absolute half did not run; a: 4.0% slower (3.0% to 5.0%), reproduced"),
        ("not known", pin_of(digests=older), {}, wide,
         f"against the pinned code: {AMBIGUOUS}: the absolute half did not run; a: slowdown between -1.0% and 3.0% cannot be told from 2%"),
        ("as fast", pin_of(digests=older), {}, good, ""),
    )
    for what, pin, measured, compared, why in table:
        with folder() as at:
            pins = Pins(at)
            r = replace(record, cases=[measured] if measured else record.cases)
            if compared is not None:
                pins.save_relative(replace(record, cases=[compared], digests=binding(older, today)))
            found = why_no_claim(judge(r, pin=pin), pin, today, pins, r)
            checks.that(found == why, f"{what}: {found!r}")
    many, names = replace(record, cases=[{"name": x, "share": 0.6, "times_ns": [9]} for x in "abcd"], declared=4), ("a", "b", "c", "d")
    needed = f"0.6 of the ceiling, pinned 0.9 and at least {0.9 * 0.9:.3g} needed"
    told = f"4.0% slower ({0.03:.1%} to {0.05:.1%}), reproduced"
    for digests, share, why in ((today, 0.9, f"{FAIL}; " + "; ".join(f"{x}: {needed}" for x in "abc")),
                                (older, 0.6, f"against the pinned code: {FAIL}: " + "; ".join(f"{x}: {told}" for x in "bcd"))):
        with folder() as at:
            pins, pin = Pins(at), pin_of(share=share, cases=names, digests=digests)
            pins.save_relative(replace(many, cases=[{**slow, "name": x} for x in names], digests=binding(older, today)))
            found = why_no_claim(judge(many, pin=pin), pin, today, pins, many)
            checks.that(found == why, f"of four reasons: {found!r}")
    both = {"implementation": "1", "binaries": "2", "row": "3"}
    checks.that(code_of(both) == {"implementation": "1", "binaries": "2"} and code_of({"row": "3"}) == {}, "which code was timed")
    checks.that(binding(both, today) == {"implementation": today["implementation"], "pinned implementation": "1", "pinned binaries": "2"},
                "what a comparison binds to")
    checks.that(same_code(pin_of(digests=both), both) and not same_code(pin_of(digests=both), {**both, "binaries": "3"}), "the same code")
    return checks.measured()


def stood(rng: np.random.Generator) -> Measured:
    """The nearest distance at which enough measurements stood, by looking at every one; and whether a record stood elsewhere."""
    checks = Checks()
    for _ in range(120):
        hops = [float(x) for x in rng.choice([100, 120, 149, 150, 151, 226, 300, 340], int(rng.integers(1, 14)))]
        wanted = list[int]()
        for least in sorted(hops, reverse=True):  # the nearest one is looked at last
            group = [i for i, hop in enumerate(hops) if least <= hop <= WITHIN * least]
            wanted = group if len(group) >= FEWEST else wanted
        checks.that(together(hops) == wanted, f"{hops}: {together(hops)}, not {wanted}")
        pin = replace(pin_of(), environment={HOPS: " ".join(f"{hop:g}" for hop in hops)})
        known = hops if len(hops) == len(pin.times) else []
        checks.that(hops_of(pin) == known, f"{hops}: {hops_of(pin)}")
        here = float(rng.choice([60, 90, 130, 220, 500]))
        away = bool(known) and not any(max(here, hop) / min(here, hop) <= WITHIN for hop in known)
        told = f"the cores stand at another distance (a hop takes {here:.0f} ns, pinned at {median(known or [0]):.0f} ns)" if away else ""
        checks.that(elsewhere({"hop_ns": f"{here}"}, pin) == told, f"{here} beside {known}: {elsewhere({'hop_ns': f'{here}'}, pin)!r}")
        checks.that(same(here, hops[0]) == same(hops[0], here) == (max(here, hops[0]) <= WITHIN * min(here, hops[0])), "two hops")
    many = replace(pin_of(), environment={HOPS: " ".join(["100"] * FEWEST)})
    for text in ("", "far", "500 500", "nan", "inf", "0", "-500", "500x"):
        checks.that(elsewhere({"hop_ns": text}, many) == "" == elsewhere({}, many), f"a record that says {text!r}")
        checks.that(elsewhere({"hop_ns": "500"}, replace(many, environment={HOPS: text})) == "", f"a pin that says {text!r}")
    short = [0.25] * FEWEST
    checks.that(hops_of(replace(many, environment={HOPS: " ".join(map(str, short))})) == short, "less than a nanosecond is a time")
    checks.that(together([]) == [], "no hops")
    return checks.measured()


