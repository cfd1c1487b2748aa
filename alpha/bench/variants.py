"""The ways in which PyTorch trains a model that a whole step is held against: all are listed, the fastest is quoted. Floor 8.

What they differ in is what PyTorch's own documentation offers: eager or compiled, in the default mode or with products searched for
(max-autotune without CUDA graphs, which take no optimizer of changing learning rate); mixed precision by autocast over float32 weights, or
bf16 weights whose float32 master copies the optimizer keeps (which leaves the residual stream in bf16, as ours is); SDPA by cuDNN or by
FlashAttention. All take fused AdamW and clip_grad_norm_.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT, SEARCHED = "default", "max-autotune-no-cudagraphs"
AUTOCAST, MASTER = "autocast", "master"
CUDNN, FLASH = "cudnn", "flash"

FAMILIES = ("gpt", "llama")
"""Families of models that there is a peer of (STYLES in peer_model.py)."""


@dataclass(frozen=True)
class Variant:
    """`compiled`: a mode of torch.compile, '' for eager. `weights`: AUTOCAST, MASTER, or '' in float32. `attention`: the only back end that
    SDPA may take, '' for its own choice."""

    compiled: str = ""
    weights: str = ""
    attention: str = ""

    @property
    def name(self) -> str:
        """Such as 'torch.compile, bf16 weights, cuDNN'."""
        words = [{"": "torch eager", DEFAULT: "torch.compile", SEARCHED: "torch.compile max-autotune"}[self.compiled],
                 {"": "", AUTOCAST: "autocast", MASTER: "bf16 weights"}[self.weights],
                 {"": "", CUDNN: "cuDNN", FLASH: "flash"}[self.attention]]
        return ", ".join(w for w in words if w)


def variants(on_gpu: bool, precision: str) -> list[Variant]:
    """Those that exist there, the fastest known first, so that a budget cuts off what is slow anyway."""
    if precision != "bf16":
        return [Variant(DEFAULT), Variant()]
    if not on_gpu:
        return [Variant(DEFAULT, MASTER), Variant(DEFAULT, AUTOCAST), Variant("", AUTOCAST)]
    return [Variant(DEFAULT, MASTER, CUDNN), Variant(DEFAULT, AUTOCAST, CUDNN), Variant(DEFAULT, MASTER, FLASH),
            Variant(SEARCHED, MASTER, CUDNN), Variant("", AUTOCAST)]
