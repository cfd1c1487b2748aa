"""A snapshot of the package as a graph of definitions, read as text, and the digest of what a symbol of it reaches. Floor 3.

The digest of a symbol is the sha256 of its stable syntax tree (syntax.py) and of that of everything inside the package that it refers
to, transitively: functions, classes, constants, base classes, decorators, defaults, annotations (so that `cpu: Cpu` brings the class
whose methods are called), re-exports, function-level imports. The definitions form a rooted graph; they are numbered in order of
discovery and hashed with their edges, so neither file names nor the place in a file enter, and a cycle needs no special care.

Members count by name. A method or a field of a class, or an entry of a table of names (TABLES), is part of a digest only if the code
that the evidence binds to, all of it together, says its name: as an attribute or as a text. So a new field of `Component`, a new kind,
a new element type, or a method that only the CPU calls changes nothing elsewhere. A class that is itself asked for, or that has a base
from outside the package (which may call methods by names of its own), counts whole.

Files are read as text. Nothing is imported or executed, so a digest can be taken of code on a higher floor or of a broken copy.

Out of reach, because only running the program would tell: kernels looked up by a string, modules found by listing a
folder, `getattr` with a computed name, methods of an object whose class is named nowhere on the way, module state that another
function changes, data files, environment. Whoever depends on one of these names it beside the symbol (digest.py).
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import alpha
from alpha.errors import InputError
from alpha.registry import digest_cache
from alpha.registry.digest_cache import Remembered
from alpha.registry.syntax import Definition, Import, Reference

OPAQUE = ("registry.judge", "registry.policy", "registry.gates", "cuda_runtime.compile", "cuda_runtime.manifest")
"""Modules of the package that no edge enters: judges and tolerances are not digested, CI runs them over every raw record instead; what
finds and calls the compiler is not, because the compiled files have digests of their own (`binaries`).
Edges from elsewhere into the registry are not followed either: it writes down what was measured and is gated by its own components."""

TABLES: Mapping[str, tuple[str, ...]] = {
    "component": ("KINDS",),
    "config": ("FAMILIES", "SCHEDULES"),
    "types": ("ITEMSIZE", "FLOATS", "NUMPY"),
    "gates.contracts.families": ("FAMILY_CASES",),
    "optim.schedules": ("SCHEDULES",),
    "ops.numerics": ("UNIT_ROUNDOFF", "LOWER", "ACCUMULATE", "_MACHINE", "_SIGNIFICAND", "_MIN_EXPONENT"),
}
"""Module -> tables of names in it: each entry counts only where its key is mentioned. Code that walks over such a table meets a new
entry when its evidence is next renewed."""

SHAPES: Mapping[str, tuple[str, ...]] = {
    "component": ("Component", "Envelope", "Limit", "Measured"),
    "types": ("TensorType",),
    "ops.spec": ("OpSpec", "Sample"),
}
"""Module -> data classes in it whose fields are versioned by hand: the module's SHAPE counts in place of them, and of their objects the
fields that are not at their default. So a field with a default may be added; who changes a default, or what a field means, raises SHAPE
(suites/unit/test_stale.py holds what each SHAPE stands for). Methods count like all others."""

BARE = ("errors",)
"""Modules whose classes count by name and bases alone: what errors say changes no result."""

_BASES = frozenset({"object", "Protocol", "Generic", "ABC", "Exception", "ValueError", "RuntimeError"})
"""Classes from outside the package that call no method by a name of their own."""

Key = tuple[str, str]
"""(module, name), to stop at imports that go in a circle."""

Target = tuple[str, ...]
"""('def', module, name) | ('whole', module, name) | ('lambda', module, line) | ('entry', module, name, *keys) | ('all', module)
| ('text', hashed as it stands). 'whole': a class with all its members."""

Edges = tuple[tuple[Target, ...], ...]
"""For each reference of a definition, in order, what it may mean (none for builtins; several where a name is bound twice)."""

Words = frozenset[str]
"""Names that code says: '.x' for an attribute, "'x" for a text that could be a name."""

NAME = re.compile(r"[A-Za-z_][\w.-]{0,60}")


@dataclass(frozen=True)
class Piece:
    """Something of a target that counts together: its text, its edges, the words that it says."""

    text: str
    edges: Edges
    words: Words

    @functools.cached_property
    def ordered(self) -> tuple[Target, ...]:
        """All that the edges lead to, each where it comes first."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.edges)))

    @functools.cached_property
    def targets(self) -> frozenset[Target]:
        """The same as a set."""
        return frozenset(self.ordered)


@dataclass(frozen=True)
class Node:
    """A target: what always counts, and members by name."""

    core: Piece
    members: tuple[tuple[str, Piece], ...] = ()

    def active(self, words: Words | set[str]) -> list[Piece]:
        """The pieces that count where these words are mentioned."""
        return [self.core, *(p for name, p in self.members if is_mentioned(name, words))]

    @functools.cached_property
    def named(self) -> dict[str, list[Piece]]:
        """The members by each word that mentions one."""
        found: dict[str, list[Piece]] = {}
        for name, piece in self.members:
            for word in (f".{name}", f"'{name}"):
                found.setdefault(word, []).append(piece)
        return found

    @functools.cached_property
    def words(self) -> frozenset[str]:
        """The words of `named`."""
        return frozenset(self.named)

    @functools.cached_property
    def targets(self) -> frozenset[Target]:
        """All that the edges of any piece lead to."""
        return self.core.targets.union(*(p.targets for _, p in self.members))


class Walk:
    """Targets that were reached and words that were heard there. Both only grow, so one may be taken up where another ended."""

    def __init__(self) -> None:
        self.seen: set[Target] = set()
        self.heard: set[str] = set()
        self._awaited: set[str] = set()
        self._waiting: list[dict[str, list[Node]]] = [{}]
        """Nodes of which a member counts once its word is heard; those before the last are other walks', and stay as they are."""

    def copy(self) -> Walk:
        """One that goes on by itself; this one must not go on."""
        other = Walk()
        other.seen, other.heard, other._awaited = set(self.seen), set(self.heard), set(self._awaited)
        other._waiting = [*self._waiting, {}]
        return other

    def go(self, node_of: Callable[[Target], Node], roots: Iterable[Target], words: Words) -> None:
        """Reach these and hear those, and all that follows."""
        seen, heard, awaited, waiting = self.seen, self.heard, self._awaited, self._waiting[-1]
        queue, pieces = [r for r in roots if r not in seen], [Piece("", (), words)]
        seen.update(queue)
        while queue or pieces:
            if not pieces:
                node = node_of(queue.pop())
                pieces.append(node.core)
                if node.words:
                    for word in node.words & heard:
                        pieces += node.named[word]
                    for word in node.words - heard:
                        waiting.setdefault(word, []).append(node)
                    awaited |= node.words
            while pieces:
                piece = pieces.pop()
                if not piece.words <= heard:
                    said = piece.words - heard
                    heard |= said
                    for word in said & awaited:
                        for held in self._waiting:
                            for node in held.get(word, ()):
                                pieces += node.named[word]
                if not piece.targets <= seen:
                    new = piece.targets - seen
                    seen |= new
                    queue += new


def is_mentioned(name: str, words: Words | set[str]) -> bool:
    """Whether a member's name is among words."""
    return f".{name}" in words or f"'{name}" in words


@dataclass(frozen=True)
class Graph:
    """What was worked out of source files, and of nothing else."""

    sources: dict[str, Remembered | None] = field(default_factory=dict)
    nodes: dict[Target, Node] = field(default_factory=dict)
    closures: dict[tuple[frozenset[Target], Words], tuple[frozenset[Target], Words]] = field(default_factory=dict)
    walks: dict[frozenset[Target], Walk] = field(default_factory=dict)
    slots: dict[tuple[Target, ...], Words] = field(default_factory=dict)
    hashes: dict[tuple[tuple[Target, ...], Words], str] = field(default_factory=dict)

    def copy(self) -> Graph:
        """One to which more can be added."""
        return Graph(*(dict(getattr(self, f.name)) for f in fields(self)))


_RUNNING: dict[str, Graph] = {}
"""That of the running package, under a digest of its files: one process takes digests of it again and again."""


def _running(root: Path) -> Graph:
    h = hashlib.sha256(str(root).encode())
    for path in sorted(root.rglob("*.py")):
        text = path.read_bytes()
        h.update(f"\n{path} {len(text)}\n".encode() + text)
    if h.hexdigest() not in _RUNNING:
        _RUNNING.clear()
    return _RUNNING.setdefault(h.hexdigest(), Graph())


class Package:
    """A snapshot of a package's source files: each is read once, when first needed. Make a new one after files changed.

    `root`: the package's folder (default: that of the running package, of which snapshots share what they work out, while no file of it
    changes); `name`: its dotted name, whatever the folder is called.
    """

    def __init__(self, root: Path | str | None = None, name: str = "alpha") -> None:
        self.root = Path(root) if root is not None else Path(alpha.__file__).parent
        self.name = name
        self._files: dict[str, Path] = {}
        self.known: dict[tuple[Any, ...], Any] = {}
        """What others have worked out of this snapshot, each under a key that begins with a word of its own."""
        if not self.root.is_dir():
            raise InputError("no such package folder", came=self.root, do="give the folder that holds the package's __init__.py")
        self._graph = Graph() if root is not None or name != "alpha" else _running(self.root)

    def source(self, module: str) -> Remembered | None:
        """A module of the package (or a file added by `module_of`), None when there is no such file."""
        if module not in self._graph.sources:
            path = self._path(module)
            try:
                self._graph.sources[module] = None if path is None else digest_cache.read(path.read_text(encoding="utf-8"), self.name)
            except InputError as error:
                raise InputError(error.what, came=f"{module}: {error.came}", expected=error.expected, do=error.do) from error
        return self._graph.sources[module]

    def _path(self, module: str) -> Path | None:
        if module in self._files:
            return self._files[module]
        head, *rest = module.split(".")
        if head != self.name:
            return None
        base = self.root.joinpath(*rest)
        return next((p for p in (base / "__init__.py", base.with_suffix(".py") if rest else base) if p.is_file()), None)

    def module_of(self, value: Any) -> str:
        """The dotted module in which a function or class is written; a file outside the package is added under its path."""
        module = getattr(value, "__module__", "") or ""
        if module.split(".")[0] == self.name:
            return module
        code = getattr(value, "__code__", None)
        path = Path(code.co_filename) if code is not None else None
        if path is None or not path.is_file():
            raise InputError("no source file for a digest", came=f"{module}:{getattr(value, '__qualname__', value)}",
                             expected=f"a symbol of the package {self.name}, or a function written in a file")
        if str(path) not in self._files:
            self._files[str(path)] = path
            self._graph = self._graph.copy()  # that file is no part of the package
        return str(path)

    # Resolution

    def resolve(self, module: str, chain: tuple[str, ...], seen: frozenset[Key] = frozenset()) -> tuple[Target, ...]:
        """Targets of `chain` (a name with attributes) looked up among a module's names; empty for builtins and the like."""
        source = self.source(module)
        if source is None or (module, chain[0]) in seen:
            return ()
        seen = seen | {(module, chain[0])}
        found: list[Target] = [("def", module, chain[0])] if chain[0] in source.statements else []
        for imported in source.imports.get(chain[0], ()):
            found += self._through(imported, module, chain[1:], seen)
        if not found:
            for star in source.stars:
                found += self.resolve(self._absolute(star, module), chain, seen)
        return tuple(found)

    def _absolute(self, imported: Import, module: str) -> str:
        if not imported.level:
            return imported.module
        parts = module.split(".")
        up = imported.level - (1 if self._is_init(module) else 0)
        parts = parts[: len(parts) - up]
        return ".".join([*parts, imported.module] if imported.module else parts)

    def _through(self, imported: Import, origin: str, rest: tuple[str, ...], seen: frozenset[Key]) -> tuple[Target, ...]:
        chain = rest if imported.symbol is None else (imported.symbol, *rest)
        return self._member(self._absolute(imported, origin), chain, origin, seen)

    def _member(self, module: str, chain: tuple[str, ...], origin: str, seen: frozenset[Key]) -> tuple[Target, ...]:
        """Targets of `module.chain` named in `origin`: submodules are walked through; a module used as a value stands for all of it."""
        if module.split(".")[0] != self.name:
            return (("text", "outside " + ".".join([module, *chain[:1]])),)
        if self._opaque(module, origin):
            return (("text", "opaque " + ".".join(chain[:1])),)
        if self.source(module) is None:
            return (("text", "absent " + ".".join([module, *chain[:1]])),)
        if not chain:
            return (("all", module),)
        found = self.resolve(module, chain, seen)
        if found:
            return found
        if self._path(f"{module}.{chain[0]}") is not None:
            return self._member(f"{module}.{chain[0]}", chain[1:], origin, seen)
        return () if chain[0].startswith("__") else (("all", module),)

    def _opaque(self, module: str, origin: str) -> bool:
        registry = f"{self.name}.registry."
        inside = f"{origin}.".startswith(registry)
        return module != origin and (module in {f"{self.name}.{m}" for m in OPAQUE} or (module.startswith(registry) and not inside))

    def _follow(self, module: str, reference: Reference) -> tuple[Target, ...]:
        if not reference.through:
            return self.resolve(module, reference.chain)
        return tuple(t for imported in reference.through for t in self._through(imported, module, reference.chain[1:], frozenset()))

    # The graph

    def _node(self, target: Target) -> Node:
        if target not in self._graph.nodes:
            self._graph.nodes[target] = self._expand(target)
        return self._graph.nodes[target]

    def _expand(self, target: Target) -> Node:
        kind = target[0]
        if kind == "text":
            return Node(Piece(target[1], (), frozenset()))
        module = target[1]
        source = self.source(module)
        if source is None:
            raise InputError("no such module to digest", came=module, expected=f"a file under {self.root.name}/")
        if kind == "all":
            names = sorted({*source.statements, *(source.imports if self._is_init(module) else ())} - {"__all__"})
            return Node(Piece("all", tuple(self.resolve(module, (n,)) for n in names), frozenset()))
        short = module.removeprefix(f"{self.name}.")
        if kind == "def" and target[2] in TABLES.get(short, ()) and (table := source.table(target[2])) is not None:
            return Node(self._piece(module, [table]), tuple((n, self._piece(module, [d])) for n, d in table.members))
        if kind == "def" and short in BARE:
            return Node(self._piece(module, source.header(target[2])))
        found = self.definitions(target)
        if kind == "def" and all(self._sliced(module, d, frozenset()) for d in found if d.whole is not None):
            members = tuple((n, self._piece(module, [m])) for d in found for n, m in d.members)
            core = self._piece(module, found)
            if target[2] in SHAPES.get(short, ()):
                own = {n for d in found for n in d.fields}
                members = tuple((n, p) for n, p in members if n not in own)
                core = replace(core, edges=(*core.edges, self.resolve(module, ("SHAPE",))))
            return Node(core, members)
        return Node(self._piece(module, [d.whole or d for d in found]))

    def _piece(self, module: str, found: Sequence[Definition]) -> Piece:
        words = {f".{n}" for d in found for n in d.names} | {f"'{s}" for d in found for s in d.strings if NAME.fullmatch(s)}
        edges = tuple(self._follow(module, r) for d in found for r in d.references)
        return Piece(" ".join(d.text for d in found), edges, frozenset(words))

    def _sliced(self, module: str, definition: Definition, seen: frozenset[Target]) -> bool:
        """Whether members of a class are reached by their names alone: no base from outside may call them."""
        if definition.bases is None:
            return False
        for base in definition.bases:
            targets = self._follow(module, base)
            if not targets and base.chain[-1] not in _BASES:
                return False
            for target in targets:
                if target[0] == "text" and target[1].rpartition(".")[2] in _BASES:
                    continue
                if target[0] != "def" or target in seen:
                    return False
                if not all(self._sliced(target[1], d, seen | {target}) for d in self.definitions(target)):
                    return False
        return True

    def definitions(self, target: Target) -> tuple[Definition, ...]:
        """What is written at a target; nothing for whole modules and text."""
        source = self.source(target[1]) if target[0] in ("def", "whole", "lambda", "entry") else None
        if source is None:
            return ()
        if target[0] == "lambda":
            return source.lambdas(int(target[2]))
        if target[0] == "entry":
            entry = source.entry(*target[2:])
            return () if entry is None else (entry,)
        return source.definitions(target[2])

    def _is_init(self, module: str) -> bool:
        path = self._path(module)
        assert path is not None, "it was read"
        return path.name == "__init__.py"

    def closure(self, roots: Iterable[Target], words: Words = frozenset(),
                among: frozenset[Target] = frozenset()) -> tuple[frozenset[Target], Words]:
        """(every target that the roots reach, every word that is mentioned there). `words`: what is mentioned besides. `among`: roots of
        theirs that others share, from which the walk is taken up; the result is the same without."""
        key = frozenset(roots), words
        if key not in self._graph.closures:
            self._graph.closures[key] = self._closure(*key, among & key[0])
        return self._graph.closures[key]

    def _closure(self, roots: frozenset[Target], words: Words, among: frozenset[Target]) -> tuple[frozenset[Target], Words]:
        if among and among not in self._graph.walks:
            self._graph.walks[among] = Walk()
            self._graph.walks[among].go(self._node, among, frozenset())
        walk = self._graph.walks[among].copy() if among else Walk()
        walk.go(self._node, roots, words)
        return frozenset(walk.seen), frozenset(walk.heard)

    def hash(self, roots: Iterable[Target], words: Words | None = None) -> str:
        """sha256 of the graph that the roots reach where these words are mentioned (default: those that are mentioned there)."""
        roots = tuple(roots)
        if words is None:
            words = self.closure(roots)[1]
        key = roots, words & self.members(roots)
        if key not in self._graph.hashes:
            self._graph.hashes[key] = self._hash(roots, words)
        return self._graph.hashes[key]

    def members(self, roots: Iterable[Target]) -> Words:
        """Words on which the graph of the roots may depend."""
        roots = tuple(roots)
        if roots not in self._graph.slots:
            seen, found = set(roots), set[str]()
            queue = list(seen)
            for target in queue:  # grows while it is walked
                node = self._node(target)
                found |= node.words
                new = node.targets - seen
                seen |= new
                queue += new
            self._graph.slots[roots] = frozenset(found)
        return self._graph.slots[roots]

    def _hash(self, roots: tuple[Target, ...], words: Words) -> str:
        number: dict[Target, int] = {}
        for root in roots:
            number.setdefault(root, len(number))
        queue, told = list(number), [repr([number[r] for r in roots])]
        for target in queue:  # grows while it is walked
            node = self._node(target)
            for piece in node.active(words) if node.members else (node.core,):
                for edge in piece.ordered:
                    if edge not in number:
                        number[edge] = len(number)
                        queue.append(edge)
                told.append(f"\n{piece.text}:{[[number[e] for e in group] for group in piece.edges]}")
            told.append("\n")
        return hashlib.sha256("".join(told).encode()).hexdigest()

    def roots(self, symbol: str) -> tuple[Target, ...]:
        """Targets of 'module:qualname', a class with all its members. A method or inner function stands for the class or function that
        holds it."""
        module, colon, qualname = symbol.partition(":")
        if not colon or not qualname:
            raise InputError("not a symbol", came=symbol, expected="package.module:name")
        source = self.source(module)
        if source is None:
            raise InputError("no such module to digest", came=module, expected=f"a file under {self.root}", do="check the spelling")
        found = self.resolve(module, tuple(qualname.split(".")))
        if not found:
            near = difflib.get_close_matches(qualname, [*source.statements, *source.imports], n=3)
            raise InputError("no such symbol to digest", came=symbol,
                             expected=f"one of {', '.join(near)}" if near else "a name of the module")
        return tuple(("whole", *t[1:]) if any(d.whole is not None for d in self.definitions(t)) else t for t in found)


def symbol_digest(symbol: str, root: Path | str | None = None, *, package: Package | None = None) -> str:
    """Digest of 'package.module:name' with everything that it refers to inside the package.

    `root`: another copy of the package's folder; `package`: a snapshot to share among many calls (otherwise files are read anew).
    """
    package = package or Package(root, symbol.split(".")[0].split(":")[0])
    return package.hash(package.roots(symbol))


def module_digest(module: str, root: Path | str | None = None, *, package: Package | None = None) -> str:
    """Digest of all that a module defines, with everything that it refers to inside the package."""
    package = package or Package(root, module.split(".")[0])
    return package.hash([("all", module)])
