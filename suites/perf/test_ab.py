"""The relative half of the perf gate on live timings: a kernel against itself, and against itself made slower."""

import pytest

from alpha.gates.timing import ab
from alpha.profile.noise import Verdict
from alpha.registry.judge import FAIL, judge
from alpha.registry.record import Record
from alpha.train.catalogue import catalogue

pytestmark = pytest.mark.alone


def _record(verdict: Verdict) -> Record:
    absolute: dict[str, object] = {"name": "cache", "share": 0.5, "times_ns": [1]}
    return Record(component="gelu.f32.cpu", gate="perf", machine="cpu_x_np2.2_y_t1", digests={}, nonce="00", declared=2,
                  cases=[absolute, ab.case_of(verdict, "against itself").plain()])


@pytest.mark.parametrize("slowdown", [0.25])
def test_a_slower_kernel_fails_in_a_fresh_process_too(slowdown: float) -> None:
    kernel = catalogue()["gelu.f32.cpu"]
    verdict = ab.ab(kernel, kernel, slowdown=slowdown)
    assert verdict.verdict == FAIL and verdict.reproduced
    assert 0.15 < verdict.interval.estimate < 0.4
    assert judge(_record(verdict)).relative == FAIL


def test_a_kernel_against_itself_does_not_fail() -> None:
    kernel = catalogue()["gelu.f32.cpu"]
    verdict = ab.ab(kernel, kernel)
    assert verdict.verdict != FAIL
    assert judge(_record(verdict)).relative == verdict.verdict
