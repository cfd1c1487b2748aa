// Counts in global memory that some CTAs raise and others wait for.
#pragma once
#include <cstdint>

namespace ptx {

// A count of 32 bits; what those who raised it had written before is visible to this thread's later reads.
template <class T>
__device__ __forceinline__ T load_acquire(const T* count) {
    static_assert(sizeof(T) == 4);
    T x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(count) : "memory");
    return x;
}

// Raises a count by `x` once all that this thread wrote, or saw written, is visible on the whole GPU. It waits for that, some microseconds
// behind a burst of writes.
template <class T>
__device__ __forceinline__ void add_release(T* count, T x) {
    static_assert(sizeof(T) == 4);
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(x) : "memory");
}

}  // namespace ptx
