"""On a Hopper GPU one gate of every component of the GPU is measured again, drawn from the session's seed, and agrees with the evidence."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from alpha.backends.cpu.lib import Cpu
from alpha.component import Component
from alpha.gates import audit, plugin, run, subjects
from alpha.registry import policy
from alpha.registry.digest import component_digests
from alpha.registry.evidence import default_roots, save
from alpha.registry.gpu import family, why_not_here
from alpha.registry.machine import machine_class
from alpha.registry.status import Registry
from alpha.train.catalogue import catalogue
from alpha.types import Attrs


@cache
def registry() -> Registry:
    """What the session found when it began."""
    return Registry(catalogue(), default_roots())


@pytest.mark.h100
@pytest.mark.parametrize("component", [c.id for c in catalogue() if family(c) == "cuda"])
def test_a_sample_agrees_with_the_evidence(component: str, seed: int, unseen: Callable[[str], None]) -> None:
    if why := why_not_here(catalogue()[component]):  # it needs more GPUs than this machine has
        pytest.skip(f"NOT_RUN: {why}")
    assert plugin.sampled(catalogue()[component], registry(), seed, unseen) == []


# -- what the sample itself sees, on a kernel of the CPU ---------------------------------------------------------------------------------

HONEST = catalogue()["gelu.f32.cpu"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evidence of one component, measured here."""
    path = tmp_path_factory.mktemp("evidence")
    save([run.measure(HONEST, gate)[0] for gate in ("parity", "gradient", "determinism", "faults")], path)
    return path


def seed_of(gate: str) -> int:
    """A seed that draws this gate."""
    return next(s for s in range(1000) if plugin.drawn(HONEST, s) == gate)


class SameDigests(Registry):
    """Takes a kernel for the honest one: what is tested is the measurement."""

    def digests(self, component: Component, gate: str) -> dict[str, str]:
        return super().digests(HONEST, gate)


def sampled(root: Path, gate: str, component: Component = HONEST) -> str:
    with mock.patch.object(subjects, "component_digests", lambda c, g, **_: component_digests(HONEST, g)):
        return "; ".join(plugin.sampled(component, SameDigests(catalogue(), [root]), seed_of(gate)))


def test_every_gate_that_is_owed_is_drawn() -> None:
    assert {plugin.drawn(HONEST, s) for s in range(200)} == set(policy.owed(HONEST))


@pytest.mark.parametrize("gate", ["parity", "gradient", "determinism", "faults"])
def test_an_honest_component_agrees(root: Path, gate: str) -> None:
    assert sampled(root, gate) == ""


def late() -> Component:
    """The honest one, and a little too much of everything."""

    def bind(cpu: Cpu, ins: Sequence[np.ndarray], outs: Sequence[np.ndarray], attrs: Attrs) -> Callable[[], None]:
        honest = HONEST.implementation(cpu, ins, outs, attrs)

        def compute() -> None:
            honest()
            outs[0][...] *= 1 + 2e-5

        return compute

    return replace(HONEST, implementation=bind)


def test_a_kernel_that_is_wrong_now_disagrees(root: Path) -> None:
    output = sampled(root, "parity", late())
    assert "from a fresh nonce: FAIL" in output and "from the record's nonce" in output


def test_a_record_that_does_not_repeat_disagrees(root: Path, tmp_path: Path) -> None:
    """Its verdict is PASS, whoever looks at it; the run that it tells of never was."""
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    record = Registry(catalogue(), [root]).evidence.load(HONEST.id, machine_class().key)["determinism"][0].record
    save([replace(record, cases=[{**c, "digest": "0" * 16} for c in record.cases])], tmp_path)
    output = sampled(tmp_path, "determinism")
    assert "from the record's nonce" in output and "fresh nonce" not in output


def test_without_evidence_there_is_nothing_to_agree_with(tmp_path: Path) -> None:
    assert f"`alpha gate run {HONEST.id} --stale` supplies it" in sampled(tmp_path, "parity")


def test_on_a_class_that_ships_no_evidence_a_fresh_measurement_decides(tmp_path: Path) -> None:
    """So the first run on another model of GPU tells of its kernels; one that is wrong is still seen."""
    seed, told = seed_of("parity"), list[str]()
    with mock.patch.object(plugin, "reference_classes", lambda root: {}):
        with mock.patch.object(subjects, "component_digests", lambda c, g, **_: component_digests(HONEST, g)):
            registry = SameDigests(catalogue(), [tmp_path])
            assert plugin.sampled(HONEST, registry, seed, told.append) == [] and told == ["parity"]
            (found,) = plugin.sampled(late(), registry, seed)
    assert found.startswith("parity from a fresh nonce: FAIL")


def test_a_finite_difference_is_not_compared_between_processors(root: Path) -> None:
    old = Registry(catalogue(), [root]).evidence.load(HONEST.id, machine_class().key)["gradient"][0].record
    new = replace(old, cases=[{**c, "error": 7.0} for c in old.cases])
    assert audit.differences(old, new)
    assert audit.differences(old, replace(new, environment={**new.environment, "cpu": "another"})) == []
