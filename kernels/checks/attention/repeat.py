from lib import *


def rep(n, *a, **k):
    c = Case(*a, **k)
    c.poison()
    c.fwd()
    c.bwd()
    ref = [x.clone() for x in c.outs()]
    bad = 0
    t0 = time.time()
    side = torch.cuda.Stream()
    z = torch.randn(4096, 4096, device=dev)
    for i in range(n):
        c.poison()
        if i % 3 == 0:
            with torch.cuda.stream(side):
                z @ z
        c.fwd()
        c.bwd()
        bad += sum(
            not torch.equal(
                x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32),
                y.contiguous().view(torch.int16 if y.dtype == torch.bfloat16 else torch.int32),
            )
            for x, y in zip(c.outs(), ref)
        )
    torch.cuda.synchronize()
    print("repeat", n, a, k, "differing", bad, "%.1fs" % (time.time() - t0), flush=True)
    # other number of blocks
    ch = A.choose(c.p)
    import dataclasses

    for nb in (1, 37, 100):
        f = A.AttentionForward(
            c.p, t4(c.q), t4(c.k), t4(c.v), t4(c.o), span(c.lse), span(c.queue), choice=dataclasses.replace(ch, blocks=nb)
        )
        c.poison()
        f()
        b = A.AttentionBackward(
            c.p,
            t4(c.q),
            t4(c.k),
            t4(c.v),
            t4(c.o),
            span(c.lse),
            t4(c.do),
            t4(c.dq),
            t4(c.dk),
            t4(c.dv),
            span(c.ws),
            span(c.queue),
            choice=dataclasses.replace(ch, blocks=nb),
        )
        b()
        bad += sum(
            not torch.equal(
                x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32),
                y.contiguous().view(torch.int16 if y.dtype == torch.bfloat16 else torch.int32),
            )
            for x, y in zip(c.outs(), ref)
        )
    print("  with other block counts differing", bad)


rep(300, 2, 1024, 1024, 8, 2, 128, True)
rep(300, 2, 1000, 1000, 6, 6, 64, True)
rep(100, 1, 999, 1500, 4, 4, 128, False)
rep(100, 1, 2048, 2048, 16, 4, 64, True)
