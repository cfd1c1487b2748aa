// Small matrices between registers and shared memory: ldmatrix, stmatrix, the 128-byte swizzle.
#pragma once
#include <cstdint>

namespace ptx {

// Byte offset of (row, byte column) in a tile of 128-byte rows laid out by the TMA's 128-byte swizzle (tile 1024-byte aligned):
// the 16-byte chunk index is xored with the row index modulo 8.
__device__ __forceinline__ uint32_t swizzle_128(uint32_t row, uint32_t byte_column) {
    return row * 128 + (byte_column ^ ((row & 7) << 4));
}

// Stores four 8x8 matrices of 16-bit elements; lane l gives the row address of row l%8 of matrix l/8, register m holds the fragment of
// matrix m (row lane/4, columns 2*(lane%4), +1).
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// Loads four 8x8 matrices of 16-bit elements, the inverse of stmatrix_x4.
__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(address)
                 : "memory");
}

// Two floats to shared memory (8-byte aligned).
__device__ __forceinline__ void store_shared_f32x2(uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

}  // namespace ptx
