// The bulk tensor copy engine (TMA). Coordinates are in elements, innermost dimension first. Loads complete on an mbarrier in bytes
// (out-of-range elements are zero and count); stores and reductions complete in per-thread bulk groups and skip out-of-range elements.
// Shared-memory boxes are aligned to 128 bytes (1024 with the 128-byte swizzle).
#pragma once
#include <cstdint>

#include "fence.cuh"
#include "mbarrier.cuh"

namespace ptx {

// The 128 opaque bytes of a CUtensorMap, passed as a `const __grid_constant__` kernel parameter.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

// Fetches a descriptor ahead of its first use.
__device__ __forceinline__ void tma_prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads one box of a 3-D tensor into shared memory.
__device__ __forceinline__ void tma_load_3d(void* destination, const TensorMap* map, mbarrier_t* barrier, int x0, int x1, int x2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            smem_address(destination)),
        "l"(map), "r"(smem_address(barrier)), "r"(x0), "r"(x1), "r"(x2)
        : "memory");
}

// Loads one box of a 4-D tensor into shared memory.
__device__ __forceinline__ void tma_load_4d(void* destination, const TensorMap* map, mbarrier_t* barrier, int x0, int x1, int x2,
                                            int x3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            smem_address(destination)),
        "l"(map), "r"(smem_address(barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
        : "memory");
}

// Loads one box of a 3-D tensor into the same offset of every CTA of the cluster whose bit is set in `mask`; each destination CTA's
// barrier at the same offset receives the bytes.
__device__ __forceinline__ void tma_load_3d_multicast(void* destination, const TensorMap* map, mbarrier_t* barrier, uint16_t mask,
                                                      int x0, int x1, int x2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6}], "
        "[%2], %3;" ::"r"(smem_address(destination)),
        "l"(map), "r"(smem_address(barrier)), "h"(mask), "r"(x0), "r"(x1), "r"(x2)
        : "memory");
}

// Stores one box of a 3-D tensor from shared memory. Precede with fence_async_shared by the writers and a barrier; follow with a commit.
__device__ __forceinline__ void tma_store_3d(const TensorMap* map, const void* source, int x0, int x1, int x2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(smem_address(source)), "r"(x0), "r"(x1), "r"(x2)
                 : "memory");
}

// Stores one box of a 4-D tensor from shared memory.
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, const void* source, int x0, int x1, int x2, int x3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(smem_address(source)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
                 : "memory");
}

// Adds one box to a 3-D tensor in global memory (element type from the map). The order of several additions to one element is not
// fixed: deterministic only where each element receives one addition per launch.
__device__ __forceinline__ void tma_add_3d(const TensorMap* map, const void* source, int x0, int x1, int x2) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(smem_address(source)), "r"(x0), "r"(x1), "r"(x2)
                 : "memory");
}

// Copies `bytes` (multiple of 16, both addresses 16-byte aligned) from global to shared memory.
__device__ __forceinline__ void bulk_load(void* destination, const void* source, uint32_t bytes, mbarrier_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(destination)),
                 "l"(source), "r"(bytes), "r"(smem_address(barrier))
                 : "memory");
}

// Closes this thread's group of stores issued since the last commit.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's groups still have to read their shared-memory source (the source may then be rewritten).
template <int N>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Waits until at most N of this thread's groups are incomplete (their global writes are made).
template <int N>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace ptx
