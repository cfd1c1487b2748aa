// Packed documents: which places of one side belong to the document of each position of the other. Ahead of the attention kernels.
//
//   attn_documents   start[b][i] = number of ids in `in[b]` below of[b][i], end[b][i] = number of them not above it. So where ids do not
//                    fall along `in[b]`, places start .. end - 1 are those with the same id (none where end = start), and where they do not
//                    fall along `of[b]` either, start and end do not fall with i, which spans.cuh builds on.
//   attn_refuse      after the forward pass. A row of the batch whose ids fall cannot be answered by spans: attn_documents gives it spans
//                    of everything, so that the tiles stay sound, and this makes its o and lse NaN, so that the loss shows it.
//
// Work. attn_documents: a CTA of 1024 threads per 1024 positions; each reads both rows of ids once to see whether they fall (coalesced,
//   from L2), then a thread per position searches by halves. attn_refuse: a CTA per row of the batch; it reads the ids and mostly ends
//   there.
// Registers: under 32, no shared memory. Ordering: one barrier, the vote, which every thread reaches; nothing that one thread writes is
//   read by another within a launch. Launches of one stream follow one another. Bits depend on nothing but ids.

namespace attn {

// Whether ids fall anywhere in this thread's share of a row of n.
__device__ __forceinline__ bool falls(const int* ids, int n) {
    bool found = false;
    for (int i = 1 + threadIdx.x; i < n; i += blockDim.x) found |= ids[i] < ids[i - 1];
    return found;
}

// How many of n ids that do not fall lie below `id`, or, with `equal`, not above it.
__device__ __forceinline__ int count_below(const int* ids, int n, int id, bool equal) {
    int from = 0;
    while (n > 0) {
        const int half = n / 2, x = ids[from + half];
        const bool below = equal ? x <= id : x < id;
        from += below ? half + 1 : 0;
        n = below ? n - half - 1 : half;
    }
    return from;
}

}  // namespace attn

// of [B, n], in [B, m], start, end [B, n]. Grid (B times n / 1024 rounded up).
extern "C" __global__ void __launch_bounds__(1024) attn_documents(const int* of, const int* in, int* start, int* end, int n, int m) {
    const int parts = (n + blockDim.x - 1) / blockDim.x, b = blockIdx.x / parts, i = blockIdx.x % parts * blockDim.x + threadIdx.x;
    of += static_cast<long>(b) * n;
    in += static_cast<long>(b) * m;
    const bool refused = __syncthreads_or(attn::falls(of, n) || attn::falls(in, m));
    if (i >= n) return;
    const long at = static_cast<long>(b) * n + i;
    start[at] = refused ? 0 : attn::count_below(in, m, of[i], false);
    end[at] = refused ? m : attn::count_below(in, m, of[i], true);
}

// of [B, n], in [B, m]; lse [B, H, n] fp32; o bf16, strides in elements: batch, position, head. Grid (B).
extern "C" __global__ void __launch_bounds__(1024) attn_refuse(const int* of, const int* in, float* lse, unsigned short* o, long batch,
                                                               long position, long head, int n, int m, int heads, int width) {
    const int b = blockIdx.x;
    if (!__syncthreads_or(attn::falls(of + static_cast<long>(b) * n, n) || attn::falls(in + static_cast<long>(b) * m, m))) return;
    for (int h = 0; h < heads; ++h) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            lse[(static_cast<long>(b) * heads + h) * n + i] = __int_as_float(0x7fffffff);
            for (int d = 0; d < width; ++d) o[b * batch + i * position + h * head + d] = 0x7fff;
        }
    }
}
