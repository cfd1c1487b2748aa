"""Several processes write evidence of one class at once: no record and no catch is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from alpha.gates.contracts.registry.common import HERE
from alpha.registry.catches import load_catches
from alpha.registry.evidence import LOCK, load_file

WRITERS, EACH = 5, 12

WRITE = """
import sys
from pathlib import Path
from alpha.gates.contracts.registry.common import HERE, make
from alpha.registry.catches import Catch, save_catches
from alpha.registry.evidence import save
root, writer, each = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
gates = ("determinism", "faults", "gradient", "parity", "perf")
for i in range(each):
    save([make(gates[writer], component=f"made.{i}")], root)
    save_catches([Catch(fault=f"made.{writer}.{i}", component="made.0", gate="parity", machine=HERE.key, digests={}, record=None,
                        error="made up")], root)
"""


def test_five_writers_lose_nothing(tmp_path: Path) -> None:
    """Each writes one gate of the same components, so that every file is every writer's."""
    running = [subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path), str(writer), str(EACH)]) for writer in range(WRITERS)]
    assert [process.wait(timeout=120) for process in running] == [0] * WRITERS
    files = [load_file(tmp_path / HERE.key / f"made.{i}.jsonl") for i in range(EACH)]
    assert [len(records) for records in files] == [WRITERS] * EACH
    assert len(load_catches(tmp_path, HERE.key)) == WRITERS * EACH
    assert {p.name for p in tmp_path.iterdir()} == {LOCK, HERE.key}
