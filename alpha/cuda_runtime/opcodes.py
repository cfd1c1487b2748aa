"""Which machine instructions a compiled file holds, read back with nvdisasm. Floor 3."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping

from alpha.cuda_runtime.compile import Cubin
from alpha.cuda_runtime.toolchain import find_nvdisasm
from alpha.errors import CorruptError
from alpha.files import json_of, read_regular

Opcodes = Mapping[str, Mapping[str, int]]
"""kernel (or device function that was not inlined) -> opcode with its modifiers, such as `HGMMA.64x128x16.F32.BF16` -> how often."""

_SECTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+)")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P(?:T|\d+)\s+)?([A-Z][\w.]*)")


def parse(listing: str) -> dict[str, Counter[str]]:
    """Counts from the text that `nvdisasm -c` prints."""
    found: dict[str, Counter[str]] = {}
    here: Counter[str] = Counter()
    for line in listing.splitlines():
        if match := _SECTION.match(line):
            here = found.setdefault(match[1], Counter())
        elif match := _INSTRUCTION.match(line):
            here[match[1]] += 1
    return found


def opcodes(cubin: Cubin) -> Opcodes:
    """What `cubin` holds; kept beside it in the cache. MachineError without nvdisasm, CorruptError if it cannot be read."""
    tool, version = find_nvdisasm()
    kept = cubin.path.with_suffix(".opcodes")
    stamp = {"binary": cubin.binary_digest, "tool": version}
    if kept.is_file():
        try:
            body = json_of(read_regular(kept))
            if body["stamp"] == stamp:
                return {name: dict(counts) for name, counts in body["opcodes"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # a damaged entry of the cache is made again
    done = subprocess.run([str(tool), "--no-dataflow", "--print-code", str(cubin.path)], capture_output=True, text=True, timeout=300)
    found = parse(done.stdout)
    unseen = [name for name in cubin.resources if not sum(found.get(name, {}).values())]
    if done.returncode or unseen or not cubin.resources:
        raise CorruptError(f"nvdisasm does not show the instructions of kernels/{cubin.source}",
                           came=(done.stderr.strip() or f"nothing of {', '.join(unseen) or 'any kernel'}")[:500],
                           expected="a listing of every kernel", do=f"{tool} -c {cubin.path}")
    part = kept.with_name(f".{kept.name}.{os.getpid()}.part")
    part.write_text(json.dumps({"stamp": stamp, "opcodes": found}, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, kept)
    return found
