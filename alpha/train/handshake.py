"""What all ranks of a job must have alike before the first step: RankError names a rank and a field that differ. Floor 6."""

from __future__ import annotations

from dataclasses import fields

from alpha.comm.agree import agree
from alpha.comm.world import WORLD, World
from alpha.config import Config
from alpha.graph.plan import Program
from alpha.registry.machine import machine_class
from alpha.train.assemble import Dataset
from alpha.train.rundir import source_state


def require_same_start(world: World, cfg: Config, resume: str) -> None:
    """All ranks run one version of the code, with one configuration, on one machine class. `resume`: what the run goes on from, as text."""
    source = source_state()
    facts = {"version": source["version"], "commit": source["commit"], "changes to the commit": source["dirty"],
             "machine class": machine_class().key, "resume": resume}
    facts |= {f"config {name}.{f.name}": repr(getattr(section, f.name)) for name, section in cfg.sections() for f in fields(section)}
    agree(world.group(WORLD), facts, "rank {rank} was started otherwise than the others",
          "start all ranks with one checkout, run file and command line")


def require_same_program(world: World, program: Program, data: Dataset) -> None:
    """All ranks made one Program, from one text."""
    facts = {"tokenizer": data.tokenizer.hash, "training text": data.train.hash, "validation text": data.validation.hash,
             "Program": program.hash()}
    agree(world.group(WORLD), facts, "rank {rank} made another Program, or of another text, than the others",
          "start all ranks with one checkout on one machine class, and one data.cache")
