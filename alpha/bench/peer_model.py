"""GPT-2 and Llama in PyTorch, with our parameters under our names: the peer of a whole training step. Floor 8; imports no torch itself.

The same mathematics as alpha/models (whose docstrings name the papers), written the way a PyTorch user would: F.linear, SDPA,
F.layer_norm or F.rms_norm, F.cross_entropy, AdamW with the decay mask of ours, clip_grad_norm_. In bf16 it is autocast over float32
weights, torch's own recipe for mixed precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any


class PeerModel:
    """One model with its optimizer. sizes: family, layers, heads, kv_heads, tied, rope_base, micros, precision, clip, betas, eps,
    weight_decay, names of `decayed` parameters. parameters: ours, by name, float32."""

    def __init__(self, t: Any, sizes: Mapping[str, Any], parameters: Mapping[str, Any], compiled: bool) -> None:
        torch = t.torch
        self.t, self.sizes = t, sizes
        self.p = {name: x.detach().requires_grad_() for name, x in parameters.items()}
        self.size = sum(x.numel() for x in self.p.values())
        decayed = set(sizes["decayed"])
        groups = [{"params": [x for n, x in self.p.items() if (n in decayed) == yes], "weight_decay": sizes["weight_decay"] * yes}
                  for yes in (True, False)]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=tuple(sizes["betas"]), eps=sizes["eps"],
                                           fused=True)
        if t.on_gpu:
            torch.set_float32_matmul_precision("high")
        self._loss: Callable[..., Any] = torch.compile(self.loss, dynamic=False) if compiled else self.loss

    def loss(self, p: Mapping[str, Any], tokens: Any, targets: Any) -> Any:
        """Sum of cross entropies in nats."""
        F, s = self.t.F, self.sizes
        gpt, c = s["family"] == "gpt", p["embedding.token.weight"].shape[1]
        d = c // s["heads"]

        def norm(name: str, x: Any) -> Any:
            if gpt:
                return F.layer_norm(x, (c,), p[f"{name}.gain"], p[f"{name}.bias"], 1e-5)
            return F.rms_norm(x, (c,), p[f"{name}.gain"], 1e-5)

        def linear(name: str, x: Any) -> Any:
            return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

        x = F.embedding(tokens, p["embedding.token.weight"])
        table = None
        if gpt:
            x = x + p["embedding.position.weight"][: tokens.shape[1]]
        else:
            table = self._angles(tokens.shape[1], d, x.device)
        for i in range(s["layers"]):
            at = f"block.{i}"
            g = s["kv_heads"]
            q, k, v = (y.unflatten(2, (-1, d)).transpose(1, 2)
                       for y in linear(f"{at}.attention.qkv", norm(f"{at}.norm1", x)).split([s["heads"] * d, g * d, g * d], 2))
            if table is not None:
                q, k = self._turn(q, *table), self._turn(k, *table)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=g != s["heads"])
            x = x + linear(f"{at}.attention.out", o.transpose(1, 2).flatten(2))
            h = norm(f"{at}.norm2", x)
            if gpt:
                h = F.gelu(linear(f"{at}.mlp.up", h), approximate="tanh")
            else:
                h = F.silu(linear(f"{at}.mlp.gate", h)) * linear(f"{at}.mlp.up", h)
            x = x + linear(f"{at}.mlp.down", h)
        head = p["embedding.token.weight"] if s["tied"] else p["head.weight"]
        logits = F.linear(norm("head.norm", x), head)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def _angles(self, n: int, d: int, device: Any) -> Any:
        torch = self.t.torch
        rates = self.sizes["rope_base"] ** (-2.0 * torch.arange(d // 2, device=device) / d)
        angle = torch.outer(torch.arange(n, device=device, dtype=torch.float32), rates)
        return angle.cos(), angle.sin()

    def _turn(self, x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, -1)
        return self.t.torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def step(self, rows: Any, lr: float) -> dict[str, float]:
        """Forward, backward over the microbatches, clip, AdamW; the loss (nats a token) and the norm of the mean gradient are read."""
        torch, s = self.t.torch, self.sizes
        rows = rows.to("cuda") if self.t.on_gpu else rows
        rows = rows.long()
        count, total = rows.shape[0] * (rows.shape[1] - 1), 0.0
        narrow = torch.autocast("cuda" if self.t.on_gpu else "cpu", torch.bfloat16) if s["precision"] == "bf16" else nullcontext()
        for part in rows.chunk(s["micros"]):
            with narrow:
                loss = self._loss(self.p, part[:, :-1].contiguous(), part[:, 1:].contiguous())
            (loss / count).backward()
            total = total + loss.detach()
        found = list(self.p.values())
        norm = torch.nn.utils.clip_grad_norm_(found, s["clip"] or float("inf"))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": float(total) / count, "norm": float(norm)}

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.t.on_gpu:
            self.t.torch.cuda.synchronize()
