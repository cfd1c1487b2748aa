"""One session of a run: everything between a Config and a trained model in a run directory. Floor 6.

The registry is asked by the caller (`admit`), so that this floor knows nothing of gates: it is handed the components and the calls of
exactly the Program that will run, before the run directory is made, and raises if they may not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from alpha.checkpoint import simple
from alpha.component import Catalogue
from alpha.config import Config
from alpha.data.ngram import Order2Model
from alpha.errors import AlphaError, InputError
from alpha.flops.v1 import ModelFlops, stamp
from alpha.graph.plan import Program
from alpha.profile.store import Store
from alpha.train import forbidden, rundir
from alpha.train.assemble import Dataset, calls_of, flops_for, host_components, open_data, program_for, sampler_for, threads_for
from alpha.train.console import Board, Talk
from alpha.train.engine import Executor, open_executor
from alpha.train.evaluate import Evaluation
from alpha.train.loop import Loop, Watch
from alpha.train.peak import peak_of
from alpha.train.provenance import describe, note_libraries, tell_plan
from alpha.train.rundir import UNGATED, RunDir
from alpha.train.sample import generate, printable

Admit = Callable[[Sequence[str], Sequence[tuple[str, Any, Any]]], Mapping[str, Any]]
"""(component ids, calls) -> evidence by component, for the manifest; raises UngatedError."""

SAMPLE_TOKENS = 120
SAMPLE_PROMPT = b"def "


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
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:  # fmt: skip
    """Train `cfg` to its last step in a new run directory, or go on in `resume` (from checkpoint `at`, default the latest).

    `admit` None: an ungated run, stamped everywhere. `stop`: asked after each step; True saves and ends the session.
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
        evidence = admit(host_components(cfg, catalogue), calls_of(program)) if admit is not None else {}
        stack.enter_context(forbidden.training())  # the gates that `admit` may have run started processes of their own
        executor = stack.enter_context(open_executor(program, catalogue))
        forbidden.check("before the first step")
        if held is None:
            held = stack.enter_context(rundir.create(cfg, data.tokenizer))
        metrics = stack.enter_context(Store(held.metrics))
        loop = Loop(cfg, executor, sampler_for(cfg, data), data.validation, data.tokenizer, held.checkpoints, metrics)
        if resume is not None and (at is not None or simple.steps(held.checkpoints)):
            loop.resume(at)
        else:
            loop.start()
            metrics.rewind(0)
        ungated = admit is None or rundir.read_manifest(held.path).get("status") == UNGATED
        talk.stamp = UNGATED if ungated else ""
        metrics.begin(loop.step, began_ns, time.perf_counter_ns(), time.time_ns())
        stack.push(partial(_ended, metrics, loop))
        peak = peak_of(executor, metrics)
        describe(held, metrics, cfg, data, program, flops, evidence, ungated, began, loop.step, threads, peak, executor)
        tell_plan(metrics, program)
        _introduce(talk, held.path, cfg, data, program, flops, loop.step, stamp(peak.flops, peak.source))
        metrics.mark(loop_ns=time.perf_counter_ns())
        if loop.step < cfg.train.steps:
            with Board(talk, loop.step, cfg.train.steps, flops, peak) as board:
                finished = loop.run(Watch(board.step, board.evaluated, board.saved, stop))
            note_libraries(held)
            with loop.recorder.span("eval"):
                peak.measure()
            metrics.describe({"peak_flops": peak.flops, "peak_bandwidth": peak.bandwidth})
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
            _conclude(talk, executor, data, found, yardstick)
        forbidden.check("at the end")
        note_libraries(held)
        metrics.mark(ended="finished")
        return Outcome(held.path, loop.step, True, found, yardstick)


def _ended(metrics: Store, loop: Loop, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
    """Close the last step interval and say how the session ended, if it failed."""
    loop.recorder.finish()
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


def _introduce(talk: Talk, path: Path, cfg: Config, data: Dataset, program: Program, flops: ModelFlops, step: int, mark: str) -> None:
    m, d = cfg.model, data
    if talk.stamp:
        talk.say(f"{UNGATED}: a development run. No figure of it may be quoted.", "bold red")
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


def _conclude(talk: Talk, executor: Executor, data: Dataset, found: Evaluation, yardstick: float) -> None:
    ours, mark = found.bits_per_byte, f"{talk.stamp} " if talk.stamp else ""
    talk.say(f"{mark}validation    {ours:.4f} bits per byte ({found.tokens:,} tokens, {found.bytes:,} bytes)", "bold")
    better = f"{1 - ours / yardstick:.1%} below" if ours < yardstick else f"{ours / yardstick - 1:.1%} ABOVE"
    talk.say(f"order-2 model {yardstick:.4f} bits per byte on the same split; ours is {better} it")
    text = b"".join(generate(executor, data.tokenizer, SAMPLE_PROMPT, tokens=SAMPLE_TOKENS))
    talk.say("sample", "bold")
    talk.say(printable(SAMPLE_PROMPT + text), "dim")
