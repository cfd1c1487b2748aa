// The rate at which the tensor cores multiply when nothing else is in their way: the arithmetic ceiling of the perf gate.
//
// Tile shapes: each warpgroup multiplies one 64x64 tile A by one 64x256 tile B, both resident in shared memory, again and again: no loads,
//   no epilogue, no barrier in the loop. Contents are pseudo-random bf16 in [-1, 1): on zeros the chip draws less power and runs faster.
// Warp roles: 2 warpgroups (256 threads), both multiply. Shared memory: A 2 x 8 KB, B 32 KB. Registers: 128 accumulators a thread.
// Ordering: shared memory is written by ordinary stores, each thread fences towards the async proxy, then __syncthreads(); nothing writes
//   it afterwards. Each commit group is waited for two groups later, so two are always in flight.
#include <cuda_bf16.h>

#include "../common/fence.cuh"
#include "../common/wgmma.cuh"

using namespace ptx;

constexpr int A_BYTES = 64 * 128;
constexpr int B_BYTES = 256 * 128;

extern "C" __global__ void __launch_bounds__(256, 1) peak(float* out, int rounds) {
    extern __shared__ uint8_t raw[];
    uint8_t* const base = raw + ((1024 - (smem_address(raw) & 1023)) & 1023);
    uint32_t state = blockIdx.x * 256 + threadIdx.x + 1;
    for (int i = threadIdx.x; i < (2 * A_BYTES + B_BYTES) / 2; i += 256) {
        state = state * 1664525u + 1013904223u;
        reinterpret_cast<__nv_bfloat16*>(base)[i] = __float2bfloat16(static_cast<int>(state >> 8) * (1.0f / (1 << 23)) - 1.0f);
    }
    fence_async_shared();
    __syncthreads();
    const uint32_t a = smem_address(base) + threadIdx.x / 128 * A_BYTES;
    const uint32_t b = smem_address(base) + 2 * A_BYTES;
    const uint64_t a_tile = descriptor_k_major(a), b_tile = descriptor_k_major(b);
    float acc[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
    for (int round = 0; round < rounds; ++round) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            wgmma_ss<256, 0, 0>(acc, descriptor_advance(a_tile, k * 32), descriptor_advance(b_tile, k * 32), true);
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 128; ++i) sum += acc[i];
    out[blockIdx.x * 256 + threadIdx.x] = sum;  // so that nothing above is left out
}
