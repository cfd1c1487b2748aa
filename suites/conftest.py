"""All suites run under the gates' plugin: it finds the components, keeps evidence and counts what was executed."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["alpha.gates.plugin"]


@pytest.fixture(scope="session")
def small_corpus() -> Callable[[Path], None]:
    """A function that fills a new folder with twelve files of 480 words each, the same every time."""

    def write(folder: Path) -> None:
        folder.mkdir()
        words = "def return self value None import for in if else while class".split()
        rng = random.Random(1)
        for i in range(12):
            (folder / f"{i}.txt").write_text("\n".join(" ".join(rng.choices(words, k=8)) for _ in range(60)))

    return write
