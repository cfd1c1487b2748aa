"""pandas and matplotlib, asked for in one place: a missing extra is one clear error. Floor 7.

matplotlib is imported only by who draws with it: the dashboard reads runs and draws in the browser.
"""

from __future__ import annotations

from typing import Any

from alpha.errors import MachineError


def _missing(error: ImportError) -> MachineError:
    return MachineError("reports need pandas and matplotlib", came=str(error), expected="the extra `report`",
                        do="in the checkout: python3 -m pip install --editable '.[report]'")  # fmt: skip


try:
    import pandas
except ImportError as error:
    raise _missing(error) from error

__all__ = ["matplotlib", "pandas"]  # noqa: F822, matplotlib comes from __getattr__


def __getattr__(name: str) -> Any:
    if name != "matplotlib":
        raise AttributeError(name)
    try:
        import matplotlib
    except ImportError as error:
        raise _missing(error) from error
    matplotlib.use("svg")
    return matplotlib
