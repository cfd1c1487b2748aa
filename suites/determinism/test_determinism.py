"""Every component, bit for bit, run after run."""

import pytest

from alpha.gates.plugin import Measured


@pytest.mark.gate("determinism")
def test_determinism(measured: Measured) -> None:
    record, judgement = measured()
    assert judgement.satisfied, f"{record.component} {judgement.verdict}: " + "; ".join(judgement.reasons)
