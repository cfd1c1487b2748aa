"""What the merge gate promises: sound evidence is green; each way of fooling it with committed files is red, and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.errors import CorruptError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry import asked, consistent, past, signed, spoiled, stated, whole
from alpha.gates.contracts.registry.committed import CATALOGUE, FAULT, PROBE, Committed, agree, red
from alpha.gates.contracts.registry.common import (
    BASE,
    HERE,
    KERNEL,
    ONE,
    OTHER,
    PAIR,
    PROCESSOR,
    SINGLE,
    TOP,
    TWO,
    Case,
    catalogue,
    folder,
    make,
    parity_case,
    passing,
    pin_of,
)
from alpha.registry import judge as judges
from alpha.registry import mutants, policy
from alpha.registry.catches import LATE, NAME, late, late_case, load_catches, save_catches
from alpha.registry.check import WARNING, Finding, check, github, plain
from alpha.registry.digest import component_digests
from alpha.registry.evidence import path_of, save, write_reference
from alpha.registry.package import Package
from alpha.registry.pins import FEWEST, MOST, binding, key_of_record
from alpha.registry.record import Record, canonical, content_hash


def _green(rng: np.random.Generator) -> Measured:
    """Sound evidence passes; a stale line of another class is a warning; counts are true."""
    checks = Checks()
    with folder() as at:
        committed = Committed(at)
        found = committed.check()
        checks.that(found.ok and not found.findings, plain(found))
        checks.that((found.records, found.probes, found.catches) == (len(committed.records), 1, 1), f"counts {found}")
        save([replace(committed.record("faults"), machine=OTHER.key, digests={"implementation": "older"})], committed.root)
        found = committed.check()
        checks.that(found.ok and [f.level for f in found.findings] == [WARNING], f"another class: {plain(found)}")
    return checks.measured()


def _edited(rng: np.random.Generator) -> Measured:
    """Cheat 19: a metric or verdict edited, with and without a new content hash."""
    checks = Checks()
    ratio = float(rng.uniform(2.5, 90.0))

    def by_hand(c: Committed) -> None:
        path = c.path()
        path.write_text(path.read_text().replace('"ratio":1.5', '"ratio":1.25'))

    def forged(c: Committed) -> None:
        c.write(replace(c.record("parity"), probes=[[*PROBE[:3], "00008040"]]))

    def without_probes(c: Committed) -> None:
        c.write(replace(c.record("parity"), probes=[]))

    def verdict(c: Committed) -> None:
        lines = [json.loads(x) for x in c.path().read_text().splitlines()]
        made = [{**{k: v for k, v in b.items() if k != "content"}, "verdict": "PASS"} for b in lines]
        c.path().write_text("".join(canonical({**b, "content": content_hash(b)}) + "\n" for b in made))

    def oracle(record: Record) -> list[str]:
        return [f"probe {p}" for p in record.probes if p != PROBE]

    red(checks, "edited by hand", by_hand, "edited by hand")
    red(checks, "probes forged with a fresh content hash", forged, "the record disagrees: probe", recompute=partial(map, oracle))
    red(checks, "probes left out", without_probes, "without probes")
    red(checks, "a verdict written into the line", verdict, "cannot be read")
    red(checks, "a failing record", lambda c: c.write(replace(c.record("parity"), cases=[parity_case(ratio=ratio)], declared=1)), "FAIL")
    nan = parity_case(ratio=float("nan"))
    red(checks, "a record of NaN", lambda c: c.write(replace(c.record("parity"), cases=[nan], declared=1)), "FAIL")
    return checks.measured()


def _foreign(rng: np.random.Generator) -> Measured:
    """Cheat 20: evidence of other code, of another class, of a component that does not exist or owes no such gate."""
    checks = Checks()
    other = f"{rng.integers(1 << 40):010x}"

    def stale(name: str) -> Callable[[Committed], None]:
        return lambda c: c.write(replace(c.record("faults"), digests={**c.record("faults").digests, name: other}))

    def another_class(c: Committed) -> None:
        (path,) = save([replace(c.record("parity"), machine=OTHER.key)], c.root)
        c.path().write_text(path.read_text())

    def orphan(c: Committed) -> None:
        c.write(make("parity", component="made.gone"))

    def gone_reference(c: Committed) -> None:
        write_reference(c.root, OTHER)

    for name in ("implementation", "row", "cases", "measure", "what is asked no more"):
        red(checks, f"evidence of another {name}", stale(name), f"stale: {name}")
    red(checks, "evidence of another class", another_class, "another machine class")
    red(checks, "evidence of nothing", orphan, "does not exist")
    red(checks, "a gate that is not owed", lambda c: c.write(make("perf", component=BASE.id)), "does not owe")
    red(checks, "no evidence on the reference class", gone_reference, "reference class")
    red(checks, "a component without evidence", lambda c: c.path(TOP.id).unlink(), "no evidence on the reference class")
    red(checks, "a folder that is no class", lambda c: (c.root / "laptop").mkdir(), "not the key of a machine class")
    return checks.measured()


def _speed(rng: np.random.Generator) -> Measured:
    """A slow record, however its hash was made; a pin that is missing, lowered, raised, noisy, edited or of other code."""
    checks = Checks()
    for what, share, more in (("1000 times slower", 0.0006, {}), ("50 times slower, its own baseline lowered", 0.012, {"baseline": 0.012}),
                              ("49 % slower", 0.306, {}), ("11 % slower", 0.534, {})):
        red(checks, what, lambda c, share=share, more=more: c.perf(share, **more), "pinned 0.6")  # type: ignore[misc]
    path = "no pinned share of a"
    red(checks, "no pin", lambda c: c.pins.path(key_of_record(c.record("perf"))).unlink(), path)
    red(checks, "a case without a pin", lambda c: c.pin(cases=("b",)), "")
    red(checks, "a generation of processor without pins",
         lambda c: c.write(replace(c.record("perf"), environment={"processor": "Made-6-2", "flops": "flops/made"})), path)
    red(checks, "a lowered pin", lambda c: c.pin(0.3), "faster than its pin explains")
    red(checks, "a pin above what records show", lambda c: c.pin(0.9), "pinned 0.9")
    red(checks, "a noisy pin below published figures", lambda c: c.pin(spread=0.2), "too noisy to judge")
    red(checks, "a spread that was widened", lambda c: c.pin(spread=0.05), "too noisy to judge")
    red(checks, "no FLOPs model", lambda c: c.write(replace(c.record("perf"), environment={"processor": PROCESSOR})), "FLOPs model")
    red(checks, "published figures that rest on code that was never compared", lambda c: c.pin(digests={"implementation": "older"}),
         "no comparison of the two")
    red(checks, "a pin of nothing", lambda c: c.pins.save(key_of_record(c.record("perf")), {"made.gone": pin_of("made.gone")}),
         "does not exist")

    def edited(old: str, new: str) -> Callable[[Committed], None]:
        def spoil(c: Committed) -> None:
            at = c.pins.path(key_of_record(c.record("perf")))
            text = at.read_text()
            checks.that(old in text, f"{old} is not in the pins")
            at.write_text(text.replace(old, new, 1))
        return spoil

    first = repr(pin_of().shares["a"][0])
    for new in ("0.3", "1.5", "-0.1", "NaN", "true", "null", '"0.6"', "[]"):
        red(checks, f"a pinned share edited to {new}", edited(first, new),
             "cannot be read" if new == "NaN" else "edited by hand")
    for what, cut in (("a case with fewer shares than measurements", slice(1, None)), ("a case with no share", slice(0))):
        def unequal(c: Committed, cut: slice = cut) -> None:
            pin = pin_of(KERNEL.id, digests=c.record("perf").digests, cases=("a", "b"))
            pin = replace(pin, shares={**pin.shares, "b": pin.shares["b"][cut]})  # of a case that no record has
            c.pins.save(key_of_record(c.record("perf")), {pin.component: pin})

        red(checks, what, unequal, "one share per case and measurement")
    longer = pin_of(KERNEL.id)
    longer = replace(longer, shares={"a": (*longer.shares["a"], 0.6)})
    red(checks, "a case with more shares than measurements", lambda c: c.pins.save(key_of_record(c.record("perf")), {KERNEL.id: longer}),
         "one share per case and measurement")
    for n, what in ((FEWEST - 1, "few"), (MOST + 1, "many")):
        def measured(c: Committed, n: int = n) -> None:
            pin = pin_of(KERNEL.id, digests=c.record("perf").digests)
            pin = replace(pin, shares={case: (shares * n)[:n] for case, shares in pin.shares.items()}, times=(pin.times * n)[:n])
            c.pins.save(key_of_record(c.record("perf")), {pin.component: pin})

        red(checks, f"a pin of too {what} measurements", measured, "one share per case and measurement")
    red(checks, "a torn file of pins", edited("components", "comp"), "cannot be read")
    red(checks, "another format of pins", edited('"format": 2', '"format": 1'), "another format")
    with folder() as at:
        committed = Committed(at)
        committed.pin(digests={"implementation": "older"})
        found = committed.check(published=())
        checks.that(found.ok and [f.level for f in found.findings] == [WARNING], f"other code below no published figure: {plain(found)}")
        compared = relative(committed.record("perf"), {"implementation": "older"}, high=0.01)
        committed.pins.save_relative(compared)
        found = committed.check()
        checks.that(found.ok and not found.findings, f"compared and as fast: {plain(found)}")
    for what, spoil in (("slower", lambda r: relative(r, {"implementation": "older"}, low=0.03, high=0.05)),
                        ("another pinned state", lambda r: relative(r, {"implementation": "another"}, high=0.01)),
                        ("another state of today", lambda r: relative(replace(r, digests={"implementation": "x"}),
                                                                      {"implementation": "older"}, high=0.01)),
                        ("another case", lambda r: relative(r, {"implementation": "older"}, high=0.01, name="b"))):
        def compare(c: Committed, spoil: Callable[[Record], Record] = spoil) -> None:
            c.pin(digests={"implementation": "older"})
            c.pins.save_relative(spoil(c.record("perf")))

        red(checks, f"a comparison with the pinned code: {what}", compare, "published figures rest on it")
    return checks.measured()


def relative(record: Record, pinned: dict[str, str], *, low: float = -0.01, high: float, name: str = "a") -> Record:
    """A comparison of a record's code with pinned code."""
    case = {"name": name, "kind": "relative", "low": low, "estimate": (low + high) / 2, "high": high, "reproduced": True}
    return replace(record, cases=[case], digests=binding(pinned, record.digests))


def _loosened(rng: np.random.Generator) -> Measured:
    """Cheat 21: tolerances loosened until a recorded fault passes; catches that are missing, stale, edited or about nothing."""
    checks = Checks()
    planted = float(rng.uniform(2.1, 50.0))
    with folder() as at:
        committed = Committed(at)
        committed.catch([parity_case(ratio=planted)])
        checks.that(committed.check().ok, "a sound catch is red")
        with mock.patch.object(judges, "RATIO", planted * 2):
            committed.write(replace(committed.record("parity"), cases=[parity_case(floor=planted * 9)], declared=1))
            committed.catch([parity_case(ratio=planted, floor=planted * 9)])
            found = committed.check()
            checks.that(not found.ok and any("loosened" in f.what for f in found.findings), f"a loosened tolerance: {plain(found)[:150]}")
    red(checks, "a recorded fault that passes", lambda c: c.catch([parity_case(ratio=0.5)]), "would now pass")
    two = (FAULT, replace(FAULT, id="made.other"))
    red(checks, "a fault that no gate is recorded to reject", lambda c: None, "no gate is recorded", faults=two)
    red(checks, "a catch of a fault that does not exist", lambda c: None, "does not exist", faults=())
    red(checks, "a catch of another text of the fault", lambda c: None, "stale catch: fault", faults=(replace(FAULT, replace="c"),))
    red(checks, "a catch by another gate", lambda c: None, "another gate", faults=(replace(FAULT, gate="faults"),))
    red(checks, "a catch by another component", lambda c: None, "another gate", faults=(replace(FAULT, component=BASE.id),))
    red(checks, "a catch that did not run", lambda c: c.catch([parity_case(ratio=9.0)], declared=2), "would now pass")
    with mock.patch.object(policy, "AWAITING", {HERE.key: {FAULT.id: "later"}}):
        red(checks, "an excuse for a class of CPUs", lambda c: None, "stale catch: fault", faults=(replace(FAULT, replace="c"),))
    fails = parity_case(ratio=9.0)
    for what, record in (("component", make("parity", [fails], component=BASE.id)),
                         ("gate", make("gradient", [fails], component=KERNEL.id))):
        red(checks, f"a catch whose record is of another {what}", lambda c, record=record: c.catch([], record=record),  # type: ignore[misc]
             "another component or gate")
    red(checks, "no file of catches", lambda c: (c.root / HERE.key / NAME).unlink(), "no gate is recorded")
    red(checks, "an error without text", lambda c: c.catch([], record=None, error=""), "would now pass")
    slow = late("", 60.0)
    for error in (slow, f"{slow} {late('a', 60.0)}", f"{LATE}: case  did not end within 60 s", LATE):
        red(checks, f"a gate that may have been slow: {error}", lambda c, error=error: c.catch([], record=None, error=error),  # type: ignore[misc]
            "would now pass")
    named = "two words,\n of 'a case'"
    checks.that((late_case(slow), late_case(late(named, 1e-7))) == ("", named), "a case that hangs has another name")

    def edited(c: Committed) -> None:
        path = c.root / HERE.key / NAME
        path.write_text(path.read_text().replace('"ratio":9.0', '"ratio":3.0'))

    def turned(c: Committed) -> None:
        path = c.root / HERE.key / NAME
        path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items())), separators=(",", ":")) + "\n")

    red(checks, "an edited catch", edited, "edited by hand")
    red(checks, "a catch whose keys are turned round", turned, "edited by hand")
    with folder() as at:
        committed = Committed(at)
        for error in (late("a case", 12.5), "the kernel crashed"):
            committed.catch([], record=None, error=error)
            checks.that(committed.check().ok, f"a gate that ended in an error did not reject: {error}")
        path = committed.root / HERE.key / NAME
        checks.that(load_catches(committed.root, HERE.key)["made.fault"].error == "the kernel crashed", "a catch changed on its way")
        path.write_text(path.read_text()[:-1])
        checks.raises(CorruptError, "a torn file of catches", lambda: load_catches(committed.root, HERE.key))
        save_catches([], committed.root)
    return checks.measured()


def _awaited(rng: np.random.Generator) -> Measured:
    """What awaits renewal, where it is old or missing, is told as NOT_RUN and counted. All else stays an error, and so is an entry that is
    not needed."""
    checks = Checks()
    two = (FAULT, replace(FAULT, id="made.other"))
    with mock.patch.object(policy, "awaited", lambda machine: {"made.other": "later"} if machine == HERE.key else {}):
        red(checks, "an excuse with nothing to renew", lambda c: None, "nothing excuses it")
        red(checks, "an excuse for something else", lambda c: None, "stale catch: fault", faults=(replace(FAULT, replace="c"),))
    with mock.patch.object(policy, "awaiting", lambda machine, about: "later" if machine == HERE.key else ""):
        red(checks, "a failing record, awaited",
             lambda c: c.write(replace(c.record("parity"), cases=[parity_case(ratio=9.0)], declared=1)), "FAIL")
        red(checks, "a recorded fault that passes, awaited", lambda c: c.catch([parity_case(ratio=0.5)]), "would now pass")
        with folder() as at:
            committed = Committed(at)
            committed.write(replace(committed.record("faults"), digests={"implementation": "older"}),
                            replace(committed.record("perf"), digests={"implementation": "older"}))
            path = committed.path(BASE.id)
            path.unlink()
            found = committed.check(faults=two)
            told = [f for f in found.findings if f.what.startswith("NOT_RUN on today's code")]
            checks.that(found.ok and {f.level for f in found.findings} == {WARNING}, f"awaited: {plain(found)[:150]}")
            owed = len(policy.owed(BASE))
            checks.that(found.unrenewed == {HERE.key: len(told)} and len(told) == 3 + owed, f"{found.unrenewed}, {len(told)} told")
            checks.that(f"NOT_RUN {HERE.key}: {len(told)} gates and planted faults await renewal" in plain(found), plain(found)[-200:])
    return checks.measured()


def _skipped(rng: np.random.Generator) -> Measured:
    """Cheat 22: cases skipped, renamed, or declared away; exemptions without a reason; nothing there at all."""
    checks = Checks()
    many = [parity_case(n) for n in "abc"]

    def written(cases: list[dict[str, object]], declared: int) -> Callable[[Committed], None]:
        return lambda c: c.write(replace(c.record("parity"), cases=cases, declared=declared))

    red(checks, "a case skipped", written(many[:2], 3), "2 cases ran of 3")
    red(checks, "a case renamed onto another", written([*many[:2], many[0]], 3), "one name")
    red(checks, "nothing declared", written([], 0), "NOT_RUN")
    red(checks, "too few repeats", lambda c: c.write(
        replace(c.record("determinism"), cases=[{"name": "a", "runs": 3, "distinct": 1, "digest": "00"}])), "runs in total")

    def renamed(record: Record) -> list[str]:
        return [] if [c["name"] for c in record.cases] == ["a", "e"] else ["the record's cases are not those that its nonce gives"]

    red(checks, "a case under a new name", written([parity_case("z"), parity_case("e")], 2), "not those", recompute=partial(map, renamed))
    with folder() as at:
        committed = Committed(at)
        with mock.patch.object(policy, "EXEMPT", {("silu", "perf"): ""}):
            found = committed.check()
            checks.that(not found.ok and [f.line for f in found.findings if f.about == "policy"] == [0], "an exemption without a reason")
    with folder() as at:
        (at / HERE.key).mkdir()
        empty = check(catalogue(), at, agree, reference=HERE.key, package=Package())
        checks.that(not empty.ok and "nothing was there" in plain(empty), "an empty folder passes")
        checks.that(not replace(empty, findings=()).ok, "nothing looked at passes where nothing was found either")
    return checks.measured()


def _printed(rng: np.random.Generator) -> Measured:
    """The same text in every process; annotations that a pull request shows, one per line, with special characters escaped."""
    checks = Checks()
    with folder() as at:
        committed = Committed(at)
        c = committed.record("parity")
        committed.write(replace(c, cases=[parity_case("50%, a\nb", ratio=9.0)], declared=1))
        found = committed.check()
        text, marks = plain(found), github(found)
        checks.that("FAIL: 1 error" in text and "alpha gate run" in text, f"plain text: {text}")
        checks.that(marks.startswith("::error file=baselines/evidence/"), f"annotation: {marks}")
        checks.that(len(marks.splitlines()) == len(found.findings) and "%0A" in marks and "50%25" in marks, f"escapes: {marks}")
        checks.that("line=4,title=gelu.f32.made parity::" in marks, f"line and title: {marks}")
        checks.that(str(at) not in text + marks, "a folder of this machine is printed")
        many = [Finding(WARNING, f"made/{i}.jsonl", 1, "made", "stale") for i in range(8)]
        brief = plain(replace(found, findings=(*found.findings, *many)))
        checks.that(brief.count("WARNING made/") == 5 and "WARNING made: 3 more" in brief, f"many warnings: {brief}")
        checks.that(all(line in brief for line in text.splitlines()[:-1]), "an error is left out")
    return checks.measured(content_hash({"plain": text, "github": marks}))


def _current(rng: np.random.Generator) -> Measured:
    """Today's digests are taken once per component and gate, and are those of the registry."""
    checks, package = Checks(), Package()
    for c in CATALOGUE:
        for gate in policy.owed(c):
            again = component_digests(c, gate, package=Package(package.root))  # a root that is given shares nothing
            checks.that(component_digests(c, gate, package=package) == again, f"{c.id} {gate} digests twice")
    return checks.measured()


def _devices(rng: np.random.Generator) -> Measured:
    """What asks for two GPUs owes evidence on reference classes of two, and what asks for one on those of one."""
    checks = Checks()
    for component, machine, other in ((PAIR, TWO, SINGLE), (SINGLE, ONE, PAIR)):
        with folder() as at:
            c = Committed(at)
            write_reference(c.root, machine)
            save(passing((component,), c.package, machine), c.root)
            found = check(catalogue(BASE, TOP, KERNEL, component, other), c.root, agree, faults=(FAULT,), package=c.package)
            wrong = [f.what for f in found.findings if "does not exist" in f.what or "no evidence on the reference class" in f.what]
            checks.that(not wrong, f"{component.id} on {machine.key}: {wrong[:1]}")
            save(passing((other,), c.package, machine), c.root)
            found = check(catalogue(BASE, TOP, KERNEL, component, other), c.root, agree, faults=(FAULT,), package=c.package)
            checks.that(any("does not exist" in f.what for f in found.findings), f"evidence of {other.id} on {machine.key} is accepted")
            path_of(c.root, machine.key, component.id).unlink()
            found = check(catalogue(BASE, TOP, KERNEL, component, other), c.root, agree, faults=(FAULT,), package=c.package)
            missing = [f for f in found.findings if f.about.startswith(component.id) and "no evidence on the reference class" in f.what]
            checks.that(len(missing) == len(policy.owed(component)), f"{len(missing)} gates of {component.id} are missed on {machine.key}")
    return checks.measured()


def _mutants(rng: np.random.Generator) -> Measured:
    """A score that falls, was edited, is missing or of older engines turns the check red; a rise is the next line to hold."""
    checks = Checks()
    red(checks, "a lower score", lambda c: c.score(8), "fell from 90% to 80%")
    red(checks, "nothing counted", lambda c: c.score(0, areas={mutants.ALL: (0, 0, 10)}), "fell")
    red(checks, "no score", lambda c: mutants.path_of(c.root).unlink(), "no score")
    red(checks, "older engines", lambda c: c.score(10, measure="00"), "stale")
    red(checks, "an edited score", lambda c: mutants.path_of(c.root).write_text(
        mutants.path_of(c.root).read_text().replace("[9,10,2]", "[10,10,2]")), "edited by hand")

    def risen(c: Committed) -> None:
        c.score(10)
        c.score(9)

    red(checks, "a fall after a rise", risen, "fell from 100% to 90%")
    return checks.measured()


CASES: dict[str, dict[str, list[Case]]] = {
    "registry.check": {
        "parity": [("sound evidence is green", _green), ("digests twice", _current), ("read whole", whole.read),
                   ("printed whole", whole.printed), ("asked of evidence", asked.items), ("statements of rows", stated.statements),
                   ("statements of the table", stated.of_the_table), ("less for a reason alone", asked.kept),
                   ("signed", signed.written), ("signatures judged", signed.judged), ("where a branch began", past.left_at),
                   ("lines of the past", past.lines)],
        "determinism": [("printed", _printed)],
        "faults": [("seeded mutants", _mutants), ("several devices", _devices),
                   ("edited metric or verdict", _edited), ("evidence of other code or class", _foreign),
                   ("loosened tolerance", _loosened), ("renewal awaited", _awaited), ("slow or unpinned", _speed),
                   ("skipped or renamed case", _skipped), ("contradictions", consistent.contradictions),
                   ("a nonce is drawn once", consistent.once), ("another class's environment", consistent.elsewhere),
                   ("damaged lists and reasons", asked.damaged), ("damaged signatures and keys", signed.refused),
                   ("no history", past.nothing), ("findings whole", spoiled.findings), ("lines whole", spoiled.lines),
                   ("records of GPUs", consistent.of_gpus)],
    },
}
