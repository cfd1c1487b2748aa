"""What a process that trains may hold: no forbidden library, and no compiled kernel but those of the evidence. Floor 6.

Looks at what this process really holds: `sys.modules`, the files mapped into its memory (`/proc/self/maps` on Linux), and the bytes that
the GPU's driver was given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from alpha.cudart.compile import Source
from alpha.cudart.launch import LOADED
from alpha.cudart.manifest import binary_digest
from alpha.errors import VerdictError

MODULES = ("torch", "jax", "jaxlib", "tensorflow", "cupy", "mpi4py", "deepspeed", "megatron", "horovod")
LIBRARIES = ("torch", "jaxlib", "tensorflow", "cublas", "cudnn", "nccl", "mpi")

_WORD = re.compile(r"(?:lib)?(?:(?:torch|jaxlib|tensorflow|cublas|cudnn|nccl)[a-z0-9]*|mpi(?:ch|cxx|fort|[0-9]+)?)")
_FOLDER = re.compile(rf"/({'|'.join(MODULES)})/", re.I)


def imported(modules: Iterable[str] | None = None) -> list[str]:
    """Forbidden packages among the imported modules (default: those of this process)."""
    names = {name.partition(".")[0] for name in (sys.modules if modules is None else list(modules))}
    return sorted(names & set(MODULES))


def mapped(maps: str | None = None) -> list[str]:
    """Forbidden libraries among mapped files, by path. `maps`: the text of /proc/PID/maps (default: this process; [] without /proc)."""
    if maps is None:
        source = Path("/proc/self/maps")
        maps = source.read_text() if source.exists() else ""
    paths = {fields[5].strip() for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(p for p in paths if _is_forbidden(p))


def _is_forbidden(path: str) -> bool:
    name = path.rpartition("/")[2].lower()
    for home in (sys.prefix, sys.base_prefix):  # where Python lives says nothing about what it loads: /opt/torch/.venv
        path = path.removeprefix(home) if path.startswith(f"{home}/") else path
    is_library = re.search(r"\.(?:so|dylib|dll)\b", name) is not None
    return bool(_FOLDER.search(path)) or (is_library and any(_WORD.fullmatch(word) for word in re.split(r"[-_.@]", name)))


def check() -> None:
    """VerdictError naming what this process holds and must not."""
    found = [*(f"imported: {m}" for m in imported()), *(f"mapped: {p}" for p in mapped())]
    if found:
        raise VerdictError(
            "a forbidden library is in the training process",
            came="; ".join(found[:6]),
            expected=f"none of {', '.join(LIBRARIES)}, imported or mapped",
            do="find who loads it (python -X importtime, LD_PRELOAD, a .pth file) and train without it",
        )


def strangers(loaded: Mapping[Source, str] | None = None) -> list[str]:
    """Compiled kernels whose bytes are not those that evidence binds to. `loaded`: source -> sha256 (default: those of this process)."""
    return sorted(str(s) for s, digest in (LOADED if loaded is None else loaded).items() if digest != binary_digest(s))


def check_kernels() -> None:
    """VerdictError naming the loaded kernels that are other machine code than the evidence is about."""
    found = strangers()
    if found:
        raise VerdictError(
            "kernels were loaded that are not those of the evidence",
            came="; ".join(found[:6]),
            expected="the machine code that the manifest of compiled kernels names",
            do="delete .alpha/cubins and build again with the pinned compiler (`alpha kernels check`)",
        )
