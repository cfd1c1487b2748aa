// Adds the partial sums of the tiles that gemm.cu cut along K (GEMM_SPLIT), in the order of k, and writes them to C.
//
// Defines: GEMM_BM, GEMM_BN, GEMM_CLUSTER, GEMM_OUT as for gemm.cu.
// One thread adds 4 neighbouring columns of one row: reads of 16 bytes, coalesced; 256 threads cover 1024 elements of a tile.
// Grid: (BM * BN / 1024, split_tiles * CLUSTER). No shared memory, no barrier: it runs after gemm.cu in the same stream, and each
// element is summed by one thread, first partial first, so the bits do not depend on grids or timing.
#include <cuda_bf16.h>

#include "../common/bf16.cuh"
#include "../common/fence.cuh"
#include "output.cuh"
#include "raster.cuh"

using namespace matmul;

constexpr int BM = GEMM_BM;
constexpr int BN = GEMM_BN;
constexpr int CLUSTER = GEMM_CLUSTER;
constexpr Output OUT = static_cast<Output>(GEMM_OUT);

extern "C" __global__ void __launch_bounds__(256)
    split_reduce(const __grid_constant__ Problem p, void* c, long long ldc, long long batch_stride) {
    ptx::grid_dependency_wait();
    const int tile = blockIdx.y / CLUSTER;
    const int rank = blockIdx.y % CLUSTER;
    const int element = (blockIdx.x * 256 + threadIdx.x) * 4;
    const Place place = place_of(p, tile);
    const int row = (place.m * CLUSTER + rank) * BM + element / BN;
    const int column = place.n * BN + element % BN;
    if (row >= p.m || column >= p.n) return;
    const int first = run_of(p, tile * p.k_steps);
    const int last = run_of(p, (tile + 1) * p.k_steps - 1);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int unit = first; unit <= last; ++unit) {
        const size_t slot = static_cast<size_t>(slot_of(unit, tile)) * CLUSTER + rank;
        const float4 part = __ldcs(reinterpret_cast<const float4*>(p.workspace + slot * (BM * BN) + element));
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
    }
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    const size_t at = static_cast<size_t>(place.batch) * batch_stride + static_cast<size_t>(row) * ldc + column;
    if constexpr (OUT == Output::bf16) {
        __nv_bfloat16* const target = static_cast<__nv_bfloat16*>(c) + at;
        if (column + 4 <= p.n) {
            *reinterpret_cast<uint2*>(target) = make_uint2(ptx::pack_bf16(sum.x, sum.y), ptx::pack_bf16(sum.z, sum.w));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (column + i < p.n) target[i] = __float2bfloat16_rn(values[i]);
        }
    } else {
        float* const target = static_cast<float*>(c) + at;
        if (column + 4 <= p.n) {
            if constexpr (OUT == Output::f32_add) {
                const float4 old = *reinterpret_cast<const float4*>(target);
                sum = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
            }
            *reinterpret_cast<float4*>(target) = sum;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (column + i < p.n) target[i] = OUT == Output::f32_add ? target[i] + values[i] : values[i];
        }
    }
}
