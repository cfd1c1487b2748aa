"""The judge's side of an outside candidate's process: memory that the judge owns, calls, what the process does meanwhile. Floor 7."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from alpha.errors import InputError, MachineError, VerdictError
from alpha.gates.outside import child
from alpha.profile.served import Served, ServedError
from alpha.train import forbidden
from alpha.types import NUMPY, TensorType

PATIENCE = 60.0
"""Seconds that a call may take; then the process is ended and the case fails. A just-in-time compilation is the longest."""

TORCH = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "i64": "int64", "i32": "int32", "bool": "bool"}

GUARD = 256
"""Least bytes before the first operand and behind each, which hold a drawn pattern that no call may change."""

SETTLE = 0.1
"""Seconds after which what a candidate left behind is looked at again."""


class Candidate:
    """A process with the candidate alone in it. Its files are copied into an empty folder, where it starts: the reference is not among
    them. Its environment holds nothing of ours. Use as a context manager."""

    def __init__(self, folder: Path, files: Sequence[str], function: str, language: str, python: str = sys.executable) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="candidate-"))
        memory = Path("/dev/shm")
        self._memory = Path(tempfile.mkdtemp(prefix="operands-", dir=memory if os.access(memory, os.W_OK) else None))
        for name in files:
            (self._place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name, self._place / name)
        self._next, self._dropped = 0, list[int]()
        foreign = language != "numpy"
        if foreign:
            forbidden.starts_peer()
        try:
            self._served = Served("the candidate", [python, "-I", child.__file__], self._environment())
        except ServedError:
            self._clear()
            raise
        if foreign:
            forbidden.starts_peer(self._served.pid)
        try:
            self.version, self.apart = self._served.ask("load", patience=PATIENCE, file=str(self._place / files[0]), function=function,
                                                        language=language)
        except ServedError as error:
            self.close()
            if foreign and "No module named" in str(error.came):
                raise MachineError(f"{language} is not installed in {python}", came=error.came, expected=f"a Python that has {language}",
                                   do="name one with --python PATH") from None
            if foreign and "needs a GPU" in str(error.came):
                raise MachineError("this machine lacks what the candidate needs", came=error.came) from None
            raise InputError("the candidate cannot be loaded", came=error.came, do="mend its file") from None
        except ValueError as error:
            self.close()
            raise InputError("the candidate cannot be loaded", came=f"it wrote between the answers: {error}", do="mend its file") from None
        except BaseException:  # whoever ends this process: nobody else knows of the folders
            self.close()
            raise
        self.threads = self.tasks()

    def _environment(self) -> Mapping[str, str]:
        one = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        return {**one, "PATH": os.environ.get("PATH", ""), "HOME": str(self._place), "TMPDIR": str(self._place), "LC_ALL": "C.UTF-8",
                "PYTHONHASHSEED": str(secrets.randbelow(2**32)), "PYTHONDONTWRITEBYTECODE": "1"}

    def tasks(self) -> int:
        """Threads of the process and its children, as the operating system counts them."""
        def count(pid: int) -> int:
            threads = os.listdir(f"/proc/{pid}/task")
            below = [int(c) for t in threads for c in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
            return len(threads) + sum(count(c) for c in below)

        try:
            return count(self._served.pid)
        except OSError:
            return 0

    def seconds(self) -> float:
        """Processor time that the process has used; NaN where the operating system does not say."""
        try:
            fields = Path(f"/proc/{self._served.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            return float("nan")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within it the process stands still."""
        os.kill(self._served.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._served.pid, signal.SIGCONT)

    def place(self, types: Sequence[TensorType], shared: Mapping[int, int], offset: int, inputs: int,
              attributes: Mapping[str, object]) -> tuple[int, list[np.ndarray], list[np.ndarray]]:
        """(number, arrays, guards) of operands in memory of their own, each `offset` elements past a 256-byte boundary. `shared`: operand
        -> the one whose memory it gets. Guards: the bytes before, between and behind them."""
        if self._dropped:
            self._ask("drop", numbers=[self._dropped.pop() for _ in range(len(self._dropped))])
        starts: list[int] = []
        gaps: list[tuple[int, int]] = []
        last, end = 0, GUARD
        for i, t in enumerate(types):
            item = np.dtype(NUMPY[t.dtype]).itemsize
            starts.append(starts[shared[i]] if i in shared else end + offset * item)
            if i not in shared:
                gaps.append((last, starts[-1]))
            last = max(last, starts[-1] + t.size * item)
            end = -(-last // 256) * 256 + GUARD
        gaps.append((last, end))
        self._next += 1
        path = self._memory / str(self._next)
        with open(path, "w+b") as file:
            file.truncate(end)
            memory = mmap.mmap(file.fileno(), 0)
        arrays: list[np.ndarray] = [np.ndarray(t.shape, NUMPY[t.dtype], memory, s) for t, s in zip(types, starts)]
        self._ask("bind", number=self._next, file=str(path), inputs=inputs, attributes=dict(attributes),
                         operands=[[s, list(t.shape), np.dtype(NUMPY[t.dtype]).str, TORCH[t.dtype]] for s, t in zip(starts, types)])
        path.unlink()
        return self._next, arrays, [np.ndarray((b - a,), np.uint8, memory, a) for a, b in gaps]

    def forget(self, number: int) -> None:
        """The process lets go of these operands before it gets others."""
        self._dropped.append(number)

    def bring(self, numbers: Sequence[int]) -> None:
        """What the arrays hold goes to where the candidate computes; nothing where that is the same memory."""
        if self.apart:
            self._ask("bring", numbers=list(numbers))

    def call(self, numbers: Sequence[int]) -> None:
        """Calls, in this order."""
        self._ask("call", numbers=list(numbers))

    def fetch(self, numbers: Sequence[int]) -> None:
        """Outputs come to the arrays."""
        if self.apart:
            self._ask("fetch", numbers=list(numbers))

    def _ask(self, do: str, **arguments: Any) -> None:
        try:
            self._served.ask(do, patience=PATIENCE, **arguments)
        except ServedError as error:
            raise VerdictError(f"the candidate: {error.came}") from None
        except ValueError as error:
            raise VerdictError(f"the candidate wrote between the answers: {error}") from None

    def close(self) -> None:
        """End the process."""
        self._served.__exit__(None, None, None)
        self._clear()

    def _clear(self) -> None:
        for folder in (self._place, self._memory):
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Candidate:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class OutsideBound:
    """Operands of one call in memory of their own (subjects.Bound)."""

    def __init__(self, candidate: Candidate, ins: Sequence[TensorType], outs: Sequence[TensorType], attrs: Mapping[str, object], *,
                 offset: int = 0, share: tuple[int, int] | None = None) -> None:
        shared = {len(ins) + share[0]: share[1]} if share is not None else {}
        self.candidate = candidate
        self.number, arrays, self._guards = candidate.place([*ins, *outs], shared, offset, len(ins), attrs)
        self._patterns = [np.frombuffer(secrets.token_bytes(g.size), np.uint8) for g in self._guards]
        for guard, pattern in zip(self._guards, self._patterns):
            guard[...] = pattern
        self.ins, self.outs = arrays[: len(ins)], arrays[len(ins):]
        for x in self.ins:
            x[...] = np.nan if x.dtype.kind == "f" else 0
        weakref.finalize(self, candidate.forget, self.number)

    def fill(self, contents: Iterable[np.ndarray]) -> None:
        """Write contents into the input buffers."""
        for buffer, x in zip(self.ins, contents):
            buffer[...] = x

    def run(self, garbage: int = 0xFF, *, keep: int | None = None) -> None:
        """Poison outputs (but number `keep`; 0xFF: NaN in every float type), then call once."""
        for i, out in enumerate(self.outs):
            if i != keep:
                np.ndarray((out.nbytes,), np.uint8, out.data)[...] = garbage if out.dtype != np.bool_ else 1
        self.call()

    def call(self) -> None:
        """Call once. VerdictError where a byte outside the operands was written."""
        for step in (self.candidate.bring, self.candidate.call, self.candidate.fetch):
            step([self.number])
        for guard, pattern in zip(self._guards, self._patterns):
            if not np.array_equal(guard, pattern):
                raise VerdictError("the candidate wrote outside its operands", expected="every write inside an output")


def ordinary(rng: np.random.Generator, out: np.ndarray) -> np.ndarray:
    """Contents for an output that a candidate which looks for NaN takes for results: a drawn block, again and again."""
    block = rng.standard_normal(1021) if out.dtype.kind == "f" else rng.integers(0, 2, 1021)
    return np.resize(block.astype(out.dtype), out.shape)


def running(component: Any) -> Candidate:
    """The process of a component, which `started` has started."""
    found = _RUNNING.get(component.id)
    if found is None:
        raise InputError("the candidate's process is not running", came=component.id, do="run `alpha gate run --from FOLDER`")
    return found


_RUNNING: dict[str, Candidate] = {}


@contextmanager
def started(component_id: str, candidate: Candidate) -> Iterator[Candidate]:
    """Within it the engines call this process for the component."""
    _RUNNING[component_id] = candidate
    try:
        with candidate:
            yield candidate
    finally:
        del _RUNNING[component_id]
