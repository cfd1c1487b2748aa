"""Norm backward on emulated threads in three orders, as it stands and without each barrier that alpha/gates/sanitize/sanitize.toml takes away: the
same bits in all orders, and other bits in one of them once such a barrier is gone. Needs g++. 0 if so, else 1.

    PYTHONPATH=. python3 kernels/checks/bandwidth/orders.py
"""

import sys

import emu
import numpy as np
from emu_tools import P, put

from alpha.backends.cuda.kernels import norm
from alpha.cuda_runtime import compile as nvcc
from alpha.gates.adversarial.cuda_plant import overlay
from alpha.gates.sanitize.engine import plants_of
from alpha.train.catalogue import catalogue

SHAPES = ((37, 256), (24, 264), (37, 264), (37, 1032))  # norm.PATHS


def bits(rows: int, width: int, order: int) -> bytes:
    """dx, dgamma and dbeta of LayerNorm. Orders: 0 threads and CTAs forwards, 1 warps backwards and one far ahead, 2 CTAs backwards."""
    emu.ORDER = order
    rng = np.random.default_rng(1)
    x, dy, gamma = (put(rng.standard_normal(shape), "bf16") for shape in ((rows, width), (rows, width), width))
    mean, rstd = put(rng.standard_normal(rows), "f32"), put(rng.standard_normal(rows) ** 2 + 0.1, "f32")
    problem = norm.NormProblem(rows=rows, width=width, kind="layer")
    dx, dgamma, dbeta = emu.aligned((rows, width), np.uint16), emu.aligned((width,), np.float32), emu.aligned((width,), np.float32)
    work = emu.Work(problem.partial_bytes())
    norm.backward(problem, dy=P(dy), x=P(x), gamma=P(gamma), mean=P(mean), rstd=P(rstd), dx=P(dx), dgamma=P(dgamma), dbeta=P(dbeta),
                  partial=work.address)()  # fmt: skip
    return dx.tobytes() + dgamma.tobytes() + dbeta.tobytes()


wrong = 0
for plant in (None, *plants_of(catalogue()["layernorm_bwd.bf16.sm90"], "racecheck")):
    emu.CACHE.clear()
    with overlay(plant.fault if plant else None) as kernels, nvcc.compiling(kernels=kernels):
        distinct = [len({bits(*shape, order) for order in range(3)}) for shape in SHAPES]
    good = max(distinct) == 1 if plant is None else max(distinct) > 1
    wrong += not good
    print(f"{'as expected' if good else 'WRONG'}: {plant.id if plant else 'sound'}: "
          + ", ".join(f"{n} different results" if n > 1 else "the same bits" for n in distinct), flush=True)  # fmt: skip
sys.exit(1 if wrong else 0)
