"""Claims: when a speed figure of a component may be quoted. Floor 3.

Both halves of the perf gate are needed. Absolute: every case passes against its pin. Relative: the pinned code is today's, or today's code
was compared with it in alternating blocks and is not slower (`alpha bench ID --against TREE --record`).
"""

from __future__ import annotations

from collections.abc import Mapping

from alpha.registry.gates import cases_of
from alpha.registry.judge import PASS, Judgement, judge
from alpha.registry.pins import Pin, Pins, binding, key_of_record, same_code
from alpha.registry.record import Record


def why_no_claim(judgement: Judgement, pin: Pin | None, digests: Mapping[str, str], pins: Pins, record: Record) -> str:
    """Why no speed figure may rest on a record of the perf gate; empty when one may. `judgement`: of that record by that pin; `digests`:
    today's."""
    if pin is None or judgement.unpinned:
        return f"no pinned share of {', '.join(judgement.unpinned) or 'any case'} on this kind of machine"
    if judgement.verdict != PASS:
        return "; ".join([judgement.verdict, *judgement.reasons[:3]])
    if judgement.above_pin:
        return f"faster than its pin explains: {'; '.join(judgement.above_pin)}"
    if same_code(pin, digests):
        return ""
    compared = pins.relative(key_of_record(record)).get(record.component)
    if compared is None or dict(compared.digests) != binding(pin.code, digests):
        return "the code is not the pinned one, and no comparison of the two is recorded"
    missing = sorted(set(pin.shares) - {c.name for c in cases_of(compared)})
    if missing:
        return f"the comparison with the pinned code lacks {', '.join(missing)}"
    found = judge(compared)
    return "" if found.relative == PASS else f"against the pinned code: {found.relative}: {'; '.join(found.reasons[-3:])}"
