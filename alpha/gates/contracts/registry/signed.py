"""What signatures of evidence promise: each line of a class that asks for them is signed by one that its class names, at its place; files
are read and written as they are said to be. Keys are stand-ins, so that no package beside ours is asked for. Floor 7."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from alpha.component import Measured
from alpha.errors import CorruptError, InputError, MachineError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry.common import HERE, OTHER, folder, make
from alpha.registry import signatures
from alpha.registry.catches import Catch, save_catches
from alpha.registry.evidence import save

SIGN = "sign where it was measured: `alpha gate sign --key FILE --signer NAME`"
KEY = "an Ed25519 key without a passphrase"
PARTS = ("", ".exceptions", ".hazmat", ".hazmat.primitives", ".hazmat.primitives.asymmetric", ".hazmat.primitives.asymmetric.ed25519",
         ".hazmat.primitives.serialization")


class _NoSignature(Exception):
    """What the package raises where a signature is another one."""


class _Public:
    def __init__(self, seed: bytes) -> None:
        self.seed = seed

    def verify(self, signature: bytes, text: bytes) -> None:
        if signature != signature_of(self.seed, text):
            raise _NoSignature

    def public_bytes(self, encoding: object, form: object) -> bytes:
        if (encoding, form) != ("as OpenSSH encodes", "as OpenSSH writes"):
            raise TypeError(f"{encoding} {form}")
        return b"ssh-ed25519 " + base64.b64encode(self.seed)


class _Private:
    def __init__(self, seed: bytes) -> None:
        self.seed = seed

    def sign(self, text: bytes) -> bytes:
        return signature_of(self.seed, text)

    def public_key(self) -> _Public:
        return _Public(self.seed)


def signature_of(seed: bytes, text: bytes) -> bytes:
    """64 bytes that the seed and the text give."""
    return hashlib.sha512(seed + text).digest()


def _load_private(text: bytes, password: object) -> object:
    word, _, seed = text.partition(b" ")
    if password is not None or word == b"locked":
        raise TypeError("Password was not given but private key is encrypted")
    if word not in (b"key", b"rsa"):
        raise ValueError("Not OpenSSH private key format")
    return _Private(seed) if word == b"key" else {"a": "key of another kind"}


def _load_public(text: bytes) -> _Public:
    return _Public(base64.b64decode(text.removeprefix(b"ssh-ed25519 "), validate=True))


@contextmanager
def with_keys() -> Iterator[None]:
    """The package `cryptography`, as far as it is used, with keys that a seed makes."""
    made = {f"cryptography{part}": ModuleType(f"cryptography{part}") for part in PARTS}
    known: dict[str, dict[str, Any]] = {
        ".exceptions": {"InvalidSignature": _NoSignature}, ".hazmat.primitives.asymmetric.ed25519": {"Ed25519PrivateKey": _Private},
        ".hazmat.primitives.serialization": {
            "load_ssh_private_key": _load_private, "load_ssh_public_key": _load_public,
            "Encoding": mock.Mock(OpenSSH="as OpenSSH encodes"), "PublicFormat": mock.Mock(OpenSSH="as OpenSSH writes")}}
    for part, names in known.items():
        vars(made[f"cryptography{part}"]).update(names)
    with mock.patch.dict(sys.modules, made):
        yield


class _Committed:
    """Evidence of two classes, of drawn numbers of lines, and keys of two signers."""

    def __init__(self, at: Path, rng: np.random.Generator) -> None:
        self.root, self.seeds = at / "evidence", {name: rng.bytes(32) for name in ("lab", "desk")}
        for machine in (HERE, OTHER):
            for component in ("made.b", "made.a"):
                gates = ["faults", *(g for g in ("parity", "gradient") if rng.random() < 0.5)]
                save([replace(make(g, component=component, machine=machine), nonce=rng.bytes(16).hex()) for g in gates], self.root)
            save_catches([Catch(fault="f", component="made.a", gate="parity", machine=machine.key, digests={}, record=None, error="died")],
                         self.root)
        for name, seed in self.seeds.items():
            (at / name).write_bytes(b"key " + seed)

    def key(self, name: str) -> Path:
        return self.root.parent / name

    def lines(self, machine: str = HERE.key) -> list[tuple[Path, int, str]]:
        """Every line of a class with its place: catches come first, for `_` comes before letters."""
        names = ("_catches.jsonl", "made.a.jsonl", "made.b.jsonl")
        return [(self.root / machine / name, i, line) for name in names
                for i, line in enumerate((self.root / machine / name).read_text().splitlines(), 1)]

    def named(self, *signers: str, machine: str = HERE.key) -> str:
        """Lines of the file of signers."""
        return "".join(f"{machine} {name} ssh-ed25519 {base64.b64encode(self.seeds[name]).decode()}\n" for name in signers)

    def names(self, text: str) -> None:
        """Write the file of signers."""
        (self.root.parent / "signers.txt").write_text(text)

    def signed(self, by: Callable[[int], str | None], machine: str = HERE.key) -> str:
        """The file of signatures in which the line of each number is signed by this signer."""
        entries = []
        for i, (path, _, line) in enumerate(self.lines(machine)):
            text = f"alpha.evidence.v1\n{machine}\n{path.name}\n{line}\n".encode()
            who = by(i)
            if who is not None:
                signature = base64.b64encode(signature_of(self.seeds[who], text)).decode()
                entries.append(f"{hashlib.sha256(text).hexdigest()} {who} {signature}\n")
        return "".join(sorted(entries))


def written(rng: np.random.Generator) -> Measured:
    """Signing a class signs its lines, or those that are named, and keeps what others signed; the file is as a dull account writes it."""
    checks = Checks()
    with with_keys(), folder() as at:
        c = _Committed(at, rng)
        file, lines = c.root / HERE.key / "_signatures.txt", c.lines()
        told = signatures.sign(c.root, HERE.key, c.key("lab"), "lab")
        checks.that(told == (len(lines), c.named("lab").rstrip("\n")), f"told: {told}")
        checks.that(file.read_text() == c.signed(lambda i: "lab"), "the file of signatures")
        checks.that(not (c.root / OTHER.key / "_signatures.txt").exists(), "another class is signed, too")
        some = {i for i in range(len(lines)) if rng.random() < 0.5} | {0}
        hashes = {hashlib.sha256(lines[i][2].encode()).hexdigest() for i in some}
        told = signatures.sign(c.root, HERE.key, c.key("desk"), "desk", hashes)
        checks.that(told == (len(some), c.named("desk").rstrip("\n")), f"some of them: {told}")
        checks.that(file.read_text() == c.signed(lambda i: "desk" if i in some else "lab"), "signatures of others are lost")
        found = signatures.load(c.root, HERE.key)
        wanted = {d: (who, base64.b64decode(s)) for d, who, s in (x.split(" ") for x in file.read_text().splitlines())}
        checks.that(found == wanted, "what is read is not what is written")
        newer = replace(make("faults", component="made.b"), nonce=rng.bytes(16).hex())
        save([newer], c.root)
        gone = {x for _, _, x in lines} - {x for _, _, x in c.lines()}
        was = c.signed(lambda i: None if c.lines()[i][2] == newer.line() else "desk" if i in some else "lab")
        told = signatures.sign(c.root, HERE.key, c.key("lab"), "lab", set())
        checks.that(len(gone) == 1 and told[0] == 0 and file.read_text() == was, "the signature of a line that is gone is kept")
        c.names(c.named("lab", "desk") + c.named("lab", machine=OTHER.key))
        public = {name: c.named(name).split(" ", 2)[2].rstrip("\n") for name in ("lab", "desk")}
        checks.that(signatures.signers(c.root) == {HERE.key: public, OTHER.key: {"lab": public["lab"]}}, "the signers")
        checks.that(signatures.signers(at / "none" / "evidence") == {} == signatures.load(c.root, OTHER.key), "files that are not there")
    return checks.measured()


def judged(rng: np.random.Generator) -> Measured:
    """Each line that its class asks a signature of, and that has none, one of nobody, or another one's, is named with its place."""
    checks = Checks()
    with with_keys(), folder() as at:
        c = _Committed(at, rng)
        both = {machine.key: c.root / machine.key / "_signatures.txt" for machine in (HERE, OTHER)}
        checks.that(signatures.problems(c.root) == [], "evidence that nobody asks a signature of")
        for text, asking in ((c.named("lab"), [HERE.key]),
                             (c.named("lab", machine=OTHER.key) + c.named("lab", "desk"), [OTHER.key, HERE.key])):
            c.names(text)
            for _ in range(4):
                wanted = list[tuple[Path, int, str]]()
                for machine in asking:
                    lines = c.lines(machine)
                    fates = rng.integers(4, size=len(lines)).tolist()  # by lab, by desk, by nobody, forged
                    text = c.signed(lambda i, fates=fates: ("lab", "desk", None, "lab")[fates[i]], machine)  # type: ignore[misc]
                    wanted += [(path, number, why) for (path, number, _), fate in zip(lines, fates)
                               if (why := _why(fate, machine == HERE.key and len(asking) == 2))]
                    both[machine].write_text(_forged(c, text, lines, fates, machine))
                found = signatures.problems(c.root)
                checks.that(found == wanted, f"{[x for x in found if x not in wanted][:2]} {[x for x in wanted if x not in found][:2]}")
        moved = c.lines()[0]
        both[HERE.key].write_text(c.signed(lambda i: "lab"))
        both[OTHER.key].write_text(c.signed(lambda i: "lab", OTHER.key))
        checks.that(signatures.problems(c.root) == [], "all are signed")
        c.names(c.named("desk"))
        found = signatures.problems(c.root)
        wanted = [(path, number, "its signer 'lab' is not named for its class") for path, number, _ in c.lines()]
        checks.that(found == wanted, f"other signers: {found[:1]}")
        c.names(c.named("lab"))
        (c.root / HERE.key / "made.b.jsonl").rename(c.root / HERE.key / "made.c.jsonl")
        found = signatures.problems(c.root)
        checks.that({(p.name, why) for p, _, why in found} == {("made.c.jsonl", "it is not signed, and its class asks for signatures")}
                    and moved[0].name not in {p.name for p, _, _ in found}, f"under another name: {found}")
        c.names(c.named("lab", machine="cuda_sm90_H100") + c.named("lab", machine="cuda_sm90_B200") + c.named("lab"))
        found = signatures.problems(c.root)
        told = "signers of cuda_sm90_B200, which has no evidence"
        checks.that(found == [(at / "signers.txt", 0, told)], f"signers of a class without evidence: {found}")
    return checks.measured()


def _why(fate: int, desk_is_named: bool) -> str:
    return ("", "" if desk_is_named else "its signer 'desk' is not named for its class",
            "it is not signed, and its class asks for signatures", "its signature is not lab's")[fate]


def _forged(c: _Committed, text: str, lines: Sequence[tuple[Path, int, str]], fates: Sequence[int], machine: str) -> str:
    """The file with other bytes for the signatures of lines of the last fate."""
    for (path, _, line), fate in zip(lines, fates):
        signed = f"alpha.evidence.v1\n{machine}\n{path.name}\n{line}\n".encode()
        if fate == 3:
            real, other = (base64.b64encode(signature_of(c.seeds[who], signed)).decode() for who in ("lab", "desk"))
            text = text.replace(real, other)
    return text


def refused(rng: np.random.Generator) -> Measured:
    """Damaged files of signers and signatures, names and keys that are none, a package that is not there: each in its own words."""
    checks = Checks()
    told: tuple[object, object, object, object]
    with with_keys(), folder() as at:
        c = _Committed(at, rng)
        sound = c.named("lab")
        words = sound.split()
        for wrong in (" ".join(words[:3]), f"{sound.strip()} more", sound.strip().replace("ssh-ed25519", "ssh-rsa"),
                      sound.strip().replace(" lab ", " -lab "), sound.strip().replace(" lab ", f" {'l' * 65} "), sound.strip(), ""):
            c.names(f"{sound}{wrong}\n{sound}")
            told = ("the file of signers cannot be read", f"signers.txt:2: {wrong[:80]}",
                    "class, a name that the class has once, ssh-ed25519, key", "mend the line")
            checks.tells(CorruptError, told, lambda: signatures.signers(c.root))
        c.names(sound.replace(" lab ", f" {'l' * 64} "))
        checks.that([*signatures.signers(c.root)[HERE.key]] == ["l" * 64], "the longest name")
        c.names(f"x{sound}")
        checks.raises(InputError, "signers of a class that is none", lambda: signatures.signers(c.root), naming=f"x{HERE.key}")
        c.names(sound)
        file = c.root / HERE.key / "_signatures.txt"
        signed = c.signed(lambda i: "lab")
        first, second, *rest = signed.splitlines(keepends=True)
        digest, who, signature = first.split()
        for text in ("".join((second, first, *rest)), first + signed,  # out of order, twice
                     signed.replace(signature, signature[:-1]), signed.replace(signature, "=" + signature[1:]),
                     signed.replace(digest, digest[1:]), signed.replace(f" {who} ", "  ", 1), signed + "more\n",
                     signed.replace(signature, f"AA=={signature[4:]}")):
            file.write_text(text)
            told = ("a file of signatures cannot be read", f"{HERE.key}/_signatures.txt: {text.count(chr(10))} lines",
                    "sorted lines of hash, signer, signature", "restore it, or remove it and sign again")
            checks.tells(CorruptError, told, lambda: signatures.load(c.root, HERE.key))
        file.unlink()
        for name in ("", "a b", "-lab", "l" * 65, "é"):
            told = ("a signer cannot be called so", name, "1 to 64 letters, digits, dots, dashes, underscores or @", None)
            checks.tells(InputError, told, lambda name=name: signatures.sign(c.root, HERE.key, c.key("lab"), name))  # type: ignore[misc]
        for name, key, why in (("rsa", b"rsa 1", "dict"), ("none", b"no key", "Not OpenSSH private key format"),
                                ("locked", b"locked", "Password was not given but private key is encrypted")):
            c.key(name).write_bytes(key)
            _no_key(checks, c, name, why)
        _no_key(checks, c, "gone", f"[Errno 2] No such file or directory: '{c.key('gone')}'")
        checks.that(not file.exists(), "something was signed")
        c.names(f"{HERE.key} lab ssh-ed25519 A\n")
        told = ("the file of signers holds a key that is none", "ssh-ed25519 A", "ssh-ed25519 and a key in Base64", "mend the line")
        checks.tells(CorruptError, told, lambda: signatures.problems(c.root))
    with folder() as at, mock.patch.dict(sys.modules, dict.fromkeys((f"cryptography{part}" for part in PARTS), None)):
        c = _Committed(at, rng)
        c.names(c.named("lab"))
        calls: Sequence[Callable[[], Any]] = (lambda: signatures.sign(c.root, HERE.key, c.key("lab"), "lab"),
                                              lambda: signatures.problems(c.root))
        for call in calls:
            checks.raises(MachineError, "without the package", call, naming="do:       pip install 'alpha[sign]'")
            checks.raises(MachineError, "without the package", call, naming="signatures need a package that is not installed")
            checks.raises(MachineError, "without the package", call, naming="expected: the package cryptography")
    return checks.measured()


def _no_key(checks: Checks, c: _Committed, name: str, why: str) -> None:
    told = ("this file holds no key to sign with", f"{c.key(name)} ({why})", KEY, "ssh-keygen -t ed25519 -N '' -f FILE")
    checks.tells(InputError, told, lambda: signatures.sign(c.root, HERE.key, c.key(name), "lab"))
