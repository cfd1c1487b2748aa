// bf16 GEMM with fp32 accumulation for Hopper: C[M,N] = epilogue(A[M,K] B[N,K]^T), every transposition, batched, ragged.
//
// Compile-time choices (defines GEMM_BM, GEMM_BN, ...)
//   BM, BN        tile of one consumer team: BM in {64,128,256}, BN in {64,128,192,256}
//   STAGES        slots of the operand ring;  STAGING: 8 KB output buffers per consumer warpgroup
//   CLUSTER       1, or 2: a pair of CTAs computes two tiles that lie one below the other and share B: each loads half of it and
//                 multicasts that half to both
//   PINGPONG      0: both consumer warpgroups work on one tile (BM/2 rows each). 1: each has a tile of its own, so that the epilogue of
//                 one runs under the matrix instructions of the other
//   A_MN, B_MN    0: K contiguous (x, W of a forward pass);  1: M (or N) contiguous (dy and x of a weight gradient, W of an input
//                 gradient). wgmma reads both, so there is no transpose kernel
//   OUT           0: bf16;  1: fp32;  2: fp32, added to what is there
//   BIAS          1: adds bias[N] (bf16)
//   ACT           0: none;  1: GELU (tanh form);  2: SwiGLU: B holds gate and up (N rows each), C = silu(gate) * up
//   SAVE_PRE      1: also writes what goes into ACT (bf16) through map_aux (ACT 2: gate and up)
//   AUX_IN        0: none;  1: adds a bf16 residual [M,N];  2: multiplies by GELU'(pre) with pre bf16 [M,N] (gradient through GELU)
//   SPLIT         1: the first `split_tiles` tiles are cut along K into `split_units` equal runs of steps, whose fp32 partial sums go to
//                 a workspace, added in a fixed order by split_reduce.cu
//
// Tile shapes. K advances 64 at a time: A [BM][64], B [BN][64] in shared memory, 128-byte swizzle, filled by TMA (out of range: zero).
//   Output leaves in chunks of 64 rows x 128 bytes, swizzled, by TMA (out of range: skipped), so ragged M, N, K need no code here.
// Warp roles. 384 threads: warpgroups 0 and 1 consume, warpgroup 2 produces (one thread of it). Persistent: units u = first, first +
//   clusters, ... Producer and consumers walk the same list, the producer ahead by up to STAGES steps across tile borders.
// Shared memory. STAGES * (BM + BN) * 128 bytes (49,152 a stage at 128x256) + 2 * STAGING * 8,192 + barriers, at most 232,448.
// Registers. 168 a thread at entry; setmaxnreg gives 232 to consumers (128 of them accumulators at 128x256) and 40 to the producer.
//
// Ordering argument, barrier by barrier
//   full[s]   1 arrival (the producer's, with the byte count) + bytes of A and B. A phase completes when all bytes of a step have landed,
//             half of B from the peer's multicast. Consumers wait on it, so wgmma reads landed data. Bytes of the next turn cannot land
//             early: either producer issues them only after empty[s] of its own CTA has completed, which needs both CTAs' consumers.
//   empty[s]  4 arrivals per consumer warpgroup that reads the slot (one per warp, after wgmma_wait showed that warp's reads of the slot
//             are complete), from each CTA of the cluster. The producer waits on it before it refills the slot.
//   staging   thread 0 of a warpgroup issues all its stores, so bulk groups are its own; a group holds PER buffers. Before buffers are
//             rewritten: thread 0 waits until at most STAGING / PER - 1 younger groups are unread, then a named barrier of the
//             warpgroup. After writing: each thread fences towards the async proxy, the same named barrier, thread 0 issues the stores.
//   turn w    (PINGPONG, named barrier) warpgroup w waits for it before its steps, the other arrives after the last full[] wait of its
//             own. So every phase of every full[s] is seen by one warpgroup before the other waits for the next one. Without it a wait
//             for phase u could be satisfied by phase u - 2, which has the same parity.
//   aux[w][b] (AUX_IN) 1 arrival + bytes; thread 0 loads into staging buffer b only after its earlier stores from it have been read.
//             In-place: read by ldmatrix, rewritten by stmatrix of the same thread's warp on the same rows, no other warp touches them.
//   exit      cluster_sync at the end: no CTA leaves while its peer may still multicast into it or arrive on its barriers.
//   C += :    each element belongs to one tile, and a tile issues one addition per launch: the order of additions is fixed, bits too.
#include <cuda_bf16.h>

#include "../common/cluster.cuh"
#include "../common/fence.cuh"
#include "../common/math.cuh"
#include "../common/matrix.cuh"
#include "../common/mbarrier.cuh"
#include "../common/tma.cuh"
#include "../common/wgmma.cuh"

constexpr int BM = GEMM_BM;
constexpr int BN = GEMM_BN;
constexpr int STAGES = GEMM_STAGES;
constexpr int STAGING = GEMM_STAGING;
constexpr int CLUSTER = GEMM_CLUSTER;
constexpr int PINGPONG = GEMM_PINGPONG;
constexpr int A_MN = GEMM_A_MN;
constexpr int B_MN = GEMM_B_MN;
constexpr int OUT = GEMM_OUT;
constexpr int BIAS = GEMM_BIAS;
constexpr int ACT = GEMM_ACT;
constexpr int SAVE_PRE = GEMM_SAVE_PRE;
constexpr int AUX_IN = GEMM_AUX_IN;
constexpr int SPLIT = GEMM_SPLIT;
constexpr int BK = 64;
constexpr int PAIR = ACT == 2;
constexpr int WARPGROUP_M = PINGPONG ? BM : BM / 2;
constexpr int MI = WARPGROUP_M / 64;
constexpr int A_BYTES = BM * BK * 2;
constexpr int B_BYTES = BN * BK * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int PANEL_BYTES = BK * 128;  // MN-major: 64 elements of M or N, BK rows of k
constexpr int CHUNK_BYTES = 64 * 128;
constexpr int OUT_BN = PAIR ? BN / 2 : BN;             // output columns of a tile
constexpr int CHUNK_N = OUT == 0 ? 64 : 32;            // output columns of a chunk
constexpr int CHUNKS = OUT_BN / CHUNK_N;               // chunks of 64 rows
constexpr int KINDS = SAVE_PRE ? (PAIR ? 3 : 2) : 1;   // what is written of each chunk
constexpr int ITEMS = MI * CHUNKS * KINDS;
constexpr int PER = STAGING % 2 == 0 && STAGING >= 4 ? 2 : 1;  // items written between two barriers
constexpr int B_BOX_ROWS = PAIR || CLUSTER == 2 ? BN / 2 : BN;
constexpr int READERS = 4 * (PINGPONG ? 1 : 2) * CLUSTER;
constexpr int TURN_BARRIER = 3;  // named barriers 3 and 4; 1 and 2 belong to the staging buffers
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = 232;

static_assert(MI >= 1 && WARPGROUP_M % 64 == 0, "a consumer warpgroup owns a multiple of 64 rows");
static_assert(MI * BN <= 256, "accumulators of a warpgroup fit its registers");
static_assert(BN % 64 == 0 && BN <= 256, "panels of 64 columns");
static_assert(!PAIR || (OUT == 0 && !B_MN && !BIAS && !AUX_IN && BN % 128 == 0), "SwiGLU: bf16 output, K-major weights");
static_assert(!SPLIT || (!BIAS && !ACT && !AUX_IN), "split tiles have a plain epilogue");
static_assert(!AUX_IN || (OUT == 0 && !SAVE_PRE), "aux input uses the staging buffers");
static_assert(STAGES * STAGE_BYTES + 2 * STAGING * CHUNK_BYTES + 512 + 1024 <= 232448, "shared memory budget");

#include "raster.cuh"

using namespace ptx;

struct Barriers {
    mbarrier_t full[STAGES];
    mbarrier_t empty[STAGES];
    mbarrier_t aux[2][STAGING];
};

// Activations, written for few instructions: the epilogue is straight-line code over the accumulators, and its length is its cost.
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float GELU_A = 1.5957691216057308f;             // 2 sqrt(2 / pi)
constexpr float GELU_B = 1.5957691216057308f * 0.044715f;

// x / (1 + 2^t): with t = -log2(e) z it is x sigmoid(z).
__device__ __forceinline__ float gated(float x, float t) { return x * reciprocal_approx(1.0f + exp2_approx(t)); }

__device__ __forceinline__ float silu(float x) { return gated(x, -LOG2_E * x); }

// GELU, tanh form: x sigmoid(z), z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ float gelu(float x) { return gated(x, x * fmaf(x * x, -LOG2_E * GELU_B, -LOG2_E * GELU_A)); }

// d GELU / dx = s + x s (1 - s) z', s = sigmoid(z). Beyond 64 it is 0 or 1, and x^3 would overflow. NaN and infinity give NaN (y - y).
__device__ __forceinline__ float gelu_gradient(float y) {
    const float x = fminf(fmaxf(y, -64.0f), 64.0f);
    const float square = x * x;
    const float s = gated(1.0f, x * fmaf(square, -LOG2_E * GELU_B, -LOG2_E * GELU_A));
    return fmaf(x * fmaf(square, 3.0f * GELU_B, GELU_A), fmaf(-s, s, s), s) + (y - y);
}

// Bias of two neighbouring columns (the first is even) as bf16x2; 0 beyond N.
__device__ __forceinline__ uint32_t bias_pair(const Problem& p, int column) {
    uint32_t packed = 0;
    if (column + 1 < p.n) packed = __ldg(reinterpret_cast<const unsigned int*>(p.bias + column));
    if (column + 1 == p.n) packed = __ldg(reinterpret_cast<const unsigned short*>(p.bias + column));
    return packed;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_c,
         const __grid_constant__ TensorMap map_aux, const __grid_constant__ Problem p) {
    extern __shared__ uint8_t raw[];
    uint8_t* const base = raw + ((1024 - (smem_address(raw) & 1023)) & 1023);
    uint8_t* const staging = base + STAGES * STAGE_BYTES;
    Barriers& barriers = *reinterpret_cast<Barriers*>(staging + 2 * STAGING * CHUNK_BYTES);

    const uint32_t warp = warp_index();
    const int warpgroup = static_cast<int>(warp / 4);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint32_t rank = CLUSTER == 2 ? cluster_rank() : 0;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(&barriers.full[s], 1);
            mbarrier_init(&barriers.empty[s], READERS);
        }
        for (int b = 0; b < STAGING; ++b) {
            mbarrier_init(&barriers.aux[0][b], 1);
            mbarrier_init(&barriers.aux[1][b], 1);
        }
        mbarrier_init_fence();
        tma_prefetch_map(&map_a);
        tma_prefetch_map(&map_b);
        tma_prefetch_map(&map_c);
    }
    if (CLUSTER == 2) {
        cluster_sync();
    } else {
        __syncthreads();
    }

    if (SPLIT) grid_dependency_launch();  // split_reduce may be launched now; it waits for the end of this grid before it reads

    if (warpgroup == 2) {
        registers_decrease<PRODUCER_REGISTERS>();
        if (warp == 8 && lane == 0) {
            RingState<STAGES> ring(1);
            Walk<SPLIT != 0> walk(p);
            Work work;
            while (walk.next(work)) {
                for (int step = 0; step < work.k_count; ++step) {
                    const int k = work.step(step) * BK;
                    mbarrier_t* const full = &barriers.full[ring.slot];
                    uint8_t* const a = base + ring.slot * STAGE_BYTES;
                    uint8_t* const b = a + A_BYTES;
                    mbarrier_wait(&barriers.empty[ring.slot], ring.parity);
                    mbarrier_arrive_expect(full, STAGE_BYTES);
                    if (A_MN) {
#pragma unroll
                        for (int panel = 0; panel < BM / 64; ++panel)
                            tma_load_3d(a + panel * PANEL_BYTES, &map_a, full, work.m + panel * 64, k, work.batch);
                    } else {
                        tma_load_3d(a, &map_a, full, k, work.m, work.batch);
                    }
                    if (B_MN) {
#pragma unroll
                        for (int panel = 0; panel < BN / 64; ++panel) {
                            const int column = work.n * BN + panel * 64;
                            uint8_t* const target = b + panel * PANEL_BYTES;
                            if (CLUSTER == 2) {
                                tma_load_3d_multicast(target + rank * (PANEL_BYTES / 2), &map_b, full, 3, column,
                                                      k + static_cast<int>(rank) * (BK / 2), work.batch);
                            } else {
                                tma_load_3d(target, &map_b, full, column, k, work.batch);
                            }
                        }
                    } else if (CLUSTER == 2) {
                        const int row = PAIR ? work.n * OUT_BN : work.n * BN + static_cast<int>(rank) * B_BOX_ROWS;
                        tma_load_3d_multicast(b + rank * (B_BYTES / 2), &map_b, full, 3, k, row,
                                              PAIR ? static_cast<int>(rank) : work.batch);
                    } else {
#pragma unroll
                        for (int half = 0; half < BN / B_BOX_ROWS; ++half)
                            tma_load_3d(b + half * (B_BYTES / 2), &map_b, full, k, work.n * OUT_BN, PAIR ? half : work.batch);
                    }
                    ring.advance();
                }
            }
        }
        __syncwarp();
    } else {
        registers_increase<CONSUMER_REGISTERS>();
        const bool issuer = threadIdx.x % 128 == 0;
        uint8_t* const buffers = staging + warpgroup * STAGING * CHUNK_BYTES;
        const uint32_t base_address = smem_address(base);
        const int warp_row = static_cast<int>(warp % 4) * 16;
        uint32_t steps_done = 0;    // of the ring, by everyone
        uint32_t chunks_done = 0;   // of this warpgroup's staging buffers
        int turn = 0;

        float acc[MI][BN / 2];
        if (PINGPONG && warpgroup == 1) named_barrier_arrive(TURN_BARRIER, 256);  // warpgroup 0 begins
        Walk<SPLIT != 0> walk(p);
        Work work;
        while (walk.next(work)) {
            if (PINGPONG && (turn++ & 1) != warpgroup) {
                steps_done += work.k_count;
                continue;
            }
            const int row0 = work.m + (PINGPONG ? 0 : warpgroup * WARPGROUP_M);
            const int column0 = work.n * OUT_BN;
            uint32_t slot = steps_done % STAGES;
            uint32_t parity = (steps_done / STAGES) & 1;
            uint32_t previous = 0;
            steps_done += work.k_count;
            // Asks for the aux input of item `item` in the staging buffer of chunk number `number`.
            auto load_aux = [&](uint32_t number, int item) {
                mbarrier_t* const barrier = &barriers.aux[warpgroup][number % STAGING];
                mbarrier_arrive_expect(barrier, CHUNK_BYTES);
                tma_load_3d(buffers + number % STAGING * CHUNK_BYTES, &map_aux, barrier, column0 + item % CHUNKS * CHUNK_N,
                            row0 + item / CHUNKS * 64, work.batch);
            };
            // This thread's columns of the bias, asked for now and used after the steps.
            uint32_t bias[BIAS ? BN / 8 : 1];
            if (BIAS) {
#pragma unroll
                for (int j = 0; j < BN / 8; ++j) bias[j] = bias_pair(p, column0 + j * 8 + (lane % 4) * 2);
            }

            if (PINGPONG) named_barrier_sync(TURN_BARRIER + warpgroup, 256);
            for (int step = 0; step < work.k_count; ++step) {
                mbarrier_wait(&barriers.full[slot], parity);
                const uint32_t a = base_address + slot * STAGE_BYTES;
                const uint32_t b = a + A_BYTES;
                const uint32_t own = PINGPONG ? 0 : warpgroup * (WARPGROUP_M * 128);  // 64 rows or one panel: 8192 bytes either way
                const uint64_t a_tile = A_MN ? descriptor_mn_major(a + own, PANEL_BYTES) : descriptor_k_major(a + own);
                const uint64_t b_tile = B_MN ? descriptor_mn_major(b, PANEL_BYTES) : descriptor_k_major(b);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < BK / 16; ++k) {
#pragma unroll
                    for (int mi = 0; mi < MI; ++mi) {
                        wgmma_ss<BN, A_MN, B_MN>(acc[mi], descriptor_advance(a_tile, mi * 8192 + k * (A_MN ? 2048 : 32)),
                                                 descriptor_advance(b_tile, k * (B_MN ? 2048 : 32)), step > 0 || k > 0);
                    }
                }
                wgmma_commit();
                if (step > 0) {
                    wgmma_wait<1>();
                    if (lane < CLUSTER) {
                        if (CLUSTER == 2) {
                            mbarrier_arrive_remote(&barriers.empty[previous], lane);
                        } else {
                            mbarrier_arrive(&barriers.empty[previous]);
                        }
                    }
                }
                if (AUX_IN && step == 0 && issuer) {
                    tma_store_wait_read<0>();
#pragma unroll
                    for (int i = 0; i < (STAGING < ITEMS ? STAGING : ITEMS); ++i) load_aux(chunks_done + i, i);
                }
                previous = slot;
                if (++slot == STAGES) {
                    slot = 0;
                    parity ^= 1;
                }
            }
            if (PINGPONG) named_barrier_arrive(TURN_BARRIER + 1 - warpgroup, 256);
            wgmma_wait<0>();
            if (lane < CLUSTER) {
                if (CLUSTER == 2) {
                    mbarrier_arrive_remote(&barriers.empty[previous], lane);
                } else {
                    mbarrier_arrive(&barriers.empty[previous]);
                }
            }

            if (SPLIT && work.slot >= 0) {
                const size_t index = static_cast<size_t>(work.slot) * CLUSTER + rank;
                float* const tile = p.workspace + index * (BM * BN) +
                                    ((PINGPONG ? 0 : warpgroup * WARPGROUP_M) + warp_row + lane / 4) * BN + (lane % 4) * 2;
#pragma unroll
                for (int mi = 0; mi < MI; ++mi) {
#pragma unroll
                    for (int j = 0; j < BN / 8; ++j) {
                        float* const at = tile + mi * (64 * BN) + j * 8;
                        *reinterpret_cast<float2*>(at) = make_float2(acc[mi][4 * j], acc[mi][4 * j + 1]);
                        *reinterpret_cast<float2*>(at + 8 * BN) = make_float2(acc[mi][4 * j + 2], acc[mi][4 * j + 3]);
                    }
                }
                continue;
            }

            // The output leaves in items: chunks of 64 rows, and of each chunk what enters the activation (SAVE_PRE) before what leaves
            // it. PER items share one pass through the barriers and one bulk group.
            auto buffer_of = [&](int i) -> uint8_t* { return buffers + ((chunks_done + i) % STAGING) * CHUNK_BYTES; };
            auto write_item = [&](int item, int i) {
                const int kind = item % KINDS;
                const int chunk = item / KINDS % CHUNKS;
                const int mi = item / KINDS / CHUNKS;
                uint8_t* const buffer = buffer_of(i);
                const uint32_t address = smem_address(buffer);
                if (OUT != 0) {
                    const uint32_t row = warp_row + lane / 4;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float* const d = &acc[mi][(chunk * 4 + j) * 4];
                        const float b0 = BIAS ? bf16_low(bias[chunk * 4 + j]) : 0.0f;
                        const float b1 = BIAS ? bf16_high(bias[chunk * 4 + j]) : 0.0f;
                        const uint32_t at = j * 32 + (lane % 4) * 8;
                        store_shared_f32x2(address + swizzle_128(row, at), BIAS ? d[0] + b0 : d[0], BIAS ? d[1] + b1 : d[1]);
                        store_shared_f32x2(address + swizzle_128(row + 8, at), BIAS ? d[2] + b0 : d[2], BIAS ? d[3] + b1 : d[3]);
                    }
                    return;
                }
                const uint32_t row = warp_row + (lane & 15);
                if (AUX_IN) mbarrier_wait(&barriers.aux[warpgroup][(chunks_done + i) % STAGING], ((chunks_done + i) / STAGING) & 1);
                // All arithmetic of the chunk between its loads and its stores: independent elements hide each other's latency.
                uint32_t at[4];
#pragma unroll
                for (int q = 0; q < 4; ++q) at[q] = address + swizzle_128(row, q * 32 + (lane >> 4) * 16);
                uint32_t other[16];
                if (AUX_IN) {
#pragma unroll
                    for (int q = 0; q < 4; ++q)
                        ldmatrix_x4(at[q], other[4 * q], other[4 * q + 1], other[4 * q + 2], other[4 * q + 3]);
                    __syncwarp();  // every lane has read before any lane writes
                }
                uint32_t v[16];
#pragma unroll
                for (int pair = 0; pair < 16; ++pair) {
                    float x[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int element = chunk * 32 + pair * 2 + e;
                        x[e] = acc[mi][(PAIR && SAVE_PRE && kind == 1 ? BN / 4 : 0) + element];
                        if (BIAS) {
                            const uint32_t two = bias[element / 4];
                            x[e] += e ? bf16_high(two) : bf16_low(two);
                        }
                        if (ACT == 1 && kind == KINDS - 1) x[e] = gelu(x[e]);
                        if (PAIR && kind == KINDS - 1) x[e] = silu(x[e]) * acc[mi][BN / 4 + element];
                        if (AUX_IN) {
                            const float y = e ? bf16_high(other[pair]) : bf16_low(other[pair]);
                            x[e] = AUX_IN == 1 ? x[e] + y : x[e] * gelu_gradient(y);
                        }
                    }
                    v[pair] = pack_bf16(x[0], x[1]);
                }
#pragma unroll
                for (int q = 0; q < 4; ++q) stmatrix_x4(at[q], v[4 * q], v[4 * q + 1], v[4 * q + 2], v[4 * q + 3]);
            };
            auto send_item = [&](int item, int i) {
                const int kind = item % KINDS;
                const int column = column0 + item / KINDS % CHUNKS * CHUNK_N;
                const int row = row0 + item / KINDS / CHUNKS * 64;
                if (kind < KINDS - 1) {
                    tma_store_3d(&map_aux, buffer_of(i), column, row, PAIR ? kind : work.batch);
                } else if (OUT == 2) {
                    tma_add_3d(&map_c, buffer_of(i), column, row, work.batch);
                } else {
                    tma_store_3d(&map_c, buffer_of(i), column, row, work.batch);
                }
            };

#pragma unroll
            for (int item = 0; item < ITEMS; item += PER) {
                if (!AUX_IN) {
                    if (issuer) tma_store_wait_read<STAGING / PER - 1>();
                    named_barrier_sync(1 + warpgroup, 128);
                }
#pragma unroll
                for (int i = 0; i < PER; ++i)
                    if (item + i < ITEMS) write_item(item + i, i);
                fence_async_shared();
                named_barrier_sync(1 + warpgroup, 128);
                if (issuer) {
#pragma unroll
                    for (int i = 0; i < PER; ++i)
                        if (item + i < ITEMS) send_item(item + i, i);
                    tma_store_commit();
                    if (AUX_IN && item + STAGING < ITEMS) {
                        tma_store_wait_read<0>();
#pragma unroll
                        for (int i = 0; i < PER; ++i)
                            if (item + i + STAGING < ITEMS) load_aux(chunks_done + i, item + i + STAGING);
                    }
                }
                chunks_done += item + PER <= ITEMS ? PER : ITEMS - item;
            }
        }
        if (issuer) tma_store_wait<0>();
    }
    if (CLUSTER == 2) cluster_sync();
}
