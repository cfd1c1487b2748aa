"""`alpha data` beyond what its gates ask: zstd and Parquet, the commands, memory, and runs on what was prepared."""

from __future__ import annotations

import datetime
import io
import json
import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from math import log2
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from alpha import cli, config
from alpha.data import inspect, prepare, prepared, sources
from alpha.data.inspect import statistics
from alpha.errors import AlphaError, ConfigError, InputError, MachineError
from alpha.train.assemble import components_of, known_tokenizer, open_data, program_for, sampler_for
from alpha.train.catalogue import catalogue

TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"
TEXTS = [f"{i} is the number {i * i} of a line, é \U0001f600\n" * (1 + i % 5) for i in range(300)] + ["again"] * 4


def order(*names: Path, tokenizer: str = "bytes", unit: int = 3000, **rules: object) -> prepare.Order:
    return prepare.Order(tuple(map(str, names)), sources.Rules(**rules), tokenizer, 0.1, unit=unit)  # type: ignore[arg-type]


def lines(texts: list[str] = TEXTS) -> bytes:
    return b"".join(json.dumps({"text": text, "language": "ab"[len(text) % 2]}).encode() + b"\n" for text in texts)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> prepared.Prepared:
    """TEXTS, from plain lines."""
    root = tmp_path_factory.mktemp("prepared")
    (root / "a.jsonl").write_bytes(lines())
    return prepare.prepare(order(root / "a.jsonl", labels=("language",)), root / "out")


def ids(data: prepared.Prepared) -> list[list[int]]:
    return [stream.windows([0], len(stream))[0].tolist() for stream in data.streams.values()]


def parquet(path: Path, **columns: object) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=70)
    return path


@pytest.mark.parametrize(("action", "option"), [("prepare", "--sample=0"), ("prepare", "--workers=0"), ("inspect", "--samples=-1")])
def test_numbers_that_mean_nothing_are_refused(action: str, option: str, tmp_path: Path, plain: prepared.Prepared,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    """No bytes to learn from were once told as too little text, and no workers as one."""
    given = [str(plain.folder)] if action == "inspect" else [str(plain.folder.parent / "a.jsonl"), "--out", str(tmp_path / "out")]
    assert cli.main(["data", action, *given, option]) == 2
    assert f"{option.split('=')[0]} is a number of at least" in capsys.readouterr().err and not (tmp_path / "out").exists()


# -- sources that need the extra -----------------------------------------------------------------------------------------------


def test_zstd_and_parquet_are_the_same_documents(tmp_path: Path, plain: prepared.Prepared) -> None:
    half = len(lines()) // 2
    frames = b"".join(zstandard.ZstdCompressor().compress(part) for part in (lines()[:half], lines()[half:]))
    (tmp_path / "b.jsonl.zst").write_bytes(frames)
    texts = parquet(tmp_path / "c.parquet", other=range(len(TEXTS)), text=TEXTS)
    raw = parquet(tmp_path / "d.parquet", text=[text.encode() for text in TEXTS])
    for path in (tmp_path / "b.jsonl.zst", texts, raw):
        assert ids(prepare.prepare(order(path), tmp_path / f"{path.name}-out")) == ids(plain), path.name


def refused(path: Path, tmp_path: Path, **rules: object) -> str:
    with pytest.raises(InputError) as caught:
        prepare.prepare(order(path, **rules), tmp_path / "refused")
    return str(caught.value)


@pytest.mark.parametrize("late", [pyarrow.scalar(10_000_000, pyarrow.date32()), pyarrow.scalar(1 << 60, pyarrow.timestamp("us")),
                                  pyarrow.scalar(-(1 << 60), pyarrow.timestamp("us"))], ids=["day", "after", "before"])  # fmt: skip
def test_dates_that_python_has_none_for(tmp_path: Path, late: Any) -> None:
    when = pyarrow.array([late] * len(TEXTS))
    path = parquet(tmp_path / "late.parquet", text=TEXTS, when=when, day=[datetime.date(2026, 1, 2)] * len(TEXTS))
    assert f"{path}, 'when': " in refused(path, tmp_path, labels=("day", "when"), skip_bad=True)
    made = prepare.prepare(order(path, labels=("day", "day")), tmp_path / "out")
    assert made.facts["labels"] == {"day": {"2026-01-02": len(TEXTS)}}


def test_damaged_zstd(tmp_path: Path) -> None:
    whole = zstandard.ZstdCompressor().compress(lines() * 40)
    path = tmp_path / "a.jsonl.zst"
    for raw in (whole[:-5], whole[: len(whole) // 2], b"no zstd", whole + b"no frame", b""):
        path.write_bytes(raw)
        assert "cannot be read" in (said := refused(path, tmp_path, skip_bad=True)) or (not raw and "no text" in said), said


def test_parquet_without_the_column_and_with_rows_of_nothing(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", body=TEXTS, n=range(len(TEXTS)))
    assert "no 'text'" in (said := refused(path, tmp_path)) and "one of body, n" in said and "--field" in said
    assert "row 1:" in (said := refused(path, tmp_path, field="n")) and "no string but int" in said
    path = parquet(tmp_path / "b.parquet", text=[*TEXTS[:100], None, *TEXTS[100:]])
    assert "row 101:" in refused(path, tmp_path)
    made = prepare.prepare(order(path, skip_bad=True), tmp_path / "out")
    assert (made.facts["bad"], sum(stream.documents for stream in made.streams.values())) == (1, len(TEXTS))
    (tmp_path / "c.parquet").write_bytes(b"no parquet")
    assert "cannot be read" in refused(tmp_path / "c.parquet", tmp_path)


@pytest.mark.parametrize(("module", "name"), [("zstandard", "a.jsonl.zst"), ("pyarrow.parquet", "a.parquet")])
def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    (tmp_path / name).write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MachineError, match=r"pip install -e '.\[data\]'"):
        prepare.prepare(order(tmp_path / name), tmp_path / "out")


# -- any damage of a source is one clear error, and memory is bounded ----------------------------------------------------------


def test_damaged_sources_end_with_an_error_of_ours(tmp_path: Path) -> None:
    """Every reader on files with bytes changed, cut, doubled: documents, or an error that Alpha raises."""
    rng = random.Random(1)
    parquet(tmp_path / "a.parquet", text=TEXTS)
    whole = {"a.jsonl": lines(), "a.jsonl.zst": zstandard.ZstdCompressor().compress(lines()), "a.txt": "".join(TEXTS).encode(),
             "a.parquet": (tmp_path / "a.parquet").read_bytes()}
    ended: Counter[str] = Counter()
    for _ in range(100):
        for name, raw in whole.items():
            at = rng.randrange(len(raw))
            damaged = rng.choice([raw[:at], raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :], raw[:at] + raw[at // 2 :]])
            (tmp_path / name).write_bytes(damaged)
            try:
                found = sum(len(text) > 0 for unit in sources.pieces_in_units([tmp_path / name], 5000) for piece in unit
                            for text in sources.documents(piece, sources.Rules(part=100), sources.Tally()))
                ended[f"{name} read"] += bool(found)
            except AlphaError:
                ended[f"{name} refused"] += 1
    assert all(ended[f"{name} refused"] for name in whole if name != "a.txt") and ended["a.txt read"] > 90, ended


def test_a_line_that_never_ends_takes_no_memory(tmp_path: Path) -> None:
    path, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.zst"
    with open(path, "wb") as file:
        file.write(lines(TEXTS[:9]) + b'{"text": "')
        for _ in range(32):
            file.write(b"a" * (1 << 20))
        file.write(b'"}\n' + lines(TEXTS[9:20]))
    packed.write_bytes(zstandard.ZstdCompressor().compress(path.read_bytes()))  # 32 MiB in some KiB
    for one in (path, packed):
        tally, found = sources.Tally(), 0
        tracemalloc.start()
        for piece in sources.pieces_of(one):
            found += sum(1 for _ in sources.documents(piece, sources.Rules(longest=1 << 18, skip_bad=True), tally))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (found, tally.bad) == (20, 1) and most < 40 << 20 and (one == packed or most < 4 << 20), (one, found, most)


def test_a_line_over_many_pieces_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece that lies within it looks for the next line no further than its own end."""
    path, bytes_read = tmp_path / "a.jsonl", [0]
    path.write_bytes(lines(TEXTS[:9]) + b'{"text": "' + b"a" * (4 << 20) + b'"}\n' + lines(TEXTS[9:20]))

    class Told(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            found = super().readinto(buffer)
            bytes_read[0] += found or 0
            return found

    monkeypatch.setattr(sources, "open_regular", lambda path: io.BufferedReader(Told(path)))
    tally = sources.Tally()
    pieces = sources.pieces_of(path, 1 << 16)
    found = sum(1 for piece in pieces for _ in sources.documents(piece, sources.Rules(longest=1 << 14, skip_bad=True), tally))
    assert (len(pieces) > 64, found, tally.bad) == (True, 20, 1)
    assert bytes_read[0] < 3 * path.stat().st_size, f"{bytes_read[0]:,} bytes read of a file of {path.stat().st_size:,}"


@pytest.mark.parametrize("packing", ["none", "zstd"])
def test_a_row_group_is_read_in_parts(tmp_path: Path, packing: str) -> None:
    """Memory follows the rows at once, not the row group: 32 MiB of text in one."""
    rng = random.Random(2)
    texts = [rng.randbytes(16 << 10).hex() for _ in range(1 << 10)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", use_dictionary=False, compression=packing,
                                data_page_size=1 << 18, write_batch_size=8)  # fmt: skip
    before, most, found = pyarrow.total_allocated_bytes(), 0, 0
    for piece in sources.pieces_of(tmp_path / "a.parquet"):
        for text in sources.documents(piece, sources.Rules(), sources.Tally()):
            assert text.decode() == texts[found]
            found, most = found + 1, max(most, pyarrow.total_allocated_bytes() - before)
    assert found == len(texts) and most < 12 << 20, f"{most:,} bytes"


def test_rows_at_once_are_fewer_where_they_are_long() -> None:
    def file(rows: int) -> Any:
        return SimpleNamespace(metadata=SimpleNamespace(row_group=lambda i: SimpleNamespace(num_rows=rows)))

    def piece(size: int) -> sources.Piece:
        return sources.Piece("a", "parquet", "", 0, 1, size)

    found = [sources._rows_at_once(file(rows), piece(size))
             for rows, size in ((1000, 1000), (16, 16 << 20), (4, 16 << 20), (4, 64 << 20), (1, 1 << 40), (0, 0), (-5, 9), (9, 0))]
    assert found == [64, 16, 4, 1, 1, 1, 1, 64]


def test_a_row_longer_than_a_line_may_be(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=[*TEXTS[:9], "é" * 3000, *TEXTS[9:]])
    assert "row 10:" in (said := refused(path, tmp_path, longest=5999)) and "longer than 5999 bytes" in said
    made = prepare.prepare(order(path, longest=5999, skip_bad=True), tmp_path / "out")
    assert (made.facts["bad"], sum(stream.documents for stream in made.streams.values())) == (1, len(TEXTS))
    assert prepare.prepare(order(path, longest=6000), tmp_path / "all").facts["bad"] == 0


def test_sizes_that_a_parquet_file_states_may_be_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by fuzzing: the first row group of -5 bytes, or of 0, belonged to no unit."""
    groups = [SimpleNamespace(total_byte_size=size) for size in (-5, 0, 9, -(2**62), 9)]
    monkeypatch.setattr(sources, "_parquet", lambda path: SimpleNamespace(
        metadata=SimpleNamespace(num_row_groups=len(groups), row_group=groups.__getitem__)))
    (tmp_path / "a.parquet").touch()
    units = sources.pieces_in_units([tmp_path / "a.parquet"], 10)
    assert [[piece.begin for piece in unit] for unit in units] == [[0, 1, 2, 3], [4]]


# -- the commands --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def alpha(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*args: object) -> tuple[int, str, str]:
        code = cli.main(["data", *map(str, args)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_prepare_inspect_verify(tmp_path: Path, alpha: Callable[..., tuple[int, str, str]]) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines() + b"no line\n")
    arguments = ("prepare", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--workers", 1, "--tokenizer", "bpe:300")
    code, _, err = alpha(*arguments)
    assert code == 2 and f"{tmp_path / 'a.jsonl'}, line 305:" in err and "--skip-bad" in err
    code, out, _ = alpha(*arguments, "--skip-bad", "--licence", "CC0-1.0", "--label", "language")
    assert code == 0 and "1 bad" in out and "CC0-1.0" in out and "304 documents" in out
    code, out, _ = alpha("inspect", tmp_path / "out", "--samples", 2)
    assert code == 0 and "language: " in out and "-- sample 1\n" in out and "is the number" in out
    code, out, _ = alpha("inspect", tmp_path / "out", "--json")
    assert code == 0 and json.loads(out)["statistics"]["train"]["vocabulary"] == 300
    assert alpha("verify", tmp_path / "out")[0] == 0
    shard = next((tmp_path / "out" / "train").glob("*.tokens"))
    raw = shard.read_bytes()
    shard.write_bytes(raw[:600] + bytes([raw[600] ^ 4]) + raw[601:])
    code, _, err = alpha("verify", tmp_path / "out")
    assert code == 2 and shard.name in err and "block 0 of" in err
    assert alpha("verify", tmp_path / "nowhere")[0] == 2 and alpha("prepare", tmp_path / "none", "--out", tmp_path / "x")[0] == 2


def test_what_is_told_of_texts_moves_no_cursor(tmp_path: Path, alpha: Callable[..., tuple[int, str, str]]) -> None:
    texts = [json.dumps({"text": text, "by": f"\x1b[31m{i % 2}\nwhole: \u202e"}) for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(texts))
    options = ("--workers", 1, "--label", "by", "--licence", "C\x1b[0")
    code, out, _ = alpha("prepare", tmp_path / "a.jsonl", "--out", tmp_path / "out", *options)
    assert code == 0 and "C\\x1b[0" in out and "\x1b" not in out
    code, out, _ = alpha("inspect", tmp_path / "out", "--samples", 0)
    assert code == 0 and "by: \\x1b[31m0\\nwhole: \\u202e 152, " in out and not {"\x1b", "\u202e"} & {*out}


def test_statistics_are_those_of_a_count_by_hand(plain: prepared.Prepared) -> None:
    for side, found in statistics(plain).items():
        stream = plain.streams[side]
        texts = list(prepared.PreparedText((stream,), plain.tokenizer).texts())
        counts = Counter(token for text in texts for token in [*text, 256])
        total = sum(counts.values())
        assert found.entropy == pytest.approx(-sum(n / total * log2(n / total) for n in counts.values()))
        assert (found.used, found.documents, found.tokens) == (len(counts), len(texts), total)
        assert found.duplicates == len(texts) - len(set(texts))
        assert found.lengths[0] == min(map(len, texts)) and found.lengths[-1] == max(map(len, texts))
        assert found.lengths[2] == pytest.approx(sum(map(len, texts)) / len(texts))
    assert sum(plain.facts["labels"]["language"].values()) == len(TEXTS)


def test_statistics_by_a_few_documents_at_a_time(plain: prepared.Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    due = statistics(plain)
    for at_once in (1, 2, 5):
        monkeypatch.setattr(inspect, "_AT_ONCE", at_once)
        assert statistics(plain) == due


# -- runs on prepared data -----------------------------------------------------------------------------------------------------


def run_file(folder: Path | str, *more: str) -> config.Config:
    return config.load(TINY, [f"data.corpus={folder}", *more])


def test_a_run_takes_shards_and_tokenizer_as_they_are(plain: prepared.Prepared) -> None:
    cfg = run_file(plain.folder)
    data = open_data(cfg)
    assert data.tokenizer.hash == plain.tokenizer.hash and data.train.hash == plain.streams["train"].hash
    assert data.split.train.size + data.split.validation.size == data.corpus.size == sum(len(text.encode()) for text in TEXTS)
    assert len(data.corpus.documents) == len(TEXTS) and len({data.corpus.hash, data.split.train.hash, data.split.validation.hash}) == 3
    assert b"".join(data.corpus.texts()).count(b"again") == 4
    sampler_for(cfg, data).batch(0)
    used = components_of(cfg, program_for(cfg, 257, catalogue(), 1))
    assert {"corpus.prepared", "tokenizer.bytes", "shards.v2"} <= {*used} and not {"corpus.folder", "split.by_file"} & {*used}
    known = known_tokenizer(cfg)
    assert known is not None and known.vocab_size == 257 and known_tokenizer(config.load(TINY)) is None


def test_another_vocabulary_and_mixtures_that_do_not_fit(tmp_path: Path, plain: prepared.Prepared) -> None:
    with pytest.raises(ConfigError, match="another vocabulary than the prepared data"):
        open_data(run_file(plain.folder, "data.tokenizer=bpe", "data.vocab=1024"))
    (tmp_path / "more.jsonl").write_bytes(lines([text * 2 for text in TEXTS]))
    fits = prepare.prepare(order(tmp_path / "more.jsonl", tokenizer=str(plain.folder / "tokenizer.json")), tmp_path / "fits")
    data = open_data(config.load(TINY, [f"data.mixture='{plain.folder}:1, {fits.folder}:1'"]))
    assert data.tokenizer.vocab_size == 257 and len(data.corpus.documents) == 2 * len(TEXTS)
    other = prepare.prepare(order(tmp_path / "more.jsonl", tokenizer="bpe:300"), tmp_path / "other")
    for names, what in (((plain.folder, other.folder), "do not go together"), ((plain.folder, "stdlib"), "prepared and other sources")):
        with pytest.raises(InputError, match=what):
            open_data(config.load(TINY, [f"data.mixture='{names[0]}:1, {names[1]}:1'"]))
