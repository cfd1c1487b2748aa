"""A peer's model on many ranks: peer_model.py under DistributedDataParallel or FSDP2. Floor 8; imported by peer_ranks.py alone.

Written from PyTorch's documentation of both. DDP keeps gradients in views of its buckets and sums what the network computes with: bf16
with bf16 weights, float32 under autocast. It sums in the last microbatch alone. FSDP2 shards block by block and the root, computes in bf16
and sums in float32; its shards are the float32 masters, so the variant's weights are 'autocast', whose parameters these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from alpha.bench.peer_model import PeerModel
from alpha.bench.variants import AUTOCAST, DDP, FSDP2, Variant


class RankedModel(PeerModel):
    """`over`: DDP, FSDP2 or '' for a model of this process alone. Arguments as PeerModel's; `parameters` are those of the whole model, the
    same on all ranks."""

    def __init__(self, on_gpu: bool, sizes: Mapping[str, Any], parameters: Mapping[str, Any], variant: Variant, over: str) -> None:
        self.over, self.ranks = over, dist.get_world_size() if over else 1
        if over == FSDP2 and variant.weights != AUTOCAST:
            raise ValueError("FSDP2's shards are float32: its weights are 'autocast'")
        self._shared = over == FSDP2
        super().__init__(on_gpu, sizes, parameters, variant)

    def _spread(self, network: Any) -> Any:
        """The network as ranks share it, before the optimizer is made."""
        if self.over == DDP:
            own = [torch.cuda.current_device()] if self.on_gpu else None
            return torch.nn.parallel.DistributedDataParallel(network, device_ids=own, gradient_as_bucket_view=True)
        if self.over == FSDP2:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
            mesh = dist.device_mesh.init_device_mesh(self.device, (self.ranks,))
            for block in network.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(network, mesh=mesh, mp_policy=policy)
        return network

    def _narrow(self) -> Any:
        """FSDP2 casts by itself."""
        return nullcontext() if self.over == FSDP2 else super()._narrow()

    def _last(self, last: bool) -> Any:
        """Gradients are summed over the ranks in the last microbatch; those of bf16 weights in each, because each is widened."""
        if self.over == DDP and not last and self.kept is self.own:
            return self._spreaded.no_sync()
        if self.over == FSDP2:
            self._spreaded.set_requires_gradient_sync(last)
        return nullcontext()

    def _gathered(self, x: Any) -> Any:
        """Of shards each rank has its part; called by all ranks."""
        return x.full_tensor() if hasattr(x, "full_tensor") else x

    def mean(self, loss: Any) -> float:
        """Of all ranks."""
        if self.over:
            loss = loss.detach().clone().float()
            dist.all_reduce(loss)
            loss = loss / self.ranks
        return float(loss)

    def whole(self, norm: Any) -> float:
        """The norm of all ranks' gradients: of shards each rank knows its part."""
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def meet(self) -> None:
        """Wait for the device, and for the other ranks."""
        self.wait()
        if self.over:
            dist.barrier()
            self.wait()
