"""`alpha bench step RUN.toml`: a whole training step of a run file, ours beside the same model in PyTorch. Floor 8.

Ours is the loop and the executor of `alpha train`, measuring included; a peer is a model of the same parameters and the same microbatches
(peer_model.py) in each of the ways of variants.py. First both take three steps from the same weights on the same random tokens: loss,
gradient norm and the change of the parameters must agree. Then, on fresh random tokens at every step, long blocks of both alternate: all
rounds for the first variant and for each that a short trial shows faster than those before it. A cool GPU flatters, so ours runs until the
temperature stands still before each; clock, power and temperature are kept for each block. A variant without room beside ours is measured
in whole processes in turn, without an interval. The fastest variant is the one that is quoted; all are listed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np

from alpha.backends.cuda.executor import CudaExecutor
from alpha.bench import agreement, clocks
from alpha.bench.clocks import Blocks, merged
from alpha.bench.peer import Peer
from alpha.bench.variants import FAMILIES, Variant, variants
from alpha.comm.world import World
from alpha.component import Catalogue
from alpha.config import Config
from alpha.cuda_runtime.nvml import Clocks, Reading
from alpha.data.sampler import Batch, PermutedSampler
from alpha.errors import MachineError
from alpha.flops.v1 import ModelFlops, mfu, stamp
from alpha.graph.plan import Program
from alpha.graph.state import StateLayout
from alpha.profile import noise
from alpha.profile.noise import CLOCK
from alpha.profile.served import PATIENCE, ServedError
from alpha.profile.store import Store
from alpha.train.assemble import flops_for, known_tokenizer, program_for, threads_for, vocabulary
from alpha.train.engine import open_executor
from alpha.train.loop import Loop, StepResult
from alpha.train.peak import Peak, peak_of
from alpha.train.ranks import Ranks

ROUNDS, SECONDS = 7, 2.5
"""Blocks of each arm, and how long one lasts, about."""

TRIALS, TRIAL_SECONDS = 3, 1.0
"""The same of the trial that decides whether a variant is the fastest so far."""

APART = 3
"""Turns of whole processes, where two do not fit the device."""

CHECKED = 3
"""Steps that are compared: the second shows that the first updated alike, the third that the moments were carried on."""

STILL, WARM_SECONDS, WARM_BLOCK = 1.0, 20.0, 2.0
"""The GPU is warm when a block of WARM_BLOCK seconds raised its temperature by STILL degrees at most; no longer than WARM_SECONDS."""

ENDLESS = 10_000_000
"""Steps of the run that is timed: it never comes to its end."""

PROBE, PROBES = 448, 20
"""Side and number of the products that are the CPU's reference probe of a round."""

OURS, UNCAPTURED, REFERENCE = "ours", "ours, launch by launch", "reference probe"

NAN = float("nan")
_Fill = Callable[[np.ndarray, StateLayout, int], None]
_Arm = Callable[[int], "tuple[float, Reading | None]"]
_Taken = tuple[dict[str, Blocks], dict[str, noise.Kept]]


@dataclass(frozen=True)
class Row:
    """One line. ns: median time of a step over the blocks that count; memory: bytes of the device (CPU: ours alone, its arenas; 0 =
    not counted); ratio: its time over ours with its interval (NaN bounds: too few rounds, or not in alternation). `difference` of loss
    and norm from ours; `change`: what the change of the parameters was held to. `together`: in alternation with ours, whose median in
    the same rounds is `ours`. `blocks`: [ns a step, SM MHz, watts, degrees Celsius] of each in order, `beside` the same of ours in the
    same rounds; `discarded` rounds were throttled, `kept` says which count."""

    name: str
    ns: float = NAN
    tokens_per_second: float = NAN
    mfu: float = NAN
    memory: int = 0
    ratio: tuple[float, float, float] = (NAN, NAN, NAN)
    difference: float = NAN
    allowed: float = NAN
    change: agreement.Change | None = None
    why: str = ""
    together: bool = True
    ours: float = NAN
    discarded: int = 0
    blocks: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """One run file. `mark`: FLOPS model and peak, `flops` the same as numbers; `machine`: its class; `tokens` of a step; `backend`: what
    ours is built on; `quoted`: the fastest peer; `peer`: its library; `seconds`: all that it took."""

    run: str
    shape: str
    mark: str
    flops: Mapping[str, Any]
    hardware: str
    machine: str
    backend: str
    tokens: int
    peer: str = ""
    quoted: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    why: str = ""


class RandomTokens(PermutedSampler):
    """Fresh random rows i32[batch, sequence + 1] at each step, cut as the run cuts its text."""

    def __init__(self, cfg: Config, vocab: int) -> None:
        self._seed, self._vocab, self._shape = cfg.run.seed, vocab, (cfg.train.batch, cfg.data.sequence + 1)
        self._last: tuple[int, np.ndarray] | None = None

    @property
    def hash(self) -> str:
        """Of no text."""
        return "random tokens"

    def rows(self, step: int) -> np.ndarray:
        """All of a step."""
        if self._last is None or self._last[0] != step:
            self._last = step, np.random.default_rng([self._seed, step]).integers(0, self._vocab, self._shape, np.int32)
        return self._last[1]

    def batch(self, step: int, shard: int = 0, n_shards: int = 1, *, micro: int = 0, n_micro: int = 1, documents: bool = False) -> Batch:
        """As PermutedSampler's."""
        size = self._shape[0] // (n_shards * n_micro)
        first = (shard * n_micro + micro) * size
        rows = self.rows(step)[first : first + size]
        return Batch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]), np.arange(first, first + size, dtype=np.int64),
                     np.zeros((size, rows.shape[1] - 1), np.int32) if documents else None)


class Ours:
    """The loop of `alpha train` over a program. `world`: this rank among those of a job; `fill`: gives the parameters in place of a draw;
    `apart`: steps between spot checks that another one came to, whose first step was looked at: this one begins at the step behind it. Use
    as a context manager."""

    def __init__(self, cfg: Config, program: Program, catalogue: Catalogue, sampler: RandomTokens, clocks: Clocks | None,
                 world: World | None = None, fill: _Fill | None = None, apart: int = 0) -> None:
        self._stack, self.clocks, ranks = ExitStack(), clocks, Ranks(world)
        self.checked: set[int] = set()
        """Steps whose launches were looked at one by one: their collectives run in line, without stamps of their own."""
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="alpha-bench-")))
            self.executor = self._stack.enter_context(open_executor(program, catalogue, world))
            store = self._stack.enter_context(Store(folder / "metrics.sqlite", ranks.rank))
            store.rewind(0, ranks.size)
            store.begin(0, time.perf_counter_ns(), time.perf_counter_ns(), time.time_ns())
            self.loop = Loop(cfg, self.executor, sampler, cast(Any, None), cast(Any, None), folder, store, ranks)
            self.loop.start(fill)
            if apart:
                self.loop.spots.end(self.loop.step)
                self.loop.spots.apart, self.loop.step = apart, self.loop.step + 1
            self._stack.callback(self.loop.recorder.finish)
        except BaseException:
            self._stack.close()
            raise

    def parameters(self) -> dict[str, np.ndarray]:
        """Name -> float32, as they are now."""
        layout, flat = self.loop.program.states["param"], self.executor.look("param")
        return {t.name: flat[layout.offsets[t.name] : layout.offsets[t.name] + t.size].reshape(t.shape).copy() for t in layout.tensors}

    def taken(self, places: Mapping[str, tuple[int, int]]) -> dict[str, np.ndarray]:
        """Name -> these elements of a parameter, float32, as they are now; NaN for those of another rank's cut."""
        layout, flat, ranks = self.loop.program.states["param"], self.executor.look("param"), self.loop.ranks
        if "param" in self.loop.program.sharded:
            own, flat = flat, np.full(layout.size, np.nan, np.float32)
            for local, lo, hi in layout.shard(ranks.size).cuts(ranks.rank):
                flat[lo:hi] = own[local : local + hi - lo]
        return {t.name: agreement.taken(flat[layout.offsets[t.name] : layout.offsets[t.name] + t.size], places[t.name])
                for t in layout.tensors}

    def take(self, steps: int) -> list[StepResult]:
        """Steps whose results are looked at."""
        return [self._step(more=False) for _ in range(steps)]

    def _step(self, *, more: bool) -> StepResult:
        """One step, and what ranks do after each: they compare hashes of their parameters, and agree whether the next one hands over ahead;
        `more`: another step follows that."""
        if self.loop.spots.due(self.loop.step):
            self.checked.add(self.loop.step)
        result = self.loop.advance(ahead=self.loop.ranks.ahead)
        self.loop.ranks.decide(self.executor, result.numbers(), 0, more and self.loop.unbroken())
        return result

    def block(self, steps: int, captured: bool = True) -> tuple[float, Reading | None]:
        """Nanoseconds a step over a block."""
        readings = []
        if isinstance(self.executor, CudaExecutor):
            self.executor.captured = captured
        ranks, start = self.loop.ranks, CLOCK()
        ranks.ahead = ranks.world is None and steps > 1 and self.loop.unbroken()
        for left in reversed(range(steps)):
            self._step(more=left > 1)
            if self.clocks is not None:
                readings.append(self.clocks.read())
        return (CLOCK() - start) / steps, merged(readings)

    @property
    def memory(self) -> int:
        """Bytes taken now: of the device since it was opened, by whomever, or of the arenas."""
        held = self.executor.resident()
        return held["device"] if "device" in held else sum(held.values())

    @property
    def room(self) -> float:
        """Bytes of the device that are free; without bound on a CPU."""
        return self.executor.device.free_memory() if isinstance(self.executor, CudaExecutor) else float("inf")

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()


def until_still(celsius: Callable[[], float], seconds: float) -> None:
    """Call it, each time a block of work that ends with the GPU's temperature, until that rises by STILL at most, or for `seconds`."""
    last, end = -float("inf"), time.monotonic() + seconds
    while time.monotonic() < end:
        now = celsius()
        if not now > last + STILL:
            return
        last = now


class DoesNotFit(Exception):
    """A peer has no room beside what is there already."""


class Theirs:
    """The peer's model in a process of its own, after its checked steps; `difference` of their losses and norms from ours; `parameters`:
    what is taken of its own then, `change`: what that is held to. ServedError or DoesNotFit; use as a context manager."""

    def __init__(self, python: str, variant: Variant, job: Job, patience: float = PATIENCE) -> None:
        self.peer, self.job = Peer(python, job.device, job.threads, command=job.command), job
        if self.peer.served is None:
            raise ServedError("PyTorch is not there", came=self.peer.why)
        self.version = f"PyTorch {self.peer.version} on {self.peer.on}"
        try:
            self.peer.served.ask("make_model", sizes=job.sizes, parameters=job.parameters, variant=asdict(variant))
            found = [self.peer.served.ask("step", patience=patience, tokens=x, lr=r.lr) for x, r in zip(job.tokens, job.first, strict=True)]
            path = self.peer.served.ask("taken", places=job.expected.places, folder=str(Path(job.tokens[0]).parent))
        except ServedError as error:
            self.peer.close()
            if _no_room(error):
                raise DoesNotFit(str(error.came)) from error
            raise
        pairs = [(x[name], mine) for x, r in zip(found, job.first) for name, mine in (("loss", r.loss), ("norm", r.norm))]
        self.difference = float(np.max([abs(theirs - mine) / abs(mine) for theirs, mine in pairs]))  # max() would lose a NaN
        with np.load(path) as file:
            self.parameters = dict(file)
        self.change = job.expected.change(self.parameters)

    def block(self, steps: int) -> tuple[float, Reading | None]:
        """Nanoseconds a step over a block."""
        assert self.peer.served is not None
        job = self.job
        ns, reading = clocks.ask(self.peer.served, "steps", job.gpu.read if job.gpu is not None else None, rows=job.batch[0],
                                 tokens=job.batch[1], vocab=job.sizes["vocab"], lr=job.first[-1].lr, count=steps)
        return ns / steps, reading

    @property
    def memory(self) -> int:
        """Most bytes that torch had allocated."""
        return int(self.peer.served.ask("memory")) if self.peer.served is not None else 0

    def park(self) -> None:
        """Leave the device's memory to ours until `back`; ServedError."""
        assert self.peer.served is not None
        self.peer.served.ask("park")

    def back(self) -> None:
        """Take the device again; ServedError."""
        assert self.peer.served is not None
        self.peer.served.ask("back")

    def __enter__(self) -> Theirs:
        return self

    def __exit__(self, *error: object) -> None:
        self.peer.close()


def _no_room(error: ServedError) -> bool:
    return "OutOfMemory" in str(error.came) or "out of memory" in str(error.came)


@dataclass(frozen=True)
class Job:
    """What a peer is told: the sizes, files of parameters and of the tokens of each checked step, (rows, tokens a row) of a batch, the
    steps that ours took first, what they may differ by, and what is expected of the parameters after them. `gpu`: its clocks."""

    device: str
    threads: int
    sizes: Mapping[str, Any]
    parameters: Mapping[str, str]
    tokens: Sequence[str]
    batch: tuple[int, int]
    first: Sequence[StepResult]
    allowed: float
    expected: agreement.Expected
    gpu: Clocks | None
    command: list[str] | None


def unsupported(cfg: Config) -> str:
    """What of this run the peer's model does not do; '' when it does all."""
    m = cfg.model
    wants = (("model.family", m.family not in FAMILIES), ("model.norm_eps", m.norm_eps != 1e-5),
             ("model.head_dim", cfg.head_dim * m.heads != m.width), ("model.attention_bias", m.attention_bias != "none"),
             ("model.rope_scaling", bool(m.rope_scaling)), ("optim.name", cfg.optim.name != "adamw"),
             ("model.dropout", cfg.model.dropout > 0), ("model.window", cfg.model.window > 0),
             ("model.z_loss", cfg.model.z_loss > 0), ("data.documents", cfg.data.documents))
    return ", ".join(f"{name} = {getattr(getattr(cfg, name.split('.')[0]), name.split('.')[1])}" for name, yes in wants if yes)


def probe() -> Callable[[], tuple[float, None]]:
    """The CPU's reference probe of a round, as an arm beside the others: ns of a product, and no GPU to read."""
    square = np.ones((PROBE, PROBE), np.float32)
    return lambda: (float(noise.block(lambda: np.matmul(square, square), PROBES)), None)


def ids_of(cfg: Config) -> int:
    """How many ids the model has and a step's tokens are drawn from: as `alpha plan` tells before any text is read."""
    known = known_tokenizer(cfg)
    return vocabulary(cfg, known.vocab_size if known is not None else 257 if cfg.data.tokenizer == "bytes" else cfg.data.vocab)


def sizes_of(cfg: Config, program: Program) -> dict[str, Any]:
    """What PeerModel is made from."""
    m, o, layout = cfg.model, cfg.optim, program.states["param"]
    shapes = {t.name: t.shape for t in layout.tensors}
    vocab, width = shapes["embedding.token.weight"]
    return {"family": m.family, "layers": m.layers, "width": width, "heads": m.heads, "kv_heads": m.kv_heads or m.heads,
            "hidden": shapes["block.0.mlp.up.weight"][0], "vocab": vocab,
            "positions": shapes.get("embedding.position.weight", (cfg.data.sequence,))[0], "tied": "head.weight" not in shapes,
            "rope_base": m.rope_base, "micros": cfg.train.shards * cfg.micros, "clip": o.clip, "betas": list(o.betas), "eps": o.eps,
            "weight_decay": o.weight_decay, "decayed": [t.name for t in layout.tensors if t.decay]}


def bench(cfg: Config, catalogue: Catalogue, python: str | None, *, rounds: int = ROUNDS, steps: int | None = None,
          budget: float | None = None, chosen: Callable[[str], bool] = lambda name: True, command: list[str] | None = None,
          report: Callable[[str], None] = lambda text: None) -> Result:
    """Measure a step of `cfg`. `python`: a Python with PyTorch for the peers, None for no peers; `chosen`: which variants, by name;
    `steps` of a block instead of its seconds; `budget` in seconds: variants that it leaves no time for are listed as such; `command`: what
    serves instead of PyTorch; `report` is told what is going on."""
    began = time.monotonic()
    asked, cfg = cfg, replace(cfg, train=replace(cfg.train, profile=0, steps=ENDLESS))
    vocab = ids_of(cfg)
    flops, on_gpu = flops_for(cfg, vocab), cfg.machine.backend == "cuda"
    program = program_for(asked, vocab, catalogue, threads_for(cfg))  # with the run's own learning rates; past them the last one
    sampler, gpu = RandomTokens(cfg, vocab), Clocks.open() if on_gpu else None
    wanted = [v for v in variants(on_gpu, cfg.train.precision) if chosen(v.name)] if python is not None else []
    rows: list[Row] = []
    if wanted and (why := unsupported(cfg)):
        rows, wanted = [Row("torch", why=f"no peer: the model in PyTorch does not do {why}")], []
    parameters: dict[str, str] = {}

    def opened(apart: int) -> Ours:
        return Ours(cfg, program, catalogue, sampler, gpu, fill=partial(_filled, parameters) if parameters else None, apart=apart)

    with tempfile.TemporaryDirectory(prefix="alpha-bench-") as folder, Place(opened) as place:
        report(f"{OURS}: opening")
        ours = place.ours()
        report(f"{OURS}: opened; parameters and tokens to files" if wanted else f"{OURS}: opened")
        sizes = sizes_of(cfg, program) if wanted else {}
        places = agreement.places({t.name: t.shape for t in program.states["param"].tensors} if wanted else {}, np.random.default_rng())
        before = ours.parameters() if wanted else {}
        parameters |= _written(folder, before)
        before = {name: agreement.taken(x, places[name]) for name, x in before.items()}
        tokens = [f"{folder}/tokens{i}.npy" for i in range(CHECKED)]
        for i, path in enumerate(tokens):
            np.save(path, sampler.rows(i))
        report(f"{OURS}: {CHECKED} steps, the first one looked at launch by launch")
        first, types, terms = ours.take(CHECKED), {cfg.train.precision}, cfg.train.batch * cfg.data.sequence
        expected = agreement.Expected(places, before, ours.taken(places) if wanted else {}, sizes, [r.lr for r in first], types, terms)
        job = Job(cfg.machine.backend, threads_for(cfg), sizes, parameters, tokens, (cfg.train.batch, cfg.data.sequence), first,
                  agreement.bound(types, terms), expected, gpu, command)
        here = ours.executor.hardware()
        held, peak = ours.memory, peak_of(ours.executor)  # before a peer takes some of the device
        result = Result(cfg.run.name, f"{cfg.train.batch} x {cfg.data.sequence} tokens, vocabulary {vocab}",
                        stamp(peak.flops, peak.source), {"per_token": flops.per_token, "peak": peak.flops, "peak_source": peak.source},
                        here["hardware"], here["machine"], here["version"], job.batch[0] * job.batch[1])
        session = Session(rounds, steps, gpu, cfg.train.batch * cfg.data.sequence, flops, peak, place, job, python or "",
                          began + budget if budget is not None else None, report, crowded=held > ours.room)
        found = [session.one(v, len(wanted) - i) for i, v in enumerate(wanted)]
        if all(r.why for r in found):
            found += session.alone()
        return session.result(replace(result, seconds=time.monotonic() - began), [*rows, *found], held)


class Place:
    """Where ours is, while it has the device. `make` is told how far apart spot checks were when ours left, 0 the first time. Use as a
    context manager."""

    def __init__(self, make: Callable[[int], Ours]) -> None:
        self._make, self._here, self._checks_apart = make, cast("Ours | None", None), 0

    def ours(self) -> Ours:
        """Ours, opened anew if it had to leave."""
        if self._here is None:
            self._here = self._make(self._checks_apart).__enter__()
        return self._here

    def leave(self) -> None:
        """Give the device back."""
        if self._here is not None:
            here, self._here = self._here, None
            self._checks_apart = here.loop.spots.apart
            here.__exit__(None, None, None)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()


def _written(folder: str, parameters: Mapping[str, np.ndarray]) -> dict[str, str]:
    found = {}
    for i, (name, x) in enumerate(parameters.items()):
        found[name] = f"{folder}/p{i}.npy"
        np.save(found[name], x)
    return found


def _filled(files: Mapping[str, str], flat: np.ndarray, layout: StateLayout, seed: int) -> None:
    """The parameters that were drawn before, which takes less time than another draw."""
    for t in layout.tensors:
        flat[layout.offsets[t.name] : layout.offsets[t.name] + t.size] = np.load(files[t.name], mmap_mode="r").reshape(-1)


@dataclass
class Session:
    """How blocks are taken, and what is made of them. `fastest`: the least ratio of a variant so far; `peer`: the library that answered;
    `built`: seconds that the last variant took to build and check, as the next one may; `crowded`: whether a peer had, or would have, no
    room beside ours, so all take turns."""

    rounds: int
    steps: int | None
    gpu: Clocks | None
    tokens: int
    flops: ModelFlops
    peak: Peak
    place: Place
    job: Job
    python: str
    deadline: float | None
    report: Callable[[str], None]
    fastest: float = float("inf")
    peer: str = ""
    built: float = 0.0
    crowded: bool = False

    def left(self) -> float:
        """Seconds of the budget."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def alone(self) -> list[Row]:
        """Ours without a peer; on a GPU beside itself, launch by launch."""
        ours = self.place.ours()
        arms: dict[str, _Arm] = {OURS: ours.block}
        if self.gpu is not None:
            arms[UNCAPTURED] = lambda n: ours.block(n, captured=False)
        self.warm(ours)
        taken = self.measure(arms, self.rounds, SECONDS)
        return [self.figures(Row(name), taken) for name in arms]

    def one(self, variant: Variant, coming: int) -> Row:
        """A variant's line; `coming` variants, this one included, share what is left of the budget."""
        need = self.built + (2 * (TRIALS + 1) * TRIAL_SECONDS if self.steps is None else 0.0)
        if self.left() <= need:
            return Row(variant.name, why="not measured: the budget was spent")
        self.report(f"{variant.name}: building and checking")
        try:
            if not self.crowded:
                try:
                    return self._beside(variant, self.left() / coming)
                except DoesNotFit:
                    self.crowded = True
            return self._apart(variant)
        except DoesNotFit as error:
            return Row(variant.name, why=f"does not fit, even alone: {error}")
        except ServedError as error:
            return Row(variant.name, why=str(error.came))

    def _admitted(self, variant: Variant) -> tuple[Row, Theirs | None]:
        """The peer, if it agrees with ours."""
        began = time.monotonic()
        model = Theirs(self.python, variant, self.job, min(PATIENCE, max(30.0, self.left())))
        self.built = time.monotonic() - began
        self.peer = self.peer or model.version
        row = Row(variant.name, difference=model.difference, allowed=self.job.allowed, change=model.change)
        why = "" if model.difference <= self.job.allowed else "its loss or gradient norm is not ours, so no time of it is given"
        if not (why or model.change.why):
            return row, model
        model.peer.close()
        return replace(row, why=why or model.change.why), None

    def _beside(self, variant: Variant, share: float) -> Row:
        row, model = self._admitted(variant)
        if model is None:
            return row
        with model:
            ours = self.place.ours()
            self.report(f"{variant.name}: timing")
            self.warm(ours)
            arms: dict[str, _Arm] = {OURS: ours.block, variant.name: model.block}
            if self.rounds > TRIALS and self.fastest < float("inf"):
                tried = self.figures(row, self.measure(arms, TRIALS, TRIAL_SECONDS))
                if not tried.ratio[1] < self.fastest or self.left() <= 0:
                    self.fastest = min(self.fastest, *(x for x in tried.ratio[1:2] if x == x))
                    return replace(tried, memory=model.memory)
            seconds = SECONDS if self.deadline is None else min(SECONDS, max(TRIAL_SECONDS, share / (2 * self.rounds + 2)))
            found = self.figures(row, self.measure(arms, self.rounds, seconds))
            if found.ratio[1] < self.fastest:
                self.fastest = found.ratio[1]
            return replace(found, memory=model.memory)

    def _apart(self, variant: Variant) -> Row:
        """Each has the device in turn, APART times or until the budget is spent; the other one's state waits on the host."""
        taken: dict[str, list[tuple[float, Reading | None]]] = {OURS: [], variant.name: []}
        seconds, memory = SECONDS * self.rounds / APART, 0
        with ExitStack() as stack:
            row, model = Row(variant.name), cast("Theirs | None", None)
            for turn in range(APART):
                if turn and self.left() <= 0:
                    break
                self.report(f"{OURS}: turn {turn + 1} of {APART}")
                try:
                    ours = self.place.ours()
                except MachineError as error:
                    if model is None:
                        raise
                    raise DoesNotFit(f"ours finds no room beside what the peer keeps: {error}") from error
                self.warm(ours)
                taken[OURS].append(self._block(ours.block, self._count(ours.block, seconds)))
                self.place.leave()
                if model is None:
                    row, model = self._admitted(variant)
                    if model is None:
                        return row
                    stack.enter_context(model)
                else:
                    model.back()
                self.warm(model)  # as ours was: the device cooled while this was built
                self.report(f"{variant.name}: timing, in turn with ours")
                taken[variant.name].append(self._block(model.block, self._count(model.block, seconds)))
                memory = model.memory
                if turn < APART - 1:
                    model.park()
        turns = len(taken[OURS])
        kept = clocks.kept(taken, None) if self.gpu is not None else {name: noise.keep(np.zeros(turns, bool)) for name in taken}
        return replace(self.figures(replace(row, together=False), (dict(taken), kept)), memory=memory)

    def warm(self, ours: Ours | Theirs) -> None:
        """Run until the temperature of the GPU stands still."""
        if self.gpu is None or self.steps is not None:
            return
        count = self._count(ours.block, WARM_BLOCK)

        def celsius() -> float:
            reading = self._block(ours.block, count)[1]
            return reading.celsius if reading is not None else NAN

        until_still(celsius, min(WARM_SECONDS, self.left() / 4))

    def _count(self, arm: _Arm, seconds: float) -> int:
        """Steps of a block; finding out warms up."""
        return self.steps or max(1, round(seconds * 1e9 / arm(2)[0]))

    def _block(self, arm: _Arm, count: int) -> tuple[float, Reading | None]:
        ns, reading = arm(count)
        return ns, self.gpu.sense(reading) if self.gpu is not None and reading is not None else reading

    def measure(self, arms: Mapping[str, _Arm], rounds: int, seconds: float) -> _Taken:
        """Blocks of all arms in random order, and which count. An arm that fails has none; one without room is DoesNotFit."""
        def lost(name: str, error: ServedError) -> None:
            if _no_room(error):
                raise DoesNotFit(str(error.came)) from error

        on_cpu, every = self.gpu is None, {}
        for name, arm in arms.items():
            try:
                every[name] = partial(self._block, arm, self._count(arm, seconds))
            except ServedError as error:
                lost(name, error)
        taken: dict[str, Blocks] = {**clocks.alternate({**every, **({REFERENCE: probe()} if on_cpu else {})}, rounds,
                                                       np.random.default_rng(), lost)}
        probes = [ns for ns, _ in taken.pop(REFERENCE)] if on_cpu else None
        return taken, clocks.kept(taken, probes)

    def figures(self, row: Row, found: _Taken) -> Row:
        """The line, from the blocks that count."""
        taken, kept = found
        if row.name not in taken:
            return replace(row, why="it failed while it was timed")
        both = noise.keep(~(kept[OURS].mask & kept[row.name].mask))
        row = replace(row, discarded=both.discarded, blocks=_plain(taken[row.name]), beside=_plain(taken[OURS]),
                      kept=both.mask.tolist())
        if not both.believed:
            return replace(row, why=f"throttled: {both.discarded} of {both.mask.size} rounds discarded")
        mine, own = (np.array([ns for ns, _ in taken[name]])[both.mask] for name in (OURS, row.name))
        row = self.rated(replace(row, ours=float(np.median(mine))), float(np.median(own)))
        if row.name == OURS:
            return replace(row, ratio=(1.0, 1.0, 1.0))
        if row.together:
            return replace(row, ratio=clocks.ratio(own, mine, 1))
        return replace(row, ratio=(NAN, float(np.median(own / mine)), NAN))

    def rated(self, row: Row, ns: float) -> Row:
        """With a step's time and what follows from it."""
        rate = self.tokens / ns * 1e9
        return replace(row, ns=ns, tokens_per_second=rate, mfu=mfu(rate, self.flops, self.peak.flops))

    def result(self, result: Result, rows: Sequence[Row], memory: int) -> Result:
        """The table: ours as it was beside the fastest, then the others, fastest first."""
        result = replace(result, peer=self.peer)
        timed = sorted((r for r in rows if r.ratio[1] == r.ratio[1]), key=lambda r: r.ratio[1])
        others = [r for r in rows if r.why and r.name != OURS]
        ours = next((r for r in rows if r.name == OURS and not r.why), None)
        if ours is None:
            if not timed:
                return replace(result, rows=others, why=next(r.why for r in rows if r.name == OURS))
            best = timed[0]
            result = replace(result, quoted=best.name)
            mine = replace(best, name=OURS, ratio=(1.0, 1.0, 1.0), difference=NAN, allowed=NAN, change=None, blocks=best.beside)
            ours = self.rated(mine, best.ours)
        rest = [r for r in timed if r.name != OURS]
        return replace(result, rows=[replace(ours, memory=memory), *rest, *others])


def _plain(blocks: Blocks) -> list[list[float]]:
    return [[ns] if r is None else [ns, r.sm_mhz, r.watts, r.celsius] for ns, r in blocks]
