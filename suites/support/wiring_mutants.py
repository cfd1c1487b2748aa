"""Random mutants of the wiring, held against the dull trainer: `python suites/support/wiring_mutants.py [SEED] [HOW MANY]`.

Operators, comparisons, constants, operand order and statements change as in `alpha gate catches mutants`, in the functions between a run
file and the kernels. A survivor is a difference that no draw showed, or no difference at all.
"""

from __future__ import annotations

import resource
import signal
import sys
from itertools import count
from typing import Any

import numpy as np
from wrong_wiring import seen

from alpha.gates.adversarial.mutants import Mutant, Target, mutate
from alpha.profile.noise import wilson

WIRING = {
    "train/assemble.py": "open_data _open_mixture _split tokenizer_for sampler_for model_for optimizer_for program_for",
    "train/evaluate.py": "model_inputs chosen_windows evaluate",
    "train/sample.py": "uniform pick generate",
    "data/split.py": "path_position split_by_file _cut",
    "data/sampler.py": "window_count _cut PermutedSampler",
    "data/mixture.py": "sources_of Turns MixedSampler JoinedCorpus joined kept_apart",
    "data/bucketed.py": "pairs_of sequence_pairs BucketedSampler",
    "data/packing.py": "pieces_of best_fit pack PackedSampler",
    "data/permutation.py": "mix64 _words _network permuted",
    "data/tokenizer.py": "words_of _merged learn_merges",
    "models/family.py": "shared_sizes",
    "models/gpt.py": "_dropout _trunk loss decode sizes",
    "models/llama.py": "_trunk loss decode sizes",
    "models/parts.py": "linear attention swiglu token_loss next_logits",
    "optim/init.py": "draw fill_initial",
    "optim/schedules.py": "cosine wsd rates",
    "optim/update.py": "_scalars adamw sgd",
    "passes/build.py": "trace_training stats_layout trailing_ones _schedule _tree update_graph flat_state",
}
"""File of alpha -> the functions whose business is which numbers go where."""

TRIES = 12
SECONDS = 60
"""Processor seconds of a mutant: one that hangs is seen, too."""


def mutants(seed: int, number: int) -> list[Mutant]:
    """That many different ones, drawn by `seed`; each function is as likely as any other."""
    rng, found = np.random.default_rng(seed), dict[str, Mutant]()
    places = [(file, name) for file, names in WIRING.items() for name in names.split()]
    while len(found) < number:
        file, name = places[int(rng.integers(len(places)))]
        mutant = mutate(Target("wiring", file, name, ()), rng)
        if mutant is not None:
            found.setdefault(mutant.name, mutant)
    return list(found.values())


def main(seed: int = 0, number: int = 40) -> None:
    """Print what saw each mutant, and the score."""
    def hangs(*_: Any) -> None:
        raise TimeoutError("it hangs")

    signal.signal(signal.SIGPROF, hangs)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
    survivors = []
    for i, mutant in zip(count(1), mutants(seed, number)):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        _, what = seen(f"alpha/{mutant.file}", mutant.text, 0, TRIES)
        signal.setitimer(signal.ITIMER_PROF, 0)
        survivors += [] if what else [mutant.name]
        print(f"{i} {mutant.name}\n      {what or 'SURVIVES'}", flush=True)
    low, high = wilson(number - len(survivors), number)
    print(f"{number - len(survivors)} of {number} mutants were seen ({low:.0%} to {high:.0%})", *survivors, sep="\n    ")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
