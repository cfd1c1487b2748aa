"""Drawn run files: every key stands in them, away from its default where the draw allows it. Each has a small corpus of its own."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from dull_trainer import DullTrainer

Tables = dict[str, dict[str, Any]]

RECOMPUTE = {"gpt": ("block", "ops:gelu,layernorm", "ops:attention_packed", "ops:add"),
             "llama": ("block", "ops:rmsnorm,swiglu_packed", "ops:attention_packed,rope_packed", "ops:matmul")}
LEAST_TRAINED, LEAST_HELD = 5, 4
"""Windows of a split, at least; a draw with fewer is drawn again."""


def draw(seed: int, folder: Path, family: str | None = None) -> Path:
    """Write `folder`/run.toml and the text it is for, which follow from `seed` alone, and return its path."""
    rng = random.Random(f"run {seed}")
    tables = _tables(rng, folder, family or ("gpt", "llama")[seed % 2], seed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text("".join(f"[{s}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items()) for s, keys in tables.items()))
    for attempt in range(100):
        _texts(random.Random(f"text {seed} {attempt}"), folder / "text", attempt // 10)
        if _fits(DullTrainer(path)):
            return path
    raise RuntimeError(f"no text was found for draw {seed}")


def _fits(dull: DullTrainer) -> bool:
    """Whether the text has enough windows on both sides, and enough pairs for the vocabulary."""
    if not all(side for sides in dull.sides for side in sides):
        return False
    try:
        return all(dull.windows(s) >= LEAST_TRAINED for s in dull.train) and all(dull.windows(s) >= LEAST_HELD for s in dull.validation)
    except ValueError:  # no pair is left to learn
        return False


def _tables(rng: random.Random, folder: Path, family: str, seed: int) -> Tables:
    heads = rng.choice((2, 4))
    d = rng.choice((4, 6, 8))
    shards, micros, rows = rng.choice((2, 4)), rng.choice((2, 3)), rng.choice((1, 2))
    sequence, steps = rng.randrange(9, 28) * (2 if seed % 9 == 5 else 1), rng.randrange(3, 6)
    warmup = rng.choice((1, 2))
    own = random.Random(f"model {seed}")  # so that a key more moves none of the other draws, which wrong wirings name
    model: dict[str, Any] = {
        "family": family, "layers": rng.choice((1, 2, 3)), "width": heads * d, "heads": heads, "positions": sequence + rng.randrange(1, 9),
        "tied": rng.random() < 0.4, "vocab_size": (0, 300, 331)[seed // 2 % 3],
        "window": rng.randrange(2, 8), "z_loss": 10 ** rng.uniform(-3, -1), "norm_eps": 10 ** own.uniform(-4, -1),
    }
    if family == "gpt":
        model["dropout"] = rng.uniform(0.05, 0.5)
    else:
        model |= {"kv_heads": rng.choice([g for g in (1, 2) if g < heads]), "rope_base": 10 ** rng.uniform(1, 4),
                  "hidden": 16 * rng.choice((2, 3, 5)), "head_dim": own.choice((0, 2, 4, 10)),
                  "attention_bias": ("none", "qkv", "all")[seed // 2 % 3],
                  "rope_scaling": [2.5, own.uniform(0.1, 0.6), own.uniform(0.8, 3), float(sequence)][: (0, 4, 1)[seed // 2 % 3]]}
    rope = "rope_scaled" if model.get("rope_scaling") else "rope_packed"
    schedule = rng.choice(("cosine", "wsd"))
    optim: dict[str, Any] = {
        "name": "sgd" if seed % 4 > 1 else "adamw", "lr": 10 ** rng.uniform(-3, -1.5),
        "betas": [rng.uniform(0.5, 0.89), rng.uniform(0.9, 0.9999)], "eps": 10 ** rng.uniform(-6, -3), "momentum": rng.uniform(0.3, 0.95),
        "weight_decay": rng.uniform(0.2, 3), "clip": 10 ** rng.uniform(-1.5, 0.3), "schedule": schedule, "warmup": warmup,
        "floor": rng.uniform(0.2, 0.9),
    }
    if schedule == "wsd":
        optim["decay"] = rng.randrange(1, steps - warmup + 1)
    corpus = ("text", "text/**/*.md", "one.txt")[seed // 4 % 3]
    mixture = _mixture(random.Random(f"mixture {seed}"), folder) if seed % 7 == 5 else ""
    return {
        "run": {"name": "drawn", "seed": rng.randrange(2, 2**32 if family == "gpt" else 2**63) | bool(mixture),  # odd: a sum has a carry
                "out": (folder / "runs").as_posix()},
        "model": model,
        "data": {"corpus": "stdlib" if mixture else (folder / corpus).as_posix(), "mixture": mixture,
                 "baseline": rng.random() < 0.1, "tokenizer": rng.choice(("bytes", "bpe")),
                 "vocab": rng.randrange(259, 290), "sample": rng.randrange(300, 700) * (10 if mixture or corpus == "one.txt" else 1),
                 "validation": rng.uniform(0.3, 0.5),
                 "sequence": sequence, "packing": "documents" if seed % 9 in (5, 7) else "windows", "prefetch": (0, 1, 3)[seed % 3],
                 "documents": (masked := rng.random() < 0.7),
                 "buckets": (2, 3, 5)[seed // 9 % 3] if masked and seed % 9 == 5 else 0, "cache": (folder / "cache").as_posix()},
        "train": {"steps": steps, "batch": shards * micros * rows, "shards": shards, "zero": 1, "precision": "f32", "micro_batch": rows,
                  "replay": rng.choice((0, 2, 3)), "recompute": rng.choice(RECOMPUTE[family]).replace("rope_packed", rope),
                  "fuse": rng.random() < 0.5,
                  "eval_every": rng.choice((1, 2)), "eval_windows": rng.randrange(2, 6), "final_windows": rng.randrange(3, 9),
                  "sample_every": 2, "checkpoint_every": rng.choice((1, 2)), "keep": rng.choice((1, 3)),
                  "keep_every": (2, 3)[seed // 3 % 2], "profile": rng.choice((0, 2)), "verify": 0},
        "optim": optim,
        "machine": {"backend": "cpu", "threads": rng.choice((1, 2, 3))},
    }


def _mixture(rng: random.Random, folder: Path) -> str:
    """Two or three sources, some of whose texts are the same, by weights that add up to anything."""
    names = rng.sample(["text", "text/**/*.md", "one.txt", "more"], rng.choice((2, 3)))
    return ", ".join(f"{(folder / name).as_posix()}:{rng.choice(('0.7', '2', '0.25', '1.5', '3'))}" for name in names)


def _texts(rng: random.Random, folder: Path, extra: int) -> None:
    """10 to 15 files, and `extra` more, of a few words in nested folders, .txt and .md alike, copies of them under other names in a
    folder beside it, and one file beside the folder: copies, an empty one, a hidden one, one of
    no text, bytes that are no UTF-8, Windows' line ends."""
    more = folder.with_name("more")
    for each in (folder, more):
        if each.exists():
            shutil.rmtree(each)
    more.mkdir(parents=True)
    alphabet = ["def", "return", "self", "x1", "0", "42", "==", "(a, b)", "import", "\xe9t\xe9", "  ", "\t", "#--", "value"]
    words, whole = rng.choices(alphabet, k=9), b""
    for i in range(rng.randrange(10, 16) + extra):
        text = "".join(rng.choice(words) + rng.choice((" ", " ", "\n", "\r\n", "\n\n    ")) for _ in range(rng.randrange(6, 22))).encode()
        text += rng.choice((b"", b"\xff\xfe\x00", b"\n"))
        whole += text
        for end in ("txt", "md"):
            path = folder / f"{rng.choice(('', 'a/', 'a/b/'))}{i}-{rng.randrange(1000)}.{end}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text + end.encode())
            (more / f"{i}.{end}").write_bytes(text + end.encode())
            if i == 3:
                (folder / f"copy-{rng.randrange(1000)}.{end}").write_bytes(text + end.encode())
    folder.with_name("one.txt").write_bytes(whole if rng.random() < 0.7 else whole.replace(b"\n", b" "))
    for name, data in (("empty.txt", b""), ("empty.md", b""), ("picture.bin", b"a = 1\n" * 9), (".hidden/h.txt", b"b = 2\n" * 9)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
