"""A gate is added in one entry of the gate table and its engine's file: done on a copy, counted, run, judged and listed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import warm

import alpha
from alpha.gates.adversarial import plant

ENTRY = '''    Gate(name="twice", engine="alpha.gates.twice:measure", cases=(Contract,), owed_by=("kernel",), seconds=0.1),
'''
ENGINE = '''"""The gate of this test: two calls on fresh buffers give the same bits. Floor 7."""

from __future__ import annotations

from alpha.component import Component
from alpha.gates.subjects import cases, fresh_nonce, make_record, once, same_bits, warm_up
from alpha.registry.cases import Contract
from alpha.registry.record import Record


def measure(component: Component, nonce: str | None = None) -> Record:
    """Run the gate; the verdict is the judge's."""
    nonce = nonce or fresh_nonce()
    warm_up(component)
    found = []
    for case in cases(component, nonce)[:2]:
        differs = not same_bits(once(component, case), once(component, case))
        found.append(Contract(name=case.name, error=float(differs), bound=0.0, cases=1))
    return make_record(component, "twice", nonce, 2, found)
'''
PLACES = {"alpha/registry/gates.py", "alpha/gates/twice.py"}
"""What a person edits. Its planted faults, its line among the public surfaces and its paragraph in docs come beside it."""


def test_one_entry_and_one_file(tmp_path: Path) -> None:
    package = Path(alpha.__file__).parent
    plant.copy_package(tmp_path)
    table = tmp_path / "alpha" / "registry" / "gates.py"
    text = table.read_text(encoding="utf-8")
    end = text.index(")\n\"\"\"Every gate, in the order")
    table.write_text(text[:end] + ENTRY + text[end:], encoding="utf-8")
    (tmp_path / "alpha" / "gates" / "twice.py").write_text(ENGINE, encoding="utf-8")
    changed = {p.relative_to(tmp_path).as_posix() for p in (tmp_path / "alpha").rglob("*.py")
               if not (package.parent / p.relative_to(tmp_path)).is_file()
               or p.read_bytes() != (package.parent / p.relative_to(tmp_path)).read_bytes()}
    assert changed == PLACES

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return warm.run(["-m", "alpha", "gate", *arguments], cwd=tmp_path, root=tmp_path, timeout=240)

    done = run("run", "gelu.f32.cpu", "--gate", "twice")
    assert done.returncode == 0 and "PASS" in done.stdout and "1 run, 0 not passed" in done.stdout, done.stdout + done.stderr
    (kept,) = (tmp_path / ".alpha" / "evidence").rglob("gelu.f32.cpu.jsonl")
    record = json.loads(kept.read_text(encoding="utf-8"))
    assert record["gate"] == "twice" and {"implementation", "measure", "cases", "row"} <= record["digests"].keys()
    told = run("explain", "gelu.f32.cpu")
    assert any(line.split()[:2] == ["twice", "PASS"] for line in told.stdout.splitlines()), told.stdout + told.stderr
    owed = {line.split()[0]: line for line in run("list").stdout.splitlines() if line.strip()}
    assert "twice" in owed["gelu.f32.cpu"] and "twice" not in owed["split.by_file"]
