"""Cases of sessions: from a run file to a trained model in a run directory, and on from there; what a person reads meanwhile, and what is
kept of it. Floor 7.

A whole session is held against the loop alone, which other cases hold against the schedule run by hand: the bits, and the figures that are
printed, logged and stored.
"""

# ruff: noqa: B023  (what a case makes in a round is called in that round)

# mypy: disable-error-code="assignment"

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import folders
from alpha.component import Measured
from alpha.errors import MachineError, NonFiniteError, SpotCheckError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.gates.contracts.train.made_session import EVIDENCE, HASH, Admits, Sessions, events, sessions, stops, table
from alpha.registry.machine import environment, machine_class
from alpha.train import assemble, interrupt, provenance, rundir, session
from alpha.train.catalogue import catalogue
from alpha.train.evaluate import Evaluation
from alpha.train.log import RankLog
from alpha.train.loop import Loop
from alpha.train.seal import broken

MARK = ("flops/v1 (3 x forward; matmuls with head; causal attention counted half); peak {:.1f} GFLOP/s (measured once, when the run began: "
        "float32 4^3 products and 0 MiB copies on 2 workers)")
PARAMETERS = (257 + 8) * 16 + 2 * 2 * 16 + (16 + 1) * 48 + (16 + 1) * 16 + (16 + 1) * 64 + (64 + 1) * 16 + 2 * 16
"""Of the run of made.RUN: both embeddings, two norms, attention and the MLP of one block, a norm."""


def _apart(lines: list[str]) -> tuple[list[str], list[str]]:
    """Lines, and those of them that tell of a checkpoint: a thread decides behind which step one stands."""
    return [x for x in lines if ": saved " not in x], [x for x in lines if ": saved " in x]


def _introduced(run: Sessions, path: Path, peak: float, why: str = "", step: int = 0) -> list[str]:
    """What a session says before its first step."""
    data = run.small.data
    text = [data.split.train.size / 1e6, data.split.validation.size / 1e6]
    return [*([f"UNGATED: a development run ({why}). No figure of it may be quoted."] if why else []),
            f"run {path}" + (f", from step {step}" if step else ""),
            f"model     gpt, 1 layers, width 16, 2 heads: {PARAMETERS:,} parameters",
            f"text      {text[0]:.2f} MB to train on, {text[1]:.2f} MB to validate on (9 documents); 257 tokens of bytes",
            "step      12 x 8 tokens in 2 logical shards; 0.04 MFLOP a token", f"MFU       {MARK.format(peak / 1e9)}"]


def whole(rng: np.random.Generator) -> Measured:
    """A session in a new folder ends with the bits of the loop alone; the console, the log, the manifest and the metrics say what it did,
    each figure where it belongs; the registry was asked about exactly what ran."""
    checks: Named = []
    with sessions(rng) as run, run.small.loop("alone", run.cfg) as loop:
        seen = list[tuple[int, Evaluation]]()
        loop.start()
        loop.run(session.Watch(evaluated=lambda step, found: seen.append((step, found))))
        final, program = loop.evaluate(0), loop.program
        texts = [(step, prompt + text) for step, prompt, text in table_of(run.root / "alone" / "m.sqlite", "samples", "step, prompt, text")]
        admits = Admits()
        read = list[list[bytes]]()

        class Order2:
            """A model that notes what it is fitted to, and what it is asked about."""

            def __init__(self, texts: Iterable[bytes]) -> None:
                read.append(list(texts))

            def bits_per_byte(self, texts: Iterable[bytes]) -> float:
                """A figure."""
                read.append(list(texts))
                return order2

        order2 = float(rng.choice([7.0, 9.0]))
        with instead(session, Order2Model=Order2):
            outcome, lines = run.train(anew=True, admit=admits)
        path, end = run.root / "runs" / "contract", loop.sample()
        data = run.small.data
        same(checks, "fitted", read, [list(data.split.train.texts()), list(data.split.validation.texts())])
        same(checks, "outcome", outcome, session.Outcome(path, 4, True, 0, final, order2))
        same(checks, "told", run.made, [path])
        same(checks, "bits", run.bits(path), run.bits(run.root / "alone"))
        same(checks, "asked", admits.asked, [(assemble.components_of(run.cfg, program), assemble.calls_of(program))])
        (_, flops, bandwidth, source), = table(path, "run_peak", "session, flops, bandwidth, source")
        ours, kept = f"{final.bits_per_byte:.4f} bits per byte", [f"{path}/checkpoints/step-0000000{n}" for n in (2, 4)]
        losses = [row[1] for row in table(path, "step_metrics", "step, loss")]
        printed, saved = _apart(lines)
        better = final.bits_per_byte < order2
        share = abs(1 - final.bits_per_byte / order2)
        spots = events(path)[-2][3]["done"]
        same(checks, "console", [x for x in printed if x], [
            "reading the corpus, the tokenizer and the tokens ...", "building the program ...", *_introduced(run, path, flops),
            "saves     ...", "start     ...", *(f"step {i + 1}/4  loss {losses[i]:.4f}  N tokens/s  MFU N  T left" for i in range(3)),
            f"step 3: validation {seen[0][1].bits_per_byte:.4f} bits per byte (5 windows)", "step 3: sample", *texts[0][1].split("\n"),
            f"step 4/4  loss {losses[3]:.4f}  N tokens/s  MFU N  T left",
            f"4 steps in T: N tokens/s, MFU N  [{MARK.format(flops / 1e9)}]", "saves: ...",
            "validating, and fitting the order-2 byte model ...", f"validation    {ours} ({final.tokens:,} tokens, {final.bytes:,} bytes)",
            f"order-2 model {order2:.4f} bits per byte on the same split; ours is {share:.1%} {'below' if better else 'ABOVE'} it",
            "sample", *end.split("\n"),
            f"spot checks   {spots[: spots.index('largest')]}largest error N of its tolerance (OP); 1 MB of state hashed"])
        same(checks, "saves", saved, [f"step {n}: saved {p}" for n, p in zip((2, 4), kept)])
        log = events(path)
        same(checks, "log but of saves", [x for x in log if x[0] != "checkpoint"], [
            ("start", "info", 0, {"session": 0, "pid": os.getpid(), "program": program.hash(), "steps": 4, "config": run.cfg.identity(),
                                  "status": "GATED", "ranks": 1, "links": "none", "clock": "its own"}),
            ("evaluation", "info", 3, {"bits_per_byte": seen[0][1].bits_per_byte, "windows": 5}),
            ("sample", "info", 3, {"text": texts[0][1]}),
            ("evaluation", "info", 4, {"bits_per_byte": final.bits_per_byte, "windows": final.windows, "order2": order2}),
            ("sample", "info", 4, {"text": end}), ("spot-checks", "info", 4, {"status": "first step and every 2", "done": spots}),
            ("end", "info", 4, {"reason": "finished"})])
        same(checks, "log of saves", [(x[0], x[3]) for x in log if x[0] == "checkpoint"], [("checkpoint", {"path": p}) for p in kept])
        same(checks, "metrics", table(path, "step_metrics", "step, loss, norm, lr"),
             table_of(run.root / "alone" / "m.sqlite", "step_metrics", "step, loss, norm, lr"))
        _facts(checks, run, path, loop, (flops, bandwidth, source), order2)
        launched = sum(len(program.plans[name].launches) for name in program.plans if name in {s.plan for s in program.schedule})
        same(checks, "plan", (len(table(path, "schedule")), len(table(path, "memory_plan")),
                              sum(x[0] for x in table(path, "schedule", "count"))),
             (len({s.plan for s in program.schedule}), launched, len(program.schedule)))
    return all_hold(checks)


def table_of(path: Path, name: str, columns: str) -> list[tuple[Any, ...]]:
    """Rows of a table of metrics."""
    with closing(sqlite3.connect(path)) as db:
        return [tuple(row) for row in db.execute(f"SELECT {columns} FROM {name}")]


def _facts(checks: Named, run: Sessions, path: Path, loop: Loop, peak: tuple[float, float, str], order2: float) -> None:
    """The manifest and the metadata of a GATED run of one session."""
    data, program, cfg, here = run.small.data, loop.program, run.cfg, environment()
    flops = assemble.flops_for(cfg, 257)
    manifest = rundir.read_manifest(path)
    (own,) = manifest.pop("sessions")
    identity = manifest.pop("run")
    checks.append((f"identity {identity}", len(identity) == 32 and broken(rundir.read_manifest(path), folders.inspect(
        folders.at(path / "checkpoints"))) == ""))
    same(checks, "libraries", [x for x in own.pop("libraries") if not (x["file"] and x["origin"] and len(x["sha256"]) == 64)], [])
    checks.append((f"started {own.get('started')}", own.pop("started")[:2] == "20"))
    source = rundir.source_state()
    same(checks, "session", own, {"from_step": 0, "threads": 2, "machine": machine_class().key, "hardware": here["cpu"],
                                  "environment": here,
                                  "source": dict(source), "program": program.hash(), "gated": True, "evidence": HASH, "not_looked_at": []})
    manifest.pop("sha256")
    convention = "3 x forward; matmuls with head; causal attention counted half"
    components = {**{c: {} for c in program.kernels()}, **EVIDENCE}
    texts = {"train": data.split.train.hash, "validation": data.split.validation.hash}
    streams = {"train": data.train.hash, "validation": data.validation.hash}
    same(checks, "manifest", manifest, {
        "format": 2, "status": "GATED", "folder": os.getcwd(), "config": cfg.identity(), "program": program.hash(),
        "components": components,
        "machine": machine_class().key, "tokenizer": data.tokenizer.hash, "corpus": data.corpus.hash, "split": texts, "streams": streams,
        "flops": {"version": "flops/v1", "convention": convention, "per_token": flops.per_token, "peak": peak[0], "peak_source": peak[2]}})
    facts = dict(table(path, "run_metadata"))
    for name in ("startup", "save_foretold_ns", "sources", "started"):
        checks.append((name, bool(facts.pop(name, ""))))
    bound = rundir.sha256_hex(repr(sorted((k, sorted(v.items())) for k, v in components.items())).encode())
    executed = sum(program.plans[s.plan].flops() for s in program.schedule)
    kernels = {c: rundir.sha256_hex(_file_of(c).read_bytes() + b"[]") for c in program.kernels()}
    same(checks, "kernels", json.loads(facts.pop("kernels")), kernels)
    same(checks, "metadata", facts, {k: str(v) for k, v in {
        "status": "GATED", "name": "contract", "program": program.hash(), "machine": machine_class().key, "hardware": here["cpu"],
        "devices": 1,
        **source, "backend": "cpu", "backend_version": f"NumPy {here['numpy']}, {here['blas']}, Python {here['python']}", "binaries": bound,
        "driver": "none", "tokenizer": data.tokenizer.hash, "corpus": data.corpus.hash, "train_stream": streams["train"],
        "validation_stream": streams["validation"], "flops_version": "flops/v1", "flops_convention": convention,
        "flops_per_token": flops.per_token, "executed_flops": executed, "peak_flops": peak[0], "peak_bandwidth": peak[1],
        "peak_source": peak[2], "threads": 2, "shards": 2, "tokens_per_step": 96, "order2_bits_per_byte": order2, "verify":
        "first step and every 2", "save_bytes": sum(x.stat().st_size for x in (folders.at(path / "checkpoints")).glob("*.state")),
        "checkpoint_every": 2}.items()})


def _file_of(component: str) -> Path:
    """Where the binder of a kernel stands."""
    binder: Any = catalogue()[component].implementation
    while not hasattr(binder, "__code__"):
        binder = binder.func
    return Path(binder.__code__.co_filename)


def went_on(rng: np.random.Generator) -> Measured:
    """Sessions that were asked to stop, or were signalled, went on in the same folder, without leave, past a damaged checkpoint, on what is
    another machine: each says so, the manifest holds them all, the run is UNGATED from the first one that was, and its bits are those of
    one session."""
    checks: Named = []
    with sessions(rng) as run:
        cfg = replace(run.cfg, data=replace(run.cfg.data, prefetch=2, baseline=False),
                      train=replace(run.cfg.train, sample_every=0, verify=0))
        with run.small.loop("alone", cfg) as loop:
            loop.start()
            loop.run()
        first, lines = run.train(cfg, stop=stops(1, 1))
        path = run.root / "runs" / "contract"
        same(checks, "asked to stop", first, session.Outcome(path, 1, False, 1))
        same(checks, "the end of it", [(*x[:3], x[3].get("name", x[3].get("reason"))) for x in events(path) if x[0] in ("signal", "end")],
             [("signal", "warning", 1, "asked to stop"), ("end", "info", 1, "stopped")])
        listens = interrupt.Interrupt(silent=True)
        listens.number = 15
        second, lines = run.train(replace(cfg, run=replace(cfg.run, name="other")), resume=path, interrupt=listens, admit=None)
        same(checks, "signalled", second, session.Outcome(path, 2, False, 15))
        peak = table(path, "run_peak", "flops")[0][0]
        same(checks, "without leave", _apart(lines)[0], [
            *_introduced(run, path, peak, "ungated components were allowed", 1), "saves     ...", "start     ...",
            f"UNGATED step 2/4  loss {table(path, 'step_metrics', 'step, loss')[1][1]:.4f}  N tokens/s  MFU N  T left", ""])
        damaged = folders.at(path / "checkpoints", 2)
        state = next(damaged.glob("*.state"))
        raw = bytearray(state.read_bytes())
        raw[len(raw) // 2] ^= 1
        state.write_bytes(raw)
        with closing(sqlite3.connect(path / "metrics.sqlite")) as db, db:
            db.execute("UPDATE run_metadata SET value = 'another' WHERE key = 'hardware'")
            db.execute("UPDATE run_metadata SET value = '2001-02-03T04:05:06+00:00' WHERE key = 'started'")
        (path / "tokenizer.json").unlink()
        third, lines = run.train(cfg, resume=path, stop=stops(1, 1))
        checks.append(("a tokenizer that was lost", (path / "tokenizer.json").is_file()))
        hardware, text = environment()["cpu"], "\n".join(_apart(lines)[0])
        passed, warned = (x[3]["text"] for x in events(path) if x[0] == "warning")
        same(checks, "past a damaged one", (third.step, passed in text, state.name in passed, text.startswith(
            f"{passed}\ngoing on from step 1, the latest checkpoint that is whole\nUNGATED: a development run (an earlier session of it "
            f"was "
            "UNGATED)")), (2, True, True, True))
        same(checks, "elsewhere", (warned, warned in lines), (
            f"this session runs on {hardware} with 2 threads; MFU stands against the run's one peak, which was taken on another with 2 "
            f"threads", True))
        fourth, lines = run.train(cfg, resume=path, at=1, stop=stops(3, 15))  # after the last step there is nothing to stop
        same(checks, "to its end", (fourth.step, fourth.finished, fourth.baseline, run.bits(path)),
             (4, True, None, run.bits(run.root / "alone")))
        checks.append(("a model that was not asked for", not any("order-2" in x for x in lines) and lines[-1] ==
                       "spot checks   off (train.verify = 0)" and "validating ..." in lines))
        manifest = rundir.read_manifest(path)
        same(checks, "sessions", [(x["from_step"], x["gated"], x["evidence"] == HASH) for x in manifest["sessions"]],
             [(0, True, True), (1, False, False), (1, True, True), (1, True, True)])
        same(checks, "status", (manifest["status"], dict(table(path, "run_metadata"))["started"]), ("UNGATED", "2001-02-03T04:05:06+00:00"))
        same(checks, "in the metrics", table(path, "sessions", "session, first_step, ended, began_ns"), [
            (0, 0, "stopped", 77), (1, 1, "stopped", 77), (2, 1, "stopped", 77), (3, 1, "finished", 77)])
        same(checks, "resumed", [(*x[2:3], x[3]["session"], x[3]["status"]) for x in events(path) if x[0] == "resume"],
             [(1, 1, "UNGATED"), (1, 2, "UNGATED"), (1, 3, "UNGATED")])
        rows = len(table(path, "data_waits"))
        again, lines = run.train(cfg, resume=path)
        same(checks, "at its end already", (again.step, again.finished, again.validation,
                                            [x for x in lines if x.startswith("UNGATED step")]),
             (4, True, fourth.validation, []))
        same(checks, "waits for text", len(table(path, "data_waits")) >= rows - 1 > 2, True)
        file = path / "manifest.json"
        file.write_text(file.read_text().replace('"UNGATED"', '"GATED"'))
        shutil.rmtree(path / "checkpoints")
        anew, _ = run.train(cfg, resume=path)
        manifest = rundir.read_manifest(path)
        same(checks, "an edited manifest", ([x["from_step"] for x in manifest["sessions"]], manifest["status"], rundir.is_sound(manifest)),
             ([0], "UNGATED", True))
        same(checks, "without a checkpoint", (anew.step, run.bits(path)), (4, run.bits(run.root / "alone")))
    return all_hold(checks)


def failed(rng: np.random.Generator) -> Measured:
    """A session that fails says in its log and its metrics how, what it was refused for and where, whatever else fails on the way; the
    error that comes out is the first."""
    checks: Named = []
    with sessions(rng) as run:
        bad, spot = NonFiniteError("step 3\nwas refused", came="inf"), SpotCheckError("a spot check", came="this", expected="that")
        cases = [(bad, [("non-finite", {"what": "step 3\nwas refused", "came": "inf"})], "failed: NonFiniteError: step 3"),
                 (spot, [("spot-check", {"what": "a spot check", "came": "this", "expected": "that"})],
                     "failed: SpotCheckError: a spot check"),
                 (KeyError(), [], "failed: KeyError: "), (OSError("x" * 300), [], f"failed: OSError: {'x' * 300}"[:200])]
        for number, (error, logged, ended) in enumerate(cases, 1):
            with instead(Loop, run=_raises(error)):
                try:
                    run.train()
                    got: object = None
                except BaseException as found:
                    got = found
            path = run.root / "runs" / ("contract" if number == 1 else f"contract-{number}")
            reason = f"failed: {type(error).__name__}: {error}"
            same(checks, f"{number}", (got is error, [(x[0], x[1], x[3]) for x in events(path)[1:]], table(path, "sessions", "ended")), (
                True, [(name, "error", fields) for name, fields in logged] + [("end", "error", {"reason": reason})], [(ended,)]))
        full = MachineError("the disk is full")
        for number, (error, refuses) in enumerate(((bad, ("end",)), (bad, ("end", "mark")), (None, ("end",))), 5):
            say, mark = RankLog.say, session.Store.mark

            def no_end(log: RankLog, event: str, *args: Any, **more: Any) -> None:
                if event in refuses:
                    raise full
                say(log, event, *args, **more)

            def no_mark(store: session.Store, **columns: Any) -> None:
                if "mark" in refuses and str(columns.get("ended", "")).startswith("failed"):
                    raise full
                mark(store, **columns)

            with instead(Loop, run=_raises(error) if error else Loop.run), instead(RankLog, say=no_end), instead(session.Store,
                                                                                                                 mark=no_mark):
                try:
                    run.train(replace(run.cfg, data=replace(run.cfg.data, baseline=False), train=replace(run.cfg.train, steps=1,
                                                                                                         eval_every=0)))
                    got = None
                except BaseException as found:
                    got = found
            ended = table(run.root / "runs" / f"contract-{number}", "sessions", "ended")[0][0]
            same(checks, f"{refuses}", (got is (error or full), ended), (True, {5: "failed: NonFiniteError: step 3", 6: None}.get(number,
                "finished")))
    return all_hold(checks)


def _raises(error: BaseException) -> Any:
    def run(*args: object) -> bool:
        raise error
    return run


def refused(rng: np.random.Generator) -> Measured:
    """A session that would not continue a run bit for bit is refused with what differs, and one whose text is another; what only makes it
    last longer is not. A manifest that was edited tells of no text, and gets another identity."""
    checks: Named = []
    with sessions(rng) as run, rundir.create(run.cfg, run.small.data.tokenizer, "GATED") as held:
        path, data = held.path, run.small.data
        longer = replace(run.cfg, train=replace(run.cfg.train, steps=9), run=replace(run.cfg.run, name="other"))
        same(checks, "lasts longer", session.same_run(longer, path), replace(longer, run=run.cfg.run))
        other = replace(run.cfg, optim=replace(run.cfg.optim, lr=0.5, clip=2.0), train=replace(run.cfg.train, keep=7))
        same(checks, "another run", said(lambda: session.same_run(other, path)), error_text(
            "InputError", "the configuration is not that of the run to resume", "clip = 2.0; keep = 7; lr = 0.5",
            f"as in {path / 'config.toml'}: clip = 1.0; keep = 2; lr = 0.01",
            f"resume with `alpha train {path} --resume`, or start a new run"))
        many = replace(run.cfg, optim=replace(run.cfg.optim, lr=0.5, clip=2.0, eps=0.1, floor=0.5, warmup=1))
        same(checks, "the first four", said(lambda: session.same_run(many, path)).split("\n")[1:3], [
            "  came:     clip = 2.0; eps = 0.1; floor = 0.5; lr = 0.5",
            f"  expected: as in {path / 'config.toml'}: clip = 1.0; eps = 1e-08; floor = 0.1; lr = 0.01"])
        streams = {"train": data.train.hash, "validation": data.validation.hash}
        for side in ("train", "validation"):
            for where in ("", "/elsewhere"):
                held.write_manifest({"run": "one", "status": "GATED", "sessions": [], "streams": {**streams, side: "ab" * 32},
                                     "folder": where})
                same(checks, f"another text of {side}", said(lambda: session.require_same_text(run.cfg, data, path)), error_text(
                    "InputError", "the run read another text before",
                    f"{run.cfg.data.corpus}, read in {Path.cwd()}: {side} {streams[side][:16]}",
                    f"{side} {'ab' * 8}, which {path} read in {where or 'a folder that it did not keep'}",
                    "restore the text as it was (another Python has another standard library), or start a new run"))
                mixed = replace(run.cfg, data=replace(run.cfg.data, mixture="a:1"))
                same(checks, "of a mixture", said(lambda: session.require_same_text(mixed, data, path)).split("\n")[1][:17],
                     "  came:     a:1, ")
        file = path / "manifest.json"
        file.write_text(file.read_text().replace("/elsewhere", "/edited"))
        same(checks, "an edited manifest", said(lambda: session.require_same_text(run.cfg, data, path)), "None")
        for manifest, sound in ((rundir.sealed({"run": "me", "status": "GATED", "sessions": []}), True), ({"run": "me"}, False),
                                ({}, False)):
            seal = session._seal(manifest, "GATED", EVIDENCE)
            same(checks, "identity", (seal.run == "me", len(seal.run) == 32, seal.status, seal.evidence), (sound, not sound, "GATED", HASH))
        held.write_manifest({"run": "one", "status": "GATED", "sessions": [], "streams": streams})
        same(checks, "its own text", said(lambda: session.require_same_text(run.cfg, data, path)), "None")
        mine = [{"libraries": [{"file": "a", "origin": "b", "sha256": "c"}], "gated": True}]
        held.write_manifest({"run": "one", "status": "GATED", "sessions": mine})
        for libraries, writes in ((mine[0]["libraries"], 0), ([{"file": "z", "origin": "b", "sha256": "c"}], 1)):
            wrote = list[object]()
            with instead(provenance.forbidden, libraries=lambda: libraries), instead(rundir.RunDir, write_manifest=lambda own,
                                                                                     x: wrote.append(x)):
                provenance.note_libraries(held)
            same(checks, "libraries that came since", wrote, [{"run": "one", "status": "GATED", "sessions": [
                {"libraries": libraries, "gated": True}]}][:writes])
        for lost in (lambda: held.write_manifest({"run": "one", "sessions": []}), (path / "manifest.json").unlink):
            lost()
            same(checks, "a manifest that is lost", said(lambda: provenance.note_libraries(held)), error_text(
                "CorruptError", "the manifest of a run is gone while it goes on", path / "manifest.json",
                "the sessions that were written there", "restore it, or go on with --resume as it is: that writes another one, and the "
                "run is UNGATED then"))
    return all_hold(checks)
