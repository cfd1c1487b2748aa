"""Signatures of evidence by whoever measured it, where a machine class asks for them. Floor 3.

`baselines/signers.txt` holds a line per signer: machine class, name, and a public key as OpenSSH writes it (`ssh-ed25519 AAAA...`).
Every line of evidence and of catches of a class that is named there must be signed by one of its signers. A class that is not named
asks for none.

`<class>/_signatures.txt` beside the evidence holds a line per signed line: SHA-256 of the message, signer, signature in Base64.
The message is `alpha.evidence.v1`, class, file name and line, so that a signature holds at no other place. Signatures are Ed25519
(RFC 8032), computed by the package `cryptography`. A signature says who answers for a line. It does not say that the line was measured.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from alpha.errors import CorruptError, InputError, MachineError
from alpha.files import read_regular
from alpha.registry.evidence import classes, lines_of, locked, write_atomic
from alpha.registry.gpu import class_of_key
from alpha.registry.history import hash_of

NAME = "_signatures.txt"

SIGNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
"""What a signer is called."""

_LINE = re.compile(r"([0-9a-f]{64}) (\S+) ([A-Za-z0-9+/=]{88})")


def signers_path(root: Path) -> Path:
    """The file of signers that belongs to an evidence root: beside its folder."""
    return root.parent / "signers.txt"


def message(machine: str, file: str, line: str) -> bytes:
    """What is signed for one line."""
    return f"alpha.evidence.v1\n{machine}\n{file}\n{line}\n".encode()


def signers(root: Path) -> dict[str, dict[str, str]]:
    """machine class -> signer -> public key; {} where nobody is named. CorruptError where a line is none."""
    path = signers_path(root)
    found: dict[str, dict[str, str]] = {}
    for number, line in enumerate(lines_of(path) if path.is_file() else (), 1):
        words = line.split(" ")
        if len(words) != 4 or words[2] != "ssh-ed25519" or not SIGNER.fullmatch(words[1]) or words[1] in found.get(words[0], {}):
            raise CorruptError("the file of signers cannot be read", came=f"{path.name}:{number}: {line[:80]}",
                               expected="class, a name that the class has once, ssh-ed25519, key", do="mend the line")
        found.setdefault(class_of_key(words[0]).key, {})[words[1]] = f"{words[2]} {words[3]}"
    return found


def load(root: Path, machine: str) -> dict[str, tuple[str, bytes]]:
    """SHA-256 of a message -> signer and signature; CorruptError where a line is none or the lines are not sorted, one per message."""
    path = root / machine / NAME
    lines = lines_of(path) if path.is_file() else []
    matched = [_LINE.fullmatch(line) for line in lines]
    try:
        found = {m[1]: (m[2], base64.b64decode(m[3], validate=True)) for m in matched if m}
    except binascii.Error:
        found = {}
    if list(found) != sorted(found) or len(found) != len(lines):
        raise CorruptError("a file of signatures cannot be read", came=f"{machine}/{NAME}: {len(lines)} lines",
                           expected="sorted lines of hash, signer, signature", do="restore it, or remove it and sign again")
    return found


def _lines(root: Path, machine: str) -> Iterator[tuple[Path, int, str]]:
    for path in sorted((root / machine).glob("*.jsonl")):
        for number, line in enumerate(read_regular(path).decode("ascii", "replace").split("\n")[:-1], 1):
            yield path, number, line


def sign(root: Path, machine: str, key: Path, signer: str, only: Collection[str] | None = None) -> tuple[int, str]:
    """Sign the lines of one class: those whose hash (`history.hash_of`) is in `only`; None signs all. A signature that was there is
    replaced; one whose line is gone is dropped. Returns how many are signed by this, and the line that names the signer.

    InputError: a name or a key file that is none. MachineError: `cryptography` is not installed, or the disk refuses.
    """
    if not SIGNER.fullmatch(signer):
        raise InputError("a signer cannot be called so", came=signer, expected="1 to 64 letters, digits, dots, dashes, underscores or @")
    private = _private(key)
    with locked(root):
        before, after, fresh = load(root, machine), {}, 0
        for path, _, line in _lines(root, machine):
            text = message(machine, path.name, line)
            digest = hashlib.sha256(text).hexdigest()
            if only is None or hash_of(line.encode()) in only:
                after[digest] = (signer, private.sign(text))
                fresh += 1
            elif digest in before:
                after[digest] = before[digest]
        write_atomic(root / machine / NAME,
                     "".join(f"{d} {who} {base64.b64encode(signed).decode()}\n" for d, (who, signed) in sorted(after.items())))
    return fresh, f"{machine} {signer} {_public_text(private)}"


def problems(root: Path) -> list[tuple[Path, int, str]]:
    """Path, line and reason of each line of evidence that is not signed as its class asks."""
    asked = signers(root)
    if not asked:
        return []
    if absent := sorted(set(asked) - set(classes(root))):
        return [(signers_path(root), 0, f"signers of {absent[0]}, which has no evidence")]
    wrong = []
    for machine, keys in asked.items():
        public, signed = {name: _public(text) for name, text in keys.items()}, load(root, machine)
        for path, number, line in _lines(root, machine):
            text = message(machine, path.name, line)
            why = _why_not(text, signed.get(hashlib.sha256(text).hexdigest()), public)
            if why:
                wrong.append((path, number, why))
    return wrong


def _why_not(text: bytes, found: tuple[str, bytes] | None, public: dict[str, Any]) -> str:
    from cryptography.exceptions import InvalidSignature

    if found is None:
        return "it is not signed, and its class asks for signatures"
    signer, signature = found
    if signer not in public:
        return f"its signer {signer!r} is not named for its class"
    try:
        public[signer].verify(signature, text)
    except InvalidSignature:
        return f"its signature is not {signer}'s"
    return ""


def _missing(error: ImportError) -> MachineError:
    return MachineError("signatures need a package that is not installed", came=str(error), expected="the package cryptography",
                        do="pip install 'alpha[sign]'")


def _private(path: Path) -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    except ImportError as error:
        raise _missing(error) from error
    try:
        key = load_ssh_private_key(read_regular(path), None)
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError(type(key).__name__)
    except (OSError, ValueError, TypeError) as error:  # TypeError: the key asks for a passphrase
        raise InputError("this file holds no key to sign with", came=f"{path} ({error})", expected="an Ed25519 key without a passphrase",
                         do="ssh-keygen -t ed25519 -N '' -f FILE") from error
    return key


def _public_text(private: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return str(private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode())


def _public(text: str) -> Any:
    try:
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    except ImportError as error:
        raise _missing(error) from error
    try:
        return load_ssh_public_key(text.encode())
    except ValueError as error:
        raise CorruptError("the file of signers holds a key that is none", came=text[:80], expected="ssh-ed25519 and a key in Base64",
                           do="mend the line") from error
