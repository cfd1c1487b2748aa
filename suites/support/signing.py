"""A new Ed25519 key as OpenSSH keeps it."""

from __future__ import annotations

from pathlib import Path


def new_key(path: Path) -> Path:
    """Write one to `path`. The extra `sign` is imported here: tests of a GPU alone are collected without it."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return path
