"""Tiles that are cut along K: which run has which part (kernels/gemm/raster.cuh, compiled for the host), and how an owner gets the others'
(kernels/gemm/parts.cuh), in orders that chance gives."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from actors import Actor, play
from host_library import host_library, sources

from alpha.backends.cuda.kernels.gemm import CLUSTERS, GemmProblem, _Problem, choose
from alpha.backends.cuda.kernels.matmul import SPLIT

HOST = """
#include <algorithm>
#include <cstring>
using std::max;
using std::min;
#define __device__
#define __forceinline__ inline
struct Dim { unsigned x, y, z; };
static Dim blockIdx, gridDim;
struct __nv_bfloat16;
namespace ptx { inline unsigned cluster_rank() { return 0; } }
#include "raster.cuh"
using namespace matmul;
struct Added { static constexpr int BM = 128, CLUSTER = 1; static constexpr bool SPLIT = true, OWNED = false; };
struct Owned { static constexpr int BM = 128, CLUSTER = 1; static constexpr bool SPLIT = true, OWNED = true; };
template <class C> int parts_of(const Problem& p, int unit, int* out) {
    Run<C> run(p);
    Work work{};
    run.begin(unit, work);
    int n = 0;
    do {
        const int takes = C::OWNED ? work.takes : 0;
        const int x[8] = {work.m / C::BM, work.n, work.batch, work.k_first, work.k_count, work.k_turn, work.slot, takes};
        std::memcpy(out + 8 * n++, x, sizeof x);
    } while (run.rest(work));
    return n;
}
extern "C" int parts(const Problem* p, int owned, int unit, int* out) {
    return owned ? parts_of<Owned>(*p, unit, out) : parts_of<Added>(*p, unit, out);
}
"""


@dataclass(frozen=True)
class Part:
    """What a run has of a tile, as `Work` says it."""

    m: int
    n: int
    batch: int
    first: int
    count: int
    turn: int
    slot: int
    takes: int

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.m, self.n, self.batch


def raster(find: str = "", replace: str = "") -> ctypes.CDLL:
    """raster.cuh on the host, something of it replaced."""
    text = sources(["gemm/raster.cuh"])["gemm/raster.cuh"]
    assert not find or text.count(find) == 1, find
    for include in ("#include <cuda_bf16.h>", '#include "../common/cluster.cuh"'):
        assert include in text
        text = text.replace(include, "")
    return host_library({"host.cpp": HOST, "raster.cuh": text.replace(find, replace) if find else text})


def parts(library: ctypes.CDLL, p: _Problem, owned: bool) -> list[list[Part]]:
    """Of each run, in the order in which it computes them."""
    out, found = (ctypes.c_int * 16)(), []
    for unit in range(p.split_units):
        n = library.parts(ctypes.byref(p), int(owned), unit, out)
        found.append([Part(*out[8 * i : 8 * i + 8]) for i in range(n)])
    return found


def drawn(rng: random.Random) -> _Problem:
    """Split tiles of some product."""
    tiles_m, tiles_n, batch, steps = rng.randrange(1, 7), rng.randrange(1, 5), rng.randrange(1, 3), rng.choice((1, 2, 7, 64, 129, 1000))
    tiles = tiles_m * tiles_n * batch
    split = rng.randrange(1, tiles + 1)
    units = min(rng.choice((split, split + 1, 2 * split, rng.randrange(split, 5 * split + 1))), split * steps)
    return _Problem(m=tiles_m * 128, n=tiles_n * 256, k_steps=steps, tiles_m=tiles_m, tiles_n=tiles_n, tiles=tiles,
                    group=rng.choice((1, 2, 8)), along_n=rng.randrange(2), split_tiles=split, split_units=units)


def wrong(library: ctypes.CDLL, p: _Problem) -> str:
    """What is wrong with the parts of a problem; '' if nothing."""
    runs = parts(library, p, True)
    of_tile: dict[tuple[int, int, int], list[tuple[int, Part]]] = {}
    for unit, run in enumerate(runs):
        if len(run) > 2 or sum(part.takes < 0 for part in run) > 1 or (len(run) == 2 and run[0].takes >= 0):
            return f"run {unit} does not leave its one part first: {run}"
        for part in run:
            of_tile.setdefault(part.tile, []).append((unit, part))
            if not (part.count > 0 and 0 <= part.turn < part.count):
                return f"run {unit}: {part}"
    if len(of_tile) != p.split_tiles:
        return f"{len(of_tile)} tiles"
    slots = list[int]()
    for tile, found in of_tile.items():
        at = 0
        for unit, part in found:
            if part.first != at:
                return f"tile {tile}: {found}"
            at += part.count
            slots += [part.slot] if part.takes < 0 else []
            if part.slot != unit:
                return f"tile {tile}: the part of run {unit} has place {part.slot}"
        if at != p.k_steps or [part.takes for _, part in found] != [-1] * (len(found) - 1) + [len(found) - 1]:
            return f"tile {tile}: {found}"
        if [unit for unit, _ in found] != list(range(found[0][0], found[0][0] + len(found))):
            return f"tile {tile} has parts of the runs {[unit for unit, _ in found]}"
    if len(set(slots)) != len(slots):
        return "two parts have one place"
    added = [[(q.tile, q.first, q.count, q.turn) for q in run] for run in parts(library, p, False)]
    return "" if added == [[(q.tile, q.first, q.count, q.turn) for q in run] for run in runs] else "the second kernel has other parts"


def test_each_step_of_a_tile_has_one_run_and_the_last_adds_the_others(seed: int) -> None:
    library = raster()
    for i in range(400):
        p = drawn(random.Random(hash((seed, i))))
        assert not wrong(library, p), (i, [(name, getattr(p, name)) for name, _ in p._fields_])


@pytest.mark.parametrize(("find", "replace"), [
    ("((step + 1) * p.split_units - 1)", "(step * p.split_units)"),
    ("p.k_steps * unit / p.split_units", "p.k_steps * unit / p.split_units + (unit > 0)"),
    ("work.slot = unit;", "work.slot = tile;"),
    ("max(border - first, 0)", "max(border - first - 1, 0)"),
    ("work.k_first + count == p.k_steps", "work.k_first + count >= p.k_steps - 1"),
])
def test_a_part_that_is_misplaced_is_found(find: str, replace: str) -> None:
    library = raster(find, replace)
    assert any(wrong(library, drawn(random.Random(i))) for i in range(200))


class Launch:
    """One launch. `resident`: clusters that fit the GPU beside what else runs there; another begins where one has ended, in any order.
    `drawn`: whether runs are, or else dealt out by a cluster's number."""

    def __init__(self, runs: list[list[Part]], *, clusters: int, resident: int, drawn: bool, rng: random.Random) -> None:
        self.runs, self.clusters, self.drawn, self.rng = runs, clusters, drawn, rng
        self.free, self.counter, self.limit = resident, 0, len(runs) + clusters - 1
        self.counts: dict[tuple[int, int, int], int] = {}
        self.memory: dict[int, tuple[int, int]] = {}  # place -> the steps whose sum lies there
        self.sums: dict[tuple[int, int, int], list[tuple[int, int]]] = {}  # tile -> what was added, in order

    def draw(self) -> int:
        """atom.inc with units + clusters - 1."""
        old = self.counter
        self.counter = 0 if old >= self.limit else old + 1
        return old

    def units(self, cluster: int) -> Iterator[int]:
        """The runs of a cluster."""
        unit = self.draw() if self.drawn else cluster
        while unit < len(self.runs):
            yield unit
            unit = self.draw() if self.drawn else unit + self.clusters

    def cluster(self, number: int) -> Actor:
        yield lambda: self.free > 0
        self.free -= 1
        for unit in self.units(number):
            for part in self.runs[unit]:
                yield lambda: True
                if part.takes < 0:
                    self.memory[part.slot] = (part.first, part.count)
                    yield lambda: True
                    self.counts[part.tile] = self.counts.get(part.tile, 0) + 1
                    continue
                if part.takes:
                    yield lambda part=part: self.counts.get(part.tile, 0) >= part.takes  # type: ignore[misc]
                    self.counts[part.tile] = 0
                self.sums[part.tile] = [self.memory.pop(place) for place in range(unit - part.takes, unit)] + [(part.first, part.count)]
        self.free += 1

    def run(self) -> bool:
        """Whether all have ended."""
        return play([self.cluster(i) for i in range(self.clusters)], self.rng)


def ended(library: ctypes.CDLL, *, drawn_runs: bool, seed: int) -> Launch | None:
    """A launch that has ended, or None where all wait."""
    rng = random.Random(seed)
    p = drawn(rng)
    clusters = rng.randrange(1, p.split_units + 1)
    launch = Launch(parts(library, p, True), clusters=clusters, resident=rng.randrange(1, clusters + 1), drawn=drawn_runs, rng=rng)
    return launch if launch.run() else None


def test_no_owner_waits_for_ever_and_sums_are_in_order(seed: int) -> None:
    library = raster()
    for i in range(300):
        launch = ended(library, drawn_runs=True, seed=hash((seed, i)))
        assert launch is not None, "all wait"
        assert launch.counter == 0 and not any(launch.counts.values()) and not launch.memory
        for tile, terms in launch.sums.items():
            assert all(a + n == b for (a, n), (b, _) in pairwise(terms)) and terms[0][0] == 0, (tile, terms)


def test_runs_dealt_out_by_number_can_wait_for_ever() -> None:
    """What runs are drawn for: where a GPU holds fewer clusters than were launched, and begins them in any order."""
    library = raster()
    assert any(ended(library, drawn_runs=False, seed=i) is None for i in range(300))


def test_parity_and_determinism_have_both_ways_of_adding() -> None:
    """Of both tile shapes, with runs that lie in two tiles."""
    found = {name: choose(GemmProblem(m=m, n=n, k=k)) for name, m, n, k in SPLIT}
    assert {name: (c.bn, c.owned) for name, c in found.items()} == {
        "split-few": (128, True), "split": (256, True), "split-few-many": (128, False), "split-many": (256, False)}
    assert sum(c.split_units % c.split_tiles > 0 for c in found.values()) >= 3
    assert all(c.counter_bytes() == 4 + 8 * c.split_tiles * c.owned for c in found.values() if c.ahead)
    assert all(c.split_units <= CLUSTERS for c in found.values())
