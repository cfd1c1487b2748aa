"""Kernels in folders of their users: gated by the same engines, in a process of their own, and never part of a run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from emulated_gpu import emulated_gpu
from emulated_kernels import emulated_kernels

from alpha import cli
from alpha.cli import outside as outside_command
from alpha.cuda_runtime.compile import CompileError
from alpha.cuda_runtime.toolchain import find_nvcc
from alpha.errors import CorruptError, InputError, MachineError
from alpha.gates import run as gates_run
from alpha.gates import subjects
from alpha.gates.cuda import subjects as cuda_subjects
from alpha.gates.outside import explain, folder, perf, process, run
from alpha.gates.outside.subjects import bind
from alpha.ops.table import table
from alpha.registry.digest import component_digests
from alpha.registry.evidence import load_file
from alpha.registry.gpu import gpu_class
from alpha.registry.judge import FAIL, NOT_RUN
from alpha.registry.package import Package
from alpha.tomlfile import read_toml
from alpha.train.catalogue import catalogue

ROOT = Path(__file__).resolve().parents[2]
CHEATS = read_toml(ROOT / "alpha" / "gates" / "adversarial" / "outside.toml")["cheat"]

TOML = """
[component]
name = "softmax"
reference = "reference.py:softmax"
candidate = "candidate.py:softmax"
language = "numpy"
types = ["f32"]

[sizes]
rows = { least = 1, most = 9, timed = 8 }
columns = { least = 1, most = 24, timed = 24 }

[inputs]
x = { shape = ["rows", "columns"] }

[outputs]
y = { shape = ["rows", "columns"] }
lse = { shape = ["rows"] }
"""
REFERENCE = """
import numpy as np

def softmax(x):
    top = x.max(axis=-1, keepdims=True)
    e = np.exp(x - top)
    total = e.sum(axis=-1, keepdims=True)
    return e / total, (top + np.log(total))[:, 0]
"""
HONEST = """
import gc, os, sys, threading, time
import numpy as np

def softmax(x, y, lse):
    top = x.max(axis=-1, keepdims=True)
    e = np.exp(x - top)
    total = e.sum(axis=-1, keepdims=True)
    y[...], lse[...] = e / total, (top + np.log(total))[:, 0]
"""
CHEAT = HONEST + "\nhonest = softmax\n"


def made(place: Path, candidate: str = HONEST, *, toml: str = TOML, reference: str = REFERENCE) -> folder.Outside:
    """The component of a folder of these texts."""
    for name, text in (("component.toml", toml), ("reference.py", reference), ("candidate.py", candidate)):
        (place / name).write_text(text)
    return folder.load(folder.find(str(place)))


def rejected(outside: folder.Outside) -> list[str]:
    """What the first gate that says no says; [] when none does."""
    for gate in outside.gates():
        (result,) = run.gates(outside, gate)
        if not result.satisfied:
            assert result.verdict == FAIL and result.why, result
            return [f"{gate}: {why}" for why in result.why]
    return []


@pytest.fixture
def remade(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are not the matter of cheats."""
    monkeypatch.setattr(subjects, "component_digests", lambda *a, **k: {"implementation": "cheat"})


@pytest.mark.parametrize("cheat", CHEATS, ids=[f"{c['number']}-{c['name'].replace(' ', '-')}" for c in CHEATS])
def test_cheats_are_rejected(cheat: dict[str, Any], tmp_path: Path, remade: None) -> None:
    words = rejected(made(tmp_path, CHEAT + cheat["code"]))
    assert words, f"cheat {cheat['number']} ({cheat['name']}) got through"
    assert not any("inf times" in w for w in words), words


def test_a_sound_candidate_passes_and_its_records_are_evidence(tmp_path: Path) -> None:
    outside = made(tmp_path)
    results = run.gates(outside)
    assert [(r.gate, r.satisfied) for r in results] == [(g, True) for g in ("parity", "determinism", "faults", "perf")], results
    (file,) = (tmp_path / "evidence").rglob("*.jsonl")
    assert set(load_file(file)) == {r.gate for r in results}
    digests = load_file(file)["parity"].digests
    made(tmp_path, HONEST + "\n# edited\n")
    again = folder.load(tmp_path)
    with again.in_table():
        now = component_digests(again.component, "parity", package=Package())
    assert now["binaries"] != digests["binaries"] and now["row"] == digests["row"] and now["measure"] == digests["measure"]
    file.write_text(file.read_text().replace('"declared":', '"declared":1', 1))
    with pytest.raises(CorruptError):
        load_file(file)


def test_nothing_of_it_can_enter_a_run(tmp_path: Path) -> None:
    outside = made(tmp_path)
    assert outside.component.id not in catalogue() and outside.component.op not in table()
    with outside.in_table():
        assert outside.component.op in table()
    assert outside.component.op not in table()
    with pytest.raises(InputError, match="not running"):
        bind(outside.component, (), (), {})


@pytest.mark.parametrize(("find", "replace", "words"), [
    ('types = ["f32"]', 'types = ["f32"]\ntolerance = 0.1', "component.tolerance"),
    ('language = "numpy"', 'language = "rust"', "rust"),
    ('types = ["f32"]', 'types = ["bf16"]', "bf16"),
    ("most = 9, ", "most = 0, ", "sizes.rows"),
    ('["rows"] }', '["rows * other"] }', "rows \\* other"),
    ('"reference.py:softmax"', '"reference.py:hardmax"', "hardmax"),
    ('"candidate.py:softmax"', '"../candidate.py:softmax"', "not there"),
    ("lse = {", "other = { shape = [] }\nlse = {", "not those declared"),
])
def test_a_wrong_description_is_refused(find: str, replace: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        made(tmp_path, toml=TOML.replace(find, replace))


def test_a_candidate_that_cannot_be_loaded_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="SyntaxError"):
        run.gates(made(tmp_path, "def softmax(:"), "parity")


def test_a_candidate_that_answers_as_it_is_imported_is_bad_input(tmp_path: Path) -> None:
    """It finds the judge's pipe among the open files of its process."""
    noise = "import os\nfor fd in range(1, 20):\n    try:\n        os.write(fd, b'[\\n')\n    except OSError:\n        pass\n"
    with pytest.raises(InputError, match="cannot be loaded"):
        run.gates(made(tmp_path, noise + HONEST), "parity")


@pytest.mark.parametrize("name", ["types", "time"])
def test_a_candidate_may_be_named_as_a_module_of_the_standard_library(name: str, tmp_path: Path) -> None:
    """It was taken for that one: `module 'types' has no attribute 'softmax'`."""
    (tmp_path / f"{name}.py").write_text(HONEST)
    outside = made(tmp_path, toml=TOML.replace("candidate.py", f"{name}.py"))
    (result,) = run.gates(outside, "faults")
    assert result.satisfied, result


def test_an_entry_point_of_a_package_that_is_gone_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "gone-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gone\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[alpha.components]\nsoft = gone.kernels\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="leads to no component"):
        folder.find("soft")


@pytest.mark.parametrize("wrong", [True, False])
def test_a_page_that_cannot_be_written_does_not_hide_a_verdict(wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               capfd: pytest.CaptureFixture[str]) -> None:
    """A gate that said no ended with 3, which says that nothing could run."""
    def no_page(*_: object) -> Path:
        raise MachineError("the page could not be written")

    made(tmp_path, HONEST.replace("e / total,", "e / (total + 1),") if wrong else HONEST)
    monkeypatch.setattr(outside_command, "write_page", no_page)
    assert cli.main(["gate", "run", "--from", str(tmp_path), "--gate", "parity"]) == (1 if wrong else 3)
    assert "the page could not be written" in capfd.readouterr().err
    assert cli.main(["gate", "run", "--from", str(tmp_path), "--nproc", "2"]) == 2


def test_who_ends_the_gates_leaves_no_folder_of_a_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM left a folder under /tmp and one in memory for each such end, whether the candidate was loaded yet or not."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(process.os, "access", lambda *_: False)  # operands too
    end = f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM); import time; time.sleep(1)\n"
    for candidate in (end + HONEST, HONEST.replace("    top = x.max", f"    {end.strip()}\n    top = x.max")):
        before = signal.signal(signal.SIGTERM, lambda *_: None)  # of a red test: it would end the session
        try:
            made(tmp_path, candidate)
            with pytest.raises(SystemExit, match="143"):
                cli.main(["gate", "run", "--from", str(tmp_path), "--gate", "faults", "--no-page"])
        finally:
            signal.signal(signal.SIGTERM, before)
        assert not list(temporary.iterdir())


def test_clock_and_statistics_are_out_of_reach(tmp_path: Path) -> None:
    """5, 27: patched in its own process, they say nothing to the judge."""
    slow = CHEAT + '''
import statistics
pause = time.sleep
for name in ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns"):
    setattr(time, name, lambda: 0)
np.median = np.min = statistics.median = lambda *a, **k: 0
def softmax(x, y, lse):
    pause(0.003)
    honest(x, y, lse)
'''
    (result,) = run.gates(made(tmp_path, slow), "perf")
    assert result.record is not None and min(result.record.cases[0]["times_ns"]) > 3_000_000


def test_a_library_of_no_allowed_origin_is_refused(tmp_path: Path) -> None:
    """15: the check of loaded libraries looks at the candidate's process too."""
    source = tmp_path / "fast.c"
    source.write_text("int fast(void) { return 1; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "fast.so", source], check=True)
    calling = CHEAT + f"\nimport ctypes\nctypes.CDLL({str(tmp_path / 'fast.so')!r})\nsoftmax = honest\n"
    made(tmp_path, calling)
    done = warm.run(["-m", "alpha", "gate", "run", "--from", str(tmp_path), "--gate", "parity"], cwd=tmp_path, timeout=300)
    assert done.returncode == 1 and re.search(r"child \d+ .*fast\.so", done.stderr), done.stdout + done.stderr


TORCH = '''
import numpy as np
float32, __version__ = np.dtype(np.float32), "of a test"

class Tensor:
    def __init__(self, array):
        self.array = array
    def copy_(self, other):
        self.array[...] = other.array

class cuda:
    is_available = staticmethod(lambda: False)

from_numpy = Tensor
empty = lambda shape, dtype, device: Tensor(np.empty(shape, dtype))
'''


def test_torch_of_another_interpreter(tmp_path: Path) -> None:
    """With a module of torch's name that holds what the process asks of it."""
    venv.create(tmp_path / "other", symlinks=True)
    (site,) = (tmp_path / "other" / "lib").glob("python*/site-packages")
    (site / "torch.py").write_text(TORCH)
    (site / "numpy.pth").write_text(str(Path(np.__file__).parents[1]))
    tensors = CHEAT + "\ndef softmax(x, y, lse):\n    honest(x.array, y.array, lse.array)\n"
    outside = made(tmp_path, tensors, toml=TOML.replace('"numpy"', '"torch"'))
    (result,) = run.gates(outside, "parity", python=str(tmp_path / "other" / "bin" / "python"))
    assert result.satisfied and result.record is not None and result.record.environment["candidate"] == "torch of a test on cpu"
    (missing,) = run.gates(outside, "parity", python=sys.executable)
    assert missing.verdict == NOT_RUN and "torch is not installed" in missing.why[0]


GELU = """
[component]
name = "mine"
op = "gelu"
candidate = "candidate.py:gelu"
language = "numpy"
types = ["f32"]

[sizes]
n = { least = 1, most = 300, timed = 256 }

[inputs]
x = { shape = ["n"] }

[outputs]
y = { shape = ["n"] }

[attributes]
approximate = "tanh"
"""
TANH = """
import numpy as np

def gelu(x, y, approximate):
    y[...] = x * np.float32(0.5) * (1 + np.tanh(np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)))
"""
SQUARE = """
import numpy as np

def square(x):
    return x * x

def square_bwd(dy, x):
    return 2 * dy * x
"""
BACKWARD = """
[component]
name = "square_bwd"
reference = "reference.py:square_bwd"
differentiates = "reference.py:square"
cotangents = ["dy"]
candidate = "candidate.py:square_bwd"
language = "numpy"
types = ["f32"]

[sizes]
n = { least = 1, most = 40, timed = 32 }

[inputs]
dy = { shape = ["n"] }
x = { shape = ["n"] }

[outputs]
dx = { shape = ["n"] }
"""


def test_a_row_of_the_op_table_and_its_gradient(tmp_path: Path) -> None:
    results = run.gates(made(tmp_path, TANH, toml=GELU))
    assert [r.gate for r in results] == ["parity", "gradient", "determinism", "faults", "perf"]
    assert all(r.satisfied for r in results), results


def test_a_backward_kernel_is_held_to_differences_of_the_forward_pass(tmp_path: Path) -> None:
    right = "def square_bwd(dy, x, dx):\n    dx[...] = 2 * dy * x\n"
    assert all(r.satisfied for r in run.gates(made(tmp_path, right, reference=SQUARE, toml=BACKWARD)))
    halved = SQUARE.replace("return 2 * dy", "return dy")  # a reference that is no derivative, and a candidate that follows it
    outside = made(tmp_path, right.replace("2 * dy", "dy"), reference=halved, toml=BACKWARD)
    (parity,), (gradient,) = run.gates(outside, "parity"), run.gates(outside, "gradient")
    assert parity.satisfied and gradient.verdict == FAIL and "of the gradient's size" in gradient.why[0]


def test_an_installed_package_offers_a_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels_of_mine").mkdir()
    made(tmp_path / "kernels_of_mine")
    (tmp_path / "kernels_of_mine" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    information = tmp_path / "kernels_of_mine-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels-of-mine\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[alpha.components]\nfast-softmax = kernels_of_mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert folder.find("fast-softmax") == (tmp_path / "kernels_of_mine").resolve()
    with pytest.raises(InputError, match="fast-softmax"):
        folder.find("slow-softmax")


def plain(place: Path, reference: str, candidate: str, /, *, n: str = "least = 1, most = 300", **more: str) -> folder.Outside:
    """The component of a function f of one vector. `more`: keys of [component]; `inputs`, `outputs`: those tables."""
    inputs, outputs = more.pop("inputs", 'x = { shape = ["n"] }'), more.pop("outputs", 'y = { shape = ["n"] }')
    own = {"name": '"f"', "reference": '"reference.py:f"', "candidate": '"candidate.py:f"', "language": '"numpy"', "types": '["f32"]'}
    keys = "\n".join(f"{k} = {v}" for k, v in (own | more).items())
    toml = f"[component]\n{keys}\n[sizes]\nn = {{ {n} }}\n[inputs]\n{inputs}\n[outputs]\n{outputs}\n"
    head = "import numpy as np\ndef f"
    return made(place, f"{head}{candidate}\n", toml=toml, reference=f"{head}{reference}\n")


TWICE = "(x): return 2.0 * x"
RIGHT = "(x, y): np.multiply(x, np.float32(2), out=y)"


@pytest.mark.parametrize("most", ["walked", "larger"])
def test_each_timed_size_is_held_to_the_oracle(most: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is wrong at the larger timed size alone, the same way at each call."""
    if most == "larger":
        monkeypatch.setattr(perf, "STEPS", 100_000)
    wrong = RIGHT + "; y[100000:] = 7"
    (result,) = run.gates(plain(tmp_path, TWICE, wrong, n="least = 1, most = 700000"), "perf")
    assert result.record is not None and [bool(c.get("note")) for c in result.record.cases] == [False, True]
    assert result.verdict == FAIL and "beyond the tolerance" in result.why[0], result
    assert run.gates(plain(tmp_path, TWICE, RIGHT, n="least = 1, most = 700000"), "perf")[0].satisfied


def test_a_sum_is_timed_at_sizes_too_large_to_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose error in float32 grows with its length."""
    monkeypatch.setattr(perf, "STEPS", 20_000)
    one, n = "y = { shape = [1] }", "least = 1, most = 200000, timed = 200000"
    sequential = "(x, y): y[0] = np.add.accumulate(x)[-1]"
    for candidate, satisfied in ((sequential, True), (sequential + " + np.float32(50)", False)):
        found = run.gates(plain(tmp_path, "(x): return x.sum(axis=0, keepdims=True)", candidate, n=n, outputs=one), "perf")
        assert [r.satisfied for r in found] == [satisfied], found


@pytest.mark.parametrize("reference", ["(x):\n    x *= 2.0\n    return x + 0.0", "(x): return np.multiply(x, 2.0, out=x)"])
def test_a_reference_that_writes_into_its_input_is_refused(reference: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the reference writes into its input"):
        plain(tmp_path, reference, RIGHT)


@pytest.mark.parametrize(("reference", "outputs"), [("(x): return float(x.sum())", "y = { shape = [] }"),
                                                    ("(x): return [x * 2.0]", 'y = { shape = ["n"] }'),
                                                    ("(x): return [x * 2.0, x > 0]", 'y = { shape = ["n"] }\n'
                                                                                     'z = { shape = ["n"], type = "bool" }')])
def test_a_reference_may_return_numbers_and_lists(reference: str, outputs: str, tmp_path: Path) -> None:
    right = {1: "(x, y): y[...] = x.astype(np.float64).sum()", 2: RIGHT, 3: "(x, y, z): y[...], z[...] = 2 * x, x > 0"}
    candidate = right[1 if "sum" in reference else 3 if "z" in outputs else 2]
    assert run.gates(plain(tmp_path, reference, candidate, outputs=outputs), "parity")[0].satisfied


@pytest.mark.parametrize(("reference", "dtype", "words"), [("np.floor(x)", ', type = "i32"', "float64"), ("x > 0", "", "y of bool"),
                                                           ("[1j]", "", "those declared")])
def test_outputs_of_another_sort_than_declared_are_refused(reference: str, dtype: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        plain(tmp_path, f"(x): return {reference}", RIGHT, outputs=f'y = {{ shape = ["n"]{dtype} }}')


@pytest.mark.parametrize(("key", "value"), [
    ("types", "5"), ("types", '"f32"'), ("files", "5"), ("files", "[1]"), ("reference", "5"), ("cotangents", "5"),
    ("flops", "5"), ("differentiates", "5"), ("candidate", "true"), ("flops", '"5 * rows"'), ("flops", '"n +"')])
def test_values_of_component_are_of_their_sort(key: str, value: str, tmp_path: Path) -> None:
    words = "not an expression of sizes" if "n +" in value or "rows" in value else f"component.{key}"
    more = {"differentiates": '"reference.py:g"'} if key == "cotangents" else {}
    with pytest.raises(InputError, match=re.escape(words)):
        plain(tmp_path, "(x): return 2.0 * x\ndef g(x): return x", RIGHT, **{key: value, **more})


def test_the_name_of_a_row_is_a_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape("component.op = ['x']")):
        made(tmp_path, TANH, toml=GELU.replace('"gelu"', '["x"]'))


@pytest.mark.parametrize(("table", "text", "words"), [
    ("inputs", "x = { shape = 5 }", "inputs.x.shape = 5"), ("inputs", 'x = { shape = "n" }', "inputs.x.shape"),
    ("inputs", 'x = { shape = ["n", 1.0] }', "1.0"), ("inputs", 'x = { shape = ["n", -1] }', "-1"),
    ("inputs", 'x = { shape = ["n", true] }', "True"), ("inputs", "x = 5", "inputs.x = 5"), ("inputs", "x = {}", "inputs.x.shape = None"),
    ("inputs", 'x = { shape = ["n"], name = "y" }', "inputs.x.name"),
    ("inputs", 'x = { shape = ["n"] }\ni = { shape = ["n"], type = "i32", below = "0" }', "least < below"),
    ("inputs", 'x = { shape = ["n"] }\ni = { shape = ["n"], type = "i32", below = 9 }', "inputs.i.below = 9"),
    ("inputs", 'x = { shape = ["n"] }\ni = { shape = ["n"], type = "i32", below = "9", least = "1" }', "inputs.i.least = '1'"),
    ("outputs", 'y = { shape = ["n"], type = 5 }', "outputs.y.type = 5"), ("outputs", 'y = { shape = ["n"], type = "u8" }', "u8"),
    ("n", "least = 1, most = 300, timed = 5000000", "sizes.n.timed = 5000000"), ("n", 'least = 1, most = 9, timed = "a"', "'a'"),
    ("n", "least = 1.0, most = 9", "1.0"), ("n", "least = true, most = 9", "True"), ("n", "least = 1", "without most"),
])
def test_values_of_sizes_and_operands_are_of_their_sort(table: str, text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        plain(tmp_path, TWICE, RIGHT, **{table: text})  # type: ignore[arg-type]


def test_digests_name_the_files_of_references(tmp_path: Path) -> None:
    """The page and the records bind to them."""
    right = "def square_bwd(dy, x, dx):\n    dx[...] = 2 * dy * x\n"
    (tmp_path / "forward.py").write_text(SQUARE)
    outside = made(tmp_path, right, reference=SQUARE, toml=BACKWARD.replace('differentiates = "reference', 'differentiates = "forward'))
    assert set(outside.digests()) == {"component.toml", "candidate.py", "reference.py", "forward.py"}
    assert outside.component.binaries is not None and set(outside.component.binaries()) == set(outside.digests())


@pytest.mark.parametrize("write", ["y, (y.size + 1,), (4,))[-1]", "x, (x.size + 1,), (4,))[-1]", "x, (2,), (-4,))[1]"],
                         ids=["behind an output", "behind an input", "before the first"])
def test_writes_outside_operands_are_seen(write: str, tmp_path: Path) -> None:
    outside = RIGHT.replace(": ", ":\n    ") + f"\n    if x.size > 2: np.lib.stride_tricks.as_strided({write} = 3"
    component = plain(tmp_path, TWICE, outside)
    for gate in ("parity", "determinism"):
        (result,) = run.gates(component, gate)
        assert result.verdict == FAIL and any("the candidate wrote outside its operands" in w for w in result.why), result


@pytest.mark.parametrize(("text", "came"), [
    ("np.cumsum(x)", "np.cumsum"), ("x.cumsum()", "np.cumsum"), ("np.add.accumulate(x)", "np.add.accumulate"),
    ("x * x.prod()", "np.multiply.reduce"), ("x * np.dot(x, x)", "np.dot"), ("x * x.dot(x)", "np.dot"),
    ("np.einsum('i,i->i', x, x)", "np.einsum"), ("x / np.linalg.norm(x)", "np.linalg.norm"), ("x * (x @ x)", "@ of a vector"),
    ("x * x.sum(where=x > 0)", "np.add.reduce with where")])
def test_a_reference_that_the_walk_cannot_follow_is_refused(text: str, came: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the walk for the tolerance") as caught:
        plain(tmp_path, f"(x): return {text}", RIGHT)
    assert caught.value.came == came and "write" in caught.value.do


@pytest.mark.parametrize("constant", ["np.float32(0.1)", "0.1"])
def test_constants_may_be_rounded_to_the_type_of_the_kernel(constant: str, tmp_path: Path) -> None:
    kernel = f"(x, y): y[...] = x.astype(np.result_type(x, {constant})) * {constant}"
    for text, satisfied in ((kernel, True), (kernel.replace("0.1", "0.10001"), False)):
        assert run.gates(plain(tmp_path, "(x): return 0.1 * x", text), "parity")[0].satisfied == satisfied


# -- examples/ -----------------------------------------------------------------------------------------------------------------


def example(name: str, place: Path, *, small: bool = False) -> Path:
    """A copy of an example; `small`: for device code that runs on the CPU."""
    to = shutil.copytree(ROOT / "examples" / name, place / name, ignore=shutil.ignore_patterns("evidence", "report"))
    if small:
        text = (to / "component.toml").read_text()
        for find, replace in (("most = 65536, timed = 8192", "most = 2"), ("most = 8192, timed = 4096", "most = 70")):
            assert find in text
            text = text.replace(find, replace)
        (to / "component.toml").write_text(text)
    return to


@pytest.mark.parametrize(("name", "code", "words"), [
    ("numpy-sound", 0, ("PASS           parity", "BASELINE        perf")),
    ("numpy-wrong", 1, ("FAIL        parity", "expected", "tolerance")),
    ("numpy-cheat", 1, ("outputs stay as they were when one element of an input changes",)),
    ("triton", 3, ("NOT_RUN",)),
])
def test_examples_in_python(name: str, code: int, words: tuple[str, ...], tmp_path: Path) -> None:
    if name == "triton" and gpu_class() is not None:
        pytest.skip("NOT RUN: it is about machines without a GPU")
    place = example(name, tmp_path)
    done = warm.run(["-m", "alpha", "gate", "run", "--from", str(place)], cwd=tmp_path, environment={"COLUMNS": "200"}, timeout=300)
    assert done.returncode == code and all(w in done.stdout for w in words), done.stdout + done.stderr
    assert "inf times" not in done.stdout
    page = place / "report" / "report.html"
    assert page.exists() == (code != 3) and (code == 3 or ("PASS" if code == 0 else "FAIL") in page.read_text())


@pytest.mark.parametrize("name", ["cuda-sound", "cuda-wrong", "cuda-cheat"])
def test_examples_in_cuda_compile_and_are_not_run_without_a_gpu(name: str, tmp_path: Path) -> None:
    try:
        find_nvcc()
    except MachineError as error:
        pytest.skip(f"NOT RUN: {error.what}")
    if gpu_class() is not None:
        pytest.skip("NOT RUN: it is about machines without a GPU")
    place = example(name, tmp_path)
    found = run.gates(folder.load(place))
    assert {r.verdict for r in found} == {NOT_RUN} and "it compiles" in found[0].why[0]
    (place / "candidate.cu").write_text((place / "candidate.cu").read_text().replace("float top", "flaot top"))
    with pytest.raises(CompileError, match="flaot"):
        run.gates(folder.load(place))


@pytest.mark.parametrize(("name", "words"), [("cuda-sound", ""), ("cuda-wrong", r"y\[\d+,\d+\]: got .*, expected .*, tolerance "),
                                             ("cuda-cheat", "a replay gives other bits")])
def test_examples_in_cuda_on_emulated_device_code(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = folder.load(example(name, tmp_path, small=True))
    monkeypatch.setattr(subjects, "component_digests", lambda *a, **k: {"implementation": "emulated"})
    cuda_subjects.opened.cache_clear()
    with outside.in_table(), emulated_gpu(), emulated_kernels(ROOT / "kernels"):
        record, judgement = gates_run.measure(outside.component, "parity")
        why = explain.reasons(explain.told(outside.component, record), judgement)
    assert judgement.satisfied == (not words) and (not words or re.search(words, "\n".join(why))), why
