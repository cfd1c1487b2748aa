"""Determinism calls each kernel of the CPU so that workers share its work, if they ever do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from alpha.backends.cpu.workers import Task, Workers
from alpha.gates.cpu.determinism import chosen
from alpha.gates.subjects import bind, fresh_nonce
from alpha.train.catalogue import catalogue

ALONE = {"broadcast_to.f32.cpu": "no sample of it grows; zipped(), as in add, shares it",
         "take_row.f32.cpu": "one indexing call", "take_row_bwd.f32.cpu": "one indexing call", "count_valid.f32.cpu": "one count",
         "norm_of_squares.f32.cpu": "one binary tree over sums of leaves", "fill.f32.cpu": "no sample of it grows; one fill",
         "clip_coefficient.f32.cpu": "scalars", "finite_flag.f32.cpu": "scalars", "learning_rate.f32.cpu": "scalars",
         "next_step.i32.cpu": "scalars"}
"""Kernels of which no case is shared, and why."""


def test_each_kernel_that_shares_its_work_is_repeated_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    handed, alone = list[int](), set[str]()
    run = Workers.run

    def counted(self: Workers, tasks: Sequence[Task]) -> None:
        handed.append(len(tasks))
        run(self, tasks)

    monkeypatch.setattr(Workers, "run", counted)
    kernels = [c for c in catalogue() if c.kind == "kernel" and c.backend == "cpu"]
    assert len(kernels) > 50
    for component in kernels:
        handed.clear()
        for case in chosen(component, fresh_nonce()):
            bound = bind(component, case, workers=3)
            bound.fill(case.arrays())
            bound.run(0)
        if max(handed, default=0) < 2:
            alone.add(component.id)
    assert alone == set(ALONE)
