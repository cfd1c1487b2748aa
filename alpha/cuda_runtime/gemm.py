"""The GEMM of kernels/gemm: C[M,N] = epilogue(A[M,K] B[N,K]^T), bf16 in, fp32 accumulation, on Hopper.

`GemmProblem` says what is computed, `GemmConfig` how; `choose` picks a config, `prepare` builds the launches.

Shapes: M rows of C, N columns, K the reduction. Forward y = x W^T: A = x, B = W, both "k" major. Input gradient dx = dy W:
A = dy "k", B = W "n" (its rows are the reduction). Weight gradient dW = dy^T x: A = dy "m", B = x "n", fp32 output,
accumulated or not.

Envelope: M, N, K, batch >= 1; addresses 16-byte aligned; leading dimensions and batch strides in elements, multiples of 8
(bf16) or 4 (fp32 output). Ragged M, N and K need nothing else. What lies between a row's end and its leading dimension is
never read into a result. In C and aux the copy engine writes whole 16 bytes: up to 7 (bf16) or 3 (fp32) elements after a
ragged row's end receive zeros (are left as they are by "f32+=" and by splits), so C may be a column slice of a wider matrix
only when N is a multiple of 8 (4).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any, Literal

from alpha.cuda_runtime.compile import Cubin, Source, compile_all
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.launch import Kernel, Launch
from alpha.cuda_runtime.tensormap import TensorMap
from alpha.errors import ShapeError

BLOCK_K = 64
CHUNK_BYTES = 64 * 128
THREADS = 384
SHARED_LIMIT = 232_448

Output = Literal["bf16", "f32", "f32+="]
Activation = Literal["none", "gelu", "swiglu"]
AuxInput = Literal["none", "residual", "gelu_gradient"]


@dataclass(frozen=True, kw_only=True)
class GemmProblem:
    """What is computed. Leading dimensions and batch strides in elements; 0 means dense.

    `a_major` "k": A is [M, K] in memory; "m": [K, M]. `b_major` "k": B is [N, K]; "n": [K, N].
    `out` "f32+=" adds to C. `bias`: bf16 [N], added before the activation. `activation` "swiglu": B holds gate then up,
    [2N, K]; C = silu(A gate^T) * (A up^T). `save_pre`: aux receives what enters the activation, bf16 [M, N] ([M, 2N] for
    swiglu).
    `aux_input` "residual": adds aux [M, N]; "gelu_gradient": multiplies by GELU'(aux).
    """

    m: int
    n: int
    k: int
    batch: int = 1
    a_major: Literal["k", "m"] = "k"
    b_major: Literal["k", "n"] = "k"
    lda: int = 0
    ldb: int = 0
    ldc: int = 0
    ldaux: int = 0
    a_stride: int = 0
    b_stride: int = 0
    c_stride: int = 0
    aux_stride: int = 0
    out: Output = "bf16"
    bias: bool = False
    activation: Activation = "none"
    save_pre: bool = False
    aux_input: AuxInput = "none"

    def __str__(self) -> str:
        words = [f"{self.m}x{self.n}x{self.k}", f"{'T' if self.a_major == 'm' else 'N'}{'N' if self.b_major == 'n' else 'T'}"]
        words += [f"x{self.batch}"] if self.batch > 1 else []
        words += [self.out] + (["bias"] if self.bias else []) + ([self.activation] if self.activation != "none" else [])
        words += (["save_pre"] if self.save_pre else []) + ([self.aux_input] if self.aux_input != "none" else [])
        return " ".join(words)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.m * self.n * self.k * self.batch * (2 if self.activation == "swiglu" else 1)

    def dense(self) -> GemmProblem:
        """The same problem with every stride filled in."""
        pair = 2 if self.activation == "swiglu" else 1
        lda = self.lda or (self.k if self.a_major == "k" else self.m)
        ldb = self.ldb or (self.k if self.b_major == "k" else self.n)
        ldc = self.ldc or self.n
        ldaux = self.ldaux or self.n * (pair if self.save_pre else 1)
        return replace(
            self,
            lda=lda,
            ldb=ldb,
            ldc=ldc,
            ldaux=ldaux,
            a_stride=self.a_stride or lda * (self.m if self.a_major == "k" else self.k),
            b_stride=self.b_stride or ldb * (self.n * pair if self.b_major == "k" else self.k),
            c_stride=self.c_stride or ldc * self.m,
            aux_stride=self.aux_stride or ldaux * self.m,
        )

    def check(self) -> None:
        """ShapeError naming the limit of the envelope that this problem breaks."""
        p = self.dense()
        of_c = 8 if p.out == "bf16" else 4
        swiglu, aux = p.activation == "swiglu", p.save_pre or p.aux_input != "none"
        rules = [
            (min(p.m, p.n, p.k, p.batch) >= 1, f"{p.m}x{p.n}x{p.k}, batch {p.batch}", "sizes of at least 1"),
            (max(p.m, p.n, p.k) < 2**31, f"{p.m}x{p.n}x{p.k}", "sizes below 2^31"),
            (
                p.lda % 8 == 0 and p.ldb % 8 == 0,
                f"lda {p.lda}, ldb {p.ldb}",
                "leading dimensions that are multiples of 8 elements",
            ),
            (p.ldc % of_c == 0, f"ldc {p.ldc}", f"a multiple of {of_c} elements for {p.out} output"),
            (
                p.a_stride % 8 == 0 and p.b_stride % 8 == 0 and p.c_stride % of_c == 0,
                "batch strides",
                "multiples of 8 elements",
            ),
            (p.lda >= (p.k if p.a_major == "k" else p.m), f"lda {p.lda}", "at least the row length of A"),
            (p.ldb >= (p.k if p.b_major == "k" else p.n), f"ldb {p.ldb}", "at least the row length of B"),
            (p.ldc >= p.n, f"ldc {p.ldc}", f"at least N = {p.n}"),
            (not aux or (p.ldaux % 8 == 0 and p.ldaux >= p.n), f"ldaux {p.ldaux}", "a multiple of 8, at least N"),
            (not swiglu or p.batch == 1, f"swiglu with batch {p.batch}", "batch 1"),
            (not swiglu or (p.b_major == "k" and p.out == "bf16"), "swiglu", "K-major weights and bf16 output"),
            (not swiglu or not p.bias, "swiglu with bias", "no bias"),
            (not swiglu or p.n % 8 == 0, f"swiglu with N = {p.n}", "N a multiple of 8"),
            (p.aux_input == "none" or not p.save_pre, "aux both read and written", "one of save_pre and aux_input"),
            (p.aux_input == "none" or not swiglu, f"swiglu with {p.aux_input}", "no aux input"),
            (
                not (p.activation != "none" or aux) or p.out == "bf16",
                f"{p.out} output with an activation or aux",
                "bf16 output",
            ),
            (not p.save_pre or p.activation != "none", "save_pre without an activation", "an activation"),
        ]
        for good, came, expected in rules:
            if not good:
                raise ShapeError(f"gemm.bf16.sm90 does not cover {self}", came=came, expected=expected)


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """How it is computed. The bits of the result depend on it only where tiles are split along K, and never on `blocks`.

    `bm`, `bn`: tile. `stages`: operand ring. `staging`: 8 KB output buffers per consumer warpgroup. `cluster`: 2 shares B
    between two tiles. `pingpong`: one tile per consumer warpgroup. `group`, `along_n`: walk over tiles. `split_units` runs
    over the first `split_tiles` tiles (both 0: none). `blocks`: most CTAs (0: one per multiprocessor).
    """

    bm: int = 128
    bn: int = 256
    stages: int = 4
    staging: int = 2
    cluster: int = 2
    pingpong: bool = False
    group: int = 8
    along_n: bool = False
    split_tiles: int = 0
    split_units: int = 0
    blocks: int = 0

    def __str__(self) -> str:
        text = f"{self.bm}x{self.bn}x{BLOCK_K} s{self.stages}/{self.staging} c{self.cluster}"
        text += " pingpong" if self.pingpong else ""
        text += f" group {self.group}{'n' if self.along_n else 'm'}"
        return text + (f" split {self.split_tiles} tiles into {self.split_units}" if self.split_units else "")

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA, in bytes."""
        ring = self.stages * (self.bm + self.bn) * BLOCK_K * 2
        return 1024 + ring + 2 * self.staging * CHUNK_BYTES + 8 * (2 * self.stages + 2 * self.staging)

    def tiles(self, problem: GemmProblem) -> tuple[int, int, int]:
        """Tiles along M (a cluster counts once), along N, and in all."""
        columns = self.bn // 2 if problem.activation == "swiglu" else self.bn
        tiles_m, tiles_n = -(-problem.m // (self.bm * self.cluster)), -(-problem.n // columns)
        return tiles_m, tiles_n, tiles_m * tiles_n * problem.batch

    def sources(self, problem: GemmProblem) -> list[Source]:
        """What to compile: the GEMM, and the reduction if tiles are split."""
        out = {"bf16": 0, "f32": 1, "f32+=": 2}[problem.out]
        tile = {"GEMM_BM": self.bm, "GEMM_BN": self.bn, "GEMM_CLUSTER": self.cluster, "GEMM_OUT": out}
        gemm = Source.of(
            "gemm/gemm.cu",
            {
                **tile,
                "GEMM_STAGES": self.stages,
                "GEMM_STAGING": self.staging,
                "GEMM_PINGPONG": int(self.pingpong),
                "GEMM_A_MN": int(problem.a_major == "m"),
                "GEMM_B_MN": int(problem.b_major == "n"),
                "GEMM_BIAS": int(problem.bias),
                "GEMM_ACT": {"none": 0, "gelu": 1, "swiglu": 2}[problem.activation],
                "GEMM_SAVE_PRE": int(problem.save_pre),
                "GEMM_AUX_IN": {"none": 0, "residual": 1, "gelu_gradient": 2}[problem.aux_input],
                "GEMM_SPLIT": int(self.split_units > 0),
            },
        )
        return [gemm, Source.of("gemm/split_reduce.cu", tile)] if self.split_units else [gemm]

    def workspace_bytes(self) -> int:
        """Device memory for the partial sums of split tiles (0 without)."""
        return (self.split_units + self.split_tiles) * self.cluster * self.bm * self.bn * 4 if self.split_units else 0

    def check(self, problem: GemmProblem) -> None:
        """ShapeError naming what of this config does not fit the problem or the chip."""
        tiles = self.tiles(problem)[2]
        steps = -(-problem.k // BLOCK_K)
        plain = not problem.bias and problem.activation == "none" and problem.aux_input == "none"
        rules = [
            (self.shared_bytes <= SHARED_LIMIT, f"{self.shared_bytes} bytes of shared memory", f"at most {SHARED_LIMIT}"),
            (self.cluster in (1, 2), f"cluster {self.cluster}", "1 or 2"),
            (self.split_tiles <= tiles, f"{self.split_tiles} split tiles", f"at most {tiles}"),
            (
                not self.split_units or self.split_units >= self.split_tiles >= 1,
                f"{self.split_units} runs",
                "at least one per tile",
            ),
            (self.split_units <= max(self.split_tiles, 1) * steps, f"{self.split_units} runs", "at least one k step per run"),
            (not self.split_units or plain, "split tiles with an epilogue", "a plain output"),
            (tiles + self.split_units < 2**31, f"{tiles} tiles", "fewer than 2^31"),
        ]
        for good, came, expected in rules:
            if not good:
                raise ShapeError(f"config {self} does not fit {problem}", came=came, expected=expected)


PINGPONG = GemmConfig(bm=128, bn=128, stages=6, pingpong=True)
COOPERATIVE = GemmConfig()
SMALL = GemmConfig(bm=128, bn=128, stages=6)
BUSY = GemmConfig(bm=128, bn=128, stages=5, staging=4, pingpong=True)  # for epilogues with much to compute or to write

# Where another walk or cluster was at least 2 % faster than the rule of `choose`: (M, N, K, a_major, b_major). Measured on an
# H200 beside cuBLAS; docs/log/kernels-gemm.md has the figures.
TUNED: dict[tuple[int, int, int, str, str], GemmConfig] = {
    (16384, 768, 768, "k", "n"): replace(PINGPONG, cluster=1),
    (16384, 3072, 768, "k", "k"): replace(PINGPONG, group=4),
    (16384, 2048, 2048, "k", "k"): replace(PINGPONG, group=4),
    (16384, 2048, 2048, "k", "n"): replace(PINGPONG, group=4),
    (8192, 4096, 4096, "k", "n"): replace(PINGPONG, group=4),
}


def compiled(problem: GemmProblem) -> tuple[GemmConfig, ...]:
    """What `choose` picks among for problems of this kind (transposition, output, epilogue), as far as compilation is concerned: walks and
    the number of splits vary."""
    plain = not problem.bias and problem.activation == "none" and problem.aux_input == "none"
    busy = problem.save_pre or problem.activation == "gelu" or problem.aux_input == "gelu_gradient"
    found = [BUSY] if busy else [PINGPONG, COOPERATIVE]
    if plain:
        found += [replace(c, split_tiles=1, split_units=2) for c in (COOPERATIVE, SMALL)]
        found += [c for (*_, a, b), c in TUNED.items() if (a, b) == (problem.a_major, problem.b_major)]
    return tuple(found)


def choose(problem: GemmProblem, *, multiprocessors: int = 132) -> GemmConfig:
    """The config for a problem: the tuned one, or by rule.

    Ping-pong (with more output buffers for busy epilogues) unless (a) K is long or a side is very wide: 128x256 tiles, which
    read less through L2; or (b) the last wave of tiles would leave over a tenth of the chip idle: its tiles are split along
    K, into runs of at least 8 steps. Only plain epilogues can split.
    `multiprocessors` is part of the choice (it decides the split, hence the bits), so a run fixes it: it is not the budget of
    a launch, which is `GemmConfig.blocks`.
    """
    key = (problem.m, problem.n, problem.k, problem.a_major, problem.b_major)
    plain = not problem.bias and problem.activation == "none" and problem.aux_input == "none"
    if plain and problem.batch == 1 and key in TUNED:
        return TUNED[key]
    steps = -(-problem.k // BLOCK_K)
    clusters = multiprocessors // 2
    long = steps > 512 or max(problem.m, problem.n) > 65536
    busy = problem.save_pre or problem.activation == "gelu" or problem.aux_input == "gelu_gradient"
    base = BUSY if busy else COOPERATIVE if long else PINGPONG
    tiles = base.tiles(problem)[2]
    fill = tiles / (-(-tiles // clusters) * clusters)
    if plain and (steps >= 128 if long else steps >= 64 and fill < 0.9):
        base = SMALL if COOPERATIVE.tiles(problem)[2] * 6 < clusters else COOPERATIVE
        rest = base.tiles(problem)[2] % clusters
        if rest:
            return replace(base, split_tiles=rest, split_units=max(rest, min(clusters, rest * steps // 8)))
    return base


class _Problem(ctypes.Structure):
    """`struct Problem` of kernels/gemm/raster.cuh."""

    _fields_ = (
        [(name, ctypes.c_int32) for name in ("m", "n", "k_steps", "tiles_m", "tiles_n", "tiles", "group", "along_n")]
        + [(name, ctypes.c_int32) for name in ("split_tiles", "split_units")]
        + [("bias", ctypes.c_uint64), ("workspace", ctypes.c_uint64)]
    )


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """Prepared launches of one GEMM on fixed addresses; call it with a stream."""

    problem: GemmProblem
    config: GemmConfig
    cubins: tuple[Cubin, ...]
    launches: tuple[Launch, ...]

    def __call__(self, stream: Any = None) -> None:
        for launch in self.launches:
            launch(stream)

    def __str__(self) -> str:
        return f"gemm {self.problem} [{self.config}]"


def prepare(
    problem: GemmProblem,
    config: GemmConfig,
    *,
    a: int,
    b: int,
    c: int,
    aux: int = 0,
    bias: int = 0,
    workspace: int = 0,
) -> Gemm:
    """Launches of `problem` with `config` on device addresses. `workspace`: config.workspace_bytes() bytes, 16-byte aligned.

    ShapeError outside the envelope or when an address that the problem needs is missing.
    """
    problem.check()
    config.check(problem)
    p = problem.dense()
    needed = {"a": a, "b": b, "c": c}
    if p.save_pre or p.aux_input != "none":
        needed["aux"] = aux
    if p.bias:
        needed["bias"] = bias
    if config.split_units:
        needed["workspace"] = workspace
    for name, address in needed.items():
        if address <= 0 or address % 16:
            raise ShapeError(f"gemm {problem}: address of {name}", came=hex(address), expected="a device address, 16-byte aligned")

    swiglu = p.activation == "swiglu"
    bn_box = config.bn // 2 if swiglu or config.cluster == 2 else config.bn
    if p.a_major == "k":
        map_a = TensorMap("bf16", a, (p.k, p.m, p.batch), (p.lda * 2, p.a_stride * 2), (BLOCK_K, config.bm, 1))
    else:
        map_a = TensorMap("bf16", a, (p.m, p.k, p.batch), (p.lda * 2, p.a_stride * 2), (64, BLOCK_K, 1))
    if p.b_major == "k":
        outer, stride = (2, p.n * p.ldb) if swiglu else (p.batch, p.b_stride)
        map_b = TensorMap("bf16", b, (p.k, p.n, outer), (p.ldb * 2, stride * 2), (BLOCK_K, bn_box, 1))
    else:
        map_b = TensorMap("bf16", b, (p.n, p.k, p.batch), (p.ldb * 2, p.b_stride * 2), (64, BLOCK_K // config.cluster, 1))
    size, chunk = (2, 64) if p.out == "bf16" else (4, 32)
    dtype = "bf16" if p.out == "bf16" else "f32"
    map_c = TensorMap(dtype, c, (p.n, p.m, p.batch), (p.ldc * size, p.c_stride * size), (chunk, 64, 1))
    map_aux = map_c
    if "aux" in needed:
        outer, stride = (2, p.n) if swiglu else (p.batch, p.aux_stride)
        map_aux = TensorMap("bf16", aux, (p.n, p.m, outer), (p.ldaux * 2, stride * 2), (64, 64, 1))

    tiles_m, tiles_n, tiles = config.tiles(p)
    units = tiles - config.split_tiles + config.split_units
    arguments = _Problem(
        m=p.m,
        n=p.n,
        k_steps=-(-p.k // BLOCK_K),
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        tiles=tiles,
        group=config.group,
        along_n=int(config.along_n),
        split_tiles=config.split_tiles,
        split_units=config.split_units,
        bias=bias,
        workspace=workspace,
    )
    blocks = config.blocks or Device.open().properties.multiprocessors
    clusters = max(1, min(units, blocks // config.cluster))
    cubins = compile_all(config.sources(p))
    gemm = Kernel(cubins[0], "gemm", shared_bytes=config.shared_bytes)
    launches = [gemm.prepare((clusters * config.cluster, 1, 1), (THREADS, 1, 1), [map_a, map_b, map_c, map_aux, arguments])]
    if config.split_units:
        reduce = Kernel(cubins[1], "split_reduce")
        grid = (config.bm * config.bn // 1024, config.split_tiles * config.cluster, 1)
        output = [ctypes.c_uint64(c), ctypes.c_int64(p.ldc), ctypes.c_int64(p.c_stride)]
        launches.append(reduce.prepare(grid, (256, 1, 1), [arguments, *output], overlap_previous=True))
    return Gemm(problem=problem, config=config, cubins=tuple(cubins), launches=tuple(launches))
