"""Cases of run directories: made, named, found and read; what their manifests may be; where a run's paths start; which code ran; who goes
on after a loss. Floor 7."""

# mypy: disable-error-code="arg-type,assignment,str-unpack"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha import __version__, config
from alpha.checkpoint import folders
from alpha.component import Measured
from alpha.config import Config
from alpha.data.tokenizer import ByteTokenizer
from alpha.errors import InputError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.gates.contracts.train.made import RUN
from alpha.train import catalogue as catalogues
from alpha.train import components, home, provenance, rundir, seal, supervisor
from alpha.train.launch import Ended

FULL = OSError(errno.ENOSPC, "No space left on device")
NO_ROOM = ("room and permission to write there", "free some space and run again; what was saved before is untouched")
NOT_WRITTEN = ("room and permission to write there", "check the folder")


@contextmanager
def _folder() -> Iterator[tuple[Path, Config]]:
    with tempfile.TemporaryDirectory(prefix="alpha-runs-") as name:
        yield Path(name), config.parse(RUN.format(root=name, threads=1), [f"run.out='{name}/runs'", "run.name='r'"])


def made(rng: np.random.Generator) -> Measured:
    """A run directory stands whole under the first name that is free, or not at all: whatever refuses it, nothing half-made stays and its
    error names what came. The newest of a name is found by its number."""
    checks: Named = []
    with _folder() as (root, cfg):
        runs, tokenizer = root / "runs", ByteTokenizer()
        part = runs / f".alpha-making-r-{os.getpid()}"
        same(checks, "no run", said(lambda: rundir.find(cfg)), error_text(
            "InputError", "there is no run to resume", runs / "r", "a run directory", "start it without --resume"))
        for number in (1, 2, 3):
            with rundir.create(cfg, tokenizer) as held:
                same(checks, f"number {number}", held.path, runs / ("r" if number == 1 else f"r-{number}"))
                same(checks, "its parts", (held.checkpoints, held.logs, held.metrics), (held.path / "checkpoints", held.path / "logs",
                                                                                        held.path / "metrics.sqlite"))
                manifest = rundir.read_manifest(held.path)
                same(checks, "manifest", ({k: v for k, v in manifest.items() if k not in ("run", "sha256")}, len(manifest["run"]),
                                          rundir.is_sound(manifest)), (
                    {"format": 2, "status": "UNGATED", "sessions": [], "folder": os.getcwd()}, 32, True))
        for name, called in (("r-10", "r"), ("r-9", "r"), ("r-x", "r"), ("rr-99", "r"), ("r-11", ""), ("r--12", "r"), ("r-², ", "r"),
                             ("r-13", "r-13"), ("r-1", "r-1")):
            (runs / name).mkdir()
            if called:
                (runs / name / "config.toml").write_text(replace(cfg, run=replace(cfg.run, name=called)).resolved())
        same(checks, "the newest", rundir.find(cfg), runs / "r-10")
        for name in ("r-10", "r-9"):
            shutil.rmtree(runs / name)
        same(checks, "the newest then", rundir.find(cfg), runs / "r-3")

        def tried(**stand_ins: Any) -> str:
            before = sorted(x.name for x in runs.iterdir()), len(os.listdir("/proc/self/fd"))
            with instead(rundir, **stand_ins):
                found = said(lambda: rundir.create(cfg, tokenizer))
            same(checks, "nothing stays, nor is held", (sorted(x.name for x in runs.iterdir()), len(os.listdir("/proc/self/fd"))), before)
            return found

        def no_room(*given: Any) -> None:
            raise FULL

        def unsaved(self: object, path: Path) -> None:
            raise InputError("no tokenizer")

        same(checks, "a full disk", tried(write_atomic=no_room), error_text(
            "MachineError", "the disk is full", f"{part} (No space left on device)", *NO_ROOM))
        with instead(ByteTokenizer, save=unsaved):
            same(checks, "a refused tokenizer", tried(), "InputError: no tokenizer")
        with instead(Path, mkdir=lambda self, **how: no_room() if self == part else os.makedirs(self, exist_ok=True)):
            same(checks, "no folder", tried(), error_text("MachineError", "the disk is full", f"{part} (No space left on device)",
                                                          *NO_ROOM))
        names, real = list[str](), os.rename

        def taken(number: int, meanwhile: int, source: Path, target: Path) -> None:
            names.append(Path(target).name)
            if len(names) <= meanwhile:
                raise OSError(number, "no")
            real(source, target)

        for number in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            names.clear()
            with instead(rundir.os, rename=partial(taken, number, 2)), instead(rundir.os.path, lexists=lambda path: os.access(path,
                                                                                                                              os.F_OK)):
                with rundir.create(replace(cfg, run=replace(cfg.run, name=f"t{number}")), tokenizer) as held:
                    same(checks, "taken meanwhile", (names, held.path.name), ([f"t{number}", f"t{number}-2", f"t{number}-3"],
                                                                              f"t{number}-3"))
        names.clear()
        with instead(rundir.os, rename=partial(taken, errno.EIO, 9)):
            same(checks, "cannot be renamed", tried(), error_text("MachineError", "the file cannot be written", f"{part} (no)",
                                                                  *NOT_WRITTEN))
        with instead(rundir, range=lambda first, last: builtins.range(first, 4) if (first, last) == (1, 1_000_000) else ()):
            same(checks, "no name is left", tried(), error_text(
                "InputError", "too many runs of this name", runs / "r", do="choose another run.name"))
        (root / "file").write_text("")
        out = replace(cfg, run=replace(cfg.run, out=str(root / "file")))
        same(checks, "no folder of runs", said(lambda: rundir.create(out, tokenizer)), error_text(
            "InputError", "run.out is not a folder", root / "file", "a folder", "change run.out"))
        part.mkdir()
        same(checks, "its own half-made one", said(lambda: rundir.create(cfg, tokenizer)), error_text(
            "MachineError", "the file cannot be written", f"{part} (File exists)", *NOT_WRITTEN))
        same(checks, "no such folder", said(lambda: rundir.RunDir(root / "none")), error_text(
            "MachineError", "the file cannot be written", f"{root}/none/.lock (No such file or directory)", *NOT_WRITTEN))
        with rundir.create(cfg, tokenizer) as held:
            locked = held.path / ".lock"
        locked.unlink()
        locked.mkdir()
        same(checks, "what cannot be locked", said(lambda: rundir.RunDir(locked.parent)), error_text(
            "MachineError", "the file cannot be written", f"{locked} (Is a directory)", *NOT_WRITTEN))
        locked.rmdir()
        with rundir.RunDir(locked.parent) as held:  # this process had let go of it
            same(checks, "what can be locked again", held.path, locked.parent)
        mine = f"{os.getpid()}\n"
        for before in ("", "1", mine, f"{mine}9\n", f"{2**22}{mine}", "123456789012\n", "9" * 300, "one\ntwo\n" * 9):
            locked.write_text(before)
            with rundir.RunDir(locked.parent) as held:  # numbers of processes begin anew: the one before may have been longer
                same(checks, f"it names its holder behind {before[:20]!r}", locked.read_text(), mine)
                same(checks, "whom it is busy with", said(lambda: rundir.RunDir(held.path)), error_text(
                    "BusyError", "another process trains in this run directory", f"{held.path} (process {os.getpid()})",
                    "one process at a time", "wait for it, stop it, or give this run another name with --set run.name=..."))
                locked.unlink()
                locked.write_text(before)
                held.check()
                same(checks, f"it is taken again behind {before[:20]!r}", locked.read_text(), mine)
        with rundir.create(cfg, tokenizer) as held:
            config_file = held.path / "config.toml"
            inode = config_file.stat().st_ino
            held.write_config(cfg)
            same(checks, "the same configuration", config_file.stat().st_ino, inode)
            longer = replace(cfg, train=replace(cfg.train, steps=77))
            held.write_config(longer)
            same(checks, "another one", rundir.read_config(held.path), longer)
            file = held.path / "tokenizer.json"
            raw, inode = file.read_bytes(), file.stat().st_ino
            held.keep_tokenizer(tokenizer)
            same(checks, "its tokenizer", (file.read_bytes(), file.stat().st_ino), (raw, inode))
            file.unlink()
            held.keep_tokenizer(tokenizer)
            same(checks, "a tokenizer that was lost", file.read_bytes(), raw)
            path = held.path
            os.rename(path, root / "moved")
            same(checks, "its folder is gone", said(held.check), error_text(
                "MachineError", "the file cannot be written", f"{path}/.lock (No such file or directory)", *NOT_WRITTEN))
    return all_hold(checks)


def manifests(rng: np.random.Generator) -> Measured:
    """What a folder says that is no run, or whose manifest is torn, or of other types than a run writes: each by its words; a run that was
    killed before it had one has none; one without a seal, or whose checkpoints cannot be read, is not GATED, and says why."""
    checks: Named = []
    with _folder() as (root, cfg):
        with rundir.create(cfg, ByteTokenizer(), "GATED") as held:
            path = held.path
        file = path / "manifest.json"
        same(checks, "gated", seal.why_ungated(path), "")
        sound = {"status": "x", "sessions": [{"source": {}}, {}], "flops": {}, "folder": "", "targets": {"mfu": 0.4, "hfu": 1}}
        for text, what, came in (
                ("{", "the manifest of a run is damaged", None), ('{"a": NaN}', "the manifest of a run is damaged", "NaN is no JSON"),
                ("[]", "the manifest of a run is no JSON object", ""), ("3", "the manifest of a run is no JSON object", ""),
                (json.dumps({**sound, "sessions": 3}), "", "sessions = 3"), (json.dumps({**sound, "sessions": [3]}), "", "sessions = [3]"),
                (json.dumps({**sound, "sessions": [{"source": 1}]}), "", "sessions = [{'source': 1}]"),
                (json.dumps({**sound, "flops": []}), "", "flops = []"),
                *((json.dumps({**sound, "targets": x}), "", f"targets = {x}") for x in ([1], 3, {"mfu": "x"}, {"mfu": True}, {"mfu": None},
                                                                                        {"a": 1, "mfu": [1]}, {"mfu": 10**400})),
                (json.dumps({**sound, "targets": {}}).replace("{}}", '{"mfu": 1e999}}'), "", "targets = {'mfu': inf}"),
                (json.dumps({**sound, "status": 3}), "", "status = 3"), (json.dumps({**sound, "folder": None}), "", "folder = None"),
                (json.dumps(sound), None, None), ("{}", None, None)):
            file.write_text(text)
            found = said(lambda: rundir.read_manifest(path))
            if what is None:
                same(checks, text, found, f"{json.loads(text)}")
            elif what == "the manifest of a run is damaged":
                checks.append((found, found.startswith(f"CorruptError: {what}\n  came:     {file}: ")
                               and found.endswith("  expected: a JSON object\n  do:       restore it")
                               and (came or "") in found))
            else:
                same(checks, text, found, error_text("CorruptError", what, file, do="restore it") if what else error_text(
                    "CorruptError", "the manifest of a run is not one that a run writes", f"{file}: {came}",
                    "tables where a run writes tables", "restore it"))
                same(checks, f"{text}: why", seal.why_ungated(path),
                     f"it cannot be read: {found.splitlines()[0].removeprefix('CorruptError: ')}")
        file.unlink()
        (path / "checkpoints" / "step-00000001").mkdir(parents=True)
        same(checks, "none", (rundir.read_manifest(path), seal.why_ungated(path)), ({}, "its manifest is missing"))
        with instead(folders, steps=_refuses):
            same(checks, "the disk", seal.why_ungated(path), "it cannot be read: [Errno 5] refused")
        same(checks, "a run", [rundir.is_run(x) for x in (path, root, path.with_name(".alpha-making-r"))], [True, False, False])
        (root / ".alpha-making-x").mkdir()
        (root / ".alpha-making-x" / "config.toml").write_text("")
        same(checks, "half-made", rundir.is_run(root / ".alpha-making-x"), False)
        same(checks, "no run", said(lambda: rundir.read_config(root)), error_text(
            "InputError", "this is not a run directory", root, "a folder with config.toml, such as runs/demo",
            "give the folder that `alpha train` printed"))
        same(checks, "read", (rundir.read_config(path), rundir.read_tokenizer(path).hash), (cfg, ByteTokenizer().hash))
    return all_hold(checks)


def _refuses(*given: object) -> Any:
    raise OSError(errno.EIO, "refused")


def homes(rng: np.random.Generator) -> Measured:
    """Where a run's paths start: here where its manifest names no folder, or this one; in its folder where all is that it reads, of a
    model of Hugging Face too; the standard library lies nowhere, and a folder that cannot be looked into has nothing."""
    checks: Named = []
    here = Path.cwd()
    with _folder() as (root, cfg):
        there, run = root / "there", root / "run"
        (there / "texts").mkdir(parents=True)
        (there / "model").mkdir()
        run.mkdir()
        plain = replace(cfg, data=replace(cfg.data, corpus="stdlib", tokenizer="bytes"))

        def of(wanted: Config, folder: object) -> str:
            with instead(home, rundir=SimpleNamespace(read_manifest=lambda path: {} if folder is None else {"folder": folder})):
                try:
                    with home.at_home(wanted, run) as found:
                        return f"{Path.cwd()} {found}"
                except InputError as error:
                    return f"{error}"

        text = replace(plain, data=replace(plain.data, corpus="texts"))
        begun = replace(text, train=replace(plain.train, start_from="hf:model"))
        gone = root / "gone"
        for name, wanted, folder, expected in (
                ("no folder", text, None, f"{here} {run}"), ("relative", text, "there", f"{here} {run}"),
                ("this one", text, str(here), f"{here} {run}"),
                ("its own", text, str(there), f"{there} {run.resolve()}"), ("a model", begun, str(there), f"{there} {run.resolve()}"),
                ("the library alone", plain, str(there), f"{there} {run.resolve()}"), ("gone", plain, str(gone), f"{here} {run}")):
            same(checks, name, of(wanted, folder), expected)
        (there / "model").rmdir()
        lost = replace(begun, data=replace(begun.data, tokenizer="bpe", tokenizer_file="t.json"))
        same(checks, "nowhere", "InputError: " + of(lost, str(there)), error_text(
            "InputError", "what the run reads is gone", f"{there} has no t.json, no model; {here} has no texts, no t.json, no model",
            f"all of it in {there}, where the run's last session ran, or here", "restore it in one of these folders, or link it there"))
        same(checks, "no such folder", of(text, str(gone)).splitlines()[1], f"  came:     {gone} has no such folder; {here} has no texts")
        with instead(home.os, access=lambda path, how: how == os.R_OK):
            same(checks, "looked into", home._lacking(text, there, run), ["such folder"])
    same(checks, "still here", Path.cwd(), here)
    return all_hold(checks)


def sources(rng: np.random.Generator) -> Measured:
    """Which code ran: commit and difference as git tells them, 'unknown' where it does not; which kernels, by their files and what they
    load; which driver; and what is told of a sampler that reads no stream."""
    checks: Named = []
    commit, difference = "ab" * 20, rng.bytes(50)

    def git(answers: dict[str, Any]) -> Any:
        def run(command: list[str], **how: Any) -> SimpleNamespace:
            asked.append((command[0:1] + command[3:], how))
            answer = answers[command[3]]
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(returncode=answer[0], stdout=answer[1])
        return SimpleNamespace(run=run, SubprocessError=subprocess.SubprocessError)

    unknown = {"commit": "unknown", "dirty": "unknown", "version": __version__}
    for there, answers, expected in (
            (True, {"rev-parse": (0, commit.encode() + b"\n"), "diff": (0, difference)}, {"commit": commit,
                                                                                          "dirty": hashlib.sha256(difference).hexdigest()}),
            (True, {"rev-parse": (0, commit.encode()), "diff": (0, b"")}, {"commit": commit, "dirty": ""}),
            (True, {"rev-parse": (0, commit.encode()), "diff": (1, b"x")}, {"commit": commit, "dirty": "unknown"}),
            (True, {"rev-parse": (128, b""), "diff": (0, b"")}, unknown), (True, {"rev-parse": OSError(), "diff": (0, b"")}, unknown),
            (True, {"rev-parse": (0, b"c"), "diff": subprocess.TimeoutExpired("git", 1)}, {"commit": "c", "dirty": "unknown"}),
            (False, {}, unknown)):
        asked = list[Any]()
        rundir.source_state.cache_clear()
        with instead(rundir, subprocess=git(answers)), instead(Path, exists=lambda self: there and self.name == ".git"):
            same(checks, f"{there} {answers}"[:80], rundir.source_state(), {**expected, "version": __version__})
            again = len(asked)
            rundir.source_state()
            same(checks, "asked once", len(asked), again)
        if there and "diff" in answers and len(asked) == 2:
            how = {"capture_output": True, "check": False, "timeout": 30}
            same(checks, "asked", asked, [(["git", "rev-parse", "HEAD"], how), (["git", "diff", "HEAD", "--binary", "--no-ext-diff"], how)])
    rundir.source_state.cache_clear()
    here = Path(__file__).read_bytes()
    kernels = {"plain": SimpleNamespace(implementation=_refuses, binaries=None), "bound": SimpleNamespace(
        implementation=partial(partial(_refuses, 1), 2), binaries=lambda: {"b": "2", "a": "1"})}
    found = provenance.kernel_hashes(SimpleNamespace(kernels=lambda: list(kernels)), kernels)
    same(checks, "kernels", found, {"plain": hashlib.sha256(here + b"[]").hexdigest(),
                                    "bound": hashlib.sha256(here + b"[('a', '1'), ('b', '2')]").hexdigest()})
    with tempfile.TemporaryDirectory(prefix="alpha-driver-") as name:
        release = Path(name) / "version"
        for text, backend, driver in (("NVRM version: NVIDIA 580.95.05  Release\nGCC 13.2.0", "cuda", "580.95.05"),
                                      ("driver 550.54 x", "cuda", "550.54"),
                                      ("none", "cuda", "13.0"), (None, "cuda", "13.0"), ("580.95.05", "cpu", "none")):
            release.unlink(missing_ok=True)
            if text:
                release.write_text(text)
            executor = SimpleNamespace(program=SimpleNamespace(facts={"backend": backend}), hardware=lambda: {"version": "13.0"})
            same(checks, f"{text}", provenance.driver_of(executor, release), driver)
    cfg, told = config.parse(RUN.format(root="/x", threads=1), ["model.window=3"]), list[Any]()
    mixed = replace(cfg, data=replace(cfg.data, corpus="stdlib", mixture="a:2, b:1"))

    class Own:
        """A sampler of one stream."""

    class Mixed:
        """One of several."""

        def __init__(self, *samplers: object) -> None:
            self.samplers = samplers

    with instead(provenance, PermutedSampler=Own, MixedSampler=Mixed, waste=lambda own: {"padding": 1}, attention=lambda own, window,
                 documents: {"window": window, "documents": documents}):
        for sampler, asked_of, expected in ((Own(), cfg, [("/x/text", 1)]), (Mixed(Own(), Own()), mixed, [("a", 2), ("b", 1)]),
                                            (object(), cfg, []),
                                            (Mixed(object(), Own()), mixed, [("b", 1)])):
            told.clear()
            provenance.tell_sources(SimpleNamespace(describe=told.append), asked_of, sampler)
            same(checks, "sources", json.loads(told[0]["sources"]), [{"source": name, "weight": weight, "padding": 1, "window": 3,
                                                                      "documents": False}
                                                                     for name, weight in expected])
    return all_hold(checks)


def listed(rng: np.random.Generator) -> Measured:
    """The catalogue: a file that is broken stops everything by its name; executors of GPUs bind the marks and spot checks that they load;
    what goes between hosts rests on three parts; a job that lost a rank goes on where it can, and says from where."""
    checks: Named = []
    broken = SimpleNamespace(broken={"a.b": "why", "c": "not"})
    with instead(catalogues, loadable_catalogue=lambda: broken):
        same(checks, "broken", said(catalogues.catalogue), error_text(
            "CorruptError", "a file of kernels cannot be loaded", "a.b: why; c: not", "Python that can be imported",
            "mend the file; `alpha doctor` lists what else is missing"))
    whole = catalogues.catalogue()
    for name in ("executor.cuda", "executor.cuda_ranks"):
        binaries: Any = whole[name].binaries
        same(checks, name, tuple(binaries._sources()), (catalogues.mark.SOURCE, catalogues.spot.SOURCE))
    same(checks, "between hosts", components.across_hosts(), (components.meet, components.Bridge, components.Streams))
    several = {c.id for c in whole if c.backend == "cuda" and "gpus>=2" in c.requires and c.kind == "kernel"}
    for name, more in (("executor.cpu", set()), ("executor.cuda", set()), ("executor.cuda_ranks", several)):
        launches: Any = whole[name].launches
        found = {k.id for k in launches()}
        backend = "cpu" if name.endswith("cpu") else "cuda"
        wanted = {c.id for c in whole if c.kind == "kernel" and c.backend == backend and c.id not in several} | more
        same(checks, f"launched by {name}", {x for x in found ^ wanted if whole[x].kind == "kernel"}, set())
    for told, reached, at, whence in (({}, None, None, "from the beginning"), ({"path": "runs/r"}, 7, 7, "from the checkpoint of step 7")):
        starts, said_, pauses = list[Any](), list[str](), list[float]()

        def start(ranks: int, number: int, resume: Path | None, step: int | None) -> Ended:
            starts.append((ranks, number, resume, step))
            return Ended(1, "rank 1 died", number < 1, "account", told)

        with instead(supervisor, last_good=lambda run: reached):
            supervisor.supervise(start, 4, restarts=2, fewest=2, resume=None, at=None, report=said_.append, sleep=pauses.append)
        run = Path("runs/r") if told else None
        same(checks, whence, (starts, pauses, said_), ([(4, 0, None, None), (4, 1, run, at)], [1.0], [
            f"rank 1 died\naccount\nstart 1 of 2, {whence}, with 4 ranks, in 1 s"]))
    return all_hold(checks)
