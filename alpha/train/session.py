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
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from alpha.checkpoint import folders
from alpha.comm.checked import checked
from alpha.comm.clock import align
from alpha.comm.links import measure
from alpha.comm.world import WORLD, World
from alpha.component import Catalogue
from alpha.config import Config
from alpha.data.ngram import Order2Model
from alpha.data.prefetch import Prefetcher
from alpha.errors import AlphaError, InputError, NonFiniteError, SpotCheckError
from alpha.flops.v1 import ModelFlops, stamp
from alpha.graph.plan import Program
from alpha.profile.store import Store
from alpha.train import forbidden, memory_check, rundir
from alpha.train.assemble import Dataset, calls_of, components_of, flops_for, open_data, program_for, sampler_for, threads_for, vocabulary
from alpha.train.communication import RankRecorder
from alpha.train.console import Board, Printer
from alpha.train.engine import VISIBLE, facts_of, open_executor, take_device, visible_devices
from alpha.train.evaluate import Evaluation
from alpha.train.extend import lasting
from alpha.train.handshake import require_same_program, require_same_start
from alpha.train.hub import beginning
from alpha.train.interrupt import Interrupt
from alpha.train.log import RankLog
from alpha.train.loop import Loop, Watch
from alpha.train.peak import Peak, peak_of_run, readings
from alpha.train.provenance import describe, moved, note_libraries, tell_plan, tell_sources
from alpha.train.ranks import STARTING_S, Ranks
from alpha.train.rundir import GATED, UNGATED, RunDir, RunFolder
from alpha.train.seal import Seal, broken, evidence_hash
from alpha.train.startup import Startup

Admit = Callable[[Sequence[str], Sequence[tuple[str, Any, Any]]], Mapping[str, Any]]
"""(component ids, calls) -> evidence by component, for the manifest; raises UngatedError."""


@dataclass(frozen=True)
class Outcome:
    """What a session left. `finished`: all steps are done; then `validation`, and on the first rank, unless `data.baseline` is off,
    `baseline` (bits per byte of the order-2 model). `ended_by`: what `stop` or `interrupt` said on any rank, where that ended it."""

    path: Path
    step: int
    finished: bool
    ended_by: int = 0
    validation: Evaluation | None = None
    baseline: float | None = None


@dataclass(frozen=True)
class Prepared:
    """What a session makes of a Config before it touches a run. `threads`: workers of each rank; `began`, `began_ns`: when it began to,
    in UTC and nanoseconds of CLOCK_MONOTONIC; `startup`: where the time went until then."""

    data: Dataset
    threads: int
    program: Program
    flops: ModelFlops
    began: datetime
    began_ns: int
    startup: Startup


def prepare(cfg: Config, catalogue: Catalogue, printer: Printer, ranks: Ranks, size: int) -> Prepared:
    """The data and the Program of a session on `size` ranks.

    `ranks`: those that call this alike, the first of which makes the data. A process that forks the ranks of a job calls it alone, once
    for all of them.
    """
    began, began_ns, startup = datetime.now(timezone.utc), time.perf_counter_ns(), Startup()
    startup.phase("text")
    with printer.doing("reading the corpus, the tokenizer and the tokens"), ranks.first_alone():
        data = open_data(cfg)
    startup.phase("Program")
    with printer.doing("building the program"), ranks.patient(STARTING_S):
        threads = threads_for(cfg, size)
        vocab = vocabulary(cfg, data.tokenizer.vocab_size)
        return Prepared(data, threads, program_for(cfg, vocab, catalogue, threads, size), flops_for(cfg, vocab), began, began_ns, startup)


def train(
    cfg: Config, catalogue: Catalogue, printer: Printer, *, admit: Admit | None, resume: Path | None = None, at: int | None = None,
    stop: Callable[[], int] = lambda: 0, interrupt: Interrupt | None = None, world: World | None = None,
    made: Callable[[Path], None] = lambda path: None, prepared: Prepared | None = None,
) -> Outcome:  # fmt: skip
    """Train `cfg` to its last step in a new run directory, or go on in `resume` (from checkpoint `at`, default the latest).

    `admit` None: an ungated run, stamped everywhere. `stop`: asked after each step; not 0 saves and ends the session. `interrupt`: listens
    to signals while steps run, with the same effect. `world`: this rank among those of a job, each of which calls this function alike; the
    first one alone asks the registry, makes the run directory, saves and prints. `made`: told the run directory, once it stands.
    `prepared`: by the process that forked this one, of the same Config; default: made here.
    """
    forbidden.watch()
    ranks = Ranks(world)
    if world and cfg.machine.backend == "cuda":
        take_device(world)
    with ExitStack() as stack:
        held: RunDir | None = None
        if resume is not None:
            held = stack.enter_context(RunDir(resume)) if ranks.first else None
            cfg = same_run(cfg, resume)
        if world:
            with ranks.patient(STARTING_S):
                require_same_start(world, cfg, str(resume or "a new run"))
        own = prepared or prepare(cfg, catalogue, printer, ranks, ranks.size)
        data, program, startup = own.data, own.program, own.startup
        startup.phase("ranks meet" if world else "Program")
        if resume is not None:
            require_same_text(cfg, data, resume)
        links = _joined(world, program, data) if world else "none"
        startup.phase("admission")
        begin = partial(beginning, cfg, data.tokenizer)
        fill = begin() if resume is None else None  # before anything is made; a run that goes on needs what it began from no more
        checking = world is not None and cfg.machine.debug in ("check", "all")
        evidence = _admitted(cfg, program, ranks, admit, checking)
        kernels = checked(catalogue) if checking else catalogue
        stack.enter_context(forbidden.training())  # the gates that `admit` may have run started processes of their own
        startup.phase("kernels and memory")
        with ranks.patient():  # one may load or compile kernels for longer than another
            executor = stack.enter_context(open_executor(program, kernels, world))
        on = ranks.each(f"{executor.hardware()['hardware']}, {VISIBLE} {visible_devices()[0]}") if world and own.program.facts[
            "backend"] == "cuda" else []
        startup.phase("libraries and manifest")
        forbidden.check("before the first step")
        if held is None and ranks.first:
            held = stack.enter_context(rundir.create(cfg, data.tokenizer, UNGATED if admit is None else GATED))
        path = Path(ranks.hear(str(held.path) if held else ""))
        run = held or RunFolder(path)
        made(path)
        manifest = rundir.read_manifest(run.path)
        metrics = stack.enter_context(Store(run.metrics, ranks.rank))
        sampler = sampler_for(cfg, data)
        loop = Loop(cfg, executor, sampler, data.validation, data.tokenizer, run.checkpoints, metrics, ranks)
        saved = None
        startup.phase("parameters" if resume is None else "checkpoint")
        if held:
            loop.holds, loop.tell = held.check, printer.say
        if resume is not None and (at is not None or folders.steps(run.checkpoints)):
            saved = loop.resume(at)
        else:
            with ranks.patient():
                loop.start(fill or begin())
            metrics.rewind(0, ranks.size)
        startup.phase("libraries and manifest")
        if cfg.data.prefetch:
            metrics.waits_again(loop.step, ranks.size)
            loop.sampler = stack.enter_context(Prefetcher(
                sampler, loop.texts(), depth=cfg.data.prefetch, steps=cfg.train.steps,
                told=lambda waited: metrics.add("data_waits", {**asdict(waited), "rank": ranks.rank})))
        if held:
            held.write_config(cfg)
            held.keep_tokenizer(data.tokenizer)
        why = "ungated components were allowed" if admit is None else broken(manifest, saved)
        loop.seal = _seal(manifest, UNGATED if why else GATED, evidence)
        printer.stamp = UNGATED if why else ""
        clock = _begun(metrics, loop.step, ranks, world, own.began_ns)
        log = stack.enter_context(RankLog(run.logs, metrics.rank))
        stack.push(partial(_ended, metrics, loop, log))
        stack.enter_context(log.warnings(lambda: loop.step))
        if isinstance(loop.recorder, RankRecorder):
            loop.recorder.each = cfg.machine.debug in ("trace", "all")
            loop.recorder.log = partial(log.say, "collective") if cfg.machine.debug in ("log", "all") else None
        log.say("start" if resume is None else "resume", loop.step, session=metrics.session, pid=os.getpid(), program=program.hash(),
                steps=cfg.train.steps, config=cfg.identity(), status=loop.seal.status, ranks=ranks.size, links=links,
                clock=clock)  # fmt: skip

        for error in loop.passed:
            printer.say(f"{error}\ngoing on from step {loop.step}, the latest checkpoint that is whole", "yellow")
            log.say("warning", loop.step, level="warning", text=str(error))

        startup.phase("room for saves")
        with ranks.patient():  # page-locking what saves are copied to takes its time
            loop.foretell_saves()

        def asked() -> int:
            return stop() or (interrupt() if interrupt else 0)

        if held is None:
            return _follow(loop, path, asked, interrupt)
        startup.phase("the machine's peak")
        with ranks.patient():
            peak, note_speed = peak_of_run(executor, metrics), readings(executor, metrics)
            note_speed()
            elsewhere = moved(metrics, executor, own.threads)
            startup.phase("facts")
            describe(held, metrics, cfg, data, program, own.flops, evidence, loop.seal, admit is not None, own.began, loop.step,
                     own.threads, peak, executor, catalogue, on)  # fmt: skip
            metrics.describe({"verify": loop.spots.status, **facts_of(executor)})
            tell_sources(metrics, cfg, sampler)
            tell_plan(metrics, program, own.flops, cfg.train.batch * cfg.data.sequence)
            _introduce(printer, why, held.path, cfg, data, program, own.flops, loop.step, stamp(peak.flops, peak.source))
            if foretold := loop.stalls.before():
                printer.say(f"saves     {foretold}")
            if elsewhere:
                printer.say(elsewhere, "yellow")
                log.say("warning", loop.step, level="warning", text=elsewhere)
        return _lead(loop, held, own, peak, note_speed, printer, log, asked, interrupt)


def _joined(world: World, program: Program, data: Dataset) -> str:
    """All ranks have one Program and its groups, and measured what lies between them; the rule that follows, as text."""
    require_same_program(world, program, data)
    world.add_groups(program.groups)
    world.rule = measure(world).rule()
    return world.rule.text(world.size)


def _admitted(cfg: Config, program: Program, ranks: Ranks, admit: Admit | None, checking: bool) -> Mapping[str, Any]:
    """Evidence by component, on the first rank. Each host has the memory, and the first rank was let in, before any rank goes on.
    `checking`: what collectives were asked for is compared at each call, which takes memory too."""
    if ranks.rank == ranks.here.start:  # of each host
        memory_check.require(program, ranks.here, checked=checking)
        memory_check.require_room_for_saves(program, ranks.here)
    evidence: Mapping[str, Any] = {}
    if ranks.first:
        with ranks.patient(STARTING_S):
            apart = ["transport.tcp"] if len(ranks.here) < ranks.size else []
            evidence = admit([*components_of(cfg, program), *apart], calls_of(program)) if admit is not None else {}
    ranks.meet()
    return evidence


def _begun(metrics: Store, step: int, ranks: Ranks, world: World | None, began_ns: int) -> str:
    """This rank's session begins, under one number for all ranks and by clocks that were compared; what the clock is, as text."""
    moment, unix, clock = time.perf_counter_ns(), time.time_ns(), "its own"
    if world:
        clocks = align(world.group(WORLD))
        moment, unix, clock = clocks.moment, clocks.unix, clocks.text()
    number = ranks.hear(str(metrics.next_session()) if ranks.first else "")
    metrics.begin(step, began_ns, moment, unix)
    metrics.renumber(int(number))
    return clock


def _lead(loop: Loop, held: RunDir, own: Prepared, peak: Peak, note_speed: Callable[[], None], printer: Printer, log: RankLog,
          asked: Callable[[], int], interrupt: Interrupt | None) -> Outcome:  # fmt: skip
    """The loop of the first rank, which says what the run comes to, and the end of it. `note_speed`: measures the machine again."""
    cfg, metrics, ranks, data = loop.cfg, loop.metrics, loop.ranks, own.data
    ranks.meet()
    own.startup.end()
    metrics.describe({"startup": own.startup.text()})
    printer.say(f"start     {own.startup.text()}")
    metrics.mark(loop_ns=time.perf_counter_ns())
    if loop.step < cfg.train.steps:
        with Board(printer, loop.step, cfg.train.steps, own.flops, peak, ranks.size, loop.profiled) as board, interrupt or nullcontext():
            finished = loop.run(_watch(held, board, log, note_speed, loop, asked))
        note_libraries(held)
        with loop.recorder.span("eval"), ranks.patient():
            note_speed()
        if not finished:
            metrics.mark(ended="stopped")
            return Outcome(held.path, loop.step, False, loop.ended_by)
        printer.say(board.summary(stamp(peak.flops, peak.source)))
        if stalled := loop.stalls.after(board.mean_ns):
            printer.say(f"{f'{printer.stamp} ' if printer.stamp else ''}saves: {stalled}")
    with printer.doing("validating" + (", and fitting the order-2 byte model" if cfg.data.baseline else "")):
        found, baseline = loop.evaluate(cfg.train.final_windows), None
        if cfg.data.baseline:
            with loop.recorder.span("eval"):
                baseline = Order2Model(data.split.train.texts()).bits_per_byte(data.split.validation.texts())
            metrics.describe({"order2_bits_per_byte": baseline})
    with loop.recorder.span("sample_gen"):
        log.say("evaluation", loop.step, bits_per_byte=found.bits_per_byte, windows=found.windows, order2=baseline)
        log.say("sample", loop.step, text=_conclude(printer, loop, found, baseline))
    printer.say(f"spot checks   {loop.spots.tally.text()}" if loop.spots.on else f"spot checks   {loop.spots.status}")
    log.say("spot-checks", loop.step, status=loop.spots.status, done=loop.spots.tally.text())
    forbidden.check("at the end")
    note_libraries(held)
    metrics.mark(ended="finished")
    return Outcome(held.path, loop.step, True, validation=found, baseline=baseline)


def _follow(loop: Loop, path: Path, asked: Callable[[], int], interrupt: Interrupt | None) -> Outcome:
    """The loop of every rank but the first: the same steps, validations and saves, and nothing to say."""
    loop.ranks.meet()
    loop.metrics.mark(loop_ns=time.perf_counter_ns())
    if loop.step < loop.cfg.train.steps:
        with interrupt or nullcontext():
            finished = loop.run(Watch(stop=asked))
        if not finished:
            loop.metrics.mark(ended="stopped")
            return Outcome(path, loop.step, False, loop.ended_by)
    found = loop.evaluate(loop.cfg.train.final_windows)
    forbidden.check("at the end")
    loop.metrics.mark(ended="finished")
    return Outcome(path, loop.step, True, validation=found)


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
        if foretold := loop.stalls.at_first():
            board.printer.say(f"saves     {foretold}")

    def stopping() -> int:
        asked = stop()
        if asked and not heard:
            heard.append(asked)
            log.say("signal", loop.step, level="warning", name=signal.Signals(asked).name if asked > 1 else "asked to stop")
        return asked

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
        if isinstance(error, SpotCheckError):
            log.say("spot-check", loop.step, level="error", what=error.what, came=error.came, expected=error.expected)
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


def same_run(cfg: Config, path: Path) -> Config:
    """`cfg` under the run's own name; InputError if it would not continue the run in `path` bit for bit. It may last longer or shorter:
    whether its schedule allows that, the checkpoint's step decides (alpha/train/extend.py)."""
    own = rundir.read_config(path)
    if lasting(own, cfg.train.steps).identity() != cfg.identity():
        mine, theirs = (set(c.resolved().splitlines()) for c in (cfg, own))
        raise InputError(
            "the configuration is not that of the run to resume",
            came="; ".join(sorted(mine - theirs)[:4]),
            expected=f"as in {path / 'config.toml'}: {'; '.join(sorted(theirs - mine)[:4])}",
            do=f"resume with `alpha train {path} --resume`, or start a new run",
        )
    return replace(cfg, run=own.run)


def require_same_text(cfg: Config, data: Dataset, path: Path) -> None:
    """InputError unless the run in `path` read this text before, as far as its manifest tells; a checkpoint holds it against its own."""
    manifest = rundir.read_manifest(path)
    before = manifest.get("streams", {}) if rundir.is_sound(manifest) else {}
    for side, now in (("train", data.train.hash), ("validation", data.validation.hash)):
        if before.get(side, now) != now:
            raise InputError(
                "the run read another text before",
                came=f"{cfg.data.mixture or cfg.data.corpus}, read in {Path.cwd()}: {side} {now[:16]}",
                expected=f"{side} {before[side][:16]}, which {path} read in {manifest.get('folder') or 'a folder that it did not keep'}",
                do="restore the text as it was (another Python has another standard library), or start a new run",
            )


def parameters(program: Program) -> int:
    """Elements of all parameters, padding not counted."""
    return sum(t.size for t in program.states["param"].tensors)


def _seal(manifest: Mapping[str, Any], status: str, evidence: Mapping[str, Any]) -> Seal:
    """What this session's checkpoints say; a run whose manifest is not sound gets another identity."""
    run = manifest["run"] if rundir.is_sound(manifest) else os.urandom(16).hex()
    return Seal(run, status, evidence_hash(evidence))


def _introduce(
    printer: Printer, why: str, path: Path, cfg: Config, data: Dataset, program: Program, flops: ModelFlops, step: int, mark: str
) -> None:  # fmt: skip
    m, d = cfg.model, data
    if printer.stamp:
        printer.say(f"{UNGATED}: a development run ({why}). No figure of it may be quoted.", "bold red")
    printer.say(f"run {path}" + (f", from step {step}" if step else ""), "bold")
    printer.say(f"model     {m.family}, {m.layers} layers, width {m.width}, {m.heads} heads: {parameters(program):,} parameters")
    printer.say(
        f"text      {d.split.train.size / 1e6:.2f} MB to train on, {d.split.validation.size / 1e6:.2f} MB to validate on "
        f"({len(d.corpus.documents)} documents{f', {d.corpus.left_out} others left out' if d.corpus.left_out else ''}); "
        f"{d.tokenizer.vocab_size} tokens of {d.tokenizer.kind}"
    )
    printer.say(
        f"step      {cfg.train.batch} x {cfg.data.sequence} tokens in {cfg.train.shards} logical shard"
        f"{'s' if cfg.train.shards > 1 else ''}; {flops.per_token / 1e6:.2f} MFLOP a token"
    )
    if program.ranks > 1:
        each = f"{program.facts['threads']} threads" if "threads" in program.facts else "a GPU"
        printer.say(f"ranks     {program.ranks}, each with {each}"
                    + (" and its cut of the optimizer's state" if program.sharded else ""))
    printer.say(f"MFU       {mark}")


def _conclude(printer: Printer, loop: Loop, found: Evaluation, baseline: float | None) -> str:
    """What the run came to, and a sample, which is returned."""
    ours, mark = found.bits_per_byte, f"{printer.stamp} " if printer.stamp else ""
    printer.say(f"{mark}validation    {ours:.4f} bits per byte ({found.tokens:,} tokens, {found.bytes:,} bytes)", "bold")
    if baseline is not None:
        better = f"{1 - ours / baseline:.1%} below" if ours < baseline else f"{ours / baseline - 1:.1%} ABOVE"
        printer.say(f"order-2 model {baseline:.4f} bits per byte on the same split; ours is {better} it")
    printer.say("sample", "bold")
    text = loop.sample()
    printer.say(text, "dim")
    return text
