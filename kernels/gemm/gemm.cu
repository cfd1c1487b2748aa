// bf16 GEMM with fp32 accumulation for Hopper: C[M,N] = epilogue(A[M,K] B[N,K]^T), every transposition, batched, ragged.
//
// Here: the roles of the warps, and why the barriers suffice. config.cuh: choices and sizes. raster.cuh: which tile is where. tickets.cuh: tiles
// that are drawn. producer.cuh: from memory to the ring. main_loop.cuh: from the ring to accumulators. epilogue.cuh: from accumulators to
// memory. parts.cuh: tiles that are cut along K and added by one of their CTAs.
//
// Compile-time choices (defines GEMM_BM, GEMM_BN, ...)
//   BM, BN        tile of one consumer team: BM in {64,128,256}, BN in {64,128,192,256}
//   STAGES        slots of the operand ring;  STAGING: 8 KB output buffers per consumer warpgroup
//   CLUSTER       1, or 2: a pair of CTAs computes two tiles that lie one below the other and share B: each loads half of it and
//                 multicasts that half to both
//   PINGPONG      0: both consumer warpgroups work on one tile (BM/2 rows each). 1: each has a tile of its own, so that the epilogue of
//                 one runs under the matrix instructions of the other
//   DEFER         1: (not PINGPONG, bf16) a tile is only rounded at its end, to half its registers, and written under the first steps of
//                 the next one
//   A_MN, B_MN    0: K contiguous (x, W of a forward pass);  1: M (or N) contiguous (dy and x of a weight gradient, W of an input
//                 gradient). wgmma reads both, so there is no transpose kernel
//   OUT           0: bf16;  1: fp32;  2: fp32, added to what is there
//   BIAS          1: adds bias[N] (bf16)
//   ACT           0: none;  1: GELU (tanh form);  2: SwiGLU: B holds gate and up (N rows each), C = silu(gate) * up
//   SAVE_PRE      1: also writes what goes into ACT (bf16) through map_aux (ACT 2: gate and up)
//   AUX_IN        0: none;  1: multiplies by GELU'(pre), pre bf16 [M,N] read through map_aux (gradient through GELU)
//   SPLIT         1, 2: the first `split_tiles` tiles are cut along K into `split_units` equal runs of steps, whose fp32 partial sums go to
//                 a workspace and are added in a fixed order: 1: by split_reduce.cu;  2: by whoever has a tile's last steps (parts.cuh)
//   ROWS          0: none;  1: row i of C is rows[i] times the product's, and factors[i] table[picks[i]];  2: (DEFER) its elements x become
//                 e^(x - rows[i]), which are also summed row by row in each tile
//   AHEAD         0: tiles are dealt out beforehand;  n: drawn while the kernel runs, n steps before the loads of a tile end (tickets.cuh)
//
// Tile shapes. K advances 64 at a time: A [BM][64], B [BN][64] in shared memory, 128-byte swizzle, filled by TMA (out of range: zero).
//   Output leaves in chunks of 64 rows x 128 bytes, swizzled, by TMA (out of range: skipped), so ragged M, N, K need no code here.
// Warp roles. 384 threads: warpgroups 0 and 1 consume, warpgroup 2 produces (one thread of it). Persistent: units u = first, first +
//   clusters, ... Producer and consumers walk the same list, the producer ahead by up to STAGES steps across tile borders. With AHEAD a thread
//   of warp 9 of a cluster's first CTA draws the units behind the first (tickets.cuh).
// Shared memory. STAGES * (BM + BN) * 128 bytes (49,152 a stage at 128x256) + 2 * STAGING * 8,192 + barriers, at most 232,448.
// Registers. 168 a thread at entry; setmaxnreg gives 232 to consumers (128 of them accumulators at 128x256) and 40 to the producer; 224 and 56
//   where runs are owned.
//
// Ordering argument, barrier by barrier
//   full[s]   1 arrival (the producer's, with the byte count) + bytes of A and B. A phase completes when all bytes of a step have landed,
//             half of B from the peer's multicast. Consumers wait on it, so wgmma reads landed data. Bytes of the next turn cannot land
//             early: either producer issues them only after empty[s] of its own CTA has completed, which needs both CTAs' consumers.
//   empty[s]  4 arrivals per consumer warpgroup that reads the slot (one per warp, after wgmma_wait showed that warp's reads of the slot
//             are complete), from each CTA of the cluster. The producer waits on it before it refills the slot.
//   staging   thread 0 of a warpgroup issues all its stores, so bulk groups are its own; a group holds PER buffers. Before buffers are
//             rewritten (DEFER too, a chunk a step): thread 0 waits until at most STAGING / PER - 1 younger groups are unread, then a named barrier of the
//             warpgroup. After writing: each thread fences towards the async proxy, the same named barrier, thread 0 issues the stores.
//   turn w    (PINGPONG, named barrier) warpgroup w waits for it before its steps, the other arrives after the last full[] wait of its
//             own. So every phase of every full[s] is seen by one warpgroup before the other waits for the next one. Without it a wait
//             for phase u could be satisfied by phase u - 2, which has the same parity.
//   aux[w][b] (AUX_IN) 1 arrival + bytes; thread 0 loads into staging buffer b only after its earlier stores from it have been read.
//             In-place: read by ldmatrix, rewritten by stmatrix of the same thread's warp on the same rows, no other warp touches them.
//   exit      cluster_sync at the end: no CTA leaves while its peer may still multicast into it or arrive on its barriers.
//   C += :    each element belongs to one tile, and a tile issues one addition per launch: the order of additions is fixed, bits too.
#include "../common/cluster.cuh"
#include "../common/fence.cuh"
#include "../common/mbarrier.cuh"
#include "../common/tma.cuh"
#include "../common/wgmma.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "main_loop.cuh"
#include "parts.cuh"
#include "producer.cuh"
#include "raster.cuh"
#include "tickets.cuh"

namespace matmul {

constexpr int PRODUCER_REGISTERS = Config::OWNED ? 56 : 40;  // owned runs take more arithmetic to find
constexpr int CONSUMER_REGISTERS = Config::OWNED ? 224 : 232;

// A consumer warpgroup: its share of the tiles of this CTA, one after the other. `base`: the operand slots; `staging`: the buffers of both
// warpgroups.
template <class C>
__device__ __forceinline__ void consume(uint8_t* base, RingBarriers ring, Barriers<C>& barriers, Tickets<C>& tickets, uint8_t* staging,
                                        const TensorMap& map_c, const TensorMap& map_aux, const Problem& p, uint32_t warp, int warpgroup,
                                        int lane, uint32_t rank) {
    const bool issuer = threadIdx.x % 128 == 0;
    uint8_t* const buffers = staging + warpgroup * C::STAGING * C::CHUNK_BYTES;
    const uint32_t slots = smem_address(base);
    Epilogue<C> epilogue{p, map_c, map_aux, barriers, buffers, warpgroup, lane, static_cast<int>(warp % 4) * 16, issuer, 0};
    uint32_t steps_done = 0;  // of the ring, by everyone
    int turn = 0;
    float acc[C::MI][C::BN / 2];
    typename Epilogue<C>::Rounded rounded;
    bool waiting = false;  // whether a rounded tile has yet to be written
    if (C::PINGPONG && warpgroup == 1) named_barrier_arrive(TURN_BARRIER, 256);  // warpgroup 0 begins
    auto walk = order_of(p, tickets);
    Work work;
    while (walk.next(work)) {
        if (C::PINGPONG && (turn++ & 1) != warpgroup) {
            steps_done += work.k_count;
            continue;
        }
        const uint32_t steps_before = steps_done;
        steps_done += work.k_count;
        typename Epilogue<C>::Bias bias;
        epilogue.load_bias(bias, work.n);
        epilogue.fetch_rows(work);
        typename Epilogue<C>::OfRows rows;
        if constexpr (C::DEFER) {
            multiply<C, Epilogue<C>::LEAVING>(acc, slots, ring, steps_before, work, warpgroup, lane, [&](int step) {
                if (waiting) epilogue.leave(rounded, step);
            });
            if (waiting) epilogue.leave_rest(rounded, work.k_count);  // where there are fewer steps than it takes
            epilogue.begin(work);
            epilogue.load_rows(rows);
            epilogue.blend(acc, rows);
            epilogue.round(rounded, acc, bias, rows);
            waiting = true;
            continue;
        }
        epilogue.begin(work);
        multiply<C, 1>(acc, slots, ring, steps_before, work, warpgroup, lane, [&](int) { epilogue.load_first_aux(); });
        if constexpr (C::OWNED) {
            if (work.takes < 0) {
                leave_part<C>(acc, p, work, rank, lane);
                continue;
            }
            add_parts<C>(acc, base, ring, steps_done, work.takes, lane);
            steps_done += C::PIECES * work.takes;
        } else if (C::SPLIT && work.slot >= 0) {
            epilogue.write_partial(acc, work.slot, rank);
            continue;
        }
        epilogue.load_rows(rows);
        epilogue.blend(acc, rows);
        epilogue.write(acc, bias);
    }
    if (C::DEFER && waiting) epilogue.leave_rest(rounded, 0);
    if (issuer) tma_store_wait<0>();
}

}  // namespace matmul

extern "C" __global__ void __cluster_dims__(matmul::Config::CLUSTER, 1, 1) __launch_bounds__(384, 1)
    gemm(const __grid_constant__ ptx::TensorMap map_a, const __grid_constant__ ptx::TensorMap map_b,
         const __grid_constant__ ptx::TensorMap map_c, const __grid_constant__ ptx::TensorMap map_aux,
         const __grid_constant__ matmul::Problem p) {
    using namespace matmul;
    using C = Config;
    extern __shared__ uint8_t raw[];
    uint8_t* const base = raw + ((1024 - (smem_address(raw) & 1023)) & 1023);
    uint8_t* const staging = base + C::STAGES * C::STAGE_BYTES;
    Barriers<C>& barriers = *reinterpret_cast<Barriers<C>*>(staging + 2 * C::STAGING * C::CHUNK_BYTES);
    Tickets<C>& tickets = *reinterpret_cast<Tickets<C>*>(&barriers + 1);
    const RingBarriers ring{barriers.full, barriers.empty};

    const uint32_t warp = warp_index();
    const int warpgroup = static_cast<int>(warp / 4);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint32_t rank = C::CLUSTER == 2 ? cluster_rank() : 0;

    if (threadIdx.x == 0) {
        for (int s = 0; s < C::STAGES; ++s) {
            mbarrier_init(&barriers.full[s], 1);
            mbarrier_init(&barriers.empty[s], C::READERS);
        }
        for (int b = 0; b < C::STAGING; ++b) {
            mbarrier_init(&barriers.aux[0][b], 1);
            mbarrier_init(&barriers.aux[1][b], 1);
        }
        if constexpr (C::AHEAD > 0) tickets.init();
        mbarrier_init_fence();
        tma_prefetch_map(&map_a);
        tma_prefetch_map(&map_b);
        tma_prefetch_map(&map_c);
    }
    unsigned first = 0;  // OWNED: the first unit, on its way while the barriers are made
    if constexpr (C::OWNED) {
        if (warp == 9 && lane == 0 && rank == 0) first = draw_one(Walk<C>(p));
    }
    if constexpr (C::CLUSTER == 2) {
        cluster_sync();
    } else {
        __syncthreads();
    }

    if constexpr (C::SPLIT && !C::OWNED) grid_dependency_launch();  // split_reduce may be launched now; it waits for this grid's end before it reads

    if (warpgroup == 2) {
        registers_decrease<PRODUCER_REGISTERS>();
        if (warp == 8 && lane == 0) produce<C>(order_of(p, tickets), p, RingState<C::STAGES>(1), base, ring, map_a, map_b, rank);
        if constexpr (C::AHEAD > 0) {
            if (warp == 9 && lane == 0 && rank == 0) draw(p, tickets, first);
        }
        __syncwarp();
    } else {
        registers_increase<CONSUMER_REGISTERS>();
        consume<C>(base, ring, barriers, tickets, staging, map_c, map_aux, p, warp, warpgroup, lane, rank);
    }
    if constexpr (C::CLUSTER == 2) cluster_sync();
}
