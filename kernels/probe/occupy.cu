// Blocks that pass the time and say when they began and ended, which shows in what order blocks of several kernels get room.
//
// Grid any, block up to 1024: two blocks of 1024 fill a multiprocessor, so that no block of another kernel fits beside them; no shared
// memory. stamps: two words a block, ns of the device's clock.
#include "../common/timer.cuh"

extern "C" __global__ void __launch_bounds__(1024, 2) occupy(uint64_t* stamps, uint32_t ns) {
    const uint64_t began = ptx::global_timer();
    uint64_t now = began;
    while (now - began < ns) now = ptx::global_timer();
    if (threadIdx.x == 0) {
        stamps[2 * blockIdx.x] = began;
        stamps[2 * blockIdx.x + 1] = now;
    }
}
