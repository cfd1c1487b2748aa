"""What a follower writes to: TensorBoard by the package tensorboardX, Weights & Biases by its own. Floor 7.

tensorboardX writes event files and asks for NumPy, packaging and protobuf; the package tensorboard is the server, with gRPC and a web
server. Both are imported in the client's process alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from alpha.tomlfile import read_toml
from alpha.train import rundir


class Client(ABC):
    """Where values go."""

    @abstractmethod
    def begin(self, path: Path, first: int) -> None:
        """A session of the run in `path` begins with step `first`: what was written of that step and later ones counts no more."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Values by name."""

    @abstractmethod
    def close(self) -> None:
        """Everything is written."""


class TensorBoard(Client):
    """Event files in `tensorboard/` of the run directory."""

    def __init__(self) -> None:
        from tensorboardX import SummaryWriter

        self._make: Callable[..., Any] = SummaryWriter
        self._writer: Any = None

    def begin(self, path: Path, first: int) -> None:
        self.close()
        self._writer = self._make(str(path / "tensorboard"), purge_step=first or None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases(Client):
    """A run of the project `alpha`, under the identity in the manifest: a session that goes on goes on there too."""

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def begin(self, path: Path, first: int) -> None:
        if self._run is not None:
            return
        self._run = self._wandb.init(project="alpha", name=path.name, id=rundir.read_manifest(path)["run"], resume="allow", dir=str(path),
                                     config=read_toml(path / "config.toml"), settings=self._wandb.Settings(console="off"))  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # its own counter takes no step again, and a run may go back

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


CLIENTS: Mapping[str, Callable[[], Client]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""Key of [log] -> its client."""
