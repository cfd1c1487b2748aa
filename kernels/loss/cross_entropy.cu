// Softmax cross entropy over rows of bf16 logits [N, V], in one read of the logits. Statistics are fp32. (With gradients: head.cu.)
//   lse = log sum exp x;  loss = lse - x[target] + z lse^2, 0 where the target is ignored.
//   A target that is neither a column nor ignored makes loss NaN, so that the step's finite flag falls.
//
// Compile-time parameters
//   LOSS_THREADS    threads of a CTA, which takes a row at a time
//   LOSS_LANES      lanes that a row is dealt to; they decide its bits. THREADS, or up to four times as many: a thread then keeps the running
//                   statistics of lanes t, t + THREADS, ... apart, so that narrow CTAs give the bits of wide ones
//   LOSS_BLOCKS     CTAs that should fit a multiprocessor (caps registers)
//
// Work. Rows blockIdx.x, + gridDim.x, ...; lane l owns vectors l, l + LANES, ... of every row. A row streams, DEEP vectors in flight with the
//   next DEEP on their way, those of the next row at the end; where there are many rows at a time in narrow CTAs, the end of one hides behind
//   the others. A row's bits depend on LANES alone, which V decides.
// Ragged V. The last vector is counted in part: padding is left alone.
// Bytes. 2 V per row.
// Ordering. Row statistics: warps write (maximum, sum) to slots of parity row % 2, __syncthreads, all read them: the next row writes the other
//   parity, and the one after comes behind the next row's barrier, so one barrier per row is enough.
#include "../common/math.cuh"
#include "../common/reduce.cuh"
#include "../common/vector.cuh"

constexpr int THREADS = LOSS_THREADS;
constexpr int LANES = LOSS_LANES;
constexpr int PER = LANES / THREADS;  // lanes of a thread
constexpr int WARPS = THREADS / 32;
constexpr int DEEP = 4;  // vectors in flight
static_assert(PER * THREADS == LANES && LANES <= 1024 && DEEP % PER == 0, "lanes of a thread");

using vec::Bf16;
constexpr int N = vec::PER<Bf16>;
using Pack = vec::Group<Bf16, N>;

struct Problem {
    const Bf16* logits;
    const int* targets;
    float* loss;
    float* lse;
    long long stride;  // elements between rows, a multiple of 8
    int rows, vocabulary, ignore;
    float z;
};

// Running maximum, and sum of exp(x - maximum). Empty: (-inf, 0).
struct Running {
    float top, sum;
};

// exp(x - base). Not a fused multiply-add of x and base * log2 e: its error, base * 2^-24, shows in the loss of large logits.
__device__ __forceinline__ float power(float x, float base) { return ptx::exp2_approx((x - base) * ptx::LOG2_E); }

// (top, sum) with the maximum raised to `top`; exp(-inf - -inf) counts as 0 of an empty sum.
__device__ __forceinline__ float rescaled(const Running& r, float top) {
    return r.sum == 0.0f ? 0.0f : r.sum * ptx::exp2_approx((r.top - top) * ptx::LOG2_E);
}

// Largest element of a vector, two at a time.
__device__ __forceinline__ float largest(const Pack& x) {
    const uint32_t m = ptx::max_bf16(ptx::max_bf16(x.word[0], x.word[1]), ptx::max_bf16(x.word[2], x.word[3]));
    return fmaxf(ptx::bf16_low(m), ptx::bf16_high(m));
}

// Adds the first `count` elements of a vector.
template <bool WHOLE>
__device__ __forceinline__ void add_vector(Running& r, const Pack& x, int count) {
    float top = r.top;
    if (WHOLE) {
        top = fmaxf(top, largest(x));
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i < count) top = fmaxf(top, x[i]);
    }
    if (top > r.top) {
        r.sum = rescaled(r, top);
        r.top = top;
    }
    const float base = r.top == -__int_as_float(0x7f800000) ? 0.0f : r.top;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (WHOLE || i < count) sum[i % 2] += power(x[i], base);
    r.sum += sum[0] + sum[1];
}

__device__ __forceinline__ void add(Running& r, const Pack& x, int count) {
    if (count >= N) {
        add_vector<true>(r, x, N);
    } else {
        add_vector<false>(r, x, count);
    }
}

// The maximum and the sum over the warp; all lanes get the same bits.
__device__ __forceinline__ Running combine_warp(Running r) {
    const float top = reduce::warp_max(r.top);
    return Running{top, reduce::warp_sum(rescaled(r, top))};
}

// The statistics of a row from those of its lanes: each 32 neighbouring ones, then each warp the same over those, so that all threads get
// the same.
__device__ __forceinline__ Running combine(const Running (&lanes)[PER], Running (&shared)[2][LANES / 32], int parity) {
#pragma unroll
    for (int l = 0; l < PER; ++l) {
        const Running r = combine_warp(lanes[l]);
        if (threadIdx.x % 32 == 0) shared[parity][l * WARPS + threadIdx.x / 32] = r;
    }
    __syncthreads();
    Running r{-__int_as_float(0x7f800000), 0.0f};
    if (threadIdx.x % 32 < LANES / 32) r = shared[parity][threadIdx.x % 32];
    return combine_warp(r);
}

extern "C" __global__ void __launch_bounds__(THREADS, LOSS_BLOCKS) cross_entropy(const __grid_constant__ Problem p) {
    __shared__ Running statistics[2][LANES / 32];
    const int thread = static_cast<int>(threadIdx.x);
    const int V = p.vocabulary;

    const auto column_of = [&](int k) { return (thread + k * THREADS) * N; };  // of vector k of this thread

    // vectors k .. k + DEEP - 1 of this thread; what lies behind the row is its first vector of them again, so that loads need no branch
    Pack batch[DEEP];
    const auto load_batch = [&](const Bf16* row, int k, Pack (&to)[DEEP]) {
        const int first = column_of(k) < V ? column_of(k) : 0;
#pragma unroll
        for (int d = 0; d < DEEP; ++d) to[d].load(row + (column_of(k + d) < V ? column_of(k + d) : first));
    };

    int row = static_cast<int>(blockIdx.x);
    int parity = 0;
    if (row < p.rows) load_batch(p.logits + row * p.stride, 0, batch);
    for (; row < p.rows; row += static_cast<int>(gridDim.x), parity ^= 1) {
        const Bf16* const x = p.logits + row * p.stride;
        const int target = __ldg(p.targets + row);
        const bool ignored = target == p.ignore;
        const bool valid = target >= 0 && target < V;
        const float at_target = valid && !ignored ? vec::as_float(x[target]) : 0.0f;
        Running lanes[PER];  // lane thread + l THREADS
#pragma unroll
        for (int l = 0; l < PER; ++l) lanes[l] = Running{-__int_as_float(0x7f800000), 0.0f};
        // the first batch of the row is here already; the next one, at last that of the next row, is loaded before it is added
        for (int k = 0; k * THREADS * N < V; k += DEEP) {
            Pack next[DEEP];
            const bool last = (k + DEEP) * THREADS * N >= V;
            const int of = min(last ? row + static_cast<int>(gridDim.x) : row, p.rows - 1);
            load_batch(p.logits + of * p.stride, last ? 0 : k + DEEP, next);
#pragma unroll
            for (int d = 0; d < DEEP; ++d) {
                const int count = V - column_of(k + d);
                if (count > 0) add(lanes[d % PER], batch[d], count);
            }
#pragma unroll
            for (int d = 0; d < DEEP; ++d) batch[d] = next[d];
        }
        const Running r = combine(lanes, statistics, parity);
        const float log_total = logf(r.sum);
        const float lse = r.top + log_total;
        if (thread == 0) {
            float loss = (r.top - at_target) + log_total + p.z * lse * lse;
            if (!valid) loss = __int_as_float(0x7fffffff);
            p.loss[row] = ignored ? 0.0f : loss;
            p.lse[row] = lse;
        }
    }
}
