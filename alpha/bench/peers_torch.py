"""What PyTorch offers for the rows of the op table: cuBLAS, cuDNN, its own kernels, and what its compiler makes. Floor 8.

Runs in a process of its own (peer_process.py), which alone imports torch. Each entry of PEERS takes the operands in the order of the row
and gives the ways in which PyTorch computes it, by name; a way is called again and again and returns the row's outputs, None for one that
it does not make (statistics kept for a backward pass). What is prepared before the call, such as the forward pass whose backward is timed,
is not timed. `Unsupported` says what PyTorch has no counterpart for. Written from the rows' definitions and PyTorch's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

Way = Callable[[], tuple[Any, ...]]
EAGER, COMPILED = "torch eager", "torch.compile"


class Unsupported(Exception):
    """No counterpart; the text completes 'no peer: '."""


@dataclass(frozen=True)
class Torch:
    """The library. `on_gpu`: operands are in device memory. `F`: torch.nn.functional."""

    torch: Any
    on_gpu: bool

    @property
    def F(self) -> Any:
        return self.torch.nn.functional

    def dtype(self, name: str) -> Any:
        """torch's type of one of ours."""
        return getattr(self.torch, {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "i32": "int32", "i64": "int64"}[name])

    def compiled(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """What torch.compile makes of f, for these shapes alone."""
        found: Callable[..., Any] = self.torch.compile(f, dynamic=False, fullgraph=True)
        return found

    def wide(self, like: Any, attrs: Mapping[str, Any]) -> Any:
        """The type of a result that keeps the type in which it is summed, if the row asks for it."""
        return self.torch.float32 if attrs.get("wide") and like.dtype == self.torch.bfloat16 else like.dtype


def _tuple(y: Any) -> tuple[Any, ...]:
    return y if isinstance(y, tuple) else (y,)


def _forward(t: Torch, f: Callable[..., Any], xs: Sequence[Any], *, compiled: bool = True) -> dict[str, Way]:
    def way(g: Callable[..., Any]) -> Way:
        def call() -> tuple[Any, ...]:
            with t.torch.no_grad():
                return _tuple(g(*xs))
        return call

    return {EAGER: way(f), **({COMPILED: way(t.compiled(f))} if compiled else {})}


def _backward(t: Torch, f: Callable[..., Any], leaves: Sequence[Any], dy: Any, *, compiled: bool = True,
              after: Callable[..., Any] = lambda *g: g) -> dict[str, Way]:
    """Gradients of f at `leaves` for the cotangent dy; the forward pass is not timed. `after`: what becomes of the gradients."""
    own = [x.detach().clone().requires_grad_() for x in leaves]

    def way(g: Callable[..., Any]) -> Way:
        y = g(*own)
        return lambda: _tuple(after(*t.torch.autograd.grad(y, own, dy, retain_graph=True)))

    ways = {EAGER: way(f)}
    if compiled:  # made when it is first called: compiling may fail where the eager form works
        made: list[Way] = []

        def call() -> tuple[Any, ...]:
            if not made:
                made.append(way(t.compiled(f)))
            return made[0]()

        ways[COMPILED] = call
    return ways


# -- products ------------------------------------------------------------------------------------------------------------------


def _mm(t: Torch, a: Any, b: Any, attrs: Mapping[str, Any]) -> Callable[..., Any]:
    """The product of a row `matmul` as a function of (a, b, *bias), in the narrow type."""
    def f(a: Any, b: Any, *bias: Any) -> Any:
        a = a.transpose(-1, -2) if attrs.get("trans_a") else a
        b = b.transpose(-1, -2) if attrs.get("trans_b") else b
        if bias and a.dim() == 2:
            return t.torch.addmm(bias[0], a, b)
        y = t.torch.matmul(a, b)
        return y + bias[0] if bias else y

    return f


def _matmul(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    f, wide = _mm(t, xs[0], xs[1], attrs), t.wide(xs[0], attrs) != xs[0].dtype
    name = "torch cuBLAS" if t.on_gpu else "torch BLAS"
    ways = {name + (", bf16 result" if wide else ""): _forward(t, f, xs, compiled=False)[EAGER]}
    if wide and xs[0].dim() == 2 and len(xs) == 2:
        a, b = (x.transpose(-1, -2) if attrs.get(k) else x for x, k in zip(xs, ("trans_a", "trans_b")))
        ways[f"{name}, f32 result"] = lambda: (t.torch.mm(a, b, out_dtype=t.torch.float32),)
    return ways


def _matmul_accumulate(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    f = _mm(t, xs[1], xs[2], attrs)
    return _forward(t, lambda into, a, b: into + f(a, b), xs)


def _approximate(attrs: Mapping[str, Any]) -> str:
    return str(attrs["approximate"])


def _linear_gelu(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    f = _mm(t, xs[0], xs[1], attrs)

    def both(x: Any, w: Any, bias: Any) -> Any:
        h = f(x, w, bias)
        return h, t.F.gelu(h, approximate=_approximate(attrs))

    return _forward(t, both, xs)


def _linear_swiglu(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    f = _mm(t, xs[0], xs[1], attrs)

    def both(x: Any, w: Any) -> Any:
        pre = f(x, w)
        gate, up = pre.chunk(2, -1)
        return pre, t.F.silu(gate) * up

    return _forward(t, both, xs)


def _matmul_gelu_bwd(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    f = _mm(t, xs[0], xs[1], attrs)
    return _forward(t, lambda dy, w, h: t.torch.ops.aten.gelu_backward(f(dy, w), h, approximate=_approximate(attrs)), xs)


# -- attention -----------------------------------------------------------------------------------------------------------------


def _backends(t: Torch) -> dict[str, Any]:
    """Name -> a context in which SDPA has this back end alone."""
    if not t.on_gpu:
        return {"torch SDPA": nullcontext}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return {"torch SDPA cuDNN": partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION),
            "torch SDPA flash": partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)}


def _sdpa(t: Torch, heads: Sequence[Any], attrs: Mapping[str, Any], more: int) -> Any:
    """Attention on q, k, v of [B, T, H, D], as a view of SDPA's own order."""
    q, k, v = heads
    if more:
        raise Unsupported("SDPA's fused kernels take no document ids")
    if attrs["window"]:
        raise Unsupported("SDPA's fused kernels have no window")
    if attrs["causal"] and q.shape[1] != k.shape[1]:
        raise Unsupported("SDPA aligns a causal mask at the top left, the row at the bottom right")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = t.F.scaled_dot_product_attention(q, k, v, is_causal=attrs["causal"], scale=attrs["scale"], enable_gqa=q.shape[1] != k.shape[1])
    return o.transpose(1, 2)


def _unpacked(qkv: Any, attrs: Mapping[str, Any]) -> Sequence[Any]:
    h, g = attrs["heads"], attrs["kv_heads"]
    d = qkv.shape[2] // (h + 2 * g)
    return [x.unflatten(2, (-1, d)) for x in qkv.split([h * d, g * d, g * d], 2)]


def _attention(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    def way(backend: Any) -> Way:
        def call() -> tuple[Any, ...]:
            with t.torch.no_grad(), backend():
                return _sdpa(t, xs[:3], attrs, len(xs) - 3), None
        return call

    return {name: way(backend) for name, backend in _backends(t).items()}


def _attention_packed(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    def way(backend: Any) -> Way:
        def call() -> tuple[Any, ...]:
            with t.torch.no_grad(), backend():
                return _sdpa(t, _unpacked(xs[0], attrs), attrs, len(xs) - 1).flatten(2), None
        return call

    return {name: way(backend) for name, backend in _backends(t).items()}


def _attention_backward(t: Torch, leaves: Sequence[Any], do: Any, f: Callable[..., Any]) -> dict[str, Way]:
    own = [x.detach().clone().requires_grad_() for x in leaves]

    def way(backend: Any) -> Way:
        made: list[Any] = []

        def call() -> tuple[Any, ...]:
            if not made:
                with backend():
                    made.append(f(*own))
            return _tuple(t.torch.autograd.grad(made[0], own, do, retain_graph=True))
        return call

    return {name: way(backend) for name, backend in _backends(t).items()}


def _attention_bwd(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    return _attention_backward(t, xs[1:4], xs[0], lambda *qkv: _sdpa(t, qkv, attrs, len(xs) - 6))


def _attention_packed_bwd(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    return _attention_backward(t, xs[1:2], xs[0], lambda qkv: _sdpa(t, _unpacked(qkv, attrs), attrs, len(xs) - 4).flatten(2))


# -- norms ---------------------------------------------------------------------------------------------------------------------

EPS = 1e-5
"""Of the norms whose backward rows are timed: those rows take the statistics and not the eps."""


def _layer(t: Torch, eps: float) -> Callable[..., Any]:
    return lambda x, gamma, beta: t.F.layer_norm(x, x.shape[-1:], gamma, beta, eps)


def _rms(t: Torch, eps: float) -> Callable[..., Any]:
    return lambda x, gamma: t.F.rms_norm(x, x.shape[-1:], gamma, eps)


def _norm(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any], *, make: Any, statistics: int) -> dict[str, Way]:
    f = make(t, attrs["eps"])
    return _forward(t, lambda *x: (f(*x), *[None] * statistics), xs)


def _add_norm(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any], *, make: Any, statistics: int) -> dict[str, Way]:
    f = make(t, attrs["eps"])

    def both(a: Any, b: Any, *scales: Any) -> Any:
        s = a + b
        return (s, f(s, *scales), *[None] * statistics)

    return _forward(t, both, xs)


def _norm_bwd(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any], *, make: Any, add: bool) -> dict[str, Way]:
    residual, (dy, x, gamma) = xs[0], xs[int(add) : int(add) + 3]
    leaves = [x, gamma] if make is _rms else [x, gamma, t.torch.zeros_like(gamma)]
    after = (lambda dx, *rest: (residual + dx, *rest)) if add else (lambda *g: g)
    return _backward(t, make(t, EPS), leaves, dy, after=after)


# -- loss ----------------------------------------------------------------------------------------------------------------------


def _plain_loss(attrs: Mapping[str, Any]) -> None:
    if attrs["z_loss"]:
        raise Unsupported("F.cross_entropy has no z-loss")


def _cross_entropy(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    _plain_loss(attrs)
    targets = xs[1].long()
    return _forward(t, lambda x: (t.F.cross_entropy(x, targets, ignore_index=attrs["ignore_index"], reduction="none"), None), xs[:1])


def _cross_entropy_bwd(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    _plain_loss(attrs)
    dloss, logits, targets = xs[0], xs[1], xs[2].long()
    return _backward(t, lambda x: t.F.cross_entropy(x, targets, ignore_index=attrs["ignore_index"], reduction="none"), [logits], dloss)


def _head_loss(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> Callable[..., Any]:
    _plain_loss(attrs)
    targets = xs[2].long()

    def f(x: Any, weight: Any) -> Any:
        return t.F.cross_entropy(t.F.linear(x, weight).float(), targets, ignore_index=attrs["ignore_index"], reduction="sum")

    return f


def _linear_cross_entropy(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    return _forward(t, _head_loss(t, xs, attrs), xs[:2])


def _linear_cross_entropy_grad(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    """Loss and both gradients: the forward pass is part of the row, so it is timed."""
    own = [x.detach().clone().requires_grad_() for x in xs[:2]]

    def way(g: Callable[..., Any]) -> Way:
        def call() -> tuple[Any, ...]:
            loss = g(*own)
            return (loss.detach(), *t.torch.autograd.grad(loss, own))
        return call

    f = _head_loss(t, xs, attrs)
    return {EAGER: way(f), COMPILED: way(t.compiled(f))}


# -- lookups, elementwise, sums ------------------------------------------------------------------------------------------------


def _embedding(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    return _forward(t, lambda table, ids: t.F.embedding(ids, table), xs)


def _embedding_add(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    return _forward(t, lambda table, ids, table2, ids2: t.F.embedding(ids, table) + t.F.embedding(ids2, table2), xs)


def _embedding_bwd(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any], *, into: bool = False) -> dict[str, Way]:
    dy, ids = xs[-2], xs[-1].long()

    def f() -> tuple[Any, ...]:
        grad = t.torch.ops.aten.embedding_dense_backward(dy, ids, attrs["vocab"], -1, False)
        return (xs[0] + grad if into else grad,)

    return {"torch eager, not deterministic" if t.on_gpu else EAGER: f}


def _rotated(t: Torch, x: Any, positions: Any, attrs: Mapping[str, Any], sign: float) -> Any:
    d = x.shape[-1]
    rates = attrs["base"] ** (-2.0 * t.torch.arange(d // 2, device=x.device, dtype=t.torch.float64) / d)
    angle = positions.to(t.torch.float64)[..., None, None] * rates
    return angle.cos().float(), sign * angle.sin().float()


def _turn(t: Torch, x: Any, cos: Any, sin: Any, layout: str) -> Any:
    a, b = x.chunk(2, -1) if layout == "half" else (x[..., 0::2], x[..., 1::2])
    c, d = a * cos - b * sin, b * cos + a * sin
    turned = t.torch.cat((c, d), -1) if layout == "half" else t.torch.stack((c, d), -1).flatten(-2)
    return turned.to(x.dtype)


def _rope(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    """The table of angles is made beforehand, as trainers do."""
    tables = _rotated(t, xs[0], xs[1], attrs, -1.0 if attrs.get("inverse") else 1.0)
    return _forward(t, lambda x, cos, sin: _turn(t, x, cos, sin, attrs["layout"]), [xs[0], *tables])


def _rope_packed(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    q, _, _ = _unpacked(xs[0], attrs)
    tables = _rotated(t, q, xs[1], attrs, -1.0 if attrs.get("inverse") else 1.0)

    def f(qkv: Any, cos: Any, sin: Any) -> Any:
        q, k, v = _unpacked(qkv, attrs)
        return t.torch.cat([_turn(t, x, cos, sin, attrs["layout"]).flatten(2) for x in (q, k)] + [v.flatten(2)], 2)

    return _forward(t, f, [xs[0], *tables])


def _silu_packed(t: Torch, x: Any) -> Any:
    gate, up = x.chunk(2, -1)
    return t.F.silu(gate) * up


def _sum(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any], *, into: bool = False) -> dict[str, Way]:
    axis, keep = attrs.get("axis"), bool(attrs.get("keepdims"))
    axes = list(range(xs[-1].dim())) if axis is None else [axis] if isinstance(axis, int) else list(axis)

    def f(*x: Any) -> Any:
        y = x[-1].sum(axes, keepdim=keep, dtype=t.wide(x[-1], attrs)) if axes else x[-1]
        return x[0] + y if into else y

    return _forward(t, f, xs)


def _reduction(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any], *, name: str) -> dict[str, Way]:
    axis, keep = attrs.get("axis"), bool(attrs.get("keepdims"))
    axes = list(range(xs[0].dim())) if axis is None else [axis] if isinstance(axis, int) else list(axis)
    f = t.torch.amax if name == "max" else t.torch.mean
    return _forward(t, lambda x: f(x, axes, keepdim=keep), xs)


def _adamw(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    """One flat parameter. The row's coefficient is 1 here; the peer keeps no bf16 copy."""
    param, grad, m, v, _, lr, step = xs[:7]
    segments = attrs["segments"]
    if len(segments) != 1 or list(segments[0]) != [0, param.numel(), 1.0, 1.0]:
        raise Unsupported("one flat parameter that decays is compared, not many segments")
    decay = attrs["weight_decay"]
    leaf = param.clone().requires_grad_()
    leaf.grad = grad
    optimizer = t.torch.optim.AdamW([leaf], lr=float(lr), betas=(attrs["beta1"], attrs["beta2"]), eps=attrs["eps"], weight_decay=decay,
                                    fused=True)
    optimizer.state[leaf] = {"step": t.torch.tensor(float(step), device=param.device), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}

    def call() -> tuple[Any, ...]:
        optimizer.step()
        state = optimizer.state[leaf]
        return (leaf.detach(), state["exp_avg"], state["exp_avg_sq"], *[None] * (len(xs) - 8))

    return {"torch fused AdamW": call}


def _global_norm(t: Torch, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    parts = [xs[0][a : a + n] for a, n in attrs["segments"]]
    return {EAGER: lambda: (t.torch.nn.utils.get_total_norm(parts),)}


def _of(f: Callable[..., Any], **more: Any) -> Any:
    """A row that is one expression: f(t, attrs, *operands)."""
    return lambda t, xs, attrs: _forward(t, lambda *x: f(t, attrs, *x), xs, **more)


def _gradient_of(f: Callable[..., Any], operands: slice) -> Any:
    """The backward of an expression, by autograd: dy comes first."""
    return lambda t, xs, attrs: _backward(t, lambda *x: f(t, attrs, *x), xs[operands], xs[0])


PEERS: dict[str, Callable[[Torch, Sequence[Any], Mapping[str, Any]], dict[str, Way]]] = {
    "matmul": _matmul, "matmul_accumulate": _matmul_accumulate, "linear_gelu": _linear_gelu, "linear_swiglu": _linear_swiglu,
    "matmul_gelu_bwd": _matmul_gelu_bwd,
    "attention": _attention, "attention_bwd": _attention_bwd, "attention_packed": _attention_packed,
    "attention_packed_bwd": _attention_packed_bwd,
    "layernorm": partial(_norm, make=_layer, statistics=2), "rmsnorm": partial(_norm, make=_rms, statistics=1),
    "add_layernorm": partial(_add_norm, make=_layer, statistics=2), "add_rmsnorm": partial(_add_norm, make=_rms, statistics=1),
    "layernorm_bwd": partial(_norm_bwd, make=_layer, add=False), "rmsnorm_bwd": partial(_norm_bwd, make=_rms, add=False),
    "layernorm_bwd_add": partial(_norm_bwd, make=_layer, add=True), "rmsnorm_bwd_add": partial(_norm_bwd, make=_rms, add=True),
    "cross_entropy": _cross_entropy, "cross_entropy_bwd": _cross_entropy_bwd, "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_grad": _linear_cross_entropy_grad,
    "embedding": _embedding, "embedding_add": _embedding_add, "embedding_bwd": _embedding_bwd,
    "embedding_bwd_accumulate": partial(_embedding_bwd, into=True),
    "rope": _rope, "rope_packed": _rope_packed, "sum": _sum, "sum_accumulate": partial(_sum, into=True),
    "mean": partial(_reduction, name="mean"), "max": partial(_reduction, name="max"), "adamw": _adamw, "global_norm": _global_norm,
    "add": _of(lambda t, a, x, y: x + y), "mul": _of(lambda t, a, x, y: x * y), "scale": _of(lambda t, a, x: x * a["factor"]),
    "accumulate": _of(lambda t, a, into, x: into + x), "cast": _of(lambda t, a, x: x.to(t.dtype(a["dtype"]))),
    "gelu": _of(lambda t, a, x: t.F.gelu(x, approximate=_approximate(a))), "silu": _of(lambda t, a, x: t.F.silu(x)),
    "softmax": _of(lambda t, a, x: t.F.softmax(x, a.get("axis", -1))),
    "swiglu": _of(lambda t, a, gate, up: t.F.silu(gate) * up), "swiglu_packed": _of(lambda t, a, x: _silu_packed(t, x)),
    "gelu_bwd": _gradient_of(lambda t, a, x: t.F.gelu(x, approximate=_approximate(a)), slice(1, 2)),
    "silu_bwd": _gradient_of(lambda t, a, x: t.F.silu(x), slice(1, 2)),
    "softmax_bwd": _of(lambda t, a, dy, y: t.torch.ops.aten._softmax_backward_data(dy, y, a.get("axis", -1), y.dtype)),
    "swiglu_bwd": _gradient_of(lambda t, a, gate, up: t.F.silu(gate) * up, slice(1, 3)),
    "swiglu_packed_bwd": _gradient_of(lambda t, a, x: _silu_packed(t, x), slice(1, 2)),
    "transpose": _of(lambda t, a, x: x.permute(tuple(a["perm"])).contiguous()),
    "concat": _of(lambda t, a, *xs: t.torch.cat(xs, a["axis"])),
    "split": _of(lambda t, a, x: tuple(y.contiguous() for y in x.split(list(a["sizes"]), a["axis"]))),
    "broadcast_to": _of(lambda t, a, x: x.expand(*a["shape"]).contiguous()),
    "take_row": _of(lambda t, a, x, index: x[t.torch.arange(x.shape[0], device=x.device), index]),
    "count_valid": _of(lambda t, a, targets: (targets != a["ignore_index"]).sum().float()),
}


def ways(t: Torch, op: str, xs: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Way]:
    """Name -> how PyTorch computes this call; Unsupported where it does not."""
    if op not in PEERS:
        raise Unsupported(f"PyTorch has no counterpart of the row {op}")
    return PEERS[op](t, xs, attrs)
