// Items, places and turns of the one-pass backward (one_pass.cu). Nothing of the machine, so that the host can compile it too and play the
// roles of a launch with it (suites/unit/test_attention_one_pass.py).
//
// An item is 128 keys of one kv head. It adds its share to dQ of every block of 64 queries that sees any of them. A block adds its blocks
// of keys in rising order, whoever has them, so its bits are fixed.
//
// Items are numbered by Tile: section by section of heads, inside by block of keys in rising order, inside by head. What an item waits for
// has a lower number. Items are drawn from one counter, so it was drawn before, by a CTA that runs: no deadlock with any number of CTAs,
// nor when some of them start only after others have ended.
//
// `ring` heads have a place where dQ is summed, at least those of a section. Head h takes the place of head h - ring, whose items all have
// lower numbers, once its sums have been read.
#pragma once
#include "spans.cuh"

namespace attn {

namespace one_pass {

constexpr int BQ = 64, KEYS = 128;  // queries of a block, keys of an item

// Where dQ is summed, passed by value after Params.
struct Sums {
    float* partial;     // [ring][group][mblocks][8][128][4], the layout of the accumulator
    int* turn;          // [ring][group][mblocks]: additions made to a place since the launch began
    int ring, mblocks;  // heads with a place; blocks of queries
};

struct Item {
    int n, b, hk, place, generation;
    Blocks m;  // the blocks of queries that see any of its keys
};
__device__ __forceinline__ Item item_at(const Params& p, const Sums& u, int t, int nblocks, int nheads) {
    const Tile tile = tile_at(t, nblocks, nheads, p.section, false);
    Item it;
    it.n = tile.block;
    it.b = tile.head / p.Hkv;
    it.hk = tile.head - it.b * p.Hkv;
    it.generation = tile.head / u.ring;
    it.place = tile.head - it.generation * u.ring;
    it.m = blocks<BQ>(queries_of(p, it.b, it.n * KEYS), queries_of(p, it.b, it.n * KEYS + KEYS - 1));
    return it;
}

// The blocks of keys that add to dQ of block i of the queries, the first and the last.
struct Order { int first, last; };
__device__ __forceinline__ Order order_of(const Params& p, int b, int i) {
    return Order{keys_of(p, b, i * BQ).lo / KEYS, keys_of(p, b, i * BQ + BQ - 1).hi / KEYS};
}

// Additions that come before this item's: those of the heads that had the place, and those of earlier keys.
__device__ __forceinline__ int turn_of(const Item& it, Order o) { return it.generation * (o.last - o.first + 1) + it.n - o.first; }

// The sum of block i for the g-th query head of the item's group.
__device__ __forceinline__ int sum_at(const Sums& u, const Item& it, int group, int g, int i) {
    return (it.place * group + g) * u.mblocks + i;
}

}  // namespace one_pass

}  // namespace attn
