"""What is asked of evidence does not become less without a reason: each way of asking less is named by the merge gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from planted import planted

from alpha.component import Catalogue
from alpha.errors import CorruptError
from alpha.gates import merge
from alpha.gates.contracts.registry.committed import CATALOGUE, FAULT, Committed, agree
from alpha.gates.contracts.registry.common import make
from alpha.ops.table import row
from alpha.registry import asked, judge, policy
from alpha.registry.evidence import load_file, path_of, reference_classes, shipped_root
from alpha.registry.gates import TABLE
from alpha.registry.judge import AMBIGUOUS, Judgement
from alpha.registry.statements import Statement
from alpha.train.catalogue import catalogue
from alpha.types import Attrs, TensorType

Items = dict[str, str]


@cache
def sources() -> Items:
    return asked.texts()


@cache
def items() -> Items:
    return asked.today(catalogue(), shipped_root(), planted(), sources())


def edited(module: str, old: str, new: str) -> str:
    """The policy's digest after an edit of one module."""
    assert old in sources()[module], old
    return asked.policy_digest({**sources(), module: sources()[module].replace(old, new, 1)})


WEAKENED = {
    "fewer kinds are numeric": ("policy", '("host", "count")', '("host", "count", "kernel")'),
    "a gate is not owed": ("gates", 'owed_by=("kernel",', 'owed_by=("none",'),
    "fewer runs": ("gates", '("kernel", "cpu"): 100', '("kernel", "cpu"): 10'),
    "a class is told by its capability alone": ("gpu", 'return f"cuda_{self.capability}_{self.model}"',
                                                'return f"cuda_{self.capability}_any"'),
    "a processor is told by its vendor alone": ("machine", '("vendor_id", "cpu family", "model")', '("vendor_id",)'),
    "a looser tolerance": ("judge", "RATIO = 2.0", "RATIO = 4.0"),
    "a wider line": ("pins", "WIDEST = 0.15", "WIDEST = 0.5"),
    "claims without a comparison": ("claims", 'if judgement.verdict != PASS:', 'if judgement.verdict == "FAIL":'),
}


@pytest.mark.parametrize("what", WEAKENED)
def test_an_edit_of_the_policy_asks_for_a_reason(what: str) -> None:
    now = {**items(), asked.POLICY_DIGEST: edited(*WEAKENED[what])}
    (told,) = asked.problems(now, items(), items(), {})
    assert "policy" in told
    (told,) = asked.problems(now, now, items(), {})  # the list was written anew by hand
    assert "no reason" in told
    assert not asked.problems(now, now, items(), {f"policy {now[asked.POLICY_DIGEST]}": "because"})


def test_comments_of_the_policy_ask_for_none() -> None:
    assert edited("judge", "RATIO = 2.0", "RATIO = 2.0  # twice") == items()[asked.POLICY_DIGEST]


def without(prefix: str) -> Callable[[Items], Items]:
    """The first item of this name gone."""
    def take(now: Items) -> Items:
        gone = next(name for name in now if name.startswith(prefix))
        return {name: value for name, value in now.items() if name != gone}
    return take


FALLEN: dict[str, Callable[[Items], Items]] = {
    "a reference class": without("reference cuda_"), "a planted fault": without("fault adamw"), "a gate": without("owed gelu.f32.cpu perf"),
    "a component's cases": without("cases gelu.f32.cpu parity"),
    "one case": lambda now: {**now, "cases gelu.f32.cpu parity": str(int(now["cases gelu.f32.cpu parity"]) - 1)},
    "runs": lambda now: {**now, "runs kernel cuda determinism": "299"},
    "catches with a record": lambda now: {**now, next(n for n in now if n.startswith("recorded cpu")): "0"},
    "the score of mutants": lambda now: {**now, "mutants caught": "0.5"},
    "mutants that count": lambda now: {**now, "mutants counted": "3"},
}


@pytest.mark.parametrize("what", FALLEN)
def test_less_is_red_until_a_reason_is_committed(what: str, tmp_path: Path) -> None:
    root, now = tmp_path / "evidence", FALLEN[what](items())
    asked.write(root, items())
    assert asked.problems(items(), asked.committed(root), items(), {}) == []
    assert len(asked.problems(now, asked.committed(root), {}, {})) == 1, "without a history the list itself is the measure"
    (fell,) = asked.renew(root, now, " ")
    assert asked.committed(root) == items() and not asked.reasons_path(root).exists(), "nothing is written without a reason"
    assert asked.renew(root, now, 'it is "gone"') == [fell]
    assert asked.reasons(root) == {fell: 'it is "gone"'} and asked.committed(root) == now
    assert asked.problems(now, asked.committed(root), items(), asked.reasons(root)) == []
    assert len(asked.problems(now, asked.committed(root), items(), {})) == 1, "the reason was taken away"
    assert asked.renew(root, items(), "") == [] and len(asked.reasons(root)) == 1


def test_a_row_that_says_something_else_asks_for_a_reason() -> None:
    """Each aspect of a row; a row that goes; not a new one."""
    rows = [name for name in items() if name.startswith("row mean ")]
    assert sorted(rows) == [f"row mean {aspect}" for aspect in ("counts", "gives", "gradient", "parts", "takes", "within")]
    for name in rows:
        for value in ("0" * 16, "f" * 16):
            now = {**items(), name: value}
            assert asked.problems(now, items(), items(), {}) == [f"less is asked than the committed list says: {name} {value}"]
            assert len(asked.problems(now, now, items(), {})) == 1
            assert asked.problems(now, now, items(), {f"{name} {value}": "because"}) == []
    gone = {name: value for name, value in items().items() if name not in rows}
    assert len(asked.fallen(items(), gone)) == 6
    assert asked.problems(items(), gone, gone, {}) == []


def test_a_row_that_allows_more_is_told_by_the_aspect() -> None:
    """Bugs that no gate of a kernel can see, for they call it on what its row takes."""
    mean, dropout = row("mean"), row("dropout")
    bound = mean.bound
    assert bound is not None

    def silent(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
        return dropout.infer(types, {**attrs, "seed": min(int(str(attrs["seed"])), 2**32 - 1)})

    broken = {"mean counts": replace(mean, flops=lambda t, a: mean.flops(t, a) + 1),
              "mean within": replace(mean, bound=lambda x, a: [2 * np.asarray(b) for b in bound(x, a)]),
              "dropout takes": replace(dropout, infer=silent)}
    for name, spec in broken.items():
        now, was = Statement(spec).texts, Statement(row(spec.name)).texts
        assert [f"{spec.name} {aspect}" for aspect in now if now[aspect] != was[aspect]] == [name]


def test_items_follow_the_code_and_the_evidence() -> None:
    """Not a list that repeats itself: a fault, a component, a gate, runs and a record that go are missed."""
    key = reference_classes(shipped_root())["cpu"]
    record = load_file(path_of(shipped_root(), key, "silu.f32.cpu"))["parity"]
    smaller = Catalogue()
    for c in catalogue():
        if c.id != "gelu.f32.cpu":
            smaller.add(c)
    fewer = [replace(g, repeats={}) if g.repeats else g for g in TABLE]
    with mock.patch.object(asked, "TABLE", fewer), mock.patch.object(policy, "EXEMPT", {**policy.EXEMPT, ("silu", "gradient"): "no"}), \
            mock.patch.object(asked, "load_file", lambda path: {"parity": replace(record, cases=record.cases[1:])}
                              if path.name == "silu.f32.cpu.jsonl" else load_file(path)):
        now = asked.today(smaller, shipped_root(), planted()[1:], sources())
    fell = " ".join(asked.fallen(items(), now))
    for name in (f"fault {planted()[0].id}", "owed gelu.f32.cpu parity", "owed silu.f32.cpu gradient", "runs kernel cpu determinism",
                 "cases silu.f32.cpu parity", "cases silu.f32.cpu faults"):
        assert f"{name} " in fell, name


@pytest.mark.parametrize("text", ["a\n", "b 1\na 1\n", "a x\n", "a nan\n", "a 1\na 2\n", "a -1\n"])
def test_a_damaged_list_is_refused(text: str) -> None:
    with pytest.raises(CorruptError):
        asked.read(text)


@pytest.mark.parametrize("text", ["[[renewed]]\nitems = [1]\n", "renewed = 3\n", "[[renewed]\n"])
def test_damaged_reasons_are_refused(text: str, tmp_path: Path) -> None:
    asked.reasons_path(tmp_path / "evidence").write_text(text)
    with pytest.raises(CorruptError):
        asked.reasons(tmp_path / "evidence")


@pytest.mark.parametrize(("name", "what"), [("asked.txt", "the list of what is asked cannot be read; came 1 lines"),
                                            ("asked.toml", "the reasons for what is no longer asked cannot be read; came asked.toml: ")],
                         ids=("list", "reasons"))
def test_a_list_or_reasons_that_cannot_be_read_are_red_beside_all_else(name: str, what: str, tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file hides no record that contradicts itself, as those of this evidence do."""
    monkeypatch.setattr(merge, "beside", lambda package: nullcontext(agree))
    root = Committed(tmp_path).root
    asked.write(root, asked.today(CATALOGUE, root, (FAULT,)))
    sound = merge.judged(CATALOGUE, root, (FAULT,), {}, {}).findings
    assert sound and not [f for f in sound if f.about == "asked"]
    (root.parent / name).write_text("x\n")
    found = merge.judged(CATALOGUE, root, (FAULT,), {}, {}).findings
    (told,) = [f for f in found if f.about == "asked"]
    assert told.level == merge.ERROR and told.path == "baselines/asked.txt" and told.what.startswith(what) and told.do
    assert {*found} == {*sound, told}


def test_ambiguous_satisfies_no_owed_gate() -> None:
    assert not Judgement(AMBIGUOUS).satisfied
    slowdown = {"name": "a", "kind": "relative", "low": -0.01, "estimate": 0.01, "high": 0.05, "reproduced": False}
    share = {"name": "b", "share": 0.5, "times_ns": [1000]}
    assert judge.judge(make("perf", [slowdown])).relative == AMBIGUOUS and not judge.judge(make("perf", [slowdown])).satisfied
    with mock.patch.object(judge, "_share", lambda case, line, away: (AMBIGUOUS, "cannot be told")):
        found = judge.judge(make("perf", [share]))
    assert found.verdict == AMBIGUOUS and not found.satisfied
