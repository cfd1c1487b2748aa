"""Cases of `corpus.stdlib` and `corpus.folder`: against a listing by hand, on made-up trees and the standard library."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from alpha.component import Measured
from alpha.data import corpus
from alpha.errors import CorruptError, InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data import limits, walked
from alpha.gates.contracts.data.support import Cases, any_bytes, folder, same_everywhere, write_texts


def reference_listing(root: Path, inside: tuple[str, ...] = ()) -> list[tuple[bytes, bytes]]:
    """(relative path, text) of every document of the rule, by hand."""
    found = []
    for name in os.listdir(root.joinpath(*inside)):
        path = root.joinpath(*inside, name)
        if path.is_dir() and not path.is_symlink():
            if name not in ("test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"):
                found += reference_listing(root, (*inside, name))
        elif name[-3:] == ".py" and not name.startswith("_sysconfigdata"):
            text = path.read_bytes()
            if text != b"":
                found.append(("/".join((*inside, name)).encode("utf-8", "surrogateescape"), text))
    return found


def reference_hash(listing: list[tuple[bytes, bytes]]) -> str:
    """The hash of the corpus by its definition."""
    digest = hashlib.sha256(b"alpha.corpus.v1\n")
    for name, text in sorted(listing):
        digest.update(name + b"\0" + hashlib.sha256(text).hexdigest().encode() + b"\n")
    return digest.hexdigest()


def made_up_tree(rng: np.random.Generator) -> dict[str, bytes]:
    """A small standard library with everything that the rule leaves out."""
    texts = {f"m{i}.py": any_bytes(rng, int(rng.integers(1, 200))) for i in rng.permutation(12)}
    texts |= {f"pkg{i}/a{j}.py": any_bytes(rng, 50 + j) for i in range(3) for j in rng.permutation(4)}
    texts |= {
        "empty.py": b"",
        "test.py": b"kept",
        "pkg0/testing/x.py": b"kept",
        "pkg0.py": b"sorts between",
        "pkg-0/z.py": b"z",
        "\udcff.py": b"odd name",
        "same1.py": b"same",
        "same2.py": b"same",
    }
    texts |= {
        "test/t.py": b"out",
        "pkg1/tests/t.py": b"out",
        "pkg1/idle_test/t.py": b"out",
        "site-packages/p/p.py": b"out",
        "dist-packages/p.py": b"out",
        "__pycache__/c.py": b"out",
        "_sysconfigdata__linux.py": b"out",
        "notes.txt": b"out",
    }
    return texts


def _made_up_as_listed(rng: np.random.Generator) -> Measured:
    count = Checks()
    for _ in range(3):
        with folder() as root:
            write_texts(root, made_up_tree(rng))
            made, expected = corpus.stdlib_corpus(root), reference_listing(root)
            count.that([corpus.path_bytes(d.relpath) for d in made.documents] == sorted(name for name, _ in expected), "documents")
            count.that(made.hash == reference_hash(expected), "hash")
            count.that(made.size == sum(len(text) for _, text in expected), "size")
            count.that(list(made.texts()) == [text for _, text in sorted(expected)], "texts")
    return count.measured()


def _stdlib_as_listed(rng: np.random.Generator) -> Measured:
    count = Checks()
    made, expected = corpus.stdlib_corpus(), reference_listing(corpus.stdlib_folder())
    count.that(len(made.documents) == len(expected), f"{len(made.documents)} documents instead of {len(expected)}")
    count.that(made.hash == reference_hash(expected), "hash")
    count.that(1 << 20 < made.size < 64 << 20, f"{made.size} bytes is no corpus of a few tens of MB")
    return count.measured()


def _hash_tells_apart(rng: np.random.Generator) -> Measured:
    """Another text, a renamed file, one file more: another hash; the same files in another folder: the same."""
    count = Checks()
    texts = made_up_tree(rng)
    variants = [
        texts,
        {**texts, "m3.py": texts["m3.py"] + b"!"},
        {**texts, "m3.py": bytes([texts["m3.py"][0] ^ 1]) + texts["m3.py"][1:]},  # another text of the same size
        {**texts, "new.py": b"x"},
        {("m99.py" if name == "m9.py" else name): text for name, text in texts.items()},  # renamed, in the same place
        {("renamed.py" if name == "m4.py" else name): text for name, text in texts.items()},
        {**texts, "m1.py": texts["m2.py"], "m2.py": texts["m1.py"]},
    ]
    hashes = []
    for variant in variants:
        with folder() as root:
            write_texts(root, variant)
            hashes.append(corpus.stdlib_corpus(root).hash)
    count.that(len(set(hashes)) == len(hashes), "two corpora share a hash")
    count.add(" ".join(hashes).encode())
    for _ in range(3):
        with folder() as root:
            names = list(texts)
            write_texts(root / "deeper", {names[i]: texts[names[i]] for i in rng.permutation(len(names))})
            count.that(corpus.stdlib_corpus(root / "deeper").hash == hashes[0], "the order of creation or the folder changed the hash")
    return count.measured()


def _folders_and_globs(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        write_texts(root, {"a.txt": b"1", "b/c.txt": b"22", "b/d.md": b"333", "e/.keep": b"", "x.bin": b"4", "x.PY": b"5",
                           ".git/a.md": b"6"})
        for source, expected in (
            (root, ["a.txt", "b/c.txt", "b/d.md", "x.PY"]),
            (root / "**" / "*.txt", ["a.txt", "b/c.txt"]),
            (root / "*.bin", ["x.bin"]),
            (root / "**" / "*.md", [".git/a.md", "b/d.md"]),
            (root / "b" / "*", ["c.txt", "d.md"]),
            (root / "b" / "d.md", ["d.md"]),
        ):
            made = corpus.open_corpus(str(source))
            count.that([d.relpath for d in made.documents] == expected, f"{source}: {made.documents}")
        count.that(corpus.open_corpus(str(root)).left_out == 3, "files that were left out are not told")
        made = corpus.corpus_of_files("twice", root, ["a.txt", "a.txt"])
        count.that(len(made.documents) == 1, "a path twice")
    return count.measured()


def _samples(rng: np.random.Generator) -> Measured:
    """A sample fits, is the largest prefix of the hash order, grows without losing files."""
    count = Checks()
    documents = tuple(
        sorted(
            (corpus.Document(f"f{i}.py", f"{i:064x}", int(rng.integers(1, 1000))) for i in range(60)),
            key=lambda d: d.relpath.encode(),
        )
    )
    whole = corpus.Corpus("made up", Path("nowhere"), documents)
    order = sorted(documents, key=lambda d: hashlib.sha256(d.relpath.encode()).hexdigest())
    last: set[str] = set()
    for limit in sorted(rng.integers(order[0].size, whole.size, 12).tolist()):
        came = {d.relpath for d in whole.sample(limit).documents}
        total, expected = 0, set()
        for d in order:
            total += d.size
            if total > limit:
                break
            expected.add(d.relpath)
        count.that(came == expected and last <= came, f"sample of {limit} bytes")
        last = came
    count.that(whole.sample(whole.size).documents == whole.documents, "a sample of all is not all")
    with folder() as root:
        line = ("é" * int(rng.integers(4, 20)) + "\n").encode()
        lines, one = line * 30, "é€".encode() * 40
        texts = {"lines.txt": lines, "one.txt": one, "blank.txt": b"\n" + one}
        write_texts(root, texts)
        for (name, text), at in zip(texts.items(), (6, 7, 6)):
            alone = corpus.open_corpus(str(root / name))
            cut = replace(alone.documents[0], sha256=hashlib.sha256(text[at:]).hexdigest(), size=len(text) - at, part=(at, len(text)))
            for begin, of in ((0, alone), (at, alone.subset("x", [cut]))):
                for most in (4, len(line) - 1, len(line), 3 * len(line) + 1, *rng.integers(9, len(text) - 8, 3).tolist()):
                    if most >= len(text) - begin:
                        continue
                    part = text[begin : begin + most]
                    due = part[: part.rfind(b"\n") + 1] or part.decode(errors="ignore").encode()
                    sample = of.sample(most)
                    count.that(list(sample.texts()) == [due] and sample.size == len(due), f"{most} bytes of {name} from {begin}")
    return count.measured()


def stdlib_hash(_: bytes) -> str:
    """Hash of the standard library's corpus (also called in a fresh process)."""
    return corpus.stdlib_corpus().hash


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(stdlib_hash, b"", rng)


def _bad_input(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        write_texts(root, {"empty.py": b"", "notes.md": b"text", "test/t.py": b"x"})
        count.refuses(InputError, lambda: corpus.stdlib_corpus(root), "only an empty file")
        count.refuses(InputError, lambda: corpus.stdlib_corpus(root / "none"), "no folder")
        write_texts(root / "lib", {"a.py": b"1", "pkg/b.py": b"2", "test/t.py": b"3"})
        for closed, good in (("pkg", False), ("test", True)):
            with walked.closed(root / "lib" / closed):
                if good:
                    count.that(len(corpus.stdlib_corpus(root / "lib").documents) == 2, "a folder that the rule leaves out is in the way")
                else:
                    count.says(InputError, lambda: corpus.stdlib_corpus(root / "lib"), "a closed folder", f"{root / 'lib' / closed} (")
        count.refuses(InputError, lambda: corpus.corpus_of_files("x", root, ["gone.py"]), "a file that is not there")
        count.refuses(InputError, lambda: corpus.corpus_of_files("x", root, []), "no files")
        for most in (0, -1):
            count.refuses(InputError, corpus.corpus_of_files("x", root, ["notes.md"]).sample, f"a sample of {most} bytes", most)
        write_texts(root, {"one.txt": "é".encode(), "rows.parquet": b"PAR1", "lines.jsonl.GZ": b"text", "lines.jsonl.zst": b"text"})
        count.refuses(InputError, corpus.corpus_of_files("x", root, ["one.txt"]).sample, "a sample of half a character", 1)
        for name in ("rows.parquet", "lines.jsonl.GZ", "lines.jsonl.zst"):
            count.refuses(InputError, corpus.open_corpus, name, str(root / name))
    return count.measured()


def _changed_files(rng: np.random.Generator) -> Measured:
    """A file that changes, shrinks or goes after the corpus was hashed is noticed when it is read."""
    count = Checks()
    with folder() as root:
        text = any_bytes(rng, 300)
        for changed in (text[:-1], text + b"x", bytes([text[0] ^ int(rng.integers(1, 256))]) + text[1:], b""):
            write_texts(root, {"a.py": text, "b.py": b"b"})
            made = corpus.stdlib_corpus(root)
            (root / "a.py").write_bytes(changed)
            count.refuses(CorruptError, lambda corpus_: list(corpus_.texts()), "changed file", made)
        (root / "a.py").unlink()
        count.refuses(InputError, lambda: list(made.texts()), "file gone")
    return count.measured()


def folder_hash(data: bytes) -> str:
    """Hash of a corpus of files made from `data` (also called in a fresh process)."""
    with folder() as root:
        write_texts(root, {f"{i}/{byte}.txt": bytes([byte]) * (i + 1) for i, byte in enumerate(data)})
        return corpus.open_corpus(str(root)).hash


def _folder_same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(folder_hash, rng.bytes(20), rng)


def _bad_folders(rng: np.random.Generator) -> Measured:
    count = Checks()
    with folder() as root:
        write_texts(root, {"empty.txt": b"", "notes.bin": b"text"})
        for source in (root, root / "none", root / "none" / "*.txt", root / "*.rst", root / "empty.txt"):
            count.refuses(InputError, corpus.open_corpus, str(source.relative_to(root)), str(source))
    return count.measured()


FOLDER_CASES: Cases = {
    "parity": [
        ("folders, files and globs", _folders_and_globs),
        ("a path that exists is no pattern", walked.as_named),
        ("prepared data is no text", walked.prepared_within),
    ],
    "determinism": [("the hash is the same in a fresh process", _folder_same_everywhere)],
    "faults": [
        ("empty and missing input is refused", _bad_folders),
        ("what holds too little is refused", limits.odd_sources),
        ("what cannot be reached is named", walked.unreached),
    ],
}

CASES: Cases = {
    "parity": [
        ("made-up trees as listed by hand", _made_up_as_listed),
        ("the standard library as listed by hand", _stdlib_as_listed),
        ("samples by hash order", _samples),
    ],
    "determinism": [
        ("the hash is the same in a fresh process", _same_everywhere),
        ("the hash tells corpora apart, not folders", _hash_tells_apart),
    ],
    "faults": [("empty and missing input is refused", _bad_input), ("changed files are noticed", _changed_files)],
}
