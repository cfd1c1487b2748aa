"""The machine class of a GPU, and which class a component is measured on. Floor 3.

Key: compute capability and GPU model, such as `cuda_sm90_H200`. Cubins are machine code for one capability, so numbers carry over
within it; perf and determinism evidence belongs to one model. The driver only loads the code, so it is environment and not class.
Several devices of one model are a class of their own, with what links them: `cuda_sm90_H200x2-nvlink`. A component is measured on as many
devices as it requires, the first ones of the machine, so its class says how many.
The GPUs are looked for without starting a driver in this process: a process that has done so can no longer fork one that computes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

from alpha.component import Component
from alpha.errors import InputError
from alpha.registry.machine import MachineClass, machine_class

LINKS = ("nvlink", "pcie")
"""What links the devices of a class: nvlink where it joins every two of them."""

_SEVERAL = rf"x(?P<devices>\d+)-(?P<link>{'|'.join(LINKS)})"
_KEY = re.compile(rf"cuda_(?P<capability>sm\d+)_(?P<model>[A-Za-z0-9.-]+?)({_SEVERAL})?")
_COUNTED = re.compile(r"(gpus|ranks)>=([1-9]\d{0,3})")
"""A requirement that counts devices or ranks."""


@dataclass(frozen=True, kw_only=True)
class GpuClass:
    """capability: such as sm90; model: such as H200; devices: how many of it; link: one of LINKS where there are several, else ''."""

    capability: str
    model: str
    devices: int = 1
    link: str = ""

    @property
    def key(self) -> str:
        """File-system-safe name: the folder of the evidence of this class."""
        return f"cuda_{self.capability}_{self.model}" + (f"x{self.devices}-{self.link}" if self.devices > 1 else "")

    def describe(self) -> str:
        """One readable line."""
        several = f"{self.devices} GPUs {self.model} over {self.link}" if self.devices > 1 else f"GPU {self.model}"
        return f"{several}, compute capability {self.capability.removeprefix('sm')[:-1]}.{self.capability[-1]}"

    @classmethod
    def from_key(cls, key: str) -> GpuClass:
        """The class that a key names; InputError when it is none."""
        match = _KEY.fullmatch(key)
        found = match and cls(capability=match["capability"], model=match["model"], devices=int(match["devices"] or 1),
                              link=match["link"] or "")
        if not found or found.key != key:
            raise InputError("not the key of a GPU class", came=key,
                             expected="cuda_sm<capability>_<model>, and x<devices>-<link> behind it for two devices or more",
                             do="`alpha doctor` prints the keys of this machine")
        return found


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


def sort_of(key: str) -> str:
    """What may have a reference class of its own, from the key of a class: 'cpu', 'cuda', or 'cuda x2' for two devices."""
    devices = GpuClass.from_key(key).devices if family_of(key) == "cuda" else 1
    return family_of(key) if devices == 1 else f"cuda x{devices}"


def sort(component: Component) -> str:
    """The sort of classes on which a component owes its gates: its family, and as many devices as it requires."""
    devices = devices_of(component)
    return family(component) if devices == 1 else f"cuda x{devices}"


def devices_of(component: Component) -> int:
    """How many GPUs a component is measured on: what its `gpus>=N` and `ranks>=N` ask for, a device for each rank. On CPUs 1."""
    if family(component) != "cuda":
        return 1
    return max((int(m[2]) for need in component.requires if (m := _COUNTED.fullmatch(need))), default=1)


@dataclass(frozen=True)
class Seen:
    """What nvidia-smi says: the GPUs in order, each as a class; why there are none; the driver's version; for every two GPUs, whether
    NVLink joins them, and why that is not known."""

    gpus: tuple[GpuClass, ...] = ()
    why: str = ""
    driver: str = ""
    joined: frozenset[tuple[int, int]] = frozenset()
    why_unknown: str = ""


@cache
def asked() -> Seen:
    """The GPUs of this machine, from nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Seen(why="this machine has no NVIDIA driver (no nvidia-smi)")
    rows, why = _told(tool, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    parts = [[x.strip() for x in row.split(",")] for row in rows]
    if why or not parts or any(len(row) != 3 for row in parts):
        return Seen(why=why or f"nvidia-smi finds no GPU: {' '.join(rows)[:120]}")
    gpus = tuple(GpuClass(capability="sm" + capability.replace(".", ""),
                          model=re.sub(r"[^A-Za-z0-9.-]+", "-", name.removeprefix("NVIDIA ").strip())) for name, capability, _ in parts)
    matrix, why_unknown = _told(tool, "topo", "-m") if len(gpus) > 1 else ([], "")
    joined = joined_by_nvlink(matrix)
    if len(gpus) > 1 and not why_unknown and joined is None:
        why_unknown = "nvidia-smi topo -m does not say what links the GPUs"
    return Seen(gpus, "", parts[0][2], joined or frozenset(), why_unknown)


def _told(*command: str) -> tuple[list[str], str]:
    """(lines that nvidia-smi printed, why it printed none)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"nvidia-smi does not answer: {error}"
    if done.returncode != 0:
        return [], f"nvidia-smi fails: {(done.stdout + done.stderr).strip()[:120]}"
    return done.stdout.strip().splitlines(), ""


def joined_by_nvlink(matrix: Sequence[str]) -> frozenset[tuple[int, int]] | None:
    """Every two GPUs (numbers in order) that NVLink joins, from the lines of `nvidia-smi topo -m`; None where they hold no matrix."""
    rows = [words for line in matrix if (words := re.sub(r"\x1b\[[0-9;]*m", "", line).split()) and re.fullmatch(r"GPU\d+", words[0])]
    rows = [words for words in rows if len(words) < 2 or not words[1].startswith("GPU")]  # not the line of names above
    if not rows or any(len(words) <= len(rows) for words in rows):
        return None
    return frozenset((i, j) for i, words in enumerate(rows) for j in range(i) if words[1 + j].startswith("NV"))


def gpu_class(devices: int = 1) -> GpuClass | None:
    """The class of this machine's first GPU, or of the first `devices` ones; None when there is none (`why_not_here` says why)."""
    return None if _why_no_class(devices) else _class(devices)


def gpu_classes() -> tuple[GpuClass, ...]:
    """Every class that GPUs of this machine are: the first one, the first two, and so on."""
    found = (gpu_class(n) for n in range(1, 1 + len(asked().gpus)))
    return tuple(c for c in found if c is not None)


def _class(devices: int) -> GpuClass:
    seen = asked()
    if devices == 1:
        return seen.gpus[0]
    whole = all((i, j) in seen.joined for i in range(devices) for j in range(i))
    return replace(seen.gpus[0], devices=devices, link="nvlink" if whole else "pcie")


def _why_no_class(devices: int) -> str:
    """Why the first `devices` GPUs of this machine are no class; '' where they are one."""
    seen = asked()
    if not seen.gpus:
        return seen.why
    if len(seen.gpus) < devices:
        return f"this machine has {len(seen.gpus)} ({seen.gpus[0].describe()})"
    models = dict.fromkeys(x.describe() for x in seen.gpus[:devices])
    if len(models) > 1:
        return f"the first {devices} of this machine are of different models: {'; '.join(models)}"
    return seen.why_unknown if devices > 1 else ""


def gpu_environment() -> dict[str, str]:
    """What a record keeps for the reader beside the CPU's environment; enters no verdict."""
    return {"driver": asked().driver} if asked().gpus else {}


def why_not_here(component: Component) -> str:
    """Why a component cannot run on this machine, from its `requires`; '' when it can."""
    for need in component.requires:
        if why := _why_lacking(need, on_gpu=family(component) == "cuda"):
            return f"needs {need}{why}"
    return ""


_EXTRAS = {"the extra report": "pandas"}
"""Requirement of an optional dependency -> the package that tells whether it is there."""


def _why_lacking(need: str, *, on_gpu: bool) -> str:
    """What a machine lacks of one requirement, to be told behind its name; '' where it has it."""
    if package := _EXTRAS.get(need):
        return "" if find_spec(package) else f", of which {package} is not installed: `pip install -e '.[{need.split()[-1]}]'`"
    counted = _COUNTED.fullmatch(need)
    if counted and counted[1] == "ranks" and not hasattr(os, "memfd_create"):  # memory that is shared without a name
        return ": ranks share memory on Linux"
    if counted and (counted[1] == "gpus" or on_gpu):  # of ranks on GPUs each has a device
        why = _why_no_class(int(counted[2]))
        return f": {why}" if why else ""
    if counted:  # ranks on CPUs share cores, so any number of them runs
        return ""
    if re.fullmatch(r"sm_\d+a?", need) is None:
        return ", which nothing here knows how to look for"
    having = gpu_class()
    if having is None:
        return f": {asked().why}"
    return "" if having.capability == "sm" + need.removeprefix("sm_").rstrip("a") else f": this machine's GPU is {having.describe()}"


def class_here(component: Component) -> AnyClass | None:
    """The class of this machine on which a component is measured; None when it cannot run here."""
    if why_not_here(component):
        return None
    return gpu_class(devices_of(component)) if family(component) == "cuda" else machine_class()
