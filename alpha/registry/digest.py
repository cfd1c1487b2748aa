"""Digests: evidence binds to what was measured, not to every character of the repository. Floor 3.

The digest of a symbol is the sha256 of its stable syntax tree (syntax.py) and of that of everything inside the package that it refers
to, transitively: functions, classes, constants, base classes, decorators, defaults, annotations (so that `cpu: Cpu` brings the class
whose methods are called), re-exports, function-level imports. The definitions form a rooted graph; they are numbered in order of
discovery and hashed with their edges, so neither file names nor the place in a file enter, and a cycle needs no special care.

Files are read as text. Nothing is imported or executed, so a digest can be taken of code on a higher floor or of a broken copy.

Out of reach, because only running the program would tell: op rows and kernels looked up by a string, modules found by listing a
folder, `getattr` with a computed name, methods of an object whose class is named nowhere on the way, module state that another
function changes, data files, environment. Whoever depends on one of these names it beside the symbol (as `component_digests` does with
the op row of a kernel).
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

import alpha
from alpha.component import Component
from alpha.errors import InputError
from alpha.ops.spec import OpSpec
from alpha.ops.table import row, table
from alpha.registry import policy
from alpha.registry.syntax import Definition, Import, Reference, Source, read

OPAQUE = ("registry.judge", "registry.policy", "cudart.compile", "cudart.manifest")
"""Modules of the package that no edge enters: judges and tolerances are not digested, CI runs them over every raw record instead; what
finds and calls the compiler is not, because the compiled files have digests of their own (`binaries`).
Edges from elsewhere into the registry are not followed either: it writes down what was measured and is gated by its own components."""

_BLAS_CALLS = frozenset({"@", "matmul", "dot", "vdot", "inner", "einsum", "tensordot", "linalg"})

Key = tuple[str, str]
"""(module, name), to stop at imports that go in a circle."""

Target = tuple[str, ...]
"""('def', module, name) | ('lambda', module, line) | ('entry', module, name, *keys) | ('all', module) | ('text', hashed as it stands)."""

Edges = tuple[tuple[Target, ...], ...]
"""For each reference of a definition, in order, what it may mean (none for builtins; several where a name is bound twice)."""


class Package:
    """A snapshot of a package's source files: each is read once, when first needed. Make a new one after files changed.

    `root`: the package's folder (default: that of the running package); `name`: its dotted name, whatever the folder is called.
    """

    def __init__(self, root: Path | str | None = None, name: str = "alpha") -> None:
        self.root = Path(root) if root is not None else Path(alpha.__file__).parent
        self.name = name
        self._sources: dict[str, Source | None] = {}
        self._files: dict[str, Path] = {}
        self._hashes: dict[tuple[Target, ...], str] = {}
        self._edges: dict[Target, tuple[str, Edges]] = {}
        if not self.root.is_dir():
            raise InputError("no such package folder", came=self.root, do="give the folder that holds the package's __init__.py")

    def source(self, module: str) -> Source | None:
        """A module of the package (or a file added by `module_of`), None when there is no such file."""
        if module not in self._sources:
            path = self._path(module)
            try:
                self._sources[module] = None if path is None else read(path.read_text(encoding="utf-8"), self.name)
            except InputError as error:
                raise InputError(error.what, came=f"{module}: {error.came}", expected=error.expected, do=error.do) from error
        return self._sources[module]

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
        self._files[str(path)] = path
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
        path = self._path(module)
        parts = module.split(".")
        up = imported.level - (1 if path is not None and path.name == "__init__.py" else 0)
        parts = parts[: len(parts) - up]
        return ".".join([*parts, imported.module] if imported.module else parts)

    def _through(self, imported: Import, origin: str, rest: tuple[str, ...], seen: frozenset[Key]) -> tuple[Target, ...]:
        chain = rest if imported.symbol is None else (imported.symbol, *rest)
        return self._member(self._absolute(imported, origin), chain, origin, seen)

    def _member(self, module: str, chain: tuple[str, ...], origin: str, seen: frozenset[Key]) -> tuple[Target, ...]:
        """Targets of `module.chain` named in `origin`: submodules are walked through; a module used as a value stands for all of it."""
        if module.split(".")[0] != self.name and module not in self._files:
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

    def _node(self, target: Target) -> tuple[str, Edges]:
        """(own text, edges) of a target."""
        if target not in self._edges:
            self._edges[target] = self._expand(target)
        return self._edges[target]

    def _expand(self, target: Target) -> tuple[str, Edges]:
        kind = target[0]
        if kind == "text":
            return target[1], ()
        module = target[1]
        source = self.source(module)
        if source is None:
            raise InputError("no such module to digest", came=module, expected=f"a file under {self.root.name}/")
        if kind == "all":
            names = sorted({*source.statements, *(source.imports if self._is_init(module) else ())} - {"__all__"})
            return "all", tuple(self.resolve(module, (n,)) for n in names)
        found = self.definitions(target)
        return " ".join(d.text for d in found), tuple(self._follow(module, r) for d in found for r in d.references)

    def definitions(self, target: Target) -> tuple[Definition, ...]:
        """What is written at a target; nothing for whole modules and text."""
        source = self.source(target[1]) if target[0] in ("def", "lambda", "entry") else None
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
        return path is not None and path.name == "__init__.py"

    def reach(self, roots: Iterable[Target]) -> list[Target]:
        """Every target that can be reached, in order of discovery."""
        order = dict.fromkeys(roots)
        queue = list(order)
        for target in queue:  # grows while it is walked
            for edge in itertools.chain.from_iterable(self._node(target)[1]):
                if edge not in order:
                    order[edge] = None
                    queue.append(edge)
        return queue

    def hash(self, roots: Iterable[Target]) -> str:
        """sha256 of the graph that the roots reach."""
        roots = tuple(roots)
        if roots not in self._hashes:
            self._hashes[roots] = self._hash(roots)
        return self._hashes[roots]

    def _hash(self, roots: tuple[Target, ...]) -> str:
        order = {target: i for i, target in enumerate(self.reach(roots))}
        h = hashlib.sha256()
        h.update(repr([order[r] for r in roots]).encode())
        for target in order:
            text, edges = self._node(target)
            h.update(f"\n{text}:{[[order[e] for e in group] for group in edges]}".encode())
        return h.hexdigest()

    def roots(self, symbol: str) -> tuple[Target, ...]:
        """Targets of 'module:qualname'. A method or inner function stands for the class or function that holds it."""
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
        return found


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


def calls_blas(value: Any, package: Package) -> bool:
    """Whether a matrix product or another BLAS call can be reached from a function or class: decides what evidence carries over.

    Names are all that is looked at, so a function of ours called `dot` counts too, which only asks for more evidence.
    """
    return any(_mentions_blas(package, target) for target in package.reach(_targets(value, package)))


def _mentions_blas(package: Package, target: Target) -> bool:
    if target[0] == "text":
        return target[1].split(".")[-1] in _BLAS_CALLS
    return any(not _BLAS_CALLS.isdisjoint(d.names) for d in package.definitions(target))


# Values that are held, not named: functions of an op row, limits of an envelope ----------------------------------------------------


def value_digest(value: Any, package: Package) -> str:
    """Digest of a value: functions and classes by their source, with what closures and defaults hold; plain data by content.

    An object of a class outside the package counts as its class's name and nothing more.
    """
    return hashlib.sha256(_describe(value, package, ()).encode()).hexdigest()


def _targets(value: Any, package: Package) -> tuple[Target, ...]:
    if isinstance(value, functools.partial):
        return _targets(value.func, package)
    if isinstance(value, MethodType):
        value = value.__func__
    if not hasattr(value, "__qualname__"):
        value = type(value)
    module, qualname = package.module_of(value), value.__qualname__
    if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
        return (("lambda", module, str(value.__code__.co_firstlineno)),)
    return package.roots(f"{module}:{qualname.split('.<locals>')[0]}")


def _describe(value: Any, package: Package, held: tuple[int, ...]) -> str:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if id(value) in held:
        return f"again {held.index(id(value))}"
    held = (*held, id(value))
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_describe(k, package, held)}:{_describe(v, package, held)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ",".join(_describe(v, package, held) for v in value) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(_describe(v, package, held) for v in value)) + "}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype.str} {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    if isinstance(value, functools.partial):
        return "partial " + _describe([value.func, value.args, value.keywords], package, held)
    if isinstance(value, MethodType):
        return "method " + _describe([value.__func__.__name__, value.__self__], package, held)
    if isinstance(value, ModuleType):
        return package.hash([("all", value.__name__)]) if value.__name__.split(".")[0] == package.name else f"module {value.__name__}"
    if isinstance(value, FunctionType):
        cells = {n: c.cell_contents for n, c in zip(value.__code__.co_freevars, value.__closure__ or ()) if _filled(c)}
        inner = value.__name__ == "<lambda>" or "<locals>" in value.__qualname__
        bound = [cells, value.__defaults__, value.__kwdefaults__] if inner else [cells]
        own = "" if value.__name__ == "<lambda>" else value.__qualname__.rpartition("<locals>.")[2]
        return f"function {own} {package.hash(_targets(value, package))} {_describe(bound, package, held)}"
    if hasattr(value, "__qualname__"):  # classes, cached functions, builtins, ufuncs of newer NumPy
        inside = (getattr(value, "__module__", "") or "").split(".")[0] == package.name
        return f"symbol {package.hash(_targets(value, package)) if inside else _foreign(value)}"
    cls = type(value)
    if cls.__module__.split(".")[0] != package.name:
        return f"object {_foreign(cls)} {getattr(value, '__name__', '')}"
    state = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else dict(vars(value))
    return f"instance {package.hash(_targets(cls, package))} {_describe(state, package, held)}"


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises when a recursive function is not bound yet)
    except ValueError:
        return False
    return True


def _foreign(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}"


# What one gate's evidence of one component binds to ---------------------------------------------------------------------------------

_NOT_ROW = {"samples", "exact", "why_no_vjp"}
"""Fields of a row that are cases or prose; FLOPs and bytes count for perf alone."""


def component_digests(component: Component, gate: str, *, package: Package | None = None,
                      extra: Mapping[str, Callable[[], str]] | None = None) -> dict[str, str]:
    """name -> hex of everything that evidence of `gate` on `component` binds to.

    implementation  the callable with its callees, and the declared envelope and in-place pairs (wider promises need new evidence)
    row             kernels: all that the row says but its cases (FLOPs and bytes: for perf only); gradient of a row without a vjp: the
                    forward rows whose vjps emit it too
    cases           kernels: samples and exact samples; others: their entry of the contract module's CASES
    measure         the gate's engine
    binaries        kernels of the GPU: digests of the compiled files (pinned compiler, no line information)
    `extra`         further names, such as the plan hashes of reference configs for a pass
    """
    package = package or Package()
    promises = [component.envelope.dtypes, [(x.text, x.holds) for x in component.envelope.limits], component.inplace]
    digests = {
        "implementation": value_digest([component.implementation, promises], package),
        "measure": symbol_digest(policy.measure_symbol(gate, component), package=package),
    }
    if component.op is not None:
        spec = row(component.op)
        rows = [spec, *(_emitting(spec, package) if gate == "gradient" and spec.vjp is None else ())]
        digests["row"] = value_digest([_row_parts(r, gate) for r in rows], package)
        digests["cases"] = value_digest([spec.samples, spec.exact], package)
    if component.contract:
        digests["cases"] = package.hash(contract_targets(component, gate, package))
    if component.binaries is not None:
        digests["binaries"] = value_digest(dict(sorted(component.binaries().items())), package)
    for name, digest in (extra or {}).items():
        digests[name] = digest()
    return digests


def contract_targets(component: Component, gate: str, package: Package) -> tuple[Target, ...]:
    """The component's entry of CASES where it is written as a table, else the whole contract module."""
    source = package.source(component.contract)
    if source is not None and source.entry("CASES", component.id, gate) is not None:
        return (("entry", component.contract, "CASES", component.id, gate),)
    return (("all", component.contract),)


def _emitting(spec: OpSpec, package: Package) -> list[OpSpec]:
    """Rows whose vjp may emit this one: its name is a text constant in reach of the vjp. The gradient gate goes through them."""
    return [r for _, r in sorted(table().items()) if r.vjp is not None
            and any(spec.name in d.strings for t in package.reach(_targets(r.vjp, package)) for d in package.definitions(t))]


def _row_parts(spec: OpSpec, gate: str) -> dict[str, Any]:
    skipped = _NOT_ROW if gate == "perf" else _NOT_ROW | {"flops", "nbytes"}
    return {f.name: getattr(spec, f.name) for f in fields(spec) if f.name not in skipped}
