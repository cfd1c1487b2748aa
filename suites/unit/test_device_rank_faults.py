"""The campaign of faults of ranks on GPUs: its dry run on emulated ones, and that each thing which may go wrong is a problem to it."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import device_rank_faults
from device_rank_faults import PLANTS, STRUCK, problems

from alpha.cuda_runtime import CudaError
from alpha.cuda_runtime.lost import context_lost
from alpha.errors import RankError


def sound() -> dict[str, Any]:
    struck = {"trials": 3, "named": 3, "usable": 3, "in_time": 3, "wrong": []}
    restart = {"runs": 2, "ended_well": 2, "same_bits": 2, "started_as_expected": 2}
    return {**{what: dict(struck) for what in STRUCK}, "slowed": {"trials": 3, "waited_for": 3, "bits": 3},
            "aborted": {"trials": 3, "ended": 3, "blamed": 0, "usable": 3, "bits": 3},
            "restarts": {what: dict(restart) for what in PLANTS}, "waits": {"stream": 2.0}}


def test_all_that_may_go_wrong_is_a_problem() -> None:
    assert problems(sound()) == []
    wrong = [(what, name, 2) for what in STRUCK for name in ("named", "usable", "in_time")]
    wrong += [(what, "trials", 0) for what in STRUCK]
    wrong += [("slowed", "waited_for", 2), ("slowed", "bits", 2), ("aborted", "usable", 2), ("aborted", "bits", 2),
              ("aborted", "blamed", 1), ("waits", "stream", 480.0)]
    for what, name, value in wrong:
        found = deepcopy(sound())
        found[what][name] = value
        assert problems(found), (what, name)
    for what in PLANTS:
        for name, value in (("ended_well", 1), ("same_bits", 1), ("started_as_expected", 1), ("runs", 0)):
            found = deepcopy(sound())
            found["restarts"][what][name] = value
            assert problems(found), (what, name)


def test_the_dry_run_ends_well(tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    assert device_rank_faults.main([str(out), "--dry", "--each", "1", "--restarts", "0", "--jobs", "2"]) == 0
    found = json.loads(out.read_text())
    assert found["hardware"] == "emulated" and all(found[what]["trials"] == 1 for what in (*STRUCK, "slowed", "aborted"))
    assert len(found["waits"]) == 5 and 0.8 <= found["stopped"]["seconds_median"] < 4


def test_without_gpus_nothing_is_run(tmp_path: Path) -> None:
    script = Path(device_rank_faults.__file__)
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "out.json")], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "NOT_RUN: 2 ranks want a GPU each" in done.stderr and not (tmp_path / "out.json").exists()


def test_who_names_another_rank_is_seen() -> None:
    rows = [{"victim": 1, "named": False, "seconds": 0.1, "usable": True, "text": "another one", "op": "all_reduce"}]
    found = {**sound(), "killed": device_rank_faults._summed(rows)}
    assert "another one" in problems(found)[0]


class LogicError(Exception):
    """As pycuda has it."""


LogicError.__module__ = "pycuda._driver"


def test_a_lost_context_is_told_from_other_errors() -> None:
    lost = CudaError("the driver call cuEventSynchronize failed", came="CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access")
    assert "ILLEGAL_ADDRESS" in context_lost(lost)
    assert context_lost(LogicError("cuStreamSynchronize failed: an illegal memory access was encountered"))
    later = CudaError("the driver call cuMemsetD32Async failed", came="CUDA_ERROR_ILLEGAL_ADDRESS (700)")
    later.__context__ = lost
    assert "cuEventSynchronize" in context_lost(later), "the first one says what happened"
    for other in (CudaError("cuMemAlloc", came="CUDA_ERROR_OUT_OF_MEMORY (2)"), MemoryError("an illegal memory access"),
                  RankError("rank 1 died"), None, LogicError("cuMemcpyDtoH failed: invalid argument")):
        assert context_lost(other) == "", other
