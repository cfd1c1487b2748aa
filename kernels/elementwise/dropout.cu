// Dropout of bf16 on Philox4x32-10, keyed as alpha/ops/dropout.py: an element is dropped iff its word is below `threshold`; what is kept is
// scaled. The same launch on the cotangent is the backward pass. y may be x.
//
// Work. `positions` elements per sample. Where they are a multiple of 8, dropout_map: a thread takes DEEP vectors of 16 bytes,
//   which never straddle samples, and one Philox block per 4 elements; else dropout_ragged, an element and a Philox block per thread.
// Bytes. 4 each; outputs leave L2 first (common/once.cuh). About 18 integer instructions per element. No barrier.
#include "../common/once.cuh"
#include "../common/philox.cuh"

constexpr int THREADS = 128;
constexpr int DEEP = 4;

using vec::Bf16;
constexpr int N = vec::PER<Bf16>;
using Pack = vec::Group<Bf16, N>;

struct Problem {
    const Bf16* x;
    Bf16* y;
    const int* step;
    const int* samples;
    long long positions, count;  // per sample; in all
    unsigned int seed, purpose;
    unsigned int threshold;
    float scale;
    vec::Divisor per_sample;  // dropout_map: positions / N
};

__device__ __forceinline__ uint4 noise(const Problem& p, unsigned long long group, int sample, int step) {
    return philox::words(make_uint4(static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32), static_cast<uint32_t>(sample),
                                    static_cast<uint32_t>(step)),
                         make_uint2(p.seed, p.purpose));
}

extern "C" __global__ void __launch_bounds__(THREADS, 8) dropout_map(const __grid_constant__ Problem p) {
    const unsigned int vectors = static_cast<unsigned int>(p.count / N);
    const unsigned int first = blockIdx.x * (THREADS * DEEP) + threadIdx.x;
    const int step = __ldg(p.step);
    Pack x[DEEP];
#pragma unroll
    for (int d = 0; d < DEEP; ++d) x[d].load(p.x + static_cast<size_t>(min(first + d * THREADS, vectors - 1)) * N);
#pragma unroll
    for (int d = 0; d < DEEP; ++d) {
        const unsigned int v = first + d * THREADS;
        if (v >= vectors) return;
        const unsigned int row = p.per_sample.quotient(v);
        const unsigned long long group = static_cast<unsigned long long>(v - row * p.per_sample.value) * (N / 4);
        const int sample = __ldg(p.samples + row);
        float y[N];
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const uint4 w = noise(p, group + i / 4, sample, step);
            y[i] = w.x >= p.threshold ? x[d][i] * p.scale : 0.0f;
            y[i + 1] = w.y >= p.threshold ? x[d][i + 1] * p.scale : 0.0f;
            y[i + 2] = w.z >= p.threshold ? x[d][i + 2] * p.scale : 0.0f;
            y[i + 3] = w.w >= p.threshold ? x[d][i + 3] * p.scale : 0.0f;
        }
        Pack out;
        out.set(y);
        vec::store_once(p.y + static_cast<size_t>(v) * N, out);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) dropout_ragged(const __grid_constant__ Problem p) {
    const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= p.count) return;
    const long long row = at / p.positions, position = at % p.positions;
    const uint4 w = noise(p, static_cast<unsigned long long>(position) / 4, __ldg(p.samples + row), __ldg(p.step));
    const uint32_t word = position % 4 == 0 ? w.x : position % 4 == 1 ? w.y : position % 4 == 2 ? w.z : w.w;
    p.y[at] = vec::from_float<Bf16>(word >= p.threshold ? vec::as_float(p.x[at]) * p.scale : 0.0f);
}
