"""GPT-2 family. Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": pre-norm blocks, learned positions, GELU
(tanh form), biases, tied head. Initialisation: normal 0.02 (positions 0.01), output projections of residual branches scaled by
1/sqrt(2 * layers) (their section 2.3: 1/sqrt(N) for N residual layers), biases zero, norms one. Floor 5.
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
from alpha.models.parts import attention, linear, next_logits, token_loss


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes. `vocab` rows of the embedding; `positions`: longest sequence; `dropout` on embeddings and residual branches."""

    vocab: int
    positions: int
    layers: int
    width: int
    heads: int
    norm_eps: float = 1e-5
    dropout: float = 0.0
    z_loss: float = 0.0
    window: int = 0
    documents: bool = False
    tied: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError("heads do not divide the width", came=f"width {self.width}, heads {self.heads}",
                              expected="width a multiple of heads")


def _dropout(t: Tracer, cfg: GPTConfig, x: Value, training: bool, purpose: int) -> Value:
    if not training or cfg.dropout == 0:
        return x
    samples = t.graph.inputs.get("sample_ids") or t.input("sample_ids", (x.type.shape[0],), "i32")
    return t.dropout(x, t.state("counter", 0, (), "i32", "step"), samples, rate=cfg.dropout, seed=cfg.seed, purpose=purpose)


def _trunk(t: Tracer, cfg: GPTConfig, batch: int, seq: int, training: bool) -> tuple[Value, Value]:
    """(final hidden states [B, T, C], head weight [V, C])."""
    if seq > cfg.positions:
        raise ConfigError("the sequence is longer than the model's positions", came=seq, expected=f"at most {cfg.positions}",
                          do="raise [model] positions or lower [data] sequence")
    c, residual = cfg.width, 0.02 / sqrt(2 * cfg.layers)
    tokens_BT, positions_BT = t.input("tokens", (batch, seq), "i32"), t.input("positions", (batch, seq), "i32")
    documents = t.input("documents", (batch, seq), "i32") if cfg.documents else None
    with t.unit("embedding"):
        wte_VC = t.param("token.weight", (cfg.vocab, c), Init("normal", 0.02), decay=True)
        wpe_PC = t.param("position.weight", (cfg.positions, c), Init("normal", 0.01), decay=True)
        x = t.add(t.embedding(wte_VC, tokens_BT), t.embedding(wpe_PC, positions_BT))
        x = _dropout(t, cfg, x, training, 0)

    def norm(name: str, x: Value) -> Value:
        gain, bias = t.param(f"{name}.gain", (c,), Init("ones")), t.param(f"{name}.bias", (c,), Init("zeros"))
        return t.layernorm(x, gain, bias, eps=cfg.norm_eps)[0]

    for i in range(cfg.layers):
        with t.unit(f"block.{i}"):
            qkv = linear(t, "attention.qkv", norm("norm1", x), c, 3 * c, 0.02, bias=True)
            o = attention(t, qkv, cfg.heads, cfg.heads, c // cfg.heads, window=cfg.window, documents=documents)
            o = linear(t, "attention.out", o, c, c, residual, bias=True)
            x = t.add(x, _dropout(t, cfg, o, training, 2 * i + 1))
            h = t.gelu(linear(t, "mlp.up", norm("norm2", x), c, 4 * c, 0.02, bias=True), approximate="tanh")
            h = linear(t, "mlp.down", h, 4 * c, c, residual, bias=True)
            x = t.add(x, _dropout(t, cfg, h, training, 2 * i + 2))
    with t.unit("head"):
        x = norm("norm", x)
        head_VC = wte_VC if cfg.tied else t.param("weight", (cfg.vocab, c), Init("normal", 0.02), decay=True)
    return x, head_VC


def loss(t: Tracer, cfg: GPTConfig, batch: int, seq: int, training: bool = True) -> tuple[Value, Value]:
    """(sum of token losses in nats, number of valid targets) of tokens[B, T] against targets[B, T]; both f32 scalars."""
    x, head = _trunk(t, cfg, batch, seq, training)
    t.layer = "head"
    return token_loss(t, x, head, t.input("targets", (batch, seq), "i32"), cfg.z_loss, training=training)


def decode(t: Tracer, cfg: GPTConfig, batch: int, seq: int) -> Value:
    """Logits [B, V] of the token after position index[b] of tokens[B, T]; what lies behind that position has no influence."""
    x, head = _trunk(t, cfg, batch, seq, False)
    t.layer = "head"
    return next_logits(t, x, head, t.input("index", (batch,), "i32"))


def sizes(cfg: Config, vocab: int) -> GPTConfig:
    """Those of a run file."""
    return GPTConfig(**shared_sizes(cfg, vocab), norm_eps=cfg.model.norm_eps, dropout=cfg.model.dropout, seed=cfg.run.seed)


FAMILY = Family(sizes=sizes, loss=loss, decode=decode)
