"""The machine class of a GPU, and which class a component is measured on. Floor 3.

Key: compute capability and GPU model, such as `cuda_sm90_H200`. Cubins are machine code for one capability, so numbers carry over
within it; perf and determinism evidence belongs to one model. The driver only loads the code, so it is environment and not class.
The GPU is looked for without starting a driver in this process: a process that has done so can no longer fork one that computes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

from alpha.component import Component
from alpha.errors import InputError
from alpha.registry.machine import MachineClass, machine_class

_KEY = re.compile(r"cuda_(?P<capability>sm\d+)_(?P<model>[A-Za-z0-9.-]+)")


@dataclass(frozen=True, kw_only=True)
class GpuClass:
    """capability: such as sm90; model: such as H200."""

    capability: str
    model: str

    @property
    def key(self) -> str:
        """File-system-safe name: the folder of the evidence of this class."""
        return f"cuda_{self.capability}_{self.model}"

    def describe(self) -> str:
        """One readable line."""
        return f"GPU {self.model}, compute capability {self.capability.removeprefix('sm')[:-1]}.{self.capability[-1]}"

    @classmethod
    def from_key(cls, key: str) -> GpuClass:
        """The class that a key names; InputError when it is none."""
        match = _KEY.fullmatch(key)
        if match is None:
            raise InputError("not the key of a GPU class", came=key, expected="cuda_sm<capability>_<model>",
                             do="`alpha doctor` prints the keys of this machine")
        return cls(capability=match["capability"], model=match["model"])


AnyClass = MachineClass | GpuClass


def class_of_key(key: str) -> AnyClass:
    """The class, of either family, that a key names; InputError when it is none."""
    return GpuClass.from_key(key) if family_of(key) == "cuda" else MachineClass.from_key(key)


def family_of(key: str) -> str:
    """'cuda' or 'cpu', from the key of a class."""
    return "cuda" if key.startswith("cuda_") else "cpu"


def family(component: Component) -> str:
    """The family of classes on which a component owes its gates: 'cuda' for kernels of the GPU and what drives them, else 'cpu'."""
    return "cuda" if component.backend == "cuda" else "cpu"


@cache
def _asked() -> tuple[GpuClass | None, str, str]:
    """(class of GPU 0, why there is none, driver version), from nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, "this machine has no NVIDIA driver (no nvidia-smi)", ""
    query = [tool, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"nvidia-smi does not answer: {error}", ""
    parts = [x.strip() for x in done.stdout.strip().split(",")]
    if done.returncode != 0 or len(parts) != 3:
        return None, f"nvidia-smi finds no GPU: {(done.stdout + done.stderr).strip()[:120]}", ""
    name, capability, driver = parts
    model = re.sub(r"[^A-Za-z0-9.-]+", "-", name.removeprefix("NVIDIA ").strip())
    return GpuClass(capability="sm" + capability.replace(".", ""), model=model), "", driver


def gpu_class() -> GpuClass | None:
    """The class of this machine's first GPU; None when there is none (`why_not_here` says why)."""
    return _asked()[0]


def gpu_environment() -> dict[str, str]:
    """What a record keeps for the reader beside the CPU's environment; enters no verdict."""
    return {"driver": _asked()[2]} if _asked()[0] is not None else {}


def why_not_here(component: Component) -> str:
    """Why a component cannot run on this machine, from its `requires`; '' when it can."""
    for need in component.requires:
        if need.startswith("ranks>="):  # several processes: any machine that shares memory without a name
            if not hasattr(os, "memfd_create"):
                return f"needs {need}: ranks share memory on Linux"
            continue
        if not need.startswith("sm_"):
            return f"needs {need}, which nothing here knows how to look for"
        having = gpu_class()
        wanted = "sm" + need.removeprefix("sm_").rstrip("a")
        if having is None:
            return f"needs {need}: {_asked()[1]}"
        if having.capability != wanted:
            return f"needs {need}: this machine's GPU is {having.describe()}"
    return ""


def class_here(component: Component) -> AnyClass | None:
    """The class of this machine on which a component is measured; None when it cannot run here."""
    if why_not_here(component):
        return None
    return gpu_class() if family(component) == "cuda" else machine_class()
