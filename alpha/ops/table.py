"""The op table itself: every `ROWS` tuple of the modules in this folder. Floor 1."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import alpha.ops
from alpha.errors import GraphError, InputError
from alpha.ops.spec import OpSpec

_NOT_OPS = {"spec", "table", "numerics", "random", "special"}


@cache
def table() -> dict[str, OpSpec]:
    """All rows by name, discovered from the folder; two rows of one name are a GraphError."""
    rows: dict[str, OpSpec] = {}
    for info in sorted(pkgutil.iter_modules(alpha.ops.__path__), key=lambda m: m.name):
        if info.name in _NOT_OPS:
            continue
        for spec in importlib.import_module(f"alpha.ops.{info.name}").ROWS:
            if spec.name in rows:
                raise GraphError("two op rows share a name", came=spec.name)
            rows[spec.name] = spec
    return rows


_derived: dict[str, OpSpec] = {}


def add_derived(spec: OpSpec) -> None:
    """Add a row derived from a fusion pattern (alpha/passes/fuse.py); the same name twice is a GraphError."""
    if spec.name in table() or spec.name in _derived:
        raise GraphError("two op rows share a name", came=spec.name)
    _derived[spec.name] = spec


def row(name: str) -> OpSpec:
    """One row by name; InputError naming the near ones when there is none."""
    found = table().get(name) or _derived.get(name)
    if found is None:
        raise InputError("no such op", came=name, expected=", ".join(sorted([*table(), *_derived])))
    return found
