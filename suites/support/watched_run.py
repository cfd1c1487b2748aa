"""A run of `alpha lab` in this process, with all that it read and made: state around each step, text, gradients, validations, decoding."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from alpha import cli
from alpha.checkpoint import folders
from alpha.profile.store import read
from alpha.train import peak, session
from alpha.train.engine import Executor

Tensors = dict[str, np.ndarray]
Kinds = dict[str, Tensors]
"""Kind of state -> name of tensor -> float32 values."""


@dataclass
class WatchedStep:
    """One step as it ran. `reads`: inputs of each microbatch, in order; `grads`: of the sum of the step's losses."""

    before: Kinds
    reads: list[Tensors] = field(default_factory=list)
    grads: Tensors = field(default_factory=dict)
    after: Kinds = field(default_factory=dict)


@dataclass
class WatchedRun:
    """What a run did. `evals`, `decodes`: (steps done, inputs, outputs) of each call; `metrics`: step -> loss, norm, lr, coefficient;
    `evaluations`: (step, nats, tokens, bytes, windows); `samples`: step -> text; `checkpoints`: step -> kind -> flat array."""

    steps: list[WatchedStep] = field(default_factory=list)
    evals: list[tuple[int, Tensors, Tensors]] = field(default_factory=list)
    decodes: list[tuple[int, Tensors, Tensors]] = field(default_factory=list)
    metrics: dict[int, tuple[float, ...]] = field(default_factory=dict)
    evaluations: list[tuple[Any, ...]] = field(default_factory=list)
    samples: dict[int, str] = field(default_factory=dict)
    checkpoints: dict[int, Tensors] = field(default_factory=dict)
    flat: dict[int, Tensors] = field(default_factory=dict)
    """Steps done -> kind -> the whole array, padding included, as a checkpoint holds it."""


def watched(run_file: Path, folder: Path) -> WatchedRun:
    """Run `run_file`, whose run folder is `folder`, and return what it did. RuntimeError with its words if it does not end well."""
    seen, opened = WatchedRun(), session.open_executor

    def opening(*arguments: Any) -> Executor:
        executor = opened(*arguments)
        _watch(executor, seen)
        return executor

    said = io.StringIO()
    with mock.patch.object(session, "open_executor", opening), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), \
         mock.patch.multiple(peak, REPEATS=1, COPIES=1, COPY_BYTES=1 << 16):
        code = cli.main(["lab", str(run_file)])
    if code:
        raise RuntimeError(f"the run ended with {code}: {said.getvalue()[-2000:]}")
    metrics = folder / "metrics.sqlite"
    seen.metrics = {row[0]: tuple(row[1:]) for row in read(metrics, "step_metrics", "step, loss, norm, lr, coefficient")}
    seen.evaluations = sorted(read(metrics, "evaluations", "step, nats, tokens, bytes, windows"))
    seen.samples = dict(read(metrics, "samples", "step, text"))
    for path in sorted((folder / "checkpoints").glob("step-*")):
        seen.checkpoints[int(path.name[5:])] = {kind: flat for kind, (_, flat) in folders.read(path).items()}
    return seen


def _watch(executor: Executor, seen: WatchedRun) -> None:
    """Look on at every plan that `executor` is handed."""
    program, enqueue, stage = executor.program, executor.enqueue, executor.stage
    kinds = [kind for kind in program.plans["snapshot"].outputs if kind != "counter"]
    last_slot = max(k for k in program.states if k.startswith("grad"))
    staged: dict[tuple[str, ...], list[Tensors]] = {}

    def tensors(kind: str) -> Tensors:
        layout, flat = program.states[kind], executor.look(kind)
        return {t.name: flat[layout.offsets[t.name] : layout.offsets[t.name] + t.size].reshape(t.shape).copy() for t in layout.tensors}

    def state() -> Kinds:
        return {kind: tensors(kind) for kind in kinds}

    def staging(plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]]) -> None:
        staged[plans] = [{name: np.array(x) for name, x in given.items()} for given in inputs]
        stage(plans, inputs)

    def enqueueing(plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]] | None = None) -> None:
        given = staged.pop(plans, []) if inputs is None else [{name: np.array(x) for name, x in i.items()} for i in inputs]
        done = len([s for s in seen.steps if s.after])
        for plan, own in zip(plans, given):
            if plan.startswith("micro"):
                if done == len(seen.steps):
                    seen.steps.append(WatchedStep(before=state()))
                seen.steps[-1].reads.append(own)
        if "update" not in plans:
            enqueue(plans, inputs)
        else:
            seen.steps[-1].grads = {k: v for k, v in tensors(last_slot).items() if not k.startswith("~")}
            enqueue(plans, inputs)
            seen.steps[-1].after = state()
            seen.flat[done + 1] = {kind: executor.look(kind).copy() for kind in (*kinds, "counter")}
        for plan, calls in (("eval", seen.evals), ("decode", seen.decodes)):
            if plan in plans:
                calls.append((done, given[plans.index(plan)], {k: np.array(v) for k, v in executor.outputs(plan).items()}))

    executor.enqueue, executor.stage = enqueueing, staging  # type: ignore[method-assign]
