"""Cases of what a process may hold: the door, and the look at modules, mapped files, children and unloaded libraries. Floor 7.

The system is made up: processes and their files are tables, the linker counts what it is told to, no hook is set and nothing is loaded.
"""

# mypy: disable-error-code="arg-type,func-returns-value"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

import hashlib
import io
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.train import forbidden
from alpha.train.forbidden import Loads, Mapped, Maps, Watch

BARRED = ("torch", "jax", "jaxlib", "tensorflow", "cupy", "mpi4py", "deepspeed", "megatron", "horovod")
TOOLS = ("git", "nvidia-smi", "nvcc", "nvdisasm", "sysctl", "uname", "ldconfig", "gcc", "cc", "ld", "objdump")


class _Allowed:
    """An allow list on which everything stands but what lies in /bad."""

    def __init__(self, tests: bool = False) -> None:
        self.tests, self.asked = tests, list[str]()

    def origin_of(self, path: str) -> str:
        """Of a file."""
        self.asked.append(path)
        return "" if path.startswith("/bad") else "good"

    def recorded(self, path: str) -> str:
        """Its hash, where a distribution gives one."""
        return {"/good/listed.so": "ab" * 32, "/good/changed.so": "cd" * 32}.get(path, "")


def _watch(tests: bool = False) -> tuple[Watch, _Allowed]:
    watch, allowed = Watch(), _Allowed(tests)
    watch.allowed = allowed  # type: ignore[assignment]
    return watch, allowed


def _no(found: Sequence[str], when: str = "") -> str:
    """The error that names what was found."""
    more = f"; and {len(found) - 6} more" if len(found) > 6 else ""
    return error_text("VerdictError", f"a forbidden library is in this process{when}", "; ".join(found[:6]) + more,
                      "no import of " + ", ".join(BARRED) + "; mapped code of the origins in docs/libraries.md alone",
                      "find who loads it (python -X importtime, LD_PRELOAD, a .pth file) and run without it")


def door(rng: np.random.Generator) -> Measured:
    """What is imported, opened and started, each way that Python has: refused by name, remembered though somebody swallows it, and in tests
    remembered alone; what is allowed, or not there, is not."""
    checks: Named = []
    with tempfile.TemporaryDirectory(prefix="alpha-door-") as root:
        link, there = Path(root) / "link.so", Path(root) / "own.so"
        there.write_text("")
        link.symlink_to("/bad/x.so")
        long = "w" * 200
        in_session = [
            ("subprocess.Popen", ("/usr/bin/git", ["git", "log"], None, None), ""),
            ("subprocess.Popen", ("tool", ["tool", "a", "b"]), "tool a b"),
            ("subprocess.Popen", (None, [b"/x/gitx", "b"]), "/x/gitx b"), ("subprocess.Popen", (None, "python x"), "python x"),
            ("subprocess.Popen", (None, []), " "), ("subprocess.Popen", (None, 7), " "),
            ("os.posix_spawn", (b"/bin/sh", ("sh", "-c")), "/bin/sh -c"),
            ("os.spawn", (1, "/bin/ls", ["ls", long]), f"/bin/ls {long}"), ("os.exec", (Path("/bin/x"), ["y"]), "/bin/x"),
            ("os.system", (b"nvcc",), ""), ("os.system", ("ls -l",), "ls -l"), *(("os.exec", (f"/any/{tool}", ["?"]), "")
                                                                                 for tool in TOOLS)]
        cases: list[tuple[str, tuple[Any, ...], str]] = [
            ("import", ("torch.nn", None, None, None, None), "imported: torch"),
            ("import", ("jax", None, ["/a", "/b"], None, None), "imported: jax"),
            ("import", ("cupy", None, None, None, None), ""), ("import", ("numpy.linalg", None, None, None, None), ""),
            ("import", ("fast", "/bad/fast.so", None, None, None), "imported: /bad/fast.so"),
            ("import", ("fast", str(there), None, None, None), ""),
            ("import", ("fast", str(link), None, None, None), f"imported: {link}"), ("ctypes.dlopen", (None,), ""),
            ("ctypes.dlopen", (b"",), ""),
            ("ctypes.dlopen", ("libm.so.6",), ""), ("ctypes.dlopen", (b"/proc/self/fd/3",), "opened from memory: /proc/self/fd/3"),
            ("ctypes.dlopen", ("/proc/12/fd/3",), "opened from memory: /proc/12/fd/3"),
            ("ctypes.dlopen", ("/dev/shm/x",), "opened from memory: /dev/shm/x"),
            ("ctypes.dlopen", ("/dev/fd/9",), "opened from memory: /dev/fd/9"), ("ctypes.dlopen", (Path("/bad/none.so"),), ""),
            ("ctypes.dlopen", (str(link),), ""), ("ctypes.dlopen", (str(there),), ""), ("open", ("/bad/x.so",), "")]
        asked = list[tuple[str, object]]()

        def find_spec(name: str, paths: object) -> object:
            asked.append((name, paths))
            return None if name == "cupy" else "spec"

        for tests in (False, True):
            for session in (0, 1, 2):
                for event, given, why in [*cases, *((e, g, f"started by training: {w.strip()[:120]}" if w and session else "") for e, g,
                                                    w in in_session)]:
                    watch, _ = _watch(tests)
                    watch.sessions = session
                    with instead(forbidden, PathFinder=SimpleNamespace(find_spec=find_spec)):
                        found = said(lambda: watch.hook(event, given))
                    same(checks, f"{event} {given}", (found, list(watch.refused)),
                         (_no([why]) if why and not tests else "None", [why] if why else []))
                    if event == "ctypes.dlopen":
                        named = str(given[0].decode() if isinstance(given[0], bytes) else given[0] or "")
                        same(checks, "opened", watch.opened, [named] if named else [])
        same(checks, "looked for", [x for x in asked[:3]], [("torch", sys.path), ("jax", ["/a", "/b"]), ("cupy", sys.path)])
        bad, _ = _watch()
        (Path(root) / "real").symlink_to(there)
        with instead(forbidden.os.path, realpath=lambda path: "/bad" + str(path)):
            same(checks, "opened", said(lambda: bad.hook("ctypes.dlopen", (str(there),))), _no([f"opened: {there}"]))
    same(checks, "all ways", set(forbidden._HANDLERS), {"import", "ctypes.dlopen", "subprocess.Popen", "os.posix_spawn", "os.spawn",
                                                        "os.exec", "os.system"})
    return all_hold(checks)


def mappings(rng: np.random.Generator) -> Measured:
    """/proc/PID/maps of drawn lines: files mapped as code, each once, and bytes of code without a file; of the files those without an
    origin are named, a deleted one only where it had none before."""
    checks: Named = []
    lines, files, anonymous = list[str](), dict[Mapped, None](), 0
    for _ in range(60):
        low = int(rng.integers(1 << 40))
        size = 4096 * int(rng.integers(1, 99))
        perms = str(rng.choice(["r-xp", "rw-p", "rwxp", "r--p"]))
        name = str(rng.choice(["/good/a.so", "/bad/b c.so", "[heap]", "[stack]", "[vdso]", "[vsyscall]", "", "/memfd:x (deleted)",
                               "[anon:z]"]))
        device, inode = f"0{int(rng.integers(3))}:01", str(int(rng.integers(3)))
        lines.append(f"{low:x}-{low + size:x} {perms} 00000000 {device} {inode}" + (f"    {name}" if name else ""))
        if "x" in perms:
            anonymous += size if name in ("", "[heap]", "[stack]", "[anon:z]") else 0
            files |= {} if name in ("", "[heap]", "[stack]", "[anon:z]") else {Mapped(name, device, inode): None}
    same(checks, "parsed", forbidden.parse("\n".join([*lines, "too short", ""])), Maps(tuple(files), anonymous))
    watch, allowed = _watch()
    one, old = Mapped("/good/a.so", "1", "2"), Mapped("/good/a.so (deleted)", "1", "2")
    found = [watch.mapped(Maps(x, 0)) for x in ((one,), (one, old), (Mapped("/bad/x.so", "1", "2"),),
                                                (Mapped("/good/new.so (deleted)", "1", "3"),),
                                                (Mapped("/memfd:y (deleted)", "1", "2"), Mapped("/bad/dev/shm", "1", "1"),
                                                    Mapped("/dev/shm/z (deleted)", "1", "9")))]
    same(checks, "named", found, [[], [], ["mapped: /bad/x.so"], ["mapped: /good/new.so (deleted)"], [
        "mapped from memory: /memfd:y (deleted)", "mapped: /bad/dev/shm", "mapped from memory: /dev/shm/z (deleted)"]])
    same(checks, "judged once", (watch.judged, allowed.asked), ({one: "good", old: "good"}, ["/good/a.so", "/bad/x.so", "/bad/dev/shm"]))
    with instead(forbidden, Watch=lambda: _watch()[0]):
        text = "1-2 r-xp 0 0 0 /bad/z.so\n1-2 r-xp 0 0 0 /good/y.so\n1-2 r-xp 0 0 0 /bad/a.so\n"
        same(checks, "of a text", forbidden.mapped(text), ["/bad/a.so", "/bad/z.so"])
    return all_hold(checks)


def looked(rng: np.random.Generator) -> Measured:
    """Everything that is found of a process, each once and in order: what the door refused, modules, files, code without a file, unloaded
    libraries, and files of its children; where a GPU's driver is mapped, or in tests, less is judged."""
    checks: Named = []
    most = 1 << 20
    driver = Mapped("/good/libcuda.so.1", "1", "1")
    for tests, driven, bytes_, there in ((False, False, most + 1, True), (False, False, most, True), (False, True, most + 1, True),
                                         (True, False, most + 1, True), (False, False, most + 1, False)):
        watch, _ = _watch(tests)
        watch.refused.update({"imported: torch": None, "opened: /x": None})
        watch.peers = {77}
        own = Maps((Mapped("/bad/a.so", "1", "1"), *([driver] if driven else [])), bytes_)
        tables = {"self": own if there else None, "11": Maps((Mapped("/bad/c.so", "1", "1"),), 0), "12": None,
                  "13": Maps((driver,), 9 * most)}
        asked = list[object]()
        with instead(forbidden, _maps=tables.get, children=lambda peers: asked.append(peers) or [11, 12, 13],
                     imported=lambda: ["jax", "torch"]), \
                instead(watch, unloaded=lambda paths, driven: asked.append((paths, driven)) or ["gone: z"]):
            found = watch.findings()
        memory = [f"executable memory without a file: {bytes_} bytes"] if bytes_ > most and not driven and not tests else []
        seen = ["mapped: /bad/a.so", *memory, "gone: z", "child 11 mapped: /bad/c.so"] if there else []
        same(checks, f"{tests} {driven} {bytes_}", found, ["imported: torch", "opened: /x", "imported: jax", *seen])
        same(checks, "asked", asked, [({f.path for f in own.files}, driven), {77}] if there else [])
    for gone, tests, driven, opened, expected in (
            (0, False, False, ["/bad/x.so"], []), (2, True, False, ["/bad/x.so"], []), (1, False, False, ["/here/liba.so.1", "libb.so"],
                                                                                        ["by code 1"]),
            (2, False, False, ["/good/libz.so", "libm.so.6", "/good/libz.so"], []), (3, False, False, ["/good/libz.so", "libm.so.6"],
                                                                                     ["by code 1"]),
            (3, False, True, ["/good/libz.so"], []), (1, False, True, ["/good/libz.so", "/bad/x.so", "/bad/y.so.2"],
                                                      ["/bad/x.so", "/bad/y.so.2"]),
            (5, False, False, [], ["by code 5"])):
        watch, allowed = _watch(tests)
        watch.opened = opened
        with instead(forbidden, loads=lambda: Loads(gone, True)):
            found = watch.unloaded({"/any/liba.so.9", "/any/libb.so", "[vdso]"}, driven)
        unnamed = "mapped and unmapped again, by code that is not Python: {} libraries"
        same(checks, f"{gone} {opened}", found, [unnamed.format(x.split()[-1]) if x.startswith("by code")
                                                 else f"mapped and unmapped again: {x}"
                                                 for x in expected])
        if "libm.so.6" in opened:
            checks.append(("a name without a folder is a system's", "/usr/lib/libm.so.6" in allowed.asked))
    sys.modules["jaxlib.alpha"] = ModuleType("jaxlib.alpha")
    try:
        same(checks, "imported here", [x for x in forbidden.imported() if x == "jaxlib"], ["jaxlib"])
    finally:
        del sys.modules["jaxlib.alpha"]
    same(checks, "imported", forbidden.imported(["torch.nn", "numpy", "torchx", "jax", "torch"]), ["jax", "torch"])
    for cases, lacks in (((True, True), []), ((False, True), ["mapped files: this system has no /proc/self/maps"]),
                         ((True, False), ["libraries unmapped again: this C library does not count them"]),
                         ((False, False), ["mapped files: this system has no /proc/self/maps",
                                           "libraries unmapped again: this C library does not count them"])):
        with instead(forbidden, Path=lambda path: SimpleNamespace(exists=lambda: cases[0] and path == "/proc/self/maps"),
                     loads=lambda: Loads(0, cases[1])):
            same(checks, "blind", forbidden.blind(), lacks)
    return all_hold(checks)


def stands(rng: np.random.Generator) -> Measured:
    """The watch stands at the door once, whatever calls it; sessions are counted, also where they fail; a peer is started by nobody in one,
    and its process is exempt; a check names up to six things and how many more."""
    checks: Named = []
    hooks = list[Any]()
    own, _ = _watch()
    with instead(forbidden, _WATCH=own, sys=SimpleNamespace(addaudithook=hooks.append, path=[], modules={})):
        forbidden.watch()
        forbidden.watch()
        same(checks, "once", (hooks, own.stands), ([own.hook], True))
        try:
            with forbidden.training(), forbidden.training():
                same(checks, "within", own.sessions, 2)
                no = error_text("VerdictError", "training starts no peer", "a benchmark's peer within a training session",
                                "peers beside a benchmark alone", "measure with `alpha bench`, in a process of its own")
                same(checks, "a peer", (said(lambda: forbidden.starts_peer(5)), own.peers), (no, set()))
                raise OSError
        except OSError:
            same(checks, "behind", own.sessions, 0)
        forbidden.starts_peer()
        forbidden.starts_peer(5)
        same(checks, "exempt", own.peers, {5})
        for n in (0, 1, 6, 7, 9):
            found = [f"x{i}" for i in range(n)]
            with instead(own, findings=lambda: found):
                same(checks, f"{n}", (said(lambda: forbidden.check("at noon")), forbidden.findings()), (
                    _no(found, ", seen at noon") if n else "None", found))
        forbidden.watch_tests([Path("/made")])
        same(checks, "of tests", (own.allowed.tests, own.allowed.folders, own.allowed.barred[:9], hooks),
             (True, [Path("/made")], BARRED, [own.hook]))
    plain = Watch()
    same(checks, "at first", (plain.allowed.tests, plain.allowed.barred[:9], plain.stands, plain.sessions), (False, BARRED, False, 0))
    return all_hold(checks)


class _System:
    """Processes with their programs and parents. `lists`: the kernel lists children; `gone`: those that have just ended."""

    def __init__(self, processes: Mapping[int, tuple[int, str]], lists: bool, gone: Sequence[int]) -> None:
        self.processes, self.lists, self.gone = processes, lists, set(gone)
        self.path = SimpleNamespace(basename=lambda path: path.rpartition("/")[2],
                                    isdir=lambda path: int(path.split("/")[2]) not in self.gone)

    def getpid(self) -> int:
        """This one."""
        return 1

    def readlink(self, path: str) -> str:
        """A process's program."""
        pid = int(path.split("/")[2])
        if pid in self.gone:
            raise FileNotFoundError
        return self.processes[pid][1]

    def listdir(self, path: str) -> list[str]:
        """Of /proc, or the threads of one process."""
        if path == "/proc":
            return ["self", *(str(pid) for pid in self.processes)]
        pid = int(path.split("/")[2])
        if pid in self.gone:
            raise ProcessLookupError
        return [str(pid), str(pid + 1000)]

    @contextmanager
    def open(self, path: str, **how: str) -> Iterator[io.StringIO]:
        """A file of it."""
        parts = path.split("/")
        pid = int(parts[2])
        if (parts[-1] == "children" and not self.lists) or (pid in self.gone and parts[-1] == "stat"):
            raise FileNotFoundError
        if parts[-1] == "children":
            own = sorted(p for p, (parent, _) in self.processes.items() if parent == pid)
            yield io.StringIO(" ".join(map(str, own[::2] if int(parts[4]) == pid else own[1::2])))
        else:
            yield io.StringIO("broken" if self.processes[pid][1] == "broken" else f"{pid} (a) b) S {self.processes[pid][0]} 0")


def descendants(rng: np.random.Generator) -> Measured:
    """Of drawn trees of processes all below this one but tools, peers, what these started, and what has ended; the same where the kernel
    lists no children."""
    checks: Named = []
    for trial in range(6):
        pids = [1, *range(20, 50)]
        processes = {1: (0, "/bin/python")}
        for i, pid in enumerate(pids[1:], 1):
            parent = int(rng.choice(pids[:i])) if rng.integers(5) else 7
            processes[pid] = (parent, str(rng.choice(["/usr/bin/git", "/bin/python", "/opt/python", "broken", "/x/nvcc"])))
        processes[60], processes[61] = (1, "/bin/python"), (60, "/bin/python")
        gone, peers = {60, *(int(x) for x in rng.choice(pids[1:], 3))}, {int(x) for x in rng.choice(pids[1:], 3)}
        processes |= {62: (1, "/opt/python"), 63: (1, "/opt/python"), 64: (1, "/opt/python"), 65: (64, "/opt/python")}
        peers.add(64)
        pids += [*range(60, 66)]
        system = _System(processes, trial % 2 == 0, sorted(gone))

        def counted(pid: int) -> bool:
            while pid != 1:
                if pid not in processes or pid in gone or pid in peers or processes[pid][1].rpartition("/")[2] in TOOLS:
                    return False
                if trial % 2 and processes[pid][1] == "broken":  # its parent is not told
                    return False
                pid = processes[pid][0]
            return True

        with instead(forbidden, os=system, open=system.open):
            same(checks, f"{trial}", sorted(forbidden.children(peers)), [pid for pid in pids[1:] if counted(pid)])
    system = _System({1: (0, "x")}, False, [1])
    with instead(forbidden, os=system, open=system.open):
        same(checks, "without /proc", (forbidden._by_parent(1), forbidden._children_of(1)), ([], []))
    texts = {"/proc/self/maps": "1000-3000 r-xp 0 0 0\n"}

    def opened(path: str, **how: str) -> io.StringIO:
        if path not in texts:
            raise (ProcessLookupError if "9" in path else FileNotFoundError)
        return io.StringIO(texts[path])

    with instead(forbidden, open=opened):
        same(checks, "maps", [forbidden._maps(x) for x in ("self", "8", "9")], [Maps((), 0x2000), None, None])
    return all_hold(checks)


def unloads(rng: np.random.Generator) -> Measured:
    """The linker's count is asked of dl_iterate_phdr, where there is one on Linux that tells it; the manifest lists every file with origin
    and hash, and refuses one that is not what its distribution installed; a file is read once while it stays what it is."""
    checks: Named = []
    adds, subs = int(rng.integers(50, 99)), int(rng.integers(1, 9))
    size = forbidden._Info.subs.offset + 8
    for told, library, system, expected in ((size, True, "linux", Loads(subs, True)), (size + 8, True, "linux", Loads(subs, True)),
                                            (size - 1, True, "linux", Loads(0, False)), (size, False, "linux", Loads(0, False)),
                                            (size, True, "darwin", Loads(0, False))):
        calls = list[object]()

        class Iterate:
            """dl_iterate_phdr of two objects, which stops where it is told to."""

            argtypes: Any = None
            restype: Any = None

            def __call__(self, first: Any, data: object) -> int:
                for _ in range(2):
                    info = forbidden._Info(adds=adds, subs=subs)
                    calls.append(first(forbidden.ctypes.pointer(info), told, None))
                    if calls[-1]:
                        return 1
                return 0

        libc = SimpleNamespace(dl_iterate_phdr=Iterate()) if library else SimpleNamespace()
        forbidden._iterate.cache_clear()
        with instead(forbidden, _bindings=SimpleNamespace(library=lambda name: libc if name is None else None),
                     sys=SimpleNamespace(platform=system)):
            same(checks, f"{told} {library} {system}", forbidden.loads(), expected)
            same(checks, "asked once", calls, [1] * (library and system == "linux"))
        forbidden._iterate.cache_clear()
    watch, _ = _watch()
    with tempfile.TemporaryDirectory(prefix="alpha-listed-") as root:
        file = Path(root) / "x.so"
        file.write_bytes(raw := rng.bytes(3_000_000))
        digest = hashlib.sha256(raw).hexdigest()
        same(checks, "hash", forbidden.sha256_of(str(file)), digest)
        with instead(forbidden, open=None):
            same(checks, "read once", forbidden.sha256_of(str(file)), digest)
        file.write_bytes(b"other")
        same(checks, "another file", forbidden.sha256_of(str(file)), hashlib.sha256(b"other").hexdigest())
        same(checks, "gone", forbidden.sha256_of(f"{root}/none"), "")
    hashes = {"/good/listed.so": "ab" * 32, "/good/z.so": "11" * 32, "/good/changed.so": "ee" * 32, "/a/z.so": "00" * 32}
    for path, origin in (("/good/z.so", "b"), ("/good/listed.so", "a 1"), ("[vdso]", "kernel"), ("/good/old.so (deleted)", "a 1"),
                         ("/a/z.so", "b")):
        watch.judged[Mapped(path, "1", "1")] = origin
    asked = list[str]()
    with instead(forbidden, _WATCH=watch, check=asked.append, sha256_of=hashes.get):
        same(checks, "listed", forbidden.libraries(), [{"file": "listed.so", "origin": "a 1", "sha256": "ab" * 32},
             {"file": "z.so", "origin": "b", "sha256": "00" * 32}, {"file": "z.so", "origin": "b", "sha256": "11" * 32}])
        watch.judged[Mapped("/good/changed.so", "1", "1")] = "c"
        same(checks, "changed", said(forbidden.libraries), error_text(
            "VerdictError", "a library is not the one that its distribution installed",
            f"/good/changed.so: {'ee' * 8}, installed as {'cd' * 8}",
            "the hash in the distribution's RECORD", "install the distribution again"))
    same(checks, "looked at first", asked, ["while its files are listed"] * 2)
    return all_hold(checks)
