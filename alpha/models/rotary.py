"""Scaled frequencies of rotary positions, for texts longer than those that a model began with. Floor 5."""

from __future__ import annotations

from math import pi


def scaled_frequencies(base: float, d: int, scaling: tuple[float, ...]) -> tuple[float, ...]:
    """What pair i of a head of `d` channels turns by per position, radians, [d / 2]; without scaling it is base^(-2i/d).

    `scaling`: (factor,) divides all of them (Chen et al. 2023, arXiv:2306.15595, section 2.3). (factor, low, high, original) is that of
    Llama 3.1 (`_compute_llama3_parameters` in transformers' modeling_rope_utils.py): a pair that turns less than `low` times over
    `original` positions is divided, one that turns more than `high` times is kept, and between them the share kept grows linearly.
    """
    plain = [base ** (-2 * i / d) for i in range(d // 2)]
    if len(scaling) == 1:
        return tuple(f / scaling[0] for f in plain)
    factor, low, high, original = scaling
    kept = [min(max((original * f / (2 * pi) - low) / (high - low), 0.0), 1.0) for f in plain]
    return tuple(share * f + (1 - share) * f / factor for share, f in zip(kept, plain))
