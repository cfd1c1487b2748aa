"""pandas and matplotlib, asked for in one place: a missing extra is one clear error. Floor 7."""

from __future__ import annotations

from alpha.errors import MachineError

try:
    import matplotlib
    import pandas
except ImportError as error:
    raise MachineError("reports need pandas and matplotlib", came=str(error), expected="the extra `report`",
                       do="pip install alpha[report]") from error

matplotlib.use("svg")

__all__ = ["matplotlib", "pandas"]
