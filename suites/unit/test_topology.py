"""The map of a host, read from a made /sys; ways between ranks; and the rule that puts what moves most on the shortest way."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np

from alpha.comm import topology
from alpha.comm.topology import Way
from alpha.gates.contracts.ranks.places import _made as made


def two_sockets(sys: Path) -> Path:
    """Two sockets with a NUMA node each, two cores each with two threads, a GPU and a link on the second one."""
    files = {"devices/system/cpu/online": "0-7"}
    for n in range(8):
        at = f"devices/system/cpu/cpu{n}/topology"
        files |= {f"{at}/physical_package_id": str(n // 2 % 2), f"{at}/thread_siblings_list": f"{n % 4},{n % 4 + 4}"}
    for node, cpus, distance in ((0, "0-1,4-5", "10 21"), (1, "2-3,6-7", "21 10")):
        at = f"devices/system/node/node{node}"
        files |= {f"{at}/cpulist": cpus, f"{at}/distance": distance, f"{at}/meminfo": f"Node {node} MemTotal:       {2 << 20} kB"}
    for address, vendor, kind in (("0000:17:00.0", "0x10de", "0x030200"), ("0000:18:00.0", "0x8086", "0x030000"),
                                  ("0000:19:00.0", "0x10de", "0x068000")):
        at = f"bus/pci/devices/{address}"
        files |= {f"{at}/vendor": vendor, f"{at}/class": kind, f"{at}/numa_node": "1"}
    for name, state, speed in (("ib0", "up", "400000"), ("eth0", "down", "10000"), ("lo", "up", "0"), ("veth", "up", "-1")):
        files |= {f"class/net/{name}/operstate": state, f"class/net/{name}/speed": speed}
    files["class/net/ib0/device/numa_node"] = "1"
    return made(sys, files)


def test_a_host_is_read(tmp_path: Path) -> None:
    assert topology.read(two_sockets(tmp_path)).lines() == [
        "2 sockets, 2 NUMA nodes, 4 cores",
        "node 0: socket 0, 2 cores, processors 0-1,4-5, 2.0 GiB, distances 10 21",
        "node 1: socket 1, 2 cores, processors 2-3,6-7, 2.0 GiB, distances 21 10",
        "GPU 0000:17:00.0 on node 1",
        "link ib0 on node 1, 400 Gbit/s",
        "link veth",
    ]


def test_a_host_that_tells_little(tmp_path: Path) -> None:
    """No NUMA, no topology of a processor, no devices; processors that are offline do not count."""
    found = topology.read(made(tmp_path, {"devices/system/cpu/online": "0,2"}))
    assert found.lines() == ["1 socket, 1 NUMA node, 2 cores", "node 0: socket 0, 2 cores, processors 0,2, 0.0 GiB"]
    assert topology.read(tmp_path / "nothing").lines()[0] == "0 sockets, 1 NUMA node, 0 cores"


def apart(hosts: list[int], near: float, far: float) -> np.ndarray:
    place = np.array(hosts)
    return np.where(place[:, None] == place[None, :], near, far) * (1 - np.eye(len(hosts)))


def test_ways_are_between_hosts() -> None:
    """The middle of the pairs of each: one slow pair is not its host's way."""
    latency, cost = apart([0, 0, 0, 1, 1, 1], 1e-6, 5e-5), apart([0, 0, 0, 1, 1, 1], 1e-10, 1e-9)
    latency[0, 1] = 1.0
    assert topology.ways([0, 0, 0, 1, 1, 1], latency, cost) == [Way((0, 0), 1e-6, 1e-10), Way((0, 1), 5e-5, 1e-9), Way((1, 1), 1e-6, 1e-10)]


def test_groups_are_made_of_all_ranks() -> None:
    assert topology.members([2, 3]) == [[[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]]]
    for sizes in ([4], [2, 2, 2], [3, 4], [1, 5]):
        for size, kind in zip(sizes, topology.members(sizes)):
            assert sorted(r for group in kind for r in group) == list(range(int(np.prod(sizes)))) and {len(g) for g in kind} == {size}


def test_what_moves_most_takes_the_shortest_way(seed: int) -> None:
    """On two hosts, whichever group it is. Planted: a rule that keeps the order given costs more. And of all orders none costs less."""
    cost = apart([0, 0, 1, 1], 1e-10, 1e-9)
    assert topology.place({"tensor": (2, 100.0), "data": (2, 1.0)}, cost) == ("tensor", "data")
    assert topology.place({"tensor": (2, 1.0), "data": (2, 100.0)}, cost) == ("data", "tensor")
    assert topology.spread(2, cost) == (1e-10, 1e-9)
    rng = np.random.default_rng(seed)

    def price(order: tuple[str, ...], groups: dict[str, tuple[int, float]]) -> float:
        total, step = 0.0, 1
        for name in order:
            size, moved = groups[name]
            total += moved * max((cost[r, r + step] for r in range(len(cost)) if r // step % size < size - 1), default=0.0)
            step *= size
        return total

    for _ in range(50):
        groups = {name: (int(size), float(rng.uniform(1, 100))) for name, size in zip("abc", rng.permutation([2, 3, 2]))}
        cost = rng.uniform(1, 9, (12, 12))
        best = min(price(order, groups) for order in permutations(groups))
        assert np.isclose(price(topology.place(groups, cost), groups), best)
