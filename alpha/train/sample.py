"""Sampling: text from a trained model, the same text for the same (model, prompt, temperature, top-k, seed). Floor 6.

The number that picks the token at position p is the first of Philox keyed by (seed, p): it depends on no call order. Probabilities are
formed in float64, candidates ordered by (logit, then id), so ties do not depend on a sort's whim.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from alpha.checkpoint import folders
from alpha.component import Catalogue
from alpha.data.tokenizer import Tokenizer
from alpha.errors import InputError, NonFiniteError
from alpha.train import forbidden, rundir
from alpha.train.assemble import program_for, threads_for, vocabulary
from alpha.train.engine import Executor, open_executor, refresh

PROMPT, TOKENS, TEMPERATURE, TOP_K, SEED = b"def ", 120, 0.8, 50, 1
"""What a run samples from itself while it trains and at its end."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only."""
    bits = int(np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw())
    return (bits >> 11) * 2.0**-53


def pick(logits_V: NDArray[np.floating], temperature: float, top_k: int, u: float) -> int:
    """The id that `u` in [0, 1) picks. temperature 0: the most likely, of equals the lowest id. top_k 0: all ids.

    NonFiniteError if a logit is not finite.
    """
    logits = logits_V.astype(np.float64)
    if not np.isfinite(logits).all():
        raise NonFiniteError("the model gives non-finite logits", came=f"{int((~np.isfinite(logits)).sum())} of {logits.size}",
                             expected="finite logits", do="sample from an earlier checkpoint with --at")  # fmt: skip
    order = np.lexsort((np.arange(logits.size), -logits))[: top_k or None]
    if temperature == 0.0:
        return int(order[0])
    weights = np.exp((logits[order] - logits[order[0]]) / temperature)
    cumulative = np.cumsum(weights)
    return int(order[min(int(np.searchsorted(cumulative, u * cumulative[-1], side="right")), len(order) - 1)])


def generate(
    executor: Executor, tokenizer: Tokenizer, prompt: bytes, *, tokens: int, temperature: float = TEMPERATURE, top_k: int = TOP_K,
    seed: int = SEED,
) -> Iterator[bytes]:
    """Up to `tokens` tokens after `prompt`, each as its bytes; ends early at the end of a document.

    The model sees the last T tokens, T its sequence length, with an end-of-document token before the prompt.
    """
    if not 0.0 <= temperature <= 100.0 or top_k < 0 or tokens < 1 or not 0 <= seed < 1 << 63:
        raise InputError("impossible sampling", came=f"temperature {temperature}, top-k {top_k}, tokens {tokens}, seed {seed}",
                         expected="temperature 0 to 100, top-k >= 0, tokens >= 1, seed >= 0")  # fmt: skip
    forbidden.check("before sampling")
    wanted = executor.program.plans["decode"].inputs
    length = wanted["tokens"].type.shape[1]
    ids = [tokenizer.eod, *tokenizer.encode(prompt).tolist()]
    for _ in range(tokens):
        seen = ids[-length:]
        tokens_BT = np.full((1, length), tokenizer.eod, dtype=np.int32)
        tokens_BT[0, : len(seen)] = seen
        made = {
            "tokens": tokens_BT,
            "index": np.array([len(seen) - 1], dtype=np.int32),
            "positions": np.arange(length, dtype=np.int32)[None],
            "documents": np.cumsum(tokens_BT == tokenizer.eod, axis=1, dtype=np.int32),
        }
        if "documents" in wanted:  # an end-of-document token belongs to the document that it ends
            made["documents"] -= (tokens_BT == tokenizer.eod).astype(np.int32)
        logits_V = executor.run("decode", {name: made[name] for name in wanted})["logits"][0, : tokenizer.vocab_size]
        chosen = pick(logits_V, temperature, top_k, uniform(seed, len(ids)))
        if chosen == tokenizer.eod:
            return
        ids.append(chosen)
        yield tokenizer.tokens[chosen]


def open_run(path: Path, catalogue: Catalogue, step: int | None = None) -> tuple[Executor, Tokenizer, int]:
    """An executor that holds the parameters of a run's checkpoint (default: the latest), its tokenizer and the checkpoint's step.

    InputError if it is no run or has no checkpoint, CorruptError if a file is damaged. The caller closes the executor.
    """
    forbidden.watch()
    cfg = rundir.read_config(path)
    tokenizer = rundir.read_tokenizer(path)
    checkpoint = folders.at(path / "checkpoints", step)
    program = program_for(cfg, vocabulary(cfg, tokenizer.vocab_size), catalogue, threads_for(cfg))
    executor = open_executor(program, catalogue)
    kinds = program.plans["snapshot"].outputs
    saved = folders.load(checkpoint, {kind: (program.states[kind], executor.state(kind)) for kind in kinds})
    refresh(executor)
    if saved.facts.get("tokenizer") != tokenizer.hash:
        executor.close()
        raise InputError("the run's tokenizer is not the one it was trained with", came=tokenizer.hash[:16],
                         expected=str(saved.facts.get("tokenizer"))[:16], do="restore tokenizer.json of the run")  # fmt: skip
    return executor, tokenizer, saved.step


def printable(data: bytes) -> str:
    """Bytes as text for a terminal: UTF-8, undecodable bytes replaced, control characters other than line end and tab shown as dots."""
    text = data.decode("utf-8", "replace")
    return "".join(c if c in "\n\t" or c.isprintable() else "·" for c in text)
