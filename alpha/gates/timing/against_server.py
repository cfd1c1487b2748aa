"""One side of a comparison of source trees: a script that is given a tree and answers blocks of that tree's kernels. Floor 7.

`alpha` is imported from the tree. What speaks and what measures (profile/served.py, cuda_runtime/nvml.py, gates/cuda/time.py) is taken from
the tree of this file, so that both sides are timed by the same text; of the tree are the kernels, the calls and how they are bound.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parents[2]


def today(file: str) -> ModuleType:
    """A module of this text's own tree, under the name that the tree's modules would import it by."""
    name = "alpha." + file.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, HERE / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Side:
    """The handlers; one call is bound at a time."""

    def __init__(self) -> None:
        self._bound: Any = None
        self._flush: Any = None
        self._clocks: Any = None

    def cases(self, component: str, nonce: str) -> list[str]:
        """Names of the timed calls."""
        from alpha.train.catalogue import catalogue

        c = catalogue()[component]
        if c.backend == "cuda":
            from alpha.gates.cuda.calls import timed

            return [call.name for call in timed(c)]
        from alpha.gates import perf

        return list(perf.representative(c, nonce))

    def code(self, component: str) -> dict[str, str]:
        """Digests of the tree's own code of a component, as its own registry takes them."""
        from alpha.registry.digest import component_digests
        from alpha.train.catalogue import catalogue

        digests = component_digests(catalogue()[component], "perf")
        return {k: digests[k] for k in ("implementation", "binaries") if k in digests}

    def bind(self, component: str, case: str, nonce: str) -> str:
        """Bind one call and run it; the types of its operands, which must be those of the other side."""
        from alpha.gates import subjects
        from alpha.train.catalogue import catalogue

        c = catalogue()[component]
        if c.backend != "cuda":
            from alpha.gates import perf

            subjects.pin_blas()
            found = perf.representative(c, nonce)[case]
            self._bound = subjects.bind(c, found)
            self._bound.fill(found.arrays())
            self._bound.run()
            return f"{found.types} {found.attrs}"
        from alpha.cuda_runtime.memory import Arena, Span
        from alpha.gates.cuda import subjects as cuda_subjects
        from alpha.gates.cuda.calls import timed

        nvml, time = today("cuda_runtime/nvml.py"), today("gates/cuda/time.py")
        call = next(x for x in timed(c) if x.name == case)
        rng = subjects.generator(nonce, c.id, "against", case)
        self._bound = cuda_subjects.CudaBound(c, call.types, subjects.spec_of(c).infer(call.types, call.attrs), call.attrs)
        self._bound.fill_bits([time.contents(t, rng, call.least, call.below) for t in call.types])
        self._bound.call()
        if self._flush is None:
            arena = Arena(time.FLUSH_BYTES, name="flush")
            self._flush, self._clocks = (arena, Span(arena.address, time.FLUSH_BYTES)), nvml.Clocks.open()
        return f"{call.types} {call.attrs}"

    def repeats(self, ns: int) -> int:
        """Calls of a block: on the CPU as many as last `ns`."""
        if self._flush is not None:
            return int(today("gates/cuda/time.py").LAUNCHES)
        from alpha.profile import noise

        return noise.repeats_for(self._bound.call, ns)

    def block(self, repeats: int) -> tuple[float, float | None, int]:
        """(nanoseconds a call, SM clock in MHz or None, throttle reasons)."""
        if self._flush is None:
            from alpha.profile import noise

            return float(noise.block(self._bound.call, repeats)), None, 0
        time = sys.modules["alpha.gates.cuda.time"]
        ns, reading = time.timed_block(self._bound.stream, [self._bound.enqueue] * repeats, self._clocks, self._flush[1])
        return ns, reading.sm_mhz, reading.reasons


def main() -> None:
    """Serve the tree that the command line names."""
    tree = Path(sys.argv[1]).resolve()
    sys.path[0] = str(tree)  # it was the folder of this script
    import alpha

    if Path(str(alpha.__file__)).resolve().parents[1] != tree:
        raise ImportError(f"alpha was imported from {alpha.__file__}, not from {tree}")
    side = Side()
    today("profile/served.py").serve({"cases": side.cases, "code": side.code, "bind": side.bind, "repeats": side.repeats,
                                      "block": side.block})


if __name__ == "__main__":
    main()
