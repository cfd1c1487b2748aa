"""What may not move a bit of the executor of the GPU: who computes a shard, how a step is handed over or watched, a recompute policy,
whether it is saved beside the next step. Floor 7."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from alpha.backends.cuda.executor import CudaExecutor
from alpha.component import Measured
from alpha.gates.contracts.cuda_run import KEPT, Check, _drawn, _loss, _step, kernels, opened, program
from alpha.gates.contracts.cuda_spots import Judged, checked_step
from alpha.gates.contracts.reference import Batches, Reference, batch, batches_of, hash_of, layout_of, text_of, yes
from alpha.graph.plan import Step
from alpha.ops.numerics import round_to
from alpha.passes.build import stats_layout

KEEP_BITS = {"gpt": (("block", ()), ("ops", ("attention_packed",)), ("ops", ("layernorm", "dropout"))),
             "llama": (("block", ()), ("ops", ("attention_packed", "rope_packed")), ("ops", ("rmsnorm",)))}
"""Recompute policies whose second computation goes through launches that round as the first ones did."""

WAYS = ("1 calls", "1", "1 uncaptured", "1 watched", "1 profiled", "1 staged", "1 resumed", "2 staged", "3 watched", "0", "0 watched",
        "0 profiled", "0 staged", "1 watched ahead", "0 ahead", "1 bare", "0 bare", "1 checked", "0 watched checked",
        "0 blank")
"""Ways to run the same steps: microbatches of one replay (0: all), and how. `calls`: each Plan by itself, its end waited for; `ahead`: a
step's microbatches are handed over before the results of the step before are waited for; `bare`: profiled from the second step on, with
the instrument off, so that launches go by themselves between time stamps; `checked`: as spot checks of every step see it; `blank`: from a
state that was spoiled and then cleared, as a run begins."""


def _digest(executor: CudaExecutor) -> str:
    return hash_of(*(executor.look(k) for k in KEPT))


# -- microbatches and shards --------------------------------------------------------------------------------------------------------------


def _tree(shards: int) -> Check:
    def check(ref: Reference, rng: np.random.Generator) -> Measured:
        """The gradients of S shards, one replay after another, are to the bit those of each shard alone added in a balanced tree: it does
        not matter who computes a shard, nor what ran before it."""
        batches, param = batches_of(ref, rng, shards, 1), _drawn(ref, rng)["param"].astype(np.float32)
        with opened(program(ref.name, shards), param) as executor:
            for call in executor.program.schedule[:-1]:
                executor.run(call.plan, text_of(batches, call))
            got = executor.look(f"grad{shards.bit_length() - 1}")
        level: list[np.ndarray] = []
        with opened(program(ref.name), param) as executor:
            for s in reversed(range(shards)):
                executor.run("micro_first@0", batches[s, 0])
                level.insert(0, executor.look("grad0"))
        while len(level) > 1:
            level = [a + b for a, b in zip(level[0::2], level[1::2])]
        ranges = stats_layout(layout_of(ref)).ranges()
        differ = sum(int((got[o : o + n] != level[0][o : o + n]).any()) for o, n in ranges)
        return Measured(error=float(differ), bound=0.0, cases=len(ranges), note="tensors that differ")
    return check


def _ahead(ref: Reference, rng: np.random.Generator) -> Measured:
    """Twelve microbatches, more than batches can be on their way, handed over without waiting: to the bit those with a wait after each."""
    batches, found = batches_of(ref, rng, 1, 12), []
    with opened(program(ref.name, 1, 12), _drawn(ref, rng)["param"].astype(np.float32)) as executor:
        for wait in (True, False):
            for (_, m), x in batches.items():
                executor.enqueue(("micro@0" if m else "micro_first@0",), [x])
                if wait:
                    executor.stream.synchronize()
            found.append(executor.look("grad0").tobytes())
    return yes(found[0] == found[1], cases=12)


def _replay_same(ref: Reference, rng: np.random.Generator) -> Measured:
    """replay computes what run computes, from its own inputs, also where another batch was staged; so does run."""
    with opened(program(ref.name), _drawn(ref, rng)["param"].astype(np.float32)) as executor:
        first, second = batch(ref, rng), batch(ref, rng)
        executor.run("micro_first@0", second)
        want = executor.look("grad0")
        held = []
        for again in (executor.replay, executor.run):
            executor.run("micro_first@0", first)
            held.append(want.tobytes() != executor.look("grad0").tobytes())  # or the comparison means nothing
            executor.stage(("micro_first@0",), [first])
            again("micro_first@0", second)
            held.append(want.tobytes() == executor.look("grad0").tobytes())
        return yes(all(held), cases=len(held))


# -- state --------------------------------------------------------------------------------------------------------------------------------


def _copy_follows(ref: Reference, rng: np.random.Generator) -> Measured:
    """After each of two steps the bf16 copy is the master's rounding, to the bit; the step is counted; the master has moved."""
    wrong = 0
    with opened(program(ref.name, 2, 2), _drawn(ref, rng)["param"].astype(np.float32)) as executor:
        for step in range(2):
            before = executor.look("param")
            out = _step(executor, batches_of(ref, rng, 2, 2))
            param = executor.look("param")
            want = round_to(param.astype(np.float64), "bf16").astype(np.float32).view(np.uint32) >> np.uint32(16)
            ref16 = executor.program.plans["narrow"]
            held = executor.read(next(iter(ref16.launches)).outs[0]).view(np.uint32) >> np.uint32(16)
            wrong += int(np.count_nonzero(held != want)) + (not np.any(param != before))
            wrong += int(executor.look("counter")[0]) != step + 1 or int(out["finite"]) != 1
    return Measured(error=float(wrong), bound=0.0, cases=2, note="elements of a stale copy")


def _reads_only(ref: Reference, rng: np.random.Generator) -> Measured:
    """eval, decode and snapshot leave every state array alone, and the snapshot's outputs are the state arrays."""
    with opened(program(ref.name), _drawn(ref, rng)["param"].astype(np.float32)) as executor:
        p = executor.program
        _step(executor, batches_of(ref, rng, 1, 1))
        kinds = [k for k in p.states if k != "param16"]
        before = {k: executor.look(k) for k in kinds}
        full = batch(ref, rng)
        executor.run("eval", {k: v for k, v in full.items() if k in p.plans["eval"].inputs})
        executor.run("decode", {k: full[k][:1] for k in p.plans["decode"].inputs if k in full} | {"index": np.array([3], np.int32)})
        out = executor.run("snapshot")
        same = all(before[k].tobytes() == executor.look(k).tobytes() for k in kinds)
        same &= set(out) == {k for k in kinds if not k.startswith("grad")} and all(out[k].tobytes() == before[k].tobytes() for k in out)
    return yes(same, cases=len(kinds))


def _saved(ref: Reference, rng: np.random.Generator) -> Measured:
    """What is copied of the state behind each update, beside the microbatches of the next step, is what the update left, every element of
    every kind, from any element on; and the steps have the bits that they have without. The first copy begins before its update has run."""
    steps, p = [batches_of(ref, rng, 2, 2) for _ in range(3)], program(ref.name, 2, 2)
    param = _drawn(ref, rng)["param"].astype(np.float32)
    kinds = list(p.plans["snapshot"].outputs)
    with opened(p, param) as executor:
        left = []
        for batches in steps:
            _in_replays(executor, batches)
            left.append({kind: executor.look(kind) for kind in kinds})
    wrong, cases = list[str](), 0
    with opened(p, param) as executor:
        copies, parts = executor.downloads, dict[str, list[tuple[int, np.ndarray]]]()
        lent = {kind: copies.lend(kind) for kind in kinds}
        for i in range(len(steps) + 1):
            for calls in p.replays() if i < len(steps) else ():
                executor.enqueue(*_handed(calls, steps[i]))
            if parts:
                if i > 1:  # the first copies are waited for before anything else is, the later ones behind the update that waits for them
                    executor.outputs(p.schedule[-1].plan)
                copies.wait()
                for kind, pieces in parts.items():
                    cases += 1
                    good = all(x.tobytes() == left[i - 1][kind][at : at + x.size].tobytes() for at, x in pieces)
                    wrong += [] if good else [f"{kind} behind step {i - 1}"]
            if i == len(steps):
                break
            room, at = copies.room(sum(x.shape[0] * x.dtype.itemsize for x in lent.values())), 0
            copies.begin()
            for kind, x in lent.items():
                parts[kind] = []
                for start, stop in ((0, x.shape[0] // 3), (x.shape[0] // 3, x.shape[0])):
                    target = room[at : at + (stop - start) * x.dtype.itemsize].view(x.dtype)
                    copies.copy(x, start, target)
                    parts[kind].append((start, target))
                    at += target.nbytes
            copies.end()
        wrong += [f"{kind} at the end" for kind in kinds if executor.look(kind).tobytes() != left[-1][kind].tobytes()]
    return yes(not wrong, "; ".join(wrong)[:120], cases=cases + len(kinds))


# -- ways to run the same steps -----------------------------------------------------------------------------------------------------------


def _ways(ref: Reference, rng: np.random.Generator) -> Measured:
    """Three steps of two shards of two microbatches: each call by itself, and handed over in replays of one, two, three and all four
    microbatches; captured, launch by launch, watched, profiled with an instrument and without, checked, with inputs that are staged while
    the step before computes, one step ahead, after another state, and down and up again after the first step: the same parameters and
    moments, and the same loss of each step."""
    steps = [batches_of(ref, rng, 2, 2) for _ in range(3)]
    param, p = _drawn(ref, rng)["param"].astype(np.float32), program(ref.name, 2, 2)
    found, losses = {}, {}
    for way in WAYS:
        words = way.split()
        cut, ahead = replace(p, replay=int(words[0])), "ahead" in words
        with opened(cut, param, captured="uncaptured" not in words) as executor:
            if "blank" in words:
                _begin_again(executor, param)
            told, bare, spots = [], "bare" in words, Judged(executor, rng) if "checked" in words else None
            if spots is not None:
                spots.restart(0)
            for i, batches in enumerate(steps):
                if {"watched", "profiled", "bare"} & set(words):
                    executor.recorder.begin(i, profiled="profiled" in words or (bare and i > 0), ahead=ahead and i > 0)
                following = steps[i + 1] if (ahead or "staged" in words) and i + 1 < len(steps) else None
                if "calls" in words:
                    told.append(_loss(_step(executor, batches)))
                elif spots is not None:
                    told.append(_loss(checked_step(executor, spots, i, batches)))
                elif ahead:
                    told.append(_loss(_one_ahead(executor, batches, following, begun=i > 0)))
                    executor.recorder.end_step(ahead=following is not None)
                else:
                    told.append(_loss(_in_replays(executor, batches, following, staged="staged" in words and i > 0)))
                if bare:
                    executor.watch.instrument = None
                if "resumed" in words and i == 0:
                    break
            if "resumed" not in words:
                found[way], losses[way] = _digest(executor), told
                continue
            saved = {k: executor.look(k) for k in executor.program.plans["snapshot"].outputs}
        with CudaExecutor(cut, kernels()) as executor:
            lent = {kind: executor.state(kind) for kind in saved}  # all of them first, as a checkpoint is loaded
            for kind, x in saved.items():
                lent[kind][...] = x
            executor.run("narrow")
            for batches in steps[1:]:
                _in_replays(executor, batches)
            found[way] = _digest(executor)
    other = [w for w, d in found.items() if d != found[WAYS[0]] or losses.get(w, losses[WAYS[0]]) != losses[WAYS[0]]]
    return Measured(error=float(len(other)), bound=0.0, cases=len(found), digest=found[WAYS[0]],
                    note=f"other than {WAYS[0]}: " + ", ".join(other))


def _begin_again(executor: CudaExecutor, param: np.ndarray) -> None:
    """Spoil the state, on the device and as it is handed out, and put it back."""
    kinds = executor.program.plans["snapshot"].outputs
    for kind in (*kinds, *kinds):
        executor.state(kind)[...] = 1
    for kind in kinds:
        executor.clear(kind)
    executor.blank("param")[...] = param
    executor.run("narrow")


def _handed(calls: Sequence[Step], text: Batches) -> tuple[tuple[str, ...], list[dict[str, np.ndarray]]]:
    return tuple(call.plan for call in calls), [text_of(text, call) for call in calls]


def _in_replays(executor: CudaExecutor, batches: Batches, following: Batches | None = None, *,
                staged: bool = False) -> dict[str, np.ndarray]:
    """A step as a training loop enqueues it, without a wait before its end. `staged`: the inputs of its first replay were sent during the
    step before; those of the `following` step are sent during this one."""
    replays = executor.program.replays()
    for index, calls in enumerate(replays):
        plans, inputs = _handed(calls, batches)
        executor.enqueue(plans, None if staged and index == 0 else inputs)
    if following is not None:
        executor.stage(*_handed(replays[0], following))
    return executor.outputs(executor.program.schedule[-1].plan)


def _one_ahead(executor: CudaExecutor, batches: Batches, following: Batches | None, *, begun: bool) -> dict[str, np.ndarray]:
    """A step of a loop that runs ahead. `begun`: its microbatches were handed over during the step before, as those of the `following`
    step are during this one."""
    *micros, update = executor.program.replays()
    for calls in micros if not begun else ():
        executor.enqueue(*_handed(calls, batches))
    executor.enqueue(*_handed(update, batches))
    if following is not None:
        for calls in micros:
            executor.enqueue(*_handed(calls, following))
    return executor.outputs(update[-1].plan)


def _recompute_same_bits(ref: Reference, rng: np.random.Generator) -> Measured:
    """Two steps without and with each policy of KEEP_BITS: the same bits, dropout included, in less memory for activations."""
    steps = [batches_of(ref, rng, 1, 1) for _ in range(2)]
    param, found = _drawn(ref, rng)["param"].astype(np.float32), {}
    for policy in (("none", ()), *KEEP_BITS[ref.name]):
        with opened(program(ref.name, policy=policy), param) as executor:
            for batches in steps:
                _step(executor, batches)
            found[policy] = _digest(executor)
    plain, *digests = found.values()
    again = [any(x.phase == "recompute" for x in program(ref.name, policy=p).plans["micro_first@0"].launches) for p in KEEP_BITS[ref.name]]
    return Measured(error=float(sum(d != plain for d in digests) + again.count(False)), bound=0.0, cases=len(found), digest=plain,
                    note="other bits than without: " + ", ".join(str(p) for p, d in found.items() if d != plain))
