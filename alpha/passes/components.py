"""The passes as components. Floor 3."""

from __future__ import annotations

from alpha.component import Catalogue, Component
from alpha.graph.differentiate import differentiate
from alpha.graph.state import reshard
from alpha.graph.verify import verify
from alpha.graph.verify_program import verify_program
from alpha.passes.expand import expand
from alpha.passes.fuse import fuse
from alpha.passes.memory import layout
from alpha.passes.recompute import recompute
from alpha.passes.schedule import schedule
from alpha.passes.select import select

_CONTRACTS = "alpha.gates.contracts"


def fill(catalogue: Catalogue) -> None:
    """Add every pass; `layout.pass` is the state layout and its resharding arithmetic."""
    for name, implementation in (("differentiate", differentiate), ("recompute", recompute), ("expand", expand), ("fuse", fuse),
                                 ("schedule", schedule), ("select", select), ("memory", layout), ("verify", verify), ("layout", reshard)):
        catalogue.add(Component(id=f"{name}.pass", kind="pass", profile="host", implementation=implementation,
                                contract=f"{_CONTRACTS}.passes"))
    catalogue.add(Component(id="verify_program.pass", kind="pass", profile="host", implementation=verify_program,
                            contract=f"{_CONTRACTS}.verify_program"))
