"""Every component that has a speed, against the ceiling of this machine."""

import pytest

from alpha.gates.plugin import Measured


@pytest.mark.gate("perf")
def test_perf(measured: Measured) -> None:
    record, judgement = measured()
    if measured.component.kind != "kernel" and "not_measured" in record.environment:  # ranks: others had their cores, or there is one core
        pytest.skip(f"NOT_RUN: {record.environment['not_measured']}")
    if judgement.elsewhere:  # ranks whose cores moved: neither slow nor not; its verdict is NOT_RUN and satisfies no gate
        pytest.skip(f"NOT_RUN: {'; '.join(judgement.reasons)}")
    assert judgement.satisfied, f"{record.component} {judgement.verdict}: " + "; ".join(judgement.reasons)
