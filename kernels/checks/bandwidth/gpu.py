"""The names of emu.py for a real GPU: arrays are page-locked host memory that kernels address directly, workspaces lie on the device."""

import sys, os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
import numpy as np, pycuda.driver as cuda
from alpha.cudart.device import Device
from alpha.cudart import bandwidth

dev = Device.open()
ORDER = 0
KEEP = []
_call = bandwidth.Operation.__call__


def call(s, stream=None):
    _call(s, stream)
    dev.synchronize()


bandwidth.Operation.__call__ = call
FLAGS = cuda.host_alloc_flags.DEVICEMAP
APART = bool(os.environ.get("BW_APART"))  # an allocation per array, so that a memory checker sees every boundary
POOL = cuda.pagelocked_empty(4096 if APART else 256 << 20, np.uint8, mem_flags=FLAGS)
at = 0


def aligned(shape, dtype, poison=True):
    global at
    dt = np.dtype(dtype)
    n = int(np.prod(shape)) * dt.itemsize
    if APART:
        raw = cuda.pagelocked_empty(max(n, 1), np.uint8, mem_flags=FLAGS)
        raw[:] = 0xFF
        KEEP.append(raw)  # a caller may keep the address alone
        del KEEP[:-256]
        return raw[:n].view(dt).reshape(shape)
    room = (n + 511) // 256 * 256
    if at + room > POOL.nbytes:
        at = 0  # the oldest arrays are dead by then
    raw = POOL[at : at + room]
    at += room
    raw[:] = 0xFF
    return raw[:n].view(dt).reshape(shape)


class Work:
    def __init__(s, n):
        s.a = cuda.mem_alloc(n)
        cuda.memset_d8(s.a, 0xFF, n)
        s.address = int(s.a)
        s.nbytes = n


from emu_tools import *
