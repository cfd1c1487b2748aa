"""Turns kernels/ into cubins with the pinned nvcc.

A cubin is cached in `.alpha/cubins/` under a digest of everything that can change it: the source, every header it includes
transitively from kernels/, the defines, the flags, and nvcc's version. There is no line information in it, so a comment
changes the digest of the sources but not the cubin itself (`Cubin.binary_digest`), which is what evidence binds to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from alpha.cuda_runtime.toolchain import find_nvcc
from alpha.errors import InputError, MachineError
from alpha.files import json_of, read_regular
from alpha.resources import ROOT

REPOSITORY = ROOT
KERNELS = REPOSITORY / "kernels"
CACHE = REPOSITORY / ".alpha" / "cubins"
FLAGS: tuple[str, ...] = (
    "-cubin",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-O3",
    "-std=c++17",
    "-Werror",
    "all-warnings",
    "-Xptxas",
    "-v,--warning-as-error",
)


@contextmanager
def compiling(*, kernels: Path | None = None, cache: Path | None = None, more: tuple[str, ...] = ()) -> Iterator[None]:
    """Within it this process compiles from another folder than kernels/, into another cache, or with `more` flags. The cache goes by
    content, so nothing is mixed up. Not for threads that want different ones."""
    global KERNELS, CACHE, FLAGS
    kept = KERNELS, CACHE, FLAGS
    KERNELS, CACHE, FLAGS = kernels or KERNELS, cache or CACHE, (*FLAGS, *more)
    try:
        yield
    finally:
        KERNELS, CACHE, FLAGS = kept


class CompileError(InputError):
    """A kernel does not compile; the message holds the compiler's words and the file."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What to compile: a .cu file (path relative to kernels/) and its defines, sorted by name."""

    path: str
    defines: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(path: str, defines: Mapping[str, object] | None = None) -> Source:
        return Source(path=path, defines=tuple(sorted((name, str(value)) for name, value in (defines or {}).items())))

    def __str__(self) -> str:
        return " ".join([self.path, *(f"{name}={value}" for name, value in self.defines)])


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What ptxas reports for one kernel. Registers per thread at entry; the rest in bytes (spills and stack per thread)."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int


@dataclass(frozen=True, kw_only=True)
class Cubin:
    """A compiled file: where it lies, the digest of its inputs, the digest of its bytes, resources by kernel name."""

    source: Source
    path: Path
    digest: str
    binary_digest: str
    resources: dict[str, Resources]


def included_files(path: Path) -> list[Path]:
    """`path` and every file under kernels/ that it includes with quotes, transitively, each once, in a fixed order.

    CompileError if an include does not exist or leaves kernels/.
    """
    done: dict[Path, None] = {}
    stack = [path.resolve()]
    while stack:
        current = stack.pop()
        if current in done:
            continue
        done[current] = None
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', current.read_text(encoding="utf-8"), re.MULTILINE):
            target = (current.parent / name).resolve()
            if not target.is_file():
                raise CompileError(f"{_short(current)} includes a missing file", came=name, expected="a file in kernels/")
            stack.append(target)
    return [path.resolve(), *sorted(p for p in done if p != path.resolve())]


Stamp = tuple[int, int, int, int]
"""What tells one state of a file from another without reading it: device, inode, time of the last change in nanoseconds, size."""

_READ: dict[Path, tuple[dict[Path, Stamp], bytes]] = {}
"""Of a source: it and what it includes, as they were when they were read, with the names and digests of all. A step has thousands of
launches."""

_HELD: dict[Path, tuple[Stamp, Cubin]] = {}
"""Of a cubin in the cache: its file as it was when it was held against its record."""


def _stamp(path: Path) -> Stamp:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _texts(path: Path) -> bytes:
    """Names and digests of a source and all that it includes, in a row; read again where a file is another than it was."""
    try:
        stamps, found = _READ[path]
        if all(_stamp(file) == stamp for file, stamp in stamps.items()):
            return found
    except (KeyError, OSError):
        pass
    if not path.is_file():
        raise CompileError("no such kernel source", came=_short(path), expected="a .cu file, path relative to kernels/")
    stamps, found = {}, b""
    for file in included_files(path):
        stamps[file] = _stamp(file)  # before it is read: what changes in between is then another one
        found += _short(file).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest()
    _READ[path] = stamps, found
    return found


def _digest(source: Source, version: str) -> str:
    hasher = hashlib.sha256()
    for part in (version, *FLAGS, *(f"{name}={value}" for name, value in source.defines)):
        hasher.update(part.encode() + b"\0")
    hasher.update(_texts(KERNELS / source.path))
    return hasher.hexdigest()[:32]


def _entry(source: Source, digest: str) -> tuple[Path, Path]:
    """Where the cache keeps a cubin, and what is known of it."""
    stem = f"{Path(source.path).stem}-{digest}"
    return CACHE / f"{stem}.cubin", CACHE / f"{stem}.json"


def _cached(source: Source, digest: str) -> Cubin | None:
    """The cubin of a digest where the cache has it whole."""
    cubin, record = _entry(source, digest)
    try:
        stamp = _stamp(cubin)
        if cubin in _HELD and _HELD[cubin][0] == stamp:
            return _HELD[cubin][1]
        data = json_of(read_regular(record))
        resources = {name: Resources(**fields) for name, fields in data["resources"].items()}
        if data["binary_digest"] != _sha(cubin):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a damaged entry of the cache is made again
    found = Cubin(source=source, path=cubin, digest=digest, binary_digest=data["binary_digest"], resources=resources)
    _HELD[cubin] = stamp, found
    return found


def compile_kernel(source: Source) -> Cubin:
    """The cubin of `source`, from the cache if its digest is there.

    CompileError with the compiler's words; MachineError without nvcc or without a compiler of the host.
    """
    nvcc, version = find_nvcc()
    digest = _digest(source, version)
    if (cached := _cached(source, digest)) is not None:
        return cached
    cubin, record = _entry(source, digest)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        output = Path(folder) / "out.cubin"
        command = [str(nvcc), *FLAGS, *(f"-D{name}={value}" for name, value in source.defines)]
        command += ["-o", str(output), Path(source.path).name]
        done = subprocess.run(command, cwd=(KERNELS / source.path).parent, capture_output=True, text=True)
        words = (done.stdout + done.stderr).strip()
        if "host compiler" in words and done.returncode != 0:
            raise MachineError("nvcc finds no compiler of the host, which it needs for every source", came="\n" + words,
                               expected="gcc and g++ on PATH, a version that nvcc takes", do="install them (Debian: apt install g++)")
        if done.returncode != 0:
            raise CompileError(
                f"kernels/{source} does not compile",
                came="\n" + words,
                do=f"cd kernels/{Path(source.path).parent} && " + " ".join([*command[:-3], "-o /dev/null", command[-1]]),
            )
        if "Potential Performance Loss" in words:
            loss = [line for line in words.splitlines() if "Potential Performance Loss" in line]
            raise CompileError(
                f"ptxas serialised or ignored Hopper instructions of kernels/{source}",
                came="\n" + "\n".join(loss),
                expected="no C75xx line: accumulators in registers, setmaxnreg honoured",
                do="lower the register use of the named function, or keep its accumulators out of branches",
            )
        resources = parse_resources(words)
        binary = _sha(output)
        fields = {name: vars(value) for name, value in resources.items()}
        text = json.dumps({"source": str(source), "binary_digest": binary, "resources": fields}, sort_keys=True)
        (Path(folder) / "record.json").write_text(text + "\n", encoding="utf-8")
        os.replace(output, cubin)
        os.replace(Path(folder) / "record.json", record)
    return Cubin(source=source, path=cubin, digest=digest, binary_digest=binary, resources=resources)


def compile_all(sources: Iterable[Source], *, jobs: int | None = None) -> list[Cubin]:
    """Compiles in parallel (`jobs` compilers at a time, default one per CPU); order kept.

    A source that is not there is told before any is compiled; the first failure of the compiler is raised after all have ended.
    """
    wanted = list(sources)
    version = find_nvcc()[1] if wanted else ""
    cached = [_cached(source, _digest(source, version)) for source in wanted]
    if None not in cached:
        return [cubin for cubin in cached if cubin is not None]
    with ThreadPoolExecutor(max_workers=jobs or os.cpu_count() or 1) as pool:
        futures = [pool.submit(compile_kernel, source) for source in wanted]
    return [future.result() for future in futures]


def parse_resources(words: str) -> dict[str, Resources]:
    """Reads the report of `-Xptxas -v`, by kernel name."""
    result: dict[str, Resources] = {}
    stack = stores = loads = 0
    entry = None
    for line in words.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            entry = match[1]
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, stores, loads = (int(x) for x in match.groups())
        elif entry and (match := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            result[entry] = Resources(
                registers=int(match[1]),
                spill_stores=stores,
                spill_loads=loads,
                stack=stack,
                static_shared=int(shared[1]) if shared else 0,
            )
            entry = None
    return result


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _short(path: Path) -> str:
    return path.relative_to(KERNELS).as_posix() if path.is_relative_to(KERNELS) else path.name
