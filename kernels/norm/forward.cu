// RMSNorm and LayerNorm forward over the last axis, bf16, optionally of a sum that is written too (the residual stream).
//   y = (x - mean) rstd gamma + beta (LayerNorm);  y = x rstd gamma (RMSNorm);  x = a + b rounded to bf16 where NORM_ADD.
//   mean and rstd (fp32, one per row) are kept for the backward pass.
//
// Compile-time parameters
//   NORM_LAYER    0: RMSNorm;  1: LayerNorm
//   NORM_ADD      1: x = a + b, written to s
//   NORM_THREADS  threads of a team, which computes one row at a time (32: a warp)
//   NORM_VECTORS  16-byte vectors of the row that each thread holds: width <= THREADS * VECTORS * 8
//   NORM_TEAMS    teams of a CTA
//   NORM_BLOCKS   CTAs that should fit a multiprocessor (caps registers)
//
// Work. Rows r = team, team + teams of the grid, ... A row is read once into registers; a row's arithmetic involves its team alone, so its
//   bits do not depend on the grid. LayerNorm takes the variance of the centred row (a second sum over registers).
// Bytes. 4 C per row (ADD: 8 C) and 4 or 8 for the statistics; gamma and beta come from L1. What is written leaves L2
//   first (common/once.cuh).
// Registers. 4 VECTORS hold the row (twice that with ADD), about 24 the rest.
// Ordering. One barrier of the team per sum (see reduce::Team); nothing else is shared.
#include "../common/once.cuh"
#include "../common/reduce.cuh"

constexpr bool LAYER = NORM_LAYER;
constexpr bool ADD = NORM_ADD;
constexpr int THREADS = NORM_THREADS;
constexpr int VECTORS = NORM_VECTORS;
constexpr int TEAMS = NORM_TEAMS;

using vec::Bf16;
constexpr int N = vec::PER<Bf16>;
using Row = vec::Group<Bf16, N>;
using Team = reduce::Team<THREADS, TEAMS, 1>;

struct Problem {
    const Bf16* a;
    const Bf16* b;  // ADD
    Bf16* s;        // ADD
    Bf16* y;
    const Bf16* gamma;
    const Bf16* beta;  // LAYER
    float* mean;    // LAYER
    float* rstd;
    int rows, width;
    float eps, inverse_width;
};

__device__ __forceinline__ void load_row(const Problem& p, int row, int thread, Row (&a)[VECTORS], Row (&b)[VECTORS]) {
    const size_t start = static_cast<size_t>(row) * p.width;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const int column = (thread + k * THREADS) * N;
        a[k].clear();
        if (ADD) b[k].clear();
        if (column < p.width) {
            a[k].load(p.a + start + column);
            if (ADD) b[k].load(p.b + start + column);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS* TEAMS, NORM_BLOCKS) norm_forward(const __grid_constant__ Problem p) {
    __shared__ Team::Shared shared;
    Team team(shared);
    const int thread = static_cast<int>(threadIdx.x) % THREADS;
    const int stride = static_cast<int>(gridDim.x) * TEAMS;
    int row = static_cast<int>(blockIdx.x) * TEAMS + static_cast<int>(threadIdx.x) / THREADS;
    Row a[VECTORS], b[VECTORS];
    if (row < p.rows) load_row(p, row, thread, a, b);
    for (; row < p.rows; row += stride) {
        const size_t start = static_cast<size_t>(row) * p.width;
        float total[1] = {0.0f};
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            if (ADD) {
                float sum[N];
#pragma unroll
                for (int i = 0; i < N; ++i) sum[i] = a[k][i] + b[k][i];
                a[k].set(sum);
                const int column = (thread + k * THREADS) * N;
                if (column < p.width) vec::store_once(p.s + start + column, a[k]);
            }
#pragma unroll
            for (int i = 0; i < N; ++i) total[0] += LAYER ? a[k][i] : a[k][i] * a[k][i];
        }
        team.sum(total);
        float mean = 0.0f;
        if (LAYER) {
            mean = total[0] * p.inverse_width;
            total[0] = 0.0f;
#pragma unroll
            for (int k = 0; k < VECTORS; ++k) {
                if ((thread + k * THREADS) * N < p.width) {
#pragma unroll
                    for (int i = 0; i < N; ++i) total[0] += (a[k][i] - mean) * (a[k][i] - mean);
                }
            }
            team.sum(total);
        }
        const float rstd = 1.0f / sqrtf(total[0] * p.inverse_width + p.eps);
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            const int column = (thread + k * THREADS) * N;
            a[k].unpack_anew();
            if (column < p.width) {
                Row gamma, beta;
                gamma.load<vec::Cache::keep>(p.gamma + column);
                if (LAYER) beta.load<vec::Cache::keep>(p.beta + column);
                float y[N];
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const float scaled = (LAYER ? a[k][i] - mean : a[k][i]) * rstd;
                    y[i] = LAYER ? scaled * gamma[i] + beta[i] : scaled * gamma[i];
                }
                Row out;
                out.set(y);
                vec::store_once(p.y + start + column, out);
            }
        }
        if (thread == 0) {
            if (LAYER) p.mean[row] = mean;
            p.rstd[row] = rstd;
        }
        if (row + stride < p.rows) load_row(p, row + stride, thread, a, b);
    }
}
