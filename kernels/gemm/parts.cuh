// Tiles that are cut along K and added by an owner (SPLIT 2), where split_reduce.cu adds them in a second kernel (SPLIT 1).
//
// A run of k steps covers one tile or the ends of two. Of the later one it has the beginning, which it computes first and leaves in the
// workspace. Of the earlier one it has the end, and with it the tile: when all other parts are there it takes them through the ring of
// operands, adds its own to their sum, and writes C as that of a whole tile. The order is that of k, so the bits are those of SPLIT 1. A run
// leaves at most one part: its place in the workspace is the run's number.
//
// Nobody waits for ever. Runs are drawn (tickets.cuh), the first ones too: an owner awaits runs of lower numbers, which have been drawn
// before its own, by clusters that are under way. Each leaves its part before it awaits others, and the lowest run awaits none. Dealt out
// by the number of a CTA, owners could fill a GPU while those that they wait for have not begun.
//
// Ordering argument
//   parts     each warp that has written its share of a part raises the tile's count, with release; __syncwarp orders the other lanes'
//             writes before that. The owner's producer awaits takes * PART_WARPS with acquire, then a proxy fence: its copies read what has
//             been written. Each CTA of a cluster has its own count, for it adds parts of its own rows alone.
//   again     the producer puts the count back to 0 once it has seen it whole: nobody raises it any more in this launch.
//   pieces    pass through the ring like steps: full[s] and empty[s] mean the same (gemm.cu). They are read by ordinary loads, so a warp
//             joins before it lets go of a slot.
#pragma once
#include "../common/count.cuh"
#include "../common/fence.cuh"
#include "../common/mbarrier.cuh"
#include "../common/tma.cuh"
#include "config.cuh"
#include "main_loop.cuh"
#include "raster.cuh"

namespace matmul {

// The count of `tile`'s parts that CTAs of this rank have written.
template <class C>
__device__ __forceinline__ unsigned* count_of(const Problem& p, int tile, uint32_t rank) {
    return p.counter + 1 + tile * C::CLUSTER + rank;
}

// Where run `unit` leaves its part, for CTAs of this rank: PIECES of [PIECE / 4][256 threads][4].
template <class C>
__device__ __forceinline__ float* part_of(const Problem& p, int unit, uint32_t rank) {
    return p.workspace + (static_cast<size_t>(unit) * C::CLUSTER + rank) * (C::BM * C::BN);
}

// Writes this thread's share of the part that `work` is, and tells its owner that this warp has. All consumers.
template <class C>
__device__ __forceinline__ void leave_part(const float (&acc)[C::MI][C::BN / 2], const Problem& p, const Work& work, uint32_t rank, int lane) {
    float4* const to = reinterpret_cast<float4*>(part_of<C>(p, work.slot, rank)) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < C::MI * C::BN / 8; ++i) {
        const float* const x = &acc[4 * i / (C::BN / 2)][4 * i % (C::BN / 2)];
        to[i * 256] = make_float4(x[0], x[1], x[2], x[3]);
    }
    __syncwarp();
    if (lane == 0) add_release(count_of<C>(p, work.tile, rank), 1u);
}

// Loads the parts that the owner of `work` takes into the ring, piece by piece, each piece in the order of k. One thread, the producer.
template <class C>
__device__ __forceinline__ void load_parts(const Problem& p, const Work& work, RingState<C::STAGES>& at, uint8_t* slots,
                                           RingBarriers barriers, uint32_t rank) {
    unsigned* const count = count_of<C>(p, work.tile, rank);
    while (load_acquire(count) < static_cast<unsigned>(work.takes * C::PART_WARPS)) {
    }
    *count = 0;
    fence_async_global();
    for (int piece = 0; piece < C::PIECES; ++piece) {
        for (int from = work.slot - work.takes; from < work.slot; ++from) {
            mbarrier_wait(&barriers.empty[at.slot], at.parity);
            mbarrier_arrive_expect(&barriers.full[at.slot], C::PIECE_BYTES);
            bulk_load(slots + at.slot * C::STAGE_BYTES, part_of<C>(p, from, rank) + piece * (C::PIECE_BYTES / 4), C::PIECE_BYTES,
                      &barriers.full[at.slot]);
            at.advance();
        }
    }
}

// acc = the sum of `takes` parts + acc. All consumers. `steps_before`: of the ring, by everyone.
template <class C>
__device__ __forceinline__ void add_parts(float (&acc)[C::MI][C::BN / 2], const uint8_t* slots, RingBarriers barriers, uint32_t steps_before,
                                          int takes, int lane) {
    uint32_t slot = steps_before % C::STAGES;
    uint32_t parity = (steps_before / C::STAGES) & 1;
#pragma unroll
    for (int piece = 0; piece < C::PIECES; ++piece) {
        float sum[C::PIECE] = {};
        for (int taken = 0; taken < takes; ++taken) {
            mbarrier_wait(&barriers.full[slot], parity);
            const float4* const from = reinterpret_cast<const float4*>(slots + slot * C::STAGE_BYTES) + threadIdx.x;
#pragma unroll
            for (int i = 0; i < C::PIECE / 4; ++i) {
                const float4 x = from[i * 256];
                sum[4 * i] += x.x;
                sum[4 * i + 1] += x.y;
                sum[4 * i + 2] += x.z;
                sum[4 * i + 3] += x.w;
            }
            __syncwarp();
            release<C>(barriers, slot, lane);
            if (++slot == C::STAGES) {
                slot = 0;
                parity ^= 1;
            }
        }
#pragma unroll
        for (int i = 0; i < C::PIECE; ++i) {
            const int at = piece * C::PIECE + i;
            acc[at / (C::BN / 2)][at % (C::BN / 2)] = sum[i] + acc[at / (C::BN / 2)][at % (C::BN / 2)];
        }
    }
}

}  // namespace matmul
