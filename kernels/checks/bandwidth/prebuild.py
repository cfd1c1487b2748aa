"""Compiles, ahead of a run on a GPU, every cubin that check.py and bench.py ask for (in .alpha/cubins)."""

import contextlib
import io
import os
import runpy
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import record

from alpha.cudart.compile import compile_all

sys.modules["emu"] = record
wanted = sys.argv[1:] or ["check", "bench"]
if "check" in wanted:
    sys.argv = ["check.py"]
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(HERE / "check.py"))
if "bench" in wanted:
    import shapes

    shapes.touch_all()
start = time.time()
built = compile_all(record.SOURCES, jobs=int(os.environ.get("JOBS", "2")))
print(f"{len(built)} cubins in {time.time() - start:.0f} s")
for cubin in built:
    for name, r in cubin.resources.items():
        if r.spill_stores or r.spill_loads:
            print(f"spills: {cubin.source} {name}: {r.registers} registers, {r.spill_stores} + {r.spill_loads} bytes")
