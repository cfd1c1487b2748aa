"""The tables of metrics.sqlite, in one place, with units. Floor 3.

Times are integer nanoseconds. `began_ns`, `start_ns` and `stop_ns` are read from the monotonic clock of the rank that wrote the row; the
table `sessions` says where that clock stood in Unix time, so that ranks and sessions can be aligned. `rank` counts from 0.
"""

from __future__ import annotations

from alpha.profile.phases import OVERLAPPING, PHASES

VERSION = 2
"""`PRAGMA user_version`. Readers refuse a newer one; version 1 had neither timing nor profile."""

_EXCLUSIVE = "\n".join(f"    {name}_ns INTEGER NOT NULL DEFAULT 0," for name in PHASES)
_OVERLAPPED = "\n".join(f"    {name}_overlapped_ns INTEGER NOT NULL DEFAULT 0," for name in OVERLAPPING)

TABLES = f"""
CREATE TABLE IF NOT EXISTS run_metadata (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    session INTEGER NOT NULL,          -- 0, 1, ... : one for each time that the run was started or resumed
    rank INTEGER NOT NULL,
    host TEXT NOT NULL, pid INTEGER NOT NULL,
    first_step INTEGER NOT NULL,       -- step that it began with
    unix_ns INTEGER NOT NULL,          -- Unix time and ...
    clock_ns INTEGER NOT NULL,         -- ... monotonic clock at the same moment (end of the alignment barrier)
    began_ns INTEGER NOT NULL,         -- monotonic: when the session's process began its work (set-up included)
    loop_ns INTEGER,                   -- monotonic: when the first step began; NULL if it never did
    seen_ns INTEGER NOT NULL,          -- monotonic: last sign of life
    ended TEXT,                        -- 'finished', 'stopped', 'failed: <what>'; NULL: still running, or killed
    PRIMARY KEY (session, rank)
);
CREATE TABLE IF NOT EXISTS step_metrics (
    step INTEGER PRIMARY KEY,          -- counted from 0
    loss REAL,                         -- mean over valid targets, nats a token; NULL where not finite
    norm REAL,                         -- gradient norm of the mean loss before clipping; NULL where not finite
    lr REAL,                           -- learning rate of this step
    coefficient REAL,                  -- factor that clipping and the mean applied to the summed gradient
    tokens INTEGER NOT NULL,           -- tokens of this step, all ranks
    seconds REAL NOT NULL,             -- wall time of this step (rank 0)
    finite INTEGER NOT NULL            -- 0: the step was refused and the state left as it was
);
CREATE TABLE IF NOT EXISTS evaluations (
    step INTEGER PRIMARY KEY,          -- steps done before it
    nats REAL NOT NULL,                -- summed loss of the validation tokens
    tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, windows INTEGER NOT NULL, bits_per_byte REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS step_timing (
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    session INTEGER NOT NULL,
    began_ns INTEGER NOT NULL,         -- start of the step interval
    wall_ns INTEGER NOT NULL,          -- length of the step interval: to the start of the next step or the end of the session
    step_ns INTEGER NOT NULL,          -- length of the step itself: batch, launches, reading the result
    profiled INTEGER NOT NULL,         -- 1: this step ran instrumented, so it is slower and kept out of every rate
    launches INTEGER NOT NULL,         -- launches that the step enqueued
    enqueue_ns INTEGER NOT NULL,       -- host time spent in enqueueing them; 0 where it is not told apart from execution
{_EXCLUSIVE}
{_OVERLAPPED}
    unexplained_ns INTEGER NOT NULL,   -- wall_ns less all exclusive phases
    PRIMARY KEY (step, rank)
);
CREATE TABLE IF NOT EXISTS op_profile (
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    plan TEXT NOT NULL, launch INTEGER NOT NULL,      -- Segment and position in it
    op TEXT NOT NULL, component TEXT NOT NULL, layer TEXT NOT NULL,
    phase TEXT NOT NULL,               -- step phase
    shape TEXT NOT NULL, dtype TEXT NOT NULL,         -- operands and results: 'f32[8,9] f32[9] -> f32[8,9]'; of the first result
    count INTEGER NOT NULL,            -- times that this launch ran in the step; every figure below is the sum over them
    enqueue_ns INTEGER NOT NULL,       -- host time to hand the work over
    device_ns INTEGER NOT NULL,        -- time in which the work ran (CPU: from hand-over to the last worker's end)
    wait_ns INTEGER NOT NULL,          -- time in which the compute stream waited for a worker or a stream
    flops INTEGER NOT NULL,            -- executed
    nbytes INTEGER NOT NULL,           -- fewest that must move
    dispatches INTEGER NOT NULL,       -- hand-overs: worker wake-ups on a CPU, kernel launches on a GPU
    PRIMARY KEY (step, rank, plan, launch)
);
CREATE TABLE IF NOT EXISTS gpu_timeline (
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    track TEXT NOT NULL,               -- 'host enqueue', 'stream 0' (CPU: 'worker 0', ...), 'comm', 'data loading', 'checkpoint writer'
    name TEXT NOT NULL,                -- op or activity
    category TEXT NOT NULL,            -- step phase
    start_ns INTEGER NOT NULL, stop_ns INTEGER NOT NULL,
    flow INTEGER                       -- events of one step and rank with the same number: an arrow from the host's to the others
);
CREATE INDEX IF NOT EXISTS gpu_timeline_step ON gpu_timeline (step, rank);
CREATE TABLE IF NOT EXISTS memory (
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    arena TEXT NOT NULL,               -- arena of the Program, or 'process' (CPU) / 'device' (GPU) for the whole
    planned INTEGER,                   -- bytes that the Program plans; NULL for the whole
    actual INTEGER NOT NULL,           -- bytes resident (CPU) or allocated (GPU) at the end of the step
    PRIMARY KEY (step, rank, arena)
);
CREATE TABLE IF NOT EXISTS memory_plan (
    plan TEXT NOT NULL, launch INTEGER NOT NULL,
    op TEXT NOT NULL, layer TEXT NOT NULL, phase TEXT NOT NULL,
    live INTEGER NOT NULL,             -- bytes of the activation arena that hold a value needed now or later, while this launch runs
    PRIMARY KEY (plan, launch)
);
CREATE TABLE IF NOT EXISTS schedule (
    plan TEXT PRIMARY KEY, count INTEGER NOT NULL,    -- runs of this Segment in one step
    launches INTEGER NOT NULL, flops INTEGER NOT NULL, nbytes INTEGER NOT NULL   -- of one run; executed, fewest bytes
);
CREATE TABLE IF NOT EXISTS peaks (
    clock_ns INTEGER NOT NULL, rank INTEGER NOT NULL,
    flops REAL NOT NULL,               -- FLOP/s that a large product reached at this moment
    bandwidth REAL NOT NULL            -- bytes/s (read + written) that a large copy reached at this moment
);
"""

METADATA = {
    "status": "GATED or UNGATED", "name": "run directory's name", "program": "Program hash", "machine": "machine class",
    "hardware": "CPU or GPU model", "devices": "number of devices", "commit": "commit that ran", "dirty": "sha256 of the diff, '' if none",
    "version": "Alpha's version", "backend": "cpu or cuda", "backend_version": "NumPy and BLAS, or CUDA driver and compiler",
    "binaries": "sha256 over the kernels' digests", "tokenizer": "hash", "corpus": "hash", "train_stream": "hash",
    "validation_stream": "hash",
    "flops_version": "FLOPS model", "flops_convention": "in words", "flops_per_token": "useful model FLOPs a token",
    "executed_flops": "executed FLOPs a step, recompute included", "peak_flops": "FLOP/s that MFU is measured against",
    "peak_bandwidth": "bytes/s that bandwidth is measured against", "peak_source": "where both come from", "threads": "CPU worker threads",
    "shards": "logical shards", "tokens_per_step": "tokens", "order2_bits_per_byte": "yardstick on the validation text",
    "started": "UTC time of the first session",
}
"""Keys of run_metadata and what they hold (all as text)."""
