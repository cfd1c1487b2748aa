"""How many places a new schedule of the learning rate and a new family of models touch: exactly these edits, on a copy, then they train."""

from __future__ import annotations

from pathlib import Path

import walkthrough

LINEAR = {
    "alpha/optim/schedules.py": ('''SCHEDULES: dict[str, Schedule] = {
''', '''def ramp_down(step: int, c: ScheduleConfig) -> float:
    """A line down to the floor."""
    return 1 - (1 - c.floor) * (step - c.warmup) / (c.total - c.warmup)


SCHEDULES: dict[str, Schedule] = {
    "ramp_down": Schedule(ramp_down, (((0, 1), (1, 1)), ((1, 3), (3, 4)), ((1, 2), (5, 8)), ((1, 1), (1, 4)))),
'''),
    "alpha/config.py": ('''    "wsd": ("decay",),
''', '''    "wsd": ("decay",),
    "ramp_down": (),
'''),
}

BIGRAM = '''"""Each token from the one before it alone: an embedding, blocks of an MLP with a residual, a head. Floor 5."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from alpha.config import Config
from alpha.errors import ConfigError
from alpha.graph.ir import Value
from alpha.graph.state import Init
from alpha.graph.trace import Tracer
from alpha.models.family import Family, shared_sizes
from alpha.models.parts import linear, next_logits, token_loss


@dataclass(frozen=True, kw_only=True)
class BigramConfig:
    """Sizes; heads, window and documents change nothing."""

    vocab: int
    positions: int
    layers: int
    width: int
    heads: int = 1
    z_loss: float = 0.0
    window: int = 0
    documents: bool = False
    tied: bool = True


def _trunk(t: Tracer, cfg: BigramConfig, batch: int, seq: int) -> tuple[Value, Value]:
    """(final hidden states [B, T, C], head weight [V, C])."""
    if seq > cfg.positions:
        raise ConfigError("the sequence is longer than the model's positions", came=seq, expected=f"at most {cfg.positions}")
    c, residual = cfg.width, 0.02 / sqrt(2 * cfg.layers)
    with t.unit("embedding"):
        wte_VC = t.param("token.weight", (cfg.vocab, c), Init("normal", 0.02), decay=True)
        x = t.embedding(wte_VC, t.input("tokens", (batch, seq), "i32"))
    for i in range(cfg.layers):
        with t.unit(f"block.{i}"):
            h = t.rmsnorm(x, t.param("norm.gain", (c,), Init("ones")), eps=1e-5)[0]
            h = t.gelu(linear(t, "mlp.up", h, c, 4 * c, 0.02, bias=True), approximate="tanh")
            x = t.add(x, linear(t, "mlp.down", h, 4 * c, c, residual, bias=True))
    with t.unit("head"):
        x = t.rmsnorm(x, t.param("norm.gain", (c,), Init("ones")), eps=1e-5)[0]
        head_VC = wte_VC if cfg.tied else t.param("weight", (cfg.vocab, c), Init("normal", 0.02), decay=True)
    return x, head_VC


def loss(t: Tracer, cfg: BigramConfig, batch: int, seq: int, training: bool = True) -> tuple[Value, Value]:
    """(sum of token losses in nats, number of valid targets) of tokens[B, T] against targets[B, T]; both f32 scalars."""
    x, head = _trunk(t, cfg, batch, seq)
    t.layer = "head"
    return token_loss(t, x, head, t.input("targets", (batch, seq), "i32"), cfg.z_loss, training=training)


def decode(t: Tracer, cfg: BigramConfig, batch: int, seq: int) -> Value:
    """Logits [B, V] of the token after position index[b] of tokens[B, T]."""
    x, head = _trunk(t, cfg, batch, seq)
    t.layer = "head"
    return next_logits(t, x, head, t.input("index", (batch,), "i32"))


def sizes(cfg: Config, vocab: int) -> BigramConfig:
    """Those of a run file."""
    return BigramConfig(**shared_sizes(cfg, vocab))


FAMILY = Family(sizes=sizes, loss=loss, decode=decode)
'''

FAMILY = {
    "alpha/config.py": ('''    "llama": ("norm_eps", "head_dim", "kv_heads", "attention_bias", "hidden", "rope_base", "rope_scaling"),
''', '''    "llama": ("norm_eps", "head_dim", "kv_heads", "attention_bias", "hidden", "rope_base", "rope_scaling"),
    "bigram": (),
'''),
    "alpha/gates/contracts/families.py": ('''FAMILY_CASES: dict[str, FamilyCase] = {
''', '''def bigram_loss(c: bigram.BigramConfig, p: Params, tokens: np.ndarray, targets: np.ndarray) -> float:
    """Summed loss of one sequence."""
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return np.stack([r / sqrt(float(np.mean(r * r)) + 1e-5) * p[f"{name}.gain"] for r in x])

    x = np.stack([p["embedding.token.weight"][t] for t in tokens])
    for i in range(c.layers):
        b = f"block.{i}"
        h = norm(x, f"{b}.norm") @ p[f"{b}.mlp.up.weight"].T + p[f"{b}.mlp.up.bias"]
        h = np.vectorize(lambda u: 0.5 * u * (1 + tanh(sqrt(2 / np.pi) * (u + 0.044715 * u**3))))(h)
        x = x + h @ p[f"{b}.mlp.down.weight"].T + p[f"{b}.mlp.down.bias"]
    return _nll(norm(x, "head.norm"), p["embedding.token.weight" if c.tied else "head.weight"], targets, c.z_loss)


FAMILY_CASES: dict[str, FamilyCase] = {
    "bigram": FamilyCase(
        family=bigram.FAMILY, reference=bigram_loss, small=bigram.BigramConfig(vocab=11, positions=8, layers=2, width=12),
        whole=bigram.BigramConfig(vocab=13, positions=9, layers=2, width=8, z_loss=1e-3),
        published={"by-hand": (bigram.BigramConfig(vocab=50, positions=16, layers=3, width=8), 16, 50 * 8 + 3 * (8 + 552) + 8)},
        products=lambda c: (0, 8 * c.width * c.width, 0)),
'''),
}


def edited(place: Path, edits: dict[str, tuple[str, str]]) -> None:
    """Each text stands in its file exactly once."""
    for name, (find, replace) in edits.items():
        text = (place / name).read_text(encoding="utf-8")
        assert text.count(find) == 1, f"{name}: {find!r}"
        (place / name).write_text(text.replace(find, replace), encoding="utf-8")


def test_a_schedule_is_two_places_and_a_family_three(tmp_path: Path) -> None:
    place = walkthrough.copy(tmp_path)
    edited(place, LINEAR)
    (place / "alpha" / "models" / "bigram.py").write_text(BIGRAM, encoding="utf-8")
    edited(place, FAMILY)
    edited(place, {"alpha/gates/contracts/families.py": ("import gpt, llama\n", "import bigram, gpt, llama\n")})
    assert len(LINEAR) == 2 and len({*FAMILY, "alpha/models/bigram.py"}) == 3
    output = walkthrough.run("alpha gate run schedule.ramp_down model.bigram flops.v1", place, (), 300)
    assert output.count("PASS ") == 8 and "FAIL" not in output, output
    both = "--set model.family=bigram --set optim.schedule=ramp_down --set train.steps=4"
    output = walkthrough.run(f"alpha lab configs/tiny.toml {both}", place, ("UNGATED", "bigram"), 300)
    assert "validation" in output
