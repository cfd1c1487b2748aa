"""`alpha bench simulate RUN.toml --nproc N`: how long a step on N GPUs would take, from records of one GPU and of collectives. Floor 8.

The Program is the one that would run. A launch of compute takes what the floor record of the same model says of its op and shape. One that
it lacks takes its work at the record's rate: FLOPs of products and attention, bytes of what memory bounds. A collective takes what the
record of collectives among as many GPUs says, between two sizes along a line in the logarithms of bytes and time. All compute is scaled
by one number, so that a step of one GPU takes what was measured. Nothing is fitted. Where a class has no record, its nearest sibling's is
taken, and the result says so. `alpha/profile/simulate.py` puts the launches in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from alpha import config
from alpha.backends.cuda.kernels import collectives
from alpha.bench.floor import MEMORY, kind_of
from alpha.bench.step import OURS, ids_of
from alpha.bench.step_ranks import EACH, of_gpus
from alpha.config import Config
from alpha.errors import InputError
from alpha.graph.plan import Launch, Program
from alpha.profile.recorder import shape_text
from alpha.profile.simulate import Cost, RankTime, Timeline, simulate
from alpha.registry.gpu import GpuClass, gpu_class
from alpha.train.assemble import program_for
from alpha.train.catalogue import catalogue

Record = Mapping[str, Any]
MOST_WAITS = 5
"""Exposures that are shown."""


@dataclass(frozen=True)
class Result:
    """One run file on `gpus`. `one`: ns of a step on one GPU; `many`: of all; `notes`: what does not rest on records of this very
    machine and run; `estimated`: ops whose launches are not all in the floor record, and by what they were estimated."""

    run: str
    machine: str
    gpus: int
    tokens: int
    one: float
    many: Timeline
    notes: tuple[str, ...]
    estimated: tuple[str, ...]

    @property
    def efficiency(self) -> float:
        """tokens/s over those of as many times one GPU, each of which takes as many tokens."""
        return self.one / self.many.ns

    @property
    def worst(self) -> RankTime:
        """The rank that waits most for collectives."""
        return max(self.many.ranks, key=lambda rank: rank.exposed)

    @property
    def exposed(self) -> float:
        """Share of the step in which that rank waits."""
        return self.worst.exposed / self.many.ns

    @property
    def waits(self) -> list[tuple[str, str, float]]:
        """(unit, op, ns) of that rank's exposures, the longest first."""
        return sorted(((*at, ns) for at, ns in self.worst.waits.items()), key=lambda x: -x[2])

    def plain(self) -> dict[str, Any]:
        """What a program reads."""
        ranks = [{k: v for k, v in vars(rank).items() if k != "waits"} for rank in self.many.ranks]
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "many"}
        return {**found, "ns": self.many.ns, "efficiency": self.efficiency, "exposed": self.exposed, "waits": self.waits, "ranks": ranks}


class Rates:
    """What launches take, by a floor record and, of many ranks, a record of collectives; `scale`: of all compute."""

    def __init__(self, floor: Record, comm: Record | None, scale: float = 1.0) -> None:
        self.rows, self.copy, self.scale = floor["floor"]["rows"], float(floor["floor"]["copy"]["ns"]), scale
        self.estimated: dict[str, str] = {}
        self._known: dict[tuple[str, str], tuple[float, int]] = {}
        for row in self.rows:
            ns, calls = self._known.get((row["op"], row["shape"]), (0.0, 0))
            self._known[row["op"], row["shape"]] = ns + row["ns"], calls + row["calls"]
        self._curves: dict[str, list[tuple[float, float]]] = {}
        for case in comm["comm"]["cases"] if comm is not None else ():
            if case["graph"]:
                ours = next(x["ns"] for x in case["rows"] if x["name"] == OURS)
                self._curves.setdefault(case["op"], []).append((math.log(case["nbytes"]), math.log(ours)))

    def cost(self, rank: int, launch: Launch) -> Cost:
        """Of a launch of any rank."""
        return self._collective(launch) if "group" in launch.attrs else Cost(self.scale * self._compute(launch))

    def _compute(self, launch: Launch) -> float:
        ns, calls = self._known.get((launch.op, shape_text(launch)), (0.0, 0))
        if calls:
            return ns / calls
        kind = kind_of(launch.op)
        of = "nbytes" if kind == MEMORY else "flops"
        same = [row for row in self.rows if row["op"] == launch.op]
        like = same or [row for row in self.rows if row["kind"] == kind != MEMORY]
        work, what = sum(row[of] for row in like), "bytes" if kind == MEMORY else "FLOPs"
        self.estimated[launch.op] = f"{launch.op}: {what} at the rate of {launch.op if same else f'all of {kind}' if work else 'a copy'}"
        return float(getattr(launch, of) * sum(row["ns"] for row in like) / work) if work else launch.nbytes * self.copy

    def _collective(self, launch: Launch) -> Cost:
        """Bytes of the larger of operand and result, as records count them. A sum by copy engines keeps the blocks that add."""
        op = "send" if launch.op == "receive" else launch.op
        curve = sorted(self._curves.get(op, ()))
        if not curve:
            raise InputError("no record has times of this collective", came=op, expected=", ".join(sorted(self._curves)) or "a record",
                             do="record it on such a machine: `alpha bench comm --device --nproc N --record`")
        nbytes, size = max(ref.type.nbytes for ref in (*launch.ins, *launch.outs)), int(str(launch.attrs["size"]))
        sizes, times = zip(*curve)
        at = math.log(nbytes)
        ns = math.exp(float(np.interp(at, sizes, times)) + max(0.0, at - sizes[-1]))  # beyond the largest, at its rate
        how = collectives.choose(op, nbytes, size)
        if how.algorithm == "engine" and op not in collectives.SUMS:
            return Cost(ns)
        apart = op in ("all_gather", "all_to_all") and how.algorithm == "direct" and launch.ins[0].arena != launch.outs[0].arena
        return Cost(ns, how.blocks + collectives.OWN_BLOCKS * apart)


# -- records -------------------------------------------------------------------------------------------------------------------


def _config(record: Record) -> Config:
    return _parsed("\n".join(record["config"]))


@lru_cache(maxsize=64)
def _parsed(text: str) -> Config:
    return config.parse(text, where="a record's run file")


@lru_cache(maxsize=32)
def _program(text: str, ranks: int) -> Program:
    """The Program of a run file's text on so many GPUs."""
    cfg = _parsed(text)
    return program_for(of_gpus(cfg, ranks), ids_of(cfg), catalogue(), 1, ranks)


def _alike(record: Record, cfg: Config) -> bool:
    """Whether a record of one GPU is of the same model, with as many ids wherever they come from, and precision."""
    other, (shape,) = _config(record), [record[part]["shape"] for part in ("floor", "step") if part in record]
    return shape.endswith(f", vocabulary {ids_of(cfg)}") and (
        replace(other.model, vocab_size=0), other.data.sequence, other.train.precision) == (
        replace(cfg.model, vocab_size=0), cfg.data.sequence, cfg.train.precision)


def _nearest(found: Sequence[Record], wanted: GpuClass | None, what: str, do: str) -> Record:
    """The record of that class, else of its nearest sibling: one of as many GPUs of the same capability and link. InputError for none."""
    if wanted is None and found:
        return found[0]
    siblings = [(c.model != wanted.model, c.key, r) for r in found if wanted is not None and (c := GpuClass.from_key(r["machine"])) and (
        c.capability, c.devices, c.link) == (wanted.capability, wanted.devices, wanted.link)]
    if not siblings:
        raise InputError(f"no {what} to simulate from", came=wanted.key if wanted else "no record on any machine",
                         expected="a record of that class or of a sibling; there are: "
                         + (", ".join(sorted({r["machine"] for r in found})) or "none"), do=do)
    return min(siblings, key=lambda x: x[:2])[2]


def _subjects(records: Sequence[Record], start: str) -> list[Record]:
    return [r for r in records if r["subject"].startswith(start)]


def _measured_one(records: Sequence[Record], cfg: Config, machine: str) -> float | None:
    """ns of a step of one GPU of that class, where the very run was recorded on it."""
    def of(x: Config) -> tuple[object, ...]:
        return x.train.batch, x.train.shards, x.train.micro_batch, x.train.recompute, x.train.fuse

    for r in _subjects(records, "step-"):
        if r["machine"] == machine and _alike(r, cfg) and of(_config(r)) == of(cfg):
            return next((float(x["ns"]) for x in r["step"]["rows"] if x["name"] == OURS and x["ns"] is not None), None)
    return None


def predict(cfg: Config, gpus: int, records: Sequence[Record], machine: str = "", one: float | None = None) -> Result:
    """A step on `gpus` of a machine class ('': of this machine, else of the floor record). `cfg`: of one GPU; `one`: ns of a step on one,
    where it was measured; else by records. InputError where no record will do."""
    if cfg.machine.backend != "cuda":
        raise InputError("a simulated step is of GPUs", came=f'machine.backend = "{cfg.machine.backend}"', expected="cuda",
                         do="take `alpha bench step` on a CPU")
    here = GpuClass.from_key(machine) if machine else gpu_class(1)
    if here is not None and here.devices not in (1, gpus):
        raise InputError("the machine class has another number of GPUs", came=f"{machine} with --nproc {gpus}",
                         expected=f"a class of one GPU, or of {gpus}")
    single = None if here is None else GpuClass(capability=here.capability, model=here.model)
    floor = _nearest([r for r in _subjects(records, "floor-") if _alike(r, cfg)], single, f"floor record of this model ({cfg.run.name})",
                     "record it on such a machine: `alpha bench floor RUN.toml --record`")
    single = single or GpuClass.from_key(floor["machine"])
    wanted = single if gpus == 1 else GpuClass(capability=single.capability, model=single.model, devices=gpus,
                                               link=here.link if here is not None and here.link else "nvlink")
    comm = None if gpus == 1 else _nearest(
        _subjects(records, "comm-device"), wanted, f"record of collectives among {gpus} GPUs",
        f"record it on such a machine: `alpha bench comm --device --nproc {gpus} --record`")
    notes = [f"{what} of {r['machine']}" for what, r, own in (("times of compute", floor, single), ("times of collectives", comm, wanted))
             if r is not None and r["machine"] != own.key]
    rates, text = Rates(floor, comm), cfg.resolved()
    raw = simulate(_program(text, 1), rates.cost).ns
    if one is None and floor["machine"] != single.key:
        one = _measured_one(records, cfg, single.key)
        notes.append("one GPU as measured on " + single.key if one is not None else f"no step of one GPU of {single.key}")
    rates.scale = one / raw if one is not None else floor["floor"]["step_ns"] / sum(row["ns"] for row in rates.rows)
    return Result(cfg.run.name, wanted.key, gpus, cfg.train.batch * cfg.data.sequence * gpus, rates.scale * raw,
                  simulate(_program(text, gpus), rates.cost), tuple(notes), tuple(sorted(rates.estimated.values())))


# -- against what was recorded -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A recorded step on many GPUs beside its prediction. `ns`, `exposed`, `least`: as measured; `efficiency`, `each`: measured, over one
    GPU and over a run on each; `given`: predicted from the line's own step on one GPU; `blind`: from other records alone."""

    run: str
    machine: str
    zero: int
    ns: float
    efficiency: float
    each: float | None
    exposed: float | None
    least: float | None
    given: Result
    blind: Result

    def error(self, predicted: Result) -> float:
        """Of the step's time."""
        return predicted.many.ns / self.ns - 1


def recorded(records: Sequence[Record]) -> list[Line]:
    """Every recorded step on many GPUs that records allow to predict, by the run file that the record holds."""
    found = []
    for r in _subjects(records, "ranks-"):
        rows, gpus, cfg = r["ranks"]["rows"], r["ranks"]["gpus"], _config(r)
        own = {(x["gpus"], x["name"] == EACH): x for x in rows if x["library"] == OURS and x["ns"] is not None}
        many, one, each = own.get((gpus, False)), own.get((1, False)), own.get((gpus, True))
        if many is not None and one is not None:
            try:
                given, blind = (predict(cfg, gpus, records, r["machine"], of) for of in (one["ns"], None))
            except InputError:
                continue  # its model has no floor record, or so many GPUs none of collectives, yet
            found.append(Line(r["ranks"]["run"], r["machine"], cfg.train.zero, many["ns"], many["efficiency"][1],
                              each["ns"] / many["ns"] if each is not None else None, many["exposed"], many.get("least"), given, blind))
    return found


# -- showing -------------------------------------------------------------------------------------------------------------------


def show(result: Result, console: Console) -> None:
    """A prediction, and its largest exposures."""
    many, gpus, worst = result.many, result.gpus, result.worst
    console.print(f"[bold]{result.run}[/]  on {gpus} GPU{'s' * (gpus > 1)}, {result.machine}: simulated, nothing was measured here")
    console.print(f"a step: {result.one / 1e6:,.2f} ms on one GPU, {many.ns / 1e6:,.2f} ms on {gpus}; "
                  f"{result.tokens / many.ns * 1e9:,.0f} tokens/s; efficiency {result.efficiency:.3f}")
    console.print(f"communication: {worst.communication / 1e6:,.2f} ms, exposed {worst.exposed / 1e6:,.2f} ms ({result.exposed:.2%}); "
                  f"compute beside it is longer by {worst.slowed / 1e6:,.2f} ms")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("exposed", "op", "us", "of the step"):
        table.add_column(name, justify="left" if name in ("exposed", "op") else "right")
    for unit, op, ns in result.waits[:MOST_WAITS]:
        table.add_row(unit, op, f"{ns / 1e3:,.1f}", f"{ns / many.ns:.2%}")
    if result.waits:
        console.print(table)
    for line in (*result.notes, *(f"estimated {x}" for x in result.estimated)):
        console.print(line, style="dim")
