"""Where the pinned CUDA tools are: PyPI's packages (the extra `nvcc`), then CUDA_HOME, PATH and /usr/local. Floor 3."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from alpha.errors import MachineError

RELEASE = "13.0"
PINS = {
    "nvidia-cuda-nvcc": "13.0.88",
    "nvidia-nvvm": "13.0.88",
    "nvidia-cuda-crt": "13.0.88",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-cuda-cccl": "13.0.85",
}
"""The packages that together are the compiler; each decides cubins, so a folder that holds others is passed over."""

DISASSEMBLER = ("nvidia-cuda-nvdisasm", "13.2.86")
"""It only reads; PyPI has none of release 13.0, and newer ones know sm_90a."""

INSTALL = "python3 -m pip install --editable '.[nvcc]'"


def places(name: str) -> Iterator[Path]:
    """Where the tool `name` may be, likeliest first; only files that exist."""
    folders = [Path(p) / "nvidia" / "cu13" / "bin" for p in sys.path if p]
    if home := os.environ.get("CUDA_HOME"):
        folders.append(Path(home) / "bin")
    if on_path := shutil.which(name):
        folders.append(Path(on_path).parent)
    folders += [Path(f"/usr/local/cuda-{RELEASE}/bin"), Path("/usr/local/cuda/bin")]
    for folder in dict.fromkeys(folders):
        if (folder / name).is_file():
            yield folder / name


def unfit(nvcc: Path) -> str:
    """Why the nvcc of an installed package may not be used: another of PINS is missing or is another version beside it. '' if it may."""
    if nvcc.parent.parent.name != "cu13" or nvcc.parents[2].name != "nvidia":
        return ""
    missing = [f"{name}=={version}" for name, version in PINS.items()
               if not (nvcc.parents[3] / f"{name.replace('-', '_')}-{version}.dist-info").is_dir()]
    return f"not installed beside it: {', '.join(missing)}" if missing else ""


def version_of(tool: Path) -> tuple[str, str]:
    """(release, full version) such as ("13.0", "V13.0.88"); ("", what it said) if it does not say."""
    try:
        text = subprocess.run([str(tool), "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    match = re.search(r"release (\d+\.\d+), (V\S+)", text)
    return (match[1], match[2]) if match else ("", "unknown version")


@functools.cache
def find_nvcc() -> tuple[Path, str]:
    """Path and full version (such as `V13.0.88`) of the pinned compiler.

    MachineError if there is none of release RELEASE; it lists the others that were found.
    """
    seen: list[str] = []
    for path in places("nvcc"):
        why = unfit(path)
        release, version = ("", why) if why else version_of(path)
        if release == RELEASE:
            return path, version
        seen.append(f"{path}: {version}")
    raise MachineError(
        f"no nvcc of release {RELEASE} on this machine",
        came="; ".join(seen) or "no nvcc at all",
        expected=f"nvcc {RELEASE}, which the evidence's cubins are built with",
        do=f"{INSTALL}, or install CUDA {RELEASE} and set CUDA_HOME",
    )


@functools.cache
def find_nvdisasm() -> tuple[Path, str]:
    """Path and full version of a disassembler that knows sm_90a (CUDA 12 or newer). MachineError if there is none."""
    seen: list[str] = []
    for path in places("nvdisasm"):
        release, version = version_of(path)
        if release and int(release.split(".")[0]) >= 12:
            return path, version
        seen.append(f"{path}: {version}")
    raise MachineError("no nvdisasm on this machine: the opcodes of the kernels cannot be looked at", came="; ".join(seen) or "none at all",
                       expected="=".join((DISASSEMBLER[0], f"={DISASSEMBLER[1]}")), do=INSTALL)
