"""Runs the wrappers on host memory: fakes of Kernel and compile_kernel on top of g++-compiled sources."""

import ctypes, hashlib, os, re, subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
import numpy as np
from alpha.backends.cuda import launches
from alpha.cuda_runtime import compile as C
from alpha.cuda_runtime.launch import _value

BODY = {
    "load16": "memcpy(&r,p,16);",
    "load8": "memcpy(&r,p,8);",
    "store16": "memcpy(p,&r,16);",
    "store8": "memcpy(p,&r,8);",
    "store16_once": "memcpy(p,&r,16);",
    "store8_once": "memcpy(p,&r,8);",
    "pack_bf16": "{auto f=[](float x)->uint32_t{uint32_t u=__float_as_uint(x); if(x!=x) return 0x7fff; return (u+0x7fff+((u>>16)&1))>>16;}; packed=f(low)|(f(high)<<16);}",
    "exp2_approx": "y=exp2f(x); if(fabsf(y)<1.17549435e-38f) y=0;",
    "reciprocal_approx": "y=1.0f/x;",
    "copy_async": "{char*d=emu_dynamic+slot; memset(d,0,16); memcpy(d,from,bytes); if(slot+16>emu_dynamic_bytes) abort();}",
    "copy_commit": "",
    "copy_wait": "",
    "read_slot": "memcpy(&r,emu_dynamic+slot,16);",
    "unpack_anew": "",
    "named_barrier_sync": "emu_named_barrier(id, threads);",
    "max_bf16": "{auto f=[](uint32_t u){return __uint_as_float(u<<16);}; auto g=[&](float x,float y){return __float_as_uint(fmaxf(x,y))>>16;}; m=g(f(a&0xffff),f(b&0xffff))|(g(f(a>>16),f(b>>16))<<16);}",
    "grid_dependency_wait": "",
    "grid_dependency_launch": "",
}


BUILT = ROOT / ".alpha/emulated"
COUNTED = False
"""Whether branches are counted (gcov), and each line begins with a comment that says where it stands: `device_coverage.py` of suites."""
PLACE = re.compile(r"/\*(\S+):(\d+)\*/ ")


def inline(path, seen):
    if path in seen:
        return ""
    seen.add(path)
    out = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        m = re.match(r'\s*#include "(.+)"', line)
        if m:
            out.append(inline((path.parent / m[1]).resolve(), seen))
        elif "#pragma once" in line or "#include <cuda" in line:
            pass
        else:
            out.append(f"/*{path.relative_to(C.KERNELS)}:{number}*/ {line}" if COUNTED else line)
    return "\n".join(out)


def transform(text):
    def rep(m):
        names = re.findall(r"__forceinline__ [\w:]+\*? (\w+)\(", text[: m.start()])
        return BODY.get(names[-1], "abort();") + ";"

    pat = re.compile(r'\basm( volatile)?\((?:[^()"]|"(?:\\.|[^"\\])*"|\((?:[^()]|\([^()]*\))*\))*\);', re.S)
    text = pat.sub(rep, text)
    assert not re.search(r"\basm\b", text), re.search(r".*\basm\b.*", text)[0]
    text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"\1* const \2 = reinterpret_cast<\1*>(emu_dynamic);", text)
    return text


CACHE = {}


def library(source):
    key = str(source)
    if key in CACHE:
        return CACHE[key]
    text = transform(inline(C.KERNELS / source.path, set()))
    kernels = re.findall(r'extern "C" __global__ void(?:\s*__launch_bounds__\([^{]*?\))?\s+(\w+)\(([^)]*)\)', text)
    names = re.findall(r"(\w+)\((?:const __grid_constant__ (\w+) p|([^)]*))\) \{", text)
    stubs = []
    for m in re.finditer(r'extern "C" __global__ void', text):
        head = PLACE.sub("", text[m.end() : text.index("{", m.end())])
        head = re.sub(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)", "", head).strip()
        name, params = re.match(r"(\w+)\((.*)\)$", head, re.S).groups()
        types = [re.sub(r"\s*\b\w+$", "", q.strip().replace("const __grid_constant__ ", "")) for q in params.split(",")]
        args = ", ".join("*(%s*)a[%d]" % (t, i) for i, t in enumerate(types))
        stubs.append(
            'extern "C" void emu_%s(void** args,unsigned gx,unsigned gy,unsigned gz,unsigned t,size_t s,int o){emu_launch([](void*q){void**a=(void**)q; %s(%s);},args,gx,gy,gz,t,s,o);}'
            % (name, name, args)
        )
    full = '#include "emu.h"\n' + text + "\n" + "\n".join(stubs)
    d = hashlib.sha256((full + key + (ROOT / "kernels/checks/bandwidth/emu.h").read_text()).encode()).hexdigest()[:16]
    base = BUILT
    base.mkdir(parents=True, exist_ok=True)
    so = base / (d + ".so")
    if not so.exists():
        (base / (d + ".cpp")).write_text(full)
        cmd = [
            "g++",
            "-std=c++17",
            *(("--coverage", "-fno-exceptions") if COUNTED else ("-O1", "-g1")),
            "-fPIC",
            "-shared",
            "-Wl,-Bsymbolic",
            "-w",
            "-ffp-contract=fast",
            "-mfma",
            "-I",
            str(ROOT / "kernels/checks/bandwidth"),
            *["-D%s=%s" % x for x in source.defines],
            "-o",
            str(so),
            str(base / (d + ".cpp")),
        ]
        r = subprocess.run(cmd, capture_output=True, text=True)
        if r.returncode:
            print(r.stderr[:4000])
            raise SystemExit("emu compile failed: " + key)
    CACHE[key] = ctypes.CDLL(str(so))
    return CACHE[key]


ORDER = 0


class Launch:
    def __init__(s, lib, name, grid, block, args, shared):
        s.vals = [_value(a, name, i) for i, a in enumerate(args)]
        s.ptr = (ctypes.c_void_p * len(s.vals))(*[ctypes.addressof(v) for v in s.vals])
        s.fn = getattr(lib, "emu_" + name)
        s.g = grid
        s.b = block
        s.s = shared

    def __call__(s, stream=None):
        s.fn(
            s.ptr,
            ctypes.c_uint(s.g[0]),
            ctypes.c_uint(s.g[1]),
            ctypes.c_uint(s.g[2]),
            ctypes.c_uint(s.b[0]),
            ctypes.c_size_t(s.s),
            ctypes.c_int(ORDER),
        )


class Kernel:
    def __init__(s, source, name, shared_bytes=0):
        s.lib = library(source)
        s.name = name
        s.shared = shared_bytes

    def prepare(s, grid, block, args, cluster=None, overlap_previous=False):
        return Launch(s.lib, s.name, grid, block, args, s.shared)


launches.compile_kernel = lambda source: source
launches.Kernel = Kernel


def aligned(shape, dtype, poison=True):
    dt = np.dtype(dtype)
    n = int(np.prod(shape)) * dt.itemsize
    raw = np.empty(n + 512, np.uint8)
    raw[:] = 0xFF if poison else 0
    o = -raw.ctypes.data % 256
    return raw[o : o + n].view(dt).reshape(shape)


class Work:
    def __init__(s, n):
        s.a = aligned((n,), np.uint8)
        s.address = s.a.ctypes.data
        s.nbytes = n


from emu_tools import *
