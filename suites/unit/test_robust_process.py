"""Where the process boundary matters: an interrupt while it starts, sources that do not parse, folders that cannot be written."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from copies import share_digests

from alpha import __main__ as entry
from alpha.cli.common import enough_files
from alpha.errors import CorruptError, MachineError
from alpha.gates.adversarial import plant

ROOT = Path(__file__).parents[2]

AT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from alpha.__main__ import {script}
sys.exit({script}(["--help"]))
"""


def run(*words: str, env: dict[str, str] | None = None, cwd: Path | None = None, **more: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, *words], capture_output=True, timeout=120, check=False, cwd=cwd or ROOT,
                          env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}, **more)  # type: ignore[call-overload,no-any-return]


def wakes() -> None:
    """In the child: Ctrl-C is heard, whatever the parent does with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(("script", "module"), [
    ("main", "alpha.cli"), ("main", "numpy"), ("main", "rich"), ("main", "alpha.backends.cpu.executor"), ("main", "alpha.train.session"),
    ("main", "sqlite3"), ("report", "alpha.report.command"),
])  # fmt: skip
def test_ctrl_c_while_it_imports(script: str, module: str) -> None:
    """Planted: with `from alpha.cli import main` as the script's first line, this ends in a traceback and with 1."""
    done = run("-c", AT.format(module=module, script=script), preexec_fn=wakes)
    assert done.returncode == 130 and done.stderr == b"interrupted\n" and not done.stdout, done.stderr.decode()


@pytest.mark.parametrize(("limit", "ranks"), [(6, 1), (12, 2)])
def test_a_low_limit_on_open_files_is_one_message(small_run: Callable[..., Path], tmp_path: Path, limit: int, ranks: int) -> None:
    """It tells the limit, not only the file which happened to meet it."""
    file = small_run(tmp_path, {"train.shards": 2, "train.steps": 2})
    text = "import sys; from alpha.__main__ import main; sys.exit(main(sys.argv[1:]))"
    done = run("-c", text, "lab", str(file), *(["--nproc=2"] if ranks == 2 else []),
               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
    said = done.stderr.decode()
    assert done.returncode == 3 and said.count("this process may open no more files") == 1 and "Traceback" not in said, said
    assert f"with a limit of {limit}" in said and "ulimit -n" in said


def test_every_error_of_the_limit_on_open_files_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another error was made of it, and of a library, which the loader opens; any other error stays what it is."""
    full, limit = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/x/shard"), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    library = ImportError(f"libx.so: cannot open shared object file: {os.strerror(errno.EMFILE)}", path="/x/libx.so")
    made, other = CorruptError("a shard cannot be read", do="remove it"), CorruptError("a shard is torn", do="remove it")
    made.__cause__, other.__cause__ = full, OSError(errno.ENOENT, "none", "/x/shard")
    for error, named in ((full, "/x/shard"), (made, "/x/shard"), (library, "/x/libx.so")):
        with pytest.raises(MachineError) as told, enough_files():
            raise error
        assert (told.value.what, told.value.came) == ("this process may open no more files", f"{named}, with a limit of {limit}")
    closed = sqlite3.OperationalError("unable to open database file")  # without a reason: it is the limit only where that is very low
    monkeypatch.setattr(resource, "getrlimit", lambda which: (13, 13))
    none = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    for error, named in ((closed, "database file"), (none, "['/tmp']")):
        with pytest.raises(MachineError) as told, enough_files():
            raise error
        assert told.value.came.endswith(f"{named}, with a limit of 13")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    for error in (closed, none, other, OSError(errno.ENFILE, "of all processes"), ImportError("no module")):
        with pytest.raises(type(error)) as same, enough_files():
            raise error
        assert same.value is error


@pytest.mark.alone
def test_ctrl_c_at_any_moment_of_the_start() -> None:
    for delay in (0.0, 0.1, 0.2, 0.35, 0.5):
        text = "import sys; print(flush=True); from alpha.__main__ import main; sys.exit(main(['doctor']))"
        process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, preexec_fn=wakes,
                                   env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert process.stdout is not None and process.stdout.read(1) == b"\n"  # the interpreter itself has started
        time.sleep(0.05 + delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130 and b"Traceback" not in err, (delay, process.returncode, err.decode())


def test_an_interrupt_that_python_drops_comes_again() -> None:
    """It came while a destructor or a callback of C ran. Planted: without the hook, this ends with 0 behind a traceback."""
    text = """
import alpha.cli, os, signal, sys, time
class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
def main(argv):
    held = Dropped()
    del held
    time.sleep(5)
    return 0
alpha.cli.main = main
from alpha.__main__ import main
sys.exit(main())
"""
    done = run("-c", text, preexec_fn=wakes)
    assert done.returncode == 130 and done.stderr == b"interrupted\n", done.stderr.decode()


def test_an_ignored_interrupt_stays_ignored() -> None:
    """As a script's background job has it."""
    def ignores() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    done = run("-c", AT.format(module="numpy", script="main"), preexec_fn=ignores)
    assert done.returncode == 0 and b"COMMAND" in done.stdout


def test_the_scripts_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'alpha = "alpha.__main__:main"' in text and 'alpha-report = "alpha.__main__:report"' in text
    assert callable(entry.main) and callable(entry.report)
    assert run("-m", "alpha", "--help").returncode == 0


def test_arguments_that_are_no_utf8() -> None:
    for words in (["plan", b"\xff\xfe.toml"], ["plan", "configs/tiny.toml", "--set", b"run.name=caf\xe9"],
                  ["sample", b"runs/\xe9", "--prompt", b"\xff"]):
        done = subprocess.run([sys.executable, "-m", "alpha", *words], capture_output=True, timeout=60, check=False, cwd=ROOT,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
        assert done.returncode == 2 and b"Traceback" not in done.stderr and b"came:" in done.stderr, done.stderr.decode()


# -- sources that do not parse -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree."""
    root = tmp_path_factory.mktemp("tree")
    plant.copy_package(root)
    (root / "kernels").unlink()
    shutil.copytree(ROOT / "kernels", root / "kernels")
    share_digests(root)
    return root


@pytest.fixture
def broken(copy: Path) -> Callable[[str, str], None]:
    kept: dict[Path, bytes] = {}

    def plant(file: str, text: str) -> None:
        path = copy / file
        kept[path] = path.read_bytes()
        path.write_bytes(kept[path] + text.encode())

    yield plant  # type: ignore[misc]
    for path, raw in kept.items():
        path.write_bytes(raw)


def told(copy: Path, *words: str) -> tuple[int, str]:
    done = warm.run(["-m", "alpha", *words], cwd=copy, root=copy)
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output
    return done.returncode, " ".join(output.split())


NEEDED = ("alpha/backends/cpu/kernels/gelu.py", "\ndef (:\n", "SyntaxError")
OTHERS = (("alpha/backends/cuda/kernels/norm.py", "\n  x = = 1\n", "Error"),
          ("alpha/backends/cpu/kernels/silu.py", "\nfrom alpha.ops import nothing_of_this_name\n", "ImportError"))


def test_broken_kernel_files_are_named_and_doctor_and_plan_live(copy: Path, broken: Callable[[str, str], None]) -> None:
    """A run is refused for the first of them, by name; doctor and plan name them all. NEEDED: by the run."""
    modules = {file: file.removesuffix(".py").replace("/", ".") for file, _, _ in (NEEDED, *OTHERS)}
    for file, text, says in OTHERS:
        broken(file, text)
        code, output = told(copy, "lab", "configs/tiny.toml")
        assert code == 2 and "cannot be loaded" in output and modules[file] in output and says in output
    code, output = told(copy, "plan", "configs/tiny.toml")
    assert code == 0 and "peak" in output and all(modules[file] in output for file, _, _ in OTHERS)
    broken(*NEEDED[:2])
    code, output = told(copy, "doctor")
    assert code == 3 and "python" in output and all(modules[file] in output and says in output for file, _, says in (NEEDED, *OTHERS))
    code, output = told(copy, "plan", "configs/tiny.toml")
    assert code == 2 and "no cpu kernel covers" in output and modules[NEEDED[0]] in output
    code, output = told(copy, "lab", "configs/tiny.toml")
    assert code == 2 and "cannot be loaded" in output and modules[NEEDED[0]] in output


def test_a_broken_device_source_or_op_row(copy: Path, broken: Callable[[str, str], None]) -> None:
    """Planted: where doctor and plan compile what the manifest does not know, they take minutes, or end with the compiler's words."""
    broken("kernels/norm/forward.cu", "\nthis is no C++;\n")
    assert told(copy, "doctor")[0] == 0
    code, output = told(copy, "plan", "configs/gpt2-124m.toml")
    assert code == 0 and "NOT USABLE" in output and "peak" in output
    broken("alpha/ops/gelu.py", "\ndef (:\n")
    code, output = told(copy, "doctor")
    assert "gelu.py" in output and "python" in output
    code, output = told(copy, "plan", "configs/tiny.toml")
    assert code in (1, 2) and "gelu.py" in output


CLOSED = """
import os, sys
from alpha.__main__ import begin
def load():
    def run(argv):
        assert all(os.path.samestat(os.fstat(number), os.stat(os.devnull)) for number in range(3))
        with open({path!r}, "w") as file:
            assert file.fileno() > 2
            for stream in (sys.stdout, sys.stderr):
                print("lost", file=stream, flush=True)
            assert sys.stdin.read() == ""
            os.write(2, b"lost")
            file.write("kept")
        return 7
    return run
sys.exit(begin(load, []))
"""


def test_closed_standard_streams_lead_nowhere(tmp_path: Path) -> None:
    """A file that is opened later does not get their numbers, so nothing that is said is written into it."""
    path = tmp_path / "file"
    code = subprocess.call(["/bin/sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, CLOSED.format(path=str(path))], cwd=ROOT,
                           env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert code == 7 and path.read_text() == "kept"
