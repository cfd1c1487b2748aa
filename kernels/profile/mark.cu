// One time stamp: the device's global nanosecond timer into the next place of a ring.
//
// Grid 1, block 1; no shared memory. Marks of one stream are ordered by the stream, so the cursor needs no atomic: a mark runs after the
// work before it and before the work behind it. The timer is the same for all multiprocessors.

#include "../common/timer.cuh"

extern "C" __global__ void mark(uint64_t* ring, uint32_t* cursor, uint32_t places) {
    const uint64_t now = ptx::global_timer();
    uint32_t at = *cursor;
    ring[at % places] = now;
    *cursor = at + 1;
}
