"""Collectives of NCCL and of PyTorch's symmetric memory, timed beside ours: one process of `alpha bench comm --device --peers`. Floor 8.

Run as a program, `python -m` never imports it: it is the one that has PyTorch, and no kernel of ours is in its process. It answers one
line of JSON with another. Arguments: rank, ranks, port.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any


def main(rank: int, size: int, port: str) -> None:
    """Serve requests {op, nbytes, graph, calls} until standard input ends: op such as "nccl all_reduce" or "symmetric one_shot"."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(size)}
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    def timed(run: Any, calls: int) -> float:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * start.elapsed_time(end) / calls

    def graphed(run: Any, many: int) -> Any:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(many):
                run()
        return graph.replay

    def call(op: str, nbytes: int) -> Any:
        library, name = op.split()
        n = nbytes // 2
        x = torch.randn(n, device=device).bfloat16() if library == "nccl" else None
        if library == "symmetric":
            import torch.distributed._symmetric_memory as symmetric

            t = symmetric.empty(n, dtype=torch.bfloat16, device=device)
            symmetric.rendezvous(t, dist.group.WORLD.group_name)
            t.normal_()
            of = getattr(torch.ops.symm_mem, {"one_shot": "one_shot_all_reduce", "two_shot": "two_shot_all_reduce_"}[name])
            return lambda: of(t, "sum", dist.group.WORLD.group_name)
        assert x is not None
        if name == "all_reduce":
            return lambda: dist.all_reduce(x, op=dist.ReduceOp.AVG)
        if name == "all_gather":
            return partial(dist.all_gather_into_tensor, x, x[: n // size].clone())
        if name == "reduce_scatter":
            return partial(dist.reduce_scatter_tensor, torch.empty_like(x[: n // size]), x)
        if name == "broadcast":
            return lambda: dist.broadcast(x, 0)
        if name == "all_to_all":
            return partial(dist.all_to_all_single, torch.empty_like(x), x)
        if name == "send":
            return [partial(dist.send, x, 1), partial(dist.recv, x, 0)][rank] if rank < 2 else lambda: None  # others pass by
        raise ValueError(op)

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    kept: dict[tuple[str, int, int], Any] = {}
    print(json.dumps({"ready": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}), file=out, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        key = ask["op"], ask["nbytes"], ask["graph"]
        try:
            if key not in kept:
                if len(kept) > 3:
                    kept.clear()
                    torch.cuda.empty_cache()
                run = call(ask["op"], ask["nbytes"])
                kept[key] = graphed(run, ask["graph"]) if ask["graph"] else run, run  # who drops `run` drops its operands
            us = timed(kept[key][0], ask["calls"]) / max(ask["graph"], 1)
            print(json.dumps({"us": us}), file=out, flush=True)
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"[:300]}), file=out, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
