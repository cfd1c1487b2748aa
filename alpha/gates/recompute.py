"""What the merge gate asks of a parity record: do its bits agree with the oracle? Floor 7."""

from __future__ import annotations

from collections.abc import Sequence

from alpha.gates import parity
from alpha.registry.record import Record
from alpha.train.catalogue import catalogue


def recompute(record: Record) -> Sequence[str]:
    """Mismatches between a kernel's parity record and the oracle; a component that is gone is one."""
    if record.component not in catalogue():
        return [f"no component {record.component}"]
    return parity.recompute(catalogue()[record.component], record)
