// Asynchronous copies of 16 bytes from global to shared memory (cp.async), in slots that one thread owns.
//
// Ordering. A slot belongs to the thread that copies into it: copy_wait<K> orders its copies, all but those of its K youngest groups,
// before its reads; it may refill a slot once the value it read has been used. So slots need no barrier.
#pragma once
#include <cstdint>

namespace copy {

// Copies `bytes` (1..16) to the 16-byte slot at shared address `slot`, and zeros behind them.
__device__ __forceinline__ void copy_async(uint32_t slot, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(slot), "l"(from), "r"(bytes) : "memory");
}

// Ends a group of copies; empty groups count too.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most YOUNGER groups of this thread are under way.
template <int YOUNGER>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(YOUNGER) : "memory");
}

__device__ __forceinline__ uint4 read_slot(uint32_t slot) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(slot) : "memory");
    return r;
}

}  // namespace copy
