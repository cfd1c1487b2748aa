"""Planted faults: `X.faults.toml` beside `X.py`, each a unique snippet and what replaces it. Floor 3.

A fault is applied to a temporary copy of the package, never to the package itself; the gate that it names must then reject the
component. A fault that changes nothing, that matches nowhere or twice, or that does not parse is a defect of the fault.

Faults in device code stand in the `X.faults.toml` beside the wrapper `X.py` of the component and name their file with `source`, a path
relative to the folder kernels/.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import alpha
from alpha.component import Catalogue
from alpha.errors import InputError
from alpha.registry import digest_cache, policy
from alpha.registry.gates import GATES
from alpha.registry.syntax import around, read, same_meaning
from alpha.tomlfile import tomllib

SOURCE = "source"
_KEYS = {"id": str, "component": str, "gate": str, "mirrors": int, "why": str, "find": str, "replace": str}
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault.

    `component`, `gate`: what must be rejected by which gate; `mirrors`: number in the list of faults of docs/gates.md, 0 for none;
    `file`: path of the broken source file relative to the package's folder; `find` matches there exactly once.
    `source`: path of a broken device source relative to kernels/ ('' for a fault in Python, whose file is `file`).
    """

    id: str
    component: str
    gate: str
    mirrors: int
    why: str
    file: str
    find: str
    replace: str
    source: str = ""

    @property
    def digest(self) -> str:
        """Of what the fault does and who must find it, not of its reason."""
        text = "\0".join((self.component, self.gate, self.find, self.replace))
        return hashlib.sha256(text.encode()).hexdigest()


def load_faults(package: Path | None = None, catalogue: Catalogue | None = None) -> tuple[Fault, ...]:
    """Every fault under a package's folder, sorted by id, each valid; with a catalogue, each component exists and owes the gate.

    InputError naming the file and the fault otherwise.
    """
    root = package or Path(alpha.__file__).parent
    faults: dict[str, Fault] = {}
    for path in sorted(root.rglob("*.faults.toml")):
        for fault in _read(path, root):
            if fault.id in faults:
                raise _bad("two faults share an id", fault, f"also in {faults[fault.id].file}", "one id for each fault")
            faults[fault.id] = fault
            if catalogue is not None:
                _owned(fault, catalogue)
    return tuple(faults[i] for i in sorted(faults))


def _read(path: Path, root: Path) -> list[Fault]:
    where = path.relative_to(root).as_posix()
    source = path.with_name(path.name.removesuffix(".faults.toml") + ".py")
    if not source.is_file():
        raise InputError("a file of faults stands beside no source file", came=where, expected=source.relative_to(root).as_posix())
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError("a file of faults is not TOML", came=f"{where}: {error}", do="mend the file") from error
    if set(document) != {"fault"} or not isinstance(document["fault"], list):
        raise InputError("a file of faults holds [[fault]] tables and nothing else", came=f"{where}: {', '.join(document)}")
    faults = [_fault(table, where, source.relative_to(root).as_posix()) for table in document["fault"]]
    for fault in faults:
        broken(fault, text_of(fault, root))
    return faults


def text_of(fault: Fault, package: Path) -> str:
    """The sound text of a fault's file; InputError when there is no such file. kernels/ lies beside the package's folder."""
    path = package.parent / "kernels" / fault.source if fault.source else package / fault.file
    if not path.is_file():
        raise _bad("a fault is in a file that does not exist", fault, fault.source or fault.file, "a path relative to kernels/")
    return path.read_text(encoding="utf-8")


def _fault(table: Mapping[str, Any], where: str, file: str) -> Fault:
    wrong = [k for k in table if k not in _KEYS and k != SOURCE] + [k for k, kind in _KEYS.items() if not isinstance(table.get(k), kind)]
    wrong += [SOURCE] if not isinstance(table.get(SOURCE, ""), str) else []
    if wrong:
        raise InputError("a fault has an unknown, missing or ill-typed key", came=f"{where}, fault {table.get('id')!r}: {', '.join(wrong)}",
                         expected=", ".join(f"{k} ({kind.__name__})" for k, kind in _KEYS.items()))
    fault = Fault(file=file, **table)
    if not _ID.fullmatch(fault.id):
        raise _bad("the id of a fault is not a name", fault, fault.id, "letters, digits, dot, dash, underscore")
    if fault.gate not in GATES:
        raise _bad("a fault names an unknown gate", fault, fault.gate, ", ".join(GATES))
    if not fault.why.strip():
        raise _bad("a fault gives no reason", fault, "an empty `why`", "what real defect it stands for")
    return fault


def _owned(fault: Fault, catalogue: Catalogue) -> None:
    if fault.component not in catalogue:
        raise _bad("a fault names a component that does not exist", fault, fault.component, "an id that `alpha gate list` shows")
    owed = policy.owed(catalogue[fault.component])
    if fault.gate not in owed:
        raise _bad("a fault names a gate that its component does not owe", fault, fault.gate, ", ".join(owed))


def broken(fault: Fault, text: str) -> str:
    """The source text with the fault in it; InputError if it does not match once, does not parse or changes nothing."""
    count = text.count(fault.find)
    if count != 1:
        raise _bad("`find` of a fault must match exactly once", fault, f"{count} matches in {fault.file}", "1 match")
    if fault.source:
        if fault.find.split() == fault.replace.split():
            raise _bad("a fault must change what the program does", fault, "the same text", "another one")
        return text.replace(fault.find, fault.replace)
    asked = digest_cache.question(Path(__file__), fault.find, fault.replace, text)
    if digest_cache.is_confirmed(asked):
        return text.replace(fault.find, fault.replace)
    start = text.index(fault.find)
    low, high = around(text, start, start + len(fault.find))
    part = text[low:high].replace(fault.find, fault.replace)
    try:
        read(part, "alpha")
    except InputError as error:
        raise _bad("a fault must leave a file that parses", fault, error.came, "Python") from error
    if same_meaning(text[low:high], part):
        raise _bad("a fault must change what the program does", fault, "the same syntax tree", "another one")
    digest_cache.confirm(asked)
    return text[:low] + part + text[high:]


def apply(fault: Fault, package_copy: Path) -> Path:
    """Write the fault into a copy of the package's folder; returns the changed file. InputError for the running package itself."""
    path = package_copy / fault.file
    if path.resolve() == (Path(alpha.__file__).parent / fault.file).resolve():
        raise _bad("a fault is applied to a copy only", fault, "the running package", "a copy of its folder in a temporary place")
    if not path.is_file():
        raise _bad("the copy of the package lacks the file of a fault", fault, fault.file, "a complete copy")
    path.write_text(broken(fault, path.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def _bad(what: str, fault: Fault, came: object, expected: object) -> InputError:
    return InputError(what, came=f"{fault.id} of {fault.file}: {came}", expected=expected, do="mend the fault")
