"""Cases of what a run tells of its time and of what is made of that. Those of the figures and of stored files stand beside this room
(report.py, stored.py) and take theirs from here. Floor 7."""

from __future__ import annotations

from alpha.gates.contracts.profile import device, planned, recorder, served
from alpha.gates.contracts.profile.support import Case

CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "profile.recorder": {
        "parity": [*recorder.PARITY, *device.PARITY, *planned.PARITY, *served.PARITY],
        "determinism": [*recorder.DETERMINISM],
        "faults": [*recorder.FAULTS, *served.FAULTS],
    },
}
