"""A new op of the GPU is four files edited by hand: its row, its device code, its binder with the calls, its planted faults.

They are written into a copy of the package. Nothing else is edited, and everything finds them: the op table, the catalogue, the list of
compiled files, samples and timed calls, digests, the gates over emulated device code, and the faults that the gates must reject.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path

import warm

from alpha.gates.adversarial import plant

ROOT = Path(__file__).resolve().parents[2]

ROW = '''"""Squared ReLU and its backward. So et al. 2021 (arXiv:2109.08668), section 3: max(x, 0)^2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample, expect, same_dtype
from alpha.types import Attrs, TensorType


def _infer(types: Sequence[TensorType], attrs: Attrs) -> tuple[TensorType, ...]:
    same_dtype("relu2", types)
    expect(len(set(types)) == 1, "relu2", "operands agree", ", ".join(map(str, types)), "equal types")
    return (types[-1],)


def _oracle(x: np.ndarray) -> Arrays:
    positive = np.maximum(x, 0.0)
    return (positive * positive,)


def _oracle_bwd(dy: np.ndarray, x: np.ndarray) -> Arrays:
    return (dy * (2.0 * np.maximum(x, 0.0)),)


def _vjp(emit: Emit, node: NodeLike, dy: Sequence[object]) -> Sequence[object]:
    return (emit("relu2_bwd", dy[0], node.inputs[0]),)


def _samples(rng: np.random.Generator) -> Iterable[Sample]:
    for name, shape in (("one", (1,)), ("ragged", (7, 13)), ("block+1", (3, 2731))):
        yield Sample(name=name, inputs=(rng.standard_normal(shape),), attrs={})


def _samples_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    for sample in _samples(rng):
        yield Sample(name=sample.name, inputs=(rng.standard_normal(sample.inputs[0].shape), *sample.inputs), attrs={})


def _exact(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="integers", inputs=(rng.integers(-9, 9, (5, 11)).astype(float),), attrs={})


def _exact_bwd(rng: np.random.Generator) -> Iterable[Sample]:
    yield Sample(name="integers", inputs=tuple(rng.integers(-9, 9, (2, 5, 11)).astype(float)), attrs={})


ROWS = (
    OpSpec(name="relu2", inputs=("x",), outputs=("y",), infer=_infer, oracle=_oracle, vjp=_vjp, flops=lambda t, a: 2 * t[0].size,
           samples=_samples, exact=_exact),
    OpSpec(name="relu2_bwd", inputs=("dy", "x"), outputs=("dx",), infer=_infer, oracle=_oracle_bwd, vjp=None, why_no_vjp="backward row",
           flops=lambda t, a: 3 * t[0].size, samples=_samples_bwd, exact=_exact_bwd),
)
'''

DEVICE = """// Squared ReLU and its backward, flat: y = max(x, 0)^2, dx = dy 2 max(x, 0).
//
// Compile-time parameter RELU2_BACK 1: the backward.
// Work. A thread takes 8 neighbouring elements; the last elements of a buffer that is no multiple of 8 go one by one. fp32, one rounding.
#include "../common/once.cuh"

constexpr bool BACK = RELU2_BACK;
constexpr int THREADS = 256, N = 8;
using T = vec::Element<false>::type;

struct Problem {
    const T* x;
    const T* dy;
    T* y;
    long long count;
};

__device__ __forceinline__ float apply(float x, float dy) {
    const float positive = x < 0.0f ? 0.0f : x;  // NaN stays
    return BACK ? dy * (2.0f * positive) : positive * positive;
}

extern "C" __global__ void __launch_bounds__(THREADS) relu2(const __grid_constant__ Problem p) {
    const long long whole = p.count / N;
    const long long group = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (group < whole) {
        vec::Group<T, N> x, dy;
        x.load(p.x + group * N);
        if (BACK) dy.load(p.dy + group * N);
        float y[N];
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = apply(x[i], BACK ? dy[i] : 0.0f);
        vec::Group<T, N> out;
        out.set(y);
        vec::store_once(p.y + group * N, out);
    }
    const long long rest = whole * N + threadIdx.x;
    if (blockIdx.x == 0 && rest < p.count) {
        const float dy = BACK ? vec::as_float(p.dy[rest]) : 0.0f;
        p.y[rest] = vec::from_float<T>(apply(vec::as_float(p.x[rest]), dy));
    }
}
"""

BINDER = '''"""Squared ReLU on the GPU, forward and backward (kernels/elementwise/relu2.cu). bf16; every length."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

from alpha.backends.cuda.binaries import Binaries
from alpha.backends.cuda.calls import Calls, bf16, plain
from alpha.backends.cuda.cubins_of import cubins_of
from alpha.backends.cuda.lib import SM90A, Gpu, Operand
from alpha.component import Component, Envelope, Limit
from alpha.backends.cuda.launches import addresses, ceil_div, kernel, launch, structure
from alpha.types import Attrs

THREADS = 256
_Problem = structure("_Problem", "x dy y", ("count", ctypes.c_int64))


def _relu2(back: bool, gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
    x, dy, y, count = ins[-1].address, ins[0].address, outs[0].address, ins[0].type.size
    addresses("relu2", x=x, dy=dy, y=y)
    of = kernel("elementwise/relu2.cu", "relu2", {"RELU2_BACK": int(back)})
    return launch(of, max(1, ceil_div(count // 8, THREADS)), THREADS, _Problem(x, dy, y, count))


def _component(op: str, back: bool) -> Component:
    binder, operands, long = partial(_relu2, back), 1 + back, bf16(32768, 1024)
    return Component(
        id=f"{op}.bf16.sm90", kind="kernel", backend="cuda", op=op, implementation=binder, requires=SM90A,
        binaries=Binaries(cubins_of(op, binder, lambda: [([bf16(64)] * operands, {})])), inplace=((0, 0),),
        calls=Calls(timed=(plain(*[long] * operands),)),
        envelope=Envelope(dtypes=("bf16",), limits=(Limit(text="elements", holds=lambda types, attrs: types[0].size > 0),)))


KERNELS = (_component("relu2", False), _component("relu2_bwd", True))
'''

FAULTS = """# Planted faults in the device code of relu2.py.

[[fault]]
id = "cuda.relu2.rest-skipped"
component = "relu2.bf16.sm90"
gate = "parity"
mirrors = 19
source = "elementwise/relu2.cu"
why = "what is left behind the last whole group is not computed"
find = '''if (blockIdx.x == 0 && rest < p.count) {'''
replace = '''if (blockIdx.x == 0 && rest < whole * N) {'''
"""

WRITTEN = {
    "alpha/ops/relu2.py": ROW,
    "kernels/elementwise/relu2.cu": DEVICE,
    "alpha/backends/cuda/kernels/relu2.py": BINDER,
    "alpha/backends/cuda/kernels/relu2.faults.toml": FAULTS,
}

ASKED = """
import json, sys
from pathlib import Path
sys.path.insert(1, "suites/support")
from emulated_kernels import judged
from alpha.backends.cuda.binaries import sources_of
from alpha.gates import subjects
from alpha.gates.adversarial.cuda_plant import overlay
from alpha.gates.cuda import calls
from alpha.ops.table import table
from alpha.registry import policy
from alpha.registry.digest import Package, component_digests
from alpha.registry.faults import load_faults
from alpha.train import forbidden
from alpha.train.catalogue import catalogue

forbidden.watch_tests([Path.cwd() / ".alpha" / "emulated"])  # what g++ makes of the device code
kernels, nonce = Path(sys.argv[1]), "5a" * 16
package = Package()
package.binaries = lambda c: repr(sources_of([c]))  # what is compiled; the digests of it are printed by the pinned compiler
c, back = (catalogue()[f"{op}.bf16.sm90"] for op in ("relu2", "relu2_bwd"))
planted = [f for f in load_faults() if f.component == c.id]
found = {
    "rows": [n for n in table() if n.startswith("relu2")],
    "kernels": [k.id for k in catalogue() if "relu2" in k.id],
    "sources": [str(s) for s in sources_of([c, back])],
    "cases": len(subjects.cases(c, nonce)),
    "timed": [str(t) for call in calls.timed(c) for t in call.types],
    "owed": list(policy.owed(c)),
    "digests": {g: sorted(component_digests(c, g, package=package)) for g in policy.owed(c)},
    "gates": {f"{k.id} {g}": judged(k.id, g, kernels, nonce)
              for k, gates in ((c, ("parity", "gradient", "determinism", "faults")), (back, ("parity",))) for g in gates},
    "faults": [f.id for f in planted],
}
with overlay(planted[0]) as broken:
    found["broken"] = judged(c.id, planted[0].gate, broken, nonce)
print(json.dumps(found))
"""


def _differ(a: Path, b: Path) -> list[str]:
    """Files that are in one folder alone or differ, relative."""
    def files(root: Path) -> set[str]:
        return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts}

    return sorted(f for f in files(a) | files(b) if not ((a / f).is_file() and (b / f).is_file() and filecmp.cmp(a / f, b / f, False)))


def test_an_op_of_the_gpu_is_four_files(tmp_path: Path) -> None:
    plant.copy_package(tmp_path)
    for name in ("kernels", "suites"):
        (tmp_path / name).unlink()
    for name in ("kernels", "suites/support"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for file, text in WRITTEN.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    edited = [f"{folder}/{f}" for folder in ("alpha", "kernels") for f in _differ(ROOT / folder, tmp_path / folder)]
    assert sorted(edited) == sorted(WRITTEN) and len(edited) == 4
    done = warm.run(["-c", ASKED, tmp_path / "kernels"], cwd=tmp_path, root=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["rows"] == ["relu2", "relu2_bwd"] and found["kernels"] == ["relu2.bf16.sm90", "relu2_bwd.bf16.sm90"]
    assert found["sources"] == ["elementwise/relu2.cu RELU2_BACK=0", "elementwise/relu2.cu RELU2_BACK=1"]
    assert found["cases"] >= 4 and found["timed"] == ["bf16[32768,1024]"]
    assert found["owed"] == ["parity", "gradient", "determinism", "faults", "perf"]
    assert all(names == ["binaries", "cases", "implementation", "measure", "row"] for names in found["digests"].values())
    assert {gate: told["verdict"] for gate, told in found["gates"].items()} == dict.fromkeys(found["gates"], "PASS"), found["gates"]
    assert found["faults"] == ["cuda.relu2.rest-skipped"]
    assert found["broken"]["verdict"] == "FAIL", found["broken"]
