"""Small runs on made-up text in a temporary folder, with the kernels of the catalogue, and stand-ins for a device. Floor 7."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from alpha import config
from alpha.backends.cpu.executor import CpuExecutor
from alpha.backends.cuda.executor import CudaExecutor
from alpha.component import Catalogue
from alpha.config import Config
from alpha.gates.contracts import of_settings
from alpha.graph.plan import Program
from alpha.profile.store import Store, read
from alpha.train import assemble
from alpha.train.assemble import Dataset
from alpha.train.catalogue import catalogue
from alpha.train.loop import Loop

RUN = """
[run]
name = "contract"
[model]
family = "gpt"
layers = 1
width = 16
heads = 2
dropout = 0.1
[data]
corpus = "{root}/text"
tokenizer = "bytes"
validation = 0.4
sequence = 8
cache = "{root}/cache"
[train]
steps = 5
batch = 12
shards = 2
micro_batch = 2
eval_every = 2
eval_windows = 5
checkpoint_every = 2
[optim]
lr = 1e-2
[machine]
threads = {threads}
"""


@cache
def _program(text: str, vocab: int) -> Program:
    cfg = config.parse(text)
    return assemble.program_for(cfg, vocab, catalogue(), assemble.threads_for(cfg))


class RunsAhead(CpuExecutor):
    """A device that computes beside the host, as far as a loop can tell: what is handed over runs when its results are asked for or the
    state is looked at, not before, and nothing behind it does. `ahead`: how often results were asked for with work behind them; `plans`:
    how many ran; `poison`: the gradient is infinite when the update of this number runs."""

    runs_ahead = True

    def __init__(self, program: Program, catalogue: Catalogue) -> None:
        self._queue: list[tuple[str, dict[str, np.ndarray]]] = []
        self.ahead, self.updates, self.plans, self.poison = 0, 0, 0, -1
        super().__init__(program, catalogue)

    def _until(self, stop: int) -> None:
        queue, self._queue = self._queue[:stop], self._queue[stop:]
        for plan, inputs in queue:
            if plan == "update":
                if self.updates == self.poison:
                    super().state(max(kind for kind in self.program.states if kind.startswith("grad")))[0] = np.inf
                self.updates += 1
            self.plans += 1
            self._run(self.program.plans[plan], inputs)

    def enqueue(self, plans: tuple[str, ...], inputs: Sequence[Mapping[str, np.ndarray]] | None = None) -> None:
        given = self._staged.pop(plans, [{} for _ in plans]) if inputs is None else inputs
        self._queue += [(plan, {k: np.array(x) for k, x in found.items()}) for plan, found in zip(plans, given)]

    def outputs(self, plan: str) -> dict[str, np.ndarray]:
        self._until(1 + max((i for i, (name, _) in enumerate(self._queue) if name == plan), default=-1))
        self.ahead += bool(self._queue)
        return {k: x.copy() for k, x in super().outputs(plan).items()}

    def state(self, kind: str) -> np.ndarray:
        self._until(len(self._queue))
        return super().state(kind)

    def replay(self, plan: str, inputs: Mapping[str, np.ndarray] | None = None) -> None:
        self._until(len(self._queue))
        super().replay(plan, inputs)

    def check(self, hashes: Callable[[], None]) -> None:
        self._until(len(self._queue))  # what was handed over before comes first, and what is handed over later does not
        super().check(hashes)


class Away(of_settings.Late):
    """How the state of `executor` is copied as from a device: what is there when the copy begins, and the copy is there when it is waited
    for."""

    def __init__(self, executor: CpuExecutor) -> None:
        super().__init__()
        self._executor = executor

    def lend(self, kind: str) -> np.ndarray:
        """The state itself: nothing that was handed over is run for it."""
        return CpuExecutor.state(self._executor, kind)


class OnDevice(RunsAhead, CudaExecutor):  # type: ignore[misc]  # runs here, and is taken for one of a device
    """A device as above whose state is copied beside steps."""

    digests, downloads = None, None  # type: ignore[assignment]

    def __init__(self, program: Program, catalogue: Catalogue) -> None:
        super().__init__(program, catalogue)
        self.downloads = Away(self)  # type: ignore[assignment]


class SmallRun:
    """A folder with text, and loops over it."""

    def __init__(self, root: Path, rng: np.random.Generator) -> None:
        self.root = root
        (root / "text").mkdir()
        for i in range(9):
            (root / "text" / f"{i}.txt").write_bytes(rng.integers(32, 127, int(rng.integers(200, 900)), np.uint8).tobytes())
        self.cfg = self.config(2)
        self.data = assemble.open_data(self.cfg)

    def config(self, threads: int, *overrides: str) -> Config:
        return config.parse(RUN.format(root=self.root.as_posix(), threads=threads), overrides)

    @contextmanager
    def loop(self, name: str, cfg: Config | None = None, data: Dataset | None = None,
             kind: type[CpuExecutor] = CpuExecutor) -> Iterator[Loop]:
        cfg, data, folder = cfg or self.cfg, data or self.data, self.root / name
        folder.mkdir(exist_ok=True)
        with (
            kind(_program(_without_paths(cfg), data.tokenizer.vocab_size), catalogue()) as executor,
            Store(folder / "m.sqlite") as metrics,
        ):
            sampler = assemble.sampler_for(cfg, data)
            yield Loop(cfg, executor, sampler, data.validation, data.tokenizer, folder / "checkpoints", metrics)

    def rows(self, name: str) -> list[tuple[object, ...]]:
        return read(self.root / name / "m.sqlite", "step_metrics", "step, loss, norm, lr, coefficient, tokens, finite")


def _without_paths(cfg: Config) -> str:
    """The Program does not depend on where the text lies, so it is built once."""
    return config.parse(cfg.resolved(), ["data.corpus=x", "data.cache=x"]).resolved()


@contextmanager
def small_run(rng: np.random.Generator) -> Iterator[SmallRun]:
    with tempfile.TemporaryDirectory(prefix="alpha-loop-") as root:
        yield SmallRun(Path(root), rng)


def bits_of(loop: Loop) -> bytes:
    """Every named tensor of the state."""
    parts = [flat[o : o + n].tobytes() for _, (layout, flat) in sorted(loop.states().items()) for o, n in layout.ranges()]
    return b"".join(parts)


def refuses_to_resume(loop: Loop, kind: type[Exception]) -> bool:
    """Whether resuming is refused with exactly this error, before anything of the state changed."""
    before = bits_of(loop)
    try:
        loop.resume()
    except Exception as error:  # any other class is a wrong answer
        return type(error) is kind and bits_of(loop) == before
    return False


def does_raise(action: Callable[[], object], kind: type[Exception]) -> bool:
    try:
        action()
    except kind:
        return True
    return False
