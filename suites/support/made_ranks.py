"""Ranks of known behaviour for tests of `alpha bench step --nproc`: processes that answer like step_member (ours) and peer_ranks.

    python made_ranks.py ROOT ours|theirs JSON

JSON: {"batch": sequences of one GPU, "sequence", "ns": {"1": ns, "N": ns} or {name of what is over: ns}, "defect": what goes wrong,
"times": what its losses are multiplied by}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

sys.path[0] = sys.argv[1]

import numpy as np  # noqa: E402

from alpha.profile.served import serve  # noqa: E402

MADE = json.loads(sys.argv[3])
RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TOKENS = MADE["batch"] * MADE["sequence"]
DEFECT = MADE.get("defect", "")
EXCHANGES = 5
LOSSES, NORMS = {"1": (5.0, 4.9, 4.8), "N": (5.1, 5.0, 4.9)}, (1.0, 0.9, 0.8)
state: dict[str, Any] = {"over": "", "taken": 0}


def key() -> str:
    return "N" if SIZE > 1 else "1"


def opened(text: str, vocab: int) -> dict[str, Any]:
    flag = MADE.get("flag")
    if flag and SIZE > 1 and RANK == 0 and not os.path.exists(flag):  # beside ours on one there is no room, alone there is
        open(flag, "w").close()
        raise MemoryError("not enough device memory for arena act")
    return {"hardware": "NVIDIA H100", "machine": "cuda_sm90_H100", "version": "made", "peak": 1e15, "peak_source": "made",
            "exchanges": EXCHANGES if SIZE > 1 else 0}


def taken(steps: int) -> list[dict[str, float]]:
    return [{"loss": LOSSES[key()][i] * MADE.get("times", 1.0), "norm": NORMS[i], "lr": 1e-3} for i in range(steps)]


def parameters(folder: str) -> dict[str, str]:
    np.save(f"{folder}/w.npy", np.ones((32, 128), np.float32))
    return {"embedding.token.weight": f"{folder}/w.npy"}


def changed(places: dict[str, list[int]], folder: str, share: float = 1.0) -> str:
    """Of these parameters after the steps; each place is of a tensor of ones."""
    moved = np.resize(np.float32([-3e-3, 3e-3]), (32, 128))
    found = {name: (1 + np.float32(share) * moved).reshape(-1)[first::stride] for name, (first, stride) in places.items()}
    np.savez(f"{folder}/taken{sys.argv[2]}{RANK}.npz", **found)
    return f"{folder}/taken{sys.argv[2]}{RANK}.npz"


def theirs_changed(places: dict[str, list[int]], folder: str) -> str:
    if not state["over"] and RANK:
        return ""
    return changed(places, folder, 0.0 if DEFECT == f"{state['over']} never updates" else 1.0)


def block(steps: int) -> dict[str, Any]:
    if DEFECT == "dies" and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if SIZE > 1 and DEFECT in ("dies", "waits"):
        time.sleep(60)
    ns = float(MADE["ns"][key()]) * (1 if RANK == 0 else 1.25 if DEFECT == "slow rank" else 0.99)
    n = steps - 1 if SIZE > 1 else 0
    stamped = 0 if DEFECT == "no stamps" else EXCHANGES - 1 if DEFECT == "a stamp short" and RANK == 1 else EXCHANGES
    share = 0.02 if RANK == 1 else 0.01
    return {"ns": ns, "tokens": TOKENS if DEFECT == "tokens of one" else TOKENS * SIZE, "wall": [int(ns)] * n, "exchanges": [stamped] * n,
            "exposed": [0 if stamped == 0 else int(share * ns)] * n, "total": [0 if stamped == 0 else int(0.3 * ns)] * n,
            "phase": [int(0.05 * ns)] * n}


def joined(device: str, threads: int, limit: float) -> dict[str, str]:
    if DEFECT == "no library":
        raise ImportError("No module named 'torch'")
    return {"version": "made", "on": device, "how": "by hand"}


def make(sizes: dict[str, Any], parameters: dict[str, str], variant: dict[str, str], over: str) -> int:
    state.update(over=over, taken=0)
    if DEFECT == f"no room for {over}":
        raise MemoryError("torch.OutOfMemoryError: made up")
    flag = MADE.get("theirs_flag")
    if flag and RANK == 0 and DEFECT == f"no room for {over} beside" and not os.path.exists(flag):  # the first time alone
        open(flag, "w").close()
        raise MemoryError("torch.OutOfMemoryError: made up")
    if DEFECT == f"{over} hangs" and RANK == 1:
        time.sleep(120)
    return 1


def stepped(tokens: str, lr: float) -> dict[str, float]:
    if not state["over"] and RANK:
        return {}
    at = state["taken"]
    state["taken"] += 1
    norm = NORMS[at] * (1.5 if state["over"] and DEFECT == "gradients of one" else 1.0)
    each = TOKENS * (0 if DEFECT == "tokens of nobody" and RANK else 1)
    return {"loss": LOSSES["N" if state["over"] else "1"][at], "norm": norm, "tokens": each}


def timed(rows: int, tokens: int, vocab: int, lr: float, count: int) -> dict[str, float]:
    if not state["over"] and RANK:
        return {}
    return {"ns": float(MADE["ns"][state["over"]]), "tokens": 0 if DEFECT == "counts late" and RANK else rows * tokens}


if sys.argv[2] == "ours":
    serve({"open": opened, "parameters": parameters, "take": taken, "taken": changed, "block": block, "memory": lambda: 1 << 30,
           "loaded": lambda: {"a source": "abc"}, "close": lambda: None})
else:
    serve({"join": joined, "make_ranked": make, "ranked_step": stepped, "ranked_taken": theirs_changed,
           "ranked_steps": timed, "memory": lambda: 2 << 30})
