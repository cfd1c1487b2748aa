"""Parts of the device code compiled for the host, kept by content: what was compiled once is loaded, in later tests and sessions too."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from alpha.cuda_runtime.compile import REPOSITORY
from alpha.data.files import sha256_hex

KEPT = REPOSITORY / ".alpha" / "emulated"
"""Where processes of pytest may load what they compile (alpha/gates/plugin.py). A file that is mapped is never written again."""
FLAGS = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC")


def host_library(files: Mapping[str, str], *flags: str) -> ctypes.CDLL:
    """The library of `host.cpp`, one of `files` (name -> text), which includes the others. Skips the test where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("NOT_RUN: no g++, which compiles parts of the device code for the host")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    path = KEPT / f"host-{sha256_hex(repr((version, FLAGS, flags, sorted(files.items()))).encode())[:32]}.so"
    if not path.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            for name, text in files.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            subprocess.run([compiler, *FLAGS, *flags, "-o", "host.so", "host.cpp"], cwd=folder, check=True)
            os.replace(Path(folder) / "host.so", path)
    return ctypes.CDLL(str(path))
