"""The process of one rank that holds PyTorch: models whose gradients are summed over the ranks by DDP or FSDP2. Floor 8.

Started by step_ranks.py with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set; it answers as peer_process.py does. NCCL goes without
NVLink's multicast, as our collectives do.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from alpha.bench.peer_process import Process
from alpha.bench.variants import Variant
from alpha.profile.served import serve

if TYPE_CHECKING:
    from alpha.bench.peer_model_ranks import RankedModel

WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class RankProcess(Process):
    """The handlers. One model at a time, so that each has the whole device."""

    model: RankedModel | None  # type: ignore[assignment]

    def join(self, device: str, threads: int, limit: float) -> dict[str, str]:
        """Import torch, take the device of this rank, and meet the other ranks. `limit`: seconds that a collective may take."""
        os.environ.update(WITHOUT_MULTICAST)
        import torch
        import torch.distributed as dist

        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if device == "cuda":
            if torch.cuda.device_count() < self.size:
                raise RuntimeError(f"torch sees {torch.cuda.device_count()} GPUs, and {self.size} ranks want one each")
            torch.cuda.set_device(self.rank)
        found = self.open(device, threads)
        self.flush = None  # blocks of steps empty no cache
        own = {"device_id": torch.device("cuda", self.rank)} if device == "cuda" else {}
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=limit), **own)
        how = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if device == "cuda" else "gloo"
        return {**found, "how": how}

    def make_ranked(self, sizes: dict[str, Any], parameters: dict[str, str], variant: dict[str, str], over: str) -> int:
        """Take a model with these parameters, in place of the one before. `over`: 'ddp', 'fsdp2', or '' for rank 0 alone, where the other
        ranks have none. Returns how many parameters it has."""
        from alpha.bench.peer_model_ranks import RankedModel

        self.model = None
        torch = self.t.torch
        torch._dynamo.reset()
        gc.collect()  # wrappers of ranks hold their network in a circle
        if self.t.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if not over and self.rank:
            return 0
        given = {name: self.tensor(path, "f32") for name, path in parameters.items()}
        self.model = RankedModel(self.t.on_gpu, sizes, given, Variant(**variant), over)
        return self.model.size

    def ranked_step(self, tokens: str, lr: float) -> dict[str, float]:
        """One step on this rank's rows of a file of tokens i32[batch, sequence + 1]: loss in nats a token of the whole batch before it,
        norm of its mean gradient, and how many tokens this rank took. A rank without a model does nothing."""
        if self.model is None:
            return {}
        rows = np.load(tokens)
        each = len(rows) // self.model.ranks
        mine = rows[self.rank * each : (self.rank + 1) * each] if self.model.ranks > 1 else rows
        loss, norm = self.model.step(self.t.torch.from_numpy(mine).long().to(self.model.device), lr)
        return {"loss": self.model.mean(loss), "norm": self.model.whole(norm), "tokens": mine.shape[0] * (mine.shape[1] - 1)}

    def ranked_taken(self, places: dict[str, Sequence[int]], folder: str) -> str:
        """The file of the parameters' elements first::stride, by our names, which the first rank writes; '' from the others. Called by all
        ranks, who may each have a part."""
        if self.model is None:
            return ""
        if not self.rank:
            return self.taken(places, folder)
        self.model.taken(places)
        return ""

    def ranked_steps(self, rows: int, tokens: int, vocab: int, lr: float, count: int) -> dict[str, float]:
        """`ns` of one of `count` steps on fresh random rows, `rows` a rank, which nothing waits for but the end; `tokens` of this rank in
        each. A rank without a model does nothing."""
        if self.model is None:
            return {}
        self.model.meet()
        start = time.perf_counter_ns()
        self.model.steps(rows, tokens, vocab, lr, count)
        self.model.wait()
        return {"ns": (time.perf_counter_ns() - start) / count, "tokens": rows * tokens}


def main() -> None:
    """Answer until the caller goes."""
    p = RankProcess()
    serve({"join": p.join, "make_ranked": p.make_ranked, "ranked_step": p.ranked_step, "ranked_taken": p.ranked_taken,
           "ranked_steps": p.ranked_steps, "memory": p.memory})


if __name__ == "__main__":
    main()
