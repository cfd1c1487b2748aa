"""Mutants by operators: what they are of a small file, draws that repeat, and reasons that belong to a mutant."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import swept_mutants as swept

SOURCE = '''
def f(a, b=2, *, c=True):
    """A text."""
    if a < 3 and b:
        raise ValueError(f"{a + 1}")
    for x in sorted(a):
        if x in b:
            break
        a.append(x)
        c += 1
    return min(a - 1, b) if c else g(a, b, strict=True, key=2)[1:]
'''


def test_each_operator_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.py").write_text(SOURCE)
    monkeypatch.setattr(swept, "ROOT", tmp_path)
    found = swept.changes("made.py")
    pairs = {(m.kind, m.was, m.now) for m in found}
    assert {("default constant", "2", "3"), ("default truth", "True", "False"), ("bound", "a < 3", "(a <= 3)"),
            ("negated", "a < 3", "(a >= 3)"),
            ("connective", "a < 3 and b", "(a < 3 or b)"), ("operand", "a < 3 and b", "(b)"), ("order", "sorted", "list"),
            ("negated", "x in b", "(x not in b)"), ("break", "break", "continue"), ("dropped call", "a.append(x)", "pass"),
            ("dropped sum", "c += 1", "pass"), ("sign", "a - 1", "(a + 1)"), ("extreme", "min", "max"), ("slice", "1", "1 + 1"),
            ("keyword", "g(a, b, strict=True, key=2)", "g(a, b, strict=True)"),
            ("swapped", "g(a, b, strict=True, key=2)", "g(b, a, strict=True, key=2)")} <= pairs
    assert not any("strict" not in m.now and "strict" in m.was and m.kind == "keyword" for m in found), "a guard is left out"
    assert not any(m.was in ("a + 1", "1") and m.lines[0] == 5 for m in found), "what an error says is left as it is"
    for m in found:
        text = m.of(SOURCE)
        ast.parse(text)
        assert text.count("\n") == SOURCE.count("\n") or "\n" in m.was, "lines stay where they are"
        assert SOURCE.splitlines()[SOURCE.count("\n", 0, m.at)].strip() == m.line


def test_a_draw_repeats() -> None:
    first, again, other = (swept.drawn("data parallel", 8, seed) for seed in (3, 3, 4))
    assert first == again != other and len({m.key for m in first}) == 8
    assert swept.drawn("data parallel", 4, 3) == first[:4]
    known = set(swept.excuses())
    assert not known & {(m.file, m.line, m.was, m.now) for m in swept.drawn("data parallel", 10_000, 0)}


def test_each_reason_is_of_a_mutant() -> None:
    known = swept.excuses()
    files = {file for file, *_ in known}
    there = {(m.file, m.line, m.was, m.now) for file in files for m in swept.changes(file)}
    assert set(known) <= there, "reasons of nothing"
    assert all(why.strip() for why in known.values()) and files <= {f"{n}.py" for names in swept.CLASSES.values() for n in names.split()}


def test_lines_of_other_code_or_cases_are_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    file, name = "graph/verify.py", "verify.pass parity"
    monkeypatch.setattr(swept, "asked", lambda file: (tuple(name.split()),))
    kept: dict[str, dict[str, list[Any]]] = {"lines": {}}
    swept.count_lines([file], kept)
    seconds, ran, _, rests = kept["lines"][name]
    assert seconds > 0 and ran[file]
    for ours, counted in ((rests, False), ("of other code", True)):
        kept["lines"][name] = [0.0, ran, {}, ours]
        swept.count_lines([file], kept)
        assert (kept["lines"][name][0] > 0) == counted and kept["lines"][name][3] == rests
    monkeypatch.setattr(swept, "component_digests", lambda component, gate: {"cases": "others"})
    assert swept.rests_on(name.split(), ran) != rests


@pytest.mark.parametrize(("error", "fate"), [
    ("Timeout: case quick did not end within 60 s", True), ("Timeout: case slow did not end within 60 s", False),
    ("Timeout: case other did not end within 60 s", False), ("Timeout: the gate did not end within 300 s", False)])
def test_what_is_late_hangs_where_its_case_was_quick(error: str, fate: bool) -> None:
    kept = {"lines": {"a parity": [9.0, {}, {"quick": [20.0, {}], "slow": [20.1, {}]}, ""]}}
    job = swept.plant.Job("m", (("b", "parity"), ("a", "parity")), "f.py", "", 60.0)
    assert swept.hangs(swept.plant.Outcome(job, error=error), kept) is fate
