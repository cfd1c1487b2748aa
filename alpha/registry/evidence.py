"""Evidence files: `<root>/<machine class>/<component>.jsonl`, one canonical line per gate, sorted by gate. Floor 3.

Two roots are stacked: what ships with the repository, and what this checkout measured itself. A file that is edited, torn, over-long,
out of order, or that lies in the folder of another class or under another component's name is a CorruptError, never ignored.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from alpha.errors import CorruptError, InputError, MachineError
from alpha.files import read_regular
from alpha.registry.gates import GATES
from alpha.registry.gpu import AnyClass, class_of_key, sort_of
from alpha.registry.record import MAX_BYTES, Record, parse, sealed
from alpha.resources import ROOT

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
REFERENCE = "REFERENCE"
"""File in the shipped root that holds a line per family of classes: the key on which that family's components must have current
evidence. The CPU's comes first."""


LOCK = ".lock"
"""File in a root that a writer holds locked; ignored by version control."""


WAIT = 0.005
"""Seconds between two tries for a lock: some sandboxes wake no process that waits for one."""


def shipped_root() -> Path:
    """Evidence that is part of the repository."""
    return ROOT / "baselines" / "evidence"


def local_root() -> Path:
    """Evidence that this checkout measured; ignored by version control until someone commits it to the shipped root."""
    return ROOT / ".alpha" / "evidence"


def default_roots() -> tuple[Path, ...]:
    """Shipped, then local: the later one wins where its digests are current."""
    return shipped_root(), local_root()


def path_of(root: Path, machine: str, component_id: str) -> Path:
    """The file of one component on one machine class; InputError if the id cannot be a file name."""
    if not _ID.fullmatch(component_id):
        raise InputError("a component id cannot be a file name", came=component_id, expected="letters, digits, dot, dash, underscore")
    class_of_key(machine)
    return root / machine / f"{component_id}.jsonl"


def classes(root: Path) -> list[str]:
    """Machine classes that have a folder in a root, sorted; a folder of another name is an InputError."""
    return sorted(class_of_key(p.name).key for p in root.iterdir() if p.is_dir()) if root.is_dir() else []


def reference_classes(root: Path) -> dict[str, str]:
    """Sort of class (`gpu.sort_of`) -> key, from the REFERENCE file of a root; {} when there is no such file. InputError where a sort has
    two."""
    path = root / REFERENCE
    found: dict[str, str] = {}
    for line in _text(path, "REFERENCE").split() if path.is_file() else ():
        key = class_of_key(line).key
        if sort_of(key) in found:
            raise InputError("a sort of classes has two reference classes", came=f"{found[sort_of(key)]}, {key}", expected="one line each")
        found[sort_of(key)] = key
    return found


def reference_class(root: Path) -> str | None:
    """The reference class of the CPU, None when the root names none."""
    return reference_classes(root).get("cpu")


def write_reference(root: Path, machine: AnyClass) -> None:
    """Name the reference class of a root for the sort of this class; those of other sorts stay."""
    found = {**reference_classes(root), sort_of(machine.key): machine.key}
    write_atomic(root / REFERENCE, "".join(f"{found[sort]}\n" for sort in sorted(found)))


def lines_of(path: Path) -> list[str]:
    """The lines of an evidence file without newlines; CorruptError if it is torn, not ASCII or over-long."""
    text = _text(path, "an evidence file")
    if text and not text.endswith("\n"):
        raise _corrupt("an evidence file is torn: its last line has no end", path.name, "complete lines")
    lines = text.split("\n")[:-1]  # no other sign ends a line: history and audits count by this one
    for i, line in enumerate(lines, 1):
        if not len(line) <= MAX_BYTES:
            raise _corrupt("an evidence line is too long", f"{path.name}:{i} with {len(line)} bytes", f"at most {MAX_BYTES}")
    return lines


def _text(path: Path, what: str) -> str:
    try:
        return read_regular(path).decode("ascii")
    except OSError as error:
        raise _corrupt(f"{what} cannot be read", f"{path.name}: {error.strerror}", "a readable file") from error
    except UnicodeDecodeError as error:
        raise _corrupt(f"{what} holds bytes that are not text", f"{path.name}: {error}", "ASCII text") from error


def load_file(path: Path) -> dict[str, Record]:
    """gate -> record of one evidence file, every invariant of the format checked; {} when there is no file."""
    if not path.is_file():
        return {}
    records = [_checked(line, path, i) for i, line in enumerate(lines_of(path), 1)]
    gates = [r.gate for r in records]
    if gates != sorted(set(gates)):
        raise _corrupt("the lines of an evidence file are not one per gate in sorted order", f"{path.name}: {', '.join(gates)}",
                       ", ".join(sorted(set(gates))))
    return {r.gate: r for r in records}


@lru_cache(maxsize=4096)
def _checked(line: str, path: Path, number: int) -> Record:
    """Of one line of a file; the merge gate reads each file several times."""
    where = f"{path.parent.name}/{path.name}:{number}"
    record = parse(line, where)
    if sealed(vars(record))[1] != line:
        raise _corrupt("an evidence line is not in canonical form", where, "the bytes that the gate wrote")
    if record.machine != path.parent.name:
        raise _corrupt("evidence of another machine class", f"{where} was measured on {record.machine}", path.parent.name)
    if record.component != path.name.removesuffix(".jsonl"):
        raise _corrupt("evidence of another component", f"{where} is about {record.component}", path.name.removesuffix(".jsonl"))
    if record.gate not in GATES:
        raise _corrupt("evidence of an unknown gate", f"{where}: {record.gate}", ", ".join(GATES))
    return record


def _corrupt(what: str, came: str, expected: str) -> CorruptError:
    return CorruptError(what, came=came, expected=expected, do="restore the file from version control, or delete it and rerun the gate")


def save(records: Iterable[Record], root: Path) -> list[Path]:
    """Merge records into the files of a root: a new record replaces the one of its gate, the others stay. Returns the files written.

    Each file is read, merged and replaced in one step, the root locked. Lines of the old file that cannot be read are dropped (they count
    as no evidence anyway).
    MachineError when the disk is full or the folder cannot be written; the old files then stand.
    """
    by_path: dict[Path, list[Record]] = {}
    for r in records:
        by_path.setdefault(path_of(root, r.machine, r.component), []).append(r)
    with locked(root):
        for path, newer in by_path.items():
            merged = {**_readable(path), **{r.gate: r for r in newer}}
            write_atomic(path, "".join(merged[gate].line() + "\n" for gate in sorted(merged)))
    return list(by_path)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep other writers out of a root, which is made, from the reading of a file to its replacing. MachineError where it cannot be.

    The lock is a file, for NFS locks no folder; it goes with the process that holds it.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise MachineError("evidence cannot be written", came=f"{root.name}: {error.strerror}", expected="space and permission to write",
                           do="free disk space or mend the permissions of the folder") from error
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(WAIT)
        yield
    finally:
        os.close(handle)


def _readable(path: Path) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for i, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else (), 1):
        try:
            record = _checked(line, path, i)
        except CorruptError:
            continue  # it is about to be replaced or was worth nothing
        found[record.gate] = record
    return found


def write_atomic(path: Path, text: str) -> None:
    """Write a file completely or not at all; MachineError naming the file when the disk or the permissions do not allow it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "w", encoding="utf-8", newline="\n") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):  # the folder itself may not exist
            part.unlink(missing_ok=True)
        raise MachineError("an evidence file cannot be written", came=f"{path.name}: {error.strerror}",
                           expected="space and permission to write",
                           do="free disk space or mend the permissions of the folder; the file that was there is untouched") from error


@dataclass(frozen=True)
class Found:
    """A record and the root that it was found in."""

    record: Record
    root: Path


class Evidence:
    """A stack of roots, the later one stronger. Files are read once per object."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        self._read: dict[Path, dict[str, Record]] = {}

    def load(self, component_id: str, machine: str) -> dict[str, list[Found]]:
        """gate -> what each root holds about it, the strongest root first."""
        found: dict[str, list[Found]] = {}
        for root in reversed(self.roots):
            path = path_of(root, machine, component_id)
            if path not in self._read:
                self._read[path] = load_file(path)
            for gate, record in self._read[path].items():
                found.setdefault(gate, []).append(Found(record, root))
        return found

    def best(self, component_id: str, machine: str, gate: str, digests: Mapping[str, str]) -> Found | None:
        """The strongest root's evidence whose digests are current; else the strongest stale one; None when there is none."""
        having = self.load(component_id, machine).get(gate, [])
        return next((f for f in having if current(f.record, digests)), having[0] if having else None)


def current(record: Record, digests: Mapping[str, str]) -> bool:
    """Whether a record was made from what is here today: the same names, the same digests."""
    return dict(record.digests) == dict(digests)


def stale(record: Record, digests: Mapping[str, str]) -> list[str]:
    """Names of what changed since a record was made."""
    return sorted(n for n in {*record.digests, *digests} if record.digests.get(n) != digests.get(n))
