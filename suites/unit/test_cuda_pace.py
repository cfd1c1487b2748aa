"""A loop on an emulated GPU runs one step ahead of the host, but for the one behind which the device's clock is set."""

from __future__ import annotations

from pathlib import Path

import flips
import pytest
from emulated_gpu import emulated, emulated_gpu

from alpha.backends.cuda.observe import Watch
from alpha.component import Catalogue
from alpha.cuda_runtime.mark import Marks
from alpha.train.catalogue import catalogue


@pytest.fixture(scope="module")
def kernels() -> Catalogue:
    return emulated(catalogue())


@pytest.mark.parametrize("verify", [0, 1000])
def test_the_clock_is_set_behind_one_step_and_the_loop_runs_ahead_again(verify: int, kernels: Catalogue, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the state is hashed behind every step: a stream that has those to do is not idle, and the clock would stay as it was."""
    with emulated_gpu(), flips.on_device(tmp_path / "run", kernels, verify=verify, profile=0, steps=9) as loop:
        align, stepped, ahead, at = Marks.align, loop.stalls.stepped, list[int](), list[int]()

        def aligned(marks: Marks, probes: int) -> int:
            at.append(loop.step)
            return align(marks, probes)

        def told(*given: int, **of: bool) -> None:
            ahead.extend([loop.step] * of["ahead"])
            stepped(*given, **of)  # type: ignore[call-arg]

        monkeypatch.setattr(Marks, "align", aligned)
        monkeypatch.setattr(Watch, "due", property(lambda watch: loop.step >= 3 and not at))
        loop.stalls.stepped = told  # type: ignore[method-assign]
        loop.run()
    first = 1 + bool(verify)  # a checked first step has none handed over behind it
    assert at == [3] and ahead == [step for step in range(first, 9) if step != 4]
