"""The op table itself: every `ROWS` tuple of the modules in this folder. Floor 1."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import alpha.ops
from alpha.errors import GraphError, InputError
from alpha.ops.spec import OpSpec

_NOT_OPS = {"spec", "table", "numerics", "random", "special", "compose", "large"}


@cache
def table() -> dict[str, OpSpec]:
    """All rows by name, discovered from the folder; two rows of one name are a GraphError."""
    rows: dict[str, OpSpec] = {}
    for info in sorted(pkgutil.iter_modules(alpha.ops.__path__), key=lambda m: m.name):
        if info.name in _NOT_OPS:
            continue
        try:
            found = importlib.import_module(f"alpha.ops.{info.name}").ROWS
        except (SyntaxError, ImportError, AttributeError, NameError) as error:
            raise GraphError("a file of op rows cannot be loaded", came=f"alpha/ops/{info.name}.py: {type(error).__name__}: {error}",
                             expected="Python with ROWS", do="mend the file") from error
        for spec in found:
            if spec.name in rows:
                raise GraphError("two op rows share a name", came=spec.name)
            rows[spec.name] = spec
    return rows


def row(name: str) -> OpSpec:
    """One row by name; InputError listing the table when there is none."""
    found = table().get(name)
    if found is None:
        raise InputError("no such op", came=name, expected=", ".join(sorted(table())))
    return found
