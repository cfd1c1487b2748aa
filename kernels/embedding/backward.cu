// Embedding backward: dtable[id] = sum of dy[n] over the n with ids[n] = id, in a fixed order of additions; rows of ids that do not occur
// are written as zeros, or left alone where the gradient is added.
//
// Compile-time parameters
//   EMBEDDING_F32      dy 0: bf16;  1: fp32
//   EMBEDDING_OUT      dtable 0: bf16;  1: fp32;  2: fp32, added to what is there
//   EMBEDDING_VECTORS  vectors of 16 bytes of a row that a lane of embedding_sum holds: a slab is 32 * VECTORS * (8 or 4) columns
//
// Four launches, after the host zeroed `header`, `counts` and `done`:
//   embedding_place  a thread per n: slot = counts[id]++ (integer atomics: which n gets which slot is not fixed); slots below CAPACITY are
//                    kept in bucket[id][slot]; the n that gets slot CAPACITY puts id on the list of long ids.
//   embedding_order  a CTA per long id: reads all ids in order and writes the n of that id, in order, to its part of `ordered`. It cuts
//                    them into pieces of PIECE and puts those on a list. (Parts and pieces are handed out by integer atomics; where they
//                    lie does not matter to the bits.)
//   embedding_sum_long  item = (piece, slab of 32 vectors): 32 warps of a CTA add runs of PIECE / 32, then warps 0, 1, 2, ... are added in
//                    that order. Where an id has several pieces, their sums go to `partial`, and the CTA that finishes the id's last one
//                    (an integer atomic) adds them in the order of the pieces.
//   embedding_sum    a warp per (other id, slab): it sorts the bucket's n (at most CAPACITY) in registers, so that the order of slots does
//                    not matter, and adds their rows in that order. An id out of range is in no bucket (the forward pass made its row NaN).
//                    It writes rows that embedding_sum_long does not, so it may run beside it: programmatic launch, and it waits for
//                    the other only before it ends.
//   The order of additions depends on the ids alone: increasing n, in runs of PIECE / 32 and PIECE if the id occurs more than CAPACITY times.
//
// Bytes. dy once, dtable once (OUT 2: twice), ids once, and per long id once more; buckets 8 bytes per n.
// Registers. embedding_sum: 8 VECTORS sums and two rows in flight of 4 VECTORS. Static shared memory: 32 KB for the runs of 32 warps.
// Stores. A lane's 8 sums are two fp32 vectors; neighbouring lanes swap one, so that a warp's stores fill whole sectors.
// Ordering. Launches of one stream follow one another (place, order, sum_long), and embedding_sum starts after order has ended.
//   embedding_order: warps write their counts, __syncthreads, all read them, __syncthreads before they are rewritten.
//   embedding_sum_long: warps write their sums, __syncthreads, threads add them, __syncthreads before the next item rewrites them. Sums of
//   pieces: every thread writes, __threadfence, __syncthreads, then thread 0 counts the piece as done; whoever counts the last one saw the
//   fences of the others before (their counts came before its own), fences itself, and reads past L1.
#include "../common/fence.cuh"
#include "../common/vector.cuh"

constexpr int OUT = EMBEDDING_OUT;
constexpr int VECTORS = EMBEDDING_VECTORS;
constexpr int CAPACITY = 64;
constexpr int SUM_THREADS = 64;  // a long bucket holds up few others
constexpr int LONG_THREADS = 1024;
constexpr int PIECE = 256;
constexpr int SCAN = 64;  // rounds of 32 ids that a warp of embedding_order looks at between barriers

using T = vec::Element<EMBEDDING_F32 != 0>::type;
constexpr int N = vec::PER<T>;
using Pack = vec::Group<T, N>;
using Out = vec::Element<OUT != 0>::type;
using OutPack = vec::Group<Out, N>;

struct Header {
    int longs;   // ids on the list
    int handed;  // places of `ordered` handed out
    int pieces;  // pieces on the list
};

struct Problem {
    const T* dy;
    const int* ids;
    Out* dtable;
    int* counts;       // [vocabulary]
    int* bucket;       // [vocabulary][CAPACITY]
    int* long_id;      // [count / CAPACITY + 1]
    int* long_at;      // the same: first place in `ordered`
    int* long_first;   // the same: first piece
    int* piece_of;     // [count / PIECE + count / CAPACITY + 2] number of the long id
    int* ordered;      // [count]
    int* done;         // [count / CAPACITY + 1][slabs of 32 vectors] finished pieces
    float* partial;    // [as piece_of][width]
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
    __shared__ int part;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32, warp = thread / 32;
    const int longs = p.header->longs;
    for (int item = static_cast<int>(blockIdx.x); item < longs; item += static_cast<int>(gridDim.x)) {
        const int id = p.long_id[item];
        if (warp == 0) {
            const int count = p.counts[id], pieces = (count + PIECE - 1) / PIECE;
            int first = 0;
            if (lane == 0) {
                part = atomicAdd(&p.header->handed, count);
                first = atomicAdd(&p.header->pieces, pieces);
                p.long_at[item] = part;
                p.long_first[item] = first;
            }
            first = __shfl_sync(0xffffffffu, first, 0);
            for (int piece = lane; piece < pieces; piece += 32) p.piece_of[first + piece] = item;
        }
        __syncthreads();
        int at = part;
        // warp w looks at 32 SCAN neighbours, 32 at a time; lane t keeps which of round t (and t + 32) are of this id
        for (int base = 0; base < p.count; base += 1024 * SCAN) {
            const int start = base + warp * 32 * SCAN;
            uint32_t found[SCAN / 32];
            int mine = 0;
#pragma unroll
            for (int half = 0; half < SCAN / 32; ++half) {
                found[half] = 0;
#pragma unroll
                for (int t0 = 0; t0 < 32; t0 += 16) {
                    const int first = start + (half * 32 + t0) * 32 + lane;
                    int here[16];
#pragma unroll
                    for (int t = 0; t < 16; ++t) here[t] = __ldg(p.ids + min(first + 32 * t, p.count - 1));
#pragma unroll
                    for (int t = 0; t < 16; ++t) {
                        const uint32_t votes = __ballot_sync(0xffffffffu, first + 32 * t < p.count && here[t] == id);
                        mine += __popc(votes);
                        if (lane == t0 + t) found[half] = votes;
                    }
                }
            }
            if (lane == 0) warp_count[warp] = mine;
            __syncthreads();
            int place = at, total = 0;
#pragma unroll
            for (int w = 0; w < 32; ++w) {
                const int c = warp_count[w];
                if (w < warp) place += c;
                total += c;
            }
            if (mine > 0) {
#pragma unroll
                for (int half = 0; half < SCAN / 32; ++half) {
#pragma unroll 4
                    for (int t = 0; t < 32; ++t) {
                        const uint32_t votes = __shfl_sync(0xffffffffu, found[half], t);
                        if (votes >> lane & 1) p.ordered[place + __popc(votes & ((1u << lane) - 1))] = start + (half * 32 + t) * 32 + lane;
                        place += __popc(votes);
                    }
                }
            }
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

__device__ __forceinline__ void write_four(Out* to, float (&four)[4]) {
    vec::Group<float, 4> out;
    if (OUT == 2) {
        out.load(reinterpret_cast<float*>(to));
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = out[i] + four[i];
    }
    out.set(four);
    out.store(reinterpret_cast<float*>(to));
}

// Writes the sums of a lane's columns column .. column + N - 1 of a row; all lanes of the warp take part, those beyond the width write nothing.
__device__ __forceinline__ void write_row(Out* row, int column, int width, float (&sum)[N]) {
    if constexpr (OUT == 0) {
        OutPack out;
        out.set(sum);
        if (column < width) out.store(row + column);
    } else if constexpr (N == 4) {
        float four[4] = {sum[0], sum[1], sum[2], sum[3]};
        if (column < width) write_four(row + column, four);
    } else {
        const bool odd = threadIdx.x % 2 == 1;
        float low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, odd ? sum[i] : sum[4 + i], 1);
            low[i] = odd ? other : sum[i];
            high[i] = odd ? sum[4 + i] : other;
        }
        // the pair's 16 columns in order: low of the even lane, low of the odd, high of the even, high of the odd
        const int pair = odd ? column - 8 : column, shift = odd ? 4 : 0;
        if (pair < width) write_four(row + pair + shift, low);
        if (pair + 8 < width) write_four(row + pair + 8 + shift, high);
    }
}

__device__ __forceinline__ void write_one(Out* to, float sum) {
    if constexpr (OUT == 0) {
        *to = vec::from_float<Out>(sum);
    } else {
        float* const target = reinterpret_cast<float*>(to);
        *target = OUT == 2 ? *target + sum : sum;
    }
}

extern "C" __global__ void __launch_bounds__(LONG_THREADS, 1) embedding_sum_long(const __grid_constant__ Problem p) {
    constexpr int SLAB = 32 * N;
    constexpr int RUN = PIECE / 32;
    __shared__ float sums[32][SLAB];
    __shared__ int last;
    ptx::grid_dependency_launch();
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32, warp = thread / 32;
    const int slabs = (p.width + SLAB - 1) / SLAB;
    const int items = p.header->pieces * slabs;
    for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
        const int number = p.piece_of[item / slabs], slab = item % slabs;
        const int id = p.long_id[number], first = p.long_first[number];
        const int piece = item / slabs - first;
        const int all = p.counts[id], pieces = (all + PIECE - 1) / PIECE;
        const int* const ordered = p.ordered + p.long_at[number] + piece * PIECE;
        const int count = min(PIECE, all - piece * PIECE);
        const int column = (slab * 32 + lane) * N;
        float sum[N];
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = 0.0f;
        if (column < p.width && warp * RUN < count) {
            Pack row[RUN];
#pragma unroll
            for (int r = 0; r < RUN; ++r)  // behind the last the last again, not added: loads need no branch
                row[r].load(p.dy + static_cast<size_t>(__ldg(ordered + min(warp * RUN + r, count - 1))) * p.width + column);
#pragma unroll
            for (int r = 0; r < RUN; ++r)
                if (warp * RUN + r < count) {
#pragma unroll
                    for (int i = 0; i < N; ++i) sum[i] += row[r][i];
                }
        }
#pragma unroll
        for (int i = 0; i < N; ++i) sums[warp][lane * N + i] = sum[i];
        __syncthreads();
        const int mine = slab * SLAB + thread;  // the column that this thread finishes
        const bool finishes = thread < SLAB && mine < p.width;
        Out* const to = p.dtable + static_cast<size_t>(id) * p.width + mine;
        float total = 0.0f;
        if (finishes) {
#pragma unroll
            for (int w = 0; w < 32; ++w) total += sums[w][thread];
            if (pieces == 1) {
                write_one(to, total);
            } else {
                p.partial[static_cast<size_t>(first + piece) * p.width + mine] = total;
                __threadfence();
            }
        }
        __syncthreads();
        if (pieces > 1) {
            if (thread == 0) last = atomicAdd(p.done + number * slabs + slab, 1) == pieces - 1;
            __syncthreads();
            if (last != 0 && finishes) {
                __threadfence();
                total = 0.0f;
#pragma unroll 8
                for (int q = 0; q < pieces; ++q) total += __ldcg(p.partial + static_cast<size_t>(first + q) * p.width + mine);
                write_one(to, total);
            }
        }
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
        write_row(p.dtable + static_cast<size_t>(id) * p.width, column, p.width, sum[k]);
    }
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS, VECTORS == 4 ? 10 : 13) embedding_sum(const __grid_constant__ Problem p) {
    sum_bucket(p);
    ptx::grid_dependency_wait();  // this launch ends after embedding_sum_long
}
