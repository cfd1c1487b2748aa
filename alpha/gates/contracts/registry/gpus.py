"""What is read of a machine's GPUs: a stand-in for nvidia-smi tells of drawn ones, of each way in which it tells nothing, and of what links
them; what a component lacks on such a machine. Floor 7."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import KERNEL, SINGLE, with_gpus
from alpha.registry import gpu
from alpha.registry.gpu import GpuClass, Seen, gpu_classes, gpu_environment, joined_by_nvlink, why_not_here

TOOL = "/made/nvidia-smi"
QUERY = (TOOL, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
MATRIX = (TOOL, "topo", "-m")
SAYS = {"NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100-80GB-HBM3", "Tesla V100 (SXM2)": "Tesla-V100-SXM2-"}
"""How nvidia-smi calls a model -> how its class does."""


Answer = tuple[int, str, str]
"""Exit code, standard output, standard error."""


@contextmanager
def _told(answers: Callable[[tuple[str, ...]], Answer | Exception], tool: str | None = TOOL) -> Iterator[list[tuple[str, ...]]]:
    """A machine whose nvidia-smi answers so; gives what it is asked."""
    asked = list[tuple[str, ...]]()

    def run(command: Sequence[str], *, capture_output: bool, text: bool, timeout: float, check: bool) -> SimpleNamespace:
        asked.append(tuple(command))
        found = answers(tuple(command))
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(returncode=found[0], stdout=found[1], stderr=found[2])

    stands: dict[str, Any] = {"subprocess": SimpleNamespace(run=run, SubprocessError=subprocess.SubprocessError),
              "shutil": SimpleNamespace(which=lambda name: tool if name == "nvidia-smi" else None), "asked": gpu.asked.__wrapped__}
    with mock.patch.multiple(gpu, **stands):
        yield asked


def seen(rng: np.random.Generator) -> Measured:
    """Drawn GPUs in their order, the driver, and every two that NVLink joins, out of what nvidia-smi prints."""
    checks = Checks()
    for _ in range(30):
        n = int(rng.integers(1, 6))
        names = rng.choice([*SAYS], n).tolist()
        links = {(i, j): ("NV18", "SYS", "NODE", "NV4", "PIX")[int(rng.integers(5))] for i in range(n) for j in range(i)}
        rows = "".join(f"{name}, 9.{i}, 575.{n}\n" for i, name in enumerate(names))
        told: dict[tuple[str, ...], Answer] = {QUERY: (0, rows, ""), MATRIX: (0, _matrix(n, links, rng), "")}
        wanted = Seen(tuple(GpuClass(capability=f"sm9{i}", model=SAYS[name]) for i, name in enumerate(names)), "", f"575.{n}",
                      frozenset(pair for pair, link in links.items() if link.startswith("NV")))
        with _told(told.__getitem__) as asked:
            found = gpu.asked()
            checks.that(found == wanted, f"{found}, not {wanted}")
            checks.that(asked == [QUERY, *([MATRIX] if n > 1 else [])], f"asked: {asked}")
            checks.that(gpu_environment() == {"driver": f"575.{n}"}, f"kept of it: {gpu_environment()}")
    one = GpuClass(capability="sm90", model="H200")
    checks.that(one.describe() == "GPU H200, compute capability 9.0", one.describe())
    several = replace(one, capability="sm120", devices=4, link="pcie").describe()
    checks.that(several == "4 GPUs H200 over pcie, compute capability 12.0", several)
    for models, keys in ((("H200", "H100", "H200"), ["cuda_sm90_H200"]), ((), [])):
        with with_gpus(*models):
            checks.that([c.key for c in gpu_classes()] == keys, f"classes of {models}: {[c.key for c in gpu_classes()]}")
    with with_gpus():
        checks.that(gpu_environment() == {}, "a driver without GPUs")
    return checks.measured()


def _matrix(n: int, links: dict[tuple[int, int], str], rng: np.random.Generator) -> str:
    """As `nvidia-smi topo -m` prints it: names in colours, columns of network cards and CPUs, a legend."""
    cards = [f"NIC{i}" for i in range(int(rng.integers(3)))]
    bold, plain = ("\x1b[4m", "\x1b[0m") if rng.random() < 0.5 else ("", "")
    lines = ["\t" + "\t".join(f"{bold}{name}{plain}" for name in (*(f"GPU{i}" for i in range(n)), *cards, "CPU Affinity"))]
    for i in range(n):
        cells = ["X" if i == j else links[max(i, j), min(i, j)] for j in range(n)] + ["NODE"] * len(cards) + ["0-15"]
        lines.append("\t".join([f"{bold}GPU{i}{plain}", *(f" {cell} " for cell in cells)]))
    lines += ["\t".join([card, *["PIX"] * n, "X"]) for card in cards]
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  NV#  = Connection of some NVLinks", ""])


def unseen(rng: np.random.Generator) -> Measured:
    """Each way in which nvidia-smi tells nothing is said, and what a component lacks then."""
    checks = Checks()
    none, ones = "this machine has no NVIDIA driver (no nvidia-smi)", "H, 9.0, 5\n"
    long = "x" * 200
    table: Sequence[tuple[Answer | Exception, str]] = (
        ((0, "", ""), "nvidia-smi finds no GPU: "), ((0, "No devices\nwere found\n", ""), "nvidia-smi finds no GPU: No devices were found"),
        ((0, f"{ones}H, 9.0\n", ""), "nvidia-smi finds no GPU: H, 9.0, 5 H, 9.0"),
        ((0, long, ""), f"nvidia-smi finds no GPU: {long[:120]}"),
        ((9, ones, " it broke\n"), "nvidia-smi fails: H, 9.0, 5\n it broke"), ((1, long, ""), f"nvidia-smi fails: {long[:120]}"),
        (FileNotFoundError(2, "gone"), "nvidia-smi does not answer: [Errno 2] gone"),
        (subprocess.TimeoutExpired("nvidia-smi", 60), "nvidia-smi does not answer: Command 'nvidia-smi' timed out after 60 seconds"),
    )
    for answer, why in table:
        with _told(lambda command, answer=answer: answer) as asked:  # type: ignore[misc]
            checks.that(gpu.asked() == Seen(why=why) and asked == [QUERY], f"{gpu.asked()}, not {why!r}")
            checks.that(why_not_here(SINGLE) == f"needs sm_90a: {why}", why_not_here(SINGLE))
    with _told(lambda command: (0, ones, ""), tool=None) as asked:
        checks.that(gpu.asked() == Seen(why=none) and asked == [], f"no tool: {gpu.asked()}")
    two = (GpuClass(capability="sm90", model="H"),) * 2
    for matrix, unknown in (((0, "not supported\n", ""), "nvidia-smi topo -m does not say what links the GPUs"),
                            ((7, "", "no topology"), "nvidia-smi fails: no topology"),
                            ((0, "\tGPU0\tGPU1\nGPU0\tX\tNV1\nGPU1\tNV1\tX\n", ""), "")):
        answers: dict[tuple[str, ...], Answer] = {QUERY: (0, ones * 2, ""), MATRIX: matrix}
        with _told(answers.__getitem__):
            wanted = Seen(two, "", "5", frozenset() if unknown else frozenset({(1, 0)}), unknown)
            checks.that(gpu.asked() == wanted, f"{gpu.asked()}, not {wanted}")
    for text, pairs in (("", None), ("GPU0\tGPU1\n", None), ("NIC0 X\n", None), ("GPU0 X\nGPU1 X\n", None),
                        ("GPU0 X NV1\nGPU1 NV1\n", None), ("GPU0\n", None), ("GPU0 X\n", frozenset()),
                        ("GPU0 X SYS\nGPU1 NV2 X\n", frozenset({(1, 0)})), ("GPU0 X NV2\nGPU1 SYS X\n", frozenset())):
        checks.that(joined_by_nvlink(text.splitlines()) == pairs, f"{text!r}: {joined_by_nvlink(text.splitlines())}")
    with with_gpus("H200"):
        other = why_not_here(replace(SINGLE, requires=("sm_80",)))
        checks.that(other == "needs sm_80: this machine's GPU is GPU H200, compute capability 9.0", other)
        checks.that(why_not_here(replace(SINGLE, requires=("sm_90",))) == "" == why_not_here(SINGLE), "a capability that it has")
    report = replace(KERNEL, requires=("the extra report",))
    for there in (True, False):
        with mock.patch.object(gpu, "find_spec", mock.Mock(return_value=there)) as looked:
            why = "" if there else "needs the extra report, of which pandas is not installed: `pip install -e '.[report]'`"
            checks.that(why_not_here(report) == why and looked.call_args_list == [mock.call("pandas")], why_not_here(report))
    ranks = replace(KERNEL, requires=("ranks>=2",))
    for system, why in ((SimpleNamespace(), "needs ranks>=2: ranks share memory on Linux"),
                        (SimpleNamespace(memfd_create=os.getpid), "")):
        with mock.patch.object(gpu, "os", system):
            checks.that(why_not_here(ranks) == why, why_not_here(ranks))
    return checks.measured()
