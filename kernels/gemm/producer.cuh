// The producer of the GEMM: fills the ring of operand slots by TMA, up to STAGES steps ahead of the consumers, across tile borders.
#pragma once
#include "../common/mbarrier.cuh"
#include "../common/tma.cuh"
#include "config.cuh"
#include "parts.cuh"
#include "raster.cuh"

namespace matmul {

// A of one step: all rows of the tile, reduction from `k` on.
template <class C>
__device__ __forceinline__ void load_a(uint8_t* a, const TensorMap& map_a, mbarrier_t* full, const Work& work, int k) {
    if constexpr (C::A_MN) {
#pragma unroll
        for (int panel = 0; panel < C::BM / 64; ++panel)
            tma_load_3d(a + panel * C::PANEL_BYTES, &map_a, full, work.m + panel * 64, k, work.batch);
    } else {
        tma_load_3d(a, &map_a, full, k, work.m, work.batch);
    }
}

// B of one step. In a cluster each CTA loads one half and multicasts it to both.
template <class C>
__device__ __forceinline__ void load_b(uint8_t* b, const TensorMap& map_b, mbarrier_t* full, const Work& work, int k, uint32_t rank) {
    if constexpr (C::B_MN) {
#pragma unroll
        for (int panel = 0; panel < C::BN / 64; ++panel) {
            const int column = work.n * C::BN + panel * 64;
            uint8_t* const target = b + panel * C::PANEL_BYTES;
            if constexpr (C::CLUSTER == 2) {
                tma_load_3d_multicast(target + rank * (C::PANEL_BYTES / 2), &map_b, full, 3, column,
                                      k + static_cast<int>(rank) * (C::BK / 2), work.batch);
            } else {
                tma_load_3d(target, &map_b, full, column, k, work.batch);
            }
        }
    } else if constexpr (C::CLUSTER == 2) {
        const int row = C::PAIR ? work.n * C::OUT_BN : work.n * C::BN + static_cast<int>(rank) * C::B_BOX_ROWS;
        tma_load_3d_multicast(b + rank * (C::B_BYTES / 2), &map_b, full, 3, k, row, C::PAIR ? static_cast<int>(rank) : work.batch);
    } else {
#pragma unroll
        for (int half = 0; half < C::BN / C::B_BOX_ROWS; ++half)
            tma_load_3d(b + half * (C::B_BYTES / 2), &map_b, full, k, work.n * C::OUT_BN, C::PAIR ? half : work.batch);
    }
}

// Every step of every tile of `walk`. One thread. `slots`: the operand slots; `ring`: the first one to fill, as a producer begins.
template <class C, class Order>
__device__ __forceinline__ void produce(Order walk, const Problem& p, RingState<C::STAGES> ring, uint8_t* slots, RingBarriers barriers,
                                        const TensorMap& map_a, const TensorMap& map_b, uint32_t rank) {
    Work work;
    while (walk.next(work)) {
        for (int step = 0; step < work.k_count; ++step) {
            if constexpr (C::AHEAD > 0) {
                if (rank == 0) walk.want(work, step);
            }
            const int k = work.step(step) * C::BK;
            mbarrier_t* const full = &barriers.full[ring.slot];
            uint8_t* const a = slots + ring.slot * C::STAGE_BYTES;
            uint8_t* const b = a + C::A_BYTES;
            mbarrier_wait(&barriers.empty[ring.slot], ring.parity);
            mbarrier_arrive_expect(full, C::STAGE_BYTES);
            load_a<C>(a, map_a, full, work, k);
            load_b<C>(b, map_b, full, work, k, rank);
            ring.advance();
        }
        if constexpr (C::OWNED) {
            if (work.takes > 0) load_parts<C>(p, work, ring, slots, barriers, rank);
        }
    }
}

}  // namespace matmul
