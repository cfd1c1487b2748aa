"""Peers of known behaviour for the benchmark's tests: a process that answers like alpha.bench.peer_process, without PyTorch.

    python made_peer.py ROOT [JSON]

JSON: {"loss": [...], "norm": [...], "after": PATH, "flag": PATH, "ns": {mode: ns}} for steps of a training run. "after": the parameters
behind the checked steps. "updates": what is wrong with them: {"times": a share of the change, "only": of tensors with this in their names,
"decay": this much of each parameter not subtracted, from tensors with "decayed": bool}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = sys.argv[1]

import numpy as np  # noqa: E402

from alpha.profile.served import serve  # noqa: E402

STEPS = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
state: dict[str, Any] = {"taken": 0, "died": False}


def gelu(x: np.ndarray) -> np.ndarray:
    """GELU, tanh form, in float64."""
    x = x.astype(np.float64)
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def opened(device: str, threads: int) -> dict[str, str]:
    print("a library that prints to standard output")
    return {"version": "made", "on": device}


def make(op: str, attrs: dict[str, Any], operands: list[list[str]]) -> dict[str, str]:
    state["x"] = np.load(operands[0][0])
    return {"right": "", "wrong": "", "nan": "", "failing": "", "dying": "", "missing": "no peer: not made"}


def outputs(way: str, places: list[str], folder: str) -> list[str]:
    if way == "failing":
        raise ValueError("this way fails")
    x = state["x"]
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    y = gelu(x).reshape(-1) * {"wrong": 1.001 if state["x"].dtype != np.uint16 else 1.05, "nan": np.nan}.get(way, 1.0)
    np.save(f"{folder}/0.npy", y[np.load(places[0])] if places[0] else y)
    return [f"{folder}/0.npy"]


def block(way: str, repeats: int) -> float:
    if way == "dying":
        os._exit(7)
    time.sleep(0.002)
    return 5e5


def make_model(sizes: dict[str, Any], parameters: dict[str, str], variant: dict[str, str]) -> int:
    flag = STEPS.get("flag")
    if flag and not Path(flag).exists():  # beside ours there is no room, alone there is
        Path(flag).touch()
        raise MemoryError("torch.OutOfMemoryError: made up")
    assert all(Path(f).is_file() for f in parameters.values())
    state.update(variant=variant["compiled"], before={name: np.load(f) for name, f in parameters.items()}, decayed=sizes["decayed"])
    return sum(np.load(f).size for f in parameters.values())


def step(tokens: str, lr: float) -> dict[str, float]:
    at = state["taken"]
    state["taken"] += 1
    return {"loss": STEPS["loss"][at], "norm": STEPS["norm"][at]}


def taken(places: dict[str, list[int]], folder: str) -> str:
    wrong, found = STEPS.get("updates", {}), {}
    if wrong.get("stale"):
        raise RuntimeError("w: the network's weights are not the optimizer's, rounded")
    with np.load(STEPS["after"]) as after:
        for name, (first, stride) in places.items():
            before, x = state["before"][name], after[name]
            if wrong.get("only", "") in name:
                x = before + np.float32(wrong.get("times", 1)) * (x - before)
            if (name in state["decayed"]) == wrong.get("decayed", True):
                x = x + np.float32(wrong.get("decay", 0)) * before
            found[name] = x.reshape(-1)[first::stride]
    np.savez(f"{folder}/taken.npz", **found)
    return f"{folder}/taken.npz"


def park() -> None:
    state["parked"] = True


def back() -> None:
    state["parked"] = False


def steps(rows: int, tokens: int, vocab: int, lr: float, count: int) -> float:
    if count < 1 or rows * tokens < 1 or vocab < 2:
        raise ValueError("no such block")
    if state.get("parked"):
        raise ValueError("it does not have the device")
    return STEPS.get("ns", {}).get(state["variant"], 1e6) * count


def draw(op: str, attrs: dict[str, Any], operands: list[list[Any]]) -> dict[str, str]:
    if STEPS.get("refused") == op:
        return {"torch": "no peer: not made"}
    return {"quick": "", "slow": ""}


def spin(way: str, calls: int) -> None:
    if STEPS.get("dying"):
        os._exit(7)
    time.sleep(calls * {"quick": 1e-5, "slow": 1e-4}[way])


serve({"open": opened, "make": make, "outputs": outputs, "repeats": lambda way, ns: 3, "block": block, "make_model": make_model,
       "step": step, "taken": taken, "steps": steps, "park": park, "back": back, "memory": lambda: 123,
       "draw": draw, "spin": spin,
       "sleep": lambda seconds: time.sleep(seconds)})
