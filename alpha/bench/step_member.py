"""One rank of ours in `alpha bench step --nproc`: the loop of `alpha train` in a process of its own, that answers blocks of steps. Floor 8.

It joins its job as a rank that another launcher started (alpha/train/launch.py), takes the device of its number and runs what `alpha train`
runs: spot checks, hashes that ranks compare after each step, time stamps of collectives. A process that is alone has no job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from alpha.bench.step import ENDLESS, Ours, RandomTokens
from alpha.comm.watch import Deadlines
from alpha.component import Catalogue
from alpha.config import parse
from alpha.cuda_runtime.launch import LOADED
from alpha.graph.order import COMM
from alpha.profile.served import serve
from alpha.profile.store import read
from alpha.train import launch
from alpha.train.assemble import program_for, threads_for
from alpha.train.catalogue import catalogue
from alpha.train.engine import take_device
from alpha.train.peak import Peak, peak_of
from alpha.train.planned import exchanges
from alpha.train.ranks import STARTING_S

JOIN_S = 120.0
"""How long ranks wait for each other's processes to start."""


class Member:
    """The handlers. `kernels`: what the Program is built of and run by."""

    def __init__(self, kernels: Catalogue | None = None) -> None:
        self._kernels, self._stack = kernels, ExitStack()
        self.ours: Ours  # from `open` on

    def open(self, text: str, vocab: int) -> dict[str, Any]:
        """Join the job, build the Program of the run file `text` and take the device."""
        kernels, place = self._kernels or catalogue(), launch.seat(os.environ)
        asked = parse(text)
        cfg = replace(asked, train=replace(asked.train, profile=0, steps=ENDLESS))
        world = self._stack.enter_context(launch.join(place, Deadlines(join=JOIN_S))) if place is not None else None
        size = world.size if world is not None else 1
        if world is not None and cfg.machine.backend == "cuda":
            take_device(world)
        with world.patient(STARTING_S) if world is not None else ExitStack():  # one may compile, or draw, for longer than another
            program = program_for(asked, vocab, kernels, threads_for(cfg, size), size)
            if world is not None:
                world.add_groups(program.groups)
            self.ours = self._stack.enter_context(Ours(cfg, program, kernels, RandomTokens(cfg, vocab), None, world))
        peak = peak_of(self.ours.executor) if self.ours.loop.ranks.first else Peak(0.0, 0.0, "of the first rank")
        return {**self.ours.executor.hardware(), "peak": peak.flops, "peak_source": peak.source,
                "exchanges": sum(x.launch.stream == COMM for x in exchanges(program))}

    def parameters(self, folder: str) -> dict[str, str]:
        """Name -> file of float32, as they are now. Called by every rank; one writes them."""
        found = {}
        for i, (name, x) in enumerate(self.ours.parameters().items()):
            found[name] = f"{folder}/p{i}.npy"
            if self.ours.loop.ranks.first:
                np.save(found[name], x)
        return found

    def take(self, steps: int) -> list[dict[str, float]]:
        """Steps whose results are looked at."""
        return [{"loss": r.loss, "norm": r.norm, "lr": r.lr} for r in self.ours.take(steps)]

    def taken(self, places: Mapping[str, tuple[int, int]], folder: str) -> str:
        """The file of these elements of the parameters, as they are now; NaN for those that another rank holds."""
        path = f"{folder}/taken-ours-{self.ours.loop.ranks.rank}.npz"
        np.savez(path, **self.ours.taken(places))  # type: ignore[arg-type]
        return path

    def block(self, steps: int) -> dict[str, Any]:
        """Steps in a row: `ns` of one, `tokens` that the device counted in the last one, and what all but that spent in collectives."""
        loop, first = self.ours.loop, self.ours.loop.step
        ns, _ = self.ours.block(steps)
        counted = int(self.ours.executor.outputs(loop.role.schedule[-1].plan)["count"])
        return {"ns": ns, "tokens": counted, **self._told(first, loop.step - 1)}

    def _told(self, first: int, last: int) -> dict[str, list[int]]:
        """Of each step from `first` until before `last`, whose interval has not ended: `wall`: its ns; `exchanges`, `exposed`, `total`:
        calls and ns of the collectives beside compute, by their stamps; `phase`: ns of the phase `comm`, in which the step did nothing
        but communicate, what the host exchanges and collectives among the launches of compute included. Left out are the few steps whose
        launches spot checks looked at one by one."""
        loop, found = self.ours.loop, dict[int, list[int]]()
        if loop.ranks.world is not None and last > first:
            store, rank = loop.metrics, loop.ranks.rank
            store.flush()
            for step, of, wall, phase in read(store.path, "step_timing", "step, rank, wall_ns, comm_ns"):
                if of == rank and first <= step < last and step not in self.ours.checked:
                    found[step] = [wall, 0, 0, 0, phase]
            for step, of, stream, *numbers in read(store.path, "communication", "step, rank, stream, calls, exposed_ns, total_ns"):
                if of == rank and step in found and stream == COMM:
                    found[step][1:4] = [a + b for a, b in zip(found[step][1:4], numbers)]
        return {name: [found[s][i] for s in sorted(found)] for i, name in enumerate(("wall", "exchanges", "exposed", "total", "phase"))}

    def memory(self) -> int:
        """Bytes of the device."""
        return self.ours.memory

    def loaded(self) -> Mapping[str, str]:
        """Text of each compiled file that this process loaded -> its digest."""
        return {str(source): digest for source, digest in LOADED.items()}

    def close(self) -> None:
        """Leave the job. Called by all ranks."""
        self._stack.close()


def main(kernels: Catalogue | None = None) -> None:
    """Answer until the caller goes."""
    m = Member(kernels)
    serve({name: getattr(m, name) for name in ("open", "parameters", "take", "taken", "block", "memory", "loaded", "close")})


if __name__ == "__main__":
    main()
