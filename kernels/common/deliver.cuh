// Words that one CTA of a cluster sends into the shared memory of another (or its own), and the barrier there that tells of them.
//
// Ordering. What is sent counts as bytes on the receiver's barrier, as a multicast copy does: when the phase is complete, the words lie in the
// receiver's own shared memory, and mbarrier_wait is enough. (A wait that acquires from the cluster would empty L1.) The sender waits for
// nothing and needs no fence.
#pragma once
#include <cstdint>

#include "fence.cuh"
#include "mbarrier.cuh"

namespace ptx {

// The address of a shared-memory object of this CTA at the same offset in the CTA of rank `rank` of this cluster.
__device__ __forceinline__ uint32_t cluster_address(const void* pointer, uint32_t rank) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(pointer)), "r"(rank));
    return address;
}

// Sends four words to `to` (16-byte aligned) in the CTA of rank `rank`: one arrival at `barrier` there, and the 16 bytes.
__device__ __forceinline__ void deliver(void* to, mbarrier_t* barrier, uint32_t rank, int a, int b, int c, int d) {
    const uint32_t there = cluster_address(barrier, rank);
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], 16;" ::"r"(there) : "memory");
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
                     cluster_address(to, rank)),
                 "r"(there), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

}  // namespace ptx
