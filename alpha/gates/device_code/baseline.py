"""baselines/kernels.json: what each kernel may use at most, one line a kernel, over all the files that it is compiled into. Floor 7.

baselines/cubins.json says exactly what every file is; this says it shortly enough to be read in a review. Units: registers a thread at
entry; bytes of static shared memory, of stack and of spills a thread; `spilling`: files in which it has a stack or spills; FEWEST: of
tensor-core instructions and of each kind of synchronisation the fewest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from alpha.cuda_runtime.compile import REPOSITORY, Source
from alpha.errors import CorruptError
from alpha.files import json_of, read_regular
from alpha.gates.device_code.audit import SYNCHRONISATION

PATH = REPOSITORY / "baselines" / "kernels.json"
MOST = ("registers", "shared", "stack", "spills", "spilling")
FEWEST = ("products", *SYNCHRONISATION)
NAMES = {**{name: name for name in FEWEST},
         "shared": "bytes of static shared memory", "stack": "bytes of stack a thread", "spills": "bytes of spills a thread",
         "spilling": "files with stack or spills", "products": "tensor-core instructions", "registers": "registers a thread"}

Limits = dict[str, dict[str, int]]
"""'path kernel' -> what it uses."""


def used(resources: Iterable[tuple[Source, Mapping[str, Mapping[str, int]]]],
         fewest: Mapping[tuple[Source, str], Mapping[str, int]]) -> Limits:
    """The lines of what was compiled. `resources`: by source and kernel, as in the manifest; `fewest`: kernels_audit.counts where opcodes
    were looked at."""
    found: Limits = {}
    for source, kernels in resources:
        for kernel, r in kernels.items():
            spills = max(r["spill_stores"], r["spill_loads"])
            here = {"registers": r["registers"], "shared": r["static_shared"], "stack": r["stack"], "spills": spills,
                    "spilling": int(spills > 0 or r["stack"] > 0)}
            line = found.setdefault(f"{source.path} {kernel}", dict.fromkeys(MOST, 0))
            for name in MOST:
                line[name] = line[name] + here[name] if name == "spilling" else max(line[name], here[name])
            for name, n in fewest.get((source, kernel), {}).items():
                line[name] = min(line.get(name, n), n)
    return found


def load(path: Path = PATH) -> Limits:
    """{} where there is no file. CorruptError if it cannot be read."""
    if not path.is_file():
        return {}
    try:
        body: dict[str, Any] = json_of(read_regular(path))
        return {key: {name: int(line[name]) for name in (*MOST, "products", *(n for n in SYNCHRONISATION if n in line))}
                for key, line in body.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError("the baseline of the kernels cannot be read", came=f"{path.name}: {error}", expected="what --pin wrote",
                           do="restore it from version control, or run: alpha kernels build --pin") from error


def save(limits: Limits, path: Path = PATH) -> None:
    """Write the file, sorted, a line a kernel."""
    lines = [f"{json.dumps(key)}: {json.dumps(limits[key], sort_keys=True)}" for key in sorted(limits)]
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(part, path)


def compare(now: Limits, baseline: Limits) -> tuple[list[str], list[str]]:
    """(what is worse than the baseline or not in it, what is better)."""
    worse: list[str] = []
    better: list[str] = []
    for key, line in sorted(now.items()):
        limit = baseline.get(key)
        if limit is None:
            worse.append(f"{key}: not in the baseline")
            continue
        for name, value in line.items():
            if name not in limit:
                worse.append(f"{key}: its {NAMES[name]} are not in the baseline")
                continue
            text = f"{key}: {value} {NAMES[name]}, baseline {limit[name]}"
            grown = limit[name] - value if name in FEWEST else value - limit[name]
            if grown:
                (worse if grown > 0 else better).append(text)
    worse += [f"{key}: in the baseline, but nothing compiles it" for key in sorted(baseline.keys() - now.keys())]
    return worse, better
