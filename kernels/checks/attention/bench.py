from lib import *
from torch.nn.attention import sdpa_kernel, SDPBackend
from triton.testing import do_bench
import itertools, json

t = lambda f: do_bench(f, warmup=4, rep=int(os.environ.get("REP", "25")), return_mode="median")


def peer(B, H, Hkv, T, D, causal):
    q = torch.randn(B, H, T, D, device=dev, dtype=torch.bfloat16, requires_grad=True)
    k, v = [torch.randn(B, Hkv, T, D, device=dev, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    do = torch.randn_like(q)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        f = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=H != Hkv)
        a = t(f)
        o = f()
        b = t(lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))
    return a, b


shapes = [
    (16, 12, 12, 1024, 64),
    (8, 16, 16, 2048, 64),
    (8, 16, 16, 2048, 128),
    (4, 32, 32, 4096, 128),
    (2, 32, 32, 8192, 128),
    (1, 32, 32, 16384, 128),
    (4, 32, 8, 4096, 128),
    (64, 12, 12, 1024, 64),
    (8, 32, 8, 4096, 64),
    (4, 24, 8, 4096, 128),
    (16, 25, 25, 1024, 64),
]
sel = os.environ.get("SHAPES")
shapes = [shapes[int(i)] for i in sel.split(",")] if sel else shapes

N = ()
SK = (("ATTN_SKIP", "1"),)
TF = (("ATTN_TURNS", "false"),)
RS = (("ATTN_RS", "1"),)
exec(open(os.path.dirname(__file__) + "/plan.py").read())
res = []


def one(B, H, Hkv, T, D, causal, **k):
    ch = dict(
        forward=next(x for x in A.FORWARD_STAGES if x[0] == D)[1:],
        dq=next(x for x in A.DQ_STAGES if x[0] == D)[1:],
        dkv=next(x for x in A.DKV_STAGES if x[0] == D)[1:],
    )
    ch.update(k)
    return Case(B, T, T, H, Hkv, D, causal, choice=A.AttentionChoice(**ch))


nm = lambda tile, de: "x".join(map(str, tile)) + "".join("+" + a[5:] + ("0" if b == "false" else "") for a, b in de)
for B, H, Hkv, T, D in shapes:
    for causal in (True, False):
        fl = 4 * B * H * T * T * D * (0.5 if causal else 1) / 1e9
        pa, pb = (0, 0)
        try:
            pa, pb = peer(B, H, Hkv, T, D, causal)
        except Exception as e:
            print("peer fail", str(e)[:200])
        F = {}
        Q = {}
        K = {}
        prep = None
        for tile, de in PLAN[D]["f"]:
            c = one(B, H, Hkv, T, D, causal, forward=tile, defines=de)
            F[nm(tile, de)] = t(c.fwd)
        c.bwd()
        torch.cuda.synchronize()
        prep = 0
        for key, dst in (("dq", Q), ("dkv", K)):
            for tile, de in PLAN[D][key]:
                c = one(B, H, Hkv, T, D, causal, **{key: tile}, defines=de)
                c.fwd()
                c.bwd()
                dst[nm(tile, de)] = t(c.bwd.launches[key])
        f, q, k = min(F.values()), min(Q.values()) if Q else 0, min(K.values()) if K else 0
        r = lambda d, m: " ".join("%s:%.0f" % (n, m * fl / x) for n, x in d.items())
        print(
            "%s %s cudnn %.0f/%.0f ours %.0f/%.0f ratio %.2f/%.2f | f %s | dq %s | dkv %s | prep %.0fus"
            % (
                (B, H, Hkv, T, D),
                "C" if causal else "F",
                fl / pa,
                2.5 * fl / pb,
                fl / f,
                2.5 * fl / (q + k + prep),
                pa / f,
                pb / (q + k + prep),
                r(F, 1),
                r(Q, 1.5),
                r(K, 2),
                prep * 1e3,
            ),
            flush=True,
        )
        res.append(dict(shape=(B, H, Hkv, T, D), causal=causal, peer=(pa, pb), f=F, dq=Q, dkv=K, prep=prep))
