"""Parts of the device code compiled for the host, kept by content: what was compiled once is loaded, in later tests and sessions too."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

from alpha.cuda_runtime.compile import KERNELS, REPOSITORY
from alpha.data.files import sha256_hex
from alpha.registry.faults import Fault, broken

KEPT = REPOSITORY / ".alpha" / "emulated"
"""Where processes of pytest may load what they compile (alpha/gates/plugin.py). A file that is mapped is never written again."""
FLAGS = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC")


def sources(paths: Iterable[str], fault: Fault | None = None) -> dict[str, str]:
    """Path under kernels/ -> the text there, with a fault in one of them."""
    texts = {path: (KERNELS / path).read_text(encoding="utf-8") for path in paths}
    if fault is not None:
        texts[fault.source] = broken(fault, texts[fault.source])
    return texts


def host_compiler() -> str:
    """The path of g++. Skips the test where there is none: called before a process of its own is started, which can skip nothing."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("NOT_RUN: no g++, which compiles parts of the device code for the host")
    return compiler


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def compiled(folder: Path, files: Mapping[str, str], *flags: str) -> Path:
    """Compile `host.cpp`, one of `files` (name -> text), in this folder. The test fails where g++ refuses: an exception that gates take
    for a verdict on a kernel would pass for a fault that was caught."""
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run([host_compiler(), *FLAGS, *flags, "-o", "host.so", "host.cpp"], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        defines = " ".join(flag for flag in flags if flag.startswith("-D")) or "no defines"
        pytest.fail(f"g++ does not compile what was made of the device code ({defines}). do: look at its first error, and at what stands "
                    f"for CUDA in suites/support:\n{done.stderr[:4000]}", pytrace=False)
    return folder / "host.so"


def host_library(files: Mapping[str, str], *flags: str) -> ctypes.CDLL:
    """The library of `host.cpp`, one of `files` (name -> text), which includes the others. Skips the test where there is no g++."""
    key = sha256_hex(repr((_version(host_compiler()), FLAGS, flags, sorted(files.items()))).encode())[:32]
    path = KEPT / f"host-{key}.so"
    if not path.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            os.replace(compiled(Path(folder), files, *flags), path)
    return ctypes.CDLL(str(path))
