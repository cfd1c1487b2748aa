"""What the merge gate says of spoiled files, whole: every finding, and no other; what lines of evidence, of catches and of scores are
refused for, and in which words. Floor 7."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alpha.component import Catalogue, Measured
from alpha.errors import CorruptError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.committed import CATALOGUE, FAULT, Committed, agree
from alpha.gates.contracts.registry.common import BASE, HERE, KERNEL, OTHER, TOP, catalogue, folder, make
from alpha.gates.contracts.registry.signed import SIGN, with_keys
from alpha.registry import mutants
from alpha.registry.catches import MAX_BYTES, Catch, load_catches, path_of, save_catches
from alpha.registry.check import ERROR, Finding, check
from alpha.registry.pins import key_of_record
from alpha.registry.record import canonical, content_hash, parse

EVIDENCE = "baselines/evidence"
SHAPE = "restore the file from version control or rerun the gate"
CATCHES = "restore the file from version control, or delete it and run `alpha gate catches`"
PINS = "restore the file from version control, or pin again with `alpha gate pin`"
SCORES = "restore the file from version control"
KILL = "run `alpha gate catches mutants --ship`; kill each survivor or explain it in gates/adversarial/equivalents.toml"

Found = Callable[[Committed], list[Finding]]


def _error(path: str, line: int, about: str, what: str, do: str = "") -> Finding:
    return Finding(ERROR, path, line, about, what, do)


def _text(path: Callable[[Committed], Any], text: str) -> Callable[[Committed], object]:
    return lambda c: path(c).write_text(text)


def _fast(c: Committed) -> None:
    """A record of older code whose share its pin does not explain."""
    perf = c.record("perf")
    c.write(replace(perf, digests={**perf.digests, "implementation": "older"}, cases=[{**perf.cases[0], "share": 0.9}]))


def findings(rng: np.random.Generator) -> Measured:
    """Each spoiled file gives its findings with path, line, what is wrong and what to do, and nothing else is said."""
    checks = Checks()
    here = f"{EVIDENCE}/{HERE.key}"
    files = ("_catches", BASE.id, KERNEL.id, TOP.id)
    two = f"{HERE.key}\n{OTHER.key}\n"
    pins = f"baselines/perf/{key_of_record(make('perf'))}.json"
    none = "no evidence of the reference class "
    first = "run `alpha gate run` on a machine of that class and commit what it writes"
    other = replace(FAULT, id="made.other", component="made.gone")
    fewer, nobody = catalogue(BASE, TOP), catalogue(replace(BASE, profile="nobody's"), TOP, KERNEL)
    table: Sequence[tuple[str, Callable[[Committed], object], Catalogue, Found]] = (
        ("nothing", lambda c: None, CATALOGUE, lambda c: []),
        ("a file of signers", _text(lambda c: c.root.parent / "signers.txt", "x\n"), CATALOGUE,
         lambda c: [_error("baselines/signers.txt", 0, "signatures", "the file of signers cannot be read; came signers.txt:1: x",
                           "mend the line")]),
        ("lines that nobody signed", _text(lambda c: c.root.parent / "signers.txt", f"{HERE.key} lab ssh-ed25519 AAAA\n"), CATALOGUE,
         lambda c: [_error(f"{here}/{name}.jsonl", i, "signatures", "it is not signed, and its class asks for signatures", SIGN)
                    for name in files for i, _ in enumerate((c.root / HERE.key / f"{name}.jsonl").read_text().splitlines(), 1)]),
        ("a file of evidence", lambda c: c.path(BASE.id).write_text("x\n"), CATALOGUE,
         lambda c: [_error(f"{here}/{BASE.id}.jsonl", 0, BASE.id, "an evidence line cannot be read; came "
                           f"{HERE.key}/{BASE.id}.jsonl:1: Expecting value: line 1 column 1 (char 0)", SHAPE)]),
        ("a file of catches", lambda c: path_of(c.root, HERE.key).write_text("x"), CATALOGUE,
         lambda c: [_error(f"{here}/_catches.jsonl", 0, "catches", "the file of catches is torn: its last line has no end; came "
                           "_catches.jsonl", CATCHES)]),
        ("a file of pins", lambda c: (c.root.parents[1] / pins).write_text("x"), CATALOGUE,
         lambda c: [_error(pins, 0, "pins", f"pinned shares cannot be read; came {pins.rpartition('/')[2]}: JSONDecodeError Expecting "
                           "value: line 1 column 1 (char 0)", PINS)]),
        ("scores of mutants", lambda c: mutants.path_of(c.root).write_text("x"), CATALOGUE,
         lambda c: [_error("baselines/mutants.json", 0, "seeded mutants", "the scores of seeded mutants were edited by hand or cannot be "
                           "read; came mutants.json: Expecting value: line 1 column 1 (char 0)", KILL)]),
        ("two reference classes", lambda c: (c.root / "REFERENCE").write_text(two), CATALOGUE,
         lambda c: [_error(EVIDENCE, 0, "evidence", f"a sort of classes has two reference classes; came {HERE.key}, {OTHER.key}")]),
        ("no reference class", lambda c: (c.root / "REFERENCE").unlink(), CATALOGUE,
         lambda c: [_error(f"{EVIDENCE}/REFERENCE", 0, "evidence", none + "(none is named)", first)]),
        ("another reference class", lambda c: (c.root / "REFERENCE").write_text(f"{OTHER.key}\n"), CATALOGUE,
         lambda c: [_error(f"{EVIDENCE}/REFERENCE", 0, "evidence", none + f"({OTHER.key})", first)]),
        ("a folder of no class", lambda c: (c.root / "laptop").mkdir(), CATALOGUE,
         lambda c: [_error(EVIDENCE, 0, "evidence", "not the key of a machine class; came laptop",
                           "`alpha doctor` prints the key of this machine")]),
        ("a profile of nobody's", lambda c: None, nobody,
         lambda c: [_error(f"{here}/{BASE.id}.jsonl", 0, BASE.id, 'it owes no gate: no gate names its profile "nobody\'s"',
                           "name a profile of alpha/registry/gates.py"),
                    _error(f"{here}/{BASE.id}.jsonl", 1, f"{BASE.id} parity", "evidence of a gate that the component does not owe",
                           "remove the line")]),
        ("a stale record that is too fast", _fast, CATALOGUE,
         lambda c: [_error(f"{here}/{KERNEL.id}.jsonl", 5, f"{KERNEL.id} perf", "stale: implementation changed since",
                           f"run `alpha gate run {KERNEL.id} --gate perf` and commit the line"),
                    _error(f"{here}/{KERNEL.id}.jsonl", 5, f"{KERNEL.id} perf", "faster than its pin explains, so a slowdown would pass: "
                           "a: 0.9 of the ceiling, pinned 0.6", f"run `alpha gate pin {KERNEL.id}` and commit the file")]),
        ("a component that is gone", lambda c: None, fewer,
         lambda c: [_error(f"{here}/{KERNEL.id}.jsonl", 0, KERNEL.id, "evidence of a component that does not exist",
                           "remove the file, or restore the component"),
                    _error(f"{here}/_catches.jsonl", 1, "made.fault", "catch of a fault that does not exist",
                           "remove the line, or restore the fault"),
                    _error(pins, 0, KERNEL.id, "a pin of a component that does not exist", "run `alpha gate pin` on such a machine")]),
    )
    for what, spoil, known, wanted in table:
        for faults in ((FAULT,), (FAULT, other)):
            with with_keys(), folder() as at:
                c = Committed(at)
                spoil(c)
                found = check(known, c.root, agree, faults=faults, package=c.package)
                more = [_error(f"{here}/_catches.jsonl", 0, "made.other", "no gate is recorded to have rejected this planted fault",
                               "run `alpha gate catches` and commit the line of made.other")] if len(faults) == 2 else []
                unread = what in ("a file of catches", "two reference classes", "no reference class", "another reference class",
                                  "a folder of no class")
                complete = sorted((wanted(c) + more * (not unread)), key=repr)
                checks.that(sorted(found.findings, key=repr) == complete, f"{what}: {[f for f in found.findings if f not in complete][:2]}")
                counts = (found.records > 0, found.probes > 0, found.catches > 0)
                begun = what not in ("two reference classes", "a folder of no class")
                wanted_counts = (begun, begun and known is not fewer, begun and what != "a file of catches")
                checks.that(counts == wanted_counts, f"{what}: counts {found.records} {found.probes} {found.catches}")
    with folder() as at:
        c = Committed(at)
        (c.root / "REFERENCE").write_text(f"{OTHER.key}\n")
        checks.that(check(CATALOGUE, c.root, agree, faults=(FAULT,), package=c.package, reference=HERE.key).ok, "a reference that is given")
    return checks.measured()


WRONG: Mapping[str, tuple[Any, str]] = {
    **{name: (3, f"{name} is no text") for name in ("component", "gate", "machine", "nonce")},
    **{name: ([], f"{name} is no table of texts") for name in ("digests", "environment")},
    "declared": (1.0, "declared or format is no integer"), "format": (True, "declared or format is no integer"),
    "cases": ({}, "cases is no list of tables"), "probes": ("", "probes is no list of lists"),
}
"""Field -> a value that is none of its type, and what is said."""
INSIDE: Mapping[str, Any] = {"digests": {"a": 1}, "environment": {"a": None}, "cases": [[]], "probes": [{}]}
"""Field -> a value of its type that holds what it may not."""


def lines(rng: np.random.Generator) -> Measured:
    """A field of a record that is of another type, or missing, is told; a line of catches is refused for each thing alone; a number of
    NumPy's is written as Python's."""
    checks = Checks()
    body = json.loads(make("parity", component=KERNEL.id).line())
    for what, (value, why) in WRONG.items():
        for wrong in (value, None, *([INSIDE[what]] if what in INSIDE else [])):
            line = _written({**body, what: wrong})
            told = ("an evidence line cannot be read", f"here:7: {why}", "one canonical JSON record per line", SHAPE)
            checks.tells(CorruptError, told, lambda line=line: parse(line, "here:7"))  # type: ignore[misc]
    for drop in ("content", "nonce"):
        checks.raises(CorruptError, f"no {drop}", lambda drop=drop: parse(  # type: ignore[misc]
            canonical({k: v for k, v in body.items() if k != drop}), "here:7"), naming=drop)
    n = int(rng.integers(2, 99))
    checks.that(canonical({"b": np.int64(n), "a": np.float32(0.5), "c": (np.nan, -np.inf, np.inf)}) ==
                f'{{"a":0.5,"b":{n},"c":["nan","-inf","inf"]}}', "numbers of NumPy's")
    _catches(checks, rng)
    _scores(checks, rng)
    return checks.measured()


def _written(body: Mapping[str, Any]) -> str:
    return canonical({**body, "content": content_hash(body)})


def _catches(checks: Checks, rng: np.random.Generator) -> None:
    record = make("parity", component=KERNEL.id)
    catch = Catch(fault="made.b", component=KERNEL.id, gate="parity", machine=HERE.key, digests={"fault": f"{rng.integers(99)}"},
                  record=record)
    line = catch.line()
    body = json.loads(line)
    where, edited = f"{HERE.key}/_catches.jsonl", "a catch was edited by hand or is of another format"
    long = replace(catch, error="x" * MAX_BYTES).line()
    inner = body["record"]
    table: Sequence[tuple[str, str, str]] = (
        (replace(catch, fault="made.a").line(), "catches are not one per fault in sorted order", where),
        (line, "catches are not one per fault in sorted order", where),
        (long, "a line of catches is too long", f"{where}:2: {len(long)} bytes, at most {MAX_BYTES}"),
        ("x", "a line of catches cannot be read", f"{where}:2: Expecting value: line 1 column 1 (char 0)"),
        (_written({**body, "digests": {"fault": 3}}), "a line of catches cannot be read", f"{where}:2: a text is none"),
        (_written({**body, "error": None}), "a line of catches cannot be read", f"{where}:2: a text is none"),
        (_written({**body, "record": {**inner, "nonce": 3}}), "a line of catches cannot be read", f"{where}:2: nonce is no text"),
        (_written({**body, "format": 2}), edited, f"{where}:2"), (line.replace("made.b", "made.c"), edited, f"{where}:2"),
        (line.replace(",", ", ", 1), edited, f"{where}:2"),
        (_written({**body, "machine": OTHER.key}), "a catch of another machine class", f"{where}:2"),
        (_written({**body, "record": {**inner, "machine": OTHER.key}}), "a catch of another machine class", f"{where}:2"),
        (_written({**body, "component": BASE.id}), "a catch whose record is about another component or gate", f"{where}:2"),
        (_written({**body, "gate": "faults"}), "a catch whose record is about another component or gate", f"{where}:2"),
    )
    with folder() as root:
        path = path_of(root, HERE.key)
        checks.that(load_catches(root, HERE.key) == {}, "no file is not no catches")
        for second, what, came in table:
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{line}\n{second}\n")
            checks.tells(CorruptError, (what, came, "what `alpha gate catches` wrote", CATCHES), lambda: load_catches(root, HERE.key))
            save_catches([replace(catch, fault="made.c")], root)  # a file that cannot be read is replaced
            checks.that([*load_catches(root, HERE.key)] == ["made.c"], f"what cannot be read is kept: {what}")
        path.write_bytes(b"\xe9\n")
        checks.raises(CorruptError, "no text", lambda: load_catches(root, HERE.key), naming=f"{where}: 'ascii' codec")
        path.write_text((longest := replace(catch, error="x" * (MAX_BYTES - len(line)))).line() + "\n")
        checks.that(load_catches(root, HERE.key) == {"made.b": longest} and len(longest.line()) == MAX_BYTES, "the longest line")


def _scores(checks: Checks, rng: np.random.Generator) -> None:
    caught, counted = sorted(int(x) for x in rng.integers(1, 99, 2))
    sound = mutants.Scores(seed="5eed", number=9, areas={"all": (caught, counted, 2), "a": (0, 0, 0)}, survivors=("s", "t"), measure="00")
    none = replace(sound, areas={})
    checks.that(replace(sound, areas={"all": (1, 1, 0)}).share == 1.0, "one of one")
    checks.that(sound.share == caught / counted and none.share != none.share, "what was caught of what counts")
    with folder() as at:
        root = at / "evidence"
        checks.that(mutants.save(sound, root) == (sound, sound), "the first score is pinned")
        body = json.loads(mutants.path_of(root).read_text())
        what = "the scores of seeded mutants were edited by hand or cannot be read"
        for changed, came in (({"latest": {**body["latest"], "areas": {"all": [counted + 1, counted, 0]}}}, ""),
                              ({"pinned": {**body["pinned"], "areas": {"all": [1, 1, 0], "a": [-1, 1, 0]}}}, ""), ({"format": 2}, ""),
                              ({"pinned": {}}, ": Scores.__init__() missing 5 required keyword-only arguments: 'seed', 'number', "
                                               "'areas', 'survivors', and 'measure'"),
                              ({"latest": {**body["latest"], "areas": {"all": [1]}}}, ": not enough values to unpack (expected 3, got 1)")):
            changed = {k: v for k, v in {**body, **changed}.items() if k != "content"}
            mutants.path_of(root).write_text(_written(changed))
            told = (what, f"mutants.json{came}", "what `alpha gate catches --ship` wrote", SCORES)
            checks.tells(CorruptError, told, lambda: mutants.load(root))
        mutants.path_of(root).unlink()
        checks.that(mutants.load(root) is None, "no file is not no score")
