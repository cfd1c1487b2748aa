"""What the list of all that is asked of evidence promises: it says what code and evidence say, by a dull account of both; less is never
asked without a reason that is kept; what is damaged is refused. Floor 7."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.errors import CorruptError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import BASE, GOOD, HERE, KERNEL, ONE, SINGLE, TOP, catalogue, folder, make, parity_case
from alpha.registry import asked, mutants, signatures, statements
from alpha.registry.catches import Catch, save_catches
from alpha.registry.evidence import save, write_reference
from alpha.registry.faults import Fault
from alpha.registry.gates import TABLE
from alpha.registry.syntax import meaning

FIVE = ("determinism", "faults", "gradient", "parity", "perf")
OWED: Mapping[str, tuple[str, ...]] = {BASE.id: ("parity",), TOP.id: ("determinism", "faults", "parity"), KERNEL.id: FIVE,
                                       SINGLE.id: FIVE}
"""What the made-up components owe."""
MEND = "restore it from version control, or run `alpha gate asked`"


def items(rng: np.random.Generator) -> Measured:
    """Today's items of drawn evidence, of drawn faults, signers and scores, with and without a reference class of GPUs."""
    checks = Checks()
    for with_gpu in (True, False, bool(rng.integers(2))):
        with folder() as at:
            root = at / "evidence"
            _evidence(checks, rng, root, with_gpu)
    with folder() as at:
        checks.that(sorted(asked.today(catalogue(), at / "none", [])) ==
                    sorted({"policy", *(f"row {name}" for name in statements.digests()),
                            *(f"runs {p} {b} {g.name}" for g in TABLE for p, b in g.repeats)}), "items of nothing")
    checks.that(asked.texts() == {name: (Path(asked.__file__).parent / f"{name}.py").read_text() for name in asked.POLICY},
                "the texts of the policy")
    checks.that("judge" in asked.texts() and asked.policy_digest(asked.texts()) == asked.today(catalogue(), Path("none"), [])["policy"],
                "the policy of today")
    return checks.measured()


def _evidence(checks: Checks, rng: np.random.Generator, root: Path, with_gpu: bool) -> None:
    n = [int(x) for x in rng.integers(2, 99, 4)]
    wanted = {f"reference {HERE.key}": "1", **({f"reference {ONE.key}": "1"} if with_gpu else {})}
    write_reference(root, HERE)
    if with_gpu:
        write_reference(root, ONE)
    signers = [HERE.key, ONE.key][: int(rng.integers(3))]
    signatures.signers_path(root).write_text("".join(f"{key} {name} ssh-ed25519 AAAA\n" for key in signers for name in ("a", "b")))
    wanted |= {f"signed {key}": "1" for key in signers}
    table = [replace(g, repeats={("kernel", "cpu"): n[0], ("host", ""): n[1]} if g.name == "parity" else {}) for g in TABLE]
    wanted |= {"runs kernel cpu parity": str(n[0]), "runs host  parity": str(n[1])}
    faults = [Fault(id=f"made.{i}", component=KERNEL.id, gate="parity", mirrors=0, why="made up", file="a.py", find="a", replace=f"{i}")
              for i in rng.permutation(9)[:3].tolist()]
    wanted |= {f"fault {fault.id}": "1" for fault in faults}
    for c in (BASE, TOP, KERNEL, SINGLE):
        wanted |= {f"owed {c.id} {gate}": "1" for gate in OWED[c.id]}
        machine = ONE if c is SINGLE else HERE
        for gate in [g for g in OWED[c.id] if rng.random() < 0.8]:
            many = [int(x) for x in rng.integers(1, 9, int(rng.integers(1, 4)))]
            cases = [{**GOOD[gate][0], "name": f"c{i}", **({"n": k} if k > 1 else {})} for i, k in enumerate(many)]
            save([make(gate, cases, component=c.id, machine=machine)], root)  # type: ignore[arg-type]
            if c is not SINGLE or with_gpu:
                wanted[f"cases {c.id} {gate}"] = "1" if c in (KERNEL, SINGLE) and gate == "determinism" else str(sum(many))
    for machine in (HERE, ONE):
        recorded = [bool(x) for x in rng.integers(2, size=5)]
        kept = make("parity", [parity_case()], component=KERNEL.id, machine=machine)  # type: ignore[arg-type]
        save_catches([Catch(fault=f"made.{i}", component=KERNEL.id, gate="parity", machine=machine.key, digests={},
                            error="" if yes else "died", record=kept if yes else None) for i, yes in enumerate(recorded)], root)
        if machine is HERE or with_gpu:
            wanted[f"recorded {machine.key}"] = str(sum(recorded))
    if rng.random() < 0.7 or not with_gpu:
        caught, counted = sorted(int(x) for x in rng.integers(1, 99, 2))
        mutants.save(mutants.Scores(seed="5eed", number=n[2], areas={"all": (caught, counted, 1)}, survivors=(), measure="00"), root)
        mutants.save(mutants.Scores(seed="5eed", number=n[2], areas={"all": (0, n[3], 1)}, survivors=(), measure="00"), root)
        wanted |= {"mutants caught": f"{round(caught / counted, 4):.4f}", "mutants counted": str(counted)}  # of the pinned one
    sources = {"b": f"B = {n[0]}\n", "a": "A = 1\n"}
    rows = {f"mean {aspect}": f"{rng.integers(1 << 40):x}" for aspect in ("takes", "within")}
    wanted |= {f"row {name}": digest for name, digest in rows.items()}
    told = "\0".join(f"{name} {meaning(sources[name])}" for name in ("a", "b"))
    wanted["policy"] = hashlib.sha256(told.encode()).hexdigest()[:32]
    with mock.patch.object(asked, "TABLE", table):
        found = asked.today(catalogue(BASE, TOP, KERNEL, SINGLE), root, faults, sources, rows)
    wrong = sorted({*found.items()} ^ {*wanted.items()})
    checks.that(not wrong, f"items: {wrong[:4]}")
    commented = {"a": "A = 1  # one\n", "b": f"\n\nB = {n[0]}\n"}
    checks.that(asked.policy_digest(commented) == wanted["policy"], "a comment asks for a reason")
    swapped = {"a": sources["b"], "b": sources["a"]}
    checks.that(asked.policy_digest(swapped) != wanted["policy"], "modules of the policy can be swapped")


def kept(rng: np.random.Generator) -> Measured:
    """What falls is told, and is written down with a reason alone; texts of the files and of what the merge gate says, whole."""
    checks = Checks()
    for n in range(12):
        before, now, fell = _fallen(rng) if n else ({"policy": "ab", "a": "1"}, {"policy": "ab", "a": "1", "new": "1"}, [])
        checks.that(asked.fallen(before, now) == fell, f"fallen: {asked.fallen(before, now)}, not {fell}")
        with folder() as at:
            root = at / "evidence"
            checks.that(asked.path(root) == at / "asked.txt" and asked.reasons_path(root) == at / "asked.toml", "files lie elsewhere")
            checks.that(asked.committed(root) == {} and asked.reasons(root) == {}, "a list of nothing")
            asked.write(root, before)
            text = "".join(f"{line}\n" for line in sorted(f"{name} {value}" for name, value in before.items()))
            checks.that(asked.path(root).read_text() == text and asked.committed(root) == before, f"written: {text}")
            refused = asked.renew(root, now, " \n")
            kept_as_was = asked.path(root).read_text() == (text if fell else asked.path(root).read_text())
            checks.that(refused == fell and kept_as_was and not asked.reasons_path(root).exists(), "renewed without a reason")
            checks.that(bool(fell) or asked.committed(root) == now, "a list that did not fall is not written")
            why = f' it is "gone", {rng.integers(99)} \\ é \U0001f600 \x7f\n'
            asked.write(root, before)
            checks.that(asked.renew(root, now, why) == fell and asked.committed(root) == now, "renewed with a reason")
            checks.that(asked.reasons(root) == dict.fromkeys(fell, why.strip()), f"reasons: {asked.reasons(root)}")
            entry = _entry(why.strip(), fell)
            checks.that((asked.reasons_path(root).read_text() if fell else "") == (entry if fell else ""), "the file of reasons")
            asked.write(root, {**now, "more": "2"})
            checks.that(asked.renew(root, {**now, "more": "1"}, "less of it") == ["more 1"], "one item more fell")
            added = f"{entry}\n{_entry('less of it', ['more 1'])}" if fell else _entry("less of it", ["more 1"])
            checks.that(asked.reasons_path(root).read_text() == added, "a second reason")
            wanted = {**dict.fromkeys(fell, why.strip()), "more 1": "less of it"}
            checks.that(asked.reasons(root) == wanted, f"two reasons: {asked.reasons(root)}")
            given = dict.fromkeys(fell[1:], "because")
            less = f"less is asked than the committed list says: {_shown(fell)}"
            silent = f"the list itself fell, and no reason is given: {_shown(fell[:1])}"
            base = asked.problems(before, before, before, {})
            checks.that(base == [], f"nothing fell: {base}")
            found = asked.problems(now, before, {}, {})
            checks.that(found == [less] * bool(fell), f"less than listed: {found}")
            found = asked.problems(now, now, before, given)
            checks.that(found == [silent] * bool(fell), f"the list fell: {found}")
            found = asked.problems(now, now, before, dict.fromkeys(fell, "because"))
            checks.that(found == [], f"all reasons given: {found}")
            found = asked.problems(now, {**before, "more": "1"}, {**now, "more": "2"}, {})
            both = [f"less is asked than the committed list says: {_shown(sorted([*fell, 'more 0']))}",
                    f"the list itself fell, and no reason is given: {_shown(asked.fallen({**now, 'more': '2'}, {**before, 'more': '1'}))}"]
            checks.that(found == both, f"less than listed, and the list fell: {found}")
            found = asked.problems(now, {}, before, {})
            checks.that(found == ["no list of what is asked of evidence is committed"], f"no list: {found}")
    return checks.measured()


def _fallen(rng: np.random.Generator) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """A list, another one, and what of the first has less in the second."""
    before, now, fell = {"policy": "ab"}, {"policy": ("ab", "0c")[int(rng.integers(2))]}, list[str]()
    if now["policy"] != "ab":
        fell.append("policy 0c")
    before |= {"row sum takes": "1e2", "row sum within": "07", "row old counts": "9"}
    now |= {"row sum takes": ("1e2", "1e3", "100")[int(rng.integers(3))], "row sum within": "07", "row new takes": "f"}
    fell += [f"row sum takes {now['row sum takes']}"] * (now["row sum takes"] != "1e2")  # a digest, though it looks like a number
    fell.append("row old counts 0")
    for i in range(int(rng.integers(1, 14))):
        name, was = f"item {'xyz'[i % 3]} {i}", float(rng.integers(0, 50)) / 4
        kind = int(rng.integers(5))
        before[name] = f"{was:g}"
        if kind == 0 and was > 0:
            fell.append(f"{name} 0")  # it is gone
        elif kind in (0, 1):
            now[name] = f"{was:g}"
        elif kind == 2:
            now[name] = f"{was + 0.25:g}"
        elif was >= 0.25:
            now[name] = f"{was - 0.25:g}"
            fell.append(f"{name} {was - 0.25:g}")
        else:
            now[name] = f"{was:g}"
    now["new"] = "1"
    return before, now, sorted(fell)


def _entry(why: str, fell: list[str]) -> str:
    quoted = json.dumps(why, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "\n".join(["[[renewed]]", f"why = {quoted}", "items = [", *(f'    "{item}",' for item in fell), "]", ""])


def _shown(items: list[str]) -> str:
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")


def damaged(rng: np.random.Generator) -> Measured:
    """A list or reasons that cannot be read are refused, and what to do is said; a value that is no number is less than any."""
    checks = Checks()
    for text in ("a\n", "b 1\na 1\n", "a x\n", "rows a1\n", "a nan\n", "a 1\na 2\n", "a -1\n", "a 1\n\n", "a 1\nb\n", "policy\n"):
        told = ("the list of what is asked cannot be read", f"{len(text.splitlines())} lines", "sorted lines, name and number", MEND)
        checks.tells(CorruptError, told, lambda text=text: asked.read(text))  # type: ignore[misc]
    number = f"{rng.integers(1, 99)}"
    checks.that(asked.read(f"a b c {number}\npolicy x\n") == {"a b c": number, "policy": "x"}, "a name of several words")
    checks.that(asked.read("row sum takes a1\n") == {"row sum takes": "a1"}, "a digest of a row")
    checks.that(asked.read("a 0\n") == {"a": "0"} and asked.read("") == {}, "as little as nothing")
    checks.that(asked.fallen({"a": "0"}, {"a": "many"}) == ["a many"], "a value that is no number")
    checks.that(asked.fallen({"a": "0", "b": "nan"}, {"a": "nan"}) == ["a nan", "b 0"], "a value that is not a number")
    with folder() as at:
        root = at / "evidence"
        asked.path(root).write_bytes(b"\xe9 1\n")
        checks.that(list(asked.committed(root)) == ["\ufffd"], "bytes that are no text")
        for text, error in (("[[renewed]]\nitems = [1]\n", "'why'"), ("[[renewed]]\nwhy = 'a'\n", "'items'"), ("renewed = 3\n", "'int'"),
                            ("[[renewed]]\nwhy = 'a'\nitems = 3\n", "'int'"), ("[[renewed]\n", "line 1")):
            asked.reasons_path(root).write_text(text)
            try:
                asked.reasons(root)
                checks.that(False, f"reasons {text!r} are read")
            except CorruptError as told:
                whole = (told.what, told.expected, told.do)
                checks.that(whole == ("the reasons for what is no longer asked cannot be read", "[[renewed]] tables of items and why",
                                      "restore it from version control"), f"{text!r}: {whole}")
                checks.that(str(told.came).startswith("asked.toml: ") and error in str(told.came), f"{text!r}: {told.came}")
        asked.reasons_path(root).write_text("[[renewed]]\nwhy = ' '\nitems = ['a 1']\n[[renewed]]\nwhy = ' b '\nitems = ['c 2', 3]\n")
        checks.that(asked.reasons(root) == {"c 2": "b", "3": "b"}, f"an empty reason is none: {asked.reasons(root)}")
        asked.reasons_path(root).write_text("other = 1\n")
        checks.that(asked.reasons(root) == {}, "no reasons")
    return checks.measured()
