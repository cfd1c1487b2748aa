"""How many bytes of the activation arena hold something needed, launch by launch: the planned memory timeline. Floor 3."""

from __future__ import annotations

from alpha.graph.plan import Plan, Ref

ARENA = "act"


def live_bytes(plan: Plan) -> list[int]:
    """For each launch the bytes of the activation arena that are written before its end and read at or after its start, scratch included.

    An upper part of the arena that no value occupies at that moment is not counted, so the largest entry is at most the planned peak.
    """
    n = len(plan.launches)
    born: dict[Ref, int] = {}
    spans: list[tuple[int, int, int, int]] = []  # first launch, last launch, first byte, last byte
    last: dict[Ref, int] = {}

    def end(ref: Ref) -> None:
        spans.append((born.pop(ref), last.pop(ref), ref.offset, ref.stop))

    for i, launch in enumerate(plan.launches):
        for ref in _activations(launch.ins):
            for open_ref in list(born):
                if open_ref.offset < ref.stop and ref.offset < open_ref.stop:  # a view of it counts as a use of it
                    last[open_ref] = i
        for ref in _activations(launch.outs):
            for open_ref in [r for r in born if r.offset < ref.stop and ref.offset < r.stop]:
                end(open_ref)
            born[ref], last[ref] = i, i
        if launch.scratch is not None and launch.scratch.arena == ARENA:
            spans.append((i, i, launch.scratch.offset, launch.scratch.stop))
    for ref in plan.outputs.values():
        if ref in born:
            last[ref] = n - 1
    for ref in list(born):
        end(ref)
    return [_covered([(a, b) for first, final, a, b in spans if first <= i <= final]) for i in range(n)]


def _activations(refs: tuple[Ref, ...]) -> list[Ref]:
    return [r for r in refs if r.arena == ARENA]


def _covered(ranges: list[tuple[int, int]]) -> int:
    """Bytes in the union of ranges."""
    total, reach = 0, 0
    for a, b in sorted(ranges):
        total += max(0, b - max(a, reach))
        reach = max(reach, b)
    return total
