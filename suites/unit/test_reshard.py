"""Moving the state of a large model to another number of ranks is planned at once: near linear in the pieces."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import process_time

import pytest

from alpha.graph.state import StateLayout, TensorSpec, flat_shards, reshard, whole

SHAPES = {"qkv": (3072, 1024), "out": (1024, 1024), "up": (4096, 1024), "down": (1024, 4096)}
BLOCK = {**{f"{k}.weight": shape for k, shape in SHAPES.items()}, **{f"{k}.bias": shape[:1] for k, shape in SHAPES.items()},
         **{f"{norm}.{what}": (1024,) for norm in ("norm1", "norm2") for what in ("gain", "bias")}}


def large(layers: int = 80) -> StateLayout:
    """Blocks of 12 tensors and an embedding: 1.1e9 elements."""
    blocks = [TensorSpec(f"block.{i}.{name}", shape, f"block.{i}") for i in range(layers) for name, shape in BLOCK.items()]
    return StateLayout([*blocks, TensorSpec("embedding.weight", (50257, 1024), "embedding")])


def seconds(plan: Callable[[], object]) -> float:
    """The least CPU seconds of four plans, without the collector, which walks what the session has made before."""
    taken = []
    gc.disable()
    try:
        for _ in range(4):
            start = process_time()
            plan()
            taken.append(process_time() - start)
    finally:
        gc.enable()
    return min(taken)


@pytest.mark.parametrize(("before", "after"), [(64, 32), (32, 64), (48, 7), (1, 64)])
def test_eighty_layers_under_a_second(before: int, after: int) -> None:
    layout = large()
    source, target = (whole(layout) if n == 1 else flat_shards(layout, n) for n in (before, after))
    copies = reshard(source, target)
    assert sum(_elements(c.box) for c in copies) == sum(t.size for t in layout.tensors)
    assert seconds(lambda: reshard(source, target)) < 1.0


@pytest.mark.parametrize(("before", "after"), [(64, 32), (1, 64)])
def test_four_times_the_layers_take_four_times_as_long(before: int, after: int) -> None:
    """A plan that compares all pieces with all would take sixteen times as long."""

    def took(layers: int) -> float:
        layout = large(layers)
        source, target = (whole(layout) if n == 1 else flat_shards(layout, n) for n in (before, after))
        return seconds(lambda: reshard(source, target))

    assert took(80) / took(20) < 8


def _elements(box: tuple[tuple[int, int], ...]) -> int:
    n = 1
    for lo, hi in box:
        n *= hi - lo
    return n


def test_replicas_cost_nothing() -> None:
    """64 ranks that all hold everything: only the lowest is read."""
    layout = large()
    one = whole(layout)
    everywhere, cut = type(one)(one.shapes, one.ranks * 64), flat_shards(layout, 8)
    assert {c.source for c in reshard(everywhere, cut)} == {0}
    assert seconds(lambda: reshard(everywhere, cut)) < 1.0
