"""Cases of `corpus.prepared`: what `alpha data prepare` makes of text and JSON lines, and what `open_prepared` says of it."""

from __future__ import annotations

import errno
import gzip
import hashlib
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.data import files, prepare, prepared, sources, tokenizer
from alpha.data.hashed import file_bytes
from alpha.errors import BusyError, CorruptError, InputError, MachineError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data import corruption, limits, packed, walked
from alpha.gates.contracts.data.support import Cases, any_bytes, folder, parts_of, same_everywhere, text_like, write_texts

UNIT, PART = 3000, 700
"""Bytes of a unit and of a text's part, small, so that small files are cut in many places."""


def _lines(rng: np.random.Generator, number: int) -> list[str]:
    """Texts of JSON lines: some empty, some again, none of them plain ASCII alone."""
    made = [text_like(rng, int(rng.integers(0, 200))).decode("utf-8", "replace") for _ in range(number)]
    return [*made, "", "é" * 40, *made[:3]]


def _json(rng: np.random.Generator, texts: list[str], field: str, ends: tuple[str, ...] = ("\n", "\r\n", "\n \n")) -> bytes:
    """The lines of a file; escapes or not, blank lines between, the last without an end."""
    lines = [json.dumps({"n": i, field: text, "lang": "ab"[i % 2]}, ensure_ascii=bool(rng.integers(2))) for i, text in enumerate(texts)]
    return "".join(line + ends[int(rng.integers(len(ends)))] for line in lines[:-1]).encode() + lines[-1].encode()


def made_up(rng: np.random.Generator, root: Path, field: str = "text", part: int = PART, unit: int = UNIT) -> tuple[list[bytes], int, int]:
    """Sources below `root`: the documents that they hold, in order; lines of JSON; how many of these are empty. `field`: of their text;
    `part`, `unit`: by which they will be cut, units at whole hundreds."""
    plain, packed, more = _lines(rng, 60), _lines(rng, 30), _lines(rng, 5)
    long = b"T" + text_like(rng, 9000) + b"\xe2\x82\xac" * 1000 + b"\n" + text_like(rng, 900)
    wide = 91 - len(field.encode())
    numbers = [f"{i:0{wide}d}" for i in range(2 * unit // 100)]
    hundreds = "".join(f'{{"{field}": "{number}"}}\n' for number in numbers)
    texts = {
        "a.jsonl": _json(rng, plain, field), "b.jsonl.gz": gzip.compress(_json(rng, packed, field)),
        "c.ndjson": b"\xef\xbb\xbf" + _json(rng, more, field),
        "cc.jsonl": hundreds.encode(),  # lines of 100 bytes: one begins at each border
        "d/long.txt": long, "d/mark.md": b"\xef\xbb\xbfmarked", "d/raw.txt": b"\xff\0" + any_bytes(rng, 77).replace(b"\n", b"."),
        "e.txt": b"", "f.txt": b"x", "photo.png": b"no text", ".git/config.txt": b"hidden", "g.txt": b"f1\n" * 99,
    }  # fmt: skip
    write_texts(root, texts)
    raw = parts_of(texts["d/raw.txt"], part)
    said = [*plain, *packed, *more, *numbers]
    found = [*(s.encode() for s in said), *parts_of(long, part), b"marked", *raw, b"x", *parts_of(texts["g.txt"], part)]
    return [text for text in found if text], len(said), sum(not text for text in said)


def _order(*names: Path | str, **more: object) -> prepare.Order:
    rules = sources.Rules(part=PART, labels=("lang",))
    return prepare.Order(tuple(map(str, names)), **{"rules": rules, "tokenizer": "bytes", "unit": UNIT, **more})  # type: ignore[arg-type]


def _split(texts: list[bytes], share: float) -> dict[str, list[bytes]]:
    """Documents by side, in order, as the handbook says."""
    place = [int(hashlib.sha256(text).hexdigest()[:16], 16) / 2**64 for text in texts]
    bound = share if min(place) < share else min(place) * (1 + 1e-12)
    return {"train": [t for t, p in zip(texts, place) if p >= bound], "validation": [t for t, p in zip(texts, place) if p < bound]}


def _tokens(texts: list[bytes], by: tokenizer.Tokenizer) -> list[int]:
    return [i for text in texts for i in [*by.encode(text).tolist(), by.eod]]


def _as_reference(rng: np.random.Generator) -> Measured:
    """Documents, their order, their sides, tokens, counts, against a reader that holds all in memory. All that may be set is drawn."""
    count = Checks()
    with folder() as root:
        saved = root / "own.json"
        tokenizer.BPETokenizer([(115, 101), (32, 32), (257, 108)]).save(saved)
        size = int(rng.integers(280, 320))
        for kind, field in (("bytes", "text"), (f"bpe:{size}", ("body", "t", "t\xe9xt")[int(rng.integers(3))]), (str(saved), "content")):
            part, unit = (PART, UNIT) if kind == "bytes" else (int(rng.integers(200, 2000)), 100 * int(rng.integers(12, 60)))
            texts, lines, empty = made_up(rng, root / field, field, part, unit)
            share, labels = float(rng.uniform(0.05, 0.4)), ("lang", "n", "none")[: int(rng.integers(1, 4))]
            rules = sources.Rules(field, labels * int(rng.integers(2, 4)), part, skip_bad=bool(rng.integers(2)))  # each counts once
            order = _order(root / field, tokenizer=kind, validation=share, rules=rules, unit=unit, sample=10**6, licence=f"CC {share}")
            made = prepare.prepare(order, root / f"out{count.cases}")
            sides = _split(texts, share)
            for side, expected in sides.items():
                stream, wanted = made.streams[side], _tokens(expected, made.tokenizer)
                came = stream.windows([0], len(stream))[0].tolist()
                count.that(came == wanted, f"{kind}: tokens, {side}")
                count.that(stream.documents == len(expected), f"{kind}: {stream.documents} documents instead of {len(expected)}, {side}")
                found = prepared.PreparedText((stream,), made.tokenizer)
                count.that(list(found.texts()) == expected, f"{kind}: text out of tokens, {side}")
                count.that((found.size, len(found.documents)) == (sum(map(len, expected)), len(expected)), f"{kind}: sizes, {side}")
                numbers = {"documents": len(expected), "tokens": len(wanted), "text_bytes": found.size}
                count.that(dict(made.facts["counts"][side]) == numbers, f"{kind}: counts, {side}")
            if kind == f"bpe:{size}":
                learned = tokenizer.BPETokenizer.train(sides["train"], size)
                count.that(made.tokenizer.hash == learned.hash, "what the tokenizer learned from")
            count.that(made.tokenizer.vocab_size == {"bytes": 257, f"bpe:{size}": size}.get(kind, 260), f"{kind}: vocabulary")
            count.that(not {*sides["train"]} & {*list(prepared.PreparedText((made.streams["validation"],), made.tokenizer).texts())},
                        "a text is on both sides")  # fmt: skip
            count.that((made.facts["empty"], made.facts["bad"], made.facts["licence"], made.facts["field"])
                        == (empty, 0, f"CC {share}", field), f"{kind}: empty, bad, licence, field")  # fmt: skip
            counted = {label: sum(values.values()) for label, values in made.facts["labels"].items()}
            count.that(counted == dict.fromkeys(labels, lines - empty), f"{kind}: labels: {counted}")
            count.that(set(made.facts["labels"]["lang"]) <= {"a", "b", "None"}, f"{kind}: values of a label")
    return count.measured()


def _labels(rng: np.random.Generator) -> Measured:
    """Values of a label are counted apart up to a bound, those that come first; the others together, in a unit and over all of them."""
    count, most = Checks(), sources.MOST_VALUES
    with folder() as root:
        values = [*range(most - 1), *rng.integers(0, 2 * most, 2000).tolist()]
        lines = [json.dumps({"text": f"{i}", "lang": value}) for i, value in enumerate(values)]
        write_texts(root, {"a.jsonl": "\n".join(lines).encode()})
        due = Counter(map(str, values))
        first = [str(value) for value in dict.fromkeys(values)][:most]
        for unit in (50_000, 1 << 20):
            made = prepare.prepare(_order(root / "a.jsonl", unit=unit), root / f"{unit}")
            came = dict(made.facts["labels"]["lang"])
            together = came.pop(sources.OTHER_VALUES, 0)
            count.that(len(came) == most < len(due), f"{len(came)} values apart, of {len(due)}")
            count.that(together + sum(came.values()) == len(values), f"{together} and {sum(came.values())} are not {len(values)}")
            if unit > 50_000:
                count.that(came == {value: due[value] for value in first}, "values apart are not those that came first")
    return count.measured()


def _small_sources(rng: np.random.Generator) -> Measured:
    """Where no document lies below the share, the lowest is validated on, with its copies, and no tokenizer learns from it."""
    count = Checks()
    with folder() as root:
        for number in range(2, 9):
            own = [bytes([b"#@~^|%+*"[i]]) * 8 for i in range(number)]  # a word of one document alone
            texts = [b"%d %s" % (i, b"\n".join((text_like(rng, 30), *[own[i]] * 9))) for i in range(number)]
            for i, text in enumerate([*texts, texts[0]]):
                write_texts(root / f"t{number}", {f"{i}.txt": text})
            made = prepare.prepare(_order(root / f"t{number}", validation=1e-9), root / f"out{number}")
            lowest = min(texts, key=lambda text: hashlib.sha256(text).hexdigest())
            found = list(prepared.PreparedText((made.streams["validation"],), made.tokenizer).texts())
            count.that(found == [lowest] * (2 if lowest == texts[0] else 1), f"validation of {number} documents: {found}")
            order = _order(root / f"t{number}", validation=1e-9, tokenizer=f"bpe:{257 + 2 * (number - 1)}")
            learned = prepare.prepare(order, root / f"bpe{number}").tokenizer
            alone = [len(learned.encode(one)) == len(one) for one in own]
            count.that(alone == [text == lowest for text in texts], f"the tokenizer of {number} documents joins the bytes of {alone}")
    return count.measured()


def contents(root: Path) -> dict[str, str]:
    """Path -> SHA-256 of every file of a folder."""
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}


def prepared_digest(data: bytes) -> str:
    """Hash of the shards, listings and tokenizer made of `data` in four files (also called in a fresh process)."""
    with folder() as root:
        write_texts(root / "texts", {f"{i}.txt": b"T" + data[i::4] for i in range(4)})
        prepare.prepare(_order(root / "texts", tokenizer="bpe:280"), root / "out")
        found = {name: digest for name, digest in contents(root / "out").items() if name != prepared.MANIFEST}
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(prepared_digest, text_like(rng, 6000), rng)


def _any_workers(rng: np.random.Generator) -> Measured:
    """Every byte of the folder is the same from one process and from three, and from one whose files are as old as if the last unit had
    been ready first."""
    count = Checks()
    with folder() as root:
        made_up(rng, root / "texts")
        one, three = (prepare.prepare(_order(root / "texts"), root / f"{n}", workers=n) for n in (1, 3))
        count.that(contents(one.folder) == contents(three.folder), "the number of workers shows")
        with mock.patch.object(files.os, "replace", side_effect=_ever_older()):
            last_first = prepare.prepare(_order(root / "texts"), root / "last-first")
        count.that(contents(one.folder) == contents(last_first.folder), "who was ready first shows")
        count.that(len(one.streams["train"].shards) > 3, "nothing was shared out")
        count.add(json.dumps({k: v for k, v in contents(one.folder).items() if k != prepared.MANIFEST}, sort_keys=True).encode())
    return count.measured()


def _ever_older() -> Callable[[str, str], None]:
    """os.replace; each file that it gives a name is older than the one before."""
    replace, age = os.replace, itertools.count(1)

    def once(source: str, target: str) -> None:
        replace(source, target)
        then = 2e9 - next(age)
        os.utime(target, (then, then))

    return once


class _Killed(Exception):
    """What stands for a kill: no handler of a full disk takes it."""


def _dying(writes: int) -> Callable[[str, str], None]:
    """os.replace that works `writes` times, then ends whoever calls it."""
    left, replace = [writes], os.replace

    def once(source: str, target: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise _Killed
        replace(source, target)

    return once


def _after_kills(rng: np.random.Generator) -> Measured:
    """Ended after any unit, before or after its record, and with any of what was made damaged: run again, the same bytes."""
    count = Checks()
    with folder() as root:
        made_up(rng, root / "texts")
        order, out = _order(root / "texts"), root / "out"
        whole = contents(prepare.prepare(order, root / "whole").folder)
        for when in (0, 1, *rng.integers(0, 6, 3), 9):  # files written before the end; those of before are kept
            with mock.patch.object(files.os, "replace", side_effect=_dying(int(when))), suppress(_Killed):
                prepare.prepare(order, out)
            count.refuses(InputError, prepared.open_prepared, "an unfinished folder", out)
            (out / f".left.{when}.alpha-tmp").write_bytes(b"of a killed process")
            recorded = [path.stem for path in out.glob("units/*.json")]
            if recorded:
                path = next(out.glob(f"*/{recorded[int(rng.integers(len(recorded)))]}-*.tokens"))
                path.write_bytes(path.read_bytes()[:-9])
        begun = []
        prepare.prepare(order, out, told=lambda done, total: begun.append(done / total))
        count.that(begun[0] > 0, "nothing was kept")
        count.that(contents(out) == whole, "kills show")
        prepare.prepare(order, out)
        count.that(contents(out) == whole, "preparing again changes what is finished")
    return count.measured()


def _campaign(rng: np.random.Generator) -> Measured:
    """Drawn corruptions of every file and region: all refused, by one error that says what it is."""
    count = Checks()
    with folder() as root:
        made_up(rng, root / "texts")
        out = prepare.prepare(_order(root / "texts", tokenizer="bpe:280"), root / "out").folder
        struck, missed = corruption.campaign(out, lambda: prepared.open_prepared(out, verify=True), rng, 150)
        for what in struck.elements():
            count.that(not any(one.startswith(what) for one in missed), f"not refused: {missed[:3]}")
    return count.measured()


def _seen_when_read(rng: np.random.Generator) -> Measured:
    """Opened without reading all, a damaged folder is refused at the latest when the text is read."""
    count = Checks()
    with folder() as root:
        made_up(rng, root / "texts")
        out = prepare.prepare(_order(root / "texts"), root / "out").folder

        def read() -> None:
            data = prepared.open_prepared(out)
            for stream in data.streams.values():
                for _ in prepared.PreparedText((stream,), data.tokenizer).texts():
                    pass
                stream.windows([0], len(stream))

        _, missed = corruption.campaign(out, read, rng, 60)
        count.that(not missed, f"not refused: {missed[:3]}")
    return count.measured()


def _bad_sources(rng: np.random.Generator) -> Measured:
    """Each is refused with the file and the line; what `skip_bad` may leave out is counted, and the rest is as without it."""
    count = Checks()
    with folder() as root:
        good = [json.dumps({"text": f"document {i}"}) for i in range(400)]
        bad = {"torn": b'{"text": "a', "a list": b"[1]", "no text": b'{"txt": "a"}', "no string": b'{"text": 3}', "NaN": b'{"text": NaN}',
               "half": b'{"text": "a",', "no UTF-8": b'{"text": "\xff"}', "half a pair": b'{"text": "\\ud800"}', "deep": b"[" * 100_000}
        for name, line in bad.items():
            at = int(rng.integers(0, 400))
            path = root / f"{name}.jsonl"
            path.write_bytes(b"\n".join([*(g.encode() for g in good[:at]), line, *(g.encode() for g in good[at:])]))
            for packed in (path, root / f"{name}.jsonl.gz"):
                if packed != path:
                    packed.write_bytes(gzip.compress(path.read_bytes()))
                try:
                    prepare.prepare(_order(packed, rules=sources.Rules(), validation=0.01), root / f"{packed.name}-1")
                except InputError as error:
                    said, _, why = str(error.came).partition(f"{packed}, line {at + 1}:")
                    count.that(not said and bool(why) and "line" not in why, f"{name}: {error.came}")  # one place, one number
                else:
                    count.that(False, f"{name} is a document")
            made = prepare.prepare(_order(path, rules=sources.Rules(skip_bad=True)), root / f"{name}-2")
            count.that((made.facts["bad"], sum(c["documents"] for c in made.facts["counts"].values())) == (1, 400), f"{name}: counted")
        (root / "long.jsonl").write_bytes(b'{"text": "a"}\n{"text": "' + b"b" * 9000 + b'"}\n{"text": "c"}\n{"text": "d"}\n')
        order = _order(root / "long.jsonl", rules=sources.Rules(longest=4000))
        count.refuses(InputError, prepare.prepare, "a long line", order, root / "long-1")
        for unit in (UNIT, 1 << 20):
            order = _order(root / "long.jsonl", rules=sources.Rules(longest=4000, skip_bad=True), unit=unit)
            made = prepare.prepare(order, root / f"long-{unit}")
            count.that((made.facts["bad"], sum(len(s.document_starts) - 1 for s in made.streams.values())) == (1, 3), "after a long line")
        packed_lines = gzip.compress(b'{"text": "a"}\n' * 999)
        write_texts(root / "wide", {"a.txt": b"a", "b.txt": b"b", "c.txt": "text".encode("utf-16")})
        count.refuses(InputError, prepare.prepare, "UTF-16", _order(root / "wide"), root / "wide-out")
        write_texts(root / "other", {"mark.jsonl": b"\xef\xbb\xbf", "no.jsonl.gz": b"no gzip",
                                     "torn.jsonl.gz": packed_lines[:-9], "text.txt.gz": gzip.compress(b"a")})
        for name in ("mark.jsonl", "torn.jsonl.gz", "no.jsonl.gz", "text.txt.gz", "nowhere.txt", "*.none", "***"):
            order = _order(root / "other" / name, rules=sources.Rules(skip_bad=True))
            count.refuses(InputError, prepare.prepare, name, order, root / f"{name[0]}-out")
        write_texts(root, {"one.txt": b"alone", "two.txt": b"alone"})
        count.refuses(InputError, prepare.prepare, "one text alone", _order(root / "one.txt", root / "two.txt"), root / "one")
        for share in (0.0, 1.0, float("nan")):
            count.refuses(InputError, prepare.prepare, f"share {share}", _order(root / "one.txt", validation=share), root / "share")
        for kind in ("bpe:", "bpe:x", "bpe:3", "bpe:9999", "bpe:" + "9" * 5000, str(root / "none.json")):
            order = _order(root / "long.jsonl", tokenizer=kind, rules=sources.Rules())
            count.refuses(InputError, prepare.prepare, kind, order, root / f"kind{count.cases}")
    return count.measured()


def _folders(rng: np.random.Generator) -> Measured:
    """What is in the way is refused: another preparation, other files, another writer, a full disk; and parts that do not go together."""
    count = Checks()
    with folder() as root:
        made_up(rng, root / "texts")
        order, out = _order(root / "texts"), root / "out"
        for begun, writes in ((_order(root / "texts", tokenizer="bpe:300"), 3), (order, 8)):  # the first makes no unit: another may follow
            with mock.patch.object(files.os, "replace", side_effect=_dying(writes)), suppress(_Killed):
                prepare.prepare(begun, out)
        changed = (_order(root / "texts", validation=0.3), _order(root / "texts", tokenizer="bpe:300"), _order(root / "texts" / "a.jsonl"))
        for other in changed:
            count.refuses(InputError, prepare.prepare, "other options, begun", other, out)
        with mock.patch.object(files.os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
            count.refuses(MachineError, prepare.prepare, "a full disk", order, out)
        handle = os.open(out, os.O_RDONLY)
        files.hold(handle)
        count.refuses(BusyError, prepare.prepare, "a second writer", order, out)
        os.close(handle)
        whole = prepare.prepare(order, out)
        for other in changed:
            count.refuses(InputError, prepare.prepare, "other options, done", other, out)
        count.that(whole.tokenizer.kind == "bytes", "the tokenizer of another try")
        (out / "train").rename(out / "away")
        (out / "validation").rename(out / "train")
        (out / "away").rename(out / "validation")
        count.refuses(CorruptError, prepared.open_prepared, "train and validation exchanged", out)
        (out / "train").rename(out / "away")
        (out / "validation").rename(out / "train")
        (out / "away").rename(out / "validation")
        late = root / "texts" / "f.txt"
        os.utime(late, ns=(1, 1))
        count.refuses(InputError, prepare.prepare, "a file that changed", order, out)
        count.refuses(InputError, prepare.prepare, "a folder of something else", order, root / "texts" / "d")
        count.refuses(InputError, prepared.open_prepared, "a folder of something else", root / "texts")
        tokenizer.BPETokenizer([(97, 98)]).save(out / prepared.TOKENIZER)
        count.refuses(CorruptError, prepared.open_prepared, "another tokenizer", out)
        whole.tokenizer.save(out / prepared.TOKENIZER)
        content = {k: v for k, v in json.loads((out / prepared.MANIFEST).read_bytes()).items() if k not in ("sha256", "format", "version")}
        for version, facts, kind in ((2, content, InputError), (1, {**content, "streams": {}}, CorruptError),
                                     (1, {**content, "tokenizer": "0" * 64}, CorruptError)):
            (out / prepared.MANIFEST).write_bytes(file_bytes(prepared.FORMAT, version, facts))
            count.refuses(kind, prepared.open_prepared, f"a description of version {version}", out)
        shutil.rmtree(out)
    return count.measured()


CASES: Cases = {
    "parity": [
        ("documents, sides, tokens and counts as the reference", _as_reference),
        ("values of a label are counted apart up to a bound", _labels),
        ("small sources have something to validate on", _small_sources),
        ("each source is told, and what it holds", limits.of_sources),
        ("a tokenizer learns from what was asked for", limits.small_samples),
        ("parts and lines of any length", limits.lines_and_parts),
        ("frames hold the documents of the plain file", packed.in_frames),
        ("rows are documents", packed.in_rows),
        ("prepared data is no text", walked.prepared_within),
    ],
    "determinism": [
        ("files are the same in a fresh process", _same_everywhere),
        ("the number of workers does not matter", _any_workers),
        ("kills do not matter", _after_kills),
        ("a worker makes the same bytes", limits.workers),
    ],
    "faults": [
        ("drawn corruptions are refused", _campaign),
        ("a damaged folder is refused when it is read", _seen_when_read),
        ("bad sources are refused or counted", _bad_sources),
        ("folders in the way are refused", _folders),
        ("what no preparation makes is refused", limits.refused_folders),
        ("what cannot be reached is named", walked.unreached),
    ],
}
