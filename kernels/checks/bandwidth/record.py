"""The names of emu.py for a dry run: nothing is launched, the sources that a run would need are collected in SOURCES."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
import numpy as np

from alpha.cudart import bandwidth

SOURCES = {}
ORDER = 0


class Kernel:
    def __init__(self, source, name, shared_bytes=0):
        SOURCES[source] = None

    def prepare(self, *arguments, **options):
        return lambda stream=None: None


bandwidth.compile_kernel = lambda source: source
bandwidth.Kernel = Kernel
bandwidth.fill = lambda span, byte, stream=None: None


def aligned(shape, dtype, poison=True):
    dt = np.dtype(dtype)
    raw = np.zeros(int(np.prod(shape)) * dt.itemsize + 512, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + raw.size - 512].view(dt).reshape(shape)


class Work:
    def __init__(self, n):
        self.array = aligned((n,), np.uint8)
        self.address, self.nbytes = self.array.ctypes.data, n


from emu_tools import *
