"""Records of benchmarks: what a speed figure in README or docs rests on. Floor 8.

`baselines/bench/<machine class>/<subject>.json`, written by `--record` alone: from a clean commit, with machine, driver, configuration,
hashes of the compiled kernels that were loaded, version of the FLOPS model, and the raw blocks of every arm with the GPU's clock, power and
temperature. A record holds its own hash. `load` computes figures anew from raw blocks, and holds others to each other, so that an edit of
either is refused. docs/benchmarks.md lists both kinds.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from alpha.bench import clocks, floor
from alpha.bench.peer import ROOT
from alpha.errors import CorruptError, InputError, MachineError
from alpha.profile import noise
from alpha.registry.evidence import write_atomic
from alpha.registry.gpu import GpuClass, family_of
from alpha.train.peak import SHEETS

FORMAT = 1
OUTPUTS = ("baselines/bench", "reports")
"""What recording writes; a change of it is no change of the code that runs."""
FOLDER = ROOT / "baselines" / "bench"
DIGITS = 6
"""Significant digits that a record keeps."""
NEAR = 2e-5
"""Relative difference of a figure from the one that its raw blocks give: both are rounded."""
LOOSE = 0.02
"""The same, of figures of a run that rest on other steps."""
CHOICES = 20_000
"""Choices of discarded rounds that are tried."""
MEMORY = {"H200": 144 << 30, "H100 80GB HBM3": 80 << 30, "H100 SXM": 80 << 30, "H100 PCIe": 80 << 30}
"""GPU -> bytes that no device of that kind exceeds; the keys of SHEETS."""


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
    """Keep a record, in place of the one before, which stays where this one cannot be written whole."""
    whole = rounded({"format": FORMAT, "machine": machine, "subject": subject, **body})
    whole["hash"] = hash_of(whole)
    verify(whole, subject)
    path = folder / machine / f"{subject}.json"
    write_atomic(path, _text(whole) + "\n")
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
    """CorruptError where a figure is not what the raw blocks of its line give, or contradicts another figure of the record."""
    try:
        _peak(name, body)
        for part, check in {"step": _step, "ranks": _ranks, "kernels": _kernels, "comm": _comm, "floor": _floors, "figures": _run}.items():
            if part in body:
                check(name, body)
    except (TypeError, ValueError, LookupError, AttributeError, StopIteration, ArithmeticError) as error:
        raise CorruptError("a benchmark's record is malformed", came=f"{name}: {type(error).__name__} {error}",
                           expected="what was recorded",
                           do="restore it from version control, or record anew with `alpha bench ... --record`") from error


def _peak(name: str, body: Mapping[str, Any]) -> None:
    """On a GPU whose data sheet is known, what MFU stands against is the sheet's, and every part of the record names that GPU."""
    sheet, held = _sheet(str(body.get("machine", ""))), [body, *(body[k] for k in ("step", "ranks", "floor") if k in body)]
    for part in held if sheet else ():
        flops, hardware = part.get("flops", {}), part.get("hardware")
        if "peak" in flops:
            _near(name, "flops: peak", flops["peak"], SHEETS[sheet][0])
        if hardware is not None and _sheet(hardware) != sheet:
            raise _wrong(name, "hardware", hardware, sheet)
    for part in held[1:]:
        for key in ("per_token", "peak") if part.get("flops") else ():
            _near(name, f"flops: {key}", part["flops"][key], body["flops"][key])


def _sheet(hardware: str) -> str:
    """The data sheet of a machine's key or a GPU's name; '' where none is known."""
    return next((sheet for sheet in SHEETS if sheet in hardware.replace("-", " ")), "")


def _step(name: str, body: Mapping[str, Any]) -> None:
    """A step's lines, its tokens and the variant that is quoted."""
    held = body["step"]
    _tokens(name, body, held)
    timed = {r["name"]: r for r in held["rows"] if _is_timed(name, r["name"], r)}
    peers = [r for r in timed.values() if not r["name"].startswith("ours")]
    _quoted(name, held["quoted"], peers)
    for label, row in timed.items():
        _lengths(name, label, row, row["beside"])
        of = timed[held["quoted"]] if label == "ours" and peers else row  # ours stands as it was beside the fastest
        if of is not row and (row["blocks"] != of["beside"] or row["beside"] != of["beside"]):
            raise _wrong(name, f"{label}: blocks", "others", "those beside the variant that is quoted")
        mask = _mask(name, label, row, of["blocks"], of["beside"])
        _line(name, label, row, row["beside"], mask)
        _near(name, f"{label}: ours", row["ours"], float(np.median(np.array([b[0] for b in row["beside"]])[mask])))
        _rate(name, label, row, held["tokens"], body, 1)
        _memory(name, label, row, body, label != "ours, launch by launch")


def _kernels(name: str, body: Mapping[str, Any]) -> None:
    """Calls: a ceiling has no blocks in its line, ours and every peer with figures owe them."""
    for k in body["kernels"]:
        call = f"{k['component']} {k['case']}"
        if not k["rows"]:
            continue
        ours, ceiling = k["rows"][:2]
        peers = len(k["rows"]) - 2
        for row in (ours, *k["rows"][2:]):
            label = f"{call} {row['name']}"
            if not _is_timed(name, label, row):
                continue
            _lengths(name, label, row, ours["blocks"])
            mask = _mask(name, label, row, row["blocks"], ours["blocks"])
            if any(mask & ~_mask(name, f"{call} ours", ours, ours["blocks"])):
                raise _wrong(name, f"{label}: kept", row["kept"], "rounds in which ours counts too")
            _line(name, label, row, ours["blocks"], mask, max(1, peers))
            _near(name, f"{label}: share", row["share"], ceiling["ns"] / row["ns"])
        for what, came, expected in (("rounds", k["rounds"], len(ours["blocks"])), ("discarded", k["discarded"], ours["discarded"]),
                                     ("share of the ceiling", ceiling["share"], 1.0),
                                     *((f"ceiling: ratio[{i}]", x, ceiling["ns"] / ours["ns"]) for i, x in enumerate(ceiling["ratio"]))):
            _near(name, f"{call}: {what}", came, expected)
        _ceiling(name, call, k, ceiling["ns"], _sheet(str(body.get("machine", ""))))


def _ceiling(name: str, call: str, k: Mapping[str, Any], ns: float, sheet: str) -> None:
    """The least time of a call: from the ceilings' blocks; records of before have none, and theirs is not above the data sheet."""
    for key in ("bytes", "work"):
        if not _number(k[key]) or k[key] < 0:
            raise _wrong(name, f"{call}: {key}", k[key], "a number")
    if k["limit"] not in ("bytes", "flops"):
        raise _wrong(name, f"{call}: limit", k["limit"], "bytes or flops")
    rates = {c["name"]: c["work"] / min(b[0] for b, kept in zip(c["blocks"], c["kept"], strict=True) if kept)
             for c in k.get("ceilings", ())}
    if rates:
        least = {"bytes": k["bytes"] / max(rate for which, rate in rates.items() if which != "product"),
                 "flops": k["work"] / rates["product"] if k["tensor_cores"] else 0.0}
        _near(name, f"{call} ceiling: ns", ns, max(least.values()))
        _near(name, f"{call}: ns of its limit", least[k["limit"]], max(least.values()))
    elif sheet and not (k["bytes"] if k["limit"] == "bytes" else k["work"]) / ns * 1e9 <= SHEETS[sheet][k["limit"] == "bytes"]:
        raise _wrong(name, f"{call} ceiling: ns", ns, f"no more {k['limit']} a second than the data sheet of the {sheet} has")


def _comm(name: str, body: Mapping[str, Any]) -> None:
    """Collectives: all blocks count, and the bounds of a ratio are its extremes."""
    for c in body["comm"]["cases"]:
        for row in c["rows"]:
            label = f"{c['name']} {row['name']}"
            if not _is_timed(name, label, row) or row["discarded"]:
                raise _wrong(name, f"{label}: discarded", row["discarded"], "all blocks")
            if c["name"] != f"{c['op']} {c['nbytes']} {'graph' if c['graph'] else 'alone'}":
                raise _wrong(name, "name of a case", c["name"], f"{c['op']} of {c['nbytes']} bytes, graph: {c['graph']}")
            _lengths(name, label, row, c["rows"][0]["blocks"])
            _near(name, f"{label}: ns", row["ns"], median(b[0] for b in row["blocks"]))
            ratios = sorted(a[0] / b[0] for a, b in zip(row["blocks"], c["rows"][0]["blocks"], strict=True))
            _bounds(name, f"{label}: ratio", row["ratio"], (ratios[0], math.exp(median(map(math.log, ratios))), ratios[-1]))


def _floors(name: str, body: Mapping[str, Any]) -> None:
    """The floors of a step, from its blocks and classes."""
    held = body["floor"]
    found = floor.figures(floor.from_plain(held))
    for what in ("step_ns", "watts"):
        _near(name, what, held[what], getattr(found, what))
    for which in ("known", "bare"):
        for what, figure in held[which].items():
            _near(name, f"{which} {what}", figure, getattr(getattr(found, which), what))


def _run(name: str, body: Mapping[str, Any]) -> None:
    """A whole run has no blocks in its record: its figures are held to each other."""
    f, flops = body["figures"], body["flops"]
    rate, workflow = f["tokens_per_second"], f["workflow_tokens_per_second"]
    for key, figure in f.items():
        if figure is not None and not (0 <= figure and (key.endswith("tokens_per_second") or figure <= 1)):
            raise _wrong(name, key, figure, "a rate, or a share from 0 to 1")
    for key in ("tokens_per_second", "workflow_tokens_per_second", "mfu", "goodput") if _sheet(body["machine"]) else ():
        if f[key] is None:
            raise _wrong(name, key, None, "a figure of every run on a GPU")
    devices = GpuClass.from_key(body["machine"]).devices if family_of(body["machine"]) == "cuda" else 1
    if rate is not None and f["mfu"] is not None:
        _near(name, "mfu", f["mfu"], rate * flops["per_token"] / (flops["peak"] * devices))
    if rate is not None and workflow is not None:
        if not workflow <= rate * (1 + NEAR):
            raise _wrong(name, "workflow_tokens_per_second", workflow, f"at most the steady {rate}")
        if f["goodput"] is not None and not workflow <= rate * f["goodput"] * (1 + LOOSE):
            raise _wrong(name, "goodput", f["goodput"], f"at least {workflow / rate:.3f}, as steps of a run are no faster than steady ones")
    if f.get("kernel_active") is not None and f.get("bubble") is not None and not f["kernel_active"] + f["bubble"] <= 1 + NEAR:
        raise _wrong(name, "kernel_active and bubble", f["kernel_active"] + f["bubble"], "at most all of a step")


def _ranks(name: str, body: Mapping[str, Any]) -> None:
    """A step on many GPUs: its lines, its tokens and the variant that is quoted."""
    ranks = body["ranks"]
    _tokens(name, body, ranks)
    _near(name, "gpus", ranks["gpus"], max(r["gpus"] for r in ranks["rows"]))
    timed = [r for r in ranks["rows"] if _is_timed(name, r["name"], r)]
    _quoted(name, ranks["quoted"], [r for r in timed if r["library"] != "ours" and r["gpus"] == ranks["gpus"]])
    for row in timed:
        _of_ranks(name, body, row)


def _of_ranks(name: str, body: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    """A line of a step on many GPUs: what it counts is the batch of all of its GPUs, what it scales by stands in the record."""
    ranks, label, found = body["ranks"], row["name"], row["efficiency"][1]
    _near(name, f"{label}: tokens of a step", row["tokens"], row["gpus"] * ranks["tokens"])
    _rate(name, label, row, row["tokens"], body, row["gpus"])
    _memory(name, label, row, body, row["together"])
    _lengths(name, label, row, row["beside"], *([row["alone"]] if row["alone"] else []))
    if found is not None and row["library"] != "ours":
        alone = next(r for r in ranks["rows"] if r["name"] == row["against"])
        _near(name, f"{label}: efficiency", found, row["tokens_per_second"] / (row["gpus"] * alone["tokens_per_second"]))
    if found is None and row["library"] == "ours" and row["gpus"] > 1:
        raise _wrong(name, f"{label}: efficiency", found, "that beside ours on one GPU")
    for figure, shares in (("exposed", "exposures"), ("least", "leasts")):
        if (row.get(figure) is None) != (not row.get(shares)):
            raise _wrong(name, f"{label}: {figure}", row.get(figure), f"what {shares} give")
    if row["exposed"] is not None:
        if len(row["exposures"]) != len(row["blocks"]) or not all(0 <= x <= 1 for x in row["exposures"]):
            raise _wrong(name, f"{label}: exposed communication", row["exposed"], "a share of each block, from its stamps")
        leasts = row.get("leasts")  # records of before have none
        if leasts is not None and (len(leasts) != len(row["blocks"]) or not all(0 <= x <= y for x, y in zip(leasts, row["exposures"]))):
            raise _wrong(name, f"{label}: least exposed communication", row["least"], "at most the worst rank's, of each block")

    def holds(mask: np.ndarray) -> None:
        _line(name, label, row, row["beside"], mask)
        if found is not None and row["library"] == "ours":
            one, many = (np.array([b[0] for b in row[key]])[mask] for key in ("alone", "blocks"))
            _bounds(name, f"{label}: efficiency", row["efficiency"], _ratio(one, many, row["together"], 1))
        for what, figure, blocks in (("exposed", row["exposed"], row.get("exposures")), ("least", row.get("least"), row.get("leasts"))):
            if figure is not None:
                _near(name, f"{label}: 1 + {what} communication", 1 + figure, 1 + float(np.median(np.array(blocks)[mask])))

    refused: CorruptError | None = None
    for mask in _choices(name, label, row):
        try:
            return holds(mask)
        except CorruptError as error:
            refused = refused or error
    raise refused or _wrong(name, f"{label}: discarded", row["discarded"], "a number of its rounds")


def _choices(name: str, label: str, row: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """Rounds that may have counted. On many GPUs clocks of rounds that are not in the line were judged with it: without a mask, any choice
    of so many that explains all figures of the line at once."""
    lost, n = row["discarded"], len(row["blocks"])
    if row.get("kept"):
        yield _mask(name, label, row)
    elif 0 <= lost <= noise.MOST_DISCARDED * n and math.comb(n, lost) <= CHOICES:
        for gone in combinations(range(n), lost):
            mask = np.ones(n, bool)
            mask[list(gone)] = False
            yield mask


# -- of a line -----------------------------------------------------------------------------------------------------------------


def _is_timed(name: str, label: str, row: Mapping[str, Any]) -> bool:
    """Whether a line has figures: then all that they rest on is there and a number; else it has none at all."""
    ratio = row["ratio"]
    if not isinstance(ratio, list) or len(ratio) != 3:
        raise _wrong(name, f"{label}: ratio", ratio, "its lower bound, itself and its upper bound")
    if row["ns"] is None:
        if any(x is not None for x in (*ratio, row.get("tokens_per_second"), row.get("mfu"), row.get("share"))):
            raise _wrong(name, f"{label}: ns", None, "a time, where other figures stand")
        return False
    for key, x in (("ns", row["ns"]), ("ratio[1]", ratio[1])):
        if not _number(x) or x <= 0:
            raise _wrong(name, f"{label}: {key}", x, "a number above 0")
    if not isinstance(row["discarded"], int) or isinstance(row["discarded"], bool):
        raise _wrong(name, f"{label}: discarded", row["discarded"], "a number of rounds")
    difference, allowed = row.get("difference"), row.get("allowed")
    if (difference is None) != (allowed is None) or (difference is not None and not difference <= allowed):
        raise _wrong(name, f"{label}: difference", difference, f"at most {allowed}, as nothing else is timed")
    for what, held in (row.get("change") or {}).items():  # records of before have none
        if isinstance(held, Mapping) and not (_number(held["difference"]) and 0 <= held["difference"] <= held["allowed"]):
            raise _wrong(name, f"{label}: change, {what}", held["difference"], f"at most {held['allowed']}, as nothing else is timed")
    for key in ("blocks", "beside", "alone"):
        blocks = row.get(key, [])
        if (key == "blocks" and not blocks) or not isinstance(blocks, list) or not all(
                isinstance(b, list) and b and all(_number(x) for x in b[:2]) and b[0] > 0 for b in blocks):
            raise _wrong(name, f"{label}: {key}", blocks if not blocks else "...", "[ns, MHz, ...] of each round")
    return True


def _number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _lengths(name: str, label: str, row: Mapping[str, Any], *others: Sequence[Any]) -> None:
    for other in others:
        if len(other) != len(row["blocks"]):
            raise _wrong(name, f"{label}: blocks", len(row["blocks"]), f"{len(other)}, as many as beside them")


def _mask(name: str, label: str, row: Mapping[str, Any], *arms: Sequence[Sequence[float]]) -> np.ndarray:
    """The rounds of a line that count: as recorded; in records of before, as the clocks of both arms say."""
    n = len(row["blocks"])
    if row.get("kept"):
        mask = np.array(row["kept"])
        if mask.dtype != bool or mask.shape != (n,):
            raise _wrong(name, f"{label}: kept", row["kept"], f"whether each of {n} rounds counts")
    else:
        mask = np.ones(n, bool)
        for arm in arms:
            if all(len(b) > 1 for b in arm):
                mask &= ~noise.throttled_gpu([b[1] for b in arm], [0] * n)
    lost = n - int(mask.sum())
    if row["discarded"] != lost or lost > noise.MOST_DISCARDED * n:
        raise _wrong(name, f"{label}: discarded", row["discarded"], f"{lost}, at most half of {n}")
    return mask


def _line(name: str, label: str, row: Mapping[str, Any], beside: Sequence[Sequence[float]], mask: np.ndarray, family: int = 1) -> None:
    """The time and the ratio with its bounds, from the rounds that count."""
    own, ours = (np.array([b[0] for b in blocks])[mask] for blocks in (row["blocks"], beside))
    _near(name, f"{label}: ns", row["ns"], float(np.median(own)))
    same = row["blocks"] == beside
    _bounds(name, f"{label}: ratio", row["ratio"], (1.0, 1.0, 1.0) if same else _ratio(own, ours, row.get("together", True), family))


def _ratio(theirs: np.ndarray, ours: np.ndarray, paired: bool, family: int) -> tuple[float, float, float]:
    return clocks.ratio(theirs, ours, family) if paired else (math.nan, float(np.median(theirs / ours)), math.nan)


def _bounds(name: str, what: str, figures: Sequence[float | None], expected: Sequence[float]) -> None:
    for i, (figure, x) in enumerate(zip(figures, expected, strict=True)):
        if not math.isfinite(x):
            if figure is not None:
                raise _wrong(name, f"{what}[{i}]", figure, "none: too few rounds for a bound, or not in alternation")
        else:
            _near(name, f"{what}[{i}]", figure, x)


def _rate(name: str, label: str, row: Mapping[str, Any], tokens: int, body: Mapping[str, Any], gpus: int) -> None:
    rate = tokens / row["ns"] * 1e9
    _near(name, f"{label}: tokens/s", row["tokens_per_second"], rate)
    _near(name, f"{label}: MFU", row["mfu"], rate * body["flops"]["per_token"] / (gpus * body["flops"]["peak"]))


def _tokens(name: str, body: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Tokens of a step of one GPU are what the shape says, and what the run file says where it is kept."""
    batch, sequence = (int(x) for x in held["shape"].split(" tokens")[0].split(" x "))
    _near(name, "tokens", held["tokens"], batch * sequence)
    config = dict(line.split(" = ", 1) for line in body.get("config", ()) if line.startswith(("batch = ", "sequence = ")))
    if config:
        _near(name, "config: batch x sequence", int(config["batch"]) * int(config["sequence"]), held["tokens"])


def _quoted(name: str, quoted: str, peers: Sequence[Mapping[str, Any]]) -> None:
    """The fastest variant by its ratio; equal ones are equal to six digits."""
    least = min((r["ratio"][1] for r in peers), default=None)
    fastest = [r["name"] for r in peers if r["ratio"][1] == least] or [""]
    if quoted not in fastest:
        raise _wrong(name, "quoted", quoted, fastest[0] or "no peer")


def _memory(name: str, label: str, row: Mapping[str, Any], body: Mapping[str, Any], counted: bool) -> None:
    """Bytes of the device: on a GPU that is known above 0 where they are counted, and no more than it has."""
    held, sheet = row["memory"], _sheet(str(body.get("machine", "")))
    if not _number(held) or held < 0 or (sheet and ((counted and not held) or held > MEMORY[sheet])):
        raise _wrong(name, f"{label}: memory", held, "bytes of its device")


def _near(name: str, what: str, figure: object, expected: float) -> None:
    if not isinstance(figure, int | float) or not abs(figure - expected) <= NEAR * abs(expected):
        raise _wrong(name, what, figure, f"{expected:g}")


def _wrong(name: str, what: str, came: object, expected: str) -> CorruptError:
    return CorruptError("a figure of a benchmark's record is not what its raw blocks give", came=f"{name}, {what} = {came}",
                        expected=expected, do="restore it from version control, or record anew with `alpha bench ... --record`")
