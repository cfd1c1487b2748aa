"""Planted faults in device code, as far as a machine without a GPU can see: each compiles to another cubin, and those of kernels without
tensor cores are rejected by the gate that they name, run over device code that is emulated (emulated_kernels.py).

A few are drawn afresh each time; `--all`: every one.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from emulated_gpu import bf16_bits, emulated_gpu
from emulated_kernels import emulated_kernels
from emulated_threads import at, on_threads, placed
from host_library import host_compiler
from planted import planted

import alpha
from alpha.backends.cuda import launches
from alpha.backends.cuda.binaries import sources_of
from alpha.backends.cuda.kernels import loss
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime import toolchain
from alpha.cuda_runtime.compile import Source
from alpha.errors import MachineError
from alpha.gates import run, subjects
from alpha.gates.adversarial import cuda_plant
from alpha.gates.cuda import subjects as cuda_subjects
from alpha.registry.faults import Fault
from alpha.registry.gates import measured_by
from alpha.registry.judge import FAIL, PASS
from alpha.registry.package import symbol_digest
from alpha.train.catalogue import catalogue

SUPPORT = Path(__file__).parents[1] / "support"
FAULTS = [f for f in planted() if f.source]
ON_TENSOR_CORES = ("attention", "matmul", "linear_gelu", "linear_swiglu")
SOUND = "5a" * 16
"""The nonce of the unbroken runs. With others a sample of one element now and then has no power by itself, and parity says so."""

TIMED = {
    "cuda.columns.second-pass-early": "launches follow one another here",
    "cuda.embedding-bwd.slot-by-store": "threads take turns here",
}
"""Faults that show by the time that something takes, which a GPU alone has."""

EMULATED = [f for f in FAULTS if not f.component.startswith((*ON_TENSOR_CORES, "executor.")) and f.gate != "perf" and f.id not in TIMED
            and not f.id.startswith("cuda.collectives.")]  # among several GPUs: test_device_collectives.py
WIDE = ["rmsnorm.bf16.sm90", "add_layernorm.bf16.sm90", "rope_packed.bf16.sm90", "embedding.bf16.sm90", "embedding_add.bf16.sm90",
        "take_row.bf16.sm90", "dropout.bf16.sm90", "cast.f32.sm90", "cast.bf16.sm90"]
SLOW = ["rmsnorm_bwd.bf16.sm90", "layernorm_bwd_add.bf16.sm90", "embedding_bwd.bf16.sm90", "linear_cross_entropy.bf16.sm90",
        "linear_cross_entropy_grad.bf16.sm90"]
"""With --all only: a minute each."""
TRIES = 3
"""Of a fault whose gate draws its samples anew each time."""


def drawn(config: pytest.Config, seed: int, among: list[Any], n: int, purpose: str) -> list[Any]:
    """`n` of them by the session's seed; all with --all."""
    return among if config.getoption("--all") else random.Random(f"{seed} {purpose}").sample(among, n)


def test_the_list_of_faults_is_spread_over_the_families() -> None:
    assert len({f.id for f in FAULTS}) == len(FAULTS) >= 90
    assert {f.source.split("/")[0] for f in FAULTS} == {"attention", "collectives", "common", "elementwise", "embedding", "gemm", "loss",
                                                       "norm", "optimizer", "profile", "rope"}
    one_gpu = {*range(1, 22), *range(23, 33), 35, *range(36, 43), 54, 62, 65, *range(69, 75), 80, 83, 85}
    assert one_gpu - {39} <= {f.mirrors for f in FAULTS}, "39 shows at no run: cuda_lint.toml"
    assert set(TIMED) <= {f.id for f in FAULTS}


def _judged(component: str, gate: str, kernels: Path, *nonce: str) -> dict[str, Any]:
    host_compiler()
    done = warm.run([SUPPORT / "emulated_kernels.py", component, gate, kernels, *nonce], timeout=240)
    lines = done.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        return dict(json.loads(lines[-1]))
    return {"verdict": f"ended with {done.returncode}", "reasons": [done.stderr[-300:]], "notes": []}


def test_faults_are_rejected_over_emulated_device_code(pytestconfig: pytest.Config, seed: int) -> None:
    """Beside each its unbroken kernels, which pass, or its rejection would mean nothing. A fault may end the process. A gate runs far less
    here than on a GPU, and now and then draws no sample that shows the fault: what survives is tried again, TRIES times in all."""
    todo: list[Fault] = drawn(pytestconfig, seed, EMULATED, 2, "emulated")
    for component, gate in sorted({(f.component, f.gate) for f in todo}):
        found = _judged(component, gate, nvcc.KERNELS, SOUND)
        assert found["verdict"] == PASS, f"{gate} of the unbroken {component}: {found}"
    survived = []
    for fault in todo:
        with cuda_plant.overlay(fault) as kernels:
            tries = (_judged(fault.component, fault.gate, kernels) for _ in range(TRIES))
            if not any(found["verdict"].startswith((FAIL, "ended with -")) for found in tries):
                survived.append(f"{fault.id}: {fault.gate} of {fault.component} said PASS {TRIES} times")
    assert not survived, "\n".join(survived)


def test_faults_compile_to_other_machine_code(pytestconfig: pytest.Config, seed: int) -> None:
    """The first of the compiled files that hold the broken text, spread ones first: a fault may be compiled into some of them only."""
    try:
        toolchain.find_nvcc()
    except MachineError as error:
        pytest.skip(f"NOT_RUN: {error}")
    same = []
    for fault in drawn(pytestconfig, seed, FAULTS, 2, "compiled"):
        sound = {s: None for s in sources_of([catalogue()[fault.component]])
                 if nvcc.KERNELS / fault.source in nvcc.included_files(nvcc.KERNELS / s.path)}
        assert sound, f"{fault.id}: no compiled file of {fault.component} holds {fault.source}"
        with cuda_plant.overlay(fault) as kernels:
            spread = list(sound)[:: max(1, len(sound) // 6)]
            for source in dict.fromkeys([*spread, *sound]):
                before = nvcc.compile_kernel(source).binary_digest
                with nvcc.compiling(kernels=kernels):
                    after = nvcc.compile_kernel(source).binary_digest
                if before != after:
                    break
            else:
                same.append(fault.id)
    assert not same, f"no machine code differs: {same}"


def test_parity_launches_every_compiled_file(pytestconfig: pytest.Config, seed: int) -> None:
    """A file that no sample launches could hold anything."""
    slow = SLOW * pytestconfig.getoption("--all")
    for component in (catalogue()[name] for name in drawn(pytestconfig, seed, WIDE, 1, "launched") + slow):
        launched: set[Source] = set()
        with pytest.MonkeyPatch.context() as patch, emulated_gpu(), emulated_kernels(nvcc.KERNELS):
            patch.setattr(subjects, "component_digests", lambda *a, **k: {"implementation": "emulated"})
            patch.setattr(launches, "compile_kernel", lambda source, launched=launched: (launched.add(source), source)[1])
            cuda_subjects.opened.cache_clear()
            _, judgement = run.measure(component, "parity", SOUND)
            cuda_subjects.opened.cache_clear()
        assert judgement.verdict == PASS
        compiled = [s for s in sources_of([component]) if not s.path.startswith("gemm/")]
        missing = [str(s) for s in compiled if s not in launched]
        assert not missing, f"{component.id}: no sample launches {missing}"


@pytest.mark.parametrize(("vocabulary", "share"), [(8203, 2), (24600, 4)])
def test_narrow_ctas_give_the_bits_of_wide_ones(vocabulary: int, share: int) -> None:
    """Each thread takes the part of `share` threads of the other (kernels/loss/cross_entropy.cu)."""
    rows = 200  # sums that differ have the same logarithm most often
    problem = loss.LossProblem(rows=rows, vocabulary=vocabulary, stride=-(-vocabulary // 8) * 8)
    logits = bf16_bits(np.random.default_rng(1).standard_normal((rows, problem.stride))).astype(np.uint16)
    targets, told, narrow = placed(np.arange(rows, dtype=np.int32) - 1), [], loss.choose(problem)
    with on_threads():
        for config in (narrow, loss.LossConfig(threads=narrow.lanes, lanes=narrow.lanes)):
            work, out = placed(logits), placed(np.ones((2, rows), np.float32))
            loss.cross_entropy(problem, logits=at(work), targets=at(targets), lse=at(out[0]), loss=at(out[1]), config=config)()
            told.append(out.tobytes())
    assert narrow.lanes // narrow.threads == share
    assert told[0] == told[1]


def test_evidence_binds_to_the_samples_made_for_the_gpu(tmp_path: Path) -> None:
    """91: the engines reach them by the name of the back end, which no digest follows: registry.gates.SUBJECTS does."""
    copy = tmp_path / "alpha"
    shutil.copytree(Path(alpha.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    engines = {s for g in ("parity", "gradient", "determinism", "faults") for s in measured_by(g, catalogue()["gelu.bf16.sm90"])}
    engines = {s for s in engines if s.endswith(":samples")}
    assert engines
    before = [symbol_digest(e, copy) for e in engines]
    path = copy / "gates" / "cuda" / "calls.py"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert [symbol_digest(e, copy) for e in engines] == before, "a blank line is not another sample"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("return list(calls.exactly", "return sorted(calls.exactly", 1), encoding="utf-8")
    assert all(a != b for a, b in zip(before, [symbol_digest(e, copy) for e in engines], strict=True))
