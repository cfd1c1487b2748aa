"""Checkpoints as properties: whatever the tensors, units, ranks and blocks, what is loaded has the bits that were saved."""

from __future__ import annotations

import tempfile
from pathlib import Path

import disk_rates
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resume_matrix import matrix

from alpha import cli
from alpha.checkpoint import folders, offline
from alpha.gates.contracts.made_state import States, copied, cut_of, empty, same, saved_by
from alpha.graph.state import StateLayout, TensorSpec
from alpha.tomlfile import tomllib

Shapes = list[tuple[int, ...]]
SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=6)


def drawn(shapes: Shapes, seed: int) -> States:
    """Two kinds of state over tensors of these shapes, of which every third begins a unit."""
    rng = np.random.default_rng(seed)
    layout = StateLayout(TensorSpec(f"t{i}", shape, f"u{i // 3}") for i, shape in enumerate(shapes))
    return {kind: (layout, rng.standard_normal(layout.size).astype(np.float32)) for kind in ("m", "param")}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(SHAPES, st.integers(0, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 99), st.booleans())
def test_saved_laid_out_anew_and_loaded(shapes: Shapes, seed: int, by: int, anew: int, to: int, blocks: int, cut: bool) -> None:
    """By `by` ranks, whole or cut, in blocks of any size; as `anew` ranks; by `to` ranks: the same bits, all of them."""
    before = drawn(shapes, seed)
    with tempfile.TemporaryDirectory() as name:
        path = saved_by(Path(name) / "a", 3, before, by, 64 * blocks, cut=cut)
        folders.inspect(path)
        for found in (path, offline.relay(path, Path(name) / "b", anew)):
            after = empty({kind: layout for kind, (layout, _) in before.items()})
            folders.load(found, after)
            assert same(after, before)
            for rank in range(to):
                own = {kind: (x, np.full(x.shard(to).size, 7, np.float32)) for kind, (x, _) in before.items()}
                folders.load(found, own, cut=(rank, to))
                assert all(own[k][1].tobytes() == cut_of(x, flat, rank, to).tobytes() for k, (x, flat) in after.items())


def test_the_page_s_matrix() -> None:
    """The table of docs/checkpoints.md is what `suites/support/resume_matrix.py` prints."""
    assert matrix() in (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()


def test_the_page_s_planted_faults() -> None:
    """As many as docs/checkpoints.md says, 30 or more of them beside those that mirror what went wrong in public trainers."""
    root = Path(__file__).parents[2]
    files = [*root.glob("alpha/checkpoint/*.faults.toml"),
             *(root / "alpha" / "train" / f"{name}.faults.toml" for name in ("saving", "extend", "rundir"))]
    faults = [fault for file in files for fault in tomllib.loads(file.read_text())["fault"]]
    assert f"parts too: {len(faults)} in `alpha/checkpoint`" in (root / "docs" / "checkpoints.md").read_text()
    every = [f for file in root.glob("alpha/**/*.faults.toml") for f in tomllib.loads(file.read_text()).get("fault", [])]
    mirrored = {f.get("mirrors") for f in every}
    assert mirrored >= set(range(77, 83)) and sum(f.get("mirrors") not in range(77, 83) for f in faults) >= 30


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    """A folder that looks like a run, with two checkpoints of two ranks."""
    path, before = tmp_path_factory.mktemp("run"), drawn([(30, 40), (7,), ()], 1)
    for step in (4, 8):
        saved_by(path / "checkpoints", step, before, 2, facts={"tokenizer": "abc"})
    return path, before


def test_commands(run: tuple[Path, States], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, before = run
    assert cli.main(["checkpoint", "inspect", f"{path}@4"]) == 0
    out = capsys.readouterr().out
    assert "step 4, saved by 2 ranks" in out and "param: 3 tensors, 1,208 elements of f32, 4,832 bytes" in out and 'tokenizer: "abc"' in out
    assert cli.main(["checkpoint", "reshard", str(path), "--ranks", "3", "--out", str(tmp_path / "anew")]) == 0
    found = folders.at(tmp_path / "anew")
    assert found.name == "step-00000008" and len(list(found.iterdir())) == 7 and same(folders.read(found), copied(before))
    assert cli.main(["checkpoint", "verify", str(found)]) == 0
    assert "step 8 is whole; 9," in capsys.readouterr().out
    data = found / "rank-00000-of-00003.state"
    data.write_bytes(data.read_bytes()[:-1])
    assert cli.main(["checkpoint", "verify", str(found)]) == 2
    assert data.name in capsys.readouterr().err
    assert cli.main(["checkpoint", "reshard", str(path), "--ranks", "3", "--out", str(tmp_path / "anew")]) == 2
    assert cli.main(["checkpoint", "inspect", str(tmp_path / "nothing")]) == 2


def test_rates_stand_beside_dd_of_the_same_round() -> None:
    """Of each round the share, of the shares the median and quartiles: a slow round of both is no slower share."""
    took = {"dd": [1.0, 2.0, 1.0, 8.0, 1.0], "save": [1.0, 2.5, 1.25, 16.0, 1.25], "slow": [2.0, 4.0, 2.0, 8.0, 2.0]}
    lines = disk_rates.table(took, {"save": "dd", "slow": "dd"}, 4_000_000_000)
    assert lines[2:] == ["| dd | 1.00 (1.00 to 8.00) | 4.00 |  |  |",
                         "| save | 1.25 (1.00 to 16.00) | 3.20 | 80% (80% to 80%) | yes |",
                         "| slow | 2.00 (2.00 to 8.00) | 2.00 | 50% (50% to 50%) | no |"]
