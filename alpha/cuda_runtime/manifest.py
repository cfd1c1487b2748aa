"""What each compiled file is known to be: baselines/cubins.json, written by a machine that has the pinned compiler.

An entry's key is a digest of everything that decides the machine code: flags, defines, compiler version, and the text of the source and
its headers without comments. The compiler is deterministic, so an equal key means an equal cubin, and evidence can be held against
today's sources without compiling anything. `alpha kernels check` compiles all of them and says where the manifest is wrong.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.compile import Cubin, Source, compile_all, compile_kernel
from alpha.cuda_runtime.toolchain import INSTALL, find_nvcc
from alpha.errors import CorruptError, MachineError
from alpha.files import json_of, read_regular

PATH = nvcc.REPOSITORY / "baselines" / "cubins.json"
COMPILER = "V13.0.88"
"""The pinned compiler's full version: another one makes other machine code."""

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/|\s+', re.DOTALL)


def without_comments(text: str) -> str:
    """C++ text with each run of blanks and comments as one blank, a line end where there was one, because directives end there."""
    out: list[str] = []
    blank, at = "", 0

    def put(piece: str) -> None:
        if piece:
            out.append(blank if out else "")
            out.append(piece)

    for match in _TOKEN.finditer(text):
        if match.start() > at:
            put(text[at : match.start()])
            blank = ""
        token = match.group()
        if token[0] in "\"'":
            put(token)
            blank = ""
        else:
            blank = "\n" if "\n" in token or blank == "\n" else " "
        at = match.end()
    put(text[at:])
    return "".join(out)


def key_of(source: Source) -> str:
    """Digest (32 hex digits) of what decides the machine code of `source`; needs no compiler. CompileError if a file is missing. Files are
    taken as they were when this process first looked."""
    return _key(source, nvcc.KERNELS, nvcc.FLAGS)


@functools.cache
def _files(path: Path) -> tuple[str, ...]:
    """Digests of a source and all that it includes, without comments."""
    texts = [without_comments(file.read_text(encoding="utf-8")) for file in nvcc.included_files(path)]
    return tuple(hashlib.sha256(text.encode()).hexdigest() for text in texts)


@functools.cache
def _key(source: Source, kernels: Path, flags: tuple[str, ...]) -> str:
    path = kernels / source.path
    if not path.is_file():
        raise nvcc.CompileError("no such kernel source", came=source.path, expected="a .cu file, path relative to kernels/")
    parts = [COMPILER, *flags, *(f"{name}={value}" for name, value in source.defines)]
    return hashlib.sha256("\0".join((*parts, *_files(path))).encode()).hexdigest()[:32]


def load(path: Path = PATH) -> dict[str, dict[str, Any]]:
    """key -> {source, binary, resources}; {} where there is no file. CorruptError if it cannot be read."""
    if not path.is_file():
        return {}
    try:
        body = json_of(read_regular(path))
        if body["compiler"] != COMPILER:
            return {}
        for entry in body["cubins"].values():
            if not (isinstance(entry["source"], str) and isinstance(entry["binary"], str) and isinstance(entry["resources"], dict)):
                raise ValueError("an entry without source, binary or resources")
        return dict(body["cubins"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError("the manifest of compiled kernels cannot be read", came=f"{path.name}: {error}", expected="what `build` wrote",
                           do="restore it from version control, or build the kernels again") from error


@functools.cache
def _known(path: Path, changed: int) -> Mapping[str, dict[str, Any]]:
    return load(path)


_LOOKING: ContextVar[bool] = ContextVar("looking", default=False)


@contextmanager
def only_looking() -> Iterator[None]:
    """In the block nothing is compiled: a source that the manifest does not know counts as not built. For commands that only tell."""
    before = _LOOKING.set(True)
    try:
        yield
    finally:
        _LOOKING.reset(before)


def binary_digest(source: Source) -> str:
    """sha256 of the cubin of `source`: from the manifest, else by compiling it; where neither is possible a text that no evidence has."""
    key = key_of(source)
    entry = _known(PATH, PATH.stat().st_mtime_ns if PATH.is_file() else 0).get(key)
    if entry is not None:
        return str(entry["binary"])
    if _LOOKING.get():
        return f"not built: {key}"
    try:
        return compile_kernel(source).binary_digest
    except MachineError:
        return f"not built: {key}"


def binary_digests(sources: Iterable[Source]) -> dict[str, str]:
    """str(source) -> binary_digest, several compilations at a time where any is needed."""
    wanted = list(dict.fromkeys(sources))
    known = _known(PATH, PATH.stat().st_mtime_ns if PATH.is_file() else 0)
    missing = [s for s in wanted if key_of(s) not in known]
    try:
        compile_all([] if _LOOKING.get() else missing)
    except MachineError:
        pass  # binary_digest says for each what it is without a compiler
    return {str(s): binary_digest(s) for s in wanted}


def build(sources: Iterable[Source], path: Path = PATH) -> list[str]:
    """Compile all and write the manifest of exactly these; returns what changed against the one that was there, by source."""
    wanted = sorted(dict.fromkeys(sources), key=str)
    if find_nvcc()[1] != COMPILER:
        raise MachineError("the manifest is written by the pinned compiler alone", came=find_nvcc()[1], expected=COMPILER, do=INSTALL)
    fresh = {key_of(s): {"source": str(s), "binary": c.binary_digest, "resources": {n: vars(r) for n, r in sorted(c.resources.items())}}
             for s, c in zip(wanted, compile_all(wanted))}
    old = {str(e["source"]): e for e in load(path).values()}
    new = {str(e["source"]): e for e in fresh.values()}
    changed = [f"{s}: {'new' if s not in old else 'gone' if s not in new else 'other machine code'}"
               for s in sorted({*old, *new}) if old.get(s) != new.get(s)]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps({"compiler": COMPILER, "cubins": fresh}, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(part, path)
    return changed


def difference(source: Source, cubin: Cubin, known: Mapping[str, dict[str, Any]]) -> str:
    """Where `known` (what `load` gave) is wrong about a compiled file; '' if nowhere."""
    entry = known.get(key_of(source))
    if entry is None:
        return "not in the manifest"
    if entry["binary"] != cubin.binary_digest:
        return "other machine code than the manifest says"
    if entry["resources"] != {n: vars(r) for n, r in cubin.resources.items()}:
        return "other registers, spills or shared memory than the manifest says"
    return ""
