// Elementwise maps of flat buffers: y = a + b (accumulation: y is a), y = a * factor, y = a in another type, y = value.
//
// Compile-time parameters
//   MAP_OP   0: add;  1: scale by a constant;  2: cast;  3: fill;  4: scale by a device scalar
//   MAP_A, MAP_B, MAP_Y   types of a, b, y: 0: bf16;  1: fp32 (unused ones 0)
//
// Work. A thread takes DEEP groups of N neighbouring elements (8 where y is bf16, else 4), a CTA's width apart, all loads
//   before the first use; the last elements of a buffer that is no multiple of N go one by one. Arithmetic in fp32, one rounding. y may be
//   a or b: an element is read and written by one thread, in that order. No barrier.
// Bytes. Each input and output once. Registers: 4 DEEP (or 8) per input, about 24 the rest.
#include "../common/vector.cuh"

constexpr int OP = MAP_OP;
constexpr int THREADS = 256;

using A = vec::Element<MAP_A != 0>::type;
using B = vec::Element<MAP_B != 0>::type;
using Y = vec::Element<MAP_Y != 0>::type;
// 8 elements of bf16 results; 4 of fp32 ones, so that a warp's store leaves no gaps
constexpr int N = sizeof(Y) == 2 ? 8 : 4;
constexpr int DEEP = sizeof(Y) == 4 && OP != 3 && sizeof(A) == 2 ? 8 : 4;

struct Problem {
    const A* a;
    const B* b;
    Y* y;
    const float* scalar;  // OP 4
    long long count;
    float factor;
};

__device__ __forceinline__ float apply(float a, float b, float factor) {
    return OP == 0 ? a + b : OP == 1 || OP == 4 ? a * factor : OP == 2 ? a : factor;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) elementwise_map(const __grid_constant__ Problem p) {
    const long long whole = p.count / N;
    const long long first = static_cast<long long>(blockIdx.x) * (THREADS * DEEP) + threadIdx.x;
    const float factor = OP == 4 ? __ldg(p.scalar) : p.factor;
    if (first < whole) {
        vec::Group<A, N> a[DEEP];
        vec::Group<B, N> b[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
            // past the end the last group is loaded again and not written: loads need no branch
            const long long at = min(first + d * THREADS, whole - 1) * N;
            if (OP != 3) a[d].load(p.a + at);
            if (OP == 0) b[d].load(p.b + at);
        }
#pragma unroll
        for (int d = 0; d < DEEP; ++d) {
            const long long group = first + d * THREADS;
            if (group < whole) {
                float y[N];
#pragma unroll
                for (int i = 0; i < N; ++i) y[i] = apply(OP != 3 ? a[d][i] : 0.0f, OP == 0 ? b[d][i] : 0.0f, factor);
                vec::Group<Y, N> out;
                out.set(y);
                out.store(p.y + group * N);
            }
        }
    }
    const long long rest = whole * N + threadIdx.x;
    if (blockIdx.x == 0 && rest < p.count) {
        const float a = OP != 3 ? vec::as_float(p.a[rest]) : 0.0f;
        const float b = OP == 0 ? vec::as_float(p.b[rest]) : 0.0f;
        p.y[rest] = vec::from_float<Y>(apply(a, b, factor));
    }
}
