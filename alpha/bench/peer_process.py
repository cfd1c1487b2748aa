"""The process that holds PyTorch: it makes the ways of one call, times their blocks, and steps a peer's model. Floor 8.

Started by peer.py with any Python that has torch and NumPy; the rest of Alpha's dependencies need not be there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from alpha.bench import peers_torch
from alpha.bench.variants import Variant
from alpha.profile import noise
from alpha.profile.served import serve

if TYPE_CHECKING:
    from alpha.bench.peer_model import PeerModel

FLUSH_BYTES = 256 << 20
LEAD = 8
"""Fills ahead of a block on a GPU: while they run, the host enqueues what is timed."""


class Process:
    """The handlers. Everything stays until the next `make` or `model`."""

    def __init__(self) -> None:
        self.t: Any = None
        self.ways: dict[str, peers_torch.Way] = {}
        self.flush: Any = None
        self.model: PeerModel | None = None

    def open(self, device: str, threads: int) -> dict[str, str]:
        """Import torch and take the device ('cpu' or 'cuda')."""
        import torch

        if device == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError("torch sees no GPU")
            self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
            where = torch.cuda.get_device_name()
        else:
            torch.set_num_threads(threads)
            where = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        self.t = peers_torch.Torch(torch, device == "cuda")
        return {"version": str(torch.__version__), "on": where}

    def tensor(self, path: str, dtype: str) -> Any:
        """An operand from its device form (bf16 as the upper halves of float32 bits)."""
        torch, x = self.t.torch, np.load(path)
        if dtype == "bf16":
            found = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        else:
            found = torch.from_numpy(x)
        return found.to("cuda") if self.t.on_gpu else found

    def make(self, op: str, attrs: dict[str, Any], operands: Sequence[Sequence[str]]) -> dict[str, str]:
        """Name of each way -> '' or why there is none."""
        return self._made(op, attrs, lambda: [self.tensor(path, dtype) for path, dtype in operands])

    def draw(self, op: str, attrs: dict[str, Any], operands: Sequence[tuple[Sequence[int], str]]) -> dict[str, str]:
        """The same with normal operands of these shapes and float types, which no file holds."""
        torch = self.t.torch
        return self._made(op, attrs, lambda: [torch.randn(*shape, dtype=self.t.dtype(dtype), device="cuda" if self.t.on_gpu else "cpu")
                                              for shape, dtype in operands])

    def _made(self, op: str, attrs: dict[str, Any], operands: Callable[[], list[Any]]) -> dict[str, str]:
        self.ways = {}
        with suppress(ImportError):  # a PyTorch without this switch keeps the buffers of a forward, as timing its backward again needs
            import torch._functorch.config as functorch

            functorch.donated_buffer = False  # type: ignore[attr-defined]
        if self.t.on_gpu:
            self.t.torch.cuda.empty_cache()  # of the call before
        try:
            found = peers_torch.ways(self.t, op, operands(), attrs)
        except peers_torch.Unsupported as error:
            return {"torch": f"no peer: {error}"}
        why = {}
        for name, way in found.items():
            why[name] = ""
            self.ways[name] = way
        return why

    def outputs(self, way: str, places: Sequence[str], folder: str) -> list[str]:
        """Call once; each output at the flat places of a file of indices ('' = all of it), as float64 or its own integers. Paths; '' for an
        output that the way does not make."""
        made, paths = self.ways[way](), []  # an Unsupported of its own is an answer like any other error
        for i, (y, at) in enumerate(zip(made, places, strict=True)):
            if y is None:
                paths.append("")
                continue
            flat = y.detach().reshape(-1)
            if at:
                flat = flat[self.t.torch.from_numpy(np.load(at)).to(flat.device)]
            flat = flat.cpu()
            paths.append(f"{folder}/{i}.npy")
            np.save(paths[-1], (flat.double() if flat.is_floating_point() else flat).numpy())
        return paths

    def repeats(self, way: str, ns: float) -> int:
        """Calls per block on the CPU."""
        return noise.repeats_for(self.ways[way], int(ns))

    def block(self, way: str, repeats: int) -> float:
        """Nanoseconds per call over a block: on a GPU the median of calls between two events, each after a fill that empties L2."""
        call = self.ways[way]
        if not self.t.on_gpu:
            return float(noise.block(call, repeats))
        torch, events = self.t.torch, []
        for _ in range(LEAD):
            self.flush.fill_(0)
        for i in range(repeats):
            self.flush.fill_(i)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return float(np.median([begin.elapsed_time(end) * 1e6 for begin, end in events]))

    def spin(self, way: str, calls: int) -> None:
        """Call again and again, and wait for the end."""
        call = self.ways[way]
        for _ in range(calls):
            call()
        if self.t.on_gpu:
            self.t.torch.cuda.synchronize()

    def make_model(self, sizes: dict[str, Any], parameters: dict[str, str], variant: dict[str, str]) -> int:
        """Take a model with these parameters (files of float32); returns how many parameters it has."""
        from alpha.bench.peer_model import PeerModel  # the one module that imports torch as it is read

        self.model = PeerModel(self.t.on_gpu, sizes, {name: self.tensor(path, "f32") for name, path in parameters.items()},
                               Variant(**variant))
        return self.model.size

    def step(self, tokens: str, lr: float) -> dict[str, float]:
        """One step on a file of tokens i32[batch, sequence + 1]: loss in nats a token before it, norm of the mean gradient."""
        assert self.model is not None
        loss, norm = self.model.step(self.t.torch.from_numpy(np.load(tokens)).long().to(self.model.device), lr)
        return {"loss": float(loss), "norm": float(norm)}

    def taken(self, places: dict[str, Sequence[int]], folder: str) -> str:
        """The file of the parameters' elements first::stride, by our names, float32."""
        assert self.model is not None
        np.savez(f"{folder}/taken.npz", **{name: x.numpy() for name, x in self.model.taken(places).items()})
        return f"{folder}/taken.npz"

    def steps(self, rows: int, tokens: int, vocab: int, lr: float, count: int) -> float:
        """Nanoseconds of `count` steps on fresh random tokens, which nothing waits for but the end."""
        assert self.model is not None
        self.model.wait()
        start = time.perf_counter_ns()
        self.model.steps(rows, tokens, vocab, lr, count)
        self.model.wait()
        return float(time.perf_counter_ns() - start)

    def park(self) -> None:
        """Leave the device's memory to others until `back`."""
        assert self.model is not None
        self.model.park()

    def back(self) -> None:
        """Take the device again."""
        assert self.model is not None
        self.model.back()

    def memory(self) -> int:
        """Most bytes of device memory that torch had allocated at once; 0 on the CPU, where it does not count."""
        return int(self.t.torch.cuda.max_memory_allocated()) if self.t.on_gpu else 0


def main() -> None:
    """Answer until the caller goes."""
    p = Process()
    serve({"open": p.open, "make": p.make, "outputs": p.outputs, "repeats": p.repeats, "block": p.block, "draw": p.draw,
           "spin": p.spin, "make_model": p.make_model,
           "step": p.step, "taken": p.taken, "steps": p.steps, "memory": p.memory, "park": p.park, "back": p.back})


if __name__ == "__main__":
    main()
