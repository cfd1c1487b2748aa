"""`alpha bench step RUN.toml`: a whole training step of a run file, ours beside the same model in PyTorch. Floor 8.

Ours is the loop and the executor of `alpha train`, measuring included, on random tokens; so is the peer, a model of the same parameters and
the same microbatches (peer_model.py), eager and compiled. First both take three steps from the same weights: loss and gradient norm must
agree. Then blocks of steps alternate, or, where a peer does not fit beside the others, each is measured alone and the result says so.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np

from alpha.backends.cuda.executor import CudaExecutor
from alpha.bench import agreement, clocks
from alpha.bench.clocks import Blocks, merged
from alpha.bench.peer import Peer
from alpha.component import Catalogue
from alpha.config import Config
from alpha.cudart.nvml import Clocks, Reading
from alpha.data.sampler import Batch, PermutedSampler
from alpha.flops.v1 import ModelFlops, mfu, stamp
from alpha.graph.plan import Program
from alpha.profile import noise
from alpha.profile.noise import CLOCK
from alpha.profile.served import ServedError
from alpha.profile.store import Store
from alpha.train.assemble import flops_for, program_for, threads_for
from alpha.train.engine import open_executor
from alpha.train.loop import Loop, StepResult
from alpha.train.peak import peak_of

ROUNDS, STEPS = 7, 4
CHECKED = 3
"""Steps that are compared: the second shows that the first updated alike, the third that the moments were carried on."""

PROBE, PROBES = 448, 20
"""Side and number of the products that are the CPU's reference probe of a round."""

OURS, UNCAPTURED, REFERENCE = "ours", "ours, launch by launch", "reference probe"
PEERS = {"torch eager": False, "torch.compile": True}
"""Name -> whether it is compiled."""


@dataclass(frozen=True)
class Row:
    """One line. ns: median time of a step; memory: bytes of the device (CPU: ours alone, its arenas; 0 = not counted); ratio: its time over
    ours with its interval (NaN bounds where they were not measured in alternation). `difference` of loss and norm from ours."""

    name: str
    ns: float = float("nan")
    tokens_per_second: float = float("nan")
    mfu: float = float("nan")
    memory: int = 0
    ratio: tuple[float, float, float] = (float("nan"),) * 3
    difference: float = float("nan")
    allowed: float = float("nan")
    why: str = ""


@dataclass(frozen=True)
class Result:
    """One run file. `together`: all in alternation; `discarded` of `rounds` were throttled."""

    run: str
    shape: str
    mark: str
    hardware: str
    together: bool = True
    rounds: int = 0
    discarded: int = 0
    rows: list[Row] = field(default_factory=list)
    why: str = ""


class RandomTokens(PermutedSampler):
    """The same random rows i32[batch, sequence + 1] at every step, cut as the run cuts its text."""

    def __init__(self, cfg: Config, vocab: int) -> None:
        self.rows = np.random.default_rng(cfg.run.seed).integers(0, vocab, (cfg.train.batch, cfg.data.sequence + 1)).astype(np.int32)

    @property
    def hash(self) -> str:
        """Of no text."""
        return "random tokens"

    def batch(self, step: int, shard: int = 0, n_shards: int = 1, *, micro: int = 0, n_micro: int = 1, documents: bool = False) -> Batch:
        """As PermutedSampler's."""
        size = len(self.rows) // (n_shards * n_micro)
        first = (shard * n_micro + micro) * size
        rows = self.rows[first : first + size]
        return Batch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]), np.arange(first, first + size, dtype=np.int64),
                     np.zeros((size, rows.shape[1] - 1), np.int32) if documents else None)


class Ours:
    """The loop of `alpha train` over a program. Use as a context manager."""

    def __init__(self, cfg: Config, program: Program, catalogue: Catalogue, sampler: RandomTokens, clocks: Clocks | None) -> None:
        self._stack, self.clocks = ExitStack(), clocks
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="alpha-bench-")))
            self.executor = self._stack.enter_context(open_executor(program, catalogue))
            store = self._stack.enter_context(Store(folder / "metrics.sqlite"))
            store.begin(0, time.perf_counter_ns(), time.perf_counter_ns(), time.time_ns())
            self.loop = Loop(cfg, self.executor, sampler, cast(Any, None), cast(Any, None), folder, store)
            self.loop.start()
            self._stack.callback(self.loop.recorder.finish)
        except BaseException:
            self._stack.close()
            raise

    def parameters(self) -> dict[str, np.ndarray]:
        """Name -> float32, as they are now."""
        layout, flat = self.loop.program.states["param"], self.executor.look("param")
        return {t.name: flat[layout.offsets[t.name] : layout.offsets[t.name] + t.size].reshape(t.shape).copy() for t in layout.tensors}

    def take(self, steps: int) -> list[StepResult]:
        """Steps whose results are looked at."""
        return [self.loop.advance() for _ in range(steps)]

    def block(self, steps: int, captured: bool = True) -> tuple[float, Reading | None]:
        """Nanoseconds a step over a block."""
        readings = []
        if isinstance(self.executor, CudaExecutor):
            self.executor.captured = captured
        start = CLOCK()
        for left in reversed(range(steps)):
            self.loop.advance(ahead=left > 0 and self.loop.unbroken())
            if self.clocks is not None:
                readings.append(self.clocks.read())
        return (CLOCK() - start) / steps, merged(readings)

    @property
    def memory(self) -> int:
        """Bytes taken now: of the device since it was opened, by whomever, or of the arenas."""
        held = self.executor.resident()
        return held["device"] if "device" in held else sum(held.values())

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()


class DoesNotFit(Exception):
    """A peer has no room beside what is there already."""


class Theirs:
    """The peer's model in a process of its own, after its checked steps; `difference` of their losses and norms from ours. ServedError or
    DoesNotFit; use as a context manager."""

    def __init__(self, python: str, compiled: bool, job: Job) -> None:
        self.peer, self.job = Peer(python, job.device, job.threads, command=job.command), job
        if self.peer.served is None:
            raise ServedError("PyTorch is not there", came=self.peer.why)
        try:
            self.peer.served.ask("make_model", sizes=job.sizes, parameters=job.parameters, compiled=compiled)
            found = [self.peer.served.ask("step", tokens=job.tokens, lr=r.lr) for r in job.first]
        except ServedError as error:
            self.peer.close()
            if "OutOfMemory" in str(error.came) or "out of memory" in str(error.came):
                raise DoesNotFit(str(error.came)) from error
            raise
        pairs = [(x[name], mine) for x, r in zip(found, job.first) for name, mine in (("loss", r.loss), ("norm", r.norm))]
        self.difference = float(np.max([abs(theirs - mine) / abs(mine) for theirs, mine in pairs]))  # max() would lose a NaN

    def block(self, steps: int) -> tuple[float, Reading | None]:
        """Nanoseconds a step over a block."""
        assert self.peer.served is not None
        ns, reading = clocks.ask(self.peer.served, "steps", self.job.read, tokens=self.job.tokens, lr=self.job.first[-1].lr, count=steps)
        return ns / steps, reading

    @property
    def memory(self) -> int:
        """Most bytes that torch had allocated."""
        return int(self.peer.served.ask("memory")) if self.peer.served is not None else 0

    def __enter__(self) -> Theirs:
        return self

    def __exit__(self, *error: object) -> None:
        self.peer.close()


@dataclass(frozen=True)
class Job:
    """What a peer is told: files of tokens and parameters, the sizes, the steps that ours took first, and what they may differ by."""

    device: str
    threads: int
    sizes: Mapping[str, Any]
    parameters: Mapping[str, str]
    tokens: str
    first: Sequence[StepResult]
    allowed: float
    read: Callable[[], Reading] | None
    command: list[str] | None


def unsupported(cfg: Config) -> str:
    """What of this run the peer's model does not do; '' when it does all."""
    wants = (("optim.name", cfg.optim.name != "adamw"), ("model.dropout", cfg.model.dropout > 0), ("model.window", cfg.model.window > 0),
             ("model.z_loss", cfg.model.z_loss > 0), ("data.documents", cfg.data.documents))
    return ", ".join(f"{name} = {getattr(getattr(cfg, name.split('.')[0]), name.split('.')[1])}" for name, yes in wants if yes)


def sizes_of(cfg: Config, program: Program) -> dict[str, Any]:
    """What PeerModel is made from."""
    m, o = cfg.model, cfg.optim
    return {"family": m.family, "layers": m.layers, "heads": m.heads, "kv_heads": m.kv_heads or m.heads, "tied": m.tied,
            "rope_base": m.rope_base, "micros": cfg.train.shards * cfg.micros, "precision": cfg.train.precision, "clip": o.clip,
            "betas": list(o.betas), "eps": o.eps, "weight_decay": o.weight_decay,
            "decayed": [t.name for t in program.states["param"].tensors if t.decay]}


def bench(cfg: Config, catalogue: Catalogue, python: str | None, *, rounds: int = ROUNDS, steps: int = STEPS,
          command: list[str] | None = None) -> Result:
    """Measure a step of `cfg`. `python`: a Python with PyTorch for the peers, None for no peers; `command`: what serves instead of it."""
    longest = CHECKED + 2 * (rounds + 1) * steps + 1  # the loop stages no batch behind the last step
    cfg = replace(cfg, train=replace(cfg.train, profile=0, steps=max(cfg.train.steps, longest)))
    vocab = 257 if cfg.data.tokenizer == "bytes" else cfg.data.vocab
    threads, flops = threads_for(cfg), flops_for(cfg, vocab)
    program, on_gpu = program_for(cfg, vocab, catalogue, threads), cfg.machine.backend == "cuda"
    sampler, gpu = RandomTokens(cfg, vocab), Clocks.open() if on_gpu else None
    tokens = cfg.train.batch * cfg.data.sequence
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="alpha-bench-") as folder, ExitStack() as stack:
        ours = stack.enter_context(Ours(cfg, program, catalogue, sampler, gpu))
        wanted = dict(PEERS) if python is not None else {}
        if wanted and (why := unsupported(cfg)):
            rows, wanted = [Row("torch", why=f"no peer: the model in PyTorch does not do {why}")], {}
        files = _written(folder, ours.parameters() if wanted else {})
        np.save(f"{folder}/tokens.npy", sampler.rows)
        job = Job(cfg.machine.backend, threads, sizes_of(cfg, program), files, f"{folder}/tokens.npy", ours.take(CHECKED),
                  agreement.bound({cfg.train.precision}, tokens), gpu.read if gpu is not None else None, command)
        held = ours.memory  # before a peer takes some of the device
        peak = peak_of(ours.executor)
        result = Result(cfg.run.name, f"{cfg.train.batch} x {cfg.data.sequence} tokens, vocabulary {vocab}",
                        stamp(peak.flops, peak.source), ours.executor.hardware()["hardware"], rounds=rounds)
        session = Session(rounds, steps, not on_gpu, tokens, flops, peak.flops)
        try:
            theirs: dict[str, Theirs] = {}
            for name, compiled in wanted.items():
                row, model = _admitted(python or "", name, compiled, job)
                rows.append(row)
                if model is not None:
                    theirs[name] = stack.enter_context(model)
            mine = {OURS: ours.block, **({UNCAPTURED: lambda n: ours.block(n, captured=False)} if on_gpu else {})}
            taken, kept = session.measure({**mine, **{name: model.block for name, model in theirs.items()}})
        except DoesNotFit:
            return _apart(result, cfg, program, catalogue, sampler, gpu, python or "", wanted, job, session, stack)
        memory = {OURS: held, **{name: model.memory for name, model in theirs.items()}}
        return session.result(result, taken, kept, rows, memory, together=True)


def _written(folder: str, parameters: Mapping[str, np.ndarray]) -> dict[str, str]:
    found = {}
    for i, (name, x) in enumerate(parameters.items()):
        found[name] = f"{folder}/p{i}.npy"
        np.save(found[name], x)
    return found


def _admitted(python: str, name: str, compiled: bool, job: Job) -> tuple[Row, Theirs | None]:
    """A peer's line, and the peer if it agrees with ours."""
    try:
        model = Theirs(python, compiled, job)
    except ServedError as error:
        return Row(name, why=str(error.came)), None
    row = Row(name, difference=model.difference, allowed=job.allowed)
    if model.difference <= job.allowed:
        return row, model
    model.peer.close()
    return replace(row, why="its loss or gradient norm is not ours, so no time of it is given"), None


def _apart(result: Result, cfg: Config, program: Program, catalogue: Catalogue, sampler: RandomTokens, gpu: Clocks | None, python: str,
           wanted: Mapping[str, bool], job: Job, session: Session, stack: ExitStack) -> Result:
    """Each alone, one after the other. The files of `job` still stand: this runs inside their folder's block."""
    stack.close()
    taken: dict[str, Blocks] = {}
    kept: dict[str, noise.Kept] = {}
    memory, rows = {}, []
    with Ours(cfg, program, catalogue, sampler, gpu) as ours:
        first = session.measure({OURS: ours.block})
        memory[OURS] = ours.memory
    taken, kept = {**first[0]}, {**first[1]}
    for name, compiled in wanted.items():
        try:
            row, model = _admitted(python, name, compiled, job)
        except DoesNotFit as error:
            row, model = Row(name, why=f"does not fit, even alone: {error}"), None
        rows.append(row)
        if model is not None:
            with model:
                found = session.measure({name: model.block})
                memory[name] = model.memory
            taken, kept = {**taken, **found[0]}, {**kept, **found[1]}
    return session.result(result, taken, kept, rows, memory, together=False)


@dataclass(frozen=True)
class Session:
    """How blocks are taken, and what is made of them."""

    rounds: int
    steps: int
    on_cpu: bool
    tokens: int
    flops: ModelFlops
    peak: float

    def measure(self, arms: Mapping[str, Callable[[int], tuple[float, Reading | None]]]) -> tuple[dict[str, Blocks],
                                                                                                 dict[str, noise.Kept]]:
        """Blocks of all arms in random order, and which count. An arm that fails has none; one without room is DoesNotFit."""
        square = np.ones((PROBE, PROBE), np.float32)

        def probe() -> tuple[float, None]:
            return float(noise.block(lambda: np.matmul(square, square), PROBES)), None

        def lost(name: str, error: ServedError) -> None:
            if "OutOfMemory" in str(error.came):
                raise DoesNotFit(str(error.came)) from error

        every: dict[str, Callable[[], tuple[float, Reading | None]]] = {name: partial(arm, self.steps) for name, arm in arms.items()}
        taken: dict[str, Blocks] = {**clocks.alternate({**every, **({REFERENCE: probe} if self.on_cpu else {})}, self.rounds,
                                                       np.random.default_rng(), lost)}
        probes = [ns for ns, _ in taken.pop(REFERENCE)] if self.on_cpu else None
        return taken, clocks.kept(taken, probes)

    def result(self, result: Result, taken: Mapping[str, Blocks], kept: Mapping[str, noise.Kept], rows: Sequence[Row],
               memory: Mapping[str, int], *, together: bool) -> Result:
        """The lines, from the blocks that count."""
        ours = kept[OURS]
        result = replace(result, together=together, discarded=ours.discarded)
        if not ours.believed:
            return replace(result, why=f"throttled: {ours.discarded} of {self.rounds} blocks of ours discarded")
        lines = [Row(OURS)] + ([Row(UNCAPTURED)] if UNCAPTURED in taken else []) + list(rows)
        return replace(result, rows=[self._figures(r, taken, kept, memory, max(1, len(lines) - 1), together) for r in lines])

    def _figures(self, row: Row, taken: Mapping[str, Blocks], kept: Mapping[str, noise.Kept], memory: Mapping[str, int], family: int,
                 together: bool) -> Row:
        if row.why:
            return row
        if row.name not in taken:
            return replace(row, why="it failed while it was timed")
        mine, own = (np.array([ns for ns, _ in taken[name]]) for name in (OURS, row.name))
        both = noise.keep(~(kept[OURS].mask & kept[row.name].mask)) if together else kept[row.name]
        if not both.believed:
            return replace(row, why=f"throttled: {both.discarded} rounds discarded")
        ns = float(np.median(own[both.mask]))
        if row.name == OURS:
            ratio = (1.0, 1.0, 1.0)
        elif together:
            ratio = clocks.ratio(own[both.mask], mine[both.mask], family)
        else:
            ratio = (float("nan"), ns / float(np.median(mine[kept[OURS].mask])), float("nan"))
        rate = self.tokens / ns * 1e9
        return replace(row, ns=ns, tokens_per_second=rate, mfu=mfu(rate, self.flops, self.peak), memory=memory.get(row.name, 0),
                       ratio=ratio)
