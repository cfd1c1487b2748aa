"""Sources to a folder of prepared data: in parallel, in bounded memory, going on after a kill with the same bytes at the end.

The files are cut into units that depend on the files alone. A worker makes the shards of a unit, then a record of it; whatever has a record
is not made again. So the order of documents, and every byte, is the same for any number of workers and any number of kills.

A document is validated on where the first 8 bytes of the SHA-256 of its text, as a fraction, lie below a bound: copies are on one side. The
bound is the share asked for; where no document lies below it, it is the lowest document's.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from alpha import __version__
from alpha.data.files import TEMPORARY, disk_error, hold
from alpha.data.hashed import load_hashed, save_hashed
from alpha.data.prepared import FORMAT, MANIFEST, SIDES, TOKENIZER, UNFINISHED, VERSION, Prepared, open_prepared
from alpha.data.shards import ShardWriter, open_shard, save_listing
from alpha.data.sources import PIECE, Piece, Rules, Tally, count_value, documents, files_of, pieces_in_units
from alpha.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from alpha.data.tokenizer_file import load_tokenizer, open_tokenizer
from alpha.errors import BusyError, InputError, MachineError
from alpha.options import MOST_DIGITS

SAMPLE = 4_000_000
"""Bytes of text that a tokenizer is trained on, at most."""
_SAMPLED = 64
"""Units that the sample is taken from, at most, evenly over the sources."""
_UNITS = "units"
_PLAN, _UNIT = "alpha.preparing", "alpha.unit"

Unit = tuple[int, int, tuple[Piece, ...]]
"""Its number, the number of its source, its pieces."""


@dataclass(frozen=True)
class Order:
    """What is asked for, and all that decides the bytes of the result beside the files. `tokenizer`: bytes, bpe:N, or a tokenizer's file;
    `validation`: share of documents; `unit`: bytes of sources that a worker takes at a time."""

    sources: tuple[str, ...]
    rules: Rules = field(default_factory=Rules)
    tokenizer: str = "bpe:512"
    validation: float = 0.05
    licence: str = ""
    sample: int = SAMPLE
    unit: int = PIECE


def position(text: bytes) -> float:
    """A number in [0, 1) that depends on the text alone: the first 8 bytes of its SHA-256 over 2^64, rounded down to 53 bits."""
    return (int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 11) / float(1 << 53)


def prepare(order: Order, folder: Path, *, workers: int = 1, told: Callable[[int, int], None] = lambda done, total: None) -> Prepared:
    """Make, or go on making, the folder. `workers`: processes, spawned; 1 is this one. `told`: bytes of sources done, and in all.

    InputError: a source that is missing or no text, an impossible share, a folder that holds something else, no document on a side.
    BusyError: another process prepares there. MachineError: the disk refuses, a package lacks, or a worker died.
    """
    if order.rules.part < 1:
        raise InputError("a part of no bytes", came=order.rules.part, expected="at least 1")
    if not 0.0 < order.validation < 1.0:
        raise InputError("the validation share is impossible", came=order.validation, expected="a number above 0 and below 1")
    units = _units(order, folder)
    plan = _plan(order, units)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise disk_error(folder, error) from error
    try:
        try:
            hold(handle)
        except BlockingIOError as error:
            raise BusyError("another process prepares data in this folder", came=folder, expected="one at a time",
                            do="wait for it, or take another folder") from error
        if (folder / MANIFEST).exists():
            return _finished(folder, plan)
        _begin(folder, plan)
        bound = _bound(order, units)
        tokenizer = _tokenizer(order, folder, units, bound)
        _make(order, folder, units, bound, tokenizer, workers, told)
        return _finish(order, folder, units, bound, tokenizer, plan)
    except OSError as error:
        raise disk_error(folder, error) from error
    finally:
        os.close(handle)


# -- the plan ------------------------------------------------------------------------------------------------------------------


def _units(order: Order, folder: Path) -> list[Unit]:
    """The units of all sources, in order; none holds files of two sources, or one of `folder`, which may lie in a source."""
    found = [(source, one) for source, name in enumerate(order.sources) for one in pieces_in_units(files_of(name, folder), order.unit)]
    if not found:
        raise InputError("the sources hold no text", came=", ".join(order.sources), expected="at least one file that is not empty")
    return [(number, source, one) for number, (source, one) in enumerate(found)]


def _plan(order: Order, units: Sequence[Unit]) -> dict[str, Any]:
    """All that decides the bytes of the result: the order, and which files there are, of which size and time."""
    paths = {piece.path: None for _, _, one in units for piece in one}
    facts = [(path, *_size_and_time(path)) for path in paths]
    file = order.tokenizer != "bytes" and not order.tokenizer.startswith("bpe:")
    asked = {**asdict(order), "tokenizer": open_tokenizer(Path(order.tokenizer)).hash if file else order.tokenizer}
    return {"asked": hashlib.sha256(repr(sorted(asked.items())).encode()).hexdigest(),
            "files": hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()}


def _size_and_time(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _begin(folder: Path, plan: dict[str, Any]) -> None:
    """Write the plan into a fresh folder; in one where units are made it has to be the same."""
    path = folder / UNFINISHED
    if path.exists() and any((folder / _UNITS).glob("*.json")):
        _require_same(folder, plan, load_hashed(path, "the plan of unfinished data", _PLAN, VERSION))
    elif not path.exists() and any(not path.name.endswith(TEMPORARY) for path in folder.iterdir()):
        raise InputError("the folder holds something else than prepared data", came=folder, expected="a new or an empty folder",
                         do="name another one with --out")
    else:
        save_hashed(path, _PLAN, VERSION, plan)
        (folder / TOKENIZER).unlink(missing_ok=True)
    for part in (folder, *(folder / name for name in (*SIDES, _UNITS))):
        part.mkdir(exist_ok=True)
        for left in part.glob(f".*{TEMPORARY}"):  # of a process that was killed: this one alone holds the folder
            left.unlink(missing_ok=True)


def _require_same(folder: Path, plan: dict[str, Any], found: dict[str, Any]) -> None:
    for key, what in (("asked", "with other options"), ("files", "from files that were others, or changed since")):
        if plan[key] != found.get(key):
            raise InputError(f"this folder was prepared {what}", came=folder, expected="the command that it was begun with",
                             do="name another folder with --out, or remove this one")


def _finished(folder: Path, plan: dict[str, Any]) -> Prepared:
    found = open_prepared(folder)
    _require_same(folder, plan, dict(found.facts["plan"]))
    _tidy(folder)
    return found


def _tidy(folder: Path) -> None:
    """Remove what only making needed."""
    shutil.rmtree(folder / _UNITS, ignore_errors=True)
    (folder / UNFINISHED).unlink(missing_ok=True)


# -- the split and the tokenizer -----------------------------------------------------------------------------------------------


def _all(units: Iterable[Unit], rules: Rules) -> Iterator[bytes]:
    return (text for _, _, pieces in units for piece in pieces for text in documents(piece, rules, Tally()))


def _bound(order: Order, units: Sequence[Unit]) -> float:
    """Below which positions are validation: the share, or just above the lowest position of all where none is below the share. Reads until
    it has found one, some 1 / share documents."""
    lowest = 1.0
    for text in _all(units, order.rules):
        lowest = min(lowest, position(text))
        if lowest < order.validation:
            return order.validation
    return lowest + 2.0**-53


def _tokenizer(order: Order, folder: Path, units: Sequence[Unit], bound: float) -> Tokenizer:
    """The tokenizer, saved in the folder. A new one is trained on documents that are not validation, from the start of evenly spread
    units."""
    path = folder / TOKENIZER
    if path.exists():
        return load_tokenizer(path)
    kind, _, vocabulary = order.tokenizer.partition(":")
    if order.tokenizer == "bytes":
        made: Tokenizer = ByteTokenizer()
    elif kind == "bpe":
        if not vocabulary.isdecimal() or len(vocabulary) > MOST_DIGITS:
            raise InputError("a vocabulary is no number", came=order.tokenizer,
                             expected=f"such as bpe:8192, of at most {MOST_DIGITS} digits")
        chosen = [units[i * len(units) // min(len(units), _SAMPLED)] for i in range(min(len(units), _SAMPLED))]
        texts = (text for unit in chosen for text in _up_to(order.sample // len(chosen), _all([unit], order.rules), bound))
        made = BPETokenizer.train(texts, int(vocabulary), record={"sample_bytes": order.sample})
    else:
        made = open_tokenizer(Path(order.tokenizer))
    made.save(path)
    return made


def _up_to(most: int, texts: Iterable[bytes], bound: float) -> Iterator[bytes]:
    """Texts to train on, until they are `most` bytes; the last one cut."""
    for text in texts:
        if most <= 0:
            return
        if position(text) >= bound:
            yield text[:most]
            most -= len(text)


# -- the shards ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """What a worker needs beside its unit."""

    folder: Path
    rules: Rules
    bound: float


_worker: tuple[_Job, Tokenizer] | None = None


def _start(job: _Job) -> None:
    """Begin a worker process: it ends with its parent, and leaves Ctrl-C to it."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _worker = job, load_tokenizer(job.folder / TOKENIZER)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _work(unit: Unit) -> int:
    assert _worker is not None, "_start comes first"
    return make_unit(unit, *_worker)


def make_unit(unit: Unit, job: _Job, tokenizer: Tokenizer) -> int:
    """Make the shards and the record of one unit; the bytes of sources that it stands for. Errors as `prepare`."""
    number, source, pieces = unit
    tally, digests = Tally(), {side: hashlib.sha256() for side in SIDES}
    writers = {side: ShardWriter(job.folder / side, tokenizer, prefix=f"{number:06d}-") for side in SIDES}
    for piece in pieces:
        for text in documents(piece, job.rules, tally):
            side = SIDES[position(text) < job.bound]
            writers[side].add(text)
            digests[side].update(hashlib.sha256(text).digest())
    for writer in writers.values():
        writer.close()
    sides = {side: {"shards": w.listed, "documents": w.documents, "tokens": w.tokens, "text_bytes": w.text_bytes,
                    "digest": digests[side].hexdigest()} for side, w in writers.items()}
    save_hashed(_record(job.folder, number), _UNIT, VERSION,
                {"source": source, "sides": sides, "bad": tally.bad, "empty": tally.empty, "labels": tally.labels, "bound": job.bound})
    return sum(piece.size for piece in pieces)


def _record(folder: Path, number: int) -> Path:
    return folder / _UNITS / f"{number:06d}.json"


def _is_made(folder: Path, unit: Unit) -> bool:
    """Whether a unit's record and all its shards are there, whole."""
    path = _record(folder, unit[0])
    if not path.exists():
        return False
    try:
        made = load_hashed(path, "the record of a unit", _UNIT, VERSION)
        for side in SIDES:
            for name, digest in made["sides"][side]["shards"]:
                open_shard(folder / side / name, digest)
    except InputError:  # CorruptError is one
        return False
    return True


def _make(order: Order, folder: Path, units: Sequence[Unit], bound: float, tokenizer: Tokenizer, workers: int,
          told: Callable[[int, int], None]) -> None:
    """Make every unit that is not made."""
    job, total = _Job(folder, order.rules, bound), sum(piece.size for _, _, one in units for piece in one)
    todo = [unit for unit in units if not _is_made(folder, unit)]
    done = total - sum(piece.size for _, _, one in todo for piece in one)
    told(done, total)
    if workers == 1 or len(todo) < 2:
        for unit in todo:
            done += make_unit(unit, job, tokenizer)
            told(done, total)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(todo)), mp_context=context, initializer=_start, initargs=(job,)) as pool:
        waiting = [pool.submit(_work, unit) for unit in todo]
        try:
            for one in as_completed(waiting):
                done += one.result()
                told(done, total)
        except BrokenProcessPool as error:
            raise MachineError("a worker died", came=f"{len(todo)} units to make, {workers} workers", expected="that each ends its unit",
                               do="run the command again with fewer --workers: what is made is kept") from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _finish(order: Order, folder: Path, units: Sequence[Unit], bound: float, tokenizer: Tokenizer, plan: dict[str, Any]) -> Prepared:
    """Listings, description, and away with what only making needed."""
    made = [load_hashed(_record(folder, number), "the record of a unit", _UNIT, VERSION) for number, _, _ in units]
    counts = {side: {key: sum(m["sides"][side][key] for m in made) for key in ("documents", "tokens", "text_bytes")} for side in SIDES}
    empty = [side for side in SIDES if not counts[side]["documents"]]
    if empty:
        raise InputError(f"no document is left for {empty[0]}", came=f"{sum(c['documents'] for c in counts.values())} documents",
                         expected="two different ones at least",
                         do="take more text; a text file is cut into smaller documents with --part BYTES")
    streams = {}
    for side in SIDES:
        corpus = hashlib.sha256("".join(m["sides"][side]["digest"] for m in made).encode()).hexdigest()
        streams[side] = save_listing(folder / side, corpus, [tuple(one) for m in made for one in m["sides"][side]["shards"]])
    labels: dict[str, Counter[str]] = {}
    for m in made:
        for label, values in m["labels"].items():
            found = labels.setdefault(label, Counter())
            for value, times in values.items():
                count_value(found, value, times)
    sources = [{"name": name, "files": len({p.path for _, s, one in units for p in one if s == i}),
                "bytes": sum(p.size for _, s, one in units for p in one if s == i),
                **{key: sum(m["sides"][side][key] for m in made if m["source"] == i for side in SIDES)
                   for key in ("documents", "tokens", "text_bytes")}} for i, name in enumerate(order.sources)]
    save_hashed(folder / MANIFEST, FORMAT, VERSION, {
        "made_by": f"alpha {__version__}", "sources": sources, "field": order.rules.field, "licence": order.licence, "plan": plan,
        "tokenizer": tokenizer.hash, "validation": order.validation, "bound": bound, "counts": counts, "streams": streams,
        "bad": sum(m["bad"] for m in made), "empty": sum(m["empty"] for m in made), "labels": labels,
    })  # fmt: skip
    _tidy(folder)
    return open_prepared(folder)
