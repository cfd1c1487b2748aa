"""README's worked example, pasted into a copy of the repository and done to the end: gates, planted fault, surfaces.

The model that it leads to, and its training: test_docs_walkthroughs.py."""

from __future__ import annotations

from pathlib import Path

import walkthrough


def test_the_example_is_done_to_the_end(tmp_path: Path) -> None:
    place = walkthrough.copy(tmp_path)
    done = walkthrough.follow("README.md", place, only="An operation in six steps")
    assert done.made == ["alpha/ops/relu2.py", "alpha/backends/cpu/kernels/relu2.py", "alpha/backends/cpu/kernels/relu2.faults.toml"]
    assert done.edited == ["baselines/surfaces.txt"]
    output = dict(done.ran)
    gates = output["alpha gate run relu2.f32.cpu relu2_bwd.f32.cpu"]
    assert all(gate in gates for gate in ("parity", "gradient", "determinism", "faults", "perf")) and "FAIL" not in gates
