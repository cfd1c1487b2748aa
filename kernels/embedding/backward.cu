// Embedding backward: dtable[id] = sum of dy[n] over the n with ids[n] = id, in a fixed order of additions; rows of ids that do not occur
// are written as zeros, or left alone where the gradient is added.
//
// Compile-time parameters
//   EMBEDDING_F32      dy 0: bf16;  1: fp32
//   EMBEDDING_OUT      dtable 0: bf16;  1: fp32;  2: fp32, added to what is there
//
// Three launches, after the host zeroed `header`, `counts` and `done`:
//   embedding_place  a thread per n: slot = counts[id]++, with one integer atomic for all equal ids of a warp, which take neighbouring
//                    slots (which n gets which slot is not fixed); slots below CAPACITY are kept in bucket[id][slot]; the n that gets slot
//                    FEW puts id on the list of middle ids, slot CAPACITY on that of long ids; OUT 2: slot 0 on that of ids that occur.
//   embedding_order  a CTA per long id: reads all ids in order and writes the n of that id, in order, to its part of `ordered`. It cuts
//                    them into pieces of PIECE and puts those on a list. (Parts and pieces are handed out by integer atomics; where they
//                    lie does not matter to the bits.)
//   embedding_sum    a slab is 32 vectors of a row, one to a lane. Each warp takes, where there are any left for it,
//                    a (middle id, slab): it sorts the n of the bucket in registers, so that the order of slots does not matter, and adds
//                      their rows in that order, MANY in flight;
//                    (group of GROUP ids, slab)s: those of at most FEW rows. A group is neighbouring ids; OUT 2: neighbours on the list of
//                      ids that occur, for the others' rows are left alone. Four lanes hold the places of an id and sort them; the rows of
//                      all ids are added in one pass, SOME in flight, while rows of ids that do not occur are cleared. Places are loaded
//                      one item ahead, the counts that say which of them are there two ahead, ids from the list three ahead;
//                    a (piece, slab): the sum of its rows goes to `partial`, and the lane that finishes the last piece of its vector (an
//                      integer atomic) adds the pieces in their order.
//                    An id out of range is in no bucket (the forward pass made its row NaN). Only the pieces need embedding_order, so this
//                    runs beside it: programmatic launch, and it waits for the other before the pieces.
//   The order of additions depends on the ids alone: increasing n, in pieces of PIECE if the id occurs more than CAPACITY times. The order
//   of a list decides which warp adds up a row, never how.
//
// Bytes. dy once, dtable once (OUT 2: twice, rows that occur only), ids once, and per long id once more; of a bucket 4 bytes per n and what
//   rounds it to sectors; counts once a slab (OUT 2: those of ids that occur, and 4 bytes a slab for each on the list).
//   Of a bucket or a list only places below its count are read: what lies behind them was never written.
// Registers. embedding_sum: 8 sums and MANY (SOME) rows of 4. No shared memory there.
// Stores. A lane's 8 sums are two fp32 vectors; neighbouring lanes swap one, so that a warp's stores fill whole sectors.
// Ordering. embedding_place: all lanes of a warp live through its votes and exchanges; those without a valid id match one another and take
//   part in nothing else.
//   embedding_order starts after embedding_place has ended, so embedding_sum, which embedding_order lets start, does too.
//   embedding_order: warps write their counts, __syncthreads, all read them, __syncthreads before they are rewritten.
//   embedding_sum: what embedding_order wrote is read after griddepcontrol.wait, past L1. Pieces: a lane writes its vector's sum,
//   __threadfence, and counts it as done; whoever counts the last one saw the fences of the others before (their counts came before its
//   own), fences itself, and reads past L1. A lane reads no columns but its own, so the warps need no barrier.
#include "../common/fence.cuh"
#include "../common/vector.cuh"

constexpr int OUT = EMBEDDING_OUT;
constexpr int CAPACITY = 64;
constexpr int PIECE = 64;      // a warp's two registers, as a bucket
constexpr int FEW = 4;         // occurrences of an id that four lanes hold
constexpr int GROUP = 32 / FEW;
constexpr int SOME = OUT == 2 ? 2 : 4, MANY = 8;  // rows in flight; beside SOME = 2 what the sums are added to
constexpr int SUM_THREADS = 128;
constexpr int SCAN = 64;  // rounds of 32 ids that a warp of embedding_order looks at between barriers
constexpr int NONE = 0x7fffffff;
constexpr uint32_t ALL = 0xffffffffu;

using T = vec::Element<EMBEDDING_F32 != 0>::type;
constexpr int N = vec::PER<T>;
constexpr int SLAB = 32 * N;
using Pack = vec::Group<T, N>;
using Out = vec::Element<OUT != 0>::type;
using OutPack = vec::Group<Out, N>;

struct Header {
    int longs;    // ids on the list
    int middles;  // ids on the list: long ones too
    int handed;   // places of `ordered` handed out
    int pieces;   // pieces on the list
    int used;     // OUT 2: ids on the list: middle and long ones too
};

struct Problem {
    const T* dy;
    const int* ids;
    Out* dtable;
    int* counts;       // [vocabulary]
    int* bucket;       // [vocabulary][CAPACITY]
    int* used;         // [min(count, vocabulary)]
    int* middle_id;    // [count / (FEW + 1) + 1]
    int* long_id;      // [count / CAPACITY + 1]
    int* long_at;      // the same: first place in `ordered`
    int* long_first;   // the same: first piece
    int* piece_of;     // [count / PIECE + count / CAPACITY + 1] number of the long id
    int* ordered;      // [count]
    int* done;         // [count / CAPACITY + 1][width / N] finished pieces of a vector
    float* partial;    // [as piece_of][width]
    Header* header;
    int count, vocabulary, width;
};

__device__ __forceinline__ int lowest(uint32_t bits) { return __popc(~bits & (bits - 1)); }

extern "C" __global__ void __launch_bounds__(256) embedding_place(const __grid_constant__ Problem p) {
    const int n = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t before = (1u << lane) - 1;
    int id = n < p.count ? __ldg(p.ids + n) : -1;
    if (id < 0 || id >= p.vocabulary) id = -1;
    const uint32_t equal = __match_any_sync(ALL, id);
    const int leader = lowest(equal);
    int base = 0;
    if (id >= 0 && lane == leader) base = atomicAdd(p.counts + id, __popc(equal));
    const int slot = __shfl_sync(ALL, base, leader) + __popc(equal & before);
    if constexpr (OUT == 2) {
        const uint32_t firsts = __ballot_sync(ALL, id >= 0 && slot == 0);
        int at = 0;
        if (lane == 0 && firsts != 0) at = atomicAdd(&p.header->used, __popc(firsts));
        at = __shfl_sync(ALL, at, 0) + __popc(firsts & before);
        if (firsts >> lane & 1) p.used[at] = id;
    }
    if (id < 0) return;
    if (slot < CAPACITY) p.bucket[static_cast<size_t>(id) * CAPACITY + slot] = n;
    if (slot == FEW) p.middle_id[atomicAdd(&p.header->middles, 1)] = id;
    if (slot == CAPACITY) p.long_id[atomicAdd(&p.header->longs, 1)] = id;
}

extern "C" __global__ void __launch_bounds__(1024) embedding_order(const __grid_constant__ Problem p) {
    __shared__ int warp_count[32];
    __shared__ int part;
    ptx::grid_dependency_launch();  // embedding_sum needs embedding_place, which has ended; it waits before it needs this
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
            first = __shfl_sync(ALL, first, 0);
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
                        const uint32_t votes = __ballot_sync(ALL, first + 32 * t < p.count && here[t] == id);
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
                        const uint32_t votes = __shfl_sync(ALL, found[half], t);
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

// Sorts 64 keys, lane l holding keys l and l + 32 (a bitonic network); NONE for none.
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
                const int other_low = __shfl_xor_sync(ALL, low, step);
                const int other_high = __shfl_xor_sync(ALL, high, step);
                const bool first = (lane & step) == 0;
                const bool up_low = (lane & size) == 0;            // key index = lane
                const bool up_high = ((lane + 32) & size) == 0;    // key index = lane + 32
                low = first == up_low ? min(low, other_low) : max(low, other_low);
                high = first == up_high ? min(high, other_high) : max(high, other_high);
            }
        }
    }
}

// Sorts the keys of every four neighbouring lanes.
__device__ __forceinline__ int sort4(int key, int lane) {
#pragma unroll
    for (int size = 2; size <= 4; size *= 2) {
#pragma unroll
        for (int step = size / 2; step > 0; step /= 2) {
            const int other = __shfl_xor_sync(ALL, key, step);
            const bool up = size == 4 || (lane & size) == 0;
            key = ((lane & step) == 0) == up ? min(key, other) : max(key, other);
        }
    }
    return key;
}

// First column of vector h of four floats that a lane writes of a row, whose sums it holds from `column` on. Neighbouring lanes of 8 sums
// share 16 columns: the even lane writes the first and the third vector of them, the odd one the others.
__device__ __forceinline__ int column_of(int column, int h) {
    return N == 4 ? column : column + 8 * h - 4 * static_cast<int>(threadIdx.x % 2);
}

// What those vectors hold, where the gradient is added to it.
struct Old {
    vec::Group<float, 4> vector[N / 4];
    __device__ __forceinline__ void load(const Out* row, int column, int width) {
        if constexpr (OUT == 2) {
#pragma unroll
            for (int h = 0; h < N / 4; ++h) vector[h].load(reinterpret_cast<const float*>(row) + min(column_of(column, h), width - 4));
        }
    }
};

__device__ __forceinline__ void write_four(Out* to, float (&four)[4], const vec::Group<float, 4>& old) {
    vec::Group<float, 4> out;
    if (OUT == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = old[i] + four[i];
    }
    out.set(four);
    out.store(reinterpret_cast<float*>(to));
}

// Writes the sums of a lane's columns column .. column + N - 1 of a row; all lanes of the warp take part, those beyond the width write nothing.
__device__ __forceinline__ void write_row(Out* row, int column, int width, const float (&sum)[N], const Old& old) {
    if constexpr (OUT == 0) {
        OutPack out;
        out.set(sum);
        if (column < width) out.store(row + column);
    } else {
        float four[N / 4][4];
        const bool odd = threadIdx.x % 2 == 1;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            four[0][i] = sum[i];
            if constexpr (N == 8) {
                const float other = __shfl_xor_sync(ALL, odd ? sum[i] : sum[4 + i], 1);
                four[0][i] = odd ? other : sum[i];
                four[1][i] = odd ? sum[4 + i] : other;
            }
        }
#pragma unroll
        for (int h = 0; h < N / 4; ++h) {
            const int at = column_of(column, h);
            if (at < width) write_four(row + at, four[h], old.vector[h]);
        }
    }
}

// As write_row, by one lane alone.
__device__ __forceinline__ void write_vector(Out* to, const float (&sum)[N]) {
    if constexpr (OUT == 0) {
        OutPack out;
        out.set(sum);
        out.store(to);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float four[4] = {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]};
            vec::Group<float, 4> old;
            if constexpr (OUT == 2) old.load(reinterpret_cast<const float*>(to) + i);
            write_four(to + i, four, old);
        }
    }
}

// Writes zeros to a slab of a row.
__device__ __forceinline__ void write_zeros(Out* row, int slab, int width, int lane) {
    constexpr int PER = OUT == 0 ? N : 4;
    vec::Group<Out, PER> zeros;
    zeros.clear();
#pragma unroll
    for (int part = 0; part < N / PER; ++part) {
        const int column = slab * SLAB + (part * 32 + lane) * PER;
        if (column < width) zeros.store(row + column);
    }
}

__device__ __forceinline__ void clear(float (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = 0.0f;
}

__device__ __forceinline__ void add(float (&sum)[N], const Pack& row) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += row[i];
}

// Adds `count` rows, number l of them at the place low of lane l, number l + 32 at high, from 1 to 64. Lanes beyond the width add something.
__device__ __forceinline__ void sum_many(const Problem& p, int low, int high, int count, int column, float (&sum)[N]) {
    const T* const from = p.dy + min(column, p.width - N);
    clear(sum);
    for (int j = 0; j < count; j += MANY) {
        Pack row[MANY];
#pragma unroll
        for (int d = 0; d < MANY; ++d) {  // behind the last the last again, not added: loads need no branch
            const int at = min(j + d, count - 1);
            row[d].load(from + static_cast<size_t>(__shfl_sync(ALL, at < 32 ? low : high, at % 32)) * p.width);
        }
#pragma unroll
        for (int d = 0; d < MANY; ++d)
            if (j + d < count) add(sum, row[d]);
    }
}

__device__ __forceinline__ void sum_middle(const Problem& p, int id, int column, int lane) {
    const int* const bucket = p.bucket + static_cast<size_t>(id) * CAPACITY;
    const int count = __ldg(p.counts + id);
    if (count > CAPACITY) return;
    int low = lane < count ? __ldg(bucket + lane) : NONE;
    int high = lane + 32 < count ? __ldg(bucket + lane + 32) : NONE;
    Out* const to = p.dtable + static_cast<size_t>(id) * p.width;
    Old old;
    old.load(to, column, p.width);
    sort64(low, high, lane);
    float sum[N];
    sum_many(p, low, high, count, column, sum);
    write_row(to, column, p.width, sum, old);
}

// Of the ids of a group lane l holds number l / FEW, -1 for none, how often it occurs, and its place l % FEW.
// `used`: ids of all groups.
__device__ __forceinline__ int id_of(const Problem& p, int group, int used, int lane) {
    const int k = group * GROUP + lane / FEW;
    if (k >= used) return -1;
    return OUT == 2 ? __ldg(p.used + k) : k;
}

__device__ __forceinline__ int count_of(const Problem& p, int id) { return id >= 0 ? __ldg(p.counts + id) : FEW + 1; }

__device__ __forceinline__ int place_of(const Problem& p, int id, int count, int lane) {
    return count <= FEW && lane % FEW < count ? __ldg(p.bucket + static_cast<size_t>(id) * CAPACITY + lane % FEW) : NONE;
}

__device__ __forceinline__ void sum_group(const Problem& p, int slab, int id, int count, int place, int lane) {
    const int column = slab * SLAB + lane * N;
    const T* const from = p.dy + min(column, p.width - N);
    const auto row_of = [&](int holder) { return p.dtable + static_cast<size_t>(__shfl_sync(ALL, id, holder)) * p.width; };
    const int n = sort4(place, lane);
    uint32_t left = __ballot_sync(ALL, n != NONE);                             // rows to add, by id and then by n
    const uint32_t ends = left & (~(left >> 1) | 0x88888888u);                 // the last ones of their ids
    uint32_t absent = __ballot_sync(ALL, count == 0) & 0x11111111u;
    if (OUT == 2) absent = 0;
    float sum[N];
    clear(sum);
    int rows = __popc(left);
    do {
        Pack row[SOME];
        Old old[SOME];
        int which[SOME];
        if (rows > 0) {
#pragma unroll
            for (int d = 0; d < SOME; ++d) {  // behind the last the last again
                which[d] = lowest(left);
                if (d + 1 < rows) left &= left - 1;
                row[d].load(from + static_cast<size_t>(__shfl_sync(ALL, n, which[d])) * p.width);
                if (OUT == 2 && d < rows && ends >> which[d] & 1) old[d].load(row_of(which[d]), column, p.width);
            }
        }
        for (; absent != 0; absent &= absent - 1) write_zeros(row_of(lowest(absent)), slab, p.width, lane);
#pragma unroll
        for (int d = 0; d < SOME; ++d) {
            if (d < rows) {
                add(sum, row[d]);
                if (ends >> which[d] & 1) {
                    write_row(row_of(which[d]), column, p.width, sum, old[d]);
                    clear(sum);
                }
            }
        }
        rows -= SOME;
    } while (rows > 0);
}

__device__ __forceinline__ void sum_piece(const Problem& p, int piece, int column, int lane) {
    const int number = __ldcg(p.piece_of + piece);
    const int first = __ldcg(p.long_first + number), at = __ldcg(p.long_at + number), id = __ldg(p.long_id + number);
    const int all = __ldg(p.counts + id), begin = (piece - first) * PIECE, count = min(PIECE, all - begin);
    const int* const ordered = p.ordered + at + begin;
    const int low = __ldcg(ordered + min(lane, count - 1)), high = __ldcg(ordered + min(lane + 32, count - 1));
    float sum[N];
    sum_many(p, low, high, count, column, sum);
    if (column >= p.width) return;
    float* const part = p.partial + static_cast<size_t>(piece) * p.width + column;
#pragma unroll
    for (int i = 0; i < N; i += 4) *reinterpret_cast<float4*>(part + i) = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
    __threadfence();
    const int pieces = (all + PIECE - 1) / PIECE;
    if (atomicAdd(p.done + static_cast<size_t>(number) * (p.width / N) + column / N, 1) != pieces - 1) return;
    __threadfence();
    clear(sum);
#pragma unroll 4
    for (int q = 0; q < pieces; ++q) {
        const float4* const other = reinterpret_cast<const float4*>(p.partial + static_cast<size_t>(first + q) * p.width + column);
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 four = __ldcg(other + i / 4);
            sum[i] += four.x;
            sum[i + 1] += four.y;
            sum[i + 2] += four.z;
            sum[i + 3] += four.w;
        }
    }
    write_vector(p.dtable + static_cast<size_t>(id) * p.width + column, sum);
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS, 6) embedding_sum(const __grid_constant__ Problem p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(blockIdx.x * (SUM_THREADS / 32) + ptx::warp_index());
    const int warps = static_cast<int>(gridDim.x) * (SUM_THREADS / 32);
    const int slabs = (p.width + SLAB - 1) / SLAB;
    const int used = OUT == 2 ? __ldcg(&p.header->used) : p.vocabulary;
    const int groups = (used + GROUP - 1) / GROUP;
    const int middles = __ldcg(&p.header->middles);
    for (int item = warp; item < middles * slabs; item += warps)
        sum_middle(p, __ldg(p.middle_id + item / slabs), item % slabs * SLAB + lane * N, lane);
    const auto id_at = [&](int item) { return id_of(p, item / slabs, used, lane); };
    int id = id_at(warp), id1 = id_at(warp + warps), id2 = id_at(warp + 2 * warps);
    int count = count_of(p, id), count1 = count_of(p, id1);
    int place = place_of(p, id, count, lane);
    for (int item = warp; item < groups * slabs; item += warps) {
        const int place1 = place_of(p, id1, count1, lane), count2 = count_of(p, id2), id3 = id_at(item + 3 * warps);
        sum_group(p, item % slabs, id, count, place, lane);
        id = id1;
        id1 = id2;
        id2 = id3;
        count = count1;
        count1 = count2;
        place = place1;
    }
    ptx::grid_dependency_wait();  // from here on what embedding_order wrote
    const int pieces = __ldcg(&p.header->pieces);
    for (int item = warp; item < pieces * slabs; item += warps) sum_piece(p, item / slabs, item % slabs * SLAB + lane * N, lane);
}
