"""What planted faults promise: each matches once, parses, changes something, names what exists, and touches a copy only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

import alpha
from alpha.component import Measured
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import BASE, KERNEL, Case, catalogue, folder, write_package
from alpha.gates.contracts.registry.remembered import alone
from alpha.registry import faults
from alpha.registry.faults import Fault, apply, broken, load_faults, text_of
from alpha.registry.record import content_hash

SOURCE = "def f(x):\n    # a comment\n    return x + 1\n\n\ndef g(x):\n    return x * 2\n"
ENTRY: Mapping[str, object] = {"id": "f.plus", "component": KERNEL.id, "gate": "parity", "mirrors": 0, "why": "a wrong sign",
                               "find": "x + 1", "replace": "x - 1"}


def _toml(*entries: Mapping[str, object]) -> str:
    def one(entry: Mapping[str, object]) -> str:
        quotes = chr(39) * 3
        return "\n".join(["[[fault]]", *(f"{k} = {v if isinstance(v, int) else quotes + str(v) + quotes}" for k, v in entry.items())])
    return "\n\n".join(one(e) for e in entries) + "\n"


def _package(at: Path, *entries: Mapping[str, object], text: str | None = None) -> Path:
    return write_package(at / "copy", {"k/f.py": SOURCE, "k/f.faults.toml": _toml(*entries) if text is None else text})


def _applied(rng: np.random.Generator) -> Measured:
    """A sound fault is read and changes its file in the copy, as written."""
    checks = Checks()
    n = int(rng.integers(2, 1 << 20))
    second = {**ENTRY, "id": "a.times", "find": "x * 2", "replace": f"x * 2 + {n}", "mirrors": 19}
    with folder() as at:
        root = _package(at, ENTRY, second)
        found = load_faults(root, catalogue(KERNEL))
        checks.that([f.id for f in found] == ["a.times", "f.plus"], "faults are not sorted by id")
        checks.that(found[0].file == "k/f.py" and found[0].mirrors == 19, "file or number is lost")
        checks.that(len({f.digest for f in found}) == 2, "two faults share a digest")
        path = apply(found[0], root)
        checks.that(path.read_text() == SOURCE.replace("x * 2", f"x * 2 + {n}"), "the copy does not hold the fault")
        checks.that(load_faults(root / "k")[0].file == "f.py" if not path.read_text().count("x * 2") == 1 else True, "path")
    return checks.measured()


def _anywhere(rng: np.random.Generator) -> Measured:
    """A snippet may span statements, sit in a decorator, at either end of the file or between statements; the rest stays as it was."""
    checks = Checks()
    text = ("import math\n\nA = 1\n\n\n@staticmethod\ndef f(x):\n    return (x +\n            A)\n\n\n"
            "B = 2; C = 3\nif A:\n    D = 4\n# end")
    for find, replace in (("import math", "import cmath"), ("A = 1\n\n\n@static", "A = 5\n\n\n@class"), ("staticmethod", "classmethod"),
                          ("            A)\n\n\nB = 2", "            1)\n\n\nB = 3"), ("C = 3", "C = 4"), ("D = 4", "D = 5\n    E = 6"),
                          ("# end", "F = 7"), ("\n\nA", "\nG = 8\nA"), ("B = 2; C = 3\n", "")):
        fault = Fault(id="made.up", component=KERNEL.id, gate="parity", mirrors=0, why="made up", file="f.py", find=find, replace=replace)
        checks.that(broken(fault, text) == text.replace(find, replace), f"{find!r} is not replaced as written")
    for find, replace in (("    return (x +", "    return (x"), ("            A)", "            A"), ("def f(x):", "def f(x)"),
                          ("if A:", "if A")):
        fault = Fault(id="made.up", component=KERNEL.id, gate="parity", mirrors=0, why="made up", file="f.py", find=find, replace=replace)
        checks.raises(InputError, f"{find!r} replaced by {replace!r}", lambda fault=fault: broken(fault, text))  # type: ignore[misc]
    return checks.measured()


def _unsound(rng: np.random.Generator) -> Measured:
    """Each unsound fault is refused by name."""
    checks = Checks()
    wrong: Mapping[str, Mapping[str, object]] = {
        "no match": {"find": f"x + {rng.integers(2, 1 << 20)}"}, "two matches": {"find": "return x"},
        "no Python": {"replace": "x -"}, "no change": {"replace": "x + 1"},
        "a comment only": {"find": "# a comment", "replace": "# another"},
        "layout only": {"replace": "(x + 1)"}, "unknown gate": {"gate": "speed"}, "no reason": {"why": " "},
        "no such component": {"component": "made.nothing"}, "a gate not owed": {"component": BASE.id, "gate": "perf"},
        "unknown key": {"severity": 1}, "ill-typed": {"mirrors": "zero"}, "an id that is no name": {"id": "a b/c"},
    }
    for what, changes in wrong.items():
        with folder() as at:
            root = _package(at, {**ENTRY, **changes})
            checks.raises(InputError, what, lambda root=root: load_faults(root, catalogue(KERNEL, BASE)), naming="f")  # type: ignore[misc]
    with folder() as at:
        root = _package(at, ENTRY, ENTRY)
        checks.raises(InputError, "an id twice", lambda: load_faults(root), naming="f.plus")
        (root / "k" / "f.faults.toml").write_text("[[fault]\n")
        checks.raises(InputError, "no TOML", lambda: load_faults(root), naming="f.faults.toml")
        (root / "k" / "f.faults.toml").write_text("[fault]\nid = 'a'\n")
        checks.raises(InputError, "no list", lambda: load_faults(root))
        (root / "k" / "f.faults.toml").rename(root / "k" / "h.faults.toml")
        checks.raises(InputError, "no sibling", lambda: load_faults(root), naming="h.faults.toml")
    with folder() as at:
        root = _package(at, ENTRY)
        (fault,) = load_faults(root)
        checks.raises(InputError, "the running package", lambda: apply(fault, Path(alpha.__file__).parent), naming="a copy only")
        apply(fault, root)
        checks.raises(InputError, "a fault twice", lambda: apply(fault, root), naming="f.plus")
        checks.raises(InputError, "an incomplete copy", lambda: apply(fault, at / "nowhere"), naming="k/f.py")
    return checks.measured()


KEYS = "id (str), component (str), gate (str), mirrors (int), why (str), find (str), replace (str)"
KERNEL_TEXT = "// a kernel\nx = a + b;\n"


def _device(rng: np.random.Generator) -> Measured:
    """A fault in device code is in the file that it names, beside the package, and must change more than its blanks; what is missing or of
    another type is told, of every key."""
    checks = Checks()
    told: tuple[object, object, object, object]
    device: Mapping[str, object] = {**ENTRY, "find": "a + b", "replace": f"a - {rng.integers(99)} * b", "source": "k/f.cu"}
    with folder() as at, alone():
        root = _package(at, device)
        write_package(at / "kernels" / "k", {"f.cu": KERNEL_TEXT})
        (fault,) = load_faults(root)
        checks.that((fault.source, fault.file) == ("k/f.cu", "k/f.py") and text_of(fault, root) == KERNEL_TEXT, f"read as {fault}")
        checks.that(broken(fault, KERNEL_TEXT) == KERNEL_TEXT.replace("a + b", str(device["replace"])), "not replaced as written")
        again = Fault(**{**vars(fault), "why": "another", "id": "other"})
        sides = [Fault(**{**vars(fault), key: "other"}).digest for key in ("component", "gate", "find", "replace")]
        checks.that(again.digest == fault.digest and len({*sides, fault.digest}) == 5, "what a fault does, and not why")
        for text in ("a  +\tb", "a + b"):
            same = Fault(**{**vars(fault), "replace": text})
            told = ("a fault must change what the program does", "f.plus of k/f.py: the same text", "another one", "mend the fault")
            checks.tells(InputError, told, lambda same=same: broken(same, KERNEL_TEXT))  # type: ignore[misc]
        with mock.patch.object(faults, "alpha", SimpleNamespace(__file__=str(root / "__init__.py"))):
            checks.that(load_faults() == (fault,), "the faults of the running package")
        for gone, where in ((Fault(**{**vars(fault), "source": "k/g.cu"}), "k/g.cu"),
                            (Fault(**{**vars(fault), "source": "", "file": "k/g.py"}), "k/g.py")):
            told = ("a fault is in a file that does not exist", f"f.plus of {gone.file}: {where}", "a path relative to kernels/",
                    "mend the fault")
            checks.tells(InputError, told, lambda gone=gone: text_of(gone, root))  # type: ignore[misc]
    table = [*((key, 3 if key != "mirrors" else "3", key) for key in ENTRY), ("source", 3, "source"), ("odd", "x", "odd")]
    for key, value, named in table:
        with folder() as at, alone():
            root = _package(at, {**ENTRY, key: value})
            told = ("a fault has an unknown, missing or ill-typed key",
                    f"k/f.faults.toml, fault {3 if key == 'id' else 'f.plus'!r}: {named}", KEYS, None)
            checks.tells(InputError, told, lambda root=root: load_faults(root))  # type: ignore[misc]
            if key in ENTRY:
                root = _package(at, {k: v for k, v in ENTRY.items() if k != key})
                told = (told[0], f"k/f.faults.toml, fault {None if key == 'id' else 'f.plus'!r}: {named}", *told[2:])
                checks.tells(InputError, told, lambda root=root: load_faults(root))  # type: ignore[misc]
    python = Fault(id="a.b", component=KERNEL.id, gate="parity", mirrors=0, why="w", file="k/f.py", find="x + 1", replace="x - 1")
    with alone() as kept:
        for text in ("x  +  1", "(x + 1)"):
            told = ("a fault must change what the program does", "a.b of k/f.py: the same syntax tree", "another one", "mend the fault")
            checks.tells(InputError, told, lambda text=text: broken(Fault(**{**vars(python), "replace": text}), SOURCE))  # type: ignore[misc]
        told = ("a fault must leave a file that parses", "a.b of k/f.py: line 3: invalid syntax", "Python", "mend the fault")
        checks.tells(InputError, told, lambda: broken(Fault(**{**vars(python), "replace": "x -"}), SOURCE))
        for drawn in (1, 0):  # asked before, and asked again all the same
            kept.drawn = drawn
            checks.that(broken(python, SOURCE) == SOURCE.replace("x + 1", "x - 1") == broken(python, SOURCE), f"drawn {drawn}")
        checks.that(len(kept.asked) == 3, f"asked {len(kept.asked)} times")
    return checks.measured()


def _same(rng: np.random.Generator) -> Measured:
    """The same faults and digests in every process."""
    with folder() as at:
        found = load_faults(_package(at, ENTRY, {**ENTRY, "id": "f.times", "find": "x * 2", "replace": "x / 2"}))
    return Measured(error=0.0, bound=0.0, cases=len(found), digest=content_hash({f.id: f.digest for f in found}))


CASES: dict[str, dict[str, list[Case]]] = {
    "registry.faults": {"parity": [("applied", _applied), ("anywhere", _anywhere)],
                        "determinism": [("same", _same)], "faults": [("unsound faults", _unsound), ("faults of device code", _device)]},
}
