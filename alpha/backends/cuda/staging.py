"""Batches on their way to the device: packed in page-locked memory, copied beside what computes, laid in place in order. Floor 4."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from alpha.backends.checks import check_inputs
from alpha.backends.cuda.lib import copy
from alpha.backends.cuda.values import device_bytes, to_device
from alpha.cudart.device import Device
from alpha.cudart.memory import Arena, Span, aligned, pinned, upload
from alpha.graph.plan import Plan, Program, Ref

SLOTS = 4
"""Batches that may be on their way at once: so far the host runs ahead of the device."""


def packed(plan: Plan) -> tuple[dict[str, int], int]:
    """(offset of each input, bytes of all) of a plan's inputs one behind the other, 256-byte aligned."""
    offsets, at = {}, 0
    for name, ref in plan.inputs.items():
        offsets[name] = at
        at += aligned(ref.type.nbytes)
    return offsets, at


def staging_bytes(program: Program) -> int:
    """Device memory that a program's Staging takes."""
    return SLOTS * _slot_bytes(program)


def _slot_bytes(program: Program) -> int:
    return aligned(max([packed(p)[1] for p in program.plans.values()] + [1]))


class _Slot:
    """Host and device memory of one batch. `sent`: its copy to the device is done; `taken`: the device has laid it in place."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.host, self.arena = pinned((nbytes,), np.uint8), Arena(nbytes, name="batches on their way")
        self.sent, self.taken = device.event(), device.event()


class Staging:
    """A ring of SLOTS batches. `send` packs and copies on a stream of its own; `deliver` waits for it on the computing stream."""

    def __init__(self, device: Device, program: Program) -> None:
        self._copies = device.stream()
        self._free = deque(_Slot(device, _slot_bytes(program)) for _ in range(SLOTS))
        self._held: dict[str, _Slot] = {}

    def send(self, plan: Plan, inputs: Mapping[str, np.ndarray]) -> None:
        """Begin to copy the inputs of the next `deliver` of this plan; an earlier batch that nobody took is dropped. Waits only where the
        slot's last batch is still being copied from the host."""
        check_inputs(plan, inputs)
        if plan.name in self._held:
            self._free.appendleft(self._held.pop(plan.name))
        slot = self._free.popleft()
        slot.sent.synchronize()
        offsets, nbytes = packed(plan)
        for name, ref in plan.inputs.items():
            x = to_device(np.asarray(inputs[name]), ref.type)
            _, dtype = device_bytes(ref.type)
            slot.host[offsets[name] : offsets[name] + x.nbytes].view(dtype)[...] = x.reshape(-1)
        self._copies.wait_for_event(slot.taken)
        if nbytes:
            upload(Span(slot.arena.address, nbytes), slot.host[:nbytes], self._copies)
        slot.sent.record(self._copies)
        self._held[plan.name] = slot

    def holds(self, plan: str) -> bool:
        """Whether a batch for this plan is on its way."""
        return plan in self._held

    def deliver(self, plan: Plan, place: Mapping[str, Span], stream: Any) -> None:
        """Enqueue on `stream`: wait for the batch that was sent, and lay its tensors in their planned places."""
        slot = self._held.pop(plan.name)
        stream.wait_for_event(slot.sent)
        offsets, _ = packed(plan)
        for name, span in place.items():
            copy(span.address, slot.arena.address + offsets[name], span.nbytes, int(stream.handle))
        slot.taken.record(stream)
        self._free.append(slot)

    def free(self) -> None:
        """Give the device memory back; nothing may be under way."""
        self._copies.synchronize()
        for slot in (*self._free, *self._held.values()):
            slot.arena.free()
        self._free.clear()
        self._held.clear()


class Results:
    """The small outputs of one plan, copied to page-locked memory behind its launches, so that reading them waits once."""

    MOST = 1 << 20
    """Bytes of outputs above which they are read from where they lie."""

    def __init__(self, refs: Mapping[str, Ref]) -> None:
        self.refs = dict(refs)
        self.offsets, at = {}, 0
        for name, ref in self.refs.items():
            self.offsets[name] = at
            at += aligned(ref.type.nbytes)
        self._host = pinned((max(at, 1),), np.uint8)

    @classmethod
    def of(cls, plan: Plan) -> Results | None:
        """None where a plan has no outputs, or larger ones."""
        total = sum(r.type.nbytes for r in plan.outputs.values())
        return cls(plan.outputs) if 0 < total <= cls.MOST else None

    def host(self, name: str) -> np.ndarray:
        """The page-locked place of one output, in its device form, flat."""
        ref, at = self.refs[name], self.offsets[name]
        _, dtype = device_bytes(ref.type)
        found: np.ndarray = self._host[at : at + ref.type.nbytes].view(dtype)
        return found
