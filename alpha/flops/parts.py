"""The parts that FLOPs are told apart by, the same for what a model needs and for what its launches execute. Floor 3."""

from __future__ import annotations

EMBEDDING, PROJECTIONS, ATTENTION, FEED_FORWARD, LOGITS, OTHERS, OPTIMIZER = (
    "embedding", "attention projections", "attention scores", "feed-forward", "head", "norms and others", "optimizer")  # fmt: skip

PARTS: dict[str, str] = {
    EMBEDDING: "tokens and positions looked up and added; a model's FLOPs count none of it",
    PROJECTIONS: "products with the weights of queries, keys, values and of attention's output",
    ATTENTION: "Q K^T, the softmax and P V",
    FEED_FORWARD: "products with the weights of the MLP, and its activation where it is fused into one",
    LOGITS: "the product with the head's weight, its norm, softmax and loss",
    OTHERS: "norms, residual sums, casts, sums of gradients: everything else",
    OPTIMIZER: "global norm, clipping, learning rate, the update of parameters and moments",
}
"""Name -> what it counts, in the order in which tables show them. `embedding` and `head` are names of layers too."""

DIRECTIONS = ("forward", "backward", "recompute", "update")
"""What a step does with a part. Backward: gradients of activations and weights; recompute: the forward computed again for the backward."""


def part_of_weight(name: str) -> str:
    """The part of a block's product, from the name of the weight that it reads ('' where it reads none)."""
    return PROJECTIONS if ".attention." in name else FEED_FORWARD if ".mlp." in name else OTHERS
