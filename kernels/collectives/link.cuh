// What the collectives of one channel share: where each member's pad lies, how members meet, and how a wait ends.
//
// A channel is the pad of every member and the launches that use it. Its launches follow one another on one stream, on every member in the
// same order, with the same grid. Two streams, or two groups, have two channels.
//
// Pad, in the memory of each member (BLOCKS x MOST_MEMBERS words each, then the slots of packets):
//   signal[block][member]   written by that member alone: how often its block has come to a meeting with this one
//   reached[block][member]  this one's own count of the same
//   turns[block][member]    this one's own count of rounds of packets with that member
//   slots[block][member][turn % 2]  packets that this member gets from that one
// Counts live in device memory, so the replay of a graph goes on where the last one stopped. They wrap; comparisons are of differences.
//
// Ordering argument, meeting. Each thread's accesses before it come before the block's barrier, then one thread for each member releases
// that member's signal at system scope and acquires its own; the second barrier hands what it acquired to the block. A signal has one
// writer and only grows, so a fast member that is one meeting ahead is seen as "at least".
//
// Ordering argument, packets. Both members of a pair send the same positions in each round. A position is written by one thread and read by
// the thread of the same number, which sends its own packet of turn t + 1 after it has read that of turn t. Whoever writes turn t + 2 (the
// same slot as t) has read the other's t + 1, so the other has read t. Launches of a channel follow one another, so the same holds between
// threads of different numbers of two launches. A flag is the turn, so what an earlier turn left is never taken for this one; that an old
// flag comes back after 2^32 turns is excluded by renewing all positions every 2^24 turns.
//
// A wait spins, then looks at the abort word and at the clock. The first thread whose patience ends writes op, member and turn into the
// record, and sets the abort word; every other wait ends within microseconds. The launch ends, its results are rubbish, the device is sound.
#pragma once
#include <cstdint>

#include "../common/peer.cuh"
#include "../common/timer.cuh"

#ifndef MOST
#define MOST 2
#endif

namespace links {

constexpr int BLOCKS = 64;
constexpr int MOST_MEMBERS = 8;
constexpr int THREADS = 512;
constexpr int DEEP = 2;                                // vectors of a thread in a round of packets
constexpr int POSITIONS = THREADS * DEEP * 2;          // packets of a round: two a vector
constexpr int SLOT = POSITIONS * 16;                   // bytes
constexpr uint32_t RENEWED = 0x00ffffffu;
constexpr int SPINS = 64;
static_assert(MOST <= MOST_MEMBERS, "a pad has room for so many members");

// Why a wait ended without what it waited for.
struct Record {
    uint32_t abort;  // not 0: every wait ends
    uint32_t state;  // 0: nothing happened; 1: being written; 2: written
    uint32_t op, member, kind, block, wanted, seen;
};
enum Kind : uint32_t { MEETING = 1, PACKET = 2 };

struct Pad {
    uint32_t signal[BLOCKS][MOST_MEMBERS];
    uint32_t reached[BLOCKS][MOST_MEMBERS];
    uint32_t turns[BLOCKS][MOST_MEMBERS];
};

// One member's view of the channel. `partners`: bit j is set for every member that takes part with this one, itself not among them.
struct Link {
    uint8_t* pad[MOST];
    Record* record;
    uint64_t patience;  // nanoseconds
    uint32_t size, me, op, partners;

    __device__ __forceinline__ bool with(uint32_t j) const { return (partners >> j & 1u) != 0; }
    __device__ __forceinline__ Pad& at(uint32_t j) const { return *reinterpret_cast<Pad*>(pad[j]); }
    __device__ __forceinline__ uint8_t* slot(uint32_t j, uint32_t from, uint32_t turn) const {
        return pad[j] + sizeof(Pad) + ((static_cast<uint64_t>(blockIdx.x) * size + from) * 2 + (turn & 1u)) * SLOT;
    }
};

// Writes the record, once for all threads of this GPU, and lets every other wait end.
__device__ __noinline__ void give_up(const Link& l, Kind kind, uint32_t member, uint32_t wanted, uint32_t seen) {
    Record& r = *l.record;
    if (atomicMax(&r.state, 1u) == 0u) {
        r.op = l.op;
        r.member = member;
        r.kind = kind;
        r.block = blockIdx.x;
        r.wanted = wanted;
        r.seen = seen;
        peer::store_release(&r.state, 2u);
        peer::store_release(&r.abort, 1u);
    }
}

// Waits until look(seen) is true. False where this member was told to abort, or lost its patience.
template <typename Look>
__device__ __forceinline__ bool wait(const Link& l, Kind kind, uint32_t member, uint32_t wanted, Look look) {
    uint32_t seen = 0;
    for (int spin = 0; spin < SPINS; ++spin)
        if (look(seen)) return true;
    const uint64_t began = ptx::global_timer();
    for (;;) {
        for (int spin = 0; spin < SPINS; ++spin)
            if (look(seen)) return true;
        if (peer::load_relaxed(&l.record->abort) != 0) return false;
        if (ptx::global_timer() - began > l.patience) {
            give_up(l, kind, member, wanted, seen);
            return false;
        }
    }
}

// Meetings of this block with those of the same number on the partners; all threads of the block call together.
class Meetings {
   public:
    __device__ __forceinline__ explicit Meetings(const Link& l) : link_(l), reached_(0) {
        if (own()) reached_ = l.at(l.me).reached[blockIdx.x][threadIdx.x];
    }

    // False where a partner did not come.
    __device__ __forceinline__ bool meet() {
        __syncthreads();
        bool met = true;
        if (own()) {
            const uint32_t wanted = ++reached_;
            peer::store_release(&link_.at(threadIdx.x).signal[blockIdx.x][link_.me], wanted);
            const uint32_t* const signal = &link_.at(link_.me).signal[blockIdx.x][threadIdx.x];
            met = wait(link_, MEETING, threadIdx.x, wanted, [&](uint32_t& seen) {
                seen = peer::load_acquire(signal);
                return static_cast<int32_t>(seen - wanted) >= 0;
            });
            link_.at(link_.me).reached[blockIdx.x][threadIdx.x] = reached_;
        }
        return __syncthreads_and(met) != 0;
    }

   private:
    __device__ __forceinline__ bool own() const { return threadIdx.x < link_.size && link_.with(threadIdx.x); }
    const Link& link_;
    uint32_t reached_;
};

// The rounds of packets of this block with its partners.
class Packets {
   public:
    __device__ __forceinline__ explicit Packets(const Link& l) : link_(l) {
#pragma unroll
        for (uint32_t j = 0; j < MOST; ++j) turn_[j] = j < l.size && l.with(j) ? l.at(l.me).turns[blockIdx.x][j] + 1 : 0;
    }

    // Whether every position is sent in this round, needed or not.
    __device__ __forceinline__ bool renews(uint32_t j) const { return (turn_[j] & RENEWED) < 2; }

    // Vector number d of this thread to member j.
    __device__ __forceinline__ void send(uint32_t j, int d, uint4 r) const {
        uint8_t* const slot = link_.slot(j, link_.me, turn_[j]);
        const uint64_t flag = static_cast<uint64_t>(turn_[j]) << 32;
        peer::store_packet(slot + ((2 * d) * THREADS + threadIdx.x) * 16, flag | r.x, flag | r.y);
        peer::store_packet(slot + ((2 * d + 1) * THREADS + threadIdx.x) * 16, flag | r.z, flag | r.w);
    }

    // Vector number d of the thread of this number of member j. False where it does not come.
    __device__ __forceinline__ bool receive(uint32_t j, int d, uint4& r) const {
        const uint8_t* const slot = link_.slot(link_.me, j, turn_[j]);
        const uint32_t turn = turn_[j];
        uint64_t a, b, c, e;
        const bool came = wait(link_, PACKET, j, turn, [&](uint32_t& seen) {
            peer::load_packet(slot + ((2 * d) * THREADS + threadIdx.x) * 16, a, b);
            peer::load_packet(slot + ((2 * d + 1) * THREADS + threadIdx.x) * 16, c, e);
            seen = static_cast<uint32_t>(a >> 32);
            return seen == turn && static_cast<uint32_t>(b >> 32) == turn && static_cast<uint32_t>(c >> 32) == turn &&
                   static_cast<uint32_t>(e >> 32) == turn;
        });
        r = make_uint4(static_cast<uint32_t>(a), static_cast<uint32_t>(b), static_cast<uint32_t>(c), static_cast<uint32_t>(e));
        return came;
    }

    __device__ __forceinline__ void next(uint32_t j) { ++turn_[j]; }

    // Keeps the counts for the next launch; all threads of the block call together, after their last round.
    __device__ __forceinline__ void close() const {
        __syncthreads();
#pragma unroll
        for (uint32_t j = 0; j < MOST; ++j)
            if (threadIdx.x == j && j < link_.size && link_.with(j)) link_.at(link_.me).turns[blockIdx.x][j] = turn_[j] - 1;
    }

   private:
    const Link& link_;
    uint32_t turn_[MOST];
};

// Elements v * PER and following of p, of which there are `count`; zeros behind the last. T: elements of 2 or 4 bytes.
template <typename T>
__device__ __forceinline__ uint4 vector_of(const T* p, uint64_t v, uint64_t count) {
    constexpr int PER = 16 / static_cast<int>(sizeof(T)), HALVES = static_cast<int>(sizeof(T)) / 2;
    const T* const at = p + v * PER;
    if ((v + 1) * PER <= count && (reinterpret_cast<uintptr_t>(at) & 15u) == 0) return peer::read16(at);
    uint32_t word[4] = {0, 0, 0, 0};
    const uint64_t first = v * 8, halves = count * HALVES;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (first + i < halves) word[i / 2] |= peer::read2(reinterpret_cast<const uint8_t*>(at) + 2 * i) << (16 * (i % 2));
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// Writes the same elements.
template <typename T>
__device__ __forceinline__ void put_vector(T* p, uint64_t v, uint64_t count, uint4 r) {
    constexpr int PER = 16 / static_cast<int>(sizeof(T)), HALVES = static_cast<int>(sizeof(T)) / 2;
    T* const at = p + v * PER;
    if ((v + 1) * PER <= count && (reinterpret_cast<uintptr_t>(at) & 15u) == 0) {
        peer::write16(at, r);
        return;
    }
    const uint32_t word[4] = {r.x, r.y, r.z, r.w};
    const uint64_t first = v * 8, halves = count * HALVES;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (first + i < halves) peer::write2(reinterpret_cast<uint8_t*>(at) + 2 * i, word[i / 2] >> (16 * (i % 2)));
}

}  // namespace links
