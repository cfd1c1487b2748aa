"""Catches on the GPU that are older than the code (policy.UNRENEWED): told as NOT_RUN, for nothing else, and no longer than they are."""

import pytest
from test_cuda_host import FAULTS

from alpha.registry import check, policy
from alpha.registry.check import ERROR, WARNING
from alpha.registry.evidence import reference_classes, shipped_root
from alpha.registry.faults import load_faults
from alpha.registry.package import Package
from alpha.train.catalogue import catalogue


def _found(monkeypatch: pytest.MonkeyPatch, changed: list[str]) -> dict[str, set[tuple[str, str]]]:
    """Level -> (fault, what is said of it), where this is what changed since every catch."""
    monkeypatch.setattr(check, "stale_names", lambda catch, digests, fault: changed)
    work = check._Check(catalogue(), shipped_root(), lambda record: [], load_faults(), Package())
    monkeypatch.setattr(work, "digests", lambda component, gate: {})
    work.catches_of(reference_classes(shipped_root())["cuda"], reference=True)
    return {level: {(f.about, f.what) for f in work.findings if f.level == level} for level in (ERROR, WARNING)}


def test_each_is_rejected_on_the_emulated_gpu_in_every_run() -> None:
    assert policy.UNRENEWED.keys() <= FAULTS.keys(), "test_cuda_host.py plants the others"
    assert all(not FAULTS[f].source and why.strip() for f, why in policy.UNRENEWED.items())


def test_only_these_may_be_old(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _found(monkeypatch, ["implementation"])
    assert {about for about, _ in found[WARNING]} == policy.UNRENEWED.keys()
    assert all(what.startswith("NOT_RUN on today's code") for _, what in found[WARNING])
    assert {about for about, _ in found[ERROR]} == {f.id for f in load_faults() if catalogue()[f.component].backend == "cuda"
                                                    } - policy.UNRENEWED.keys()


def test_an_excuse_that_is_not_needed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _found(monkeypatch, [])
    assert found[ERROR] == {(f, "its catch is current, so nothing excuses it") for f in policy.UNRENEWED} and not found[WARNING]
