from lib import *

trap = (("ATTN_WAIT_BOUNDED", "1"),)


def variants(D):
    C = lambda *d, **k: A.AttentionChoice(defines=tuple(sorted(trap + d)), **k)
    if D == 96:
        return [C(*A.WIDTH_96, forward=(2, 128), dq=(2, 128), dkv=(2, 64))]
    if D == 128:
        return [C(forward=(2, 128), dq=(2, 128), dkv=(2, 64)), C(forward=(2, 128), dq=(2, 128), dkv=(2, 64), blocks=5)]
    return [C(forward=(4, 64), dq=(2, 128), dkv=(2, 64)), C(forward=(3, 128), dq=(2, 128), dkv=(2, 96), blocks=5)]


quick = len(sys.argv) > 1
cases = []
for D in (128, 96, 64):
    for ch in variants(D):
        a = lambda *x, **k: cases.append(dict(a=x, k=dict(choice=ch, **k)))
        a(1, 128, 128, 1, 1, D)
        a(2, 256, 256, 2, 2, D, causal=True)
        a(2, 1024, 1024, 4, 2, D, causal=True)
        a(2, 1024, 1024, 4, 4, D)
        a(1, 1, 1, 1, 1, D)
        a(3, 1, 257, 2, 1, D, causal=True)
        a(2, 257, 1, 2, 1, D, causal=True)
        a(2, 193, 521, 4, 1, D, causal=True)
        a(2, 521, 193, 4, 2, D, causal=True)
        a(2, 521, 193, 4, 2, D)
        a(1, 127, 129, 3, 3, D)
        a(1, 191, 193, 3, 3, D, causal=True)
        a(1, 641, 641, 6, 2, D, causal=True, layout="packed")
        a(2, 700, 700, 4, 2, D, causal=True, layout="bhtd")
        a(2, 600, 600, 4, 2, D, causal=True, mul=8.0)
        a(1, 600, 600, 4, 2, D, mul=20.0)
        a(2, 900, 900, 4, 2, D, causal=True, left=100)
        a(2, 900, 900, 2, 2, D, left=33, right=70)
        a(1, 300, 900, 2, 2, D, left=10, right=0)
        a(2, 777, 777, 2, 1, D, causal=True, docs=6)
        a(2, 777, 777, 2, 1, D, docs=3)
        a(1, 777, 777, 2, 1, D, causal=True, left=64, docs=4)
bad = 0
t0 = time.time()
n = 0
for c in cases:
    try:
        ok = Case(*c["a"], **c["k"]).check()
        n += 1
    except Exception as e:
        print("EXC", c, str(e)[:600], flush=True)
        bad += 1
        if "CUDA" in str(e) or "cu" in str(e):
            break
        continue
    bad += not ok
print("cases", n, "bad", bad, "s", round(time.time() - t0, 1), flush=True)
sys.exit(bad > 0)
