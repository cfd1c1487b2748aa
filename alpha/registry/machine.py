"""The machine class: what numeric evidence of the CPU depends on, and nothing else. Floor 3.

Key: instruction set of NumPy's vector loops, NumPy X.Y, BLAS kernel, BLAS threads. The executor pins BLAS to one thread and the number
of workers changes no bit (a promise that the determinism gate checks), so the number of cores is environment and not class.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import threadpoolctl

from alpha.errors import InputError

_KEY = re.compile(r"cpu_(?P<isa>[A-Za-z0-9_.-]+)_np(?P<numpy>\d+\.\d+)_(?P<blas>[A-Za-z0-9.-]+)_t(?P<threads>\d+)")


@dataclass(frozen=True, kw_only=True)
class MachineClass:
    """isa: such as x86_64-avx512 or arm64-neon; numpy: X.Y; blas: name and kernel, such as openblas-SkylakeX; threads: of the BLAS."""

    isa: str
    numpy: str
    blas: str
    threads: int

    @property
    def key(self) -> str:
        """File-system-safe name: the folder of the evidence of this class."""
        return f"cpu_{self.isa}_np{self.numpy}_{self.blas}_t{self.threads}"

    def describe(self) -> str:
        """One readable line."""
        return f"CPU {self.isa}, NumPy {self.numpy}, BLAS {self.blas} with {self.threads} thread{'s' if self.threads != 1 else ''}"

    @classmethod
    def from_key(cls, key: str) -> MachineClass:
        """The class that a key names; InputError when it is none."""
        match = _KEY.fullmatch(key)
        if match is None:
            raise InputError("not the key of a machine class", came=key, expected="cpu_<isa>_np<X.Y>_<blas-kernel>_t<threads>",
                             do="`alpha doctor` prints the key of this machine")
        return cls(isa=match["isa"], numpy=match["numpy"], blas=match["blas"], threads=int(match["threads"]))


def machine_class(threads: int = 1) -> MachineClass:
    """The class of this process. `threads`: BLAS threads that the executor pins."""
    return MachineClass(isa=_isa(), numpy=".".join(np.__version__.split(".")[:2]), blas=_blas()[0], threads=threads)


def environment() -> dict[str, str]:
    """What a record keeps for the reader: versions and hardware, no host names and no paths. It enters no verdict."""
    name, version = _blas()
    return {
        "python": platform.python_version(), "numpy": np.__version__, "blas": f"{name} {version}".strip(),
        "system": f"{platform.system()} {platform.machine()}", "cpu": _cpu_model(), "cores": str(os.cpu_count() or 0),
        "processor": processor(),
    }


@cache
def processor() -> str:
    """Generation of this CPU, such as AuthenticAMD-25-1 (vendor, family, model): what shares of a ceiling carry over within. Cache and
    vector units of two generations differ by factors that the machine class, made for bits, does not see. "unknown" where it is hidden."""
    if sys.platform == "darwin":
        return _safe(_cpu_model())
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    return processor_of(text)


def processor_of(cpuinfo: str) -> str:
    """The generation that the first CPU of a /proc/cpuinfo names: x86's vendor, family and model, or Arm's implementer and part."""
    first: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        first.setdefault(key.strip(), value.strip())
    for keys in (("vendor_id", "cpu family", "model"), ("CPU implementer", "CPU part")):
        if all(first.get(k) for k in keys):
            return _safe("-".join(first[k] for k in keys))
    return "unknown"


def _isa() -> str:
    machine = {"amd64": "x86_64", "x86-64": "x86_64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    from numpy._core._multiarray_umath import __cpu_features__ as features  # type: ignore[attr-defined]
    return f"{machine}-{isa_level(machine, features)}"


def isa_level(machine: str, features: Mapping[str, bool]) -> str:
    """The widest instruction set that NumPy's loops were dispatched to."""
    ladder = {"x86_64": (("avx512", "AVX512_SKX"), ("avx2", "AVX2"), ("sse42", "SSE42")),
              "arm64": (("sve", "SVE"), ("neon", "ASIMD"))}.get(machine, ())
    return next((level for level, feature in ladder if features.get(feature)), "baseline")


@cache
def _blas() -> tuple[str, str]:
    """Name with kernel, and version, of the BLAS that NumPy calls."""
    np.ones((2, 2)) @ np.ones((2, 2))  # loaded for certain
    libraries = [x for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"]
    libraries.sort(key=lambda x: ("numpy" not in Path(x["filepath"]).parent.name.lower(), x["prefix"], x["version"] or ""))
    if libraries:
        b = libraries[0]
        return _safe(f"{b['internal_api']}-{b.get('architecture') or 'generic'}"), str(b["version"] or "")
    built = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index, call-overload]
    return _safe(f"{built['name']}-generic"), str(built.get("version") or "")


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text)


@cache
def _cpu_model() -> str:
    try:
        if sys.platform == "darwin":
            return subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True).stdout.strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"  # a sandbox may hide it; it is informative only
    return platform.processor() or "unknown"
