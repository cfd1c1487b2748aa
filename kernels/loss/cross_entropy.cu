// Softmax cross entropy over rows of bf16 logits [N, V], in one read and one write of the logits. Statistics are fp32.
//   lse = log sum exp x;  loss = lse - x[target] + z lse^2, 0 where the target is ignored;
//   x <- dloss (exp(x - lse) (1 + 2 z lse) - [column = target]), 0 where ignored.
//   A target that is neither a column nor ignored makes loss NaN, so that the step's finite flag falls.
//
// Compile-time parameters
//   LOSS_GRADIENT   0: loss and lse only;  1: gradients too, written over the logits
//   LOSS_THREADS    threads of a CTA, which takes a row at a time
//   LOSS_LANES      lanes that a row is dealt to; they decide its bits. THREADS, or without gradients up to four times as many: a thread
//                   then keeps the running statistics of lanes t, t + THREADS, ... apart, so that narrow CTAs give the bits of wide ones
//   LOSS_SHARED     vectors of 16 bytes that each thread keeps in shared memory (with gradients)
//   LOSS_BLOCKS     CTAs that should fit a multiprocessor (caps registers)
//   LOSS_REGISTERS  vectors that each thread keeps in registers (with gradients): V <= THREADS * (SHARED + REGISTERS) * 8
//
// Work. Rows blockIdx.x, + gridDim.x, ...; lane l owns vectors l, l + LANES, ... of every row. With gradients the first SHARED of them lie
//   in slots of shared memory that no other thread touches, the rest in registers. Copies of the first row run into the slots
//   asynchronously (cp.async, the whole row in flight); the thread follows them with a running maximum and sum; the CTA combines; the
//   thread walks its slots again, writes gradients, and refills each slot with the next row as soon as it is read. So memory is read and
//   written at once and each logit crosses the chip once. A row's bits depend on LANES alone, which V decides.
//   Without gradients the row streams, DEEP vectors in flight with the next DEEP on their way, those of the next row at the end; where
//   there are many rows at a time in narrow CTAs, the end of one hides behind the others.
// Ragged V. The last vector is copied in part (zeros after it), counted in part, written element by element: padding is left alone.
// Bytes. 2 V per row; with gradients 4 V.
// Shared memory. 16 THREADS SHARED bytes + 16 for every 32 lanes. Registers: 4 REGISTERS + about 30; at 1024 threads at most 64.
// Ordering. Slots are private: cp.async.wait_group orders a thread's copies before its reads, and a refill is issued after the value
//   read has been used. Row statistics: warps write (maximum, sum) to slots of parity row % 2, __syncthreads, all read them: the next
//   row writes the other parity, and the one after comes behind the next row's barrier, so one barrier per row is enough.
//   The target's logit is read from global memory by every thread before that barrier; gradients are written after it.
#include "../common/copy.cuh"
#include "../common/math.cuh"
#include "../common/reduce.cuh"
#include "../common/vector.cuh"

constexpr bool GRADIENT = LOSS_GRADIENT;
constexpr int THREADS = LOSS_THREADS;
constexpr int SHARED = LOSS_SHARED;
constexpr int REGISTERS = LOSS_REGISTERS;
constexpr int LANES = LOSS_LANES;
constexpr int PER = LANES / THREADS;  // lanes of a thread
constexpr int WARPS = THREADS / 32;
constexpr int GROUP = 2;  // slots per asynchronous group
constexpr int GROUPS = (SHARED + GROUP - 1) / GROUP;
constexpr int DEEP = 4;   // vectors in flight without gradients
static_assert(PER * THREADS == LANES && LANES <= 1024 && DEEP % PER == 0 && (!GRADIENT || PER == 1), "lanes of a thread");

using vec::Bf16;
constexpr int N = vec::PER<Bf16>;
using Pack = vec::Group<Bf16, N>;

struct Problem {
    Bf16* logits;
    const int* targets;
    float* loss;
    float* lse;
    const float* dloss;  // GRADIENT: dloss[row * dloss_stride]
    long long stride;    // elements between rows, a multiple of 8
    int rows, vocabulary, ignore, dloss_stride;
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

struct Gradient {
    float scale, base, dloss;
    int target;  // -1: none
};

// Gradients of the vector at `column`, `count` of whose elements are columns.
__device__ __forceinline__ void write_gradient(Bf16* to, Pack x, int column, int count, const Gradient& g) {
    float d[N];
    if (g.scale == 0.0f) {  // an ignored row, and 0 times inf must be 0
#pragma unroll
        for (int i = 0; i < N; ++i) d[i] = 0.0f;
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) d[i] = g.scale * power(x[i], g.base);
    }
    if (static_cast<unsigned int>(g.target - column) < N) {  // -1 - column is large
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (column + i == g.target) d[i] -= g.dloss;
    }
    if (count >= N) {
        x.set(d);
        x.store(to);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i < count) to[i] = vec::from_float<Bf16>(d[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, LOSS_BLOCKS) cross_entropy(const __grid_constant__ Problem p) {
    extern __shared__ uint4 slots[];
    __shared__ Running statistics[2][LANES / 32];
    const int thread = static_cast<int>(threadIdx.x);
    const uint32_t slot0 = static_cast<uint32_t>(__cvta_generic_to_shared(slots)) + 16 * thread;
    const int V = p.vocabulary;
    Pack kept[REGISTERS > 0 ? REGISTERS : 1];

    // vector k of this thread: first column, and how many of its elements are columns (none: 0 or less)
    const auto column_of = [&](int k) { return (thread + k * THREADS) * N; };
    const auto fetch = [&](const Bf16* row, int k) {
        const int column = column_of(k), count = min(N, V - column);
        if (count > 0) copy::copy_async(slot0 + 16 * THREADS * k, row + column, count * static_cast<int>(sizeof(Bf16)));
    };
    const auto fetch_kept = [&](const Bf16* row, int k) {
        const int column = column_of(SHARED + k);
        kept[k].clear();
        if (column < V) kept[k].load(row + column);
    };

    // vectors k .. k + DEEP - 1 of this thread; what lies behind the row is its first vector of them again, so that loads need no branch
    Pack batch[DEEP];
    const auto load_batch = [&](const Bf16* row, int k, Pack (&to)[DEEP]) {
        const int first = column_of(k) < V ? column_of(k) : 0;
#pragma unroll
        for (int d = 0; d < DEEP; ++d) to[d].load(row + (column_of(k + d) < V ? column_of(k + d) : first));
    };

    int row = static_cast<int>(blockIdx.x);
    int parity = 0;
    if (!GRADIENT && row < p.rows) load_batch(p.logits + row * p.stride, 0, batch);
    if (GRADIENT && row < p.rows) {
        const Bf16* const x = p.logits + row * p.stride;
#pragma unroll
        for (int k = 0; k < REGISTERS; ++k) fetch_kept(x, k);
#pragma unroll 1
        for (int g = 0; g < GROUPS; ++g) {
#pragma unroll 1
            for (int k = g * GROUP; k < min(SHARED, (g + 1) * GROUP); ++k) fetch(x, k);
            copy::copy_commit();
        }
    }
    for (; row < p.rows; row += static_cast<int>(gridDim.x), parity ^= 1) {
        Bf16* const x = p.logits + row * p.stride;
        const int target = __ldg(p.targets + row);
        const bool ignored = target == p.ignore;
        const bool valid = target >= 0 && target < V;
        const float at_target = valid && !ignored ? vec::as_float(x[target]) : 0.0f;
        const float dloss = GRADIENT ? __ldg(p.dloss + static_cast<size_t>(row) * p.dloss_stride) : 0.0f;  // early: it hides behind the row
        Running lanes[PER];  // lane thread + l THREADS
#pragma unroll
        for (int l = 0; l < PER; ++l) lanes[l] = Running{-__int_as_float(0x7f800000), 0.0f};
        if (GRADIENT) {
            // group g of this row has landed when at most the GROUPS - 1 - g younger ones are under way
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                switch (GROUPS - 1 - g) {  // a constant after unrolling
                    case 0: copy::copy_wait<0>(); break;
                    case 1: copy::copy_wait<1>(); break;
                    case 2: copy::copy_wait<2>(); break;
                    case 3: copy::copy_wait<3>(); break;
                    case 4: copy::copy_wait<4>(); break;
                    case 5: copy::copy_wait<5>(); break;
                    case 6: copy::copy_wait<6>(); break;
                    default: copy::copy_wait<7>(); break;
                }
#pragma unroll 2
                for (int k = g * GROUP; k < min(SHARED, (g + 1) * GROUP); ++k) {
                    const int count = V - column_of(k);
                    if (count > 0) add(lanes[0], vec::group<Bf16>(copy::read_slot(slot0 + 16 * THREADS * k)), count);
                }
            }
#pragma unroll
            for (int k = 0; k < REGISTERS; ++k) {
                const int count = V - column_of(SHARED + k);
                if (count > 0) add(lanes[0], kept[k], count);
            }
        } else {
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
        if (GRADIENT) {
            Gradient g;
            g.dloss = ignored ? 0.0f : dloss;
            g.base = lse;
            g.scale = g.dloss * (1.0f + 2.0f * p.z * lse);
            g.target = ignored ? -1 : target;
            const int next_row = row + static_cast<int>(gridDim.x);
            const Bf16* const next = p.logits + next_row * p.stride;
            const bool more = next_row < p.rows;
#pragma unroll 1
            for (int q = 0; q < GROUPS; ++q) {
#pragma unroll 2
                for (int k = q * GROUP; k < min(SHARED, (q + 1) * GROUP); ++k) {
                    const int count = V - column_of(k);
                    if (count > 0) {
                        write_gradient(x + column_of(k), vec::group<Bf16>(copy::read_slot(slot0 + 16 * THREADS * k)), column_of(k), count,
                                       g);
                        if (more) fetch(next, k);
                    }
                }
                copy::copy_commit();
            }
#pragma unroll
            for (int k = 0; k < REGISTERS; ++k) {
                const int count = V - column_of(SHARED + k);
                if (count > 0) write_gradient(x + column_of(SHARED + k), kept[k], column_of(SHARED + k), count, g);
                if (more) fetch_kept(next, k);
            }
        }
    }
}
