"""`alpha kernels`: which compiler is found, what a check sees, and that the audit catches planted faults. Needs no GPU.

Tests that compile are NOT_RUN where the pinned compiler or the disassembler is missing (the extra `nvcc`).
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from alpha.component import Component
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime import manifest, opcodes, toolchain
from alpha.cuda_runtime.compile import CompileError, Cubin, Resources, Source
from alpha.errors import CorruptError, InputError, MachineError
from alpha.gates.device_code import audit as kernels_audit
from alpha.gates.device_code import baseline as kernels_baseline
from alpha.gates.device_code import build as kernels
from alpha.gates.device_code import command as kernels_command
from alpha.tomlfile import read_toml
from alpha.train.catalogue import catalogue

REPOSITORY = Path(__file__).resolve().parents[2]


def tools(*, disassembler: bool = True) -> None:
    try:
        kernels.exact_compiler()
        if disassembler:
            toolchain.find_nvdisasm()
    except MachineError as error:
        pytest.skip(f"NOT_RUN: {error}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of kernels/ that is compiled instead of it. What is made of it is kept from session to session, by content as everything
    compiled, and apart from what a run may load."""
    copy = tmp_path / "kernels"
    shutil.copytree(REPOSITORY / "kernels", copy, ignore=shutil.ignore_patterns("checks"))
    monkeypatch.setattr(nvcc, "KERNELS", copy.resolve())
    monkeypatch.setattr(nvcc, "CACHE", nvcc.CACHE / "tests")
    yield copy
    look_again()


def look_again() -> None:
    """Sources are read once a process; here they change."""
    manifest._files.cache_clear()
    manifest._key.cache_clear()


def source_like(*words: str) -> Source:
    """The first source of the catalogue whose text holds all the words."""
    return next(s for s in kernels.needed(catalogue()) if set(words) <= set(str(s).split()))


def change(file: Path, find: str, put: str) -> None:
    text = file.read_text()
    assert text.count(find) == 1, f"{find!r} is {text.count(find)} times in {file.name}"
    file.write_text(text.replace(find, put))


# --- what needs no compiler -------------------------------------------------------------------------------------------------------------


def test_the_extra_installs_what_is_looked_for() -> None:
    extra = read_toml(REPOSITORY / "pyproject.toml")["project"]["optional-dependencies"]["nvcc"]
    name, version = toolchain.DISASSEMBLER
    assert sorted(extra) == sorted([f"{n}=={v}" for n, v in toolchain.PINS.items()] + [f"{name}=={version}"])
    assert manifest.COMPILER == f"V{toolchain.PINS['nvidia-cuda-nvcc']}"


def test_the_short_baseline_agrees_with_the_manifest() -> None:
    everything = kernels.needed(catalogue())
    now = kernels.usage(everything, kernels.Compiled(), manifest.load())
    assert kernels_baseline.compare(now, kernels_baseline.load()) == ([], []), "do: alpha kernels build --pin"
    assert len(now) > 25 and {s.path for s in everything} == {key.split()[0] for key in now}


def test_what_multiplies_matrices_has_tensor_cores_in_the_baseline() -> None:
    """What every machine can see of the audit, also without a disassembler."""
    products = {key: line["products"] for key, line in kernels_baseline.load().items()}
    assert {key.split()[0] for key, n in products.items() if n} == set(kernels_audit.TENSOR)


def installed(root: Path, pins: dict[str, str]) -> Path:
    """A made-up folder of installed packages with an nvcc that says it is the right one."""
    tool = root / "nvidia" / "cu13" / "bin" / "nvcc"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    tool.chmod(0o755)
    for name, version in pins.items():
        (root / f"{name.replace('-', '_')}-{version}.dist-info").mkdir()
    return tool


def test_a_package_with_a_part_of_another_version_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = installed(tmp_path / "right", toolchain.PINS)
    mixed = installed(tmp_path / "mixed", toolchain.PINS | {"nvidia-nvvm": "13.5.1"})
    assert toolchain.unfit(right) == "" and "nvidia-nvvm==13.0.88" in toolchain.unfit(mixed)
    monkeypatch.setattr(toolchain.sys, "path", [str(tmp_path / "mixed"), str(tmp_path / "right")])
    assert toolchain.find_nvcc.__wrapped__() == (right, "V13.0.88")


def test_no_compiler_is_one_error_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    old.chmod(0o755)
    monkeypatch.setattr(toolchain, "places", lambda name: iter([old] if name == "nvcc" else []))
    with pytest.raises(MachineError, match=r"V12\.4\.131") as error:
        toolchain.find_nvcc.__wrapped__()
    assert "pip install" in str(error.value) and error.value.exit_code == 3
    with pytest.raises(MachineError, match="nvdisasm"):
        toolchain.find_nvdisasm.__wrapped__()


def test_cuda_home_goes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.sys, "path", [])
    for name in ("home", "path"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "nvcc").touch(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    assert [p.parents[1].name for p in toolchain.places("nvcc")][:2] == ["home", "path"]


LISTING = """
	.section	.text.one,"ax",@progbits
one:
.text.one:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ;
        /*0020*/              @UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*1020*/                   STL.64 [R1], R2 ;
        /*1030*/                   STL.64 [R1+0x8], R4 ;
	.section	.text.two,"ax",@progbits
        /*0000*/                   EXIT ;
"""


def test_opcodes_are_counted_by_kernel() -> None:
    assert opcodes.parse(LISTING) == {"one": {"LDC": 1, "RED.E.ADD.F32.FTZ.RN.STRONG.GPU": 1, "UIADD3": 1, "STL.64": 2}, "two": {"EXIT": 1}}


def cubin_of(source: Source, *names: str) -> Cubin:
    some = Resources(registers=32, spill_stores=0, spill_loads=0, stack=0, static_shared=0)
    return Cubin(source=source, path=Path("x"), digest="", binary_digest="", resources=dict.fromkeys(names, some))


@pytest.mark.parametrize(("opcode", "rule"), [
    ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "atomic"), ("REDG.E.ADD.F32x2.RN.STRONG.GPU", "atomic"),
    ("ATOMG.E.ADD.F16x2.RN.STRONG.GPU", "atomic"), ("ATOM.E.ADD.BF16_V2.RN.STRONG.GPU", "atomic"),
    ("ATOMG.E.ADD.F64.RN.STRONG.SYS", "atomic"), ("ATOMS.CAST.SPIN", "atomic"), ("ATOMG.E.CAS.STRONG.GPU", "atomic"),
    ("REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU", "ordered"), ("RED.E.ADD.F32x4.FTZ.RN.STRONG.GPU", "ordered"),
    ("ATOMG.E.ADD.F32x4.RN.STRONG.GPU", "atomic"),
    ("LDL", "local"), ("STL.128", "local"), ("UTMAREDG.3D.ADD", "bulk"), ("UBLKRED.S.G.ADD.F32.RN", "bulk"),
    ("HGMMA.64x128x16.F16", "sum"), ("HMMA.16816.F16", "sum"),
    ("ATOMG.E.ADD.STRONG.GPU", ""), ("REDUX.MAX.S32", ""), ("SYNCS.ARRIVE.TRANS64.RED.A1T0", ""), ("LDG.E", ""),
    ("HGMMA.64x128x16.F32.BF16", ""), ("UTMASTG.3D", ""),
])
def test_rules_on_opcodes(opcode: str, rule: str) -> None:
    cubin = cubin_of(Source.of("elementwise/map.cu"), "k")
    assert [f.rule for f in kernels_audit.audit(cubin, {"k": {opcode: 1}})] == ([rule] if rule else [])
    assert [f.rule for f in kernels_audit.audit(cubin, {"k": {}, "not inlined": {opcode: 1}})] == ([rule] if rule else [])


def test_exemptions_are_for_what_they_name() -> None:
    adding, storing = source_like("gemm/gemm.cu", "GEMM_OUT=2"), source_like("gemm/gemm.cu", "GEMM_OUT=1")
    ops = {"gemm": {"HGMMA.64x128x16.F32.BF16": 4, "UTMAREDG.3D.ADD": 1}}
    assert kernels_audit.audit(cubin_of(adding, "gemm"), ops) == []
    assert [f.rule for f in kernels_audit.audit(cubin_of(storing, "gemm"), ops)] == ["bulk"]
    assert [f.rule for f in kernels_audit.audit(cubin_of(adding, "renamed"), {})] == ["tensor"]
    assert len(kernels_audit.idle([(cubin_of(adding, "gemm"), ops)])) == len(kernels_audit.EXEMPT) - 1
    one_pass, turns = Source.of("attention/one_pass.cu"), {"HGMMA.64x64x16.F32.BF16": 4, "REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU": 8}
    for name, more, rules in (("attn_bwd_one_d64", {}, []), ("attn_bwd_delta_d64", {}, ["tensor", "ordered"]),
                              ("attn_bwd_one_d64", {"RED.E.ADD.F32.FTZ.RN.STRONG.GPU": 1}, ["atomic"])):
        assert [f.rule for f in kernels_audit.audit(cubin_of(one_pass, name), {name: {**turns, **more}})] == rules, (name, more)


def test_a_sample_holds_every_file_and_what_is_new(folder: Path) -> None:
    everything = kernels.needed(catalogue())
    paths = {s.path for s in everything}
    for n in (0, 40, 10_000):
        taken = kernels.sample(everything, n, "seed")
        assert {s.path for s in taken} == paths and len(taken) == max(len(paths), min(n, len(everything)))
        assert taken == kernels.sample(everything, n, "seed")
    change(folder / "rope" / "rope.cu", "constexpr int DEEP = ROPE_DEEP;", "constexpr int DEEP = ROPE_DEEP + 0;")
    look_again()
    rope = {s for s in everything if s.path == "rope/rope.cu"}
    assert rope < set(kernels.sample(everything, 0, "seed"))


def test_sources_of_named_components() -> None:
    some = kernels.needed(catalogue(), ["attention.bf16.sm90"])
    assert {s.path for s in some} == {"attention/forward.cu", "attention/documents.cu"} < {s.path for s in kernels.needed(catalogue())}
    assert kernels.users(catalogue(), some) and "attention.bf16.sm90" in kernels.users(catalogue(), some)
    with pytest.raises(InputError, match="no compiled files"):
        kernels.needed(catalogue(), ["matmul.f32.cpu"])


def test_the_baseline_compares_both_ways() -> None:
    base = {"a.cu k": {"registers": 40, "shared": 0, "stack": 0, "spills": 0, "spilling": 0, "products": 8}}
    for name, value, bad in (("registers", 41, True), ("registers", 39, False), ("shared", 1, True), ("stack", 8, True),
                             ("spills", 4, True), ("spilling", 1, True), ("products", 7, True), ("products", 9, False)):
        worse, better = kernels_baseline.compare({"a.cu k": base["a.cu k"] | {name: value}}, base)
        assert (len(worse), len(better)) == ((1, 0) if bad else (0, 1)), name
    assert kernels_baseline.compare(base, {})[0] and kernels_baseline.compare({}, base)[0]


def test_a_damaged_baseline_says_so(tmp_path: Path) -> None:
    for text in ("{", '{"a k": {"registers": 1}}', '["a"]'):
        (tmp_path / "kernels.json").write_text(text)
        with pytest.raises(CorruptError, match=r"kernels\.json"):
            kernels_baseline.load(tmp_path / "kernels.json")


def test_bad_arguments() -> None:
    for call in (lambda: kernels_command.cmd_build(["x"], pin=True), lambda: kernels_command.cmd_build(jobs=0),
                 lambda: kernels_command.cmd_check(sample=-1), lambda: kernels_command.cmd_check(jobs=0)):
        with pytest.raises(InputError):
            call()


# --- what needs the compiler ------------------------------------------------------------------------------------------------------------

PLAIN_GEMM = ("gemm/gemm.cu", "GEMM_BN=128", "GEMM_OUT=0", "GEMM_SPLIT=0", "GEMM_PINGPONG=1")
WGMMA_128 = "else if constexpr (N == 128) ALPHA_WGMMA_SS(128, ALPHA_RS7, ALPHA_CS7, 64, 65, 66, 67, 68);"
NORM_END = "if (threadIdx.x == 0) parts[blockIdx.x] = total[0];"
FMA = """else if constexpr (N == 128) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) d[i] = fmaf(__uint_as_float(uint32_t(a)), __uint_as_float(uint32_t(b)), accumulate ? d[i] : 0.0f);
    }"""

FAULTS = [
    pytest.param(("optimizer/global_norm.cu",), "optimizer/global_norm.cu", NORM_END, "if (threadIdx.x == 0) atomicAdd(parts, total[0]);",
                 "atomic", id="float-reduction"),
    pytest.param(("optimizer/global_norm.cu",), "optimizer/global_norm.cu", NORM_END,
                 "if (threadIdx.x == 0) parts[blockIdx.x] = atomicAdd(parts + gridDim.x, total[0]);", "atomic", id="float-atomic"),
    pytest.param(("optimizer/global_norm.cu",), "optimizer/global_norm.cu", NORM_END,
                 "if (threadIdx.x == 0) atomicAdd(reinterpret_cast<double*>(parts), double(total[0]));", "atomic", id="double-reduction"),
    pytest.param(("optimizer/global_norm.cu",), "optimizer/global_norm.cu", "    team.sum(total);",
                 "    __shared__ float all;\n    atomicAdd(&all, total[0]);\n    __syncthreads();\n    total[0] = all;",
                 "atomic", id="float-atomic-in-shared-memory"),
    pytest.param(("optimizer/adamw.cu",), "optimizer/adamw.cu", "__launch_bounds__(THREADS, 5)", "__launch_bounds__(THREADS, 8)",
                 "local", id="registers-capped-until-they-spill"),
    pytest.param(("optimizer/global_norm.cu",), "optimizer/global_norm.cu", "int i = 0; i < 4; ++i) total[0] += x[d][i] * x[d][i];",
                 "int i = 0; i < 4; ++i) total[0] += x[(d * gridDim.x) % DEEP][i];", "local", id="an-array-with-a-moving-index"),
    pytest.param(PLAIN_GEMM, "common/wgmma.cuh", WGMMA_128, FMA, "tensor", id="fma-for-wgmma"),
    pytest.param(PLAIN_GEMM, "gemm/epilogue.cuh", "Output::f32_add) {", "Output::bf16) {", "bulk", id="copy-engine-adds"),
    pytest.param(("attention/forward.cu",), "attention/forward.cu", "attn_fwd_d##D##_w##W##_n##BN(", "attention_d##D##_w##W##_n##BN(",
                 "tensor", id="renamed-out-of-the-rule"),
    pytest.param(("attention/one_pass.cu",), "attention/one_pass.cu", "add_release(u.turn + sum_at(u, it, group, g, i), 1);",
                 "atomicAdd(u.partial, 1.f);", "atomic", id="float-reduction-beside-those-in-turns"),
    pytest.param(("attention/one_pass.cu",), "attention/one_pass.cu", "u.turn[i] = 0;",
                 'asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(u.partial + 4 * i), "f"(1.f) : "memory");',
                 "ordered", id="sums-of-four-outside-the-turns"),
]


@pytest.mark.parametrize(("words", "file", "find", "put", "rule"), FAULTS)
def test_planted_faults_are_caught(words: tuple[str, ...], file: str, find: str, put: str, rule: str, folder: Path) -> None:
    tools()
    source = source_like(*words)
    change(folder / file, find, put)
    cubin = nvcc.compile_kernel(source)
    found = kernels_audit.audit(cubin, opcodes.opcodes(cubin))
    assert rule in {f.rule for f in found}, f"{source}: {[str(f) for f in found]}"


@pytest.mark.parametrize("words", sorted({p.values[0] for p in FAULTS}))  # type: ignore[misc]
def test_the_same_kernels_are_sound(words: tuple[str, ...]) -> None:
    tools()
    cubin = nvcc.compile_kernel(source_like(*words))
    assert kernels_audit.audit(cubin, opcodes.opcodes(cubin)) == []


HALF = """#include <cstdint>
extern "C" __global__ void half_sums(uint64_t a, uint64_t b, uint32_t* out) {
    uint32_t d0 = 0, d1 = 0;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%0, %1}, %2, %3, 1, 1, 1, 0, 0;"
                 : "+r"(d0), "+r"(d1) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    out[threadIdx.x] = d0 + d1;
}
"""


def test_products_that_add_in_half_precision_are_caught(folder: Path) -> None:
    tools()
    (folder / "elementwise" / "half.cu").write_text(HALF)
    cubin = nvcc.compile_kernel(Source.of("elementwise/half.cu"))
    assert [f.rule for f in kernels_audit.audit(cubin, opcodes.opcodes(cubin))] == ["sum"]
    assert kernels_audit.products(opcodes.opcodes(cubin), "half_sums") == 0


Small = tuple[Callable[[], kernels.Checked], Path, Path]


@pytest.fixture
def small(folder: Path, tmp_path: Path) -> Small:
    """A check of two small kernels against a manifest and a baseline of their own, both true to begin with."""
    tools()
    sources = [Source.of("optimizer/global_norm.cu"), Source.of("loss/total.cu", {"TOTAL_ACCUMULATE": 1})]
    listed, short = tmp_path / "cubins.json", tmp_path / "short.json"
    manifest.build(sources, listed)
    kernels_baseline.save(kernels.usage(sources, kernels.compile_sources(sources, jobs=1, look=True), {}), short)

    def run() -> kernels.Checked:
        look_again()
        return kernels.check(sources, sources, look=True, jobs=1, manifest_path=listed, baseline_path=short)

    return run, listed, short


def texts(checked: kernels.Checked) -> list[str]:
    """Failures but those of exemptions, which belong to the whole catalogue."""
    return [text for _, text in checked.failures if not text.startswith("exemption")]


def test_a_check_of_what_is_true_passes(small: Small) -> None:
    run, _, _ = small
    result = run()
    assert texts(result) == [] and (result.compiled, result.audited) == (2, 2)
    assert len(result.failures) == len(kernels_audit.EXEMPT), "an exemption that nothing needs must be said"


def test_a_comment_changes_nothing_and_a_constant_does(small: Small, folder: Path) -> None:
    run, _, _ = small
    file = folder / "optimizer" / "global_norm.cu"
    file.write_text("// another word\n" + file.read_text())
    assert texts(run()) == []
    change(file, "total[0] += x[d][i] * x[d][i];", "total[0] += x[d][i] * x[d][i] + 1.0f;")
    assert [t.split(": ")[-1] for t in texts(run())] == ["not in the manifest", "in the manifest, but nothing asks for it"]


def test_other_machine_code_and_other_limits_are_failures(small: Small) -> None:
    run, listed, short = small
    body = json.loads(listed.read_text())
    edited = {key: entry | {"binary": "0" * 64} for key, entry in body["cubins"].items()}
    listed.write_text(json.dumps(body | {"cubins": edited}))
    assert [t.split(": ")[-1] for t in texts(run())] == ["other machine code than the manifest says"] * 2
    listed.write_text(json.dumps(body))
    limits = kernels_baseline.load(short)
    limits["loss/total.cu loss_total"]["registers"] -= 1
    limits["optimizer/global_norm.cu global_norm"]["shared"] += 1
    kernels_baseline.save(limits, short)
    result = run()
    assert len(texts(result)) == 1 and "registers a thread" in texts(result)[0] and len(result.better) == 1


def test_a_warning_is_a_failure_with_the_compilers_words(small: Small, folder: Path) -> None:
    run, _, _ = small
    change(folder / "optimizer" / "global_norm.cu", "    Team team(shared);", "    Team team(shared);\n    int never_read = 3;")
    found = texts(run())
    assert len(found) == 1 and "never_read" in found[0] and "kernels/optimizer/global_norm.cu does not compile" in found[0]


def test_every_failure_of_a_build_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(disassembler=False)
    wrong = [Source.of("optimizer/global_norm.cu"), Source.of("loss/total.cu", {"TOTAL_ACCUMULATE": 1})]
    for s in wrong:
        (folder / s.path).write_text("int f( { }\n")
    fine = Source.of("profile/mark.cu")
    monkeypatch.setattr(kernels, "needed", lambda catalogue, ids=(): [*wrong, fine])
    output = io.StringIO()
    assert kernels_command.cmd_build(jobs=1, console=Console(file=output, width=200)) == 2
    assert all(f"kernels/{s} does not compile" in output.getvalue() for s in wrong) and "1 of 3 files" in output.getvalue()
    with pytest.raises(CompileError, match="not pinned"):
        kernels.pin([*wrong, fine], kernels.compile_sources([*wrong, fine], jobs=1))


def test_a_failing_check_ends_with_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools()
    change(folder / "attention" / "forward.cu", "attn_fwd_d##D##_w##W##_n##BN(", "attention_d##D##_w##W##_n##BN(")
    monkeypatch.setattr(kernels, "needed", lambda catalogue, ids=(): [Source.of("attention/forward.cu")])
    output = io.StringIO()
    assert kernels_command.cmd_check(jobs=1, console=Console(file=output, width=200)) == 1
    assert "do: mend the kernel" in output.getvalue() and "alpha kernels build --pin" in output.getvalue()
    assert "alpha gate run --stale --ship" in output.getvalue() and "attention.bf16.sm90" in output.getvalue()


def test_without_a_disassembler_the_audit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tools(disassembler=False)

    def none() -> tuple[Path, str]:
        raise MachineError("no nvdisasm on this machine")

    monkeypatch.setattr(kernels_command, "find_nvdisasm", none)
    output = io.StringIO()
    assert kernels_command.cmd_check(jobs=1, sample=0, seed="1", console=Console(file=output, width=200)) == 3
    assert "NOT_RUN audit" in output.getvalue() and "0 failures" in output.getvalue()
    assert kernels_command.cmd_check(jobs=1, sample=0, seed="1", audit=False, console=Console(file=output, width=200)) == 0


def test_a_sample_of_the_catalogue_is_as_committed(seed: int) -> None:
    """The whole of it is `alpha kernels check`."""
    tools()
    parser = argparse.ArgumentParser()
    kernels_command.arguments(parser)
    asked = parser.parse_args(["check", "--sample", "0", "--seed", str(seed), "--jobs", "1"])
    assert asked.run(asked) == 0


def test_two_installations_of_the_compiler_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages and an installed toolkit: the cubin does not know where it was made."""
    tools(disassembler=False)
    found = [path for path in toolchain.places("nvcc") if not toolchain.unfit(path) and toolchain.version_of(path)[1] == manifest.COMPILER]
    if len(found) < 2:
        pytest.skip("NOT_RUN: one installation of the compiler here")
    made = []
    for n, path in enumerate((found[0], found[-1])):
        monkeypatch.setattr(nvcc, "find_nvcc", lambda path=path: (path, manifest.COMPILER))
        monkeypatch.setattr(nvcc, "CACHE", tmp_path / str(n))
        made.append([nvcc.compile_kernel(s).binary_digest for s in (Source.of("optimizer/global_norm.cu"), source_like(*PLAIN_GEMM))])
    assert made[0] == made[1]


def test_a_listing_without_the_kernel_is_refused(tmp_path: Path) -> None:
    tools()
    cubin = nvcc.compile_kernel(Source.of("profile/mark.cu"))
    kept = tmp_path / "mark.cubin"
    shutil.copy(cubin.path, kept)
    with pytest.raises(CorruptError, match="does not show"):
        opcodes.opcodes(replace(cubin, path=kept, resources={"other": cubin.resources["mark"]}))
    kept.write_bytes(b"\x7fELF garbage")
    with pytest.raises(CorruptError):
        opcodes.opcodes(replace(cubin, path=kept))


def test_without_a_compiler_of_the_host_the_machine_is_to_blame(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(disassembler=False)
    compiler = next(path for path in toolchain.places("nvcc") if not toolchain.unfit(path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text(f"#!/bin/sh\nexec {compiler} \"$@\"\n")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: (tmp_path / "bin" / "nvcc", manifest.COMPILER))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(nvcc, "CACHE", tmp_path / "cubins")
    with pytest.raises(MachineError, match="gcc"):
        nvcc.compile_kernel(Source.of("profile/mark.cu"))


def test_components_are_found_by_their_sources() -> None:
    first: Component = next(c for c in catalogue() if c.id == "attention_bwd.bf16.sm90")
    assert first.id in kernels.users(catalogue(), kernels.needed(catalogue(), [first.id]))
