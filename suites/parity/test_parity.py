"""Every component against its oracle or contract."""

import pytest

from alpha.gates.plugin import Measured


@pytest.mark.gate("parity")
def test_parity(measured: Measured) -> None:
    record, judgement = measured()
    assert judgement.satisfied, f"{record.component} {judgement.verdict}: " + "; ".join(judgement.reasons)
