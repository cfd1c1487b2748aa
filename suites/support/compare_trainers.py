"""Hold runs of Alpha against the dull trainer: `python suites/support/compare_trainers.py [FIRST] [HOW MANY]` draws files and compares.

Ids, orders, rates, windows and checkpoints are compared exactly. Each step starts from the run's own state, and its update from the run's
own gradients. Losses and gradients may be apart by what rounding to float32 costs (`TIMES`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from drawn_runs import draw
from dull_trainer import END, DullTrainer, Tensors
from watched_run import WatchedRun, WatchedStep, watched

TIMES, DRAWS = 4, 4
"""A float32 result may be apart from float64 by TIMES the largest of DRAWS: the dull trainer's own error in float32, from parameters that
are each moved by at most one unit in the last place. So it owes a result of parameters next to those it had (backward stability). In
about fifty drawn runs no gradient was further than 1.8 times the largest of its four."""

ULP = 2.0**-23
PROMPT, DECODED, TEMPERATURE, TOP_K, SAMPLE_SEED = b"def ", 120, 0.8, 50, 1


def problems(run_file: Path, seen: WatchedRun) -> Iterator[str]:
    """What the run did otherwise than its file says, one line each."""
    dull = DullTrainer(run_file)
    yield from _starts(dull, seen)
    if len(seen.steps) != dull.steps:
        yield f"steps: {len(seen.steps)} for {dull.steps}"
    for number, step in enumerate(seen.steps):
        yield from (f"step {number}: {what}" for what in _reads(dull, step, number))
        yield from (f"step {number}: {what}" for what in _computes(dull, step, number, seen.metrics[number]))
        yield from (f"step {number}: {what}" for what in _updates(dull, step, number, seen.metrics[number]))
    yield from _validates(dull, seen)
    yield from _saves(dull, seen)
    yield from _samples(dull, seen)


def rounding(dull: DullTrainer, params: Tensors, batch: Tensors, step: int | None) -> tuple[np.ndarray, Tensors, np.ndarray, Tensors]:
    """(losses, gradients) in float64 from float32 parameters, and how far float32 may be from each element of them."""
    losses, grads = dull.loss({k: v.astype(np.float64) for k, v in params.items()}, batch, step)
    off, apart = np.zeros_like(losses), {name: 0.0 for name in grads}
    rng = np.random.default_rng(1)
    for _ in range(DRAWS):
        moved = {k: (v * (1 + ULP * rng.uniform(-1, 1, v.shape))).astype(np.float32) for k, v in params.items()}
        with np.errstate(under="ignore"):
            other, others = dull.loss(moved, batch, step)
        off = np.maximum(off, abs(other - losses))
        apart = {name: max(apart[name], float(abs(others[name] - g).max())) for name, g in grads.items()}
    return losses, grads, TIMES * off, {name: TIMES * x for name, x in apart.items()}


def summed(losses: np.ndarray, off: np.ndarray) -> tuple[float, float]:
    """Sum of losses, and how far a sum in float32 in any order may be from it (Higham 2002, section 4.2)."""
    return float(losses.sum()), float(off.sum() + losses.size * 2.0**-24 * abs(losses).sum())


def _starts(dull: DullTrainer, seen: WatchedRun) -> Iterator[str]:
    initial, first = dull.initial(), seen.steps[0].before
    if set(initial) != set(first["param"]):
        yield f"parameters: {sorted(set(initial) ^ set(first['param']))}"
        return
    for name, values in initial.items():
        if not np.array_equal(values.shape, first["param"][name].shape) or (abs(values - first["param"][name]) > ULP * abs(values)).any():
            yield f"initial values of {name}"
    kinds = {"param", "m", "v"} if dull.tables["optim"]["name"] == "adamw" else {"param", "velocity"}
    if set(first) != kinds:
        yield f"kinds of state: {sorted(first)} for {sorted(kinds)}"
    yield from (f"{kind} of {name} does not start at 0" for kind in set(first) - {"param"} for name, x in first[kind].items() if x.any())
    for number, (step, following) in enumerate(zip(seen.steps, seen.steps[1:])):
        yield from (f"{kind} of {name} moved after step {number}" for kind in step.after for name, x in step.after[kind].items()
                    if not np.array_equal(x, following.before[kind][name]))


def _reads(dull: DullTrainer, step: WatchedStep, number: int) -> Iterator[str]:
    expected = dull.microbatches(number)
    if len(step.reads) != len(expected):
        yield f"{len(step.reads)} microbatches for {len(expected)}"
    for i, (own, due) in enumerate(zip(step.reads, expected)):
        yield from (f"microbatch {i}: {what}" for what in _same_text(dull, own, due))
        if "sample_ids" in own and not np.array_equal(own["sample_ids"], due["samples"] & 0x7FFFFFFF):
            yield f"microbatch {i}: sample ids"


def _same_text(dull: DullTrainer, own: Mapping[str, np.ndarray], due: Tensors) -> Iterator[str]:
    """Inputs of a call against those that are due; documents may be numbered in any way."""
    for name in ("tokens", "targets"):
        if not np.array_equal(own[name], due[name]):
            yield name
    if not np.array_equal(own["positions"], np.broadcast_to(np.arange(dull.sequence), due["tokens"].shape)):
        yield "positions"
    if ("documents" in own) != dull.tables["data"]["documents"]:
        yield "whether documents are kept apart"
    elif "documents" in own and not np.array_equal(np.diff(own["documents"]) != 0, np.diff(due["documents"]) != 0):
        yield "documents"


def _computes(dull: DullTrainer, step: WatchedStep, number: int, metrics: tuple[float, ...]) -> Iterator[str]:
    micros = dull.microbatches(number)
    batch = {name: np.concatenate([m[name] for m in micros]) for name in micros[0]}
    losses, grads, off, apart = rounding(dull, step.before["param"], batch, number)
    total, far = summed(losses, off)
    count = int((batch["targets"] >= 0).sum())
    if not abs(metrics[0] * count - total) <= far:
        yield f"loss {metrics[0]} for {total / count}, at most {far / count:.1e} apart"
    for name, g in grads.items():
        error = float(abs(step.grads[name] - g).max())
        if not error <= apart[name]:
            yield f"gradient of {name}: {error:.1e} apart, at most {apart[name]:.1e}"


def _updates(dull: DullTrainer, step: WatchedStep, number: int, metrics: tuple[float, ...]) -> Iterator[str]:
    _, norm, rate, factor = metrics
    if rate != float(dull.rate(number)):
        yield f"learning rate {rate} for {float(dull.rate(number))}"
    expected = dull.clip(step.grads, sum(int((m["targets"] >= 0).sum()) for m in dull.microbatches(number)))
    relative = 2.0**-24 * (sum(g.size for g in step.grads.values()) / 2 + 8)  # a sum of squares in any order, its root, three quotients
    for what, came, due in zip(("norm", "clip coefficient"), (norm, factor), expected):
        if abs(came - due) > relative * due:
            yield f"{what} {came} for {due}"
    after, apart = dull.update(step.before, step.grads, number, rate, factor)
    for kind, tensors in after.items():
        for name, values in tensors.items():
            error = abs(step.after[kind][name] - values)
            if not (error <= apart[kind][name]).all():
                times = (error / apart[kind][name]).max()
                yield f"{kind} of {name} after the update: {error.max():.1e} apart, {times:.1f} times what it may be"


def _params(seen: WatchedRun, done: int) -> Tensors:
    return seen.steps[done - 1].after["param"]


def _validates(dull: DullTrainer, seen: WatchedRun) -> Iterator[str]:
    t = dull.tables["train"]
    due = [(k, t["eval_windows"]) for k in range(1, dull.steps) if t["eval_every"] and k % t["eval_every"] == 0]
    due.append((dull.steps, t["final_windows"]))
    if [row[0] for row in seen.evaluations] != [k for k, _ in due]:
        yield f"validations after steps {[row[0] for row in seen.evaluations]} for {[k for k, _ in due]}"
        return
    for (done, nats, tokens, text, windows), (_, wanted) in zip(seen.evaluations, due):
        chosen = [dull.validation_windows(stream, wanted) for stream in dull.validation]
        cuts = [dull.cut(stream, windows) for stream, windows in zip(dull.validation, chosen)]
        batch = {name: np.concatenate([cut[name] for cut in cuts]) for name in cuts[0]}
        length = sum(len(dull.tokens[i]) for i in batch["targets"].ravel())
        counts = sum(map(len, chosen)), batch["targets"].size, length
        if (windows, tokens, text) != counts:
            yield f"validation after {done}: {windows} windows, {tokens} tokens, {text} bytes for {counts}"
        losses, _, off, _ = rounding(dull, _params(seen, done), batch, None)
        total, far = summed(losses, off)
        if not abs(nats - total) <= far:
            yield f"validation after {done}: {nats} nats for {total}, at most {far:.1e} apart"
        calls = [own for at, own, _ in seen.evals if at == done]
        rows = {name: np.concatenate([own[name] for own in calls]) for name in calls[0]}
        counting = rows["targets"].max(axis=1) >= 0
        rows = {name: x[counting] for name, x in rows.items()}
        yield from (f"validation after {done}: {what}" for what in _same_text(dull, rows, batch))


def _saves(dull: DullTrainer, seen: WatchedRun) -> Iterator[str]:
    every = dull.tables["train"]["checkpoint_every"]
    saved = [k for k in range(1, dull.steps + 1) if k == dull.steps or (every and k % every == 0)]
    due = [k for k in saved if k in saved[-dull.tables["train"]["keep"] :] or k % dull.tables["train"]["keep_every"] == 0]
    if sorted(seen.checkpoints) != due:
        yield f"checkpoints of steps {sorted(seen.checkpoints)} for {due}"
    for done, kinds in seen.checkpoints.items():
        if set(kinds) != set(seen.flat[done]):
            yield f"checkpoint {done} holds {sorted(kinds)} for {sorted(seen.flat[done])}"
        yield from (f"checkpoint {done}: {kind}" for kind, x in kinds.items() if not np.array_equal(x, seen.flat[done].get(kind)))
        if int(kinds["counter"].flat[0]) != done:
            yield f"checkpoint {done} counts {int(kinds['counter'].flat[0])} steps"


def _samples(dull: DullTrainer, seen: WatchedRun) -> Iterator[str]:
    every = dull.tables["train"]["sample_every"]
    due = [k for k in range(1, dull.steps + 1) if k == dull.steps or (every and k % every == 0)]
    if sorted(seen.samples) != due:
        yield f"samples after steps {sorted(seen.samples)} for {due}"
        return
    for done in due:
        calls = [(own, out["logits"][0]) for at, own, out in seen.decodes if at == done]
        ids, text = [END, *dull.encode(PROMPT)], list[bytes]()
        index, tokens = [], []
        for own, logits in calls:
            seen_ids = ids[-dull.sequence :]
            index.append(len(seen_ids) - 1)
            tokens.append(seen_ids + [END] * (dull.sequence - len(seen_ids)))
            if not np.array_equal(own["tokens"][0], tokens[-1]) or int(own["index"][0]) != index[-1]:
                yield f"sample after {done}: what is decoded"
                break
            ids.append(_pick(logits[: len(dull.tokens)], len(ids)))
            text.append(dull.tokens[ids[-1]])
        if ids[-1] != END and len(calls) != DECODED:
            yield f"sample after {done}: {len(calls)} tokens"
        shown = b"".join(text).decode("utf-8", "replace")
        if seen.samples[done] != "".join(c if c in "\n\t" or c.isprintable() else "\u00b7" for c in shown):
            yield f"sample after {done}: its text"
        batch = {"tokens": np.array(tokens)}
        batch["documents"] = np.cumsum(batch["tokens"] == END, axis=1) - (batch["tokens"] == END)
        params = _params(seen, done)
        exact = dull.logits({k: v.astype(np.float64) for k, v in params.items()}, batch, np.array(index))
        far = TIMES * max(abs(dull.logits(p, batch, np.array(index)) - exact).max() for p in _neighbours(params))
        error = float(np.max([abs(own - due).max() for (_, own), due in zip(calls, exact)]))
        if not error <= far:
            yield f"sample after {done}: logits {error:.1e} apart, at most {far:.1e}"


def _pick(logits: np.ndarray, place: int) -> int:
    """The id that a sample takes at a place, from its logits."""
    x = logits.astype(np.float64)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))[:TOP_K]
    weights = np.cumsum([np.exp((x[i] - x[order[0]]) / TEMPERATURE) for i in order])
    u = (int(np.random.Philox(key=np.array([SAMPLE_SEED, place], dtype=np.uint64)).random_raw()) >> 11) / 2**53
    return order[next(i for i, w in enumerate(weights) if u * weights[-1] < w)]


def _neighbours(params: Tensors) -> Iterator[Tensors]:
    rng = np.random.default_rng(1)
    for _ in range(DRAWS):
        yield {k: (v * (1 + ULP * rng.uniform(-1, 1, v.shape))).astype(np.float32) for k, v in params.items()}


def main(first: int = 0, count: int = 20) -> int:
    """Compare `count` drawn runs, from draw `first` on; how many were otherwise than their file says."""
    wrong = 0
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            file = draw(seed, Path(folder))
            found = list(problems(file, watched(file, Path(folder) / "runs" / "drawn")))
        wrong += bool(found)
        print(f"draw {seed}: {'agrees' if not found else f'{len(found)} differences'}", *found[:12], sep="\n    ", flush=True)
    print(f"{count - wrong} of {count} runs do what their file says")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
