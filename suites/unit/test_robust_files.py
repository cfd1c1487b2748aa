"""Files that somebody damaged, replaced or made unreadable: each reader ends with an AlphaError or the truth, never a traceback."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import make
from nobody import as_nobody

from alpha import cli
from alpha.checkpoint import folders
from alpha.cli import reading as cli_reading
from alpha.cuda_runtime import manifest
from alpha.data import shards
from alpha.data.corpus import Corpus, Document, open_corpus
from alpha.data.hashed import file_bytes
from alpha.data.tokenizer import MAX_WORD, BPETokenizer, ByteTokenizer
from alpha.data.tokenizer_file import load_tokenizer
from alpha.errors import AlphaError, CorruptError, InputError
from alpha.gates.contracts.made_state import reseal, saved_before
from alpha.gates.device_code import baseline as kernels_baseline
from alpha.graph.state import StateLayout, TensorSpec
from alpha.profile import trace
from alpha.profile.store import connect
from alpha.registry import catches, evidence
from alpha.registry.evidence import shipped_root
from alpha.registry.record import canonical, content_hash, parse
from alpha.report import html, markdown, views
from alpha.report import runs as reading
from alpha.report.document import Document as Page
from alpha.report.document import Section, Text
from alpha.train import rundir

BASELINES = shipped_root().parent


def flips(raw: bytes, number: int, seed: int = 0) -> list[bytes]:
    """Copies with one byte changed, cut short, doubled, or empty."""
    rng = random.Random(seed)
    out = [raw[: len(raw) // 2], raw + raw, b"", b"\xff" + raw]
    for _ in range(number):
        at = rng.randrange(len(raw))
        out.append(raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :])
    return out


def survives(read: Callable[[], object], damage: Callable[[bytes], object], raw: bytes, number: int = 40) -> int:
    """How many of the damaged copies were refused; anything but an AlphaError fails."""
    refused = 0
    for copy in flips(raw, number):
        damage(copy)
        try:
            read()
        except AlphaError as error:
            refused += 1
            assert error.exit_code in (1, 2, 3) and len(str(error)) < 4000
    return refused


# -- baselines -----------------------------------------------------------------------------------------------------------------


def test_one_bad_byte_in_catches_and_evidence(tmp_path: Path) -> None:
    machine = evidence.classes(shipped_root())[0]
    (tmp_path / machine).mkdir()
    path = tmp_path / machine / catches.NAME
    lines = (shipped_root() / machine / catches.NAME).read_bytes().splitlines(keepends=True)[:5]
    refused = survives(lambda: catches.load_catches(tmp_path, machine), path.write_bytes, b"".join(lines))
    assert refused >= 42  # all but the empty file, and the odd one that is no change
    source = next(p for p in sorted((shipped_root() / machine).iterdir()) if p.name != catches.NAME)
    copy = tmp_path / machine / source.name
    assert survives(lambda: evidence.load_file(copy), copy.write_bytes, source.read_bytes()) >= 42
    copy.unlink()
    os.mkfifo(copy)
    assert evidence.load_file(copy) == {}  # no file: no evidence


def test_one_bad_byte_in_reference(tmp_path: Path) -> None:
    path = tmp_path / evidence.REFERENCE
    raw = (shipped_root() / evidence.REFERENCE).read_bytes()
    survives(lambda: evidence.reference_classes(tmp_path), path.write_bytes, raw)
    path.write_bytes(raw[:3] + b"\xe9" + raw[3:])
    with pytest.raises(CorruptError, match="REFERENCE holds bytes that are not text"):
        evidence.reference_classes(tmp_path)


def test_one_bad_byte_in_the_manifests_of_kernels(tmp_path: Path) -> None:
    for name, load in (("cubins.json", manifest.load), ("kernels.json", kernels_baseline.load)):
        raw = (BASELINES / name).read_bytes()
        copy = tmp_path / name
        survives(lambda load=load, copy=copy: load(copy), copy.write_bytes, raw, 12)  # type: ignore[misc]
        copy.write_bytes(b"[" * 100_000)
        with pytest.raises(CorruptError):
            load(copy)


@pytest.mark.parametrize("change", [
    {"cases": 5}, {"cases": [1]}, {"declared": "3"}, {"digests": {"a": 1}}, {"digests": []}, {"nonce": None}, {"environment": {"x": {}}},
    {"probes": [1]}, {"format": True}, {"machine": 3}, {"more": 1},
], ids=str)  # fmt: skip
def test_a_forged_record_of_other_types_is_refused(change: dict[str, Any]) -> None:
    """Its hash is right; its fields are not."""
    machine = evidence.classes(shipped_root())[0]
    source = next(p for p in sorted((shipped_root() / machine).iterdir()) if p.name != catches.NAME)
    body = {**json.loads(source.read_text().splitlines()[0]), **change}
    body["content"] = content_hash(body)
    with pytest.raises(CorruptError):
        parse(canonical(body), "here")


# -- tokenizers, shards, corpora -----------------------------------------------------------------------------------------------


def test_a_tokenizer_of_doubling_merges(tmp_path: Path) -> None:
    """Planted: without the bound token 8000 stands for 2^8000 bytes."""
    doubling = [(97, 97), *((257 + i, 257 + i) for i in range(8000))]
    with pytest.raises(InputError, match=f"at most {MAX_WORD}"):
        BPETokenizer(doubling)
    good = BPETokenizer(doubling[:7])
    assert max(map(len, good.tokens)) == MAX_WORD
    form = {**good.form(), "merges": [list(m) for m in doubling]}
    (tmp_path / "t.json").write_bytes(file_bytes("alpha.tokenizer", 1, {"form": form, "record": {}}))
    with pytest.raises(InputError, match="longer than any word"):
        load_tokenizer(tmp_path / "t.json")


@pytest.mark.parametrize("form", [
    None, [], {}, {"kind": "bpe"}, {"kind": []}, {"kind": "bpe", "merges": 3, "pattern": "code-v1"},
    {"kind": "bpe", "merges": [[1]], "pattern": "code-v1"}, {"kind": "bpe", "merges": [[1, "x"]], "pattern": "code-v1"},
    {"kind": "bpe", "merges": [], "pattern": []}, {"kind": "bpe", "merges": [[10**30, 1]], "pattern": "code-v1"},
], ids=str)  # fmt: skip
def test_tokenizer_files_of_other_types(tmp_path: Path, form: object) -> None:
    (tmp_path / "t.json").write_bytes(file_bytes("alpha.tokenizer", 1, {"form": form, "record": {}}))
    with pytest.raises(InputError):
        load_tokenizer(tmp_path / "t.json")


def test_damaged_tokenizer_and_shard_files(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    BPETokenizer([(97, 98), (257, 99)]).save(path)
    assert survives(lambda: load_tokenizer(path), path.write_bytes, path.read_bytes()) == 44
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(CorruptError):
        load_tokenizer(path)
    shard = tmp_path / "00000.tokens"
    facts = {"tokenizer": "t", "vocab_size": 257, "text_bytes": 9}
    shards.write_shard(shard, np.arange(10, dtype=np.uint16), np.array([0, 4, 10]), facts)
    raw = shard.read_bytes()
    assert survives(lambda: shards.open_shard(shard), shard.write_bytes, raw, 120) == 124
    for change in ({"tokens": -1}, {"tokens": 1 << 60}, {"table": "x"}, {"text_bytes": None}, {"documents": 0}, {"vocab_size": [1]}):
        shards.write_shard(shard, np.arange(10, dtype=np.uint16), np.array([0, 4, 10]), facts)
        text = json.dumps({**shards.open_shard(shard).header, **change}, sort_keys=True).encode()
        head = shards._PREFIX.pack(shards.MAGIC, len(text), hashlib.sha256(text).digest()) + text
        shard.write_bytes(head.ljust(-(-len(head) // 64) * 64, b"\0") + raw[-112:])
        with pytest.raises(CorruptError):
            shards.open_shard(shard)


def test_special_files_in_place_of_data(tmp_path: Path) -> None:
    fifo, zero = tmp_path / "00000.tokens", tmp_path / "zero"
    os.mkfifo(fifo)
    zero.symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    for path in (fifo, zero, tmp_path / "loop", tmp_path):
        with pytest.raises(InputError):
            shards.open_shard(path)
        with pytest.raises(InputError):
            load_tokenizer(path)
        with pytest.raises(AlphaError):
            connect(path)
    with pytest.raises(InputError):
        Corpus("x", tmp_path, (Document("00000.tokens", "0", 1),)).read(Document("00000.tokens", "0", 1))
    for source in (str(fifo), str(zero), str(tmp_path / "a**b"), str(tmp_path / "loop" / "*.txt"), str(tmp_path / "*")):
        with pytest.raises(InputError):
            open_corpus(source)


# -- checkpoints ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, tuple[StateLayout, np.ndarray]]]:
    layout = StateLayout([TensorSpec("w", (3, 5), "unit")])
    states = {"param": (layout, np.arange(layout.size, dtype=np.float32))}
    return folders.save(tmp_path / "checkpoints", 4, states, {"a": 1}), states


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and give it the hash that it then has."""
    content = json.loads((path / folders.MANIFEST).read_text())
    change(content)
    reseal(path, content)


def test_a_fifo_as_a_checkpoint_file(saved: tuple[Path, Any]) -> None:
    """Planted: `open` in place of `open_regular` waits for ever."""
    path, states = saved
    for name in ("rank-00000-of-00001.state", "rank-00000-of-00001.json", folders.MANIFEST):
        kept = (path / name).read_bytes()
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(CorruptError, match="FIFO"):
            folders.load(path, states)
        (path / name).unlink()
        (path / name).symlink_to("/dev/zero")
        with pytest.raises(CorruptError):
            folders.load(path, states)
        (path / name).unlink()
        (path / name).write_bytes(kept)
    assert folders.load(path, states).step == 4


@pytest.mark.parametrize("file", ["../outside.npy", "/etc/passwd", "a/../../outside.npy", "..", "", ".hidden.npy", "param", None, 3, ["x"]])
def test_an_older_manifest_whose_file_leaves_the_folder(saved: tuple[Path, Any], tmp_path: Path, file: object) -> None:
    path = saved_before(tmp_path / "older", 4, saved[1], 2, {})
    shutil.copy(path / "param.npy", path.parent / "outside.npy")
    edited(path, lambda content: content["kinds"]["param"].update(file=file))
    with pytest.raises(CorruptError, match="not one that a save writes"):
        folders.load(path, saved[1])


@pytest.mark.parametrize("change", [
    lambda c: c.update(step="4"), lambda c: c.update(step=-1), lambda c: c.update(kinds=[]), lambda c: c.pop("facts"),
    lambda c: c["kinds"]["param"].update(dtype="O"), lambda c: c["kinds"]["param"].update(dtype=["<f4"]), lambda c: c["kinds"].update(m=3),
    lambda c: c["kinds"]["param"].update(tensors=[["w"]]), lambda c: c["kinds"]["param"].update(tensors=[["w", [-1], "u"]]),
    lambda c: c["kinds"]["param"].update(tensors=[["w", [3, 1 << 70], "u"]]), lambda c: c.pop("indexes"), lambda c: c.update(indexes=[3]),
    lambda c: c.update(indexes={}), lambda c: c.update(indexes=["../" * 3]), lambda c: c.update(version="3"),
])  # fmt: skip
def test_a_checkpoint_manifest_of_other_types(saved: tuple[Path, Any], change: Callable[[dict[str, Any]], None]) -> None:
    path, states = saved
    edited(path, change)
    with pytest.raises(InputError):
        folders.load(path, states)


@pytest.mark.parametrize("change", [
    lambda c: c["kinds"]["param"].update(dtype="O"), lambda c: c["kinds"]["param"].update(size="x"),
    lambda c: c["kinds"]["param"].update(tensors=[["w", [3, 5], "u", 1.5]]), lambda c: c["kinds"]["param"].update(size=1 << 70),
    lambda c: c["kinds"]["param"].update(tensors=[["w", [3, 5], "unit", 1 << 70]]),
])  # fmt: skip
def test_an_older_manifest_of_other_types(saved: tuple[Path, Any], tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = saved_before(tmp_path / "older", 4, saved[1], 2, {})
    edited(path, change)
    with pytest.raises(InputError):
        folders.load(path, saved[1])


def test_damaged_checkpoint_files(saved: tuple[Path, Any]) -> None:
    path, states = saved
    for name in ("rank-00000-of-00001.state", "rank-00000-of-00001.json", folders.MANIFEST):
        raw = (path / name).read_bytes()
        assert survives(lambda: folders.load(path, states), (path / name).write_bytes, raw, 60) == 64, name
        (path / name).write_bytes(raw)


# -- run directories -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made run with a timeline."""
    return make(tmp_path_factory.mktemp("made") / "run", steps=40)


def test_damaged_run_directories(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    for name, number in (("config.toml", 60), ("manifest.json", 60), ("metrics.sqlite", 40)):
        raw = (run / name).read_bytes()
        survives(lambda: reading.load(run, thorough=True), (run / name).write_bytes, raw, number)
        if name == "metrics.sqlite":
            survives(lambda: trace.write(run / "metrics.sqlite", tmp_path / "t.json"), (run / name).write_bytes, raw, 20)
        (run / name).write_bytes(raw)
    for text in ("[]", "3", '{"sessions": 3}', '{"sessions": [1]}', '{"flops": []}', '{"sessions": [{"source": 1}]}', "[" * 10_000, "NaN",
                 '{"targets": [1]}', '{"targets": {"mfu": "x"}}'):
        (run / "manifest.json").write_text(text)
        try:
            views.figures(reading.load(run))
            assert "targets" not in text
        except AlphaError as error:
            assert error.exit_code == 2
    for name in ("manifest.json", "metrics.sqlite", "config.toml"):
        kept = (run / name).read_bytes()
        (run / name).unlink()
        os.mkfifo(run / name)
        with pytest.raises(AlphaError):
            reading.load(run)
            rundir.read_manifest(run)
        (run / name).unlink()
        (run / name).write_bytes(kept)


@pytest.mark.parametrize("left", ["nothing", "wal"])
def test_a_read_only_run_folder(made: Path, tmp_path: Path, left: str) -> None:
    """Metrics are in WAL mode: a reader wants a file beside them, which cannot be made. Planted: without `_readable` both fail."""
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(made, run)
    out.mkdir()
    if left == "wal":
        import sqlite3

        db = sqlite3.connect(run / "metrics.sqlite")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("INSERT OR REPLACE INTO run_metadata VALUES ('kept', 'in the log')")
        db.commit()
        for name in ("metrics.sqlite", "metrics.sqlite-wal"):
            shutil.copy(run / name, tmp_path / f"copy-{name}")
        db.close()
        for name in ("metrics.sqlite", "metrics.sqlite-wal"):
            shutil.move(tmp_path / f"copy-{name}", run / name)
    else:
        import sqlite3

        db = sqlite3.connect(run / "metrics.sqlite")
        db.execute("PRAGMA journal_mode=WAL")
        db.close()
    for path in (tmp_path, *tmp_path.parents[:-2]):  # pytest makes them for its user alone
        path.chmod(0o755)
    out.chmod(0o777)
    for path in run.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    run.chmod(0o555)
    try:
        assert as_nobody(lambda: len(reading.load(run).tables["step_timing"]) and 0)[0] == 0
        assert as_nobody(lambda: cli.main(["trace", str(run), "--out", str(out / "t.json")]))[0] == 0 and (out / "t.json").stat().st_size
        assert as_nobody(lambda: cli.main(["trace", str(run)]))[0] == 3  # says: --out FILE
        if left == "wal":
            assert as_nobody(lambda: 0 if reading.load(run).metadata.get("kept") == "in the log" else 5)[0] == 0
    finally:
        run.chmod(0o755)


# -- pages ---------------------------------------------------------------------------------------------------------------------


def test_pages_escape_what_runs_are_called() -> None:
    """Folders may be called anything, whatever a run file may say."""
    evil = "<script>alert(1)</script> [x](javascript:1) | `a` *b* _c_ # ~~d~~ &lt; \x1b[2J\u202e ![i](http://x)"
    page = Page(title=evil, intro=[evil], sections=[Section(evil, [Text(evil), Text("# no heading"), Text("1. no list")])], marks=[evil])
    text = markdown.render(page)
    for line in text.splitlines():
        assert "\x1b" not in line and "\u202e" not in line
        for sign in "<`*_[|&~":
            at = line.find(sign)
            while at >= 0:
                assert line[at - 1] == "\\" or line.startswith(("<sub>", "**")), (sign, line)
                at = line.find(sign, at + 1)
    shown = html.render(page)
    assert "<script" not in shown and "\x1b" not in shown and "\u202e" not in shown


def test_prompts_of_any_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted: `args.prompt.encode()` raises for bytes that are no UTF-8."""
    seen: list[bytes] = []

    def generate(executor: object, tokenizer: object, prompt: bytes, **_: object) -> list[bytes]:
        seen.append(prompt)
        return [b"!"]

    monkeypatch.setattr(cli_reading, "open_run", lambda *_: (nullcontext(), ByteTokenizer(), 3))
    monkeypatch.setattr(cli_reading, "generate", generate)
    monkeypatch.setattr(cli_reading, "why_ungated", lambda _: "")
    for raw in (b"\xff\xfe", b"caf\xe9", b"\x1b[2J", "é".encode(), b""):
        assert cli.main(["sample", "run", "--prompt", os.fsdecode(raw)]) == 0
        assert seen.pop() == raw and "\x1b" not in capsys.readouterr().out
