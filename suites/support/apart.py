"""Hosts that share nothing but a network: network namespaces of this machine (ip-netns(8)), for tests and commands.

Without a `Wire` each is joined by a veth pair to one bridge. With one, each has a TUN device, and a process of ours carries every IP packet
between them: it loses, delays, reorders and doubles packets as `tc netem` does, which many kernels lack, and cuts one way or both.
Needs root; `why_not` says what is missing. Files and processes are shared: hosts see the same disk and each other's numbers.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import warm
from warm import CLONE_NEWNET, ETC, NETNS

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
"""<linux/if_tun.h>."""
MTU = 1500


BOTH = ((0, 1), (1, 0))
"""Both ways between the first two hosts."""


@dataclass(frozen=True)
class Wire:
    """How packets travel. `loss`, `double`: shares of them; `delay_s`, and up to `jitter_s` more, which reorders; `cut`: (from, to) pairs
    of hosts between which none passes."""

    loss: float = 0.0
    double: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    cut: tuple[tuple[int, int], ...] = ()


def why_not(tun: bool = False) -> str:
    """'' where hosts can be made here; else what is missing."""
    if os.geteuid():
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "network namespaces need ip, of Debian's iproute2"
    if tun and not Path("/dev/net/tun").exists():
        return "packets on a wire of ours need /dev/net/tun"
    name = f"alpha-{os.getpid()}-probe"
    made = _ip("netns", "add", name)
    if made.returncode:
        return f"this machine makes no network namespaces: {made.stderr.strip()}"
    try:
        pair = _ip("-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
        return f"this machine makes no veth pairs: {pair.stderr.strip()}" if pair.returncode and not tun else ""
    finally:
        _ip("netns", "del", name)


class Hosts:
    """`count` hosts, with addresses `address(i)`; `known`: names of them, which all can look up. What runs in them ends with `close`."""

    def __init__(self, count: int, wire: Wire | None = None, known: Sequence[str] = ()) -> None:
        _sweep()
        self.names = [f"alpha-{os.getpid()}-{i}" for i in range(count)]
        self._switch, self._relay, self._control = f"alpha-{os.getpid()}-switch", 0, -1
        self._made, self._started = list[str](), list[subprocess.Popen[str] | warm.Process]()
        try:
            for name in self.names:
                self._namespace(name)
            if wire is None:
                self._join()
            else:
                self._carry(wire)
            for i, name in enumerate(self.names):
                _must("-n", name, "link", "set", "net0", "up", "mtu", str(MTU))
                _must("-n", name, "address", "add", f"{self.address(i)}/24", "dev", "net0")
                if known:
                    (ETC / name).mkdir(parents=True)
                    lines = ["127.0.0.1 localhost", *(f"{self.address(h)} {known[h]}" for h in range(len(known)))]
                    (ETC / name / "hosts").write_text("\n".join(lines) + "\n")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def address(host: int) -> str:
        """IPv4 address of a host."""
        return f"10.77.0.{host + 1}"

    def _namespace(self, name: str) -> None:
        _must("netns", "add", name)
        self._made.append(name)
        _must("-n", name, "link", "set", "lo", "up")

    def _join(self) -> None:
        """A veth pair from each host to one bridge."""
        self._namespace(self._switch)
        _must("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _must("-n", self._switch, "link", "set", "bridge0", "up")
        for i, name in enumerate(self.names):
            _must("-n", self._switch, "link", "add", f"to{i}", "type", "veth", "peer", "name", "net0", "netns", name)
            _must("-n", self._switch, "link", "set", f"to{i}", "master", "bridge0", "up")

    def _carry(self, wire: Wire) -> None:
        """A TUN device in each host, and one process between them."""
        tuns = [_tun(name) for name in self.names]
        read, self._control = os.pipe()
        self._relay = os.fork()
        if not self._relay:
            try:
                os.close(self._control)
                _relay(tuns, read, wire)
            finally:
                os._exit(0)
        for fd in (*tuns, read):
            os.close(fd)

    def change(self, wire: Wire) -> None:
        """From now on packets travel so."""
        os.write(self._control, json.dumps(asdict(wire)).encode() + b"\n")

    def start(self, host: int, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[str]:
        """Run a command in a host; options of subprocess.Popen."""
        process = subprocess.Popen(["ip", "netns", "exec", self.names[host], *command], text=True, **options)
        self._started.append(process)
        return process

    def begin(self, host: int, arguments: Sequence[object], environment: Mapping[str, str | None]) -> warm.Process:
        """Run what `python ARGUMENTS` runs in a host, from a warm interpreter; both its streams are `stdout`, to be read."""
        read, write = os.pipe()
        try:
            process = warm.start(arguments, environment=environment, namespace=self.names[host], stdout=write, stderr=write)
        finally:
            os.close(write)
        process.stdout = os.fdopen(read, "rb")
        self._started.append(process)
        return process

    def processes(self, host: int) -> list[int]:
        """Numbers of all processes in it."""
        return [int(n) for n in _ip("netns", "pids", self.names[host]).stdout.split()]

    def kill(self, host: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to every process in it, and to those that these start meanwhile."""
        for _ in range(3 if number == signal.SIGKILL else 1):
            for pid in self.processes(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def slow(self, host: int, share: float, seconds: float, period_s: float = 0.5) -> None:
        """For so long stop all processes of a host again and again, so that they have `share` of the time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.kill(host, signal.SIGSTOP)
            time.sleep(period_s * (1 - share))
            self.kill(host, signal.SIGCONT)
            time.sleep(period_s * share)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs in the hosts, and take them away."""
        for i, name in enumerate(self.names):
            if name in self._made:
                self.kill(i)
        for process in self._started:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if self._relay:
            os.kill(self._relay, signal.SIGKILL)
            os.waitpid(self._relay, 0)
            os.close(self._control)
            self._relay = 0
        while self._made:
            _remove(self._made.pop())


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def _must(*words: str) -> None:
    done = _ip(*words)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _remove(name: str) -> None:
    _ip("netns", "del", name)
    shutil.rmtree(ETC / name, ignore_errors=True)


def _sweep() -> None:
    """Take away what a process left that was killed."""
    for path in NETNS.glob("alpha-*-*") if NETNS.is_dir() else ():
        found = re.match(r"alpha-(\d+)-", path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            for pid in _ip("netns", "pids", path.name).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            _remove(path.name)


# -- packets -------------------------------------------------------------------------------------------------------------------


def _tun(namespace: str) -> int:
    """A TUN device net0 in a namespace: what is read from it was sent there, what is written arrives there."""
    libc, own = ctypes.CDLL(None, use_errno=True), os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(NETNS / namespace, os.O_RDONLY)
    try:
        if libc.setns(other, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"net0", IFF_TUN | IFF_NO_PI))
        return fd
    finally:
        libc.setns(own, CLONE_NEWNET)
        os.close(own)
        os.close(other)


def _relay(tuns: list[int], control: int, wire: Wire) -> None:
    """Carry packets for ever. A packet goes to the host of its destination address."""
    rng, due, number, said = random.Random(1), list[tuple[float, int, int, bytes]](), 0, b""
    places = {bytes(map(int, Hosts.address(i).split("."))): i for i in range(len(tuns))}
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        ready, _, _ = select.select([*tuns, control], [], [], wait)
        if control in ready:
            more = os.read(control, 1 << 16)
            if not more:
                return  # who made it has ended
            *lines, said = (said + more).split(b"\n")
            for line in lines:
                told = json.loads(line)
                wire = Wire(**{**told, "cut": tuple(map(tuple, told["cut"]))})
        now = time.monotonic()
        for source, tun in enumerate(tuns):
            if tun not in ready:
                continue
            with suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(tun, 1 << 16)
                    to = places.get(packet[16:20])
                    if to is None or packet[0] >> 4 != 4 or (source, to) in wire.cut or rng.random() < wire.loss:
                        continue
                    for _ in range(1 + (rng.random() < wire.double)):
                        number += 1
                        heapq.heappush(due, (now + wire.delay_s + rng.random() * wire.jitter_s, number, to, packet))
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, _, to, packet = heapq.heappop(due)
            with suppress(OSError):  # a queue that is full loses what comes, as any does
                os.write(tuns[to], packet)
