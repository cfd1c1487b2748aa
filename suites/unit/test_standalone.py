"""The package without its checkout, as pip installs it from a wheel: one clear sentence instead of a missing file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from alpha import __version__, resources
from alpha.errors import MachineError
from alpha.train.rundir import source_state

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel of the package holds, built here without network, and nothing of the checkout."""
    place = tmp_path_factory.mktemp("wheel")
    for part in ("alpha", "pyproject.toml", "README.md", "LICENSE"):
        source, to = ROOT / part, place / "source" / part
        if source.is_dir():
            shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to)
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(place)], cwd=place / "source", capture_output=True, text=True, check=False,
                          timeout=120, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        wheel.extractall(place / "site")
    return place / "site"


def alpha(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "alpha", *words], cwd=site, capture_output=True, text=True, check=False, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": ""})


@pytest.mark.parametrize("words", [("train", "configs/demo.toml"), ("gate", "status")], ids=" ".join)
def test_one_clear_sentence(site: Path, words: tuple[str, ...]) -> None:
    done = alpha(site, *words)
    assert done.returncode == MachineError.exit_code and not done.stdout, done.stdout + done.stderr
    assert done.stderr.startswith(f"alpha {words[0]}: Alpha runs from a checkout, and this package stands alone\n"), done.stderr
    for text in (str(site), "kernels, baselines", "git clone", "pip install --editable ."):
        assert text in done.stderr, text
    assert "Traceback" not in done.stderr


def test_what_needs_no_checkout(site: Path) -> None:
    for words in (("--version",), ("train", "--help")):
        done = alpha(site, *words)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert words != ("--version",) or done.stdout == f"alpha {__version__}\n"


def test_a_checkout_names_its_commit() -> None:
    done = alpha(ROOT, "--version")
    assert done.returncode == 0 and not done.stderr, done.stderr
    commit = source_state()["commit"]
    assert done.stdout.startswith(f"alpha {__version__}" + ("" if commit == "unknown" else f" (commit {commit[:12]}")), done.stdout


def test_the_wheel_says_its_licence(site: Path) -> None:
    info = next(site.glob("*.dist-info"))
    metadata = (info / "METADATA").read_text(encoding="utf-8")
    assert "License-Expression: Apache-2.0" in metadata and f"Version: {__version__}" in metadata
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_a_checkout_is_one() -> None:
    assert resources.checkout() == ROOT.resolve()
    assert all((resources.ROOT / name).is_dir() for name in (*resources.NEEDED, "configs"))
