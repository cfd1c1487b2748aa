"""Every differentiable component against central differences."""

import pytest

from alpha.gates.plugin import Measured


@pytest.mark.gate("gradient")
def test_gradient(measured: Measured) -> None:
    record, judgement = measured()
    assert judgement.satisfied, f"{record.component} {judgement.verdict}: " + "; ".join(judgement.reasons)
