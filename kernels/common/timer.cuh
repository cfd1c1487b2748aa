// The device's clock.
#pragma once
#include <cstdint>

namespace ptx {

// Nanoseconds of the global timer, one for all multiprocessors.
__device__ __forceinline__ uint64_t global_timer() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

}  // namespace ptx
