"""Every component under misuse, damage and non-finite data."""

import pytest

from alpha.gates.plugin import Measured


@pytest.mark.gate("faults")
def test_faults(measured: Measured) -> None:
    record, judgement = measured()
    assert judgement.satisfied, f"{record.component} {judgement.verdict}: " + "; ".join(judgement.reasons)
