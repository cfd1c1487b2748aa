"""Validation: bits per byte of held-out text, with an exact count of the bytes that the predicted tokens stand for. Floor 6.

Legend: B rows of one call, T sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alpha.data.ngram import nats_to_bits_per_byte
from alpha.data.sampler import Batch, window_count
from alpha.data.shards import TokenStream
from alpha.data.tokenizer import Tokenizer
from alpha.errors import NonFiniteError
from alpha.models.parts import IGNORE
from alpha.train.engine import Executor
from alpha.train.ranks import Ranks


@dataclass(frozen=True)
class Evaluation:
    """`nats`: summed loss of `tokens` predicted tokens, end-of-document tokens among them (they stand for no byte, so they only cost);
    `bytes`: text bytes those tokens stand for; `windows`: sequences."""

    nats: float
    tokens: int
    bytes: int
    windows: int

    @property
    def bits_per_byte(self) -> float:
        return nats_to_bits_per_byte(self.nats, self.bytes)

    def __add__(self, other: Evaluation) -> Evaluation:
        """Of both texts."""
        return Evaluation(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes, self.windows + other.windows)


def model_inputs(wanted: set[str], batch: Batch) -> dict[str, np.ndarray]:
    """The inputs that a plan names, from a batch. Sample ids are taken modulo 2^31, the range of an int32."""
    inputs_BT = batch.inputs_bT
    made = {
        "tokens": inputs_BT,
        "targets": batch.targets_bT,
        "positions": np.broadcast_to(np.arange(inputs_BT.shape[1], dtype=np.int32), inputs_BT.shape),
        "sample_ids": (batch.samples_b & 0x7FFFFFFF).astype(np.int32),
    }
    if batch.documents_bT is not None:
        made["documents"] = batch.documents_bT
    return {name: made[name] for name in wanted}


def chosen_windows(stream: TokenStream, sequence: int, windows: int) -> np.ndarray:
    """Indices of `windows` windows spread evenly over the stream (0 or too many: all of them). int64, ascending."""
    total = window_count(stream, sequence)
    n = total if windows == 0 else min(windows, total)
    return np.arange(n, dtype=np.int64) * total // n


def evaluate(
    executor: Executor, stream: TokenStream, tokenizer: Tokenizer, windows: int = 0, ranks: Ranks | None = None
) -> Evaluation:  # fmt: skip
    """Loss over `windows` windows of `stream` (0 = all). Rows that fill up the last call carry no target, so they count for nothing.

    Calls are shared out over the ranks, and their sums are added in the order of calls: the bits are those of one rank.

    NonFiniteError if the loss is not finite.
    """
    plan = executor.program.plans["eval"]
    rows, sequence = plan.inputs["tokens"].type.shape
    chosen = chosen_windows(stream, sequence, windows)
    documents = "documents" in plan.inputs
    ranks = ranks or Ranks()
    firsts = range(0, len(chosen), rows)
    sums = np.zeros((len(firsts), 3))
    for call in range(ranks.rank, len(firsts), ranks.size):
        first = firsts[call]
        windows_b = chosen[first : first + rows]
        starts_B = np.resize(windows_b, rows) * sequence
        tokens_BT = stream.windows(starts_B, sequence + 1)
        targets_BT = np.ascontiguousarray(tokens_BT[:, 1:])
        text = int(tokenizer.byte_lengths[targets_BT[: len(windows_b)]].sum())
        targets_BT[len(windows_b) :] = IGNORE
        batch = Batch(
            inputs_bT=np.ascontiguousarray(tokens_BT[:, :-1]),
            targets_bT=targets_BT,
            samples_b=np.zeros(rows, dtype=np.int64),
            documents_bT=stream.document_ids(starts_B, sequence) if documents else None,
        )
        out = executor.run("eval", model_inputs(set(plan.inputs), batch))
        sums[call] = float(out["loss_sum"]), int(out["count"]), text
    nats, tokens, text = 0.0, 0, 0
    for loss, count, length in ranks.share(sums):
        nats, tokens, text = nats + float(loss), tokens + int(count), text + int(length)
    if not np.isfinite(nats):
        raise NonFiniteError("the validation loss is not finite", came=nats, expected="a finite number of nats", do="lower optim.lr")
    return Evaluation(nats, tokens, text, len(chosen))
