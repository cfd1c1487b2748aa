"""What is asked of evidence, counted and committed, so that less is never asked without a reason. Floor 3.

`baselines/asked.txt` holds a line per item, name and number: reference classes, those that must be signed, gates owed, runs, cases
of each record, planted faults, catches with a record, the score of seeded mutants. An item that falls, or goes, turns the merge gate red.
So does a digest that changes: that of the policy, and those of what each row of the op table says (statements.py).
`alpha gate asked --why TEXT` writes the file anew and keeps names, numbers and reason in `baselines/asked.toml`; the merge gate asks for
these where the history shows that the file itself fell.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from alpha.component import Catalogue
from alpha.errors import CorruptError
from alpha.files import read_regular
from alpha.registry import catches, mutants, policy, signatures, statements
from alpha.registry.cases import Repeats
from alpha.registry.evidence import load_file, path_of, reference_classes, write_atomic
from alpha.registry.faults import Fault
from alpha.registry.gates import TABLE, cases_of
from alpha.registry.gpu import sort
from alpha.registry.syntax import meaning
from alpha.tomlfile import parse_toml

POLICY = ("claims", "distance", "gates", "gpu", "judge", "machine", "pins", "policy", "signatures")
"""Modules beside this one that say what is owed, by what it is judged and which class a machine is of."""

POLICY_DIGEST = "policy"
ROW = "row "
"""Items of these names, the second one's followed by a row and an aspect, have digests for values: any change asks for a reason."""


def is_digest(name: str) -> bool:
    """Whether an item's value is no number."""
    return name == POLICY_DIGEST or name.startswith(ROW)


def texts() -> dict[str, str]:
    """Module -> text of the policy."""
    return {name: (Path(__file__).with_name(f"{name}.py")).read_text(encoding="utf-8") for name in POLICY}


def policy_digest(sources: Mapping[str, str]) -> str:
    """Of the policy without comments and docstrings."""
    return hashlib.sha256("\0".join(f"{name} {meaning(text)}" for name, text in sorted(sources.items())).encode()).hexdigest()[:32]


def today(catalogue: Catalogue, root: Path, faults: Iterable[Fault], sources: Mapping[str, str] | None = None,
          rows: Mapping[str, str] | None = None) -> dict[str, str]:
    """name -> value of everything that is asked now, from code and from the committed evidence of the reference classes. `sources`: the
    policy's texts; `rows`: digests of what rows say; by default those of the package."""
    references = reference_classes(root)
    found = {POLICY_DIGEST: policy_digest(texts() if sources is None else sources)}
    found |= {f"{ROW}{name}": digest for name, digest in (statements.digests() if rows is None else rows).items()}
    found |= {f"reference {key}": "1" for key in references.values()}
    found |= {f"signed {key}": "1" for key in signatures.signers(root)}
    found |= {f"runs {profile} {backend} {gate.name}": str(n) for gate in TABLE for (profile, backend), n in gate.repeats.items()}
    found |= {f"fault {fault.id}": "1" for fault in faults}
    for component in catalogue:
        found |= {f"owed {component.id} {gate}": "1" for gate in policy.owed(component)}
        if sort(component) in references:
            for gate, record in load_file(path_of(root, references[sort(component)], component.id)).items():
                # which and how many samples a kernel's bits are repeated on is drawn
                drawn = component.kind == "kernel" and any(isinstance(c, Repeats) for c in cases_of(record))
                found[f"cases {component.id} {gate}"] = "1" if drawn else f"{sum(c.n for c in cases_of(record)):g}"
    for key in references.values():
        found[f"recorded {key}"] = str(sum(c.record is not None for c in catches.load_catches(root, key).values()))
    scores = mutants.load(root)
    if scores is not None:
        found |= {"mutants caught": f"{scores[0].share:.4f}", "mutants counted": str(scores[0].areas[mutants.ALL][1])}
    return found


def path(root: Path) -> Path:
    """The file that belongs to an evidence root: beside its folder."""
    return root.parent / "asked.txt"


def reasons_path(root: Path) -> Path:
    """The file of reasons, beside it."""
    return root.parent / "asked.toml"


def read(text: str) -> dict[str, str]:
    """name -> value; CorruptError where a line is none, or the lines are not sorted."""
    lines = text.splitlines()
    found: dict[str, str] = {name: value for line in lines if " " in line for name, value in [line.rsplit(" ", 1)]}
    if len(found) != len(lines) or lines != sorted(lines) or not all(_number(v) >= 0 for n, v in found.items() if not is_digest(n)):
        raise CorruptError("the list of what is asked cannot be read", came=f"{len(lines)} lines", expected="sorted lines, name and number",
                           do="restore it from version control, or run `alpha gate asked`")
    return found


def write(root: Path, items: Mapping[str, str]) -> None:
    """Write the list."""
    write_atomic(path(root), "".join(line + "\n" for line in sorted(f"{name} {value}" for name, value in items.items())))


def committed(root: Path) -> dict[str, str]:
    """The list that lies beside a root; {} where there is none."""
    return read(read_regular(path(root)).decode("ascii", "replace")) if path(root).is_file() else {}


def reasons(root: Path) -> dict[str, str]:
    """'name value' -> why it may be as little as that; CorruptError where the file is no such list."""
    where = reasons_path(root)
    if not where.is_file():
        return {}
    try:
        entries = parse_toml(read_regular(where)).get("renewed", [])
        found = {str(item): str(entry["why"]).strip() for entry in entries for item in entry["items"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError("the reasons for what is no longer asked cannot be read", came=f"{where.name}: {error}",
                           expected="[[renewed]] tables of items and why", do="restore it from version control") from error
    return {item: why for item, why in found.items() if why}


def fallen(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """'name value' of each item of which less is asked now than before; of digests, each that is another one."""
    wrong = []
    for name, value in before.items():
        new = now.get(name, "0")
        if (new != value) if is_digest(name) else not _number(new) >= _number(value):
            wrong.append(f"{name} {new}")
    return sorted(wrong)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def _quoted(text: str) -> str:
    """A TOML string. JSON writes what lies beyond U+FFFF as two halves, which TOML refuses; a half alone is no character at all."""
    return json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")


def renew(root: Path, now: Mapping[str, str], why: str) -> list[str]:
    """Write the list anew and keep the reason beside what fell; returns what fell. Nothing is written where something fell without one."""
    fell = fallen(committed(root), now)
    if fell and not why.strip():
        return fell
    if fell:
        old = reasons_path(root).read_text(encoding="utf-8") if reasons_path(root).is_file() else ""
        listed = "".join(f"    {_quoted(item)},\n" for item in fell)
        entry = f"[[renewed]]\nwhy = {_quoted(why.strip())}\nitems = [\n{listed}]\n"
        write_atomic(reasons_path(root), f"{old}\n{entry}" if old else entry)
    write(root, now)
    return fell


def problems(now: Mapping[str, str], listed: Mapping[str, str], base: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """What the merge gate has against the list. now: today's items; listed: the committed list; base: that of the commit that a branch
    left; given: reasons."""
    if not listed:
        return ["no list of what is asked of evidence is committed"]
    wrong = [f"less is asked than the committed list says: {_shown(fell)}" for fell in [fallen(listed, now)] if fell]
    silent = [item for item in fallen(base, listed) if item not in given]
    return wrong + [f"the list itself fell, and no reason is given: {_shown(silent)}"] * bool(silent)


def _shown(items: Sequence[str]) -> str:
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")
