"""One session of a run: everything between a Config and a trained model in a run directory. Floor 6.

The registry is asked by the caller (`admit`), so that this floor knows nothing of gates: it is handed the components and the calls of
exactly the Program that will run, before the run directory is made, and raises if they may not.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from alpha.checkpoint import simple
from alpha.component import Catalogue
from alpha.config import Config
from alpha.data.ngram import Order2Model
from alpha.errors import AlphaError, InputError, NonFiniteError
from alpha.flops.v1 import ModelFlops, stamp
from alpha.graph.plan import Program
from alpha.profile.store import Store
from alpha.train import forbidden, memory_check, rundir
from alpha.train.assemble import Dataset, calls_of, components_of, flops_for, open_data, program_for, sampler_for, threads_for
from alpha.train.console import Board, Talk
from alpha.train.engine import open_executor
from alpha.train.evaluate import Evaluation
from alpha.train.interrupt import Interrupt
from alpha.train.log import RankLog
from alpha.train.loop import Loop, Watch
from alpha.train.peak import peak_of_run, readings
from alpha.train.provenance import describe, moved, note_libraries, tell_plan
from alpha.train.rundir import GATED, UNGATED, RunDir
from alpha.train.seal import Seal, broken, evidence_hash

Admit = Callable[[Sequence[str], Sequence[tuple[str, Any, Any]]], Mapping[str, Any]]
"""(component ids, calls) -> evidence by component, for the manifest; raises UngatedError."""


@dataclass(frozen=True)
class Outcome:
    """What a session left. `finished`: all steps are done; then `validation` and `yardstick` (bits per byte of the order-2 model)."""

    path: Path
    step: int
    finished: bool
    validation: Evaluation | None = None
    yardstick: float | None = None


def train(
    cfg: Config, catalogue: Catalogue, talk: Talk, *, admit: Admit | None, resume: Path | None = None, at: int | None = None,
    stop: Callable[[], int] = lambda: 0, interrupt: Interrupt | None = None,
) -> Outcome:  # fmt: skip
    """Train `cfg` to its last step in a new run directory, or go on in `resume` (from checkpoint `at`, default the latest).

    `admit` None: an ungated run, stamped everywhere. `stop`: asked after each step; not 0 saves and ends the session. `interrupt`: listens
    to signals while steps run, with the same effect.
    """
    forbidden.watch()
    began, began_ns = datetime.now(timezone.utc), time.perf_counter_ns()
    with ExitStack() as stack:
        held = None
        if resume is not None:
            held = stack.enter_context(RunDir(resume))
            cfg = _same_run(cfg, resume)
        with talk.doing("reading the corpus, the tokenizer and the tokens"):
            data = open_data(cfg)
        with talk.doing("building the program"):
            threads = threads_for(cfg)
            program = program_for(cfg, data.tokenizer.vocab_size, catalogue, threads)
            flops = flops_for(cfg, data.tokenizer.vocab_size)
        memory_check.require(program)
        evidence = admit(components_of(cfg, program), calls_of(program)) if admit is not None else {}
        stack.enter_context(forbidden.training())  # the gates that `admit` may have run started processes of their own
        executor = stack.enter_context(open_executor(program, catalogue))
        forbidden.check("before the first step")
        if held is None:
            held = stack.enter_context(rundir.create(cfg, data.tokenizer, UNGATED if admit is None else GATED))
        manifest = rundir.read_manifest(held.path)
        metrics = stack.enter_context(Store(held.metrics))
        loop = Loop(cfg, executor, sampler_for(cfg, data), data.validation, data.tokenizer, held.checkpoints, metrics)
        saved, loop.holds = None, held.check
        if resume is not None and (at is not None or simple.steps(held.checkpoints)):
            saved = loop.resume(at)
        else:
            loop.start()
            metrics.rewind(0)
        why = "ungated components were allowed" if admit is None else broken(manifest, saved)
        loop.seal = _seal(manifest, UNGATED if why else GATED, evidence)
        talk.stamp = UNGATED if why else ""
        metrics.begin(loop.step, began_ns, time.perf_counter_ns(), time.time_ns())
        log = stack.enter_context(RankLog(held.logs, metrics.rank))
        stack.push(partial(_ended, metrics, loop, log))
        stack.enter_context(log.warnings(lambda: loop.step))
        peak, note_speed = peak_of_run(executor, metrics), readings(executor, metrics)
        note_speed()
        elsewhere = moved(metrics, executor, threads)
        describe(held, metrics, cfg, data, program, flops, evidence, loop.seal, admit is not None, began, loop.step, threads, peak,
                 executor, catalogue)  # fmt: skip
        tell_plan(metrics, program, flops, cfg.train.batch * cfg.data.sequence)
        _introduce(talk, why, held.path, cfg, data, program, flops, loop.step, stamp(peak.flops, peak.source))
        if elsewhere:
            talk.say(elsewhere, "yellow")
            log.say("warning", loop.step, level="warning", text=elsewhere)
        log.say("start" if resume is None else "resume", loop.step, session=metrics.session, pid=os.getpid(), program=program.hash(),
                steps=cfg.train.steps, config=cfg.identity(), status=loop.seal.status)  # fmt: skip
        metrics.mark(loop_ns=time.perf_counter_ns())
        if loop.step < cfg.train.steps:
            with Board(talk, loop.step, cfg.train.steps, flops, peak) as board, interrupt or nullcontext():
                finished = loop.run(_watch(held, board, log, note_speed, loop, lambda: stop() or (interrupt() if interrupt else 0)))
            note_libraries(held)
            with loop.recorder.span("eval"):
                note_speed()
            if not finished:
                metrics.mark(ended="stopped")
                return Outcome(held.path, loop.step, False)
            talk.say(board.summary(stamp(peak.flops, peak.source)))
        with talk.doing("validating, and fitting the order-2 byte model"):
            found = loop.evaluate(cfg.train.final_windows)
            with loop.recorder.span("eval"):
                yardstick = Order2Model(data.split.train.texts()).bits_per_byte(data.split.validation.texts())
            metrics.describe({"order2_bits_per_byte": yardstick})
        with loop.recorder.span("sample_gen"):
            log.say("evaluation", loop.step, bits_per_byte=found.bits_per_byte, windows=found.windows, order2=yardstick)
            log.say("sample", loop.step, text=_conclude(talk, loop, found, yardstick))
        forbidden.check("at the end")
        note_libraries(held)
        metrics.mark(ended="finished")
        return Outcome(held.path, loop.step, True, found, yardstick)


def _watch(held: RunDir, board: Board, log: RankLog, note_speed: Callable[[], None], loop: Loop, stop: Callable[[], int]) -> Watch:
    """What looks on while the loop runs: the console, the log, the manifest's libraries, and the machine's speed."""
    heard: list[int] = []

    def evaluated(step: int, found: Evaluation) -> None:
        note_speed()
        log.say("evaluation", step, bits_per_byte=found.bits_per_byte, windows=found.windows)
        board.evaluated(step, found)

    def sampled(step: int, text: str) -> None:
        log.say("sample", step, text=text)
        board.sampled(step, text)

    def saved(step: int, path: Path) -> None:
        with loop.recorder.span("checkpoint"):
            note_libraries(held)
        log.say("checkpoint", step, path=path)
        board.saved(step, path)

    def stopping() -> bool:
        asked = stop()
        if asked and not heard:
            heard.append(asked)
            log.say("signal", loop.step, level="warning", name=signal.Signals(asked).name if asked > 1 else "asked to stop")
        return bool(asked)

    return Watch(board.step, evaluated, sampled, saved, stopping)


def _ended(metrics: Store, loop: Loop, log: RankLog, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
    """Close the last step interval and say how the session ended, if it failed."""
    loop.recorder.finish()
    reason = "finished" if loop.step >= loop.cfg.train.steps else "stopped"
    if error is not None:
        reason = f"failed: {type(error).__name__}: {error}"
    try:
        if isinstance(error, NonFiniteError):
            log.say("non-finite", loop.step, level="error", what=error.what, came=error.came)
        log.say("end", loop.step, level="info" if error is None else "error", reason=reason)
    except AlphaError:
        if error is None:
            raise  # else that error is the one under way
    if error is not None:
        try:
            metrics.mark(ended=f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200])
        except AlphaError:
            pass  # the store itself failed; that error is the one under way
    return False


def _same_run(cfg: Config, path: Path) -> Config:
    """`cfg` under the run's own name; InputError if it would not continue the run in `path` bit for bit."""
    own = rundir.read_config(path)
    if own.identity() != cfg.identity():
        mine, theirs = (set(c.resolved().splitlines()) for c in (cfg, own))
        raise InputError(
            "the configuration is not that of the run to resume",
            came="; ".join(sorted(mine - theirs)[:4]),
            expected=f"as in {path / 'config.toml'}: {'; '.join(sorted(theirs - mine)[:4])}",
            do=f"resume with `alpha train {path} --resume`, or start a new run",
        )
    return replace(cfg, run=own.run)


def parameters(program: Program) -> int:
    """Elements of all parameters, padding not counted."""
    return sum(t.size for t in program.states["param"].tensors)


def _seal(manifest: Mapping[str, Any], status: str, evidence: Mapping[str, Any]) -> Seal:
    """What this session's checkpoints say; a run whose manifest is not sound gets another identity."""
    run = manifest["run"] if rundir.is_sound(manifest) else os.urandom(16).hex()
    return Seal(run, status, evidence_hash(evidence))


def _introduce(
    talk: Talk, why: str, path: Path, cfg: Config, data: Dataset, program: Program, flops: ModelFlops, step: int, mark: str
) -> None:  # fmt: skip
    m, d = cfg.model, data
    if talk.stamp:
        talk.say(f"{UNGATED}: a development run ({why}). No figure of it may be quoted.", "bold red")
    talk.say(f"run {path}" + (f", from step {step}" if step else ""), "bold")
    talk.say(f"model     {m.family}, {m.layers} layers, width {m.width}, {m.heads} heads: {parameters(program):,} parameters")
    talk.say(
        f"text      {d.split.train.size / 1e6:.2f} MB to train on, {d.split.validation.size / 1e6:.2f} MB to validate on "
        f"({len(d.corpus.documents)} files); {d.tokenizer.vocab_size} tokens of {d.tokenizer.kind}"
    )
    talk.say(
        f"step      {cfg.train.batch} x {cfg.data.sequence} tokens in {cfg.train.shards} logical shard"
        f"{'s' if cfg.train.shards > 1 else ''}; {flops.per_token / 1e6:.2f} MFLOP a token"
    )
    talk.say(f"MFU       {mark}")


def _conclude(talk: Talk, loop: Loop, found: Evaluation, yardstick: float) -> str:
    """What the run came to, and a sample, which is returned."""
    ours, mark = found.bits_per_byte, f"{talk.stamp} " if talk.stamp else ""
    talk.say(f"{mark}validation    {ours:.4f} bits per byte ({found.tokens:,} tokens, {found.bytes:,} bytes)", "bold")
    better = f"{1 - ours / yardstick:.1%} below" if ours < yardstick else f"{ours / yardstick - 1:.1%} ABOVE"
    talk.say(f"order-2 model {yardstick:.4f} bits per byte on the same split; ours is {better} it")
    talk.say("sample", "bold")
    text = loop.sample()
    talk.say(text, "dim")
    return text
