"""Gates of the GPU over device code that runs on the CPU: emulated_threads.py on the memory of emulated_gpu.py.

What can be emulated is every kernel without tensor cores; the products inside the loss are NumPy's. Half of the launches run blocks and
warps backwards. So what a fault computes shows as on a GPU, and a missing barrier does; what hangs on the time that something takes does
not.

Run as a program (component, gate, folder of kernels, nonce or none): one line of JSON with the verdict. A fault may end the process.
"""

from __future__ import annotations

import ctypes
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from emulated_threads import Host, Launch


def _elements(address: int, rows: int, stride: int, dtype: type) -> np.ndarray:
    """[rows, stride] of memory at an address."""
    raw = (ctypes.c_uint8 * (rows * stride * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(raw, dtype).reshape(rows, stride)


def _bf16(address: int, rows: int, columns: int, stride: int) -> np.ndarray:
    bits = _elements(address, rows, stride, np.uint16)[:, :columns].astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).astype(np.float64)


def product(problem: Any, config: Any, *, a: int, b: int, c: int, rows: int = 0, sums: int = 0,
            factors: int = 0, picks: int = 0, table: int = 0, **more: int) -> Callable[[Any], None]:
    """What stands for kernels.gemm.prepare where the loss calls it: a product in float64, rounded once, and what `problem.rows` says."""
    from emulated_gpu import on

    from alpha.cuda_runtime.device import stream_handle
    from alpha.ops.numerics import round_to

    p = problem
    assert p.batch == 1 and not p.bias and p.activation == "none" and p.aux_input == "none"

    def compute() -> None:
        left = _bf16(a, p.m, p.k, p.row_a) if p.a_major == "k" else _bf16(a, p.k, p.m, p.row_a).T
        right = _bf16(b, p.n, p.k, p.row_b).T if p.b_major == "k" else _bf16(b, p.k, p.n, p.row_b)
        with np.errstate(all="ignore"):
            made = left @ right
            of_rows = _elements(rows, p.m, 1, np.float32).astype(np.float64) if rows else np.ones((1, 1))
            if p.rows == "blend":
                made *= of_rows
                for row, (factor,) in enumerate(_elements(factors, p.m, 1, np.float32)):
                    if factor:
                        made[row] += factor * _bf16(table + 2 * p.n * int(_elements(picks, p.m, 1, np.int32)[row, 0]), 1, p.n, p.n)[0]
            elif p.rows == "powers":
                above = (made - of_rows).astype(np.float16).astype(np.float64)
                made = np.exp(np.where(of_rows == np.inf, -np.inf, np.where(np.isnan(above), np.inf, above)))
                _elements(sums, -(-p.n // config.bn), p.m, np.float32)[...] = [
                    made[:, i : i + config.bn].sum(1) for i in range(0, p.n, config.bn)]
        if p.out == "bf16":
            _elements(c, p.m, p.row_c, np.uint16)[:, : p.n] = round_to(made, "bf16").astype(np.float32).view(np.uint32) >> np.uint32(16)
        else:
            to = _elements(c, p.m, p.row_c, np.float32)[:, : p.n]
            to[...] = made + (to if p.out == "f32+=" else 0.0)

    compute.kernel = "product"  # type: ignore[attr-defined]
    return lambda stream: on(stream_handle(stream), compute)


def kernels_in(component: Any) -> frozenset[str]:
    """Names of the kernels in the sources of a component, by their text."""
    from alpha.backends.cuda.binaries import sources_of
    from alpha.cuda_runtime import compile as nvcc

    paths = {s.path for s in sources_of([component])}
    heads = [h for p in paths for h in (nvcc.KERNELS / p).read_text(encoding="utf-8").split('extern "C" __global__')[1:]]
    return frozenset(re.findall(r"(\w+)\(", h.split("{")[0].replace("__launch_bounds__(", "")) [0] for h in heads) | {"product"}


@contextmanager
def emulated_kernels(kernels: Path, host: Host | None = None) -> Iterator[list[int]]:
    """Within it the wrappers of bandwidth-bound kernels launch what g++ made of the sources in this folder; inside `emulated_gpu`.
    `host`: how they are made, if not as usual. Gives a list: while it holds something, blocks of what is enqueued run in the order of its
    last number, 0 or 1, and else in a drawn one."""
    from emulated_gpu import on
    from emulated_threads import on_threads

    from alpha.backends.cuda.kernels import gemm
    from alpha.cuda_runtime import compile as nvcc
    from alpha.cuda_runtime.device import stream_handle
    from alpha.gates.cuda import replay as cuda_replay

    turns, chosen = random.Random(7), list[int]()

    def call(launch: Launch, stream: Any) -> None:
        order = chosen[-1] if chosen else None

        def late() -> None:
            launch.run(turns.randrange(2) if order is None else order)

        late.kernel = launch.name  # type: ignore[attr-defined]
        on(stream_handle(stream), late)

    with nvcc.compiling(kernels=kernels.resolve()), on_threads(host=host, call=call), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "prepare", product)
        patch.setattr(cuda_replay, "kernels_of", kernels_in)
        yield chosen


def judged(component_id: str, gate: str, kernels: Path, nonce: str | None = None) -> dict[str, Any]:
    """The verdict of a gate over these sources, and its first reasons."""
    from emulated_gpu import emulated_gpu

    from alpha.backends.cuda.kernels import embedding, loss, norm
    from alpha.gates import run, subjects
    from alpha.gates.cuda import determinism as cuda_determinism
    from alpha.gates.cuda import subjects as cuda_subjects
    from alpha.train.catalogue import catalogue

    component = catalogue()[component_id]
    cuda_subjects.opened.cache_clear()
    with pytest.MonkeyPatch.context() as patch, emulated_gpu(), emulated_kernels(kernels):
        patch.setattr(subjects, "component_digests", lambda *a, **k: {"implementation": "emulated"})
        patch.setattr(cuda_determinism, "RUNS", 60)
        patch.setattr(cuda_determinism, "NOISE_BYTES", 1 << 20)
        if gate == "parity":  # a warp takes several groups of ids, as it does of a large table
            patch.setattr(embedding, "WARPS", 4)
        patch.setattr(norm, "WIDTHS", (256, 512, 1016, 2304))  # a thousand fibers take their time over the others
        patch.setattr(loss, "VOCABULARIES", (53, 9001, 25003, 53251))
        patch.setattr(loss, "SIZES", loss.SIZES[:1])
        record, _ = run.measure(component, gate, nonce)
    found = run.judge(record, runs=0)
    return {"verdict": found.verdict, "reasons": [str(r)[:300] for r in found.reasons[:3]], "notes": [
        c["note"] for c in record.cases if "note" in c][:2]}


if __name__ == "__main__":
    repository = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(repository))
    from alpha.train import forbidden

    forbidden.watch_tests([repository / ".alpha" / "emulated"])  # what g++ makes of the device code
    print(json.dumps(judged(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])), flush=True)
