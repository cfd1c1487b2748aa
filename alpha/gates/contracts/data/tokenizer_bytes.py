"""Cases of `tokenizer.bytes`."""

from __future__ import annotations

import hashlib

import numpy as np

from alpha.component import Measured
from alpha.data import tokenizer, tokenizer_file
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data.support import Cases, any_bytes, folder, same_everywhere, stdlib_texts
from alpha.gates.contracts.data.tokenizer_bpe import damaged_files, full_disk

_FROZEN_HASH = "ae14f532b854b6754ed8600b8aca05200b65c38c9bba988ab36f8276ef7f7d14"


def _ids_are_bytes(rng: np.random.Generator) -> Measured:
    count = Checks()
    made = tokenizer.ByteTokenizer()
    for data in (b"", bytes(range(256)), any_bytes(rng, 5000), b"\r\n\n\r\xff\r\n", *stdlib_texts(rng, 2, 20_000)):
        ids = made.encode(data)
        count.that(ids.tolist() == list(data) and ids.dtype == np.uint16, f"ids of {data[:40]!r}")
        count.that(made.decode(ids) == data, f"round trip of {data[:40]!r}")
        count.that(int(made.byte_lengths[ids].sum()) == len(data), "byte lengths do not add up")
    count.that(made.vocab_size == 257 and made.eod == 256 and made.decode([104, 256, 105]) == b"hi", "the end of a document")
    with folder() as root:
        made.save(root / "t.json")
        back = tokenizer_file.load_tokenizer(root / "t.json")
    count.that(isinstance(back, tokenizer.ByteTokenizer) and back.hash == made.hash, "save and load")
    return count.measured()


def bytes_digest(data: bytes) -> str:
    """Hash of the tokenizer and of the ids of `data` (also called in a fresh process)."""
    made = tokenizer.ByteTokenizer()
    return f"{made.hash} {hashlib.sha256(made.encode(data).tobytes()).hexdigest()}"


def _same_everywhere(rng: np.random.Generator) -> Measured:
    return same_everywhere(bytes_digest, any_bytes(rng, 4000), rng)


def _hash_is_frozen(rng: np.random.Generator) -> Measured:
    count = Checks()
    made = tokenizer.ByteTokenizer()
    count.that(made.hash == _FROZEN_HASH, f"the hash of version 1 changed: {made.hash}")
    count.that(made.hash != tokenizer.BPETokenizer([]).hash, "two kinds share a hash")
    count.add(made.hash.encode())
    return count.measured()


def _damaged(rng: np.random.Generator) -> Measured:
    return damaged_files(rng, tokenizer.ByteTokenizer())


def _full_disk(rng: np.random.Generator) -> Measured:
    return full_disk(rng, tokenizer.ByteTokenizer())


def _misuse(rng: np.random.Generator) -> Measured:
    count = Checks()
    for ids in ([257], [-1], [0.5], [[1]], [0, int(rng.integers(257, 60_000))]):
        count.refuses(InputError, tokenizer.ByteTokenizer().decode, f"ids {ids}", ids)
    return count.measured()


CASES: Cases = {
    "parity": [("ids are the bytes and come back", _ids_are_bytes)],
    "determinism": [("ids are the same in a fresh process", _same_everywhere), ("the hash is frozen", _hash_is_frozen)],
    "faults": [
        ("damaged files are refused", _damaged),
        ("a full disk loses nothing", _full_disk),
        ("misuse is refused", _misuse),
    ],
}
