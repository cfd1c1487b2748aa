// Thread-block clusters: rank, cluster-wide barrier.
#pragma once
#include <cstdint>

namespace ptx {

// Rank of this CTA in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Arrives at the cluster barrier, releasing this thread's earlier writes.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

// Waits until every thread of the cluster has arrived, acquiring their writes.
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Full cluster barrier: all threads of all CTAs.
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

}  // namespace ptx
