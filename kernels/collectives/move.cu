// What only moves between members: all-gather, broadcast, all-to-all, send and receive; and the barrier, which moves nothing.
//
// Define: MOST: most members of a group, 2, 4 or 8. Elements are halves (2 bytes), whatever their type.
//
// move_packets: member j gets out[j] halves from from[j]; in[j] halves come from it to to[j]; both are this member's own memory. Both
//   members of a pair send as many packets, the longer of the two ways, so each knows that the other has read (link.cuh). One hop.
// move_direct: count[j] halves are copied from from[j] to to[j], either of which may lie in a peer's memory, between two meetings:
//   before the first, sources are there and targets may be written; behind the second, targets are there and sources may be written.
//   Addresses are multiples of 16 bytes. What stays on this member is its own business: blocks of their own copy it beside.
// move_relayed: a broadcast between meetings, block by block. Each other member gets from the root what it hands on to the rest, so that no
//   byte leaves the root twice: in step k the root writes part k of every member, and each member hands on part k - 1.
// meet: one meeting, of one block. What the members' streams did before it has happened everywhere when it ends. Between two of them a
//   copy engine may move.
// Grid: any number of blocks up to BLOCKS. Block 512 threads.
#include "link.cuh"

using namespace links;
constexpr int PER = 8;
constexpr int LOADS = DIRECT_LOADS;

struct Packed {
    Link link;
    const uint16_t* from[MOST];
    uint16_t* to[MOST];
    uint64_t out[MOST], in[MOST];
};

struct Direct {
    Link link;
    const uint16_t* from[MOST];
    uint16_t* to[MOST];
    uint64_t count[MOST];
    uint32_t moving;  // blocks that meet and move; those behind them copy what stays on this member
};

// Copies `count` halves as block number `block` of `blocks`; loads of a thread are in flight together.
__device__ __forceinline__ void copy(const uint16_t* from, uint16_t* to, uint64_t count, uint32_t block, uint32_t blocks) {
    const uint64_t vectors = count / PER, step = static_cast<uint64_t>(blocks) * THREADS * LOADS;
    for (uint64_t at = static_cast<uint64_t>(block) * THREADS * LOADS + threadIdx.x; at < vectors; at += step) {
        uint4 word[LOADS];
#pragma unroll
        for (int d = 0; d < LOADS; ++d)
            if (at + d * THREADS < vectors) word[d] = peer::read16(from + (at + d * THREADS) * PER);
#pragma unroll
        for (int d = 0; d < LOADS; ++d)
            if (at + d * THREADS < vectors) peer::write16(to + (at + d * THREADS) * PER, word[d]);
    }
    if (block == 0 && threadIdx.x == 0 && vectors * PER < count) put_vector(to, vectors, count, vector_of(from, vectors, count));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) move_packets(const __grid_constant__ Packed p) {
    const Link& l = p.link;
    Packets packets(l);
    if (p.from[l.me] != p.to[l.me]) {
        const uint64_t vectors = (p.out[l.me] + PER - 1) / PER, step = static_cast<uint64_t>(gridDim.x) * THREADS;
        for (uint64_t v = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x; v < vectors; v += step)
            put_vector(p.to[l.me], v, p.out[l.me], vector_of(p.from[l.me], v, p.out[l.me]));
    }
    uint64_t longest = 0;
#pragma unroll
    for (uint32_t j = 0; j < MOST; ++j)
        if (j < l.size && l.with(j)) longest = max(longest, max(p.out[j], p.in[j]));
    longest = (longest + PER - 1) / PER;
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * THREADS * DEEP;
    bool came = true;
    for (uint64_t at = static_cast<uint64_t>(blockIdx.x) * THREADS * DEEP; at < longest && came; at += step) {
#pragma unroll
        for (uint32_t j = 0; j < MOST; ++j) {
            if (j < l.size && l.with(j)) {
                const uint64_t vectors = (max(p.out[j], p.in[j]) + PER - 1) / PER;
#pragma unroll
                for (int d = 0; d < DEEP; ++d) {
                    const uint64_t v = at + d * THREADS + threadIdx.x;
                    if (at < vectors && (v < vectors || packets.renews(j))) packets.send(j, d, vector_of(p.from[j], v, p.out[j]));
                }
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < MOST; ++j) {
            if (j < l.size && l.with(j)) {
                const uint64_t vectors = (max(p.out[j], p.in[j]) + PER - 1) / PER;
#pragma unroll
                for (int d = 0; d < DEEP; ++d) {
                    const uint64_t v = at + d * THREADS + threadIdx.x;
                    if (came && at < vectors && (v < vectors || packets.renews(j))) {
                        uint4 word;
                        came = packets.receive(j, d, word);
                        if (came) put_vector(p.to[j], v, p.in[j], word);
                    }
                }
                if (at < vectors) packets.next(j);
            }
        }
    }
    packets.close();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) move_direct(const __grid_constant__ Direct p) {
    const Link& l = p.link;
    if (blockIdx.x >= p.moving) {
        copy(p.from[l.me], p.to[l.me], p.count[l.me], blockIdx.x - p.moving, gridDim.x - p.moving);
        return;
    }
    Meetings meetings(l);
    if (!meetings.meet()) return;
#pragma unroll
    for (uint32_t k = 1; k < MOST; ++k) {  // from the next member on, so that not all pull from one
        if (k < l.size) {
            const uint32_t j = (l.me + k) % l.size;
            copy(p.from[j], p.to[j], p.count[j], blockIdx.x, p.moving);
        }
    }
    meetings.meet();
}

struct Relayed {
    Link link;
    const uint16_t* from;  // what this member reads: the root its operand, any other its result
    uint16_t* to[MOST];    // the results of all members as this one sees them
    uint64_t count;
    uint32_t root;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) move_relayed(const __grid_constant__ Relayed p) {
    const Link& l = p.link;
    const uint64_t vectors = (p.count + PER - 1) / PER, others = l.size - 1, part = static_cast<uint64_t>(THREADS) * LOADS;
    const uint64_t steps = (vectors + gridDim.x * others * part - 1) / (gridDim.x * others * part);
    const bool root = l.me == p.root;
    Meetings meetings(l);
    if (!meetings.meet()) return;
    for (uint64_t k = 0; k <= steps; ++k) {
        for (uint32_t m = 0; m < others; ++m) {
            const uint32_t keeper = (p.root + 1 + m) % l.size;  // whom the root gives this part
            if (!root && (keeper != l.me || k == 0)) continue;
            const uint64_t at = (((root ? k : k - 1) * others + m) * gridDim.x + blockIdx.x) * part + threadIdx.x;
            uint4 word[LOADS];
#pragma unroll
            for (int d = 0; d < LOADS; ++d)
                if (at + d * THREADS < vectors) word[d] = vector_of(p.from, at + d * THREADS, p.count);
#pragma unroll
            for (uint32_t j = 0; j < MOST; ++j) {
                if (j >= l.size || (root ? j != keeper && (j != l.me || p.to[j] == p.from) : j == l.me || j == p.root)) continue;
#pragma unroll
                for (int d = 0; d < LOADS; ++d)
                    if (at + d * THREADS < vectors) put_vector(p.to[j], at + d * THREADS, p.count, word[d]);
            }
        }
        if (!meetings.meet()) return;
    }
}

extern "C" __global__ void __launch_bounds__(32, 1) meet(const __grid_constant__ Link l) {
    Meetings meetings(l);
    meetings.meet();
}
