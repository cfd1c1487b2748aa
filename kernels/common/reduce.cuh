// Sums and maxima over warps and over teams of warps, in a fixed order: every lane gets the same bits.
#pragma once
#include <cstdint>

namespace reduce {

// Butterfly over the warp. a + b = b + a exactly, so all lanes end with the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// A team: a warp of a CTA of TEAMS warps, or a whole CTA of THREADS threads; all threads of a team call together.
//
// Ordering argument: call number n writes its warps' values to slots of parity n % 2, then __syncthreads, then reads all of them. The
// next call that writes the same slots is n + 2; a thread reaches it after barrier n + 1, at which every thread arrives after its reads of
// call n. So one barrier per call is enough.
template <int THREADS, int TEAMS, int VALUES>
struct Team {
    static constexpr int WARPS = THREADS / 32;
    static_assert(THREADS % 32 == 0 && TEAMS * THREADS <= 1024, "whole warps");
    static_assert(WARPS == 1 || TEAMS == 1, "a team of several warps is a whole CTA: its barrier is __syncthreads");
    struct Shared {
        float slot[2][WARPS][VALUES];
    };

    __device__ __forceinline__ explicit Team(Shared& shared) : shared_(shared), parity_(0) {}

    // Replaces each value by its sum over the team: butterfly in each warp, then warp 0, 1, 2, ...
    __device__ __forceinline__ void sum(float (&value)[VALUES]) {
#pragma unroll
        for (int v = 0; v < VALUES; ++v) value[v] = warp_sum(value[v]);
        if constexpr (WARPS > 1) {
            const int warp = static_cast<int>(threadIdx.x) / 32;
            if (threadIdx.x % 32 == 0) {
#pragma unroll
                for (int v = 0; v < VALUES; ++v) shared_.slot[parity_][warp][v] = value[v];
            }
            __syncthreads();
#pragma unroll
            for (int v = 0; v < VALUES; ++v) {
                float total = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) total += shared_.slot[parity_][w][v];
                value[v] = total;
            }
            parity_ ^= 1;
        }
    }

   private:
    Shared& shared_;
    int parity_;
};

}  // namespace reduce
