// Tiles that are drawn while the kernel runs (AHEAD > 0), where raster.cuh deals them out beforehand: a cluster that begins late, or whose
// multiprocessors are slower, draws fewer.
//
// Unit `first` of a cluster is fixed: its own number. Further ones are numbered by a counter in global memory. A warp of the cluster's first
// CTA draws them, finds the tile and sends a ticket to both CTAs; producers and consumers read it where the fixed walk would count on. (OWNED:
// the first unit is drawn too, while the barriers are made. A run of split tiles is a unit; its ticket says no more than its number.) The
// ticket is drawn AHEAD steps before the end of a tile's loads, so that its way (some 2 us) lies under the products, and no earlier, since
// what is drawn is this cluster's to do, however late it gets to it.
//
// The counter. A cluster draws until it draws a number that is no unit's: `units - clusters` draws find one, `clusters` do not, which makes
// `units` draws. It wraps to 0 behind units - 1 (atom.inc), so it is 0 again when all have drawn, and a captured launch can be replayed. A
// launch that is under way needs a counter of its own. Where there is no more than one unit a cluster, none is drawn and none is needed.
// (OWNED: every unit is drawn, and one number more by each cluster, so it wraps behind units + clusters - 1.)
//
// Ordering argument, barrier by barrier
//   wanted    1 arrival: the first CTA's producer asks for a ticket. It asks again only after it has read that one, so no request is lost.
//   ready[s]  1 arrival + 16 bytes, by the drawing warp (deliver.cuh). All who walk wait for it, then read ticket s.
//   reuse     tickets need no barrier of their own: the ring of operands holds the walkers together. Say ticket t + 1 is sent while tile t is
//             being loaded (tile 0 has no ticket; OWNED: one that is sent before all else). All but the last STAGES steps before tile t have
//             been released by those who read them in both CTAs, and a tile has at least one step, so tile t - 1 - STAGES has been released whole, and (PINGPONG) tile t - 2 - STAGES
//             by the other warpgroup. Who releases a step of a tile has read its ticket and all before, producers included, for they loaded
//             it. So ticket t - 2 - STAGES has been read by all, and ticket t + 1 may take its place: STAGES + 3 slots.
#pragma once
#include "../common/cluster.cuh"
#include "../common/deliver.cuh"
#include "../common/mbarrier.cuh"
#include "config.cuh"
#include "raster.cuh"

namespace matmul {

struct alignas(16) Ticket {
    int m, n, batch;  // as in Work
    int unit;         // -1: there are no more
};

// Of a CTA, behind Barriers in shared memory.
template <class C>
struct Tickets {
    static constexpr int SLOTS = C::STAGES + 3;
    Ticket ticket[SLOTS];
    mbarrier_t ready[SLOTS];
    mbarrier_t wanted;

    // One thread.
    __device__ __forceinline__ void init() {
        for (int s = 0; s < SLOTS; ++s) mbarrier_init(&ready[s], 1);
        mbarrier_init(&wanted, 1);
    }

    // The ticket at `at`, once it is there.
    __device__ __forceinline__ Ticket take(RingState<SLOTS>& at) {
        mbarrier_wait(&ready[at.slot], at.parity);
        const Ticket found = ticket[at.slot];
        at.advance();
        return found;
    }
};

// The work of a CTA as Walk gives it, in the order in which its cluster draws.
template <class C>
struct Drawn {
    Walk<C> fixed;  // the first unit
    Tickets<C>& tickets;
    RingState<Tickets<C>::SLOTS> at;
    bool begun;

    __device__ __forceinline__ Drawn(const Problem& problem, Tickets<C>& sent) : fixed(problem), tickets(sent), at(0), begun(C::OWNED) {}

    __device__ __forceinline__ bool draws() const { return C::OWNED || fixed.units > fixed.stride; }

    __device__ __forceinline__ bool next(Work& work) {
        if (!begun) {
            begun = true;
            return fixed.next(work);
        }
        if (C::OWNED && fixed.run.rest(work)) return true;
        if (!draws()) return false;
        const Ticket ticket = tickets.take(at);
        if (ticket.unit < 0) return false;
        if (C::OWNED && ticket.unit < fixed.p.split_units) {
            fixed.run.begin(ticket.unit, work);
            return true;
        }
        work = Work{ticket.m, ticket.n, ticket.batch, 0, fixed.p.k_steps, 0, -1};
        return true;
    }

    // Asks for the next ticket if it is time to, before the loads of step `step` of `work`. The producer of the first CTA.
    __device__ __forceinline__ void want(const Work& work, int step) const {
        if (C::OWNED && fixed.run.pending_count > 0) return;  // a run is one unit
        if (step == max(work.k_count - C::AHEAD, 0) && draws()) mbarrier_arrive(&tickets.wanted);
    }
};

// The order in which a CTA works.
template <class C>
__device__ __forceinline__ auto order_of(const Problem& p, Tickets<C>& tickets) {
    if constexpr (C::AHEAD > 0) {
        return Drawn<C>(p, tickets);
    } else {
        return Walk<C>(p);
    }
}

// The number of a unit that no other cluster has.
template <class C>
__device__ __forceinline__ unsigned draw_one(const Walk<C>& fixed) {
    const Problem& p = fixed.p;
    if constexpr (C::OWNED) {
        return atomicInc(p.counter, fixed.units + fixed.stride - 1);
    } else {
        return fixed.stride + atomicInc(p.counter, fixed.units - 1);
    }
}

// Draws for both CTAs of the cluster until there are no more units. One thread of the first. `first`: OWNED, what it has drawn already.
template <class C>
__device__ __forceinline__ void draw(const Problem& p, Tickets<C>& tickets, unsigned first) {
    const Walk<C> fixed(p);
    if (!C::OWNED && fixed.units <= fixed.stride) return;
    RingState<Tickets<C>::SLOTS> at(0);
    uint32_t parity = 0;
    unsigned unit = first;
    bool drawn = C::OWNED, more = true;
    while (more) {
        if (!drawn) {
            mbarrier_wait(&tickets.wanted, parity);
            parity ^= 1;
            unit = draw_one(fixed);
        }
        drawn = false;
        more = unit < static_cast<unsigned>(fixed.units);
        Place place{};
        if (more) place = place_of(p, fixed.tile_of(static_cast<int>(unit)));
#pragma unroll
        for (int rank = 0; rank < C::CLUSTER; ++rank)
            deliver(&tickets.ticket[at.slot], &tickets.ready[at.slot], rank, (place.m * C::CLUSTER + rank) * C::BM, place.n, place.batch,
                    more ? static_cast<int>(unit) : -1);
        at.advance();
    }
}

}  // namespace matmul
