"""The components of this package, and what their ranks rest on, for the catalogue that the caller hands in. Floor 6."""

from __future__ import annotations

from collections.abc import Callable

from alpha.comm.bridge import Bridge
from alpha.comm.meet import meet
from alpha.comm.shm import SharedMemory
from alpha.comm.streams import Streams
from alpha.comm.watch import Watch
from alpha.component import Catalogue, Component
from alpha.train.handshake import require_same_start
from alpha.train.launch import launch
from alpha.train.loop import Loop
from alpha.train.ranks import Ranks
from alpha.train.saving import Saver
from alpha.train.supervisor import supervise


def _of_ranks(name: str, implementation: Callable[..., object], *presupposes: str, cases: str) -> Component:
    return Component(id=name, kind="program", profile="program", implementation=implementation, presupposes=presupposes,
                     requires=("ranks>=2",), contract=f"alpha.gates.contracts.ranks.{cases}")


def across_hosts() -> tuple[Callable[..., object], ...]:
    """What messages between hosts rest on: how hosts meet, their bridges, and the connections of ranks."""
    return meet, Bridge, Streams


COMPONENTS = (
    Component(
        id="train.loop",
        kind="program",
        profile="program",
        implementation=Loop,
        presupposes=("checkpoint.ranges", "sampler.permuted"),
        contract="alpha.gates.contracts.train",
    ),
    _of_ranks("transport.shm", SharedMemory, cases="transports"),
    _of_ranks("transport.tcp", across_hosts, "transport.shm", "watch.progress", cases="hosts"),
    _of_ranks("watch.progress", Watch, cases="watched"),
    _of_ranks("launch.ranks", launch, "watch.progress", cases="launched"),
    _of_ranks("handshake.ranks", require_same_start, "all_gather.cpu", cases="agreed"),
    _of_ranks("decisions.ranks", Ranks, "all_gather.cpu", "barrier.cpu", "broadcast.cpu", "receive.cpu", "send.cpu", cases="agreed"),
    _of_ranks("saver.ranks", Saver, "decisions.ranks", "checkpoint.ranges", cases="agreed"),
    _of_ranks("supervisor.restarts", supervise, "checkpoint.ranges", cases="launched"),
)


def fill(catalogue: Catalogue) -> None:
    """Add the training loop to the catalogue."""
    for component in COMPONENTS:
        catalogue.add(component)
