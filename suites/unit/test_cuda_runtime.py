"""What of the CUDA side can be held to account without a GPU: imports, refusals, sources, and the rules for device code."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import alpha.cuda_runtime
from alpha.backends.cuda.kernels.flash import AttentionProblem
from alpha.backends.cuda.kernels.gemm import GemmProblem, choose
from alpha.cuda_runtime import device
from alpha.cuda_runtime.compile import included_files
from alpha.cuda_runtime.device import Device
from alpha.errors import AlphaError, MachineError

KERNELS = Path(__file__).parents[2] / "kernels"
SOURCES = sorted(KERNELS.rglob("*.cu"))


def test_every_module_imports_without_a_gpu() -> None:
    names = [m.name for m in pkgutil.iter_modules(alpha.cuda_runtime.__path__)]
    assert len(names) >= 10
    for name in names:
        importlib.import_module(f"alpha.cuda_runtime.{name}")


def test_using_it_without_pycuda_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine: the import of pycuda is made to fail."""
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    device._open.cache_clear()
    with pytest.raises(MachineError) as error:
        Device.open()
    assert error.value.exit_code == 3 and "pycuda" in str(error.value) and error.value.do


def test_envelopes_refuse() -> None:
    with pytest.raises(AlphaError, match="256"):
        AttentionProblem(batch=1, queries=8, keys=8, heads=2, kv_heads=1, head_dim=256)
    with pytest.raises(AlphaError):
        AttentionProblem(batch=1, queries=8, keys=8, heads=3, kv_heads=2, head_dim=64)
    for outside in (GemmProblem(m=0, n=8, k=8), GemmProblem(m=8, n=8, k=7), GemmProblem(m=8, n=8, k=8, out="f32", activation="gelu")):
        with pytest.raises(AlphaError, match="does not cover"):
            outside.check()
    GemmProblem(m=1, n=8, k=8).check()
    assert "1000x768x768" in str(GemmProblem(m=1000, n=768, k=768))
    assert str(choose(GemmProblem(m=16384, n=768, k=3072))) == str(choose(GemmProblem(m=16384, n=768, k=3072)))


@pytest.mark.parametrize("path", SOURCES, ids=[str(p.relative_to(KERNELS)) for p in SOURCES])
def test_device_code_keeps_the_rules(path: Path) -> None:
    """A reader's comment on top; includes inside kernels/; no float atomics anywhere; nothing of another vendor library."""
    text = path.read_text()
    assert text.startswith("//"), "device code opens with the comment that says tiles, roles, memory and ordering"
    files = [path, *included_files(path)]
    assert all(KERNELS in f.resolve().parents for f in files)
    for f in files:
        code = re.sub(r"//[^\n]*", "", f.read_text())
        for call in re.findall(r"atomic\w+\s*\(([^;]*);", code):
            assert not re.search(r"\bfloat\b|\.f\b|fp32", call), f"{f.name}: a float atomic: {call}"
        sums = re.findall(r"\b(?:red|atom)\.[\w.]*add[\w.]*\.f(?:16|32|64)\b", code)
        in_turns = ["red.relaxed.gpu.global.add.v4.f32"] if f == KERNELS / "attention/one_pass.cu" else []  # the audit's exemption says why
        assert sums == in_turns, f"{f.name}: a float reduction in memory order"
        assert not re.search(r"#include\s*[<\"](cub|thrust|cutlass|cute|cublas|cudnn|nccl)", code), f"{f.name}: another library"


def test_there_are_kernels() -> None:
    assert len(SOURCES) >= 8
