"""Record: the raw result of one gate on one component. Floor 3. Verdicts are computed from it (judge.py), never stored.

One record is one sorted JSON line of at most 8 KB in `baselines/evidence/<machine class>/<component>.jsonl`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alpha.errors import CorruptError
from alpha.files import json_of

FORMAT = 1
MAX_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class Record:
    """One gate's raw numbers.

    component, gate  what was measured
    machine          machine class key (machine.py) on which it was measured
    digests          name -> hex: 'implementation', 'row' (op row, kernels only), 'cases' (samples or contract), 'measure' (engine)
    nonce            hex from OS entropy; every input of every case derives from (nonce, case name)
    declared         number of cases declared before anything ran; `cases` must have as many entries
    cases            raw numbers, one mapping per case, with 'name' and by gate:
                     parity      kind 'relative': ratio, floor | 'exact': error | 'contract': error, bound, cases
                                 ratio = worst err_i / naive_tile(i) over elements with err_i > half ulp_i + bound_i (0 if none);
                                 floor = the same ratio for the computation done one precision lower, or null where single rounding
                     gradient    error (worst relative to the finite difference's own scale), bound (derived), directions
                     determinism runs, distinct (number of distinct output hashes), digest
                     faults      error 0 or 1, bound 0
                     perf        share (of the ceiling measured in the same run), times_ns (medians of blocks)
    probes           parity of kernels: [case, output index, flat index, hex bits] at nonce-chosen places; CI recomputes them
    environment      library versions, thread count, clock source; informative
    """

    component: str
    gate: str
    machine: str
    digests: Mapping[str, str]
    nonce: str
    declared: int
    cases: Sequence[Mapping[str, Any]]
    probes: Sequence[Sequence[Any]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def line(self) -> str:
        """Canonical JSON with its content hash, without newline; CorruptError if it would exceed 8 KB."""
        body = vars(self)
        text = canonical({**body, "content": content_hash(body)})
        if len(text) > MAX_BYTES:
            raise CorruptError("an evidence line is too long", came=f"{len(text)} bytes for {self.component} {self.gate}",
                               expected=f"at most {MAX_BYTES}", do="record fewer cases per line or shorter names")
        return text


def canonical(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces, no NaN literals (non-finite floats are the strings 'nan', 'inf', '-inf')."""
    return _written(_plain(value))


def content_hash(body: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of a record without its 'content' field."""
    return _hash(canonical({k: v for k, v in body.items() if k != "content"}))


def sealed(body: Mapping[str, Any]) -> tuple[str, str]:
    """Content hash and line of a body, without newline, that JSON text gave: nothing in it has to be made plain. ValueError for a number
    beyond floats, which no canonical JSON holds."""
    content = _hash(_written({k: v for k, v in body.items() if k != "content"}))
    return content, _written({**body, "content": content})


def parse(line: str, where: str) -> Record:
    """A record from its line; CorruptError naming `where` if it is torn, edited (content hash) or of another format."""
    try:
        body = json_of(line)
        claimed = body.pop("content")
        record = Record(**body)
        shaped(record)
        content, _ = sealed(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError("an evidence line cannot be read", came=f"{where}: {error}", expected="one canonical JSON record per line",
                           do="restore the file from version control or rerun the gate") from error
    if record.format != FORMAT:
        raise CorruptError("evidence of another format", came=f"{where}: format {record.format}", expected=FORMAT, do="rerun the gate")
    if claimed != content:
        raise CorruptError("evidence was edited by hand: its content hash does not match", came=where, expected=claimed,
                           do="restore the file from version control or rerun the gate")
    return record


def shaped(record: Record) -> None:
    """ValueError unless every field is of its type: whoever reads a record may lean on that."""
    for name in ("component", "gate", "machine", "nonce"):
        if not isinstance(getattr(record, name), str):
            raise ValueError(f"{name} is no text")
    for name in ("digests", "environment"):
        table = getattr(record, name)
        if not isinstance(table, dict) or not all(isinstance(x, str) for x in table.values()):
            raise ValueError(f"{name} is no table of texts")
    if type(record.declared) is not int or type(record.format) is not int:
        raise ValueError("declared or format is no integer")
    if not isinstance(record.cases, list) or not all(isinstance(c, dict) for c in record.cases):
        raise ValueError("cases is no list of tables")
    if not isinstance(record.probes, list) or not all(isinstance(p, list) for p in record.probes):
        raise ValueError("probes is no list of lists")


def _written(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    return value.item() if hasattr(value, "item") else value
