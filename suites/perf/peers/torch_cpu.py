"""Yardstick: the same three models, batches and threads in eager PyTorch on the CPU, beside Alpha's own speed, in alternating rounds.

    python suites/perf/peers/torch_cpu.py --torch /path/to/python-with-torch [--rounds 5] [--models gpt4,gpt6,llama4]

PyTorch runs in a process of its own (its Python is named by --torch) and is no dependency of Alpha. Each round times one after the
other, so that both see the same machine; printed are the median tokens/s of each and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

os.environ.pop("OPENBLAS_CORETYPE", None)  # both sides choose their kernels by the CPU: an override would halve ours

MODELS = {  # family, layers, width, heads, kv heads, hidden, vocabulary, batch, tokens
    "gpt4": ("gpt", 4, 128, 4, 4, 512, 512, 16, 128),
    "gpt6": ("gpt", 6, 256, 8, 8, 1024, 2048, 8, 256),
    "llama4": ("llama", 4, 256, 8, 4, 704, 2048, 8, 256),
}
THREADS = 2


def serve_alpha() -> None:
    """Read model names from stdin; for each, answer the seconds of `steps` training steps."""
    import numpy as np

    from alpha.backends.cpu.executor import CpuExecutor
    from alpha.models import gpt, llama
    from alpha.optim.init import fill_initial
    from alpha.optim.update import ScheduleConfig, adamw
    from alpha.passes.build import Model, StepShape, build_program
    from alpha.train.house import house

    made = {}
    for line in sys.stdin:
        name, steps = line.split()
        if name not in made:
            family, layers, width, heads, kv, hidden, vocab, b, t = MODELS[name]
            sizes = {"vocab": vocab, "positions": t, "layers": layers, "width": width, "heads": heads}
            module = gpt if family == "gpt" else llama
            config = gpt.GPTConfig(**sizes) if family == "gpt" else llama.LlamaConfig(**sizes, kv_heads=kv, hidden=hidden)
            model = Model(name=name, loss=lambda tr, on, m=module, c=config, b=b, t=t: m.loss(tr, c, b, t, on))
            program = build_program(name=name, model=model, optimizer=adamw(ScheduleConfig(kind="cosine", peak=1e-3, warmup=5, total=1000)),
                                    shape=StepShape(micro_batch=b, seq=t), catalogue=house(), threads=THREADS)
            executor = CpuExecutor(program, house())
            fill_initial(executor.state("param"), program.states["param"], 0)
            x = np.random.default_rng(0).integers(0, vocab, (b, t + 1)).astype(np.int32)
            batch = {"tokens": x[:, :-1].copy(), "targets": x[:, 1:].copy(), "positions": np.tile(np.arange(t, dtype=np.int32), (b, 1))}
            made[name] = program, executor, batch
        program, executor, batch = made[name]
        start = time.perf_counter()
        for _ in range(int(steps)):
            for call in program.schedule:
                out = executor.run(call.plan, batch if call.shard is not None else {})
        loss = float(out["loss_sum"] / out["count"])
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), flush=True)


TORCH = r'''
import json, math, sys, time, torch, torch.nn as nn, torch.nn.functional as F
MODELS = %s
torch.set_num_threads(%d)
class Gpt(nn.Module):
    def __init__(s, L, C, H, V, T):
        super().__init__(); s.H = H; s.e = nn.Embedding(V, C); s.p = nn.Embedding(T, C); s.n = nn.LayerNorm(C)
        s.b = nn.ModuleList(nn.ModuleDict(dict(l1=nn.LayerNorm(C), l2=nn.LayerNorm(C), qkv=nn.Linear(C, 3*C), o=nn.Linear(C, C),
                                               f=nn.Linear(C, 4*C), p=nn.Linear(4*C, C))) for _ in range(L))
    def forward(s, i, t):
        x = s.e(i) + s.p(torch.arange(i.shape[1])); B, T, C = x.shape
        for b in s.b:
            q, k, v = (z.view(B, T, s.H, -1).transpose(1, 2) for z in b['qkv'](b['l1'](x)).split(C, 2))
            x = x + b['o'](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))
            x = x + b['p'](F.gelu(b['f'](b['l2'](x)), approximate='tanh'))
        return F.cross_entropy(F.linear(s.n(x), s.e.weight).view(B*T, -1), t.reshape(-1))
class Llama(nn.Module):
    def __init__(s, L, C, H, G, FF, V, T):
        super().__init__(); s.H, s.G, s.D = H, G, C//H; s.e = nn.Embedding(V, C); s.n = nn.RMSNorm(C); s.h = nn.Linear(C, V, bias=False)
        lin = lambda a, b: nn.Linear(a, b, bias=False)
        s.b = nn.ModuleList(nn.ModuleDict(dict(l1=nn.RMSNorm(C), l2=nn.RMSNorm(C), qkv=lin(C, (H+2*G)*s.D), o=lin(C, C), w1=lin(C, FF),
                                               w3=lin(C, FF), w2=lin(FF, C))) for _ in range(L))
        a = torch.outer(torch.arange(T).float(), 1/(500000**(torch.arange(0, s.D, 2).float()/s.D)))[:, None]
        s.register_buffer('c', a.cos()); s.register_buffer('s', a.sin())
    def forward(s, i, t):
        x = s.e(i); B, T, C = x.shape
        rot = lambda z: torch.cat((z.chunk(2, -1)[0]*s.c - z.chunk(2, -1)[1]*s.s, z.chunk(2, -1)[1]*s.c + z.chunk(2, -1)[0]*s.s), -1)
        for b in s.b:
            q, k, v = b['qkv'](b['l1'](x)).split([s.H*s.D, s.G*s.D, s.G*s.D], 2)
            q, k, v = rot(q.view(B, T, s.H, s.D)), rot(k.view(B, T, s.G, s.D)), v.view(B, T, s.G, s.D)
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
            x = x + b['o'](y.transpose(1, 2).reshape(B, T, C)); n = b['l2'](x); x = x + b['w2'](F.silu(b['w1'](n))*b['w3'](n))
        return F.cross_entropy(s.h(s.n(x)).view(B*T, -1), t.reshape(-1))
made = {}
for line in sys.stdin:
    name, steps = line.split()
    if name not in made:
        fam, L, C, H, G, FF, V, B, T = MODELS[name]
        m = Gpt(L, C, H, V, T) if fam == 'gpt' else Llama(L, C, H, G, FF, V, T)
        for p in m.parameters(): p.data.normal_(0, 0.02) if p.dim() > 1 else None
        made[name] = m, torch.optim.AdamW(m.parameters(), lr=1e-3), torch.randint(0, V, (B, T+1))
    m, opt, x = made[name]; start = time.perf_counter()
    for _ in range(int(steps)):
        loss = m(x[:, :-1], x[:, 1:]); loss.backward(); torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        opt.step(); opt.zero_grad(set_to_none=True); loss.item()
    print(json.dumps(dict(seconds=time.perf_counter()-start, loss=loss.item())), flush=True)
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--models", default="gpt4,gpt6,llama4")
    args = parser.parse_args()

    def start(command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    from alpha.registry.machine import machine_class

    print(machine_class().describe(), flush=True)  # the kernels that OpenBLAS picked, or was told to use, decide half of the step
    sides = {"alpha": start([sys.executable, __file__, "--serve"]), "torch": start([args.torch, "-c", TORCH % (MODELS, THREADS)])}

    def ask(side: str, model: str, steps: int) -> float:
        process = sides[side]
        assert process.stdin and process.stdout
        process.stdin.write(f"{model} {steps}\n")
        process.stdin.flush()
        return float(json.loads(process.stdout.readline())["seconds"])

    for model in args.models.split(","):
        tokens = MODELS[model][7] * MODELS[model][8] * args.steps
        for side in sides:
            ask(side, model, 2)  # warm
        rows = [{side: tokens / ask(side, model, args.steps) for side in sides} for _ in range(args.rounds)]
        ours, theirs = (statistics.median(r[s] for r in rows) for s in ("alpha", "torch"))
        ratios = sorted(r["alpha"] / r["torch"] for r in rows)
        print(f"{model:8s} alpha {ours:9.0f} tok/s   torch eager {theirs:9.0f} tok/s   ratio {statistics.median(ratios):.2f} "
              f"[{ratios[0]:.2f}, {ratios[-1]:.2f}] over {len(rows)} rounds, {THREADS} threads", flush=True)
    for process in sides.values():
        process.kill()


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve_alpha()
    else:
        main()
