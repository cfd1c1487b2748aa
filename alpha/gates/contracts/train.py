"""Cases of `train.loop`: which text a step sees, what a resume continues, what validation counts. Floor 6.

Small runs on made-up text in a temporary folder, with the kernels of the catalogue.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from alpha import config
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cuda.executor import CudaExecutor
from alpha.checkpoint import folders, ranges
from alpha.checkpoint.disk import Disk
from alpha.component import Catalogue, Measured
from alpha.config import Config
from alpha.data.mixture import Streams
from alpha.data.sampler import Batch
from alpha.data.shards import TokenStream
from alpha.errors import AlphaError, BusyError, CorruptError, InputError, MachineError, NonFiniteError, SpotCheckError
from alpha.gates.contracts import of_settings
from alpha.graph.plan import Program
from alpha.models.parts import IGNORE
from alpha.profile.store import Store, read
from alpha.train import assemble, evaluate, rundir
from alpha.train.assemble import Dataset
from alpha.train.catalogue import catalogue
from alpha.train.home import at_home
from alpha.train.loop import Loop, Watch
from alpha.train.seal import Seal, broken, evidence_hash, why_ungated

STATE = "rank-00000-of-00001.state"
"""What one process writes of a checkpoint's state."""

RUN = """
[run]
name = "contract"
[model]
family = "gpt"
layers = 1
width = 16
heads = 2
dropout = 0.1
[data]
corpus = "{root}/text"
tokenizer = "bytes"
validation = 0.4
sequence = 8
cache = "{root}/cache"
[train]
steps = 5
batch = 12
shards = 2
micro_batch = 2
eval_every = 2
eval_windows = 5
checkpoint_every = 2
[optim]
lr = 1e-2
[machine]
threads = {threads}
"""


@cache
def _program(text: str, vocab: int) -> Program:
    cfg = config.parse(text)
    return assemble.program_for(cfg, vocab, catalogue(), assemble.threads_for(cfg))


class _RunsAhead(CpuExecutor):
    """A device that computes beside the host, as far as a loop can tell: what is handed over runs when its results are asked for or the
    state is looked at, not before, and nothing behind it does. `ahead`: how often results were asked for with work behind them; `plans`:
    how many ran; `poison`: the gradient is infinite when the update of this number runs."""

    runs_ahead = True

    def __init__(self, program: Program, catalogue: Catalogue) -> None:
        self._queue: list[tuple[str, dict[str, np.ndarray]]] = []
        self.ahead, self.updates, self.plans, self.poison = 0, 0, 0, -1
        super().__init__(program, catalogue)

    def _until(self, stop: int) -> None:
        queue, self._queue = self._queue[:stop], self._queue[stop:]
        for plan, inputs in queue:
            if plan == "update":
                if self.updates == self.poison:
                    super().state(max(kind for kind in self.program.states if kind.startswith("grad")))[0] = np.inf
                self.updates += 1
            self.plans += 1
            self._run(self.program.plans[plan], inputs)

    def enqueue(self, plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]] | None = None) -> None:
        given = self._staged.pop(plans, [{} for _ in plans]) if inputs is None else inputs
        self._queue += [(plan, {k: np.array(x) for k, x in found.items()}) for plan, found in zip(plans, given)]

    def outputs(self, plan: str) -> dict[str, np.ndarray]:
        self._until(1 + max((i for i, (name, _) in enumerate(self._queue) if name == plan), default=-1))
        self.ahead += bool(self._queue)
        return {k: x.copy() for k, x in super().outputs(plan).items()}

    def state(self, kind: str) -> np.ndarray:
        self._until(len(self._queue))
        return super().state(kind)

    def replay(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> None:
        self._until(len(self._queue))
        super().replay(plan, inputs)

    def check(self, hashes: Callable[[], None]) -> None:
        self._until(len(self._queue))  # what was handed over before comes first, and what is handed over later does not
        super().check(hashes)


class _Away(of_settings.Late):
    """How the state of `executor` is copied as from a device: what is there when the copy begins, and the copy is there when it is waited
    for."""

    def __init__(self, executor: CpuExecutor) -> None:
        super().__init__()
        self._executor = executor

    def lend(self, kind: str) -> np.ndarray:
        """The state itself: nothing that was handed over is run for it."""
        return CpuExecutor.state(self._executor, kind)


class _OnDevice(_RunsAhead, CudaExecutor):  # type: ignore[misc]  # runs here, and is taken for one of a device
    """A device as above whose state is copied beside steps."""

    digests, downloads = None, None  # type: ignore[assignment]

    def __init__(self, program: Program, catalogue: Catalogue) -> None:
        super().__init__(program, catalogue)
        self.downloads = _Away(self)  # type: ignore[assignment]


class _Run:
    """A folder with text, and loops over it."""

    def __init__(self, root: Path, rng: np.random.Generator) -> None:
        self.root = root
        (root / "text").mkdir()
        for i in range(9):
            (root / "text" / f"{i}.txt").write_bytes(rng.integers(32, 127, int(rng.integers(200, 900)), np.uint8).tobytes())
        self.cfg = self.config(2)
        self.data = assemble.open_data(self.cfg)

    def config(self, threads: int, *overrides: str) -> Config:
        return config.parse(RUN.format(root=self.root.as_posix(), threads=threads), overrides)

    @contextmanager
    def loop(self, name: str, cfg: Config | None = None, data: Dataset | None = None,
             kind: type[CpuExecutor] = CpuExecutor) -> Iterator[Loop]:
        cfg, data, folder = cfg or self.cfg, data or self.data, self.root / name
        folder.mkdir(exist_ok=True)
        with (
            kind(_program(_without_paths(cfg), data.tokenizer.vocab_size), catalogue()) as executor,
            Store(folder / "m.sqlite") as metrics,
        ):
            sampler = assemble.sampler_for(cfg, data)
            yield Loop(cfg, executor, sampler, data.validation, data.tokenizer, folder / "checkpoints", metrics)

    def rows(self, name: str) -> list[tuple[object, ...]]:
        return read(self.root / name / "m.sqlite", "step_metrics", "step, loss, norm, lr, coefficient, tokens, finite")


def _without_paths(cfg: Config) -> str:
    """The Program does not depend on where the text lies, so it is built once."""
    return config.parse(cfg.resolved(), ["data.corpus=x", "data.cache=x"]).resolved()


@contextmanager
def _run(rng: np.random.Generator) -> Iterator[_Run]:
    with tempfile.TemporaryDirectory(prefix="alpha-loop-") as root:
        yield _Run(Path(root), rng)


def _bits(loop: Loop) -> bytes:
    """Every named tensor of the state."""
    parts = [flat[o : o + n].tobytes() for _, (layout, flat) in sorted(loop.states().items()) for o, n in layout.ranges()]
    return b"".join(parts)


def _measured(checks: list[tuple[str, bool]], digest: bytes = b"") -> Measured:
    wrong = [name for name, holds in checks if not holds]
    return Measured(float(len(wrong)), 0.0, len(checks), hashlib.sha256(digest).hexdigest(), "; ".join(wrong)[:200])


# -- parity --------------------------------------------------------------------------------------------------------------------


def text_of_a_step(rng: np.random.Generator) -> Measured:
    """The calls of a step read the global batch once, in order, each row with its target and its global sample id."""
    checks = []
    with _run(rng) as run, run.loop("a") as loop:
        asked = [(c.shard, loop.cfg.train.shards, c.micro, loop.cfg.micros, False) for c in loop.program.schedule if c.shard is not None]
        checks.append(("what a step asks for", loop.texts() == asked and len(asked) > 1))
        for step in (0, 1, 7, int(rng.integers(8, 500))):
            loop.step = step
            whole = loop.sampler.batch(step)
            seen = [loop.inputs(call) for call in loop.program.schedule if call.shard is not None]
            for name, expected in (("tokens", whole.inputs_bT), ("targets", whole.targets_bT), ("sample_ids", whole.samples_b)):
                got = np.concatenate([x[name] for x in seen])
                checks.append((f"step {step}: {name}", np.array_equal(got, expected) and got.dtype == np.int32))
            positions = np.concatenate([x["positions"] for x in seen])
            checks.append((f"step {step}: positions", np.array_equal(positions, np.tile(np.arange(8), (12, 1)))))
            checks.append(
                (f"step {step}: a call without text", all(loop.inputs(c) == {} for c in loop.program.schedule if c.shard is None))
            )
            far = replace(whole, samples_b=np.array([2**31 - 2, 2**31 - 1, 2**31, 2**40 + 7]))
            ids = evaluate.model_inputs({"sample_ids"}, far)["sample_ids"].tolist()
            checks.append((f"numbers of far samples {ids}", ids == [2**31 - 2, 2**31 - 1, 0, 7]))
            checks.append((f"step {step}: shift by one", np.array_equal(whole.inputs_bT[:, 1:], whole.targets_bT[:, :-1])))
    return _measured(checks)


def by_hand(rng: np.random.Generator) -> Measured:
    """`run` is the schedule called step by step: same state, and every row of the metrics is what the update gave out."""
    checks = []
    with _run(rng) as run:
        with run.loop("a") as loop:
            asked, batch = list[int](), loop.sampler.batch
            loop.sampler.batch = lambda step, *call, **more: asked.append(step) or batch(step, *call, **more)  # type: ignore[method-assign, func-returns-value]
            loop.start()
            checks.append(("finished", loop.run()))
            checks.append((f"text of steps {sorted(set(asked))}", set(asked) == set(range(5))))
            got = _bits(loop)
        expected: list[tuple[object, ...]] = []
        with run.loop("b") as loop:
            loop.start()
            for step in range(5):
                loop.step = step
                for call in loop.program.schedule:
                    out = loop.executor.run(call.plan, loop.inputs(call))
                o = {k: float(v) for k, v in out.items()}
                expected.append((step, o["loss_sum"] / o["count"], o["norm"], o["lr"], o["coefficient"], 96, 1))
            checks.append(("state differs from the schedule run by hand", _bits(loop) == got))
            checks.append(("count is not the step's tokens", o["count"] == 96))
            checks.append(("steps counted on the device", int(loop.executor.state("counter")[0]) == 5))
        checks.append(("metrics differ from what the update gave out", run.rows("a") == expected))
        found = read(run.root / "a" / "m.sqlite", "evaluations", "step, windows")
        checks.append(("validations at other steps", found == [(2, 5), (4, 5)]))
        checks.append(("checkpoints at other steps", folders.steps(run.root / "a" / "checkpoints") == [4, 5]))
        with run.loop("c") as loop:  # the last step is left to whoever ends the run, though it is a multiple
            seen, batch = list[object](), loop.sampler.batch
            loop.cfg = replace(loop.cfg, train=replace(loop.cfg.train, eval_every=5, sample_every=5))
            loop.sampler.batch = lambda step, *call, **more: _without_targets(batch(step, *call, **more), step == 2)  # type: ignore[method-assign]
            loop.start()
            losses: list[float] = []
            loop.run(Watch(step=lambda result: losses.append(result.loss), evaluated=lambda *x: seen.append(x),
                           sampled=lambda *x: seen.append(x)))
            checks.append((f"told at the last step: {seen}", not seen and not read(run.root / "c" / "m.sqlite", "evaluations", "step")))
            checks.append((f"a step without targets has a loss: {losses}", [math.isnan(x) for x in losses] == [i == 2 for i in range(5)]))
    return _measured(checks)


def _without_targets(batch: Batch, here: bool) -> Batch:
    return replace(batch, targets_bT=np.full_like(batch.targets_bT, IGNORE)) if here else batch


def resumed(rng: np.random.Generator) -> Measured:
    """Stopped after any step and resumed in a fresh executor: the same bits and the same rows as without."""
    checks = []
    with _run(rng) as run:
        with run.loop("whole") as loop:
            loop.start()
            loop.run()
            expected = _bits(loop)
        for stop in (1, 2, 3, 4):
            name = f"stop{stop}"
            with run.loop(name) as loop:
                loop.start()
                went = loop.run(Watch(stop=lambda loop=loop, stop=stop: loop.step == stop))  # type: ignore[misc]
                checks.append((f"{name}: did not stop", not went and loop.step == stop and bool(loop.ended_by)))
            with run.loop(name) as loop:
                loop.executor.state("param")[...] = 3.0
                loop.resume()
                checks.append((f"{name}: resumed at another step", loop.step == stop))
                checks.append((f"{name}: did not finish", loop.run()))
                checks.append((f"{name}: other bits", _bits(loop) == expected))
            checks.append((f"{name}: other rows", run.rows(name) == run.rows("whole")))
        with run.loop("stop4") as loop:
            verdicts, alone = [False], loop.ranks.all
            loop.ranks.all = lambda holds: alone(holds) and (verdicts.pop() if verdicts else True)  # type: ignore[method-assign]
            loop.resume()
            checks.append(("a checkpoint that another rank found damaged", loop.step == 4 and len(loop.passed) == 1))
        with run.loop("stop4") as loop:
            loop.resume(4)
            checks.append(("an earlier checkpoint", loop.step == 4 and loop.run() and _bits(loop) == expected))
    return _measured(checks)


def taken_back(rng: np.random.Generator) -> Measured:
    """A run that is taken back to an earlier checkpoint: later ones are set aside, rows of later steps are gone, and it goes on to the same
    bits. One that is started anew begins where a fresh one does."""
    checks = []
    with _run(rng) as run, run.loop("a", run.config(2, "train.keep=9")) as loop:
        loop.start()
        fresh = _bits(loop)
        loop.run()
        expected, rows = _bits(loop), run.rows("a")
        loop.resume(2)
        checks.append(("later checkpoints stand", folders.steps(loop.checkpoints) == [2]))
        loop.metrics.flush()
        checks.append(("rows of later steps stand", run.rows("a") == rows[:2]))
        checks.append(("other bits", loop.run() and _bits(loop) == expected and run.rows("a") == rows))
        loop.start()
        checks.append(("started anew elsewhere", _bits(loop) == fresh))
        facts = loop.facts()
        loop.facts = lambda: {**facts, "sampler": {**facts["sampler"], "next_step": 1}}  # type: ignore[method-assign]
        loop.checkpoints = loop.saver.folder = run.root / "b"
        loop.save()
        checks.append(("a checkpoint that continues with other text", _raises(loop.resume, CorruptError)))
    return _measured(checks)


def left_over(rng: np.random.Generator) -> Measured:
    """Checkpoints that a save was killed before dropping are dropped where the run goes on from it or from an earlier one, also behind the
    last step, where no save follows."""
    checks = []
    with _run(rng) as run:
        with run.loop("whole", run.config(2, "train.keep=9")) as loop:
            loop.start()
            loop.run()
            whole, steps = loop.checkpoints, folders.steps(loop.checkpoints)
        for case, at in enumerate((None, None, *steps)):
            keep, every = int(rng.integers(1, 3)), (0, 2)[case % 2]
            with run.loop(f"again{case}", run.config(2, f"train.keep={keep}", f"train.keep_every={every}")) as loop:
                shutil.copytree(whole, loop.checkpoints, dirs_exist_ok=True)
                loop.resume(at)
                early = [s for s in steps if at is None or s <= at]
                want = [s for i, s in enumerate(early) if len(early) - i <= keep or (every and s % every == 0)]
                found = folders.steps(loop.checkpoints)
                checks.append((f"{found}, not {want} of {steps} up to {at} stand: keep {keep}, every {every}", found == want))
    return _measured(checks)


def ahead(rng: np.random.Generator) -> Measured:
    """On a device beside the host the microbatches of a step are handed over before the results of the step before are asked for, where
    nothing but it follows: each once, with its own text, to the bits and rows of a loop that waits; also stopped between and gone on."""
    checks = []
    with _run(rng) as run:
        cfg = run.config(2, "train.steps=6", "train.eval_every=0", "train.checkpoint_every=4", "train.profile=0", "train.verify=0")
        with run.loop("waits", cfg) as loop:
            loop.start()
            loop.run()
            expected = _bits(loop)
        for name, stops in (("whole", ()), ("stopped", (2, 3))):
            with run.loop(name, cfg, kind=_RunsAhead) as loop:
                executor = loop.executor
                assert isinstance(executor, _RunsAhead)
                loop.start()
                for stop in stops:
                    checks.append((f"{name}: did not stop", not loop.run(Watch(stop=lambda loop=loop, stop=stop: loop.step == stop))))  # type: ignore[misc]
                checks.append((f"{name}: did not finish", loop.run()))
                checks.append((f"{name}: other bits", _bits(loop) == expected))
                if not stops:  # a pause after four steps, and the last has none behind it
                    checks.append((f"ahead {executor.ahead} times", executor.ahead == 4))
                    checks.append((f"{executor.plans} plans ran", executor.plans == 6 * len(loop.program.schedule)))
            checks.append((f"{name}: other rows", run.rows(name) == run.rows("waits")))
        with run.loop("left", cfg, kind=_RunsAhead) as loop:
            loop.start()
            loop.run(Watch(stop=lambda: loop.step == 3))
        with run.loop("left", cfg) as loop:
            loop._save_due, loop._handed = True, 3  # of what the state was before
            loop.resume()
            checks.append(("what was due is so behind a return", not loop._save_due and loop._handed is None))
            checks.append(("resumed where it was stopped", loop.step == 3 and loop.run() and _bits(loop) == expected))
        with run.loop("profiled", run.config(2, "train.steps=9", "train.eval_every=0", "train.checkpoint_every=0", "train.profile=2",
                                             "train.verify=0"), kind=_RunsAhead) as loop:
            loop.start()
            loop.run()
            wanted = sum(not (loop.profiled(step) or loop.profiled(step + 1)) for step in range(8))
            checks.append(("ahead beside a profiled step", getattr(loop.executor, "ahead", -1) == wanted < 8))
        for key in ("eval_every", "sample_every", "checkpoint_every"):  # alone: nothing is handed over ahead of what looks at the state
            every = {k: 0 for k in ("eval_every", "sample_every", "checkpoint_every")} | {key: 3}
            with run.loop(key, run.config(2, "train.steps=8", "train.profile=0", "train.verify=0",
                                          *(f"train.{k}={n}" for k, n in every.items())), kind=_RunsAhead) as loop:
                loop.start()
                seen = []
                for _ in range(8):
                    seen.append(loop.unbroken())
                    loop.step += 1
                checks.append((f"{key}: ahead {seen}", seen == [(step + 1) % 3 != 0 and step < 7 for step in range(8)]))
    return _measured(checks)


def _story(loop: Loop, device: bool) -> tuple[list[str], list[list[str]], list[tuple[bool, bool, bool]]]:
    """What a loop over all steps does in turn; of each save but the last what the steps wait for, in the same words; of each step whether
    it had been handed over ahead, whether a save was under way, and whether it was like others. A save is over when it was polled once
    behind its opening."""
    t, micros = loop.cfg.train, len(loop.replays) - 1
    checked = [t.verify > 0 and step % t.verify == 0 for step in range(t.steps + 1)]
    alike = [not checked[step] and not loop.profiled(step) for step in range(t.steps)]
    told, waits, steps = list[str](), list[list[str]](), list[tuple[bool, bool, bool]]()
    handed = begun = open_ = False
    for step in range(t.steps):
        due = device and step > 0 and step % t.checkpoint_every == 0
        if due and checked[step]:
            told, due, begun = [*told, "begin"], False, True
            waits[-1] += ["begin"]
        for _ in range(0 if handed else micros):
            told += [f"microbatches of {step}", *["begin"] * due]
            due, begun = False, begun or due
        told += ["begin"] * due
        begun = begun or due
        told += [f"update of {step}"]
        if begun and not checked[step] and checked[step + 1]:
            told, begun, open_ = [*told, "open"], False, True
        told += [f"wrote {step}"]
        last, by = step + 1 == t.steps, (t.eval_every, t.checkpoint_every * (not device))
        ahead = device and not last and alike[step] and alike[step + 1] and not any(n and (step + 1) % n == 0 for n in by)
        told += [f"microbatches of {step + 1}"] * (micros * ahead)
        if begun and not checked[step]:
            told, begun, open_ = [*told, "open"], False, True
        told += [f"results of {step}"]
        steps.append((handed, begun or open_, alike[step]))
        end, handed, open_ = ["poll"], ahead, False
        if last or (step + 1) % t.checkpoint_every == 0:
            end, begun = [*end, "finish", *["open"] * begun], False
        told += end
        if waits and not handed:
            waits[-1] += end
        if last:
            told += ["begin", "open", "finish"]
        elif "finish" in end:
            waits.append([] if device else ["begin", "open"])
            told, open_ = [*told, *waits[-1]], not device
    return told, waits, steps


def beside(rng: np.random.Generator) -> Measured:
    """Of drawn distances between saves, checks and validations, on a device and on arrays: a save begins behind the first microbatches of
    its step or ahead of a checked one, the host's part comes while the device has work, which is before a checked step is waited for; and
    each ns that the steps waited, or took beside a save, is told as that save's. What stands is the state as it was."""
    checks = []
    with _run(rng) as run:
        fixed = ("train.steps=9", "train.keep=99", "train.verify=0", "train.profile=0", "train.eval_every=0")
        with run.loop("plain", run.config(2, *fixed)) as loop:
            loop.start()
            after = []
            while loop.step < 9:
                after.append(_bits(loop))
                loop.advance()
            after.append(_bits(loop))
        drawn = [(int(rng.integers(1, 5)), *(int(x) for x in rng.choice((0, 2, 3, 4), 3))) for _ in range(2)]
        settings = [(2, 3, 0, 0), (3, 2, 0, 2), *drawn]
        for trial, (every, verify, evals, profile) in enumerate(settings):
            kind = CpuExecutor if trial % 3 == 2 else _OnDevice
            cfg = run.config(2, *fixed[:2], f"train.checkpoint_every={every}", f"train.verify={verify}", f"train.eval_every={evals}",
                             f"train.profile={profile}")
            name = f"{kind.__name__} {every} {verify} {evals} {profile}"
            with run.loop(name, cfg, kind=kind) as loop:
                did, took, clock = _watched(loop, {what: int(rng.integers(1, 999)) for what in ("begin", "open", "poll", "finish")})
                loop.start()
                loop.foretell_saves()
                checks.append((f"{name}: did not finish", loop.run()))
                told, waits, steps = _story(loop, kind is _OnDevice)
                at = next((i for i, pair in enumerate(zip(did, told)) if pair[0] != pair[1]), min(len(did), len(told)))
                checks.append((f"{name}: {did[at - 2 : at + 2]} for {told[at - 2 : at + 2]}", did == told))
                checks.append((f"{name}: waits", loop.stalls.waits_ns == [sum(clock[what] for what in save) for save in waits]))
                checks.append((f"{name}: steps {[x[1:] for x in took]}", [x[1:] for x in took] == steps))
                under, quiet, saves = [list[tuple[bool, int]]() for _ in waits], {True: list[int](), False: list[int]()}, 0
                for step, (ns, ahead, saving, usual) in enumerate(took):
                    saves = min(step // every, len(waits)) if kind is _OnDevice else 0
                    if kind is _OnDevice and usual and step >= 3:  # those of the warm-up are left out
                        (under[saves - 1].append((ahead, ns)) if saving else quiet[ahead].append(ns))
                checks.append((f"{name}: beside saves", loop.stalls.under_way == under))
                checks.append((f"{name}: beside none", loop.stalls.quiet == quiet))
                where = folders.steps(loop.checkpoints)
                checks.append((f"{name}: {where} stand", where == sorted({*range(every, 9, every), 9})))
                for step in where:
                    state = folders.read(folders.at(loop.checkpoints, step))
                    bits = b"".join(flat[o : o + n].tobytes() for _, (layout, flat) in sorted(state.items()) for o, n in layout.ranges())
                    checks.append((f"{name}: step {step} is another state", bits == after[step]))
            keys = {str(key) for key, _ in read(run.root / name / "m.sqlite", "run_metadata", "key, value")}
            checks.append((f"{name}: told {sorted(keys)}", ("save_copy_ns" in keys) == (kind is _OnDevice) and "save_bytes" in keys))
    return _measured(checks)


def _watched(loop: Loop, costs: dict[str, int]) -> tuple[list[str], list[tuple[int, bool, bool, bool]], dict[str, int]]:
    """What it does from here on; (ns, ahead, saving, usual) of each step as its stalls are told; `costs`, ns by their clock of each part of
    a save. The thread that writes is waited for where a save is polled, so that nothing hangs on it."""
    did, took, now = list[str](), list[tuple[int, bool, bool, bool]](), [0]
    saver, executor, stalls = loop.saver, loop.executor, loop.stalls
    enqueue, outputs, wrote, stepped, polled = executor.enqueue, executor.outputs, loop.spots.wrote, stalls.stepped, saver.poll
    plans = [tuple(call.plan for call in calls) for calls in loop.replays]
    given = [0] * len(plans)

    def handed(names: tuple[str, ...], inputs: Any = None) -> None:
        if names in plans:
            which = plans.index(names)
            each = plans.count(names)
            did.append(f"{'update' if which + 1 == len(plans) else 'microbatches'} of {given[which] // each}")
            given[which] += 1
        enqueue(names, inputs)

    def asked(name: str) -> dict[str, np.ndarray]:
        if name == loop.role.schedule[-1].plan:
            did.append(f"results of {loop.step}")
        return outputs(name)

    def noted(step: int) -> None:
        did.append(f"wrote {step}")
        wrote(step)

    def timed(ns: int, micro_ns: int, *, ahead: bool, saving: bool, usual: bool) -> None:
        took.append((ns, ahead, saving, usual))
        stepped(ns, micro_ns, ahead=ahead, saving=saving, usual=usual)

    def part(what: str) -> Callable[..., Any]:
        own = getattr(saver, what)

        def called(*args: Any) -> Any:
            if what == "open" and not saver.begun:
                return own(*args)
            did.append(what)
            now[0] += costs[what]
            return own(*args)
        return called

    def over() -> Any:
        made = polled()
        while saver._written is not None or saver._made is not None:
            made = polled() or made
        return made

    saver.poll = over  # type: ignore[method-assign]
    for what in costs:
        setattr(saver, what, part(what))
    executor.enqueue, executor.outputs = handed, asked  # type: ignore[method-assign, assignment]
    loop.spots.wrote, stalls.stepped = noted, timed  # type: ignore[method-assign]
    stalls.clock = lambda: now[0]
    return did, took, costs


class _Lengths:
    """As much of a tokenizer as validation reads."""

    def __init__(self, byte_lengths: np.ndarray) -> None:
        self.byte_lengths = byte_lengths


def validation(rng: np.random.Generator) -> Measured:
    """A model whose logits are all equal loses ln V a token, whatever the text: nats, tokens and bytes are then known exactly."""
    checks: list[tuple[str, bool]] = []
    worst = 0.0
    with _run(rng) as run, run.loop("a") as loop:
        loop.executor.state("param")[...] = 0.0
        stream, tokenizer = run.data.validation, loop.tokenizer
        assert isinstance(stream, TokenStream)
        total = (len(stream) - 1) // 8
        all_targets = stream.windows(np.arange(total) * 8 + 1, 8)
        uneven = next(n for n in range(3, total) if total % n > 1)  # only there is the last window not the same from either end
        for windows in (1, 2, 5, uneven, total, 0, total + 9):
            n = total if windows in (0, total + 9) else windows
            found = evaluate.evaluate(loop.executor, stream, tokenizer, windows)
            chosen = np.array([i * total // n for i in range(n)])
            checks.append((f"{windows}: other windows", evaluate.chosen_windows(stream, 8, windows).tolist() == chosen.tolist()))
            targets = all_targets[chosen]
            nats = n * 8 * math.log(tokenizer.vocab_size)
            worst = max(worst, abs(found.nats / nats - 1.0))
            checks.append((f"{windows}: windows", found.windows == n == len(set(chosen.tolist()))))
            checks.append((f"{windows}: tokens", found.tokens == n * 8))
            checks.append((f"{windows}: bytes", found.bytes == sum(len(tokenizer.decode(row)) for row in targets)))
            bits = found.nats / math.log(2.0) / found.bytes
            checks.append((f"{windows}: bits per byte", math.isclose(found.bits_per_byte, bits, rel_tol=1e-12)))
        made_up = _Lengths(rng.integers(0, 9, tokenizer.vocab_size))
        for windows in (3, total):
            counted = evaluate.evaluate(loop.executor, stream, made_up, windows).bytes  # type: ignore[arg-type]
            expected = sum(int(made_up.byte_lengths[t]) for t in all_targets[evaluate.chosen_windows(stream, 8, windows)].ravel())
            checks.append((f"{windows}: bytes of tokens of many lengths", counted == expected))
        checks.append((f"nats off by {worst}", worst < 1e-5))
        before = _bits(loop)
        one = loop.evaluate(3)
        loop.validation = Streams((("a", stream), ("b", stream), ("c", stream)))
        checks.append(("three sources", asdict(loop.evaluate(3)) == {k: 3 * v for k, v in asdict(one).items()}))
        checks.append(("validation changed the state", _bits(loop) == before))
    return _measured(checks)


def lasts_longer(rng: np.random.Generator) -> Measured:
    """A run goes on for another number of steps from where both had the same rates, with the bits of one that was meant to last so long;
    from behind it is refused, with the step that may be gone on from."""
    checks = []
    wsd = ("optim.schedule=wsd", "optim.decay=2", "train.keep=9", "train.checkpoint_every=1")
    with _run(rng) as run:
        with run.loop("whole", run.config(2, *wsd, "train.steps=9")) as loop:
            loop.start()
            loop.run()
            expected, rows = _bits(loop), run.rows("whole")
        for name, more in (("a", wsd), ("cosine", ("train.keep=9", "train.checkpoint_every=1"))):
            with run.loop(name, run.config(2, *more)) as loop:
                loop.start()
                loop.run()
        for steps, bound in ((9, "step 4 or before"), (4, "step 3 or before")):
            with run.loop("a", run.config(2, *wsd, f"train.steps={steps}")) as loop:
                try:
                    loop.resume(5 if steps == 9 else 4)
                    checks.append((f"a run of 5 steps went on to {steps} from its end", False))
                except InputError as error:
                    checks.append((f"{steps}: {error}", bound in str(error) and "wsd" in error.what))
        with run.loop("cosine", run.config(2, *wsd[2:], "train.steps=9")) as loop:
            checks.append(("a cosine was made longer", _raises(lambda: loop.resume(5), InputError)))
        with run.loop("a", run.config(2, *wsd, "train.steps=9")) as loop:
            loop.resume(4)
            checks.append(("other bits than the long run", loop.run() and _bits(loop) == expected and run.rows("a") == rows))
        with run.loop("a", run.config(2, *wsd)) as loop:
            loop.resume(4)  # saved by the short run, kept by the long one
            checks.append(("the short run does not go on", loop.run() and loop.step == 5))
    return _measured(checks)


# -- faults --------------------------------------------------------------------------------------------------------------------


def _refused(loop: Loop, kind: type[Exception]) -> bool:
    """Whether resuming is refused with exactly this error, before anything of the state changed."""
    before = _bits(loop)
    try:
        loop.resume()
    except Exception as error:  # any other class is a wrong answer
        return type(error) is kind and _bits(loop) == before
    return False


def _raises(action: Callable[[], object], kind: type[Exception]) -> bool:
    try:
        action()
    except kind:
        return True
    return False


def not_this_run(rng: np.random.Generator) -> Measured:
    """A checkpoint of another configuration or of other text is not continued; one that is damaged is, from the one before it."""
    checks = []
    with _run(rng) as run:
        with run.loop("a") as loop:
            checks.append(("resumed from nothing", _refused(loop, InputError)))
            loop.start()
            states = {kind: (layout, flat.copy()) for kind, (layout, flat) in loop.snapshot().items()}
            states["counter"][1][...] = 1 + int(rng.integers(9))
            odd = folders.save(loop.checkpoints, 0, states, loop.facts())
            checks.append(("resumed with a counter of another step", _raises(loop.resume, CorruptError)))
            shutil.rmtree(odd)
            loop.start()
            loop.run()
            last, expected = folders.at(loop.checkpoints), _bits(loop)
        for override in ("run.seed=2", "optim.weight_decay=0.2", "train.steps=6"):
            with run.loop("a", run.config(2, override)) as loop:
                checks.append((f"resumed with {override}", _refused(loop, InputError)))
        changed = run.root / "text" / run.data.split.train.documents[0].relpath
        changed.write_bytes(b"another text, which moves every window behind it")
        with run.loop("a", data=assemble.open_data(run.cfg)) as loop:
            checks.append(("resumed on other text", _refused(loop, InputError)))
        raw = bytearray((last / STATE).read_bytes())
        raw[len(raw) // 2] ^= 1
        (last / STATE).write_bytes(raw)
        with run.loop("a") as loop:
            try:
                loop.resume(5)
                checks.append(("resumed from a damaged file that was asked for", False))
            except CorruptError:
                pass
            loop.resume()
            checks.append((f"went on from step {loop.step}", loop.step == 4 and len(loop.passed) == 1))
            checks.append(("the damaged file is not named", "rank-00000-of-00001.state" in str(loop.passed)))
            checks.append(("other bits afterwards", loop.run() and _bits(loop) == expected))
            for step in (4, 5):
                file = folders.at(loop.checkpoints, step) / STATE
                file.write_bytes(file.read_bytes()[:-1])
        with run.loop("a") as loop:
            try:
                loop.resume()
                checks.append(("resumed where nothing is whole", False))
            except CorruptError as error:  # of the one that it would have gone on from
                checks.append((f"told of another: {error.what}", folders.at(loop.checkpoints, 5).name in str(error)))
    return _measured(checks)


def full_disk(rng: np.random.Generator) -> Measured:
    """The disk fills up while a run saves: the error says so, and the run goes on from the checkpoint before."""
    checks = []
    with _run(rng) as run:
        with run.loop("whole") as loop:
            loop.start()
            loop.run()
            expected = _bits(loop)
        with run.loop("a") as loop:
            loop.start()
            loop.run(Watch(stop=lambda: loop.step == 3))
            real, message = Disk.write, ""
            Disk.write = _no_room  # type: ignore[method-assign, assignment]
            try:
                loop.run()
            except MachineError as error:
                message = error.what
            finally:
                Disk.write = real  # type: ignore[method-assign]
            checks.append((f"the message is {message!r}", "disk is full" in message))
            checks.append(("an earlier checkpoint is gone", folders.steps(loop.checkpoints) == [2, 3]))
        with run.loop("a") as loop:
            loop.resume()
            checks.append(("other bits afterwards", loop.step == 3 and loop.run() and _bits(loop) == expected))
    return _measured(checks)


def _no_room(disk: Disk, path: Path, chunks: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def changed_meanwhile(rng: np.random.Generator) -> Measured:
    """Weights and moments that change by themselves, between the last microbatch of the step behind a checked one and its update, end the
    run by name."""
    checks = []
    with _run(rng) as run:
        for kind in ("param", "m", "v"):
            with run.loop(kind) as loop:
                loop.start()
                enqueue, layout = loop.executor.enqueue, loop.program.states[kind]
                tensor = layout.tensors[int(rng.integers(len(layout.tensors)))]
                place = layout.offsets[tensor.name] + int(rng.integers(tensor.size))

                flips: list[int] = []

                def flipped(plans: tuple[str, ...], inputs: Any = None, *, loop: Loop = loop, kind: str = kind, place: int = place,
                            enqueue: Any = enqueue, flips: list[int] = flips) -> None:
                    enqueue(plans, inputs)
                    if plans == tuple(call.plan for call in loop.replays[-2]) and loop.step == 1:
                        flips.append(place)
                        if len(flips) == 1:
                            loop.executor.state(kind).view(np.uint32)[place] ^= np.uint32(1 << 20)

                loop.executor.enqueue = flipped  # type: ignore[method-assign]
                loop.spots._each_ns = 0  # every piece is hashed, whatever it costs
                loop.advance()
                try:
                    loop.advance()
                    checks.append((f"{kind}: nothing was told", False))
                except SpotCheckError as error:
                    checks.append((f"{kind}: {error}"[:120], kind in error.what and tensor.name in str(error)))
    return _measured(checks)


def from_devices(rng: np.random.Generator) -> Measured:
    """A checkpoint of what lies on a device comes the way that its executor knows; of what lies here by copies of arrays."""
    checks, way = [], ranges.OfArrays()

    class OnDevice(CpuExecutor, CudaExecutor):  # type: ignore[misc]  # runs here, and is taken for one of a device
        downloads, digests = way, None  # type: ignore[assignment]

    with _run(rng) as run:
        for kind in (OnDevice, CpuExecutor):
            with run.loop(kind.__name__, kind=kind) as loop:
                saver, late = loop.saver, kind is OnDevice
                checks.append((kind.__name__, (saver.copies is way, saver.late, loop.downloads is way) == (late, late, late)))
    return _measured(checks)


def foretold(rng: np.random.Generator) -> Measured:
    """A save is rehearsed where one will have steps behind it, and only there: from any step, for any distance between saves."""
    checks = []
    with _run(rng) as run, run.loop("a") as loop:
        told: list[int] = []
        loop.stalls.rehearse = lambda *how: told.append(loop.step)  # type: ignore[method-assign]
        for every in (0, 1, 2, 3, 4, 5, 6):
            loop.cfg = replace(loop.cfg, train=replace(loop.cfg.train, checkpoint_every=every))
            for step in range(5):
                loop.step = step
                told.clear()
                loop.foretell_saves()
                wanted = any(every and at % every == 0 for at in range(step + 1, 5))
                checks.append((f"every {every} from step {step}", bool(told) == wanted))
    return _measured(checks)


def bad_step(rng: np.random.Generator) -> Measured:
    """A step that is not finite is refused: named, state untouched and saved, the step not counted."""
    checks = []
    with _run(rng) as run, run.loop("a", run.config(2, "train.verify=0")) as loop:  # which would see the change first
        loop.start()
        loop.advance()
        layout = loop.program.states["param"]
        place = layout.offsets[next(t.name for t in layout.tensors if t.name.endswith("mlp.up.weight"))]
        for value in (np.nan, np.inf):
            loop.executor.state("param")[place] = value
            before, message = _bits(loop), ""
            try:
                loop.advance()
            except NonFiniteError as error:
                message = str(error)
            checks.append((f"{value}: not refused", bool(message)))
            checks.append((f"{value}: names no op ({message[:60]})", "block.0" in message and "model line" in message))
            checks.append((f"{value}: changed the state", _bits(loop) == before))
            checks.append((f"{value}: counted", loop.step == 1 and run.rows("a")[-1][0] == 1 and run.rows("a")[-1][-1] == 0))
            checks.append((f"{value}: not saved", folders.steps(loop.checkpoints) == [1]))
        loop.executor.recorder.finish()
        loop.metrics.flush()
        timed = read(run.root / "a" / "m.sqlite", "step_timing", "step")
        checks.append((f"steps that are timed: {timed}, not the first alone", timed == [(0,)]))
    return _measured(checks)


def bad_step_ahead(rng: np.random.Generator) -> Measured:
    """A gradient that is not finite once, in a step behind which the next one was handed over: refused with the state as it was, and the
    loop goes on from there to the bits of a run that had no such step."""
    checks = []
    with _run(rng) as run:
        cfg = run.config(2, "train.eval_every=0", "train.checkpoint_every=0", "train.profile=0", "train.verify=0")
        with run.loop("good", cfg) as loop:
            loop.start()
            loop.run()
            expected = _bits(loop)
        with run.loop("a", cfg) as loop:
            loop.start()
            loop.run(Watch(stop=lambda: loop.step == 2))
            before = _bits(loop)
        with run.loop("b", cfg, kind=_RunsAhead) as loop:
            executor, refused = loop.executor, False
            assert isinstance(executor, _RunsAhead)
            loop.start()
            executor.poison = 2
            try:
                loop.run()
            except NonFiniteError:
                refused = True
            checks.append(("not refused", refused))
            checks.append(("nothing was handed over behind it", executor.ahead == 3))
            checks.append(("changed the state", _bits(loop) == before))
            checks.append(("counted", loop.step == 2 and folders.steps(loop.checkpoints) == [2] and run.rows("b")[-1][-1] == 0))
            told = run.rows("b")[-1]
            checks.append((f"a number that is none is told: {told}", None in told and not {math.inf, "inf", "nan"} & {*told}))
            checks.append(("did not go on", loop.run() and _bits(loop) == expected))
    return _measured(checks)


def sealed(rng: np.random.Generator) -> Measured:
    """A run is GATED only where its manifest and the checkpoint that it goes on from are sound and agree; anything lost, mixed up or
    edited makes it UNGATED."""
    checks = []
    with _run(rng) as run:
        for name, seal in (("gated", Seal("one", "GATED", "e1")), ("lab", Seal("one", "UNGATED", "e1")), ("unset", None)):
            with run.loop(name) as loop:
                loop.seal = seal or loop.seal
                loop.start()
                loop.run(Watch(stop=lambda loop=loop: loop.step == 2))  # type: ignore[misc]
                program = loop.program.hash()
        folder = run.root / "gated"
        session: dict[str, object] = {"gated": True, "evidence": "e1", "program": program, "from_step": 0}
        good = {"run": "one", "status": "GATED", "sessions": [session]}
        saved, lab, unset = (folders.inspect(folders.at(run.root / n / "checkpoints")) for n in ("gated", "lab", "unset"))
        checks.append(("a gated run is not", broken(rundir.sealed(good), saved) == "" == broken(rundir.sealed(good))))

        def threat(what: str, manifest: Mapping[str, object], found: folders.Saved | None = saved) -> None:
            checks.append((f"{what}: GATED", bool(broken(manifest, found))))

        def seal_of(**changed: str) -> folders.Saved:
            return replace(saved, facts={**saved.facts, "seal": {**saved.facts["seal"], **changed}})

        gates = {f"kernel.{i}": {f"gate.{k}": f"{i}{k}" for k in rng.permutation(3).tolist()} for i in rng.permutation(4).tolist()}
        alike = {c: dict(sorted(of.items())) for c, of in sorted(gates.items())}
        known = hashlib.sha256(json.dumps(alike).encode()).hexdigest()
        checks.append(("the order in which evidence was found", evidence_hash(gates) == known == evidence_hash(alike)))
        threat("no manifest", {})
        threat("no manifest and no checkpoint", {}, None)
        threat("an edited word", {**rundir.sealed({**good, "status": "UNGATED"}), "status": "GATED"})
        threat("a manifest without a hash", {"format": rundir.MANIFEST_FORMAT, **good})
        threat("an older manifest", {**rundir.sealed(good), "format": 1})
        threat("a run marked UNGATED", rundir.sealed({**good, "status": "UNGATED"}))
        threat("an ungated session", rundir.sealed({**good, "sessions": [session, {**session, "gated": False}]}))
        threat("a lab run's checkpoint", rundir.sealed(good), lab)
        threat("a checkpoint that nobody sealed", rundir.sealed(good), unset)
        threat("a checkpoint without a seal", rundir.sealed(good), replace(saved, facts={"program": program}))
        threat("the word alone in another checkpoint", rundir.sealed(good), seal_of(status="UNGATED"))
        threat("another run's checkpoint", rundir.sealed(good), seal_of(run="three"))
        threat("other evidence", rundir.sealed(good), seal_of(evidence="e2"))
        threat("another Program", rundir.sealed(good), replace(saved, facts={**saved.facts, "program": "other"}))
        for first in range(5):  # a checkpoint of the step that a session began with may be its own
            why = broken(rundir.sealed({**good, "sessions": [{**session, "from_step": first}]}), saved)
            checks.append((f"a session from step {first} on: {why or 'GATED'}", bool(why) == (first > saved.step)))
        (folder / "config.toml").write_text(run.cfg.resolved())
        held = rundir.RunDir(folder)
        held.write_manifest(good)
        held.close()
        checks.append((f"the folder is not GATED: {why_ungated(folder)}", why_ungated(folder) == ""))
        last = folders.at(folder / "checkpoints")
        (last / folders.MANIFEST).write_text((last / folders.MANIFEST).read_text().replace("GATED", "gated"))
        checks.append(("an edited checkpoint is GATED", bool(why_ungated(folder))))
    return _measured(checks)


def run_directory(rng: np.random.Generator) -> Measured:
    """Made whole and forced to the medium, held by one process whatever becomes of `.lock`, left alone by one that lost it."""
    checks = []
    with _run(rng) as run:
        cfg = replace(run.cfg, run=replace(run.cfg.run, out=str(run.root / "runs")))
        forced: dict[int, int] = {}
        real = os.fsync

        def spy(handle: int) -> None:
            info = os.fstat(handle)
            forced[info.st_ino] = info.st_size
            real(handle)

        os.fsync = spy  # type: ignore[assignment]
        try:
            first = rundir.create(cfg, run.data.tokenizer, "GATED")
        finally:
            os.fsync = real
        for name in ("manifest.json", "config.toml", "tokenizer.json"):
            info = (first.path / name).stat()
            checks.append((f"{name} was not forced to the medium", forced.get(info.st_ino) == info.st_size))
        for place in (first.path, first.path.parent):
            checks.append((f"the entries of {place.name} were not forced", place.stat().st_ino in forced))
        checks.append(("not GATED when made", why_ungated(first.path) == ""))
        checks.append(("another name", [p.name for p in first.path.parent.iterdir()] == ["contract"]))
        checks.append(("held twice", _busy(lambda: rundir.RunDir(first.path))))
        (first.path / ".lock").unlink()
        checks.append(("held twice without .lock", _busy(lambda: rundir.RunDir(first.path))))
        first.check()
        checks.append((".lock is not back", (first.path / ".lock").read_text() == f"{os.getpid()}\n"))
        lock, files = fcntl.flock, []

        def of_files_alone(handle: int, how: int) -> None:
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                raise OSError(errno.EBADF, "Bad file descriptor")
            files.append(handle)
            lock(handle, how)

        fcntl.flock = of_files_alone  # type: ignore[assignment]
        try:
            one = rundir.create(cfg, run.data.tokenizer)
            checks.append(("held twice where folders cannot be locked", _busy(lambda: rundir.RunDir(one.path))))
            (one.path / ".lock").unlink()
            two = rundir.RunDir(one.path)
            with run.loop("a") as loop:
                loop.start()
                loop.holds = one.check
                checks.append(("saved after it lost the folder", _busy(loop.save) and folders.steps(loop.checkpoints) == []))
            two.check()
            two.close()
        finally:
            fcntl.flock = lock
        checks.append(("files were not locked", len(files) > 2))
        os.rename(first.path, run.root / "moved")
        first.path.mkdir()
        checks.append(("saved into another folder of the same name", _busy(first.check)))
        half = run.root / "runs" / f"{rundir.MAKING}x-1"
        for age, there in ((0.0, True), (3600.0, False)):
            half.mkdir(exist_ok=True)
            (half / "tokenizer.json").write_text("{}")
            then = half.stat().st_mtime - age
            os.utime(half, (then, then))
            rundir.create(cfg, run.data.tokenizer).close()
            checks.append((f"a half-made folder of {age} s: there {not there}", half.exists() == there))
    return _measured(checks)


def from_any_folder(rng: np.random.Generator) -> Measured:
    """A session works in the folder of the one before, where all is that it reads; else where it was called; else it ends."""
    checks, before = [], Path.cwd()
    with _run(rng) as run:
        home, here = run.root / "home", run.root / "call" / "here"
        cfg = replace(run.cfg, run=replace(run.cfg.run, out="runs"), data=replace(run.cfg.data, corpus="texts/*.txt"))
        (home / "tokenizers").mkdir(parents=True)
        here.mkdir(parents=True)
        try:
            os.chdir(home)
            with rundir.create(cfg, run.data.tokenizer) as held:
                path = held.path.resolve()
            os.chdir(here)

            def of(wanted: Config) -> str:
                """Where a session goes on, as it is seen from inside; what it is refused for."""
                try:
                    with at_home(wanted, Path("../../home/runs/contract")) as found:
                        if found.resolve() != path:
                            return "another run"
                        return Path.cwd().name
                except InputError as error:
                    return f"{error.came}".replace(str(run.root), "")
                finally:
                    checks.append(("it stays elsewhere", Path.cwd() == here))
                    os.chdir(here)

            both = replace(cfg, data=replace(cfg.data, corpus="stdlib", mixture="texts:2, more:1"))
            filed = replace(cfg, data=replace(cfg.data, tokenizer="bpe", tokenizer_file="tokenizers/t.json"))
            started = replace(cfg, train=replace(cfg.train, start_from="runs/first@1"))
            checks.append(("a text that is nowhere", of(cfg) == "/home has no texts; /call/here has no texts"))
            (here / "texts").mkdir()
            checks.append(("a text that is here", of(cfg) == "here"))
            (home / "texts").mkdir()
            checks.append(("a text that is in both", of(cfg) == "home"))
            checks.append(("half of a mixture", of(both) == "/home has no more; /call/here has no more"))
            checks.append(("no tokenizer", of(filed) == "/home has no tokenizers/t.json; /call/here has no tokenizers/t.json"))
            checks.append(("no beginning", of(started) == "/home has no runs/first; /call/here has no runs/first"))
            (path / "checkpoints" / "step-00000001").mkdir(parents=True)
            checks.append(("a beginning that is no more needed", of(started) == "home"))
        finally:
            os.chdir(before)
    return _measured(checks)


def _busy(action: Callable[[], object]) -> bool:
    """Whether `action` ends in a BusyError."""
    try:
        action()
    except AlphaError as error:
        return type(error) is BusyError
    return False


# -- determinism ---------------------------------------------------------------------------------------------------------------


def same_bits(rng: np.random.Generator) -> Measured:
    """Two runs of one configuration, and one with another number of threads, give the same bits."""
    found = []
    with _run(rng) as run:
        for name, cfg in (("a", run.cfg), ("b", run.cfg), ("c", run.config(1))):
            with run.loop(name, cfg) as loop:
                loop.start()
                loop.run()
                found.append(_bits(loop))
        rows = [run.rows(name) for name in ("a", "b", "c")]
    checks = [("a second run", found[0] == found[1]), ("one thread", found[0] == found[2]), ("rows", rows[0] == rows[1] == rows[2])]
    return _measured(checks, found[0])


def sampled(rng: np.random.Generator) -> Measured:
    """Text sampled on the way changes no bit and no row of a run, on a device beside the host too, and is the same text in every run of the
    configuration, also in one that was stopped and resumed."""
    checks = []
    with _run(rng) as run:
        plain, often = run.config(2), run.config(2, "train.sample_every=1")
        with run.loop("plain", plain) as loop:
            loop.start()
            loop.run()
            expected = _bits(loop)
        seen: dict[str, list[tuple[object, ...]]] = {}
        for name, kind in (("waits", CpuExecutor), ("ahead", _RunsAhead), ("stopped", CpuExecutor)):
            with run.loop(name, often, kind=kind) as loop:
                loop.sample_tokens = 4
                loop.start()
                if name == "stopped":
                    loop.run(Watch(stop=lambda loop=loop: loop.step == 3))  # type: ignore[misc]
                    loop.resume(2)
                loop.run()
                checks.append((f"{name}: other bits", _bits(loop) == expected))
            checks.append((f"{name}: other rows", run.rows(name) == run.rows("plain")))
            seen[name] = read(run.root / name / "m.sqlite", "samples")
        checks.append(("not after every step but the last", [r[0] for r in seen["waits"]] == [1, 2, 3, 4]))
        checks.append(("other text", seen["waits"] == seen["ahead"] == seen["stopped"]))
        checks.append(("the same text at every step", len({r[2] for r in seen["waits"]}) > 1))
    return _measured(checks, expected)


CASES: dict[str, dict[str, list[tuple[str, Callable[[np.random.Generator], Measured]]]]] = {
    "train.loop": {
        "parity": [
            ("text of a step", text_of_a_step),
            ("by hand", by_hand),
            ("resumed", resumed), ("lasts longer", lasts_longer), ("taken back", taken_back), ("left over", left_over),
            ("ahead", ahead), ("beside", beside),
            ("validation", validation), ("foretold", foretold), ("from devices", from_devices),
            ("stalls", of_settings.stalls), ("late copies", of_settings.late_copies),
        ],
        "determinism": [("same bits", same_bits), ("sampled", sampled)],
        "faults": [("bad step", bad_step), ("bad step ahead", bad_step_ahead), ("changed meanwhile", changed_meanwhile),
                   ("not this run", not_this_run), ("full disk", full_disk),
                   ("sealed", sealed), ("run directory", run_directory), ("from any folder", from_any_folder)],
    }
}
