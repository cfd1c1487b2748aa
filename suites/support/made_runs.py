"""Synthetic run directories with known content, for tests of the readers: config.toml, manifest.json and metrics.sqlite, quickly.

Everything follows from `seed` and the arguments, so two calls with the same ones give the same rows. Times are drawn around BASE with 1 %
of noise; `slow` multiplies a phase ('backward'), an op ('op:gelu') or a rank ('rank:1'). Nothing here imports the code under test but the
schema, the run file's reader and what seals a manifest.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from alpha import config
from alpha.profile.phases import OVERLAPPING, PHASES
from alpha.profile.schema import TABLES, VERSION, VIEWS
from alpha.train import rundir

CONFIG = Path(__file__).parents[2] / "configs" / "tiny.toml"
UNIX = 1_700_000_000 * 10**9
MS = 1_000_000
BASE = {"forward": 9 * MS, "backward": 19 * MS, "grad_norm": MS // 3, "grad_clip": 20_000, "optimizer": MS, "data_load": MS // 8,
        "host_to_device": MS // 4, "device_to_host": 50_000, "comm": 0, "idle": MS}
"""Mean ns of the phases inside a step; `unexplained` adds GAP."""
GAP, SET_UP = 40_000, 2_000 * MS
EVAL_EVERY, EVAL, SAVE_EVERY, SAVE = 250, 120 * MS, 500, 60 * MS
TOKENS, FLOPS_PER_TOKEN, PEAK_FLOPS, PEAK_BANDWIDTH = 2048, 5.0e6, 1.0e12, 4.0e10
LAYERS = 4
VERSION_1 = {"step_metrics", "run_metadata", "evaluations"}


@dataclass(frozen=True)
class Op:
    """One launch of a made plan: its share of the phase's device time, FLOPs and fewest bytes of one run."""

    plan: str
    op: str
    layer: str
    phase: str
    share: float
    flops: int
    nbytes: int
    shape: str


def ops() -> list[Op]:
    """Launches of one step, in order: forward, backward, update."""
    made: list[tuple[str, str, str, str, float, int, int, str]] = []
    forward = (("layernorm", 0.06, 2_000_000, 2_100_000, "f32[2048,128] f32[128] f32[128] -> f32[2048,128]"),
               ("matmul", 0.34, 600_000_000, 4_000_000, "f32[2048,128] f32[384,128] -> f32[2048,384]"),
               ("attention", 0.25, 250_000_000, 4_200_000, "f32[16,128,4,32] f32[16,128,4,32] f32[16,128,4,32] -> f32[16,128,4,32]"),
               ("add", 0.05, 262_144, 3_100_000, "f32[2048,128] f32[2048,128] -> f32[2048,128]"),
               ("matmul", 0.20, 400_000_000, 5_000_000, "f32[2048,128] f32[512,128] -> f32[2048,512]"),
               ("gelu", 0.10, 8_000_000, 8_400_000, "f32[2048,512] -> f32[2048,512]"))
    for i in range(LAYERS):
        made += [("micro_first@0", op, f"block{i}", "forward", s / LAYERS, f, b, shape) for op, s, f, b, shape in forward]
    for i in reversed(range(LAYERS)):
        made += [("micro_first@0", op if op in ("matmul", "add") else f"{op}_bwd", f"block{i}", "backward", s / LAYERS, 2 * f, 2 * b, shape)
                 for op, s, f, b, shape in reversed(forward)]
    made += [("update", "global_norm", "", "grad_norm", 1.0, 2_000_000, 4_000_000, "f32[1000000] -> f32[]"),
             ("update", "clip_coefficient", "", "grad_clip", 1.0, 2, 12, "f32[] f32[] -> f32[]"),
             ("update", "adamw", "", "optimizer", 1.0, 14_000_000, 28_000_000, "f32[1000000] f32[1000000] f32[1000000] -> f32[1000000]")]
    return [Op(*m) for m in made]


def component_of(op: str) -> str:
    return f"{op}.f32.cpu"


def make(
    path: Path, *, steps: int = 1000, seed: int = 0, slow: Mapping[str, float] | None = None, ranks: int = 1, devices: int | None = None,
    threads: int = 2, resumes: Sequence[int] = (), status: str = "GATED", version: int = VERSION, samples: int = 20, timeline: int = 2,
    backend: str = "cpu", noise: float = 0.01, ended: str | None = "finished", metadata: Mapping[str, Any] | None = None,
    speed_up: float = 1.0,
) -> Path:  # fmt: skip
    """Write a run directory and return it.

    `resumes`: steps at which a later session took over; `samples`: profiled steps; `timeline`: how many of them (the last) have events;
    `speed_up` divides every time (for scaling curves); `metadata` overrides rows of run_metadata; `ended` None: still running or killed.
    """
    path.mkdir(parents=True, exist_ok=True)
    rng, slow, devices = np.random.default_rng(seed), dict(slow or {}), devices or ranks
    plain = re.sub("[^A-Za-z0-9.-]", "-", path.name).strip("-")  # a folder may be renamed to what no run may be called
    cfg = config.load(CONFIG, [f"run.name={plain}", f"train.steps={max(10, steps)}"])
    (path / "config.toml").write_text(cfg.resolved())
    facts = _facts(path.name, status, devices, threads, backend) | {k: str(v) for k, v in (metadata or {}).items()}
    (path / "manifest.json").write_text(json.dumps(rundir.sealed(_manifest(facts, status)), indent=2, sort_keys=True))
    (path / "metrics.sqlite").unlink(missing_ok=True)
    db = sqlite3.connect(path / "metrics.sqlite", isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=OFF")
        db.executescript(_tables(version))
        db.execute(f"PRAGMA user_version={version}")
        db.execute("BEGIN")
        old = {"backend", "hardware", "devices", "commit", "executed_flops", "peak_bandwidth", "tokenizer"} if version == 1 else set()
        insert(db, "run_metadata", [(k, v) for k, v in sorted(facts.items()) if k not in old])
        seconds = [_rank(db, rng, steps, r, ranks, slow, resumes, samples, timeline, noise, ended, speed_up, version) for r in range(ranks)]
        _losses(db, rng, steps, seconds[0])
        if version > 1:
            _memory(db, steps, ranks)
            _plans(db)
            _stated(db, facts)
            insert(db, "peaks", [(SET_UP + i, 0, PEAK_FLOPS * f, PEAK_BANDWIDTH * f) for i, f in enumerate((0.97, 1.0, 0.99))])
        db.execute("COMMIT")
    finally:
        db.close()
    return path


def insert(db: sqlite3.Connection, table: str, rows: Iterable[Sequence[Any]], columns: Sequence[str] = ()) -> None:
    """Rows of a table, all columns in their order unless `columns` names them."""
    rows = list(rows)
    if rows:
        names = f" ({', '.join(columns)})" if columns else ""
        db.executemany(f"INSERT INTO {table}{names} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def edit(path: Path, statement: str, values: Sequence[Any] = ()) -> None:
    """Change the metrics of a made run, to break them."""
    db = sqlite3.connect(path / "metrics.sqlite")
    try:
        db.execute(statement, values)
        db.commit()
    finally:
        db.close()


def _stated(db: sqlite3.Connection, facts: Mapping[str, str]) -> None:
    """The one peak, and FLOPs by part, as the metadata states them; nothing where it does not."""
    try:
        insert(db, "run_peak", [(0, float(facts["peak_flops"]), float(facts["peak_bandwidth"]), facts["peak_source"])])
        model, executed = int(float(facts["flops_per_token"]) * int(facts["tokens_per_step"])), int(facts["executed_flops"])
    except (KeyError, ValueError):
        return
    insert(db, "flops_parts", [("feed-forward", "forward", model // 3, executed // 4),
                               ("feed-forward", "backward", model - model // 3, executed // 4),
                               ("feed-forward", "recompute", 0, executed - 2 * (executed // 4))])


def _tables(version: int) -> str:
    if version > 1:
        return TABLES + (VIEWS if version > 2 else "")
    return ";\n".join(t for t in TABLES.split(";\n") if any(f"EXISTS {name} " in t for name in VERSION_1)) + ";"


def _facts(name: str, status: str, devices: int, threads: int, backend: str) -> dict[str, str]:
    executed = sum(o.flops for o in ops())
    return {
        "status": status, "name": name, "program": "ab" * 32, "machine": "cpu_x86_64-avx512_np2.2_openblas-SkylakeX_t1",
        "hardware": "Synthetic CPU", "devices": str(devices), "commit": "0123456789abcdef0123456789abcdef01234567", "dirty": "",
        "version": "0.1.0", "backend": backend, "backend_version": "NumPy 2.2.6, OpenBLAS SkylakeX", "binaries": "cd" * 32,
        "tokenizer": "01" * 32, "corpus": "02" * 32, "train_stream": "03" * 32, "validation_stream": "04" * 32,
        "flops_version": "flops/v1", "flops_convention": "3 x forward; matmuls with head; causal attention counted half",
        "flops_per_token": str(FLOPS_PER_TOKEN), "executed_flops": str(executed), "peak_flops": str(PEAK_FLOPS),
        "peak_bandwidth": str(PEAK_BANDWIDTH), "peak_source": "made up for a test", "threads": str(threads), "shards": "1",
        "tokens_per_step": str(TOKENS), "order2_bits_per_byte": "2.68", "started": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip


def _manifest(facts: Mapping[str, str], status: str) -> dict[str, Any]:
    used = sorted({component_of(o.op) for o in ops()} | {"train.loop", "tokenizer.bytes"})
    gates = ("determinism", "faults", "gradient", "parity", "perf")
    return {
        "run": facts["name"], "status": status, "program": facts["program"], "machine": facts["machine"],
        "components": {c: ({g: f"{i:016x}" for i, g in enumerate(gates)} if status == "GATED" else {}) for c in used},
        "flops": {"version": facts["flops_version"], "convention": facts["flops_convention"], "per_token": FLOPS_PER_TOKEN,
                  "peak": PEAK_FLOPS, "peak_source": facts["peak_source"]},
        "tokenizer": facts["tokenizer"], "corpus": facts["corpus"],
        "sessions": [{"started": facts["started"], "from_step": 0, "threads": 2, "machine": facts["machine"], "gated": status == "GATED",
                      "source": {"commit": facts["commit"], "dirty": "", "version": "0.1.0"}}],
    }  # fmt: skip


def _rank(
    db: sqlite3.Connection, rng: np.random.Generator, steps: int, rank: int, ranks: int, slow: Mapping[str, float], resumes: Sequence[int],
    samples: int, timeline: int, noise: float, ended: str | None, speed_up: float, version: int,
) -> np.ndarray:  # fmt: skip
    """Sessions, timing, profile and timeline of one rank. Returns the seconds of each step."""
    scale = slow.get(f"rank:{rank}", 1.0) / speed_up
    op_slow = {k.removeprefix("op:"): v for k, v in slow.items() if k.startswith("op:")}
    spent: dict[str, np.ndarray] = {}
    for phase in PHASES:
        base = BASE.get(phase, 0) * scale * slow.get(phase, 1.0)
        if phase == "comm" and ranks > 1:
            base = 2 * MS * scale * slow.get(phase, 1.0)
        own = [o for o in ops() if o.phase == phase]
        base *= sum(o.share * op_slow.get(o.op, 1.0) for o in own) if own else 1.0
        spent[phase] = (base * np.exp(noise * rng.standard_normal(steps))).astype(np.int64)
    profiled = np.zeros(steps, np.int64)
    if steps > 4 and samples:
        profiled[np.unique(np.linspace(4, steps - 1, min(samples, steps - 4)).astype(int))] = 1
    for phase in ("forward", "backward", "idle"):
        spent[phase] = np.where(profiled == 1, spent[phase] * 5 // 4, spent[phase])
    unexplained = np.full(steps, GAP, np.int64)
    step_ns = sum(spent[p] for p in BASE) + unexplained
    number = np.arange(steps)
    spent["eval"] = np.where((number + 1) % EVAL_EVERY == 0, EVAL, 0)
    spent["checkpoint"] = np.where((number + 1) % SAVE_EVERY == 0, SAVE, 0)
    wall = step_ns + spent["eval"] + spent["checkpoint"]
    session, began = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    bounds = [0, *resumes, steps]
    for s, (first, last) in enumerate(pairwise(bounds)):
        zero = (7 + 3 * s + rank) * 10**9
        loop = zero + SET_UP
        session[first:last] = s
        began[first:last] = loop + np.concatenate(([0], np.cumsum(wall[first:last])[:-1])) if last > first else loop
        stop = loop + int(wall[first:last].sum())
        whole = s == len(bounds) - 2
        unix = UNIX + (s * 3600 + 1) * 10**9
        if version > 1:
            insert(db, "sessions", [(s, rank, "made", 4000 + rank, first, unix, zero + 10**9, zero, loop if last > first else None, stop,
                                     ended if whole else None)])  # fmt: skip
    if version > 1 and steps:
        launches = np.full(steps, len(ops()))
        enqueue = np.where(profiled == 1, 400_000, 0)
        overlapped = {p: np.full(steps, MS if p == "comm" and ranks > 1 else 0) for p in OVERLAPPING}
        columns = [number, np.full(steps, rank), session, began, wall, step_ns, profiled, launches, enqueue, *(spent[p] for p in PHASES),
                   *(overlapped[p] for p in OVERLAPPING), unexplained]
        insert(db, "step_timing", zip(*[c.tolist() for c in columns]))
        _profile(db, rng, rank, number[profiled == 1], began[profiled == 1], scale, op_slow, slow, timeline, noise)
    return step_ns / 1e9


def _profile(
    db: sqlite3.Connection, rng: np.random.Generator, rank: int, chosen: np.ndarray, began: np.ndarray, scale: float,
    op_slow: Mapping[str, float], slow: Mapping[str, float], timeline: int, noise: float,
) -> None:  # fmt: skip
    rows: list[tuple] = []
    events: list[tuple] = []
    for k, (step, start) in enumerate(zip(chosen.tolist(), began.tolist())):
        drawn = np.exp(noise * rng.standard_normal(len(ops())))
        at, index = start + MS, dict.fromkeys((o.plan for o in ops()), 0)
        for flow, (o, factor) in enumerate(zip(ops(), drawn.tolist())):
            device = int(BASE[o.phase] * o.share * scale * slow.get(o.phase, 1.0) * op_slow.get(o.op, 1.0) * factor)
            rows.append((step, rank, o.plan, index[o.plan], o.op, component_of(o.op), o.layer, o.phase, o.shape, "f32", 1, 5_000, device,
                         3_000, o.flops, o.nbytes, 2))
            index[o.plan] += 1
            if k >= len(chosen) - timeline:
                events.append((step, rank, "host enqueue", o.op, o.phase, at, at + 5_000, flow))
                events.append((step, rank, "worker 0", o.op, o.phase, at + 5_000, at + 5_000 + device, flow))
            at += device + 8_000
        if k >= len(chosen) - timeline:
            events.append((step, rank, "data loading", "batch", "data_load", start, start + BASE["data_load"], None))
    insert(db, "op_profile", rows)
    insert(db, "gpu_timeline", events)


def _losses(db: sqlite3.Connection, rng: np.random.Generator, steps: int, seconds: np.ndarray) -> None:
    number = np.arange(steps)
    loss = 2.2 + 3.3 / (1.0 + number / 80.0) ** 0.7 + 0.03 * rng.standard_normal(steps)
    norm = 0.4 + 2.0 / (1.0 + number / 50.0) + 0.02 * np.abs(rng.standard_normal(steps))
    lr = 3e-3 * np.minimum(1.0, (number + 1) / max(1, steps // 20)) * (0.55 + 0.45 * np.cos(np.pi * number / max(1, steps)))
    insert(db, "step_metrics", zip(number.tolist(), loss.tolist(), norm.tolist(), lr.tolist(), (1.0 / TOKENS / norm).tolist(),
                                   [TOKENS] * steps, seconds.tolist(), [1] * steps))  # fmt: skip
    evals = number[(number + 1) % EVAL_EVERY == 0] + 1
    insert(db, "evaluations", [(s, 2.2 * 4096, 4096, 9000, 16, 1.6 + 2.0 / (1 + s / 200)) for s in evals.tolist()])


def _memory(db: sqlite3.Connection, steps: int, ranks: int) -> None:
    arenas = {"activations": 24 << 20, "param": 4 << 20, "m": 4 << 20, "v": 4 << 20, "grad0": 4 << 20}
    rows: list[tuple] = []
    for step in range(0, steps, max(1, steps // 100)):
        for r in range(ranks):
            rows += [(step, r, a, n, n - 4096 * (a == "activations" and step == 0)) for a, n in arenas.items()]
            rows.append((step, r, "process", None, sum(arenas.values()) + (60 << 20) + 1000 * step))
    insert(db, "memory", rows)


def _plans(db: sqlite3.Connection) -> None:
    rows, totals = [], {}
    for plan in dict.fromkeys(o.plan for o in ops()):
        own = [o for o in ops() if o.plan == plan]
        middle = len(own) / 2
        rows += [(plan, i, o.op, o.layer, o.phase, int((24 << 20) * (1.0 - 0.8 * abs(i - middle) / max(1.0, middle))))
                 for i, o in enumerate(own)]
        totals[plan] = (plan, 1, len(own), sum(o.flops for o in own), sum(o.nbytes for o in own))
    insert(db, "memory_plan", rows)
    insert(db, "schedule", totals.values())
