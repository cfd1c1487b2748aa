"""Initial parameters, drawn per tensor from a counter-based generator keyed by (seed, tensor name). Floor 5."""

from __future__ import annotations

import hashlib

import numpy as np

from alpha.errors import ConfigError
from alpha.graph.state import StateLayout, TensorSpec


def draw(spec: TensorSpec, seed: int) -> np.ndarray:
    """float32 array of the tensor's shape; the same in every process, order and world size. ConfigError for an unknown Init."""
    if spec.init.kind == "zeros":
        return np.zeros(spec.shape, np.float32)
    if spec.init.kind == "ones":
        return np.ones(spec.shape, np.float32)
    if spec.init.kind != "normal":
        raise ConfigError("unknown initialisation", came=spec.init.kind, expected="normal, zeros or ones")
    key = int.from_bytes(hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()[:16], "little")
    bits = np.random.Philox(key=key).random_raw(spec.size + spec.size % 2)
    # Box-Muller on 53-bit uniforms, in float64: independent of NumPy's own normal sampler, which may change between versions
    u = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log1p(-u[0::2])), 2 * np.pi * u[1::2]
    z = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()[: spec.size]
    return (z * spec.init.std).astype(np.float32).reshape(spec.shape)


def fill_initial(flat: np.ndarray, layout: StateLayout, seed: int) -> None:
    """Write every tensor's initial value into the flat parameter array; padding stays zero."""
    flat[...] = 0
    for spec in layout.tensors:
        at = layout.offsets[spec.name]
        flat[at : at + spec.size] = draw(spec, seed).ravel()
