// What the loss takes beside the products of its head, whose logits are never normalised in memory. Rows of x [N, C], weight [V, C], bf16.
//
//   anchors:  a_i = x_i . w_t, t the target of row i: inf where it is ignored, NaN where it is no column.
//   product:  P_ij = e^(x_i . w_j - a_i) (kernels/gemm, ROWS powers) and sums of it over tiles of columns. So P_it = 1.
//   finish:   Z_i = sum_j P_ij;  lse_i = a_i + log Z_i;  loss_i = log Z_i + z lse_i^2;  s_i = (1 + 2 z lse_i) / Z_i.
//             The gradient of the logits is g_ij = s_i P_ij - [j = t]. Writes s_i, s_i x_i, f_i = s_i - 1 (that is g_it), and 0 in place of P_it.
//   products: dx_i = s_i (P w)_i + f_i w_t (ROWS blend);  dw = P^T (s x).
//   targets:  dw_t += f_i x_i, the rows of a column in their order (kernels/embedding/backward.cu).
//
// So the matrix of logits crosses memory once as it is made, and once for each product of its gradient. The gradient at the target, which is
//   the largest, is never rounded. bf16 keeps 8 bits of a power, whatever its size, where it would keep 8 of a logit.
// Range. P fits where the loss is not beyond log 2^80 = 55.4. A row whose sum is greater, or no number, is made anew: its logits, to bf16,
//   by dot products of this kernel, then g itself with s_i = 1. Rows that nothing can be made of (a target that is no column, logits that are
//   not finite) have loss NaN, so that the step's finite flag falls.
//
// Compile-time: none. Any C that is a multiple of 8.
// Work. head_anchor: a warp for a row. head_finish: a CTA for 32 rows; sums of tiles by 8 warps, each a row to a lane, added in the order of
//   warps. A row that is made anew takes the whole CTA: a warp for 4 columns at a time.
// Bytes of head_anchor: 4 N C; of head_finish: 4 N C + 4 N V / 256.
// Ordering. Of a CTA: shared rows are written before a barrier and read behind it; a row that is made anew is written by the warps as logits,
//   and read behind a barrier as such by the threads that make the gradient of it.
#include "../common/math.cuh"
#include "../common/reduce.cuh"
#include "../common/vector.cuh"

using vec::Bf16;
constexpr int N = vec::PER<Bf16>;
using Pack = vec::Group<Bf16, N>;
constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int ROWS = 32;     // of a CTA at a time
constexpr int COLUMNS = 4;   // of a warp at a time, where a row is made anew
constexpr float MOST = 0x1p80f;  // the greatest sum of powers

struct Head {
    const Bf16* x;        // [rows, width]
    const Bf16* weight;   // [vocabulary, width]
    const int* targets;   // [rows]
    float* anchors;       // [rows]
    Bf16* powers;         // P [rows, vocabulary], `stride` elements from row to row
    const float* sums;    // [tiles, rows]
    float* scale;         // s [rows]
    float* factors;       // f [rows]
    Bf16* scaled;         // s x [rows, width]
    float* loss;          // [rows]
    long long stride;
    int rows, vocabulary, width, tiles, ignore;
    float z;
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float nothing() { return __int_as_float(0x7fffffff); }

// This lane's part of the dot products of x with COUNT rows of the weight, `width` apart, as far as there are `count`.
template <int COUNT>
__device__ __forceinline__ void dots(const Bf16* x, const Bf16* weight, int width, int count, int lane, float (&sum)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = 0.0f;
    for (int c = lane * N; c < width; c += 32 * N) {
        Pack a;
        a.load<vec::Cache::keep>(x + c);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            Pack b;
            b.clear();
            if (i < count) b.load<vec::Cache::keep>(weight + static_cast<size_t>(i) * width + c);
#pragma unroll
            for (int e = 0; e < N; ++e) sum[i] += a[e] * b[e];
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = reduce::warp_sum(sum[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS) head_anchor(const __grid_constant__ Head p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int step = static_cast<int>(gridDim.x) * WARPS;
    for (int row = static_cast<int>(blockIdx.x) * WARPS + static_cast<int>(threadIdx.x) / 32; row < p.rows; row += step) {
        const int target = __ldg(p.targets + row);
        float sum[1] = {target == p.ignore ? infinity() : nothing()};
        if (target != p.ignore && target >= 0 && target < p.vocabulary)
            dots<1>(p.x + static_cast<size_t>(row) * p.width, p.weight + static_cast<size_t>(target) * p.width, p.width, 1, lane, sum);
        if (lane == 0) p.anchors[row] = sum[0];
    }
}

// Makes row `row` anew: the gradient of its logits in place of powers, and its loss.
__device__ __forceinline__ void make_anew(const Head& p, int row, float (&shared)[2][WARPS]) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int target = __ldg(p.targets + row);
    Bf16* const to = p.powers + static_cast<size_t>(row) * p.stride;
    float top = -infinity(), total = 0.0f;
    for (int column = warp * COLUMNS; column < p.vocabulary; column += WARPS * COLUMNS) {
        float x[COLUMNS];
        const int count = min(COLUMNS, p.vocabulary - column);
        dots<COLUMNS>(p.x + static_cast<size_t>(row) * p.width, p.weight + static_cast<size_t>(column) * p.width, p.width, count, lane, x);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            if (i >= count) continue;
            x[i] = vec::rounded<Bf16>(x[i]);
            if (lane == 0) to[column + i] = vec::from_float<Bf16>(x[i]);
            if (x[i] > top) {
                total = total == 0.0f ? 0.0f : total * ptx::exp2_approx((top - x[i]) * ptx::LOG2_E);
                top = x[i];
            }
            total += ptx::exp2_approx((x[i] - (top == -infinity() ? 0.0f : top)) * ptx::LOG2_E);
        }
    }
    if (lane == 0) {
        shared[0][warp] = top;
        shared[1][warp] = total;
    }
    __syncthreads();  // also: logits have been written
    top = -infinity();
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, shared[0][w]);
    total = 0.0f;
    for (int w = 0; w < WARPS; ++w)
        if (shared[1][w] != 0.0f) total += shared[1][w] * ptx::exp2_approx((shared[0][w] - top) * ptx::LOG2_E);
    const bool valid = target >= 0 && target < p.vocabulary;
    const float log_total = logf(total), lse = top + log_total, k = 1.0f + 2.0f * p.z * lse;
    const float at_target = valid ? vec::as_float(to[target]) : nothing();
    __syncthreads();  // the target's logit has been read, and what is shared
    for (int column = static_cast<int>(threadIdx.x); column < p.vocabulary; column += THREADS) {
        const float g = column == target ? 0.0f : k * ptx::exp2_approx((vec::as_float(to[column]) - lse) * ptx::LOG2_E);
        to[column] = vec::from_float<Bf16>(g);
    }
    if (threadIdx.x == 0) {
        p.loss[row] = (top - at_target) + log_total + p.z * lse * lse;
        p.factors[row] = valid ? k * ptx::exp2_approx((at_target - lse) * ptx::LOG2_E) - 1.0f : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) head_finish(const __grid_constant__ Head p) {
    __shared__ float part[WARPS][ROWS];
    __shared__ float scale[ROWS];
    __shared__ bool anew[ROWS];
    __shared__ float statistics[2][WARPS];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    for (int first = static_cast<int>(blockIdx.x) * ROWS; first < p.rows; first += static_cast<int>(gridDim.x) * ROWS) {
        const int here = min(ROWS, p.rows - first);
        float sum = 0.0f;
        if (lane < here) {
#pragma unroll 4
            for (int tile = warp; tile < p.tiles; tile += WARPS) sum += __ldg(p.sums + static_cast<size_t>(tile) * p.rows + first + lane);
        }
        part[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && lane < here) {
            const int row = first + lane, target = __ldg(p.targets + row);
            float total = 0.0f;
            for (int w = 0; w < WARPS; ++w) total += part[w][lane];
            const float log_total = logf(total), lse = p.anchors[row] + log_total;
            const bool ignored = target == p.ignore;
            const bool sound = total <= MOST;  // no NaN is
            const float s = ignored ? 0.0f : sound ? (1.0f + 2.0f * p.z * lse) / total : 1.0f;
            if (sound && !ignored) p.powers[static_cast<size_t>(row) * p.stride + target] = vec::from_float<Bf16>(0.0f);
            p.loss[row] = ignored ? 0.0f : log_total + p.z * lse * lse;  // of rows that are made anew: again below, as the factor
            p.scale[row] = s;
            p.factors[row] = ignored ? 0.0f : s - 1.0f;
            scale[lane] = s;
            anew[lane] = !ignored && !sound;
        }
        __syncthreads();
        const int vectors = p.width / N;
        for (int i = thread; i < here * vectors; i += THREADS) {
            const int row = i / vectors;
            const size_t at = (static_cast<size_t>(first + row) * vectors + i % vectors) * N;
            Pack x;
            x.load(p.x + at);
            float value[N];
#pragma unroll
            for (int e = 0; e < N; ++e) value[e] = scale[row] == 0.0f ? 0.0f : x[e] * scale[row];  // 0 times inf must be 0
            x.set(value);
            x.store(p.scaled + at);
        }
        for (int row = 0; row < here; ++row) {
            if (!anew[row]) continue;  // the same for all threads
            make_anew(p, first + row, statistics);
        }
        __syncthreads();  // what is shared has been read
    }
}
