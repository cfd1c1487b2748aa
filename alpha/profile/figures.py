"""Every metric of a run, defined once: formula, unit, target, verdict. Floor 3. Pure functions of numbers and NumPy arrays.

A figure is computed from the stored integers or it is None with the reason; nothing is guessed. Readers hand over a `Facts`; `judge`
turns it into all `Figure`s in the order of DEFINITIONS. Shares are shares of time on the compute stream, summed over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from alpha.errors import InputError
from alpha.profile.kernels import PERTURBED
from alpha.profile.phases import PHASES

PASS, FAIL = "PASS", "FAIL"
KERNELS = ("forward", "backward", "grad_norm", "grad_clip", "optimizer")
"""Phases in which kernels run."""

NOT_STEADY = "no steady step yet: unprofiled and after the warm-up of its session"
NO_PROFILE = "no profiled step"
NO_KERNELS = "not measured: no profiled step in which each kernel was timed"


@dataclass(frozen=True)
class Target:
    """A line that a figure is judged by. `least` True: the figure must be above `value`, else below. `touch`: it may
    equal it."""

    value: float
    least: bool
    touch: bool = False
    source: str = "default"

    def holds(self, value: float) -> bool:
        """Whether a finite value keeps the target."""
        if self.touch and value == self.value:
            return True
        return value > self.value if self.least else value < self.value

    def text(self, unit: str) -> str:
        """Such as '> 90 %'."""
        return f"{'>' if self.least else '<'}{'=' if self.touch else ''} {shown(self.value, unit)}"


@dataclass(frozen=True)
class Definition:
    """What a figure is. `unit`: 'share' (0 to 1), 'FLOP/s', 'tokens/s', 'bytes/s', 's' or 'x'. `most`: a share above it is no figure."""

    key: str
    title: str
    unit: str
    formula: str
    compute: Callable[[Facts], float | str]
    target: Target | None = None
    most: float = math.inf
    above_one: str = ""
    """What a share above 1 means, where it can be true."""
    unjudged: Callable[[Facts], str] = lambda facts: ""
    """Why a value that can be computed is not held against the target; '' where it is."""
    higher_is_better: bool = True


@dataclass(frozen=True)
class Figure:
    """One metric of one run. `value` None: it cannot be computed, `reason` says why. `verdict` None: not judged, `reason` says why."""

    key: str
    title: str
    value: float | None
    unit: str
    formula: str
    target: Target | None
    verdict: str | None
    reason: str

    @property
    def text(self) -> str:
        """The value as every page prints it."""
        return "—" if self.value is None else shown(self.value, self.unit)

    @property
    def target_text(self) -> str:
        """The target as every page prints it; empty when there is none."""
        return "" if self.target is None else self.target.text(self.unit)


@dataclass(frozen=True)
class Facts:
    """What figures are made of. Times in ns; arrays hold one entry a (step, rank) unless another shape is said.

    `why`: set when there is no timing at all (metrics of schema 1, an empty run); then every figure is None with this reason.
    """

    why: str = ""
    backend: str = "cpu"
    devices: float | None = None
    """Of the steady steps: their mean over time where sessions had unlike numbers of devices."""
    flops_per_token: float | None = None
    executed_flops: float | None = None
    """FLOPs that one step executes on all devices, recompute included."""
    peak_flops: float | None = None
    """FLOP/s of one device."""
    peak_bandwidth: float | None = None
    """Bytes/s of one device."""
    steady_tokens: int = 0
    """Tokens of the steady steps."""
    steady_ns: int = 0
    """Sum over steady steps of the slowest rank's step_ns."""
    steady_steps: int = 0
    step_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Unprofiled rows of step_timing; `wall_ns` and `phases` (name -> array, exclusive), `overlapped`, `unexplained_ns`, `steady` alike."""
    steady: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """Whether the row enters rates (bool)."""
    wall_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    phases: Mapping[str, np.ndarray] = field(default_factory=dict)
    overlapped: Mapping[str, np.ndarray] = field(default_factory=dict)
    unexplained_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    useful_ns: int = 0
    """Sum of step_ns - checks_ns over all stored rows, profiled ones included."""
    session_ns: int = 0
    """Sum over sessions and ranks of seen_ns - began_ns."""
    workflow_ns: int = 0
    """Sum over sessions of the longest rank's seen_ns - began_ns."""
    tokens: int = 0
    """Tokens of all stored steps."""
    profiled_ns: int = 0
    """Sum of step_ns over profiled (step, rank) pairs that have a profile."""
    profiled_mean_ns: float | None = None
    """Mean step_ns of profiled steps."""
    steady_mean_ns: float | None = None
    """Mean step_ns of steady (step, rank) pairs."""
    save_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Exclusive checkpoint_ns of the steps from each save with steps behind it to the next one in its session, of each rank. Of a run that
    does not say how often it saves: of each (step, rank) that has some. Of one that copies beside steps of a device: what it measured of a
    save itself (mean)."""
    save_foretold_ns: float | None = None
    """What a save was foretold to add, by the rehearsal of the latest session."""
    op_device_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """One entry a row of op_profile; `op_flops`, `op_nbytes`, `op_enqueue_ns`, `op_wait_ns` alike."""
    op_flops: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    op_nbytes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    op_enqueue_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    op_wait_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    exposed_enqueue_ns: int | None = None
    """Host enqueue time with no stream busy, from the timeline; None when the timeline holds no such step."""
    timeline_ns: int = 0
    """Sum of step_ns of the (step, rank) pairs in the timeline."""
    kernel_step_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """step_ns of the rows of kernel_times; `kernel_busy_ns`, `kernel_idle_ns` alike, and `kernel_slowdown`, a share of the neighbours'
    time, NaN where it has none."""
    kernel_busy_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    kernel_idle_ns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    kernel_slowdown: np.ndarray = field(default_factory=lambda: np.zeros(0))
    kernel_why: str = ""
    """Why no kernel was timed, as the run says it."""


def shown(value: float, unit: str) -> str:
    """A figure as it is printed, with its unit: a share in percent with two decimals, a factor with three, all else with at least four
    significant digits."""
    if unit == "share":
        return f"{value * 100:.2f} %"
    if unit == "x":
        return f"{value:.3f} x"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit in ("FLOP/s", "bytes/s") and abs(value) >= factor:
            return f"{value / factor:.4g} {prefix}{'B/s' if unit == 'bytes/s' else unit}"
    return f"{value:,.{0 if abs(value) >= 10_000 else 1}f} {unit}" if abs(value) >= 100 else f"{value:.4g} {unit}"


def bandwidth_bound(flops: np.ndarray, nbytes: np.ndarray, peak_flops: float, peak_bandwidth: float) -> np.ndarray:
    """Where moving the fewest bytes takes longer than the FLOPs at their peaks (bool, same shape)."""
    return nbytes / peak_bandwidth > flops / peak_flops


def ceiling_ns(flops: np.ndarray, nbytes: np.ndarray, peak_flops: float, peak_bandwidth: float) -> np.ndarray:
    """The roofline: no device is faster than max(flops / peak, bytes / bandwidth); ns, float."""
    return np.maximum(flops / peak_flops, nbytes / peak_bandwidth) * 1e9


# -- the metrics ---------------------------------------------------------------------------------------------------------------


def _tokens_per_second(f: Facts) -> float | str:
    return f.steady_tokens / f.steady_ns * 1e9 if f.steady_ns > 0 else NOT_STEADY


def _per_device(f: Facts) -> float | str:
    rate = _tokens_per_second(f)
    if isinstance(rate, str) or f.devices is None:
        return rate if isinstance(rate, str) else "the run does not say how many devices it used"
    return rate / f.devices


def _workflow(f: Facts) -> float | str:
    return f.tokens / f.workflow_ns * 1e9 if f.workflow_ns > 0 else "no session has lasted any time"


def _achieved(f: Facts) -> float | str:
    rate = _tokens_per_second(f)
    if isinstance(rate, str) or f.flops_per_token is None:
        return rate if isinstance(rate, str) else "the run names no FLOPs per token"
    return rate * f.flops_per_token


def _peaks(f: Facts) -> float | str:
    if f.peak_flops is None or f.devices is None:
        return "the run names no peak FLOP/s" if f.peak_flops is None else "the run does not say how many devices it used"
    return f.peak_flops * f.devices


def _mfu(f: Facts) -> float | str:
    achieved, peak = _achieved(f), _peaks(f)
    if isinstance(achieved, str) or isinstance(peak, str):
        return achieved if isinstance(achieved, str) else peak
    return achieved / peak


def _hfu(f: Facts) -> float | str:
    peak = _peaks(f)
    if f.steady_ns <= 0:
        return NOT_STEADY
    if f.executed_flops is None or isinstance(peak, str):
        return "the run names no executed FLOPs" if f.executed_flops is None else str(peak)
    return f.executed_flops * f.steady_steps / f.steady_ns * 1e9 / peak


def _bandwidth(f: Facts, bound_only: bool) -> float | str:
    if not len(f.op_device_ns):
        return NO_PROFILE
    if f.peak_bandwidth is None or f.peak_flops is None:
        return "the run names no peak bandwidth"
    chosen = np.ones(len(f.op_device_ns), bool)
    if bound_only:
        chosen = bandwidth_bound(f.op_flops, f.op_nbytes, f.peak_flops, f.peak_bandwidth)
    device = int(f.op_device_ns[chosen].sum())
    if device <= 0:
        return "no launch is bound by bandwidth" if bound_only else "the profile holds no device time"
    return int(f.op_nbytes[chosen].sum()) / device * 1e9 / f.peak_bandwidth


def _launch_overhead(f: Facts) -> float | str:
    if f.backend == "cpu":
        if f.profiled_ns <= 0:
            return NO_PROFILE
        return (int(f.op_enqueue_ns.sum()) + int(f.op_wait_ns.sum())) / f.profiled_ns
    if f.exposed_enqueue_ns is None or f.timeline_ns <= 0:
        return "no profiled step with a timeline of the host and its streams"
    return f.exposed_enqueue_ns / f.timeline_ns


def _share(*names: str) -> Callable[[Facts], float | str]:
    def compute(f: Facts) -> float | str:
        whole = int(f.step_ns.sum())
        return sum(int(f.phases[n].sum()) for n in names) / whole if whole > 0 else "no unprofiled step"

    return compute


def _of_kernels(column: str, phases: tuple[str, ...]) -> Callable[[Facts], float | str]:
    """On a device from the times of its kernels; elsewhere from these phases, in which launches are what runs."""
    shares = _share(*phases)

    def compute(f: Facts) -> float | str:
        if f.backend == "cpu":
            return shares(f)
        if not len(f.kernel_step_ns):
            return f.kernel_why or NO_KERNELS
        sound = _sound(f)
        chosen = sound if sound.any() else np.ones(len(sound), bool)
        whole = int(f.kernel_step_ns[chosen].sum())
        return int(getattr(f, column)[chosen].sum()) / whole if whole > 0 else "the profiled steps took no time"

    return compute


def _sound(f: Facts) -> np.ndarray:
    """Which profiled steps the instrument hardly slowed down (bool)."""
    return np.asarray(f.kernel_slowdown <= PERTURBED)


def _perturbed(f: Facts) -> str:
    if f.backend == "cpu" or not len(f.kernel_slowdown) or _sound(f).any():
        return ""
    known = f.kernel_slowdown[~np.isnan(f.kernel_slowdown)]
    if not len(known):
        return "not judged: the profiled steps have too few steady neighbours to say how much the instrument slowed them down"
    return (f"perturbed, not judged: the instrument slowed the profiled steps down by {shown(float(known.min()), 'share')} or more, "
            f"above {shown(PERTURBED, 'share')}")


def _communication(hidden: bool) -> Callable[[Facts], float | str]:
    """Of steady steps: in the first steps of a session ranks wait for the one that sets up slowest, which no step repeats. What ranks
    exchange between two steps counts too, so a share is of the interval until the rank's own next step: what is exposed is at most 1."""
    def compute(f: Facts) -> float | str:
        if f.devices == 1:
            return "not measured: one device has nothing to communicate with"
        own = f.wall_ns - sum(f.phases[name] for name in _WHOLE)
        whole, comm = int(own[f.steady].sum()), f.phases["comm"] + hidden * f.overlapped["comm"]
        return int(comm[f.steady].sum()) / whole if whole > 0 else NOT_STEADY

    return compute


def _unexplained(f: Facts) -> float | str:
    whole = int(f.wall_ns.sum())
    return int(f.unexplained_ns.sum()) / whole if whole > 0 else "no unprofiled step"


def _goodput(f: Facts) -> float | str:
    return f.useful_ns / f.session_ns if f.session_ns > 0 else "no session has lasted any time"


def _save_stall(f: Facts) -> float | str:
    if not len(f.save_ns) or f.steady_mean_ns is None:
        return "no save has a step behind it" if not len(f.save_ns) else NOT_STEADY
    return float(np.median(f.save_ns)) / f.steady_mean_ns


def _foretold(f: Facts) -> float | str:
    if f.save_foretold_ns is None or f.steady_mean_ns is None:
        return "no save was rehearsed: none has a step behind it, or the release foretold none" if f.steady_mean_ns else NOT_STEADY
    return f.save_foretold_ns / f.steady_mean_ns


def _slowdown(f: Facts) -> float | str:
    if f.profiled_mean_ns is None or f.steady_mean_ns is None:
        return NO_PROFILE if f.profiled_mean_ns is None else NOT_STEADY
    return f.profiled_mean_ns / f.steady_mean_ns - 1.0


_CACHED = "more than the peak that copies reach: operands stayed in a cache"
_STEADY = "steady steps (unprofiled, without the first 3 of each session)"
_UNPROFILED = "unprofiled steps"
_WHOLE = ("eval", "sample_gen", "checkpoint")
"""Phases of an interval that are no part of a step, and hold no communication of it (alpha/profile/recorder.py)."""
_INTERVAL = f"(wall_ns - {' - '.join(_WHOLE)})"
_TIMED = (f"profiled steps in which each kernel was timed and that took at most {PERTURBED * 100:g} % longer than the median of their "
          "steady neighbours; where there are none, all of them, not judged")
DEFINITIONS: tuple[Definition, ...] = (
    Definition("tokens_per_second", "Throughput, steady state", "tokens/s", f"tokens / slowest rank's step_ns, summed over {_STEADY}",
               _tokens_per_second),
    Definition("tokens_per_second_device", "Throughput per device, steady state", "tokens/s", "steady-state throughput / devices",
               _per_device),
    Definition("workflow_tokens_per_second", "Throughput, whole workflow", "tokens/s",
               "tokens of all stored steps / wall time of all sessions (set-up, evaluation, checkpoints and stalls included)", _workflow),
    Definition("achieved_flops", "Achieved model FLOP/s", "FLOP/s", "FLOPs per token of the FLOPS model x steady-state throughput",
               _achieved),
    Definition("mfu", "MFU", "share", "achieved model FLOP/s / (peak FLOP/s of a device x devices)", _mfu, most=1.0),
    Definition("hfu", "HFU", "share", f"FLOPs executed by a step / step_ns / (peak FLOP/s of a device x devices), {_STEADY}", _hfu,
               most=1.0),
    Definition("kernel_active", "Kernel-active share", "share",
               f"CPU: (forward + backward + grad_norm + grad_clip + optimizer) / step_ns, {_UNPROFILED}; GPU: time in which a kernel "
               f"runs / step_ns, {_TIMED}", _of_kernels("kernel_busy_ns", KERNELS), Target(0.90, True), most=1.0, unjudged=_perturbed),
    Definition("bubble", "Bubble ratio", "share",
               f"CPU: idle / step_ns, {_UNPROFILED}; GPU: time in which neither kernel, copy nor time stamp runs / step_ns, {_TIMED}",
               _of_kernels("kernel_idle_ns", ("idle",)), Target(0.10, False), higher_is_better=False, unjudged=_perturbed),
    Definition("comm_exposed", "Communication, exposed", "share", f"comm on the compute stream / {_INTERVAL}, {_STEADY}",
               _communication(False), Target(0.15, False), higher_is_better=False),
    Definition("comm_total", "Communication, total", "share", f"(exposed + overlapped comm) / {_INTERVAL}, {_STEADY}",
               _communication(True), higher_is_better=False),
    Definition("bandwidth_bound", "Bandwidth utilisation where bandwidth-bound", "share",
               "fewest bytes / device time / peak bandwidth, over profiled launches with bytes / peak bandwidth > FLOPs / peak FLOP/s",
               lambda f: _bandwidth(f, True), Target(0.60, True), above_one=_CACHED),
    Definition("bandwidth", "Bandwidth utilisation, all launches", "share",
               "fewest bytes / device time / peak bandwidth, profiled launches", lambda f: _bandwidth(f, False),
               above_one=_CACHED),
    Definition("launch_overhead", "Launch-overhead share", "share",
               "CPU: (enqueue + wait of all launches) / step_ns of profiled steps; GPU: host enqueue while no stream is busy / step_ns",
               _launch_overhead, higher_is_better=False, unjudged=_perturbed),
    Definition("goodput", "Goodput", "share", "(step_ns - checks_ns) of all stored steps / wall time of all sessions", _goodput, most=1.0),
    Definition("save_stall", "Stall per save, of a mean step", "share",
               f"over saves with steps behind them, CPU: median of checkpoint_ns until the next save (copying, waiting for the disk); GPU: "
               f"mean of what the run measured that they add / mean step_ns, {_STEADY}", _save_stall, higher_is_better=False),
    Definition("save_stall_foretold", "Stall per save, foretold", "share",
               f"what a save took that was rehearsed before the first step / mean step_ns, {_STEADY}", _foretold, higher_is_better=False),
    Definition("unexplained", "Unexplained time", "share", f"(wall_ns - all phases) / wall_ns, {_UNPROFILED}", _unexplained,
               Target(0.01, False, touch=True), higher_is_better=False),
    Definition("instrumented_slowdown", "Slowdown of a profiled step", "share", "mean step_ns of profiled steps / that of steady steps - 1",
               _slowdown, higher_is_better=False),
)
BY_KEY: dict[str, Definition] = {d.key: d for d in DEFINITIONS}


def targets(own: Mapping[str, float], source: str) -> dict[str, Target]:
    """A run's own targets: key of a figure -> line. InputError for a key that no figure has."""
    made = {}
    for key, value in own.items():
        if key not in BY_KEY:
            raise InputError("no figure has this name", came=key, expected=", ".join(BY_KEY), do="name one of these")
        if not math.isfinite(value):
            raise InputError("a target is a number", came=f"{key} = {value}", expected="a finite number")
        d = BY_KEY[key]
        made[key] = Target(value, d.higher_is_better, True if d.target is None else d.target.touch, source)
    return made


def judge(facts: Facts, own: Mapping[str, Target] | None = None) -> list[Figure]:
    """All figures of a run in the order of DEFINITIONS. `own` replaces default targets."""
    return [_figure(d, facts, {**({d.key: d.target} if d.target else {}), **(own or {})}.get(d.key)) for d in DEFINITIONS]


def _figure(d: Definition, facts: Facts, target: Target | None) -> Figure:
    came = facts.why or d.compute(facts)
    if not isinstance(came, str) and not math.isfinite(came):
        came = f"the stored numbers give {came}"
    elif not isinstance(came, str) and came > d.most:
        came = f"the stored numbers give {shown(came, d.unit)}, more than there is: the peak was measured too low, or the rows are wrong"
    if isinstance(came, str):
        return Figure(d.key, d.title, None, d.unit, d.formula, target, None, came)
    remark = d.above_one if came > 1.0 else ""
    if target is None:
        return Figure(d.key, d.title, float(came), d.unit, d.formula, None, None, remark or "no target")
    if why := d.unjudged(facts):
        return Figure(d.key, d.title, float(came), d.unit, d.formula, target, None, why)
    return Figure(d.key, d.title, float(came), d.unit, d.formula, target, PASS if target.holds(came) else FAIL, remark)


assert set(KERNELS) <= set(PHASES)
