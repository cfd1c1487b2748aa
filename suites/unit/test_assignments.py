"""A module's names are its own: nothing in alpha/ assigns into another module's, and libraries are opened and cubins loaded in one place.

What patches a name elsewhere can replace a judge, a tolerance or a clock without a trace in the file that it stands in. A module that has
something to set offers a function for it (alpha/cuda_runtime/compile.py: compiling).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "alpha"

EXCUSED = {
    ("__main__.py", "sys.unraisablehook"): "Python's own place for it: an interrupt that nobody can catch comes again",
    ("__main__.py", "setattr(sys)"): "streams that lead nowhere, where whoever started the command had closed them",
    ("errors.py", "sys.stdout"): "Python has none where whoever started the command closed it, and libraries write to it all the same",
    ("bench/comm_peers.py", "os.environ"): "options of NCCL, in the process that PyTorch is alone in, before it starts",
    ("gates/contracts/device_ranks.py", "os.environ[]"): "which GPU a rank's process has, said before its driver starts",
    ("bench/peer_process.py", "functorch.donated_buffer"): "an option of PyTorch, set in the process that PyTorch is alone in",
    ("gates/contracts/crash_consistency.py", "os.fsync"): "a contract looks whether files are forced to the medium",
    ("gates/contracts/checkpoint.py", "ranges.open_regular"): "a planted slow disk, which gives a few bytes at a time",
    ("gates/contracts/edges.py", "patch.object(drawn)"): "a planted lack of memory",
    ("gates/contracts/registry/common.py", "patch.object(gpu)"): "a made-up machine with GPUs",
    ("gates/contracts/executor.py", "patch.object(comm)"): "a contract that looks at when the stream beside compute is waited for",
    ("gates/contracts/watching.py", "patch()"): "a queue that holds the stream before a call",
    ("gates/contracts/watching.py", "patch.object(stream)"): "who waits for the stream lets it go on when it sleeps",
    ("gates/contracts/ranks/connections.py", "patch.object(Segment)"): "rings of few slots",
    ("gates/contracts/data/prepared.py", "patch.object(files)"): "a planted full disk, and a process that ends within any file",
    ("gates/contracts/data/limits.py", "patch.object(files)"): "a planted file system without locks",
    ("gates/contracts/data/limits.py", "patch.object(inspect)"): "a contract that looks at few documents at once",
    ("gates/contracts/data/limits.py", "patch.object(permutation)"): "a planted walk that never comes back",
    ("gates/contracts/data/limits.py", "patch.object(prefetch)"): "a planted batch out of turn",
    ("gates/contracts/data/limits.py", "patch.object(prepare)"): "a stand-in for a pool, whose processes die or raise",
    ("gates/contracts/data/limits.py", "patch.object(shards)"): "a planted disk that refuses, and one that hears what it is asked",
    ("gates/contracts/data/packed.py", "patch.dict(sys)"): "stand-ins for packages that no gate loads",
    ("gates/contracts/data/packed.py", "patch.object(sources)"): "a contract that reads few rows at once",
    ("gates/contracts/data/patterns.py", "patch.object(regular)"): "a planted refusal of Python's",
    ("gates/contracts/data/patterns.py", "patch.object(tokenizer)"): "a contract that makes a cache and a vocabulary small",
    ("gates/contracts/data/patterns.py", "patch.object(tokenizer_hf)"): "a contract that makes caches small",
    ("gates/contracts/data/walked.py", "patch.object(os)"): "a planted folder that cannot be listed, for the superuser too",
    ("gates/contracts/profile/chances.py", "patch.object(noise)"): "a clock of the contract's own",
    ("gates/contracts/profile/files.py", "patch.object(sqlite3)"): "a planted database that is locked",
    ("gates/contracts/profile/files.py", "patch.object(store)"): "a clock that no wait makes pass",
    ("gates/contracts/profile/timelines.py", "patch.object(trace)"): "a planted full disk",
    ("gates/contracts/train/barred.py", "sys.modules"): "a forbidden module that is empty, for a moment",
    ("gates/contracts/ranks/bridging.py", "patch.object(bridges)"): "a contract that lets records go out at once",
    ("gates/contracts/ranks/bridging.py", "patch.object(m)"): "a bridge of the contract's own, which asks for no connection",
    ("gates/contracts/ranks/connections.py", "patch.multiple(of)"): "connections of the contract's own, which count looks and sleeps",
    ("gates/contracts/ranks/connections.py", "patch.object(connections)"): "a clock that passes with each look",
    ("gates/contracts/ranks/doors.py", "patch.object(meets)"): "a clock on which the deadline passes when a host was refused often enough",
    ("gates/contracts/ranks/joining.py", "patch.object(group)"): "a group of the contract's own, which notes what it is to hear",
    ("gates/contracts/ranks/joining.py", "patch.object(process)"): "threads that end while they are looked at, or begin and wait",
    ("gates/contracts/ranks/joining.py", "patch.object(watching)"): "a clock that stands while a rank spins",
    ("gates/contracts/ranks/joining.py", "patch.object(worlds)"): "a heart that beats a thousand times a second",
    ("gates/contracts/ranks/memory.py", "patch.object(module)"): "a planted refusal of the system's",
    ("gates/contracts/ranks/memory.py", "patch.object(shm)"): "a machine whose stores may pass each other",
    ("gates/contracts/ranks/places.py", "patch.object(rendezvous)"): "another user",
    ("gates/contracts/ranks/places.py", "patch.object(timing)"): "messages and sums that take as long as a contract says",
    ("gates/contracts/ranks/told.py", "patch.object(watching)"): "a contract that says how late it is",
    ("gates/contracts/saves.py", "patch.object(ranges)"): "a planted file that is cut while it is read",
    ("gates/contracts/saves.py", "patch.object(safetensors)"): "a planted file that is cut while it is read",
    ("gates/contracts/data/shards.py", "patch.object(shards)"): "a planted full disk",
    ("gates/contracts/data/tokenizer_bpe.py", "patch.object(files)"): "a planted full disk",
    ("gates/contracts/data/tokenizer_bpe.py", "patch.object(tokenizer)"): "a contract that makes blocks small, for many cuts",
    ("gates/timing/against_server.py", "sys.path[]"): "alpha is imported from the tree that is compared with",
    ("gates/timing/against_server.py", "sys.modules"): "today's clock and pipe stand for those of the tree that is compared with",
    ("gates/adversarial/cuda_plant.py", "engine.contract_cases"): "cases that say first which one is under way, in a process of its own",
    ("gates/adversarial/cuda_plant.py", "subjects.component_digests"): "a planted fault has digests of its own, in a process of its own",
    ("gates/cpu/engine.py", "subjects.component_digests"): "a record binds to the kernel, of which its engine sees a stand-in",
    ("gates/cpu/judge_process.py", "subjects.component_digests"): "a record binds to what the process that asks has read of the kernel",
    ("backends/cpu/served.py", "sys.argv[]"): "a fork that runs kernels has the arguments of a run, in a process of its own",
    ("gates/sanitize/engine.py", "setattr(module)"): "wrappers only note what they would load",
    ("gates/adversarial/redteam.py", "time.perf_counter_ns"): "the cheat that patches the clock",
    ("gates/adversarial/redteam.py", "patch.object(subjects)"): "cheats go in the clothes of an honest component",
    ("gates/adversarial/redteam.py", "patch.object(judges)"): "the cheat that loosens a tolerance",
    ("gates/adversarial/redteam.py", "patch.object(perf)"): "a cheat that hears which calls are timed, and is tried as often as any may be",
    ("gates/contracts/registry/admitted.py", "patch.object(admission)"): "a repository that ships evidence of other classes",
    ("gates/contracts/registry/asked.py", "patch.object(asked)"): "a gate table of drawn numbers of runs",
    ("gates/contracts/registry/check.py", "patch.object(judges)"): "a planted tolerance that the check must see",
    ("gates/contracts/registry/check.py", "patch.object(policy)"): "a planted exemption that the check must see",
    ("gates/contracts/registry/digest.py", "patch.dict()"): "another oracle of an op, which the digest of a fused row must see",
    ("gates/contracts/registry/evidence.py", "patch()"): "a planted full disk",
    ("gates/contracts/registry/evidence.py", "patch.object(evidence)"): "a planted disk that refuses, and a wait in which a lock is let go",
    ("gates/contracts/registry/faults.py", "patch.object(faults)"): "a made-up package in place of the running one",
    ("gates/contracts/registry/gpus.py", "patch.multiple(gpu)"): "a stand-in for nvidia-smi",
    ("gates/contracts/registry/gpus.py", "patch.object(gpu)"): "a machine without a package, or without memory that is shared",
    ("gates/contracts/registry/held.py", "patch.dict()"): "another field of an op's row, which the digests of some gates must see",
    ("gates/contracts/registry/machines.py", "patch.object(machine)"): "a made-up machine: its files, packages and system",
    ("gates/contracts/registry/past.py", "patch.object(history)"): "a stand-in for git",
    ("gates/contracts/registry/reading.py", "patch.object(ast)"): "a Python that cuts texts elsewhere",
    ("gates/contracts/registry/remembered.py", "patch.multiple(digest_cache)"): "a cache with a folder, a draw and an end of its own",
    ("gates/contracts/registry/remembered.py", "patch.object(digest_cache)"): "a cache that keeps little, or cannot be written",
    ("gates/contracts/registry/signed.py", "patch.dict(sys)"): "a stand-in for the package that signs",
    ("gates/contracts/registry/sorts.py", "patch.object(policy)"): "planted exemptions",
    ("gates/contracts/registry/status.py", "patch.object(policy)"): "a planted exemption that the status must see",
    ("gates/contracts/train/refused.py", "Disk.write"): "a planted full disk",
    ("gates/contracts/train/going_on.py", "fcntl.flock"): "a contract locks files alone, as some file systems do",
    ("gates/contracts/train/going_on.py", "os.fsync"): "a contract looks whether files are forced to the medium",
    ("train/log.py", "warnings.showwarning"): "the standard library's own way to hear of warnings",
}
"""(file, what is assigned) -> why it may. Each is a fault planted on purpose or a switch of another program."""

OPENS = {"CDLL", "PyDLL", "LoadLibrary", "dlopen", "cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary",
         "cuLibraryLoadData", "cuLibraryLoadFromFile", "module_from_file", "module_from_buffer"}
ONE_PLACE = {("cuda_runtime/launch.py", "cuModuleLoadData"): "alpha/cuda_runtime/launch.py: compared with the manifest before it is loaded",
             ("cuda_runtime/_bindings.py", "CDLL"): "alpha/cuda_runtime/_bindings.py: library"}


def imported(tree: ast.Module) -> set[str]:
    """Names that an import binds, anywhere in the file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name for a in node.names}
    return names


def aliases(tree: ast.Module, names: set[str]) -> set[str]:
    """Names bound to what looks like a module got by name: sys.modules[...], import_module(...), or to an imported one."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = node.value
            by_name = ast.unparse(value).startswith(("sys.modules[", "importlib.import_module(", "import_module("))
            if by_name or (isinstance(value, ast.Name) and value.id in names):
                found.add(node.targets[0].id)
    return found


def base(node: ast.expr) -> str:
    """The first name of a chain of attributes and subscripts; '' for anything else."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def assignments(text: str) -> Iterator[tuple[int, str]]:
    """(line, what) of each assignment into a name of another module, or to an attribute of what was imported from one."""
    tree = ast.parse(text)
    names = imported(tree)
    names |= aliases(tree, names)
    loops = {t.id for node in ast.walk(tree) if isinstance(node, (ast.For, ast.comprehension))
             for t in ast.walk(node.target) if isinstance(t, ast.Name) and t.id in ("module", "mod", "m")}  # a loop over modules
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)) and base(node) in names:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            whole = ast.unparse(node.value)
            if whole == "sys.modules" or (whole.endswith(".__dict__") and base(node) in names):
                yield node.lineno, whole
            elif base(node.value) in names:
                yield node.lineno, f"{whole}[]"
            elif whole.startswith("vars(") and isinstance(node.value, ast.Call) and base(node.value.args[0]) in names:
                yield node.lineno, whole
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            first = base(node.args[0]) if node.args else ""
            if called.rpartition(".")[2] in ("setattr", "delattr", "__setattr__", "__delattr__") and first in names | loops:
                yield node.lineno, f"setattr({first})"
            elif called.endswith(("patch.object", "patch.dict", "patch.multiple")):
                yield node.lineno, f"{called.removeprefix('mock.')}({first})"
            elif called in ("mock.patch", "patch", "unittest.mock.patch") and "mock" in text:
                yield node.lineno, "patch()"


def files() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_nothing_assigns_into_another_modules_names() -> None:
    found = {(file, what): line for file, text in files() for line, what in assignments(text)}
    wrong = [f"alpha/{file}:{line}: {what}" for (file, what), line in sorted(found.items()) if (file, what) not in EXCUSED]
    assert not wrong, "let the module offer a function that sets it:\n" + "\n".join(wrong)
    assert not set(EXCUSED) - set(found), "excuses that nothing needs"


def opened(text: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each call that opens a library or loads machine code, also where the function is only taken."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in OPENS:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, a.name) for a in node.names if a.name in OPENS)


def test_libraries_are_opened_and_cubins_loaded_in_one_place() -> None:
    found = [(file, name, line) for file, text in files() for line, name in opened(text)]
    wrong = [f"alpha/{file}:{line}: {name}" for file, name, line in found if (file, name) not in ONE_PLACE]
    assert not wrong, "\n".join(wrong)
    assert {(file, name) for file, name, _ in found} == set(ONE_PLACE)
    assert all(sum(f == file and n == name for f, n, _ in found) == 1 for file, name in ONE_PLACE)


@pytest.mark.parametrize("text", [
    "from alpha.registry import judge\njudge.RATIO = 1000.0",
    "import alpha.registry.judge as j\nj.RATIO += 1",
    "import time\ntime.perf_counter_ns = lambda: 0",
    "from alpha.registry import policy\ndef f():\n    policy.EXEMPT: dict = {}",
    "from alpha.registry import policy\npolicy.EXEMPT['x'] = ''",
    "from alpha.registry.policy import EXEMPT\nEXEMPT['x'] = ''",
    "from alpha.registry import policy\ndel policy.EXEMPT",
    "from alpha.registry import judge\nsetattr(judge, 'RATIO', 2)",
    "from alpha.registry import judge\nobject.__setattr__(judge, 'RATIO', 2)",
    "from alpha.registry import judge\nvars(judge)['RATIO'] = 2",
    "from alpha.registry import judge\njudge.__dict__['RATIO'] = 2",
    "import sys\nsys.modules['alpha.registry.judge'] = None",
    "import sys\nm = sys.modules['alpha.registry.judge']\nm.RATIO = 2",
    "import importlib\nm = importlib.import_module('alpha.registry.judge')\nm.RATIO = 2",
    "from alpha.registry import judge\nother = judge\nother.RATIO = 2",
    "from unittest import mock\nfrom alpha.registry import judge\nwith mock.patch.object(judge, 'RATIO', 2): pass",
    "from unittest import mock\nwith mock.patch('alpha.registry.judge.RATIO', 2): pass",
    "from alpha.train.disk import Disk\nDisk.write = None",
    "from alpha.registry import judge\nfor judge.RATIO in (1, 2): pass",
    "import alpha.registry.judge\nwith open('x') as alpha.registry.judge.RATIO: pass",
])  # fmt: skip
def test_planted_assignments_are_seen(text: str) -> None:
    assert list(assignments(text))


@pytest.mark.parametrize("text", [
    "from alpha.registry import judge\nratio = judge.RATIO\nratio += 1",
    "class A:\n    def f(self):\n        self.x = 1\nsetattr(A(), 'x', 2)",
    "RATIO = 2\ndef f():\n    global RATIO\n    RATIO = 3",
    "import numpy as np\nx = np.zeros(3)\nx[0] = 1\nx.shape = (3, 1)",
])  # fmt: skip
def test_ordinary_assignments_are_not(text: str) -> None:
    assert not list(assignments(text))


@pytest.mark.parametrize("text", ["import ctypes\nctypes.CDLL('libx.so')", "from ctypes import CDLL", "import _ctypes\nf = _ctypes.dlopen",
                                  "d.cuModuleLoadData(code)", "d.cuLibraryLoadData(code)"])
def test_planted_openings_are_seen(text: str) -> None:
    assert list(opened(text))
