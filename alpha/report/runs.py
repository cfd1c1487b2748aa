"""A run directory, read and checked: metadata, manifest and one frame a table. Floor 7.

`load` looks at every stored row before anything is computed from it: times that are negative or run backwards, phases that exceed the wall
time and rows out of order are a CorruptError that names the row, never a wrong number. All tables are read in one transaction, so a run
that is being written is seen at one moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alpha.errors import CorruptError, InputError, visible
from alpha.report.check import check, check_sums, clock_error
from alpha.report.extra import pandas as pd
from alpha.report.tables import KEYS, VERSION_1, Reader, frame
from alpha.tomlfile import read_toml
from alpha.train import rundir
from alpha.train.seal import why_ungated

NO_TIMING_V1 = "metrics of schema 1 hold neither timing nor profile: loss curves only"
NO_STEPS = "the run holds no finished step yet"


@dataclass
class Run:
    """One run. Frames have the columns of alpha.profile.schema, sorted by key; those that schema 1 lacks are empty.

    `notes`: what a reader should know (rows missing, a clock that was set back). `config`: tables of config.toml.
    """

    path: Path
    version: int
    config: dict[str, Any]
    manifest: dict[str, Any]
    metadata: dict[str, str]
    tables: dict[str, pd.DataFrame]
    unsealed: str = ""
    """Why its files do not show it to be GATED; see alpha.train.seal."""
    notes: list[str] = field(default_factory=list)
    alias: str = ""
    """What pages call it where two runs have one name; see `distinct`."""
    cache: dict[str, Any] = field(default_factory=dict, repr=False)
    """What was computed from the tables once and is asked for again."""

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.path.resolve().name

    @property
    def ungated(self) -> bool:
        """Whether the run is not soundly gated: a development run, or one whose manifest, checkpoints and metrics do not all say so."""
        return bool(self.unsealed) or self.metadata.get("status") != rundir.GATED

    @property
    def mark(self) -> str:
        """UNGATED, or nothing; stands on every plot and table."""
        return rundir.UNGATED if self.ungated else ""

    @property
    def label(self) -> str:
        """What pages call it, with the mark."""
        return f"{self.shown} [{self.mark}]" if self.mark else self.shown

    @property
    def shown(self) -> str:
        """What pages call it: fit to be shown, whatever the folder is called."""
        return visible(self.alias or self.name)

    @property
    def why_untimed(self) -> str:
        """Why there is no timing; empty when there is."""
        if self.version < 2:
            return NO_TIMING_V1
        return "" if len(self.tables["step_timing"]) else NO_STEPS

    @property
    def flops_model(self) -> tuple[str, str]:
        """(version, convention); two runs share an axis of MFU only if they agree on it."""
        flops = self.manifest.get("flops", {})
        return (self.metadata.get("flops_version") or str(flops.get("version", "unknown")),
                self.metadata.get("flops_convention") or str(flops.get("convention", "unknown")))

    def __getattr__(self, name: str) -> pd.DataFrame:
        """`run.step_timing` is `run.tables['step_timing']`."""
        tables = self.__dict__.get("tables", {})
        if name in tables:
            return tables[name]
        raise AttributeError(name)

    def number(self, key: str) -> float | None:
        """A number of the metadata; None if it is not there or not positive. CorruptError if it is no number."""
        text = self.metadata.get(key)
        if text is None or text == "":
            return None
        try:
            value = float(text)
        except ValueError:
            raise CorruptError("a number of the metadata is none", came=f"{self.path}: {key} = {text!r}", expected="a number",
                               do="restore the run directory") from None
        return value if 0 < value < float("inf") else None

    def provenance(self) -> dict[str, Any]:
        """What stands beside every figure of this run."""
        sources = [s.get("source", {}) for s in self.manifest.get("sessions", [])]
        commits = list(dict.fromkeys(_commit(s) for s in sources)) or [_commit(self.metadata)]
        version, convention = self.flops_model
        return {
            "run": self.shown, "status": self.mark or "GATED", "commit": ", ".join(commits),
            "hardware": self.metadata.get("hardware") or self.metadata.get("machine", "unknown"),
            "devices": self.number("devices"), "threads": self.number("threads"),
            "backend": self.metadata.get("backend_version") or self.metadata.get("backend", "unknown"),
            "flops_model": version, "convention": convention, "peak_flops": self.number("peak_flops"),
            "peak_bandwidth": self.number("peak_bandwidth"), "peak_source": self.metadata.get("peak_source", "unknown"),
            "program": self.metadata.get("program", "unknown")[:16], "schema": self.version,
        }  # fmt: skip

    def timeline(self, step: int, rank: int = 0) -> pd.DataFrame:
        """Events of one profiled step (gpu_timeline), by start. Empty if it has none."""
        columns = ["track", "name", "category", "start_ns", "stop_ns", "flow"]
        if self.version < 2:
            return pd.DataFrame(columns=columns)
        with Reader(self.path / "metrics.sqlite", 5.0) as db:
            rows = db.rows(f"SELECT {', '.join(columns)} FROM gpu_timeline WHERE step = ? AND rank = ? ORDER BY start_ns", (step, rank))
        frame = pd.DataFrame(rows, columns=columns)
        if len(frame) and (frame.stop_ns < frame.start_ns).any():
            bad = frame[frame.stop_ns < frame.start_ns].iloc[0]
            raise clock_error(self.path, f"event {bad['name']!r} of step {step}, rank {rank} ends {bad.start_ns - bad.stop_ns} ns early")
        return frame

    def timeline_steps(self) -> list[tuple[int, int]]:
        """(step, rank) pairs that have events."""
        if self.version < 2:
            return []
        with Reader(self.path / "metrics.sqlite", 5.0) as db:
            return [(int(s), int(r)) for s, r in db.rows("SELECT DISTINCT step, rank FROM gpu_timeline ORDER BY step, rank")]


def load(path: Path, *, timeout: float = 5.0, thorough: bool = False) -> Run:
    """Read and check a run directory. `thorough`: also look at every page of the database (SQLite's quick check; 5 us a step).

    InputError: missing, empty, no run, nothing measured yet, or of a newer schema. CorruptError: damaged, or rows that contradict each
    other. BusyError: the database stays locked for `timeout` seconds.
    """
    _is_run(path)
    try:
        config = read_toml(path / "config.toml")
    except CorruptError as error:
        raise CorruptError("the configuration of a run is damaged", came=error.came, expected=error.expected, do="restore it") from error
    manifest = rundir.read_manifest(path)
    metrics = path / "metrics.sqlite"
    if not metrics.exists():
        begun = "manifest.json is there" if manifest else "only half of the run directory was written"
        raise InputError("the run holds no metrics", came=f"{path}: no metrics.sqlite ({begun})", expected="metrics.sqlite with its steps",
                         do="wait until the run has begun, or start it again with `alpha train`")  # fmt: skip
    with Reader(metrics, timeout) as db:
        version = db.version
        if thorough:
            db.check()
        metadata = dict(db.rows("SELECT key, value FROM run_metadata"))
        tables = {t: frame(db, t) if version > 1 or t in VERSION_1 else pd.DataFrame() for t in KEYS}
    unsealed = why_ungated(path)
    if unsealed:
        metadata["status"] = rundir.UNGATED  # readers of the metadata alone must not say otherwise
    return checked(Run(path, version, config, manifest, metadata, tables, unsealed))


def checked(run: Run) -> Run:
    """The run after its rows were looked at, its notes made new. CorruptError if they contradict each other."""
    run.notes = [NO_TIMING_V1] if run.version < 2 else []
    check(run.path, run.version, run.tables, run.notes)
    check_sums(run.path, run.metadata, run.manifest, run.tables)
    run.notes += _moved(run.manifest)
    run.notes += _resized(run.tables["sessions"]) if run.version > 1 else []
    run.notes += _endings(run.tables["sessions"]) if run.version > 1 else []
    return run


def _commit(source: Mapping[str, Any]) -> str:
    """The commit that ran, and whether files differed from it."""
    return str(source.get("commit", "unknown"))[:12] + ("" if source.get("dirty", "") in ("", "unknown") else "+changes")


def distinct(runs: Sequence[Run]) -> None:
    """Give runs of one name an alias each. InputError if a run is named twice."""
    for run in runs:
        twins = [r for r in runs if r.name == run.name]
        if len({r.path.resolve() for r in twins}) < len(twins):
            raise InputError("a run is named twice", came=run.path, expected="different runs", do="name it once")
        run.alias = str(run.path) if len(twins) > 1 else ""


def newest(out: Path = Path("runs")) -> Path:
    """The run directory under `out` that was written to last. InputError if there is none."""
    found = sorted((p for p in out.iterdir() if rundir.is_run(p)), key=_touched) if out.is_dir() else []
    if not found:
        raise InputError("there is no run to report on", came=f"{out}/", expected="a run directory", do="name one: alpha-report RUN")
    return found[-1]


def same_axis(runs: Sequence[Run], *, mixed: bool = False) -> str:
    """Whether MFUs of these runs may stand on one axis: '' if they agree on the FLOPS model, with `mixed` a sentence that says how they
    differ, else InputError."""
    models: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        models.setdefault(run.flops_model, []).append(run.shown)
    if len(models) < 2:
        return ""
    conventions = "; ".join(f"{', '.join(names)}: {version} ({convention})" for (version, convention), names in models.items())
    if not mixed:
        raise InputError("these runs count FLOPs by different models, so their MFUs are no points of one axis", came=conventions,
                         expected="one FLOPS model", do="report on them one by one, or add --mixed-flops")
    return f"MIXED FLOPS MODELS, the MFUs are not comparable: {conventions}"


def _moved(manifest: Mapping[str, Any]) -> list[str]:
    """Whether sessions ran on different hardware or threads: the run has one peak, its first session's."""
    places = [f"{s['hardware']} with {s.get('threads')} threads" for s in manifest.get("sessions", []) if "hardware" in s]
    if len(set(places)) < 2:
        return []
    return [f"sessions ran on {'; '.join(dict.fromkeys(places))}: every utilisation stands against the peak of the first"]


def ranks_of(sessions: pd.DataFrame) -> pd.Series:
    """How many ranks each session had."""
    return sessions.groupby("session")["rank"].nunique()


def _resized(sessions: pd.DataFrame) -> list[str]:
    """Whether sessions had unlike numbers of ranks."""
    ranks = [f"{n}" for n in ranks_of(sessions)]
    if len(set(ranks)) < 2:
        return []
    return [f"sessions ran on {' and '.join(dict.fromkeys(ranks))} ranks: every utilisation stands against the devices that its steps had"]


def _endings(sessions: pd.DataFrame) -> list[str]:
    """How the last session ended, if not well."""
    if not len(sessions):
        return []
    last = sessions[sessions.session == sessions.session.max()]
    if last.ended.isna().any():
        return ["the last session has not ended: it is still running, or was killed; figures are of what was written so far"]
    return [f"the last session {text}" for text in dict.fromkeys(last.ended) if str(text).startswith("failed")]


def _is_run(path: Path) -> None:
    if not path.exists():
        raise InputError("there is no such run directory", came=path, expected="a run directory, such as runs/demo", do="check the path")
    if not path.is_dir():
        raise InputError("a run is a directory", came=f"{path}, a file", expected="such as runs/demo", do="name its folder")
    if not rundir.is_run(path):
        there = sorted(p.name for p in path.iterdir())
        raise InputError("the run directory is empty" if not there else "this is not a run directory",
                         came=f"{path}: {', '.join(there[:5]) if there else 'nothing in it'}", expected="config.toml and metrics.sqlite",
                         do="name the folder that `alpha train` printed")  # fmt: skip


def _touched(path: Path) -> float:
    return max(p.stat().st_mtime for p in (path / "config.toml", path / "metrics.sqlite", path / "metrics.sqlite-wal") if p.exists())
