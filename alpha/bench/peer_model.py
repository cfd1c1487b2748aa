"""GPT-2 and Llama in PyTorch, with our parameters: the peer of a whole training step. Floor 8; imported by peer_process.py alone.

The same mathematics as alpha/models (whose docstrings name the papers), written the way a PyTorch user would: an nn.Module of Linear,
LayerNorm or RMSNorm and SDPA, GPT-2 with one projection for q, k and v, Llama with three; a table of angles made once; cross entropy;
fused AdamW with the decay mask of ours; clip_grad_norm_. Shapes: B rows, T tokens, C width, H heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from alpha.bench.variants import AUTOCAST, CUDNN, FAMILIES, FLASH, MASTER, Variant

EPS = 1e-5


@dataclass(frozen=True)
class Style:
    """What tells one family from another. `packed`: one projection for q, k and v, and biases; `gated`: SwiGLU in place of GELU's MLP;
    `learned`: positions that are learned, else rotary."""

    norm: Any
    packed: bool
    gated: bool
    learned: bool


STYLES = dict(zip(FAMILIES, (Style(nn.LayerNorm, packed=True, gated=False, learned=True),
                             Style(nn.RMSNorm, packed=False, gated=True, learned=False)), strict=True))


class Attention(nn.Module):
    """Causal attention; `packed`: one projection for q, k and v, with biases (GPT-2), else three without (Llama)."""

    def __init__(self, c: int, heads: int, kv_heads: int, packed: bool) -> None:
        super().__init__()
        self.d = c // heads
        self.heads, self.kv_heads, self.packed = heads, kv_heads, packed
        if packed:
            self.qkv = nn.Linear(c, 3 * c)
        else:
            self.q = nn.Linear(c, heads * self.d, bias=False)
            self.k = nn.Linear(c, kv_heads * self.d, bias=False)
            self.v = nn.Linear(c, kv_heads * self.d, bias=False)
        self.out = nn.Linear(c, c, bias=packed)

    def forward(self, x_BTC: Any, angles: Any) -> Any:
        """[B, T, C]; `angles`: (cos, sin) of [T, 1, D/2], or None."""
        parts = self.qkv(x_BTC).chunk(3, -1) if self.packed else (self.q(x_BTC), self.k(x_BTC), self.v(x_BTC))
        q, k, v = (y.unflatten(-1, (-1, self.d)) for y in parts)
        if angles is not None:
            q, k = turned(q, *angles), turned(k, *angles)
        o_BHTD = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                                                enable_gqa=self.heads != self.kv_heads)
        return self.out(o_BHTD.transpose(1, 2).flatten(2))


def turned(x_BTHD: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions, the halves of a head as pairs; in float32, rounded once."""
    a, b = x_BTHD.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_BTHD.dtype)


class Block(nn.Module):
    """Pre-norm: attention, then GELU's MLP (GPT-2) or SwiGLU (Llama)."""

    def __init__(self, s: Mapping[str, Any], c: int, hidden: int) -> None:
        super().__init__()
        style = STYLES[s["family"]]
        self.norm1, self.norm2 = style.norm(c, eps=EPS), style.norm(c, eps=EPS)
        self.attention = Attention(c, s["heads"], s["kv_heads"], style.packed)
        self.gate = nn.Linear(c, hidden, bias=False) if style.gated else None
        self.up, self.down = nn.Linear(c, hidden, bias=style.packed), nn.Linear(hidden, c, bias=style.packed)

    def forward(self, x: Any, angles: Any) -> Any:
        """[B, T, C]."""
        x = x + self.attention(self.norm1(x), angles)
        h = self.norm2(x)
        h = F.gelu(self.up(h), approximate="tanh") if self.gate is None else F.silu(self.gate(h)) * self.up(h)
        return x + self.down(h)


class Network(nn.Module):
    """Tokens and targets to the mean cross entropy in nats."""

    def __init__(self, s: Mapping[str, Any]) -> None:
        super().__init__()
        c = s["width"]
        self.token = nn.Embedding(s["vocab"], c)
        self.position = nn.Embedding(s["positions"], c) if STYLES[s["family"]].learned else None
        self.blocks = nn.ModuleList(Block(s, c, s["hidden"]) for _ in range(s["layers"]))
        self.norm = STYLES[s["family"]].norm(c, eps=EPS)
        self.head = nn.Linear(c, s["vocab"], bias=False)
        self.angles: Any = None

    def forward(self, tokens_BT: Any, targets_BT: Any) -> Any:
        """A scalar."""
        x = self.token(tokens_BT)
        if self.position is not None:
            x = x + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x = block(x, self.angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets_BT.flatten())


def their_names(name: str, s: Mapping[str, Any]) -> list[tuple[str, slice]]:
    """Our name of a parameter -> theirs and the rows that each takes."""
    for ours, theirs in (("embedding.", ""), ("block.", "blocks."), (".mlp.", "."), ("head.norm.", "norm."), (".gain", ".weight")):
        name = name.replace(ours, theirs)
    if ".attention.qkv." not in name or STYLES[s["family"]].packed:
        return [(name, slice(None))]
    d = s["width"] // s["heads"]
    q, k = s["heads"] * d, (s["heads"] + s["kv_heads"]) * d
    return [(name.replace("qkv", part), rows) for part, rows in (("q", slice(0, q)), ("k", slice(q, k)), ("v", slice(k, None)))]


class PeerModel:
    """One model with its optimizer. sizes: family, layers, width, heads, kv_heads, hidden, vocab, positions, tied, rope_base, micros, clip,
    betas, eps, weight_decay, names of `decayed` parameters. parameters: ours, by name, float32, on the device."""

    def __init__(self, on_gpu: bool, sizes: Mapping[str, Any], parameters: Mapping[str, Any], variant: Variant) -> None:
        self.on_gpu, self.sizes, self.variant = on_gpu, sizes, variant
        self.device = "cuda" if on_gpu else "cpu"
        wide = {theirs: x[rows] for name, x in parameters.items() for theirs, rows in their_names(name, sizes)}
        decayed = {theirs for name in sizes["decayed"] for theirs, _ in their_names(name, sizes)}
        self.size = sum(x.numel() for x in wide.values())
        narrow = variant.weights == MASTER
        with torch.device("meta"):
            network = Network(sizes)
        state = {name: x.to(torch.bfloat16) if narrow else x for name, x in wide.items()}
        if sizes["tied"]:
            state["head.weight"] = state["token.weight"]
        network.load_state_dict(state, assign=True)
        if sizes["tied"]:
            network.head.weight = network.token.weight
        network.angles = None if STYLES[sizes["family"]].learned else self._angles()
        self._spreaded = self._spread(network)
        self.own = dict(network.named_parameters())
        """What the network computes with."""
        self.kept = {name: nn.Parameter(wide[name]) for name in self.own} if narrow else self.own
        """What the optimizer updates."""
        groups = [{"params": [x for n, x in self.kept.items() if (n in decayed) == yes], "weight_decay": sizes["weight_decay"] * yes}
                  for yes in (True, False)]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=tuple(sizes["betas"]), eps=sizes["eps"],
                                           fused=True)
        if on_gpu:
            torch.set_float32_matmul_precision("high")
            if variant.attention:
                torch.backends.cuda.enable_cudnn_sdp(variant.attention == CUDNN)
                torch.backends.cuda.enable_flash_sdp(variant.attention == FLASH)
                torch.backends.cuda.enable_mem_efficient_sdp(False)
                torch.backends.cuda.enable_math_sdp(False)
        whole = self._spreaded is network and not self._shared  # wrappers of ranks break the graph
        self._loss: Any = torch.compile(self._spreaded, dynamic=False, fullgraph=whole, mode=variant.compiled) if variant.compiled else \
            self._spreaded

    _shared = False
    """Whether its parameters are shards."""

    def _spread(self, network: Any) -> Any:
        """What is called in place of the network; it may change its parameters. peer_model_ranks.py has others."""
        return network

    def _narrow(self) -> Any:
        """What a forward runs in."""
        return torch.autocast(self.device, torch.bfloat16) if self.variant.weights == AUTOCAST else nullcontext()

    def _last(self, last: bool) -> Any:
        """What a microbatch runs in; `last`: of its step."""
        return nullcontext()

    def _angles(self) -> tuple[Any, Any]:
        s = self.sizes
        d = s["width"] // s["heads"]
        rates = s["rope_base"] ** (-2.0 * torch.arange(d // 2, dtype=torch.float64) / d)
        angle = torch.outer(torch.arange(s["positions"], dtype=torch.float64), rates)[:, None]
        return angle.cos().float().to(self.device), angle.sin().float().to(self.device)

    def _parts(self, rows: Any) -> Iterator[tuple[Any, Any]]:
        for part in rows.chunk(self.sizes["micros"]):
            yield part[:, :-1].contiguous(), part[:, 1:].contiguous()

    def step(self, rows: Any, lr: float) -> tuple[Any, Any]:
        """Forward, backward over the microbatches of i64[B, T + 1], clip, AdamW: the loss in nats a token before it and the norm of the
        mean gradient, on the device: nothing waits for them."""
        s, total = self.sizes, 0.0
        for i, (tokens, targets) in enumerate(self._parts(rows)):
            with self._last(i == s["micros"] - 1):
                with self._narrow():
                    loss = self._loss(tokens, targets)
                (loss / s["micros"]).backward()
            total = total + loss.detach() / s["micros"]
            if self.kept is not self.own:
                self._widen(list(self.own.values()), i == 0)
        norm = torch.nn.utils.clip_grad_norm_(list(self.kept.values()), s["clip"] or float("inf"))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if self.kept is self.own:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                torch._foreach_copy_(list(self.own.values()), list(self.kept.values()))
        return total, norm

    def _widen(self, own: Sequence[Any], first: bool) -> None:
        """Add the bf16 gradients to the float32 ones of the masters; the first ones are copied."""
        if first and next(iter(self.kept.values())).grad is None:
            for x in self.kept.values():
                x.grad = torch.empty_like(x)
        wide, found = [x.grad for x in self.kept.values()], [x.grad for x in own]
        if first:
            torch._foreach_copy_(wide, found)
        else:
            torch._foreach_add_(wide, found)
        for x in own:
            x.grad = None

    def steps(self, rows: int, tokens: int, vocab: int, lr: float, count: int) -> None:
        """`count` steps on fresh random tokens."""
        for _ in range(count):
            self.step(torch.randint(0, vocab, (rows, tokens + 1), device=self.device), lr)

    def taken(self, places: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Our name of a parameter -> elements first::stride of what the optimizer keeps, float32 on the host. RuntimeError where the
        network computes with other weights than these, rounded."""
        found = {}
        with torch.no_grad():
            for name, (first, stride) in places.items():
                kept, own = (self._joined(name, of) for of in (self.kept, self.own))
                if not torch.equal(own, kept.to(own.dtype)):
                    raise RuntimeError(f"{name}: the network's weights are not the optimizer's, rounded")
                found[name] = kept.reshape(-1)[first::stride].float().cpu()
        return found

    def _joined(self, name: str, of: Mapping[str, Any]) -> Any:
        """Our parameter of this name, whole."""
        parts = [self._gathered(of[theirs]) for theirs, _ in their_names(name, self.sizes)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gathered(self, x: Any) -> Any:
        """A parameter that ranks may share, whole."""
        return x

    def park(self) -> None:
        """Give the device's memory to others: parameters and moments wait on the host, gradients go, what was compiled stays."""
        self._move("cpu")
        if self.on_gpu:
            torch.cuda.empty_cache()

    def back(self) -> None:
        """Take the device again."""
        self._move(self.device)

    def _move(self, device: str) -> None:
        for x in {id(x): x for x in (*self.own.values(), *self.kept.values())}.values():
            x.grad = None
            x.data = x.data.to(device)
        for found in self.optimizer.state.values():
            found.update({name: x.to(device) for name, x in found.items() if isinstance(x, torch.Tensor)})

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize()
