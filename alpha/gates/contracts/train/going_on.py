"""Cases of going on: from any checkpoint of this run alone, to the same bits, under its seal, from wherever it is called. Floor 7."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.checkpoint import folders
from alpha.component import Measured
from alpha.config import Config
from alpha.errors import AlphaError, BusyError, CorruptError, InputError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, instead, same
from alpha.gates.contracts.train.made import OnDevice, bits_of, does_raise, refuses_to_resume, small_run
from alpha.profile import store
from alpha.profile.store import read
from alpha.train import assemble, rundir
from alpha.train.home import at_home
from alpha.train.loop import Watch
from alpha.train.seal import Seal, broken, evidence_hash, why_ungated

STATE = "rank-00000-of-00001.state"
"""What one process writes of a checkpoint's state."""


def resumed(rng: np.random.Generator) -> Measured:
    """Stopped after any step and resumed in a fresh executor: the same bits and the same rows as without."""
    checks = []
    with small_run(rng) as run:
        with run.loop("whole") as loop:
            loop.start()
            loop.run()
            expected = bits_of(loop)
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
                checks.append((f"{name}: other bits", bits_of(loop) == expected))
            checks.append((f"{name}: other rows", run.rows(name) == run.rows("whole")))
        with run.loop("stop4") as loop:
            verdicts, alone = [False], loop.ranks.all
            loop.ranks.all = lambda holds: alone(holds) and (verdicts.pop() if verdicts else True)  # type: ignore[method-assign]
            loop.resume()
            checks.append(("a checkpoint that another rank found damaged", loop.step == 4 and len(loop.passed) == 1))
        with run.loop("stop4") as loop:
            loop.resume(4)
            checks.append(("an earlier checkpoint", loop.step == 4 and loop.run() and bits_of(loop) == expected))
    return all_hold(checks)


def killed(rng: np.random.Generator) -> Measured:
    """Steps that a checkpoint is behind do not run again: what was measured of them is in the file before anything of it is in the folder,
    the last and profiled ones whole too. They are told once; the interval that was open grows, until it closes."""
    return _killed(rng, CpuExecutor)


def killed_beside(rng: np.random.Generator) -> Measured:
    """The same on a device, whose state is copied beside steps."""
    return _killed(rng, OnDevice)


def _killed(rng: np.random.Generator, kind: type[CpuExecutor]) -> Measured:
    checks: Named = []
    with small_run(rng) as run:
        file, begin, stood = run.root / "a" / "m.sqlite", folders.begin, dict[int, dict[str, list[Any]]]()

        def tables() -> dict[str, list[Any]]:
            return {"timing": sorted(read(file, "step_timing", "step, step_ns, wall_ns, launches, profiled")),
                    "ops": sorted(read(file, "op_profile", "step, plan, launch, count, device_ns")),
                    "events": sorted(read(file, "gpu_timeline", "step, track, name, start_ns, stop_ns")),
                    "steps": sorted(read(file, "step_metrics", "step, loss"))}

        def begun(folder: Path, step: int, **more: Any) -> Path:
            stood[step] = tables()
            return begin(folder, step, **more)

        with instead(folders, begin=begun), instead(store, EVERY=60.0), run.loop("a", kind=kind) as loop:  # nothing is written unasked
            loop.cfg = replace(loop.cfg, train=replace(loop.cfg.train, eval_every=0))
            loop.start()
            loop.run()
            loop.recorder.finish()
            loop.metrics.flush()
            last = tables()
        same(checks, "saves", list(stood), [2, 4, 5])
        same(checks, "profiled", [x[0] for x in last["timing"] if x[4]], [3, 4])
        for step, found in stood.items():
            done = {name: [x for x in rows if x[0] < step] for name, rows in found.items()}
            for name, rows in done.items():
                want = range(3 if name in ("ops", "events") else 0, step)
                same(checks, f"{name} at {step}", sorted({x[0] for x in rows}), [*want])
                checks.append((f"other {name} at {step}", name == "timing" or [x for x in last[name] if x in {*rows}] == rows))
            wrong = [(a, b) for a, b in zip(done["timing"], last["timing"])
                     if a[:2] + a[3:] != b[:2] + b[3:] or not 0 < a[1] <= a[2] <= b[2]]
            same(checks, f"other times at {step}", wrong, [])
    return all_hold(checks)


def taken_back(rng: np.random.Generator) -> Measured:
    """A run that is taken back to an earlier checkpoint: later ones are set aside, rows of later steps are gone, and it goes on to the same
    bits. One that is started anew begins where a fresh one does."""
    checks = []
    with small_run(rng) as run, run.loop("a", run.config(2, "train.keep=9")) as loop:
        loop.start()
        fresh = bits_of(loop)
        loop.run()
        expected, rows = bits_of(loop), run.rows("a")
        loop.resume(2)
        checks.append(("later checkpoints stand", folders.steps(loop.checkpoints) == [2]))
        loop.metrics.flush()
        checks.append(("rows of later steps stand", run.rows("a") == rows[:2]))
        checks.append(("other bits", loop.run() and bits_of(loop) == expected and run.rows("a") == rows))
        loop.start()
        checks.append(("started anew elsewhere", bits_of(loop) == fresh))
        facts = loop.facts()
        loop.facts = lambda: {**facts, "sampler": {**facts["sampler"], "next_step": 1}}  # type: ignore[method-assign]
        loop.checkpoints = loop.saver.folder = run.root / "b"
        loop.save()
        checks.append(("a checkpoint that continues with other text", does_raise(loop.resume, CorruptError)))
    return all_hold(checks)


def left_over(rng: np.random.Generator) -> Measured:
    """Checkpoints that a save was killed before dropping are dropped where the run goes on from it or from an earlier one, also behind the
    last step, where no save follows."""
    checks = []
    with small_run(rng) as run:
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
    return all_hold(checks)


def lasts_longer(rng: np.random.Generator) -> Measured:
    """A run goes on for another number of steps from where both had the same rates, with the bits of one that was meant to last so long;
    from behind it is refused, with the step that may be gone on from, however little the rates differ there."""
    checks, nearly = [], "optim.floor=0.99999"
    wsd = ("optim.schedule=wsd", "optim.decay=2", "train.keep=9", "train.checkpoint_every=1")
    with small_run(rng) as run:
        with run.loop("whole", run.config(2, *wsd, "train.steps=9")) as loop:
            loop.start()
            loop.run()
            expected, rows = bits_of(loop), run.rows("whole")
        for name, more in (("a", wsd), ("cosine", (nearly, "train.keep=9", "train.checkpoint_every=1"))):
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
        flat = ("optim.schedule=wsd", "optim.decay=0", "optim.floor=1.0", *wsd[2:])  # the same rates, and fewer of them
        with run.loop("flat", run.config(2, *flat)) as loop:
            loop.start()
            loop.run()
        with run.loop("flat", run.config(2, *flat, "train.steps=3")) as loop:
            checks.append(("a run of 3 steps went on from step 5", does_raise(lambda: loop.resume(5), InputError)))
        with run.loop("cosine", run.config(2, nearly, *wsd[2:], "train.steps=9")) as loop:
            checks.append(("a cosine was made longer", does_raise(lambda: loop.resume(5), InputError)))
        with run.loop("a", run.config(2, *wsd, "train.steps=9")) as loop:
            loop.resume(4)
            checks.append(("other bits than the long run", loop.run() and bits_of(loop) == expected and run.rows("a") == rows))
        with run.loop("a", run.config(2, *wsd)) as loop:
            loop.resume(4)  # saved by the short run, kept by the long one
            checks.append(("the short run does not go on", loop.run() and loop.step == 5))
    return all_hold(checks)


def not_this_run(rng: np.random.Generator) -> Measured:
    """A checkpoint of another configuration or of other text is not continued; one that is damaged is, from the one before it."""
    checks = []
    with small_run(rng) as run:
        with run.loop("a") as loop:
            checks.append(("resumed from nothing", refuses_to_resume(loop, InputError)))
            loop.start()
            states = {kind: (layout, flat.copy()) for kind, (layout, flat) in loop.snapshot().items()}
            states["counter"][1][...] = 1 + int(rng.integers(9))
            odd = folders.save(loop.checkpoints, 0, states, loop.facts())
            checks.append(("resumed with a counter of another step", does_raise(loop.resume, CorruptError)))
            shutil.rmtree(odd)
            loop.start()
            loop.run()
            last, expected = folders.at(loop.checkpoints), bits_of(loop)
        for override in ("run.seed=2", "optim.weight_decay=0.2", "train.steps=6"):
            with run.loop("a", run.config(2, override)) as loop:
                checks.append((f"resumed with {override}", refuses_to_resume(loop, InputError)))
        changed = run.root / "text" / run.data.split.train.documents[0].relpath
        changed.write_bytes(b"another text, which moves every window behind it")
        with run.loop("a", data=assemble.open_data(run.cfg)) as loop:
            checks.append(("resumed on other text", refuses_to_resume(loop, InputError)))
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
            checks.append(("other bits afterwards", loop.run() and bits_of(loop) == expected))
            for step in (4, 5):
                file = folders.at(loop.checkpoints, step) / STATE
                file.write_bytes(file.read_bytes()[:-1])
        with run.loop("a") as loop:
            try:
                loop.resume()
                checks.append(("resumed where nothing is whole", False))
            except CorruptError as error:  # of the one that it would have gone on from
                checks.append((f"told of another: {error.what}", folders.at(loop.checkpoints, 5).name in str(error)))
    return all_hold(checks)


def sealed(rng: np.random.Generator) -> Measured:
    """A run is GATED only where its manifest and the checkpoint that it goes on from are sound and agree; anything lost, mixed up or
    edited makes it UNGATED."""
    checks = []
    with small_run(rng) as run:
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
    return all_hold(checks)


def run_directory(rng: np.random.Generator) -> Measured:
    """Made whole and forced to the medium, held by one process whatever becomes of `.lock`, left alone by one that lost it."""
    checks = []
    with small_run(rng) as run:
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
    return all_hold(checks)


def from_any_folder(rng: np.random.Generator) -> Measured:
    """A session works in the folder of the one before, where all is that it reads; else where it was called; else it ends."""
    checks, before = [], Path.cwd()
    with small_run(rng) as run:
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
            marked = replace(cfg, data=replace(cfg.data, corpus="text[1]"))
            (here / "text[1]").mkdir()
            checks.append(("a text with the marks of a pattern", of(marked) == "here"))
            checks.append(("half of a mixture", of(both) == "/home has no more; /call/here has no more"))
            checks.append(("no tokenizer", of(filed) == "/home has no tokenizers/t.json; /call/here has no tokenizers/t.json"))
            checks.append(("no beginning", of(started) == "/home has no runs/first; /call/here has no runs/first"))
            (path / "checkpoints" / "step-00000001").mkdir(parents=True)
            checks.append(("a beginning that is no more needed", of(started) == "home"))
        finally:
            os.chdir(before)
    return all_hold(checks)


def _busy(action: Callable[[], object]) -> bool:
    """Whether `action` ends in a BusyError."""
    try:
        action()
    except AlphaError as error:
        return type(error) is BusyError
    return False
