"""The CPU's kernels at sizes that runs use and walks cannot reach: checked as spot checks of a run check a launch, by drawn parts, by
random projections where it is a product. With as many workers as a run takes, at every alignment, the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from alpha.backends.cpu.kernels import attention as kernels
from alpha.backends.cpu.lib import Cpu
from alpha.backends.spot import Look, Spot
from alpha.component import Component
from alpha.gates.subjects import Case, bind, case_of, grow, same_bits, samples, spec_of
from alpha.graph.plan import Launch, Ref
from alpha.ops.spec import Sample
from alpha.train.catalogue import catalogue

ELEMENTS, FLOPS, LONGEST_AXIS = 1_500_000, 300_000_000, 100_000
"""Of a grown sample: it ends at the first that it reaches."""

WORKERS = (1, 16)
BEYOND = 70_001
"""An index past 2^16."""

NONCE = "e7" * 16


def looked_at(component: Component, case: Case) -> tuple[list[Look], bool]:
    """What spot checks find of one call with one worker; whether 16 workers, elsewhere in memory, give the same bits."""
    spec = spec_of(component)
    types = [*case.types, *case.out_types(spec)]
    refs = [Ref("test", i, t) for i, t in enumerate(types)]
    n = len(case.types)
    launch = Launch(op=str(component.op), component=component.id, ins=tuple(refs[:n]), outs=tuple(refs[n:]), attrs=case.attrs, scratch=None,
                    layer="", phase="", source="", flops=0, nbytes=0)
    outs: list[list[np.ndarray]] = []
    looks: list[Look] = []
    for offset, workers in enumerate(WORKERS):
        bound = bind(component, case, workers=workers, offset=13 * offset)
        bound.fill(case.arrays())
        if not outs:
            spot = Spot(launch, lambda ref: bound.ins[ref.offset], np.random.default_rng(1))  # noqa: B023
        bound.run()
        outs.append(bound.outs)
        if len(outs) == 1:
            looks = list(spot.looks(lambda ref: outs[0][ref.offset - n]))
    return looks, same_bits(*outs)


def held(component: Component, case: Case) -> None:
    looks, same = looked_at(component, case)
    assert looks and same, f"{case.name}: 1 and 16 workers differ"
    assert all(look.ratio <= 1 for look in looks), f"{component.id} {case.name}: {[look for look in looks if not look.ratio <= 1]}"


def _kept(op: str, rng: np.random.Generator, *forward: np.ndarray, given: tuple[str, ...], **attrs: Any) -> tuple[np.ndarray, ...]:
    """Operands of a backward row: cotangents of the first result, the forward's operands and those of its results that are `given`."""
    row = spec_of(catalogue()[f"{op}.f32.cpu"])
    results = dict(zip(row.outputs, row.oracle(*forward, **attrs)))
    return (rng.standard_normal(results[row.outputs[0]].shape), *forward, *(results[name] for name in given))


def _drawn(rng: np.random.Generator) -> Iterator[tuple[str, str, tuple[np.ndarray, ...], Mapping[str, Any]]]:
    """(kernel, name, operands, attributes): one axis as long as runs or the envelope have it, the others short."""
    x = rng.standard_normal
    wide, tall, ids = x((3, BEYOND)), x((BEYOND, 3)), np.array([BEYOND - 1, 0, 1 << 16, 7, 7, BEYOND - 1], np.int32)
    for name, a, b, attrs in (("four-panels", (512, 513), (513, 520), {}), ("eight-panels", (1032, 1030), (1030, 1016), {}),
                              ("long", (3, BEYOND), (BEYOND, 5), {}), ("wide", (5, 9), (9, BEYOND), {}), ("tall", (BEYOND, 9), (9, 5), {}),
                              ("head", (5, 9), (BEYOND, 9), {"trans_b": True}), ("rows", (BEYOND, 5), (BEYOND, 3), {"trans_a": True})):
        yield "matmul", name, (x(a), x(b)), attrs
    yield "matmul_accumulate", "rows", (x((5, 3)), x((BEYOND, 5)), x((BEYOND, 3))), {"trans_a": True}
    loss: dict[str, Any] = {"ignore_index": -1, "z_loss": 1e-4}
    for op in ("linear_cross_entropy", "linear_cross_entropy_grad"):
        yield op, "vocabulary", (x((6, 16)), x((BEYOND, 16)), ids), {**loss, "chunk": 4}
        # a last chunk that is too short to be shared, and taller than a panel of those before it
        yield op, "last-chunk", (x((63, 16)), x((24, 16)), rng.integers(-1, 24, 63).astype(np.int32)), {**loss, "chunk": 32}
        yield op, "rows", (x((BEYOND, 4)), x((9, 4)), rng.integers(-1, 9, BEYOND).astype(np.int32)), {**loss, "chunk": 8192}
    for name, logits, targets in (("vocabulary", x((6, BEYOND)), ids), ("rows", tall, rng.integers(-1, 3, BEYOND).astype(np.int32))):
        yield "cross_entropy", name, (logits, targets), loss
        yield "cross_entropy_bwd", name, _kept("cross_entropy", rng, logits, targets, given=("lse",), **loss), loss
    for op in ("softmax", "sum", "mean", "max"):
        for name, y, axis in (("wide", wide, 1), ("tall", tall, 0), ("rows", tall, 1)):
            yield op, name, (y,), {"axis": axis} if op == "softmax" else {"axis": axis, "keepdims": False}
    for name, y in (("wide", x((5, BEYOND))), ("tall", x((BEYOND, 5)))):
        yield "transpose", name, (y,), {"perm": (1, 0)}
    yield "broadcast_to", "wide", (x((3, 1)),), {"shape": (3, BEYOND)}
    runs = tuple(((2 * i, 1), (BEYOND + 3 * i, 2)) for i in range(900))
    yield "square_sums", "leaves", (x(2 * BEYOND),), {"leaves": runs}
    yield "embedding", "vocabulary", (tall, ids), {}
    yield "embedding", "tokens", (x((9, 3)), rng.integers(0, 9, BEYOND).astype(np.int32)), {}
    yield "embedding_bwd", "vocabulary", (x((6, 3)), ids), {"vocab": BEYOND}
    yield "embedding_bwd", "tokens", (tall, rng.integers(0, 9, BEYOND).astype(np.int32)), {"vocab": 9}
    yield "take_row", "sequence", (x((2, BEYOND, 3)), np.array([BEYOND - 1, 1 << 16], np.int32)), {}
    yield "take_row_bwd", "sequence", (x((2, 3)), np.array([BEYOND - 1, 1 << 16], np.int32)), {"rows": BEYOND}
    for op, more in (("layernorm", 2), ("rmsnorm", 1)):
        for name, y in (("wide", wide), ("tall", tall)):
            scales, attrs = tuple(x(y.shape[1]) for _ in range(more)), {"eps": 1e-5}
            yield op, name, (y, *scales), attrs
            given = _kept(op, rng, y, *scales, given=("mean", "rstd") if more == 2 else ("rstd",), **attrs)
            yield f"{op}_bwd", name, (*given[:3], *given[2 + more :]), {}
    for layout in ("half", "interleaved"):
        yield "rope", f"{layout}-long", (x((1, BEYOND, 1, 4)), np.arange(BEYOND, dtype=np.int32)[None]), {"base": 5e5, "layout": layout}
    heads: dict[str, Any] = {"window": 0, "scale": 0.5}
    for name, t, s, h, g, causal in (("keys", 5, kernels.LONGEST, 2, 1, True), ("queries", kernels.LONGEST, 7, 2, 1, False),
                                     ("heads", 3, 5, 260, 130, True), ("length", 1500, 1500, 1, 1, True)):
        operands = x((1, t, h, 4)), x((1, s, g, 4)), x((1, s, g, 4))
        attrs = {**heads, "causal": causal, "window": 700 if name == "length" else 0}
        yield "attention", name, operands, attrs
        do, *rest = _kept("attention", rng, *operands, given=("o", "lse"), **attrs)
        yield "attention_bwd", name, (do, *rest), attrs


CALLS = list(_drawn(np.random.default_rng(11)))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}-{call[1]}")
def test_one_axis_as_long_as_it_gets(call: tuple[str, str, tuple[np.ndarray, ...], Mapping[str, Any]]) -> None:
    op, name, operands, attrs = call
    component = catalogue()[f"{op}.f32.cpu"]
    case = case_of(Sample(name=name, inputs=operands, attrs=dict(attrs)), "f32", spec=spec_of(component))
    assert component.envelope.why_outside(case.types, case.attrs) is None
    held(component, case)


SHORT = ("broadcast_to", "clip_coefficient", "fill", "finite_flag", "global_norm", "learning_rate", "next_step", "norm_of_squares",
         "square_sums")
"""Kernels of a few numbers, and those whose attributes say their sizes: none of their samples grows."""

GROWN = [c.id for c in catalogue() if c.kind == "kernel" and c.backend == "cpu" and c.op not in SHORT]


def grown(component: Component, elements: int = ELEMENTS) -> Case:
    """The largest of its samples that grow, its axes lengthened one after the other until one result or operand has `elements`."""
    among = [s for which in ("samples", "exact") for s in samples(component, NONCE, which) if all(np.isfinite(x).all() for x in s.inputs)]
    sample = grow(component, among, np.random.default_rng(5), elements=elements, flops=FLOPS, most=LONGEST_AXIS)
    assert sample is not None
    return case_of(sample, component.envelope.dtypes[0], spec=spec_of(component))


@pytest.mark.parametrize("name", GROWN)
def test_every_axis_longer(name: str) -> None:
    held(catalogue()[name], grown(catalogue()[name]))


def _past(cpu: Cpu, y: np.ndarray) -> bool:
    y.reshape(-1)[1 << 16 :] *= np.float32(1.001)
    return y.size > 1 << 16


def _last(cpu: Cpu, y: np.ndarray) -> bool:
    y.reshape(-1)[-1] += 0.1 * np.abs(y).max()
    return True


def _many_workers(cpu: Cpu, y: np.ndarray) -> bool:
    y *= np.float32(1.001 if cpu.threads > 3 else 1.0)
    return True


def _alignment(cpu: Cpu, y: np.ndarray) -> bool:
    y *= np.float32(1.0 if y.ctypes.data % 64 == 0 else 1.001)
    return True


PLANTED = [(fault, f"{op}.f32.cpu") for fault in (_past, _many_workers, _alignment) for op in ("gelu", "matmul", "attention")]
WRONG = {"attention.f32.cpu": 1 << 18}
"""Elements of a grown sample that is planted wrong: what errs is walked in 48 draws, which takes ten seconds of attention at full size."""
PLANTED += [(_last, name) for name in ("gelu.f32.cpu", "matmul.f32.cpu", "rmsnorm_bwd.f32.cpu", "split.f32.cpu")]
"""Of attention and rope one sample of the batch is drawn, so a single element is no matter for them."""


@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_planted(fault: Callable[[Cpu, np.ndarray], bool], name: str) -> None:
    """What no small sample shows: wrong beyond a size, at the end, with more workers than the gate tries, at another alignment."""
    sound = catalogue()[name]

    def binder(cpu: Cpu, ins: Any, outs: Any, attrs: Any) -> Callable[[], None]:
        call = sound.implementation(cpu, ins, outs, attrs)

        def wrong() -> None:
            call()
            assert fault(cpu, outs[0])
        return wrong

    with pytest.raises(AssertionError, match=r"workers differ|Look\("):
        held(replace(sound, implementation=binder), grown(sound, WRONG.get(sound.id, ELEMENTS)))
