"""Cases of data at its limits: disks and file systems that refuse, files that say what no writer writes, sources of nothing, workers that
die, and what prepared data says of itself."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.data import corpus, files, inspect, mixture, permutation, prefetch, prepare, prepared, shards, sources, tokenizer
from alpha.data.hashed import file_bytes, load_hashed, save_hashed
from alpha.errors import CorruptError, GraphError, InputError, MachineError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data.support import folder, parts_of, text_like, write_texts

# -- files -----------------------------------------------------------------------------------------------------------------------------


def left_over(rng: np.random.Generator) -> Measured:
    """What nobody makes any more is swept, folders too; where the file system has no locks, after a day. What cannot be opened is passed
    over. A disk that refuses is told by its own words."""
    count = Checks()
    with folder() as root:
        for locks in (True, False):
            made = {"old": 90_000.0, "hour": 3600.0, "new": 0.0}
            for name, age in made.items():
                (root / f".{name}.alpha-tmp").write_bytes(b"x")
                (root / f"{files.MAKING}{name}").mkdir(exist_ok=True)
                (root / f"{files.MAKING}{name}" / "of").write_bytes(b"x")
                for path in (root / f".{name}.alpha-tmp", root / f"{files.MAKING}{name}"):
                    then = path.stat().st_mtime - age
                    os.utime(path, (then, then))
            (root / ".gone.alpha-tmp").symlink_to(root / "nowhere")
            others = [".draft.tmp", ".making-of-film"]  # somebody's own: a run directory may lie beside anything
            for path in (root / others[0], root / others[1]):
                path.mkdir(exist_ok=True)
                os.utime(path, (1.0, 1.0))
            refused = [] if locks else [mock.patch.object(files.fcntl, "flock", side_effect=OSError(errno.EBADF, "Bad file descriptor"))]
            for patch in refused:
                patch.start()
            try:
                files.sweep(root)
                with open(root / ".new.alpha-tmp", "rb") as one:
                    count.that(files.hold(one.fileno()) is locks, f"held, locks {locks}")
            finally:
                for patch in refused:
                    patch.stop()
            left = sorted(p.name for p in root.iterdir())
            kept = ["new"] if locks else ["hour", "new"]
            want = sorted([*others, ".gone.alpha-tmp", *(x for name in kept for x in (f".{name}.alpha-tmp", f"{files.MAKING}{name}"))])
            count.that(left == want, f"locks {locks}: {left}")
            (root / ".gone.alpha-tmp").unlink()
            files.sweep(root)
        full = "the disk is full", "free some space"
        for code, words in ((errno.ENOSPC, full), (errno.EDQUOT, full), (errno.EACCES, ("the file cannot be written", "check the folder"))):
            found = files.disk_error(root, OSError(code, os.strerror(code)))
            count.that(type(found) is MachineError and all(w in str(found) for w in (*words, f"{root} ({os.strerror(code)})")), str(found))
    return count.measured()


# -- corpora ---------------------------------------------------------------------------------------------------------------------------


def odd_sources(rng: np.random.Generator) -> Measured:
    """The standard library by its name; a pattern that is none; samples where nothing fits, which end before a character that would."""
    count = Checks()
    count.that(corpus.open_corpus("stdlib").hash == corpus.stdlib_corpus().hash, "another standard library")
    with folder() as root:
        line = "é" * int(rng.integers(20, 40)) + "日" * 9
        write_texts(root, {"a.txt": line.encode()})
        count.says(InputError, lambda: corpus.folder_corpus(root, "/a.txt"), "an absolute pattern", "impossible pattern", "/a.txt")
        made = corpus.folder_corpus(root)
        for most in range(2, len(line.encode())):
            text = b"".join(made.sample(most).texts())
            want = line.encode()[:most].decode(errors="ignore")
            count.that(text.decode() == want, f"a sample of {most} bytes: {len(text)}")
        for what, whose, most in (("no byte", made, 0), ("less than a character", made, 1), ("no document", made.subset("none", ()), 99)):
            count.says(InputError, lambda whose=whose, most=most: whose.sample(most), what, "would be empty", f"max_bytes={most}")  # type: ignore[misc]
    return count.measured()


def names_of_streams(rng: np.random.Generator) -> Measured:
    """The hash of several streams tells their names, contents and order apart."""
    count = Checks()
    with folder() as root:
        made = []
        for i in range(2):
            write_texts(root / f"{i}", {"a.txt": text_like(rng, 50)})
            made.append(shards.token_stream(corpus.folder_corpus(root / f"{i}"), tokenizer.ByteTokenizer(), root / "cache"))
        one, two = made
        pairs = ((("a", one), ("b", two)), (("b", two), ("a", one)), (("a", two), ("b", one)), (("a", one), ("c", two)), (("a", one),))
        hashes = [mixture.Streams(parts).hash for parts in pairs]
        count.that(len({*hashes}) == len(pairs), "two mixtures share a hash")
        count.that(hashes == [mixture.Streams(parts).hash for parts in pairs], "a hash hangs on the object")
    return count.measured()


def no_permutation(rng: np.random.Generator) -> Measured:
    """A walk that never comes back ends by an error."""
    count = Checks()
    size, seed = int(rng.integers(5, 200)), int(rng.integers(1 << 40))
    with mock.patch.object(permutation, "_network", side_effect=lambda value, keys, half: np.full_like(value, size)):
        count.says(GraphError, lambda: permutation.permuted(np.arange(3), np.zeros(3, np.int64), size, seed), "no permutation",
                   "its walk does not end", f"size {size}, seed {seed}")
    return count.measured()


def out_of_turn(rng: np.random.Generator) -> Measured:
    """A batch that was made for another place is not given to the loop."""
    count, place = Checks(), int(rng.integers(3, 99))

    class _Never:
        global_batch = 4

    with prefetch.Prefetcher(_Never(), [(0, 1, 0, 1, False)], depth=1, steps=100) as ahead:  # type: ignore[arg-type]
        with mock.patch.object(prefetch._Line, "take", return_value=(place, object(), 0, True)):
            ahead._line, ahead._next = prefetch._Line(1), place - 1
            count.says(GraphError, lambda: ahead.batch(place - 1), "another place", "out of turn", f"microbatch {place}", f"{place - 1}")
            ahead._next = place
            count.that(ahead.batch(place) is not None, "its own place is refused")
        ahead._line = None
    return count.measured()


# -- shards ----------------------------------------------------------------------------------------------------------------------------


def _shard(path: Path, tokens: list[int], dtype: str = "<u2", **facts: Any) -> str:
    more = {"tokenizer": "t" * 64, "vocab_size": 300, "text_bytes": len(tokens), **facts}
    return shards.write_shard(path, np.array(tokens, dtype), np.array([0, len(tokens)]), more)


def _with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A shard whose header says another thing; its own hash fits."""
    whole = path.read_bytes()
    _, length, _ = shards._PREFIX.unpack(whole[: shards._PREFIX.size])
    begin = shards._padded(shards._PREFIX.size + length, 64)
    header = json.loads(whole[shards._PREFIX.size : shards._PREFIX.size + length])
    made = change(header)
    text = made if isinstance(made, bytes) else json.dumps(header, sort_keys=True).encode()
    head = shards._PREFIX.pack(shards.MAGIC, len(text), bytes.fromhex(files.sha256_hex(text))) + text
    path.write_bytes(head.ljust(shards._padded(len(head), 64), b"\0") + whole[begin:])


def headers(rng: np.random.Generator) -> Measured:
    """What no header of a shard says, though its hash fits, by the words of the refusal; shards of several streams; a listing that lacks a
    fact or names no shard; windows of nothing."""
    count = Checks()
    with folder() as root:
        path = root / "a.tokens"
        cases: list[tuple[Callable[[dict[str, Any]], object], type[Exception], tuple[str, ...]]] = [
            (lambda h: b"[]", CorruptError, ("no JSON object", "no object")), (lambda h: b"{", CorruptError, ("no JSON object",)),
            (lambda h: h.update(version=3), InputError, ("unknown version", "version 3")),
            (lambda h: h.update(dtype="<u8"), CorruptError, ("an unknown type", "<u8")),
            *((lambda h, fact=fact: h.pop(fact), CorruptError, ("lacks a fact", f"{fact} = None"))
              for fact in shards._FACTS if fact != "version"),
            *((lambda h, fact=fact: h.update({fact: -1}), CorruptError, ("lacks a fact", f"{fact} = -1"))
              for fact in ("tokens", "documents", "text_bytes", "vocab_size")),
            (lambda h: h.update(tokens=True), CorruptError, ("lacks a fact", "tokens = True")),
            (lambda h: h.update(tokenizer=3), CorruptError, ("lacks a fact", "tokenizer = 3")),
            (lambda h: h.update(tokens=4), CorruptError, ("do not follow each other",)),
        ]  # fmt: skip
        for change, kind, words in cases:
            _shard(path, [1, 2, 3])
            _with_header(path, change)
            count.says(kind, lambda: shards.open_shard(path), str(words), str(path), *words)
        _shard(path, [1, 2, 3])
        _with_header(path, lambda h: h)
        count.that(len(shards.open_shard(path)) == 3, "the same header is refused")
        first = shards.open_shard(path)
        for name, more in (("tokenizer", {"tokenizer": "u" * 64}), ("vocab_size", {"vocab_size": 301}), ("dtype", {"dtype": "<u4"})):
            _shard(root / "b.tokens", [4, 5], **more)
            count.says(CorruptError, lambda: shards.TokenStream([first, shards.open_shard(root / "b.tokens")]), name,
                       "do not belong together", "b.tokens", "as in a.tokens")
        _shard(root / "b.tokens", [4, 5])
        both = shards.TokenStream([first, shards.open_shard(root / "b.tokens")])
        count.that(both.windows([0], 5).tolist() == [[1, 2, 3, 4, 5]], "shards of one stream")
        for starts, length in (([], 3), ([2], 0), ([], 0), ([5], 0)):
            for found in (both.windows(starts, length), both.document_ids(starts, length)):
                count.that(found.shape == (len(starts), length) and found.dtype == np.int32, f"{starts} of {length}: {found.shape}")
        for content, words in (({"corpus": "c"}, ("lacks a fact", "shards")), ({"shards": []}, ("lacks a fact", "corpus")),
                               ({"corpus": "c", "shards": [["a"]]}, ("lacks a fact",)),
                               ({"corpus": "c", "shards": 3}, ("lacks a fact",)),
                               ({"corpus": "c", "shards": []}, ("no shard listed; a.tokens is not listed", "0 shards")),
                               ({"corpus": "c", "shards": [["a.tokens", "0"], ["c.tokens", "0"]]},
                                ("no c.tokens; b.tokens is not listed",))):
            save_hashed(root / shards.LISTING, shards.FORMAT, shards.VERSION, content)
            count.says(CorruptError, lambda: shards.open_stream(root), str(content), *words)
        save_hashed(root / shards.LISTING, shards.FORMAT, shards.VERSION, {"corpus": "c", "shards": [["c.tokens", "0"], ["d.tokens", "0"]]})
        for name in ("a", "b"):
            (root / f"{name}.tokens").unlink()
        count.says(CorruptError, lambda: shards.open_stream(root), "nothing is there", "no c.tokens\n")
    return count.measured()


def fetched_ahead(rng: np.random.Generator) -> Measured:
    """The system is asked for all windows of a batch before the first is read, and for parts that a reader names; for a window that is
    alone, for none. What leaves a shard is cut at its end."""
    count = Checks()
    with folder() as root:
        paths = [root / f"{name}.tokens" for name in "ab"]
        for index, path in enumerate(paths):
            _shard(path, [int(x) for x in rng.integers(0, 300, 90)], index=index, last=index == 1)
        stream = shards.TokenStream([shards.open_shard(path) for path in paths])
        begins = {shard._handle: (i, shard._begin) for i, shard in enumerate(stream.shards)}
        said: list[tuple[int, int, int]] = []

        def note(handle: int, at: int, nbytes: int, how: int) -> None:
            i, begin = begins[handle]
            said.append((i, (at - begin) // 2, nbytes // 2))
            count.that(how == os.POSIX_FADV_WILLNEED, "another advice")

        n = int(rng.integers(5, 20))
        own = int(rng.integers(0, 60))
        with mock.patch.object(shards.os, "posix_fadvise", side_effect=note), \
                mock.patch.object(shards.Shard, "read", side_effect=lambda begin, out: said.append((-1, begin, len(out) // 2))):
            stream.windows([own], n)
            count.that(said == [(-1, own, n)], f"a window alone: {said}")
            said.clear()
            stream.windows([own, 88, 100], n)
            want = [(0, own, n), (0, 88, 2), (1, 10, n), (-1, own, n), (-1, 88, 2), (-1, 0, n - 2), (-1, 10, n)]
            count.that(said == want, f"three windows: {said} for {want}")
            said.clear()
            stream.ahead(np.array([own, 95]), np.array([n, 3]))
            count.that(said == [(0, own, n), (1, 5, 3)], f"parts: {said}")
    return count.measured()


def asked_of_the_disk(rng: np.random.Generator) -> Measured:
    """What the system is asked to fetch: whole blocks where one was not checked, else the tokens; all of a file is forgotten. A disk that
    refuses an open shard, and one that refuses a stream at any place, is told by name; who finishes the same stream first wins."""
    count = Checks()
    with folder() as root:
        path = root / "a.tokens"
        _shard(path, [int(x) for x in rng.integers(0, 300, 3 * shards.BLOCK // 2)])
        asked: list[tuple[int, int, int]] = []
        own, found = shards.open_shard(path, verify=False), shards.open_shard(path)
        begin = own._begin
        with mock.patch.object(shards.os, "posix_fadvise", side_effect=lambda handle, at, n, how: asked.append((at, n, how))):
            at, n = shards.BLOCK // 2 + int(rng.integers(9, 99)), int(rng.integers(1, 50))
            own.ahead(at, n)
            found.ahead(at, n)
            found.forget()
        want = [(begin + shards.BLOCK, shards.BLOCK, os.POSIX_FADV_WILLNEED), (begin + 2 * at, 2 * n, os.POSIX_FADV_WILLNEED),
                (0, 0, os.POSIX_FADV_DONTNEED)]
        count.that(asked == want, f"{asked} for {want}")
        with mock.patch.object(shards.os, "preadv", side_effect=OSError(errno.EIO, "Input/output error")):
            count.says(MachineError, lambda: found.read(0, memoryview(bytearray(8))), "a read", "can no longer be read",
                       f"{path} (Input/output error)")
        write_texts(root / "texts", {"a.txt": b"abc", "b.txt": b"de"})
        made, kind = corpus.folder_corpus(root / "texts"), tokenizer.ByteTokenizer()
        count.says(MachineError, lambda: shards.token_stream(made, kind, path / "cache"), "a cache below a file", "cannot be written")
        rename = os.rename

        def refused(source: Path, target: Path) -> None:
            raise OSError(errno.EACCES, "Permission denied")

        def too_late(source: Path, target: Path) -> None:
            rename(source, target)
            os.mkdir(source)  # for what sweeps up behind it
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

        for act, stands in ((refused, False), (too_late, True)):
            cache = root / act.__name__
            with mock.patch.object(shards.os, "rename", side_effect=act):
                if stands:
                    stream = shards.token_stream(made, kind, cache)
                    count.that(stream.windows([0], len(stream)).tolist() == [[97, 98, 99, 256, 100, 101, 256]], "another one's stream")
                else:
                    count.says(MachineError, partial(shards.token_stream, made, kind, cache), "a rename", "(Permission denied)")
            left = sorted(p.name for p in cache.iterdir())
            count.that(left == [shards.stream_folder(cache, made.hash, kind.hash).name] * stands, f"{act.__name__} leaves {left}")
    return count.measured()


# -- prepared data ---------------------------------------------------------------------------------------------------------------------


def _order(*names: Path, **more: Any) -> prepare.Order:
    return prepare.Order(tuple(map(str, names)), **{"tokenizer": "bytes", "validation": 0.3, **more})


def _texts(rng: np.random.Generator, number: int) -> list[bytes]:
    return [b"%d " % i + text_like(rng, int(rng.integers(5, 60))) for i in range(number)]


def of_sources(rng: np.random.Generator) -> Measured:
    """Of several sources each is told with its files, bytes, documents and tokens; a text of prepared data has the hash of its streams;
    statistics and samples are what a count by hand gives."""
    count = Checks()
    with folder() as root:
        texts = {name: _texts(rng, int(rng.integers(4, 9))) for name in ("a", "b", "c")}
        texts["b"] += [texts["a"][0], texts["a"][0]]
        texts["c"] += texts["a"]  # far from their firsts, whatever validation takes
        for name, own in texts.items():
            write_texts(root / name, {f"{i:02d}.txt": text for i, text in enumerate(own)})
        made = prepare.prepare(_order(*(root / name for name in texts), unit=100), root / "out", workers=1)
        for told, (name, own) in zip(made.facts["sources"], texts.items()):
            size = sum(map(len, own))
            want = {"name": str(root / name), "files": len(own), "bytes": size, "documents": len(own), "tokens": size + len(own),
                    "text_bytes": size}
            count.that(dict(told) == want, f"{told} for {want}")
        count.that(prepared.is_prepared(root / "out") and not prepared.is_prepared(root / "a"), "whether data was prepared")
        sides = {side: list(prepared.PreparedText((stream,), made.tokenizer).texts()) for side, stream in made.streams.items()}
        hashes = {side: prepared.PreparedText((stream,), made.tokenizer).hash for side, stream in made.streams.items()}
        both = prepared.PreparedText(tuple(made.streams.values()), made.tokenizer).hash
        count.that(len({both, *hashes.values()}) == 3, "two texts share a hash")
        again = prepare.prepare(_order(*(root / name for name in texts), unit=1 << 20), root / "again")
        text = prepared.PreparedText((again.streams["train"],), again.tokenizer)
        count.that(list(text.texts()) == sides["train"], "another order of documents")
        with mock.patch.object(inspect, "_AT_ONCE", 3):
            found = inspect.statistics(made)
        for side, own in sides.items():
            lengths = sorted(map(len, own))
            ids = Counter(i for one in own for i in [*one, 256])
            total = sum(ids.values())
            entropy = -sum(n / total * math.log2(n / total) for n in ids.values())
            near = 0.95 * (len(lengths) - 1)
            high = lengths[int(near)] + (near - int(near)) * (lengths[min(int(near) + 1, len(lengths) - 1)] - lengths[int(near)])
            middle = (lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) / 2
            s, spread = found[side], (lengths[0], middle, sum(lengths) / len(lengths), high, lengths[-1])
            files_of = len(made.streams[side].shards)
            count.that((s.documents, s.tokens, s.text_bytes, s.shards, s.used, s.vocabulary)
                        == (len(own), total, sum(lengths), files_of, len(ids), 257), f"{side}: {s}")  # fmt: skip
            count.that(np.allclose(s.lengths, spread, rtol=1e-12), f"{side}: {s.lengths}")
            count.that(math.isclose(s.entropy, entropy, rel_tol=1e-9), f"{side}: {s.entropy} bits for {entropy}")
            count.that(s.duplicates == len(own) - len({*own}), f"{side}: {s.duplicates} again")
        own = sides["train"]
        for number in (1, 3, len(own) + 5):
            n = min(number, len(own))
            with mock.patch.object(inspect, "_SHOWN", 9):
                count.that(inspect.samples(made, number) == [own[i * len(own) // n][:9] for i in range(n)], f"{number} samples")
    return count.measured()


def small_samples(rng: np.random.Generator) -> Measured:
    """A tokenizer learns from no more of the text than was asked for, the last document cut; from a source of one unit any number of
    workers is one process."""
    count = Checks()
    with folder() as root:
        ends = [bytes(pair) for pair in rng.permuted(np.arange(ord("a"), ord("y"))).reshape(12, 2).tolist()]
        texts = [b"T" + text_like(rng, 200) + b"\n" + (end + b" ") * 66 for end in ends]  # what lies behind the cut decides merges
        write_texts(root / "t", {f"{i:02d}.txt": text for i, text in enumerate(texts)})
        for most in (650, int(rng.integers(600, 3000))):
            with mock.patch.object(prepare, "ProcessPoolExecutor", side_effect=AssertionError("a process was started")):
                made = prepare.prepare(_order(root / "t", tokenizer="bpe:262", sample=most), root / f"out{count.cases}", workers=4)
            learned, left = [], most
            for text in texts:
                if left > 0 and prepare.position(text) >= made.facts["bound"]:
                    learned.append(text[:left])
                    left -= len(text)
            want = tokenizer.BPETokenizer.train(learned, 262).hash
            count.that(made.tokenizer.hash == want and sum(map(len, learned)) <= most, f"it learned from other than {most} bytes")
    return count.measured()


class _Pool:
    """Stands for a pool of processes: what `act` gives for each unit, in order."""

    shut: list[bool]

    def __init__(self, act: Callable[[Any], Any]) -> None:
        self._act, self.shut = act, []

    def __call__(self, number: int, **how: Any) -> _Pool:
        self.number, self.how = number, how
        return self

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *error: object) -> None:
        """The processes end."""

    def submit(self, function: Callable[[Any], Any], unit: Any) -> Future[Any]:
        """Done at once."""
        made: Future[Any] = Future()
        try:
            made.set_result(self._act(unit))
        except Exception as error:  # handed on, as a pool does
            made.set_exception(error)
        return made

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """What is not begun will not be."""
        self.shut.append(cancel_futures)


def workers(rng: np.random.Generator) -> Measured:
    """A worker makes the bytes that one process makes, and leaves Ctrl-C to its parent. One that dies is told of as that, what one raises
    as it is, and then nothing more is begun; what was made before is kept."""
    count = Checks()
    with folder() as root:
        write_texts(root / "t", {f"{i:02d}.txt": text for i, text in enumerate(_texts(rng, 8))})
        order = _order(root / "t", unit=16)  # at least three units, so two are left behind the first
        whole = prepare.prepare(order, root / "whole")

        def here(unit: Any) -> int:
            with mock.patch.object(prepare.signal, "signal") as set_, mock.patch.object(prepare, "_worker", None):
                prepare._start(*pool.how["initargs"])
                count.that(set_.mock_calls == [mock.call(signal.SIGINT, signal.SIG_IGN)], f"{set_.mock_calls}")
                return prepare._work(unit)

        def dying(unit: Any) -> int:
            raise BrokenProcessPool("a process ended")

        def failing(unit: Any) -> int:
            if unit[0] > 0:
                raise InputError("a line is no document", came="line 3")
            return here(unit)

        for name, act, kind, words in (("dies", dying, MachineError, ("a worker died", "2 workers")),
                                       ("fails", failing, InputError, ("a line is no document", "line 3"))):
            pool = _Pool(act)
            with mock.patch.object(prepare, "ProcessPoolExecutor", pool):
                count.says(kind, lambda name=name: prepare.prepare(order, root / name, workers=2), name, *words)  # type: ignore[misc]
            count.that(pool.shut == [True] * (kind is InputError), f"{name}: {pool.shut}")
            told = mock.Mock()
            with mock.patch.object(prepare, "ProcessPoolExecutor", pool := _Pool(here)):
                made = prepare.prepare(order, root / name, workers=2, told=told)
            begun = told.mock_calls[0].args[0]
            count.that((begun > 0) == (kind is InputError) and pool.number == 2, f"{name}: begun again at {begun}")
            there = {at: {p.relative_to(root / at): p.read_bytes() for p in (root / at).rglob("*.tokens")} for at in (name, "whole")}
            count.that(there[name] == there["whole"] and made.tokenizer.hash == whole.tokenizer.hash, f"{name}: other bytes")
            listings = [dict(found.facts["streams"]) for found in (made, whole)]
            count.that(listings[0] == listings[1], f"{name}: other streams")
    return count.measured()


def _remade(out: Path, side: str, vocabulary: int, highest: int) -> None:
    """One side of prepared data with another vocabulary in its headers, and an id of `highest` in each shard; every hash fits."""
    listed = []
    for path in sorted((out / side).glob("*.tokens")):
        own = shards.open_shard(path)
        tokens, facts = np.array(own.tokens), dict(own.header)
        tokens[0] = highest
        kept = {key: facts[key] for key in ("tokenizer", "text_bytes")}
        listed.append((path.name, shards.write_shard(path, tokens, own.starts, {**kept, "vocab_size": vocabulary})))
    listing = load_hashed(out / side / shards.LISTING, "a listing", shards.FORMAT, shards.VERSION)
    made = shards.save_listing(out / side, listing["corpus"], listed)
    facts = load_hashed(out / prepared.MANIFEST, "a description", prepared.FORMAT, prepared.VERSION)
    content = {k: v for k, v in facts.items() if k not in ("format", "version")}
    content["streams"] = {**content["streams"], side: made}
    (out / prepared.MANIFEST).write_bytes(file_bytes(prepared.FORMAT, prepared.VERSION, content))


def refused_folders(rng: np.random.Generator) -> Measured:
    """Parts of no byte, sources without text, places that no folder can be in; a vocabulary that is not the tokenizer's, and ids beyond
    it, though every hash fits: the first is seen when the folder is opened, the other when it is verified."""
    count = Checks()
    with folder() as root:
        write_texts(root / "t", {f"{i}.txt": text for i, text in enumerate(_texts(rng, 6))})
        write_texts(root / "empty", {"a.txt": b"", "b.txt": b""})
        part = int(rng.integers(-3, 1))
        count.says(InputError, lambda: prepare.prepare(_order(root / "t", rules=sources.Rules(part=part)), root / "o"), "no part",
                   "a part of no bytes", str(part))
        count.says(InputError, lambda: prepare.prepare(_order(root / "empty"), root / "o"), "no text", "hold no text", str(root / "empty"))
        count.says(MachineError, lambda: prepare.prepare(_order(root / "t"), root / "t" / "0.txt" / "o"), "below a file",
                   "cannot be written", str(root / "t" / "0.txt" / "o"))
        (root / "o").mkdir()
        (root / "o" / "train").write_bytes(b"a file")
        (root / "o" / prepared.UNFINISHED).write_bytes(b"begun")
        count.says(MachineError, lambda: prepare.prepare(_order(root / "t"), root / "o"), "a file in the way", "cannot be written",
                   "File exists")
        for side in prepared.SIDES:
            for vocabulary, highest, opens in ((257, 256, True), (258, 256, False), (257, 257, True)):
                out = root / f"{side}{vocabulary}{highest}"
                prepare.prepare(_order(root / "t"), out)
                _remade(out, side, vocabulary, highest)
                if opens:
                    count.that(prepared.open_prepared(out).streams[side].vocab_size == 257, f"{side}: {highest} of {vocabulary}")
                else:
                    count.says(CorruptError, partial(prepared.open_prepared, out), "a vocabulary", "does not match the shards",
                               f"of which {side} was made")
                if highest == 257:
                    count.says(CorruptError, partial(prepared.open_prepared, out, verify=True), "an id", "beyond its vocabulary",
                               "id 257", "below 257", str(out / side))
                elif opens:
                    count.that(len(prepared.open_prepared(out, verify=True).streams[side]) > 0, f"{side}: the last id is refused")
    return count.measured()


def lines_and_parts(rng: np.random.Generator) -> Measured:
    """Texts in parts of a few bytes, whose characters are longer; globs beside folders; lines that are just too long, or reach into later
    pieces; the place of what is wrong in a line that begins where a piece does; files that go away."""
    count = Checks()

    def read(path: Path, rules: sources.Rules, piece: int = 1 << 20) -> tuple[list[bytes], int]:
        tally = sources.Tally()
        return [text for one in sources.pieces_of(path, piece) for text in sources.documents(one, rules, tally)], tally.bad

    with folder() as root:
        path = root / "a.txt"
        for text in ("€é日b".encode(), b"\x80" * 9 + b"a", "a\n€\n\n日".encode(), b"ab" * 3):
            path.write_bytes(text)
            for part in (1, 2, 3, 4):
                got_parts = read(path, sources.Rules(part=part))[0]
                count.that(got_parts == parts_of(text, part), f"{text!r} in parts of {part}: {got_parts}")
        (root / "x.txt").mkdir()
        found = sources.files_of(str(root / "*.txt"))
        count.that(found == [path], f"of a glob {found}")
        one = sources.pieces_of(path)[0]
        rows = root / "b.jsonl"
        size = int(rng.integers(40, 80))
        row = json.dumps({"text": "y"}).encode()
        fits = row[:-1] + b" " * (size - len(row) - 1) + b"}\n"
        for extra, good in ((0, True), (1, False), (2, False)):
            rows.write_bytes(row + b"\n" + fits[:-2] + b" " * extra + b"}\n" + row)
            got = read(rows, sources.Rules(longest=size, skip_bad=True))
            count.that(got == ([b"y"] * (3 if good else 2), 0 if good else 1), f"{extra} beyond {size}: {got}")
        behind, wide = int(rng.integers(3, 9)), int(rng.integers(3, 6)) * size  # it ends behind its piece; what of it is read ends within
        rows.write_bytes(row + b"\n" + fits[:-2] + b" " * wide + b"}\n" + (row + b"\n") * behind)
        for piece in (1 << 20, 2 * size):
            got = read(rows, sources.Rules(longest=size, skip_bad=True), piece)
            count.that(got == ([b"y"] * (1 + behind), 1), f"behind a line over pieces of {piece}: {got}")
        for bad, said in ((b'{"text" "a"}', "no JSON: Expecting ':' delimiter at character 9"), (b'{"text": ', "at its end"),
                          (b"{}", 'it has no "text", but nothing'), (b'{"x": 1, "y": 2}', "it has no \"text\", but 'x', 'y'")):
            width = max(len(bad), len(row)) + 1
            number = int(rng.integers(2, 9))
            rows.write_bytes((row.ljust(width - 1) + b"\n") * number + bad + b"\n")
            count.says(InputError, partial(read, rows, sources.Rules(), width), str(bad), f"{rows}, line {number + 1}: ", said)
        packed = root / "c.jsonl.gz"
        packed.write_bytes(b"")
        count.that(sources.pieces_of(packed) == [], "a file of no byte has pieces")
        path.unlink()
        count.says(InputError, lambda: sources.pieces_of(path), "a file that is gone", f"{path} (No such file or directory)")
        count.says(InputError, lambda: list(sources.documents(one, sources.Rules(), sources.Tally())), "gone meanwhile",
                   f"{path} (No such file or directory)")
    return count.measured()
