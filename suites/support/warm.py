"""Interpreters that start warm: a server imports Alpha once, and each process asked of it is a fork.

A fresh interpreter takes most of a second to import what a command needs, a fork some milliseconds. What runs in it finds what a fresh one
finds: its own arguments, folder, streams, default signals, `__main__` and random state. Hash seed, imported modules and what an interpreter
reads of its environment are the server's. So tests of start-up and of imports start an interpreter of their own.

A process of another tree forgets the server's Alpha and imports its own; what Alpha stands on stays imported.

Each pytest process has one server, started when first asked. It ends with that process, and with it all that it has started.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, BinaryIO

MESSAGE = 1 << 17
"""Longest request, bytes."""

ROOT = Path(__file__).resolve().parents[2]
OWN = (ROOT, ROOT / "suites" / "support", ROOT / "suites" / "unit")
"""Folders of this tree in which an interpreter may look for modules."""

DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL,
            signal.SIGCHLD: signal.SIG_DFL}  # fmt: skip


class Process:
    """A process that the server started; of `subprocess.Popen` what tests use. `stdin`, `stdout`, `stderr`: what PIPE was asked for, to be
    written or read."""

    def __init__(self, arguments: Sequence[str], told: socket.socket, stdin: BinaryIO | None, stdout: BinaryIO | None,
                 stderr: BinaryIO | None) -> None:
        self.args, self.stdin, self.stdout, self.stderr = arguments, stdin, stdout, stderr
        self.returncode: int | None = None
        self._waiting = threading.Lock()
        self._told, pid = told, told.recv(64)
        if not pid:
            raise RuntimeError("the server of warm interpreters has ended; its own words stand among this session's errors")
        self.pid = int(pid)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; -N where signal N ended it. TimeoutExpired after `timeout` seconds."""
        with self._waiting:  # it is told once, and several threads may ask
            if self.returncode is None:
                self._told.settimeout(timeout)
                try:
                    self.returncode = int(self._told.recv(64))
                except (TimeoutError, BlockingIOError):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
                self._told.close()
            return self.returncode

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it if it has not ended, and close the ends of its pipes."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):  # what was written and not sent
                    stream.close()


class Served(Process):
    """One that is asked over its pipes: `kill` leaves them open for who reads, as that of `subprocess.Popen` does."""

    def kill(self) -> None:
        """End it if it has not ended."""
        self.send_signal(signal.SIGKILL)


def start(arguments: Sequence[object], *, cwd: Path | None = None, root: Path | None = None,
          environment: Mapping[str, str | None] | None = None, namespace: str | None = None,
          stdin: int | BinaryIO = subprocess.DEVNULL, stdout: int | BinaryIO = subprocess.DEVNULL,
          stderr: int | BinaryIO = subprocess.DEVNULL, kind: type[Process] = Process) -> Process:
    """Start what `python ARGUMENTS` starts: `-c CODE`, `-m MODULE` or a script, and its arguments. Streams: a file, PIPE or DEVNULL.
    `root`: a tree whose Alpha it is to import; `environment`: variables that differ from the server's, None where they are not there;
    `namespace`: the network namespace in which it is, as `ip netns exec` has it."""
    words = [str(a) for a in arguments]
    with ExitStack() as stack:
        ends: list[BinaryIO | None] = []
        given: list[int] = []
        for stream, mode in ((stdin, os.O_RDONLY), (stdout, os.O_WRONLY), (stderr, os.O_WRONLY)):
            ends.append(None)
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                ours, theirs = (write, read) if mode == os.O_RDONLY else (read, write)
                ends[-1] = os.fdopen(ours, "wb" if mode == os.O_RDONLY else "rb")
                given.append(theirs)
                stack.callback(os.close, theirs)
            elif stream == subprocess.DEVNULL:
                given.append(os.open(os.devnull, mode))
                stack.callback(os.close, given[-1])
            else:
                given.append(stream if isinstance(stream, int) else stream.fileno())
        told, tells = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(tells)
        request = json.dumps({"arguments": words, "cwd": str(cwd or Path.cwd()), "root": str(root) if root is not None else None,
                              "environment": dict(environment or {}), "namespace": namespace}).encode()
        assert len(request) < MESSAGE
        socket.send_fds(_server(), [request], [*given, tells.fileno()])
    return kind(words, told, *ends)


def run(arguments: Sequence[object], *, timeout: float = 120, **how: Any) -> subprocess.CompletedProcess[str]:
    """Start and wait, both streams taken; it is ended after `timeout` seconds, with TimeoutExpired."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(arguments, stdout=out, stderr=err, **how)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess(process.args, code, *texts)


def popen(command: Sequence[str], *, env: Mapping[str, str] | None = None, **streams: Any) -> Process | subprocess.Popen[bytes]:
    """What `subprocess.Popen` starts, warm where it is a script of the suites; anything else as ever."""
    if command[0] != sys.executable or not command[1].startswith(str(ROOT / "suites")):
        return subprocess.Popen(command, env=env, **streams)
    given = os.environ if env is None else env
    return start(command[1:], environment={**dict.fromkeys(os.environ), **given}, kind=Served, **streams)


@cache
def _server() -> socket.socket:
    """The end on which this process asks its server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# -- the server's side ---------------------------------------------------------------------------------------------------------


PEAK = {"SIZE": 128, "REPEATS": 5, "COPIES": 1, "COPY_BYTES": 1 << 20}
"""Constants of alpha/train/peak.py in runs that tests train: few and small products and copies. The whole takes three quarters of a tiny
run."""

_WHOLE: dict[str, int] = {}
"""What they are. A gate is of these: `alpha gate` measures as it does elsewhere."""


ALLOCATED = 20_000
"""Objects more than before, after which Python looks for cycles. At its own 700 that takes a third of the time of a session's collection
and of digests: they make millions of objects that stay."""


def collect_seldom() -> None:
    """From here on, in this process and its forks; what is held now is looked through never again."""
    gc.set_threshold(ALLOCATED, *gc.get_threshold()[1:])
    gc.collect()
    gc.freeze()


def preload() -> None:
    """Import what commands and sessions of tests use. pytest wants to import its own plugins, so they are left to it."""
    for name in ("alpha.cli", "alpha.report.command", "pytest", "alpha.gates.adversarial.plant"):
        importlib.import_module(name)
    from alpha.ops.table import table
    from alpha.registry import machine
    from alpha.train import forbidden, peak
    from alpha.train.catalogue import catalogue

    catalogue(), table()  # import every file of kernels and rows
    machine.environment()  # which BLAS that is
    _ = forbidden._WATCH.allowed.files  # what installed distributions list
    with suppress(OSError):  # a system that shows no mappings
        for mapped in forbidden.parse(Path("/proc/self/maps").read_text()).files:
            forbidden.sha256_of(mapped.path)  # known in every fork
    for name, value in PEAK.items():
        _WHOLE[name] = getattr(peak, name)
        setattr(peak, name, value)


def serve(asked: socket.socket) -> None:
    """Fork what is asked for and tell how it ended, until nobody can ask any more."""
    under_way: dict[int, socket.socket] = {}
    ended, woken = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(ended, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    collect_seldom()
    with selectors.DefaultSelector() as waiting:
        waiting.register(asked, selectors.EVENT_READ)
        waiting.register(ended, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in waiting.select()}
            if ended in ready:
                os.read(ended, 1 << 12)
                _reap(under_way)
            if asked not in ready:
                continue
            request, fds, _, _ = socket.recv_fds(asked, MESSAGE, 4)
            if not request:
                for pid in under_way:
                    os.kill(pid, signal.SIGKILL)
                return
            pid = os.fork()
            if not pid:
                asked.close()
                os.close(ended)
                os.close(woken)
                waiting.close()
                _begin(json.loads(request), fds)
            tells = socket.socket(fileno=fds[3])
            tells.send(str(pid).encode())
            under_way[pid] = tells
            for fd in fds[:3]:
                os.close(fd)


def _reap(under_way: dict[int, socket.socket]) -> None:
    for pid in list(under_way):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            with under_way.pop(pid) as tells, suppress(OSError):  # who asked may have gone
                tells.send(str(os.waitstatus_to_exitcode(status)).encode())


def _begin(request: dict[str, Any], fds: Sequence[int]) -> None:
    """In the fork: be the process that was asked for. Does not return."""
    signal.set_wakeup_fd(-1)
    for number, usual in DEFAULTS.items():
        signal.signal(number, usual)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    os.chdir(request["cwd"])
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.stdout, sys.stderr = (_text(fd, stream) for fd, stream in ((1, sys.stdout), (2, sys.stderr)))
    if request["namespace"] is not None:
        _enter(request["namespace"])
    gates = request["arguments"][:3] == ["-m", "alpha", "gate"]
    if request["root"] is not None:
        _change_tree(request["root"], quick=not gates)
    elif gates:
        vars(sys.modules["alpha.train.peak"]).update(_WHOLE)
    code = _code(lambda: _interpret(request["arguments"]))
    _code(threading._shutdown)  # type: ignore[attr-defined]
    _code(atexit._run_exitfuncs)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _text(fd: int, was: Any) -> io.TextIOWrapper:
    """The stream of an interpreter that begins: the server's knows of another file whether it can be sought in. Written at once where the
    environment says so, and by lines where errors go."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    return io.TextIOWrapper(io.FileIO(fd, "w", closefd=False) if unbuffered else open(fd, "wb", closefd=False),  # type: ignore[arg-type]
                            encoding=was.encoding, errors=was.errors, line_buffering=fd == 2, write_through=unbuffered)


CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
"""<sched.h>."""
NETNS, ETC = Path("/run/netns"), Path("/etc/netns")
"""Where ip-netns(8) keeps namespaces, and files that those have in place of /etc's."""
MS_BIND, MS_REC, MS_SLAVE, MNT_DETACH = 0x1000, 0x4000, 1 << 19, 2
"""<sys/mount.h>."""


def _enter(namespace: str) -> None:
    """Be in a network namespace, with its /sys and its files of /etc, as ip-netns(8) says."""
    libc = ctypes.CDLL(None, use_errno=True)

    def done(code: int, what: str) -> None:
        if code:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    with open(NETNS / namespace, "rb") as file:
        done(libc.setns(file.fileno(), CLONE_NEWNET), "setns")
    done(libc.unshare(CLONE_NEWNS), "unshare")
    done(libc.mount(b"", b"/", b"none", ctypes.c_ulong(MS_SLAVE | MS_REC), None), "mounts of its own")
    libc.umount2(b"/sys", MNT_DETACH)  # where none is mounted there is none to be taken away
    done(libc.mount(namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None), "mount /sys")
    for path in (ETC / namespace).glob("*"):
        done(libc.mount(bytes(path), bytes(Path("/etc", path.name)), b"none", ctypes.c_ulong(MS_BIND), None), f"mount {path}")


class _Quick:
    """Finds alpha.train.peak of another tree, once, and measures the machine's peak quickly there too."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "alpha.train.peak":
            return None
        sys.meta_path.remove(_Quick)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), vars(module).update(PEAK))[0]  # type: ignore[method-assign]
        return spec


def _change_tree(root: str, quick: bool) -> None:
    """From here on Alpha is that of another tree, here and in what is started from here. `quick`: it measures the peak quickly."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "alpha"]:
        del sys.modules[name]
    if quick:
        sys.meta_path.insert(0, _Quick)  # type: ignore[arg-type]
    sys.path[1:] = [root, *(p for p in sys.path[1:] if Path(p or ".").resolve() not in OWN)]
    os.environ["PYTHONPATH"] = root
    sys.dont_write_bytecode = False  # a second command there finds the first one's


def _code(work: Callable[[], object]) -> int:
    """The exit code of an interpreter that does this work."""
    try:
        work()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _interpret(arguments: Sequence[str]) -> None:
    """As the interpreter reads its command line."""
    what, *rest = arguments
    if what == "-m":
        sys.argv, sys.path[0] = rest, ""
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = list(arguments), str(Path(what).resolve().parent)
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    preload()
    serve(socket.socket(fileno=int(sys.argv[1])))
