"""Branch coverage of device code by the samples of its own gates, over device code that runs on the CPU (emulated_kernels.py).

`python suites/support/device_coverage.py [COMPONENT ...]` compiles the sources with gcov's counters and calls each component on every case
of parity and on the sizes of a model. A side of a branch counts where any component, compiled file or instance of a template took it.
What is folded while it is compiled (widths, element types, `if constexpr`) is no branch. Printed is what no sample takes. Kernels on tensor
cores are not emulated: nothing is said of them.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
NONCE = "c0" * 16
ON_TENSOR_CORES = ("attention", "matmul", "linear_gelu", "linear_swiglu")

COUNTED = ("-O0", "--coverage", "-fno-exceptions")
"""Flags of g++: every branch of the text is one, and none is of an exception."""

Side = tuple[str, int, int, int]
"""File of kernels, line, how many sides the line's branches have in this instance, which of them."""


def called(component_id: str, folder: Path) -> None:
    """Compile what the component launches into `folder`, with counters, and call it. The counters are written when the process ends."""
    from emulated_gpu import emulated_gpu
    from emulated_kernels import emulated_kernels
    from emulated_threads import Host
    from host_library import compiled

    from alpha.cuda_runtime import compile as nvcc
    from alpha.gates import subjects
    from alpha.gates.cuda import calls
    from alpha.gates.cuda.subjects import bind
    from alpha.train.catalogue import catalogue

    component = catalogue()[component_id]
    spec = subjects.spec_of(component)

    def build(files: Mapping[str, str], *flags: str) -> ctypes.CDLL:
        """Each in a folder of its own, where gcov finds text, graph and counters."""
        own = Path(tempfile.mkdtemp(dir=folder))
        return ctypes.CDLL(str(compiled(own, files, *flags, *COUNTED)))

    with emulated_gpu(), emulated_kernels(nvcc.KERNELS, Host(placed=True, build=build)):
        for case in subjects.cases(component, NONCE):
            bound = bind(component, case.types, case.out_types(spec), case.attrs)
            bound.fill(case.inputs)
            bound.run()
        for name, large in calls.large(component).items():
            operands, attrs = large.draw(subjects.generator(NONCE, component.id, name))
            types = [subjects.TensorType(x.shape, d) for x, d in operands]
            bound = bind(component, types, spec.infer(types, attrs), attrs)
            bound.fill([x for x, _ in operands])
            bound.run()


def counts(folder: Path) -> Iterator[tuple[Side, int]]:
    """Every side in every instance, with how often it was taken."""
    from emulated_threads import PLACE

    for data in folder.rglob("*.gcda"):
        subprocess.run(["gcov", "--branch-probabilities", "--json-format", data.name], cwd=data.parent, check=True, capture_output=True)
    for report in folder.rglob("*.gcov.json.gz"):
        for file in json.loads(gzip.decompress(report.read_bytes()))["files"]:
            path = report.parent / file["file"]
            if path.suffix != ".cpp":
                continue
            places = [PLACE.match(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for line in file["lines"]:
                place, branches = places[line["line_number"] - 1], line["branches"]
                if place is not None:
                    for i, branch in enumerate(branches):
                        yield (place[1], int(place[2]), len(branches), i), branch["count"]


def untaken(folders: Iterable[Path]) -> tuple[list[Side], int]:
    """(the sides that nothing took, how many sides there are)."""
    taken: dict[Side, int] = defaultdict(int)
    for folder in folders:
        for side, count in counts(folder):
            taken[side] += count
    return sorted(side for side, count in taken.items() if not count), len(taken)


def emulated() -> list[str]:
    """Components whose device code runs on the CPU."""
    from alpha.train.catalogue import catalogue

    return [c.id for c in catalogue() if c.backend == "cuda" and c.kind == "kernel" and not c.id.startswith(ON_TENSOR_CORES)]


def main(components: list[str]) -> None:
    """Call each in a process of its own, and print what nothing took. SystemExit where one could not be called: its sides are not known."""
    with tempfile.TemporaryDirectory() as held:
        folders, failed = [], []
        for name in components or emulated():
            folder = Path(held) / name
            folder.mkdir()
            done = subprocess.run([sys.executable, HERE, "--call", name, str(folder)], capture_output=True, text=True)
            print(f"{name}: {'called' if not done.returncode else done.stderr[-300:]}", flush=True)
            folders.append(folder)
            failed += [name] if done.returncode else []
        left, sides = untaken(folders)
    for file, line, of, i in left:
        text = (ROOT / "kernels" / file).read_text(encoding="utf-8").splitlines()[line - 1].strip()
        print(f"{file}:{line} side {i + 1} of {of}: {text}")
    print(f"{sides - len(left)} of {sides} sides taken")
    if failed:
        raise SystemExit(f"not called: {', '.join(failed)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--call"]:
        called(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1:])
