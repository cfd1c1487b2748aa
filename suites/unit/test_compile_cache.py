"""The cache of compiled kernels: asked thousands of times at a start, so files are read once, and again when they are others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.compile import CompileError, Resources, Source

SOURCE = Source.of("family/kernel.cu", {"WIDTH": 64})


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A folder of kernels and an empty cache; what is read of them."""
    (tmp_path / "kernels/family").mkdir(parents=True)
    (tmp_path / "kernels/family/kernel.cu").write_text('#include "../part.h"\nint a;\n')
    (tmp_path / "kernels/part.h").write_text("int b;\n")
    (tmp_path / "cubins").mkdir()
    monkeypatch.setattr(nvcc, "KERNELS", tmp_path / "kernels")
    monkeypatch.setattr(nvcc, "CACHE", tmp_path / "cubins")
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: (Path("nvcc"), "V1"))
    monkeypatch.setattr(nvcc.subprocess, "run", lambda *a, **k: pytest.fail("it was compiled"))
    seen, plain = list[Path](), Path.read_bytes

    def noted(self: Path) -> bytes:
        seen.append(self)
        return plain(self)
    monkeypatch.setattr(Path, "read_bytes", noted)
    return seen


def put(words: bytes = b"machine code") -> Path:
    """The cubin of SOURCE in the cache, as the compiler would leave it."""
    stem = nvcc.CACHE / f"kernel-{nvcc._digest(SOURCE, 'V1')}"
    cubin, record = stem.with_name(stem.name + ".cubin"), stem.with_name(stem.name + ".json")
    cubin.write_bytes(words)
    resources = {"kernel": asdict(Resources(registers=32, spill_stores=0, spill_loads=0, stack=0, static_shared=0))}
    record.write_text(json.dumps({"source": str(SOURCE), "binary_digest": nvcc._sha(cubin), "resources": resources}))
    return cubin


def replaced(path: Path, text: bytes) -> None:
    """Another file in its place, of the same size and time."""
    before = path.stat()
    part = path.with_name("part")
    part.write_bytes(text)
    assert part.stat().st_size == before.st_size
    os.utime(part, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(part, path)


def written(path: Path, text: bytes) -> None:
    """The same file with other bytes, as many, a moment later."""
    before = path.stat()
    assert len(text) == before.st_size
    path.write_bytes(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_a_second_question_reads_nothing(read: list[Path]) -> None:
    put()
    first = nvcc.compile_kernel(SOURCE)
    read.clear()
    assert nvcc.compile_kernel(SOURCE) == first and nvcc.compile_all([SOURCE] * 3) == [first] * 3 and not read


@pytest.mark.parametrize("change", [written, replaced])
@pytest.mark.parametrize(("file", "text"), [("family/kernel.cu", b'#include "../part.h"\nint c;\n'), ("part.h", b"int c;\n")])
def test_another_text_is_another_kernel_at_once(change: Callable[[Path, bytes], None], file: str, text: bytes, read: list[Path]) -> None:
    before = nvcc._digest(SOURCE, "V1")
    change(nvcc.KERNELS / file, text)
    assert nvcc._digest(SOURCE, "V1") != before
    with pytest.raises(pytest.fail.Exception, match="it was compiled"):
        nvcc.compile_kernel(SOURCE)


def test_what_decides_it_beside_the_text_counts_each_time(read: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {nvcc._digest(SOURCE, "V1"), nvcc._digest(SOURCE, "V2"), nvcc._digest(Source.of(SOURCE.path, {"WIDTH": 32}), "V1")}
    monkeypatch.setattr(nvcc, "FLAGS", (*nvcc.FLAGS, "-G"))
    assert len(seen | {nvcc._digest(SOURCE, "V1")}) == 4


@pytest.mark.parametrize("change", [written, replaced])
def test_a_cubin_that_changed_is_made_again(change: Callable[[Path, bytes], None], read: list[Path]) -> None:
    cubin = put()
    nvcc.compile_kernel(SOURCE)
    change(cubin, b"machine coda")
    for ask in (nvcc.compile_kernel, lambda s: nvcc.compile_all([s])):
        with pytest.raises(pytest.fail.Exception, match="it was compiled"):
            ask(SOURCE)
    cubin.unlink()
    with pytest.raises(pytest.fail.Exception, match="it was compiled"):
        nvcc.compile_kernel(SOURCE)


def test_a_source_that_goes_is_missed(read: list[Path]) -> None:
    put()
    nvcc.compile_kernel(SOURCE)
    (nvcc.KERNELS / "part.h").unlink()
    with pytest.raises(CompileError, match="includes a missing file"):
        nvcc.compile_kernel(SOURCE)
    (nvcc.KERNELS / SOURCE.path).unlink()
    with pytest.raises(CompileError, match="no such kernel source"):
        nvcc.compile_kernel(SOURCE)
