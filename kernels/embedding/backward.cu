// Embedding backward: dtable[id] (fp32) = sum of dy[n] (bf16) over the n with ids[n] = id, in a fixed order of additions; rows of ids that
// do not occur are written as zeros, or left alone where the gradient is added.
//
// Compile-time parameters
//   EMBEDDING_ACCUMULATE   dtable is 0: overwritten;  1: added to
//   EMBEDDING_FACTORS      1: row n of dy counts factors[n] times; what counts 0 times counts as 0
//
// Four launches, each of which begins to be set up beside the one before (programmatic launch):
//   embedding_clear  zeroes `header`, `counts` and `done`, which lie one behind the other.
//   embedding_place  a thread per n: slot = counts[id]++, with one integer atomic for all equal ids of a warp, which take neighbouring
//                    slots (which n gets which slot is not fixed); slots below CAPACITY are kept in bucket[id][slot]; the n that gets slot
//                    RARE puts id on the list of middle ids, slot CAPACITY on that of long ids; ACCUMULATE: slot 0 on that of ids that
//                    occur. A warp asks for room on all lists at once: one wait for three atomics.
//   embedding_order  a CTA per long id: reads all ids in order, four to a lane, and writes the n of that id, in order, to its part of
//                    `ordered`. It cuts them into pieces of PIECE and puts those on a list. (Parts and pieces are handed out by integer
//                    atomics; where they lie does not matter to the bits.)
//   embedding_sum    a slab is 32 vectors of a row, one to a lane. Each warp takes, where there are any left for it,
//                    a (middle id, slab): it sorts the n of the bucket in registers, so that the order of slots does not matter, and adds
//                      their rows in that order, ROWS in flight;
//                    (group of GROUP ids, slab)s: those of at most RARE rows. A group is neighbouring ids; ACCUMULATE: neighbours on the
//                      list of ids that occur, for the others' rows are left alone. Four lanes hold the places of an id and sort them; the
//                      rows of all ids are added in one pass, GROUP_ROWS in flight, while rows of ids that do not occur are cleared. Places
//                      are loaded one item ahead, the counts that say which of them are there two ahead, ids from the list three ahead;
//                    a (piece, slab): the sum of its rows. FAN_IN neighbouring pieces of an id are added by the warp that finishes the last
//                      of them (an integer atomic), FAN_IN of such sums by the one that finishes the last of those, and so on: the first id
//                      of 65,536 drawn by Zipf's law has 90 pieces, and one warp that added them all would be the launch's last for 13 us.
//                    An id out of range is in no bucket (the forward pass made its row NaN). Only the pieces need embedding_order, so this
//                    runs beside it: programmatic launch, and it waits for the other before the pieces. embedding_order leaves half a
//                    multiprocessor's registers to it.
//   The order of additions depends on the ids alone: increasing n, in pieces of PIECE if the id occurs more than CAPACITY times, the pieces
//   in their order by FAN_INs. The order of a list decides which warp adds up a row, never how.
//
// Bytes. dy once, dtable once (ACCUMULATE: twice, rows that occur only), ids once, and per long id once more; of a bucket 4 bytes per n and
//   what rounds it to sectors; counts once a slab (ACCUMULATE: those of ids that occur, and 4 bytes a slab for each on the list).
//   Of a bucket or a list only places below its count are read: what lies behind them was never written.
// Registers. embedding_sum: 8 sums and ROWS (GROUP_ROWS) rows of 4; ACCUMULATE: beside GROUP_ROWS rows 8 each that they are added to. No
//   shared memory there.
// Stores. A lane's 8 sums are two fp32 vectors; neighbouring lanes swap one, so that a warp's stores fill whole sectors. Where nothing is
//   added they leave L2 first (common/once.cuh).
// Ordering. embedding_clear writes nothing before the launch before it, whatever that is, has ended (griddepcontrol.wait): the scratch
//   memory may be another operation's until then. embedding_place has its ids by the time embedding_clear ends, and waits for that before
//   its atomics. embedding_place: all lanes of a warp live through its votes and exchanges; those without a valid id match one another and
//   take part in nothing else.
//   embedding_order may begin beside embedding_place; it waits for its end (griddepcontrol.wait) before it reads anything and only then
//   lets embedding_sum begin, which therefore finds embedding_place ended.
//   embedding_order: warps write their counts and thread 0 the part, __syncthreads, all read them, __syncthreads before they are rewritten.
//   embedding_sum: what embedding_order wrote is read after griddepcontrol.wait, past L1. Sums of pieces: the lanes write their vectors,
//   __syncwarp, lane 0 fences and counts the part as done; whoever counts the last one saw the fences of the others before (their counts
//   came before its own), fences itself, __syncwarp, and all its lanes read past L1. The counter of a sum of level l is that of its piece
//   number l: each sum has one of its own, for the next sum of that level begins FAN_IN^(l + 1) > l pieces later.
#include "../common/fence.cuh"
#include "../common/once.cuh"

constexpr bool ACCUMULATE = EMBEDDING_ACCUMULATE;
constexpr bool FACTORS = EMBEDDING_FACTORS;
constexpr int CAPACITY = 64;   // places of a bucket
constexpr int PIECE = 64;      // a warp's two registers, as a bucket
constexpr int FAN_IN = 8;      // pieces, or sums of pieces, that are added together
constexpr int RARE = 4;        // occurrences at most of an id of a group: each is held by a lane
constexpr int GROUP = 32 / RARE;
constexpr int GROUP_ROWS = ACCUMULATE ? 3 : 4;  // rows of a group in flight; beside 3 what the sums are added to
constexpr int ROWS = 8;                         // rows of a middle id or a piece in flight
constexpr int SUM_THREADS = 128, SUM_BLOCKS = ACCUMULATE ? 5 : 6;  // CTAs that fit a multiprocessor
constexpr int CLEAR_THREADS = 512;
constexpr int ORDER_THREADS = 512, ORDER_WARPS = ORDER_THREADS / 32;
constexpr int ROUNDS = 8;   // loads of four ids that a lane of embedding_order has in flight
constexpr int BATCHES = 2;  // of those between two barriers
constexpr int NONE = 0x7fffffff;
constexpr uint32_t ALL = 0xffffffffu;

using vec::Bf16;
constexpr int N = vec::PER<Bf16>;
constexpr int SLAB = 32 * N;
using Pack = vec::Group<Bf16, N>;
using Four = vec::Group<float, 4>;  // a lane's sums are written as two of them

// Lists of ids. Long ids are on that of middle ones too, and both on that of ids that occur (ACCUMULATE).
enum List { LONGS, MIDDLES, USED, LISTS };

struct Header {
    int listed[LISTS];  // ids on them
    int handed;         // places of `ordered` handed out
    int pieces;         // pieces on the list
};

struct Problem {
    const Bf16* dy;
    const int* ids;
    float* dtable;
    int* counts;       // [vocabulary]
    int* bucket;       // [vocabulary][CAPACITY], behind all that is cleared
    int* used;         // [min(count, vocabulary)]
    int* middle_id;    // [count / (RARE + 1) + 1]
    int* long_id;      // [count / CAPACITY + 1]
    int* long_at;      // the same: first place in `ordered`
    int* long_first;   // the same: first piece
    int* piece_of;     // [count / PIECE + count / CAPACITY + 1] number of the long id
    int* ordered;      // [count]
    int* done;         // [as piece_of][slabs] finished parts: of level l, of the sum that begins at piece q, at q + l
    float* partial;    // [as piece_of][width]
    Header* header;
    const float* factors;  // FACTORS: [count]
    int count, vocabulary, width;
};

__device__ __forceinline__ int lowest(uint32_t bits) { return __popc(~bits & (bits - 1)); }

extern "C" __global__ void __launch_bounds__(CLEAR_THREADS) embedding_clear(const __grid_constant__ Problem p) {
    ptx::grid_dependency_wait();  // the scratch memory may be in use until here
    ptx::grid_dependency_launch();
    uint4* const end = reinterpret_cast<uint4*>(p.bucket);
    uint4* at = reinterpret_cast<uint4*>(p.header) + blockIdx.x * CLEAR_THREADS + threadIdx.x;
    for (; at < end; at += gridDim.x * CLEAR_THREADS) *at = make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(256) embedding_place(const __grid_constant__ Problem p) {
    ptx::grid_dependency_launch();
    const int n = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t before = (1u << lane) - 1;
    int id = n < p.count ? __ldg(p.ids + n) : -1;
    if (id < 0 || id >= p.vocabulary) id = -1;
    const uint32_t equal = __match_any_sync(ALL, id);
    const int leader = lowest(equal);
    ptx::grid_dependency_wait();  // from here on header and counts are clear
    int base = 0;
    if (id >= 0 && lane == leader) base = atomicAdd(p.counts + id, __popc(equal));
    const int slot = __shfl_sync(ALL, base, leader) + __popc(equal & before);
    uint32_t enter[LISTS];  // lanes whose ids go on each list
    enter[LONGS] = __ballot_sync(ALL, id >= 0 && slot == CAPACITY);
    enter[MIDDLES] = __ballot_sync(ALL, id >= 0 && slot == RARE);
    enter[USED] = ACCUMULATE ? __ballot_sync(ALL, id >= 0 && slot == 0) : 0;
    const int wanted = lane >= LISTS ? 0 : __popc(lane == LONGS ? enter[LONGS] : lane == MIDDLES ? enter[MIDDLES] : enter[USED]);
    const int room = wanted > 0 ? atomicAdd(p.header->listed + lane, wanted) : 0;
    if (id >= 0 && slot < CAPACITY) p.bucket[static_cast<size_t>(id) * CAPACITY + slot] = n;
#pragma unroll
    for (int list = 0; list < LISTS; ++list) {
        int* const ids = list == LONGS ? p.long_id : list == MIDDLES ? p.middle_id : p.used;
        const int at = __shfl_sync(ALL, room, list) + __popc(enter[list] & before);
        if (enter[list] >> lane & 1) ids[at] = id;
    }
}

// Ids n0 + 128 r .. + 3 of round r, -1 behind the last.
__device__ __forceinline__ void load_ids(const Problem& p, bool aligned, int n0, int4 (&ids)[ROUNDS]) {
    if (aligned && n0 + 128 * ROUNDS <= p.count) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) ids[r] = __ldg(reinterpret_cast<const int4*>(p.ids + n0 + 128 * r));
    } else {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            const int n = n0 + 128 * r;
            ids[r] = make_int4(n < p.count ? __ldg(p.ids + n) : -1, n + 1 < p.count ? __ldg(p.ids + n + 1) : -1,
                               n + 2 < p.count ? __ldg(p.ids + n + 2) : -1, n + 3 < p.count ? __ldg(p.ids + n + 3) : -1);
        }
    }
}

extern "C" __global__ void __launch_bounds__(ORDER_THREADS, 2) embedding_order(const __grid_constant__ Problem p) {
    __shared__ int warp_count[ORDER_WARPS];
    __shared__ int part;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32, warp = thread / 32;
    const uint32_t before = (1u << lane) - 1;
    const bool aligned = reinterpret_cast<uintptr_t>(p.ids) % 16 == 0;
    ptx::grid_dependency_wait();    // from here on what embedding_place wrote, in embedding_sum too, which waits before it needs this
    ptx::grid_dependency_launch();
    const int longs = p.header->listed[LONGS];
    for (int item = static_cast<int>(blockIdx.x); item < longs; item += static_cast<int>(gridDim.x)) {
        const int id = p.long_id[item];
        int at = 0;
        for (int base = 0; base < p.count; base += ORDER_THREADS * 4 * ROUNDS * BATCHES) {
            const int start = base + warp * 128 * ROUNDS * BATCHES + 4 * lane;
            uint32_t found[BATCHES];
            int mine = 0;
#pragma unroll
            for (int b = 0; b < BATCHES; ++b) {
                int4 ids[ROUNDS];
                load_ids(p, aligned, start + 128 * ROUNDS * b, ids);
                if (b == 0 && base == 0 && warp == 0) {
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
                found[b] = 0;
#pragma unroll
                for (int r = 0; r < ROUNDS; ++r) {
                    if (ids[r].x == id) found[b] |= 1u << (4 * r);
                    if (ids[r].y == id) found[b] |= 2u << (4 * r);
                    if (ids[r].z == id) found[b] |= 4u << (4 * r);
                    if (ids[r].w == id) found[b] |= 8u << (4 * r);
                }
                mine += __popc(found[b]);
            }
            mine = __reduce_add_sync(ALL, mine);
            if (lane == 0) warp_count[warp] = mine;
            __syncthreads();
            if (base == 0) at = part;
            int place = at;
#pragma unroll
            for (int w = 0; w < ORDER_WARPS; ++w) {
                const int c = warp_count[w];
                if (w < warp) place += c;
                at += c;
            }
            if (mine > 0) {
#pragma unroll
                for (int b = 0; b < BATCHES; ++b) {
#pragma unroll 2
                    for (int r = 0; r < ROUNDS; ++r) {
                        const uint32_t four = found[b] >> (4 * r) & 15;
                        if (__ballot_sync(ALL, four != 0) == 0) continue;
                        int to = place;
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const uint32_t votes = __ballot_sync(ALL, four >> i & 1);
                            to += __popc(votes & before);
                            place += __popc(votes);
                        }
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (four >> i & 1) p.ordered[to++] = start + 128 * (ROUNDS * b + r) + i;
                    }
                }
            }
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
    return column + 8 * h - 4 * static_cast<int>(threadIdx.x % 2);
}

// What those vectors hold, where the gradient is added to it.
struct Old {
    Four vector[N / 4];
    __device__ __forceinline__ void load(const float* row, int column, int width) {
        if constexpr (ACCUMULATE) {
#pragma unroll
            for (int h = 0; h < N / 4; ++h) vector[h].load(row + min(column_of(column, h), width - 4));
        }
    }
};

// A gradient that is written alone is larger than L2, most often: it need not stay there.
__device__ __forceinline__ void store(float* to, const Four& v) {
    if constexpr (ACCUMULATE) {
        v.store(to);
    } else {
        vec::store_once(to, v);
    }
}

__device__ __forceinline__ void write_four(float* to, float (&four)[4], const Four& old) {
    Four out;
    if (ACCUMULATE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = old[i] + four[i];
    }
    out.set(four);
    store(to, out);
}

// Writes the sums of a lane's columns column .. column + N - 1 of a row; all lanes of the warp take part, those beyond the width write
// nothing.
__device__ __forceinline__ void write_row(float* row, int column, int width, const float (&sum)[N], const Old& old) {
    float four[N / 4][4];
    const bool odd = threadIdx.x % 2 == 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(ALL, odd ? sum[i] : sum[4 + i], 1);
        four[0][i] = odd ? other : sum[i];
        four[1][i] = odd ? sum[4 + i] : other;
    }
#pragma unroll
    for (int h = 0; h < N / 4; ++h) {
        const int at = column_of(column, h);
        if (at < width) write_four(row + at, four[h], old.vector[h]);
    }
}

// As write_row, by one lane alone.
__device__ __forceinline__ void write_vector(float* to, const float (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        float four[4] = {sum[i], sum[i + 1], sum[i + 2], sum[i + 3]};
        Four old;
        if constexpr (ACCUMULATE) old.load(to + i);
        write_four(to + i, four, old);
    }
}

// Writes zeros to a slab of a row.
__device__ __forceinline__ void write_zeros(float* row, int slab, int width, int lane) {
    Four zeros;
    zeros.clear();
#pragma unroll
    for (int part = 0; part < N / 4; ++part) {
        const int column = slab * SLAB + (part * 32 + lane) * 4;
        if (column < width) store(row + column, zeros);
    }
}

__device__ __forceinline__ void clear(float (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] = 0.0f;
}

// How often row n counts.
__device__ __forceinline__ float factor_of(const Problem& p, int n) { return FACTORS ? __ldg(p.factors + n) : 1.0f; }

__device__ __forceinline__ void add(float (&sum)[N], const Pack& row, float factor) {
    if (FACTORS && factor == 0.0f) return;
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] += FACTORS ? factor * row[i] : row[i];
}

// Adds `count` rows, number l of them at the place low of lane l, number l + 32 at high, from 1 to 64. Lanes beyond the width add
// something.
__device__ __forceinline__ void sum_many(const Problem& p, int low, int high, int count, int column, float (&sum)[N]) {
    const Bf16* const from = p.dy + min(column, p.width - N);
    clear(sum);
    for (int j = 0; j < count; j += ROWS) {
        Pack row[ROWS];
        float factor[ROWS];
#pragma unroll
        for (int d = 0; d < ROWS; ++d) {  // behind the last the last again, not added: loads need no branch
            const int at = min(j + d, count - 1);
            const int n = __shfl_sync(ALL, at < 32 ? low : high, at % 32);
            row[d].load(from + static_cast<size_t>(n) * p.width);
            factor[d] = factor_of(p, n);
        }
#pragma unroll
        for (int d = 0; d < ROWS; ++d)
            if (j + d < count) add(sum, row[d], factor[d]);
    }
}

__device__ __forceinline__ void sum_middle(const Problem& p, int id, int column, int lane) {
    const int* const bucket = p.bucket + static_cast<size_t>(id) * CAPACITY;
    const int count = __ldg(p.counts + id);
    if (count > CAPACITY) return;
    int low = lane < count ? __ldg(bucket + lane) : NONE;
    int high = lane + 32 < count ? __ldg(bucket + lane + 32) : NONE;
    float* const to = p.dtable + static_cast<size_t>(id) * p.width;
    Old old;
    old.load(to, column, p.width);
    sort64(low, high, lane);
    float sum[N];
    sum_many(p, low, high, count, column, sum);
    write_row(to, column, p.width, sum, old);
}

// Of the ids of a group lane l holds number l / RARE, -1 for none, how often it occurs, and its place l % RARE.
// `used`: ids of all groups.
__device__ __forceinline__ int id_of(const Problem& p, int group, int used, int lane) {
    const int k = group * GROUP + lane / RARE;
    if (k >= used) return -1;
    return ACCUMULATE ? __ldg(p.used + k) : k;
}

__device__ __forceinline__ int count_of(const Problem& p, int id) { return id >= 0 ? __ldg(p.counts + id) : RARE + 1; }

__device__ __forceinline__ int place_of(const Problem& p, int id, int count, int lane) {
    return count <= RARE && lane % RARE < count ? __ldg(p.bucket + static_cast<size_t>(id) * CAPACITY + lane % RARE) : NONE;
}

__device__ __forceinline__ void sum_group(const Problem& p, int slab, int id, int count, int place, int lane) {
    const int column = slab * SLAB + lane * N;
    const Bf16* const from = p.dy + min(column, p.width - N);
    const auto row_of = [&](int holder) { return p.dtable + static_cast<size_t>(__shfl_sync(ALL, id, holder)) * p.width; };
    const int n = sort4(place, lane);
    uint32_t left = __ballot_sync(ALL, n != NONE);                             // rows to add, by id and then by n
    const uint32_t ends = left & (~(left >> 1) | 0x88888888u);                 // the last ones of their ids
    uint32_t absent = __ballot_sync(ALL, count == 0) & 0x11111111u;
    if (ACCUMULATE) absent = 0;
    float sum[N];
    clear(sum);
    int rows = __popc(left);
    do {
        Pack row[GROUP_ROWS];
        float factor[GROUP_ROWS];
        Old old[GROUP_ROWS];
        int which[GROUP_ROWS];
        if (rows > 0) {
#pragma unroll
            for (int d = 0; d < GROUP_ROWS; ++d) {  // behind the last the last again
                which[d] = lowest(left);
                if (d + 1 < rows) left &= left - 1;
                const int at = __shfl_sync(ALL, n, which[d]);
                row[d].load(from + static_cast<size_t>(at) * p.width);
                factor[d] = factor_of(p, at);
                if (ACCUMULATE && d < rows && ends >> which[d] & 1) old[d].load(row_of(which[d]), column, p.width);
            }
        }
        for (; absent != 0; absent &= absent - 1) write_zeros(row_of(lowest(absent)), slab, p.width, lane);
#pragma unroll
        for (int d = 0; d < GROUP_ROWS; ++d) {
            if (d < rows) {
                add(sum, row[d], factor[d]);
                if (ends >> which[d] & 1) {
                    write_row(row_of(which[d]), column, p.width, sum, old[d]);
                    clear(sum);
                }
            }
        }
        rows -= GROUP_ROWS;
    } while (rows > 0);
}

// Of an id of several pieces the sums of up to FAN_IN neighbouring pieces are added, of up to FAN_IN such sums again, and so on: `sum` is
// that of the `span` pieces from piece q of the id on, and lies at that piece's place in `partial` until it is added. True where that is
// all of the id.
__device__ __forceinline__ bool sum_pieces(const Problem& p, int first, int q, int pieces, int column, int lane, float (&sum)[N]) {
    const int slabs = (p.width + SLAB - 1) / SLAB;
    for (int level = 0, span = 1; span < pieces; ++level, span *= FAN_IN) {
        const int begin = q / (FAN_IN * span) * (FAN_IN * span);
        const int parts = min(FAN_IN, (pieces - begin + span - 1) / span);
        const size_t step = static_cast<size_t>(span) * p.width;
        float* const from = p.partial + static_cast<size_t>(first + begin) * p.width + min(column, p.width - N);
        if (parts > 1) {
            float4* const mine = reinterpret_cast<float4*>(from + (q - begin) / span * step);
#pragma unroll
            for (int i = 0; i < N / 4; ++i)
                if (column < p.width) mine[i] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
            __syncwarp();
            int before = 0;
            if (lane == 0) {
                __threadfence();
                before = atomicAdd(p.done + static_cast<size_t>(first + begin + level) * slabs + column / SLAB, 1);
                __threadfence();
            }
            if (__shfl_sync(ALL, before, 0) != parts - 1) return false;
            __syncwarp();
            clear(sum);
#pragma unroll
            for (int c0 = 0; c0 < FAN_IN; c0 += FAN_IN / 2) {
                float4 four[FAN_IN / 2][N / 4];
#pragma unroll
                for (int c = 0; c < FAN_IN / 2; ++c)
#pragma unroll
                    for (int i = 0; i < N / 4; ++i)  // behind the last part the last again, not added
                        four[c][i] = __ldcg(reinterpret_cast<const float4*>(from + min(c0 + c, parts - 1) * step) + i);
#pragma unroll
                for (int c = 0; c < FAN_IN / 2; ++c) {
                    if (c0 + c < parts) {
#pragma unroll
                        for (int i = 0; i < N / 4; ++i) {
                            sum[4 * i] += four[c][i].x;
                            sum[4 * i + 1] += four[c][i].y;
                            sum[4 * i + 2] += four[c][i].z;
                            sum[4 * i + 3] += four[c][i].w;
                        }
                    }
                }
            }
        }
        q = begin;
    }
    return true;
}

__device__ __forceinline__ void sum_piece(const Problem& p, int piece, int column, int lane) {
    const int number = __ldcg(p.piece_of + piece);
    const int first = __ldcg(p.long_first + number), at = __ldcg(p.long_at + number), id = __ldg(p.long_id + number);
    const int all = __ldg(p.counts + id), begin = (piece - first) * PIECE, count = min(PIECE, all - begin);
    const int* const ordered = p.ordered + at + begin;
    const int low = __ldcg(ordered + min(lane, count - 1)), high = __ldcg(ordered + min(lane + 32, count - 1));
    float sum[N];
    sum_many(p, low, high, count, column, sum);
    const bool last = sum_pieces(p, first, piece - first, (all + PIECE - 1) / PIECE, column, lane, sum);
    if (last && column < p.width) write_vector(p.dtable + static_cast<size_t>(id) * p.width + column, sum);
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS, SUM_BLOCKS) embedding_sum(const __grid_constant__ Problem p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>((blockIdx.x * SUM_THREADS + threadIdx.x) / 32);
    const int warps = static_cast<int>(gridDim.x) * (SUM_THREADS / 32);
    const int slabs = (p.width + SLAB - 1) / SLAB;
    const int used = ACCUMULATE ? __ldcg(&p.header->listed[USED]) : p.vocabulary;
    const int groups = (used + GROUP - 1) / GROUP;
    const int middles = __ldcg(&p.header->listed[MIDDLES]);
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
