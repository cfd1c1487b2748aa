// bfloat16 in pairs: two neighbouring elements in one 32-bit register, the one at the lower address in the lower half.
#pragma once
#include <cstdint>

namespace ptx {

// Two floats as a pair, each rounded to the nearest even.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The halves of a pair as floats (exact).
__device__ __forceinline__ float bf16_low(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float bf16_high(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

// The larger of two pairs, half by half; a NaN loses.
__device__ __forceinline__ uint32_t max_bf16(uint32_t a, uint32_t b) {
    uint32_t m;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    return m;
}

}  // namespace ptx
