"""Inputs on their way to the device: packed in page-locked memory, copied beside what computes, laid in place in order. Floor 4."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from alpha.backends.checks import check_inputs
from alpha.backends.cuda.lib import copy
from alpha.backends.cuda.values import device_bytes, to_device
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.memory import Arena, Span, aligned, pinned, upload
from alpha.graph.plan import Plan, Program, Ref

SLOTS = 4
"""Replays whose inputs may be on their way at once: so far the host runs ahead of the device."""


def packed(plans: Sequence[Plan]) -> tuple[list[dict[str, int]], int]:
    """(offset of each input by plan, bytes of all) of the plans' inputs one behind the other, 256-byte aligned."""
    offsets: list[dict[str, int]] = []
    at = 0
    for plan in plans:
        offsets.append({})
        for name, ref in plan.inputs.items():
            offsets[-1][name] = at
            at += aligned(ref.type.nbytes)
    return offsets, at


def staging_bytes(program: Program) -> int:
    """Device memory that a program's Staging takes."""
    return (SLOTS + 1) * _slot_bytes(program)


def _slot_bytes(program: Program) -> int:
    replays = [[program.plans[call.plan] for call in calls] for calls in program.replays()]
    return aligned(max([packed(plans)[1] for plans in [*replays, *([p] for p in program.plans.values())]] + [1]))


class _Slot:
    """Host and device memory of one replay's inputs. `sent`: their copy to the device is done; `taken`: the device has taken them over."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.host, self.arena = pinned((nbytes,), np.uint8), Arena(nbytes, name="inputs on their way")
        self.sent, self.taken = device.event(), device.event()


class Staging:
    """A ring of SLOTS, and the one place that a captured graph reads. `send` packs a replay's inputs and copies them on a stream of its
    own; `deliver` waits for them on the computing stream and moves them to that place; `lay`, which is captured, moves those of one plan
    on to where its kernels read them, because the plans of a replay share these places."""

    def __init__(self, device: Device, program: Program) -> None:
        self._copies, nbytes = device.stream(), _slot_bytes(program)
        self._free = deque(_Slot(device, nbytes) for _ in range(SLOTS))
        self._delivered = Arena(nbytes, name="inputs of this replay")
        self._held: dict[tuple[str, ...], _Slot] = {}

    def send(self, plans: Sequence[Plan], inputs: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Begin to copy the inputs of the next `deliver` of these plans; earlier ones that nobody took are dropped. Waits only where the
        slot's last content is still being copied from the host."""
        for plan, given in zip(plans, inputs, strict=True):
            check_inputs(plan, given)
        key = _key(plans)
        if key in self._held:
            self._free.appendleft(self._held.pop(key))
        slot = self._free.popleft()
        slot.sent.synchronize()
        offsets, nbytes = packed(plans)
        for plan, given, places in zip(plans, inputs, offsets):
            for name, ref in plan.inputs.items():
                x = to_device(np.asarray(given[name]), ref.type)
                _, dtype = device_bytes(ref.type)
                slot.host[places[name] : places[name] + x.nbytes].view(dtype)[...] = x.reshape(-1)
        self._copies.wait_for_event(slot.taken)
        if nbytes:
            upload(Span(slot.arena.address, nbytes), slot.host[:nbytes], self._copies)
        slot.sent.record(self._copies)
        self._held[key] = slot

    def holds(self, plans: Sequence[Plan]) -> bool:
        """Whether the inputs of these plans are on their way."""
        return _key(plans) in self._held

    def deliver(self, plans: Sequence[Plan], stream: Any) -> None:
        """Enqueue on `stream`: wait for the inputs that were sent, and move them to where `lay` reads them."""
        slot = self._held.pop(_key(plans))
        stream.wait_for_event(slot.sent)
        _, nbytes = packed(plans)
        if nbytes:
            copy(self._delivered.address, slot.arena.address, nbytes, int(stream.handle))
        slot.taken.record(stream)
        self._free.append(slot)

    def lay(self, plans: Sequence[Plan], index: int, place: Mapping[str, Span], stream: int) -> None:
        """Enqueue on `stream`: the delivered inputs of plan `index` to their planned places. May be captured."""
        offsets, _ = packed(plans)
        for name, span in place.items():
            copy(span.address, self._delivered.address + offsets[index][name], span.nbytes, stream)

    def free(self) -> None:
        """Give the device memory back; nothing may be under way."""
        self._copies.synchronize()
        self._delivered.free()
        for slot in (*self._free, *self._held.values()):
            slot.arena.free()
        self._free.clear()
        self._held.clear()


def _key(plans: Sequence[Plan]) -> tuple[str, ...]:
    return tuple(plan.name for plan in plans)


class Results:
    """The small outputs of one plan, copied to page-locked memory behind its launches, so that reading them waits once and for nothing
    that was enqueued later. `there`: the copies are done. `segments`: how many Segments a Watch had seen by then."""

    MOST = 1 << 20
    """Bytes of outputs above which they are read from where they lie."""

    def __init__(self, device: Device, refs: Mapping[str, Ref]) -> None:
        self.refs, self.there, self.segments = dict(refs), device.event(), 0
        self.offsets, at = {}, 0
        for name, ref in self.refs.items():
            self.offsets[name] = at
            at += aligned(ref.type.nbytes)
        self._host = pinned((max(at, 1),), np.uint8)

    @classmethod
    def of(cls, device: Device, plan: Plan) -> Results | None:
        """None where a plan has no outputs, or larger ones."""
        total = sum(r.type.nbytes for r in plan.outputs.values())
        return cls(device, plan.outputs) if 0 < total <= cls.MOST else None

    def host(self, name: str) -> np.ndarray:
        """The page-locked place of one output, in its device form, flat."""
        ref, at = self.refs[name], self.offsets[name]
        _, dtype = device_bytes(ref.type)
        found: np.ndarray = self._host[at : at + ref.type.nbytes].view(dtype)
        return found
