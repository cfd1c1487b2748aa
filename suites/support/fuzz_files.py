"""Every reader of a file, on files that are broken: each is read or refused by an error of Alpha's.

    python suites/support/fuzz_files.py [--lane I/N] [TIMES [SEED [READER ...]]]

A mutant has bytes changed, put in, taken out or doubled; or, where the file is JSON, a value put in place of another one, half of the time
with the hashes made anew, so that what lies behind them is reached. Any other exception, a warning, a crash, CPU_S seconds of CPU time or
MEMORY bytes beyond what the process held is a finding. It is told with its number: seed and number make the mutant again.
Default: 1,000,000 times, another seed each time. `--lane I/N`: the I-th of N parts of that run, for as many processes: counts add up.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import made_runs
import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

from alpha import config
from alpha.checkpoint import folders, npy, ranges, safetensors
from alpha.checkpoint import hf as hub
from alpha.data import hashed, prepare, prepared, regular, shards, sources
from alpha.data.tokenizer import BPETokenizer
from alpha.data.tokenizer_file import load_tokenizer
from alpha.data.tokenizer_hf import _letters, read_hugging_face
from alpha.errors import AlphaError
from alpha.gates.contracts import hf as contract
from alpha.gates.contracts.made_state import layouts, saved_by, state
from alpha.graph.state import StateLayout, TensorSpec
from alpha.report import runs
from alpha.train import rundir

CPU_S = 30
MEMORY = 256 << 20
"""Of private memory."""
CHUNK = 2000
"""Mutants of one process."""
STRANGE = (None, True, 0, 3, -1, 1.5, 1e308, 2**63, 10**30, "", "x", "\ud800", "\0", "../x", "é" * 300, [], {}, [[]], {"a": []}, [0] * 50)


@dataclass(frozen=True)
class Reader:
    """`file`: what is broken; `whole`: its sound bytes; `read`: reads it as its users do. `parse`, `form`: of JSON, to its content and back
    with its hashes. `share`: of the mutants, against the others."""

    name: str
    file: Path
    whole: bytes
    read: Callable[[], object]
    parse: Callable[[bytes], Any] | None = None
    form: Callable[[Any], bytes] | None = None
    share: int = 20


@dataclass
class Found:
    """What became of the mutants: reader -> number, and what was wrong."""

    read: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


# -- mutants -------------------------------------------------------------------------------------------------------------------


def mutated(draw: random.Random, whole: bytes) -> bytes:
    """One to four changes of bytes, half of them near each other."""
    data = bytearray(whole)
    for _ in range(draw.randrange(1, 5)):
        i = draw.randrange(len(data) + 1)
        j = min(len(data), i + (draw.randrange(1, 20) if draw.random() < 0.5 else draw.randrange(1, len(whole) + 2)))
        match draw.randrange(7):
            case 0:
                data[i : i + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[i:j]
            case 2:
                data[i:i] = data[i:j]
            case 3:
                data[i : i + 1] = bytes([draw.choice(b'0123456789-.eE{}[],:"\\\n\0')])
            case 4:
                data[i : i + 8] = draw.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(8, "little")
            case 5:
                data[i:i] = draw.choice((b"9" * draw.randrange(1, 500), b"[" * draw.randrange(1, 500), b"\xff\xfe", b"\xef\xbb\xbf"))
            case _:
                del data[i:]
    return bytes(data)


def changed(draw: random.Random, content: Any) -> Any:
    """One value of a JSON content replaced, removed, or put beside itself. It is changed in place."""
    way = [content]
    while isinstance(way[-1], (dict, list)) and way[-1] and (len(way) < 2 or draw.random() < 0.75):
        inner = way[-1]
        key = draw.choice(list(inner)) if isinstance(inner, dict) else draw.randrange(len(inner))
        way.append(inner[key])
        holder, at = inner, key
    if len(way) == 1:
        return copy.deepcopy(draw.choice(STRANGE))
    match draw.randrange(4):
        case 0:
            del holder[at]
        case 1 if isinstance(holder, list):
            holder.insert(at, copy.deepcopy(holder[draw.randrange(len(holder))]))
        case 2 if isinstance(way[-1], int):
            holder[at] = way[-1] + draw.choice((-1, 1, 2**31, 2**40, -(2**40)))
        case _:
            holder[at] = copy.deepcopy(draw.choice(STRANGE))
    return content


def mutant(draw: random.Random, reader: Reader) -> bytes:
    """A broken file."""
    if reader.parse is None or reader.form is None or draw.random() < 0.4:
        return mutated(draw, reader.whole)
    content = reader.parse(reader.whole)
    for _ in range(draw.randrange(1, 4)):
        content = changed(draw, content)
    try:
        return reader.form(content)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):  # no file can say that
        return mutated(draw, reader.whole)


# -- readers -------------------------------------------------------------------------------------------------------------------


def put(file: Path, data: bytes) -> None:
    """Write over what lies there. A file that is emptied first is sent to the disk when it is closed (ext4), a million times."""
    with open(file, "r+b") as target:
        target.write(data)
        target.truncate()


def _json(content: Any) -> bytes:
    return json.dumps(content).encode()


def _sealed(form: str, version: int) -> tuple[Callable[[bytes], Any], Callable[[Any], bytes]]:
    def parse(raw: bytes) -> Any:
        return {k: v for k, v in json.loads(raw).items() if k not in ("sha256", "format", "version")}

    return parse, lambda content: hashed.file_bytes(form, version, content)


def _framed(raw: bytes) -> Any:
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def _shard(raw: bytes) -> Callable[[Any], bytes]:
    begin = shards._padded(shards._PREFIX.size + int.from_bytes(raw[8:16], "little"), 64)

    def form(content: Any) -> bytes:
        text = json.dumps(content, sort_keys=True).encode()
        head = shards._PREFIX.pack(shards.MAGIC, len(text), hashlib.sha256(text).digest()) + text
        return head.ljust(shards._padded(len(head), 64), b"\0") + raw[begin:]

    return form


def _manifest(content: Any) -> bytes:
    content.pop("sha256", None)
    return _json({**content, "sha256": folders._digest(content)})


def _documents(path: Path) -> int:
    found = 0
    for unit in sources.pieces_in_units(sources.files_of(str(path)), 5000):
        for piece in unit:
            found += sum(len(text) for text in sources.documents(piece, sources.Rules(part=100, labels=("n",)), sources.Tally()))
    return found


def readers(root: Path) -> list[Reader]:
    """All of them, with their sound files below `root`."""
    made: list[Reader] = []
    for name in ("_class", "complement", "union"):  # functions of sets of characters alone, most of the time of a tokenizer.json
        kept = lru_cache(1024)(getattr(regular, name))
        setattr(regular, name, lambda ranges, kept=kept: kept(tuple(ranges)))
    laid_out, text_of = lru_cache(1024)(folders.StateLayout), lru_cache(1)(runs.read_toml)
    for module, name, of in ((folders, "StateLayout", lambda tensors, dtype: laid_out(tuple(tensors), dtype)),  # half of checkpoints
                             (runs, "read_toml", text_of)):  # of a file that is whole: half of the time of metrics.sqlite  # fmt: skip
        setattr(module, name, of)

    def add(name: str, file: Path, read: Callable[[], object], parse: Any = None, form: Any = None, share: int = 20) -> None:
        made.append(Reader(name, file, file.read_bytes(), read, parse, form, share))

    def written(name: str, data: bytes) -> Path:
        (root / name).write_bytes(data)
        return root / name

    texts = [f"{i} is the number {i * i} of a line, é \U0001f600\n" * (1 + i % 3) for i in range(12)]
    lines = b"".join(_json({"text": text, "n": i % 2}) + b"\n" for i, text in enumerate(texts))
    run_file = written("run.toml", (made_runs.CONFIG).read_bytes())
    add("run file", run_file, lambda: config.load(run_file))
    for path, data in (("a.txt", "".join(texts).encode()), ("a.jsonl", lines), ("b.jsonl.gz", gzip.compress(lines, mtime=0)),
                       ("c.jsonl.zst", zstandard.ZstdCompressor().compress(lines))):  # fmt: skip
        source = written(path, data)
        add(f"source {source.suffix}", source, lambda source=source: _documents(source))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": list(range(len(texts)))}), root / "d.parquet", row_group_size=5)
    add("source .parquet", root / "d.parquet", lambda: _documents(root / "d.parquet"))

    BPETokenizer([(97, 98), (257, 99)]).save(root / "ours.json")
    add("tokenizer of ours", root / "ours.json", lambda: load_tokenizer(root / "ours.json").encode(b"abc \xff"),
        *_sealed("alpha.tokenizer", 1))
    alphabet = sorted(_letters())
    theirs = {"version": "1.0", "normalizer": {"type": "NFC"}, "decoder": {"type": "ByteLevel"},
              "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                  {"type": "Split", "pattern": {"Regex": r"(?i:'s|'t)|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"},
                   "behavior": "Isolated", "invert": False},
                  {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
              "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                        "vocab": {token: i for i, token in enumerate([*alphabet, "an", "any"])}, "merges": [["a", "n"], ["an", "y"]]},
              "added_tokens": [{"id": len(alphabet) + 2, "content": "<|endoftext|>", "single_word": False, "lstrip": False,
                                "rstrip": False, "normalized": False, "special": True}]}  # fmt: skip
    hugging = written("tokenizer.json", _json(theirs))
    add("tokenizer.json of Hugging Face", hugging, lambda: read_hugging_face(hugging).encode("any té 12 <|endoftext|>".encode()),
        json.loads, _json)

    data = prepare.prepare(prepare.Order((str(root / "a.jsonl"),), tokenizer="bytes", validation=0.3), root / "data").folder

    def opened() -> object:
        one = prepared.open_prepared(data, verify=True)
        return [stream.windows([0], len(stream)) for stream in one.streams.values()]

    add("prepared.json", data / prepared.MANIFEST, opened, *_sealed(prepared.FORMAT, prepared.VERSION))
    stream = data / "train" / shards.LISTING
    add("stream.json", stream, lambda: shards.open_stream(data / "train"), *_sealed(shards.FORMAT, shards.VERSION))
    (shard,) = (data / "train").glob("*.tokens")
    whole = shard.read_bytes()
    add("shard", shard, lambda: shards.open_shard(shard),
        lambda raw: json.loads(raw[shards._PREFIX.size :][: int.from_bytes(raw[8:16], "little")]), _shard(whole))

    rng = np.random.default_rng(1)
    of = layouts(rng, 2)
    saved = saved_by(root / "checkpoints", 5, state(rng, of), 2, 4096, {"x": 1})
    add("checkpoint manifest", saved / folders.MANIFEST, lambda: folders.inspect(saved), json.loads, _manifest)
    index = saved / f"rank-00000-of-00002{ranges.INDEX}"
    assert json.loads(index.read_bytes())["held"], "an index of nothing would be broken"

    def read_index() -> object:
        return ranges.read_index(index, ranges.digest_of(index), of)

    add("checkpoint index", index, read_index, json.loads, ranges.canonical)
    add("checkpoint ranges", index.with_suffix(ranges.STATE), lambda: folders.inspect(saved))
    layout, old = StateLayout([TensorSpec("w", (3, 5), "unit")]), root / "old"
    old.mkdir()
    np.save(old / "param.npy", np.arange(layout.size, dtype=np.float32))

    def read_npy() -> object:
        facts = {"file": "param.npy", "size": layout.size, "dtype": "f32", "tensors": [["w", [3, 5], "unit", 0]],
                 "sha256": hashlib.sha256((old / "param.npy").read_bytes()).hexdigest()}
        return npy.read(old, "param", facts, layout)

    add("array of an older checkpoint", old / "param.npy", read_npy)

    for source in contract.fixtures():
        shutil.copytree(source, root / source.name)
    model, cut = root / "llama-tied", root / "llama"
    table = {"__metadata__": {"format": "pt"}, "a.b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
             "c": {"dtype": "BF16", "shape": [2], "data_offsets": [24, 28]}}  # fmt: skip
    tensors = written("x.safetensors", contract.made(table, bytes(28)))

    def read_tensors() -> None:
        data, found = tensors.read_bytes(), sorted(safetensors.header(tensors).values(), key=lambda x: (x.start, x.size))
        ends = [8 + int.from_bytes(data[:8], "little"), *(x.start + x.size for x in found)]
        assert all(x.start == end for x, end in zip(found, ends)) and ends[-1] == len(data), "the ranges do not follow each other"
        for x in found:
            assert safetensors.read(x).shape == x.shape

    add("safetensors", tensors, read_tensors, _framed,
        lambda content: contract.made(content, bytes(28)))
    add("config.json of Hugging Face", model / "config.json", lambda: hub.open_hub(model), json.loads, _json)
    add("index of safetensors", cut / safetensors.INDEX, lambda: hub.open_hub(cut), json.loads, _json)

    run = made_runs.make(root / "run", steps=6, samples=1, timeline=1)
    made_runs.edit(run, "PRAGMA journal_mode=DELETE")
    add("metrics.sqlite", run / "metrics.sqlite", lambda: runs.load(run, thorough=True), share=1)
    add("manifest of a run", run / "manifest.json", lambda: rundir.read_manifest(run), json.loads,
        lambda content: _json(rundir.sealed({k: v for k, v in content.items() if k not in ("sha256", "format")})))
    return made


# -- in processes of their own -------------------------------------------------------------------------------------------------


def chunk(each: Sequence[Reader], first: int, times: int, seed: int, wrong: Path, at: mmap.mmap) -> None:
    """Mutants `first` and so on, in this process, within its limits; the report goes to `wrong`. `at` holds the number of the mutant and
    its reader, for whom the process dies under."""
    warnings.simplefilter("error")
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process, also inside a library
    for reader in each:
        reader.read()  # threads and pools of libraries, which a fork does not inherit
    held = int(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (held + MEMORY, held + MEMORY))
    found, shares = Found(), [reader.share for reader in each]
    for number in range(first, first + times):
        draw = random.Random(f"{seed} {number}")
        (reader,) = draw.choices(each, shares)
        data = mutant(draw, reader)
        put(reader.file, data)
        at[:] = f"{number} {reader.name}".encode().ljust(len(at))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            reader.read()
            found.read[reader.name] += 1
        except AlphaError as error:
            found.refused[reader.name] += 1
            if error.exit_code not in (1, 2, 3) or len(str(error)) > 10_000:
                found.wrong.append(f"{number} {reader.name}: {str(error)[:500]}")
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found.wrong.append(f"{number} {reader.name}: {type(error).__name__}: {str(error)[:300]} ({where.filename}:{where.lineno})")
        signal.setitimer(signal.ITIMER_PROF, 0)
        put(reader.file, reader.whole)
        for left in (reader.file.with_name(f"{reader.file.name}{end}") for end in ("-wal", "-shm", "-journal")):
            left.unlink(missing_ok=True)
    wrong.write_text(json.dumps([found.read, found.refused, found.wrong]))


def fuzz(times: int, seed: int, only: Sequence[str] = (), told: Callable[[int, Found], None] = lambda done, found: None, lane: int = 0,
         lanes: int = 1) -> Found:  # fmt: skip
    """Break files `times` times, or in one of several lanes its part of them. A process that dies is a finding, and the others go on."""
    total, at = Found(), mmap.mmap(-1, 128)
    with tempfile.TemporaryDirectory(prefix="alpha-fuzz-") as name:
        root = Path(name)
        each = [reader for reader in readers(root) if not only or reader.name in only]
        for first in range(lane * CHUNK, times, lanes * CHUNK):
            report = root / "report.json"
            report.unlink(missing_ok=True)
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    chunk(each, first, min(CHUNK, times - first), seed, report, at)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code:
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                total.wrong.append(f"{at[:].decode().strip()}: the process ended by {how}")
                for reader in each:
                    put(reader.file, reader.whole)
            else:
                read, refused, wrong = json.loads(report.read_text())
                total.read.update(read)
                total.refused.update(refused)
                total.wrong += wrong
            told(min(times, first + CHUNK), total)
    return total


def main(arguments: Sequence[str]) -> int:
    """Fuzz, print a table, and end with 1 where something was found."""
    lane, lanes = 1, 1
    if arguments[:1] == ["--lane"]:
        (lane, lanes), arguments = map(int, arguments[1].split("/")), arguments[2:]
    times = int(arguments[0]) if arguments else 1_000_000
    seed = int(arguments[1]) if arguments[1:] else random.SystemRandom().getrandbits(64)
    print(f"seed {seed}", flush=True)
    began = time.monotonic()

    def told(done: int, found: Found) -> None:
        if done % (50 * CHUNK) <= (lanes - 1) * CHUNK:
            print(f"{done:,} in {time.monotonic() - began:,.0f} s, {len(found.wrong)} findings", flush=True)

    found = fuzz(times, seed, arguments[2:], told, lane - 1, lanes)
    print("| file | read | refused |\n|---|---|---|")
    for name in sorted({*found.read, *found.refused}):
        print(f"| {name} | {found.read[name]:,} | {found.refused[name]:,} |")
    print(f"{found.read.total() + found.refused.total():,} mutants with seed {seed}, {len(found.wrong)} findings")
    for line in found.wrong[:50]:
        print(f"  {line}")
    return int(bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
