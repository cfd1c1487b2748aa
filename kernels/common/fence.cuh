// Ordering and synchronisation inside a CTA: named barriers, proxy fences, register budgets.
#pragma once
#include <cstdint>

namespace ptx {

// Address of a shared-memory object in the shared window (32 bits), as PTX operands want it.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Index of this warp, made uniform so that branches on it are uniform too.
__device__ __forceinline__ uint32_t warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

// Waits until `threads` threads (a multiple of 32) have arrived at named barrier `id` (1..15; 0 is __syncthreads), and joins them.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at named barrier `id` without waiting; `threads` counts arrivers and waiters together.
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Makes this thread's earlier ordinary shared-memory accesses visible to the async proxy (TMA, wgmma) of later operations.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders what this thread saw written to global memory before its later asynchronous copies from there.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Raises this warpgroup's registers per thread to N (multiple of 8, 24..256). Needs __launch_bounds__(threads, 1).
template <int N>
__device__ __forceinline__ void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Lowers this warpgroup's registers per thread to N and returns the rest to the pool.
template <int N>
__device__ __forceinline__ void registers_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Programmatic dependent launch: waits until the grids that this one depends on have finished and their writes are visible.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Programmatic dependent launch: lets the next grid start its prologue now.
__device__ __forceinline__ void grid_dependency_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace ptx
