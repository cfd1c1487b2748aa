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
DDP, FSDP2 = "ddp", "fsdp2"

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


@dataclass(frozen=True)
class Ranked:
    """A variant whose gradients are summed `over` ranks: by DDP or FSDP2; '' on one GPU alone."""

    variant: Variant
    over: str = ""

    @property
    def name(self) -> str:
        """Such as 'DDP, torch.compile, bf16 weights, cuDNN'."""
        words = self.variant.name.replace("autocast", "bf16 over float32 shards") if self.over == FSDP2 else self.variant.name
        return {DDP: "DDP, ", FSDP2: "FSDP2, ", "": ""}[self.over] + words


def ranked(on_gpu: bool, precision: str) -> list[Ranked]:
    """What a step of many GPUs is held against, the fastest known first; each library's one GPU among them, before its many."""
    if precision != "bf16":
        return [Ranked(Variant(DEFAULT)), Ranked(Variant(DEFAULT), DDP)]
    kernels = CUDNN if on_gpu else ""
    master, auto = Variant(DEFAULT, MASTER, kernels), Variant(DEFAULT, AUTOCAST, kernels)
    return [Ranked(master), Ranked(master, DDP), Ranked(auto, FSDP2), Ranked(auto, DDP), Ranked(auto)]
