"""Cases of a loop that is ahead of its device: what is handed over early, and what saves add beside steps. Floor 7."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.checkpoint import folders
from alpha.component import Measured
from alpha.errors import NonFiniteError
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.made import OnDevice, RunsAhead, bits_of, small_run
from alpha.profile.store import read
from alpha.train.loop import Loop, Watch


def ahead(rng: np.random.Generator) -> Measured:
    """On a device beside the host the microbatches of a step are handed over before the results of the step before are asked for, where
    nothing but it follows: each once, with its own text, to the bits and rows of a loop that waits; also stopped between and gone on."""
    checks = []
    with small_run(rng) as run:
        cfg = run.config(2, "train.steps=6", "train.eval_every=0", "train.checkpoint_every=4", "train.profile=0", "train.verify=0")
        with run.loop("waits", cfg) as loop:
            loop.start()
            loop.run()
            expected = bits_of(loop)
        for name, stops in (("whole", ()), ("stopped", (2, 3))):
            with run.loop(name, cfg, kind=RunsAhead) as loop:
                executor = loop.executor
                assert isinstance(executor, RunsAhead)
                loop.start()
                for stop in stops:
                    checks.append((f"{name}: did not stop", not loop.run(Watch(stop=lambda loop=loop, stop=stop: loop.step == stop))))  # type: ignore[misc]
                checks.append((f"{name}: did not finish", loop.run()))
                checks.append((f"{name}: other bits", bits_of(loop) == expected))
                if not stops:  # a pause after four steps, and the last has none behind it
                    checks.append((f"ahead {executor.ahead} times", executor.ahead == 4))
                    checks.append((f"{executor.plans} plans ran", executor.plans == 6 * len(loop.program.schedule)))
            checks.append((f"{name}: other rows", run.rows(name) == run.rows("waits")))
        with run.loop("left", cfg, kind=RunsAhead) as loop:
            loop.start()
            loop.run(Watch(stop=lambda: loop.step == 3))
        with run.loop("left", cfg) as loop:
            loop._save_due, loop._handed = True, 3  # of what the state was before
            loop.resume()
            checks.append(("what was due is so behind a return", not loop._save_due and loop._handed is None))
            checks.append(("resumed where it was stopped", loop.step == 3 and loop.run() and bits_of(loop) == expected))
        with run.loop("profiled", run.config(2, "train.steps=9", "train.eval_every=0", "train.checkpoint_every=0", "train.profile=2",
                                             "train.verify=0"), kind=RunsAhead) as loop:
            loop.start()
            loop.run()
            wanted = sum(not (loop.profiled(step) or loop.profiled(step + 1)) for step in range(8))
            checks.append(("ahead beside a profiled step", getattr(loop.executor, "ahead", -1) == wanted < 8))
        for key in ("eval_every", "sample_every", "checkpoint_every"):  # alone: nothing is handed over ahead of what looks at the state
            every = {k: 0 for k in ("eval_every", "sample_every", "checkpoint_every")} | {key: 3}
            with run.loop(key, run.config(2, "train.steps=8", "train.profile=0", "train.verify=0",
                                          *(f"train.{k}={n}" for k, n in every.items())), kind=RunsAhead) as loop:
                loop.start()
                seen = []
                for _ in range(8):
                    seen.append(loop.unbroken())
                    loop.step += 1
                checks.append((f"{key}: ahead {seen}", seen == [(step + 1) % 3 != 0 and step < 7 for step in range(8)]))
    return all_hold(checks)


def _story(loop: Loop, device: bool) -> tuple[list[str], list[list[str]], list[tuple[bool, bool, bool]]]:
    """What a loop over all steps does in turn; of each save but the last what the steps wait for, in the same words; of each step whether
    it had been handed over ahead, whether a save was under way, and whether it was like others. A save is over when it was polled once
    behind its opening."""
    t, micros = loop.cfg.train, len(loop.replays) - 1
    checked = [t.verify > 0 and step % t.verify == 0 for step in range(t.steps + 1)]
    alike = [not checked[step] and not loop.profiled(step) for step in range(t.steps)]
    told, waits, steps = list[str](), list[list[str]](), list[tuple[bool, bool, bool]]()
    handed = begun = open_ = False
    for step in range(t.steps):
        due = device and step > 0 and step % t.checkpoint_every == 0
        if due and checked[step]:
            told, due, begun = [*told, "begin"], False, True
            waits[-1] += ["begin"]
        for _ in range(0 if handed else micros):
            told += [f"microbatches of {step}", *["begin"] * due]
            due, begun = False, begun or due
        told += ["begin"] * due
        begun = begun or due
        told += [f"update of {step}"]
        if begun and not checked[step] and checked[step + 1]:
            told, begun, open_ = [*told, "open"], False, True
        told += [f"wrote {step}"]
        last, by = step + 1 == t.steps, (t.eval_every, t.checkpoint_every * (not device))
        ahead = device and not last and alike[step] and alike[step + 1] and not any(n and (step + 1) % n == 0 for n in by)
        told += [f"microbatches of {step + 1}"] * (micros * ahead)
        if begun and not checked[step]:
            told, begun, open_ = [*told, "open"], False, True
        told += [f"results of {step}"]
        steps.append((handed, begun or open_, alike[step]))
        end, handed, open_ = ["poll"], ahead, False
        if last or (step + 1) % t.checkpoint_every == 0:
            end, begun = [*end, "finish", *["open"] * begun], False
        told += end
        if waits and not handed:
            waits[-1] += end
        if last:
            told += ["begin", "open", "finish"]
        elif "finish" in end:
            waits.append([] if device else ["begin", "open"])
            told, open_ = [*told, *waits[-1]], not device
    return told, waits, steps


def beside(rng: np.random.Generator) -> Measured:
    """Of drawn distances between saves, checks and validations, on a device and on arrays: a save begins behind the first microbatches of
    its step or ahead of a checked one, the host's part comes while the device has work, which is before a checked step is waited for; and
    each ns that the steps waited, or took beside a save, is told as that save's. What stands is the state as it was."""
    checks = []
    with small_run(rng) as run:
        fixed = ("train.steps=9", "train.keep=99", "train.verify=0", "train.profile=0", "train.eval_every=0")
        with run.loop("plain", run.config(2, *fixed)) as loop:
            loop.start()
            after = []
            while loop.step < 9:
                after.append(bits_of(loop))
                loop.advance()
            after.append(bits_of(loop))
        drawn = [(int(rng.integers(1, 5)), *(int(x) for x in rng.choice((0, 2, 3, 4), 3))) for _ in range(2)]
        settings = [(2, 3, 0, 0), (3, 2, 0, 2), *drawn]
        for trial, (every, verify, evals, profile) in enumerate(settings):
            kind = CpuExecutor if trial % 3 == 2 else OnDevice
            cfg = run.config(2, *fixed[:2], f"train.checkpoint_every={every}", f"train.verify={verify}", f"train.eval_every={evals}",
                             f"train.profile={profile}")
            name = f"{kind.__name__} {every} {verify} {evals} {profile}"
            with run.loop(name, cfg, kind=kind) as loop:
                did, took, clock = _watched(loop, {what: int(rng.integers(1, 999)) for what in ("begin", "open", "poll", "finish")})
                loop.start()
                loop.foretell_saves()
                checks.append((f"{name}: did not finish", loop.run()))
                told, waits, steps = _story(loop, kind is OnDevice)
                at = next((i for i, pair in enumerate(zip(did, told)) if pair[0] != pair[1]), min(len(did), len(told)))
                checks.append((f"{name}: {did[at - 2 : at + 2]} for {told[at - 2 : at + 2]}", did == told))
                checks.append((f"{name}: waits", loop.stalls.waits_ns == [sum(clock[what] for what in save) for save in waits]))
                checks.append((f"{name}: steps {[x[1:] for x in took]}", [x[1:] for x in took] == steps))
                under, quiet, saves = [list[tuple[bool, int]]() for _ in waits], {True: list[int](), False: list[int]()}, 0
                for step, (ns, ahead, saving, usual) in enumerate(took):
                    saves = min(step // every, len(waits)) if kind is OnDevice else 0
                    if kind is OnDevice and usual and step >= 3:  # those of the warm-up are left out
                        (under[saves - 1].append((ahead, ns)) if saving else quiet[ahead].append(ns))
                checks.append((f"{name}: beside saves", loop.stalls.under_way == under))
                checks.append((f"{name}: beside none", loop.stalls.quiet == quiet))
                where = folders.steps(loop.checkpoints)
                checks.append((f"{name}: {where} stand", where == sorted({*range(every, 9, every), 9})))
                for step in where:
                    state = folders.read(folders.at(loop.checkpoints, step))
                    bits = b"".join(flat[o : o + n].tobytes() for _, (layout, flat) in sorted(state.items()) for o, n in layout.ranges())
                    checks.append((f"{name}: step {step} is another state", bits == after[step]))
            keys = {str(key) for key, _ in read(run.root / name / "m.sqlite", "run_metadata", "key, value")}
            checks.append((f"{name}: told {sorted(keys)}", ("save_copy_ns" in keys) == (kind is OnDevice) and "save_bytes" in keys))
    return all_hold(checks)


def _watched(loop: Loop, costs: dict[str, int]) -> tuple[list[str], list[tuple[int, bool, bool, bool]], dict[str, int]]:
    """What it does from here on; (ns, ahead, saving, usual) of each step as its stalls are told; `costs`, ns by their clock of each part of
    a save. The thread that writes is waited for where a save is polled, so that nothing hangs on it."""
    did, took, now = list[str](), list[tuple[int, bool, bool, bool]](), [0]
    saver, executor, stalls = loop.saver, loop.executor, loop.stalls
    enqueue, outputs, wrote, stepped, polled = executor.enqueue, executor.outputs, loop.spots.wrote, stalls.stepped, saver.poll
    plans = [tuple(call.plan for call in calls) for calls in loop.replays]
    given = [0] * len(plans)

    def handed(names: tuple[str, ...], inputs: Any = None) -> None:
        if names in plans:
            which = plans.index(names)
            each = plans.count(names)
            did.append(f"{'update' if which + 1 == len(plans) else 'microbatches'} of {given[which] // each}")
            given[which] += 1
        enqueue(names, inputs)

    def asked(name: str) -> dict[str, np.ndarray]:
        if name == loop.role.schedule[-1].plan:
            did.append(f"results of {loop.step}")
        return outputs(name)

    def noted(step: int) -> None:
        did.append(f"wrote {step}")
        wrote(step)

    def timed(ns: int, micro_ns: int, *, ahead: bool, saving: bool, usual: bool) -> None:
        took.append((ns, ahead, saving, usual))
        stepped(ns, micro_ns, ahead=ahead, saving=saving, usual=usual)

    def part(what: str) -> Callable[..., Any]:
        own = getattr(saver, what)

        def called(*args: Any) -> Any:
            if what == "open" and not saver.begun:
                return own(*args)
            did.append(what)
            now[0] += costs[what]
            return own(*args)
        return called

    def over() -> Any:
        made = polled()
        while saver._written is not None or saver._made is not None:
            made = polled() or made
        return made

    saver.poll = over  # type: ignore[method-assign]
    for what in costs:
        setattr(saver, what, part(what))
    executor.enqueue, executor.outputs = handed, asked  # type: ignore[method-assign, assignment]
    loop.spots.wrote, stalls.stepped = noted, timed  # type: ignore[method-assign]
    stalls.clock = lambda: now[0]
    return did, took, costs


def bad_step_ahead(rng: np.random.Generator) -> Measured:
    """A gradient that is not finite once, in a step behind which the next one was handed over: refused with the state as it was, and the
    loop goes on from there to the bits of a run that had no such step."""
    checks = []
    with small_run(rng) as run:
        cfg = run.config(2, "train.eval_every=0", "train.checkpoint_every=0", "train.profile=0", "train.verify=0")
        with run.loop("good", cfg) as loop:
            loop.start()
            loop.run()
            expected = bits_of(loop)
        with run.loop("a", cfg) as loop:
            loop.start()
            loop.run(Watch(stop=lambda: loop.step == 2))
            before = bits_of(loop)
        with run.loop("b", cfg, kind=RunsAhead) as loop:
            executor, refused = loop.executor, False
            assert isinstance(executor, RunsAhead)
            loop.start()
            executor.poison = 2
            try:
                loop.run()
            except NonFiniteError:
                refused = True
            checks.append(("not refused", refused))
            checks.append(("nothing was handed over behind it", executor.ahead == 3))
            checks.append(("changed the state", bits_of(loop) == before))
            checks.append(("counted", loop.step == 2 and folders.steps(loop.checkpoints) == [2] and run.rows("b")[-1][-1] == 0))
            told = run.rows("b")[-1]
            checks.append((f"a number that is none is told: {told}", None in told and not {math.inf, "inf", "nan"} & {*told}))
            checks.append(("did not go on", loop.run() and bits_of(loop) == expected))
    return all_hold(checks)
