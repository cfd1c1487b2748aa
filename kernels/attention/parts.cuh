// What the attention kernels share beside spans.cuh: fragments, waits, the counter of tiles.
//
// Layouts. A shared-memory tile of R rows and D columns is D/64 sub-tiles of [R][64] bf16, each row 128 bytes, 128-byte swizzle
// (16-byte chunk c of row r lies at chunk c ^ (r & 7)), which is what the copy engine writes with a box of 64 x R and what the
// matrix instruction reads. An accumulator fragment of m64nN: thread t of the warpgroup holds rows 16*(t/32) + (t%32)/4 and that
// row + 8; d[4j], d[4j+1] are columns 8j + 2*(t%4), +1 of the first row, d[4j+2], d[4j+3] the same columns of the second.
#pragma once
#include <cstdint>

#include "../common/bf16.cuh"
#include "../common/fence.cuh"
#include "../common/math.cuh"
#include "../common/matrix.cuh"
#include "../common/mbarrier.cuh"
#include "../common/tma.cuh"
#include "../common/wgmma.cuh"
#include "spans.cuh"

namespace attn {

using namespace ptx;

// ---------------------------------------------------------------- small things

// Ends a basic block: `block` (a block index, never negative) is tested in a way that the compiler cannot resolve. The assembler moves
// a wait for matrix products up to the start of its basic block, above arithmetic that was meant to run under the products.
__device__ __forceinline__ void keep_order(int block) {
    if (block < 0) __nanosleep(1);
}

// Strides in elements: batch, position, head.
struct Strides {
    long b, s, h;
};

// sum + the dot product of two runs of 8 bf16, in order.
__device__ __forceinline__ float dot8(const uint4& x, const uint4& y, float sum) {
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = fmaf(bf16_low(xs[i]), bf16_low(ys[i]), sum);
        sum = fmaf(bf16_high(xs[i]), bf16_high(ys[i]), sum);
    }
    return sum;
}

// ---------------------------------------------------------------- matrix operands

// d = A B^T over D columns. A: 64 rows of a tile with sub-tiles of 64 rows, B: N rows of a tile with sub-tiles of N rows.
template <int N, int D>
__device__ __forceinline__ void mma_abt(float (&d)[N / 2], const uint8_t* a, const uint8_t* b) {
    const uint64_t da = descriptor_k_major(smem_address(a)), db = descriptor_k_major(smem_address(b));
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        const int panel = k / 4, step = k % 4 * 32;
        wgmma_ss<N, 0, 0>(d, descriptor_advance(da, panel * 64 * 128 + step), descriptor_advance(db, panel * N * 128 + step), k > 0);
    }
}
template <int K> using Fragment = uint32_t[K / 16][4];

// d (+)= P B. P: 64 x K fragment in registers, B: K rows, N columns of a tile with sub-tiles of K rows.
template <int N, int K>
__device__ __forceinline__ void mma_pb(float (&d)[N / 2], const Fragment<K>& p, const uint8_t* b, int keep) {
    const uint64_t db = descriptor_mn_major(smem_address(b), K * 128);
#pragma unroll
    for (int k = 0; k < K / 16; ++k) wgmma_rs<N, 1>(d, p[k], descriptor_advance(db, k * 2048), k > 0 ? 1 : keep);
}
template <int K> __device__ __forceinline__ void to_bf16(Fragment<K>& p, const float (&s)[K / 2]) {
#pragma unroll
    for (int i = 0; i < K / 4; ++i) p[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

// Writes a 64 x D accumulator as bf16 into this warpgroup's 64 rows of a swizzled tile, sub-tiles of 64 rows; the thread's first row
// is scaled by s0, its second by s1.
template <int D> __device__ __forceinline__ void stage(uint8_t* tile, const float (&o)[D / 2], float s0, float s1) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = warp * 16 + lane % 16, half = lane / 16;
    const uint32_t base = smem_address(tile);
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
        stmatrix_x4(base + k / 4 * 64 * 128 + swizzle_128(row, k % 4 * 32 + half * 16),
                    pack_bf16(o[8 * k] * s0, o[8 * k + 1] * s0), pack_bf16(o[8 * k + 2] * s1, o[8 * k + 3] * s1),
                    pack_bf16(o[8 * k + 4] * s0, o[8 * k + 5] * s0), pack_bf16(o[8 * k + 6] * s1, o[8 * k + 7] * s1));
}

// Copies R rows (from row s of head h of batch b) of all D columns into a tile with sub-tiles of R rows; one thread.
template <int R, int D>
__device__ __forceinline__ void load_rows(uint8_t* tile, const TensorMap* map, mbarrier_t* full, int s, int h, int b) {
#pragma unroll
    for (int c = 0; c < D / 64; ++c) tma_load_4d(tile + c * R * 128, map, full, c * 64, s, h, b);
}
// Copies a staged tile of 64 rows out (rows outside the tensor are skipped) and waits until it has been read; one thread.
template <int D> __device__ __forceinline__ void store_rows(const TensorMap* map, const uint8_t* tile, int s, int h, int b) {
#pragma unroll
    for (int c = 0; c < D / 64; ++c) tma_store_4d(map, tile + c * 64 * 128, c * 64, s, h, b);
}

// ---------------------------------------------------------------- the counter of tiles

// Hands tiles to CTAs as they become free, so that uneven tiles balance. The producer thread takes numbers from a counter in global
// memory and passes them to its consumers through two slots: `full` (1 arrival, after the slot is written), `empty` (one lane per
// consumer warp, after __syncwarp, so that all lanes have read). A number at or beyond the count ends the CTA. The last CTA to end
// puts the counters back to zero: each CTA counts itself out after its last draw, so no draw can follow the reset.
struct Queue {
    mbarrier_t full[2], empty[2];
    int tile[2];

    __device__ __forceinline__ void init(int consumer_warps) {
        for (int s = 0; s < 2; ++s) {
            mbarrier_init(&full[s], 1);
            mbarrier_init(&empty[s], consumer_warps);
        }
    }
    __device__ __forceinline__ void give(RingState<2>& at, int t) {
        mbarrier_wait(&empty[at.slot], at.parity);
        tile[at.slot] = t;
        mbarrier_arrive(&full[at.slot]);
        at.advance();
    }
    __device__ __forceinline__ int take(RingState<2>& at) {
        mbarrier_wait(&full[at.slot], at.parity);
        const int t = *reinterpret_cast<volatile int*>(&tile[at.slot]);
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(&empty[at.slot]);
        at.advance();
        return t;
    }
    // The same for a role of one thread.
    __device__ __forceinline__ int take_alone(RingState<2>& at) {
        mbarrier_wait(&full[at.slot], at.parity);
        const int t = *reinterpret_cast<volatile int*>(&tile[at.slot]);
        mbarrier_arrive(&empty[at.slot]);
        at.advance();
        return t;
    }
    static __device__ __forceinline__ int draw(int* counters) { return gridDim.x + atomicAdd(counters, 1); }
    static __device__ __forceinline__ void leave(int* counters) {
        __threadfence();
        if (atomicAdd(counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
            counters[0] = 0;
            counters[1] = 0;
        }
    }
};

}  // namespace attn
