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
    int split_units;   // into so many equal runs of k steps (at least split_tiles, so that a run touches at most two tiles);
                       // split_tiles * k_steps * split_units is below 2^31
    const __nv_bfloat16* bias;
    float* workspace;  // (split_units + split_tiles) * CLUSTER tiles of [BM][BN] partial sums; OWNED: split_units * CLUSTER (parts.cuh)
    unsigned* counter;  // of draws (tickets.cuh), behind it those of parts (parts.cuh): 0 between launches
    const float* rows;            // ROWS: [m], the factor of each row, or what is taken from its elements before they become powers
    float* sums;                  // ROWS powers: [tiles_n][m], of the powers of a row in a tile
    const float* factors;         // ROWS blend: [m], of the row of `table` that is added to each
    const int* picks;             // which one, [m]; not looked at where the factor is 0
    const __nv_bfloat16* table;   // [any][n]
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
__device__ __forceinline__ int run_begin(const Problem& p, int unit) { return p.split_tiles * p.k_steps * unit / p.split_units; }

// The run that holds linear k step `step`: the last one that begins at or before it.
__device__ __forceinline__ int run_of(const Problem& p, int step) {
    return ((step + 1) * p.split_units - 1) / (p.split_tiles * p.k_steps);
}

// Workspace slot of the part of `tile` that run `unit` computes: (unit, tile) pairs in order advance one of the two by one, so that the
// sum numbers them without gaps.
__device__ __forceinline__ int slot_of(int unit, int tile) { return unit + tile; }

// A row of k steps of one tile.
struct Work {
    int m, n, batch;               // first row of this CTA, tile column, batch index
    int k_turn, k_count, k_first;  // steps k_first .. k_first + k_count - 1, beginning k_turn after the first
    int slot;                      // where its sums are left in the workspace, or -1: C is written. OWNED: the run
    int tile, takes;               // OWNED: which tile, and how many parts of it (those of the runs before this one) are added to these sums;
                                   // -1: they are left for another run to add

    // The k step that is done as number `i`.
    __device__ __forceinline__ int step(int i) const {
        const int turned = i + k_turn;
        return k_first + (turned < k_count ? turned : turned - k_count);
    }

    // Turns to a place.
    template <class C>
    __device__ __forceinline__ void at(const Place& place) {
        batch = place.batch;
        n = place.n;
        m = (place.m * C::CLUSTER + (C::CLUSTER == 2 ? static_cast<int>(ptx::cluster_rank()) : 0)) * C::BM;
    }
};

// A run of split tiles: one part, or two that lie in neighbouring tiles.
//
// Runs all begin at once, at k steps that have nothing to do with each other; done in their natural order, CTAs that share operands would
// read them at different times and L2 would not help. So the order inside a run of q steps follows one clock: a part inside one tile begins
// at its first multiple of q and wraps around, and of a run over two tiles the beginning of the later one comes first. At time t everyone is
// then at a k step of t (modulo q, up to one constant). The order is a function of the problem alone.
template <class C>
struct Run {
    const Problem& p;
    int unit;
    int pending, pending_count;  // linear steps that are still to do (those in its earlier tile)

    __device__ __forceinline__ explicit Run(const Problem& problem) : p(problem), unit(0), pending(0), pending_count(0) {}

    // Begins run `number`; `work`: what comes first.
    __device__ __forceinline__ void begin(int number, Work& work) {
        unit = number;
        const int first = run_begin(p, unit);
        const int length = run_begin(p, unit + 1) - first;
        const int tile = (first + length - 1) / p.k_steps;
        const int border = tile * p.k_steps;
        part(tile, max(first, border), first + length - max(first, border), work);
        const int turn = (work.k_first + length - 1) / length * length - work.k_first;
        work.k_turn = turn < work.k_count ? turn : 0;
        pending = first;
        pending_count = max(border - first, 0);
    }

    // False if nothing of it is left; `work`: the rest.
    __device__ __forceinline__ bool rest(Work& work) {
        if (pending_count == 0) return false;
        part(pending / p.k_steps, pending, pending_count, work);
        work.k_turn = 0;
        pending_count = 0;
        return true;
    }

    // `count` linear steps from `first` on, all of `tile`. OWNED: whoever has its last steps writes C.
    __device__ __forceinline__ void part(int tile, int first, int count, Work& work) const {
        work.at<C>(place_of(p, tile));
        work.k_first = first - tile * p.k_steps;
        work.k_count = count;
        if constexpr (C::OWNED) {
            const bool last = work.k_first + count == p.k_steps;
            work.slot = unit;
            work.tile = tile;
            work.takes = last ? unit - run_of(p, tile * p.k_steps) : -1;
        } else {
            work.slot = slot_of(unit, tile);
        }
    }
};

// The work of a persistent CTA (cluster), in order: units first, first + stride, ... Producer and consumers walk the same sequence.
template <class C>
struct Walk {
    const Problem& p;
    int unit, units, stride;
    Run<C> run;

    __device__ __forceinline__ explicit Walk(const Problem& problem) : p(problem), run(problem) {
        stride = static_cast<int>(gridDim.x) / C::CLUSTER;
        unit = static_cast<int>(blockIdx.x) / C::CLUSTER - stride;
        units = C::SPLIT ? p.split_units + p.tiles - p.split_tiles : p.tiles;
    }

    // The tile of a unit that is no run.
    __device__ __forceinline__ int tile_of(int number) const { return C::SPLIT ? number - p.split_units + p.split_tiles : number; }

    __device__ __forceinline__ bool next(Work& work) {
        if (C::SPLIT && run.rest(work)) return true;
        unit += stride;
        if (unit >= units) return false;
        if (C::SPLIT && unit < p.split_units) {
            run.begin(unit, work);
            return true;
        }
        work.k_first = 0;
        work.k_count = p.k_steps;
        work.k_turn = 0;
        work.slot = -1;
        work.at<C>(place_of(p, tile_of(unit)));
        return true;
    }
};

}  // namespace matmul
