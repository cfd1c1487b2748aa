"""The GPU back end as far as a machine without a GPU can look: the catalogue, what is compiled, digests, NOT_RUN, evidence classes."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from alpha import cli
from alpha.backends.cuda import binaries, launches, spot
from alpha.backends.cuda.binaries import Binaries, sources_of
from alpha.backends.cuda.calls import Call
from alpha.backends.cuda.cubins_of import ANYWHERE, NullGpu
from alpha.backends.cuda.kernels import loss, matmul
from alpha.backends.cuda.kernels.gemm import GemmProblem, choose
from alpha.backends.cuda.lib import Operand
from alpha.backends.cuda.values import from_device, to_device
from alpha.cli import gating
from alpha.component import Catalogue, Component
from alpha.cuda_runtime import manifest, mark
from alpha.cuda_runtime.compile import Source
from alpha.errors import InputError, UngatedError
from alpha.gates import run, subjects
from alpha.gates.cuda.calls import large, timed
from alpha.graph.plan import MULTIPROCESSORS
from alpha.ops.table import row
from alpha.registry import admission, gpu, policy
from alpha.registry.digest import component_digests
from alpha.registry.evidence import reference_classes, write_reference
from alpha.registry.gpu import GpuClass, class_here, class_of_key, family, gpu_class, why_not_here
from alpha.registry.judge import Judgement
from alpha.registry.machine import machine_class
from alpha.registry.package import Package
from alpha.registry.record import Record
from alpha.registry.status import Registry
from alpha.train import doctor
from alpha.train.catalogue import catalogue
from alpha.types import TensorType

H200 = GpuClass(capability="sm90", model="H200")
H100 = GpuClass(capability="sm90", model="H100-80GB-HBM3")


def kernels() -> Iterator[Component]:
    return (c for c in catalogue() if c.backend == "cuda" and c.kind == "kernel")


def test_every_kernel_says_what_it_needs_and_what_it_loads() -> None:
    found = list(kernels())
    assert len(found) > 30
    for c in found:
        assert c.requires == ("sm_90a",), c.id
        assert isinstance(c.binaries, Binaries) and c.binaries.sources(), c.id
        assert family(c) == "cuda"


def test_the_manifest_knows_every_compiled_file() -> None:
    """A source that was changed without `manifest.build` makes its components' evidence stale by name; here it is one clear failure."""
    known = manifest.load()
    missing = [str(s) for s in sources_of(kernels()) if manifest.key_of(s) not in known]
    assert not missing, f"{len(missing)} of the sources changed since baselines/cubins.json was written: {missing[:3]}"


SPILLS = {"norm/forward.cu": 12}
"""Most bytes a thread spills, by file: LayerNorm with the residual's addition, five blocks of 160 threads to a multiprocessor."""


def test_kernels_do_not_spill() -> None:
    for entry in manifest.load().values():
        for name, r in entry["resources"].items():
            most = SPILLS.get(entry["source"].split()[0], 0)
            assert max(r["spill_stores"], r["spill_loads"]) <= most, f"{entry['source']} {name}"


def test_comments_do_not_reach_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source.of("a.cu", {"N": 1})
    keys = []
    texts = ('int a = 1; // one\n\n#define S "//x"\n', '/* first\n */ int a =  1;\n#define S "//x"\n', 'int a = 2;\n#define S "//x"\n',
             'int a = 1;\n#define S "//y"\n')
    for i, text in enumerate(texts):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "a.cu").write_text(text)
        monkeypatch.setattr(manifest.nvcc, "KERNELS", folder)
        keys.append(manifest.key_of(source))
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_every_choice_is_among_the_declared_files() -> None:
    rng = np.random.default_rng(5)
    declared = {p: set(sources_of([catalogue()[p]])) for p in ("matmul.bf16.sm90", "matmul_accumulate.bf16.sm90")}
    for _ in range(3000):
        m, n, k = (int(8 * 2 ** rng.uniform(0, 13)) // 8 * 8 for _ in range(3))
        a, b = rng.choice(["k", "m"]), rng.choice(["k", "n"])
        for component, out, bias in (("matmul.bf16.sm90", "bf16", False), ("matmul.bf16.sm90", "f32", False),
                                     ("matmul.bf16.sm90", "bf16", True), ("matmul_accumulate.bf16.sm90", "f32+=", False)):
            problem = GemmProblem(m=m, n=n, k=k, a_major=a, b_major=b, out=out, bias=bias)
            assert set(choose(problem).sources(problem)) <= declared[component], str(problem)


def test_products_of_a_call() -> None:
    x, w = TensorType((4, 16, 64), "bf16"), TensorType((32, 64), "bf16")
    assert str(matmul.problem_of("matmul", [x, w], {"trans_b": True})) == "64x32x64 NT bf16"
    dy = TensorType((64, 32), "bf16")
    assert str(matmul.problem_of("matmul", [dy, TensorType((64, 64), "bf16")], {"trans_a": True, "wide": True})) == "32x64x64 TN f32"
    assert matmul.problem_of("matmul", [replace(x), TensorType((4, 64, 8), "bf16")], {}).batch == 4


def test_chunks_of_the_head_cover_the_rows_in_order() -> None:
    parts = loss.chunks(TensorType((130, 24), "bf16"), TensorType((43, 24), "bf16"), {"chunk": 32, "ignore_index": -1, "z_loss": 0.0}, True)
    assert [(p.start, p.rows) for p in parts] == [(0, 32), (32, 32), (64, 32), (96, 32), (128, 2)]
    assert [p.gemms[2].out for p in parts] == ["f32"] + ["f32+="] * 4
    assert all(p.loss.stride == 48 for p in parts)


def test_bf16_there_and_back() -> None:
    t = TensorType((3, 5), "bf16")
    x = np.array([0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 2.0**-130, 3.0, 1e38, 0.5, 0.25, 7.0, -9.0, 128.0], np.float32)
    x = x.reshape(3, 5)
    x = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    assert from_device(to_device(x, t), t).tobytes() == x.tobytes()
    with pytest.raises(InputError, match="value that bf16 has not"):
        to_device(np.full((3, 5), 1.001), t)


def test_classes_and_what_carries_over() -> None:
    for c in (H200, H100, replace(H200, devices=2, link="nvlink"), replace(H100, devices=8, link="pcie")):
        assert class_of_key(c.key) == c
    assert class_of_key(machine_class().key) == machine_class()
    with pytest.raises(InputError):
        GpuClass.from_key("cuda_90_H200")
    kernel = catalogue()["matmul.bf16.sm90"]
    carried = {g: policy.carries(kernel, g, H100, H200, blas=False) for g in ("parity", "gradient", "determinism", "faults", "perf")}
    assert carried == {"parity": True, "gradient": True, "determinism": False, "faults": False, "perf": False}
    assert not policy.carries(kernel, "parity", machine_class(), H200, blas=False)
    assert not policy.carries(kernel, "parity", replace(H100, capability="sm100"), H200, blas=False)


ROWS = "NVIDIA H200, 9.0, 570.1\n" * 3
MATRIX = """\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPHB\t0-47\t0
GPU1\tNV18\t X \tNV18\tSYS\t0-47\t0
GPU2\tSYS\tNV18\t X \tSYS\t48-95\t1
NIC0\tPHB\tSYS\tSYS\t X

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A made-up nvidia-smi that prints these rows of GPUs and this matrix."""
    def tool(rows: str, matrix: str, code: int = 0) -> None:
        (tmp_path / "rows").write_text(rows)
        (tmp_path / "matrix").write_text(matrix)
        script = f'#!/bin/sh\nif [ "$1" = topo ]; then cat {tmp_path}/matrix; exit {code}; fi\ncat {tmp_path}/rows\n'
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
        gpu.asked.cache_clear()

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    yield tool
    gpu.asked.cache_clear()


def test_several_gpus_are_a_class_with_what_links_them(says: Callable[..., None]) -> None:
    says(ROWS, MATRIX)
    assert [c.key for c in gpu.gpu_classes()] == ["cuda_sm90_H200", "cuda_sm90_H200x2-nvlink", "cuda_sm90_H200x3-pcie"]
    assert gpu.gpu_class(4) is None
    kernel = catalogue()["matmul.bf16.sm90"]
    pair, four = (replace(kernel, requires=("sm_90a", f"gpus>={n}")) for n in (2, 4))
    assert str(class_here(pair)) == str(replace(H200, devices=2, link="nvlink"))
    assert class_here(kernel) == H200
    assert why_not_here(four) == "needs gpus>=4: this machine has 3 (GPU H200, compute capability 9.0)"
    assert gpu.gpu_environment() == {"driver": "570.1"}
    assert [f.found for f in doctor._gpu() if f.topic == "GPU class"] == [", ".join(c.key for c in gpu.gpu_classes())]


@pytest.mark.parametrize(("rows", "matrix", "code", "why"), [
    (ROWS[:24], MATRIX, 0, "this machine has 1"),
    ("NVIDIA H200, 9.0, 1\nNVIDIA H100 PCIe, 9.0, 1\n", MATRIX, 0, "of different models"),
    (ROWS, "topo is not supported\n", 0, "does not say what links"),
    (ROWS, MATRIX, 9, "nvidia-smi fails"),
    ("No devices were found\n", "", 0, "finds no GPU: No devices were found"),
    ("", "", 0, "finds no GPU"),
], ids=("one GPU", "two models", "no matrix", "no answer", "none found", "nothing said"))
def test_too_few_gpus_or_unknown_links_are_no_class(says: Callable[..., None], rows: str, matrix: str, code: int, why: str) -> None:
    says(rows, matrix, code)
    pair = replace(catalogue()["matmul.bf16.sm90"], requires=("gpus>=2",))
    assert why in why_not_here(pair) and class_here(pair) is None
    filled = Catalogue()
    filled.add(pair)
    assert run.tasks(filled, [pair.id], stale=False) == []
    assert why in run.not_here(filled, [pair.id])[pair.id]


def test_each_sort_has_its_reference_class(tmp_path: Path) -> None:
    write_reference(tmp_path, H200)
    write_reference(tmp_path, machine_class())
    assert reference_classes(tmp_path) == {"cpu": machine_class().key, "cuda": H200.key}
    (tmp_path / "REFERENCE").write_text(f"{H200.key}\n{H100.key}\n")
    with pytest.raises(InputError, match="two reference classes"):
        reference_classes(tmp_path)


def test_the_digest_of_a_kernel_holds_its_binaries() -> None:
    digests = component_digests(catalogue()["attention.bf16.sm90"], "parity")
    assert set(digests) == {"implementation", "row", "cases", "measure", "binaries"}
    assert "binaries" not in component_digests(catalogue()["matmul.f32.cpu"], "parity")


def test_the_executor_binds_what_stamps_and_hashes_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another cubin of either is other evidence."""
    executor = catalogue()["executor.cuda"]
    assert isinstance(executor.binaries, Binaries) and set(executor.binaries.sources()) == {mark.SOURCE, spot.SOURCE}
    before = component_digests(executor, "faults")
    for changed in (str(source) for source in executor.binaries.sources()):
        monkeypatch.setattr(binaries, "binary_digests", lambda sources, changed=changed: {
            name: "another" if name == changed else digest for name, digest in manifest.binary_digests(sources).items()})
        after = component_digests(executor, "faults", package=Package())
        assert [name for name in before if before[name] != after[name]] == ["binaries"]


@pytest.mark.skipif(gpu_class() is not None, reason="this machine has a GPU")
def test_without_a_gpu_gates_are_not_run_and_say_why() -> None:
    kernel = catalogue()["matmul.bf16.sm90"]
    assert "sm_90a" in why_not_here(kernel) and class_here(kernel) is None
    assert run.tasks(catalogue(), [kernel.id], stale=False) == []
    assert "sm_90a" in run.not_here(catalogue(), [kernel.id])[kernel.id]


def test_what_an_extra_brings_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates that read reports are NOT_RUN where pandas is missing, with the command that helps."""
    reader = next(c for c in catalogue() if c.id == "report.figures")
    assert why_not_here(reader) == ""
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert why_not_here(reader) == "needs the extra report, of which pandas is not installed: `pip install -e '.[report]'`"
    assert class_here(reader) is None


def test_every_kernel_has_cases_and_timed_calls_inside_its_envelope() -> None:
    for c in kernels():
        if c.op != "update_scalars":
            todo = subjects.cases(c, "5eed" * 8)
            assert len(todo) >= 2, f"{c.id}: {len(todo)} cases"
        calls = timed(c)
        assert calls, c.id
        for call in calls:
            assert c.envelope.why_outside(call.types, call.attrs) is None, c.id
    assert len(large(catalogue()["matmul.bf16.sm90"])) > 20


def grids(component: Component, call: Call, budget: int, patch: pytest.MonkeyPatch) -> list[int]:
    """Thread blocks of every launch of a call that is bound with a budget, without a GPU."""
    found: list[int] = []

    class Noting:
        def prepare(self, grid: tuple[int, int, int], *rest: object, **more: object) -> Noting:
            found.append(grid[0] * grid[1] * grid[2])
            return self

        def __call__(self, stream: object = None) -> None:
            return None

    patch.setattr(launches, "_NOTHING", Noting())
    made = NullGpu()
    made.blocks = budget
    outs = row(str(component.op)).infer(list(call.types), call.attrs)
    with launches.recording():
        component.implementation(made, *([Operand(ANYWHERE, t) for t in types] for types in (call.types, outs)), call.attrs)
    return found


def test_kernels_that_are_budgeted_keep_to_every_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch of any timed call has more thread blocks than the budget has multiprocessors. So it takes no more of them."""
    budgeted = [c for c in kernels() if c.budgeted]
    assert {"rmsnorm.bf16.sm90", "add_layernorm.bf16.sm90", "adamw.f32.sm90"} <= {c.id for c in budgeted}
    for c in budgeted:
        for call in timed(c):
            assert max(grids(c, call, 0, monkeypatch)) > MULTIPROCESSORS, f"{c.id}: a budget would change nothing"
            for budget in (1, 7, 16, MULTIPROCESSORS):
                assert all(n <= budget for n in grids(c, call, budget, monkeypatch)), f"{c.id} with {budget}"
    others = [catalogue()[f"{op}.bf16.sm90"] for op in ("rmsnorm_bwd", "gelu", "sum")]
    assert all(not c.budgeted and max(grids(c, timed(c)[0], 7, monkeypatch)) > 7 for c in others), "what keeps to none would not be seen"


def test_operands_of_other_types_are_outside() -> None:
    kernel = catalogue()["attention_bwd.bf16.sm90"]
    bf16, f32 = TensorType((1, 64, 2, 64), "bf16"), TensorType((1, 2, 64), "f32")
    attrs = {"causal": True, "window": 0, "scale": 0.125}
    assert kernel.envelope.why_outside([bf16] * 5 + [f32], attrs) is None
    assert "bf16 operands" in str(kernel.envelope.why_outside([bf16] * 4 + [replace(bf16, dtype="f32"), f32], attrs))
    wide = [TensorType((1, 64, 2, 80), "bf16")] * 5 + [f32]
    assert "head width" in str(kernel.envelope.why_outside(wide, attrs))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine says that it has one."""
    monkeypatch.setattr(gpu, "asked", lambda: gpu.Seen((H200,), driver="580.0"))


def small_gpu_run(root: Path, fill: Callable[[Path], None]) -> Path:
    """GPT-2's run file on a small corpus."""
    text = root / "text"
    fill(text)
    given = (Path(__file__).resolve().parents[2] / "configs" / "gpt2-124m.toml").read_text()
    changed = given.replace('corpus = "stdlib"', f'corpus = "{text.as_posix()}"\ncache = "{(root / "cache").as_posix()}"\nvalidation = 0.3')
    changed = changed.replace("vocab = 50304", "vocab = 264").replace("sequence = 1024", "sequence = 128")
    (root / "run.toml").write_text(changed)
    return root / "run.toml"


def test_gate_run_for_a_gpu_run_takes_what_that_run_asks_for(h200: None, tmp_path: Path, small_corpus: Callable[[Path], None],
                                                             monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The gates that `gate run --for` would run are those whose components `train` asks the registry about, no more and no fewer."""
    asked: list[set[str]] = []
    ran: list[run.Task] = []

    def refuse(registry: Registry, ids: list[str], calls: object = ()) -> None:
        asked.append(set(ids))
        raise UngatedError("no evidence", came="x")

    def note(todo: list[run.Task], **_: object) -> run.Done:
        ran.extend(todo)
        return run.Done()

    monkeypatch.setattr(Registry, "require", refuse)
    monkeypatch.setattr(run, "run", note)
    monkeypatch.setattr(admission, "never_run", lambda registry, ids: [])
    source = str(small_gpu_run(tmp_path, small_corpus))
    changes = ["--set", "model.family=llama", "--set", "model.kv_heads=4", "--set", "data.documents=true"]
    for more in ([], changes):
        asked.clear(), ran.clear()
        assert cli.main(["train", source, *more]) == 1
        output = capsys.readouterr().err
        command = output.split("alpha.cli gate run ")[-1] if "alpha.cli gate run " in output else output.split("gate run ")[1]
        words = shlex.split(command.split("`")[0])
        assert words[:2] == ["--for", source] and words[-1] == "--stale"
        assert cli.main(["gate", "run", *words[:-1]]) == 0
        named = {t.component.id for t in ran}
        assert {t.gate for t in ran if t.component.id == "executor.cuda"} == {"parity", "determinism", "faults"}
        assert named == set(admission.needed(catalogue(), asked[0])) and any(i.endswith(".sm90") for i in named)
        assert ("attention_packed.bf16.sm90" in named) and ("rmsnorm.bf16.sm90" in named) == bool(more)


def test_a_budget_that_nothing_fits_into_says_so(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("a gate was started beyond the budget"))
    assert gating.cmd_run(["executor.cuda"], budget=1e-3, console=Console(file=output, width=200)) == 1
    assert "no gate fits into the budget: executor.cuda" in output.getvalue() and "run the same command" not in output.getvalue()


@pytest.mark.skipif(gpu_class() is not None, reason="this machine has a GPU")
def test_what_was_asked_for_and_cannot_run_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run", lambda todo, **_: run.Done())
    assert gating.cmd_run(["split.by_file", "executor.cuda"], console=Console(file=io.StringIO())) == 3
    assert gating.cmd_run(["split.by_file"], console=Console(file=io.StringIO())) == 0


def test_a_budget_stops_and_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gate takes a second by a clock of our own, a call has two: each goes on where the last one stopped, and nothing runs twice."""
    seconds, ran = [0.0], []
    measure = run.measure

    def slow(component: Component, gate: str, nonce: str | None = None) -> tuple[Record, Judgement]:
        seconds[0] += 1.0
        ran.append(gate)
        found, judgement = measure(component, gate, nonce)
        return replace(found, environment={**found.environment, "seconds": "1.00"}), judgement

    gates = ("parity", "gradient", "determinism", "faults")
    monkeypatch.setattr(run, "measure", slow)
    monkeypatch.setattr(run, "seconds_of", lambda gate, component: 1.0)
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    left = []
    for _ in range(3):
        todo = run.tasks(catalogue(), ["split.f32.cpu"], gates, roots=[tmp_path])
        left.append(len(run.run(todo, budget=2.5, root=tmp_path).left))
    assert left == [2, 0, 0] and sorted(ran) == sorted(gates)
