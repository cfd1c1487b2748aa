"""What a process may hold: each way around the allow list is planted in a process of its own, and must be named.

The forbidden library is a tiny one that gcc makes here. It is opened by ctypes (the door refuses it) or through the C library's own dlopen,
which Python's audit events do not see: that stands for whatever C code loads.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm

from alpha.bench.peer import Peer
from alpha.cuda_runtime import launch, manifest
from alpha.cuda_runtime.compile import Cubin, Source
from alpha.errors import VerdictError
from alpha.gates.contracts import reference
from alpha.train import allow_list, forbidden
from alpha.train.forbidden import Mapped, Watch, parse

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="NOT_RUN: this system has no /proc/self/maps")

PRELUDE = """
import contextlib, ctypes, os, subprocess, sys, time
from alpha.train import forbidden
libc = ctypes.CDLL(None)
libc.dlopen.restype, libc.dlopen.argtypes, libc.dlclose.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int), (ctypes.c_void_p,)
fake = sys.argv[1]

def load(path):
    handle = libc.dlopen(os.fsencode(path), 2)
    assert handle, path
    return handle

def forked():
    loaded, tells = os.pipe()
    pid = os.fork()
    if not pid:
        load(fake)
        os.write(tells, b".")
        time.sleep(60)
        os._exit(0)
    os.read(loaded, 1)
    return pid

forbidden.watch()
forbidden.check('at the start')
"""

CHILD = """
code = 'import ctypes, sys, time; ctypes.CDLL(sys.argv[1]); print(1, flush=True); time.sleep(60)'
nested = 'import subprocess, sys; subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]])'
c = subprocess.Popen([sys.executable, '-c', code, fake], stdout=subprocess.PIPE)
c.stdout.readline()
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of no allowed origin, under an innocent name."""
    folder = tmp_path_factory.mktemp("fake")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("NOT_RUN: no C compiler, which makes the library that is planted")
    (folder / "fake.c").write_text("int PyInit_fake(void) { return 0; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "libz.so.1", "fake.c"], cwd=folder, check=True)
    return folder / "libz.so.1"


def run(code: str, *arguments: object, timeout: float = 120) -> tuple[int, str]:
    """(exit code, what it said) of a process that runs `code` after the prelude."""
    done = warm.run(["-c", PRELUDE + code, *arguments], timeout=timeout)
    return done.returncode, done.stdout + done.stderr


def red(code: str, *arguments: object, says: str) -> None:
    """The code ends in a VerdictError whose text holds `says`."""
    status, output = run(code, *arguments)
    assert status != 0 and "VerdictError" in output and says in output, output


# -- the look ------------------------------------------------------------------------------------------------------------------


@linux
def test_a_process_that_holds_what_it_may_is_clean() -> None:
    code = "import alpha.cli, sqlite3, ssl, decimal\nforbidden.check('at the end')\nprint(forbidden.libraries(), forbidden.blind())"
    done = subprocess.run([sys.executable, "-c", PRELUDE + code, ""], capture_output=True, text=True, timeout=120, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "numpy" in output and "python" in output and "system" in output


@linux
@pytest.mark.parametrize(("code", "says"), [
    ("load(fake)\nforbidden.check('now')", "mapped: {fake}"),
    ("h = load(fake)\nlibc.dlclose(h)\nforbidden.check('now')", "mapped and unmapped again, by code that is not Python: 1"),
    ("fd = os.memfd_create('numpy')\nos.write(fd, open(fake, 'rb').read())\nload(f'/proc/self/fd/{fd}')\nforbidden.check('now')",
     "mapped from memory: /memfd:numpy (deleted)"),
    ("import shutil\nshutil.copy(fake, fake + '.gone')\nload(fake + '.gone')\nos.unlink(fake + '.gone')\nforbidden.check('now')",
     "mapped: {fake}.gone (deleted)"),
    ("import mmap\nm = mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)\nforbidden.check('now')",
     "executable memory without a file"),
    ("sys.modules['torch'] = sys\nforbidden.check('now')", "imported: torch"),
    ("pid = forked()\ntry:\n    forbidden.check('now')\nfinally:\n    os.kill(pid, 9)", "mapped: {fake}"),
    (CHILD + "try:\n    forbidden.check('now')\nfinally:\n    c.kill()", "child"),
], ids=["renamed", "mapped-and-unmapped", "memfd", "deleted", "plain-memory", "module", "forked-child", "child"])  # fmt: skip
def test_the_look_names_what_c_code_loaded(fake: Path, code: str, says: str) -> None:
    red(code, fake, says=says.format(fake=fake))


# -- the door ------------------------------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize(("code", "says"), [
    ("ctypes.CDLL(fake)", "opened: {fake}"),
    ("with contextlib.suppress(Exception):\n    ctypes.CDLL(fake)\nforbidden.check('now')", "opened: {fake}"),
    ("fd = os.memfd_create('x')\nos.write(fd, open(fake, 'rb').read())\nctypes.CDLL(f'/proc/self/fd/{fd}')", "opened from memory"),
    ("import importlib.machinery, importlib.util\nl = importlib.machinery.ExtensionFileLoader('fake', fake)\n"
     "importlib.util.module_from_spec(importlib.util.spec_from_loader('fake', l))", "imported: {fake}"),
], ids=["dlopen", "swallowed", "memfd", "extension"])  # fmt: skip
def test_the_door_refuses_a_library(fake: Path, code: str, says: str) -> None:
    red(code, fake, says=says.format(fake=fake))


def test_the_door_refuses_an_import(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    path = f"sys.path.insert(0, {str(tmp_path)!r})\n"
    red(path + "import torch", "", says="imported: torch")
    red(path + "import torch.nn", "", says="imported: torch")
    swallowed = "try:\n    import torch\nexcept Exception:\n    sys.modules.pop('torch', None)\nforbidden.check('now')"
    red(path + swallowed, "", says="imported: torch")
    status, output = run("with contextlib.suppress(ImportError):\n    import horovod\nforbidden.check('now')", "")
    assert status == 0, output  # who only asks whether it is there imports nothing


@linux
@pytest.mark.parametrize(("start", "refused"), [
    ("subprocess.run([sys.executable, '-c', ''])", True),
    ("os.system('true')", True),
    ("os.posix_spawn('/bin/true', ['true'], {})", True),
    ("os.execv('/bin/true', ['true'])", True),
    ("with contextlib.suppress(OSError):\n        subprocess.run(['git', '--version'], capture_output=True)", False),
])  # fmt: skip
def test_training_starts_tools_alone(start: str, refused: bool) -> None:
    code = f"with forbidden.training():\n    {start}\nforbidden.check('at the end')"
    if refused:
        red(code, "", says="started by training")
    else:
        status, output = run(code, "")
        assert status == 0, output


def test_a_peer_is_refused_in_training_and_exempt_elsewhere(fake: Path) -> None:
    with forbidden.training(), pytest.raises(VerdictError, match="training starts no peer"):
        Peer(sys.executable, "cpu", 1)
    code = CHILD.replace("code, fake]", "nested, fake, code]") + "forbidden.starts_peer(c.pid)\ntry:\n    forbidden.check('now')\n"
    status, output = run(code + "finally:\n    c.kill()", fake)
    assert status == 0, output


# -- sessions, samples, benchmarks and gates -----------------------------------------------------------------------------------

SETTINGS = {"data.tokenizer": "bpe", "data.vocab": 270, "train.steps": 6, "train.checkpoint_every": 2}

AT_STEP = """
from alpha import cli
from alpha.train.loop import Loop
advance, at, what = Loop.advance, int(sys.argv[3]), sys.argv[4]

def planted(self, **more):
    if self.step == at and what == 'load':
        load(fake)
    if self.step == at and what == 'fork':
        forked()
    if self.step == at and what == 'extension':
        new = [n for n in ('cmath', 'syslog', 'resource', '_lsprof') if n not in sys.modules and n not in sys.builtin_module_names]
        __import__(new[0])
    if self.step == at + 2 and what == 'extension':
        os._exit(7)
    return advance(self, **more)

Loop.advance = planted
sys.exit(cli.main(['--debug', 'lab', sys.argv[2], *sys.argv[5:]]))
"""


@pytest.fixture
def root(tmp_path: Path, small_run: Callable[..., Path]) -> Path:
    return small_run(tmp_path, SETTINGS).parent


SEEN, LISTED = "at the checkpoint of step", "while its files are listed"
"""A save is finished beside the steps that follow, and files are listed when it is: that may be before the next save."""


@linux
def test_a_session_is_looked_at_at_each_checkpoint_and_when_resumed(fake: Path, root: Path) -> None:
    """Loaded only after step 1: the checkpoint behind it is not written; the one before stands, and from it the run goes on cleanly."""
    checkpoints = root / "runs" / "r" / "checkpoints"
    status, output = run(AT_STEP, fake, root / "run.toml", 3, "load")
    assert status == 1 and f"mapped: {fake}" in output and (f"{SEEN} 4" in output or LISTED in output), output
    assert [p.name for p in sorted(checkpoints.iterdir())] == ["step-00000002"]
    status, output = run("load(fake)\nfrom alpha import cli\nsys.exit(cli.main(['lab', sys.argv[2], '--resume']))", fake,
                         root / "runs" / "r")
    assert status == 1 and f"mapped: {fake}" in output and "at the start" in output, output
    status, output = run(AT_STEP, fake, root / "runs" / "r", 5, "load", "--resume")
    assert status == 1 and f"mapped: {fake}" in output and (f"{SEEN} 6" in output or LISTED in output), output
    status, output = run(AT_STEP, fake, root / "runs" / "r", 99, "load", "--resume")
    assert status == 0, output
    sessions = json.loads((root / "runs" / "r" / "manifest.json").read_text())["sessions"]
    assert len(sessions) == 3 and all(s["not_looked_at"] == [] for s in sessions)
    for entry in sessions[-1]["libraries"]:
        assert len(entry["sha256"]) == 64 and entry["origin"] and "/" not in entry["file"]
    assert any(e["origin"].startswith("numpy ") for e in sessions[-1]["libraries"])


@linux
def test_what_is_loaded_later_stands_in_the_manifest_of_a_run_that_is_killed(fake: Path, root: Path) -> None:
    status, output = run(AT_STEP, fake, root / "run.toml", 3, "extension")
    assert status == 7, output
    (session,) = json.loads((root / "runs" / "r" / "manifest.json").read_text())["sessions"]
    names = {e["file"].partition(".")[0]: e["origin"] for e in session["libraries"]}
    assert {"cmath", "syslog", "resource", "_lsprof"} & set(names), names


@linux
def test_a_session_looks_at_its_children(fake: Path, root: Path) -> None:
    status, output = run(AT_STEP, fake, root / "run.toml", 1, "fork")
    assert status == 1 and "child" in output and f"mapped: {fake}" in output, output


@linux
def test_a_sample_is_looked_at(fake: Path, root: Path) -> None:
    assert run(AT_STEP, fake, root / "run.toml", 99, "load")[0] == 0
    code = """
from alpha import cli
from alpha.train import sample
pick, what = sample.pick, sys.argv[3]

def planted(*args):
    if what == 'load':
        load(fake)
    return pick(*args)

sample.pick = planted
sys.exit(cli.main(['sample', sys.argv[2], '--prompt', 'def', '--tokens', '4']))
"""
    status, output = run(code, fake, root / "runs" / "r", "nothing")
    assert status == 0, output
    status, output = run(code, fake, root / "runs" / "r", "load")
    assert status == 1 and f"mapped: {fake}" in output, output


@linux
@pytest.mark.parametrize("command", [["bench", "silu.f32.cpu", "--rounds", "1", "--case", "cache"],
                                     ["gate", "run", "registry.judge", "--stale", "--gate", "parity"]])
def test_commands_are_looked_at_from_start_to_end(fake: Path, command: list[str]) -> None:
    code = """
from alpha import cli
from alpha.train.catalogue import catalogue
kernel, what = catalogue()['silu.f32.cpu'], sys.argv[2]
parser = cli.parser

def planted():
    if what == 'load':
        load(fake)
    return parser()

cli.parser = planted
sys.exit(cli.main(sys.argv[3:]))
"""
    status, output = run(code, fake, "nothing", *command)
    assert status == 0, output
    status, output = run(code, fake, "load", *command)
    assert status == 1 and f"mapped: {fake}" in output, output


@linux
def test_a_gate_run_keeps_no_record_of_a_process_that_holds_more(fake: Path) -> None:
    code = """
from alpha import cli
from alpha.gates import run
engine_for, what, saved = run.engine_for, sys.argv[2], []

def planted(component, nonce):
    if what == 'load':
        load(fake)
    return engine_for('parity', component)(component, nonce)

run.engine_for = lambda gate, component: planted
run.save = lambda records, root: saved.extend(records)
code = cli.main(['gate', 'run', 'gelu.f32.cpu', '--gate', 'parity'])
print('saved', len(saved))
sys.exit(code)
"""
    status, output = run(code, fake, "nothing")
    assert status == 0 and "saved 1" in output, output
    status, output = run(code, fake, "load")
    assert status == 1 and f"mapped: {fake}" in output and "after parity of gelu.f32.cpu" in output and "saved 0" in output, output


@linux
@pytest.mark.parametrize("script", ["determinism._FRESH", "ab._AGAIN"])
def test_the_fresh_processes_of_gates_are_looked_at(fake: Path, script: str) -> None:
    code = f"""
from types import SimpleNamespace
from alpha.gates import determinism
from alpha.gates.timing import ab
what = sys.argv[2]

def planted(*args):
    if what == 'load':
        load(fake)
    return SimpleNamespace(low=0, estimate=0, high=0, n=0) if len(args) == 4 else ['digest']

ab.once_more = determinism.digests_of = planted
sys.argv[1:] = ['gelu.f32.cpu', 'nonce'] if '{script}' == 'determinism._FRESH' else ['gelu.f32.cpu', 'gelu.f32.cpu', 'case', '1.0']
exec({script})
"""
    status, output = run(code, fake, "nothing")
    assert status == 0, output
    status, output = run(code, fake, "load")
    assert status == 1 and f"mapped: {fake}" in output and "fresh process" in output, output


@linux
def test_a_fresh_process_of_a_contract_has_the_door(fake: Path) -> None:
    assert reference.in_new_process("1 + 1", "alpha.gates.contracts.reference") == "2"
    planted = reference.in_new_process(f"__import__('ctypes').CDLL({str(fake)!r})", "alpha.gates.contracts.reference")
    assert planted.startswith("failed") and "/".join(fake.parts[-2:]) in planted  # the last 300 characters of what it said


# -- origins -------------------------------------------------------------------------------------------------------------------

FOREIGN = ["/usr/lib/libcublas.so.12", "/x/libcublasLt.so", "/x/libcudnn_ops_infer.so.8", "/usr/lib/libnccl.so.2", "/usr/lib/libmpi.so.40",
           "/usr/lib/libmpich.so.12", "/a/site-packages/torch/lib/libc10.so", "/a/libtorch_cpu.so", "/a/jaxlib/xla.so", "/tmp/libz.so.1",
           "/home/u/numpy/_core/_multiarray_umath.cpython-311-x86_64-linux-gnu.so", "/memfd:x (deleted)",
           "/usr/local/cuda/lib64/libcublas.so.13", "/usr/lib/libcudart.so.13", "/opt/nvidia/libcuda.so.1", "//anon"]  # fmt: skip
LAYOUTS = {
    "debian": ("/usr/lib", "/usr/lib/python3.12/lib-dynload",
               {"/usr/lib/x86_64-linux-gnu/libc.so.6": "system", "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2": "system",
                "/usr/lib/python3.12/lib-dynload/_json.cpython-312-x86_64-linux-gnu.so": "python",
                "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.26.so": "blas",
                "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04": "driver", "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.1": "driver",
                "/usr/local/nvidia/lib64/libcuda.so.580.1": "driver", "/usr/local/cuda-13.0/compat/libcuda.so.580.65.06": "driver",
                "/usr/lib/python3.12/lib-dynload/torch.cpython-312-x86_64-linux-gnu.so": "",
                "/usr/local/cuda-13.0/targets/x86_64-linux/lib/libcurand.so.10.4.0.35": "toolkit"}),
    "old glibc": ("/usr/lib", "/usr/lib/python3.10/lib-dynload",
                  {"/usr/lib/x86_64-linux-gnu/libc-2.31.so": "system", "/usr/lib/x86_64-linux-gnu/ld-2.31.so": "system"}),
    "conda": ("/opt/conda/lib", "/opt/conda/lib/python3.11/lib-dynload",
              {"/opt/conda/lib/libopenblasp-r0.3.21.so": "blas", "/opt/conda/lib/libmkl_rt.so.2": "blas",
               "/opt/conda/lib/libssl.so.3": "system",
               "/opt/conda/lib/libpython3.11.so.1.0": "python", "/opt/conda/lib/libgomp.so.1.0.0": "system",
               "/opt/conda/lib/libtorch_cpu.so": "", "/opt/conda/lib/libnccl.so.2": "", "/opt/conda/lib/libmpi.so.40": ""}),
    "pyenv": ("/root/.pyenv/versions/3.11.7/lib", "/root/.pyenv/versions/3.11.7/lib/python3.11/lib-dynload",
              {"/root/.pyenv/versions/3.11.7/lib/libpython3.11.so.1.0": "python"}),
}


@pytest.mark.parametrize("path", FOREIGN)
def test_foreign_files_have_no_origin(path: str) -> None:
    assert forbidden.mapped(f"7f00-7f01 r-xp 00000000 08:01 1 {path}\n") == [path]
    assert forbidden.mapped(f"7f00-7f01 r--p 00000000 08:01 1 {path}\n") == [], "data, not code"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_python(layout: str) -> None:
    lib, dynload, expected = LAYOUTS[layout]
    found = allow_list.AllowList()
    folders = ("/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", lib)
    vars(found)["libraries"] = frozenset(map(Path, folders))
    vars(found)["extensions"] = frozenset([Path(dynload)])
    assert {path: found.origin_of(path) for path in expected} == expected
    assert found.origin_of(sys.executable and str(Path(sys.executable).resolve())) == "python"


@linux
def test_a_file_belongs_to_a_distribution_that_lists_it_with_its_hash(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "siphash24-1.9.dist-info").mkdir()
    (tmp_path / "siphash24-1.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: siphash24\nVersion: 1.9\n")
    shutil.copy(fake, tmp_path / "siphash24.so")
    code = f"sys.path.insert(0, {str(tmp_path)!r})\nload({str(tmp_path / 'siphash24.so')!r})\nprint(forbidden.libraries())"
    record = tmp_path / "siphash24-1.9.dist-info" / "RECORD"
    for of, good in ((fake.read_bytes(), True), (b"what was installed", False)):
        digest = urlsafe_b64encode(hashlib.sha256(of).digest()).rstrip(b"=").decode()
        record.write_text(f"siphash24.so,sha256={digest},1\nsiphash24-1.9.dist-info/RECORD,,\n")
        status, output = run("forbidden._WATCH.allowed = forbidden.AllowList()\n" + code, fake)
        assert (status == 0) == good and ("siphash24 1.9" if good else "not the one that its distribution installed") in output, output
    record.write_text("siphash24-1.9.dist-info/RECORD,,\n")
    red("forbidden._WATCH.allowed = forbidden.AllowList()\n" + code, fake, says="siphash24.so")


def test_a_file_that_an_upgrade_replaces_stays_what_it_was() -> None:
    watch, line = Watch(), "7f00-7f01 r-xp 00000000 08:01 77 /usr/lib/libz.so.1{}\n"
    assert watch.mapped(parse(line.format(""))) == [] and watch.mapped(parse(line.format(" (deleted)"))) == []
    assert Watch().mapped(parse(line.format(" (deleted)"))) == ["mapped: /usr/lib/libz.so.1 (deleted)"]
    assert Mapped("/memfd:x (deleted)", "0", "1").in_memory


def test_where_nothing_can_be_looked_at_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forbidden, "_iterate", lambda: None)
    assert any("unmapped" in line for line in forbidden.blind())


# -- compiled kernels ----------------------------------------------------------------------------------------------------------


def test_a_kernel_that_is_not_the_evidences_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What counts is what the driver would be given: a cached file whose record agrees with it, but which is other machine code."""
    source = Source.of("profile/mark.cu")
    code = tmp_path / "other.cubin"
    code.write_bytes(b"other machine code")
    given: list[bytes] = []
    driver = SimpleNamespace(cuModuleLoadData=lambda code: (0, given.append(code)))
    monkeypatch.setattr(launch._bindings, "driver", lambda: driver)
    monkeypatch.setattr(launch, "LOADED", {})
    other = hashlib.sha256(code.read_bytes()).hexdigest()
    with pytest.raises(VerdictError, match="not that of the evidence") as caught:
        launch._module(Cubin(source=source, path=code, digest="", binary_digest=other, resources={}))
    assert str(source) in str(caught.value) and not given and not launch.LOADED
    monkeypatch.setattr(manifest, "binary_digest", lambda s: other)
    launch._module(Cubin(source=source, path=code, digest="", binary_digest=other, resources={}))
    assert given == [b"other machine code"] and launch.LOADED == {source: other}
    assert manifest.load()[manifest.key_of(source)]["source"] == str(source)
