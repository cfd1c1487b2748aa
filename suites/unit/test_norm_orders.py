"""Norm backward on emulated threads in three orders: the same bits as it stands, other bits once a barrier that decides them is gone."""

from __future__ import annotations

import numpy as np
import pytest
from emulated_gpu import bf16_bits
from emulated_threads import ORDERS, Launch, aligned, at, on_threads, placed

from alpha.backends.cuda.kernels import norm
from alpha.cuda_runtime import compile as nvcc
from alpha.gates.adversarial.cuda_plant import overlay
from alpha.gates.sanitize.engine import Plant, plants_of
from alpha.train.catalogue import catalogue

SHAPES = ((37, 256), (24, 264), (37, 264), (37, 1032))
"""Rows and width: a warp to a row, several, rows that are no multiple of the teams'."""
PLANTS = plants_of(catalogue()["layernorm_bwd.bf16.sm90"], "racecheck")


def bits(rows: int, width: int) -> bytes:
    """dx, dgamma and dbeta of LayerNorm, on operands that the shape decides."""
    rng = np.random.default_rng(1)
    x, dy, gamma = (placed(bf16_bits(rng.standard_normal(shape)).astype(np.uint16)) for shape in ((rows, width), (rows, width), width))
    mean, rstd = placed(rng.standard_normal(rows).astype(np.float32)), placed((rng.standard_normal(rows) ** 2 + 0.1).astype(np.float32))
    problem = norm.NormProblem(rows=rows, width=width, kind="layer")
    dx, dgamma, dbeta = aligned((rows, width), np.uint16), aligned(width, np.float32), aligned(width, np.float32)
    partial = aligned(problem.partial_bytes(), np.uint8)
    norm.backward(problem, dy=at(dy), x=at(x), gamma=at(gamma), mean=at(mean), rstd=at(rstd), dx=at(dx), dgamma=at(dgamma), dbeta=at(dbeta),
                  partial=at(partial))()  # fmt: skip
    return dx.tobytes() + dgamma.tobytes() + dbeta.tobytes()


def distinct(plant: Plant | None) -> list[int]:
    """How many different results the orders have, of each of SHAPES."""
    orders: list[int] = []

    def call(launch: Launch, stream: object) -> None:
        launch.run(orders[-1])

    found = []
    with overlay(plant.fault if plant else None) as kernels, nvcc.compiling(kernels=kernels), on_threads(call=call):
        for shape in SHAPES:
            results = set()
            for order in ORDERS:
                orders.append(order)
                results.add(bits(*shape))
            found.append(len(results))
    return found


def test_norm_backward_has_the_same_bits_in_all_orders() -> None:
    assert distinct(None) == [1] * len(SHAPES)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.id)
def test_each_barrier_of_norm_backward_decides_bits(plant: Plant) -> None:
    """Barriers that alpha/gates/sanitize/sanitize.toml takes away: each is needed."""
    assert max(distinct(plant)) > 1
