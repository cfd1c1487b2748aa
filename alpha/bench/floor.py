"""`alpha bench floor RUN.toml`: where the time and the joules of a training step go, and the least that this GPU's ceilings allow. Floor 8.

A step at the power limit is as long as its joules, so both are counted. A class is all launches of one op on operands of the same types.
Each is timed in profiled steps, and then repeated for SECONDS where it stands, on the step's own operands ("hot"). Ceilings of the same
work are measured hot too: cuBLAS, cuDNN and flash attention through PyTorch, a copy of memory, and tensor cores that are fed from shared
memory and do nothing else (kernels/probe/peak.cu). Two floors follow, one from the best of all known kernels and one from bare hardware.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from alpha.backends.cuda.executor import CudaExecutor
from alpha.bench.peer import Peer
from alpha.bench.step import ENDLESS, WARM_SECONDS, Ours, RandomTokens, ids_of, until_still
from alpha.component import Catalogue
from alpha.config import Config
from alpha.cuda_runtime.memory import Span, upload
from alpha.cuda_runtime.nvml import Clocks
from alpha.gates.cuda import perf
from alpha.gates.cuda.subjects import opened
from alpha.graph.plan import Launch, Plan
from alpha.profile.recorder import shape_text
from alpha.profile.served import Served, ServedError
from alpha.profile.store import read
from alpha.train.assemble import program_for, threads_for

BLOCKS, BLOCK_SECONDS = 5, 2.0
"""Blocks of whole steps."""

SECONDS, WARM = 0.8, 0.6
"""How long a call is repeated, and before that."""

PROFILED = 5
"""Steps that are looked at launch by launch; the first one is not counted."""

LEAST_SHARE = 0.004
"""Of a step: smaller classes are not repeated and count as they are."""

LOOK = 0.002
"""Seconds between two readings of the counter of joules."""

TRIES = 3
"""How often a block is run at most until that counter was seen to move twice meanwhile."""

MANY = 100
"""Launches before the host waits for the device."""

PRODUCT, ATTENTION, MEMORY = "product", "attention", "memory"
NAN = float("nan")
T = TypeVar("T")


@dataclass(frozen=True)
class Hot:
    """Work that was repeated. `ns`: of one call (of a ceiling: of one FLOP or byte); `watts` of the device meanwhile; `mhz`: the SM clock;
    `calls`: how many were timed."""

    ns: float
    watts: float
    mhz: float
    calls: int

    @property
    def joules(self) -> float:
        """Of one call."""
        return self.watts * self.ns * 1e-9


@dataclass(frozen=True)
class Row:
    """A class of launches. `calls` in a step; `flops` executed and fewest `nbytes` that must move, of all of them; `ns`: of all of them in
    a profiled step; `ours`: one of them, hot, None where the class is too small; `peers`: the same work by others; `why`: what has no
    figure."""

    op: str
    shape: str
    kind: str
    calls: int
    flops: int
    nbytes: int
    ns: float
    ours: Hot | None = None
    peers: dict[str, Hot] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class Floor:
    """A least. `ns`: what the parts take one after the other; `joules` of them all; `least_ns`: the less of `ns` and of the time in which
    the step's power gives these joules."""

    ns: float
    joules: float
    least_ns: float


@dataclass(frozen=True)
class Result:
    """One run file. `blocks`: [ns a step, watts, MHz, degrees Celsius]; `step_ns`, `watts`: their medians; `product`: a FLOP of bare tensor
    cores, `copy`: a byte of a copy; `known`, `bare`: the floors."""

    run: str
    shape: str
    hardware: str
    machine: str
    peer: str
    blocks: list[list[float]]
    rows: list[Row]
    product: Hot
    copy: Hot
    step_ns: float = NAN
    watts: float = NAN
    known: Floor | None = None
    bare: Floor | None = None
    seconds: float = 0.0


class Meter:
    """Watts of the device over a block, from the counter of its joules, which moves at times of its own: the slope between the first and
    the last move that were seen. Use as a context manager; a thread of its own reads the counter. `clock`: seconds, right behind a
    reading."""

    def __init__(self, joules: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._joules, self._clock, self._over = joules, clock, threading.Event()
        self.moves: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        last = self._joules()
        while not self._over.wait(LOOK):
            now = self._joules()
            if now != last:
                self.moves.append((self._clock(), now))
                last = now

    @property
    def watts(self) -> float:
        """NaN where the counter moved less than twice, or could not be read."""
        if len(self.moves) < 2:
            return NAN
        (start, least), (end, most) = self.moves[0], self.moves[-1]
        return (most - least) / (end - start)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()


def metered(block: Callable[[], T], joules: Callable[[], float]) -> tuple[T, float]:
    """(what a block gives, watts meanwhile). It is run again where the counter was seen to move less than twice, for a busy host may come
    to look too seldom. The watts are NaN where that is so in TRIES blocks, and then there is no floor."""
    for _ in range(TRIES):
        with Meter(joules) as meter:
            found = block()
        if len(meter.moves) >= 2:
            break
    return found, meter.watts


def hot(run: Callable[[int], object], gpu: Clocks) -> Hot:
    """`run(n)` makes n calls and returns when they are done."""
    def timed(n: int) -> float:
        start = time.perf_counter()
        run(n)
        return time.perf_counter() - start

    timed(2)
    each = timed(3) / 3
    timed(max(1, round(WARM / each)))
    calls, took = max(3, round(SECONDS / each)), 0.0
    while took < SECONDS / 2:  # few calls take longer, each, than many
        calls = max(calls, round(calls * SECONDS / took)) if took else calls
        (took, mhz), watts = metered(lambda n=calls: (timed(n), gpu.read().sm_mhz), gpu.joules)  # type: ignore[misc]
    return Hot(took / calls * 1e9, watts, mhz, calls)


# -- figures -------------------------------------------------------------------------------------------------------------------


def known(row: Row, result: Result) -> tuple[float, float]:
    """(ns, joules) of a class by the best kernel that is known: ours, a peer's, or a copy of as many bytes."""
    found = [(row.calls * x.ns, row.calls * x.joules) for x in (row.ours, *row.peers.values()) if x is not None]
    if row.kind == MEMORY:
        found.append((row.nbytes * result.copy.ns, row.nbytes * result.copy.joules))
    return float(np.min([ns for ns, _ in found])), float(np.min([joules for _, joules in found]))


def bare(row: Row, result: Result) -> tuple[float, float]:
    """The same by bare hardware: tensor cores that multiply what lies in shared memory. Nothing else costs anything there. What memory
    bounds takes what the best known kernel does: some of ours are faster than the driver's copy."""
    if row.kind == MEMORY:
        return known(row, result)
    return row.flops * result.product.ns, row.flops * result.product.joules


def floor(result: Result, best: Callable[[Row, Result], tuple[float, float]]) -> Floor:
    """The sum over all classes; what was not repeated counts as it is in the step."""
    parts = [(row.ns, row.ns * 1e-9 * result.watts) if row.ours is None else best(row, result) for row in result.rows]
    ns, joules = sum(ns for ns, _ in parts), sum(joules for _, joules in parts)
    return Floor(ns, joules, float(np.min([ns, joules / result.watts * 1e9])))


def figures(result: Result) -> Result:
    """With what follows from the raw blocks."""
    ns, watts = (median(b[i] for b in result.blocks) for i in (0, 1))
    result = replace(result, step_ns=ns, watts=watts)
    return replace(result, known=floor(result, known), bare=floor(result, bare))


def measured(result: Result) -> bool:
    """Whether both floors are numbers."""
    return all(at is not None and np.isfinite(at.least_ns) for at in (result.known, result.bare))


def from_plain(x: Mapping[str, Any]) -> Result:
    """A result from what a record holds of it, without what follows from the rest."""
    def heated(y: Mapping[str, Any]) -> Hot:
        watts, mhz = (NAN if y[k] is None else float(y[k]) for k in ("watts", "mhz"))
        return Hot(float(y["ns"]), watts, mhz, int(y["calls"]))

    rows = [Row(**{**row, "ours": None if row["ours"] is None else heated(row["ours"]),
                   "peers": {name: heated(y) for name, y in row["peers"].items()}}) for row in x["rows"]]
    return Result(**{**x, "rows": rows, "product": heated(x["product"]), "copy": heated(x["copy"]),
                     "step_ns": NAN, "watts": NAN, "known": None, "bare": None})


# -- measuring -----------------------------------------------------------------------------------------------------------------


_PRODUCTS = {"matmul": 0, "matmul_accumulate": 1, "linear_gelu": 0, "linear_swiglu": 0, "matmul_gelu_bwd": 0}
"""Op -> at which operand its product begins."""

_HEAD = ("linear_cross_entropy", "linear_cross_entropy_grad")
"""Ops of the head: logits, and the gradients of both their operands."""

Call = tuple[str, Mapping[str, Any], list[tuple[tuple[int, ...], str]]]
"""(op, attributes, (shape, type) of each operand) that a peer is asked for."""


def kind_of(op: str) -> str:
    """What bounds an op."""
    if op in _PRODUCTS or op in _HEAD:
        return PRODUCT
    return ATTENTION if op.startswith("attention") else MEMORY


def counterparts(launch: Launch) -> list[Call]:
    """What others compute for a launch: its products alone, without what stands in their epilogues, or its attention. Empty: memory
    bounds it, and a copy is its ceiling."""
    ins = [(r.type.shape, r.type.dtype) for r in launch.ins]
    if launch.op in _HEAD:
        (n, k), (v, _), dtype = ins[0][0], ins[1][0], ins[0][1]
        logits: Call = ("matmul", {"trans_b": True}, [((n, k), dtype), ((v, k), dtype)])
        if launch.op == _HEAD[0]:
            return [logits]
        return [logits, ("matmul", {}, [((n, v), dtype), ((v, k), dtype)]),
                ("matmul", {"trans_a": True, "wide": True}, [((n, v), dtype), ((n, k), dtype)])]
    if launch.op in _PRODUCTS:
        at = _PRODUCTS[launch.op]
        attrs = {k: v for k, v in launch.attrs.items() if k in ("trans_a", "trans_b", "wide")}
        return [("matmul", attrs, ins[at : at + 2])]
    return [(launch.op, dict(launch.attrs), ins)] if kind_of(launch.op) == ATTENTION else []


def bench(cfg: Config, catalogue: Catalogue, python: str | None, *, command: list[str] | None = None,
          report: Callable[[str], None] = lambda text: None) -> Result:
    """Measure a step of `cfg` on this GPU. `python`: a Python with PyTorch for the ceilings of products and attention, None for none of
    theirs; `command`: what serves instead of it; `report` is told what is going on. MachineError where NVML counts no joules."""
    began = time.monotonic()
    asked, cfg = cfg, replace(cfg, train=replace(cfg.train, profile=0, verify=0, steps=ENDLESS))
    vocab = ids_of(cfg)
    program = program_for(asked, vocab, catalogue, threads_for(cfg))
    gpu = Clocks.open()
    gpu.joules()  # no figure without them, so they are asked for before anything is built
    report("ours: opening")
    with Ours(cfg, program, catalogue, RandomTokens(cfg, vocab), gpu) as ours:
        ours.take(2)
        here = ours.executor.hardware()
        report("ours: whole steps")
        blocks = steady(ours, gpu)
        report("ours: launch by launch")
        rows, calls = profiled(ours)
        rows = repeated(ours, rows, calls, gpu, report)
    report("bare hardware")
    product, copy = hardware(gpu)
    result = Result(cfg.run.name, f"{cfg.train.batch} x {cfg.data.sequence} tokens, vocabulary {vocab}", here["hardware"], here["machine"],
                    "", blocks, rows, product, copy)
    if python is not None:
        with Peer(python, "cuda", 1, command=command) as peer:
            result = replace(result, peer=f"PyTorch {peer.version} on {peer.on}" if not peer.why else f"no PyTorch: {peer.why}")
            result = replace(result, rows=[beside(row, launch, peer, gpu, report) for row, (launch, _) in zip(rows, calls)])
    return figures(replace(result, seconds=time.monotonic() - began))


def steady(ours: Ours, gpu: Clocks) -> list[list[float]]:
    """Blocks of whole steps of a warm device."""
    count = max(1, round(BLOCK_SECONDS * 1e9 / ours.block(2)[0]))

    def warmer() -> float:
        reading = ours.block(count)[1]
        return gpu.sense(reading).celsius if reading is not None else NAN

    until_still(warmer, WARM_SECONDS)
    found = []
    for _ in range(BLOCKS):
        (ns, reading), watts = metered(partial(ours.block, count), gpu.joules)
        assert reading is not None
        found.append([ns, watts, reading.sm_mhz, gpu.sense(reading).celsius])
    return found


Place = tuple[str, int]
"""(plan, position in it) of a launch."""


def profiled(ours: Ours) -> tuple[list[Row], list[tuple[Launch, Place]]]:
    """Classes by their time in a step, the longest first, and a launch of each."""
    loop, first = ours.loop, ours.loop.step + 1
    plain, loop.cfg = loop.cfg, replace(loop.cfg, train=replace(loop.cfg.train, profile=ENDLESS))  # all of them
    ours.take(PROFILED + 1)
    loop.cfg = plain
    ours.take(1)  # the interval of the last profiled step ends
    loop.metrics.flush()
    executor = ours.executor
    assert isinstance(executor, CudaExecutor)
    classes: dict[tuple[str, str, str], list[tuple[Place, int, float, int, int]]] = {}
    columns = "step, plan, launch, count, device_ns, flops, nbytes"
    for step, plan, at, count, ns, flops, nbytes in read(loop.metrics.path, "op_profile", columns):
        if first <= step < first + PROFILED:
            launch = executor.plans[plan].launches[at]
            key = launch.op, shape_text(launch), repr(sorted(launch.attrs.items()))
            classes.setdefault(key, []).append(((plan, at), count, ns, flops, nbytes))
    assert classes, "profiled steps left no launch"
    found = []
    for (op, shape, _), seen in classes.items():
        calls, ns, flops, nbytes = np.sum([x[1:] for x in seen], axis=0) / PROFILED
        place = seen[len(seen) // 2][0]
        found.append((Row(op, shape, kind_of(op), round(calls), round(flops), round(nbytes), float(ns)),
                      (executor.plans[place[0]].launches[place[1]], place)))
    found.sort(key=lambda x: -x[0].ns)
    return [row for row, _ in found], [launch for _, launch in found]


def _launch(run: Callable[[int], object], stream: Any, n: int) -> None:
    for i in range(n):
        run(int(stream.handle))
        if i % MANY == MANY - 1:
            stream.synchronize()
    stream.synchronize()


def repeated(ours: Ours, rows: Sequence[Row], calls: Sequence[tuple[Launch, Place]], gpu: Clocks,
             report: Callable[[str], None]) -> list[Row]:
    """The same with each class hot, in a step of its own: a launch is repeated behind itself, on what it has just read."""
    executor, least = ours.executor, LEAST_SHARE * sum(row.ns for row in rows)
    assert isinstance(executor, CudaExecutor)
    bound, stream = executor._bound, executor.stream  # a method for benchmarks alone would be part of what the executor's gates bind
    wanted = {place: i for i, (row, (_, place)) in enumerate(zip(rows, calls)) if row.ns >= least}
    found = dict[int, Hot]()

    class Repeat:
        def before(self, plan: Plan, index: int, read: object) -> None:
            """Nothing."""

        def after(self, plan: Plan, index: int, read: object) -> None:
            """Repeat it, the first time that it comes."""
            i = wanted.pop((plan.name, index), None)
            if i is not None:
                report(f"ours: {rows[i].op} {rows[i].shape}"[:120])
                found[i] = hot(partial(_launch, bound[plan.name][index][1], stream), gpu)

    executor.inspector = Repeat()
    try:
        ours.take(1)
    finally:
        executor.inspector = None
    return [replace(row, ours=found.get(i)) for i, row in enumerate(rows)]


def hardware(gpu: Clocks) -> tuple[Hot, Hot]:
    """(a FLOP of bare tensor cores, a byte of a copy), hot."""
    _, stream = opened()
    probes = perf.probes()
    noise = np.random.default_rng(0).standard_normal(min(perf.PROBE_BYTES, 1 << 26) // 4, np.float32)
    for at in range(0, perf.PROBE_BYTES, noise.nbytes):  # what nobody wrote takes fewer joules to move than what steps move
        upload(Span(probes.arena.address + at, noise.nbytes), noise)

    def run(name: str) -> Hot:
        work, call = probes.calls[name]

        def many(n: int) -> None:
            for _ in range(n):
                call(stream)
            stream.synchronize()

        taken = hot(many, gpu)
        return replace(taken, ns=taken.ns / work)

    try:
        return run("product"), run("copy")
    finally:
        probes.arena.free()


def _spin(served: Served, way: str, n: int) -> None:
    served.ask("spin", way=way, calls=n)


def beside(row: Row, launch: Launch, peer: Peer, gpu: Clocks, report: Callable[[str], None]) -> Row:
    """A class beside PyTorch's ways of its work; where a launch holds several products, their sum."""
    todo = counterparts(launch)
    if row.ours is None or not todo:
        return row
    if peer.served is None:
        return replace(row, why=f"no PyTorch: {peer.why}")
    report(f"PyTorch: {row.op} {row.shape}"[:120])
    found, served = list[dict[str, Hot]](), peer.served
    try:
        for op, attrs, operands in todo:
            why = served.ask("draw", op=op, attrs=dict(attrs), operands=operands)
            ways = [name for name, reason in why.items() if not reason]
            if not ways:
                return replace(row, why="; ".join(why.values()))
            found.append({name: hot(partial(_spin, served, name), gpu) for name in ways})
    except ServedError as error:
        peer.start()
        return replace(row, why=str(error.came))
    if len(found) == 1:
        return replace(row, peers=found[0])
    ns, joules = (sum(float(np.min([getattr(x, what) for x in ways.values()])) for ways in found) for what in ("ns", "joules"))
    every = [x for ways in found for x in ways.values()]
    return replace(row, peers={"the best of each product": Hot(ns, joules / ns * 1e9, median(x.mhz for x in every),
                                                              min(x.calls for x in every))})


# -- showing -------------------------------------------------------------------------------------------------------------------


def losses(result: Result) -> list[tuple[Row, float, float]]:
    """(class, ns, joules) that a step would spare if the class were as its best known kernel, the largest by joules first."""
    found = []
    for row in result.rows:
        if row.ours is not None:
            ns, joules = known(row, result)
            found.append((row, row.calls * row.ours.ns - ns, row.calls * row.ours.joules - joules))
    return sorted(found, key=lambda x: -x[2])


def show(result: Result, console: Console) -> None:
    """The classes, and the floors."""
    console.print(f"[bold]{result.run}[/]  {result.shape}; {result.hardware}; {escape(result.peer or 'no peer')}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "calls", "ms in the step", "hot", "best known", "bare", "joules", "best known", "bare", "W", "MHz", ""):
        table.add_column(name, justify="left" if not name else "right")
    for row in result.rows:
        if row.ours is None:
            continue
        (best_ns, best_joules), (bare_ns, bare_joules) = known(row, result), bare(row, result)
        cells = [*(f"{ns / 1e6:.2f}" for ns in (row.ns, row.calls * row.ours.ns, best_ns, bare_ns)),
                 *(f"{joules:.2f}" for joules in (row.calls * row.ours.joules, best_joules, bare_joules))]
        table.add_row(f"{row.op} {row.shape}"[:60], str(row.calls), *cells, f"{row.ours.watts:.0f}", f"{row.ours.mhz:.0f}", escape(row.why))
    console.print(table)
    small = sum(row.ns for row in result.rows if row.ours is None)
    console.print(f"{sum(row.ours is None for row in result.rows)} smaller classes: {small / 1e6:.2f} ms, as they are", style="dim")
    console.print(f"a step: {result.step_ns / 1e6:.2f} ms, {result.step_ns * 1e-9 * result.watts:.1f} J, {result.watts:.0f} W; "
                  f"a FLOP of bare tensor cores {result.product.joules * 1e12:.3f} pJ, {1e-3 / result.product.ns:.0f} TFLOP/s; "
                  f"a byte of a copy {result.copy.joules * 1e12:.1f} pJ, {1 / result.copy.ns:,.0f} GB/s")
    for name, at in (("best known kernels", result.known), ("bare hardware", result.bare)):
        assert at is not None
        console.print(f"floor of {name}: {at.least_ns / 1e6:.2f} ms, {at.least_ns / result.step_ns:.3f} of the step "
                      f"(one after the other {at.ns / 1e6:.2f} ms; {at.joules:.1f} J)")
    for row, ns, joules in losses(result)[:3]:
        console.print(f"loss: {row.op} {row.shape}"[:70] + f": {ns / 1e6:.2f} ms, {joules:.2f} J a step")
