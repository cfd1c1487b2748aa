"""Update graphs: gradients of the summed loss in, new parameters and moments out, predicated on `finite`. Floor 5."""

from __future__ import annotations

from dataclasses import dataclass

from alpha.graph.ir import Value
from alpha.graph.trace import Tracer
from alpha.optim.schedules import ScheduleConfig, rates
from alpha.passes.build import FlatState, Optimizer


@dataclass(frozen=True)
class _Scalars:
    """Numbers of one update. `used`: the step that moments are corrected by; `following`: the step after."""

    coefficient: Value
    lr: Value
    finite: Value
    used: Value
    following: Value


def _scalars(t: Tracer, s: FlatState, schedule: ScheduleConfig, max_norm: float) -> _Scalars:
    """The numbers, with the outputs that a step reports."""
    if s.sums is None:
        (whole,) = s.parts
        _, mean_norm, coefficient, finite, lr, used, following = t.update_scalars(
            whole.grad, s.count, s.loss_sum, s.step, segments=s.runs, max_norm=max_norm, rates=rates(schedule))
    elif s.one_row:
        _, mean_norm, coefficient, finite, lr, used, following = t.scalars_of_squares(
            s.sums, s.count, s.loss_sum, s.step, max_norm=max_norm, rates=rates(schedule))
    else:
        norm = t.norm_of_squares(s.sums)
        coefficient, mean_norm = t.clip_coefficient(norm, s.count, max_norm=max_norm)
        finite = t.finite_flag(norm, s.loss_sum)
        lr, used = t.learning_rate(s.step, rates=rates(schedule))
        following = t.next_step(s.step, finite)
    for name, value in (("norm", mean_norm), ("coefficient", coefficient), ("lr", lr), ("finite", finite),
                        ("loss_sum", s.loss_sum), ("count", s.count)):
        t.output(name, value)
    return _Scalars(coefficient, lr, finite, used, following)


def adamw(schedule: ScheduleConfig, *, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8, weight_decay: float = 0.1,
          max_norm: float = 1.0) -> Optimizer:
    """AdamW with decoupled decay (Loshchilov and Hutter, arXiv:1711.05101), none on norms and biases. State: m, v."""

    def update(t: Tracer, s: FlatState) -> None:
        x = _scalars(t, s, schedule, max_norm)
        for part in s.parts:
            t.layer = part.layer
            copy = () if part.param16 is None else (part.param16,)
            p, m, v, *narrow = t.adamw(part.param, part.grad, part.extra["m"], part.extra["v"], x.coefficient, x.lr, x.used, x.finite,
                                       *copy, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, segments=part.segments)
            t.update(part.param, p)
            t.update(part.extra["m"], m)
            t.update(part.extra["v"], v)
            for box, value in zip(copy, narrow, strict=True):
                t.update(box, value)
        t.update(s.step, x.following)

    return Optimizer(name="adamw", kinds=("m", "v"), update=update)


def sgd(schedule: ScheduleConfig, *, momentum: float = 0.9, weight_decay: float = 0.0, max_norm: float = 1.0) -> Optimizer:
    """SGD with momentum (Polyak 1964, as heavy ball) and decoupled decay. State: velocity."""

    def update(t: Tracer, s: FlatState) -> None:
        x = _scalars(t, s, schedule, max_norm)
        for part in s.parts:
            t.layer = part.layer
            p, velocity = t.sgd(part.param, part.grad, part.extra["velocity"], x.coefficient, x.lr, x.finite, momentum=momentum,
                                weight_decay=weight_decay, segments=part.segments)
            t.update(part.param, p)
            t.update(part.extra["velocity"], velocity)
            if part.param16 is not None:
                t.update(part.param16, t.cast(p, dtype="bf16"))
        t.update(s.step, x.following)

    return Optimizer(name="sgd", kinds=("velocity",), update=update)
