import os, sys, math, time, torch

sys.path.insert(0, os.getcwd())
from alpha.backends.cuda.kernels import flash as A
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.memory import Span

torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
dev = "cuda"


def span(t):
    return Span(t.data_ptr(), t.numel() * t.element_size())


def t4(t):
    return A.Tensor4(t.data_ptr(), t.stride(0), t.stride(1), t.stride(2))


class Case:
    def __init__(s, B, Sq, Sk, H, Hkv, D, causal=False, left=None, right=None, docs=None, mul=1.0, layout="bthd", choice=None, scale=None):
        s.kw = dict(B=B, Sq=Sq, Sk=Sk, H=H, Hkv=Hkv, D=D, causal=causal, left=left, right=right, docs=docs, mul=mul, layout=layout)
        s.p = A.AttentionProblem(
            batch=B,
            queries=Sq,
            keys=Sk,
            heads=H,
            kv_heads=Hkv,
            head_dim=D,
            causal=causal,
            left=left,
            right=right,
            packed=docs is not None,
            scale=scale,
        )
        bf = torch.bfloat16
        G = 3  # guard rows

        def mk(S, h, rand):
            if layout == "bhtd":
                b = torch.full((B, h, S + G, D), float("nan"), device=dev, dtype=bf)
                v = b.transpose(1, 2)[:, :S]
            else:
                b = torch.full((B, S + G, h, D), float("nan"), device=dev, dtype=bf)
                v = b[:, :S]
            if rand:
                v.copy_(torch.randn(B, S, h, D, device=dev) * mul)
            return v, b

        s.guards = []
        if layout == "packed":

            def mkp(rand):
                b = torch.full((B, Sq + G, H + 2 * Hkv, D), float("nan"), device=dev, dtype=bf)
                v = b[:, :Sq]
                if rand:
                    v.copy_(torch.randn(B, Sq, H + 2 * Hkv, D, device=dev) * mul)
                else:
                    s.guards.append(b)
                return v[:, :, :H], v[:, :, H : H + Hkv], v[:, :, H + Hkv :]

            s.q, s.k, s.v = mkp(True)
            s.dq, s.dk, s.dv = mkp(False)
        else:
            s.q = mk(Sq, H, True)[0]
            s.k = mk(Sk, Hkv, True)[0]
            s.v = mk(Sk, Hkv, True)[0]
            s.dq, g1 = mk(Sq, H, False)
            s.dk, g2 = mk(Sk, Hkv, False)
            s.dv, g3 = mk(Sk, Hkv, False)
            s.guards += [g1, g2, g3]
        if mul != 1.0:
            s.v.copy_(s.v / mul)
        s.o, g = mk(Sq, H, False)
        s.guards.append(g)
        s.do = mk(Sq, H, False)[0]
        s.do.copy_(torch.randn(B, Sq, H, D, device=dev))
        s.layout = layout
        s.G = G
        s.lse = torch.full((B, H, Sq), float("nan"), device=dev)
        s.ws = torch.full(((choice or A.choose(s.p)).workspace_bytes(s.p) // 4,), float("nan"), device=dev)
        s.queue = torch.zeros(64, dtype=torch.int32, device=dev)
        s.ids = packed = None
        s.find = []
        if docs is not None:
            s.ids = torch.randint(0, docs, (B, Sq), device=dev).sort(1).values.int()
            s.bounds = torch.empty(s.p.documents_bytes(), dtype=torch.uint8, device=dev)
            packed = A.Documents(s.p, span(s.ids), span(s.ids), span(s.bounds))
            s.find = [packed.find_keys(), packed.find_queries()]
        d = dict(docs=packed, choice=choice)
        s.fwd = A.AttentionForward(s.p, t4(s.q), t4(s.k), t4(s.v), t4(s.o), span(s.lse), span(s.queue), **d)
        s.bwd = A.AttentionBackward(
            s.p, t4(s.q), t4(s.k), t4(s.v), t4(s.o), span(s.lse), t4(s.do), t4(s.dq), t4(s.dk), t4(s.dv), span(s.ws), span(s.queue), **d
        )

    def outs(s):
        return [s.o, s.lse, s.dq, s.dk, s.dv]

    def poison(s):
        for t in s.outs():
            t.fill_(float("nan"))
        s.ws.fill_(float("nan"))

    def ref(s, dt):
        """formulas in dtype dt with that type's rounding after each operation"""
        p = s.p
        g = p.heads // p.kv_heads
        q, k, v, do = [x.transpose(1, 2).to(dt) for x in (s.q, s.k, s.v, s.do)]
        k = k.repeat_interleave(g, 1)
        v = v.repeat_interleave(g, 1)
        S = (q @ k.transpose(-1, -2)) * p.logit_scale
        i = torch.arange(p.queries, device=dev)[:, None] + p.keys - p.queries
        j = torch.arange(p.keys, device=dev)[None]
        l, r = p.window
        m = (j >= i - l) & (j <= i + r)
        m = m[None, None]
        if s.ids is not None:
            m = m & (s.ids[:, :, None] == s.ids[:, None, :])[:, None]
        S = S.masked_fill(~m, float("-inf"))
        lse = torch.logsumexp(S, -1)
        P = torch.softmax(S, -1).masked_fill(~m, 0)
        O = P @ v
        dP = do @ v.transpose(-1, -2)
        if dt == torch.float64:
            delta = (P * dP).sum(-1, keepdim=True)
        else:
            delta = (do * O).sum(-1, keepdim=True)
        dS = P * (dP - delta)
        dq = (dS @ k) * p.logit_scale
        dk = (dS.transpose(-1, -2) @ q) * p.logit_scale
        dv = P.transpose(-1, -2) @ do
        B, S_, D = p.batch, p.keys, p.head_dim
        dk = dk.view(B, p.kv_heads, g, S_, D).sum(2)
        dv = dv.view(B, p.kv_heads, g, S_, D).sum(2)
        return [O.transpose(1, 2), lse, dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)]

    def check(s, verbose=False):
        ins = [x.clone() for x in (s.q, s.k, s.v, s.do)]
        s.poison()
        for f in s.find:
            f()
        s.fwd()
        s.bwd()
        torch.cuda.synchronize()
        got = [t.clone().double() for t in s.outs()]
        ref = s.ref(torch.float64)
        nai = s.ref(torch.bfloat16)
        ok = True
        msg = []
        for a, b in zip(ins, (s.q, s.k, s.v, s.do)):
            ok &= torch.equal(a, b)
        if not ok:
            msg.append("inputs changed")
        for g in s.guards:
            S = g.shape[2 if s.layout == "bhtd" else 1]
            r = g[:, :, S - s.G :] if s.layout == "bhtd" else g[:, S - s.G :]
            if not bool(torch.isnan(r).all()):
                ok = False
                msg.append("guard written")
        if int(s.queue.abs().sum()):
            ok = False
            msg.append("queue not zero")
        p_len = max(s.p.queries, s.p.keys)
        for n, a, r, x in zip(("o", "lse", "dq", "dk", "dv"), got, ref, nai):
            if n == "lse":
                inf = torch.isinf(r)
                e = (a - r).abs()
                bad = (a != r) & inf
                tol = 1e-5 + 2e-6 * r.abs() + 3e-7 * s.kw["mul"] ** 2 * 8 * 20
                good = bool((((e <= tol) & ~inf) | (inf & ~bad)).all())
                worst = float(torch.where(inf, 0, e).max())
                lim = float(torch.where(inf, 0, tol).min())
            else:
                e = (a - r).abs()
                en = torch.nan_to_num((x.double() - r).abs(), nan=0.0)
                lim = 2 * float(en.max())
                t = torch.clamp(r.abs() * 2**-8, min=lim) + 2e-6 * s.kw["mul"] ** 2 * max(1, p_len**0.5)
                good = bool((e <= t).all())
                worst = float(e.max())
                # per tile of 64 rows: rms error within 2x naive's
                T = e.shape[1]
                pad = -T % 64
                f = lambda z: (
                    torch.nn.functional.pad(z, (0, 0, 0, 0, 0, pad)).view(z.shape[0], -1, 64, *z.shape[2:]).pow(2).sum((2, 4)).sqrt()
                )
                fe, fn, fr = f(e), f(en), f(r)
                rat = float((fe / (fn + fr * 2**-9 + 1e-4 * max(1, s.kw["mul"]) * (64 * s.p.head_dim) ** 0.5)).max())
                if not (rat <= 2.0):
                    good = False
                msg.append("%s %.1e/%.1e r%.2f" % (n, worst, lim, rat))
                ok &= good
                if not good:
                    msg.append("BAD-" + n)
                    b = (~(e <= t)).nonzero()
                    msg.append("n=%d first=%s" % (len(b), b[0].tolist() if len(b) else None))
                    if len(b):
                        msg.append("got %s ref %s" % (float(a[tuple(b[0])]), float(r[tuple(b[0])])))
                continue
            msg.append("%s %.1e/%.1e" % (n, worst, lim))
            ok &= good
            if not good:
                msg.append("BAD-" + n + " nan=%d" % int(torch.isnan(a).sum()))
        if not ok or verbose:
            print("ok  " if ok else "FAIL", s.kw, " | ".join(msg), flush=True)
        return ok
