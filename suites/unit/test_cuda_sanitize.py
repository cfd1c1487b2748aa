"""The sanitizer gate without a GPU: what the tool's report may say and what counts as seen, by a stand-in for compute-sanitizer that
prints what it is told; that every planted error is in a kernel that is launched; what the calls do with memory, on an emulated GPU."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_gpu import Allocation, emulated, emulated_gpu
from rich.console import Console

from alpha.backends.cuda.lib import Gpu
from alpha.component import Component
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.memory import Span
from alpha.cuda_runtime.toolchain import find_nvdisasm
from alpha.errors import CorruptError, InputError, MachineError
from alpha.gates import processes
from alpha.gates.adversarial.cuda_plant import overlay
from alpha.gates.device_code import build as kernels
from alpha.gates.sanitize import command as sanitize_command
from alpha.gates.sanitize import engine as cuda_sanitize
from alpha.gates.sanitize import tool as sanitize_tool
from alpha.gates.sanitize.engine import SHORT, UNSET, Finding, Job, Plant
from alpha.gates.sanitize.tool import TOOLS, Seen
from alpha.registry.faults import Fault
from alpha.registry.judge import FAIL, NOT_RUN, PASS
from alpha.registry.package import Package
from alpha.train.catalogue import catalogue

H200 = "cuda_sm90_H200"
KERNEL = "rmsnorm_bwd.bf16.sm90"
GPU_KERNELS = [c for c in catalogue() if c.kind == "kernel" and c.backend == "cuda"]

# Reports as the user guide of the tool prints them.
NOTHING = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"}
SOMETHING = {
    "memcheck": "Invalid __global__ write of size 16 bytes\n=========     at KERNEL+0x3b0 in backward.cu:178\n"
                "=========     by thread (0,0,0) in block (3,0,0)\n=========     Address 0x7f01 is out of bounds\n"
                "========= ERROR SUMMARY: 4 errors",
    "racecheck": "Error: Race reported between Write access at KERNEL+0x1a70 in backward.cu:173\n"
                 "=========     and Read access at KERNEL+0x1b60 in backward.cu:186 [640 hazards]\n=========\n"
                 "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
    "synccheck": "Barrier error detected. Divergent thread(s) in warp.\n=========     at KERNEL+0x90 in backward.cu:175\n"
                 "========= ERROR SUMMARY: 2 errors",
    "initcheck": "Uninitialized __global__ memory read of size 16 bytes\n=========     at KERNEL+0x90 in backward.cu:120\n"
                 "========= ERROR SUMMARY: 2 errors",
}

TOOL = r'''#!{python}
import json, os, pathlib, signal, sys, time
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("NVIDIA (R) Compute Sanitizer\nVersion 2025.3.0.0")
    sys.exit(0)
check, log = arguments[arguments.index("--tool") + 1], pathlib.Path(arguments[arguments.index("--log-file") + 1])
around, kernels, lines, nonce, names, finished, scratch = arguments[-7:]
says = json.loads(pathlib.Path({says!r}).read_text())
sound = {{str(p.relative_to({kernels!r})): p.read_text() for p in pathlib.Path({kernels!r}).rglob("*.cu*")}}
broken = any((pathlib.Path(kernels) / p).read_text() != text for p, text in sound.items() if "checks" not in p)
assert bool(lines) == (not around and not broken), "sound code has line numbers, and only that"
assert not scratch, "this component's scratch memory is as it comes"
body, code, calls = says[check]["planted" if around or broken else "sound"]
if body == "hang":
    time.sleep(600)
if body is not None:
    log.write_text(body)
pathlib.Path(finished).write_text(str(len(json.loads(names)) + calls))
print("the process's own words: ERROR SUMMARY: 0 errors")
print("torn", file=sys.stderr)
sys.exit(code) if code >= 0 else os.kill(os.getpid(), -code)
'''


def report(*lines: str) -> str:
    return "========= COMPUTE-SANITIZER\n" + "".join(f"========= {line}\n" for line in lines)


def clean(tool: str) -> tuple[str, int, int]:
    """(report, exit code, calls more or fewer than wanted) of a run in which nothing was found."""
    return report(NOTHING.get(tool, NOTHING["memcheck"])), 0, 0


def found(tool: str, kernel: str = "norm_backward") -> tuple[str, int, int]:
    return report(SOMETHING[tool].replace("KERNEL", kernel)), 0, 0


@cache
def package() -> Package:
    """No test here changes a source: one snapshot is looked through for all."""
    return Package()


@pytest.fixture(autouse=True)
def one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_sanitize, "Package", package)


@pytest.fixture(scope="module")
def copies() -> Iterator[Callable[[Fault | None], Path]]:
    """The copy of kernels/ for a fault, or the sound one: made once, since what runs here in place of the tool writes into none."""
    with ExitStack() as stack:
        lock, made = threading.Lock(), dict[str, Path]()

        def copy(fault: Fault | None) -> Path:
            name = "" if fault is None else fault.id
            with lock:  # jobs run side by side
                if name not in made:
                    made[name] = stack.enter_context(overlay(fault))
                return made[name]

        yield copy


@pytest.fixture(autouse=True)
def kept_copies(monkeypatch: pytest.MonkeyPatch, copies: Callable[[Fault | None], Path]) -> None:
    monkeypatch.setattr(cuda_sanitize, "overlay", lambda fault: nullcontext(copies(fault)))


@pytest.fixture
def stand_in(tmp_path: Path) -> tuple[Path, Path]:
    """(an executable in the place of compute-sanitizer, the file that tells it what to say)."""
    tool, says = tmp_path / "bin" / "compute-sanitizer", tmp_path / "says.json"
    tool.parent.mkdir()
    tool.write_text(TOOL.format(python=sys.executable, says=str(says), kernels=str(nvcc.KERNELS)))
    tool.chmod(0o755)
    return tool, says


def job(tool: str, component: Component | None = None) -> Job:
    """A job whose files need no compiler: the kernels that the errors are in are given."""
    component = component or catalogue()[KERNEL]
    plants = cuda_sanitize.plants_of(component, tool)
    return Job(component=component, tool=tool, nonce="00", names=("one", "two"), plants=tuple((p, ("norm_backward",)) for p in plants),
               digests={"implementation": "0"})


def measured(stand_in: tuple[Path, Path], tool: str, sound: object, planted: object, root: Path) -> Finding:
    stand_in[1].write_text(json.dumps({tool: {"sound": sound, "planted": planted}}))
    (one,) = cuda_sanitize.measure(stand_in[0], [job(tool)], H200, workers=2, root=root)
    return one


# --- what counts ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", TOOLS)
def test_silence_counts_where_the_planted_errors_were_reported(stand_in: tuple[Path, Path], tmp_path: Path, tool: str) -> None:
    one = measured(stand_in, tool, clean(tool), found(tool), tmp_path)
    assert cuda_sanitize.verdict(one) == (PASS, "")
    assert len(one.plants) == {"memcheck": 1, "initcheck": 1}.get(tool, 3) and one.version == "2025.3.0.0" and one.calls == 2


@pytest.mark.parametrize("tool", TOOLS)
def test_silence_of_a_tool_that_missed_the_planted_error_counts_nothing(stand_in: tuple[Path, Path], tmp_path: Path, tool: str) -> None:
    what, why = cuda_sanitize.verdict(measured(stand_in, tool, clean(tool), clean(tool), tmp_path))
    assert what == NOT_RUN and "does not see the error planted" in why and "it was silent" in why


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_reported_of_sound_code_is_a_failure_with_its_place(stand_in: tuple[Path, Path], tmp_path: Path, tool: str) -> None:
    for planted in (clean(tool), found(tool)):
        what, why = cuda_sanitize.verdict(measured(stand_in, tool, found(tool), planted, tmp_path))
        assert what == FAIL and re.search(r"norm_backward\+0x\w+ in backward\.cu:\d+", why)


INCONCLUSIVE = {
    "no report": (None, 0, 0),
    "crash": (None, -11, 0),
    "crash after a clean report": (*clean("memcheck")[:1], 139, 0),
    "the process failed": (*clean("memcheck")[:1], 1, 0),
    "calls are missing": (*clean("memcheck")[:1], 0, -1),
    "no call at all": (*clean("memcheck")[:1], 0, -2),
    "garbage": ("\x00\xffnot a report\n", 0, 0),
    "torn": (report("ERROR SUMM").rstrip(), 0, 0),
    "two summaries": (report(NOTHING["memcheck"], NOTHING["memcheck"]), 0, 0),
    "a word of the tool's own": (report("Internal Sanitizer Error: the tool lost the process", NOTHING["memcheck"]), 0, 0),
    "lost barriers": (report("Warning: Detected overflow of tracked cuda::barrier structures.", NOTHING["racecheck"]), 0, 0),
    "not written by the tool": (report(NOTHING["memcheck"]) + "a line without its mark\n", 0, 0),
    "other wording": (report("ERROR SUMMARY: no errors"), 0, 0),
    "hang": ("hang", 0, 0),
}


@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
@pytest.mark.parametrize("case", INCONCLUSIVE)
def test_an_incomplete_run_settles_nothing(stand_in: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str,
                                           tool: str) -> None:
    """Neither as a clean run of sound code nor as a report of a planted error."""
    sound = cuda_sanitize.process
    if case == "hang":
        monkeypatch.setattr(cuda_sanitize, "process", lambda sanitizer, j, plant: sound(sanitizer, j, plant, timeout=0.5))
    one = measured(stand_in, tool, INCONCLUSIVE[case], found(tool) if case != "hang" else INCONCLUSIVE[case], tmp_path)
    what, why = cuda_sanitize.verdict(one)
    assert what == NOT_RUN and "came to no result" in why, why
    if case != "hang":
        one = measured(stand_in, tool, clean(tool), INCONCLUSIVE[case], tmp_path)
        what, why = cuda_sanitize.verdict(one)
        assert what == NOT_RUN and "does not see the error planted" in why, why


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_ends_the_run_ends_all_of_it(stand_in: tuple[Path, Path], tmp_path: Path, number: signal.Signals) -> None:
    """What is left behind goes on computing: a GPU that is shared with it measures nothing well."""
    leaders: set[int] = set()

    def end() -> None:
        while len(processes._under_way) < 2:
            time.sleep(0.01)
        leaders.update(processes._under_way)
        os.kill(os.getpid(), number)

    began, before = time.monotonic(), signal.getsignal(signal.SIGTERM)
    threading.Thread(target=end).start()
    with pytest.raises((SystemExit, KeyboardInterrupt)), processes.termination_raises():
        measured(stand_in, "racecheck", INCONCLUSIVE["hang"], INCONCLUSIVE["hang"], tmp_path)
    assert time.monotonic() - began < 300 and leaders
    for leader in leaders:
        with pytest.raises(ProcessLookupError):
            os.killpg(leader, 0)
    assert signal.getsignal(signal.SIGTERM) == before and not cuda_sanitize.load(tmp_path, H200)


def test_a_report_about_another_kernel_is_no_catch(stand_in: tuple[Path, Path], tmp_path: Path) -> None:
    for kernel in ("norm_forward", "norm_backward_of_another", "my_norm_backward"):
        what, why = cuda_sanitize.verdict(measured(stand_in, "racecheck", clean("racecheck"), found("racecheck", kernel), tmp_path))
        assert what == NOT_RUN and "none of them there" in why


def test_one_planted_error_missed_of_three_is_one_too_many() -> None:
    seen = Seen(reported=1, words=("Race reported between Write access at norm_backward+0x10",), calls=2)
    silent = Seen(reported=0, calls=2)
    one = Finding(component=KERNEL, tool="racecheck", machine=H200, version="1", digests={}, nonce="0", calls=2, sound=silent,
                  plants={"a": (("norm_backward",), seen), "b": (("norm_backward",), seen)})
    assert cuda_sanitize.verdict(one)[0] == PASS
    assert cuda_sanitize.verdict(replace(one, plants={**one.plants, "c": (("norm_backward",), silent)}))[0] == NOT_RUN
    assert cuda_sanitize.verdict(replace(one, plants={}))[0] == NOT_RUN
    assert cuda_sanitize.verdict(replace(one, calls=0, sound=Seen(reported=0)))[0] == NOT_RUN


def test_reading_reports() -> None:
    assert sanitize_tool.read(report("ERROR SUMMARY: 1 error")) == (1, ())
    assert sanitize_tool.read(report("ERROR SUMMARY: 104 errors", "ERROR SUMMARY: 84 errors were not printed. Use --print-limit"))[0] == 104
    assert sanitize_tool.read("") == (None, ())
    assert sanitize_tool.read("ERROR SUMMARY: 0 errors\n") == (None, ("ERROR SUMMARY: 0 errors",))
    assert sanitize_tool.read(report("", "ERROR SUMMARY: 0 errors", ""))[1] == ()


def test_finding_the_tool(tmp_path: Path, stand_in: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    if not Path("/usr/local/cuda/bin/compute-sanitizer").exists():
        assert sanitize_tool.find() is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize_tool.find() == stand_in[0]
    monkeypatch.setenv("PATH", str(stand_in[0].parent))
    assert sanitize_tool.find() == stand_in[0] and sanitize_tool.version(stand_in[0]) == "2025.3.0.0"
    stand_in[0].write_text("#!/bin/sh\nexit 1\n")
    sanitize_tool.version.cache_clear()
    assert sanitize_tool.version(stand_in[0]) == ""
    assert sanitize_tool.version(tmp_path / "nowhere") == ""


# --- the command ------------------------------------------------------------------------------------------------------------------------


def invoked(*args: object, **more: object) -> tuple[int, str]:
    out = io.StringIO()
    code = sanitize_command.cmd_sanitize(*args, console=Console(file=out, width=400), **more)  # type: ignore[arg-type]
    return code, out.getvalue()


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize_command, "why_not_here", lambda c: "needs sm_90a: no GPU")
    assert invoked([KERNEL]) == (3, "NOT_RUN 1 components: needs sm_90a: no GPU\n")
    monkeypatch.setattr(sanitize_command, "why_not_here", lambda c: "")
    monkeypatch.setattr(sanitize_tool, "find", lambda: None)
    code, text = invoked([KERNEL])
    assert code == 3 and "needs compute-sanitizer" in text
    with pytest.raises(InputError, match="no kernel of the GPU matches"):
        invoked(["gelu.f32.cpu"])
    with pytest.raises(InputError, match="too few"):
        invoked([KERNEL], workers=0)


@pytest.mark.parametrize(("sound", "planted", "code"), [(clean, found, 0), (clean, clean, 3), (found, found, 1)])
def test_exit_codes(stand_in: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound: object, planted: object,
                    code: int) -> None:
    monkeypatch.setattr(sanitize_command, "why_not_here", lambda c: "")
    monkeypatch.setattr(sanitize_command, "gpu_class", lambda: cuda_sanitize.class_of_key(H200))
    monkeypatch.setattr(sanitize_tool, "find", lambda: stand_in[0])
    monkeypatch.setattr(cuda_sanitize, "local_root", lambda: tmp_path / "kept")
    monkeypatch.setattr(cuda_sanitize, "shipped_root", lambda: tmp_path / "none")
    monkeypatch.setattr(cuda_sanitize, "jobs", lambda wanted, report: [replace(job(t, c), digests=cuda_sanitize.digests_of(c, t))
                                                                     for c, tools in wanted.items() for t in tools])
    stand_in[1].write_text(json.dumps({"racecheck": {"sound": sound("racecheck"), "planted": planted("racecheck")}}))  # type: ignore[operator]
    came, text = invoked([KERNEL], tools=["racecheck"])
    assert came == code, text
    verdicts = cuda_sanitize.recorded_verdicts(catalogue()[KERNEL], H200, roots=[tmp_path / "kept"])
    assert verdicts["racecheck"][0] == {0: PASS, 1: FAIL, 3: NOT_RUN}[code]
    assert all(verdicts[t][0] == NOT_RUN for t in TOOLS if t != "racecheck")
    told = {0: "3 [dim]NOT_RUN[/], 1 [green]PASS[/]", 1: "1 [bold red]FAIL[/], 3 [dim]NOT_RUN[/]", 3: "4 [dim]NOT_RUN[/]"}
    assert sanitize_command.cell(verdicts) == told[code]
    stand_in[1].unlink()  # nothing may run again
    assert invoked([KERNEL], tools=["racecheck"], stale=True) == (0, (
        "nothing to run: every tool has a finding about the code as it is; `alpha gate status` shows the verdicts\n"))
    assert cuda_sanitize.missing(catalogue()[KERNEL], H200, TOOLS) == [t for t in TOOLS if t != "racecheck"]


# --- what is kept -----------------------------------------------------------------------------------------------------------------------


def test_findings_are_kept_whole_and_edited_ones_are_refused(stand_in: tuple[Path, Path], tmp_path: Path) -> None:
    one = measured(stand_in, "memcheck", clean("memcheck"), found("memcheck"), tmp_path)
    other = measured(stand_in, "synccheck", clean("synccheck"), clean("synccheck"), tmp_path)
    assert cuda_sanitize.load(tmp_path, H200) == {(KERNEL, "memcheck"): one, (KERNEL, "synccheck"): other}
    path = cuda_sanitize.path_of(tmp_path, H200)
    text = path.read_text()
    for broken in (text.replace('"reported":0', '"reported":00'), text.replace('"calls":2', '"calls":1'), text[:-40], "{}\n", "[]\n"):
        path.write_text(broken)
        with pytest.raises(CorruptError, match="cannot be read"):
            cuda_sanitize.load(tmp_path, H200)
    path.write_text(text)
    component = catalogue()[KERNEL]
    assert cuda_sanitize.recorded_verdicts(component, H200, roots=[tmp_path])["memcheck"] == (
        NOT_RUN, f"the finding is older than the code; run `alpha gate sanitize {KERNEL} --tool memcheck`")
    today = replace(one, digests=cuda_sanitize.digests_of(component, "memcheck"))
    cuda_sanitize.save(today, tmp_path)
    assert cuda_sanitize.recorded_verdicts(component, H200, roots=[tmp_path])["memcheck"] == (PASS, "")


# --- what is planted --------------------------------------------------------------------------------------------------------------------


def test_every_kernel_that_shares_memory_has_planted_errors() -> None:
    """Of what a component's calls launch, by name; and no error is planted where nothing is shared."""
    for component in GPU_KERNELS:
        _, launched = cuda_sanitize.chosen(component, "00" * 16)
        plants = {tool: cuda_sanitize.plants_of(component, tool) for tool in TOOLS}
        assert [p.id for p in plants["memcheck"]] == [SHORT] and [p.id for p in plants["initcheck"]] == [UNSET]
        sharing = {name for source, name in launched if "__shared__" in function(source, name)}
        for tool in ("racecheck", "synccheck"):
            prefixes = tuple(x for p in plants[tool] for x in p.kernels)
            assert {n for n in sharing if not n.startswith(prefixes)} == set(), f"{component.id}: {tool} has nothing planted there"
            assert bool(prefixes) == bool(sharing), component.id


def function(source: nvcc.Source, name: str) -> str:
    """The text of a kernel; of one that a macro makes, the whole file."""
    text = (nvcc.KERNELS / source.path).read_text(encoding="utf-8")
    parts = re.split(r'(?=extern "C" __global__)', text)
    return next((p for p in parts[1:] if re.search(rf"\b{name}\(", p.partition("{")[0])), text)


@pytest.mark.parametrize("component_id", ["rmsnorm_bwd.bf16.sm90", "rmsnorm.bf16.sm90", "sum.bf16.sm90", "update_scalars.f32.sm90",
                                          "count_valid.i32.sm90", "embedding_bwd.bf16.sm90"])
def test_planted_errors_change_kernels_that_are_launched(component_id: str) -> None:
    """`alpha gate sanitize --prepare` shows the same of all components."""
    compiler()
    component = catalogue()[component_id]
    _, launched = cuda_sanitize.chosen(component, "00" * 16)
    for tool in ("racecheck", "synccheck"):
        for plant in cuda_sanitize.plants_of(component, tool):
            assert all(name.startswith(plant.kernels) for name in cuda_sanitize.prepare(component, launched, plant))
    misplaced = Plant(id="misplaced", kernels=("no_such",), fault=plant.fault)
    with pytest.raises(InputError, match="is in nothing that the component's calls launch"):
        cuda_sanitize.prepare(component, launched, misplaced)


def test_scratch_memory_is_set_where_the_tool_does_not_see_what_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under initcheck alone, of components that use scratch memory; a finding says so in what it binds to."""
    found = [(c, tool) for c in GPU_KERNELS for tool in TOOLS if cuda_sanitize.unseen(c, tool)]
    assert found and {tool for _, tool in found} == {"initcheck"} and all(c.scratch is not None for c, _ in found)
    for component in GPU_KERNELS:
        for tool in TOOLS:
            assert ("scratch" in cuda_sanitize.digests_of(component, tool)) == ((component, tool) in found)
    told: list[str] = []
    component, region = found[0][0], Span(4096, 512)
    monkeypatch.setattr(cuda_sanitize, "fill", lambda span, byte, stream: told.append(f"set {span.nbytes} bytes to {byte:#x}"))
    plain = replace(component, implementation=lambda gpu, ins, outs, attrs: lambda stream: told.append("run"))
    cuda_sanitize._with_scratch_set(plain).implementation(Gpu(None, region), [], [], {})(0)
    assert told == ["set 512 bytes to 0xff", "run"]


def test_line_numbers_change_no_instruction() -> None:
    compiler()
    _, launched = cuda_sanitize.chosen(catalogue()[KERNEL], "00" * 16)
    source = next(s for s, name in launched if name == "norm_backward")
    plain = nvcc.compile_kernel(source)
    with nvcc.compiling(more=cuda_sanitize.LINE_NUMBERS):
        numbered = nvcc.compile_kernel(source)
    assert numbered.path != plain.path and numbered.resources == plain.resources
    assert code(numbered.path) == code(plain.path) != []


def code(cubin: Path) -> list[str]:
    text = subprocess.run([str(find_nvdisasm()[0]), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    return [line.strip() for line in text.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]


def compiler() -> None:
    try:
        kernels.exact_compiler()
        find_nvdisasm()
    except MachineError as error:
        pytest.skip(f"NOT_RUN: {error}")


# --- the calls --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("component_id", [c.id for c in GPU_KERNELS])
def test_calls_reach_every_operand_in_an_allocation_that_ends_with_it(component_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an emulated GPU: a call over exact allocations; one output of half its length; the start of one input never written."""
    asked: list[int] = []
    written: list[int] = []
    with emulated_gpu() as gpu:
        component = emulated(catalogue())[component_id]
        sound = Allocation.__init__

        def noted(self: Allocation, owner: object, nbytes: int) -> None:
            asked.append(nbytes)
            sound(self, gpu, 2 * nbytes + 16)  # room for what is written past a short one

        monkeypatch.setattr(Allocation, "__init__", noted)
        every = cuda_sanitize.candidates(component, "00" * 16)
        name = min(every, key=lambda n: sum(x.size for x in every[n].inputs))
        case = every[name]
        types = [*case.types, *case.out_types(cuda_sanitize.spec_of(component))]
        seen = {}
        for planted in ("", SHORT, UNSET):
            asked.clear(), written.clear()
            with monkeypatch.context() as patch:
                cuda = cuda_sanitize._bindings.pycuda_driver()

                def counted(at: int, x: np.ndarray, upload: Any = cuda.memcpy_htod) -> None:
                    written.append(x.nbytes)
                    upload(at, x)

                patch.setattr(cuda, "memcpy_htod", counted)
                cuda_sanitize.call_once(component, case, planted)
            seen[planted] = sorted(asked), sorted(written)
        plain, short, unset = (seen[k] for k in ("", SHORT, UNSET))
        for t in case.types:
            assert max(1, t.nbytes) in plain[0]
        largest = max(t.nbytes for t in types[len(case.types) :])
        gone = list(plain[0])
        for n in short[0]:
            gone.remove(n) if n in gone else None
        assert gone == [max(1, largest)] and max(1, largest // 2) in short[0] and len(short[0]) == len(plain[0])
        first, most = next((t for t in case.types if t.is_float), case.types[0]).nbytes, cuda_sanitize.UNSET_BYTES
        assert plain[0] == unset[0] and len(unset[1]) == len(plain[1]) - (first <= most)
        assert sum(unset[1]) == sum(plain[1]) - min(first, most)
        assert sum(plain[1]) == sum(t.nbytes for t in case.types)
