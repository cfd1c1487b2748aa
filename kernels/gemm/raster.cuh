// Which tile is where: the one definition that the GEMM and the reduction of its split tiles share.
#pragma once
#include <cuda_bf16.h>

#include "../common/cluster.cuh"

namespace matmul {

// Passed by value to the kernels of this folder.
struct Problem {
    int m, n;          // C, in elements
    int k_steps;       // ceil(K / 64)
    int tiles_m;       // in units of CLUSTER * BM rows
    int tiles_n;       // in units of a tile's output columns
    int tiles;         // tiles_m * tiles_n * batch
    int group;         // rows (or columns) of tiles walked together, so that their operands meet in L2
    int along_n;       // 0: groups of tile rows; 1: groups of tile columns
    int split_tiles;   // the first so many tiles are cut along K
    int split_units;   // into so many equal runs of k steps (at least split_tiles, so that a run touches at most two tiles)
    const __nv_bfloat16* bias;
    float* workspace;  // (split_units + split_tiles) * CLUSTER tiles of [BM][BN] partial sums
    unsigned* counter;  // of draws (tickets.cuh): 0 between launches
};

// A tile: row and column in tile units (rows in units of CLUSTER * BM), batch index.
struct Place {
    int m, n, batch;
};

// Tiles are walked in groups of `group` rows (columns), inside a group across first.
__device__ __forceinline__ Place place_of(const Problem& p, int tile) {
    Place place;
    const int per_batch = p.tiles_m * p.tiles_n;
    place.batch = tile / per_batch;
    int rest = tile - place.batch * per_batch;
    const int across = p.along_n ? p.tiles_n : p.tiles_m;
    const int along = p.along_n ? p.tiles_m : p.tiles_n;
    const int per_group = p.group * along;
    const int group = rest / per_group;
    rest -= group * per_group;
    const int width = min(p.group, across - group * p.group);
    const int a = rest / width;
    const int c = group * p.group + rest - a * width;
    place.m = p.along_n ? a : c;
    place.n = p.along_n ? c : a;
    return place;
}

// First linear k step (over all split tiles) of run `unit`.
__device__ __forceinline__ int run_begin(const Problem& p, int unit) {
    return static_cast<int>(static_cast<long long>(p.split_tiles) * p.k_steps * unit / p.split_units);
}

// The run that holds linear k step `step`: the last one that begins at or before it.
__device__ __forceinline__ int run_of(const Problem& p, int step) {
    return static_cast<int>((static_cast<long long>(step + 1) * p.split_units - 1) / (static_cast<long long>(p.split_tiles) * p.k_steps));
}

// Workspace slot of the part of `tile` that run `unit` computes: (unit, tile) pairs in order advance one of the two by one, so that the
// sum numbers them without gaps.
__device__ __forceinline__ int slot_of(int unit, int tile) { return unit + tile; }

// One run of k steps of one tile.
struct Work {
    int m, n, batch;  // first row of this CTA, tile column, batch index
    int k_turn, k_count, k_first;  // steps k_first .. k_first + k_count - 1, beginning k_turn after the first
    int slot;                      // workspace slot, or -1: the whole tile

    // The k step that is done as number `i`.
    __device__ __forceinline__ int step(int i) const {
        const int turned = i + k_turn;
        return k_first + (turned < k_count ? turned : turned - k_count);
    }
};

// The work of a persistent CTA (cluster), in order: units first, first + stride, ... Producer and consumers walk the same sequence.
//
// Runs of split tiles all begin at once, at k steps that have nothing to do with each other; done in their natural order, CTAs that share
// operands would read them at different times and L2 would not help. So the order inside a run of q steps follows one clock: a part inside
// one tile begins at its first multiple of q and wraps around, and of a run over two tiles the beginning of the later one comes first. At
// time t everyone is then at a k step of t (modulo q, up to one constant). The order is a function of the problem alone.
template <class C>
struct Walk {
    const Problem& p;
    int unit, units, stride;
    int pending, pending_count;  // linear steps of the current run that are still to do (those in its earlier tile)

    __device__ __forceinline__ explicit Walk(const Problem& problem) : p(problem), pending(0), pending_count(0) {
        stride = static_cast<int>(gridDim.x) / C::CLUSTER;
        unit = static_cast<int>(blockIdx.x) / C::CLUSTER - stride;
        units = C::SPLIT ? p.split_units + p.tiles - p.split_tiles : p.tiles;
    }

    __device__ __forceinline__ bool next(Work& work) {
        int tile;
        if (C::SPLIT && pending_count > 0) {
            tile = pending / p.k_steps;
            work.k_first = pending - tile * p.k_steps;
            work.k_count = pending_count;
            work.k_turn = 0;
            work.slot = slot_of(unit, tile);
            pending_count = 0;
        } else {
            unit += stride;
            if (unit >= units) return false;
            if (C::SPLIT && unit < p.split_units) {
                const int first = run_begin(p, unit);
                const int length = run_begin(p, unit + 1) - first;
                tile = (first + length - 1) / p.k_steps;
                const int border = tile * p.k_steps;
                work.k_first = max(first - border, 0);
                work.k_count = first + length - max(first, border);
                const int turn = (work.k_first + length - 1) / length * length - work.k_first;
                work.k_turn = turn < work.k_count ? turn : 0;
                work.slot = slot_of(unit, tile);
                pending = first;
                pending_count = max(border - first, 0);
            } else {
                tile = C::SPLIT ? unit - p.split_units + p.split_tiles : unit;
                work.k_first = 0;
                work.k_count = p.k_steps;
                work.k_turn = 0;
                work.slot = -1;
            }
        }
        const Place place = place_of(p, tile);
        work.batch = place.batch;
        work.n = place.n;
        work.m = (place.m * C::CLUSTER + (C::CLUSTER == 2 ? static_cast<int>(ptx::cluster_rank()) : 0)) * C::BM;
        return true;
    }
};

}  // namespace matmul
