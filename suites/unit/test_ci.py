"""What CI runs, with a `make` that only says what it was asked for; of what shares the machine each waits until the other has begun."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from alpha.tomlfile import read_toml

ROOT = Path(__file__).parents[2]

MAKE = """#!/bin/sh
echo "began $1" >> "$ASKED"
case "$1" in lint) wait_for=gates;; gates) wait_for=lint;; kernels) wait_for=gates;; *) wait_for=;; esac
tries=0
while [ -n "$wait_for" ] && ! grep -q "began $wait_for" "$ASKED"; do
    tries=$((tries + 1)); [ $tries -gt 300 ] && exit 9; sleep 0.1
done
echo "make $1 says so"
echo "ended $1" >> "$ASKED"
[ "$1" != "$FAILS" ]
"""


def ran(folder: Path, fails: str) -> tuple[int, list[str], list[str]]:
    """(exit code, lines that are printed, what began and ended) of .ci/run where one target fails."""
    tools = folder / "tools"
    for path, text in ((tools / "make", MAKE), (tools / "chromium", "#!/bin/sh\n")):  # a browser is there: nothing is installed
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "ASKED": str(folder / "asked"), "FAILS": fails}
    done = subprocess.run([str(folder / ".ci" / "run")], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines(), (folder / "asked").read_text().splitlines()


@pytest.mark.parametrize("fails", ["none", "nvcc", "test", "lint", "kernels", "gates"])
def test_one_red_target_makes_it_red(tmp_path: Path, fails: str) -> None:
    """The timed tests have the machine for themselves; what follows shares it, and the log ends with the merge gate."""
    code, output, asked = ran(tmp_path, fails)
    assert (code != 0) == (fails != "none")
    if fails in ("nvcc", "test"):
        assert asked[-1] == f"ended {fails}"
        return
    assert asked[:4] == ["began nvcc", "ended nvcc", "began test", "ended test"]
    assert sorted(asked[4:]) == sorted(f"{x} {y}" for x in ("began", "ended") for y in ("lint", "kernels", "gates"))
    assert output == [f"make {x} says so" for x in ("nvcc", "test", "kernels", "lint", "gates")]


def test_a_test_that_fails_ends() -> None:
    """A test failed by design, and CI with it, after 90 minutes: where the variable CI is set, pytest compares long values line by line."""
    shows = ["--no-print-directory", "--eval", 'shown:; @echo "[$$CI$$BUILD_NUMBER]" $(PYTEST)', "shown"]
    done = subprocess.run(["make", *shows], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT,
                          env={**os.environ, "CI": "true", "BUILD_NUMBER": "1", "MAKEFLAGS": ""})
    variables, command = done.stdout.split(maxsplit=1)
    assert variables == "[]" and "--timeout " in command


OLDEST = "3.10"
"""What README asks for at the least."""


def pins() -> list[Requirement]:
    """Lines of requirements.lock."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_a_pin_can_be_installed_wherever_it_applies() -> None:
    """A pin that the oldest Python meets as well must admit it, as its own metadata says; those that are installed here are looked at."""
    project = read_toml(ROOT / "pyproject.toml")["project"]
    assert project["requires-python"] == f">={OLDEST}" and f"Python {OLDEST} or newer" in (ROOT / "README.md").read_text()
    looked_at = 0
    for pin in pins():
        if pin.marker is not None and not pin.marker.evaluate({"python_version": OLDEST, "python_full_version": f"{OLDEST}.0"}):
            continue
        try:
            found = distribution(pin.name)
        except PackageNotFoundError:
            continue
        if found.version in pin.specifier:
            looked_at += 1
            wanted = SpecifierSet(found.metadata["Requires-Python"] or "")
            assert f"{OLDEST}.99" in wanted, f"{pin} asks for Python {wanted}, and {OLDEST} takes it too: pin an older one for that"
    assert looked_at >= 20, "of the environment of `make setup`"


def test_every_python_finds_one_pin_of_a_name() -> None:
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        at = {"python_version": version, "python_full_version": f"{version}.0"}
        names = [pin.name.lower() for pin in pins() if pin.marker is None or pin.marker.evaluate(at)]
        assert len(names) == len(set(names)) and {"numpy", "pytest"} <= set(names), f"Python {version}"
