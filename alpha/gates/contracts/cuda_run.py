"""Cases of the executor of the GPU: whole 2-layer bf16 models against the float64 oracle, and what may not move a bit. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import numpy as np

from alpha.backends.cuda.catalogue import fill
from alpha.backends.cuda.executor import CudaExecutor
from alpha.backends.cuda.staging import staging_bytes
from alpha.component import Catalogue, Measured
from alpha.cuda_runtime.memory import aligned
from alpha.errors import InputError, MachineError, NonFiniteError
from alpha.gates.contracts.cuda_spots import Judged, checked_step, disturbed, undisturbed
from alpha.gates.contracts.mixed import MACHINE, Arenas, by_tensor, mixed_graph
from alpha.gates.contracts.reference import (
    SCHEDULE,
    Batches,
    Reference,
    batch,
    batches_of,
    both,
    filled,
    hash_of,
    layout_of,
    pair,
    random_state,
    refuses,
    text_of,
    yes,
)
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import Graph, prune
from alpha.graph.plan import Program, Step
from alpha.graph.trace import Tracer
from alpha.models import gpt, llama
from alpha.ops.numerics import round_to, ulp
from alpha.optim.schedules import ScheduleConfig
from alpha.optim.update import adamw
from alpha.passes.build import STATS, StepShape, build_program, stats_layout
from alpha.profile.noise import quantile

Case = Callable[[np.random.Generator], Measured]
Check = Callable[[Reference, np.random.Generator], Measured]

VOCAB, SEQ, BATCH = 72, 48, 2
DRAWS = 16
"""Naive computations that an error is held against."""

LAST, EVERY = 100, 10
"""Steps of the run along which the state is held against the oracle."""

BAND, WINDOW, RUNS = 60, 10, 8
"""Steps of the run whose losses are compared with those of RUNS runs on the CPU, as means of WINDOW steps."""

REFUSED = 1 / 5000
"""Chance that a case refuses a curve, or errors, that belong to the others."""

UPDATES = {
    "short": adamw(SCHEDULE),
    "long": adamw(ScheduleConfig(kind="cosine", peak=2e-3, warmup=10, total=LAST)),
    "band": adamw(ScheduleConfig(kind="cosine", peak=2e-3, warmup=10, total=BAND), weight_decay=1.0),  # a decay that shows in 60 steps
}
"""Run -> its optimizer."""

KEEP_BITS = {"gpt": (("block", ()), ("ops", ("attention_packed",)), ("ops", ("layernorm", "dropout"))),
             "llama": (("block", ()), ("ops", ("attention_packed", "rope_packed")), ("ops", ("rmsnorm",)))}
"""Recompute policies whose second computation goes through launches that round as the first ones did."""

ROUND_AGAIN = {"gpt": (("ops", ("matmul",)),), "llama": (("ops", ("matmul",)), ("ops", ("swiglu_packed",)))}
"""Those that compute again from a stored bf16 result what was first computed from the product's f32 sum."""

LARGE = 1 << 30
"""Bytes of the arena that makes a device's granularity small beside 2 %."""

WAYS = ("1 calls", "1", "1 uncaptured", "1 watched", "1 profiled", "1 staged", "1 resumed", "2 staged", "3 watched", "0", "0 watched",
        "0 profiled", "0 staged", "1 watched ahead", "0 ahead", "1 bare", "0 bare", "1 checked", "0 watched checked",
        "0 blank")
"""Ways to run the same steps: microbatches of one replay (0: all), and how. `calls`: each Plan by itself, its end waited for; `ahead`: a
step's microbatches are handed over before the results of the step before are waited for; `bare`: profiled from the second step on, with
the instrument off, so that launches go by themselves between time stamps; `checked`: as spot checks of every step see it; `blank`: from a
state that was spoiled and then cleared, as a run begins."""

KEPT = ("param", "m", "v")
"""Kinds of state whose bits two runs must share."""


@cache
def references() -> dict[str, Reference]:
    """'gpt': dropout, packed documents, tied head; 'llama': grouped heads, window, untied head, z-loss. Heads are 64 wide, rows ragged to
    every tile."""
    return pair(gpt.GPTConfig(vocab=VOCAB, positions=SEQ, layers=2, width=128, heads=2, dropout=0.1, documents=True, seed=5),
                llama.LlamaConfig(vocab=VOCAB, positions=SEQ, layers=2, width=128, heads=2, kv_heads=1, hidden=192, window=20, z_loss=1e-3),
                BATCH)


@cache
def kernels() -> Catalogue:
    """The kernels of the GPU."""
    return filled(fill)


@cache
def program(name: str, shards: int = 1, micros: int = 1, policy: tuple[str, tuple[str, ...]] = ("none", ()), run: str = "short") -> Program:
    """A reference Program in bf16, built once per process and kind. `run`: one of UPDATES."""
    return build_program(name=name, model=references()[name].model, optimizer=UPDATES[run], catalogue=kernels(), backend="cuda",
                         precision="bf16", policy=policy,
                         shape=StepShape(micro_batch=BATCH, seq=SEQ, shards=shards, micros=micros))


def _drawn(ref: Reference, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """float64 state whose parameters are float32 values, with their bf16 copy; step 0."""
    state = random_state(ref, rng)
    state["param"] = round_to(state["param"], "f32")
    return {**state, "param16": round_to(state["param"], "bf16"), "counter": np.zeros_like(state["counter"])}


@contextmanager
def opened(p: Program, param: np.ndarray, *, captured: bool = True) -> Iterator[CudaExecutor]:
    """An executor that holds these master parameters and their copy."""
    with CudaExecutor(p, kernels(), captured=captured) as executor:
        executor.state("param")[...] = param
        executor.run("narrow")
        yield executor


def _step(executor: CudaExecutor, batches: Batches) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for s in executor.program.schedule:
        out = executor.run(s.plan, text_of(batches, s))
    return out


def _digest(executor: CudaExecutor) -> str:
    return hash_of(*(executor.look(k) for k in KEPT))


# -- against the oracle ------------------------------------------------------------------------------------------------------------------


def _errors(graph: Graph, inputs: dict[str, np.ndarray], state: dict[str, np.ndarray], rng: np.random.Generator,
            named: Callable[[Graph, dict[str, np.ndarray], object], dict[str, np.ndarray]],
            ) -> tuple[dict[str, np.ndarray], dict[str, list[float]]]:
    """(exact values of these parameters; for each of DRAWS draws of parameters within 2^-8 of them, the norm of what rounding each result
    to its type adds), by name."""
    want: dict[str, np.ndarray] = {}
    naive: dict[str, list[float]] = {}
    size = state["param"].size
    for draw in range(DRAWS):
        nudged = state["param"] * (1 + 2.0**-8 * rng.uniform(-1, 1, size)) if draw else state["param"]
        moved = {**state, "param": nudged, "param16": round_to(nudged, "bf16")}
        exact, rounded = (named(graph, inputs, evaluate(graph, inputs, moved, precision=p)) for p in (None, MACHINE))
        want = want or exact
        for n, x in exact.items():
            naive.setdefault(n, []).append(float(np.linalg.norm(rounded[n] - x)))
    return want, naive


def allowed(naive: Sequence[float], looks: int) -> float:
    """What a tensor may err, given n naive errors of it, where `looks` such errors are judged together: twice their geometric mean. Where
    these vary so much that another draw like them may exceed that, up to what it does with a chance of REFUSED / looks.

    Logarithms of naive errors of one state are draws of a normal distribution, as far as 60 of each of 700 tensors and states show; their
    spread is anything from 0.02 to 0.5, by state and tensor. So one more, less their mean, over their standard deviation times
    sqrt(1 + 1/n), follows Student's t with n - 1 degrees of freedom (a prediction interval; REFUSED is shared as any family's, Bonferroni).
    """
    logs, n = np.log(naive), len(naive)
    spread = float(logs.std(ddof=1)) * np.sqrt(1 + 1 / n)
    return float(np.exp(logs.mean() + max(np.log(2), quantile(1 - REFUSED / looks, n - 1) * spread)))


def _worst(got: dict[str, np.ndarray], want: dict[str, np.ndarray], naive: dict[str, list[float]], looks: int) -> tuple[float, str]:
    """The largest error over what is allowed, by tensor, and whose it is; inf where a value is not finite."""
    found = {n: float(np.linalg.norm(got[n] - want[n])) / allowed(naive[n], looks) if np.isfinite(got[n]).all() else np.inf for n in naive}
    name = max(found, key=lambda n: found[n])
    return found[name], name


def _judged(executor: CudaExecutor, ref: Reference, inputs: dict[str, np.ndarray], state: dict[str, np.ndarray],
            rng: np.random.Generator, states: int) -> tuple[float, str]:
    """(error over what is allowed, at which tensor) of loss and gradients of one microbatch on an executor that holds `state`, one of
    `states` that a case looks at.

    A tensor's gradient is held against that of the graph whose every result is rounded to its type, in several draws. The loss is one
    number, whose naive error may be nearly nothing in any draw: over the root mean square of n it follows Student's t with n degrees of
    freedom, and is refused by the same chance. The count is exact.
    """
    layout, loss, count = layout_of(ref), f"{STATS}.loss_sum", f"{STATS}.count"

    def named(graph: Graph, _: object, found: object) -> dict[str, np.ndarray]:
        assert isinstance(found, tuple)
        return by_tensor(found[1], layout)

    want, naive = _errors(mixed_graph(ref), inputs, state, rng, named)
    executor.run("micro_first@0", inputs)
    got = by_tensor({("grad0", 0): executor.look("grad0").astype(np.float64)}, layout)
    tensors = {n: x for n, x in naive.items() if n not in (loss, count)}
    looks = states * (len(tensors) + 1)
    worst, name = _worst(got, want, tensors, looks)
    most = quantile(1 - REFUSED / looks / 2, DRAWS) * float(np.sqrt(np.mean(np.square(naive[loss]))))
    off = float(abs(got[loss] - want[loss]).sum()) / most
    if float(got[count].sum()) != float(want[count].sum()) or not np.isfinite(off):
        return np.inf, "loss or count"
    return (off, "the loss") if off > worst else (worst, name)


def _against_oracle(ref: Reference, rng: np.random.Generator) -> Measured:
    """Loss and every gradient of one microbatch, from parameters where nothing is near linear; also with the policies of ROUND_AGAIN."""
    inputs, state = batch(ref, rng), _drawn(ref, rng)
    policies, worst, where = (("none", ()), *ROUND_AGAIN[ref.name]), 0.0, ""
    for policy in policies:
        with opened(program(ref.name, policy=policy), state["param"].astype(np.float32)) as executor:
            found, name = _judged(executor, ref, inputs, state, rng, len(policies))
            worst, where = max((worst, where), (found, f"{name}, recompute {policy}"))
    return Measured(error=worst, bound=1.0, cases=len(policies) * (len(layout_of(ref).tensors) + 2),
                    note=f"error over what is allowed, worst at {where}")


def _along(ref: Reference, rng: np.random.Generator) -> Measured:
    """The same at steps 0, 10, ..., 100 of a training run, with the state that the device has come to."""
    worst, where = 0.0, ""
    text = [batches_of(ref, rng, 1, 1) for _ in range(4)]
    with opened(program(ref.name, run="long"), _drawn(ref, rng)["param"].astype(np.float32) / 3) as executor:
        for step in range(LAST + 1):
            if step % EVERY == 0:
                param = executor.look("param").astype(np.float64)
                state = {"param": param, "param16": round_to(param, "bf16"), "counter": executor.look("counter"),
                         "grad0": np.zeros(stats_layout(layout_of(ref)).size)}
                found, name = _judged(executor, ref, text[step % 4][0, 0], state, rng, LAST // EVERY + 1)
                worst, where = max((worst, where), (found, f"step {step}, {name}"))
            _step(executor, text[step % 4])
    return Measured(error=worst, bound=1.0, cases=LAST // EVERY + 1, note=f"error over what is allowed, worst at {where}")


def _starts(ref: Reference, seed: int) -> tuple[list[Batches], list[np.ndarray]]:
    """(the text, RUNS + 1 master parameters) of the band. The starts differ by what rounding to bf16 forgets: each element is moved by at
    most half an ulp of bf16, all distances alike."""
    rng = np.random.default_rng(seed)
    text, param = [batches_of(ref, rng, 1, 1) for _ in range(4)], _drawn(ref, rng)["param"] / 3
    nudges = (np.where(param == 0, 0, ulp(param, "bf16")) * rng.uniform(-0.5, 0.5, param.size) for _ in range(RUNS + 1))
    return text, [round_to(param + x, "f32") for x in nudges]


def _loss(out: Mapping[str, np.ndarray]) -> float:
    return float(out["loss_sum"]) / float(out["count"])


@cache
def cpu_curves(name: str, seed: int) -> np.ndarray:
    """[RUNS, BAND] losses, nats a target, of runs on the CPU: the GPU's own Program, each launch by its row's oracle, each result rounded
    to its type once."""
    ref, p = references()[name], program(name, run="band")
    text, starts = _starts(ref, seed)
    curves = np.empty((RUNS, BAND))
    for curve, start in zip(curves, starts):
        arenas = Arenas(p)
        arenas.start(start)
        for step in range(BAND):
            for call in p.schedule:
                out = arenas.run(p.plans[call.plan], text[step % len(text)][0, 0] if call.shard is not None else {})
            curve[step] = _loss(out)
    return curves


def distance(curve: np.ndarray, curves: np.ndarray) -> float:
    """How far a loss curve lies outside the spread of others: the largest of its windows' Student's t, inf where it is not finite.

    A window's mean loss of the curve, less the mean of the n others', over their standard deviation times sqrt(1 + 1/n), follows t with
    n - 1 degrees of freedom if all n + 1 are draws of one normal distribution (a prediction interval): so they are when the runs differ
    by many small roundings alone. Windows move together, so REFUSED is shared over them as over any family (Bonferroni).
    """
    own, others = (x.reshape(*x.shape[:-1], -1, WINDOW).mean(-1) for x in (curve, curves))
    with np.errstate(divide="ignore", invalid="ignore"):  # curves without any spread are no measure: inf
        t = np.abs(own - others.mean(0)) / (others.std(0, ddof=1) * np.sqrt(1 + 1 / len(others)))
    return float(t.max()) if np.isfinite(t).all() else np.inf


def _band(ref: Reference, rng: np.random.Generator) -> Measured:
    """The loss curve lies inside the spread of RUNS runs on the CPU that differ by bf16 rounding: a ninth start, moved like theirs."""
    seed = int(rng.integers(1 << 31))
    curves, (text, starts) = cpu_curves(ref.name, seed), _starts(ref, seed)
    with opened(program(ref.name, run="band"), starts[RUNS].astype(np.float32)) as executor:
        curve = np.array([_loss(_step(executor, text[step % len(text)])) for step in range(BAND)])
    windows = BAND // WINDOW
    return Measured(error=distance(curve, curves), bound=quantile(1 - REFUSED / windows / 2, RUNS - 1), cases=windows,
                    note=f"Student's t of the farthest window; loss {curve[0]:.3f} to {curve[-1]:.3f}")


def _logits(ref: Reference, rng: np.random.Generator) -> Measured:
    """The logits that sampling reads, at three places, by the same measure."""
    state = _drawn(ref, rng)
    t = Tracer("decode", layout_of(ref), precision="bf16")
    assert ref.model.decode is not None
    t.output("logits", ref.model.decode(t))
    graph = prune(t.graph)

    def named(graph: Graph, _: object, found: object) -> dict[str, np.ndarray]:
        assert isinstance(found, tuple)
        return {"logits": found[0]["logits"]}

    worst, places = 0.0, (0, SEQ // 2, SEQ - 1)
    with opened(program(ref.name), state["param"].astype(np.float32)) as executor:
        wanted = executor.program.plans["decode"].inputs
        for place in places:
            full = batch(ref, rng)
            inputs = {k: x[:1] for k, x in full.items() if k in wanted} | {"index": np.array([place], np.int32)}
            want, naive = _errors(graph, inputs, state, rng, named)
            got = {"logits": executor.run("decode", inputs)["logits"].astype(np.float64)}
            worst = max(worst, _worst(got, want, naive, len(places))[0])
    return Measured(error=worst, bound=1.0, cases=len(places), note="error over what is allowed")


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


def _later_microbatch(ref: Reference, rng: np.random.Generator) -> Measured:
    """A second microbatch adds what it would have written alone; each element of a sum of f32 terms may round once more per term."""
    first, second = batch(ref, rng), batch(ref, rng)
    param = _drawn(ref, rng)["param"].astype(np.float32)
    with opened(program(ref.name, 1, 2), param) as executor:
        alone = []
        for x in (first, second):
            executor.run("micro_first@0", x)
            alone.append(executor.look("grad0").astype(np.float64))
        executor.run("micro_first@0", first)
        executor.run("micro@0", second)
        got = executor.look("grad0").astype(np.float64)
    worst = 0.0
    for o, n in stats_layout(layout_of(ref)).ranges():
        a, b, g = (x[o : o + n] for x in (alone[0], alone[1], got))
        # f32 sums of the same terms in another order: a few units of the largest partial sum, which is near the tensor's largest element
        worst = max(worst, float(np.abs(g - a - b).max() / (np.abs(a).max() + np.abs(b).max() + 1e-30)))
    return Measured(error=worst, bound=64 * 2.0**-24, cases=len(layout_of(ref).tensors), note="of the tensor's largest element")


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


def _learns(ref: Reference, rng: np.random.Generator) -> Measured:
    """Twenty steps on one batch lower its loss."""
    batches = batches_of(ref, rng, 1, 1)
    param = _drawn(ref, rng)["param"].astype(np.float32)
    with opened(program(ref.name), param / 3) as executor:
        losses = [float(_step(executor, batches)["loss_sum"]) for _ in range(20)]
    return Measured(error=losses[-1] / losses[0], bound=0.9, cases=20, note="last loss over first")


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


# -- bits --------------------------------------------------------------------------------------------------------------------------------


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


# -- checks ------------------------------------------------------------------------------------------------------------------------------


def _not_accused(ref: Reference, rng: np.random.Generator) -> Measured:
    """Two steps of two shards of two microbatches, each of whose launches is recomputed."""
    with opened(program(ref.name, 2, 2), _drawn(ref, rng)["param"].astype(np.float32)) as executor:
        return undisturbed(executor, [batches_of(ref, rng, 2, 2) for _ in range(2)], rng)


def _accused(ref: Reference, rng: np.random.Generator) -> Measured:
    """Flipped bits and wrong results are told of in their step, by name."""
    with opened(program(ref.name), _drawn(ref, rng)["param"].astype(np.float32)) as executor:
        return disturbed(executor, batches_of(ref, rng, 1, 1), rng)


# -- memory ------------------------------------------------------------------------------------------------------------------------------


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


# -- faults ------------------------------------------------------------------------------------------------------------------------------


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
