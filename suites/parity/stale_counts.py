"""Edits of a copy of the repository, and how many gate pairs and planted faults each makes stale.

    python suites/parity/stale_counts.py [REPOSITORY]      the table of docs/gates.md, of this tree or another
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

Change = tuple[str, str, str]
"""(file relative to the repository, text that it holds once, what replaces it); an empty text: the other is written behind the file."""

Digests = dict[str, dict[str, str]]
"""'component gate' -> digests by name."""

COUNT = """
import json, sys
from alpha.registry import policy
from alpha.registry.digest import Package, component_digests
from alpha.train.house import house
package = Package()
json.dump({f"{c.id} {g}": component_digests(c, g, package=package) for c in house() for g in policy.owed(c)}, sys.stdout)
"""


@dataclass(frozen=True)
class Edit:
    """`changes`: in this tree; `before`: in the tree of 88f8e40 where it was written otherwise."""

    name: str
    changes: tuple[Change, ...]
    before: tuple[Change, ...] = ()


_KERNEL = "    binaries: Callable[[], Mapping[str, str]] | None = None\n"
_POOL = "    def run(self, tasks"

HARMLESS = (
    Edit("a new kind of component", (("alpha/component.py", '"yardstick")\n', '"yardstick", "collective")\n'),
                                     ("alpha/registry/policy.py", '    "yardstick": (', '    "collective": ("faults",),\n    "yardstick": ('))),
    Edit("a field of Component", (("alpha/component.py", _KERNEL, f'{_KERNEL}    profile: str = ""\n'),)),
    Edit("a field of OpSpec", (("alpha/ops/spec.py", "    view: bool = False\n", "    view: bool = False\n    costs: tuple[int, ...] = ()\n"),)),
    Edit("an element type", (
        ("alpha/types.py", '"i32": 4, "bool": 1}', '"i32": 4, "bool": 1, "f8e4m3": 1}'),
        ("alpha/types.py", '("f64", "f32", "bf16")', '("f64", "f32", "bf16", "f8e4m3")'),
        ("alpha/types.py", "np.dtype(np.bool_),", 'np.dtype(np.bool_), "f8e4m3": np.dtype(np.float32),'),
        ("alpha/ops/numerics.py", '"bf16": 2.0**-8,', '"bf16": 2.0**-8, "f8e4m3": 2.0**-4,'),
        ("alpha/ops/numerics.py", '"bf16": "f32"}', '"bf16": "f32", "f8e4m3": "f32"}'))),
    Edit("the text of an error", (("alpha/types.py", "a shape needs non-negative integers", "a shape is made of whole numbers"),
                                  ("alpha/ops/gelu.py", "approximate is known", "the form is known"))),
    Edit("how errors are printed", (("alpha/errors.py", "  came:     {came}", "  it was:   {came}"),)),
    Edit("comments and docstrings", (("alpha/ops/gelu.py", "    if approximate == \"tanh\":\n        return (0.5", "    # one of two forms\n    if approximate == \"tanh\":\n        return (0.5"),
                                     ("alpha/gates/parity.py", '"""Run the gate; the verdict', '"""Runs the gate; the verdict'))),
    Edit("a method of the CPU's pool", (("alpha/backends/cpu/workers.py", _POOL, f"    def asleep(self) -> int:\n        return 0\n\n{_POOL}"),)),
    Edit("samples of a GPU op that has none", (
        ("alpha/gates/cuda_samples.py", 'SAMPLES: Mapping[str, Make] = {\n', 'SAMPLES: Mapping[str, Make] = {\n    "sgd": _matmul,\n'),
        ("alpha/gates/cuda_widths.py", 'SAMPLES: Mapping[str, Make] = {\n', 'SAMPLES: Mapping[str, Make] = {\n    "sgd": _rope,\n'),
        ("alpha/gates/cuda_sizes.py", 'TIMED: Mapping[str, Sequence[Call]] = {\n', 'TIMED: Mapping[str, Sequence[Call]] = {\n    "sgd": [],\n')), (
        ("alpha/gates/cuda_samples.py", '    ("matmul", "samples"): _matmul,\n', '    ("matmul", "samples"): _matmul,\n    ("sgd", "samples"): _matmul,\n'),
        ("alpha/gates/cuda_widths.py", '    "rope_packed": _rope,\n', '    "rope_packed": _rope,\n    "sgd": _rope,\n'),
        ("alpha/gates/cuda_sizes.py", '        "count_valid": [', '        "sgd": [],\n        "count_valid": ['))),
    Edit("a new op row", (("alpha/ops/sgd.py", "ROWS = (\n", 'ROWS = (\n    OpSpec(name="nothing", inputs=("x",), outputs=("y",), infer=_infer, oracle=_oracle, vjp=None, '
                           'why_no_vjp="made", flops=lambda t, a: 0, samples=_samples, exact="none"),\n'),)),
)
"""Nothing of this can change a result that was measured."""


@dataclass(frozen=True)
class Behaviour(Edit):
    """`stale`: pairs of which each must become stale; `current`: pairs that must not."""

    stale: tuple[str, ...] = ()
    current: tuple[str, ...] = ()


REAL = (
    Behaviour("GELU's oracle", (("alpha/ops/gelu.py", "(0.5 * x * (1 + np.tanh(_C * (x + 0.044715 * x * x * x))),)",
                                 "(0.5 * x * (1 + np.tanh(_C * (x + 0.044716 * x * x * x))),)"),),
              stale=("gelu.bf16.sm90 parity", "linear_gelu.bf16.sm90 parity", "linear_gelu.bf16.sm90 faults", "gelu.f32.cpu parity",
                     "executor.cuda parity", "executor.cpu parity", "model.gpt parity"),
              current=("rope_packed.bf16.sm90 parity", "silu.f32.cpu parity", "adamw.f32.sm90 parity")),
    Behaviour("GELU's backward oracle", (("alpha/ops/gelu.py", "3 * 0.044715 * x * x", "3 * 0.044716 * x * x"),),
              stale=("gelu_bwd.bf16.sm90 parity", "matmul_gelu_bwd.bf16.sm90 parity", "gelu.bf16.sm90 gradient", "gelu.f32.cpu gradient",
                     "model.gpt gradient"),
              current=("gelu.bf16.sm90 parity", "rmsnorm.bf16.sm90 gradient")),
    Behaviour("the norm's block", (("alpha/ops/global_norm.py", "BLOCK = 65536", "BLOCK = 32768"),),
              stale=("update_scalars.f32.sm90 parity", "global_norm.f32.cpu parity", "optimizer.adamw parity", "executor.cuda parity"),
              current=("adamw.f32.sm90 parity", "gelu.bf16.sm90 parity")),
    Behaviour("a learning rate's oracle", (("alpha/ops/lr_wsd.py", "after = peak * (1 - (1 - floor) * x)", "after = peak * (1 - (2 - floor) * x)"),),
              stale=("lr_wsd.f32.cpu parity", "update_scalars.f32.sm90 parity"), current=("adamw.f32.sm90 parity", "gelu.f32.cpu parity")),
    Behaviour("the product's oracle", (("alpha/ops/matmul.py", "return (y + bias[0] if bias else y,)", "return (y - bias[0] if bias else y,)"),),
              stale=("matmul.bf16.sm90 parity", "linear_gelu.bf16.sm90 parity", "linear_swiglu.bf16.sm90 parity", "executor.cuda determinism",
                     "linear_cross_entropy.bf16.sm90 parity", "model.llama parity", "matmul.f32.cpu faults"),
              current=("rmsnorm.bf16.sm90 parity", "tokenizer.bpe parity", "checkpoint.simple parity")),
    Behaviour("a launch parameter of the norms", (("alpha/cudart/norm.py", "vectors=vectors, teams=8,", "vectors=vectors, teams=4,"),),
              stale=("layernorm.bf16.sm90 parity", "add_rmsnorm.bf16.sm90 perf", "executor.cuda parity"),
              current=("layernorm_bwd.bf16.sm90 parity", "rope_packed.bf16.sm90 parity", "layernorm.f32.cpu parity", "executor.cpu parity")),
    Behaviour("a callee of the wrappers", (("alpha/cudart/bandwidth.py", "return max(1, min(grid, blocks) if blocks else grid)",
                                            "return max(2, min(grid, blocks) if blocks else grid)"),),
              stale=("layernorm.bf16.sm90 parity", "adamw.f32.sm90 determinism", "executor.cuda parity"),
              current=("gelu.f32.cpu parity", "matmul.bf16.sm90 parity")),
    Behaviour("a constant that fixes grids", (("alpha/backends/cuda/lib.py", "MULTIPROCESSORS = 132", "MULTIPROCESSORS = 131"),),
              stale=("matmul.bf16.sm90 parity", "executor.cuda parity"), current=("gelu.f32.cpu parity", "executor.cpu parity")),
    Behaviour("a default argument", (("alpha/gates/cuda_subjects.py", "def run(self, garbage: int = 0xFF", "def run(self, garbage: int = 0x00"),),
              stale=("rope_packed.bf16.sm90 parity", "matmul.bf16.sm90 faults"), current=("rope_packed.f32.cpu parity", "executor.cuda parity")),
    Behaviour("an entry of a table of element types", (("alpha/types.py", '"bf16": 2, "i64"', '"bf16": 4, "i64"'),),
              stale=("rope_packed.bf16.sm90 parity", "executor.cuda parity"), current=("tokenizer.bpe parity",)),
    Behaviour("a method of a data class", (("alpha/types.py", "return self.size * ITEMSIZE[self.dtype]", "return self.size * ITEMSIZE[self.dtype] + 1"),),
              stale=("rope_packed.bf16.sm90 parity", "executor.cuda parity", "executor.cpu parity"), current=("tokenizer.bpe parity",)),
    Behaviour("the shape of a data class, raised by hand", (("alpha/ops/spec.py", "SHAPE = 1", "SHAPE = 2"),),
              stale=("gelu.bf16.sm90 gradient", "gelu.f32.cpu gradient"), current=("tokenizer.bpe parity",)),
    Behaviour("a decorator", (("alpha/gates/subjects.py", "@cache\ndef pin_blas", "def pin_blas"),),
              stale=("gelu.f32.cpu parity", "gelu.bf16.sm90 parity"), current=("rope_packed.f32.cpu nothing",)),
    Behaviour("the CPU's pool", (("alpha/backends/cpu/workers.py", "                self._ended.acquire()\n        if now.errors:",
                                  "                self._ended.acquire()\n        if now.errors and tasks:"),),
              stale=("matmul.f32.cpu parity", "gelu.f32.cpu determinism", "executor.cpu parity"),
              current=("matmul.bf16.sm90 parity", "gelu.bf16.sm90 determinism", "rope_packed.bf16.sm90 perf", "tokenizer.bpe parity")),
    Behaviour("the GPU's scratch", (("alpha/backends/cuda/lib.py", "start + aligned(nbytes)", "start + aligned(nbytes + 1)"),),
              stale=("layernorm_bwd.bf16.sm90 parity", "executor.cuda parity"), current=("layernorm_bwd.f32.cpu parity",)),
    Behaviour("an engine of the GPU", (("alpha/gates/cuda_replay.py", "MOST = 3", "MOST = 4"),),
              stale=("rope_packed.bf16.sm90 parity",), current=("rope_packed.bf16.sm90 determinism", "rope_packed.f32.cpu parity")),
    Behaviour("samples of attention", (("alpha/gates/cuda_samples.py", '("one", 1, 1, 1, 1, 1, 64, True, 0),', '("one", 1, 2, 2, 1, 1, 64, True, 0),'),),
              stale=("attention.bf16.sm90 parity", "attention_packed_bwd.bf16.sm90 gradient"),
              current=("matmul.bf16.sm90 parity", "attention.f32.cpu parity", "attention.bf16.sm90 perf")),
    Behaviour("timed sizes of attention", (("alpha/gates/cuda_sizes.py", '("gpt", 16, 1024, 12, 12, 64)', '("gpt", 8, 1024, 12, 12, 64)'),),
              stale=("attention.bf16.sm90 perf",), current=("matmul.bf16.sm90 perf", "attention.bf16.sm90 parity")),
)
"""What can change a result."""


@contextmanager
def copied(changes: Sequence[Change], root: Path = ROOT) -> Iterator[Path]:
    """A copy of a repository with these changes: the package, and links to what lies beside it."""
    with tempfile.TemporaryDirectory(prefix="alpha-stale-") as folder:
        at = Path(folder)
        shutil.copytree(root / "alpha", at / "alpha")
        for name in ("kernels", "baselines"):
            (at / name).symlink_to(root / name)
        for file, find, put in changes:
            path = at / file
            text = path.read_text(encoding="utf-8")
            if text.count(find) != 1:
                raise ValueError(f"{file} holds {find!r} {text.count(find)} times, expected once")
            path.write_text(text.replace(find, put), encoding="utf-8")
        yield at


def digests_of(root: Path) -> Digests:
    """Every digest of every gate pair of a repository, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, cwd=root, timeout=600,
                          env={**os.environ, "PYTHONPATH": str(root)})
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    found: Digests = json.loads(done.stdout)
    return found


def moved(was: Digests, now: Digests) -> dict[str, list[str]]:
    """Pair -> names of the digests that changed, of pairs that are in both."""
    return {pair: names for pair, old in was.items() if pair in now
            and (names := sorted(n for n in {*old, *now[pair]} if old.get(n) != now[pair].get(n)))}


def is_gpu(pair: str) -> bool:
    """Whether a pair's evidence is a GPU's."""
    return pair.split()[0].endswith(".sm90") or pair.startswith("executor.cuda ")


def counted(edits: Sequence[Edit], root: Path = ROOT) -> Mapping[str, tuple[int, int]]:
    """Edit -> stale pairs of the CPU, of the GPU."""
    with copied((), root) as at:
        was = digests_of(at)
    found = {}
    for edit in edits:
        with copied(edit.before if edit.before and root != ROOT else edit.changes, root) as at:
            stale = moved(was, digests_of(at))
        found[edit.name] = sum(not is_gpu(p) for p in stale), sum(map(is_gpu, stale))
        print(f"| {edit.name} | {found[edit.name][0]} | {found[edit.name][1]} |", flush=True)
    return found


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    print("| change | CPU | GPU |\n|---|---|---|")
    counted([*HARMLESS, *REAL], where)
