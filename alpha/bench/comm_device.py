"""`alpha bench comm --device`: collectives among GPUs of this host, by op and size, stand-alone and in a captured graph, beside NCCL and
PyTorch's symmetric memory where they are installed. Floor 8.

Ours and the peers' ranks are processes apart, and all live at once. Cases alternate block by block; a block's time is that of its slowest
rank, from events around many calls. The figure of a case is the median of its blocks.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from alpha.backends.cuda.kernels import collectives
from alpha.backends.cuda.kernels.collectives import Channel, How
from alpha.backends.cuda.lib import in_order
from alpha.bench.sizes import size_text
from alpha.comm.segment import Segment
from alpha.comm.watch import Deadlines
from alpha.comm.words import exchanged
from alpha.comm.world import WORLD, World
from alpha.cuda_runtime import Device, Span, capture, upload
from alpha.cuda_runtime.launch import LOADED
from alpha.cuda_runtime.peers import Peers, devices_of
from alpha.errors import InputError, MachineError
from alpha.train.engine import VISIBLE, visible_devices

SIZES = tuple(1 << k for k in range(10, 31, 2))
"""Bytes of an operand (of a gather's result): 1 KiB to 1 GiB."""
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send")
BLOCKS = 5
IN_GRAPH = 20


def bus(op: str, nbytes: int, size: int, us: float) -> float:
    """Bus bandwidth in GB/s, as nccl-tests defines it: bytes that cross each link, whatever the algorithm."""
    factor = {"all_reduce": 2 * (size - 1) / size, "broadcast": 1.0, "send": 1.0}.get(op, (size - 1) / size)
    return factor * nbytes / us / 1e3


@dataclass
class Case:
    """One op at one size. `us`: name of who ran it -> microseconds of a call, a block each."""

    op: str
    nbytes: int
    graph: bool
    us: dict[str, list[float]] = field(default_factory=dict)

    def figure(self, who: str) -> float:
        return median(self.us[who])


class Ranks:
    """Processes that answer lines of JSON: the same question to all, the slowest one's answer. MachineError once one has ended, though
    others wait for it; then none is left."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.processes = processes
        self.told = self._lines()

    def _lines(self) -> list[dict[str, Any]]:
        """What each says next, which none has begun to say before it was asked."""
        found = dict[int, dict[str, Any]]()
        with selectors.DefaultSelector() as waiting:
            for i, p in enumerate(self.processes):
                waiting.register(p.stdout, selectors.EVENT_READ, i)  # type: ignore[arg-type]
            while len(found) < len(self.processes):
                for key, _ in waiting.select():
                    try:
                        found[key.data] = self._line(self.processes[key.data])
                    except MachineError:
                        for p in self.processes:
                            p.kill()
                        self.close()
                        raise
                    waiting.unregister(key.fileobj)
        return [found[i] for i in range(len(self.processes))]

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise MachineError("a rank of the benchmark ended", came=f"exit status {process.wait(10)}", expected="an answer",
                               do="its words stand above")
        return dict(json.loads(line))

    def ask(self, **question: Any) -> dict[str, Any]:
        for p in self.processes:
            assert p.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, as its answer says
                p.stdin.write(json.dumps(question) + "\n")
                p.stdin.flush()
        answers = self._lines()
        wrong = [a["error"] for a in answers if "error" in a]
        return {"error": wrong[0]} if wrong else {**answers[0], "us": max(a.get("us", 0.0) for a in answers)}

    def close(self) -> None:
        for p in self.processes:
            assert p.stdin is not None
            with suppress(BrokenPipeError):
                p.stdin.close()
        for p in self.processes:
            try:
                p.wait(20)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
            assert p.stdout is not None
            p.stdout.close()


def ours(ranks: int) -> Ranks:
    """Our ranks, each with the GPU of its number among those that are visible, which are the peers' too."""
    segment, devices = Segment.create(ranks), visible_devices()[:ranks]
    text = "import sys; from alpha.bench.comm_device import member; member(*map(int, sys.argv[1:]))"
    return Ranks([subprocess.Popen([sys.executable, "-c", text, str(segment.fd), str(rank), str(ranks)], pass_fds=[segment.fd], text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   env={**os.environ, VISIBLE: ",".join(devices[int(i)] for i in devices_of(rank, ranks).split(","))})
                  for rank in range(ranks)])


def peers(ranks: int, python: str) -> Ranks:
    """The peers' ranks, run by a Python that has PyTorch."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    path = str(Path(__file__).with_name("comm_peers.py"))
    return Ranks([subprocess.Popen([python, path, str(rank), str(ranks), port], text=True, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE) for rank in range(ranks)])


def member(fd: int, rank: int, size: int) -> None:
    """One of our ranks, in a process of its own: {op, nbytes, how, graph, calls} -> {us}."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with World(Segment(fd), rank, deadlines=Deadlines(stall=60.0)) as world:
        group = world.group(WORLD)
        device = Device.open(0)
        memory = Peers(rank, size, partial(exchanged, group))
        channel = Channel(memory)
        x, y = (memory.arena(max(SIZES)) for _ in range(2))
        block = (np.random.default_rng(rank).standard_normal(1 << 22).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for arena in (x, y):
            for start in range(0, arena.nbytes, block.nbytes):
                upload(Span(arena.address + start, min(block.nbytes, arena.nbytes - start)), block)
        stream, kept = device.stream(), dict[str, Any]()
        print(json.dumps({"ready": device.properties.name}), file=out, flush=True)
        for line in sys.stdin:
            ask = json.loads(line)
            if ask["op"] == "loaded":
                print(json.dumps({"loaded": {str(source): digest for source, digest in LOADED.items()}}), file=out, flush=True)
                continue
            key = json.dumps({k: v for k, v in ask.items() if k != "calls"})
            try:
                if key not in kept:
                    run = _call(channel, ask["op"], ask["nbytes"], How(**ask["how"]) if ask.get("how") else None, x.address, y.address)
                    kept[key] = run
                    if ask["graph"]:
                        kept[key] = capture(in_order([run] * ask["graph"]), stream).launch
                us = _timed(device, channel, stream, kept[key], ask["calls"]) / max(ask["graph"], 1)
                channel.check()
                print(json.dumps({"us": us}), file=out, flush=True)
            except Exception as error:
                print(json.dumps({"error": f"{type(error).__name__}: {error}"[:600]}), file=out, flush=True)
        kept.clear()
        memory.close()


def _timed(device: Device, channel: Channel, stream: Any, run: Any, calls: int) -> float:
    for _ in range(3):
        run(stream)
    stream.synchronize()
    channel.peers.exchange(b"warm")
    start, end = device.event(), device.event()
    start.record(stream)
    for _ in range(calls):
        run(stream)
    end.record(stream)
    end.synchronize()
    return 1e3 * float(end.time_since(start)) / calls


def _call(channel: Channel, op: str, nbytes: int, how: How | None, x: int, y: int) -> Any:
    n, count = channel.size, nbytes // 2
    if op == "all_reduce":
        return collectives.all_reduce(channel, x, x, count, "bf16", reduce="average", how=how)
    if op == "reduce_scatter":
        return collectives.reduce_scatter(channel, x, y, count // n, "bf16", how=how)
    if op == "all_gather":
        return collectives.all_gather(channel, x, y, count // n, "bf16", how=how)
    if op == "broadcast":
        return collectives.broadcast(channel, x, x, count, "bf16", root=0, how=how)
    if op == "all_to_all":
        return collectives.all_to_all(channel, x, y, count // n, "bf16", how=how)
    if op == "send":
        return collectives.send(channel, x, count, "bf16", to=1, how=how) if channel.me == 0 else \
            collectives.receive(channel, x, count, "bf16", source=0, how=how) if channel.me == 1 else collectives.pass_by(channel)
    return collectives.barrier(channel)


def calls_of(nbytes: int, graph: int) -> int:
    """Calls of a block: about 10 ms of them."""
    us = max(8.0, nbytes / 3e5)
    return max(2, min(200, round(1e4 / us / max(graph, 1))))


def graph_of(nbytes: int) -> int:
    """Calls in one graph."""
    return IN_GRAPH if nbytes <= 1 << 24 else 2


@dataclass
class Result:
    """All cases among `ranks` GPUs. `peer`: versions of the peers; `loaded`: text of a compiled file -> its digest; `left`: names of cases
    that were not measured, for ours failed or the budget was spent."""

    ranks: int
    cases: list[Case]
    peer: str
    loaded: dict[str, str]
    left: list[str] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """What a record keeps: of each case a line for each who ran it, ours first, blocks in ns, and the ratio of its time to ours."""
        def ours_first(who: str) -> tuple[bool, str]:
            return who != "ours", who

        return {"ranks": self.ranks, **({"left": self.left} if self.left else {}), "cases": [{
            "name": _name(c.op, c.nbytes, c.graph), "op": c.op, "nbytes": c.nbytes, "graph": c.graph,
            "rows": [_line(who, c.us[who], c.us["ours"]) for who in sorted(c.us, key=ours_first)]} for c in self.cases]}


def _name(op: str, nbytes: int, graph: bool) -> str:
    return f"{op} {nbytes} {'graph' if graph else 'alone'}"


def _line(who: str, us: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    ratios = sorted(a / b for a, b in zip(us, beside, strict=True))
    return {"name": who, "ns": 1e3 * median(us), "ratio": [ratios[0], exp(median(map(log, ratios))), ratios[-1]],
            "blocks": [[1e3 * t] for t in us], "discarded": 0}


def bench(ranks: int, pattern: str = "*", *, blocks: int = BLOCKS, budget: float | None = None, python: str | None = None,
          sizes: Sequence[int] = SIZES, done: Callable[[Case], None] = lambda case: None) -> Result:
    """Every op of this name at every size, in a graph, and sums stand-alone too. `python`: has PyTorch, the peer; None: ours alone.
    InputError for a pattern that gives nothing."""
    cases = [(op, nbytes, graph) for op in OPS if fnmatchcase(op, pattern) for nbytes in sizes
             for graph in ((True, False) if op == "all_reduce" else (True,))]
    if not cases:
        raise InputError("no such collective among GPUs", came=pattern, expected=", ".join(OPS))
    return measure(cases, ranks, blocks=blocks, budget=budget, python=python, done=done)


def show(case: Case, ranks: int, console: Console) -> None:
    """One line of a case."""
    size, ours = size_text(case.nbytes), case.figure("ours")
    rate = bus(case.op, case.nbytes, ranks, ours)
    console.print(f"{case.op:<15}{size:>9} {'graph' if case.graph else 'alone'}  {ours:10,.1f} us {rate:6.1f} GB/s" + "".join(
        f"   {who} {case.figure(who):,.1f} us ({case.figure(who) / ours:.2f})" for who in case.us if who != "ours"))


def measure(cases: Sequence[tuple[str, int, bool]], ranks: int, *, blocks: int = BLOCKS, budget: float | None = None,
            python: str | None = None, hows: Callable[[str, int], Mapping[str, How | None]] = lambda op, nbytes: {"ours": None},
            done: Callable[[Case], None] = lambda case: None) -> Result:
    """`cases`: (op, bytes, in a graph). `hows`: name -> how, of what of ours takes turns: for who looks for a table. `done` is told of
    each case. Who fails has no figure of it. MachineError where a rank of ours ends; peers of which one ends have no more figures."""
    mine, theirs, start = ours(ranks), None, time.monotonic()
    found, left, told = list[Case](), list[str](), dict[str, Any]()
    try:
        if python:
            theirs = peers(ranks, python)
            told = theirs.told[0]
        for op, nbytes, graphed in cases:
            if budget is not None and time.monotonic() - start > budget:
                left.append(_name(op, nbytes, graphed))
                continue
            case = Case(op, nbytes, graphed)
            turns: dict[str, tuple[Ranks, dict[str, Any]]] = {}
            graph = graph_of(nbytes) if graphed else 0
            asked = {"nbytes": nbytes, "graph": graph, "calls": calls_of(nbytes, graph)}
            for name, how in hows(op, nbytes).items():
                turns[name] = mine, {**asked, "op": op, "how": how and asdict(how)}
            if theirs is not None:
                turns["nccl"] = theirs, {**asked, "op": f"nccl {op}"}
                if op == "all_reduce" and nbytes <= 64 << 20:
                    turns |= {f"symmetric {kind}": (theirs, {**asked, "op": f"symmetric {kind}"}) for kind in ("one_shot", "two_shot")}
            for block in range(blocks):
                order = list(turns)
                random.Random(f"{op} {nbytes} {graphed} {block}").shuffle(order)  # another one in each case
                for name in order:
                    ranks_of, question = turns[name]
                    answer: dict[str, Any]
                    try:
                        answer = ranks_of.ask(**question) if ranks_of is mine or theirs is not None else {"error": "its ranks have ended"}
                    except MachineError as error:
                        if ranks_of is mine:
                            raise
                        theirs, answer = None, {"error": f"{error.what}: {error.came}"}
                    if "error" in answer:
                        print(op, nbytes, name, answer["error"], file=sys.stderr)
                        turns.pop(name)
                        case.us.pop(name, None)
                        continue
                    case.us.setdefault(name, []).append(answer["us"])
            if not any(name in case.us for name in hows(op, nbytes)):
                left.append(_name(op, nbytes, graphed))  # ours failed, and standard error says why
                continue
            found.append(case)
            done(case)
        loaded = mine.ask(op="loaded")["loaded"]
    finally:
        mine.close()
        if theirs is not None:
            theirs.close()
    return Result(ranks, found, f"PyTorch {told['ready']}, NCCL {told['nccl']}" if told else "", loaded, left)
