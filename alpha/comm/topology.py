"""What a job runs on: sockets, NUMA nodes, cores, GPUs and network links of each host, and what a byte costs between ranks. Floor 4.

Read from Linux's /sys, and measured (links.py). Nothing is guessed: what the system does not tell is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from pathlib import Path

import numpy as np

_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""Vendor, and class of what computes or draws, in /sys/bus/pci/devices."""


@dataclass(frozen=True)
class Node:
    """A NUMA node. `cores`: the logical processors of each core; `memory`: bytes; `distances`: to all nodes, 10 to itself."""

    number: int
    sockets: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    memory: int
    distances: tuple[int, ...]


@dataclass(frozen=True)
class Device:
    """A GPU, by its PCI address, or a network link, by its name. `node`: the NUMA node that it hangs on, -1 where that is not told;
    `speed`: bits per second, 0 where that is not told."""

    name: str
    node: int
    speed: int = 0


@dataclass(frozen=True)
class Machine:
    """One host."""

    nodes: tuple[Node, ...]
    gpus: tuple[Device, ...]
    links: tuple[Device, ...]

    def lines(self) -> list[str]:
        """For people, a line for each thing."""
        sockets = {s for node in self.nodes for s in node.sockets}
        cores = sum(len(node.cores) for node in self.nodes)
        out = [f"{_many(len(sockets), 'socket')}, {_many(len(self.nodes), 'NUMA node')}, {_many(cores, 'core')}"]
        for node in self.nodes:
            threads = sorted(t for core in node.cores for t in core)
            far = f", distances {' '.join(map(str, node.distances))}" if len(node.distances) > 1 else ""
            out.append(f"node {node.number}: socket {_ranges(node.sockets)}, {_many(len(node.cores), 'core')}, "
                       f"processors {_ranges(threads)}, {node.memory / 2**30:.1f} GiB{far}")
        out += [f"GPU {gpu.name}{_on(gpu.node)}" for gpu in self.gpus]
        return [*out, *(f"link {link.name}{_on(link.node)}{f', {link.speed / 1e9:g} Gbit/s' if link.speed else ''}" for link in self.links)]


def read(sys: Path = Path("/sys")) -> Machine:
    """This host, as /sys describes it: processors that are online, links that are up, without the loopback."""
    cpus = sys / "devices/system/cpu"
    sockets, siblings = dict[int, int](), dict[int, tuple[int, ...]]()
    for number in _set(_text(cpus / "online")):
        at = cpus / f"cpu{number}" / "topology"
        sockets[number] = _int(_text(at / "physical_package_id"), 0)
        siblings[number] = tuple(_set(_text(at / "thread_siblings_list"))) or (number,)
    places = sorted((sys / "devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:]))
    found = []
    for place in places:
        here = [n for n in _set(_text(place / "cpulist")) if n in sockets]
        total = [line.split() for line in _text(place / "meminfo").splitlines() if "MemTotal" in line]
        found.append(Node(int(place.name[4:]), tuple(sorted({sockets[n] for n in here})), tuple(sorted({siblings[n] for n in here})),
                          1024 * _int(total[0][3], 0) if total else 0, tuple(map(int, _text(place / "distance").split()))))
    if not found:  # a kernel without NUMA
        found = [Node(0, tuple(sorted(set(sockets.values()))), tuple(sorted(set(siblings.values()))), 0, ())]
    gpus = [Device(d.name, _int(_text(d / "numa_node"), -1)) for d in sorted((sys / "bus/pci/devices").glob("*"))
            if _text(d / "vendor") == _NVIDIA and _text(d / "class").startswith(_DISPLAY)]
    links = [Device(d.name, _int(_text(d / "device/numa_node"), -1), max(0, 10**6 * _int(_text(d / "speed"), 0)))
             for d in sorted((sys / "class/net").glob("*")) if d.name != "lo" and _text(d / "operstate") == "up"]
    return Machine(tuple(found), tuple(gpus), tuple(links))


# -- ways between ranks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """What ranks of two hosts, or of one, take for a message of n bytes: `latency` + n `inverse_bandwidth` seconds, in the middle of their
    pairs. `hosts`: numbers of both."""

    hosts: tuple[int, int]
    latency: float
    inverse_bandwidth: float


def ways(hosts: Sequence[int], latency: np.ndarray, inverse_bandwidth: np.ndarray) -> list[Way]:
    """`hosts`: the host of each rank; latency, inverse_bandwidth: f64[size, size], of each pair. In the order of hosts."""
    pairs = dict[tuple[int, int], list[tuple[int, int]]]()
    for a, b in combinations(range(len(hosts)), 2):
        pairs.setdefault((min(hosts[a], hosts[b]), max(hosts[a], hosts[b])), []).append((a, b))
    return [Way(key, float(np.median([latency[p] for p in of])), float(np.median([inverse_bandwidth[p] for p in of])))
            for key, of in sorted(pairs.items())]


def members(sizes: Sequence[int]) -> list[list[list[int]]]:
    """Ranks of every group of each kind. `sizes`: of the kinds, from the inside out: consecutive ranks are a group of the first kind, those
    that lie that many apart one of the second, and so on."""
    ranks = np.arange(math.prod(sizes)).reshape(tuple(reversed(sizes)))
    return [np.moveaxis(ranks, len(sizes) - 1 - i, -1).reshape(-1, size).tolist() for i, size in enumerate(sizes)]


def spread(size: int, inverse_bandwidth: np.ndarray) -> tuple[float, float]:
    """Seconds of a byte between the worst neighbours in groups of `size`: of consecutive ranks, and of ranks as far apart as can be."""
    return _worst(members([size, len(inverse_bandwidth) // size])[0], inverse_bandwidth), \
        _worst(members([len(inverse_bandwidth) // size, size])[1], inverse_bandwidth)


def _worst(kind: Sequence[Sequence[int]], inverse_bandwidth: np.ndarray) -> float:
    """Of all pairs of neighbours in groups of one kind."""
    return max((float(inverse_bandwidth[a, b]) for group in kind for a, b in pairwise(group)), default=0.0)


def place(groups: Mapping[str, tuple[int, float]], inverse_bandwidth: np.ndarray) -> tuple[str, ...]:
    """The rule by which ranks are put into groups: the names of their kinds from the inside out, in the order that costs least.

    `groups`: name -> (ranks of a group of this kind, bytes that each moves in a step). A kind costs its bytes times the slowest pair of
    neighbours in any of its groups; of equal orders the first one counts. So what moves most takes the shortest way.
    """
    def cost(names: Sequence[str]) -> float:
        kinds = members([groups[name][0] for name in names])
        return sum(groups[name][1] * _worst(kind, inverse_bandwidth) for name, kind in zip(names, kinds))

    return min(permutations(groups), key=cost)


# -- words of /sys -----------------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a speed that the driver does not know, or no such file
        return ""


def _int(text: str, otherwise: int) -> int:
    try:
        return int(text)
    except ValueError:
        return otherwise


def _set(text: str) -> list[int]:
    """'0-2,5' as numbers."""
    found = list[int]()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as '0-2,5'."""
    out, ordered = list[str](), sorted(numbers)
    for i, n in enumerate(ordered):
        if i and ordered[i - 1] == n - 1:
            out[-1] = f"{out[-1].partition('-')[0]}-{n}"
        else:
            out.append(str(n))
    return ",".join(out)


def _many(n: int, what: str) -> str:
    return f"{n} {what}" + ("s" if n != 1 else "")


def _on(node: int) -> str:
    return f" on node {node}" if node >= 0 else ""
