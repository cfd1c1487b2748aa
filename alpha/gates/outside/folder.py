"""component.toml of a user's own folder, understood: a row of the op table, a component for the engines, a candidate to start. Floor 7."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np

from alpha.backends.cuda.lib import SM90A
from alpha.component import Component, Envelope, Limit
from alpha.errors import ConfigError, InputError
from alpha.gates import evaluate
from alpha.gates.outside import cuda
from alpha.gates.outside.process import Candidate
from alpha.gates.outside.reference import Bound, Drawn, Oracle, Whole, followed, function_of
from alpha.gates.outside.signature import Operand, Signature, Size, evaluated
from alpha.gates.outside.subjects import Calls, bind
from alpha.gates.subjects import case_of
from alpha.ops.spec import Arrays, Emit, NodeLike, OpSpec, Sample
from alpha.ops.table import row, table
from alpha.tomlfile import read_toml
from alpha.types import NUMPY, Attrs

FILE = "component.toml"
GROUP = "alpha.components"
"""Entry points of installed packages: name -> the package in whose folder component.toml lies."""

LANGUAGES: Mapping[str, tuple[str, ...]] = {"numpy": ("f32", "f64"), "torch": ("f32", "f64", "bf16"), "triton": ("f32", "bf16"),
                                            "cuda": ("bf16", "f32")}
"""Language of a candidate -> element types that it may compute in."""

_TABLES = {
    "component": {"name", "op", "reference", "candidate", "language", "types", "files", "differentiates", "cotangents", "flops"},
    "sizes": None, "inputs": None, "outputs": None, "attributes": None, "launch": {"grid", "block", "shared"},
}


@dataclass(frozen=True, kw_only=True)
class Outside:
    """A folder, understood. `rows`: what the engines find in the op table while its gates run, the component's own first; none where that
    stands there already. `files`: of the candidate, its own first; `references`: of the reference and of what it differentiates."""

    folder: Path
    language: str
    files: tuple[str, ...]
    references: tuple[str, ...]
    function: str
    component: Component
    rows: tuple[OpSpec, ...]
    signature: Signature

    @property
    def kept_apart(self) -> str:
        """How the candidate is kept from its judge, in words."""
        return "device code that the gates launch" if self.language == "cuda" else "called in a process of its own"

    def digests(self) -> dict[str, str]:
        """sha256 of each file that decides the result, by name."""
        return _digests(self.folder, (*self.files, *self.references))

    def gates(self) -> tuple[str, ...]:
        """What it owes: all gates but the gradient of what has none."""
        spec = self.rows[0] if self.rows else row(self.component.op or "")
        gradient = spec.vjp is not None or len(self.rows) > 1 or (not self.rows and spec.name.endswith("_bwd"))
        return ("parity", *(("gradient",) if gradient else ()), "determinism", "faults", "perf")

    def start(self, python: str = sys.executable) -> Candidate:
        """The candidate in a process of its own. InputError where it cannot be loaded, MachineError where `python` lacks its language."""
        return Candidate(self.folder, self.files, self.function, self.language, python)

    @contextmanager
    def in_table(self) -> Iterator[None]:
        """Within it the op table holds the rows of this folder."""
        added = {spec.name: spec for spec in self.rows}
        table().update(added)
        evaluate.emitted.cache_clear()
        try:
            yield
        finally:
            for name in added:
                del table()[name]
            evaluate.emitted.cache_clear()


def find(text: str) -> Path:
    """The folder of --from: a path, or the name of an entry point of GROUP. Nothing of a package is imported."""
    if (Path(text) / FILE).is_file():
        return Path(text).resolve()
    named = {e.name: e.value for e in metadata.entry_points(group=GROUP)}
    if text in named:
        try:
            spec = util.find_spec(named[text].partition(":")[0])
        except (ImportError, ValueError):  # the package that it lies in is not there
            spec = None
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (Path(place) / FILE).is_file():
                return Path(place).resolve()
        raise InputError("an entry point leads to no component", came=f"{text} = {named[text]}", expected=f"a package that holds {FILE}")
    raise InputError("no component there", came=text, do="docs/your-own-kernel.md shows such a folder",
                     expected=f"a folder that holds {FILE}, or an installed one: {', '.join(sorted(named)) or 'there is none'}")


def load(folder: Path) -> Outside:
    """The component of a folder. ConfigError where component.toml says what it cannot, InputError for what it names and is not there."""
    tables = read_toml(folder / FILE)
    for name, body in tables.items():
        if name not in _TABLES or not isinstance(body, dict):
            raise _wrong(f"[{name}]", f"tables {', '.join(_TABLES)}")
        known = _TABLES[name]
        if known is not None and (unknown := sorted(body.keys() - known)):
            raise _wrong(f"{name}.{unknown[0]}", ", ".join(sorted(known)))
    own = tables.get("component", {})
    name, language = _text(own, "name"), _text(own, "language")
    if not name.isidentifier():
        raise _wrong(f"component.name = {name!r}", "letters, digits and underscores")
    if language not in LANGUAGES:
        raise _wrong(f"component.language = {language!r}", ", ".join(LANGUAGES))
    types = _texts(own, "types", ("f32",))
    if not types or not set(types) <= set(LANGUAGES[language]):
        raise _wrong(f"component.types = {list(types)}", f"of {', '.join(LANGUAGES[language])} for {language}")
    signature = _signature(f"outside_{name}", tables)  # no row of the op table is called so
    attributes = dict(tables.get("attributes", {}))
    file, _, function = _text(own, "candidate").partition(":")
    files = (file, *_texts(own, "files", ()))
    for f in files:
        if not (folder / f).resolve().is_relative_to(folder.resolve()) or not (folder / f).is_file():
            raise InputError("a file of the candidate is not there", came=f, expected=f"a file in {folder}", do=f"mend {FILE}")
    if ("op" in own) == ("reference" in own):
        raise _wrong("component.op and component.reference", "one of them")
    if "flops" in own:
        evaluated(_text(own, "flops"), signature.least())
    rows = () if "op" in own else _rows(folder, own, signature, types[0])
    spec = row(_text(own, "op")) if "op" in own else None
    further = Drawn(signature, spec.oracle, types[0], spec.bound, attributes) if spec else None
    references = tuple(dict.fromkeys(own[key].partition(":")[0] for key in ("reference", "differentiates") if key in own))
    held = Limit(text=f"the sizes of {FILE}", holds=Accepted(signature, attributes))
    envelope, bound_to = Envelope(dtypes=types, limits=(held,)), partial(_digests, folder, (*files, *references))
    component_id, op = f"{name}.{types[0]}.outside", own.get("op", signature.name)
    if language == "cuda":
        launcher = _launcher(folder / file, function or name, signature, tables.get("launch", {}))
        component = cuda.component(component_id, op, launcher, envelope, attributes, bound_to, further)
    else:
        component = Component(id=component_id, kind="kernel", backend="outside", op=op, implementation=bind, envelope=envelope,
                              requires=SM90A if language == "triton" else (), binaries=bound_to,
                              calls=Calls(signature, attributes, further))
    found = Outside(folder=folder, language=language, files=files, references=references, function=function or name, component=component,
                    rows=rows, signature=signature)
    _try_out(found)
    return found


@dataclass(frozen=True)
class Accepted:
    """Limit.holds: the operands fit the signature, and the attributes are those that component.toml fixes."""

    signature: Signature
    attributes: dict[str, object]

    def __call__(self, types: Any, attrs: Attrs) -> bool:
        return self.signature.holds(types, attrs) and all(attrs.get(k) == v for k, v in self.attributes.items())


@dataclass(frozen=True)
class Flops:
    """OpSpec.flops: the expression of component.toml; '' counts none, so bytes alone are the ceiling."""

    signature: Signature
    text: str

    def __call__(self, types: Any, attrs: Attrs) -> int:
        return evaluated(self.text, self.signature.sizes_of(types)) if self.text else 0


@dataclass(frozen=True)
class Backward:
    """The vjp of what a backward component differentiates: the component's op on cotangents and operands."""

    op: str

    def __call__(self, emit: Emit, node: NodeLike, cotangents: Any) -> list[Any]:
        found = emit(self.op, *cotangents, *node.inputs)
        gradients = iter(found if isinstance(found, tuple) else (found,))
        return [next(gradients) if x.type.is_float else None for x in node.inputs]


def _rows(folder: Path, own: Mapping[str, Any], signature: Signature, dtype: str) -> tuple[OpSpec, ...]:
    """The row of a plain reference, and of the function that it differentiates where it says one."""
    def made(signature: Signature, oracle: Oracle, vjp: Any, why: str) -> OpSpec:
        return OpSpec(name=signature.name, inputs=tuple(o.name for o in signature.inputs), outputs=tuple(o.name for o in signature.outputs),
                      infer=signature.infer, oracle=oracle, vjp=vjp, why_no_vjp=why, flops=Flops(signature, own.get("flops", "")),
                      samples=Drawn(signature, oracle, dtype, Bound(oracle)), exact=Whole(signature, oracle, dtype), bound=Bound(oracle),
                      undifferentiable=tuple(o.name for o in signature.inputs if o.dtype))

    first = made(signature, Oracle(function_of(folder, _text(own, "reference"))), None, "it says its gradient by `differentiates`")
    if "differentiates" not in own:
        return (first,)
    differentiates, cotangents = _text(own, "differentiates"), _texts(own, "cotangents", ())
    among = [o.name for o in signature.inputs]
    if not cotangents or list(cotangents) != among[: len(cotangents)]:
        raise _wrong(f"component.cotangents = {list(cotangents)}", f"the first inputs, of {among}")
    given, rest = signature.inputs[: len(cotangents)], signature.inputs[len(cotangents):]
    forward = Signature(name=f"{signature.name}_forward", inputs=rest, outputs=given, sizes=signature.sizes)
    return first, made(forward, Oracle(function_of(folder, differentiates)), Backward(signature.name), "")


def _launcher(file: Path, kernel: str, signature: Signature, body: Mapping[str, Any]) -> cuda.Launcher:
    for key in ("grid", "block"):
        if not isinstance(body.get(key), list) or not 1 <= len(body[key]) <= 3:
            raise _wrong(f"launch.{key} = {body.get(key)!r}", "one to three expressions of sizes")
        for d in body[key]:
            if type(d) not in (int, str):
                raise _wrong(f"launch.{key} = {body[key]!r}", "one to three expressions of sizes")
            evaluated(str(d), signature.least())
    if type(body.get("shared", 0)) is not int or body.get("shared", 0) < 0:
        raise _wrong(f"launch.shared = {body['shared']!r}", "a number of bytes")
    return cuda.Launcher(file=file, kernel=kernel, signature=signature, grid=tuple(body["grid"]), block=tuple(body["block"]),
                         shared=body.get("shared", 0))


def _signature(name: str, tables: Mapping[str, Any]) -> Signature:
    sizes = {n: _size(f"sizes.{n}", body) for n, body in tables.get("sizes", {}).items()}
    inputs, outputs = (tuple(_operand(which, n, body) for n, body in tables.get(which, {}).items()) for which in ("inputs", "outputs"))
    named = {d for o in inputs for d in o.shape if isinstance(d, str)}
    if unknown := sorted(named ^ set(sizes)):
        raise _wrong(f"the size {unknown[0]!r}", "each size stands in [sizes] and in the shape of an input")
    if not outputs or all(o.dtype for o in inputs):
        raise _wrong("[inputs] and [outputs]", "at least one input of floats, and one output")
    found = Signature(name=name, inputs=inputs, outputs=outputs, sizes=sizes)
    for o in inputs:
        if o.dtype and evaluated(o.below, found.least()) <= o.least:
            raise _wrong(f"inputs.{o.name}: least = {o.least}, below = {o.below!r}", "least < below, at the least sizes too")
    return found


def _size(where: str, body: Any) -> Size:
    known = [f.name for f in fields(Size)]
    _only(where, body, known)
    for key, value in body.items():
        if type(value) is not int:
            raise _wrong(f"{where}.{key} = {value!r}", "a whole number")
    if missing := sorted({"least", "most"} - set(body)):
        raise _wrong(f"{where} without {missing[0]}", ", ".join(known))
    s = Size(**body)
    if not (1 <= s.least <= s.most and s.multiple >= 1 and s.holds(s.near(s.least))):
        raise _wrong(f"{where} = {s}", "1 <= least <= most, and a multiple between them")
    if s.timed is not None and not s.holds(s.timed):
        raise _wrong(f"{where}.timed = {s.timed}", f"a multiple of {s.multiple} in [{s.least}, {s.most}]")
    return s


def _operand(which: str, name: str, body: Any) -> Operand:
    where = f"{which}.{name}"
    _only(where, body, ("shape", "type", "least", "below") if which == "inputs" else ("shape", "type"))
    shape = body.get("shape")
    if not isinstance(shape, list) or any(type(d) is not str and not (type(d) is int and d >= 1) for d in shape):
        raise _wrong(f"{where}.shape = {shape!r}", "a list of whole numbers from 1 on and names of sizes")
    dtype, least, below = body.get("type", ""), body.get("least", 0), body.get("below", "")
    for key, value, sort, expected in (("type", dtype, str, "a text"), ("least", least, int, "a whole number"),
                                       ("below", below, str, "an expression of sizes, as a text")):
        if type(value) is not sort:
            raise _wrong(f"{where}.{key} = {value!r}", expected)
    if which == "inputs" and dtype and (dtype not in ("i32", "i64") or not below):
        raise _wrong(where, 'type = "i32" or "i64", with below = an expression of sizes')
    if dtype and dtype not in NUMPY:
        raise _wrong(f"{where}.type = {dtype!r}", ", ".join(NUMPY))
    return Operand(name=name, shape=tuple(shape), dtype=dtype, least=least, below=below)


def _only(where: str, body: Any, known: Sequence[str]) -> None:
    """A table with none but known keys."""
    if not isinstance(body, dict):
        raise _wrong(f"{where} = {body!r}", f"a table of {', '.join(known)}")
    if unknown := sorted(set(body) - set(known)):
        raise _wrong(f"{where}.{unknown[0]}", ", ".join(known))


def _text(own: Mapping[str, Any], key: str) -> str:
    if not isinstance(own.get(key), str):
        raise _wrong(f"component.{key} = {own.get(key)!r}", "a text")
    return str(own[key])


def _texts(own: Mapping[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    found = own.get(key, list(default))
    if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
        raise _wrong(f"component.{key} = {found!r}", "a list of texts")
    return tuple(found)


def _wrong(came: str, expected: str) -> ConfigError:
    return ConfigError(f"{FILE} says what it cannot", came=came, expected=expected, do="docs/your-own-kernel.md lists every key")


def _digests(folder: Path, files: tuple[str, ...]) -> dict[str, str]:
    return {f: hashlib.sha256((folder / f).read_bytes()).hexdigest() for f in (FILE, *files)}


def _try_out(found: Outside) -> None:
    """Run each row's reference once, on its smallest sample, then walk it: outputs must have the declared shapes, and be of the declared
    sort."""
    for spec in found.rows:
        assert isinstance(spec.samples, Drawn)
        sample = next(spec.samples.signature.samples(np.random.default_rng(0), {}))
        try:
            with np.errstate(all="ignore"):
                _as_declared(spec, sample, spec.oracle(*sample.inputs))
                spec.oracle(*(followed(x) for x in sample.inputs))
            next(spec.samples(np.random.default_rng(0)), None)
        except Exception as error:
            raise _fails(sample.name, error) from error


def _as_declared(spec: OpSpec, sample: Sample, outputs: Arrays) -> None:
    declared = spec.infer(case_of(sample, "f64").types, {})
    shapes, expected = [y.shape for y in outputs], [t.shape for t in declared]
    if shapes != expected:
        raise InputError("the reference's outputs are not those declared", came=shapes, expected=expected, do=f"mend [outputs] in {FILE}")
    for name, y, t in zip(spec.outputs, outputs, declared):
        if y.dtype.kind != ("f" if t.is_float else np.dtype(NUMPY[t.dtype]).kind):
            raise InputError("the reference's outputs are not those declared", came=f"{name} of {y.dtype}",
                             expected=f"{name} of {t.dtype}", do=f"mend [outputs] in {FILE}, or give the reference's output that type")


def _fails(where: str, error: Exception) -> InputError:
    """What a reference raised, in words."""
    if isinstance(error, InputError):
        return error
    if isinstance(error, ValueError) and "read-only" in str(error):
        return InputError("the reference writes into its input", came=f"{where}: {error}",
                          expected="a function that leaves its inputs alone", do="write `x = x * 2.0` in the place of `x *= 2.0`")
    return InputError("the reference fails on a sample", came=f"{where}: {type(error).__name__}: {error}",
                      do=f"mend it, or the sizes in {FILE}")
