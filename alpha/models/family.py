"""What a family of models gives, and where it is found: the file of alpha/models of its name, as FAMILY. Floor 5.

A new family: its file here, its name and the keys of [model] that it alone reads in alpha/config.py, and its plain reference in
alpha/gates/contracts/families.py. Its FLOPs are counted from its graph (alpha/flops/v1.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from alpha.config import FAMILIES, Config
from alpha.errors import GraphError, InputError
from alpha.graph.ir import Value


@dataclass(frozen=True, kw_only=True)
class Family:
    """The functions of a family, all of whose models are values of its own frozen dataclass of sizes, which has a field `z_loss`.

    `sizes(config, vocab)` -> those of a run file, with `vocab` ids; ConfigError where they do not fit.
    `loss(t, sizes, batch, seq, training)` -> (sum of token losses f32[], number of valid targets f32[]).
    `decode(t, sizes, batch, seq)` -> logits [batch, vocab] of the token after position index[b].
    """

    sizes: Callable[[Config, int], Any]
    loss: Callable[..., tuple[Value, Value]]
    decode: Callable[..., Value]


def family(name: str) -> Family:
    """The family of this name: InputError for one that alpha/config.py does not know, GraphError for a file without FAMILY."""
    if name not in FAMILIES:
        raise InputError("no such family of models", came=name, expected=", ".join(FAMILIES), do="add it to FAMILIES in alpha/config.py")
    found = getattr(import_module(f"alpha.models.{name}"), "FAMILY", None)
    if not isinstance(found, Family):
        raise GraphError("a family's file does not say what it gives", came=f"alpha/models/{name}.py", expected="FAMILY = Family(...)")
    return found


def shared_sizes(cfg: Config, vocab: int) -> dict[str, Any]:
    """What every family reads from a run file."""
    m = cfg.model
    return {"vocab": vocab, "positions": cfg.positions, "layers": m.layers, "width": m.width, "heads": m.heads, "tied": m.tied,
            "z_loss": m.z_loss, "window": m.window, "documents": cfg.data.documents}
