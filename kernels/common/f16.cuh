// IEEE half precision in pairs: two neighbouring elements in one 32-bit register, the one at the lower address in the lower half.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

namespace ptx {

constexpr uint32_t F16_INFINITY = 0x7c007c00u;        // in both halves
constexpr uint32_t F16_MINUS_INFINITY = 0xfc00fc00u;

// Two floats as a pair, each rounded to the nearest even; beyond 65,504 infinite.
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The halves of a pair as floats (exact).
__device__ __forceinline__ float f16_low(uint32_t packed) { return __half2float(__ushort_as_half(static_cast<unsigned short>(packed))); }
__device__ __forceinline__ float f16_high(uint32_t packed) { return __half2float(__ushort_as_half(static_cast<unsigned short>(packed >> 16))); }

// The smaller of two pairs, half by half; a NaN loses.
__device__ __forceinline__ uint32_t min_f16(uint32_t a, uint32_t b) {
    uint32_t m;
    asm("min.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    return m;
}

}  // namespace ptx
