"""What awaits renewal on classes of GPUs (policy.AWAITING): told as NOT_RUN, closed, and no class of CPUs among them."""

import re
from pathlib import Path

import pytest

import alpha
from alpha.registry import policy
from alpha.registry.evidence import reference_classes, shipped_root
from alpha.registry.machine import machine_class


def test_only_the_reference_class_of_gpus_may_await_renewal() -> None:
    assert policy.AWAITING.keys() <= {reference_classes(shipped_root())["cuda"]} and all(
        entries and all(why.strip() for why in entries.values()) for entries in policy.AWAITING.values())


def test_no_class_of_cpus_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "AWAITING", {machine_class().key: {"x": "later"}, "cuda_sm90_H200": {"x": "later"}})
    assert not policy.awaiting(machine_class().key, "x") and policy.awaiting("cuda_sm90_H200", "x") == "later"
    assert not policy.awaiting("cuda_sm90_H200", "y")


def test_only_the_merge_gate_asks() -> None:
    """What a run may use is decided without the list."""
    package = Path(alpha.__file__).parent
    named = re.compile(r"\bAWAITING\b|policy\.await(ing|ed)\b")
    asking = {p.relative_to(package).as_posix() for p in package.rglob("*.py") if named.search(p.read_text())}
    assert asking == {"registry/policy.py", "registry/check.py", "gates/contracts/registry/check.py"}
