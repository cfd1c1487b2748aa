"""The determinism gate on the GPU: the same bits, run after run, whatever moves around the kernel. Floor 7.

What varies between runs: the addresses of every operand (fresh allocations while older ones live, 16-byte steps), the number of thread
blocks that a persistent launch may use, the garbage in outputs and scratch, and a neighbour stream on which the same kernel at another
size and fills of memory run at random beside it. What may not vary: any bit of any output. RUNS in all: 1000 find a flake of 0.3 % with
95 % probability. The first differing coordinate, byte and values stand in the case's note.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from alpha.backends.cuda.values import to_device
from alpha.component import Component
from alpha.cuda_runtime.memory import Arena, Span, fill
from alpha.gates import determinism
from alpha.gates.cuda.calls import repeated
from alpha.gates.cuda.subjects import CudaBound, opened
from alpha.gates.subjects import Case, crash, fresh_nonce, generator, make_record, spec_of, warm_up
from alpha.registry.cases import CaseRecord, Repeats
from alpha.registry.record import Record
from alpha.types import TensorType

RUNS = 1000
BLOCKS = (0, 100, 37, 16)
"""Most thread blocks at once; 0: no cap."""

REBIND = 50
GARBAGE = (0xFF, 0x00, 0x7B)
NOISE_BYTES = 96 << 20


class Neighbour:
    """Work on another stream: the same kernel on a case of its own, and fills of memory, as many as the generator says."""

    def __init__(self, component: Component, case: Case, rng: np.random.Generator) -> None:
        device, _ = opened()
        self.rng, self.stream = rng, device.stream()
        self.bound = CudaBound(component, case.types, case.out_types(spec_of(component)), case.attrs)
        self.bound.fill(case.arrays())
        self.arena = Arena(NOISE_BYTES, name="neighbour")

    def stir(self) -> None:
        """Enqueue between nothing and a few launches."""
        for _ in range(int(self.rng.integers(0, 4))):
            if self.rng.random() < 0.6:
                self.bound.enqueue(self.stream)
            else:
                fill(Span(self.arena.address, int(self.rng.integers(1 << 16, NOISE_BYTES))), 0, self.stream)

    def close(self) -> None:
        """Wait for it and free its memory."""
        self.stream.synchronize()
        self.arena.free()


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    nonce = nonce or fresh_nonce()
    warm_up(component)
    todo = chosen(component, nonce)
    rng = generator(nonce, component.id, "determinism")
    found: list[Repeats] = []
    neighbour = Neighbour(component, todo[0], rng) if todo else None
    for case in todo:
        try:
            assert neighbour is not None
            found.append(_repeat(component, case, rng, neighbour, -(-RUNS // len(todo))))
        except Exception as error:  # a kernel that raises has no bits to compare
            found.append(Repeats(name=case.name, runs=0, distinct=0, digest="", note=crash(error)))
    if neighbour is not None:
        neighbour.close()
    return make_record(component, "determinism", nonce, len(todo), found, blocks=",".join(map(str, BLOCKS)))


def chosen(component: Component, nonce: str) -> list[Case]:
    """Those that the CPU's gate would choose, and those of a model's size first."""
    large = []
    for name, draw in repeated(component).items():
        operands, attrs = draw(generator(nonce, component.id, name))
        large.append(Case(name, component.envelope.dtypes[0], False, tuple(x for x, _ in operands),
                          tuple(TensorType(x.shape, d) for x, d in operands), attrs))
    return large + determinism.chosen(component, nonce)


def _repeat(component: Component, case: Case, rng: np.random.Generator, neighbour: Neighbour, runs: int) -> Repeats:
    contents = [to_device(x, t) for x, t in zip(case.arrays(), case.types)]
    outs = case.out_types(spec_of(component))
    bounds: list[CudaBound] = []
    reference: list[np.ndarray] = []
    digests: dict[str, int] = {}
    note = ""
    for i in range(runs):
        if i % REBIND == 0:
            blocks = BLOCKS[i // REBIND % len(BLOCKS)]
            bound = CudaBound(component, case.types, outs, case.attrs, offset=int(rng.integers(16)), blocks=blocks)
            bound.fill_bits(contents)
            bounds = [*bounds[-2:], bound]
        bound = bounds[int(rng.integers(len(bounds)))]
        neighbour.stir()
        bound.again(GARBAGE[int(rng.integers(len(GARBAGE)))])
        got = bound.bits()
        if reference and all(x.tobytes() == y.tobytes() for x, y in zip(got, reference)):
            digests[next(iter(digests))] += 1
            continue
        digest = _digest(got)
        digests[digest] = digests.get(digest, 0) + 1
        if not reference:
            reference = got
        elif not note:
            note = determinism.difference(spec_of(component).outputs, reference, got)
    for bound in bounds:
        bound.check_guards()
    return Repeats(name=case.name, runs=runs, distinct=len(digests), digest=next(iter(digests)), note=note)


def _digest(arrays: Sequence[np.ndarray]) -> str:
    h = hashlib.sha256()
    for x in arrays:
        h.update(f"{x.dtype}{x.shape}".encode())
        h.update(x.tobytes())
    return h.hexdigest()[:16]


def listed(component: Component, nonce: str) -> list[tuple[type[CaseRecord], str]]:
    """(sort, name) of each case that a record of this nonce holds (expected.py)."""
    return [(Repeats, case.name) for case in chosen(component, nonce)]
