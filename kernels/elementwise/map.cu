// Elementwise maps of flat buffers: y = a + b (accumulation: y is a), y = a * factor, y = a in another type.
//
// Compile-time parameters
//   MAP_OP   0: add;  1: scale by a constant;  2: cast
//   MAP_A, MAP_B, MAP_Y   types of a, b, y: 0: bf16;  1: fp32 (b where there is none: 0)
//
// Work. A thread takes one group of N neighbouring elements (8 where y is bf16, else 4: 16 bytes of y), and what leads to speed is the
//   narrow front on which a grid of many short CTAs walks through memory: four groups a thread, loaded at once, are 6 to 11 % slower. The
//   last elements of a buffer that is no multiple of N go one by one. Arithmetic in fp32, one rounding. y may be a or b: an element is
//   read and written by one thread, in that order. No barrier.
// Bytes. Each input and output once; outputs leave L2 first (common/once.cuh). Registers: 4 to 8 per input, about 20 the rest.
#include "../common/once.cuh"

constexpr int OP = MAP_OP;
constexpr int THREADS = 256;

using A = vec::Element<MAP_A != 0>::type;
using B = vec::Element<MAP_B != 0>::type;
using Y = vec::Element<MAP_Y != 0>::type;
constexpr int N = sizeof(Y) == 2 ? 8 : 4;

struct Problem {
    const A* a;
    const B* b;
    Y* y;
    const void* unused;
    long long count;
    float factor;
};

__device__ __forceinline__ float apply(float a, float b, float factor) {
    return OP == 0 ? a + b : OP == 1 ? a * factor : a;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) elementwise_map(const __grid_constant__ Problem p) {
    const long long whole = p.count / N;
    const long long group = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (group < whole) {
        vec::Group<A, N> a;
        vec::Group<B, N> b;
        a.load(p.a + group * N);
        if (OP == 0) b.load(p.b + group * N);
        float y[N];
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] = apply(a[i], OP == 0 ? b[i] : 0.0f, p.factor);
        vec::Group<Y, N> out;
        out.set(y);
        vec::store_once(p.y + group * N, out);
    }
    const long long rest = whole * N + threadIdx.x;
    if (blockIdx.x == 0 && rest < p.count) {
        const float a = vec::as_float(p.a[rest]);
        const float b = OP == 0 ? vec::as_float(p.b[rest]) : 0.0f;
        p.y[rest] = vec::from_float<Y>(apply(a, b, p.factor));
    }
}
