"""Cases of sessions of many ranks: one alone admits, makes the folder and speaks, all take the same steps; and the order in which a session
does what comes before its first step. Floor 7.
"""

# mypy: disable-error-code="arg-type,func-returns-value"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

import os
import shutil
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.checkpoint import folders
from alpha.comm.world import World
from alpha.component import Measured
from alpha.errors import UngatedError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.ranks.members import in_threads
from alpha.gates.contracts.train.apart import Named, instead, said, same
from alpha.gates.contracts.train.made_session import Admits, Sessions, events, sessions, stops, table
from alpha.optim.init import fill_initial
from alpha.train import assemble, rundir, session
from alpha.train.catalogue import catalogue
from alpha.train.evaluate import Evaluation


def _rank(run: Sessions, given: dict[str, Any], world: World) -> tuple[Any, list[str], Admits]:
    """A session of one rank: what it left, what it printed, and what its registry was asked."""
    own, admits = Sessions(run.small), Admits()
    more = {name: value(world.rank) if name in ("stop", "made") else value for name, value in given.items()}
    outcome, lines = own.train(world=world, **{"admit": admits, **more})
    return outcome, lines, admits


class _Listens:
    """What listens to signals, where ranks are threads of one process: none come."""

    entered = 0

    def __call__(self) -> int:
        return 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *error: object) -> None:
        """As it was."""


def ranks(rng: np.random.Generator) -> Measured:
    """Two ranks, the state cut, stopped by what the second was asked and gone on with: the bits of one rank alone. The first one asks the
    registry, prints and saves; each has its log and its rows; collectives are checked, logged and traced where that is asked for."""
    checks: Named = []
    with sessions(rng) as run:
        cfg = replace(run.cfg, train=replace(run.cfg.train, zero=1), data=replace(run.cfg.data, baseline=False), machine=replace(
            run.cfg.machine, threads=1, debug="all"))
        with run.small.loop("alone", run.cfg) as loop:
            loop.start()
            loop.run()
            found = loop.evaluate(0)
        path, told = run.root / "runs" / "contract", list[tuple[int, Path]]()
        program = assemble.program_for(cfg, 257, catalogue(), 1, 2)
        own = replace(run.prepared(run.cfg), program=program, threads=1)

        def stop(rank: int) -> Any:
            if rank == 0:
                warnings_shown = stops(1, 0)
                return lambda: warnings.showwarning("careful", UserWarning, "file.py", 3) or warnings_shown()
            return stops(2, 15)

        with instead(warnings, showwarning=lambda *given: None):
            first = in_threads(2, partial(_rank, run, {"cfg": cfg, "prepared": own, "stop": stop, "made": lambda rank: partial(
                lambda rank, path: told.append((rank, path)), rank)}))
        for rank, result in enumerate(first):
            checks.append((f"rank {rank}: {result!r}"[:300], isinstance(result, tuple)))
        if not all(isinstance(x, tuple) for x in first):
            return all_hold(checks)
        same(checks, "stopped", [x[0] for x in first], [session.Outcome(path, 2, False, 15)] * 2)
        same(checks, "told", sorted(told), [(0, path), (1, path)])
        same(checks, "asked", [x[2].asked for x in first], [[(assemble.components_of(cfg, program), assemble.calls_of(program))], []])
        checks.append(("the ranks", "ranks     2, each with 1 threads and its cut of the optimizer's state" in first[0][1]))
        same(checks, "the second says nothing", first[1][1], [])
        for rank in (0, 1):
            log = events(path, rank)
            start = log[0][3]
            same(checks, f"log of rank {rank}", (log[0][0], start["ranks"], start["session"],
                                                 start["clock"].split(" ")[0] in ("one", "clocks"),
                                                 "ns a byte" in start["links"], start["status"], log[-1][0], log[-1][3]), (
                 "start", 2, 0, True, True, "GATED", "end", {"reason": "stopped"}))
            ops = {x[3]["op"] for x in log if x[0] == "collective"}
            checks.append((f"collectives of rank {rank}: {ops}", {"reduce_scatter", "all_gather"} <= ops))
        same(checks, "warned", [x[2:] for x in events(path) if x[0] == "warning"][:1], [
            (1, {"text": "careful", "category": "UserWarning", "place": "file.py:3"})])
        checks.append(("traced", {row[0] for row in table(path, "collectives", "rank")} == {0, 1}))
        gpus = replace(own, program=replace(program, facts={k: v for k, v in program.facts.items()
                                                            if k != "threads"} | {"backend": "cuda"}))
        rows = len(table(path, "collectives", "rank"))
        quiet = replace(cfg, machine=replace(cfg.machine, debug="off"))
        listens = _Listens()
        with instead(session, open_executor=lambda p, kernels, world: CpuExecutor(program, catalogue(), world),
                     visible_devices=lambda: ["7", "9"]):
            second = in_threads(2, partial(_rank, run, {"cfg": quiet, "prepared": gpus, "resume": path, "interrupt": listens}))
        same(checks, "listened", listens.entered, 2)
        for rank, result in enumerate(second):
            checks.append((f"rank {rank}: {result!r}"[:300], isinstance(result, tuple)))
        if not all(isinstance(x, tuple) for x in second):
            return all_hold(checks)
        same(checks, "finished", [x[0] for x in second], [session.Outcome(path, 4, True, 0, found)] * 2)
        same(checks, "bits", run.bits(path), run.bits(run.root / "alone"))
        checks.append(("of GPUs", "ranks     2, each with a GPU and its cut of the optimizer's state" in second[0][1]
                       and second[1][1] == []))
        hardware = rundir.read_manifest(path)["sessions"][-1]
        same(checks, "devices", hardware["devices"], [f"{hardware['hardware']}, CUDA_VISIBLE_DEVICES 7"] * 2)
        same(checks, "not traced", len(table(path, "collectives", "rank")), rows)
        same(checks, "sessions", table(path, "sessions", "session, rank, first_step, ended"), [
            (0, 0, 0, "stopped"), (0, 1, 0, "stopped"), (1, 0, 2, "finished"), (1, 1, 2, "finished")])
        third = in_threads(2, partial(_rank, run, {"cfg": quiet, "prepared": own, "resume": path}))
        same(checks, "at its end already", [x[0] for x in third], [session.Outcome(path, 4, True, 0, found)] * 2)
    return all_hold(checks)


def clocks(rng: np.random.Generator) -> Measured:
    """Ranks begin a session at the moment that their clocks agreed on, each by its own clock, at one time of the day and under the number
    that the first one says; a rank alone begins at its own moment. When the command began and from which step stays each one's own."""
    checks: Named = []
    for trial in range(6):
        did, own = list[tuple[Any, ...]](), [int(x) for x in rng.integers(1 << 40, 1 << 60, 2)]
        moment, unix, began, number = (int(x) for x in rng.integers(1, 1 << 40, 4))
        step, first, many = int(rng.integers(0, 99)), trial % 3 != 2, trial % 3 != 0

        def note(name: str, result: Any = None) -> Any:
            return lambda *given: did.append((name, *given)) or result

        metrics = SimpleNamespace(next_session=note("number", number - 1), begin=note("begin"), renumber=note("renumber"))
        ranks_ = SimpleNamespace(first=first, hear=note("hear", str(number)))
        world = SimpleNamespace(group=note("group", "all"))
        with instead(session, align=note("align", SimpleNamespace(moment=moment, unix=unix, text=lambda: "compared")),
                     time=SimpleNamespace(perf_counter_ns=lambda: own[0], time_ns=lambda: own[1])):
            clock = session._begun(metrics, step, ranks_, world if many else None, began)
        same(checks, "its clock", clock, "compared" if many else "its own")
        compared = [("group", session.WORLD), ("align", "all")] if many else []
        asked = [("number",), ("hear", str(number - 1))] if first else [("hear", "")]
        same(checks, f"begun, trial {trial}", did, [*compared, *asked, ("begin", step, began, *((moment, unix) if many else own)),
                                                    ("renumber", number)])
    return all_hold(checks)


class _World:
    """A rank of four on two hosts, which notes what it is asked to do."""

    def __init__(self, rank: int, did: list[str]) -> None:
        self.rank, self.size, self.here, self.did = rank, 4, range(rank // 2 * 2, rank // 2 * 2 + 2), did
        self.rule: Any = None

    @contextmanager
    def patient(self, seconds: float) -> Any:
        """The others wait."""
        self.did.append(f"patient {seconds:g}")
        yield

    def add_groups(self, groups: object) -> None:
        """Groups of a Program."""
        self.did.append(f"groups {groups}")


def before_a_step(rng: np.random.Generator) -> Measured:
    """What comes before anything is made, in its order, on the first rank of a host and on another one: a GPU of its own where there are
    any, what all must have alike, what a run begins from, the memory of this host's ranks, and the registry's word on all that runs, the
    connections between hosts included."""
    checks: Named = []
    with sessions(rng) as run:
        own = run.prepared(run.cfg)
        for rank, backend, debug in ((0, "cuda", "check"), (0, "cpu", "trace"), (2, "cuda", "all"), (3, "cpu", "off")):
            did = list[str]()
            world = _World(rank, did)
            cfg = replace(run.cfg, machine=replace(run.cfg.machine, backend=backend, debug=debug), train=replace(
                run.cfg.train, precision="bf16" if backend == "cuda" else "f32"))

            def note(name: str, result: Any = None, ends: bool = False) -> Any:
                def noted(*given: Any, **more: Any) -> Any:
                    plain = [f"{x}" for x in given if isinstance(x, (str, range))]
                    did.append(" ".join([name, *plain, *(f"{k}={v}" for k, v in more.items())]))
                    if ends:
                        raise UngatedError("no leave")
                    return result
                return noted

            rule = SimpleNamespace(rule=lambda: SimpleNamespace(text=lambda size: f"links of {size}"))
            asked = list[Any]()

            def admit(ids: Any, calls: Any) -> Any:
                asked.append(list(ids))
                raise UngatedError("no leave")

            def meet(ranks: Any) -> None:
                did.append("meet")
                raise UngatedError("no leave")

            with instead(session, take_device=note("device"), require_same_start=note("alike"), require_same_program=note("one Program"),
                         measure=note("links", rule), beginning=note("beginning", None), components_of=lambda cfg, program: ["all"],
                         calls_of=lambda program: ["calls"]), \
                    instead(session.memory_check, require=note("room"), require_room_for_saves=note("room for saves")), \
                    instead(session.Ranks, meet=meet):
                found = said(lambda: run.train(cfg, world=world, prepared=own, admit=admit))
            same(checks, "ends", found, "UngatedError: no leave")
            here = range(rank // 2 * 2, rank // 2 * 2 + 2)
            rooms = [f"room {here} checked={debug in ('check', 'all')}", f"room for saves {here}"] if rank in (0, 2) else []
            same(checks, f"rank {rank}", did, [*["device"] * (backend == "cuda"), "patient 3600", "alike a new run", "one Program",
                 f"groups {own.program.groups}", "links", "beginning", *rooms, *(["patient 3600"] if rank == 0 else ["meet"])])
            same(checks, "asked", asked, [["all", "transport.tcp"]] if rank == 0 else [])
    return all_hold(checks)


def begun(rng: np.random.Generator) -> Measured:
    """A run that begins from another one's checkpoint: its first parameters are that one's, all else is as ever, also where it was killed
    before it saved. Once it has, it needs that run no more."""
    checks: Named = []
    stood = list[str]()
    with sessions(rng) as run:
        with run.small.loop("first") as loop:
            loop.start(lambda flat, layout, seed: fill_initial(flat, layout, seed + 9))
            loop.step = 2
            loop.save()
        first = run.root / "first"
        (first / "config.toml").write_text(run.small.cfg.resolved())
        run.small.data.tokenizer.save(first / "tokenizer.json")
        train = replace(run.cfg.train, steps=2, eval_every=0, sample_every=0, verify=0, start_from=f"{first.as_posix()}@2")
        cfg = replace(run.cfg, train=train, data=replace(run.cfg.data, baseline=False))
        with run.small.loop("alone", replace(cfg, train=replace(train, start_from=""))) as loop:
            other = folders.read(folders.at(first / "checkpoints"), "param")["param"][1]
            loop.start(lambda flat, layout, seed: np.copyto(flat, other))
            loop.run()
        outcome, _ = run.train(cfg, prepared=run.prepared(replace(cfg, train=replace(train, start_from=""))), stop=stops(1, 1),
                               admit=None, made=lambda path: stood.append(rundir.read_manifest(path)["status"]))
        same(checks, "without leave from the beginning", (stood, rundir.read_manifest(outcome.path)["status"]), (["UNGATED"], "UNGATED"))
        shutil.rmtree(outcome.path / "checkpoints")
        outcome, _ = run.train(cfg, prepared=run.prepared(replace(cfg, train=replace(train, start_from=""))), stop=stops(1, 1),
                               resume=outcome.path)
        os.rename(first, run.root / "gone")
        outcome, _ = run.train(cfg, prepared=run.prepared(replace(cfg, train=replace(train, start_from=""))), resume=outcome.path)
        same(checks, "bits", (outcome.finished, run.bits(outcome.path)), (True, run.bits(run.root / "alone")))
    return all_hold(checks)


def mixed_up(rng: np.random.Generator) -> Measured:
    """A gated run that goes on from a checkpoint that is not its own, or was made without leave, is UNGATED from there on; else it stays
    what it is."""
    checks: Named = []
    with sessions(rng) as run:
        train = replace(run.cfg.train, steps=2, eval_every=0, sample_every=0, verify=0)
        cfg = replace(run.cfg, train=train, data=replace(run.cfg.data, baseline=False))
        for whose, more, status in (("its own", None, "GATED"), ("another one's", {}, "UNGATED"), ("a lab's", {"admit": None}, "UNGATED")):
            own, _ = run.train(cfg, stop=stops(1, 1))
            if more is not None:
                other, _ = run.train(cfg, stop=stops(1, 1), **more)
                shutil.rmtree(own.path / "checkpoints")
                shutil.copytree(other.path / "checkpoints", own.path / "checkpoints")
            stood = rundir.read_manifest(own.path)["status"]
            outcome, _ = run.train(cfg, resume=own.path)
            same(checks, whose, (stood, outcome.finished, rundir.read_manifest(own.path)["status"]), ("GATED", True, status))
    return all_hold(checks)


def watched(rng: np.random.Generator) -> Measured:
    """What looks on at a loop: after a validation the machine's speed is read first, a checkpoint's libraries are noted beside the save,
    what is foretold of the first save is said once, and of what a run was asked the first is logged, under its signal's name."""
    checks: Named = []
    for foretold in ("", "7 ms"):
        did = list[Any]()

        def note(name: str, result: Any = None) -> Any:
            return lambda *given, **more: did.append((name, *given, more)) or result

        board = SimpleNamespace(step=note("step"), evaluated=note("shown"), sampled=note("shown"), saved=note("shown"),
                                printer=SimpleNamespace(say=note("say")))
        loop = SimpleNamespace(step=5, recorder=SimpleNamespace(span=lambda name: nullcontext(did.append(("span", name)))),
                               stalls=SimpleNamespace(at_first=lambda: foretold))
        answers = [0, 15, 2, 1]
        with instead(session, note_libraries=note("libraries")):
            watch = session._watch("held", board, SimpleNamespace(say=note("log")), note("speed"), loop, lambda: answers.pop(0))
            found = Evaluation(8.0, 4, 2, 3)
            watch.step("result")
            watch.evaluated(3, found)
            watch.sampled(4, "text")
            watch.saved(5, Path("there"))
            heard = [watch.stop() for _ in range(4)]
        bits = found.bits_per_byte
        same(checks, "calls", did, [
            ("step", "result", {}), ("speed", {}), ("log", "evaluation", 3, {"bits_per_byte": bits, "windows": 3}), ("shown", 3, found, {}),
            ("log", "sample", 4, {"text": "text"}), ("shown", 4, "text", {}), ("span", "checkpoint"), ("libraries", "held", {}),
            ("log", "checkpoint", 5, {"path": Path("there")}), ("shown", 5, Path("there"), {}),
            *[("say", f"saves     {foretold}", {})] * bool(foretold), ("log", "signal", 5, {"level": "warning", "name": "SIGTERM"})])
        same(checks, "heard", heard, [0, 15, 2, 1])
    cfg = SimpleNamespace(model=SimpleNamespace(family="gpt", layers=3, width=5, heads=7), train=SimpleNamespace(batch=4, shards=1),
                          data=SimpleNamespace(sequence=6))
    data = SimpleNamespace(split=SimpleNamespace(train=SimpleNamespace(size=12_345_678), validation=SimpleNamespace(size=2_000_000)),
                           corpus=SimpleNamespace(documents=[1] * 9, left_out=8), tokenizer=SimpleNamespace(vocab_size=300, kind="bpe"))
    program = SimpleNamespace(ranks=4, facts={"threads": 3}, sharded=(), states={"param": SimpleNamespace(tensors=[SimpleNamespace(
        size=n) for n in (1000, 234)])})
    shown = list[tuple[str, str]]()
    printer = SimpleNamespace(stamp="", say=lambda text, style="": shown.append((text, style)))
    session._introduce(printer, "", Path("p"), cfg, data, program, SimpleNamespace(per_token=2_500_000), 0, "mark")
    same(checks, "introduced", shown, [
        ("run p", "bold"), ("model     gpt, 3 layers, width 5, 7 heads: 1,234 parameters", ""),
        ("text      12.35 MB to train on, 2.00 MB to validate on (9 documents, 8 others left out); 300 tokens of bpe", ""),
        ("step      4 x 6 tokens in 1 logical shard; 2.50 MFLOP a token", ""), ("ranks     4, each with 3 threads", ""),
        ("MFU       mark", "")])
    for baseline, words in ((8.0, "25.0% below"), (4.8, "25.0% ABOVE"), (None, "")):
        shown.clear()
        printer.stamp = "UNGATED" if baseline is None else ""
        found = Evaluation(6.0 * np.log(2) * 1000, 1234, 1000, 3)
        text = session._conclude(printer, SimpleNamespace(sample=lambda: "a text"), found, baseline)
        ours = f"order-2 model {baseline:.4f} bits per byte on the same split; ours is {words} it" if baseline else ""
        same(checks, "concluded", (text, shown), ("a text", [
            (f"{'UNGATED ' * (not baseline)}validation    6.0000 bits per byte (1,234 tokens, 1,000 bytes)", "bold"),
            *[(ours, "")] * bool(baseline), ("sample", "bold"), ("a text", "dim")]))
    return all_hold(checks)
