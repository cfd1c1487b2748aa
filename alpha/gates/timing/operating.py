"""The perf gate's operating characteristic, measured: how often the relative half cries wolf, and what it can see. Floor 7.

Two sources. Resampled: one long series of real pairs of blocks (A against A) is recorded, and the procedure of ab.py is run on stretches
of it (contiguous ones, so that drift and neighbours stay in), with B's times multiplied by the injected slowdown; the fresh process is
another stretch. Live: the procedure as it runs, with a slowdown planted in B's blocks, on the CPU a busy wait of that fraction, on the GPU
a fill of device memory behind each launch, as large as takes that fraction of the kernel's time (it is measured first). Rates come with
Wilson intervals. The table is written to baselines/perf/operating.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alpha.component import Component
from alpha.cuda_runtime.memory import Arena, Span, fill
from alpha.cuda_runtime.nvml import Clocks, Reading
from alpha.errors import InputError
from alpha.gates.cuda.calls import timed
from alpha.gates.cuda.subjects import CudaBound
from alpha.gates.cuda.time import FLUSH_BYTES, LAUNCHES, block_of, timed_block
from alpha.gates.perf import representative
from alpha.gates.subjects import fresh_nonce, generator, spec_of, warm_up
from alpha.gates.timing import ab, against
from alpha.profile import noise
from alpha.profile.noise import AMBIGUOUS, FAIL, PASS, Verdict
from alpha.registry.evidence import shipped_root, write_atomic
from alpha.registry.gpu import class_here, family, gpu_environment
from alpha.registry.machine import environment, machine_class

SLOWDOWNS = (0.0, 0.01, 0.02, 0.05)
TRIALS = 400
"""Resampled trials per slowdown."""

SERIES = 3000
"""Pairs in the recorded series, fewer when the time runs out."""

LIVE = 25
"""Live trials per slowdown, fewer when the time runs out."""


class OnCpu:
    """The procedure between a kernel of the CPU and itself."""

    def __init__(self, component: Component, case_name: str) -> None:
        cases = representative(component, fresh_nonce())
        if case_name not in cases:
            raise InputError("no such timed call", came=f"{component.id} {case_name}", expected=", ".join(cases) or "none")
        self._component, self._case = component, case_name

    def series(self) -> Callable[[int], list[float]]:
        """Draws log ratios of A against A, from buffers bound once."""
        nonce = fresh_nonce()
        rng = np.random.default_rng(int(nonce[:8], 16))
        first, second = ab.arms(self._component, self._component, self._case, nonce)
        return lambda n: noise.pairs_of(first, second, n, rng)

    def planted(self, slowdown: float) -> float:
        """What a slowdown of this size comes to."""
        return slowdown

    def trial(self, slowdown: float) -> Verdict:
        """The procedure once, from fresh buffers; the second look binds others."""
        nonce = fresh_nonce()
        rng = np.random.default_rng(int(nonce[:8], 16))
        first, second = ab.arms(self._component, self._component, self._case, nonce, slowdown)
        return ab.decide(lambda n: noise.pairs_of(first, second, n, rng),
                         lambda: ab.once_more(self._component, self._component, self._case, slowdown))


class OnGpu:
    """The same for a kernel of the GPU: blocks, clocks and discarded pairs are those of against.py, in one process."""

    def __init__(self, component: Component, case_name: str) -> None:
        warm_up(component)
        calls = {c.name: c for c in timed(component)}
        if case_name not in calls:
            raise InputError("no such timed call", came=f"{component.id} {case_name}", expected=", ".join(calls) or "none")
        self._component, self._call, self._clocks = component, calls[case_name], Clocks.open()
        self._flush = Arena(FLUSH_BYTES, name="flush")
        self._extra: dict[float, int] = {0.0: 0}
        self._sides = self._side(0), self._side(0)

    def _side(self, extra: int) -> _Here:
        nonce = fresh_nonce()
        rng = generator(nonce, self._component.id, "operating")
        bound = CudaBound(self._component, self._call.types, spec_of(self._component).infer(self._call.types, self._call.attrs),
                          self._call.attrs)
        bound.fill_blocks(block_of(t, rng, self._call.least, self._call.below) for t in self._call.types)
        bound.call()
        return _Here(bound, self._clocks, Span(self._flush.address, FLUSH_BYTES), extra)

    def _pairs(self, extra: int, sides: tuple[_Here, _Here] | None = None) -> against.Pairs:
        sides = sides or self._sides
        sides[1].extra = extra
        return against.Pairs(sides, self._component.id, self._call.name, fresh_nonce())

    def series(self) -> Callable[[int], list[float]]:
        """See OnCpu."""
        return self._pairs(0).draw

    def planted(self, slowdown: float) -> float:
        """The slowdown that a fill behind each launch comes to, as near to the one asked for as four corrections bring it."""
        if slowdown == 0:
            return 0.0
        size, found = 1 << 20, 0.0
        for _ in range(4):
            found = float(np.expm1(np.median(self._pairs(size).draw(30))))
            self._extra[slowdown] = size
            if abs(found - slowdown) < 0.05 * slowdown:
                break
            size = int(min(FLUSH_BYTES, max(4096, size * slowdown / max(found, slowdown / 8))))
        return found

    def trial(self, slowdown: float) -> Verdict:
        """The procedure once, over the same buffers each time (binding them takes longer than it); the second look binds others."""
        extra, level = self._extra[slowdown], noise.share(noise.ALPHA, rounds=noise.ROUNDS)
        return ab.decide(self._pairs(extra).draw,
                         lambda: noise.interval(self._pairs(extra, (self._side(0), self._side(0))).draw(ab.MOST), level))


class _Here:
    """One side of a comparison in this process. `extra`: bytes that are filled behind each launch."""

    def __init__(self, bound: CudaBound, clocks: Clocks, flush: Span, extra: int) -> None:
        self._bound, self._clocks, self._flush, self.extra = bound, clocks, flush, extra

    def ask(self, do: str, **more: Any) -> Any:
        """As a process would answer (against_server.py)."""
        return {"bind": lambda: "", "repeats": lambda: LAUNCHES, "block": self._block}[do]()

    def _block(self) -> tuple[float, float, int]:
        ns, reading = self._timed()
        return ns, reading.sm_mhz, reading.reasons

    def _timed(self) -> tuple[float, Reading]:
        def launch() -> None:
            self._bound.enqueue()
            if self.extra:
                fill(Span(self._flush.address, self.extra), 0, self._bound.stream)

        return timed_block(self._bound.stream, [launch] * LAUNCHES, self._clocks, self._flush)


def resampled(series: Sequence[float], slowdown: float, rng: np.random.Generator, trials: int = TRIALS) -> dict[str, int]:
    """How often each verdict falls."""
    values = np.asarray(series)
    most, level = ab.MOST, noise.share(noise.ALPHA, rounds=noise.ROUNDS)
    if len(values) <= most:
        raise InputError("too few pairs to resample", came=len(values), expected=f"more than {most}", do="give it more seconds")
    counts = {PASS: 0, AMBIGUOUS: 0, FAIL: 0}
    for _ in range(trials):
        start, again = rng.integers(0, len(values) - most, 2)
        sign = rng.choice((-1.0, 1.0), most)  # which arm came first is a coin toss, so A/A ratios are symmetric
        stretch = values[start : start + most] * sign + np.log1p(slowdown)
        taken = iter(stretch)
        fresh = values[again : again + most] * rng.choice((-1.0, 1.0), most) + np.log1p(slowdown)
        verdict = ab.decide(lambda n, t=taken: [float(next(t)) for _ in range(n)],  # type: ignore[misc]
                            lambda f=fresh: noise.interval([float(x) for x in f], level))  # type: ignore[misc]
        counts[verdict.verdict] += 1
    return counts


def live(procedure: OnCpu | OnGpu, slowdown: float, trials: int, end: float) -> dict[str, int]:
    """The same with the procedure as it runs, until the trials or the time are used up; once in any case."""
    counts = {PASS: 0, AMBIGUOUS: 0, FAIL: 0}
    for trial in range(trials):
        if trial and time.perf_counter() > end:
            break
        counts[procedure.trial(slowdown).verdict] += 1
    return counts


def characteristic(component: Component, *, case_name: str = "", seconds: float = 60.0) -> dict[str, Any]:
    """Measure the table: about a third of the time for the series, the rest for live trials. `case_name`: by default the first call."""
    start = time.perf_counter()
    on_gpu = family(component) == "cuda"
    case_name = case_name or (timed(component)[0].name if on_gpu else "cache")
    procedure = OnGpu(component, case_name) if on_gpu else OnCpu(component, case_name)
    draw, series = procedure.series(), list[float]()
    while len(series) < SERIES and (time.perf_counter() < start + seconds / 3 or len(series) <= ab.MOST):
        series += draw(50)
    rng = np.random.default_rng(int(fresh_nonce()[:8], 16))
    rows: list[dict[str, object]] = []
    for i, slowdown in enumerate(SLOWDOWNS):
        rows.append(_row("resampled", slowdown, slowdown, resampled(series, slowdown, rng)))
        end = start + seconds / 3 + seconds * 2 / 3 * (i + 1) / len(SLOWDOWNS)
        planted = procedure.planted(slowdown)
        rows.append(_row("live", slowdown, planted, live(procedure, slowdown, LIVE, end)))
    spread = np.asarray(series)
    here = class_here(component) or machine_class()
    on: Mapping[str, object] = {"driver": gpu_environment().get("driver", "")} if on_gpu else {
        "cpu": environment().get("cpu", ""), "block_ns": ab.BLOCK_NS}
    return {"machine": here.key, **on, "component": component.id, "case": case_name,
            "pairs": len(series), "pair_spread": round(float(np.subtract(*np.percentile(spread, [75, 25])) / 1.349), 5),
            "rounds": noise.ROUNDS, "first_round_pairs": noise.PAIRS, "alpha": noise.ALPHA, "table": rows}


def _row(source: str, slowdown: float, planted: float, counts: dict[str, int]) -> dict[str, object]:
    trials = sum(counts.values())
    low, high = noise.wilson(counts[FAIL], trials)
    return {"source": source, "slowdown": slowdown, "planted": round(planted, 4), "trials": trials, "fail": counts[FAIL],
            "ambiguous": counts[AMBIGUOUS], "pass": counts[PASS], "fail_rate": round(counts[FAIL] / trials, 4) if trials else None,
            "fail_interval": [round(low, 4), round(high, 4)]}


def path() -> Path:
    """Where the table is published."""
    return shipped_root().parent / "perf" / "operating.json"


def publish(table: dict[str, object]) -> Path:
    """Write the table of one component; others stay."""
    found: dict[str, object] = json.loads(path().read_text(encoding="utf-8")) if path().is_file() else {}
    found[f"{table['machine']} {table['component']} {table['case']}"] = table
    write_atomic(path(), json.dumps(found, indent=1, sort_keys=True) + "\n")
    return path()
