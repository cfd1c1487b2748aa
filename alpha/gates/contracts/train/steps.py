"""Cases of a step: the text that it sees, what is added and counted by hand, validation, and the same bits again. Floor 7."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np

from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cuda.executor import CudaExecutor
from alpha.checkpoint import folders, ranges
from alpha.component import Measured
from alpha.data.mixture import Streams
from alpha.data.sampler import Batch
from alpha.data.shards import TokenStream
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.made import RunsAhead, bits_of, small_run
from alpha.models.parts import IGNORE
from alpha.profile.store import read
from alpha.train import evaluate
from alpha.train.loop import Watch


def text_of_a_step(rng: np.random.Generator) -> Measured:
    """The calls of a step read the global batch once, in order, each row with its target and its global sample id."""
    checks = []
    with small_run(rng) as run, run.loop("a") as loop:
        asked = [(c.shard, loop.cfg.train.shards, c.micro, loop.cfg.micros, False) for c in loop.program.schedule if c.shard is not None]
        checks.append(("what a step asks for", loop.texts() == asked and len(asked) > 1))
        for step in (0, 1, 7, int(rng.integers(8, 500))):
            loop.step = step
            whole = loop.sampler.batch(step)
            seen = [loop.inputs(call) for call in loop.program.schedule if call.shard is not None]
            for name, expected in (("tokens", whole.inputs_bT), ("targets", whole.targets_bT), ("sample_ids", whole.samples_b)):
                got = np.concatenate([x[name] for x in seen])
                checks.append((f"step {step}: {name}", np.array_equal(got, expected) and got.dtype == np.int32))
            positions = np.concatenate([x["positions"] for x in seen])
            checks.append((f"step {step}: positions", np.array_equal(positions, np.tile(np.arange(8), (12, 1)))))
            checks.append(
                (f"step {step}: a call without text", all(loop.inputs(c) == {} for c in loop.program.schedule if c.shard is None))
            )
            far = replace(whole, samples_b=np.array([2**31 - 2, 2**31 - 1, 2**31, 2**40 + 7]))
            ids = evaluate.model_inputs({"sample_ids"}, far)["sample_ids"].tolist()
            checks.append((f"numbers of far samples {ids}", ids == [2**31 - 2, 2**31 - 1, 0, 7]))
            checks.append((f"step {step}: shift by one", np.array_equal(whole.inputs_bT[:, 1:], whole.targets_bT[:, :-1])))
    return all_hold(checks)


def by_hand(rng: np.random.Generator) -> Measured:
    """`run` is the schedule called step by step: same state, and every row of the metrics is what the update gave out."""
    checks = []
    with small_run(rng) as run:
        with run.loop("a") as loop:
            asked, batch = list[int](), loop.sampler.batch
            loop.sampler.batch = lambda step, *call, **more: asked.append(step) or batch(step, *call, **more)  # type: ignore[method-assign, func-returns-value]
            loop.start()
            checks.append(("finished", loop.run()))
            checks.append((f"text of steps {sorted(set(asked))}", set(asked) == set(range(5))))
            got = bits_of(loop)
        expected: list[tuple[object, ...]] = []
        with run.loop("b") as loop:
            loop.start()
            for step in range(5):
                loop.step = step
                for call in loop.program.schedule:
                    out = loop.executor.run(call.plan, loop.inputs(call))
                o = {k: float(v) for k, v in out.items()}
                expected.append((step, o["loss_sum"] / o["count"], o["norm"], o["lr"], o["coefficient"], 96, 1))
            checks.append(("state differs from the schedule run by hand", bits_of(loop) == got))
            checks.append(("count is not the step's tokens", o["count"] == 96))
            checks.append(("steps counted on the device", int(loop.executor.state("counter")[0]) == 5))
        checks.append(("metrics differ from what the update gave out", run.rows("a") == expected))
        found = read(run.root / "a" / "m.sqlite", "evaluations", "step, windows")
        checks.append(("validations at other steps", found == [(2, 5), (4, 5)]))
        checks.append(("checkpoints at other steps", folders.steps(run.root / "a" / "checkpoints") == [4, 5]))
        with run.loop("c") as loop:  # the last step is left to whoever ends the run, though it is a multiple
            seen, batch = list[object](), loop.sampler.batch
            loop.cfg = replace(loop.cfg, train=replace(loop.cfg.train, eval_every=5, sample_every=5))
            loop.sampler.batch = lambda step, *call, **more: _without_targets(batch(step, *call, **more), step == 2)  # type: ignore[method-assign]
            loop.start()
            losses: list[float] = []
            loop.run(Watch(step=lambda result: losses.append(result.loss), evaluated=lambda *x: seen.append(x),
                           sampled=lambda *x: seen.append(x)))
            checks.append((f"told at the last step: {seen}", not seen and not read(run.root / "c" / "m.sqlite", "evaluations", "step")))
            checks.append((f"a step without targets has a loss: {losses}", [math.isnan(x) for x in losses] == [i == 2 for i in range(5)]))
    return all_hold(checks)


def _without_targets(batch: Batch, here: bool) -> Batch:
    return replace(batch, targets_bT=np.full_like(batch.targets_bT, IGNORE)) if here else batch


class _Lengths:
    """As much of a tokenizer as validation reads."""

    def __init__(self, byte_lengths: np.ndarray) -> None:
        self.byte_lengths = byte_lengths


def validation(rng: np.random.Generator) -> Measured:
    """A model whose logits are all equal loses ln V a token, whatever the text: nats, tokens and bytes are then known exactly."""
    checks: list[tuple[str, bool]] = []
    worst = 0.0
    with small_run(rng) as run, run.loop("a") as loop:
        loop.executor.state("param")[...] = 0.0
        stream, tokenizer = run.data.validation, loop.tokenizer
        assert isinstance(stream, TokenStream)
        total = (len(stream) - 1) // 8
        all_targets = stream.windows(np.arange(total) * 8 + 1, 8)
        uneven = next(n for n in range(3, total) if total % n > 1)  # only there is the last window not the same from either end
        for windows in (1, 2, 5, uneven, total, 0, total + 9):
            n = total if windows in (0, total + 9) else windows
            found = evaluate.evaluate(loop.executor, stream, tokenizer, windows)
            chosen = np.array([i * total // n for i in range(n)])
            checks.append((f"{windows}: other windows", evaluate.chosen_windows(stream, 8, windows).tolist() == chosen.tolist()))
            targets = all_targets[chosen]
            nats = n * 8 * math.log(tokenizer.vocab_size)
            worst = max(worst, abs(found.nats / nats - 1.0))
            checks.append((f"{windows}: windows", found.windows == n == len(set(chosen.tolist()))))
            checks.append((f"{windows}: tokens", found.tokens == n * 8))
            checks.append((f"{windows}: bytes", found.bytes == sum(len(tokenizer.decode(row)) for row in targets)))
            bits = found.nats / math.log(2.0) / found.bytes
            checks.append((f"{windows}: bits per byte", math.isclose(found.bits_per_byte, bits, rel_tol=1e-12)))
        made_up = _Lengths(rng.integers(0, 9, tokenizer.vocab_size))
        for windows in (3, total):
            counted = evaluate.evaluate(loop.executor, stream, made_up, windows).bytes  # type: ignore[arg-type]
            expected = sum(int(made_up.byte_lengths[t]) for t in all_targets[evaluate.chosen_windows(stream, 8, windows)].ravel())
            checks.append((f"{windows}: bytes of tokens of many lengths", counted == expected))
        checks.append((f"nats off by {worst}", worst < 1e-5))
        before = bits_of(loop)
        one = loop.evaluate(3)
        loop.validation = Streams((("a", stream), ("b", stream), ("c", stream)))
        checks.append(("three sources", asdict(loop.evaluate(3)) == {k: 3 * v for k, v in asdict(one).items()}))
        checks.append(("validation changed the state", bits_of(loop) == before))
    return all_hold(checks)


def from_devices(rng: np.random.Generator) -> Measured:
    """A checkpoint of what lies on a device comes the way that its executor knows; of what lies here by copies of arrays."""
    checks, way = [], ranges.OfArrays()

    class OnDevice(CpuExecutor, CudaExecutor):  # type: ignore[misc]  # runs here, and is taken for one of a device
        downloads, digests = way, None  # type: ignore[assignment]

    with small_run(rng) as run:
        for kind in (OnDevice, CpuExecutor):
            with run.loop(kind.__name__, kind=kind) as loop:
                saver, late = loop.saver, kind is OnDevice
                checks.append((kind.__name__, (saver.copies is way, saver.late, loop.downloads is way) == (late, late, late)))
    return all_hold(checks)


def foretold(rng: np.random.Generator) -> Measured:
    """A save is rehearsed where one will have steps behind it, and only there: from any step, for any distance between saves."""
    checks = []
    with small_run(rng) as run, run.loop("a") as loop:
        told: list[int] = []
        loop.stalls.rehearse = lambda *how: told.append(loop.step)  # type: ignore[method-assign]
        for every in (0, 1, 2, 3, 4, 5, 6):
            loop.cfg = replace(loop.cfg, train=replace(loop.cfg.train, checkpoint_every=every))
            for step in range(5):
                loop.step = step
                told.clear()
                loop.foretell_saves()
                wanted = any(every and at % every == 0 for at in range(step + 1, 5))
                checks.append((f"every {every} from step {step}", bool(told) == wanted))
    return all_hold(checks)


def same_bits(rng: np.random.Generator) -> Measured:
    """Two runs of one configuration, and one with another number of threads, give the same bits."""
    found = []
    with small_run(rng) as run:
        for name, cfg in (("a", run.cfg), ("b", run.cfg), ("c", run.config(1))):
            with run.loop(name, cfg) as loop:
                loop.start()
                loop.run()
                found.append(bits_of(loop))
        rows = [run.rows(name) for name in ("a", "b", "c")]
    checks = [("a second run", found[0] == found[1]), ("one thread", found[0] == found[2]), ("rows", rows[0] == rows[1] == rows[2])]
    return all_hold(checks, found[0])


def sampled(rng: np.random.Generator) -> Measured:
    """Text sampled on the way changes no bit and no row of a run, on a device beside the host too, and is the same text in every run of the
    configuration, also in one that was stopped and resumed."""
    checks = []
    with small_run(rng) as run:
        plain, often = run.config(2), run.config(2, "train.sample_every=1")
        with run.loop("plain", plain) as loop:
            loop.start()
            loop.run()
            expected = bits_of(loop)
        seen: dict[str, list[tuple[object, ...]]] = {}
        for name, kind in (("waits", CpuExecutor), ("ahead", RunsAhead), ("stopped", CpuExecutor)):
            with run.loop(name, often, kind=kind) as loop:
                loop.sample_tokens = 4
                loop.start()
                if name == "stopped":
                    loop.run(Watch(stop=lambda loop=loop: loop.step == 3))  # type: ignore[misc]
                    loop.resume(2)
                loop.run()
                checks.append((f"{name}: other bits", bits_of(loop) == expected))
            checks.append((f"{name}: other rows", run.rows(name) == run.rows("plain")))
            seen[name] = read(run.root / name / "m.sqlite", "samples")
        checks.append(("not after every step but the last", [r[0] for r in seen["waits"]] == [1, 2, 3, 4]))
        checks.append(("other text", seen["waits"] == seen["ahead"] == seen["stopped"]))
        checks.append(("the same text at every step", len({r[2] for r in seen["waits"]}) > 1))
    return all_hold(checks, expected)
