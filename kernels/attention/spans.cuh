// Which query sees which key, which blocks a tile of rows walks, how tiles are numbered, and masks. Nothing of the machine, so that the host
// can compile it too and walk the same tiles (suites/unit/test_attention_tiles.py).
//
// Both ends of a row's span must not fall from row to row. Causal, window and lengths give that; the bounds of documents give it where
// ids do not fall (documents.cu). It bounds a tile by its first and last row, and keeps a consumer's blocks among those that its CTA loads:
// producer and consumers count the same blocks, or they would wait for each other.
#pragma once

namespace attn {

constexpr int UNBOUNDED = 1 << 29;  // a window side that never binds

// Passed by value, after the tensor maps.
struct Params {
    float* lse;              // [B, H, Sq] natural logarithm; -inf where no key is visible
    float* lse2;             // backward workspace [B*H, Spad]: lse * log2(e), +inf where no key is visible and beyond Sq
    float* delta;            // backward workspace [B*H, Spad]: rowsum(dO * O), 0 beyond Sq
    int* queue;              // two ints, zero before the first launch; every launch leaves them zero
    const int* doc_start;    // forward, dq [B, Sq]: first key of each query's document; dkv [B, Sk]: first query of each key's; or null
    const int* doc_end;      // the same: one past the last
    int B, H, Hkv, Sq, Sk, Spad;
    int left, right;         // query i sees keys i + Sk - Sq - left .. i + Sk - Sq + right
    int section;             // heads walked together, so that their K and V stay in L2
    float scale;             // of the logits, > 0
};

struct Span { int lo, hi; };  // inclusive; empty when lo > hi

__device__ __forceinline__ Span keys_of(const Params& p, int b, int i) {
    i = min(i, p.Sq - 1);
    const int at = i + p.Sk - p.Sq;
    Span s{max(0, at - p.left), min(p.Sk - 1, at + p.right)};
    if (p.doc_start) s = Span{max(s.lo, p.doc_start[(long)b * p.Sq + i]), min(s.hi, p.doc_end[(long)b * p.Sq + i] - 1)};
    return s;
}
__device__ __forceinline__ Span queries_of(const Params& p, int b, int j) {
    j = min(j, p.Sk - 1);
    const int at = j - (p.Sk - p.Sq);
    Span s{max(0, at - p.right), min(p.Sq - 1, at + p.left)};
    if (p.doc_start) s = Span{max(s.lo, p.doc_start[(long)b * p.Sk + j]), min(s.hi, p.doc_end[(long)b * p.Sk + j] - 1)};
    return s;
}

// Blocks of N columns that a tile of rows [r0, r1] touches, and those among them that need no mask. Both ends of a row's span
// grow with the row, so the first and the last row bound all of them.
struct Blocks { int begin, end, clear_lo, clear_hi; };
template <int N> __device__ __forceinline__ Blocks blocks(Span first, Span last) {
    Blocks r;
    r.begin = first.lo / N;
    r.end = last.hi < 0 ? 0 : last.hi / N + 1;
    if (r.end < r.begin) r.end = r.begin;
    r.clear_lo = (last.lo + N - 1) / N;
    r.clear_hi = first.hi < 0 ? 0 : (first.hi + 1) / N;
    return r;
}

// Tiles are numbered section by section, inside a section by block, inside a block by head: heads of a section share L2, and
// with `reversed` the longest blocks of a causal problem come first.
struct Tile { int block, head; };
__device__ __forceinline__ Tile tile_at(int index, int nblocks, int nheads, int section, bool reversed) {
    const int s = index / (section * nblocks), rest = index - s * section * nblocks;
    const int width = min(section, nheads - s * section);
    const int blk = rest / width;
    return Tile{reversed ? nblocks - 1 - blk : blk, s * section + rest - blk * width};
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Takes columns outside their row's span out of a fragment (its layout: parts.cuh) that begins at column col0; r0, r1: spans of the
// thread's two rows.
template <int N> __device__ __forceinline__ void mask(float (&s)[N / 2], int col0, Span r0, Span r1) {
    const int c0 = col0 + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int c = c0 + 8 * j + e;
            if (c < r0.lo || c > r0.hi) s[4 * j + e] = -infinity();
            if (c < r1.lo || c > r1.hi) s[4 * j + 2 + e] = -infinity();
        }
    }
}

}  // namespace attn
