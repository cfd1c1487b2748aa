"""The components of this package, and what their ranks rest on, for the catalogue that the caller hands in. Floor 6."""

from __future__ import annotations

from collections.abc import Callable

from alpha.comm.bridge import Bridge
from alpha.comm.shm import SharedMemory
from alpha.comm.watch import Watch
from alpha.component import Catalogue, Component
from alpha.train.handshake import require_same_start
from alpha.train.launch import launch
from alpha.train.loop import Loop
from alpha.train.ranks import Ranks
from alpha.train.saving import Saver
from alpha.train.supervisor import supervise

_JOBS = "alpha.gates.contracts.ranks.jobs"


def _of_ranks(name: str, implementation: Callable[..., object], *presupposes: str, contract: str = _JOBS) -> Component:
    return Component(id=name, kind="program", profile="program", implementation=implementation, presupposes=presupposes,
                     requires=("ranks>=2",), contract=contract)


COMPONENTS = (
    Component(
        id="train.loop",
        kind="program",
        profile="program",
        implementation=Loop,
        presupposes=("checkpoint.ranges", "sampler.permuted"),
        contract="alpha.gates.contracts.train",
    ),
    _of_ranks("transport.shm", SharedMemory),
    _of_ranks("transport.tcp", Bridge, "transport.shm", "watch.progress", contract="alpha.gates.contracts.ranks.hosts"),
    _of_ranks("watch.progress", Watch),
    _of_ranks("launch.ranks", launch, "watch.progress"),
    _of_ranks("handshake.ranks", require_same_start, "all_gather.cpu"),
    _of_ranks("decisions.ranks", Ranks, "all_gather.cpu", "barrier.cpu", "broadcast.cpu", "receive.cpu", "send.cpu"),
    _of_ranks("saver.ranks", Saver, "decisions.ranks", "checkpoint.ranges"),
    _of_ranks("supervisor.restarts", supervise, "checkpoint.ranges"),
)


def fill(catalogue: Catalogue) -> None:
    """Add the training loop to the catalogue."""
    for component in COMPONENTS:
        catalogue.add(component)
