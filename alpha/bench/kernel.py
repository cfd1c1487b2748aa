"""`alpha bench ID`: one kernel, its ceiling and its peers on the calls that the perf gate times, from one run. Floor 8.

Every peer is first called on our operands and its outputs are held against ours (agreement.py); one that fails or disagrees is listed with
the reason and not timed. Then blocks of ours, of each ceiling and of each peer alternate in random order. Rounds in which the machine was
throttled are discarded (profile/noise.py); a call of which too many go has no figures. Ratios are medians over rounds, with their interval.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from alpha.bench import agreement, clocks
from alpha.bench.ours import BLOCK_NS, Block, Timed, timed_cases
from alpha.bench.peer import Peer
from alpha.component import Catalogue, Component
from alpha.flops.v1 import VERSION
from alpha.gates.cuda.time import LAUNCHES
from alpha.gates.subjects import fresh_nonce, generator
from alpha.profile import noise
from alpha.profile.served import Served, ServedError

ROUNDS = 25
OURS, CEILING = "ours", "ceiling"
UNSUPPORTED = "Unsupported: "
"""What the error of a way begins with that PyTorch does not have (peers_torch.py)."""


@dataclass(frozen=True)
class Row:
    """One line. ns: median time of a call; share: of the ceiling; ratio: its time over ours with its interval (above 1: ours is faster).
    `difference` from our outputs and the largest that is allowed. `why`: why there are no figures; then they are NaN. `failed`: because
    the peer ended in an error. `blocks`: [ns a call, SM MHz] of each round; `discarded` were throttled, in it or in ours: `kept` says which
    count."""

    name: str
    ns: float = float("nan")
    share: float = float("nan")
    ratio: tuple[float, float, float] = (float("nan"),) * 3
    difference: float = float("nan")
    allowed: float = float("nan")
    why: str = ""
    failed: bool = False
    discarded: int = 0
    blocks: list[list[float]] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """One call. `limit`: bytes or flops; `work`: FLOPs by the row's count, `flops` the version of that model, `bytes`: the fewest.
    `discarded` of `rounds` blocks of ours were throttled. `why`: why it was not measured. `ceilings`: name, work, blocks and which count of
    each; the least time follows from them, and from `work` where it may run on `tensor_cores`."""

    component: str
    case: str
    shape: str
    flops: str = VERSION
    work: int = 0
    bytes: int = 0
    limit: str = ""
    rounds: int = 0
    discarded: int = 0
    rows: list[Row] = field(default_factory=list)
    why: str = ""
    tensor_cores: bool = True
    ceilings: list[dict[str, Any]] = field(default_factory=list)


def bench(component: Component, catalogue: Catalogue, peer: Peer | None, *, rounds: int = ROUNDS, pattern: str = "*",
          deadline: float = float("inf"), on_result: Callable[[Result], None] = lambda result: None) -> list[Result]:
    """Measure every timed call of a component whose name matches `pattern`. `on_result` is called with each as it is there. Behind
    `deadline` (time.monotonic) none is begun, and one line says so."""
    nonce, found = fresh_nonce(), []
    with timed_cases(component, catalogue, nonce, pattern) as cases:
        for timed in cases:
            if time.monotonic() > deadline:
                found.append(Result(component.id, "the rest", "", why="the budget was spent"))
                on_result(found[-1])
                break
            found.append(_case(component, timed, peer, rounds, generator(nonce, component.id, "bench order", timed.name)))
            on_result(found[-1])
            if peer is not None and any(r.failed for r in found[-1].rows):
                peer.start()  # a failure may have cost the process its device
    return found


def _case(component: Component, timed: Timed, peer: Peer | None, rounds: int, rng: np.random.Generator) -> Result:
    result = Result(component.id, timed.name, timed.shape, work=timed.work, bytes=timed.bytes)
    rows: list[Row] = []
    ways: dict[str, Block] = {}
    if peer is not None and peer.served is None:
        rows.append(Row("torch", why=peer.why))
    elif peer is not None and peer.served is not None:
        rows, ways = _admitted(component, timed, peer.served, rng)
    arms: dict[str, Block] = {OURS: timed.block, **{name: block for name, (_, block) in timed.ceilings.items()}, **ways}
    died: dict[str, ServedError] = {}
    taken = clocks.alternate(arms, rounds, rng, died.__setitem__)
    rows = [_refused(r.name, died[r.name]) if r.name in died else r for r in rows]
    times = {name: np.array([ns for ns, _ in blocks]) for name, blocks in taken.items()}
    kept = clocks.kept(taken, None if timed.read is not None else times[timed.probe])
    for name in (OURS, *timed.ceilings):
        if not kept[name].believed:
            return replace(result, rounds=rounds, discarded=kept[name].discarded,
                           why=f"throttled: {kept[name].discarded} of {rounds} blocks of {name} discarded")
    fastest = {name: float(times[name][kept[name].mask].min()) for name in timed.ceilings}
    ceiling, limit = timed.ceiling_ns(fastest)
    ours = float(np.median(times[OURS][kept[OURS].mask]))
    family = max(1, len(rows))
    done = [_figures(row, taken, kept, ceiling, family) if not row.why and row.name in times else row for row in rows]
    lines = [Row(OURS, ours, ceiling / ours, (1.0, 1.0, 1.0), discarded=kept[OURS].discarded, blocks=_plain(taken[OURS]),
                 kept=kept[OURS].mask.tolist()),
             Row(CEILING, ceiling, 1.0, (ceiling / ours,) * 3), *done]
    ceilings = [{"name": name, "work": work, "blocks": _plain(taken[name]), "kept": kept[name].mask.tolist()}
                for name, (work, _) in timed.ceilings.items()]
    return replace(result, limit=limit, rounds=rounds, discarded=kept[OURS].discarded, rows=lines, tensor_cores=timed.tensor_cores,
                   ceilings=ceilings)


def _plain(blocks: clocks.Blocks) -> list[list[float]]:
    return [[ns] if r is None else [ns, r.sm_mhz] for ns, r in blocks]


def _figures(row: Row, taken: Mapping[str, clocks.Blocks], kept: Mapping[str, noise.Kept], ceiling: float, family: int) -> Row:
    """A peer's line from the rounds in which neither it nor ours was throttled."""
    both = noise.keep(~(kept[OURS].mask & kept[row.name].mask))
    if not both.believed:
        return replace(row, why=f"throttled: {both.discarded} rounds discarded")
    theirs, ours = (np.array([ns for ns, _ in taken[name]])[both.mask] for name in (row.name, OURS))
    ns = float(np.median(theirs))
    return replace(row, ns=ns, share=ceiling / ns, ratio=clocks.ratio(theirs, ours, family), discarded=both.discarded,
                   blocks=_plain(taken[row.name]), kept=both.mask.tolist())


# -- peers ---------------------------------------------------------------------------------------------------------------------


def _admitted(component: Component, timed: Timed, served: Served, rng: np.random.Generator) -> tuple[list[Row], dict[str, Block]]:
    """A line for every way in which the peer computes this call, and blocks of those that agree with ours."""
    rows: list[Row] = []
    blocks: dict[str, Block] = {}
    with tempfile.TemporaryDirectory(prefix="alpha-bench-") as folder:
        files = []
        for i, (x, t) in enumerate(zip(timed.operands, timed.types)):
            files.append((f"{folder}/in{i}.npy", t.dtype))
            np.save(files[-1][0], np.ascontiguousarray(x).reshape(t.shape))
        try:
            offered = served.ask("make", op=component.op, attrs=dict(timed.attrs), operands=files)
        except ServedError as error:
            return [_refused("torch", error)], {}
        places = []
        for i, y in enumerate(timed.outputs):
            places.append("")
            if y.size > agreement.SAMPLE:
                places[i] = f"{folder}/at{i}.npy"
                np.save(places[i], np.sort(rng.integers(0, y.size, agreement.SAMPLE)))
        for name, why in offered.items():
            if why:
                rows.append(Row(name, why=why))
                continue
            try:
                off, allowed = _compared(timed, served.ask("outputs", way=name, places=places, folder=folder), places)
                if not off <= allowed:
                    rows.append(Row(name, difference=off, allowed=allowed, why="its outputs are not ours, so no time of it is given"))
                    continue
                repeats = LAUNCHES if timed.read is not None else served.ask("repeats", way=name, ns=BLOCK_NS)
            except ServedError as error:
                rows.append(_refused(name, error))
                continue
            rows.append(Row(name, difference=off, allowed=allowed))
            blocks[name] = partial(clocks.ask, served, "block", timed.read, way=name, repeats=repeats)
    return rows, blocks


def _refused(name: str, error: ServedError) -> Row:
    """The line of a way that ended in an error, or said that it does not do such a call."""
    words = str(error.came)
    if words.startswith(UNSUPPORTED):
        return Row(name, why="no peer: " + words.removeprefix(UNSUPPORTED))
    return Row(name, why=words, failed=True)


def _compared(timed: Timed, paths: Sequence[str], places: Sequence[str]) -> tuple[float, float]:
    """(difference, bound) of the output that comes nearest to its bound, or is furthest beyond it; infinity when nothing was compared."""
    operands = sum(t.size for t in timed.types)
    found = []
    for y, t, path, at in zip(timed.outputs, timed.out_types, paths, places, strict=True):
        if not path:
            continue
        dtypes = {x.dtype for x in timed.read_types if x.is_float} | {t.dtype} if t.is_float else set()
        flat = y.reshape(-1)
        ours = flat[np.load(at)] if at else flat
        off = agreement.difference(ours.astype(np.float64) if t.is_float else ours, np.load(path))
        found.append((off, agreement.bound(dtypes, min(timed.work / max(1, t.size), operands))))
    if not found:
        return float("inf"), 0.0
    return max(found, key=lambda pair: pair[0] / pair[1] if pair[1] else (np.inf if pair[0] else 0.0))
