"""Cheats that look at where they run: kernels in a copy of the package, gated as any kernel is, that must be rejected. Floor 7.

Each is a wrapper that is written behind the honest file of a kernel (HOST). Numbers are those of the list of cheats in docs/gates.md; 0
is for those that it does not name: a kernel that is honest where it finds a gate, and wrong elsewhere. None may find one.

Perf calls kernels in its own process. So what it must reject here is rejected by what it does with contents and outputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import alpha
from alpha.gates.adversarial import plant

HOST = "scale"
"""The kernel behind which the cheats stand."""

_FRAME = '''

def _cheat(honest):
    import gc, os, sys, time
    state = {{"calls": 0}}

    def binder(cpu, ins, outs, attrs):
        run = honest(cpu, ins, outs, attrs)
        mine = {{"calls": 0, "last": 0}}

        def wrong():
            run()
            outs[0].reshape(-1)[-1:] = np.float32(0.7310586)

        def call():
            state["calls"] += 1
            mine["calls"] += 1
{body}
        return call

    return binder


KERNELS = tuple(replace(c, implementation=_cheat(c.implementation)) if c.op == "{host}" else c for c in KERNELS)
'''


@dataclass(frozen=True)
class Cheat:
    """`body`: statements of each call; `gates`: run in this order until one says FAIL, `by` being the one that must. `loaded`: statements
    when the file is loaded."""

    number: int
    name: str
    body: str
    gates: tuple[str, ...] = ("parity",)
    loaded: str = ""

    @property
    def by(self) -> str:
        """The gate that must reject it."""
        return self.gates[-1]

    def text(self, honest: str) -> str:
        """The kernel's file with the cheat behind it."""
        body = "".join(f"            {line}\n" for line in self.body.strip("\n").split("\n"))
        imports = "import numpy as np\n"
        return honest.replace(imports, f"{imports}from dataclasses import replace\n", 1) + _FRAME.format(body=body, host=HOST) + self.loaded


def _unless(found: str) -> str:
    """Honest where a gate is found, wrong elsewhere."""
    return f"(run if {found} else wrong)()"


_FRAMES = '''
frame, found = sys._getframe(), False
while frame is not None:
    found = found or {look}
    frame = frame.f_back
'''

CHEATS: tuple[Cheat, ...] = (
    Cheat(0, "looks at its callers", _FRAMES.format(look='any(w in frame.f_code.co_filename for w in ("gates", "pytest", "suites"))')
          + _unless("found")),
    Cheat(0, "looks at the modules of its process",
          _unless('any(m.startswith(("alpha.gates", "pytest", "_pytest")) for m in sys.modules)')),
    Cheat(0, "looks at the arguments of its process", _unless('any(w in " ".join(sys.argv) for w in ("gate", "pytest", "-c"))')),
    Cheat(0, "reads a nonce or a case from frames", _FRAMES.format(look='bool({"nonce", "case", "component"} & set(frame.f_locals))')
          + _unless("found")),
    Cheat(0, "goes wrong after many calls", _unless('mine["calls"] < 200')),
    Cheat(0, "goes wrong with many workers", _unless("cpu.threads <= 3"), ("parity", "determinism")),
    Cheat(0, "goes wrong where an arena of a run would put it", _unless("ins[0].ctypes.data % 4096 == 0 or ins[0].ctypes.data % 256"),
          ("determinism",)),
    Cheat(0, "patches judge, clock, timer and probe where it runs", '''
import alpha.profile.noise, alpha.registry.judge, alpha.gates.perf
alpha.registry.judge.RATIO = 1e9
alpha.profile.noise.block = alpha.gates.perf.block = lambda *a, **k: 1
alpha.gates.perf.ceilings = lambda *a: []
alpha.gates.perf.same_bits = alpha.gates.perf.weighed = lambda *a, **k: True
time.perf_counter_ns = lambda: 1
wrong()
''', ("perf",)),
    Cheat(0, "patches the judge when its file is loaded", "wrong()", loaded='''
import alpha.gates.run, alpha.registry.judge
alpha.gates.run.judge = lambda *a, **k: alpha.registry.judge.Judgement("PASS")
'''),
    Cheat(4, "a process that is still there later", '''
if "child" not in state:
    state["child"] = os.fork()
    if state["child"] == 0:
        time.sleep(3)
        os._exit(0)
run()
'''),
    Cheat(23, "computes only where the output holds NaN", "if np.isnan(outs[0]).all():\n    run()"),
    Cheat(23, "computes only where the output holds no NaN", "if not np.isnan(outs[0]).any():\n    run()"),
    Cheat(24, "one computation shared by the calls of a Plan", '''
now = time.perf_counter()
if now - mine["last"] > 5e-3:
    run()
mine["last"] = now
'''),
    Cheat(25, "looks for the expected answer in memory", '''
for x in gc.get_objects():
    held = list(x.values()) if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    for y in held:
        if isinstance(y, np.ndarray) and y.dtype == np.float64 and y.shape == outs[0].shape:
            outs[0][...] = y
            break
'''),
    Cheat(26, "takes the first calls on its operands for a warm-up", 'if mine["calls"] <= 3:\n    run()'),
    Cheat(26, "takes the first calls on its operands for a warm-up, timed", 'if mine["calls"] <= 8:\n    run()', ("perf",)),
    Cheat(27, "statistics patched: every time is small", '''
import alpha.gates.perf
alpha.gates.perf.min = lambda *a, **k: 1
time.sleep(2e-3)
outs[0][...] = 0
''', ("perf",)),
    Cheat(28, "an object that computes when it is looked at", '''
class Later:
    def __array__(self, *a, **k):
        run()
        return outs[0]
outs[:] = [Later()]
'''),
    Cheat(29, "a file as a memory of earlier runs", '''
path = os.path.join("/dev/shm", "cheat-" + str(ins[0].shape) + str(float(ins[0].reshape(-1)[0])) + str(attrs["factor"]))
if os.path.exists(path):
    outs[0][...] = np.fromfile(path, np.float32).reshape(outs[0].shape)
    os.unlink(path)
else:
    run()
    outs[0].tofile(path)
''', ("perf",)),
)

SURVIVORS: tuple[Cheat, ...] = (
    Cheat(0, "goes wrong beyond a size", _unless("ins[0].size < 200_000"), ("parity", "determinism", "faults")),
)
"""What the gates let through: no sample of theirs is so large. Spot checks of a run see it, and the suite of sizes of runs."""

HONEST = Cheat(0, "the wrapper alone", "run()", ("parity", "determinism", "gradient", "faults"))


def job(cheat: Cheat) -> plant.Job:
    """The gates of the kernel with this cheat."""
    file = f"backends/cpu/kernels/{HOST}.py"
    honest = (Path(alpha.__file__).parent / file).read_text(encoding="utf-8")
    return plant.Job(cheat.name, tuple((f"{HOST}.f32.cpu", gate) for gate in cheat.gates), file, cheat.text(honest))


def attempt(cheats: Sequence[Cheat], *, workers: int = 1,
            on_result: Callable[[plant.Outcome], None] | None = None) -> dict[str, plant.Outcome]:
    """Name -> what came of it."""
    return {o.job.name: o for o in plant.run_all([job(c) for c in cheats], workers=workers, on_result=on_result)}
