"""Faults of ranks on GPUs, by the number: who is named, how soon, whether the others' devices stay usable, and the bits after a restart.

    python suites/support/device_rank_faults.py OUT.json [--each 25] [--restarts 5] [--ranks 2] [--seconds 240] [--jobs 6] [--dry]

On a machine with a GPU for each rank, in processes that are warm (steps of collectives have run): a rank is killed, stopped, or loses its
context while the others' devices wait for it inside a collective; it comes late and is waited for; a captured graph is aborted while its
collective waits. Behind each, `alpha lab` of a small model meets the same fault in the middle of its steps, is started again where it was
lost, and must end in the bits of a run that nothing befell. `waits`: whether other threads of a process run while it waits for its device.
`--dry`: on emulated GPUs, which proves this script and times nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import xxhash

from alpha.backends.cuda.lib import in_order
from alpha.backends.cuda.ranks import CudaRank
from alpha.checkpoint import folders
from alpha.comm.watch import Deadlines
from alpha.comm.words import exchanged
from alpha.comm.world import WORLD, World
from alpha.cuda_runtime import Arena, CudaError, Device, Kernel, Span, _bindings, capture, compile_kernel, download, mark, upload
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.peers import Peers, devices_of
from alpha.errors import RankError
from alpha.gates.contracts import cuda_ranks, device_ranks
from alpha.gates.contracts.engine import child_environment
from alpha.gates.contracts.ranks.members import Members
from alpha.profile.store import read
from alpha.registry.gpu import asked, gpu_class
from alpha.train.engine import VISIBLE

LIMITS = Deadlines(stall=1.0, abort=1.0)
"""A rank that gets on with nothing is given up after a second here; 5 s by default."""
BOUND_S = 3.0
"""From the fault to the report at most: the deadline, and what a machine with other processes on it takes."""
WARM, MOST = 3, 200
"""Steps before the fault, and at most."""
STRUCK = ("killed", "stopped", "context lost")
PLANTS = {"killed": "kill", "stopped": "stop", "context lost": "context", "slowed": "slow", "aborted": "abort"}
HERE = Path(__file__).parent

RUN = """
[run]
name = "faults"
out = "{folder}/runs"
[model]
family = "gpt"
layers = 1
width = 128
heads = 2
[data]
corpus = "{folder}/text"
tokenizer = "bpe"
vocab = 264
validation = 0.3
sequence = 32
cache = "{folder}/cache"
[train]
steps = 12
batch = {batch}
shards = {ranks}
micro_batch = 2
precision = "bf16"
eval_every = 0
eval_windows = 4
final_windows = 4
checkpoint_every = 3
keep = 9
profile = 0
[optim]
lr = 1e-2
warmup = 2
[machine]
backend = "cuda"
"""


# -- in each rank ------------------------------------------------------------------------------------------------------------------


@contextmanager
def device(world: World, memory: str) -> Iterator[Any]:
    """This rank's GPU, and its kernels. `memory`: a file that is all GPUs' memory where they are emulated, '' for real ones."""
    if not memory:
        os.environ[VISIBLE] = devices_of(world.rank, world.size)
        Device.open(0)
        yield cuda_ranks.kernels()
        return
    from emulated_gpu import emulated
    from emulated_peers import EACH, Memory, emulated_peers

    with emulated_peers(Memory(world.size, EACH, Path(memory)), world.rank, nvcc.KERNELS):
        yield emulated(cuda_ranks.kernels())


def lose_context(emulated: bool) -> None:
    """Raise what a driver raises that has lost its context; on a GPU it has: a kernel wrote to an address that is nobody's."""
    if emulated:
        raise CudaError("the driver call cuStreamSynchronize failed", came="CUDA_ERROR_ILLEGAL_ADDRESS (700): planted")
    stream = Device.open(0).stream()
    places = (Span(1 << 12, 8), Span(1 << 12, 4), ctypes.c_uint32(mark.PLACES))
    Kernel(compile_kernel(mark.SOURCE), "mark").prepare((1, 1, 1), (1, 1, 1), places)(stream)
    stream.synchronize()
    raise AssertionError("a kernel wrote to nobody's memory, and the driver says nothing")


def warmed(world: World, memory: str) -> bool:
    """All that a trial runs is compiled and was loaded once, so that no rank waits for another that compiles."""
    with device(world, memory) as kernels:
        if not memory:
            compile_kernel(mark.SOURCE)
        with CudaRank(cuda_ranks.program(world.size), kernels, world, patience_s=60.0) as executor:
            executor.enqueue(("beside", "take"), [cuda_ranks.given(0, 0, world.rank), {}])
            executor.outputs("take")
        bench = device_ranks.Bench(Peers(world.rank, world.size, partial(exchanged, world.group(WORLD))), 60.0)
        for how in _ways(memory):
            bench.run(bench.made("all_reduce", bench.x.address, bench.y.address, 8192, "f32", how, "sum", 0))
        bench.run(bench.meet)
        bench.channel.peers.close()
    return True


def _ways(memory: str) -> list[Any]:
    """How sums may run. Emulated blocks run one after the other, in an order that a member with more launches than another does not
    share."""
    return [h for h in device_ranks.hows("all_reduce", 8192, "f32", False) if h.blocks == 1 or not memory]


def struck(world: World, what: str, victim: int, late: float, seed: int, note: str, memory: str) -> dict[str, Any]:
    """Steps of collectives; the victim is struck `late` seconds after the others' devices have begun to wait for it."""
    names, error, step, bad = ("beside", "take"), None, -1, 0
    with ExitStack() as stack:
        try:
            with world.patient(60.0):  # its device may start later than the others'
                kernels = stack.enter_context(device(world, memory))
                rank = CudaRank(cuda_ranks.program(world.size), kernels, world, patience_s=60.0)
            with rank as executor:
                for step in range(MOST):
                    world.step = step
                    if step == WARM and world.rank == victim:
                        time.sleep(late)
                        Path(note).write_text(str(time.monotonic()))
                        _be(what, bool(memory))
                    executor.enqueue(names, [cuda_ranks.given(seed, step, world.rank), {}])
                    got = {name: x for plan in names for name, x in executor.outputs(plan).items()}
                    want = cuda_ranks.wanted(seed, step, range(world.size), world.rank)
                    bad += sum(got[name].tobytes() != want[name].tobytes() for name in got)
        except RankError as e:
            error, told = e, time.monotonic()
        if error is None:
            return {"missed": True}
        return {"rank": error.rank, "op": error.op, "step": error.step, "text": str(error).splitlines()[0], "told": told, "bad": bad,
                "usable": _usable()}


def _be(what: str, emulated: bool) -> None:
    if what == "context lost":
        lose_context(emulated)
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[what])
    time.sleep(60)


def _usable() -> bool:
    """Whether this rank's device still copies and replays graphs."""
    fresh, block = Arena(1 << 20, name="after a fault"), np.arange(1 << 18, dtype=np.uint32)
    span, stream = Span(fresh.address, fresh.nbytes), Device.open(0).stream()
    upload(span, block)
    sound = np.array_equal(download(span, block.shape, np.uint32), block)
    at = fresh.address
    graph = capture(lambda s: _bindings.check("cuMemsetD8Async", _bindings.driver().cuMemsetD8Async(at, 7, 4096, int(s.handle))), stream)
    graph.launch(stream)
    stream.synchronize()
    return sound and bool((download(span, (4096,), np.uint8) == 7).all())


def slowed(world: World, trials: int, seed: int, memory: str) -> list[dict[str, Any]]:
    """A rank comes late to a step, the others' devices wait inside a collective: no error, the promised bits."""
    rng, found, names = random.Random(seed), [], ("beside", "take")
    with ExitStack() as stack:
        with world.patient(60.0):
            kernels = stack.enter_context(device(world, memory))
            executor = stack.enter_context(CudaRank(cuda_ranks.program(world.size), kernels, world, patience_s=60.0))
        for step in range(trials):
            late, seconds = rng.randrange(world.size), rng.uniform(0.05, 0.6)
            world.step = step
            world.exchange(b"begin")
            began = time.monotonic()
            if world.rank == late:
                time.sleep(seconds)
            executor.enqueue(names, [cuda_ranks.given(seed, step, world.rank), {}])
            got = {name: x for plan in names for name, x in executor.outputs(plan).items()}
            want = cuda_ranks.wanted(seed, step, range(world.size), world.rank)
            found.append({"late": seconds, "waited": time.monotonic() - began, "was_late": world.rank == late,
                          "bits": all(got[name].tobytes() == want[name].tobytes() for name in got)})
    return found


def aborted(world: World, trials: int, seed: int, memory: str) -> list[dict[str, Any]]:
    """A captured graph of sums waits for the last rank and is aborted; then, behind a reset, sums have the promised bits."""
    found = list[dict[str, Any]]()
    ways = _ways(memory)
    with device(world, memory):
        bench = device_ranks.Bench(Peers(world.rank, world.size, partial(exchanged, world.group(WORLD))), 30.0)
        other, last = bench.device.stream(), world.size - 1
        for trial in range(trials):
            how, seconds = ways[trial % len(ways)], 0.0
            made = bench.made("all_reduce", bench.x.address, bench.y.address, 8192, "f32", how, "sum", 0)
            if world.rank != last:
                sums = in_order([made] * 5)
                launch = sums if memory else capture(sums, bench.stream).launch  # an emulated launch runs where it is called
                timer = threading.Timer(0.02, _aborting, (bench, other, _context()))
                timer.start()
                began = time.monotonic()
                launch(bench.stream)
                bench.stream.synchronize()
                seconds = time.monotonic() - began - 0.02
                timer.join()
            blamed = bench.channel.lost() is not None
            bench.channel.reset()
            wrong = device_ranks._sound(bench, "all_reduce", how, seed + trial, calls=1)
            found.append({"seconds": seconds, "waited": world.rank != last, "blamed": blamed, "usable": _usable(), "bits": not wrong})
        bench.channel.peers.close()
    return found


def _context() -> Any:
    return _bindings.check("cuCtxGetCurrent", _bindings.driver().cuCtxGetCurrent())


def _aborting(bench: device_ranks.Bench, stream: Any, context: Any) -> None:
    _bindings.check("cuCtxSetCurrent", _bindings.driver().cuCtxSetCurrent(context))
    bench.channel.abort(stream)


def waits(world: World, memory: str) -> dict[str, float]:
    """Way to wait for the device -> the longest that another thread of this process did not run meanwhile, in ms. The first rank waits,
    half a second, for the last."""
    gaps: dict[str, float] = {}
    with device(world, memory):
        bench = device_ranks.Bench(Peers(world.rank, world.size, partial(exchanged, world.group(WORLD))), 30.0)
        event, host = bench.device.event(), _bindings.pycuda_driver().pagelocked_empty((1024,), np.uint8)
        ways: dict[str, Callable[[], object]] = {
            "stream": bench.stream.synchronize, "event": event.synchronize,
            "context": lambda: _bindings.check("cuCtxSynchronize", _bindings.driver().cuCtxSynchronize()),
            "context of pycuda": bench.device.synchronize,
            "graph behind a full queue": partial(_queued, bench)}
        for name, wait in ways.items():
            bench.channel.peers.exchange(b"begin")
            if world.rank == world.size - 1:
                time.sleep(0.5)
            with _ticking() as ticks:
                bench.meet(bench.stream)
                if world.rank == 0:
                    _bindings.pycuda_driver().memcpy_dtoh_async(host, bench.x.address, bench.stream)
                event.record(bench.stream)
                wait()
            bench.stream.synchronize()
            gaps[name] = 1e3 * max(b - a for a, b in pairwise(ticks))
        bench.channel.peers.close()
    return gaps


def _queued(bench: device_ranks.Bench) -> None:
    """More launches than a queue of the driver holds, behind one that waits."""
    for _ in range(2000):
        _bindings.check("cuMemsetD8Async", _bindings.driver().cuMemsetD8Async(bench.y.address, 0, 64, int(bench.stream.handle)))
    bench.stream.synchronize()


@contextmanager
def _ticking() -> Iterator[list[float]]:
    ticks, done = [time.monotonic()], threading.Event()

    def tick() -> None:
        while not done.wait(1e-3):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield ticks
    finally:
        done.set()
        thread.join()
        ticks.append(time.monotonic())


# -- the campaign ------------------------------------------------------------------------------------------------------------------


class Campaign:
    """What is asked of a machine, and what came of it. `spent`: whether its time is over."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.end = args, folder, time.monotonic() + args.seconds
        self.memory = iter(range(1 << 30))

    def spent(self) -> bool:
        return time.monotonic() > self.end

    def gpus(self) -> str:
        """The memory of emulated GPUs of one job."""
        if not self.args.dry:
            return ""
        from emulated_peers import shared_file

        made = self.folder / f"gpus-{next(self.memory)}"
        made.mkdir()
        return str(shared_file(made, self.args.ranks))

    def one(self, server: Members, what: str, rng: random.Random) -> dict[str, Any]:
        """One rank that is struck: what the others said."""
        victim, memory = rng.randrange(self.args.ranks), self.gpus()
        note = self.folder / f"note-{rng.randrange(1 << 60)}"
        ended = server.run(struck, self.args.ranks, what, victim, rng.uniform(0.01, 0.1), rng.randrange(1 << 30), str(note), memory,
                           limit_s=60.0, deadlines=LIMITS)
        if memory:
            Path(memory).unlink()
        others = [e.result for i, e in enumerate(ended) if i != victim]
        if not note.exists() or not all(others):
            return {"wrong": "; ".join(e.error.strip().splitlines()[-1] for e in ended if e.error) or "no answer"}
        at, told = float(note.read_text()), [o for o in others if "missed" not in o]
        ok = len(told) == len(others) and all(
            o["rank"] == victim and o["op"] in ("", "all_reduce") and o["step"] == WARM and not o["bad"] for o in told)
        return {"victim": victim, "named": ok, "seconds": max((o["told"] - at for o in told), default=float("inf")),
                "usable": all(o.get("usable") for o in others), "text": told[0]["text"] if told else "",
                "op": told[0]["op"] if told else ""}

    def strikes(self, servers: list[Members], rng: random.Random) -> dict[str, Any]:
        """Each kind in turn, several jobs at a time."""
        found: dict[str, list[dict[str, Any]]] = {what: [] for what in STRUCK}
        todo = [what for _ in range(self.args.each) for what in STRUCK]
        draws = [random.Random(rng.randrange(1 << 60)) for _ in todo]

        def work(server: Members) -> None:
            while todo and not self.spent():
                what = todo.pop(0)
                found[what].append(self.one(server, what, draws.pop()))

        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(work, servers))
        return {what: _summed(rows) for what, rows in found.items()}

    def many(self, server: Members, function: Callable[..., Any], rng: random.Random) -> list[Any]:
        """A job of many trials: what its ranks returned; AssertionError with the words of one that failed."""
        memory = self.gpus()
        ended = server.run(function, self.args.ranks, self.args.each, rng.randrange(1 << 30), memory, limit_s=120.0,
                           deadlines=Deadlines(stall=30.0) if function is aborted else LIMITS)
        if wrong := [e.error for e in ended if e.error or not e.result]:
            raise AssertionError("\n".join(wrong))
        return [e.result for e in ended]

    def slow(self, server: Members, rng: random.Random) -> dict[str, Any]:
        rows = list(zip(*self.many(server, slowed, rng)))
        waited = [all(x["waited"] >= x["late"] for x in row) for row in rows]
        return {"trials": len(rows), "waited_for": sum(waited), "false_alarms": 0, "bits": sum(all(x["bits"] for x in row) for row in rows),
                "late_s": [min(r[0]["late"] for r in rows), max(r[0]["late"] for r in rows)]}

    def aborts(self, server: Members, rng: random.Random) -> dict[str, Any]:
        rows = list(zip(*self.many(server, aborted, rng)))
        times = [x["seconds"] for row in rows for x in row if x["waited"]]
        return {"trials": len(rows), "ended": len(rows), "blamed": sum(any(x["blamed"] for x in row) for row in rows),
                "usable": sum(all(x["usable"] for x in row) for row in rows), "bits": sum(all(x["bits"] for x in row) for row in rows),
                "seconds_median": median(times), "seconds_longest": max(times)}

    # -- whole runs ------------------------------------------------------------------------------------------------------------------

    def lab(self, name: str, ranks: int, **job: Any) -> dict[str, Any]:
        """`alpha lab` of the small model in a process of its own: code, seconds, words, and its bits."""
        began, place = time.monotonic(), self.folder / f"job-{name}"
        place.mkdir()
        words = ["lab", str(self.folder / "run.toml"), "--set", f"run.name={name}", "--nproc", str(ranks), "--restarts", "2"]
        job = {**job, "gpus": self.args.ranks, "real": not self.args.dry, "once": True}
        done = subprocess.run([sys.executable, str(HERE / "emulated_launch.py"), str(place), json.dumps(job), "--", *words],
                              capture_output=True, text=True, timeout=300, check=False, env=child_environment())
        return {"code": done.returncode, "seconds": time.monotonic() - began, "text": (done.stderr + done.stdout).strip()[-600:],
                "starts": 1 + done.stderr.count("from the "), "bits": _bits(self.folder / "runs" / name)}

    def restarts(self, rng: random.Random) -> dict[str, Any]:
        """Each fault in whole runs, several at a time, beside one that nothing befell."""
        (self.folder / "run.toml").write_text(RUN.format(folder=self.folder.as_posix(), ranks=self.args.ranks, batch=4 * self.args.ranks))
        draw, words = random.Random(1), "def return self value None import for in".split()
        (self.folder / "text").mkdir()
        for i in range(12):
            (self.folder / "text" / f"{i}.txt").write_text(" ".join(draw.choices(words, k=900)))
        calm = self.lab("calm", self.args.ranks)
        assert calm["code"] == 0 and calm["bits"], calm["text"]
        todo = [(f"{plant}-{i}", what, plant) for i in range(self.args.restarts) for what, plant in PLANTS.items()]
        found: dict[str, list[dict[str, Any]]] = {what: [] for what in PLANTS}

        def run(one: tuple[str, str, str]) -> None:
            name, what, plant = one
            if not self.spent():
                made = self.lab(name, self.args.ranks, plant=plant, victim=rng.randrange(self.args.ranks), step=rng.randrange(4, 11))
                found[what].append({**made, "same": made["bits"] == calm["bits"]})

        with ThreadPoolExecutor(max(1, self.args.jobs // 2)) as pool:
            list(pool.map(run, todo))
        expected = {what: 1 if what == "slowed" else 2 for what in PLANTS}
        return {"undisturbed_s": calm["seconds"], **{what: {
            "runs": len(rows), "ended_well": sum(r["code"] == 0 for r in rows), "same_bits": sum(r["same"] for r in rows),
            "started_as_expected": sum(r["starts"] == expected[what] for r in rows),
            "seconds_longest": max((r["seconds"] for r in rows), default=0.0),
            "wrong": [r["text"] for r in rows if r["code"] or not r["same"]][:2]} for what, rows in found.items()}}


def _bits(run: Path) -> dict[str, Any] | None:
    """Losses of all steps, and a hash of each kind of state at the end."""
    if not (run / "metrics.sqlite").exists():
        return None
    steps = folders.steps(run / "checkpoints")
    state = folders.read(folders.at(run / "checkpoints", steps[-1])) if steps else {}
    return {"steps": [list(x) for x in sorted(read(run / "metrics.sqlite", "step_metrics", "step, loss, norm, lr"))],
            "state": {kind: xxhash.xxh3_128_hexdigest(x.data) for kind, (_, x) in state.items()}}


def _summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    sound = [r for r in rows if "wrong" not in r]
    times = [r["seconds"] for r in sound] or [float("inf")]
    return {"trials": len(rows), "named": sum(r["named"] for r in sound), "usable": sum(r["usable"] for r in sound),
            "in_time": sum(t <= LIMITS.stall + BOUND_S for t in times), "seconds_median": median(times), "seconds_longest": max(times),
            "in_a_collective": sum(r["op"] == "all_reduce" for r in sound), "said": sound[0]["text"] if sound else "",
            "wrong": [r.get("wrong") or r["text"] for r in rows if "wrong" in r or not (r["named"] and r["usable"])][:3]}


def problems(found: dict[str, Any]) -> list[str]:
    """What of the faults did not go as it must; [] for a sound machine."""
    said = []
    for what in STRUCK:
        f = found[what]
        if not f["trials"] or not f["trials"] == f["named"] == f["usable"] == f["in_time"]:
            said.append(f"{what}: {f['trials']} trials, {f['named']} named, {f['usable']} usable, {f['in_time']} in time: {f['wrong']}")
    for what, held in (("slowed", ("waited_for", "bits")), ("aborted", ("ended", "usable", "bits"))):
        f = found[what]
        if any(f[name] != f["trials"] for name in held) or f.get("blamed"):
            said.append(f"{what}: {f}")
    for what in PLANTS if found["restarts"] else ():
        f = found["restarts"][what]
        if not f["runs"] or not f["runs"] == f["ended_well"] == f["same_bits"] == f["started_as_expected"]:
            said.append(f"restarts, {what}: {f}")
    return said + [f"waiting by {way} holds other threads for {ms:.0f} ms" for way, ms in found["waits"].items() if ms > 250]


def campaign(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng, began, c = random.Random(args.seed), time.monotonic(), Campaign(args, folder)
    servers = [Members(apart=True) for _ in range(args.jobs)]
    try:
        patient, memory = Deadlines(stall=180.0), c.gpus()
        ready = servers[0].run(warmed, args.ranks, memory, limit_s=180.0, deadlines=patient)
        assert all(e.result for e in ready), "\n".join(e.error for e in ready)
        memory, c.end = c.gpus(), time.monotonic() + args.seconds
        held = servers[0].run(waits, args.ranks, memory, limit_s=60.0, deadlines=Deadlines(stall=30.0))
        assert held[0].result, held[0].error
        found: dict[str, Any] = {"waits": held[0].result}
        found["slowed"], found["aborted"] = c.slow(servers[0], rng), c.aborts(servers[0], rng)
        with ThreadPoolExecutor(1) as beside:
            restarts = beside.submit(c.restarts, rng) if args.restarts else None
            found |= c.strikes(servers[: max(1, args.jobs - args.jobs // 2)], rng)
            found["restarts"] = restarts.result() if restarts else {}
    finally:
        for server in servers:
            server.close()
    here = gpu_class(args.ranks)
    found |= {"ranks": args.ranks, "hardware": "emulated" if args.dry or here is None else here.key, "driver": asked().driver,
              "seed": args.seed, "seconds": time.monotonic() - began}
    return {**found, "problems": problems(found)}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    for name, default in (("each", 25), ("restarts", 5), ("ranks", 2), ("seconds", 240), ("jobs", 6), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dry", action="store_true")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    if not args.dry and len(asked().gpus) < args.ranks:
        print(f"NOT_RUN: {args.ranks} ranks want a GPU each: {asked().why or f'{len(asked().gpus)} here'}", file=sys.stderr)
        return 3
    folder = Path(tempfile.mkdtemp(prefix="alpha-faults-"))
    try:
        found = campaign(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in found.items() if k != "restarts"}, indent=1))
    print("\n".join(found["problems"]) or "all as it must be")
    return int(bool(found["problems"]))


if __name__ == "__main__":
    raise SystemExit(main())
