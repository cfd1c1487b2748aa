"""How far the executor of the GPU is from the float64 oracle: loss and gradients of one microbatch and along a run, logits, a loss curve.

What rounding may add is measured on the very inputs: naive errors of the graph, and runs on the CPU that differ by bf16 rounding. Floor 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from alpha.backends.cuda.executor import CudaExecutor
from alpha.component import Measured
from alpha.gates.contracts.cuda_run import BAND, EVERY, LAST, RUNS, SEQ, WINDOW, _drawn, _loss, _step, opened, program, references
from alpha.gates.contracts.mixed import MACHINE, Arenas, by_tensor, mixed_graph
from alpha.gates.contracts.reference import Batches, Reference, batch, batches_of, layout_of
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import Graph, prune
from alpha.graph.trace import Tracer
from alpha.ops.numerics import round_to, ulp
from alpha.passes.build import STATS, stats_layout
from alpha.profile.noise import quantile

DRAWS = 16
"""Naive computations that an error is held against."""

REFUSED = 1 / 5000
"""Chance that a case refuses a curve, or errors, that belong to the others."""

ROUND_AGAIN = {"gpt": (("ops", ("matmul",)),), "llama": (("ops", ("matmul",)), ("ops", ("swiglu_packed",)))}
"""Those that compute again from a stored bf16 result what was first computed from the product's f32 sum."""


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


def _learns(ref: Reference, rng: np.random.Generator) -> Measured:
    """Twenty steps on one batch lower its loss."""
    batches = batches_of(ref, rng, 1, 1)
    param = _drawn(ref, rng)["param"].astype(np.float32)
    with opened(program(ref.name), param / 3) as executor:
        losses = [float(_step(executor, batches)["loss_sum"]) for _ in range(20)]
    return Measured(error=losses[-1] / losses[0], bound=0.9, cases=20, note="last loss over first")
