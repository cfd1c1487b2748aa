// Sums over the rows of a matrix: bias gradients, and the second pass of norm/backward.cu.
//
// Compile-time parameters
//   COLUMNS_ACCUMULATE   the sums (of columns_finish, and of columns_partial with one part) 0: overwrite;  1: are added to what is there
//
// columns_partial: bf16 [rows, width] -> partial[parts][width] fp32 (or, with one part, the result).
//   Work. CTA = 8 warps; a warp covers 32 vectors of 16 bytes of a row. blockIdx.x: the slab of columns; runs of rows part = blockIdx.y,
//   + gridDim.y, .... The problem fixes `parts`; warp w of a run takes rows w, w + 8, ... and adds each column in a register, eight rows
//   loaded at a time, the last few too. Then the warps' sums are added in the order 0..7 in shared memory. Bits depend on `parts` alone.
//   Bytes: the matrix once. Registers: 32 of loads, 8 sums.
//   Ordering: all warps write their sums, __syncthreads, the first warp's lanes read all of them, __syncthreads before the next run
//   rewrites.
// columns_finish: partial[sets][parts][width] -> out[set][width].
//   Work. CTA = 32 columns x 32 runs of ceil(parts / 32) rows; each thread adds its run in order, then the 32 runs are added in order.
//   Launched with programmatic dependence: it waits for the first pass before it reads.
//   Ordering: one __syncthreads between writing and reading the 32 x 32 sums.
#include "../common/fence.cuh"
#include "../common/vector.cuh"

constexpr bool ACCUMULATE = COLUMNS_ACCUMULATE;
using vec::Bf16;
constexpr int N = vec::PER<Bf16>;
constexpr int WARPS = 8;
constexpr int DEEP = 8;

__device__ __forceinline__ void put(float* out, size_t at, float value) {
    float* const target = out + at;
    *target = ACCUMULATE ? *target + value : value;
}

struct Problem {
    const Bf16* x;
    float* partial;  // [parts][width], or null: one part, written to out
    float* out;
    int rows, parts, run;
    long long width, stride;  // stride: elements between rows
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 3) columns_partial(const __grid_constant__ Problem p) {
    __shared__ float sums[WARPS][N][32];
    ptx::grid_dependency_launch();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const long long column = (static_cast<long long>(blockIdx.x) * 32 + lane) * N;
    const bool inside = column < p.width;
    for (int part = static_cast<int>(blockIdx.y); part < p.parts; part += static_cast<int>(gridDim.y)) {
        float total[N];
#pragma unroll
        for (int i = 0; i < N; ++i) total[i] = 0.0f;
        const int stop = min(p.rows, (part + 1) * p.run);
        if (inside) {
            for (int row = part * p.run + warp; row < stop; row += WARPS * DEEP) {
                vec::Group<Bf16, N> x[DEEP];
#pragma unroll
                for (int d = 0; d < DEEP; ++d)  // behind the last row the last again, not added: loads need no branch
                    x[d].load(p.x + min(row + d * WARPS, stop - 1) * p.stride + column);
#pragma unroll
                for (int d = 0; d < DEEP; ++d)
                    if (row + d * WARPS < stop)
#pragma unroll
                        for (int i = 0; i < N; ++i) total[i] += x[d][i];
            }
        }
#pragma unroll
        for (int i = 0; i < N; ++i) sums[warp][i][lane] = total[i];
        __syncthreads();
        if (warp < N) {  // warp i of the first N finishes element i of each lane's vector
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += sums[w][warp][lane];
            if (inside) {
                if (p.partial != nullptr) {
                    p.partial[part * p.width + column + warp] = sum;
                } else {
                    put(p.out, column + warp, sum);
                }
            }
        }
        __syncthreads();
    }
}

struct Finish {
    const float* partial;
    float* out[2];
    int parts, width;
};

extern "C" __global__ void __launch_bounds__(1024) columns_finish(const __grid_constant__ Finish p) {
    __shared__ float sums[32][33];
    ptx::grid_dependency_wait();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int group = static_cast<int>(threadIdx.x) / 32;
    const int column = static_cast<int>(blockIdx.x) * 32 + lane;
    const int run = (p.parts + 31) / 32;
    float total = 0.0f;
    if (column < p.width) {
        const float* const from = p.partial + static_cast<size_t>(blockIdx.y) * p.parts * p.width + column;
        const int stop = min(p.parts, (group + 1) * run);
#pragma unroll 8
        for (int part = group * run; part < stop; ++part) total += __ldcg(from + static_cast<size_t>(part) * p.width);
    }
    sums[group][lane] = total;
    __syncthreads();
    if (group == 0 && column < p.width) {
        float sum = 0.0f;
#pragma unroll
        for (int g = 0; g < 32; ++g) sum += sums[g][lane];
        put(p.out[blockIdx.y], column, sum);
    }
}
