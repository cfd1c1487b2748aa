import sys, os, ctypes

sys.path.insert(0, os.path.dirname(__file__))
import emu
from emu import *
from alpha.cuda_runtime import norm, loss, update, embedding, rope, elementwise as ew
from alpha.cuda_runtime.memory import Span
from alpha.ops import (
    layernorm,
    rmsnorm,
    cross_entropy as ce,
    adamw,
    global_norm,
    clip_coefficient,
    finite_flag,
    learning_rate,
    embedding as emb,
    rope as rp,
    gelu,
    swiglu,
    dropout as dr,
    random as rnd,
)
from alpha.ops.numerics import ulp

row = lambda mod, name: next(r for r in mod.ROWS if r.name == name)
rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
bad = 0
ran = 0
U = {"bf16": 2.0**-9, "f32": 2.0**-24}


def judge(name, got, want, dtype, scale=None, c=4, acc=None):
    """|got-want| <= half ulp of output + c*u32*growth-ish bound"""
    global bad, ran
    ran += 1
    got, want = np.asarray(got, float), np.asarray(want, float)
    tol = 0.5 * ulp(want, dtype) * 1.0001 + (c * 2.0**-24) * (np.abs(want) if scale is None else scale) + 1e-37
    err = np.abs(got - want)
    ok = bool(np.all(err <= tol)) and got.shape == want.shape
    if not ok:
        bad += 1
        w = np.unravel_index(np.argmax(np.nan_to_num(err / tol, nan=1e30)), err.shape) if err.shape else ()
        print(
            "FAIL",
            name,
            "worst",
            err[w],
            "tol",
            np.asarray(tol)[w],
            "got",
            got[w],
            "want",
            want[w],
            "at",
            w,
            "n",
            int((~(err <= tol)).sum()),
            flush=True,
        )


def same(name, a, b):
    global bad, ran
    ran += 1
    if not np.array_equal(a, b):
        bad += 1
        print("FAIL same", name, int((a != b).sum()))


sel = sys.argv[1:]


def part(n):
    return not sel or n in sel


if part("norm"):
    for dt in ("bf16", "f32"):
        for kind in ("rms", "layer"):
            for rows, w, add in (
                (5, 8, False),
                (7, 256, True),
                (19, 768, False),
                (33, 768, True),
                (3, 1032, True),
                (9, 2048, False),
                (5, 4096, True),
                (3, 8192, False),
                (2, 8184, True),
            ):
                p = norm.NormProblem(rows=rows, width=w, kind=kind, dtype=dt, add=add)
                x = put(rng.standard_normal((rows, w)) * 2 + 0.7, dt)
                b = put(rng.standard_normal((rows, w)), dt)
                g = put(1 + 0.5 * rng.standard_normal(w), dt)
                be = put(rng.standard_normal(w), dt)
                x0 = x.copy()
                outs = None
                for order, blocks in ((0, 0), (1, 2)):
                    emu.ORDER = order
                    y = aligned((rows, w), x.dtype)
                    s = aligned((rows, w), x.dtype)
                    mean = aligned((rows,), np.float32)
                    rstd = aligned((rows,), np.float32)
                    cfgs = [None] + (
                        [norm.NormForward(threads=32, vectors=-(-p.vectors // 32), teams=4, ahead=True, blocks=1)]
                        if p.vectors <= 160
                        else []
                    )
                    for cfg in cfgs:
                        norm.forward(
                            p, x=P(x), b=P(b), s=P(s), y=P(y), gamma=P(g), beta=P(be), mean=P(mean), rstd=P(rstd), blocks=blocks, config=cfg
                        )()
                    if outs:
                        [same("nf", a, c) for a, c in zip(outs, (y, rstd))]
                    outs = [y, rstd]
                same("in", x, x0)
                xs = get(x)
                if add:
                    t = get(x) + get(b)
                    judge("s", get(s), t, dt, c=0)
                    xs = get(s)
                if kind == "rms":
                    wy, wr = rmsnorm._oracle(xs, get(g), eps=1e-5)
                else:
                    wy, wm, wr = layernorm._oracle(xs, get(g), get(be), eps=1e-5)
                    judge("mean", get(mean), wm, "f32", scale=np.abs(xs).mean(-1), c=20)
                judge(f"norm y {p}", get(y), wy, dt, c=30, scale=np.abs(wy) + np.abs(get(g)) * (1 + (0 if kind == "rms" else 1)) * 3)
                judge("rstd", get(rstd), wr, "f32", c=30)
                dy = put(rng.standard_normal((rows, w)), dt)
                res = put(rng.standard_normal((rows, w)), dt)
                xin = s if add else x
                r32 = put(wr, "f32")
                m32 = put(wm, "f32") if kind == "layer" else r32
                outs = None
                for order, blocks in ((0, 0), (1, 1)):
                    emu.ORDER = order
                    dx = aligned((rows, w), x.dtype)
                    dg = aligned((w,), np.float32)
                    db = aligned((w,), np.float32)
                    part_ = aligned((p.partial_bytes() // 4,), np.float32)
                    norm.backward(
                        p,
                        dy=P(dy),
                        x=P(xin),
                        gamma=P(g),
                        rstd=P(r32),
                        mean=P(m32),
                        residual=P(res),
                        dx=P(dx),
                        dgamma=P(dg),
                        dbeta=P(db),
                        partial=P(part_),
                        blocks=blocks,
                    )()
                    if outs:
                        [same("nb", a, c) for a, c in zip(outs, (dx, dg))]
                    outs = [dx, dg]
                if kind == "rms":
                    wdx, wdg = rmsnorm._oracle_bwd(get(dy), get(xin), get(g), get(r32))
                    wdb = None
                else:
                    wdx, wdg, wdb = layernorm._oracle_bwd(get(dy), get(xin), get(g), get(m32), get(r32))
                if add:
                    wdx = wdx + get(res)
                judge(f"dx {p}", get(dx), wdx, dt, c=60, scale=np.abs(wdx) + 3 * np.abs(get(dy) * get(g)) * wr[:, None] + 1)
                judge(
                    f"dg {p}", get(dg), wdg, "f32", c=40, scale=np.abs(get(dy) * get(xin) * wr[:, None]).sum(0) + np.abs(get(dy)).sum(0) * 3
                )
                if wdb is not None:
                    judge("db", get(db), wdb, "f32", c=40, scale=np.abs(get(dy)).sum(0))
    print("norm", ran, bad, flush=True)
if part("cols"):
    for dt in ("bf16", "f32"):
        for rows, w, st, out in (
            (1, 8, 0, "f32"),
            (700, 768, 0, "f32"),
            (5, 24, 32, "bf16"),
            (1000, 264, 272, "f32+="),
            (3000, 8, 0, "f32"),
            (9, 70000, 0, "f32+="),
        ):
            x = put(rng.standard_normal((rows, st or w)), dt)
            pb = ew.column_bytes(rows, w, dt)
            pa = aligned((max(1, pb // 4),), np.float32)
            y = put(rng.standard_normal(w), "bf16" if out == "bf16" else "f32")
            y0 = get(y)
            outs = []
            for o, bl in ((0, 0), (1, 3)):
                emu.ORDER = o
                yy = put(y0, "bf16" if out == "bf16" else "f32")
                ew.column_sums(rows, w, x=P(x), y=P(yy), dtype=dt, out=out, stride=st, partial=P(pa), blocks=bl)()
                outs.append(yy)
            same("cols", *outs)
            want = get(x)[:, :w].sum(0) + (y0 if out == "f32+=" else 0)
            judge(
                f"cols {rows}x{w} {out}",
                get(yy),
                want,
                "bf16" if out == "bf16" else "f32",
                c=40,
                scale=np.abs(get(x)[:, :w]).sum(0) + np.abs(y0),
            )
    print("cols", ran, bad, flush=True)
if part("loss"):
    for dt in ("bf16", "f32"):
        for n, V, st, z, ign, mul in (
            (3, 1, 8, 0.0, -1, 1),
            (7, 13, 16, 1e-2, -1, 2),
            (5, 513, 520, 0.0, 3, 1),
            (4, 8192, 0, 1e-4, -1, 4),
            (5, 24577, 24584, 1e-3, -1, 3),
            (3, 50257, 50304, 0.0, -1, 2),
            (2, 65536, 0, 0.0, -1, 2),
            (2, 128253, 128256, 1e-4, -100, 1),
            (6, 40, 40, 0.0, -1, 1e4),
            (6, 40, 40, 0.0, -1, 0),
        ):
            if dt == "f32" and V > 65536:
                continue
            ld = st or V
            L = put(np.full((n, ld), np.nan), dt)
            L[:, :V] = put(rng.standard_normal((n, V)) * mul - (120 if mul == 3 else 0), dt)
            t = rng.integers(0, V, n).astype(np.int32)
            t[0] = ign if ign != 3 else 3
            if n > 3:
                t[1] = V - 1
            tt = aligned((n,), np.int32)
            tt[:] = t
            per = n % 2 == 1
            dl = put(rng.standard_normal(n) if per else rng.standard_normal(1), "f32")
            p = loss.LossProblem(rows=n, vocabulary=V, stride=ld, dtype=dt, ignore=ign, z_loss=z, per_row=per)
            x = get(L)[:, :V]
            wl, wlse = ce._oracle(x, t, ignore_index=ign, z_loss=z)
            d = get(dl) if per else np.full(n, get(dl)[0])
            wg = ce._oracle_bwd(d, x, t, wlse, ignore_index=ign, z_loss=z)[0]
            gb = ce._bound_bwd((d, x, t, wlse), {"ignore_index": ign, "z_loss": z})[0]
            lb, lseb = ce._bound((x, t), {"ignore_index": ign, "z_loss": z})
            lb = np.minimum(lb, 1e30)
            res = {}
            for mode in ("loss", "fused", "gradient"):
                for o, bl in ((0, 0), (1, 1)):
                    emu.ORDER = o
                    X = aligned(L.shape, L.dtype)
                    X[...] = L
                    lo = aligned((n,), np.float32)
                    ls = aligned((n,), np.float32)
                    if mode == "gradient":
                        ls[:] = wlse
                    loss.cross_entropy(p, mode, logits=P(X), targets=P(tt), lse=P(ls), loss=P(lo), dloss=P(dl), blocks=bl)()
                    if mode != "gradient":
                        judge(f"lse {p} {mode}", ls, wlse, "f32", c=2, scale=lseb + 0 * wlse)
                        judge(f"loss {p} {mode}", lo, wl, "f32", c=2, scale=lb)
                        told = np.stack([ls, lo]).view(np.uint32)
                        same("bits of the modes", told, res.setdefault("told", told))
                    if mode == "loss":
                        same("logits kept", X.view(np.uint8), L.view(np.uint8))
                    else:
                        same("padding", np.ascontiguousarray(X[:, V:]).view(np.uint8), np.ascontiguousarray(L[:, V:]).view(np.uint8))
                        # in the emulator lse rounding feeds the gradient: allow its error
                        judge(
                            f"grad {p} {mode}",
                            get(X)[:, :V],
                            wg,
                            dt,
                            c=2,
                            scale=gb
                            + np.abs(wg) * (np.abs(wlse) * 2 + 20)[:, None]
                            + (np.abs(d)[:, None] * np.exp(x - wlse[:, None]) * (lseb[:, None] + 20)),
                        )
                    k = (mode,)
                    if k in res:
                        same("loss rep", X.view(np.uint8), res[k].view(np.uint8))
                    res[k] = X
            bads = aligned((n,), np.int32)
            bads[:] = t
            bads[-1] = V + 5
            X = aligned(L.shape, L.dtype)
            X[...] = L
            loss.cross_entropy(p, "fused", logits=P(X), targets=P(bads), lse=P(ls), loss=P(lo), dloss=P(dl))()
            ran += 1
            if not np.isnan(lo[-1]):
                bad += 1
                print("FAIL bad target")
    for n in (1, 77, 5000):
        l = put(rng.standard_normal(n), "f32")
        t = aligned((n,), np.int32)
        t[:] = rng.integers(-1, 3, n)
        o = put(np.array([2.0, 3.0]), "f32")
        loss.total(n, loss=P(l), targets=P(t), out=P(o), add=True)()
        judge("total", get(o), [2 + get(l).sum(), 3 + (t != -1).sum()], "f32", c=40, scale=np.array([np.abs(l).sum() + 2, 0]))
        loss.total(n, loss=P(l), targets=P(t), out=P(o), add=False)()
        judge("total", get(o), [get(l).sum(), (t != -1).sum()], "f32", c=40, scale=np.array([np.abs(l).sum() + 2, 0]))
    print("loss", ran, bad, flush=True)
if part("update"):
    r = row(adamw, "adamw")
    for s in list(r.samples(rng)) + list(r.exact(rng)):
        pr, gr, m, v, co, lr, st, fi = s.inputs[:8]
        a = s.attrs
        n = len(pr)
        if not a["segments"]:
            continue
        print(s.name, flush=True) if os.environ.get("V") else 0
        tab = update.adamw_table(a["segments"])
        T = aligned(tab.shape, tab.dtype)
        T[...] = tab
        for copy in ("none", "nearest", "stochastic"):
            B = [put(q, "f32") for q in (pr, gr, m, v)]
            c0 = put(np.full(n, 7.0), "bf16")
            sc = [put(np.array([q]), "f32") for q in (co, lr)]
            si = [aligned((1,), np.int32) for _ in range(2)]
            si[0][0] = st
            si[1][0] = fi
            pp = update.AdamwProblem(
                chunks=len(tab),
                elements=n,
                beta1=a["beta1"],
                beta2=a["beta2"],
                eps=a["eps"],
                weight_decay=a["weight_decay"],
                copy=copy,
                seed=5,
                purpose=9,
            )
            ins = tuple(get(q) for q in B) + (np.float64(sc[0][0]), np.float64(sc[1][0]), st, fi)
            with np.errstate(all="ignore"):
                want = adamw._oracle(*ins, **a)
                bd = adamw._bound(ins, a)
            update.adamw(
                pp,
                table=P(T),
                param=P(B[0]),
                grad=P(B[1]),
                m=P(B[2]),
                v=P(B[3]),
                coefficient=P(sc[0]),
                lr=P(sc[1]),
                step=P(si[0]),
                finite=P(si[1]),
                copy=P(c0),
            )()
            for nm, gq, w, b_ in zip("pmv", (B[0], B[2], B[3]), want, bd):
                judge(
                    f"adamw {s.name} {copy} {nm}",
                    get(gq),
                    w,
                    "f32",
                    c=1,
                    scale=b_ + np.zeros(n) if not s.name.startswith(("signs", "first")) else 0 * w,
                )
            ins_, _, _ = adamw.per_element(n, a["segments"])
            chg = ins_ & (fi != 0)
            if copy == "none":
                same("copy none", c0, put(np.full(n, 7.0), "bf16"))
            elif copy == "nearest":
                same("copy", c0, np.where(chg, bf(B[0]), bf(np.full(n, 7.0))))
            else:
                w = rnd.words(5, 9, int(st), np.zeros(1, np.int64), n)[0].astype(np.uint64)
                u = B[0].view(np.uint32).astype(np.uint64)
                e = ((u + (w & 0xFFFF)) >> 16).astype(np.uint16)
                same("sr", c0, np.where(chg, e, bf(np.full(n, 7.0))))
    for s in list(learning_rate.ROWS[0].samples(rng)):
        table = put(s.attrs["rates"].array().astype(np.float64), "f32")
        nb = int(rng.integers(1, 40))
        parts = put(rng.random((nb, 8)), "f32")
        F = lambda q: put(np.array([q]), "f32")
        lo = F(1.5 if nb % 3 else np.nan)
        cnt = F(float(rng.integers(0, 9)))
        stp = aligned((1,), np.int32)
        stp[0] = s.inputs[0]
        o = [aligned((1,), np.float32) for _ in range(4)]
        oi = [aligned((1,), np.int32) for _ in range(2)]
        mx = float(rng.choice([0.0, 0.1, 1e9]))
        update.step(
            nb,
            max_norm=mx,
            rates=P(table),
            entries=len(s.attrs["rates"]),
            parts=P(parts),
            loss=P(lo),
            count=P(cnt),
            step=P(stp),
            norm=P(o[0]),
            mean_norm=P(o[1]),
            coefficient=P(o[2]),
            finite=P(oi[0]),
            lr=P(o[3]),
            used=P(oi[1]),
            next=P(stp),
        )()
        pt = list(get(parts).sum(1))
        nw = np.sqrt(sum(pt))
        cc, mm = clip_coefficient._oracle(np.float64(o[0][0]), get(cnt)[0], max_norm=mx)
        judge("norm", get(o[0])[0], nw, "f32", c=10)
        judge("mean", get(o[1])[0], mm, "f32", c=2)
        judge("coef", get(o[2])[0], cc, "f32", c=8)
        same("fin", oi[0][0], finite_flag._oracle(nw, get(lo)[0])[0])
        same("used", oi[1][0], np.int32(s.inputs[0]))
        same("next", stp[0], np.int32(s.inputs[0] + oi[0][0]))
        same(f"lr {s.name}", o[3][0], np.float32(learning_rate._oracle(s.inputs[0], **s.attrs)[0]))
    for s in list(global_norm.ROWS[0].samples(rng)) + list(global_norm.ROWS[0].exact(rng)):
        tab = update.norm_table(s.attrs["segments"])
        if not len(tab):
            continue
        g = put(s.inputs[0], "f32")
        T = aligned(tab.shape, tab.dtype)
        T[...] = tab
        nb = len(tab)
        parts = aligned((nb, 8), np.float32)
        update.global_norm(nb, grads=P(g), table=P(T), parts=P(parts))()
        update.step(
            nb,
            max_norm=0.0,
            rates=P(table),
            entries=1,
            parts=P(parts),
            loss=P(F(1.0)),
            count=P(F(1.0)),
            step=P(stp),
            norm=P(o[0]),
            mean_norm=P(o[1]),
            coefficient=P(o[2]),
            finite=P(oi[0]),
            lr=P(o[3]),
            used=P(oi[1]),
            next=P(stp),
        )()
        judge(
            f"gnorm {s.name}",
            get(o[0])[0],
            global_norm._oracle(get(g), **s.attrs)[0],
            "f32",
            c=30 if s.name not in ("three-four-five", "zero", "ones") else 0,
        )
    print("update", ran, bad, flush=True)
if part("emb"):
    for dt in ("bf16", "f32"):
        for n, V, C, kind in (
            (1, 1, 8, "u"),
            (50, 11, 24, "u"),
            (700, 40, 264, "z"),
            (900, 30, 768, "z"),
            (600, 3, 776, "one"),
            (64, 3, 24, "one"),
            (65, 3, 24, "one"),
            (5000, 5, 256, "z"),
            (257, 129, 1600, "u"),
        ):
            ids = aligned((n,), np.int32)
            ids[:] = rng.integers(0, V, n) if kind == "u" else np.minimum(rng.geometric(0.2, n) - 1, V - 1) if kind == "z" else 1
            T = put(rng.standard_normal((V, C)), dt)
            po = put(rng.standard_normal((7, C)), dt)
            y = aligned((n, C), T.dtype)
            p = embedding.EmbeddingProblem(count=n, vocabulary=V, width=C, dtype=dt)
            embedding.forward(p, table=P(T), ids=P(ids), y=P(y))()
            same("emb", y, T[ids])
            turn = aligned((n,), np.int32)
            turn[:] = np.arange(n) % 7
            embedding.forward(p, table=P(T), ids=P(ids), y=P(y), positions=P(po), places=P(turn), places_count=7, sequence=7)()
            judge("emb+pos", get(y), get(T)[ids] + get(po)[np.arange(n) % 7], dt, c=0)
            wrong = aligned((n,), np.int32)
            wrong[:] = ids
            wrong[rng.integers(0, n)] = rng.choice([-1, V])
            kept = (wrong >= 0) & (wrong < V)
            embedding.forward(p, table=P(T), ids=P(wrong), y=P(y), positions=P(po), places=P(turn), places_count=7)()
            same("bad id is NaN", np.isnan(get(y)).all(1), ~kept)
            judge("beside a bad id", get(y)[kept], (get(T)[ids] + get(po)[np.arange(n) % 7])[kept], dt, c=0)
            pl = aligned((n,), np.int32)
            pl[:] = rng.integers(0, 7, n)
            embedding.forward(p, table=P(T), ids=P(ids), y=P(y), positions=P(po), places=P(pl), places_count=7, sequence=n // 2)()
            judge("emb+places", get(y), get(T)[ids] + get(po)[pl], dt, c=0)
            dy = put(rng.standard_normal((n, C)), dt)
            odd = aligned((n + 1,), np.int32)[1:]  # off the 16 bytes that are read at once
            odd[:] = ids
            for out in ("f32", "f32+=", "bf16"):
                outs = []
                base = rng.standard_normal((V, C))
                for o, bl in ((0, 0), (1, 2)):
                    emu.ORDER = o
                    ws = Work(p.workspace_bytes())
                    dT = put(base, "bf16" if out == "bf16" else "f32")
                    b0 = get(dT)
                    embedding.backward(p, dy=P(dy), ids=P(odd if o else ids), dtable=P(dT), workspace=Span(ws.address, ws.nbytes), out=out, blocks=bl)()
                    outs.append(dT)
                same(f"emb bwd {p} {out}", *outs)
                want = np.zeros((V, C))
                ab = np.zeros((V, C))
                np.add.at(want, ids, get(dy))
                np.add.at(ab, ids, np.abs(get(dy)))
                judge(
                    f"emb bwd {p} {out} {kind}",
                    get(dT),
                    want + (b0 if out == "f32+=" else 0),
                    "bf16" if out == "bf16" else "f32",
                    c=60,
                    scale=ab + np.abs(b0),
                )
    print("emb", ran, bad, flush=True)
if part("rope"):
    for dt in ("bf16", "f32"):
        for lay in ("half", "interleaved"):
            for inv in (False, True):
                for n, H, D, ld in ((5, 3, 16, 0), (9, 12, 64, 12 * 64 + 64), (4, 40, 128, 0), (3, 5, 96, 0), (3, 9, 256, 9 * 256 + 32)):
                    tr = 5000
                    tb = aligned((tr, D // 2, 2), np.float32)
                    rope.table(tr, D, base=1e4, out=P(tb))()
                    l = ld or H * D
                    x = put(rng.standard_normal((n, l)), dt)
                    pos = aligned((n,), np.int32)
                    pos[:] = rng.integers(0, tr, n)
                    p = rope.RopeProblem(rows=n, heads=H, head_dim=D, table_rows=tr, stride=ld, dtype=dt, layout=lay, inverse=inv)
                    x0 = x.copy()
                    y = aligned(x.shape, x.dtype)
                    y[...] = x
                    rope.rope(p, x=P(y), y=P(y), positions=P(pos), turns=P(tb))()
                    want = rp._oracle(get(x)[None, :, : H * D].reshape(1, n, H, D), pos[None], base=1e4, layout=lay, inverse=inv)[
                        0
                    ].reshape(n, H * D)
                    judge(f"rope {p}", get(y)[:, : H * D], want, dt, c=4, scale=np.abs(get(x)[:, : H * D]) + 4)
                    same("rest", y[:, H * D :], x0[:, H * D :])
    print("rope", ran, bad, flush=True)
if part("ew"):
    for dt in ("bf16", "f32"):
        for rows, C in ((1, 8), (7, 24), (33, 3072), (5, 1376)):
            for op in ("gelu", "gelu_bwd", "swiglu", "swiglu_bwd"):
                for ap in ("tanh", "none") if op.startswith("gelu") else ("tanh",):
                    pk = put(rng.standard_normal((rows, 2 * C)) * 3, dt)
                    pk.flat[:8] = put(np.array([0, 64, -64, 1024, -1024, 1e-30, 32, -88.0]), dt)
                    dy = put(rng.standard_normal((rows, C)), dt)
                    y = aligned((rows, 2 * C), pk.dtype)
                    e = pk.itemsize
                    ew.activation(
                        op,
                        rows,
                        C,
                        a=P(pk),
                        b=P(pk) + C * e,
                        dy=P(dy),
                        y=P(y),
                        y2=P(y) + C * e,
                        a_stride=2 * C,
                        b_stride=2 * C,
                        y_stride=2 * C,
                        y2_stride=2 * C,
                        dtype=dt,
                        approximate=ap,
                    )()
                    a, b, d = get(pk)[:, :C], get(pk)[:, C:], get(dy)
                    if op == "gelu":
                        want = (gelu._oracle(a, approximate=ap)[0],)
                    elif op == "gelu_bwd":
                        want = (gelu._oracle_bwd(d, a, approximate=ap)[0],)
                    elif op == "swiglu":
                        want = swiglu._oracle(a, b)
                    else:
                        want = swiglu._oracle_bwd(d, a, b)
                    sc = (np.abs(a) + 1) * (np.abs(d) + 1) * (np.abs(b) + 1)
                    for i, w in enumerate(want):
                        judge(f"{op} {ap} {rows}x{C} {dt} {i}", get(y)[:, i * C : (i + 1) * C], w, dt, c=8, scale=sc)
    for n in (1, 7, 8, 4099, 100003):
        for A in ("bf16", "f32"):
            for Y in ("bf16", "f32"):
                a = put(rng.standard_normal(n), A)
                b = put(rng.standard_normal(n), Y)
                y = aligned((n + 8,), np.uint16 if Y == "bf16" else np.float32)
                g = y[n:].copy()
                s = put(np.array([0.3]), "f32")
                ew.elementwise("add", n, y=P(y), y_dtype=Y, a=P(a), a_dtype=A, b=P(b), b_dtype=Y)()
                judge("add", get(y)[:n], get(a) + get(b), Y, c=1, scale=np.abs(get(a)) + np.abs(get(b)))
                ew.elementwise("cast", n, y=P(y), y_dtype=Y, a=P(a), a_dtype=A)()
                judge("cast", get(y)[:n], get(a), Y, c=0)
                ew.elementwise("scale", n, y=P(y), y_dtype=Y, a=P(a), a_dtype=A, factor=0.3)()
                judge("scale", get(y)[:n], get(a) * np.float32(0.3), Y, c=1)
                ew.elementwise("scale_by", n, y=P(y), y_dtype=Y, a=P(a), a_dtype=A, scalar=P(s))()
                judge("scale", get(y)[:n], get(a) * np.float32(0.3), Y, c=1)
                ew.elementwise("fill", n, y=P(y), y_dtype=Y, factor=1 / 3)()
                judge("fill", get(y)[:n], np.full(n, np.float32(1 / 3)), Y, c=0)
                same("guard", y[n:].view(np.uint8), g.view(np.uint8))
    for dt in ("bf16", "f32"):
        for B, Pn in ((1, 1), (3, 35), (2, 64), (5, 4096), (37, 6), (2, 16385)):
            x = put(rng.standard_normal((B, Pn)), dt)
            st = aligned((1,), np.int32)
            st[0] = 17
            ids = aligned((B,), np.int32)
            ids[:] = rng.integers(0, 2**31 - 1, B)
            y = aligned(x.shape, x.dtype)
            ew.dropout(B, Pn, x=P(x), y=P(y), step=P(st), sample_ids=P(ids), rate=0.3, key=rnd.key_of(99, "attention"), dtype=dt)()
            w = dr._oracle(get(x), st[0], ids, rate=0.3, seed=99, purpose="attention")[0]
            judge(f"dropout {B}x{Pn}", get(y), w, dt, c=2)
            same("mask", get(y) == 0, w == 0)
    print("ew", ran, bad, flush=True)
print("ran", ran, "bad", bad)
