// Embedding backward: dtable[id] = sum of dy[n] over the n with ids[n] = id, in a fixed order of additions; rows of ids that do not occur
// are written as zeros, or left alone where the gradient is added.
//
// Compile-time parameters
//   EMBEDDING_F32      dy 0: bf16;  1: fp32
//   EMBEDDING_OUT      dtable 0: bf16;  1: fp32;  2: fp32, added to what is there
//   EMBEDDING_VECTORS  vectors of 16 bytes of a row that a lane of embedding_sum holds: a slab is 32 * VECTORS * (8 or 4) columns
//
// Four launches, after the host zeroed `counts` and `header`:
//   embedding_place  a thread per n: slot = counts[id]++ (integer atomics: which n gets which slot is not fixed); slots below CAPACITY are
//                    kept in bucket[id][slot]; the n that gets slot CAPACITY puts id on the list of long ids.
//   embedding_order  a CTA per long id: reads all ids in order and writes the n of that id, in order, to its piece of `ordered` (pieces
//                    are handed out by an integer atomic; where a piece lies does not matter to the bits).
//   embedding_sum_long  the longest work first: item = (long id, slab of 32 vectors); 32 warps of a CTA add equal contiguous runs of the
//                    bucket, then warps 0, 1, 2, ... are added in that order.
//   embedding_sum    a warp per (other id, slab): it sorts the bucket's n (at most CAPACITY) in registers, so that the order of slots does
//                    not matter, and adds their rows in that order. An id out of range is in no bucket (the forward pass made its row NaN).
//                    It writes rows that embedding_sum_long does not, so it may run beside it: programmatic launch, and it waits for
//                    the other only before it ends.
//   The order of additions depends on the ids alone: increasing n, in 32 runs if the id occurs more than CAPACITY times.
//
// Bytes. dy once, dtable once (OUT 2: twice), ids once, and per long id once more; buckets 8 bytes per n.
// Registers. embedding_sum: 8 VECTORS sums and two rows in flight of 4 VECTORS. Static shared memory: 32 KB for the runs of 32 warps.
// Ordering. Launches of one stream follow one another (place, order, sum_long), and embedding_sum starts after order has ended. embedding_order: warps write their counts,
//   __syncthreads, all read them, __syncthreads before they are rewritten. embedding_sum, long ids: warps write their sums, __syncthreads,
//   the first warps add them, __syncthreads before the next item rewrites them.
#include "../common/fence.cuh"
#include "../common/vector.cuh"

constexpr int OUT = EMBEDDING_OUT;
constexpr int VECTORS = EMBEDDING_VECTORS;
constexpr int CAPACITY = 64;
constexpr int SUM_THREADS = 256;
constexpr int LONG_THREADS = 1024;

using T = vec::Element<EMBEDDING_F32 != 0>::type;
constexpr int N = vec::PER<T>;
using Pack = vec::Group<T, N>;
using Out = vec::Element<OUT != 0>::type;
using OutPack = vec::Group<Out, N>;

struct Header {
    int longs;   // ids on the list
    int handed;  // places of `ordered` handed out
};

struct Problem {
    const T* dy;
    const int* ids;
    Out* dtable;
    int* counts;   // [vocabulary]
    int* bucket;   // [vocabulary][CAPACITY]
    int* long_id;  // [count / CAPACITY]
    int* long_at;  // the same: first place in `ordered`
    int* ordered;  // [count]
    Header* header;
    int count, vocabulary, width;
};

extern "C" __global__ void __launch_bounds__(256) embedding_place(const __grid_constant__ Problem p) {
    const int n = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    if (n >= p.count) return;
    const int id = __ldg(p.ids + n);
    if (id < 0 || id >= p.vocabulary) return;
    const int slot = atomicAdd(p.counts + id, 1);
    if (slot < CAPACITY) p.bucket[static_cast<size_t>(id) * CAPACITY + slot] = n;
    if (slot == CAPACITY) p.long_id[atomicAdd(&p.header->longs, 1)] = id;
}

extern "C" __global__ void __launch_bounds__(1024) embedding_order(const __grid_constant__ Problem p) {
    __shared__ int warp_count[32];
    __shared__ int piece;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32, warp = thread / 32;
    const int longs = p.header->longs;
    for (int item = static_cast<int>(blockIdx.x); item < longs; item += static_cast<int>(gridDim.x)) {
        const int id = p.long_id[item];
        if (thread == 0) {
            piece = atomicAdd(&p.header->handed, p.counts[id]);
            p.long_at[item] = piece;
        }
        __syncthreads();
        int at = piece;
        // thread t looks at 4 neighbours: n = base + 4 t + 0..3
        for (int base = 0; base < p.count; base += 4096) {
            int here[4], mine = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = base + 4 * thread + i;
                here[i] = n < p.count && __ldg(p.ids + n) == id ? 1 : 0;
                mine += here[i];
            }
            int before = mine;  // inclusive prefix sum over the warp
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, before, offset);
                if (lane >= offset) before += other;
            }
            if (lane == 31) warp_count[warp] = before;
            __syncthreads();
            int place = at + before - mine, total = 0;
#pragma unroll
            for (int w = 0; w < 32; ++w) {
                const int c = warp_count[w];
                if (w < warp) place += c;
                total += c;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (here[i]) p.ordered[place++] = base + 4 * thread + i;
            at += total;
            __syncthreads();
        }
    }
}

// Sorts 64 keys, lane l holding keys l and l + 32 (a bitonic network); 0x7fffffff for none.
__device__ __forceinline__ void sort64(int& low, int& high, int lane) {
#pragma unroll
    for (int size = 2; size <= 64; size *= 2) {
#pragma unroll
        for (int step = size / 2; step > 0; step /= 2) {
            if (step == 32) {  // size 64: the pair lies in one lane, ascending
                const int a = min(low, high), b = max(low, high);
                low = a;
                high = b;
            } else {
                const int other_low = __shfl_xor_sync(0xffffffffu, low, step);
                const int other_high = __shfl_xor_sync(0xffffffffu, high, step);
                const bool first = (lane & step) == 0;
                const bool up_low = (lane & size) == 0;            // key index = lane
                const bool up_high = ((lane + 32) & size) == 0;    // key index = lane + 32
                low = first == up_low ? min(low, other_low) : max(low, other_low);
                high = first == up_high ? min(high, other_high) : max(high, other_high);
            }
        }
    }
}

__device__ __forceinline__ void write_row(Out* to, float (&sum)[N]) {
    OutPack out;
    if (OUT == 2) {
        out.load(to);
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = out[i] + sum[i];
    }
    out.set(sum);
    out.store(to);
}

extern "C" __global__ void __launch_bounds__(LONG_THREADS, 1) embedding_sum_long(const __grid_constant__ Problem p) {
    __shared__ float sums[32][N][32];
    ptx::grid_dependency_launch();
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int slabs = (p.width + 32 * N - 1) / (32 * N);
    const int items = p.header->longs * slabs;
    for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
        const int id = p.long_id[item / slabs];
        const int* const ordered = p.ordered + p.long_at[item / slabs];
        const int count = p.counts[id];
        const int column = (item % slabs * 32 + lane) * N;
        const int run = (count + 31) / 32;
        const int stop = min(count, (warp + 1) * run);
        float sum[N];
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = 0.0f;
        if (column < p.width) {
            constexpr int DEEP = 8;
            int j = warp * run;
            for (; j + DEEP <= stop; j += DEEP) {
                Pack row[DEEP];
#pragma unroll
                for (int d = 0; d < DEEP; ++d) row[d].load(p.dy + static_cast<size_t>(__ldg(ordered + j + d)) * p.width + column);
#pragma unroll
                for (int d = 0; d < DEEP; ++d)
#pragma unroll
                    for (int i = 0; i < N; ++i) sum[i] += row[d][i];
            }
            for (; j < stop; ++j) {
                Pack row;
                row.load(p.dy + static_cast<size_t>(__ldg(ordered + j)) * p.width + column);
#pragma unroll
                for (int i = 0; i < N; ++i) sum[i] += row[i];
            }
        }
#pragma unroll
        for (int i = 0; i < N; ++i) sums[warp][i][lane] = sum[i];
        __syncthreads();
        if (warp == 0 && column < p.width) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float total = 0.0f;
#pragma unroll 8
                for (int w = 0; w < 32; ++w) total += sums[w][i][lane];
                sum[i] = total;
            }
            write_row(p.dtable + static_cast<size_t>(id) * p.width + column, sum);
        }
        __syncthreads();
    }
}

__device__ __forceinline__ void sum_bucket(const Problem& p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const long long item = static_cast<long long>(blockIdx.x) * (SUM_THREADS / 32) + threadIdx.x / 32;
    const int slabs = (p.width + 32 * VECTORS * N - 1) / (32 * VECTORS * N);
    const int id = static_cast<int>(item / slabs);
    if (id >= p.vocabulary) return;
    const int start = (static_cast<int>(item % slabs) * VECTORS * 32 + lane) * N;
    // the bucket is read before its length is known: two loads in flight instead of one after the other
    const int* const bucket = p.bucket + static_cast<size_t>(id) * CAPACITY;
    const int count = __ldg(p.counts + id);
    int low = __ldg(bucket + lane), high = 0x7fffffff;
    if (count > CAPACITY || (OUT == 2 && count == 0)) return;
    if (lane >= count) low = 0x7fffffff;
    if (count > 32 && lane + 32 < count) high = __ldg(bucket + lane + 32);
    if (count > 1) sort64(low, high, lane);
    float sum[VECTORS][N];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
#pragma unroll
        for (int i = 0; i < N; ++i) sum[k][i] = 0.0f;
    for (int j = 0; j < count; j += 2) {
        const int n0 = __shfl_sync(0xffffffffu, j < 32 ? low : high, j % 32);
        const int n1 = __shfl_sync(0xffffffffu, j + 1 < 32 ? low : high, (j + 1) % 32);
        const bool second = j + 1 < count;
        Pack a[VECTORS], b[VECTORS];
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            const int column = start + k * 32 * N;
            if (column < p.width) {
                a[k].load(p.dy + static_cast<size_t>(n0) * p.width + column);
                if (second) b[k].load(p.dy + static_cast<size_t>(n1) * p.width + column);
            }
        }
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            if (start + k * 32 * N < p.width) {
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    sum[k][i] += a[k][i];
                    if (second) sum[k][i] += b[k][i];
                }
            }
        }
    }
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        const int column = start + k * 32 * N;
        if (column < p.width) write_row(p.dtable + static_cast<size_t>(id) * p.width + column, sum[k]);
    }
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS, 3) embedding_sum(const __grid_constant__ Problem p) {
    sum_bucket(p);
    ptx::grid_dependency_wait();  // this launch ends after embedding_sum_long
}
