"""What the merge gate asks of a record beside its judge: each way of inventing one that contradicts itself, others or the past is named."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from alpha.errors import MachineError
from alpha.gates import expected, recompute
from alpha.registry import consistency, digest_cache
from alpha.registry.catches import load_catches
from alpha.registry.evidence import load_file, path_of, reference_classes, save, shipped_root
from alpha.registry.history import History
from alpha.registry.package import Package
from alpha.registry.record import Record
from alpha.train.catalogue import catalogue


@cache
def committed(family: str, component: str, gate: str) -> Record:
    return load_file(path_of(shipped_root(), reference_classes(shipped_root())[family], component))[gate]


def env(**changes: str) -> Callable[[Record], Record]:
    return lambda r: replace(r, environment={k: v for k, v in {**r.environment, **changes}.items() if v})


def case(**changes: Any) -> Callable[[Record], Record]:
    """The first case with other fields."""
    return lambda r: replace(r, cases=[{**r.cases[0], **changes}, *r.cases[1:]])


INVENTED: list[tuple[str, str, Callable[[Record], Record], str]] = [
    ("cpu", "parity", lambda r: replace(r, nonce="00ff"), "its nonce"),
    ("cpu", "parity", env(numpy="9.9.1"), "NumPy 9.9.1"),
    ("cpu", "faults", env(blas="openblas-SkylakeX 0.3.29"), "BLAS openblas-SkylakeX"),
    ("cpu", "faults", env(processor=""), "processor"),
    ("cpu", "faults", env(seconds="soon"), "seconds"),
    ("cpu", "gradient", env(driver="580.1"), "driver"),
    ("cpu", "perf", env(flops=""), "flops"),
    ("cpu", "perf", case(share=0.99), "a share of 0.99"),
    ("cpu", "perf", lambda r: case(share=0.98 * r.cases[0]["share"])(r), "a share of 0."),
    ("cpu", "perf", case(ceiling_ns=None), "no time of the ceiling"),
    ("cuda", "perf", case(share=0.99), "a share of 0.99"),
    ("cuda", "parity", env(driver=""), "driver"),
]
KERNELS = {"cpu": "gelu.f32.cpu", "cuda": "gelu.bf16.sm90"}


@pytest.mark.parametrize(("family", "gate", "change", "naming"), INVENTED, ids=[f"{x[0]}-{x[1]}-{x[3]}" for x in INVENTED])
def test_a_record_that_contradicts_itself_or_its_class(family: str, gate: str, change: Callable[[Record], Record], naming: str) -> None:
    record = committed(family, KERNELS[family], gate)
    assert not consistency.wrong_in(record, catalogue())
    found = consistency.wrong_in(change(record), catalogue())
    assert len(found) == 1 and naming in found[0], found


@pytest.mark.parametrize("family", ["cpu", "cuda"])
@pytest.mark.parametrize("gate", ["parity", "gradient", "determinism", "faults", "perf"])
def test_cases_are_those_of_the_nonce(family: str, gate: str) -> None:
    """Left out, renamed, put in, of another sort, fewer behind one entry, of another nonce: each is seen of every gate."""
    component, record = catalogue()[KERNELS[family]], committed(family, KERNELS[family], gate)
    assert not expected.differences(component, record)
    first, *rest = record.cases
    for cases in ([*rest], [{**first, "name": "easy"}, *rest], [first, *record.cases], [{**first, "kind": "other"}, *rest],
                  [{**first, "n": first.get("n", 1) + 1}, *rest]):
        assert expected.differences(component, replace(record, cases=cases)), cases[0]
    if gate == "determinism":  # it draws its samples
        assert any(expected.differences(component, replace(record, nonce=f"{i:032x}")) for i in range(8))


def told(record: Record) -> list[str]:
    if record.declared < 0:
        os._exit(3)
    return [f"{record.declared} in another process" if os.getpid() != HERE else f"{record.declared} here"]


def numbered(numbers: Iterable[int]) -> list[Record]:
    return [replace(committed("cpu", "tokenizer.bpe", "faults"), declared=i) for i in numbers]


HERE = os.getpid()


@pytest.mark.parametrize(("processors", "records", "where"), [(2, 100, "in another process"), (1, 100, "here"), (2, 3, "here")])
def test_records_are_computed_again_in_order(processors: int, records: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the caller where there are processors and records enough; a process that dies ends the check."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    monkeypatch.setattr(recompute, "recompute", told)
    with recompute.beside(Package()) as begin:
        first, second = begin(numbered(range(records))), begin(numbered(range(records, 2 * records)))
        assert [*first, *second] == [[f"{i} {where}"] for i in range(2 * records)]
    if where != "here":
        with pytest.raises(MachineError, match="a process that computes records again died"), recompute.beside(Package()) as begin:
            list(begin(numbered([*range(records), -1])))


def test_a_record_that_agrees_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """But one in SAMPLED. One that does not agree is computed at each check, and so is one that agreed with other digits or another
    recomputation."""
    met: list[int] = []

    def odd_agree(record: Record) -> list[str]:
        met.append(record.declared)
        return [] if record.declared % 2 else ["even"]

    def others(record: Record) -> list[str]:
        return odd_agree(record)

    def checked(numbers: Iterable[int]) -> list[int]:
        met.clear()
        with recompute.beside(Package()) as begin:
            given = numbered(numbers)
            assert [*begin(given)] == [[] if record.declared % 2 else ["even"] for record in given]
        return sorted(met)

    kept, drawn = dict[str, object](), [1]
    monkeypatch.setattr(digest_cache, "_confirmed", lambda: kept)
    monkeypatch.setattr(digest_cache, "_unsaved", lambda new: None)
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda self, n: drawn[0])
    monkeypatch.setattr(recompute, "recompute", odd_agree)
    assert checked(range(6)) == [0, 1, 2, 3, 4, 5] and len(kept) == 3
    assert checked(range(8)) == [0, 2, 4, 6, 7], "those that agree are not computed again"
    drawn[0] = 0
    assert checked(range(6)) == [0, 1, 2, 3, 4, 5], "one in SAMPLED is"
    drawn[0] = 1
    monkeypatch.setattr(recompute, "recompute", others)
    assert checked(range(6)) == [0, 1, 2, 3, 4, 5], "another recomputation knows nothing yet"


def test_cases_of_a_contract_are_those_of_its_module() -> None:
    component, record = catalogue()["tokenizer.bpe"], committed("cpu", "tokenizer.bpe", "faults")
    assert not recompute.recompute(record)
    for cases in (record.cases[1:], [{**c, "name": f"easy {i}"} for i, c in enumerate(record.cases)]):
        assert expected.differences(component, replace(record, cases=cases))


def test_every_committed_line_agrees() -> None:
    assert not [(line.about, why) for line, why in consistency.problems(shipped_root(), catalogue(), {})]
    catches = [c for key in reference_classes(shipped_root()).values() for c in load_catches(shipped_root(), key).values()]
    looked_at = sum(1 for _ in consistency.lines(shipped_root()))
    assert looked_at > 500 + sum(c.record is not None for c in catches) > 1000


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *words], check=True,
                   capture_output=True)


def test_a_nonce_is_drawn_once(tmp_path: Path) -> None:
    """Two records of one nonce, whatever their component, gate and class; a nonce that was ever committed with other digests."""
    root = tmp_path / "baselines" / "evidence"
    one = committed("cpu", KERNELS["cpu"], "faults")
    two = committed("cpu", KERNELS["cpu"], "gradient")
    save([one, two], root)
    assert not consistency.problems(root, catalogue(), {})
    save([replace(two, nonce=one.nonce)], root)
    ((_, why),) = consistency.problems(root, catalogue(), {})
    assert "its nonce is that of" in why
    save([two], root)
    assert History(tmp_path).why_not and not History(shipped_root().parents[1]).why_not
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    save([replace(one, nonce="5eed" * 8)], root)
    git(tmp_path, "commit", "-qam", "two")

    def kept() -> list[str]:
        history = History(tmp_path)
        assert not history.why_not
        return [why for _, why in consistency.problems(root, catalogue(), history.lines_by_nonce(root))]

    assert kept() == []
    save([replace(one, digests={**one.digests, "implementation": "0" * 64})], root)  # numbers of the first commit for today's code
    assert len(kept()) == 1 and "committed before" in kept()[0]
    save([one], root)  # the very line, as after a revert
    assert kept() == []


def test_evidence_of_a_cpu_ships_for_reference_classes_alone() -> None:
    """Where a class has any shipped evidence, `alpha train` does not measure what is missing first: a few records of a machine that was at
    hand would keep every newcomer with such a CPU from training."""
    shipped = {path.name for path in shipped_root().iterdir() if path.is_dir() and path.name.startswith("cpu_")}
    assert shipped == {name for name in reference_classes(shipped_root()).values() if name.startswith("cpu_")}
