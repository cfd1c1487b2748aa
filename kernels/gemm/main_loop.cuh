// The main loop of the GEMM: a consumer warpgroup multiplies one slot of the ring after the other into its accumulators.
#pragma once
#include "../common/fence.cuh"
#include "../common/mbarrier.cuh"
#include "../common/wgmma.cuh"
#include "config.cuh"
#include "raster.cuh"

namespace matmul {

// Lets go of a slot once this warp's products on it have retired: one arrival per warp, in each CTA of the cluster.
template <class C>
__device__ __forceinline__ void release(RingBarriers barriers, uint32_t slot, int lane) {
    if (lane < C::CLUSTER) {
        if constexpr (C::CLUSTER == 2) {
            mbarrier_arrive_remote(&barriers.empty[slot], lane);
        } else {
            mbarrier_arrive(&barriers.empty[slot]);
        }
    }
}

// acc = A B^T over the steps of `work`, for this warpgroup's rows. `slots`: shared address of the operand slots. `steps_before`: steps that
// went through the ring before these. `beside(step)` is called while the products of each of the first BESIDE steps run.
template <class C, int BESIDE, class Beside>
__device__ __forceinline__ void multiply(float (&acc)[C::MI][C::BN / 2], uint32_t slots, RingBarriers barriers, uint32_t steps_before,
                                         const Work& work, int warpgroup, int lane, const Beside& beside) {
    constexpr int PANEL_BYTES = C::PANEL_BYTES;
    constexpr bool PINGPONG = C::PINGPONG, A_MN = C::A_MN, B_MN = C::B_MN;
    uint32_t slot = steps_before % C::STAGES;
    uint32_t parity = (steps_before / C::STAGES) & 1;
    uint32_t previous = 0;
    if constexpr (PINGPONG) named_barrier_sync(TURN_BARRIER + warpgroup, 256);
    for (int step = 0; step < work.k_count; ++step) {
        mbarrier_wait(&barriers.full[slot], parity);
        const uint32_t a = slots + slot * C::STAGE_BYTES;
        const uint32_t b = a + C::A_BYTES;
        const uint32_t own = PINGPONG ? 0 : warpgroup * (C::WARPGROUP_M * 128);  // 64 rows or one panel: 8192 bytes either way
        const uint64_t a_tile = A_MN ? descriptor_mn_major(a + own, PANEL_BYTES) : descriptor_k_major(a + own);
        const uint64_t b_tile = B_MN ? descriptor_mn_major(b, PANEL_BYTES) : descriptor_k_major(b);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < C::BK / 16; ++k) {
#pragma unroll
            for (int mi = 0; mi < C::MI; ++mi) {
                wgmma_ss<C::BN, A_MN, B_MN>(acc[mi], descriptor_advance(a_tile, mi * 8192 + k * (A_MN ? 2048 : 32)),
                                            descriptor_advance(b_tile, k * (B_MN ? 2048 : 32)), step > 0 || k > 0);
            }
        }
        wgmma_commit();
        if (step > 0) {
            wgmma_wait<1>();
            release<C>(barriers, previous, lane);
        }
        if (step < BESIDE) beside(step);
        previous = slot;
        if (++slot == C::STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }
    if constexpr (PINGPONG) named_barrier_arrive(TURN_BARRIER + 1 - warpgroup, 256);
    wgmma_wait<0>();
    release<C>(barriers, previous, lane);
}

}  // namespace matmul
