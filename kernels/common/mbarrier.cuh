// Shared-memory barriers with transaction counts. An mbarrier alternates between phases 0 and 1: a phase completes when its pending
// arrivals and its pending bytes are both zero; wait(parity) returns once the phase of that parity has completed.
#pragma once
#include <cstdint>

#include "fence.cuh"

namespace ptx {

using mbarrier_t = uint64_t;

// Prepares a barrier for `arrivals` arrivals per phase. One thread; follow with mbarrier_init_fence and a CTA (or cluster) barrier.
__device__ __forceinline__ void mbarrier_init(mbarrier_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the async proxy and to the cluster.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival (release at CTA scope).
__device__ __forceinline__ void mbarrier_arrive(mbarrier_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// One arrival at the barrier at the same offset in the CTA of rank `rank` of this cluster. Release at CTA scope only: it says that this
// thread's completed reads (wgmma, ldmatrix) are done with, and publishes no writes to the peer; a cluster-scope release costs a fence.
__device__ __forceinline__ void mbarrier_arrive_remote(mbarrier_t* barrier, uint32_t rank) {
    asm volatile(
        "{\n .reg .b32 remote;\n"
        " mapa.shared::cluster.u32 remote, %0, %1;\n"
        " mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(smem_address(barrier)),
        "r"(rank)
        : "memory");
}

// One arrival that also announces `bytes` of asynchronous copies, which must land before the phase completes.
__device__ __forceinline__ void mbarrier_arrive_expect(mbarrier_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes) : "memory");
}

// True if the phase of this parity has completed (acquire at CTA scope); may suspend the thread for a short time first.
__device__ __forceinline__ bool mbarrier_try_wait(mbarrier_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(smem_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// Waits for the phase of this parity (acquire at CTA scope).
__device__ __forceinline__ void mbarrier_wait(mbarrier_t* barrier, uint32_t parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// Place in a ring of `STAGES` slots and the parity of the current turn. A consumer starts at parity 0 (waits for the first fill); a
// producer starts at parity 1 (the slots are free at first: waiting for parity 1 of a fresh barrier returns at once).
template <int STAGES>
struct RingState {
    uint32_t slot;
    uint32_t parity;
    __device__ __forceinline__ explicit RingState(uint32_t first_parity) : slot(0), parity(first_parity) {}
    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }
};

}  // namespace ptx
