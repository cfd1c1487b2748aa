// Stores of what this launch does not read again: they leave L2 first, so that lines still to be filled or read stay there. A result larger
// than L2 is written back while the launch runs anyway; a smaller one stays until something else needs the room.
#pragma once
#include "vector.cuh"

namespace vec {

__device__ __forceinline__ void store16_once(void* p, uint4 r) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w) : "memory");
}

__device__ __forceinline__ void store8_once(void* p, uint2 r) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(r.x), "r"(r.y) : "memory");
}

// The address is a multiple of 16 bytes.
template <typename T, int N>
__device__ __forceinline__ void store_once(T* p, const Group<T, N>& v) {
    static_assert(Group<T, N>::WORDS == 4, "16 bytes");
    store16_once(p, make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
}

}  // namespace vec
