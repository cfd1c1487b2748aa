"""What this machine can do, and what is missing. Floor 6. Only looks: nothing is installed, built or measured."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from alpha.comm import topology
from alpha.component import Catalogue
from alpha.cores import cores
from alpha.data.corpus import stdlib_corpus
from alpha.errors import AlphaError, shown
from alpha.registry.evidence import classes, shipped_root
from alpha.registry.gpu import gpu_classes, why_not_here
from alpha.registry.machine import environment, machine_class
from alpha.registry.status import Registry
from alpha.train import forbidden

OK, MISSING, NOTE = "ok", "missing", "note"


@dataclass(frozen=True)
class Finding:
    """One line. `state`: ok, missing (something cannot be done; `do` says what would help) or note."""

    state: str
    topic: str
    found: str
    do: str = ""


def examine(catalogue: Catalogue) -> list[Finding]:
    """Every finding, in order; `can_train` sums them up."""
    return [*_host(), *_evidence(catalogue), *_gpu(), *_others()]


def can_train(findings: Iterable[Finding]) -> bool:
    """Whether `alpha train` can run on the CPU of this machine (missing gates it runs itself)."""
    needed = ("python", "numpy", "corpus", "disk", "clean process", "kernel files", "evidence")
    return not any(f.state == MISSING and f.topic in needed for f in findings)


def _host() -> list[Finding]:
    here, own = environment(), cores()
    new_enough = sys.version_info >= (3, 10)
    out = [
        Finding(OK if new_enough else MISSING, "python", f"{platform.python_version()} ({platform.python_implementation()})",
                "" if new_enough else "install Python 3.10 or newer"),
        Finding(OK, "numpy", f"{here['numpy']}, BLAS {here['blas']}"),
        Finding(OK, "processor", f"{here['cpu']}, {own} core{'s' if own > 1 else ''} for this process, {here['system']}"),
    ]  # fmt: skip
    out += [Finding(OK, "topology", line) for line in topology.read().lines()]
    memory = _memory()
    if memory:
        out.append(Finding(OK, "memory", f"{memory / 2**30:.1f} GiB"))
    free = shutil.disk_usage(".").free
    enough = free > 200 * 2**20
    out.append(Finding(OK if enough else MISSING, "disk", f"{free / 2**30:.1f} GiB free here", "" if enough else "free some space"))
    try:
        corpus = stdlib_corpus()
        out.append(
            Finding(OK, "corpus", f"standard library, {len(corpus.documents)} files, {corpus.size / 1e6:.1f} MB, {corpus.hash[:12]}")
        )
    except AlphaError as error:
        out.append(Finding(MISSING, "corpus", error.what, error.do or ""))
    return out


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0  # not every system tells


def _evidence(catalogue: Catalogue) -> list[Finding]:
    key = machine_class().key
    broken = [Finding(MISSING, "kernel files", f"{module} cannot be loaded: {why}", "mend the file; until then nothing runs")
              for module, why in catalogue.broken.items()]
    out = [*broken, Finding(OK, "machine class", f"{machine_class().describe()}  ({key})")]
    try:
        shipped = key in classes(shipped_root())
        registry = Registry(catalogue)
        here = [c.id for c in catalogue if not why_not_here(c)]
        usable = [i for i in here if registry.status(i).usable]
    except AlphaError as error:
        return [*out, Finding(MISSING, "evidence", f"{error.what}: {shown(str(error.came))}", error.do or "")]
    out.append(
        Finding(OK, "evidence", "ships with this checkout for this machine class")
        if shipped
        else Finding(
            NOTE, "evidence", "none ships for this machine class", "`alpha train` runs the missing gates first and keeps them here"
        )
    )
    others = len(catalogue) - len(here)
    found = f"{len(usable)} of {len(here)} that can run here are usable" + (f"; {others} need another machine" if others else "")
    state = OK if len(usable) == len(here) else NOTE
    out.append(Finding(state, "components", found, "" if state == OK else "`alpha gate run --stale`"))
    return out


def _gpu() -> list[Finding]:
    out = []
    smi = shutil.which("nvidia-smi")
    if smi is None:
        out.append(
            Finding(MISSING, "GPU", "no nvidia-smi: no NVIDIA driver here", "a Hopper GPU (H100, H200) is needed for the GPU suites only")
        )
    else:
        names = _asked(smi, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
        out.append(
            Finding(OK, "GPU", names.replace("\n", "; ")) if names else Finding(MISSING, "GPU", "nvidia-smi finds none", "check the driver")
        )
    if classes := gpu_classes():
        out.append(Finding(OK, "GPU class", ", ".join(c.key for c in classes)))
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        out.append(Finding(MISSING, "nvcc", "not on PATH", "kernels for Hopper are compiled with the CUDA toolkit's nvcc"))
    else:
        release = [line for line in _asked(nvcc, "--version").splitlines() if "release" in line]
        out.append(Finding(OK, "nvcc", f"{release[0].strip() if release else 'found'} ({nvcc})"))
    if importlib.util.find_spec("pycuda") is None:
        out.append(Finding(MISSING, "pycuda", "not installed", "in the checkout: python3 -m pip install --editable '.[gpu]'"))
    else:
        out.append(Finding(OK, "pycuda", metadata.version("pycuda")))
    return out


def _asked(*command: str) -> str:
    """What a tool prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _others() -> list[Finding]:
    bad = forbidden.findings()
    out = [Finding(MISSING, "clean process", ", ".join(bad), "nothing that trains may load these") if bad
           else Finding(OK, "clean process", "everything mapped is of an allowed origin")]  # fmt: skip
    return [*out, *(Finding(NOTE, "not looked at", lack) for lack in forbidden.blind())]
