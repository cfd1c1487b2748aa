"""Cases of the executor of the GPU, by gate; here those of spot checks, of memory, and of what a run is refused or stopped for. Floor 7."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from alpha.backends.cuda.executor import CudaExecutor
from alpha.backends.cuda.staging import staging_bytes
from alpha.component import Measured
from alpha.cuda_runtime.memory import aligned
from alpha.errors import InputError, MachineError, NonFiniteError
from alpha.gates.contracts.cuda_bits import (
    _ahead,
    _copy_follows,
    _reads_only,
    _recompute_same_bits,
    _replay_same,
    _saved,
    _tree,
    _ways,
)
from alpha.gates.contracts.cuda_oracle import _against_oracle, _along, _band, _later_microbatch, _learns, _logits
from alpha.gates.contracts.cuda_run import Check, _drawn, _step, kernels, opened, program, references
from alpha.gates.contracts.cuda_spots import disturbed, undisturbed
from alpha.gates.contracts.reference import Reference, batch, batches_of, both, layout_of, refuses, yes

Case = Callable[[np.random.Generator], Measured]

LARGE = 1 << 30
"""Bytes of the arena that makes a device's granularity small beside 2 %."""


# -- checks -------------------------------------------------------------------------------------------------------------------------------


def _not_accused(ref: Reference, rng: np.random.Generator) -> Measured:
    """Two steps of two shards of two microbatches, each of whose launches is recomputed."""
    with opened(program(ref.name, 2, 2), _drawn(ref, rng)["param"].astype(np.float32)) as executor:
        return undisturbed(executor, [batches_of(ref, rng, 2, 2) for _ in range(2)], rng)


def _accused(ref: Reference, rng: np.random.Generator) -> Measured:
    """Flipped bits and wrong results are told of in their step, by name."""
    with opened(program(ref.name), _drawn(ref, rng)["param"].astype(np.float32)) as executor:
        return disturbed(executor, batches_of(ref, rng, 1, 1), rng)


# -- memory -------------------------------------------------------------------------------------------------------------------------------


def _memory(ref: Reference, rng: np.random.Generator) -> Measured:
    """Arenas are as large as planned, to the 256 bytes in which memory is handed out, and the device gave what was planned within 2 %.

    The overhead of the context (loaded kernels, the driver's own) is measured by opening the same executor once before: it stays.
    """
    p = program(ref.name)
    plan = p.plans["micro_first@0"]
    p = replace(p, plans={**p.plans, "micro_first@0": replace(plan, arenas={**plan.arenas, "act": LARGE})})
    param, batches, found = _drawn(ref, rng)["param"].astype(np.float32), batches_of(ref, rng, 1, 1), {}
    for _ in range(2):
        with opened(p, param) as executor:
            _step(executor, batches)
            found = executor.resident()
        del executor  # or what the first one keeps would be given back while the second takes its own
    taken, planned = found.pop("device"), p.arenas()
    differ = [name for name, n in planned.items() if found.get(name) != aligned(n)]
    total = sum(aligned(n) for n in planned.values()) + staging_bytes(p)
    exact = not differ and found.keys() == planned.keys()
    return Measured(error=abs(taken / total - 1) if exact else np.inf, bound=0.02, cases=len(planned) + 1,
                    note=f"of {total:,} planned bytes; arenas of other sizes: {', '.join(differ) or 'none'}")


# -- faults -------------------------------------------------------------------------------------------------------------------------------


def _bad_step_harmless(ref: Reference, rng: np.random.Generator) -> Measured:
    """A non-finite gradient: parameters, moments, step and copy keep their bits, finite is 0; the next good step goes on."""
    with opened(program(ref.name), _drawn(ref, rng)["param"].astype(np.float32)) as executor:
        _step(executor, batches_of(ref, rng, 1, 1))
        kinds = [k for k in executor.program.plans["snapshot"].outputs]
        before = {k: executor.look(k) for k in kinds}
        copy = executor.program.plans["narrow"].launches[0].outs[0]
        held = executor.read(copy)
        executor.run("micro_first@0", batch(ref, rng))
        executor.state("grad0")[layout_of(ref).ranges()[3][0]] = rng.choice([np.inf, -np.inf, np.nan])
        out = executor.run("update")
        same = all(before[k].tobytes() == executor.look(k).tobytes() for k in kinds) and held.tobytes() == executor.read(copy).tobytes()
        same &= int(out["finite"]) == 0
        out = _step(executor, batches_of(ref, rng, 1, 1))
        moved = int(out["finite"]) == 1 and int(executor.look("counter")[0]) == 2
    return yes(same and moved, cases=len(kinds))


def _replay_names(ref: Reference, rng: np.random.Generator) -> Measured:
    """An infinite weight: replay names the first op that reads it, with layer and model line."""
    layout = layout_of(ref)
    name = next(n for n in layout.offsets if n.startswith("block.1.mlp.") and n.endswith(".weight"))
    param = _drawn(ref, rng)["param"].astype(np.float32)
    param[layout.offsets[name]] = np.inf
    with opened(program(ref.name), param) as executor:
        try:
            executor.replay("micro_first@0", batch(ref, rng))
        except NonFiniteError as error:
            text = str(error)
            return yes("matmul made" in text and "block.1 forward" in text and "parts.py:" in text, text[:120])
    return yes(False, "no error")


def _bad_inputs(ref: Reference, rng: np.random.Generator) -> Measured:
    """Missing, ragged, ill-typed and unknown inputs are refused by run, replay and stage, and a good call afterwards is right."""
    with opened(program(ref.name), _drawn(ref, rng)["param"].astype(np.float32)) as executor:
        good = batch(ref, rng)
        executor.run("micro_first@0", good)
        want, tokens = executor.look("grad0"), good["tokens"]
        wrong = [{}, {**good, "tokens": tokens[:, :-1]}, {**good, "tokens": tokens.astype(np.int64)}, {**good, "more": tokens}]
        one = (executor.run, executor.replay)
        held = [refuses(InputError, partial(call, "micro_first@0", w)).error == 0 for w in wrong for call in one]
        held += [refuses(InputError, partial(executor.stage, ("micro_first@0",), [w])).error == 0 for w in wrong]
        held.append(refuses(InputError, partial(executor.run, "update", {"tokens": tokens})).error == 0)
        executor.run("micro_first@0", good)
        held.append(want.tobytes() == executor.look("grad0").tobytes())
    return yes(all(held), cases=len(held))


def _no_room(ref: Reference, rng: np.random.Generator) -> Measured:
    """A Program whose microbatches of 8 take more than the device has is refused before anything is allocated, with what would fit."""
    p = program(ref.name)
    with CudaExecutor(p, kernels()) as executor:
        total = executor.device.properties.memory_bytes
    plan = p.plans["micro_first@0"]
    large = replace(plan, arenas={**plan.arenas, "act": 3 * total})
    asked = replace(p, plans={**p.plans, "micro_first@0": large}, facts={**p.facts, "micro_batch": 8})
    try:
        CudaExecutor(asked, kernels()).close()
    except MachineError as error:
        text = str(error)
        return yes("does not fit" in text and "micro_batch = 2" in text and "GiB planned" in text, text[:120])
    return yes(False, "no error")


# -- by gate ------------------------------------------------------------------------------------------------------------------------------


def _both(check: Check, prefix: str = "") -> list[tuple[str, Case]]:
    return both(check, prefix, references)


CASES: dict[str, dict[str, list[tuple[str, Case]]]] = {
    "executor.cuda": {
        "parity": [*_both(_against_oracle), *_both(_replay_same, "replay-"), *_both(_reads_only, "read-only-"), *_both(_ahead, "ahead-"),
                   *_both(_logits, "logits-"), *_both(_later_microbatch, "later-"), *_both(_copy_follows, "copy-"),
                   *[case for s in (2, 8) for case in _both(_tree(s), f"tree-{s}-")], *_both(_learns, "learns-"),
                   *_both(_along, "along-"), *_both(_saved, "saved-"), ("band-llama", lambda rng: _band(references()["llama"], rng)),
                   *_both(_not_accused, "spots-")],
        "determinism": [*_both(_ways, "ways-"), *_both(_recompute_same_bits, "recompute-")],
        "faults": [("memory", lambda rng: _memory(references()["llama"], rng)),  # of the whole device: no other gate may use it meanwhile
                   ("no-room", lambda rng: _no_room(references()["llama"], rng)), *_both(_bad_inputs, "inputs-"),
                   *_both(_replay_names, "replay-"), *_both(_bad_step_harmless, "bad-step-"),
                   *_both(_accused, "flips-")],
    },
}
