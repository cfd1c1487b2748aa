"""Cases of validation's texts and of saves one at a time. Floor 7."""

# mypy: disable-error-code="arg-type"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.data.sampler import Batch
from alpha.data.shards import TokenStream
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.train.apart import Named, error_text, said, same
from alpha.gates.contracts.train.made import small_run
from alpha.graph.state import Init, StateLayout, TensorSpec
from alpha.train.evaluate import evaluate, model_inputs
from alpha.train.loop import Loop
from alpha.train.ranks import Ranks
from alpha.train.saving import Saver


class _Noted:
    """A stream that notes of which starts it is asked for documents."""

    def __init__(self, stream: TokenStream, looked: list[list[int]]) -> None:
        self.stream, self.looked = stream, looked

    def __len__(self) -> int:
        return len(self.stream)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens."""
        return self.stream.windows(starts, length)

    def document_ids(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Numbers of documents."""
        self.looked.append([int(x) for x in starts])
        return self.stream.document_ids(starts, length)


def texts(rng: np.random.Generator) -> Measured:
    """What each call of a validation is given: rows in the order of the windows, filled up with the first ones whose targets count nothing,
    and where attention stays within documents those; a loss that is no number is refused."""
    checks: Named = []
    with small_run(rng) as run:
        stream, tokenizer = run.data.validation, run.data.tokenizer
        assert isinstance(stream, TokenStream)
        whole = stream.windows(np.array([0]), len(stream))[0]
        for documents in (False, True):
            rows, windows, given = int(rng.integers(3, 6)), int(rng.integers(7, 20)), list[dict[str, np.ndarray]]()
            names = ["tokens", "targets", "positions", *["documents"] * documents]
            plan = SimpleNamespace(inputs={name: SimpleNamespace(type=SimpleNamespace(shape=(rows, 8))) for name in names})

            def call(name: str, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
                given.append({k: v.copy() for k, v in inputs.items()})
                return {"loss_sum": 2.0 * len(given), "count": 8}

            executor = SimpleNamespace(program=SimpleNamespace(plans={"eval": plan}), run=call)
            looked = list[list[int]]()
            found = evaluate(executor, _Noted(stream, looked), tokenizer, windows)
            total = (len(stream) - 1) // 8
            starts = [i * total // windows * 8 for i in range(windows)]
            calls = -(-windows // rows)
            same(checks, "documents of", looked, [[starts[n * rows + i % len(starts[n * rows : (n + 1) * rows])] for i in range(rows)]
                                                  for n in range(calls)] if documents else [])
            same(checks, "sums", (found.nats, found.tokens, found.windows, found.bytes),
                 (float(calls * (calls + 1)), 8 * calls, windows, sum(int(whole[s + 1 + k] < 256) for s in starts for k in range(8))))
            for n, inputs in enumerate(given):
                own = starts[n * rows : (n + 1) * rows]
                padded = [own[i % len(own)] for i in range(rows)]
                expected = {"tokens": [whole[s : s + 8].tolist() for s in padded], "positions": [list(range(8))] * rows, "targets": [
                    whole[s + 1 : s + 9].tolist() if i < len(own) else [-1] * 8 for i, s in enumerate(padded)]}
                same(checks, f"call {n}", {k: v.tolist() for k, v in inputs.items() if k != "documents"}, expected)
                for row, s in enumerate(padded if documents else ()):
                    ids = inputs["documents"][row].tolist()
                    ends = np.cumsum(whole[s : s + 8] == 256) - (whole[s : s + 8] == 256)
                    same(checks, "documents", [i - ids[0] for i in ids], ends.tolist())
        bad = SimpleNamespace(program=SimpleNamespace(plans={"eval": plan}), run=lambda name, inputs: {"loss_sum": np.inf, "count": 8})
        same(checks, "no number", said(lambda: evaluate(bad, stream, tokenizer, 2)), error_text(
            "NonFiniteError", "the validation loss is not finite", "inf", "a finite number of nats", "lower optim.lr"))
    batch = Batch(np.ones((2, 3), np.int32), np.zeros((2, 3), np.int32), np.array([1, 2]), np.full((2, 3), 7, np.int32))
    same(checks, "documents of a batch", model_inputs({"documents"}, batch)["documents"].tolist(), [[7] * 3] * 2)
    return all_hold(checks)


def cuts(rng: np.random.Generator) -> Measured:
    """The first parameters of a rank that holds its cut of them are its cut of the whole ones, as the run's seed draws them; of one that
    holds them all they are all."""
    checks: Named = []
    layout = StateLayout([TensorSpec(f"t{i}", (int(rng.integers(1, 9000)),), f"u{i}", Init("ones")) for i in range(3)])
    values, seed = rng.standard_normal(layout.size).astype(np.float32), int(rng.integers(1 << 40))
    for size in (1, 2, 4):
        for rank in range(size):
            own = np.full(layout.size // size, np.float32(7))
            asked = list[int]()

            def fill(flat: np.ndarray, given: StateLayout, seed: int) -> None:
                asked.append(seed)
                flat[...] = values

            program = SimpleNamespace(states={"param": layout}, sharded=("param",) if size > 1 else ())
            loop = SimpleNamespace(program=program, cfg=SimpleNamespace(run=SimpleNamespace(seed=seed)),
                                   executor=SimpleNamespace(blank=lambda kind: own), ranks=SimpleNamespace(rank=rank, size=size))
            Loop._fill(loop, fill)
            parts = [values[u.start : u.stop].reshape(size, -1)[rank] for u in layout.units]  # each unit is cut evenly
            wanted = np.concatenate(parts)
            same(checks, f"rank {rank} of {size}", (own.tobytes() == wanted.tobytes(), asked), (True, [seed]))
    return all_hold(checks)


def one_at_a_time(rng: np.random.Generator) -> Measured:
    """A save begins when the one before has been finished: not while it is copied, written or made a checkpoint."""
    checks: Named = []
    for name in ("_begun", "_copying", "_written", "_made"):
        saver = Saver(Path("nowhere"), Ranks())
        setattr(saver, name, Future() if name in ("_written", "_made") else lambda: None)
        same(checks, name, said(lambda: saver.begin(7, {}, {})), error_text(
            "GraphError", "a save began before the last one was finished", "step 7", "one save at a time", "call finish first"))
        same(checks, "writing", saver.writing, name != "_made")
    return all_hold(checks)
