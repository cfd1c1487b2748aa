"""The tables of metrics.sqlite, in one place, with units. Floor 3.

Times are integer nanoseconds. `began_ns`, `start_ns` and `stop_ns` are read from the monotonic clock of the rank that wrote the row; the
table `sessions` says where that clock stood in Unix time, so that ranks and sessions can be aligned. `rank` counts from 0.
"""

from __future__ import annotations

from alpha.profile.phases import OVERLAPPING, PHASES

VERSION = 3
"""`PRAGMA user_version`. Readers refuse a newer one; version 1 had neither timing nor profile, version 2 had no views and no tables
`run_peak`, `flops_parts`, `samples`, `kernel_times` and `kernel_profile`."""

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
    enqueue_ns INTEGER NOT NULL,       -- host time to hand the work over; 0 where it went with a whole graph (step_timing has that)
    device_ns INTEGER NOT NULL,        -- time in which the work ran (CPU: from hand-over to the last worker's end)
    wait_ns INTEGER NOT NULL,          -- time in which the compute stream waited for a worker or a stream
    flops INTEGER NOT NULL,            -- executed
    nbytes INTEGER NOT NULL,           -- fewest that must move
    dispatches INTEGER NOT NULL,       -- hand-overs: worker wake-ups on a CPU, kernels on a GPU
    PRIMARY KEY (step, rank, plan, launch)
);
CREATE TABLE IF NOT EXISTS kernel_times (  -- a profiled step in which each kernel of the device was timed; no row: they were not measured
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    kernels INTEGER NOT NULL,          -- kernels that ran; our own time stamps are told apart in every column
    busy_ns INTEGER NOT NULL,          -- time in which a kernel ran
    stamp_ns INTEGER NOT NULL,         -- time in which time stamps were taken and nothing else ran
    idle_ns INTEGER NOT NULL,          -- time of the step in which neither kernel, stamp, copy nor fill ran
    gap_ns INTEGER NOT NULL,           -- time between the first kernel and the last in which neither kernel nor stamp ran, and of it ...
    gap_sync_ns INTEGER NOT NULL,      -- ... in gaps before which the host waited, less the next column (alpha/profile/kernels.py)
    gap_copy_ns INTEGER NOT NULL,      -- ... while a copy or fill ran: no kernel ran beside it
    longest_gap_ns INTEGER NOT NULL,
    copies INTEGER NOT NULL,           -- copies and fills
    copy_ns INTEGER NOT NULL,          -- time in which one ran
    copy_overlapped_ns INTEGER NOT NULL,              -- of it beside a kernel
    syncs INTEGER NOT NULL,            -- waits of the host for the device: stream, event or context
    sync_ns INTEGER NOT NULL,          -- time in them
    stamps INTEGER NOT NULL,           -- time stamps held against the instrument
    stamp_offset_ns INTEGER NOT NULL,  -- median of (our stamp - middle of its kernel by the instrument)
    stamp_spread_ns INTEGER NOT NULL,  -- largest distance of one from that median
    switch_ns INTEGER NOT NULL,        -- host time that turning the instrument on and off and reading it took
    PRIMARY KEY (step, rank)
);
CREATE TABLE IF NOT EXISTS kernel_profile (
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    plan TEXT NOT NULL, launch INTEGER NOT NULL,      -- Segment and position in it, as in op_profile
    place INTEGER NOT NULL,            -- position of the kernel in its launch
    op TEXT NOT NULL, kernel TEXT NOT NULL,
    phase TEXT NOT NULL,               -- step phase of this kernel: a launch may have several
    count INTEGER NOT NULL,            -- times that it ran in the step
    device_ns INTEGER NOT NULL,        -- sum over them of start to end
    PRIMARY KEY (step, rank, plan, launch, place)
);
CREATE TABLE IF NOT EXISTS gpu_timeline (
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    track TEXT NOT NULL,               -- 'host enqueue', 'stream 0' (CPU: 'worker 0', ...), 'gaps', 'copies', 'fills', 'sync waits',
                                       -- 'comm', 'data loading', 'checkpoint writer'
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
CREATE TABLE IF NOT EXISTS peaks (     -- readings of the machine's speed, for comparisons; no utilisation stands against them
    clock_ns INTEGER NOT NULL, rank INTEGER NOT NULL,
    flops REAL NOT NULL,               -- FLOP/s that a large product reached at this moment
    bandwidth REAL NOT NULL            -- bytes/s (read + written) that a large copy reached at this moment
);
CREATE TABLE IF NOT EXISTS run_peak (  -- one row: the peak that every utilisation of the run stands against, resumed sessions included
    session INTEGER PRIMARY KEY,       -- session that it was taken in
    flops REAL NOT NULL,               -- FLOP/s of one device
    bandwidth REAL NOT NULL,           -- bytes/s of one device
    source TEXT NOT NULL               -- where both come from
);
CREATE TABLE IF NOT EXISTS flops_parts (
    part TEXT NOT NULL,                -- part of the model, or 'optimizer'
    direction TEXT NOT NULL,           -- 'forward', 'backward', 'recompute' or 'update'
    model INTEGER NOT NULL,            -- FLOPs of one step by the FLOPS model; they add up to flops_per_token x tokens_per_step
    executed INTEGER NOT NULL,         -- FLOPs of one step that its launches execute; they add up to executed_flops
    PRIMARY KEY (part, direction)
);
CREATE TABLE IF NOT EXISTS samples (
    step INTEGER PRIMARY KEY,          -- steps done before it
    prompt TEXT NOT NULL, text TEXT NOT NULL,         -- as printed: control characters as dots; text without the prompt
    tokens INTEGER NOT NULL,           -- most tokens that were asked for
    temperature REAL NOT NULL, top_k INTEGER NOT NULL, seed INTEGER NOT NULL
);
"""

SPOT_CHECKS = """
CREATE TABLE IF NOT EXISTS spot_checks (   -- what was recomputed of a checked step (train.verify)
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    call INTEGER NOT NULL,             -- position in the rank's schedule
    plan TEXT NOT NULL, launch INTEGER NOT NULL,      -- Segment and position in it; '' and -1: the step as a whole
    op TEXT NOT NULL,                  -- 'state': all of the state was hashed
    how TEXT NOT NULL,                 -- 'product' (random projections), 'rows', 'whole', 'hash'
    elements INTEGER NOT NULL,         -- of results, looked at; 'state': bytes hashed in this session so far
    ratio REAL,                        -- worst error over its tolerance; above 1 the run stops; NULL: not a number
    ns INTEGER NOT NULL,               -- time it took; 'state': of all checks of this step
    PRIMARY KEY (step, rank, call, launch, how)
)
"""
"""Made by the runs that have spot checks."""

WAITS = """
CREATE TABLE IF NOT EXISTS data_waits (   -- a step's batches, where a thread makes them ahead (data.prefetch)
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    batches INTEGER NOT NULL,          -- microbatches of this rank
    ready INTEGER NOT NULL,            -- of them there when they were asked for
    wait_ns INTEGER NOT NULL,          -- time that the loop waited for the others: part of phase data_load of the step that asked
    made_ns INTEGER NOT NULL,          -- time that the thread spent on all of them
    PRIMARY KEY (step, rank)
)
"""
"""Made by the runs that prefetch."""

SOURCES = """
CREATE TABLE IF NOT EXISTS source_evaluations (   -- of a mixture: `evaluations` by source; together they are the row there
    step INTEGER NOT NULL,             -- steps done before it
    source TEXT NOT NULL,              -- as data.mixture names it
    nats REAL NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, windows INTEGER NOT NULL, bits_per_byte REAL NOT NULL,
    PRIMARY KEY (step, source)
)
"""
"""Made by the runs of a mixture."""

_TIMES = ("wall", "step", *PHASES, *(f"{p}_overlapped" for p in OVERLAPPING), "unexplained")
_MS = ",\n    ".join(f"{name}_ns / 1e6 AS {name}_ms" for name in _TIMES)

VIEWS = f"""
DROP VIEW IF EXISTS step_timing_ms;
CREATE VIEW step_timing_ms AS          -- step_timing in milliseconds
SELECT step, rank, session, profiled, launches,
    {_MS}
FROM step_timing;
DROP VIEW IF EXISTS op_profile_per_step;
CREATE VIEW op_profile_per_step AS     -- an op in a profiled step: mean device time of a launch, how often it ran, fewest bytes of all runs
SELECT step, rank, op AS op_name, sum(device_ns) / 1e6 / sum(count) AS avg_ms, sum(count) AS count, sum(nbytes) AS bytes_moved
FROM op_profile GROUP BY step, rank, op;
DROP VIEW IF EXISTS memory_pool_per_step;
CREATE VIEW memory_pool_per_step AS    -- live bytes of the activation arena in a profiled step: the most, and the mean over device time
SELECT p.step, p.rank, max(m.live) AS peak_bytes, sum(1.0 * m.live * p.device_ns) / sum(p.device_ns) AS average_bytes,
    (SELECT max(a.planned) FROM memory a WHERE a.step = p.step AND a.rank = p.rank AND a.arena = 'act') AS planned_bytes
FROM op_profile p JOIN memory_plan m ON m.plan = p.plan AND m.launch = p.launch GROUP BY p.step, p.rank;
"""
"""What any SQLite client may read; made anew whenever the file is opened for writing."""

COMMUNICATION = """
CREATE TABLE IF NOT EXISTS communication (
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    op TEXT NOT NULL,                  -- collective
    stream TEXT NOT NULL,              -- 'comm': beside compute; 'compute': on the thread that computes, which waits for all of it
    calls INTEGER NOT NULL, nbytes INTEGER NOT NULL,  -- in the step; bytes of their operands
    total_ns INTEGER NOT NULL,         -- from asking for a collective to its end, the wait for other ranks included; and of it ...
    exposed_ns INTEGER NOT NULL,       -- ... while the compute stream waits
    overlapped_ns INTEGER NOT NULL,    -- ... while it does not
    PRIMARY KEY (step, rank, op, stream)
);
CREATE TABLE IF NOT EXISTS collectives (  -- each collective of a profiled step
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    grp INTEGER NOT NULL, call INTEGER NOT NULL,      -- group and number in it: the same on all its members
    op TEXT NOT NULL, stream TEXT NOT NULL, dtype TEXT NOT NULL, nbytes INTEGER NOT NULL,
    asked_ns INTEGER NOT NULL, ended_ns INTEGER NOT NULL,
    source TEXT NOT NULL,              -- the model's line
    PRIMARY KEY (step, rank, grp, call, op, asked_ns)
);
CREATE TABLE IF NOT EXISTS calls (  -- each Plan that a profiled step ran
    step INTEGER NOT NULL, rank INTEGER NOT NULL,
    call INTEGER NOT NULL,             -- position in the rank's schedule
    plan TEXT NOT NULL,                -- Segment
    shard INTEGER, micro INTEGER,      -- whose text it read, both from 0: logical shard and microbatch; NULL: it reads none
    began_ns INTEGER NOT NULL, ended_ns INTEGER NOT NULL,   -- of its launches, the waits for those beside compute included
    PRIMARY KEY (step, rank, call)
);
DROP VIEW IF EXISTS communication_per_step;
CREATE VIEW communication_per_step AS  -- what a rank spent in collectives in a step
SELECT step, rank, sum(calls) AS calls, sum(nbytes) AS nbytes, sum(total_ns) / 1e6 AS total_ms, sum(exposed_ns) / 1e6 AS exposed_ms,
    sum(overlapped_ns) / 1e6 AS overlapped_ms
FROM communication GROUP BY step, rank;
"""
"""What many ranks leave beside these tables; empty for one rank, and not there in runs of older releases."""

METADATA = {
    "status": "GATED or UNGATED", "name": "run directory's name", "program": "Program hash", "machine": "machine class",
    "hardware": "CPU or GPU model", "devices": "number of devices", "commit": "commit that ran", "dirty": "sha256 of the diff, '' if none",
    "version": "Alpha's version", "backend": "cpu or cuda", "backend_version": "NumPy and BLAS, or CUDA driver and compiler",
    "binaries": "sha256 over the kernels' digests",
    "kernels": "JSON: kernel component -> sha256 of its code (source digest, and the compiled files that it may load)",
    "driver": "CUDA driver; 'none' on a CPU", "tokenizer": "hash", "corpus": "hash", "train_stream": "hash",
    "validation_stream": "hash",
    "flops_version": "FLOPS model", "flops_convention": "in words", "flops_per_token": "useful model FLOPs a token",
    "executed_flops": "executed FLOPs a step, recompute included", "peak_flops": "FLOP/s that MFU is measured against",
    "peak_bandwidth": "bytes/s that bandwidth is measured against", "peak_source": "where both come from", "threads": "CPU worker threads",
    "shards": "logical shards", "tokens_per_step": "tokens", "order2_bits_per_byte": "baseline on the validation text",
    "started": "UTC time of the first session",
    "sources": "JSON: source, weight in lowest terms, and of an epoch sequences, documents, how many of them are cut, share of padding, "
               "share of tokens that are no target",
    "verify": "which steps have spot checks, or 'NOT_RUN: ' and why",
    "comm_priority": "of ranks on GPUs: priority of the stream of collectives, of the least to the highest that there is",
    "kernel_times": "what timed each kernel of the profiled steps, or 'not measured: ' and why",
}
"""Keys of run_metadata and what they hold (all as text)."""
