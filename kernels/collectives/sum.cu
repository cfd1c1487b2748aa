// Sums over the members of a group: all-reduce and reduce-scatter. Bits: the tree of the members (alpha/ops/collectives.py).
//
// Defines: IS_F32 1: float elements, 0: bf16; MOST: most members of a group, 2, 4 or 8.
//
// Order of additions. In the tree of n the left half is the largest power of two below n. That is the balanced binary tree over 2, 4 or 8
//   leaves whose missing leaves pass the other side on: 16-bit operands are widened, every partial is float, the end is divided and rounded
//   once, and what is no number gets the one pattern. All members' elements are loaded before any is added, so the order knows no owner.
// sum_packets: every member sends its operand (reduce-scatter: each other one's piece of it) in packets, and adds what it gets: one hop, no
//   meeting. Each thread reads its own elements before it writes them, so the result may lie on the operand.
// sum_direct: a member owns vectors begin to end, loads them from all members, adds, and stores the sum to all that want it. Nobody else
//   reads or writes these elements, so the result may lie on the operand. A meeting before the first load (operands are there, results may
//   be written) and one behind the last store (results are there, operands may be written).
// Grid: any number of blocks up to BLOCKS; bits do not depend on it. Block 512 threads.
#include "../common/vector.cuh"
#include "link.cuh"

using namespace links;
using T = vec::Element<IS_F32 != 0>::type;
constexpr int PER = vec::PER<T>;
constexpr int LOADS = DIRECT_LOADS;  // vectors of each member in flight in a thread

struct Sum {
    Link link;
    const T* x[MOST];  // the operands of all members as this one sees them; sum_packets reads its own alone
    T* y[MOST];        // the results that this member writes, null for none; sum_packets writes its own alone
    uint64_t count;    // elements of the result (sum_direct of an all-reduce: of the operand)
    uint64_t stride;   // elements between the pieces of this member's operand: 0 for an all-reduce
    uint64_t begin, end;  // sum_direct: vectors of the operands that this member owns
    uint64_t shift;    // sum_direct: elements by which the result begins behind the operand: 0 for an all-reduce
    float divisor;     // what the sum is divided by: 1, or the number of members
    float factor;      // its inverse where that is exact, a power of two; else 0
};

// What each member's `word` says, added in the tree, divided, rounded.
__device__ __forceinline__ uint4 total(const uint4 (&word)[MOST], const Sum& p) {
    float sum[PER];
#pragma unroll
    for (int e = 0; e < PER; ++e) {
        float leaf[MOST];
#pragma unroll
        for (int i = 0; i < MOST; ++i) leaf[i] = vec::group<T>(word[i])[e];
#pragma unroll
        for (int step = 1; step < MOST; step *= 2)
#pragma unroll
            for (int i = 0; i + step < MOST; i += 2 * step)
                if (static_cast<uint32_t>(i + step) < p.link.size) leaf[i] = leaf[i] + leaf[i + step];
        sum[e] = leaf[0];
    }
    if (p.factor != 0.0f) {  // the same bits as the division, which takes longer than the link
#pragma unroll
        for (int e = 0; e < PER; ++e) sum[e] = sum[e] * p.factor;
    } else {
#pragma unroll
        for (int e = 0; e < PER; ++e) sum[e] = sum[e] / p.divisor;
    }
    vec::Group<T, PER> out;
    out.set(sum);
#pragma unroll
    for (int e = 0; e < PER; ++e) {
        if (sum[e] != sum[e]) {
            if constexpr (IS_F32 != 0)
                out.word[e] = 0x7fc00000u;
            else
                out.word[e / 2] = e % 2 ? (out.word[e / 2] & 0xffffu) | 0x7fc00000u : (out.word[e / 2] & 0xffff0000u) | 0x7fc0u;
        }
    }
    return make_uint4(out.word[0], out.word[1], out.word[2], out.word[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sum_packets(const __grid_constant__ Sum p) {
    const Link& l = p.link;
    Packets packets(l);
    const uint64_t vectors = (p.count + PER - 1) / PER, step = static_cast<uint64_t>(gridDim.x) * THREADS * DEEP;
    const T* const x = p.x[l.me];
    T* const y = p.y[l.me];
    bool came = true;
    for (uint64_t at = static_cast<uint64_t>(blockIdx.x) * THREADS * DEEP; at < vectors; at += step) {
        uint4 word[MOST][DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
            const uint64_t v = at + d * THREADS + threadIdx.x;
            const uint4 own = vector_of(x + l.me * p.stride, v, p.count);
#pragma unroll
            for (uint32_t j = 0; j < MOST; ++j) {
                word[j][d] = own;
                if (j < l.size && j != l.me && (v < vectors || packets.renews(j)))
                    packets.send(j, d, p.stride == 0 ? own : vector_of(x + j * p.stride, v, p.count));
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < MOST; ++j) {
            if (j < l.size && j != l.me) {
#pragma unroll
                for (int d = 0; d < DEEP; ++d)
                    if (came && (at + d * THREADS + threadIdx.x < vectors || packets.renews(j))) came = packets.receive(j, d, word[j][d]);
                packets.next(j);
            }
        }
        if (!came) break;
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
            uint4 each[MOST];
#pragma unroll
            for (int j = 0; j < MOST; ++j) each[j] = word[j][d];
            put_vector(y, at + d * THREADS + threadIdx.x, p.count, total(each, p));
        }
    }
    packets.close();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sum_direct(const __grid_constant__ Sum p) {
    const Link& l = p.link;
    Meetings meetings(l);
    if (!meetings.meet()) return;
    const uint64_t whole = p.count / PER, end = p.end < whole ? p.end : whole, step = static_cast<uint64_t>(gridDim.x) * THREADS * LOADS;
    for (uint64_t at = p.begin + static_cast<uint64_t>(blockIdx.x) * THREADS * LOADS + threadIdx.x; at < end; at += step) {
        uint4 word[LOADS][MOST];
#pragma unroll
        for (int d = 0; d < LOADS; ++d) {
            if (at + d * THREADS < end) {
#pragma unroll
                for (int i = 0; i < MOST; ++i)
                    if (static_cast<uint32_t>(i) < l.size) word[d][i] = peer::read16(p.x[i] + (at + d * THREADS) * PER);
            }
        }
#pragma unroll
        for (int d = 0; d < LOADS; ++d) {
            if (at + d * THREADS < end) {
                const uint4 sum = total(word[d], p);
#pragma unroll
                for (int i = 0; i < MOST; ++i)
                    if (static_cast<uint32_t>(i) < l.size && p.y[i] != nullptr) peer::write16(p.y[i] + (at + d * THREADS) * PER - p.shift, sum);
            }
        }
    }
    if (whole < p.end && blockIdx.x == 0 && threadIdx.x == 0) {  // the last elements, which fill no vector
        uint4 word[MOST];
#pragma unroll
        for (int i = 0; i < MOST; ++i)
            if (static_cast<uint32_t>(i) < l.size) word[i] = vector_of(p.x[i], whole, p.count);
        const uint4 sum = total(word, p);
#pragma unroll
        for (int i = 0; i < MOST; ++i)
            if (static_cast<uint32_t>(i) < l.size && p.y[i] != nullptr) put_vector(p.y[i] - p.shift, whole, p.count, sum);
    }
    meetings.meet();
}
