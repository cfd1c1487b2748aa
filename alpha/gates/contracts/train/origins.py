"""Cases of where a file may come from that is mapped as code: each origin at its place and one step beside it, on made-up systems. Floor
7."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, instead, same
from alpha.train import allow_list
from alpha.train.allow_list import AllowList

NOWHERE = ("/usr/lib/libfoo.so.1", "/home/libz.so.1", "/home/gconv/UTF-16.so", "/home/x/libopenblas.so.0", "/usr/lib/libnotblas.so",
           "/usr/lib/a/b/libopenblas.so", "/home/libcuda.so.1", "/usr/lib/libcudart.so.12", "/usr/lib/libnvidia-evil.so",
           "/usr/local/nvidia/lib32/libcuda.so.1", "/usr/local/cuda/compat/x/libcuda.so", "/home/libcurand.so.10",
           "/usr/lib/libcublas.so.12",
           "/usr/local/cuda/lib/libcurand.so", "/usr/lib/x/libcurand.so.10", "/elsewhere/libpython3.11.so",
           "/opt/py/lib/python3/lib-dynload/torch.so",
           "/opt/py/lib/python3/math.so", "/opt/other/python", "[heap]", "/usr/lib/a/b/libcuda.so.1", "/usr/lib/libc.evil.so",
           "/opt/py/bin/libz.so")
PLACES = {
    "python": ("/opt/py/bin/python", "/opt/py/lib/libpython3.11.so.1.0", "/opt/py/lib/python3/lib-dynload/math.cpython-311-x.so"),
    "system": ("/usr/lib/libz.so.1.2.13", "/usr/lib/libc-2.31.so", "/usr/lib/ld-linux-x86-64.so.2", "/usr/lib/gconv/UTF-16.so",
               "/opt/py/lib/libz.so.1", "/usr/lib/libz.so"),
    "blas": ("/usr/lib/libopenblas.so.0", "/usr/lib/openblas-pthread/libopenblas-r0.3.20.so", "/usr/lib/libopenblas64_.so.0",
             "/usr/lib/libmkl_rt.so.2"),
    "driver": ("/usr/lib/libcuda.so.1", "/usr/lib/nvidia/libnvidia-ml.so.1", "/usr/local/nvidia/lib/libcuda.so.1",
               "/usr/local/nvidia/lib64/libcuda.so.1", "/usr/local/cuda-12.4/compat/libcuda.so",
               "/usr/local/cuda/compat/lib.real/libcuda.so",
               "/usr/lib/wsl/lib/libcuda.so.1", "/usr/lib/wsl/drivers/nv_1/libcuda.so.1.1", "/run/opengl-driver/lib/libcuda.so.1"),
    "toolkit": ("/usr/lib/libcurand.so.10", "/usr/local/cuda/lib64/libcurand.so.10", "/opt/cuda-12/targets/x86/lib/libcupti.so.12",
                "/usr/local/cuda/extras/CUPTI/lib64/libnvperf_host.so"),
    "kernel": ("[vdso]", "[vsyscall]"),
}
SITUATED = {"python": ("/opt/py/dyn/_ssl.abi3.so", "/opt/py/libs/libpython3.so"), "system": ("/usr/lib/x-y/libz.so.1",),
            "blas": ("/usr/lib/x-y/openblas/libopenblas.so.0",)}
"""Places that one of the two systems alone has."""


def _system(full: bool) -> tuple[SimpleNamespace, SimpleNamespace]:
    """`sys` and `sysconfig` of a Python that says where everything is, or nothing that it need not say."""
    said = {"DESTSHARED": "/opt/py/dyn", "MULTIARCH": "x-y", "LIBDIR": "/opt/py/libs"} if full else {}
    return (SimpleNamespace(executable="/opt/py/bin/python", base_prefix="/opt/py", stdlib_module_names=sys.stdlib_module_names, modules={},
                            path=[], **({} if full else {"_base_executable": "/opt/base/python"})),
            SimpleNamespace(get_path=lambda name: {"stdlib": "/opt/py/lib/python3"}[name], get_config_var=said.get))


def places(rng: np.random.Generator) -> Measured:
    """Each kind of file where it may lie, and nowhere else, on a system that says where its own are and on one that does not."""
    checks: Named = []
    for full in (True, False):
        own, config = _system(full)
        with instead(allow_list, sys=own, sysconfig=config, metadata=SimpleNamespace(distributions=lambda name: [])):
            allowed = AllowList(barred=("torch",))
            expected = {path: origin for origin, paths in PLACES.items() for path in paths} | dict.fromkeys(NOWHERE, "")
            expected |= {path: origin if full else "" for origin, paths in SITUATED.items() for path in paths}
            expected |= {"/opt/base/python": "" if full else "python", "/libpython3.so": "" if full else "python"}
            for path, origin in expected.items():
                same(checks, f"{path} of {full}", allowed.origin_of(path), origin)
            same(checks, "libraries", allowed.libraries, {Path(os.path.realpath(x)) for x in (
                "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/opt/py/lib", *(("/lib/x-y", "/usr/lib/x-y") if full else ()))})
            same(checks, "recorded", allowed.recorded("/usr/lib/libz.so"), "")
            same(checks, "barred", (allowed.barred, allowed.tests, allowed.folders), (("torch", "nvidia", "jax_plugins"), False, []))
    for name, stem in (("libz.so.1.2.13", "libz"), ("libc-2.31.so", "libc"), ("libx-1.so-2", "libx"), ("python3.11", "python3.11"),
                       ("a-b.so", "a-b")):
        same(checks, name, allow_list.stem_of(name), stem)
    return all_hold(checks)


@dataclass(frozen=True)
class _File:
    """A file that a distribution lists."""

    name: str
    hash: Any = None


class _Distribution:
    """As much of an installed distribution as is looked at, in a folder."""

    def __init__(self, root: Path, version: str, files: list[_File] | None, installer: str | None = "pip\n") -> None:
        self.root, self.version, self.files, self.installer = root, version, files, installer

    def read_text(self, name: str) -> str | None:
        """Who installed it."""
        return self.installer if name == "INSTALLER" else None

    def locate_file(self, file: Any) -> Path:
        """Where a file of it lies."""
        return self.root / (file.name if isinstance(file, _File) else str(file))


def distributions(rng: np.random.Generator) -> Measured:
    """A file that an allowed distribution lists has its name, version and hash; of one that lists none, all below its own folders; of one
    that a package manager rewrote, no hash. Others have no origin. In tests other distributions' files have one, vendors' have none."""
    checks: Named = []
    with tempfile.TemporaryDirectory(prefix="alpha-origin-") as name:
        root = Path(os.path.realpath(name))
        raw = rng.integers(0, 256, 40, np.uint8).tobytes()
        digest = hashlib.sha256(raw)
        given = SimpleNamespace(mode="sha256", value=base64.urlsafe_b64encode(digest.digest()).decode().rstrip("="))
        site = root / "site-packages"
        for folder in ("pycuda", "markupsafe", "cuda/bindings", "tomli", "numpy"):
            (site / folder).mkdir(parents=True)
        found = {
            "numpy": [_Distribution(site, "1.2", [_File("numpy/a.so", given), _File("numpy/b.txt", given), _File("numpy/c.so.1"),
                                                  _File("numpy/d.so", SimpleNamespace(mode="md5", value="x"))]),
                      _Distribution(site, "9.9", [_File("numpy/a.so")])],
            "xxhash": [_Distribution(site, "3", [_File("xxhash/x.so", given)], "conda")],
            "siphash24": [_Distribution(site, "4", [_File("siphash24/x.so", given)], None)],
            "pycuda": [_Distribution(site, "5", None), _Distribution(root / "other", "6", [])],
            "cupti-python": [_Distribution(root / "none", "7", None)],
        }
        own, config = _system(True)
        own.modules.update({"markupsafe": SimpleNamespace(__file__=str(site / "markupsafe" / "__init__.py")), "tomli": SimpleNamespace(
            __file__=None), "cuda.bindings": SimpleNamespace(__file__=str(site / "cuda" / "bindings" / "__init__.py")),
                            "numpy": SimpleNamespace(__file__=str(site / "numpy" / "__init__.py"))})
        own.path += ["", str(root / "lib"), str(site), str(root / "dist-packages")]
        allow_list._sites.cache_clear()
        with instead(allow_list, sys=own, sysconfig=config, metadata=SimpleNamespace(distributions=lambda name: found.get(name, []))):
            plain = AllowList()
            tests = AllowList(tests=True, folders=[root / "made"], barred=("torch",))
            s = str(site)
            for path, origin, in_tests in (
                    (f"{s}/numpy/a.so", "numpy 1.2", ""), (f"{s}/numpy/c.so.1", "numpy 1.2", ""), (f"{s}/numpy/d.so", "numpy 1.2", ""),
                    (f"{s}/xxhash/x.so", "xxhash 3", ""), (f"{s}/siphash24/x.so", "siphash24 4", ""), (f"{s}/numpy/b.txt", "", "tests"),
                    (f"{s}/numpy/more.so", "", "tests"), (f"{s}/pycuda/deep/x.so", "pycuda", ""),
                    (f"{s}/markupsafe/x.so", "markupsafe", ""),
                    (f"{s}/cuda/bindings/x.so", "cuda-bindings", ""), (f"{s}/cuda/x.so", "", "tests"), (f"{s}/tomli/x.so", "", "tests"),
                    (f"{s}/torch/lib/x.so", "", ""), (f"{s}/nvidia/x.so", "", ""), (f"{s}/jax_plugins.so", "", ""),
                    (f"{root}/dist-packages/other.so", "", "tests"), (f"{root}/made/x/y.so", "", "tests"), (f"{root}/lib/x.so", "", "")):
                same(checks, path, (plain.origin_of(path), tests.origin_of(path)), (origin, origin or in_tests))
            same(checks, "hashes", [plain.recorded(f"{s}/{x}") for x in (
                "numpy/a.so", "numpy/c.so.1", "numpy/d.so", "xxhash/x.so", "siphash24/x.so")], [digest.hexdigest(), "", "", "",
                                                                                                digest.hexdigest()])
        allow_list._sites.cache_clear()
    return all_hold(checks)
