// Sums and maxima over warps and over teams of warps, in a fixed order: every lane gets the same bits.
#pragma once
#include <cstdint>

#include "fence.cuh"

namespace reduce {

// Butterfly over the warp. a + b = b + a exactly, so all lanes end with the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Largest of the warp, by one instruction on integers of the same order. No NaN may take part.
__device__ __forceinline__ float warp_max(float x) {
    const int bits = __float_as_int(x);
    const int most = __reduce_max_sync(0xffffffffu, bits < 0 ? bits ^ 0x7fffffff : bits);
    return __int_as_float(most < 0 ? most ^ 0x7fffffff : most);
}

// A team: THREADS neighbouring threads of a CTA of TEAMS teams (a warp, several, or the whole CTA); all threads of a team call together.
//
// Ordering argument: call number n writes its warps' values to slots of parity n % 2, then the team's barrier (named barrier 1 + team;
// __syncthreads where the team is the CTA), then reads all of them. The next call that writes the same slots is n + 2; a thread reaches it
// after barrier n + 1, at which every thread of the team arrives after its reads of call n. So one barrier per call is enough.
template <int THREADS, int TEAMS, int VALUES>
struct Team {
    static constexpr int WARPS = THREADS / 32;
    static_assert(THREADS % 32 == 0 && TEAMS * THREADS <= 1024, "whole warps");
    static_assert(WARPS == 1 || TEAMS <= 15, "a named barrier for each team of several warps");
    struct Shared {
        float slot[TEAMS][2][WARPS][VALUES];
    };

    __device__ __forceinline__ explicit Team(Shared& shared) : shared_(shared), parity_(0) {}

    // Replaces each value by its sum over the team: butterfly in each warp, then warp 0, 1, 2, ...
    __device__ __forceinline__ void sum(float (&value)[VALUES]) {
#pragma unroll
        for (int v = 0; v < VALUES; ++v) value[v] = warp_sum(value[v]);
        if constexpr (WARPS > 1) {
            const int team = static_cast<int>(threadIdx.x) / THREADS;
            const int warp = static_cast<int>(threadIdx.x) / 32 - team * WARPS;
            if (threadIdx.x % 32 == 0) {
#pragma unroll
                for (int v = 0; v < VALUES; ++v) shared_.slot[team][parity_][warp][v] = value[v];
            }
            if constexpr (TEAMS > 1) {
                ptx::named_barrier_sync(1 + team, THREADS);
            } else {
                __syncthreads();
            }
#pragma unroll
            for (int v = 0; v < VALUES; ++v) {
                float total = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) total += shared_.slot[team][parity_][w][v];
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
