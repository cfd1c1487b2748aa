"""The GEMM of kernels/gemm: C[M,N] = epilogue(A[M,K] B[N,K]^T), bf16 in, fp32 accumulation, on Hopper.

`GemmProblem` says what is computed, `GemmConfig` how; `choose` picks a config, `prepare` builds the launches.

Shapes: M rows of C, N columns, K the reduction. Forward y = x W^T: A = x, B = W, both "k" major. Input gradient dx = dy W:
A = dy "k", B = W "n" (its rows are the reduction). Weight gradient dW = dy^T x: A = dy "m", B = x "n", fp32 output,
accumulated or not.

Envelope: M, N, K, batch >= 1; addresses 16-byte aligned; leading dimensions in elements, multiples of 8 (bf16) or 4 (fp32
output); batches lie one behind the other. Ragged M, N and K need nothing else. What lies between a row's end and its leading
dimension is never read into a result. In C and aux the copy engine writes whole 16 bytes: up to 7 (bf16) or 3 (fp32) elements
after a ragged row's end receive zeros (are left as they are by "f32+=", and by the second kernel of splits).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any, Literal

from alpha.cuda_runtime.compile import Source, compile_all
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.launch import Kernel, Launch
from alpha.cuda_runtime.tensormap import TensorMap
from alpha.errors import ShapeError
from alpha.graph.plan import MULTIPROCESSORS

BLOCK_K = 64
CHUNK_BYTES = 64 * 128
THREADS = 384
SHARED_LIMIT = 232_448
CLUSTERS = MULTIPROCESSORS // 2

Output = Literal["bf16", "f32", "f32+="]
Activation = Literal["none", "gelu", "swiglu"]
AuxInput = Literal["none", "gelu_gradient"]
Rows = Literal["none", "blend", "powers"]


@dataclass(frozen=True, kw_only=True)
class GemmProblem:
    """What is computed. `lda` and `ldc`: elements from one row of A, and of C, to the next; 0 means dense, as B and aux are.

    `a_major` "k": A is [M, K] in memory; "m": [K, M]. `b_major` "k": B is [N, K]; "n": [K, N].
    `out` "f32+=" adds to C. `bias`: bf16 [N], added before the activation. `activation` "swiglu": B holds gate then up,
    [2N, K]; C = silu(A gate^T) * (A up^T). `save_pre`: aux receives what enters the activation, bf16 [M, N] ([M, 2N] for
    swiglu).
    `aux_input` "gelu_gradient": multiplies by GELU'(aux), aux [M, N].
    `rows` "blend": row i of C is rows[i] times the product's, plus factors[i] table[picks[i]]. "powers": its elements x become
    e^(x - rows[i]), 0 where rows[i] is inf; their sums over each tile's columns go to sums, fp32 [tiles along N, M].
    """

    m: int
    n: int
    k: int
    batch: int = 1
    a_major: Literal["k", "m"] = "k"
    b_major: Literal["k", "n"] = "k"
    lda: int = 0
    ldc: int = 0
    out: Output = "bf16"
    bias: bool = False
    activation: Activation = "none"
    save_pre: bool = False
    aux_input: AuxInput = "none"
    rows: Rows = "none"

    def __str__(self) -> str:
        words = [f"{self.m}x{self.n}x{self.k}", f"{'T' if self.a_major == 'm' else 'N'}{'N' if self.b_major == 'n' else 'T'}"]
        words += [f"x{self.batch}"] if self.batch > 1 else []
        words += [self.out] + (["bias"] if self.bias else []) + ([self.activation] if self.activation != "none" else [])
        words += (["save_pre"] if self.save_pre else []) + ([self.aux_input] if self.aux_input != "none" else [])
        words += [f"rows {self.rows}"] if self.rows != "none" else []
        return " ".join(words)

    @property
    def plain(self) -> bool:
        """Whether nothing is done to the product but to round it: only then can a second kernel add tiles that are split along K."""
        return not self.bias and not self.computes and self.rows == "none"

    @property
    def splits(self) -> bool:
        """Whether tiles can be split along K."""
        return self.plain or self.rows == "blend"

    @property
    def computes(self) -> bool:
        """Whether the epilogue does more than to add a bias and to round."""
        return self.activation != "none" or self.aux_input != "none"

    @property
    def busy(self) -> bool:
        """Whether the epilogue has much to compute or to write."""
        return self.save_pre or self.activation == "gelu" or self.aux_input == "gelu_gradient"

    @property
    def row_a(self) -> int:
        """Elements from one row of A in memory to the next."""
        return self.lda or (self.k if self.a_major == "k" else self.m)

    @property
    def row_b(self) -> int:
        """Elements from one row of B in memory to the next."""
        return self.k if self.b_major == "k" else self.n

    @property
    def row_c(self) -> int:
        """Elements from one row of C to the next."""
        return self.ldc or self.n

    @property
    def row_aux(self) -> int:
        """Elements from one row of aux to the next."""
        return self.n * (2 if self.activation == "swiglu" and self.save_pre else 1)

    def check(self) -> None:
        """ShapeError naming the limit of the envelope that this problem breaks."""
        p = self
        of_c = 8 if p.out == "bf16" else 4
        swiglu, aux = p.activation == "swiglu", p.save_pre or p.aux_input != "none"
        rules = [
            (min(p.m, p.n, p.k, p.batch) >= 1, f"{p.m}x{p.n}x{p.k}, batch {p.batch}", "sizes of at least 1"),
            (max(p.m, p.n, p.k) < 2**31, f"{p.m}x{p.n}x{p.k}", "sizes below 2^31"),
            (p.row_a % 8 == 0 and p.row_b % 8 == 0, f"rows of {p.row_a} and {p.row_b}", "rows of A and B that are multiples of 8 elements"),
            (p.row_c % of_c == 0, f"ldc {p.row_c}", f"a multiple of {of_c} elements for {p.out} output"),
            (p.row_a >= (p.k if p.a_major == "k" else p.m), f"lda {p.row_a}", "at least the row length of A"),
            (p.row_c >= p.n, f"ldc {p.row_c}", f"at least N = {p.n}"),
            (not aux or p.row_aux % 8 == 0, f"rows of {p.row_aux} in aux", "a multiple of 8"),
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
            (
                p.rows == "none" or (p.out == "bf16" and p.batch == 1 and not p.bias and p.activation == "none" and not aux),
                f"{p.out} output, batch {p.batch}, with rows {p.rows}",
                "bf16 output, batch 1 and a product to which nothing else is done",
            ),
            (p.rows != "blend" or p.n % 8 == 0, f"N = {p.n} with rows {p.rows}", "a multiple of 8, as rows of the table are aligned"),
        ]
        for good, came, expected in rules:
            if not good:
                raise ShapeError(f"gemm.bf16.sm90 does not cover {self}", came=came, expected=expected)


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """How it is computed. The bits of the result depend on it only where tiles are split along K, and never on `blocks`.

    `bm`, `bn`: tile. `stages`: operand ring. `staging`: 8 KB output buffers per consumer warpgroup. `cluster`: 2 shares B
    between two tiles. `pingpong`: one tile per consumer warpgroup. `defer`: a tile is written under the products of the next one.
    `ahead`: tiles are drawn while the kernel runs, that many steps before the loads of one end (0: dealt out beforehand).
    `group`, `along_n`: walk over tiles. `split_units` runs over the first `split_tiles` tiles (both 0: none). `owned`: whose run ends a
    tile adds the parts of the others, so a second kernel is not needed. `blocks`: most CTAs (0: one per multiprocessor).
    """

    bm: int = 128
    bn: int = 256
    stages: int = 4
    staging: int = 2
    cluster: int = 2
    pingpong: bool = False
    defer: bool = False
    ahead: int = 0
    group: int = 8
    along_n: bool = False
    split_tiles: int = 0
    split_units: int = 0
    owned: bool = False
    blocks: int = 0

    def __str__(self) -> str:
        text = f"{self.bm}x{self.bn}x{BLOCK_K} s{self.stages}/{self.staging} c{self.cluster}"
        text += " pingpong" if self.pingpong else " deferred" if self.defer else ""
        text += f" group {self.group}{'n' if self.along_n else 'm'}"
        text += f" split {self.split_tiles} tiles into {self.split_units}" if self.split_units else ""
        return text + (", owned" if self.owned else "")

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA, in bytes."""
        ring = self.stages * (self.bm + self.bn) * BLOCK_K * 2
        tickets = 24 * (self.stages + 3) + 8 if self.ahead else 0
        return 1024 + ring + 2 * self.staging * CHUNK_BYTES + 8 * (2 * self.stages + 2 * self.staging) + tickets

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
                "GEMM_AUX_IN": {"none": 0, "gelu_gradient": 1}[problem.aux_input],
                "GEMM_ROWS": {"none": 0, "blend": 1, "powers": 2}[problem.rows],
                "GEMM_SPLIT": (2 if self.owned else 1) if self.split_units else 0,
                "GEMM_DEFER": int(self.defer),
                "GEMM_AHEAD": self.ahead,
            },
        )
        return [gemm, Source.of("gemm/split_reduce.cu", tile)] if self.split_units and not self.owned else [gemm]

    def workspace_bytes(self) -> int:
        """Device memory for the partial sums of split tiles (0 without)."""
        parts = self.split_units + (0 if self.owned else self.split_tiles)
        return parts * self.cluster * self.bm * self.bn * 4 if self.split_units else 0

    def sums_bytes(self, problem: GemmProblem) -> int:
        """Device memory for the sums of powers (0 without)."""
        return 4 * self.tiles(problem)[1] * problem.m if problem.rows == "powers" else 0

    def counter_bytes(self) -> int:
        """Device memory for what CTAs count together (0 where all is dealt out): draws, and the parts of each owned tile."""
        return 4 * (1 + (self.split_tiles * self.cluster if self.owned else 0)) if self.ahead else 0

    def check(self, problem: GemmProblem) -> None:
        """ShapeError naming what of this config does not fit the problem or the chip."""
        tiles = self.tiles(problem)[2]
        steps = -(-problem.k // BLOCK_K)
        rules = [
            (self.shared_bytes <= SHARED_LIMIT, f"{self.shared_bytes} bytes of shared memory", f"at most {SHARED_LIMIT}"),
            (self.cluster in (1, 2), f"cluster {self.cluster}", "1 or 2"),
            (self.ahead >= 0, f"{self.ahead} steps ahead", "0 or more"),
            (self.split_tiles <= tiles, f"{self.split_tiles} split tiles", f"at most {tiles}"),
            (
                not self.split_units or self.split_units >= self.split_tiles >= 1,
                f"{self.split_units} runs",
                "at least one per tile",
            ),
            (self.split_units <= max(self.split_tiles, 1) * steps, f"{self.split_units} runs", "at least one k step per run"),
            (not self.split_units or problem.plain or (self.owned and problem.splits), "split tiles with an epilogue", "a plain output"),
            (problem.rows != "powers" or self.defer, f"{self} with powers", "deferred tiles"),
            (not self.split_units or self.owned == (self.ahead > 0), f"{self.ahead} steps ahead", "owned runs drawn, others dealt out"),
            (not self.owned or (self.split_units > 0 and not self.pingpong), "owned tiles", "split ones, without ping-pong"),
            (self.split_tiles * steps * self.split_units < 2**31, f"{self.split_units} runs of {steps} steps", "32 bits to count"),
            (not self.defer or (problem.out == "bf16" and not problem.computes), "a deferred tile", "bf16, at most with a bias"),
            (not self.defer or not (self.pingpong or self.split_units), "a deferred tile", "no ping-pong and no split"),
            (tiles + self.split_units < 2**31, f"{tiles} tiles", "fewer than 2^31"),
        ]
        for good, came, expected in rules:
            if not good:
                raise ShapeError(f"config {self} does not fit {problem}", came=came, expected=expected)


# Which forms draw their tiles, and how many steps ahead; 0: tiles are dealt out. A step of 128x256 takes some 0.8 us, one of 128x128 half
# of that; a ticket is some 2 us on its way. Split tiles are drawn where their owners wait for others (parts.cuh); where a second kernel
# adds them there is nothing to draw for: they are few, and each cluster has its share.
AHEAD = {"deferred": 4, "cooperative": 4, "pingpong": 8, "small": 8, "busy": 8, "split": 0}

PINGPONG = GemmConfig(bm=128, bn=128, stages=6, pingpong=True, ahead=AHEAD["pingpong"])
COOPERATIVE = GemmConfig(ahead=AHEAD["cooperative"])
DEFERRED = GemmConfig(defer=True, ahead=AHEAD["deferred"])
SMALL = GemmConfig(bm=128, bn=128, stages=6, ahead=AHEAD["small"])
BUSY = GemmConfig(bm=128, bn=128, stages=5, staging=4, pingpong=True, ahead=AHEAD["busy"])  # for epilogues with much to compute or to write


def compiled(problem: GemmProblem) -> tuple[GemmConfig, ...]:
    """What `choose` picks among for problems of this kind (transposition, output, epilogue), as far as compilation is concerned: walks and
    the number of splits vary."""
    if problem.busy:
        return (BUSY,)
    if problem.rows == "powers":
        return (DEFERRED,)
    found = [PINGPONG] if problem.computes else [PINGPONG, _wide(problem)]
    if problem.splits:
        found += [_split(problem, c, 1, units) for c in (COOPERATIVE, SMALL) for units in ((2, 64) if problem.plain else (2,))]
    return tuple(found)


def choose(problem: GemmProblem, blocks: int = 0) -> GemmConfig:
    """The config for a problem, by rule.

    Tiles of 128x256 move fewer bytes than those of 128x128, so they need fewer joules, and a GPU in steady state has no more to give. They
    are taken (a) for bf16 from 8 steps of K on, written under the products of the next tile, where they need at most 1.12 times the waves
    of ping-pong's, (b) for fp32, whose tiles cannot wait in registers, from 96 steps on and 1.05 times the waves. All else is ping-pong,
    with more output buffers for busy epilogues. From 64 steps on a last wave of tiles that would leave over a tenth of the chip idle is
    split along K, into runs of at least 8 steps. Only plain and blended products can split. Powers are always
    deferred. MULTIPROCESSORS decides the split, hence the bits; it is not the budget of a launch, which is `blocks`.
    """
    return replace(_chosen(problem), blocks=blocks)


def _split(problem: GemmProblem, base: GemmConfig, tiles: int, units: int) -> GemmConfig:
    """`base` with its first `tiles` tiles cut into `units` runs. An owner reads the parts of its tile alone, 128 KB each of 128x256, so
    from six of them on a kernel of many CTAs is faster. That kernel knows plain products alone."""
    owned = units * base.bn <= 1280 * tiles or not problem.plain
    return replace(base, ahead=base.ahead if owned else AHEAD["split"], split_tiles=tiles, split_units=units, owned=owned)


def _wide(problem: GemmProblem) -> GemmConfig:
    return DEFERRED if problem.out == "bf16" else COOPERATIVE


def _chosen(problem: GemmProblem) -> GemmConfig:
    if problem.busy:
        return BUSY
    if problem.rows == "powers":
        return DEFERRED
    steps = -(-problem.k // BLOCK_K)
    if problem.splits and steps >= 64:
        base = SMALL if COOPERATIVE.tiles(problem)[2] * 6 < CLUSTERS else COOPERATIVE
        waves, rest = divmod(base.tiles(problem)[2], CLUSTERS)
        counted = rest * steps * CLUSTERS < 2**31  # runs are counted in 32 bits
        if counted and rest and waves + rest / CLUSTERS < 0.9 * (waves + 1):
            return _split(problem, base, rest, max(rest, min(CLUSTERS, rest * steps // 8)))
    wide = _wide(problem)
    waves, least = (1.12, 8) if wide.defer else (1.05, 96)  # type: ignore[assignment]  # no longer a whole number
    fits = not problem.computes and 2 * _waves(wide, problem) <= waves * _waves(PINGPONG, problem)
    return wide if fits and steps >= least else PINGPONG


def _waves(config: GemmConfig, problem: GemmProblem) -> int:
    return -(-config.tiles(problem)[2] // CLUSTERS)


class _Problem(ctypes.Structure):
    """`struct Problem` of kernels/gemm/raster.cuh."""

    _fields_ = (
        [(name, ctypes.c_int32) for name in ("m", "n", "k_steps", "tiles_m", "tiles_n", "tiles", "group", "along_n")]
        + [(name, ctypes.c_int32) for name in ("split_tiles", "split_units")]
        + [(name, ctypes.c_uint64) for name in ("bias", "workspace", "counter", "rows", "sums", "factors", "picks", "table")]
    )


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """Prepared launches of one GEMM on fixed addresses; call it with a stream."""

    problem: GemmProblem
    config: GemmConfig
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
    counter: int = 0,
    rows: int = 0,
    sums: int = 0,
    factors: int = 0,
    picks: int = 0,
    table: int = 0,
) -> Gemm:
    """Launches of `problem` with `config` on device addresses. `workspace`: config.workspace_bytes() bytes, 16-byte aligned.
    `counter`, where tiles are drawn: config.counter_bytes() bytes that are 0 and that nothing else writes; they are 0 again when the
    launch has ended. GemmProblem.rows: `rows` and `factors` fp32 [M], `picks` i32 [M], `table` bf16 [any, N] (no pick is
    looked at where the factor is 0), `sums` config.sums_bytes(problem) bytes.

    ShapeError outside the envelope or when an address that the problem needs is missing.
    """
    problem.check()
    config.check(problem)
    p = problem
    needed = {"a": a, "b": b, "c": c}
    if p.save_pre or p.aux_input != "none":
        needed["aux"] = aux
    if p.bias:
        needed["bias"] = bias
    if p.rows == "blend":
        needed["table"] = table
    if config.split_units:
        needed["workspace"] = workspace
    if config.ahead:
        needed["counter"] = counter
    for name, address in needed.items():
        if address <= 0 or address % 16:
            raise ShapeError(f"gemm {problem}: address of {name}", came=hex(address), expected="a device address, 16-byte aligned")
    single = {"none": {}, "powers": {"rows": rows, "sums": sums}, "blend": {"rows": rows, "factors": factors, "picks": picks}}[p.rows]
    for name, address in single.items():
        if address <= 0 or address % 4:
            raise ShapeError(f"gemm {problem}: address of {name}", came=hex(address), expected="a device address, 4-byte aligned")

    swiglu = p.activation == "swiglu"
    bn_box = config.bn // 2 if swiglu or config.cluster == 2 else config.bn
    a_bytes, b_bytes = 2 * p.row_a * (p.m if p.a_major == "k" else p.k), 2 * p.row_b * (p.n if p.b_major == "k" else p.k)  # of a batch
    if p.a_major == "k":
        map_a = TensorMap("bf16", a, (p.k, p.m, p.batch), (2 * p.row_a, a_bytes), (BLOCK_K, config.bm, 1))
    else:
        map_a = TensorMap("bf16", a, (p.m, p.k, p.batch), (2 * p.row_a, a_bytes), (64, BLOCK_K, 1))
    if p.b_major == "k":
        map_b = TensorMap("bf16", b, (p.k, p.n, 2 if swiglu else p.batch), (2 * p.row_b, b_bytes), (BLOCK_K, bn_box, 1))
    else:
        map_b = TensorMap("bf16", b, (p.n, p.k, p.batch), (2 * p.row_b, b_bytes), (64, BLOCK_K // config.cluster, 1))
    size, chunk = (2, 64) if p.out == "bf16" else (4, 32)
    dtype = "bf16" if p.out == "bf16" else "f32"
    map_c = TensorMap(dtype, c, (p.n, p.m, p.batch), (size * p.row_c, size * p.row_c * p.m), (chunk, 64, 1))
    map_aux = map_c
    if "aux" in needed:
        outer, apart = (2, p.n) if swiglu else (p.batch, p.row_aux * p.m)
        map_aux = TensorMap("bf16", aux, (p.n, p.m, outer), (2 * p.row_aux, 2 * apart), (64, 64, 1))

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
        counter=counter,
        rows=rows,
        sums=sums,
        factors=factors,
        picks=picks,
        table=table,
    )
    blocks = config.blocks or Device.open().properties.multiprocessors
    clusters = max(1, min(units, blocks // config.cluster))
    cubins = compile_all(config.sources(p))
    gemm = Kernel(cubins[0], "gemm", shared_bytes=config.shared_bytes)
    launches = [gemm.prepare((clusters * config.cluster, 1, 1), (THREADS, 1, 1), [map_a, map_b, map_c, map_aux, arguments])]
    if config.split_units and not config.owned:
        reduce = Kernel(cubins[1], "split_reduce")
        grid = (config.bm * config.bn // 1024, config.split_tiles * config.cluster, 1)
        output = [ctypes.c_uint64(c), ctypes.c_int64(p.row_c), ctypes.c_int64(p.row_c * p.m)]
        launches.append(reduce.prepare(grid, (256, 1, 1), [arguments, *output], overlap_previous=True))
    return Gemm(problem=problem, config=config, launches=tuple(launches))
