"""Flash attention on the GPU (kernels/attention): the problem, the choice of tiles, and launches prepared once per set of addresses.

    problem = AttentionProblem(batch=8, queries=4096, keys=4096, heads=32, kv_heads=8, head_dim=128, causal=True)
    forward = AttentionForward(problem, q, k, v, o, lse, queue)         # q, k, v, o: Tensor4; lse, queue: Span
    backward = AttentionBackward(problem, q, k, v, o, lse, do, dq, dk, dv, workspace, queue)
    forward(stream); backward(stream)                                   # capturable; no allocation, no host work

Shapes: q, o, dO, dQ [batch, queries, heads, head_dim]; k, v, dK, dV [batch, keys, kv_heads, head_dim], bf16, the last dimension
contiguous, other strides free (multiples of 8 elements), so that a packed [.., q + k + v] buffer works in place. lse [batch, heads,
queries] fp32, natural logarithm, -inf where a query sees no key. `queue`: QUEUE_BYTES bytes, zero before the first launch; each
launch leaves them zero; launches that may run at the same time need queues of their own.

Which key a query sees: position i of `queries` is aligned with key i + keys - queries (bottom right); causal means none after it;
`left` and `right` bound the distance to either side; packed documents (`Documents`) leave a query the keys of its own id. Envelope:
head_dim 64, 96 or 128, any lengths up to 2^20, heads a multiple of kv_heads (query head h reads kv head h // (heads / kv_heads)),
scale > 0, ids that do not fall along a row. All results are bitwise repeatable and do not depend on `blocks`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from alpha.cuda_runtime.compile import Source, compile_kernel
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.launch import Kernel, Launch
from alpha.cuda_runtime.memory import Span, aligned
from alpha.cuda_runtime.tensormap import TensorMap
from alpha.errors import ShapeError

QUEUE_BYTES = 256
UNBOUNDED = 1 << 29  # as in kernels/attention/spans.cuh
L2_SHARE = 24 << 20  # bytes of keys and values (or queries and their gradients) that tiles in flight should share in L2
FORWARD = "attention/forward.cu"
BACKWARD = "attention/backward.cu"
ONE_PASS = "attention/one_pass.cu"
DOCUMENTS = "attention/documents.cu"


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """What is asked. `left`, `right`: how far a query sees to either side of its own position (None: all the way); `causal`
    is right = 0. `packed`: `Documents` are given. `scale` of the logits, 1/sqrt(head_dim) if None."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    left: int | None = None
    right: int | None = None
    packed: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        longest = max(self.queries, self.keys)
        rules = [
            (self.head_dim in (64, 96, 128), f"head_dim {self.head_dim}", "64, 96 or 128 (256: see docs/log/kernels-attention.md)"),
            (min(self.batch, self.queries, self.keys, self.kv_heads) >= 1, str(self), "sizes of at least 1"),
            (longest <= 1 << 20, f"length {longest}", "at most 2^20"),
            (self.kv_heads > 0 and self.heads % self.kv_heads == 0, f"{self.heads} heads over {self.kv_heads}", "a multiple"),
            (self.heads >= 1 and self.batch * self.heads <= 1 << 20, f"{self.batch} x {self.heads} heads", "1..2^20"),
            (
                self.batch * self.heads * (longest + 192) < 1 << 31,
                f"{self.batch} x {self.heads} heads of length {longest}",
                "below 2^31 rows in all",
            ),
            (min(self.left or 0, self.right or 0) >= 0, f"window {self.left}, {self.right}", "at least 0 on either side"),
            (not (self.causal and self.right), f"causal with right {self.right}", "right None or 0"),
            (self.scale is None or 0 < self.scale < math.inf, f"scale {self.scale}", "a positive number"),
        ]
        for good, came, expected in rules:
            if not good:
                raise ShapeError(
                    "outside the envelope of the Hopper attention kernels",
                    came=came,
                    expected=expected,
                    do="use the CPU backend for this shape, or change the model's shape",
                )

    @property
    def window(self) -> tuple[int, int]:
        """Left and right bound as the kernels take them."""
        right = 0 if self.causal else UNBOUNDED if self.right is None else min(self.right, UNBOUNDED)
        return UNBOUNDED if self.left is None else min(self.left, UNBOUNDED), right

    @property
    def logit_scale(self) -> float:
        """The factor of the logits."""
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def padded(self) -> int:
        """Rows per head of the backward workspace: every block of queries that a tile can read lies inside."""
        return -(-self.queries // 64) * 64 + 128

    @property
    def statistics_bytes(self) -> int:
        """One fp32 per row of the backward workspace."""
        return aligned(4 * self.batch * self.heads * self.padded)

    def documents_bytes(self) -> int:
        """Memory of `Documents`; 0 where none are given."""
        return 2 * aligned(4 * self.batch * self.queries) + 2 * aligned(4 * self.batch * self.keys) if self.packed else 0

    @property
    def columns(self) -> int:
        """Columns of a tile: whole panels of 64."""
        return -(-self.head_dim // 64) * 64


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """How it is computed. Per pass: (consumer warpgroups of 64 rows, width of the blocks that pass by). `one`: the backward makes one pass,
    not dq and dkv. `section`: heads walked together, 0 for what fits `L2_SHARE`. `blocks`: CTAs, 0 for one per multiprocessor. `defines`
    of the sources."""

    forward: tuple[int, int]
    dq: tuple[int, int]
    dkv: tuple[int, int]
    one: bool = False
    section: int = 0
    blocks: int = 0
    defines: tuple[tuple[str, str], ...] = field(default=())

    def workspace_bytes(self, problem: AttentionProblem) -> int:
        """Scratch memory of the backward pass: two numbers a query, and where one pass sums dQ."""
        return 2 * problem.statistics_bytes + (places(problem, self).nbytes if self.one else 0)


@dataclass(frozen=True)
class Places:
    """Where the one-pass backward sums dQ (kernels/attention/turns.cuh). `section` kv heads are walked together, `ring` have a place.
    `sums`: blocks of 64 queries in all places; each has 64 x 64 fp32 and a turn."""

    section: int
    ring: int
    sums: int

    @property
    def partial_bytes(self) -> int:
        """The sums under way."""
        return aligned(4 * 64 * 64 * self.sums)

    @property
    def nbytes(self) -> int:
        """With the turns, int32 each."""
        return self.partial_bytes + aligned(4 * self.sums)


def _head_sums(problem: AttentionProblem) -> int:
    """Blocks of 64 queries of all query heads of a kv head."""
    return problem.heads // problem.kv_heads * -(-problem.queries // 64)


def places(problem: AttentionProblem, choice: AttentionChoice) -> Places:
    """As many heads as `L2_SHARE` holds sums of, but no more than keep every multiprocessor busy twice. A quarter more have a place, so
    that a section does not wait for the last items of the one before. Sections are of one size where that does not halve them: a short one
    at the end leaves multiprocessors idle."""
    heads, blocks = problem.batch * problem.kv_heads, -(-problem.keys // 128)
    most = max(1, min(heads, max(32, -(-256 // blocks)), L2_SHARE // (4 * 64 * 64 * _head_sums(problem))))
    section = max(s for s in range(1, most + 1) if heads % s == 0)
    if 2 * section <= most:
        section = -(-heads // -(-heads // most))
    section = min(choice.section or section, heads)
    ring = min(section + max(1, section // 4), heads)
    return Places(section, ring, ring * _head_sums(problem))


# By (head_dim, warpgroups, block), as instantiated at the end of each .cu file. Forward: stages of K and of V; dq: places for the rows
# that stay, stages of K, of V; dkv: places for the rows that stay, stages of the rest.
FORWARD_STAGES: Mapping[tuple[int, int, int], int] = {(128, 2, 128): 2, (96, 2, 128): 2, (64, 3, 128): 4, (64, 4, 64): 6}
DQ_STAGES: Mapping[tuple[int, int, int], tuple[int, int, int]] = {
    (128, 2, 128): (1, 3, 2), (96, 2, 128): (1, 3, 2), (64, 2, 128): (2, 4, 4),
}  # fmt: skip
DKV_STAGES: Mapping[tuple[int, int, int], tuple[int, int]] = {
    (128, 2, 64): (2, 3), (96, 2, 64): (2, 3), (64, 2, 64): (2, 4), (64, 2, 96): (2, 4),
}  # fmt: skip
WIDTH_96 = (("ATTN_WIDTH", "96"),)  # what compiles the tiles of head_dim 96


def choose(problem: AttentionProblem) -> AttentionChoice:
    """The choice for this problem; measured in docs/log/kernels-attention.md."""
    bounded = problem.window != (UNBOUNDED, UNBOUNDED) or problem.packed
    if problem.head_dim == 128:
        return AttentionChoice(forward=(2, 128), dq=(2, 128), dkv=(2, 64))
    if problem.head_dim == 96:
        return AttentionChoice(forward=(2, 128), dq=(2, 128), dkv=(2, 64), defines=WIDTH_96)
    short = bounded and problem.queries < 1536
    dkv = (2, 64) if short else (2, 96)
    return AttentionChoice(forward=(4, 64) if short else (3, 128), dq=(2, 128), dkv=dkv, one=_one_pass(problem))


def _one_pass(problem: AttentionProblem) -> bool:
    """Whether one pass is the faster backward at head dim 64: causal, or full and short (docs/log/kernels-attention.md). Windows keep two
    passes, because one was never timed there; so do documents, which it does not know, and heads whose sums alone are more than L2 should
    hold."""
    if problem.packed or problem.left is not None or 4 * 64 * 64 * _head_sums(problem) > L2_SHARE:
        return False
    return problem.causal or (problem.right is None and max(problem.queries, problem.keys) <= 2048)


@dataclass(frozen=True)
class Tensor4:
    """A bf16 tensor [batch, sequence, heads, head_dim] in device memory: address, strides in elements of the first three."""

    address: int
    batch_stride: int
    row_stride: int
    head_stride: int

    @staticmethod
    def contiguous(address: int, sequence: int, heads: int, head_dim: int) -> Tensor4:
        """[batch, sequence, heads, head_dim] without gaps."""
        return Tensor4(address, sequence * heads * head_dim, heads * head_dim, head_dim)

    def strides(self) -> _Strides:
        """As the kernels take them."""
        return _Strides(b=self.batch_stride, s=self.row_stride, h=self.head_stride)

    def map(self, problem: AttentionProblem, rows: int, *, keys: bool) -> TensorMap:
        """The tensor map with boxes of 64 columns x `rows` rows; dimensions (column, row, head, batch)."""
        length, heads = (problem.keys, problem.kv_heads) if keys else (problem.queries, problem.heads)
        shape = (problem.head_dim, length, heads, problem.batch)
        # a dimension of one element has no stride of its own, but the copy engine wants a legal one
        strides = [
            2 * stride if count > 1 else 2 * problem.head_dim
            for stride, count in ((self.row_stride, length), (self.head_stride, heads), (self.batch_stride, problem.batch))
        ]
        return TensorMap("bf16", self.address, shape, strides, (64, rows, 1, 1))


Bounds = tuple[Span, Span]
"""Start and end of each position's document: int32 [batch, n] each."""


class _Params(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_uint64) for name in ("lse", "lse2", "delta", "queue", "doc_start", "doc_end")]
        + [(name, ctypes.c_int) for name in ("B", "H", "Hkv", "Sq", "Sk", "Spad", "left", "right", "section")]
        + [("scale", ctypes.c_float)]
    )


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("b", "s", "h")]


class _Sums(ctypes.Structure):
    _fields_ = [("partial", ctypes.c_uint64), ("turn", ctypes.c_uint64), ("ring", ctypes.c_int), ("mblocks", ctypes.c_int)]


def _params(
    problem: AttentionProblem, lse: Span, queue: Span, section: int, docs: Bounds | None, workspace: Span | None = None
) -> _Params:
    statistics = problem.statistics_bytes
    for name, span, needed in (
        ("lse", lse, 4 * problem.batch * problem.heads * problem.queries),
        ("queue", queue, 16),
        ("workspace", workspace, 2 * statistics),
    ):
        if span is not None and (span.nbytes < needed or span.address % 16):
            raise ShapeError(f"attention: {name} too small or misaligned", came=span, expected=f"{needed} bytes at a multiple of 16")
    left, right = problem.window
    return _Params(
        lse=lse.address,
        lse2=workspace.address if workspace else 0,
        delta=workspace.address + statistics if workspace else 0,
        queue=queue.address,
        doc_start=docs[0].address if docs else 0,
        doc_end=docs[1].address if docs else 0,
        B=problem.batch,
        H=problem.heads,
        Hkv=problem.kv_heads,
        Sq=problem.queries,
        Sk=problem.keys,
        Spad=problem.padded,
        left=left,
        right=right,
        section=section,
        scale=problem.logit_scale,
    )


class Documents:
    """Packed documents: query and key see each other only if their ids are equal.

    ids_q int32 [batch, queries], ids_k int32 [batch, keys]; neither may fall along a row. `memory`: `problem.documents_bytes()` bytes,
    written by `find_keys` and `find_queries`. Where ids fall, `refusal` makes o and lse of that row of the batch NaN.
    """

    def __init__(self, problem: AttentionProblem, ids_q: Span, ids_k: Span, memory: Span) -> None:
        queries, keys = 4 * problem.batch * problem.queries, 4 * problem.batch * problem.keys
        for name, span, needed, unit in (
            ("ids of queries", ids_q, queries, 4), ("ids of keys", ids_k, keys, 4), ("memory", memory, problem.documents_bytes(), 16),
        ):  # fmt: skip
            if span.nbytes < needed or span.address % unit:
                expected = f"{needed} bytes at a multiple of {unit}"
                raise ShapeError(f"documents: {name} too small or misaligned", came=span, expected=expected)
        self._problem, self._q, self._k = problem, ids_q, ids_k
        starts = [memory.address, memory.address + aligned(queries)]
        starts += [starts[1] + aligned(queries), starts[1] + aligned(queries) + aligned(keys)]
        self.of_queries: Bounds = (Span(starts[0], queries), Span(starts[1], queries))
        self.of_keys: Bounds = (Span(starts[2], keys), Span(starts[3], keys))

    def find_keys(self) -> Launch:
        """The launch that writes `of_queries`: first key and one past the last of each query's document."""
        return self._search(self._q, self._k, self.of_queries, self._problem.queries, self._problem.keys)

    def find_queries(self) -> Launch:
        """The launch that writes `of_keys`: first query and one past the last of each key's document."""
        return self._search(self._k, self._q, self.of_keys, self._problem.keys, self._problem.queries)

    def _search(self, of: Span, among: Span, bounds: Bounds, n: int, m: int) -> Launch:
        kernel = Kernel(compile_kernel(Source.of(DOCUMENTS)), "attn_documents")
        grid = (-(-n // 1024) * self._problem.batch, 1, 1)
        return kernel.prepare(grid, (1024, 1, 1), [of, among, *bounds, ctypes.c_int(n), ctypes.c_int(m)])

    def refusal(self, o: Tensor4, lse: Span) -> Launch:
        """The launch that follows the forward pass."""
        p = self._problem
        kernel = Kernel(compile_kernel(Source.of(DOCUMENTS)), "attn_refuse")
        strides = [ctypes.c_int64(x) for x in (o.batch_stride, o.row_stride, o.head_stride)]
        sizes = [ctypes.c_int(x) for x in (p.queries, p.keys, p.heads, p.head_dim)]
        return kernel.prepare((p.batch, 1, 1), (1024, 1, 1), [self._q, self._k, lse, ctypes.c_uint64(o.address), *strides, *sizes])


def _bounds(problem: AttentionProblem, docs: Documents | None) -> tuple[Bounds | None, Bounds | None]:
    """Of queries and of keys."""
    if problem.packed != (docs is not None):
        raise ShapeError("documents must be given exactly for packed problems", came=docs, expected=f"packed={problem.packed}")
    return (docs.of_queries, docs.of_keys) if docs else (None, None)


def _section(problem: AttentionProblem, choice: AttentionChoice, *, over_queries: bool) -> int:
    """Heads per section: query heads for forward and dq, kv heads for dkv."""
    group = problem.heads // problem.kv_heads
    if choice.section:
        return choice.section
    if over_queries:
        return max(1, L2_SHARE // (4 * group * problem.queries * problem.head_dim))
    return max(1, L2_SHARE // (4 * problem.keys * problem.head_dim)) * group


def _launch(source: str, name: str, choice: AttentionChoice, shared: int, warpgroups: int, tiles: int, arguments: list[Any]) -> Launch:
    cubin = compile_kernel(Source.of(source, dict(choice.defines)))
    kernel = Kernel(cubin, name, shared_bytes=shared)
    grid = min(tiles, choice.blocks or Device.open().properties.multiprocessors)
    return kernel.prepare((grid, 1, 1), (128 * (warpgroups + 1), 1, 1), arguments)


def _stages(table: Mapping[tuple[int, int, int], Any], pass_name: str, problem: AttentionProblem, tile: tuple[int, int]) -> Any:
    key = (problem.head_dim, *tile)
    if key not in table:
        raise ShapeError(f"no attention kernel {pass_name} of this tile", came=key, expected=sorted(table))
    return table[key]


class AttentionForward:
    """o and lse from q, k, v. Call it with a stream, for packed problems between `docs.find_keys` and `docs.refusal`."""

    def __init__(
        self,
        problem: AttentionProblem,
        q: Tensor4,
        k: Tensor4,
        v: Tensor4,
        o: Tensor4,
        lse: Span,
        queue: Span,
        *,
        docs: Documents | None = None,
        choice: AttentionChoice | None = None,
    ) -> None:
        self.problem, self.choice = problem, choice or choose(problem)
        groups, block = self.choice.forward
        stages = _stages(FORWARD_STAGES, "forward", problem, self.choice.forward)
        shared = 1024 + 2 * problem.columns * (128 * groups + 2 * stages * block) + 512
        tiles = -(-problem.queries // (64 * groups)) * problem.batch * problem.heads
        params = _params(problem, lse, queue, _section(problem, self.choice, over_queries=False), _bounds(problem, docs)[0])
        maps = [q.map(problem, 64, keys=False), k.map(problem, block, keys=True), v.map(problem, block, keys=True)]
        maps.append(o.map(problem, 64, keys=False))
        name = f"attn_fwd_d{problem.head_dim}_w{groups}_n{block}"
        self.launch = _launch(FORWARD, name, self.choice, shared, groups, tiles, [*maps, params])

    def __call__(self, stream: Any = None) -> None:
        """Enqueues the one launch."""
        self.launch(stream)


class AttentionBackward:
    """dq, dk, dv from what the forward pass read and wrote and from do. Call it with a stream; two launches, the second needs what the
    first leaves in `workspace`, `choice.workspace_bytes(problem)` bytes. For packed problems after `docs.find_keys` and
    `docs.find_queries`.

    `launches` by name: dq, dkv; or, in one pass, delta, one."""

    def __init__(
        self,
        problem: AttentionProblem,
        q: Tensor4,
        k: Tensor4,
        v: Tensor4,
        o: Tensor4,
        lse: Span,
        do: Tensor4,
        dq: Tensor4,
        dk: Tensor4,
        dv: Tensor4,
        workspace: Span,
        queue: Span,
        *,
        docs: Documents | None = None,
        choice: AttentionChoice | None = None,
    ) -> None:
        self.problem, self.choice = problem, choice or choose(problem)
        needed = self.choice.workspace_bytes(problem)
        if workspace.nbytes < needed:
            raise ShapeError("attention: workspace too small", came=workspace, expected=f"{needed} bytes")
        make = _one_pass_launches if self.choice.one else _two_pass_launches
        self.launches = make(problem, self.choice, (q, k, v, o, do), (dq, dk, dv), lse, workspace, queue, _bounds(problem, docs))

    def __call__(self, stream: Any = None) -> None:
        """Enqueues the two launches."""
        for launch in self.launches.values():
            launch(stream)


Five = tuple[Tensor4, Tensor4, Tensor4, Tensor4, Tensor4]
Three = tuple[Tensor4, Tensor4, Tensor4]


def _two_pass_launches(
    problem: AttentionProblem, choice: AttentionChoice, ins: Five, outs: Three, lse: Span, workspace: Span, queue: Span,
    bounds: tuple[Bounds | None, Bounds | None],
) -> dict[str, Launch]:  # fmt: skip
    (q, k, v, o, do), (dq, dk, dv), (of_queries, of_keys) = ins, outs, bounds
    dim, columns = problem.head_dim, problem.columns
    groups, block = choice.dq
    rows, k_stages, v_stages = _stages(DQ_STAGES, "dq", problem, choice.dq)
    shared = 1024 + 2 * columns * (rows * 128 * groups + (k_stages + v_stages) * block) + 512
    tiles = -(-problem.queries // (64 * groups)) * problem.batch * problem.heads
    params = _params(problem, lse, queue, _section(problem, choice, over_queries=False), of_queries, workspace)
    maps = [q.map(problem, 64, keys=False), k.map(problem, block, keys=True), v.map(problem, block, keys=True)]
    maps += [do.map(problem, 64, keys=False), dq.map(problem, 64, keys=False)]
    arguments = [*maps, ctypes.c_uint64(o.address), o.strides(), params]
    first = _launch(BACKWARD, f"attn_bwd_dq_d{dim}_w{groups}_n{block}", choice, shared, groups, tiles, arguments)

    groups, block = choice.dkv
    kv_stages, stages = _stages(DKV_STAGES, "dkv", problem, choice.dkv)
    shared = 1024 + 2 * columns * (kv_stages * 128 * groups + 2 * stages * block) + 8 * stages * block + 512
    tiles = -(-problem.keys // (64 * groups)) * problem.batch * problem.kv_heads
    params = _params(problem, lse, queue, _section(problem, choice, over_queries=True), of_keys, workspace)
    maps = [q.map(problem, block, keys=False), k.map(problem, 64, keys=True), v.map(problem, 64, keys=True)]
    maps += [do.map(problem, block, keys=False), dk.map(problem, 64, keys=True), dv.map(problem, 64, keys=True)]
    second = _launch(BACKWARD, f"attn_bwd_dkv_d{dim}_w{groups}_n{block}", choice, shared, groups, tiles, [*maps, params])
    return {"dq": first, "dkv": second}


def _one_pass_launches(
    problem: AttentionProblem, choice: AttentionChoice, ins: Five, outs: Three, lse: Span, workspace: Span, queue: Span,
    bounds: tuple[Bounds | None, Bounds | None],
) -> dict[str, Launch]:  # fmt: skip
    if problem.head_dim != 64 or problem.packed:
        raise ShapeError("the one-pass attention backward does not know this problem", came=problem, expected="head_dim 64, no documents")
    (q, k, v, o, do), (dq, dk, dv) = ins, outs
    place, blocks = places(problem, choice), -(-problem.queries // 64)
    partial = workspace.address + 2 * problem.statistics_bytes
    sums = _Sums(partial=partial, turn=partial + place.partial_bytes, ring=place.ring, mblocks=blocks)
    params = _params(problem, lse, queue, place.section, None, workspace)

    arguments: list[Any] = []
    for x in (o, do, dq):
        arguments += [ctypes.c_uint64(x.address), x.strides()]
    rows = problem.batch * blocks * 64 * problem.heads
    kernel = Kernel(compile_kernel(Source.of(ONE_PASS)), "attn_bwd_delta_d64")
    delta = kernel.prepare((-(-rows // 128), 1, 1), (256, 1, 1), [*arguments, params, sums])

    # K and V twice, 4 stages of Q and dO, 8 tiles of dS, 2 of dK, 1 of dQ; two floats per query and stage
    shared = 1024 + 2 * 64 * 64 * (8 + 8 + 8 + 2 + 1) + 8 * 4 * 64 + 512
    tiles = -(-problem.keys // 128) * problem.batch * problem.kv_heads
    maps = [q.map(problem, 64, keys=False), k.map(problem, 64, keys=True), v.map(problem, 64, keys=True), do.map(problem, 64, keys=False)]
    maps += [dq.map(problem, 64, keys=False), dk.map(problem, 64, keys=True), dv.map(problem, 64, keys=True)]
    return {"delta": delta, "one": _launch(ONE_PASS, "attn_bwd_one_d64", choice, shared, 3, tiles, [*maps, params, sums])}
