// Memory that several GPUs see: flags, packets and vectors in a peer's memory, which NVLink maps into this one's addresses.
//
// Flags carry release and acquire at system scope. A packet is two 8-byte words of 4 bytes of payload and 4 of flag each: memory keeps 8
// bytes whole (PTX ISA, memory consistency model: vectors are their elements, in no order), so whoever sees both flags has both payloads
// and no fence is needed. Vectors are ordinary accesses; the flags around them order them.
#pragma once
#include <cstdint>

namespace peer {

// The value of a flag; what its writer wrote before it is visible to this thread's later reads.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

// Sets a flag once all that this thread wrote or saw before is visible on every GPU.
__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// A word that others write, without an order to anything else.
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* word) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// A word that others read, without an order to anything else.
__device__ __forceinline__ void store_relaxed(uint32_t* word, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// The words of a packet: each is whole, the two need not be of one moment.
__device__ __forceinline__ void load_packet(const void* p, uint64_t& low, uint64_t& high) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(p) : "memory");
}

__device__ __forceinline__ void store_packet(void* p, uint64_t low, uint64_t high) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(low), "l"(high) : "memory");
}

// 16 bytes that a flag has announced. Volatile, so that the compiler leaves it behind the wait for that flag.
__device__ __forceinline__ uint4 read16(const void* p) {
    uint4 r;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
    return r;
}

__device__ __forceinline__ void write16(void* p, uint4 r) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w) : "memory");
}

// 2 bytes, likewise.
__device__ __forceinline__ uint32_t read2(const void* p) {
    uint16_t r;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(r) : "l"(p) : "memory");
    return r;
}

__device__ __forceinline__ void write2(void* p, uint32_t value) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(static_cast<uint16_t>(value)) : "memory");
}

}  // namespace peer
