"""What is read of a machine: its class, its processor, its BLAS and what a record keeps of it, of drawn machines that are none of this one,
by a dull account of each. Floor 7."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import HERE
from alpha.registry import machine
from alpha.registry.machine import MachineClass, machine_class

SYSCTL = ["sysctl", "-n", "machdep.cpu.brand_string"]


@contextmanager
def _on(*, cpuinfo: str | None = "", system: str = "linux", name: str = "x86_64", model: str = "", libraries: Sequence[Any] = (),
        built: Mapping[str, Any] | None = None, sysctl: Exception | str = "", cores: int | None = 3) -> Iterator[None]:
    """A machine whose files and packages say this. `cpuinfo` None: it is hidden."""
    def path(text: str) -> SimpleNamespace:
        def read_text(**more: str) -> str:
            if cpuinfo is None or text != "/proc/cpuinfo":
                raise FileNotFoundError(2, "hidden")
            return cpuinfo

        return SimpleNamespace(read_text=read_text, parent=SimpleNamespace(name=text.rpartition("/")[0].rpartition("/")[2]))

    def run(words: Sequence[str], *, capture_output: bool, text: bool, check: bool) -> SimpleNamespace:
        if isinstance(sysctl, Exception) or list(words) != SYSCTL or not (capture_output and text and check):
            raise sysctl if isinstance(sysctl, Exception) else ValueError(str(words))
        return SimpleNamespace(stdout=f" {sysctl}\n")

    config = {"Build Dependencies": {"blas": built or {}}}
    products = list[tuple[int, ...]]()
    made = {"sys": SimpleNamespace(platform=system), "Path": path, "os": SimpleNamespace(cpu_count=lambda: cores),
            "platform": SimpleNamespace(machine=lambda: name, processor=lambda: model, system=lambda: "Made",
                                        python_version=lambda: "3.99.1"),
            "subprocess": SimpleNamespace(run=run, SubprocessError=subprocess.SubprocessError),
            "threadpoolctl": SimpleNamespace(threadpool_info=lambda: [dict(x) for x in libraries] if products else []),
            "np": SimpleNamespace(ones=lambda shape: products.append(shape) or np.ones(shape), __version__="2.17.3",  # type: ignore[func-returns-value]
                                  show_config=lambda mode: config if mode == "dicts" else None)}
    with ExitStack() as all_of_it:
        for what, stands in made.items():
            all_of_it.enter_context(mock.patch.object(machine, what, stands))
        for what in ("processor", "_blas", "_cpu_model"):  # what this process found of its own machine is not asked
            all_of_it.enter_context(mock.patch.object(machine, what, getattr(machine, what).__wrapped__))
        yield


def processors(rng: np.random.Generator) -> Measured:
    """The generation and the name of a CPU, of drawn files of Linux's, of other systems, and where they are hidden."""
    checks = Checks()
    for _ in range(60):
        known = {"processor": "0", "model name": f"Made (R) {rng.integers(9)} CPU @ 2", "stepping": "1"}
        x86 = {"vendor_id": "Made Inc", "cpu family": f"{rng.integers(30)}", "model": f"{rng.integers(200)}"}
        arm = {"CPU implementer": f"0x{rng.integers(99):02x}", "CPU part": f"0xd{rng.integers(99):02x}"}
        known |= {k: v if rng.random() < 0.8 else "" for k, v in {**x86, **arm}.items() if rng.random() < 0.8}
        keys = rng.permutation([*known]).tolist()
        text = "".join(f"{key}\t: {known[key]}\n" for key in keys) + "\nprocessor\t: 1\nvendor_id\t: Other\nCPU part\t: other\n"
        later = {"vendor_id": "Other", "CPU part": "other"}  # of the second CPU; it says what the first does not
        says = [{**later, **known}.get(key, "") for key in x86], [{**later, **known}.get(key, "") for key in arm]
        wanted = next(("-".join(found).replace(" ", "-") for found in says if all(found)), "unknown")
        found = machine.processor_of(text)
        checks.that(found == wanted, f"{found}, not {wanted}, of {text!r}")
        with _on(cpuinfo=text):
            checks.that(machine.processor() == wanted, f"{machine.processor()}, not {wanted}")
            checks.that(machine._cpu_model() == known["model name"], f"{machine._cpu_model()!r} of {text!r}")
    for what, on, generation, model in (
        ("a Mac", _on(system="darwin", sysctl="Apple M9 Max"), "Apple-M9-Max", "Apple M9 Max"),
        ("a Mac without the tool", _on(system="darwin", sysctl=FileNotFoundError(2, "no sysctl")), "unknown", "unknown"),
        ("a Mac whose tool fails", _on(system="darwin", sysctl=subprocess.CalledProcessError(1, "sysctl")), "unknown", "unknown"),
        ("a file that is hidden", _on(cpuinfo=None), "unknown", "unknown"),
        ("a file of a board", _on(cpuinfo="Processor : a\nHardware\t: Made: board\nmodel name : later\n"), "unknown", "Made: board"),
        ("a file that says nothing", _on(cpuinfo="flags : none\n", model="of the platform"), "unknown", "of the platform"),
        ("a platform that says nothing", _on(cpuinfo=""), "unknown", "unknown"),
    ):
        with on:
            said = machine.processor(), machine._cpu_model()
            checks.that(said == (generation, model), f"{what}: {said}")
    return checks.measured()


def libraries(rng: np.random.Generator) -> Measured:
    """The BLAS that NumPy calls: its own before others, then by name and version; without any the one that it was built with. The class and
    the environment of drawn machines."""
    checks = Checks()
    for _ in range(60):
        found = [_library(rng) for _ in range(int(rng.integers(4)))]
        built = {"name": f"made {rng.integers(9)}", **({"version": "0.9"} if rng.random() < 0.5 else {})}
        blas = sorted((x for x in found if x["user_api"] == "blas"),
                      key=lambda x: (x["filepath"].split("/")[-2].lower().count("numpy") == 0, x["prefix"], x["version"] or ""))
        if blas:
            kernel = str(blas[0].get("architecture") or "generic").replace(" (R) ", "-R-")
            wanted = f"{blas[0]['internal_api']}-{kernel}", blas[0]["version"] or ""
        else:
            wanted = built["name"].replace(" ", "-") + "-generic", built.get("version", "")
        cores, name = (None, 1, 64)[int(rng.integers(3))], ("AMD64", "x86-64", "x86_64", "aarch64", "arm64", "Riscv")[int(rng.integers(6))]
        threads = int(rng.integers(1, 5))
        with _on(libraries=found, built=built, cores=cores, name=name, cpuinfo="vendor_id: A\ncpu family: 1\nmodel: 2\nmodel name: made\n"):
            checks.that(machine._blas() == wanted, f"{machine._blas()}, not {wanted}, of {found}")
            made, isa = machine_class(threads), machine._isa()
            checks.that(made == MachineClass(isa=isa, numpy="2.17", blas=wanted[0], threads=threads) and machine_class().threads == 1,
                        f"the class {made}")
            known = {"AMD64": "x86_64", "x86-64": "x86_64", "aarch64": "arm64", "Riscv": "riscv"}.get(name, name)
            checks.that(isa.startswith(f"{known}-") and (known != "riscv" or isa == "riscv-baseline"), f"{isa} of {name}")
            kept = machine.environment()
            says = {"python": "3.99.1", "numpy": "2.17.3", "blas": f"{wanted[0]} {wanted[1]}".strip(), "cores": f"{cores or 0}",
                    "system": f"Made {name}", "cpu": "made", "processor": "A-1-2"}
            checks.that(kept == says, f"kept of it: {kept}")
    for count, said in ((1, "1 thread"), (2, "2 threads"), (0, "0 threads")):
        line = replace(HERE, threads=count).describe()
        checks.that(line == f"CPU x86_64-avx2, NumPy 2.2, BLAS openblas-Haswell with {said}", line)
    told = ("not the key of a machine class", "cpu_x", "cpu_<isa>_np<X.Y>_<blas-kernel>_t<threads>",
            "`alpha doctor` prints the key of this machine")
    checks.tells(InputError, told, lambda: MachineClass.from_key("cpu_x"))
    return checks.measured()


def _library(rng: np.random.Generator) -> dict[str, Any]:
    """One that a process has loaded, as threadpoolctl tells."""
    at = ("site/numpy.libs", "site/NumPy/lib", "numpy/scipy.libs", "usr/lib")[int(rng.integers(4))]
    kernel = ({}, {"architecture": None}, {"architecture": "Zen"}, {"architecture": "Made (R) 3"})[int(rng.integers(4))]
    return {"user_api": ("blas", "blas", "openmp")[int(rng.integers(3))], "internal_api": ("openblas", "mkl")[int(rng.integers(2))],
            "prefix": ("libopenblas", "libmkl_rt")[int(rng.integers(2))], "filepath": f"/{at}/lib.so",
            "version": (None, "0.3.27", "0.3.9")[int(rng.integers(3))], **kernel}
