"""Cases of the optimizers: updates against the papers' algorithm boxes in float64, every setting drawn; that they learn. Floor 7."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import cos, pi, sqrt
from typing import Any

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.component import Measured
from alpha.gates.contracts import edges
from alpha.gates.contracts.executor import bad_step_harmless
from alpha.gates.contracts.mixed import merged
from alpha.gates.contracts.reference import batches_of, evaluate, hash_of, kernels, load_initial, program, references, run_step
from alpha.graph.ir import Value
from alpha.graph.state import Init, StateLayout
from alpha.graph.trace import Tracer
from alpha.optim.schedules import ScheduleConfig
from alpha.optim.update import adamw, sgd
from alpha.passes.build import STATS, Model, StepShape, build_program, stats_layout, trace_training, update_graph

Arrays = dict[str, np.ndarray]
Case = Callable[[np.random.Generator], Measured]

SETTINGS, SIZES = 4, ((-3, -1), (1, 2), (-3, 2))
"""Draws of settings; powers of ten of the gradients of the updates that follow each other in one. The second is clipped where one clips."""


def _model(rng: np.random.Generator) -> Model:
    """Tensors of drawn sizes, some of which decay, under learning rates of their own. Their loss is the sum of all squares."""
    tensors = [((int(rng.integers(1, 40)), int(rng.integers(1, 9)))[: 1 + i % 2], bool(i & 2), float(2.0 ** rng.uniform(-2, 2)))
               for i in range(5)]

    def loss(t: Tracer, training: bool) -> tuple[Value, Value]:
        total = t.fill(shape=(), value=0.0, dtype="f32")
        for i, (shape, decay, scale) in enumerate(tensors):
            with t.unit(f"unit.{i // 2}"):
                p = t.param(f"p{i}", shape, Init("normal", 0.02), decay=decay, lr_scale=scale)
            total = t.add(total, t.sum(t.mul(p, p), axis=tuple(range(len(shape))), keepdims=False))
        return total, t.fill(shape=(), value=1.0, dtype="f32")

    return Model(name="squares", loss=loss)


def _rate(s: ScheduleConfig, step: int) -> float:
    """Line up, then half a cosine or a plateau with a line down: alpha/optim/schedules.py names the papers. It stays at its last value."""
    if step < s.warmup:
        return s.peak * (step + 1) / s.warmup
    step = min(step, s.total)
    if s.kind == "cosine":
        return s.peak * (s.floor + (1 - s.floor) * 0.5 * (1 + cos(pi * (step - s.warmup) / (s.total - s.warmup))))
    return s.peak * (1 - (1 - s.floor) * max(0.0, (step - s.total + s.decay) / s.decay))


def _drawn(rng: np.random.Generator, number: int) -> tuple[ScheduleConfig, dict[str, float]]:
    """A schedule and the settings of both optimizers. Schedules take turns; one draw does not clip, one has no momentum."""
    warmup, span = int(rng.integers(0, 5)), int(rng.integers(2, 12))
    kind = ("cosine", "wsd")[number % 2]
    schedule = ScheduleConfig(kind=kind, peak=float(10 ** rng.uniform(-4, -1)), warmup=warmup, total=warmup + span,
                              decay=int(rng.integers(1, span + 1)) if kind == "wsd" else 0, floor=float(rng.uniform(0.0, 0.9)))
    return schedule, {"beta1": float(rng.uniform(0, 0.99)), "beta2": float(rng.uniform(0.5, 0.9999)),
                      "eps": float(10 ** rng.uniform(-9, -2)),
                      "momentum": float(rng.uniform(0, 0.99)) if number != 1 else 0.0, "weight_decay": float(rng.uniform(0, 2)),
                      "max_norm": (float(10 ** rng.uniform(-3, 0)), float(rng.uniform(1.5, 3)))[number % 2] if number != 2 else 0.0}


def _update(name: str, o: dict[str, float], old: Arrays, g: np.ndarray, lr: float, decay: float, step: int) -> tuple[Arrays, Arrays]:
    """Kind of state -> values after one update, and how far float32 may be from each: roundings counted in units u of the absolute terms (a
    moment: factors, two products, a sum; the quotient and its corrections: 14; the decay: 6), doubled for all of second order."""
    u, p = 2.0**-24, old["param"]
    if name == "adamw":
        m, size = o["beta1"] * old["m"] + (1 - o["beta1"]) * g, o["beta1"] * abs(old["m"]) + (1 - o["beta1"]) * abs(g)
        v = o["beta2"] * old["v"] + (1 - o["beta2"]) * g * g
        per = 1 / (1 - o["beta1"] ** (step + 1)) / (np.sqrt(v / (1 - o["beta2"] ** (step + 1))) + o["eps"])
        new, off = {"m": m, "v": v, "param": p - lr * (m * per + decay * p)}, {"m": 8 * u * size, "v": 12 * u * v}
        size = size * per
    else:
        velocity, size = o["momentum"] * old["velocity"] + g, o["momentum"] * abs(old["velocity"]) + abs(g)
        new, off = {"velocity": velocity, "param": p - lr * (velocity + decay * p)}, {"velocity": 6 * u * size}
    off["param"] = 2 * u * (abs(p) + lr * (14 * size + 6 * decay * abs(p)))
    return new, off


def textbook(name: str) -> Callable[[np.random.Generator], Measured]:
    """Each update starts from the state that the one before left. The error is the largest share of what rounding may do; inf where the
    rate, the norm or the clip is another, where padding moved, or where a step that is not finite counts."""
    def check(rng: np.random.Generator) -> Measured:
        worst = 0.0
        for number in range(SETTINGS):
            schedule, o = _drawn(rng, number)
            own = {"adamw": ("beta1", "beta2", "eps"), "sgd": ("momentum",)}[name]
            made: Any = {"adamw": adamw, "sgd": sgd}[name]
            p = build_program(name="squares", model=_model(rng), catalogue=kernels(), threads=2, shape=StepShape(micro_batch=1, seq=1),
                              optimizer=made(schedule, weight_decay=o["weight_decay"], max_norm=o["max_norm"], **{k: o[k] for k in own}))
            layout, kinds = p.states["param"], [k for k in p.plans["snapshot"].outputs if k != "counter"]
            with CpuExecutor(p, kernels()) as executor:
                for kind in kinds:
                    for at, n in layout.ranges():
                        executor.state(kind)[at : at + n] = abs(rng.standard_normal(n)) if kind == "v" else rng.standard_normal(n)
                first = int(rng.integers(schedule.total + 2))
                executor.state("counter")[0] = first
                for step, size in enumerate(SIZES, first):
                    grads = executor.state("grad0")
                    grads[...] = (rng.standard_normal(grads.size) * 10 ** rng.uniform(*size)).astype(np.float32)
                    worst = max(worst, _one(name, o, schedule, executor, layout, kinds, step, float(rng.integers(1, 30))))
        return Measured(error=worst, bound=1.0, cases=SETTINGS * len(SIZES), note="largest share of what rounding may do to an element")
    return check


def one_row(name: str) -> Callable[[np.random.Generator], Measured]:
    """The update whose scalars come from the one row update_scalars, as a GPU runs it, does what the rows do that it stands for: under the
    oracles, whose sums of squares run in another order."""
    def check(rng: np.random.Generator) -> Measured:
        worst = 0.0
        for number in range(SETTINGS):
            schedule, o = _drawn(rng, number)
            made: Any = {"adamw": partial(adamw, beta1=o["beta1"], beta2=o["beta2"], eps=o["eps"]),
                         "sgd": partial(sgd, momentum=o["momentum"])}
            optimizer = made[name](schedule, weight_decay=o["weight_decay"], max_norm=o["max_norm"])
            params = StateLayout(trace_training(_model(rng), None, "shapes", None, False)[0].tensors.values())
            totals = stats_layout(params)
            state = {kind: abs(rng.standard_normal(totals.size)) for kind in ("param", "grad0", *optimizer.kinds)}
            state["grad0"][totals.offsets[f"{STATS}.count"]] = float(rng.integers(1, 30))
            state["counter"] = rng.integers(0, schedule.total, 64).astype(np.int32)
            apart, together = ([x for found in evaluate(update_graph(optimizer, params, 0, one_row=one), {}, state) for x in found.values()]
                               for one in (False, True))
            for a, b in zip(apart, together, strict=True):
                share = abs(np.asarray(a, np.float64) - b) / np.maximum(abs(np.asarray(a, np.float64)), 1e-300)
                worst = max(worst, float(share.max(initial=0.0)) if np.isfinite(share).all() else float("inf"))
        return Measured(error=worst, bound=1e-10, cases=SETTINGS, note="relative to each element")
    return check


def loss_alone(name: str) -> Callable[[np.random.Generator], Measured]:
    """A step whose loss alone is not finite counts as none: the state keeps every value, whichever rows make the scalars. A count of
    tokens does not decide that."""
    def check(rng: np.random.Generator) -> Measured:
        made: Any = {"adamw": adamw, "sgd": sgd}[name]
        wrong = cases = 0
        for loss in (float("nan"), float("inf"), -float("inf"), 3.0):
            schedule, _ = _drawn(rng, 0)
            optimizer = made(schedule)
            params = StateLayout(trace_training(_model(rng), None, "shapes", None, False)[0].tensors.values())
            totals = stats_layout(params)
            for one in (False, True):
                state = {kind: abs(rng.standard_normal(totals.size)) for kind in ("param", "grad0", *optimizer.kinds)}
                state["grad0"][totals.offsets[f"{STATS}.count"]] = 7.0
                state["grad0"][totals.offsets[f"{STATS}.loss_sum"]] = loss
                state["counter"] = rng.integers(0, schedule.total, 64).astype(np.int32)
                out, updates = evaluate(update_graph(optimizer, params, 0, one_row=one), {}, state)
                same = [np.array_equal(x.reshape(-1), state[kind][at : at + np.size(x)]) for (kind, at), x in updates.items()]
                wrong += bool(out["finite"]) != (loss == 3.0) or (all(same) if loss == 3.0 else not all(same))
                cases += 1
        return Measured(error=float(wrong), bound=0.0, cases=cases, note="updates that go by something else than the loss")
    return check


def _one(name: str, o: dict[str, float], schedule: ScheduleConfig, executor: CpuExecutor, layout: StateLayout, kinds: list[str], step: int,
         count: float) -> float:  # fmt: skip
    """One update by the gradient that lies in `grad0`, of `count` tokens; see `textbook`."""
    grads, totals = executor.state("grad0"), executor.program.states["grad0"].offsets
    grads[totals[f"{STATS}.count"]] = count
    before = {kind: executor.state(kind).astype(np.float64) for kind in kinds}
    parts = {t.name: slice(layout.offsets[t.name], layout.offsets[t.name] + t.size) for t in layout.tensors}
    g = grads[: layout.size].astype(np.float64)
    norm = sqrt(sum(float(g[at] @ g[at]) for at in parts.values())) / count
    coefficient = (min(1.0, o["max_norm"] / norm) if o["max_norm"] else 1.0) / count
    rate = float(np.float32(_rate(schedule, step)))
    out = executor.run("update")
    near = 2.0**-24 * (sum(t.size for t in layout.tensors) / 2 + 8)  # a sum of squares in any order, its root and three quotients
    told = (("norm", norm, near), ("coefficient", coefficient, near), ("lr", rate, 2.0**-23))
    if not all(abs(float(out[k]) - due) <= off * abs(due) for k, due, off in told) or int(executor.state("counter")[0]) != step + 1:
        return float("inf")
    worst, padding = 0.0, np.ones(layout.size, bool)
    for t in layout.tensors:
        at = parts[t.name]
        padding[at] = False
        new, off = _update(name, o, {k: x[at] for k, x in before.items()}, g[at] * float(out["coefficient"]), float(out["lr"]) * t.lr_scale,
                           o["weight_decay"] * t.decay, step)
        for kind in kinds:
            share = abs(executor.state(kind)[at] - new[kind]) / (off[kind] + np.finfo(np.float32).tiny)
            worst = max(worst, float(share.max()) if np.isfinite(share).all() else float("inf"))
    return worst if not any(executor.state(kind)[padding].any() for kind in kinds) else float("inf")


def _optimizer_digest(name: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        p = program("llama", optimizer=name)
        with CpuExecutor(p, kernels()) as executor:
            load_initial(executor, references()["llama"], 9)
            b = batches_of(references()["llama"], rng, 1, 1)
            for _ in range(2):
                run_step(executor, p, b)
            return Measured(error=0.0, bound=0.0, digest=hash_of(executor.state("param")))
    return check


def _learns(name: str) -> Case:
    def check(rng: np.random.Generator) -> Measured:
        """Twenty steps on one batch lower its loss."""
        ref = references()["llama"]
        p = program("llama", optimizer=name)
        b = batches_of(ref, rng, 1, 1)
        with CpuExecutor(p, kernels()) as executor:
            load_initial(executor, ref, 10)
            losses = [float(run_step(executor, p, b)["loss_sum"]) for _ in range(20)]
        return Measured(error=losses[-1] / losses[0], bound=0.9, cases=20, note="last loss over first")
    return check


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = merged({
    "optimizer.adamw": {"parity": [("textbook", textbook("adamw")), ("one-row", one_row("adamw")), ("learns", _learns("adamw")),
                                   ("loss-alone", loss_alone("adamw"))],
                        "determinism": [("bits", _optimizer_digest("adamw"))],
                        "faults": [("bad-step", lambda rng: bad_step_harmless(references()["llama"], rng)), ("initial", edges.initial)]},
    "optimizer.sgd": {"parity": [("textbook", textbook("sgd")), ("one-row", one_row("sgd")), ("learns", _learns("sgd")),
                                   ("loss-alone", loss_alone("sgd"))],
                      "determinism": [("bits", _optimizer_digest("sgd"))],
                      "faults": [("bad-step", lambda rng: bad_step_harmless(references()["gpt"], rng))]},
})
