"""The training loop, readable top to bottom. Floor 6.

One step is `program.schedule`: every logical shard's microbatches, the tree over shards, the update. The global batch is cut into
contiguous shares, shard after shard and microbatch after microbatch, so the text of a step depends on its number alone. All state is
(parameters, moments, step counter); everything else follows from the step, so a resumed run continues bit for bit.

Where a device computes beside the host, the loop runs one step ahead: the microbatches of the next step are handed over before this step's
results are waited for, and its update once they are known to be finite. Microbatches write gradients alone, which the next first one
overwrites; so a step that was handed over ahead may be forgotten. Ahead or not, a save of the state before a step begins behind the step's
microbatches: the device has something to do beside the copy and beside what the host does for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import folders
from alpha.checkpoint.ranges import Flat
from alpha.config import Config
from alpha.data.mixture import Streams
from alpha.data.prefetch import Call
from alpha.data.sampler import Sampler
from alpha.data.shards import TokenStream
from alpha.data.tokenizer import Tokenizer
from alpha.errors import CorruptError, InputError, NonFiniteError
from alpha.graph.plan import Step
from alpha.graph.state import StateLayout
from alpha.optim.init import fill_initial
from alpha.profile.recorder import Recorder, sampled
from alpha.profile.store import Store
from alpha.train import forbidden
from alpha.train import sample as sampling
from alpha.train.communication import RankRecorder
from alpha.train.engine import Executor, downloads_of, refresh
from alpha.train.evaluate import Evaluation, evaluate, model_inputs
from alpha.train.extend import lasting, require_same_rates
from alpha.train.pace import PacedSpots
from alpha.train.ranks import Ranks
from alpha.train.sample import generate, printable
from alpha.train.saving import Saver, Stands
from alpha.train.seal import Seal
from alpha.train.stalls import Stalls
from alpha.train.telling import telling

UPDATES = ("grad_norm", "grad_clip", "optimizer")
"""Phases of a step that write the state: what is copied of it beside a step is copied before them."""

MICROBATCHES = ("forward", "backward")
"""Those that read it, beside which it is copied."""


@dataclass(frozen=True)
class StepResult:
    """One step. `loss`: mean over valid targets in nats; `tokens`, `seconds` of this step; `finite` False: the step was refused."""

    step: int
    loss: float
    norm: float
    lr: float
    coefficient: float
    tokens: int
    seconds: float
    finite: bool

    def numbers(self) -> dict[str, float]:
        """What every rank of a run must have alike."""
        return {"loss": self.loss, "norm": self.norm, "lr": self.lr, "coefficient": self.coefficient}


@dataclass
class Watch:
    """What a caller may look at or decide while the loop runs. `stop`: asked after each step; not 0 ends the run
    resumably, on all ranks."""

    step: Callable[[StepResult], None] = field(default=lambda result: None)
    evaluated: Callable[[int, Evaluation], None] = field(default=lambda step, result: None)
    sampled: Callable[[int, str], None] = field(default=lambda step, text: None)
    saved: Callable[[int, Path], None] = field(default=lambda step, path: None)
    stop: Callable[[], int] = field(default=lambda: 0)


class Loop:
    """A run's state and what moves it. `step`: optimizer steps done; `sample_tokens`: most tokens of a sample; `seal`: what checkpoints
    say of how they came to be; `passed`: an error for each damaged checkpoint that `resume` passed over; `holds`: asked before anything
    is saved, raises where the run directory is no longer this process's; `tell`: told how far a long read has come; `ended_by`: what
    `Watch.stop` said that ended the run early, 0 for nothing; `stalls`: what saves add to its steps. Of many ranks each has a loop, and all
    take the same turns."""

    def __init__(
        self, cfg: Config, executor: Executor, sampler: Sampler, validation: TokenStream | Streams, tokenizer: Tokenizer,
        checkpoints: Path, metrics: Store, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.cfg, self.executor, self.sampler = cfg, executor, sampler
        self.ranks = ranks or Ranks()
        self.downloads = downloads_of(executor)
        self.validation, self.tokenizer = validation, tokenizer
        self.checkpoints, self.metrics = checkpoints, metrics
        self.saver = Saver(checkpoints, self.ranks, keep=cfg.train.keep, every=cfg.train.keep_every, late=self.downloads)
        self.saver.ready = lambda step: self.ready(f"at the checkpoint of step {step}")
        self.passed: list[CorruptError] = []
        self.seal = Seal()
        self.tell: Callable[[str], None] = lambda text: None
        self.holds: Callable[[], None] = lambda: None
        self.program = executor.program
        self.role, self.plans = self.program.role(self.ranks.rank), self.program.plans_of(self.ranks.rank)
        self.replays = self.program.replays(self.ranks.rank)
        world = self.ranks.world
        self.recorder = executor.recorder = RankRecorder(metrics, world, self.role.schedule) if world else Recorder(metrics)
        self.stalls = Stalls(self.recorder.clock, beside=self.downloads is not None)
        self.step, self.sample_tokens, self.ended_by = 0, sampling.TOKENS, 0
        self.spots = PacedSpots(cfg.train.verify, cfg.run.seed, executor, self.ranks.rank, metrics)
        self._staged: int | None = None
        self._handed: int | None = None
        self._save_due = False

    # -- state -----------------------------------------------------------------------------------------------------------------

    def states(self) -> folders.States:
        """What a checkpoint holds: every kind that the plan `snapshot` names, as (layout, flat array). Of a kind that ranks share the
        array is this rank's cut."""
        return {kind: (self.program.states[kind], self.executor.state(kind)) for kind in self.plans["snapshot"].outputs}

    def snapshot(self) -> folders.States:
        """The same to be read: nothing goes back into the state."""
        return {kind: (self.program.states[kind], self.executor.look(kind)) for kind in self.plans["snapshot"].outputs}

    def lent(self) -> dict[str, tuple[StateLayout, Flat]]:
        """The same to be copied by the saver: of a state on a device what stands for it."""
        lend = self.downloads.lend if self.downloads is not None else self.executor.look
        return {kind: (self.program.states[kind], lend(kind)) for kind in self.plans["snapshot"].outputs}

    @cached_property
    def program_hash(self) -> str:
        """Of the Program, which stays as it is while the loop does."""
        return self.program.hash()

    def facts(self) -> dict[str, Any]:
        """What a checkpoint must agree on with the run that loads it, and its seal."""
        return {
            "seal": asdict(self.seal),
            "config": self.cfg.identity(),
            "steps": self.cfg.train.steps,
            "tokenizer": self.tokenizer.hash,
            "sampler": {"hash": self.sampler.hash, "next_step": self.step},
            "program": self.program_hash,
        }

    def start(self, fill: Callable[[np.ndarray, StateLayout, int], None] | None = None) -> None:
        """Initial state: parameters by `fill`, or drawn by (seed, tensor name), moments and the step counter zero."""
        for kind in self.plans["snapshot"].outputs:
            if kind != "param":
                self.executor.clear(kind)
        fill = fill or partial(fill_initial, workers=int(str(self.program.facts.get("threads", 0))))
        self._fill(fill)
        refresh(self.executor)
        self.step, self._handed, self._save_due = 0, None, False
        self.spots.restart(self.step)

    def _fill(self, fill: Callable[[np.ndarray, StateLayout, int], None]) -> None:
        """The first parameters, or this rank's cut of them."""
        layout, own = self.program.states["param"], self.executor.blank("param")
        if "param" not in self.program.sharded:
            fill(own, layout, self.cfg.run.seed)
            return
        whole = np.zeros(layout.size, own.dtype)
        fill(whole, layout, self.cfg.run.seed)
        for local, lo, hi in layout.shard(self.ranks.size).cuts(self.ranks.rank):
            own[local : local + hi - lo] = whole[lo:hi]

    def resume(self, step: int | None = None) -> folders.Saved:
        """The state of a checkpoint (default: the latest that is whole); returns its manifest. `passed` then holds an error for each one
        behind it. InputError if its configuration, tokenizer or text is another, CorruptError if the step that was asked for, or every
        checkpoint, is damaged. Every rank reads what it holds, whatever number of ranks saved it."""
        found = ""
        if self.ranks.first:
            folders.clean(self.checkpoints)
            found = json.dumps([folders.at(self.checkpoints, step).name] if step is not None or not folders.steps(self.checkpoints)
                               else [folders.at(self.checkpoints, s).name for s in reversed(folders.steps(self.checkpoints))])
        self.passed = []
        for name in json.loads(self.ranks.hear(found)):
            error = None
            try:
                saved = self._restore(self.checkpoints / name)
            except CorruptError as damaged:
                error = damaged
            if self.ranks.all(error is None):
                break
            self.passed.append(error or CorruptError(f"checkpoint {self.checkpoints / name} is damaged, as another rank found"))
        else:
            raise self.passed[0]
        refresh(self.executor)  # once all have read it: where the state is cut they make copies of it together
        self.step = saved.step
        self._handed, self._save_due = None, False
        self.spots.restart(self.step)
        self.ranks.meet()
        if self.ranks.first:
            folders.set_aside(self.checkpoints, self.step)
            folders.prune(self.checkpoints, self.step, self.saver.keep, self.saver.every)
        self.metrics.rewind(self.step, self.ranks.size)
        return saved

    def _restore(self, path: Path) -> folders.Saved:
        """The state of one checkpoint of this run."""
        saved = folders.inspect(path, verify=False)
        mine = self.facts()
        before = lasting(self.cfg, saved.facts.get("steps", self.cfg.train.steps))
        if before.identity() == saved.facts.get("config"):  # of this run, which may have been meant to be shorter or longer
            require_same_rates(before, self.cfg, saved.step)
            mine["config"] = before.identity()
        for name, what, do in (
            ("config", "configuration", "resume with the run's own config.toml"),
            ("tokenizer", "tokenizer", "restore tokenizer.json, or start a new run"),
        ):
            _agree(path, what, saved.facts.get(name), mine[name], do)
        stored = saved.facts.get("sampler", {})
        _agree(path, "text or order of samples", stored.get("hash"), mine["sampler"]["hash"],
               "restore the corpus it was started on (another Python has another standard library), or start a new run")  # fmt: skip
        self._read(path)
        counted = int(self.executor.look("counter")[0])
        if not counted == saved.step == stored.get("next_step"):
            raise CorruptError(
                f"checkpoint {path} disagrees with itself about its step",
                came=f"folder {saved.step}, counter {counted}, sampler {stored.get('next_step')}",
                expected="one number",
                do="resume from an earlier one with --at STEP",
            )
        return saved

    def load(self, path: Path) -> None:
        """The state of a checkpoint, and what kernels read from it."""
        self._read(path)
        refresh(self.executor)

    def _read(self, path: Path) -> None:
        with self.ranks.patient(), telling(f"reading {path.name}", self.tell) as told:
            folders.load(path, self.states(), cut=(self.ranks.rank, self.ranks.size), told=told)

    def save(self) -> Path:
        """Checkpoint the state as it stands. It stands when any rank comes back."""
        self.saver.finish()
        self.begin_save()
        with self.recorder.span("checkpoint"):
            self.saver.finish()
        return folders.at(self.checkpoints, self.step)

    def begin_save(self) -> None:
        """Copy the state at once, which is then saved beside what follows. The save before has been finished. Where the next step was
        handed over ahead, its end tells whether the state was still what the last update wrote, and nothing is made a checkpoint before.
        """
        with self.recorder.span("checkpoint"):
            if self._handed is None:
                self.spots.read("before a checkpoint")
            self.recorder.so_far()
            self.saver.start(self.step, self.lent(), self.facts())

    def copy_state(self) -> None:
        """Begin the save that is due, while a device has this step's microbatches. Whether the state was still what the last update wrote
        is told by what is looked at before this step's update, when the step ends; nothing is made a checkpoint before."""
        if self._save_due:
            self._save_due = False
            with self.recorder.span("checkpoint"):
                self.saver.begin(self.step, self.lent(), self.facts())

    def open_save(self) -> None:
        """What the host does for a save that has begun, while a device has a step to compute."""
        if self.saver.begun:
            with self.recorder.span("checkpoint"):
                self.saver.open()

    def ready(self, when: str) -> None:
        """What has to be before a save is written: the run directory is ours, nothing forbidden is here, and what was measured is in its
        file, so that no row is lost of a step that will not run again."""
        self.holds()
        forbidden.check(when)
        self.metrics.flush()

    def foretell_saves(self) -> None:
        """Rehearse what a step will wait for at a save, before the first step, where a save will have steps behind it. Left out are the
        folder, the look at libraries once a checkpoint stands, and the state's spot checks, which are told by themselves."""
        every = self.cfg.train.checkpoint_every

        def act() -> None:
            self.ready("before the first step")
            self.facts()

        def copy() -> int:
            return int(self.saver.copy(self.lent())[0].nbytes)

        if every and (self.step // every + 1) * every < self.cfg.train.steps:
            self.stalls.rehearse(act, copy, self.saver.copies.wait)
            if self.ranks.first:
                self.metrics.describe({"save_bytes": self.stalls.nbytes, "checkpoint_every": every, **self.stalls.facts()})

    # -- one step --------------------------------------------------------------------------------------------------------------

    def texts(self) -> list[Call]:
        """What a step asks the sampler for, in order."""
        return [(call.shard, self.cfg.train.shards, call.micro, self.cfg.micros, "documents" in self.plans[call.plan].inputs)
                for call in self.role.schedule if call.shard is not None and call.micro is not None]

    def inputs(self, call: Step, step: int | None = None) -> dict[str, np.ndarray]:
        """The batch of one call of the schedule, of this step or another; empty for calls without text (tree, update)."""
        plan = self.plans[call.plan]
        if call.shard is None or call.micro is None:
            return {}
        batch = self.sampler.batch(
            self.step if step is None else step,
            call.shard,
            self.cfg.train.shards,
            micro=call.micro,
            n_micro=self.cfg.micros,
            documents="documents" in plan.inputs,
        )
        return model_inputs(set(plan.inputs), batch)

    def advance(self, *, ahead: bool = False) -> StepResult:
        """One step; `ahead`: with the next one's microbatches handed over behind it. NonFiniteError naming the op if it was not finite:
        then the state is as before, and was saved."""
        recorder, (*micros, update), handed = self.recorder, self.replays, self._handed == self.step
        checked = self.spots.due(self.step)
        self.ranks.begin(self.step)
        recorder.begin(self.step, profiled=self.profiled(self.step), ahead=handed)
        self._handed = None
        self.spots.begin(self.step)
        with np.errstate(all="ignore"):  # a bad value is the finite flag's business, not a warning's
            if checked and self._save_due:  # the host waits in each plan: it begins the copy beside them, and puts off the rest
                with self.stalls.adding():
                    self.copy_state()
            for calls in micros if not handed else ():
                self.enqueue(calls, self.step)
                self.copy_state()
            self.copy_state()
            self.spots.read("before the update", now=False)
            self.enqueue(update, self.step)
            if not checked and self.spots.due(self.step + 1):  # then the host waits for the device in `wrote`
                self.open_save()
            self.spots.wrote(self.step)
            if ahead:
                self.ranks.hash(self.executor)
                with recorder.ahead():
                    for calls in micros:
                        self.enqueue(calls, self.step + 1)
                self._handed = self.step + 1
            else:
                self.stage()
            if not checked:
                self.open_save()
            with recorder.span("device_to_host"):
                out = self.executor.outputs(self.role.schedule[-1].plan)
                total, count, norm, lr, coefficient, finite = (
                    float(out[name]) for name in ("loss_sum", "count", "norm", "lr", "coefficient", "finite")
                )
        self.spots.end(self.step)
        took = recorder.end_step(ahead=ahead)
        self.spots.took(took)
        result = StepResult(
            step=self.step,
            loss=total / count if count else math.nan,
            norm=norm,
            lr=lr,
            coefficient=coefficient,
            tokens=self.cfg.train.batch * self.cfg.data.sequence,
            seconds=took / 1e9,
            finite=bool(finite),
        )
        if self.ranks.first:
            self.metrics.add("step_metrics", {k: _plain(v) for k, v in vars(result).items()})
        self.stalls.stepped(took, recorder.on_device(*MICROBATCHES), ahead=handed, saving=self.saver.writing,
                            usual=not (checked or self.profiled(self.step)))
        if not result.finite:
            recorder.abandon()
            self.explain(result)
        if recorder.profiling:
            self.note_memory()
        self.step += 1
        return result

    def profiled(self, step: int) -> bool:
        """Whether each launch of this step is looked at by itself."""
        return sampled(step, self.cfg.train.steps, self.cfg.train.profile)

    def unbroken(self) -> bool:
        """Whether the next step may be handed over ahead: nothing but it follows this one, and neither is looked at launch by launch."""
        t, following = self.cfg.train, self.step + 1
        checked = self.spots.due(self.step) or self.spots.due(following)
        saves = t.checkpoint_every if self.downloads is None else 0  # else a save is copied beside the step
        pause = checked or any(every and following % every == 0 for every in (t.eval_every, t.sample_every, saves))
        return self.executor.runs_ahead and following < t.steps and not (pause or self.profiled(self.step) or self.profiled(following))

    def enqueue(self, calls: Sequence[Step], step: int) -> None:
        """Hand over what is replayed at once; the text of a step's first replay is there already if it was staged."""
        plans = tuple(call.plan for call in calls)
        if calls is self.replays[0] and self._staged == step:
            self._staged = None
            self.executor.enqueue(plans)
            return
        with self.recorder.span("data_load"):
            inputs = [self.inputs(call, step) for call in calls]
        self.executor.enqueue(plans, inputs)

    def stage(self) -> None:
        """Make the text of the next step's first replay and send it: a device still computes this step."""
        following = self.step + 1
        if following >= self.cfg.train.steps:
            return
        first = self.replays[0]
        with self.recorder.span("data_load"):
            inputs = [self.inputs(call, following) for call in first]
        with self.recorder.span("host_to_device"):
            self.executor.stage(tuple(call.plan for call in first), inputs)
        self._staged = following

    def note_memory(self) -> None:
        """Planned and resident bytes of each arena, now."""
        planned = self.program.arenas(self.ranks.rank)
        for arena, actual in self.executor.resident().items():
            self.metrics.add("memory", {"step": self.step, "rank": self.metrics.rank, "arena": arena, "planned": planned.get(arena),
                                        "actual": actual})

    def explain(self, result: StepResult) -> None:
        """Save the untouched state, run the refused step again op by op, and raise the NonFiniteError that names the first bad op."""
        path = self.save()
        where = f"step {self.step} was refused and changed nothing; the state before it is {path}"
        for call in self.role.schedule:
            place = call.plan if call.shard is None else f"{call.plan}, shard {call.shard}, microbatch {call.micro}"
            try:
                with np.errstate(all="ignore"):
                    self.executor.replay(call.plan, self.inputs(call))
            except NonFiniteError as error:
                raise NonFiniteError(f"{where}\n{error.what} ({place})", came=error.came, expected=error.expected, do=error.do) from None
        self.load(path)  # the update, run again, was good and moved the state
        raise NonFiniteError(
            f"{where}\nno single op made a non-finite value when the step was replayed",
            came=f"loss {result.loss}, norm {result.norm}",
            expected="finite loss and norm",
            do="run the step again with --resume; if it passes now, suspect the hardware",
        )

    # -- the run ---------------------------------------------------------------------------------------------------------------

    def run(self, watch: Watch | None = None) -> bool:
        """Train to the last step. Returns False if `watch.stop` ended it early (resumable), True when all steps are done."""
        try:
            done = self._run(watch or Watch())
            self.note_stalls()
            return done
        finally:
            self.saver.rest()

    def _run(self, watch: Watch) -> bool:
        t = self.cfg.train
        self.ranks.ahead = self.ranks.world is None and self.unbroken()
        while self.step < t.steps:
            result = self.advance(ahead=self.ranks.ahead)
            watch.step(result)
            last = self.step == t.steps
            stopping = self.ranks.decide(self.executor, result.numbers(), watch.stop(), not last and self.unbroken())
            with self.adding():
                if self.saver.writing:
                    self.holds()
                _tell(watch, self.saver.poll())
            if t.eval_every and self.step % t.eval_every == 0 and not last:
                with self.recorder.span("eval"):  # the watcher measures the machine's peak again: part of looking at the run
                    found = self.evaluate(t.eval_windows)
                    with self.ranks.patient():
                        watch.evaluated(self.step, found)
            if t.sample_every and self.step % t.sample_every == 0 and not last and self.ranks.first:
                with self.ranks.patient():
                    watch.sampled(self.step, self.sample())
            if last or stopping or (t.checkpoint_every and self.step % t.checkpoint_every == 0):
                with self.adding():
                    with self.recorder.span("checkpoint"):
                        before = self.saver.finish()
                    _tell(watch, before)
                if last or stopping:
                    self.begin_save()
                    with self.recorder.span("checkpoint"):
                        made = self.saver.finish()
                    _tell(watch, made)
                else:
                    self.note_stalls()
                    self.stalls.save()
                    self._save_due = self.downloads is not None
                    if not self._save_due:
                        with self.stalls.adding():
                            self.begin_save()
            if stopping and not last:
                self._handed, self.ended_by = None, stopping
                return False
        return True

    def note_stalls(self) -> None:
        """What is foretold of saves and was measured of those that are over."""
        if self.ranks.first:
            self.metrics.describe(self.stalls.facts())

    def adding(self) -> AbstractContextManager[None]:
        """What the host does for a save: the steps wait for it, unless a device has the next one already."""
        return nullcontext() if self._handed is not None else self.stalls.adding()

    def evaluate(self, windows: int) -> Evaluation:
        """Validate on `windows` windows (0 = all), of each source of a mixture, and note the results. Returned is their sum."""
        with self.recorder.span("eval"):
            parts = self.validation.parts if isinstance(self.validation, Streams) else (("", self.validation),)
            each = {name: evaluate(self.executor, stream, self.tokenizer, windows, self.ranks) for name, stream in parts}
            found = reduce(add, each.values())
        if self.ranks.first:
            self.metrics.add("evaluations", {"step": self.step, **asdict(found), "bits_per_byte": found.bits_per_byte})
            if isinstance(self.validation, Streams):
                self.metrics.of_sources(self.step, {name: {**asdict(e), "bits_per_byte": e.bits_per_byte} for name, e in each.items()})
        return found

    def sample(self) -> str:
        """Text from the weights as they stand, prompt included; noted. The same weights give the same text, and nothing moves by it."""
        with self.recorder.span("sample_gen"):
            made = generate(self.executor, self.tokenizer, sampling.PROMPT, tokens=self.sample_tokens, seed=sampling.SEED)
            prompt, text = printable(sampling.PROMPT), printable(b"".join(made))
        self.metrics.add("samples", {"step": self.step, "prompt": prompt, "text": text, "tokens": self.sample_tokens,
                                     "temperature": sampling.TEMPERATURE, "top_k": sampling.TOP_K, "seed": sampling.SEED})
        return prompt + text


def _tell(watch: Watch, made: Stands | None) -> None:
    """Of a checkpoint that stands."""
    if made is not None:
        watch.saved(*made)


def _agree(path: Path, what: str, came: object, expected: object, do: str) -> None:
    if came != expected:
        raise InputError(f"checkpoint {path} was made with another {what}", came=str(came)[:16], expected=str(expected)[:16], do=do)


def _plain(value: Any) -> Any:
    """For the metrics: NULL where not finite."""
    if isinstance(value, bool):
        return int(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
