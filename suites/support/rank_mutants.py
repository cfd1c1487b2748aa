"""Random mutants of what ranks run by, held against its gates: `python suites/support/rank_mutants.py [HOW MANY [SEED [WORKERS]]]`.

Operators, comparisons, constants, operand order and statements change as in `alpha gate catches mutants`, in every function of alpha/comm
and alpha/parallel; longer ones are drawn more often. A mutant is caught where a gate says FAIL that rejects a fault planted in its file;
where none is planted, one of ELSEWHERE. Survivors stand in equivalents.toml with the reason, or count against the gates. Seeds are
hexadecimal.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import alpha
from alpha.gates.adversarial.mutants import Fate, Mutant, Target, mutate, run, scores
from alpha.gates.subjects import fresh_nonce
from alpha.registry.gates import PINNED
from alpha.tomlfile import read_toml

ROOMS = ("comm", "parallel")
ELSEWHERE = (("watch.progress", "faults"), ("transport.shm", "parity"), ("transport.shm", "faults"), ("all_reduce.cpu", "parity"))
"""(component, gate) of files in which nothing is planted."""
MOST = 4
"""Gates that are asked about a mutant."""


def asked(path: Path) -> tuple[tuple[str, str], ...]:
    """The (component, gate) pairs that reject faults planted in a file, the most frequent first; gates of time are left out."""
    planted = path.with_suffix(".faults.toml")
    found = Counter((f["component"], f["gate"]) for f in read_toml(planted)["fault"]) if planted.is_file() else Counter(ELSEWHERE)
    return tuple(pair for pair, _ in found.most_common() if pair[1] not in PINNED)[:MOST]


def targets() -> tuple[list[Target], list[int]]:
    """Every function and class at the top of a file of ROOMS, and their lines."""
    root, found, lines = Path(alpha.__file__).parent, list[Target](), list[int]()
    for path in sorted(p for room in ROOMS for p in (root / room).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.append(Target("ranks", path.relative_to(root).as_posix(), node.name, asked(path)))
                lines.append((node.end_lineno or node.lineno) - node.lineno + 1)
    return found, lines


def drawn(number: int, seed: str) -> list[Mutant]:
    """That many different mutants, drawn by `seed`."""
    rng, found = np.random.default_rng(int(seed, 16)), dict[tuple[str, str, str], Mutant]()
    among, lines = targets()
    share = np.array(lines) / sum(lines)
    while len(found) < number:
        mutant = mutate(among[int(rng.choice(len(among), p=share))], rng)
        if mutant is not None:
            found.setdefault(mutant.key, mutant)
    return list(found.values())


def main(arguments: Sequence[str]) -> int:
    """Print what became of each mutant, and the score of each file and of all."""
    number, seed = int(arguments[0]) if arguments else 60, arguments[1] if arguments[1:] else fresh_nonce()
    print(f"seed {seed}", flush=True)

    def told(fate: Fate) -> None:
        said = f"{fate.caught_by} ({fate.why[:120]})" if fate.caught_by else f"EXCUSED: {fate.excuse}" if fate.excuse else "SURVIVES"
        print(f"{fate.mutant.name}\n      {said}", flush=True)

    fates = run(drawn(number, seed), workers=int(arguments[2]) if arguments[2:] else 2, on_result=told)
    score = scores(fates)[-1]
    low, high = score.interval
    for file, n in sorted(Counter(f.mutant.file for f in fates).items()):
        print(f"| `{file}` | {n} | {sum(bool(f.caught_by) for f in fates if f.mutant.file == file)} |")
    print(f"{score.caught} of {score.counted} mutants were caught ({low:.0%} to {high:.0%}), {score.excused} change nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
