// The least by which one GPU can tell another anything: a flag in the peer's memory, back and forth. The ceiling of short collectives.
//
// Two members, grid 1, block 1; no shared memory. `own` is this member's word, `other` the peer's as this one sees it; both begin at 0.
// Turn t is that of member t % 2, which releases t at the other one; that one acquires it. A member whose peer does not come gives up.
#include "../common/peer.cuh"
#include "../common/timer.cuh"

extern "C" __global__ void hop(uint32_t* own, uint32_t* other, uint32_t me, uint32_t first, uint32_t turns, uint64_t patience) {
    const uint64_t began = ptx::global_timer();
    for (uint32_t t = first; t < first + turns; ++t) {
        if (t % 2 == me) {
            peer::store_release(other, t);
        } else {
            while (static_cast<int32_t>(peer::load_acquire(own) - t) < 0)
                if (ptx::global_timer() - began > patience) return;
        }
    }
}
