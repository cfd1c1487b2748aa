"""The folder that a run's relative paths start from: the one in which its last session ran. Floor 6.

`data.corpus`, `data.mixture`, `data.tokenizer_file`, `data.cache` and `train.start_from` stay as they were written, for a run's identity
follows what is read and not where it lies. So a session that goes on works in the folder of the one before; where that folder, or what the
run reads, is gone, in the folder in which it was called, if all of it is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alpha.checkpoint import folders
from alpha.config import Config
from alpha.data.walk import path_and_pattern
from alpha.errors import InputError
from alpha.train import rundir
from alpha.train.assemble import sources_read, tokenizer_file_of
from alpha.train.hub import PREFIX, at_step


@contextmanager
def at_home(cfg: Config, run: Path) -> Iterator[Path]:
    """Work in the folder that the paths of the run in `run` start from; yields `run` as it is called there. Change it in one thread alone.

    InputError naming both folders where neither has all that the run reads; CorruptError for a damaged manifest.
    """
    here, home = Path.cwd(), Path(str(rundir.read_manifest(run).get("folder", "")))
    if not home.is_absolute() or home == here:
        yield run
        return
    lacking = {folder: _lacking(cfg, folder, run) for folder in (home, here)}
    found = next((folder for folder, lacks in lacking.items() if not lacks), None)
    if found is None:
        raise InputError("what the run reads is gone", came="; ".join(f"{folder} has no {', no '.join(lacks)}" for folder, lacks in
                         lacking.items()), expected=f"all of it in {home}, where the run's last session ran, or here",
                         do="restore it in one of these folders, or link it there")  # fmt: skip
    if found == here:
        yield run
        return
    run = run.resolve()
    os.chdir(found)
    try:
        yield run
    finally:
        os.chdir(here)


def _lacking(cfg: Config, folder: Path, run: Path) -> list[str]:
    """What a session of this run reads and does not find from `folder`, or the folder itself."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return ["such folder"]
    paths = [_outside_globs(name, folder) for name in sources_read(cfg) if name != "stdlib"]
    paths += [file] if (file := tokenizer_file_of(cfg)) else []
    if cfg.train.start_from and not folders.steps(run / "checkpoints"):  # a run that has a checkpoint begins from nothing else
        start = cfg.train.start_from
        paths += [Path(start.removeprefix(PREFIX)) if start.startswith(PREFIX) else at_step(start)[0]]
    return [str(path) for path in paths if not (folder / path).exists()]


def _outside_globs(source: str, folder: Path) -> Path:
    """The part of a corpus's path that is no pattern: all of it where the path exists, in `folder` or here."""
    return max((path_and_pattern(source, start)[0] for start in (folder, Path())), key=lambda path: len(path.parts))
