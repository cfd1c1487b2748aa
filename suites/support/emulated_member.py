"""A rank of ours in `alpha bench step --nproc` on an emulated GPU: `emulated_member.py FILE`, which is the memory of all GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from emulated_gpu import emulated, emulated_gpu
from emulated_peers import EACH, Memory, emulated_peers

from alpha.bench import step_member
from alpha.cuda_runtime import compile as nvcc
from alpha.train import engine
from alpha.train.catalogue import catalogue

if __name__ == "__main__":
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ[engine.VISIBLE] = ",".join(map(str, range(size)))
    gpus = emulated_peers(Memory(size, EACH, Path(sys.argv[1])), rank, nvcc.KERNELS) if size > 1 else emulated_gpu()
    with gpus:
        step_member.main(emulated(catalogue()))
