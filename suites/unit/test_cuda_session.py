"""Whole sessions on an emulated GPU: training, stop and resume, evaluation, samples, phases, a step that is refused, no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from emulated_gpu import NAME, EmulatedGpu, emulated, emulated_gpu

from alpha import config
from alpha.backends.cuda.executor import CudaExecutor
from alpha.checkpoint import folders
from alpha.component import Catalogue
from alpha.config import Config
from alpha.errors import MachineError, NonFiniteError
from alpha.profile.phases import PHASES
from alpha.profile.store import read
from alpha.train.catalogue import catalogue
from alpha.train.console import Printer
from alpha.train.sample import generate, open_run
from alpha.train.session import Outcome, train

RUN = """
[run]
name = "t"
out = "{out}/runs"
[model]
family = "{family}"
layers = 1
width = 128
heads = 2
[data]
corpus = "{out}/text"
tokenizer = "bpe"
vocab = 264
validation = 0.3
sequence = 32
cache = "{out}/cache"
[train]
steps = 8
batch = 4
shards = 2
micro_batch = 1
precision = "bf16"
eval_every = 4
eval_windows = 4
final_windows = 4
checkpoint_every = 3
profile = 2
[optim]
lr = 1e-2
warmup = 2
[machine]
backend = "cuda"
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, small_corpus: Callable[[Path], None]) -> Path:
    """A folder with a small corpus."""
    path = tmp_path_factory.mktemp("cuda")
    small_corpus(path / "text")
    return path


@pytest.fixture(scope="module")
def kernels() -> Catalogue:
    return emulated(catalogue())


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as found:
        yield found


def configured(root: Path, family: str = "gpt", more: tuple[str, ...] = ()) -> Config:
    file = root / f"{family}.toml"
    file.write_text(RUN.format(out=root.as_posix(), family=family))
    return config.load(file, list(more))


def bits(outcome: Outcome, step: int) -> dict[str, bytes]:
    """The files of a checkpoint's state."""
    folder = folders.at(outcome.path / "checkpoints", step)
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.suffix == ".state"}


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_resumed_session_ends_in_the_same_bits(gpu: EmulatedGpu, root: Path, kernels: Catalogue, family: str) -> None:
    cfg = configured(root, family)
    whole = train(cfg, kernels, Printer(), admit=None)
    asked = iter([False, False, False, True])
    halted = train(cfg, kernels, Printer(), admit=None, stop=lambda: next(asked))
    assert (halted.step, halted.finished) == (4, False)
    resumed = train(cfg, kernels, Printer(), admit=None, resume=halted.path)
    assert resumed.finished and resumed.step == whole.step == 8
    assert bits(whole, 8) and bits(whole, 8) == bits(resumed, 8)
    assert whole.validation == resumed.validation
    losses = [loss for _, loss in read(whole.path / "metrics.sqlite", "step_metrics", "step, loss")]
    assert len(losses) == 8 and losses[-1] < losses[0]
    assert gpu.allocated == 0


def test_what_is_handed_over_at_once_moves_no_bit(gpu: EmulatedGpu, root: Path, kernels: Catalogue) -> None:
    """Four microbatches a step, one, three and all of them to a graph; and a run that goes on with another number than it began with."""
    found = []
    for replay in (1, 3, 0):
        done = train(configured(root, more=(f"train.replay={replay}", "train.profile=2")), kernels, Printer(), admit=None)
        found.append(bits(done, 8))
        phases = read(done.path / "metrics.sqlite", "step_timing", "launches, forward_ns, backward_ns, optimizer_ns")
        assert len(phases) == 8 and len({launches for launches, *_ in phases}) == 1 and all(min(times) > 0 for _, *times in phases)
    asked = iter([False, False, True])
    halted = train(configured(root, more=("train.replay=2",)), kernels, Printer(), admit=None, stop=lambda: next(asked))
    (halted.path / "config.toml").write_text((halted.path / "config.toml").read_text().replace("replay = 2", "replay = 0"))
    resumed = train(config.load(halted.path / "config.toml"), kernels, Printer(), admit=None, resume=halted.path)
    assert found[0] and all(x == found[0] for x in [*found, bits(resumed, 8)])
    assert gpu.allocated == 0


def test_phases_add_up_and_memory_is_as_planned(gpu: EmulatedGpu, root: Path, kernels: Catalogue) -> None:
    done = train(configured(root), kernels, Printer(), admit=None)
    path = done.path / "metrics.sqlite"
    columns = " + ".join(f"{p}_ns" for p in PHASES)
    rows = read(path, "step_timing",
                f"step, wall_ns, {columns} + unexplained_ns, launches, profiled, forward_ns, backward_ns, optimizer_ns")
    assert len(rows) == 8 and all(wall == total for _, wall, total, *_ in rows)
    assert len({launches for _, _, _, launches, *_ in rows}) == 1 and rows[0][3] > 0
    assert all(min(row[5:]) > 0 for row in rows), "a phase of the device has no time"
    arenas = [x for x in read(path, "memory", "step, arena, planned, actual") if x[2] is not None]
    assert arenas and all(0 <= actual - planned < 256 for _, _, planned, actual in arenas)


def test_text_comes_from_a_run(gpu: EmulatedGpu, root: Path, kernels: Catalogue) -> None:
    done = train(configured(root), kernels, Printer(), admit=None)
    texts = []
    for _ in range(2):
        executor, tokenizer, step = open_run(done.path, kernels)
        with executor:
            assert isinstance(executor, CudaExecutor) and step == 8
            assert executor.hardware()["hardware"] == NAME
            texts.append(b"".join(generate(executor, tokenizer, b"def ", tokens=12)))
    assert texts[0] == texts[1] and texts[0]


def test_a_refused_step_changes_nothing_and_names_the_op(gpu: EmulatedGpu, root: Path, kernels: Catalogue,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = configured(root, more=("train.verify=0",))  # which would see the weight first
    good = train(cfg, kernels, Printer(), admit=None)
    spoil = CudaExecutor.enqueue
    updates = []

    def enqueue(self: CudaExecutor, plans: tuple[str, ...], inputs: object = None) -> None:
        spoil(self, plans, inputs)  # type: ignore[arg-type]
        updates.extend(plan for plan in plans if plan == "update")
        if len(updates) == 3 and plans[-1] == "update":  # the fourth step finds an infinite weight
            self.state("param16")[self.program.states["param16"].ranges()[2][0]] = np.inf

    monkeypatch.setattr(CudaExecutor, "enqueue", enqueue)
    with pytest.raises(NonFiniteError, match="made a non-finite value") as error:
        train(cfg, kernels, Printer(), admit=None)
    assert "step 3 was refused and changed nothing" in str(error.value) and "model line" in str(error.value)
    assert good.finished


def test_no_room_is_said_before_the_run_has_a_folder(root: Path, kernels: Catalogue) -> None:
    with emulated_gpu(385 << 20) as gpu:
        before = set((root / "runs").iterdir()) if (root / "runs").exists() else set()
        with pytest.raises(MachineError, match="does not fit into the GPU's memory"):
            train(configured(root), kernels, Printer(), admit=None)
        assert gpu.allocated == 0
        assert (set((root / "runs").iterdir()) if (root / "runs").exists() else set()) == before
