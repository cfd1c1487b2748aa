"""What a process that trains, samples, measures or runs gates may hold: code of allowed origins and nothing else. Floor 6.

Two things together. `watch` stands at the door: an audit hook that refuses to import a forbidden package and to open a library that has
no allowed origin (allow_list.py). What it refused is not forgotten. `check` looks at what the process really holds, whoever loaded it:
modules; executable mappings of this process and of its living children, also those without a file (`memfd`, deleted files, plain memory);
and glibc's own count of libraries that were unloaded.

What would go by, and how the peers of a benchmark are exempt: docs/libraries.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from alpha.cuda_runtime import _bindings
from alpha.errors import VerdictError
from alpha.train.allow_list import AllowList, stem_of

MODULES = ("torch", "jax", "jaxlib", "tensorflow", "cupy", "mpi4py", "deepspeed", "megatron", "horovod")
"""Packages that no process of ours imports. What is mapped goes by origin; a package of plain Python maps nothing."""

TOOLS = frozenset({"git", "nvidia-smi", "nvcc", "nvdisasm", "sysctl", "uname", "ldconfig", "gcc", "cc", "ld", "objdump"})
"""Programs that a training session may start: they say something about the machine or the sources and compute nothing of the run. The last
five are what ctypes.util.find_library asks."""

CALLBACKS = 1 << 20
"""Bytes of executable memory without a file that a process may hold: libffi's trampolines for callbacks need some pages."""

_FROM_MEMORY = re.compile(r"(?:/proc/(?:self|\d+)|/dev)/fd/\d+|/memfd:.*|/dev/shm/.*")
_DELETED = " (deleted)"


@dataclass(frozen=True)
class Mapped:
    """A file mapped as code. `device`, `inode`: as /proc/PID/maps gives them."""

    path: str
    device: str
    inode: str

    @property
    def in_memory(self) -> bool:
        """Whether there is no file behind it that could be looked at again."""
        return _FROM_MEMORY.fullmatch(self.path.removesuffix(_DELETED)) is not None


@dataclass(frozen=True)
class Maps:
    """What a process has mapped as code: files, and bytes of memory without one."""

    files: tuple[Mapped, ...]
    anonymous: int


def parse(text: str) -> Maps:
    """The executable part of /proc/PID/maps."""
    files: dict[Mapped, None] = {}
    anonymous = 0
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 5 or "x" not in fields[1]:
            continue
        name = fields[5].strip() if len(fields) == 6 else ""
        if not name or (name.startswith("[") and name not in ("[vdso]", "[vsyscall]")):  # [heap], [stack], [anon:...]
            low, _, high = fields[0].partition("-")
            anonymous += int(high, 16) - int(low, 16)
        else:
            files[Mapped(name, fields[3], fields[4])] = None
    return Maps(tuple(files), anonymous)


class Watch:
    """What one process saw. `judged`: origin by mapped file, once it was allowed, so that a file that an upgrade replaces on disk stays
    what it was. `sessions`: training sessions under way. `peers`: ids of processes that hold a peer's library by role."""

    def __init__(self) -> None:
        self.allowed = AllowList(barred=MODULES)
        self.stands = False
        self.sessions = 0
        self.peers: set[int] = set()
        self.judged: dict[Mapped, str] = {}
        self.opened: list[str] = []
        self.refused: dict[str, None] = {}

    # -- the door --------------------------------------------------------------------------------------------------------------

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Called by the interpreter before it acts. VerdictError for what is refused; that is remembered, should somebody swallow it."""
        handler = _HANDLERS.get(event)
        if handler is not None:
            why = handler(self, args)
            if why:
                self.refused[why] = None
                if not self.allowed.tests:
                    raise _verdict([why])

    def _import(self, args: tuple[Any, ...]) -> str:
        name, file, paths = str(args[0]).partition(".")[0], args[1], args[2]
        if name in MODULES and PathFinder.find_spec(name, paths if paths is not None else sys.path) is not None:
            return f"imported: {name}"  # a package that only asks whether it is there is no finding
        if isinstance(file, str) and not self.allowed.origin_of(os.path.realpath(file)):
            return f"imported: {file}"  # an extension module
        return ""

    def _dlopen(self, args: tuple[Any, ...]) -> str:
        name = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes, os.PathLike)) else ""
        if not name:
            return ""
        self.opened.append(name)
        if _FROM_MEMORY.fullmatch(name):
            return f"opened from memory: {name}"
        if "/" in name and os.path.exists(name) and not self.allowed.origin_of(os.path.realpath(name)):
            return f"opened: {name}"
        return ""

    def _started(self, program: object, arguments: object = ()) -> str:
        if not self.sessions:
            return ""
        words = [os.fsdecode(w) for w in arguments] if isinstance(arguments, (list, tuple)) else [os.fsdecode(arguments)] if isinstance(
            arguments, (str, bytes)) else []
        named = os.fsdecode(program) if isinstance(program, (str, bytes, os.PathLike)) else words[0] if words else ""
        return "" if os.path.basename(named) in TOOLS else f"started by training: {' '.join([named, *words[1:]])[:120]}"

    # -- the look --------------------------------------------------------------------------------------------------------------

    def findings(self) -> list[str]:
        """Everything that this process holds, held or started and must not, a line each."""
        found = [f"imported: {m}" for m in imported()]
        maps = _maps("self")
        if maps is not None:
            found += self.mapped(maps)
            driven = any(stem_of(f.path.rpartition("/")[2]) == "libcuda" for f in maps.files)
            if maps.anonymous > CALLBACKS and not driven and not self.allowed.tests:
                found.append(f"executable memory without a file: {maps.anonymous} bytes")
            found += self.unloaded({f.path for f in maps.files}, driven)
            for pid in children(self.peers):
                below = _maps(str(pid))
                found += [f"child {pid} {x}" for x in self.mapped(below)] if below is not None else []
        return list(dict.fromkeys([*self.refused, *found]))

    def mapped(self, maps: Maps) -> list[str]:
        """Files mapped as code that have no allowed origin."""
        found = []
        for file in maps.files:
            if file in self.judged:
                continue
            name = file.path.removesuffix(_DELETED)
            origin = self.allowed.origin_of(name) if name == file.path else self.judged.get(Mapped(name, file.device, file.inode))
            if origin:
                self.judged[file] = origin
            else:
                found.append(f"{'mapped from memory' if file.in_memory else 'mapped'}: {file.path}")
        return found

    def unloaded(self, paths: set[str], driven: bool) -> list[str]:
        """Libraries that are mapped no more, by glibc's count and the names that were opened from Python. Where the GPU's driver is mapped,
        what has no name is not judged: the driver opens and closes libraries of its own."""
        gone = loads().unloaded
        if not gone or self.allowed.tests:
            return []
        names = {stem_of(p.rpartition("/")[2]) for p in paths}
        missing = [n for n in dict.fromkeys(self.opened) if stem_of(n.rpartition("/")[2]) not in names]
        foreign = [n for n in missing if not self.allowed.origin_of(os.path.realpath(n) if "/" in n else f"/usr/lib/{n}")]
        if foreign:
            return [f"mapped and unmapped again: {n}" for n in foreign]
        unnamed = gone - len(missing)
        return [] if driven or unnamed <= 0 else [f"mapped and unmapped again, by code that is not Python: {unnamed} libraries"]


_HANDLERS: Mapping[str, Callable[[Watch, tuple[Any, ...]], str]] = {
    "import": lambda w, a: w._import(a),
    "ctypes.dlopen": lambda w, a: w._dlopen(a),
    "subprocess.Popen": lambda w, a: w._started(a[0], a[1]),
    "os.posix_spawn": lambda w, a: w._started(a[0], a[1]),
    "os.spawn": lambda w, a: w._started(a[1], a[2]),
    "os.exec": lambda w, a: w._started(a[0], a[1]),
    "os.system": lambda w, a: w._started(a[0]),
}
_WATCH = Watch()


def watch() -> None:
    """Stand at the door of this process from now on. Again: nothing."""
    if not _WATCH.stands:
        sys.addaudithook(_WATCH.hook)  # for good: Python has no way to take one away
    _WATCH.stands = True


def watch_tests(folders: Iterable[Path]) -> None:
    """The same in a process of pytest: what tests draw with and what they compile into `folders` is allowed, and nothing is refused at the
    door. What tests prove about the door they prove in processes of their own."""
    _WATCH.allowed = AllowList(tests=True, folders=folders, barred=MODULES)
    watch()


@contextmanager
def training() -> Iterator[None]:
    """A training session: within it this process starts no program but TOOLS, and no peer."""
    _WATCH.sessions += 1
    try:
        yield
    finally:
        _WATCH.sessions -= 1


def starts_peer(pid: int | None = None) -> None:
    """Called before a benchmark starts a peer's process, and with its `pid` once it runs: its libraries are its own, by role. It shares no
    device memory with ours. VerdictError in a training session."""
    if _WATCH.sessions:
        raise VerdictError("training starts no peer", came="a benchmark's peer within a training session",
                           expected="peers beside a benchmark alone", do="measure with `alpha bench`, in a process of its own")
    if pid is not None:
        _WATCH.peers.add(pid)


def check(when: str) -> None:
    """VerdictError naming what this process and its children hold, held or started and must not. `when`: such as 'at the end'."""
    found = _WATCH.findings()
    if found:
        raise _verdict(found, f", seen {when}")


def findings() -> list[str]:
    """What `check` would name."""
    return _WATCH.findings()


def _verdict(found: list[str], when: str = "") -> VerdictError:
    return VerdictError(
        f"a forbidden library is in this process{when}",
        came="; ".join(found[:6]) + (f"; and {len(found) - 6} more" if len(found) > 6 else ""),
        expected="no import of " + ", ".join(MODULES) + "; mapped code of the origins in docs/libraries.md alone",
        do="find who loads it (python -X importtime, LD_PRELOAD, a .pth file) and run without it",
    )


def imported(modules: Iterable[str] | None = None) -> list[str]:
    """Forbidden packages among the imported modules (default: those of this process)."""
    names = {name.partition(".")[0] for name in (list(sys.modules) if modules is None else modules)}
    return sorted(names & set(MODULES))


def mapped(maps: str) -> list[str]:
    """What has no allowed origin in the text of a /proc/PID/maps, by path."""
    return sorted(x.partition(": ")[2] for x in Watch().mapped(parse(maps)))


# -- what the system tells ---------------------------------------------------------------------------------------------------------


def blind() -> list[str]:
    """What this system does not show, so that nothing of it is looked at; the door stands everywhere."""
    lacks = [] if Path("/proc/self/maps").exists() else ["mapped files: this system has no /proc/self/maps"]
    return lacks if loads().counted else [*lacks, "libraries unmapped again: this C library does not count them"]


def _maps(pid: str) -> Maps | None:
    """None where there is no such process any more, or no /proc."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            return parse(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None


def children(peers: Container[int] = ()) -> list[int]:
    """Living descendants of this process without tools, `peers` and what these have started. [] without /proc."""
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        for pid in _children_of(todo.pop()):
            try:
                tool = os.path.basename(os.readlink(f"/proc/{pid}/exe")) in TOOLS
            except OSError:
                continue  # it has ended
            if not tool and pid not in peers:
                found.append(pid)
                todo.append(pid)
    return found


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += [int(x) for x in file.read().split()]
        return found
    except FileNotFoundError:
        return _by_parent(pid)
    except OSError:
        return found  # it has ended meanwhile


def _by_parent(pid: int) -> list[int]:
    """The same where the kernel lists no children: every process is asked for its parent."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir(f"/proc/{pid}") else ():
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == pid:
                        found.append(int(name))
            except (OSError, ValueError, IndexError):
                continue  # it has ended
    return found


@dataclass(frozen=True)
class Loads:
    """`unloaded`: shared objects that the dynamic linker has unmapped since the process began; `counted` False where it does not say."""

    unloaded: int
    counted: bool


class _Info(ctypes.Structure):
    _fields_ = (("addr", ctypes.c_size_t), ("name", ctypes.c_char_p), ("phdr", ctypes.c_void_p), ("phnum", ctypes.c_uint16),
                ("adds", ctypes.c_ulonglong), ("subs", ctypes.c_ulonglong))  # fmt: skip


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_size_t, ctypes.c_void_p)


@cache
def _iterate() -> Any:
    function = getattr(_bindings.library(None), "dl_iterate_phdr", None)
    if function is not None and sys.platform == "linux":
        function.argtypes, function.restype = [_CALLBACK, ctypes.c_void_p], ctypes.c_int
        return function
    return None


def loads() -> Loads:
    """dl_iterate_phdr(3): dlpi_adds and dlpi_subs. musl unmaps nothing and counts nothing away."""
    seen: list[tuple[int, int]] = []

    def first(info: Any, size: int, data: Any) -> int:
        if size >= _Info.subs.offset + _Info.subs.size:
            seen.append((info.contents.adds, info.contents.subs))
        return 1

    iterate = _iterate()
    if iterate is None:
        return Loads(0, False)
    iterate(_CALLBACK(first), None)
    return Loads(seen[0][1], True) if seen else Loads(0, False)


# -- for the manifest of a run -----------------------------------------------------------------------------------------------------

_HASHES: dict[tuple[int, int, int, int], str] = {}


def libraries() -> list[dict[str, str]]:
    """Every file mapped as code so far: name, origin, sha256. VerdictError where a file is not the one that its distribution installed."""
    check("while its files are listed")
    found, wrong = [], []
    for file, origin in _WATCH.judged.items():
        if origin == "kernel" or file.path.endswith(_DELETED):
            continue
        digest, known = sha256_of(file.path), _WATCH.allowed.recorded(file.path)
        if known and digest != known:
            wrong.append(f"{file.path}: {digest[:16]}, installed as {known[:16]}")
        found.append({"file": os.path.basename(file.path), "origin": origin, "sha256": digest})
    if wrong:
        raise VerdictError("a library is not the one that its distribution installed", came="; ".join(wrong[:4]),
                           expected="the hash in the distribution's RECORD", do="install the distribution again")
    return sorted(found, key=lambda x: (x["origin"], x["file"], x["sha256"]))


def sha256_of(path: str) -> str:
    """Of a file, read once while device, inode, size and time stay what they are; '' where it is gone."""
    try:
        s = os.stat(path)
        key = (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)
        if key not in _HASHES:
            with open(path, "rb") as file:
                h = hashlib.sha256()
                while chunk := file.read(1 << 20):
                    h.update(chunk)
                _HASHES[key] = h.hexdigest()
        return _HASHES[key]
    except OSError:
        return ""
