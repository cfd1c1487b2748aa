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
//   NORM_AHEAD    1: the next ROWS rows are loaded before the present ones are reduced (where few CTAs fit a multiprocessor)
//
// Work. The rows are cut into `parts` runs of equal length, which the problem fixes and the grid does not. A CTA takes runs part =
//   blockIdx.x, + gridDim.x, ..., a run ROWS rows at a time. Each thread owns its columns of the run: it keeps gamma and adds dgamma and
//   dbeta up in registers, row after row, and writes them as row `part` of partial[][parts][width]. So bits depend on `parts` alone.
//   Few columns per thread and several rows at a time: with whole rows per warp the sums alone took 24 (48) registers of a thread and the
//   compiler spilled.
// Bytes. dy, x read, dx written (ADD: the residual gradient read): 3 or 4 C element sizes per row; statistics; partials 4 C (8 C) per run.
// Registers. 8 ROWS VECTORS for x and dy (ADD: 12; AHEAD: twice that), 4 VECTORS for gamma, 8 VECTORS (LAYER: 16) for the sums (bf16), about 30 the rest.
// Ordering. One barrier per ROWS rows (reduce::Team); nothing else is shared.
#include "../common/reduce.cuh"
#include "../common/vector.cuh"

constexpr bool LAYER = NORM_LAYER;
constexpr bool ADD = NORM_ADD;
constexpr int THREADS = NORM_THREADS;
constexpr int VECTORS = NORM_VECTORS;
constexpr int ROWS = NORM_ROWS;
constexpr bool AHEAD = NORM_AHEAD;

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

struct Loaded {
    Row x[ROWS][VECTORS], dy[ROWS][VECTORS], residual[ROWS][VECTORS];
    float mean[ROWS], rstd[ROWS];
};

// Rows first .. first + ROWS - 1 of a run that ends at `stop`. Rows after the last repeat it, so that loads need no branch; nothing of
// them is added or written.
__device__ __forceinline__ void load_rows(const Problem& p, int first, int stop, Loaded& to) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int row = min(first + r, stop - 1);
        to.mean[r] = LAYER ? __ldg(p.mean + row) : 0.0f;
        to.rstd[r] = __ldg(p.rstd + row);
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            const size_t at = static_cast<size_t>(row) * p.width + (thread + k * THREADS) * N;
            to.x[r][k].clear();
            to.dy[r][k].clear();
            if ((thread + k * THREADS) * N < p.width) {
                to.x[r][k].load(p.x + at);
                to.dy[r][k].load(p.dy + at);
                if (ADD) to.residual[r][k].load(p.residual + at);
            }
        }
    }
}

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
        Loaded now;
        if (part * p.run < stop) load_rows(p, part * p.run, stop, now);
        for (int first = part * p.run; first < stop; first += ROWS) {
            Loaded next;
            if (AHEAD && first + ROWS < stop) load_rows(p, first + ROWS, stop, next);
            float means[ROWS * SUMS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const bool real = first + r < stop;
#pragma unroll
                for (int s = 0; s < SUMS; ++s) means[r * SUMS + s] = 0.0f;
#pragma unroll
                for (int k = 0; k < VECTORS; ++k) {
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        const float xhat = (LAYER ? now.x[r][k][i] - now.mean[r] : now.x[r][k][i]) * now.rstd[r];
                        const float g = now.dy[r][k][i] * gamma[k][i];
                        means[r * SUMS] += g * xhat;
                        if (LAYER) means[r * SUMS + SUMS - 1] += g;
                        if (real) {
                            sums[0][k][i] += now.dy[r][k][i] * xhat;
                            if (LAYER) sums[SUMS - 1][k][i] += now.dy[r][k][i];
                        }
                    }
                    now.x[r][k].unpack_anew();
                    now.dy[r][k].unpack_anew();
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
                                const float xhat = (LAYER ? now.x[r][k][i] - now.mean[r] : now.x[r][k][i]) * now.rstd[r];
                                const float g = now.dy[r][k][i] * gamma[k][i];
                                dx[i] = now.rstd[r] * ((LAYER ? g - shift : g) - xhat * along);
                                if (ADD) dx[i] += now.residual[r][k][i];
                            }
                            Row out;
                            out.set(dx);
                            out.store(p.dx + static_cast<size_t>(first + r) * p.width + column);
                        }
                    }
                }
            }
            if (AHEAD) {
                now = next;
            } else if (first + ROWS < stop) {
                load_rows(p, first + ROWS, stop, now);
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
