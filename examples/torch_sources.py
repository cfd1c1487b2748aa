"""The text of the whole runs that README quotes: the Python sources of PyTorch 2.11.0, out of its wheel, to texts/torch.

    python examples/torch_sources.py [WHEEL]

Without WHEEL pip fetches it, 531 MB, from the index that pip is set to. Nothing of it is installed or imported. Any wheel of that version
for Linux on x86-64 with CUDA 13.0 will do. Exit code 1 where the text is another than the runs read.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from alpha.data.corpus import folder_corpus

VERSION, SUFFIX = "2.11.0", ".py"
SHA256 = "fa6c1f65252989cf57ad954e5df4bc0fb904f11863e12336984c360af837121c"
"""Hash of the corpus, 2,057 texts of 41,335,867 bytes, as a run's manifest has it."""


def fetched(folder: Path) -> Path:
    """The wheel, as pip fetches it into a folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(folder), f"torch=={VERSION}"], check=True)
    (wheel,) = folder.glob("torch-*.whl")
    return wheel


def unpack(wheel: Path, into: Path) -> None:
    """Its sources, below `into`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into, [name for name in archive.namelist() if name.startswith("torch/") and name.endswith(SUFFIX)])


def main(arguments: list[str]) -> int:
    """Make texts/torch, and hold it against what the runs read."""
    into = Path("texts")
    with tempfile.TemporaryDirectory() as scratch:
        unpack(Path(arguments[0]) if arguments else fetched(Path(scratch)), into)
    corpus = folder_corpus(into / "torch", f"**/*{SUFFIX}")
    print(f"{into / 'torch'}: {len(corpus.documents):,} texts, {corpus.size:,} bytes, corpus {corpus.hash}")
    if corpus.hash != SHA256:
        print(f"the runs read another text: corpus {SHA256}", file=sys.stderr)
    return int(corpus.hash != SHA256)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
