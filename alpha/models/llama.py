"""Llama family. Touvron et al. 2023 (arXiv:2302.13971, 2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783): pre-RMSNorm, rotary
positions, SwiGLU, grouped key-value heads (Ainslie et al. 2023, arXiv:2305.13245), no biases; attention may have them, as in Qwen2 (Yang et
al. 2024, arXiv:2407.10671). The papers give no initialisation; normal 0.02 with residual output projections scaled by 1/sqrt(2 * layers),
as GPT-2 (Radford et al. 2019) and Megatron-LM (arXiv:1909.08053) do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from alpha.config import Config
from alpha.errors import ConfigError
from alpha.graph.ir import Value
from alpha.graph.state import Init
from alpha.graph.trace import Tracer
from alpha.models.family import Family, shared_sizes
from alpha.models.parts import attention, linear, next_logits, swiglu, token_loss
from alpha.models.rotary import scaled_frequencies


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes. `hidden`: width of the SwiGLU; `kv_heads` divides `heads`; `positions` only bounds the sequence (rotary); `head_dim`: width of
    a head, 0 = width / heads; `attention_bias`: 'none', 'qkv' or 'all'; `rope_scaling` as `scaled_frequencies` takes it, () = none."""

    vocab: int
    positions: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    norm_eps: float = 1e-5
    head_dim: int = 0
    attention_bias: str = "none"
    rope_base: float = 500000.0
    rope_scaling: tuple[float, ...] = ()
    z_loss: float = 0.0
    window: int = 0
    documents: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads or self.head_width % 2:
            raise ConfigError("heads do not fit the width", came=f"width {self.width}, heads {self.heads} of {self.head_width} channels, "
                              f"kv_heads {self.kv_heads}",
                              expected="width a multiple of heads with an even head width, heads a multiple of kv_heads")
        if self.width * self.hidden % 64:
            raise ConfigError("gate and up cannot be read as one matrix", came=f"width {self.width}, hidden {self.hidden}",
                              expected="width times hidden a multiple of 64", do="round [model] hidden up")

    @property
    def head_width(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.width // self.heads


def _trunk(t: Tracer, cfg: LlamaConfig, batch: int, seq: int) -> tuple[Value, Value]:
    """(final hidden states [B, T, C], head weight [V, C])."""
    if seq > cfg.positions:
        raise ConfigError("the sequence is longer than the model's positions", came=seq, expected=f"at most {cfg.positions}",
                          do="raise [model] positions or lower [data] sequence")
    c, d, residual = cfg.width, cfg.head_width, 0.02 / sqrt(2 * cfg.layers)
    tokens_BT, positions_BT = t.input("tokens", (batch, seq), "i32"), t.input("positions", (batch, seq), "i32")
    rope = scaled_frequencies(cfg.rope_base, d, cfg.rope_scaling) if cfg.rope_scaling else cfg.rope_base
    documents = t.input("documents", (batch, seq), "i32") if cfg.documents else None
    with t.unit("embedding"):
        wte_VC = t.param("token.weight", (cfg.vocab, c), Init("normal", 0.02), decay=True)
        x = t.embedding(wte_VC, tokens_BT)

    def norm(name: str, x: Value) -> Value:
        return t.rmsnorm(x, t.param(f"{name}.gain", (c,), Init("ones")), eps=cfg.norm_eps)[0]

    for i in range(cfg.layers):
        with t.unit(f"block.{i}"):
            rows = (cfg.heads + 2 * cfg.kv_heads) * d
            qkv = linear(t, "attention.qkv", norm("norm1", x), c, rows, 0.02, bias=cfg.attention_bias != "none")
            o = attention(t, qkv, cfg.heads, cfg.kv_heads, d, window=cfg.window, documents=documents, rope=(positions_BT, rope))
            x = t.add(x, linear(t, "attention.out", o, cfg.heads * d, c, residual, bias=cfg.attention_bias == "all"))
            h = swiglu(t, norm("norm2", x), c, cfg.hidden, 0.02)
            x = t.add(x, linear(t, "mlp.down", h, cfg.hidden, c, residual, bias=False))
    with t.unit("head"):
        x = norm("norm", x)
        head_VC = wte_VC if cfg.tied else t.param("weight", (cfg.vocab, c), Init("normal", 0.02), decay=True)
    return x, head_VC


def loss(t: Tracer, cfg: LlamaConfig, batch: int, seq: int, training: bool = True) -> tuple[Value, Value]:
    """(sum of token losses in nats, number of valid targets) of tokens[B, T] against targets[B, T]; both f32 scalars."""
    x, head = _trunk(t, cfg, batch, seq)
    t.layer = "head"
    return token_loss(t, x, head, t.input("targets", (batch, seq), "i32"), cfg.z_loss, training=training)


def decode(t: Tracer, cfg: LlamaConfig, batch: int, seq: int) -> Value:
    """Logits [B, V] of the token after position index[b] of tokens[B, T]; what lies behind that position has no influence."""
    x, head = _trunk(t, cfg, batch, seq)
    t.layer = "head"
    return next_logits(t, x, head, t.input("index", (batch,), "i32"))


def sizes(cfg: Config, vocab: int) -> LlamaConfig:
    """Those of a run file."""
    m = cfg.model
    return LlamaConfig(**shared_sizes(cfg, vocab), norm_eps=m.norm_eps, head_dim=cfg.head_dim, kv_heads=m.kv_heads or m.heads,
                       attention_bias=m.attention_bias, hidden=cfg.hidden, rope_base=m.rope_base,
                       rope_scaling=m.rope_scaling)


FAMILY = Family(sizes=sizes, loss=loss, decode=decode)
