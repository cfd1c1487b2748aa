import sys, itertools, time, math
import torch
from alpha.cudart import *
from alpha.cudart import gemm as G

dev = torch.device("cuda")
torch.zeros(1, device=dev)
Device.open()
P, C = G.GemmProblem, G.GemmConfig
gen = torch.Generator(device="cuda")
seed = int(time.time_ns() % 2**31)
gen.manual_seed(seed)
print("seed", seed)


def up(x, k):
    return -(-x // k) * k


def mat(rows, cols, ld, batch, exact, scale=1.0):
    t = torch.full((batch, rows, ld), float("nan"), device=dev, dtype=torch.bfloat16)
    if exact:
        v = torch.randint(-2, 3, (batch, rows, cols), generator=gen, device=dev).to(torch.bfloat16)
    else:
        v = (torch.randn(batch, rows, cols, generator=gen, device=dev) * scale).to(torch.bfloat16)
    t[:, :, :cols] = v
    return t


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def dgelu(x):
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    t = torch.tanh(u)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


def run(p, c, exact, reps=2):
    pad = 8
    pair = 2 if p.activation == "swiglu" else 1
    lda = up(p.k if p.a_major == "k" else p.m, 8) + pad
    ldb = up(p.k if p.b_major == "k" else p.n, 8) + pad
    a = mat(*((p.m, p.k) if p.a_major == "k" else (p.k, p.m)), lda, p.batch, exact)
    b = mat(*((p.n * pair, p.k) if p.b_major == "k" else (p.k, p.n)), ldb, p.batch, exact, 1 / math.sqrt(p.k))
    ldc = up(p.n, 8) + pad
    ct = torch.bfloat16 if p.out == "bf16" else torch.float32
    ldaux = up(p.n * (pair if p.save_pre else 1), 8) + (0 if pair == 2 else pad)
    import dataclasses

    p = dataclasses.replace(p, lda=lda, ldb=ldb, ldc=ldc, ldaux=ldaux if (p.save_pre or p.aux_input != "none") else 0)
    c0 = torch.full((p.batch, p.m, ldc), float("nan"), device=dev, dtype=ct)
    if p.out == "f32+=":
        c0[:, :, : p.n] = (
            torch.randint(-9, 9, (p.batch, p.m, p.n), device=dev).float() if exact else torch.randn(p.batch, p.m, p.n, device=dev)
        )
    aux0 = None
    aux = None
    if p.aux_input != "none":
        aux0 = mat(p.m, p.n, ldaux, p.batch, exact)
    elif p.save_pre:
        aux0 = torch.full((p.batch, p.m, ldaux), float("nan"), device=dev, dtype=torch.bfloat16)
    bias = torch.randint(-3, 4, (up(p.n, 8),), device=dev).to(torch.bfloat16) if p.bias else None
    ws = torch.full((max(c.workspace_bytes() // 4, 4),), float("nan"), device=dev)
    A = a[:, :, : (p.k if p.a_major == "k" else p.m)].double()
    B = b[:, :, : (p.k if p.b_major == "k" else p.n)].double()
    if p.a_major == "m":
        A = A.transpose(1, 2)
    if p.b_major == "k":
        B = B.transpose(1, 2)
    ref = A @ B
    mag = A.abs() @ B.abs()
    if bias is not None:
        ref = ref + bias[: p.n].double()
        mag = mag + bias[: p.n].double().abs()
    gam = (p.k / 16 + 4) * 2.0**-22
    pre = ref
    tol_pre = gam * mag
    extra = 2.0**-19 if p.activation != "none" or p.aux_input == "gelu_gradient" else 0
    if p.activation == "gelu":
        ref = gelu(pre)
        tol = 1.13 * tol_pre + extra * (pre.abs())
    elif pair == 2:
        g, u = pre[..., : p.n], pre[..., p.n :]
        s = torch.sigmoid(g)
        ref = g * s * u
        tol = (
            1.1 * u.abs() * tol_pre[..., : p.n]
            + (g * s).abs() * tol_pre[..., p.n :]
            + tol_pre[..., : p.n] * tol_pre[..., p.n :]
            + extra * (g * u).abs()
        )
    else:
        tol = tol_pre
    if p.aux_input == "residual":
        r = aux0[:, :, : p.n].double()
        ref = ref + r
        tol = tol + r.abs() * 2.0**-23
    if p.aux_input == "gelu_gradient":
        d = dgelu(aux0[:, :, : p.n].double())
        tol = tol * d.abs() + extra * (1 + aux0[:, :, : p.n].double().abs()) * ref.abs()
        ref = ref * d
    if p.out == "f32+=":
        ref = ref + c0[:, :, : p.n].double()
        tol = tol + 2.0**-23 * ref.abs()
    half = 2.0**-8 if ct == torch.bfloat16 else 2.0**-24
    tol = tol + half * 1.01 * ref.abs() + 1e-37
    outs = []
    sa, sb = a.clone(), b.clone()
    for rep in range(reps):
        cc = c0.clone()
        ax = aux0.clone() if aux0 is not None else None
        ws.fill_(float("nan"))
        cfg = c if rep == 0 else dataclasses.replace(c, blocks=[0, 34, 66][rep % 3])
        g = G.prepare(
            p,
            cfg,
            a=a.data_ptr(),
            b=b.data_ptr(),
            c=cc.data_ptr(),
            aux=ax.data_ptr() if ax is not None else 0,
            bias=bias.data_ptr() if bias is not None else 0,
            workspace=ws.data_ptr(),
        )
        g(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        outs.append((cc, ax))
    cc, ax = outs[0]
    msg = []
    out = cc[:, :, : p.n].double()
    err = (out - ref).abs()
    if not bool((err <= tol).all()):
        bad = ~(err <= tol)
        i = bad.nonzero()[0].tolist()
        msg.append(
            f"{int(bad.sum())}/{bad.numel()} bad, first {i} got {out[tuple(i)].item()} want {ref[tuple(i)].item()} tol {tol[tuple(i)].item()}"
        )
    if exact and p.activation == "none" and p.aux_input != "gelu_gradient":
        if not torch.equal(cc[:, :, : p.n].double(), ref.to(ct).double()):
            msg.append("not exact")
    edge = up(p.n, 8 if ct == torch.bfloat16 else 4)
    if not bool(torch.isnan(cc[:, :, edge:].float()).all()):
        msg.append("wrote padding")
    e = cc[:, :, p.n : edge].float()
    if not bool((torch.isnan(e) | (e == 0)).all()):
        msg.append("wrote non-zero padding")
    if p.save_pre:
        e = (ax[:, :, : pre.shape[-1]].double() - pre).abs()
        if not bool((e <= tol_pre + 2.0**-8 * 1.01 * pre.abs() + 1e-37).all()):
            msg.append("pre wrong")
    for cc2, ax2 in outs[1:]:
        if not torch.equal(cc.view(torch.uint8), cc2.view(torch.uint8)):
            msg.append("not repeatable")
        if ax is not None and not torch.equal(ax.view(torch.uint8), ax2.view(torch.uint8)):
            msg.append("aux not repeatable")
    if not (torch.equal(sa.view(torch.uint8), a.view(torch.uint8)) and torch.equal(sb.view(torch.uint8), b.view(torch.uint8))):
        msg.append("inputs changed")
    q = float((err / tol).nan_to_num(nan=1e9).max())
    return msg, q


coop = C()
configs = [
    C(),
    C(cluster=1),
    C(bm=256, bn=128),
    C(bm=128, bn=128, pingpong=True, stages=6),
    C(bm=64, bn=256, pingpong=True, stages=4),
    C(bm=128, bn=128, stages=6, cluster=1, along_n=True, group=3),
    C(bn=192, stages=4, staging=3),
    C(bm=128, bn=128, pingpong=True, stages=5, staging=4),
    C(stages=3, staging=4, cluster=1),
]
shapes = [(1, 1, 1), (127, 129, 65), (257, 255, 63), (131, 1009, 257), (512, 768, 320), (640, 8, 1000), (1, 300, 17)]
lay = [("k", "k"), ("k", "n"), ("m", "n"), ("m", "k")]
cases = []
for ci, c in enumerate(configs):
    for am, bm in lay:
        for si, (m, n, k) in enumerate(shapes):
            for out in ("bf16", "f32", "f32+="):
                if (si + ci + len(out)) % 3:
                    continue
                cases.append((P(m=m, n=n, k=k, a_major=am, b_major=bm, out=out), c))
    cases.append((P(m=200, n=264, k=130, batch=3, b_major="n"), c))
    cases.append((P(m=200, n=264, k=130, batch=3, a_major="m", b_major="n", out="f32+="), c))
    for m, n, k in [(257, 520, 200), (384, 1000, 64)]:
        for e in (
            dict(bias=True),
            dict(bias=True, activation="gelu", save_pre=True),
            dict(activation="gelu"),
            dict(aux_input="residual", bias=True),
            dict(aux_input="gelu_gradient", b_major="n"),
            dict(bias=True, out="f32"),
            dict(activation="swiglu"),
            dict(activation="swiglu", save_pre=True),
            dict(aux_input="residual", batch=2),
        ):
            if e.get("activation") == "swiglu" and c.bn == 192:
                continue
            cases.append((P(m=m, n=n, k=k, **e), c))
import dataclasses

for c in (C(), C(cluster=1, bm=256, bn=128), C(bm=128, bn=128, pingpong=True, stages=6)):
    for (m, n, k), f in itertools.product([(257, 255, 1000), (512, 768, 2048), (700, 300, 777)], [1, 2, 3]):
        for out in ("bf16", "f32", "f32+="):
            p = P(m=m, n=n, k=k, a_major="m", b_major="n", out=out)
            t = c.tiles(p)[2]
            ks = -(-k // 64)
            st = t if f < 3 else max(1, t - 2)
            su = min(st * ks, max(st, {1: 7, 2: 3 * st, 3: st + 1}[f]))
            cases.append((p, dataclasses.replace(c, split_tiles=st, split_units=su)))
t = time.time()
srcs = sorted({s for p, c in cases for s in c.sources(p)}, key=str)
cub = compile_all(srcs, jobs=16)
print(
    len(srcs),
    "cubins",
    round(time.time() - t, 1),
    "s; spills",
    [str(x.source) for x in cub if any(r.spill_stores or r.stack for r in x.resources.values())],
)
bad = 0
worst = 0
t = time.time()
nrun = 0
for p, c in cases:
    for exact in (True, False):
        try:
            msg, q = run(p, c, exact)
        except Exception as e:
            msg, q = [type(e).__name__ + ": " + str(e)[:300]], 0
        nrun += 1
        if nrun % 100 == 0:
            print(nrun, round(time.time() - t, 1), "s", c)
            sys.stdout.flush()
        worst = max(worst, q) if not msg else worst
        if msg:
            bad += 1
            if bad <= 25:
                print("FAIL", p, "|", c, "exact" if exact else "", msg)
            if "CudaError" in msg[0] or "illegal" in str(msg):
                print("abort")
                sys.exit(1)
print(f"{nrun} cases, {bad} bad, worst error/tolerance of passing {worst:.3f}, {time.time() - t:.1f} s")
