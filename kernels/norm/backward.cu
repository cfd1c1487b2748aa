// Backward of RMSNorm and LayerNorm: dx, and partial sums of dgamma (and dbeta), which elementwise/columns.cu adds up.
//   xhat = (x - mean) rstd;  g = dy gamma;  dx = rstd (g - mean(g) - xhat mean(g xhat)) [+ residual];  RMSNorm: without mean and mean(g).
//   dgamma = sum over rows of dy xhat;  dbeta = sum over rows of dy.
//
// Compile-time parameters
//   NORM_LAYER, NORM_F32, NORM_BLOCKS as in forward.cu
//   NORM_ADD      1: adds the gradient that comes down the residual stream to dx
//   NORM_THREADS  threads of a CTA, which spans a row
//   NORM_VECTORS  16-byte vectors of a row that each thread holds: width <= THREADS * VECTORS * (8 or 4)
//   NORM_ROWS     rows loaded and reduced together
//
// Work. The rows are cut into `parts` runs of equal length, which the problem fixes and the grid does not. A CTA takes runs part =
//   blockIdx.x, + gridDim.x, ..., a run ROWS rows at a time. Each thread owns its columns of the run: it keeps gamma and adds dgamma and
//   dbeta up in registers, row after row, and writes them as row `part` of partial[][parts][width]. So bits depend on `parts` alone.
//   Few columns per thread and several rows at a time: with whole rows per warp the sums alone took 24 (48) registers of a thread and the
//   compiler spilled.
// Bytes. dy, x read, dx written (ADD: the residual gradient read): 3 or 4 C element sizes per row; statistics; partials 4 C (8 C) per run.
// Registers. 8 ROWS VECTORS for x and dy (ADD: 12), 4 VECTORS for gamma, 8 VECTORS (LAYER: 16) for the sums (bf16), about 30 the rest.
// Ordering. One barrier per ROWS rows (reduce::Team); nothing else is shared.
#include "../common/reduce.cuh"
#include "../common/vector.cuh"

constexpr bool LAYER = NORM_LAYER;
constexpr bool ADD = NORM_ADD;
constexpr int THREADS = NORM_THREADS;
constexpr int VECTORS = NORM_VECTORS;
constexpr int ROWS = NORM_ROWS;

using T = vec::Element<NORM_F32 != 0>::type;
constexpr int N = vec::PER<T>;
constexpr int SUMS = LAYER ? 2 : 1;
using Row = vec::Group<T, N>;
using Team = reduce::Team<THREADS, 1, ROWS * SUMS>;

struct Problem {
    const T* dy;
    const T* x;
    const T* gamma;
    const float* mean;  // LAYER
    const float* rstd;
    const T* residual;  // ADD
    T* dx;
    float* partial;  // [SUMS][parts][width]: dgamma, dbeta
    int rows, width, parts, run;  // run: rows of a part, ceil(rows / parts)
    float inverse_width;
};

extern "C" __global__ void __launch_bounds__(THREADS, NORM_BLOCKS) norm_backward(const __grid_constant__ Problem p) {
    __shared__ Team::Shared shared;
    Team team(shared);
    const int thread = static_cast<int>(threadIdx.x);
    Row gamma[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const int column = (thread + k * THREADS) * N;
        gamma[k].clear();
        if (column < p.width) gamma[k].load<vec::Cache::keep>(p.gamma + column);
    }
    for (int part = static_cast<int>(blockIdx.x); part < p.parts; part += static_cast<int>(gridDim.x)) {
        float sums[SUMS][VECTORS][N];
#pragma unroll
        for (int s = 0; s < SUMS; ++s)
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
#pragma unroll
                for (int i = 0; i < N; ++i) sums[s][k][i] = 0.0f;
        const int stop = min(p.rows, (part + 1) * p.run);
        for (int first = part * p.run; first < stop; first += ROWS) {
            Row x[ROWS][VECTORS], dy[ROWS][VECTORS], residual[ROWS][VECTORS];
            float mean[ROWS], rstd[ROWS], means[ROWS * SUMS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                // rows after the last repeat it, so that loads need no branch; nothing of them is added or written
                const int row = min(first + r, stop - 1);
                mean[r] = LAYER ? __ldg(p.mean + row) : 0.0f;
                rstd[r] = __ldg(p.rstd + row);
#pragma unroll
                for (int k = 0; k < VECTORS; ++k) {
                    const size_t at = static_cast<size_t>(row) * p.width + (thread + k * THREADS) * N;
                    x[r][k].clear();
                    dy[r][k].clear();
                    if ((thread + k * THREADS) * N < p.width) {
                        x[r][k].load(p.x + at);
                        dy[r][k].load(p.dy + at);
                        if (ADD) residual[r][k].load(p.residual + at);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const bool real = first + r < stop;
#pragma unroll
                for (int s = 0; s < SUMS; ++s) means[r * SUMS + s] = 0.0f;
#pragma unroll
                for (int k = 0; k < VECTORS; ++k) {
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        const float xhat = (LAYER ? x[r][k][i] - mean[r] : x[r][k][i]) * rstd[r];
                        const float g = dy[r][k][i] * gamma[k][i];
                        means[r * SUMS] += g * xhat;
                        if (LAYER) means[r * SUMS + SUMS - 1] += g;
                        if (real) {
                            sums[0][k][i] += dy[r][k][i] * xhat;
                            if (LAYER) sums[SUMS - 1][k][i] += dy[r][k][i];
                        }
                    }
                    x[r][k].unpack_anew();
                    dy[r][k].unpack_anew();
                }
            }
            team.sum(means);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float along = means[r * SUMS] * p.inverse_width;
                const float shift = LAYER ? means[r * SUMS + SUMS - 1] * p.inverse_width : 0.0f;
                if (first + r < stop) {
#pragma unroll
                    for (int k = 0; k < VECTORS; ++k) {
                        const int column = (thread + k * THREADS) * N;
                        if (column < p.width) {
                            float dx[N];
#pragma unroll
                            for (int i = 0; i < N; ++i) {
                                const float xhat = (LAYER ? x[r][k][i] - mean[r] : x[r][k][i]) * rstd[r];
                                const float g = dy[r][k][i] * gamma[k][i];
                                dx[i] = rstd[r] * ((LAYER ? g - shift : g) - xhat * along);
                                if (ADD) dx[i] += residual[r][k][i];
                            }
                            Row out;
                            out.set(dx);
                            out.store(p.dx + static_cast<size_t>(first + r) * p.width + column);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int s = 0; s < SUMS; ++s) {
#pragma unroll
            for (int k = 0; k < VECTORS; ++k) {
                const int column = (thread + k * THREADS) * N;
                if (column < p.width) {
                    vec::Group<float, N> out;
                    out.set(sums[s][k]);
                    out.store(p.partial + (static_cast<size_t>(s) * p.parts + part) * p.width + column);
                }
            }
        }
    }
}
