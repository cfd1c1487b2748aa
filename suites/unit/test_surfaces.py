"""Public surfaces are frozen: commands and their options, config keys, op rows and their operands, formats, views, exit codes.

`baselines/surfaces.txt` is the list as promised to users; it is edited by hand, on purpose, in the commit that changes a surface. To see
what stands: `python suites/unit/test_surfaces.py`.
"""

from __future__ import annotations

import argparse
import difflib
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from alpha import cli, config, errors
from alpha.checkpoint import folders
from alpha.component import KINDS
from alpha.data import shards, tokenizer
from alpha.flops import v1
from alpha.ops.table import table
from alpha.profile import schema
from alpha.registry import record
from alpha.registry.gates import GATES
from alpha.train import rundir

FROZEN = Path(__file__).parents[2] / "baselines" / "surfaces.txt"


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[str]:
    options = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in sorted(action.choices.items()):
                yield from _commands(sub, f"{path} {name}")
        elif not isinstance(action, argparse._HelpAction):
            options.append("/".join(action.option_strings) or action.dest.upper())
    yield f"command {path}: {' '.join(sorted(options))}"


def surfaces() -> list[str]:
    """One line a promise, sorted."""
    lines = list(_commands(cli.parser(), "alpha"))
    section = ""
    for line in config.table().splitlines():
        if line.startswith("### "):
            section = line[4:]
        elif line.startswith("| `"):
            lines.append("config {} {}: {}, default {}".format(section, *(c.strip() for c in line.split("|")[1:4])))
    lines += [f"op {s.name}({', '.join(s.inputs)}) -> {', '.join(s.outputs)}" for s in table().values()]
    lines += [f"kind {k}" for k in KINDS] + [f"gate {g}" for g in GATES]
    lines += [f"format evidence {record.FORMAT}", f"format checkpoint {folders.VERSION}", f"format tokenizer {tokenizer.VERSION}",
              f"format shards {shards.VERSION}", f"format metrics {schema.VERSION}", f"format manifest {rundir.MANIFEST_FORMAT}",
              f"format flops {v1.VERSION}"]
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(schema.TABLES + schema.VIEWS)
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'view'").fetchall():
            lines.append(f"view {name}: {' '.join(column for _, column, *_ in db.execute(f'PRAGMA table_info({name})'))}")
    lines += [f"exit {e.exit_code} {e.__name__}" for e in vars(errors).values()
              if isinstance(e, type) and issubclass(e, errors.AlphaError)]
    return sorted(lines)


def test_surfaces_are_what_was_promised() -> None:
    promised, stands = FROZEN.read_text().splitlines(), surfaces()
    changed = [line for line in difflib.unified_diff(promised, stands, "promised", "stands", lineterm="", n=0)]
    assert not changed, "a public surface changed; if that is meant, edit baselines/surfaces.txt:\n" + "\n".join(changed)


def test_config_reference_is_the_dataclasses() -> None:
    """docs/config.md is generated: `python -c "from alpha import config; print(config.table())"` behind its first lines."""
    text = (FROZEN.parents[1] / "docs" / "config.md").read_text()
    assert config.table() in text, "docs/config.md is not what alpha/config.py says; generate it again"


if __name__ == "__main__":
    print("\n".join(surfaces()))
