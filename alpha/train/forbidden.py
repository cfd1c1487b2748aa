"""No hidden dependency: no forbidden library is imported or mapped in a process that trains. Floor 6.

Looks at what this process really holds: `sys.modules` and the files mapped into its memory (`/proc/self/maps` on Linux).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

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
