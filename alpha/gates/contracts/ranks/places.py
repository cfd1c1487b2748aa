"""Cases of where ranks are and what lies between them: the map of a host, ways, the order of groups, clocks, measured links and the rule
that follows from them, how ranks of another launcher meet. Floor 7.

Maps are read from a /sys that is made up, and numbers that are measured are drawn: a dull model says what must come out.
"""

from __future__ import annotations

import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations, product
from pathlib import Path
from unittest import mock

import numpy as np

from alpha.comm import links as timing
from alpha.comm import rendezvous, topology
from alpha.comm.clock import Clocks, align
from alpha.comm.group import Group
from alpha.comm.links import Links
from alpha.comm.rule import COSTS, Rule
from alpha.comm.segment import Segment
from alpha.comm.topology import Device, Machine, Node, Way
from alpha.comm.world import WORLD, World
from alpha.component import Measured
from alpha.errors import AlphaError, BusyError, InputError, RankError
from alpha.gates.contracts.ranks.members import at_once, in_threads
from alpha.gates.contracts.ranks.memory import descriptors, measured

# -- maps --------------------------------------------------------------------------------------------------------------------------


def _made(sys: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = sys / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return sys


def _listed(numbers: list[int]) -> str:
    """Numbers as /sys lists them, the dullest way: runs of two and more with a dash."""
    runs = list[list[int]]()
    for n in sorted(numbers):
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _drawn_host(rng: np.random.Generator, sockets: int) -> tuple[dict[str, str], Machine]:
    """Files of /sys of a host with so many sockets, and what they say. Nodes have numbers with gaps; of cores with two threads each one
    thread is offline; the memory of the second node and the node of the first device are not told."""
    cores = int(rng.integers(2, 5))
    count, offline = sockets * cores, int(rng.integers(2 * sockets * cores))
    numbers = [int(n) for n in rng.permutation(2 * count)]  # of the threads of core c: numbers[2 c], numbers[2 c + 1]
    files, nodes = {"devices/system/cpu/online": _listed([n for n in range(2 * count) if n != offline])}, list[Node]()
    for package in range(sockets):
        mine = [tuple(sorted(numbers[2 * core : 2 * core + 2])) for core in range(package * cores, (package + 1) * cores)]
        for pair in mine:
            for n in pair:
                at = f"devices/system/cpu/cpu{n}/topology"
                files |= {f"{at}/physical_package_id": str(package), f"{at}/thread_siblings_list": _listed([*pair])}
        number, memory = 8 * package + 2, int(rng.integers(1, 1 << 30))
        at, distances = f"devices/system/node/node{number}", tuple(10 if i == package else 21 for i in range(sockets))
        files |= {f"{at}/cpulist": _listed([n for pair in mine for n in pair]), f"{at}/distance": " ".join(map(str, distances)),
                  f"{at}/meminfo": f"Node {number} MemFree: 7 kB" + f"\nNode {number} MemTotal:       {memory} kB" * (package != 1)}
        nodes.append(Node(number, (package,), tuple(sorted(mine)), 1024 * memory * (package != 1), distances))
    gpus, links = list[Device](), list[Device]()
    for i in range(6):
        vendor, kind = ("0x10de", "0x8086")[i % 2], ("0x030200", "0x068000", "0x030000")[i % 3]
        node = int(rng.integers(sockets)) if i else -1
        files |= {f"bus/pci/devices/0000:1{i}:00.0/vendor": vendor, f"bus/pci/devices/0000:1{i}:00.0/class": kind}
        files |= {f"bus/pci/devices/0000:1{i}:00.0/numa_node": str(node)} if i else {}
        gpus += [Device(f"0000:1{i}:00.0", node)] if i % 2 == 0 and i % 3 != 1 else []
        state, speed = ("up", "down")[i // 3], (7, -1, int(rng.integers(1, 9)) * 100_000)[i % 3]
        files |= {f"class/net/n{i}/operstate": state, f"class/net/n{i}/speed": str(speed) if i % 3 else "unknown"}
        files |= {f"class/net/n{i}/device/numa_node": str(node)} if i else {}
        links += [Device(f"n{i}", node, 10**6 * speed if i % 3 == 2 else 0)] if state == "up" else []
    files |= {"class/net/lo/operstate": "up", "class/net/lo/speed": "0"}
    return files, Machine(tuple(nodes), tuple(gpus), tuple(links))


def machines(rng: np.random.Generator) -> Measured:
    """A drawn host of one socket or several, with GPUs among other devices and links that are up and down, is read as it was made; so is
    one that tells nothing. For people each thing has a line."""
    wrong = list[str]()
    with tempfile.TemporaryDirectory(prefix="alpha-sys-") as name:
        for sockets in (1, int(rng.integers(2, 4))):
            files, made = _drawn_host(rng, sockets)
            found = topology.read(_made(Path(name) / f"sys{sockets}", files))
            wrong += [] if found == made else [f"{found}, not {made}"]
            more = "s" * (sockets != 1)
            lines = [f"{sockets} socket{more}, {sockets} NUMA node{more}, {sum(len(n.cores) for n in made.nodes)} cores"]
            for n in made.nodes:
                threads, far = _listed([t for pair in n.cores for t in pair]), f", distances {' '.join(map(str, n.distances))}"
                lines.append(f"node {n.number}: socket {n.sockets[0]}, {len(n.cores)} cores, processors {threads}, "
                             f"{n.memory / 2**30:.1f} GiB{far if more else ''}")
            on = {device: f" on node {device.node}" if device.node >= 0 else "" for device in (*made.gpus, *made.links)}
            lines += [f"GPU {gpu.name}{on[gpu]}" for gpu in made.gpus]
            lines += [f"link {x.name}{on[x]}{f', {x.speed / 1e9:g} Gbit/s' if x.speed else ''}" for x in made.links]
            wrong += [] if found.lines() == lines else [f"it says {[a for a in found.lines() if a not in lines]}, not {lines}"]
        drawn = {n: int(rng.integers(200)) for n in sorted(int(n) for n in rng.choice(200, 20, replace=False))}
        for of, package in (("few", drawn), ("runs", {**dict.fromkeys((*range(4), *range(9, 12)), 1), 15: 0})):
            files = {f"devices/system/cpu/cpu{n}/topology/physical_package_id": str(p) for n, p in package.items()}
            few = topology.read(_made(Path(name) / of, {"devices/system/cpu/online": _listed([*package]), **files}))
            made = Machine((Node(0, tuple(sorted({*package.values()})), tuple((n,) for n in package), 0, ()),), (), ())
            wrong += [] if few == made else [f"a host without NUMA is {few}, not {made}"]
        shown = Machine((Node(0, (0,), ((0, 4), (2, 5), (7,), (9,)), 0, ()),), (), ()).lines()
        wrong += [] if any("processors 0,2,4-5,7,9," in line for line in shown) else [f"gaps of one are shown as {shown}"]
        none = topology.read(Path(name) / "none").lines()
        wrong += [] if none[0] == "0 sockets, 1 NUMA node, 0 cores" else [f"a host that tells nothing: {none}"]
    return measured(wrong, 8)


def ways(rng: np.random.Generator) -> Measured:
    """Between each two hosts, and inside each, stands the middle of their pairs. Groups of kinds are made of all ranks, each in one of each
    kind. Of all orders of kinds the rule takes one that costs least, and the first given of those."""
    wrong, hosts = list[str](), [int(h) for h in rng.integers(0, 3, 7)]
    latency, cost = (np.triu(rng.uniform(1, 9, (7, 7)), 1) for _ in range(2))
    latency, cost = latency + latency.T, cost + cost.T
    pairs = dict[tuple[int, int], list[tuple[int, int]]]()
    for b in range(7):
        for a in range(b):
            low, high = sorted((hosts[a], hosts[b]))
            pairs.setdefault((low, high), []).append((a, b))
    wanted = [Way(key, float(np.median([latency[p] for p in pairs[key]])), float(np.median([cost[p] for p in pairs[key]])))
              for key in sorted(pairs)]
    found = topology.ways(hosts, latency, cost)
    wrong += [] if found == wanted else [f"ways between hosts {hosts}: {found}"]
    for sizes in ([4], [2, 3], [2, 2, 3], [3, 1, 4]):
        kinds, count, step = topology.members(sizes), int(np.prod(sizes)), 1
        for size, kind in zip(sizes, kinds):
            made = sorted([first + step * i for i in range(size)] for first in range(count) if first // step % size == 0)
            wrong += [] if sorted(kind) == made else [f"of {sizes} groups of {size} are {kind}"]
            step *= size
    for i in range(20):
        groups = {name: (int(size), 10.0 ** int(rng.integers(3))) for name, size in zip("abc", rng.permutation([2, 2, 3]))}
        cost = rng.uniform(1, 9, (12, 12)) if i % 2 else rng.integers(1, 3, (12, 12)).astype(float)  # there many orders cost the same

        def price(order: tuple[str, ...], groups: dict[str, tuple[int, float]] = groups, cost: np.ndarray = cost) -> float:
            total, step = 0.0, 1
            for name in order:
                size, moved = groups[name]
                total += moved * max((cost[r, r + step] for r in range(12) if r // step % size < size - 1), default=0.0)
                step *= size
            return total

        best = min(permutations(groups), key=price)
        placed = topology.place(groups, cost)
        wrong += [] if placed == best else [f"{groups} are placed {placed}, not {best}"]
        near = max(cost[r, r + 1] for r in range(12) if r % 4 < 3)
        far = max(cost[r, r + 3] for r in range(9))
        wrong += [] if topology.spread(4, cost) == (near, far) else [f"groups of 4 cost {topology.spread(4, cost)}, not {near} and {far}"]
    return measured(wrong, 51)


# -- clocks ------------------------------------------------------------------------------------------------------------------------


def clocks(rng: np.random.Generator) -> Measured:
    """Offsets of clocks that stand apart are found within what is said, all ranks hold the same, and one moment is given to each by its own
    clock. Where none stands apart all are taken for one clock."""
    wrong, size = list[str](), 3
    for apart in (False, True):
        ahead = [0, *(int(a) * (-1) ** i * 10**9 for i, a in enumerate(rng.integers(20, 40, size - 1)))] if apart else [0] * size

        def body(world: World, ahead: list[int] = ahead) -> Clocks:
            return align(world.group(WORLD), lambda: time.perf_counter_ns() + ahead[world.rank])

        found = in_threads(size, body)
        if any(isinstance(f, Exception) for f in found):
            return measured([f"{found}"], 1)
        first = found[0]
        for rank, f in enumerate(found):
            same = (f.offset == first.offset).all() and (f.within == first.within).all() and f.unix == first.unix
            wrong += [] if same else [f"rank {rank} holds {f}, rank 0 {first}"]
            off = abs(int(first.offset[rank]) - ahead[rank])
            wrong += [] if off <= first.within[rank] < 10**10 else [f"rank {rank} is {off} ns wrong, within {first.within[rank]}"]
            moment = abs(f.moment - ahead[rank] - first.moment)
            wrong += [] if moment <= first.within[rank] else [f"the moment of rank {rank} is {moment} ns elsewhere"]
            wrong += [] if bool(first.shared[rank]) == (not ahead[rank]) else [f"rank {rank} shares {first.shared[rank]}"]
        wrong += [] if not apart or abs(first.unix - time.time_ns()) < 60 * 10**9 else ["the moment is no time of Unix"]
        text, within = first.text(), first.within
        said = f"clocks apart, aligned by what was measured: {', '.join(f'rank {r} by {int(first.offset[r]):+,} ns' for r in (1,))}" \
            if apart else f"one clock: no offset seen within {int(within.max()) / 1e3:.1f} us"
        good = text.startswith(said) and "rank 0" not in text and all(f"rank {r} by" in text for r in range(1, size if apart else 1))
        wrong += [] if good else [f"{text!r}, not {said!r}"]
    return measured(wrong, 2 * size)


# -- links and the rule ------------------------------------------------------------------------------------------------------------


def links(rng: np.random.Generator) -> Measured:
    """The rule goes by the slowest pair and the slowest rank; of several hosts also by the slowest pair inside one. One rank has nothing to
    measure, and one host nothing to tell apart."""
    wrong, cases = list[str](), (((0,), 1), ((0, 0, 0), 1), ((0, 0, 2, 2), 2), ((0, 1, 2), 3))
    for hosts, count in cases:
        size, message = len(hosts), 64 * int(rng.integers(1, 99))
        latency, cost = (np.triu(rng.uniform(1e-6, 1e-4, (size, size)), 1) for _ in range(2))
        latency, cost, addition = latency + latency.T, cost + cost.T, rng.uniform(0, 1e-9, size)
        found = Links(latency, cost, addition, message, hosts).rule()
        if size == 1:
            wanted = Rule(message=message)
        else:
            wanted = Rule(max(map(float, latency.flat)), max(map(float, cost.flat)), max(map(float, addition)), message)
        if count > 1:
            near = [(a, b) for a in range(size) for b in range(size) if hosts[a] == hosts[b]]
            wanted = replace(wanted, hosts=hosts, near_latency=max(float(latency[p]) for p in near),
                             near_inverse_bandwidth=max(float(cost[p]) for p in near))
        wrong += [] if found == wanted else [f"hosts {hosts}: {found}, not {wanted}"]
    return measured(wrong, len(cases))


def timed(rng: np.random.Generator) -> Measured:
    """Of each pair a short message gives the latency and a long one what a byte takes beyond it, and all ranks hold what the lower rank of
    the pair took; of each rank what it takes to add a byte."""
    size = 3
    latency, cost = (np.triu(rng.uniform(1e-6, 1e-4, (size, size)), 1), np.triu(rng.uniform(1e-11, 1e-9, (size, size)), 1))
    addition = rng.uniform(0, 1e-9, size)

    def trip(group: Group, low: int, high: int, count: int) -> float:
        took = float(latency[low, high]) + (4 * count * float(cost[low, high]) if count > timing.SMALL else 0.0)
        return took * (1 + group.index - low)  # the other end takes longer

    def body(world: World) -> timing.Links:
        own.rank = world.rank
        return timing.measure(world)

    own = threading.local()
    with mock.patch.object(timing, "_round_trip", trip), mock.patch.object(timing, "_addition", lambda message: addition[own.rank]):
        found = in_threads(size, body)
    wrong = list[str]()
    for rank, f in enumerate(found):
        good = isinstance(f, timing.Links) and np.array_equal(f.latency, latency + latency.T) and np.array_equal(f.addition, addition) \
            and bool(np.allclose(f.inverse_bandwidth, cost + cost.T, rtol=1e-6, atol=0)) and f.hosts == (0,) * size
        wrong += [] if good else [f"rank {rank} holds {f}"]
    return measured(wrong, size)


def rules(rng: np.random.Generator) -> Measured:
    """What is recorded of a rule is what it chooses: at each power of two the algorithm of the last limit, which is another one than that
    before. An op with one algorithm and a group of one take `direct`. The text names each limit, and what was measured."""
    wrong, members = list[str](), 4
    plain = Rule(float(rng.uniform(1e-6, 1e-4)), float(rng.uniform(1e-11, 1e-9)), float(rng.uniform(1e-12, 1e-10)), 1 << 18)
    across = replace(plain, hosts=(0, 0, 2, 2), near_latency=plain.latency / 9, near_inverse_bandwidth=plain.inverse_bandwidth / 9)
    for rule in (plain, across):
        text = rule.text(members)
        for op in COSTS:
            together = 4 if rule is plain else 2
            limits, chosen = rule.limits(op, members), [rule.choose(op, members, n, together) for n in (0, *(1 << k for k in range(31)))]
            found = [[name for n, name in limits if n <= nbytes][-1] for nbytes in (0, *(1 << k for k in range(31)))]
            wrong += [] if found == chosen and limits[0][0] == 0 else [f"{op}: limits {limits} are not what is chosen"]
            names = [name for _, name in limits]
            wrong += [] if all(a != b for a, b in pairwise(names)) else [f"{op}: {limits}"]
            said = f"{op} " + ", ".join([names[0], *(f"from {n:,} bytes {name}" for n, name in limits[1:])])
            wrong += [] if said in text else [f"{said!r} is not in {text!r}"]
            wrong += [] if rule.choose(op, 1, 1 << 20, 1) == "direct" else [f"{op} of one rank is {rule.choose(op, 1, 1 << 20, 1)}"]
        wrong += [] if rule.choose("all_to_all", 4, 1 << 20, together) == "direct" else ["an op without a choice has one"]
        near = f" ({1e6 * rule.near_latency:.1f} us + {1e9 * rule.near_inverse_bandwidth:.3f} ns inside a host)"
        head = f"{1e6 * rule.latency:.1f} us + {1e9 * rule.inverse_bandwidth:.3f} ns a byte{near if rule is across else ''}, " \
               f"{1e9 * rule.addition:.3f} ns more where it is added; "
        wrong += [] if text.startswith(head) else [f"{text!r} does not begin with {head!r}"]
    return measured(wrong, 2 * len(COSTS) + 2)


def together(rng: np.random.Generator) -> Measured:
    """Of all ways in which up to six members lie on three hosts, and eight on two: they are taken to be together, k on each host, where
    each host has k of them, one after the other, and k is a power of two. Else each is on its own; on one host all are together."""
    wrong, cases = list[str](), 0
    for size, hosts in (*((size, 3) for size in range(1, 7)), (8, 2)):
        for layout in product(range(hosts), repeat=size):
            members, of = rng.permutation(size + 2)[:size].tolist(), rng.integers(hosts, size=size + 2).tolist()
            for rank, host in zip(members, layout):
                of[rank] = host
            k = layout.count(layout[0])
            whole = size % k == 0 and all(layout[i : i + k] == (layout[i],) * k and layout.count(layout[i]) == k for i in range(0, size, k))
            expected = size if k == size else k if whole and k in (1, 2, 4) else 1
            found, cases = Rule(hosts=tuple(of)).together(members), cases + 1
            wrong += [] if found == expected else [f"members on hosts {layout}: {found} together, not {expected}"]
        wrong += [] if Rule().together(range(size)) == size else ["on one host not all are together"]
    return measured(wrong, cases + 7)


# -- ranks of another launcher -----------------------------------------------------------------------------------------------------


def _error(call: Callable[[], object]) -> str:
    try:
        call()
        return ""
    except AlphaError as error:
        return f"{type(error).__name__}: {error}"


def meetings(rng: np.random.Generator) -> Measured:
    """The ranks of a host come to one segment, in any order, also where the first one is late; a rank that is there, or that the job has
    not, is told so; another user's, whoever says nothing, too little or too much, or goes away gets nothing and
    holds up nobody."""
    name, size, wrong = f"meet {int(rng.integers(1 << 60))}", int(rng.integers(3, 5)), list[str]()
    segment, order = Segment.create(size), [int(r) for r in rng.permutation(range(1, size))]
    got, texts = dict[int, int](), list[str]()

    def stranger(said: bytes = b"") -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(10.0)
        link.connect(rendezvous._name(name))
        if said:
            link.send(said)
        return link

    def heard(said: bytes) -> bytes:
        try:
            with stranger() as link:
                link.send(said)
                return link.recv(16)
        except ConnectionError:  # it went away without a look at what was said
            return b""

    def ranks() -> None:
        def asked(rank: int) -> None:
            found = rendezvous.ask(name, rank, 20.0)
            got[rank] = found.job
            found.close()
        first = threading.Thread(target=asked, args=(order[0],))  # it asks before anybody listens
        first.start()
        time.sleep(0.02)
        ready.set()
        first.join()
        texts.extend(_error(lambda rank=rank: rendezvous.ask(name, rank, 20.0)) for rank in (order[0], size))  # type: ignore[misc]
        own = struct.pack("<I", order[1])
        came = [heard(b"no"), heard(own + b"\0")]
        wrong.extend([] if came == [b"", b""] else [f"who says too little or too much hears {came}"])
        with stranger():  # while it says nothing another one asks, and has gone away when it is its turn
            stranger(own).close()
        heard(b"no")  # behind it
        with mock.patch.object(rendezvous.os, "getuid", lambda: -1):
            wrong.extend([] if heard(own) == b"" else ["another user gets a segment"])
        for rank in order[1:]:
            asked(rank)

    ready = threading.Event()
    thread = threading.Thread(target=ranks)
    thread.start()
    ready.wait(20)
    try:
        rendezvous.offer(segment, name, 20.0)
    except AlphaError as error:
        wrong.append(str(error))
    thread.join(30)
    wrong += [] if got == dict.fromkeys(order, segment.job) else [f"ranks {sorted(got)} got the segment"]
    for rank, text in zip((order[0], size), texts):
        wrong += [] if text.startswith(InputError.__name__) and f"rank {rank}\n" in text else [f"rank {rank} is told {text}"]
    segment.close()
    return measured(wrong, size + 6)


def unmet(rng: np.random.Generator) -> Measured:
    """Ranks that never ask are named, so is a first rank that never answers; two jobs do not meet under one name, and the first one of them
    goes on. Nothing stays open."""
    name, size, wrong = f"meet {int(rng.integers(1 << 60))}", int(rng.integers(4, 7)), list[str]()
    segment, before = Segment.create(size, here=range(size - 1)), descriptors()
    missing = ", ".join(map(str, range(1, size - 1)))
    for who, call, kind, said in (
        ("others", lambda: rendezvous.offer(segment, name, 0.03), RankError, f"ranks never came: {missing}\n"),
        ("the first", lambda: rendezvous.ask(name, 1, 0.03), RankError, "rank 0 never came"),
    ):
        text = _error(call)
        wrong += [] if text.startswith(f"{kind.__name__}: {said}") else [f"{who} never came: {text}"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(rendezvous._name(name))
        text = _error(lambda: rendezvous.offer(segment, name, 5.0))
        wrong += [] if text.startswith(BusyError.__name__) and "another job" in text else [f"two of one name: {text}"]
        other.listen(4)  # of whoever has the name, and says nothing
        text = _error(lambda: rendezvous.ask(name, 1, 0.05))
        wrong += [] if "rank 0 never came" in text else [f"a first rank that says nothing: {text}"]
    wrong += [f"{descriptors() - before} stay open"] if descriptors() - before else []
    found = at_once([lambda: rendezvous.offer(segment, name, 20.0),
                     *((lambda r=r: rendezvous.ask(name, r, 20.0).close()) for r in range(1, size - 1))])  # type: ignore[misc]
    wrong += [] if found == [None] * (size - 1) else [f"behind all that: {found}"]
    segment.close()
    return measured(wrong, 6)
