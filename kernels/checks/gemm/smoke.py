import numpy as np, time, ctypes
from alpha.cudart import *
from alpha.cudart import gemm as G
from alpha.errors import *

d = Device.open()
print(d.properties, d.free_memory() >> 30)
a = Arena(1 << 24, name="t")
s1 = a.take(1000 * 4)
s2 = a.take(1000 * 4)
assert s1.address % 256 == 0 and s2.address == s1.address + 4096
x = np.random.randn(1000).astype(np.float32)
upload(s1, x)
assert (download(s1, (1000,), np.float32) == x).all()
fill(s2, 0xFF)
d.synchronize()
assert np.isnan(download(s2, (1000,), np.float32)).all()
st = d.stream()
h = pinned((1000,), np.float32)
h[:] = x * 2
upload(s2, h, st)
st.synchronize()
assert (download(s2, (1000,), np.float32) == x * 2).all()


def expect(e, f):
    try:
        f()
    except e as err:
        print("ok", type(err).__name__, str(err).splitlines()[0])
        return
    raise SystemExit("no " + e.__name__)


expect(GraphError, lambda: a.take(1 << 25))
expect(MachineError, lambda: Arena(1 << 45))
expect(MachineError, lambda: Device.open(7))
m = n = k = 512
A = (np.random.randint(-2, 3, (m, k))).astype(np.float32)
B = np.random.randint(-2, 3, (n, k)).astype(np.float32)
bf = lambda t: (t.view(np.uint32) >> 16).astype(np.uint16)
sa, sb, sc = a.take(m * k * 2), a.take(n * k * 2), a.take(m * n * 4)
upload(sa, np.ascontiguousarray(bf(A)))
upload(sb, np.ascontiguousarray(bf(B)))
p = G.GemmProblem(m=m, n=n, k=k, out="f32")
g = G.prepare(p, G.choose(p), a=int(sa), b=int(sb), c=int(sc))
gr = capture(lambda s: [g(s) for _ in range(3)], st)
gr.launch(st)
st.synchronize()
assert (download(sc, (m, n), np.float32) == A @ B.T).all()
print("graph nodes", gr.nodes)
gr.destroy()
expect(ShapeError, lambda: G.prepare(p, G.choose(p), a=int(sa) + 2, b=int(sb), c=int(sc)))
expect(ShapeError, lambda: G.prepare(G.GemmProblem(m=8, n=8, k=9), G.PINGPONG, a=256, b=256, c=256))
K = Kernel(g.cubins[0], "gemm", shared_bytes=200000)
expect(ShapeError, lambda: Kernel(g.cubins[0], "gemm", shared_bytes=300000))
expect(GraphError, lambda: Kernel(g.cubins[0], "nope"))
expect(ShapeError, lambda: K.prepare((1, 1, 1), (32, 1, 1), [3]))
bad = K.prepare((2, 1, 1), (1024, 1, 1), g.launches[0]._values)
expect(CudaError, lambda: bad(st))
e0, e1 = d.event(), d.event()
t = time.perf_counter()
e0.record(st)
for _ in range(300):
    g(st)
e1.record(st)
host = (time.perf_counter() - t) / 300 * 1e6
e1.synchronize()
print("host us/launch", round(host, 2), "device us", e1.time_since(e0) / 300 * 1e3)
gr = capture(lambda s: [g(s) for _ in range(100)], st)
gr.launch(st)
e0.record(st)
gr.launch(st)
e1.record(st)
e1.synchronize()
print("graph us/launch", e1.time_since(e0) * 10)

p = G.GemmProblem(m=64, n=64, k=64, out="f32+=")
upload(sa, np.zeros((64, 64), np.uint16))
upload(sb, np.zeros((64, 64), np.uint16))
c0 = np.full((64, 64), 1e-39, np.float32)
upload(sc, c0)
g = G.prepare(p, G.choose(p), a=int(sa), b=int(sb), c=int(sc))
g(st)
st.synchronize()
o = download(sc, (64, 64), np.float32)
print("denormal kept by +=:", (o == c0).all(), o[0, 0])
