"""Signatures of evidence: every way in which a line can lack one is named."""

from __future__ import annotations

import builtins
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from signing import new_key

from alpha.errors import AlphaError, InputError, MachineError
from alpha.registry import asked, catches, signatures
from alpha.registry.evidence import path_of, reference_class, shipped_root
from alpha.registry.history import hash_of

FILES = ("gelu.f32.cpu.jsonl", "add.f32.cpu.jsonl", catches.NAME)
MACHINE = str(reference_class(shipped_root()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A few files of evidence, signed by `lab`, and a second key that nobody named."""
    root = tmp_path / "baselines" / "evidence"
    (root / MACHINE).mkdir(parents=True)
    for name in FILES:
        shutil.copy(shipped_root() / MACHINE / name, root / MACHINE)
    new_key(tmp_path / "other")
    signed, line = signatures.sign(root, MACHINE, new_key(tmp_path / "key"), "lab")
    assert signed == sum(len((root / MACHINE / name).read_text().splitlines()) for name in FILES)
    signatures.signers_path(root).write_text(line + "\n")
    return root


def key(root: Path, name: str = "key") -> Path:
    return root.parents[1] / name


def changed(root: Path) -> None:
    path = path_of(root, MACHINE, "gelu.f32.cpu")
    path.write_text(path.read_text().replace('"backend', '"backenD', 1).replace("0.", "0.0", 1))


def another_signer(root: Path) -> None:
    signatures.sign(root, MACHINE, key(root), "somebody")


def another_key(root: Path) -> None:
    signatures.sign(root, MACHINE, key(root, "other"), "lab")


def elsewhere(root: Path) -> None:
    """Lines and their signatures under the name of another file."""
    (root / MACHINE / "gelu.f32.cpu.jsonl").rename(root / MACHINE / "gelu2.f32.cpu.jsonl")


def removed(root: Path) -> None:
    (root / MACHINE / signatures.NAME).unlink()


def swapped(root: Path) -> None:
    path = root / MACHINE / signatures.NAME
    (first, *rest, last) = path.read_text().splitlines()
    ours, theirs = first.split(" "), last.split(" ")
    path.write_text("\n".join([" ".join([*ours[:2], theirs[2]]), *rest, " ".join([*theirs[:2], ours[2]])]) + "\n")


WRONG: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "a line that changed": (changed, 1, "it is not signed"),
    "a signer that nobody named": (another_signer, 0, "its signer 'somebody' is not named"),
    "another key under a signer's name": (another_key, 0, "its signature is not lab's"),
    "a file under another name": (elsewhere, 5, "it is not signed"),
    "no signatures": (removed, 0, "it is not signed"),
    "signatures of other lines": (swapped, 2, "its signature is not lab's"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_signed_is_named(root: Path, what: str) -> None:
    assert signatures.problems(root) == []
    wrong, lines, why = WRONG[what]
    wrong(root)
    found = signatures.problems(root)
    everything = sum(len(path.read_text().splitlines()) for path in (root / MACHINE).glob("*.jsonl"))
    assert len(found) == (lines or everything) and all(why in said for _, _, said in found), found[:3]


def test_what_was_measured_is_signed_and_the_rest_keeps_its_signature(root: Path) -> None:
    changed(root)
    before, (path, number, _) = signatures.load(root, MACHINE), signatures.problems(root)[0]
    line = path.read_text().splitlines()[number - 1]
    signed, _ = signatures.sign(root, MACHINE, key(root), "lab", {hash_of(line.encode())})
    after = signatures.load(root, MACHINE)
    assert signed == 1 and signatures.problems(root) == [] and len(before) == len(after) and len(set(before) - set(after)) == 1


DAMAGED = {
    "a torn signature": (lambda root: root / MACHINE / signatures.NAME, lambda text: text[:-9] + "\n"),
    "signatures out of order": (lambda root: root / MACHINE / signatures.NAME, lambda text: text + text.splitlines()[0] + "\n"),
    "a torn list of signers": (signatures.signers_path, lambda text: text[:-1]),
    "a signer twice": (signatures.signers_path, lambda text: text + text),
    "a key that is none": (signatures.signers_path, lambda text: text[:-9] + "\n"),
    "another kind of key": (signatures.signers_path, lambda text: text.replace("ssh-ed25519", "ssh-rsa")),
    "a class that is none": (signatures.signers_path, lambda text: "x" + text),
    "a class without evidence": (signatures.signers_path, lambda text: text + text.replace(MACHINE, "cuda_sm90_H100")),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_files_are_told(root: Path, what: str) -> None:
    where, spoil = DAMAGED[what]
    path: Any = where(root)
    path.write_text(spoil(path.read_text()))
    try:
        assert signatures.problems(root)
    except AlphaError as error:
        assert error.came and error.expected


def test_signatures_are_not_given_up_without_a_reason(root: Path) -> None:
    (name,) = (f"signed {key}" for key in signatures.signers(root))
    assert asked.fallen({name: "1"}, {}) == [f"{name} 0"]


@pytest.mark.parametrize("text", ["", "no key", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n"])
def test_a_key_that_is_none(root: Path, text: str) -> None:
    key(root, "none").write_text(text)
    with pytest.raises(InputError, match="no key to sign with"):
        signatures.sign(root, MACHINE, key(root, "none"), "lab")
    with pytest.raises(InputError, match="cannot be called"):
        signatures.sign(root, MACHINE, key(root), "a b")


def test_without_the_package_signed_evidence_is_no_pass(root: Path) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError("No module named 'cryptography'")
        return real(name, *rest)

    with mock.patch.object(builtins, "__import__", without), pytest.raises(MachineError, match="not installed"):
        signatures.problems(root)
