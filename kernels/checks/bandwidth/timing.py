"""Times, repeats, comparisons and the table of results that bench.py fills. Needs PyTorch, for inputs, references and peers only.

Opens the GPU when it is imported: streams, random numbers and results are the process's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch._functorch.config

from alpha.backends.cuda.kernels.elementwise import elementwise
from alpha.backends.cuda.launches import Operation
from alpha.cuda_runtime import capture
from alpha.cuda_runtime.device import Device

DEVICE = "cuda"
bf16, f32 = torch.bfloat16, torch.float32
REPEATS = int(os.environ.get("REPS", "100"))
PEERS = [word for word in os.environ.get("PEERS", "eager").split(",") if word]
torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
torch.zeros(1, device=DEVICE)
torch._functorch.config.donated_buffer = False  # compiled backward passes are replayed
gpu = Device.open()
STREAM = gpu.stream()
PEER_STREAM = torch.cuda.Stream()
RANDOM = torch.Generator(device=DEVICE)  # a failed capture of a peer leaves PyTorch's own generator unusable
RANDOM.manual_seed(int.from_bytes(os.urandom(4), "little"))
START = time.time()
results: list[dict[str, Any]] = []
failures: list[str] = []

Calls = list[Callable[[], Any]]
"""What a peer does, one for each set of buffers."""


def normal(*shape: int, dtype: torch.dtype = bf16, factor: float = 1.0) -> torch.Tensor:
    """Normal numbers."""
    return (torch.randn(*shape, device=DEVICE, generator=RANDOM) * factor).to(dtype)


def poison(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    """NaN everywhere."""
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def sets(nbytes: int) -> int:
    """How many sets of buffers one should walk over, so that the 60 MB L2 cache holds none of them."""
    return max(2, min(8, -(-400_000_000 // nbytes)))


def _all(operations: Sequence[Operation], stream: Any) -> None:
    for operation in operations:
        operation(stream)


def ours(operations: Sequence[Operation], rounds: int = 7) -> float:
    """Median ms of one operation over replays of a graph that walks over `operations` twice."""
    for operation in operations:
        operation(STREAM)
    gpu.synchronize()
    graph = capture(partial(_all, operations), STREAM)
    graph.launch(STREAM)
    gpu.synchronize()
    times = []
    for _ in range(rounds):
        first, last = gpu.event(), gpu.event()
        first.record(STREAM)
        graph.launch(STREAM)
        graph.launch(STREAM)
        last.record(STREAM)
        last.synchronize()
        times.append(last.time_since(first) / 2 / len(operations))
    graph.destroy()
    return sorted(times)[rounds // 2]


def theirs(make: Callable[[], Calls | None], rounds: int = 7) -> float:
    """The same for the PyTorch calls of make(), 0 where it has none. Both run on one stream, since backward passes run on that of their
    forward pass."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(PEER_STREAM):
        calls = make()
        for call in calls or []:
            call()
            call()
    torch.cuda.synchronize()
    if not calls:
        return 0.0
    with torch.cuda.graph(graph, stream=PEER_STREAM):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 2 / len(calls))
    return sorted(times)[rounds // 2]


def peers(make: Callable[[str], Calls | None]) -> dict[str, float]:
    """ms of make("eager") and make("compile"), as far as PEERS names them and there are calls."""
    found: dict[str, float] = {}
    for kind in PEERS:
        try:
            ms = theirs(partial(make, kind))
            if ms:
                found[kind] = ms
        except Exception as error:  # a peer that fails is reported, not fatal
            print(f"  peer {kind}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            torch.cuda.synchronize()
    return found


def spilled(operation: Operation) -> int:
    """Bytes that the kernels of an operation spill."""
    kernels = [launch.kernel for launch in operation.launches]
    return sum(k.cubin.resources[k.name].spill_stores + k.cubin.resources[k.name].spill_loads for k in kernels)


def fail(text: str) -> None:
    """Notes a wrong result."""
    failures.append(text)
    print("  FAIL", text, flush=True)


def repeat(operation: Operation, outputs: Sequence[torch.Tensor], reset: Callable[[], Any] | None = None) -> None:
    """REPEATS runs give the same bits; outputs are poisoned (or reset) before each."""
    first: list[torch.Tensor] | None = None
    for _ in range(REPEATS):
        if reset:
            reset()
        else:
            for output in outputs:
                output.view(torch.uint8).fill_(255)
        torch.cuda.synchronize()
        operation(STREAM)
        gpu.synchronize()
        if first is None:
            first = [output.clone() for output in outputs]
        elif not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, outputs)):
            fail(f"not repeatable: {operation.name[:80]}")
            return


def close(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Each bf16 element within half an ulp of its float64 value, and a little."""
    got, want = got.double(), want.double()
    error = (got - want).abs()
    tolerance = torch.maximum(2 * (want.to(bf16).double() - want).abs().max(), want.abs() * 2.0**-9 * 1.01 + want.abs().max() * 2.0**-22)
    if not bool((error <= tolerance).all()):
        fail(f"{name}: error {error.max():.2e}")


def within(name: str, error: float, most: float) -> None:
    """A scalar error below its limit; NaN is above."""
    if not error < most:
        fail(f"{name}: error {error:.1e}, at most {most:.0e}")


def report(
    name: str,
    nbytes: float,
    ms: float,
    peer: Mapping[str, float] | None = None,
    candidates: Mapping[str, float] | None = None,
) -> None:
    """One line of the table; ratios above 1: ours is faster."""
    peer, candidates = peer or {}, candidates or {}
    rate = nbytes / ms / 1e9
    words = " ".join(f"{k} {nbytes / v / 1e9:.2f} TB/s ratio {v / ms:.2f}" for k, v in peer.items())
    same = copy_ms(nbytes) if nbytes < 1e9 else None
    words += f"; copy of as many {1e3 * same:.1f} us {100 * same / ms:.0f}%" if same else ""
    share, passed = 100 * rate / copy_rate(), time.time() - START
    print(f"{name:40s} {ms * 1e3:8.1f} us {rate:.2f} TB/s {share:3.0f}% {words} [{passed:.0f}s]", flush=True)
    if len(candidates) > 1:
        best = sorted(candidates.items(), key=lambda item: item[1])
        print("    " + " ".join(f"{k} {v * 1e3:.0f}" for k, v in best[:14]) + f"; choice {candidates['choice'] * 1e3:.0f}", flush=True)
    times = {"us": ms * 1e3, "copy_us": same * 1e3 if same else None}
    results.append({"name": name, "bytes": nbytes, **times, "peers": peer, "candidates": candidates})


_copies: dict[float, float] = {}


def copy_ms(nbytes: float) -> float:
    """ms of a copy that reads and writes `nbytes` together, over rotated buffers in a graph: the faster of PyTorch's and ours."""
    if nbytes not in _copies:
        count = int(nbytes) // 4
        n = sets(2 * count)
        a, b = [normal(count) for _ in range(n)], [poison(count) for _ in range(n)]
        mine = [
            elementwise("scale", count, y=y.data_ptr(), y_dtype="bf16", a=x.data_ptr(), a_dtype="bf16", factor=1.0) for x, y in zip(a, b)
        ]
        peer = theirs(lambda: [partial(torch.mul, x, 1.0, out=y) for x, y in zip(a, b)])
        _copies[nbytes] = min(ours(mine), peer)
    return _copies[nbytes]


_copy: list[float] = []


def copy_rate() -> float:
    """TB/s of a device-to-device copy of 1 GiB, bytes read and written."""
    if not _copy:
        a = normal(1 << 29)
        b = torch.empty_like(a)
        times = []
        for _ in range(300):  # clocks rise; the copy engine of a graph is slower, so no graph here
            b.copy_(a)
        for _ in range(7):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(4):
                b.copy_(a)
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 4)
        _copy.append(4 * a.numel() / sorted(times)[3] / 1e9)
        print(f"copy {_copy[0]:.3f} TB/s", flush=True)
    return _copy[0]


def finish() -> int:
    """Writes the table under $OUT and ends the process, not 0 if anything was wrong."""
    if os.environ.get("OUT"):
        with open(os.path.join(os.environ["OUT"], "bandwidth.json"), "w") as file:
            json.dump({"copy": copy_rate(), "results": results, "failures": failures}, file, indent=1)
    print(f"{len(results)} timed, {len(failures)} failures", flush=True)
    return 1 if failures else 0
