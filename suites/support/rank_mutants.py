"""Random mutants of what ranks run by, held against its gates: `python suites/support/rank_mutants.py [HOW MANY [SEED [WORKERS]]]`.

Operators, comparisons, constants, operand order and statements change as in `alpha gate catches mutants`, in every function of alpha/comm
and alpha/parallel; longer ones are drawn more often. A mutant is caught where a gate says FAIL: of the collective that the function is
named after, and those that reject faults planted in its file, or one of ELSEWHERE. What no gate catches the unit tests are asked about
that import the file, or TESTS. Survivors stand in equivalents.toml with the reason, or count against both. Seeds are hexadecimal.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from planted import asked_of

import alpha
from alpha.gates.adversarial.mutants import RANKS, Fate, Mutant, Target, mutate, run, scores
from alpha.gates.subjects import fresh_nonce
from alpha.profile.noise import wilson
from alpha.train.catalogue import catalogue

ROOMS = ("comm", "parallel")
ELSEWHERE = (("watch.progress", "faults"), ("transport.shm", "parity"), ("transport.shm", "faults"), ("all_reduce.cpu", "parity"))
"""(component, gate) of files in which nothing is planted."""
MOST = 4
"""Gates that are asked about a mutant."""
COLLECTIVES = {c.op for c in catalogue() if c.op and any(need.startswith(RANKS) for need in c.requires)}
TESTS = ("unit/test_comm.py", "distributed/test_hosts.py")
"""Of files that no unit test imports."""
SUITES = Path(__file__).parents[1]


def asked(path: Path, function: str) -> tuple[tuple[str, str], ...]:
    """The (component, gate) pairs of the collective that a function is named after, and of the faults that are planted in its file, the
    most frequent first; gates of time are left out."""
    own = [(f"{function}.cpu", "parity")] if path.name in ("catalogue.py", "collectives.py") and function in COLLECTIVES else []
    return tuple(dict.fromkeys(own + (asked_of(path) if path.with_suffix(".faults.toml").is_file() else [*ELSEWHERE])))[:MOST]


def refused_by_tests(mutant: Mutant) -> str:
    """The first test that fails over a copy of the package with the mutant in it; '' where none does."""
    module = mutant.file.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    imports = re.compile(rf"from alpha\.{package} import .*\b{name}\b|(from|import) alpha\.{module}\b")
    files = [f for f in sorted((SUITES / "unit").glob("test_*.py")) if imports.search(f.read_text())] or [SUITES / test for test in TESTS]
    with tempfile.TemporaryDirectory(prefix="alpha-mutant-") as made:
        for folder in ("alpha", "suites"):
            shutil.copytree(SUITES.parent / folder, Path(made) / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for beside in ("baselines", "configs", "docs", "kernels", "pyproject.toml"):
            (Path(made) / beside).symlink_to(SUITES.parent / beside)
        (Path(made) / "alpha" / mutant.file).write_text(mutant.text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", *(str(f.relative_to(SUITES.parent)) for f in files)]
        environment = os.environ | {"PYTHONPATH": made}
        done = subprocess.run(command, cwd=made, capture_output=True, text=True, env=environment, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else ""


def targets() -> tuple[list[Target], list[int]]:
    """Every function and class at the top of a file of ROOMS, and their lines."""
    root, found, lines = Path(alpha.__file__).parent, list[Target](), list[int]()
    for path in sorted(p for room in ROOMS for p in (root / room).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.append(Target("ranks", path.relative_to(root).as_posix(), node.name, asked(path, node.name)))
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
    tested = {f.mutant.name: said for f in fates if not f.caught_by and not f.excuse and (said := refused_by_tests(f.mutant))}
    for file in sorted({f.mutant.file for f in fates if f.mutant.name in tested}):
        sound = (Path(alpha.__file__).parent / file).read_text(encoding="utf-8")
        refused = refused_by_tests(Mutant("ranks", file, "", (), "", "", sound))
        assert not refused, f"{refused} fails without a mutant in {file}: what it refuses means nothing"
    for name, test in tested.items():
        print(f"{name}\n      refused by {test}")
    for file, n in sorted(Counter(f.mutant.file for f in fates).items()):
        mine = [f for f in fates if f.mutant.file == file]
        print(f"| `{file}` | {n} | {sum(bool(f.caught_by) for f in mine)} | {sum(f.mutant.name in tested for f in mine)} |")
    score = scores(fates)[-1]
    for what, caught in (("by gates", score.caught), ("by gates or tests", score.caught + len(tested))):
        low, high = wilson(caught, score.counted)
        print(f"{caught} of {score.counted} mutants were caught {what} ({low:.0%} to {high:.0%}), {score.excused} change nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
