"""Records of benchmarks: what a speed figure in README or docs rests on. Floor 8.

`baselines/bench/<machine class>/<subject>.json`, written by `--record` alone: from a clean commit, with machine, driver, configuration,
hashes of the compiled kernels that were loaded, version of the FLOPS model, and the raw blocks of every arm with the GPU's clock, power and
temperature. A record holds its own hash, and `load` computes its figures anew from its raw blocks, so that an edited one is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from alpha.bench import floor
from alpha.bench.peer import ROOT
from alpha.errors import CorruptError, InputError, MachineError

FORMAT = 1
OUTPUTS = ("baselines/bench", "reports")
"""What recording writes; a change of it is no change of the code that runs."""
FOLDER = ROOT / "baselines" / "bench"
DIGITS = 6
"""Significant digits that a record keeps."""
NEAR = 1e-4
"""Relative difference of a figure from the one that its raw blocks give: both are rounded."""


def _git(*words: str, root: Path) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def clean_commit(root: Path = ROOT) -> str:
    """The commit of the code that runs. InputError where a file differs from it, or it cannot be known."""
    commit = _git("rev-parse", "HEAD", root=root) if (root / ".git").exists() else None
    changed = _git("status", "--porcelain", "--", ".", *(f":(exclude){x}" for x in OUTPUTS), root=root) if commit else None
    if commit is None or changed is None:
        raise InputError("a record names its commit, and this source tree has none", came=root, expected="a git checkout",
                         do="clone the repository and record there")
    if changed:
        files = [line.split(maxsplit=1)[1] for line in changed.splitlines()]
        raise InputError("only a clean commit is recorded", came=f"{len(files)} files differ, such as {files[0]}", expected="no changes",
                         do="commit or remove them, and run the benchmark again")
    return commit


def unknown_commit(commit: str, root: Path = ROOT) -> str:
    """Why a record's commit is none of this history; '' when it is. MachineError where the history is not here."""
    if _git("rev-parse", "--is-shallow-repository", root=root) != "false":
        raise MachineError("the history is not here, so commits of records cannot be looked up", came=root, expected="a whole git clone",
                           do="run `git fetch --unshallow`, or take a clone")
    known = _git("merge-base", "--is-ancestor", commit, "HEAD", root=root) is not None
    return "" if known else f"commit {commit[:12]} is not in the history"


# -- files ---------------------------------------------------------------------------------------------------------------------


def hash_of(body: Mapping[str, Any]) -> str:
    """sha256 of everything but the hash itself."""
    bare = {k: v for k, v in body.items() if k != "hash"}
    return hashlib.sha256(json.dumps(bare, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def rounded(x: Any) -> Any:
    """Plain data with DIGITS significant digits; figures that are not there are null."""
    if isinstance(x, bool) or x is None or isinstance(x, str | int):
        return x
    if isinstance(x, float):
        return float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {str(k): rounded(v) for k, v in x.items()}
    return [rounded(y) for y in x]


def write(machine: str, subject: str, body: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    """Keep a record, in place of the one before."""
    whole = rounded({"format": FORMAT, "machine": machine, "subject": subject, **body})
    whole["hash"] = hash_of(whole)
    verify(whole, subject)
    path = folder / machine / f"{subject}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(whole) + "\n", encoding="utf-8")
    return path


def _text(x: Any, indent: str = "") -> str:
    """JSON, a list of numbers on one line."""
    inner = indent + " "
    if isinstance(x, dict) and x:
        return "{\n" + ",\n".join(f"{inner}{json.dumps(k)}: {_text(v, inner)}" for k, v in x.items()) + f"\n{indent}}}"
    if isinstance(x, list) and any(isinstance(y, dict) for y in x):
        return "[\n" + ",\n".join(inner + _text(y, inner) for y in x) + f"\n{indent}]"
    return json.dumps(x)


def load(path: Path) -> dict[str, Any]:
    """A record. CorruptError if it is not what `--record` wrote."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        right = isinstance(body, dict) and body.get("format") == FORMAT and body.get("hash") == hash_of(body)
        right = right and (body["machine"], body["subject"]) == (path.parent.name, path.stem)
    except (OSError, ValueError, KeyError) as error:
        raise CorruptError("a benchmark's record cannot be read", came=f"{path}: {error}", do="restore it from version control") from error
    if not right:
        raise CorruptError("a benchmark's record is not what was recorded", came=path, expected=f"format {FORMAT}, its own hash and place",
                           do="restore it from version control, or record anew with `alpha bench ... --record`")
    verify(body, str(path))
    return dict(body)


def records(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """All of them, by machine and subject."""
    return [load(path) for path in sorted(folder.glob("*/*.json"))]


# -- figures against raw blocks ------------------------------------------------------------------------------------------------


def verify(body: Mapping[str, Any], name: str) -> None:
    """CorruptError where a figure is not what the raw blocks of its line give."""
    for label, row, beside, tokens in _timed(body):
        own, ours = ([b[0] for b in blocks] for blocks in (row["blocks"], beside))
        lost = row["discarded"]
        _same(name, f"{label}: ns", row["ns"], own, lost)
        logs = [math.log(a / b) for a, b in zip(own, ours, strict=True)]
        _same(name, f"{label}: 1 + log of the ratio", 1 + math.log(row["ratio"][1]), [1 + x for x in logs], lost)
        if tokens:
            rate = tokens / row["ns"] * 1e9
            _near(name, f"{label}: tokens/s", row["tokens_per_second"], rate)
            _near(name, f"{label}: MFU", row["mfu"], rate * body["flops"]["per_token"] / body["flops"]["peak"])


    for row in body["ranks"]["rows"] if "ranks" in body else ():
        _of_ranks(name, body, row)
    if "floor" in body:
        _floors(name, body["floor"])


def _floors(name: str, held: Mapping[str, Any]) -> None:
    """The floors of a step, from its blocks and classes."""
    found = floor.figures(floor.from_plain(held))
    for what in ("step_ns", "watts"):
        _near(name, what, held[what], getattr(found, what))
    for which in ("known", "bare"):
        for what, figure in held[which].items():
            _near(name, f"{which} {what}", figure, getattr(getattr(found, which), what))


def _of_ranks(name: str, body: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    """A line of a step on many GPUs: what it counts is the batch of all of its GPUs, what it scales by stands in the record."""
    ranks, label = body["ranks"], row["name"]
    if row["ns"] is None:
        return
    _near(name, f"{label}: tokens of a step", row["tokens"], row["gpus"] * ranks["tokens"])
    rate = row["tokens"] / row["ns"] * 1e9
    _near(name, f"{label}: tokens/s", row["tokens_per_second"], rate)
    _near(name, f"{label}: MFU", row["mfu"], rate * body["flops"]["per_token"] / (row["gpus"] * body["flops"]["peak"]))
    found = row["efficiency"][1]
    if found is not None and row["library"] == "ours":
        logs = [math.log(one[0] / many[0]) for one, many in zip(row["alone"], row["blocks"], strict=True)]
        _same(name, f"{label}: 1 + log of the efficiency", 1 + math.log(found), [1 + x for x in logs], row["discarded"])
    elif found is not None:
        alone = next(r for r in ranks["rows"] if r["name"] == row["against"])
        _near(name, f"{label}: efficiency", found, rate / (row["gpus"] * alone["tokens_per_second"]))
    if row["exposed"] is not None:
        if len(row["exposures"]) != len(row["blocks"]) or not all(0 <= x <= 1 for x in row["exposures"]):
            raise _wrong(name, f"{label}: exposed communication", row["exposed"], "a share of each block, from its stamps")
        _same(name, f"{label}: 1 + exposed communication", 1 + row["exposed"], [1 + x for x in row["exposures"]], row["discarded"])
        if "leasts" in row:  # records of before have none
            if len(row["leasts"]) != len(row["blocks"]) or not all(0 <= x <= y for x, y in zip(row["leasts"], row["exposures"])):
                raise _wrong(name, f"{label}: least exposed communication", row["least"], "at most the worst rank's, of each block")
            _same(name, f"{label}: 1 + least exposed communication", 1 + row["least"], [1 + x for x in row["leasts"]], row["discarded"])


def _timed(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], Sequence[Sequence[float]], int]]:
    """(name, line, blocks of ours in the same rounds, tokens of a step) of all lines that were timed; a ceiling has its fastest block."""
    if "comm" in body:
        return [(f"{c['name']} {r['name']}", r, c["rows"][0]["blocks"], 0) for c in body["comm"]["cases"] for r in c["rows"]]
    if "ranks" in body:
        return [(r["name"], r, r["beside"], 0) for r in body["ranks"]["rows"] if r["ns"] is not None]
    if "step" in body:
        return [(r["name"], r, r["beside"], body["step"]["tokens"]) for r in body["step"]["rows"] if r["ns"] is not None]
    return [(f"{k['component']} {k['case']} {r['name']}", r, k["rows"][0]["blocks"], 0) for k in body.get("kernels", ()) for r in k["rows"]
            if r["ns"] is not None and r["blocks"]]


def _same(name: str, what: str, figure: float, raw: Sequence[float], discarded: int) -> None:
    if discarded:  # which rounds went is not in the record: the median of the rest lies among them
        if not min(raw) * (1 - NEAR) <= figure <= max(raw) * (1 + NEAR):
            raise _wrong(name, what, figure, f"{min(raw):g} to {max(raw):g}")
    else:
        _near(name, what, figure, median(raw))


def _near(name: str, what: str, figure: float, expected: float) -> None:
    if not abs(figure - expected) <= NEAR * abs(expected):
        raise _wrong(name, what, figure, f"{expected:g}")


def _wrong(name: str, what: str, came: float, expected: str) -> CorruptError:
    return CorruptError("a figure of a benchmark's record is not what its raw blocks give", came=f"{name}, {what} = {came}",
                        expected=expected, do="restore it from version control, or record anew with `alpha bench ... --record`")
