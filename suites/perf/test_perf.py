"""Every component that has a speed, against the ceiling of this machine."""

import pytest

from alpha.gates.plugin import Measured


@pytest.mark.gate("perf")
def test_perf(measured: Measured) -> None:
    record, judgement = measured()
    assert judgement.satisfied, f"{record.component} {judgement.verdict}: " + "; ".join(judgement.reasons)
