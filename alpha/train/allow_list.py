"""Where a file that a process has mapped as code may come from: an allow list by origin. Floor 6.

python        the interpreter, its library, and the extension modules of its standard library
NAME VERSION  a file that an installed distribution of DISTRIBUTIONS lists as its own (its RECORD, whose hash must hold)
blas          NumPy's BLAS where it is none of NumPy's own files: distribution Pythons, conda
system        the C library's family and what the standard library links: SYSTEM, from the folders of system libraries
driver        NVIDIA's driver
toolkit       two libraries of CUDA that bindings link: cuRAND (pycuda), CUPTI (the profiler)

Everything else has no origin, under whatever name: a copied or renamed library is no file that a distribution lists.
"""

from __future__ import annotations

import base64
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path

FOLDERS = {
    "numpy": ("numpy", "numpy.libs"),
    "tomli": ("tomli",),  # compiled by mypyc on some platforms
    "xxhash": ("xxhash",),
    "pycuda": ("pycuda",),
    "siphash24": ("siphash24",),  # pytools, which pycuda asks for
    "markupsafe": ("markupsafe",),  # mako, which pycuda asks for
    "cuda-bindings": ("cuda/bindings",),
    "cupti-python": ("cupti",),
    "nvidia-cuda-cupti": (),
    "nvidia-curand": (),
}
"""Distributions that may be mapped -> their folders beside site-packages, for one that lists no files (the package manager of a system)."""

SYSTEM = frozenset(
    "libc libm libpthread libdl librt libutil libresolv libcrypt libnsl libanl libnss_files libnss_dns libnss_compat libnss_systemd "
    "libnss_sss libnss_myhostname libnss_mymachines libnss_resolve libcap libtirpc libstdc++ libgcc_s libatomic libz libz-ng libbz2 "
    "liblzma libzstd libssl libcrypto libffi libsqlite3 libexpat libuuid libreadline libedit libtinfo libtinfow libncurses libncursesw "
    "libpanel libpanelw libgdbm libgdbm_compat libdb libmpdec libgomp libgfortran libquadmath libgssapi_krb5 libkrb5 libk5crypto "
    "libkrb5support libcom_err libkeyutils libintl libiconv libicuuc libicui18n libicudata".split())  # fmt: skip
"""Names, without what comes behind `.so` and without glibc's version."""

BLAS = frozenset("libopenblas libopenblasp libscipy_openblas libblas libcblas liblapack liblapacke libflexiblas libblis libatlas "
                 "libmkl_rt libmkl_core libmkl_intel_lp64 libmkl_intel_thread libmkl_gnu_thread libmkl_sequential libmkl_avx2 "
                 "libmkl_avx512 libmkl_def libmkl_vml_avx2 libmkl_vml_avx512 libmkl_vml_def libiomp5 libomp".split())  # fmt: skip

_LOADER = re.compile(r"(?:ld-linux[a-z0-9_.-]*|ld-musl-[a-z0-9_]+|ld64|ld|libc\.musl-[a-z0-9_]+)")
_DRIVER = re.compile(r"libcuda|libcudadebugger"
                     r"|libnvidia-(?:ml|ptxjitcompiler|nvvm|nvvm70|gpucomp|cfg|allocator|tls|sandboxutils|pkcs11(?:-openssl3)?)")
_TOOLKIT = re.compile(r"libcurand|libcupti|libnvperf_(?:host|target)")
_KERNEL = ("[vdso]", "[vsyscall]")


class AllowList:
    """The allow list of one process. `tests`: also files of any installed distribution that is no vendor's library (pytest and what the
    tests draw with), and files below `folders`, into which tests compile."""

    def __init__(self, *, tests: bool = False, folders: Iterable[Path] = (), barred: Iterable[str] = ()) -> None:
        self.tests, self.folders, self.barred = tests, [_real(f) for f in folders], (*barred, "nvidia", "jax_plugins")

    def origin_of(self, path: str) -> str:
        """The origin of a file as /proc/PID/maps names it, such as 'numpy 2.2.6'; '' when it has none."""
        if path in _KERNEL:
            return "kernel"
        file = Path(path)
        stem = stem_of(file.name)
        for origin, fits in (("python", self._python), ("system", self._system), ("blas", self._blas), ("driver", self._driver),
                             ("toolkit", self._toolkit)):
            if fits(file, stem):
                return origin
        return self._listed(path) or (self._of_tests(file) if self.tests else "")

    def recorded(self, path: str) -> str:
        """sha256 that a distribution's list of files gives for one of its own, in hex; '' where none is given or a package manager of
        its own rewrote the file (conda)."""
        return self.files.get(path, ("", ""))[1]

    # -- one origin each -------------------------------------------------------------------------------------------------------

    @cached_property
    def executables(self) -> frozenset[Path]:
        """The interpreter's own files."""
        return frozenset(_real(p) for p in (sys.executable, getattr(sys, "_base_executable", "")) if p)

    @cached_property
    def extensions(self) -> frozenset[Path]:
        """The standard library's folder of extension modules."""
        folders = [Path(sysconfig.get_path("stdlib")) / "lib-dynload"]
        if shared := sysconfig.get_config_var("DESTSHARED"):
            folders.append(Path(shared))
        return frozenset(_real(f) for f in folders)

    @cached_property
    def libraries(self) -> frozenset[Path]:
        """The folders of system libraries, and that of the interpreter (conda keeps its own there)."""
        triplet = sysconfig.get_config_var("MULTIARCH") or ""
        folders = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", f"{sys.base_prefix}/lib"]
        folders += [f"{root}/{triplet}" for root in ("/lib", "/usr/lib") if triplet]
        return frozenset(_real(f) for f in folders)

    def _python(self, file: Path, stem: str) -> bool:
        if file in self.executables:
            return True
        if stem.startswith("libpython3"):
            return file.parent in {*self.libraries, _real(sysconfig.get_config_var("LIBDIR") or "/")}
        return file.parent in self.extensions and file.name.partition(".")[0] in sys.stdlib_module_names

    def _system(self, file: Path, stem: str) -> bool:
        if file.parent.name == "gconv":  # character sets of glibc's iconv
            return file.parent.parent in self.libraries
        return file.parent in self.libraries and (stem in SYSTEM or _LOADER.fullmatch(stem) is not None)

    def _blas(self, file: Path, stem: str) -> bool:
        near = file.parent in self.libraries or file.parent.parent in self.libraries  # /usr/lib/TRIPLET/openblas-pthread
        return near and bool({stem, re.sub(r"-?r\d[\d.]*$|64_?$", "", stem)} & BLAS)

    def _driver(self, file: Path, stem: str) -> bool:
        if _DRIVER.fullmatch(stem) is None:
            return False
        folder = str(file.parent)
        return file.parent in self.libraries or file.parent.parent in self.libraries or re.fullmatch(
            r"/usr/local/nvidia/lib(?:64)?|/usr/local/cuda[-0-9.]*/compat(?:/lib\S*)?|/usr/lib/wsl/(?:lib|drivers/[^/]+)"
            r"|/run/opengl-driver/lib", folder) is not None

    def _toolkit(self, file: Path, stem: str) -> bool:
        if _TOOLKIT.fullmatch(stem) is None:
            return False
        return file.parent in self.libraries or re.fullmatch(
            r"(?:/usr/local|/opt)/cuda[-0-9.]*/(?:lib64|targets/[^/]+/lib|extras/CUPTI/lib64)", str(file.parent)) is not None

    @cached_property
    def files(self) -> dict[str, tuple[str, str]]:
        """Path of each library that an allowed distribution lists -> (name and version, sha256 in hex or '')."""
        found: dict[str, tuple[str, str]] = {}
        for name in FOLDERS:
            for d in metadata.distributions(name=name):
                rewritten = (d.read_text("INSTALLER") or "").strip() == "conda"
                for file in d.files or ():
                    if ".so" in file.name:
                        given = file.hash.value if file.hash is not None and file.hash.mode == "sha256" and not rewritten else ""
                        known = base64.urlsafe_b64decode(given + "=" * (-len(given) % 4)).hex() if given else ""
                        found.setdefault(str(_real(Path(str(d.locate_file(file))))), (f"{name} {d.version}", known))
        return found

    @cached_property
    def unlisted(self) -> dict[Path, str]:
        """Folders of allowed distributions of which nobody lists the files."""
        found: dict[Path, str] = {}
        for name, folders in FOLDERS.items():
            places = list(metadata.distributions(name=name))
            if any(d.files for d in places):
                continue
            roots = [Path(str(d.locate_file(""))) for d in places]
            module = sys.modules.get(folders[0].replace("/", ".")) if folders else None
            if module is not None and getattr(module, "__file__", None):
                roots.append(Path(str(module.__file__)).parents[folders[0].count("/") + 1])
            found.update({_real(root / f): name for root in roots for f in folders if (root / f).is_dir()})
        return found

    def _listed(self, path: str) -> str:
        if path in self.files:
            return self.files[path][0]
        return next((name for folder, name in self.unlisted.items() if folder in Path(path).parents), "")

    def _of_tests(self, file: Path) -> str:
        for folder in self.folders:
            if folder in file.parents:
                return "tests"
        for site in _sites():
            if site in file.parents:
                return "" if file.relative_to(site).parts[0].partition(".")[0] in self.barred else "tests"
        return ""


def stem_of(name: str) -> str:
    """`libz.so.1.2.13` -> libz; glibc's versions go too: `libc-2.31.so` -> libc."""
    stem = name.partition(".so")[0]
    return re.sub(r"-\d[\d.]*$", "", stem)


@cache
def _sites() -> tuple[Path, ...]:
    return tuple(_sites_of(sys.path))


def _sites_of(paths: Iterable[str]) -> Iterator[Path]:
    for p in paths:
        if p and Path(p).name in ("site-packages", "dist-packages"):
            yield _real(p)


def _real(path: str | Path) -> Path:
    return Path(path).resolve()
