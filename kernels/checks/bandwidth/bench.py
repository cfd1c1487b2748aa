"""Large shapes: check against torch float64 on sampled rows, 100 bitwise repeats, times of CUDA-graph replays over rotated inputs, torch beside."""

import os, sys, json, time, itertools

sys.path.insert(0, os.getcwd())
import torch, numpy as np

torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
D = "cuda"
torch.zeros(1, device=D)
from alpha.cudart import capture, norm, loss, update, embedding, rope, elementwise as ew
from alpha.cudart.device import Device
from alpha.cudart.memory import Span
from dataclasses import replace

dev = Device.open()
S = dev.stream()
bf = torch.bfloat16
f32 = torch.float32
REPS = int(os.environ.get("REPS", "100"))
PEERS = os.environ.get("PEERS", "eager").split(",")
res = []
t0 = time.time()


def rn(*s, dt=bf, mul=1.0):
    return (torch.randn(*s, device=D) * mul).to(dt)


nan = lambda *s, dt=bf: torch.full(s, float("nan"), device=D, dtype=dt)


def gtime(ops, peer=False):
    """median ms of one op: a graph that walks over the sets, at least 3 ms of work"""
    torch.cuda.synchronize()
    if peer:
        st = torch.cuda.Stream()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.stream(st):
            for o in ops:
                o()
        torch.cuda.synchronize()
        with torch.cuda.graph(g, stream=st):
            for o in ops:
                o()
        run = g.replay
        n = len(ops)
        ev = lambda: torch.cuda.Event(enable_timing=True)
        run()
        ts = []
        for _ in range(7):
            a, b = ev(), ev()
            a.record()
            run()
            run()
            b.record()
            b.synchronize()
            ts.append(a.elapsed_time(b) / 2 / n)
        return sorted(ts)[3]
    for o in ops:
        o(S)
    dev.synchronize()
    g = capture(lambda s: [o(s) for o in ops], S)
    g.launch(S)
    dev.synchronize()
    ts = []
    for _ in range(7):
        a, b = dev.event(), dev.event()
        a.record(S)
        g.launch(S)
        g.launch(S)
        b.record(S)
        b.synchronize()
        ts.append(b.time_since(a) / 2 / len(ops))
    g.destroy()
    return sorted(ts)[3]


COPY = None


def report(name, nbytes, ms, peers=()):
    tb = nbytes / ms / 1e9
    p = " ".join("%s %.2f TB/s ratio %.2f" % (k, nbytes / v / 1e9, v / ms) for k, v in peers)
    print("%-46s %7.1f us %.2f TB/s %3.0f%% %s  [%.0fs]" % (name, ms * 1e3, tb, 100 * tb / COPY, p, time.time() - t0), flush=True)
    res.append((name, nbytes, ms, dict(peers)))


def attempt(f):
    try:
        f()
    except Exception as e:
        print("ERROR", f.__name__, type(e).__name__, str(e)[:300], flush=True)


def peer(name, fs, compiled=True):
    out = []
    for kind in PEERS:
        if kind == "eager":
            out.append(("eager", gtime(fs[0], True)))
        if kind == "compile" and compiled and len(fs) > 1:
            out.append(("compile", gtime(fs[1], True)))
    return out


def repeat(op, outs, reset=None):
    first = None
    for i in range(REPS):
        for o in outs:
            o.view(torch.uint8).fill_(255) if reset is None else None
        if reset:
            reset()
        torch.cuda.synchronize()
        op(S)
        dev.synchronize()
        if first is None:
            first = [o.clone() for o in outs]
        elif not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, outs)):
            print("NOT REPEATABLE", op.name[:60])
            return


def close(name, got, want, naive):
    got, want, naive = got.double(), want.double(), naive.double()
    e = (got - want).abs()
    n = (naive - want).abs().max()
    u = 2.0**-9 if True else 0
    tol = torch.maximum(2 * n, want.abs() * u * 1.01 + want.abs().max() * 2.0**-22)
    ok = bool((e <= tol).all())
    print("  %s %s err %.2e naive %.2e" % ("ok" if ok else "FAIL", name, e.max(), n)) if not ok or os.environ.get("V") else None


def sets(nbytes):
    return max(2, min(8, -(-400_000_000 // nbytes)))


a = torch.empty(1 << 29, device=D, dtype=torch.uint8)
b = torch.empty_like(a)
COPY = 2 * a.numel() / gtime([lambda: b.copy_(a)] * 4, True) / 1e9
print("copy %.2f TB/s" % COPY)
del a, b
F = torch.nn.functional


def norms():
    for kind, rows, w, add in (
        ("rms", 65536, 768, False),
        ("rms", 16384, 4096, False),
        ("rms", 32768, 2048, True),
        ("layer", 65536, 768, False),
        ("layer", 65536, 768, True),
        ("rms", 16384, 4096, True),
        ("layer", 16384, 4096, False),
        ("rms", 8192, 8192, False),
    ):
        p = norm.NormProblem(rows=rows, width=w, kind=kind, add=add)
        n = sets(rows * w * 4)
        g, be = rn(w) * 0.2 + 1, rn(w)
        X = [rn(rows, w) for _ in range(n)]
        B = [rn(rows, w) for _ in range(n)] if add else X
        Y = [nan(rows, w) for _ in range(n)]
        Sx = [nan(rows, w) for _ in range(n)] if add else Y
        m, r = nan(rows, dt=f32), nan(rows, dt=f32)
        base = norm.choose_forward(p)
        cands = {"choice": base, "ahead": replace(base, ahead=True), "v2": None, "lowreg": replace(base, blocks=base.blocks + 1)}
        if p.vectors > 128:
            cands["v2"] = replace(base, threads=base.threads * 2, vectors=-(-base.vectors // 2), blocks=max(1, base.blocks // 2))
        best = {}
        mk = lambda c: [
            norm.forward(
                p,
                x=X[i].data_ptr(),
                b=B[i].data_ptr(),
                s=Sx[i].data_ptr(),
                y=Y[i].data_ptr(),
                gamma=g.data_ptr(),
                beta=be.data_ptr(),
                mean=m.data_ptr(),
                rstd=r.data_ptr(),
                config=c,
            )
            for i in range(n)
        ]
        for k, c in cands.items():
            if c is None:
                continue
            ops = mk(c)
            best[k] = gtime(ops)
        ops = mk(base)
        repeat(ops[0], [Y[0], r] + ([Sx[0]] if add else []))
        pe = []
        if not add:
            tf = (lambda x: F.rms_norm(x, (w,), g, 1e-5)) if kind == "rms" else (lambda x: F.layer_norm(x, (w,), g, be, 1e-5))
            tc = torch.compile(tf) if "compile" in PEERS else None
            pe = peer("", ([lambda x=x: tf(x) for x in X], [lambda x=x: tc(x) for x in X]) if tc else ([lambda x=x: tf(x) for x in X],))
        x = (X[0][:64].double() + B[0][:64].double()).to(bf) if add else X[0][:64]
        xd = x.double()
        gd = g.double()
        want = (
            xd * torch.rsqrt(xd.pow(2).mean(-1, keepdim=True) + 1e-5) * gd
            if kind == "rms"
            else F.layer_norm(xd, (w,), gd, be.double(), 1e-5)
        )
        close("fwd", Y[0][:64], want, want.to(bf) * 1)
        report(
            f"{kind} fwd {rows}x{w}{' add' if add else ''} " + " ".join("%s %.0f" % (k, v * 1e3) for k, v in best.items()),
            ops[0].nbytes,
            best["choice"],
            pe,
        )
        DX = [nan(rows, w) for _ in range(n)]
        pa = torch.empty(p.partial_bytes() // 4 + 8, device=D)
        dg, db = nan(w, dt=f32), nan(w, dt=f32)
        base = norm.choose_backward(p)
        cands = {
            "choice": base,
            "flip": replace(base, ahead=not base.ahead),
            "rows1": replace(base, rows=1, ahead=True),
            "rows4": replace(base, rows=4, ahead=False, blocks=max(1, base.blocks * 2 // 3)),
        }
        mk = lambda c: [
            norm.backward(
                p,
                dy=Y[i].data_ptr(),
                x=X[i].data_ptr(),
                gamma=g.data_ptr(),
                mean=m.data_ptr(),
                rstd=r.data_ptr(),
                residual=B[i].data_ptr(),
                dx=DX[i].data_ptr(),
                dgamma=dg.data_ptr(),
                dbeta=db.data_ptr(),
                partial=pa.data_ptr(),
                config=c,
            )
            for i in range(n)
        ]
        best = {k: gtime(mk(c)) for k, c in cands.items()}
        ops = mk(base)
        repeat(ops[0], [DX[0], dg])
        ref = torch.zeros(w, device=D, dtype=torch.float64)
        for q in range(0, rows, 8192):
            xx, dd = X[0][q : q + 8192].double(), Y[0][q : q + 8192].double()
            ref += (dd * ((xx - m[q : q + 8192, None].double()) if kind == "layer" else xx) * r[q : q + 8192, None].double()).sum(0)
        e = ((dg.double() - ref).abs().max() / ref.abs().max()).item()
        print("  dgamma rel err %.1e" % e) if not e < 1e-5 else None
        pe = []
        if not add:
            xs = [x.detach().requires_grad_(True) for x in X]
            gg = g.detach().requires_grad_(True)
            bb = be.detach().requires_grad_(True)
            os_ = [F.rms_norm(x, (w,), gg, 1e-5) if kind == "rms" else F.layer_norm(x, (w,), gg, bb, 1e-5) for x in xs]
            prm = (gg,) if kind == "rms" else (gg, bb)
            pe = peer(
                "", ([lambda o=o, x=x, y=y: torch.autograd.grad(o, (x,) + prm, y, retain_graph=True) for o, x, y in zip(os_, xs, Y)],)
            )
        report(
            f"{kind} bwd {rows}x{w}{' add' if add else ''} " + " ".join("%s %.0f" % (k, v * 1e3) for k, v in best.items()),
            ops[0].nbytes,
            best["choice"],
            pe,
        )


def losses():
    for rows, V, st in ((16384, 50257, 50304), (16384, 32768, 0), (8192, 128256, 0)):
        ld = st or V
        L0 = rn(rows, ld, mul=2)
        L = L0.clone()
        t = torch.randint(0, V, (rows,), device=D, dtype=torch.int32)
        t[::7] = -1
        lo, ls = nan(rows, dt=f32), nan(rows, dt=f32)
        d = torch.ones(1, device=D)
        p = loss.LossProblem(rows=rows, vocabulary=V, stride=ld, z_loss=1e-4)
        c = loss.choose(p, "fused")
        ops = {}
        cands = {"choice": c}
        if c.threads == 512:
            cands["t1024"] = replace(c, threads=1024, shared=-(-c.shared // 2), blocks=min(2, c.blocks))
        best = {
            k: gtime(
                [
                    loss.cross_entropy(
                        p,
                        "fused",
                        logits=L.data_ptr(),
                        targets=t.data_ptr(),
                        lse=ls.data_ptr(),
                        loss=lo.data_ptr(),
                        dloss=d.data_ptr(),
                        config=q,
                    )
                ]
                * 2
            )
            for k, q in cands.items()
        }
        op = loss.cross_entropy(
            p, "fused", logits=L.data_ptr(), targets=t.data_ptr(), lse=ls.data_ptr(), loss=lo.data_ptr(), dloss=d.data_ptr()
        )
        L.copy_(L0)
        torch.cuda.synchronize()
        op(S)
        dev.synchronize()
        for q in range(0, 128):
            x = L0[q, :V].double()
            l = torch.logsumexp(x, 0)
            assert abs(ls[q].item() - l.item()) < 1e-5 * max(1, abs(l.item())), ("lse", q)
            g = torch.softmax(x, 0) * (1 + 2e-4 * l)
            w = 0.0 if t[q] < 0 else (l - x[t[q].long()] + 1e-4 * l * l).item()
            if t[q] >= 0:
                g[t[q].long()] -= 1
            else:
                g.zero_()
            e = (L[q, :V].double() - g).abs() - g.abs() * 2.0**-8.9 - 1e-9
            if not (e.max() <= 0 and abs(lo[q].item() - w) < 2e-5 * max(1, abs(w))):
                print("  FAIL loss row", q, e.max().item(), lo[q].item(), w)
                break
        if ld > V and not torch.equal(L[:, V:], L0[:, V:]):
            print("  FAIL padding written")
        repeat(op, [L, lo, ls], lambda: L.copy_(L0)) if REPS <= 10 else None
        g1 = loss.cross_entropy(p, "loss", logits=L0.data_ptr(), targets=t.data_ptr(), lse=ls.data_ptr(), loss=lo.data_ptr())
        m1 = gtime([g1] * 2)
        del L
        xr = L0[:, :V].contiguous() if ld > V else L0
        xr = xr.detach().requires_grad_(True)
        tl = t.long().clamp(min=-1)

        def eager():
            o = F.cross_entropy(xr.float(), tl, ignore_index=-1, reduction="sum")
            return torch.autograd.grad(o, xr)

        pe = []
        try:
            if "compile" in PEERS:
                tc = torch.compile(lambda x: F.cross_entropy(x.float(), tl, ignore_index=-1, reduction="sum"))
                pe = peer("", ([eager], [lambda: torch.autograd.grad(tc(xr), xr)]))
            else:
                pe = peer("", ([eager],))
        except Exception as ex:
            print("  peer", str(ex)[:100])
        report(f"cross entropy {rows}x{V} " + " ".join("%s %.0f" % (k, v * 1e3) for k, v in best.items()), op.nbytes, best["choice"], pe)
        report(f"  loss only {rows}x{V}", g1.nbytes, m1)
        del L0, xr
        torch.cuda.empty_cache()


def updates():
    n = 400_000_000
    seg = [(i * 8_000_000, 7_999_936, float(i % 2), 1.0) for i in range(50)]
    el = sum(s[1] for s in seg)
    up = lambda a: torch.from_numpy(a.view(np.uint8)).to(D)
    tab, nt = update.adamw_table(seg), update.norm_table([s[:2] for s in seg])
    T, NT = up(tab), up(nt)
    p, g, m, v = [rn(n, dt=f32) for _ in range(4)]
    v.abs_()
    cp = nan(n)
    sc = {k: torch.ones(1, device=D) for k in ("co", "lr", "loss", "count", "norm", "mean")}
    sc["lr"].fill_(1e-3)
    si = {k: torch.ones(1, device=D, dtype=torch.int32) for k in ("step", "fin", "used")}
    for copy in ("none", "nearest", "stochastic"):
        pr = update.AdamwProblem(chunks=len(tab), elements=el, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, copy=copy)
        kw = dict(
            table=T.data_ptr(),
            param=p.data_ptr(),
            grad=g.data_ptr(),
            m=m.data_ptr(),
            v=v.data_ptr(),
            coefficient=sc["co"].data_ptr(),
            lr=sc["lr"].data_ptr(),
            step=si["step"].data_ptr(),
            finite=si["fin"].data_ptr(),
            copy=cp.data_ptr(),
        )
        op = update.adamw(pr, **kw)
        more = {b: gtime([update.adamw(pr, blocks=b, **kw)] * 2) for b in (132, 264)} if copy == "nearest" else {}
        report(f"adamw {copy} " + " ".join("%s %.0f" % (k, q * 1e3) for k, q in more.items()), op.nbytes, gtime([op] * 2))
    P = p[:100_000_000].clone().requires_grad_(True)
    P.grad = g[:100_000_000].clone()
    opt = torch.optim.AdamW([P], lr=1e-3, fused=True)
    opt.step()
    torch.cuda.synchronize()
    e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    e[0].record()
    [opt.step() for _ in range(5)]
    e[1].record()
    e[1].synchronize()
    ms = e[0].elapsed_time(e[1]) / 5
    report("  torch fused adamw 1e8 (28 B)", 28e8, ms)
    del P, opt
    parts = torch.empty(len(nt) * 8, device=D)
    gn = update.global_norm(len(nt), grads=g.data_ptr(), table=NT.data_ptr(), parts=parts.data_ptr())
    st = update.step(
        len(nt),
        update.StepRule(max_norm=1.0, schedule="cosine", peak=1e-3, floor=0.1, warmup=10, total=100),
        parts=parts.data_ptr(),
        loss=sc["loss"].data_ptr(),
        count=sc["count"].data_ptr(),
        step=si["step"].data_ptr(),
        norm=sc["norm"].data_ptr(),
        mean_norm=sc["mean"].data_ptr(),
        coefficient=sc["co"].data_ptr(),
        finite=si["fin"].data_ptr(),
        lr=sc["lr"].data_ptr(),
        used=si["used"].data_ptr(),
        next=si["step"].data_ptr(),
    )
    report("global norm 4e8", el * 4, gtime([gn] * 2))
    report("step scalars", 1, gtime([st] * 20))
    gn(S)
    st(S)
    dev.synchronize()
    ref = sum((g[s[0] : s[0] + s[1]].double() ** 2).sum().item() for s in seg) ** 0.5
    print("  norm rel err %.1e" % abs(sc["norm"].item() / ref - 1))


def embeds():
    for n, V, C in ((65536, 50304, 768), (32768, 32768, 2048), (16384, 128256, 4096)):
        w = 1 / torch.arange(1, V + 1, dtype=torch.float64)
        ids = torch.multinomial(w.to(D), n, replacement=True).to(torch.int32)
        perm = torch.randperm(V, device=D).int()
        ids = perm[ids.long()].contiguous()
        p = embedding.EmbeddingProblem(count=n, vocabulary=V, width=C)
        k = sets(n * C * 2)
        dy = [rn(n, C) for _ in range(k)]
        dT = nan(V, C, dt=f32)
        ws = torch.full((p.workspace_bytes(),), 255, device=D, dtype=torch.uint8)
        T, po = rn(V, C), rn(1024, C)
        y = [nan(n, C) for _ in range(k)]
        f = [embedding.forward(p, table=T.data_ptr(), ids=ids.data_ptr(), y=q.data_ptr(), positions=po.data_ptr(), period=1024) for q in y]
        report(f"embedding+pos fwd {n} {V}x{C}", f[0].nbytes, gtime(f))
        for out in ("f32", "f32+="):
            ops = [
                embedding.backward(
                    p, dy=q.data_ptr(), ids=ids.data_ptr(), dtable=dT.data_ptr(), workspace=Span(ws.data_ptr(), ws.numel()), out=out
                )
                for q in dy
            ]
            if out == "f32":
                repeat(ops[0], [dT])
                ref = torch.zeros(V, C, device=D, dtype=torch.float64).index_add_(0, ids.long(), dy[0].double())
                e = ((dT.double() - ref).abs().max() / ref.abs().max()).item()
                print("  emb rel err %.1e" % e)
                del ref
            rows = torch.unique(ids).numel()
            nb = n * C * 2 + (V if out == "f32" else 2 * rows) * C * 4
            pe = (
                peer("", ([lambda q=q: torch.ops.aten.embedding_dense_backward(q, ids.long(), V, -1, False) for q in dy],))
                if out == "f32"
                else []
            )
            report(f"embedding bwd {out} {n} {V}x{C}", nb, gtime(ops), pe)
        del dy, y, dT, ws, T
        torch.cuda.empty_cache()


def ropes():
    for rows, H, kv, d, T in ((32768, 32, 8, 128, 4096), (65536, 12, 12, 64, 1024)):
        ld = (H + 2 * kv) * d
        n = sets(rows * ld * 2)
        X = [rn(rows, ld) for _ in range(n)]
        pos = (torch.arange(rows, device=D) % T).int()
        tb = nan(T, d, dt=f32)
        rope.table(T, d, base=5e5, out=tb.data_ptr())(S)
        p = rope.RopeProblem(rows=rows, heads=H + kv, head_dim=d, table_rows=T, stride=ld)
        x0 = X[0].clone()
        ops = [rope.rope(p, x=x.data_ptr(), y=x.data_ptr(), positions=pos.data_ptr(), turns=tb.data_ptr()) for x in X]
        torch.cuda.synchronize()
        ops[0](S)
        dev.synchronize()
        i = torch.arange(d // 2, device=D, dtype=torch.float64)
        ang = pos[:256].double()[:, None, None] * 5e5 ** (-2 * i / d)
        q = x0[:256, : (H + kv) * d].double().view(256, H + kv, d)
        a, b = q[..., : d // 2], q[..., d // 2 :]
        want = torch.cat([a * ang.cos() - b * ang.sin(), b * ang.cos() + a * ang.sin()], -1)
        close("rope", X[0][:256, : (H + kv) * d].view(256, H + kv, d), want, want.to(bf))
        if not torch.equal(X[0][:, (H + kv) * d :], x0[:, (H + kv) * d :]):
            print("  FAIL v changed")
        report(f"rope {rows} {H}+{kv} heads of {d}", ops[0].nbytes, gtime(ops))


def maps():
    n = 1 << 28
    for op, r, c in (
        ("gelu", 65536, 3072),
        ("gelu_bwd", 65536, 3072),
        ("swiglu", 32768, 8192),
        ("swiglu_bwd", 32768, 8192),
        ("swiglu", 16384, 14336),
    ):
        k = sets(r * c * 4)
        pk = [rn(r, 2 * c) for _ in range(k)]
        y = [nan(r, 2 * c) for _ in range(k)]
        dy = rn(r, c)
        ops = [
            ew.activation(
                op,
                r,
                c,
                a=a.data_ptr(),
                b=a.data_ptr() + 2 * c,
                dy=dy.data_ptr(),
                y=q.data_ptr(),
                y2=q.data_ptr() + 2 * c,
                a_stride=2 * c,
                b_stride=2 * c,
                y_stride=2 * c,
                y2_stride=2 * c,
            )
            for a, q in zip(pk, y)
        ]
        pe = []
        if op == "gelu":
            xs = [a[:, :c].contiguous() for a in pk]
            pe = peer("", ([lambda x=x: F.gelu(x, approximate="tanh") for x in xs],))
        if op == "swiglu" and "compile" in PEERS:
            tc = torch.compile(lambda x: F.silu(x[:, :c]) * x[:, c:])
            pe = [("compile", gtime([lambda x=x: tc(x) for x in pk], True))]
        report(f"{op} {r}x{c}", ops[0].nbytes, gtime(ops), pe)
        del pk, y
        torch.cuda.empty_cache()
    a, b = rn(n), rn(n)
    A, B = rn(n, dt=f32), rn(n, dt=f32)
    P = lambda t: t.data_ptr()
    for nm, o in (
        ("add bf16", ew.elementwise("add", n, y=P(a), y_dtype="bf16", a=P(a), b=P(b))),
        ("f32 += bf16", ew.elementwise("add", n, y=P(A), y_dtype="f32", a=P(A), a_dtype="f32", b=P(b))),
        ("f32 += f32", ew.elementwise("add", n, y=P(A), y_dtype="f32", a=P(A), a_dtype="f32", b=P(B), b_dtype="f32")),
        ("cast f32 bf16", ew.elementwise("cast", n, y=P(a), y_dtype="bf16", a=P(A), a_dtype="f32")),
        ("cast bf16 f32", ew.elementwise("cast", n, y=P(A), y_dtype="f32", a=P(b))),
        ("scale bf16", ew.elementwise("scale", n, y=P(a), y_dtype="bf16", a=P(b), factor=0.5)),
        ("fill f32", ew.elementwise("fill", n, y=P(A), y_dtype="f32", factor=0.0)),
    ):
        report(nm, o.nbytes, gtime([o] * 2))
    st = torch.ones(1, device=D, dtype=torch.int32)
    ids = torch.arange(64, device=D, dtype=torch.int32)
    o = ew.dropout(64, n // 64, x=P(a), y=P(b), step=P(st), sample_ids=P(ids), rate=0.1, key=(1, 2))
    report("dropout bf16", o.nbytes, gtime([o] * 2), peer("", ([lambda: F.dropout(a, 0.1)],)))
    for r, c in ((65536, 768), (65536, 3072), (16384, 4096)):
        x = rn(r, c)
        y = nan(c, dt=f32)
        pa = torch.empty(ew.column_bytes(r, c, "bf16") // 4 + 8, device=D)
        o = ew.column_sums(r, c, x=P(x), y=P(y), partial=P(pa))
        repeat(o, [y])
        e = ((y.double() - x.double().sum(0)).abs().max()).item()
        print("  columns err %.1e" % e) if not e < 1e-2 else None
        xs = [rn(r, c) for _ in range(sets(r * c * 2))]
        report(
            f"column sums {r}x{c}",
            o.nbytes,
            gtime([ew.column_sums(r, c, x=P(q), y=P(y), partial=P(pa)) for q in xs]),
            peer("", ([lambda q=q: q.sum(0) for q in xs],)),
        )
        del xs
    x = rn(64, 1024 * 768)
    y = nan(1024 * 768, dt=f32)
    o = ew.column_sums(64, 1024 * 768, x=P(x), y=P(y))
    report("position gradient 64x1024x768", o.nbytes, gtime([o] * 3))


for f in (norms, losses, updates, embeds, ropes, maps):
    if not sys.argv[1:] or f.__name__ in sys.argv[1:]:
        attempt(f)
