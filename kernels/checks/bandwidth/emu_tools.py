import numpy as np, sys


def bf(x):
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    r = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    r[np.isnan(x)] = 0x7FFF
    return r


def unbf(u):
    return (u.astype(np.uint32) << 16).view(np.float32)


def put(x, dtype):
    x = np.asarray(x)
    a = sys.modules["emu"].aligned(x.shape, {"bf16": np.uint16, "f32": np.float32}[dtype])
    a[...] = bf(x) if dtype == "bf16" else x
    return a


def get(a):
    return (unbf(a) if a.dtype == np.uint16 else a).astype(np.float64)


P = lambda a: a.ctypes.data
